"""Results of a recipe side by side: a table, and a picture of the curves.

    python recipes/report.py recipes/results/cifar10-dense-0.json recipes/results/cifar10-dgc-0.json --out curves.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import cifar10
import ptb
import typer
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Recipe:
    config: Callable[[Any, int], Any]
    measure: str  # the key of what counts
    title: str  # of the table's column, where it is the last test
    curve: str  # the picture's title, where it is that of each epoch
    axis: str
    unit: str = ""
    scale: str = "linear"
    corner: str = "lower right"  # that the curves leave free


RECIPES = {
    "cifar10": Recipe(cifar10.config, "accuracy", "test accuracy", "test accuracy", "top-1 (%)", " %"),
    "ptb": Recipe(ptb.config, "perplexity", "test perplexity", "validation perplexity", "perplexity", scale="log",
                  corner="upper right"),  # lower is better
}
PARTS = ("momentum_correction", "factor_masking", "local_clipping", "local_weight_decay")  # that can be switched off
COLOURS = ("tab:gray", "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")


def label(result: dict[str, Any]) -> str:
    chosen = result["settings"]
    without = [f", no {part.replace('_', ' ')}" for part in PARTS if not chosen.get(part, True)]
    return f"DGC {100 * chosen['sparsity']:.5g} %{''.join(without)}" if chosen["method"] == "dgc" else chosen["method"]


def settings(result: dict[str, Any]) -> Any:
    """The recipe's Config of a run; with Horovod's own methods, that of dense training."""
    a = argparse.Namespace(**result["settings"])
    return RECIPES[result["recipe"]].config(a, result["steps_per_epoch"])


def table(results: list[dict[str, Any]]) -> Table:
    """Bytes and step time are means over all of training, warm-up included; the ratio is also given for its end."""
    recipe = RECIPES[results[0]["recipe"]]
    shown = Table("", recipe.title, "bytes sent / worker / step", "compression", "after warm-up", "step time")
    for result in results:
        epochs, dense = result["history"], result["dense_bytes_per_step"]
        sent = sum(epoch["bytes_per_step"] for epoch in epochs) / len(epochs)
        least = min(epoch["bytes_per_step"] for epoch in epochs)
        seconds = sum(epoch["step_seconds"] for epoch in epochs) / len(epochs)
        ratios = [f"{dense / nbytes:,.1f} x" if nbytes else "-" for nbytes in (sent, least)]  # one worker sends nothing
        shown.add_row(label(result), f"{result[recipe.measure]:.2f}{recipe.unit}", f"{sent:,.0f}", *ratios,
                      f"{1000 * seconds:,.0f} ms")
    return shown


def picture(results: list[dict[str, Any]], out: Path) -> None:
    """Training loss and what is measured over the epochs, and the sparsity over the steps."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    recipe = RECIPES[results[0]["recipe"]]
    figure, (loss, measure, sparsity) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for result, colour in zip(results, COLOURS, strict=False):
        epochs, style = result["history"], {"label": label(result), "color": colour}
        fine = [(i + j / len(epoch["losses"]), value) for i, epoch in enumerate(epochs)
                for j, value in enumerate(epoch.get("losses", []))]
        points = fine if len(epochs) < 5 and fine else [(epoch["epoch"], epoch["loss"]) for epoch in epochs]
        loss.plot(*zip(*points, strict=True), **style)
        measure.plot([epoch["epoch"] for epoch in epochs], [epoch[recipe.measure] for epoch in epochs], ".-", **style)
        kept = settings(result)
        steps = range(len(epochs) * result["steps_per_epoch"])
        sparsity.step(steps, [100 * kept.sparsity_at(step) for step in steps], where="post", **style)
    loss.set(xlabel="epoch", ylabel="loss", title="training loss of worker 0", ylim=(0, None))
    measure.set(xlabel="epoch", ylabel=recipe.axis, title=recipe.curve, xlim=(0, None), yscale=recipe.scale)
    sparsity.set(xlabel="step", ylabel="entries kept back (%)", title="sparsity", ylim=(-4, 104))
    for axes in (loss, measure, sparsity):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    measure.legend(frameon=False, loc=recipe.corner)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def main(files: Annotated[list[Path], typer.Argument(help="JSON files that a recipe's --out wrote.", exists=True)],
         out: Annotated[Path, typer.Option(help="The picture.")] = Path("runs/curves.png")) -> None:
    """Compares runs of one of the recipes."""
    results = [json.loads(file.read_text()) for file in files]
    if len(recipes := {result["recipe"] for result in results}) > 1:
        raise typer.BadParameter(f"these are results of {', '.join(sorted(recipes))}; accepted: those of one recipe")
    Console(width=120).print(table(results))
    picture(results, out)
    print(f"Curves: {out}")


if __name__ == "__main__":
    typer.run(main)
