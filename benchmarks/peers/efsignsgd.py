"""EF-signSGD (Karimireddy, Rebjock, Stich, Jaggi, ICML 2019): signs, scaled, and what they get wrong comes back later.

Algorithm 1 (EF-signSGD), on each rank and for each tensor of d entries, with p, D and e divided by lr:

    p = g + e        D = ||p||_1 / d sign(p)        e = p - D        x = x - lr (mean of D over ranks)

One bit an entry and one number a tensor. At one learning rate it is the same. The paper has one worker and no momentum;
the mean, and SGD's momentum after it, are those of Vogels et al. 2019 (algorithm 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World

from .packing import flat, message, owners, pack, take, unflat, unpack


@dataclass
class EFSignSGD:
    world: World
    seed: int = 0
    e: Tensor | None = None
    bytes_sent: float = 0.0
    exchanges = "gradients"

    def exchange(self, tensors: list[Tensor], lr: float, last: bool) -> Path[list[Tensor]]:
        layers, g = owners(tensors), flat(tensors)
        p = g if self.e is None else self.e + g
        scales = torch.stack([part.abs().mean() for part in unflat(p, tensors)])
        own = message(scales, pack((p >= 0).to(torch.uint8), 1))
        self.e = p - self.decode(own, layers)
        messages = yield Collective("all_gather", own)
        total = sum(self.decode(content, layers) for content in messages)
        return unflat(total / self.world.size, tensors)

    def decode(self, content: Tensor, layers: Tensor) -> Tensor:
        """D, of one rank."""
        count = int(layers[-1]) + 1
        scales, bits = (
            take(content, 0, count, torch.float32),
            unpack(content[4 * count :], 1, len(layers)),
        )
        return scales[layers] * (2.0 * bits - 1)
