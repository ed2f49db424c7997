"""Lightning's Fabric: one line after ``fabric.setup``."""

from __future__ import annotations

from typing import Any

from dgc.config import Config
from dgc.frontends.ddp import register_comm_hook

try:
    from lightning.fabric import is_wrapped
except ModuleNotFoundError as error:
    raise ImportError(
        "dgc.integrations.fabric must have PyTorch Lightning, got none "
        "(pip install 'lightning>=2.5')"
    ) from error


def compress(fabric: Any, model: Any, optimizer: Any, config: Config | None = None) -> None:
    """Has a model that was set up exchange compressed gradients, and its optimizer apply the
    updates.

    ::

        fabric = lightning.Fabric(strategy="ddp", devices=2)
        model, optimizer = fabric.setup(model, optimizer)
        dgc.integrations.fabric.compress(fabric, model, optimizer, dgc.Config())

    ``no_backward_sync()`` and mixed precision go as ever. Clip with ``Config(clip_norm=...)``, not with
    ``fabric.clip_gradients``, which comes after the exchange. Save with :func:`dgc.save_checkpoint`, given
    ``model.module`` and ``optimizer.optimizer``: ``fabric.save`` keeps only what one rank has pending.
    ``optimizer.optimizer.report()`` tells what was sent. With one process nothing is changed.

    Args:
        fabric: that set up both, with the strategy ``ddp``.
        model: as ``setup`` returned it.
        optimizer: as ``setup`` returned it.
        config: None means ``Config()``.

    Raises:
        TypeError, ValueError: as :func:`dgc.register_comm_hook`.
    """
    for name, given in (("model", model), ("optimizer", optimizer)):
        if not is_wrapped(given):
            raise TypeError(
                f"{name} must be the one that fabric.setup() returned, got a {type(given).__name__}"
            )
    if fabric.world_size > 1:
        # torch.compile wraps it.
        ddp_model = getattr(model._forward_module, "_orig_mod", model._forward_module)
        register_comm_hook(
            ddp_model,
            optimizer.optimizer,
            config or Config(),
            grad_scaler=getattr(fabric.strategy.precision, "scaler", None),
        )
        # The wrapper has that of the class before.
        optimizer.zero_grad = optimizer.optimizer.zero_grad
