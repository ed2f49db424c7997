"""The self-test: packages and builds, the kernels that will run, and a few steps between two local
processes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dgc.compression import kernels
from dgc.config import Config
from dgc.frontends.broadcast import broadcast_parameters
from dgc.frontends.optimizer import DistributedOptimizer
from dgc.transport import find, lockstep
from dgc.user_code import end
from dgc.version import __version__

SELF_TEST_TIMEOUT_S = 300.0  # the first one compiles for a minute or two, where numba is installed
CYCLE = (
    5  # milliseconds between two looks of Horovod for work; docs/migrating.md has what it changes
)
STEPS = 3
PACKAGES = {
    "numba": "compression on CPUs becomes 3 to 10 times faster",
    "triton": "compression on GPUs needs it",
    "optuna": "dgc tune needs it",
    "matplotlib": "pictures need it",
}


def examine(limit: float = SELF_TEST_TIMEOUT_S) -> dict[str, Any]:
    """Examines all of it, as plain values. ``problems`` names what is installed and does not work;
    it is empty if all does. ``advice`` is what would make it faster.

    Args:
        limit: seconds after which a self-test has failed, and its processes are ended.
    """
    has_gpu = torch.cuda.is_available()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of is among the problems
        compilers = {
            kind: kernels.COMPILERS.get(
                kernels.module_for(kind, torch.float32).__name__.rpartition(".")[2], "plain torch"
            )
            for kind in (("cpu", "cuda") if has_gpu else ("cpu",))
        }
    found: dict[str, Any] = {
        "dgc": __version__,
        "python": platform.python_version(),
        "torch": _torch(),
        "horovod": _horovod(),
        **{name: _package(name) for name in PACKAGES},
        "kernels": compilers,
    }
    tests = {
        "torch.distributed": self_test("torch", limit)
        if torch.distributed.is_available()
        else {"skipped": "this torch has no torch.distributed"},
        "horovod": _test_horovod(found["horovod"], limit),
    }
    if has_gpu:
        tests["cuda"] = self_test("cuda", limit)
    found["self_test"] = tests
    found["problems"], found["advice"] = list(_problems(found)), list(_advice(found))
    return found


def _torch() -> dict[str, Any]:
    dist = torch.distributed
    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [],
        "backends": [
            name
            for name in ("gloo", "nccl", "mpi")
            if dist.is_available() and getattr(dist, f"is_{name}_available")()
        ],
    }
    try:
        found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except Exception as error:  # they are there, but the driver is older than torch's CUDA, say
        found["error"] = _line(error)
    return found


def _package(name: str, module: str = "") -> dict[str, Any] | None:
    """The version of a package, or the error with which it is imported; None where it is not
    installed.
    """
    if importlib.util.find_spec(name) is None:
        return None
    found: dict[str, Any] = {}
    try:
        imported = importlib.import_module(module or name)
        found["version"] = getattr(imported, "__version__", None) or importlib.metadata.version(
            name
        )
    except Exception as error:  # also what a library built for another torch raises
        found["error"] = _line(error)
    return found


def _horovod() -> dict[str, Any] | None:
    found = _package("horovod", "horovod.torch")
    if found and "error" not in found:
        hvd = importlib.import_module("horovod.torch")
        found["built"] = [
            name
            for name in ("gloo", "mpi", "nccl", "cuda", "rocm")
            if getattr(hvd, f"{name}_built")()
        ]
    return found


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _problems(found: dict[str, Any]) -> Iterator[str]:
    for name in ("torch", "horovod", *PACKAGES):
        if found[name] and "error" in found[name]:
            yield f"{name} is installed and does not work: {found[name]['error']}"
    for kind, compiler in kernels.COMPILERS.items():
        if found[compiler] and found["kernels"].get(kind, compiler) != compiler:
            yield f"{compiler} is installed, but on {kind} the plain torch operations run, several times slower"
    for name, test in found["self_test"].items():
        if "error" in test:
            yield f"the self-test over {name} failed: {test['error']}"


def _advice(found: dict[str, Any]) -> Iterator[str]:
    for name, why in PACKAGES.items():
        if found[name] is None:
            yield f"pip install {name}: {why}"
    if found["horovod"] and not os.environ.get("HOROVOD_CYCLE_TIME"):
        yield (
            f"set HOROVOD_CYCLE_TIME, else Horovod asks all ranks for work every millisecond, which takes the "
            f"processor's time; {CYCLE} suits dgc's few, large messages (horovodrun --cycle-time-ms {CYCLE})"
        )


def _test_horovod(horovod: dict[str, Any] | None, limit: float) -> dict[str, Any]:
    if horovod is None or "error" in horovod:
        return {"skipped": "Horovod is not there"}
    if "gloo" not in horovod["built"]:
        return {"skipped": "built without gloo: try mpirun -np 2 python your_script.py"}
    test, name = self_test("horovod", limit), socket.gethostname()
    if "error" in test:
        try:
            socket.getaddrinfo(name, None)
        except OSError:  # over gloo it then ends by a signal
            test["error"] += (
                f"; {name!r}, this machine's name, does not resolve, which Horovod needs: see /etc/hosts"
            )
    return test


# -- two local processes -----------------------------------------------------------------------------------------------


def self_test(kind: str, limit: float) -> dict[str, Any]:
    """Some steps of DGC between two processes of this machine, over ``torch`` or ``horovod``; or in
    one on the GPU, as two ranks in lockstep (``cuda``).

    Returns:
        ``{"seconds": ...}``, or ``{"error": one line}``. The processes have ended.
    """
    launchers = {
        "torch": "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2",
        "horovod": f"-m horovod.runner.launch --gloo -np 2 {sys.executable}",
        "cuda": "",
    }
    # The processes import this very package, also from another folder: -m looks into the current
    # one first.
    path = os.pathsep.join(map(os.path.abspath, [str(Path(__file__).parents[1]), *sys.path]))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, *launchers[kind].split(), "-m", "dgc.doctor", kind, folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        try:
            log, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {limit:g} s"}
        finally:
            end(process)
        if process.returncode:
            cause = re.findall(r"\w*Error: .*", log) or log.strip().splitlines()[-1:]
            return {"error": f"status {process.returncode}: {' '.join(cause[:1])}"}
        results = {file.read_text() for file in Path(folder).glob("*.json")}
    if len(results) != 1:
        return {"error": f"the ranks do not have the same parameters after {STEPS} steps"}
    return {"seconds": round(time.monotonic() - began, 2)}


def _train(device: str, folder: str) -> None:
    """Trains, and writes the parameters that a rank ends with."""
    if device == "cpu":
        # So that they are tried here, and in the cache when a training wants them.
        kernels.compile_ahead(torch.float32)
    world = find().world
    assert world is not None
    torch.manual_seed(world.rank)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    ).to(device)
    broadcast_parameters(model.state_dict())
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        model.named_parameters(),
        Config(sparsity=0.99, min_numel=1),
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 32, device=device)).square().mean().backward()
        optimizer.step()
    values = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    Path(folder, f"{world.rank}.json").write_text(json.dumps(values))


def main(kind: str, folder: str) -> None:
    """One process of a self-test."""
    torch.set_num_threads(1)
    if kind == "cuda":
        lockstep.run(lambda: _train("cuda", folder), 2)
    elif kind == "horovod":
        import horovod.torch as hvd

        hvd.init()
        _train("cpu", folder)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        torch.distributed.init_process_group("gloo")
        _train("cpu", folder)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
