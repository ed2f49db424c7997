"""The loops over a bucket, fused and compiled for the CPU with numba.

A step walks over u, v and the gradients once: what exceeds the sampled threshold is noted while it is in the cache.
Each loop works on a range of the bucket and releases the interpreter's lock, so that threads share it; numba's own
threads are not used, as they compete with torch's and must not be entered from two threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from dgc.compression.kernels import rows_cpu
from dgc.compression.kernels.jit import jit
from dgc.compression.kernels.numba_tools import (
    PREFETCH_DISTANCE,
    in_threads,
    lowest,
    pointer,
    prefetch,
    thread_ranges,
)
from dgc.compression.kernels.plain import read, write  # noqa: F401  # owners_cpu has its own
from dgc.compression.regions import Regions, Taken
from dgc.compression.residual import Gradient, Residual
from dgc.compression.select import DEVIATIONS, stride
from dgc.compression.sizes import LINE
from dgc.compression.wire import MIXER, NONFINITE, Layout, Rows, tables_of
from dgc.trace import stage

ABSENT, PLAIN, HEAVY, NESTEROV = range(4)  # what happens to a parameter: no gradient, no momentum, and the two kinds
BLOCK = 1 << 16  # entries of the update that are added up together
BINS = 4096  # of a histogram over the leading bits of a magnitude
PANEL = 1024  # entries whose squares are added up in the bucket's own precision
STRIP = 64  # entries that are added in together, and whose candidates are the bits of one integer
LANES = LINE  # entries in one operation, which becomes as many as the processor's vectors need
CHUNK = 1 << 18  # entries that a thread walks over before it asks for more
SLOTS_PER_THREAD = 1 << 15  # scattered entries that are worth another thread
NO_BLOCKS = np.empty(0, np.int64)
# What tells a loop the dtype behind an address.
LIKE: dict[torch.dtype, Any] = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}

_jit = jit(nogil=True, error_model="numpy", boundscheck=False)


# -- numba has no vectors ----------------------------------------------------------------------------------------------

def _everywhere(builder, number):
    """A number in every lane."""
    lanes, positions = ir.VectorType(number.type, LANES), ir.VectorType(ir.IntType(32), LANES)
    first = builder.insert_element(ir.Constant(lanes, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(positions, None))


def _parts(builder, address, real):
    """Pointers to a strip's entries at an address, LANES each."""
    pointer = builder.inttoptr(address, ir.VectorType(real, LANES).as_pointer())
    return [builder.gep(pointer, [ir.IntType(64)(part)]) for part in range(STRIP // LANES)]


@intrinsic
def _finite(typing_context, g, s):
    """Whether all of s g is, of a strip at the address g."""
    def generate(context, builder, signature, arguments):
        address, scale = arguments
        loaded = [builder.load(part, align=s.bitwidth // 8) for part in _parts(builder, address, scale.type)]
        scale = _everywhere(builder, scale)
        products = [builder.fmul(scale, gradient) for gradient in loaded]
        # What is finite less itself is 0, which every sum of these stays.
        nothing = reduce(builder.fadd, [builder.fsub(z, z) for z in products])
        ordered = builder.bitcast(builder.fcmp_ordered("ord", nothing, nothing), ir.IntType(LANES))
        return builder.icmp_signed("==", ordered, ir.IntType(LANES)(-1))

    return types.boolean(types.int64, s), generate


def _adds(kind):
    @intrinsic
    def add(typing_context, u, v, g, s, m, threshold, sums):
        """Adds s g into u and v, of which a strip each is at these addresses, and its squares to the LANES sums.

        Returns a bit for each |v| that reaches the threshold; the first entry's is the lowest.
        """
        def generate(context, builder, signature, arguments):
            *addresses, scale, momentum, least, total = arguments
            real, align = scale.type, s.bitwidth // 8
            scale, momentum, most = (_everywhere(builder, x) for x in (scale, momentum, builder.fneg(least)))
            least = _everywhere(builder, least)
            total = _parts(builder, total, real)[0]
            squares, bits = builder.load(total, align=align), ir.IntType(STRIP)(0)
            for part, pointers in enumerate(zip(*(_parts(builder, x, real) for x in addresses), strict=True)):
                old_u, old_v, gradient = (builder.load(pointer, align=align) for pointer in pointers)
                z = builder.fmul(scale, gradient)
                squares = builder.fadd(squares, builder.fmul(z, z))
                if kind == PLAIN:
                    x = builder.fadd(old_v, z)
                else:
                    y = builder.fadd(builder.fmul(momentum, old_u), z)
                    builder.store(y, pointers[0], align=align)
                    x = builder.fadd(old_v, y) if kind == HEAVY else builder.fadd(
                        builder.fadd(old_v, z), builder.fmul(momentum, y))
                builder.store(x, pointers[1], align=align)
                reached = builder.or_(builder.fcmp_ordered(">=", x, least), builder.fcmp_ordered("<=", x, most))
                some = builder.zext(builder.bitcast(reached, ir.IntType(LANES)), bits.type)
                bits = builder.or_(bits, builder.shl(some, bits.type(part * LANES)))
            builder.store(squares, total, align=align)
            return bits

        return types.int64(types.int64, types.int64, types.int64, s, m, threshold, types.int64), generate

    return add


@intrinsic
def _set_line_aside(typing_context, x, into, like):
    """Moves the line at the address x to the address ``into``, and leaves zeros."""
    def generate(context, builder, signature, arguments):
        line = ir.VectorType(arguments[2].type, LANES)
        x, into = (builder.inttoptr(address, line.as_pointer()) for address in arguments[:2])
        builder.store(builder.load(x, align=like.bitwidth // 8), into, align=like.bitwidth // 8)
        builder.store(ir.Constant(line, None), x, align=like.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, like), generate


@intrinsic
def _add_line_back(typing_context, x, by, like):
    """Adds the line at the address ``by`` to that at the address x."""
    def generate(context, builder, signature, arguments):
        line = ir.VectorType(arguments[2].type, LANES)
        x, by = (builder.inttoptr(address, line.as_pointer()) for address in arguments[:2])
        total = builder.fadd(*(builder.load(pointer, align=like.bitwidth // 8) for pointer in (x, by)))
        builder.store(total, x, align=like.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, like), generate


_plain, _heavy, _nesterov = _adds(PLAIN), _adds(HEAVY), _adds(NESTEROV)


# -- the k-th largest --------------------------------------------------------------------------------------------------

@_jit
def _kth(x, k):
    """The k-th largest of x, which this reorders (Hoare's selection)."""
    low, high, target = 0, len(x) - 1, k - 1
    while low < high:
        a, b, c = x[low], x[(low + high) // 2], x[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while x[i] > pivot:
                i += 1
            while x[j] < pivot:
                j -= 1
            if i <= j:
                x[i], x[j] = x[j], x[i]
                i += 1
                j -= 1
        if target <= j:
            high = j
        elif target >= i:
            low = i
        else:
            break
    return x[target]


@_jit
def _leading(bits, shift, k):
    """The leading bits of the k-th largest magnitude, and how many have these or higher ones.

    Args:
        bits: floating-point numbers as unsigned integers, whose order that of the magnitudes is.
        shift: to the leading bits.
    """
    histogram = np.zeros(BINS, np.int32)
    for i in range(len(bits)):
        histogram[(bits[i] >> shift) & (BINS - 1)] += 1
    b, above = BINS, 0
    while above < k:
        b -= 1
        above += histogram[b]
    return b, above


# -- a region that is set aside ----------------------------------------------------------------------------------------

@_jit
def _aside(v, low, high, blocks, at, ahead, kept):
    """Sets what entries low to high have in these blocks aside, to ``kept``, block after block, and leaves zeros.

    Args:
        blocks: int64, ascending: numbers of LINE entries each.
        at: a block from which on there may be some in it.
        ahead: how many blocks later one is fetched, as this is ahead of where the processor expects to be.

    Returns:
        The first that has.
    """
    while at < len(blocks) and (blocks[at] + 1) * LINE <= low:
        at += 1
    size, place = v.itemsize, 0
    for j in range(at, len(blocks)):
        first = blocks[j] * LINE
        if first >= high:
            break
        if j + ahead < len(blocks):
            prefetch(v.ctypes.data + blocks[j + ahead] * (LINE * size))
        if low <= first and first + LINE <= high:
            _set_line_aside(v.ctypes.data + first * size, kept.ctypes.data + place * size, v.dtype.type(0))
        else:
            for i in range(max(first, low), min(first + LINE, high)):
                kept[place + i - first], v[i] = v[i], 0
        place += LINE
    return at


@_jit
def _back(v, low, high, blocks, at, kept):
    """Adds back what :func:`_aside` has set aside."""
    size, place = v.itemsize, 0
    for j in range(at, len(blocks)):
        first = blocks[j] * LINE
        if first >= high:
            break
        if low <= first and first + LINE <= high:
            _add_line_back(v.ctypes.data + first * size, kept.ctypes.data + place * size, v.dtype.type(0))
        else:
            for i in range(max(first, low), min(first + LINE, high)):
                v[i] += kept[place + i - first]
        place += LINE


@_jit
def _without(kind, offset, n, blocks, u, v, g, s, m):
    """A copy of a parameter's v as it would be, had there been zeros in these blocks before the gradient was added."""
    seen, raw = v[offset:offset + n].copy(), numba.carray(pointer(g), n, v.dtype)
    for j in range(np.searchsorted(blocks, offset // LINE), len(blocks)):
        if blocks[j] * LINE >= offset + n:
            break
        for i in range(max(blocks[j] * LINE, offset), min(blocks[j] * LINE + LINE, offset + n)):
            x = s * raw[i - offset]
            if not abs(x) < np.inf:
                x = v.dtype.type(0)
            if kind == HEAVY:
                x = u[i]
            elif kind == NESTEROV:
                x = x + m * u[i]
            seen[i - offset] = x
    return seen


# -- accumulate, and note what may be large ----------------------------------------------------------------------------

@_jit
def _look(kind, u, v, g, s, m, threshold, line):
    """Computes a line's |v| as it will be. Returns how many reach the threshold."""
    us, vs = numba.carray(pointer(u), LINE, line.dtype), numba.carray(pointer(v), LINE, line.dtype)
    gs = numba.carray(pointer(g), LINE, line.dtype)
    reached = 0
    if kind == PLAIN:
        for i in range(LINE):
            line[i] = abs(vs[i] + s * gs[i])
    elif kind == HEAVY:
        for i in range(LINE):
            line[i] = abs(vs[i] + (m * us[i] + s * gs[i]))
    else:
        for i in range(LINE):
            line[i] = abs((vs[i] + s * gs[i]) + m * (m * us[i] + s * gs[i]))
    for i in range(LINE):
        reached += line[i] >= threshold
    return reached


@_jit
def _clear(v, first, blocks, line):
    """A copy of the line that begins at an entry, with zeros where it is in these blocks."""
    line[:] = v[first:first + LINE]
    for j in range(np.searchsorted(blocks, first // LINE), len(blocks)):
        if blocks[j] * LINE >= first + LINE:
            break
        for i in range(max(blocks[j] * LINE, first), min(blocks[j] * LINE + LINE, first + LINE)):
            line[i - first] = 0


@_jit
def _thresholds(first, last, step, grads, kinds, momenta, scales, offsets, numels, counts, strides, blocks, u, v, tiny,
                out):
    """Finds for each of the parameters first to last, from a sample, a magnitude that k entries or more of the v to
    come will reach; with zeros for the v of these blocks. Infinity where there is no gradient.
    """
    line, cleared = np.empty(LINE, v.dtype), np.empty(LINE, v.dtype)
    for p in range(first, last):
        out[p] = np.inf
        if kinds[p] == ABSENT:
            continue
        k, n, offset = counts[p], numels[p], offsets[p]
        every = strides[p]
        lines = n // LINE
        begin = step % every
        taken = (lines - begin + every - 1) // every * LINE
        hits = k * taken / n
        rank = k if every == 1 else math.ceil(hits + DEVIATIONS * math.sqrt(hits))
        if rank >= taken:
            out[p] = tiny
            continue
        largest = np.empty(2 * rank + LINE, v.dtype)  # of the sample so far, and a few more
        held, threshold = 0, tiny
        s, m = scales[p], momenta[p]
        for j in range(begin, lines, every):
            a = j * LINE
            if j + PREFETCH_DISTANCE * every < lines:
                ahead = (a + PREFETCH_DISTANCE * every * LINE) * v.itemsize
                prefetch(grads[p] + ahead)
                prefetch(v.ctypes.data + offset * v.itemsize + ahead)
                prefetch(u.ctypes.data + offset * v.itemsize + ahead)
            size, there = v.itemsize, offset + a
            at_v = np.int64(v.ctypes.data + there * size)
            if len(blocks):
                at_v = np.int64(cleared.ctypes.data)
                _clear(v, there, blocks, cleared)
            reached = _look(kinds[p], u.ctypes.data + there * size, at_v, grads[p] + a * size, s, m, threshold, line)
            if reached:
                for i in range(LINE):
                    if line[i] >= threshold:
                        largest[held] = line[i]
                        held += 1
            if held >= 2 * rank:
                threshold = _kth(largest[:held], rank)
                held = rank
        out[p] = _kth(largest[:held], rank) if held >= rank else tiny


@_jit
def _add(kind, u, v, g, s, m, threshold, sums):
    if kind == HEAVY:
        return _heavy(u, v, g, s, m, threshold, sums)
    if kind == NESTEROV:
        return _nesterov(u, v, g, s, m, threshold, sums)
    return _plain(u, v, g, s, m, threshold, sums)


@_jit
def _accumulate(start, end, chunk, grads, kinds, momenta, scales, offsets, numels, thresholds, limits, blocks, at, room,
                u, v, found, sizes, firsts, founds, bad):
    """Entries start to end of the bucket: adds the gradients in, and writes down where v then exceeds the threshold; of
    these blocks, where what is added does.

    Positions go to ``found`` and magnitudes to ``sizes`` at places ``at`` to ``room``. For each parameter p
    ``firsts[chunk, p]`` tells where they begin, and ``founds[chunk, p]`` how many there are; -1 if there were more
    than ``limits[p]``, or no room. What is not finite counts as 0, and marks its parameter in ``bad[chunk]``.

    Returns:
        The squared norm, and the place behind the last one used.
    """
    clean, sums, short = np.empty(STRIP, v.dtype), np.empty(LANES, v.dtype), np.empty((3, STRIP), v.dtype)
    at_u, at_v, at_short = np.int64(u.ctypes.data), np.int64(v.ctypes.data), np.int64(short.ctypes.data)
    kept, block = np.empty(PANEL + 2 * LINE if len(blocks) else 0, v.dtype), np.searchsorted(blocks, start // LINE)
    ahead = 2 * (PANEL * len(blocks) // len(v) + 1)
    size, total = v.itemsize, 0.0
    for p in range(len(numels)):
        offset, count = offsets[p], 0
        low, high = max(start, offset), min(end, offset + numels[p])
        firsts[chunk, p], founds[chunk, p] = at, 0
        if low >= high or kinds[p] == ABSENT:
            continue
        m, threshold, most = momenta[p], thresholds[p], min(limits[p], room - at)
        if threshold < 0:
            threshold = v.dtype.type(np.inf)
        for a in range(low, high, PANEL):
            sums[:] = 0
            if len(blocks):
                block = _aside(v, a, min(a + PANEL, high), blocks, block, ahead, kept)
            for here in range(a, min(a + PANEL, high), STRIP):
                width = min(STRIP, high - here)
                us, vs, g, s = at_u + here * size, at_v + here * size, grads[p] + (here - offset) * size, scales[p]
                if width < STRIP:  # the last one: with zeros as long as others
                    short[:] = 0
                    short[0, :width], short[1, :width] = u[here:here + width], v[here:here + width]
                    short[2, :width] = numba.carray(pointer(g), width, v.dtype)
                    us, vs, g = at_short, at_short + STRIP * size, at_short + 2 * STRIP * size
                if not _finite(g, s):
                    raw = numba.carray(pointer(g), STRIP, v.dtype)
                    for i in range(STRIP):
                        x = s * raw[i]
                        if not abs(x) < np.inf:
                            bad[chunk, p] = True
                            x = v.dtype.type(0)
                        clean[i] = x
                    s, g = v.dtype.type(1), np.int64(clean.ctypes.data)
                bits = _add(kinds[p], us, vs, g, s, m, threshold, sums.ctypes.data)
                if width < STRIP:
                    if kinds[p] != PLAIN:
                        u[here:here + width] = short[0, :width]
                    v[here:here + width] = short[1, :width]
                while bits:
                    i = here + lowest(bits)
                    bits &= bits - 1
                    if count < most:
                        found[at + count] = i
                        sizes[at + count] = abs(v[i])
                    count += 1
            if len(blocks):
                _back(v, a, min(a + PANEL, high), blocks, block, kept)
            for x in sums:
                total += x
        if count > most:
            founds[chunk, p] = -1
        else:
            founds[chunk, p] = count
            at += count
    return total, at


# -- select ------------------------------------------------------------------------------------------------------------

@_jit
def _keep(candidates, magnitudes, least, k, index, start):
    """Writes the candidates larger than the k-th, and of those as large the first, to index[start:]: k in all."""
    kept = np.empty(len(candidates) + 1, np.int64)
    ties, count = k, 0
    for i in range(len(candidates)):
        ties -= magnitudes[i] > least
    for i in range(len(candidates)):  # without a branch, which would be guessed wrong half the time
        tie = magnitudes[i] == least
        kept[count] = candidates[i]
        count += (magnitudes[i] > least) | (tie & (ties > 0))
        ties -= tie
    index[start:start + k] = kept[:k]
    return k


@_jit
def _largest(offset, n, k, v, bits, shift, index, start):
    """Chooses among all of a parameter's entries but those that are zero. Returns how many are chosen."""
    b, above = _leading(bits[offset:offset + n], shift, k)
    candidates, magnitudes = np.empty(above, np.int64), np.empty(above, v.dtype)
    count = 0
    for i in range(offset, offset + n):
        if (bits[i] >> shift) & (BINS - 1) >= b and v[i] != 0:
            size = abs(v[i])  # of what is not a number, infinity: sums of infinities, which are to be sent and told
            candidates[count], magnitudes[count] = i, size if size <= np.inf else np.inf
            count += 1
    if count <= k:
        index[start:start + count] = candidates[:count]
        return count
    return _keep(candidates[:count], magnitudes[:count], _kth(magnitudes[:count].copy(), k), k, index, start)


@_jit
def _choose(first, last, grads, kinds, momenta, scales, offsets, numels, counts, starts, thresholds, blocks, found,
            sizes, firsts, founds, u, v, bits, shift, index, used):
    """Chooses what parameters first to last send: positions, ascending, and how many. In these blocks only what was
    added to v counts.
    """
    for p in range(first, last):
        k, total = counts[p], 0
        used[p] = 0
        if kinds[p] == ABSENT:
            continue
        for w in range(len(founds)):
            total = total + founds[w, p] if founds[w, p] >= 0 and total >= 0 else -1
        if len(blocks) and total < k:
            seen = _without(kinds[p], offsets[p], numels[p], blocks, u, v, grads[p], scales[p], momenta[p])
            used[p] = _largest(0, numels[p], k, seen, seen.view(bits.dtype), shift, index, starts[p])
            index[starts[p]:starts[p] + used[p]] += offsets[p]
            continue
        if total < k:
            used[p] = _largest(offsets[p], numels[p], k, v, bits, shift, index, starts[p])
            continue
        candidates, magnitudes = np.empty(total, np.int64), np.empty(total, v.dtype)
        at = 0
        for w in range(len(founds)):
            for i in range(firsts[w, p], firsts[w, p] + founds[w, p]):
                candidates[at], magnitudes[at] = found[i], sizes[i]
                at += 1
        used[p] = _keep(candidates, magnitudes, _kth(magnitudes.copy(), k), k, index, starts[p])


# -- weight decay -----------------------------------------------------------------------------------------------------

@_jit
def _decay(start, end, p, w, m, decay, lr, nesterov, like):
    n = end - start
    ps = numba.carray(pointer(p + start * like.itemsize), n, like.dtype)
    ws = numba.carray(pointer(w + start * like.itemsize), n, like.dtype)
    for i in range(n):
        term = ps[i] * decay
        y = m * ws[i] + term
        ws[i] = y
        if nesterov:
            y = m * y + term
        ps[i] -= lr * y


# -- the update --------------------------------------------------------------------------------------------------------

@_jit
def owner_of(i, n):
    """The owner of an entry of a bucket (:class:`dgc.compression.regions.Regions`)."""
    return (i // LINE % n + turn(i // (LINE * n), n)) % n


@_jit
def turn(rounds, n):
    """The owner with which a round begins."""
    return ((np.int64(rounds) * MIXER & 0xFFFFFFFF) >> 12) % n


@_jit
def index_of(owner, local, n):
    """Where an entry of an owner's region is in the bucket."""
    rounds = local // LINE
    return (rounds * n + (owner - turn(rounds, n)) % n) * LINE + local % LINE


@_jit
def index_of_owners(places, used, n):
    """Puts the places of row r, in owner r's region, in terms of the bucket."""
    for r in range(len(used)):
        for j in range(used[r]):
            places[r, j] = index_of(r, places[r, j], n)


@_jit
def _scatter(begin, end, index, values, used, offsets, numels, divisor, targets, rates):
    """Entries begin to end of the bucket: adds up what all rows say and divides. Without ``rates`` the targets, one
    address for each parameter (0: skip it), are overwritten with it; else its product with the parameter's rate is
    added to them.
    """
    dtype = values.dtype
    like = np.empty(0, dtype)
    total, at = np.zeros(BLOCK, dtype), np.empty(len(used), np.int64)  # total is zero again after each block
    for r in range(len(used)):
        at[r] = np.searchsorted(index[r, :used[r]], begin)
    p, parameters = 0, len(numels)
    for low in range(begin, end, BLOCK):
        high = min(low + BLOCK, end)
        while p < parameters - 1 and offsets[p] + numels[p] <= low:
            p += 1
        q = p
        while not len(rates) and q < parameters and offsets[q] < high:
            a, b = max(low, offsets[q]) - offsets[q], min(high, offsets[q] + numels[q]) - offsets[q]
            if targets[q] and a < b:
                numba.carray(pointer(targets[q] + a * like.itemsize), b - a, dtype)[:] = 0
            q += 1
        for r in range(len(used)):
            for j in range(at[r], used[r]):
                if index[r, j] >= high:
                    break
                total[index[r, j] - low] += values[r, j]
        for r in range(len(used)):
            q = p
            target = numba.carray(pointer(targets[q]), numels[q], dtype)
            while at[r] < used[r] and index[r, at[r]] < high:
                i = index[r, at[r]]
                at[r] += 1
                x = total[i - low]
                if x != 0:  # not yet, by an earlier row
                    total[i - low] = 0
                    while i >= offsets[q] + numels[q]:
                        q += 1
                        target = numba.carray(pointer(targets[q]), numels[q], dtype)
                    if targets[q]:
                        x /= divisor
                        i -= offsets[q]
                        target[i] = target[i] + rates[q] * x if len(rates) else x


# -- the doors ---------------------------------------------------------------------------------------------------------

class _Tables:
    """A layout's numbers as arrays, and how its bucket is divided among threads."""

    def __init__(self, layout: Layout, threads: int):
        self.threads = threads
        self.numels, self.offsets, self.counts, self.starts = (
            np.array(x, np.int64) for x in (layout.numels, layout.offsets, layout.counts, layout.starts))
        self.strides = np.array([stride(k) for k in layout.counts], np.int64)
        chunks = 1 if threads == 1 else -(-layout.numel // CHUNK)
        cuts = [layout.numel * c // chunks // LINE * LINE for c in range(chunks)] + [layout.numel]
        self.chunks = list(pairwise(cuts))
        self.limits = np.minimum(self.numels, 4 * self.counts + PANEL)  # of what is noted to choose from
        parts = max(1, min(threads, layout.slots // SLOTS_PER_THREAD))
        cuts = [layout.numel * w // parts for w in range(parts + 1)]
        self.parameters = list(pairwise(np.searchsorted(self.offsets, cuts).tolist()))
        blocks = -(-layout.numel // BLOCK)
        self.blocks = [(a * BLOCK, min(layout.numel, b * BLOCK)) for a, b in thread_ranges(blocks, parts)]


def _table(layout: Layout) -> _Tables:
    return tables_of(layout, _Tables, torch.get_num_threads())


class _Gradients:
    """The gradients of a bucket as a table of addresses, which its loops can walk along."""

    def __init__(self, residual: Residual, gradients: Mapping[str, Gradient],
                 scale: Tensor | Mapping[str, Tensor] | None):
        dtype = residual.v.dtype
        n, real = len(residual.names), np.float32 if dtype == torch.float32 else np.float64
        self.addresses, self.kinds = np.zeros(n, np.int64), np.full(n, ABSENT, np.int64)
        self.momenta, self.scales = np.zeros(n, real), np.ones(n, real)
        self._alive = []  # while their addresses are in use
        common = None if scale is None or isinstance(scale, Mapping) else float(scale)
        for p, name in enumerate(residual.names):
            gradient = gradients.get(name)
            if gradient is None:
                continue
            g = residual.in_order(p, gradient.g)
            if g.dtype != dtype or not g.is_contiguous():
                g = g.to(dtype).contiguous()
            self._alive.append(g)
            self.addresses[p] = g.data_ptr()
            moving = residual.u is not None and gradient.momentum != 0
            self.kinds[p] = (NESTEROV if gradient.nesterov else HEAVY) if moving else PLAIN
            self.momenta[p] = gradient.momentum
            if common is not None:
                self.scales[p] = common
            elif isinstance(scale, Mapping):
                self.scales[p] = float(scale[name])


def accumulate(residual: Residual, gradients: Mapping[str, Gradient],
               scale: Tensor | Mapping[str, Tensor] | None, layout: Layout) -> list[str]:
    """As :func:`plain.accumulate`."""
    table, local = _table(layout), _Gradients(residual, gradients, scale)
    return _walk(residual, table, local, np.full(len(table.numels), -1, local.scales.dtype), NO_BLOCKS)[0]


def _walk(residual: Residual, table: _Tables, local: _Gradients, thresholds: Any,
          blocks: Any) -> tuple[list[str], Any, Any, Any, Any]:
    u, v = arrays(residual)
    room = int(table.limits.sum()) if (thresholds >= 0).any() else 0
    threads = min(table.threads, len(table.chunks))
    whole = threads * room >= residual.numel  # a chunk has no more to note than its own entries
    places = residual.numel if whole else threads * room
    found, sizes = np.empty(places, np.int64), np.empty(places, v.dtype)
    shape = len(table.chunks), len(table.numels)
    firsts, founds, bad = np.empty(shape, np.int64), np.empty(shape, np.int64), np.zeros(shape, np.bool_)
    regions = iter(range(threads))
    place: dict[int, list[int]] = {}  # of each thread: where its next note goes, and where its room ends

    def work(chunk: int, start: int, end: int) -> float:
        thread = threading.get_ident()
        if whole:
            place[thread] = [start, end]
        elif thread not in place:
            region = next(regions)
            place[thread] = [region * room, (region + 1) * room]
        at, end_of_room = place[thread]
        square, place[thread][0] = _accumulate(
            start, end, chunk, local.addresses, local.kinds, local.momenta, local.scales, table.offsets, table.numels,
            thresholds, table.limits, blocks, at, end_of_room, u, v, found, sizes, firsts, founds, bad)
        return square

    squares = in_threads(work, [(c, *chunk) for c, chunk in enumerate(table.chunks)], table.threads)
    residual.gradient_square = torch.tensor(sum(squares), dtype=residual.v.dtype, device="cpu")
    return [residual.names[p] for p in np.flatnonzero(bad.any(0))], found, sizes, firsts, founds


def arrays(residual: Residual) -> tuple[Any, Any]:
    v = residual.v.numpy()
    return v if residual.u is None else residual.u.numpy(), v


def accumulate_and_select(residual: Residual, gradients: Mapping[str, Gradient],
                          scale: Tensor | Mapping[str, Tensor] | None,
                          layout: Layout, step: int, blocks: Any = NO_BLOCKS) -> tuple[list[str], Tensor, Tensor]:
    """As :func:`plain.accumulate_and_select`.

    Args:
        blocks: int64, ascending, numbers of LINE entries each, where only what this step adds to v counts.
    """
    table, local, (u, v) = _table(layout), _Gradients(residual, gradients, scale), arrays(residual)
    single = v.itemsize == 4
    bits, shift = v.view(np.uint32 if single else np.uint64), 19 if single else 51
    tiny = np.ones(1, bits.dtype).view(v.dtype)[0]  # zeros are not worth sending
    thresholds = np.empty(len(table.numels), v.dtype)
    in_threads(lambda first, last: _thresholds(
        first, last, step, local.addresses, local.kinds, local.momenta, local.scales, table.offsets, table.numels,
        table.counts, table.strides, blocks, u, v, tiny, thresholds), table.parameters, table.threads)
    with stage("dgc::accumulate"):
        bad, found, sizes, firsts, founds = _walk(residual, table, local, thresholds, blocks)
    index, used = (torch.empty(n, dtype=torch.int64, device="cpu") for n in (layout.slots, len(table.numels)))
    positions, numbers = index.numpy(), used.numpy()
    in_threads(lambda first, last: _choose(
        first, last, local.addresses, local.kinds, local.momenta, local.scales, table.offsets, table.numels,
        table.counts, table.starts, thresholds, blocks, found, sizes, firsts, founds, u, v, bits, shift, positions,
        numbers), table.parameters, table.threads)
    return bad, index, used


def encode(residual: Residual, layout: Layout, index: Tensor, used: Tensor, refused: Tensor,
           masking: bool) -> tuple[Tensor, Taken]:
    """As :func:`plain.encode`."""
    if refused:
        residual.count(torch.tensor(0, device="cpu"))
        return layout.rows.status_message(1, NONFINITE), Taken(index[:0], residual.v[:0])
    chosen, numbers = index, used.tolist()
    if sum(numbers) < layout.slots:
        chosen = torch.cat([index[start:start + n] for start, n in zip(layout.starts, numbers, strict=True)])
    u, v = arrays(residual)
    message, sent, entries = rows_cpu.written(layout.rows, np.array([0, len(chosen)]), chosen.numpy(), 1, u, v,
                                              masking and residual.u is not None)
    residual.count(torch.tensor(entries, device="cpu"))
    return message, Taken(chosen, torch.from_numpy(sent))


def encode_all(rows: Rows, values: Tensor) -> Tensor:
    """As :func:`plain.encode_all`."""
    return rows_cpu.write_all(rows, values)


def decode_all(rows: Rows, message: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`plain.decode_all`."""
    status, _, _, values = rows_cpu.read(rows, message, np.array([rows.size]), LIKE[rows.dtype].dtype)
    values[status != 0] = 0
    return torch.from_numpy(status), torch.from_numpy(values)


class Received:
    """As :class:`plain.Received`."""

    def __init__(self, layout: Layout, rows: Rows, messages: Tensor, divisor: float, regions: Regions | None = None):
        self.layout, self._divisor = layout, divisor
        sizes = np.array([layout.numel]) if regions is None else regions.sizes.numpy()
        status, self._used, self._index, self._values = rows_cpu.read(
            rows, messages, sizes, LIKE[layout.dtype].dtype)
        self.status = torch.from_numpy(status)
        if regions is not None:
            index_of_owners(self._index, self._used, regions.owners)

    def write(self, targets: Sequence[Tensor | None]) -> None:
        """Overwrites the targets with it."""
        self._scatter(targets, ())

    def add(self, targets: Sequence[Tensor | None], rates: Sequence[float]) -> None:
        """Adds it, times each parameter's rate, to the targets."""
        self._scatter(targets, rates)

    def _scatter(self, targets: Sequence[Tensor | None], rates: Sequence[float]) -> None:
        table, like = _table(self.layout), LIKE[self.layout.dtype]
        addresses = np.array([0 if target is None else target.data_ptr() for target in targets], np.int64)
        factors, divisor = np.array(rates, like.dtype), like.dtype.type(self._divisor)
        in_threads(lambda begin, end: _scatter(
            begin, end, self._index, self._values, self._used, table.offsets, table.numels, divisor, addresses,
            factors), table.blocks, table.threads)


def decay(parameter: Tensor, buffer: Tensor, m: float, decay: float, lr: float, nesterov: bool) -> None:
    """As :func:`plain.decay`."""
    like = LIKE[parameter.dtype]
    p, w, n = parameter.data_ptr(), buffer.data_ptr(), parameter.numel()
    threads, real = torch.get_num_threads(), like.dtype.type
    chunks = 1 if threads == 1 else -(-n // CHUNK)
    in_threads(lambda start, end: _decay(start, end, p, w, real(m), real(decay), real(lr), nesterov, like),
           thread_ranges(n, chunks), threads)
