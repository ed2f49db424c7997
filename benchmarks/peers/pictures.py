"""The task of the CIFAR-10 recipe: its ResNet, images, augmentation, batches and schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import cifar10
import torch
import torch.nn.functional as F  # noqa: N812
import typer
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.optim.swa_utils import update_bn

from . import METHODS
from .metric import Metric


class Pictures:
    """ResNet on CIFAR-10, or on scikit-learn's digits."""

    metric = Metric(
        "accuracy",
        "test accuracy",
        " %",
        "points lost",
        "points of accuracy below dense training",
        "test accuracy (%)",
        False,
    )
    optimizer: ClassVar = torch.optim.SGD
    defaults: ClassVar = {"batch_size": 32, "depth": 20}
    clip, warmup = None, 4 / 164  # of the gradient's norm; of DGC, in shares of the training
    flush = True  # what DGC and gradient dropping hold back, after the last step, as in the recipe
    normalising = (
        5000  # images from which batch normalisation's statistics are taken before a score
    )
    target, clock_target = 80.0, 85.0  # to which table.py tells seconds, and clock.py trains

    def __init__(self, a: Any, rank: int, size: int, device: torch.device):
        self.a, self.rank, self.size, self.device = a, rank, size, device
        self.dataset, (images, labels), test = cifar10.loaded(a.data, a.cache)
        self.images, self.labels, *self.test = (t.to(device) for t in (images, labels, *test))
        self.steps = len(images) // (a.batch_size * size)
        if not self.steps:
            raise typer.BadParameter(
                f"--batch-size must be at most {len(images) // size} with {size} workers, got "
                f"{a.batch_size} (there are {len(images)} images)"
            )
        torch.manual_seed(a.seed)
        self.model, self.generator = cifar10.resnet(a.depth).to(device), torch.Generator()

    @staticmethod
    def fits(method: str) -> bool:
        """Whether the method can train this."""
        return True

    @classmethod
    def rehearsal(cls, bf16: bool = False) -> tuple[nn.Module, Callable[[], Tensor]]:
        """The model, and a backward pass of one worker's random batch."""
        torch.manual_seed(0)
        model, generator = cifar10.resnet(cls.defaults["depth"]), torch.Generator().manual_seed(0)
        images = torch.randint(256, (cls.defaults["batch_size"], 3, 32, 32), dtype=torch.uint8)
        labels = torch.arange(len(images)) % 10
        return model, lambda: backward(model, seen(images, True, generator), labels, bf16)

    @staticmethod
    def settings(method: str) -> dict[str, Any]:
        """The arguments of the method's optimizer."""
        entry = METHODS[method]
        return {
            "lr": entry.lr,
            "momentum": entry.momentum,
            "nesterov": entry.momentum > 0,
            "weight_decay": entry.weight_decay,
        }

    def scheduler(self, sgd: Any) -> Any:
        return MultiStepLR(sgd, cifar10.turns(self.a.epochs))

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """This rank's, of an epoch."""
        seed = self.a.seed * 1000 + epoch
        order = torch.randperm(len(self.images), generator=self.generator.manual_seed(seed))[
            self.rank :: self.size
        ]
        self.generator.manual_seed(seed * 1000 + self.rank)
        yield from order[: self.steps * self.a.batch_size].to(self.device).split(self.a.batch_size)

    def backward(self, batch: Tensor) -> Tensor:
        """Leaves the gradients of a batch, and returns its loss."""
        return backward(self.model, self.seen(self.images[batch]), self.labels[batch], self.a.bf16)

    def seen(self, images: Tensor) -> Tensor:
        """As training sees them."""
        return seen(images, self.dataset == "cifar10", self.generator)

    def score(self) -> float:
        """After an epoch, with statistics of these parameters: averaged ones have no others, and running ones lag."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.a.bf16):
            update_bn(map(self.seen, self.images[: self.normalising].split(500)), self.model)
        return cifar10.accuracy(self.model, *self.test, self.a)

    def result(self, history: list[dict[str, Any]]) -> float:
        """Of the whole training."""
        return history[-1]["accuracy"]

    def adjust(self, scheduler: Any, score: float) -> None:
        """The learning rate, after an epoch; ``score`` is rank 0's."""
        scheduler.step()


def seen(images: Tensor, flip: bool, generator: torch.Generator) -> Tensor:
    """Augmented and normalised."""
    x = cifar10.normalised(cifar10.augmented(images, flip, generator))
    return x.contiguous(memory_format=torch.channels_last)


def backward(model: nn.Module, x: Tensor, labels: Tensor, bf16: bool) -> Tensor:
    """Leaves the gradients, and returns the loss."""
    model.zero_grad()  # the SGD may be that of a server
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), labels)
    loss.backward()
    return loss.detach()
