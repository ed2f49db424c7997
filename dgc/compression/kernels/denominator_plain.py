"""AdamW's denominator follows an averaged update, in torch operations: the twin of the compiled loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dgc.compression import device
from dgc.compression.denominator import PARTS, Denominator
from dgc.compression.denominator import factor as new_factor


def follow(x: Tensor, of: Denominator, k: int, now: int) -> None:
    """Has s and D follow an averaged update, where it is not 0.

    Args:
        x: the update, in the shape of the parameter's s.
        of: what follows. Changed in place.
        k: how many entries each rank has chosen, at least 1.
        now: how many steps there have been.
    """
    came = arrivals(x)
    is_new, dtype = x[came] != 0, of.factor.dtype
    total = torch.count_nonzero(x)
    rarity = ((2 * PARTS * total + k) // (2 * k)).clamp_(min=PARTS)  # R, in 64ths
    received, square, factor = of.received[came], of.square[came], of.factor[came]
    w = (now - received.long()).clamp_(min=1)  # 0 where a script applies p.grad twice
    n = w * rarity  # in 64ths
    deficit = of.deficits[n.clamp(max=len(of.deficits) - 1)] / (rarity.to(dtype) / PARTS)
    g = x[came].to(dtype)
    found = g * g * of.unbiased * of.rates[(n // PARTS).clamp_(max=len(of.rates) - 1)] / (w.to(dtype) - deficit)
    before = square.to(dtype)
    weight = (of.weights[w.clamp_(max=len(of.weights) - 1)] * (1 / of.share)).clamp_(max=of.most)
    after = (before + weight * (found - before)).to(square.dtype)
    of.square[came] = after = torch.where(is_new, after, square)
    of.received[came] = torch.where(is_new, now, received)
    if of.largest is not None:
        of.largest[came] = after = torch.maximum(of.largest[came], after)
    of.factor[came] = torch.where(is_new, new_factor(after, of.unbiased, of.eps, dtype), factor)


def arrivals(x: Tensor) -> tuple[Any, ...]:
    """An index of where an update is not 0. On a GPU, whose host does not ask, it is of all entries."""
    return (...,) if device.is_asynchronous(x.device) else torch.nonzero(x, as_tuple=True)
