"""TernGrad (Wen, Xu, Yan, Wu, Wang, Chen, Li, NeurIPS 2017): each entry is -1, 0 or 1, times one number for its layer.

ternarize(g) = s sign(g) b, with s = max |g| and b_k = 1 with probability |g_k| / s, else 0. So its mean is g.
"Layer-wise ternarizing" does so layer by layer, and "gradient clipping" first clips what is beyond 2.5 standard
deviations of the layer, as a large s is noise. Clipping is not undone: the mean is the clipped g.

An entry is 2 bits. All ranks see all messages, so that they need not share one s. One-dimensional tensors travel dense.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World

from .packing import Apart, flat, message, owners, pack, some, take, unflat, unpack


def clipped(g: Tensor, c: float) -> Tensor:
    """g with entries beyond c standard deviations set to that."""
    bound = c * g.std(correction=0)
    return g.clamp(-bound, bound)


@dataclass
class TernGrad:
    world: World
    seed: int = 0
    clip: float = 2.5
    bytes_sent: float = 0.0
    exchanges = "gradients"

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)

    def exchange(self, tensors: list[Tensor], lr: float, last: bool) -> Apart:
        return some(tensors, self.world, self.average)

    def average(self, tensors: list[Tensor]) -> Path[list[Tensor]]:
        layers = owners(tensors)
        messages = yield Collective(
            "all_gather", self.encode([clipped(g, self.clip) for g in tensors], layers)
        )
        total = sum(self.decode(content, layers) for content in messages)
        return unflat(total / self.world.size, tensors)

    def encode(self, tensors: list[Tensor], layers: Tensor) -> Tensor:
        """The s of each layer (float32), and 2 bits for each entry: 0, 1, or 2 for -1."""
        s, g = torch.stack([tensor.abs().max() for tensor in tensors]), flat(tensors)
        draw = torch.rand(len(g), generator=self.random).to(g.device)
        b = draw * s[layers] < g.abs()
        return message(s, pack(b.to(torch.uint8) << (g < 0), 2))

    def decode(self, content: Tensor, layers: Tensor) -> Tensor:
        count = int(layers[-1]) + 1
        s, code = (
            take(content, 0, count, torch.float32),
            unpack(content[4 * count :], 2, len(layers)),
        )
        return s[layers] * ((code == 1).float() - (code == 2).float())
