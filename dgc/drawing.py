"""How every figure of the project looks: colours, size, names beside lines in place of a legend.

Dense training is grey and DGC blue in all of them; all else is muted. The colours are Okabe and
Ito's blue and Paul Tol's muted scheme, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DENSE, DGC = "#6b6b6b", "#0072b2"
MUTED = ("#cc6677", "#117733", "#882255", "#999933", "#aa4499", "#6699cc", "#44aa99")
BAND = 0.18  # opacity of a band from the lowest to the highest seed
WIDTH = 9.0  # inches; a page shows it at 700 to 830 pixels, where text of 10 points has 11 to 13
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
}


def panels(columns: int = 1, rows: int = 1, height: float = 3.4, **options: Any) -> tuple[Any, Any]:
    """A figure of the usual width, and its axes as ``subplots`` gives them.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(STYLE)
    return plt.subplots(rows, columns, figsize=(WIDTH, height), layout="constrained", **options)


def save(figure: Any, out: Path) -> None:
    from matplotlib import pyplot as plt

    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def log_axis(
    axes: Any, which: str, places: Sequence[float], shown: Callable[[float], str] = "{:g}".format
) -> None:
    """Makes x or y logarithmic, with ticks at these places and no others."""
    from matplotlib.ticker import NullLocator

    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}ticks")(list(places), [shown(x) for x in places])
    getattr(axes, f"{which}axis").set_minor_locator(NullLocator())


def byte_axis(axes: Any, which: str) -> None:
    """Makes x or y one of bytes, logarithmic, with its unit in each tick. The limits must be set by
    then.
    """
    from matplotlib.ticker import EngFormatter

    log_axis(axes, which, places(*getattr(axes, f"get_{which}lim")()), EngFormatter("B"))


def places(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: powers of ten; of less than two decades, 2, 3 and 5 times these,
    too.
    """
    steps = (1, 2, 3, 5) if high < 100 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**n for n in powers for step in steps if low <= step * 10.0**n <= high]


def name_lines(axes: Any, names: Sequence[tuple[str, tuple[float, float], str]]) -> None:
    """Writes each text to the right of its point, in its colour. Texts that would overlap move up
    and down, so the limits must be set by then.
    """
    texts = [
        axes.annotate(
            text,
            point,
            (6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )
        for text, point, colour in names
    ]
    axes.figure.draw_without_rendering()
    pixels = axes.figure.dpi / 72
    heights = [axes.transData.transform(point)[1] / pixels for _, point, _ in names]
    lines = [text.count("\n") + 1 for text, _, _ in names]
    for text, height, place in zip(
        texts, heights, spread(heights, [13.0 * n for n in lines]), strict=True
    ):
        text.set_position((6, place - height))


def spread(places: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """The nearest places to these at which things of these sizes, in the order of their places, do
    not overlap.
    """
    groups: list[list[int]] = []
    middles: list[float] = []

    def total(group: list[int]) -> float:
        return sum(sizes[i] for i in group)

    for i in sorted(range(len(places)), key=lambda i: places[i]):
        group, middle = [i], places[i]
        while groups and middles[-1] + total(groups[-1]) / 2 > middle - total(group) / 2:
            group = groups.pop() + group
            middles.pop()
            middle = sum(places[j] for j in group) / len(group)
        groups.append(group)
        middles.append(middle)
    found = [0.0] * len(places)
    for group, middle in zip(groups, middles, strict=True):
        below = middle - total(group) / 2
        for i in group:
            found[i] = below + sizes[i] / 2
            below += sizes[i]
    return found
