"""The wrapped optimizer's step: its momentum, ``p.grad``, and the weight decay that is applied
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dgc.compression import kernels
from dgc.compression.residual import memory_order
from dgc.engine.adam import Denominators
from dgc.engine.parameters import ParameterBucket, Parameters, to_local
from dgc.engine.step import ReceivedUpdate, Step
from dgc.engine.wrapped import is_sgd, momentum_of, sign, unhooked
from dgc.trace import stage


class Applier:
    """Hands updates to the wrapped optimizer, and moves its momentum.

    As long as nothing is compressed, the momentum is in the wrapped optimizer's state. In
    compressed steps a compressed parameter's momentum is in u and its decay is added here, so for
    those both are switched off there.

    Args:
        parameters: that are updated.
    """

    def __init__(self, parameters: Parameters):
        self._parameters, self._settings = parameters, parameters.settings
        self.adam = Denominators(parameters)
        self.is_sgd = is_sgd(parameters.inner)
        self._decayed: dict[Tensor, bool] = {}  # see :meth:`_holds_decay`

    # -- the momentum --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts a training, or continues one that was loaded."""
        self.adam.begin()
        self._decayed.clear()

    def state_changes(self) -> None:
        """Called when the state is handed out: a script may write into its tensors."""
        self.adam.invalidate()
        self._decayed.clear()

    def fill_state(self) -> None:
        """Makes the wrapped optimizer's state complete from the start, so that all ranks have the
        same to broadcast.
        """
        self.adam.fill_state()
        if not self.is_sgd:
            return
        all_state = self._parameters.optimizer.state
        for group in self._parameters.groups:
            remembers = group["momentum"] != 0 and group["dampening"] == 0
            for parameter in group["params"]:
                if parameter.requires_grad or parameter in all_state:
                    state = all_state[parameter]
                    momentum = state.get("momentum_buffer")
                    if momentum is not None and momentum.is_sparse:
                        self._parameters.sparse[parameter] = momentum.sparse_dim()
                    _default(state, "momentum_buffer", parameter if remembers else None)

    @torch.no_grad()
    def momentum_into_u(self) -> None:
        """Adds the wrapped optimizer's momentum to u of compressed parameters. All ranks have the
        same: under Sum each adds 1/N of it.
        """
        if self.adam.is_active:
            return self.adam.momentum_into_u()
        group_of, all_state = self._parameters.group_of(), self._parameters.optimizer.state
        rank_weight = 1 / (1 if self._settings.average else self._settings.world.size)
        for bucket in self._parameters.buckets:
            if not bucket.compressed or bucket.residual is None or bucket.residual.u is None:
                continue
            u = bucket.residual.views(bucket.residual.u)
            for name, p in zip(bucket.residual.names, bucket.parameters, strict=True):
                momentum, group = all_state.get(p, {}).get("momentum_buffer"), group_of[p]
                if momentum is None or momentum.is_sparse:
                    continue
                u[name].add_(to_local(momentum), alpha=sign(group) * rank_weight)

    @torch.no_grad()
    def clear_momentum(self) -> None:
        """The first compressed step is taken: from now on SGD's buffer has the momentum of weight
        decay alone.
        """
        if self.adam.is_active:
            return self.adam.clear_momentum()
        for bucket in self._parameters.buckets:
            if bucket.compressed and bucket.residual is not None and bucket.residual.u is not None:
                for p in bucket.parameters:
                    momentum = self._parameters.optimizer.state.get(p, {}).get("momentum_buffer")
                    if momentum is not None and not momentum.is_sparse:
                        momentum.zero_()
        self._decayed.clear()

    @torch.no_grad()
    def momentum_out_of_u(self, step: Step) -> set[Tensor]:
        """Moves u, which all ranks have averaged, into SGD's momentum. Returns the parameters of
        which nothing is left in u and v.
        """
        group_of, all_state, done = (
            self._parameters.group_of(),
            self._parameters.optimizer.state,
            set[Tensor](),
        )
        for received in step.unapplied:
            residual, velocity = (
                received.bucket.residual,
                getattr(received.update, "velocity", None),
            )
            # Else its update went back into v.
            stepped = [p for p in received.parameters if p.grad is not None]
            done.update(stepped)
            if residual is None or residual.u is None or velocity is None:
                continue
            average, u = residual.views(velocity), residual.views(residual.u)
            for p in stepped:
                name, momentum = self._parameters.names[p], all_state[p].get("momentum_buffer")
                if momentum is None and group_of[p].get("momentum"):
                    momentum = all_state[p]["momentum_buffer"] = torch.zeros_like(
                        p, requires_grad=False
                    )
                if momentum is not None:
                    to_local(momentum).add_(
                        average[name].to(momentum.dtype), alpha=sign(group_of[p])
                    )
                    u[name].zero_()
        self._decayed.clear()
        return done

    def _holds_decay(self, parameter: Tensor, buffer: Tensor | None) -> bool:
        """Whether SGD's buffer of a compressed parameter holds momentum of weight decay."""
        if buffer is None:
            return False
        if parameter not in self._decayed:
            self._decayed[parameter] = bool(to_local(buffer).any())
        return self._decayed[parameter]

    # -- updates -------------------------------------------------------------------------------------------------------

    def write_update(self, received: ReceivedUpdate, step: Step) -> None:
        """Writes an update into ``p.grad`` of those that took part."""
        bucket, parameters, update = received.bucket, received.parameters, received.update
        targets, others = _targets(
            bucket, parameters, lambda p: to_local(p.grad), bucket.dtype(step.stock)
        )
        update.write(targets)
        if step.inverse is not None and bucket.accumulates(step.stock):
            torch._foreach_div_(
                [target for target in targets if target is not None], step.inverse.number
            )
        for parameter, target in others:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = target.to(parameter.dtype).to_sparse(parameter.grad.sparse_dim())
                continue
            if parameter.grad is None or not _laid_out_as(parameter, parameter.grad):
                parameter.grad = torch.empty_like(parameter)
            to_local(parameter.grad).copy_(target)

    def _values(self, received: ReceivedUpdate) -> dict[Tensor, Tensor]:
        """Parameter -> its update, in its shape."""
        residual = received.bucket.residual
        assert residual is not None
        flat = torch.empty_like(residual.v)
        received.update.write(flat.split(residual.numels))
        return dict(zip(received.bucket.parameters, residual.views(flat).values(), strict=True))

    def restore_v(self, unapplied: Iterable[ReceivedUpdate], step: Step) -> None:
        """Adds each rank's part of updates that will not be applied back to v."""
        for received in unapplied:
            if received.bucket.accumulates(step.stock):
                self._add_to_v(received, received.parameters)

    @torch.no_grad()
    def undo_exchange(self, received: ReceivedUpdate, parameters: Iterable[Tensor]) -> None:
        """Restores v of parameters to which step() will not apply an update, and rewinds u and v:
        their next gradients add to the same step.
        """
        residual, group_of = received.bucket.residual, self._parameters.group_of()
        assert residual is not None
        self._add_to_v(received, parameters)
        for p in parameters:
            residual.rewind(self._parameters.names[p], *momentum_of(group_of[p]))

    def _add_to_v(self, received: ReceivedUpdate, parameters: Iterable[Tensor]) -> None:
        residual, values = received.bucket.residual, self._values(received)
        assert residual is not None
        v, rank_weight = (
            residual.views(residual.v),
            1.0 if self._settings.average else 1 / self._settings.world.size,
        )
        for p in parameters:
            v[self._parameters.names[p]].add_(values[p], alpha=rank_weight)

    @torch.no_grad()
    def subtract(self, received: ReceivedUpdate, parameters: Iterable[Tensor], step: Step) -> None:
        """Subtracts an update from ``p.grad``, to which a backward pass has added."""
        values = self._values(received)
        for p in parameters:
            update = values[p] if step.inverse is None else values[p] / step.inverse.number
            g = to_local(p.grad)
            g.sub_(update.to(g.dtype))

    def was_changed(self, parameter: Tensor, step: Step) -> bool:
        """Whether ``p.grad`` differs from the compressed update that waits for step()."""
        grad = to_local(parameter.grad)
        received = next(
            received for received in step.unapplied if parameter in set(received.parameters)
        )
        residual, place = (
            received.bucket.residual,
            [p is parameter for p in received.bucket.parameters].index(True),
        )
        assert residual is not None
        update = residual.v.new_empty(residual.numels[place])
        received.update.write([update if i == place else None for i in range(len(residual.names))])
        update = residual.shaped(place, update)
        # A scaler may have taken that out.
        scaled = update if step.inverse is None else update / step.inverse.number
        return not any(torch.equal(grad, one.to(grad.dtype)) for one in (update, scaled))

    def apply(self, step: Step) -> None:
        """Takes the wrapped optimizer's step, on what is in ``p.grad``."""
        with stage("dgc::step"):
            for received in step.unapplied:
                if left_out := [p for p in received.parameters if p.grad is None]:
                    self.undo_exchange(received, left_out)
            if step.stock:
                unhooked(self._parameters.inner.step)(self._parameters.optimizer)
            else:
                self._apply(step)

    def _apply(self, step: Step) -> None:
        """Takes the wrapped optimizer's step where gradients are compressed: it sees compressed
        parameters without momentum, which is in u, and without decay, which is added here.
        """
        optimizer = self._parameters.optimizer
        groups = optimizer.param_groups
        parted = [(group, *self._parted(group)) for group in groups]
        try:
            if self.adam.compressed:
                optimizer.param_groups = [{**group, "params": dense} for group, dense, _ in parted]
            elif self.is_sgd and self._settings.config.momentum_correction:
                for group, _, compressed in parted:
                    self._decay(group, compressed)
                optimizer.param_groups = [part for parts in parted for part in _split(*parts)]
            unhooked(self._parameters.inner.step)(optimizer)
        finally:
            optimizer.param_groups = groups
        if self.adam.compressed:
            for group, _, compressed in parted:
                self.adam.step(group, compressed)
        if step.direct:
            group_of = self._parameters.group_of()
            with torch.no_grad():
                for received in step.direct:
                    with stage("dgc::write_update"):
                        self.add(received, group_of)

    def _parted(self, group: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters of a group that travel dense, and those that travel compressed."""
        dense: list[Tensor] = []
        compressed: list[Tensor] = []
        for p in group["params"]:
            (dense if self._parameters.compressed_residual(p) is None else compressed).append(p)
        return dense, compressed

    @torch.no_grad()
    def _decay(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Applies weight decay to compressed parameters, and the momentum of earlier decay."""
        m, lr, decay = group["momentum"], float(group["lr"]), group["weight_decay"]
        for parameter in parameters:
            state = self._parameters.optimizer.state[parameter]
            buffer = state.get("momentum_buffer")
            takes_part = parameter.requires_grad and parameter.grad is not None
            if not takes_part or (
                decay == 0 and (m == 0 or not self._holds_decay(parameter, buffer))
            ):
                continue
            if m == 0:
                parameter.sub_(parameter * (decay * lr))
                continue
            if buffer is None:
                buffer = state["momentum_buffer"] = torch.zeros_like(parameter)
            if decay != 0:
                self._decayed[parameter] = True  # weight decay goes into it
            p, buffer = to_local(parameter), to_local(buffer)
            if (order := memory_order(p)) is not None:
                p, buffer = p.permute(order), buffer.permute(order)
            _loops(p, buffer).decay(p, buffer, m, decay, lr, group["nesterov"])

    def add(self, received: ReceivedUpdate, group_of: Mapping[Tensor, dict[str, Any]]) -> None:
        """Adds an update to the parameters, times their learning rates.

        Args:
            group_of: parameter -> its param group.
        """
        bucket, update = received.bucket, received.update
        over = bucket.compressed and self.adam.compressed  # D: it is divided before it is added
        targets, others = _targets(
            bucket,
            received.parameters,
            lambda p: None if over else to_local(p).detach(),
            bucket.dtype(False),
        )
        rates = {p: float(group_of[p]["lr"]) * -sign(group_of[p]) for p in bucket.parameters}
        fits = set(received.parameters).difference(p for p, _ in others)
        update.add(
            [
                target if p in fits else None
                for p, target in zip(bucket.parameters, targets, strict=True)
            ],
            list(rates.values()),
        )
        for p in fits:
            # Kernels write to addresses, and a graph may hold the parameter.
            torch.autograd.graph.increment_version(p)
        if others:
            update.write(
                [
                    None if p in fits else target
                    for p, target in zip(bucket.parameters, targets, strict=True)
                ]
            )
            for p, x in others:
                self.adam.add(p, x, group_of[p]) if over else _add(p, x, rates[p])

    @property
    def v_is_update(self) -> bool:
        """Whether v can be added to the parameters: it holds updates, not gradients."""
        return self.is_sgd or self.adam.is_active

    def has_updates(self, bucket: ParameterBucket) -> bool:
        """Whether v of a bucket holds updates, which a flush can add."""
        return bucket.residual is not None and (
            self.is_sgd or (bucket.compressed and self.adam.compressed)
        )


def _default(state: dict[str, Any], key: str, like: Tensor | None) -> None:
    """Gives a state its buffer, if it is to have one."""
    if state.get(key) is None:
        state.pop(key, None)  # torch's distributed checkpoints know no None
        if like is not None:
            state[key] = torch.zeros_like(like, requires_grad=False)


def _split(
    group: dict[str, Any], dense: list[Tensor], compressed: list[Tensor]
) -> list[dict[str, Any]]:
    """A param group as SGD is to see it: what travels dense, and what travels compressed."""
    without = {"momentum": 0, "nesterov": False, "weight_decay": 0}
    return [{**group, "params": dense}, {**group, "params": compressed, **without}]


def _loops(p: Tensor, buffer: Tensor) -> kernels.Kernel:
    """The loops for both. Compiled ones take addresses and one dtype; a script may have changed the
    parameter's.
    """
    fit = p.is_contiguous() and buffer.is_contiguous() and p.dtype == buffer.dtype
    return kernels.current(p.device.type if fit else "any", p.dtype)


def _add(parameter: Tensor, x: Tensor, rate: float) -> None:
    """Adds an update x, times a rate, to a parameter."""
    to_local(parameter).add_(x.mul_(rate).to(parameter.dtype))


def _targets(
    bucket: ParameterBucket,
    parameters: Iterable[Tensor],
    of: Callable[[Tensor], Tensor | None],
    dtype: torch.dtype,
) -> tuple[list[Tensor | None], list[tuple[Tensor, Tensor]]]:
    """Targets for a :class:`dgc.paths.averaged.Update`: ``of(p)`` of these parameters where its
    memory will do; else, and listed once more with their parameter, new tensors. None for the
    bucket's other parameters. All in its order.
    """
    wanted, targets, others, residual = set(parameters), [], [], bucket.residual
    for i, p in enumerate(bucket.parameters):
        target = None
        if p in wanted:
            target = of(p)
            if target is not None and not target.is_sparse and residual is not None:
                target = residual.in_order(i, target)
            if (
                target is None
                or target.is_sparse
                or target.dtype != dtype
                or not target.is_contiguous()
                or (residual is None and not _laid_out_as(p, target))
            ):
                target = torch.empty(to_local(p).numel(), dtype=dtype, device=p.device)
                others.append(
                    (
                        p,
                        target.view(to_local(p).shape)
                        if residual is None
                        else residual.shaped(i, target),
                    )
                )
        targets.append(target)
    return targets, others


def _laid_out_as(parameter: Tensor, grad: Tensor) -> bool:
    """Whether a gradient has the memory format that a backward pass gives it. A script's own may
    have another, or be expanded; an optimizer rounds in another order there, and ranks would part.
    """
    own, grad = to_local(parameter), to_local(grad)
    if 0 in grad.stride():
        return False
    if grad.stride() == own.stride():  # nearly always
        return True
    order = memory_order(torch.empty_like(own, device="meta"))  # as a new one would lie
    return (grad if order is None else grad.permute(order)).is_contiguous()
