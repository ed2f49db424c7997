"""The core of the test suite on other versions of Python and torch than ``make test`` has. CI does not run it.

    pip install nox && nox                        # every pair whose Python is on the PATH; the others are skipped
    nox -s "core(python='3.10', torch='2.4.0')"   # one pair

The core is what needs neither Horovod nor an optional framework. Plain pip may fetch CUDA builds of torch, several GB
each.
"""

import nox

nox.options.stop_on_first_error = False
OLDEST, NEWEST = "2.4.0", "2.13.0"  # that pyproject.toml promises; that constraints.txt pins
PAIRS = {
    "3.10": (OLDEST, NEWEST),
    "3.11": (OLDEST,),
    "3.12": (OLDEST, NEWEST),
    "3.13": (NEWEST,),
}  # 3.11: make test
TOOLS = ("numba", "hypothesis", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "typer")
CORE = (
    "test_laws.py",
    "test_config.py",
    "test_schedule.py",
    "test_cost.py",
    "test_trace.py",
    "compression",
    "paths",
    "engine",
    "checkpoint",
    "transport",
    "frontends/test_ddp.py",
    "frontends/test_wrapping.py",
    "frontends/test_checks.py",
)
LATER = (
    "compression/test_kernels_cuda.py",
    "compression/test_asynchronous.py",
    "compression/test_denominator.py::test_compiled_for_a_gpu",  # these: more than Triton 3.0 interprets
    "engine/test_shards.py",
)  # imports fully_shard from where torch 2.4 does not have it yet
NEEDING_HOROVOD = "horovod or join_is_an_error"


@nox.session
@nox.parametrize(
    ("python", "torch"), [(python, torch) for python, pair in PAIRS.items() for torch in pair]
)
def core(session: nox.Session, torch: str) -> None:
    """Installs the package beside this torch, and runs the core of the tests, or those that are given after ``--``."""
    arrays = (
        ["numpy<2"] if torch == OLDEST else []
    )  # with NumPy 2 the interpreter of its Triton, 3.0, stores nothing
    session.install(f"torch=={torch}", *TOOLS, *arrays)
    session.install("--no-deps", ".")
    tests = session.posargs or [f"tests/{name}" for name in CORE]
    later = LATER if torch == OLDEST else ()
    left_out = [f"--{'deselect' if '::' in name else 'ignore'}=tests/{name}" for name in later]
    session.run(
        "python",
        "-m",
        "pytest",
        *tests,
        *left_out,
        "-k",
        f"not ({NEEDING_HOROVOD})",
        "--durations=5",
        env={"OMP_NUM_THREADS": "1"},
    )
