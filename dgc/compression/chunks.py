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

from dgc.compression.sizes import NEIGHBOURS, chunk, chunk_bytes
from dgc.compression.wire import CORRUPT, NONFINITE, TOP, checksums, power_of_two, seal, slices


class Told(NamedTuple):
    """What chunks say beside their values."""

    status: Tensor  # int64 (R,): 0, NONFINITE or CORRUPT
    whose: Tensor  # int64 (R,): the chunk that is damaged, where the status is CORRUPT


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
        self.size = chunk(numel, owners)
        self._ends = dtype.itemsize * self.size, dtype.itemsize * self.size + 2 * -(-self.size // NEIGHBOURS)
        self.nbytes = chunk_bytes(numel, owners, dtype.itemsize)

    def split(self, flat: Tensor) -> Tensor:
        """A flat tensor as its chunks, (N, C)."""
        return pad(flat, (0, self.owners * self.size - self.numel)).view(self.owners, self.size)

    def join(self, chunks: Tensor) -> Tensor:
        """The flat tensor that these are the chunks of: a view."""
        return chunks.view(-1)[:self.numel]

    def encode(self, values: Tensor) -> Tensor:
        """Writes chunks, and leaves in ``values`` what rounding drops.

        Args:
            values: (R, C) in the residual's dtype. A chunk with one that is not finite, or half the largest number
                that is, says so; then anything is left in it.

        Returns:
            The chunks, uint8 (R, nbytes).
        """
        message = torch.zeros(len(values), self.nbytes, dtype=torch.uint8, device=values.device)
        words, exponents = self._sections(message)
        least = -1022 if self.residual == torch.float64 else -126  # so that both powers of two are normal numbers
        for first, last in slices(self.size, values, NEIGHBOURS):
            groups = _groups(values[:, first:last])
            largest = groups.abs().amax(-1, keepdim=True)
            fine = (2 * largest).isfinite()  # what rounds up must be finite, too
            exponent = torch.where(fine, (torch.frexp(largest).exponent - TOP).clamp_(min=least), 0)
            coded = groups.mul(self._power(-exponent))
            words[:, first:last] = coded.flatten(1)[:, :last - first]
            exponents[:, _shared(first, last)] = torch.where(fine, exponent, NONFINITE).squeeze(-1)
            sent = coded.copy_(_groups(words[:, first:last])).mul_(self._power(exponent))
            values[:, first:last] -= sent.flatten(1)[:, :last - first]
        return seal(message)

    def telling(self, whose: Tensor) -> Tensor:
        """One chunk that says whose chunk is damaged, int64 (): uint8 (1, nbytes)."""
        message = torch.zeros(1, self.nbytes, dtype=torch.uint8, device=whose.device)
        message[:, :4].view(torch.int32)[:] = whose
        self._sections(message)[1][:] = CORRUPT
        return seal(message)

    def read(self, message: Tensor) -> Told:
        """Whether chunks are fine, uint8 (R, nbytes)."""
        exponents = self._sections(message)[1]
        damaged = (checksums(message) != message.view(torch.int32)[:, -2:]).any(1)
        telling = exponents[:, 0] == CORRUPT
        status = torch.where((exponents == NONFINITE).any(1), NONFINITE, 0)
        status = torch.where(damaged | telling, CORRUPT, status)
        said = message[:, :4].view(torch.int32)[:, 0].to(torch.int64)
        return Told(status, torch.where(damaged, torch.arange(len(message), device=message.device), said))

    def values(self, message: Tensor, told: Told) -> Tensor:
        """The values of chunks, (R, C); NaN all over where they are not fine."""
        values = torch.empty(len(message), self.size, dtype=self.residual, device=message.device)
        for first, last in slices(self.size, values, NEIGHBOURS):
            values[:, first:last] = self._part(message, told, first, last)
        return values

    def add(self, message: Tensor, told: Told, but: int, total: Tensor) -> None:
        """Adds the values of all chunks but one, a row of ``message``, to ``total``, (1, C)."""
        others = torch.arange(len(message), device=message.device) != but
        for first, last in slices(self.size, message, NEIGHBOURS):
            part = self._part(message, told, first, last)
            total[:, first:last] += torch.where(others[:, None], part, 0).sum(0, keepdim=True)

    def _part(self, message: Tensor, told: Told, first: int, last: int) -> Tensor:
        words, exponents = self._sections(message)
        fine = (told.status == 0)[:, None, None]
        exponent = exponents[:, _shared(first, last), None]
        power = torch.where(fine, self._power(torch.where(fine, exponent, 0)), torch.nan)
        return _groups(words[:, first:last]).to(self.residual).mul_(power).flatten(1)[:, :last - first]

    def _power(self, exponent: Tensor) -> Tensor:
        return power_of_two(exponent).to(self.residual)

    def _sections(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Views: values (R, C), exponents (R, C / 256)."""
        a, b = self._ends
        return message[:, :a].view(self.dtype), message[:, a:b].view(torch.int16)


def _groups(values: Tensor) -> Tensor:
    """(R, E) as neighbours that share an exponent, (R, E / 256, 256), the last ones filled up with zeros."""
    return pad(values, (0, -values.shape[1] % NEIGHBOURS)).unflatten(1, (-1, NEIGHBOURS))


def _shared(first: int, last: int) -> slice:
    """The exponents of entries first to last."""
    return slice(first // NEIGHBOURS, -(-last // NEIGHBOURS))
