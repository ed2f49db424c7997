"""The bytes that a training sends in one step, bucket by bucket, as the optimizer packs them.

The bytes of compressed messages are those of :class:`dgc.compression.wire.Layout`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from dgc.compression import select
from dgc.compression.residual import Bucket
from dgc.compression.sizes import Sizes
from dgc.compression.wire import Layout
from dgc.config import Config
from dgc.engine.parameters import compressible, pack
from dgc.plan.models import Shape


class PlannedBucket(NamedTuple):
    """Parameters that travel together."""

    ready: float  # share of the backward pass after which their gradients are complete
    numel: int
    sizes: Sizes | None  # None: always dense
    slots: int = 0  # entries in a message


@cache
def buckets(shapes: tuple[Shape, ...], config: Config, step: int = 0) -> tuple[PlannedBucket, ...]:
    """How :func:`dgc.DistributedOptimizer` packs float32 parameters of these shapes, and the bytes of each message.

    Args:
        shapes: of the parameters, in forward order.
        config: ``sparsity``, ``wire_dtype``, ``min_numel`` and ``dense_dtype`` count.
        step: of the optimizer, for a schedule.
    """
    sparsity, made = config.sparsity_at(step), []
    for ready, together in _departing(shapes, config.min_numel):
        compressed = sparsity > 0.0 and compressible(together[0], config.min_numel)
        message = _message(together, sparsity, config) if compressed else (None,)
        made.append(PlannedBucket(ready, sum(p.numel() for p in together), *message))
    return tuple(made)


@cache
def dense_buckets(shapes: tuple[Shape, ...]) -> tuple[PlannedBucket, ...]:
    """The buckets of a step in which nothing is compressed."""
    return tuple(PlannedBucket(ready, sum(p.numel() for p in together), None)
                 for ready, together in _departing(shapes, sum(torch.Size(shape).numel() for shape in shapes) + 1))


@cache
def _departing(shapes: tuple[Shape, ...], min_numel: int) -> list[tuple[float, list[torch.Tensor]]]:
    """Buckets in the order in which they leave, and the share of the backward pass after which they can."""
    parameters = [torch.empty(shape, device="meta") for shape in shapes]
    done, weights = {}, 0
    for parameter in reversed(parameters):
        done[parameter] = weights = weights + (parameter.dim() > 1)
    latest, packed = 0.0, []
    for _, together in pack(parameters, {p: str(i) for i, p in enumerate(parameters)}, None, min_numel):
        latest = max(latest, *(done[p] / max(1, weights) for p in together))  # none overtakes another
        packed.append((latest, together))
    return packed


def _message(together: list[torch.Tensor], sparsity: float, config: Config) -> tuple[Sizes, int]:
    bucket = Bucket("", {str(i): p for i, p in enumerate(together)}, velocity=False)
    counts = [select.count(sparsity, numel) for numel in bucket.numels]
    layout = Layout(bucket, counts, config.wire_dtype, dense_dtype=config.dense_dtype)
    return layout.sizes, layout.slots
