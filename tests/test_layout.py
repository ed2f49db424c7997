"""The shape of the house: who may import whom, and what importing the package brings along."""

import ast
import subprocess
import sys
from pathlib import Path

import dgc

ROOMS = ["config", "schedule", "residual", "select", "wire", "cost", "kernels", "compressor", "transport", "agree",
         "fsdp", "pace", "packing", "beside", "optimizer", "checkpoint", "ddp", "elastic", "plan", "watch", "tune",
         "doctor", "cli", "__main__"]
PACKAGE = Path(dgc.__file__).parent


def imports(file):
    """Rooms of the package that a file imports when it is loaded, not within a function."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dgc":
            names = node.module.split(".")[1:2] or [alias.name for alias in node.names]
            found.update(names)
    return found


def test_imports_point_up():
    files = {file.stem: [file] for file in PACKAGE.glob("*.py") if file.stem != "__init__"}
    for folder in ("kernels", "transport"):
        files[folder] = list((PACKAGE / folder).glob("*.py"))
    assert sorted(files) == sorted(ROOMS)
    for room, sources in files.items():
        for source in sources:
            allowed = set(ROOMS[:ROOMS.index(room)]) | ({room} if room in ("kernels", "transport") else set())
            assert imports(source) <= allowed, source


def test_importing_brings_no_optional_package():
    code = ("import sys, dgc, dgc.tune; "
            "print([m for m in ('horovod', 'numba', 'triton', 'rich', 'matplotlib', 'typer', 'optuna') "
            "if m in sys.modules])")
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert output.stdout.strip() == "[]"
