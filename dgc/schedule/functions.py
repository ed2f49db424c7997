"""Schedules that are a function of the step alone."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real

from dgc.config import check_sparsity

FIRST = 0.75  # where a warm-up begins
MOST = 10_000  # parts of a warm-up, each of which is written down
ROUNDED = 10  # parts of a warm-up: of many, the error of a rounded factor would add up => 0.995 as 1 never warms up


@dataclass(frozen=True)
class Piecewise:
    """Holds ``sparsities[i]`` from step ``steps[i]`` on. Made by :func:`piecewise` and :func:`warmup`."""

    steps: tuple[int, ...]
    sparsities: tuple[float, ...]

    def __call__(self, step: int) -> float:
        return self.sparsities[bisect.bisect_right(self.steps, step) - 1]


@dataclass(frozen=True)
class Ramp:
    """Multiplies the density by the same factor at every step. Made by ``warmup(..., per_step=True)``."""

    steps: int
    start: float
    end: float

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return self.end
        ratio = (1.0 - self.end) / (1.0 - self.start)
        return 1.0 - (1.0 - self.start) * ratio ** (step / self.steps)


def constant(sparsity: float) -> Piecewise:
    """The same sparsity at every step.

    Args:
        sparsity: in [0, 1).

    Raises:
        TypeError, ValueError: it is no number, or outside [0, 1).
    """
    return Piecewise((0,), (check_sparsity(sparsity, "constant: sparsity"),))


def piecewise(points: Mapping[int, float]) -> Piecewise:
    """Each sparsity from its step on: ``piecewise({0: 0.9, 1000: 0.99, 2000: 0.999})``.

    Args:
        points: first step (int >= 0) -> sparsity in [0, 1). One of the steps is 0.

    Raises:
        ValueError: no dict, no point at step 0, a negative step, or a sparsity outside [0, 1).
    """
    if not isinstance(points, Mapping):
        raise ValueError(f"piecewise: points must be a dict such as {{0: 0.9, 1000: 0.999}}, got {points!r}")
    for step, sparsity in points.items():
        if not isinstance(step, Integral) or step < 0:  # numpy's, too
            raise ValueError(f"piecewise: steps must be integers >= 0, got {step!r}")
        check_sparsity(sparsity, f"piecewise: the sparsity from step {step} on")
    if 0 not in points:
        raise ValueError(f"piecewise: the points must say what holds at step 0, got {dict(points)!r}")
    steps = tuple(sorted(map(int, points)))
    return Piecewise(steps, tuple(float(points[step]) for step in steps))


def dense_until(step: int, then: float = 0.999) -> Piecewise:
    """Dense (sparsity 0) for the first ``step`` steps, ``then`` afterwards.

    Args:
        step: int >= 0, in optimizer steps.
        then: sparsity in [0, 1).

    Raises:
        TypeError, ValueError: ``step`` is no int >= 0, or ``then`` no number in [0, 1).
    """
    if not isinstance(step, Integral) or step < 0:
        raise ValueError(f"dense_until: step must be an integer >= 0, got {step!r}")
    return piecewise({0: 0.0, step: check_sparsity(then, "dense_until: then")})


def warmup(epochs: float = 4, *, steps_per_epoch: int, start: float | None = None, end: float = 0.999,
           stages: int | None = None, per_step: bool = False) -> Piecewise | Ramp:
    """The paper's warm-up (section 3.3): the density falls by a constant factor, epoch by epoch.

    The defaults are the paper's 75, 93.75, 98.4375, 99.6 and then 99.9 %. The factor is
    ((1 - end) / (1 - start)) ** (1 / epochs); up to ten epochs or stages it is rounded to two digits: the paper's is
    1/4. ``stages=4`` gives a training that is shorter than the paper's 164 epochs the same warm-up in proportion.

    Args:
        epochs: length of the warm-up; 0 for none.
        steps_per_epoch: optimizer steps in one epoch (not batches, if gradients are accumulated).
        start: sparsity of the first epoch. None: 0.75, or ``end`` where that is less.
        end: sparsity after the warm-up.
        stages: equal parts of the warm-up, in place of epochs, from one to the next of which the density falls.
        per_step: fall by a smaller factor at each step (unrounded), instead of at each epoch.

    Raises:
        TypeError, ValueError: ``epochs`` < 0 or not finite, ``steps_per_epoch`` or ``stages`` < 1, both ``stages`` and
            ``per_step``, more than 10,000 parts or 2**63 steps, or a sparsity that is no number in [0, 1).
    """
    end = check_sparsity(end, "warmup: end")
    start = min(FIRST, end) if start is None else check_sparsity(start, "warmup: start")
    if not (isinstance(epochs, Real) and math.isfinite(epochs) and epochs >= 0):
        raise ValueError(f"warmup: epochs must be a number >= 0, got {epochs!r}")
    if not isinstance(steps_per_epoch, Integral) or steps_per_epoch < 1:
        raise ValueError(f"warmup: steps_per_epoch must be an integer >= 1, got {steps_per_epoch!r}")
    if stages is not None and (not isinstance(stages, Integral) or stages < 1):
        raise ValueError(f"warmup: stages must be an integer >= 1, got {stages!r} (leave it out for one each epoch)")
    if not isinstance(per_step, bool):
        raise ValueError(f"warmup: per_step must be True or False, got {per_step!r}")
    if stages is not None and per_step:
        raise ValueError(f"warmup: stages must be left out where per_step is True, got {stages}")
    if (steps := epochs * steps_per_epoch) > 2**63:
        raise ValueError(f"warmup: epochs times steps_per_epoch must be at most 2**63, got {steps:g}")
    length = round(steps)
    if length == 0:
        return constant(end)
    if per_step:
        return Ramp(length, start, end)
    parts = epochs if stages is None else stages
    if parts > MOST:
        raise ValueError(f"warmup: {'epochs' if stages is None else 'stages'} must be at most {MOST:,}, got {parts:,g} "
                         "(per_step=True falls at each step)")
    factor = ((1 - end) / (1 - start)) ** (1 / max(1, parts))  # of less than one epoch there is one part
    if parts <= ROUNDED:
        factor = float(f"{factor:.2g}")
    furthest = min if end >= start else max  # rounding the factor must not carry us past the end
    points = {round(part * epochs * steps_per_epoch / parts): furthest(end, 1 - (1 - start) * factor**part)
              for part in range(math.ceil(parts))}
    return piecewise({**points, length: end})
