"""The search: a study that optuna keeps in a folder, and trials that run as processes.

The answer is what ``dgc tune --json`` prints. ``kind`` of a trial is "paper", "dense" or "drawn".
"""

from __future__ import annotations

import fcntl
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
from optuna import Study, Trial
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import TrialState

from dgc import drawing
from dgc.config import UNMASKED
from dgc.tune.trial import PLACEHOLDER, Entry, fill, result, share_of_machine, start
from dgc.user_code import end

PLACEHOLDERS = {"sparsity", "clip_norm", "factor_masking", "local_steps", "epochs", "out", "trial"}
PAPER = 4 / 164  # epochs of warm-up, of those of CIFAR-10's training
FORMS = ("none", "stages=4", "per_step=true")  # of the warm-up
DENSITY = (1e-4, 1e-1)
LENGTH = (0.1, 10)  # of the warm-up, times the paper's
CLIP = (0.01, 100)  # of the bound, times what it is today, or 1
MOST_STEPS = 32  # of a worker's own between two exchanges
NO_CLIP = "inf"  # what a command is given where there is to be no bound
STARTUP = 5  # trials at random, before optuna draws conclusions
NAMED = ("paper", "dense", "recommended")  # trials, in the answer
POLL_S = 0.1

Task = dict[str, Any]  # command, metric, maximize, epochs, clip_norm


def search(task: Task, folder: Path, trials: int, jobs: int, tolerance: float) -> dict[str, Any]:
    """Searches until the study has so many trials. Calling it again, after whatever ended it, goes
    on.

    Trials that were running when it ended are run again. Finished trials are kept.

    Args:
        task: ``command``, words with placeholders; ``epochs`` of a trial; the name of the
            ``metric``; ``maximize``; and ``clip_norm``, the bound that the script has today, 0 for
            none, or None where clipping is not searched.
        folder: of the study, and of what commands print and report.
        trials: of the study in all, complete and failed ones. The paper's and the dense one always
            run.
        jobs: trials at a time.
        tolerance: how much worse than the paper's the metric of what is recommended may be.

    Returns:
        The ``trials``; the numbers of those on the ``front``, and of ``paper``, ``dense`` and
        ``recommended``; and the ``line`` of the last.

    Raises:
        ValueError: a command without what is said above, or a study of something else.
        RuntimeError: the paper's trial failed, or sent as much as dense training.
    """
    found = set(PLACEHOLDER.findall(" ".join(task["command"])))
    if not {"sparsity"} <= found <= PLACEHOLDERS or ("clip_norm" in found) != (
        task["clip_norm"] is not None
    ):
        raise ValueError(
            "the command must have {sparsity}, also {clip_norm} where --clip-norm is given, and no other "
            f"placeholders than {', '.join(sorted(PLACEHOLDERS))}, got {shlex.join(task['command'])}"
        )
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "study.journal").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"study must be searched by one process at a time, got {folder}"
            ) from None
        study = open_study(file.name, task)
        run(study, task, folder, trials, jobs)
        return answer(study, task, tolerance)


def open_study(file: str, task: Task) -> Study:
    """The study of this task in a file, in which the trials that must run wait."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(file)),
        study_name="dgc tune",
        load_if_exists=True,
        directions=["maximize" if task["maximize"] else "minimize", "minimize"],
    )
    has = study.user_attrs.get("task", task)
    if has != task:
        raise ValueError(
            f"study must be of the same search, {task}, got {file} of {has} (name another folder, or "
            "delete this one)"
        )
    study.set_user_attr("task", task)
    # Another seed when it is resumed, so that it does not draw again what it drew before.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials), n_startup_trials=STARTUP)

    first = {
        "density": 1e-3,
        "warmup": "stages=4",
        "warmup_length": 1.0,
        "clips": bool(task["clip_norm"]),
        "clip_norm": task["clip_norm"] or 1.0,
    }
    if not study.trials:
        study.enqueue_trial(first, {"kind": "paper"})
        study.enqueue_trial(first, {"kind": "dense"})
    for trial in study.get_trials(states=[TrialState.RUNNING]):  # of a search that was stopped
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(first if trial.user_attrs else trial.params, trial.user_attrs)
    return study


def suggest(trial: Trial, task: Task, folder: Path) -> Entry:
    """The settings of a trial."""
    density = trial.suggest_float("density", *DENSITY, log=True)
    form = trial.suggest_categorical("warmup", FORMS)
    length = PAPER * task["epochs"] * trial.suggest_float("warmup_length", *LENGTH, log=True)
    bound = NO_CLIP
    if task["clip_norm"] is not None:
        today = task["clip_norm"] or 1.0
        norm = trial.suggest_float("clip_norm", CLIP[0] * today, CLIP[1] * today, log=True)
        if trial.suggest_categorical("clips", (False, True)):
            bound = f"{norm:.4g}"

    kind = trial.user_attrs.get("kind", "drawn")
    end = 0.0 if kind == "dense" else 1 - density
    sparsity = f"warmup:epochs={length:.3g},end={end:.6g},{form}"
    if form == "none" or kind == "dense":
        # Not a plain number, after which a script may have a warm-up of its own, as the recipes do.
        sparsity = f"constant:{end:.6g}"
    steps = 0
    if kind == "drawn" and "{local_steps}" in " ".join(task["command"]):
        count = trial.suggest_int("local_steps", 2, MOST_STEPS, log=True)
        if trial.suggest_categorical("takes_local_steps", (False, True)):
            # All entries travel in a round, in the value_bits that the script has, and it clips itself.
            steps, end, sparsity, bound = count, 1.0, "constant:0", NO_CLIP
    home = folder / f"{trial.number:04}"
    return {
        "trial": trial.number,
        "kind": kind,
        "sparsity": sparsity,
        "epochs": task["epochs"],
        "clip_norm": bound,
        "local_steps": steps,
        "factor_masking": "--factor-masking" if end > UNMASKED else "--no-factor-masking",
        "folder": str(home),
        "out": str(home / "out.json"),
    }


def run(study: Study, task: Task, folder: Path, trials: int, jobs: int) -> None:
    """Runs trials until there are so many and none waits. Whatever ends this ends those that run."""
    left = max(trials - len(finished(study)), len(study.get_trials(states=[TrialState.WAITING])))
    running: dict[int, tuple[Trial, Entry, subprocess.Popen[bytes]]] = {}
    try:
        while left or running:
            for place in range(jobs):
                if left and place not in running:
                    left -= 1
                    trial = study.ask()
                    entry = suggest(trial, task, folder)
                    command = fill(task["command"], entry)
                    say(entry, shlex.join(command))
                    running[place] = (
                        trial,
                        entry,
                        start(command, entry["folder"], share_of_machine(place, jobs)),
                    )

            time.sleep(POLL_S)
            for place, (trial, entry, process) in list(running.items()):
                if process.poll() is not None:
                    end(process)
                    keep(
                        study,
                        trial,
                        entry | result(entry["folder"], task["epochs"], process.returncode),
                    )
                    del running[place]
    finally:
        for _, _, process in running.values():
            end(process)


def keep(study: Study, trial: Trial, entry: Entry) -> None:
    """Keeps the settings and the result of a trial that has ended.

    Raises:
        RuntimeError: the paper's trial failed, so it is the script; or it sent as much as the dense
            one.
    """
    failed = "why" in entry
    say(
        entry,
        f"failed, {entry['why']}"
        if failed
        else f"{entry['metric']:.6g}, {entry['bytes_sent']:,.0f} bytes",
    )
    if failed and entry["kind"] == "paper":
        raise RuntimeError(
            "the trial of the paper's schedule failed, and it is what others are compared with (the "
            "same line again repeats it)"
        )
    trial.set_user_attr("entry", entry)
    if failed:
        study.tell(trial, state=TrialState.FAIL)
    else:
        study.tell(trial, (entry["metric"], entry["bytes_sent"]))

    sent = {each["kind"]: each.get("bytes_sent") for each in finished(study)}
    if sent.get("paper", 0) == sent.get("dense"):
        raise RuntimeError(
            f"the schedule must change what is sent, got {sent['dense']:,.0f} bytes with the paper's "
            "and with dense training (does the script use {sparsity}? AdamW's first 1,000 steps are "
            "dense: give --epochs more)"
        )


def say(entry: Entry, text: str) -> None:
    print(f"trial {entry['trial']} ({entry['kind']}): {text}", file=sys.stderr, flush=True)


def finished(study: Study) -> list[Entry]:
    """The settings and results of finished trials."""
    return [
        trial.user_attrs["entry"]
        for trial in study.get_trials(deepcopy=False)
        if "entry" in trial.user_attrs
    ]


def answer(study: Study, task: Task, tolerance: float) -> dict[str, Any]:
    """The front, and the fewest bytes whose metric is no worse than the paper's, less the
    tolerance.
    """
    trials = finished(study)
    complete = [each for each in trials if "why" not in each]
    named = {each["kind"]: each for each in complete}
    sign = 1 if task["maximize"] else -1
    least = sign * named["paper"]["metric"] - tolerance
    best = min(
        (each for each in complete if sign * each["metric"] >= least),
        key=lambda each: each["bytes_sent"],
    )
    front = sorted(study.best_trials, key=lambda trial: trial.values[1])
    return {
        "task": task,
        "trials": trials,
        "front": [trial.number for trial in front],
        "paper": named["paper"]["trial"],
        "dense": named["dense"]["trial"] if "dense" in named else None,
        "recommended": best["trial"],
        "line": shlex.join(fill(task["command"], best)),
    }


def draw(found: dict[str, Any], file: Path) -> None:
    """The metric against the bytes of complete trials, their front, and the names of those that the
    answer names.
    """
    figure, axes = drawing.panels(height=4.6)
    points = {
        each["trial"]: (each["bytes_sent"], each["metric"])
        for each in found["trials"]
        if "why" not in each
    }
    for numbers, line, colour in ((points, "", drawing.DENSE), (found["front"], "-", drawing.DGC)):
        axes.plot(
            [points[n][0] for n in numbers],
            [points[n][1] for n in numbers],
            linestyle=line,
            marker="o",
            color=colour,
        )
    axes.set(
        xlabel="sent by one worker",
        ylabel=found["task"]["metric"],
        xscale="log",
        title="a dot is a trial, the line is the front: no trial is better and sends less",
    )
    drawing.byte_axis(axes, "x")
    for number in {found[name] for name in NAMED} - {None}:
        text = ", ".join(name for name in NAMED if found[name] == number)
        axes.annotate(text, points[number], (6, -18), textcoords="offset points")
    drawing.save(figure, file)
