"""Host and device: a GPU runs asynchronously, and the host does not wait for what it finds, but reads it later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_asynchronous(device: torch.device) -> bool:
    """Whether launches return before they are done."""
    return device.type == "cuda"


class HostCopy:
    """A copy of a tensor that is on its way to the host, begun where the current stream is now."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor
        self._event: Any = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def get(self) -> Tensor:
        """Waits for it: a host-device synchronisation, but hardly a wait if the copy began a step ago."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
