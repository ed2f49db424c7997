"""Where a training is in its schedule: the step, whether it is compressed, and what an adaptive
schedule has found.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from dgc.collective import Collective
from dgc.config import Config
from dgc.engine.gradients import Gradients
from dgc.engine.optimizer_step import Applier
from dgc.engine.parameters import BEGAN, STEP, Parameters
from dgc.engine.settings import Role
from dgc.engine.step import Step
from dgc.schedule import FORGET, Adaptive, Found
from dgc.transport import Transport

KEYS = {key: f"dgc_{key}" for key in Found._fields}  # in param_groups[0]
SPARSITY = KEYS["sparsity"]


class AdaptiveSparsity:
    """Measures the steps of one rank, and moves the sparsity by what all ranks have measured.

    Exposed is the time for which computing stands still: ``synchronize()``, with what is still to
    be compressed, the waiting and the decoding; and, where nothing computes beside the process,
    within a ``with`` of this, which is for the compression during the backward pass.

    Args:
        schedule: the settings and the law.
        transport: to gather over what the ranks have measured.
        device: that computes. On CUDA, which runs behind the host, the times are those of events in
            its stream.
    """

    def __init__(self, schedule: Adaptive, transport: Transport, device: torch.device):
        self._schedule, self._transport, self._device = schedule, transport, device
        self._ended: Any = None  # the step before
        self._since: Any = None  # computing stands still
        self._exposed: list[tuple[Any, Any]] = []  # in this step, before its end
        # Since the last decision.
        self._steps: dict[int, tuple[Any, Any, list[tuple[Any, Any]]]] = {}

    def __enter__(self) -> None:
        self.computing_stops()

    def __exit__(self, *exception: object) -> None:
        self._exposed.append((self._since, self._mark()))

    def computing_stops(self) -> None:
        """Computing stands still from here on, until the step has ended."""
        self._since = self._mark()

    def first(self, group: Mapping[str, Any]) -> dict[str, float]:
        """The values with which a param group starts: those that it has already, within the bounds."""
        start = Found(self._schedule.start)._asdict()
        values = {saved: float(group.get(saved, start[key])) for key, saved in KEYS.items()}
        return {**values, SPARSITY: self._schedule.within(values[SPARSITY])}

    def step_ends(self, group: dict[str, Any], step: int) -> None:
        """Records a finished step. Every ``schedule.every`` steps the ranks gather their times and
        update ``group['dgc_sparsity']``. ``step``: how many have finished, alike on every rank.
        """
        now, every, world = self._mark(), self._schedule.every, self._transport.world
        if self._ended is not None:  # or this is the first one
            self._steps[(step - 1) % every] = self._ended, now, [*self._exposed, (self._since, now)]
        # An elastic job may be down to one rank.
        if step % every == 0 and world is not None and world.size > 1:
            ratio = self._exposed_ratio(now)
            self._steps = {}
            if ratio is not None:
                found = Found(*(group[saved] for saved in KEYS.values()))
                found = self._schedule.after(found, ratio, forget=step // every % FORGET == 0)
                group.update(zip(KEYS.values(), found, strict=True))
            now = self._mark()  # deciding does not count
        self._ended, self._exposed = now, []

    def _exposed_ratio(self, now: Any) -> float | None:
        """The exposed time of exchanges / computing time; None if most steps were not measured on
        all ranks.
        """
        if self._device.type == "cuda":
            now.synchronize()
        own = torch.full((self._schedule.every, 2), torch.nan, dtype=torch.float64, device="cpu")
        for row, (began, ended, exposed) in self._steps.items():
            seconds = sum(_seconds(*times) for times in exposed)
            own[row, 0], own[row, 1] = seconds, max(_seconds(began, ended) - seconds, 1e-9)
        everyones = self._transport.start(
            Collective("all_gather", own.to(self._device)), "dgc.pace"
        )().cpu()
        ratios = everyones[:, :, 0].amin(0) / everyones[:, :, 1].amax(0)
        ratios = ratios[~ratios.isnan()]
        return ratios.median().item() if 2 * len(ratios) > self._schedule.every else None

    def _mark(self) -> Any:
        """Now; on a GPU, when it has done what the current stream was given so far."""
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _seconds(began: Any, ended: Any) -> float:
    return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3


class Progress:
    """The step of the schedule. It lies in the first param group, so that it is saved, loaded and
    broadcast.

    Args:
        parameters: of the optimizer.
        gradients: know whether there is anybody to exchange with.
        applier: whose momentum moves into u at the first compressed step.
    """

    def __init__(self, parameters: Parameters, gradients: Gradients, applier: Applier):
        self._parameters, self._settings = parameters, parameters.settings
        self._gradients, self._applier = gradients, applier
        self._adaptive: AdaptiveSparsity | None = None

    @property
    def _group(self) -> dict[str, Any]:
        return self._parameters.groups[0]

    def begin(self) -> None:
        """Starts at the saved step, or at 0. Starts to measure, if the sparsity is adaptive."""
        self._applier.begin()
        if self._settings.role is Role.SINGLE_PROCESS:
            self._group.pop(BEGAN, None)
            return
        self._group.setdefault(STEP, 0)
        self._group.setdefault(BEGAN, -1)
        self._adaptive, sparsity = None, self._settings.config.sparsity
        if not isinstance(sparsity, Adaptive):
            for (
                key
            ) in KEYS.values():  # from a checkpoint; Horovod broadcasts only what all ranks have
                self._group.pop(key, None)
        else:
            self._adaptive = AdaptiveSparsity(
                sparsity, self._settings.transport, self._parameters.device
            )
            self._group.update(self._adaptive.first(self._group))

    def open(self, step: Step) -> None:
        """Decides whether a step is compressed or stock's. The first compressed step takes over the
        wrapped optimizer's momentum. The first step of sparsity 0 after it sends all of v, and u
        too.
        """
        parameters, adam = self._parameters, self._applier.adam
        if (
            parameters.stock
            and not self._gradients.is_single
            and self._scheduled().sparsity_at(parameters.step) > 0
            and (not adam.is_active or adam.ready(self._scheduled()))
        ):
            self._applier.momentum_into_u()
            self._group[BEGAN] = parameters.step
        step.stock = parameters.stock
        step.hands_back = (
            not step.stock
            and not adam.is_active
            and self._settings.config.local_steps is None
            and self.config().sparsity_at(parameters.step) == 0
        )

    def config(self) -> Config:
        """The config of this step, with the effective sparsity."""
        if self._gradients.is_single:
            return replace(self._settings.config, sparsity=0.0)
        return self._applier.adam.effective_config(self._scheduled())

    def _scheduled(self) -> Config:
        return (
            self._settings.config
            if self._adaptive is None
            else replace(self._settings.config, sparsity=self._group[SPARSITY])
        )

    def last_sparsity(self) -> float:
        """The sparsity that the schedule gave for the last step; of an adaptive one, for the next."""
        return self._applier.adam.effective_config(self._scheduled()).sparsity_at(
            max(0, self._group.get(STEP, 0) - 1)
        )

    def compressing(self) -> AbstractContextManager[Any]:
        """A context that measures compression during the backward pass."""
        if (
            self._adaptive is None
            or self._parameters.stock
            or self._parameters.device.type == "cuda"
        ):
            return nullcontext()  # a GPU computes meanwhile
        return self._adaptive

    def computing_stops(self) -> None:
        """Computing stands still from here on, until the step has ended."""
        if self._adaptive is not None:
            self._adaptive.computing_stops()

    def advance(self) -> None:
        """Counts a step that is taken."""
        if self._group[BEGAN] == self._group[STEP]:
            self._applier.clear_momentum()
        self._group[STEP] += self._settings.steps_of_round
        # Dense steps say nothing about a sparsity.
        if self._adaptive is not None and not self._parameters.stock:
            self._adaptive.step_ends(self._group, self._group[STEP])

    def momentum_out_of_u(self, step: Step) -> None:
        """Gives the wrapped optimizer its momentum back. Steps are stock's once every parameter has
        taken part in such a step. Until then they stay at density 1, which is momentum SGD too.
        """
        done = self._applier.momentum_out_of_u(step)
        if all(
            p in done or (p in self._parameters.frozen and not p.requires_grad)
            for bucket in self._parameters.buckets
            if bucket.compressed
            for p in bucket.parameters
        ):
            self._group[BEGAN] = -1

    def cancel_first_step(self) -> None:
        """Other residuals are loaded: forgets a first compressed step that was opened and not
        taken. With local steps every round is a compressed one.
        """
        every = self._settings.config.local_steps is not None
        if self._settings.exchanges and not every and self._group[BEGAN] == self._group[STEP]:
            self._group[BEGAN] = -1
