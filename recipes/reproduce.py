"""Runs what is missing of the paper's experiments (experiments.py), and draws the tables and figures (tables.py).

    python recipes/reproduce.py --data DIR --ptb DIR        # all of it; stop it at any moment, and start it again
    python recipes/reproduce.py --list                      # what is done, what is missing, about how long it takes
    python recipes/reproduce.py --report-only               # tables and figures, from the results alone
    python recipes/reproduce.py --quick                     # every kind of run, in a few minutes, for its own sake

Each run is a child process of a recipe, that goes on from its checkpoints and leaves one JSON. A run whose JSON is
there is done. Several of these commands may work on one folder: a run's log is also its lock.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import data as cifar
import ptb
import report
import torch
import typer
from experiments import BUDGETS, Budget, Run, chosen
from job import run_command
from report import CONFIG, RECIPES, Result
from rich.console import Console
from rich.table import Column, Table
from tables import draw

# For glibc: activations stay with the process, instead of being mapped and zeroed anew in each step.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(2**26),
}


def finished(budget: Budget) -> dict[str, Result]:
    """Name -> result of all runs that are done, each checked to be what the matrix asks for."""
    return {run.name: read(run, budget) for run in chosen(budget, []) if run.out(budget).exists()}


def read(run: Run, budget: Budget) -> Result:
    path = run.out(budget)
    try:
        result = json.loads(path.read_text())
        wrong = unlike(run, result)
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"{path} is not what a recipe's --out writes ({error!r}): move it away"
        ) from None
    if wrong:
        raise SystemExit(
            f"{path} is of another run than the matrix asks for: {'; '.join(wrong)}. Move it away, and it "
            "is run again"
        )
    return result


def unlike(run: Run, result: Result) -> list[str]:
    """In what a result is not of this run. Settings that it lacks had the values that are the defaults now; those that
    only make up the Config may differ where that is the same, as the warm-up may of dense training.
    """
    recipe = RECIPES[run.study.recipe]
    has, asked = (
        report.complete(recipe, settings) for settings in (result["settings"], run.options)
    )
    mine, its = (
        report.settings({**result, "recipe": run.study.recipe, "settings": a}) for a in (asked, has)
    )
    facts = [
        (key, result[key], expected)
        for key, expected in (("recipe", run.study.recipe), ("dataset", run.study.dataset))
    ]
    # Which have nothing pending.
    facts += [
        (key, has.get(key), asked.get(key))
        for key in (has | asked)
        if not (mine == its and key in CONFIG)
        and not (key == "flush" and asked["method"] in ("dense", "naive"))
    ]
    return [
        f"its {key} is {value!r}, asked is {expected!r}"
        for key, value, expected in facts
        if value != expected
    ]


def hours(result: Result) -> float:
    return (
        sum(epoch["step_seconds"] for epoch in result["history"]) * result["steps_per_epoch"] / 3600
    )


def estimate(run: Run, done: Mapping[str, Result], runs: Mapping[str, Run]) -> float | None:
    """Hours of a run, from those done of its method and number of workers, else of its method, else of its study."""
    same = {
        name: hours(result) / runs[name].options["epochs"] * run.options["epochs"]
        for name, result in done.items()
        if runs[name].study == run.study
    }
    for settings in (("method", "virtual_workers"), ("method",), ()):
        like = [
            same[name]
            for name in same
            if all(runs[name].options[key] == run.options[key] for key in settings)
        ]
        if like:
            return sum(like) / len(like)
    return None


def listing(budget: Budget, runs: list[Run], done: Mapping[str, Result], jobs: int) -> Table:
    known = {run.name: run for run in chosen(budget, [])}
    expected = {run.name: estimate(run, done, known) for run in runs if run.name not in done}
    total = sum(value or 0 for value in expected.values())
    unknown = sum(value is None for value in expected.values())
    caption = f"{len(runs) - len(expected)} of {len(runs)} done; "
    if unknown and unknown == len(expected):
        caption += "none like the others has been timed"
    else:
        caption += f"the others take about {total:.1f} hours"
        if (at_a_time := min(jobs, len(expected))) > 1:
            caption += f", {total / at_a_time:.1f} with {at_a_time} at a time"
        caption += f", and {unknown} of which none like it has been timed" if unknown else ""
    out = Table(Column("run", no_wrap=True), "", "hours", box=None, pad_edge=False, caption=caption)
    for run in runs:
        if run.name in done:
            out.add_row(run.name, report.shown(done[run.name]), f"{hours(done[run.name]):.2f}")
        else:
            guess = expected[run.name]
            out.add_row(run.name, "missing", "?" if guess is None else f"~{guess:.2f}")
    return out


@dataclass
class Job:
    run: Run
    process: subprocess.Popen[bytes]
    log: BinaryIO
    start: int  # of this job in its log


def work(
    budget: Budget, runs: list[Run], folders: Mapping[str, str | None], jobs: int
) -> list[str]:
    """Runs them, ``jobs`` at a time, until all are done, have failed, or are held by other such commands.

    Args:
        folders: recipe -> its ``--data``.

    Returns:
        The names of those that failed.
    """
    waiting, active, failed = list(runs), {}, []
    try:
        while True:
            for place in [i for i in range(jobs) if i not in active]:
                if (begun := begin(budget, waiting, folders, place)) is not None:
                    active[place] = begun
            if not active:
                break
            time.sleep(0.2)
            for place in [i for i in active if active[i].process.poll() is not None]:
                ended = active.pop(place)
                if not end(budget, ended):
                    failed.append(ended.run.name)
                print(f"{len(waiting)} wait, {len(active)} run", flush=True)
    finally:
        for left in active.values():
            left.process.kill()
            left.process.wait()
    if waiting:
        print(f"Other commands hold {', '.join(run.name for run in waiting)}", flush=True)
    return failed


def begin(
    budget: Budget, waiting: list[Run], folders: Mapping[str, str | None], place: int
) -> Job | None:
    """Starts the first of those that wait, but for those that another command holds or has finished."""
    budget.work.mkdir(parents=True, exist_ok=True)
    for run in list(waiting):
        log = (budget.work / f"{run.name}.log").open("ab")
        try:
            # Held by the child, too, to which it is the output.
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.close()
            continue
        waiting.remove(run)
        if run.out(budget).exists():
            log.close()
            continue
        start, command = log.tell(), run.command(budget, folders[run.study.recipe])
        log.write(f"\n$ {shlex.join(command)}\n".encode())  # after a bar that was cut off
        log.flush()
        environment = {**MALLOC, **os.environ, "OMP_NUM_THREADS": "1"}
        if devices := gpus():
            environment["CUDA_VISIBLE_DEVICES"] = devices[place % len(devices)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=_end_with(os.getpid()),
        )
        print(f"{run.name} begins: {log.name}", flush=True)
        return Job(run, process, log, start)
    return None


def _end_with(parent: int) -> Any:
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        # PR_SET_PDEATHSIG: the child does not outlive this process, however that ends.
        libc.prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def end(budget: Budget, ended: Job) -> bool:
    """Tells how a job ended. What is done needs no checkpoints."""
    run, status = ended.run, ended.process.returncode
    ended.log.close()
    if status == 0 and run.out(budget).exists():
        shutil.rmtree(budget.work / run.name, ignore_errors=True)
        result = read(run, budget)
        print(
            f"{run.name} is done: {report.shown(result)} after {hours(result):.2f} hours",
            flush=True,
        )
        return True
    with open(ended.log.name, "rb") as log:
        log.seek(ended.start)
        lines = log.read().decode(errors="replace").replace("\r", "\n").splitlines()
    tail = "".join(f"    {line}\n" for line in lines[-20:])
    print(
        f"{run.name} failed with status {status}. The end of {ended.log.name}:\n{tail}",
        end="",
        flush=True,
    )
    return False


def gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may say of each of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def find_folders(runs: list[Run], data: Path | None, text: Path | None) -> dict[str, str | None]:
    """What these runs train on, as their ``--data``, after a look into it."""
    folders: dict[str, str | None] = {"cifar10": "digits", "ptb": None, "transformer": None}
    datasets = {run.study.dataset for run in runs}
    if "cifar10" in datasets:
        folders["cifar10"] = cifar.find_data(data and str(data), cifar.CACHE)
        if cifar.load(folders["cifar10"])[0] != "cifar10":
            raise SystemExit(
                "CIFAR-10 is needed: --data DIR takes a folder with cifar-10-batches-bin. Without it, "
                "--only ptb, or --quick"
            )
    if "ptb" in datasets:
        if text is None:
            raise SystemExit(
                "Penn Treebank is needed: --ptb DIR takes a folder with ptb.{train,valid,test}.txt. "
                "Without it, --only cifar10, or --quick"
            )
        ptb.load(text)
        folders["ptb"] = folders["transformer"] = str(text)
    return folders


def main(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with cifar-10-batches-bin. Default: download CIFAR-10."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--ptb", help="Folder with ptb.{train,valid,test}.txt.")
    ] = None,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu/--cpu",
            help=(
                "ResNet-110 for 164 epochs and 1500 hidden units for 40, or ResNet-20 for 25 and 200 for 8."
            ),
        ),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Digits and Python's documentation, a few steps, to see that all works: the figures mean "
            "nothing. All goes to runs/quick.",
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "A run, all whose name contains this, or a table's: ablation, momentum, workers, "
                "sparsity, warmup, transformer, bytes, exchange, length, values, "
                "local-steps."
            )
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time. Default: one for each GPU, or for each core."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="What is done and what is missing, and no more.")
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Tables and figures, and no more.")
    ] = False,
) -> None:
    """Runs what is missing of the paper's experiments, then draws tables and figures of all that is done."""
    if quick and (gpu or data or text):
        raise typer.BadParameter(
            "--quick must be without --data, --ptb and --gpu, got one of them (it has its own "
            "data and budget)"
        )
    budget = BUDGETS["quick" if quick else "gpu" if gpu else "cpu"]
    runs, done = chosen(budget, only or []), finished(budget)
    jobs = jobs or len(gpus()) or len(os.sched_getaffinity(0))
    if show:
        Console().print(listing(budget, runs, done, jobs))
        return
    failed: list[str] = []
    if not report_only:
        if gpu and not torch.cuda.is_available():
            raise SystemExit(
                "--gpu must be on a machine with a GPU, got one where torch sees none (on any machine: "
                "--cpu, --list and --report-only)"
            )
        for name in done:  # this command may have been killed before it did so
            shutil.rmtree(budget.work / name, ignore_errors=True)
        missing = [run for run in runs if run.name not in done]
        failed = work(budget, missing, find_folders(missing, data, text), jobs)
    draw(budget, finished(budget))
    if failed:
        print(f"{len(failed)} failed: {', '.join(failed)}", flush=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    run_command(main)
