"""What a step costs the thread that trains, beside its own work, by the number of parameters.

    horovodrun -np 2 python benchmarks/host.py --out benchmarks/results/host.json

The parameters are small, so that what is left is calling: hooks, tables, launches. One in three is a matrix, which
travels compressed; the others are vectors, as in a network with batch normalization. Timed is the processor time of the
thread, so that neither waiting for the other rank nor Horovod's own thread counts, of ``backward()`` and of ``step()``,
less that of the plain optimizer in the same run; the lower quartile of the steps, and the least of three turns that the
methods take, as what interrupts only adds.
"""

from __future__ import annotations

import platform
import statistics
import time
from typing import Annotated, Any

import horovod.torch as hvd
import torch
import typer
from outfile import Out, write
from rich.console import Console
from rich.table import Table

import dgc
from dgc.compression import kernels

TURNS = 3
SIZES = {"ResNet-20": 59, "ResNet-50": 161, "BERT-large": 393}  # parameters in such a model
METHODS = {
    "SGD": lambda sgd, named: sgd,
    "Horovod": lambda sgd, named: hvd.DistributedOptimizer(sgd, named),
    "DGC": lambda sgd, named: dgc.DistributedOptimizer(sgd, named, dgc.Config(0.99)),
}


def seconds(method: str, count: int, steps: int) -> tuple[float, float]:
    """Of the thread: a backward pass, and a step."""
    torch.manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(32, 40) if i % 3 == 0 else torch.randn(40))
        for i in range(count)
    ]
    sgd = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4)
    optimizer: Any = METHODS[method](sgd, [(str(i), p) for i, p in enumerate(parameters)])
    backward, step = [], []
    for _ in range(10 + steps):
        loss = torch.stack([p.square().sum() for p in parameters]).sum()
        optimizer.zero_grad()
        began = time.thread_time()
        loss.backward()
        between = time.thread_time()
        optimizer.step()
        backward.append(between - began)
        step.append(time.thread_time() - between)
    return statistics.quantiles(backward[10:])[0], statistics.quantiles(step[10:])[0]


def main(steps: Annotated[int, typer.Option(min=10)] = 200, out: Out = None) -> None:
    """Times the thread that trains, and prints microseconds for each parameter."""
    hvd.init()
    torch.set_num_threads(1)
    kernels.compile_ahead(torch.float32)
    cases = []
    for model, count in SIZES.items():
        turns = [
            {method: seconds(method, count, steps) for method in METHODS} for _ in range(TURNS)
        ]
        times = {
            method: [min(turn[method][part] for turn in turns) for part in (0, 1)]
            for method in METHODS
        }
        cases += [
            {
                "model": model,
                "parameters": count,
                "method": method,
                "backward_seconds": times[method][0],
                "step_seconds": times[method][1],
                "more_seconds": sum(times[method]) - sum(times["SGD"]),
            }
            for method in METHODS
        ]
    if hvd.rank() > 0:
        return
    table = Table(
        "parameters, as in", "", "backward ms", "step ms", "more than SGD ms", "us / parameter"
    )
    for case in cases:
        table.add_row(
            f"{case['parameters']}, {case['model']}",
            case["method"],
            f"{1e3 * case['backward_seconds']:.2f}",
            f"{1e3 * case['step_seconds']:.2f}",
            f"{1e3 * case['more_seconds']:.2f}",
            f"{1e6 * case['more_seconds'] / case['parameters']:.1f}",
        )
    Console().print(table)
    if out:
        write(
            out,
            {
                "benchmark": "host",
                "steps": steps,
                "cases": cases,
                "machine": {
                    "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
            },
        )


if __name__ == "__main__":
    typer.run(main)
