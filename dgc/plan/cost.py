"""The cost of each way to add up gradients: rounds of messages, and the time that they take on
given links.

The model is Hockney's: a message of n bytes takes alpha + n beta, alpha being a link's latency and
1 / beta its bandwidth; a worker sends one message and receives one at a time. M is the bytes of a
gradient, m those of a compressed message, P the number of workers, on n nodes of g workers.

Workers are numbered node by node. Those of a node share its network port, one message's bytes after
the other's; the network between the nodes is a switch that holds nobody up. Adding takes no time of
its own here: where it counts, it is part of ``Link.copying``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dgc.compression.sizes import Sizes, chunk_bytes, is_rounded, kept, row, sends_dense


@dataclass(frozen=True)
class Link:
    """One way over which messages go, in each direction at once.

    Args:
        latency: seconds that a message takes whatever its length (alpha).
        bandwidth: bytes a second (1 / beta).
        copying: seconds that the sending and the receiving host work for each byte, while the wire
            waits: the copies and additions of TCP on busy processors. 0 where the network card does
            it all.
    """

    latency: float
    bandwidth: float
    copying: float = 0.0

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth + nbytes * self.copying


@dataclass(frozen=True)
class Cluster:
    """Machines and what connects them.

    Args:
        nodes: machines, each with one network port.
        gpus: workers in each of them.
        between: the port of a node.
        inside: what connects a worker with the others of its node, and with the port.
    """

    nodes: int
    gpus: int
    between: Link
    inside: Link

    @property
    def workers(self) -> int:
        return self.nodes * self.gpus


class Round(NamedTuple):
    """Messages that pass at the same time, and how often that is repeated."""

    times: float
    nbytes: float  # of each message
    across: int  # messages that pass the busiest node's port in one direction; 0: all stay within their nodes


Rounds = tuple[Round, ...]


def seconds(rounds: Iterable[Round], cluster: Cluster) -> float:
    """How long these rounds take: each waits for its slowest link."""
    total = 0.0
    for times, nbytes, across in rounds:
        # On the way to the port, too.
        inside = cluster.inside.seconds(nbytes) if cluster.gpus > 1 else 0.0
        between = cluster.between.seconds(across * nbytes) if across else 0.0
        total += times * max(inside, between)
    return total


def port_bytes(rounds: Iterable[Round]) -> float:
    """Bytes that pass the busiest node's port in one direction."""
    return float(sum(times * nbytes * across for times, nbytes, across in rounds))


# -- all of a gradient of ``nbytes``, summed over n nodes of g workers -------------------------------------------------


def ring(nbytes: float, n: int, g: int) -> Rounds:
    """2 (P - 1) rounds of M / P, from each worker to the next (Patarasuk and Yuan, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations", 2009).
    """
    workers = n * g
    return _some(Round(2 * (workers - 1), nbytes / workers, int(n > 1)))


def hierarchical_ring(nbytes: float, n: int, g: int) -> Rounds:
    """A ring within each node until each worker has the sum of M / g, rings across nodes for each
    of these parts at the same time, and a ring within the node again (Jia et al. 2018; Horovod's
    HOROVOD_HIERARCHICAL_ALLREDUCE).
    """
    return _some(Round(2 * (g - 1), nbytes / g, 0), Round(2 * (n - 1), nbytes / (n * g), g))


DENSE: dict[str, Callable[[float, int, int], Rounds]] = {
    "ring": ring,
    "hierarchical ring": hierarchical_ring,
}


# -- messages of Deep Gradient Compression -----------------------------------------------------------------------------


class Exchange(NamedTuple):
    """A way to exchange compressed gradients."""

    exchange: str  # its name in dgc.Config
    hierarchical: bool = False  # nodes exchange, rather than workers

    def contributors(self, n: int, g: int) -> int:
        return n if self.hierarchical else n * g

    def messages(self, sizes: Sizes, peers: int) -> tuple[int, ...]:
        """Bytes of what one of the contributors sends: m to all; or a row to each owner, and its
        own sums to all.
        """
        return (
            (row(sizes, peers), kept(sizes, peers))
            if self.exchange == "reduce"
            else (sizes.message,)
        )


EXCHANGES = {
    "allgather": Exchange("allgather"),
    "reduce": Exchange("reduce"),
    "hierarchical": Exchange("allgather", hierarchical=True),
    "hierarchical reduce": Exchange("reduce", hierarchical=True),
}


def exchange(name: str, sizes: Sizes, n: int, g: int) -> Rounds:
    """The rounds of one bucket: those of the exchange of this name, or of a dense sum where that is
    fewer bytes.
    """
    if n * g == 1:
        return ()
    chosen = EXCHANGES[name]
    peers = chosen.contributors(n, g)
    sent = chosen.messages(sizes, peers)
    if sends_dense(chosen.exchange, sizes, peers):
        return _dense_sum_of_nodes(sizes, n, g) if chosen.hierarchical else dense_sum(sizes, n, g)
    if chosen.hierarchical:
        return _among_nodes(sizes.dense, n, g, *sent)
    return by_owners(n, g, *sent) if chosen.exchange == "reduce" else allgather(sizes.message, n, g)


def allgather(nbytes: float, n: int, g: int) -> Rounds:
    """All messages to all workers, around a ring: (P - 1) m. Recursive doubling, which the paper's
    section 5 assumes, sends as much: what has been put together doubles at each of its log2 P
    steps.
    """
    return _some(Round(n * g - 1, nbytes, int(n > 1)))


def dense_sum(sizes: Sizes, n: int, g: int) -> Rounds:
    """A ring allreduce; or, where the sum is rounded, to each worker its part of all others'
    entries, and its sums to all: the bytes of a ring allreduce of such values.
    """
    if not is_rounded(sizes, n * g):
        return ring(sizes.dense, n, g)
    part = chunk_bytes(sizes.numel, n * g, sizes.sum_bits)
    return by_owners(n, g, part, part)


def _dense_sum_of_nodes(sizes: Sizes, n: int, g: int) -> Rounds:
    """The same between nodes, which begin with the mean that all ranks of a node have, and end with
    a gather within it.
    """
    if not is_rounded(sizes, n):
        return (*hierarchical_ring(sizes.dense, n, g), *_some(Round(g - 1, sizes.dense / g, 0)))
    part = chunk_bytes(sizes.numel, n, sizes.sum_bits)
    return _among_nodes(sizes.dense, n, g, part, part)


def by_owners(n: int, g: int, to_owner: float, to_all: float) -> Rounds:
    """To each worker what it owns, and its sums to all, around a ring: bytes that hardly grow with
    P while a row holds some tens of entries (after Li and Hoefler, "Near-optimal sparse allreduce",
    PPoPP 2022).

    Of P - 1 rounds to owners, in round s each worker sends to the s-th after it. Of a node's g
    workers, min(s, P - s, g) reach beyond it.
    """
    if n == 1:
        to_owners = [Round(g - 1, to_owner, 0)]
    else:
        to_owners = [
            *(Round(2, to_owner, s) for s in range(1, g)),
            Round(n * g + 1 - 2 * g, to_owner, g),
        ]
    return (*_some(*to_owners), *allgather(to_all, n, g))


def _among_nodes(dense: float, n: int, g: int, *messages: float) -> Rounds:
    """Dense within the node. Then, for each message of a node to all others, each worker carries a
    g-th part, and the node puts together what came: over each port pass (n - 1) m.
    """
    found = [Round(2 * (g - 1), dense / g, 0)]
    for nbytes in messages:
        found += [Round(n - 1, nbytes / g, g), Round((g - 1) * (n > 1), n * nbytes / g, 0)]
    return _some(*found)


def _some(*rounds: Round) -> Rounds:
    """Drops those in which nothing is sent."""
    return tuple(r for r in rounds if r.times > 0)
