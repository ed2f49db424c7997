"""A word-level language model on Penn Treebank, dense or compressed. One flat file, made to be read and copied.

The same file runs on several machines or one, over Horovod, torch.distributed, or with N workers in one process:

    horovodrun -np 4 python recipes/ptb.py --data DIR --size large --method dgc
    torchrun --nproc-per-node 4 recipes/ptb.py --data DIR --size large --method dgc
    python recipes/ptb.py --data DIR --method dgc --virtual-workers 4
    python recipes/ptb.py                                                        # one process: plain SGD

Training follows the paper and its baseline, word_language_model of pytorch/examples: two LSTM layers, the weights of
embedding and output tied, dropout, a hidden state that goes on from batch to batch, SGD without momentum, lr 20 divided
by 4 after each epoch that does not improve the validation, gradients clipped to a norm of 0.25. Two things differ: the
test is of the last parameters, not of those that validated best, and the batch is divided over the workers.

With momentum, the lr wants to be smaller by as much: ``--momentum 0.9 --lr 2``.
"""

from __future__ import annotations

import argparse
import math
import re
import time
import warnings
import zlib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import job
import torch
import torch.nn.functional as F  # noqa: N812
import typer
from torch import Tensor, nn
from tqdm import tqdm

import dgc
from dgc import tune

# Width, dropout; the paper's is large.
SIZES = {
    "small": (200, 0.2),
    "medium": (650, 0.5),
    "large": (1500, 0.65),
}
PARTS = {"train": 0.9, "valid": 0.05, "test": 0.05}  # of the documentation's words
RARE = 3  # words of the documentation that training has less often become <unk>
BATCH = 10  # of validation and test

Hidden = list[tuple[Tensor, Tensor]]


# -- data --------------------------------------------------------------------------------------------------------------


def load(data: Path | None) -> tuple[str, int, dict[str, Tensor]]:
    """The name of what a folder holds, or of Python's documentation; the number of different words; the words of the
    parts to train, validate and test, as int64 numbers.
    """
    if data is None:
        name, texts = "pydoc topics", documentation()
    else:
        files = {part: data / f"ptb.{part}.txt" for part in PARTS}
        if missing := [file.name for file in files.values() if not file.is_file()]:
            raise SystemExit(
                f"{data} must be a folder with ptb.{{train,valid,test}}.txt, got one without "
                f"{', '.join(missing)}"
            )
        name, texts = (
            "ptb",
            {
                part: [line.split() for line in file.read_text("utf-8").splitlines()]
                for part, file in files.items()
            },
        )
    numbers: dict[str, int] = {}
    parts = {
        part: torch.tensor(
            [
                numbers.setdefault(word, len(numbers))
                for line in texts[part]
                for word in (*line, "<eos>")
            ]
        )
        for part in PARTS
    }
    return name, len(numbers), parts


def documentation() -> dict[str, list[list[str]]]:
    """Python's own, as it comes with Python: its topics in lower case, a paragraph a line, each paragraph once.

    Topics are divided over the parts in the order of their names. The text is that of the running Python's version.
    """
    from pydoc_data.topics import topics

    seen: set[tuple[str, ...]] = set()
    lines: dict[str, list[tuple[str, ...]]] = {topic: [] for topic in sorted(topics)}
    for topic in lines:
        for paragraph in re.split(r"\n\s*\n", topics[topic].lower()):
            # A rule under a heading is one sign.
            ruled = re.sub(r"([^\w\s])\1{3,}", r"\1", paragraph)
            line = tuple(re.findall(r"\w+|[^\w\s]", ruled))
            if line and line not in seen:
                seen.add(line)
                lines[topic].append(line)
    lengths = {topic: sum(len(line) + 1 for line in lines[topic]) for topic in lines}
    filled, texts = dict.fromkeys(PARTS, 0), {part: [] for part in PARTS}
    for topic, length in lengths.items():
        fitting = [
            part
            for part, share in PARTS.items()
            if part == "train" or filled[part] + length <= share * sum(lengths.values())
        ]
        part = min(fitting, key=lambda part: filled[part] / PARTS[part])
        filled[part] += length
        texts[part].extend(lines[topic])
    counts = Counter(word for line in texts["train"] for word in line)
    return {
        part: [[word if counts[word] >= RARE else "<unk>" for word in line] for line in texts[part]]
        for part in PARTS
    }


def check_alike(parts: dict[str, Tensor], rank: int, device: torch.device) -> None:
    """Ends a training whose ranks do not have the same text."""
    sums = [zlib.crc32(part.numpy().tobytes()) for part in parts.values()]
    if sums != job.of_rank_0(sums, device):
        raise SystemExit(
            f"rank {rank} has another text than rank 0 (the documentation is that of the Python version): "
            "give --data on all of them"
        )


def columns(words: Tensor, batch: int) -> Tensor:
    """The text cut into ``batch`` columns of equal length, each to be read downwards: (length, batch)."""
    length = len(words) // batch
    if length < 2:
        raise SystemExit(
            f"a text must have at least {2 * batch} words for a batch of {batch}, got {len(words)}"
        )
    return words[: length * batch].view(batch, length).t().contiguous()


# -- model -------------------------------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """Two LSTM layers. They stand alone so that all dropout draws from torch's generator, also on a GPU."""

    def __init__(self, words: int, width: int, dropout: float):
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(words, width), nn.Linear(width, words)
        self.decoder.weight = self.embedding.weight
        self.layers = nn.ModuleList(nn.LSTM(width, width) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: Tensor, hidden: Hidden | None = None) -> tuple[Tensor, Hidden]:
        """Of (length, batch) words and the state before them: (length, batch, vocabulary) and the state after them,
        through which nothing is propagated back.
        """
        x, after = self.dropout(self.embedding(words)), []
        for layer, state in zip(self.layers, hidden or [None, None], strict=True):
            x, (h, c) = layer(x, state)
            x = self.dropout(x)
            after.append((h.detach(), c.detach()))
        return self.decoder(x), after


# -- training ----------------------------------------------------------------------------------------------------------


def config(a: Any, steps: int) -> dgc.Config:
    """The settings of a method; ``steps`` in an epoch."""
    if a.method in (
        "dense",
        "fp16",
    ):  # the averaged gradient itself, to be clipped; SGD has the momentum
        return dgc.Config(sparsity=0.0, momentum_correction=False)
    if a.method in (
        "naive",
        "topk",
    ):  # gradient dropping (Aji and Heafield 2017); what naive adds is in job.py
        return dgc.Config(
            job.schedule(a, steps, 0), momentum_correction=False, factor_masking=False
        )
    warmup = a.epochs * 1 / 40 if a.warmup_epochs is None else a.warmup_epochs
    return dgc.Config(
        job.schedule(a, steps, warmup),
        a.momentum_correction,
        a.factor_masking,
        (a.clip_norm or None) if a.local_clipping else None,
        exchange=a.exchange,
        hierarchical=a.hierarchical,
        value_bits=a.value_bits,
    )


def update(model: nn.Module, optimizer: Any, a: Any) -> None:
    """One step, with the gradient clipped where the method clips it."""
    if a.clip_norm == 0 or (
        a.method == "dgc" and a.local_clipping
    ):  # before it is accumulated: Config(clip_norm=...)
        optimizer.step()
        return
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), a.clip_norm)
    with optimizer.skip_synchronize(), warnings.catch_warnings():
        # That is the method.
        warnings.filterwarnings("ignore", "the gradient of .* was changed between its exchange")
        optimizer.step()


def evaluate(model: nn.Module, text: Tensor, bptt: int) -> float:
    """The mean loss for a word of a text in columns, in nats; the perplexity is its exponential."""
    model.eval()
    total, hidden = 0.0, None
    with torch.no_grad():
        for start in range(0, len(text) - 1, bptt):
            words = text[start : start + bptt + 1]
            logits, hidden = model(words[:-1], hidden)
            total += F.cross_entropy(
                logits.flatten(0, 1), words[1:].flatten(), reduction="sum"
            ).item()
    model.train()
    return total / text[1:].numel()


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf if loss > 0 else math.nan


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
    steps = math.ceil((len(text) - 1) / a.bptt)
    torch.manual_seed(a.seed)
    model = LanguageModel(vocabulary, *SIZES[a.size]).to(device)
    dgc.broadcast_parameters(model.state_dict())

    optimizer = torch.optim.SGD(model.parameters(), a.lr, a.momentum)
    optimizer = job.distributed(optimizer, model, launcher, a.method, config(a, steps))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.25, patience=0, threshold=0, eps=0
    )
    # Clipping after the exchange loses nothing in dense training; where it does, that is what is being studied.
    warnings.filterwarnings("ignore", "the gradient of .* was changed between synchronize")

    now = job.training(a, dataset, size, steps)
    history = job.resume(a, now, model, optimizer, scheduler) if a.resume else []
    board = job.board(a, rank)
    counted = hasattr(optimizer, "report")  # Horovod's own does not count: its bytes are known
    assumed = job.dense_bytes(model, size) / (2 if a.method == "fp16" else 1)
    with tqdm(
        total=a.epochs * steps,
        initial=len(history) * steps,
        disable=rank > 0,
        desc=a.method,
        mininterval=1,
        dynamic_ncols=True,
    ) as bar:
        for epoch in range(len(history), a.epochs):
            lr, hidden = optimizer.param_groups[0]["lr"], None
            began, loss_sum, sent = time.perf_counter(), torch.zeros((), device=device), 0.0
            if counted:
                sent = optimizer.report().total_bytes_sent
            losses: list[float] = []
            for step in range(steps):
                # Dropout's draws follow from the step and the rank alone: resuming and launching need no more.
                torch.manual_seed((a.seed * 1_000_000 + epoch * steps + step) * size + rank)
                words = text[step * a.bptt : (step + 1) * a.bptt + 1]
                optimizer.zero_grad()
                logits, hidden = model(words[:-1], hidden)
                loss = F.cross_entropy(logits.flatten(0, 1), words[1:].flatten())
                loss.backward()
                update(model, optimizer, a)
                loss_sum += loss.detach()
                if step % max(1, steps // 20) == 0:
                    # Some points of a curve; each is a wait for the device.
                    losses.append(loss.item())
                bar.update()
            seconds = time.perf_counter() - began
            if epoch + 1 == a.epochs and a.flush and a.method in ("topk", "dgc"):
                optimizer.flush()  # what is pending would otherwise never be applied
            (valid_loss,) = job.of_rank_0(
                [evaluate(model, valid, a.bptt) if rank == 0 else math.nan], device
            )
            scheduler.step(valid_loss)  # alike on all ranks
            nbytes = (optimizer.report().total_bytes_sent - sent) / steps if counted else assumed
            history.append(
                {
                    "epoch": epoch + 1,
                    "loss": float(loss_sum) / steps,
                    "lr": lr,
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
            job.log(board, history, ("loss", "perplexity", "lr", "bytes_per_step", "step_seconds"))
            if a.checkpoints:
                job.checkpoint(a, now, model, optimizer, scheduler, history)
    if rank > 0:
        return {}
    result = job.summary(
        a,
        "ptb",
        dataset,
        launcher,
        size,
        steps,
        model,
        history,
        vocabulary=vocabulary,
        perplexity=perplexity(evaluate(model, test, a.bptt)),
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
    method: job.Method = "dgc",
    size: Annotated[
        Literal["small", "medium", "large"],
        typer.Option(help="200, 650 or 1500 hidden units; the paper's is large."),
    ] = "small",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Default: 40; 16 of the documentation.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Of all workers together.")] = 20,
    bptt: Annotated[int, typer.Option(min=1, help="Words of a column in a batch.")] = 35,
    lr: job.Number = 20.0,
    momentum: Annotated[
        float, typer.Option(min=0, callback=job.finite, help="The paper has none here.")
    ] = 0.0,
    clip_norm: Annotated[
        float,
        typer.Option(
            min=0, callback=job.bound, help="Bound on the gradient's norm; 0 or inf: none."
        ),
    ] = 0.25,
    local_clipping: Annotated[
        bool,
        typer.Option(
            help="Of dgc: before accumulating. Off: after the exchange, as the other methods."
        ),
    ] = True,
    sparsity: job.Sparsity = 0.999,
    warmup_epochs: Annotated[
        float | None,
        typer.Option(min=0, callback=job.finite, help="Of dgc alone. Default: 1 of 40."),
    ] = None,
    momentum_correction: bool = True,
    factor_masking: bool = True,
    flush: job.Flush = False,
    value_bits: job.ValueBits = 16,
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
    """Trains a language model on Penn Treebank with Deep Gradient Compression, or without."""
    # The documentation is learnt by then: the lr is down to a sixteenth.
    epochs = epochs or (40 if data else 16)
    a = argparse.Namespace(**locals())
    result = job.run(lambda: train(a), a)
    if result:  # rank 0
        print(
            f"{method}: test perplexity {result['perplexity']:.2f} on {result['dataset']} after {epochs} epochs",
            flush=True,
        )


if __name__ == "__main__":
    job.run_command(main)
