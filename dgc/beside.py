"""Beside what: on a GPU, a stream of our own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from dgc.transport import Exchange


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """On a GPU, what is launched within runs after what has been launched so far and beside what is launched next."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    except BaseException:  # whoever catches it finds what was put back, and may free gradients that were being read
        rejoin(device)
        raise


def follow(streams: Iterable[Any]) -> None:
    """On GPUs, what is launched within :func:`beside` from now on also runs after what was launched so far in these
    streams: a model's branches may have streams of their own, and their gradients too.
    """
    for stream in streams:
        _stream(stream.device).wait_stream(stream)


def rejoin(device: torch.device) -> None:
    """On a GPU, what is launched next runs after what was launched within :func:`beside`."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))


def abandon(exchange: Exchange, device: torch.device, wait: bool) -> None:
    """See :meth:`Exchange.abandon`; what is launched next finds what was put back."""
    with beside(device):
        exchange.abandon(wait)
    rejoin(device)
