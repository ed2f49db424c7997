"""Local steps with other optimizers than AdamW: perplexity beside the same optimizer's dense training.

    python benchmarks/local_optimizers.py --out benchmarks/results/local-optimizers.json

The transformer of ``recipes/transformer.py`` on the text of Python's documentation, 8 epochs, three seeds. Dense: one
process with the whole batch and torch's own optimizer. Local steps: four ranks in one process, each with a quarter of
the batch, H = 5, all entries in 2 bits, at the dense learning rate. Nothing was tuned. Two hours on one core, as Muon
takes half of it where a CPU has no bfloat16. A training that diverges counts as an infinite perplexity.

AdamW has half the recipe's rate, which is hardly stable in so short a training. With seed 2, dense training ended at
127 with one worker and at 167 with four, which differ in dropout's draws alone
(``python recipes/transformer.py --method dense --seed 2 --virtual-workers 4``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Annotated, Any

import torch
import torch.nn.functional as F  # noqa: N812
import typer
from outfile import Out, write
from ptb import BATCH, columns, load, perplexity
from transformer import Transformer, evaluate, rate

import dgc

RANKS, COLUMNS, LENGTH, WIDTH, DROPOUT, EPOCHS = 4, 32, 64, 128, 0.2, 8
Parameters = list[tuple[str, torch.nn.Parameter]]
Made = Callable[[Parameters], list[torch.optim.Optimizer]]


def muon(named: Parameters) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the embeddings and the rest."""
    inner = [p for name, p in named if p.dim() == 2 and name.startswith("blocks")]
    rest = [p for name, p in named if not (p.dim() == 2 and name.startswith("blocks"))]
    return [torch.optim.Muon(inner, 0.02), torch.optim.AdamW(rest, 1e-3)]


def alone(kind: Any, lr: float, **settings: Any) -> Made:
    """One optimizer for all parameters."""
    return lambda named: [kind([p for _, p in named], lr, **settings)]


OPTIMIZERS: dict[str, Made] = {
    "AdamW": alone(torch.optim.AdamW, 1e-3),
    "Muon, AdamW for the rest": muon,
    "Adam with weight decay": alone(torch.optim.Adam, 1e-3, weight_decay=1e-4),
    "RMSprop": alone(torch.optim.RMSprop, 1e-3),
    "SGD with Nesterov": alone(torch.optim.SGD, 0.5, momentum=0.9, nesterov=True),
}


def trained(make: Made, config: dgc.Config | None, seed: int) -> tuple[float, float]:
    """The test perplexity, and how many times fewer bytes were sent. None: dense, in one process."""
    rank, size = (dgc.lockstep.current().world.rank, RANKS) if config else (0, 1)
    _, vocabulary, parts = load(None)
    share = COLUMNS // size
    text = columns(parts["train"], COLUMNS)[:, rank * share : (rank + 1) * share].contiguous()
    steps = math.ceil((len(text) - 1) / LENGTH)
    torch.manual_seed(seed)
    model = Transformer(vocabulary, WIDTH, DROPOUT, LENGTH)
    named = list(model.named_parameters())
    optimizers: list[Any] = make(named)
    if config:
        optimizers = [
            dgc.DistributedOptimizer(
                each,
                [(n, p) for n, p in named if any(p is q for q in each.param_groups[0]["params"])],
                config,
            )
            for each in optimizers
        ]
    begun = [[group["lr"] for group in each.param_groups] for each in optimizers]
    for step in range(EPOCHS * steps):
        epoch, at = divmod(step, steps)
        if at == 0:
            draws = torch.Generator().manual_seed(1000 * seed + epoch)
            order = torch.randperm(steps, generator=draws).tolist()
        window = order[at]
        torch.manual_seed((1_000_000 * seed + step) * size + rank)  # dropout's draws
        words = text[window * LENGTH : (window + 1) * LENGTH + 1].t()
        for each, rates in zip(optimizers, begun, strict=True):
            for group, lr in zip(each.param_groups, rates, strict=True):
                group["lr"] = lr * rate(step, EPOCHS * steps)
            each.zero_grad()
        F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()).backward()
        for each in optimizers:
            each.step()
    fewer = 1.0
    if config:
        for each in optimizers:
            each.flush()
        reports = [each.report() for each in optimizers]
        fewer = sum(r.total_dense_bytes for r in reports) / sum(r.total_bytes_sent for r in reports)
    return perplexity(evaluate(model, columns(parts["test"], BATCH), LENGTH)), fewer


def main(seeds: Annotated[int, typer.Option(min=1)] = 3, out: Out = None) -> None:
    """Trains with each optimizer, dense and with local steps, and prints test perplexities."""
    torch.set_num_threads(1)
    config = dgc.Config(sparsity=0.0, value_bits=2, local_steps=5)
    rows = []
    for name, make in OPTIMIZERS.items():
        dense, local, fewer = [], [], math.nan
        for seed in range(seeds):
            dense.append(trained(make, None, seed)[0])
            try:
                test, fewer = dgc.lockstep.run(partial(trained, make, config, seed), RANKS)[0]
            except FloatingPointError:  # it diverged
                test = math.inf
            local.append(test)
        ratio = fmean(local) / fmean(dense)
        print(
            f"{name:>25}: dense {listed(dense)}, local steps {listed(local)}: "
            f"mean {100 * (ratio - 1):+.1f} %, {fewer:.0f} times fewer bytes",
            flush=True,
        )
        rows.append({"optimizer": name, "dense": dense, "local_steps": local, "fewer_bytes": fewer})
        if out:
            write(out, {"benchmark": "local optimizers", "rows": rows})


def listed(perplexities: list[float]) -> str:
    """A number for each seed."""
    return " ".join(f"{each:.1f}" for each in perplexities)


if __name__ == "__main__":
    typer.run(main)
