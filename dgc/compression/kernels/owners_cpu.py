"""The loops of the exchange that adds up at owners, fused and compiled for the CPU with numba.

A region is read where it lies in v: while the gradients are added in, and once for the means of its parameters and the
largest entry of each block; then only blocks with a large one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from dgc.compression.kernels import cpu, owners_plain, rows_cpu
from dgc.compression.kernels.cpu import (
    LANES,
    PANEL,
    _everywhere,
    _keep,
    _kth,
    index_of,
    owner_of,
)
from dgc.compression.kernels.jit import jit
from dgc.compression.kernels.numba_tools import (
    PREFETCH_DISTANCE,
    in_threads,
    prefetch,
    thread_ranges,
)
from dgc.compression.regions import STRETCH, Arrived, ReducePlan, Taken
from dgc.compression.residual import Gradient, Residual
from dgc.compression.select import DEVIATIONS, stride
from dgc.compression.sizes import LINE
from dgc.compression.wire import NONFINITE, Rows, tables_of, worst

PIECES_PER_THREAD = 4  # of a region, that are worth another thread
ROOM = 1 - 2.0**-16  # what a product and a quotient may be off by, and more

_jit = jit(nogil=True, error_model="numpy", boundscheck=False)


# -- to owners ---------------------------------------------------------------------------------------------------------

@_jit
def _deal(starts, index, used, n, own, slots, places, begins):
    """Sorts the chosen entries outside the own region by their owners, in ascending order for each: those of owner r
    are ``places[begins[r]:begins[r + 1]]``. Returns whether no owner has more than ``slots``.
    """
    chosen, rows, total = np.empty(len(index), np.int64), np.empty(len(index), np.int64), 0
    begins[:] = 0
    for p in range(len(starts)):
        for j in range(starts[p], starts[p] + used[p]):
            row = owner_of(index[j], n)
            if row != own:
                chosen[total], rows[total] = index[j], row
                begins[row + 1] += 1
                total += 1
    fits = begins.max() <= slots
    for r in range(n):
        begins[r + 1] += begins[r]
    at = begins[:n].copy()
    for e in range(total):
        places[at[rows[e]]] = chosen[e]
        at[rows[e]] += 1
    return fits


# -- what rows say -----------------------------------------------------------------------------------------------------

@_jit
def _add(own, n, v, used, found, amounts, places, values, before):
    """Adds to v what rows say of the own region. ``places`` has where, ``values`` what, ``before`` what was there."""
    total = 0
    for r in range(len(used)):
        for j in range(used[r]):
            places[total], values[total] = index_of(own, found[r, j], n), amounts[r, j]
            total += 1
    for e in range(total):  # all of them before any is added to, as an entry may be in several rows
        if e + PREFETCH_DISTANCE < total:
            prefetch(v.ctypes.data + places[e + PREFETCH_DISTANCE] * v.itemsize)
        before[e] = v[places[e]]
    for e in range(total):
        v[places[e]] += values[e]


# -- the largest sums --------------------------------------------------------------------------------------------------

@intrinsic
def _add_line(typing_context, x, like, lanes):
    """Adds |x| of the line at the address x to the float64 numbers at the address ``lanes``. Returns the largest."""
    def generate(context, builder, signature, arguments):
        address, real, into = arguments
        integer = ir.IntType(like.bitwidth)
        mask = _everywhere(builder, integer((1 << (like.bitwidth - 1)) - 1))
        line = builder.load(builder.inttoptr(address, mask.type.as_pointer()), align=like.bitwidth // 8)
        bits = builder.and_(line, mask)  # whose order that of the magnitudes is
        sizes = builder.bitcast(bits, ir.VectorType(real.type, LANES))
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


@_jit
def _sum(first, last, firsts, ends, blocks, v, tiny, lanes, largest):
    """Pieces first to last of the own region: the sums of |v|, each place of a block for itself; and the largest |v| of
    each block that is one parameter's.
    """
    at_v, at_lanes, size = np.int64(v.ctypes.data), np.int64(lanes.ctypes.data), v.itemsize
    for q in range(first, last):
        for j in range(firsts[q] // LINE, (ends[q] - 1) // LINE + 1):
            if j + PREFETCH_DISTANCE < len(blocks):
                prefetch(at_v + blocks[j + PREFETCH_DISTANCE] * (LINE * size))
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
        if j + PREFETCH_DISTANCE * every < lines:
            prefetch(v.ctypes.data + blocks[j + PREFETCH_DISTANCE * every] * (LINE * v.itemsize))
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
    hit = np.empty(STRETCH // LINE + 2, np.int64)  # of a piece
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
            if h + PREFETCH_DISTANCE < hits:
                prefetch(at_v + blocks[hit[h + PREFETCH_DISTANCE]] * (LINE * size))
            j = hit[h]
            place = blocks[j] * LINE
            for i in range(place + max(firsts[q] - j * LINE, 0), place + min(ends[q] - j * LINE, LINE)):
                score = abs(v[i]) / mean
                if abs(v[i]) >= bound and score > 0:
                    if count < len(found):
                        found[count], scores[count] = i, score
                    count += 1
                    reach += score >= threshold
    return count, reach


# -- the doors ---------------------------------------------------------------------------------------------------------

class _Tables:
    """A plan's numbers as arrays."""

    def __init__(self, plan: ReducePlan):
        self.blocks = plan.regions.indices(plan.own, LINE).numpy() // LINE
        self.sizes, self.lengths = plan.regions.sizes.numpy(), plan.lengths.numpy()
        self.firsts, self.ends, self.of = np.ascontiguousarray(plan.pieces.numpy())
        self.length, self.kept = int(plan.size), min(plan.to_all.slots, int(plan.size))
        self.every = stride(self.kept)

    def ranges(self, threads: int) -> list[tuple[int, int]]:
        """Pieces, for each thread some that follow one another."""
        return thread_ranges(len(self.of), min(threads, len(self.of) // PIECES_PER_THREAD))


def _table(plan: ReducePlan) -> _Tables:
    return tables_of(plan, _Tables)


def accumulate_and_select(residual: Residual, gradients: Mapping[str, Gradient],
                          scale: Tensor | Mapping[str, Tensor] | None,
                          plan: ReducePlan, step: int) -> tuple[list[str], Tensor, Tensor]:
    """As :func:`owners_plain.accumulate_and_select`."""
    return cpu.accumulate_and_select(residual, gradients, scale, plan.layout, step, _table(plan).blocks)


def send(residual: Residual, plan: ReducePlan, index: Tensor, used: Tensor, refused: Tensor, masking: bool) -> tuple[
        Tensor, Taken]:
    """As :func:`owners_plain.send`."""
    n, starts = plan.regions.owners, cpu._table(plan.layout).starts
    if refused:
        residual.count(torch.tensor(0, device="cpu"))
        return plan.to_owners.status_message(n, NONFINITE), _nothing(residual)
    places, begins = np.empty(len(index), np.int64), np.empty(n + 1, np.int64)
    if not _deal(starts, index.numpy(), used.numpy(), n, plan.own, plan.to_owners.slots, places, begins):
        return owners_plain.send(residual, plan, index, used, refused, masking)  # which chooses what a row has room for
    rows, taken, entries = _written(residual, plan, plan.to_owners, begins, places, masking)
    residual.overflow_entries = torch.tensor(int(begins[-1]) - entries, device="cpu")
    return rows, taken


def _nothing(residual: Residual) -> Taken:
    return Taken(torch.empty(0, dtype=torch.int64, device="cpu"), residual.v[:0])


def _written(residual: Residual, plan: ReducePlan, rows: Rows, begins: Any, places: Any, masking: bool) -> tuple[
        Tensor, Taken, int]:
    """Entries, sorted by row, as a message; what was taken out of v for it; and how many entries that are not zero."""
    u, v = cpu.arrays(residual)
    message, sent, entries = rows_cpu.written(rows, begins, places, plan.regions.owners, u, v,
                                              masking and residual.u is not None)
    residual.count(torch.tensor(entries, device="cpu"))
    return message, Taken(torch.from_numpy(places[:begins[-1]]), torch.from_numpy(sent)), entries


def add(residual: Residual, plan: ReducePlan, rows: Tensor) -> Arrived:
    """As :func:`owners_plain.add`."""
    v = residual.v.numpy()
    found, used, at, amounts = rows_cpu.read(plan.to_owners, rows, plan.size.numpy(), v.dtype)
    status = torch.from_numpy(found)
    if found.any():
        return Arrived(status, _nothing(residual), residual.v[:0])
    places, (values, before) = np.empty(used.sum(), np.int64), np.empty((2, used.sum()), v.dtype)
    _add(plan.own, plan.regions.owners, v, used, at, amounts, places, values, before)
    return Arrived(status, Taken(torch.from_numpy(places), torch.from_numpy(-values)), torch.from_numpy(before))


def pass_on(residual: Residual, gradients: Mapping[str, Gradient], plan: ReducePlan, arrived: Arrived, step: int,
            masking: bool) -> tuple[Tensor, Taken]:
    """As :func:`owners_plain.pass_on`."""
    if worst_status := int(worst(arrived.status)):
        residual.count(torch.tensor(0, device="cpu"))
        return plan.to_all.status_message(1, worst_status), _nothing(residual)
    index = _largest_sums(residual, gradients, plan, step)
    begins = np.array([0, len(index)])
    return _written(residual, plan, plan.to_all, begins, index, masking)[:2]


def _largest_sums(residual: Residual, gradients: Mapping[str, Gradient], plan: ReducePlan, step: int) -> Any:
    """The places of the own region's largest sums, over their parameter's mean there: int64, ascending."""
    table, v, threads = _table(plan), residual.v.numpy(), torch.get_num_threads()
    lanes, means, tiny = np.zeros((len(table.of), LINE)), np.empty(len(residual.names), v.dtype), np.finfo(v.dtype).tiny
    ranges, k, largest = table.ranges(threads), table.kept, np.empty(len(table.blocks), v.dtype)
    in_threads(lambda first, last: _sum(first, last, table.firsts, table.ends, table.blocks, v, tiny, lanes, largest),
                ranges, threads)
    absent = np.array([name not in gradients for name in residual.names])
    fine = _average(table.of, lanes, table.lengths, absent, tiny, means)
    threshold = _threshold(step, table.every, k, table.length, table.ends, table.of, table.blocks, v, means)
    least = np.finfo(v.dtype).smallest_subnormal
    found, scores = np.empty((len(ranges), 4 * k + PANEL), np.int64), np.empty((len(ranges), 4 * k + PANEL), v.dtype)
    counts = in_threads(lambda at, first, last: _find(
        first, last, table.firsts, table.ends, table.of, table.blocks, largest, v, least, threshold, means,
        found[at], scores[at]), [(w, *at) for w, at in enumerate(ranges)], threads)
    if not fine or sum(reach for _, reach in counts) < k or any(count > found.shape[1] for count, _ in counts):
        return owners_plain.largest_sums(residual, gradients, plan, step).numpy()  # the sample misled
    candidates = np.concatenate([found[w, :count] for w, (count, _) in enumerate(counts)])
    magnitudes = np.concatenate([scores[w, :count] for w, (count, _) in enumerate(counts)])
    index = np.empty(k, np.int64)
    if k:
        _keep(candidates, magnitudes, _kth(magnitudes.copy(), k), k, index, 0)
    return index
