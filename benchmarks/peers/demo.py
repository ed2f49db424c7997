"""DeMo (Peng, Chen, Su, Quesnelle, Kingma, Liu, 2024): the momentum's largest frequencies, and a sign.

On each rank: m = b m + lr g; q = the k largest coefficients of the cosine transform (DCT-II, orthonormal) of each chunk
of m; m = m - inverse of q. A coefficient is averaged over those ranks that have sent it, not over all. The inverse
follows, and each entry moves by its sign, times the learning rate. What is not taken stays in m, which is momentum and
error feedback in one. The lr in m, and the average over senders, are those of the authors' code.

A tensor is a matrix of its first dimension by all others. A side of its chunks is the largest divisor of its own side
up to 64. A coefficient is a float32 and a 16-bit place in its chunk. Chunks of at most k entries travel whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World

from .packing import message, take


@cache
def dct(n: int) -> Tensor:
    """The orthonormal DCT-II as a matrix (n, n), float32: row k is a cosine of k half waves."""
    k, place = (
        torch.arange(n, dtype=torch.float64)[:, None],
        torch.arange(n, dtype=torch.float64) + 0.5,
    )
    rows = torch.cos(math.pi / n * k * place) * math.sqrt(2 / n)
    rows[0] /= math.sqrt(2)
    return rows.float()


def side(n: int, most: int) -> int:
    return max(d for d in range(1, min(n, most) + 1) if n % d == 0)


@dataclass
class DeMo:
    world: World
    seed: int = 0
    decay: float = 0.999  # b
    chunk: int = 64
    k: int = 32  # of a chunk's up to 4,096 coefficients
    m: list[Tensor] | None = None
    bytes_sent: float = 0.0
    exchanges = "gradients"

    def exchange(self, tensors: list[Tensor], lr: float, last: bool) -> Path[list[Tensor]]:
        if self.m is None:
            self.m = [torch.zeros_like(g) for g in tensors]
        parts = []
        for m, g in zip(self.m, tensors, strict=True):
            m.mul_(self.decay).add_(g, alpha=lr)
            coefficients = self.transform(m)
            places = self.largest(coefficients)
            values = coefficients.gather(1, places.long())
            m -= self.inverse(torch.zeros_like(coefficients).scatter_(1, places.long(), values), m)
            parts += [values] if places.shape == coefficients.shape else [values, places]
        messages = yield Collective("all_gather", message(*parts))
        return [
            self.inverse(q, m).sign() for q, m in zip(self.averages(messages), self.m, strict=True)
        ]

    def sides(self, x: Tensor) -> tuple[int, int, int, int]:
        """Chunks and the entries of one, down and across."""
        rows, columns = (1, len(x)) if x.ndim == 1 else (len(x), x[0].numel())
        a, b = side(rows, self.chunk), side(columns, self.chunk)
        return rows // a, a, columns // b, b

    def transform(self, x: Tensor) -> Tensor:
        """The coefficients of its chunks: (chunks, entries of one)."""
        _, a, _, b = sides = self.sides(x)
        chunks = x.reshape(sides).permute(0, 2, 1, 3)
        return (dct(a).to(x.device) @ chunks @ dct(b).T.to(x.device)).reshape(-1, a * b)

    def inverse(self, coefficients: Tensor, like: Tensor) -> Tensor:
        down, a, across, b = self.sides(like)
        chunks = (
            dct(a).T.to(like.device)
            @ coefficients.view(down, across, a, b)
            @ dct(b).to(like.device)
        )
        return chunks.permute(0, 2, 1, 3).reshape(like.shape)

    def largest(self, coefficients: Tensor) -> Tensor:
        """The places of the k largest of each chunk (chunks, k), int16; all of them in order, if there are no more."""
        chunks, size = coefficients.shape
        if size <= self.k:
            return torch.arange(size, dtype=torch.int16, device=coefficients.device).repeat(
                chunks, 1
            )
        return coefficients.abs().topk(self.k).indices.to(torch.int16)

    def averages(self, messages: Tensor) -> list[Tensor]:
        """The coefficients of each tensor, each averaged over the ranks that have sent it; 0 where none has."""
        start, found = 0, []
        for m in self.m or []:
            down, a, across, b = self.sides(m)
            chunks, k = down * across, min(self.k, a * b)
            total, senders = torch.zeros(2, chunks, a * b, device=m.device)
            end = start + 4 * chunks * k
            for content in messages:
                places = (
                    take(content, end, chunks * k, torch.int16)
                    if k < a * b
                    else self.largest(total)
                )
                places, values = (
                    places.view(chunks, k).long(),
                    take(content, start, chunks * k, torch.float32),
                )
                total.scatter_add_(1, places, values.view(chunks, k))
                senders.scatter_add_(1, places, torch.ones_like(places, dtype=torch.float32))
            start, found = (
                end + (2 * chunks * k if k < a * b else 0),
                [*found, total / senders.clamp(min=1)],
            )
        return found
