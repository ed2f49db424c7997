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
        self._blocks_of: dict[int, Tensor] = {}
        self._tail_of = self.owner_of(numel - numel % LINE) if numel % LINE else -1  # whose the last part of a block is

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

    def read(self, flat: Tensor, owner: int) -> Tensor:
        """A copy of an owner's region of a flat tensor of ``numel`` entries."""
        tail = self.numel // LINE * LINE
        body = flat[:tail].view(-1, LINE).index_select(0, self._blocks(owner)).view(-1)
        return torch.cat([body, flat[tail:]]) if owner == self._tail_of else body

    def write(self, flat: Tensor, owner: int, region: Tensor) -> None:
        """Overwrites an owner's region with a tensor such as :meth:`read` returns."""
        tail, blocks = self.numel // LINE * LINE, self._blocks(owner)
        flat[:tail].view(-1, LINE).index_copy_(0, blocks, region[:len(blocks) * LINE].view(-1, LINE))
        if owner == self._tail_of:
            flat[tail:] = region[len(blocks) * LINE:]

    @contextmanager
    def zeroed_region(self, flat: Tensor, owner: int) -> Iterator[None]:
        """Within it an owner's region is zero at first; at its end what was there is added to what is there."""
        before = self.read(flat, owner)
        self.write(flat, owner, torch.zeros_like(before))
        try:
            yield
        finally:
            self.write(flat, owner, self.read(flat, owner).add_(before))

    def blocks(self, owner: int) -> Tensor:
        """An owner's blocks: int64, ascending; of the bucket's last one there may be only a part."""
        if owner == self._tail_of:
            tail = tensor_of([self.numel // LINE], self.device)
            return torch.cat([self._blocks(owner), tail])
        return self._blocks(owner)

    def _turn(self, rounds: Where) -> Where:
        """The owner with which a round begins: numbers without a pattern."""
        return (((rounds * MIXER) & 0xFFFFFFFF) >> 12) % self.owners

    def _blocks(self, owner: int) -> Tensor:
        """An owner's whole blocks: int64, ascending."""
        if owner not in self._blocks_of:
            count = self.before(owner, self.numel // LINE * LINE)
            self._blocks_of[owner] = self.index(owner, torch.arange(0, count, LINE, device=self.device)) // LINE
        return self._blocks_of[owner]


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
