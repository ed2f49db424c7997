"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally; ICLR 2018) for PyTorch, over Horovod or torch.distributed."""

from importlib import import_module
from typing import Any

from dgc.checkpoint import Residuals, load_checkpoint, save_checkpoint
from dgc.config import Average, Config, Sum
from dgc.engine.ledger import Report
from dgc.frontends.broadcast import broadcast_parameters
from dgc.frontends.ddp import register_comm_hook
from dgc.frontends.optimizer import DistributedOptimizer
from dgc.schedule import adaptive, constant, dense_until, piecewise, warmup
from dgc.transport import lockstep
from dgc.version import __version__

__all__ = ["Average", "Config", "DistributedOptimizer", "Report", "Residuals", "Sum", "__version__", "adaptive",
           "broadcast_parameters", "constant", "dense_until", "load_checkpoint", "lockstep", "piecewise",
           "register_comm_hook", "save_checkpoint", "warmup"]


def __getattr__(name: str) -> Any:
    if name == "elastic":  # which needs Horovod, unlike the rest
        return import_module("dgc.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
