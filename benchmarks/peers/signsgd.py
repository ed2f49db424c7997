"""signSGD with majority vote (Bernstein, Wang, Azizzadenesheli, Anandkumar, ICML 2018), and with momentum: Signum.

Algorithm 3 (majority vote), with the momentum of algorithm 2 (Signum): each rank takes m = b m + (1 - b) g and sends
sign(m), one bit an entry. The update is the sign of the sum of signs, times the learning rate: each entry moves by the
same length, or stays where the votes are even. b = 0 is signSGD itself. A bit has no zero: sign(0) counts as 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World

from .packing import flat, pack, unflat, unpack


@dataclass
class SignSGD:
    world: World
    seed: int = 0
    momentum: float = 0.9
    m: Tensor | None = None
    bytes_sent: float = 0.0
    exchanges = "gradients"

    def exchange(self, tensors: list[Tensor], lr: float, last: bool) -> Path[list[Tensor]]:
        g = flat(tensors)
        self.m = (1 - self.momentum) * g if self.m is None else torch.lerp(g, self.m, self.momentum)
        messages = yield Collective("all_gather", pack((self.m >= 0).to(torch.uint8), 1))
        votes = sum(2.0 * unpack(bits, 1, len(g)) - 1 for bits in messages)
        return unflat(votes.sign(), tensors)
