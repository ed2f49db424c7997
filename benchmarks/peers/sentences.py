"""The task of the transformer's recipe: its model, text, batches and schedule, with AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import ptb
import torch
import torch.nn.functional as F  # noqa: N812
import transformer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from .metric import Metric
from .words import Words

LENGTH, WIDTH, DROPOUT = 64, 128, 0.2  # as in the recipe


class Sentences:
    """A small transformer on Penn Treebank, or on Python's documentation.

    Scores after epochs are of the validation text, the last one of the test text.
    """

    metric: Metric = Words.metric
    optimizer: ClassVar = torch.optim.AdamW
    defaults: ClassVar = {"batch_size": 8}
    clip, warmup, flush = None, 0.0, True
    target = clock_target = 300.0
    # Twice the rate of dense training, where a worker's own AdamW divides by its own noise.
    rates: ClassVar = {"dgc-local": 4e-3}

    def __init__(self, a: Any, rank: int, size: int, device: torch.device):
        self.a, self.rank, self.size, self.device = a, rank, size, device
        self.dataset, words, parts = ptb.load(None if a.data in (None, "topics") else Path(a.data))
        ptb.check_alike(parts, rank, device)
        mine = slice(rank * a.batch_size, (rank + 1) * a.batch_size)
        self.text = (
            ptb.columns(parts["train"], a.batch_size * size)[:, mine].contiguous().to(device)
        )
        self.valid, self.test = (
            ptb.columns(parts[part], ptb.BATCH).to(device) for part in ("valid", "test")
        )
        self.steps = math.ceil((len(self.text) - 1) / LENGTH)
        torch.manual_seed(a.seed)
        self.model: nn.Module = transformer.Transformer(words, WIDTH, DROPOUT, LENGTH).to(device)

    @staticmethod
    def fits(method: str) -> bool:
        """Methods that drive any optimizer."""
        return method in ("dense", "fp16", "bf16", "diloco", "dgc-local")

    @classmethod
    def rehearsal(cls, bf16: bool = False) -> tuple[nn.Module, Callable[[], Tensor]]:
        """Of as many different words as Penn Treebank has."""
        torch.manual_seed(0)
        model = transformer.Transformer(10_000, WIDTH, DROPOUT, LENGTH)
        words = torch.randint(10_000, (cls.defaults["batch_size"], LENGTH + 1))
        return model, lambda: backward(model, words)

    @classmethod
    def settings(cls, method: str) -> dict[str, Any]:
        return {"lr": cls.rates.get(method, 2e-3), "weight_decay": 0.01}

    def scheduler(self, optimizer: Any) -> Any:
        steps = self.a.epochs * self.steps
        self._schedule = LambdaLR(optimizer, lambda step: transformer.rate(step, steps))
        return self._schedule

    def batches(self, epoch: int) -> Iterator[Tensor]:
        order = torch.randperm(
            self.steps, generator=torch.Generator().manual_seed(self.a.seed * 1000 + epoch)
        )
        for step, window in enumerate(order.tolist()):
            # Dropout's draws follow from the step and the rank alone.
            torch.manual_seed(
                (self.a.seed * 1_000_000 + epoch * self.steps + step) * self.size + self.rank
            )
            yield self.text[window * LENGTH : (window + 1) * LENGTH + 1].t()
            self._schedule.step()  # after the optimizer's

    def backward(self, batch: Tensor) -> Tensor:
        return backward(self.model, batch)

    def score(self) -> float:
        return ptb.perplexity(transformer.evaluate(self.model, self.valid, LENGTH))

    def result(self, history: list[dict[str, Any]]) -> float:
        return ptb.perplexity(transformer.evaluate(self.model, self.test, LENGTH))

    def adjust(self, scheduler: Any, score: float) -> None:
        """The learning rate follows steps, not epochs."""


def backward(model: nn.Module, words: Tensor) -> Tensor:
    """Leaves the gradients of these words, (batch, length + 1), and returns their loss."""
    model.zero_grad()
    loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    return loss.detach()
