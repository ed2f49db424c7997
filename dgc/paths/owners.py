"""The exchange that adds up at owners: each entry's sum at one contributor, and the largest sums to all.

A sparse allreduce in two phases, after Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning"
(PPoPP 2022), with residuals on both sides as in Tang et al., "DoubleSqueeze" (ICML 2019). The bytes that a worker sends
do not grow with their number.

1. Each worker takes its k largest entries out of v and sends each to its owner (:mod:`dgc.compression.regions`).
2. An owner adds what it is sent to its own v. Of its region it takes the largest sums, r k / N of them, and sends these
   to all.

What an owner does not pass on stays in its v, and is added to what comes later, from anybody. Nothing comes back to
those who sent it. So what is large on every worker and cancels in the sum is gone, and keeps no slot.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dgc import cost
from dgc.collective import Path
from dgc.compression import device, select
from dgc.compression.regions import CORRUPT, Regions, Rows
from dgc.compression.residual import Bucket
from dgc.compression.wire import NONFINITE, corrupt, sender_name
from dgc.paths.averaged import DenseUpdate
from dgc.paths.finite import PendingVerdict, local_verdict, who_is_not_finite
from dgc.paths.nodes import among_nodes
from dgc.paths.task import Task
from dgc.trace import stage


class Plan(NamedTuple):
    """Who adds up what, and the formats of both phases' messages."""

    regions: Regions
    lengths: Tensor  # int64 (P,): entries of each parameter in the own region
    to_owners: Rows
    to_all: Rows


class Taken(NamedTuple):
    """Entries that have been taken out of v."""

    places: Tensor  # int64 (E,), in the bucket
    sent: Tensor  # (E,), what receivers read; 0 where nothing was sent


_plans: WeakKeyDictionary[Bucket, tuple[tuple[int, torch.dtype, int], Plan]] = WeakKeyDictionary()


def plan_of(task: Task) -> Plan:
    """The plan for a bucket's messages, made anew only where the sparsity or the number of contributors changes."""
    bucket, layout, n = task.bucket, task.layout, task.world.nodes
    key, (made_for, plan) = (layout.slots, layout.dtype, n), _plans.get(bucket, (None, None))
    if plan is None or made_for != key:
        regions = Regions(bucket.numel, n, layout.device)
        slots = cost.row_slots(layout.slots, n), cost.kept_slots(bucket.numel, layout.slots, n)
        plan = Plan(regions, _lengths(bucket, regions, task.world.node), *(
            Rows(count, regions.size, layout.dtype, layout.residual, layout.device) for count in slots))
        _plans[bucket] = key, plan
    return plan


def add_at_owners(task: Task) -> Path[DenseUpdate]:
    """Both phases; on failure what was taken out of v is back there, and what was added to it is gone."""
    plan, bucket, world = plan_of(task), task.bucket, task.world
    bad, rows, first = _to_owners(task, plan)
    added = second = Taken(first.places[:0], first.sent[:0])
    try:
        rows = yield from among_nodes("alltoall", rows, world)
        with stage("dgc::read"):
            arrived = plan.to_owners.decode(rows, plan.regions.sizes[world.node].view(1))
        wrong = arrived.status >= CORRUPT
        index, values = plan.regions.index(world.node, arrived.local).view(-1), arrived.values.view(-1)
        bucket.v.index_add_(0, index, torch.where(wrong.any(), 0, values))
        added = Taken(index, torch.where(wrong.any(), 0, -values))
        message, second = _to_all(task, plan, arrived.status)
        bucket.entries_sent = torch.count_nonzero(first.sent) + torch.count_nonzero(second.sent)
        messages = yield from among_nodes("gather", message.view(-1), world)
        with stage("dgc::read"):
            everyones = plan.to_all.decode(messages, plan.regions.sizes)
        verdict = yield from _verdict(task, bad, everyones.status, everyones.whose)
    except (Exception, KeyboardInterrupt):
        _put_back(bucket, (first, added, second), torch.ones((), dtype=torch.bool, device=bucket.v.device))
        raise
    values = everyones.values
    if verdict is not None:
        _put_back(bucket, (first, added, second), ~verdict.fine)
        values = torch.where(verdict.fine, values, 0)
    owners = torch.arange(world.nodes, device=values.device)[:, None]
    flat = torch.zeros_like(bucket.v).index_add_(0, plan.regions.index(owners, everyones.local).view(-1), (
        values / world.divisor(task.average)).view(-1))
    return DenseUpdate(flat, bucket.numels, verdict)


def _to_owners(task: Task, plan: Plan) -> tuple[tuple[str, ...], Tensor, Taken]:
    """Accumulates, and takes the largest entries outside the own region. Returns the names of gradients that are not
    finite, the rows, uint8 (N, nbytes), and what was taken.
    """
    bucket, regions, own = task.bucket, plan.regions, task.world.node
    pending = regions.read(bucket.v, own)  # sums that are large, as others' entries are in them: they need no slots
    regions.write(bucket.v, own, torch.zeros_like(pending))
    try:
        bad, index, used = task.select()
    finally:
        regions.write(bucket.v, own, regions.read(bucket.v, own).add_(pending))
    verdict = local_verdict(bucket, bad)
    marked = bucket.marked.any() if verdict.on_device else torch.tensor(bool(verdict.names), device=bucket.v.device)
    valid = task.layout.uses(used) & ~marked
    index = torch.where(valid, index, 0)  # in the other slots there may be anything
    row = torch.where(valid & (regions.owner(index) != own), regions.owner(index), regions.owners)
    row = _fitting(row, bucket.v[index], task, plan)
    with stage("dgc::take"):
        values = _worth(task, index, row < regions.owners)
        rows, sent = plan.to_owners.encode(row, regions.local(index), values, regions.owners)
        bucket.take(index, sent, task.config.factor_masking is True)
    if verdict.on_device or verdict.names:
        rows = torch.where(marked, plan.to_owners.telling(regions.owners, NONFINITE), rows)
    return verdict.names, rows, Taken(index, sent)


def _to_all(task: Task, plan: Plan, status: Tensor) -> tuple[Tensor, Taken]:
    """The largest sums of the own region, of which none is passed on where a worker's row tells of an error: the
    message, uint8 (1, nbytes), and what was taken.
    """
    bucket, regions, own = task.bucket, plan.regions, task.world.node
    wrong = (status >= CORRUPT).any()
    with stage("dgc::select"):
        local = _largest(_scores(task, plan), plan.to_all.slots, task.step)
    index = regions.index(own, local)
    row = torch.where(wrong | (bucket.v[index] == 0), 1, 0)
    with stage("dgc::take"):
        message, sent = plan.to_all.encode(row, local, _worth(task, index, row == 0), 1)
        bucket.take(index, sent, task.config.factor_masking is True)
    told = plan.to_all.telling(1, status.max(), status.argmax())
    return torch.where(wrong, told, message), Taken(index, sent)


def _worth(task: Task, index: Tensor, valid: Tensor) -> Tensor:
    """The values of v at these positions, (E,), with momentum that is paid in advance where they are valid."""
    if task.config.factor_masking == "prepay":
        task.bucket.prepay(index, valid, task.gradients)
    return task.bucket.v[index]


def _fitting(row: Tensor, values: Tensor, task: Task, plan: Plan) -> Tensor:
    """The rows of entries, without those for which there is no slot: the smallest of a row, beside the mean of those
    chosen of their parameters.
    """
    n, slots, owner = plan.regions.owners, plan.to_owners.slots, task.layout.owner
    if not device.is_asynchronous(row.device) and int(torch.bincount(row, minlength=n)[:n].max()) <= slots:
        return row
    size = torch.where(row < n, values.abs(), 0)
    total, count = size.new_zeros(2, len(task.layout.counts))
    mean = total.index_add_(0, owner, size) / count.index_add_(0, owner, (size > 0).to(size)).clamp(min=1)
    smallness = 1 / (1 + size / mean[owner].clamp(min=torch.finfo(size.dtype).tiny))  # in (0, 1]: it orders a row
    order = (row + 0.5 * smallness.double()).sort()
    first = torch.searchsorted(order.values, torch.arange(n + 1, device=row.device).double())
    place = torch.empty_like(row)
    place[order.indices] = torch.arange(len(row), device=row.device) - first[row[order.indices]]
    return torch.where(place < slots, row, n)


def _scores(task: Task, plan: Plan) -> Tensor:
    """|v| of the own region over the mean |v| there of the parameter, as parameters' gradients differ in scale; 0 of
    one that sits this step out.
    """
    sums = plan.regions.read(task.bucket.v, task.world.node).abs_()
    means = torch.segment_reduce(sums, "mean", lengths=plan.lengths, initial=0.0).clamp_(
        min=torch.finfo(sums.dtype).tiny)
    absent = [name not in task.gradients for name in task.bucket.names]
    if any(absent):
        means.masked_fill_(torch.tensor(absent).to(means.device, non_blocking=True), torch.inf)
    return sums.div_(means.repeat_interleave(plan.lengths, output_size=len(sums)))


def _lengths(bucket: Bucket, regions: Regions, own: int) -> Tensor:
    places = regions.index(own, torch.arange(int(regions.sizes[own]), device=bucket.v.device))
    ends = torch.searchsorted(places, bucket.ends)
    return ends.diff(prepend=ends.new_zeros(1))


def _largest(scores: Tensor, k: int, step: int) -> Tensor:
    """int64, ascending: the positions of the k largest; fewer, on a CPU, where the others are zero."""
    k = min(k, len(scores))
    if device.is_asynchronous(scores.device):
        return scores.topk(k, sorted=False).indices.sort().values
    return select.sampled(scores, k, step)


def _verdict(task: Task, bad: tuple[str, ...], status: Tensor, whose: Tensor) -> Path[PendingVerdict | None]:
    """Raises what an owner's message tells of, alike on all ranks; where a device is asynchronous, later."""
    bucket, each = task.bucket, task.world.node_size
    if device.is_asynchronous(bucket.v.device):
        own = torch.where(bucket.marked.any(), bucket.beginnings[bucket.marked.to(torch.uint8).argmax()], -1)
        return PendingVerdict(bucket.names, bucket.numels, own, torch.where((status >= CORRUPT).any(), 0, -1), each)
    told = status.tolist()
    if NONFINITE in told:
        blame = yield from who_is_not_finite(bucket.names, bad, bucket.v.device, each)
        raise FloatingPointError(blame or f"the sum over ranks of their gradients is not finite, in {bucket.name}")
    if CORRUPT in told:
        raise corrupt(sender_name(int(whose[told.index(CORRUPT)]), each), bucket.name)
    return None


def _put_back(bucket: Bucket, every: tuple[Taken, ...], where: Tensor) -> None:
    """Returns to v what was taken, if ``where``, bool ()."""
    for index, sent in every:
        bucket.v.index_add_(0, index, torch.where(where, sent, 0))
