"""The result of a study: the front, the recommendation, JSON, and a picture."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dgc.tune.trial import Task, Trial


@dataclass(frozen=True)
class Result:
    """The result of a study so far."""

    task: Task
    tolerance: float
    trials: tuple[Trial, ...]  # by number, without those that were interrupted
    front: tuple[Trial, ...]  # complete ones of which none is better in one aim and no worse in the other; by bytes
    paper: Trial | None  # the paper's own schedule, where it is complete
    recommended: Trial | None  # the fewest bytes whose metric is no worse than the paper's, less the tolerance

    @property
    def best(self) -> Trial | None:
        """Of the complete ones, that with the best metric, where it is a tenth better than the paper's: then these
        trainings are too short to choose by.
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
                "recommended": best and {**plain(best), "line": self.line(best)}}


def result_of(trials: list[Trial], task: Task, tolerance: float) -> Result:
    sign = 1 if task.maximize else -1
    complete = [(sign * t.metric, t.bytes_sent, t) for t in trials
                if t.state == "complete" and t.metric is not None and t.bytes_sent is not None]
    front = [t for good, sent, t in complete if not any(
        (g >= good and s <= sent) and (g > good or s < sent) for g, s, _ in complete)]
    papers = [(good, t) for good, _, t in complete if t.paper]
    fine = [(sent, -good, t) for good, sent, t in complete if papers and good >= papers[0][0] - tolerance]
    return Result(task, tolerance, tuple(trials), tuple(sorted(front, key=lambda t: (t.bytes_sent, t.setting.trial))),
                  papers[0][1] if papers else None, min(fine, key=lambda f: f[:2])[2] if fine else None)


def draw(result: Result, file: Path) -> None:
    """The metric against the bytes of complete trials: all, the front, the paper's and what is recommended.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, axis = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    complete = [t for t in result.trials if t.state == "complete"]
    for trials, style, label in (
            (complete, {"marker": "o", "linestyle": "", "color": "tab:gray", "alpha": 0.6}, "trials"),
            (result.front, {"marker": "o", "linestyle": "-", "color": "tab:blue"}, "front"),
            ([result.paper], {"marker": "s", "linestyle": "", "color": "black", "markersize": 9, "fillstyle": "none"},
             "the paper's schedule"),
            ([result.recommended], {"marker": "*", "linestyle": "", "color": "tab:orange", "markersize": 15},
             "recommended")):
        known = [t for t in trials if t is not None]
        if known:
            points: Any = zip(*((t.bytes_sent, t.metric) for t in known), strict=True)
            axis.plot(*points, label=label, **style)
    axis.set(xscale="log", xlabel="bytes that one worker sent", ylabel=result.task.metric)
    counts = Counter(t.state for t in result.trials)
    axis.set_title(", ".join(f"{n} {state}" for state, n in counts.items()), fontsize=10)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    if complete:
        axis.legend(frameon=False)
    figure.savefig(file, dpi=130)
    plt.close(figure)
