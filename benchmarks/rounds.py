"""How many entries the reduce exchange needs in its rounds: the trainings of the exchanges' table, with other numbers.

    python benchmarks/rounds.py --data DIR --workers 16 --wide 4 --out benchmarks/results/rounds/wide4-16-0.json
    python benchmarks/rounds.py --data DIR --workers 16 --wide 4 --mean --out benchmarks/results/rounds/mean4-16-0.json
    python benchmarks/rounds.py --data DIR --workers 16 --out benchmarks/results/rounds/allgather-16-0.json
    python benchmarks/rounds.py --show

Both rounds carry ``--wide`` times the entries that an all-gather's message has; the package's own number is 3. The
bound is ``--mean``: all workers add up all of v, which is more than a dense exchange, and as many of the largest
entries of that are applied in a step. Forward and backward passes are in bfloat16 (autocast), which is faster, so
accuracies are to be compared with one another, and not with the exchanges' table.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from typing import Annotated, Any

import typer
from rich import print
from rich.table import Table

from dgc import cost
from dgc.paths import compressed

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "recipes"))
import cifar10
import experiments
from mean_support import sum_at_the_means_support

RESULTS = pathlib.Path(__file__).resolve().parent / "results" / "rounds"


def name_of(wide: int, mean: bool) -> str:
    return f"the mean's own largest {wide} k" if mean else f"reduce, {wide} k and {wide} k" if wide else "all-gather"


def table(results: list[dict[str, Any]]) -> Table:
    """A row for each choice: accuracies by workers and seed, and the mean difference to the all-gather's same seeds."""
    found: dict[tuple[int, bool], dict[int, dict[int, float]]] = {}
    for r in sorted(results, key=lambda r: (r["wide"], r["mean"], r["settings"]["seed"])):
        crowd = found.setdefault((r["wide"], r["mean"]), {}).setdefault(r["workers"], {})
        crowd[r["settings"]["seed"]] = r["accuracy"]
    crowds = sorted({r["workers"] for r in results})
    shown = Table("", *(f"{n} workers" for n in crowds))
    for choice, by in found.items():
        cells = []
        for n in crowds:
            base = found.get((0, False), {}).get(n, {}) if choice[0] else {}
            pairs = [accuracy - base[seed] for seed, accuracy in by.get(n, {}).items() if seed in base]
            cells.append(", ".join(f"{x:.2f} %" for x in by.get(n, {}).values())
                         + (f", {statistics.mean(pairs):+.2f}" if pairs else ""))
        shown.add_row(name_of(*choice), *cells)
    return shown


def main(wide: Annotated[int, typer.Option(min=0, help="Times as many entries as an all-gather's message has; "
                                                       "0: an all-gather.")] = 0,
         data: Annotated[str | None, typer.Option(help="As of recipes/cifar10.py.")] = None,
         workers: Annotated[int, typer.Option(help="4, 16 or 64.")] = 16,
         mean: Annotated[bool, typer.Option("--mean", help="The mean chooses, which no worker knows.")] = False,
         seed: Annotated[int, typer.Option(min=0, max=1)] = 0,
         checkpoints: Annotated[pathlib.Path | None, typer.Option(help="Folder; it goes on from there.")] = None,
         out: Annotated[pathlib.Path | None, typer.Option(help="JSON of the result.")] = None,
         show: Annotated[bool, typer.Option("--show", help="Only the table of what is done.")] = False) -> None:
    """Trains so."""
    if show:
        print(table([json.loads(path.read_text()) for path in RESULTS.glob("*.json")]))
        return
    row = experiments.by_exchange(experiments.BUDGETS["cpu"])["reduce" if wide else "all-gather"]
    if workers not in row:
        raise typer.BadParameter(f"--workers must be {', '.join(map(str, row))}, got {workers}")
    if mean and not wide:
        raise typer.BadParameter("--mean must have a --wide of 1 or more, got 0")
    cost.WIDE = wide
    if mean:
        compressed.PATHS["reduce"] = sum_at_the_means_support
    cifar10.main(**{**row[workers][seed].options, "data": data, "bf16": True, "checkpoints": checkpoints,
                    "resume": checkpoints is not None, "out": out})
    if out:
        out.write_text(json.dumps({"wide": wide, "mean": mean, **json.loads(out.read_text())}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
