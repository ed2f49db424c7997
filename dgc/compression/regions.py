"""A bucket's entries, dealt out to N owners who add them up.

Entries are dealt out in blocks of 16 neighbours. In each round of N blocks every owner gets one, and each round begins
with another owner. So all regions have the same size, to a block; and large entries that lie together, or come in a
period, do not all fall to one owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dgc.compression import sizes
from dgc.compression.device import tensor_of
from dgc.compression.sizes import LINE, region
from dgc.compression.wire import MIXER, Layout, Rows

STRETCH = 1 << 16  # entries of a region whose sums are added up together
Where = TypeVar("Where", int, Tensor)


class Regions:
    """The entries of a bucket that each owner adds up.

    Args:
        numel: entries of the bucket.
        owners: N.
        device: of the tensors.
    """

    def __init__(self, numel: int, owners: int, device: torch.device):
        self.numel, self.owners, self.device = numel, owners, device

    @cached_property
    def sizes(self) -> Tensor:
        """int64 (N,): entries of each region."""
        return tensor_of([self.before(owner, self.numel) for owner in range(self.owners)], self.device)

    @property
    def size(self) -> int:
        """Entries of the largest region."""
        return region(self.numel, self.owners)

    def owner_of(self, index: Where) -> Where:
        """int64, of the shape of ``index``, positions in the bucket: whose they are."""
        block = index // LINE
        return (block % self.owners + self._turn(block // self.owners)) % self.owners

    def index_in_region(self, index: Tensor) -> Tensor:
        """int64, of the same shape: where they are in their owner's region. Ascending where ``index`` is."""
        return index // (LINE * self.owners) * LINE + index % LINE

    def index(self, owner: int | Tensor, in_region: Tensor) -> Tensor:
        """int64, of the shape of ``in_region``, positions in the region of ``owner``: where they are in the bucket."""
        rounds = in_region // LINE
        place = (owner - self._turn(rounds)) % self.owners
        return (rounds * self.owners + place) * LINE + in_region % LINE

    def before(self, owner: int, index: int) -> int:
        """How many entries of an owner's region lie before a position in the bucket."""
        rounds, rest = divmod(index, LINE * self.owners)
        first = (owner - self._turn(rounds)) % self.owners * LINE  # of its block in that round
        return rounds * LINE + min(max(rest - first, 0), LINE)

    def indices(self, owner: int, step: int = 1) -> Tensor:
        """int64, ascending: where in the bucket an owner's entries are, or every so many of them."""
        return self.index(owner, torch.arange(0, self.before(owner, self.numel), step, device=self.device))

    @contextmanager
    def zeroed_region(self, flat: Tensor, owner: int) -> Iterator[None]:
        """Within it an owner's region is zero at first; at its end what was there is added to what is there."""
        index = self.indices(owner)
        before = flat[index]
        flat.index_fill_(0, index, 0)
        try:
            yield
        finally:
            flat.index_add_(0, index, before)

    def _turn(self, rounds: Where) -> Where:
        """The owner with which a round begins: numbers without a pattern."""
        return (((rounds * MIXER) & 0xFFFFFFFF) >> 12) % self.owners


class Taken(NamedTuple):
    """Entries that were taken out of v; or, where ``sent`` has the other sign, added to it."""

    places: Tensor  # int64 (E,), in the bucket
    sent: Tensor  # (E,), what receivers read; 0 where nothing was sent


class Arrived(NamedTuple):
    """What workers' rows said, and what was therefore added to v."""

    status: Tensor  # int64 (R,), of the rows
    added: Taken
    before: Tensor  # (E,), what was in v at ``added.places``


class ReducePlan:
    """Who adds up what of a bucket, as one of the owners sees it, and the format of the rows to them and from them.

    Args:
        layout: how many entries are chosen of the bucket, and how their values are written.
        owners: N.
        own: which of them this one is.
    """

    def __init__(self, layout: Layout, owners: int, own: int):
        self.layout, self.own = layout, own
        self.tables: dict[Any, Any] = {}  # of wire.tables_of
        self.regions = Regions(layout.numel, owners, layout.device)
        self.to_owners = self._rows(sizes.row_slots(layout.slots, owners))
        self.to_all = self._rows(sizes.kept_slots(layout.numel, layout.slots, owners))

    def _rows(self, slots: int) -> Rows:
        """The format of rows of so many slots about a region."""
        layout = self.layout
        return Rows(slots, self.regions.size, layout.bits, layout.dtype, layout.device)

    @cached_property
    def size(self) -> Tensor:
        """int64 (1,): entries of the own region."""
        return self.regions.sizes[self.own].view(1)

    @cached_property
    def spans(self) -> list[int]:
        """How many entries each parameter has in the own region."""
        ends = [self.regions.before(self.own, end) for end in accumulate(self.layout.numels)]
        return [end - begin for begin, end in pairwise([0, *ends])]

    @cached_property
    def lengths(self) -> Tensor:
        """int64 (P,): the same."""
        return tensor_of(self.spans, self.layout.device)

    @cached_property
    def pieces(self) -> Tensor:
        """int64 (3, Q): the own region cut where a parameter ends, and at stretches: where each piece begins and ends,
        and its parameter. Sums of a parameter are those of its pieces, one after the other.
        """
        cuts, first = list[tuple[int, int, int]](), 0
        for p, length in enumerate(self.spans):
            end = first + length
            inner = range((first // STRETCH + 1) * STRETCH, end, STRETCH)
            cuts += [(a, b, p) for a, b in zip((first, *inner), (*inner, end), strict=True) if a < b]
            first = end
        return torch.tensor(cuts, dtype=torch.int64, device="cpu").view(-1, 3).T
