"""QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic, NeurIPS 2017): stochastic rounding to a few levels.

Section 3.1: an entry of a bucket v becomes Q_s(v_i) = ||v|| sgn(v_i) xi_i(v, s), where for l / s <= |v_i| / ||v|| <=
(l + 1) / s the level xi_i is (l + 1) / s with probability s |v_i| / ||v|| - l, and else l / s. So E[Q_s(v)] = v.

As in the paper's section 4 the norm is the largest entry's size, and each bucket of entries in a row is rounded by
itself; 4 bits and buckets of 512 are settings of its section 5. Here a bucket does not cross tensors, one of the bits
is the sign, and s = 7. Codes have a fixed width; the paper's Elias coding is not used. One-dimensional tensors travel
dense.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World

from .packing import Apart, flat, message, pack, some, take, unflat, unpack


@dataclass
class QSGD:
    world: World
    seed: int = 0
    bits: int = 4  # 2, 4 or 8; more => less noise
    bucket: int = 512  # smaller => less noise, more norms
    bytes_sent: float = 0.0
    exchanges = "gradients"

    def __post_init__(self) -> None:
        self.levels = 2 ** (self.bits - 1) - 1  # s
        self.random = torch.Generator().manual_seed(self.seed)

    def exchange(self, tensors: list[Tensor], lr: float, last: bool) -> Apart:
        return some(tensors, self.world, self.average)

    def average(self, tensors: list[Tensor]) -> Path[list[Tensor]]:
        buckets = self.buckets(tensors)
        messages = yield Collective("all_gather", self.encode(flat(tensors), buckets))
        total = sum(self.decode(content, buckets) for content in messages)
        return unflat(total / self.world.size, tensors)

    def buckets(self, tensors: list[Tensor]) -> Tensor:
        """Of each entry, the number of its bucket."""
        parts, count = [], 0
        for tensor in tensors:
            parts.append(count + torch.arange(tensor.numel(), device=tensor.device) // self.bucket)
            count += -(-tensor.numel() // self.bucket)
        return torch.cat(parts)

    def encode(self, v: Tensor, buckets: Tensor) -> Tensor:
        """A norm of each bucket (float32), and a code of each entry: the level, and the sign above it."""
        norms = torch.zeros(int(buckets[-1]) + 1, device=v.device).scatter_reduce(
            0, buckets, v.abs(), "amax"
        )
        exact = (v.abs() / norms[buckets] * self.levels).nan_to_num(0)  # 0 / 0 in a bucket of zeros
        draw = torch.rand(len(v), generator=self.random).to(v.device)
        # Up with the probability of the fraction.
        level = (exact + draw).floor().clamp(max=self.levels)
        code = level.to(torch.uint8) | ((v < 0).to(torch.uint8) << (self.bits - 1))
        return message(norms, pack(code, self.bits))

    def decode(self, content: Tensor, buckets: Tensor) -> Tensor:
        count = int(buckets[-1]) + 1
        norms = take(content, 0, count, torch.float32)
        code = unpack(content[4 * count :], self.bits, len(buckets))
        sign = 1 - 2 * (code >> (self.bits - 1)).float()
        return norms[buckets] * sign * (code & self.levels) / self.levels
