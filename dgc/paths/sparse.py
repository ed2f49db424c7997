"""The path of a sparse gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World
from dgc.compression.wire import not_finite
from dgc.paths.averaged import SparseUpdate


def reduce_sparse(name: str, gradient: Tensor, world: World, *, average: bool = True, scale: Tensor | None = None,
                  refuse: bool = True) -> Path[SparseUpdate]:
    """The path of a sparse COO gradient (``torch.nn.Embedding(sparse=True)``): all ranks' entries, all-gathered.

    The ranks have different numbers of entries, so a first all-gather says how many, and the second is padded.

    Args:
        name: of the parameter.
        gradient: sparse COO, of the parameter's shape.
        world: this rank and how many there are.
        average: divide the sum by N.
        scale: 0-dim factor for the gradient, from clipping.
        refuse: a gradient that is not finite. Else it is applied, as in stock Horovod, and the update says whose.

    Returns:
        The :class:`dgc.paths.averaged.SparseUpdate`.

    Raises:
        FloatingPointError: a rank's gradient is not finite, and that is refused; raised on all of them.
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
    blame = _blame(name, rows)
    if blame and refuse:
        raise FloatingPointError(blame)
    total = torch.sparse_coo_tensor(
        torch.cat([indices[rank, :, :n] for rank, n in enumerate(counts)], dim=1),
        torch.cat([rows[rank, :n] for rank, n in enumerate(counts)]), gradient.shape, check_invariants=False).coalesce()
    return SparseUpdate(total / world.size if average else total, blame)


def _blame(name: str, rows: Tensor) -> str:
    """The ranks whose rows are not finite; "" if all are."""
    wrong = [rank for rank, finite in enumerate(torch.isfinite(rows).flatten(1).all(1).tolist()) if not finite]
    return "; ".join(str(not_finite(f"rank {rank}", [name])) for rank in wrong)
