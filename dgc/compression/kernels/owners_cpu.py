"""The loops of the exchange that adds up at owners, fused and compiled for the CPU with numba.

A region is read where it lies in v: while the gradients are added in, and once for the means of its parameters and the
largest entry of each block; then only blocks with a large one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from dgc.compression.kernels import cpu
from dgc.compression.kernels.cpu import (
    AHEAD,
    LANES,
    PANEL,
    SLOTS,
    _everywhere,
    _greatest,
    _in_threads,
    _keep,
    _kth,
    _largest,
    _lowest,
    _pointer,
    _prefetch,
    _round_to_bfloat,
    _round_to_half,
    _seal,
    _value,
)
from dgc.compression.kernels.jit import jit
from dgc.compression.regions import Arrived, Plan, Rows, Taken
from dgc.compression.residual import Bucket, Gradient
from dgc.compression.select import DEVIATIONS, stride
from dgc.compression.sizes import LINE
from dgc.compression.wire import BLOCK, CORRUPT, MIXER, NONFINITE, TOP

SPREAD = 1 << 16  # entries of the update that are written together
PIECES = 4  # of a region, that are worth another thread
ROOM = 1 - 2.0**-16  # what a product and a quotient may be off by, and more

_jit = jit(nogil=True, error_model="numpy", boundscheck=False)


# -- who adds up what --------------------------------------------------------------------------------------------------

@_jit
def _turn(rounds, n):
    """See ``dgc.compression.regions.Regions``, as for the next two."""
    return (((rounds * MIXER) & 0xFFFFFFFF) >> 12) % n


@_jit
def _owner(i, n):
    block = i // LINE
    return (block + _turn(block // n, n)) % n


@_jit
def _index(owner, local, n):
    rounds = local // LINE
    place = owner - _turn(rounds, n)
    return (rounds * n + (place + n if place < 0 else place)) * LINE + local % LINE


# -- to owners ---------------------------------------------------------------------------------------------------------

@_jit
def _deal(starts, index, used, n, own, slots, v, tiny, places, begins):
    """Sorts the chosen entries outside the own region by their owners, in ascending order for each: those of owner r
    are ``places[begins[r]:begins[r + 1]]``. Of more than ``slots`` the smallest are left out.

    Returns how many there were.
    """
    chosen, of, rows = np.empty(len(index), np.int64), np.empty(len(index), np.int64), np.empty(len(index), np.int64)
    total = 0
    begins[:] = 0
    for p in range(len(starts)):
        for j in range(starts[p], starts[p] + used[p]):
            row = _owner(index[j], n)
            if row != own:
                chosen[total], of[total], rows[total] = index[j], p, row
                begins[row + 1] += 1
                total += 1
    most = begins.max()
    for r in range(n):
        begins[r + 1] += begins[r]
    keys = _keys(chosen[:total], of, rows, len(starts), v, tiny) if most > slots else np.empty(0, np.float64)
    sorted_keys = np.empty(len(keys), np.float64)
    places_of = begins[:n].copy()
    for e in range(total):
        at = places_of[rows[e]]
        places[at] = chosen[e]
        if most > slots:
            sorted_keys[at] = keys[e]
        places_of[rows[e]] += 1
    if most > slots:
        _fit(n, slots, sorted_keys, places, begins)
    return total


@_jit
def _keys(chosen, of, rows, count, v, tiny):
    """The keys that order the entries of a row: the larger |v| is beside its parameter's mean, the larger the key."""
    one = v.dtype.type(1)
    totals, numbers = np.zeros(count, np.float64), np.zeros(count, np.int64)
    means, keys = np.empty(count, v.dtype), np.empty(len(chosen), np.float64)
    for e in range(len(chosen)):
        size = abs(v[chosen[e]])
        totals[of[e]] += np.float64(size)
        numbers[of[e]] += size > 0
    for p in range(count):
        mean = v.dtype.type(totals[p] / max(numbers[p], 1))
        means[p] = tiny if mean < tiny else mean
    for e in range(len(chosen)):
        smallness = one / (one + abs(v[chosen[e]]) / means[of[e]])
        if not smallness >= 0:  # infinity among infinities is large
            smallness = v.dtype.type(0)
        keys[e] = -(np.float64(rows[e]) + 0.5 * np.float64(smallness))
    return keys


@_jit
def _fit(n, slots, keys, places, begins):
    """Closes the gaps that are left where rows lose what they have no slots for."""
    kept, at = np.empty(slots, np.int64), 0
    for r in range(n):
        first, count = begins[r], begins[r + 1] - begins[r]
        begins[r] = at
        if count > slots:
            some = keys[first:first + count]
            _keep(np.arange(first, first + count), some, _kth(some.copy(), slots), slots, kept, 0)
            count = slots
            for j in range(slots):
                places[at + j] = places[kept[j]]
        else:
            for j in range(count):
                places[at + j] = places[first + j]
        at += count
    begins[n] = at


@_jit
def _write(first, last, begins, places, n, u, v, masking, half, counts, singles, words, positions, exponents, messages,
           sent):
    """Rows first to last: takes their entries out of v, writes them down, and what receivers will read to ``sent``.

    Returns how many were sent. A row with an entry that is not finite has nothing but this fact.
    """
    word = np.empty(1, np.float32)
    word_bits = word.view(np.uint32)
    sent_entries = 0
    for r in range(first, last):
        begin, end = begins[r], begins[r + 1]
        largest = _greatest(places, begin, end, u, v, masking)
        if not largest < np.inf:
            exponents[r, 0] = NONFINITE
            sent[begin:end] = 0
            _seal(messages[r])
            continue
        exponent = max(math.frexp(np.float64(largest))[1] - TOP, -1022)
        exponents[r, 0] = exponent
        up, down = math.ldexp(1.0, -exponent), math.ldexp(1.0, exponent)
        for j in range(begin, end):
            i, slot = places[j], j - begin
            y = np.float32(v[i] * up)
            if singles.shape[1]:
                singles[r, slot] = y
            else:
                words[r, slot] = _round_to_half(y, word, word_bits) if half else _round_to_bfloat(y, word, word_bits)
            sent[j] = v.dtype.type(_value(r, slot, singles, words, half, word, word_bits) * down)
            v[i] -= sent[j]
            if sent[j] != 0:
                sent_entries += 1
                if masking:
                    u[i] = 0
            local = i // (LINE * n) * LINE + i % LINE
            counts[r, local // BLOCK] += 1
            positions[r, slot] = local % BLOCK
        _seal(messages[r])
    return sent_entries


# -- what rows say -----------------------------------------------------------------------------------------------------

@_jit
def _finite(r, slot, singles, words, half):
    """Whether a slot's value is."""
    if singles.shape[1]:
        return abs(singles[r, slot]) < np.inf
    mask = 0x7C00 if half else 0x7F80
    return np.int64(words[r, slot]) & mask != mask


@_jit
def _check(messages, counts, singles, words, positions, exponents, half, slots, largest, sizes, status, whose, used):
    """Fills in each row's status, whose row is damaged where it says that one is, and how many slots it uses.

    Args:
        largest: entries of the largest region.
        sizes: of each row's; or one, of all.
    """
    for r in range(len(messages)):
        low, high = np.int64(messages[r, -2]) & 0xFFFFFFFF, np.int64(messages[r, -1])
        status[r], whose[r], used[r] = exponents[r, 0], counts[r, 0], 0
        bad = cpu._checksum(messages[r]) != high << 32 | low
        if status[r] < CORRUPT and not bad:
            size, slot = sizes[min(r, len(sizes) - 1)], np.int64(0)
            for c in range(counts.shape[1]):
                m = np.int64(counts[r, c])
                if m < 0 or m > min(BLOCK, largest - c * BLOCK) or m > slots - slot:
                    bad = True
                    break
                before = np.int64(-1)
                for j in range(slot, slot + m):
                    at = np.int64(positions[r, j])
                    bad |= (c * BLOCK + at >= size) | (at <= before) | (not _finite(r, j, singles, words, half))
                    before = at
                slot += m
            used[r] = slot
        if bad:
            status[r], whose[r], used[r] = CORRUPT, r, 0


@_jit
def _power(exponent):
    return math.ldexp(1.0, min(max(np.int64(exponent), -1022), 1023))


@_jit
def _add(own, n, v, half, counts, singles, words, positions, exponents, used, places, values, before):
    """Adds to v what rows say of the own region. ``places`` has where, ``values`` what, ``before`` what was there.

    Returns how many entries there are.
    """
    word = np.empty(1, np.float32)
    word_bits = word.view(np.uint32)
    total = 0
    for r in range(len(used)):
        down, slot = _power(exponents[r, 0]), 0
        for c in range(counts.shape[1]):
            if used[r]:
                for _ in range(counts[r, c]):
                    places[total] = _index(own, c * BLOCK + np.int64(positions[r, slot]), n)
                    values[total] = v.dtype.type(_value(r, slot, singles, words, half, word, word_bits) * down)
                    slot += 1
                    total += 1
    for e in range(total):  # all of them before any is added to, as an entry may be in several rows
        if e + AHEAD < total:
            _prefetch(v.ctypes.data + places[e + AHEAD] * v.itemsize)
        before[e] = v[places[e]]
    for e in range(total):
        v[places[e]] += values[e]
    return total


# -- the largest sums --------------------------------------------------------------------------------------------------

def _magnitudes(builder, address, real, bits):
    """|x| of the line at an address."""
    line = builder.load(builder.inttoptr(address, ir.VectorType(real, LANES).as_pointer()), align=bits // 8)
    integer = ir.IntType(bits)
    mask = _everywhere(builder, integer((1 << (bits - 1)) - 1))
    return builder.bitcast(builder.and_(builder.bitcast(line, mask.type), mask), line.type)


@intrinsic
def _add_line(typing_context, x, like, lanes):
    """Adds |x| of the line at the address x to the float64 numbers at the address ``lanes``. Returns the largest."""
    def generate(context, builder, signature, arguments):
        address, real, into = arguments
        integer = ir.IntType(like.bitwidth)
        sizes = _magnitudes(builder, address, real.type, like.bitwidth)
        bits = builder.bitcast(sizes, ir.VectorType(integer, LANES))  # whose order that of the magnitudes is
        largest = builder.call(cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(integer, [bits.type]),
            f"llvm.vector.reduce.umax.v{LANES}i{like.bitwidth}"), [bits])
        double = ir.VectorType(ir.DoubleType(), LANES)
        if like.bitwidth == 32:
            sizes = builder.fpext(sizes, double)
        into = builder.inttoptr(into, double.as_pointer())
        builder.store(builder.fadd(builder.load(into, align=8), sizes), into, align=8)
        return builder.bitcast(largest, real.type)

    return like(types.int64, like, types.int64), generate


@intrinsic
def _reaching(typing_context, x, least):
    """A bit for each |x| of the line at the address x that reaches the least; the first entry's is the lowest."""
    def generate(context, builder, signature, arguments):
        address, bound = arguments
        sizes = _magnitudes(builder, address, bound.type, least.bitwidth)
        reached = builder.fcmp_ordered(">=", sizes, _everywhere(builder, bound))
        return builder.zext(builder.bitcast(reached, ir.IntType(LANES)), ir.IntType(64))

    return types.int64(types.int64, least), generate


@_jit
def _sum(first, last, firsts, ends, blocks, v, tiny, lanes, largest):
    """Pieces first to last of the own region: the sums of |v|, each place of a block for itself; and the largest |v| of
    each block that is one parameter's.
    """
    at_v, at_lanes, size = np.int64(v.ctypes.data), np.int64(lanes.ctypes.data), v.itemsize
    for q in range(first, last):
        for j in range(firsts[q] // LINE, (ends[q] - 1) // LINE + 1):
            if j + AHEAD < len(blocks):
                _prefetch(at_v + blocks[j + AHEAD] * (LINE * size))
            a, b, place = max(firsts[q] - j * LINE, 0), min(ends[q] - j * LINE, LINE), blocks[j] * LINE
            if b - a == LINE:
                largest[j] = _add_line(at_v + place * size, tiny, at_lanes + q * (LINE * 8))
            else:
                for i in range(a, b):
                    lanes[q, i] += np.float64(abs(v[place + i]))


@_jit
def _average(of, lanes, lengths, absent, tiny, means):
    """Each parameter's mean, infinity where it is absent. Returns whether all others are finite."""
    totals, fine = np.zeros(len(lengths), np.float64), True
    for q in range(len(of)):
        total = 0.0
        for i in range(LINE):
            total += lanes[q, i]
        totals[of[q]] += total
        fine &= total < np.inf
    for p in range(len(lengths)):
        means[p] = totals[p] / max(lengths[p], 1)
        if means[p] < tiny:
            means[p] = tiny
        if absent[p]:
            means[p] = np.inf
    return fine


@_jit
def _threshold(step, every, k, length, ends, of, blocks, v, means):
    """A score that k entries or more will reach, from a sample of the own region's lines; 0 if it says nothing."""
    lines, q, held = length // LINE, 0, 0
    begin = step % every
    taken = max(0, (lines - begin + every - 1) // every * LINE)
    hits = k * taken / max(length, 1)
    rank = k if every == 1 else math.ceil(hits + DEVIATIONS * math.sqrt(hits))
    if rank >= taken:
        return v.dtype.type(0)
    sample = np.empty(taken, v.dtype)
    for j in range(begin, lines, every):
        if j + AHEAD * every < lines:
            _prefetch(v.ctypes.data + blocks[j + AHEAD * every] * (LINE * v.itemsize))
        for i in range(LINE):
            while ends[q] <= j * LINE + i:
                q += 1
            sample[held] = abs(v[blocks[j] * LINE + i]) / means[of[q]]
            held += 1
    return _kth(sample, rank)


@_jit
def _find(first, last, firsts, ends, of, blocks, largest, v, smallest, threshold, means, found, scores):
    """Pieces first to last of the own region: where the scores reach the threshold or nearly so, and the scores; at
    the end of ``found``, too many for it are not written down. Returns how many, and how many reach the threshold.
    """
    at_v, size, count, reach = np.int64(v.ctypes.data), v.itemsize, 0, 0
    hit = np.empty(BLOCK // LINE + 2, np.int64)  # of a piece
    for q in range(first, last):
        mean = means[of[q]]
        bound = v.dtype.type(threshold * mean * ROOM)
        if bound < smallest:
            bound = smallest
        if not bound < np.inf:
            continue
        begin, end, hits = firsts[q] // LINE, (ends[q] - 1) // LINE + 1, 0
        for j in range(begin, end):  # without a branch, and before the blocks are looked at, which are fetched then
            whole = j * LINE >= firsts[q] and (j + 1) * LINE <= ends[q]
            hit[hits] = j
            hits += largest[j] >= bound or not whole
        for h in range(hits):
            if h + AHEAD < hits:
                _prefetch(at_v + blocks[hit[h + AHEAD]] * (LINE * size))
            j = hit[h]
            place = blocks[j] * LINE
            a, b = max(firsts[q] - j * LINE, 0), min(ends[q] - j * LINE, LINE)
            if b - a == LINE:
                bits = _reaching(at_v + place * size, bound)
            else:
                bits = np.int64(0)
                for i in range(a, b):
                    bits |= np.int64(abs(v[place + i]) >= bound) << i
            while bits:
                i = place + _lowest(bits)
                bits &= bits - 1
                score = abs(v[i]) / mean
                if score > 0:
                    if count < len(found):
                        found[count], scores[count] = i, score
                    count += 1
                    reach += score >= threshold
    return count, reach


@_jit
def _score(firsts, ends, of, blocks, v, means, scores):
    """All scores of the own region; infinity where one is not a number, which is to be passed on, and told."""
    for q in range(len(of)):
        for e in range(firsts[q], ends[q]):
            score = abs(v[blocks[e // LINE] * LINE + e % LINE]) / means[of[q]]
            scores[e] = score if score <= np.inf else np.inf


@_jit
def _held(places, values, gone, sent):
    """How many of the entries that came, ascending in each row, were not passed on: those of ``gone``, ascending, that
    were sent.
    """
    held, at, before = 0, 0, np.int64(-1)
    for e in range(len(places)):
        if places[e] < before:
            at = 0
        before = places[e]
        while at < len(gone) and gone[at] < before:
            at += 1
        held += values[e] != 0 and not (at < len(gone) and gone[at] == before and sent[at] != 0)
    return held


# -- the update --------------------------------------------------------------------------------------------------------

@_jit
def _spread(first, last, n, numel, offsets, numels, half, counts, singles, words, positions, exponents, used, divisor,
            targets, rates, like):
    """Rounds first to last of all regions: what rows say, over the divisor. Without ``rates`` the targets, one address
    for each parameter (0: skip it), are overwritten with it; else its product with the parameter's rate is added.
    """
    word = np.empty(1, np.float32)
    word_bits = word.view(np.uint32)
    slots, stretches = np.zeros(len(used), np.int64), np.zeros(len(used), np.int64)
    ends = counts[:, 0].astype(np.int64)  # of the stretches
    together = max(1, SPREAD // (LINE * n))
    p, count = 0, len(numels)
    for begin in range(first, last, together):
        stop = min(begin + together, last)
        low, high = begin * n * LINE, min(stop * n * LINE, numel)
        while p < count - 1 and offsets[p] + numels[p] <= low:
            p += 1
        q = p
        while not len(rates) and q < count and offsets[q] < high:
            a, b = max(low, offsets[q]) - offsets[q], min(high, offsets[q] + numels[q]) - offsets[q]
            if targets[q] and a < b:
                numba.carray(_pointer(targets[q] + a * like.itemsize), b - a, like.dtype)[:] = 0
            q += 1
        for r in range(len(used)):
            down, q = _power(exponents[r, 0]), p
            while slots[r] < used[r]:
                slot = slots[r]
                while slot == ends[r]:
                    stretches[r] += 1
                    ends[r] += counts[r, stretches[r]]
                local = stretches[r] * BLOCK + np.int64(positions[r, slot])
                if local >= stop * LINE:
                    break
                slots[r] += 1
                if local < begin * LINE:  # before the first round
                    continue
                i = _index(r, local, n)
                while i >= offsets[q] + numels[q]:
                    q += 1
                x = like.dtype.type(_value(r, slot, singles, words, half, word, word_bits) * down) / divisor
                if targets[q] and x != 0:
                    target = numba.carray(_pointer(targets[q]), numels[q], like.dtype)
                    i -= offsets[q]
                    target[i] = target[i] + rates[q] * x if len(rates) else x


# -- the doors ---------------------------------------------------------------------------------------------------------

class _Tables:
    """A plan's numbers as arrays."""

    def __init__(self, plan: Plan):
        self.blocks = plan.regions.blocks(plan.own).numpy()
        self.sizes, self.lengths = plan.regions.sizes.numpy(), plan.lengths.numpy()
        self.firsts, self.ends, self.of = np.ascontiguousarray(plan.pieces.numpy())
        self.length, self.kept = int(plan.size), min(plan.to_all.slots, int(plan.size))
        self.every = stride(self.kept)

    def shares(self, threads: int) -> list[tuple[int, int]]:
        """Pieces, for each thread some that follow one another."""
        count = len(self.of)
        shares = max(1, min(threads, count // PIECES))
        return list(pairwise(count * w // shares for w in range(shares + 1)))


_tables: WeakKeyDictionary[Plan, _Tables] = WeakKeyDictionary()


def _table(plan: Plan) -> _Tables:
    table = _tables.get(plan)
    if table is None:
        table = _tables[plan] = _Tables(plan)
    return table


def _sections(rows: Rows, messages: Any) -> tuple[Any, Any, Any, Any, Any]:
    """The parts of messages (R, nbytes): counts, values if float32, values if not, positions, exponents (R, 1)."""
    a, b, c = rows.ends
    single = rows.dtype == torch.float32
    values, nothing = messages[:, a:b], np.empty((len(messages), 0), np.uint8)
    return (messages[:, :a].view(np.int32), (values if single else nothing).view(np.float32),
            (nothing if single else values).view(np.uint16), messages[:, b:c].view(np.uint16),
            messages[:, c:c + 2].view(np.int16))


def select(bucket: Bucket, gradients: Mapping[str, Gradient], scale: Tensor | Mapping[str, Tensor] | None, plan: Plan,
           step: int) -> tuple[list[str], Tensor, Tensor]:
    """As :func:`owners_plain.select`."""
    return cpu.select(bucket, gradients, scale, plan.layout, step, _table(plan).blocks)


def send(bucket: Bucket, plan: Plan, index: Tensor, used: Tensor, refused: Tensor, masking: bool) -> tuple[
        Tensor, Taken]:
    """As :func:`owners_plain.send`."""
    n, starts, v = plan.regions.owners, cpu._table(plan.layout).starts, bucket.v.numpy()
    if refused:
        bucket.count(torch.tensor(0, device="cpu"))
        return plan.to_owners.telling(n, NONFINITE), _nothing(bucket)
    places, begins = np.empty(len(index), np.int64), np.empty(n + 1, np.int64)
    wanted = _deal(starts, index.numpy(), used.numpy(), n, plan.own, plan.to_owners.slots, v,
                   np.finfo(v.dtype).tiny, places, begins)
    rows, taken, entries = _written(bucket, plan, plan.to_owners, begins, places, masking)
    bucket.overflow_entries = torch.tensor(wanted - entries, device="cpu")
    return rows, taken


def _nothing(bucket: Bucket) -> Taken:
    return Taken(torch.empty(0, dtype=torch.int64, device="cpu"), bucket.v[:0])


def _written(bucket: Bucket, plan: Plan, rows: Rows, begins: Any, places: Any, masking: bool) -> tuple[
        Tensor, Taken, int]:
    """Entries, sorted by row, as a message; what was taken out of v for it; and how many entries that are not zero."""
    u, v = cpu._arrays(bucket)
    count, threads = len(begins) - 1, torch.get_num_threads()
    message = np.zeros((max(2, count), rows.nbytes), np.uint8)  # the parts of one row alone were contiguous: other code
    counts, singles, words, positions, exponents = _sections(rows, message)
    sent, numbers = np.empty(begins[-1], v.dtype), message.view(np.int32)
    shares = max(1, min(threads, count, len(places) // SLOTS))
    entries = sum(_in_threads(lambda first, last: _write(
        first, last, begins, places, plan.regions.owners, u, v, masking and bucket.u is not None,
        rows.dtype == torch.float16, counts, singles, words, positions, exponents, numbers, sent),
        list(pairwise(count * w // shares for w in range(shares + 1))), threads))
    bucket.count(torch.tensor(entries, device="cpu"))
    taken = Taken(torch.from_numpy(places[:begins[-1]]), torch.from_numpy(sent))
    return torch.from_numpy(message[:count]), taken, entries


def add(bucket: Bucket, plan: Plan, rows: Tensor) -> Arrived:
    """As :func:`owners_plain.add`."""
    said, v = _Said(plan.to_owners, rows, plan.size.numpy()), bucket.v.numpy()
    if said.status.max() >= CORRUPT:
        return Arrived(torch.from_numpy(said.status), torch.from_numpy(said.whose), _nothing(bucket), bucket.v[:0])
    total = said.used.sum()
    places, (values, before) = np.empty(total, np.int64), np.empty((2, total), v.dtype)
    counts, singles, words, positions, exponents = said.sections
    _add(plan.own, plan.regions.owners, v, said.half, counts, singles, words, positions, exponents, said.used, places,
         values, before)
    added = Taken(torch.from_numpy(places), torch.from_numpy(-values))
    return Arrived(torch.from_numpy(said.status), torch.from_numpy(said.whose), added, torch.from_numpy(before))


class _Said:
    """What rows say, looked through: as arrays.

    Args:
        rows: their format.
        messages: uint8 (R, nbytes).
        sizes: int64 (R,) or (1,): entries of the region that each row is about.
    """

    def __init__(self, rows: Rows, messages: Tensor, sizes: Any):
        array = messages.contiguous().numpy()
        self.half, self.sections = rows.dtype == torch.float16, _sections(rows, array)
        self.status, self.whose, self.used = np.empty((3, len(array)), np.int64)
        counts, singles, words, positions, exponents = self.sections
        _check(array.view(np.int32), counts, singles, words, positions, exponents, self.half, rows.slots, rows.size,
               sizes, self.status, self.whose, self.used)


def pass_on(bucket: Bucket, gradients: Mapping[str, Gradient], plan: Plan, arrived: Arrived, step: int,
            masking: bool) -> tuple[Tensor, Taken]:
    """As :func:`owners_plain.pass_on`."""
    if arrived.status.max() >= CORRUPT:
        bucket.count(torch.tensor(0, device="cpu"))
        return plan.to_all.telling(1, arrived.status.max(), arrived.whose.take(arrived.status.argmax())), _nothing(
            bucket)
    index = _largest_sums(bucket, gradients, plan, step)
    begins = np.array([0, len(index)])
    message, taken, _ = _written(bucket, plan, plan.to_all, begins, index, masking)
    added = arrived.added
    held = _held(added.places.numpy(), added.sent.numpy(), index, taken.sent.numpy())
    bucket.held_entries = torch.tensor(held, device="cpu")
    return message, taken


def _largest_sums(bucket: Bucket, gradients: Mapping[str, Gradient], plan: Plan, step: int) -> Any:
    """The places of the own region's largest sums, over their parameter's mean there: int64, ascending."""
    table, v, threads = _table(plan), bucket.v.numpy(), torch.get_num_threads()
    lanes, means, tiny = np.zeros((len(table.of), LINE)), np.empty(len(bucket.names), v.dtype), np.finfo(v.dtype).tiny
    shares, k, largest = table.shares(threads), table.kept, np.empty(len(table.blocks), v.dtype)
    _in_threads(lambda first, last: _sum(first, last, table.firsts, table.ends, table.blocks, v, tiny, lanes, largest),
                shares, threads)
    absent = np.array([name not in gradients for name in bucket.names])
    fine = _average(table.of, lanes, table.lengths, absent, tiny, means)
    threshold = _threshold(step, table.every, k, table.length, table.ends, table.of, table.blocks, v, means)
    least = np.finfo(v.dtype).smallest_subnormal
    found, scores = np.empty((len(shares), 4 * k + PANEL), np.int64), np.empty((len(shares), 4 * k + PANEL), v.dtype)
    counts = _in_threads(lambda share, first, last: _find(
        first, last, table.firsts, table.ends, table.of, table.blocks, largest, v, least, threshold, means,
        found[share], scores[share]), [(w, *share) for w, share in enumerate(shares)], threads)
    if not fine or sum(reach for _, reach in counts) < k or any(count > found.shape[1] for count, _ in counts):
        return _among_all(table, v, means)
    candidates = np.concatenate([found[w, :count] for w, (count, _) in enumerate(counts)])
    magnitudes = np.concatenate([scores[w, :count] for w, (count, _) in enumerate(counts)])
    index = np.empty(k, np.int64)
    if k:
        _keep(candidates, magnitudes, _kth(magnitudes.copy(), k), k, index, 0)
    return index


def _among_all(table: _Tables, v: Any, means: Any) -> Any:
    """Chooses the entries to keep without the help of a sample."""
    scores, index = np.empty(table.length, v.dtype), np.empty(table.kept, np.int64)
    _score(table.firsts, table.ends, table.of, table.blocks, v, means, scores)
    bits, shift = scores.view(np.uint32 if v.itemsize == 4 else np.uint64), 19 if v.itemsize == 4 else 51
    local = index[:_largest(0, len(scores), table.kept, scores, bits, shift, index, 0)] if table.kept else index
    return table.blocks[local // LINE] * LINE + local % LINE


class Received:
    """As :class:`owners_plain.Received`."""

    def __init__(self, plan: Plan, messages: Tensor, divisor: float):
        self.layout, self._plan, self._divisor = plan.layout, plan, divisor
        self._said = _Said(plan.to_all, messages, _table(plan).sizes)
        self.status, self.whose = torch.from_numpy(self._said.status), torch.from_numpy(self._said.whose)

    def write(self, targets: Sequence[Tensor | None]) -> None:
        self._spread(targets, ())

    def add(self, targets: Sequence[Tensor | None], rates: Sequence[float]) -> None:
        self._spread(targets, rates)

    def _spread(self, targets: Sequence[Tensor | None], rates: Sequence[float]) -> None:
        layout, said, n, threads = self.layout, self._said, self._plan.regions.owners, torch.get_num_threads()
        table, like = cpu._table(layout), cpu.LIKE[layout.residual]
        counts, singles, words, positions, exponents = said.sections
        addresses = np.array([0 if target is None else target.data_ptr() for target in targets], np.int64)
        factors, divisor = np.array(rates, like.dtype), like.dtype.type(self._divisor)
        rounds = -(-layout.numel // (LINE * n))
        shares = max(1, min(threads, layout.numel // (4 * SPREAD)))
        _in_threads(lambda first, last: _spread(
            first, last, n, layout.numel, table.offsets, table.numels, said.half, counts, singles, words, positions,
            exponents, said.used, divisor, addresses, factors, like),
            list(pairwise(rounds * w // shares for w in range(shares + 1))), threads)
