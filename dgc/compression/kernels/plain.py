"""The loops over a bucket in torch operations: for any device, and what the compiled ones are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dgc.compression import select as selection
from dgc.compression.residual import Bucket, Gradient
from dgc.compression.wire import Layout
from dgc.trace import stage


def accumulate(bucket: Bucket, gradients: Mapping[str, Gradient], scale: Tensor | Mapping[str, Tensor] | None,
               layout: Layout) -> list[str]:
    """Adds the local gradients into u and v (paper, equation 4); a parameter without one is left as it was.

    Args:
        bucket: holds u and v, which this changes.
        gradients: parameter -> its gradient.
        scale: multiplies the gradients first (clipping): one 0-dim tensor for all, or one each.
        layout: of the bucket.

    Returns:
        The parameters whose gradient is not finite; such entries count as 0.
    """
    return bucket.accumulate(gradients, scale)


def select(bucket: Bucket, gradients: Mapping[str, Gradient], scale: Tensor | Mapping[str, Tensor] | None,
           layout: Layout, step: int) -> tuple[list[str], Tensor, Tensor]:
    """Adds the gradients in, as :func:`accumulate`, and chooses what is to be sent of each parameter that has one.

    Args:
        bucket, gradients, scale, layout: as there.
        step: the optimizer's step, which rotates the sample.

    Returns:
        The parameters whose gradient is not finite; positions in the bucket, int64 (K,), one for each slot and
        ascending within each parameter; how many slots each parameter uses, int64 (P,).
    """
    with stage("dgc::accumulate"):
        bad = bucket.accumulate(gradients, scale)
    index, used = layout.base.clone(), torch.zeros(len(bucket.names), dtype=torch.int64, device="cpu")
    parts = zip(bucket.names, bucket.v.split(bucket.numels), layout.counts, layout.starts, bucket.offsets, strict=True)
    for p, (name, v, k, start, offset) in enumerate(parts):
        if name in gradients:
            chosen = selection.sampled(v, k, step)
            used[p] = len(chosen)
            index[start:start + len(chosen)] = chosen + offset
    return bad, index, used.to(bucket.v.device)


def encode(bucket: Bucket, layout: Layout, index: Tensor, used: Tensor, masking: bool) -> Tensor:
    """Takes the chosen entries out of the bucket and writes them down.

    Args:
        index, used: as :func:`select` returned them.
        masking: also set u to zero where something was sent (momentum factor masking).

    Returns:
        The message, uint8 (nbytes,).
    """
    message, sent = layout.encode(index, used, bucket.v[index])
    bucket.take(index, sent, masking)
    return message


class Scattered:
    """The sum of scattered entries, over a divisor.

    Args:
        layout: of the bucket.
        entries: positions in it, int64 (E,), and values (E,), added up in this order.
        divisor: of the sum.
    """

    def __init__(self, layout: Layout, entries: Sequence[tuple[Tensor, Tensor]], divisor: float):
        self.layout, self._entries, self._divisor = layout, entries, divisor

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
        total = torch.zeros(self.layout.numel, dtype=self.layout.residual, device=self.layout.device)
        for index, values in self._entries:
            total.index_add_(0, index, values)
        # By a tensor: by a number of the host, torch multiplies on GPUs, with a reciprocal that is rounded.
        return total.div_(total.new_full((), self._divisor)).split(self.layout.numels)


class Received(Scattered):
    """All ranks' messages, checked: what they say in sum, added up in the order of ranks, alike to the bit everywhere.

    Args:
        layout: they were written with it.
        messages: uint8 (N, nbytes).
        divisor: of the sum.

    Raises:
        FloatingPointError, ValueError: see :meth:`dgc.compression.wire.Layout.decode`.
    """

    def __init__(self, layout: Layout, messages: Tensor, divisor: float):
        super().__init__(layout, [layout.decode(message, sender) for sender, message in enumerate(messages)], divisor)

    def own(self, bucket: Bucket, message: Tensor) -> None:
        """Told what this rank took out of v for its message, which goes back should the messages prove to be bad.
        Here that has been seen to by now.
        """


def settle(bucket: Bucket) -> FloatingPointError | ValueError | None:
    """The error in the messages that this bucket received, where it is known later than they are received: not here. It
    is told once, and then what this rank had taken out of v for them is back there.
    """
    return None


def decay(parameter: Tensor, buffer: Tensor, m: float, decay: float, lr: float, nesterov: bool) -> None:
    """Weight decay with momentum of its own: w = m w + decay * p, and p loses lr * w (Nesterov: lr (m w + decay * p)).

    Args:
        parameter, buffer: p and w, contiguous and of one dtype, float32 or float64.
    """
    # Rounded after every operation, as the compiled one does.
    term = parameter * decay
    buffer.mul_(m).add_(term)
    parameter.sub_(((buffer * m).add_(term) if nesterov else buffer) * lr)
