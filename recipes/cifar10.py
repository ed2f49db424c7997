"""CIFAR-10 with the paper's ResNets, dense or compressed. One flat file, made to be read and copied.

The same file runs on several machines or one, over Horovod, torch.distributed, or with N workers in one process:

    horovodrun -np 4 python recipes/cifar10.py --method dgc
    torchrun --nproc-per-node 4 recipes/cifar10.py --method dgc
    python recipes/cifar10.py --method dgc --virtual-workers 4
    python recipes/cifar10.py                                     # one process: plain SGD

Training follows the paper and fb.resnet.torch: lr 0.1, divided by 10 after 81 and 122 of 164 epochs, Nesterov momentum
0.9, weight decay 1e-4, flips and 4-pixel crops. With fewer epochs all of this shrinks in proportion.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from pathlib import Path
from typing import Annotated, Any

import job
import torch
import torch.nn.functional as F  # noqa: N812
import typer
from data import CACHE, find_data, load
from torch import Tensor, nn
from tqdm import tqdm

import dgc
from dgc import tune

MEAN, STD = (0.4914, 0.4824, 0.4467), (0.2471, 0.2435, 0.2616)


# -- data --------------------------------------------------------------------------------------------------------------


@functools.cache
def loaded(data: str | None, cache: Path) -> Any:
    """All workers of a process share the images."""
    return load(find_data(data, cache))


def held_out(images: Tensor, labels: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images to train on, and the last tenth to choose by, which are as mixed as the others: the files have the classes
    in a random order.
    """
    kept = len(images) * 9 // 10
    return (images[:kept], labels[:kept]), (images[kept:], labels[kept:])


def normalised(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(v, device=images.device).view(3, 1, 1) * 255 for v in (MEAN, STD))
    return (images.float() - mean) / std


def augmented(images: Tensor, flip: bool, generator: torch.Generator) -> Tensor:
    """Flips half of them, and crops 32 x 32 out of each padded by 4; the whole batch at once."""
    n, device = len(images), images.device
    draw = torch.randint(0, 9, (3, n), generator=generator).to(device)
    rows = draw[0, :, None] + torch.arange(32, device=device)
    columns = draw[1, :, None] + torch.arange(32, device=device)
    mirror = (torch.rand(n, generator=generator) < 0.5).to(device) & flip
    columns = torch.where(mirror[:, None], columns.flip(1), columns)
    padded = F.pad(images, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    image = torch.arange(n, device=device)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


# -- model -------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.stride, self.widen = stride, outputs - inputs
        self.conv1, self.bn1 = conv3x3(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv3x3(outputs, outputs, 1), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:  # shortcut A: no weights, new channels are zero
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.widen))
        return F.relu(x + y)


def conv3x3(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def resnet(depth: int, last: int = 64) -> nn.Module:
    """The CIFAR ResNet of 6n + 2 layers (He et al. 2016, section 4.2), whose last stage has 64 channels there."""
    if depth not in (20, 32, 44, 56, 110):
        raise typer.BadParameter(f"--depth must be 20, 32, 44, 56 or 110, got {depth}")
    layers: list[nn.Module] = [conv3x3(3, 16, 1), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for outputs in (16, 32, last):
        for _ in range((depth - 2) // 6):
            layers.append(Block(width, outputs, 2 if outputs > width else 1))
            width = outputs
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 10))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return model


# -- training ----------------------------------------------------------------------------------------------------------


def config(a: Any, steps: int) -> dgc.Config:
    """The settings of a method; ``steps`` in an epoch."""
    if a.method in ("dense", "fp16"):
        return dgc.Config(sparsity=0.0)
    if a.method in (
        "naive",
        "topk",
    ):  # gradient dropping (Aji and Heafield 2017); what naive adds is in job.py
        return dgc.Config(
            job.schedule(a, steps, 0), momentum_correction=False, factor_masking=False
        )
    warmup = a.epochs * 4 / 164 if a.warmup_epochs is None else a.warmup_epochs
    return dgc.Config(
        job.schedule(a, steps, warmup),
        a.momentum_correction,
        a.factor_masking,
        a.clip_norm or None,
        exchange=a.exchange,
        hierarchical=a.hierarchical,
        value_bits=a.value_bits,
        local_steps=job.rounds_of(a.local_steps),
    )


def turns(epochs: int) -> list[int]:
    """The epochs after which the learning rate is divided by 10: the paper's, in proportion."""
    return [max(1, round(epochs * e / 164)) for e in (81, 122)]


def accuracy(model: nn.Module, images: Tensor, labels: Tensor, a: Any) -> float:
    """Top-1 on these images, in per cent."""
    model.eval()
    right = 0
    with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16, enabled=a.bf16):
        for start in range(0, len(images), 500):
            x = normalised(images[start : start + 500]).contiguous(
                memory_format=torch.channels_last
            )
            right += int((model(x).argmax(1) == labels[start : start + 500]).sum())
    model.train()
    return 100 * right / len(images)


def train(a: Any) -> dict[str, Any]:  # noqa: C901 (a recipe is read from top to bottom)
    """One rank's training; rank 0 reports."""
    rank, size, launcher = job.connect()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset, (images, labels), (test_images, test_labels) = loaded(a.data, a.cache)
    if a.validate:
        (images, labels), (test_images, test_labels) = held_out(images, labels)
    (count,) = job.of_rank_0([len(images)], device)
    if count != len(images):  # one machine could download CIFAR-10 and another could not
        raise SystemExit(
            f"rank {rank} has {len(images)} images, rank 0 has {count:.0f}: give --data on all of them"
        )
    images, labels = images.to(device), labels.to(device)
    test_images, test_labels = test_images.to(device), test_labels.to(device)
    torch.manual_seed(a.seed)
    # Not channels_last, of which stock Horovod refuses gradients.
    model = resnet(a.depth, a.last_stage).to(device)
    dgc.broadcast_parameters(model.state_dict())
    steps = len(images) // (a.batch_size * size)
    if steps == 0:
        raise typer.BadParameter(
            f"--batch-size {a.batch_size} x {size} workers is more than {len(images)} images"
        )

    optimizer = torch.optim.SGD(
        model.parameters(), a.lr, a.momentum, weight_decay=a.weight_decay, nesterov=a.nesterov
    )
    optimizer = job.distributed(optimizer, model, launcher, a.method, config(a, steps))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, turns(a.epochs))

    now = job.training(a, dataset, size, steps)
    history = job.resume(a, now, model, optimizer, scheduler) if a.resume else []
    board = job.board(a, rank)
    counted = hasattr(optimizer, "report")  # Horovod's own does not count: its bytes are known
    assumed = job.dense_bytes(model, size) / (2 if a.method == "fp16" else 1)
    generator = torch.Generator()
    with tqdm(
        total=a.epochs * steps,
        initial=len(history) * steps,
        disable=rank > 0,
        desc=a.method,
        mininterval=1,
        dynamic_ncols=True,
    ) as bar:
        for epoch in range(len(history), a.epochs):
            order = torch.randperm(
                len(images), generator=generator.manual_seed(a.seed * 1000 + epoch)
            )[rank::size]
            # Augmentation: resuming needs no more.
            generator.manual_seed((a.seed * 1000 + epoch) * 1000 + rank)
            began, loss_sum, sent = time.perf_counter(), torch.zeros((), device=device), 0.0
            if counted:
                sent = optimizer.report().total_bytes_sent
            losses: list[float] = []
            for step, batch in enumerate(order[: steps * a.batch_size].split(a.batch_size)):
                x = normalised(augmented(images[batch.to(device)], dataset == "cifar10", generator))
                optimizer.zero_grad()
                with torch.autocast(device.type, torch.bfloat16, enabled=a.bf16):
                    logits = model(x.contiguous(memory_format=torch.channels_last))
                loss = F.cross_entropy(logits.float(), labels[batch.to(device)])
                loss.backward()
                optimizer.step()
                loss_sum += loss.detach()
                if step % max(1, steps // 20) == 0:
                    # Some points of a curve; each is a wait for the device.
                    losses.append(loss.item())
                bar.update()
            seconds = time.perf_counter() - began
            if epoch + 1 == a.epochs and a.flush and a.method in ("topk", "dgc"):
                optimizer.flush()  # what is pending would otherwise never be applied
            scheduler.step()
            with job.common_parameters(a, optimizer):
                top1 = accuracy(model, test_images, test_labels, a) if rank == 0 else math.nan
            nbytes = (optimizer.report().total_bytes_sent - sent) / steps if counted else assumed
            history.append(
                {
                    "epoch": epoch + 1,
                    "loss": float(loss_sum) / steps,
                    "accuracy": top1,
                    "losses": losses,
                    "step_seconds": seconds / steps,
                    "bytes_per_step": nbytes,
                }
            )
            if rank == 0:
                bar.set_postfix(
                    loss=f"{history[-1]['loss']:.3f}", accuracy=f"{history[-1]['accuracy']:.2f}"
                )
            tune.report(epoch + 1, top1, job.bytes_sent(history, steps))
            job.log(board, history, ("loss", "accuracy", "bytes_per_step", "step_seconds"))
            if a.checkpoints:
                job.checkpoint(a, now, model, optimizer, scheduler, history)
    result = job.summary(
        a,
        "cifar10",
        dataset,
        launcher,
        size,
        steps,
        model,
        history,
        accuracy=history[-1]["accuracy"],
    )
    if rank == 0 and a.out:
        job.write(a.out, result)
    return result


def main(
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder with cifar-10-batches-bin, or the word digits. Default: download CIFAR-10."
        ),
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where a download goes.")] = CACHE,
    method: job.Method = "dgc",
    depth: Annotated[int, typer.Option(help="Of the ResNet: 20, 32, 44, 56, 110.")] = 20,
    last_stage: Annotated[
        int,
        typer.Option(min=33, help="Its channels; with 256 there is ten times as much to exchange."),
    ] = 64,
    epochs: Annotated[int, typer.Option(min=1)] = 164,
    batch_size: Annotated[int, typer.Option(min=1, help="Of each worker.")] = 32,
    lr: job.Number = 0.1,
    momentum: job.Number = 0.9,
    nesterov: bool = True,
    weight_decay: job.Number = 1e-4,
    sparsity: job.Sparsity = 0.999,
    warmup_epochs: Annotated[
        float | None,
        typer.Option(min=0, callback=job.finite, help="Of dgc alone. Default: 4 of 164."),
    ] = None,
    momentum_correction: bool = True,
    factor_masking: Annotated[bool, typer.Option(help="Better without at 99 % and less.")] = True,
    clip_norm: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=job.bound,
            help="Of dgc alone: bound on the gradient's norm; 0 or inf: none.",
        ),
    ] = None,
    flush: job.Flush = True,
    value_bits: job.ValueBits = 16,
    local_steps: job.LocalSteps = None,
    exchange: job.Exchange = "allgather",
    hierarchical: job.Hierarchical = False,
    virtual_workers: job.VirtualWorkers = 1,
    virtual_node: job.VirtualNode = 1,
    seed: job.Seed = 0,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help=(
                "Train without the last tenth of the training images, and evaluate on these: for choices."
            ),
        ),
    ] = False,
    bf16: Annotated[bool, typer.Option(help="Autocast to bfloat16.")] = False,
    threads: job.Threads = None,
    checkpoints: job.Checkpoints = None,
    resume: job.Resume = False,
    tensorboard: job.TensorBoard = None,
    out: job.Out = None,
) -> None:
    """Trains a ResNet on CIFAR-10 with Deep Gradient Compression, or without."""
    if clip_norm and method != "dgc":
        raise typer.BadParameter(
            f"--clip-norm must be left out with --method {method}, got {clip_norm:g}: on CIFAR-10 "
            "dgc alone clips"
        )
    if nesterov and not momentum:
        raise typer.BadParameter(
            "--momentum must be above 0 for Nesterov's, got 0 (add --no-nesterov)"
        )
    a = argparse.Namespace(**locals())
    result = job.run(lambda: train(a), a)
    if not math.isnan(result["accuracy"]):  # rank 0
        print(
            f"{method}: {result['accuracy']:.2f} % on {result['dataset']} after {epochs} epochs",
            flush=True,
        )


if __name__ == "__main__":
    job.run_command(main)
