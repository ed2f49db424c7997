"""Warnings that point at the line of the user's script."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

INSIDE = tuple(f"{Path(str(package)).parent}{os.sep}" for package in (__file__, torch.__file__))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """As ``warnings.warn``, at the line that led here: the first outside this package and torch."""
    level, frame = 1, sys._getframe()
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith(INSIDE):
        level, outer = level + 1, outer.f_back
    warnings.warn(message, category, stacklevel=level)
