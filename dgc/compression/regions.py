"""A bucket's entries, dealt out to N owners who add them up; and messages whose rows go to one owner each.

Entries are dealt out in blocks of 16 neighbours. In each round of N blocks every owner gets one, and each round begins
with another owner. So all regions have the same size, to a block; and large entries that lie together, or come in a
period, do not all fall to one owner.

A row has a fixed number of slots, used or not, so that nobody needs to ask how long it is. Positions are counted within
an owner's region. In bytes, with C stretches of 65,536 entries in a region, S slots, and w bytes a value:

    int32  (C)   how many entries each stretch has in this row
    value  (S)   float16, bfloat16 or float32
    int16  (S)   positions within the stretch, as unsigned numbers, ascending
    int16  (1)   exponent: a value counts 2^exponent; or a number that says what is wrong: of
                 CORRUPT, the first count says whose row is damaged
    zeros        up to a multiple of 4
    int32  (2)   checksum, the lower half first
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dgc.compression import sizes as messages
from dgc.compression.device import tensor_of
from dgc.compression.sizes import LINE, region, row_bytes
from dgc.compression.wire import BLOCK, CORRUPT, MIXER, NONFINITE, Layout, checksums, exponents, scaled, seal

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
        self._tail_of = self.owner(numel - numel % LINE) if numel % LINE else -1  # whose the last block is, if a part

    @cached_property
    def sizes(self) -> Tensor:
        """int64 (N,): entries of each region."""
        return tensor_of([self.before(owner, self.numel) for owner in range(self.owners)], self.device)

    @property
    def size(self) -> int:
        """Entries of the largest region."""
        return region(self.numel, self.owners)

    def owner(self, index: Where) -> Where:
        """int64, of the shape of ``index``, positions in the bucket: whose they are."""
        block = index // LINE
        return (block % self.owners + self._turn(block // self.owners)) % self.owners

    def local(self, index: Tensor) -> Tensor:
        """int64, of the same shape: where they are in their owner's region. Ascending where ``index`` is."""
        return index // (LINE * self.owners) * LINE + index % LINE

    def index(self, owner: int | Tensor, local: Tensor) -> Tensor:
        """int64, of the shape of ``local``, positions in the region of ``owner``: where they are in the bucket."""
        rounds = local // LINE
        place = (owner - self._turn(rounds)) % self.owners
        return (rounds * self.owners + place) * LINE + local % LINE

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
    def aside(self, flat: Tensor, owner: int) -> Iterator[None]:
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


class Entries(NamedTuple):
    """What rows say: each (R, S), but for the first two."""

    status: Tensor  # int64 (R,): the exponent, or one of the numbers that say what is wrong
    whose: Tensor  # int64 (R,): the worker whose row is damaged, where the status says that one is
    local: Tensor  # int64: positions in a region; 0 in unused slots
    values: Tensor  # in the residual's dtype; 0 in unused slots, and in rows that tell of errors


class Taken(NamedTuple):
    """Entries that were taken out of v; or, where ``sent`` has the other sign, added to it."""

    places: Tensor  # int64 (E,), in the bucket
    sent: Tensor  # (E,), what receivers read; 0 where nothing was sent


class Arrived(NamedTuple):
    """What workers' rows said, and what was therefore added to v."""

    status: Tensor  # int64 (R,), as :class:`Entries` has it
    whose: Tensor  # int64 (R,)
    added: Taken
    before: Tensor  # (E,), what was in v at ``added.places``


class Rows:
    """The format of a message's rows.

    Args:
        slots: S.
        size: entries of the largest region.
        dtype: of the values.
        residual: the dtype in which they are read.
        device: of the tensors.
    """

    def __init__(self, slots: int, size: int, dtype: torch.dtype, residual: torch.dtype, device: torch.device):
        self.slots, self.size, self.dtype, self.residual, self.device = slots, size, dtype, residual, device
        self.stretches = -(-size // BLOCK)
        a = 4 * self.stretches
        b = a + dtype.itemsize * slots
        self.ends = a, b, b + 2 * slots  # of counts, values and positions, in bytes
        self.nbytes = row_bytes(slots, size, dtype.itemsize)
        self._sizes = tensor_of([min(BLOCK, size - first) for first in range(0, size, BLOCK)], device)

    def encode(self, row: Tensor, local: Tensor, values: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Writes a message.

        Args:
            row: int64 (E,), each entry's row, or ``rows`` if it is not to be written. No row has more than S.
            local: int64 (E,), its position in the owner's region; ascending within each row.
            values: (E,) in the residual's dtype.
            rows: R.

        Returns:
            The message, uint8 (R, nbytes), and what receivers will read, (E,) in the residual's dtype, 0 where
            nothing is written. A row with a value that is not finite has nothing but this fact.
        """
        values = torch.where(row < rows, values, 0)
        exponent = exponents(values, row, rows + 1)
        fine = (row < rows) & (exponent != NONFINITE)[row]
        coded = torch.where(fine, scaled(values, -exponent[row], torch.float64), 0).to(self.dtype)
        order = torch.where(fine, row, rows).sort(stable=True)
        starts = torch.searchsorted(order.values, torch.arange(rows + 1, device=self.device))
        slot = torch.arange(len(row), device=self.device) - starts[order.values]
        where = torch.where(order.values < rows, order.values * self.slots + slot, rows * self.slots)
        message = torch.zeros(rows, self.nbytes, dtype=torch.uint8, device=self.device)
        counts, words, positions, status = self._sections(message)
        of = order.indices
        words.copy_(_placed(coded[of], where, rows, self.slots))
        positions.copy_(_placed((local[of] % BLOCK).to(torch.int16), where, rows, self.slots))
        stretch = torch.where(order.values < rows, order.values * self.stretches + local[of] // BLOCK,
                              rows * self.stretches)
        counts.copy_(torch.zeros(rows * self.stretches + 1, dtype=torch.int32, device=self.device).scatter_add_(
            0, stretch, torch.ones_like(stretch, dtype=torch.int32))[:-1].view_as(counts))
        status.copy_(exponent[:rows, None])
        return seal(message), torch.where(fine, scaled(coded, exponent[row], self.residual), 0)

    def telling(self, rows: int, status: Tensor | int, whose: Tensor | int = 0) -> Tensor:
        """A message without entries, which says what is wrong, and with whose row: uint8 (R, nbytes)."""
        message = torch.zeros(rows, self.nbytes, dtype=torch.uint8, device=self.device)
        sections = self._sections(message)
        sections[0][:, 0] = whose
        sections[3][:] = status
        return seal(message)

    def decode(self, message: Tensor, sizes: Tensor) -> Entries:
        """Reads a message, uint8 (R, nbytes), each worker's row in turn. A damaged one has the status ``CORRUPT``, and
        nothing else in it.

        Args:
            sizes: int64 (R,) or (1,): entries of the region that each row is about.
        """
        counts, words, positions, status = self._sections(message)
        wide = counts.to(torch.int64)
        ends = wide.cumsum(1)
        damaged = (checksums(message) != message.view(torch.int32)[:, -2:]).any(1)
        telling = status[:, 0] >= CORRUPT
        bad = damaged | ~telling & (((wide < 0) | (wide > self._sizes)).any(1) | (ends[:, -1] > self.slots))
        used = torch.where(bad | telling, 0, ends[:, -1])
        slot = torch.arange(self.slots, device=self.device).expand(len(message), -1)
        stretch = torch.searchsorted(ends.clamp(0, self.slots), slot.contiguous(), right=True).clamp_(
            max=self.stretches - 1)
        within = positions.to(torch.int64) & (BLOCK - 1)
        valid = slot < used[:, None]
        local = stretch * BLOCK + within
        bad |= (valid & (local >= sizes[:, None])).any(1) | (valid[:, 1:] & (local.diff(dim=1) <= 0)).any(1)
        bad |= (valid & ~words.isfinite()).any(1)  # of such a row its writer would have told
        valid = valid & ~bad[:, None]
        exponent = torch.where(telling, 0, status[:, 0]).to(torch.int64)
        values = torch.where(valid, scaled(words, exponent[:, None].expand_as(words), self.residual), 0)
        sender = torch.arange(len(message), device=self.device)
        whose = torch.where(bad, sender, wide[:, 0])
        return Entries(torch.where(bad, CORRUPT, status[:, 0].to(torch.int64)), whose,
                       torch.where(valid, local, 0), values)

    def _sections(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views: counts (R, C), values (R, S), positions (R, S), exponents (R, 1)."""
        a, b, c = self.ends
        return (message[:, :a].view(torch.int32), message[:, a:b].view(self.dtype), message[:, b:c].view(torch.int16),
                message[:, c:c + 2].view(torch.int16))


def _placed(values: Tensor, where: Tensor, rows: int, slots: int) -> Tensor:
    """(R, S) with these values at these places of it, counted through all rows, and zeros elsewhere."""
    return values.new_zeros(rows * slots + 1).index_copy_(0, where, values)[:-1].view(rows, slots)


class Plan:
    """Who adds up what of a bucket, as one of the owners sees it, and the format of the rows to them and from them.

    Args:
        layout: how many entries are chosen of the bucket, and how their values are written.
        owners: N.
        own: which of them this one is.
    """

    def __init__(self, layout: Layout, owners: int, own: int):
        self.layout, self.own = layout, own
        self.regions = Regions(layout.numel, owners, layout.device)
        self.to_owners = self._rows(messages.row_slots(layout.slots, owners))
        self.to_all = self._rows(messages.kept_slots(layout.numel, layout.slots, owners))

    def _rows(self, slots: int) -> Rows:
        """The format of rows of so many slots about a region."""
        layout = self.layout
        return Rows(slots, self.regions.size, layout.dtype, layout.residual, layout.device)

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
            inner = range((first // BLOCK + 1) * BLOCK, end, BLOCK)
            cuts += [(a, b, p) for a, b in zip((first, *inner), (*inner, end), strict=True) if a < b]
            first = end
        return torch.tensor(cuts, dtype=torch.int64, device="cpu").view(-1, 3).T
