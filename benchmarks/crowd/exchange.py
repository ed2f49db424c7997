"""The package's exchanges for all N workers at once, in (N, n) tensors: u and v of every worker, and what they send.

They equal the package's own, to rounding (tests/benchmarks/test_crowd.py), but in what nobody has here: choices other
than its 3 k entries a round, and the bound, where the mean of all v chooses, which no worker knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dgc.collective import dense_bytes
from dgc.compression import select
from dgc.compression import sizes as messages
from dgc.compression.regions import ReducePlan
from dgc.compression.residual import Residual
from dgc.compression.wire import Layout, Rows

Kind = Literal["allgather", "reduce", "mean"]
BITS = 16  # of a value in a message


@dataclass(frozen=True)
class Momentum:
    """Nesterov's, and what becomes of the velocity of an entry that is sent (``dgc.Config``'s ``factor_masking``)."""

    m: float
    masking: bool


class Residuals:
    """u and v of all workers, each (N, n).

    Args:
        bucket: the compressed parameters, as one of the package's buckets; its own u and v are not used.
        workers: N.
        momentum: see there.
    """

    def __init__(self, bucket: Residual, workers: int, momentum: Momentum):
        self.u, self.v = torch.zeros(2, workers, bucket.numel, device=bucket.v.device)
        self.momentum = momentum
        self.fresh = self.v  # what the last step has added to v

    def accumulate(self, g: Tensor) -> None:
        """Adds all workers' gradients, (N, n), into u and v (paper, appendix B)."""
        m = self.momentum.m
        self.u.mul_(m).add_(g)
        self.fresh = g + self.u * m
        self.v += self.fresh

    def take(self, index: Tensor, sent: Tensor) -> Tensor:
        """Takes what is sent out of v: each worker's own entries, (N, K), and 0 where nothing is sent. Returns the sum
        over workers, (n,).
        """
        taken = torch.zeros_like(self.v).scatter_add_(1, index, sent)
        self.v -= taken
        if self.momentum.masking:
            self.u.masked_fill_(taken != 0, 0)
        return taken.sum(0)


class Exchange:
    """One exchange at one sparsity.

    Args:
        bucket, workers: as of :class:`Residuals`.
        kind: "mean" is the bound.
        sparsity: of an all-gather's message.
        wide: times its entries that the other kinds have; the package's own number is ``dgc.compression.sizes.WIDE``.

    Attributes:
        dense: the same entries travel as one dense sum, which is fewer bytes.
        nbytes: that a worker sends; none of the bound.
    """

    nbytes: float = 0

    def __init__(
        self, bucket: Residual, workers: int, kind: Kind, sparsity: float, wide: int = messages.WIDE
    ):
        self.workers, self.bucket, self.kind = workers, bucket, kind
        self.own = torch.arange(workers, device=bucket.v.device)[:, None]
        counts = [select.count(sparsity, n) for n in bucket.numels]
        if kind != "allgather":
            counts = [min(n, wide * k) for n, k in zip(bucket.numels, counts, strict=True)]
        self.layout, self.dense = Layout(bucket, counts, BITS), False
        if kind == "allgather":
            self.dense = messages.sends_dense(kind, self.layout.sizes, workers)
            self.nbytes = (workers - 1) * self.layout.rows.nbytes
        elif kind == "reduce":
            self.plan = ReducePlan(self.layout, workers, 0)
            rows = self.plan.to_owners.nbytes + self.plan.to_all.nbytes
            # As dgc.compression.sizes.sends_dense has it.
            self.dense = 2 * self.layout.sizes.dense < rows * workers
            self.nbytes = (workers - 1) * rows
            self._deal_out()
        if self.dense:
            self.nbytes = dense_bytes(bucket.numel, workers)

    def _deal_out(self) -> None:
        """Whose every entry is, and each owner's entries."""
        regions, parameters, device = (
            self.plan.regions,
            len(self.bucket.numels),
            self.bucket.v.device,
        )
        self.owner = regions.owner_of(torch.arange(self.bucket.numel, device=device))  # int64 (n,)
        of = torch.repeat_interleave(torch.tensor(self.bucket.numels, device=device))
        self.group = self.owner * parameters + of  # an owner's part of a parameter
        self.group_size = torch.bincount(self.group, minlength=self.workers * parameters).clamp_(
            min=1
        )
        local = torch.arange(regions.size, device=device)
        places = torch.stack([regions.index(w, local) for w in range(self.workers)])
        # (N, R); n: there is no such.
        self.region = torch.where(places < self.bucket.numel, places, self.bucket.numel)

    def __call__(self, residuals: Residuals) -> Tensor:
        """Takes what is sent in a step, and returns the average, (n,)."""
        if self.kind == "mean":
            total = self._mean(residuals)
        elif self.dense:
            total = self._chosen(residuals, rounded=False)
        elif self.kind == "allgather":
            total = self._chosen(residuals, rounded=True)
        else:
            total = self._at_owners(residuals)
        return total / self.workers

    def _largest(self, v: Tensor) -> Tensor:
        """(rows, K): the largest entries of each parameter, by its own k; ascending."""
        parts = zip(
            v.split(self.bucket.numels, dim=1), self.layout.counts, self.bucket.offsets, strict=True
        )
        chosen = [
            part.abs().topk(k, dim=1, sorted=False).indices + offset for part, k, offset in parts
        ]
        return torch.cat(chosen, 1).sort(dim=1).values

    def _chosen(self, residuals: Residuals, rounded: bool) -> Tensor:
        """Each worker's own largest entries, to all."""
        index = self._largest(residuals.v)
        sent = residuals.v.gather(1, index)
        if rounded:
            sent = as_read(self.layout.rows, self.own.expand_as(index), index, sent, self.workers)
        return residuals.take(index, sent)

    def _mean(self, residuals: Residuals) -> Tensor:
        """The largest entries of the sum of all v, of all workers."""
        index = self._largest(residuals.v.sum(0, keepdim=True)).expand(self.workers, -1)
        return residuals.take(index, residuals.v.gather(1, index))

    def _at_owners(self, residuals: Residuals) -> Tensor:
        """Both rounds of the reduce exchange (``dgc/paths/owners.py``)."""
        v, n = residuals.v, self.workers
        index = self._largest(torch.where(self.owner == self.own, residuals.fresh, v))
        row = self.owner[index]
        row = self._fitting(torch.where(row == self.own, n, row), v.gather(1, index))
        sent = torch.where(row < n, v.gather(1, index), 0)
        places = self.plan.regions.index_in_region(index)
        sent = as_read(self.plan.to_owners, self.own * n + row, places, sent, n * n)
        arrived = residuals.take(index, sent)
        v.scatter_add_(0, self.owner[None], arrived[None])

        sums = v.gather(0, self.owner[None])[0].abs()
        means = v.new_zeros(len(self.group_size)).index_add_(0, self.group, sums) / self.group_size
        scores = sums / means.clamp(min=torch.finfo(v.dtype).tiny)[self.group]
        padded = torch.cat([scores, scores.new_full((1,), -1)])[self.region]
        kept = self.region.gather(
            1, padded.topk(self.plan.to_all.slots, dim=1, sorted=False).indices
        )
        kept = kept.sort(dim=1).values
        valid, kept = kept < len(sums), kept.clamp(max=len(sums) - 1)
        valid &= v.gather(1, kept) != 0
        passed = torch.where(valid, v.gather(1, kept), 0)
        places = self.plan.regions.index_in_region(kept)
        return residuals.take(
            kept, as_read(self.plan.to_all, self.own.expand_as(kept), places, passed, n)
        )

    def _fitting(self, row: Tensor, values: Tensor) -> Tensor:
        """As ``dgc.compression.kernels.owners_plain`` has it: (N, K), without those for which a row has no slot."""
        n = self.workers
        by_size = values.abs().sort(dim=1, stable=True, descending=True).indices
        rows, order = row.gather(1, by_size).sort(dim=1, stable=True)
        edges = torch.arange(n + 1, device=row.device).expand(n, -1).contiguous()
        first = torch.searchsorted(rows, edges)
        place = torch.arange(row.shape[1], device=row.device) - first.gather(1, rows)
        place = torch.empty_like(place).scatter_(1, by_size.gather(1, order), place)
        return torch.where(place < self.plan.to_owners.slots, row, n)


def as_read(rows: Rows, row: Tensor, places: Tensor, values: Tensor, count: int) -> Tensor:
    """What receivers read of values, (N, K), in a message of so many rows. Zeros are not written.

    Args:
        row, places: (N, K), the row of each value and its place there, ascending within a row.
    """
    written = torch.where(values != 0, row, count)
    _, sent = rows.encode(written.flatten(), places.flatten(), values.flatten(), count)
    return sent.view_as(values)
