"""The bytes of what a bucket sends: as indices and values, as rows to owners, as a dense sum.

They depend on sizes alone, and so are alike on every rank.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

FLOAT32 = 4  # bytes; the residual's dtype, in which sums travel
LINE = 16  # neighbouring entries that one owner adds up, and that are sampled together: a cache line of float32
NEIGHBOURS = 256  # entries that share an exponent
# Of the k entries that a sparsity names, how many times as many a worker sends to owners, and all owners together pass
# on: the same number, as an entry waits at a worker and again at its owner. More => more bytes, shorter waits.
WIDE = 3
SLACK = 4  # standard deviations above the mean, of entries dealt out at random, for which a row has slots


class Sizes(NamedTuple):
    """Bytes of one bucket, on one worker."""

    dense: int  # all entries, as they are summed
    message: int  # indices and values, as they are gathered
    numel: int = 0  # entries of the bucket
    slots: int = 0  # those that are chosen, of a worker
    width: int = 2  # bytes of one of their values in a message
    rounded: int = 0  # bytes of a value in a dense sum that is rounded (``Config(dense_dtype=...)``); 0: it is not


def sends_dense(exchange: str, sizes: Sizes, n: int) -> bool:
    """Whether the same entries of N contributors travel as one dense sum, which would be fewer bytes.

    "Never more bytes than dense": each sends 2 (N-1)/N of a sum, and N-1 messages. N counts nodes where the exchange
    is hierarchical.

    Args:
        exchange: as in :class:`dgc.Config`.
    """
    dense = summed(sizes, n)
    if exchange == "reduce":
        return n > 1 and 2 * dense < n * (row(sizes, n) + kept(sizes, n))
    return 2 * dense < n * sizes.message


def sealed(nbytes: int) -> int:
    """Bytes of a message with so many of content: padded to a multiple of 4, and the checksum."""
    return nbytes + -nbytes % 4 + 8


def region(numel: int, n: int) -> int:
    """Entries of the largest of n owners' regions of a bucket, which are dealt out in blocks of ``LINE``."""
    return -(-numel // (LINE * n)) * LINE


def wide(numel: int, slots: int) -> int:
    """Entries that the reduce exchange sends of a parameter, or of a bucket, of which an all-gather sends ``slots``."""
    return min(numel, WIDE * slots)


def row_slots(slots: int, n: int) -> int:
    """Entries for which a worker has room in what it sends to each of n owners: few are in its own region, of which
    it keeps the large ones.
    """
    mean = slots / max(1, n - 1)
    return min(slots, math.ceil(mean + SLACK * math.sqrt(mean)) + 1)


def kept_slots(numel: int, slots: int, n: int) -> int:
    """Entries that each of n owners passes on to all, which are together as many as a worker sends."""
    return min(region(numel, n), -(-slots // n))


def row_bytes(slots: int, size: int, width: int) -> int:
    """Bytes of a row of so many entries of a region (:class:`dgc.compression.regions.Rows`)."""
    return sealed(4 * -(-size // (1 << 16)) + (width + 2) * slots + 2)


def row(sizes: Sizes, n: int) -> int:
    """Bytes of what a worker sends to each of N owners."""
    slots = row_slots(wide(sizes.numel, sizes.slots), n)
    return row_bytes(slots, region(sizes.numel, n), sizes.width)


def kept(sizes: Sizes, n: int) -> int:
    """Bytes of what each of N owners passes on."""
    slots = kept_slots(sizes.numel, wide(sizes.numel, sizes.slots), n)
    return row_bytes(slots, region(sizes.numel, n), sizes.width)


def chunk(numel: int, n: int) -> int:
    """Entries of each of the N parts of a bucket that one owner adds up, an even number."""
    return -(-numel // (2 * n)) * 2


def chunk_bytes(numel: int, n: int, width: int) -> int:
    """Bytes of such a part (:class:`dgc.compression.chunks.Chunks`)."""
    return sealed(width * chunk(numel, n) + 2 * -(-chunk(numel, n) // NEIGHBOURS))


def rounds(sizes: Sizes, n: int) -> bool:
    """Whether a dense sum of N contributors is rounded: if that is asked for, and is fewer bytes."""
    return sizes.rounded > 0 and n > 1 and n * chunk_bytes(sizes.numel, n, sizes.rounded) < sizes.dense


def always_dense(numel: int, dtype: torch.dtype | None, itemsize: int = FLOAT32) -> Sizes:
    """The sizes of a bucket that always travels dense.

    Args:
        dtype: in which, as in :class:`dgc.Config`.
        itemsize: bytes of an entry that is not rounded.
    """
    return Sizes(itemsize * numel, 0, numel, rounded=0 if dtype is None else dtype.itemsize)


def summed_bytes(sizes: Sizes, n: int) -> int:
    """Bytes that one of N contributes to a dense sum: its entries; rounded, a part for each, and sums for all."""
    return (n + 1) * chunk_bytes(sizes.numel, n, sizes.rounded) if rounds(sizes, n) else sizes.dense


def summed(sizes: Sizes, n: int) -> int:
    """M of a dense sum of N contributors, of which each sends 2 (N - 1) / N M."""
    return n * chunk_bytes(sizes.numel, n, sizes.rounded) if rounds(sizes, n) else sizes.dense
