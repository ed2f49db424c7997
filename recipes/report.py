"""Results of the CIFAR-10 recipe side by side: a table, and a picture of the curves.

    python recipes/report.py recipes/results/cifar10-dense-0.json recipes/results/cifar10-dgc-0.json --out curves.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from cifar10 import config
from rich.console import Console
from rich.table import Table

COLOURS = ("tab:gray", "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")


def label(result: dict[str, Any]) -> str:
    method = result["settings"]["method"]
    return f"DGC {100 * result['settings']['sparsity']:.5g} %" if method == "dgc" else method


def settings(result: dict[str, Any]) -> Any:
    """The recipe's Config of a run; Horovod's own methods count as dense."""
    a = argparse.Namespace(**result["settings"])
    a.method = "dense" if a.method == "fp16" else a.method
    return config(a, result["steps_per_epoch"])


def table(results: list[dict[str, Any]]) -> Table:
    """Bytes and step time are means over all of training, warm-up included; the ratio is also given for its end."""
    shown = Table("", "test accuracy", "bytes sent / worker / step", "compression", "after warm-up", "step time")
    for result in results:
        epochs, dense = result["history"], result["dense_bytes_per_step"]
        sent = sum(epoch["bytes_per_step"] for epoch in epochs) / len(epochs)
        least = min(epoch["bytes_per_step"] for epoch in epochs)
        seconds = sum(epoch["step_seconds"] for epoch in epochs) / len(epochs)
        shown.add_row(label(result), f"{result['accuracy']:.2f} %", f"{sent:,.0f}", f"{dense / sent:,.1f} x",
                      f"{dense / least:,.1f} x", f"{1000 * seconds:,.0f} ms")
    return shown


def picture(results: list[dict[str, Any]], out: Path) -> None:
    """Training loss and test accuracy over the epochs, and the sparsity over the steps."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, (loss, accuracy, sparsity) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for result, colour in zip(results, COLOURS, strict=False):
        epochs, style = result["history"], {"label": label(result), "color": colour}
        fine = [(i + j / len(epoch["losses"]), value) for i, epoch in enumerate(epochs)
                for j, value in enumerate(epoch.get("losses", []))]
        points = fine if len(epochs) < 5 and fine else [(epoch["epoch"], epoch["loss"]) for epoch in epochs]
        loss.plot(*zip(*points, strict=True), **style)
        accuracy.plot([epoch["epoch"] for epoch in epochs], [epoch["accuracy"] for epoch in epochs], ".-", **style)
        kept = settings(result)
        steps = range(len(epochs) * result["steps_per_epoch"])
        sparsity.step(steps, [100 * kept.sparsity_at(step) for step in steps], where="post", **style)
    loss.set(xlabel="epoch", ylabel="loss", title="training loss of worker 0", ylim=(0, None))
    accuracy.set(xlabel="epoch", ylabel="top-1 (%)", title="test accuracy", xlim=(0, None))
    sparsity.set(xlabel="step", ylabel="entries kept back (%)", title="sparsity", ylim=(-4, 104))
    for axes in (loss, accuracy, sparsity):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    accuracy.legend(frameon=False, loc="lower right")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def main(files: Annotated[list[Path], typer.Argument(help="JSON files that cifar10.py --out wrote.", exists=True)],
         out: Annotated[Path, typer.Option(help="The picture.")] = Path("runs/curves.png")) -> None:
    """Compares runs of the CIFAR-10 recipe."""
    results = [json.loads(file.read_text()) for file in files]
    Console(width=120).print(table(results))
    picture(results, out)
    print(f"Curves: {out}")


if __name__ == "__main__":
    typer.run(main)
