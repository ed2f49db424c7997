"""One bucket in one step: what every path of compressed gradients works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgc.collective import Path, World
from dgc.compression import kernels, select, sizes
from dgc.compression.kernels import Kernel, ReceivedEntries
from dgc.compression.regions import Arrived, Taken
from dgc.compression.residual import Gradient, Residual, clip_scale, norm
from dgc.compression.wire import Layout
from dgc.config import Config
from dgc.paths.averaged import DenseUpdate, Update
from dgc.paths.finite import local_verdict, verdict_of_rows
from dgc.trace import stage


@dataclass(frozen=True)
class BucketStep:
    """The gradients of one bucket in one step, and how they are to be exchanged.

    Args:
        residual: holds u and v, which the path changes.
        gradients: parameter -> local gradient.
        clip: factor for the gradients: one 0-dim tensor for all, one each, or None.
        layout: of the bucket's messages at this step's sparsity.
        config: the settings.
        step: the optimizer's step, from 0.
        world: this rank and how many there are.
    """

    residual: Residual
    gradients: Mapping[str, Gradient]
    clip: Tensor | Mapping[str, Tensor] | None
    layout: Layout
    config: Config
    step: int
    world: World

    @property
    def kernel(self) -> Kernel:
        return kernel_of(self.residual)

    def accumulate(self) -> list[str]:
        """Adds the gradients into u and v; returns the parameters whose gradient is not finite, if
        the host knows.
        """
        with stage("dgc::accumulate"):
            return self.kernel.accumulate(self.residual, self.gradients, self.clip, self.layout)

    def accumulate_and_select(self) -> tuple[list[str], Tensor, Tensor]:
        """Adds the gradients into u and v, and chooses what is sent: see
        :func:`dgc.compression.kernels.plain.accumulate_and_select`.
        """
        with stage("dgc::select"):
            return self.kernel.accumulate_and_select(
                self.residual, self.gradients, self.clip, self.layout, self.step
            )

    def encode(self, index: Tensor, used: Tensor, refused: Tensor) -> tuple[Tensor, Taken]:
        """Takes the chosen entries out of v, into a message: see
        :func:`dgc.compression.kernels.plain.encode`.
        """
        with stage("dgc::take"):
            return self.kernel.encode(
                self.residual, self.layout, index, used, refused, self.config.factor_masking
            )

    def take(self, index: Tensor, valid: Tensor) -> Tensor:
        """Takes all of v at these positions, int64 (E,), where they are valid, bool (E,): what is
        sent, 0 elsewhere.
        """
        with stage("dgc::take"):
            values = torch.where(valid, self.residual.v[index], 0)
            self.residual.take(index, values, self.config.factor_masking)
        return values

    def take_all(self, names: Iterable[str]) -> Tensor:
        """Takes all of v of these parameters, flat: see
        :meth:`dgc.compression.residual.Residual.take_all`.
        """
        with stage("dgc::take"):
            return self.residual.take_all(names)


class UndoLog:
    """Records what a step takes out of v and adds to it, so that it can be undone until the
    exchange has succeeded.
    """

    def __init__(self, residual: Residual):
        self.residual, self._log = residual, list[Taken | Arrived]()

    def record(self, move: Taken | Arrived) -> None:
        self._log.append(move)

    def count(self) -> None:
        """Tells the residual how many entries were sent."""
        self.residual.entries_sent = torch.stack(
            [torch.count_nonzero(move.sent) for move in self._log if isinstance(move, Taken)]
        ).sum()

    def undo(self, where: Tensor | bool = True) -> None:
        """Makes v what it was, if ``where``, bool ()."""
        v = self.residual.v
        where = torch.as_tensor(where, device=v.device)
        for move in reversed(self._log):
            index, sent = move.added if isinstance(move, Arrived) else move
            v.index_add_(0, index, torch.where(where, sent, 0))
            if isinstance(
                move, Arrived
            ):  # from a sum that was too large for its dtype, nothing can be taken away
                now = v[index]
                v[index] = torch.where(where & ~now.isfinite(), move.before, now)


def nonfinite_flag(residual: Residual, bad: Sequence[str]) -> tuple[Tensor, tuple[str, ...]]:
    """Whether a gradient of this rank is not finite, bool (); and the names of such parameters,
    where the host knows.
    """
    verdict = local_verdict(residual, bad)
    if verdict.on_device:
        return residual.marked.any(), ()
    return torch.tensor(bool(verdict.names), device=residual.v.device), verdict.names


def finish_update(
    undo_log: UndoLog, received: ReceivedEntries, bad: Sequence[str], world: World
) -> Path[Update]:
    """The received update, unless a row tells of an error. An asynchronous device knows that later:
    then the update is zero, and v is restored.
    """
    residual = undo_log.residual
    verdict = yield from verdict_of_rows(residual, bad, received.status, world.node_size)
    if verdict is None:
        return received
    flat = torch.empty_like(residual.v)
    received.write(flat.split(residual.numels))
    undo_log.undo(~verdict.fine)
    return DenseUpdate(torch.where(verdict.fine, flat, 0), residual.numels, verdict)


def kernel_of(residual: Residual) -> Kernel:
    """The loops that run over a bucket now."""
    return kernels.current(residual.v.device.type, residual.v.dtype)


def layout_of(residual: Residual, sparsity: float, config: Config, wide: bool = False) -> Layout:
    """The layout of a bucket's messages, made anew only where the sparsity has changed: it holds
    tables.

    Args:
        wide: with as many entries as the reduce exchange sends (``dgc.compression.sizes.wide``).
    """
    key = sparsity, config.value_bits
    known: dict[bool, tuple[Any, Layout]] = residual.layouts
    if wide not in known or known[wide][0] != key:
        counts = [select.count(sparsity, numel) for numel in residual.numels]
        if wide:
            counts = [
                sizes.wide(numel, count)
                for numel, count in zip(residual.numels, counts, strict=True)
            ]
        known[wide] = key, Layout(residual, counts, config.value_bits)
    return known[wide][1]


def chosen(residual: Residual, name: str) -> int:
    """Entries of a parameter that each rank has chosen in the last step: all, if there was none."""
    last: Layout | None = residual.last_layout
    return residual.numel_of[name] if last is None else last.chosen[name]


def clip_factors(
    residual: Residual,
    gradients: Mapping[str, Gradient],
    config: Config,
    world: World,
    scale: Tensor | Mapping[str, Tensor] | None,
) -> Tensor | Mapping[str, Tensor] | None:
    """The factors for the gradients: the given one, times each parameter's own where each is
    clipped for itself.
    """
    if config.clip_norm is None or not config.clip_per_tensor:
        return scale
    assert not isinstance(scale, Mapping)  # AdamW's, which is not clipped so
    once = 1.0 if scale is None else scale.to(residual.v)
    norms = {
        name: norm(gradient.g).to(residual.v.dtype) * once for name, gradient in gradients.items()
    }
    return {
        name: once
        * clip_scale(total, config.clip_norm, world.nodes, world.average, world.node_size)
        for name, total in norms.items()
    }
