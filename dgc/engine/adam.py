"""AdamW with its momentum in u, and a denominator that follows the updates that come.

AdamW's step is p = p - lr (m / D), with m the average of gradients that momentum b1 makes, and D = sqrt(s) + eps from
the average s of their squares (b2), both freed of their bias. m is linear in the gradients, so each rank accumulates
its own: u = b1 u + (1 - b1) f g, v = v + u, momentum correction (paper, equation 4), with f the learning rate over that
of the first compressed step, lr0 (:mod:`dgc.engine.rates`). D is not linear, so all ranks have it alike. At first
everything is sent, and torch's AdamW takes the step. From the first compressed step on D follows from the averaged
updates x, the mean of what was sent, which is alike on every rank (:mod:`dgc.compression.denominator`), and the
parameters' step is p = p - lr decay p - lr0 x / D.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgc.compression import kernels
from dgc.compression.denominator import Denominator, factor
from dgc.compression.residual import memory_order, residual_dtype
from dgc.config import Config
from dgc.engine import rates
from dgc.engine.parameters import BEGAN, Parameters, to_local
from dgc.engine.settings import Role
from dgc.engine.wrapped import check_decay, is_adam, sign
from dgc.warn import warn

B2 = "dgc_dense_b2"  # in each param group: b2 of the dense steps, whose bias is in all of exp_avg_sq; 0 before the end
RECEIVED = "dgc_received"  # in a parameter's state: int32, how many steps there had been when an entry last came
DENSE_FIRST = ("steps travel dense, as AdamW's denominator is found in them; then the schedule begins, so a shorter "
               "training is never compressed (begin the schedule with 0 to choose the dense steps: "
               "dgc.piecewise({0: 0.0, steps // 10: 0.9}))")
UNSEEN = ("{} had no gradient in the {} dense steps in which AdamW's denominator is found: it begins as the root mean "
          "square of all parameters' gradients there (begin the schedule with dense steps in which all are trained)")
SQUARES = {"exp_avg_sq", "max_exp_avg_sq"}  # of torch's state; the second with amsgrad


class Denominators:
    """The denominators D of what travels compressed.

    They follow from torch's state (``exp_avg_sq``, ``step``) and ``dgc_received`` beside it, so they are saved, loaded
    and broadcast with it. ``step`` stays at the number of dense steps, whose bias is in all of ``exp_avg_sq``.

    Args:
        parameters: that are updated.
    """

    def __init__(self, parameters: Parameters):
        self._parameters, self._settings = parameters, parameters.settings
        settings = parameters.settings
        self.has_state = settings.role is not Role.SINGLE_PROCESS and settings.config.momentum_correction and is_adam(
            parameters.inner)
        self.is_active = self.has_state and settings.exchanges  # outside a process set the state is filled: see Applier
        self._factors: dict[Tensor, _Factor] = {}

    @property
    def dense(self) -> bool:
        """Whether torch's AdamW takes the step, from gradients that travel dense."""
        return self.is_active and self._parameters.stock

    @property
    def compressed(self) -> bool:
        """Whether u has the momentum, of gradients over D."""
        return self.is_active and not self.dense

    @property
    def _group(self) -> dict[str, Any]:
        return self._parameters.groups[0]

    def begin(self) -> None:
        """Starts a training, or continues one that was loaded."""
        self._factors.clear()
        if not self.has_state:  # from a checkpoint; torch's own step changes D again
            for group, key in itertools.product(self._parameters.groups, (B2, rates.RATES)):
                group.pop(key, None)

    def invalidate(self) -> None:
        """Called when the state is handed out: a broadcast, say, may write into it. D is computed
        anew from it.
        """
        self._factors.clear()

    def effective_config(self, config: Config) -> Config:
        """The settings of a step: dense at first, then those of ``config``. A schedule that is
        sparse from its start knows of no dense steps: it starts with the first compressed step.
        """
        if self.dense:
            return replace(config, sparsity=0.0)
        began = self._group[BEGAN] if self.is_active else 0
        if not began or config.sparsity_at(0) == 0:
            return config
        return replace(config, sparsity=lambda step: config.sparsity_at(step - began) if step >= began else 0.0)

    def fill_state(self) -> None:
        """Makes the state of AdamW complete from the start, so that all ranks have the same to broadcast."""
        if not self.has_state:
            return
        for group in self._parameters.groups:  # also one that was added since
            group.setdefault(B2, group["betas"][1] if self.compressed else 0.0)
            rates.prepare(group)
        for p, group in self._parameters.group_of().items():
            if p.requires_grad or self._parameters.optimizer.state.get(p):
                self._state(p, group)

    def _state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's state, completed. One that joins compressed steps has the others' mean square."""
        state: dict[str, Any] = self._parameters.optimizer.state[parameter]
        if "exp_avg" not in state:
            state.update(fresh(parameter, group))
        restore_cast(state)
        if self._parameters.travels_compressed(parameter) and RECEIVED not in state:
            state[RECEIVED] = torch.zeros_like(parameter, dtype=torch.int32, requires_grad=False)
            if self.compressed:
                fill_unseen(state, group, self._mean_of_all())
                state[RECEIVED].fill_(self._parameters.step)
        return state

    def ready(self, config: Config) -> bool:
        """Whether a step with a sparsity above 0, by the schedule in ``config``, can be the first compressed one.

        A schedule that has such a sparsity from the start says nothing of how long D takes: then it is the step
        1 / (1 - b2), over so many squares it averages. torch's AdamW goes on as long as no parameter has had a
        gradient, and in steps without a learning rate: the momentum that is taken over would count for nothing.
        """
        step = self._parameters.step
        fewest = 0 if config.sparsity_at(0) == 0 else settling(self._parameters.groups)
        if step >= fewest and has_rate(self._parameters.groups) and self._has_seen():
            return True
        if step == 0 and self._settings.world.rank == 0:
            warn(f"the first {fewest:,} {DENSE_FIRST}")
        return False

    @torch.no_grad()
    def momentum_into_u(self) -> None:
        """Moves AdamW's momentum into u. All ranks have the same: under Sum each adds 1/N of it."""
        step = self._parameters.step
        self._warn_of_unseen(step)
        for group in self._parameters.groups:
            group[B2] = group["betas"][1]
        group_of, mean = self._parameters.group_of(), self._mean_of_all()
        rank_weight = 1.0 if self._settings.average else 1 / self._settings.world.size
        for bucket in self._parameters.buckets:
            if not bucket.compressed:
                continue
            assert bucket.residual is not None and bucket.residual.u is not None
            u, v = bucket.residual.views(bucket.residual.u), bucket.residual.views(bucket.residual.v)
            for name, p in zip(bucket.residual.names, bucket.parameters, strict=True):
                group = group_of[p]
                state, rate, b1 = self._state(p, group), rates.now(group), group["betas"][0]
                fill_unseen(state, group, mean)
                state[RECEIVED].fill_(step)
                # What rounding has left in v enters as if it had come one step before.
                u[name].copy_(v[name].mul_((1 - b1) * rate))
                if (steps := float(state["step"])) > 0:
                    u[name].add_(to_local(state["exp_avg"]), alpha=rate * sign(group) * rank_weight / (1 - b1**steps))

    @torch.no_grad()
    def clear_momentum(self) -> None:
        """The first compressed step is taken: its momentum is in u from now on."""
        for p in self._compressed():
            self._parameters.optimizer.state[p]["exp_avg"].zero_()

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuses a weight decay that is not decoupled. A script may set it at any step."""
        check_decay(self._parameters.inner, group)

    @torch.no_grad()
    def step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Applies the updates in ``p.grad`` of some parameters of a group, and decays the
        parameters.
        """
        rates.passed(group)
        given = [p for p in parameters if p.requires_grad and p.grad is not None and to_local(p).numel()]  # of a shard
        if not given:
            return
        values, updates, lr = [to_local(p) for p in given], [to_local(p.grad) for p in given], float(group["lr"])
        if (decay := group["weight_decay"]) != 0:
            torch._foreach_mul_(values, 1 - lr * decay)
        factors = [self._follow(p, x, group, lr) for p, x in zip(given, updates, strict=True)]
        torch._foreach_addcmul_(values, updates, factors, value=-rates.unit(group) * sign(group))

    def add(self, parameter: Tensor, x: Tensor, group: dict[str, Any]) -> None:
        """Takes the step of an averaged update x (the shape of this rank's part)."""
        to_local(parameter).addcmul_(x, self._factor(parameter, group).values, value=-rates.unit(group) * sign(group))

    def flushed(self, parameters: Iterable[Tensor]) -> None:
        """A flush has sent all of v: waits start anew, and D stays as it is."""
        for p in parameters if self.compressed else ():
            if (received := self._parameters.optimizer.state[p].get(RECEIVED)) is not None:
                received.fill_(self._parameters.step)

    def _follow(self, parameter: Tensor, x: Tensor, group: dict[str, Any], lr: float) -> Tensor:
        """Updates D by an averaged update, where there is one. Returns 1 / D."""
        state, of_it = self._parameters.optimizer.state[parameter], self._factor(parameter, group)
        now = self._parameters.step
        if not lr:  # of gradients there is nothing new in it, and D stays as it is
            to_local(state[RECEIVED]).masked_fill_(x != 0, now)
            return of_it.values
        order = memory_order(of_it.values) or range(of_it.values.dim())
        largest = to_local(state["max_exp_avg_sq"]).permute(*order) if group["amsgrad"] else None
        x, square, received, values = (t.permute(*order) for t in (
            x, to_local(state["exp_avg_sq"]), to_local(state[RECEIVED]), of_it.values))
        (b1, b2), steps = group["betas"], of_it.dense_steps + now - self._group[BEGAN]
        of = Denominator(square, largest, received, values, of_it.unbiased, b1, b2, group["eps"], steps,
                         rates.inverse_squares(group, values))
        kernels.denominators(x, of).follow(x, of, self._parameters.chosen(parameter), now)
        return of_it.values

    def _factor(self, parameter: Tensor, group: Mapping[str, Any]) -> _Factor:
        """What a parameter's updates are multiplied by."""
        found = self._factors.get(parameter)
        if found is None or found.eps != group["eps"]:
            state = self._state(parameter, group)
            square, unbiased = to_local(state[_key(group)]), _unbiased(state, group)
            values = factor(square, unbiased, group["eps"], residual_dtype(square.dtype))
            found = self._factors[parameter] = _Factor(group["eps"], values, unbiased, float(state["step"]))
        return found

    def _mean_of_all(self) -> Tensor:
        """The mean second moment of what travels compressed; of all there is, where that was frozen until now."""
        group_of, states = self._parameters.group_of(), self._parameters.optimizer.state
        known = {p: _square(state, group_of[p]) for p, state in states.items() if "exp_avg" in state and p in group_of}
        mean = mean_of_seen([known[p] for p in self._compressed() if p in known])
        return torch.where(mean > 0, mean, mean_of_seen(list(known.values())).to(mean))

    def _has_seen(self) -> bool:
        """Whether there is anything to begin D with. A rank without a part of what is compressed needs nothing."""
        return not any(to_local(p).numel() for p in self._compressed()) or bool(self._mean_of_all() > 0)

    def _compressed(self) -> list[Tensor]:
        return [p for bucket in self._parameters.buckets if bucket.compressed for p in bucket.parameters]

    def _warn_of_unseen(self, steps: int) -> None:
        """Warns of parameters about whose D nothing is known. A parameter that was frozen from the
        start has no state yet.
        """
        states = self._parameters.optimizer.state
        names = [self._parameters.names[p] for p in self._compressed()
                 if "exp_avg_sq" in states.get(p, {}) and not to_local(states[p]["exp_avg_sq"]).any()]
        if names and self._settings.world.rank == 0:
            warn(UNSEEN.format(", ".join(names[:5]) + " ..." * (len(names) > 5), steps))


def accumulation_factors(scale: Tensor | None, groups: Mapping[str, dict[str, Any]],
                         v: Tensor) -> Tensor | Mapping[str, Tensor]:
    """What gradients are multiplied by where momentum takes them in: (1 - b1) f, times a given factor.

    Args:
        scale: that, 0-dim; None: 1.
        groups: parameter -> its group.
        v: theirs. The factors have its device and dtype.

    Returns:
        One factor for all, 0-dim, or one each where betas or learning rates differ.
    """
    distinct = {id(group): group for group in groups.values()}  # each asked once: its rate may be on a device
    of_group = {key: (1 - float(group["betas"][0])) * rates.now(group) for key, group in distinct.items()}
    of_name = {name: of_group[id(group)] for name, group in groups.items()}
    factors = {one: torch.full((), one, dtype=v.dtype, device=v.device) for one in set(of_name.values())}
    if scale is not None:
        factors = {one: factor * scale.to(v) for one, factor in factors.items()}
    return next(iter(factors.values())) if len(factors) == 1 else {name: factors[one] for name, one in of_name.items()}


class _Factor(NamedTuple):
    """What follows from a parameter's state, so that no device is asked for it in each step."""

    eps: float
    values: Tensor  # 1 / D, in the shape of this rank's part
    unbiased: float  # that its mean squares are divided by
    dense_steps: float  # over which they went before the first compressed step


def settling(groups: Iterable[Mapping[str, Any]]) -> int:
    """The steps in which D is found, where the schedule does not say."""
    return max(round(1 / (1 - group["betas"][1])) for group in groups)


def has_rate(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether any learning rate is above 0."""
    return any(float(group["lr"]) for group in groups)


def fresh(parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """The state that torch's AdamW makes in its first step."""
    keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    wide = not group.get("fused") and torch.get_default_dtype() == torch.float64
    on_device = group.get("capturable") or group.get("fused")
    step = torch.zeros((), dtype=torch.float64 if wide else torch.float32,
                       device=parameter.device if on_device else "cpu")
    return {"step": step, **{key: torch.zeros_like(parameter, requires_grad=False) for key in keys}}


def restore_cast(state: dict[str, Any]) -> None:
    """Restores the numbers of steps in a state that was loaded before its optimizer was wrapped:
    torch has cast them.

    Raises:
        ValueError: to 16 bits, which have lost them.
    """
    if (cast := state.get(RECEIVED)) is None or cast.dtype == torch.int32:
        return
    if cast.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the state of compressed AdamW must be loaded after its optimizer was wrapped, got one whose "
                         f"{RECEIVED} is {cast.dtype}, in which numbers of steps are rounded (call load_state_dict() "
                         "of the DistributedOptimizer)")
    state[RECEIVED] = cast.to(torch.int32)


def restore_counts(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """After torch's ``load_state_dict``, which casts all state to the dtype of its parameter: as bfloat16 a number of
    steps would be rounded.
    """
    pairs = zip(saved["param_groups"], optimizer.param_groups, strict=True)
    parameters = {i: p for given, own in pairs for i, p in zip(given["params"], own["params"], strict=True)}
    for i, state in saved["state"].items():
        if RECEIVED in state:
            own = optimizer.state[parameters[i]]
            own[RECEIVED] = state[RECEIVED].to(own[RECEIVED].device, torch.int32, copy=True)


def _unbiased(state: Mapping[str, Any], group: Mapping[str, Any]) -> float:
    """What the mean squares in a state are divided by, as they began at 0: it does not change with b2 afterwards."""
    return float(1 - (group.get(B2) or group["betas"][1]) ** max(float(state["step"]), 1.0))


def _key(group: Mapping[str, Any]) -> str:
    """Names what D is made of in a state: a second moment."""
    return "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"


def _square(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """s, freed of its bias, in a new tensor."""
    square = to_local(state[_key(group)])
    return square.to(residual_dtype(square.dtype)) / _unbiased(state, group)


def mean_of_seen(squares: list[Tensor]) -> Tensor:
    """The mean of the positive entries; 0 where there is none. 0-dim."""
    device = squares[0].device if squares else torch.device("cpu")  # others may be on other GPUs
    totals = [square.sum(dtype=torch.float64).to(device) for square in squares]
    counts = [(square > 0).sum().to(device) for square in squares]
    none = torch.zeros((), dtype=torch.int64, device=device)
    return sum(totals, torch.zeros((), device=device)) / sum(counts, none).clamp(min=1)


def floored(square: Tensor, mean: Tensor, least: float) -> Tensor:
    """A second moment that no gradient to come can make too large a step from.

    Args:
        square: the second moment, any shape.
        mean: of its positive entries. An entry that has had no gradient counts as this.
        least: no entry counts as less than this share of the mean.
    """
    mean = mean.to(square)
    return torch.where(square > 0, square.clamp(min=float(mean) * least), mean)


def fill_unseen(state: dict[str, Any], group: Mapping[str, Any], mean_of_all: Tensor) -> None:
    """Gives entries that have had no gradient, or a single one, an s that no gradient to come can make too large a
    step from.
    """
    unbiased = _unbiased(state, group)
    mean, least = mean_of_seen([_square(state, group)]), (1 - group["betas"][1]) / unbiased
    for key in SQUARES & state.keys():
        own = to_local(state[key])
        square = own.to(residual_dtype(own.dtype)) / unbiased
        # Where the mean is 0, no entry has had a gradient.
        own.copy_(floored(square, torch.where(mean > 0, mean, mean_of_all.to(mean)), least) * unbiased)
