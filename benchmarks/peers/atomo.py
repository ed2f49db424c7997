"""Spectral ATOMO (Wang, Sievert, Charles, Liu, Wright, Papailiopoulos, NeurIPS 2018): singular vectors drawn at random.

g is a sum of atoms, lambda_i a_i; here its singular values and the outer products of its singular vectors. The estimate
is the sum of lambda_i t_i / p_i a_i, with t_i = 1 with probability p_i, else 0. So its mean is g. The p_i are those of
least variance that sum up to a budget s.

A convolution is a matrix of two of its kernels in a row, as in the authors' code. Of a chosen atom two vectors travel,
in float32. How many are chosen differs by rank and step: ranks tell one another the lengths first, and shorter messages
are padded, which counts as sent. What has no use of it, and one-dimensional tensors, travel dense.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World

from .packing import Apart, message, some, take


def probabilities(atoms: Tensor, budget: float) -> Tensor:
    """Of sizes (n,) >= 0 in falling order: those that sum up to the budget and whose estimate varies least."""
    p, rest = torch.ones_like(atoms), atoms.flip(0).cumsum(0).flip(0)
    for i in range(len(atoms)):
        left = budget - i
        if left * atoms[i] <= rest[i]:  # balanced: nobody's probability is above 1
            p[i:] = left * atoms[i:] / rest[i] if rest[i] > 0 else 0
            break
    return p


def matrix(tensor: Tensor) -> Tensor:
    """A tensor (a, b, ...) as (a b / 2, 2 ...), where a b is even; of two dimensions as it is."""
    kernels = tensor.reshape(len(tensor) * tensor.shape[1], -1)
    if kernels.shape[1] == 1:
        return tensor.reshape(len(tensor), -1)
    return kernels if len(kernels) % 2 else kernels.reshape(len(kernels) // 2, -1)


@dataclass
class Atomo:
    world: World
    seed: int = 0
    budget: int = 3  # s; more => more bytes, less noise
    bytes_sent: float = 0.0
    exchanges = "gradients"

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)

    def exchange(self, tensors: list[Tensor], lr: float, last: bool) -> Apart:
        return some(tensors, self.world, self.average, self.worth)

    def worth(self, tensor: Tensor) -> bool:
        return tensor.ndim > 1 and self.budget * sum(matrix(tensor).shape) < tensor.numel()

    def average(self, tensors: list[Tensor]) -> Path[list[Tensor]]:
        own = self.encode([matrix(t) for t in tensors])
        lengths = (
            yield Collective("all_gather", torch.tensor([len(own)], device=own.device))
        ).view(-1)
        padded = torch.nn.functional.pad(own, (0, int(lengths.max()) - len(own)))
        messages = yield Collective("all_gather", padded)
        decoded = [self.decode(content, tensors) for content in messages]
        return [sum(parts) / self.world.size for parts in zip(*decoded, strict=True)]

    def encode(self, matrices: list[Tensor]) -> Tensor:
        """How many atoms of each (int16), and of each lambda / p times the left vector, and the right vector."""
        counts, vectors = [], []
        for matrix in matrices:
            u, atoms, vt = torch.linalg.svd(matrix, full_matrices=False)
            p = probabilities(atoms, self.budget)
            chosen = (torch.rand(len(p), generator=self.random).to(p.device) < p).nonzero()[:, 0]
            counts.append(len(chosen))
            vectors += [(u[:, chosen] * (atoms / p)[chosen]).T, vt[chosen]]
        return message(torch.tensor(counts, dtype=torch.int16, device=u.device), *vectors)

    def decode(self, content: Tensor, tensors: list[Tensor]) -> list[Tensor]:
        counts, start, found = (
            take(content, 0, len(tensors), torch.int16).tolist(),
            2 * len(tensors),
            [],
        )
        for count, tensor in zip(counts, tensors, strict=True):
            rows, columns = matrix(tensor).shape
            values = take(content, start, count * (rows + columns), torch.float32)
            u, v = values.split([count * rows, count * columns])
            found.append((u.view(count, rows).T @ v.view(count, columns)).view(tensor.shape))
            start += 4 * len(values)
        return found
