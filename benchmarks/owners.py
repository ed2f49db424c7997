"""The local work of a worker in the reduce exchange, beside the all-gather's, phase by phase.

    python benchmarks/owners.py --out benchmarks/results/owners.json

25 M entries in three tensors at 99.9 %, fresh heavy-tailed gradients, one core, fused loops; or, with --device cuda, a
GPU. Nothing is sent: the path is given what a worker would have received.
"choose" is to accumulate, select and encode; "add up" is an owner's part: to decode the rows of all workers, add them,
choose and encode the largest sums; "apply" is to decode what all owners send and to write the update. The best of some
repeats.
"""

from __future__ import annotations

import platform
import time
from typing import Annotated

import torch
import typer
from outfile import Out, write

import dgc
from dgc.collective import Path, World
from dgc.compression.kernels import compile_ahead
from dgc.compression.residual import Gradient, Residual
from dgc.paths.averaged import Update
from dgc.paths.compressed import exchange_bucket

PHASES = ("choose", "add up", "apply")


def made(device: torch.device) -> list[Residual]:
    """As many entries as ResNet-50 has, in three buckets; all workers' regions of one are equally large."""
    return [
        Residual(f"bucket {i}", {"a": torch.empty(8192, 1024, device=device)}) for i in range(3)
    ]


def now(device: torch.device) -> float:
    """Seconds on the clock, when the device has done all it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def step(
    bucket: Residual, exchange: dgc.config.ExchangeName, workers: int, turn: int
) -> dict[str, float]:
    """One step of one bucket; seconds of each phase."""
    device = bucket.v.device
    gradients = {
        name: Gradient(torch.randn(shape, device=device) ** 3, 0.9)
        for name, shape in zip(bucket.names, bucket.shapes, strict=True)
    }
    seconds, began = {}, now(device)
    path = exchange_bucket(
        bucket, gradients, dgc.Config(0.999, exchange=exchange), turn, World(0, workers)
    )
    asked = next(path)
    seconds["choose"] = now(device) - began
    if asked.op == "all_to_all":  # a row for another owner is as long as one for this one
        rows = asked.tensor[1:2].expand(workers, -1).contiguous()
        began = now(device)
        asked = path.send(rows)
        seconds["add up"] = now(device) - began
    messages = asked.tensor.expand(workers, -1).contiguous()
    targets: list[torch.Tensor | None] = [torch.zeros(n, device=device) for n in bucket.numels]
    began = now(device)
    update_of(path, messages).write(targets)
    seconds["apply"] = now(device) - began
    return seconds


def update_of(path: Path[Update], messages: torch.Tensor) -> Update:
    """What a path returns for the last messages."""
    try:
        path.send(messages)
    except StopIteration as end:
        return end.value
    raise AssertionError("the path asks for more")


def main(
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "4,16,64",
    repeats: Annotated[int, typer.Option(min=1)] = 7,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    out: Out = None,
) -> None:
    """Times both exchanges and prints milliseconds."""
    torch.set_num_threads(1)
    compile_ahead(torch.float32)
    there, rows = torch.device(device), []
    for n in map(int, workers.split(",")):
        for exchange in ("allgather", "reduce"):
            buckets = made(there)
            every = [
                [step(bucket, exchange, n, turn) for bucket in buckets] for turn in range(repeats)
            ]
            best = {
                phase: 1e3 * min(sum(b.get(phase, 0.0) for b in turn) for turn in every)
                for phase in PHASES
            }
            rows.append({"exchange": exchange, "workers": n, **best, "in all": sum(best.values())})
            print(
                f"{exchange:>9}, {n:>3} workers: "
                + ", ".join(f"{phase} {rows[-1][phase]:.1f} ms" for phase in (*PHASES, "in all"))
            )
    if out:
        write(
            out,
            {
                "benchmark": "owners",
                "entries": sum(b.numel for b in buckets),
                "rows": rows,
                "device": str(there),
                "torch": torch.__version__,
                "machine": platform.processor() or platform.machine(),
            },
        )


if __name__ == "__main__":
    typer.run(main)
