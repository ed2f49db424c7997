"""Running the recipes, in processes and within this one."""

import os
import subprocess
import sys
from pathlib import Path

import torch
import typer
from launch import end
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

BIN = Path(sys.executable).parent


def recipe(*arguments, launcher=(), limit=200, file="cifar10.py", data="digits"):
    """Runs a recipe and returns its output; ends it after ``limit`` seconds."""
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [
        *launcher,
        str(ROOT / "recipes" / file),
        "--data",
        data,
        "--threads",
        "1",
        *arguments,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        output, _ = process.communicate(timeout=limit)
    finally:
        end(process.pid)
    return process.returncode, output


def refused(*arguments):
    """What the CIFAR-10 recipe says, within this process, as it ends with a wrong usage's status."""
    import cifar10

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(cifar10.main)
    ended = CliRunner().invoke(app, ["--data", "digits", "--threads", "1", *arguments])
    assert ended.exit_code == 2, ended.output
    return flat(ended.output)


def flat(output):
    """Without the frame and the lines of typer's errors."""
    return " ".join(output.replace("│", " ").split())


LAUNCHERS = {
    "python": (sys.executable,),
    "horovodrun": (str(BIN / "horovodrun"), "--gloo", "-np", "2", sys.executable),
    "torchrun": (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ),
}


def saved(folder, rank):
    """A rank's part of a checkpoint, with what is common."""
    files = [next(folder.glob(f"{name}-*.pt")) for name in ("common", f"rank-{rank}")]
    common, own = (torch.load(file, weights_only=True) for file in files)
    return {**common, **own}


def flattened(tree, name=""):
    if isinstance(tree, (dict, list)):
        tree = tree if isinstance(tree, dict) else dict(enumerate(tree))
        return [item for key, value in tree.items() for item in flattened(value, f"{name}.{key}")]
    return [] if tree is None else [(name, torch.as_tensor(tree))]
