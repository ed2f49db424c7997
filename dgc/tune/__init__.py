"""A search for a schedule and a clipping, over trainings by somebody's own script.

A script calls :func:`report` after each epoch. One that is not Python appends lines such as
``{"epoch": 1, "metric": 63.5, "bytes": 201234}`` to the file that the environment variable
``DGC_TUNE_REPORTS`` names. The last report is the trial's result. docs/guides/search.md says what
is searched, and what it is compared with.
"""

from __future__ import annotations

import json
import math
import os

from dgc.transport import find

REPORTS = "DGC_TUNE_REPORTS"  # the environment variable that names a trial's file of reports


def report(epoch: int, metric: float, bytes_sent: float) -> None:
    """Tells ``dgc tune`` how far training is. Call it after each epoch. Without a search it does
    nothing.

    Every rank may call it. Only rank 0 of Horovod, torch.distributed or :mod:`dgc.lockstep` counts.

    Args:
        epoch: the number of the finished epoch, from 1.
        metric: the number that the search improves: an accuracy, a loss.
        bytes_sent: by this worker since training began; ``optimizer.report().total_bytes_sent``.

    Raises:
        ValueError: during a search, if the metric is not finite. This ends the trial.
    """
    if REPORTS not in os.environ:
        return
    try:
        world = find().world
    except RuntimeError:  # nothing is initialised: this process trains alone
        world = None
    if world is not None and world.rank > 0:
        return
    if not math.isfinite(metric):
        raise ValueError(f"metric must be finite, got {metric} at epoch {epoch}")
    line = json.dumps({"epoch": int(epoch), "metric": float(metric), "bytes": float(bytes_sent)})
    with open(os.environ[REPORTS], "a") as file:
        file.write(line + "\n")
