"""Fills the cache of compiled loops ahead, in a process of its own, so that no training step waits for a compiler.

    python -m dgc.compression.kernels.fill float32

Until it is done the loops run in plain torch operations, which agree with the compiled ones to the bit. So it does not
matter when a process changes over, and ranks need not do so together. One process a folder fills it: it holds a lock
until it ends. No thread compiles, as it would hold numba's locks while a process is forked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dgc.compression.denominator import Denominator
from dgc.compression.kernels import cpu, denominator_cpu, owners_cpu
from dgc.compression.regions import ReducePlan
from dgc.compression.residual import Gradient, Residual
from dgc.compression.wire import Layout, Rows
from dgc.warn import warn

COMPILE_TIMEOUT_S = 600  # seconds, after which a process that fills is ended
POLL_S = 0.2  # seconds between two looks whether it is done


class Filling:
    """The way of one dtype's loops into the cache.

    Args:
        dtype: of the residuals, float32 or float64.
    """

    def __init__(self, dtype: torch.dtype):
        kept = denominator_cpu._follow._cache  # whose digest is of all sources
        self._name, name = str(dtype).removeprefix("torch."), f"dgc.{str(dtype).removeprefix('torch.')}.{kept.digest}"
        self._markers = [folder / f"{name}.compiled" for folder in kept.folders]
        self._lock, self._writable = kept.folders[0] / f"{name}.lock", kept.writable
        self._child: subprocess.Popen[bytes] | None = None
        self._process = os.getpid()  # which may be forked
        self._next_look = 0.0
        self._done = False

    def done(self) -> bool:
        """Whether the compiled loops may be called: they are in the cache, or nobody can put them there. Has them put
        there where nobody does so yet.
        """
        if self._done or time.monotonic() < self._next_look:
            return self._done
        self._next_look = time.monotonic() + POLL_S
        if self._process != os.getpid():
            self._child, self._process = None, os.getpid()
        if self._filled() or not sys.executable:  # which Python lacks within another program
            self._done = True
        elif not self._writable:
            warn("neither the folder of dgc nor the user's cache can be written, so every process compiles the kernels "
                 "for itself, for about a minute; NUMBA_CACHE_DIR may name a folder to keep them in, and `dgc doctor`, "
                 "run by a user who may write there, fills it")
            self._done = True
        elif self._child is None:
            self._begin()
        else:
            self._done = self._child.poll() is not None  # it failed: the loops say why when they are compiled here
        return self._done

    def _filled(self) -> bool:
        return any(marker.exists() for marker in self._markers)

    def wait(self) -> None:
        """Waits until it is done."""
        while not self.done():
            time.sleep(POLL_S)

    def mark(self) -> None:
        """Notes that the cache has all of it."""
        part = self._markers[0].with_suffix(f".{os.getpid()}")
        part.touch()
        part.replace(self._markers[0])

    def _begin(self) -> None:
        """Starts a process that fills, unless one does."""
        try:
            lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError:
            self._done = True
            return
        try:
            if not _locked(lock) or self._filled():  # by who had the lock just now
                return
            # This very package: ``-m`` looks for it in the current folder first, and then where PYTHONPATH says.
            here = str(Path(__file__).resolve().parents[3])
            paths = {name: os.pathsep.join(map(os.path.abspath, os.environ[name].split(os.pathsep)))
                     for name in ("PYTHONPATH", "NUMBA_CACHE_DIR") if os.environ.get(name)}
            self._child = subprocess.Popen(
                [sys.executable, "-m", "dgc.compression.kernels.fill", self._name], pass_fds=(lock,),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=here,
                start_new_session=True, env={**os.environ, **paths, "OMP_NUM_THREADS": "1"})
            os.write(lock, f"{self._child.pid}\n".encode())  # for whoever wonders what it is
        except OSError:
            self._done = True
        finally:
            os.close(lock)  # the process that fills has it too


@cache
def filling(dtype: torch.dtype) -> Filling:
    """The one :class:`Filling` of a dtype in this process."""
    return Filling(dtype)


def _locked(file: int) -> bool:
    """Whether this process has the lock now; True as well where there are no locks."""
    with contextlib.suppress(ImportError):
        import fcntl
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without
            pass
    return True


def run_all(dtype: torch.dtype) -> None:
    """Calls each loop, with what it is called with in training."""
    parameter = torch.zeros(64, 64, dtype=dtype, device="cpu")
    residual, gradients = Residual("fill", {"a": parameter}), {"a": Gradient(torch.ones_like(parameter), 0.9)}
    layout, no = Layout(residual, [40], 16), torch.tensor(False, device="cpu")
    cpu.accumulate(residual, gradients, None, layout)
    _, index, used = cpu.accumulate_and_select(residual, gradients, None, layout, 0)
    message, _ = cpu.encode(residual, layout, index, used, no, True)
    received = cpu.Received(layout, layout.rows, message.expand(2, -1), 2.0)
    received.write([parameter])
    received.add([parameter], [1.0])
    rows = Rows(64, 64, 8, dtype, parameter.device, all_entries=True)
    cpu.decode_all(rows, cpu.encode_all(rows, torch.ones_like(parameter)))
    cpu.decay(parameter, torch.zeros_like(parameter), 0.9, 1e-4, 0.1, False)
    _run_owners(residual, gradients, ReducePlan(layout, 3, 1), parameter)
    one = torch.ones_like(parameter)
    denominator_cpu.follow(one, Denominator(one, one, one.int(), one, 1.0, 0.9, 0.999, 1e-8, 2.0, one[0]), 40, 2)


def _run_owners(residual: Residual, gradients: dict[str, Gradient], plan: ReducePlan, parameter: torch.Tensor) -> None:
    """Those of the exchange that adds up at owners."""
    _, index, used = owners_cpu.accumulate_and_select(residual, gradients, None, plan, 0)
    rows, _ = owners_cpu.send(residual, plan, index, used, torch.tensor(False, device="cpu"), True)
    arrived = owners_cpu.add(residual, plan, rows[1:2].expand(3, -1))
    message, _ = owners_cpu.pass_on(residual, gradients, plan, arrived, 0, True)
    cpu.Received(plan.layout, plan.to_all, message.expand(3, -1), 3.0, plan.regions).write([parameter])


def main() -> None:
    if hasattr(signal, "alarm"):
        signal.alarm(COMPILE_TIMEOUT_S)
    dtype: Any = getattr(torch, sys.argv[1])
    run_all(dtype)
    filling(dtype).mark()


if __name__ == "__main__":
    main()
