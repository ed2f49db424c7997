"""What numba compiles is kept for other processes, and is what they compiled, whatever others did meanwhile."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
JIT = Path(__file__).parents[2] / "dgc" / "compression" / "kernels" / "jit.py"

MODULE = """
import importlib.util
import sys
import numpy as np
spec = importlib.util.spec_from_file_location("jit", sys.argv[1])  # without the package, which waits for torch
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

@module.jit()
def half(x):
    return x[0] / 2

for dtype in sys.argv[2:]:
    print(half(np.full(2, 3, dtype)), sum(half.stats.cache_hits.values()))
"""


def run(folder, *dtypes, **environment):
    """What a process of its own prints: of each dtype, half of 3, and how many signatures were loaded so far."""
    done = subprocess.run(
        [sys.executable, str(folder / "halves.py"), str(JIT), *dtypes],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()], done.stderr


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "halves.py").write_text(MODULE)
    return tmp_path


def kept(folder):
    return sorted(path for path in (folder / "__pycache__").iterdir() if "half" in path.name)


def test_what_one_process_compiles_another_loads(folder):
    assert run(folder, "float32", "int32")[0] == [["1.5", "0"], ["1.5", "0"]]
    assert run(folder, "int32", "float32")[0] == [["1.5", "1"], ["1.5", "2"]]


def test_processes_that_did_not_see_one_another_write_different_files(folder):
    """As where both found nothing when they began. numba's own names are the same for both: the index of one may stay
    with the code of the other, and half of 3 is 2e-45.
    """
    run(folder, "float32")
    first = {path.name: path.read_bytes() for path in kept(folder)}
    shutil.rmtree(folder / "__pycache__")
    run(folder, "int32")
    assert first and not first.keys() & {path.name for path in kept(folder)}
    for name, content in first.items():
        (folder / "__pycache__" / name).write_bytes(content)
    assert run(folder, "float32", "int32")[0] == [["1.5", "1"], ["1.5", "2"]]


@pytest.mark.long
def test_what_is_damaged_is_compiled_again(folder):
    """Nothing is left of one, one is cut, one is garbage, and one is that of another signature."""
    dtypes = "float32", "float64", "int32", "int64"
    run(folder, *dtypes)
    # As compiled.
    empty, cut, garbage, other = sorted(kept(folder), key=lambda path: path.stat().st_mtime_ns)
    shutil.copy(cut, other)
    empty.write_bytes(b"")
    cut.write_bytes(cut.read_bytes()[:-100])
    garbage.write_bytes(b"\x80\x05nothing")
    assert run(folder, *dtypes)[0] == [["1.5", "0"]] * 4
    assert run(folder, *dtypes)[0] == [["1.5", str(i + 1)] for i in range(4)]


def test_changed_source_is_compiled_again(folder):
    run(folder, "float32")
    (folder / "halves.py").write_text(MODULE.replace("/ 2", "/ 4"))
    assert run(folder, "float32")[0] == [["0.75", "0"]]


@pytest.mark.long
def test_a_constant_of_another_file_is_compiled_in_anew(folder):
    (folder / "two.py").write_text("TWO = 2")
    (folder / "halves.py").write_text(
        MODULE.replace("import sys\n", "import sys\nimport two\n")
        .replace("jit()", "jit((module.Path(two.__file__),))")
        .replace("/ 2", "/ two.TWO")
    )
    assert run(folder, "float32")[0] == [["1.5", "0"]]
    assert run(folder, "float32")[0] == [["1.5", "1"]]
    (folder / "two.py").write_text("TWO = 4.0")
    assert run(folder, "float32")[0] == [["0.75", "0"]]


def test_the_package_s_loops_know_where_their_constants_are():
    from dgc.compression import denominator, kernels, regions, residual, select, sizes, wire
    from dgc.compression.kernels import jit

    needed = {
        Path(module.__file__)
        for module in (sizes, denominator, kernels, regions, residual, select, wire)
    }
    assert needed <= set(jit.SOURCES)


def test_nowhere_to_write(folder):
    (folder / "__pycache__").write_text("no folder")
    nowhere = {
        "HOME": str(folder / "halves.py"),
        "XDG_CACHE_HOME": str(folder / "halves.py" / "cache"),
    }
    assert run(folder, "float32", "int32", **nowhere)[0] == [["1.5", "0"], ["1.5", "0"]]


UNWRITABLE = """
from numba.core import caching

def refuse(**_):
    raise PermissionError

caching.tempfile.TemporaryFile = refuse  # by which numba finds out, also for who may write everywhere
"""


@pytest.mark.long
def test_what_is_in_a_folder_that_cannot_be_written_is_loaded(folder):
    run(folder, "float32")
    (folder / "halves.py").write_text(
        MODULE.replace("import numpy as np\n", "import numpy as np\n" + UNWRITABLE)
    )
    changed = run(folder, "float32", "int32")[0]  # another source, of which nothing is there
    assert changed == [["1.5", "0"], ["1.5", "0"]] and len(kept(folder)) == 3
    assert run(folder, "float32", "int32")[0] == [["1.5", "1"], ["1.5", "2"]]


@pytest.mark.long
def test_the_package_s_own_folder_is_read_where_another_one_is_written(folder, tmp_path):
    run(folder, "float32")
    (tmp_path / "elsewhere").mkdir()
    elsewhere = {"NUMBA_CACHE_DIR": str(tmp_path / "elsewhere")}
    assert run(folder, "float32", "int32", **elsewhere)[0] == [["1.5", "1"], ["1.5", "1"]]
    assert len(kept(folder)) == 1 and len(list((tmp_path / "elsewhere").rglob("*.nbc"))) == 1


def test_a_folder_that_can_be_written_no_more(folder):
    gone = folder / "__pycache__"
    (folder / "halves.py").write_text(
        MODULE.replace(
            "for dtype",
            f"""
import pathlib, shutil
shutil.rmtree({str(gone)!r})
pathlib.Path({str(gone)!r}).write_text("no folder")
for dtype""",
        )
    )
    assert run(folder, "float32", "int32") == ([["1.5", "0"], ["1.5", "0"]], "")
