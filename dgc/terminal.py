"""What the commands share: options, and how they print."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import Annotated

import typer
from rich.console import Console

from dgc.user_code import NAME

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@contextmanager
def usage(option: str) -> Iterator[None]:
    """Tells what is wrong with an argument as a usage error."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def importable(name: str) -> None:
    """Puts the current folder where modules are looked for, for good: a function may import when it
    is called.
    """
    if NAME.fullmatch(name):
        sys.path.insert(0, os.getcwd())


def aside(as_json: bool) -> AbstractContextManager[object]:
    """Keeps what the user's own code prints out of the JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def console() -> Console:
    """Everything as it is written: an error's [/path] is no markup."""
    told = sys.stdout.isatty() or "COLUMNS" in os.environ  # how wide it is
    return Console(width=None if told else 120, markup=False, emoji=False)


def size(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return (
                f"{nbytes / size:,.3g} {unit}"
                if nbytes < 1e3 * size
                else f"{nbytes / size:,.0f} {unit}"
            )
    return f"{nbytes:.0f} B"
