"""The loops of the exchange that adds up at owners, in torch operations: for any device, and what the compiled ones
are held against.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dgc.compression import device, kernels
from dgc.compression import select as selection
from dgc.compression.regions import Arrived, Plan, Taken
from dgc.compression.residual import Bucket, Gradient
from dgc.compression.sizes import LINE
from dgc.compression.wire import NONFINITE, worst


def select(bucket: Bucket, gradients: Mapping[str, Gradient], scale: Tensor | Mapping[str, Tensor] | None, plan: Plan,
           step: int) -> tuple[list[str], Tensor, Tensor]:
    """As :func:`dgc.compression.kernels.plain.select`; in the own region only what this step adds to v counts. What was
    there are sums, which are large, as others' entries are in them, and need no slots.
    """
    kernel = kernels.current(bucket.v.device.type, bucket.v.dtype)
    with plan.regions.aside(bucket.v, plan.own):
        return kernel.select(bucket, gradients, scale, plan.layout, step)


def send(bucket: Bucket, plan: Plan, index: Tensor, used: Tensor, refused: Tensor, masking: bool) -> tuple[
        Tensor, Taken]:
    """Takes the chosen entries outside the own region out of v, and writes them down for their owners.

    Args:
        index, used: as :func:`select` returned them.
        refused: bool (), whether a gradient is not finite: nothing is sent but this fact.
        masking: see :func:`dgc.compression.kernels.plain.encode`.

    Returns:
        The rows, uint8 (N, nbytes), and what was taken.
    """
    n = plan.regions.owners
    valid = plan.layout.uses(used) & ~refused
    index = torch.where(valid, index, 0)  # in the other slots there may be anything
    owner = plan.regions.owner(index)
    row = torch.where(valid & (owner != plan.own), owner, n)
    rows, taken, bucket.overflow_entries = _written(bucket, plan, row, index, plan.layout.owner, masking)
    return torch.where(refused, plan.to_owners.telling(n, NONFINITE), rows), taken


def _written(bucket: Bucket, plan: Plan, row: Tensor, index: Tensor, of: Tensor, masking: bool) -> tuple[
        Tensor, Taken, Tensor]:
    """Entries as rows, those that fit; what was taken out of v for them; and int64 (), how many others there are.

    Args:
        row: int64 (E,), each entry's; or, of those that are not sent, the number of rows.
        index, of: int64 (E,), where they are in the bucket, ascending within each row, and their parameters.
    """
    n = plan.regions.owners
    wanted = torch.count_nonzero(row < n)
    row = _fitting(row, bucket.v[index], plan, of)
    rows, sent = plan.to_owners.encode(row, plan.regions.local(index), bucket.v[index], n)
    bucket.take(index, sent, masking)
    return rows, Taken(index, sent), wanted - torch.count_nonzero(sent)


def _fitting(row: Tensor, values: Tensor, plan: Plan, owner: Tensor) -> Tensor:
    """The rows of entries, without those for which there is no slot: the smallest of a row, beside the mean of those
    of their parameters, ``owner``.
    """
    n, slots = plan.regions.owners, plan.to_owners.slots
    if not device.is_asynchronous(row.device) and int(torch.bincount(row, minlength=n)[:n].max()) <= slots:
        return row
    size = torch.where(row < n, values.abs(), 0)
    total, count = size.new_zeros(2, len(plan.layout.counts), dtype=torch.float64)
    count.index_add_(0, owner, (size > 0).double()).clamp_(min=1)
    mean = total.index_add_(0, owner, size.double()).div_(count).to(size.dtype)
    smallness = 1 / (1 + size / mean[owner].clamp(min=torch.finfo(size.dtype).tiny))  # in (0, 1]: it orders a row
    smallness = smallness.nan_to_num(0)  # infinity among infinities is large
    order = (row + 0.5 * smallness.double()).sort(stable=True)
    first = torch.searchsorted(order.values, torch.arange(n + 1, device=row.device).double())
    place = torch.empty_like(row)
    place[order.indices] = torch.arange(len(row), device=row.device) - first[row[order.indices]]
    return torch.where(place < slots, row, n)


def add(bucket: Bucket, plan: Plan, rows: Tensor) -> Arrived:
    """Adds to v what rows, uint8 (R, nbytes), say of the own region; nothing if one of them tells of an error."""
    status, places, values = plan.to_owners.decode(rows, plan.size)
    index = plan.regions.index(plan.own, places).clamp_(max=bucket.numel - 1)  # of an empty region
    values, before = torch.where(worst(status) == 0, values, 0), bucket.v[index.view(-1)]
    for of_row, there in zip(values, index, strict=True):
        bucket.v.index_add_(0, there, of_row)  # no entry twice, so that on a GPU no order of threads decides
    return Arrived(status, Taken(index.view(-1), -values.view(-1)), before)


def pass_on(bucket: Bucket, gradients: Mapping[str, Gradient], plan: Plan, arrived: Arrived, step: int,
            masking: bool) -> tuple[Tensor, Taken]:
    """Takes the largest sums of the own region out of v, beside the mean |v| there of their parameter, and writes them
    down for all. Nothing is passed on where a worker's row tells of an error, but whose.

    Args:
        gradients: of this step: nothing is passed on of a parameter without one.
        step: the optimizer's step, which rotates a sample.

    Returns:
        The message, uint8 (1, nbytes), and what was taken.
    """
    told = worst(arrived.status)
    index = plan.regions.index(plan.own, _largest(_scores(bucket, gradients, plan), plan.to_all.slots, step))
    row = torch.where((told != 0) | (bucket.v[index] == 0), 1, 0)
    message, sent = plan.to_all.encode(row, plan.regions.local(index), bucket.v[index], 1)
    bucket.take(index, sent, masking)
    bucket.held_entries = _held(arrived.added, Taken(index, sent))
    return torch.where(told == 0, message, plan.to_all.telling(1, told)), Taken(index, sent)


def _held(added: Taken, passed_on: Taken) -> Tensor:
    """int64 (): how many of the entries that came were not passed on. Those passed on are in ascending order."""
    if not len(passed_on.places):
        return torch.count_nonzero(added.sent)
    at = torch.searchsorted(passed_on.places, added.places).clamp_(max=len(passed_on.places) - 1)
    gone = (passed_on.places[at] == added.places) & (passed_on.sent[at] != 0)
    return torch.count_nonzero(torch.where(gone, 0, added.sent))


def _scores(bucket: Bucket, gradients: Mapping[str, Gradient], plan: Plan) -> Tensor:
    """|v| of the own region over the mean |v| there of the parameter, as parameters' gradients differ in scale; 0 of
    one that sits this step out.
    """
    sums = plan.regions.read(bucket.v, plan.own).abs_()
    means = _means(sums, plan).clamp_(min=torch.finfo(sums.dtype).tiny)
    absent = [name not in gradients for name in bucket.names]
    if any(absent):
        means.masked_fill_(torch.tensor(absent, device="cpu").to(means.device, non_blocking=True), torch.inf)
    sums.div_(means.repeat_interleave(plan.lengths, output_size=len(sums)))
    return sums.nan_to_num_(torch.inf, torch.inf)  # infinity over infinity, which is to be passed on, and told


def _means(sums: Tensor, plan: Plan) -> Tensor:
    """(P,): the mean of each parameter's entries in the region. On a CPU they are added up in float64, each place of a
    block for itself, and piece by piece, as the compiled loops do.
    """
    if device.is_asynchronous(sums.device):
        return torch.segment_reduce(sums, "mean", lengths=plan.lengths, initial=0.0, unsafe=True)  # waits for no check
    first, end, parameter = plan.pieces
    pieces, stretches = (torch.arange(len(each), device="cpu") for each in (first, sums))
    lane = pieces.repeat_interleave(end - first) * LINE + stretches % LINE
    lanes, total = (torch.zeros(n, dtype=torch.float64, device="cpu") for n in (len(first) * LINE, len(plan.lengths)))
    lanes = lanes.index_add_(0, lane, sums.double()).view(-1, LINE)
    total = total.index_add_(0, parameter, lanes.cumsum(1)[:, -1])
    return (total / plan.lengths.clamp(min=1)).to(sums.dtype)


def _largest(scores: Tensor, k: int, step: int) -> Tensor:
    """int64, ascending: the positions of the k largest; fewer, on a CPU, where the others are zero."""
    k = min(k, len(scores))
    if device.is_asynchronous(scores.device):
        return scores.topk(k, sorted=False).indices.sort().values
    return selection.sampled(scores, k, step)
