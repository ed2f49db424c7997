"""The task of the transformer's recipe: its model, text, batches and schedule, with AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
import transformer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from .words import Words


class Sentences(Words):
    """A small transformer on the text of :class:`Words`. Nothing is clipped."""

    optimizer: ClassVar = torch.optim.AdamW
    defaults: ClassVar = {"batch_size": 8}
    clip, warmup, flush = None, 0.0, True
    target = clock_target = 300.0
    # As in the recipe: a worker's own AdamW divides by its own noise.
    of_method: ClassVar = {"dgc-local": {"lr": 4e-3, "betas": (0.9, 0.99975)}}
    evaluate = staticmethod(transformer.evaluate)
    length = 64

    @staticmethod
    def made(words: int) -> nn.Module:
        return transformer.Transformer(words, 128, 0.2, Sentences.length)  # as in the recipe

    @staticmethod
    def fits(method: str) -> bool:
        """Methods that drive any optimizer."""
        return method in ("dense", "fp16", "bf16", "diloco", "dgc-local")

    @classmethod
    def rehearsal(cls, bf16: bool = False) -> tuple[nn.Module, Callable[[], Tensor]]:
        """Of as many different words as Penn Treebank has."""
        torch.manual_seed(0)
        model = cls.made(10_000)
        words = torch.randint(10_000, (cls.defaults["batch_size"], cls.length + 1))
        return model, lambda: backward(model, words)

    @classmethod
    def settings(cls, method: str) -> dict[str, Any]:
        return {"lr": 2e-3, "weight_decay": 0.01, **cls.of_method.get(method, {})}

    def scheduler(self, optimizer: Any) -> Any:
        steps = self.a.epochs * self.steps
        self._schedule = LambdaLR(optimizer, lambda step: transformer.rate(step, steps))
        return self._schedule

    def batches(self, epoch: int) -> Iterator[Tensor]:
        order = torch.randperm(
            self.steps, generator=torch.Generator().manual_seed(self.a.seed * 1000 + epoch)
        )
        for step, window in enumerate(order.tolist()):
            self.seed_dropout(epoch * self.steps + step)
            yield self.text[window * self.length : (window + 1) * self.length + 1].t()
            self._schedule.step()  # after the optimizer's

    def backward(self, batch: Tensor) -> Tensor:
        return backward(self.model, batch)

    def adjust(self, scheduler: Any, score: float) -> None:
        """The learning rate follows steps, not epochs."""


def backward(model: nn.Module, words: Tensor) -> Tensor:
    """Leaves the gradients of these words, (batch, length + 1), and returns their loss."""
    model.zero_grad()
    loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    return loss.detach()
