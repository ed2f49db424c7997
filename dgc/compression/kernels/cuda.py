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
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgc.compression.device import tensor_of
from dgc.compression.kernels import plain
from dgc.compression.kernels.rows_cuda import read, write, write_all
from dgc.compression.residual import Gradient, Residual
from dgc.compression.select import DEVIATIONS
from dgc.compression.wire import Layout, tables_of
from dgc.trace import stage

if int(triton.__version__.split(".")[0]) < 3:
    raise ImportError(f"Triton must be 3.0 or later, got {triton.__version__}")

ABSENT = tl.constexpr(0)  # what happens to a parameter: no gradient, no momentum, and the two kinds of it
PLAIN = tl.constexpr(1)
HEAVY = tl.constexpr(2)
NESTEROV = tl.constexpr(3)

BLOCK = tl.constexpr(1 << 16)
TILE = tl.constexpr(4096)  # entries that a program accumulates; a block is 16 of them
TILES = tl.constexpr((1 << 16) // 4096)
SAMPLE = tl.constexpr(8192)  # entries of a parameter that are sampled; all, if it has no more
SECTOR = tl.constexpr(8)  # neighbours sampled together: a sector of memory
ROUND_BITS = tl.constexpr(12)  # by which a round narrows the interval
BINS = tl.constexpr(4096)  # 2^ROUND_BITS
LEADING = tl.constexpr(20)  # bits of a magnitude that the sampled interval is told apart by
MAX_TILE_ROOM = 512  # places to note in a tile; where more are needed, v is read again

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
    """The greatest such integer; v tells the type."""
    if v.dtype.element_ty == tl.float32:
        return tl.full([], 0x7FFFFFFF, tl.int64)
    else:
        return tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)


@triton.jit
def _moved(kind, u, v, g, m):
    """u and v after a step (paper, equation 4 and appendix B). Launched without fused multiply-add, so that every
    operation is rounded, as the twin's are.
    """
    y = m * u + g
    nesterov = (v + g) + m * y
    return y, tl.where(kind == HEAVY, v + y, tl.where(kind == NESTEROV, nesterov, v + g))


@triton.jit
def _gradient(table, scale, like, p, begin, i, mask, v, SCALED: tl.constexpr, ALIGNED: tl.constexpr):
    """Entries begin + i of parameter p's gradient, clipped, in the residual's dtype; its own is that of ``like``."""
    g = tl.load(table + p).to(like.dtype)
    if ALIGNED:
        g = tl.multiple_of(g, 16)
    x = tl.load(g + begin + i, mask=mask, other=0).to(v.dtype.element_ty)
    if SCALED == 1:
        x = x * tl.load(scale)
    if SCALED == 2:
        x = x * tl.load(scale + p)
    return x


@triton.jit
def _shift(first, last):
    """The width of a bin, as a power of two, with which the bins cover first to last."""
    i = tl.arange(0, 64)
    return tl.sum((((last - first) >> tl.minimum(i + ROUND_BITS, 63)) > 0).to(tl.int64)).to(tl.int64)


# -- an interval from a sample -----------------------------------------------------------------------------------------

@triton.jit
def _scattered(i, numel, step):
    """The entries sampled of a parameter with more than SAMPLE: one line at random, yet the same on every run, from
    each of as many equal parts as there are lines.
    """
    part, parts, lines = i // SECTOR, SAMPLE // SECTOR, numel // SECTOR
    begin, end = part * lines // parts, (part + 1) * lines // parts
    hashed = (part * 0x9E3779B1 + step * 0x85EBCA6B) & 0xFFFFFFFF
    hashed = ((hashed ^ (hashed >> 16)) * 0x045D9F3B) & 0xFFFFFFFF
    hashed = ((hashed ^ (hashed >> 16)) * 0x045D9F3B) & 0xFFFFFFFF
    return (begin + (hashed ^ (hashed >> 16)) % (end - begin)) * SECTOR + i % SECTOR


@triton.jit(do_not_specialize=["step", "count"])
def _sample(u, v, table, scale, like, parameters, state, histogram, above, crowded, flags, used, step, count,
            SCALED: tl.constexpr, VELOCITY: tl.constexpr, ROUNDS: tl.constexpr):
    """One program a parameter: two magnitudes that its k-th largest v, as it will be, should lie between. And sets to
    zero what the other launches add to.
    """
    p = tl.program_id(0)
    here, out = parameters + p * PARAMETER, state + p * STATE
    numel, k, kind = tl.load(here + NUMEL), tl.load(here + K), tl.load(table + count + p)
    greatest = _greatest(v)
    for r in range(ROUNDS):
        tl.store(histogram + (r * count + p) * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
        tl.store(above + r * count + p, 0)
    for c in range(0, (numel + BLOCK - 1) // BLOCK, 1024):
        i = c + tl.arange(0, 1024)
        tl.store(crowded + tl.load(here + FIRST_BLOCK) + i, i * 0, mask=i * BLOCK < numel)
    tl.store(flags + p, 0)
    tl.store(flags + count, 0)
    tl.store(used + p, 0)
    tl.store(out + 4, 0)
    if (kind == ABSENT) | (k == 0):
        tl.store(out, greatest)
        tl.store(out + 1, greatest)
        tl.store(out + 2, -1)
        tl.store(out + 3, 0)
        return
    i = tl.arange(0, SAMPLE).to(tl.int64)
    if numel > SAMPLE:
        i = _scattered(i, numel, step.to(tl.int64))
    mask, at = i < numel, tl.load(here + OFFSET) + i
    g = _gradient(table, scale, like, p, 0, i, mask, v, SCALED, False)
    m = tl.load(table + 2 * count + p).to(tl.float64, bitcast=True).to(v.dtype.element_ty)
    before = tl.zeros_like(g)
    if VELOCITY:
        before = tl.load(u + at, mask=mask & (kind != PLAIN), other=0)
    _, x = _moved(kind, before, tl.load(v + at, mask=mask, other=0), g, m)
    trailing: tl.constexpr = 31 - LEADING if v.dtype.element_ty == tl.float32 else 63 - LEADING
    bits = tl.where(mask, _magnitude(x) >> trailing, 0).to(tl.int32)
    upper, lower = tl.load(here + UPPER), tl.load(here + LOWER)
    high, low = upper.to(tl.int32) * 0, upper.to(tl.int32) * 0
    bit = tl.full([], 1, tl.int32) << (LEADING - 1)
    while bit > 0:
        high = tl.where(tl.sum((bits >= (high | bit)).to(tl.int32)) >= upper, high | bit, high)
        low = tl.where(tl.sum((bits >= (low | bit)).to(tl.int32)) >= lower, low | bit, low)
        bit = bit >> 1
    first = tl.maximum(low.to(tl.int64) << trailing, 1)
    last = ((high.to(tl.int64) + 1) << trailing) - 1
    tl.store(out, first)
    tl.store(out + 1, last)
    tl.store(out + 2, _shift(first, last))
    tl.store(out + 3, k)


# -- accumulate, and note what may be large ----------------------------------------------------------------------------

@triton.jit(do_not_specialize=["count"])
def _accumulate(u, v, table, scale, like, parameters, tiles, squares, flags, state, histogram, above, crowded, marks,
                places, found, count, SCALED: tl.constexpr, VELOCITY: tl.constexpr, SELECT: tl.constexpr,
                ROOM: tl.constexpr, ALIGNED: tl.constexpr):
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
    i = tl.arange(0, TILE)
    mask = i < tl.minimum(numel - begin, TILE).to(tl.int32)
    g = _gradient(table, scale, like, p, begin, i, mask, v, SCALED, ALIGNED)
    us, vs = u + (offset + begin), v + (offset + begin)
    finite = tl.abs(g) < float("inf")
    if tl.sum((~finite).to(tl.int32)) > 0:
        tl.store(flags + p, 1)
        tl.store(flags + count, 1)
    g = tl.where(finite, g, 0)
    tl.store(squares + t, tl.sum(g * g))
    m = tl.load(table + 2 * count + p).to(tl.float64, bitcast=True).to(v.dtype.element_ty)
    before = tl.zeros_like(g)
    if VELOCITY:
        before = tl.load(us + i, mask=mask & (kind != PLAIN), other=0)
    y, x = _moved(kind, before, tl.load(vs + i, mask=mask, other=0), g, m)
    if VELOCITY:
        tl.store(us + i, y, mask=mask & (kind != PLAIN))
    tl.store(vs + i, x, mask=mask)
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
                tl.store(places + slot, i.to(tl.int16), mask=reached)
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
    return p, here, first_block, begin, tl.minimum(tl.load(here + NUMEL) - begin, BLOCK).to(tl.int32)


@triton.jit
def _count_bins(histogram, bits, first, last, shift):
    first, last, shift = first.to(bits.dtype), last.to(bits.dtype), shift.to(bits.dtype)
    within = (bits >= first) & (bits <= last)
    tl.atomic_add(histogram + ((bits - first) >> shift), 1, mask=within, sem="relaxed")


@triton.jit(do_not_specialize=["count", "before", "after"])
def _narrow(v, parameters, blocks, state, histogram, above, crowded, marks, places, found, count, before, after,
            ROOM: tl.constexpr):
    """One program a block: takes the histogram ``before`` to narrow the interval, and adds to the one ``after``."""
    b = tl.program_id(0)
    p, here, first_block, begin, size = _block(parameters, blocks, b)
    greatest = _greatest(v)
    row = before * count + p
    first, last, shift, need, wide = _narrowed(state + row * STATE, histogram + row * BINS, above + row, greatest)
    row = after * count + p
    if b == first_block:
        _keep(state + row * STATE, first, last, shift, need, wide)
    if shift >= 0:
        if wide + tl.load(crowded + b) > 0:
            vs = v + (tl.load(here + OFFSET) + begin)
            for z in range(0, size, TILE):
                i = z + tl.arange(0, TILE)
                bits = _magnitude(tl.load(vs + i, mask=i < size, other=0))
                _count_bins(histogram + row * BINS, bits, first, last, shift)
        else:
            tile = tl.load(here + FIRST_TILE) + begin // TILE
            bits, _local = _noted(marks, places, found, tile, (size + TILE - 1) // TILE, ROOM)
            _count_bins(histogram + row * BINS, bits, first, last, shift)


# -- write down where the largest are ----------------------------------------------------------------------------------

@triton.jit(do_not_specialize=["count", "before", "after"])
def _tally(v, parameters, blocks, state, histogram, above, crowded, marks, places, found, larger, equal, count, before,
           after, ROOM: tl.constexpr):
    """One program a block: how many of its entries are larger than the k-th largest, and how many as large."""
    b = tl.program_id(0)
    p, here, first_block, begin, size = _block(parameters, blocks, b)
    greatest = _greatest(v)
    row = before * count + p
    kth, last, shift, need, wide = _narrowed(state + row * STATE, histogram + row * BINS, above + row, greatest)
    if b == first_block:
        _keep(state + (after * count + p) * STATE, kth, last, shift, need, wide)
    more, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    if wide + tl.load(crowded + b) > 0:
        vs = v + (tl.load(here + OFFSET) + begin)
        for z in range(0, size, TILE):
            i = z + tl.arange(0, TILE)
            bits = _magnitude(tl.load(vs + i, mask=i < size, other=0))
            more += tl.sum((bits > kth.to(bits.dtype)).to(tl.int32))
            ties += tl.sum((bits == kth.to(bits.dtype)).to(tl.int32))
    else:
        tile = tl.load(here + FIRST_TILE) + begin // TILE
        bits, _local = _noted(marks, places, found, tile, (size + TILE - 1) // TILE, ROOM)
        more += tl.sum((bits > kth.to(bits.dtype)).to(tl.int32))
        ties += tl.sum((bits == kth.to(bits.dtype)).to(tl.int32))
    tl.store(larger + b, more)
    tl.store(equal + b, ties)


@triton.jit
def _put(index, at, end, start, i, bits, kth, need, ties):
    """Writes the positions start + i of those that are sent to index[at:end]. Returns where to go on, and the ties so
    far.
    """
    tie = bits == kth
    left = tl.minimum(tl.maximum(need - ties, 0), BLOCK).to(tl.int32)
    chosen = (bits > kth) | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= left))
    rank = tl.cumsum(chosen.to(tl.int32), 0)
    tl.store(index + at + (rank - 1), start + i, mask=chosen & (rank <= tl.minimum(end - at, BLOCK).to(tl.int32)))
    return at + tl.sum(chosen.to(tl.int32)), ties + tl.sum(tie.to(tl.int32))


@triton.jit(do_not_specialize=["count", "after"])
def _choose(v, parameters, blocks, state, crowded, marks, places, found, larger, equal, index, used, count, after,
            ROOM: tl.constexpr):
    """One program a block: writes down the positions of those that are sent, ascending; ties go to the first."""
    b = tl.program_id(0)
    p, here, first_block, begin, size = _block(parameters, blocks, b)
    state += (after * count + p) * STATE
    kth, need, wide = tl.load(state), tl.load(state + 3), tl.load(state + 4)
    more, ties = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)  # in the blocks before this one
    for c in range(first_block, b, 1024):
        block = c + tl.arange(0, 1024)
        more += tl.sum(tl.load(larger + block, mask=block < b, other=0).to(tl.int64))
        ties += tl.sum(tl.load(equal + block, mask=block < b, other=0).to(tl.int64))
    start, offset = tl.load(here + START), tl.load(here + OFFSET)
    at, end = start + more + tl.minimum(ties, need), start + tl.load(here + K)
    if wide + tl.load(crowded + b) > 0:
        for z in range(0, size, TILE):
            i = z + tl.arange(0, TILE)
            bits = _magnitude(tl.load(v + (offset + begin) + i, mask=i < size, other=0))
            at, ties = _put(index, at, end, offset + begin, i, bits, kth.to(bits.dtype), need, ties)
    else:
        tile = tl.load(here + FIRST_TILE) + begin // TILE
        bits, local = _noted(marks, places, found, tile, (size + TILE - 1) // TILE, ROOM)
        at, ties = _put(index, at, end, offset + begin, local, bits, kth.to(bits.dtype), need, ties)
    if begin + size == tl.load(here + NUMEL):
        tl.store(used + p, at - start)
        for c in range(at, end, 1024):  # unused slots point at an entry too
            slot = c + tl.arange(0, 1024)
            tl.store(index + slot, offset + slot * 0, mask=slot < end)


# -- weight decay -----------------------------------------------------------------------------------------------------

@triton.jit(do_not_specialize=["n"])
def _decay(p, w, n, m, decay, lr, LOOKS_AHEAD: tl.constexpr):
    begin, i = tl.program_id(0).to(tl.int64) * TILE, tl.arange(0, TILE)
    p, w, n = p + begin, w + begin, tl.minimum(n - begin, TILE).to(tl.int32)
    x = tl.load(p + i, mask=i < n, other=0)
    term = x * decay
    y = m * tl.load(w + i, mask=i < n, other=0) + term
    tl.store(w + i, y, mask=i < n)
    if LOOKS_AHEAD:
        y = m * y + term
    tl.store(p + i, x - lr * y, mask=i < n)


# -- the doors ---------------------------------------------------------------------------------------------------------

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


class _Tables:
    """A layout's numbers, on its device."""

    def __init__(self, layout: Layout):
        rows: list[list[int]] = []
        tiles: list[tuple[int, int]] = []  # parameter, and where it begins there
        blocks: list[int] = []  # parameter
        for p, (numel, slots) in enumerate(zip(layout.numels, layout.counts, strict=True)):
            k, first_tile = min(slots, numel), len(tiles)
            rows.append([layout.offsets[p], numel, k, layout.starts[p], len(blocks), first_tile,
                         *_ranks(numel, k)])
            tiles += [(p, begin) for begin in range(0, numel, TILE.value)]
            blocks += [p] * -(-numel // BLOCK.value)
        self.tiles_count, self.blocks_count = len(tiles), len(blocks)
        self.parameters, self.tiles, self.blocks = (
            tensor_of(numbers, layout.device) for numbers in (rows, tiles, blocks))
        expected = TILE.value * layout.slots / max(1, layout.numel)
        self.room = max(64, min(MAX_TILE_ROOM, 1 << math.ceil(math.log2(4 * expected + 1))))
        self.rounds = -(-(8 * layout.dtype.itemsize - 1) // ROUND_BITS.value)
        # As tl.multiple_of promises: of the entries that a thread reads or writes at once, 8 where gradients have 16
        # bits, the compiler then looks at the first one's mask alone.
        self.aligned = all(numel % 16 == 0 for numel in layout.numels)


def _ranks(numel: int, k: int) -> tuple[int, int]:
    """The ranks of a parameter's sample that its k-th largest should lie between."""
    if numel <= SAMPLE.value:
        return k, k
    hits = k * SAMPLE.value / numel
    return (max(1, math.floor(hits - DEVIATIONS * math.sqrt(hits))), math.ceil(hits + DEVIATIONS * math.sqrt(hits)))


def _table(layout: Layout) -> _Tables:
    return tables_of(layout, _Tables)


def _doubles(numbers: Sequence[float]) -> list[int]:
    """Their bits, to travel with addresses in one tensor."""
    return list(struct.unpack(f"={len(numbers)}q", struct.pack(f"={len(numbers)}d", *numbers)))


class _Gradients:
    """The gradients of a bucket as a table of addresses, kinds and momenta on the device, and their scales."""

    def __init__(self, residual: Residual, gradients: Mapping[str, Gradient],
                 scale: Tensor | Mapping[str, Tensor] | None):
        dtype, device = residual.v.dtype, residual.v.device
        given = [gradients.get(name) for name in residual.names]
        dtypes = {gradient.g.dtype for gradient in given if gradient is not None}
        common = next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= _TYPES.keys() else dtype
        self._alive = [None if gradient is None else residual.in_order(p, gradient.g.detach()).to(common).contiguous()
                       for p, gradient in enumerate(given)]
        addresses = [0 if g is None else g.data_ptr() for g in self._alive]
        kinds = [_kind(residual, gradient) for gradient in given]
        momenta = _doubles([0.0 if gradient is None else float(gradient.momentum) for gradient in given])
        self.table = tensor_of([addresses, kinds, momenta], device)
        self.like, self.aligned = torch.empty(0, dtype=common, device=device), all(a % 16 == 0 for a in addresses)
        self.scaled, self.scale = 0, residual.v
        if isinstance(scale, Mapping):
            one = torch.ones((), dtype=dtype, device=device)
            self.scaled, self.scale = 2, torch.stack([
                scale[name].to(device, dtype, non_blocking=True) if name in gradients else one
                for name in residual.names])
        elif scale is not None:
            self.scaled, self.scale = 1, scale.to(device, dtype, non_blocking=True)


def _kind(residual: Residual, gradient: Gradient | None) -> int:
    if gradient is None:
        return ABSENT.value
    if residual.u is None or gradient.momentum == 0:
        return PLAIN.value
    return NESTEROV.value if gradient.nesterov else HEAVY.value


class _Selection:
    """The launches of one selection, and what they share."""

    def __init__(self, residual: Residual, local: _Gradients, layout: Layout):
        self.table, self.local, self.v = _table(layout), local, residual.v
        self.u = residual.v if residual.u is None else residual.u
        self.count, rounds = len(residual.names), self.table.rounds + 1
        new = residual.v.new_empty
        self.state = new((rounds + 1) * self.count * STATE.value, dtype=torch.int64)
        self.histogram = new(rounds * self.count * BINS.value, dtype=torch.int32)
        self.above = new(rounds * self.count, dtype=torch.int32)
        self.crowded, self.larger, self.equal = (new(self.table.blocks_count, dtype=torch.int32) for _ in range(3))
        self.found = new(self.table.tiles_count, dtype=torch.int32)
        notes = self.table.tiles_count * self.table.room
        self.marks = new(notes, dtype=torch.int32 if residual.v.itemsize == 4 else torch.int64)
        self.places = new(notes, dtype=torch.int16)
        self.squares = new(self.table.tiles_count)
        self.flags = new(self.count + 1, dtype=torch.int32)
        self.index, self.used = new(layout.slots, dtype=torch.int64), new(self.count, dtype=torch.int64)
        self.options = {"SCALED": local.scaled, "VELOCITY": residual.u is not None}

    def accumulate(self, step: int) -> None:
        table, local = self.table, self.local
        _sample[(self.count,)](
            self.u, self.v, local.table, local.scale, local.like, table.parameters, self.state, self.histogram,
            self.above, self.crowded, self.flags, self.used, step, self.count, ROUNDS=table.rounds + 1,
            **self.options, num_warps=8, enable_fp_fusion=False)
        if table.tiles_count:
            _accumulate[(table.tiles_count,)](
                self.u, self.v, local.table, local.scale, local.like, table.parameters, table.tiles, self.squares,
                self.flags, self.state, self.histogram, self.above, self.crowded, self.marks, self.places, self.found,
                self.count, SELECT=True, ROOM=table.room, ALIGNED=local.aligned and table.aligned, **self.options,
                num_warps=8, enable_fp_fusion=False)

    def choose(self) -> None:
        table = self.table
        grid = table.blocks_count,
        if not table.blocks_count:
            return
        noted = self.crowded, self.marks, self.places, self.found
        for r in range(table.rounds):
            _narrow[grid](self.v, table.parameters, table.blocks, self.state, self.histogram, self.above, *noted,
                          self.count, r, r + 1, ROOM=table.room, num_warps=8)
        _tally[grid](self.v, table.parameters, table.blocks, self.state, self.histogram, self.above, *noted,
                     self.larger, self.equal, self.count, table.rounds, table.rounds + 1, ROOM=table.room, num_warps=8)
        _choose[grid](self.v, table.parameters, table.blocks, self.state, *noted, self.larger, self.equal, self.index,
                      self.used, self.count, table.rounds + 1, ROOM=table.room, num_warps=8)


def accumulate(residual: Residual, gradients: Mapping[str, Gradient],
               scale: Tensor | Mapping[str, Tensor] | None, layout: Layout) -> list[str]:
    """As :func:`plain.accumulate`, but it names no parameters whose gradient is not finite: that would be a
    question to the device. It marks them in ``bucket.flags``.
    """
    with torch.cuda.device_of(residual.v):
        local, table, count = _Gradients(residual, gradients, scale), _table(layout), len(residual.names)
        u = residual.v if residual.u is None else residual.u
        squares = residual.v.new_zeros(table.tiles_count)
        residual.flags = torch.zeros(count + 1, dtype=torch.int32, device=residual.v.device)
        nothing = residual.v
        if table.tiles_count:
            _accumulate[(table.tiles_count,)](
                u, residual.v, local.table, local.scale, local.like, table.parameters, table.tiles, squares,
                residual.flags, nothing, nothing, nothing, nothing, nothing, nothing, nothing, count,
                SCALED=local.scaled, VELOCITY=residual.u is not None, SELECT=False, ROOM=64,
                ALIGNED=local.aligned and table.aligned,
                num_warps=8, enable_fp_fusion=False)
        residual.gradient_square = squares.sum()
    return []


def accumulate_and_select(residual: Residual, gradients: Mapping[str, Gradient],
                          scale: Tensor | Mapping[str, Tensor] | None,
                          layout: Layout, step: int) -> tuple[list[str], Tensor, Tensor]:
    """As :func:`plain.accumulate_and_select`, but as :func:`accumulate` it marks parameters whose gradient is not
    finite in ``residual.flags``, which :func:`encode` looks at there.
    """
    with torch.cuda.device_of(residual.v):
        selection = _Selection(residual, _Gradients(residual, gradients, scale), layout)
        with stage("dgc::accumulate"):
            selection.accumulate(step)
        selection.choose()
        residual.gradient_square, residual.flags = selection.squares.sum(), selection.flags
    return [], selection.index, selection.used


encode = partial(plain.encode, write=write)
encode_all = write_all
decode_all = partial(plain.decode_all, read=read)


class Received(plain.Received):
    """As :class:`plain.Received`."""

    read = staticmethod(read)


def decay(parameter: Tensor, buffer: Tensor, m: float, decay: float, lr: float, nesterov: bool) -> None:
    """As :func:`plain.decay`."""
    if parameter.dtype != torch.float32:  # Triton takes numbers as float32
        plain.decay(parameter, buffer, m, decay, lr, nesterov)
    elif parameter.numel():
        with torch.cuda.device_of(parameter):
            _decay[(triton.cdiv(parameter.numel(), TILE.value),)](
                parameter, buffer, parameter.numel(), float(m), float(decay), float(lr), LOOKS_AHEAD=nesterov,
                num_warps=8, enable_fp_fusion=False)
