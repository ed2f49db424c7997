"""Where a training is in its schedule: the step, and what an adaptive schedule has found."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from dgc.config import Config
from dgc.engine.adam import Denominators
from dgc.engine.adaptive import KEYS, SPARSITY, AdaptiveSparsity
from dgc.engine.momentum import Momentum
from dgc.engine.nodes import Nodes
from dgc.engine.parameters import BEGAN, STEP, Parameters
from dgc.engine.settings import Role, Settings
from dgc.engine.step import Step
from dgc.schedule import Adaptive


class Progress:
    """The step of the schedule. It lies in the first param group, so that it is saved, loaded and broadcast.

    Args:
        settings: of the optimizer.
        parameters: of the optimizer.
        nodes: without others of them there is nobody to save bytes for.
        momentum: of SGD, which moves into u at the first compressed step.
        denominators: of AdamW, which do so in its place, and have their own say in when.
    """

    def __init__(self, settings: Settings, parameters: Parameters, nodes: Nodes, momentum: Momentum,
                 denominators: Denominators):
        self._settings, self._parameters, self._nodes = settings, parameters, nodes
        self._momentum, self._denominators = momentum, denominators
        self._adaptive: AdaptiveSparsity | None = None

    @property
    def _group(self) -> dict[str, Any]:
        return self._parameters.groups[0]

    def begin(self) -> None:
        """Begins at the saved step, or at 0; and to measure, if the sparsity is adaptive."""
        self._denominators.begin()
        if self._settings.role is Role.ALONE:
            self._group.pop(BEGAN, None)
            return
        self._group.setdefault(STEP, 0)
        self._group.setdefault(BEGAN, -1)
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

    def open(self, step: Step) -> None:
        """A step begins: it is compressed, or it is stock's. The first compressed one takes the momentum of the wrapped
        optimizer over; the first one after it to which the schedule gives 0 sends all that is pending, and u with it.
        """
        parameters, adam = self._parameters, self._denominators.used
        if parameters.stock and not self._nodes.alone and self._scheduled().sparsity_at(parameters.step) > 0 and (
                not adam or self._denominators.ready(self._scheduled())):
            (self._denominators if adam else self._momentum).take_over()
            self._group[BEGAN] = parameters.step
        step.stock = parameters.stock
        step.hands_back = not step.stock and not adam and self.config().sparsity_at(parameters.step) == 0

    def config(self) -> Config:
        """The config, with the sparsity in force where it is not the schedule's."""
        if self._nodes.alone:
            return replace(self._settings.config, sparsity=0.0)
        return self._denominators.in_force(self._scheduled())

    def _scheduled(self) -> Config:
        return self._settings.config if self._adaptive is None else replace(
            self._settings.config, sparsity=self._group[SPARSITY])

    def last_sparsity(self) -> float:
        """The sparsity that the schedule gave for the last step; of an adaptive one, for the next."""
        return self._denominators.in_force(self._scheduled()).sparsity_at(max(0, self._group.get(STEP, 0) - 1))

    def compressing(self) -> AbstractContextManager[Any]:
        """Measures compression during the backward pass, within it."""
        return nullcontext() if self._adaptive is None or self._parameters.stock else self._adaptive

    def computing_stops(self) -> None:
        """Computing stands still from here on, until the step has ended."""
        if self._adaptive is not None:
            self._adaptive.computing_stops()

    def advance(self) -> None:
        """A step is taken."""
        self._group[STEP] += 1
        if self._adaptive is not None and not self._parameters.stock:  # dense steps tell of no sparsity
            self._adaptive.step_ends(self._group, self._group[STEP])

    def hand_back(self, step: Step) -> None:
        """Gives the wrapped optimizer its momentum back: the steps to come are stock's."""
        self._momentum.hand_back(step)
        self._group[BEGAN] = -1

    def fill_state(self) -> None:
        """Makes the wrapped optimizer's state complete from the start, so that all ranks have the same to broadcast."""
        self._momentum.fill_state()
        self._denominators.fill_state()
