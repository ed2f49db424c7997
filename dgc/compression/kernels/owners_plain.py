"""The loops of the exchange that adds up at owners, in torch operations: for any device, and what the compiled ones
are held against.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dgc.compression import device, kernels
from dgc.compression import select as selection
from dgc.compression.regions import Arrived, ReducePlan, Taken
from dgc.compression.residual import Gradient, Residual
from dgc.compression.sizes import LINE
from dgc.compression.wire import NONFINITE, worst


def accumulate_and_select(residual: Residual, gradients: Mapping[str, Gradient],
                          scale: Tensor | Mapping[str, Tensor] | None,
                          plan: ReducePlan, step: int) -> tuple[list[str], Tensor, Tensor]:
    """As :func:`dgc.compression.kernels.plain.accumulate_and_select`; in the own region only what this step
    adds to v counts. What was there are sums, which are large, as others' entries are in them, and need no slots.
    """
    with plan.regions.zeroed_region(residual.v, plan.own):
        return _kernel(residual).accumulate_and_select(residual, gradients, scale, plan.layout, step)


def _kernel(residual: Residual) -> kernels.Kernel:
    """The loops over a bucket to call now."""
    return kernels.current(residual.v.device.type, residual.v.dtype)


def send(residual: Residual, plan: ReducePlan, index: Tensor, used: Tensor, refused: Tensor, masking: bool) -> tuple[
        Tensor, Taken]:
    """Takes the chosen entries outside the own region out of v, and writes them down for their owners.

    Args:
        index, used: as :func:`accumulate_and_select` returned them.
        refused: bool (), whether a gradient is not finite: nothing is sent but this fact.
        masking: see :func:`dgc.compression.kernels.plain.encode`.

    Returns:
        The rows, uint8 (N, nbytes), and what was taken.
    """
    n = plan.regions.owners
    valid = plan.layout.uses(used) & ~refused
    index = torch.where(valid, index, 0)  # in the other slots there may be anything
    owner = plan.regions.owner_of(index)
    row = torch.where(valid & (owner != plan.own), owner, n)
    wanted = torch.count_nonzero(row < n)
    row = _fitting(row, residual.v[index], plan)
    rows, sent = _kernel(residual).write(plan.to_owners, row, plan.regions.index_in_region(index), residual.v[index], n)
    residual.take(index, sent, masking)
    residual.overflow_entries = wanted - torch.count_nonzero(sent)
    return torch.where(refused, plan.to_owners.status_message(n, NONFINITE), rows), Taken(index, sent)


def _fitting(row: Tensor, values: Tensor, plan: ReducePlan) -> Tensor:
    """The rows of entries; N, which is none, of the smallest of a row that has too few slots."""
    n, slots = plan.regions.owners, plan.to_owners.slots
    if not device.is_asynchronous(row.device) and int(torch.bincount(row, minlength=n)[:n].max()) <= slots:
        return row
    by_size = values.abs().sort(stable=True, descending=True).indices
    rows, order = row[by_size].sort(stable=True)
    first = torch.searchsorted(rows, torch.arange(n + 1, device=row.device))
    place = torch.empty_like(row)
    place[by_size[order]] = torch.arange(len(row), device=row.device) - first[rows]
    return torch.where(place < slots, row, n)


def add(residual: Residual, plan: ReducePlan, rows: Tensor) -> Arrived:
    """Adds to v what rows, uint8 (R, nbytes), say of the own region; nothing if one of them tells of an error."""
    status, places, values = _kernel(residual).read(plan.to_owners, rows, plan.size)
    index = plan.regions.index(plan.own, places).clamp_(max=residual.numel - 1)  # of an empty region
    values, before = torch.where(worst(status) == 0, values, 0), residual.v[index.view(-1)]
    for of_row, there in zip(values, index, strict=True):
        residual.v.index_add_(0, there, of_row)  # no entry twice, so that on a GPU no order of threads decides
    return Arrived(status, Taken(index.view(-1), -values.view(-1)), before)


def pass_on(residual: Residual, gradients: Mapping[str, Gradient], plan: ReducePlan, arrived: Arrived, step: int,
            masking: bool) -> tuple[Tensor, Taken]:
    """Takes the largest sums of the own region out of v, beside the mean |v| there of their parameter, and writes them
    down for all. Nothing is passed on where a worker's row tells of an error, but whose.

    Args:
        gradients: of this step: nothing is passed on of a parameter without one.
        step: the optimizer's step, which rotates a sample.

    Returns:
        The message, uint8 (1, nbytes), and what was taken.
    """
    worst_status = worst(arrived.status)
    index = largest_sums(residual, gradients, plan, step)
    row = torch.where((worst_status != 0) | (residual.v[index] == 0), 1, 0)
    places = plan.regions.index_in_region(index)
    message, sent = _kernel(residual).write(plan.to_all, row, places, residual.v[index], 1)
    residual.take(index, sent, masking)
    return torch.where(worst_status == 0, message, plan.to_all.status_message(1, worst_status)), Taken(index, sent)


def largest_sums(residual: Residual, gradients: Mapping[str, Gradient], plan: ReducePlan, step: int) -> Tensor:
    """int64, ascending: where in the bucket the own region's largest sums are, beside their parameter's mean there."""
    scores = _scores(residual, gradients, plan)
    return plan.regions.index(plan.own, _largest(scores, plan.to_all.slots, step))


def _scores(residual: Residual, gradients: Mapping[str, Gradient], plan: ReducePlan) -> Tensor:
    """|v| of the own region over the mean |v| there of the parameter, as parameters' gradients differ in scale; 0 of
    one that sits this step out.
    """
    sums = residual.v[plan.regions.indices(plan.own)].abs_()
    means = _means(sums, plan).clamp_(min=torch.finfo(sums.dtype).tiny)
    absent = [name not in gradients for name in residual.names]
    if any(absent):
        means.masked_fill_(torch.tensor(absent, device="cpu").to(means.device, non_blocking=True), torch.inf)
    sums.div_(means.repeat_interleave(plan.lengths, output_size=len(sums)))
    return sums.nan_to_num_(torch.inf, torch.inf)  # infinity over infinity, which is to be passed on, and told


def _means(sums: Tensor, plan: ReducePlan) -> Tensor:
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
