"""What an optimizer reports: bytes, entries and steps."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Report:
    """What compression did on this rank, in the last step and in total. Bytes are those on the
    wire, by the formulas of ring all-gather and ring allreduce. Headers and negotiation of the
    transport come on top.

    Attributes:
        steps: exchanges, since the optimizer was made: one for each step, or for each backward pass
            outside of ``no_sync()``.
        bytes_sent: bytes that were sent in the last exchange whose step was taken; under ``hierarchical``, to
            other nodes.
        node_bytes: bytes that were sent within the node in that step.
        dense_bytes: bytes that a ring allreduce of all gradients in float32 would have sent in the
            last step.
        message_bytes: bytes that this rank contributed to the last step, whatever the number of
            ranks. The paper counts these.
        sparsity: the schedule's sparsity for the last step; of an adaptive one, for the next step.
        density: entries sent in the last step / entries of all parameters.
        gradient_norm: norm of the local gradients of compressed parameters, after clipping; of
            AdamW, as accumulated.
        residual_norm: norm of v, which is still to be sent.
        total_bytes_sent, total_dense_bytes, total_density: the same, of all steps.
        skipped: steps that no rank took, because a gradient was not finite.
        lost_residuals: residuals of ranks that an elastic job has lost.
        overflow_entries: with ``exchange="reduce"``, in the last step: entries that were chosen for
            other ranks and not sent. A row had no slot for them, or they rounded to 0. They stay in
            v.
    """

    steps: int
    bytes_sent: float
    node_bytes: float
    dense_bytes: float
    message_bytes: int
    sparsity: float
    density: float
    gradient_norm: float
    residual_norm: float
    total_bytes_sent: float
    total_dense_bytes: float
    total_density: float
    skipped: int
    lost_residuals: int
    overflow_entries: int

    @property
    def compression(self) -> float:
        """``dense_bytes`` over ``bytes_sent``; infinity where nothing was sent, as by one process."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else math.inf

    @property
    def total_compression(self) -> float:
        """The same, of all steps."""
        return self.total_dense_bytes / self.total_bytes_sent if self.total_bytes_sent else math.inf

    def as_dict(self) -> dict[str, float]:
        """All values by name, as plain numbers, for a logger. TensorBoard:
        ``writer.add_scalar(f"dgc/{name}", value, step)`` for each. Weights & Biases:
        ``wandb.log({"dgc": report.as_dict()})``.

        ``compression`` and ``total_compression`` are added where they are finite.
        """
        added = {"compression": self.compression, "total_compression": self.total_compression}
        finite = {name: value for name, value in added.items() if value < math.inf}
        return {**asdict(self), **finite}
