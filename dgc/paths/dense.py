"""The paths of parameters that always travel dense, and of sums in place of messages."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World
from dgc.compression import device
from dgc.compression.residual import Bucket, Gradient
from dgc.compression.wire import Whole
from dgc.paths.averaged import DenseUpdate
from dgc.paths.finite import LocalVerdict, PendingVerdict, blame_for, checked_sum, first_not_finite
from dgc.paths.nodes import among_nodes
from dgc.trace import stage

_wholes: WeakKeyDictionary[Bucket, Whole] = WeakKeyDictionary()


def reduce_dense(gradients: Mapping[str, Tensor], world: World, *, average: bool = True, scale: Tensor | None = None,
                 predivide: float = 1.0, refuse: bool = True) -> Path[DenseUpdate]:
    """The path of parameters that always travel dense: their gradients, summed by one ring allreduce.

    Args:
        gradients: parameter -> gradient, of one dtype and device; they are not changed.
        world: this rank and how many there are.
        average: divide the sum by N.
        scale: 0-dim factor for the gradients, from clipping.
        predivide: divides before the sum and multiplies after it (``gradient_predivide_factor``).
        refuse: a sum that is not finite. Else it is the update, as in stock Horovod, and says whose gradient it is.

    Returns:
        The :class:`dgc.paths.averaged.Update`, in the order and dtype of ``gradients``.

    Raises:
        FloatingPointError: a rank's gradient is not finite, and that is refused; raised on all of them. Where a device
            is asynchronous the update has a :class:`dgc.paths.finite.PendingVerdict` instead.
    """
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
    own = first_not_finite(flat) if device.is_asynchronous(flat.device) else None
    if scale is not None:
        flat.mul_(scale.to(flat.dtype))
    if predivide != 1.0:
        flat.div_(predivide)
    total = yield Collective("sum", flat)
    names, numels = list(gradients), [gradient.numel() for gradient in gradients.values()]

    def bad() -> list[str]:
        return [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]

    verdict, blame = None, ""
    if refuse:
        total, verdict = yield from checked_sum(total, own, names, numels, bad)
    elif own is None:
        blame = yield from blame_for(total, names, numels, bad)
    else:
        verdict = PendingVerdict(names, numels, own, first_not_finite(total), refused=False)
    return DenseUpdate(total.mul_(predivide / world.size) if average else total, numels, verdict, blame)


def reduce_rounded(bucket: Bucket, gradients: Mapping[str, Tensor], dtype: torch.dtype, world: World, *,
                   average: bool = True) -> Path[DenseUpdate]:
    """The path of parameters that always travel dense, rounded to ``dtype``; v of the bucket keeps what that drops.

    Args:
        bucket: has v and no u.
        gradients: parameter -> gradient, already clipped. A parameter without one sits this step out.
        dtype: float16 or bfloat16.
        world: this rank and how many there are.
        average: divide the sum by N.

    Returns:
        The :class:`dgc.paths.averaged.Update`, in the residual's dtype.

    Raises:
        FloatingPointError, ValueError: as :func:`dgc.paths.compressed.reduce`.
    """
    with stage("dgc::accumulate"):
        bad = bucket.accumulate({name: Gradient(gradient) for name, gradient in gradients.items()})
    with stage("dgc::take"):
        taken = bucket.take_all(() if bad else gradients)
    if 2 * bucket.v.element_size() < dtype.itemsize * world.size:  # bytes an entry, as in dgc.cost.sends_dense
        return (yield from summed(bucket, None, taken, world, average, LocalVerdict(tuple(bad))))
    layout = _whole(bucket, dtype)
    message, sent = layout.encode(taken, bad)
    bucket.v += taken - sent
    try:
        messages = yield Collective("gather", message)
        total = torch.zeros_like(bucket.v)
        with stage("dgc::read"):
            for sender, received in enumerate(messages):
                total += layout.decode(received, sender)
    except (Exception, KeyboardInterrupt):
        bucket.v += sent
        raise
    return DenseUpdate(total.div_(world.divisor(average)), bucket.numels)


def _whole(bucket: Bucket, dtype: torch.dtype) -> Whole:
    """The layout of a bucket's rounded messages, made once."""
    layout = _wholes.get(bucket)
    if layout is None or layout.dtype != dtype:
        layout = _wholes[bucket] = Whole(bucket, dtype)
    return layout


def summed(bucket: Bucket, index: Tensor | None, taken: Tensor, world: World, average: bool,
           verdict: LocalVerdict) -> Path[DenseUpdate]:
    """The sum over ranks of what was taken out of v, as one dense tensor. A rank with a bad gradient takes part to say
    so.

    Args:
        index: int64 (E,), the positions of what was taken; None: all of them.
        taken: (E,), or flat, of all parameters.
        verdict: on this rank's gradients.
    """
    flat = taken.clone() if index is None else torch.zeros_like(bucket.v).index_add_(0, index, taken)
    own = None
    if verdict.on_device:
        marks = torch.where(bucket.marked, torch.nan, 0.0).to(flat)
        own = first_not_finite(flat.index_add_(0, bucket.beginnings, marks))
    for name in verdict.names:
        flat[bucket.offsets[bucket.names.index(name)]] = torch.nan
    try:
        total = yield from among_nodes("sum", flat, world)
        total, pending = yield from checked_sum(total, own, bucket.names, bucket.numels, lambda: verdict.names,
                                                world.node_size)
    except (Exception, KeyboardInterrupt):  # abandoned or refused: nothing may be lost
        put_back(bucket, index, taken)
        raise
    if pending is not None:
        put_back(bucket, index, torch.where(pending.fine, 0, taken))
    divisor = world.divisor(average)
    return DenseUpdate(total if divisor == 1 else total.div_(divisor), bucket.numels, pending)


def put_back(bucket: Bucket, index: Tensor | None, taken: Tensor) -> None:
    """Returns to v what was taken out of it."""
    if index is None:
        bucket.v += taken
    else:
        bucket.v.index_add_(0, index, taken)
