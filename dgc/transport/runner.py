"""A path under way: the collectives that it asks for, started and waited for in turn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from dgc.collective import AbandonedError, Collective, Path
from dgc.trace import stage
from dgc.transport.protocol import Transport, Wait

T = TypeVar("T")


class PathRun(Generic[T]):
    """A path on its way: its collective has begun, and :meth:`finish` takes it to its end."""

    def __init__(self, path: Path[T], transport: Transport, name: str, on_start: Callable[[Collective], None]):
        self._path, self._transport, self._name, self._on_start = path, transport, name, on_start
        self._rounds = 0
        self._result: list[T] = []
        self._wait = self._start(next(path))

    def _start(self, collective: Collective) -> Wait:
        self.under_way = collective
        self._on_start(collective)
        name = self._name if self._rounds == 0 else f"{self._name}#{self._rounds}"
        self._rounds += 1
        try:
            return self._transport.start(collective, name)
        except BaseException as error:
            self._path.throw(error)  # the path puts back what was taken, and raises it again
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

    @property
    def ready(self) -> bool:
        """Whether to :meth:`advance` during a backward pass; see :class:`dgc.transport.protocol.Wait`."""
        return self._wait.ready()

    def finish(self) -> T:
        """Waits for the collectives that the path asks for, and returns its result."""
        while self.advance():
            pass
        return self._result[0]

    def abandon(self, wait: bool) -> None:
        """Gives up; what was taken is put back.

        Args:
            wait: for the collective under way, where all ranks give up alike and will go on.
        """
        if wait:
            self._wait()
        with suppress(AbandonedError):
            self._path.throw(AbandonedError())
