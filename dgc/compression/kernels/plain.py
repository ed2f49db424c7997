"""The loops over a bucket in torch operations: for any device, and what the compiled ones are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from dgc.compression import select as selection
from dgc.compression.regions import Regions, Taken
from dgc.compression.residual import Gradient, Residual
from dgc.compression.wire import NONFINITE, Entries, Layout, Rows
from dgc.trace import stage

write, read = Rows.encode, Rows.decode


def accumulate(residual: Residual, gradients: Mapping[str, Gradient],
               scale: Tensor | Mapping[str, Tensor] | None, layout: Layout) -> list[str]:
    """Adds the local gradients into u and v (paper, equation 4); a parameter without one is left as it was.

    Args:
        residual: holds u and v, which this changes.
        gradients: parameter -> its gradient.
        scale: multiplies the gradients first (clipping): one 0-dim tensor for all, or one each.
        layout: of the bucket.

    Returns:
        The parameters whose gradient is not finite; such entries count as 0.
    """
    return residual.accumulate(gradients, scale)


def accumulate_and_select(residual: Residual, gradients: Mapping[str, Gradient],
                          scale: Tensor | Mapping[str, Tensor] | None,
                          layout: Layout, step: int) -> tuple[list[str], Tensor, Tensor]:
    """Adds the gradients in, as :func:`accumulate`, and chooses what is to be sent of each parameter that has one.

    Args:
        residual, gradients, scale, layout: as there.
        step: the optimizer's step, which rotates the sample.

    Returns:
        The parameters whose gradient is not finite; positions in the bucket, int64 (K,), one for each slot and
        ascending within each parameter; how many slots each parameter uses, int64 (P,).
    """
    with stage("dgc::accumulate"):
        bad = residual.accumulate(gradients, scale)
    index, used = layout.base.clone(), torch.zeros(len(residual.names), dtype=torch.int64, device="cpu")
    parts = zip(residual.names, residual.v.split(residual.numels), layout.counts, layout.starts, residual.offsets,
                strict=True)
    for p, (name, v, k, start, offset) in enumerate(parts):
        if name in gradients:
            chosen = selection.sampled(v, k, step)
            used[p] = len(chosen)
            index[start:start + len(chosen)] = chosen + offset
    return bad, index, used.to(residual.v.device)


def encode(residual: Residual, layout: Layout, index: Tensor, used: Tensor, refused: Tensor,
           masking: bool, write: Callable[..., tuple[Tensor, Tensor]] = write) -> tuple[Tensor, Taken]:
    """Takes the chosen entries out of the bucket and writes them down.

    Args:
        index, used: as :func:`accumulate_and_select` returned them.
        refused: bool (), whether a gradient is not finite: nothing is sent but this fact.
        masking: also set u to zero where something was sent (momentum factor masking).
        write: the loop that writes rows.

    Returns:
        The message, uint8 (1, nbytes), and what was taken.
    """
    valid = layout.uses(used) & ~refused
    index = torch.where(valid, index, 0)  # in the other slots there may be anything
    message, sent = write(layout.rows, torch.where(valid, 0, 1), index, residual.v[index], 1)
    residual.take(index, sent, masking)
    return torch.where(refused, layout.rows.status_message(1, NONFINITE), message), Taken(index, sent)


def encode_all(rows: Rows, values: Tensor) -> Tensor:
    """See :meth:`dgc.compression.wire.Rows.encode_all`."""
    return rows.encode_all(values)


def decode_all(rows: Rows, message: Tensor, read: Callable[..., Entries] = read) -> tuple[Tensor, Tensor]:
    """The status of rows of all entries, int64 (R,), and their values, (R, n); ``read`` is the loop that reads rows."""
    entries = read(rows, message)
    return entries.status, entries.values


class Received:
    """What rows say in sum, over a divisor, added up in the order of rows; rows that tell of errors say nothing.

    Args:
        layout: of the bucket.
        rows: the format of the messages.
        messages: uint8 (R, nbytes).
        divisor: of the sum.
        regions: row r is about the region of owner r; None: each is about the whole bucket.

    Attributes:
        status: int64 (R,), of the rows (:mod:`dgc.compression.wire`).
    """

    read: ClassVar[Callable[..., Entries]] = staticmethod(read)

    def __init__(self, layout: Layout, rows: Rows, messages: Tensor, divisor: float, regions: Regions | None = None):
        self.layout, self._divisor = layout, divisor
        if regions is None:
            self.status, self._index, self._values = self.read(rows, messages)
        else:
            self.status, places, self._values = self.read(rows, messages, regions.sizes)
            owners = torch.arange(len(messages), device=messages.device)[:, None]
            # Slots that are not used are at a region's first place, which an empty one does not have.
            self._index = regions.index(owners, places).clamp_(max=layout.numel - 1)

    def write(self, targets: Sequence[Tensor | None]) -> None:
        """Overwrites the targets, one for each parameter or None, with it: contiguous, in the residual's dtype."""
        for target, part in zip(targets, self._total(), strict=True):
            if target is not None:
                target.view(-1).copy_(part)

    def add(self, targets: Sequence[Tensor | None], rates: Sequence[float]) -> None:
        """Adds it, times each parameter's rate, to such targets."""
        for target, part, rate in zip(targets, self._total(), rates, strict=True):
            if target is not None:
                target.view(-1).add_(part.mul_(rate))

    def _total(self) -> tuple[Tensor, ...]:
        total = torch.zeros(self.layout.numel, dtype=self.layout.dtype, device=self.layout.device)
        for index, values in zip(self._index, self._values, strict=True):
            total.index_add_(0, index, values)
        # By a tensor: by a number of the host, torch multiplies on GPUs, with a reciprocal that is rounded.
        return total.div_(total.new_full((), self._divisor)).split(self.layout.numels)


def decay(parameter: Tensor, buffer: Tensor, m: float, decay: float, lr: float, nesterov: bool) -> None:
    """Weight decay with momentum of its own: w = m w + decay * p, and p loses lr * w (Nesterov: lr (m w + decay * p)).

    Args:
        parameter, buffer: p and w, contiguous and of one dtype, float32 or float64.
    """
    # Rounded after every operation, as the compiled one does.
    term = parameter * decay
    buffer.mul_(m).add_(term)
    parameter.sub_(((buffer * m).add_(term) if nesterov else buffer) * lr)
