"""The wire format of dense sums that are rounded: a whole bucket in N chunks, each added up by one owner.

A chunk has all entries, in order, and no positions. 256 neighbours share an exponent. In bytes, with C entries in a
chunk and w bytes a value:

    value  (C)             float16 or bfloat16
    int16  (C / 256)       exponents: a value counts 2^exponent of its neighbours; or a number that says what is wrong
    zeros                  up to a multiple of 4
    int32  (2)             checksum, the lower half first

The last of the N chunks is filled up with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dgc import cost
from dgc.compression.wire import CORRUPT, NONFINITE, TOP, checksums, power_of_two, seal


class Decoded(NamedTuple):
    """What chunks say."""

    status: Tensor  # int64 (R,): 0, NONFINITE or CORRUPT
    whose: Tensor  # int64 (R,): the chunk that is damaged, where the status is CORRUPT
    values: Tensor  # (R, C), in the residual's dtype; NaN all over where the status is not 0


class Chunks:
    """The format of N chunks of a flat tensor.

    Args:
        numel: entries of the tensor.
        owners: N.
        dtype: of the values.
        residual: the dtype in which they are read: float32 or float64.
    """

    def __init__(self, numel: int, owners: int, dtype: torch.dtype, residual: torch.dtype):
        self.numel, self.owners, self.dtype, self.residual = numel, owners, dtype, residual
        self.size = cost.chunk(numel, owners)
        self._shared = -(-self.size // cost.NEIGHBOURS)  # exponents of a chunk
        self._ends = dtype.itemsize * self.size, dtype.itemsize * self.size + 2 * self._shared
        self.nbytes = cost.chunk_bytes(numel, owners, dtype.itemsize)

    def split(self, flat: Tensor) -> Tensor:
        """A flat tensor as its chunks, (N, C)."""
        return pad(flat, (0, self.owners * self.size - self.numel)).view(self.owners, self.size)

    def join(self, chunks: Tensor) -> Tensor:
        """The flat tensor that these are the chunks of: a view."""
        return chunks.view(-1)[:self.numel]

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes chunks.

        Args:
            values: (R, C) in the residual's dtype. A chunk with one that is not finite, or half the largest number
                that is, says so.

        Returns:
            The chunks, uint8 (R, nbytes), and what receivers will read, (R, C) in the residual's dtype; anything where
            they read that it is not finite.
        """
        groups = self._groups(values)
        largest = groups.abs().amax(-1, keepdim=True)
        fine = (2 * largest).isfinite()  # what rounds up must be finite, too
        least = -1022 if self.residual == torch.float64 else -126  # so that both powers of two are normal numbers
        exponent = torch.where(fine, (torch.frexp(largest).exponent - TOP).clamp_(min=least), 0)
        coded = groups.mul(self._power(-exponent)).to(self.dtype)
        message = torch.zeros(len(values), self.nbytes, dtype=torch.uint8, device=values.device)
        words, exponents = self._sections(message)
        words.copy_(coded.view(len(values), -1)[:, :self.size])
        exponents.copy_(torch.where(fine, exponent, NONFINITE).squeeze(-1))
        return seal(message), self._flat(coded.to(self.residual).mul_(self._power(exponent)))

    def telling(self, whose: Tensor) -> Tensor:
        """One chunk that says whose chunk is damaged, int64 (): uint8 (1, nbytes)."""
        message = torch.zeros(1, self.nbytes, dtype=torch.uint8, device=whose.device)
        message[:, :4].view(torch.int32)[:] = whose
        self._sections(message)[1][:] = CORRUPT
        return seal(message)

    def decode(self, message: Tensor) -> Decoded:
        """Reads chunks, uint8 (R, nbytes)."""
        words, exponents = self._sections(message)
        damaged = (checksums(message) != message.view(torch.int32)[:, -2:]).any(1)
        telling = exponents[:, 0] == CORRUPT
        status = torch.where((exponents == NONFINITE).any(1), NONFINITE, 0)
        status = torch.where(damaged | telling, CORRUPT, status)
        said = message[:, :4].view(torch.int32)[:, 0].to(torch.int64)
        whose = torch.where(damaged, torch.arange(len(message), device=message.device), said)
        fine = (status == 0)[:, None]
        values = self._groups(words).to(self.residual).mul_(self._power(torch.where(fine, exponents, 0)[..., None]))
        return Decoded(status, whose, torch.where(fine, self._flat(values), torch.nan))

    def _groups(self, values: Tensor) -> Tensor:
        """(R, C) as neighbours that share an exponent, (R, C / 256, 256), the last ones filled up with zeros."""
        filled = pad(values, (0, self._shared * cost.NEIGHBOURS - self.size))
        return filled.view(len(values), self._shared, cost.NEIGHBOURS)

    def _flat(self, groups: Tensor) -> Tensor:
        """(R, C) again."""
        return groups.view(len(groups), -1)[:, :self.size]

    def _power(self, exponent: Tensor) -> Tensor:
        return power_of_two(exponent).to(self.residual)

    def _sections(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Views: values (R, C), exponents (R, C / 256)."""
        a, b = self._ends
        return message[:, :a].view(self.dtype), message[:, a:b].view(torch.int16)
