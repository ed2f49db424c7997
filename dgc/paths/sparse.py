"""The path of a sparse gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World
from dgc.compression.residual import Residual
from dgc.compression.wire import not_finite
from dgc.paths.averaged import SparseUpdate
from dgc.paths.nodes import among_nodes


def reduce_sparse(
    name: str,
    gradient: Tensor,
    world: World,
    *,
    scale: Tensor | None = None,
    residual: Residual | None = None,
    has_residual: bool = False,
) -> Path[SparseUpdate]:
    """The path of a sparse COO gradient (``torch.nn.Embedding(sparse=True)``): all ranks' entries,
    all-gathered.

    The ranks have different numbers of entries, so a first all-gather says how many, and the second
    is padded. It also says whether a rank has a residual of earlier gradients, which were dense.
    Then u and v are summed as well.

    Args:
        name: of the parameter.
        gradient: sparse COO, of the parameter's shape.
        world: this rank and how many there are.
        scale: 0-dim factor for the gradient, from clipping.
        residual: holds u and v of the parameter, which stay as they are; None if nothing is kept of it.
        has_residual: on this rank they may not be 0.

    Returns:
        The :class:`dgc.paths.averaged.SparseUpdate`. If it is not finite it says whose gradient
        made it so.

    Raises:
        FloatingPointError: the sum of the residuals is not finite; raised on all ranks.
    """
    gradient = gradient.coalesce()
    index, values = gradient.indices(), gradient.values()
    if scale is not None:
        values = values * scale.to(values)
    counts_and_flags = torch.tensor([index.shape[1], has_residual], device=values.device)
    counts, have_residual = (yield Collective("all_gather", counts_and_flags)).t().tolist()
    longest = max(counts)
    index = torch.nn.functional.pad(index, (0, longest - index.shape[1]))
    values = torch.cat([values, values.new_zeros(longest - values.shape[0], *values.shape[1:])])
    indices = yield Collective("all_gather", index)
    rows = yield Collective("all_gather", values)
    blame = _blame(name, rows)
    total = torch.sparse_coo_tensor(
        torch.cat([indices[rank, :, :n] for rank, n in enumerate(counts)], dim=1),
        torch.cat([rows[rank, :n] for rank, n in enumerate(counts)]),
        gradient.shape,
        check_invariants=False,
    ).coalesce()
    update = SparseUpdate(total / world.size if world.average else total, blame)
    if residual is not None and any(have_residual):
        update.v, update.u = yield from _average_residual(residual, name, world)
    return update


def _average_residual(
    residual: Residual, name: str, world: World
) -> Path[tuple[Tensor, Tensor | None]]:
    """v and u of a parameter, averaged, in its shape; None if there is no u."""
    flats = [residual.views(flat)[name] for flat in (residual.v, residual.u) if flat is not None]
    total = yield from among_nodes(
        "all_reduce", torch.cat([flat.reshape(-1) for flat in flats]), world
    )
    if not torch.isfinite(total).all():
        raise FloatingPointError(f"the sum over ranks of what is pending is not finite, of {name}")
    parts = total.div_(world.divisor).view(len(flats), *flats[0].shape)
    return parts[0], parts[1] if len(flats) > 1 else None


def _blame(name: str, rows: Tensor) -> str:
    """The ranks whose rows are not finite; "" if all are."""
    wrong = [
        rank
        for rank, finite in enumerate(torch.isfinite(rows).flatten(1).all(1).tolist())
        if not finite
    ]
    return "; ".join(str(not_finite(f"rank {rank}", [name])) for rank in wrong)
