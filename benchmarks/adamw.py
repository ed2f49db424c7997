"""What compression costs one rank in a step with AdamW on the CPU, beside torch's own AdamW, and beside SGD.

    python benchmarks/adamw.py --out benchmarks/results/adamw.json

Four ranks of one process train ResNet-50's 161 tensors, 25.6 M entries, on fresh heavy-tailed gradients. Timed is the
processor time of one rank's thread in ``optimizer.step()``: accumulate, select, take, encode, decode the messages of
all, and apply, by way of ``p.grad``; with AdamW also the product with its denominator and how that follows. Nothing is
sent. What one rank does alone with all of the batch, torch's own step, is beside it, one tensor after the other
(foreach) and fused. One thread; medians.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer
from gradients import heavy_tailed, resnet50
from outfile import Out, write

import dgc
from dgc.compression.kernels import compile_ahead

RANKS, DENSE = 4, 3  # steps at first that travel dense
Made = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Made] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 1e-3, 0.9, weight_decay=1e-4),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, 1e-3, fused=True),
}


def seconds(make: Made, compression: dgc.Config | None, warmup: int, steps: int) -> list[float]:
    """Of one rank's steps. None: torch's own, on one rank."""
    rank = dgc.lockstep.current().world.rank if compression else 0
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in resnet50()]
    optimizer: Any = make(parameters)
    if compression is not None:
        optimizer = dgc.DistributedOptimizer(optimizer, compression=compression)
    found = []
    for _, gradients in zip(
        range(warmup + steps), heavy_tailed(resnet50(), seed=rank), strict=False
    ):
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g.clone()
        began = time.thread_time()
        optimizer.step()
        found.append(time.thread_time() - began)
    return found[warmup:]


def main(
    sparsities: Annotated[str, typer.Option(help="Of what is sent.")] = "0.99,0.999",
    warmup: Annotated[
        int, typer.Option(min=DENSE + 1, help="Steps before the first that is timed.")
    ] = 20,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 11,
    out: Out = None,
) -> None:
    """Times the steps and prints milliseconds."""
    torch.set_num_threads(1)
    compile_ahead(torch.float32)
    rows: list[dict[str, Any]] = []

    def add(optimizer: str, sparsity: float | None, found: list[float]) -> None:
        rows.append({"optimizer": optimizer, "sparsity": sparsity, "seconds": found})
        print(
            f"{optimizer:>12}, {'torch' if sparsity is None else f'dgc at {100 * sparsity:g} %':>12}: "
            f"{1e3 * statistics.median(found):.1f} ms",
            flush=True,
        )

    for name, make in OPTIMIZERS.items():
        add(name, None, seconds(make, None, warmup, steps))
        for sparsity in map(float, sparsities.split(",")) if "fused" not in name else ():
            config = dgc.Config(dgc.piecewise({0: 0.0, DENSE: sparsity}))
            add(
                name,
                sparsity,
                dgc.lockstep.run(partial(seconds, make, config, warmup, steps), RANKS)[0],
            )
    if out:
        write(
            out,
            {
                "benchmark": "adamw",
                "ranks": RANKS,
                "warmup": warmup,
                "rows": rows,
                "machine": {
                    "processor": platform.processor() or platform.machine(),
                    "cores": os.cpu_count(),
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
            },
        )
        print(out)


if __name__ == "__main__":
    typer.run(main)
