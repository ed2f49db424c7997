"""Gradients in 16 bits on the wire: Horovod's ``Compression.fp16``, and torch's ``fp16_compress_hook`` and
``bf16_compress_hook``.

As in torch's hooks a gradient is divided by N before it is summed, so that float16 overflows no sooner in the sum than
in one gradient. What rounding drops is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World

from .packing import flat, unflat


@dataclass
class Cast:
    world: World
    seed: int = 0
    dtype: torch.dtype = torch.float16
    bytes_sent: float = 0.0
    exchanges = "gradients"

    def exchange(self, tensors: list[Tensor], lr: float, last: bool) -> Path[list[Tensor]]:
        total = yield Collective("all_reduce", flat(tensors).to(self.dtype) / self.world.size)
        return unflat(total.float(), tensors)
