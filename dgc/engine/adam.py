"""AdamW with its momentum in u: gradients travel dense until its denominator is known, which then stays as it is.

AdamW's step is p = p - lr (m / D), with m the average of gradients that momentum b1 makes, and D = sqrt(s) + eps from
the average s of their squares (b2), both freed of their bias. D is not linear in the gradients, so it cannot be
accumulated by each rank alone; and it changes little once it has settled, which 1-bit Adam (Tang et al., ICML 2021)
makes use of. So do we. While D is live everything is sent, and torch's AdamW takes the step. From the first compressed
step on D is frozen, and each rank accumulates u = b1 u + (1 - b1) g / D and v = v + u: momentum correction (paper,
equation 4) of a preconditioned gradient. The parameters' step is then p = p - lr decay p - lr (mean of what was sent).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dgc.compression.residual import Gradient, residual_dtype
from dgc.config import Config
from dgc.engine.kind import decays_apart, is_adam, sign
from dgc.engine.parameters import Parameters
from dgc.engine.settings import Settings
from dgc.engine.shards import local
from dgc.warn import warn

FROZEN = "dgc_frozen"  # in param_groups[0]: the step of the schedule from which D was frozen; -1 before


class Denominators:
    """The denominators D of what travels compressed.

    Frozen ones follow from the state that torch's AdamW has (``exp_avg_sq`` and ``step``, which it no longer changes),
    so they are saved, loaded and broadcast with it.

    Args:
        settings: of the optimizer.
        parameters: that are updated.
        inner: the class of the wrapped optimizer.
    """

    def __init__(self, settings: Settings, parameters: Parameters, inner: type[torch.optim.Optimizer]):
        self._settings, self._parameters, self._inner = settings, parameters, inner
        self.used = settings.exchanges and settings.config.momentum_correction and is_adam(inner)
        self._factors: dict[Tensor, tuple[float, Tensor]] = {}  # parameter -> b1, (1 - b1) / D

    @property
    def live(self) -> bool:
        """Whether torch's AdamW takes the step, from gradients that travel dense."""
        return self.used and self._group.get(FROZEN, -1) < 0

    @property
    def frozen(self) -> bool:
        """Whether u has the momentum, of gradients over D."""
        return self.used and not self.live

    @property
    def _group(self) -> dict[str, Any]:
        return self._parameters.groups[0]

    def begin(self) -> None:
        """Begins, or goes on with a training that was loaded."""
        self._factors.clear()
        if self.used:
            self._group.setdefault(FROZEN, -1)
        else:
            self._group.pop(FROZEN, None)  # from a checkpoint; torch's own step changes D again

    def open(self, config: Config) -> None:
        """A step begins: freezes D if it is the first that is compressed.

        That is the first to which the schedule gives a sparsity above 0. A schedule that has one from the start says
        nothing of how long D takes: then it is the step 1 / (1 - b2), over so many squares it averages.

        Args:
            config: the settings, with the schedule's sparsity.
        """
        if not self.live:
            return
        step = self._parameters.step
        settles = max(round(1 / (1 - group["betas"][1])) for group in self._parameters.groups)
        if config.sparsity_at(step) > 0 and (step >= settles or config.sparsity_at(0) == 0):
            self._freeze(step)

    @torch.no_grad()
    def _freeze(self, step: int) -> None:
        """Moves AdamW's momentum into u; it is alike on every rank, so in a sum each has its share."""
        self._group[FROZEN] = step
        group_of, state = self._parameters.group_of(), self._parameters.optimizer.state
        share = 1.0 if self._settings.average else 1 / self._settings.world.size
        for bucket in self._parameters.buckets:
            if not bucket.compressed:
                continue
            assert bucket.kept is not None and bucket.kept.u is not None
            u, v = bucket.kept.views(bucket.kept.u), bucket.kept.views(bucket.kept.v)
            for name, p in zip(bucket.kept.names, bucket.parameters, strict=True):
                factor, own, b1 = self._factor(p, group_of[p]), state.get(p, {}), group_of[p]["betas"][0]
                # A step that failed has left its gradient in v: it enters as if it had come one step before.
                v[name].mul_(factor)
                u[name].copy_(v[name])
                if own:
                    momentum = local(own["exp_avg"]).to(factor) * (sign(group_of[p]) * share / (1 - b1))
                    u[name].add_(momentum.mul_(factor), alpha=1 / (1 - b1 ** float(own["step"])))
                    own["exp_avg"].zero_()
        self._tell_of_unseen()

    def gradient(self, parameter: Tensor, g: Tensor, group: Mapping[str, Any]) -> Gradient:
        """What a parameter's gradient (its shape) is accumulated as.

        Raises:
            ValueError: the group has a weight decay that is not decoupled.
        """
        check_decay(self._inner, group)
        if self.live:
            return Gradient(g)
        factor = self._factor(parameter, group)
        return Gradient(factor * g.detach(), group["betas"][0])

    @torch.no_grad()
    def step(self, group: Mapping[str, Any], parameters: list[Tensor]) -> None:
        """Applies what was sent of some parameters of a group, which is in their ``p.grad``, and decays them."""
        given = [p for p in parameters if p.grad is not None]
        if not given:
            return
        values, lr = [local(p) for p in given], float(group["lr"])
        torch._foreach_mul_(values, 1 - lr * group["weight_decay"])
        torch._foreach_add_(values, [local(p.grad) for p in given], alpha=-lr * sign(group))

    def _factor(self, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
        """(1 - b1) / D, in the shape of this rank's part."""
        b1 = group["betas"][0]
        made_for, factor = self._factors.get(parameter, (None, None))
        if factor is None or made_for != b1:
            square, least = self._square(parameter, group)
            mean = mean_of_seen([square])
            if not mean > 0:  # none of its entries has had a gradient
                mean, least = self._mean_of_all(), 1.0
            factor = (1 - b1) / (floored(square, mean, least).sqrt_() + group["eps"])
            self._factors[parameter] = b1, factor
        return factor

    def _square(self, parameter: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, float]:
        """s, freed of its bias; and what a single gradient in all of the steps so far has counted in it."""
        state, b2 = self._parameters.optimizer.state.get(parameter, {}), group["betas"][1]
        if not state:
            own = local(parameter)
            return torch.zeros_like(own, dtype=residual_dtype(own.dtype)), 1.0
        square = local(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"])
        unbiased = 1 - b2 ** float(state["step"])
        return square.to(residual_dtype(square.dtype)) / unbiased, (1 - b2) / unbiased

    def _mean_of_all(self) -> Tensor:
        group_of = self._parameters.group_of()
        return mean_of_seen([self._square(p, group_of[p])[0] for p in self._compressed()])

    def _compressed(self) -> list[Tensor]:
        return [p for bucket in self._parameters.buckets if bucket.compressed for p in bucket.parameters]

    def _tell_of_unseen(self) -> None:
        """Warns of parameters whose D nothing is known about."""
        group_of = self._parameters.group_of()
        unseen = [self._parameters.names[p] for p in self._compressed() if not self._square(p, group_of[p])[0].any()]
        if unseen and self._settings.world.rank == 0:
            warn(f"{', '.join(unseen[:5])}{' ...' if len(unseen) > 5 else ''} had no gradient in the "
                 f"{self._group[FROZEN]} dense steps in which AdamW's denominator is found: it is the root mean square "
                 "of all parameters' gradients there (begin the schedule with dense steps in which all are trained)")


def mean_of_seen(squares: list[Tensor]) -> Tensor:
    """The mean of the positive entries; 0 where there is none. 0-dim."""
    total = sum((square.sum(dtype=torch.float64) for square in squares), torch.zeros(()))
    count = sum(((square > 0).sum() for square in squares), torch.zeros((), dtype=torch.int64))
    return total / count.clamp(min=1)


def floored(square: Tensor, mean: Tensor, least: float) -> Tensor:
    """A second moment that no gradient to come can make too large a step from.

    Args:
        square: the second moment, any shape.
        mean: of its positive entries. An entry that has had no gradient counts as this.
        least: no entry counts as less than this share of the mean.
    """
    mean = mean.to(square)
    return torch.where(square > 0, square.clamp(min=float(mean) * least), mean)


def check_decay(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> None:
    """Refuses Adam's weight decay, which enters its gradient; a script may set one at any step."""
    if not decays_apart(kind, group):
        raise ValueError(f"weight_decay must be 0 for torch.optim.Adam, whose denominator it would enter, got "
                         f"{group['weight_decay']!r} (use torch.optim.AdamW, which decays weights on their own, or "
                         "Config(momentum_correction=False))")
