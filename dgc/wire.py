"""How it is written down: the entries of one bucket <-> one message of fixed size.

A message has k slots for each parameter, whether they are all used or not, so that its size is known to every rank
beforehand. In bytes, with P parameters and K slots of which S have 16-bit indices, and w bytes a value:

    int32  (K - S)   positions within the large parameters
    value  (K)       float16, bfloat16 or float32; 0 in a slot that is not used
    int16  (S)       positions within the parameters of at most 65,536 entries, as unsigned numbers
    int16  (P)       exponents: a value counts 2^exponent of its parameter
    zeros            up to a multiple of 4

The exponent puts a parameter's largest value just below 2^15, so that float16 neither overflows nor loses its small
values, whatever the scale of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from dgc.residual import SHORT, Bucket

TOP = 15  # the largest value of a parameter is scaled to [2^(TOP - 1), 2^TOP)
NONFINITE = 32767  # the exponent that says: a value of this parameter was not finite


class Layout:
    """Where things are in the messages of a bucket, for one count of entries per parameter.

    Args:
        bucket: whose messages.
        counts: k of each parameter, in the bucket's order.
        dtype: of the values.
    """

    def __init__(self, bucket: Bucket, counts: Sequence[int], dtype: torch.dtype):
        self.names, self.counts, self.dtype = bucket.names, tuple(counts), dtype
        self.starts = tuple(accumulate(counts, initial=0))[:-1]
        self.slots = sum(counts)
        self.short_slots = sum(k for k, numel in zip(counts, bucket.numels, strict=True) if numel <= SHORT)
        self.residual, self.device = bucket.v.dtype, bucket.v.device
        self._offsets, self._numels = bucket.offsets, bucket.numels
        long = 4 * (self.slots - self.short_slots)
        used = long + self.slots * dtype.itemsize + 2 * self.short_slots + 2 * len(counts)
        self.nbytes = used + -used % 4

    @cached_property
    def owner(self) -> Tensor:
        """int64 (K,): the parameter that each slot belongs to."""
        repeats = torch.tensor(self.counts, device=self.device)
        return torch.arange(len(self.counts), device=self.device).repeat_interleave(repeats)

    @cached_property
    def base(self) -> Tensor:
        """int64 (K,): where that parameter begins in the bucket."""
        return torch.tensor(self._offsets, device=self.device)[self.owner]

    @cached_property
    def size(self) -> Tensor:
        """int64 (K,): how many entries it has."""
        return torch.tensor(self._numels, device=self.device)[self.owner]

    def encode(self, index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes a message.

        Args:
            index: int64 (K,), positions in the bucket, in the order of the slots. Unused slots hold their ``base``.
            values: (K,) in the residual's dtype; 0 in unused slots.

        Returns:
            The message, uint8 (nbytes,), and what receivers will read, (K,) in the residual's dtype.
        """
        largest = values.new_zeros(len(self.counts)).scatter_reduce_(0, self.owner, values.abs(), "amax")
        exponent = (torch.frexp(largest).exponent - TOP).clamp_(min=-1022)
        exponent = torch.where(torch.isfinite(largest), exponent, NONFINITE).to(torch.int16)
        coded = (values.double() * _power_of_two(-exponent)[self.owner]).to(self.dtype)
        local = index - self.base
        parts = (local[self.short_slots:].to(torch.int32), coded, local[:self.short_slots].to(torch.int16), exponent)
        message = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)
        used = torch.cat([part.view(torch.uint8) for part in parts])
        message[:used.numel()] = used
        return message, self._scale(coded, exponent)

    def decode(self, message: Tensor, sender: int, bucket: str) -> tuple[Tensor, Tensor]:
        """Reads a message: ``index`` and ``values`` as :meth:`encode` took and returned them.

        Raises:
            FloatingPointError: the sender's gradient was not finite. Every rank reads the same, so all raise it.
            ValueError: the message cannot have been written with this layout.
        """
        if message.numel() != self.nbytes:
            raise ValueError(f"the message of rank {sender} for {bucket} has {message.numel()} bytes; "
                             f"expected {self.nbytes}: do all ranks have the same model, Config and schedule?")
        sizes = (4 * (self.slots - self.short_slots), self.slots * self.dtype.itemsize, 2 * self.short_slots,
                 2 * len(self.counts), self.nbytes)
        ends = [sum(sizes[:i]) for i in range(4)] + [sum(sizes[:4])]
        far = message[:ends[1]].view(torch.int32).to(torch.int64)
        coded = message[ends[1]:ends[2]].view(self.dtype)
        near = message[ends[2]:ends[3]].view(torch.int16).to(torch.int64) & (SHORT - 1)
        exponent = message[ends[3]:ends[4]].view(torch.int16)
        wrong = (exponent == NONFINITE).nonzero().flatten().tolist()
        if wrong:
            names = ", ".join(self.names[i] for i in wrong)
            raise FloatingPointError(f"rank {sender} has a gradient that is not finite, in: {names}")
        local = torch.cat([near, far])
        if bool(((local < 0) | (local >= self.size)).any()):
            raise ValueError(f"the message of rank {sender} for {bucket} points outside its parameters: it is corrupt")
        return local + self.base, self._scale(coded, exponent)

    def _scale(self, coded: Tensor, exponent: Tensor) -> Tensor:
        return (coded.double() * _power_of_two(exponent)[self.owner]).to(self.residual)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, from its bits: ``exp2`` may be off by a rounding, and ranks must agree."""
    biased = exponent.to(torch.int64).clamp(-1022, 1023) + 1023
    return (biased << 52).view(torch.float64)
