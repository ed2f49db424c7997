"""The import path of the hook of DistributedDataParallel, which scripts and pickles have."""

from dgc.frontends.ddp import _rebuild, register_comm_hook

__all__ = ["_rebuild", "register_comm_hook"]
