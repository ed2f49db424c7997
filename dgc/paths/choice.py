"""The exchanges by their names, and whether a bucket takes a dense sum in place of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from dgc.collective import Path
from dgc.compression import sizes as messages
from dgc.paths.allgather import gather
from dgc.paths.averaged import Update
from dgc.paths.owners import add_at_owners
from dgc.paths.task import Task

PATHS: dict[str, Callable[[Task], Path[Update]]] = {"allgather": gather, "reduce": add_at_owners}  # Config.exchange


@lru_cache(1024)
def sends_dense(exchange: str, sizes: messages.Sizes, nodes: int) -> bool:
    """Whether the same entries are fewer bytes as one dense sum. It depends on sizes alone, and so is alike on every
    rank.
    """
    return messages.sends_dense(exchange, sizes, nodes)
