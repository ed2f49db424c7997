"""What a training is judged by."""

from __future__ import annotations

from dataclasses import dataclass


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
