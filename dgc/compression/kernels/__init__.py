"""The loops of accumulate, select, take, encode and decode over a whole bucket, fused where a compiler is at hand.

Every module here has the same names: ``accumulate``, ``accumulate_and_select``, ``encode``, ``Received``,
``encode_all``, ``decode_all``, ``decay``; and ``write`` and ``read``, the loops over rows of ``owners_plain``.
``plain`` is written in torch operations and runs anywhere; the others agree with it to the bit. So do those of the
exchange that adds up at owners (``owners_plain``), and those of AdamW's denominator (``denominator_plain``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from dgc.compression.denominator import Denominator
from dgc.compression.regions import Arrived, ReducePlan, Regions, Taken
from dgc.compression.residual import Gradient, Residual
from dgc.compression.wire import Entries, Layout, Rows
from dgc.warn import warn

COMPILERS = {"cpu": "numba", "cuda": "triton"}  # by device


class ReceivedEntries(Protocol):
    """What rows that all ranks have received say in sum, as ``Received`` makes it: an update."""

    status: Tensor

    def write(self, targets: Sequence[Tensor | None]) -> None:
        """Overwrites the targets with the update."""

    def add(self, targets: Sequence[Tensor | None], rates: Sequence[float]) -> None:
        """Adds the update, times each parameter's rate, to the targets."""


class Kernel(Protocol):
    """A module of kernels; :mod:`dgc.compression.kernels.plain` says what the functions do."""

    __name__: str

    def Received(self, layout: Layout, rows: Rows, messages: Tensor, divisor: float,  # noqa: N802
                 regions: Regions | None = None) -> ReceivedEntries: ...

    def accumulate(self, residual: Residual, gradients: Mapping[str, Gradient],
                   scale: Tensor | Mapping[str, Tensor] | None, layout: Layout) -> list[str]: ...

    def accumulate_and_select(self, residual: Residual, gradients: Mapping[str, Gradient],
                              scale: Tensor | Mapping[str, Tensor] | None,
                              layout: Layout, step: int) -> tuple[list[str], Tensor, Tensor]: ...

    def encode(self, residual: Residual, layout: Layout, index: Tensor, used: Tensor, refused: Tensor,
               masking: bool) -> tuple[Tensor, Taken]: ...

    def encode_all(self, rows: Rows, values: Tensor) -> Tensor: ...

    def decode_all(self, rows: Rows, message: Tensor) -> tuple[Tensor, Tensor]: ...

    def write(self, rows: Rows, row: Tensor, places: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]: ...

    def read(self, rows: Rows, message: Tensor, sizes: Tensor | None = None) -> Entries: ...

    def decay(self, parameter: Tensor, buffer: Tensor, m: float, decay: float, lr: float, nesterov: bool) -> None: ...


class OwnersKernel(Protocol):
    """A module of kernels of owners; :mod:`dgc.compression.kernels.owners_plain` says what the functions do."""

    def accumulate_and_select(self, residual: Residual, gradients: Mapping[str, Gradient],
                              scale: Tensor | Mapping[str, Tensor] | None,
                              plan: ReducePlan, step: int) -> tuple[list[str], Tensor, Tensor]: ...

    def send(self, residual: Residual, plan: ReducePlan, index: Tensor, used: Tensor, refused: Tensor,
             masking: bool) -> tuple[Tensor, Taken]: ...

    def add(self, residual: Residual, plan: ReducePlan, rows: Tensor) -> Arrived: ...

    def pass_on(self, residual: Residual, gradients: Mapping[str, Gradient], plan: ReducePlan, arrived: Arrived,
                step: int, masking: bool) -> tuple[Tensor, Taken]: ...


class DenominatorKernel(Protocol):
    """A module of kernels of AdamW's denominator; :mod:`dgc.compression.kernels.denominator_plain` says what the
    function does.
    """

    def follow(self, x: Tensor, of: Denominator, k: int, now: int) -> None: ...


@cache
def module_for(kind: str, dtype: torch.dtype) -> Kernel:
    """The module for residuals of this dtype on this kind of device (``torch.device.type``).

    Warns where a compiler is installed but does not work: numba beside a NumPy that it does not know, or Triton without
    a C compiler.
    """
    compiler = COMPILERS.get(kind)
    if compiler and dtype in (torch.float32, torch.float64) and importlib.util.find_spec(compiler):
        try:
            module = import_module(f"dgc.compression.kernels.{kind}")
            if kind == "cuda" and torch.cuda.is_available():
                _ = import_module("triton").runtime.driver.active.utils  # compiles, for which it needs a C compiler
            return cast(Kernel, module)
        except Exception as error:  # llvmlite raises an OSError where its library cannot be loaded
            warn(f"{compiler} is installed but does not work ({error}), so compression runs in plain torch "
                 "operations, several times slower")
    return cast(Kernel, import_module("dgc.compression.kernels.plain"))


_compiled: set[torch.dtype] = set()  # dtypes of loops that are in the cache, for good


def current(kind: str, dtype: torch.dtype) -> Kernel:
    """The module to call now: that of :func:`module_for`, or plain torch operations while numba compiles it in a
    process of its own. They agree to the bit.
    """
    module = module_for(kind, dtype)
    if module.__name__ == "dgc.compression.kernels.cpu" and dtype not in _compiled:
        if not _fill().filling(dtype).done():
            return cast(Kernel, import_module("dgc.compression.kernels.plain"))
        _compiled.add(dtype)
    return module


def _fill() -> Any:
    """The module that compiles in a process of its own, which imports those that it compiles."""
    return import_module("dgc.compression.kernels.fill")


def owners(kind: str, dtype: torch.dtype) -> OwnersKernel:
    """The module of owners to call now."""
    fused = current(kind, dtype).__name__ == "dgc.compression.kernels.cpu"
    return cast(OwnersKernel, import_module(f"dgc.compression.kernels.owners_{'cpu' if fused else 'plain'}"))


def denominators(x: Tensor, of: Denominator) -> DenominatorKernel:
    """The module to call now for an update and the denominator that follows it: compiled where their memory will do."""
    reals = [x, of.square, of.factor, *([] if of.largest is None else [of.largest])]
    fits = of.received.is_contiguous() and all(t.is_contiguous() and t.dtype == of.factor.dtype for t in reals)
    module = current(x.device.type if fits else "any", of.factor.dtype)
    return cast(DenominatorKernel, import_module(module.__name__.replace("kernels.", "kernels.denominator_")))


def compile_ahead(*dtypes: torch.dtype) -> None:
    """Waits until the loops for residuals of these dtypes on the CPU are compiled: for measurements, and to fill the
    cache where there is time for it.
    """
    for dtype in dtypes:
        current("cpu", dtype)  # all begin before one is waited for
    for dtype in dtypes:
        if module_for("cpu", dtype).__name__ == "dgc.compression.kernels.cpu":
            _fill().filling(dtype).wait()
