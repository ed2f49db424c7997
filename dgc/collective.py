"""Collectives among the ranks of a world: the requests of a path to a transport."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from torch import Tensor

T = TypeVar("T")
Operation = Literal["all_gather", "all_reduce", "broadcast", "all_to_all"]


@dataclass(frozen=True)
class Collective:
    """A request to the transport.

    Its result is, by ``op``:

    - ``all_gather``: every rank's tensor, stacked: (N, *shape), in the order of ranks.
    - ``all_reduce``: their sum, by ring allreduce. The tensor may be overwritten.
    - ``broadcast``: the root's tensor. The tensor may be overwritten.
    - ``all_to_all``: of tensors (N, *shape), each rank's row for this one, stacked: (N, *shape), in
      the order of ranks.
    """

    op: Operation
    tensor: Tensor
    root: int = 0  # a rank within the group; the transport translates it
    # world: all ranks; intra_node: those of this rank's node; inter_node: those with this rank's
    # local_rank, one in each node.
    group: Literal["world", "intra_node", "inter_node"] = "world"


@dataclass(frozen=True)
class World:
    """The ranks that exchange gradients, numbered node by node, and whether they average them.

    A node's ranks average their gradients before these are compressed: then each of them has the
    same u and v, and one contributes what one rank does otherwise. Of ``node_size`` 1, the default,
    each rank is a node of its own.
    """

    rank: int
    size: int
    node_size: int = 1
    average: bool = True  # sums over contributors are divided by their number

    @property
    def nodes(self) -> int:
        """How many contributors there are: the paper's N."""
        return self.size // self.node_size

    @property
    def node(self) -> int:
        """The contributor that this rank belongs to."""
        return self.rank // self.node_size

    @property
    def local_rank(self) -> int:
        return self.rank % self.node_size

    @property
    def without_nodes(self) -> World:
        """This world with each rank on its own, whatever nodes there are."""
        return replace(self, node_size=1)

    @property
    def divisor(self) -> float:
        """The divisor of the sum over nodes; where ranks are added up, a node's average counts once
        for each rank.
        """
        return self.nodes if self.average else 1 / self.node_size

    def members(self, group: str) -> range:
        """The ranks of a group of a :class:`Collective`."""
        if group == "intra_node":
            first = self.node * self.node_size
            return range(first, first + self.node_size)
        return (
            range(self.local_rank, self.size, self.node_size)
            if group == "inter_node"
            else range(self.size)
        )

    def partition(self, group: str) -> list[range]:
        """All groups of one kind, ``intra_node`` or ``inter_node``: each rank is in one of them."""
        firsts = (
            range(0, self.size, self.node_size) if group == "intra_node" else range(self.node_size)
        )
        return [World(first, self.size, self.node_size).members(group) for first in firsts]


# The way of a bucket; most return an update (dgc.paths.averaged).
Path = Generator[Collective, Tensor, T]


class AbortedError(Exception):
    """Thrown into a path that is aborted, which restores v.

    A path that is collected as garbage gets a GeneratorExit instead, and leaves everything as it
    is: that may be as the interpreter ends, when torch aborts the process if it is asked for a
    view.
    """


def sent_bytes(collective: Collective, world: World) -> float:
    """Bytes that one rank puts on the wire: ring all-gather (N-1) M, ring allreduce 2 (N-1)/N M; of
    a broadcast, which all but one receive once, each rank's part, (N-1)/N M; of an all-to-all all rows
    but its own, (N-1)/N M.
    """
    n = len(world.members(collective.group))
    others = (n - 1) / n
    return {
        "all_gather": n - 1,
        "all_reduce": 2 * others,
        "broadcast": others,
        "all_to_all": others,
    }[collective.op] * collective.tensor.nbytes


def dense_bytes(numel: int, size: int) -> float:
    """Bytes that one of so many ranks puts on the wire for a ring allreduce of so many entries in
    float32.
    """
    return 2 * (size - 1) / size * 4 * numel
