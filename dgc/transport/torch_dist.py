"""Collectives over torch.distributed (gloo, NCCL), which pairs them up by the order in which they begin."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dgc.compressor import Collective, World
from dgc.transport import Wait

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13


class TorchDistributed:
    """The ranks of a process group; those of the default group when it is None."""

    def __init__(self, group: Any = None):
        self._group = group

    @property
    def world(self) -> World | None:
        """None for a process outside the group."""
        rank = dist.get_rank(self._group)
        return None if rank < 0 else World(rank, dist.get_world_size(self._group))

    def start(self, collective: Collective, name: str) -> Wait:
        """``name`` is not used: the order decides."""
        tensor = collective.tensor.contiguous()
        result = tensor
        if collective.op == "gather":
            size = dist.get_world_size(self._group)
            result = torch.empty(size, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
            work = _all_gather(result.view(-1), tensor.view(-1), group=self._group, async_op=True)
        elif collective.op == "sum":
            work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._group, async_op=True)
        else:
            group: Any = self._group if self._group is not None else dist.group.WORLD
            root = dist.get_global_rank(group, collective.root)
            work = dist.broadcast(tensor, src=root, group=self._group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return result

        return wait
