"""Runs a command, and ends all that it started when whoever started this goes away or lets go of its standard input.

    python -I -S supervise.py SECONDS COMMAND...

The status is the command's. SECONDS pass between SIGTERM to its process group and SIGKILL to what is left.
:mod:`dgc.tune.command` runs this file by its path: as a module of the package it would import torch first of all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

ADOPT = 36  # PR_SET_CHILD_SUBREAPER


def main() -> None:
    seconds, command = float(sys.argv[1]), sys.argv[2:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # only the command's end ends it; the command does not inherit this
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0)  # of launchers that died: their workers, in groups of their own
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=end_with_parent, args=(child.pid, seconds), daemon=True).start()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # while it is not reaped, its group's number is no other's
    with suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()
    while left := children():
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(-1, 0)
    sys.exit(status if status >= 0 else 128 - status)


def end_with_parent(group: int, seconds: float) -> None:
    while os.read(0, 1):
        pass
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(OSError):
            os.killpg(group, number)
        time.sleep(seconds)


def children() -> list[int]:
    """The children of this process, adopted ones included; on Linux alone."""
    with suppress(OSError):
        return [int(pid) for thread in Path("/proc/self/task").iterdir()
                for pid in (thread / "children").read_text().split()]
    return []


if __name__ == "__main__":
    main()
