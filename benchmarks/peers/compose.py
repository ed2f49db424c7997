"""Seconds to an accuracy, composed: the steps that a training needs, times what measure.py says a step takes.

Synchronous methods learn alike whatever the network, so the accuracy after a number of steps comes from train.py in one
process, without a network. A step takes as long as its forward and backward pass, and then the exchange. One step late,
the exchange is under way during these passes, but for the local work: a step takes the longer of the two. With an
asynchronous server it depends on the network how workers learn; nothing is composed for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from dgc import drawing

from . import predict
from .metric import Metric
from .tasks import metric_of

LATE, NEVER, OTHERS = ("stale", "stale-dgc"), "async", 3


def load(file: Path, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What measure.py wrote.

    Raises:
        typer.BadParameter: it is of other steps than those of the runs.
    """
    measured: dict[str, Any] = json.loads(file.read_text())
    own = {**runs[0], "batch_size": runs[0]["settings"]["batch_size"]}
    for key in ("task", "workers", "parameters", "batch_size"):
        if measured[key] != own[key]:
            raise typer.BadParameter(
                f"--measured must have the {key} of the runs, {own[key]}, got {measured[key]}"
            )
    return measured


def local(measured: dict[str, Any], method: str, exchanging: float) -> float | None:
    """Seconds of a worker's work in a step, on average; ``exchanging`` is the share of steps that exchange at all."""
    return average(measured["seconds"].get(f"local {method}"), exchanging)


def exchange(measured: dict[str, Any], method: str, rate: str, exchanging: float) -> float | None:
    """The same of an exchange, with the local work."""
    return average(measured["seconds"].get(f"exchange {rate} {method}"), exchanging)


def average(found: dict[str, Any] | None, exchanging: float) -> float | None:
    if found is None:
        return None
    if found["alone"] is None:  # every step exchanges
        return float(found["exchanging"])
    return exchanging * found["exchanging"] + (1 - exchanging) * found["alone"]


def step(
    measured: dict[str, Any], method: str, rate: str, exchanging: float, bf16: bool
) -> float | None:
    """Seconds of a step of training; None where a part has not been measured, or cannot be composed."""
    compute = measured["seconds"].get(f"compute {'bfloat16' if bf16 else 'float32'}")
    sent, work = exchange(measured, method, rate, exchanging), local(measured, method, exchanging)
    if compute is None or sent is None or method == NEVER:
        return None
    if method in LATE:
        return None if work is None else max(compute + work, sent)
    return compute + sent


def times(
    runs: list[dict[str, Any]], measured: dict[str, Any], exchanging: float, target: float
) -> dict[str, Any]:
    """What a table's row has besides, of a method's runs: seconds, by rate where they depend on it."""
    method, bf16, steps, metric = (
        runs[0]["method"],
        runs[0]["bf16"],
        runs[0]["steps_per_epoch"],
        metric_of(runs[0]),
    )
    until = metric.until(runs, target)
    each = {rate: step(measured, method, rate, exchanging, bf16) for rate in predict.LINKS}
    return {
        "local": local(measured, method, exchanging),
        "step": each,
        "steps": steps,
        "epochs": until,
        "exchange": {rate: exchange(measured, method, rate, exchanging) for rate in predict.LINKS},
        "seconds": {
            rate: None if until is None or one is None else until * steps * one
            for rate, one in each.items()
        },
        "curve": metric.scores(runs),
    }


def drawn(found: list[dict[str, Any]], rate: str) -> list[dict[str, Any]]:
    """The rows of a panel: dense, the first of DGC's at the target, and the first few of the others."""

    def order(row: dict[str, Any]) -> tuple[float, float]:
        seconds = row["seconds"][rate]
        return (float("inf") if seconds is None else seconds, row["order"])

    known = sorted((row for row in found if row["step"][rate] is not None), key=order)
    ours = [row for row in known if row["method"].startswith("dgc-")][:1]
    others = [
        row for row in known if row["method"] != "dense" and not row["method"].startswith("dgc-")
    ][:OTHERS]
    return [row for row in known if row["method"] == "dense"] + ours + others


def draw(
    found: list[dict[str, Any]],
    target: float,
    metric: Metric,
    style: Callable[[str], tuple[str, str]],
    out: Path,
) -> None:
    """Scores against composed seconds, a panel for each rate; ``style``: a method's colour and marker."""
    figure, panels = drawing.panels(columns=len(predict.NAMES), height=4.0, sharey=True)
    for axes, (rate, name) in zip(panels, predict.NAMES.items(), strict=True):
        lines = [
            (
                row,
                [
                    epoch * row["steps"] * row["step"][rate]
                    for epoch in range(1, len(row["curve"]) + 1)
                ],
            )
            for row in drawn(found, rate)
        ]
        end = max((seconds[-1] for _, seconds in lines), default=1.0)
        for row, seconds in lines:
            colour, marker = style(row["method"])
            axes.plot(
                seconds, row["curve"], color=colour, marker=marker, markersize=3, linewidth=1.2
            )
            # It has ended.
            axes.plot(
                (seconds[-1], end), 2 * row["curve"][-1:], color=colour, linewidth=0.5, alpha=0.6
            )
        axes.axhline(target, color="#bbbbbb", linestyle=":", zorder=0)
        axes.set(
            title=f"links of {name}",
            xlabel="seconds of training, composed",
            xlim=(0, end),
            ylim=(None, None if metric.lower else 100),
        )
        drawing.name_lines(
            axes,
            [(row["title"], (end, row["curve"][-1]), style(row["method"])[0]) for row, _ in lines],
        )
    panels[0].set_ylabel(metric.curve)
    drawing.save(figure, out)
