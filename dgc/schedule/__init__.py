"""Schedules: the optimizer's step -> the share of entries kept back.

A schedule is only a function of the step, so any callable will do. Those here are small frozen objects:
they compare, pickle and print, which a closure does not. :func:`adaptive` alone looks at more than the step: its object
holds the settings and the law, and what it has found lies with the optimizer's learning rate.
"""

from typing import TYPE_CHECKING, Any

from dgc.schedule.by_network import FORGET, HIGH, LOW, Adaptive, Found, adaptive
from dgc.schedule.functions import FIRST, Piecewise, Ramp, constant, dense_until, piecewise, warmup

if TYPE_CHECKING:
    from dgc.schedule.text import NUMBER, parse

__all__ = ["FIRST", "FORGET", "HIGH", "LOW", "NUMBER", "Adaptive", "Found", "Piecewise", "Ramp", "adaptive", "constant",
           "dense_until", "parse", "piecewise", "warmup"]


def __getattr__(name: str) -> Any:
    if name in ("NUMBER", "parse"):  # imported where used: trainings do not read text
        from dgc.schedule import text
        return getattr(text, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
