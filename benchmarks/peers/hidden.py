"""How much of an exchange hides behind computing, where its update is applied one step late and where it is not.

    sudo .venv/bin/python benchmarks/peers/hidden.py --out benchmarks/results/peers-hidden.json

On hosts with shaped links (hosts.py), over torch.distributed. In each step the host waits for ``--computing`` seconds,
as it does for a GPU, and then calls ``step()``. What is told is how much longer a step takes than that: what training
waits for. Gradients are random, of the shapes of the CIFAR-10 recipe's ResNet-20, and all are there at once: so it is
where a model is one bucket. Methods take turns, ``--repeats`` times; told is the median of these, each the median of
``--steps`` steps of rank 0. All hosts share this machine's cores.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import job
from hosts import Network, check_tools, clean_leftovers, place, run_script

from dgc.compression.kernels import compile_ahead
from peers import METHODS, clock, measure, rehearsal
from peers.predict import NAMES

HERE = Path(__file__).resolve()
PAIRS = ("dense", "stale", "dgc-allgather", "stale-dgc")


def work(a: dict[str, Any]) -> None:
    """One rank of one method; writes the seconds of its steps."""
    place(a)
    torch.set_num_threads(1)
    compile_ahead(torch.float32)
    job.connect()
    (parameters, peer, gradients), times = rehearsal.ready(a), []
    for _ in range(measure.WARMUP + a["steps"]):
        times.append(time.perf_counter())
        for p, gradient in zip(parameters, next(gradients), strict=True):
            p.grad = gradient
        time.sleep(max(0.0, times[-1] + a["computing"] - time.perf_counter()))
        peer.step()
    times.append(time.perf_counter())
    between = [after - before for before, after in itertools.pairwise(times)]
    Path(a["folder"], f"{a['rank']}.json").write_text(json.dumps(between[measure.WARMUP :]))
    measure.meet()
    os._exit(0)  # what is under way is of no use to anybody


def markdown(result: dict[str, Any]) -> str:
    """What training waits for in a step, in milliseconds."""
    rates = list(dict.fromkeys(key.split()[0] for key in result["waits"]))
    lines = [
        f"| method | {' | '.join(f'waits at {NAMES[rate]}' for rate in rates)} |",
        "|" + "---|" * (1 + len(rates)),
    ]
    for method in PAIRS:
        waits = [statistics.median(result["waits"][f"{rate} {method}"]) for rate in rates]
        lines.append(
            f"| {METHODS[method].title} | {' | '.join(f'{1e3 * wait:.1f} ms' for wait in waits)} |"
        )
    return "\n".join(lines) + "\n"


def main(
    rates: Annotated[str, typer.Option(help=f"Of {', '.join(NAMES)}.")] = ",".join(NAMES),
    computing: Annotated[float, typer.Option(min=0, help="Seconds of a step.")] = 0.2,
    steps: Annotated[int, typer.Option(min=1)] = 30,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    hosts: Annotated[int, typer.Option(min=2, max=200)] = 4,
    minutes: Annotated[
        float, typer.Option(min=0, help="After which a method's processes are ended.")
    ] = 5,
    out: Annotated[Path | None, typer.Option(help="JSON.")] = None,
) -> None:
    """Times steps one step late and in time."""
    if wrong := [rate for rate in rates.split(",") if rate not in NAMES]:
        raise typer.BadParameter(f"--rates must be of {', '.join(NAMES)}, got {wrong[0]!r}")
    check_tools()
    clean_leftovers()
    waits: dict[str, list[float]] = {
        f"{rate} {method}": [] for rate in rates.split(",") for method in PAIRS
    }
    with Network(hosts) as network:
        for _ in range(repeats):
            for name, found in waits.items():
                rate, method = name.split()
                network.clear()
                network.shape(rate, clock.depth_of(method))
                taken: Any = network.run(
                    HERE,
                    {"task": "cifar10", "method": method, "steps": steps, "computing": computing},
                    60 * minutes,
                )
                found.append(statistics.median(taken[0]) - computing)
                print(f"{name}: {1e3 * found[-1]:.1f} ms", flush=True)
    result = {
        "benchmark": "peers-hidden",
        "hosts": hosts,
        "computing": computing,
        "steps": steps,
        "machine": job.machine(torch.device("cpu")),
        "waits": waits,
    }
    print(markdown(result), end="")
    if out:
        job.write(out, result)


if __name__ == "__main__":
    run_script(work, main)
