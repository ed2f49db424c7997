"""One bucket's part of one step: what every path of compressed gradients works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dgc.collective import Path, World
from dgc.compression import kernels, select
from dgc.compression import sizes as messages
from dgc.compression.kernels import Kernel, ReceivedEntries
from dgc.compression.regions import Arrived, Taken
from dgc.compression.residual import Bucket, Gradient, clip_scale, norm
from dgc.compression.wire import Layout
from dgc.config import Config
from dgc.paths.averaged import DenseUpdate, Update
from dgc.paths.finite import local_verdict, verdict_of_rows
from dgc.trace import stage

Key = tuple[float, int]
_layouts: WeakKeyDictionary[Bucket, dict[bool, tuple[Key, Layout]]] = WeakKeyDictionary()
# The layout of a bucket's last step.
in_force: WeakKeyDictionary[Bucket, Layout] = WeakKeyDictionary()


@dataclass(frozen=True)
class Task:
    """The gradients of one bucket in one step, and how they are to be exchanged.

    Args:
        bucket: holds u and v, which the path changes.
        gradients: parameter -> local gradient.
        clip: factor for the gradients: one 0-dim tensor for all, one each, or None.
        layout: of the bucket's messages at this step's sparsity.
        config: the settings.
        step: the optimizer's step, from 0.
        world: this rank and how many there are.
        average: divide the sum by N.
    """

    bucket: Bucket
    gradients: Mapping[str, Gradient]
    clip: Tensor | Mapping[str, Tensor] | None
    layout: Layout
    config: Config
    step: int
    world: World
    average: bool

    @property
    def kernel(self) -> Kernel:
        return kernel_of(self.bucket)

    def accumulate(self) -> list[str]:
        """Adds the gradients into u and v; returns the parameters whose gradient is not finite, if
        the host knows.
        """
        with stage("dgc::accumulate"):
            return self.kernel.accumulate(self.bucket, self.gradients, self.clip, self.layout)

    def select(self) -> tuple[list[str], Tensor, Tensor]:
        """Accumulates, and chooses what is to be sent: see
        :func:`dgc.compression.kernels.plain.select`.
        """
        with stage("dgc::select"):
            return self.kernel.select(
                self.bucket, self.gradients, self.clip, self.layout, self.step
            )

    def encode(self, index: Tensor, used: Tensor, refused: Tensor) -> tuple[Tensor, Taken]:
        """Takes the chosen entries out of v, into a message: see
        :func:`dgc.compression.kernels.plain.encode`.
        """
        with stage("dgc::take"):
            return self.kernel.encode(
                self.bucket, self.layout, index, used, refused, self.config.factor_masking
            )

    def take(self, index: Tensor, valid: Tensor) -> Tensor:
        """Takes all of v at these positions, int64 (E,), where they are valid, bool (E,): what is
        sent, 0 elsewhere.
        """
        with stage("dgc::take"):
            values = torch.where(valid, self.bucket.v[index], 0)
            self.bucket.take(index, values, self.config.factor_masking)
        return values

    def take_all(self, names: Iterable[str]) -> Tensor:
        """Takes all of v of these parameters, flat: see
        :meth:`dgc.compression.residual.Bucket.take_all`.
        """
        with stage("dgc::take"):
            return self.bucket.take_all(names)


class Moves:
    """What a step takes out of v and what it adds to it, one after the other, until the exchange
    has succeeded.
    """

    def __init__(self, bucket: Bucket):
        self.bucket, self._moves = bucket, list[Taken | Arrived]()

    def note(self, move: Taken | Arrived) -> None:
        self._moves.append(move)

    def count(self) -> None:
        """Tells the bucket how many entries were sent."""
        self.bucket.entries_sent = torch.stack(
            [torch.count_nonzero(move.sent) for move in self._moves if isinstance(move, Taken)]
        ).sum()

    def undo(self, where: Tensor | bool = True) -> None:
        """Makes v what it was, if ``where``, bool ()."""
        v = self.bucket.v
        where = torch.as_tensor(where, device=v.device)
        for move in reversed(self._moves):
            index, sent = move.added if isinstance(move, Arrived) else move
            v.index_add_(0, index, torch.where(where, sent, 0))
            if isinstance(
                move, Arrived
            ):  # from a sum that was too large for its dtype, nothing can be taken away
                now = v[index]
                v[index] = torch.where(where & ~now.isfinite(), move.before, now)


def refused(bucket: Bucket, bad: Sequence[str]) -> tuple[Tensor, tuple[str, ...]]:
    """Whether a gradient of this rank is not finite, bool (); and of which parameters, where the
    host knows.
    """
    verdict = local_verdict(bucket, bad)
    if verdict.on_device:
        return bucket.marked.any(), ()
    return torch.tensor(bool(verdict.names), device=bucket.v.device), verdict.names


def concluded(
    moves: Moves, received: ReceivedEntries, bad: Sequence[str], world: World
) -> Path[Update]:
    """The update that was received, if no row tells of an error. On an asynchronous device that is
    known later: then it is zero, and what was taken out of v is back there.
    """
    bucket = moves.bucket
    verdict = yield from verdict_of_rows(bucket, bad, received.status, world.node_size)
    if verdict is None:
        return received
    flat = torch.empty_like(bucket.v)
    received.write(flat.split(bucket.numels))
    moves.undo(~verdict.fine)
    return DenseUpdate(torch.where(verdict.fine, flat, 0), bucket.numels, verdict)


def kernel_of(bucket: Bucket) -> Kernel:
    """The loops that run over a bucket now."""
    return kernels.current(bucket.v.device.type, bucket.v.dtype)


def layout_of(bucket: Bucket, sparsity: float, config: Config, wide: bool = False) -> Layout:
    """The layout of a bucket's messages, made anew only where the sparsity has changed: it holds
    tables.

    Args:
        wide: with as many entries as the reduce exchange sends (``dgc.compression.sizes.wide``).
    """
    key, known = (sparsity, config.value_bits), _layouts.setdefault(bucket, {})
    if wide not in known or known[wide][0] != key:
        counts = [select.count(sparsity, numel) for numel in bucket.numels]
        if wide:
            counts = [
                messages.wide(numel, count)
                for numel, count in zip(bucket.numels, counts, strict=True)
            ]
        known[wide] = key, Layout(bucket, counts, config.value_bits)
    return known[wide][1]


def chosen(bucket: Bucket, name: str) -> int:
    """Entries of a parameter that each rank has chosen in the last step: all, if there was none."""
    return (
        in_force[bucket].chosen[name]
        if bucket in in_force
        else bucket.numels[bucket.names.index(name)]
    )


def clipping(
    bucket: Bucket,
    gradients: Mapping[str, Gradient],
    config: Config,
    world: World,
    average: bool,
    scale: Tensor | Mapping[str, Tensor] | None,
) -> Tensor | Mapping[str, Tensor] | None:
    """The factors for the gradients: the given one, times each parameter's own where each is
    clipped for itself.
    """
    if config.clip_norm is None or not config.clip_per_tensor:
        return scale
    assert not isinstance(scale, Mapping)  # AdamW's, which is not clipped so
    once = 1.0 if scale is None else scale.to(bucket.v)
    norms = {
        name: norm(gradient.g).to(bucket.v.dtype) * once for name, gradient in gradients.items()
    }
    return {
        name: once * clip_scale(total, config.clip_norm, world.nodes, average, world.node_size)
        for name, total in norms.items()
    }
