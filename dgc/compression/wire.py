"""The wire format: a message is rows of slots.

A row has k slots for entries of an interval of n entries, whether they are used or not, so that every rank knows its
size. A slot that is used has its entry's place in the interval, and its value in b bits. A row of all n entries has no
places. In bytes, with G = ceil(k / 512) groups of slots, each section filled up to a multiple of 4:

    int32   (1)                    status: 0; -1: a gradient was not finite; 1 + r: the row of contributor r was damaged
    16 bits (G) or (2 G)           the scale of each group: an exponent e, or numbers a and d
    bits    (k b)                  values, slot after slot
    bits    (k l)                  places: the l lowest bits of each
    bits    (k + ((n - 1) >> l))   places: the other bits h, in unary: bit h + slot is set for each slot that is used
    int32   (2)                    checksum, the lower half first

Bit i of a section is bit i % 8 of its byte i // 8; numbers are little-endian. Slots that are used come before those
that are not, and all other bits are 0. A row whose status is not 0 has nothing but its status. The checksum is the sum
of all 32-bit words before it, unsigned, modulo 2^64; word i, from 1 on, times (m ^ m >> 32) | 1, m = i 0x61C88647.

**Places** are ascending and coded as by Elias (1974) and Fano (1971): with l = floor(log2(n / k)), at least 0 and at
most 16, a place takes l + 1 + n / (k 2^l) bits, about half a bit more than its information.

**Values** of 32 and 16 bits are a float32, or a float16 rounded from one, times 2^e; e, which is at least -1022, puts
the group's largest magnitude into [2^14, 2^15). An empty scale is 0.

In b <= 8 bits a value is a level j < L = 2^(b-1), and above it the sign: (a + j d)^2, with a and d in bfloat16.
From 4 bits on, a^2 is the group's smallest magnitude and the last level its largest, so that small values are told
apart better than large ones. With 2 bits the levels are the means of the magnitudes below their mean and of the others,
and with 1 bit the level is their mean. From 2 bits on, a group that has a zero has a = 0, and level 0 is for zeros
alone. It is computed in float32, rounded after each operation:

    a = sqrt(first level)                     bits beyond bfloat16 are cut off here and in d
    d = (sqrt(last level) - a) / (L - 1)      0 with 1 bit
    j = floor((sqrt(|x|) - a) / d + 1 / 2)    within 0 to L - 1, or 1 to L - 1; 0 where d is 0

Of x only the nearest float32 counts, or the largest. Means are those of floor(2^24 |x| / largest), computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dgc.compression.device import tensor_of
from dgc.compression.residual import Residual
from dgc.compression.sizes import CHECKSUM_WORDS, GROUP, Sizes, row_sections

NONFINITE = -1  # status of a row: a gradient was not finite. 1 + r: the row of contributor r was damaged
TOP = 15  # the largest value of a group of float16 is scaled to [2^(TOP - 1), 2^TOP)
EXACT = 24  # bits of a magnitude over the largest of its group, when means are computed: their sums are exact
SLICE, LONG_SLICE = 1 << 19, 1 << 25  # entries that are worked on at a time, on a CPU and elsewhere
WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}  # codes of so many bits
T = TypeVar("T")
MIXER = 0x61C88647  # 2^32 over the golden ratio, the smaller part: its multiples have no pattern


def tables_of(owner: Any, kind: Callable[..., T], *arguments: int) -> T:
    """A layout's or plan's numbers as arrays, ``kind(owner, *arguments)``, which are made once and kept with it."""
    key = (kind, *arguments)
    if key not in owner.tables:
        owner.tables[key] = kind(owner, *arguments)
    tables: T = owner.tables[key]
    return tables


class Layout:
    """How many entries of each parameter of a bucket are chosen, and in which slots they are.

    Args:
        residual: of the bucket.
        counts: k of each parameter, in the bucket's order.
        bits: b, of a value.
    """

    def __init__(self, residual: Residual, counts: Sequence[int], bits: int):
        self.names, self.counts, self.bits = residual.names, tuple(counts), bits
        self.numels, self.offsets, self.numel = residual.numels, residual.offsets, residual.numel
        self.starts = tuple(accumulate(counts, initial=0))[:-1]  # the first slot of each parameter
        self.slots = sum(counts)
        self.dtype, self.device = residual.v.dtype, residual.v.device
        self.tables: dict[Any, Any] = {}  # of tables_of

    @cached_property
    def chosen(self) -> dict[str, int]:
        """k of each parameter."""
        return dict(zip(self.names, self.counts, strict=True))

    @cached_property
    def param_of_slot(self) -> Tensor:
        """int64 (K,): the parameter that each slot belongs to."""
        repeats = tensor_of(self.counts, self.device)
        return torch.arange(len(self.counts), device=self.device).repeat_interleave(repeats, output_size=self.slots)

    @cached_property
    def base(self) -> Tensor:
        """int64 (K,): where that parameter begins in the bucket."""
        return tensor_of(self.offsets, self.device)[self.param_of_slot]

    @cached_property
    def ordinal(self) -> Tensor:
        """int64 (K,): which of its parameter's slots each one is, from 0."""
        return torch.arange(self.slots, device=self.device) - tensor_of(self.starts, self.device)[self.param_of_slot]

    def uses(self, used: Tensor) -> Tensor:
        """bool (K,): which slots are used, of so many of each parameter, int64 (P,)."""
        return self.ordinal < used[self.param_of_slot]

    @cached_property
    def rows(self) -> Rows:
        """The format of a message: one row, in which places are those in the bucket."""
        return Rows(self.slots, self.numel, self.bits, self.dtype, self.device)

    @cached_property
    def sizes(self) -> Sizes:
        """What the messages of each exchange have in bytes."""
        return Sizes(self.dtype.itemsize * self.numel, self.numel, self.slots, self.bits)


class Entries(NamedTuple):
    """What rows say."""

    status: Tensor  # int64 (R,)
    places: Tensor  # int64 (R, k): places in the interval, ascending; 0 in slots that are not used
    values: Tensor  # (R, k), in the residual's dtype; 0 in slots that are not used, and in rows that tell of errors


class Rows:
    """The format of rows of k slots.

    Args:
        slots: k.
        size: n, entries of the interval.
        bits: b, of a value: 1, 2, 4, 8, 16 or 32.
        dtype: in which values are read.
        device: of the tensors.
        all_entries: the rows have all n entries, and no places.
    """

    def __init__(self, slots: int, size: int, bits: int, dtype: torch.dtype, device: torch.device,
                 all_entries: bool = False):
        self.slots, self.size, self.bits, self.dtype, self.device = slots, size, bits, dtype, device
        self.all_entries = all_entries
        self.groups = -(-slots // GROUP)
        self.low, sections = row_sections(slots, size, bits, all_entries)
        self.ends = tuple(accumulate(sections))  # of status, scales, values, low places, high places, in bytes
        self.nbytes = self.ends[-1] + 4 * CHECKSUM_WORDS

    def encode(self, row: Tensor, places: Tensor, values: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Writes a message.

        Args:
            row: int64 (E,), each entry's row, or ``rows`` if it is not to be written. No row has more than k.
            places: int64 (E,), in the interval of its row; ascending within each row.
            values: (E,) in the residual's dtype.
            rows: R.

        Returns:
            The message, uint8 (R, nbytes), and what receivers will read, (E,) in the residual's dtype, 0 where
            nothing is written. A row with a value that is not finite has nothing but this fact.
        """
        where = self.slots_of(row, rows)
        there = torch.zeros(rows * self.slots + 1, dtype=torch.bool, device=self.device)
        valid = there.index_fill_(0, where, True)[:-1].view(rows, self.slots)
        status, codes, scales, sent = self._code(self.placed(values, where, rows), valid)
        message = self._sealed(status, scales, codes, self.placed(places, where, rows), valid)
        return message, self.taken_from(sent, where)

    def slots_of(self, row: Tensor, rows: int) -> Tensor:
        """int64 (E,): the slot, counted through all rows, of each entry; R k of one that is not written."""
        if rows == 1:
            slot = (row == 0).cumsum(0) - 1
        else:
            order = row.sort(stable=True)
            starts = torch.searchsorted(order.values, torch.arange(rows + 1, device=self.device))
            within = torch.arange(len(row), device=self.device) - starts[order.values]
            slot = torch.empty_like(row).index_copy_(0, order.indices, within)
        return torch.where(row < rows, row * self.slots + slot, rows * self.slots)

    def placed(self, values: Tensor, where: Tensor, rows: int) -> Tensor:
        """(R, k) with these values in these slots, as :meth:`slots_of` has them, and zeros in the others."""
        return values.new_zeros(rows * self.slots + 1).index_copy_(0, where, values)[:-1].view(rows, self.slots)

    def taken_from(self, slots: Tensor, where: Tensor) -> Tensor:
        """(E,): what is in these slots of (R, k); 0 for an entry that has none."""
        return torch.cat([slots.view(-1), slots.new_zeros(1)])[where]

    def encode_all(self, values: Tensor) -> Tensor:
        """Writes rows of all entries, and leaves in ``values`` what rounding drops.

        Args:
            values: (R, n) in the residual's dtype. A row with one that is not finite says so, and keeps them.

        Returns:
            The message, uint8 (R, nbytes).
        """
        status, codes, scales, sent = self._code(values, torch.ones_like(values, dtype=torch.bool))
        values -= sent
        return self._sealed(status, scales, codes, None, None)

    def status_message(self, rows: int, status: Tensor | int) -> Tensor:
        """A message without entries, of one status, uint8 (R, nbytes)."""
        message = torch.zeros(rows, self.nbytes, dtype=torch.uint8, device=self.device)
        message[:, :4].view(torch.int32)[:] = status
        return seal(message)

    def decode(self, message: Tensor, sizes: Tensor | None = None) -> Entries:
        """Reads a message, uint8 (R, nbytes), of one row from each contributor. A damaged row has the status 1 + r, and
        nothing else in it.

        Args:
            sizes: int64 (R,) or (1,): entries of the interval that each row is about; None: n.
        """
        self.check_size(message)
        rows = len(message)
        parts = [message[:, a:b] for a, b in zip((0, *self.ends), self.ends, strict=False)]
        status = parts[0].view(torch.int32)[:, 0].to(torch.int64)
        slot = torch.arange(self.slots, device=self.device).expand(rows, -1)
        bad = (checksums(message) != message.view(torch.int32)[:, -CHECKSUM_WORDS:]).any(1)
        bad |= (status < NONFINITE) | (status > rows)
        if self.all_entries:
            places, used = slot, slot.new_full((rows, 1), self.slots)
        else:
            places, used = self._places(parts[3], parts[4])
            bad |= (status == 0) & (used > self.slots)[:, 0]
        valid = slot < used
        limit = self.size if sizes is None else sizes[:, None]
        bad |= (status == 0) & (valid & (places >= limit)).any(1)
        scales = parts[1].view(torch.int16)[:, :self.groups * self._numbers].view(rows, self.groups, self._numbers)
        values = self._values(unpack(parts[2], self.slots, self.bits), scales)
        in_use = valid[:, ::GROUP, None]
        wrong = (valid & values.isnan()).any(1)
        if self.bits <= 8:
            numbers = (scales.to(torch.int32) << 16).view(torch.float32)
            wrong |= (in_use & ~((numbers >= 0) & (numbers < torch.inf))).flatten(1).any(1)
        bad |= (status == 0) & wrong
        status = torch.where(bad, 1 + torch.arange(rows, device=self.device), status)
        valid = valid & (status == 0)[:, None]
        return Entries(status, torch.where(valid, places, 0), torch.where(valid, values, 0))

    def check_size(self, message: Tensor) -> None:
        """Raises a ValueError where rows of a message have another size."""
        if message.shape[1] != self.nbytes:
            raise ValueError(f"a message must have {self.nbytes} bytes a row, got {message.shape[1]} (give all ranks "
                             "the same model, Config and schedule)")

    @property
    def _numbers(self) -> int:
        """How many numbers a group's scale has."""
        return 1 if self.bits > 8 else 2

    def _sealed(self, status: Tensor, scales: Tensor, codes: Tensor, places: Tensor | None,
                valid: Tensor | None) -> Tensor:
        """A message of these sections. Rows with a status are otherwise empty."""
        rows = len(status)
        message = torch.zeros(rows, self.nbytes, dtype=torch.uint8, device=self.device)
        message[:, :4].view(torch.int32)[:] = status[:, None]
        a, b, c, d, e = self.ends
        numbers = self.groups * self._numbers
        message[:, a:a + 2 * numbers].view(torch.int16)[:] = scales.view(rows, numbers)
        message[:, b:c] = pack(codes, self.bits, c - b)
        if places is not None and valid is not None:
            valid = valid & (status == 0)[:, None]
            message[:, c:d] = pack(torch.where(valid, places & (1 << self.low) - 1, 0), self.low, d - c)
            at = (places >> self.low) + torch.arange(self.slots, device=self.device)
            bits = torch.zeros(rows, 8 * (e - d) + 1, dtype=torch.uint8, device=self.device)
            bits.scatter_(1, torch.where(valid, at, 8 * (e - d)), 1)
            message[:, d:e] = pack(bits[:, :-1], 1, e - d)
        return seal(message)

    def _places(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The places in rows, int64 (R, k), and how many of them are used, int64 (R, 1)."""
        bits = unpack(high, 8 * high.shape[1], 1)
        rank = bits.cumsum(1)
        at = torch.arange(bits.shape[1], device=self.device) - rank + 1  # h, where the bit is set
        slot = torch.where((bits == 1) & (rank <= self.slots), rank - 1, self.slots)
        places = bits.new_zeros(len(bits), self.slots + 1).scatter_(1, slot, at)[:, :-1]
        return (places << self.low) | unpack(low, self.slots, self.low), rank[:, -1:]

    def _code(self, values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The status of rows, int64 (R,); the codes of values, int64 (R, k); the scales, int16 (R, G, 1 or 2); and what
        receivers will read, (R, k).
        """
        size = torch.where(valid, values, 0).abs()
        fine = size.isfinite().all(1)
        valid = valid & fine[:, None]
        if self.bits > 8:
            largest = self._grouped(torch.where(valid, size, 0)).amax(-1)
            exponent = (torch.frexp(largest).exponent - TOP).clamp_(min=-1022)
            scales = torch.where(largest > 0, exponent, 0).to(torch.int16).unsqueeze(-1)
            scaled = torch.where(valid, values, 0).double() * self._spread(power_of_two(-scales))
            words = scaled.to(torch.float32 if self.bits == 32 else torch.float16)
            codes = words.view(WORDS[self.bits]).to(torch.int64) & (1 << self.bits) - 1
        else:
            scales, level = self._levels(size, valid)
            codes = torch.where(valid, level | (values < 0).to(torch.int64) << self.bits - 1, 0)
        sent = torch.where(valid, self._values(codes, scales), 0)
        return torch.where(fine, 0, NONFINITE), codes, torch.where(fine[:, None, None], scales, 0), sent

    def _levels(self, size: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """The scales of groups, int16 (R, G, 2), and each magnitude's level, int64 (R, k)."""
        levels = 1 << self.bits - 1
        size = size.to(torch.float32).clamp(max=torch.finfo(torch.float32).max)
        groups, there = self._grouped(size), self._grouped(valid)
        largest = torch.where(there, groups, 0).amax(-1)
        least = torch.where(there, groups, torch.inf).amin(-1)
        if levels > 2:
            first, last = torch.where(there.any(-1), least, 0), largest
        else:
            first, last = _means(groups, there, largest, levels)
        first = torch.where((least == 0) & (levels > 1), 0, first)
        a = _truncated(_root(first))
        steps = a.new_full((), max(1, levels - 1))  # by a number of the host, torch multiplies on GPUs
        d = _truncated((_root(last) - a).clamp_(min=0) / steps) if levels > 1 else torch.zeros_like(a)
        distance = (_root(size) - self._spread(a)) / self._spread(torch.where(d > 0, d, torch.inf))
        level = (distance + 0.5).floor_().clamp_(0, levels - 1)
        nearly_zero = (size > 0) & self._spread(a == 0) & self._spread(d > 0)
        level = torch.where(nearly_zero & (level == 0), 1, level)
        return torch.stack([_half_of(a), _half_of(d)], -1), level.to(torch.int64)

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """What codes, int64 (R, k), say, in the residual's dtype."""
        if self.bits > 8:
            real = torch.float32 if self.bits == 32 else torch.float16
            words = codes.to(WORDS[self.bits]).view(real).double()
            most = torch.finfo(self.dtype).max
            values = (words * self._spread(power_of_two(scales))).clamp_(-most, most).to(self.dtype)
            return torch.where(words.isfinite(), values, torch.nan)
        a, d = ((number.to(torch.int32) << 16).view(torch.float32) for number in scales.unbind(-1))
        level = codes & (1 << self.bits - 1) - 1
        root = self._spread(a) + level.to(torch.float32) * self._spread(d)
        negative = (codes >> self.bits - 1) & 1
        size = (root * root).clamp_(max=torch.finfo(torch.float32).max)
        return torch.where(negative == 1, -size, size).to(self.dtype)

    def _grouped(self, values: Tensor) -> Tensor:
        """(R, k) as groups, (R, G, 512), the last one filled up with zeros."""
        short = self.groups * GROUP - self.slots
        return torch.nn.functional.pad(values, (0, short)).view(len(values), self.groups, GROUP)

    def _spread(self, of_group: Tensor) -> Tensor:
        """(R, G) or (R, G, 1), a number of each group, as that of each slot: (R, k)."""
        flat = of_group.reshape(len(of_group), self.groups, 1)
        return flat.expand(-1, -1, GROUP).reshape(len(flat), -1)[:, :self.slots]


def _means(groups: Tensor, there: Tensor, largest: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The mean magnitude of a group, twice; or with two levels those of what is below it and of what is not."""
    unit = torch.where(largest > 0, largest, 1).unsqueeze(-1)
    whole = torch.where(there, (groups / unit * (1 << EXACT)).floor(), 0).to(torch.int64)  # their sums are exact
    total, count = whole.sum(-1), there.sum(-1)
    above = there & (whole * count.unsqueeze(-1) >= total.unsqueeze(-1))
    if levels == 1:
        above = there
    upper, number = torch.where(above, whole, 0).sum(-1), above.sum(-1)
    last = _mean(upper, number, largest)
    first = torch.where(count > number, _mean(total - upper, count - number, largest), last)
    return first, last


def _mean(total: Tensor, count: Tensor, largest: Tensor) -> Tensor:
    """float32, of so many whole numbers, as :func:`_means` has them."""
    return (total.double() / count.clamp(min=1) / (1 << EXACT) * largest.double()).to(torch.float32)


def _root(x: Tensor) -> Tensor:
    """The nearest float32, which ``sqrt`` of float32 is not on every device, and with every library."""
    return x.double().sqrt().to(torch.float32)


def _truncated(x: Tensor) -> Tensor:
    """float32, with the fraction of a bfloat16, rounded towards 0."""
    return (x.view(torch.int32) & -65536).view(torch.float32)


def _half_of(x: Tensor) -> Tensor:
    """int16: the bits of such a bfloat16."""
    return (x.contiguous().view(torch.int32) >> 16).to(torch.int16)


def pack(codes: Tensor, width: int, nbytes: int) -> Tensor:
    """Whole numbers below 2^width, (R, k), as bits one after the other: uint8 (R, nbytes)."""
    if width in WORDS:
        packed = codes.to(WORDS[width]).view(torch.uint8)
    else:
        places = torch.arange(width, device=codes.device)
        bits = (codes.to(torch.int32).unsqueeze(-1) >> places & 1).to(torch.uint8).flatten(1)
        bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8)).view(len(codes), -1, 8)
        packed = (bits << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)
    return torch.nn.functional.pad(packed, (0, nbytes - packed.shape[1]))


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """The first so many numbers of :func:`pack`: int64 (R, count)."""
    rows = len(packed)
    if width in WORDS:
        return packed.contiguous().view(WORDS[width])[:, :count].to(torch.int64) & (1 << width) - 1
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    bits = bits.view(rows, -1)[:, :count * width].view(rows, count, width)
    return (bits.to(torch.int64) << torch.arange(width, device=packed.device)).sum(-1)


def worst(status: Tensor) -> Tensor:
    """int64 (): what rows of these statuses, int64 (R,), tell of together."""
    return torch.where((status == NONFINITE).any(), NONFINITE, status.max())


def seal(message: Tensor) -> Tensor:
    """Writes the checksum into each row of a message, (..., nbytes), and returns it."""
    message.view(torch.int32)[..., -CHECKSUM_WORDS:] = checksums(message)
    return message


def sender_name(sender: int, node_size: int = 1) -> str:
    """The name of a contributor in errors: a rank, or the ranks of a node."""
    first = sender * node_size
    return f"rank {sender}" if node_size == 1 else f"ranks {first} to {first + node_size - 1}"


def not_finite(sender: str, names: Iterable[str]) -> FloatingPointError:
    """The error about a gradient of a sender, as :func:`sender_name` calls it."""
    verb = "have" if sender.startswith("ranks") else "has"
    error = FloatingPointError(f"{sender} {verb} a gradient that is not finite, in: {', '.join(names)}")
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note("(a warm-up of the sparsity, a lower learning rate or Config(clip_norm=...) may keep it finite; "
                       "Config(nonfinite='skip') leaves such steps out)")
    return error


def corrupt(sender: str, bucket: str) -> ValueError:
    """The error about a message of a sender, as :func:`sender_name` calls it."""
    return ValueError(f"the message of {sender} for {bucket} is corrupt: it is not what a rank with the same "
                      "model, Config and schedule has written")


def checksums(messages: Tensor) -> Tensor:
    """int32 (..., 2), of messages uint8 (..., nbytes): the sum of all 32-bit words before it, each times an odd number
    of its place's, modulo 2^64.

    Damage has patterns, say one bit every 4,096 bytes. These numbers have none, so such changes do not add up to 0.
    """
    words = messages.view(torch.int32)[..., :-CHECKSUM_WORDS]
    total = words.new_zeros((*words.shape[:-1], 1), dtype=torch.int64)
    for first, last in slices(words.shape[-1], words):
        mixed = torch.arange(first + 1, last + 1, device=messages.device).mul_(MIXER)
        part = words[..., first:last].to(torch.int64).bitwise_and_(0xFFFFFFFF)
        total += part.mul_((mixed ^ mixed >> 32).bitwise_or_(1)).sum(-1, keepdim=True)
    return total.view(torch.int32)


def slices(length: int, like: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges that cover ``length`` places of the last dimension of a tensor, to be worked on one after the other, so
    that intermediate results stay in a CPU's cache, and leave a GPU's memory for others.
    """
    rows = max(1, like.numel() // max(1, like.shape[-1]))
    step = max(1, (SLICE if like.device.type == "cpu" else LONG_SLICE) // rows)
    return ((first, min(first + step, length)) for first in range(0, length, step))


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, from its bits: ``exp2`` may be off by a rounding, and ranks must agree."""
    biased = exponent.to(torch.int64).clamp(-1022, 1023) + 1023
    return (biased << 52).view(torch.float64)
