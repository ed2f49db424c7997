"""The figures of a matrix of runs, from the results alone: the parts one by one, length, workers, sparsity."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import report
from report import BySeed, Lines, Recipe, Result, Row, measured

from dgc import drawing

Name = tuple[str, tuple[float, float], str]  # of a line: the text, where the line ends, the colour


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
    axes.axvspan(min(values[0]), max(values[0]), color=drawing.DENSE, alpha=drawing.BAND, linewidth=0)
    for y, (row, mean) in enumerate(zip(values, means, strict=True)):
        colour = drawing.DENSE if y == 0 else drawing.DGC if "DGC" in rows[y].title else drawing.MUTED[0]
        text, side, left = f"{mean:.2f}{recipe.unit}", 1, True
        if y in near:
            axes.plot(row, [y] * len(row), "o", color=colour, alpha=0.6)
            axes.plot([mean], [y], "|", color=colour, markersize=18, markeredgewidth=2.5)
        elif mean < means[0]:
            text, side = f"\N{LEFTWARDS ARROW} {text}, far to the left", 0
        else:
            text, left = f"{text}, far to the right \N{RIGHTWARDS ARROW}", False
        axes.annotate(text, (side, y), (6 if left else -6, 0), xycoords=("axes fraction", "data"), color=colour,
                      textcoords="offset points", va="center", ha="left" if left else "right")
    axes.set_yticks(range(len(rows)), [row.title for row in rows])
    better = "higher" if recipe.unit else "lower"
    axes.set(xlabel=f"{recipe.title}{recipe.unit and ' (%)'}, {better} is better; a dot is a seed, a line their mean",
             xlim=(low - around, high + around), ylim=(len(rows) - 0.4, -0.6))
    drawing.save(figure, out)


def differences(recipe: Recipe, panes: Mapping[str, BySeed], out: Path) -> None:
    """To the first line, by sparsity: a dot for each seed, and the means joined. A pane for each set of lines, but for
    those that have nothing to show.
    """
    panes = {title: lines for title, lines in panes.items() if any(at for line in [*lines.values()][1:]
                                                                   for at in line.values())}
    figure, axes = drawing.panels(len(panes), sharey=True, squeeze=False)
    named = [differences_pane(pane, title, lines) for pane, (title, lines) in zip(axes[0], panes.items(), strict=True)]
    axes[0][0].set_ylabel(f"{recipe.title}, difference to dense ({'points' if recipe.unit else recipe.measure})")
    for pane, ends in zip(axes[0], named, strict=True):
        drawing.name_lines(pane, ends)
    drawing.save(figure, out)


def differences_pane(pane: Any, title: str, lines: BySeed) -> list[Name]:
    """Draws it; returns the names of its lines, where these end, and their colours."""
    name, *others = lines
    places = [100 * (1 - x) for x in dict.fromkeys(x for other in others for x in lines[other])]
    right = 1.3 * max(places)
    pane.axhline(0, color=drawing.DENSE)
    drawing.log_axis(pane, "x", places, "{:.2g}".format)
    pane.set(title=title, xlabel="entries sent (%)", xlim=(min(places) / 1.3, right))
    ends = [(name, (right, 0.0), drawing.DENSE)]
    for other, colour in zip(others, (drawing.DGC, *drawing.MUTED), strict=False):
        pairs = {100 * (1 - x): report.paired(ours, report.against(lines, x)) for x, ours in lines[other].items()}
        means = [(x, float(np.mean(every))) for x, every in sorted(pairs.items()) if every]
        if means:
            dots = [(x, apart) for x, every in pairs.items() for apart in every]
            pane.plot(*zip(*dots, strict=True), "o", color=colour, alpha=0.5)
            pane.plot(*zip(*means, strict=True), color=colour)
            ends.append((other, means[-1], colour))
    return ends


def workers(recipe: Recipe, lines: Lines, out: Path) -> None:
    """What is measured by the number of workers; only what has results."""
    figure, axes = drawing.panels(height=3.2)
    found = {name: {n: measured(result) for n, result in line.items() if result} for name, line in lines.items()}
    ends = []
    for (name, line), colour in zip(found.items(), report.colours(list(found)), strict=True):
        axes.plot(list(line), list(line.values()), ".-", color=colour)
        ends += [(f"{name} {value:.2f}", (n, value), colour) for n, value in [*line.items()][-1:]]
    drawing.log_axis(axes, "x", sorted({n for line in found.values() for n in line}))
    axes.set(xlabel="workers of batch 32; the more there are, the fewer steps", ylabel=f"{recipe.title} (%), seed 0")
    drawing.name_lines(axes, ends)
    drawing.save(figure, out)


def sparsity(recipe: Recipe, cells: Mapping[float, Mapping[float, Mapping[int, Result]]], dense: list[Result],
             usual: float, out: Path) -> None:
    """What is measured by the share of entries sent, and by the compression of all of training; a line for each warm-up
    joins the runs of the first seed, hollow dots are the other seeds'.

    Args:
        cells: epochs of warm-up -> sparsity -> seed -> result.
        usual: the warm-up that is in blue.
    """
    figure, panes = drawing.panels(2, sharey=True)
    muted = itertools.cycle(drawing.MUTED)
    colours = {warmup: drawing.DGC if warmup == usual else next(muted) for warmup in cells}
    places = (lambda x, _: 100 * (1 - x), lambda _, result: report.ratios(result)[0])
    named = [sparsity_pane(pane, cells, colours, place) for pane, place in zip(panes, places, strict=True)]
    drawing.log_axis(panes[0], "x", sorted({100 * (1 - x) for line in cells.values() for x in line}), "{:.2g}".format)
    panes[0].set(xlabel="entries sent (%)", ylabel=f"{recipe.title} (%)", title="numbers: epochs of warm-up")
    panes[1].set(xlabel="times fewer bytes than dense, over all of training", xlim=(0, None),
                title="hollow: other seeds" + "; grey band: dense" * bool(dense))
    for pane, ends in zip(panes, named, strict=True):
        if dense:
            pane.axhspan(*(f(map(measured, dense)) for f in (min, max)), color=drawing.DENSE, alpha=0.4, linewidth=0)
        drawing.name_lines(pane, ends)
    drawing.save(figure, out)


def sparsity_pane(pane: Any, cells: Mapping[float, Mapping[float, Mapping[int, Result]]], colours: Mapping[float, str],
                  place: Callable[[float, Result], float]) -> list[Name]:
    """Draws it; returns the names of its lines."""
    ends: list[Name] = []
    for warmup, line in cells.items():
        points = [[(place(x, result), measured(result)) for _, result in sorted(seeds.items())]
                  for x, seeds in sorted(line.items()) if seeds]
        if points:
            first = [seeds[0] for seeds in points]
            others = [point for seeds in points for point in seeds[1:]]
            pane.plot(*zip(*first, strict=True), ".-", color=colours[warmup])
            pane.plot([x for x, _ in others], [y for _, y in others], "o", markersize=4.5, fillstyle="none",
                      color=colours[warmup])
            ends.append((f"{warmup:g}" if warmup else "none", first[0], colours[warmup]))
    return ends
