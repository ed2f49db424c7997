"""Time to a target: trains on hosts with shaped links, with one method after the other.

    sudo .venv/bin/python benchmarks/peers/clock.py --methods dense,dgc-allgather,dgc-allgather-horovod --data DIR

Each host is a network namespace of this machine (hosts.py) with one process of train.py in it, over torch.distributed
(gloo) or Horovod. The clock is rank 0's and runs while it trains: not while it looks at the test images, when all
others wait for it. All hosts share this machine's cores, so that computing is slow and says nothing of a real cluster;
that the methods share it alike is what can be compared. What a host sends goes through a deep bucket where gradients or
parameters travel whole, which flatters them, and else through a shallow one (hosts.py).

A run whose JSON is there is done. One that is killed, or out of time, goes on from its last epoch when the same command
is given again. Where the target is reached before the last epoch, what a method still holds back is not applied.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import job
from hosts import (
    CYCLE,
    RATES,
    Network,
    check_tools,
    clean_leftovers,
    place,
    place_for_horovod,
    run_script,
)
from reproduce import MALLOC

from dgc import drawing
from peers import METHODS, table, tasks, train
from peers.all import done
from peers.predict import NAMES

HERE = Path(__file__).resolve()
HOROVOD = "-horovod"  # after a method's name: over Horovod, and not torch.distributed


def depth_of(method: str) -> str:
    """Of the bucket of the links."""
    return "deep" if METHODS[method].whole else "shallow"


def work(a: dict[str, Any]) -> None:
    """One rank of one training; writes its result into the network's folder."""
    (place_for_horovod if a["horovod"] else place)(a)
    torch.set_num_threads(1)
    options = argparse.Namespace(
        **{**a["training"], "checkpoints": Path(a["training"]["checkpoints"])}, **train.FIXED
    )
    tasks.settle(options)
    result = train.train(options)
    Path(a["folder"], f"{a['rank']}.json").write_text(json.dumps(result))
    if a["horovod"]:
        import horovod.torch as hvd

        hvd.shutdown()  # all ranks, at once
    else:
        torch.distributed.barrier()
    # A server's thread may still wait for a push, which would abort the interpreter at its end.
    os._exit(0)


def run(
    network: Network,
    method: str,
    rate: str,
    options: dict[str, Any],
    file: Path,
    checkpoints: Path,
    limit: float,
) -> None:
    """Trains with a method, and writes its file.

    Raises:
        RuntimeError: a process failed, or the time is up.
    """
    network.clear()
    name = method.removesuffix(HOROVOD)
    network.shape(rate, depth_of(name))
    training = {**options, "method": name, "checkpoints": str(checkpoints), "resume": True}
    result = network.run(HERE, {"training": training, "horovod": name != method}, limit)[0]
    over = ", over Horovod" if name != method else ""
    job.write(
        file,
        {
            **result,
            "title": result["title"] + over,
            "rate": rate,
            "target": options["target"],
            **({"horovod_cycle": CYCLE} if over else {}),
        },
    )
    shutil.rmtree(checkpoints)


def curve(result: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Seconds of training, and the accuracy or validation perplexity at that time."""
    seconds, total = [], 0.0
    for epoch in result["history"]:
        seconds.append(total := total + epoch["seconds"])
    return seconds, [epoch[tasks.metric_of(result).name] for epoch in result["history"]]


def reached(result: dict[str, Any], target: float) -> float | None:
    """Seconds until the first epoch that ends with the target; None if there is none."""
    metric = tasks.metric_of(result)
    return next(
        (
            second
            for second, score in zip(*curve(result), strict=True)
            if metric.reached(score, target)
        ),
        None,
    )


def by_time(results: list[dict[str, Any]]) -> list[tuple[float | None, dict[str, Any]]]:
    """Seconds to the target and the result; of each rate in turn, the first at the target first."""
    found = [(reached(result, result["target"]), result) for result in results]
    return sorted(found, key=lambda one: (RATES[one[1]["rate"]].bits, one[0] or math.inf))


def markdown(results: list[dict[str, Any]]) -> str:
    """The methods of each rate in the order in which they reach the target."""
    metric, target = tasks.metric_of(results[0]), results[0]["target"]
    lines = [
        f"| method | links | seconds to {target:g}{metric.unit} | epochs | last {metric.name} | "
        "seconds of a step | sent in all |",
        "|" + 7 * "---|",
    ]
    for until, result in by_time(results):
        seconds, scores = curve(result)
        lines.append(
            f"| {result['title']} | {NAMES[result['rate']]} | "
            f"{'not reached' if until is None else f'{until:,.0f}'} | "
            f"{len(seconds)} | {scores[-1]:.2f}{metric.unit} | "
            f"{seconds[-1] / len(seconds) / result['steps_per_epoch']:.3f} | "
            f"{result['bytes_sent'] / 1e6:,.1f} MB |"
        )
    return "\n".join(lines) + "\n"


def draw(results: list[dict[str, Any]], out: Path) -> None:
    """Scores against the clock, a panel for each rate; the legend has the seconds to the target."""
    metric, target, rates = (
        tasks.metric_of(results[0]),
        results[0]["target"],
        sorted({r["rate"] for r in results}, key=lambda r: RATES[r].bits),
    )
    figure, grid = drawing.panels(columns=len(rates), height=4.6, sharey=True, squeeze=False)
    for axes, rate in zip(grid[0], rates, strict=True):
        for until, result in by_time([r for r in results if r["rate"] == rate]):
            colour, marker = table.style(result["method"])
            name = f"{result['title']}: {'not reached' if until is None else f'{until:,.0f} s'}"
            axes.plot(
                *curve(result),
                color=colour,
                marker=marker,
                markersize=3,
                linewidth=1.2,
                label=name,
                linestyle="--" if result["launcher"] == "horovod" else "-",
            )
        axes.axhline(target, color="#bbbbbb", linestyle=":", zorder=0)
        axes.set(title=f"links of {NAMES[rate]}", xlabel="seconds of training", xlim=(0, None))
        axes.legend(
            frameon=False,
            loc="upper right" if metric.lower else "lower right",
            fontsize=8,
            title=f"to {target:g}{metric.unit}",
        )
    grid[0][0].set_ylabel(metric.curve)
    if metric.lower:
        low, high = grid[0][0].get_ylim()
        grid[0][0].set_ylim(low, high + 0.4 * (high - low))  # room for the legend
    drawing.save(figure, out)


def main(
    methods: Annotated[
        str, typer.Option(help=f"Of train.py, with commas; NAME{HOROVOD}: over Horovod.")
    ] = "dense,fp16,dgc-allgather",
    rates: Annotated[str, typer.Option(help=f"Of {', '.join(NAMES)}.")] = ",".join(NAMES),
    task: Annotated[str, typer.Option(help=f"Of {', '.join(tasks.TASKS)}.")] = "cifar10",
    target: Annotated[
        float | None,
        typer.Option(
            help="Test accuracy in per cent, or validation perplexity. Default: 85; 115, or 300 of the transformer."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="As train.py takes it. Default: what needs no file.")
    ] = None,
    epochs: Annotated[
        int, typer.Option(min=1, help="At most; the schedule is made for as many.")
    ] = 25,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Of each host. Default: as train.py's.")
    ] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Autocast to bfloat16.")] = False,
    hosts: Annotated[int, typer.Option(min=2, max=200)] = 4,
    seed: job.Seed = 0,
    minutes: Annotated[
        float, typer.Option(min=0, help="After which a method's processes are ended.")
    ] = 600,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the JSONs. Default: peers-clock, or peers-TASK-clock, in benchmarks/results."
        ),
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder of checkpoints. Default: the same in runs.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="PNG of accuracy, or perplexity, against the clock.")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Of the JSONs that are there.")
    ] = False,
) -> None:
    """Trains to a target on shaped links what has not been, and prints a table."""
    fitting = [name + over for name in METHODS if tasks.fits(task, name) for over in ("", HOROVOD)]
    for value, known, option in (
        ([task], tasks.TASKS, "--task"),
        (methods.split(","), fitting, "--methods"),
        (rates.split(","), NAMES, "--rates"),
    ):
        if wrong := [name for name in value if name not in known]:
            raise typer.BadParameter(f"{option} must be of {', '.join(known)}, got {wrong[0]!r}")
    target = tasks.TASKS[task].clock_target if target is None else target
    folder = f"{tasks.folder(task)}-clock"
    results, work = results or HERE.parents[1] / "results" / folder, work or Path("runs") / folder
    asked = {
        "task": task,
        "seed": seed,
        "epochs": epochs,
        "bf16": bf16,
        "workers": hosts,
        "target": target,
        **({} if batch_size is None else {"batch_size": batch_size}),
    }
    files = {
        (method, rate): results / f"{method}-{rate}-{seed}.json"
        for rate in rates.split(",")
        for method in methods.split(",")
    }
    left = {
        one: file
        for one, file in files.items()
        if not done(file, {**asked, "method": one[0].removesuffix(HOROVOD)})
    }
    failed = []
    if left and not report_only:
        check_tools()
        clean_leftovers()
        os.environ.update({**MALLOC, **os.environ})  # the hosts'
        options = {
            **asked,
            "data": data or {"cifar10": "digits"}.get(task),
            "cache": None,
            "depth": None,
            "batch_size": batch_size,
            "lr": None,
            "weight_decay": None,
            "virtual_workers": 1,
            "threads": 1,
            "out": None,
        }
        with Network(hosts) as network:
            for (method, rate), file in left.items():
                try:
                    run(
                        network,
                        method,
                        rate,
                        options,
                        file,
                        (work / file.stem).resolve(),
                        60 * minutes,
                    )
                    print(file, flush=True)
                except RuntimeError as error:
                    failed.append(file.stem)
                    print(f"clock.py: {file.stem}: {error}", file=sys.stderr)
    if found := [json.loads(file.read_text()) for file in files.values() if file.exists()]:
        print(markdown(found), end="")
        if out:
            draw(found, out)
    elif report_only:
        raise SystemExit(
            f"clock.py: there are no results in {results} (train first, without --report-only)"
        )
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    run_script(work, main)
