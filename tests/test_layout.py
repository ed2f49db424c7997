"""The shape of the house: who may import whom, and what importing the package brings along."""

import ast
import subprocess
import sys
from pathlib import Path

import dgc

ROOMS = ["warn", "config", "schedule", "residual", "select", "wire", "cost", "ahead", "kernels", "compressor",
         "transport", "agree", "fsdp", "pace", "packing", "beside", "optimizer", "checkpoint", "ddp", "elastic", "plan",
         "watch", "tune", "doctor", "cli", "__main__"]
PACKAGE = Path(dgc.__file__).parent


def imports(file):
    """Rooms of the package that a file imports when it is loaded, not within a function."""
    found, left = set(), list(ast.parse(file.read_text()).body)
    while left:
        node = left.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        left += ast.iter_child_nodes(node)
        paths = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are written in full"
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        found.update(path.split(".")[1] for path in paths if path.startswith("dgc."))
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
