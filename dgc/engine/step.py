"""The state of one training step, and what this rank has sent in it and in all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from dgc.collective import Collective, World, sent_bytes
from dgc.compression.residual import norm
from dgc.engine.parameters import ParameterBucket, Parameters, shard
from dgc.engine.report import Report
from dgc.paths.averaged import SparseUpdate, Update
from dgc.transport.run import PathRun, join_streams

UNKNOWN_VERSION = -1
# A gradient as it was: how to find the tensor, and how often it had been written into. The
# reference is weak, as the id of a freed tensor is used again. UNKNOWN_VERSION: of a view, which has one
# version with the other views of its tensor.
GradientVersion: TypeAlias = "tuple[Callable[[], Tensor | None], int]"


class Phase(Enum):
    """How far a step is."""

    IDLE = "no gradient has come"
    COLLECTING = "gradients come, and leave"
    EXCHANGED = "p.grad holds the averaged update, which waits for step()"
    SKIPPED = (
        "a gradient was not finite, so no rank takes this step; step() skips it, or raises an error"
    )


@dataclass(frozen=True, eq=False)
class InFlight:
    """An exchange under way."""

    bucket: ParameterBucket
    parameters: list[Tensor]  # those of the bucket that take part
    run: PathRun[Update | SparseUpdate]


@dataclass(frozen=True, eq=False)
class ReceivedUpdate:
    """An update that has come."""

    bucket: ParameterBucket
    parameters: list[Tensor]
    update: Update


def version_of(gradient: Tensor | None, writes: int = 0) -> GradientVersion:
    """The record of a gradient, as it will be after so many more writes into it."""
    return (lambda: None, 0) if gradient is None else (ref(gradient), gradient._version + writes)


def is_unchanged(before: GradientVersion, gradient: Tensor | None) -> bool:
    """Whether it is the same tensor, in which nothing was written since."""
    tensor, version = before
    return tensor() is gradient and (gradient is None or gradient._version == version)


class Inverse(NamedTuple):
    """1 / the loss's scale."""

    tensor: Tensor  # 0-dim, on the parameters' device
    number: float  # the same, for which no device is waited for


class Step:
    """One exchange of this rank, from its first gradient on; then what waits for step().

    Nothing in it is reset: each exchange makes a new one (:meth:`Engine._next_step`), which takes
    over what step() has to know of the last one, such as its updates.

    Args:
        parameters: all that may have a gradient; of a dict, torch is not asked for their hashes.
        passes: how many backward passes add up to this step.
        phase: IDLE, or how the last exchange ended, until step() has been called.
        before: that exchange's step, whose updates wait for step().
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        passes: int,
        phase: Phase = Phase.IDLE,
        before: Step | None = None,
    ):
        self.phase, self._passes = phase, passes
        # Backward passes until a gradient is complete.
        self.delays = dict.fromkeys(parameters, passes)
        self.world = World(0, 1)
        self.with_gradient: set[Tensor] = set()  # parameters that have had a gradient
        # Bucket -> how many of its gradients are not complete yet.
        self.missing: dict[ParameterBucket, int] = {}
        self.streams: set[Any] = set()  # in which gradients were computed, of GPUs
        self.group_of: dict[Tensor, dict[str, Any]] = {}  # parameter -> its param group
        self.launched = 0  # buckets
        self.failed = False
        self.in_flight: list[InFlight] = []
        self.node_means: dict[Tensor, Tensor] = {}  # parameter -> the mean of its node's gradients
        self.clip: Tensor | None = None  # factor from clipping by the global norm
        # What the exchange has decided and found, which step() goes by.
        # Nothing is compressed: p.grad is the averaged gradient.
        self.stock: bool = before is None or before.stock
        # Gradients travel dense after this step.
        self.hands_back: bool = before is not None and before.hands_back
        self.inverse: Inverse | None = None if before is None else before.inverse
        # step() raises it.
        self.error: FloatingPointError | None = None if before is None else before.error
        # Updates that step() applies itself.
        self.direct: list[ReceivedUpdate] = [] if before is None else before.direct
        # Compressed updates that wait for step(). If it does not come, what was sent is added back to
        # v.
        self.unapplied: list[ReceivedUpdate] = [] if before is None else before.unapplied
        self.earlier: list[ReceivedUpdate] = []  # those of an exchange before, in the same step
        self.changes = 0  # of parameters, when the exchange had ended
        # Parameter -> its gradient, when it left or its update came.
        self.versions: dict[Tensor, GradientVersion] = {}
        # The same of an earlier exchange in the same step.
        self.earlier_versions: dict[Tensor, GradientVersion] = {}
        # Parameter -> whether p.grad holds an earlier update and a gradient, where DDP's hook knows
        # it.
        self.holds: dict[Tensor, bool] = {}
        self.sent: Any = Counter()  # bytes by kind; by the formulas they are fractions

    def one_more(self, parameters: Iterable[Tensor], passes: int) -> Step:
        """The step of one more exchange before step(), which takes over the updates that wait."""
        step = Step(parameters, passes)
        step.earlier, step.direct, step.earlier_versions, step.holds = (
            self.unapplied,
            self.direct,
            self.versions,
            self.holds,
        )
        return step

    @property
    def has_earlier_update(self) -> bool:
        """Whether an update of compressed gradients waits for step(), and a gradient to come is
        added to it.
        """
        return bool(self.earlier or (self.phase is Phase.EXCHANGED and self.unapplied))

    @property
    def waits_for_update(self) -> bool:
        """Whether gradients or an update wait for step()."""
        return self.phase in (Phase.COLLECTING, Phase.EXCHANGED)

    @property
    def exchanged(self) -> bool:
        """Whether all is exchanged, or was skipped."""
        return self.phase in (Phase.EXCHANGED, Phase.SKIPPED)

    def collect(
        self, world: World, group_of: dict[Tensor, dict[str, Any]], buckets: list[ParameterBucket]
    ) -> None:
        """Starts to collect gradients, at the first one."""
        self.phase, self.world, self.group_of = Phase.COLLECTING, world, group_of
        # Frozen ones count, as they may thaw within the step; those frozen from the start travel
        # apart, and last.
        self.missing = {bucket: len(bucket.parameters) for bucket in buckets}

    def record_gradient(
        self, parameter: Tensor, delay: int, bucket_of: Mapping[Tensor, ParameterBucket]
    ) -> bool:
        """A backward pass has added to a parameter's gradient. Returns whether that completes its
        bucket.

        Args:
            delay: the backward passes that were missing before.
            bucket_of: parameter -> its bucket.
        """
        self.with_gradient.add(parameter)
        if parameter.is_cuda:
            self.streams.add(torch.cuda.current_stream(parameter.device))
        elif torch.cuda.is_initialized() and shard(parameter) is not None:
            # FSDP2 that offloads to the CPU: before torch 2.13 its copy of the gradient is still on
            # the way, in here.
            torch.cuda.current_stream().synchronize()
        self.delays[parameter] = delay - 1
        if delay > 1:
            return False
        bucket = bucket_of[parameter]
        self.missing[bucket] -= 1
        return self.missing[bucket] == 0

    def record_versions(self, parameters: Iterable[Tensor]) -> None:
        """Records the gradients as they are."""
        for p in parameters:
            if (g := p.grad) is not None:
                owns_memory = g._base is None or g._base.numel() == g.numel()
                self.versions[p] = ref(g), g._version if owns_memory else UNKNOWN_VERSION

    def passes(self, parameter: Tensor) -> int:
        """How many backward passes of this step have added to a parameter's gradient."""
        return self._passes - self.delays[parameter] if parameter in self.with_gradient else 0

    def holds_update(self, parameter: Tensor, name: str, passes: Collection[int]) -> bool:
        """Whether ``p.grad`` is still the update that waits for step(), to which backward passes
        have added.

        Args:
            parameter: whose.
            name: of the parameter.
            passes: how many of them there may have been.

        Raises:
            RuntimeError: something else has changed it.
        """
        if parameter in self.holds:
            return self.holds[parameter]
        before, gradient = (self.earlier_versions or self.versions).get(parameter), parameter.grad
        if before is None or gradient is None or before[0]() is not gradient:
            return False
        if before[1] == UNKNOWN_VERSION or gradient._version - before[1] not in passes:
            raise RuntimeError(
                f"the gradient of {name} must be left as it is between the exchange and one more "
                "backward() before step(), got one that was changed, so that nobody can tell the new "
                "gradient in it (drop the update by optimizer.zero_grad())"
            )
        return True

    def count(self, collective: Collective) -> None:
        """Counts the bytes of a collective that begins."""
        within = collective.group == "intra_node"
        self.sent["node_bytes" if within else "bytes_sent"] += sent_bytes(collective, self.world)
        self.sent["message_bytes"] += 0 if within else collective.tensor.nbytes

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Marks the step as failed if what is within fails."""
        try:
            yield
        except BaseException:
            self.failed = True
            raise

    def wait_for_gradients(self) -> None:
        """Launches what comes next after all gradients that have come, in whatever stream each was
        computed.
        """
        if len(self.streams) > 1:  # than that of the gradient that has just come
            join_streams(self.streams)

    def scaled_out(self, factor: Tensor | None) -> Tensor | None:
        """A clipping factor, or a norm, with the loss's scale divided out."""
        if self.inverse is None:
            return factor
        return self.inverse.tensor if factor is None else factor * self.inverse.tensor.to(factor)

    def start_inter_node(self, wait: bool) -> None:
        """Starts the exchange among nodes of what has been averaged within the node."""
        for flight in self.in_flight:
            flight.run.start_inter_node(wait)

    def abort(self, wait: bool) -> None:
        """Aborts the exchanges under way, which restores v."""
        for flight in self.in_flight:
            flight.run.abort(wait)
        self.in_flight = []


class Ledger:
    """Counts the bytes and the steps of this rank."""

    def __init__(self) -> None:
        self._last: Any = Counter()  # of the last step that was taken
        self._totals: Any = Counter()
        self._steps = self._skipped = 0
        self.lost_residuals = 0

    def close_skipped(self, step: Step) -> None:
        """Closes a step that no rank takes. A step that raises an error is not counted."""
        self._skipped += step.error is None
        self.close_without_update(step)

    def close_without_update(self, step: Step) -> None:
        """Closes an exchange that brings no update to step(): only the totals count its bytes."""
        self._totals["bytes_sent"] += step.sent["bytes_sent"]
        step.sent = Counter()

    def close_with_update(self, step: Step, numel: int, dense: int) -> None:
        """Closes an exchange whose update waits for step().

        Args:
            step: that is exchanged.
            numel: entries of all parameters.
            dense: of those that travel dense.
        """
        self._steps += 1
        self._last, step.sent = step.sent, Counter()
        self._last["dense_entries"] = dense
        self._totals["numel"] += numel
        for key in ("bytes_sent", "dense_bytes", "dense_entries"):
            self._totals[key] += self._last[key]

    def report(self, parameters: Parameters, sparsity: float) -> Report:
        """The last step, and totals. Norms are computed here.

        Args:
            parameters: of the optimizer.
            sparsity: of the last step.
        """
        compressed, numel = parameters.compressed_residuals(), max(1, parameters.numel)
        last, totals = self._last, self._totals
        return Report(
            steps=self._steps,
            bytes_sent=float(last["bytes_sent"]),
            node_bytes=float(last["node_bytes"]),
            dense_bytes=float(last["dense_bytes"]),
            message_bytes=last["message_bytes"],
            sparsity=sparsity,
            density=(
                sum(int(residual.entries_sent) for residual in compressed) + last["dense_entries"]
            )
            / numel,
            gradient_norm=sum(float(residual.gradient_square) for residual in compressed) ** 0.5,
            residual_norm=sum(float(norm(residual.v)) ** 2 for residual in parameters.residuals())
            ** 0.5,
            total_bytes_sent=float(totals["bytes_sent"]),
            total_dense_bytes=float(totals["dense_bytes"]),
            total_density=(
                sum(int(residual.total_entries) for residual in compressed)
                + totals["dense_entries"]
            )
            / max(1, totals["numel"]),
            skipped=self._skipped,
            lost_residuals=self.lost_residuals,
            overflow_entries=sum(int(residual.overflow_entries) for residual in compressed),
        )
