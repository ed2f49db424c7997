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
from rich.console import Console
from rich.table import Table

import dgc

WORKERS, BATCH, SPARSITY = 2, 64, 0.999
SECONDS = 250  # to train for, both methods together: the rest of the five minutes is starting and evaluating
HERE = Path(__file__).parent


def epochs_that_fit(images: int) -> int:
    """How many epochs each method can train for, from a few steps on one core."""
    torch.set_num_threads(1)
    model, x = resnet(20), torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    for step in range(6):
        if step == 2:
            began = time.perf_counter()
        F.cross_entropy(model(x), torch.zeros(BATCH).long()).backward()
    step_seconds = 1.2 * (time.perf_counter() - began) / 4  # and what comes on top
    return max(1, min(20, int(SECONDS / 2 / (images / (WORKERS * BATCH) * step_seconds))))


def run(method: str, data: str, epochs: int, out: Path) -> dict[str, Any]:
    """One method, under horovodrun; its progress bar goes to the screen."""
    bin_folder = Path(sys.executable).parent
    command = [str(bin_folder / "horovodrun"), "--gloo", "-np", str(WORKERS), sys.executable, str(HERE / "cifar10.py")]
    command += ["--method", method, "--data", data, "--epochs", str(epochs), "--batch-size", str(BATCH),
                "--threads", "1", "--sparsity", str(SPARSITY), "--warmup-epochs", str(epochs / 4), "--out", str(out)]
    out.unlink(missing_ok=True)
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    try:
        subprocess.run(command, check=True, timeout=3600, stdin=subprocess.DEVNULL, env=environment)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"the {method} run did not end well, its output is above: {error}") from None
    return json.loads(out.read_text())


def table(results: dict[str, dict[str, Any]]) -> Table:
    dense = results["dense"]["dense_bytes_per_step"]
    shown = Table("", "test accuracy", "bytes sent / worker / step", "compression", "step time")
    for name, result in results.items():
        sent = sum(epoch["bytes_per_step"] for epoch in result["history"]) / len(result["history"])
        seconds = sum(epoch["step_seconds"] for epoch in result["history"]) / len(result["history"])
        shown.add_row(name, f"{result['accuracy']:.2f} %", f"{sent:,.0f}", f"{dense / sent:,.1f} x",
                      f"{1000 * seconds:,.0f} ms")
    return shown


def picture(results: dict[str, dict[str, Any]], epochs: int, out: Path) -> None:
    """Training loss and test accuracy over the epochs, and the sparsity over the steps."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, (curves, accuracy, sparsity) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for (name, result), colour in zip(results.items(), ("tab:gray", "tab:blue"), strict=True):
        points = [(i + j / len(epoch["losses"]), loss) for i, epoch in enumerate(result["history"])
                  for j, loss in enumerate(epoch["losses"])]
        curves.plot(*zip(*points, strict=True), label=name, color=colour)
        accuracy.plot([epoch["epoch"] for epoch in result["history"]],
                      [epoch["accuracy"] for epoch in result["history"]], "o-", label=name, color=colour)
    steps = results["dense"]["steps_per_epoch"]
    schedule = dgc.warmup(4, steps_per_epoch=max(1, round(epochs * steps / 16)), end=SPARSITY)
    total = epochs * steps
    sparsity.step(range(total), [100 * (1 - schedule(step)) for step in range(total)], where="post", color="tab:blue")
    sparsity.set(xlabel="step", ylabel="entries sent (%)", yscale="log", title="density")
    sparsity.axhline(100, color="tab:gray")
    curves.set(xlabel="epoch", ylabel="loss", title="training loss of worker 0")
    accuracy.set(xlabel="epoch", ylabel="top-1 (%)", title="test accuracy")
    accuracy.set_xlim(0, epochs + 0.5)
    for axes in (curves, accuracy, sparsity):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    curves.legend(frameon=False)
    figure.savefig(out, dpi=150)


def main(data: Annotated[str | None, typer.Option(help="Folder with cifar-10-batches-bin.")] = None,
         cache: Annotated[Path, typer.Option(help="Where a download goes.")] = CACHE,
         out: Annotated[Path, typer.Option(help="Where the results go.")] = Path("runs/demo")) -> None:
    """Trains ResNet-20 dense and with DGC at 99.9 %, with two Horovod workers, and compares."""
    console = Console()
    data = find_data(data, cache)
    dataset, (images, _), _ = load(data)
    epochs = epochs_that_fit(len(images))
    console.print(f"ResNet-20 on {dataset}, {WORKERS} Horovod workers, {epochs} epoch{'s' * (epochs > 1)} for each of "
                  f"two methods. The paper trains for 164: what counts here is that both learn alike, and the bytes. "
                  "DGC flushes what is pending before the last evaluation.", soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    results = {"dense": run("dense", data, epochs, out / "dense.json"),
               f"DGC {SPARSITY:.1%}": run("dgc", data, epochs, out / "dgc.json")}
    console.print(table(results))
    picture(results, epochs, out / "demo.png")
    console.print(f"Learning curves and sparsity: {out / 'demo.png'}")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
