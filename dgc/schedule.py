"""Schedules: the optimizer's step -> the share of entries kept back.

A schedule is only a function of the step, so any callable will do. Those here are small frozen
objects: they compare, pickle and print, which a closure does not. :func:`adaptive` alone looks at
more than the step: its object holds the settings and the law, and what it has found lies with the
optimizer's learning rate.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

FIRST = 0.75  # where a warm-up begins
WARMUP = (
    0.08  # of a training whose number of steps is known: as long as was measured at 90 to 99.9 %
)
LONG = 10_000  # steps, from which on a training bears 99.9 %: an entry waits for a tenth of them at most
MAX_PARTS = 10_000  # parts of a warm-up, each of which is written down
ROUNDED_PARTS = (
    10  # with a rounded factor; of more, its error would add up => 0.995 as 1 never warms up
)


def check_sparsity(value: float, where: str) -> float:
    """Returns ``value`` as a float in [0, 1), or says where a wrong one came from.

    Raises:
        TypeError: ``value`` is not a number.
        ValueError: ``value`` is outside [0, 1) or not a number (NaN).
    """
    try:
        sparsity = float(value)
    except (TypeError, ValueError):
        expression = " (dgc.schedule.parse reads an expression)" if isinstance(value, str) else ""
        raise TypeError(f"{where} must be a number in [0, 1), got {value!r}{expression}") from None
    if not 0.0 <= sparsity < 1.0:
        per_cent = f" ({sparsity:g} % is {sparsity / 100:g})" if 1 <= sparsity < 100 else ""
        raise ValueError(
            f"{where} must be a number in [0, 1), 0 meaning dense, got {value!r}{per_cent}"
        )
    return sparsity


@dataclass(frozen=True)
class Piecewise:
    """Holds ``sparsities[i]`` from step ``steps[i]`` on. Made by :func:`piecewise` and
    :func:`warmup`.
    """

    steps: tuple[int, ...]
    sparsities: tuple[float, ...]

    def __call__(self, step: int) -> float:
        return self.sparsities[bisect.bisect_right(self.steps, step) - 1]


@dataclass(frozen=True)
class Ramp:
    """Multiplies the density by the same factor at every step. Made by ``warmup(...,
    per_step=True)``.
    """

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
        TypeError, ValueError: it is not a number in [0, 1).
    """
    return Piecewise((0,), (check_sparsity(sparsity, "constant: sparsity"),))


def piecewise(points: Mapping[int, float]) -> Piecewise:
    """Each sparsity from its step on: ``piecewise({0: 0.9, 1000: 0.99, 2000: 0.999})``.

    Args:
        points: first step (int >= 0) -> sparsity in [0, 1). One of the steps is 0.

    Raises:
        ValueError: ``points`` is not a dict, has no step 0, a negative step, or a sparsity outside
            [0, 1).
    """
    if not isinstance(points, Mapping):
        raise ValueError(
            f"piecewise: points must be a dict such as {{0: 0.9, 1000: 0.999}}, got {points!r}"
        )
    for step, sparsity in points.items():
        if not isinstance(step, Integral) or step < 0:  # numpy's, too
            raise ValueError(f"piecewise: steps must be integers >= 0, got {step!r}")
        check_sparsity(sparsity, f"piecewise: the sparsity from step {step} on")
    if 0 not in points:
        raise ValueError(
            f"piecewise: the points must say what holds at step 0, got {dict(points)!r}"
        )
    steps = tuple(sorted(map(int, points)))
    return Piecewise(steps, tuple(float(points[step]) for step in steps))


def dense_until(step: int, then: float = 0.999) -> Piecewise:
    """Dense (sparsity 0) for the first ``step`` steps, ``then`` afterwards.

    Args:
        step: int >= 0, in optimizer steps.
        then: sparsity in [0, 1).

    Raises:
        TypeError, ValueError: ``step`` is not an int >= 0, or ``then`` is not a number in [0, 1).
    """
    return piecewise({0: 0.0, step: then})


def usual_end(steps: int | None) -> float:
    """The sparsity after the warm-up of a training of so many steps, if nothing else is said."""
    return 0.999 if steps is None or steps >= LONG else 0.99


def warmup(  # noqa: PLR0913
    epochs: float | None = None,
    *,
    steps_per_epoch: int | None = None,
    steps: int | None = None,
    start: float | None = None,
    end: float | None = None,
    stages: int | None = None,
    per_step: bool = False,
) -> Piecewise | Ramp:
    """The paper's warm-up (section 3.3): the density falls by a constant factor, epoch by epoch.

    ``warmup(steps=N)`` is the schedule for a training of N steps: the warm-up takes its first 8 %,
    in four stages, and ends at 99.9 % from 10,000 steps on, at 99 % in a shorter training.

    The other defaults are the paper's 75, 93.75, 98.4375, 99.6 and then 99.9 %. The factor is ((1 -
    end) / (1 - start)) ** (1 / epochs). Up to ten epochs or stages it is rounded to two digits, as
    the paper's 1/4 is.

    Args:
        epochs: length of the warm-up; 0 for none. None: 4.
        steps_per_epoch: optimizer steps in one epoch (not batches, if gradients are accumulated).
        steps: optimizer steps of the whole training, in place of ``epochs`` and
            ``steps_per_epoch``.
        start: sparsity of the first epoch. None: 0.75, or ``end`` where that is less.
        end: sparsity after the warm-up. None: 0.999, or as said above with ``steps``.
        stages: equal parts of the warm-up, in place of epochs. The density falls from each part to
            the next. None: one each epoch, or 4 with ``steps``.
        per_step: the density falls by a smaller factor (unrounded) at each step.

    Raises:
        TypeError, ValueError: neither or both of ``steps`` and ``steps_per_epoch``, one of these or
            ``stages`` < 1, ``epochs`` < 0 or not finite, both ``stages`` and ``per_step``, more
            than 10,000 parts, or a sparsity that is no number in [0, 1).
    """
    if steps is not None:
        if epochs is not None or steps_per_epoch is not None:
            raise ValueError(
                "warmup: epochs and steps_per_epoch must be left out where steps is given, got "
                f"epochs={epochs!r}, steps_per_epoch={steps_per_epoch!r}"
            )
        epochs, steps_per_epoch = WARMUP, steps
        stages = 4 if stages is None and not per_step else stages
    epochs = 4 if epochs is None else epochs
    parts = epochs if stages is None else stages
    if not isinstance(epochs, Real) or not 0 <= epochs < math.inf:
        raise ValueError(f"warmup: epochs must be a number >= 0, got {epochs!r}")
    if not isinstance(steps_per_epoch, Integral) or steps_per_epoch < 1:
        number = "N" if steps_per_epoch is not None or epochs == 4 else f"{epochs:g}"
        raise ValueError(
            "warmup: steps, or steps_per_epoch, must be an integer >= 1, got "
            f"{steps_per_epoch!r} (of a training of {number} steps: warmup(steps={number}))"
        )
    if stages is not None and (per_step or not isinstance(stages, Integral) or stages < 1):
        raise ValueError(
            f"warmup: stages must be an integer >= 1, and left out where per_step is True, got {stages!r}"
        )
    if parts > MAX_PARTS and not per_step:
        raise ValueError(
            f"warmup: epochs, or stages, must be at most {MAX_PARTS:,}, got {parts:,g} (per_step=True "
            "falls at each step)"
        )
    end = check_sparsity(usual_end(steps) if end is None else end, "warmup: end")
    start = min(FIRST, end) if start is None else check_sparsity(start, "warmup: start")
    return _falling(epochs * steps_per_epoch, parts, start, end, per_step)


def _falling(
    steps: float, parts: float, start: float, end: float, per_step: bool
) -> Piecewise | Ramp:
    """A warm-up of so many steps, in so many parts."""
    length = round(steps)
    if length == 0:
        return constant(end)
    if per_step:
        return Ramp(length, start, end)
    # Of less than one epoch there is one part.
    factor = ((1 - end) / (1 - start)) ** (1 / max(1, parts))
    if parts <= ROUNDED_PARTS:
        factor = float(f"{factor:.2g}")
    furthest = min if end >= start else max  # rounding the factor must not carry us past the end
    points = {
        round(part * steps / parts): furthest(end, 1 - (1 - start) * factor**part)
        for part in range(math.ceil(parts))
    }
    return piecewise({**points, length: end})


UNKNOWN_LENGTH = warmup(steps=LONG, end=0.99)  # what Config has if nobody says how long it trains


# -- by the speed of the network ---------------------------------------------------------------------------------------

HIGH = 0.09  # exposed over computing time; above it, an exchange does not hide => fewer bytes
LOW = 0.06  # below it, there is room for more; more than half of HIGH, so that half and twice the bandwidth are noticed
AIM = math.sqrt(LOW * HIGH)
GROW = 1.25  # of the density, where nothing is known of what lies above => larger: faster, and worse when it fails
SHRINK = 0.25  # at most, at once
NEAR = 1.5  # of two densities: not worth a step between them
FORGET = 16  # decisions, after which an exchange that did not hide is tried once more


class Found(NamedTuple):
    """The knowledge of an adaptive schedule, alike on all ranks."""

    sparsity: float  # in force
    hides: float = 1.0  # the least sparsity at which the exchange was seen to hide; 1: at none
    shows: float = -1.0  # the greatest at which it was seen not to; -1: at none


@dataclass(frozen=True)
class Adaptive:
    """Moves the sparsity so that communication just hides behind computation. Made by
    :func:`adaptive`.
    """

    least: float
    most: float
    start: float
    every: int

    def __call__(self, step: int) -> float:
        """The sparsity at the start, for those who ask beforehand."""
        return self.start

    def after(self, found: Found, share: float, forget: bool = False) -> Found:
        """The law: what holds next.

        The time for which an exchange is exposed grows with the density d, from a latency on, by a
        line with a kink where it no longer fits behind the computation; neither is known, and both
        may change. So it is bracketed: by ``good``, the highest density that was seen to hide, and
        ``bad``, the lowest that was not.

        - Too dense (share > HIGH): halfway back to ``good``, as geometric mean, or right there if
          that is near. If there is none, or it was this, the network has changed: d shrinks as a
          time in proportion to it would have to.
        - Room for more (share < LOW): halfway to ``bad``; no further if that is near; and by
          ``GROW`` if none is known.
        - Between the two: as it is; but where ``forget``, as if there were room: else a latency
          that alone is more than LOW would keep for good what a network that was slow for a while
          has led to.

        Apart from those onto a bound and back, moves are by factors of more than 1.2, so messages
        are not laid out anew for nothing.

        Args:
            found: what is known.
            share: of computing time that communication is exposed for, at the sparsity in force.
            forget: try again what did not hide, as the network may have become faster.
        """
        density, good, bad = 1 - found.sparsity, 1 - found.hides, 1 - found.shows
        wanted = density
        if share > HIGH:
            good, bad = good if good < density else 0.0, density
            wanted = (
                density * min(max(AIM / share, SHRINK), 1 / GROW)
                if good == 0.0
                else good
                if bad <= NEAR * good
                else math.sqrt(good * bad)
            )
        else:
            good, room = density, share < LOW or forget
            if bad <= good or (forget and bad <= NEAR * good):
                bad = 2.0
            if room and bad == 2.0:
                wanted = GROW * density
            elif room and bad > NEAR * good:
                wanted = math.sqrt(good * bad)
        return Found(self.within(1 - wanted), 1 - good, 1 - bad)

    def within(self, sparsity: float) -> float:
        """The sparsity, or the bound that is nearest to it."""
        return min(max(sparsity, self.least), self.most)


def adaptive(
    least: float = 0.99, most: float = 0.9999, *, start: float | None = None, every: int = 10
) -> Adaptive:
    """Moves the sparsity within bounds, as the network's speed changes, so that communication just
    hides behind computation.

    Each rank measures two times in each step, from one ``synchronize()`` to the next. They are the
    whole step, and how long computing waits for the exchange (exposed). Every ``every`` steps the
    ranks gather these times, 16 bytes for each step. All compute the same ::

        share = median over these steps of (least exposed of all ranks) / (longest computing of all ranks)

    with computing = step - exposed, and decide alike:

    | share | the density |
    |---|---|
    | above 9 % | falls |
    | below 6 % | rises, until it was seen to go above 9 % |
    | in between | stays; rises once in 16 decisions, as the network may have become faster |

    :meth:`Adaptive.after` has the law. So, within its bounds, a step takes at most 9 % longer than
    computing alone. Exceptions are steps that look for the limit, and steps just after the network
    has changed.

    - Exposed includes the work of compression that nothing hides. On a CPU that is all of it.
    - A rank that arrives early waits for the others, which no sparsity changes. So the least
      exposed time counts.
    - Time that no sparsity saves also counts: latency, parameters that travel dense, accumulating.
      It may drive the sparsity to ``most``.
    - On a GPU the times are those of CUDA events. The host reads them, and waits for them, only at
      a decision.
    - With one process nothing is decided. In ``dgc.lockstep`` ranks take turns, so the times mean
      nothing. With sharded parameters, the ranks that hold the same shard decide among themselves.
    - Two runs need not be alike, as clocks decide.

    The sparsity in force is in ``optimizer.param_groups[0]`` (``dgc_sparsity``), so it is saved,
    loaded and broadcast with the learning rate. ``optimizer.report().sparsity`` shows it. A
    training that goes on with other bounds goes on within them. Called with a step, the schedule
    returns ``start``: nobody can know more beforehand.

    Args:
        least: the lowest sparsity, in [0, 1). Where messages would be more bytes than a dense sum,
            the dense sum is sent.
        most: the highest sparsity; above ``least`` and below 1. It bounds what compression may cost
            in accuracy. The paper goes to 0.999.
        start: the first sparsity, within these bounds. Default: 0.999, or the bound that is nearest
            to it.
        every: optimizer steps between two decisions; at least 3, so that a median means something.

    Raises:
        TypeError, ValueError: an argument is not as said above.

    Source: our own. The paper has a fixed sparsity after the warm-up.
    """
    least, most = check_sparsity(least, "adaptive: least"), check_sparsity(most, "adaptive: most")
    start = (
        min(max(least, 0.999), most) if start is None else check_sparsity(start, "adaptive: start")
    )
    if not least <= start <= most or least == most:
        raise ValueError(
            "adaptive: least must be less than most, and start must be between them, got least "
            f"{least!r}, most {most!r} and start {start!r}"
        )
    if not isinstance(every, int) or every < 3:
        raise ValueError(f"adaptive: every must be an integer >= 3, got {every!r}")
    return Adaptive(least, most, start, every)


# -- as text -----------------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?|\.[0-9]+")
BOOLS = {"true": True, "false": False}
FORMS = (
    "0.999, constant:0.999, warmup:epochs=4,end=0.999, piecewise:0=0.75,1000=0.999, dense_until:1000,then=0.999, "
    "adaptive:least=0.99,most=0.9999"
)
BY_NAME: dict[str, Callable[..., Any]] = {
    "constant": constant,
    "piecewise": piecewise,
    "dense_until": dense_until,
    "warmup": warmup,
    "adaptive": adaptive,
}


def parse(
    expression: str | float, steps_per_epoch: int | None = None
) -> Piecewise | Ramp | Adaptive:
    """Reads a schedule that was written in a shell or a configuration file.

    It accepts these forms, without spaces. Arguments are those of the functions here, with the same
    defaults:

        0.999, constant:0.999
        warmup:epochs=4,start=0.75,end=0.999,per_step=true
        warmup:epochs=0.6,stages=4
        warmup:steps=20000
        warmup
        piecewise:0=0.75,1000=0.999
        dense_until:1000,then=0.999
        adaptive:least=0.99,most=0.9999,start=0.999,every=10
        adaptive

    Args:
        expression: the schedule. A number, as in YAML and JSON, is a constant sparsity.
        steps_per_epoch: optimizer steps in one epoch; only ``warmup`` needs it.

    Raises:
        TypeError, ValueError: it is none of these. The message repeats it, and says what is wrong
            and what is accepted.
    """
    if not isinstance(expression, str):
        return constant(expression)
    name, _, text = expression.partition(":")
    if NUMBER.fullmatch(expression):
        name, text = "constant", expression
    try:
        positional, named = _arguments(text)
        if name == "piecewise":
            positional.append({int(step): sparsity for step, sparsity in named.items()})
            named = {}
        if name == "warmup" and "steps" not in named:
            named["steps_per_epoch"] = steps_per_epoch
        return BY_NAME[name](*positional, **named)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"a schedule must be such as {FORMS}, got {expression!r} ({error})"
        ) from None


def _arguments(text: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments without a name, and those with one."""
    positional, named = [], {}
    for part in text.split(",") if text else ():
        key, equals, value = part.rpartition("=")
        if key in named or not (NUMBER.fullmatch(value) or value in BOOLS):
            raise ValueError(
                f"each argument must be a number, true or false, and come once, got {part!r}"
            )
        number = BOOLS[value] if value in BOOLS else int(value) if value.isdigit() else float(value)
        if equals:
            named[key] = number
        else:
            positional.append(number)
    return positional, named
