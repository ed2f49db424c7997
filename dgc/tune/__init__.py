"""A search for a schedule and a clipping, over trainings by somebody's own script or by a Python function.

A script says what it has reached by calling :func:`report` after each epoch, which does nothing where no search runs.
Scripts that are not Python append lines such as ``{"epoch": 1, "metric": 63.5, "bytes": 201234}`` to the file that the
environment variable ``DGC_TUNE_REPORTS`` names: ``bytes`` are those that one worker has sent since training began. The
last report is the trial's result; or, where the command has the placeholder ``{out}``, the JSON object in that file,
with the metric under its name and the bytes as ``bytes_sent``.

Searched are the sparsity at the end (90 to 99.99 %, evenly in the logarithm of what is sent), with no warm-up, one in
four stages or one that falls at every step, a tenth to ten times as long as the paper's share of the training, and a
bound on the gradient's norm or none. Momentum factor masking follows from the sparsity: it is off at 99 % and less,
where it takes a good part of each step; in a command it is the placeholder ``{factor_masking}``. Two aims, the metric
and the bytes, make a multi-objective study of optuna with its TPE sampler, in an SQLite file. The first trial is the
paper's own: 99.9 % after four stages over 4 of 164 epochs. Another one is dense: what the others are to be held
against.
"""

from dgc.tune.reporting import REPORTS, report
from dgc.tune.result import Result, draw
from dgc.tune.study import search
from dgc.tune.trial import NoResultError, Setting, Task, Trial

__all__ = ["REPORTS", "NoResultError", "Result", "Setting", "Task", "Trial", "draw", "report", "search"]
