"""What a method has besides its code: a name in tables, its settings, and what drives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .exchange import Bring, Exchanging

Family = Literal[
    "dense", "DGC", "quantised", "low rank", "sparse", "cast", "signs", "local steps", "late"
]


@dataclass(frozen=True)
class Entry:
    """A method with its settings.

    Args:
        title: in tables and figures.
        family: of which figures have a colour and a marker.
        collective: by which compressed tensors travel.
        paper: whose it is.
        make: the method, of the world and a seed; or, given a schedule of the sparsity, a ``dgc.Config``; or nothing.
        momentum: of SGD, with Nesterov's where it is not 0. 0 where the method has its own, or none.
        lr: at the start of the training.
        weight_decay: times the parameters, added to what was exchanged.
        driver: what makes the steps.
        every: steps from one exchange to the next.
        whole: whether its messages are as large as the model, in 32 or 16 bits.
        sparsity: of DGC, after the warm-up.
        warmup: of DGC, in shares of the training. None: the task's, which is the paper's.
        clips_own: where gradients are clipped, a worker's own before the exchange: what comes back is no gradient.
    """

    title: str
    family: Family
    collective: Bring
    paper: str
    make: Callable[..., Any] | None = None
    momentum: float = 0.9
    lr: float = 0.1
    weight_decay: float = 1e-4
    driver: Any = Exchanging
    every: int = 1
    whole: bool = False
    sparsity: float = 0.999
    warmup: float | None = None
    clips_own: bool = False
