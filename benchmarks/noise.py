"""How far compression keeps parameters from where torch's SGD takes them, with gradients that are all alike.

    python benchmarks/noise.py --out benchmarks/results/noise.json

Each entry's gradient is a mean of its own plus noise, as with small batches, among workers in this process. Two things
are measured:

- The way: how far parameters go along the mean, with all that was pending applied at the end, over how far
  torch.optim.SGD takes them with the same gradients. Momentum factor masking (paper, section 3.3) shortens it, as it
  sets the momentum of an entry to zero when the entry is sent, and with it what that would have added in the steps
  after.
- What is behind: the distance from SGD's parameters to these while training goes on, without masking, so that all of
  it is pending; over the distance with all-gather at 99.9 %. The noise of the mean over workers is the same however
  many they are, as with a batch that they divide: a worker's own is the larger the more there are, and so says less of
  which entries are large in the mean.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import dgc

SPARSITIES = (0.75, 0.9, 0.9375, 0.984375, 0.99, 0.996, 0.999)
CROWDS, EXCHANGES = (4, 16, 64), (("allgather", 0.999), ("shared", 0.999), ("shared", 0.996), ("shared", 0.99))
SHAPE, WORKERS, MOMENTUM = (100, 100), 4, 0.9


def sgd(mean: Tensor, steps: int, workers: int = WORKERS, noise: float = 1.0) -> Tensor:
    """Where torch's SGD takes parameters of zero with the gradients of all workers."""
    return _train(None, mean, steps, range(workers), noise)[0]


def compressed(config: dgc.Config, mean: Tensor, steps: int, workers: int = WORKERS, noise: float = 1.0) -> tuple[
        Tensor, Tensor]:
    """Where they are after the last step, and where with what was pending."""
    return dgc.lockstep.run(lambda: _train(
        config, mean, steps, [dgc.lockstep.current().world.rank], noise), workers)[0]


def _train(config: dgc.Config | None, mean: Tensor, steps: int, ranks: range | list[int], noise: float) -> tuple[
        Tensor, Tensor]:
    parameter = torch.nn.Parameter(torch.zeros_like(mean))
    optimizer: Any = torch.optim.SGD([parameter], 1.0, MOMENTUM)
    if config is not None:
        optimizer = dgc.DistributedOptimizer(optimizer, None, config)
    generators = [torch.Generator().manual_seed(rank) for rank in ranks]
    for _ in range(steps):
        noises = torch.stack([torch.randn(mean.shape, generator=one) for one in generators])
        parameter.grad = mean + noise * noises.mean(0)
        optimizer.step()
    before = parameter.detach().clone()
    if config is not None:
        optimizer.flush()
    return before, parameter.detach()


def ways(mean: Tensor, steps: int) -> list[dict[str, float]]:
    """By sparsity, over SGD's."""
    whole = (sgd(mean, steps) * mean).sum()

    def way(config: dgc.Config) -> float:
        return float((compressed(config, mean, steps)[1] * mean).sum() / whole)

    return [{"sparsity": s, "masking": way(dgc.Config(s)), "no masking": way(dgc.Config(s, factor_masking=False))}
            for s in SPARSITIES]


def behind(mean: Tensor, steps: int, crowds: Sequence[int] = CROWDS) -> list[dict[str, Any]]:
    """By exchange, and by the number of workers, which share one batch; over the first exchange's."""
    noises = {n: (n / WORKERS) ** 0.5 for n in crowds}
    ahead = {n: sgd(mean, steps, n, noise) for n, noise in noises.items()}

    def distances(config: dgc.Config) -> dict[int, float]:
        return {n: float((compressed(config, mean, steps, n, noise)[0] - ahead[n]).norm())
                for n, noise in noises.items()}

    found = [distances(dgc.Config(sparsity, factor_masking=False, exchange=exchange))
             for exchange, sparsity in EXCHANGES]
    return [{"exchange": exchange, "sparsity": sparsity, **{n: row[n] / found[0][n] for n in crowds}}
            for (exchange, sparsity), row in zip(EXCHANGES, found, strict=True)]


def main(out: Annotated[Path | None, typer.Option(help="JSON of the results.")] = None,
         scale: Annotated[float, typer.Option(help="Standard deviation of the means.")] = 0.1,
         steps: Annotated[int, typer.Option(min=1)] = 2000) -> None:
    """Measures and prints both."""
    torch.set_num_threads(1)
    mean = scale * torch.randn(SHAPE, generator=torch.Generator().manual_seed(WORKERS))
    found = {"way": ways(mean, steps), "behind": behind(mean, steps)}
    for title, rows in (("the way gone, over that of torch's SGD", found["way"]),
                        ("distance behind torch's SGD, by workers, over all-gather's", found["behind"])):
        table = Table(*map(str, rows[0]), title=title)
        for row in rows:
            table.add_row(*(f"{100 * value:g} %" if key == "sparsity" else
                            value if isinstance(value, str) else f"{value:.2f}" for key, value in row.items()))
        Console().print(table)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"shape": SHAPE, "workers": WORKERS, "momentum": MOMENTUM, "scale": scale,
                                   "steps": steps, "torch": torch.__version__, **found}, indent=1) + "\n")
        print(out)


if __name__ == "__main__":
    typer.run(main)
