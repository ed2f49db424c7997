"""For whom: models that torch's ``fully_shard`` has split over the ranks of a node (FSDP2; with it, hybrid sharding).

``fully_shard`` averages within the node and leaves each rank the part of the gradient that belongs to its shard; it
calls the hooks of ``Tensor.register_post_accumulate_grad_hook`` with it, as autograd does for a whole parameter. So a
shard is a parameter like any other: u and v are those of the shard, and it is exchanged among the ranks that hold the
same one, one in each node. Whether it travels compressed is decided by the size of the whole, alike for all shards.

``FSDPModule.set_all_reduce_hook`` would be given a module's gradients as one padded buffer, in the dtype of the
reduction and before the last division, and not be told whose they are; and it is refused where a module has several
meshes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dgc.config import Config


def local(tensor: Any) -> Any:
    """This rank's part of what is sharded, in the same memory; anything else as it is."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def shard(parameter: Tensor) -> tuple[int, int] | None:
    """Which shard of a parameter this rank has, and of how many; None if the parameter is whole."""
    mesh = getattr(parameter, "device_mesh", None)
    return None if mesh is None else (mesh.get_local_rank(), mesh.size())


def sum_of_shards(value: Tensor, parameter: Tensor) -> Tensor:
    """The sum of what the ranks with the other shards have; they all call this."""
    if shard(parameter) is not None:
        torch.distributed.all_reduce(value, group=parameter.device_mesh.get_group())  # type: ignore[attr-defined]
    return value


def check(parameters: Iterable[Tensor], process_set: Any, config: Config, grad_scaler: Any = None) -> None:
    """Refuses parameters that are sharded otherwise than within a node, and an exchange among different shards.

    Raises:
        ValueError, TypeError: says what is accepted.
    """
    parameters = list(parameters)
    sharded: list[Any] = [p for p in parameters if hasattr(p, "device_mesh")]
    if not sharded:
        return
    if grad_scaler is not None and torch.__version__ < "2.5":  # compares as a version
        raise ValueError(f"grad_scaler is given and the parameters are sharded, whose hooks torch {torch.__version__} "
                         "does not call, so that backward() ends without an exchange; accepted: torch 2.5 or later")
    accepted = ("accepted: fully_shard(model, mesh=mesh['shard']) and process_set=mesh['across'].get_group(), with "
                "mesh = init_device_mesh(device, (nodes, ranks in a node), mesh_dim_names=('across', 'shard'))")
    if len(sharded) < len(parameters):
        shapes = [tuple(p.shape) for p in parameters if not hasattr(p, "device_mesh")]
        raise ValueError(f"{len(sharded)} parameters are sharded and others, of shapes {shapes[:5]}, are not, whose "
                         "gradients nobody averages within the node; accepted: all of them sharded, or none")
    for p in sharded:
        if p.device_mesh != sharded[0].device_mesh or p.device_mesh.ndim != 1 or not p.placements[0].is_shard():
            raise ValueError(f"a parameter of shape {tuple(p.shape)} is placed as {p.placements} on {p.device_mesh}; "
                             f"{accepted}")
    if config.clip_per_tensor:
        raise ValueError("Config: clip_per_tensor is True and the parameters are sharded, so that no rank has a whole "
                         "one's norm; accepted: clip_norm alone, a bound on the norm of all gradients")
    if config.hierarchical is True:
        raise ValueError("Config: hierarchical is True and the parameters are sharded, so that each node averages its "
                         "gradients already; accepted: False or 'auto', which is False there")
    groups = torch.distributed
    if process_set is groups.GroupMember.NON_GROUP_MEMBER:
        return
    if not isinstance(process_set, groups.ProcessGroup):
        raise TypeError(f"process_set is {process_set!r} and the parameters are sharded; {accepted}")
    node, across = sharded[0].device_mesh.mesh.tolist(), groups.get_process_group_ranks(process_set)
    if set(node) & set(across) != {groups.get_rank()}:
        raise ValueError(f"process_set has ranks {across}, and ranks {node} hold different shards of the parameters; "
                         f"{accepted}")
