"""One trial: what it is to train with, and what came of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dgc.config import Schedule
from dgc.schedule import parse

PLACEHOLDERS = ("sparsity", "clip_norm", "factor_masking", "epochs", "out", "trial")
PLACEHOLDER = re.compile(r"\{([\w-]+)\}")
NO_CLIP = "inf"  # what a command is given where there is to be no bound

Objective = Callable[["Setting"], "tuple[float, float] | None"]
Heard = Callable[[int, float, float], None]


class NoResultError(RuntimeError):
    """A training that ended well and left no result: so would all others."""


class FailedError(RuntimeError):
    """A failure of one trial, which no traceback explains."""


@dataclass(frozen=True)
class Setting:
    """The settings of one trial."""

    trial: int
    epochs: int
    expression: str  # for dgc.schedule.parse
    clip_norm: float | None  # None: no clipping
    factor_masking: bool | None = None  # which follows from the sparsity at the end; None: as the script has it

    def schedule(self, steps_per_epoch: int) -> Schedule:
        """The expression's, for ``sparsity=`` of :class:`dgc.Config`; ``steps_per_epoch`` are optimizer steps."""
        return parse(self.expression, steps_per_epoch)

    @property
    def line(self) -> str:
        """Python, where ``loader`` has one batch for each optimizer step."""
        sparsity = self.expression.removeprefix("constant:")
        name, colon, arguments = sparsity.partition(":")
        if colon:
            words = [word.replace("=true", "=True") for word in arguments.split(",")]
            sparsity = f"dgc.{name}({', '.join([*words, 'steps_per_epoch=len(loader)'])})"
        clip = "" if self.clip_norm is None else f", clip_norm={self.clip_norm:.10g}"
        masking = ", factor_masking=False" if self.factor_masking is False else ""
        return f"dgc.Config(sparsity={sparsity}{masking}{clip})"

    @property
    def warmup_epochs(self) -> float | None:
        """How long its warm-up is; None if it has none."""
        found = re.search(r"^warmup:epochs=([^,]+)", self.expression)
        return float(found[1]) if found else None

    @property
    def density(self) -> float:
        """The share of entries that are sent, over the whole of training."""
        steps = 1000  # in an epoch
        schedule = self.schedule(steps)
        return math.fsum(1 - schedule(step) for step in range(self.epochs * steps)) / (self.epochs * steps)


@dataclass(frozen=True)
class Trial:
    """A finished trial. Its bytes are those that one worker sent in all."""

    setting: Setting
    state: str  # complete, failed
    kind: str  # "paper", "dense", or "" for what the sampler has drawn
    metric: float | None
    bytes_sent: float | None
    reports: Mapping[int, float]  # epoch -> metric
    seconds: float
    why: str  # it failed


@dataclass(frozen=True)
class Task:
    """The task of a study, which is the same in all of its trials."""

    command: tuple[str, ...] | str  # or the name of a function
    metric: str
    maximize: bool
    epochs: int
    clip_norm: float | None  # of the paper's trial, 0 being none; None: it is not searched

    def clipping(self, setting: Setting) -> str:
        """The clipping in words; nothing where it is not searched."""
        return "" if self.clip_norm is None else str(setting.clip_norm or "none")

    @property
    def masks(self) -> bool:
        """Whether trials are told of momentum factor masking: a function, or a command with the placeholder."""
        return isinstance(self.command, str) or any("{factor_masking}" in word for word in self.command)

    def fill(self, setting: Setting, out: Path) -> list[str]:
        """The command of one trial."""
        clip = NO_CLIP if setting.clip_norm is None else f"{setting.clip_norm:.10g}"
        values = {"sparsity": setting.expression, "clip_norm": clip, "epochs": self.epochs, "out": out,
                  "trial": setting.trial,
                  "factor_masking": "--factor-masking" if setting.factor_masking else "--no-factor-masking"}
        return [PLACEHOLDER.sub(lambda found: str(values[found[1]]), word) for word in self.command]
