"""The learning rates with which what waits was accumulated, where AdamW's steps are compressed.

A gradient takes its step by the learning rate of its own time, however long it waits: it is accumulated as f g, with f
the learning rate over that of the group's first compressed step, by which what comes is multiplied. D is of gradients,
so it follows from what came, over the mean square of f in the steps that this was accumulated in.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dgc.compression.denominator import TABLES

RATES = "dgc_rates"  # in each param group: that learning rate, 0 before; and running means of f^2
MEANS = 12
MAX_STEPS = 2**MEANS - 1  # steps, over which the last of them goes
LEAST = 1e-30  # of them, so that a float32 holds 1 over it


def prepare(group: dict[str, Any]) -> None:
    """Completes a param group's state, so that all ranks have the same to broadcast."""
    group.setdefault(RATES, [0.0] * (1 + MEANS))


def unit(group: dict[str, Any]) -> float:
    """The learning rate that u and v of a group count in. Begins with the present one."""
    if not group.get(RATES) or not group[RATES][0]:
        lr = float(group["lr"])
        group[RATES] = [lr, *[1.0] * MEANS] if lr else [1.0, *[0.0] * MEANS]
    return float(group[RATES][0])


def now(group: dict[str, Any]) -> float:
    """f, by which a gradient of this step is multiplied."""
    one = unit(group)
    return float(group["lr"]) / one


def passed(group: dict[str, Any]) -> None:
    """Takes a step into the means, each of which is a running one and forgets what is older than it goes over."""
    square, (one, *means) = now(group) ** 2, group[RATES]
    group[RATES] = [one, *(mean + (square - mean) / 2**j for j, mean in enumerate(means))]


def inverse_squares(group: dict[str, Any], like: Tensor) -> Tensor:
    """1 over the mean of f^2 in the last n steps, n = 0, 1, ..., ``MAX_STEPS``, as a table of the dtype and device of
    ``like``; 1 where all were 0, and nothing can have come.
    """
    return _table(tuple(group[RATES][1:]), float(group["betas"][0]), like.dtype, like.device)


@lru_cache(TABLES)
def _table(means: tuple[float, ...], b1: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    known = torch.tensor(means, dtype=torch.float64, device="cpu")
    place, part = _between(b1)
    mean = torch.lerp(known[place], known[place + 1], part)
    return torch.where(mean > 0, 1 / mean.clamp(min=LEAST), 1).to(dtype).to(device, non_blocking=True)


@lru_cache(TABLES)
def _between(b1: float) -> tuple[Tensor, Tensor]:
    """The two means between which the sum of n steps is, by its age, and how far from the first.

    The squares of n steps are (n - 1) / 2 steps old in the mean, those in a step's momentum b1^2 / (1 - b1^2) more; and
    those in a running mean that takes in a 2^j-th, 2^j - 1.
    """
    steps = torch.arange(MAX_STEPS + 1, dtype=torch.float64, device="cpu")
    age = (steps - 1).clamp_(min=0) / 2 + b1 * b1 / (1 - b1 * b1)
    j = torch.log2(age + 1).clamp_(max=MEANS - 1)
    place = j.floor().clamp_(max=MEANS - 2)
    return place.long(), j - place
