"""AdamW's denominator follows an averaged update: the loops, compiled for the CPU with numba.

An update is read once, and what is not 0 of it noted as bits; then only places with something new are visited.
"""

from __future__ import annotations

from functools import reduce

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from dgc.compression.denominator import PARTS, Denominator
from dgc.compression.kernels.cpu import CHUNK, LANES, LIKE, STRIP, _parts
from dgc.compression.kernels.jit import jit
from dgc.compression.kernels.numba_tools import in_threads, lowest, pointer, thread_ranges

_jit = jit(nogil=True, error_model="numpy", boundscheck=False)


@intrinsic
def _nonzero(typing_context, address, like):
    """A bit for each entry of a strip at an address that is not 0; the first entry's is the lowest."""
    def generate(context, builder, signature, arguments):
        bits = []
        for part, address_of in enumerate(_parts(builder, arguments[0], arguments[1].type)):
            x = builder.load(address_of, align=like.bitwidth // 8)
            found = builder.fcmp_unordered("!=", x, ir.Constant(x.type, None))
            some = builder.zext(builder.bitcast(found, ir.IntType(LANES)), ir.IntType(STRIP))
            bits.append(builder.shl(some, some.type(part * LANES)))
        return reduce(builder.or_, bits)

    return types.int64(types.int64, like), generate


@intrinsic
def _ones(typing_context, bits):
    """How many bits are set."""
    return types.int64(types.int64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


@_jit
def _note(first, last, n, x, marks, like):
    """Marks what is not 0 of the strips first to last of x, at an address; how many there are."""
    size, entries, total = like.itemsize, numba.carray(pointer(x), n, like.dtype), 0
    for strip in range(first, last):
        start = strip * STRIP
        if start + STRIP <= n:
            bits = _nonzero(x + start * size, like.dtype.type(0))
        else:
            bits = np.int64(0)
            for i in range(start, n):
                bits |= np.int64(entries[i] != 0) << (i - start)
        marks[strip] = bits
        total += _ones(bits)
    return total


@_jit
def _follow(first, last, n, x, square, largest, received, factor, marks, rarity, deficits, weights, rates, grown, top,
            scale, inverse, eps, now, like):
    """See ``denominator_plain.follow``, of whose tensors these are the addresses.

    Args:
        rarity: R, in 64ths.
        grown: by which weights are multiplied, and ``top``, the largest.
        scale: of the squares of gradients, ``unbiased``; its ``inverse``.
    """
    real, one = like.dtype.type, like.dtype.type(1)
    xs, squares = numba.carray(pointer(x), n, like.dtype), numba.carray(pointer(square), n, like.dtype)
    factors, counts = numba.carray(pointer(factor), n, like.dtype), numba.carray(pointer(received), n, np.int32)
    most = numba.carray(pointer(largest), n if largest else 0, like.dtype)
    repeats, last_deficit, last_weight = real(real(rarity) / real(PARTS)), len(deficits) - 1, len(weights) - 1
    last_rate = len(rates) - 1
    for strip in range(first, last):
        bits = marks[strip]
        while bits:
            i = strip * STRIP + lowest(bits)
            bits &= bits - 1
            w = max(now - np.int64(counts[i]), 1)
            deficit = deficits[min(w * rarity, last_deficit)] / repeats
            rate = rates[min(w * rarity // PARTS, last_rate)]
            found = xs[i] * xs[i] * scale * rate / (real(w) - deficit)
            after = squares[i] + min(weights[min(w, last_weight)] * grown, top) * (found - squares[i])
            squares[i], counts[i] = after, now
            if len(most):
                # As torch's, where one is NaN.
                after = after if after > most[i] or after != after else most[i]
                most[i] = after
            factors[i] = one / (np.sqrt(after * inverse) + eps)
    return one


def follow(x: Tensor, of: Denominator, k: int, now: int) -> None:
    """As :func:`denominator_plain.follow`, of contiguous tensors of one dtype, float32 or float64."""
    like, n, threads = LIKE[x.dtype], x.numel(), torch.get_num_threads()
    real, strips = like.dtype.type, -(-n // STRIP)
    marks = np.empty(strips, np.int64)
    chunks = 1 if threads == 1 else -(-n // CHUNK)
    tasks = thread_ranges(strips, chunks)
    total = sum(in_threads(lambda first, last: _note(first, last, n, x.data_ptr(), marks, like), tasks, threads))
    rarity = max((2 * PARTS * total + k) // (2 * k), PARTS)
    largest = 0 if of.largest is None else of.largest.data_ptr()
    in_threads(lambda first, last: _follow(
        first, last, n, x.data_ptr(), of.square.data_ptr(), largest, of.received.data_ptr(), of.factor.data_ptr(),
        marks, rarity, of.deficits.numpy(), of.weights.numpy(), of.rates.numpy(), real(1 / of.share), real(of.most),
        real(of.unbiased), real(1 / of.unbiased), real(of.eps), now, like), tasks, threads)
