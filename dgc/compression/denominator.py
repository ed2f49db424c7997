"""The denominator D of AdamW, of a parameter whose updates are sparse: what it follows, and by how much.

D = sqrt(s) + eps, with s the mean square of gradients. It is found from the averaged updates, each of which is a sum
of gradients. A sum of w independent gradients of mean square s has a mean square of w s. Of the momentum that n
steps make, which is what was accumulated, some is still to come, and some is of steps before: as a share of n s, the
mean square of this sum is h(n) = 1 - 2 b1 (1 - b1^n) / (n (1 - b1^2)). n = w R is longer than w, as it is not the same
ranks that send an entry every time: R is the number of entries that have come, over how many each rank has sent, at
least 1, in 64ths.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dgc.compression.device import to_device

FEWEST = 8  # updates that s is an average of, at least, where an entry's waits are longer than b2 remembers
PARTS = 64  # of R, and of n in a table of powers
MAX_WEIGHTS = 1 << 20  # steps that a table of weights tells apart
MAX_DEFICITS = 1 << 22  # entries of a table of deficits: all that there are up to b1 = 0.9996
TABLES = 16  # that are kept: a schedule may change b1 in every step
NOTHING = 2.0**-30  # a power that small is taken for 0


@dataclass(frozen=True)
class Denominator:
    """What D of one parameter is made from. The tensors have its shape; those of floating point have one dtype, but for
    ``square``.

    Args:
        square: s times ``unbiased``, as torch's AdamW has it.
        largest: of ``square``, as torch has it with amsgrad.
        received: int32, how many steps there had been when an entry last came.
        factor: 1 / D.
        unbiased: what ``square`` is divided by, as it began at 0.
        b1, b2: of the momentum, and of the mean squares.
        eps: beside sqrt(s).
        steps: over how many s goes, at least 1.
        rates: what the square of an update is multiplied by that was accumulated for n steps, n = 0, 1, ...; the last
            one is that of all longer ones. 1 over the mean square of the learning rates in it.
    """

    square: Tensor
    largest: Tensor | None
    received: Tensor
    factor: Tensor
    unbiased: float
    b1: float
    b2: float
    eps: float
    steps: float
    rates: Tensor

    @property
    def weights(self) -> Tensor:
        """1 - b2^w, the weight of a sum of w steps once s has settled, for w = 0, 1, ...; the last one is that of all
        longer sums.
        """
        return _weights(self.b2, self.factor.dtype, self.factor.device)

    @property
    def share(self) -> float:
        """1 - b2^steps, by which weights are divided: the younger s is, the faster it follows, as in AdamW."""
        return 1 - self.b2**self.steps

    @property
    def most(self) -> float:
        """The largest weight: a step's, or an eighth."""
        return largest_weight(self.b2)

    @property
    def deficits(self) -> Tensor:
        """n (1 - h(n)), for n = 0, 1/64, 2/64, ...; the last one is that of all greater n."""
        return _deficits(self.b1, self.factor.dtype, self.factor.device)


def factor(square: Tensor, unbiased: float, eps: float, dtype: torch.dtype) -> Tensor:
    """1 / D as a new tensor of a dtype; see :class:`Denominator`."""
    # By way of float64, as torch's own root of a float32 is not always the nearest one (MKL).
    root = _to_nearest_root((square.to(dtype) * (1 / unbiased)).double()).to(dtype)
    return (root + eps).reciprocal_()


def _to_nearest_root(square: Tensor) -> Tensor:
    """IEEE's root of float64, in place, as the loops take it: on a CPU NumPy's, without which there are no loops."""
    if square.device.type == "cpu" and importlib.util.find_spec("numpy"):
        import numpy as np
        with np.errstate(invalid="ignore"):  # of NaN comes NaN
            np.sqrt(square.numpy(), out=square.numpy())
        return square
    return square.sqrt_()


def largest_weight(b2: float) -> float:
    return max(1 - b2, 1 / FEWEST)


@lru_cache(TABLES)
def _weights(b2: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The table of 1 - b2^w for w = 0, 1, ..., cut off at the largest weight."""
    most = largest_weight(b2)
    longest = min(math.ceil(math.log1p(-most) / math.log(b2)), MAX_WEIGHTS) if b2 > 0 else 1
    w = torch.arange(longest + 1, dtype=torch.float64, device="cpu")
    return to_device((1 - b2**w).clamp_(max=most).to(dtype), device)


@lru_cache(TABLES)
def _deficits(b1: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    longest = math.ceil(math.log(NOTHING) / math.log(b1)) if b1 > 0 else 1
    n = torch.arange(min(longest * PARTS, MAX_DEFICITS) + 1, dtype=torch.float64, device="cpu") / PARTS
    return to_device((2 * b1 / (1 - b1 * b1) * (1 - b1**n)).to(dtype), device)
