"""The figures of a matrix of runs, from the results alone: the parts one by one, length, sparsity."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import report
from report import BySeed, Recipe, Result, Row, measured

from dgc import drawing


def ablation(recipe: Recipe, rows: list[Row], out: Path) -> None:
    """A dot for each seed, and the mean. What is far from the first row is told at the margin: its dots would have all
    others in one place.
    """
    rows = [row for row in rows if row.results]
    values = [[measured(result) for result in row.results.values()] for row in rows]
    means = [float(np.mean(row)) for row in values]
    near = [y for y, mean in enumerate(means) if abs(mean / means[0] - 1) < 0.05]
    low, high = (f(x for y in near for x in values[y]) for f in (min, max))
    around = 0.1 * (high - low) or 0.01 * low
    figure, axes = drawing.panels(height=0.42 * len(rows) + 0.9)
    axes.axvspan(
        min(values[0]), max(values[0]), color=drawing.DENSE, alpha=drawing.BAND, linewidth=0
    )
    for y, (row, mean) in enumerate(zip(values, means, strict=True)):
        colour = (
            drawing.DENSE if y == 0 else drawing.DGC if "DGC" in rows[y].title else drawing.MUTED[0]
        )
        text, side, left = f"{mean:.2f}{recipe.unit}", 1, True
        if y in near:
            axes.plot(row, [y] * len(row), "o", color=colour, alpha=0.6)
            axes.plot([mean], [y], "|", color=colour, markersize=18, markeredgewidth=2.5)
        elif mean < means[0]:
            text, side = f"\N{LEFTWARDS ARROW} {text}, far to the left", 0
        else:
            text, left = f"{text}, far to the right \N{RIGHTWARDS ARROW}", False
        axes.annotate(
            text,
            (side, y),
            (6 if left else -6, 0),
            xycoords=("axes fraction", "data"),
            color=colour,
            textcoords="offset points",
            va="center",
            ha="left" if left else "right",
        )
    axes.set_yticks(range(len(rows)), [row.title for row in rows])
    better = "higher" if recipe.unit else "lower"
    axes.set(
        xlabel=f"{recipe.title}{recipe.unit and ' (%)'}, {better} is better; a dot is a seed, a line their mean",
        xlim=(low - around, high + around),
        ylim=(len(rows) - 0.4, -0.6),
    )
    drawing.save(figure, out)


def differences(recipe: Recipe, lines: BySeed, out: Path) -> None:
    """To the first line, by sparsity: a dot for each seed, and the means joined. Only what has results."""
    figure, axes = drawing.panels(height=3.6)
    places = [100 * (1 - x) for x in sorted({x for line in lines.values() for x in line} - {0})]
    right = 1.2 * max(places)
    axes.axhline(0, color=drawing.DENSE)
    drawing.log_axis(axes, "x", places, "{:.2g}".format)
    axes.set(
        xlabel="entries sent (%)",
        xlim=(min(places) / 1.2, right),
        ylabel=f"{recipe.title}, difference ({'points' if recipe.unit else recipe.measure})",
        title="A dot is a seed, a line joins means",
    )
    ends, colours = [("dense", (right, 0.0), drawing.DENSE)], iter((drawing.DGC, *drawing.MUTED))
    for name in [*lines][1:]:
        pairs = {
            100 * (1 - x): report.paired(ours, report.against(lines, x))
            for x, ours in lines[name].items()
        }
        means = [(x, float(np.mean(every))) for x, every in sorted(pairs.items()) if every]
        if means:
            colour = next(colours)
            axes.plot(
                *zip(*((x, apart) for x, every in pairs.items() for apart in every), strict=True),
                "o",
                color=colour,
                alpha=0.5,
            )
            axes.plot(*zip(*means, strict=True), color=colour)
            ends.append((name, means[-1], colour))
    drawing.name_lines(axes, ends)
    drawing.save(figure, out)


def sparsity(
    recipe: Recipe,
    cells: Mapping[float, Mapping[float, Mapping[int, Result]]],
    dense: list[Result],
    usual: float,
    out: Path,
) -> None:
    """What is measured by the bytes of all of training: a line joins the warm-ups of one sparsity, dots are others. A
    vertical line goes from the lowest seed to the highest.

    Args:
        cells: epochs of warm-up -> sparsity -> seed -> result.
        usual: the sparsity whose warm-ups are joined.
    """
    figure, axes = drawing.panels(height=4.2)
    found = {
        (x, warmup): [*seeds.values()]
        for warmup, line in cells.items()
        for x, seeds in line.items()
        if seeds
    }
    points = {
        at: (
            float(np.mean([report.ratios(result)[0] for result in results])),
            float(np.mean([*map(measured, results)])),
        )
        for at, results in found.items()
    }
    axes.plot(
        *zip(*(points[at] for at in sorted(points) if at[0] == usual), strict=True),
        color=drawing.DGC,
    )
    for (x, warmup), point in points.items():
        seeds = [*map(measured, found[x, warmup])]
        colour = drawing.DGC if x == usual else drawing.MUTED[0]
        axes.plot([point[0]] * 2, [min(seeds), max(seeds)], color=colour, alpha=0.5)
        axes.plot(*point, "o", color=colour)
        text = f"{warmup:g} epoch{'s' * (warmup != 1)}" if warmup else "no warm-up"
        axes.annotate(
            text if x == usual else f"{100 * x:.5g} %, {text}",
            point,
            (7, 5 if x == usual else -4),
            textcoords="offset points",
            color=colour,
        )
    axes.set(
        xlabel="times fewer bytes than dense, over all of training",
        ylabel=f"{recipe.title} (%)",
        xlim=(0, 1.15 * max(x for x, _ in points.values())),
        title=f"Blue: {100 * usual:.5g} % with warm-ups of so many epochs; red: others. A dot: mean of seeds",
    )
    if dense:
        axes.axhspan(
            *(f(map(measured, dense)) for f in (min, max)),
            color=drawing.DENSE,
            alpha=0.4,
            linewidth=0,
        )
        drawing.name_lines(
            axes,
            [
                (
                    "dense",
                    (axes.get_xlim()[1], float(np.mean([*map(measured, dense)]))),
                    drawing.DENSE,
                )
            ],
        )
    drawing.save(figure, out)


def by_bytes(
    measure: str, points: Mapping[str, Mapping[float, tuple[float, float]]], out: Path, title: str
) -> None:
    """What is lost against dense training, by the bytes of all of it.

    Args:
        measure: what is lost of.
        points: a line for each exchange, a dot for each sparsity: how many times fewer bytes, and points.
    """
    figure, axes = drawing.panels(height=3.8)
    lines = {name: dict(sorted(line.items())) for name, line in points.items()}
    ratios = [x for line in lines.values() for x, _ in line.values()]
    right = 1.4 * max(ratios)
    axes.axhline(0, color=drawing.DENSE)
    drawing.log_axis(
        axes, "x", [n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500) if min(ratios) / 2 < n < right]
    )
    axes.set(
        xlabel="times fewer bytes than dense, over all of training",
        xlim=(min(ratios) / 1.4, right),
        ylabel=f"{measure}, difference (points)",
        title=title,
    )
    ends = [("dense", (right, 0.0), drawing.DENSE)]
    for (name, line), colour in zip(lines.items(), (drawing.DGC, *drawing.MUTED), strict=False):
        axes.plot(*zip(*line.values(), strict=True), "o-", color=colour)
        for sparsity, point in line.items():
            axes.annotate(
                f"{100 * sparsity:.5g} %", point, (6, 9), textcoords="offset points", color=colour
            )
        ends.append((name, [*line.values()][-1], colour))
    drawing.name_lines(axes, ends)
    drawing.save(figure, out)
