"""What the loops that numba compiles have in common: addresses, bits, and threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

PREFETCH_DISTANCE = 16  # scattered entries that are fetched while one is worked on


@intrinsic
def pointer(typing_context, address):
    """An address as a pointer, for ``numba.carray``."""
    return types.voidptr(types.int64), lambda context, builder, signature, arguments: builder.inttoptr(
        arguments[0], context.get_value_type(types.voidptr))


@intrinsic
def prefetch(typing_context, address):
    """Asks for the cache line at an address, which is going to be read and written."""
    def generate(context, builder, signature, arguments):
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, word, word, word]), "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(arguments[0], byte), word(1), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def lowest(typing_context, bits):
    """The number of the lowest bit that is set; there must be one."""
    return types.int64(types.int64), lambda context, builder, signature, arguments: builder.cttz(
        arguments[0], ir.IntType(1)(1))


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Helpers of the calling thread; a forked process has none of its parent's."""
    return ThreadPoolExecutor(threads - 1, "dgc")


def in_threads(work: Callable[..., Any], tasks: Sequence[Any], threads: int) -> list[Any]:
    """``work(*task)`` for all tasks, by this thread and others, each taking the next one as it is done with the last.

    Waking a thread takes about as long as reading a megabyte; one that comes too late is not waited for.
    """
    if len(tasks) == 1:
        return [work(*tasks[0])]
    results: list[Any] = [None] * len(tasks)
    waiting = iter(range(len(tasks)))  # whose next() is atomic

    def drain() -> None:
        for i in waiting:
            results[i] = work(*tasks[i])

    helpers = min(threads, len(tasks)) - 1
    futures = [_pool(os.getpid(), threads).submit(drain) for _ in range(helpers)]
    drain()
    for future in futures:
        if not future.cancel():
            future.result()
    return results


def thread_ranges(count: int, most: int) -> list[tuple[int, int]]:
    """Ranges of about as many of a count, at least one and at most so many."""
    parts = max(1, min(most, count))
    return list(pairwise(count * w // parts for w in range(parts + 1)))
