"""The Trainer of Hugging Face transformers, with compressed gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dgc.checkpoint
from dgc.config import Config
from dgc.integrations.accelerate import FOLDER, compress, load_if_there, tell_of_what_is_left_out

try:
    import transformers
except ModuleNotFoundError as error:
    raise ImportError(
        "dgc.integrations.transformers must have Hugging Face transformers, got none "
        "(pip install 'transformers>=5.20' accelerate)"
    ) from error


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` with one argument more, ``compression``. Everything else of the
    script stays.

    Accumulation, precision and schedulers go as ever. ``max_grad_norm``, 1 by default, bounds the
    local gradient of each rank before it is compressed, as the paper has it (section 3.2), and
    becomes the config's ``clip_norm``; what is logged as ``grad_norm`` is the norm of the exchanged
    update. A checkpoint's folder has a folder ``dgc`` more, with what each rank has pending.
    ``trainer.optimizer.optimizer.report()`` tells what was sent. With one process nothing is
    changed, and there is no ``report()``; where it loads a checkpoint of several processes, a
    warning says what is left out.

    Another trainer, say for sequences: ``class Mine(dgc.integrations.transformers.Trainer,
    Seq2SeqTrainer): pass``.

    Args:
        arguments: those of ``transformers.Trainer``.
        compression: None means ``Config()``.
    """

    model: Any
    optimizer: Any  # when it trains, Accelerate's, with ours within

    def __init__(self, *arguments: Any, compression: Config | None = None, **named: Any):
        super().__init__(*arguments, **named)
        config, bound = compression or Config(), self.args.max_grad_norm or None
        if config.clip_norm not in (None, bound):
            raise ValueError(
                f"Config: clip_norm must be None or max_grad_norm, {bound}, got {config.clip_norm} (give "
                "TrainingArguments(max_grad_norm=...) alone)"
            )
        # With local steps gradients are clipped as on one GPU.
        clipped = config.local_steps is None
        self.compression = replace(config, clip_norm=bound) if clipped else config
        self._compressed: Any = None  # the model within DDP

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Connects model and optimizer before anything is loaded into them."""
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if self.model_wrapped is not self._compressed:  # it is where train() is called again
            compress(self.accelerator, self.model_wrapped, self.optimizer, self.compression)
            self._compressed = self.model_wrapped
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            self._load_scaler(resume_from_checkpoint)
        return prepared

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Called on all ranks."""
        super()._save_optimizer_and_scheduler(output_dir)
        if self.accelerator.num_processes > 1:
            dgc.checkpoint.save_checkpoint(
                Path(output_dir) / FOLDER, self.model, self.optimizer.optimizer
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Called on all ranks; random states are loaded later, by the trainer."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.accelerator.num_processes > 1:
            load_if_there(
                self.accelerator, Path(checkpoint) / FOLDER, self.model, self.optimizer.optimizer
            )
        elif checkpoint is not None:
            tell_of_what_is_left_out(checkpoint)
