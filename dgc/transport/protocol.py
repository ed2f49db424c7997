"""What a transport is: it performs the collectives that paths ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from dgc.collective import Collective, World

HOROVODS_MODULE = "horovod.torch.optimizer"  # by which hvd.broadcast_optimizer_state tells distributed optimizers


class HorovodProcessSet(Protocol):
    """A ``horovod.torch.ProcessSet``."""

    ranks: list[int]

    def included(self) -> bool: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...


ProcessSet: TypeAlias = "HorovodProcessSet | torch.distributed.ProcessGroup | None"  # None: all processes


def _at_once() -> bool:
    return True


@dataclass(frozen=True)
class Wait:
    """A collective under way.

    Args:
        result: blocks until the result is there, and returns it.
        ready: whether to go on during a backward pass: True where each rank must do so at the same place, even if it
            has to wait; over Horovod, which negotiates by name, when it need not.
    """

    result: Callable[[], Tensor]
    ready: Callable[[], bool] = _at_once

    def __call__(self) -> Tensor:
        return self.result()


class Transport(Protocol):
    """Performs collectives among the ranks of one world."""

    process_set: ProcessSet  # what the world is made of; None for all that there are
    optimizer_module: str  # the ``__module__`` of optimizers over it

    @property
    def world(self) -> World | None:
        """This rank and the live number of ranks; None for a process outside the process set."""

    @property
    def broadcasts_beyond(self) -> bool:
        """Whether the optimizer's state is broadcast to processes outside this world too, which need the same one."""

    def start(self, collective: Collective, name: str) -> Wait:
        """Begins a collective. Every rank of its group begins the same ones, under the same names, in the same order.
        """

    def by_node(self, device: torch.device) -> int:
        """Groups the ranks by machine, after which collectives within a node and across nodes can be started. All ranks
        call it.

        Args:
            device: of tensors that can travel.

        Returns:
            How many ranks each machine has.

        Raises:
            ValueError: on all ranks alike, if they cannot be grouped.
        """
