"""The self-test: packages and builds, the kernels that will run, and a few steps between two local processes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from dgc.compression import kernels
from dgc.config import Config
from dgc.frontends.broadcast import broadcast_parameters
from dgc.frontends.optimizer import DistributedOptimizer
from dgc.version import __version__

LIMIT = 300.0  # seconds for each self-test; the first one compiles for a minute or two, where numba is installed
CYCLE = 5  # milliseconds between two looks of Horovod for work; docs/migrating.md has what it changes
RANKS = 2
STEPS = 3
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
PACKAGES = ("numba", "triton", "optuna", "matplotlib")
HOROVOD = ("gloo_built", "mpi_built", "nccl_built", "cuda_built", "rocm_built", "mpi_enabled", "gloo_enabled")


def examine(limit: float = LIMIT) -> dict[str, Any]:
    """Examines all of it, as plain values. ``problems`` names what is installed and does not work; it is empty if all
    does. ``advice`` is what would make it faster.

    Args:
        limit: seconds after which a self-test has failed, and its processes are ended.
    """
    found: dict[str, Any] = {
        "python": platform.python_version(), "dgc": __version__, "torch": _torch(),
        "horovod": _package("horovod", "horovod.torch", HOROVOD), "kernels": _kernels(),
        **{name: _package(name) for name in PACKAGES}}
    found["self_test"] = {"torch.distributed": self_test("torch", limit) if torch.distributed.is_available() else
                          {"skipped": "this torch has no torch.distributed"}, "horovod": _test_horovod(found, limit)}
    if torch.cuda.is_available():
        found["self_test"]["cuda"] = self_test("cuda", limit)
    found["problems"], found["advice"] = list(_problems(found)), list(_advice(found))
    return found


def _torch() -> dict[str, Any]:
    distributed = torch.distributed.is_available()
    found: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "distributed": distributed,
                             "gloo": distributed and torch.distributed.is_gloo_available(),
                             "nccl": distributed and torch.distributed.is_nccl_available(), "devices": []}
    try:
        found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except Exception as error:  # they are there, but the driver is older than torch's CUDA, say
        found["error"] = _line(error)
    if found["nccl"]:
        found["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _package(name: str, module: str = "", flags: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """The version of a package, and what its module says of flags; None where it is not installed."""
    if importlib.util.find_spec(name) is None:
        return None
    found: dict[str, Any] = {"version": None}
    try:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["version"] = importlib.metadata.version(name)
        imported = importlib.import_module(module or name)
        for flag in flags:
            found[flag] = bool(getattr(imported, flag)()) if hasattr(imported, flag) else None
    except Exception as error:  # also what a library built for another torch raises
        found["error"] = _line(error)
    return found


def _kernels() -> dict[str, str]:
    """Names the module whose loops will run, by device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of is among the problems
        return {kind: kernels.module_for(kind, torch.float32).__name__.rpartition(".")[2]
                for kind in ("cpu", *(["cuda"] if torch.cuda.is_available() else []))}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _problems(found: dict[str, Any]) -> Any:
    if "error" in found["torch"]:
        yield f"there are GPUs, and CUDA does not work: {found['torch']['error']}"
    for name in ("horovod", *PACKAGES):
        if found[name] and "error" in found[name]:
            yield f"{name} is installed but cannot be imported: {found[name]['error']}"
    for kind, compiler in kernels.COMPILERS.items():
        if found[compiler] and found["kernels"].get(kind) == "plain":
            yield f"{compiler} is installed, but on {kind} the plain torch operations run, several times slower"
    for name, test in found["self_test"].items():
        if "error" in test:
            yield f"two processes over {name}: {test['error']}" if name != "cuda" else f"on the GPU: {test['error']}"


def _advice(found: dict[str, Any]) -> Any:
    if found["horovod"] and "error" not in found["horovod"] and not os.environ.get("HOROVOD_CYCLE_TIME"):
        yield (f"HOROVOD_CYCLE_TIME is not set, so Horovod asks all ranks for work every millisecond, which takes the "
               f"processor's time; {CYCLE} suits dgc's few, large messages (horovodrun --cycle-time-ms {CYCLE})")


def _test_horovod(found: dict[str, Any], limit: float) -> dict[str, Any]:
    if found["horovod"] is None:
        return {"skipped": "not installed"}
    if "error" in found["horovod"]:
        return {"skipped": "cannot be imported"}
    if not found["horovod"]["gloo_built"]:
        return {"skipped": "built without gloo: try mpirun -np 2 python your_script.py"}
    test, name = self_test("horovod", limit), socket.gethostname()
    if "error" in test:
        try:
            socket.getaddrinfo(name, None)
        except OSError:  # over gloo it then ends by a signal
            test["error"] += f"; {name!r}, this machine's name, does not resolve, which Horovod needs: see /etc/hosts"
    return test


# -- two local processes -----------------------------------------------------------------------------------------------

def self_test(kind: str, limit: float) -> dict[str, Any]:
    """Some steps of DGC between two processes of this machine, over ``torch`` or ``horovod``; or one on the GPU, as two
    ranks in lockstep (``cuda``).

    Returns:
        ``{"seconds": ...}``, or ``{"error": one line}``. The processes have ended.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        server: Any = None
        settings: list[dict[str, str]] = [{} for _ in range(1 if kind == "cuda" else RANKS)]
        processes: list[subprocess.Popen[bytes]] = []
        log = Path(folder) / "log"
        try:
            if kind == "horovod":
                server, settings = _rendezvous()
            with log.open("wb") as file:
                for rank, extra in enumerate(settings):
                    processes.append(subprocess.Popen(
                        [sys.executable, "-m", "dgc.doctor", kind, folder, str(rank)], stdin=subprocess.DEVNULL,
                        stdout=file, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder,
                        env={**os.environ, "PYTHONPATH": _path(), "OMP_NUM_THREADS": "1", **extra}))
            while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
                if time.monotonic() - began > limit:
                    return {"error": f"not done after {limit:g} s"}
                time.sleep(0.05)
            if failed := [p.returncode for p in processes if p.poll()]:
                return {"error": _told(log, failed[0])}
            results = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(len(processes))]
        except Exception as error:
            return {"error": _line(error)}
        finally:
            for process in processes:
                _end(process)
            if server is not None:
                server.stop()
    if any(result != results[0] for result in results):
        return {"error": f"the ranks do not have the same parameters after {STEPS} steps"}
    return {"seconds": round(time.monotonic() - began, 2)}


def _path() -> str:
    """So that the processes import this very package, from another folder: ``-m`` looks into the current one first."""
    here, others = str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")
    return os.pathsep.join([here, *map(os.path.abspath, others.split(os.pathsep) if others else [])])


def _told(log: Path, status: int) -> str:
    """Why a process failed: the last line that looks like an exception's, else the last; and the name of a signal."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    line = next((line for line in reversed(lines) if "Error" in line or "error" in line), lines[-1] if lines else "")
    if status > 0 and line:
        return line
    how = f"ended with status {status}" if status > 0 else f"was ended by {signal.Signals(-status).name}"
    return f"a process {how}" + (f": {line}" if line else "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends it and what it started, which has its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rendezvous() -> tuple[Any, list[dict[str, str]]]:
    """The server at which Horovod's processes meet without ``horovodrun``, and what each of them is told."""
    from horovod.runner.http.http_server import RendezvousServer
    server = RendezvousServer()
    port = server.start()
    server.init([])
    return server, [{f"HOROVOD_{key}": str(value) for key, value in {
        "RANK": rank, "SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_SIZE": RANKS, "CROSS_RANK": 0, "CROSS_SIZE": 1,
        "HOSTNAME": "localhost", "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": LOOPBACK,
        "GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port}.items()} for rank in range(RANKS)]


def _train(device: str, rank: int) -> list[float]:
    """The parameters that a rank ends with."""
    if device == "cpu":
        kernels.compile_ahead(torch.float32)  # so that they are tried here, and in the cache when a training wants them
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    broadcast_parameters(model.state_dict())
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model.named_parameters(),
                                     Config(sparsity=0.99, min_numel=1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 32, device=device)).square().mean().backward()
        optimizer.step()
    values: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    if any(value != value for value in values):
        raise FloatingPointError("the parameters are not numbers")
    return values


def main(kind: str, folder: str, rank: int) -> None:
    """One process of a self-test."""
    torch.set_num_threads(1)
    result: Any
    if kind == "cuda":
        from dgc.transport import lockstep

        def train() -> list[float]:
            here = lockstep.current()
            assert here is not None
            return _train("cuda", here.world.rank)

        both = lockstep.run(train, RANKS)
        if both[0] != both[1]:
            raise RuntimeError("the ranks do not have the same parameters")
        result = both[0]
    elif kind == "torch":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        # Where a file: URL would end at a # in the path.
        store = torch.distributed.FileStore(f"{folder}/meeting", RANKS)  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        result = _train("cpu", rank)
        torch.distributed.destroy_process_group()
    else:
        import horovod.torch as hvd
        hvd.init()
        result = _train("cpu", rank)
        hvd.shutdown()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
