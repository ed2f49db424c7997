"""One trial: its setting, its command, and what the command reports."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dgc.config import Schedule
from dgc.schedule import parse
from dgc.transport import find

REPORTS = "DGC_TUNE_REPORTS"  # the environment variable that names a trial's file of reports
RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK")
PLACEHOLDERS = ("sparsity", "clip_norm", "factor_masking", "epochs", "out", "trial")
PLACEHOLDER = re.compile(r"\{([\w-]+)\}")
NO_CLIP = "inf"  # what a command is given where there is to be no bound
GRACE_S = 10.0  # from SIGTERM to SIGKILL
POLL_S = 0.1
TAIL_LINES = 15  # of a failed trial's output
TAIL_BYTES = 8192  # of it, at most
# What torchrun says begins so.
TORCHRUN = re.compile(r"^.*torch.distributed.elastic.*(failed \(exitcode|Sending process)", re.MULTILINE)

Heard = Callable[[int, float, float], None]  # epoch, metric, bytes

listener: Heard | None = None  # of a search over a function, which reports within this process


class NoResultError(RuntimeError):
    """A training that ended well and left no result: so would all others."""


class FailedError(RuntimeError):
    """A failure of one trial, which no traceback explains."""


@dataclass(frozen=True)
class Setting:
    """The settings of one trial."""

    trial: int
    epochs: int
    expression: str  # for dgc.schedule.parse
    clip_norm: float | None  # None: no clipping
    factor_masking: bool | None = None  # which follows from the sparsity at the end; None: as the script has it

    def schedule(self, steps_per_epoch: int) -> Schedule:
        """The expression's, for ``sparsity=`` of :class:`dgc.Config`; ``steps_per_epoch`` are optimizer steps."""
        return parse(self.expression, steps_per_epoch)

    @property
    def line(self) -> str:
        """Python, where ``loader`` has one batch for each optimizer step."""
        sparsity = self.expression.removeprefix("constant:")
        name, colon, arguments = sparsity.partition(":")
        if colon:
            words = arguments.replace("=true", "=True").split(",")
            sparsity = f"dgc.{name}({', '.join([*words, 'steps_per_epoch=len(loader)'])})"
        clip = "" if self.clip_norm is None else f", clip_norm={self.clip_norm:.10g}"
        masking = ", factor_masking=False" if self.factor_masking is False else ""
        return f"dgc.Config(sparsity={sparsity}{masking}{clip})"

    @property
    def density(self) -> float:
        """The share of entries that are sent, over the whole of training."""
        steps = 1000  # in an epoch
        schedule = self.schedule(steps)
        return math.fsum(1 - schedule(step) for step in range(self.epochs * steps)) / (self.epochs * steps)


def report(epoch: int, metric: float, bytes_sent: float) -> None:
    """Says what training has reached; to be called after each epoch. Without a search it does nothing.

    Of several ranks only rank 0 is heard: of Horovod, torch.distributed or :mod:`dgc.lockstep`, where one of them is
    initialised; else by the environment of horovodrun, Open MPI or torchrun.

    Args:
        epoch: from 1.
        metric: what is searched for: an accuracy, a loss.
        bytes_sent: by this worker since training began; ``optimizer.report().total_bytes_sent``.
    """
    if (listener is None and REPORTS not in os.environ) or not _is_first():
        return
    epoch, metric, bytes_sent = int(epoch), float(metric), float(bytes_sent)
    if listener is not None:
        listener(epoch, metric, bytes_sent)
    else:
        with open(os.environ[REPORTS], "a") as file:
            file.write(json.dumps({"epoch": epoch, "metric": metric, "bytes": bytes_sent}) + "\n")


@contextmanager
def heard_by(heard: Heard) -> Iterator[None]:
    """Passes on what is reported in this process."""
    global listener
    listener = heard
    try:
        yield
    finally:
        listener = None


def _is_first() -> bool:
    """Whether this is rank 0, as what is initialised has it; else as this process was launched."""
    try:
        world = find().world
    except RuntimeError:  # nothing is
        return next((os.environ[name] == "0" for name in RANKS if os.environ.get(name, "").isdecimal()), True)
    return world is None or world.rank == 0


def fill(command: Sequence[str], setting: Setting, out: Path) -> list[str]:
    """The command of one trial."""
    values = {**asdict(setting), "sparsity": setting.expression, "out": out}
    values["clip_norm"] = NO_CLIP if setting.clip_norm is None else f"{setting.clip_norm:.10g}"
    values["factor_masking"] = "--factor-masking" if setting.factor_masking else "--no-factor-masking"
    return [PLACEHOLDER.sub(lambda found: str(values[found[1]]), word) for word in command]


def run_command(task: Mapping[str, Any], setting: Setting, folder: Path, environment: Mapping[str, str], heard: Heard,
                stop: threading.Event) -> list[float]:
    """Runs a trial's command to its end. Gives the metric and bytes that it has left in ``{out}``, if it has that.

    Raises:
        KeyboardInterrupt: it was to stop before.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    out, log, reports = folder / "out.json", folder / "log", folder / "reports.jsonl"
    reports.touch()
    with log.open("wb") as output, reports.open("rb") as lines:
        process = subprocess.Popen(  # in a session of its own: Ctrl-C is for the search
            fill(task["command"], setting, out), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, env={**os.environ, REPORTS: str(reports), **environment})
        try:
            status = None
            while status is None:
                if stop.wait(POLL_S):
                    raise KeyboardInterrupt
                status = process.poll()
                for found in new_reports(lines, status is not None):
                    heard(*found)
        finally:
            end(process)
    if status:
        with log.open("rb") as file:  # which may be more than fits into memory
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            told = tail(file.read(TAIL_BYTES).decode(errors="replace"))
        raise FailedError(f"status {status if status > 0 else 128 - status}; the end of {log}:\n{told}")
    if any("{out}" in word for word in task["command"]):
        return numbers(out.read_bytes() if out.exists() else b"", f"{out}, which the command had as {{out}},",
                       task["metric"], "bytes_sent")
    if reports.stat().st_size == 0:
        raise NoResultError("the command must report its results, got none though it ended well (call "
                            "dgc.tune.report(epoch, metric, bytes_sent) after each epoch, or have {out} in the "
                            "command, a JSON file that it writes)")
    return []


def end(process: subprocess.Popen[Any]) -> None:
    """Ends all of a trial's process group, also what a command that has ended left there."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(OSError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def share_of_machine(place: int, jobs: int) -> dict[str, str]:
    """The environment that gives one of so many trials at a time its share of the machine."""
    if jobs == 1:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // jobs))}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[place::jobs] or [devices[place % len(devices)]])
    return environment


def new_reports(file: BinaryIO, ended: bool) -> Iterator[tuple[int, float, float]]:
    """Epoch, metric and bytes of what has been added since; the last line when it is whole, or nobody writes on."""
    while line := file.readline():
        if not line.endswith(b"\n") and not ended:
            file.seek(-len(line), os.SEEK_CUR)
            return
        epoch, metric, bytes_sent = numbers(line, file.name, "epoch", "metric", "bytes")
        yield int(epoch), metric, bytes_sent


def numbers(text: bytes, where: str, *names: str) -> list[float]:
    """The numbers of these names in a JSON object, which is in UTF-8 whatever the locale."""
    try:
        found = json.loads(text)
        return [float(found[name]) for name in names]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise NoResultError(f"{where} must have a JSON object with the numbers {', '.join(names)}, got "
                            f"{text.decode(errors='replace').strip()[:200]!r} ({type(error).__name__}: {error})"
                            ) from None


def tail(text: str) -> str:
    """The last lines, without those that torchrun adds below: it repeats its own stack and not the error."""
    launcher = TORCHRUN.search(text)
    if launcher and text[:launcher.start()].strip():
        text = text[:launcher.start()]
    lines = text.replace("\r", "\n").rstrip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:] or ["(nothing)"])
