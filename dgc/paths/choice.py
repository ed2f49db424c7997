"""The exchanges by their names, and the one that a bucket takes: as chosen, or of fewer bytes, or a dense sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from dgc import cost
from dgc.collective import Path
from dgc.compression.wire import Layout
from dgc.paths.allgather import gather
from dgc.paths.averaged import Update
from dgc.paths.owners import add_at_owners
from dgc.paths.shared import sum_at_support
from dgc.paths.task import Task

PATHS: dict[str, Callable[[Task], Path[Update]]] = {  # by Config.exchange
    "allgather": gather, "reduce": add_at_owners, "shared": sum_at_support}

AUTO = ("allgather", "shared")  # of which Config(exchange="auto") takes that of fewer bytes


def choose(exchange: str, layout: Layout, nodes: int) -> tuple[str, bool]:
    """The exchange for these messages. It depends on sizes alone, and so is alike on every rank.

    Args:
        exchange: of :class:`dgc.Config`; "auto" is that of fewer bytes.
        nodes: how many contributors there are.

    Returns:
        The exchange, and whether the same entries are fewer bytes as one dense sum.
    """
    return _choose(exchange, layout.sizes, nodes)


@lru_cache(1024)
def _choose(exchange: str, sizes: cost.Sizes, nodes: int) -> tuple[str, bool]:
    if exchange == "auto":
        exchange = min(AUTO, key=lambda name: cost.port_bytes(cost.exchange(name, sizes, nodes, 1)))
    return exchange, cost.sends_dense(exchange, sizes, nodes, 1)
