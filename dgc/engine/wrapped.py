"""The wrapped optimizer: which of torch's it is, by its step(), as a subclass may have another; and
what it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def is_sgd(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a class steps as torch's SGD does. A subclass may have a step() of its own, as LARS
    has.
    """
    return _steps_as(kind, torch.optim.SGD)


def is_adam(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a class steps as torch's AdamW or Adam does."""
    return _steps_as(kind, torch.optim.AdamW) or _steps_as(kind, torch.optim.Adam)


def decays_apart(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> bool:
    """Whether an Adam's weight decay is decoupled from its gradient, as AdamW's is, or is 0."""
    return (
        issubclass(kind, torch.optim.AdamW)
        or group["weight_decay"] == 0
        or bool(group.get("decoupled_weight_decay"))
    )


def momentum_of(group: Mapping[str, Any]) -> tuple[float, bool]:
    """The momentum m of a param group (AdamW's b1), with which u is accumulated, and whether it is
    Nesterov's.
    """
    if "betas" in group:
        return float(group["betas"][0]), False
    return group.get("momentum", 0.0), group.get("nesterov", False)


def sign(group: Mapping[str, Any]) -> int:
    """The sign with which a gradient enters the momentum of a param group."""
    return -1 if group["maximize"] else 1


def unhooked(step: Any) -> Any:
    """A step function without torch's wrapper that calls the step hooks: ours is wrapped, and they
    fire once.
    """
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def check_decay(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> None:
    """Refuses Adam's weight decay, which enters its gradient; a script may set one at any step."""
    if not decays_apart(kind, group):
        raise ValueError(
            f"weight_decay must be 0 for torch.optim.Adam, whose denominator it would enter, got "
            f"{group['weight_decay']!r} (use torch.optim.AdamW, which decays weights on their own, or "
            "Config(momentum_correction=False))"
        )


def check_dampening(group: dict[str, object]) -> None:
    """Refuses a dampening, which a script may set at any step."""
    if group["dampening"] != 0:
        raise ValueError(
            f"dampening must be 0, as momentum correction accumulates u = m u + g (paper, equation 4), "
            f"got {group['dampening']!r}"
        )


def refuse_apex(optimizer: torch.optim.Optimizer) -> None:
    """Refuses what apex.amp has changed: it scales gradients, and replaces parameters, behind our
    back.

    Raises:
        TypeError: it has.
    """
    if "_amp_stash" in vars(optimizer):
        raise TypeError(
            "optimizer must not be one that apex.amp.initialize() has changed, got such a one (use "
            "torch.amp, and give its GradScaler as grad_scaler=)"
        )


def _steps_as(kind: type[torch.optim.Optimizer], torchs: type[torch.optim.Optimizer]) -> bool:
    return issubclass(kind, torchs) and unhooked(kind.step) is unhooked(torchs.step)
