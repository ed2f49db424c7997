"""Trains the CIFAR-10 recipe's ResNet or the PTB recipe's LSTM or transformer with any method, and writes one JSON.

    python benchmarks/peers/train.py --method qsgd --data DIR --epochs 25 --out qsgd-0.json
    python benchmarks/peers/train.py --method qsgd --data digits --epochs 2        # seconds
    python benchmarks/peers/train.py --method qsgd --task ptb --data DIR --epochs 8
    torchrun --nproc-per-node 4 benchmarks/peers/train.py --method qsgd --data DIR --virtual-workers 1

Model, data, batches and schedule are the recipe's (tasks.py): with the same seed, all methods see the same batches in
the same order.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import job
from data import CACHE

import dgc
from peers import METHODS, attach
from peers.metric import Metric
from peers.tasks import TASKS, settle

# What the recipes' functions ask for besides.
FIXED = {"sparsity": 0.999, "warmup_epochs": None, "virtual_node": 1}
FILE = "epoch{:03d}-rank{}.pt"


def train(a: Any) -> dict[str, Any]:
    """One rank's training; rank 0 reports."""
    rank, size, launcher = job.connect()
    entry, device = METHODS[a.method], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = TASKS[a.task](a, rank, size, device)
    model, metric, steps = task.model, task.metric, task.steps
    dgc.broadcast_parameters(model.state_dict())
    given = {key: getattr(a, key) for key in ("lr", "weight_decay") if getattr(a, key) is not None}
    chosen = {**task.settings(a.method), **given}
    optimizer = task.optimizer(model.parameters(), **chosen)
    peer = attach(
        a.method,
        optimizer,
        list(model.named_parameters()),
        a.seed,
        job.schedule(entry, steps, a.epochs * (entry.warmup or task.warmup)),
        task.clip,
        task.flush,
    )
    scheduler = task.scheduler(peer.optimizer)
    # Local steps of other methods end with an exchange at the end of an epoch.
    common = getattr(peer.optimizer, "averaged", contextlib.nullcontext)

    now = {
        **{key: value for key, value in job.settings(a).items() if key not in (*FIXED, "target")},
        "lr": chosen["lr"],
        "weight_decay": chosen["weight_decay"],
        "dataset": task.dataset,
        "workers": size,
    }
    parts = {"model": model, "peer": peer, "scheduler": scheduler}
    history = resume(a, now, parts, rank, size, device) if a.resume else []
    for epoch in range(len(history), a.epochs):
        if a.target is not None and reached(a.target, metric, history, device):
            break
        began, sent, exchanging, loss_sum = (
            time.perf_counter(),
            peer.bytes_sent,
            0,
            torch.zeros((), device=device),
        )
        for step, batch in enumerate(task.batches(epoch)):
            loss = task.backward(batch)
            before = peer.bytes_sent
            peer.step(last=step + 1 == steps and (entry.every > 1 or epoch + 1 == a.epochs))
            exchanging += peer.bytes_sent > before
            loss_sum += loss
        seconds = {} if a.target is None else {"seconds": time.perf_counter() - began}
        with common():
            score = task.score() if rank == 0 else math.nan
        task.adjust(scheduler, score)
        history.append(
            {
                "epoch": epoch + 1,
                "loss": float(loss_sum) / steps,
                metric.name: score,
                "bytes_per_step": (peer.bytes_sent - sent) / steps,
                "exchanging": exchanging / steps,
                **seconds,
            }
        )
        if rank == 0:
            print(
                f"{a.method}: epoch {epoch + 1}, loss {history[-1]['loss']:.3f}, {metric.name} "
                f"{score:.2f}{metric.unit}",
                flush=True,
            )
        if a.checkpoints:
            checkpoint(a, now, parts, history, rank)
    with common():
        result = summary(a, now, entry, task, launcher, history)
    if rank == 0 and a.out:
        job.write(a.out, result)
    return result


def reached(
    target: float, metric: Metric, history: list[dict[str, Any]], device: torch.device
) -> bool:
    """Whether rank 0 has seen this score. All others wait for it here, also before the first epoch."""
    score = history[-1][metric.name] if history else math.nan
    return metric.reached(job.of_rank_0([score], device)[0], target)


def summary(
    a: Any, now: dict[str, Any], entry: Any, task: Any, launcher: str, history: list[dict[str, Any]]
) -> dict[str, Any]:
    """What ``--out`` writes and table.py reads. Bytes, and the share of steps that exchange, are one rank's, means over
    all steps of the training.
    """
    dense = job.dense_bytes(task.model, now["workers"])
    sent = sum(e["bytes_per_step"] for e in history) / len(history)
    local = job.summary(
        a,
        "peers",
        now["dataset"],
        launcher,
        now["workers"],
        task.steps,
        task.model,
        history,
        **{task.metric.name: task.result(history)},
    )
    return {
        **local,
        "task": a.task,
        "method": a.method,
        "title": entry.title,
        "paper": entry.paper,
        "collective": entry.collective,
        "seed": a.seed,
        "epochs": a.epochs,
        "bytes_per_step": sent,
        "ratio": dense / sent if sent else None,
        "exchanging": sum(e.get("exchanging", 1.0) for e in history)
        / len(history),  # older checkpoints have none
        "settings": now,
    }


# -- checkpoints: one file a rank and epoch, and an epoch counts when all ranks have theirs ----------------------------


def checkpoint(
    a: Any, now: dict[str, Any], parts: dict[str, Any], history: list[dict[str, Any]], rank: int
) -> None:
    """Saves this rank's part of the epoch that has just ended, whole or not at all."""
    a.checkpoints.mkdir(parents=True, exist_ok=True)
    file = a.checkpoints / FILE.format(len(history), rank)
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"training": now, "history": history, **states}, file.with_suffix(".part"))
    file.with_suffix(".part").replace(file)
    (a.checkpoints / FILE.format(len(history) - 2, rank)).unlink(missing_ok=True)


def resume(
    a: Any, now: dict[str, Any], parts: dict[str, Any], rank: int, size: int, device: torch.device
) -> list[dict[str, Any]]:
    """Takes up the last epoch that all ranks have saved, and returns the history up to there.

    Raises:
        typer.BadParameter: it is of another training.
    """
    done = next(
        (
            epoch
            for epoch in range(a.epochs, 0, -1)
            if all((a.checkpoints / FILE.format(epoch, r)).exists() for r in range(size))
        ),
        0,
    )
    done = int(job.of_rank_0([done], device)[0])
    if not done:
        return []
    # Not only tensors: torch's PowerSGD hook keeps a random state of NumPy's. The files are this training's own.
    saved = torch.load(
        a.checkpoints / FILE.format(done, rank), map_location=device, weights_only=False
    )
    was = saved["training"]
    if wrong := [
        f"{key} was {was.get(key)!r} and is {now[key]!r}"
        for key in now
        if was.get(key) != now[key] and key != "threads"
    ]:
        raise typer.BadParameter(
            f"--resume must have the settings of the checkpoint in {a.checkpoints}, got others: "
            f"{'; '.join(wrong)} (give those, or another folder)"
        )
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["history"]


def main(
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")],
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}.")] = "cifar10",
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder with cifar-10-batches-bin, or the word digits. Default: download CIFAR-10. Of text: folder "
            "with ptb.{train,valid,test}.txt, or topics: Python's documentation, which is the default."
        ),
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where a download goes.")] = CACHE,
    depth: Annotated[
        int | None, typer.Option(help="Of the ResNet: 20, 32, 44, 56, 110. Default: 20.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 25,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Of each worker. Default: 32 images, or 5 or 8 columns of text."),
    ] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="Default: the method's.")] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="Accuracy, or validation perplexity, at which to stop. Epochs' seconds are noted then, those of rank "
            "0's training."
        ),
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(min=0, help="Default: the method's; 0 of ptb, 0.01 of the transformer."),
    ] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Autocast to bfloat16.")] = False,
    virtual_workers: job.VirtualWorkers = 4,
    seed: job.Seed = 0,
    threads: job.Threads = None,
    checkpoints: job.Checkpoints = None,
    resume: job.Resume = False,
    out: job.Out = None,
) -> None:
    """Trains with one method."""
    a = argparse.Namespace(**locals(), **FIXED)
    if method not in METHODS:
        raise typer.BadParameter(f"--method must be one of {', '.join(METHODS)}, got {method}")
    settle(a)
    job.run(lambda: train(a), a)


if __name__ == "__main__":
    # Several ranks' framed tracebacks cannot be read.
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
