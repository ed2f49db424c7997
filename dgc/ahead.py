"""When: a GPU runs ahead of the host, which does not wait for what it finds, but hears of it later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def runs_ahead(device: torch.device) -> bool:
    """Whether launches return before they are done."""
    return device.type == "cuda"


class Answer:
    """A tensor on its way to the host, from when the current stream has come to it."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor
        self._event: Any = None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def get(self) -> Tensor:
        """Waits for it; if it is of a step ago there is hardly anything to wait for."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
