"""The main job, in about five minutes: ResNet-20 with two Horovod workers, dense and compressed, side by side.

    python recipes/demo.py [--data DIR]

Started by ``make demo``. Ends with a table and a picture; the results are in runs/demo/.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F  # noqa: N812
import typer
from cifar10 import resnet
from data import CACHE, find_data, load
from job import run_command
from report import picture, table
from rich.console import Console

WORKERS, BATCH, SPARSITY = 2, 64, 0.999
SECONDS = 250  # to train for, both methods together: the rest of the five minutes is starting and evaluating
LIMIT = 3600  # seconds, for one method on the slowest machine
HERE = Path(__file__).parent
HOROVODRUN = Path(sys.executable).parent / "horovodrun"


def epochs_that_fit(images: int) -> int:
    """How many epochs each method can train for, from a few steps on one core."""
    torch.set_num_threads(1)
    model, x = (
        resnet(20),
        torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last),
    )
    for step in range(6):
        if step == 2:
            began = time.perf_counter()
        F.cross_entropy(model(x), torch.zeros(BATCH).long()).backward()
    step_seconds = 1.2 * (time.perf_counter() - began) / 4  # and what comes on top
    return max(1, min(20, int(SECONDS / 2 / (images / (WORKERS * BATCH) * step_seconds))))


def run(method: str, data: str, epochs: int, out: Path) -> dict[str, Any]:
    """One method, under horovodrun; its progress bar goes to the screen."""
    command = [
        str(HOROVODRUN),
        "--gloo",
        "-np",
        str(WORKERS),
        sys.executable,
        str(HERE / "cifar10.py"),
    ]
    command += [
        "--method",
        method,
        "--data",
        data,
        "--epochs",
        str(epochs),
        "--batch-size",
        str(BATCH),
        "--threads",
        "1",
        "--sparsity",
        str(SPARSITY),
        "--warmup-epochs",
        str(epochs / 4),
        "--out",
        str(out),
    ]
    out.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PATH": f"{HOROVODRUN.parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    try:
        status = process.wait(timeout=LIMIT)
    except BaseException:
        process.terminate()  # horovodrun then ends its workers
        process.wait(timeout=30)
        raise
    if status != 0:
        raise SystemExit(f"the {method} run ended with status {status}; its output is above")
    return json.loads(out.read_text())


def main(
    data: Annotated[str | None, typer.Option(help="Folder with cifar-10-batches-bin.")] = None,
    cache: Annotated[Path, typer.Option(help="Where a download goes.")] = CACHE,
    out: Annotated[Path, typer.Option(help="Where the results go.")] = Path("runs/demo"),
) -> None:
    """Trains ResNet-20 dense and with DGC at 99.9 %, with two Horovod workers, and compares."""
    console = Console()
    if not HOROVODRUN.exists():
        raise SystemExit(
            f"the demo needs Horovod, got no {HOROVODRUN} (make demo builds it, or "
            "scripts/build_horovod.sh)"
        )
    data = find_data(data, cache)
    dataset, (images, _), _ = load(data)
    epochs = epochs_that_fit(len(images))
    console.print(
        f"ResNet-20 on {dataset}, {WORKERS} Horovod workers, {epochs} epoch{'s' * (epochs > 1)} for each of "
        f"two methods. The paper trains for 164: what counts here is that both learn alike, and the bytes. "
        "DGC flushes what is pending before the last evaluation.",
        soft_wrap=True,
    )
    out.mkdir(parents=True, exist_ok=True)
    results = [run(method, data, epochs, out / f"{method}.json") for method in ("dense", "dgc")]
    console.print(table(results))
    picture(results, out / "demo.png")
    console.print(f"Learning curves and sparsity: {out / 'demo.png'}")


if __name__ == "__main__":
    run_command(main)
