"""Runs functions of the tests on real processes, each launch with a hard limit that ends all of its processes."""

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
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
SCRIPT = [sys.executable, str(HERE / "launch.py")]
FIXED = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "30"}
# The last by the first optimizer: as long a work as torch itself.
PREPARED = (
    "hypothesis",
    "pytest",
    "torch._dynamo",
)
PROCESS_SETS = []  # of Horovod, made when it is initialised
TIMEOUT = timedelta(minutes=5)  # of torch's process group


def launch(launcher, size, functions, limit=240, check=True, node_size=None, fresh=False):
    """Runs functions of test modules on each of ``size`` processes, ``node_size`` of which count as being on one
    machine; of Horovod's a tuple may say how many each machine has.

    Returns (results, output): function -> what each rank returned, in rank order; and all that was printed. With
    ``check=False`` the job may fail: (exit status, output, seconds).

    The processes are forked from one that has imported all they need. ``fresh`` ones are started by horovodrun or
    torchrun, which end the job in their way; each imports for itself, and has its own order of strings in a set.
    """
    names = [f"{function.__module__}.{function.__name__}" for function in functions]
    nodes = (
        node_size
        if isinstance(node_size, tuple)
        else (node_size or size,) * (size // (node_size or size))
    )
    bin_folder = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            **FIXED,
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "HOROVOD_DYNAMIC_PROCESS_SETS": "0" if node_size is None else "1",
        }
        log = Path(folder) / "log"
        words = [launcher, folder, "fresh" if fresh else ",".join(map(str, nodes)), *names]
        began = time.monotonic()
        if fresh:
            command = {
                "horovod": [str(bin_folder / "horovodrun"), "--gloo", "-np", str(size)],
                "torch": [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--no-python",
                    "--nproc-per-node",
                    str(size),
                ],
            }[launcher]
            with log.open("w") as file:
                process = subprocess.Popen(
                    [*command, *SCRIPT, *words],
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                )
        else:
            process = Fork([words, environment, os.getcwd(), str(log)])
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            message = f"{launcher} with {size} processes ran past {limit} s:\n{log.read_text()}"
            raise AssertionError(message) from None
        finally:
            end(process.pid)
            process.wait(10)
            left = survivors(folder, process.pid)
        output = log.read_text()
        assert not left, f"processes outlived their launcher, and were ended: {left}\n{output}"
        if not check:
            return status, output, time.monotonic() - began
        assert status == 0, output
        ranks = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]
        return {
            function: [rank[name] for rank in ranks]
            for function, name in zip(functions, names, strict=True)
        }, output


class Fork:
    """A process of one launch, forked from the nursery: as it was imported, with its own environment and output."""

    def __init__(self, request):
        self.nursery, self.status = nursery(), None
        self.nursery.stdin.write(json.dumps(request).encode() + b"\n")
        self.pid = int(self.nursery.stdout.readline())

    def wait(self, limit):
        """Its status, as of a Popen."""
        if self.status is None:
            if not select.select([self.nursery.stdout], [], [], limit)[0]:
                raise subprocess.TimeoutExpired(SCRIPT, limit)
            self.status = int(self.nursery.stdout.readline())
        return self.status


@functools.cache
def nursery():
    """The process from which this one's launches are forked: to import takes longer than most tests. It ends with this
    one, as its input does.
    """
    return subprocess.Popen(
        [*SCRIPT, "nursery"],
        env={**os.environ, **FIXED},
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def forked():
    """Imports what every launch needs, and forks a process for each that is asked for, where it returns True."""
    for module in PREPARED:
        importlib.import_module(module)
    for line in sys.stdin:
        words, environment, folder, log = json.loads(line)
        if child := os.fork():
            print(child, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        os.setsid()
        for target, file, flags in (
            (0, os.devnull, os.O_RDONLY),
            (1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        ):
            os.dup2(os.open(file, flags), target)
        os.dup2(1, 2)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = words
        return True
    return False


@functools.cache
def _once(launcher, size, functions, limit, node_size, fresh):
    try:
        return launch(launcher, size, functions, limit, node_size=node_size, fresh=fresh)[0]
    except BaseException as error:
        return error


def ran(launcher, size, functions, limit=240, node_size=None, fresh=False):
    """The results of one launch, made once. One that failed is not tried again by each of the tests that look at it."""
    results = _once(launcher, size, tuple(functions), limit, node_size, fresh)
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


def survivors(folder, session):
    """Ends the processes of a launch whose launcher has ended, after a moment to end by themselves. Their commands."""

    def there():
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                ours = folder in process.cmdline() or os.getsid(process.pid) == session
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    deadline = time.monotonic() + 20
    while (found := list(there())) and time.monotonic() < deadline:
        time.sleep(0.1)
    commands = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            commands.append(process.cmdline())
            process.kill()
    return commands


def places(launcher, nodes):
    """What each rank is told by its environment, as horovodrun and torchrun tell it: machines have so many ranks."""
    size, told = sum(nodes), []
    for node, ranks in enumerate(nodes):
        for local in range(ranks):
            if launcher == "torch":  # as if by an agent on each machine
                told.append(
                    {
                        "RANK": len(told),
                        "WORLD_SIZE": size,
                        "LOCAL_RANK": local,
                        "LOCAL_WORLD_SIZE": ranks,
                        "GROUP_RANK": node,
                    }
                )
                continue
            across = [i for i, n in enumerate(nodes) if n > local]
            place = {
                "RANK": len(told),
                "SIZE": size,
                "LOCAL_RANK": local,
                "LOCAL_SIZE": ranks,
                "CROSS_RANK": across.index(node),
                "CROSS_SIZE": len(across),
                "CONTROLLER": "gloo",
                "HOSTNAME": f"127.0.0.{node}"
                if node
                else "localhost",  # machines are told apart by it
                "CPU_OPERATIONS": "gloo",
                "GLOO_IFACE": "lo",
                "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            }
            told.append({f"HOROVOD_{key}": value for key, value in place.items()})
    return told


def fork(launcher, nodes):
    """Goes on as one process for each rank, which all have what was imported.

    This process waits for them. The first one that fails ends the others, and its status is the job's.
    """
    told, common = places(launcher, nodes), {}
    if launcher == "horovod":
        from horovod.runner.http.http_server import RendezvousServer

        server = RendezvousServer()
        common["HOROVOD_GLOO_RENDEZVOUS_PORT"] = server.start()
        server.init([])
    gc.freeze()  # else the first collection of each process copies all of that memory
    children = []
    for place in told:
        children.append(os.fork())
        if not children[-1]:
            os.environ.update({name: str(value) for name, value in {**place, **common}.items()})
            return
    status = 0
    while children and not status:
        child, status = os.wait()
        children.remove(child)
    for other in children:
        os.kill(other, signal.SIGKILL)
    sys.exit(
        f"process {child} ended with status {os.waitstatus_to_exitcode(status)}" if status else 0
    )


def begin(launcher, folder):
    """Initialises the transport. Returns the rank."""
    if launcher == "horovod":
        import horovod.torch as hvd

        if os.environ.get("HOROVOD_SIZE") == "3":
            PROCESS_SETS.extend([hvd.ProcessSet([1, 2]), hvd.ProcessSet([0])])
        hvd.init(process_sets=PROCESS_SETS)
        return hvd.rank()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch.distributed.FileStore(f"{folder}/meeting", size)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT
    )
    return rank


def main():
    kernels.compile_ahead(torch.float32, torch.float64)
    sys.modules["launch"] = sys.modules["__main__"]  # one list of process sets, not two
    # Where pytest finds the tests.
    sys.path += [str(folder) for folder in HERE.iterdir() if folder.is_dir()]
    if sys.argv[1] == "nursery" and not forked():
        return
    launcher, folder, nodes, *names = sys.argv[1:]
    functions = {}
    for name in names:
        module, _, function = name.rpartition(".")
        functions[name] = getattr(importlib.import_module(module), function)
    if nodes != "fresh":
        fork(launcher, [int(ranks) for ranks in nodes.split(",")])
    rank = begin(launcher, folder)
    torch.manual_seed(0)
    results = {name: function() for name, function in functions.items()}
    torch.save(results, f"{folder}/{rank}.part")
    os.replace(f"{folder}/{rank}.part", f"{folder}/{rank}.pt")
    if launcher == "horovod":
        import horovod.torch as hvd

        hvd.barrier()  # the first process to leave would shut Horovod down for all


if __name__ == "__main__":
    main()
