"""The scripts that a newcomer runs first."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dgc
from dgc.version import __version__

ROOT = Path(__file__).parent.parent


def build(*arguments, path=None, python=sys.executable, cache="/nonexistent", **variables):
    """Runs scripts/build_horovod.sh, which must stop before it builds anything."""
    environment = {
        **os.environ,
        "PYTHON": python,
        "CACHE": str(cache),
        "PATH": path or os.environ["PATH"],
        **variables,
    }
    environment.pop("CXX", None)
    done = subprocess.run(
        [shutil.which("bash"), str(ROOT / "scripts" / "build_horovod.sh"), *arguments],
        text=True,
        capture_output=True,
        timeout=100,
        env=environment,
    )
    return done.returncode, done.stdout + done.stderr


def test_all_that_is_missing_is_said_at_once(tmp_path):
    for tool in ("dirname", "basename"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    status, output = build(path=str(tmp_path))
    assert status == 1
    assert "cannot build Horovod 0.28.1; missing:" in output
    assert (
        "a C++17 compiler: apt-get install g++" in output and "make: apt-get install make" in output
    )


def test_without_torch_it_says_how_to_get_it(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")],
        check=True,
        timeout=100,
    )
    python = str(tmp_path / "venv" / "bin" / "python")
    status, output = build(python=python)
    assert status == 1 and f"torch in {python}: {python} -m pip install torch" in output


def test_a_gpu_build_of_a_cpu_torch_is_refused():
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("torch is a CUDA build")
    status, output = build("--gpu")
    assert status == 1
    assert (
        f"a CUDA build of torch ({torch.__version__} is for the CPU), or leave --gpu out" in output
    )


def test_a_cuda_build_of_torch_needs_its_toolkit_and_packages_are_asked_for_at_once(tmp_path):
    """Also for gloo: torch's CMake files ask for it."""
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace as S\n__version__ = '2.14.1+cu130'\n"
        "version, cuda = S(cuda='13.0'), S(is_available=lambda: False)\n"
    )
    for name in ("cffi", "wheel"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")
    status, output = build("--cpu", PYTHONPATH=str(tmp_path), CUDA_HOME=str(tmp_path))
    assert status == 1 and "pip install wheel cffi\n" in output
    if not shutil.which("nvcc"):
        assert (
            "nvcc, as torch 2.14.1+cu130 is a CUDA build: install the toolkit for CUDA 13.0"
            in output
        )


def test_without_a_home_it_goes_on(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert "scripts/build_horovod.sh [--cpu | --gpu]" in build("--help", cache="")[1]


def test_wrong_arguments():
    status, output = build("--fast")
    assert status == 1 and "the argument must be --cpu or --gpu, got '--fast'" in output
    status, output = build(python="/nowhere/python")
    assert status == 1 and "PYTHON=/nowhere/python is not an executable" in output
    assert "scripts/build_horovod.sh [--cpu | --gpu]" in build("--help")[1]


def project():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_one_everywhere():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    changed = re.search(
        r"^## (?:Unreleased: )?(\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )[1]
    assert {project()["version"], cited, changed} == {__version__}


def test_what_is_loaded_late_is_listed_too():
    assert {*dgc.__all__, "elastic", "tune"} <= set(dir(dgc))
    assert all(hasattr(dgc, name) for name in dgc.__all__)


def test_no_extra_asks_for_the_other_project_of_the_index():
    extras = [line for lines in project()["optional-dependencies"].values() for line in lines]
    own = {line.partition("[")[0] for line in extras if re.match(r"(dgc|deep)", line)}
    assert own == {project()["name"]} != {"dgc"}
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *(ROOT / "dgc").rglob("*.py")):
        wrong = [
            line
            for line in page.read_text().splitlines()
            if re.search(r"pip install (-\S+ )*['\"]?dgc\b", line)
        ]
        assert all(
            "not `pip install dgc`" in line or "installs something else" in line for line in wrong
        ), wrong
