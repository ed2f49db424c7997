"""The loops of the exchange that adds up at owners, fused and compiled for CUDA with Triton.

Nothing here waits for the device, and no result depends on the order in which programs run: an entry that several
workers send is added to in the order of their rows. Sorting and the choice of the largest scores are torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgc.compression import sizes as message_sizes
from dgc.compression import wire
from dgc.compression.device import tensor_of, to_device
from dgc.compression.kernels import cuda, owners_plain
from dgc.compression.kernels.cuda import (
    BLOCK,
    ENTRIES,
    MIXER,
    NONFINITE,
    OFFSET,
    PARAMETER,
    SLOTS,
    TILE,
    WORDS,
    K,
    _block,
    _code,
    _divided,
    _exponent,
    _magnitude,
    _power_of_two,
    _slots,
    _values,
    _weight,
)
from dgc.compression.regions import Arrived, Plan, Rows, Taken
from dgc.compression.residual import Bucket, Gradient

LINE = tl.constexpr(message_sizes.LINE)  # neighbours that one owner adds up
CORRUPT = tl.constexpr(wire.CORRUPT)
NOWHERE = tl.constexpr(2**31 - 1)  # of a slot that is not used: beyond every region
PIECE_TILES = BLOCK.value // TILE.value  # of a piece of a region, at most


# -- who adds up what --------------------------------------------------------------------------------------------------

@triton.jit
def _turn(rounds, n):
    """See ``dgc.compression.regions.Regions``, as for the next two."""
    return (((rounds.to(tl.int64) * MIXER) & 0xFFFFFFFF) >> 12) % n


@triton.jit
def _owner(i, n):
    block = i // LINE
    return (block + _turn(block // n, n)) % n


@triton.jit
def _index(owner, local, n):
    rounds = local // LINE
    return (rounds * n + (owner + n - _turn(rounds, n)) % n) * LINE + local % LINE


# -- to owners ---------------------------------------------------------------------------------------------------------

@triton.jit(do_not_specialize=["n", "own"])
def _deal(v, parameters, chunks, used, index, refused, row, places, sizes, numbers, wanted, n, own):
    """One program a chunk of slots: each entry's owner, n where it is not sent; the sum of |v| of those that are."""
    c = tl.program_id(0)
    _, here, begin, slot, valid, position = _slots(parameters, chunks, used, index)
    owner = _owner(position, n)
    goes = valid & (owner != own) & (tl.load(refused) == 0)
    size = tl.abs(tl.load(v + position, mask=goes, other=0))
    inside = begin + tl.arange(0, SLOTS) < tl.load(here + K)
    tl.store(row + slot, tl.where(goes, owner, n).to(tl.int32), mask=inside)
    tl.store(places + slot, tl.where(goes, position, 0), mask=inside)
    tl.store(sizes + c, tl.sum(size.to(tl.float64)))
    tl.store(numbers + c, tl.sum((size > 0).to(tl.int64)))
    tl.atomic_add(wanted, tl.sum(goes.to(tl.int64)), sem="relaxed")


@triton.jit(do_not_specialize=["n"])
def _order(v, parameters, chunks, used, index, row, sizes, numbers, keys, tiny, n):
    """One program a chunk of slots: keys by which the entries of a row come after one another, the larger ones first,
    beside the mean of those chosen of their parameter.
    """
    c = tl.program_id(0)
    _, here, begin, slot, valid, position = _slots(parameters, chunks, used, index)
    first = c - begin // SLOTS
    last = first + (tl.load(here + K) + SLOTS - 1) // SLOTS
    total, number = tl.full([], 0, tl.float64), tl.full([], 0, tl.int64)
    for z in range(first, last, 64):
        i = z + tl.arange(0, 64)
        total += tl.sum(tl.load(sizes + i, mask=i < last, other=0))
        number += tl.sum(tl.load(numbers + i, mask=i < last, other=0))
    inside = begin + tl.arange(0, SLOTS) < tl.load(here + K)
    to = tl.load(row + slot, mask=inside, other=0)
    size = tl.abs(tl.load(v + position, mask=valid & (to < n), other=0))
    mean = (total / tl.maximum(number, 1).to(tl.float64)).to(size.dtype)
    mean = tl.where(mean < tl.load(tiny), tl.load(tiny), mean)
    smallness = _divided(tl.zeros_like(size) + 1, 1 + _divided(size, tl.zeros_like(size) + mean))
    smallness = tl.where(smallness >= 0, smallness, 0)  # infinity among infinities is large
    tl.store(keys + slot, to.to(tl.float64) + 0.5 * smallness.to(tl.float64), mask=inside)


@triton.jit(do_not_specialize=["n", "slots", "count"])
def _fit(order, firsts, row, kept, n, slots, count):
    """Leaves out those for which their row has no slot."""
    j = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    e = tl.load(order + j, mask=j < count, other=0)
    to = tl.load(row + e, mask=j < count, other=0)
    place = j - tl.load(firsts + to, mask=j < count, other=0)
    tl.store(kept + e, tl.where(place < slots, to, n), mask=j < count)


# -- take and write down -----------------------------------------------------------------------------------------------

@triton.jit
def _dealt(order, row, firsts, index, rows, count):
    """Some entries in the order of rows: which, whether they are written, their rows, slots and positions."""
    j = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    to = tl.load(row + j, mask=j < count, other=rows)
    valid = to < rows
    e = tl.load(order + j, mask=valid, other=0)
    return e, valid, to, j - tl.load(firsts + to, mask=valid, other=0), tl.load(index + e, mask=valid, other=0)


@triton.jit(do_not_specialize=["rows", "count"])
def _largest(v, order, row, firsts, index, largest, rows, count):
    """The largest magnitude of each row's entries."""
    _, valid, to, _, position = _dealt(order, row, firsts, index, rows, count)
    x = tl.load(v + position, mask=valid, other=0)
    bits = tl.where(valid, _magnitude(x), 0).to(tl.int64)
    if tl.min(to) == tl.max(to):
        if tl.max(to) < rows:
            tl.atomic_max(largest + tl.max(to), tl.max(bits, 0), sem="relaxed")
    else:
        tl.atomic_max(largest + to, bits, mask=valid, sem="relaxed")


@triton.jit(do_not_specialize=["rows", "count", "n", "values_at", "positions_at", "words"])
def _write(u, v, order, row, firsts, index, largest, message16, message32, digests, taken, sent_entries, rows, count, n,
           values_at, positions_at, words, MASKING: tl.constexpr, WIRE: tl.constexpr):
    """Takes entries out of v and writes them down, and what receivers will read to ``taken``. A row with one that is
    not finite has nothing but this fact.
    """
    e, valid, to, slot, position = _dealt(order, row, firsts, index, rows, count)
    bits = tl.load(largest + to, mask=valid, other=0)
    exponent = _exponent(bits, v)
    valid = valid & (exponent != NONFINITE)
    power = tl.where(exponent == NONFINITE, 0, exponent)
    x = tl.load(v + position, mask=valid, other=0)
    code, value = _code((x.to(tl.float64) * _power_of_two(-power)).to(tl.float32), WIRE)
    sent = tl.where(valid, (value * _power_of_two(power)).to(x.dtype), 0)
    tl.store(v + position, x - sent, mask=valid)
    if MASKING:
        tl.store(u + position, tl.zeros_like(sent), mask=valid & (sent != 0))
    tl.store(taken + e, sent, mask=valid)
    tl.atomic_add(sent_entries, tl.sum((sent != 0).to(tl.int64)), sem="relaxed")

    start = to.to(tl.int64) * (words + 2)
    local = position // (LINE * n) * LINE + position % LINE
    stretch = local // BLOCK
    tl.atomic_add(message32 + start + stretch, valid.to(tl.int32), mask=valid, sem="relaxed")
    digest = _weight(stretch)
    if tl.float32 == WIRE:
        half = values_at + 2 * slot
        tl.store(message32 + start + half // 2, code.to(tl.int32), mask=valid)
        digest += (code & 0xFFFFFFFF) * _weight(half // 2)
    else:
        half = values_at + slot
        tl.store(message16 + 2 * start + half, code.to(tl.int16), mask=valid)
        digest += ((code & 0xFFFF) << (16 * (half % 2))) * _weight(half // 2)
    half, within = positions_at + slot, local % BLOCK
    tl.store(message16 + 2 * start + half, within.to(tl.int16), mask=valid)
    digest += (within << (16 * (half % 2))) * _weight(half // 2)
    digest = tl.where(valid, digest, 0)
    if tl.min(to) == tl.max(to):
        if tl.max(to) < rows:
            tl.atomic_add(digests + tl.max(to), tl.sum(digest), sem="relaxed")
    else:
        tl.atomic_add(digests + to, digest, mask=valid, sem="relaxed")


@triton.jit(do_not_specialize=["exponent_at", "words"])
def _close(v, largest, digests, wrong, told, whose, message16, message32, exponent_at, words):
    """One program a row: its exponent and checksum; or, where something is wrong, that alone, and with whose row."""
    r = tl.program_id(0)
    message16 += r.to(tl.int64) * (2 * words + 4)
    message32 += r.to(tl.int64) * (words + 2)
    exponent, digest = _exponent(tl.load(largest + r), v).to(tl.int64), tl.load(digests + r)
    if tl.load(wrong) != 0:
        exponent = tl.load(told).to(tl.int64)
        first = tl.load(whose).to(tl.int64)
        tl.store(message32, first.to(tl.int32))
        digest = first * _weight(0 * r)
    tl.store(message16 + exponent_at, exponent.to(tl.int16))
    digest += ((exponent & 0xFFFF) << (16 * (exponent_at % 2))) * _weight(exponent_at // 2)
    tl.store(message32 + words, digest.to(tl.int32))
    tl.store(message32 + words + 1, (digest >> 32).to(tl.int32))


# -- what rows say -----------------------------------------------------------------------------------------------------

@triton.jit(do_not_specialize=["each", "largest", "slots", "stretches", "values_at", "positions_at", "exponent_at",
                               "words"])
def _check(message16, message32, sizes, starts, damaged, each, largest, slots, stretches, values_at, positions_at,
           exponent_at, words, WIRE: tl.constexpr):
    """One program for each stretch and row, and one more for each row: looks for what nobody writes, and notes the slot
    at which the stretch begins. Reads nothing outside the row, whatever it says.
    """
    c, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    message16 += r * (2 * words + 4)
    message32 += r * (words + 2)
    if c == stretches:
        total = tl.full([], 0, tl.int64)
        for z in range(0, words, WORDS):
            i = z + tl.arange(0, WORDS)
            word = tl.load(message32 + i, mask=i < words, other=0).to(tl.int64) & 0xFFFFFFFF
            total += tl.sum(word * _weight(i))
        low, high = tl.load(message32 + words).to(tl.int64), tl.load(message32 + words + 1).to(tl.int64)
        if total != (high << 32 | low & 0xFFFFFFFF):
            tl.store(damaged + r, 1)
        return
    if tl.load(message16 + exponent_at) >= CORRUPT:  # what it tells is in its first count
        return
    n, before = tl.load(message32 + c).to(tl.int64), tl.full([], 0, tl.int64)
    for z in range(0, c, 1024):
        i = z + tl.arange(0, 1024)
        before += tl.sum(tl.load(message32 + i, mask=i < c, other=0).to(tl.int64))
    begin = c.to(tl.int64) * BLOCK
    sound = (n >= 0) & (n <= tl.minimum(largest - begin, BLOCK)) & (before >= 0) & (before + n <= slots)
    size, wrong = tl.load(sizes + r * each), tl.full([], 0, tl.int32)
    for z in range(0, tl.where(sound, n, 0), ENTRIES):
        i = z + tl.arange(0, ENTRIES)
        at = tl.load(message16 + positions_at + before + i, mask=i < n, other=0).to(tl.int32) & (BLOCK - 1)
        last = tl.load(message16 + positions_at + before + i - 1, mask=(i > 0) & (i < n), other=0)
        last = tl.where(i > 0, last.to(tl.int32) & (BLOCK - 1), -1)
        value = _values(message16, message32, before + i, i < n, values_at, 1.0, tl.float32, WIRE)
        fine = (begin + at < size) & (at > last) & (tl.abs(value) < float("inf"))
        wrong += tl.sum(((i < n) & (fine == 0)).to(tl.int32))
    if (sound & (wrong == 0)) == 0:
        tl.store(damaged + r, 1)
    tl.store(starts + r * stretches + c, before)


@triton.jit(do_not_specialize=["rows", "exponent_at", "words"])
def _conclude(message16, message32, damaged, status, whose, rows, exponent_at, words):
    """Each row's status, and whose row is damaged where it says that one is."""
    r = (tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)).to(tl.int64)
    bad = tl.load(damaged + r, mask=r < rows, other=0) != 0
    exponent = tl.load(message16 + r * (2 * words + 4) + exponent_at, mask=r < rows, other=0).to(tl.int64)
    first = tl.load(message32 + r * (words + 2), mask=r < rows, other=0).to(tl.int64)
    tl.store(status + r, tl.where(bad, CORRUPT, exponent), mask=r < rows)
    tl.store(whose + r, tl.where(bad, r, first), mask=r < rows)


@triton.jit
def _said(message16, message32, starts, status, stretches, words):
    """One stretch of one row: that row, how many entries it has there, at which slot they begin, and its exponent."""
    c, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    told = tl.load(status + r)
    n = tl.where(told < CORRUPT, tl.load(message32 + r * (words + 2) + c), 0)
    start = tl.load(starts + r * stretches + c, mask=told < CORRUPT, other=0)
    return r, message16 + r * (2 * words + 4), message32 + r * (words + 2), c.to(tl.int64) * BLOCK, n, start, told


@triton.jit(do_not_specialize=["own", "n", "slots", "stretches", "values_at", "positions_at", "words"])
def _read(message16, message32, starts, status, wrong, keys, places, values, own, n, slots, stretches, values_at,
          positions_at, words, WIRE: tl.constexpr):
    """Where in the own region rows have entries, where that is in the bucket, and what they say. Nothing of any row if
    one of them tells of an error.
    """
    r, message16, message32, begin, number, start, exponent = _said(
        message16, message32, starts, status, stretches, words)
    if tl.load(wrong) != 0:
        return
    for z in range(0, number, ENTRIES):
        i = z + tl.arange(0, ENTRIES)
        slot, mask = start + i, i < number
        at = tl.load(message16 + positions_at + slot, mask=mask, other=0).to(tl.int32) & (BLOCK - 1)
        value = _values(message16, message32, slot, mask, values_at, _power_of_two(exponent), values.dtype.element_ty,
                        WIRE)
        tl.store(keys + r * slots + slot, (begin + at).to(tl.int32), mask=mask)
        tl.store(places + r * slots + slot, _index(own, begin + at, n), mask=mask)
        tl.store(values + r * slots + slot, value, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _add(v, keys, order, places, values, count):
    """Adds to v. ``keys`` are in order; of those alike, the first one's thread adds all, in the order of rows."""
    j = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    key = tl.load(keys + j, mask=j < count, other=NOWHERE)
    first = (key != NOWHERE) & (key != tl.load(keys + j - 1, mask=(j > 0) & (j < count), other=-1))
    place = tl.load(places + tl.load(order + j, mask=first, other=0), mask=first, other=0)
    x, more = tl.load(v + place, mask=first, other=0), first
    while tl.max(more.to(tl.int32), 0) > 0:
        x = tl.where(more, x + tl.load(values + tl.load(order + j, mask=more, other=0), mask=more, other=0), x)
        j += 1
        more = more & (tl.load(keys + j, mask=more & (j < count), other=-1) == key)
    tl.store(v + place, x, mask=first)


# -- the largest sums --------------------------------------------------------------------------------------------------

@triton.jit(do_not_specialize=["own", "n"])
def _sum(v, pieces, sums, own, n):
    """One program a piece of the own region: the sum of |v|."""
    q = tl.program_id(0)
    first, end = tl.load(pieces + 3 * q), tl.load(pieces + 3 * q + 1)
    total = tl.full([], 0, tl.float64)
    for z in range(first, end, TILE):
        i = z + tl.arange(0, TILE)
        total += tl.sum(tl.abs(tl.load(v + _index(own, i, n), mask=i < end, other=0)).to(tl.float64))
    tl.store(sums + q, total)


@triton.jit
def _average(pieces_of, lengths, absent, sums, tiny, means):
    """One program a parameter: the mean |v| of its entries in the own region; infinity where it is absent."""
    p, total = tl.program_id(0), tl.full([], 0, tl.float64)
    first, last = tl.load(pieces_of + p), tl.load(pieces_of + p + 1)
    for z in range(first, last, 64):
        i = z + tl.arange(0, 64)
        total += tl.sum(tl.load(sums + i, mask=i < last, other=0))
    mean = (total / tl.maximum(tl.load(lengths + p), 1).to(tl.float64)).to(means.dtype.element_ty)
    mean = tl.where(mean < tl.load(tiny), tl.load(tiny), mean)
    tl.store(means + p, tl.where(tl.load(absent + p) != 0, float("inf"), mean))


@triton.jit(do_not_specialize=["own", "n"])
def _score(v, pieces, means, scores, own, n):
    """|v| of the own region over the parameter's mean; infinity over infinity is to be passed on, and told."""
    q = tl.program_id(0)
    first, end = tl.load(pieces + 3 * q), tl.load(pieces + 3 * q + 1)
    i = first + tl.program_id(1) * TILE + tl.arange(0, TILE)
    if first + tl.program_id(1) * TILE < end:
        size = tl.abs(tl.load(v + _index(own, i, n), mask=i < end, other=0))
        score = _divided(size, tl.zeros_like(size) + tl.load(means + tl.load(pieces + 3 * q + 2)))
        tl.store(scores + i, tl.where(score == score, score, float("inf")), mask=i < end)


# -- the update --------------------------------------------------------------------------------------------------------

@triton.jit
def _clear(parameters, blocks, table, like):
    """One program a block of a parameter: zeros, where there is a target."""
    p, _, _, begin, size = _block(parameters, blocks, tl.program_id(0))
    address = tl.load(table + p)
    if address != 0:
        target = address.to(like.dtype) + begin
        for z in range(0, size, TILE):
            i = z + tl.arange(0, TILE)
            tl.store(target + i, tl.zeros([TILE], like.dtype.element_ty), mask=i < size)


@triton.jit(do_not_specialize=["n", "count", "halvings", "stretches", "values_at", "positions_at",
                               "words"])
def _spread(message16, message32, starts, status, parameters, table, like, n, count, halvings, stretches, values_at,
            positions_at, words, ADD: tl.constexpr, WIRE: tl.constexpr):
    """What rows say, over the divisor, to each parameter's target; where ADD, its product with the parameter's rate is
    added.
    """
    r, message16, message32, begin, number, start, exponent = _said(
        message16, message32, starts, status, stretches, words)
    dtype: tl.constexpr = like.dtype.element_ty
    divisor = tl.load(table + 2 * count).to(tl.float64, bitcast=True).to(dtype)
    for z in range(0, number, ENTRIES):
        i = z + tl.arange(0, ENTRIES)
        slot, mask = start + i, i < number
        at = tl.load(message16 + positions_at + slot, mask=mask, other=0).to(tl.int32) & (BLOCK - 1)
        x = _values(message16, message32, slot, mask, values_at, _power_of_two(exponent), dtype, WIRE)
        x = _divided(x, tl.zeros_like(x) + divisor)
        place = _index(r, begin + at, n)
        p, beyond = tl.zeros([ENTRIES], tl.int32), tl.zeros([ENTRIES], tl.int32) + count  # of whom the last begins here
        for _ in range(0, halvings):
            middle = (p + beyond) // 2
            here = tl.load(parameters + middle * PARAMETER + OFFSET, mask=beyond - p > 1, other=0) <= place
            p, beyond = (tl.where((beyond - p > 1) & here, middle, p),
                         tl.where((beyond - p > 1) & (here == 0), middle, beyond))
        address = tl.load(table + p, mask=mask, other=0)
        fresh = mask & (address != 0) & (x != 0)
        target = address.to(like.dtype) + (place - tl.load(parameters + p * PARAMETER + OFFSET, mask=mask, other=0))
        if ADD:
            rate = tl.load(table + count + p, mask=mask, other=0).to(tl.float64, bitcast=True).to(dtype)
            x = tl.load(target, mask=fresh, other=0) + rate * x
        tl.store(target, x, mask=fresh)


# -- the doors ---------------------------------------------------------------------------------------------------------

class _Tables:
    """A plan's numbers, on its device."""

    def __init__(self, plan: Plan):
        device, n = plan.layout.device, plan.regions.owners
        pieces = plan.pieces.T
        counts = torch.bincount(pieces[:, 2], minlength=len(plan.layout.numels))
        self.length, self.pieces_count = sum(plan.spans), len(pieces)
        self.pieces, self.pieces_of = (to_device(numbers.contiguous(), device) for numbers in (
            pieces, torch.nn.functional.pad(counts.cumsum(0), (1, 0))))
        self.numbers = torch.arange(n + 1, device=device)
        self.nothing = torch.zeros((), dtype=torch.int64, device=device)
        self.tiny = torch.full((), torch.finfo(plan.layout.residual).tiny, dtype=plan.layout.residual, device=device)


_tables: WeakKeyDictionary[Plan, _Tables] = WeakKeyDictionary()


def _table(plan: Plan) -> _Tables:
    table = _tables.get(plan)
    if table is None:
        table = _tables[plan] = _Tables(plan)
    return table


def _places(form: Rows) -> tuple[int, int, int, int]:
    """The places where the sections of a row begin, in units of 16 bits, and the checksum, in words."""
    values, positions, exponent = form.ends
    return values // 2, positions // 2, exponent // 2, form.nbytes // 4 - 2


def select(bucket: Bucket, gradients: Mapping[str, Gradient], scale: Tensor | Mapping[str, Tensor] | None, plan: Plan,
           step: int) -> tuple[list[str], Tensor, Tensor]:
    """As :func:`owners_plain.select`."""
    return owners_plain.select(bucket, gradients, scale, plan, step)


def send(bucket: Bucket, plan: Plan, index: Tensor, used: Tensor, refused: Tensor, masking: bool) -> tuple[
        Tensor, Taken]:
    """As :func:`owners_plain.send`."""
    table, own, n, count = cuda._table(plan.layout), _table(plan), plan.regions.owners, len(index)
    v, new = bucket.v, bucket.v.new_empty
    wrong, wanted = refused.to(torch.int32), torch.zeros((), dtype=torch.int64, device=v.device)
    row, places, keys = (torch.full((count,), of, dtype=dtype, device=v.device)
                         for of, dtype in ((n, torch.int32), (0, torch.int64), (n + 1, torch.float64)))
    chunks = new(table.chunks_count, dtype=torch.float64), new(table.chunks_count, dtype=torch.int64)
    with torch.cuda.device_of(v):
        grid = table.chunks_count,
        _deal[grid](v, table.parameters, table.chunks, used, index, wrong, row, places, *chunks, wanted, n, plan.own)
        _order[grid](v, table.parameters, table.chunks, used, index, row, *chunks, keys, own.tiny, n,
                     enable_fp_fusion=False)
        keys, order = keys.sort(stable=True)
        kept = torch.full_like(row, n)
        _fit[triton.cdiv(count, SLOTS.value),](
            order, torch.searchsorted(keys, own.numbers.to(torch.float64)), row, kept, n, plan.to_owners.slots, count)
        rows, taken = _written(bucket, plan, plan.to_owners, n, kept, places, wrong, own.nothing + NONFINITE.value,
                               own.nothing, masking)
    bucket.overflow_entries = wanted - bucket.entries_sent
    return rows, taken


def _written(bucket: Bucket, plan: Plan, form: Rows, rows: int, row: Tensor, index: Tensor, wrong: Tensor, told: Tensor,
             whose: Tensor, masking: bool) -> tuple[Tensor, Taken]:
    """Entries as a message, and what was taken out of v for it.

    Args:
        rows: R.
        row: int32 (E,), each entry's, or R.
        index: int64 (E,), where they are in the bucket, ascending within each row.
        wrong: int32 (), whether something is; and ``told`` and ``whose``, int64 (), to be written down then.
    """
    u, v, count = bucket.v if bucket.u is None else bucket.u, bucket.v, len(index)
    row, order = row.sort(stable=True)
    firsts = torch.searchsorted(row, _table(plan).numbers[:rows + 1].to(torch.int32))
    message = torch.zeros(rows, form.nbytes, dtype=torch.uint8, device=v.device)
    parts = message.view(torch.int16), message.view(torch.int32)
    largest, digests = torch.zeros(2, rows, dtype=torch.int64, device=v.device)
    taken, entries = v.new_zeros(count), torch.zeros((), dtype=torch.int64, device=v.device)
    values, positions, exponent, words = _places(form)
    grid = triton.cdiv(count, SLOTS.value),
    _largest[grid](v, order, row, firsts, index, largest, rows, count)
    _write[grid](u, v, order, row, firsts, index, largest, *parts, digests, taken, entries, rows, count,
                 plan.regions.owners, values, positions, words, MASKING=masking and bucket.u is not None,
                 WIRE=cuda._TYPES[form.dtype], enable_fp_fusion=False)
    _close[rows,](v, largest, digests, wrong, told, whose, *parts, exponent, words)
    bucket.count(entries)
    return message, Taken(index, taken)


class _Said:
    """What rows say, looked through.

    Args:
        form: their format.
        messages: uint8 (R, nbytes).
        sizes: int64 (R,) or (1,): entries of the region that each row is about.
    """

    def __init__(self, form: Rows, messages: Tensor, sizes: Tensor):
        self.form, rows, messages = form, len(messages), messages.contiguous()
        self.parts = messages.view(torch.int16), messages.view(torch.int32)
        self.stretches = form.stretches
        self.values, self.positions, exponent, self.words = _places(form)
        new = messages.new_empty
        self.starts, damaged = new(rows * self.stretches, dtype=torch.int64), new(rows, dtype=torch.int32).zero_()
        self.status, self.whose = new((2, rows), dtype=torch.int64)
        with torch.cuda.device_of(messages):
            self.grid = self.stretches, rows
            _check[self.stretches + 1, rows](
                *self.parts, sizes, self.starts, damaged, int(len(sizes) > 1), form.size, form.slots, self.stretches,
                self.values, self.positions, exponent, self.words, WIRE=cuda._TYPES[form.dtype])
            _conclude[triton.cdiv(rows, ENTRIES.value),](
                *self.parts, damaged, self.status, self.whose, rows, exponent, self.words)


def add(bucket: Bucket, plan: Plan, rows: Tensor) -> Arrived:
    """As :func:`owners_plain.add`."""
    said, slots = _Said(plan.to_owners, rows, plan.size), plan.to_owners.slots
    count, v = len(rows) * slots, bucket.v
    keys = torch.full((count,), NOWHERE.value, dtype=torch.int32, device=v.device)
    places, values = torch.zeros(count, dtype=torch.int64, device=v.device), v.new_zeros(count)
    with torch.cuda.device_of(v):
        _read[said.grid](*said.parts, said.starts, said.status, _wrong(said.status), keys, places, values, plan.own,
                         plan.regions.owners, slots, said.stretches, said.values, said.positions, said.words,
                         WIRE=cuda._TYPES[said.form.dtype])
        before = v[places]
        keys, order = keys.sort(stable=True)
        _add[triton.cdiv(count, SLOTS.value),](v, keys, order, places, values, count)
    return Arrived(said.status, said.whose, Taken(places, -values), before)


def _wrong(status: Tensor) -> Tensor:
    """int32 (): whether a row tells of an error."""
    return (status >= CORRUPT.value).any().to(torch.int32)


def pass_on(bucket: Bucket, gradients: Mapping[str, Gradient], plan: Plan, arrived: Arrived, step: int,
            masking: bool) -> tuple[Tensor, Taken]:
    """As :func:`owners_plain.pass_on`."""
    wrong = _wrong(arrived.status)
    with torch.cuda.device_of(bucket.v):
        local = owners_plain._largest(_scores(bucket, gradients, plan), plan.to_all.slots, step)
        index = plan.regions.index(plan.own, local)
        row = ((wrong != 0) | (bucket.v[index] == 0)).to(torch.int32)
        message, taken = _written(bucket, plan, plan.to_all, 1, row, index, wrong, arrived.status.max(),
                                  arrived.whose.take(arrived.status.argmax()), masking)
    bucket.held_entries = owners_plain._held(arrived.added, taken)
    return message, taken


def _scores(bucket: Bucket, gradients: Mapping[str, Gradient], plan: Plan) -> Tensor:
    """As :func:`owners_plain._scores`."""
    table, n, v = _table(plan), plan.regions.owners, bucket.v
    scores, sums = v.new_empty(table.length), v.new_empty(table.pieces_count, dtype=torch.float64)
    if not table.length:
        return scores
    absent = tensor_of([name not in gradients for name in bucket.names], v.device, torch.int32)
    means = v.new_empty(len(bucket.names))
    _sum[table.pieces_count,](v, table.pieces, sums, plan.own, n)
    _average[len(bucket.names),](table.pieces_of, plan.lengths, absent, sums, table.tiny, means)
    _score[table.pieces_count, PIECE_TILES](v, table.pieces, means, scores, plan.own, n)
    return scores


class Received:
    """As :class:`owners_plain.Received`."""

    def __init__(self, plan: Plan, messages: Tensor, divisor: float):
        self._plan, self._divisor = plan, divisor
        self._said = _Said(plan.to_all, messages, plan.regions.sizes)
        self.status, self.whose = self._said.status, self._said.whose

    def write(self, targets: Sequence[Tensor | None]) -> None:
        self._spread(targets, None)

    def add(self, targets: Sequence[Tensor | None], rates: Sequence[float]) -> None:
        self._spread(targets, rates)

    def _spread(self, targets: Sequence[Tensor | None], rates: Sequence[float] | None) -> None:
        layout, said, table = self._plan.layout, self._said, cuda._table(self._plan.layout)
        count, like = len(layout.names), torch.empty(0, dtype=layout.residual, device=layout.device)
        addresses = [0 if target is None else target.data_ptr() for target in targets]
        factors = [0.0] * count if rates is None else [float(rate) for rate in rates]
        numbers = tensor_of(addresses + cuda._doubles([*factors, float(self._divisor)]), layout.device)
        with torch.cuda.device_of(like):
            if rates is None and table.blocks_count:
                _clear[table.blocks_count,](table.parameters, table.blocks, numbers, like)
            _spread[said.grid](
                *said.parts, said.starts, said.status, table.parameters, numbers, like, self._plan.regions.owners,
                count, count.bit_length(), said.stretches, said.values, said.positions, said.words,
                ADD=rates is not None, WIRE=cuda._TYPES[said.form.dtype], enable_fp_fusion=False)
