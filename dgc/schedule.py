"""When: the optimizer's step -> the share of entries kept back.

A schedule is only a function of the step, so any callable will do. Those here are small frozen objects:
they compare, pickle and print, which a closure does not.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dgc.config import check_sparsity


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
    """The same sparsity at every step."""
    return piecewise({0: sparsity})


def piecewise(points: Mapping[int, float]) -> Piecewise:
    """Each sparsity from its step on: ``piecewise({0: 0.9, 1000: 0.99, 2000: 0.999})``.

    Args:
        points: first step (int >= 0) -> sparsity in [0, 1). One of the steps is 0.

    Raises:
        ValueError: no point at step 0, a negative step, or a sparsity outside [0, 1).
    """
    for step, sparsity in points.items():
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"piecewise: step {step!r}; accepted: integers >= 0")
        check_sparsity(sparsity, f"piecewise: the sparsity from step {step} on")
    if 0 not in points:
        raise ValueError(f"piecewise: the points {dict(points)!r} do not say what holds at step 0")
    steps = tuple(sorted(points))
    return Piecewise(steps, tuple(float(points[step]) for step in steps))


def dense_until(step: int, then: float = 0.999) -> Piecewise:
    """Dense (sparsity 0) for the first ``step`` steps, ``then`` afterwards."""
    return piecewise({0: 0.0, step: then})


def warmup(epochs: float = 4, *, steps_per_epoch: int, start: float = 0.75, end: float = 0.999,
           stages: int | None = None, per_step: bool = False) -> Piecewise | Ramp:
    """The paper's warm-up (section 3.3): the density falls by a constant factor, epoch by epoch.

    The defaults are the paper's 75, 93.75, 98.4375, 99.6 and then 99.9 %. The factor is
    ((1 - end) / (1 - start)) ** (1 / epochs), rounded to two digits: the paper's is 1/4. ``stages=4`` gives a training
    that is shorter than the paper's 164 epochs the same warm-up in proportion.

    Args:
        epochs: length of the warm-up; 0 for none.
        steps_per_epoch: optimizer steps in one epoch (not batches, if gradients are accumulated).
        start: sparsity of the first epoch.
        end: sparsity after the warm-up.
        stages: equal parts of the warm-up, in place of epochs, from one to the next of which the density falls.
        per_step: fall by a smaller factor at each step (unrounded), instead of at each epoch.

    Raises:
        ValueError: ``epochs`` < 0 or not finite, ``steps_per_epoch`` or ``stages`` < 1, both ``stages`` and
            ``per_step``, or a sparsity outside [0, 1).
    """
    start, end = check_sparsity(start, "warmup: start"), check_sparsity(end, "warmup: end")
    if not (math.isfinite(epochs) and epochs >= 0):
        raise ValueError(f"warmup: epochs is {epochs!r}; accepted: a number >= 0")
    if not isinstance(steps_per_epoch, int) or steps_per_epoch < 1:
        raise ValueError(f"warmup: steps_per_epoch is {steps_per_epoch!r}; accepted: an integer >= 1")
    if stages is not None and (not isinstance(stages, int) or stages < 1):
        raise ValueError(f"warmup: stages is {stages!r}; accepted: an integer >= 1, or none for one each epoch")
    if stages is not None and per_step:
        raise ValueError(f"warmup: stages is {stages} and per_step is True; accepted: one of the two")
    length = round(epochs * steps_per_epoch)
    if length == 0:
        return constant(end)
    if per_step:
        return Ramp(length, start, end)
    parts = epochs if stages is None else stages
    factor = float(f"{((1 - end) / (1 - start)) ** (1 / parts):.2g}")
    furthest = min if end >= start else max  # rounding the factor must not carry us past the end
    points = {round(part * epochs * steps_per_epoch / parts): furthest(end, 1 - (1 - start) * factor**part)
              for part in range(math.ceil(parts))}
    return piecewise({**points, length: end})


NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?|\.[0-9]+")
FORMS = "0.999, constant:0.999, warmup:epochs=4,end=0.999, piecewise:0=0.75,1000=0.999, dense_until:1000,then=0.999"
KEYS = {"warmup": ("epochs", "start", "end", "stages", "per_step"), "dense_until": ("then",)}


def parse(expression: str, steps_per_epoch: int | None = None) -> Piecewise | Ramp:
    """Reads a schedule that was written in a shell or a configuration file.

    These are accepted, without spaces; arguments are those of the functions here, and may be left out as there:

        0.999, constant:0.999
        warmup:epochs=4,start=0.75,end=0.999,per_step=true
        warmup:epochs=0.6,stages=4
        warmup
        piecewise:0=0.75,1000=0.999
        dense_until:1000,then=0.999

    Args:
        expression: the schedule.
        steps_per_epoch: optimizer steps in one epoch; only ``warmup`` needs it.

    Raises:
        ValueError: it is none of these. The message repeats it, and says where it goes wrong and what is accepted.
    """
    name, colon, rest = expression.partition(":")
    at = len(name) + 1  # where its arguments begin
    if not colon and NUMBER.fullmatch(expression):
        return _named(expression, lambda: constant(float(expression)))
    if name not in ("constant", "warmup", "piecewise", "dense_until") or (colon and not rest):
        raise _wrong(expression, at - 1 if colon and not rest else 0, FORMS)
    arguments = _arguments(rest, at) if colon else []
    if name == "constant":
        if len(arguments) != 1 or arguments[0].key is not None:
            raise _wrong(expression, at, "one sparsity, as in constant:0.999")
        return _named(expression, lambda: constant(_number(expression, arguments[0])))
    if name == "piecewise":
        points: dict[int, float] = {}
        for argument in arguments:
            if argument.key is None or not re.fullmatch(r"[0-9]+", argument.key) or int(argument.key) in points:
                raise _wrong(expression, argument.at, "step=sparsity, each step once, as in piecewise:0=0.75,9=0.999")
            points[int(argument.key)] = _number(expression, argument)
        return _named(expression, lambda: piecewise(points))
    first = None
    if name == "dense_until":
        if not arguments or arguments[0].key is not None or not re.fullmatch(r"[0-9]+", arguments[0].value):
            raise _wrong(expression, at, "a step first, as in dense_until:1000,then=0.999")
        first = int(arguments.pop(0).value)
    values = _values(expression, arguments, KEYS[name])
    if first is not None:
        return _named(expression, lambda: dense_until(first, **values))
    if steps_per_epoch is None:
        raise ValueError(f"schedule {expression!r}: a warmup is counted in epochs; say how many steps one has")
    return _named(expression, lambda: warmup(**values, steps_per_epoch=steps_per_epoch))


class _Argument(NamedTuple):
    at: int  # its place in the expression
    key: str | None
    value: str


def _arguments(text: str, at: int) -> list[_Argument]:
    found = []
    for part in text.split(","):
        key, equals, value = part.partition("=")
        found.append(_Argument(at, key, value) if equals else _Argument(at, None, part))
        at += len(part) + 1
    return found


def _values(expression: str, arguments: list[_Argument], keys: tuple[str, ...]) -> dict[str, Any]:
    """Those of named arguments, each of which comes once at most."""
    values: dict[str, Any] = {}
    for argument in arguments:
        if argument.key not in keys or argument.key in values:
            raise _wrong(expression, argument.at, f"{', '.join(f'{key}=' for key in keys)} once each")
        if argument.key == "per_step":
            if argument.value not in ("true", "false"):
                raise _wrong(expression, argument.at, "per_step=true or per_step=false")
            values["per_step"] = argument.value == "true"
        elif argument.key == "stages":
            if not re.fullmatch(r"[0-9]+", argument.value):
                raise _wrong(expression, argument.at, "stages= a whole number such as 4")
            values["stages"] = int(argument.value)
        else:
            values[argument.key] = _number(expression, argument)
    return values


def _number(expression: str, argument: _Argument) -> float:
    if not NUMBER.fullmatch(argument.value):
        key = "" if argument.key is None else f"{argument.key}="
        raise _wrong(expression, argument.at, f"{key}a number such as 0.999")
    return float(argument.value)


def _named(expression: str, make: Callable[[], Piecewise | Ramp]) -> Piecewise | Ramp:
    """What it makes, or its error with the expression in front."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"schedule {expression!r}: {error}") from None


def _wrong(expression: str, at: int, accepted: str) -> ValueError:
    where = f"character {at + 1}, {expression[at:].split(',')[0]!r}" if at < len(expression) else "its end"
    return ValueError(f"schedule {expression!r}, at {where}; accepted: {accepted}")
