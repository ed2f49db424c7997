"""How far momentum factor masking shortens the way that parameters go, by sparsity: beside torch's SGD.

    python benchmarks/masking.py --out benchmarks/results/masking.json

Masking (paper, section 3.3) sets the momentum of an entry to zero when the entry is sent, and with it what it would
have added in the steps after. Here each entry's gradient is a mean of its own plus noise of standard deviation 1, as
with small batches, among 4 workers in this process; measured is how far parameters have gone along the mean, with all
that was pending applied at the end, over how far torch.optim.SGD takes them with the same gradients.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import dgc

SPARSITIES = (0.75, 0.9, 0.9375, 0.984375, 0.99, 0.996, 0.999)
SHAPE, WORKERS, MOMENTUM = (100, 100), 4, 0.9


def way(config: dgc.Config | None, mean: torch.Tensor, steps: int) -> float:
    """Along the mean, that of the gradients of all workers; without a config with torch's SGD alone."""
    def worker() -> float:
        parameter = torch.nn.Parameter(torch.zeros(SHAPE))
        optimizer = torch.optim.SGD([parameter], 1.0, MOMENTUM)
        mine = range(WORKERS) if config is None else [dgc.lockstep.current().world.rank]
        noise = [torch.Generator().manual_seed(rank) for rank in mine]
        if config is not None:
            optimizer = dgc.DistributedOptimizer(optimizer, None, config)
        for _ in range(steps):
            parameter.grad = mean + sum(torch.randn(SHAPE, generator=one) for one in noise) / len(noise)
            optimizer.step()
        if config is not None:
            optimizer.flush()
        return -float((parameter.detach() * mean).sum())

    return worker() if config is None else dgc.lockstep.run(worker, WORKERS)[0]


def main(out: Annotated[Path | None, typer.Option(help="JSON of the results.")] = None,
         scale: Annotated[float, typer.Option(help="Standard deviation of the means.")] = 0.1,
         steps: Annotated[int, typer.Option(min=1)] = 2000) -> None:
    """Measures and prints it, with masking and without."""
    torch.set_num_threads(1)
    mean = scale * torch.randn(SHAPE, generator=torch.Generator().manual_seed(WORKERS))
    sgd = way(None, mean, steps)
    rows = [{"sparsity": s, "masking": way(dgc.Config(s), mean, steps) / sgd,
             "no masking": way(dgc.Config(s, factor_masking=False), mean, steps) / sgd} for s in SPARSITIES]
    table = Table("sparsity", "masking", "no masking", title="the way gone, over that of torch's SGD")
    for row in rows:
        table.add_row(f"{100 * row['sparsity']:g} %", f"{row['masking']:.2f}", f"{row['no masking']:.2f}")
    Console().print(table)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"shape": SHAPE, "workers": WORKERS, "momentum": MOMENTUM, "scale": scale,
                                   "steps": steps, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
        print(out)


if __name__ == "__main__":
    typer.run(main)
