"""Residuals for ``torch.distributed.checkpoint``."""

from __future__ import annotations

from typing import Any

import torch

from dgc.checkpoint.files import Tree
from dgc.checkpoint.fits import rounds_or_none


class Residuals:
    """The residuals of this rank, for ``torch.distributed.checkpoint``. Put it beside
    ``optimizer.state_dict()`` in the dict that is saved and loaded: ``{"model": ..., "optimizer":
    ..., "residuals": Residuals(optimizer)}``.

    ``torch.distributed.checkpoint`` takes entries of one name for copies and writes one of them. So
    the residuals of each rank have a name of their own. They load only with the same number of
    ranks. They are as safe as their files, whose index is a pickle without a checksum.

    Args:
        optimizer: a :func:`DistributedOptimizer`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer: Any = optimizer

    def state_dict(self) -> Tree:
        """Called by ``torch.distributed.checkpoint``.

        Raises:
            RuntimeError: within a round of local steps, as ranks' parameters have one name.
        """
        if (rounds := rounds_or_none(self._optimizer)) is not None:
            if rounds.count:
                raise RuntimeError(
                    f"dgc.Residuals must be saved after a round with local_steps, got {rounds.count} steps after it "
                    "(call optimizer.flush() on all ranks first; or use dgc.save_checkpoint)"
                )
            _make_state(self._optimizer)
        state = self._optimizer.residual_state_dict()
        return {
            "-".join(str(state[key]) for key in ("rank", "size", "shard") if key in state): state
        }

    def load_state_dict(self, state_dict: Tree) -> None:
        """Called by ``torch.distributed.checkpoint``."""
        (state,) = state_dict.values()
        self._optimizer.load_residual_state_dict(state)
        if (rounds := rounds_or_none(self._optimizer)) is not None:
            rounds.keeps_state = True


def _make_state(optimizer: Any) -> None:
    """Makes the state of a fresh optimizer. Each rank's own is in its residuals with local steps,
    and ``torch.distributed.checkpoint`` loads only into what is there.
    """
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not optimizer.state and all(p.grad is None for p in parameters):
        _init_optim_state(optimizer)
