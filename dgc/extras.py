"""The optional packages of the command line, and the line that installs a missing one."""

from __future__ import annotations

EXTRAS = ("typer", "rich", "matplotlib", "optuna")


def missing_extra(error: BaseException) -> str | None:
    """The optional package that an import has failed for; None if it failed for something else."""
    package = (getattr(error, "name", None) or "").partition(".")[0]
    return package if isinstance(error, ImportError) and package in EXTRAS else None
