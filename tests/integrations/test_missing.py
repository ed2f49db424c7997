"""A framework that is not installed is an error that says how to install it."""

import importlib
import importlib.util
import re
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
def test_the_error_names_the_line(name, package, monkeypatch):
    if name == "transformers" and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed (make examples)")  # its error would come first
    for module in [package, *(m for m in sys.modules if m.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not there
    monkeypatch.delitem(sys.modules, f"dgc.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=re.escape(f"got none (pip install '{package}>=")):
        importlib.import_module(f"dgc.integrations.{name}")
