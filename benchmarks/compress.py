"""What compression costs one rank on the CPU: the local work of a step, against the speed of memory.

    python benchmarks/compress.py [--out benchmarks/results/compress.json]

Timed is all that a rank does itself in one exchange among four: accumulate, select, take and encode; then check and
decode four messages and apply them, through ``p.grad`` or straight to the parameters. What it waits for is left out.
The gradients are fresh and heavy-tailed at each step, with tensor scales from 1e-6 to 1; 20 steps go by before the
first is timed. All methods send the same number of entries of the same gradients in the same run, in turn.

The floor is what a copy of the same size takes, measured in the same run, times the streams that the work cannot do
without over the two of a copy: 5 to accumulate (read g, u, v; write u, v), 4 more with weight decay (read and write the
parameter and its decay buffer), or to write ``p.grad``, read it again, and read and write the parameter. Memory can do
better than that, as a copy also fetches the lines that it is about to overwrite, and a loop that accumulates writes
where it has read: so a bare loop, u = m u + g and v += u and nothing else, is timed as well.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numba
import numpy as np
import torch
import typer
from gradients import heavy_tailed, resnet50
from outfile import Out, write
from rich.console import Console
from rich.table import Table
from torch import Tensor

import dgc
from dgc import drawing
from dgc.collective import World
from dgc.compression import kernels, select
from dgc.compression.kernels import cpu, plain
from dgc.compression.residual import Gradient, Residual
from dgc.engine.parameters import BUCKET_NUMEL
from dgc.paths.bucket_step import layout_of
from dgc.paths.compressed import exchange_bucket
from dgc.paths.dense import reduce_dense

RANKS, MOMENTUM, RATE, DECAY = 4, 0.9, -0.1, 1e-4
FLAT = (1_000_000, 4_000_000, 25_000_000, 100_000_000, 200_000_000)
TOPK, SAMPLED, FUSED = METHODS = "exact top-k (torch)", "sampled (torch)", "fused (numba)"
STREAMS = {"directly": 5, "directly, with decay": 9, "through p.grad": 9}


@numba.njit(nogil=True)
def accumulate(g, u, v, m):  # type: ignore[no-untyped-def]
    """Nothing but what every step has to do."""
    for i in range(len(g)):
        u[i] = m * u[i] + g[i]
        v[i] += u[i]


class TopK:
    """What one would write first: a ``torch.topk`` for each tensor. Stays what the others are compared with."""

    def __init__(self, shapes: list[tuple[int, ...]], sparsity: float):
        self.parameters = [torch.zeros(torch.Size(shape).numel()) for shape in shapes]
        self.ks = [
            select.count(sparsity, p.numel()) if len(s) > 1 else 0
            for p, s in zip(self.parameters, shapes, strict=True)
        ]
        self.u, self.v = [[torch.zeros_like(p) for p in self.parameters] for _ in range(2)]
        self.sent: deque[list[tuple[Tensor, Tensor]]] = deque(maxlen=RANKS)

    def step(self, step: int, gradients: list[Tensor], mode: str) -> None:
        messages = []
        for g, k, u, v, p in zip(gradients, self.ks, self.u, self.v, self.parameters, strict=True):
            if k == 0:
                p.add_(g.view(-1), alpha=RATE)
                continue
            v.add_(u.mul_(MOMENTUM).add_(g.view(-1)))
            index = torch.topk(v.abs(), k, sorted=False).indices
            values = v[index].half()
            v[index] -= values
            u[index] = 0
            messages.append((index.int(), values))
        self.sent.append(messages)
        compressed = [p for p, k in zip(self.parameters, self.ks, strict=True) if k]
        for r in range(RANKS):
            for p, (index, values) in zip(
                compressed, self.sent[-1 - r % len(self.sent)], strict=True
            ):
                p.index_add_(0, index, values.float(), alpha=RATE / RANKS)

    def selected(self) -> tuple[int, float]:
        return sum(len(index) for index, _ in self.sent[-1]), 1.0


class Rank:
    """One rank's residuals and parameters, and the messages that the others might have sent."""

    def __init__(self, shapes: list[tuple[int, ...]], sparsity: float, method: str):
        self.loops = plain if method == SAMPLED else cpu
        self.config = dgc.Config(sparsity=sparsity)
        self.parameters = [torch.zeros(shape) for shape in shapes]
        self.decay_buffers: dict[int, Tensor] = {}
        self.dense = [i for i, p in enumerate(self.parameters) if p.dim() < 2]
        self.buckets: list[tuple[Residual, list[int], deque[Tensor]]] = []
        filling: list[int] = []
        for i in reversed(range(len(shapes))):  # as the optimizer packs them
            if self.parameters[i].dim() > 1:
                filling.append(i)
            if filling and (
                i == 0 or sum(self.parameters[j].numel() for j in filling) >= BUCKET_NUMEL
            ):
                bucket = Residual(
                    f"bucket {len(self.buckets)}", {str(j): self.parameters[j] for j in filling}
                )
                self.buckets.append((bucket, filling, deque(maxlen=RANKS)))
                filling = []

    def step(self, step: int, gradients: list[Tensor], mode: str) -> None:
        """The local work. Messages of the steps before stand for those of the other ranks."""
        kernels.module_for = lambda *_: self.loops
        world = World(0, RANKS)
        if self.dense:
            path = reduce_dense({str(i): gradients[i] for i in self.dense}, world)
            self.apply(self.sent(path, next(path).tensor), self.dense, gradients, mode)
        for bucket, members, messages in self.buckets:
            path = exchange_bucket(
                bucket,
                {str(i): Gradient(gradients[i], MOMENTUM) for i in members},
                self.config,
                step,
                world,
            )
            messages.append(next(path).tensor)
            update = self.sent(
                path, torch.stack([messages[-1 - r % len(messages)] for r in range(RANKS)])
            )
            if mode == "directly, with decay":
                for i in members:
                    if i not in self.decay_buffers:
                        self.decay_buffers[i] = torch.zeros_like(self.parameters[i])
                    self.loops.decay(
                        self.parameters[i], self.decay_buffers[i], MOMENTUM, DECAY, -RATE, False
                    )
            self.apply(update, members, gradients, mode)

    @staticmethod
    def sent(path: Any, result: Tensor) -> Any:
        try:
            path.send(result)
        except StopIteration as end:
            return end.value
        raise AssertionError("one collective was expected")

    def apply(self, update: Any, members: list[int], gradients: list[Tensor], mode: str) -> None:
        if mode == "through p.grad":
            update.write([gradients[i] for i in members])
            for i in members:
                self.parameters[i].add_(gradients[i], alpha=RATE)
        else:
            update.add([self.parameters[i] for i in members], [RATE] * len(members))

    def selected(self) -> tuple[int, float]:
        """Of the last step: entries sent, and their energy relative to that of the exact choice."""
        entries, energy, exact = 0, 0.0, 0.0
        for bucket, _, messages in self.buckets:
            layout = layout_of(bucket, self.config.sparsity_at(0), self.config)
            message = layout.rows.decode(messages[-1].view(1, -1))
            index, values = message.places[0], message.values[0]
            entries += int(torch.count_nonzero(values))
            energy += float(values.double().square().sum())
            before = bucket.v.clone().index_add_(0, index, values)
            for v, k in zip(before.split(bucket.numels), layout.counts, strict=True):
                exact += float(torch.topk(v.abs(), k).values.double().square().sum())
        return entries, energy / exact


def measure(
    shapes: list[tuple[int, ...]],
    modes: dict[str, list[str]],
    sparsity: float,
    warmup: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """Medians and quartiles of every method and mode, in ms, with the copy of the same size."""
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    source, target = torch.ones(numel), torch.zeros(numel)
    u, v = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
    threads = torch.get_num_threads()
    parts = [slice(numel * i // threads, numel * (i + 1) // threads) for i in range(threads)]
    pool = ThreadPoolExecutor(threads)
    runs = [(method, mode) for method, some in modes.items() for mode in some]
    ranks = {
        method: TopK(shapes, sparsity) if method == TOPK else Rank(shapes, sparsity, method)
        for method in modes
    }
    seconds: dict[tuple[str, str], list[float]] = {
        run: [] for run in [*runs, ("copy", ""), ("bare", "")]
    }
    draw = heavy_tailed(shapes)
    step = 0
    for turn in range(warmup + repeats):
        for mode in dict.fromkeys(mode for _, mode in runs):
            gradients = next(draw)
            order = [run for run in runs if run[1] == mode]
            for run in order[turn % len(order) :] + order[: turn % len(order)]:
                seconds[run].append(timed(partial(ranks[run[0]].step, step, gradients, mode)))
            step += 1
        seconds["copy", ""].append(timed(lambda: target.copy_(source)))
        seconds["bare", ""].append(
            timed(
                lambda: list(
                    pool.map(
                        lambda part: accumulate(
                            source.numpy()[part], u[part], v[part], np.float32(MOMENTUM)
                        ),
                        parts,
                    )
                )
            )
        )
    pool.shutdown()
    memory = {
        run: peak_memory(partial(ranks[run[0]].step, step, gradients, run[1])) for run in runs
    }
    rows = []
    copy, bare = (statistics.median(seconds[name, ""][warmup:]) for name in ("copy", "bare"))
    for method, mode in runs:
        ms = [1e3 * s for s in seconds[method, mode][warmup:]]
        low, median, high = statistics.quantiles(ms, n=4)
        entries, energy = ranks[method].selected()
        floor = 1e3 * copy * STREAMS[mode] / 2
        rows.append(
            {
                "numel": numel,
                "tensors": len(shapes),
                "method": method,
                "mode": mode,
                "ms": median,
                "quartiles": [low, high],
                "floor_ms": floor,
                "of_floor": median / floor,
                "copy_ms": 1e3 * copy,
                "bare_ms": 1e3 * bare,
                "entries": entries,
                "energy": energy,
                "temporary_mb": memory[method, mode],
            }
        )
    return rows


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def peak_memory(work: Callable[[], Any]) -> float:
    """MB by which the process's resident memory rose above what it was before."""
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back first
    Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
    before = status("VmRSS")
    work()
    return max(0.0, (status("VmHWM") - before) / 1024)


def status(key: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1])


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(title="Local work of one step, 99.9 %, four messages")
    for heading in (
        "entries",
        "tensors",
        "method",
        "applied",
        "ms",
        "of the floor",
        "bare loop",
        "sent",
        "energy",
        "temporary",
    ):
        result.add_column(heading, justify="left" if heading in ("method", "applied") else "right")
    for row in rows:
        result.add_row(
            f"{row['numel']:,}",
            str(row["tensors"]),
            row["method"],
            row["mode"],
            f"{row['ms']:.1f} ({row['quartiles'][0]:.1f} to {row['quartiles'][1]:.1f})",
            f"{row['of_floor']:.2f} x",
            f"{row['bare_ms']:.1f} ms",
            f"{row['entries']:,}",
            f"{row['energy']:.4f}",
            f"{row['temporary_mb']:.1f} MB",
        )
    return result


def picture(rows: list[dict[str, Any]], file: Path) -> None:
    """Medians, with whiskers from the first to the third quartile."""
    figure, axes = drawing.panels(height=4.2)
    ends = []
    for method, colour in zip(METHODS, (*drawing.MUTED[:2], drawing.DGC), strict=True):
        for flat, style in ((True, "o-"), (False, "*")):
            own = sorted(
                (
                    r
                    for r in rows
                    if r["method"] == method
                    and r["mode"] == "directly"
                    and (r["tensors"] == 1) == flat
                ),
                key=lambda row: row["numel"],
            )
            apart = [[abs(row["quartiles"][i] - row["ms"]) for row in own] for i in (0, 1)]
            axes.errorbar(
                [row["numel"] for row in own],
                [row["ms"] for row in own],
                apart,
                fmt=style,
                color=colour,
                markersize=4 if flat else 12,
                elinewidth=1,
            )
            ends += [(method, (own[-1]["numel"], own[-1]["ms"]), colour)] if flat and own else []
    floor = sorted(
        {
            r["numel"]: r["floor_ms"] for r in rows if r["mode"] == "directly" and r["tensors"] == 1
        }.items()
    )
    if floor:
        axes.plot(*zip(*floor, strict=True), "--", color=drawing.DENSE)
        ends.append(("floor: 5 n floats, at\nthe speed of a copy", floor[-1], drawing.DENSE))
    drawing.log_axis(
        axes,
        "x",
        sorted({row["numel"] for row in rows if row["tensors"] == 1}),
        lambda n: f"{n / 1e6:g} M",
    )
    drawing.log_axis(axes, "y", [1, 10, 100, 1000], "{:,g}".format)
    axes.set(
        xlabel="entries of one tensor; stars: ResNet-50, 25.6 M in 161 tensors",
        ylabel="milliseconds a step",
        title="Local work of one step on the CPU, 99.9 %: medians and quartiles",
    )
    drawing.name_lines(axes, ends)
    drawing.save(figure, file)


def main(
    out: Out = None,
    repeats: Annotated[int, typer.Option(min=2)] = 15,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before the first that counts.")] = 20,
    sparsity: Annotated[float, typer.Option(min=0, max=0.99999)] = 0.999,
    largest: Annotated[int, typer.Option(min=0, help="Flat size to end with.")] = FLAT[-1],
) -> None:
    """Times compression on the CPU: exact top-k, the torch operations, the fused loops, and the floor."""
    kernels.compile_ahead(torch.float32)
    console = Console(width=150)
    everything = {method: list(STREAMS) if method == FUSED else ["directly"] for method in METHODS}
    rows = measure(resnet50(), everything, sparsity, warmup, repeats)
    console.print(table(rows))
    for numel in (n for n in FLAT if n <= largest):
        rows += measure(
            [(numel // 1000, 1000)], {m: ["directly"] for m in METHODS}, sparsity, warmup, repeats
        )
        console.print(table(rows[-len(METHODS) :]))
    if out:
        result = {
            "benchmark": "compress",
            "sparsity": sparsity,
            "ranks": RANKS,
            "repeats": repeats,
            "warmup": warmup,
            "date": time.strftime("%Y-%m-%d"),
            "rows": rows,
            "machine": {
                "processor": processor(),
                "cores": os.cpu_count(),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "numba": numba.__version__,
                "python": platform.python_version(),
            },
        }
        write(out, result)
        picture(rows, out.with_suffix(".png"))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(
        (line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
