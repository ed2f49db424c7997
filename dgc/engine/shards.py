"""Parameters that torch's ``fully_shard`` has split over the ranks of a node (FSDP2; with it, hybrid sharding).

``fully_shard`` averages within the node and leaves each rank the part of the gradient that belongs to its shard; it
calls the hooks of ``Tensor.register_post_accumulate_grad_hook`` with it, as autograd does for a whole parameter. So a
shard is a parameter like any other: u and v are those of the shard, and it is exchanged among the ranks that hold the
same one, one in each node. Whether it travels compressed is decided by the size of the whole, alike for all shards.

``FSDPModule.set_all_reduce_hook`` would be given a module's gradients as one padded buffer, in the dtype of the
reduction and before the last division, and not be told whose they are; and it is refused where a module has several
meshes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def local(tensor: Any) -> Any:
    """This rank's part of a sharded tensor, in the same memory; a complex one as real numbers, (*shape, 2); any other
    tensor, and None, as it is.
    """
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            tensor = tensor.to_local()
    if tensor is None or tensor.is_sparse or not tensor.is_complex():
        return tensor
    with torch.no_grad():
        return torch.view_as_real(tensor)


def shard(parameter: Tensor) -> tuple[int, int] | None:
    """The number of this rank's shard, and how many there are; None if the parameter is whole."""
    mesh = getattr(parameter, "device_mesh", None)
    return None if mesh is None else (mesh.get_local_rank(), mesh.size())


def sum_of_shards(value: Tensor, parameter: Tensor) -> Tensor:
    """The sum of a value over the ranks with the other shards; they all call this."""
    if shard(parameter) is not None:
        torch.distributed.all_reduce(value, group=parameter.device_mesh.get_group())  # type: ignore[attr-defined]
    return value
