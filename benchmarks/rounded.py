"""What a dense sum in 8 bits costs beside its bytes, ``Config(value_bits=8)`` or fewer: to round, add, round and read,
on one core.

    python benchmarks/rounded.py --out benchmarks/results/rounded.json

One bucket of 25 million entries, and the messages of 4, 16 and 64 ranks. The median over all of them.
"""

from __future__ import annotations

import platform
import statistics
import time
from typing import Annotated, Any

import torch
import typer
from outfile import Out, write

from dgc.collective import World
from dgc.compression.kernels import compile_ahead
from dgc.compression.residual import Residual
from dgc.compression.sizes import SUM_BITS
from dgc.paths.dense import reduce_rounded

RANKS = (4, 16, 64)


def seconds(bucket: Residual, gradient: torch.Tensor, size: int) -> float:
    """One rank's work: it is sent what it sends itself."""
    path = reduce_rounded(bucket, {"w": gradient}, SUM_BITS, World(0, size))
    began = time.perf_counter()
    rows = next(path).tensor
    message = path.send(rows).tensor.view(1, -1)
    worked = time.perf_counter() - began
    messages = message.expand(size, -1).contiguous()
    began = time.perf_counter()
    try:
        path.send(messages)
    except StopIteration:
        return worked + time.perf_counter() - began
    raise AssertionError("a rounded sum takes two rounds")


def main(
    numel: Annotated[int, typer.Option(min=10_000)] = 25_000_000,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    out: Out = None,
) -> None:
    """Times rounded sums, and prints nanoseconds for each entry."""
    torch.set_num_threads(1)
    compile_ahead(torch.float32)
    gradient, medians = torch.randn(numel), dict[int, float]()
    for size in RANKS:
        bucket = Residual("benchmark", {"w": torch.empty(numel)}, velocity=False)
        medians[size] = statistics.median(
            [seconds(bucket, gradient, size) for _ in range(1 + repeats)][1:]
        )
        print(f"{size} ranks: {1e9 * medians[size] / numel:.1f} ns for each entry")
    result: dict[str, Any] = {
        "benchmark": "rounded",
        "numel": numel,
        "repeats": repeats,
        "median_seconds": medians,
        "ns_per_entry": 1e9 * statistics.median(medians.values()) / numel,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    if out:
        write(out, result)


if __name__ == "__main__":
    typer.run(main)
