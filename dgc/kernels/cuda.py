"""The loops over a bucket, fused and compiled for CUDA with Triton, which CUDA builds of torch bring along.

A step walks over u, v and the gradients once, in one launch for all parameters of the bucket. Nothing here waits for
the device: sizes follow from the layout, addresses and momenta travel in one small asynchronous copy, and what is only
known on the device (thresholds, counts, whether a gradient was finite) stays there.

The k largest are found exactly, by narrowing down where the k-th one lies:

1. ``_sample``: an interval of magnitudes for each parameter that its k-th largest should lie in, from a sample.
2. ``_accumulate``: the pass over memory. Of what reaches the interval it notes where, tile by tile and in order; of
   what lies in it it makes a histogram.
3. ``_narrow``, a fixed number of times: the k-th largest lies in one bin, which becomes the interval. Only what was
   noted is looked at again; all of v where the sample misled or a tile had too much to note. Once the interval is a
   single magnitude, which the second round usually sees to, the launches that are left end at once.
4. ``_tally`` and ``_choose``: how many are taken in each block, then where, ascending.

So the sample decides how much work there is and never what is sent. No result depends on the order in which programs
run: counters are integers, and what is added up in floating point is added in the order of ranks.

With ``TRITON_INTERPRET=1`` in the environment before Triton is imported, all of it runs on the CPU, slowly.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgc import wire
from dgc.kernels import plain
from dgc.residual import Bucket, Gradient
from dgc.select import DEVIATIONS
from dgc.wire import Layout

ABSENT = tl.constexpr(0)  # what happens to a parameter: no gradient, no momentum, and the two kinds of it
PLAIN = tl.constexpr(1)
HEAVY = tl.constexpr(2)
NESTEROV = tl.constexpr(3)

BLOCK = tl.constexpr(wire.BLOCK)
TILE = tl.constexpr(4096)  # entries that a program accumulates; a block is 16 of them
TILES = tl.constexpr(wire.BLOCK // 4096)
SAMPLE = tl.constexpr(8192)  # entries of a parameter that are sampled; all, if it has no more
LINE = tl.constexpr(8)  # neighbours sampled together: a sector of memory
BITS = tl.constexpr(12)  # by which a round narrows the interval
BINS = tl.constexpr(4096)  # 2^BITS
LEADING = tl.constexpr(20)  # bits of a magnitude that the sampled interval is told apart by
SLOTS = tl.constexpr(1024)  # slots of a message that one program writes
WORDS = tl.constexpr(4096)  # 32-bit words of a message that one program adds up
ENTRIES = tl.constexpr(256)  # of a block and message, that are added in together
MOST_ROOM = 512  # places to note in a tile; where more are needed, v is read again

# What is known of a parameter, int64, one row of PARAMETER each.
OFFSET = tl.constexpr(0)  # its first entry in the bucket
NUMEL = tl.constexpr(1)
K = tl.constexpr(2)
START = tl.constexpr(3)  # its first slot in a message
FIRST_BLOCK = tl.constexpr(4)
FIRST_TILE = tl.constexpr(5)
UPPER = tl.constexpr(6)  # the k-th largest should lie between these two ranks of the sample
LOWER = tl.constexpr(7)
PARAMETER = tl.constexpr(8)

# Where the k-th largest magnitude of a parameter lies, as integers: first to last, in bins of 2^shift; it is the
# need-th largest there. Shift -1: first is it, and need the number of entries that large which are taken.
# Wide: what was noted does not reach down to the interval.
STATE = tl.constexpr(5)  # first, last, shift, need, wide

NONFINITE = tl.constexpr(wire.NONFINITE)
TOP = tl.constexpr(wire.TOP)


# -- numbers -----------------------------------------------------------------------------------------------------------

@triton.jit
def _magnitude(v):
    """|v| as an integer: in the same order."""
    if v.dtype == tl.float32:
        return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return v.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF


@triton.jit
def _greatest(v):
    """The greatest such integer, and that of infinity; v tells the type."""
    if v.dtype.element_ty == tl.float32:
        return tl.full([], 0x7FFFFFFF, tl.int64), tl.full([], 0x7F800000, tl.int64)
    else:
        return tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64), tl.full([], 0x7FF0000000000000, tl.int64)


@triton.jit
def _power_of_two(exponent):
    """2^exponent as float64, from its bits."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _divided(x, divisor):
    if x.dtype == tl.float32:
        return tl.div_rn(x, divisor)  # plain division is off by a rounding or two
    else:
        return x / divisor


@triton.jit
def _moved(kind, u, v, g, m):
    """u and v after a step (paper, equation 4 and appendix B). Launched without fused multiply-add, so that every
    operation is rounded, as the twin's are.
    """
    y = m * u + g
    nesterov = (v + g) + m * y
    return y, tl.where(kind == HEAVY, v + y, tl.where(kind == NESTEROV, nesterov, v + g))


@triton.jit
def _gradient(table, scale, p, count, i, mask, like, GRADIENT: tl.constexpr, SCALED: tl.constexpr,
              ALIGNED: tl.constexpr):
    """Entries i of parameter p's gradient, clipped, in the residual's dtype."""
    g = tl.load(table + p).to(tl.pointer_type(GRADIENT))
    if ALIGNED:
        g = tl.multiple_of(g, 16)
    x = tl.load(g + i, mask=mask, other=0).to(like.dtype.element_ty)
    if SCALED == 1:
        x = x * tl.load(scale)
    if SCALED == 2:
        x = x * tl.load(scale + p)
    return x


@triton.jit
def _shift(first, last):
    """The width of a bin, as a power of two, with which the bins cover first to last."""
    i = tl.arange(0, 64)
    return tl.sum((((last - first) >> tl.minimum(i + BITS, 63)) > 0).to(tl.int64)).to(tl.int64)


# -- an interval from a sample -----------------------------------------------------------------------------------------

@triton.jit
def _scattered(i, numel, step):
    """The entries sampled of a parameter with more than SAMPLE: one line at random, yet the same on every run, from
    each of as many equal parts as there are lines.
    """
    part, parts, lines = i // LINE, SAMPLE // LINE, numel // LINE
    begin, end = part * lines // parts, (part + 1) * lines // parts
    hashed = (part * 0x9E3779B1 + step * 0x85EBCA6B) & 0xFFFFFFFF
    hashed = ((hashed ^ (hashed >> 16)) * 0x045D9F3B) & 0xFFFFFFFF
    hashed = ((hashed ^ (hashed >> 16)) * 0x045D9F3B) & 0xFFFFFFFF
    return (begin + (hashed ^ (hashed >> 16)) % (end - begin)) * LINE + i % LINE


@triton.jit
def _sample(u, v, table, scale, parameters, state, step, count, GRADIENT: tl.constexpr, SCALED: tl.constexpr,
            VELOCITY: tl.constexpr, EXACT: tl.constexpr):
    """One program a parameter: two magnitudes that its k-th largest v, as it will be, should lie between."""
    p = tl.program_id(0)
    here, out = parameters + p * PARAMETER, state + p * STATE
    numel, k, kind = tl.load(here + NUMEL), tl.load(here + K), tl.load(table + count + p)
    greatest, _ = _greatest(v)
    tl.store(out + 4, 0)
    if (kind == ABSENT) | (k == 0):
        tl.store(out, greatest)
        tl.store(out + 1, greatest)
        tl.store(out + 2, -1)
        tl.store(out + 3, 0)
        return
    first, last = tl.full([], 1, tl.int64), greatest
    if not EXACT:
        i = tl.arange(0, SAMPLE).to(tl.int64)
        if numel > SAMPLE:
            i = _scattered(i, numel, step.to(tl.int64))
        mask, at = i < numel, tl.load(here + OFFSET) + i
        g = _gradient(table, scale, p, count, i, mask, v, GRADIENT, SCALED, False)
        m = tl.load(table + 2 * count + p).to(tl.float64, bitcast=True).to(v.dtype.element_ty)
        before = g * 0
        if VELOCITY:
            before = tl.load(u + at, mask=mask & (kind != PLAIN), other=0)
        _, x = _moved(kind, before, tl.load(v + at, mask=mask, other=0), g, m)
        trailing: tl.constexpr = 31 - LEADING if v.dtype.element_ty == tl.float32 else 63 - LEADING
        bits = tl.where(mask, _magnitude(x) >> trailing, 0).to(tl.int32)
        upper, lower = tl.load(here + UPPER), tl.load(here + LOWER)
        high, low = upper.to(tl.int32) * 0, upper.to(tl.int32) * 0
        for j in range(LEADING):
            bit = 1 << (LEADING - 1 - j)
            high = tl.where(tl.sum((bits >= (high | bit)).to(tl.int32)) >= upper, high | bit, high)
            low = tl.where(tl.sum((bits >= (low | bit)).to(tl.int32)) >= lower, low | bit, low)
        first = tl.maximum(low.to(tl.int64) << trailing, 1)
        last = ((high.to(tl.int64) + 1) << trailing) - 1
    tl.store(out, first)
    tl.store(out + 1, last)
    tl.store(out + 2, _shift(first, last))
    tl.store(out + 3, k)


# -- accumulate, and note what may be large ----------------------------------------------------------------------------

@triton.jit
def _accumulate(u, v, table, scale, parameters, tiles, squares, flags, state, histogram, above, crowded, marks, places,
                found, count, GRADIENT: tl.constexpr, SCALED: tl.constexpr, VELOCITY: tl.constexpr,
                SELECT: tl.constexpr, ROOM: tl.constexpr, ALIGNED: tl.constexpr):
    """One program a tile: adds the gradient in, and notes what reaches the interval."""
    t = tl.program_id(0)
    p, begin = tl.load(tiles + 2 * t), tl.load(tiles + 2 * t + 1)
    here = parameters + p * PARAMETER
    kind, numel, offset = tl.load(table + count + p), tl.load(here + NUMEL), tl.load(here + OFFSET)
    if kind == ABSENT:
        tl.store(squares + t, 0)
        if SELECT:
            tl.store(found + t, 0)
        return
    if ALIGNED:  # so that a thread reads 16 bytes at once
        begin, numel, offset = tl.multiple_of(begin, 16), tl.multiple_of(numel, 16), tl.multiple_of(offset, 16)
    local = tl.arange(0, TILE)
    i = begin + local
    mask, at = i < numel, offset + i
    g = _gradient(table, scale, p, count, i, mask, v, GRADIENT, SCALED, ALIGNED)
    finite = tl.abs(g) < float("inf")
    if tl.sum((~finite).to(tl.int32)) > 0:
        tl.store(flags + p, 1)
        tl.store(flags + count, 1)
    g = tl.where(finite, g, 0)
    tl.store(squares + t, tl.sum(g * g))
    m = tl.load(table + 2 * count + p).to(tl.float64, bitcast=True).to(v.dtype.element_ty)
    before = g * 0
    if VELOCITY:
        before = tl.load(u + at, mask=mask & (kind != PLAIN), other=0)
    y, x = _moved(kind, before, tl.load(v + at, mask=mask, other=0), g, m)
    if VELOCITY:
        tl.store(u + at, y, mask=mask & (kind != PLAIN))
    tl.store(v + at, x, mask=mask)
    if SELECT:
        bits = tl.where(mask, _magnitude(x), 0)
        first, last = tl.load(state + p * STATE).to(bits.dtype), tl.load(state + p * STATE + 1).to(bits.dtype)
        shift, reached = tl.load(state + p * STATE + 2).to(bits.dtype), bits >= first
        number = tl.where(shift < 0, 0, tl.sum(reached.to(tl.int32)))
        if number > 0:
            within = reached & (bits <= last)
            tl.atomic_add(histogram + p * BINS + ((bits - first) >> shift), 1, mask=within, sem="relaxed")
            higher = number - tl.sum(within.to(tl.int32))
            if higher > 0:
                tl.atomic_add(above + p, higher, sem="relaxed")
            if number <= ROOM:
                slot = t * ROOM + tl.cumsum(reached.to(tl.int32), 0) - 1
                tl.store(marks + slot, bits, mask=reached)
                tl.store(places + slot, local.to(tl.int16), mask=reached)
            else:
                tl.store(crowded + tl.load(here + FIRST_BLOCK) + begin // BLOCK, 1)
        tl.store(found + t, tl.minimum(number, ROOM))


# -- narrow the interval down ------------------------------------------------------------------------------------------

@triton.jit
def _narrowed(state, histogram, above, greatest):
    """The next state of a parameter. The pointers are at its own numbers."""
    first, last, shift = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    need, wide = tl.load(state + 3), tl.load(state + 4)
    if shift >= 0:
        bins = tl.arange(0, BINS)
        counts = tl.load(histogram + bins).to(tl.int64)
        within, higher = tl.sum(counts), tl.load(above).to(tl.int64)
        if higher >= need:  # the sample sought it too low
            first = last + 1
            last = greatest
        elif higher + within >= need:
            more = higher + within - tl.cumsum(counts, 0)  # in the bins above each one
            here = (more < need) & (more + counts >= need)
            need -= tl.sum(tl.where(here, more, 0))
            first += tl.sum(tl.where(here, bins, 0)).to(tl.int64) << shift
            last = tl.minimum(last, first + (tl.full([], 1, tl.int64) << shift) - 1)
        elif first > 1:  # too high
            last = first - 1
            first = first * 0 + 1
            need -= higher + within
            wide = wide * 0 + 1
        else:  # fewer than k are not zero: all of them
            first = first * 0
            last = first
            need = need * 0
        shift = tl.where(first == last, -1, _shift(first, last))
    return first, last, shift, need, wide


@triton.jit
def _keep(state, first, last, shift, need, wide):
    tl.store(state, first)
    tl.store(state + 1, last)
    tl.store(state + 2, shift)
    tl.store(state + 3, need)
    tl.store(state + 4, wide)


@triton.jit
def _noted(marks, places, found, first_tile, tiles, ROOM: tl.constexpr):
    """What was noted of a block: magnitudes, 0 where there is none, and positions in the block."""
    i = tl.arange(0, TILES * ROOM)
    tile = i // ROOM
    held = tl.load(found + first_tile + tile, mask=tile < tiles, other=0)
    there = i % ROOM < held
    slot = first_tile * ROOM + i
    bits = tl.load(marks + slot, mask=there, other=0)
    return bits, tile * TILE + tl.load(places + slot, mask=there, other=0).to(tl.int32)


@triton.jit
def _block(parameters, blocks, b):
    """A block: its parameter, that parameter's first block, where the block begins there, and its size."""
    p = tl.load(blocks + b)
    here = parameters + p * PARAMETER
    first_block = tl.load(here + FIRST_BLOCK)
    begin = (b - first_block) * BLOCK
    return p, here, first_block, begin, tl.minimum(tl.load(here + NUMEL) - begin, BLOCK)


@triton.jit
def _count_bins(histogram, bits, first, last, shift):
    first, last, shift = first.to(bits.dtype), last.to(bits.dtype), shift.to(bits.dtype)
    within = (bits >= first) & (bits <= last)
    tl.atomic_add(histogram + ((bits - first) >> shift), 1, mask=within, sem="relaxed")


@triton.jit
def _narrow(v, parameters, blocks, state, histogram, above, crowded, marks, places, found, count, before, after,
            ROOM: tl.constexpr):
    """One program a block: takes the histogram ``before`` to narrow the interval, and adds to the one ``after``."""
    b = tl.program_id(0)
    p, here, first_block, begin, size = _block(parameters, blocks, b)
    greatest, _ = _greatest(v)
    row = before * count + p
    first, last, shift, need, wide = _narrowed(state + row * STATE, histogram + row * BINS, above + row, greatest)
    row = after * count + p
    if b == first_block:
        _keep(state + row * STATE, first, last, shift, need, wide)
    if shift >= 0:
        if wide + tl.load(crowded + b) > 0:
            start = tl.load(here + OFFSET) + begin
            for i in range(0, size, TILE):
                local = i + tl.arange(0, TILE)
                bits = _magnitude(tl.load(v + start + local, mask=local < size, other=0))
                _count_bins(histogram + row * BINS, bits, first, last, shift)
        else:
            tile = tl.load(here + FIRST_TILE) + begin // TILE
            bits, _ = _noted(marks, places, found, tile, (size + TILE - 1) // TILE, ROOM)
            _count_bins(histogram + row * BINS, bits, first, last, shift)


# -- write down where the largest are ----------------------------------------------------------------------------------

@triton.jit
def _tally(v, parameters, blocks, state, histogram, above, crowded, marks, places, found, larger, equal, count, before,
           after, ROOM: tl.constexpr):
    """One program a block: how many of its entries are larger than the k-th largest, and how many as large."""
    b = tl.program_id(0)
    p, here, first_block, begin, size = _block(parameters, blocks, b)
    greatest, _ = _greatest(v)
    row = before * count + p
    kth, last, shift, need, wide = _narrowed(state + row * STATE, histogram + row * BINS, above + row, greatest)
    if b == first_block:
        _keep(state + (after * count + p) * STATE, kth, last, shift, need, wide)
    more, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    if wide + tl.load(crowded + b) > 0:
        start = tl.load(here + OFFSET) + begin
        for i in range(0, size, TILE):
            local = i + tl.arange(0, TILE)
            bits = _magnitude(tl.load(v + start + local, mask=local < size, other=0))
            more += tl.sum((bits > kth.to(bits.dtype)).to(tl.int32))
            ties += tl.sum((bits == kth.to(bits.dtype)).to(tl.int32))
    else:
        tile = tl.load(here + FIRST_TILE) + begin // TILE
        bits, _ = _noted(marks, places, found, tile, (size + TILE - 1) // TILE, ROOM)
        more += tl.sum((bits > kth.to(bits.dtype)).to(tl.int32))
        ties += tl.sum((bits == kth.to(bits.dtype)).to(tl.int32))
    tl.store(larger + b, more)
    tl.store(equal + b, ties)


@triton.jit
def _put(index, at, end, position, bits, kth, need, ties):
    """Writes the positions of those that are sent to index[at:end], and returns where to go on, and the ties so far."""
    tie = bits == kth
    order = ties + tl.cumsum(tie.to(tl.int64), 0)
    chosen = (bits > kth) | (tie & (order <= need))
    slot = at + tl.cumsum(chosen.to(tl.int64), 0) - 1
    tl.store(index + slot, position, mask=chosen & (slot < end))
    return at + tl.sum(chosen.to(tl.int64)), ties + tl.sum(tie.to(tl.int64))


@triton.jit
def _choose(v, parameters, blocks, state, crowded, marks, places, found, larger, equal, index, used, count, after,
            ROOM: tl.constexpr):
    """One program a block: writes down the positions of those that are sent, ascending; ties go to the first."""
    b = tl.program_id(0)
    p, here, first_block, begin, size = _block(parameters, blocks, b)
    state += (after * count + p) * STATE
    kth, need, wide = tl.load(state), tl.load(state + 3), tl.load(state + 4)
    more, ties = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)  # in the blocks before this one
    for c in range(first_block, b, 1024):
        i = c + tl.arange(0, 1024)
        more += tl.sum(tl.load(larger + i, mask=i < b, other=0).to(tl.int64))
        ties += tl.sum(tl.load(equal + i, mask=i < b, other=0).to(tl.int64))
    start, offset = tl.load(here + START), tl.load(here + OFFSET)
    at, end = start + more + tl.minimum(ties, need), start + tl.load(here + K)
    if wide + tl.load(crowded + b) > 0:
        for i in range(0, size, TILE):
            local = i + tl.arange(0, TILE)
            position = offset + begin + local
            bits = _magnitude(tl.load(v + position, mask=local < size, other=0))
            at, ties = _put(index, at, end, position, bits, kth.to(bits.dtype), need, ties)
    else:
        tile = tl.load(here + FIRST_TILE) + begin // TILE
        bits, local = _noted(marks, places, found, tile, (size + TILE - 1) // TILE, ROOM)
        at, ties = _put(index, at, end, offset + begin + local, bits, kth.to(bits.dtype), need, ties)
    if begin + size == tl.load(here + NUMEL):
        tl.store(used + p, at - start)
        for c in range(at, end, 1024):  # unused slots point at an entry too
            i = c + tl.arange(0, 1024)
            tl.store(index + i, offset + i * 0, mask=i < end)


# -- take and write down -----------------------------------------------------------------------------------------------

@triton.jit
def _slots(parameters, chunks, used, index):
    """Of one chunk of slots: its parameter, the slots, which are used, and the positions that they are for."""
    c = tl.program_id(0)
    p, begin = tl.load(chunks + 2 * c), tl.load(chunks + 2 * c + 1)
    here = parameters + p * PARAMETER
    local = begin + tl.arange(0, SLOTS)
    valid = local < tl.minimum(tl.load(used + p), tl.load(here + K))
    slot = tl.load(here + START) + local
    return p, here, begin, slot, valid, tl.load(index + slot, mask=valid, other=0)


@triton.jit
def _largest(v, parameters, chunks, used, index, work):
    """One program a chunk of slots: the largest magnitude of each parameter's entries."""
    p, _, _, _, valid, position = _slots(parameters, chunks, used, index)
    bits = tl.where(valid, _magnitude(tl.load(v + position, mask=valid, other=0)), 0)
    tl.atomic_max(work + 1 + p, tl.max(bits, 0).to(tl.int64), sem="relaxed")


@triton.jit
def _exponent(largest, v):
    """The exponent that goes with a parameter's largest magnitude."""
    _, infinity = _greatest(v)
    if v.dtype.element_ty == tl.float32:
        double = largest.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True)
    else:
        double = largest
    exponent = tl.maximum(tl.where(largest == 0, 0, (double >> 52) - 1022) - TOP, -1022)
    return tl.where(largest >= infinity, NONFINITE, exponent)


@triton.jit
def _code(y, WIRE: tl.constexpr):
    """float32 -> the nearest number of the wire's dtype, ties to even: its bits, and itself as float64."""
    if WIRE == tl.float32:
        return y.to(tl.int32, bitcast=True).to(tl.int64), y.to(tl.float64)
    elif WIRE == tl.float16:
        half = y.to(tl.float16)
        return half.to(tl.int16, bitcast=True).to(tl.int64), half.to(tl.float64)
    else:
        bits = y.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.int64), (bits << 16).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _digest(bits, half, WIDE: tl.constexpr):
    """What 16 bits, at such a place counted in 16 bits, add to the two sums of the checksum; WIDE: 32 bits."""
    if WIDE:
        word = bits & 0xFFFFFFFF
    else:
        word = (bits & 0xFFFF) << (16 * (half % 2))
    return tl.sum(word), tl.sum(word * (half // 2 + 1))


@triton.jit
def _low_word(x):
    return (x & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _write(u, v, parameters, chunks, used, index, work, flags, message16, message32, count, values_at, positions_at,
           exponents_at, words, MASKING: tl.constexpr, FLAGS: tl.constexpr, WIRE: tl.constexpr):
    """One program a chunk of slots: takes the entries out of v and writes their part of the message.

    Where a gradient was not finite, the message says which, and nothing is taken.
    """
    p, here, begin, slot, valid, position = _slots(parameters, chunks, used, index)
    exponent = _exponent(tl.load(work + 1 + p), v)
    valid = valid & (exponent != NONFINITE)
    if FLAGS:
        silent = tl.load(flags + count) != 0
        valid = valid & (silent == 0)
        exponent = tl.where(silent, tl.where(tl.load(flags + p) != 0, NONFINITE, 0), exponent)
    power = tl.where(exponent == NONFINITE, 0, exponent)
    x = tl.load(v + position, mask=valid, other=0)
    bits, value = _code((x.to(tl.float64) * _power_of_two(-power)).to(tl.float32), WIRE)
    bits = tl.where(valid, bits, 0)
    sent = tl.where(valid, (value * _power_of_two(power)).to(x.dtype), 0)
    tl.store(v + position, x - sent, mask=valid)
    if MASKING:
        tl.store(u + position, sent * 0, mask=valid & (sent != 0))
    tl.atomic_add(work, tl.sum((sent != 0).to(tl.int64)), sem="relaxed")

    local = position - tl.load(here + OFFSET)
    block = tl.load(here + FIRST_BLOCK) + local // BLOCK
    one = valid.to(tl.int32)
    tl.atomic_add(message32 + block, one, mask=valid, sem="relaxed")
    a, b = tl.sum(one.to(tl.int64)), tl.sum(one * (block + 1))
    if WIRE == tl.float32:
        half = values_at + 2 * slot
        tl.store(message32 + half // 2, bits.to(tl.int32), mask=valid)
        c, d = _digest(bits, half, True)
    else:
        half = values_at + slot
        tl.store(message16 + half, bits.to(tl.int16), mask=valid)
        c, d = _digest(bits, half, False)
    a, b = a + c, b + d
    half, bits = positions_at + slot, tl.where(valid, local % BLOCK, 0)
    tl.store(message16 + half, bits.to(tl.int16), mask=valid)
    c, d = _digest(bits, half, False)
    a, b = a + c, b + d
    if begin == 0:
        half = exponents_at + p
        tl.store(message16 + half, exponent.to(tl.int16))
        word = (exponent & 0xFFFF) << (16 * (half % 2))
        a, b = a + word, b + word * (half // 2 + 1)
    tl.atomic_add(message32 + words, _low_word(a), sem="relaxed")
    tl.atomic_add(message32 + words + 1, _low_word(b), sem="relaxed")


# -- receive -----------------------------------------------------------------------------------------------------------

@triton.jit
def _sums(messages, sums, words):
    """The two sums of each message's checksum: one program for a part of a message."""
    r = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    word = tl.load(messages + r * (words + 2) + i, mask=i < words, other=0).to(tl.int64)
    tl.atomic_add(sums + 2 * r, _low_word(tl.sum(word)), sem="relaxed")
    tl.atomic_add(sums + 2 * r + 1, _low_word(tl.sum(word * (i + 1))), sem="relaxed")


@triton.jit
def _check(message16, message32, sums, verdict, slots, parameters, blocks, count, blocks_count, positions_at,
           exponents_at, words):
    """One program for each block and message, and one for each parameter and message: looks for what no rank with this
    layout writes, and notes the slot at which the block begins. Reads nothing outside the message, whatever it says.
    """
    b, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    message16 += r * (2 * words + 4)
    message32 += r * (words + 2)
    mine = verdict + 1 + r * (count + 2)  # checksum, counts and positions, then the parameters
    if b >= blocks_count:
        p = b - blocks_count
        if tl.load(message16 + exponents_at + p) == NONFINITE:
            tl.store(mine + 2 + p, 1)
            tl.store(verdict, 1)
        if p == 0:
            a = tl.load(sums + 2 * r) == tl.load(message32 + words)
            if (a & (tl.load(sums + 2 * r + 1) == tl.load(message32 + words + 1))) == 0:
                tl.store(mine, 1)
                tl.store(verdict, 1)
        return
    _, here, first_block, _, size = _block(parameters, blocks, b)
    n, before = tl.load(message32 + b).to(tl.int64), tl.full([], 0, tl.int64)
    for c in range(first_block, b, 1024):
        i = c + tl.arange(0, 1024)
        before += tl.sum(tl.load(message32 + i, mask=i < b, other=0).to(tl.int64))
    start = tl.load(here + START) + before
    sound = (n >= 0) & (n <= size) & (before >= 0) & (before + n <= tl.load(here + K))
    tl.store(slots + r * blocks_count + b, start)
    worst = tl.full([], 0, tl.int32)
    for c in range(0, tl.where(sound, n, 0), ENTRIES):
        i = c + tl.arange(0, ENTRIES)
        position = tl.load(message16 + positions_at + start + i, mask=i < n, other=0).to(tl.int32) & (BLOCK - 1)
        worst = tl.maximum(worst, tl.max(position, 0))
    if (sound & (worst < size)) == 0:
        tl.store(mine + 1, 1)
        tl.store(verdict, 1)


@triton.jit
def _values(message16, message32, slot, mask, values_at, power, dtype: tl.constexpr, WIRE: tl.constexpr):
    """What slots say, in the residual's dtype."""
    if WIRE == tl.float32:
        value = tl.load(message32 + values_at // 2 + slot, mask=mask, other=0).to(tl.float32, bitcast=True)
    elif WIRE == tl.float16:
        value = tl.load(message16 + values_at + slot, mask=mask, other=0).to(tl.float16, bitcast=True)
    else:
        bits = tl.load(message16 + values_at + slot, mask=mask, other=0).to(tl.int32)
        value = (bits << 16).to(tl.float32, bitcast=True)
    return (value.to(tl.float64) * power).to(dtype)


@triton.jit
def _receive(message16, message32, slots, verdict, parameters, blocks, table, total, senders, count, blocks_count,
             values_at, positions_at, exponents_at, words, ADD: tl.constexpr, WIRE: tl.constexpr):
    """One program a block: adds up what all messages say there, in the order of ranks, and divides.

    ``total`` need not hold anything before; only where there are entries it is looked at. The threads of a program
    meet at a barrier before one reads what another wrote.
    """
    b = tl.program_id(0)
    p, here, _, begin, size = _block(parameters, blocks, b)
    address = tl.load(table + p)
    if address == 0:
        return
    dtype: tl.constexpr = total.dtype.element_ty
    target = address.to(tl.pointer_type(dtype)) + begin
    if not ADD:
        for i in range(0, size, TILE):
            local = i + tl.arange(0, TILE)
            tl.store(target + local, tl.zeros([TILE], dtype), mask=local < size)
    if tl.load(verdict) != 0:
        return
    total += tl.load(here + OFFSET) + begin
    rate = tl.load(table + count + p).to(tl.float64, bitcast=True).to(dtype)
    divisor = tl.load(table + 2 * count).to(tl.float64, bitcast=True).to(dtype)
    row = words + 2
    for r in range(0, senders):
        n, start = tl.load(message32 + r * row + b), tl.load(slots + r * blocks_count + b)
        for c in range(0, n, ENTRIES):
            i = c + tl.arange(0, ENTRIES)
            at = tl.load(message16 + r * 2 * row + positions_at + start + i, mask=i < n, other=0).to(tl.int32)
            tl.store(total + (at & (BLOCK - 1)), tl.zeros([ENTRIES], dtype), mask=i < n)
    for r in range(0, senders):
        tl.debug_barrier()
        n, start = tl.load(message32 + r * row + b), tl.load(slots + r * blocks_count + b)
        power = _power_of_two(tl.load(message16 + r * 2 * row + exponents_at + p))
        for c in range(0, n, ENTRIES):
            i = c + tl.arange(0, ENTRIES)
            at = tl.load(message16 + r * 2 * row + positions_at + start + i, mask=i < n, other=0).to(tl.int32)
            at = at & (BLOCK - 1)
            value = _values(message16 + r * 2 * row, message32 + r * row, start + i, i < n, values_at, power, dtype,
                            WIRE)
            tl.store(total + at, tl.load(total + at, mask=i < n, other=0) + value, mask=i < n)
    for r in range(0, senders):
        tl.debug_barrier()
        n, start = tl.load(message32 + r * row + b), tl.load(slots + r * blocks_count + b)
        for c in range(0, n, ENTRIES):
            i = c + tl.arange(0, ENTRIES)
            at = tl.load(message16 + r * 2 * row + positions_at + start + i, mask=i < n, other=0).to(tl.int32)
            at = at & (BLOCK - 1)
            x = tl.load(total + at, mask=i < n, other=0)
            fresh = (i < n) & (x != 0)  # not yet, by an earlier message
            x = _divided(x, divisor + x * 0)
            if ADD:
                x = tl.load(target + at, mask=fresh, other=0) + rate * x
            tl.store(target + at, x, mask=fresh)
            tl.store(total + at, x * 0, mask=fresh)


@triton.jit
def _decay(p, w, n, m, decay, lr, NESTEROV_KIND: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(p + i, mask=i < n, other=0)
    term = x * decay
    y = m * tl.load(w + i, mask=i < n, other=0) + term
    tl.store(w + i, y, mask=i < n)
    if NESTEROV_KIND:
        y = m * y + term
    tl.store(p + i, x - lr * y, mask=i < n)
