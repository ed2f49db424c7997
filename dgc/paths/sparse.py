"""The path of a sparse gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World
from dgc.compression.residual import Bucket
from dgc.compression.wire import not_finite
from dgc.paths.averaged import SparseUpdate
from dgc.paths.nodes import among_nodes


def reduce_sparse(
    name: str,
    gradient: Tensor,
    world: World,
    *,
    average: bool = True,
    scale: Tensor | None = None,
    kept: Bucket | None = None,
    pending: bool = False,
) -> Path[SparseUpdate]:
    """The path of a sparse COO gradient (``torch.nn.Embedding(sparse=True)``): all ranks' entries,
    all-gathered.

    The ranks have different numbers of entries, so a first all-gather says how many, and the second
    is padded. It also says whether there is something pending from earlier gradients, which were
    dense. Then that is summed as well.

    Args:
        name: of the parameter.
        gradient: sparse COO, of the parameter's shape.
        world: this rank and how many there are.
        average: divide the sum by N.
        scale: 0-dim factor for the gradient, from clipping.
        kept: holds u and v of the parameter, which stay as they are; None if nothing is kept of it.
        pending: on this rank they may not be 0.

    Returns:
        The :class:`dgc.paths.averaged.SparseUpdate`. If it is not finite it says whose gradient
        made it so.

    Raises:
        FloatingPointError: the sum of what is pending is not finite; raised on all ranks.
    """
    gradient = gradient.coalesce()
    index, values = gradient.indices(), gradient.values()
    if scale is not None:
        values = values * scale.to(values)
    told = torch.tensor([index.shape[1], pending], device=values.device)
    counts, pendings = (yield Collective("gather", told)).t().tolist()
    longest = max(counts)
    index = torch.nn.functional.pad(index, (0, longest - index.shape[1]))
    values = torch.cat([values, values.new_zeros(longest - values.shape[0], *values.shape[1:])])
    indices = yield Collective("gather", index)
    rows = yield Collective("gather", values)
    blame = _blame(name, rows)
    total = torch.sparse_coo_tensor(
        torch.cat([indices[rank, :, :n] for rank, n in enumerate(counts)], dim=1),
        torch.cat([rows[rank, :n] for rank, n in enumerate(counts)]),
        gradient.shape,
        check_invariants=False,
    ).coalesce()
    update = SparseUpdate(total / world.size if average else total, blame)
    if kept is not None and any(pendings):
        update.v, update.u = yield from _pending(kept, name, world, average)
    return update


def _pending(
    kept: Bucket, name: str, world: World, average: bool
) -> Path[tuple[Tensor, Tensor | None]]:
    """v and u of a parameter, averaged, in its shape; None if there is no u."""
    flats = [kept.views(flat)[name] for flat in (kept.v, kept.u) if flat is not None]
    total = yield from among_nodes("sum", torch.cat([flat.reshape(-1) for flat in flats]), world)
    if not torch.isfinite(total).all():
        raise FloatingPointError(f"the sum over ranks of what is pending is not finite, of {name}")
    parts = total.div_(world.divisor(average)).view(len(flats), *flats[0].shape)
    return parts[0], parts[1] if len(flats) > 1 else None


def _blame(name: str, rows: Tensor) -> str:
    """The ranks whose rows are not finite; "" if all are."""
    wrong = [
        rank
        for rank, finite in enumerate(torch.isfinite(rows).flatten(1).all(1).tolist())
        if not finite
    ]
    return "; ".join(str(not_finite(f"rank {rank}", [name])) for rank in wrong)
