"""Several hosts on one machine: network namespaces on a bridge, what each sends shaped by a token bucket (Linux, root).

What a host receives is not shaped: in the ring algorithms of Horovod and gloo it listens to one neighbour at a time.
There is no propagation delay, and all hosts share this machine's cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import typer

WORK = "--work"  # before the settings of one rank, on the command line of a script that runs itself in the hosts
CYCLE = 5.0  # of Horovod, in milliseconds, where nothing else is said
RUNS = "dgc-net-"  # and the process id: the names of all that a run makes
# Those who make such runs.
MEASURE = (
    "network.py",
    "adaptive.py",
    "clock.py",
    "measure.py",
    "hidden.py",
)


def run_script(work: Callable[[Any], None], main: Callable[..., None]) -> None:
    """What a script that runs itself in the hosts is when it is called: one rank's work, or the command line."""
    if sys.argv[1:2] == [WORK]:
        work(json.loads(sys.argv[2]))
    else:
        app = typer.Typer(pretty_exceptions_enable=False)
        app.command()(main)
        app()


class Rate(NamedTuple):
    bits: float  # a second
    shallow: int  # depth in kB => deeper: short messages pass faster than the nominal rate
    deep: int  # => shallower: busy cores let tokens overflow
    offload: bool  # with the shallow bucket, packets larger than the wire's: fewer to handle, but in bursts


RATES = {
    "10gbit": Rate(10e9, 256, 1024, True),
    "1gbit": Rate(1e9, 16, 256, False),
    "300mbit": Rate(3e8, 12, 128, False),
    "100mbit": Rate(1e8, 8, 64, False),
}


def refuse(why: str) -> NoReturn:
    """Ends with status 2 and one sentence."""
    print(f"{Path(sys.argv[0]).name}: {why}", file=sys.stderr)
    raise SystemExit(2)


def check_tools() -> None:
    """Refuses where the hosts cannot be made."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        refuse("it makes network namespaces, which needs Linux and root (sudo)")
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("ethtool", "ethtool")):
        if shutil.which(tool) is None:
            refuse(f"it needs the command `{tool}`: apt-get install {package}")


def sh(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def shape_link(rate: str, burst: str, *tc: str) -> None:
    """What a host sends, from now on; the one of this process if ``tc`` does not say which."""
    sh(
        "tc",
        *tc,
        "qdisc",
        "replace",
        "dev",
        "e0",
        "root",
        "tbf",
        "rate",
        rate,
        "burst",
        burst,
        "latency",
        "50ms",
    )


class Network:
    """Hosts 10.0.0.1, 10.0.0.2, ... in namespaces of their own, on a bridge in one more. Use it in a ``with``."""

    def __init__(self, hosts: int):
        self.hosts, self.name = hosts, f"{RUNS}{os.getpid()}"
        self.folder = Path("/run") / self.name

    def __enter__(self) -> Network:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # through every finally
        reader, self.writer = os.pipe()
        self.watchdog = os.fork()
        if self.watchdog == 0:  # outlives a kill -9 of its parent: then the pipe closes
            try:
                os.setsid()
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
                os.close(self.writer)
                os.read(reader, 1)
                clean(self.name)
            finally:
                os._exit(0)
        os.close(reader)
        try:
            self.make()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            refuse(
                f"this machine cannot make the network: `{' '.join(error.cmd)}` says {error.stderr.strip()!r}"
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self.writer)
        os.waitpid(self.watchdog, 0)

    def make(self) -> None:
        self.folder.mkdir(mode=0o700)
        switch = f"{self.name}-switch"
        sh("ip", "netns", "add", switch)
        sh("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        sh("ip", "-n", switch, "link", "set", "bridge", "up")
        for i in range(self.hosts):
            host, address = f"{self.name}-{i}", f"10.0.0.{i + 1}"
            # Horovod asks for the address of the host's name.
            names = Path("/etc/netns") / host / "hosts"
            names.parent.mkdir(parents=True)
            names.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
            sh("ip", "netns", "add", host)
            sh(
                "ip",
                "-n",
                host,
                "link",
                "add",
                "e0",
                "type",
                "veth",
                "peer",
                "name",
                f"p{i}",
                "netns",
                switch,
            )
            sh("ip", "-n", switch, "link", "set", f"p{i}", "master", "bridge", "up")
            sh("ip", "-n", host, "addr", "add", f"{address}/24", "dev", "e0")
            for device in ("lo", "e0"):
                sh("ip", "-n", host, "link", "set", device, "up")
        self.shape("1gbit", "deep")

    def shape(self, rate: str, depth: str) -> None:
        burst = f"{getattr(RATES[rate], depth)}kb"
        offload = "on" if depth == "deep" or RATES[rate].offload else "off"
        for i in range(self.hosts):
            for namespace, device in ((f"{self.name}-{i}", "e0"), (f"{self.name}-switch", f"p{i}")):
                sh(
                    "ip",
                    "netns",
                    "exec",
                    namespace,
                    "ethtool",
                    "-K",
                    device,
                    "tso",
                    offload,
                    "gso",
                    offload,
                    "gro",
                    offload,
                )
            shape_link(rate, burst, "-n", f"{self.name}-{i}")

    def start(self, host: int, *arguments: str, **keywords: Any) -> subprocess.Popen[str]:
        """Python with these arguments, within a host."""
        return subprocess.Popen(
            ["ip", "netns", "exec", f"{self.name}-{host}", sys.executable, *arguments],
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            **keywords,
        )

    def clear(self) -> None:
        """Leaves the folder empty."""
        shutil.rmtree(self.folder)
        self.folder.mkdir(mode=0o700)

    def run(self, script: Path, settings: dict[str, Any], limit: float) -> list[dict[str, Any]]:
        """A script as one rank in each host, all at once, ended after ``limit`` seconds; what each of them wrote into
        the folder, as ``RANK.json``. It is given the settings, its rank, the number of hosts and the folder.

        Raises:
            RuntimeError: one of them failed, or the time was up. It ends with what they printed.
        """
        shared = {**settings, "hosts": self.hosts, "folder": str(self.folder)}
        processes: list[subprocess.Popen[str]] = []
        log, end = self.folder / "log", time.monotonic() + limit
        try:
            with log.open("w") as file:
                for rank in range(self.hosts):
                    processes.append(
                        self.start(
                            rank,
                            str(script),
                            WORK,
                            json.dumps({**shared, "rank": rank}),
                            stdout=file,
                            stderr=subprocess.STDOUT,
                        )
                    )
            while any(process.poll() is None for process in processes) and time.monotonic() < end:
                if any(process.poll() for process in processes):
                    raise RuntimeError(f"a process failed:\n{log.read_text()[-3000:]}")
                time.sleep(0.1)
            if any(process.poll() != 0 for process in processes):
                raise RuntimeError(
                    f"it failed, or was not done after {limit:.0f} s:\n{log.read_text()[-3000:]}"
                )
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [
            json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(self.hosts)
        ]


def clean(run: str) -> None:
    """Ends and removes all that a run made."""
    names: list[str] = re.findall(rf"^{run}-\w+", sh("ip", "netns", "list"), re.MULTILINE)
    for _ in range(2):  # a process that was entering its namespace is found the second time
        for name in names:
            for pid in sh("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    for path in (*Path("/etc/netns").glob(f"{run}-*"), Path("/run") / run):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        Path("/etc/netns").rmdir()  # if nobody else uses it


def clean_leftovers() -> None:
    """Removes what an earlier run left that was killed together with its watchdog; refuses beside a running one."""
    names = [
        path.name
        for folder in ("/run", "/run/netns", "/etc/netns")
        for path in Path(folder).glob(f"{RUNS}*")
    ]
    for pid in {name[len(RUNS) :].split("-")[0] for name in names}:
        command = Path(f"/proc/{pid}/cmdline")
        if (
            pid != str(os.getpid())
            and command.exists()
            and any(name in command.read_text() for name in MEASURE)
        ):
            refuse(f"process {pid} is measuring already; two runs at once would disturb each other")
        clean(f"{RUNS}{pid}")


def place(a: dict[str, Any]) -> None:
    """Tells the process of one rank its host, as torchrun would. ``a``: what it was given by :meth:`Network.run`."""
    os.environ.update(
        {
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "5001",
            "GLOO_SOCKET_IFNAME": "e0",
            "LOCAL_RANK": "0",
            "RANK": str(a["rank"]),
            "WORLD_SIZE": str(a["hosts"]),
        }
    )


def place_for_horovod(a: dict[str, Any], cycle: float = CYCLE) -> None:
    """The same as horovodrun would; ``hvd.init()`` comes next. A thread of rank 0 tells ranks where the others are.

    Args:
        cycle: Horovod's, in milliseconds.
    """
    from horovod.runner.http.http_server import RendezvousServer

    rank, size, file = a["rank"], a["hosts"], Path(a["folder"], "port")
    if rank == 0:
        server = RendezvousServer()
        file.with_suffix(".part").write_text(str(server.start()))
        server.init([])
        file.with_suffix(".part").replace(file)
    while not file.exists():  # Network.run ends this
        time.sleep(0.01)
    os.environ.update(
        {
            f"HOROVOD_{key}": str(value)
            for key, value in {
                "RANK": rank,
                "SIZE": size,
                "LOCAL_RANK": 0,
                "LOCAL_SIZE": 1,
                "CROSS_RANK": rank,
                "CROSS_SIZE": size,
                "HOSTNAME": f"10.0.0.{rank + 1}",
                "CONTROLLER": "gloo",
                "CPU_OPERATIONS": "gloo",
                "GLOO_IFACE": "e0",
                "GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
                "GLOO_RENDEZVOUS_PORT": file.read_text(),
                "CYCLE_TIME": cycle,
            }.items()
        }
    )


# -- single transfers --------------------------------------------------------------------------------------------------


def serve() -> None:
    """Answers each transfer with the time at which its last byte arrived."""
    with socket.create_server(("", 5000)) as server:
        print("ready", flush=True)
        connection = server.accept()[0]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray(1 << 20)
        while size := int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big"):
            while size:
                size -= connection.recv_into(buffer, min(size, len(buffer)))
            connection.sendall(time.monotonic_ns().to_bytes(8, "big"))  # the hosts share a clock


def send(sizes: list[int]) -> None:
    """Prints bits a second for each size: the upper quartile of 12, as whatever else runs only slows transfers."""
    with socket.create_connection(("10.0.0.1", 5000)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rates = []
        for size in sizes:
            message, times = size.to_bytes(8, "big") + bytes(size), []
            for _ in range(12):
                time.sleep(0.02)  # the bucket is full again
                began = time.monotonic_ns()
                connection.sendall(message)
                times.append(int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big") - began)
            rates.append(8e9 * size / statistics.quantiles(times, n=4)[0])
        print(json.dumps(rates))


def transfers(network: Network, rate: str, depth: str) -> dict[str, float]:
    """Size in kB -> bits a second, over the bucket of that depth."""
    network.shape(rate, depth)
    multiples = (
        [64, 256, 1024, 4096, 10240]
        if depth == "shallow"
        else [16 * RATES[rate].deep, 40 * RATES[rate].deep]
    )
    with network.start(0, __file__, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None and server.stdout.readline()
            with network.start(
                1, __file__, *(str(1024 * kb) for kb in multiples), stdout=subprocess.PIPE
            ) as sender:
                try:
                    reached = json.loads(sender.communicate(timeout=120)[0])
                finally:
                    sender.kill()
        finally:
            server.kill()
    return {str(kb): bits for kb, bits in zip(multiples, reached, strict=True)}


def check(
    network: Network, rate: str, tolerance: float = 0.1
) -> tuple[bool, dict[str, dict[str, float]]]:
    """Whether single transfers hold the rate over both buckets, and theirs: of up to five tries the fastest."""
    holds, reached = True, {}
    for depth in ("shallow", "deep"):
        fastest: dict[str, float] = {}
        for _ in range(5):
            fastest = {
                kb: max(bits, fastest.get(kb, 0))
                for kb, bits in transfers(network, rate, depth).items()
            }
            held = all(abs(bits / RATES[rate].bits - 1) <= tolerance for bits in fastest.values())
            if held:
                break
            time.sleep(2)  # something else may have been running
        reached[depth] = fastest
        holds = holds and held
        print(
            f"{rate}, {depth} bucket of {getattr(RATES[rate], depth)} kB, single transfers in Mbit/s: "
            + ", ".join(f"{kb} kB {bits / 1e6:.0f}" for kb, bits in fastest.items()),
            flush=True,
        )
    return holds, reached


if __name__ == "__main__":  # one end of single transfers, within a host
    send([int(size) for size in sys.argv[1:]]) if sys.argv[1:] else serve()
