"""A sparsity that follows the network: the bandwidth is halved in mid-run.

    sudo .venv/bin/python benchmarks/adaptive.py

Each host is a network namespace of this machine (hosts.py), with one process in it that trains over torch.distributed
(gloo) with ``dgc.adaptive``. What is exchanged are fresh gradients of ResNet-50's shapes. In place of computing, the
forward and the backward pass sleep, as a process does whose GPU computes: all hosts share this machine's cores, which
are so left to what DGC itself does. That is compressing and decoding, which nothing hides here, and which takes the
longer the more hosts there are on a core.

*Computing alone* is the median step of as many processes that do all but the exchange: they sleep, draw the gradients,
and take the step of SGD. A step ends where the next one begins, and its time is that of the slowest rank. There is no
propagation delay, and buckets are shallow, so that also short messages keep the rate.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from hosts import Network, check_tools, clean_leftovers, run_script, shape_link
from network import METHODS, exchanges, sgd
from outfile import write

HERE = Path(__file__).resolve()
OPTIONS: dict[str, Any] = {}  # of dgc.Config
ALONE = 20  # steps without an exchange; the first 5 are not counted
FOLLOWS = 1.25  # a density has followed when it is within this factor of the one that it settles at
WITHIN = 1.15  # of computing alone


def work(a: dict[str, Any]) -> None:
    """One rank: writes the sparsity and the seconds of each step."""
    import torch

    import dgc

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "e0"
    torch.distributed.init_process_group(
        "gloo", "tcp://10.0.0.1:5001", rank=a["rank"], world_size=a["hosts"]
    )
    METHODS["alone"] = lambda model, _: (model, sgd(model))
    options = {**OPTIONS, "sparsity": dgc.schedule.parse(a["schedule"])}
    seconds, sparsities, rates = [], [], dict(a["rates"])
    began = time.perf_counter()
    for step, update, optimizer in exchanges(
        a["method"], options, a["rank"], "resnet50", a["compute"]
    ):
        if (mbit := rates.get(len(seconds))) is not None:
            shape_link(f"{mbit:g}mbit", f"{max(8, round(24 * mbit / 1000))}kb")
        sparsities.append(optimizer.param_groups[0].get("dgc_sparsity"))
        step()
        update()
        seconds.append(time.perf_counter() - began)
        began += seconds[-1]
        if len(seconds) == a["steps"]:
            break
    Path(a["folder"], f"{a['rank']}.json").write_text(
        json.dumps({"seconds": seconds, "sparsities": sparsities, "torch": torch.__version__})
    )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(network: Network, **settings: Any) -> dict[str, Any]:
    """The steps of a fresh group of processes: their sparsities, alike on all ranks, and the slowest rank's seconds."""
    network.clear()
    ranks = network.run(
        HERE, settings, limit=180 + settings["steps"] * (10 * settings["compute"] + 5)
    )
    if any(rank["sparsities"] != ranks[0]["sparsities"] for rank in ranks):
        raise SystemExit("adaptive.py: the ranks did not decide alike")
    return {
        **ranks[0],
        "seconds": [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)],
    }


def figures(
    seconds: list[float], sparsities: list[float], alone: float, change: int
) -> dict[str, Any]:
    """What has to be shown, of a run whose bandwidth changed at step ``change``."""
    densities = [1 - sparsity for sparsity in sparsities]
    settled = statistics.median(densities[(change + len(densities)) // 2 :])
    followed = next(
        (
            i - change
            for i in range(change, len(densities))
            if max(densities[i] / settled, settled / densities[i]) <= FOLLOWS
        ),
        None,
    )

    def of_alone(begin: int, end: int | None) -> float:
        return statistics.median(seconds[begin:end]) / alone

    def within(begin: int, end: int | None) -> float:
        return sum(s <= WITHIN * alone for s in seconds[begin:end]) / len(seconds[begin:end])

    return {
        "sparsity_before": sparsities[change - 1],
        "sparsity_after": 1 - settled,
        "followed_after_steps": followed,
        "step_over_alone_before": of_alone(change // 2, change),
        "step_over_alone_just_after": of_alone(change, change + 10),
        "step_over_alone_after_50": of_alone(change + 50, None),
        "within_before": within(change // 2, change),
        "within_after_50": within(change + 50, None),
    }


def draw(result: dict[str, Any], file: Path) -> None:
    change, rates = result["change"], result["rates"]
    from dgc import drawing

    figure, (upper, lower) = drawing.panels(rows=2, height=4.6, sharex=True)
    sent = [100 * (1 - s) for s in result["sparsities"]]
    upper.step(range(result["steps"]), sent, where="post", color=drawing.DGC)
    upper.set_title(f"entries sent (%); ResNet-50's gradients, {result['hosts']} hosts")
    drawing.log_axis(
        upper,
        "y",
        [
            x
            for x in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
            if min(sent) / 1.6 < x < 1.6 * max(sent)
        ],
    )
    upper.set_ylim(min(sent) / 1.6, 1.2 * max(sent))
    slower = [s / result["alone"] for s in result["seconds"]]
    lower.plot(range(result["steps"]), slower, ".", markersize=4, color=drawing.DGC)
    lower.axhline(1, color=drawing.DENSE)
    lower.axhline(WITHIN, color=drawing.DENSE, linestyle=":")
    lower.set(
        xlabel="step",
        ylim=(0.95, max(1.3, 1.05 * max(slower[1:]))),  # in the first step kernels are compiled
        title=f"times as long as a step of computing alone ({result['alone']:.2f} s)",
    )
    drawing.name_lines(
        lower,
        [
            (text, (result["steps"], y), drawing.DENSE)
            for text, y in (("computing alone", 1.0), (f"{WITHIN:g} times that", WITHIN))
        ],
    )
    for axis in (upper, lower):
        axis.axvline(change, color="black", linewidth=1, linestyle="--")
        axis.set_xlim(0, result["steps"])
    for x, side, rate in ((change - 3, "right", rates[0]), (change + 3, "left", rates[1])):
        upper.text(x, 0.05, f"{rate:g} Mbit/s", ha=side, transform=upper.get_xaxis_transform())
    drawing.save(figure, file)


def main(
    hosts: Annotated[int, typer.Option(min=2, max=200)] = 2,
    rate: Annotated[float, typer.Option(min=1, help="Mbit/s of each link at first.")] = 25,
    then: Annotated[
        float | None, typer.Option(min=1, help="And from mid-run on; default: half of it.")
    ] = None,
    compute: Annotated[float, typer.Option(min=0.01, help="Seconds that a step sleeps.")] = 2.0,
    steps: Annotated[int, typer.Option(min=120, help="In all.")] = 240,
    schedule: Annotated[
        str, typer.Option(help="An adaptive one.")
    ] = "adaptive:least=0.9,most=0.9999,start=0.995",
    out: Annotated[Path, typer.Option(help="JSON; the picture lies beside it.")] = HERE.parent
    / "results"
    / "adaptive.json",
) -> None:
    """Shows how fast the sparsity follows when the bandwidth changes, and what a step takes beside computing alone."""
    check_tools()
    from dgc.schedule import Adaptive, parse

    try:
        chosen = parse(schedule)
    except ValueError as error:
        raise typer.BadParameter(f"--schedule: {error}") from None
    if not isinstance(chosen, Adaptive):
        raise typer.BadParameter(f"--schedule must be an adaptive one, got {schedule!r}")
    clean_leftovers()
    rates, change = (rate, rate / 2 if then is None else then), steps // 2
    with Network(hosts) as network:
        network.shape("1gbit", "shallow")  # its packets are no larger than the wire's
        settings = {"compute": compute, "schedule": schedule}
        free = run(network, method="alone", steps=ALONE, rates=[], **settings)
        alone = statistics.median(free["seconds"][5:])
        print(
            f"computing alone: {1000 * alone:.0f} ms a step, {1000 * compute:.0f} of them asleep",
            flush=True,
        )
        moved = run(
            network,
            method="dgc-torch",
            steps=steps,
            rates=[(0, rates[0]), (change, rates[1])],
            **settings,
        )
    told = figures(moved["seconds"], moved["sparsities"], alone, change)
    result = {
        "benchmark": "adaptive",
        "model": "resnet50",
        "hosts": hosts,
        "rates": rates,
        "compute": compute,
        "schedule": schedule,
        "options": OPTIONS,
        "steps": steps,
        "change": change,
        "alone": alone,
        "alone_seconds": free["seconds"],
        **moved,
        "figures": told,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
    }
    write(out, result)
    draw(result, out.with_suffix(".png"))
    print(
        f"{rates[0]:g} -> {rates[1]:g} Mbit/s at step {change}: sparsity {100 * told['sparsity_before']:.3f} -> "
        f"{100 * told['sparsity_after']:.3f} %, followed after {told['followed_after_steps']} steps\n"
        f"median step over computing alone: {told['step_over_alone_before']:.3f} before, "
        f"{told['step_over_alone_just_after']:.3f} in the first 10 steps after, "
        f"{told['step_over_alone_after_50']:.3f} from 50 steps after\n"
        f"steps within {WITHIN}: {100 * told['within_before']:.0f} % before, {100 * told['within_after_50']:.0f} % "
        f"from 50 steps after\n{out}, {out.with_suffix('.png')}"
    )


if __name__ == "__main__":
    run_script(work, main)
