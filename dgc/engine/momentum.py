"""SGD's momentum: in the wrapped optimizer's state as long as nothing is compressed, in u in compressed steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dgc.engine.parameters import Parameters
from dgc.engine.settings import Settings
from dgc.engine.shards import local
from dgc.engine.step import Step
from dgc.engine.wrapped import is_sgd, sign


class Momentum:
    """Moves the momentum of what travels compressed from one to the other. AdamW's is moved by its denominators.

    Args:
        settings: of the optimizer.
        parameters: that are updated.
        inner: the class of the wrapped optimizer.
    """

    def __init__(self, settings: Settings, parameters: Parameters, inner: type[torch.optim.Optimizer]):
        self._settings, self._parameters = settings, parameters
        self.is_sgd = is_sgd(inner)
        self._moves: dict[Tensor, bool] = {}  # see :meth:`moves`

    def fill_state(self) -> None:
        """Makes the state of SGD complete from the start, so that all ranks have the same to broadcast."""
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
    def take_over(self) -> None:
        """Adds SGD's momentum to u of what travels compressed. It is alike on every rank: in a sum each has its share.
        """
        group_of, all_state = self._parameters.group_of(), self._parameters.optimizer.state
        share = 1 / (1 if self._settings.average else self._settings.world.size)
        for bucket in self._parameters.buckets:
            if not bucket.compressed or bucket.kept is None or bucket.kept.u is None:
                continue
            u = bucket.kept.views(bucket.kept.u)
            for name, p in zip(bucket.kept.names, bucket.parameters, strict=True):
                momentum, group = all_state.get(p, {}).get("momentum_buffer"), group_of[p]
                if momentum is None or momentum.is_sparse:
                    continue
                u[name].add_(local(momentum), alpha=sign(group) * share)

    @torch.no_grad()
    def taken_over(self) -> None:
        """The first compressed step is taken: from now on SGD's buffer has the momentum of weight decay alone."""
        for bucket in self._parameters.buckets:
            if bucket.compressed and bucket.kept is not None and bucket.kept.u is not None:
                for p in bucket.parameters:
                    momentum = self._parameters.optimizer.state.get(p, {}).get("momentum_buffer")
                    if momentum is not None and not momentum.is_sparse:
                        momentum.zero_()
        self._moves.clear()

    @torch.no_grad()
    def hand_back(self, step: Step) -> set[Tensor]:
        """Moves u, which all ranks have averaged, into SGD's momentum. Returns the parameters of which nothing is left
        in u and v.
        """
        group_of, all_state, done = self._parameters.group_of(), self._parameters.optimizer.state, set[Tensor]()
        for delivery in step.deliveries:
            kept, velocity = delivery.bucket.kept, getattr(delivery.update, "velocity", None)
            stepped = [p for p in delivery.parameters if p.grad is not None]  # else its update went back into v
            done.update(stepped)
            if kept is None or kept.u is None or velocity is None:
                continue
            average, u = kept.views(velocity), kept.views(kept.u)
            for p in stepped:
                name, momentum = self._parameters.names[p], all_state[p].get("momentum_buffer")
                if momentum is None and group_of[p].get("momentum"):
                    momentum = all_state[p]["momentum_buffer"] = torch.zeros_like(p, requires_grad=False)
                if momentum is not None:
                    local(momentum).add_(average[name].to(momentum.dtype), alpha=sign(group_of[p]))
                    u[name].zero_()
        self._moves.clear()
        return done

    def moves(self, parameter: Tensor, buffer: Tensor | None) -> bool:
        """Whether the buffer of a compressed parameter has anything in it, which without weight decay it has not."""
        if buffer is None:
            return False
        if parameter not in self._moves:
            self._moves[parameter] = bool(local(buffer).any())
        return self._moves[parameter]

    def note_decay(self, parameter: Tensor) -> None:
        """Weight decay goes into the buffer of a compressed parameter."""
        self._moves[parameter] = True

    def shown(self) -> None:
        """Somebody has the state's tensors and may write into them, or has loaded others."""
        self._moves.clear()


def _default(state: dict[str, Any], key: str, like: Tensor | None) -> None:
    """Gives a state its buffer, if it is to have one."""
    if state.get(key) is None:
        state.pop(key, None)  # torch's distributed checkpoints know no None
        if like is not None:
            state[key] = torch.zeros_like(like, requires_grad=False)
