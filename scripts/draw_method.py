"""Draws docs/method.png, what workers do with their gradients in a step, and docs/exchange.png, who sends what to whom.

    python scripts/draw_method.py

The numbers are made up: 24 entries, of which 2 are sent, so that they can be seen. In training it is one of a thousand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dgc import drawing

DOCS = Path(__file__).resolve().parents[1] / "docs"
ENTRIES, SENT, SEED = 24, 2, 913
WAITED, NEW, KEPT = "#c9cdd3", "#8a9099", "#b4b9c1"
WORKERS = 6  # of the exchange
SUMS = 2  # that owners send, all together: as many as a worker has chosen
SINGLE, OWNED = "#66aad1", "#d5dae0"

# -- one step ----------------------------------------------------------------------------------------------------------


def bars(axes: Any, values: Any, colours: Any, below: Any = None) -> None:
    axes.bar(range(len(values)), values, width=0.75, color=colours, bottom=below)
    axes.axhline(0, color="#555555", linewidth=0.8)
    axes.set(xlim=(-1, len(values)), ylim=(-3.1, 3.1))
    bare(axes)


def bare(axes: Any) -> None:
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def worker(row: Any, name: str, rng: np.random.Generator) -> Any:
    """Draws one worker's two pictures; returns what it sends. New gradients have the sign of what waited, which
    shows the sum.
    """
    waited = rng.normal(0, 0.75, ENTRIES)
    waited[rng.choice(ENTRIES, SENT, replace=False)] *= 2.2
    new = np.sign(waited) * abs(rng.normal(0, 0.55, ENTRIES))
    v = waited + new
    least = np.sort(abs(v))[-SENT]
    chosen = abs(v) >= least
    bars(row[0], waited, WAITED)
    bars(row[0], new, NEW, waited)
    bars(row[1], v, np.where(chosen, drawing.DGC, KEPT))
    for line in (least - 0.08, 0.08 - least):
        row[1].axhline(line, color=drawing.DGC, linewidth=0.9, linestyle="--")
    row[1].text(
        ENTRIES - 0.5, least, "threshold", color=drawing.DGC, fontsize=9, ha="right", va="bottom"
    )
    row[0].set_ylabel(name, fontweight="bold", labelpad=8)
    return np.where(chosen, v, 0)


def arrow(figure: Any, colour: str, *corners: tuple[float, float]) -> None:
    """From corner to corner, with its head at the last."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import FancyArrowPatch

    figure.add_artist(Line2D(*zip(*corners[:-1], strict=True), color=colour, linewidth=1.6))
    figure.add_artist(
        FancyArrowPatch(
            *corners[-2:],
            transform=figure.transFigure,
            arrowstyle="-|>",
            mutation_scale=15,
            color=colour,
            linewidth=1.6,
            shrinkA=0,
            shrinkB=0,
        )
    )


def method() -> None:
    rng = np.random.default_rng(SEED)
    figure, unused = drawing.panels(height=4.1)
    unused.remove()
    figure.set_layout_engine("none")
    lefts, width, height, bottoms = (0.045, 0.365), 0.27, 0.3, (0.555, 0.11)
    places = [
        [figure.add_axes((left, bottom, width, height)) for left in lefts] for bottom in bottoms
    ]
    sent = [worker(row, f"worker {i + 1}", rng) for i, row in enumerate(places)]
    result = figure.add_axes((0.745, 0.33, 0.245, height))
    bars(result, np.mean(sent, axis=0), drawing.DGC)
    for left, title in (
        (lefts[0], "1. Add the new gradient (dark)\nto what waited (light)."),
        (lefts[1], "2. Choose the largest entries\n(blue)."),
        (0.745, "3. Send them. All get the\nsame update: the mean of\nwhat was sent."),
    ):
        figure.text(left, 0.985, title, fontsize=11, va="top")
    for bottom, target in zip(bottoms, (0.53, 0.43), strict=True):
        middle, low = bottom + height / 2, bottom - 0.06
        arrow(figure, drawing.DENSE, (0.32, middle), (0.362, middle))
        arrow(figure, drawing.DGC, (0.64, middle), (0.742, target))
        arrow(
            figure, drawing.DENSE, (0.53, bottom), (0.53, low), (0.15, low), (0.15, bottom + 0.01)
        )
        figure.text(
            0.34,
            low,
            "The rest (grey) waits for the next step.",
            color=drawing.DENSE,
            ha="center",
            va="center",
            fontsize=9,
            backgroundcolor="white",
        )
    figure.text(
        0.685,
        0.48,
        "0.1 % of\nthe entries",
        color=drawing.DGC,
        ha="center",
        va="center",
        fontsize=9,
    )
    drawing.save(figure, DOCS / "method.png")


# -- the exchange ------------------------------------------------------------------------------------------------------


def grid(axes: Any, held: Any, title: str, owners: bool = False, waits: Any = None) -> None:
    """Workers by entries: blue where a worker has an entry, dark where that is a sum, outlined where a sum waits."""
    from matplotlib.patches import Rectangle

    for worker, entry in np.ndindex(held.shape):
        empty = OWNED if owners and entry * WORKERS // ENTRIES == worker else "#f0f1f3"
        colour = (empty, SINGLE, drawing.DGC)[min(held[worker, entry], 2)]
        waiting = waits is not None and waits[worker, entry]
        axes.add_patch(
            Rectangle(
                (entry + 0.08, worker + 0.08),
                0.84,
                0.84,
                facecolor=colour,
                edgecolor=drawing.DGC,
                linewidth=1.5 if waiting else 0,
            )
        )
    axes.set(xlim=(-0.1, ENTRIES + 0.1), ylim=(WORKERS + 0.1, -0.1))
    axes.set_title(title, fontsize=10)
    bare(axes)


def chosen() -> Any:
    """What each worker chooses; large entries are often those of several workers."""
    found = np.zeros((WORKERS, ENTRIES), int)
    for worker, entries in enumerate(((2, 13), (2, 18), (7, 13), (2, 21), (13, 16), (7, 10))):
        found[worker, list(entries)] = 1
    return found


def exchange() -> None:
    mine = chosen()
    total = mine.sum(0)
    at_owner = np.where(
        np.arange(ENTRIES) * WORKERS // ENTRIES == np.arange(WORKERS)[:, None], total, 0
    )
    by_size = np.argsort(-total, kind="stable")
    sent = np.where(np.isin(np.arange(ENTRIES), by_size[:SUMS]), total, 0)
    figure, unused = drawing.panels(height=4.6)
    unused.remove()
    axes = figure.subplot_mosaic(
        [["mine", "all", "words"], ["mine", "owners", "sums"]], height_ratios=(1, 1)
    )
    grid(
        axes["mine"],
        mine,
        "Each of 6 workers (rows) chooses\nits 2 largest of 24 entries (columns).",
    )
    grid(
        axes["all"],
        np.tile(total, (WORKERS, 1)),
        "All-gather. Every worker gets all of\nthem, and adds up (dark: a sum).",
    )
    grid(
        axes["owners"],
        at_owner,
        "Reduce, round 1. Each entry goes to\nits owner (darker grey), who adds up.",
        True,
    )
    grid(
        axes["sums"],
        np.tile(sent, (WORKERS, 1)),
        "Reduce, round 2. Owners send the 2\nlargest sums to all. Others wait (outlined).",
        True,
        at_owner * (sent == 0),
    )
    bare(axes["words"])
    axes["words"].text(
        0.02,
        0.5,
        "What a worker sends, in messages\nof its own chosen entries:\n\n"
        "all-gather: N \N{MINUS SIGN} 1, which grows with\nthe number of workers N\n\n"
        "reduce: 5 to 10, with N from 4 to 1,024\n(ResNet-50, 99.9 %), as it chooses\n"
        "three times as many as are drawn",
        va="center",
    )
    drawing.save(figure, DOCS / "exchange.png")


if __name__ == "__main__":
    method()
    exchange()
