"""What a received entry costs: check, decode and add it, on one core.

    python benchmarks/receive.py --out benchmarks/results/receive.json

Messages of one parameter of 8 million entries at 99.9 %, from 4 and from 64 ranks; the slope between the two medians.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import torch
import typer
from outfile import Out, write

from dgc.compression import kernels, select
from dgc.compression.residual import Residual
from dgc.compression.wire import Layout

NUMEL, RANKS = 1 << 23, (4, 64)


def main(
    repeats: Annotated[int, typer.Option(min=1)] = 15,
    bits: Annotated[int, typer.Option(help="Of a value.")] = 16,
    out: Out = None,
) -> None:
    """Times decoding, and prints nanoseconds for each received entry."""
    torch.set_num_threads(1)
    bucket = Residual("benchmark", {"w": torch.empty(2, NUMEL // 2)}, velocity=False)
    k = select.count(0.999, NUMEL)
    layout, kernel = Layout(bucket, [k], bits), kernels.module_for("cpu", torch.float32)
    of_one_row = torch.zeros(k, dtype=torch.int64)
    messages = torch.cat(
        [
            layout.rows.encode(
                of_one_row, torch.randperm(NUMEL)[:k].sort().values, torch.randn(k), 1
            )[0]
            for _ in range(max(RANKS))
        ]
    )
    target, medians = torch.zeros(2, NUMEL // 2), []
    for ranks in RANKS:
        seconds = []
        for _ in range(2 + repeats):
            began = time.perf_counter()
            kernel.Received(layout, layout.rows, messages[:ranks], ranks).write([target])
            seconds.append(time.perf_counter() - began)
        medians.append(statistics.median(seconds[2:]))
    slope = 1e9 * (medians[1] - medians[0]) / ((RANKS[1] - RANKS[0]) * k)
    print(f"{kernel.__name__}: {slope:.1f} ns for each entry received")
    if out:
        write(
            out,
            {
                "benchmark": "receive",
                "kernel": kernel.__name__,
                "numel": NUMEL,
                "entries": k,
                "bits": bits,
                "ranks": RANKS,
                "repeats": repeats,
                "median_seconds": medians,
                "ns_per_entry": slope,
            },
        )


if __name__ == "__main__":
    typer.run(main)
