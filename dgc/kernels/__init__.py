"""The loops of accumulate, select, take, encode and decode over a whole bucket, fused where a compiler is at hand.

Every module here has the same names: ``accumulate``, ``select``, ``encode``, ``Received``, ``settle`` and ``decay``.
``plain`` is written in torch operations and runs anywhere; the others agree with it to the bit.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from importlib import import_module
from typing import Any

import torch

COMPILERS = {"cpu": "numba", "cuda": "triton"}  # by device


@cache
def find(kind: str, dtype: torch.dtype) -> Any:
    """The module for residuals of this dtype on this kind of device (``torch.device.type``).

    Warns where a compiler is installed but does not work, say numba beside a NumPy that it does not know.
    """
    compiler = COMPILERS.get(kind)
    if compiler and dtype in (torch.float32, torch.float64) and importlib.util.find_spec(compiler):
        try:
            return import_module(f"dgc.kernels.{kind}")
        except Exception as error:  # llvmlite raises an OSError where its library cannot be loaded
            warnings.warn(f"{compiler} is installed but cannot be imported ({error}), so compression runs in plain "
                          "torch operations, several times slower", stacklevel=2)
    return import_module("dgc.kernels.plain")
