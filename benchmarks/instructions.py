"""How many instructions the two hottest functions take, in torch operations and fused: counted by valgrind.

    python benchmarks/instructions.py [--out benchmarks/results/instructions.json]

Each function runs in a process of its own, under ``valgrind --tool=callgrind``, on ResNet-50's largest tensor; the
count of a run without it is taken from that of a run with more calls, so that starting up and compiling fall out. Two
starts differ by a million instructions or so; the calls are as many as make that little. Takes some minutes. Unlike
time, the counts do not depend on what else the machine does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Annotated, Any

import torch
import typer
from outfile import Out, write
from rich.console import Console
from rich.table import Table

SHAPE = (512, 512, 3, 3)
SENDERS, SPARSITY = 4, 0.999
# And calls.
FUNCTIONS = {
    "select": ("accumulate and select", 20),
    "receive": ("decode and apply four messages", 200),
}
LIMIT = 1800  # seconds for a run
# One instruction set within and without valgrind, so that what numba has compiled and cached without serves within,
# where compiling takes a quarter of an hour.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+avx,+sse4.2,+fma,+bmi,+bmi2,+popcnt,+f16c,+lzcnt,+cmov,+cx16",
}


def work(name: str, function: str) -> None:
    """One call of everything, so that all is compiled; then more of one function."""
    from importlib import import_module

    from dgc.compression import select
    from dgc.compression.residual import Gradient, Residual
    from dgc.compression.wire import Layout

    torch.set_num_threads(1)
    loops: Any = import_module(f"dgc.compression.kernels.{name}")
    bucket = Residual("bucket 0", {"p": torch.empty(SHAPE)})
    layout = Layout(bucket, [select.count(SPARSITY, bucket.numel)], 16)
    gradients = {"p": Gradient(torch.randn(SHAPE).pow_(3), 0.9)}
    _, index, used = loops.accumulate_and_select(bucket, gradients, None, layout, 0)
    message, _ = loops.encode(bucket, layout, index, used, torch.tensor(False), True)
    messages, parameter = torch.cat([message] * SENDERS), torch.zeros(SHAPE)
    loops.Received(layout, layout.rows, messages, SENDERS).add([parameter], [-0.1])
    _, calls = FUNCTIONS.get(function, ("", 0))
    for step in range(calls):
        if function == "select":
            loops.accumulate_and_select(bucket, gradients, None, layout, 1 + step)
        else:
            loops.Received(layout, layout.rows, messages, SENDERS).add([parameter], [-0.1])


def count(name: str, function: str) -> int:
    """Instructions of a whole process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={folder}/out",
            sys.executable,
            __file__,
            "--work",
            f"{name} {function}",
        ]
        subprocess.run(command[3:], check=True, timeout=LIMIT, env=ENVIRONMENT)
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, env=ENVIRONMENT
        )
    match = re.search(r"Collected : (\d+)", process.stderr)
    if process.returncode != 0 or not match:
        raise SystemExit(f"valgrind ended with {process.returncode}:\n{process.stderr[-2000:]}")
    return int(match[1])


def main(out: Out = None, work_: Annotated[str, typer.Option("--work", hidden=True)] = "") -> None:
    """Counts the instructions of the hottest functions, in torch operations and fused."""
    if work_:
        return work(*work_.split())
    if not shutil.which("valgrind"):
        raise SystemExit("valgrind is missing: apt-get install valgrind")
    numel = torch.Size(SHAPE).numel()
    table = Table(title=f"Instructions of one call, {numel:,} entries, 99.9 %")
    for heading in ("", "torch operations", "fused", "ratio", "fused, for each entry"):
        table.add_column(heading, justify="right" if heading else "left")
    result: dict[str, Any] = {
        "benchmark": "instructions",
        "numel": numel,
        "torch": torch.__version__,
    }
    nothing = {name: count(name, "nothing") for name in ("plain", "cpu")}
    for function, (title, calls) in FUNCTIONS.items():
        plain, fused = ((count(name, function) - nothing[name]) / calls for name in nothing)
        result[function] = {"plain": plain, "fused": fused, "calls": calls}
        table.add_row(
            title,
            f"{plain:,.0f}",
            f"{fused:,.0f}",
            f"{plain / fused:.1f} x",
            f"{fused / numel:.2f}",
        )
    Console().print(table)
    if out:
        write(out, result)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
