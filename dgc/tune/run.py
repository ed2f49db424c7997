"""The search: trials at a time, until the study has enough."""

from __future__ import annotations

import math
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dgc.tune.command import run_command, share_of_machine, tail
from dgc.tune.reporting import hearing
from dgc.tune.result import Result, result_of
from dgc.tune.study import (
    finished_trials,
    folder_of,
    import_optuna,
    locked,
    open_study,
    other_clipping,
    papers_parameters,
    quiet,
    suggest,
)
from dgc.tune.trial import (
    PLACEHOLDER,
    PLACEHOLDERS,
    FailedError,
    Heard,
    NoResultError,
    Objective,
    Pruned,
    Setting,
    Stopped,
    Task,
    is_hopeless,
)

FAILURES = 3  # of the first trials: then it is the script


def search(objective: Objective | Sequence[str], *, epochs: int, maximize: bool, trials: int = 20,
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
    with quiet(optuna), locked(path):
        if not path.exists() and any(folder_of(path).glob("[0-9]*")):
            raise ValueError(f"study must be there or have no trials, got none at {path}, and {folder_of(path)} with "
                             "another's trials (move or delete that folder)")
        opened = open_study(optuna, path, task, seed)
        Search(optuna, opened, task, objective, trials, jobs, path).run()
        return result_of(finished_trials(opened), task, tolerance)


def task_of(objective: Objective | Sequence[str], epochs: int, maximize: bool, metric: str, clip_norm: float | None,
          ) -> Task:
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


class Search:
    """Runs trials. Whatever touches the study or the screen holds the lock."""

    def __init__(self, optuna: Any, study: Any, task: Task, objective: Objective | Sequence[str], trials: int,
                 jobs: int, path: Path):
        from tqdm import tqdm  # comes with optuna
        self.state, self.study, self.task, self.objective = optuna.trial.TrialState, study, task, objective
        self.trials, self.jobs, self.folder = trials, jobs, folder_of(path)
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.failed, self.ended_well = 0, False  # in this search
        self.said: dict[int, str] = {}  # number of a trial that runs -> what it last reported
        self.take_up()
        finished = finished_trials(study)
        self.finished = len(finished)
        self.rivals = [(t.setting.density, t.reports, t.bytes_sent) for t in finished if t.state == "complete"]
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
            self.study.enqueue_trial(papers_parameters(self.task), {"paper": True})
            self.trials = max(self.trials, len(finished_trials(self.study)) + 1)  # else none is recommended
        if not trials and self.task.clip_norm is not None:
            self.study.enqueue_trial(other_clipping(self.task))

    def run(self) -> None:
        with self.bar:
            if callable(self.objective):
                self.work(0)
                return
            with ThreadPoolExecutor(self.jobs) as pool, interrupts_seen() as interrupts:
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
                    setting, paper = suggest(trial, self.task), "paper" in trial.user_attrs
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
                rivals = [theirs for sent, theirs, _ in self.rivals if sent <= density]
            if not paper and is_hopeless(reports, rivals, self.task):
                raise Pruned(f"{metric:.6g} at epoch {epoch} is worse than the median of those that send no more"
                             if math.isfinite(metric) else f"{metric} at epoch {epoch}")

        values, fatal = None, None
        try:
            found = self.train(setting, place, heard) or last
            values = self.comparable(checked(found, paper), density, reports, paper)
            state, why = self.state.COMPLETE, ""
        except Stopped:
            raise
        except Pruned as error:
            state, why = self.state.PRUNED, str(error)
        except NoResultError as error:
            state, why, fatal = self.state.FAIL, str(error), error
        except Exception as error:
            told = str(error) if isinstance(error, FailedError) else f"\n{tail(traceback.format_exc())}"
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

    def comparable(self, values: tuple[float, float], density: float, reports: dict[int, float],
                   paper: bool) -> tuple[float, float]:
        """The metric and bytes of a trial.

        Raises:
            FailedError, NoResultError: it is shorter or longer than others, or has sent just as much as one of another
                density.
        """
        if reports and max(reports) != self.task.epochs:
            raise (NoResultError if paper else FailedError)(
                f"the command must report each of its {self.task.epochs} epochs, got {max(reports)} as the last (it "
                "has as {epochs} how many to train)")
        with self.lock:
            rivals = list(self.rivals)
        for other, _, sent in rivals:
            if sent == values[1] and not 0.5 < density / other < 2:
                raise NoResultError(f"the schedule must change what is sent, got {sent:,.0f} bytes where it is "
                                    f"{100 * other:.3g} % of the entries, and where it is {100 * density:.3g} % (does "
                                    "the script use it? AdamW's first 1,000 steps are dense: give --epochs more)")
        return values

    def count(self, number: int, setting: Setting, state: Any, values: tuple[float, float] | None,
              reports: dict[int, float], why: str, fatal: bool) -> None:
        del self.said[number]
        self.finished += 1
        self.failed += state == self.state.FAIL
        self.ended_well |= state != self.state.FAIL
        if values:
            self.rivals.append((setting.density, reports, values[1]))
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
            return run_command(self.task, setting, self.folder / f"{setting.trial:04}",
                               share_of_machine(place, self.jobs), heard, self.stop)
        with hearing(heard):
            return self.objective(setting)


@contextmanager
def interrupts_seen() -> Iterator[list[int]]:
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


def checked(found: Any, paper: bool) -> tuple[float, float]:
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
        raise (FailedError if paper else Pruned)(f"the metric is {metric}")
    return metric, bytes_sent
