"""Each example as its first lines say that it is run, on two processes. Those of frameworks need ``make examples``."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launch import end

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
FOLDER, BIN = ROOT / "examples", Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
HOROVODRUN = [str(BIN / "horovodrun"), "--gloo", "-np", "2"]
LIMIT = 200


def start(command, log):
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        command, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    )


def run(command, tmp_path):
    """What an example printed."""
    with (tmp_path / "log").open("w") as log:
        process = start([*map(str, command)], log)
        try:
            status = process.wait(LIMIT)
        finally:
            end(process.pid)
    output = (tmp_path / "log").read_text()
    assert status == 0, output
    return output


def figures(output):
    """Accuracy, and what stands behind it."""
    found = re.search(r"accuracy (\d\.\d+), (?:compression|lost) (\d+(?:\.\d+)?)", output)
    assert found, output
    return float(found[1]), float(found[2])


def needs(*libraries):
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            pytest.skip(
                f"{name} is not installed" + ("" if name == "horovod" else " (make examples)")
            )


def learns(command, tmp_path):
    """Chance has an accuracy of 0.1; and a tenth of the bytes are sent, or fewer."""
    accuracy, compression = figures(run(command, tmp_path))
    assert accuracy > 0.85 and compression > 10


def test_horovod(tmp_path):
    needs("horovod")
    learns([*HOROVODRUN, sys.executable, FOLDER / "with_horovod.py"], tmp_path)


def test_ddp_goes_on_from_its_checkpoint(tmp_path):
    command = [*TORCHRUN, "2", FOLDER / "with_ddp.py", tmp_path / "saved"]
    accuracy, compression = figures(run(command, tmp_path))
    assert accuracy > 0.85 and compression > 10
    # Nothing is left to be trained: as accurate, and no compression of what was not sent.
    assert f"accuracy {accuracy:.3f}\n" in run(command, tmp_path)


def test_fsdp2(tmp_path):
    learns([*TORCHRUN, "2", FOLDER / "with_fsdp2.py", "1"], tmp_path)


def test_local_steps(tmp_path):
    learns([*TORCHRUN, "2", FOLDER / "with_local_steps.py"], tmp_path)


def test_elastic_when_a_worker_is_killed(tmp_path):
    needs("horovod")
    command = [
        *HOROVODRUN,
        "--min-np",
        "1",
        "-H",
        "localhost:1,127.0.0.1:1",
        sys.executable,
        str(FOLDER / "with_elastic.py"),
    ]
    path, deadline = tmp_path / "log", time.monotonic() + LIMIT
    with path.open("w") as log:
        process = start(command, log)
        try:
            while "step 100 of 2" not in path.read_text():
                assert process.poll() is None and time.monotonic() < deadline, path.read_text()
                time.sleep(0.05)
            workers = [
                worker
                for worker in psutil.Process(process.pid).children(recursive=True)
                if any("with_elastic.py" in word for word in worker.cmdline())
                and worker.environ().get("HOROVOD_RANK") == "1"
                and "python" in Path(worker.exe()).name
            ]
            workers[-1].send_signal(signal.SIGKILL)
            status = process.wait(max(1.0, deadline - time.monotonic()))
        finally:
            end(process.pid)
    output = path.read_text()
    assert status == 0 and "step 300 of 1" in output, output
    accuracy, lost = figures(output)
    assert accuracy > 0.85 and lost == 1


@pytest.mark.parametrize(
    ("name", "libraries"),
    [
        ("with_lightning", ["lightning"]),
        ("with_accelerate", ["accelerate"]),
        ("with_trainer", ["accelerate", "transformers"]),
    ],
)
def test_a_framework(name, libraries, tmp_path):
    needs(*libraries)
    learns([*TORCHRUN, "2", FOLDER / f"{name}.py"], tmp_path)


def test_ray(tmp_path):
    needs("ray")
    # Which starts the two processes itself.
    learns([sys.executable, FOLDER / "with_ray.py"], tmp_path)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_it_fits_on_a_screen(path):
    assert len(path.read_text().splitlines()) <= 60
