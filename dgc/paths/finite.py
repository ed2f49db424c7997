"""Gradients that are not finite: found in a sum over ranks, refused on all of them alike, and
blamed on those that had one.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dgc.collective import Collective
from dgc.compression import device
from dgc.compression.device import HostCopy
from dgc.compression.residual import Residual
from dgc.compression.wire import NONFINITE, corrupt, not_finite, sender_name, worst


@dataclass(frozen=True)
class LocalVerdict:
    """What the host knows of this rank's own gradients.

    Args:
        names: the parameters whose gradient is not finite.
        on_device: only the device knows, in the flags of the bucket; ``names`` is empty then.
    """

    names: tuple[str, ...] = ()
    on_device: bool = False


def local_verdict(residual: Residual, bad: Sequence[str]) -> LocalVerdict:
    """The verdict without a host-device synchronisation, where the device is asynchronous.

    Args:
        bad: the parameters that the kernel has named.
    """
    if residual.flags is not None and residual.numel and device.is_asynchronous(residual.v.device):
        return LocalVerdict(on_device=True)
    return LocalVerdict(tuple(bad or residual.not_finite()))


class DeferredVerdict:
    """Whether a sum over ranks is finite, where the device is asynchronous and the host asks later.
    Alike on all ranks.

    Args:
        numels: parameter -> its entries in the sum, one after the other.
        own: int64 (), where in the sum this rank's gradient is not finite: the first such entry, or
            -1.
        total: int64 (), the same of the sum.
        each: how many ranks have the same gradient.
        damaged: int64 (), the contributor whose message is corrupt, or -1; alike on all ranks.
            None: none can be.
        bucket: its name, for that error.
    """

    def __init__(
        self,
        numels: Mapping[str, int],
        own: Tensor,
        total: Tensor,
        each: int = 1,
        damaged: Tensor | None = None,
        bucket: str = "",
    ):
        self._numels, self._each, self._bucket = numels, each, bucket
        damaged = torch.full_like(total, -1) if damaged is None else damaged
        self.fine = (total < 0) & (damaged < 0)  # bool (), on the device
        self._answer = HostCopy(torch.stack([own, total, damaged]))  # one copy for all of it

    @property
    def not_finite(self) -> bool:
        """Whether the sum is not finite. A host-device synchronisation."""
        return int(self._answer.get()[1]) >= 0

    @property
    def damaged(self) -> ValueError | None:
        """The error to raise where a message is corrupt. A host-device synchronisation."""
        sender = int(self._answer.get()[2])
        return None if sender < 0 else corrupt(sender_name(sender, self._each), self._bucket)

    def blame(self) -> Generator[Collective, Tensor, str]:
        """The ranks to blame, and a parameter of each, where the sum is not finite: all ranks ask.
        Or nobody, "".
        """
        own = int(self._answer.get()[0])
        return (
            yield from who_is_not_finite(
                list(self._numels),
                [self._name(own)] if own >= 0 else [],
                self.fine.device,
                self._each,
            )
        )

    def error(self, blame: str = "") -> FloatingPointError:
        """The error to raise, alike on all ranks, where the sum is not finite."""
        return FloatingPointError(blame or _sum_not_finite(self._name(int(self._answer.get()[1]))))

    def _name(self, entry: int) -> str:
        # In the first part that ends beyond it.
        return list(self._numels)[bisect(list(accumulate(self._numels.values())), entry)]


def verdict_of_rows(
    residual: Residual, bad: Sequence[str], status: Tensor, each: int = 1, own: Tensor | None = None
) -> Generator[Collective, Tensor, DeferredVerdict | None]:
    """Raises the error that rows report, alike on all ranks. An asynchronous device reports it
    later, by a verdict.

    Args:
        bad: this rank's parameters whose gradient is not finite.
        status: int64 (N,), of the rows that all ranks have received (:mod:`dgc.compression.wire`).
        each: how many ranks have the same gradient.
        own: as for :class:`DeferredVerdict`; None: the first of the parameters that the bucket's
            flags mark, if there are flags.

    Returns:
        The verdict, where the host does not know it yet; else None.

    Raises:
        FloatingPointError: a gradient is not finite.
        ValueError: a row is damaged.
    """
    found = worst(status)
    if device.is_asynchronous(residual.v.device) and (
        own is not None or residual.flags is not None
    ):
        if own is None:
            own = torch.where(
                residual.marked.any(),
                residual.beginnings.take(residual.marked.to(torch.uint8).argmax()),
                -1,
            )
        total, damaged = (
            torch.where(found == NONFINITE, 0, -1),
            torch.where(found > 0, found - 1, -1),
        )
        return DeferredVerdict(
            residual.numel_of, own, total, each, damaged=damaged, bucket=residual.name
        )
    worst_status = int(found)
    if worst_status == NONFINITE:
        blame = yield from who_is_not_finite(residual.names, bad, residual.v.device, each)
        raise FloatingPointError(
            blame or f"the sum over ranks of their gradients is not finite, in {residual.name}"
        )
    if worst_status:
        raise corrupt(sender_name(worst_status - 1, each), residual.name)
    return None


def first_not_finite(flat: Tensor) -> Tensor:
    """int64 (): the position of the first entry that is not finite, or -1, without a host-device
    synchronisation.
    """
    if not flat.numel():
        return torch.full((), -1, device=flat.device)
    found, at = flat.isfinite().logical_not_().view(torch.uint8).max(0)
    return torch.where(found > 0, at, -1)


def checked_sum(
    total: Tensor,
    own: Tensor | None,
    numels: Mapping[str, int],
    bad: Callable[[], Sequence[str]],
    each: int = 1,
) -> Generator[Collective, Tensor, tuple[Tensor, DeferredVerdict | None]]:
    """A sum that is finite, or refused; without a host-device synchronisation: zero if it is not
    finite, and the verdict.

    Args:
        own: as for :class:`DeferredVerdict`; None where the host knows.
        total, numels, bad: as for :func:`blame_for`.
        each: how many ranks have the same gradient.

    Raises:
        FloatingPointError: the sum is not finite; on all ranks alike.
    """
    if own is None:
        if blame := (yield from blame_for(total, numels, bad)):
            raise FloatingPointError(blame)
        return total, None
    verdict = DeferredVerdict(numels, own, first_not_finite(total), each)
    return torch.where(verdict.fine, total, 0), verdict


def blame_for(
    total: Tensor, numels: Mapping[str, int], bad: Callable[[], Sequence[str]]
) -> Generator[Collective, Tensor, str]:
    """The ranks whose gradients made a sum infinite or NaN; "" if the sum is finite.

    Args:
        total: the sum, flat.
        numels: parameter -> its entries in the sum, one after the other.
        bad: tells which of this rank's gradients are not finite; called only when the sum is not.
    """
    # The sum takes a tenth as long. It may be infinite where no entry is.
    if math.isfinite(total.sum()) or torch.isfinite(total).all():
        return ""
    blame = yield from who_is_not_finite(list(numels), bad(), total.device)
    if not blame:  # each addend was finite
        parts = zip(numels, total.split(list(numels.values())), strict=True)
        wrong = ", ".join(name for name, part in parts if not torch.isfinite(part).all())
        blame = _sum_not_finite(wrong)
    return blame


def _sum_not_finite(names: str) -> str:
    return f"the sum over ranks of their gradients is not finite, in: {names}"


def who_is_not_finite(
    names: Sequence[str], bad: Iterable[str], where: torch.device, each: int = 1
) -> Generator[Collective, Tensor, str]:
    """The ranks that have a gradient that is not finite, and of which parameters, when each rank
    knows its own.

    Args:
        names: of all parameters, alike on every rank.
        bad: those whose gradient is not finite on this rank.
        where: the device of the tensors that travel.
        each: how many ranks have the same gradient.
    """
    own = set(bad)
    everyones = yield Collective(
        "all_gather", torch.tensor([name in own for name in names], device=where)
    )
    return "; ".join(
        str(
            not_finite(
                sender_name(sender, each),
                [name for name, mark in zip(names, marks, strict=True) if mark],
            )
        )
        for sender, marks in enumerate(everyones[::each].tolist())
        if any(marks)
    )
