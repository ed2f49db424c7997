"""How long a row's exchange takes by the model of ``dgc plan``: from the bytes that a host sends, and its collective.

Messages take a latency and their bytes over the bandwidth (:mod:`dgc.plan.cost`), one worker on each host. It is the
wire alone: no compressing, no decoding, no copies in the hosts. A step counts as one exchange. Where small tensors
travel dense beside the others, or one bucket follows another, the latencies of a further exchange come on top.
"""

from __future__ import annotations

from dataclasses import replace

from dgc.plan import INSIDE, NETWORKS, cost
from dgc.plan.cost import Cluster, Round, Rounds

GIGABIT = NETWORKS["1gbit"]
LINKS = {"100mbit": replace(GIGABIT, bandwidth=GIGABIT.bandwidth / 10), "1gbit": GIGABIT}
NAMES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}


def rounds(collective: str, sent: float, hosts: int) -> Rounds:
    """The messages of one exchange.

    Args:
        collective: of :data:`peers.exchange.Bring`. An all-to-all is followed by an all-gather: as
            many rounds as an allreduce.
        sent: bytes that a host sends in it; the server, where there is one.
        hosts: how many, at least 2.
    """
    if collective == "allgather":
        return cost.allgather(sent / (hosts - 1), hosts, 1)
    if collective == "push and pull":  # one worker after the other, as one thread serves them
        return (Round(2 * (hosts - 1), sent / (hosts - 1), 1),)
    return cost.ring(sent * hosts / (2 * (hosts - 1)), hosts, 1)


def seconds(collective: str, sent: float, hosts: int, rate: str, exchanging: float = 1.0) -> float:
    """Of a step, on average.

    Args:
        sent: bytes that a host sends in a step, on average.
        rate: of :data:`LINKS`.
        exchanging: the share of steps that exchange at all.
    """
    if hosts == 1 or not sent:
        return 0.0
    cluster = Cluster(hosts, 1, LINKS[rate], INSIDE["pcie"])
    return exchanging * cost.seconds(rounds(collective, sent / exchanging, hosts), cluster)
