"""Averaged updates: what a path returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dgc.paths.finite import DeferredVerdict


class Update(Protocol):
    """The averaged update of a bucket's parameters, equal on every rank.

    Targets are contiguous tensors in the update's dtype, one for each parameter in order, with
    their entries as the bucket has them (:meth:`dgc.compression.residual.Residual.in_order`); None
    stands for one that is not wanted.
    """

    def write(self, targets: Sequence[Tensor | None]) -> None:
        """Overwrites the targets with the update."""

    def add(self, targets: Sequence[Tensor | None], rates: Sequence[float]) -> None:
        """Adds the update, times each parameter's rate, to the targets."""


class DenseUpdate:
    """An update that came by allreduce.

    Args:
        flat: the update of all the bucket's parameters, in order.
        numels: entries of each parameter.
        verdict: tells later whether the update is finite, where the host does not know yet.
        blame: names the ranks whose gradients made the update infinite or NaN; "" if it is finite.

    Attributes:
        velocity: the average of all ranks' u, flat, in the last step before gradients travel dense;
            else None.
    """

    velocity: Tensor | None = None

    def __init__(
        self,
        flat: Tensor,
        numels: Sequence[int],
        verdict: DeferredVerdict | None = None,
        blame: str = "",
    ):
        self.parts, self.verdict, self.blame = flat.split(list(numels)), verdict, blame

    def write(self, targets: Sequence[Tensor | None]) -> None:
        """See :class:`Update`."""
        wanted = {i: target.view(-1) for i, target in enumerate(targets) if target is not None}
        if wanted:
            torch._foreach_copy_(list(wanted.values()), [self.parts[i] for i in wanted])

    def add(self, targets: Sequence[Tensor | None], rates: Sequence[float]) -> None:
        """See :class:`Update`."""
        of_rate: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for target, part, rate in zip(targets, self.parts, rates, strict=True):
            if target is not None:
                lists = of_rate.setdefault(rate, ([], []))
                lists[0].append(target.view(-1))
                lists[1].append(part)
        for rate, (some, parts) in of_rate.items():
            torch._foreach_add_(some, parts, alpha=rate)


class SparseUpdate:
    """An update that is a sparse COO tensor.

    Args:
        tensor: coalesced, of the parameter's shape.
        blame: as for :class:`DenseUpdate`.

    Attributes:
        v, u: the averages of the parameter's v and u, in its shape; None where they are 0 on all
            ranks.
    """

    def __init__(self, tensor: Tensor, blame: str = ""):
        self.tensor, self.blame = tensor, blame
        self.v: Tensor | None = None
        self.u: Tensor | None = None
