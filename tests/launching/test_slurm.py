"""The scripts of docs/launching.md under Slurm: its own daemons on two machines, whose one GPU is only a count."""

import os
import re
import shutil
import time
from pathlib import Path

import pytest
from launch import end

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)
DAEMONS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
}
CONF = """ClusterName=dgc
SlurmctldHost=host1
AuthInfo=socket={folder}/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
GresTypes=gpu
NodeName=host[1-2] CoresPerSocket={cores} Gres=gpu:1
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def scripts():
    """Those of the page, by the launcher that they call."""
    page = (ROOT / "docs" / "launching.md").read_text()
    found = [text for text in re.findall(r"```bash\n(.*?)```", page, re.S) if "#SBATCH" in text]
    return {
        launcher: text
        for launcher in ("torchrun", "horovodrun")
        for text in found
        if launcher in text
    }


def wait_for_nodes(machines):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        states = machines.ask(0, "sinfo", "--noheader", "--Node", "--format", "%T")
        if states.split() == ["idle", "idle"]:
            return
        time.sleep(1)
    pytest.fail(f"the nodes are not ready: {states}\n{(machines.folder / 'log').read_text()}")


@pytest.fixture
def cluster(machines, tmp_path):
    """Both machines, ready for jobs."""
    if missing := [
        f"{name} (apt-get install {package})"
        for name, package in DAEMONS.items()
        if shutil.which(name) is None
    ]:
        pytest.skip(f"missing: {', '.join(missing)}")
    (tmp_path / "slurm.conf").write_text(CONF.format(folder=tmp_path, cores=os.cpu_count()))
    (tmp_path / "gres.conf").write_text("Name=gpu File=/dev/zero\n")
    # What it would look for is hidden in a namespace.
    (tmp_path / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (tmp_path / "munge.key").write_bytes(os.urandom(128))
    (tmp_path / "munge.key").chmod(0o600)
    machines.environment["SLURM_CONF"] = str(tmp_path / "slurm.conf")
    daemons = [
        machines.start(
            0,
            "munged",
            "--foreground",
            "--force",
            "--key-file",
            tmp_path / "munge.key",
            "--socket",
            tmp_path / "munge",
            "--pid-file",
            tmp_path / "munge.pid",
            "--seed-file",
            tmp_path / "munge.seed",
            "--log-file",
            tmp_path / "munge.log",
        ),
        machines.start(0, "slurmctld", "-D"),
        *(machines.start(host, "slurmd", "-D") for host in (0, 1)),
    ]
    try:
        wait_for_nodes(machines)
        yield machines
    finally:
        # Whose processes are no children of the daemons.
        machines.ask(0, "scancel", "--user", "root")
        for daemon in daemons:
            end(daemon.pid)


@pytest.mark.parametrize(
    ("launcher", "example"), [("torchrun", "with_ddp.py"), ("horovodrun", "with_horovod.py")]
)
def test_the_script_trains_on_two_nodes(cluster, tmp_path, launcher, example):
    if launcher == "horovodrun":
        pytest.importorskip("horovod")
    shutil.copy(ROOT / "examples" / example, tmp_path / "train.py")
    (tmp_path / "job.sh").write_text(scripts()[launcher])
    cluster.learn(
        [
            "sbatch",
            "--wait",
            "--nodes=2",
            "--gpus-per-node=1",
            "--cpus-per-task=1",
            "--chdir",
            tmp_path,
            "--output",
            tmp_path / "log",
            "--open-mode=append",
            tmp_path / "job.sh",
        ]
    )
