"""Schedules: the optimizer's step -> the share of entries kept back.

A schedule is only a function of the step, so any callable will do. Those here are small frozen objects:
they compare, pickle and print, which a closure does not. :func:`adaptive` alone looks at more than the step: its object
holds the settings and the law, and what it has found lies with the optimizer's learning rate.
"""

from dgc.schedule.by_network import FORGET, HIGH, LOW, Adaptive, Found, adaptive
from dgc.schedule.functions import Piecewise, Ramp, constant, dense_until, piecewise, warmup
from dgc.schedule.text import NUMBER, parse

__all__ = ["FORGET", "HIGH", "LOW", "NUMBER", "Adaptive", "Found", "Piecewise", "Ramp", "adaptive", "constant",
           "dense_until", "parse", "piecewise", "warmup"]
