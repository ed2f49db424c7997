"""Bytes, entries and steps: counted, and reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dgc.collective import Collective, World, sent_bytes
from dgc.compression.residual import norm
from dgc.engine.parameters import Parameters
from dgc.engine.step import Step


@dataclass(frozen=True)
class Report:
    """What compression did, on this rank, in the last step and in total. Bytes are those on the wire, by the formulas
    of ring all-gather and ring allreduce; messages' headers and the transport's negotiation come on top.

    Attributes:
        steps: that were exchanged, since the optimizer was made.
        bytes_sent: in the last step that was taken; where it is hierarchical, to other nodes.
        node_bytes: and those within the node.
        dense_bytes: that a ring allreduce of all gradients in float32 would have sent in the last step.
        message_bytes: that this rank contributed to the last step, whatever the number of ranks: what the paper counts.
        sparsity: that the schedule gave for the last step; of an adaptive one, for the next.
        density: entries sent in the last step / entries of all parameters.
        gradient_norm: of the local gradients of compressed parameters, after clipping; of AdamW as accumulated.
        residual_norm: of v, what is pending.
        total_bytes_sent, total_dense_bytes, total_density: the same of all steps.
        skipped: steps that no rank took, as a gradient was not finite.
        lost_residuals: of ranks that an elastic job has lost.
        overflow_entries: of ``exchange="reduce"``, in the last step: chosen for other ranks and not sent, without a
            slot in a row, or too small for its float16. They stay in v.
        held_entries: of the same: that came to this rank to be added up, one from each rank that sent it, and were not
            passed on. They stay in v.
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
        """All of it by name, as plain numbers, for a logger: ``writer.add_scalar(f"dgc/{name}", value, step)`` of each
        with TensorBoard, or ``wandb.log({"dgc": report.as_dict()})``.

        ``compression`` and ``total_compression`` are added, how many times fewer bytes were sent than by a dense ring
        allreduce in float32, of the last step and in total; each is left out where nothing was sent, as by one process.
        """
        numbers: dict[str, float] = asdict(self)
        for name, dense, sent in (("compression", self.dense_bytes, self.bytes_sent),
                                  ("total_compression", self.total_dense_bytes, self.total_bytes_sent)):
            if sent > 0:
                numbers[name] = dense / sent
        return numbers


class Ledger:
    """Counts what this rank sends."""

    def __init__(self) -> None:
        self._last: Any = Counter()  # bytes are fractions, by the formulas, and entries are integers
        self._taken = self._last  # of the last step that was taken
        self._totals: Any = Counter()
        self._steps = self._skipped = 0
        self.lost_residuals = 0

    def open(self, dense_bytes: float) -> None:
        """A step begins, which would send so much uncompressed; or a flush, which :meth:`drop` ends."""
        self._last = Counter({"dense_bytes": dense_bytes})

    def count(self, world: World, collective: Collective) -> None:
        """A collective begins."""
        within = collective.group == "node"
        self._last["node_bytes" if within else "bytes_sent"] += sent_bytes(collective, world)
        self._last["message_bytes"] += 0 if within else collective.tensor.nbytes

    def counting(self, step: Step) -> Callable[[Collective], None]:
        """A function that counts the collectives of a step."""
        return lambda collective: self.count(step.world, collective)

    def skip(self) -> None:
        """The step is not taken, by any rank."""
        self._skipped += 1
        self.drop()

    def drop(self) -> None:
        """The step under way, if there is one, is not taken: the report is again of the one before, and totals have
        what was sent.
        """
        if self._last is not self._taken:
            self._totals["bytes_sent"] += self._last["bytes_sent"]
            self._last = self._taken

    def close(self, numel: int, dense: int) -> None:
        """The step is exchanged.

        Args:
            numel: entries of all parameters.
            dense: of those that travel dense.
        """
        self._steps += 1
        self._last["dense_entries"] = dense
        self._totals["numel"] += numel
        for key in ("bytes_sent", "dense_bytes", "dense_entries"):
            self._totals[key] += self._last[key]
        self._taken = self._last

    def report(self, parameters: Parameters, sparsity: float) -> Report:
        """The last step, and totals. Norms are computed here.

        Args:
            parameters: of the optimizer.
            sparsity: of the last step.
        """
        compressed, numel = parameters.compressed(), max(1, parameters.numel)
        last, totals = self._last, self._totals
        return Report(
            steps=self._steps,
            bytes_sent=float(last["bytes_sent"]),
            node_bytes=float(last["node_bytes"]),
            dense_bytes=float(last["dense_bytes"]),
            message_bytes=last["message_bytes"],
            sparsity=sparsity,
            density=(sum(int(bucket.entries_sent) for bucket in compressed) + last["dense_entries"]) / numel,
            gradient_norm=sum(float(bucket.gradient_square) for bucket in compressed) ** 0.5,
            residual_norm=sum(float(norm(bucket.v)) ** 2 for bucket in parameters.kept()) ** 0.5,
            total_bytes_sent=float(totals["bytes_sent"]),
            total_dense_bytes=float(totals["dense_bytes"]),
            total_density=(sum(int(bucket.total_entries) for bucket in compressed) + totals["dense_entries"])
            / max(1, totals["numel"]),
            skipped=self._skipped,
            lost_residuals=self.lost_residuals,
            overflow_entries=sum(int(bucket.overflow_entries) for bucket in compressed),
            held_entries=sum(int(bucket.held_entries) for bucket in compressed))
