"""One Markdown table of what train.py has written, and of measure.py's times; and figures: what is lost against bytes
sent, and accuracy or perplexity against composed seconds.

    python benchmarks/peers/table.py benchmarks/results/peers/*.json --measured benchmarks/results/peers-measured.json \
        --out docs/peers.png
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
from dgc import drawing
from dgc.drawing import DENSE as GREY
from dgc.drawing import DGC as BLUE
from peers import METHODS, compose, predict
from peers.interval import half_width
from peers.tasks import TASKS

STYLES = {
    "dense": (GREY, "o"),
    "DGC": (BLUE, "o"),  # the marker tells the rest apart, too
    **dict(
        zip(
            ("quantised", "low rank", "sparse", "cast", "signs", "local steps", "late"),
            zip(drawing.MUTED, "^DosvPX", strict=True),
            strict=True,
        )
    ),
}
LEVEL = 0.9  # of intervals
FAR = 5.0  # points, or per cent of perplexity: what loses more is of another kind, and no part of intervals
# To be compared.
ALIKE = (
    "task",
    "dataset",
    "workers",
    "epochs",
    "steps_per_epoch",
    "parameters",
    "bf16",
)


def load(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The runs.

    Raises:
        typer.BadParameter: they cannot be compared, or a method has a seed twice, or none of them is dense.
    """
    runs = [json.loads(file.read_text()) for file in files]
    # Older files have none.
    runs = [{**run, "bf16": run["settings"].get("bf16", False)} for run in runs]
    for key in ALIKE:
        if len(found := {str(run.get(key)) for run in runs}) > 1:
            raise typer.BadParameter(
                f"{key} must be the same in all files, got {', '.join(sorted(found))}"
            )
    seen = [(run["method"], run["seed"]) for run in runs]
    if twice := sorted({pair for pair in seen if seen.count(pair) > 1}):
        raise typer.BadParameter(f"each method must have a seed once, got twice: {twice}")
    if not any(run["method"] == "dense" for run in runs):
        raise typer.BadParameter(
            "one of the files must be of --method dense, from which points are lost, got none"
        )
    return runs


def rows(
    runs: list[dict[str, Any]], measured: dict[str, Any] | None = None, target: float | None = None
) -> list[dict[str, Any]]:
    """One row a method, means over its seeds. Lost: to dense training with the same seeds, and the half-width of its
    interval, where the method has all of these, and is not ``FAR``.
    """
    task = TASKS[runs[0]["task"]]
    metric, target = task.metric, task.target if target is None else target
    dense = {run["seed"]: run[metric.name] for run in runs if run["method"] == "dense"}
    methods: dict[str, list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        methods.setdefault(run["method"], []).append(run)
    losses = {
        name: [
            metric.difference(run[metric.name], dense[run["seed"]])
            for run in own
            if run["seed"] in dense
        ]
        for name, own in methods.items()
    }
    near = {
        name: lost
        for name, lost in losses.items()
        if len(lost) == len(dense) and statistics.mean(lost) < FAR
    }
    half = half_width(list(near.values()), LEVEL)
    found = []
    for (name, own), lost in zip(methods.items(), losses.values(), strict=True):
        means = {key: mean([run[key] for run in own]) for key in ("bytes_per_step", "ratio")}
        # Older files have none.
        exchanging = statistics.mean(run.get("exchanging", 1.0) for run in own)
        predicted = {
            rate: predict.seconds(
                own[0]["collective"], means["bytes_per_step"], own[0]["workers"], rate, exchanging
            )
            for rate in predict.LINKS
        }
        found.append(
            {
                "method": name,
                **{key: own[0][key] for key in ("title", "collective", "paper")},
                **means,
                "predicted": predicted,
                "lost": mean(lost),
                "half": half if name in near and name != "dense" else None,
                "score": (score := mean([run[metric.name] for run in own])),
                "order": metric.order(score),
                "seeds": [run["seed"] for run in own],
                **compose.times(own, measured or {"seconds": {}}, exchanging, target),
            }
        )
    return sorted(found, key=lambda row: -row["bytes_per_step"])


def mean(values: list[Any]) -> float | None:
    return None if not values or None in values else statistics.mean(values)


def _seeds(seeds: list[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def markdown(found: list[dict[str, Any]], task: Any, target: float) -> str:
    """The table; "-" is what has not been measured."""
    metric = task.metric
    exchange = [
        f"exchange at {name}: predicted, the wire alone | measured, with local work"
        for name in predict.NAMES.values()
    ]
    to_target = [
        f"seconds to {target:g}{metric.unit} at {name}, composed" for name in predict.NAMES.values()
    ]
    lines = [
        "| method | collective | bytes / worker / step | compression | "
        f"{metric.title} | {metric.lost} [{100 * LEVEL:.0f} %] | seeds | "
        f"local work | {' | '.join(exchange + to_target)} |",
        "|" + 14 * "---|",
    ]
    for row in found:
        name = f"{row['title']} ({row['paper']})" if row["paper"] else row["title"]
        lost = shown(row["lost"], "+.2f") + shown(row["half"], ".2f", before=" ± ", none="")
        cells = [
            name,
            row["collective"],
            shown(row["bytes_per_step"], ",.0f"),
            shown(row["ratio"], ",.1f", " x"),
            shown(row["score"], ".2f", metric.unit),
            lost,
            _seeds(row["seeds"]),
            milliseconds(row["local"]),
        ]
        cells += [
            milliseconds(row[kind][rate])
            for rate in predict.LINKS
            for kind in ("predicted", "exchange")
        ]
        cells += [
            "not reached"
            if row["epochs"] is None and row["step"][rate] is not None
            else shown(row["seconds"][rate], ",.0f")
            for rate in predict.LINKS
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def milliseconds(value: float | None) -> str:
    return shown(None if value is None else 1e3 * value, ".2f", " ms")


def shown(value: float | None, form: str, unit: str = "", before: str = "", none: str = "-") -> str:
    return none if value is None else f"{before}{value:{form}}{unit}"


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both, in rising order of the first; less is better."""
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def style(method: str) -> tuple[str, str]:
    """Colour and marker."""
    return STYLES[METHODS[method].family]


def draw(found: list[dict[str, Any]], axis: str, out: Path) -> None:
    found = [row for row in found if row["lost"] is not None and row["bytes_per_step"]]
    points = [(row["bytes_per_step"], row["lost"]) for row in found]
    figure, axes = drawing.panels(height=5.4)
    axes.plot(
        *zip(*front(points), strict=True),
        color="#bbbbbb",
        linewidth=1,
        zorder=1,
        label="Pareto front",
    )
    for row, (x, y) in zip(found, points, strict=True):
        colour, marker = style(row["method"])
        axes.scatter(x, y, color=colour, marker=marker, s=40, zorder=3)
    axes.set(xscale="log", xlabel="sent / worker / step, mean over the training", ylabel=axis)
    axes.margins(0.12)
    drawing.byte_axis(axes, "x")
    axes.invert_yaxis()  # better is up
    axes.legend(frameon=False, loc="lower right")
    figure.draw_without_rendering()
    label(figure, axes, found, points)
    drawing.save(figure, out)


def label(
    figure: Any, axes: Any, found: list[dict[str, Any]], points: list[tuple[float, float]]
) -> None:
    """Writes each method's name beside its point, at the nearest free place around it."""
    renderer = figure.canvas.get_renderer()
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in axes.transData.transform(points)]
    for row, point in zip(found, points, strict=True):
        colour, _ = style(row["method"])
        line = {"arrowstyle": "-", "color": "#cccccc", "lw": 0.6}
        places = [
            (dx, dy) for reach in range(0, 90, 10) for dy in (reach, -reach) for dx in (8, -8)
        ]
        for dx, dy in places:
            text = axes.annotate(
                row["title"],
                point,
                (dx, dy),
                textcoords="offset points",
                color=colour,
                fontsize=8,
                ha="left" if dx > 0 else "right",
                va="center",
                arrowprops=line if abs(dy) > 10 else None,
            )
            box = text.get_window_extent(renderer).extents
            inside = (
                axes.bbox.x0 < box[0]
                and box[2] < figure.bbox.x1
                and axes.bbox.y0 < box[1] < box[3] < axes.bbox.y1
            )
            if inside and not any(overlap(box, other) for other in taken):
                break
            if (dx, dy) != places[-1]:
                text.remove()
        taken.append(tuple(box))


def overlap(a: Any, b: Any) -> bool:
    return bool(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3])


def main(
    files: Annotated[list[Path], typer.Argument(help="What train.py --out wrote.", exists=True)],
    measured: Annotated[
        Path | None, typer.Option(help="What measure.py --out wrote.", exists=True)
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="Test accuracy in per cent, or validation perplexity, for its seconds; 80, or 115."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="PNG of points against bytes; with --measured, that of the seconds lies beside it."
        ),
    ] = None,
) -> None:
    """Prints the table, and draws the figures."""
    runs = load(files)
    task = TASKS[runs[0]["task"]]
    target = task.target if target is None else target
    found = rows(runs, measured and compose.load(measured, runs), target)
    print(markdown(found, task, target), end="")
    if out:
        draw(found, task.metric.axis, out)
    if out and measured:
        compose.draw(
            found, target, task.metric, style, out.with_name(f"{out.stem}-seconds{out.suffix}")
        )


if __name__ == "__main__":
    typer.run(main)
