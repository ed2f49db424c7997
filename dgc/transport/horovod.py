"""Collectives over Horovod, which negotiates by name and overlaps them with whatever the process does."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from dgc.compressor import Collective, World
from dgc.transport import Wait

BITS = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}


class Horovod:
    """The ranks of a Horovod process set; all of them when it is None."""

    def __init__(self, process_set: Any = None):
        self._set = hvd.global_process_set if process_set is None else process_set

    @property
    def world(self) -> World | None:
        """Asked anew each time: an elastic job changes size between two steps."""
        if not self._set.included():
            return None
        return World(self._set.rank(), self._set.size())

    def start(self, collective: Collective, name: str) -> Wait:
        tensor = collective.tensor
        if collective.op == "sum":
            return self._sum(tensor, name)
        # Horovod does not know bfloat16, nor bool everywhere; where nothing is added up, their bits will do.
        bits = tensor.view(BITS[tensor.dtype]) if tensor.dtype in BITS else tensor
        if collective.op == "gather":
            handle = hvd.allgather_async(bits.unsqueeze(0), name=name, process_set=self._set)
        else:
            root = self._set.ranks[collective.root]  # Horovod counts roots globally, also within a process set
            handle = hvd.broadcast_async_(bits, root, name=name, process_set=self._set)
        return lambda: hvd.synchronize(handle).view(tensor.dtype)

    def _sum(self, tensor: Tensor, name: str) -> Wait:
        flying = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        handle = hvd.allreduce_async_(flying, name=name, op=hvd.Sum, process_set=self._set)
        return lambda: hvd.synchronize(handle).to(tensor.dtype)
