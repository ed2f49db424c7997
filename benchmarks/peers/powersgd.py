"""PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019): each matrix as the product of two thin ones, P and Q.

Algorithm 1 (rank-r compression), with M the gradient as a matrix plus the error e (algorithm 2, error feedback):

    Q orthonormal;  P = sum of M Q over ranks;  P orthonormal;  Q = mean of M^T P over ranks;  M ~ P Q^T;  e = M - P Q^T

The next step begins with this Q. It is made orthonormal first as in torch's hook, which the authors' code leaves out: P
spans the same either way, so that P Q^T is the same but for rounding. Both sums go by ring allreduce.

:class:`TorchPowerSGD` is torch's hook as it ships, over torch.distributed. :class:`PowerSGD` is the same, to rounding,
for ranks in one process, where it cannot run. Both begin after two dense steps, the fewest that torch's hook accepts.
Tensors that would not shrink to less than half, and one-dimensional ones, travel dense.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dgc.collective import Collective, Path, World, dense_bytes

from .packing import Apart, flat, mean, some, unflat

START, SEED = 2, 0  # of the hook: dense steps, and its seed, which all ranks share


@dataclass
class PowerSGD:
    world: World
    seed: int = 0  # not used
    rank: int = 1  # higher => more bytes, less error
    steps: int = 0
    q: list[Tensor] | None = None
    e: list[Tensor] | None = None
    bytes_sent: float = 0.0
    exchanges = "gradients"

    def exchange(self, tensors: list[Tensor], lr: float, last: bool) -> Path[list[Tensor]] | Apart:
        self.steps += 1
        if self.steps <= START:
            return mean(tensors, self.world)
        return some(tensors, self.world, self.average, self.worth)

    def worth(self, tensor: Tensor) -> bool:
        rows, columns = len(tensor), tensor.numel() // len(tensor)
        return (
            tensor.ndim > 1
            and 2 * (rows + columns) * min(rows, columns, self.rank) < tensor.numel()
        )

    def average(self, tensors: list[Tensor]) -> Path[list[Tensor]]:
        matrices = [tensor.reshape(len(tensor), -1) for tensor in tensors]
        if self.q is None or self.e is None:
            self.q, self.e = self.begin(matrices), [torch.zeros_like(matrix) for matrix in matrices]
        m = [matrix + e for matrix, e in zip(matrices, self.e, strict=True)]
        q = [torch.linalg.qr(q).Q for q in self.q]
        p = [m @ q for m, q in zip(m, q, strict=True)]
        p = [torch.linalg.qr(p).Q for p in unflat((yield Collective("all_reduce", flat(p))), p)]
        q = [m.T @ p for m, p in zip(m, p, strict=True)]
        self.q = unflat((yield Collective("all_reduce", flat(q))) / self.world.size, q)
        found = [p @ q.T for p, q in zip(p, self.q, strict=True)]
        self.e = [m - found for m, found in zip(m, found, strict=True)]
        return [found.view(tensor.shape) for found, tensor in zip(found, tensors, strict=True)]

    def begin(self, matrices: list[Tensor]) -> list[Tensor]:
        """The hook's first Q: it draws them shape by shape, in the order in which shapes first occur."""
        seed = int(np.random.RandomState(SEED).randint(1_000_000_000))
        draw, drawn = torch.Generator().manual_seed(seed), {}
        for shape in dict.fromkeys(matrix.shape for matrix in matrices):
            for i, matrix in enumerate(matrices):
                if matrix.shape == shape:
                    drawn[i] = torch.randn(shape[1], min(*shape, self.rank), generator=draw).to(
                        matrix.device
                    )
        return [drawn[i] for i in range(len(matrices))]


class Bucket:
    """All gradients as one bucket, which the hook takes in place of DistributedDataParallel's.

    With several buckets it aborts over gloo: its later collectives begin in an order that differs between ranks.
    """

    def __init__(self, tensors: list[Tensor]):
        self._buffer = flat(tensors)
        self._gradients = unflat(self._buffer, tensors)

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


@dataclass
class TorchPowerSGD:
    world: World
    seed: int = 0
    rank: int = 1
    bytes_sent: float = 0.0
    state: object = field(init=False)
    exchanges = "gradients"

    def __post_init__(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self.state = PowerSGDState(None, self.rank, START, random_seed=SEED)

    def exchange(self, tensors: list[Tensor], lr: float, last: bool) -> Path[list[Tensor]]:
        """The hook does the collectives itself, and counts entries in its state."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        before, dense = self.state.total_numel_after_compression, self.state.iter < START
        result = powerSGD_hook(self.state, Bucket(tensors)).wait()
        sent = len(result) if dense else self.state.total_numel_after_compression - before
        self.bytes_sent += dense_bytes(sent, self.world.size)
        return unflat(result, tensors)
        yield  # a generator, as all of them
