"""What an optimizer reports: bytes, entries and steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Report:
    """What compression did, on this rank, in the last step and in total. Bytes are those on the
    wire, by the formulas of ring all-gather and ring allreduce; messages' headers and the
    transport's negotiation come on top.

    Attributes:
        steps: that were exchanged, since the optimizer was made.
        bytes_sent: in the last step that was taken; where it is hierarchical, to other nodes.
        node_bytes: and those within the node.
        dense_bytes: that a ring allreduce of all gradients in float32 would have sent in the last
            step.
        message_bytes: that this rank contributed to the last step, whatever the number of ranks:
            what the paper counts.
        sparsity: that the schedule gave for the last step; of an adaptive one, for the next.
        density: entries sent in the last step / entries of all parameters.
        gradient_norm: of the local gradients of compressed parameters, after clipping; of AdamW as
            accumulated.
        residual_norm: of v, what is pending.
        total_bytes_sent, total_dense_bytes, total_density: the same of all steps.
        skipped: steps that no rank took, as a gradient was not finite.
        lost_residuals: of ranks that an elastic job has lost.
        overflow_entries: of ``exchange="reduce"``, in the last step: chosen for other ranks and not
            sent, without a slot in a row, or too small for its float16. They stay in v.
        held_entries: of the same: that came to this rank to be added up, one from each rank that
            sent it, and were not passed on. They stay in v.
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
    held_entries: int

    def as_dict(self) -> dict[str, float]:
        """All of it by name, as plain numbers, for a logger: ``writer.add_scalar(f"dgc/{name}",
        value, step)`` of each with TensorBoard, or ``wandb.log({"dgc": report.as_dict()})``.

        ``compression`` and ``total_compression`` are added, how many times fewer bytes were sent
        than by a dense ring allreduce in float32, of the last step and in total; each is left out
        where nothing was sent, as by one process.
        """
        numbers: dict[str, float] = asdict(self)
        for name, dense, sent in (
            ("compression", self.dense_bytes, self.bytes_sent),
            ("total_compression", self.total_dense_bytes, self.total_bytes_sent),
        ):
            if sent > 0:
                numbers[name] = dense / sent
        return numbers
