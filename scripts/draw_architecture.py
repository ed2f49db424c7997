"""Draws docs/architecture.png: the rooms that a gradient passes, with the numbers of docs/architecture.md.

python scripts/draw_architecture.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dgc import drawing

ROOMS = [  # title, text, left, bottom, width, height
    ("frontends/", "DistributedOptimizer,\nDDP's hook", 0.0, 2.3, 2.0, 2.1),
    ("engine/", "", 2.7, 2.3, 7.3, 2.1),
    ("compression/", "residual, select,\nwire, kernels", 0.0, 0.0, 2.0, 1.5),
    (
        "paths/",
        "4  The path: compressed, dense,\nowners, sparse, ...\nIt does no I/O.",
        2.7,
        0.0,
        3.1,
        1.5,
    ),
    (
        "transport/",
        "5  The collective travels: run;\nHorovod, torch.distributed,\nlockstep",
        6.8,
        0.0,
        3.2,
        1.5,
    ),
]
STEPS = [  # text, left
    ("1  A gradient arrives\n2  Stock or compressed\n\nengine, progress", 2.85),
    ("3  Its bucket leaves\n\nexchange,\ngradients", 5.27),
    ("6  The update comes\n\nexchange,\noptimizer_step", 7.69),
]
ARROWS = [  # from, to, label, where it is
    ((2.0, 3.1), (2.85, 3.1), "hook", (2.35, 3.18)),
    ((5.02, 3.1), (5.27, 3.1), "", (0, 0)),
    ((5.5, 2.5), (5.5, 1.5), "a generator", (5.42, 1.87)),
    ((2.7, 0.75), (2.0, 0.75), "u, v", (2.35, 0.83)),
    ((5.8, 1.0), (6.8, 1.0), "yields a\ncollective", (6.3, 1.06)),
    ((6.8, 0.6), (5.8, 0.6), "is sent\nits result", (6.3, 0.18)),
    ((8.77, 1.5), (8.77, 2.5), "", (0, 0)),
    ((2.0, 3.88), (8.77, 3.7), "step()", (2.35, 3.93)),
]


def box(
    axes: Any, left: float, bottom: float, width: float, height: float, colour: str, edge: str
) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch(
            (left, bottom),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=colour,
            edgecolor=edge,
            linewidth=1.0,
        )
    )


def main() -> None:
    figure, axes = drawing.panels(height=4.2)
    axes.set(xlim=(-0.05, 10.05), ylim=(-0.05, 4.5))
    axes.axis("off")
    for title, text, left, bottom, width, height in ROOMS:
        box(
            axes,
            left,
            bottom,
            width,
            height,
            "#e8f0f7" if title == "engine/" else "#f0f1f3",
            drawing.DENSE,
        )
        axes.text(
            left + 0.12, bottom + height - 0.1, title, fontsize=11, fontweight="bold", va="top"
        )
        axes.text(left + 0.12, bottom + height - 0.5, text, fontsize=9, va="top")
    for text, left in STEPS:
        box(axes, left, 2.5, 2.17, 1.2, "white", drawing.DGC)
        axes.text(left + 0.1, 3.6, text, fontsize=9, va="top")
    for start, end, label, at in ARROWS:
        bend = {"connectionstyle": "angle,angleA=0,angleB=90"} if label == "step()" else {}
        axes.annotate(
            "",
            end,
            start,
            arrowprops={
                "arrowstyle": "-|>",
                "color": drawing.DGC,
                "linewidth": 1.5,
                "shrinkA": 0,
                "shrinkB": 0,
                **bend,
            },
        )
        axes.text(
            *at,
            label,
            fontsize=8.5,
            color=drawing.DGC,
            ha="right" if label == "a generator" else "center",
        )
    drawing.save(figure, Path(__file__).resolve().parents[1] / "docs" / "architecture.png")


if __name__ == "__main__":
    main()
