"""The bytes of what a bucket sends: as indices and values, as rows to owners, as a dense sum.

They depend on sizes alone, and so are alike on every rank.
"""

from __future__ import annotations

import math
from typing import NamedTuple

FLOAT32 = 4  # bytes; the residual's dtype, in which sums travel
LINE = 16  # neighbouring entries that one owner adds up, and that are sampled together: a cache line of float32
GROUP = 512  # slots of a row that share a scale
CHECKSUM_WORDS = 2  # of 32 bits, the last ones of a row
SUM_BITS = 8  # of a value in a dense sum, where values of messages have as few or fewer
# Of the k entries that a sparsity names, how many times as many a worker sends to owners, and all
# owners together pass on: the same number, as an entry waits at a worker and again at its owner.
# More => more bytes, shorter waits.
WIDE = 3
SLACK = 4  # standard deviations above the mean, of entries dealt out at random, for which a row has slots


class Sizes(NamedTuple):
    """What one worker sends of a bucket."""

    dense: int  # bytes of all entries, as they are summed
    numel: int  # entries of the bucket
    slots: int = 0  # those that are chosen, of a worker; 0: it always travels dense
    bits: int = 16  # of one of their values in a message

    @property
    def message(self) -> int:
        """Bytes of the chosen entries, as they are gathered."""
        return row_bytes(self.slots, self.numel, self.bits)

    @property
    def sum_bits(self) -> int:
        """Bits of a value in a dense sum that is rounded; 0: none is."""
        return SUM_BITS if self.bits <= SUM_BITS else 0


def sends_dense(exchange: str, sizes: Sizes, n: int) -> bool:
    """Whether the same entries of N contributors travel as one dense sum, which would be fewer
    bytes.

    "Never more bytes than dense": each sends 2 (N-1)/N of a sum, and N-1 messages. N counts nodes
    where the exchange is hierarchical.

    Args:
        exchange: as in :class:`dgc.Config`.
    """
    dense = summed(sizes, n)
    if exchange == "reduce":
        return n > 1 and 2 * dense < n * (row(sizes, n) + kept(sizes, n))
    return 2 * dense < n * sizes.message


def low_bits(slots: int, size: int) -> int:
    """The bits of a place that are written as they are, of k places among n
    (:mod:`dgc.compression.wire`).
    """
    return max(0, min(16, (max(1, size) // max(1, slots)).bit_length() - 1))


def row_sections(
    slots: int, size: int, bits: int, all_entries: bool = False
) -> tuple[int, list[int]]:
    """The low bits of a place, and the bytes of a row's sections without its checksum.

    Args:
        slots: k.
        size: n, entries of the interval.
        bits: of a value.
        all_entries: there are no places.
    """
    groups, low = -(-slots // GROUP), low_bits(slots, size)
    scales = 16 * groups * (1 if bits > 8 else 2)
    places = [0, 0] if all_entries else [slots * low, slots + (max(1, size) - 1 >> low)]
    return low, [4 * -(-n // 32) for n in (32, scales, slots * bits, *places)]


def row_bytes(slots: int, size: int, bits: int, all_entries: bool = False) -> int:
    """Bytes of a row (:class:`dgc.compression.wire.Rows`)."""
    return sum(row_sections(slots, size, bits, all_entries)[1]) + 4 * CHECKSUM_WORDS


def region(numel: int, n: int) -> int:
    """Entries of the largest of n owners' regions of a bucket, which are dealt out in blocks of
    ``LINE``.
    """
    return -(-numel // (LINE * n)) * LINE


def wide(numel: int, slots: int) -> int:
    """Entries that the reduce exchange sends of a parameter, or of a bucket, of which an all-gather
    sends ``slots``.
    """
    return min(numel, WIDE * slots)


def row_slots(slots: int, n: int) -> int:
    """Entries for which a worker has room in what it sends to each of n owners: few are in its own
    region, of which it keeps the large ones.
    """
    mean = slots / max(1, n - 1)
    return min(slots, math.ceil(mean + SLACK * math.sqrt(mean)) + 1)


def kept_slots(numel: int, slots: int, n: int) -> int:
    """Entries that each of n owners passes on to all, which are together as many as a worker sends."""
    return min(region(numel, n), -(-slots // n))


def row(sizes: Sizes, n: int) -> int:
    """Bytes of what a worker sends to each of N owners."""
    slots = row_slots(wide(sizes.numel, sizes.slots), n)
    return row_bytes(slots, region(sizes.numel, n), sizes.bits)


def kept(sizes: Sizes, n: int) -> int:
    """Bytes of what each of N owners passes on."""
    slots = kept_slots(sizes.numel, wide(sizes.numel, sizes.slots), n)
    return row_bytes(slots, region(sizes.numel, n), sizes.bits)


def chunk(numel: int, n: int) -> int:
    """Entries of each of the N parts of a bucket that one owner adds up, where all travel."""
    return -(-numel // n)


def chunk_bytes(numel: int, n: int, bits: int) -> int:
    """Bytes of such a part: a row of all entries."""
    return row_bytes(chunk(numel, n), chunk(numel, n), bits, all_entries=True)


def returned_bits(bits: int) -> int:
    """Bits of a value in the sums that owners return, where a value has so many on its way to them:
    twice as many, at most 8, as no average over ranks makes their rounding smaller.
    """
    return min(2 * bits, SUM_BITS)


def is_rounded(sizes: Sizes, n: int) -> bool:
    """Whether a dense sum of N contributors is rounded: if that is asked for, and is fewer bytes."""
    return (
        sizes.sum_bits > 0
        and n > 1
        and n * chunk_bytes(sizes.numel, n, sizes.sum_bits) < sizes.dense
    )


def summed_bytes(sizes: Sizes, n: int) -> int:
    """Bytes that one of N contributes to a dense sum: its entries; rounded, a part for each, and
    sums for all.
    """
    return (
        (n + 1) * chunk_bytes(sizes.numel, n, sizes.sum_bits)
        if is_rounded(sizes, n)
        else sizes.dense
    )


def summed(sizes: Sizes, n: int) -> int:
    """M of a dense sum of N contributors, of which each sends 2 (N - 1) / N M."""
    return n * chunk_bytes(sizes.numel, n, sizes.sum_bits) if is_rounded(sizes, n) else sizes.dense
