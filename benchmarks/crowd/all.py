"""Every training of the tables of exchanges, several at a time on one GPU, and these tables.

python benchmarks/crowd/all.py --data DIR --jobs 6        # trains what has no result yet; stop it, and it goes on
python benchmarks/crowd/all.py                            # only the tables
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import job

from crowd import table, train

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "crowd"
WIDES = 3, 1, 2, 4, 8
# Sparsity, and whether it is masked.
MANY = (
    ("99.9", True),
    ("99", False),
    ("97", False),
    ("90", False),
)
Runs = dict[str, dict[str, Any]]  # name -> options of train.py


def of_exchanges(seed: int) -> Runs:
    """10 epochs of 128 images a step, by 4, 16 and 64 workers: each exchange, and how many entries its rounds carry."""
    choices: Runs = {"dense": {"exchange": "dense"}, "allgather": {}}
    choices |= {f"reduce{w}": {"exchange": "reduce", "wide": w} for w in WIDES}
    choices |= {"mean3": {"exchange": "mean"}, "mean1": {"exchange": "mean", "wide": 1}}
    return {
        f"{name}-{n}-{seed}": {**options, "workers": n, "seed": seed}
        for name, options in choices.items()
        for n in (4, 16, 64)
        if (name, n) != ("dense", 64)
    }


def of_bytes(seed: int) -> Runs:
    """32 workers and 1,075 steps: 25 epochs, each worker with 32 images a step. By sparsity, exchange and momentum."""
    common = {
        "workers": 32,
        "batch_size": 32,
        "epochs": 25,
        "warmup_epochs": 2.0,
        "validate": True,
        "seed": seed,
    }
    runs: Runs = {f"many-dense-{seed}": {"exchange": "dense", **common}}
    for exchange in ("allgather", "reduce"):
        for percent, masked in MANY:
            runs[f"many-{exchange}-{percent}{'' if masked else '-nomasking'}-{seed}"] = {
                "exchange": exchange,
                "sparsity": float(percent) / 100,
                "factor_masking": masked,
                **common,
            }
    return runs


def of_length(seed: int) -> Runs:
    """The paper's training: 4 workers, 164 epochs, a warm-up of 4. Dense and compressed."""
    common = {"workers": 4, "epochs": 164, "warmup_epochs": 4.0, "seed": seed}
    return {
        f"length-{exchange}-{seed}": {"exchange": exchange, **common}
        for exchange in ("dense", "allgather")
    }


def all_runs() -> Runs:
    """In the order of their importance."""
    runs: Runs = {}
    for seed in (0, 1):
        runs |= of_exchanges(seed)
    for seed in (0, 1, 2):
        runs |= of_bytes(seed)
    for seed in (0, 1):
        runs |= of_length(seed)
    return runs


def main(
    data: Annotated[
        str | None, typer.Option(help=("As of recipes/cifar10.py. Without it nothing is trained."))
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at a time.")] = 6,
    only: Annotated[
        str, typer.Option(help="Those whose names match this regular expression.")
    ] = "",
    minutes: Annotated[float, typer.Option(help="After which no more are begun.")] = 1e9,
    epochs: Annotated[int, typer.Option(min=0, help="To try the script; 0: each run's own.")] = 0,
    results: Annotated[Path, typer.Option(help="Folder.")] = RESULTS,
) -> None:
    """Trains, and shows the tables of all that is done."""
    end = time.monotonic() + 60 * minutes
    results.mkdir(parents=True, exist_ok=True)
    left = {
        name: options
        for name, options in all_runs().items()
        if re.search(only, name) and not (results / f"{name}.json").exists()
    }

    def named(name: str) -> Generator[None, None, float]:
        checkpoint = results / f"{name}.checkpoint"
        given = {"data": data, "checkpoint": checkpoint, **({"epochs": epochs} if epochs else {})}
        result = yield from train.training(train.options({**left[name], **given}))
        job.write(results / f"{name}.json", result)
        checkpoint.unlink()
        tqdm.write(f"{name}: {result['accuracy']:.2f} %")
        return result["accuracy"]

    if data:
        begun = (named(name) for name in left if time.monotonic() < end)
        for _ in tqdm(train.finished(begun, jobs), total=len(left)):
            pass
    print(
        table.tables(
            {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
        )
    )


if __name__ == "__main__":
    typer.run(main)
