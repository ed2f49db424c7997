"""Hugging Face Accelerate: one line after ``accelerator.prepare``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dgc.checkpoint
from dgc.config import Config
from dgc.frontends.ddp import register_comm_hook
from dgc.warn import warn

try:
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    raise ImportError(
        "dgc.integrations.accelerate must have Hugging Face Accelerate, got none "
        "(pip install 'accelerate>=1.0')"
    ) from error

FOLDER = "dgc"  # within a checkpoint's folder


def compress(accelerator: Any, model: Any, optimizer: Any, config: Config | None = None) -> None:
    """Has a prepared model exchange compressed gradients, and its optimizer apply the updates.

    ::

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        dgc.integrations.accelerate.compress(accelerator, model, optimizer, dgc.Config())

    ``accumulate()``, mixed precision and schedulers go as ever. ``save_state()`` also saves what each rank has pending,
    in a folder ``dgc`` within its own, and ``load_state()`` takes it up; without that folder the residuals begin with
    zero. ``optimizer.optimizer.report()`` tells what was sent. With one process nothing is changed, and there is no
    ``report()``; where it loads a state of several processes, a warning says what is left out.

    Several models, as of a GAN: one call for each. They are prepared in the same order when the training goes on.

    The bound of ``accelerator.clip_grad_norm_`` must be known before the exchange: give it as
    ``Config(clip_norm=...)``, too. Each rank then bounds its local gradient (paper, section 3.2), and the call itself
    clips nothing: it returns the norm of what is in ``p.grad``, the exchanged update.

    Args:
        accelerator: that prepared both.
        model: as ``prepare`` returned it, a ``DistributedDataParallel``.
        optimizer: as ``prepare`` returned it.
        config: None means ``Config()``.

    Raises:
        TypeError, ValueError: as :func:`dgc.register_comm_hook`.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise TypeError(
            f"optimizer must be the one that accelerator.prepare() returned, got a "
            f"{type(optimizer).__name__}"
        )
    if accelerator.num_processes == 1:
        accelerator.register_load_state_pre_hook(
            lambda models, folder: tell_of_what_is_left_out(folder)
        )
        return
    config = config or Config()
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    register_comm_hook(model, optimizer.optimizer, config, grad_scaler=accelerator.scaler)
    # With a scaler it holds the step() of the class before.
    optimizer.__setstate__(optimizer.__getstate__())
    _add_to_checkpoints(accelerator, model, optimizer.optimizer)
    if config.local_steps is None:  # else gradients are clipped as on one GPU
        _clip_by_config(accelerator, model, config)


def _add_to_checkpoints(accelerator: Any, model: Any, optimizer: Any) -> None:
    """Has ``save_state`` and ``load_state``, which call on all ranks, take the residuals along."""
    # Those that are compressed.
    accelerator.dgc_models = [
        *getattr(accelerator, "dgc_models", ()),
        model.module,
    ]

    def part(models: list[Any], folder: str) -> Path:
        number = [one for one in models if one in accelerator.dgc_models].index(model.module)
        return Path(folder) / (f"{FOLDER}-{number}" if number else FOLDER)

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        if model.module in models:  # else the accelerator has been told to forget it
            dgc.checkpoint.save_checkpoint(part(models, folder), model.module, optimizer)

    found: list[Path] = []

    def find(models: list[Any], folder: str) -> None:
        if model.module in models:  # else the accelerator has been told to forget it
            found.append(part(models, folder))

    stock = accelerator.load_state

    def load_state(*args: Any, **kwargs: Any) -> None:
        found.clear()
        stock(*args, **kwargs)
        # After rank 0's parameters and state: with local steps each rank has its own.
        for folder in found:
            load_if_there(accelerator, folder, model.module, optimizer)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(find)
    accelerator.load_state = load_state


def load_if_there(accelerator: Any, part: Path, model: Any, optimizer: Any) -> None:
    """Loads what :func:`dgc.save_checkpoint` has put into this part of a checkpoint; one without
    DGC has none.
    """
    there = torch.tensor(part.is_dir() and accelerator.is_main_process, device=accelerator.device)
    if accelerator.reduce(there.int()).item():  # rank 0's disk counts
        dgc.checkpoint.load_checkpoint(part, model, optimizer)


def tell_of_what_is_left_out(folder: str) -> None:
    """Warns where one process goes on with a checkpoint of several."""
    if (part := Path(folder) / FOLDER).is_dir():
        warn(
            f"One process goes on with a checkpoint of several: what these had pending in {part}, and the momentum of "
            "compressed parameters, is left out and begins with zero (go on with two processes or more to keep it)"
        )


def _clip_by_config(accelerator: Any, model: Any, config: Config) -> None:
    """Has ``clip_grad_norm_`` leave this model's gradients alone, which were clipped before the
    exchange.
    """
    stock = accelerator.clip_grad_norm_
    accelerator.dgc_parameters = own = {
        *getattr(accelerator, "dgc_parameters", ()),
        *model.parameters(),
    }

    def clip_grad_norm_(
        parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if own.isdisjoint(parameters):
            norm: Tensor = stock(parameters, max_norm, norm_type)
            return norm
        if not own.issuperset(parameters):
            raise ValueError(
                "parameters must be all of models whose gradients are compressed, or none of them, got "
                "both (call clip_grad_norm_ once for each kind)"
            )
        if max_norm not in (config.clip_norm, float("inf")) or (
            max_norm == config.clip_norm and norm_type != 2
        ):
            raise ValueError(
                f"max_norm must be that of Config(clip_norm=...), which bounds gradients before they are "
                f"exchanged, {config.clip_norm}, with norm_type 2, got {max_norm} and {norm_type}"
            )
        accelerator.unscale_gradients()
        norms = [
            torch.linalg.vector_norm(p.grad, norm_type) for p in parameters if p.grad is not None
        ]
        return (
            torch.linalg.vector_norm(torch.stack(norms), norm_type)
            if norms
            else torch.zeros((), device="cpu")
        )

    accelerator.clip_grad_norm_ = clip_grad_norm_
