"""Collectives over Horovod, which negotiates by name and overlaps them with whatever the process does."""

from __future__ import annotations

import os
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from dgc.compressor import Collective, World
from dgc.transport import Wait


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

    @property
    def elastic(self) -> bool:
        """Whether ranks may come and go."""
        return os.environ.get("HOROVOD_ELASTIC") == "1"

    def start(self, collective: Collective, name: str) -> Wait:
        tensor = collective.tensor
        if collective.op == "gather":
            handle = hvd.allgather_async(tensor.unsqueeze(0), name=name, process_set=self._set)
        elif collective.op == "sum":
            return self._sum(tensor, name)
        else:
            root = self._set.ranks[collective.root]  # Horovod counts roots globally, also within a process set
            handle = hvd.broadcast_async_(tensor, root, name=name, process_set=self._set)
        return lambda: hvd.synchronize(handle)

    def _sum(self, tensor: Tensor, name: str) -> Wait:
        flying = tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # Horovod does not know bfloat16
        handle = hvd.allreduce_async_(flying, name=name, op=hvd.Sum, process_set=self._set)
        return lambda: hvd.synchronize(handle).to(tensor.dtype)
