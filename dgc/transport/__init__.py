"""Transports: Horovod, torch.distributed, or N ranks within one process."""

from __future__ import annotations

import sys
from typing import Any

from dgc.transport.run import ProcessSet, Transport, Wait

__all__ = ["NotInitializedError", "ProcessSet", "Transport", "Wait", "find"]


class NotInitializedError(RuntimeError, ValueError):
    """Neither Horovod, which raises a ValueError for it, nor torch.distributed is initialised."""


def find(process_set: ProcessSet = None) -> Transport:
    """The transport of what is initialised: a lockstep rank, else Horovod, else torch.distributed.

    Args:
        process_set: a ``horovod.torch.ProcessSet`` or a ``torch.distributed.ProcessGroup``
            restricts the exchange, and decides between the two; None means all processes.

    Raises:
        RuntimeError: nothing is initialised.
        TypeError: ``process_set`` is neither.
        ValueError: Horovod was initialised for this process alone, and torch.distributed for
            several.
    """
    from dgc.transport import lockstep

    if process_set is None and (rank := lockstep.current()) is not None:
        return rank
    # Not imported here: if the user initialised Horovod, it is loaded, and if not, it is not
    # wanted.
    horovod: Any = sys.modules.get("horovod.torch")
    distributed: Any = sys.modules.get("torch.distributed")
    has_horovod = horovod is not None and horovod.is_initialized()
    has_distributed = (
        distributed is not None and distributed.is_available() and distributed.is_initialized()
    )
    if (
        has_horovod
        and has_distributed
        and process_set is None
        and 1 == horovod.size() < distributed.get_world_size()
    ):
        raise ValueError(
            "process_set must say whether Horovod, with 1 process, or torch.distributed, with "
            f"{distributed.get_world_size()}, exchanges gradients, got None (leave hvd.init() out, or "
            "give torch.distributed.group.WORLD)"
        )
    if has_horovod and (process_set is None or isinstance(process_set, horovod.ProcessSet)):
        from dgc.transport.horovod import Horovod

        return Horovod(process_set)
    # NON_GROUP_MEMBER is what torch.distributed.new_group gives the processes outside.
    if has_distributed and (
        process_set is None
        or isinstance(process_set, distributed.ProcessGroup)
        or process_set is distributed.GroupMember.NON_GROUP_MEMBER
    ):
        from dgc.transport.torch_dist import TorchDistributed

        return TorchDistributed(process_set)
    if has_horovod or has_distributed:
        raise TypeError(
            "process_set must be None, a ProcessSet of an initialised Horovod, or a "
            f"torch.distributed.ProcessGroup, got {process_set!r}"
        )
    raise NotInitializedError(
        "nothing to exchange gradients over: call hvd.init() of horovod.torch, or "
        "torch.distributed.init_process_group(), or run inside dgc.lockstep.run(), before this"
    )
