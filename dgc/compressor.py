"""The path of one bucket, from local gradients to their averaged update.

Each path is a generator that yields the collectives it needs and is sent their results; it does no I/O. So the same
path serves Horovod, torch.distributed and N ranks in one process, and can be tested with none of them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dgc import select
from dgc.config import Config
from dgc.residual import Bucket, Gradient, clip_scale
from dgc.wire import Layout


@dataclass(frozen=True)
class Collective:
    """A request to the transport.

    Its result is, by ``op``:

    - ``gather``: every rank's tensor, stacked: (N, *shape), in the order of ranks.
    - ``sum``: their sum, by ring allreduce. The tensor may be overwritten.
    - ``share``: the root's tensor. The tensor may be overwritten.
    """

    op: Literal["gather", "sum", "share"]
    tensor: Tensor
    root: int = 0  # a rank within the world; the transport translates it


@dataclass(frozen=True)
class World:
    """The ranks that exchange gradients: this one's, and how many there are (the paper's N)."""

    rank: int
    size: int


Path = Generator[Collective, Tensor, Tensor]  # returns the flat update


def sent_bytes(collective: Collective, world: World) -> float:
    """Bytes that one rank puts on the wire: ring all-gather (N-1) M, ring allreduce 2 (N-1)/N M, tree share M."""
    nbytes = collective.tensor.numel() * collective.tensor.element_size()
    factor = {"gather": world.size - 1, "sum": 2 * (world.size - 1) / world.size, "share": 1}
    return factor[collective.op] * nbytes


def reduce(bucket: Bucket, gradients: Mapping[str, Gradient], config: Config, step: int, world: World, *,
           average: bool = True, scale: Tensor | None = None) -> Path:
    """One step of Deep Gradient Compression for the parameters of a bucket (paper, Algorithms 1 and 4).

    At density 1 everything is sent, u is not masked, and the update is exactly that of momentum SGD, because
    momentum is linear.

    Args:
        bucket: holds u and v, which this changes.
        gradients: parameter -> local gradient. A parameter without one sits this step out: its slots stay empty.
        config: the settings.
        step: the optimizer's step, from 0; alike on every rank.
        world: this rank and how many there are; all of them walk this path.
        average: divide the sum by N.
        scale: 0-dim factor for the gradients, from clipping by their global norm.

    Returns:
        The update: flat, in the bucket's order and dtype, equal on every rank.

    Raises:
        FloatingPointError: a rank's gradient is not finite; raised on all of them. It entered u and v nowhere.
    """
    sparsity = config.sparsity_at(step)  # first of all: a schedule's error leaves u and v as they were
    clip: Tensor | Mapping[str, Tensor] | None = scale
    if config.clip_norm is not None and config.clip_per_tensor:
        clip = {name: clip_scale(torch.linalg.vector_norm(gradient.g.detach().to(bucket.v.dtype)), config.clip_norm,
                                 world.size, average) for name, gradient in gradients.items()}
    bad = bucket.accumulate(gradients, clip)
    layout = _layout(bucket, sparsity, config.wire_dtype)
    if bad:
        total = yield from _confessed(bucket, layout, bad, world, sparsity)
    elif sparsity == 0.0:
        total = yield from _summed(bucket, None, bucket.take_all(gradients))
    else:
        index, values = _selected(bucket, layout, gradients, config, step)
        if _dense_is_cheaper(layout, bucket, world):
            bucket.take(index, values, config.factor_masking)
            total = yield from _summed(bucket, index, values)
        else:
            message, sent = layout.encode(index, values)
            bucket.take(index, sent, config.factor_masking)
            total = yield from _gathered(bucket, layout, index, sent, message)
    return total.div_(world.size) if average else total


def reduce_dense(gradients: Mapping[str, Tensor], world: World, *, average: bool = True, scale: Tensor | None = None,
                 predivide: float = 1.0) -> Path:
    """The path of parameters that always travel dense: their gradients, summed by one ring allreduce.

    Args:
        gradients: parameter -> gradient, of one dtype and device; they are not changed.
        world: this rank and how many there are.
        average: divide the sum by N.
        scale: 0-dim factor for the gradients, from clipping.
        predivide: divides before the sum and multiplies after it (``gradient_predivide_factor``).

    Returns:
        The update: flat, in the order of ``gradients``.

    Raises:
        FloatingPointError: a rank's gradient is not finite; raised on all of them.
    """
    flat = torch.cat([gradient.detach().reshape(-1) for gradient in gradients.values()])
    if scale is not None:
        flat.mul_(scale.to(flat.dtype))
    if predivide != 1.0:
        flat.div_(predivide)
    total = yield Collective("sum", flat)
    _check_finite(dict(zip(gradients, total.split([g.numel() for g in gradients.values()]), strict=True)))
    return total.mul_(predivide / world.size) if average else total


def reduce_sparse(name: str, gradient: Tensor, world: World, *, average: bool = True,
                  scale: Tensor | None = None) -> Path:
    """The path of a sparse COO gradient (``torch.nn.Embedding(sparse=True)``): all ranks' entries, all-gathered.

    The ranks have different numbers of entries, so a first all-gather says how many, and the second is padded.

    Returns:
        The update: a coalesced sparse tensor.
    """
    gradient = gradient.coalesce()
    index, values = gradient.indices(), gradient.values()
    if scale is not None:
        values = values * scale.to(values.dtype)
    counts = (yield Collective("gather", torch.tensor([index.shape[1]], device=values.device))).flatten().tolist()
    longest = max(counts)
    index = torch.nn.functional.pad(index, (0, longest - index.shape[1]))
    values = torch.cat([values, values.new_zeros(longest - values.shape[0], *values.shape[1:])])
    indices = yield Collective("gather", index)
    rows = yield Collective("gather", values)
    _check_finite({name: rows})
    total = torch.sparse_coo_tensor(
        torch.cat([indices[rank, :, :n] for rank, n in enumerate(counts)], dim=1),
        torch.cat([rows[rank, :n] for rank, n in enumerate(counts)]), gradient.shape, check_invariants=False).coalesce()
    return total / world.size if average else total


def flush(bucket: Bucket, world: World, *, average: bool = True) -> Path:
    """Sends all of v, and nothing else: no gradient is accumulated and u is left alone."""
    total = yield from _summed(bucket, None, bucket.take_all(bucket.names))
    return total.div_(world.size) if average else total


def _layout(bucket: Bucket, sparsity: float, dtype: torch.dtype) -> Layout:
    return Layout(bucket, [select.count(sparsity, numel) for numel in bucket.numels], dtype)


def _selected(bucket: Bucket, layout: Layout, gradients: Mapping[str, Gradient], config: Config,
              step: int) -> tuple[Tensor, Tensor]:
    """Fills the slots: positions in the bucket, and v there; slots that stay empty hold their base and 0."""
    index, used = layout.base.clone(), torch.zeros_like(layout.base, dtype=torch.bool)
    parts = bucket.v.split(bucket.numels)
    for name, v, k, start, offset in zip(bucket.names, parts, layout.counts, layout.starts, bucket.offsets,
                                         strict=True):
        if name in gradients:
            chosen = select.exact(v, k) if config.selection == "exact" else select.sampled(v, k, step)
            end = start + chosen.numel()
            index[start:end], used[start:end] = chosen + offset, True
    return index, torch.where(used, bucket.v[index], 0)


def _dense_is_cheaper(layout: Layout, bucket: Bucket, world: World) -> bool:
    """Ring allreduce of the residual, 2 (N-1)/N n, against ring all-gather of the messages, (N-1) M."""
    return 2 * bucket.numel * bucket.v.element_size() < layout.nbytes * world.size


def _summed(bucket: Bucket, index: Tensor | None, taken: Tensor, flat: Tensor | None = None) -> Path:
    """The sum over ranks of what was taken, as one dense tensor; or of ``flat``, put in its place."""
    if flat is None:
        flat = taken.clone() if index is None else torch.zeros_like(bucket.v).index_add_(0, index, taken)
    try:
        total = yield Collective("sum", flat)
        _check_finite(bucket.views(total))
    except BaseException:  # abandoned, also by being closed, or refused: nothing may be lost
        bucket.restore(index, taken)
        raise
    return total


def _gathered(bucket: Bucket, layout: Layout, index: Tensor, sent: Tensor, message: Tensor) -> Path:
    """The sum over ranks of what their messages say, added up in the order of ranks: alike to the bit everywhere."""
    try:
        messages = yield Collective("gather", message)
        total = torch.zeros_like(bucket.v)
        for sender, received in enumerate(messages):
            total.index_add_(0, *layout.decode(received, sender, bucket.name))
    except BaseException:
        bucket.restore(index, sent)
        raise
    return total


def _confessed(bucket: Bucket, layout: Layout, bad: Sequence[str], world: World, sparsity: float) -> Path:
    """Takes part in the exchange that the other ranks are in, to say that a gradient here is not finite."""
    first = [i for i, name in enumerate(bucket.names) if name in bad]
    values = torch.zeros(layout.slots, dtype=bucket.v.dtype, device=bucket.v.device)
    values[[layout.starts[i] for i in first]] = torch.nan
    if sparsity == 0.0 or _dense_is_cheaper(layout, bucket, world):
        flat = torch.zeros_like(bucket.v)
        flat[[bucket.offsets[i] for i in first]] = torch.nan
        return (yield from _summed(bucket, layout.base[:0], flat.new_empty(0), flat))
    message, _ = layout.encode(layout.base, values)
    return (yield from _gathered(bucket, layout, layout.base[:0], values[:0], message))


def _check_finite(parts: Mapping[str, Tensor]) -> None:
    """Refuses sums, alike on all ranks, which a gradient of one of them has made infinite or not a number."""
    wrong = [name for name, part in parts.items() if not torch.isfinite(part).all()]
    if wrong:
        raise FloatingPointError(f"a rank has a gradient that is not finite, in: {', '.join(wrong)}")
