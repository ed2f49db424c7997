"""A small transformer on Penn Treebank's words with AdamW, dense or compressed. One flat file, to be read and copied.

The same file runs on several machines or one, over Horovod, torch.distributed, or with N workers in one process:

    horovodrun -np 4 python recipes/transformer.py --data DIR --method dgc
    torchrun --nproc-per-node 4 recipes/transformer.py --data DIR --method dgc
    python recipes/transformer.py --data DIR --method dgc --virtual-workers 4
    python recipes/transformer.py                                                # one process: plain AdamW

Pre-norm blocks, learned positions, the weights of embedding and output tied, dropout; the learning rate rises for a
twentieth of the training and then falls to 0 along a cosine. Compressed, the first tenth travels dense; there AdamW's
denominator is found, and from then on it follows the updates that come. Over the next fifth the sparsity rises from
75 %, step by step. A worker accumulates AdamW's momentum of its gradients. With --no-momentum-correction it accumulates
its gradients, and AdamW sees the average of what is sent as the gradient. That loses, and dgc refuses it for AdamW.

With --local-steps H each worker takes H steps of AdamW on its own gradients between two exchanges, from the first
step on, and the sparsity has no warm-up. Its learning rate should be higher (docs/guides/local-steps.md).
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import job
import torch
import torch.nn.functional as F  # noqa: N812
import typer
from ptb import BATCH, check_alike, columns, load, perplexity
from torch import Tensor, nn
from tqdm import tqdm

import dgc
from dgc import tune

LAYERS, HEADS = 4, 4


# -- model -------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to what came before, then two layers with GELU; each is added to its input."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.queries(self.before(x))
            .view(batch, length, 3, HEADS, width // HEADS)
            .permute(2, 0, 3, 1, 4)
        )
        seen = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        )
        x = x + self.dropout(self.mixed(seen))
        return x + self.dropout(self.down(F.gelu(self.up(self.between(x)))))


class Transformer(nn.Module):
    def __init__(self, words: int, width: int, dropout: float, length: int):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(LAYERS)))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        """Of (batch, length) words: (batch, length, vocabulary)."""
        x = self.dropout(self.embedding(words) + self.positions.weight[: words.shape[1]])
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)


# -- training ----------------------------------------------------------------------------------------------------------


class OnGradients(torch.optim.AdamW):
    """AdamW with a step() that dgc does not know, and so gives gradients: for the row that shows what this costs."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def config(a: Any, steps: int) -> dgc.Config:
    """The settings of a method; ``steps`` in an epoch."""
    if a.method == "dense":
        return dgc.Config(sparsity=0.0, momentum_correction=False)
    if (local_steps := job.rounds_of(a.local_steps)) is not None:
        return dgc.Config(
            job.schedule(a, steps, 0),
            exchange=a.exchange,
            value_bits=a.value_bits,
            local_steps=local_steps,
        )
    return dgc.Config(
        schedule(a, steps),
        a.momentum_correction,
        a.factor_masking,
        exchange=a.exchange,
        hierarchical=a.hierarchical,
        value_bits=a.value_bits,
    )


def schedule(a: Any, steps: int) -> float | dgc.config.Schedule:
    """The sparsity by step: dense at first, then rising; or what ``--sparsity`` says, where it is a whole schedule."""
    if isinstance(a.sparsity, str):
        if a.dense_epochs is not None:
            raise typer.BadParameter(
                f"--dense-epochs must be left out where --sparsity is a whole schedule, got "
                f"--sparsity {a.sparsity}"
            )
        return job.schedule(a, steps, 0)
    dense = round(steps * (a.epochs / 10 if a.dense_epochs is None else a.dense_epochs))
    rising = dgc.warmup(
        a.epochs / 5 if a.warmup_epochs is None else a.warmup_epochs,
        steps_per_epoch=steps,
        start=min(0.75, a.sparsity),
        end=a.sparsity,
        per_step=True,
    )
    return lambda step: 0.0 if step < dense else rising(step - dense)


def rate(step: int, steps: int) -> float:
    """The factor of the learning rate."""
    return min(1.0, (step + 1) / (0.05 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def evaluate(model: nn.Module, text: Tensor, length: int) -> float:
    """The mean loss for a word of a text in columns, in nats, in windows of so many words."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(text) - 1, length):
            words = text[start : start + length + 1].t()
            total += F.cross_entropy(
                model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten(), reduction="sum"
            ).item()
    model.train()
    return total / text[1:].numel()


def train(a: Any) -> dict[str, Any]:  # noqa: C901 (a recipe is read from top to bottom)
    """One rank's training; rank 0 reports."""
    rank, size, launcher = job.connect()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset, vocabulary, parts = load(a.data)
    check_alike(parts, rank, device)
    if a.batch_size % size:
        raise typer.BadParameter(
            f"--batch-size must be a multiple of the {size} workers, over which it is divided, "
            f"got {a.batch_size}"
        )
    share = a.batch_size // size
    text = (
        columns(parts["train"], a.batch_size)[:, rank * share : (rank + 1) * share]
        .contiguous()
        .to(device)
    )
    valid, test = (columns(parts[part], BATCH).to(device) for part in ("valid", "test"))
    steps = math.ceil((len(text) - 1) / a.length)
    torch.manual_seed(a.seed)
    model = Transformer(vocabulary, a.width, a.dropout, a.length).to(device)
    dgc.broadcast_parameters(model.state_dict())

    kind = torch.optim.AdamW if a.momentum_correction else OnGradients
    optimizer = kind(model.parameters(), a.lr, (0.9, a.beta2), weight_decay=a.weight_decay)
    optimizer = job.distributed(optimizer, model, launcher, a.method, config(a, steps))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate(step, a.epochs * steps)
    )

    now = job.training(a, dataset, size, steps)
    history = job.resume(a, now, model, optimizer, scheduler) if a.resume else []
    board = job.board(a, rank)
    counted = hasattr(optimizer, "report")  # Horovod's own does not count: its bytes are known
    with tqdm(
        total=a.epochs * steps,
        initial=len(history) * steps,
        disable=rank > 0,
        desc=a.method,
        mininterval=1,
        dynamic_ncols=True,
    ) as bar:
        for epoch in range(len(history), a.epochs):
            began, loss_sum, sent = time.perf_counter(), torch.zeros((), device=device), 0.0
            if counted:
                sent = optimizer.report().total_bytes_sent
            losses: list[float] = []
            order = torch.randperm(
                steps, generator=torch.Generator().manual_seed(a.seed * 1000 + epoch)
            ).tolist()
            for step, window in enumerate(order):
                # Dropout's draws follow from the step and the rank alone: resuming and launching need no more.
                torch.manual_seed((a.seed * 1_000_000 + epoch * steps + step) * size + rank)
                words = text[window * a.length : (window + 1) * a.length + 1].t()
                optimizer.zero_grad()
                loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                scheduler.step()
                loss_sum += loss.detach()
                if step % max(1, steps // 20) == 0:
                    # Some points of a curve; each is a wait for the device.
                    losses.append(loss.item())
                bar.update()
            seconds = time.perf_counter() - began
            if epoch + 1 == a.epochs and job.rounds_of(a.local_steps) is not None:
                optimizer.flush()  # or the steps since the last round would be lost
            with job.common_parameters(a, optimizer):
                valid_loss = evaluate(model, valid, a.length) if rank == 0 else math.nan
            nbytes = (
                (optimizer.report().total_bytes_sent - sent) / steps
                if counted
                else job.dense_bytes(model, size)
            )
            history.append(
                {
                    "epoch": epoch + 1,
                    "loss": float(loss_sum) / steps,
                    "perplexity": perplexity(valid_loss),
                    "losses": losses,
                    "step_seconds": seconds / steps,
                    "bytes_per_step": nbytes,
                }
            )
            if rank == 0:
                bar.set_postfix(
                    loss=f"{history[-1]['loss']:.3f}", perplexity=f"{history[-1]['perplexity']:.2f}"
                )
            tune.report(epoch + 1, history[-1]["perplexity"], job.bytes_sent(history, steps))
            job.log(board, history, ("loss", "perplexity", "bytes_per_step", "step_seconds"))
            if a.checkpoints:
                job.checkpoint(a, now, model, optimizer, scheduler, history)
    if rank > 0:
        return {}
    result = job.summary(
        a,
        "transformer",
        dataset,
        launcher,
        size,
        steps,
        model,
        history,
        vocabulary=vocabulary,
        perplexity=perplexity(evaluate(model, test, a.length)),
    )
    if a.out:
        job.write(a.out, result)
    return result


def main(
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with ptb.{train,valid,test}.txt. Default: the documentation that comes with Python."
        ),
    ] = None,
    method: Annotated[Literal["dense", "dgc"], typer.Option()] = "dgc",
    width: Annotated[int, typer.Option(min=HEADS, help=f"A multiple of {HEADS}.")] = 128,
    dropout: Annotated[float, typer.Option(min=0, max=1)] = 0.2,
    epochs: Annotated[int, typer.Option(min=1)] = 8,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Columns of text, of all workers together.")
    ] = 32,
    length: Annotated[int, typer.Option(min=1, help="Words of a column in a batch.")] = 64,
    lr: job.Number = 2e-3,
    beta2: Annotated[float, typer.Option(min=0, max=math.nextafter(1, 0))] = 0.999,
    weight_decay: job.Number = 0.01,
    sparsity: job.Sparsity = 0.99,
    dense_epochs: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=job.finite,
            help="At first, which travel dense. Default: a tenth; 0: 1 / (1 - beta2) steps.",
        ),
    ] = None,
    warmup_epochs: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=job.finite,
            help="After these, in which the sparsity rises from 75 %. Default: a fifth.",
        ),
    ] = None,
    momentum_correction: bool = True,
    factor_masking: bool = False,
    value_bits: job.ValueBits = 16,
    local_steps: job.LocalSteps = None,
    exchange: job.Exchange = "allgather",
    hierarchical: job.Hierarchical = False,
    virtual_workers: job.VirtualWorkers = 1,
    virtual_node: job.VirtualNode = 1,
    seed: job.Seed = 0,
    threads: job.Threads = None,
    checkpoints: job.Checkpoints = None,
    resume: job.Resume = False,
    tensorboard: job.TensorBoard = None,
    out: job.Out = None,
) -> None:
    """Trains a small transformer on Penn Treebank, with compressed gradients or dense ones."""
    if width % HEADS:
        raise typer.BadParameter(f"--width must be a multiple of {HEADS}, got {width}")
    a = argparse.Namespace(**locals())
    result = job.run(lambda: train(a), a)
    if result:  # rank 0
        print(
            f"{method}: test perplexity {result['perplexity']:.2f} on {result['dataset']} after {epochs} epochs",
            flush=True,
        )


if __name__ == "__main__":
    job.run_command(main)
