"""The loops of accumulate, select, take, encode and decode over a whole bucket, fused where a compiler is at hand.

Every module here has the same names: ``accumulate``, ``select``, ``encode``, ``Received``, ``settle`` and ``decay``.
``plain`` is written in torch operations and runs anywhere; the others agree with it to the bit.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib import import_module
from typing import Any

import torch


@cache
def find(kind: str, dtype: torch.dtype) -> Any:
    """The module for residuals of this dtype on this kind of device (``torch.device.type``)."""
    if kind == "cpu" and dtype in (torch.float32, torch.float64) and importlib.util.find_spec("numba"):
        return import_module("dgc.kernels.cpu")
    if kind == "cuda" and dtype in (torch.float32, torch.float64) and importlib.util.find_spec("triton"):
        return import_module("dgc.kernels.cuda")
    return import_module("dgc.kernels.plain")
