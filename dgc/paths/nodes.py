"""Nodes that exchange as one: the mean of their ranks' gradients, and collectives with one
contributor a node.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
from torch import Tensor

from dgc.collective import Collective, Operation, World


def average_in_node(
    gradients: Mapping[str, Tensor], dtype: torch.dtype, world: World
) -> Generator[Collective, Tensor, dict[str, Tensor]]:
    """The mean of the gradients of a node's ranks. It comes before the path of a bucket, where
    nodes are the contributors.

    Args:
        gradients: parameter -> this rank's, of one device; they are not changed.
        dtype: in which they are added up.
        world: this rank and its node.

    Returns:
        parameter -> mean, of its gradient's shape, to the bit alike on all ranks of the node.
    """
    flat = torch.cat([g.detach().to(dtype).reshape(-1) for g in gradients.values()])
    total = (yield Collective("all_reduce", flat, group="intra_node")).div_(world.node_size)
    parts = total.split([g.numel() for g in gradients.values()])
    return {
        name: part.view(g.shape) for (name, g), part in zip(gradients.items(), parts, strict=True)
    }


def among_nodes(
    op: Operation, tensor: Tensor, world: World
) -> Generator[Collective, Tensor, Tensor]:
    """A collective with one contributor from each node, of a tensor that all ranks of a node have
    alike. Each of them carries a stripe of it, so that no byte passes between two nodes twice.
    """
    if world.node_size == 1:
        return (yield Collective(op, tensor))
    if op == "all_to_all":
        return (yield from _rows_among_nodes(tensor, world))
    numel, stripe = tensor.numel(), -(-tensor.numel() // world.node_size)
    padded = torch.nn.functional.pad(tensor, (0, stripe * world.node_size - numel))
    own = padded[world.local_rank * stripe : (world.local_rank + 1) * stripe].clone()
    part = yield Collective(op, own, group="inter_node")
    parts = yield Collective("all_gather", part, group="intra_node")
    if op == "all_gather":
        return parts.transpose(0, 1).reshape(world.nodes, -1)[:, :numel].contiguous()
    return parts.view(-1)[:numel]


def _rows_among_nodes(tensor: Tensor, world: World) -> Generator[Collective, Tensor, Tensor]:
    """An all-to-all of rows (R, nbytes): a stripe of each row is carried by each rank of a node."""
    nbytes = tensor.shape[1]
    stripe = -(-nbytes // world.node_size)
    padded = torch.nn.functional.pad(tensor, (0, stripe * world.node_size - nbytes))
    own = padded[:, world.local_rank * stripe : (world.local_rank + 1) * stripe].contiguous()
    part = yield Collective("all_to_all", own, group="inter_node")
    parts = yield Collective("all_gather", part, group="intra_node")
    return parts.transpose(0, 1).reshape(len(tensor), -1)[:, :nbytes].contiguous()
