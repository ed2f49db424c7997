"""What a transport is, and how a path runs over one: its collectives are started and waited for in
turn, on CUDA in a stream of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from dgc.collective import AbortedError, Collective, Path, World
from dgc.trace import stage

T = TypeVar("T")
HOROVODS_MODULE = (
    "horovod.torch.optimizer"  # by which hvd.broadcast_optimizer_state tells distributed optimizers
)


class HorovodProcessSet(Protocol):
    """A ``horovod.torch.ProcessSet``."""

    ranks: list[int]

    def included(self) -> bool: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...


ProcessSet: TypeAlias = (
    "HorovodProcessSet | torch.distributed.ProcessGroup | None"  # None: all processes
)


@dataclass(frozen=True)
class Wait:
    """A collective under way.

    Args:
        result: blocks until the result is there, and returns it.
        ready: whether to go on during a backward pass: True where each rank must do so at the same
            place, even if it has to wait; over Horovod, which negotiates by name, when it need not.
    """

    result: Callable[[], Tensor]
    ready: Callable[[], bool] = lambda: True

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
    def state_is_broadcast_globally(self) -> bool:
        """Whether the optimizer's state is broadcast to processes outside this world too, which
        need the same one.
        """

    def start(self, collective: Collective, name: str) -> Wait:
        """Begins a collective. Every rank of its group begins the same ones, under the same names,
        in the same order.
        """

    def by_node(self, device: torch.device) -> int:
        """Groups the ranks by machine, after which collectives within a node and across nodes can
        be started. All ranks call it.

        Args:
            device: of tensors that can travel.

        Returns:
            How many ranks each machine has.

        Raises:
            ValueError: on all ranks alike, if they cannot be grouped.
        """


class PathRun(Generic[T]):
    """A path on its way: its collective has begun, and :meth:`finish` takes it to its end.

    Args:
        path: the path.
        transport: what performs its collectives.
        name: of the collectives, alike on every rank.
        on_start: is told each collective that begins.
        device: of the tensors that travel. Given a GPU, all runs in our own stream there, and what
            is launched next waits for that.
    """

    def __init__(
        self,
        path: Path[T],
        transport: Transport,
        name: str,
        on_start: Callable[[Collective], None],
        device: torch.device | None = None,
    ):
        self._path, self._transport, self._name, self._on_start = path, transport, name, on_start
        self._device = device
        self._rounds = 0
        self._result: list[T] = []
        with own_stream(device):
            self._wait = self._start(next(path))

    def _start(self, collective: Collective) -> Wait:
        self._under_way = collective
        self._on_start(collective)
        name = self._name if self._rounds == 0 else f"{self._name}#{self._rounds}"
        self._rounds += 1
        try:
            return self._transport.start(collective, name)
        except BaseException as error:
            self._path.throw(error)  # the path restores v, and raises the error again
            raise

    def advance(self) -> bool:
        """Waits for the collective under way, and begins the next one; False where there is none."""
        try:
            with stage("dgc::exchange"):
                result = self._wait()
        except BaseException as error:
            self._path.throw(error)
            raise
        try:
            collective = self._path.send(result)
        except StopIteration as end:
            self._result.append(end.value)
            return False
        self._wait = self._start(collective)
        return True

    def start_inter_node(self, wait: bool) -> None:
        """Goes on to the other nodes with what was averaged within the node.

        Args:
            wait: also where it is not ready.
        """
        if self._under_way.group == "intra_node" and (wait or self._wait.ready()):
            with own_stream(self._device):
                self.advance()

    def finish(self) -> T:
        """Waits for the collectives that the path asks for, and returns its result."""
        with own_stream(self._device):
            while self.advance():
                pass
        wait_for_own_stream(self._device)
        return self._result[0]

    def abort(self, wait: bool) -> None:
        """Aborts the path, which restores v.

        Args:
            wait: for the collective under way, where all ranks abort alike and will go on.
        """
        with own_stream(self._device):
            if wait:
                self._wait()
            with suppress(AbortedError):
                self._path.throw(AbortedError())
        wait_for_own_stream(self._device)


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


@contextmanager
def own_stream(device: torch.device | None) -> Iterator[None]:
    """Launches what is within after all that has been launched so far, and beside what is launched
    next.
    """
    if device is None or device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    except BaseException:
        # Whoever catches it finds v restored, and may free gradients that were being read.
        wait_for_own_stream(device)
        raise


def join_streams(streams: Iterable[Any]) -> None:
    """Launches what comes next, also within :func:`own_stream`, after what was launched so far in
    these streams: a model's branches may have streams of their own, and their gradients too.
    """
    for stream in streams:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


def wait_for_own_stream(device: torch.device | None) -> None:
    """Launches what comes next after what was launched within :func:`own_stream`."""
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))
