"""Schedules as text: what a shell or a configuration file says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from dgc.schedule import Adaptive, Piecewise, Ramp, adaptive, constant, dense_until, piecewise, warmup

T = TypeVar("T")

NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?|\.[0-9]+")
FORMS = ("0.999, constant:0.999, warmup:epochs=4,end=0.999, piecewise:0=0.75,1000=0.999, dense_until:1000,then=0.999, "
         "adaptive:least=0.99,most=0.9999")
ARGUMENTS = {"warmup": ("epochs", "start", "end", "stages", "per_step"), "dense_until": ("then",),
             "adaptive": ("least", "most", "start", "every")}


def parse(expression: str | float, steps_per_epoch: int | None = None) -> Piecewise | Ramp | Adaptive:
    """:func:`dgc.schedule.parse`."""
    if not isinstance(expression, str):
        return constant(expression)
    name, colon, rest = expression.partition(":")
    at = len(name) + 1  # where its arguments begin
    if not colon and NUMBER.fullmatch(expression):
        return _named(expression, lambda: constant(float(expression)))
    if name not in ("constant", "piecewise", *ARGUMENTS) or (colon and not rest):
        raise _wrong(expression, at - 1 if colon and not rest else 0, FORMS)
    arguments = _arguments(rest, at) if colon else []
    if name == "constant":
        return _constant(expression, arguments, at)
    if name == "piecewise":
        return _piecewise(expression, arguments)
    if name == "dense_until":
        return _dense_until(expression, arguments, at)
    values = _values(expression, arguments, ARGUMENTS[name])
    if name == "adaptive":
        return _named(expression, lambda: adaptive(**values))
    if steps_per_epoch is None:
        raise ValueError(f"schedule {expression!r}: steps_per_epoch must be given for a warmup, which is counted in "
                         "epochs, got None")
    return _named(expression, lambda: warmup(**values, steps_per_epoch=steps_per_epoch))


def _constant(expression: str, arguments: list[_Argument], at: int) -> Piecewise:
    if len(arguments) != 1 or arguments[0].key is not None:
        raise _wrong(expression, at, "one sparsity, as in constant:0.999")
    return _named(expression, lambda: constant(_number(expression, arguments[0])))


def _piecewise(expression: str, arguments: list[_Argument]) -> Piecewise:
    points: dict[int, float] = {}
    for argument in arguments:
        if argument.key is None or not re.fullmatch(r"[0-9]+", argument.key) or int(argument.key) in points:
            raise _wrong(expression, argument.at, "step=sparsity, each step once, as in piecewise:0=0.75,9=0.999")
        points[int(argument.key)] = _number(expression, argument)
    return _named(expression, lambda: piecewise(points))


def _dense_until(expression: str, arguments: list[_Argument], at: int) -> Piecewise:
    if not arguments or arguments[0].key is not None or not re.fullmatch(r"[0-9]+", arguments[0].value):
        raise _wrong(expression, at, "a step first, as in dense_until:1000,then=0.999")
    step = int(arguments[0].value)
    values = _values(expression, arguments[1:], ARGUMENTS["dense_until"])
    return _named(expression, lambda: dense_until(step, **values))


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
        elif argument.key in ("stages", "every"):
            if not re.fullmatch(r"[0-9]+", argument.value):
                raise _wrong(expression, argument.at, f"{argument.key}=a whole number")
            values[argument.key] = int(argument.value)
        else:
            values[argument.key] = _number(expression, argument)
    return values


def _number(expression: str, argument: _Argument) -> float:
    if not NUMBER.fullmatch(argument.value):
        key = "" if argument.key is None else f"{argument.key}="
        raise _wrong(expression, argument.at, f"{key}a number such as {4 if argument.key == 'epochs' else 0.999}")
    return float(argument.value)


def _named(expression: str, make: Callable[[], T]) -> T:
    """The schedule that a function makes, or its error with the expression in front."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"schedule {expression!r}: {error}") from None


def _wrong(expression: str, at: int, accepted: str) -> ValueError:
    if at >= len(expression):
        return ValueError(f"schedule {expression!r}: what follows must be {accepted}, got nothing")
    return ValueError(f"schedule {expression!r}: what begins at character {at + 1} must be {accepted}, "
                      f"got {expression[at:].split(',')[0]!r}")
