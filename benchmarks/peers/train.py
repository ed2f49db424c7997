"""Trains the CIFAR-10 recipe's ResNet with any method, and writes one JSON. Flat, to be read in a sitting.

    python benchmarks/peers/train.py --method qsgd --data DIR --epochs 25 --out qsgd-0.json
    python benchmarks/peers/train.py --method qsgd --data digits --epochs 2        # seconds
    torchrun --nproc-per-node 4 benchmarks/peers/train.py --method qsgd --data DIR --virtual-workers 1

Model, data, augmentation, batches and schedule are those of recipes/cifar10.py: with the same seed, all methods see the
same images in the same order.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F  # noqa: N812
import typer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import cifar10
import job
from data import CACHE

import dgc
from peers import METHODS, attach

# What the recipes' functions ask for besides.
FIXED = {"sparsity": 0.999, "warmup_epochs": None, "virtual_node": 1}
FILE = "epoch{:03d}-rank{}.pt"


def train(a: Any) -> dict[str, Any]:
    """One rank's training; rank 0 reports."""
    rank, size, launcher = job.connect()
    entry, device = METHODS[a.method], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset, (images, labels), test = cifar10.loaded(a.data, a.cache)
    images, labels, test_images, test_labels = (t.to(device) for t in (images, labels, *test))
    steps = len(images) // (a.batch_size * size)
    if not steps:
        raise typer.BadParameter(f"--batch-size must be at most {len(images) // size} with {size} workers, got "
                                 f"{a.batch_size} (there are {len(images)} images)")
    torch.manual_seed(a.seed)
    model = cifar10.resnet(a.depth).to(device)
    dgc.broadcast_parameters(model.state_dict())
    lr = entry.lr if a.lr is None else a.lr
    sgd = torch.optim.SGD(model.parameters(), lr, entry.momentum, weight_decay=a.weight_decay,
                          nesterov=entry.momentum > 0)
    peer = attach(a.method, sgd, list(model.named_parameters()), a.seed, warmup(a, steps))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(peer.sgd, [max(1, round(a.epochs * e / 164)) for e in (81, 122)])

    now = {**{key: value for key, value in job.settings(a).items() if key not in (*FIXED, "target")},
           "lr": lr, "dataset": dataset, "workers": size}
    parts = {"model": model, "peer": peer, "scheduler": scheduler}
    history = resume(a, now, parts, rank, size, device) if a.resume else []
    generator = torch.Generator()
    for epoch in range(len(history), a.epochs):
        if a.target is not None and reached(a.target, history, device):
            break
        began = time.perf_counter()
        order = torch.randperm(len(images), generator=generator.manual_seed(a.seed * 1000 + epoch))[rank::size]
        generator.manual_seed((a.seed * 1000 + epoch) * 1000 + rank)
        sent, exchanging, loss_sum = peer.bytes_sent, 0, torch.zeros((), device=device)
        for step, batch in enumerate(order[:steps * a.batch_size].split(a.batch_size)):
            batch = batch.to(device)
            loss = backward(model, images[batch], labels[batch], dataset == "cifar10", generator, a.bf16)
            before = peer.bytes_sent
            peer.step(last=(epoch + 1, step + 1) == (a.epochs, steps))
            exchanging += peer.bytes_sent > before
            loss_sum += loss
        scheduler.step()
        seconds = {} if a.target is None else {"seconds": time.perf_counter() - began}
        top1 = cifar10.accuracy(model, test_images, test_labels, a) if rank == 0 else math.nan
        history.append({"epoch": epoch + 1, "loss": float(loss_sum) / steps, "accuracy": top1,
                        "bytes_per_step": (peer.bytes_sent - sent) / steps, "exchanging": exchanging / steps,
                        **seconds})
        if rank == 0:
            print(f"{a.method}: epoch {epoch + 1}, loss {history[-1]['loss']:.3f}, accuracy {top1:.2f} %", flush=True)
        if a.checkpoints:
            checkpoint(a, now, parts, history, rank)
    result = summary(a, now, entry, model, launcher, steps, history)
    if rank == 0 and a.out:
        job.write(a.out, result)
    return result


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


def reached(target: float, history: list[dict[str, Any]], device: torch.device) -> bool:
    """Whether rank 0 has seen this accuracy. All others wait for it here, also before the first epoch."""
    accuracy = history[-1]["accuracy"] if history else 0.0
    return job.of_rank_0([accuracy], device)[0] >= target


def warmup(a: Any, steps: int) -> Any:
    """DGC's: 4 of the paper's 164 epochs, in proportion, then 99.9 %."""
    each = max(1, round(a.epochs * 4 / 164 * steps / 4))
    return dgc.warmup(4, steps_per_epoch=each, end=0.999)


def summary(a: Any, now: dict[str, Any], entry: Any, model: nn.Module, launcher: str, steps: int,
            history: list[dict[str, Any]]) -> dict[str, Any]:
    """What ``--out`` writes and table.py reads. Bytes, and the share of steps that exchange, are one rank's, means over
    all steps of the training.
    """
    dense, sent = job.dense_bytes(model, now["workers"]), sum(e["bytes_per_step"] for e in history) / len(history)
    local = job.summary(a, "peers", now["dataset"], launcher, now["workers"], steps, model, history,
                        accuracy=history[-1]["accuracy"])
    return {**local, "method": a.method, "title": entry.title, "paper": entry.paper, "collective": entry.collective,
            "seed": a.seed, "epochs": a.epochs, "bytes_per_step": sent, "ratio": dense / sent if sent else None,
            "exchanging": sum(e.get("exchanging", 1.0) for e in history) / len(history),  # older checkpoints have none
            "settings": now}


# -- checkpoints: one file a rank and epoch, and an epoch counts when all ranks have theirs ----------------------------

def checkpoint(a: Any, now: dict[str, Any], parts: dict[str, Any], history: list[dict[str, Any]], rank: int) -> None:
    """Saves this rank's part of the epoch that has just ended, whole or not at all."""
    a.checkpoints.mkdir(parents=True, exist_ok=True)
    file = a.checkpoints / FILE.format(len(history), rank)
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"training": now, "history": history, **states}, file.with_suffix(".part"))
    file.with_suffix(".part").replace(file)
    (a.checkpoints / FILE.format(len(history) - 2, rank)).unlink(missing_ok=True)


def resume(a: Any, now: dict[str, Any], parts: dict[str, Any], rank: int, size: int,
           device: torch.device) -> list[dict[str, Any]]:
    """Takes up the last epoch that all ranks have saved, and returns the history up to there.

    Raises:
        typer.BadParameter: it is of another training.
    """
    done = next((epoch for epoch in range(a.epochs, 0, -1)
                 if all((a.checkpoints / FILE.format(epoch, r)).exists() for r in range(size))), 0)
    done = int(job.of_rank_0([done], device)[0])
    if not done:
        return []
    # Not only tensors: torch's PowerSGD hook keeps a random state of NumPy's. The files are this training's own.
    saved = torch.load(a.checkpoints / FILE.format(done, rank), map_location=device, weights_only=False)
    was = saved["training"]
    if wrong := [f"{key} was {was.get(key)!r} and is {now[key]!r}" for key in now
                 if was.get(key) != now[key] and key != "threads"]:
        raise typer.BadParameter(f"--resume must have the settings of the checkpoint in {a.checkpoints}, got others: "
                                 f"{'; '.join(wrong)} (give those, or another folder)")
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["history"]


def main(method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")],
         data: Annotated[str | None, typer.Option(
             help="Folder with cifar-10-batches-bin, or the word digits. Default: download CIFAR-10.")] = None,
         cache: Annotated[Path, typer.Option(help="Where a download goes.")] = CACHE,
         depth: Annotated[int, typer.Option(help="Of the ResNet: 20, 32, 44, 56, 110.")] = 20,
         epochs: Annotated[int, typer.Option(min=1)] = 25,
         batch_size: Annotated[int, typer.Option(min=1, help="Of each worker.")] = 32,
         lr: Annotated[float | None, typer.Option(help="Default: the method's.")] = None,
         target: Annotated[float | None, typer.Option(
             help="Accuracy at which to stop. Epochs' seconds are noted then, those of rank 0's training.")] = None,
         weight_decay: float = 1e-4,
         bf16: Annotated[bool, typer.Option("--bf16", help="Autocast to bfloat16.")] = False,
         virtual_workers: job.VirtualWorkers = 4,
         seed: int = 0, threads: job.Threads = None,
         checkpoints: job.Checkpoints = None, resume: job.Resume = False, out: job.Out = None) -> None:
    """Trains with one method."""
    a = argparse.Namespace(**locals(), **FIXED)
    if method not in METHODS:
        raise typer.BadParameter(f"--method must be one of {', '.join(METHODS)}, got {method}")
    job.run(lambda: train(a), a)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)  # several ranks' framed tracebacks cannot be read
    app.command()(main)
    app()
