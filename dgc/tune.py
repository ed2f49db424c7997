"""Which schedule, and which clipping: a search over trainings by somebody's own script, or by a Python function.

A script says what it has reached by calling :func:`report` after each epoch, which does nothing where no search runs.
Scripts that are not Python append lines such as ``{"epoch": 1, "metric": 63.5, "bytes": 201234}`` to the file that the
environment variable ``DGC_TUNE_REPORTS`` names: ``bytes`` are those that one worker has sent since training began. The
last report is the trial's result; or, where the command has the placeholder ``{out}``, the JSON object in that file,
with the metric under its name and the bytes as ``bytes_sent``.

Searched are the sparsity at the end (90 to 99.99 %, evenly in the logarithm of what is sent), with no warm-up, one in
four stages or one that falls at every step, a tenth to ten times as long as the paper's share of the training, and a
bound on the gradient's norm or none. Two aims, the metric and the bytes, make a multi-objective study of optuna with
its TPE sampler. The first trial is the paper's own: 99.9 % after four stages over 4 of 164 epochs.

Optuna does not prune where there are two aims, so the rule is ours. A trial is given up when its last two reports are
both worse than the median of those, at the same epochs, of the finished trials whose schedules send no more: three of
them at least. So is one whose metric is not finite. The paper's own trial never is.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dgc.config import Schedule
from dgc.schedule import parse
from dgc.transport import find

REPORTS = "DGC_TUNE_REPORTS"
NAME = "dgc tune"  # of the study in its file
RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
PLACEHOLDERS = ("sparsity", "clip_norm", "epochs", "out", "trial")
PLACEHOLDER = re.compile(r"\{([\w-]+)\}")

PAPER = 4 / 164  # epochs of warm-up, of those of CIFAR-10's training
FORMS = ("none", "stages", "per_step")  # of the warm-up
DENSITY = (1e-4, 1e-1)
LENGTH = (0.1, 10)  # of the warm-up, times the paper's
CLIP = (0.01, 100)  # of the bound, times what it is today, or 1
NO_CLIP = "inf"  # what a command is given where there is to be no bound

STARTUP = 5  # trials at random, before optuna draws conclusions
RIVALS = 3  # at least, to be worse than
FAILURES = 3  # of the first trials: then it is the script
GRACE = 10.0  # seconds from SIGTERM to SIGKILL
POLL = 0.1  # seconds
TAIL = 15  # lines of a failed trial's output
TAIL_BYTES = 8192  # of it, at most

STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}  # as optuna names them

Objective = Callable[["Setting"], "tuple[float, float] | None"]
Heard = Callable[[int, float, float], None]


class Pruned(Exception):  # noqa: N818
    """:func:`report` raises it in a Python function whose trial is given up. Let it pass."""


class Stopped(Exception):  # noqa: N818
    """The search ends before the trial does."""


class NoResultError(RuntimeError):
    """A training that ended well and left no result: so would all others."""


@dataclass(frozen=True)
class Setting:
    """What one trial is to train with."""

    trial: int
    epochs: int
    expression: str  # for dgc.schedule.parse
    clip_norm: float | None  # None: no clipping

    def schedule(self, steps_per_epoch: int) -> Schedule:
        """The expression's, for ``sparsity=`` of :class:`dgc.Config`; ``steps_per_epoch`` are optimizer steps."""
        return parse(self.expression, steps_per_epoch)

    @property
    def line(self) -> str:
        """Python, where ``loader`` has one batch for each optimizer step."""
        sparsity = self.expression.removeprefix("constant:")
        name, colon, arguments = sparsity.partition(":")
        if colon:
            words = [word.replace("=true", "=True") for word in arguments.split(",")]
            sparsity = f"dgc.{name}({', '.join([*words, 'steps_per_epoch=len(loader)'])})"
        clip = "" if self.clip_norm is None else f", clip_norm={self.clip_norm:.10g}"
        return f"dgc.Config(sparsity={sparsity}{clip})"

    @property
    def warmup_epochs(self) -> float | None:
        """How long its warm-up is; None if it has none."""
        found = re.search(r"^warmup:epochs=([^,]+)", self.expression)
        return float(found[1]) if found else None

    @property
    def density(self) -> float:
        """The share of entries that are sent, over the whole of training."""
        steps = 1000  # in an epoch
        schedule = self.schedule(steps)
        return math.fsum(1 - schedule(step) for step in range(self.epochs * steps)) / (self.epochs * steps)


@dataclass(frozen=True)
class Trial:
    """What is known of one. Its bytes are those that one worker sent in all."""

    setting: Setting
    state: str  # complete, pruned, failed
    paper: bool
    metric: float | None
    bytes_sent: float | None
    reports: Mapping[int, float]  # epoch -> metric
    seconds: float
    why: str  # it was pruned, or failed


@dataclass(frozen=True)
class Task:
    """What is the same in all trials of a study."""

    command: tuple[str, ...] | str  # or the name of a function
    metric: str
    maximize: bool
    epochs: int
    clip_norm: float | None  # of the paper's trial, 0 being none; None: it is not searched

    def clipping(self, setting: Setting) -> str:
        """In words; nothing where it is not searched."""
        return "" if self.clip_norm is None else str(setting.clip_norm or "none")

    def fill(self, setting: Setting, out: Path) -> list[str]:
        """The command of one trial."""
        clip = NO_CLIP if setting.clip_norm is None else f"{setting.clip_norm:.10g}"
        values = {"sparsity": setting.expression, "clip_norm": clip, "epochs": self.epochs, "out": out,
                  "trial": setting.trial}
        return [PLACEHOLDER.sub(lambda found: str(values[found[1]]), word) for word in self.command]


@dataclass(frozen=True)
class Result:
    """What a study has found so far."""

    task: Task
    tolerance: float
    trials: tuple[Trial, ...]  # by number, without those that were interrupted
    front: tuple[Trial, ...]  # complete ones of which none is better in one aim and no worse in the other; by bytes
    paper: Trial | None  # the paper's own schedule, where it is complete
    recommended: Trial | None  # the fewest bytes whose metric is no worse than the paper's, less the tolerance

    def line(self, trial: Trial) -> str:
        """To paste: the command, or Python."""
        if isinstance(self.task.command, str):
            return trial.setting.line
        return shlex.join(self.task.fill(trial.setting, Path("result.json")))

    def json(self) -> dict[str, Any]:
        """The same, of plain types; trials by their number."""
        def number(value: float | None) -> float | None:
            return value if value is not None and math.isfinite(value) else None  # JSON has no NaN

        def plain(trial: Trial) -> dict[str, Any]:
            return {**asdict(trial.setting), "config": trial.setting.line, "state": trial.state,
                    "metric": number(trial.metric), "bytes_sent": number(trial.bytes_sent),
                    "reports": {str(epoch): number(metric) for epoch, metric in trial.reports.items()},
                    "seconds": trial.seconds, "why": trial.why}

        best = self.recommended
        return {"task": asdict(self.task), "tolerance": self.tolerance, "trials": [plain(t) for t in self.trials],
                "front": [t.setting.trial for t in self.front], "paper": self.paper and self.paper.setting.trial,
                "recommended": best and {**plain(best), "line": self.line(best)}}


# -- reporting ---------------------------------------------------------------------------------------------------------

_heard: Heard | None = None  # by the search that runs in this process


def report(epoch: int, metric: float, bytes_sent: float) -> None:
    """Says what training has reached; to be called after each epoch. Without a search it does nothing.

    Of several ranks only rank 0 is heard: of Horovod, torch.distributed or :mod:`dgc.lockstep`, where one of them is
    initialised; else by the environment of horovodrun, Open MPI or torchrun.

    Args:
        epoch: from 1.
        metric: what is searched for: an accuracy, a loss.
        bytes_sent: by this worker since training began; ``optimizer.report().total_bytes_sent``.

    Raises:
        Pruned: in a Python function whose trial is given up. A script is ended from outside.
    """
    if (_heard is None and REPORTS not in os.environ) or not _is_first():
        return
    epoch, metric, bytes_sent = int(epoch), float(metric), float(bytes_sent)
    if _heard is not None:
        _heard(epoch, metric, bytes_sent)
    elif REPORTS in os.environ:
        with open(os.environ[REPORTS], "a") as file:
            file.write(json.dumps({"epoch": epoch, "metric": metric, "bytes": bytes_sent}) + "\n")


def _is_first() -> bool:
    """Whether this is rank 0, as what is initialised has it; else as this process was launched."""
    try:
        world = find().world
    except RuntimeError:  # nothing is
        return next((os.environ[name] == "0" for name in RANKS if os.environ.get(name, "").isdecimal()), True)
    return world is None or world.rank == 0


def bad(reports: Mapping[int, float], rivals: Sequence[Mapping[int, float]], maximize: bool) -> bool:
    """Whether a trial is to be given up; see the head of this file.

    Args:
        reports: its own, epoch -> metric.
        rivals: those of finished trials that send no more.
    """
    if not all(math.isfinite(metric) for metric in reports.values()):
        return True
    last = sorted(reports)[-2:]

    def worse(epoch: int) -> bool:
        others = [rival[epoch] for rival in rivals if epoch in rival]
        if len(others) < RIVALS:
            return False
        median = statistics.median(others)
        return reports[epoch] < median if maximize else reports[epoch] > median

    return len(last) == 2 and all(worse(epoch) for epoch in last)


# -- searching ---------------------------------------------------------------------------------------------------------

def search(objective: Objective | Sequence[str], *, epochs: int, maximize: bool, trials: int = 20,
           study: str | Path = "tune.db", metric: str = "metric", clip_norm: float | None = None, jobs: int = 1,
           tolerance: float = 0.0, seed: int = 0) -> Result:
    """Searches until the study has so many trials. Calling it again, after whatever ended it, goes on.

    Trials that were running when it was killed are run again; what is finished is kept and not repeated.

    Args:
        objective: a command with placeholders, as words; ``{sparsity}`` is among them, and ``{clip_norm}``,
            ``{epochs}``, ``{out}`` and ``{trial}`` may be. Or a function of a :class:`Setting` that trains within this
            process and returns the metric and the bytes sent, or None: what it last gave to :func:`report`.
        epochs: that a trial trains for.
        maximize: whether more of the metric is better.
        trials: of the study in all: complete, pruned and failed ones.
        study: the SQLite file. What commands print, write and report goes to a folder beside it.
        metric: what it is called, in ``{out}`` too.
        clip_norm: the bound on the gradient's norm that the script has today, 0 for none: that of the first trial.
            Bounds from a hundredth to a hundred times of it are searched (0.01 to 100 for none). A command has the
            placeholder then; with the placeholder, None is as 0. Without it, clipping stays as the script has it.
        jobs: trials at a time. They share the GPUs, and the cores, if ``OMP_NUM_THREADS`` is not set.
        tolerance: how much worse than the paper's the metric of what is recommended may be.
        seed: of the sampler. With one job, and not stopped, a study can be repeated.

    Raises:
        ImportError: optuna is missing.
        ValueError: an argument outside what is said above, a study of something else, or one that another search has
            open.
        RuntimeError: the first three trials failed, or one left no result. The rest of the study is kept.
    """
    optuna = _optuna()
    task = _task(objective, epochs, maximize, metric, clip_norm)
    for name, value in (("trials", trials), ("jobs", jobs)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; accepted: an integer >= 1")
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance is {tolerance!r}; accepted: a number >= 0")
    if callable(objective) and jobs > 1:
        raise ValueError(f"jobs is {jobs}; accepted for a function, which trains within this process: 1")
    path = Path(study).absolute()
    with _quiet(optuna), _locked(path):
        opened = _open(optuna, path, task, seed)
        _Search(optuna, opened, task, objective, trials, jobs, path).run()
        return _result(_read(opened), task, tolerance)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        if error.name != "optuna":  # it is there, and what it needs is not
            raise
        raise ImportError("dgc.tune needs optuna: pip install optuna", name="optuna") from None
    return optuna


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def _task(objective: Objective | Sequence[str], epochs: int, maximize: bool, metric: str, clip_norm: float | None,
          ) -> Task:
    if not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs is {epochs!r}; accepted: an integer >= 1")
    if clip_norm is not None and not (math.isfinite(clip_norm) and clip_norm >= 0):
        raise ValueError(f"clip_norm is {clip_norm!r}; accepted: a number >= 0, 0 for none today")
    if callable(objective):
        name = f"{getattr(objective, '__module__', '')}.{getattr(objective, '__qualname__', repr(objective))}"
        return Task(name, metric, maximize, epochs, clip_norm)
    if isinstance(objective, str):
        raise ValueError(f"objective is {objective!r}; accepted: a list of words, as of shlex.split, or a function")
    command = tuple(objective)
    found = [name for word in command for name in PLACEHOLDER.findall(word)]
    if unknown := [name for name in found if name not in PLACEHOLDERS]:
        raise ValueError(f"the command has {{{unknown[0]}}}; accepted: {', '.join(f'{{{n}}}' for n in PLACEHOLDERS)}")
    if "sparsity" not in found:
        raise ValueError(f"the command is {shlex.join(command)!r}; accepted: one with {{sparsity}} where it takes a "
                         "schedule's expression")
    if clip_norm is not None and "clip_norm" not in found:
        raise ValueError(f"clip_norm is {clip_norm!r}; accepted: with {{clip_norm}} in the command")
    if shutil.which(command[0]) is None:
        raise ValueError(f"the command is {command[0]!r}, which cannot be run")
    return Task(command, metric, maximize, epochs, (clip_norm or 0.0) if "clip_norm" in found else None)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """For one search at a time: another one would take the trials that this one runs for those of a dead one."""
    import fcntl  # which not every system has; a script that only reports does not need it
    _folder(path).mkdir(parents=True, exist_ok=True)
    with (_folder(path) / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"study is {path}, which another search has open") from None
        except OSError as error:  # Lustre and NFS may have none
            raise ValueError(f"study is {path}, on a file system without locks ({error}); accepted: on another, such "
                             "as a local disk's") from None
        yield


def _folder(path: Path) -> Path:
    return path.with_name(f"{path.name}-trials")


def _open(optuna: Any, path: Path, task: Task, seed: int) -> Any:
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
        raise ValueError(f"study is {path}, which cannot be opened: {str(error).splitlines()[0]}") from None
    if has != asked:
        raise ValueError(f"study is {path}, which is of something else: " + "; ".join(
            f"its {key} is {has[key]!r}, asked is {asked[key]!r}" for key in asked if asked[key] != has[key]))
    # What was drawn before is not drawn again: a resumed study has another seed.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials), n_startup_trials=STARTUP,
                                               multivariate=True, constant_liar=True)
    return study


def _suggest(trial: Any, task: Task) -> Setting:
    """All parameters each time, also those without a meaning beside another one: optuna draws them together."""
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
    return Setting(trial.number, task.epochs, expression, clip)


def _papers(task: Task) -> dict[str, Any]:
    """The parameters of the paper's own schedule, with the clipping that there is today."""
    clip = {"clips": bool(task.clip_norm), "clip_norm": task.clip_norm or 1.0}
    return {"density": 1e-3, "warmup": "stages", "warmup_length": 1.0, **(clip if task.clip_norm is not None else {})}


def _other_clipping(task: Task) -> dict[str, Any]:
    """The paper's own, but clipped if it is not today, and not if it is: few random trials may all be alike in that."""
    return {**_papers(task), "clips": not task.clip_norm}


class _Search:
    """Runs trials. Whatever touches the study or the screen holds the lock."""

    def __init__(self, optuna: Any, study: Any, task: Task, objective: Objective | Sequence[str], trials: int,
                 jobs: int, path: Path):
        from tqdm import tqdm  # comes with optuna
        self.state, self.study, self.task, self.objective = optuna.trial.TrialState, study, task, objective
        self.trials, self.jobs, self.folder = trials, jobs, _folder(path)
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.failed, self.ended_well = 0, False  # in this search
        self.said: dict[int, str] = {}  # number of a trial that runs -> what it last reported
        self.take_up()
        finished = _read(study)
        self.finished = len(finished)
        self.rivals = [(t.setting.density, t.reports) for t in finished if t.state == "complete"]
        self.bar = tqdm(total=self.trials, initial=min(self.finished, self.trials), desc="dgc tune", unit="trial",
                        file=sys.stderr, dynamic_ncols=True, disable=None)  # the bar, where nobody looks at a terminal
        if finished:
            counts = Counter(t.state for t in finished)
            self.tell(f"{path} has {', '.join(f'{n} {state}' for state, n in counts.items())} trials: going on")

    def take_up(self) -> None:
        """Enqueues what a search that was ended left running, and the paper's trial where there is none."""
        trials = self.study.get_trials(deepcopy=False)
        again = {t.user_attrs.get("again") for t in trials}
        for left in trials:
            if left.state == self.state.RUNNING:
                if left.number not in again:  # else that search was ended right here
                    parameters = {**left.system_attrs.get("fixed_params", {}), **left.params}
                    paper = {"paper": True} if "paper" in left.user_attrs else {}
                    self.study.enqueue_trial(parameters, {**paper, "again": left.number})
                self.study.tell(left.number, state=self.state.FAIL)
        if not any(t.user_attrs.get("paper") and t.state in (self.state.WAITING, self.state.COMPLETE)
                   for t in self.study.get_trials(deepcopy=False)):
            self.study.enqueue_trial(_papers(self.task), {"paper": True})
            self.trials = max(self.trials, len(_read(self.study)) + 1)  # without it nothing can be recommended
        if not trials and self.task.clip_norm is not None:
            self.study.enqueue_trial(_other_clipping(self.task))

    def run(self) -> None:
        with self.bar:
            if callable(self.objective):
                self.work(0)
                return
            with ThreadPoolExecutor(self.jobs) as pool, _interrupts() as interrupts:
                workers = [pool.submit(self.work, place) for place in range(self.jobs)]
                try:
                    while wait(workers, timeout=0.5).not_done:
                        with self.lock:
                            self.bar.refresh()
                        if interrupts:
                            raise KeyboardInterrupt
                finally:
                    self.stop.set()
            for worker in workers:
                worker.result()

    def work(self, place: int) -> None:
        """One trial after another, until there are enough."""
        try:
            while not self.stop.is_set():
                with self.lock:
                    if self.finished + len(self.said) >= self.trials:
                        return
                    trial = self.study.ask()
                    setting, paper = _suggest(trial, self.task), "paper" in trial.user_attrs
                    trial.set_user_attr("setting", asdict(setting))
                    self.said[trial.number] = f"{trial.number} begins"
                    self.show()
                    if self.bar.disable:
                        self.tell(f"trial {trial.number} begins: {self.words(setting)}")
                self.one(trial, setting, paper, place)
        except Stopped:
            pass  # the study has it as running: the next search takes it up
        except BaseException:
            self.stop.set()
            raise

    def one(self, trial: Any, setting: Setting, paper: bool, place: int) -> None:
        """A trial from beginning to end, whatever that is."""
        began, density = time.monotonic(), setting.density
        reports: dict[int, float] = {}
        last: list[float] = []

        def heard(epoch: int, metric: float, bytes_sent: float) -> None:
            with self.lock:
                reports[epoch], last[:] = metric, (metric, bytes_sent)
                self.said[trial.number] = f"{trial.number}: epoch {epoch}, {metric:.6g}"
                self.show()
                rivals = [theirs for sent, theirs in self.rivals if sent <= density]
            if not paper and bad(reports, rivals, self.task.maximize):
                raise Pruned(f"{metric:.6g} at epoch {epoch} is worse than the median of those that send no more"
                             if math.isfinite(metric) else f"{metric} at epoch {epoch}")

        values, fatal = None, None
        try:
            found = self.train(setting, place, heard) or last
            if paper and reports and max(reports) != self.task.epochs:
                raise NoResultError(f"the last report is of epoch {max(reports)}, and epochs is {self.task.epochs}; "
                                    "accepted: as many reports as epochs, which the command has as {epochs}")
            values = _checked(found, paper)
            state, why = self.state.COMPLETE, ""
        except Stopped:
            raise
        except Pruned as error:
            state, why = self.state.PRUNED, str(error)
        except NoResultError as error:
            state, why, fatal = self.state.FAIL, str(error), error
        except Exception as error:
            told = str(error) if isinstance(error, _FailedError) else f"\n{_tail(traceback.format_exc())}"
            state, why = self.state.FAIL, told
        with self.lock:
            trial.set_user_attr("end", {"reports": reports, "last": last, "seconds": time.monotonic() - began,
                                        "why": why})
            self.study.tell(trial, values, state)
            self.count(trial.number, setting, state, values, reports, why, fatal is not None)
        if fatal:
            raise fatal from None
        if self.failed >= FAILURES and not self.ended_well:
            raise RuntimeError(f"the first {self.failed} trials failed; what they said is above, and in {self.folder}")

    def count(self, number: int, setting: Setting, state: Any, values: tuple[float, float] | None,
              reports: dict[int, float], why: str, fatal: bool) -> None:
        del self.said[number]
        self.finished += 1
        self.failed += state == self.state.FAIL
        self.ended_well |= state != self.state.FAIL
        if values:
            self.rivals.append((setting.density, reports))
        if fatal:
            return  # the search ends with it
        told = (f"{self.task.metric} {values[0]:.6g}, {values[1]:,.0f} bytes" if values else
                f"given up, {why}" if state == self.state.PRUNED else f"failed, {why}")
        self.tell(f"trial {number}: {self.words(setting)}: {told}")
        self.bar.update()
        self.show()

    def words(self, setting: Setting) -> str:
        clip = self.task.clipping(setting)
        return setting.expression + (f", clip_norm {clip}" if clip else "")

    def show(self) -> None:
        self.bar.set_postfix_str("; ".join(self.said.values()))

    def tell(self, line: str) -> None:
        self.bar.write(line, file=sys.stderr)

    def train(self, setting: Setting, place: int, heard: Heard) -> Any:
        if not callable(self.objective):
            return _run(self.task, setting, self.folder / f"{setting.trial:04}", _share(place, self.jobs), heard,
                        self.stop)
        global _heard
        _heard = heard
        try:
            return self.objective(setting)
        finally:
            _heard = None


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C within it, to be looked at. Raised wherever the main thread happened to be, it could leave a lock taken
    for good, of :func:`wait` or of the bar, for which the trials' threads would then wait.
    """
    pressed: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # it is somebody else's
        yield pressed
        return
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(task: Task, setting: Setting, folder: Path, environment: Mapping[str, str], heard: Heard,
         stop: threading.Event) -> tuple[float, float] | None:
    """The command of a trial, which ends before this does. Its result, where it is to leave one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    out, log, reports = folder / "out.json", folder / "log", folder / "reports.jsonl"
    reports.touch()
    with log.open("wb") as output, reports.open("rb") as lines:
        # In a session of its own: Ctrl-C is for the search, which then closes the pipe, as its death does.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("watch.py")), str(GRACE),
             *task.fill(setting, out)],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, REPORTS: str(reports), **environment})
        try:
            while True:
                status = process.poll()
                for report in _lines(lines, status is not None):
                    heard(*report)
                if status is not None:
                    break
                if stop.wait(POLL):
                    raise Stopped
        finally:
            process.stdin.close()  # type: ignore[union-attr]
            process.wait()
    if status:
        with log.open("rb") as file:  # which may be more than fits into memory
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            end = file.read(TAIL_BYTES).decode(errors="replace")
        raise _FailedError(f"status {status}; the end of {log}:\n{_tail(end)}")
    if any("{out}" in word for word in task.command):
        return _out(out, task.metric)
    if reports.stat().st_size == 0:
        raise NoResultError("the command ended well and reported nothing; accepted: dgc.tune.report(epoch, metric, "
                            "bytes_sent) after each epoch, or {out} in the command, a JSON file that it writes")
    return None


class _FailedError(RuntimeError):
    """A command's status, which no traceback explains."""


def _share(place: int, jobs: int) -> dict[str, str]:
    """Of the machine, for one of so many trials at a time."""
    if jobs == 1:
        return {}
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // jobs))}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[place::jobs] or [devices[place % len(devices)]])
    return environment


def _lines(file: BinaryIO, ended: bool) -> Iterator[tuple[int, float, float]]:
    """Epoch, metric and bytes of what has been added since; the last line when it is whole, or nobody writes on."""
    while line := file.readline():
        if not line.endswith(b"\n") and not ended:
            file.seek(-len(line), os.SEEK_CUR)
            return
        try:
            found = json.loads(line)
            yield int(found["epoch"]), float(found["metric"]), float(found["bytes"])
        except (ValueError, KeyError, TypeError, OverflowError):
            raise NoResultError(f"{file.name} has the line {line.decode(errors='replace').strip()!r}; accepted: "
                                '{"epoch": 1, "metric": 63.5, "bytes": 201234}') from None


def _out(file: Path, metric: str) -> tuple[float, float]:
    try:
        found = json.loads(file.read_bytes())  # in UTF-8, whatever the locale
    except FileNotFoundError:
        raise NoResultError(f"the command ended well and left no {file}, which it had as {{out}}") from None
    except ValueError as error:
        raise NoResultError(f"{file}, which the command had as {{out}}, is no JSON: {error}") from None
    try:
        return float(found[metric]), float(found["bytes_sent"])
    except (ValueError, KeyError, TypeError, OverflowError):
        has = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        raise NoResultError(f"{file}, which the command had as {{out}}, has {has}; accepted: an object with numbers as "
                            f"{metric!r}, which the argument metric names, and as 'bytes_sent'") from None


def _checked(found: Any, paper: bool) -> tuple[float, float]:
    """A trial's metric and bytes."""
    try:
        metric, bytes_sent = map(float, found)
    except (ValueError, TypeError):
        raise NoResultError(f"the function returned {found!r}; accepted: the metric and the bytes, or None after "
                            "dgc.tune.report") from None
    if not (math.isfinite(bytes_sent) and bytes_sent > 0):
        raise NoResultError(f"the bytes sent are {bytes_sent:g}; accepted: a number > 0. One worker alone sends "
                            "nothing: train with several")
    if not math.isfinite(metric):
        raise (_FailedError if paper else Pruned)(f"the metric is {metric}")
    return metric, bytes_sent


def _tail(text: str) -> str:
    lines = text.replace("\r", "\n").rstrip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-TAIL:] or ["(nothing)"])


# -- results -----------------------------------------------------------------------------------------------------------

def _read(study: Any) -> list[Trial]:
    """The finished ones; not what was interrupted, which is run again under another number."""
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


def _result(trials: list[Trial], task: Task, tolerance: float) -> Result:
    sign = 1 if task.maximize else -1
    complete = [(sign * t.metric, t.bytes_sent, t) for t in trials
                if t.state == "complete" and t.metric is not None and t.bytes_sent is not None]
    front = [t for good, sent, t in complete if not any(
        (g >= good and s <= sent) and (g > good or s < sent) for g, s, _ in complete)]
    papers = [(good, t) for good, _, t in complete if t.paper]
    fine = [(sent, -good, t) for good, sent, t in complete if papers and good >= papers[0][0] - tolerance]
    return Result(task, tolerance, tuple(trials), tuple(sorted(front, key=lambda t: (t.bytes_sent, t.setting.trial))),
                  papers[0][1] if papers else None, min(fine, key=lambda f: f[:2])[2] if fine else None)


def draw(result: Result, file: Path) -> None:
    """The metric against the bytes of complete trials: all, the front, the paper's and what is recommended.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, axis = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    complete = [t for t in result.trials if t.state == "complete"]
    for trials, style, label in (
            (complete, {"marker": "o", "linestyle": "", "color": "tab:gray", "alpha": 0.6}, "trials"),
            (result.front, {"marker": "o", "linestyle": "-", "color": "tab:blue"}, "front"),
            ([result.paper], {"marker": "s", "linestyle": "", "color": "black", "markersize": 9, "fillstyle": "none"},
             "the paper's schedule"),
            ([result.recommended], {"marker": "*", "linestyle": "", "color": "tab:orange", "markersize": 15},
             "recommended")):
        known = [t for t in trials if t is not None]
        if known:
            points: Any = zip(*((t.bytes_sent, t.metric) for t in known), strict=True)
            axis.plot(*points, label=label, **style)
    axis.set(xscale="log", xlabel="bytes that one worker sent", ylabel=result.task.metric)
    counts = Counter(t.state for t in result.trials)
    axis.set_title(", ".join(f"{n} {state}" for state, n in counts.items()), fontsize=10)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    if complete:
        axis.legend(frameon=False)
    figure.savefig(file, dpi=130)
    plt.close(figure)
