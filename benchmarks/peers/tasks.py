"""What methods are compared on.

A task is made by every rank. Model, data, order, batches and schedule are the recipe's, and so is what follows from a
seed: all methods see the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
from .metric import Metric
from .pictures import Pictures
from .sentences import Sentences
from .words import Words

TASKS: dict[str, Any] = {"cifar10": Pictures, "ptb": Words, "transformer": Sentences}


def folder(task: str) -> str:
    """Of its results."""
    return "peers" if task == "cifar10" else f"peers-{task}"


def metric_of(result: dict[str, Any]) -> Metric:
    """By which a training is judged, of what train.py wrote."""
    return TASKS[result["task"]].metric


def fits(task: str, method: str) -> bool:
    """Whether the method can train this; all can, where there is no such task, of which something else tells."""
    return task not in TASKS or TASKS[task].fits(method)


def settle(a: Any) -> None:
    """Gives options that were left out the task's values.

    Raises:
        typer.BadParameter: an option is not of this task.
    """
    if a.task not in TASKS:
        raise typer.BadParameter(f"--task must be one of {', '.join(TASKS)}, got {a.task}")
    defaults = TASKS[a.task].defaults
    for key in Pictures.defaults:
        if getattr(a, key) is None:
            setattr(a, key, defaults.get(key))
        elif key not in defaults:
            raise typer.BadParameter(
                f"--{key} must be left out with --task {a.task}, got {getattr(a, key)}"
            )
    if a.bf16 and a.task != "cifar10":
        raise typer.BadParameter(
            f"--bf16 must be left out with --task {a.task}, whose recipe has no autocast, got it"
        )
    if not TASKS[a.task].fits(a.method):
        raise typer.BadParameter(
            f"--method must be one that trains --task {a.task}, got {a.method} (train it on cifar10)"
        )
