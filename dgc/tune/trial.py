"""One trial: its command, its processes and its result."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dgc.tune import REPORTS

PLACEHOLDER = re.compile(r"\{([\w-]+)\}")
TAIL_BYTES = 8192  # of the output of a trial that failed

# Of a trial: what each placeholder becomes, its folder, and in the end its result.
Entry = dict[str, Any]


def fill(command: list[str], entry: Entry) -> list[str]:
    """A trial's command, with its placeholders replaced."""
    return [PLACEHOLDER.sub(lambda found: str(entry[found[1]]), word) for word in command]


def start(command: list[str], folder: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts a trial's command in a process group of its own. Its folder gets what it prints and
    reports.
    """
    os.mkdir(folder)
    with open(f"{folder}/log", "wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **environment, REPORTS: f"{folder}/reports.jsonl"},
        )


def share_of_machine(place: int, jobs: int) -> dict[str, str]:
    """The environment that gives one of ``jobs`` trials at a time its GPUs and cores."""
    if jobs == 1:
        return {}
    threads = str(max(1, torch.get_num_threads() // jobs))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
        map(str, range(torch.cuda.device_count()))
    )
    devices = visible.split(",")
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        "CUDA_VISIBLE_DEVICES": ",".join(devices[place % len(devices) :: jobs]),
    }


def result(folder: str, epochs: int, status: int) -> Entry:
    """``metric`` and ``bytes_sent`` of a command that has ended; or ``why`` it failed."""
    if status:
        log = Path(folder, "log")
        text = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        return {"why": f"status {status}; the end of {log}:\n{text}"}

    reports = Path(folder, "reports.jsonl")
    last = reports.read_text(errors="replace").splitlines()[-1:] if reports.exists() else []
    with suppress(ValueError, LookupError, TypeError):
        found = json.loads(last[0])
        metric, bytes_sent = float(found["metric"]), float(found["bytes"])
        if found["epoch"] == epochs and math.isfinite(metric) and 0 < bytes_sent < math.inf:
            return {"metric": metric, "bytes_sent": bytes_sent}
    return {
        "why": f"its last report must be of epoch {epochs}, with a finite metric and bytes > 0, got {last} (call "
        "dgc.tune.report(epoch, metric, bytes_sent) after each epoch; one worker alone sends nothing)"
    }
