"""The sparsity of an adaptive schedule, which goes by how long computing stands still in a step."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch

from dgc.collective import Collective
from dgc.schedule import FORGET, Adaptive, Found
from dgc.transport import Transport

KEYS = {key: f"dgc_{key}" for key in Found._fields}  # in param_groups[0]
SPARSITY = KEYS["sparsity"]


class AdaptiveSparsity:
    """Measures the steps of one rank, and moves the sparsity by what all ranks have measured.

    Exposed is the time for which computing stands still: ``synchronize()``, with what is still to be compressed, the
    waiting and the decoding; and, where nothing computes beside the process, within a ``with`` of this, which is for
    the compression during the backward pass.

    Args:
        schedule: the settings and the law.
        transport: to gather over what the ranks have measured.
        device: that computes. On CUDA, which runs behind the host, the times are those of events in its stream.
    """

    def __init__(self, schedule: Adaptive, transport: Transport, device: torch.device):
        self._schedule, self._transport, self._device = schedule, transport, device
        self._ended: Any = None  # the step before
        self._since: Any = None  # computing stands still
        self._exposed: list[tuple[Any, Any]] = []  # in this step, before its end
        self._steps: dict[int, tuple[Any, Any, list[tuple[Any, Any]]]] = {}  # since the last decision

    def __enter__(self) -> None:
        if self._device.type != "cuda":
            self.computing_stops()

    def __exit__(self, *exception: object) -> None:
        if self._device.type != "cuda":
            self._exposed.append((self._since, self._mark()))

    def computing_stops(self) -> None:
        """Computing stands still from here on, until the step has ended."""
        self._since = self._mark()

    def first(self, group: Mapping[str, Any]) -> dict[str, float]:
        """The values that hold from the start, for a param group: what is in there already, within the bounds."""
        start = Found(self._schedule.start)._asdict()
        values = {kept: float(group.get(kept, start[key])) for key, kept in KEYS.items()}
        return {**values, SPARSITY: self._schedule.within(values[SPARSITY])}

    def step_ends(self, group: dict[str, Any], step: int) -> None:
        """A step has ended, and ``step`` have in all, alike on every rank. Every so often, moves the group's sparsity.
        """
        now, every, world = self._mark(), self._schedule.every, self._transport.world
        if self._ended is not None:  # or this is the first one
            self._steps[(step - 1) % every] = self._ended, now, [*self._exposed, (self._since, now)]
        if step % every == 0 and world is not None and world.size > 1:  # an elastic job may be down to one
            share = self._exposed_share(now)
            self._steps = {}
            if share is not None:
                found = Found(*(group[kept] for kept in KEYS.values()))
                found = self._schedule.after(found, share, forget=step // every % FORGET == 0)
                group.update(zip(KEYS.values(), found, strict=True))
            now = self._mark()  # deciding does not count
        self._ended, self._exposed = now, []

    def _exposed_share(self, now: Any) -> float | None:
        """The exposed time of exchanges / computing time; None if most steps were not measured on all ranks."""
        if self._device.type == "cuda":
            now.synchronize()
        own = torch.full((self._schedule.every, 2), torch.nan, dtype=torch.float64, device="cpu")
        for row, (began, ended, exposed) in self._steps.items():
            seconds = sum(_seconds(*times) for times in exposed)
            own[row, 0], own[row, 1] = seconds, max(_seconds(began, ended) - seconds, 1e-9)
        everyones = self._transport.start(Collective("gather", own.to(self._device)), "dgc.pace")().cpu()
        shares = everyones[:, :, 0].amin(0) / everyones[:, :, 1].amax(0)
        shares = shares[~shares.isnan()]
        return shares.median().item() if 2 * len(shares) > self._schedule.every else None

    def _mark(self) -> Any:
        """Now; on a GPU, when it has done what the current stream was given so far."""
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _seconds(began: Any, ended: Any) -> float:
    return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3
