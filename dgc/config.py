"""The user's choices: a frozen Config. Every error about it is raised here, at construction."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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
        sparsity: share of a parameter's entries kept back at each step, in [0, 1). 0 is dense: as
            long as nothing has been compressed, ``p.grad`` is the averaged gradient and the wrapped
            optimizer takes its own step. Or a schedule: any function of the optimizer's step (int,
            from 0) alone that gives such a number, say :func:`dgc.warmup`; or :func:`dgc.adaptive`,
            which goes by how fast the network is.
        momentum_correction: accumulate the velocity u instead of the gradient (paper, section 3.2,
            equation 4). Needs ``torch.optim.SGD``, or ``AdamW``, whose gradients then travel dense
            until its denominator is known (docs/method.md). Off: plain accumulation, for SGD and
            any optimizer but AdamW (and Adam without weight decay), which then sees the averaged
            sparse gradient and applies its own momentum to it.
        factor_masking: set u to zero where an entry was sent (paper, section 3.3). Made for 99.9 %:
            the denser what is sent, the more of the momentum that takes away, at 90 % and momentum
            0.9 three quarters of a step. Off: u is left as it is, and goes on a whole wait too late
            (docs/tuning.md).
        clip_norm: local gradient clipping (paper, section 3.2): a bound on the norm of the gradient
            that the optimizer would have seen. Each rank clips its own to clip_norm * sqrt(N) under
            Average, and to clip_norm / sqrt(N) under Sum, before accumulating it. None, or
            infinity: no clipping.
        clip_per_tensor: bound each parameter's gradient on its own. The global norm is only known
            when the backward pass has ended; this one lets messages leave during it.
        value_bits: bits of a value in a message: 32 (float32), 16 (float16), or 8, 4, 2, 1 (a sign
            and a level; docs/concepts/wire-format.md). What rounding drops stays in v, to be sent
            later. With 8 bits or fewer, dense sums travel in 8 bits from the first compressed step
            on: those of small parameters, and those of all where a step is dense or a dense sum is
            fewer bytes. Each entry is rounded, added up by one rank, and the sum is rounded; what
            rounding drops is sent with the next gradient. Sums of a few entries a rank, what
            ``flush()`` sends, and the first dense step after compressed ones are not rounded.
        min_numel: parameters with fewer entries, and all with fewer than two dimensions, travel
            dense.
        exchange: what ranks send of compressed parameters. ``"allgather"``: each its own largest
            entries, to all; the bytes that a rank sends grow with the number of ranks.
            ``"reduce"``: every entry has an owner, a rank that adds it up. A rank chooses three
            times as many entries, and sends each to its owner; the owners send the largest sums, as
            many in all, to all ranks. For ResNet-50 at 0.999 that is 5 to 10 times one message of
            an all-gather, with 4 to 1,024 ranks, and one more round. It applies fewer entries in a
            step than an all-gather, and may learn less (docs/tuning.md).
        hierarchical: average gradients within each machine first, uncompressed, and exchange
            compressed ones among the machines, each rank sending a part of what its machine has to
            say: for several ranks on each machine, and a network between these that is slower than
            what is within. u and v are then alike on all ranks of a machine. On a single machine
            nothing is compressed. ``"auto"``: True where there are several machines with the same
            number of ranks, at least two, and the transport can group them; else False. With
            Horovod it needs process sets; what to give ``hvd.init`` is said in the error.
        nonfinite: what to do about a gradient that is not finite, on any rank; it enters u and v
            nowhere. ``"error"``: ``step()`` raises a FloatingPointError on all ranks, which names
            rank and parameter. ``"skip"``: no rank takes this step, and :meth:`report` counts it.
            To agree on it, nothing leaves before the backward pass has ended. With both, ``p.grad``
            is not finite until ``step()``.
        local_steps: H. Each rank takes H steps of its own optimizer, any of torch's, with its own
            gradients. Then all ranks exchange how far their parameters have come, compressed as
            gradients are, and go on from the same parameters: 1/H of the bytes, and few of these
            (docs/guides/local-steps.md). ``sparsity=0.0`` then sends all entries, in ``value_bits``.
            Or a function of the step (int, from 0) that a round begins with, which gives H.

    Raises:
        TypeError, ValueError: an argument outside what is said above; the message names it and its
            value.
    """

    sparsity: float | Schedule = 0.999  # more sparse => fewer bytes, older gradients
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
            ("hierarchical", False, "each rank takes steps of its own"),
        ):
            if getattr(self, name) != only:
                raise ValueError(
                    f"Config: {name} must be {only} with local_steps, got {getattr(self, name)!r} ({why})"
                )

    def local_steps_at(self, step: int) -> int:
        """H of the round that begins with an optimizer step (int, from 0).

        Raises:
            ValueError: it is no integer >= 1; the message names where it came from.
        """
        given = self.local_steps
        steps = given(step) if callable(given) else given
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            where = f" (of {given!r} for step {step})" if callable(given) else ""
            raise ValueError(
                f"Config: local_steps must be None or an integer >= 1, got {steps!r}{where}"
            )
        return steps

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
            TypeError, ValueError: the schedule gave something else; the message names the step.
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


def check_sparsity(value: float, where: str) -> float:
    """Returns ``value`` as a float in [0, 1), or says where a wrong one came from.

    Raises:
        TypeError: ``value`` is not a number.
        ValueError: ``value`` is outside [0, 1) or not a number (NaN).
    """
    try:
        sparsity = float(value)
    except (TypeError, ValueError):
        expression = " (dgc.schedule.parse reads an expression)" if isinstance(value, str) else ""
        raise TypeError(f"{where} must be a number in [0, 1), got {value!r}{expression}") from None
    if not 0.0 <= sparsity < 1.0:
        per_cent = f" ({sparsity:g} % is {sparsity / 100:g})" if 1 <= sparsity < 100 else ""
        raise ValueError(
            f"{where} must be a number in [0, 1), 0 meaning dense, got {value!r}{per_cent}"
        )
    return sparsity
