"""Host and device: a GPU runs asynchronously, and the host does not wait for what it finds, but
reads it later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_asynchronous(device: torch.device) -> bool:
    """Whether launches return before they are done."""
    return device.type == "cuda"


def refuse_capture(device: torch.device) -> None:
    """Refuses a step within ``torch.cuda.graph()``, which would replay launches, and not what the
    host does in a step.

    Raises:
        RuntimeError: the current stream is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "backward() and step() must be outside of torch.cuda.graph() where gradients are exchanged, "
            "got a stream that is being captured (a graph replays launches, and not what the host does "
            "in each step)"
        )


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host, on the device, without waiting for it."""
    return (
        host.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else host.to(device)
    )


def tensor_of(
    numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Numbers as a tensor on the device, without waiting for it, and whatever the user's default
    device is.
    """
    return to_device(torch.tensor(numbers, dtype=dtype, device="cpu"), device)


class HostCopy:
    """A copy of a tensor that is on its way to the host, begun where the current stream is now."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor
        self._event: Any = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu"
            )
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def get(self) -> Tensor:
        """Waits for it: a host-device synchronisation, but hardly a wait if the copy began a step
        ago.
        """
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
