"""A method at work without a training: random gradients of the shapes of a task's model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gradients import heavy_tailed

from dgc.transport import find

from . import METHODS, Driver, attach
from .tasks import TASKS


def ready(a: dict[str, Any]) -> tuple[list[Tensor], Driver, Iterator[list[Tensor]]]:
    """A method at a rank: parameters, what drives their optimizer, and a gradient for each step."""
    task = TASKS[a["task"]]
    model, _ = task.rehearsal()
    optimizer = task.optimizer(model.parameters(), **task.settings(a["method"]))
    peer = attach(
        a["method"],
        optimizer,
        list(model.named_parameters()),
        0,
        METHODS[a["method"]].sparsity,
        task.clip,
    )
    parameters = list(model.parameters())
    return parameters, peer, heavy_tailed([p.shape for p in parameters], seed=find().world.rank)
