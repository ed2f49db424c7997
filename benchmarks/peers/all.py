"""Makes the runs of the table that are missing, one after the other: train.py with each method and seed.

    python benchmarks/peers/all.py --data DIR --epochs 10 --seeds 0,1 --bf16
    python benchmarks/peers/all.py --task ptb --data DIR --epochs 8 --seeds 0,1

Of each seed all methods, then the next seed. A run whose JSON is there is done. One that was ended goes on from its
last epoch when the same command is given again. Several of these commands may work on one folder: a run's log, beside
its checkpoints, is also its lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
from reproduce import MALLOC

from peers import METHODS
from peers.tasks import TASKS, folder

HERE = Path(__file__).resolve().parent
ORDER = (
    "dense",
    "dgc-allgather",
    "powersgd-2",
    "qsgd",
    "fp16",
    "diloco",
    "local-sgd",
    "dropping",
    "terngrad",
    "dgc-99",
    "diloco-even",
    "dgc-reduce",
    "ef-signsgd",
    "powersgd-4",
    "demo",
    "signsgd",
    "atomo",
    "stale-dgc",
    "stale",
    "powersgd-1",
    "bf16",
    "async",
    "dgc-4bits",
    "dgc-local",
)
# Where no other methods are named.
LANGUAGE = (
    "dense",
    "dgc-allgather",
    "powersgd-4",
    "qsgd",
    "fp16",
    "diloco",
)


def done(file: Path, asked: dict[str, Any]) -> bool:
    """Whether this run is there. SystemExit: another one is."""
    if not file.exists():
        return False
    found = json.loads(file.read_text())
    has = {**found["settings"], "target": found.get("target")}
    if wrong := [
        f"its {key} is {has.get(key)!r}, asked is {value!r}"
        for key, value in asked.items()
        if has.get(key) != value
    ]:
        raise SystemExit(
            f"{file} must be of the run that is asked for, got another: {'; '.join(wrong)} (move it away, "
            "or name another --results)"
        )
    return True


def make(file: Path, work: Path, data: str, asked: dict[str, Any]) -> bool:
    """Trains, unless another command does so; False if it failed."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "log").open("ab") as log:
        try:
            # Held by the child, too, to which it is the output.
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{file.stem}: another command is at it", flush=True)
            return True
        if done(file, asked):  # since
            return True
        options = {**asked, "data": data, "checkpoints": work, "out": file, "threads": 1}
        words = [
            f"--{key}" if value is True else f"--{key}={value}"
            for key, value in options.items()
            if value is not False
        ]
        print(f"{file.stem}: {log.name}", flush=True)
        status = subprocess.run(
            [sys.executable, str(HERE / "train.py"), *words, "--resume"],
            stdout=log,
            stderr=log,
            env={**MALLOC, **os.environ, "OMP_NUM_THREADS": "1"},
        ).returncode
    if status or not file.exists():
        print(
            f"{file.stem} failed with status {status}: the end of {work / 'log'} says why",
            file=sys.stderr,
        )
        return False
    shutil.rmtree(work)
    return True


def main(
    data: Annotated[
        str, typer.Option(help="As train.py takes it: a folder, or digits, or topics.")
    ],
    methods: Annotated[
        str | None,
        typer.Option(help=f"Of train.py, with commas. Default: all; of ptb {', '.join(LANGUAGE)}."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="With commas.")] = "0,1",
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    bf16: Annotated[bool, typer.Option("--bf16", help="Autocast to bfloat16.")] = False,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the JSONs. Default: peers, or peers-ptb, in benchmarks/results."
        ),
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder of logs and checkpoints. Default: the same in runs.")
    ] = None,
    task: Annotated[str, typer.Option(help=f"Of {', '.join(TASKS)}.")] = "cifar10",
) -> None:
    """Makes the runs that are missing."""
    if task not in TASKS:
        raise typer.BadParameter(f"--task must be of {', '.join(TASKS)}, got {task!r}")
    results, work = (
        results or HERE.parent / "results" / folder(task),
        work or Path("runs") / folder(task),
    )
    chosen = methods.split(",") if methods else ORDER if task == "cifar10" else LANGUAGE
    if wrong := [name for name in chosen if name not in METHODS]:
        raise typer.BadParameter(f"--methods must be of {', '.join(METHODS)}, got {wrong[0]!r}")
    if not all(seed.isdigit() for seed in seeds.split(",")):
        raise typer.BadParameter(f"--seeds must be whole numbers with commas, got {seeds!r}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the child is ended, too
    failed = []
    for seed in map(int, seeds.split(",")):
        for method in chosen:
            asked = {"task": task, "method": method, "seed": seed, "epochs": epochs, "bf16": bf16}
            file = results / f"{method}-{seed}.json"
            if not done(file, asked) and not make(
                file.resolve(), (work / file.stem).resolve(), data, asked
            ):
                failed.append(file.stem)
    raise SystemExit(f"{len(failed)} failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    typer.run(main)
