"""Trains the CIFAR-10 recipe's ResNet with all N workers in one batch, on one GPU: minutes in place of hours.

    python benchmarks/crowd/train.py --data DIR --workers 16 --exchange reduce --wide 4 --out reduce4-16-0.json

Model, data, batches, schedule and method are the recipe's (recipes/cifar10.py --virtual-workers N), and so is each
worker's gradient; what workers send is worked out in (N, n) tensors (exchange.py). On a GPU a step is one CUDA graph.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
import typer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import cifar10
import job
from data import load

import dgc
from crowd.exchange import Exchange, Momentum, Residuals
from crowd.model import Crowd
from dgc.compression import sizes as messages
from dgc.compression.residual import Residual

LR, M, DECAY = 0.1, 0.9, 1e-4  # the recipe's


class Batches:
    """An epoch's batches of all workers, as each draws its own in the recipe.

    Args:
        images, labels: to train on, on the device.
        flips: mirror half of the images.
    """

    def __init__(self, images: Tensor, labels: Tensor, workers: int, size: int, flips: bool):
        self.labels, self.flips, self.workers, self.size = labels, flips, workers, size
        self.padded = F.pad(images, (4, 4, 4, 4)).permute(0, 2, 3, 1).contiguous()
        self.mean, self.std = (
            torch.tensor(v, device=images.device).view(3, 1, 1) * 255
            for v in (cifar10.MEAN, cifar10.STD)
        )
        self.steps = len(images) // (size * workers)
        self.of_step = torch.zeros(4, size * workers, dtype=torch.int64, device=images.device)

    def draw(self, seed: int, epoch: int) -> Tensor:
        """Image, row, column and whether it is mirrored, on the device: int64 (steps, 4, B N)."""
        return drawn(len(self.padded), self.workers, self.size, self.flips, seed, epoch).to(
            self.padded.device
        )

    def images(self) -> tuple[Tensor, Tensor]:
        """The batch that ``of_step`` says."""
        image, row, column, mirror = self.of_step
        window = torch.arange(32, device=image.device)
        rows, columns = (
            row[:, None] + window,
            column[:, None] + torch.where(mirror[:, None] > 0, window.flip(0), window),
        )
        pixels = self.padded[image[:, None, None], rows[:, :, None], columns[:, None, :]].permute(
            0, 3, 1, 2
        )
        return ((pixels.float() - self.mean) / self.std).contiguous(), self.labels[image]


@functools.cache
def drawn(images: int, workers: int, size: int, flips: bool, seed: int, epoch: int) -> Tensor:
    """See :meth:`Batches.draw`. Trainings that differ in nothing else have the same."""
    generator, steps, parts = torch.Generator(), images // (size * workers), []
    order = torch.randperm(images, generator=generator.manual_seed(seed * 1000 + epoch))
    for rank in range(workers):
        generator.manual_seed((seed * 1000 + epoch) * 1000 + rank)
        for batch in order[rank::workers][: steps * size].split(size):
            place = torch.randint(0, 9, (3, size), generator=generator)
            mirror = torch.rand(size, generator=generator) < 0.5
            parts.append(torch.stack([batch, place[0], place[1], (mirror & flips).long()]))
    return torch.stack(parts).view(workers, steps, 4, size).permute(1, 2, 3, 0).flatten(2)


def compressed(model: nn.Module) -> Residual:
    """The parameters that travel compressed, in the order in which their gradients come."""
    small = dgc.Config().min_numel
    return Residual(
        "bucket 0",
        {
            name: p
            for name, p in reversed(list(model.named_parameters()))
            if p.dim() > 1 and p.numel() >= small
        },
        velocity=False,
    )


class Trainer:
    """One training's state on the device, and its step at each sparsity."""

    def __init__(self, a: Any, batches: Batches, device: torch.device):
        self.a, self.batches, self.device = a, batches, device
        torch.manual_seed(a.seed)
        self.crowd = Crowd(cifar10.resnet(20).to(device), a.workers)
        named = dict(self.crowd.model.named_parameters())
        self.bucket = compressed(self.crowd.model)
        self.compressed = self.bucket.names if a.exchange != "dense" else ()
        self.residuals = Residuals(self.bucket, a.workers, Momentum(M, a.factor_masking))
        self.plain = {name: p for name, p in named.items() if name not in self.compressed}
        self.weights = [named[name] for name in self.compressed]
        self.buffers = [torch.zeros_like(p) for p in self.plain.values()]
        self.decays = [torch.zeros_like(p) for p in self.weights]
        self.lr = torch.full((), LR, device=device)
        self.loss = torch.zeros((), device=device)
        self.exchanges: dict[
            float, Exchange
        ] = {}  # whose tensors the graphs read, so they must live as long
        self.steps: dict[float, Callable[[], Any]] = {}
        self.memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def step(self, sparsity: float) -> None:
        """A step on the batch that ``batches.of_step`` says."""
        if sparsity not in self.steps:
            if self.compressed:
                self.exchanges[sparsity] = Exchange(
                    self.bucket, self.a.workers, self.a.exchange, sparsity, self.a.wide
                )
            step = functools.partial(self._step, sparsity)
            self.steps[sparsity] = self._captured(step) if self.device.type == "cuda" else step
        self.steps[sparsity]()

    def state(self) -> list[Tensor]:
        """All tensors that a step changes."""
        return [
            *self.crowd.model.parameters(),
            *self.crowd.model.buffers(),
            self.residuals.u,
            self.residuals.v,
            *self.buffers,
            *self.decays,
            self.loss,
        ]

    @torch.no_grad()
    def load(self, state: list[Tensor]) -> None:
        """Goes on from what :meth:`state` was."""
        for t, was in zip(self.state(), state, strict=True):
            t.copy_(was)

    def _captured(self, step: Callable[[], None]) -> Callable[[], Any]:
        """The step as a CUDA graph; what it changes is as before when it has been recorded."""
        before = [t.detach().clone() for t in self.state()]
        for _ in range(2):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self.memory, torch.cuda.current_stream()):
            step()
        self.load(before)
        return graph.replay

    def _step(self, sparsity: float) -> None:
        loss, gradients = self.crowd.gradients(*self.batches.images())
        with torch.no_grad():
            self.loss += loss[0]  # rank 0's, as the recipe reports
            for (name, p), buffer in zip(self.plain.items(), self.buffers, strict=True):
                g = gradients[name].mean(0) + DECAY * p
                buffer.mul_(M).add_(g)
                p -= self.lr * (g + M * buffer)
            if not self.compressed:
                return
            for p, buffer in zip(self.weights, self.decays, strict=True):
                term = DECAY * p
                buffer.mul_(M).add_(term)
                p -= self.lr * (M * buffer + term)
            self.residuals.accumulate(
                torch.cat([gradients[name].flatten(1) for name in self.compressed], 1)
            )
            self.apply(self.exchanges[sparsity](self.residuals))

    def apply(self, update: Tensor) -> None:
        """Adds an average, (n,), to the compressed parameters, times the learning rate."""
        for p, part in zip(self.weights, update.split(self.bucket.numels), strict=True):
            p -= self.lr * part.view_as(p)

    @torch.no_grad()
    def flush(self) -> None:
        """Applies all that is pending, as the recipe does at the end."""
        if self.compressed:
            self.apply(self.residuals.v.mean(0))
            self.residuals.v.zero_()


@functools.cache
def images_of(data: str, device: torch.device) -> Any:
    """The name of what there is to train on, and its images and labels on the device, of training and of test."""
    dataset, *parts = load(data)
    return dataset, *([t.to(device) for t in part] for part in parts)


def save(a: Any, trainer: Trainer, losses: list[Tensor]) -> None:
    """Writes a checkpoint, whole or not at all."""
    part = a.checkpoint.with_name(a.checkpoint.name + ".part")
    torch.save({"settings": job.settings(a), "state": trainer.state(), "losses": losses}, part)
    part.replace(a.checkpoint)


def resumed(a: Any, trainer: Trainer) -> list[Tensor]:
    """Loads the checkpoint, and returns each epoch's loss up to there.

    Raises:
        typer.BadParameter: it is of another training.
    """
    found = torch.load(a.checkpoint, map_location=trainer.device)
    if found["settings"] != job.settings(a):
        raise typer.BadParameter(
            f"{a.checkpoint} must be of a training with {job.settings(a)}, got {found['settings']} "
            "(remove it to begin anew)"
        )
    trainer.load(found["state"])
    losses: list[Tensor] = found["losses"]
    return losses


def training(a: Any) -> Generator[None, None, dict[str, Any]]:
    """A training, which yields after each step, when that is on its way to the device; and its result."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset, (images, labels), (test_images, test_labels) = images_of(a.data, device)
    if a.validate:
        (images, labels), (test_images, test_labels) = cifar10.held_out(images, labels)
    batches = Batches(images, labels, a.workers, a.batch_size, dataset == "cifar10")
    trainer, steps = Trainer(a, batches, device), batches.steps
    config = dgc.Config(job.schedule(a, steps, a.warmup_epochs) if a.exchange != "dense" else 0.0)
    losses: list[Tensor] = []
    if a.checkpoint is not None and a.checkpoint.exists():
        losses = resumed(a, trainer)
    for epoch in range(len(losses), a.epochs):
        trainer.lr.fill_(LR * 0.1 ** sum(epoch >= turn for turn in cifar10.turns(a.epochs)))
        of_epoch = batches.draw(a.seed, epoch)
        trainer.loss.zero_()
        for step in range(steps):
            batches.of_step.copy_(of_epoch[step])
            trainer.step(config.sparsity_at(epoch * steps + step))
            yield
        losses.append(trainer.loss / steps)
        if a.checkpoint is not None:
            save(a, trainer, losses)
    trainer.flush()
    plain = cifar10.resnet(20).to(device)
    plain.load_state_dict(trainer.crowd.worker_0())
    top1 = cifar10.accuracy(plain, test_images, test_labels, argparse.Namespace(bf16=False))
    where = {"device": torch.cuda.get_device_name()} if device.type == "cuda" else {}
    return {
        "recipe": "cifar10",
        "dataset": dataset,
        "settings": job.settings(a),
        "steps_per_epoch": steps,
        "accuracy": top1,
        "losses": torch.stack(losses).tolist(),
        "machine": {**job.machine(device), **where},
    }


def finished(trainings: Iterable[Generator[None, None, Any]], at_once: int) -> Iterator[Any]:
    """The results of trainings, as they come; so many go on at once, on a GPU each in a stream of its own."""
    waiting, on_gpu = iter(trainings), torch.cuda.is_available()
    going: list[tuple[Generator[None, None, Any], Any]] = []
    while True:
        while len(going) < at_once and (one := next(waiting, None)) is not None:
            going.append((one, torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext()))
        if not going:
            return
        for one in list(going):
            with one[1]:
                try:
                    next(one[0])
                except StopIteration as end:
                    going.remove(one)
                    yield end.value


def options(given: Mapping[str, Any]) -> argparse.Namespace:
    """All that :func:`main` takes, where not given as it is there by default."""
    usual = {
        name: parameter.default for name, parameter in inspect.signature(main).parameters.items()
    }
    a = argparse.Namespace(**{**usual, **given})
    a.batch_size = a.batch_size or 128 // a.workers
    return a


def main(
    data: Annotated[str, typer.Option(help="As of recipes/cifar10.py.")],
    exchange: Annotated[
        Literal["dense", "allgather", "reduce", "mean"],
        typer.Option(help="mean: the mean chooses, which no worker knows."),
    ] = "allgather",
    wide: Annotated[
        int,
        typer.Option(
            min=1,
            help=(
                "Times as many entries as an all-gather's message has: in both rounds of reduce, and of mean."
            ),
        ),
    ] = messages.WIDE,
    workers: Annotated[int, typer.Option(min=1)] = 16,
    batch_size: Annotated[int, typer.Option(help="Of each worker; 0: 128 over their number.")] = 0,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    sparsity: job.Sparsity = 0.999,
    warmup_epochs: float = 1.0,
    factor_masking: bool = True,
    validate: Annotated[bool, typer.Option("--validate", help="As of recipes/cifar10.py.")] = False,
    seed: job.Seed = 0,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="File, written after each epoch; a training goes on from it."),
    ] = None,
    out: job.Out = None,
) -> None:
    """Trains so."""
    a = options(locals())
    (result,) = finished([training(a)], 1)
    print(f"{result['accuracy']:.2f} % on {result['dataset']}")
    if out:
        job.write(out, result)


if __name__ == "__main__":
    typer.run(main)
