"""Draws docs/method.png: what two workers do with their gradients in one step.

    python scripts/draw_method.py

Made-up numbers: 24 entries, of which 2 are sent, so that they can be seen; in training it is one of a thousand.
"""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ENTRIES, SENT = 24, 2
KEPT, CHOSEN, UPDATE = "#b4b9c1", "#1f6fb4", "#0b3c66"
TITLES = ("1. its gradient, with momentum,\nis added to what waits",
          "2. the largest entries are chosen", "3. they are sent, the rest waits\nfor the next step")
UPDATED = "4. all workers get the same\nupdate: the mean of\nwhat was sent"


def bars(axes, values, colours, limit=2.9):
    axes.bar(range(len(values)), values, width=0.75, color=colours)
    axes.axhline(0, color="#555555", linewidth=0.8)
    axes.set(xlim=(-1, len(values)), ylim=(-limit, limit), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def worker(row, name, rng):
    """One worker's three pictures, from left to right; returns what it sends."""
    waiting, new = rng.normal(0, 0.7, ENTRIES), rng.normal(0, 0.5, ENTRIES)
    waiting[rng.choice(ENTRIES, SENT, replace=False)] += rng.choice([-1, 1], SENT) * 1.9
    v = waiting + new
    chosen = np.isin(np.arange(ENTRIES), np.argsort(-abs(v))[:SENT])
    bars(row[0], v, KEPT)
    bars(row[1], v, np.where(chosen, CHOSEN, KEPT))
    bars(row[2], np.where(chosen, 0, v), KEPT)
    row[0].set_ylabel(name, fontsize=11, fontweight="bold", labelpad=8)
    return np.where(chosen, v, 0)


def arrow(figure, start, end):
    figure.add_artist(matplotlib.patches.FancyArrowPatch(
        start, end, transform=figure.transFigure, arrowstyle="-|>", mutation_scale=16, color=CHOSEN, linewidth=1.6))


def main() -> None:
    rng = np.random.default_rng(5)
    figure = plt.figure(figsize=(11, 3.9))
    places = [[figure.add_axes((0.05 + 0.235 * column, bottom, 0.2, 0.37)) for column in range(3)]
              for bottom in (0.43, 0.02)]
    sent = [worker(row, f"worker {i + 1}", rng) for i, row in enumerate(places)]
    for axes, title in zip(places[0], TITLES, strict=True):
        axes.set_title(title, fontsize=10.5, loc="left", pad=6)
    result = figure.add_axes((0.79, 0.225, 0.2, 0.37))
    mean = np.mean(sent, axis=0)
    bars(result, mean, np.where(mean != 0, UPDATE, KEPT))
    result.set_title(UPDATED, fontsize=10.5, loc="left", pad=8)
    for start, end in (((0.725, 0.6), (0.785, 0.47)), ((0.725, 0.22), (0.785, 0.35))):
        arrow(figure, start, end)
    figure.text(0.755, 0.41, "0.1 % of\nthe entries", fontsize=9, color=CHOSEN, ha="center", va="center")
    figure.savefig(Path(__file__).resolve().parents[1] / "docs" / "method.png", dpi=110)


if __name__ == "__main__":
    main()
