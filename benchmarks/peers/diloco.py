"""DiLoCo (Douillard et al., 2023): H steps alone, then one exchange of how far each rank has gone.

Section 2: every H steps, D = mean over ranks of (x_before - x_rank) is the gradient of an outer SGD with Nesterov's
momentum (lr 0.7, momentum 0.9) at x_before, and all ranks go on from what it gives. The last step of an epoch
exchanges, too, so that what is scored is what all ranks have. Local SGD (Stich, ICLR 2019; Lin, Stich, Patel and Jaggi,
ICLR 2020) is the same with lr 1 and no outer momentum: all ranks go on from the mean of their parameters. The inner
optimizer is the recipe's SGD; DiLoCo's paper has AdamW. Its momentum stays on its rank.

With momentum 0.9 and Nesterov's step, lr 0.7 goes 0.7 (1 + 0.9 / (1 - 0.9)) = 7 times as far as the ranks do where
they keep on going one way; lr 0.1 just as far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgc.collective import Path, World

from .packing import mean


@dataclass
class DiLoCo:
    world: World
    seed: int = 0
    local_steps: int = 30  # H
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    steps: int = 0  # since the last exchange
    before: list[Tensor] | None = None
    velocity: list[Tensor] | None = None
    bytes_sent: float = 0.0
    exchanges = "parameters"

    def begin(self, parameters: list[Tensor]) -> None:
        """What all ranks start from, alike on all of them."""
        self.before = [p.detach().clone() for p in parameters]
        self.velocity = [torch.zeros_like(p) for p in self.before]

    def exchange(self, tensors: list[Tensor], lr: float, last: bool) -> Path[list[Tensor]]:
        assert self.before is not None and self.velocity is not None, "begin() comes first"
        self.steps += 1
        if self.steps < self.local_steps and not last:
            return tensors
        self.steps = 0
        gone = yield from mean(
            [old - p.detach() for old, p in zip(self.before, tensors, strict=True)], self.world
        )
        for d, v, x in zip(gone, self.velocity, self.before, strict=True):
            v.mul_(self.outer_momentum).add_(d)
            x -= self.outer_lr * (d + self.outer_momentum * v)
        return self.before
