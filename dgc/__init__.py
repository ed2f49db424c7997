"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally; ICLR 2018) for PyTorch, over Horovod or
torch.distributed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dgc.config import Average, Config, Sum
from dgc.engine.report import Report
from dgc.frontends.broadcast import broadcast_parameters
from dgc.frontends.optimizer import DistributedOptimizer
from dgc.schedule import adaptive, constant, dense_until, piecewise, warmup
from dgc.version import __version__

if TYPE_CHECKING:
    from dgc.checkpoint import Residuals, load_checkpoint, save_checkpoint
    from dgc.frontends.ddp import register_comm_hook
    from dgc.transport import lockstep

__all__ = [
    "Average",
    "Config",
    "DistributedOptimizer",
    "Report",
    "Residuals",
    "Sum",
    "__version__",
    "adaptive",
    "broadcast_parameters",
    "constant",
    "dense_until",
    "load_checkpoint",
    "lockstep",
    "piecewise",
    "register_comm_hook",
    "save_checkpoint",
    "warmup",
]

# Imported where used: not every training needs them, and one of them needs Horovod.
_MODULES = {
    "checkpoint": "dgc.checkpoint",
    "elastic": "dgc.elastic",
    "lockstep": "dgc.transport.lockstep",
    "tune": "dgc.tune",
}
_NAMES = {
    "Residuals": "dgc.checkpoint",
    "load_checkpoint": "dgc.checkpoint",
    "save_checkpoint": "dgc.checkpoint",
    "register_comm_hook": "dgc.frontends.ddp",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_NAMES})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
