"""AdamW's denominator follows an averaged update: the loops, compiled for CUDA with Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgc.compression.denominator import PARTS, Denominator
from dgc.compression.kernels import denominator_plain
from dgc.compression.kernels.cuda import TILE
from dgc.compression.kernels.rows_cuda import _divided

SIXTY_FOURTHS = tl.constexpr(PARTS)


@triton.jit(do_not_specialize=["n"])
def _count(x, n, total):
    begin, i = tl.program_id(0).to(tl.int64) * TILE, tl.arange(0, TILE)
    left = tl.minimum(n - begin, TILE).to(tl.int32)
    some = tl.sum((tl.load(x + begin + i, mask=i < left, other=0) != 0).to(tl.int32))
    if some > 0:
        tl.atomic_add(total, some)


@triton.jit(do_not_specialize=["n", "k", "last_deficit", "last_weight", "last_rate", "now"])
def _follow(x, square, largest, received, factor, n, total, k, deficits, last_deficit, weights, last_weight,
            rates, last_rate, grown, top, scale, inverse, eps, now, LARGEST: tl.constexpr):
    """See ``denominator_plain.follow``, and ``denominator_cpu._follow`` for the numbers."""
    begin, i = tl.program_id(0).to(tl.int64) * TILE, tl.arange(0, TILE)
    left = tl.minimum(n - begin, TILE).to(tl.int32)
    g = tl.load(x + begin + i, mask=i < left, other=0)
    new = g != 0
    rarity = tl.maximum((tl.load(total).to(tl.int64) * (2 * SIXTY_FOURTHS) + k) // (2 * k), SIXTY_FOURTHS)
    w = tl.maximum(now - tl.load(received + begin + i, mask=new, other=0), 1)
    steps = w.to(tl.int64) * rarity
    repeats = (rarity.to(tl.float64) / SIXTY_FOURTHS).to(g.dtype)
    deficit = _divided(tl.load(deficits + tl.minimum(steps, last_deficit), mask=new, other=0), repeats)
    rate = tl.load(rates + tl.minimum(steps // SIXTY_FOURTHS, last_rate), mask=new, other=0)
    found = _divided(g * g * scale * rate, w.to(g.dtype) - deficit)
    before = tl.load(square + begin + i, mask=new, other=0)
    weight = tl.minimum(tl.load(weights + tl.minimum(w, last_weight), mask=new, other=0) * grown, top)
    after = before + weight * (found - before)
    tl.store(square + begin + i, after, mask=new)
    tl.store(received + begin + i, now, mask=new)
    if LARGEST:
        most = tl.load(largest + begin + i, mask=new, other=0)
        after = tl.where((after > most) | (after != after), after, most)  # torch's, too, where one is NaN
        tl.store(largest + begin + i, after, mask=new)
    # The root of a float64 is rounded once more, which comes to the same.
    root = tl.sqrt((after * inverse).to(tl.float64)).to(g.dtype)
    tl.store(factor + begin + i, _divided(tl.zeros_like(root) + 1, root + eps), mask=new)


def follow(x: Tensor, of: Denominator, k: int, now: int) -> None:
    """As :func:`denominator_plain.follow`, of contiguous tensors of one dtype."""
    n = x.numel()
    if x.dtype != torch.float32:  # Triton takes numbers as float32
        denominator_plain.follow(x, of, k, now)
    elif n:
        total, deficits, weights = torch.zeros(1, dtype=torch.int32, device=x.device), of.deficits, of.weights
        grid, options = (triton.cdiv(n, TILE.value),), {"num_warps": 8, "enable_fp_fusion": False}
        with torch.cuda.device_of(x):
            _count[grid](x, n, total, **options)
            _follow[grid](x, of.square, of.largest, of.received, of.factor, n, total, k, deficits,
                          len(deficits) - 1, weights, len(weights) - 1, of.rates, len(of.rates) - 1, 1 / of.share,
                          of.most, of.unbiased, 1 / of.unbiased, float(of.eps), now, LARGEST=of.largest is not None,
                          **options)
