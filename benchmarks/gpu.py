"""What accumulating, selecting and taking costs on one CUDA device: dgc's Triton kernels, their twin in torch
operations, and torch's exact top-k, against the floor, which is reading g, u, v and writing u, v once at the speed of a
device copy.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json

Each step has a fresh gradient. Times are medians between CUDA events after a warm-up of 20 steps; "host" is how long
the calls keep the host, which for the kernels is all that the backward pass could notice. "Energy" is the sum of squares
of what is chosen, over that of the k largest of each tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from gradients import heavy_tailed, resnet50

from dgc import select
from dgc.kernels import plain
from dgc.residual import Bucket, Gradient
from dgc.wire import Layout

Shapes = Sequence[tuple[int, ...]]
Step = Callable[[dict[str, Gradient], int], tuple[Tensor, Tensor]]
M = 0.9


class Kernel:
    """Steps of a module of dgc.kernels: select, which accumulates, and encode, which takes."""

    def __init__(self, kernel: ModuleType, shapes: Shapes, sparsity: float, device: torch.device):
        self.kernel = kernel
        self.bucket = Bucket("benchmark", {str(i): torch.empty(s, device=device) for i, s in enumerate(shapes)})
        self.layout = Layout(self.bucket, [select.count(sparsity, n) for n in self.bucket.numels], torch.float16)

    def step(self, gradients: dict[str, Gradient], step: int) -> Tensor:
        _, index, used = self.kernel.select(self.bucket, gradients, None, self.layout, False, step)
        return self.kernel.encode(self.bucket, self.layout, index, used, True)

    def quality(self, gradients: dict[str, Gradient], step: int) -> tuple[int, float]:
        """Entries chosen, and their energy relative to the k largest."""
        _, index, used = self.kernel.select(self.bucket, gradients, None, self.layout, False, step)
        chosen = index[self.layout.rank < used[self.layout.owner]]
        best = [torch.topk(v.abs(), k).values.double().square().sum()
                for v, k in zip(self.bucket.v.split(self.bucket.numels), self.layout.counts, strict=True)]
        return len(chosen), float(self.bucket.v[chosen].double().square().sum() / torch.stack(best).sum())


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


def measure(name: str, path: Any, shapes: Shapes, device: torch.device, warmup: int, steps: int,
            check: bool) -> dict[str, Any]:
    """One row of the table. With ``check``, one step must not make the host wait, or it raises RuntimeError."""
    timer, drawn, times = Timer(device), heavy_tailed(shapes, device=device), []
    for step in range(warmup + steps):
        gradients = {str(i): Gradient(g, M) for i, g in enumerate(next(drawn))}
        times.append(timer(lambda: path.step(gradients, step)))  # noqa: B023 (called at once)
    gradients = {str(i): Gradient(g, M) for i, g in enumerate(next(drawn))}
    if check:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            path.step(gradients, warmup + steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    entries, energy = path.quality(gradients, warmup + steps + 1)
    device_ms, host_ms = (statistics.median(column) for column in zip(*times[warmup:], strict=True))
    return {"path": name, "device_ms": device_ms, "host_ms": host_ms, "entries": entries, "energy": energy}


def versions(device: torch.device) -> dict[str, str]:
    import triton
    cuda = device.type == "cuda"
    return {"date": datetime.now(timezone.utc).date().isoformat(),
            "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()}, interpreted",
            "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
            "cuda": str(torch.version.cuda)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu runs Triton's interpreter: to try the script, not to time")
    parser.add_argument("--numel", type=int, help="one flat tensor of so many entries, in place of the three cases")
    parser.add_argument("--sparsity", type=float, default=0.999)
    parser.add_argument("--warmup", type=int, default=20, help="steps")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--check-sync", action="store_true",
                        help="fail if a step of the kernels waits for the device (torch.cuda.set_sync_debug_mode)")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device, and torch finds none here.")
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from dgc.kernels import cuda

    cases: dict[str, Shapes] = {"ResNet-50, 161 tensors": resnet50(), "flat, 25 M": [(25_000_000,)],
                                "flat, 200 M": [(200_000_000,)]}
    if args.numel:
        cases = {f"flat, {args.numel}": [(args.numel,)]}
    bandwidth = copy_bandwidth(device, args.numel or 1 << 28)
    results: dict[str, Any] = {**versions(device), "sparsity": args.sparsity, "copy_gb_per_s": bandwidth / 1e9, "cases": {}}
    print(", ".join(f"{key} {value}" for key, value in results.items() if key != "cases"))
    for case, shapes in cases.items():
        floor = 1e3 * 5 * 4 * sum(torch.Size(shape).numel() for shape in shapes) / bandwidth
        print(f"\n{case}: floor {floor:.3f} ms")
        rows = []
        for name, make in (("kernels", lambda s: Kernel(cuda, s, args.sparsity, device)),
                           ("torch twin", lambda s: Kernel(plain, s, args.sparsity, device)),
                           ("torch exact top-k", lambda s: ExactTopK(s, args.sparsity, device))):
            row = measure(name, make(shapes), shapes, device, args.warmup, args.steps,
                          args.check_sync and name == "kernels")
            row["floors"] = row["device_ms"] / floor
            rows.append(row)
            print(f"{name:18} {row['device_ms']:9.3f} ms  {row['floors']:7.2f} floors  host {row['host_ms']:8.3f} ms  "
                  f"{row['entries']:8} entries  energy {row['energy']:.6f}", flush=True)
        results["cases"][case] = {"floor_ms": floor, "rows": rows}
    if args.check_sync:
        print("\nNo step of the kernels waited for the device.")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
