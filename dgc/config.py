"""The user's choices: a frozen Config. Every error about it is raised here, at construction."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dgc.schedule import UNKNOWN_LENGTH, check_sparsity

Average, Sum = 0, 1  # the values of horovod.torch.Average and Sum, which are accepted alike
Schedule = Callable[[int], float]  # optimizer step, from 0 -> sparsity
ExchangeName = Literal["allgather", "reduce"]
UNMASKED = 0.95  # below it no momentum factor masking is advised (docs/tuning.md)
NonFinite = Literal["error", "skip"]
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "value_bits": (1, 2, 4, 8, 16, 32),
    "exchange": ("allgather", "reduce"),
    "hierarchical": (True, False, "auto"),
    "nonfinite": ("error", "skip"),
}


@dataclass(frozen=True)
class Config:
    """The settings of Deep Gradient Compression, for ``compression=`` of
    :func:`dgc.DistributedOptimizer`.

    Args:
        sparsity: the share of a parameter's entries that is kept back in each step, in [0, 1). Or a
            schedule: a function of the optimizer's step (int, from 0) that returns such a number,
            for example :func:`dgc.warmup`. :func:`dgc.adaptive` follows the speed of the network. 0
            is dense. Until a step has been compressed, ``p.grad`` is the averaged gradient and the
            wrapped optimizer takes its own step. Default: from 75 to 99 % within 800 steps, for a
            training of unknown length; ``dgc.warmup(steps=N)`` knows it.
        momentum_correction: accumulate the velocity u instead of the gradient (paper, section 3.2,
            equation 4). It needs ``torch.optim.SGD``, ``AdamW``, or ``Adam`` without weight decay.
            Gradients of AdamW travel dense until its denominator is known (docs/method.md). False:
            accumulate the gradient. The optimizer then sees the averaged sparse gradient, and
            applies its own momentum to it. AdamW, and Adam without weight decay, cannot have False.
        factor_masking: set u to zero where an entry was sent (paper, section 3.3). It is made for
            99.9 %. At a lower sparsity it takes more of the momentum: at 90 % and momentum 0.9,
            three quarters of a step. False: u stays, and what it still adds comes a whole wait
            later (docs/method.md).
        clip_norm: local gradient clipping (paper, section 3.2): a bound on the norm of the gradient
            that the optimizer would have seen. Each rank clips its own gradient before it
            accumulates it, to clip_norm * sqrt(N) under Average, and to clip_norm / sqrt(N) under
            Sum. None, or infinity: no clipping.
        clip_per_tensor: bound each parameter's gradient on its own. Then messages can leave during
            the backward pass; the norm of all gradients is known only after it.
        value_bits: bits of a value in a message: 32 (float32), 16 (float16), or 8, 4, 2, 1 (a sign
            and a level; docs/concepts/wire-format.md). What rounding drops stays in v and is sent
            later. With 8 bits or fewer, dense sums travel in 8 bits from the first compressed step
            on. These are the sums of small parameters, of dense steps, and where a dense sum is
            fewer bytes than messages. Exceptions are sums of a few entries a rank, ``flush()``, and
            the first dense step after compressed ones: they are not rounded.
        min_numel: parameters with fewer entries travel dense. So do all parameters with fewer than
            two dimensions.
        exchange: how compressed parameters travel. ``"allgather"``: each rank sends its largest
            entries to all; the bytes that a rank sends grow with the number of ranks. ``"reduce"``:
            every entry has an owner, a rank that adds it up. A rank chooses three times as many
            entries, and sends each to its owner. Then the owners send the largest sums to all
            ranks, as many in all. For ResNet-50 at 0.999 and 4 to 1,024 ranks, a rank sends the
            bytes of 5 to 10 messages of an all-gather. A step applies fewer entries than with an
            all-gather, and may learn less (docs/concepts/exchanges.md).
        hierarchical: average gradients within each machine first, uncompressed. Then the machines
            exchange compressed gradients, and each rank sends a part of its machine's message. It
            is for several ranks on each machine, and a network that is slower between machines than
            within them. u and v are alike on all ranks of a machine. On a single machine nothing is
            compressed. ``"auto"``: True where there are several machines with the same number of
            ranks, at least two, and the transport can group them; else False. Horovod needs process
            sets for it: the error says what to give ``hvd.init``.
        nonfinite: what to do when a gradient is not finite on any rank. Such a gradient never
            enters u and v. ``"error"``: ``step()`` raises a FloatingPointError on all ranks, which
            names rank and parameter. ``"skip"``: no rank takes this step, and :meth:`report` counts
            it. The ranks must agree on it, so no message leaves before the backward pass has ended.
            With both, ``p.grad`` is not finite until ``step()``.
        local_steps: H. Each rank takes H steps of its own optimizer, any of torch's, with its own
            gradients. Then all ranks exchange how far their parameters have come, compressed as
            gradients are, and go on from the same parameters (docs/guides/local-steps.md).
            ``sparsity=0.0`` then sends all entries, in ``value_bits``. A function may give H: its
            argument is the step (int, from 0) that a round begins with. With ``hierarchical`` the
            ranks of a machine average their gradients in each step, and machines exchange. None:
            ranks exchange gradients in every step.

    Raises:
        TypeError, ValueError: an argument is not as said above; the message names it and its value.
    """

    sparsity: float | Schedule = UNKNOWN_LENGTH  # more sparse => fewer bytes, older gradients
    momentum_correction: bool = True
    factor_masking: bool = True
    clip_norm: float | None = None
    clip_per_tensor: bool = False
    value_bits: int = 16  # fewer => fewer bytes, more rounding
    min_numel: int = 1024
    exchange: ExchangeName = "allgather"
    hierarchical: bool | Literal["auto"] = False
    nonfinite: NonFinite = "error"
    local_steps: int | Callable[[int], int] | None = (
        None  # more => fewer bytes, parameters further apart
    )

    def __post_init__(self) -> None:
        if not callable(self.sparsity):
            check_sparsity(self.sparsity, "Config: sparsity")
        for name in ("momentum_correction", "factor_masking", "clip_per_tensor"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"Config: {name} must be True or False, got {getattr(self, name)!r}"
                )
        for name, accepted in ACCEPTED.items():
            value = getattr(self, name)
            if not any(type(value) is type(one) and value == one for one in accepted):
                raise ValueError(
                    f"Config: {name} must be one of {', '.join(map(str, accepted))}, got {value!r}"
                )
        if (
            not isinstance(self.min_numel, int)
            or isinstance(self.min_numel, bool)
            or self.min_numel < 0
        ):
            raise ValueError(f"Config: min_numel must be an integer >= 0, got {self.min_numel!r}")
        self._check_clipping()
        self._check_local_steps()

    def _check_clipping(self) -> None:
        """Refuses a bound that is no number > 0, or one that is missing. An infinite one is none."""
        if self.clip_norm == math.inf:  # bounds nothing, so no message needs to wait for a norm
            object.__setattr__(self, "clip_norm", None)
            object.__setattr__(self, "clip_per_tensor", False)
        if self.clip_per_tensor and self.clip_norm is None:
            raise ValueError(
                "Config: clip_norm must be the bound where clip_per_tensor is True, got None"
            )
        if self.clip_norm is not None and not _is_positive(self.clip_norm):
            raise ValueError(
                f"Config: clip_norm must be None or a number > 0, got {self.clip_norm!r}"
            )
        if self.clip_norm is not None and not isinstance(self.clip_norm, int):  # it may be numpy's
            object.__setattr__(self, "clip_norm", float(self.clip_norm))

    def _check_local_steps(self) -> None:
        """Refuses a number of local steps that is none, and what has no meaning with local steps."""
        if self.local_steps is None:
            return
        if not callable(self.local_steps):
            self.local_steps_at(0)
        for name, only, why in (
            ("momentum_correction", True, "ranks exchange no momentum"),
            ("factor_masking", True, "ranks exchange no momentum"),
            ("clip_norm", None, "clip gradients between backward() and step(), as on one GPU"),
        ):
            if getattr(self, name) != only:
                raise ValueError(
                    f"Config: {name} must be {only} with local_steps, got {getattr(self, name)!r} ({why})"
                )

    def local_steps_at(self, step: int) -> int:
        """H of the round that begins with an optimizer step (int, from 0).

        Raises:
            ValueError: H is not an integer >= 1; the message names where it came from.
        """
        given = self.local_steps
        steps = given(step) if callable(given) else given
        if not isinstance(steps, numbers.Integral) or isinstance(steps, bool) or steps < 1:
            where = f" (of {given!r} for step {step})" if callable(given) else ""
            raise ValueError(
                f"Config: local_steps must be None or an integer >= 1, got {steps!r}{where}"
            )
        return int(steps)

    @property
    def corrects_momentum(self) -> bool:
        """Whether u accumulates the velocity of gradients."""
        return self.momentum_correction and self.local_steps is None

    @property
    def compresses(self) -> bool:
        """Whether any step may be compressed: the sparsity is not 0 for good."""
        return callable(self.sparsity) or self.sparsity != 0 or self.local_steps is not None

    @property
    def clips_globally(self) -> bool:
        """Whether clipping needs the norm of all gradients, and so the end of the backward pass."""
        return self.clip_norm is not None and not self.clip_per_tensor

    def sparsity_at(self, step: int) -> float:
        """The sparsity in [0, 1) of an optimizer step (int, from 0).

        Raises:
            TypeError, ValueError: the schedule returned something else; the message names the step.
        """
        if not callable(self.sparsity):
            return float(self.sparsity)
        return check_sparsity(
            self.sparsity(step), f"the sparsity that {self.sparsity!r} gives for step {step}"
        )


def _is_positive(value: object) -> bool:
    return (
        isinstance(value, numbers.Real)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and float(value) > 0
    )
