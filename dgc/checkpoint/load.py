"""Loading a training, by all ranks together."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dgc.checkpoint import files
from dgc.checkpoint.files import Tree, blamed, file_of, read_manifest
from dgc.checkpoint.fits import (
    check_held,
    check_model,
    check_optimizer,
    check_residuals,
    check_sparse,
    engine_or_none,
    names_of,
    on_cpu,
    rounds_or_none,
)
from dgc.checkpoint.random_states import set_random_states
from dgc.checkpoint.ranks import Ranks, ranks_of
from dgc.checkpoint.reshard import accumulate, fold, mean_round, weights
from dgc.engine.engine import Engine
from dgc.warn import warn


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Loads what :func:`save_checkpoint` saved. Call it on all ranks, with a model and an optimizer
    that are made as before.

    With as many ranks as before, training continues as if it had never stopped, to the bit. With
    ``exchange="reduce"`` or ``value_bits`` of 8 or fewer, the param groups and the frozen
    parameters must be as when the optimizer was made. Else entries have other owners and buckets,
    and the residuals are sent in other steps or rounded differently.

    With N' ranks in place of N, the residuals are conserved. A residual counts for f in the update:
    1/N under Average, 1 under Sum. Let rank r of N have the part [r/N, (r+1)/N] of an interval.
    Then rank r' of N' gets ::

        v'(r') = (sum over r) w(r', r) v(r),    w(r', r) = |the part of r  and  the part of r'| * N f / f'

    computed in float64 and rounded once. The weights of each v(r) add up to f / f', so f' (sum v')
    = f (sum v). Together, the residuals are worth the same as before. The same holds for u, since
    momentum is linear. Under Average each new residual is a mean of old ones. On half as many ranks
    it is the mean of two. On twice as many ranks each old one is there twice. Buffers and extras
    are then those of rank 0, and random states stay as the script has set them.

    An optimizer without residuals (one process, or Horovod's own) gets the sum f (sum u) in its
    momentum, with the weight decay's, which is exact. It has no place for f (sum v). This is
    applied to the parameters that are not frozen, at the saved learning rate, as by ``flush()``.
    Steps with one process do not count in the schedule of the sparsity. From one process to
    several, the optimizer's momentum moves into u.

    Args:
        path: as given to :func:`save_checkpoint`.
        model: with the parameters and buffers of the saved one.
        optimizer: with the same param groups, class and settings.

    Returns:
        The extras that this rank saved, with tensors on the CPU. With another number of ranks: rank
        0's.

    Raises:
        FileNotFoundError: there is no checkpoint, or one of its files is gone.
        ValueError: a file is damaged, cut short, from elsewhere, of another version, or does not
            fit the model or the optimizer. The message names the file and what is wrong. Nothing is
            loaded then, on any rank.
        TypeError: the parameters are sharded.
        RuntimeError: called outside the process set.

    A step under way is dropped, even if loading fails. Nothing in a file is executed
    (``torch.load(weights_only=True)``). The checksums guard against accidents, not against someone
    who can write into the folder.
    """
    ranks, engine = ranks_of(optimizer), engine_or_none(optimizer)
    if engine is not None and engine.settings.exchanges:
        # What is on its way belongs to another v, and would pair up with what is asked here.
        engine.abort_step_together()

    def look() -> Any:
        folder = Path(path)  # a TypeError where it is none
        return read_manifest(folder) if ranks.world.rank == 0 else None

    manifest, folder = ranks.together(look)[0], Path(path)
    while True:
        try:
            return _Loading(folder, manifest, model, optimizer, ranks).run()
        except FileNotFoundError:
            # On all ranks alike: a job that saves there may have put a new manifest in its place.
            before, manifest = manifest, ranks.together(look)[0]
            if manifest == before:
                raise


class _Loading:
    """One attempt to load, with one manifest's files. What is read is checked before anything is
    changed.

    Args:
        folder: of the checkpoint.
        manifest: of the checkpoint.
        model, optimizer: that it is loaded into.
        ranks: that load.
    """

    def __init__(
        self, folder: Path, manifest: Tree, model: nn.Module, optimizer: Any, ranks: Ranks
    ):
        self._folder, self._files, self._model, self._optimizer = (
            folder,
            manifest["files"],
            model,
            optimizer,
        )
        self._ranks, size, world = ranks, manifest["size"], ranks.world
        self._engine: Engine | None = engine_or_none(optimizer)
        self._keeps = self._engine is not None and self._engine.settings.exchanges  # residuals
        # The file with what is this rank's own.
        self._mine = world.rank if size == world.size else None
        self._weights = weights(
            size,
            manifest["average"],
            world.rank if self._keeps else None,
            world.size,
            self._engine is None or self._engine.settings.average,
        )
        # With local steps each rank's state is its own: others begin with the mean of all.
        self._averages = self._mine is None and rounds_or_none(optimizer) is not None
        self._needed = {
            f"rank-{r}": r
            for r in range(size)
            if r in self._weights or r == self._mine or self._averages
        }
        self._rounds: list[Tree] = []
        self._common: Tree = {}
        self._own: Tree = {"buffers": {}}
        self._residuals: Tree = {"u": {}, "v": {}}
        self._updates: dict[Tensor, Tensor] = {}  # of pending gradients that there is no v for

    def run(self) -> Tree:
        """Loads, and returns the extras."""
        sent = self._fetch()
        self._ranks.together(partial(self._read, sent))
        before = on_cpu(self._model)
        try:
            self._ranks.together(self._load_model)
        except BaseException:
            # load_state_dict failed on some rank: restore the old state. The module that failed may
            # fail again, so errors are suppressed.
            with contextlib.suppress(Exception):
                self._model.load_state_dict(before)
            raise
        self._ranks.together(self._load_optimizer)
        extras: Tree = (self._common if self._mine is None else self._own)["extras"]
        return extras

    def _fetch(self) -> dict[str, bytes]:
        """The files that this rank needs and does not see, from rank 0's disk."""
        unseen = self._ranks.together(
            lambda: [
                name
                for name in ("common", *self._needed)
                if not file_of(self._folder, name, self._files).exists()
            ]
        )
        sent: dict[str, bytes] = {}
        for name in sorted(set().union(*unseen)):
            content = self._ranks.send(
                file_of(self._folder, name, self._files), 0, self._files[name][0]
            )
            if name in unseen[self._ranks.world.rank]:
                sent[name] = content
        return sent

    def _read(self, sent: dict[str, bytes]) -> None:
        """Reads the files, and checks that they fit."""
        check_held(self._optimizer, self._model)
        names = names_of(self._optimizer, self._model)
        common = self._common = files.read(self._folder, "common", self._files, sent)
        with self._blamed("common"):
            check_model(common["model"], self._model)
            check_optimizer(self._optimizer, common["optimizer"])
            check_sparse(common.setdefault("sparse", {}), names)
        expected = (
            self._engine.residual_views()
            if self._engine is not None and self._keeps
            else {"u": names, "v": names}
        )
        for name, rank in self._needed.items():
            state = files.read(self._folder, name, self._files, sent)
            with self._blamed(name):
                self._take(state, rank, expected)
        if not self._keeps and self._rounds:  # a drift is added to the parameters as it is
            self._updates = {names[k]: -v.double() for k, v in self._residuals["v"].items()}
        elif not self._keeps:
            if self._engine is None and self._ranks.world.size > 1:
                warn(
                    "load_checkpoint() was given an optimizer without dgc, so the residuals of the checkpoint are "
                    "applied to the parameters now (to go on with dgc, call dgc.register_comm_hook(), or make the "
                    "DistributedOptimizer, before load_checkpoint())"
                )
            with self._blamed("common"):
                self._updates = fold(
                    self._optimizer, self._model, common["optimizer"], self._residuals
                )

    def _take(self, state: Tree, rank: int, expected: Tree) -> None:
        """Takes what is wanted of one rank's file."""
        if ("round" in state) != (rounds_or_none(self._optimizer) is not None):
            raise ValueError(
                "it must be of an optimizer with local_steps where this one has local_steps, and of one "
                f"without where it has none, got {'one' if 'round' in state else 'none'}"
            )
        if "round" in state:
            self._rounds.append(state["round"])
        if rank == self._mine:
            self._own = state
            self._common["model"].update(state["buffers"])
            check_model(self._common["model"], self._model)
            set_random_states(state["random"], self._model, dry=True)
        if rank in self._weights:
            check_residuals(state["residuals"], expected, self._keeps)
            accumulate(
                self._residuals,
                state["residuals"],
                self._weights[rank],
                single_weight=len(self._weights) == 1,
            )

    def _blamed(self, name: str) -> contextlib.AbstractContextManager[None]:
        return blamed(file_of(self._folder, name, self._files))

    def _load_model(self) -> None:
        with self._blamed("common"):
            # As state_dict() gave it: with its modules' versions.
            self._model.load_state_dict(self._common["model"])

    def _load_optimizer(self) -> None:
        engine, optimizer, residuals = self._engine, self._optimizer, self._residuals
        # Before the optimizer's own state, whose momentum moves into u.
        if engine is not None and self._keeps:
            kept = engine.residuals()
            if not (residuals["u"] or residuals["v"]):  # it was saved without
                residuals.update(
                    {
                        letter: {k: torch.zeros_like(x) for k, x in kept[letter].items()}
                        for letter in "uv"
                    }
                )
            engine.load_residuals({**kept, **residuals})
        optimizer.load_state_dict(self._common["optimizer"])
        if (rounds := rounds_or_none(optimizer)) is not None:
            rounds.load_own(mean_round(self._rounds) if self._averages else self._own["round"])
        if engine is not None:
            engine.load_sparse_names(self._common["sparse"])
        with torch.no_grad():
            for p, update in self._updates.items():
                p.copy_(p.double().add_(update.to(p.device)))
        if self._mine is not None:
            set_random_states(self._own["random"], self._model)
