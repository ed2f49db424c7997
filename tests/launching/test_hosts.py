"""The lines of docs/launching.md, from the launcher to the accuracy of an example, on two machines.

``make launch`` runs this, as root.
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)  # hosts are made and removed, too


def torchrun(*arguments):
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        2,
        "--nproc-per-node",
        "1",
        *arguments,
        ROOT / "examples" / "with_ddp.py",
    ]


def test_torchrun_with_a_rendezvous(machines):
    line = torchrun("--rdzv-backend", "c10d", "--rdzv-endpoint", "host1:29500", "--rdzv-id", "job1")
    machines.learn(line, line)


def test_torchrun_that_is_told_which_machine_is_which(machines):
    machines.learn(
        *(
            torchrun("--node-rank", i, "--master-addr", "host1", "--master-port", "29500")
            for i in range(2)
        )
    )


def test_horovodrun_over_ssh(machines):
    pytest.importorskip("horovod")
    machines.learn(
        [
            Path(sys.executable).parent / "horovodrun",
            "--gloo",
            "--disable-cache",
            "--cycle-time-ms",
            "5",
            "-np",
            2,
            "-H",
            "host1:1,host2:1",
            sys.executable,
            ROOT / "examples" / "with_horovod.py",
        ]
    )
