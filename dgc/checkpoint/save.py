"""Saving a training, by all ranks together."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dgc.checkpoint.files import FORMAT, VERSION, Tree, clean, dump, file_of, publish, put, write
from dgc.checkpoint.fits import (
    as_plain,
    check_held,
    check_plain,
    engine_or_none,
    parameter_names,
    rounds_or_none,
    waits_for_step,
)
from dgc.checkpoint.random_states import random_states
from dgc.checkpoint.ranks import Ranks, ranks_of
from dgc.checkpoint.reshard import own_residuals, own_round


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    extras: Mapping[str, Any] | None = None,
) -> None:
    """Saves a training between two steps, so that :func:`load_checkpoint` continues it to the bit.
    Call it on all ranks (of the optimizer's process set).

    It saves the model's parameters, and the optimizer's state with the step of the schedule. For
    each rank it saves the buffers, the residuals u and v, the ``extras``, and the random states.
    These are torch's on the CPU and on the model's GPUs, ``random``'s, and NumPy's if it is
    imported.

    Args:
        path: a folder; it is made where needed. A new checkpoint replaces the one in the folder
            when the new one is complete. Until then the old one can be loaded, also if the job is
            killed. Other files are left alone.
        model: whose parameters the optimizer trains; they are alike on all ranks.
        optimizer: a :func:`DistributedOptimizer`, an optimizer given to
            :func:`dgc.register_comm_hook`, or Horovod's own, which has no residuals.
        extras: anything more, as plain data (numbers, strings, None, tensors, and dicts, lists and
            tuples of these): a scheduler's or a loss scaler's ``state_dict()``, the epoch.

    Raises:
        OSError: a file could not be written on some rank, which the message names.
        TypeError: something is not plain data, so it could not be loaded without running code; or
            the parameters are sharded (``fully_shard``): use :class:`Residuals` for these.
        ValueError: a parameter or the optimizer's state differs between ranks, a residual has
            overflowed, or the optimizer has parameters that the model lacks.
        RuntimeError: called between ``backward()`` and ``step()``, or outside the process set.

    An error on one rank is raised on all ranks. The checkpoint that was at ``path`` before is then
    still there.
    """
    ranks, engine = ranks_of(optimizer), engine_or_none(optimizer)
    rounds = rounds_or_none(optimizer)
    if rounds is not None:
        rounds.counted()  # a step that was left out
    # Within a round each rank's parameters are its own; those that the round began with are alike.
    with contextlib.nullcontext() if rounds is None else rounds.averaged():
        common, folder = _common(ranks, path, model, optimizer, extras), Path(path)
        # All have arrived here: in lockstep, where they have the same generators, they save the
        # same states.
        with _tidied() as written:
            files = _write_own(ranks, folder, model, optimizer, common, written)
    # From here on rank 0 may publish when another rank fails, whose file would then be missed.
    with _tidied(ranks.world.rank == 0) as written:
        _collect(ranks, folder, files, written)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "size": ranks.world.size,
        "files": files,
        "average": engine is None or engine.settings.average,
    }
    ranks.first(partial(publish, folder, manifest))
    ranks.together(lambda: clean(folder, files))


@contextlib.contextmanager
def _tidied(unlinks: bool = True) -> Iterator[list[Path]]:
    """A list of files, for those that are written. After a failure they are removed: a full disk
    should not stay full.
    """
    written = list[Path]()
    try:
        yield written
    except BaseException:
        for file in written if unlinks else ():
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        raise


def _common(
    ranks: Ranks,
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any,
    extras: Mapping[str, Any] | None,
) -> Tree:
    """What is alike on all ranks, once that is known; of the model, with the buffers, which need
    not be.
    """
    engine, common = engine_or_none(optimizer), Tree()

    def look() -> str:
        os.fspath(path)  # a TypeError where it is none
        if waits_for_step(optimizer):
            raise RuntimeError(
                "save_checkpoint() must be called after step(), got a call between backward() and "
                "step()"
            )
        check_held(optimizer, model)
        common.update(
            model=model.state_dict(),
            optimizer=tree_map(as_plain, optimizer.state_dict()),
            extras=tree_map(as_plain, dict(extras or {})),
            sparse={} if engine is None else engine.sparse_names(),
        )
        check_plain(common)
        parameters = parameter_names(model)
        alike = {k: x for k, x in common["model"].items() if k in parameters}
        own = rounds_or_none(optimizer) is not None  # then the optimizer's state is, too
        return tree_hash([alike] if own else [alike, common["optimizer"]])

    hashes = ranks.together(look)
    if others := [rank for rank, value in enumerate(hashes) if value != hashes[0]]:
        raise ValueError(
            "save_checkpoint: the parameters and the optimizer's state must be those of rank 0 on all "
            f"ranks, got others on ranks {others} (let the model begin alike on all ranks, say by "
            "dgc.broadcast_parameters(model.state_dict()))"
        )
    return common


def _write_own(
    ranks: Ranks, folder: Path, model: nn.Module, optimizer: Any, common: Tree, written: list[Path]
) -> dict[str, Any]:
    """Each rank writes its own file, and rank 0 what is alike. Returns name -> length and SHA-256
    of all of them.
    """
    rank = ranks.world.rank
    buffers = common["model"].keys() - parameter_names(model)

    def write_files() -> dict[str, Any]:
        own = {
            "residuals": own_residuals(optimizer),
            **own_round(optimizer),
            "buffers": {k: common["model"][k] for k in buffers},
            "random": random_states(model),
            "extras": common["extras"],
        }
        trees = {f"rank-{rank}": own, **({"common": common} if rank == 0 else {})}
        folder.mkdir(parents=True, exist_ok=True)
        return {
            name: write(folder, name, partial(dump, name, tree), written)
            for name, tree in trees.items()
        }

    return {
        name: entry for entries in ranks.together(write_files) for name, entry in entries.items()
    }


def _collect(ranks: Ranks, folder: Path, files: dict[str, Any], written: list[Path]) -> None:
    """Sends rank 0 the files that it does not see."""
    unseen = ranks.first(
        lambda: [
            r for r in range(ranks.world.size) if not file_of(folder, f"rank-{r}", files).exists()
        ]
    )
    for rank in unseen:
        name = f"rank-{rank}"
        content = ranks.send(file_of(folder, name, files), rank, files[name][0])
        ranks.first(partial(put, folder, name, content, files[name], written))


def tree_hash(tree: Any) -> str:
    """A hash of all that is in a tree, whatever the order of dicts and sets."""
    sha = hashlib.sha256()

    def walk(node: Any) -> None:
        if isinstance(node, Mapping):
            for key in sorted(node, key=str):
                sha.update(f"{key}:".encode())
                walk(node[key])
        elif isinstance(node, (list, tuple)):
            sha.update(f"{len(node)}:".encode())
            for item in node:
                walk(item)
        elif isinstance(node, (set, frozenset)):  # in an order that each process draws for itself
            walk(sorted(map(repr, node)))
        elif isinstance(node, Tensor):
            sha.update(f"{node.dtype}{tuple(node.shape)}".encode())
            for part in _dense(node):
                if part.numel():
                    buffer = bytearray(part.numel() * part.element_size())
                    torch.frombuffer(buffer, dtype=torch.uint8).copy_(
                        part.contiguous().view(-1).view(torch.uint8)
                    )
                    sha.update(buffer)
        else:
            sha.update(repr(node).encode())

    walk(tree)
    return sha.hexdigest()


def _dense(tensor: Tensor) -> Iterable[Tensor]:
    tensor = tensor.detach()
    return (
        (tensor.coalesce().indices(), tensor.coalesce().values()) if tensor.is_sparse else (tensor,)
    )
