"""The command of one trial: run, listened to, and ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dgc.tune.reporting import REPORTS
from dgc.tune.trial import FailedError, Heard, NoResultError, Setting, Task

GRACE = 10.0  # seconds from SIGTERM to SIGKILL
POLL = 0.1  # seconds
TAIL = 15  # lines of a failed trial's output
TAIL_BYTES = 8192  # of it, at most
# What torchrun says begins so.
TORCHRUN = re.compile(r"^.*torch.distributed.elastic.*(failed \(exitcode|Sending process)", re.MULTILINE)


def run_command(task: Task, setting: Setting, folder: Path, environment: Mapping[str, str], heard: Heard,
                stop: threading.Event) -> tuple[float, float] | None:
    """The command of a trial, which ends before this does. Its result, where it is to leave one.

    Raises:
        KeyboardInterrupt: it was to stop before.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    out, log, reports = folder / "out.json", folder / "log", folder / "reports.jsonl"
    reports.touch()
    with log.open("wb") as output, reports.open("rb") as lines:
        process = subprocess.Popen(  # in a session of its own: Ctrl-C is for the search
            task.fill(setting, out), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, env={**os.environ, REPORTS: str(reports), **environment})
        try:
            status = None
            while status is None:
                if stop.wait(POLL):
                    raise KeyboardInterrupt
                status = process.poll()
                for report in new_reports(lines, status is not None):
                    heard(*report)
        finally:
            end(process)
    if status:
        with log.open("rb") as file:  # which may be more than fits into memory
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            told = tail(file.read(TAIL_BYTES).decode(errors="replace"))
        raise FailedError(f"status {status if status > 0 else 128 - status}; the end of {log}:\n{told}")
    if any("{out}" in word for word in task.command):
        return result_file(out, task.metric)
    if reports.stat().st_size == 0:
        raise NoResultError("the command must report its results, got none though it ended well (call "
                            "dgc.tune.report(epoch, metric, bytes_sent) after each epoch, or have {out} in the "
                            "command, a JSON file that it writes)")
    return None


def end(process: subprocess.Popen[Any]) -> None:
    """Ends all of a trial's process group, also what a command that has ended left there."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(OSError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


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
        try:
            found = json.loads(line)
            yield int(found["epoch"]), float(found["metric"]), float(found["bytes"])
        except (ValueError, KeyError, TypeError, OverflowError):
            raise NoResultError(f'{file.name} must have lines such as {{"epoch": 1, "metric": 63.5, "bytes": '
                                f"201234}}, got {line.decode(errors='replace').strip()!r}") from None


def result_file(file: Path, metric: str) -> tuple[float, float]:
    try:
        found = json.loads(file.read_bytes())  # in UTF-8, whatever the locale
        return float(found[metric]), float(found["bytes_sent"])
    except FileNotFoundError:
        raise NoResultError(f"the command ended well and left no {file}, which it had as {{out}}") from None
    except json.JSONDecodeError as error:
        raise NoResultError(f"{file}, which the command had as {{out}}, is no JSON: {error}") from None
    except (ValueError, KeyError, TypeError, OverflowError):
        has = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        raise NoResultError(f"{file}, which the command had as {{out}}, must be an object with numbers as {metric!r}, "
                            f"which the argument metric names, and as 'bytes_sent', got {has}") from None


def tail(text: str) -> str:
    """The last lines, without those that torchrun adds below: it repeats its own stack and not the error."""
    launcher = TORCHRUN.search(text)
    if launcher and text[:launcher.start()].strip():
        text = text[:launcher.start()]
    lines = text.replace("\r", "\n").rstrip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-TAIL:] or ["(nothing)"])
