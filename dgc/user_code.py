"""The user's own code: a function, found by its name, whose errors are told apart from ours; and
processes, ended.
"""

from __future__ import annotations

import importlib
import operator
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

GRACE_S = 10.0  # from SIGTERM to SIGKILL
NAME = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")  # module:callable


class TheirError(Exception):
    """An error of the user's own code, and where it was raised."""


@contextmanager
def theirs() -> Iterator[None]:
    """Around the user's own code."""
    here = os.getcwd()
    try:
        yield
    except (Exception, SystemExit) as error:  # a script that ends itself would end us, in silence
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [
            f for f in frames if f.filename.startswith(here) and "site-packages" not in f.filename
        ]
        place = "".join(
            f" ({f.filename.removeprefix(here + os.sep)}, line {f.lineno}, in {f.name})"
            for f in (own or frames)[-1:]
        )
        raise TheirError(f"{type(error).__name__}: {error}{place}") from error


def callable_named(name: str) -> Callable[..., Any]:
    """The object that ``module:name`` means, with modules of the current folder.

    Raises:
        ValueError: there is none, or it cannot be called.
        TheirError: by the module.
    """
    module, _, attributes = name.partition(":")
    here = os.getcwd()  # which the module may change
    sys.path.insert(0, here)
    try:
        with theirs():
            imported = importlib.import_module(module)
        found = operator.attrgetter(attributes)(imported)
    except AttributeError as error:
        raise ValueError(f"{name!r}; {error}") from None
    except TheirError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{module}.".startswith(
            f"{cause.name}."
        ):  # it, or its package
            raise ValueError(f"{name!r}; {cause}") from None
        raise
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise ValueError(f"{name!r} must be a callable, got a {type(found).__name__}")
    return found


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process group, also what a command that has ended left there."""
    for number in (
        signal.SIGTERM,
        signal.SIGKILL,
    ):  # a launcher passes the first one on to its workers
        with suppress(OSError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
