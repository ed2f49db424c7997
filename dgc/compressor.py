"""The path of one bucket, from local gradients to their averaged update.

Each path is a generator that yields the collectives it needs and is sent their results; it does no I/O. So the same
path serves Horovod, torch.distributed and N ranks in one process, and can be tested with none of them.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from dgc import ahead, cost, kernels, select
from dgc.ahead import Answer
from dgc.config import Config
from dgc.residual import Bucket, Gradient, clip_scale
from dgc.wire import Layout, Whole, not_finite, sender_name


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
    root: int = 0  # a rank within the group; the transport translates it
    group: Literal["world", "node", "across"] = "world"  # all | those of this rank's node | its like, one of each node


@dataclass(frozen=True)
class World:
    """The ranks that exchange gradients, numbered node by node.

    A node's ranks average their gradients before these are compressed: then each of them has the same u and v, and one
    contributes what one rank does otherwise. Of ``node_size`` 1, the default, each rank is a node of its own.
    """

    rank: int
    size: int
    node_size: int = 1

    @property
    def nodes(self) -> int:
        """How many contributors there are: the paper's N."""
        return self.size // self.node_size

    @property
    def node(self) -> int:
        """Which of them this rank belongs to."""
        return self.rank // self.node_size

    @property
    def local_rank(self) -> int:
        return self.rank % self.node_size

    @property
    def flat(self) -> World:
        """The same ranks, each on its own."""
        return World(self.rank, self.size)

    def divisor(self, average: bool) -> float:
        """Of the sum over nodes; where ranks are to be added up, a node's average counts as often as it has ranks."""
        return self.nodes if average else 1 / self.node_size

    def members(self, group: str) -> range:
        """The ranks of a group of a :class:`Collective`."""
        if group == "node":
            first = self.node * self.node_size
            return range(first, first + self.node_size)
        return range(self.local_rank, self.size, self.node_size) if group == "across" else range(self.size)

    def partition(self, group: str) -> list[range]:
        """All groups of one kind, ``node`` or ``across``: each rank is in one of them."""
        firsts = range(0, self.size, self.node_size) if group == "node" else range(self.node_size)
        return [World(first, self.size, self.node_size).members(group) for first in firsts]


class Update(Protocol):
    """What a path returns: the averaged update of its parameters, equal on every rank.

    Targets are contiguous tensors in the update's dtype, one for each parameter in order, with their entries as the
    bucket has them (:meth:`dgc.residual.Bucket.in_order`); None stands for one that is not wanted.
    """

    def write(self, targets: Sequence[Tensor | None]) -> None:
        """Overwrites the targets with the update."""

    def add(self, targets: Sequence[Tensor | None], rates: Sequence[float]) -> None:
        """Adds the update, times each parameter's rate, to the targets."""


class Dense:
    """An update that came by allreduce.

    Args:
        flat: of all parameters, in order.
        numels: of each one.
        doubt: whether it is finite, where that is not known yet.
        blame: whose gradients have made it so, where it is not finite all the same.
    """

    def __init__(self, flat: Tensor, numels: Sequence[int], doubt: Doubt | None = None, blame: str = ""):
        self.parts, self.doubt, self.blame = flat.split(list(numels)), doubt, blame

    def write(self, targets: Sequence[Tensor | None]) -> None:
        """See :class:`Update`."""
        wanted = {i: target.view(-1) for i, target in enumerate(targets) if target is not None}
        if wanted:
            torch._foreach_copy_(list(wanted.values()), [self.parts[i] for i in wanted])

    def add(self, targets: Sequence[Tensor | None], rates: Sequence[float]) -> None:
        """See :class:`Update`."""
        of_rate: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for target, part, rate in zip(targets, self.parts, rates, strict=True):
            if target is not None:
                lists = of_rate.setdefault(rate, ([], []))
                lists[0].append(target.view(-1))
                lists[1].append(part)
        for rate, (some, parts) in of_rate.items():
            torch._foreach_add_(some, parts, alpha=rate)


class Doubt:
    """Whether a sum over ranks is finite, where a device runs ahead and nobody waits for it to say so. Alike on all
    ranks; if it is not, and that is refused, the update is zero.

    Args:
        names: of the parameters that it is of.
        numels: of each one.
        own: int64 (), where in the sum this rank's gradient is not finite: the first such entry, or -1.
        total: int64 (), the same of the sum.
        each: how many ranks have the same gradient.
        refused: whether it is an error, or only told.
    """

    def __init__(self, names: Sequence[str], numels: Sequence[int], own: Tensor, total: Tensor, each: int = 1,
                 refused: bool = True):
        self._names, self._numels, self._each, self.refused = names, numels, each, refused
        self.fine = total < 0  # bool (), on the device
        self._answer = Answer(torch.stack([own, total]))

    @property
    def founded(self) -> bool:
        """Whether it is not finite, on any rank. Waits for the device."""
        return int(self._answer.get()[1]) >= 0

    def who(self) -> Generator[Collective, Tensor, str]:
        """Which ranks' gradients, and a parameter of each, where it is founded: all ranks ask. Or nobody's, ""."""
        own = int(self._answer.get()[0])
        return (yield from who_is_not_finite(self._names, [self._name(own)] if own >= 0 else [], self.fine.device,
                                             self._each))

    def error(self, blame: str = "") -> FloatingPointError:
        """What is to be raised, alike on all ranks, where it is founded."""
        return FloatingPointError(blame or _sum_not_finite(self._name(int(self._answer.get()[1]))))

    def _name(self, entry: int) -> str:
        return self._names[bisect(list(accumulate(self._numels)), entry)]  # in the first part that ends beyond it


Path = Generator[Collective, Tensor, Any]  # returns an Update; reduce_sparse a Sparse


class AbandonedError(Exception):
    """Thrown into a path that is given up, which puts back what it has taken.

    A path that is collected as garbage gets a GeneratorExit instead, and leaves everything as it is: that may be as the
    interpreter ends, when torch aborts the process if it is asked for a view.
    """


def sent_bytes(collective: Collective, world: World) -> float:
    """Bytes that one rank puts on the wire: ring all-gather (N-1) M, ring allreduce 2 (N-1)/N M; of a share, which all
    but one receive once, each rank's part, (N-1)/N M.
    """
    n = len(world.members(collective.group))
    return {"gather": n - 1, "sum": 2 * (n - 1) / n, "share": (n - 1) / n}[collective.op] * collective.tensor.nbytes


def average_in_node(gradients: Mapping[str, Tensor], dtype: torch.dtype, world: World) -> Generator[
        Collective, Tensor, dict[str, Tensor]]:
    """What precedes the path of a bucket whose nodes exchange as one: the mean of their ranks' gradients.

    Args:
        gradients: parameter -> this rank's, of one device; they are not changed.
        dtype: in which they are added up.
        world: this rank and its node.

    Returns:
        parameter -> mean, of its gradient's shape, to the bit alike on all ranks of the node.
    """
    flat = torch.cat([g.detach().to(dtype).reshape(-1) for g in gradients.values()])
    total = (yield Collective("sum", flat, group="node")).div_(world.node_size)
    parts = total.split([g.numel() for g in gradients.values()])
    return {name: part.view(g.shape) for (name, g), part in zip(gradients.items(), parts, strict=True)}


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
        world: this rank and how many there are; all of them walk this path. Those of a node have the same gradients,
            from :func:`average_in_node`, and the same u and v.
        average: divide the sum by N.
        scale: 0-dim factor for the gradients, from clipping by their global norm or from a loss scale.

    Returns:
        The :class:`Update` of the bucket's parameters, in the residual's dtype.

    Raises:
        FloatingPointError: a rank's gradient is not finite; raised on all of them. What is not finite entered u and v
            nowhere.
        ValueError: a message is corrupt; raised on all ranks that received it so.
    """
    sparsity = config.sparsity_at(step)  # first of all: a schedule's error leaves u and v as they were
    layout = _layout(bucket, sparsity, config.wire_dtype, world.node_size)
    clip: Tensor | Mapping[str, Tensor] | None = scale
    if config.clip_norm is not None and config.clip_per_tensor:
        once = 1.0 if scale is None else scale.to(bucket.v)
        norms = {name: torch.linalg.vector_norm(gradient.g.detach().to(bucket.v.dtype)) * once
                 for name, gradient in gradients.items()}
        clip = {name: once * clip_scale(norm, config.clip_norm, world.nodes, average, world.node_size)
                for name, norm in norms.items()}
    kernel = _kernel(bucket)
    if sparsity == 0.0:
        bad = _told(bucket, kernel.accumulate(bucket, gradients, clip, layout))
        bucket.count(torch.full_like(bucket.entries_sent, bucket.numel))
        return (yield from _summed(bucket, None, bucket.take_all(() if bad else gradients), world, average, bad))
    exchange, dense = _cheapest(config.exchange, layout, bucket, world)
    leader = step % world.nodes
    if exchange == "shared" and not dense and world.node != leader:
        bad = kernel.accumulate(bucket, gradients, clip, layout) or bucket.not_finite()
        return (yield from _on_support(bucket, layout, None, leader, config.factor_masking, world, average, bad))
    bad, index, used = kernel.select(bucket, gradients, clip, layout, config.selection == "exact", step)
    if exchange == "shared" and not dense:
        message = layout.support.encode(index, used)
        return (yield from _on_support(bucket, layout, message, leader, config.factor_masking, world, average,
                                       bad or bucket.not_finite()))
    if dense:
        bad = _told(bucket, bad)
        valid = layout.uses(used) & (~bucket.marked.any() if bad is None else not bad)
        index = torch.where(valid, index, 0)  # in the other slots there may be anything
        values = torch.where(valid, bucket.v[index], 0)
        bucket.take(index, values, config.factor_masking)
        return (yield from _summed(bucket, index, values, world, average, bad))
    message = layout.confession(bad) if bad else kernel.encode(bucket, layout, index, used, config.factor_masking)
    return (yield from _gathered(bucket, layout, message, world, average))


def settle(bucket: Bucket) -> FloatingPointError | ValueError | None:
    """What the last exchange gave reason to, as :func:`reduce` raises it, where a device runs ahead and that was not
    known yet: the same on all ranks, and told once. What was taken out of v is back there.
    """
    error: FloatingPointError | ValueError | None = _kernel(bucket).settle(bucket)
    return error


def _kernel(bucket: Bucket) -> Any:
    return kernels.at_hand(bucket.v.device.type, bucket.v.dtype)


def _told(bucket: Bucket, bad: Sequence[str]) -> Sequence[str] | None:
    """Which of this rank's gradients are not finite. None: only the device knows, in the bucket's flags."""
    if bucket.flags is not None and bucket.numel and ahead.runs_ahead(bucket.v.device):
        return None
    return bad or bucket.not_finite()


def reduce_dense(gradients: Mapping[str, Tensor], world: World, *, average: bool = True, scale: Tensor | None = None,
                 predivide: float = 1.0, refuse: bool = True) -> Path:
    """The path of parameters that always travel dense: their gradients, summed by one ring allreduce.

    Args:
        gradients: parameter -> gradient, of one dtype and device; they are not changed.
        world: this rank and how many there are.
        average: divide the sum by N.
        scale: 0-dim factor for the gradients, from clipping.
        predivide: divides before the sum and multiplies after it (``gradient_predivide_factor``).
        refuse: a sum that is not finite. Else it is the update, as in stock Horovod, and says whose gradient it is.

    Returns:
        The :class:`Update`, in the order and dtype of ``gradients``.

    Raises:
        FloatingPointError: a rank's gradient is not finite, and that is refused; raised on all of them. Where a device
            runs ahead the update has a :class:`Doubt` instead.
    """
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
    own = _first_not_finite(flat) if ahead.runs_ahead(flat.device) else None
    if scale is not None:
        flat.mul_(scale.to(flat.dtype))
    if predivide != 1.0:
        flat.div_(predivide)
    total = yield Collective("sum", flat)
    numels = [gradient.numel() for gradient in gradients.values()]

    def bad() -> list[str]:
        return [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]

    doubt, blame = None, ""
    if refuse:
        total, doubt = yield from _finite(total, own, list(gradients), numels, bad)
    elif own is None:
        blame = yield from _blame(total, list(gradients), numels, bad)
    else:
        doubt = Doubt(list(gradients), numels, own, _first_not_finite(total), refused=False)
    return Dense(total.mul_(predivide / world.size) if average else total, numels, doubt, blame)


def reduce_rounded(bucket: Bucket, gradients: Mapping[str, Tensor], dtype: torch.dtype, world: World, *,
                   average: bool = True) -> Path:
    """The path of parameters that always travel dense, rounded to ``dtype``; v of the bucket keeps what that drops.

    Args:
        bucket: has v and no u.
        gradients: parameter -> gradient, already clipped. A parameter without one sits this step out.
        dtype: float16 or bfloat16.
        world: this rank and how many there are.
        average: divide the sum by N.

    Returns:
        The :class:`Update`, in the residual's dtype.

    Raises:
        FloatingPointError, ValueError: as :func:`reduce`.
    """
    bad = bucket.accumulate({name: Gradient(gradient) for name, gradient in gradients.items()})
    layout, taken = _kept(bucket, dtype, lambda: Whole(bucket, dtype)), bucket.take_all(() if bad else gradients)
    if 2 * bucket.v.element_size() < dtype.itemsize * world.size:  # bytes an entry, as in dgc.cost.sends_dense
        return (yield from _summed(bucket, None, taken, world, average, bad))
    message, sent = layout.encode(taken, bad)
    bucket.v += taken - sent
    try:
        messages = yield Collective("gather", message)
        total = torch.zeros_like(bucket.v)
        for sender, received in enumerate(messages):
            total += layout.decode(received, sender)
    except (Exception, KeyboardInterrupt):
        bucket.v += sent
        raise
    return Dense(total.div_(world.divisor(average)), bucket.numels)


class Sparse:
    """An update that is a sparse tensor, coalesced; and whose gradients are not finite in it, or nobody's."""

    def __init__(self, tensor: Tensor, blame: str = ""):
        self.tensor, self.blame = tensor, blame


def reduce_sparse(name: str, gradient: Tensor, world: World, *, average: bool = True, scale: Tensor | None = None,
                  refuse: bool = True) -> Path:
    """The path of a sparse COO gradient (``torch.nn.Embedding(sparse=True)``): all ranks' entries, all-gathered.

    The ranks have different numbers of entries, so a first all-gather says how many, and the second is padded.

    Returns:
        The :class:`Sparse` update.

    Raises:
        FloatingPointError: as :func:`reduce_dense`.
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
    wrong = [rank for rank, finite in enumerate(torch.isfinite(rows).flatten(1).all(1).tolist()) if not finite]
    blame = "; ".join(str(not_finite(f"rank {rank}", [name])) for rank in wrong)
    if blame and refuse:
        raise FloatingPointError(blame)
    total = torch.sparse_coo_tensor(
        torch.cat([indices[rank, :, :n] for rank, n in enumerate(counts)], dim=1),
        torch.cat([rows[rank, :n] for rank, n in enumerate(counts)]), gradient.shape, check_invariants=False).coalesce()
    return Sparse(total / world.size if average else total, blame)


def flush(bucket: Bucket, names: Sequence[str], world: World, *, average: bool = True) -> Path:
    """Sends all of v of these parameters, and nothing else: no gradient is accumulated and u is left alone."""
    bucket.total_entries += sum(n for name, n in zip(bucket.names, bucket.numels, strict=True) if name in names)
    return (yield from _summed(bucket, None, bucket.take_all(names), world, average))  # entries_sent: the last step's


def _layout(bucket: Bucket, sparsity: float, dtype: torch.dtype, node_size: int) -> Layout:
    return _kept(bucket, (sparsity, dtype, node_size), lambda: Layout(
        bucket, [select.count(sparsity, numel) for numel in bucket.numels], dtype, node_size))


def _kept(bucket: Bucket, key: Any, make: Callable[[], Any]) -> Any:
    """The bucket's layout, made anew where something has changed: it holds what depends on the shapes alone."""
    if bucket.layout is None or bucket.layout[0] != key:
        bucket.layout = key, make()
    return bucket.layout[1]


def _cheapest(exchange: str, layout: Layout, bucket: Bucket, world: World) -> tuple[str, bool]:
    """Which exchange it is, "auto" being that of fewer bytes; and whether the same entries are fewer bytes as one dense
    sum. Both depend on sizes alone, and so are alike on every rank.
    """
    itemsize = bucket.v.element_size()
    return _cheapest_of(exchange, cost.Sizes(itemsize * bucket.numel, layout.nbytes, layout.support.nbytes,
                                             itemsize * (layout.slots + 1)), world.nodes)


@lru_cache(1024)
def _cheapest_of(exchange: str, sizes: cost.Sizes, nodes: int) -> tuple[str, bool]:
    if exchange == "auto":
        exchange = min(("allgather", "shared"), key=lambda name: cost.port_bytes(cost.exchange(name, sizes, nodes, 1)))
    return exchange, cost.sends_dense(exchange, sizes, nodes, 1)


def _among_nodes(op: Literal["gather", "sum", "share"], tensor: Tensor, world: World,
                 root: int = 0) -> Generator[Collective, Tensor, Tensor]:
    """A collective with one contributor from each node, of what all ranks of a node have alike. Each of them carries a
    stripe of it, so that no byte passes between two nodes twice.
    """
    if world.node_size == 1:
        return (yield Collective(op, tensor, root))
    numel, stripe = tensor.numel(), -(-tensor.numel() // world.node_size)
    padded = torch.nn.functional.pad(tensor, (0, stripe * world.node_size - numel))
    own = padded[world.local_rank * stripe:(world.local_rank + 1) * stripe].clone()
    part = yield Collective(op, own, root, "across")
    parts = yield Collective("gather", part, group="node")
    if op == "gather":
        return parts.transpose(0, 1).reshape(world.nodes, -1)[:, :numel].contiguous()
    return parts.view(-1)[:numel]


def _on_support(bucket: Bucket, layout: Layout, message: Tensor | None, leader: int, masking: bool, world: World,
                average: bool, bad: Sequence[str]) -> Path:
    """This step's leader names the positions, and all ranks' values there are summed, in the residual's dtype: bytes
    that do not grow with their number (Chen et al., "ScaleCom", 2020). A last value says whose gradient is not finite.

    Args:
        message: the leader's; the others have none.
    """
    if message is None:
        message = torch.zeros(layout.support.nbytes, dtype=torch.uint8, device=layout.device)
    index, used = layout.support.decode((yield from _among_nodes("share", message, world, leader)), leader)
    values = torch.where(used & (not bad), bucket.v[index], 0)
    bucket.take(index, values, masking)
    flagged = torch.cat([values, values.new_full((1,), torch.nan if bad else 0.0)])
    try:
        total = yield from _among_nodes("sum", flagged, world)
        yield from _refuse_not_finite(total, [*bucket.names, ""], [*layout.counts, 1], lambda: bad)
    except (Exception, KeyboardInterrupt):
        _put_back(bucket, index, values)
        raise
    summed = total[:-1].div_(world.divisor(average))
    return Dense(torch.zeros_like(bucket.v).index_add_(0, index, summed), bucket.numels)


def _summed(bucket: Bucket, index: Tensor | None, taken: Tensor, world: World, average: bool,
            bad: Sequence[str] | None = ()) -> Path:
    """The sum over ranks of what was taken, as one dense tensor. A rank with a bad gradient takes part to say so."""
    flat = taken.clone() if index is None else torch.zeros_like(bucket.v).index_add_(0, index, taken)
    own = None
    if bad is None:
        marks = torch.where(bucket.marked, torch.nan, 0.0).to(flat)
        own = _first_not_finite(flat.index_add_(0, bucket.beginnings, marks))
    for name in bad or ():
        flat[bucket.offsets[bucket.names.index(name)]] = torch.nan
    try:
        total = yield from _among_nodes("sum", flat, world)
        total, doubt = yield from _finite(total, own, bucket.names, bucket.numels, lambda: bad or (), world.node_size)
    except (Exception, KeyboardInterrupt):  # abandoned or refused: nothing may be lost
        _put_back(bucket, index, taken)
        raise
    if doubt is not None:
        _put_back(bucket, index, torch.where(doubt.fine, 0, taken))
    divisor = world.divisor(average)
    return Dense(total if divisor == 1 else total.div_(divisor), bucket.numels, doubt)


def _put_back(bucket: Bucket, index: Tensor | None, taken: Tensor) -> None:
    if index is None:
        bucket.v += taken
    else:
        bucket.v.index_add_(0, index, taken)


def _gathered(bucket: Bucket, layout: Layout, message: Tensor, world: World, average: bool) -> Path:
    """What all ranks' messages say, and their sum."""
    try:
        messages = yield from _among_nodes("gather", message, world)
        update = _kernel(bucket).Received(layout, messages, world.divisor(average))
        update.own(bucket, message)  # on a device that runs ahead they may still prove to be bad
        return update
    except (Exception, KeyboardInterrupt):
        bucket.v.index_add_(0, *layout.read(message))
        raise


def _first_not_finite(flat: Tensor) -> Tensor:
    """int64 (): where the first entry is that is not finite, or -1. The device is not asked."""
    if not flat.numel():
        return torch.full((), -1, device=flat.device)
    found, at = flat.isfinite().logical_not_().view(torch.uint8).max(0)
    return torch.where(found > 0, at, -1)


def _finite(total: Tensor, own: Tensor | None, names: Sequence[str], numels: Sequence[int],
            bad: Callable[[], Sequence[str]], each: int = 1) -> Generator[
                Collective, Tensor, tuple[Tensor, Doubt | None]]:
    """A sum, which is refused where it is not finite; or, where the device is not asked, zero then, with the doubt.

    Args:
        own: as for :class:`Doubt`, where the device is not asked.
        total, names, numels, bad: as for :func:`_blame`, where it is.
        each: how many ranks have the same gradient.
    """
    if own is None:
        yield from _refuse_not_finite(total, names, numels, bad)
        return total, None
    doubt = Doubt(names, numels, own, _first_not_finite(total), each)
    return torch.where(doubt.fine, total, 0), doubt


def _refuse_not_finite(total: Tensor, names: Sequence[str], numels: Sequence[int],
                       bad: Callable[[], Sequence[str]]) -> Generator[Collective, Tensor, None]:
    """Refuses a sum, alike on all ranks, which a gradient of one of them has made infinite or not a number. The
    arguments are those of :func:`_blame`.
    """
    if blame := (yield from _blame(total, names, numels, bad)):
        raise FloatingPointError(blame)


def _blame(total: Tensor, names: Sequence[str], numels: Sequence[int],
           bad: Callable[[], Sequence[str]]) -> Generator[Collective, Tensor, str]:
    """Whose gradient has made a sum infinite or not a number; "" if it is finite.

    Args:
        total: the sum, flat.
        names: of its parts, and
        numels: how many entries each of them has.
        bad: which of this rank's gradients are not finite; asked only when the sum is not.
    """
    if math.isfinite(total.sum()) or torch.isfinite(total).all():  # or only its sum is not; which takes a tenth as long
        return ""
    blame = yield from who_is_not_finite(names, bad(), total.device)
    if not blame:  # each addend was finite
        parts = zip(names, total.split(list(numels)), strict=True)
        wrong = ", ".join(name for name, part in parts if not torch.isfinite(part).all())
        blame = _sum_not_finite(wrong)
    return blame


def _sum_not_finite(names: str) -> str:
    return f"the sum over ranks of their gradients is not finite, in: {names}"


def who_is_not_finite(names: Sequence[str], bad: Iterable[str], device: torch.device, each: int = 1) -> Generator[
        Collective, Tensor, str]:
    """Which ranks, and in what, when each knows its own; ``each`` says how many of them have the same."""
    own = set(bad)
    everyones = yield Collective("gather", torch.tensor([name in own for name in names], device=device))
    return "; ".join(str(not_finite(sender_name(sender, each), [
        name for name, mark in zip(names, marks, strict=True) if mark]))
        for sender, marks in enumerate(everyones[::each].tolist()) if any(marks))
