"""The result of a study: the front, the recommendation, JSON, and a picture."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dgc import drawing
from dgc.tune.trial import Task, Trial


@dataclass(frozen=True)
class Result:
    """The result of a study so far."""

    task: Task
    tolerance: float
    trials: tuple[Trial, ...]  # by number, without those that were interrupted
    front: tuple[Trial, ...]  # complete ones of which none is better in one aim and no worse in the other; by bytes
    paper: Trial | None  # the paper's own schedule, where it is complete
    dense: Trial | None  # dense training, where it is complete; it is in no front
    recommended: Trial | None  # the fewest bytes whose metric is no worse than the paper's, less the tolerance

    @property
    def best(self) -> Trial | None:
        """The complete trial with the best metric, where that is a tenth better than the paper's: then these trainings
        are too short to choose by.
        """
        if self.paper is None or not self.front:
            return None
        far = 0.1 * abs(self.paper.metric or 0.0)
        trial = self.front[-1]  # which sends the most
        return trial if abs((trial.metric or 0.0) - (self.paper.metric or 0.0)) > far else None

    def line(self, trial: Trial) -> str:
        """The line to paste: the command, or Python."""
        if isinstance(self.task.command, str):
            return trial.setting.line
        return shlex.join(self.task.fill(trial.setting, Path("result.json")))

    def json(self) -> dict[str, Any]:
        """The result in plain types; trials by their number."""
        def number(value: float | None) -> float | None:
            return value if value is not None and math.isfinite(value) else None  # JSON has no NaN

        def plain(trial: Trial) -> dict[str, Any]:
            return {**asdict(trial.setting), "config": trial.setting.line, "state": trial.state,
                    "metric": number(trial.metric), "bytes_sent": number(trial.bytes_sent),
                    "reports": {str(epoch): number(metric) for epoch, metric in trial.reports.items()},
                    "seconds": trial.seconds, "why": trial.why}

        best = self.recommended
        return {"task": asdict(self.task), "tolerance": self.tolerance, "trials": [plain(t) for t in self.trials],
                "front": [t.setting.trial for t in self.front], "paper": self.paper and self.paper.setting.trial,
                "dense": self.dense and self.dense.setting.trial,
                "recommended": best and {**plain(best), "line": self.line(best)}}


def result_of(trials: list[Trial], task: Task, tolerance: float) -> Result:
    sign = 1 if task.maximize else -1
    complete = [(sign * t.metric, t.bytes_sent, t) for t in trials if t.kind != "dense"
                and t.state == "complete" and t.metric is not None and t.bytes_sent is not None]
    front = [t for good, sent, t in complete if not any(
        (g >= good and s <= sent) and (g > good or s < sent) for g, s, _ in complete)]
    papers = [(good, t) for good, _, t in complete if t.kind == "paper"]
    dense = next((t for t in trials if t.kind == "dense" and t.state == "complete"), None)
    fine = [(sent, -good, t) for good, sent, t in complete if papers and good >= papers[0][0] - tolerance]
    return Result(task, tolerance, tuple(trials), tuple(sorted(front, key=lambda t: (t.bytes_sent, t.setting.trial))),
                  papers[0][1] if papers else None, dense, min(fine, key=lambda f: f[:2])[2] if fine else None)


def draw(result: Result, file: Path) -> None:
    """The metric against the bytes of complete trials: all, the front, the paper's, the dense one and what is
    recommended.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure, axes = drawing.panels(height=4.6)
    complete = [t for t in result.trials if t.state == "complete"]
    for trials, style in ((complete, {"linestyle": "", "color": drawing.DENSE, "alpha": 0.6}),
                          (result.front, {"color": drawing.DGC})):
        axes.plot([t.bytes_sent for t in trials], [t.metric for t in trials], marker="o", **style)
    axes.set(xlabel="sent by one worker", ylabel=result.task.metric, title="a dot is a trial, the line is the front: "
             "no trial is better and sends less" if complete else "no trial is complete")
    if complete:
        sent = [t.bytes_sent or 0.0 for t in complete]
        axes.set(xscale="log", xlim=(min(sent) / 1.5, 1.5 * max(sent)))
        drawing.byte_axis(axes, "x")
    same = result.paper is result.recommended
    for trial, text, across in ((result.paper, "the paper's schedule" + ", recommended" * same, "left"),
                                (None if same else result.recommended, "recommended", "left"),
                                (result.dense, "dense", "right")):
        if trial is not None:
            axes.plot(trial.bytes_sent, trial.metric, "o", color="black", markersize=11, fillstyle="none")
            axes.annotate(text, (trial.bytes_sent, trial.metric), (6 if across == "left" else -6, -18), ha=across,
                          textcoords="offset points")
    drawing.save(figure, file)
