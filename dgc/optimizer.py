"""The import path of the optimizer, which scripts and pickles have: all of it is in :mod:`dgc.frontends`."""

from dgc.config import Average, Sum
from dgc.engine.report import Report
from dgc.frontends.broadcast import broadcast_parameters
from dgc.frontends.facade import Distributed
from dgc.frontends.optimizer import DistributedOptimizer, _rebuild
from dgc.frontends.optimizer import Shared as _Shared

__all__ = ["Average", "Distributed", "DistributedOptimizer", "Report", "Sum", "_Shared", "_rebuild",
           "broadcast_parameters"]
