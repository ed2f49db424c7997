"""How long a process waits until it has trained its first step on the CPU, cold and warm.

    python benchmarks/first_step.py [--out benchmarks/results/first-step.json]

Each process makes two ranks in lockstep, wraps an optimizer and takes steps on a small model. Timed: wrapping, which
imports numba; the first step; and the slowest of the next hundred, in which a process may change over to what has been
compiled meanwhile. A cold process has a fresh copy of the package, with nothing compiled; those that are warm have what
it has left. To time another version of dgc: PYTHONPATH=folder before the command.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
import typer
from outfile import Out, write
from rich.console import Console
from rich.table import Table

PARTS = ("wrapping", "first step", "slowest of the next 100", "until the first step is done")
WARM = 3
LIMIT = 300  # seconds for one process


def train() -> dict[str, float]:
    """In seconds, of one rank."""
    import dgc

    torch.set_num_threads(1)

    def worker() -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(300, 300), torch.nn.Tanh(), torch.nn.Linear(300, 10)
        )
        times = [time.perf_counter()]
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        optimizer = dgc.DistributedOptimizer(
            sgd, model.named_parameters(), dgc.Config(sparsity=0.99)
        )
        times.append(time.perf_counter())
        for _ in range(101):
            optimizer.zero_grad()
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
            times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]

    wrapping, first, *others = dgc.lockstep.run(worker, 2)[0]
    return dict(zip(PARTS, (wrapping, first, max(others), wrapping + first), strict=True))


def measured(folder: str) -> dict[str, float]:
    """A process of its own, with the package that lies in a folder."""
    done = subprocess.run(
        [sys.executable, __file__, "--worker"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
        env={**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"},
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main(out: Out = None) -> None:
    """Times the first step of processes with an empty cache and with a full one."""
    spec = importlib.util.find_spec("dgc")
    assert spec is not None and spec.origin is not None
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            Path(spec.origin).parent,
            Path(folder) / "dgc",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        cold, deadline = measured(folder), time.monotonic() + LIMIT
        while list(Path(folder).rglob("*.lock")) and not list(Path(folder).rglob("*.compiled")):
            if time.monotonic() > deadline:
                raise SystemExit(f"first_step.py: nothing was compiled within {LIMIT} s")
            time.sleep(0.5)
        runs = [measured(folder) for _ in range(WARM)]
    warm = {part: statistics.median(run[part] for run in runs) for part in PARTS}
    table = Table("seconds", "nothing compiled", f"all compiled (median of {WARM})")
    for part in PARTS:
        table.add_row(part, f"{cold[part]:.2f}", f"{warm[part]:.2f}")
    Console().print(table)
    if out:
        write(
            out,
            {
                "benchmark": "first_step",
                "cold": cold,
                "warm": runs,
                "machine": {
                    "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
                    "cores": os.cpu_count(),
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
            },
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        print(json.dumps(train()))
    else:
        app = typer.Typer(pretty_exceptions_enable=False)
        app.command()(main)
        app()
