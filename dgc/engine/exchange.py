"""The exchange of a step: its buckets are launched in order, each by its path, and their updates
come back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from dgc.collective import Path
from dgc.compression.device import refuse_capture
from dgc.compression.residual import Gradient
from dgc.compression.sizes import SUM_BITS
from dgc.engine.adam import accumulation_factors, has_rate
from dgc.engine.gradients import Gradients, own
from dgc.engine.misuse import Misuse
from dgc.engine.nonfinite import NonFinite
from dgc.engine.optimizer_step import Applier
from dgc.engine.parameters import ParameterBucket, Parameters, to_local
from dgc.engine.progress import Progress
from dgc.engine.step import InFlight, ReceivedUpdate, Step
from dgc.engine.wrapped import check_dampening, momentum_of, sign
from dgc.paths.averaged import DenseUpdate, SparseUpdate, Update
from dgc.paths.compressed import exchange_bucket, flush
from dgc.paths.dense import reduce_dense, reduce_rounded
from dgc.paths.sparse import reduce_sparse
from dgc.trace import stage
from dgc.transport.run import PathRun
from dgc.warn import warn


def has_residual(parameters: Parameters, parameter: Tensor) -> bool:
    """Whether this rank's u or v of a parameter is not 0. A host-device synchronisation, but not
    after :func:`empty_for_sparse`.
    """
    residual, name = parameters.bucket_of[parameter].residual, parameters.names[parameter]
    if residual is None or parameter in parameters.emptied:
        return False
    return any(
        bool(residual.views(flat)[name].any())
        for flat in (residual.v, residual.u)
        if flat is not None
    )


def empty_for_sparse(
    parameters: Parameters, flight: InFlight, update: SparseUpdate, step: Step
) -> None:
    """Empties u and v of a parameter at its first sparse gradient. u becomes SGD's momentum, which
    is sparse from now on: Nesterov's cannot be dense with sparse gradients. step() adds v itself,
    which has been clipped and has momentum in it; without momentum correction v holds gradients,
    and is added to this one.
    """
    (parameter,), residual, group = (
        flight.parameters,
        flight.bucket.residual,
        step.group_of[flight.parameters[0]],
    )
    dimensions, all_state = update.tensor.sparse_dim(), parameters.optimizer.state
    momentum = all_state[parameter].get("momentum_buffer") if parameter in all_state else None
    if momentum is not None and not momentum.is_sparse:
        all_state[parameter]["momentum_buffer"] = momentum.to_sparse(dimensions).coalesce()
    parameters.emptied.add(parameter)
    # The last case is AdamW, whose step() refuses a sparse gradient.
    if update.v is None or residual is None or (update.u is not None and "momentum" not in group):
        return
    name = parameters.names[parameter]
    for flat in (residual.v, residual.u):
        if flat is not None:
            residual.views(flat)[name].zero_()
    if update.u is None:
        pending = update.v if step.inverse is None else update.v / step.inverse.number
        parameter.grad = (
            update.tensor + pending.to(update.tensor.dtype).to_sparse(dimensions)
        ).coalesce()
        return
    flat = torch.zeros_like(residual.v)
    residual.views(flat)[name].copy_(update.v)
    step.direct.append(
        ReceivedUpdate(flight.bucket, [parameter], DenseUpdate(flat, residual.numels))
    )
    if update.u.any():
        velocity = (update.u * sign(group)).to(parameter.dtype)
        all_state[parameter]["momentum_buffer"] = velocity.to_sparse(dimensions).coalesce()


BucketExchange: TypeAlias = (
    "tuple[str, list[Tensor], Path[Update | SparseUpdate]]"  # name, what leaves together, its path
)


class Launcher:
    """Starts the exchanges of a step.

    Args:
        parameters, gradients, applier, progress, misuse: of the same optimizer.
    """

    def __init__(
        self,
        parameters: Parameters,
        gradients: Gradients,
        applier: Applier,
        progress: Progress,
        misuse: Misuse,
    ):
        self._parameters, self._settings = parameters, parameters.settings
        self._gradients, self._applier, self._progress, self._misuse = (
            gradients,
            applier,
            progress,
            misuse,
        )

    @property
    def launches_early(self) -> bool:
        """Whether buckets leave during the backward pass. A check that all gradients are finite,
        and a global norm, need all gradients first. To average residuals, ranks wait for each
        other, so this must not happen while one may be busy with another optimizer.
        """
        return not (
            self._settings.checks_finite_first
            or self._settings.config.clips_globally
            or self._gradients.residuals_need_averaging
        )

    def launch_ready(self, step: Step) -> None:
        """Launches complete buckets, always in the same order: torch.distributed pairs collectives
        up by order.
        """
        if not self.launches_early:
            return
        buckets = self._parameters.buckets
        with step.marked(), self._progress.compressing():
            while step.launched < len(buckets) and step.missing[buckets[step.launched]] == 0:
                self._launch(buckets[step.launched], step)

    def launch_rest(self, step: Step) -> None:
        """Launches the buckets that have not left yet."""
        refuse_capture(self._parameters.device)
        for bucket in self._parameters.buckets[step.launched :]:
            self._launch(bucket, step)
        step.start_inter_node(wait=True)  # so that ranks that fail together have begun the same

    def _launch(self, bucket: ParameterBucket, step: Step) -> None:
        step.launched += 1
        active = self._parameters.active(bucket.parameters, step.with_gradient)
        step.wait_for_gradients()
        self._reopen(bucket, active, step)
        exchanges = list(self._exchanges(bucket, active, step))
        if not exchanges and bucket.residual is not None:
            bucket.residual.record_idle_step()
        step.record_versions(active)
        for name, parameters, path in exchanges:
            step.start_inter_node(wait=False)
            run = PathRun(path, self._settings.transport, name, step.count, parameters[0].device)
            step.in_flight.append(InFlight(bucket, parameters, run))

    def reopen_rest(self, step: Step) -> None:
        """Takes the updates of an earlier exchange out of the gradients that have not left yet."""
        if step.earlier:
            step.wait_for_gradients()
            for bucket in self._parameters.buckets[step.launched :]:
                self._reopen(
                    bucket, self._parameters.active(bucket.parameters, step.with_gradient), step
                )

    @torch.no_grad()
    def _reopen(self, bucket: ParameterBucket, active: list[Tensor], step: Step) -> None:
        """Merges a bucket's gradients with those of an earlier exchange, whose update waits for
        step(). Restores v, and takes the update out of ``p.grad``, to which a backward pass has
        added.
        """
        names = self._parameters.names
        for received in [one for one in step.earlier if one.bucket is bucket]:
            again = [p for p in received.parameters if p in set(active)]
            self._applier.undo_exchange(received, again)
            held = [p for p in again if step.holds_update(p, names[p], [step.passes(p)])]
            self._applier.subtract(received, held, step)
            if len(held) < len(again):
                self._misuse.warn_of_dropped_update()
            step.earlier.remove(received)
            if rest := [p for p in received.parameters if p not in set(again)]:
                step.unapplied.append(ReceivedUpdate(bucket, rest, received.update))

    def average_in_node(self, step: Step) -> None:
        """Averages all gradients within the node: clipping needs their norm before any bucket is
        exchanged among nodes.

        Raises:
            ValueError: one of them is sparse.
        """
        step.wait_for_gradients()
        runs = []
        for bucket in self._parameters.buckets:
            present = self._parameters.active(bucket.parameters, step.with_gradient)
            if sparse := self._sparse_among(present):
                raise ValueError(
                    f"the gradient of {self._parameters.names[sparse[0]]} must be dense, got a sparse "
                    "one: Config: hierarchical is in force, and clip_norm needs the norm of the node's "
                    "mean (give sparse_as_dense=True)"
                )
            if present:
                runs.append(
                    PathRun(
                        self._gradients.mean(bucket, present, step),
                        self._settings.transport,
                        f"{bucket.name}.node",
                        step.count,
                        present[0].device,
                    )
                )
        for run in runs:
            run.finish()

    # -- the path of each bucket's gradients ---------------------------------------------------------------------------

    def _exchanges(
        self, bucket: ParameterBucket, active: list[Tensor], step: Step
    ) -> Iterator[BucketExchange]:
        """The exchanges of a bucket: one of all gradients that are dense in memory, and one of each
        sparse gradient.

        Args:
            active: the parameters of the bucket that are exchanged in this step.
        """
        compressed = bucket.compressed and not step.stock
        sparse_params = self._sparse_among(active)
        dense = [p for p in active if p not in self._parameters.sparse] if sparse_params else active
        if dense:
            onward = partial(self._compressed if compressed else self._dense, bucket, dense, step)
            by_node = step.world.node_size > 1 and (
                compressed or self._settings.config.clip_norm is not None
            )
            path = self._gradients.path(bucket, dense, step, onward) if by_node else onward()
            yield bucket.name, dense, path
        for parameter in sparse_params:
            name = self._parameters.names[parameter]
            yield (
                f"dgc.sparse.{name}",
                [parameter],
                reduce_sparse(
                    name,
                    self._sparse_gradient(parameter),
                    step.world if compressed else step.world.without_nodes,
                    scale=self._gradients.factor_of(parameter, step),
                    residual=bucket.residual,
                    has_residual=has_residual(self._parameters, parameter),
                ),
            )

    def _sparse_among(self, parameters: list[Tensor]) -> list[Tensor]:
        """The parameters that travel as sparse tensors, each on its own, from their first sparse
        gradient on.
        """
        self._parameters.note_sparse(parameters)
        sparse = self._parameters.sparse
        return [p for p in parameters if p in sparse] if sparse else []

    def _sparse_gradient(self, parameter: Tensor) -> Tensor:
        """A parameter's gradient as a sparse tensor, empty where this rank has none. The
        parameter's first sparse gradient has fixed its sparse dimensions.
        """
        dimensions = self._parameters.sparse[parameter]
        if (g := parameter.grad) is None:
            places, rows = (
                torch.empty(dimensions, 0, device="cpu"),
                (0, *parameter.shape[dimensions:]),
            )
            return torch.sparse_coo_tensor(
                places,
                torch.empty(rows, device="cpu"),
                parameter.shape,
                dtype=parameter.dtype,
                device=parameter.device,
                check_invariants=False,
            )
        return g if g.is_sparse else g.to_sparse(dimensions)

    def _gradient(self, parameter: Tensor, step: Step) -> Tensor:
        """The gradient that is exchanged: the local one, or the mean of the node's."""
        mean = step.node_means.get(parameter)
        return own(parameter) if mean is None else mean

    def _compressed(
        self, bucket: ParameterBucket, parameters: list[Tensor], step: Step
    ) -> Path[Update]:
        """The path of a bucket that travels compressed."""
        assert bucket.residual is not None
        adam, names, groups = self._applier.adam, self._parameters.names, step.group_of
        gradients = {}
        for p in parameters:
            if adam.is_active:
                adam.check(groups[p])
            elif self._settings.config.momentum_correction:
                check_dampening(groups[p])
            gradients[names[p]] = Gradient(self._gradient(p, step), *momentum_of(groups[p]))
        scale = step.scaled_out(step.clip)
        factor = (
            scale
            if not adam.compressed
            else accumulation_factors(
                scale, {names[p]: groups[p] for p in parameters}, bucket.residual.v
            )
        )
        return exchange_bucket(
            bucket.residual,
            gradients,
            self._progress.config(),
            self._parameters.step,
            step.world,
            scale=factor,
            hands_back=step.hands_back,
        )

    def _dense(self, bucket: ParameterBucket, parameters: list[Tensor], step: Step) -> Path[Update]:
        """The path of a bucket that travels dense."""
        residual, config, active = bucket.residual, self._settings.config, set(parameters)
        rounded = not bucket.compressed and bucket.accumulates(step.stock) and step.world.size > 1
        addends = {
            p: self._dense_gradient(p, p in active, bucket, step)
            for p in (parameters if rounded else bucket.parameters)
        }
        if bucket.compressed and residual is not None:
            residual.sent_all(
                list(addends.values()),
                step.scaled_out(None if config.clip_per_tensor else step.clip)
                if not bucket.accumulates(step.stock)
                else None,
            )
        if rounded:
            assert residual is not None
            gradients = {self._parameters.names[p]: g for p, g in addends.items()}
            # Nothing may stay in v, which stock's steps do not send.
            bits = 0 if step.hands_back else SUM_BITS
            return reduce_rounded(residual, gradients, bits, step.world.without_nodes)
        gradients = {
            self._parameters.names[p]: g if residual is None else residual.in_order(i, g)
            for i, (p, g) in enumerate(addends.items())
        }
        # In float16 under DDP, as DDP does, all are divided by N before they are added up.
        halves = self._settings.in_ddp and bucket.dtype(step.stock) == torch.float16
        return reduce_dense(
            gradients,
            step.world.without_nodes,
            scale=step.clip if self._clipped_as_one(bucket, step) else None,
            predivide=step.world.size if halves else self._settings.gradient_predivide_factor,
            stock=step.stock or (not self._parameters.residuals() and config.clip_norm is None),
        )

    def _dense_gradient(
        self, parameter: Tensor, takes_part: bool, bucket: ParameterBucket, step: Step
    ) -> Tensor:
        """A parameter's addend of the dense sum, in the dtype of the bucket's update: zero where
        the parameter does not take part.
        """
        g = self._gradient(parameter, step) if takes_part else torch.zeros_like(to_local(parameter))
        g = g.to(bucket.dtype(step.stock))
        if not takes_part or self._clipped_as_one(bucket, step):
            return g
        scale = self._gradients.factor_of(parameter, step)
        if bucket.accumulates(
            step.stock
        ):  # remembered from step to step, so without the loss's scale
            scale = step.scaled_out(scale)
        return g if scale is None else g * scale.to(g)

    def _clipped_as_one(self, bucket: ParameterBucket, step: Step) -> bool:
        """Whether a dense bucket's gradients are multiplied by their clipping factor when they lie
        in one tensor.
        """
        return not bucket.accumulates(step.stock) and not self._settings.config.clip_per_tensor


def fill_with_infinity(step: Step, parameters: Parameters) -> None:
    """Fills the gradients of a skipped step with infinity, which a script or a GradScaler finds
    there.
    """
    active = parameters.active(parameters.listed, step.with_gradient)
    parameters.note_sparse(active)  # in the next step a rank may have no gradient to know it by
    for parameter in active:
        if parameter.grad is None or (parameter.grad.is_sparse and parameter.grad._nnz() == 0):
            parameter.grad = torch.full_like(parameter, math.inf)
        else:
            (parameter.grad._values() if parameter.grad.is_sparse else parameter.grad).fill_(
                math.inf
            )


@torch.no_grad()
def finish_exchange(
    step: Step, parameters: Parameters, applier: Applier, nonfinite: NonFinite
) -> str:
    """Waits for every exchange of a step, in the order of their launch.

    Returns:
        Whose gradients are not finite, where they were found in a dense sum; "" if all are finite.

    Raises:
        FloatingPointError, ValueError: found in messages, by all ranks that received them so; v is
            as if the step had sent nothing, and u stays masked where entries had been taken.
    """
    all_received: list[ReceivedUpdate] = []
    sparse: list[tuple[InFlight, SparseUpdate]] = []
    blame = ""
    try:
        nonfinite.raise_found(step)
        while step.in_flight:
            flight = step.in_flight.pop(0)
            update = flight.run.finish()
            blame = blame or getattr(update, "blame", "")
            if isinstance(update, SparseUpdate):
                flight.parameters[0].grad = update.tensor
                sparse.append((flight, update))
                continue
            all_received.append(ReceivedUpdate(flight.bucket, flight.parameters, update))
            with stage("dgc::write_update"):
                applier.write_update(all_received[-1], step)
            if isinstance(update, DenseUpdate) and update.verdict is not None:
                nonfinite.expect(flight.bucket.name, update.verdict)
    except (FloatingPointError, ValueError):
        step.abort(wait=True)
        applier.restore_v(all_received, step)
        nonfinite.forget()  # of this step, which fails
        raise
    if blame and nonfinite.is_error:
        applier.restore_v(all_received, step)
        return blame
    nonfinite.warn_if_applied(blame)
    for flight, update in sparse:
        empty_for_sparse(parameters, flight, update, step)
    if not step.stock:
        step.unapplied += [received for received in all_received if received.bucket.compressed]
    return ""


def flush_all(parameters: Parameters, applier: Applier, step: Step) -> None:
    """Sends all of v of the parameters that are not frozen, and adds it to them at the current
    learning rate; with AdamW, at that of the gradients' own steps.

    Raises:
        FloatingPointError: a sum is not finite; raised on all ranks. v of its bucket, and of those
            after it, is restored.
    """
    settings, world = parameters.settings, step.world
    # AdamW applies entries at the learning rate of their own steps.
    if settings.world.rank == 0 and applier.is_sgd and not has_rate(parameters.groups):
        warn(
            "flush() must be called at a learning rate above 0 to change the parameters, got 0 in all param groups: "
            "the residuals are sent, times 0, and lost (after a schedule that ends at 0, leave flush() out)"
        )
    exchanges = []
    for bucket in parameters.buckets:
        thawed = [p for p in bucket.parameters if p.requires_grad]
        if bucket.residual is not None and thawed and applier.has_updates(bucket):
            path = flush(
                bucket.residual,
                [parameters.names[p] for p in thawed],
                world if bucket.compressed else world.without_nodes,
            )
            exchanges.append(
                (
                    bucket,
                    thawed,
                    PathRun(path, settings.transport, f"{bucket.name}.flush", step.count),
                )
            )
    group_of = parameters.group_of()
    try:
        while exchanges:
            bucket, thawed, exchange = exchanges.pop(0)
            received = ReceivedUpdate(bucket, thawed, exchange.finish())
            with stage("dgc::write_update"):
                applier.add(received, group_of)
            applier.adam.flushed(thawed)
    except (FloatingPointError, ValueError):  # on all ranks alike
        for *_, exchange in exchanges:
            exchange.abort(wait=True)
        raise
