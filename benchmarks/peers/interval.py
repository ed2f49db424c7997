"""How sure the mean difference of a method to dense training is, where there are few seeds and many methods."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def half_width(lost: Sequence[Sequence[float]], level: float) -> float | None:
    """The half-width of the interval of this level, of any method's mean difference to dense training.

    What a seed does to all methods alike cancels out. What is left of method i and seed j, r = x_ij - (mean of the
    method) - (mean of the seed) + (mean of all), is pooled: s^2 = sum of r^2 / ((M - 1) (S - 1)). The difference of two
    methods' means then has the variance 2 s^2 / S (Student's t).

    Args:
        lost: of each of M methods, dense training with its zeros among them, the differences of its S seeds.
        level: such as 0.9.

    Returns:
        None where there are less than two methods or seeds.
    """
    from scipy import stats

    if len(lost) < 2 or len(lost[0]) < 2:
        return None
    x = np.array(lost)
    rest = x - x.mean(1, keepdims=True) - x.mean(0) + x.mean()
    methods, seeds = x.shape
    freedom = (methods - 1) * (seeds - 1)
    variance = float((rest**2).sum()) / freedom
    return float(stats.t.ppf((1 + level) / 2, freedom)) * (2 * variance / seeds) ** 0.5
