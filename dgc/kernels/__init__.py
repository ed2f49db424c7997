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

from dgc.warn import warn

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
            warn(f"{compiler} is installed but cannot be imported ({error}), so compression runs in plain torch "
                 "operations, several times slower")
    return import_module("dgc.kernels.plain")


def at_hand(kind: str, dtype: torch.dtype) -> Any:
    """The module to call now: that of :func:`find`, or plain torch operations while numba compiles it in a process of
    its own. They agree to the bit.
    """
    module = find(kind, dtype)
    if module.__name__ == "dgc.kernels.cpu":
        from dgc.kernels import fill
        if not fill.filling(dtype).done():
            return import_module("dgc.kernels.plain")
    return module


def compile_ahead(*dtypes: torch.dtype) -> None:
    """Waits until the loops for residuals of these dtypes on the CPU are compiled: for measurements, and to fill the
    cache where there is time for it.
    """
    for dtype in dtypes:
        at_hand("cpu", dtype)  # all begin before one is waited for
    for dtype in dtypes:
        if find("cpu", dtype).__name__ == "dgc.kernels.cpu":
            from dgc.kernels import fill
            fill.filling(dtype).wait()
