"""The shape of the house: who may import whom, how long a function may be, and what importing brings along."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import dgc

PACKAGE = Path(dgc.__file__).parent
LEAVES = {"version", "warn", "trace", "config", "collective"}
ROOMS = {  # room -> the rooms that it may import; docs/architecture.md says what is in each
    "version": set(),
    "warn": set(),
    "trace": set(),
    "drawing": set(),
    "config": {"schedule"},
    "collective": set(),
    "schedule": set(),
    "user_code": set(),
    "terminal": {"user_code"},
    "compression": {"warn", "trace", "config"},
    "paths": {"warn", "trace", "config", "collective", "compression"},
    "transport": {"collective", "trace"},
    "engine": LEAVES | {"schedule", "compression", "paths", "transport"},
    "frontends": LEAVES | {"engine", "paths", "transport"},
    "elastic": {"engine"},
    "integrations": {"config", "warn", "frontends", "checkpoint"},
    "checkpoint": LEAVES | {"engine", "transport"},
    "plan": {
        "collective",
        "config",
        "compression",
        "drawing",
        "engine",
        "schedule",
        "terminal",
        "user_code",
    },
    "tune": {"config", "drawing", "transport", "user_code"},
    "doctor": {"version", "config", "compression", "frontends", "transport", "user_code"},
    "cli": {"terminal", "user_code", "plan", "tune", "doctor"},
    "__main__": {"cli"},
}
KERNELS = PACKAGE / "compression" / "kernels"  # whose loops are as long as what they fuse
FILES = sorted(PACKAGE.rglob("*.py"))


def module(file):
    """The name of a file's module, as parts."""
    parts = list(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    return tuple(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file, functions=False):
    """The modules of the package that a file imports when it is loaded; and within functions, where asked."""
    found, left = set(), list(ast.parse(file.read_text()).body)
    known = {module(other) for other in FILES}
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef) and not functions:
            continue
        left += ast.iter_child_nodes(node)
        paths = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are written in full"
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        for path in paths:
            parts = tuple(path.split("."))
            if parts[0] == "dgc":
                found.add(parts if parts in known else parts[:-1])
    return found


def test_every_room_has_a_rule():
    rooms = {file.stem for file in PACKAGE.glob("*.py")} | {
        file.parent.name for file in PACKAGE.glob("*/__init__.py")
    }
    assert rooms - {"__init__", PACKAGE.name} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room):
    files = (
        [PACKAGE / f"{room}.py"]
        if (PACKAGE / f"{room}.py").exists()
        else list((PACKAGE / room).rglob("*.py"))
    )
    for file in files:
        others = {parts[1] for parts in imports(file) if len(parts) > 1} - {room}
        assert others <= ROOMS[room], (
            f"{file.relative_to(PACKAGE)} imports {sorted(others - ROOMS[room])}"
        )


def test_there_is_no_circle():
    graph = {module(file): imports(file, functions=True) - {module(file)} for file in FILES}
    while graph:
        free = {name for name, needs in graph.items() if not needs & graph.keys()}
        assert free, f"these import one another: {sorted('.'.join(name) for name in graph)}"
        graph = {name: needs for name, needs in graph.items() if name not in free}


def length(function):
    """Lines of a function's body, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_a_function_can_be_seen_at_once():
    """How branched one is, and how many arguments it takes, ruff bounds (pyproject.toml)."""
    for file in FILES:
        for node in (
            ast.walk(ast.parse(file.read_text())) if not file.is_relative_to(KERNELS) else ()
        ):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert length(node) <= 60, f"{file}: the body of {node.name} has more than 60 lines"


def test_what_a_package_offers_is_there():
    for file in FILES:
        if "\n__all__" in file.read_text():
            package = importlib.import_module(".".join(module(file)))
            assert [name for name in package.__all__ if not hasattr(package, name)] == [], file


def test_importing_brings_no_optional_package():
    code = (
        "import sys, dgc, dgc.tune; "
        "print([m for m in ('horovod', 'numba', 'triton', 'rich', 'matplotlib', 'typer', 'optuna', 'lightning', "
        "'accelerate', 'transformers') "
        "if m in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert output.stdout.strip() == "[]"
