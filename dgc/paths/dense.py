"""The paths of parameters that always travel dense, and of sums in place of messages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World
from dgc.compression import device
from dgc.compression import sizes as messages
from dgc.compression.chunks import Chunks
from dgc.compression.residual import Bucket, Gradient
from dgc.compression.wire import CORRUPT
from dgc.paths.averaged import DenseUpdate
from dgc.paths.finite import LocalVerdict, PendingVerdict, blame_for, checked_sum, first_not_finite, verdict_of_owners
from dgc.paths.nodes import among_nodes
from dgc.trace import stage


def reduce_dense(gradients: Mapping[str, Tensor], world: World, *, average: bool = True, scale: Tensor | None = None,
                 predivide: float = 1.0) -> Path[DenseUpdate]:
    """The path of gradients that travel dense, as in stock Horovod: their sum, by one ring allreduce.

    Args:
        gradients: parameter -> gradient, of one dtype and device; they are not changed.
        world: this rank and how many there are.
        average: divide the sum by N.
        scale: 0-dim factor for the gradients, from clipping.
        predivide: divides before the sum and multiplies after it (``gradient_predivide_factor``).

    Returns:
        The :class:`dgc.paths.averaged.Update`, in the order and dtype of ``gradients``. If it is not finite it says
        whose gradient made it so; where a device is asynchronous, by a :class:`dgc.paths.finite.PendingVerdict`.
    """
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
    own = first_not_finite(flat) if device.is_asynchronous(flat.device) else None
    if scale is not None:
        flat.mul_(scale.to(flat))
    if predivide != 1.0:
        flat.div_(predivide)
    total = yield Collective("sum", flat)
    names, numels = list(gradients), [gradient.numel() for gradient in gradients.values()]

    def bad() -> list[str]:
        return [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]

    verdict, blame = None, ""
    if own is None:
        blame = yield from blame_for(total, names, numels, bad)
    else:
        verdict = PendingVerdict(names, numels, own, first_not_finite(total))
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
        verdict = _accumulate(bucket, gradients)
    with stage("dgc::take"):
        taken = bucket.take_all(() if verdict.names else gradients)
    return (yield from summed(bucket, None, taken, world, average, verdict, dtype))


def _accumulate(bucket: Bucket, gradients: Mapping[str, Tensor]) -> LocalVerdict:
    """v = v + g, without what is not finite. On an asynchronous device its flags tell where that is."""
    if not device.is_asynchronous(bucket.v.device):
        return LocalVerdict(tuple(bucket.accumulate({name: Gradient(g) for name, g in gradients.items()})))
    v, flags = bucket.views(bucket.v), list[Tensor]()
    for name in bucket.names:
        g = gradients.get(name)
        finite = torch.ones((), dtype=torch.bool, device=bucket.v.device) if g is None else g.isfinite()
        if g is not None:
            v[name].add_(torch.where(finite, g, 0))
        flags.append(~finite.all())
    marked = torch.stack(flags).to(torch.int32)
    bucket.flags = torch.cat([marked, marked.amax().view(1)])
    return LocalVerdict(on_device=True)


def summed(bucket: Bucket, index: Tensor | None, taken: Tensor, world: World, average: bool, verdict: LocalVerdict,
           dtype: torch.dtype | None = None) -> Path[DenseUpdate]:
    """The sum over ranks of what was taken out of v, as one dense tensor. A rank with a bad gradient takes part to say
    so. On failure what was taken is back in v.

    Args:
        index: int64 (E,), the positions of what was taken; None: all of them.
        taken: (E,), or flat, of all parameters.
        verdict: on this rank's gradients.
        dtype: rounds to it, where that is fewer bytes; v keeps what that drops.
    """
    flat = taken.clone() if index is None else torch.zeros_like(bucket.v).index_add_(0, index, taken)
    own = None
    if verdict.on_device:
        marks = torch.where(bucket.marked, torch.nan, 0.0).to(flat)
        own = first_not_finite(flat.index_add_(0, bucket.beginnings, marks))
    for name in verdict.names:
        flat[bucket.offsets[bucket.names.index(name)]] = torch.nan
    chunks = _chunks(bucket, dtype, world)
    try:
        if chunks:
            total, pending = yield from _sum_rounded(bucket, flat, chunks, world, verdict, own)
        else:
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


def _chunks(bucket: Bucket, dtype: torch.dtype | None, world: World) -> Chunks | None:
    """The format in which a bucket's sum travels; None: it is not rounded."""
    sizes = messages.always_dense(bucket.numel, dtype, bucket.v.itemsize)
    if dtype is None or not messages.rounds(sizes, world.nodes):
        return None
    return Chunks(bucket.numel, world.nodes, dtype, bucket.v.dtype)


def _sum_rounded(bucket: Bucket, flat: Tensor, chunks: Chunks, world: World, verdict: LocalVerdict,
                 own: Tensor | None) -> Path[tuple[Tensor, PendingVerdict | None]]:
    """A sum in two rounds: to each contributor its chunk of all others' entries, rounded; then its sums to all, rounded
    again. What the first drops goes into v of its sender, and what the second drops into v of the chunk's owner.
    """
    mine = chunks.split(flat)
    total = mine[world.node:world.node + 1].clone()  # what is one's own need not be rounded
    with stage("dgc::take"):
        rows = chunks.encode(mine)
    rows = yield from among_nodes("alltoall", rows, world)
    with stage("dgc::read"):
        told = chunks.read(rows)
        chunks.add(rows, told, world.node, total)
    with stage("dgc::take"):
        damaged = told.status == CORRUPT
        message = torch.where(damaged.any(), chunks.telling(told.whose.take(damaged.to(torch.uint8).argmax())),
                              chunks.encode(total))
    messages = yield from among_nodes("gather", message.view(-1), world)
    with stage("dgc::read"):
        told = chunks.read(messages)
    pending = yield from verdict_of_owners(bucket, verdict.names, told.status, told.whose, world.node_size, own)
    with stage("dgc::read"):
        values = chunks.values(messages, told)
    mine[world.node] = total
    if pending is not None:
        mine, values = torch.where(pending.fine, mine, 0), torch.where(pending.fine, values, 0)
    bucket.v += chunks.join(mine)
    return chunks.join(values), pending


def put_back(bucket: Bucket, index: Tensor | None, taken: Tensor) -> None:
    """Returns to v what was taken out of it."""
    if index is None:
        bucket.v += taken
    else:
        bucket.v.index_add_(0, index, taken)
