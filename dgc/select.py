"""What is sent: the k largest of |v|, exact or from a sampled threshold."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLE_HITS = 64  # selected entries that the sample should hold: the threshold is then right within about 12 %
MARGIN = 1.3  # aim for more than k, since trimming what is too much is cheap and finding more is not


def count(sparsity: float, numel: int) -> int:
    """k = ceil((1 - sparsity) * numel), at least 1 of a parameter that has entries.

    Free of floating-point dust: 1 - 0.99 is a little more than 0.01, yet 99 % of 13,500 entries leaves 135 and
    not 136. The dust of a product below 2^31 is below 2.5e-7.
    """
    return min(numel, max(1, math.ceil(round((1.0 - sparsity) * numel, 6))))


def exact(v: Tensor, k: int) -> Tensor:
    """The positions of the k largest |v|: int64 (k,), in no order. ``v`` is flat, with at least k entries."""
    return torch.topk(v.abs(), k, sorted=False).indices


def sampled(v: Tensor, k: int, step: int) -> Tensor:
    """The positions of at most k and at least 0.9 k of the largest |v|, by a sampled threshold (section 3.3).

    The sample is strided and begins one entry further at each step, so that it needs no random numbers and is the
    same however the work is scheduled. What lies above the threshold beyond k is trimmed by magnitude: cutting by
    position would starve the last entries. Should the sample have misled, all entries are sorted after all.

    Args:
        v: flat tensor.
        k: how many are wanted; too few for a sample to help means :func:`exact`.
        step: the optimizer's step, which rotates the sample.
    """
    stride = k // SAMPLE_HITS | 1  # odd: no common period with the shapes that parameters have
    if stride == 1:
        return exact(v, k)
    magnitude = v.abs()
    sample = magnitude[step % stride::stride]
    rank = min(sample.numel(), math.ceil(MARGIN * k / stride))
    threshold = torch.topk(sample, rank, sorted=False).values.min()
    candidates = torch.nonzero(~(magnitude < threshold)).flatten()  # NaN is a candidate too, to be found out
    if candidates.numel() < 0.9 * k:
        return exact(v, k)
    if candidates.numel() <= k:
        return candidates
    return candidates[exact(magnitude[candidates], k)]
