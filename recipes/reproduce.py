"""The paper's experiments: what to run, running what is missing, and the tables and figures of what has been run.

    python recipes/reproduce.py --data DIR --ptb DIR        # all of it; stop it at any moment, and start it again
    python recipes/reproduce.py --list                      # what is done, what is missing, about how long it takes
    python recipes/reproduce.py --report-only               # tables and figures, from the results alone
    python recipes/reproduce.py --quick                     # every kind of run, in a few minutes, for its own sake

Each run is a child process of ``cifar10.py`` or ``ptb.py`` that goes on from its checkpoints, and leaves one JSON. A
run whose JSON is there is done. Several of these commands may work on one folder: a run's log is also its lock.

The rows are those of the authors' talk. On CIFAR-10 the paper does not clip, so there is no row for it. The language
model is trained without momentum, as in the paper, so momentum correction and momentum factor masking change nothing
there: those rows would be other rows once more. Seeds were fixed before anything was run, and none is left out.
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
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import data as cifar
import ptb
import report
import torch
import typer
from report import RECIPES, Result, Row
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Column, Table

HERE = Path(__file__).resolve().parent
MAIN, BETWEEN = ("dense", "naive", "dgc"), ("topk", "momentum", "clipping", "masking")

# Row -> its title, what differs from the study's options, and what the paper gives as the difference to dense training:
# the authors' talk, at 99.9 %; in brackets, the paper's table for ResNet-110 and four workers.
ROWS: dict[str, dict[str, tuple[str, dict[str, Any], str]]] = {
    "cifar10": {
        "dense": ("dense", {"method": "dense"}, ""),
        "naive": ("naive top-k", {"method": "naive"}, "-1.6"),
        "topk": ("+ local accumulation (gradient dropping)", {"method": "topk"}, "(-1.00)"),
        "momentum": ("+ momentum correction", {"method": "dgc", "factor_masking": False, "warmup_epochs": 0.0}, "-0.3"),
        "masking": ("+ momentum factor masking", {"method": "dgc", "warmup_epochs": 0.0}, "-0.1"),
        "dgc": ("+ warm-up (DGC)", {"method": "dgc"}, "+0.37 (+0.12)"),
    },
    "ptb": {  # of perplexity, where less is better; the talk's row of masking, 0.5 worse than dense, is no row here
        "dense": ("dense", {"method": "dense"}, ""),
        "naive": ("naive top-k", {"method": "naive"}, "+3.3"),
        "topk": ("+ local accumulation (gradient dropping)", {"method": "topk"}, ""),
        "clipping": ("+ local clipping", {"method": "dgc", "warmup_epochs": 0.0}, "+2.0"),
        "dgc": ("+ warm-up (DGC)", {"method": "dgc"}, "-0.4"),
    },
}
SOURCE = {"cifar10": "The paper's are of the authors' talk and, in brackets, of its table for ResNet-110.",
          "ptb": "The paper's are of the authors' talk."}
WORKERS = {"dense": "dense", "topk": "gradient dropping", "dgc": "DGC"}  # the methods that are compared by workers
PAPER = {"dense": {4: 93.75, 8: 92.92, 16: 93.14, 32: 93.10},  # of ResNet-110, with these workers
         "topk": {4: 92.75, 8: 93.02, 16: 92.93, 32: 92.10},
         "dgc": {4: 93.87, 8: 93.28, 16: 93.20, 32: 93.18}}
# For glibc: activations stay with the process, instead of being mapped and zeroed anew in each step.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_TOP_PAD_": str(2**26)}
CONFIG = ("sparsity", "warmup_epochs", "selection", *report.PARTS)  # settings of which all is in the Config


@dataclass(frozen=True)
class Study:
    """A recipe with the options that all of its runs have, but where a row or a table says otherwise."""

    recipe: str
    name: str  # with which the files begin
    title: str
    dataset: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Budget:
    """What there is to run, and where it goes."""

    results: Path
    figures: Path
    work: Path  # checkpoints and logs
    cifar10: Study
    ptb: Study
    seeds: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # CIFAR-10's main rows; PTB's; rows between
    lengths: tuple[int, ...]  # in epochs, with warm-ups in proportion
    workers: tuple[int, ...]
    sparsities: tuple[float, ...]
    warmups: tuple[float, ...]  # in epochs
    exchange: Study
    crowds: tuple[int, ...]  # workers, with each exchange
    pair: tuple[int, ...]  # seeds of these


def _options(warmup: float, **options: Any) -> dict[str, Any]:
    return {**options, "virtual_workers": 4, "sparsity": 0.999, "warmup_epochs": warmup, "threads": 1}


def _exchange(dataset: str, **options: Any) -> Study:
    return Study("cifar10", "cifar10-exchange", "ResNet-20", dataset, _options(
        1.0, depth=20, batch_size=128, exchange="allgather", hierarchical=False, virtual_node=1, **options))


_FULL: dict[str, Any] = {"results": HERE / "results", "figures": HERE.parent / "docs",
                         "work": HERE.parent / "runs" / "reproduce", "seeds": ((0, 1, 2), (0, 1), (0, 1)),
                         "workers": (4, 8, 16, 32), "sparsities": (0.99, 0.999, 0.9995, 0.9999),
                         "warmups": (0.0, 1.0, 2.0, 4.0, 8.0), "exchange": _exchange("cifar10", epochs=10),
                         "crowds": (4, 16, 64), "pair": (0, 1)}
BUDGETS = {
    "cpu": Budget(**_FULL, lengths=(5, 25),
                  cifar10=Study("cifar10", "cifar10", "ResNet-20", "cifar10", _options(2.0, depth=20, epochs=25)),
                  ptb=Study("ptb", "ptb", "LSTM of 2 x 200", "ptb", _options(0.2, size="small", epochs=8))),
    "gpu": Budget(**_FULL, lengths=(41, 164),
                  cifar10=Study("cifar10", "cifar10-resnet110", "ResNet-110", "cifar10",
                                _options(4.0, depth=110, epochs=164)),
                  ptb=Study("ptb", "ptb-large", "LSTM of 2 x 1500", "ptb", _options(1.0, size="large", epochs=40))),
    "quick": Budget(
        results=Path("runs/quick/results"), figures=Path("runs/quick"), work=Path("runs/quick"),
        cifar10=Study("cifar10", "cifar10", "ResNet-20", "digits", _options(1.0, depth=20, epochs=2, batch_size=64)),
        ptb=Study("ptb", "ptb", "LSTM of 2 x 200", "pydoc topics", _options(0.2, size="small", epochs=1, bptt=70)),
        seeds=((0, 1), (0, 1), (0, 1)), lengths=(1,), workers=(4, 8), sparsities=(0.99, 0.999), warmups=(0.0, 1.0),
        exchange=_exchange("digits", epochs=1), crowds=(4,), pair=(0,)),
}


# -- what to run -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Run:
    name: str
    study: Study
    options: Mapping[str, Any]  # of the recipe's command line, as its main() names them

    def command(self, budget: Budget, data: str | None) -> list[str]:
        where = {"data": data, "checkpoints": budget.work / self.name, "resume": True, "out": self.out(budget)}
        options = {key: value for key, value in {**self.options, **where}.items() if value is not None}
        words = [sys.executable, str(HERE / f"{self.study.recipe}.py")]
        for key, value in options.items():
            option = key.replace("_", "-")
            words += [f"--{option}" if value else f"--no-{option}"] if isinstance(value, bool) else [
                f"--{option}", str(value)]
        return words

    def out(self, budget: Budget) -> Path:
        return budget.results / f"{self.name}.json"


def run(study: Study, row: str, seed: int, **changed: Any) -> Run:
    """A row's run; what is changed beyond the row is in its name."""
    options = {**study.options, **ROWS[study.recipe][row][1]}
    marks = {"epochs": lambda x: f"epochs{x}", "warmup_epochs": lambda x: f"warmup{x:g}",
             "sparsity": lambda x: f"sparsity{100 * x:.6g}", "factor_masking": lambda _: "nomasking",
             "virtual_workers": lambda x: f"{x}workers", "batch_size": lambda x: f"batch{x}",
             "exchange": str, "hierarchical": lambda _: "hierarchical", "virtual_node": lambda x: f"node{x}"}
    words = [marks[key](value) for key, value in changed.items() if value != options.get(key)]
    return Run("-".join([study.name, row, *words, str(seed)]), study, {**options, **changed, "seed": seed})


def ablation(study: Study, seeds: Mapping[str, tuple[int, ...]]) -> dict[str, dict[int, Run]]:
    """Row -> seed -> run."""
    return {row: {seed: run(study, row, seed) for seed in seeds[row]} for row in ROWS[study.recipe]}


def ablations(budget: Budget) -> dict[str, dict[str, dict[int, Run]]]:
    """Recipe -> row -> seed -> run."""
    first, second, between = budget.seeds
    return {study.recipe: ablation(study, {**dict.fromkeys(BETWEEN, between), **dict.fromkeys(MAIN, seeds)})
            for study, seeds in ((budget.cifar10, first), (budget.ptb, second))}


def by_length(budget: Budget) -> dict[int, dict[str, dict[float, dict[int, Run]]]]:
    """Epochs -> dense, or with momentum factor masking, or without it -> sparsity -> seed -> run."""
    study = budget.cifar10

    def at(epochs: int, sparsity: float, seed: int, **switched: Any) -> Run:
        warmup = study.options["warmup_epochs"] * epochs / study.options["epochs"]
        return run(study, "dgc", seed, epochs=epochs, warmup_epochs=warmup, sparsity=sparsity, **switched)

    seeds, sparsities = budget.seeds[0], (0.9, 0.99, study.options["sparsity"])
    return {n: {"dense": {0.0: {seed: run(study, "dense", seed, epochs=n) for seed in seeds}},
                "masking": {x: {seed: at(n, x, seed) for seed in seeds} for x in sparsities},
                "no masking": {x: {seed: at(n, x, seed, factor_masking=False) for seed in seeds} for x in sparsities}}
            for n in budget.lengths}


def by_workers(budget: Budget) -> dict[str, dict[float, Run]]:
    """Row -> workers, each of batch 32 -> run."""
    return {row: {n: run(budget.cifar10, row, 0, virtual_workers=n) for n in budget.workers} for row in WORKERS}


def warmed(budget: Budget, warmup: float, sparsity: float, seed: int) -> Run:
    """DGC with a warm-up of so many epochs; with none it is the parts' row before the last."""
    if warmup == 0:
        return run(budget.cifar10, "masking", seed, sparsity=sparsity)
    return run(budget.cifar10, "dgc", seed, sparsity=sparsity, warmup_epochs=warmup)


def by_sparsity(budget: Budget) -> dict[float, dict[float, Run]]:
    """Epochs of warm-up -> sparsity -> run."""
    return {warmup: {sparsity: warmed(budget, warmup, sparsity, 0) for sparsity in budget.sparsities}
            for warmup in budget.warmups}


def by_warmup(budget: Budget) -> dict[float, dict[int, Run]]:
    """Epochs of warm-up -> seed -> run, at the usual sparsity."""
    return {warmup: {seed: warmed(budget, warmup, budget.cifar10.options["sparsity"], seed)
                     for seed in budget.seeds[0]} for warmup in budget.warmups}


def by_exchange(budget: Budget) -> dict[str, dict[int, dict[int, Run]]]:
    """Exchange -> workers -> seed -> run. All train with 128 images a step, whatever the number of workers."""
    def at(workers: int, seed: int, **options: Any) -> Run:
        return run(budget.exchange, "dgc", seed, virtual_workers=workers, batch_size=128 // workers, **options)

    shared, denser = {"exchange": "shared"}, {"sparsity": 0.99, "factor_masking": False}

    def machines(workers: int) -> dict[str, Any]:
        return {"hierarchical": True, "virtual_node": 2 if workers == 4 else 4}

    ways: dict[str, Any] = {
        "all-gather": lambda n: {}, "shared": lambda n: shared, "hierarchical": machines,
        "shared, 99.6 %": lambda n: {**shared, "sparsity": 0.996},
        "shared, 99 %, no masking": lambda n: {**shared, **denser},
        "hierarchical shared, 99 %, no masking": lambda n: {**shared, **denser, **machines(n)},
        "all-gather, 99 %, no masking": lambda n: denser}
    return {name: {n: {seed: at(n, seed, **way(n)) for seed in budget.pair} for n in budget.crowds}
            for name, way in ways.items()}


def matrix(budget: Budget) -> dict[str, dict[str, Run]]:
    """Table -> name -> run; in the order of their importance. A run may be in several tables."""
    rows = ablations(budget)
    # The main rows seed by seed, so that what is cut short compares methods.
    main = [{row: rows[recipe][row][seed] for row in MAIN} for recipe in rows for seed in rows[recipe]["dense"]]
    lengths, exchanges = by_length(budget), list(by_exchange(budget).values())
    workers, grid = by_workers(budget), by_sparsity(budget)
    usual = budget.cifar10.options  # of sparsities and warm-ups, first those that differ from DGC's own in one
    cells = sorted((warmup != usual["warmup_epochs"] and sparsity != usual["sparsity"], warmup, sparsity)
                   for warmup in budget.warmups for sparsity in budget.sparsities)
    tables = {"ablation": main + [runs for recipe in rows for row, runs in rows[recipe].items() if row in BETWEEN],
              "length": [{n: at[seed]} for n in budget.lengths for seed in budget.seeds[0]
                         for line in lengths[n].values() for at in line.values()],
              "workers": [{row: workers[row][n] for row in WORKERS} for n in sorted(budget.workers, reverse=True)],
              "sparsity": [{sparsity: grid[warmup][sparsity]} for _, warmup, sparsity in cells],
              "warmup": list(by_warmup(budget).values()),
              "exchange": [{n: line[n][seed]} for seed in budget.pair for n in budget.crowds for line in exchanges]}
    return {table: {run.name: run for runs in lines for run in runs.values()} for table, lines in tables.items()}


def chosen(budget: Budget, only: list[str]) -> list[Run]:
    """The runs of these tables, of these names, and those whose names contain one of these words, where they are no
    run's name; all of them if there are no words.
    """
    tables = matrix(budget)
    runs = {name: run for table in tables.values() for name, run in table.items()}
    names: set[str] = set()
    for word in only:
        found = tables[word] if word in tables else [word] if word in runs else [name for name in runs if word in name]
        if not found:
            raise typer.BadParameter(f"--only {word} is in no run; accepted: {', '.join(tables)}, or a part of a name "
                                     "as --list gives it")
        names.update(found)
    return [run for name, run in runs.items() if not only or name in names]


# -- what is done ------------------------------------------------------------------------------------------------------

def finished(budget: Budget) -> dict[str, Result]:
    """Name -> result of all runs that are done, each checked to be what the matrix asks for."""
    return {run.name: read(run, budget) for run in chosen(budget, []) if run.out(budget).exists()}


def read(run: Run, budget: Budget) -> Result:
    path = run.out(budget)
    try:
        result = json.loads(path.read_text())
        wrong = unlike(run, result)
    except (ValueError, KeyError) as error:
        raise SystemExit(f"{path} is not what a recipe's --out writes ({error!r}): move it away") from None
    if wrong:
        raise SystemExit(f"{path} is of another run than the matrix asks for: {'; '.join(wrong)}. Move it away, and it "
                         "is run again")
    return result


def unlike(run: Run, result: Result) -> list[str]:
    """In what a result is not of this run. Settings that it lacks had the values that are the defaults now; those that
    only make up the Config may differ where that is the same, as the warm-up may of dense training.
    """
    recipe = RECIPES[run.study.recipe]
    has, asked = (report.complete(recipe, settings) for settings in (result["settings"], run.options))
    mine, its = (report.settings({**result, "recipe": run.study.recipe, "settings": a}) for a in (asked, has))
    facts = [(key, result[key], expected) for key, expected in (("recipe", run.study.recipe),
                                                                ("dataset", run.study.dataset))]
    facts += [(key, has.get(key), asked.get(key)) for key in (has | asked) if not (mine == its and key in CONFIG)
              and not (key == "flush" and asked["method"] in ("dense", "naive"))]  # which have nothing pending
    return [f"its {key} is {value!r}, asked is {expected!r}" for key, value, expected in facts if value != expected]


def hours(result: Result) -> float:
    return sum(epoch["step_seconds"] for epoch in result["history"]) * result["steps_per_epoch"] / 3600


def estimate(run: Run, done: Mapping[str, Result], runs: Mapping[str, Run]) -> float | None:
    """Hours of a run, from those done of its method and number of workers, else of its method, else of its study."""
    same = {name: hours(result) / runs[name].options["epochs"] * run.options["epochs"]
            for name, result in done.items() if runs[name].study == run.study}
    for settings in (("method", "virtual_workers"), ("method",), ()):
        like = [same[name] for name in same if all(runs[name].options[key] == run.options[key] for key in settings)]
        if like:
            return sum(like) / len(like)
    return None


def listing(budget: Budget, runs: list[Run], done: Mapping[str, Result], jobs: int) -> Table:
    known = {run.name: run for run in chosen(budget, [])}
    expected = {run.name: estimate(run, done, known) for run in runs if run.name not in done}
    total = sum(value or 0 for value in expected.values())
    unknown = sum(value is None for value in expected.values())
    caption = (f"{len(runs) - len(expected)} of {len(runs)} done; the others take about {total:.1f} hours, "
               f"{total / jobs:.1f} with {jobs} at a time"
               + (f", and {unknown} of which none like it has been timed" if unknown else ""))
    out = Table(Column("run", overflow="fold"), "", "hours", caption=caption)
    for run in runs:
        if run.name in done:
            out.add_row(run.name, report.shown(done[run.name]), f"{hours(done[run.name]):.2f}")
        else:
            guess = expected[run.name]
            out.add_row(run.name, "missing", "?" if guess is None else f"about {guess:.2f}")
    return out


# -- running what is missing -------------------------------------------------------------------------------------------

@dataclass
class Job:
    run: Run
    process: subprocess.Popen[bytes]
    log: BinaryIO
    start: int  # of this job in its log


def work(budget: Budget, runs: list[Run], folders: Mapping[str, str | None], jobs: int) -> list[str]:
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


def begin(budget: Budget, waiting: list[Run], folders: Mapping[str, str | None], place: int) -> Job | None:
    """Starts the first of those that wait, but for those that another command holds or has finished."""
    budget.work.mkdir(parents=True, exist_ok=True)
    for run in list(waiting):
        log = (budget.work / f"{run.name}.log").open("ab")
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by the child, too, to which it is the output
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
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                   env=environment, preexec_fn=_end_with(os.getpid()))
        print(f"{run.name} begins: {log.name}", flush=True)
        return Job(run, process, log, start)
    return None


def _end_with(parent: int) -> Any:
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the child does not outlive this process, however that ends
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
        print(f"{run.name} is done: {report.shown(result)} after {hours(result):.2f} hours", flush=True)
        return True
    with open(ended.log.name, "rb") as log:
        log.seek(ended.start)
        lines = log.read().decode(errors="replace").replace("\r", "\n").splitlines()
    tail = "".join(f"    {line}\n" for line in lines[-20:])
    print(f"{run.name} failed with status {status}. The end of {ended.log.name}:\n{tail}", end="", flush=True)
    return False


def gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may say of each of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def find_folders(runs: list[Run], data: Path | None, text: Path | None) -> dict[str, str | None]:
    """What these runs train on, as their ``--data``, after a look into it."""
    folders: dict[str, str | None] = {"cifar10": "digits", "ptb": None}
    datasets = {run.study.dataset for run in runs}
    if "cifar10" in datasets:
        folders["cifar10"] = cifar.find_data(data and str(data), cifar.CACHE)
        if cifar.load(folders["cifar10"])[0] != "cifar10":
            raise SystemExit("CIFAR-10 is needed: --data DIR takes a folder with cifar-10-batches-bin. Without it, "
                             "--only ptb, or --quick")
    if "ptb" in datasets:
        if text is None:
            raise SystemExit("Penn Treebank is needed: --ptb DIR takes a folder with ptb.{train,valid,test}.txt. "
                             "Without it, --only cifar10, or --quick")
        ptb.load(text)
        folders["ptb"] = str(text)
    return folders


# -- tables and figures ------------------------------------------------------------------------------------------------

def draw(budget: Budget, done: Mapping[str, Result]) -> None:
    """Tables to the screen and to Markdown, figures beside them, of what is done; what is missing is said."""
    for study in (budget.cifar10, budget.ptb):
        rows = [Row(title, {seed: done[run.name] for seed, run in runs.items() if run.name in done}, len(runs), paper)
                for runs, (title, _, paper) in zip(ablations(budget)[study.recipe].values(),
                                                   ROWS[study.recipe].values(), strict=True)]
        if not any(row.results for row in rows):
            print(f"No results of {study.name} yet", flush=True)
            continue
        recipe = RECIPES[study.recipe]
        texts = [f"**The parts.** {conditions(study, rows)}\n\n{report.ablation(recipe, rows)}"]
        report.ablation_picture(recipe, rows, budget.figures / f"{study.name}-ablation.png")
        curves = [done[name] for row in MAIN if (name := run(study, row, 0).name) in done]
        if curves:
            report.picture(curves, budget.figures / f"{study.name}.png")
        if study is budget.cifar10:
            texts += [draw_table(budget, done)
                      for draw_table in (draw_length, draw_workers, draw_sparsity, draw_warmup, draw_exchange)]
        path = budget.results / f"{study.name}.md"
        path.write_text("\n".join(filter(None, texts)))
        Console(width=140).print(Markdown(path.read_text()))
        print(f"{path}, and figures in {budget.figures}/{study.name}*.png", flush=True)


def conditions(study: Study, rows: list[Row]) -> str:
    """In words, from what the results say."""
    results = [result for row in rows for result in row.results.values()]
    made: dict[str, set[str]] = {}
    for machine in (result["machine"] for result in results):
        made.setdefault(f"{machine['device']}, torch {machine['torch']}", set()).add(
            machine.get("dgc", "a commit that was not recorded"))
    return (f"{study.title} on {' and '.join(sorted({result['dataset'] for result in results}))}, "
            f"{study.options['epochs']} epochs, {study.options['virtual_workers']} workers, "
            f"{100 * study.options['sparsity']:.5g} %, warm-up of {study.options['warmup_epochs']:g} epochs; "
            + "; ".join(f"{where}; dgc {' | '.join(sorted(commits))}" for where, commits in sorted(made.items()))
            + f". Differences to dense training are between runs of one seed, their 95 % interval is Student's. "
              f"{SOURCE[study.recipe]}")


def draw_length(budget: Budget, done: Mapping[str, Result]) -> str:
    """The table and the figure, or nothing."""
    runs, recipe = by_length(budget), RECIPES["cifar10"]
    if not adds(budget, [at for lines in runs.values() for line in lines.values() for at in line.values()], done):
        return ""
    panes = {f"{n} epochs": by_seed(lines, done) for n, lines in runs.items()}
    report.differences_picture(recipe, panes, budget.figures / f"{budget.cifar10.name}-length.png")
    seeds = ", ".join(map(str, budget.seeds[0]))
    return (f"**Length, sparsity and momentum factor masking.** Means over seeds {seeds}, learning rates and warm-ups "
            "in proportion; in brackets the difference to dense training. "
            f"{sum(map(count, panes.values()))} of {sum(map(count, runs.values()))} runs.\n\n" + "\n".join(
                report.differences(title, lines, lambda x: f"{100 * x:.5g} %" if x else "", recipe)
                for title, lines in panes.items()))


def by_seed(runs: Mapping[str, Mapping[Any, Mapping[int, Run]]], done: Mapping[str, Result]) -> report.BySeed:
    """Of those that are done, what was measured."""
    return {name: {x: {seed: report.measured(done[run.name]) for seed, run in at.items() if run.name in done}
                   for x, at in line.items()} for name, line in runs.items()}


def count(lines: Mapping[str, Mapping[Any, Mapping[int, Any]]]) -> int:
    return sum(len(at) for line in lines.values() for at in line.values())


def draw_workers(budget: Budget, done: Mapping[str, Result]) -> str:
    """The table and the figure, or nothing."""
    runs = by_workers(budget)
    if not adds(budget, runs.values(), done):
        return ""
    lines = {WORKERS[row]: {n: done.get(run.name) for n, run in line.items()} for row, line in runs.items()}
    paper = {WORKERS[row]: PAPER[row] for row in WORKERS}

    def cell(name: str, workers: float, result: Result | None) -> str:
        return f"{report.shown(result) if result else '-'} ({paper[name][int(workers)]:.2f})"

    report.lines_picture(RECIPES["cifar10"], lines, budget.figures / f"{budget.cifar10.name}-workers.png", "workers",
                         lambda n: n, str)
    return (f"**More workers**, each of batch 32, seed 0; in brackets the paper's, of ResNet-110 and 164 epochs. "
            f"{found(lines)}\n\n{report.grid('workers', lines, str, cell)}")


def draw_sparsity(budget: Budget, done: Mapping[str, Result]) -> str:
    """The table and the figure, or nothing."""
    runs = by_sparsity(budget)
    if not adds(budget, runs.values(), done):
        return ""
    lines = {f"warm-up of {warmup:g}": {sparsity: done.get(run.name) for sparsity, run in line.items()}
             for warmup, line in runs.items()}

    def cell(name: str, sparsity: float, result: Result | None) -> str:
        return f"{report.shown(result)} ({report.times(report.ratios(result)[0])})" if result else "-"

    dense = done.get(run(budget.cifar10, "dense", 0).name)
    report.lines_picture(RECIPES["cifar10"], lines, budget.figures / f"{budget.cifar10.name}-sparsity.png",
                         "entries sent (%)", lambda sparsity: 100 * (1 - sparsity),
                         lambda sparsity: f"{100 * (1 - sparsity):.2g}", dense)
    return (f"**Sparsity and warm-up** in epochs, seed 0; in brackets the compression over all of training. "
            f"{f'Dense: {report.shown(dense)}. ' if dense else ''}{found(lines)}\n\n"
            f"{report.grid('sparsity', lines, lambda sparsity: f'{100 * sparsity:.5g} %', cell)}")


def draw_warmup(budget: Budget, done: Mapping[str, Result]) -> str:
    """The table, or nothing."""
    runs = by_warmup(budget)
    if not adds(budget, runs.values(), done):
        return ""
    lines = {"dense": {seed: run(budget.cifar10, "dense", seed) for seed in budget.seeds[0]},
             **{f"warm-up of {warmup:g}": at for warmup, at in runs.items()}}
    rows = [Row(title, {seed: done[run.name] for seed, run in at.items() if run.name in done}, len(at), "")
            for title, at in lines.items()]
    return (f"**Warm-up** in epochs, at {100 * budget.cifar10.options['sparsity']:.5g} %.\n\n"
            f"{report.ablation(RECIPES['cifar10'], rows)}")


def draw_exchange(budget: Budget, done: Mapping[str, Result]) -> str:
    """The table, or nothing."""
    runs, study = by_exchange(budget), budget.exchange
    lines = by_seed(runs, done)
    if not count(lines):
        return ""
    return (f"**Exchanges.** {study.title}, {study.options['epochs']} epochs, 128 images a step on any number of "
            f"workers, warm-up of {study.options['warmup_epochs']:g}; hierarchical: on machines of 4 workers, of 2 "
            f"where there are 4. Means over seeds {', '.join(map(str, budget.pair))}; in brackets the difference to "
            f"all-gather. {count(lines)} of {count(runs)} runs.\n\n"
            f"{report.differences('', lines, lambda n: f'{n} workers', RECIPES['cifar10'])}")


def adds(budget: Budget, lines: Iterable[Mapping[Any, Run]], done: Mapping[str, Result]) -> bool:
    """Whether a table says more than that of the parts, with which it shares some runs."""
    parts = {run.name for rows in ablations(budget).values() for runs in rows.values() for run in runs.values()}
    return any(run.name in done and run.name not in parts for line in lines for run in line.values())


def found(lines: Mapping[str, Mapping[float, Result | None]]) -> str:
    results = [result for line in lines.values() for result in line.values()]
    return f"{sum(result is not None for result in results)} of {len(results)} runs."


def main(
        data: Annotated[Path | None, typer.Option(
            help="Folder with cifar-10-batches-bin. Default: download CIFAR-10.")] = None,
        text: Annotated[Path | None, typer.Option("--ptb", help="Folder with ptb.{train,valid,test}.txt.")] = None,
        gpu: Annotated[bool, typer.Option("--gpu/--cpu", help=(
            "ResNet-110 for 164 epochs and 1500 hidden units for 40, or ResNet-20 for 25 and 200 for 8."))] = False,
        quick: Annotated[bool, typer.Option(
            "--quick", help="Digits and Python's documentation, a few epochs; all goes to runs/quick.")] = False,
        only: Annotated[list[str] | None, typer.Option(help=(
            "A run, all whose name contains this, or a table's: ablation, length, workers, sparsity, "
            "warmup, exchange."))] = None,
        jobs: Annotated[int | None, typer.Option(
            min=1, help="Runs at a time. Default: one for each GPU, or for each core.")] = None,
        show: Annotated[bool, typer.Option("--list", help="What is done and what is missing, and no more.")] = False,
        report_only: Annotated[bool, typer.Option("--report-only", help="Tables and figures, and no more.")] = False,
        ) -> None:
    """Runs what is missing of the paper's experiments, then draws tables and figures of all that is done."""
    if quick and (gpu or data or text):
        raise typer.BadParameter("--quick has its own data and budget; accepted: without --data, --ptb and --gpu")
    budget = BUDGETS["quick" if quick else "gpu" if gpu else "cpu"]
    runs, done = chosen(budget, only or []), finished(budget)
    jobs = jobs or len(gpus()) or len(os.sched_getaffinity(0))
    if show:
        Console(width=120).print(listing(budget, runs, done, jobs))
        return
    failed: list[str] = []
    if not report_only:
        if gpu and not torch.cuda.is_available():
            raise SystemExit("--gpu: torch sees no GPU; accepted: --cpu, and on any machine --list and --report-only")
        for name in done:  # this command may have been killed before it did so
            shutil.rmtree(budget.work / name, ignore_errors=True)
        missing = [run for run in runs if run.name not in done]
        failed = work(budget, missing, find_folders(missing, data, text), jobs)
    draw(budget, finished(budget))
    if failed:
        print(f"{len(failed)} failed: {', '.join(failed)}", flush=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
