"""Over what: the collectives that a path asks for, performed by Horovod, torch.distributed, or within one process."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from dgc.compressor import AbandonedError, Collective, Path, World

Wait = Callable[[], Tensor]  # blocks until the result is there, and returns it


class Transport(Protocol):
    """Performs collectives among the ranks of one world."""

    process_set: Any  # what the world is made of: Horovod's, or torch's process group; None for all that there are

    @property
    def world(self) -> World | None:
        """This rank and the live number of ranks; None for a process outside the process set."""

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


class NotInitializedError(RuntimeError, ValueError):
    """Neither Horovod, which raises a ValueError for it, nor torch.distributed is initialised."""


def find(process_set: Any = None) -> Transport:
    """The transport of what is initialised: a lockstep rank, else Horovod, else torch.distributed.

    Args:
        process_set: a ``horovod.torch.ProcessSet`` or a ``torch.distributed.ProcessGroup`` restricts the exchange,
            and decides between the two; None means all processes.

    Raises:
        RuntimeError: nothing is initialised.
        TypeError: ``process_set`` is neither.
    """
    from dgc.transport import lockstep

    if process_set is None and (rank := lockstep.current()) is not None:
        return rank
    # Not imported here: if the user initialised Horovod, it is loaded, and if not, it is not wanted.
    horovod: Any = sys.modules.get("horovod.torch")
    distributed: Any = sys.modules.get("torch.distributed")
    has_horovod = horovod is not None and horovod.is_initialized()
    has_distributed = distributed is not None and distributed.is_available() and distributed.is_initialized()
    # The second is what torch.distributed.new_group gives the processes outside.
    if has_distributed and (isinstance(process_set, distributed.ProcessGroup)
                            or process_set is distributed.GroupMember.NON_GROUP_MEMBER):
        from dgc.transport.torch_dist import TorchDistributed
        return TorchDistributed(process_set)
    if has_horovod and (process_set is None or isinstance(process_set, horovod.ProcessSet)):
        from dgc.transport.horovod import Horovod
        return Horovod(process_set)
    if has_distributed and process_set is None:
        from dgc.transport.torch_dist import TorchDistributed
        return TorchDistributed(None)
    if has_horovod or has_distributed:
        raise TypeError(f"process_set is {process_set!r}; accepted: None, a ProcessSet of an initialised Horovod, "
                        "or a torch.distributed.ProcessGroup")
    raise NotInitializedError("nothing to exchange gradients over: call hvd.init() of horovod.torch, or "
                              "torch.distributed.init_process_group(), or run inside dgc.lockstep.run(), before this")


def gather_bytes(transport: Transport, content: bytes, name: str, device: torch.device) -> list[bytes]:
    """Every rank's bytes, in the order of ranks; they may be of different lengths.

    Args:
        transport: among whose ranks.
        content: this rank's.
        name: of the collectives.
        device: of the tensors that travel.
    """
    own = torch.tensor([len(content)], device=device)
    lengths = transport.start(Collective("gather", own), f"{name}.lengths")().flatten().tolist()
    padded = torch.tensor(list(content.ljust(max(lengths), b"\0")), dtype=torch.uint8, device=device)
    rows = transport.start(Collective("gather", padded), name)().tolist()
    return [bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def node_size(transport: Transport, machine: str, device: torch.device) -> int:
    """How many ranks each machine has, for :meth:`Transport.by_node`.

    Args:
        transport: whose ranks are asked.
        machine: what this rank's is called; no two are called the same.
        device: of the tensors that travel.

    Raises:
        ValueError: some machines have more than others, or ranks are not numbered machine by machine.
    """
    machines = gather_bytes(transport, machine.encode(), "dgc.machines", device)
    runs = [len(list(ranks)) for _, ranks in itertools.groupby(machines)]
    if len(runs) > len(set(machines)):
        raise ValueError(f"hierarchical is True, but the ranks are not numbered machine by machine: they are on "
                         f"{', '.join(name.decode(errors='replace') for name in machines[:8])} ...; accepted: as "
                         "horovodrun and torchrun number them, or mpirun --map-by slot")
    if len(set(runs)) > 1:
        raise ValueError(f"hierarchical is True, but the machines have {', '.join(map(str, runs))} ranks; accepted: "
                         "the same number on each")
    return runs[0]


class Exchange:
    """A path on its way: its collective has begun, and :meth:`finish` takes it to its end."""

    def __init__(self, path: Path, transport: Transport, name: str, on_start: Callable[[Collective], None]):
        self._path, self._transport, self._name, self._on_start = path, transport, name, on_start
        self._rounds, self._result = 0, None
        self._wait = self._start(next(path))

    def _start(self, collective: Collective) -> Wait:
        self.under_way = collective
        self._on_start(collective)
        name = self._name if self._rounds == 0 else f"{self._name}#{self._rounds}"
        self._rounds += 1
        return self._transport.start(collective, name)

    def advance(self) -> bool:
        """Waits for the collective under way, and begins the next one; False where there is none."""
        try:
            result = self._wait()
        except BaseException as error:
            self._path.throw(error)  # the path puts back what was taken, and raises it again
            raise
        try:
            collective = self._path.send(result)
        except StopIteration as end:
            self._result = end.value
            return False
        self._wait = self._start(collective)
        return True

    @property
    def ready(self) -> bool:
        """Whether to :meth:`advance` during a backward pass: True where each rank must do so at the same place, even if
        it has to wait; else, over Horovod, when it has not.
        """
        return getattr(self._wait, "done", lambda: True)()

    def finish(self) -> Any:
        """Waits for the collectives that the path asks for, and returns its result."""
        while self.advance():
            pass
        return self._result

    def abandon(self, wait: bool) -> None:
        """Gives up; what was taken is put back.

        Args:
            wait: for the collective under way, where all ranks give up alike and will go on.
        """
        if wait:
            self._wait()
        with suppress(AbandonedError):
            self._path.throw(AbandonedError())
