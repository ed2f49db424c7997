"""What accumulating, selecting and taking costs on one CUDA device: dgc's Triton kernels, their twin in torch
operations, and torch's exact top-k.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json

The floor is what reading g, u, v and writing u, v once takes at the speed of a device copy, measured in the same run.
Each step has a fresh gradient. Times are medians between CUDA events after a warm-up of 20 steps; "host" is how long
the calls keep the host, which for the kernels is all that a backward pass beside them would notice. "Energy" is the sum
of squares of what is chosen, over that of the k largest of each tensor.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from gradients import heavy_tailed, resnet50
from outfile import Out, write
from torch import Tensor

from dgc.compression import select
from dgc.compression.kernels import plain
from dgc.compression.residual import Gradient, Residual
from dgc.compression.wire import Layout

Shapes = Sequence[tuple[int, ...]]
M = 0.9


class Kernel:
    """Steps of a module of dgc.compression.kernels: select, which accumulates, and encode, which takes."""

    def __init__(self, kernel: ModuleType, shapes: Shapes, sparsity: float, device: torch.device):
        self.kernel = kernel
        self.bucket = Residual(
            "benchmark", {str(i): torch.empty(s, device=device) for i, s in enumerate(shapes)}
        )
        self.layout = Layout(
            self.bucket, [select.count(sparsity, n) for n in self.bucket.numels], 16
        )
        self.refused = torch.zeros((), dtype=torch.bool, device=device)

    def step(self, gradients: dict[str, Gradient], step: int) -> Tensor:
        _, index, used = self.kernel.accumulate_and_select(
            self.bucket, gradients, None, self.layout, step
        )
        message, _ = self.kernel.encode(self.bucket, self.layout, index, used, self.refused, True)
        return message

    def quality(self, gradients: dict[str, Gradient], step: int) -> tuple[int, float]:
        """Entries chosen, and their energy relative to the k largest."""
        _, index, used = self.kernel.accumulate_and_select(
            self.bucket, gradients, None, self.layout, step
        )
        chosen = index[self.layout.ordinal < used[self.layout.param_of_slot]]
        best = [
            torch.topk(v.abs(), k).values.double().square().sum()
            for v, k in zip(
                self.bucket.v.split(self.bucket.numels), self.layout.counts, strict=True
            )
        ]
        return len(chosen), float(
            self.bucket.v[chosen].double().square().sum() / torch.stack(best).sum()
        )


class ExactTopK:
    """Steps as they are written first: torch operations on each tensor, and torch.topk."""

    def __init__(self, shapes: Shapes, sparsity: float, device: torch.device):
        self.u = [torch.zeros(torch.Size(shape).numel(), device=device) for shape in shapes]
        self.v = [torch.zeros_like(u) for u in self.u]
        self.counts = [select.count(sparsity, len(u)) for u in self.u]

    def step(self, gradients: dict[str, Gradient], step: int) -> list[tuple[Tensor, Tensor]]:
        sent = []
        for u, v, k, gradient in zip(self.u, self.v, self.counts, gradients.values(), strict=True):
            u.mul_(M).add_(gradient.g.view(-1))
            v.add_(u)
            index = torch.topk(v.abs(), k, sorted=False).indices
            sent.append((index, v[index]))
            v[index] = 0
            u[index] = 0
        return sent

    def quality(self, gradients: dict[str, Gradient], step: int) -> tuple[int, float]:
        return sum(self.counts), 1.0


class Timer:
    """Milliseconds that a call takes on the device, and on the host; on the CPU they are the same."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"

    def __call__(self, call: Callable[[], Any]) -> tuple[float, float]:
        if not self.cuda:
            begin = time.perf_counter()
            call()
            return 2 * (1e3 * (time.perf_counter() - begin),)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        begin = time.perf_counter()
        call()
        host = 1e3 * (time.perf_counter() - begin)
        end.record()
        end.synchronize()
        return start.elapsed_time(end), host


def copy_bandwidth(device: torch.device, numel: int) -> float:
    """Bytes read and written in a second by a copy between two tensors of the device."""
    a = torch.ones(numel, device=device)
    b, timer = torch.empty_like(a), Timer(device)
    for _ in range(5):
        b.copy_(a)
    return 8 * numel / (1e-3 * statistics.median(timer(lambda: b.copy_(a))[0] for _ in range(20)))


def measure(
    path: Any, shapes: Shapes, device: torch.device, warmup: int, steps: int, check: bool
) -> dict[str, Any]:
    """One row of the table. With ``check``, a step that makes the host wait raises RuntimeError."""
    timer, drawn, times = Timer(device), heavy_tailed(shapes, device=device), []
    for step in range(warmup + steps):
        gradients = {str(i): Gradient(g, M) for i, g in enumerate(next(drawn))}
        times.append(timer(partial(path.step, gradients, step)))
    gradients = {str(i): Gradient(g, M) for i, g in enumerate(next(drawn))}
    if check and device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            path.step(gradients, warmup + steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    entries, energy = path.quality(gradients, warmup + steps + 1)
    device_ms, host_ms = (statistics.median(column) for column in zip(*times[warmup:], strict=True))
    return {"device_ms": device_ms, "host_ms": host_ms, "entries": entries, "energy": energy}


def versions(device: torch.device) -> dict[str, str]:
    import triton

    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device)
        if cuda
        else f"{platform.machine()}, interpreted",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


def main(
    out: Out = None,
    device: Annotated[
        str, typer.Option(help="cpu: Triton's interpreter, to try the script and not to time.")
    ] = "cuda",
    numel: Annotated[
        int, typer.Option(min=0, help="One flat tensor of so many entries, instead of the cases.")
    ] = 0,
    sparsity: Annotated[float, typer.Option(min=0, max=0.99999)] = 0.999,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before the first that counts.")] = 20,
    steps: Annotated[int, typer.Option(min=1)] = 50,
    check_sync: Annotated[
        bool,
        typer.Option("--check-sync", help="Fail where a step of the kernels waits for the device."),
    ] = False,
) -> None:
    """Times compression on one CUDA device: the Triton kernels, the torch operations, exact top-k, and the floor."""
    if device != "cpu" and not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device, and torch finds none here.")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from dgc.compression.kernels import cuda

    there = torch.device(device)
    if there.index is not None:
        torch.cuda.set_device(there)  # whose stream is timed
    cases: dict[str, Shapes] = {
        "ResNet-50, 161 tensors": resnet50(),
        "flat, 25 M": [(25_000_000,)],
        "flat, 200 M": [(200_000_000,)],
    }
    if numel:
        cases = {f"flat, {numel:,}": [(numel,)]}
    paths: dict[str, Callable[[Shapes], Any]] = {
        "kernels (Triton)": lambda shapes: Kernel(cuda, shapes, sparsity, there),
        "sampled (torch)": lambda shapes: Kernel(plain, shapes, sparsity, there),
        "exact top-k (torch)": lambda shapes: ExactTopK(shapes, sparsity, there),
    }
    bandwidth = copy_bandwidth(there, numel or 1 << 28)
    machine, rows = versions(there), []
    print(
        ", ".join(f"{key} {value}" for key, value in machine.items())
        + f"; copies {bandwidth / 1e9:.0f} GB/s"
    )
    for case, shapes in cases.items():
        total = sum(torch.Size(shape).numel() for shape in shapes)
        floor = 1e3 * 5 * 4 * total / bandwidth
        print(f"\n{case}: the floor is {floor:.3f} ms")
        for name, path in paths.items():
            row = measure(
                path(shapes),
                shapes,
                there,
                warmup,
                steps,
                check_sync and name.startswith("kernels"),
            )
            rows.append(
                {
                    "case": case,
                    "numel": total,
                    "tensors": len(shapes),
                    "method": name,
                    **row,
                    "floor_ms": floor,
                    "of_floor": row["device_ms"] / floor,
                }
            )
            print(
                f"{name:20}{row['device_ms']:9.3f} ms, {row['device_ms'] / floor:6.2f} x the floor; host "
                f"{row['host_ms']:8.3f} ms; {row['entries']:,} entries, energy {row['energy']:.6f}",
                flush=True,
            )
    if check_sync:
        print("\nNo step of the kernels waited for the device.")
    if out:
        result = {
            "benchmark": "gpu",
            "sparsity": sparsity,
            "warmup": warmup,
            "steps": steps,
            "date": time.strftime("%Y-%m-%d"),
            "copy_gb_per_s": bandwidth / 1e9,
            "machine": machine,
            "rows": rows,
        }
        write(out, result)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
