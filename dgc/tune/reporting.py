"""Reports of a training after each epoch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from dgc.transport import find
from dgc.tune.trial import Heard

REPORTS = "DGC_TUNE_REPORTS"  # the environment variable that names a trial's file of reports
RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK")

_heard: Heard | None = None  # by the search that runs in this process


def report(epoch: int, metric: float, bytes_sent: float) -> None:
    """Says what training has reached; to be called after each epoch. Without a search it does nothing.

    Of several ranks only rank 0 is heard: of Horovod, torch.distributed or :mod:`dgc.lockstep`, where one of them is
    initialised; else by the environment of horovodrun, Open MPI or torchrun.

    Args:
        epoch: from 1.
        metric: what is searched for: an accuracy, a loss.
        bytes_sent: by this worker since training began; ``optimizer.report().total_bytes_sent``.
    """
    if (_heard is None and REPORTS not in os.environ) or not _is_first():
        return
    epoch, metric, bytes_sent = int(epoch), float(metric), float(bytes_sent)
    if _heard is not None:
        _heard(epoch, metric, bytes_sent)
    else:
        with open(os.environ[REPORTS], "a") as file:
            file.write(json.dumps({"epoch": epoch, "metric": metric, "bytes": bytes_sent}) + "\n")


def _is_first() -> bool:
    """Whether this is rank 0, as what is initialised has it; else as this process was launched."""
    try:
        world = find().world
    except RuntimeError:  # nothing is
        return next((os.environ[name] == "0" for name in RANKS if os.environ.get(name, "").isdecimal()), True)
    return world is None or world.rank == 0


@contextmanager
def hearing(heard: Heard) -> Iterator[None]:
    """Passes on what is reported in this process."""
    global _heard
    _heard = heard
    try:
        yield
    finally:
        _heard = None
