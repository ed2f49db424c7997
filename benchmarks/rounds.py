"""How many entries the reduce exchange needs in its rounds: the trainings of the exchanges' table, with other numbers.

    python benchmarks/rounds.py --data DIR --wide 4 --workers 16 --out benchmarks/results/rounds/wide4-16-0.json

Both rounds carry so many times the entries that an all-gather's message has; the package's own number is 3. The bound
is ``--mean``: all workers add up all of v, which is more than a dense exchange, and as many of the largest entries of
that are applied in a step.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Annotated

import typer

from dgc import cost
from dgc.paths import compressed

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "recipes"))
import cifar10
import experiments
from mean_support import sum_at_the_means_support


def main(wide: Annotated[int, typer.Option(min=1, help="Times as many entries as an all-gather's message has.")],
         data: Annotated[str | None, typer.Option(help="As of recipes/cifar10.py.")] = None,
         workers: Annotated[int, typer.Option(help="4, 16 or 64.")] = 16,
         mean: Annotated[bool, typer.Option("--mean", help="The mean chooses, which no worker knows.")] = False,
         seed: Annotated[int, typer.Option(min=0, max=1)] = 0,
         checkpoints: Annotated[pathlib.Path | None, typer.Option(help="Folder; it goes on from there.")] = None,
         out: Annotated[pathlib.Path | None, typer.Option(help="JSON of the result.")] = None) -> None:
    """Trains so."""
    row = experiments.by_exchange(experiments.BUDGETS["cpu"])["reduce"]
    if workers not in row:
        raise typer.BadParameter(f"--workers must be {', '.join(map(str, row))}, got {workers}")
    cost.WIDE = wide
    if mean:
        compressed.PATHS["reduce"] = sum_at_the_means_support
    cifar10.main(**{**row[workers][seed].options, "data": data, "checkpoints": checkpoints,
                    "resume": checkpoints is not None, "out": out})
    if out:
        out.write_text(json.dumps({"wide": wide, "mean": mean, **json.loads(out.read_text())}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
