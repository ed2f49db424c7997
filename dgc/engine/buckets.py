"""Buckets of parameters that travel together, in the order in which they leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgc.compression.residual import Bucket

BUCKET_NUMEL = 1 << 23  # more entries in a bucket => fewer messages, less overlap with the backward pass
MAX_NUMEL = (1 << 31) - 1  # of a bucket: beyond, positions would not fit into 32 bits
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)  # exchanged


@dataclass(eq=False)
class ParameterBucket:
    """Parameters that travel together.

    Args:
        name: of their exchange, alike on every rank.
        parameters: in the order in which a backward pass completes them.
        compressed: whether they travel compressed; else dense.
        kept: u and v of compressed ones, v of dense ones that travel rounded, None of others.
    """

    name: str
    parameters: list[Tensor]
    compressed: bool
    kept: Bucket | None

    def accumulates(self, stock: bool) -> bool:
        """Whether their gradients pass through v.

        Args:
            stock: nothing is compressed in this step.
        """
        return self.kept is not None and not stock

    def dtype(self, stock: bool) -> torch.dtype:
        """The dtype of their update."""
        if self.kept is not None and self.accumulates(stock):
            return self.kept.v.dtype
        dtype = self.parameters[0].dtype
        return dtype.to_real() if dtype.is_complex else dtype


def compressible(parameter: Tensor, min_numel: int) -> bool:
    """Whether a parameter travels compressed: others cost little, and less than their positions would, or are complex.
    """
    return parameter.dim() > 1 and parameter.numel() >= max(1, min_numel) and not parameter.is_complex()


def pack(parameters: list[Tensor], names: dict[Tensor, str], groups: Any,
         min_numel: int) -> list[tuple[list[str], list[Tensor]]]:
    """The parameters that travel together: of one kind, in the order in which a backward pass completes them.

    Args:
        parameters: in the order of the optimizer.
        names: parameter -> name.
        groups: as for :func:`dgc.DistributedOptimizer`.
        min_numel: of :class:`dgc.Config`.

    Returns:
        Of each bucket the names and the parameters. Frozen parameters travel apart, and last.
    """
    sets = _sets(parameters[::-1], groups)
    packed = []
    for together in [[p for p in kept if p.requires_grad] for kept in sets] + [
            [p for p in kept if not p.requires_grad] for kept in sets]:
        packed += _by_kind(together, min_numel, BUCKET_NUMEL if groups is None else None)
    return [([names[p] for p in together], together) for together in packed]


def _sets(backward: list[Tensor], groups: Any) -> list[list[Tensor]]:
    """The groups that the user wants, in the order of the backward pass."""
    if groups is None:
        return [backward]
    if isinstance(groups, int):
        share, extra = divmod(len(backward), groups)
        ends = [share * (i + 1) + min(i + 1, extra) for i in range(groups)]
        return [backward[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    position = {p: i for i, p in enumerate(backward)}
    sets = [sorted((p for p in group if p in position), key=position.__getitem__) for group in groups]
    grouped = {p for together in sets for p in together}
    return [*sets, [p for p in backward if p not in grouped]]


def _by_kind(together: list[Tensor], min_numel: int, full: int | None) -> list[list[Tensor]]:
    """Splits a set by device, dtype and way of travelling, and where a bucket is full."""
    buckets: list[list[Tensor]] = []
    filling: dict[Any, list[Tensor]] = {}
    numel: dict[Any, int] = {}
    for parameter in together:
        kind = (parameter.device, parameter.dtype, compressible(parameter, min_numel))
        if numel.get(kind, 0) + parameter.numel() > MAX_NUMEL and kind in filling:
            buckets.append(filling.pop(kind))
            numel[kind] = 0
        filling.setdefault(kind, []).append(parameter)
        numel[kind] = numel.get(kind, 0) + parameter.numel()
        if full is not None and numel[kind] >= full:
            buckets.append(filling.pop(kind))
            numel[kind] = 0
    return [*buckets, *filling.values()]
