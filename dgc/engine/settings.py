"""The arguments that an optimizer was made with."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from dgc.collective import World
from dgc.config import Average, Config
from dgc.transport import ProcessSet, Transport


class Role(Enum):
    """The part of this process in the exchange."""

    MEMBER = "exchanges gradients with others"
    SINGLE_PROCESS = "is the only process, so that the plain optimizer does"
    OUTSIDE = "is not in the process set, so that the plain optimizer does"


@dataclass
class Settings:
    """The arguments of :func:`dgc.DistributedOptimizer`, and what follows from them.

    Stock Horovod's optimizer has most of them as attributes, which scripts read, and may change
    between two steps.
    """

    config: Config
    transport: Transport
    named_parameters: list[tuple[str, Tensor]] | None = None
    backward_passes_per_step: int = 1
    op: int = Average
    gradient_predivide_factor: float = 1.0
    groups: int | list[list[Tensor]] | None = None
    sparse_as_dense: bool = False
    process_set: ProcessSet = None  # as given
    grad_scaler: torch.amp.GradScaler | None = None  # one that is enabled
    steps_of_round: int = 1  # that the next exchange is for, with local steps
    local_optimizer: Callable[[], Any] | None = None  # takes the local steps; a weak reference
    in_ddp: bool = False  # DistributedDataParallel has made the parameters alike
    elastic: bool = field(default_factory=lambda: os.environ.get("HOROVOD_ELASTIC") == "1")
    role: Role = field(init=False)

    def __post_init__(self) -> None:
        world = self.transport.world
        if self.config.local_steps is not None:  # gradients stay on their rank, with their scale
            self.backward_passes_per_step, self.grad_scaler = 1, None
        # One process takes part too, where torch's optimizer would not do what is asked for, or
        # where other processes are to have the same state.
        needed = (
            self.config.nonfinite == "skip"
            or (self.grad_scaler is not None and self.config.clip_norm is not None)
            or self.transport.state_is_broadcast_globally
        )
        if world is None:
            self.role = Role.OUTSIDE
        else:
            self.role = (
                Role.SINGLE_PROCESS
                if world.size == 1 and not self.elastic and not needed
                else Role.MEMBER
            )

    @property
    def world(self) -> World:
        """This rank and how many there are now; of a process outside, itself alone."""
        return replace(self.transport.world or World(0, 1), average=self.average)

    @property
    def average(self) -> bool:
        """Whether sums over ranks are divided by their number."""
        return self.op == Average

    @property
    def exchanges(self) -> bool:
        """Whether this process exchanges gradients at all."""
        return self.role is Role.MEMBER

    @property
    def checks_finite_first(self) -> bool:
        """Whether nothing leaves before all ranks have agreed that all of their gradients are
        finite.
        """
        return self.grad_scaler is not None or self.config.nonfinite == "skip"
