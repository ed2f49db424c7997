"""What is told at run time: warnings that point at the line of the user's script, and the log."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

LOG = logging.getLogger("dgc")
INSIDE = tuple(f"{Path(str(package)).parent}{os.sep}" for package in (__file__, torch.__file__))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """As ``warnings.warn``, at the line that led here: the first outside this package and torch."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
