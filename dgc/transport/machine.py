"""The ranks of one machine as a world of their own."""

from __future__ import annotations

from dataclasses import replace

import torch

from dgc.collective import Collective, World
from dgc.transport.run import ProcessSet, Transport, Wait


class Machine:
    """Performs collectives among the ranks of this rank's machine.

    Args:
        transport: of all ranks, which it has grouped by machine.
        world: all ranks, by machine.
    """

    process_set: ProcessSet = None
    state_is_broadcast_globally = False

    def __init__(self, transport: Transport, world: World):
        self._transport, self._all = transport, world
        self.optimizer_module = transport.optimizer_module

    @property
    def world(self) -> World:
        """See :class:`dgc.transport.run.Transport`."""
        return World(self._all.local_rank, self._all.node_size)

    def start(self, collective: Collective, name: str) -> Wait:
        """See :class:`dgc.transport.run.Transport`."""
        return self._transport.start(replace(collective, group="intra_node"), f"{name}.machine")

    def by_node(self, device: torch.device) -> int:
        """See :class:`dgc.transport.run.Transport`."""
        return self._all.node_size
