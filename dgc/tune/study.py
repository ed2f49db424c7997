"""The search: a study of optuna's in one SQLite file. Optuna keeps it, draws, and runs again what a search left behind.

The answer is what ``dgc tune --json`` prints. Its trials are by number; ``kind`` is "paper", "dense" or "".
"""

from __future__ import annotations

import math
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dgc import drawing
from dgc.config import UNMASKED
from dgc.tune.trial import (
    PLACEHOLDER,
    PLACEHOLDERS,
    FailedError,
    NoResultError,
    Setting,
    fill,
    heard_by,
    run_command,
    share_of_machine,
    tail,
)

PAPER = 4 / 164  # epochs of warm-up, of those of CIFAR-10's training
FORMS = ("none", "stages", "per_step")  # of the warm-up
DENSITY = (1e-4, 1e-1)
LENGTH = (0.1, 10)  # of the warm-up, times the paper's
CLIP = (0.01, 100)  # of the bound, times what it is today, or 1
STARTUP = 5  # trials at random, before optuna draws conclusions
FAILURES = 3  # of the first trials: then it is the script
BEAT_S, SILENCE_S = 10, 60  # between a running trial's signs of life; and without one, until it is run once more

Objective = Callable[[Setting], "tuple[float, float] | None"]


def search(  # noqa: PLR0913 (dgc tune's options)
        objective: Objective | Sequence[str], *, epochs: int, maximize: bool, trials: int = 20,
        study: str | Path = "tune.db", metric: str = "metric", clip_norm: float | None = None, jobs: int = 1,
        tolerance: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """Searches until the study has so many trials. Calling it again, after whatever ended it, goes on.

    Trials that were running when it was killed are run again; what is finished is kept and not repeated. The answer
    has ``trials``, the numbers of those on the ``front`` and of ``paper`` and ``dense``, and ``recommended``.

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
        ValueError: a command without what is said above, several jobs of a function, or a study of something else.
        RuntimeError: the first three trials failed, or one left no result. The rest of the study is kept.
    """
    if callable(objective):
        if jobs > 1:
            raise ValueError(f"jobs must be 1 for a function, which trains within this process, got {jobs}")
        command: Any = f"{objective.__module__}.{getattr(objective, '__qualname__', '')}"
    else:
        command = list(objective)
        clip_norm = checked_clip(command, clip_norm)
    task = {"command": command, "metric": metric, "maximize": maximize, "epochs": epochs, "clip_norm": clip_norm}
    path = Path(study).absolute()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optuna, of what it calls experimental
        opened = open_study(path, task, seed)
        Search(opened, task, objective, jobs, path.with_name(f"{path.name}-trials")).run(trials)
        return answer(opened, task, tolerance)


def checked_clip(command: list[str], clip_norm: float | None) -> float | None:
    """The bound of the first trials, None where clipping is not searched, once the command is in order."""
    found = PLACEHOLDER.findall(" ".join(command))
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
    return (clip_norm or 0.0) if "clip_norm" in found else None


def open_study(path: Path, task: dict[str, Any], seed: int) -> Any:
    """The study of this task in a file."""
    import optuna
    import sqlalchemy  # comes with optuna
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.RDBStorage(
        sqlalchemy.URL.create("sqlite", database=str(path)).render_as_string(),  # where ? and % have no meaning
        {"connect_args": {"timeout": 100}}, heartbeat_interval=BEAT_S, grace_period=SILENCE_S,
        heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback())
    study: Any = optuna.create_study(storage=storage, study_name="dgc tune", load_if_exists=True,
                                     directions=["maximize" if task["maximize"] else "minimize", "minimize"])
    has = study.user_attrs.get("task", task)
    if differ := [key for key in task if has[key] != task[key]]:
        raise ValueError(f"study must be of the same search, got {path}: " + "; ".join(
            f"its {key} is {has[key]!r}, asked is {task[key]!r}" for key in differ)
                         + " (name another file, or delete this one)")
    study.set_user_attr("task", task)
    # What was drawn before is not drawn again: a resumed study has another seed.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials), n_startup_trials=STARTUP,
                                               multivariate=True, constant_liar=True)
    ask, lock = study.ask, threading.Lock()

    def one_at_a_time(*arguments: Any) -> Any:
        with lock:  # from SQLite two threads at once may get the same trial that waits
            return ask(*arguments)

    study.ask = one_at_a_time
    optuna.storages.fail_stale_trials(study)  # once here: two jobs at a time would run one of them twice
    return study


def suggest(trial: Any, task: dict[str, Any]) -> Setting:
    """Draws all parameters each time, also those without a meaning beside another one: optuna draws them together."""
    density = float(f"{trial.suggest_float('density', *DENSITY, log=True):.3g}")
    form = trial.suggest_categorical("warmup", FORMS)
    length = PAPER * task["epochs"] * trial.suggest_float("warmup_length", *LENGTH, log=True)
    clip = None
    if task["clip_norm"] is not None:
        today = task["clip_norm"] or 1.0
        clips = trial.suggest_categorical("clips", (False, True))
        norm = trial.suggest_float("clip_norm", CLIP[0] * today, CLIP[1] * today, log=True)
        if clips:
            clip = norm if norm == today else float(f"{norm:.3g}")
    end = f"{1 - density:.10g}"
    kind = {"stages": ",stages=4", "per_step": ",per_step=true"}.get(form)
    # Not a plain number, after which a script may have a warm-up of its own, as the recipes do.
    expression = f"warmup:epochs={length:.3g},end={end}{kind}" if kind else f"constant:{end}"
    if trial.user_attrs.get("kind") == "dense":
        expression, end = "constant:0", "0"
    told = isinstance(task["command"], str) or any("{factor_masking}" in word for word in task["command"])
    return Setting(trial.number, task["epochs"], expression, clip, float(end) > UNMASKED if told else None)


def finished(study: Any) -> list[dict[str, Any]]:
    """The finished trials; not what was interrupted, which is run again under another number."""
    return [t.user_attrs["end"] for t in study.get_trials(deepcopy=False)
            if t.state.is_finished() and "end" in t.user_attrs]


class Search:
    """Runs trials."""

    def __init__(self, study: Any, task: dict[str, Any], objective: Objective | Sequence[str], jobs: int, folder: Path):
        self.study, self.task, self.objective, self.jobs, self.folder = study, task, objective, jobs, folder
        self.places, self.stop = list(range(jobs)), threading.Event()
        self.failed, self.ended_well = 0, False  # in this search

    def run(self, trials: int) -> None:
        """Until there are so many; and one more, if the paper's is to be run once more."""
        done = finished(self.study)
        if done:
            tell(f"{self.folder} has {len(done)} finished trials: going on")
        others = [t for t in self.study.get_trials(deepcopy=False) if not t.state.is_finished()]
        has = {t["kind"] for t in done if t["state"] == "complete" or t["kind"] == "dense"}
        has |= {t.user_attrs.get("kind") for t in others}
        left = trials - len(done)
        today = self.task["clip_norm"]
        clip = {} if today is None else {"clips": bool(today), "clip_norm": today or 1.0}
        for kind in ("paper", "dense"):  # of dense training only the clipping counts
            if kind not in has:
                self.study.enqueue_trial({"density": 1e-3, "warmup": "stages", "warmup_length": 1.0, **clip},
                                         {"kind": kind})
        if "paper" not in has:
            left = max(left, 1 + len(others))  # else none is recommended
        if left > 0:
            with told_of_interrupts(self.stop, self.objective):
                self.study.optimize(self.one, left, n_jobs=self.jobs, catch=(FailedError,))
        if self.failed >= FAILURES and not self.ended_well:
            raise RuntimeError(f"the first {self.failed} trials failed; what they said is above, and in {self.folder}")

    def one(self, trial: Any) -> list[float]:
        """A trial from beginning to end."""
        setting = suggest(trial, self.task)
        kind = trial.user_attrs.get("kind", "")
        clip = "" if self.task["clip_norm"] is None else f", clip_norm {setting.clip_norm or 'none'}"
        words = f"trial {trial.number}{', ' * bool(kind)}{kind}: {setting.expression}{clip}"
        tell(f"{words}: begins")
        entry = {**asdict(setting), "kind": kind, "config": setting.line, "density": setting.density}
        error: Exception | None = None
        values, reports, began = [], dict[int, float](), time.monotonic()
        try:
            values = self.train(setting, reports)
            self.compare(entry, values[1], reports)
        except KeyboardInterrupt:
            self.study.enqueue_trial(trial.params, {"kind": kind} if kind else None)
            raise
        except (FailedError, NoResultError) as failure:
            error = failure
        except Exception:
            error = FailedError(f"\n{tail(traceback.format_exc())}")
        metric, bytes_sent = (None, None) if error else values
        shown = {str(epoch): x if math.isfinite(x) else None for epoch, x in reports.items()}  # JSON has no NaN
        trial.set_user_attr("end", {
            **entry, "state": "failed" if error else "complete", "metric": metric, "bytes_sent": bytes_sent,
            "reports": shown, "seconds": time.monotonic() - began, "why": str(error or "")})
        if error is None:
            self.ended_well = True
            tell(f"{words}: {self.task['metric']} {values[0]:.6g}, {values[1]:,.0f} bytes")
            if kind == "dense":
                raise FailedError  # to optuna, whose sampler must not learn of what has no such parameters
            return values
        if isinstance(error, NoResultError):
            self.stop.set()  # the others
        else:
            self.failed += 1
            tell(f"{words}: failed, {error}")
            if self.failed >= FAILURES and not self.ended_well:
                self.study.stop()
        raise error

    def train(self, setting: Setting, reports: dict[int, float]) -> list[float]:
        """The metric and the bytes that a trial ends with; of each epoch that it reports, the metric."""
        last: list[float] = []

        def heard(epoch: int, metric: float, bytes_sent: float) -> None:
            reports[epoch], last[:] = metric, (metric, bytes_sent)
            if not math.isfinite(metric):
                raise FailedError(f"the metric is {metric} at epoch {epoch}")

        if callable(self.objective):
            with heard_by(heard):
                found: Any = self.objective(setting) or last
        else:
            place = self.places.pop()
            try:
                found = run_command(self.task, setting, self.folder / f"{setting.trial:04}",
                                    share_of_machine(place, self.jobs), heard, self.stop) or last
            finally:
                self.places.append(place)
        try:
            metric, bytes_sent = map(float, found)
        except (ValueError, TypeError):
            raise NoResultError("the function must return the metric and the bytes, or None after dgc.tune.report, "
                                f"got {found!r}") from None
        if not (math.isfinite(bytes_sent) and bytes_sent > 0):
            raise NoResultError(f"the bytes sent must be a number > 0, got {bytes_sent:g} (one worker alone sends "
                                "nothing: train with several)")
        if not math.isfinite(metric):
            raise FailedError(f"the metric is {metric}")
        return [metric, bytes_sent]

    def compare(self, entry: dict[str, Any], bytes_sent: float, reports: dict[int, float]) -> None:
        """Refuses a trial that is shorter or longer than others, or has sent just as much as one of another density."""
        epochs, density = self.task["epochs"], entry["density"]
        if reports and max(reports) != epochs:
            raise (NoResultError if entry["kind"] == "paper" else FailedError)(
                f"the command must report each of its {epochs} epochs, got {max(reports)} as the last (it has as "
                "{epochs} how many to train)")
        for other in finished(self.study):
            if other["bytes_sent"] == bytes_sent and not 0.5 < density / other["density"] < 2:
                raise NoResultError(f"the schedule must change what is sent, got {bytes_sent:,.0f} bytes where it is "
                                    f"{100 * other['density']:.3g} % of the entries, and where it is "
                                    f"{100 * density:.3g} % (does the script use it? AdamW's first 1,000 steps are "
                                    "dense: give --epochs more)")


@contextmanager
def told_of_interrupts(stop: threading.Event, objective: Objective | Sequence[str]) -> Iterator[None]:
    """Ctrl-C within it sets ``stop``, whereupon all commands end, and each raises KeyboardInterrupt in its own thread.
    With a function, Ctrl-C is raised as ever.
    """
    if callable(objective) or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def answer(study: Any, task: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """The front, what the others are held against, and the fewest bytes whose metric is no worse than the paper's, less
    the tolerance.
    """
    trials = finished(study)
    ended_well = [t for t in trials if t["state"] == "complete"]
    paper, dense = (next((t for t in ended_well if t["kind"] == kind), None) for kind in ("paper", "dense"))
    sign = 1 if task["maximize"] else -1
    fine = [t for t in ended_well if paper and t is not dense
            and sign * t["metric"] >= sign * paper["metric"] - tolerance]
    best = min(fine, key=lambda t: (t["bytes_sent"], -sign * t["metric"]), default=None)
    front = sorted(study.best_trials, key=lambda t: (t.values[1], t.number))
    return {"task": task, "tolerance": tolerance, "trials": trials, "front": [t.number for t in front],
            "paper": paper and paper["trial"], "dense": dense and dense["trial"],
            "recommended": best and {**best, "line": line(task, best)}}


def line(task: dict[str, Any], entry: dict[str, Any]) -> str:
    """The line to paste: the command, or Python."""
    if isinstance(task["command"], str):
        return entry["config"]
    setting = Setting(**{field.name: entry[field.name] for field in fields(Setting)})
    return shlex.join(fill(task["command"], setting, Path("result.json")))


def draw(found: dict[str, Any], file: Path) -> None:
    """The metric against the bytes of complete trials: all, the front, the paper's, the dense one and what is
    recommended.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure, axes = drawing.panels(height=4.6)
    points = {t["trial"]: (t["bytes_sent"], t["metric"]) for t in found["trials"] if t["state"] == "complete"}
    for numbers, style in ((points, {"linestyle": "", "color": drawing.DENSE, "alpha": 0.6}),
                           (found["front"], {"color": drawing.DGC})):
        axes.plot([points[n][0] for n in numbers], [points[n][1] for n in numbers], marker="o", **style)
    sent = [x for x, _ in points.values()]
    axes.set(xlabel="sent by one worker", ylabel=found["task"]["metric"], xscale="log",
             xlim=(min(sent) / 1.5, 1.5 * max(sent)),
             title="a dot is a trial, the line is the front: no trial is better and sends less")
    drawing.byte_axis(axes, "x")
    best = found["recommended"] and found["recommended"]["trial"]
    same = found["paper"] == best
    for number, text, across in ((found["paper"], "the paper's schedule" + ", recommended" * same, "left"),
                                 (None if same else best, "recommended", "left"), (found["dense"], "dense", "right")):
        if number is not None:
            axes.plot(*points[number], "o", color="black", markersize=11, fillstyle="none")
            axes.annotate(text, points[number], (6 if across == "left" else -6, -18), ha=across,
                          textcoords="offset points")
    drawing.save(figure, file)
