"""Parameters alike on all ranks, before a training begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dgc.collective import Collective
from dgc.engine.parameters import to_local
from dgc.transport import ProcessSet, find


def broadcast_parameters(
    params: Mapping[str, Any] | list[Any], root_rank: int = 0, process_set: ProcessSet = None
) -> None:
    """Copies the parameters of one rank to all others, like ``hvd.broadcast_parameters``, over
    Horovod or torch.distributed, whichever is initialised.

    Args:
        params: ``model.state_dict()``, a list of ``model.named_parameters()``, or a list of
            tensors.
        root_rank: the rank that is copied, within the process set.
        process_set: as for :func:`dgc.DistributedOptimizer`.

    Raises:
        ValueError: ``params`` is of another type or holds no tensors, or ``root_rank`` is not in
            the world.
    """
    if isinstance(params, Mapping):
        items = sorted(params.items())
    elif isinstance(params, list):
        items = [
            item if isinstance(item, tuple) else (str(i), item) for i, item in enumerate(params)
        ]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    if items and not any(isinstance(p, Tensor) for _, p in items):
        raise ValueError(
            "params must hold tensors, as model.state_dict() does, got none among "
            f"{', '.join(name for name, _ in items[:5])} (broadcast its parts one by one)"
        )
    transport = find(process_set)
    world = transport.world
    if world is None:
        return
    if not isinstance(root_rank, int) or not 0 <= root_rank < world.size:
        raise ValueError(
            f"root_rank must be an integer from 0 to {world.size - 1}, got {root_rank!r}"
        )
    with torch.no_grad():
        waits = []
        for name, p in items:
            if isinstance(p, Tensor):
                # Horovod takes no other.
                copy = to_local(p).detach().clone(memory_format=torch.contiguous_format)
                # Neither Horovod nor gloo knows every dtype.
                bits = copy.unsqueeze(-1).view(torch.uint8)
                waits.append(
                    (
                        p,
                        transport.start(
                            Collective("broadcast", bits, root_rank), f"dgc.broadcast.{name}"
                        ),
                    )
                )
        for p, wait in waits:
            to_local(p).copy_(wait().view(to_local(p).dtype).squeeze(-1))
