"""The study: optuna's, in one SQLite file."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dgc.config import UNMASKED
from dgc.tune.trial import Setting, Task, Trial

NAME = "dgc tune"  # of the study in its file
PAPER = 4 / 164  # epochs of warm-up, of those of CIFAR-10's training
FORMS = ("none", "stages", "per_step")  # of the warm-up
DENSITY = (1e-4, 1e-1)
LENGTH = (0.1, 10)  # of the warm-up, times the paper's
CLIP = (0.01, 100)  # of the bound, times what it is today, or 1
STARTUP = 5  # trials at random, before optuna draws conclusions
STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}  # as optuna names them


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        if error.name != "optuna":  # it is there, and what it needs is not
            raise
        raise ImportError("dgc.tune needs optuna: pip install optuna", name="optuna") from None
    return optuna


@contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lets one search at a time have the study: another would take the trials that this one runs for a dead one's."""
    import fcntl  # which not every system has; a script that only reports does not need it
    folder_of(path).mkdir(parents=True, exist_ok=True)
    with (folder_of(path) / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"study must be open here alone, got {path}, which another search has open") from None
        except OSError as error:  # Lustre and NFS may have none
            raise ValueError(f"study must be on a file system with locks, such as a local disk's, got {path} "
                             f"({error})") from None
        yield


def folder_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-trials")


def open_study(optuna: Any, path: Path, task: Task, seed: int) -> Any:
    """The study of this task in a file; one of another task makes room for it if no trial of it came to a good end."""
    asked, aims = json.loads(json.dumps(asdict(task))), ["maximize" if task.maximize else "minimize", "minimize"]
    import sqlalchemy  # comes with optuna
    url = sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string()  # where ? and % have no meaning
    try:
        storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 100}})
        study = optuna.create_study(storage=storage, study_name=NAME, load_if_exists=True, directions=aims)
        has = study.user_attrs.get("task")
        if has != asked and not any(t.state.name in ("COMPLETE", "PRUNED") for t in study.trials):
            optuna.delete_study(storage=storage, study_name=NAME)
            study = optuna.create_study(storage=storage, study_name=NAME, directions=aims)
            study.set_user_attr("task", has := asked)
    except Exception as error:  # whatever SQLAlchemy meets in what is no database, or another program's
        raise ValueError(f"study must be a file of dgc tune, got {path}, which cannot be opened: "
                         f"{str(error).splitlines()[0]}") from None
    if has != asked:
        raise ValueError(f"study must be of the same search, got {path}: " + "; ".join(
            f"its {key} is {has[key]!r}, asked is {asked[key]!r}" for key in asked if asked[key] != has[key]))
    # What was drawn before is not drawn again: a resumed study has another seed.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials), n_startup_trials=STARTUP,
                                               multivariate=True, constant_liar=True)
    return study


def suggest(trial: Any, task: Task) -> Setting:
    """Draws all parameters each time, also those without a meaning beside another one: optuna draws them together."""
    density = float(f"{trial.suggest_float('density', *DENSITY, log=True):.3g}")
    form = trial.suggest_categorical("warmup", FORMS)
    length = PAPER * task.epochs * trial.suggest_float("warmup_length", *LENGTH, log=True)
    clip = None
    if task.clip_norm is not None:
        clips = trial.suggest_categorical("clips", (False, True))
        today = task.clip_norm or 1.0
        norm = trial.suggest_float("clip_norm", CLIP[0] * today, CLIP[1] * today, log=True)
        rounded = norm if norm == today else float(f"{norm:.3g}")
        clip = rounded if clips else None
    end = f"{1 - density:.10g}"
    kind = {"none": "", "stages": ",stages=4", "per_step": ",per_step=true"}[form]
    # Not a plain number, after which a script may have a warm-up of its own, as the recipes do.
    expression = f"constant:{end}" if form == "none" else f"warmup:epochs={length:.3g},end={end}{kind}"
    return Setting(trial.number, task.epochs, expression, clip, float(end) > UNMASKED if task.masks else None)


def papers_parameters(task: Task) -> dict[str, Any]:
    """The parameters of the paper's own schedule, with the clipping that there is today."""
    clip = {"clips": bool(task.clip_norm), "clip_norm": task.clip_norm or 1.0}
    return {"density": 1e-3, "warmup": "stages", "warmup_length": 1.0, **(clip if task.clip_norm is not None else {})}


def other_clipping(task: Task) -> dict[str, Any]:
    """The paper's own, but clipped if it is not today, and not if it is: few random trials may all be alike in that."""
    return {**papers_parameters(task), "clips": not task.clip_norm}


def finished_trials(study: Any) -> list[Trial]:
    """The finished trials; not what was interrupted, which is run again under another number."""
    found, trials = [], study.get_trials(deepcopy=False)
    again = {t.user_attrs.get("again") for t in trials}  # of them, some may have an "end" that was not told in time
    for t in trials:
        has = t.user_attrs
        if t.state.is_finished() and "end" in has and t.number not in again:
            end = has["end"]
            metric, bytes_sent = t.values or end["last"] or (None, None)
            found.append(Trial(Setting(**has["setting"]), STATES[t.state.name], "paper" in has, metric, bytes_sent,
                               {int(epoch): value for epoch, value in end["reports"].items()}, end["seconds"],
                               end["why"]))
    return found
