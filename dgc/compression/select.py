"""Selection of the k largest of |v|, by sorting or from a sampled threshold."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dgc.compression.sizes import LINE

HITS = 8  # entries sought that the sample should hold, or a quarter of sqrt(k) if that is more
DEVIATIONS = (
    5  # how far below k, in standard deviations, the sample would have to err to leave too few
)


def count(sparsity: float, numel: int) -> int:
    """k = ceil((1 - sparsity) * numel), at least 1 of a parameter that has entries.

    Free of floating-point dust: 1 - 0.99 is a little more than 0.01, yet 99 % of 13,500 entries
    leaves 135 and not 136. The dust of a product below 2^31 is below 2.5e-7.
    """
    return min(numel, max(1, math.ceil(round((1.0 - sparsity) * numel, 6))))


def exact(v: Tensor, k: int) -> Tensor:
    """The positions of the k largest |v|: int64, ascending; fewer than k only where the others are
    zero.

    Args:
        v: flat, with at least k entries. Of entries as large as the k-th, the first are taken.
        k: how many.
    """
    magnitude = v.abs()
    least = torch.topk(magnitude, k, sorted=False).values.min() if k else 0
    larger = torch.nonzero(magnitude > least).flatten()
    ties = torch.nonzero((magnitude == least) & (magnitude > 0)).flatten()[: k - len(larger)]
    return torch.cat([larger, ties]).sort().values


def stride(k: int) -> int:
    """The distance between two sampled lines, to find the k largest; odd, so that it has no common
    period with the shapes that parameters have.
    """
    return k // max(HITS, math.isqrt(k) // 4) | 1


def sampled(v: Tensor, k: int, step: int) -> Tensor:
    """The same as :func:`exact`, with less work: only what exceeds a sampled threshold is sorted.

    The paper (section 5) samples at random and sorts a second time what the threshold leaves. Here
    the sample is strided and begins one line further at each step, so that it needs no random
    numbers. The threshold is put low enough for k entries and more to exceed it; where the sample
    misled and fewer do, all of v is sorted after all. So the sample decides how much work there is
    and never what is sent.

    Args:
        v: flat tensor, with at least k entries.
        k: how many are wanted.
        step: the optimizer's step, which rotates the sample.
    """
    every, lines = stride(k), v.numel() // LINE
    if every == 1 or lines < every:
        return exact(v, k)
    magnitude = v.abs()
    sample = magnitude[: lines * LINE].view(lines, LINE)[step % every :: every].flatten()
    hits = k * sample.numel() / v.numel()
    rank = min(sample.numel(), math.ceil(hits + DEVIATIONS * math.sqrt(hits)))
    threshold = torch.topk(sample, rank, sorted=False).values.min()
    candidates = torch.nonzero((magnitude >= threshold) & (magnitude > 0)).flatten()
    if candidates.numel() < k:
        return exact(v, k)
    return candidates[exact(magnitude[candidates], k)]
