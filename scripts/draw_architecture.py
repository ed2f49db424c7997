"""Draws docs/architecture.png: the rooms that a gradient passes, from the backward pass to the parameter.

    python scripts/draw_architecture.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

ROOMS = [  # title, files, left, bottom, width, height, colour
    ("frontends", "optimizer, ddp", 0.2, 4.6, 2.6, 1.2, "#dbe9f6"),
    ("engine", "", 3.3, 2.2, 6.4, 3.6, "#e6f2e2"),
    ("paths", "compressed, allgather, shared,\ndense, sparse (no I/O)", 3.3, 0.2, 3.0, 1.4, "#fdf0d5"),
    ("compression", "residual, select, wire, kernels", 0.2, 0.2, 2.6, 1.4, "#fde2dc"),
    ("transport", "runner, streams;\nHorovod, torch.distributed, lockstep", 6.7, 0.2, 3.0, 1.4, "#eae3f3")]
STEPS = [  # text, left, bottom, width
    ("backward\na gradient arrives", 3.5, 4.1, 1.8), ("launch, outgoing\nits bucket leaves", 5.7, 4.1, 1.8),
    ("arrivals\nthe update comes", 7.7, 2.6, 1.8), ("optimizer_step\np.grad, then SGD", 7.7, 4.1, 1.8),
    ("scaling, nodes,\nnonfinite", 3.5, 2.6, 1.8)]
ARROWS = [  # from, to, where the label is, label, bend
    ((2.8, 4.75), (3.5, 4.6), (2.83, 4.85), "1 hook", ""), ((5.3, 4.55), (5.7, 4.55), (0, 0), "", ""),
    ((6.0, 4.1), (6.0, 1.6), (6.08, 1.8), "2 path", ""), ((5.3, 3.1), (6.0, 3.1), (0, 0), "", ""),
    ((3.3, 0.9), (2.8, 0.9), (2.82, 1.0), "3 u, v", ""), ((6.3, 1.0), (6.7, 1.0), (6.36, 1.1), "4", ""),
    ((6.7, 0.7), (6.3, 0.7), (0, 0), "", ""), ((8.6, 1.6), (8.6, 2.6), (8.68, 1.8), "5 update", ""),
    ((8.6, 3.5), (8.6, 4.1), (0, 0), "", ""),
    ((2.8, 5.45), (8.6, 5.0), (2.83, 5.52), "6 step()", "angle,angleA=0,angleB=90")]


def box(axes, left, bottom, width, height, colour, edge="#555555"):
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.1",
                                  facecolor=colour, edgecolor=edge, linewidth=1.0))


def main() -> None:
    figure, axes = plt.subplots(figsize=(10, 6.2), layout="constrained")
    axes.set(xlim=(0, 9.9), ylim=(0, 6.1))
    axes.axis("off")
    for title, files, left, bottom, width, height, colour in ROOMS:
        box(axes, left, bottom, width, height, colour)
        top = bottom + (0.32 if title == "engine" else height - 0.12)
        axes.text(left + 0.12, top, f"{title}/", fontsize=12, fontweight="bold", va="top")
        axes.text(left + 0.12, bottom + 0.15, files, fontsize=9, va="bottom")
    for text, left, bottom, width in STEPS:
        box(axes, left, bottom, width, 0.9, "white", "#999999")
        axes.text(left + width / 2, bottom + 0.45, text, fontsize=9, ha="center", va="center")
    for start, end, at, label, bend in ARROWS:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#333333", "linewidth": 1.4,
                                                  **({"connectionstyle": bend} if bend else {})})
        axes.text(*at, label, fontsize=8, color="#333333")
    axes.text(0.2, 3.2, "4: the path yields a collective,\n    and is sent its result", fontsize=9, va="center")
    figure.savefig(Path(__file__).resolve().parents[1] / "docs" / "architecture.png", dpi=110)


if __name__ == "__main__":
    main()
