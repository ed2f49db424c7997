"""Runs functions of the tests on real processes, each launch with a hard limit that ends all of its processes."""

import contextlib
import functools
import importlib
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch

from dgc.compression import kernels

HERE = Path(__file__).parent
PROCESS_SETS = []  # of Horovod, made when it is initialised
TIMEOUT = timedelta(minutes=5)  # of torch's process group


def launch(launcher, size, functions, limit=240, check=True, node_size=None):
    """Runs functions of test modules on each of ``size`` processes, ``node_size`` of which count as being on one
    machine; of Horovod's a tuple may say how many each machine has.

    Returns (results, output): function -> what each rank returned, in rank order; and all that was printed. With
    ``check=False`` the job may fail: (exit status, output, seconds).
    """
    names = [f"{function.__module__}.{function.__name__}" for function in functions]
    bin_folder = Path(sys.executable).parent
    command = {"horovod": [str(bin_folder / "horovodrun"), "--gloo", "-np", str(size), sys.executable],
               "torch": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)],
               }[launcher]
    if node_size is not None and launcher == "horovod":  # which tells machines by what they are called
        sizes = node_size if isinstance(node_size, tuple) else [node_size] * (size // node_size)
        called = ["localhost", *(f"127.0.0.{i}" for i in range(1, len(sizes)))]
        command[2:2] = ["-H", ",".join(f"{name}:{n}" for name, n in zip(called, sizes, strict=True))]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
                       "PYTHONUNBUFFERED": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
                       "DGC_NODE_SIZE": str(node_size or size),
                       "HOROVOD_DYNAMIC_PROCESS_SETS": "0" if node_size is None else "1"}
        log = Path(folder) / "log"
        began = time.monotonic()
        with log.open("w") as file:
            process = subprocess.Popen([*command, str(HERE / "launch.py"), launcher, folder, *names], env=environment,
                                       stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                end(process.pid)
                message = f"{launcher} with {size} processes ran past {limit} s:\n{log.read_text()}"
                raise AssertionError(message) from None
            finally:
                end(process.pid)
        output = log.read_text()
        if not check:
            return status, output, time.monotonic() - began
        assert status == 0, output
        ranks = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]
        return {function: [rank[name] for rank in ranks]
                for function, name in zip(functions, names, strict=True)}, output


@functools.cache
def _once(launcher, size, functions, limit, node_size):
    try:
        return launch(launcher, size, functions, limit, node_size=node_size)[0]
    except BaseException as error:
        return error


def ran(launcher, size, functions, limit=240, node_size=None):
    """The results of one launch, made once. One that failed is not tried again by each of the tests that look at it."""
    results = _once(launcher, size, tuple(functions), limit, node_size)
    if isinstance(results, BaseException):
        raise results
    return results


def end(pid):
    """Ends a process and all that it started."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=10)


def main():
    launcher, folder, *names = sys.argv[1:]
    torch.manual_seed(0)
    if launcher == "horovod":
        import horovod.torch as hvd
        if os.environ.get("HOROVOD_SIZE") == "3":
            PROCESS_SETS.append(hvd.ProcessSet([1, 2]))
        hvd.init(process_sets=PROCESS_SETS)
        rank = hvd.rank()
    else:
        torch.distributed.init_process_group("gloo", timeout=TIMEOUT)
        rank = torch.distributed.get_rank()
        os.environ["GROUP_RANK"] = str(rank // int(os.environ["DGC_NODE_SIZE"]))  # as if by an agent on each machine
    sys.modules["launch"] = sys.modules["__main__"]  # one list of process sets, not two
    kernels.compile_ahead(torch.float32, torch.float64)
    results = {}
    sys.path += [str(folder) for folder in HERE.iterdir() if folder.is_dir()]  # where pytest finds the tests
    for name in names:
        module, _, function = name.rpartition(".")
        results[name] = getattr(importlib.import_module(module), function)()
    torch.save(results, f"{folder}/{rank}.part")
    os.replace(f"{folder}/{rank}.part", f"{folder}/{rank}.pt")
    if launcher == "horovod":
        hvd.barrier()  # the first process to leave would shut Horovod down for all


if __name__ == "__main__":
    main()
