"""The task of the PTB recipe: its LSTM of 2 x 200, text, batches, clipping and schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import job
import ptb
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ReduceLROnPlateau

from . import METHODS
from .exchange import Compressed, Exchanging
from .metric import Metric


class Words:
    """An LSTM on Penn Treebank, or on Python's documentation. Its gradients are clipped, and SGD has no momentum.

    Scores after epochs are of the validation text, the last one of the test text.
    """

    metric = Metric(
        "perplexity",
        "test perplexity",
        "",
        "perplexity above dense (%)",
        "perplexity above dense training (%)",
        "validation perplexity",
        True,
    )
    optimizer: ClassVar = torch.optim.SGD
    defaults: ClassVar = {"batch_size": 5}
    clip, warmup = 0.25, 1 / 40
    flush = False  # as in the recipe
    target = clock_target = 115.0
    rates: ClassVar = {"signsgd": 1e-3, "demo": 1e-3}  # these move each entry by about as much
    evaluate = staticmethod(ptb.evaluate)
    length = 35  # words of a column in a batch

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
        self.steps = math.ceil((len(self.text) - 1) / self.length)
        torch.manual_seed(a.seed)
        self.model = self.made(words).to(device)
        self.hidden: Any = None

    @staticmethod
    def made(words: int) -> nn.Module:
        """The model, of a vocabulary."""
        return ptb.LanguageModel(words, *ptb.SIZES["small"])

    @staticmethod
    def fits(method: str) -> bool:
        return METHODS[method].driver in (Exchanging, Compressed)  # the others do not clip

    @classmethod
    def rehearsal(cls, bf16: bool = False) -> tuple[nn.Module, Callable[[], Tensor]]:
        """Of as many different words as Penn Treebank has."""
        torch.manual_seed(0)
        model = cls.made(10_000)
        words = torch.randint(10_000, (cls.length + 1, cls.defaults["batch_size"]))
        return model, lambda: words_backward(model, words, None)[0]

    @classmethod
    def settings(cls, method: str) -> dict[str, Any]:
        return {"lr": cls.rates.get(method, 20.0), "momentum": 0.0, "weight_decay": 0.0}

    def scheduler(self, sgd: Any) -> Any:
        return ReduceLROnPlateau(sgd, factor=0.25, patience=0, threshold=0, eps=0)

    def batches(self, epoch: int) -> Iterator[Tensor]:
        self.hidden = None
        for step in range(self.steps):
            self.seed_dropout(epoch * self.steps + step)
            yield self.text[step * self.length : (step + 1) * self.length + 1]

    def seed_dropout(self, step: int) -> None:
        """Dropout's draws follow from the step and the rank alone."""
        torch.manual_seed((self.a.seed * 1_000_000 + step) * self.size + self.rank)

    def backward(self, batch: Tensor) -> Tensor:
        loss, self.hidden = words_backward(self.model, batch, self.hidden)
        if METHODS[self.a.method].clips_own:
            clip_grad_norm_(self.model.parameters(), self.clip)
        return loss

    def score(self) -> float:
        return ptb.perplexity(self.evaluate(self.model, self.valid, self.length))

    def result(self, history: list[dict[str, Any]]) -> float:
        return ptb.perplexity(self.evaluate(self.model, self.test, self.length))

    def adjust(self, scheduler: Any, score: float) -> None:
        scheduler.step(*job.of_rank_0([score], self.device))  # alike on all ranks


def words_backward(model: nn.Module, words: Tensor, hidden: Any) -> tuple[Tensor, Any]:
    """Leaves the gradients of these words, and returns their loss and the state after them."""
    model.zero_grad()
    logits, hidden = model(words[:-1], hidden)
    loss = F.cross_entropy(logits.flatten(0, 1), words[1:].flatten())
    loss.backward()
    return loss.detach(), hidden
