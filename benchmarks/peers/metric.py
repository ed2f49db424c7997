"""What a training is judged by."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A score: how it is named, compared and reached."""

    name: str  # in JSON
    title: str
    unit: str
    lost: str  # what a difference to dense training is called
    axis: str  # the same, of a figure
    curve: str  # what there is after each epoch
    lower: bool  # is better

    def difference(self, own: float, dense: float) -> float:
        """How much worse than dense: points of accuracy, or per cent of its perplexity."""
        return 100 * (own / dense - 1) if self.lower else dense - own

    def order(self, value: float) -> float:
        """Less is better."""
        return value if self.lower else -value

    def reached(self, value: float, target: float) -> bool:
        return value <= target if self.lower else value >= target

    def until(self, runs: list[dict[str, Any]], target: float) -> float | None:
        """Epochs to the first that ends at the target, the mean over a method's runs; None if one never does."""
        first = [
            next((e["epoch"] for e in run["history"] if self.reached(e[self.name], target)), None)
            for run in runs
        ]
        return None if None in first else statistics.mean(first)

    def scores(self, runs: list[dict[str, Any]]) -> list[float]:
        """After each epoch that all of a method's runs have had, the mean over these."""
        scores = ([epoch[self.name] for epoch in run["history"]] for run in runs)
        return [statistics.mean(at) for at in zip(*scores, strict=False)]
