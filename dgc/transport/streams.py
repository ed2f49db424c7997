"""Our own CUDA stream, beside the one that computes. On other devices nothing here does anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, TypeVar

import torch

from dgc.collective import Collective, Path
from dgc.transport.protocol import Transport
from dgc.transport.runner import PathRun

T = TypeVar("T")


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Launches what is within after all that has been launched so far, and beside what is launched next."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    except BaseException:  # whoever catches it finds what was put back, and may free gradients that were being read
        wait_for_own_stream(device)
        raise


def join_streams(streams: Iterable[Any]) -> None:
    """Launches what comes next, also within :func:`own_stream`, after what was launched so far in these streams: a
    model's branches may have streams of their own, and their gradients too.
    """
    for stream in streams:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


def wait_for_own_stream(device: torch.device) -> None:
    """Launches what comes next after what was launched within :func:`own_stream`."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))


class StreamedRun(Generic[T]):
    """An exchange in our own stream.

    Args:
        device: of the tensors that travel.
        path, transport, name, on_start: as for :class:`dgc.transport.runner.PathRun`.
    """

    def __init__(self, device: torch.device, path: Path[T], transport: Transport, name: str,
                 on_start: Callable[[Collective], None]):
        self._device = device
        with own_stream(device):
            self._exchange = PathRun(path, transport, name, on_start)

    def leave_node(self, wait: bool) -> None:
        """Goes on to the other nodes with what was averaged within the node.

        Args:
            wait: also where it is not ready.
        """
        if self._exchange.under_way.group == "node" and (wait or self._exchange.ready):
            with own_stream(self._device):
                self._exchange.advance()

    def finish(self) -> T:
        """Waits for the path's end; what is launched next finds its result, which is returned."""
        with own_stream(self._device):
            result = self._exchange.finish()
        wait_for_own_stream(self._device)
        return result

    def abandon(self, wait: bool) -> None:
        """See :meth:`dgc.transport.runner.PathRun.abandon`; what is launched next finds what was put back."""
        with own_stream(self._device):
            self._exchange.abandon(wait)
        wait_for_own_stream(self._device)
