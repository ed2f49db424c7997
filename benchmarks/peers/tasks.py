"""What methods are compared on: the CIFAR-10 recipe's ResNet, and the PTB recipe's LSTM of 2 x 200.

A task is made by every rank. Model, data, order, batches and schedule are the recipe's, and so is what follows from a
seed: all methods see the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
import typer
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR, ReduceLROnPlateau

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import cifar10
import job
import ptb

from . import METHODS
from .exchange import Compressed, Exchanging


@dataclass(frozen=True)
class Metric:
    """What a training is judged by."""

    name: str  # in JSON
    title: str
    unit: str
    lost: str  # what a difference to dense training is called
    axis: str  # the same, of a figure
    curve: str  # what there is after each epoch
    lower: bool  # is better

    def difference(self, own: float, dense: float) -> float:
        """How much worse than dense: points of accuracy, or per cent of its perplexity."""
        return 100 * (own / dense - 1) if self.lower else dense - own

    def order(self, value: float) -> float:
        """Less is better."""
        return value if self.lower else -value

    def reached(self, value: float, target: float) -> bool:
        return value <= target if self.lower else value >= target


class Pictures:
    """ResNet on CIFAR-10, or on scikit-learn's digits."""

    metric = Metric("accuracy", "test accuracy", " %", "points lost", "points of accuracy below dense training",
                    "test accuracy (%)", False)
    defaults: ClassVar = {"batch_size": 32, "depth": 20, "weight_decay": 1e-4}
    clip, warmup = None, 4 / 164  # of the gradient's norm; of DGC, in shares of the training
    target = 80.0  # to which seconds are told

    def __init__(self, a: Any, rank: int, size: int, device: torch.device):
        self.a, self.rank, self.size, self.device = a, rank, size, device
        self.dataset, (images, labels), test = cifar10.loaded(a.data, a.cache)
        self.images, self.labels, *self.test = (t.to(device) for t in (images, labels, *test))
        self.steps = len(images) // (a.batch_size * size)
        if not self.steps:
            raise typer.BadParameter(f"--batch-size must be at most {len(images) // size} with {size} workers, got "
                                     f"{a.batch_size} (there are {len(images)} images)")
        torch.manual_seed(a.seed)
        self.model, self.generator = cifar10.resnet(a.depth).to(device), torch.Generator()

    @staticmethod
    def sgd(method: str, lr: float, momentum: float) -> tuple[float, float]:
        """The method's learning rate and momentum."""
        return lr, momentum

    def scheduler(self, sgd: Any) -> Any:
        return MultiStepLR(sgd, [max(1, round(self.a.epochs * e / 164)) for e in (81, 122)])

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """This rank's, of an epoch."""
        seed = self.a.seed * 1000 + epoch
        order = torch.randperm(len(self.images), generator=self.generator.manual_seed(seed))[self.rank::self.size]
        self.generator.manual_seed(seed * 1000 + self.rank)
        yield from order[:self.steps * self.a.batch_size].to(self.device).split(self.a.batch_size)

    def backward(self, batch: Tensor) -> Tensor:
        """Leaves the gradients of a batch, and returns its loss."""
        return backward(self.model, self.images[batch], self.labels[batch], self.dataset == "cifar10", self.generator,
                        self.a.bf16)

    def score(self) -> float:
        """After an epoch."""
        return cifar10.accuracy(self.model, *self.test, self.a)

    def result(self, history: list[dict[str, Any]]) -> float:
        """Of the whole training."""
        return history[-1]["accuracy"]

    def adjust(self, scheduler: Any, score: float) -> None:
        """The learning rate, after an epoch; ``score`` is rank 0's."""
        scheduler.step()


class Words:
    """An LSTM on Penn Treebank, or on Python's documentation. Its gradients are clipped, and SGD has no momentum.

    Scores after epochs are of the validation text, the last one of the test text.
    """

    metric = Metric("perplexity", "test perplexity", "", "perplexity above dense (%)",
                    "perplexity above dense training (%)", "validation perplexity", True)
    defaults: ClassVar = {"batch_size": 5, "weight_decay": 0.0}
    clip, warmup = 0.25, 1 / 40
    target = 115.0
    rates: ClassVar = {"signsgd": 1e-3, "demo": 1e-3}  # these move each entry by about as much
    bptt = 35  # words of a column in a batch

    def __init__(self, a: Any, rank: int, size: int, device: torch.device):
        self.a, self.rank, self.size, self.device = a, rank, size, device
        self.dataset, words, parts = ptb.load(None if a.data in (None, "topics") else Path(a.data))
        mine = slice(rank * a.batch_size, (rank + 1) * a.batch_size)
        self.text = ptb.columns(parts["train"], a.batch_size * size)[:, mine].contiguous().to(device)
        self.valid, self.test = (ptb.columns(parts[part], ptb.BATCH).to(device) for part in ("valid", "test"))
        self.steps = math.ceil((len(self.text) - 1) / self.bptt)
        torch.manual_seed(a.seed)
        self.model: nn.Module = ptb.LanguageModel(words, *ptb.SIZES["small"]).to(device)
        self.hidden: Any = None

    @classmethod
    def sgd(cls, method: str, lr: float, momentum: float) -> tuple[float, float]:
        return cls.rates.get(method, 20.0), 0.0

    def scheduler(self, sgd: Any) -> Any:
        return ReduceLROnPlateau(sgd, factor=0.25, patience=0, threshold=0, eps=0)

    def batches(self, epoch: int) -> Iterator[Tensor]:
        self.hidden = None
        for step in range(self.steps):
            # Dropout's draws follow from the step and the rank alone.
            torch.manual_seed((self.a.seed * 1_000_000 + epoch * self.steps + step) * self.size + self.rank)
            yield self.text[step * self.bptt:(step + 1) * self.bptt + 1]

    def backward(self, batch: Tensor) -> Tensor:
        self.model.zero_grad()
        logits, self.hidden = self.model(batch[:-1], self.hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1:].flatten())
        loss.backward()
        return loss.detach()

    def score(self) -> float:
        return ptb.perplexity(ptb.evaluate(self.model, self.valid, self.bptt))

    def result(self, history: list[dict[str, Any]]) -> float:
        return ptb.perplexity(ptb.evaluate(self.model, self.test, self.bptt))

    def adjust(self, scheduler: Any, score: float) -> None:
        scheduler.step(*job.of_rank_0([score], self.device))  # alike on all ranks


TASKS: dict[str, Any] = {"cifar10": Pictures, "ptb": Words}


def settle(a: Any) -> None:
    """Gives options that were left out the task's values.

    Raises:
        typer.BadParameter: an option is not of this task.
    """
    if a.task not in TASKS:
        raise typer.BadParameter(f"--task must be one of {', '.join(TASKS)}, got {a.task}")
    defaults = TASKS[a.task].defaults
    for key in Pictures.defaults:
        if getattr(a, key) is None:
            setattr(a, key, defaults.get(key))
        elif key not in defaults:
            raise typer.BadParameter(f"--{key} must be left out with --task {a.task}, got {getattr(a, key)}")
    if a.bf16 and a.task == "ptb":
        raise typer.BadParameter("--bf16 must be left out with --task ptb, whose recipe has no autocast, got it")
    if TASKS[a.task].clip and METHODS[a.method].driver not in (Exchanging, Compressed):
        raise typer.BadParameter(f"--method must be one that clips gradients, as --task {a.task} does, got {a.method} "
                                 "(train it on cifar10)")


def backward(model: nn.Module, images: Tensor, labels: Tensor, flip: bool, generator: torch.Generator,
             bf16: bool) -> Tensor:
    """All of a step but the method's: leaves the gradients of these images, augmented, and returns their loss."""
    x = cifar10.normalised(cifar10.augmented(images, flip, generator))
    model.zero_grad()  # the SGD may be that of a server
    with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        logits = model(x.contiguous(memory_format=torch.channels_last))
    loss = F.cross_entropy(logits.float(), labels)
    loss.backward()
    return loss.detach()
