"""One bucket's part of one step: what every path of compressed gradients works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dgc.collective import World
from dgc.compression import kernels, select
from dgc.compression import sizes as messages
from dgc.compression.kernels import Kernel
from dgc.compression.residual import Bucket, Gradient, clip_scale, norm
from dgc.compression.wire import Layout
from dgc.config import Config
from dgc.trace import stage

Key = tuple[float, torch.dtype, torch.dtype | None, int]
_layouts: WeakKeyDictionary[Bucket, dict[bool, tuple[Key, Layout]]] = WeakKeyDictionary()
in_force: WeakKeyDictionary[Bucket, Layout] = WeakKeyDictionary()  # the layout of a bucket's last step


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
        """Adds the gradients into u and v; returns the parameters whose gradient is not finite, if the host knows."""
        with stage("dgc::accumulate"):
            return self.kernel.accumulate(self.bucket, self.gradients, self.clip, self.layout)

    def select(self) -> tuple[list[str], Tensor, Tensor]:
        """Accumulates, and chooses what is to be sent: see :func:`dgc.compression.kernels.plain.select`."""
        with stage("dgc::select"):
            return self.kernel.select(self.bucket, self.gradients, self.clip, self.layout, self.step)

    def encode(self, index: Tensor, used: Tensor) -> Tensor:
        """Takes the chosen entries out of v, into a message: see :func:`dgc.compression.kernels.plain.encode`."""
        with stage("dgc::take"):
            return self.kernel.encode(self.bucket, self.layout, index, used, self.config.factor_masking)

    def take(self, index: Tensor, valid: Tensor) -> Tensor:
        """Takes all of v at these positions, int64 (E,), where they are valid, bool (E,): what is sent, 0 elsewhere."""
        with stage("dgc::take"):
            values = torch.where(valid, self.bucket.v[index], 0)
            self.bucket.take(index, values, self.config.factor_masking)
        return values

    def take_all(self, names: Iterable[str]) -> Tensor:
        """Takes all of v of these parameters, flat: see :meth:`dgc.compression.residual.Bucket.take_all`."""
        with stage("dgc::take"):
            return self.bucket.take_all(names)


def kernel_of(bucket: Bucket) -> Kernel:
    """The loops that run over a bucket now."""
    return kernels.current(bucket.v.device.type, bucket.v.dtype)


def layout_of(bucket: Bucket, sparsity: float, config: Config, node_size: int = 1, wide: bool = False) -> Layout:
    """The layout of a bucket's messages, made anew only where the sparsity has changed: it holds tables.

    Args:
        wide: with as many entries as the reduce exchange sends (``dgc.compression.sizes.wide``).
    """
    dtype, dense = config.wire_dtype, config.dense_dtype
    key, known = (sparsity, dtype, dense, node_size), _layouts.setdefault(bucket, {})
    if wide not in known or known[wide][0] != key:
        counts = [select.count(sparsity, numel) for numel in bucket.numels]
        if wide:
            counts = [messages.wide(numel, count) for numel, count in zip(bucket.numels, counts, strict=True)]
        known[wide] = key, Layout(bucket, counts, dtype, node_size, dense)
    return known[wide][1]


def chosen(bucket: Bucket, name: str) -> int:
    """Entries of a parameter that each rank has chosen in the last step: all, if there was none."""
    return in_force[bucket].chosen[name] if bucket in in_force else bucket.numels[bucket.names.index(name)]


def clipping(bucket: Bucket, gradients: Mapping[str, Gradient], config: Config, world: World, average: bool,
             scale: Tensor | Mapping[str, Tensor] | None) -> Tensor | Mapping[str, Tensor] | None:
    """The factors for the gradients: the given one, times each parameter's own where each is clipped for itself."""
    if config.clip_norm is None or not config.clip_per_tensor:
        return scale
    assert not isinstance(scale, Mapping)  # AdamW's, which is not clipped so
    once = 1.0 if scale is None else scale.to(bucket.v)
    norms = {name: norm(gradient.g).to(bucket.v.dtype) * once for name, gradient in gradients.items()}
    return {name: once * clip_scale(total, config.clip_norm, world.nodes, average, world.node_size)
            for name, total in norms.items()}
