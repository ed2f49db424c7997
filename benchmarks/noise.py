"""How far compression keeps parameters from where SGD takes them, with gradients made of a mean and noise.

    python benchmarks/noise.py --out benchmarks/results/noise.json

Workers in this process have gradients with one mean and noise of their own, as with small batches. Three things are
measured; in the first two the means never change:

- The way: how far parameters go along the mean, with all that was pending applied at the end, over how far
  torch.optim.SGD takes them with the same gradients. Momentum factor masking (paper, section 3.3) shortens it, as it
  sets the momentum of an entry to zero when the entry is sent, and with it what that would have added in the steps
  after.
- What is behind: the distance from SGD's parameters to these while training goes on, without masking, so that all of
  it is pending; over the distance with all-gather at 99.9 %. The noise of the mean over workers is the same however
  many they are, as with a batch that they divide: a worker's own is the larger the more there are, and so says less of
  which entries are large in the mean.
- The valley: the mean leads back to a minimum, the faster the more curved the loss is along an entry, and so answers
  what has been applied. The loss that remains, over dense training's, when each worker sends its own largest entries
  (all-gather), when owners add up what workers send and pass on the largest sums (reduce, with so many messages' worth
  of entries sent and of sums passed on; the package's are 3 and 3), and when all send those that are largest in the
  mean, which nobody knows. A transcription in plain torch, without masking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from outfile import Out, write
from rich.console import Console
from rich.table import Table
from torch import Tensor

import dgc
from dgc.compression import select
from dgc.compression.regions import Regions

SPARSITIES = (0.75, 0.9, 0.9375, 0.984375, 0.99, 0.996, 0.999)
CROWDS, EXCHANGES = (4, 16, 64), (("allgather", 0.999), ("reduce", 0.999), ("reduce", 0.996))
SHAPE, WORKERS, MOMENTUM = (100, 100), 4, 0.9
CHOICES = {
    "allgather": "a worker's own",
    "mean": "the mean's",
    **{
        f"reduce {a} {b}": f"owners', {a} + {b}"
        for a, b in ((1, 1), (2, 2), (1, 4), (3, 3), (1, 8), (4, 4))
    },
}
# Entries, and the range of the decimal logarithms of their curvatures.
VALLEY, CURVATURES = (
    4000,
    (-3.0, 0.5),
)


def sgd(mean: Tensor, steps: int, workers: int = WORKERS, noise: float = 1.0) -> Tensor:
    """Where torch's SGD takes parameters of zero with the gradients of all workers."""
    return _train(None, mean, steps, range(workers), noise)[0]


def compressed(
    config: dgc.Config, mean: Tensor, steps: int, workers: int = WORKERS, noise: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Where they are after the last step, and where with what was pending."""
    return dgc.lockstep.run(
        lambda: _train(config, mean, steps, [dgc.lockstep.current().world.rank], noise), workers
    )[0]


def _train(
    config: dgc.Config | None, mean: Tensor, steps: int, ranks: range | list[int], noise: float
) -> tuple[Tensor, Tensor]:
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

    return [
        {
            "sparsity": s,
            "masking": way(dgc.Config(s)),
            "no masking": way(dgc.Config(s, factor_masking=False)),
        }
        for s in SPARSITIES
    ]


def behind(mean: Tensor, steps: int, crowds: Sequence[int] = CROWDS) -> list[dict[str, Any]]:
    """By exchange, and by the number of workers, which share one batch; over the first exchange's."""
    noises = {n: (n / WORKERS) ** 0.5 for n in crowds}
    ahead = {n: sgd(mean, steps, n, noise) for n, noise in noises.items()}

    def distances(config: dgc.Config) -> dict[int, float]:
        return {
            n: float((compressed(config, mean, steps, n, noise)[0] - ahead[n]).norm())
            for n, noise in noises.items()
        }

    found = [
        distances(dgc.Config(sparsity, factor_masking=False, exchange=exchange))
        for exchange, sparsity in EXCHANGES
    ]
    return [
        {"exchange": exchange, "sparsity": sparsity, **{n: row[n] / found[0][n] for n in crowds}}
        for (exchange, sparsity), row in zip(EXCHANGES, found, strict=True)
    ]


def valley(choice: str | None, sparsity: float, workers: int, steps: int) -> tuple[Tensor, float]:
    """Where SGD goes from the minimum, and the loss in the mean of the last three quarters of the steps.

    Args:
        choice: whose largest entries are sent, of ``CHOICES``; None: dense.
        sparsity: of what is sent; the learning rate is a fifth of the density, with None too.
        workers: the noise of their mean is the same however many they are.
        steps: how many.
    """
    draw = torch.Generator().manual_seed(0)
    curvature = 10 ** (
        CURVATURES[0] + (CURVATURES[1] - CURVATURES[0]) * torch.rand(VALLEY, generator=draw)
    )
    noise, k, losses = (curvature * workers / WORKERS).sqrt(), select.count(sparsity, VALLEY), []
    x, u, v, sums = torch.zeros(VALLEY), *torch.zeros(3, workers, VALLEY)
    owner = Regions(VALLEY, workers, x.device).owner_of(torch.arange(VALLEY))
    own = owner == torch.arange(workers)[:, None]  # which entries each worker adds up
    for _ in range(steps):
        u.mul_(MOMENTUM).add_(curvature * x + noise * torch.randn(workers, VALLEY, generator=draw))
        v += u
        if choice is None:
            sent = v.clone()
        elif choice.startswith("reduce"):  # what is not passed on stays in an owner's sums
            chosen, kept = (int(messages) * k for messages in choice.split()[1:])
            arrived = torch.where(own, 0, _largest(v, v, chosen))
            v -= arrived
            sums += torch.where(own, arrived.sum(0) + v, 0)
            v[own] = 0
            sent = _largest(sums, sums, -(-kept // workers))
            sums -= sent
        else:
            sent = _largest({"allgather": v, "mean": v.mean(0)}[choice], v, k)
        if not (choice or "").startswith("reduce"):
            v -= sent
        x = x - 0.2 * (1 - sparsity) * sent.mean(0)
        losses.append(float((curvature * x * x).sum() / 2))
    return x, sum(losses[steps // 4 :]) / len(losses[steps // 4 :])


def _largest(large: Tensor, v: Tensor, k: int) -> Tensor:
    """Of v, (workers, entries), what is where the k largest entries of ``large`` are: each worker's, or one for all."""
    index = large.abs().topk(min(k, large.shape[-1])).indices.expand(len(v), -1)
    return torch.zeros_like(v).scatter_(1, index, v.gather(1, index))


def remaining(sparsity: float, steps: int) -> list[dict[str, Any]]:
    """By choice and number of workers, over dense training's."""
    dense = {n: valley(None, sparsity, n, steps)[1] for n in CROWDS}
    return [
        {
            "chosen": chosen,
            "sparsity": sparsity,
            **{n: valley(choice, sparsity, n, steps)[1] / dense[n] for n in CROWDS},
        }
        for choice, chosen in CHOICES.items()
    ]


def main(
    out: Out = None,
    scale: Annotated[float, typer.Option(min=0, help="Standard deviation of the means.")] = 0.1,
    steps: Annotated[int, typer.Option(min=1)] = 2000,
) -> None:
    """Measures and prints all three."""
    torch.set_num_threads(1)
    mean = scale * torch.randn(SHAPE, generator=torch.Generator().manual_seed(WORKERS))
    found = {
        "way": ways(mean, steps),
        "behind": behind(mean, steps),
        "valley": [row for sparsity in (0.75, 0.99) for row in remaining(sparsity, steps)],
    }
    for title, rows in (
        ("the way gone, over that of torch's SGD", found["way"]),
        ("distance behind torch's SGD, by workers, over all-gather's", found["behind"]),
        ("loss that remains, by workers, over dense training's", found["valley"]),
    ):
        table = Table(*map(str, rows[0]), title=title)
        for row in rows:
            table.add_row(
                *(
                    f"{100 * value:g} %"
                    if key == "sparsity"
                    else value
                    if isinstance(value, str)
                    else f"{value:.2f}"
                    for key, value in row.items()
                )
            )
        Console().print(table)
    if out:
        write(
            out,
            {
                "shape": SHAPE,
                "workers": WORKERS,
                "momentum": MOMENTUM,
                "scale": scale,
                "steps": steps,
                "torch": torch.__version__,
                **found,
            },
        )
        print(out)


if __name__ == "__main__":
    typer.run(main)
