"""A search for a schedule and a clipping, over trainings by somebody's own script or by a Python function.

A script calls :func:`report` after each epoch. One that is not Python appends lines such as ``{"epoch": 1, "metric":
63.5, "bytes": 201234}`` to the file that the environment variable ``DGC_TUNE_REPORTS`` names. The last report is the
trial's result, unless the command has ``{out}``: then the JSON file that the script writes there is.
docs/guides/search.md says what is searched, and what it is compared with.
"""

from dgc.tune.study import draw, search
from dgc.tune.trial import REPORTS, NoResultError, Setting, report

__all__ = ["REPORTS", "NoResultError", "Setting", "draw", "report", "search"]
