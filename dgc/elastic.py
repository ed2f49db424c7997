"""The state of Horovod's elastic jobs, where workers come and go."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.elastic import state as stock

from dgc.engine.agreement import is_known
from dgc.engine.engine import engine_of
from dgc.engine.rounds import Drifts, Rounds


class TorchState(hvd.elastic.TorchState):
    """``hvd.elastic.TorchState`` that also commits, restores and regroups the residuals of
    DistributedOptimizers.

    ::

        state = dgc.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)  # and scaler=scaler

    A ``GradScaler`` stays the object that the optimizer was given, and a learning-rate scheduler
    stays the one that drives it. Their state dicts are committed, restored and synchronized. The
    schedule of the sparsity is always rank 0's: a worker that joins may count another number of
    steps in an epoch.

    A worker goes back to its own residuals of the last commit. When the number of workers changes
    from N to N', the remaining workers scale theirs by N'/N (under Average). So the residuals are
    worth the same in the new average. New workers begin without residuals. The residuals of a lost
    worker are lost: ``report().lost_residuals`` counts them, and a warning estimates how much it
    was.

    With ``Config(local_steps=...)`` a commit makes a round first, so that the state is alike on all
    workers. A worker that joins starts with the common parameters and rank 0's optimizer state.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ):
        kinds = {
            torch.amp.GradScaler: _ScalerHandler,
            torch.optim.lr_scheduler.LRScheduler: _StateDictHandler,
        }
        held = {
            name: (value, handler)
            for name, value in kwargs.items()
            for kind, handler in kinds.items()
            if isinstance(value, kind)
        }
        super().__init__(
            model=model, optimizer=optimizer, **{k: v for k, v in kwargs.items() if k not in held}
        )
        for name, (value, handler) in held.items():
            setattr(self, name, value)
            self._handlers[name] = handler(value)
        for name, handler in self._handlers.items():
            if hasattr(handler.value, "_dgc"):
                self._handlers[name] = _Handler(handler.value)

    def save(self) -> None:
        """Called by ``commit()``, on all workers."""
        for handler in self._handlers.values():
            if isinstance(handler, _Handler) and handler.rounds is not None:
                handler.rounds.counted()
                handler.rounds.exchange()
        super().save()

    def on_reset(self) -> None:
        """Called by ``hvd.elastic.run`` when Horovod has begun anew."""
        for handler in self._handlers.values():
            if isinstance(handler, _Handler):
                engine_of(handler.value).compare_again()
        super().on_reset()


class _Handler(stock.OptimizerStateHandler):
    """Saves and restores the residuals with the rest of an optimizer's state."""

    def __init__(self, optimizer: Any):
        super().__init__(optimizer)
        engine_of(optimizer).compare_again()
        self._residuals = engine_of(optimizer).commit()
        self._round_step = 0

    @property
    def rounds(self) -> Rounds | None:
        """The rounds of an optimizer with local steps."""
        source = engine_of(self.value).source
        return source.rounds if isinstance(source, Drifts) else None

    def set_value(self, value: Any) -> None:
        engine_of(value).compare_again()
        super().set_value(value)

    def save(self) -> None:
        super().save()
        self._residuals = engine_of(self.value).commit()
        if self.rounds is not None:
            self._round_step = self.rounds.step

    def sync(self) -> None:
        if self.rounds is None:
            super().sync()
        else:
            # Horovod has a worker without state take a step, in which weights decay.
            parameters = [p for group in self.value.param_groups for p in group["params"]]
            before = [p.detach().clone() for p in parameters]
            super().sync()
            for p, value in zip(parameters, before, strict=True):
                p.data.copy_(value)
            self.rounds.forget()
            self.rounds.has_gradient = False
            self.rounds.step = hvd.broadcast_object(self.rounds.step)
        settings = engine_of(self.value).settings
        if is_known(settings.config.sparsity):
            settings.config = replace(
                settings.config, sparsity=hvd.broadcast_object(settings.config.sparsity)
            )

    def restore(self) -> None:
        engine = engine_of(self.value)
        engine.roll_back()
        # It takes the tensors that it is given, and steps change them; the commit may be wanted
        # again.
        self.value.load_state_dict(copy.deepcopy(self._saved_optimizer_state))
        engine.restore(self._residuals)
        if self.rounds is not None:
            self.rounds.step = self._round_step


class _StateDictHandler(stock.SamplerStateHandler):
    """Broadcasts a state dict, as of a sampler; without a handler each rank would make another
    object.
    """

    def restore(self) -> None:
        # The commit may be wanted again.
        self.value.load_state_dict(copy.deepcopy(self._saved_sampler_state))


class _ScalerHandler(_StateDictHandler):
    """Of a GradScaler."""

    def restore(self) -> None:
        super().restore()
        if self.value.is_enabled():
            self.value._per_optimizer_states.clear()  # of a step that failed after unscale_()
