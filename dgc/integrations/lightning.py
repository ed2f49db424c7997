"""A strategy of PyTorch Lightning: its DDP, with compressed gradients."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import dgc.checkpoint
from dgc.config import Config
from dgc.frontends.ddp import register_comm_hook

try:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError as error:
    raise ImportError(
        "dgc.integrations.lightning must have PyTorch Lightning, got none "
        "(pip install 'lightning>=2.5')"
    ) from error


class DGCStrategy(DDPStrategy):
    """``Trainer(strategy=DGCStrategy(dgc.Config()))``. Everything else of the script stays.

    Accumulation, precision and schedulers go as in Lightning's own DDP. Three things differ:

    - ``gradient_clip_val`` bounds the local gradient of each rank before it is compressed, as the
      paper has it (section 3.2), and becomes the config's ``clip_norm``. Lightning itself then
      clips nothing: what it sees in ``p.grad`` is the exchanged update.
    - A checkpoint ``last.ckpt`` has a folder ``last.ckpt.dgc`` beside it, which
      :func:`dgc.save_checkpoint` writes, with what each rank has pending. Lightning removes both
      together. Move or copy both together, too. Without the folder, as from a training without DGC,
      the residuals begin with zero.
    - ``configure_optimizers`` returns one optimizer, of all parameters that require a gradient.

    ``module.optimizers().report()`` tells what was sent.

    Args:
        compression: None means ``Config()``.
        arguments: those of ``DDPStrategy``.
    """

    model: Any  # this and what follows is Lightning's
    lightning_module: Any
    optimizers: list[Any]
    _lightning_optimizers: list[Any]

    def __init__(self, compression: Config | None = None, **arguments: Any):
        super().__init__(**arguments)
        self._compression = compression or Config()
        self._resumed: Path | None = None  # the file that the training goes on from
        self._trainer: Any = None  # with the bound that it was made with, as long as we clip for it
        self._bound: float | None = None

    def setup_optimizers(self, trainer: Any) -> None:
        """Called by Lightning when the model is within DDP: makes the optimizer, and connects both."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers must return one optimizer, got {len(self.optimizers)} (give one "
                "with several param groups)"
            )
        register_comm_hook(
            self.model,
            self.optimizers[0],
            self._with_bound(trainer),
            grad_scaler=getattr(self.precision_plugin, "scaler", None),
        )
        for (
            wrapper
        ) in self._lightning_optimizers:  # made before, they have the method of the class before
            wrapper.zero_grad = self.optimizers[0].zero_grad

    def _with_bound(self, trainer: Any) -> Config:
        """The config with the trainer's bound, which the trainer forgets until the end."""
        bound, clip_norm = trainer.gradient_clip_val, self._compression.clip_norm
        if not bound or self._compression.local_steps is not None:  # clipped as on one GPU
            return self._compression
        if getattr(trainer.gradient_clip_algorithm, "value", "norm") != "norm":
            raise ValueError("gradient_clip_algorithm must be 'norm' with DGCStrategy, got 'value'")
        if clip_norm not in (None, bound):
            raise ValueError(
                f"Config: clip_norm must be None or gradient_clip_val, {bound}, got {clip_norm} (give one "
                "of the two)"
            )
        self._trainer, self._bound, trainer.gradient_clip_val = trainer, bound, None
        return replace(self._compression, clip_norm=float(bound))

    def teardown(self) -> None:
        """Called by Lightning at the end of a fit."""
        if self._trainer is not None:
            self._trainer.gradient_clip_val, self._trainer = self._bound, None
        super().teardown()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Called by Lightning on all ranks. The file names the folder's step, so that both change
        at one moment.
        """
        if self.local_rank == 0 and os.path.islink(
            filepath
        ):  # to another checkpoint, which keeps its folder
            os.unlink(filepath)
        self.barrier("DGCStrategy.save_checkpoint: links")
        folder, step = _beside(filepath), f"step-{checkpoint['global_step']}"
        if checkpoint.get("optimizer_states"):
            dgc.checkpoint.save_checkpoint(
                folder / step, self.lightning_module, _inner(self.optimizers[0])
            )
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.barrier("DGCStrategy.save_checkpoint")  # by now the file names the new folder
        if self.local_rank == 0 and folder.is_dir():  # on each machine's disk
            others = sorted(
                (each for each in folder.iterdir() if each.name != step),
                key=lambda it: it.stat().st_mtime,
            )
            if isinstance(self.checkpoint_io, AsyncCheckpointIO):
                others = others[:-1]  # a thread may still be writing the file
            for other in others:
                shutil.rmtree(other, ignore_errors=True)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Called by Lightning for a checkpoint that it keeps no longer."""
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:  # on each machine's disk
            # Not that of what a link names.
            shutil.rmtree(f"{os.path.abspath(filepath)}.dgc", ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **arguments: Any) -> dict[str, Any]:
        """Called by Lightning before there is an optimizer."""
        self._resumed = None if _is_remote(checkpoint_path) else _beside(checkpoint_path)
        content: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **arguments)
        return content

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Called by Lightning when a fit goes on."""
        super().load_optimizer_state_dict(checkpoint)
        if self._resumed is None:
            return
        folder = self._resumed / f"step-{checkpoint['global_step']}"
        if self.broadcast(folder.is_dir()):  # rank 0's disk counts
            dgc.checkpoint.load_checkpoint(
                folder, self.lightning_module, _inner(self.optimizers[0])
            )


def _beside(checkpoint: Any) -> Path:
    """The folder of a checkpoint's file, or of the file that a link names."""
    if _is_remote(checkpoint):
        raise ValueError(
            f"a checkpoint's path must be on a disk with DGCStrategy, as a folder comes beside it, got "
            f"{checkpoint} (save on a disk, and copy both from there)"
        )
    return Path(f"{os.path.realpath(checkpoint)}.dgc")


def _is_remote(path: Any) -> bool:
    return "://" in str(path)


def _inner(optimizer: Any) -> Any:
    """The optimizer within Lightning's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
