"""The search: a study of optuna's, which keeps it in one SQLite file, runs trials at a time, and runs those once more
that a search left behind.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dgc.config import UNMASKED
from dgc.tune.command import run_command, share_of_machine, tail
from dgc.tune.reporting import hearing
from dgc.tune.result import Result, result_of
from dgc.tune.trial import PLACEHOLDER, PLACEHOLDERS, FailedError, NoResultError, Objective, Setting, Task, Trial

NAME = "dgc tune"  # of the study in its file
PAPER = 4 / 164  # epochs of warm-up, of those of CIFAR-10's training
FORMS = ("none", "stages", "per_step")  # of the warm-up
DENSITY = (1e-4, 1e-1)
LENGTH = (0.1, 10)  # of the warm-up, times the paper's
CLIP = (0.01, 100)  # of the bound, times what it is today, or 1
STARTUP = 5  # trials at random, before optuna draws conclusions
FAILURES = 3  # of the first trials: then it is the script
BEAT, SILENCE = 10, 60  # seconds between a running trial's signs of life; and without one, until it is run once more


def search(  # noqa: PLR0913 (dgc tune's options)
        objective: Objective | Sequence[str], *, epochs: int, maximize: bool, trials: int = 20,
        study: str | Path = "tune.db", metric: str = "metric", clip_norm: float | None = None, jobs: int = 1,
        tolerance: float = 0.0, seed: int = 0) -> Result:
    """Searches until the study has so many trials. Calling it again, after whatever ended it, goes on.

    Trials that were running when it was killed are run again; what is finished is kept and not repeated.

    Args:
        objective: a command with placeholders, as words; ``{sparsity}`` is among them, and ``{clip_norm}``,
            ``{factor_masking}``, ``{epochs}``, ``{out}`` and ``{trial}`` may be. Or a function of a :class:`Setting`
            that trains within this process and returns the metric and the bytes sent, or None: what it last gave to
            :func:`report`.
        epochs: that a trial trains for.
        maximize: whether more of the metric is better.
        trials: of the study in all: complete and failed ones.
        study: the SQLite file. What commands print, write and report goes to a folder beside it.
        metric: what it is called, in ``{out}`` too.
        clip_norm: the bound on the gradient's norm that the script has today, 0 for none: that of the first trials.
            Bounds from a hundredth to a hundred times of it are searched (0.01 to 100 for none). A command has the
            placeholder then; with the placeholder, None is as 0. Without it, clipping stays as the script has it.
        jobs: trials at a time. They share the GPUs, and the cores, if ``OMP_NUM_THREADS`` is not set.
        tolerance: how much worse than the paper's the metric of what is recommended may be.
        seed: of the sampler. With one job, and not stopped, a study can be repeated.

    Raises:
        ImportError: optuna is missing.
        ValueError: an argument outside what is said above, or a study of something else.
        RuntimeError: the first three trials failed, or one left no result. The rest of the study is kept.
    """
    optuna = import_optuna()
    task = task_of(objective, epochs, maximize, metric, clip_norm)
    for name, value in (("trials", trials), ("jobs", jobs)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be a number >= 0, got {tolerance!r}")
    if callable(objective) and jobs > 1:
        raise ValueError(f"jobs must be 1 for a function, which trains within this process, got {jobs}")
    path = Path(study).absolute()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        opened = open_study(optuna, path, task, seed)
        optuna.storages.fail_stale_trials(opened)  # once here: two jobs at a time would run one of them twice
        Search(opened, task, objective, jobs, path.with_name(f"{path.name}-trials")).run(trials)
        return result_of(finished_trials(opened), task, tolerance)


def task_of(objective: Objective | Sequence[str], epochs: int, maximize: bool, metric: str,
            clip_norm: float | None) -> Task:
    if not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs must be an integer >= 1, got {epochs!r}")
    if clip_norm is not None and not (math.isfinite(clip_norm) and clip_norm >= 0):
        raise ValueError(f"clip_norm must be a number >= 0, 0 for none today, got {clip_norm!r}")
    if callable(objective):
        name = f"{getattr(objective, '__module__', '')}.{getattr(objective, '__qualname__', repr(objective))}"
        return Task(name, metric, maximize, epochs, clip_norm)
    if isinstance(objective, str):
        raise ValueError(f"objective must be a list of words, as of shlex.split, or a function, got {objective!r}")
    command = tuple(objective)
    found = [name for word in command for name in PLACEHOLDER.findall(word)]
    if unknown := [name for name in found if name not in PLACEHOLDERS]:
        raise ValueError(f"the command must have none but {', '.join(f'{{{n}}}' for n in PLACEHOLDERS)} in braces, "
                         f"got {{{unknown[0]}}}")
    if "sparsity" not in found:
        raise ValueError("the command must have {sparsity} where it takes a schedule's expression, "
                         f"got {shlex.join(command)!r}")
    if clip_norm is not None and "clip_norm" not in found:
        raise ValueError(f"clip_norm must be None where the command has no {{clip_norm}}, got {clip_norm!r}")
    if shutil.which(command[0]) is None:
        raise ValueError(f"the command must be one that can be run, got {command[0]!r}")
    return Task(command, metric, maximize, epochs, (clip_norm or 0.0) if "clip_norm" in found else None)


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        if error.name != "optuna":  # it is there, and what it needs is not
            raise
        raise ImportError("dgc.tune needs optuna: pip install optuna", name="optuna") from None
    return optuna


def open_study(optuna: Any, path: Path, task: Task, seed: int) -> Any:
    """The study of this task in a file."""
    import sqlalchemy  # comes with optuna
    url = sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string()  # where ? and % have no meaning
    asked, aims = json.loads(json.dumps(asdict(task))), ["maximize" if task.maximize else "minimize", "minimize"]
    try:
        storage = optuna.storages.RDBStorage(
            url, {"connect_args": {"timeout": 100}}, heartbeat_interval=BEAT, grace_period=SILENCE,
            heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback())
        study = optuna.create_study(storage=storage, study_name=NAME, load_if_exists=True, directions=aims)
        has = study.user_attrs.get("task", asked)
    except Exception as error:  # whatever SQLAlchemy meets in what is no database, or another program's
        raise ValueError(f"study must be a file of dgc tune, got {path}, which cannot be opened: "
                         f"{str(error).splitlines()[0]}") from None
    if has != asked:
        raise ValueError(f"study must be of the same search, got {path}: " + "; ".join(
            f"its {key} is {has[key]!r}, asked is {asked[key]!r}" for key in asked if asked[key] != has[key])
                         + " (name another file, or delete this one)")
    study.set_user_attr("task", asked)
    ask, lock = study.ask, threading.Lock()

    def one_at_a_time(*arguments: Any) -> Any:
        with lock:  # from SQLite two threads at once may get the same trial that waits
            return ask(*arguments)

    study.ask = one_at_a_time
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
    if trial.user_attrs.get("kind") == "dense":
        expression, end = "constant:0", "0"
    return Setting(trial.number, task.epochs, expression, clip, float(end) > UNMASKED if task.masks else None)


def finished_trials(study: Any) -> list[Trial]:
    """The finished trials; not what was interrupted, which is run again under another number."""
    found = []
    for t in study.get_trials(deepcopy=False):
        has, kind = t.user_attrs, t.user_attrs.get("kind", "")
        end = has.get("end", {"why": "", "values": None})
        # Of dense training the sampler must not learn, as it has no such parameters: to optuna that trial has failed.
        values = t.values or (end["values"] if kind == "dense" else None)
        if t.state.is_finished() and (values or end["why"]):
            metric, bytes_sent = values or (None, None)
            found.append(Trial(Setting(**has["setting"]), "failed" if end["why"] else "complete", kind, metric,
                               bytes_sent, {int(epoch): value for epoch, value in end["reports"].items()},
                               t.duration.total_seconds(), end["why"]))
    return found


class Search:
    """Runs trials."""

    def __init__(self, study: Any, task: Task, objective: Objective | Sequence[str], jobs: int, folder: Path):
        self.study, self.task, self.objective, self.jobs, self.folder = study, task, objective, jobs, folder
        self.places, self.stop = list(range(jobs)), threading.Event()
        self.failed, self.ended_well = 0, False  # in this search

    def run(self, trials: int) -> None:
        """Until there are so many; and one more, if the paper's is to be run once more."""
        finished = finished_trials(self.study)
        trials -= len(finished)
        if finished:
            tell(f"{self.folder} has {len(finished)} finished trials: going on")
        has = {t.kind for t in finished if t.state == "complete" or t.kind == "dense"}
        others = [t for t in self.study.get_trials(deepcopy=False) if not t.state.is_finished()]
        has |= {t.user_attrs.get("kind") for t in others}
        clip = {} if self.task.clip_norm is None else {
            "clips": bool(self.task.clip_norm), "clip_norm": self.task.clip_norm or 1.0}
        for kind in ("paper", "dense"):  # of dense training only the clipping counts
            if kind not in has:
                parameters = {"density": 1e-3, "warmup": "stages", "warmup_length": 1.0, **clip}
                self.study.enqueue_trial(parameters, {"kind": kind})
                trials = max(trials, 1 + len(others) if kind == "paper" else 0)  # else none is recommended
        if trials > 0:
            with interrupts_told(self.stop, callable(self.objective)):
                self.study.optimize(self.one, trials, n_jobs=self.jobs, catch=(FailedError,))
        if self.failed >= FAILURES and not self.ended_well:
            raise RuntimeError(f"the first {self.failed} trials failed; what they said is above, and in {self.folder}")

    def one(self, trial: Any) -> tuple[float, float]:
        """A trial from beginning to end."""
        setting, kind, reports = suggest(trial, self.task), trial.user_attrs.get("kind"), dict[int, float]()
        trial.set_user_attr("setting", asdict(setting))
        words = f"trial {trial.number}{f', {kind}' if kind else ''}: {self.words(setting)}"
        tell(f"{words}: begins")
        values, error = None, None
        try:
            values = self.train(setting, reports)
            self.compare(values, setting, reports, kind)
        except KeyboardInterrupt:
            self.study.enqueue_trial(trial.params, {"kind": kind} if kind else None)
            raise
        except (FailedError, NoResultError) as failure:
            error = failure
        except Exception:
            error = FailedError(f"\n{tail(traceback.format_exc())}")
        trial.set_user_attr("end", {"reports": reports, "values": values, "why": str(error or "")})
        if error is None and values is not None:
            self.ended_well = True
            tell(f"{words}: {self.task.metric} {values[0]:.6g}, {values[1]:,.0f} bytes")
            if kind != "dense":
                return values
        elif isinstance(error, NoResultError):
            self.stop.set()  # the others
        else:
            self.failed += 1
            tell(f"{words}: failed, {error}")
            if self.failed >= FAILURES and not self.ended_well:
                self.study.stop()
        raise error or FailedError

    def train(self, setting: Setting, reports: dict[int, float]) -> tuple[float, float]:
        """The metric and the bytes that a trial ends with; of each epoch that it reports, the metric."""
        last: list[float] = []

        def heard(epoch: int, metric: float, bytes_sent: float) -> None:
            reports[epoch], last[:] = metric, (metric, bytes_sent)
            if not math.isfinite(metric):
                raise FailedError(f"the metric is {metric} at epoch {epoch}")

        if callable(self.objective):
            with hearing(heard):
                return checked(self.objective(setting) or last)
        place = self.places.pop()
        try:
            return checked(run_command(self.task, setting, self.folder / f"{setting.trial:04}",
                                       share_of_machine(place, self.jobs), heard, self.stop) or last)
        finally:
            self.places.append(place)

    def compare(self, values: tuple[float, float], setting: Setting, reports: dict[int, float], kind: str) -> None:
        """Refuses a trial that is shorter or longer than others, or has sent just as much as one of another density.

        Raises:
            FailedError, NoResultError: it is.
        """
        if reports and max(reports) != self.task.epochs:
            raise (NoResultError if kind == "paper" else FailedError)(
                f"the command must report each of its {self.task.epochs} epochs, got {max(reports)} as the last (it "
                "has as {epochs} how many to train)")
        density = setting.density
        for other in finished_trials(self.study):
            if other.bytes_sent == values[1] and not 0.5 < density / other.setting.density < 2:
                raise NoResultError(f"the schedule must change what is sent, got {values[1]:,.0f} bytes where it is "
                                    f"{100 * other.setting.density:.3g} % of the entries, and where it is "
                                    f"{100 * density:.3g} % (does the script use it? AdamW's first 1,000 steps are "
                                    "dense: give --epochs more)")

    def words(self, setting: Setting) -> str:
        clip = self.task.clipping(setting)
        return setting.expression + (f", clip_norm {clip}" if clip else "")


@contextmanager
def interrupts_told(stop: threading.Event, raised: bool) -> Iterator[None]:
    """Ctrl-C within it sets ``stop``, whereupon all commands end, and each raises KeyboardInterrupt in its own thread;
    or it is raised as ever.
    """
    if raised or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def checked(found: Any) -> tuple[float, float]:
    """A trial's metric and bytes."""
    try:
        metric, bytes_sent = map(float, found)
    except (ValueError, TypeError):
        raise NoResultError("the function must return the metric and the bytes, or None after dgc.tune.report, "
                            f"got {found!r}") from None
    if not (math.isfinite(bytes_sent) and bytes_sent > 0):
        raise NoResultError(f"the bytes sent must be a number > 0, got {bytes_sent:g} (one worker alone sends nothing: "
                            "train with several)")
    if not math.isfinite(metric):
        raise FailedError(f"the metric is {metric}")
    return metric, bytes_sent
