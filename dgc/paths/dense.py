"""The paths of parameters that always travel dense, and of sums in place of messages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World
from dgc.compression import device, kernels
from dgc.compression.residual import Gradient, Residual
from dgc.compression.sizes import Sizes, chunk, is_rounded, returned_bits
from dgc.compression.wire import Rows, worst
from dgc.paths.averaged import DenseUpdate
from dgc.paths.finite import (
    DeferredVerdict,
    LocalVerdict,
    blame_for,
    checked_sum,
    first_not_finite,
    verdict_of_rows,
)
from dgc.paths.nodes import among_nodes
from dgc.trace import stage


def reduce_dense(
    gradients: Mapping[str, Tensor],
    world: World,
    *,
    scale: Tensor | None = None,
    predivide: float = 1.0,
    stock: bool = True,
) -> Path[DenseUpdate]:
    """The path of gradients that travel dense, as in stock Horovod: their sum, by one ring
    allreduce.

    Args:
        gradients: parameter -> gradient, of one dtype and device; they are not changed.
        world: this rank and how many there are.
        scale: 0-dim factor for the gradients, from clipping.
        predivide: divides before the sum and multiplies after it (``gradient_predivide_factor``).
        stock: a sum that is not finite is left as it is, as step() asks for the verdict. Else, where
            a device is asynchronous, such a sum is 0, as the verdict comes after the step.

    Returns:
        The :class:`dgc.paths.averaged.Update`, in the order and dtype of ``gradients``. If it is
        not finite it says whose gradient made it so; where a device is asynchronous, by a
        :class:`dgc.paths.finite.DeferredVerdict`.
    """
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
    own = first_not_finite(flat) if device.is_asynchronous(flat.device) else None
    if scale is not None:
        flat.mul_(scale.to(flat))
    if predivide != 1.0:
        flat.div_(predivide)
    total = yield Collective("all_reduce", flat)
    numels = {name: gradient.numel() for name, gradient in gradients.items()}

    def bad() -> list[str]:
        return [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]

    verdict, blame = None, ""
    if own is None:
        blame = yield from blame_for(total, numels, bad)
    else:
        verdict = DeferredVerdict(numels, own, first_not_finite(total))
        if not stock:
            total = torch.where(verdict.fine, total, 0)
    return DenseUpdate(
        total.mul_(predivide / world.size) if world.average else total,
        list(numels.values()),
        verdict,
        blame,
    )


def reduce_rounded(
    residual: Residual,
    gradients: Mapping[str, Tensor],
    bits: int,
    world: World,
) -> Path[DenseUpdate]:
    """The path of parameters that always travel dense, in few bits; v of the bucket keeps what that
    drops.

    Args:
        residual: has v and no u.
        gradients: parameter -> gradient, already clipped. A parameter without one sits this step
            out.
        bits: of a value; 0: the sum is not rounded.
        world: this rank and how many there are.

    Returns:
        The :class:`dgc.paths.averaged.Update`, in the residual's dtype.

    Raises:
        FloatingPointError, ValueError: as :func:`dgc.paths.compressed.exchange_bucket`.
    """
    with stage("dgc::accumulate"):
        verdict = _accumulate(residual, gradients)
    with stage("dgc::take"):
        taken = residual.take_all(() if verdict.names else gradients)
    return (yield from summed(residual, None, taken, world, verdict, bits))


def _accumulate(residual: Residual, gradients: Mapping[str, Tensor]) -> LocalVerdict:
    """v = v + g, without entries that are not finite. On an asynchronous device the residual's
    flags mark their parameters.
    """
    if not device.is_asynchronous(residual.v.device):
        return LocalVerdict(
            tuple(residual.accumulate({name: Gradient(g) for name, g in gradients.items()}))
        )
    v, flags = residual.views(residual.v), list[Tensor]()
    for name in residual.names:
        g = gradients.get(name)
        finite = (
            torch.ones((), dtype=torch.bool, device=residual.v.device)
            if g is None
            else g.isfinite()
        )
        if g is not None:
            v[name].add_(torch.where(finite, g, 0))
        flags.append(~finite.all())
    marked = torch.stack(flags).to(torch.int32)
    residual.flags = torch.cat([marked, marked.amax().view(1)])
    return LocalVerdict(on_device=True)


def summed(
    residual: Residual,
    index: Tensor | None,
    taken: Tensor,
    world: World,
    verdict: LocalVerdict,
    bits: int = 0,
) -> Path[DenseUpdate]:
    """The sum over ranks of what was taken out of v, as one dense tensor. A rank with a bad
    gradient takes part to say so. On failure v is restored.

    Args:
        index: int64 (E,), the positions of what was taken; None: all of them.
        taken: (E,), or flat, of all parameters.
        verdict: on this rank's gradients.
        bits: of a value, where that is fewer bytes; v keeps what rounding drops. 0: the sum is not
            rounded.
    """
    flat = (
        taken.clone() if index is None else torch.zeros_like(residual.v).index_add_(0, index, taken)
    )
    own = None
    if verdict.on_device:
        marks = torch.where(residual.marked, torch.nan, 0.0).to(flat)
        own = first_not_finite(flat.index_add_(0, residual.beginnings, marks))
    for name in verdict.names:
        flat[residual.offsets[residual.names.index(name)]] = torch.nan
    rows = _rows(residual, bits, world)
    try:
        if rows:
            total, deferred = yield from _sum_rounded(residual, flat, rows, world, verdict, own)
        else:
            total = yield from among_nodes("all_reduce", flat, world)
            total, deferred = yield from checked_sum(
                total, own, residual.numel_of, lambda: verdict.names, world.node_size
            )
    except (Exception, KeyboardInterrupt):  # aborted or refused: nothing may be lost
        restore_v(residual, index, taken)
        raise
    if deferred is not None:
        restore_v(residual, index, torch.where(deferred.fine, 0, taken))
    divisor = world.divisor
    return DenseUpdate(total if divisor == 1 else total.div_(divisor), residual.numels, deferred)


def _rows(residual: Residual, bits: int, world: World) -> tuple[Rows, Rows] | None:
    """The format in which a bucket's parts travel to those that add them up, a row for each, and
    that of their sums; None: the sum is not rounded.
    """
    sizes = Sizes(residual.v.itemsize * residual.numel, residual.numel, bits=bits)
    if not bits or not is_rounded(sizes, world.nodes):
        return None
    size = chunk(residual.numel, world.nodes)
    dtype, device = residual.v.dtype, residual.v.device
    return (
        Rows(size, size, bits, dtype, device, all_entries=True),
        Rows(size, size, returned_bits(bits), dtype, device, all_entries=True),
    )


def _sum_rounded(
    residual: Residual,
    flat: Tensor,
    formats: tuple[Rows, Rows],
    world: World,
    verdict: LocalVerdict,
    own: Tensor | None,
) -> Path[tuple[Tensor, DeferredVerdict | None]]:
    """A sum in two rounds: to each contributor its part of all others' entries, rounded; then its
    sums to all, rounded again, to more bits. What the first drops goes into v of its sender, and
    what the second drops into v of the part's owner.
    """
    rows, sums = formats
    kernel = kernels.current(residual.v.device.type, residual.v.dtype)
    short = world.nodes * rows.size - residual.numel
    mine = torch.nn.functional.pad(flat, (0, short)).view(world.nodes, rows.size)
    total = mine[world.node : world.node + 1].clone()  # what is one's own need not be rounded
    with stage("dgc::take"):
        message = kernel.encode_all(rows, mine)
    message = yield from among_nodes("all_to_all", message, world)
    with stage("dgc::read"):
        status, values = kernel.decode_all(rows, message)
        values[world.node] = 0
        total += values.sum(0, keepdim=True)
    with stage("dgc::take"):
        worst_status = worst(status)
        message = torch.where(
            worst_status == 0, kernel.encode_all(sums, total), sums.status_message(1, worst_status)
        )
    messages = yield from among_nodes("all_gather", message.view(-1), world)
    with stage("dgc::read"):
        status, values = kernel.decode_all(sums, messages)
    deferred = yield from verdict_of_rows(residual, verdict.names, status, world.node_size, own)
    mine[world.node] = total
    if deferred is not None:
        mine, values = torch.where(deferred.fine, mine, 0), torch.where(deferred.fine, values, 0)
    residual.v += mine.view(-1)[: residual.numel]
    return values.view(-1)[: residual.numel], deferred


def restore_v(residual: Residual, index: Tensor | None, taken: Tensor) -> None:
    """Adds back to v what was taken out of it."""
    if index is None:
        residual.v += taken
    else:
        residual.v.index_add_(0, index, taken)
