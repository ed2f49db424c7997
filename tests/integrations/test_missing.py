"""A framework that is not installed is an error that says how to install it."""

import importlib.util
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("lightning", "lightning"),
        ("fabric", "lightning"),
        ("accelerate", "accelerate"),
        ("transformers", "transformers"),
    ],
)
def test_the_error_names_the_line(name, package):
    if name == "transformers" and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed (make examples)")  # its error would come first
    # None: as if it were not there
    code = f"import sys; sys.modules[{package!r}] = None; import dgc.integrations.{name}"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 1 and f"got none (pip install '{package}>=" in process.stderr
