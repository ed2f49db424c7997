"""Results of a recipe side by side: a table, and a picture of the curves. And what ``reproduce.py`` makes of many runs.

    python recipes/report.py recipes/results/cifar10-dense-0.json recipes/results/cifar10-dgc-0.json --out curves.png
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import cifar10
import job
import numpy as np
import ptb
import typer
from rich.console import Console
from rich.table import Table

Result = dict[str, Any]  # what a recipe's --out wrote


@dataclass(frozen=True)
class Recipe:
    main: Callable[..., None]
    config: Callable[[Any, int], Any]
    measure: str  # the key of what counts
    title: str  # of the table's column, where it is the last test
    curve: str  # the picture's title, where it is that of each epoch
    axis: str
    unit: str = ""
    scale: str = "linear"


RECIPES = {
    "cifar10": Recipe(cifar10.main, cifar10.config, "accuracy", "test accuracy", "test accuracy", "top-1 (%)", " %"),
    "ptb": Recipe(ptb.main, ptb.config, "perplexity", "test perplexity", "validation perplexity", "perplexity",
                  scale="log"),  # lower is better
}
NAMES = {"dense": "dense", "fp16": "Horovod's fp16", "naive": "naive top-k", "topk": "gradient dropping"}
PARTS = ("momentum_correction", "factor_masking", "local_clipping", "local_weight_decay")  # that can be switched off
COLOURS = ("tab:gray", "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")


def label(result: Result) -> str:
    chosen = result["settings"]
    if result["workers"] == 1:
        return "one worker"  # exchanges nothing
    if chosen["method"] != "dgc":
        return NAMES[chosen["method"]]
    without = [f", no {part.replace('_', ' ')}" for part in PARTS if not chosen.get(part, True)]
    without += [", no warm-up"] if chosen.get("warmup_epochs") == 0 else []
    kept = chosen["sparsity"]
    return f"DGC {kept if isinstance(kept, str) else f'{100 * kept:.5g} %'}{''.join(without)}"


def settings(result: Result) -> Any:
    """The recipe's Config of a run; with Horovod's own methods, that of dense training."""
    recipe = RECIPES[result["recipe"]]
    return recipe.config(argparse.Namespace(**complete(recipe, result["settings"])), result["steps_per_epoch"])


def complete(recipe: Recipe, settings: Mapping[str, Any]) -> dict[str, Any]:
    """With the defaults of those that are lacking, as the recipe may not have had them at the time."""
    defaults = {key: option.default for key, option in inspect.signature(recipe.main).parameters.items()
                if key not in job.NO_SETTINGS}
    return {**defaults, **settings}


def measured(result: Result) -> float:
    """What counts: the accuracy in per cent, or the perplexity."""
    return result[RECIPES[result["recipe"]].measure]


def shown(result: Result) -> str:
    return f"{measured(result):.2f}{RECIPES[result['recipe']].unit}"


def ratios(result: Result) -> tuple[float, float]:
    """The bytes of dense training over those of this one: in all, warm-up included, and at its end."""
    nbytes = [epoch["bytes_per_step"] for epoch in result["history"]]
    return tuple(result["dense_bytes_per_step"] / n if n else np.nan for n in (np.mean(nbytes), min(nbytes)))


def times(ratio: float) -> str:
    return "-" if np.isnan(ratio) else f"{ratio:,.1f} x"  # one worker sends nothing


# -- some runs ---------------------------------------------------------------------------------------------------------

def table(results: list[Result]) -> Table:
    """Bytes and step time are means over all of training, warm-up included; the ratio is also given for its end."""
    recipe = RECIPES[results[0]["recipe"]]
    out = Table("", recipe.title, "bytes sent / worker / step", "compression", "after warm-up", "step time")
    for result in results:
        sent, seconds = (np.mean([epoch[key] for epoch in result["history"]])
                         for key in ("bytes_per_step", "step_seconds"))
        out.add_row(label(result), shown(result), f"{sent:,.0f}", *map(times, ratios(result)),
                    f"{1000 * seconds:,.0f} ms")
    return out


def picture(results: list[Result], out: Path) -> None:
    """Training loss and what is measured over the epochs, and the sparsity over the steps."""
    recipe = RECIPES[results[0]["recipe"]]
    figure, (loss, measure, sparsity) = panels(3)
    for i, result in enumerate(results):
        epochs, style = result["history"], {"label": label(result), "color": COLOURS[i % len(COLOURS)]}
        fine = [(i + j / len(epoch["losses"]), value) for i, epoch in enumerate(epochs)
                for j, value in enumerate(epoch.get("losses", []))]
        points = fine if len(epochs) < 5 and fine else [(epoch["epoch"], epoch["loss"]) for epoch in epochs]
        loss.plot(*zip(*points, strict=True), **style)
        measure.plot([epoch["epoch"] for epoch in epochs], [epoch[recipe.measure] for epoch in epochs], ".-", **style)
        kept = settings(result)
        steps = range(len(epochs) * result["steps_per_epoch"])
        sparsity.step(steps, [100 * kept.sparsity_at(step) * (result["workers"] > 1) for step in steps], where="post",
                      **style)
    loss.set(xlabel="epoch", ylabel="loss", title="training loss of worker 0", ylim=(0, None))
    measure.set(xlabel="epoch", ylabel=recipe.axis, title=recipe.curve, xlim=(0, None), yscale=recipe.scale)
    sparsity.set(xlabel="step", ylabel="entries kept back (%)", title="sparsity", ylim=(-4, 104))
    measure.legend(frameon=False, loc="best")
    save(figure, out)


def panels(columns: int, width: float = 12, height: float = 3.6) -> tuple[Any, Any]:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    return plt.subplots(1, columns, figsize=(width, height), layout="constrained")


def save(figure: Any, out: Path) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogFormatter, LogFormatterSciNotation
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_formatter(), LogFormatterSciNotation):  # 200, not 2 x 10^2
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    plt.close(figure)


# -- a matrix of runs --------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Row:
    """One line of an ablation."""

    title: str
    results: Mapping[int, Result]  # seed -> the run's, as far as there are any
    asked: int  # number of seeds
    paper: str  # the paper's difference to dense training


Lines = Mapping[str, Mapping[float, "Result | None"]]  # line -> where on the axis -> the run's result, if there is one

BySeed = Mapping[str, Mapping[Any, Mapping[int, float]]]  # line -> where on the axis -> seed -> what was measured


def paired(ours: Mapping[int, float], dense: Mapping[int, float]) -> list[float]:
    """The differences between runs of the same seed."""
    return [ours[seed] - dense[seed] for seed in sorted(ours.keys() & dense.keys())]


def difference(ours: Mapping[int, float], dense: Mapping[int, float]) -> tuple[float, float]:
    """The mean difference between runs of the same seed, and the half-width of its 95 % interval (Student's t).

    NaN where there is no such pair; the half-width also with one pair, which has no spread.
    """
    from scipy import stats
    pairs = np.array(paired(ours, dense))
    if len(pairs) < 2:
        return (float(pairs[0]) if len(pairs) else np.nan), np.nan
    return float(pairs.mean()), float(stats.t.ppf(0.975, len(pairs) - 1) * pairs.std(ddof=1) / len(pairs)**0.5)


def ablation(recipe: Recipe, rows: list[Row]) -> str:
    """A Markdown table; the first row is that of dense training. The paper's column is there where a row has it."""
    def paper(cell: str) -> list[str]:
        return [cell] if any(row.paper for row in rows) else []

    values = [{seed: measured(result) for seed, result in row.results.items()} for row in rows]
    lines = []
    for row, ours in zip(rows, values, strict=True):
        found, all_values = list(row.results.values()), np.array(list(ours.values()))
        mean = f"{all_values.mean():.2f}{recipe.unit}" if found else "-"
        spread = f"{all_values.std(ddof=1):.2f}" if len(found) > 1 else "-"
        apart, half = (np.nan, np.nan) if row is rows[0] else difference(ours, values[0])
        interval = "" if np.isnan(half) else f" [{apart - half:+.2f}, {apart + half:+.2f}]"
        ratio = [times(np.mean([ratios(result)[i] for result in found])) if found else "-" for i in (0, 1)]
        lines.append([row.title, f"{len(found)} of {row.asked}", mean, spread,
                      "-" if np.isnan(apart) else f"{apart:+.2f}{interval}", *paper(row.paper or "-"), *ratio])
    return markdown(["", "seeds", recipe.title, "standard deviation", "to dense [95 %]", *paper("the paper's"),
                     "compression", "after warm-up"], lines)


def ablation_picture(recipe: Recipe, rows: list[Row], out: Path) -> None:
    """A dot for each seed, a bar for their mean; only rows that have results, and again only those near the first."""
    rows = [row for row in rows if row.results]
    values = [[measured(result) for result in row.results.values()] for row in rows]
    near = [x for row in values for x in row if abs(np.mean(row) / np.mean(values[0]) - 1) < 0.05]
    closer = len(near) < sum(map(len, values))
    figure, _ = panels(1 + closer, 12 if closer else 8, 0.5 * len(rows) + 1.2)
    for axes in figure.axes:
        for y, row in enumerate(values):
            colour = COLOURS[y % len(COLOURS)]
            axes.plot(row, [y] * len(row), "o", color=colour, alpha=0.6)
            axes.plot([np.mean(row)], [y], "|", color=colour, markersize=20, markeredgewidth=2)
        axes.set_yticks(range(len(rows)), [])
        axes.set(xlabel=f"{recipe.title}{recipe.unit and f' ({recipe.unit.strip()})'}", xscale=recipe.scale,
                 ylim=(len(rows) - 0.4, -0.6))
    figure.axes[0].set_yticklabels([f"{row.title}, {len(row.results)} of {row.asked} seeds" for row in rows])
    if closer:
        around = 0.1 * (max(near) - min(near)) or 0.01 * near[0]
        figure.axes[0].set(title="all")
        figure.axes[1].set(xscale="linear", xlim=(min(near) - around, max(near) + around),
                           title="those near dense training")
    save(figure, out)


def grid(corner: str, lines: Lines, head: Callable[[float], str], cell: Callable[[str, float, Result | None], str],
         ) -> str:
    """A Markdown table with a column for each line."""
    places = dict.fromkeys(x for line in lines.values() for x in line)
    return markdown([corner, *lines], [[head(x), *(cell(name, x, line.get(x)) for name, line in lines.items())]
                                       for x in places])


def against(lines: BySeed, x: Any) -> Mapping[int, float]:
    """What is compared with: of the first line, what is at the same place, or all that it has."""
    first = next(iter(lines.values()))
    return first[x] if x in first else next(iter(first.values()))


def differences(corner: str, lines: BySeed, head: Callable[[Any], str], recipe: Recipe) -> str:
    """A Markdown table of means over seeds, with a row for each line; the others are compared with the first."""
    places = dict.fromkeys(x for line in lines.values() for x in line)

    def cell(line: Mapping[Any, Mapping[int, float]], x: Any) -> str:
        if not (ours := line.get(x)):
            return "-" if x in line else ""
        base = against(lines, x)
        apart, _ = difference(ours, base)
        return f"{sum(ours.values()) / len(ours):.2f}{recipe.unit}" + (
            "" if ours is base or np.isnan(apart) else f" ({apart:+.2f})")

    return markdown([corner, *map(head, places)], [[name, *(cell(line, x) for x in places)]
                                                   for name, line in lines.items()])


def differences_picture(recipe: Recipe, panes: Mapping[str, BySeed], out: Path) -> None:
    """To the first line, of sparsities: a dot for each seed, and the means joined. A pane for each set of lines."""
    figure, _ = panels(len(panes), 1 + 4.5 * len(panes))
    for (title, lines), axes in zip(panes.items(), figure.axes, strict=True):
        name, *others = lines
        axes.axhline(0, color=COLOURS[0], linewidth=1, label=name)
        places = dict.fromkeys(x for other in others for x in lines[other])
        for i, other in enumerate(others, 1):
            pairs = {100 * (1 - x): paired(ours, against(lines, x)) for x, ours in lines[other].items()}
            dots = [(x, apart) for x, every in pairs.items() for apart in every]
            means = [(x, np.mean(every)) for x, every in pairs.items() if every]
            if dots:
                axes.plot(*zip(*dots, strict=True), "o", color=COLOURS[i], alpha=0.6)
                axes.plot(*zip(*means, strict=True), "-", color=COLOURS[i], label=other)
        axes.set(title=title, xlabel="entries sent (%)", xscale="log")
        axes.set_xticks([100 * (1 - x) for x in places], [f"{100 * (1 - x):.2g}" for x in places])
        axes.minorticks_off()
    figure.axes[0].set_ylabel(f"{recipe.title}, difference to dense")
    figure.axes[0].legend(frameon=False)
    save(figure, out)


def lines_picture(recipe: Recipe, lines: Lines, out: Path, xlabel: str, where: Callable[[float], float],
                  tick: Callable[[float], str], dense: Result | None = None) -> None:
    """What is measured along an axis; and, where there is dense training to compare it with, against the compression.
    Only what has results.
    """
    panes: dict[str, Callable[[float, Result], float]] = {xlabel: lambda x, result: where(x)}
    if dense:
        panes["compression over all of training"] = lambda x, result: ratios(result)[0]
    figure, _ = panels(len(panes), 3 + 4 * len(panes))
    for axes, (label, place) in zip(figure.axes, panes.items(), strict=True):
        for i, (name, line) in enumerate(lines.items()):
            if found := {x: result for x, result in line.items() if result}:
                axes.plot([place(*run) for run in found.items()], [measured(result) for result in found.values()], ".-",
                          color=COLOURS[i % len(COLOURS)], label=f"{name}, {len(found)} of {len(line)} runs")
        if dense:
            axes.axhline(measured(dense), color="black", linewidth=1, linestyle=":", label="dense")
        axes.set(xlabel=label, ylabel=recipe.axis, yscale=recipe.scale, xscale="log")
    first = figure.axes[0]
    places = {where(x): tick(x) for line in lines.values() for x, result in line.items() if result}
    first.set_xticks(list(places), list(places.values()))
    first.minorticks_off()
    figure.legend(*first.get_legend_handles_labels(), frameon=False, loc="outside right upper")
    save(figure, out)


def markdown(head: list[str], lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *lines])


def main(files: Annotated[list[Path], typer.Argument(help="JSON files that a recipe's --out wrote.", exists=True)],
         out: Annotated[Path, typer.Option(help="The picture.")] = Path("runs/curves.png")) -> None:
    """Compares runs of one of the recipes on the same data."""
    results = [json.loads(file.read_text()) for file in files]
    for key in ("recipe", "dataset"):
        if len(values := {result[key] for result in results}) > 1:
            raise typer.BadParameter(f"the results must be of one {key}, got {', '.join(sorted(values))}")
    Console(width=120).print(table(results))
    picture(results, out)
    print(f"Curves: {out}")


if __name__ == "__main__":
    typer.run(main)
