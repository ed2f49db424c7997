"""Draws docs/trace.png: one training step of two processes, as torch.profiler recorded it.

    python scripts/draw_trace.py [FOLDER FOR THE TRACES]

The processes share this machine and talk over gloo, so the picture shows what happens when, not how fast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import dgc
from dgc.compression import kernels
from dgc.drawing import DGC, MUTED

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RANKS, WIDTH, LAYERS, BATCH = 2, 2048, 4, 32
ROWS = {
    "your script": ("forward", "backward", "optimizer.step"),
    "dgc": tuple(
        f"dgc::{name}" for name in ("select", "take", "exchange", "read", "write_update", "step")
    ),
    "within": ("dgc::accumulate",),
    "gloo": ("gloo:all_gather", "gloo:all_reduce"),
}
GREYS = dict(zip(ROWS["your script"], ("#d9dce1", "#b4b9c1", "#8d939d"), strict=True))
COLOURS = {
    **GREYS,
    "dgc::select": DGC,
    "dgc::accumulate": "#9ecae1",
    **dict(
        zip(
            (
                "dgc::exchange",
                "dgc::write_update",
                "dgc::step",
                "gloo:all_gather",
                "dgc::read",
                "gloo:all_reduce",
                "dgc::take",
            ),
            MUTED,
            strict=True,
        )
    ),
}


def train(folder: Path) -> None:
    """Records the last of a few steps of one rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    kernels.compile_ahead(torch.float32)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *[
            layer
            for _ in range(LAYERS)
            for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
        ]
    )
    # Each matrix in a bucket of its own.
    optimizer = dgc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        model.named_parameters(),
        dgc.Config(0.999),
        groups=[[layer.weight] for layer in model[::2]],
    )
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=3, warmup=1, active=1)
    ) as profiler:
        for _ in range(5):
            x = torch.randn(BATCH, WIDTH)
            optimizer.zero_grad()
            torch.distributed.barrier()
            with record_function("forward"):
                loss = model(x).square().mean()
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer.step"):
                optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(folder / f"rank{torch.distributed.get_rank()}.json"))
    torch.distributed.destroy_process_group()


def ranges(path: Path) -> list[dict[str, Any]]:
    """The named ranges of a trace, with absolute times in milliseconds."""
    trace = json.loads(path.read_text())
    base = trace["baseTimeNanoseconds"] / 1e6
    return [
        {"name": event["name"], "begin": base + event["ts"] / 1e3, "length": event["dur"] / 1e3}
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
        and event["name"] in COLOURS
        and event.get("cat") == "user_annotation"
    ]


def draw(folder: Path) -> None:
    """One lane of ranges for each rank, on one clock."""
    found = {rank: ranges(folder / f"rank{rank}.json") for rank in range(RANKS)}
    begin = min(each["begin"] for events in found.values() for each in events)
    figure, lanes = plt.subplots(RANKS, figsize=(11, 5), layout="constrained", sharex=True)
    for rank, axis in enumerate(lanes):
        for row, names in enumerate(ROWS.values()):
            for each in (each for each in found[rank] if each["name"] in names):
                axis.barh(
                    -row,
                    each["length"],
                    left=each["begin"] - begin,
                    height=0.8,
                    color=COLOURS[each["name"]],
                )
                if row == 0:
                    axis.text(
                        each["begin"] - begin + each["length"] / 2,
                        0.6,
                        each["name"],
                        ha="center",
                        va="center",
                        fontsize=8,
                    )
        axis.set_yticks([-row for row in range(len(ROWS))], list(ROWS), fontsize=9)
        axis.set_title(f"rank {rank}", loc="left", fontsize=10)
        axis.set_xticks([])
        for side in ("top", "right", "left", "bottom"):
            axis.spines[side].set_visible(False)
    lanes[-1].set_xlabel("time, one step")
    names = [name for row in list(ROWS.values())[1:] for name in row]
    words = [f"{name} (waits)" if name == "dgc::exchange" else name for name in names]
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in names],
        words,
        ncols=len(names),
        loc="outside upper center",
        fontsize=8,
        frameon=False,
        handlelength=1,
        columnspacing=0.8,
    )
    figure.savefig(Path(__file__).resolve().parents[1] / "docs" / "trace.png", dpi=110)


def main(folder: Path) -> None:
    """Has the ranks record, within five minutes, and draws."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(RANKS),
    ]
    subprocess.run([*command, __file__, str(folder)], check=True, timeout=300)
    draw(folder)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]))
    elif len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
