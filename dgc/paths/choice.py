"""The exchanges by their names, and the one that a bucket takes: as chosen, or by time, or a dense sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from dgc import cost
from dgc.collective import Path, World
from dgc.compression.wire import Layout
from dgc.paths.allgather import gather
from dgc.paths.averaged import Update
from dgc.paths.owners import add_at_owners
from dgc.paths.task import Task
from dgc.warn import LOG, warn

PATHS: dict[str, Callable[[Task], Path[Update]]] = {"allgather": gather, "reduce": add_at_owners}  # Config.exchange

# Config(exchange="auto") takes the reduce exchange where it is so many times as fast as an all-gather, on this network:
# it applies fewer entries in a step, and must be worth that.
WORTH, ETHERNET = 2.0, cost.Link(50e-6, 0.125e9)


def choose(exchange: str, layout: Layout, world: World) -> tuple[str, bool]:
    """The exchange for these messages. It depends on sizes alone, and so is alike on every rank.

    Args:
        exchange: of :class:`dgc.Config`; "auto" is by time. Rank 0 warns where that is the one that may learn less.

    Returns:
        The exchange, and whether the same entries are fewer bytes as one dense sum.
    """
    return _choose(exchange, layout.sizes, world.nodes, world.rank == 0)


@lru_cache(1024)
def _choose(exchange: str, sizes: cost.Sizes, nodes: int, warns: bool) -> tuple[str, bool]:
    if exchange == "auto":
        exchange = _by_time(sizes, nodes)
        if warns and exchange == "reduce":
            warn(f"Config: exchange='auto' takes 'reduce' among {nodes}, as it is more than twice as fast here; it "
                 "applies fewer entries in a step than an all-gather, and may learn less")
    return exchange, cost.sends_dense(exchange, sizes, nodes, 1)


def _by_time(sizes: cost.Sizes, nodes: int) -> str:
    cluster = cost.Cluster(nodes, 1, ETHERNET, ETHERNET)
    gathered, reduced = (cost.seconds(cost.exchange(name, sizes, nodes, 1), cluster)
                         for name in ("allgather", "reduce"))
    exchange = "reduce" if WORTH * reduced < gathered else "allgather"
    LOG.info("%d of %d entries among %d: exchange='auto' takes '%s' (by the cost model an all-gather takes %.3g ms on "
             "1 Gbit/s Ethernet, the reduce exchange, which applies fewer entries in a step, %.3g ms)", sizes.slots,
             sizes.numel, nodes, exchange, 1e3 * gathered, 1e3 * reduced)
    return exchange
