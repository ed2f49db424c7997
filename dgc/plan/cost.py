"""The cost of each way to add up gradients: rounds of messages, and the time that they take on given links.

The model is Hockney's: a message of n bytes takes alpha + n beta, alpha being a link's latency and 1 / beta its
bandwidth; a worker sends one message and receives one at a time. Bytes and rounds of dense collectives are those of
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), and for the ring
of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).

Workers are numbered node by node. Those of a node share its network port, one message's bytes after the other's; the
network between the nodes is a switch that holds nobody up. Adding takes no time of its own here: where it counts, it is
part of ``Link.copying``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from dgc.compression.sizes import Sizes, chunk_bytes, kept, rounds, row, sends_dense


@dataclass(frozen=True)
class Link:
    """One way over which messages go, in each direction at once.

    Args:
        latency: seconds that a message takes whatever its length (alpha).
        bandwidth: bytes a second (1 / beta).
        copying: seconds that the sending and the receiving host work for each byte, while the wire waits: the copies
            and additions of TCP on busy processors. 0 where the network card does it all.
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
    loads: Tensor | None = None  # if ports differ: (2, ports), how many leave by each and come in, in all these rounds


Rounds = tuple[Round, ...]


def seconds(rounds: Iterable[Round], cluster: Cluster) -> float:
    """How long these rounds take: each waits for its slowest link."""
    total = 0.0
    for times, nbytes, across, _ in rounds:
        inside = cluster.inside.seconds(nbytes) if cluster.gpus > 1 else 0.0  # on the way to the port, too
        between = cluster.between.seconds(across * nbytes) if across else 0.0
        total += times * max(inside, between)
    return total


def port_bytes(rounds: Iterable[Round]) -> float:
    """Bytes that pass the busiest port in one direction; its node's, or a server's."""
    alike, apart = 0.0, dict[int, tuple[float, Tensor]]()  # of many buckets, the same loads come again and again
    for times, nbytes, across, loads in rounds:
        if loads is None:
            alike += times * nbytes * across
        else:
            before, _ = apart.get(id(loads), (0.0, loads))
            apart[id(loads)] = before + nbytes, loads
    total = torch.zeros(1, dtype=torch.float64, device="cpu")
    for nbytes, loads in apart.values():
        total = total + nbytes * loads
    return alike + float(total.max())


# -- all of a gradient of ``nbytes``, summed over n nodes of g workers -------------------------------------------------

def parameter_server(nbytes: float, n: int, g: int) -> Rounds:
    """One server, a machine of its own: it takes in P gradients and gives out P sums, one after the other, P M each.

    Li et al., "Scaling distributed machine learning with the parameter server" (2014), with a single server.
    """
    return (Round(2 * n * g, nbytes, 1, torch.full((2, 1), n * g, device="cpu")),) if n * g > 1 else ()


def sharded_parameter_server(nbytes: float, n: int, g: int) -> Rounds:
    """A server on each node for a part of the gradient (Li et al. 2014): each worker exchanges M / n with each node.

    Over a port pass 2 g (n - 1) / n M: a ring's bytes with one worker a node, g times as many with g.
    """
    return _some(Round(2 * (n - 1), nbytes / n, g), Round(2 * (g - 1), nbytes / n, 0))


def all_to_all(nbytes: float, n: int, g: int) -> Rounds:
    """Every worker sends its whole gradient to every other one: (P - 1) M each."""
    return _shifts(nbytes, n, g)


def master_worker(nbytes: float, n: int, g: int) -> Rounds:
    """One of the workers takes in all gradients, one after the other, and gives out the sum: (P - 1) M each."""
    of_others = torch.full((2, 1), (n - 1) * g, device="cpu")
    return _some(Round(2 * (n - 1) * g, nbytes, 1, of_others), Round(2 * (g - 1), nbytes, 0))


def round_robin(nbytes: float, n: int, g: int) -> Rounds:
    """Each worker adds up a P-th part that all others send it directly, each round to the next one in a circle, and
    gives it back in the same way: 2 (P - 1) rounds of M / P (Zhao and Canny, "Sparse allreduce", 2013).

    Over a port of g workers pass 2 g (n - 1) / n M.
    """
    part = nbytes / (n * g)
    return tuple(Round(2 * times, part, across) for times, _, across, _ in _shifts(part, n, g))


def tree(nbytes: float, n: int, g: int) -> Rounds:
    """Binomial trees, one up to the root and one down from it: 2 ceil(log2 P) rounds of M (Thakur et al. 2005)."""
    return tuple(Round(2, nbytes, *_ports(n * g, g, "tree", 1 << level)) for level in range((n * g - 1).bit_length()))


def butterfly(nbytes: float, n: int, g: int) -> Rounds:
    """Recursive halving, then recursive doubling, neighbours first: 2 log2 P rounds, 2 (P - 1) / P M (Rabenseifner
    2004; Thakur et al. 2005). If P is no power of two, some first give M to their neighbour, and get it back last.
    """
    workers = n * g
    power = 1 << (workers.bit_length() - 1)
    extra = workers - power
    folded = [Round(2, nbytes, *_ports(workers, g, "fold", extra))] if extra else []
    return (*folded, *(Round(2, nbytes / 2 ** (level + 1), *_ports(workers, g, "butterfly", 1 << level))
                       for level in range(power.bit_length() - 1)))


def ring(nbytes: float, n: int, g: int) -> Rounds:
    """2 (P - 1) rounds of M / P, from each worker to the next (Patarasuk and Yuan 2009)."""
    workers = n * g
    return _some(Round(2 * (workers - 1), nbytes / workers, int(n > 1)))


def hierarchical_ring(nbytes: float, n: int, g: int) -> Rounds:
    """A ring within each node until each worker has the sum of M / g, rings across nodes for each of these parts at the
    same time, and a ring within the node again (Jia et al. 2018; Horovod's HOROVOD_HIERARCHICAL_ALLREDUCE).
    """
    return _some(Round(2 * (g - 1), nbytes / g, 0), Round(2 * (n - 1), nbytes / (n * g), g))


DENSE: dict[str, Callable[[float, int, int], Rounds]] = {
    "parameter server": parameter_server, "sharded servers": sharded_parameter_server, "all-to-all": all_to_all,
    "master-worker": master_worker, "round-robin": round_robin, "tree": tree, "butterfly": butterfly, "ring": ring,
    "hierarchical ring": hierarchical_ring}


# -- messages of Deep Gradient Compression -----------------------------------------------------------------------------

def allgather(sizes: Sizes, n: int, g: int) -> Rounds:
    """All messages to all workers, around a ring: (P - 1) m. Recursive doubling, which the paper's section 5 assumes,
    sends as much: what has been put together doubles at each of its log2 P steps.
    """
    return _some(Round(n * g - 1, sizes.message, int(n > 1)))


def hierarchical(sizes: Sizes, n: int, g: int) -> Rounds:
    """Dense within the node; then each worker gathers a g-th part of the nodes' messages, and the node puts them
    together: over each port pass (n - 1) m.
    """
    return _some(Round(2 * (g - 1), sizes.dense / g, 0), *_to_all_nodes(sizes.message, n, g))


def reduce(sizes: Sizes, n: int, g: int) -> Rounds:
    """Each worker's entries to their owners, P - 1 rows, and the largest of each owner's sums to all, around a ring:
    bytes that hardly grow with P while a row holds some tens of entries (after Li and Hoefler, "Near-optimal sparse
    allreduce", PPoPP 2022).
    """
    to_owners = _shifts(row(sizes, n * g), n, g)
    return (*to_owners, *_some(Round(n * g - 1, kept(sizes, n * g), int(n > 1))))


def hierarchical_reduce(sizes: Sizes, n: int, g: int) -> Rounds:
    """Dense within the node; each worker carries a g-th part of what nodes send one another, and the node puts them
    together.
    """
    return _some(Round(2 * (g - 1), sizes.dense / g, 0), *_to_all_nodes(row(sizes, n), n, g),
                 *_to_all_nodes(kept(sizes, n), n, g))


def dense_sum(sizes: Sizes, n: int, g: int) -> Rounds:
    """A ring allreduce; or, where the sum is rounded, to each worker its part of all others' entries, and its sums to
    all, around a ring: the bytes of a ring allreduce of such values.
    """
    if not rounds(sizes, n * g):
        return ring(sizes.dense, n, g)
    nbytes = chunk_bytes(sizes.numel, n * g, sizes.sum_bits)
    return (*_shifts(nbytes, n, g), *_some(Round(n * g - 1, nbytes, int(n > 1))))


def hierarchical_rounded(sizes: Sizes, n: int, g: int) -> Rounds:
    """Dense within the node; then each worker carries a g-th part of what nodes send one another, and the node puts it
    together.
    """
    nbytes = chunk_bytes(sizes.numel, n, sizes.sum_bits)
    return _some(Round(2 * (g - 1), sizes.dense / g, 0), Round(2 * (n - 1), nbytes / g, g),
                 Round(2 * (g - 1), n * nbytes / g, 0))


class Exchange(NamedTuple):
    """A way to exchange compressed gradients."""

    rounds: Callable[[Sizes, int, int], Rounds]  # of one bucket's messages, on n nodes of g workers
    exchange: str  # its name in dgc.Config
    hierarchical: bool = False  # nodes exchange, rather than workers

    def contributors(self, n: int, g: int) -> int:
        return n if self.hierarchical else n * g

    def own_bytes(self, sizes: Sizes, n: int, g: int) -> int:
        """Bytes that a worker contributes: its message; or its rows, and what it passes on as an owner."""
        peers = self.contributors(n, g)
        return peers * row(sizes, peers) + kept(sizes, peers) if self.exchange == "reduce" else sizes.message


EXCHANGES: dict[str, Exchange] = {
    "allgather": Exchange(allgather, "allgather"),
    "reduce": Exchange(reduce, "reduce"),
    "hierarchical": Exchange(hierarchical, "allgather", hierarchical=True),
    "hierarchical reduce": Exchange(hierarchical_reduce, "reduce", hierarchical=True)}


def exchange(name: str, sizes: Sizes, n: int, g: int) -> Rounds:
    """The rounds of one bucket: those of the exchange of this name, or of a dense sum where that is fewer bytes. With
    nodes that goes on from the mean that all ranks of a node have, and so ends with a gather within it.
    """
    if n * g == 1:
        return ()
    chosen = EXCHANGES[name]
    if not sends_dense(chosen.exchange, sizes, chosen.contributors(n, g)):
        return chosen.rounds(sizes, n, g)
    if not chosen.hierarchical:
        return dense_sum(sizes, n, g)
    if rounds(sizes, n):
        return hierarchical_rounded(sizes, n, g)
    return (*hierarchical_ring(sizes.dense, n, g), *_some(Round(g - 1, sizes.dense / g, 0)))


# -- who sends to whom -------------------------------------------------------------------------------------------------

def _to_all_nodes(nbytes: float, n: int, g: int) -> Rounds:
    """Each worker carries a g-th part of what its node sends all others, and the node puts what came together."""
    return Round(n - 1, nbytes / g, g), Round((g - 1) * (n > 1), n * nbytes / g, 0)


def _shifts(nbytes: float, n: int, g: int) -> Rounds:
    """P - 1 rounds; in round s each worker sends to the s-th after it. Of a node's g workers, min(s, P - s, g) reach
    beyond it.
    """
    if n == 1:
        return _some(Round(g - 1, nbytes, 0))
    return _some(*(Round(2, nbytes, s) for s in range(1, g)), Round(n * g + 1 - 2 * g, nbytes, g))


@cache
def _ports(workers: int, g: int, pattern: str, distance: int) -> tuple[int, Tensor]:
    """Of one round of a pattern: the messages that leave by the busiest port, of which none receives more; and how many
    leave by each and come in, in this round and the same the other way round, float64.
    """
    nodes = torch.stack(_pairs(workers, pattern, distance)) // g
    crossing = nodes[:, nodes[0] != nodes[1]]
    loads = torch.stack([torch.bincount(side, minlength=workers // g) for side in crossing]).double()
    return int(loads[0].max()), loads + loads.flip(0)


def _pairs(workers: int, pattern: str, distance: int) -> tuple[Tensor, Tensor]:
    """The workers that send in one round, and those that they send to."""
    rank = torch.arange(workers, device="cpu")
    if pattern == "tree":
        sender = rank[(rank % (2 * distance) == 0) & (rank + distance < workers)]
        return sender, sender + distance
    if pattern == "fold":  # the even ones of the first 2 * distance to the next
        sender = rank[(rank < 2 * distance) & (rank % 2 == 0)]
        return sender, sender + 1
    power = 1 << (workers.bit_length() - 1)
    extra = workers - power
    real = torch.where(rank[:power] < extra, 2 * rank[:power] + 1, rank[:power] + extra)  # those that are left
    return real, real[rank[:power] ^ distance]


def _some(*rounds: Round) -> Rounds:
    """Drops those in which nothing is sent."""
    return tuple(r for r in rounds if r.times > 0)
