"""The wire format: the entries of one bucket <-> one message of fixed size.

A message has k slots for each parameter, whether they are all used or not, so that its size is known to every rank
beforehand. Positions are counted within blocks of 65,536 entries of a parameter, so that 16 bits hold them. In bytes,
with B blocks, K slots, P parameters, and w bytes a value:

    int32  (B)   how many entries each block has in this message
    value  (K)   float16, bfloat16 or float32; the used slots of a parameter come first, block after block
    int16  (K)   positions within the block, as unsigned numbers
    int16  (P)   exponents: a value counts 2^exponent of its parameter
    zeros        up to a multiple of 4
    int32  (2)   checksum, the lower half first

The exponent puts a parameter's largest value just below 2^15, so that float16 neither overflows nor loses its small
values, whatever the scale of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dgc.compression.device import tensor_of
from dgc.compression.residual import Bucket
from dgc.compression.sizes import Sizes, sealed

BLOCK = 1 << 16  # entries of a parameter that share a count
TOP = 15  # the largest value of a parameter is scaled to [2^(TOP - 1), 2^TOP)
# Exponents from CORRUPT on tell of errors: a value of this parameter was not finite; an owner was sent a damaged row.
NONFINITE = 32767
CORRUPT = NONFINITE - 1
SLICE, LONG_SLICE = 1 << 19, 1 << 25  # entries that are worked on at a time, on a CPU and elsewhere
MIXER = 0x61C88647  # 2^32 over the golden ratio, the smaller part: its multiples have no pattern


class Sections(NamedTuple):
    """A message as typed views: (B,), (K,), (K,), (P,)."""

    counts: Tensor
    values: Tensor
    positions: Tensor
    exponents: Tensor


class Layout:
    """The places of things in the messages of a bucket, for one count of entries per parameter.

    Args:
        bucket: whose messages.
        counts: k of each parameter, in the bucket's order.
        dtype: of the values.
        node_size: how many ranks send one message together; errors name them.
        dense_dtype: of the values where all entries are summed instead; None: the residual's.
    """

    def __init__(self, bucket: Bucket, counts: Sequence[int], dtype: torch.dtype, node_size: int = 1,
                 dense_dtype: torch.dtype | None = None):
        self.bucket, self.names, self.counts, self.dtype = bucket.name, bucket.names, tuple(counts), dtype
        self.node_size, self.dense_dtype = node_size, dense_dtype
        self.numels, self.offsets, self.numel = bucket.numels, bucket.offsets, bucket.numel
        self.starts = tuple(accumulate(counts, initial=0))[:-1]  # the first slot of each parameter
        self.slots = sum(counts)
        blocks = [-(-numel // BLOCK) for numel in bucket.numels]
        self.block_starts = tuple(accumulate(blocks, initial=0))  # the first block of each parameter, and B
        self.residual, self.device = bucket.v.dtype, bucket.v.device
        sizes = 4 * self.block_starts[-1], dtype.itemsize * self.slots, 2 * self.slots, 2 * len(counts)
        self.ends = tuple(accumulate(sizes))  # of the sections, in bytes
        self.nbytes = sealed(self.ends[-1])

    def sections(self, message: Tensor) -> Sections:
        """Views into a message, uint8 (nbytes,)."""
        a, b, c, d = self.ends
        return Sections(message[:a].view(torch.int32), message[a:b].view(self.dtype),
                        message[b:c].view(torch.int16), message[c:d].view(torch.int16))

    @cached_property
    def chosen(self) -> dict[str, int]:
        """k of each parameter."""
        return dict(zip(self.names, self.counts, strict=True))

    @cached_property
    def owner(self) -> Tensor:
        """int64 (K,): the parameter that each slot belongs to."""
        repeats = tensor_of(self.counts, self.device)
        return torch.arange(len(self.counts), device=self.device).repeat_interleave(
            repeats, output_size=self.slots)

    @cached_property
    def base(self) -> Tensor:
        """int64 (K,): where that parameter begins in the bucket."""
        return tensor_of(self.offsets, self.device)[self.owner]

    @cached_property
    def ordinal(self) -> Tensor:
        """int64 (K,): which of its parameter's slots each one is, from 0."""
        starts = tensor_of(self.starts, self.device)
        return torch.arange(self.slots, device=self.device) - starts[self.owner]

    @cached_property
    def block_sizes(self) -> Tensor:
        """int64 (B,): how many entries of its parameter each block covers."""
        return tensor_of([min(BLOCK, numel - first) for numel in self.numels for first in range(0, numel, BLOCK)],
                         self.device)

    @cached_property
    def block_bases(self) -> Tensor:
        """int64 (B,): where each block begins in the bucket."""
        return tensor_of([offset + first for numel, offset in zip(self.numels, self.offsets, strict=True)
                          for first in range(0, numel, BLOCK)], self.device)

    def encode(self, index: Tensor, used: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes a message.

        Args:
            index: int64 (K,), positions in the bucket, ascending within each parameter; any in unused slots.
            used: int64 (P,), how many slots of each parameter are used; they are its first.
            values: (K,) in the residual's dtype; what unused slots hold plays no part. Of a parameter with one that
                is not finite nothing is sent but this fact.

        Returns:
            The message, uint8 (nbytes,), and what receivers will read, (K,) in the residual's dtype, 0 if unused.
        """
        valid = self.uses(used)
        exponent = exponents(torch.where(valid, values, 0), self.owner, len(self.counts))
        valid &= (exponent != NONFINITE)[self.owner]
        coded = torch.where(valid, values.double() * power_of_two(-exponent)[self.owner], 0).to(self.dtype)
        message = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
        into = self.sections(message)
        self.write_places(into.counts, into.positions, index, valid)
        into.values.copy_(coded)
        into.exponents.copy_(exponent)
        return seal(message), scaled(coded, exponent[self.owner], self.residual)

    @cached_property
    def sizes(self) -> Sizes:
        """What the messages of each exchange have in bytes."""
        itemsize = self.residual.itemsize
        return Sizes(itemsize * self.numel, self.nbytes, self.numel, self.slots, self.dtype.itemsize,
                          0 if self.dense_dtype is None else self.dense_dtype.itemsize)

    def uses(self, used: Tensor) -> Tensor:
        """bool (K,): which slots are used."""
        return self.ordinal < used[self.owner]

    def write_places(self, counts: Tensor, positions: Tensor, index: Tensor, valid: Tensor) -> None:
        """Fills in the counts of blocks, which are zero, and the positions within them."""
        local = torch.where(valid, index - self.base, 0)
        first = tensor_of(self.block_starts[:-1], self.device)
        counts.scatter_add_(0, first[self.owner] + local // BLOCK, valid.to(torch.int32))
        positions.copy_(local % BLOCK)  # wraps to the unsigned number's bits

    def nonfinite_message(self, bad: Iterable[str]) -> Tensor:
        """A message of no entries, which says that the gradients of these parameters are not finite."""
        message = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
        self.sections(message).exponents[[self.names.index(name) for name in bad]] = NONFINITE
        return seal(message)

    def decode(self, message: Tensor, sender: int) -> tuple[Tensor, Tensor]:
        """Reads a message: positions in the bucket, int64 (E,), and the values there, of the E entries it has.

        Raises:
            FloatingPointError: the sender's gradient was not finite. Every rank reads the same, so all raise it.
            ValueError: it is not what a rank with this layout has written.
        """
        self.check(message, sender)
        counts, _, positions, exponents = self.sections(message)
        _check_finite(exponents, self.names, self.named(sender))
        self.check_places(counts, positions, sender)
        return self.read(message)

    def read(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Reads a message of one's own, which needs no checks: positions, and values."""
        counts, coded, positions, exponents = self.sections(message)
        slot, index, _ = self.read_places(counts, positions)
        return index, scaled(coded[slot], exponents[self.owner[slot]], self.residual)

    def check_places(self, counts: Tensor, positions: Tensor, sender: int) -> None:
        """Raises ValueError if one of them is outside its parameter, or there are more of them than slots."""
        limit = tensor_of(self.counts, self.device)
        if bool((counts < 0).any() | (counts > self.block_sizes).any() | (self.used(counts) > limit).any()) or bool(
                (self.read_places(counts, positions)[2] < 0).any()):
            raise self.corrupt(sender)

    def read_places(self, counts: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each entry's slot, its position in the bucket, and how many entries of its block follow: int64 (E,) each."""
        slot = self.uses(self.used(counts)).nonzero().flatten()
        block = torch.arange(len(counts), device=self.device).repeat_interleave(counts.to(torch.int64))
        local = positions[slot].to(torch.int64) & (BLOCK - 1)
        return slot, local + self.block_bases[block], self.block_sizes[block] - 1 - local

    def used(self, counts: Tensor) -> Tensor:
        """int64 (P,): the slots that each parameter uses, from the counts of its blocks."""
        parameter = torch.arange(len(self.counts), device=self.device).repeat_interleave(
            tensor_of(self.block_starts, self.device).diff())
        used = torch.zeros(len(self.counts), dtype=torch.int64, device=self.device)
        return used.scatter_add_(0, parameter, counts.to(torch.int64))

    def check(self, message: Tensor, sender: int) -> None:
        """Raises ValueError unless a message has the bytes that this layout gives it and its checksum is right."""
        check(message, self.nbytes, self.bucket, self.named(sender))

    def named(self, sender: int) -> str:
        """The sender's name in errors."""
        return sender_name(sender, self.node_size)

    def not_finite(self, sender: int, parameters: Iterable[int]) -> FloatingPointError:
        return not_finite(self.named(sender), [self.names[i] for i in parameters])

    def corrupt(self, sender: int) -> ValueError:
        return corrupt(self.named(sender), self.bucket)


def seal(message: Tensor) -> Tensor:
    """Writes the checksum into a message, or into each of several, (..., nbytes), and returns it."""
    message.view(torch.int32)[..., -2:] = checksums(message)
    return message


def check(message: Tensor, nbytes: int, bucket: str, sender: str) -> None:
    """Raises ValueError unless a message has so many bytes and its checksum is right."""
    if message.numel() != nbytes:
        raise ValueError(f"the message of {sender} for {bucket} must have {nbytes} bytes, got {message.numel()} (do "
                         "all ranks have the same model, Config and schedule?)")
    if not torch.equal(message.view(torch.int32)[-2:], checksums(message)):
        raise corrupt(sender, bucket)


def sender_name(sender: int, node_size: int = 1) -> str:
    """The name of a contributor in errors: a rank, or the ranks of a node."""
    first = sender * node_size
    return f"rank {sender}" if node_size == 1 else f"ranks {first} to {first + node_size - 1}"


def not_finite(sender: str, names: Iterable[str]) -> FloatingPointError:
    verb = "have" if sender.startswith("ranks") else "has"
    error = FloatingPointError(f"{sender} {verb} a gradient that is not finite, in: {', '.join(names)}")
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note("(a warm-up of the sparsity, a lower learning rate or Config(clip_norm=...) may keep it finite; "
                       "Config(nonfinite='skip') leaves such steps out)")
    return error


def _check_finite(exponents: Tensor, names: Sequence[str], sender: str) -> None:
    """Raises FloatingPointError where the exponents say that a gradient is not finite."""
    wrong = (exponents == NONFINITE).nonzero().flatten().tolist()
    if wrong:
        raise not_finite(sender, [names[i] for i in wrong])


def corrupt(sender: str, bucket: str) -> ValueError:
    """The error about a message of a sender, as :func:`sender_name` calls it."""
    return ValueError(f"the message of {sender} for {bucket} is corrupt: it is not what a rank with the same "
                      "model, Config and schedule has written")


def checksums(messages: Tensor) -> Tensor:
    """int32 (..., 2), of messages uint8 (..., nbytes): the sum of all 32-bit words before it, each times an odd number
    of its place's, modulo 2^64.

    Damage has patterns, say one bit every 4,096 bytes. These numbers have none, so such changes do not add up to 0.
    """
    words = messages.view(torch.int32)[..., :-2]
    total = words.new_zeros((*words.shape[:-1], 1), dtype=torch.int64)
    for first, last in slices(words.shape[-1], words):
        mixed = torch.arange(first + 1, last + 1, device=messages.device).mul_(MIXER)
        part = words[..., first:last].to(torch.int64).bitwise_and_(0xFFFFFFFF)
        total += part.mul_((mixed ^ mixed >> 32).bitwise_or_(1)).sum(-1, keepdim=True)
    return total.view(torch.int32)


def slices(length: int, like: Tensor, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges that cover ``length`` places of the last dimension of a tensor, to be worked on one after the other, so
    that intermediate results stay in a CPU's cache, and leave a GPU's memory for others.

    Args:
        multiple: all but the last are of a multiple of so many.
    """
    rows = max(1, like.numel() // max(1, like.shape[-1]))
    most = SLICE if like.device.type == "cpu" else LONG_SLICE
    step = max(multiple, most // rows // multiple * multiple)
    return ((first, min(first + step, length)) for first in range(0, length, step))


def exponents(values: Tensor, owner: Tensor, parameters: int) -> Tensor:
    """int16 (P,): of each parameter's largest value, scaled to TOP; NONFINITE where one is not finite."""
    largest = values.new_zeros(parameters).scatter_reduce_(0, owner, values.abs(), "amax")
    exponent = (torch.frexp(largest).exponent - TOP).clamp_(min=-1022)
    return torch.where(torch.isfinite(largest), exponent, NONFINITE).to(torch.int16)


def scaled(coded: Tensor, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """``coded``, any shape, times 2^exponent, of the same shape, rounded once to ``dtype``."""
    return (coded.double() * power_of_two(exponent)).to(dtype)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, from its bits: ``exp2`` may be off by a rounding, and ranks must agree."""
    biased = exponent.to(torch.int64).clamp(-1022, 1023) + 1023
    return (biased << 52).view(torch.float64)
