"""Where a training is in its schedule: the step, and what an adaptive schedule has found."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from dgc.config import Config
from dgc.engine.adam import Denominators
from dgc.engine.adaptive import KEYS, SPARSITY, AdaptiveSparsity
from dgc.engine.parameters import STEP, Parameters
from dgc.engine.settings import Role, Settings
from dgc.schedule import Adaptive


class Progress:
    """The step of the schedule. It lies in the first param group, so that it is saved, loaded and broadcast.

    Args:
        settings: of the optimizer.
        parameters: of the optimizer.
        denominators: of AdamW, which have their own say in when compression begins.
    """

    def __init__(self, settings: Settings, parameters: Parameters, denominators: Denominators):
        self._settings, self._parameters, self._denominators = settings, parameters, denominators
        self._adaptive: AdaptiveSparsity | None = None

    @property
    def _group(self) -> dict[str, Any]:
        return self._parameters.groups[0]

    def begin(self) -> None:
        """Begins at the saved step, or at 0; and to measure, if the sparsity is adaptive."""
        self._denominators.begin()
        if self._settings.role is Role.ALONE:
            return
        self._group.setdefault(STEP, 0)
        self._adaptive, sparsity = None, self._settings.config.sparsity
        if not isinstance(sparsity, Adaptive):
            for key in KEYS.values():  # from a checkpoint; Horovod broadcasts only what all ranks have
                self._group.pop(key, None)
        else:
            self._adaptive = AdaptiveSparsity(sparsity, self._settings.transport, self._parameters.device)
            self._group.update(self._adaptive.first(self._group))

    def shown(self) -> None:
        """The optimizer's state is handed out, and may come back changed."""
        self._denominators.shown()

    def open(self) -> None:
        """A step begins."""
        self._denominators.open(self._scheduled())

    def config(self) -> Config:
        """The config, with the sparsity in force where it is not the schedule's."""
        return self._denominators.in_force(self._scheduled())

    def _scheduled(self) -> Config:
        return self._settings.config if self._adaptive is None else replace(
            self._settings.config, sparsity=self._group[SPARSITY])

    def last_sparsity(self) -> float:
        """The sparsity that the schedule gave for the last step; of an adaptive one, for the next."""
        return self.config().sparsity_at(max(0, self._group.get(STEP, 0) - 1))

    def compressing(self) -> AbstractContextManager[Any]:
        """Measures compression during the backward pass, within it."""
        return nullcontext() if self._adaptive is None or self._denominators.dense else self._adaptive

    def computing_stops(self) -> None:
        """Computing stands still from here on, until the step has ended."""
        if self._adaptive is not None:
            self._adaptive.computing_stops()

    def advance(self) -> None:
        """A step has ended."""
        self._group[STEP] += 1
        if self._adaptive is not None and not self._denominators.dense:  # AdamW's dense steps tell of no sparsity
            self._adaptive.step_ends(self._group, self._group[STEP])
