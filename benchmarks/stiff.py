"""Which schedules train at a learning rate at which dense training does: a least-squares fit that is easy to blow up.

    python benchmarks/stiff.py --steps 1000 --out benchmarks/results/stiff.json

Two workers in one process fit a small network to a sum with SGD, momentum 0.9. The loss is not bounded and the batches
are random, so an update that comes late, or whose momentum goes on without its gradient, shows at once. For each
schedule and learning rate: how many seeds trained (last loss below a tenth of the first), and of the others how many
ended in a ``FloatingPointError``.
"""

from __future__ import annotations

import functools
import platform
from typing import Annotated, Any

import torch
import typer
from outfile import Out, write

import dgc

RATES = (0.02, 0.01, 0.005, 0.0025)
WORKERS = 2


def schedules(steps: int) -> dict[str, dgc.Config | None]:
    """By the name in the table; None is dense."""
    short = functools.partial(dgc.warmup, 0.08, stages=4, steps_per_epoch=steps)
    return {
        "dense": None,
        "99.9 % from the first step on": dgc.Config(0.999),
        "99 % from the first step on": dgc.Config(0.99),
        "warm-up of 8 % to 99.9 %": dgc.Config(short()),
        "warm-up of 8 % to 99 %": dgc.Config(short(end=0.99)),
        "warm-up of 8 % to 90 %": dgc.Config(short(end=0.9)),
        "warm-up of 8 % to 99 %, no masking": dgc.Config(short(end=0.99), factor_masking=False),
        "warm-up of 8 % to 90 %, no masking": dgc.Config(short(end=0.9), factor_masking=False),
    }


def train(config: dgc.Config | None, rate: float, steps: int, seed: int) -> list[float]:
    """One worker's losses."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1)
    )
    for parameter in model.parameters():
        torch.nn.init.uniform_(
            parameter, -(parameter.shape[-1] ** -0.5), parameter.shape[-1] ** -0.5, generator
        )
    sgd = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    optimizer = dgc.DistributedOptimizer(
        sgd, model.named_parameters(), compression=config or dgc.Config(0.0)
    )
    generator.manual_seed(1000 * seed + dgc.lockstep.current().world.rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 256, generator=generator)
        loss = (model(x) - x[:, :8].sum(1, keepdim=True)).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def outcome(config: dgc.Config | None, rate: float, steps: int, seed: int) -> str:
    """``trained``, ``blew up`` (FloatingPointError) or ``did not``."""
    try:
        losses = dgc.lockstep.run(lambda: train(config, rate, steps, seed), size=WORKERS)[0]
    except FloatingPointError:
        return "blew up"
    return "trained" if sum(losses[-10:]) / 10 < losses[0] / 10 else "did not"


def main(
    steps: Annotated[int, typer.Option(min=20)] = 300,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    out: Out = None,
) -> None:
    """Trains with each schedule, learning rate and seed, and prints a table."""
    torch.set_num_threads(1)
    rows = dict[str, dict[float, list[str]]]()
    print(f"| {steps} steps, {seeds} seeds | " + " | ".join(f"{rate:g}" for rate in RATES) + " |")
    print("|---" * (1 + len(RATES)) + "|")
    for name, config in schedules(steps).items():
        rows[name] = {
            rate: [outcome(config, rate, steps, seed) for seed in range(seeds)] for rate in RATES
        }
        cells = [
            ", ".join(
                f"{said.count(what)} {what}"
                for what in ("trained", "did not", "blew up")
                if what in said
            )
            for said in rows[name].values()
        ]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    result: dict[str, Any] = {
        "benchmark": "stiff",
        "steps": steps,
        "seeds": seeds,
        "workers": WORKERS,
        "rows": rows,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    if out:
        write(out, result)


if __name__ == "__main__":
    typer.run(main)
