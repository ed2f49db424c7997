"""Two machines, as far as one can play them: network namespaces with names, addresses and ssh servers of their own."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import end

ROOT = Path(__file__).parents[2]
LIMIT = 500  # seconds of a launch
HOSTS = 2
TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "ethtool": "ethtool",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "hostname": "hostname",
}
SSHD = """HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
"""
SSH = """IdentityFile {folder}/key
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


class Machines:
    """host1 and host2, which know each other by these names, and let each other in over ssh."""

    def __init__(self, network, folder):
        self.network, self.folder = network, folder
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/key"],
            check=True,
            timeout=60,
        )
        (folder / "sshd_config").write_text(SSHD.format(folder=folder))
        names = "127.0.0.1 localhost\n" + "".join(
            f"10.0.0.{i + 1} host{i + 1}\n" for i in range(HOSTS)
        )
        for i in range(HOSTS):  # what `ip netns exec` shows as /etc
            etc = Path("/etc/netns") / f"{network.name}-{i}"
            (etc / "hosts").write_text(names)
            (etc / "ssh").mkdir()
            (etc / "ssh" / "ssh_config").write_text(SSH.format(folder=folder))
        Path("/run/sshd").mkdir(exist_ok=True)  # which Debian's sshd wants
        self.servers = [
            self.start(i, shutil.which("sshd"), "-D", "-e", "-f", f"{folder}/sshd_config")
            for i in range(HOSTS)
        ]

    def start(self, host, *command):
        """A process on a machine; what it prints goes to the file ``log``."""
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                self.on(host, *command),
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def ask(self, host, *command):
        """What a command that ends soon prints, on a machine."""
        done = subprocess.run(
            self.on(host, *command),
            env=self.environment,
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
        return done.stdout + done.stderr

    def on(self, host, *command):
        """The command that runs this one on a machine."""
        return [
            "ip",
            "netns",
            "exec",
            f"{self.network.name}-{host}",
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0" && exec "$@"',
            f"host{host + 1}",
            *map(str, command),
        ]

    def run(self, *commands):
        """What these printed, the first on host1, the second on host2; ended when the limit is over."""
        processes = [self.start(host, *command) for host, command in enumerate(commands)]
        deadline = time.monotonic() + LIMIT
        try:
            states = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            states = "the limit is over"
        finally:
            for process in processes:
                end(process.pid)
        output = (self.folder / "log").read_text()
        assert states == [0] * len(commands), f"{states}\n{output}"
        return output

    def sent(self):
        """Bytes that each machine has sent to the other."""
        return [
            int(self.ask(i, "cat", "/sys/class/net/e0/statistics/tx_bytes")) for i in range(HOSTS)
        ]

    def learn(self, *commands):
        """Chance has an accuracy of 0.1; each machine's messages have crossed the link between them."""
        before = self.sent()
        output = self.run(*commands)
        found = re.search(r"accuracy (\d\.\d+), compression (\d+\.\d+)", output)
        assert found and float(found[1]) > 0.85 and float(found[2]) > 10, output
        assert (
            min(after - before for before, after in zip(before, self.sent(), strict=True)) > 100_000
        )


@pytest.fixture
def machines(tmp_path):
    if os.environ.get("DGC_LAUNCH") != "1":
        pytest.skip("make launch runs it")
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("it makes network namespaces, which needs Linux and root")
    if missing := [
        f"{tool} (apt-get install {name})"
        for tool, name in TOOLS.items()
        if shutil.which(tool) is None
    ]:
        pytest.skip(f"missing: {', '.join(missing)}")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from hosts import Network

    network = Network(HOSTS)
    network.name = f"dgc-launch-{os.getpid()}"  # which no benchmark takes for a leftover of its own, and removes
    network.folder = Path("/run") / network.name
    with network:
        both = Machines(network, tmp_path)
        try:
            yield both
        finally:
            for server in both.servers:
                end(server.pid)
