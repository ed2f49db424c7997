"""A communication hook of torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dgc.config import Average, Config
from dgc.engine.backward import backward_task, gradients_of, uncompiled
from dgc.engine.engine import Engine, engine_of
from dgc.engine.settings import Settings
from dgc.engine.step import Phase
from dgc.frontends import checks
from dgc.frontends.facade import Distributed
from dgc.frontends.optimizer import Shared, connect, distributed_class, pickled_parts, take_over
from dgc.transport import find


def register_comm_hook(ddp_model: DistributedDataParallel, optimizer: torch.optim.Optimizer,
                       config: Config | None = None, *, grad_scaler: torch.amp.GradScaler | None = None) -> None:
    """Has a ``DistributedDataParallel`` model exchange compressed gradients, and its optimizer apply the updates.

    ::

        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        dgc.register_comm_hook(model, optimizer, dgc.Config(dgc.warmup(epochs=4, steps_per_epoch=len(loader))))

    The script stays as it is. The optimizer is changed in place: it has ``residual_state_dict``, ``flush`` and
    ``report`` from then on, and momentum and weight decay go as in :func:`dgc.DistributedOptimizer`. After
    ``backward()``, ``p.grad`` is the averaged update. ``no_sync()``, ``join()``, ``find_unused_parameters``,
    ``static_graph`` and ``gradient_as_bucket_view`` work as ever. A joined rank goes on sending what it has kept. A
    gradient that is not finite is a ``FloatingPointError`` of ``step()``, on all ranks.

    A model and an optimizer that were pickled come back unconnected: register them again.

    Args:
        ddp_model: wraps the model; no hook may be registered with it yet.
        optimizer: of all parameters of the model that require a gradient, and of no others: ``torch.optim.SGD``,
            ``AdamW``, or ``Adam`` without weight decay; any other, but LBFGS, with ``momentum_correction=False``.
        config: None means ``Config()``, 99.9 % without warm-up.
        grad_scaler: as for :func:`dgc.DistributedOptimizer`.

    Raises:
        TypeError, ValueError: an argument that is not as said above.
        RuntimeError: by torch, if there is a hook already.
    """
    _check_model(ddp_model, config)
    known = engine_of(optimizer) if hasattr(optimizer, "_dgc") else None  # from before: pickled, or with another model
    if known is None or not isinstance(known.source, DDPBuckets):
        known, config = None, Config() if config is None else config
        grad_scaler = checks.check_all(optimizer, config, Average, grad_scaler)
    else:
        config, grad_scaler = _checked_again(known.settings, config, grad_scaler)
    _check_parameters(ddp_model, optimizer)
    ddp_model.register_comm_hook(optimizer, exchange)  # first of all, as it may refuse
    if known is None:
        _change(optimizer, list(ddp_model.module.named_parameters()), config, ddp_model.process_group, grad_scaler)
    else:
        known.settings.transport, known.settings.config = find(ddp_model.process_group), config
        known.settings.grad_scaler = grad_scaler
        known.agreement.reached = False
        known.progress.begin()


@uncompiled
def exchange(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations other than its own
    """The hook that DDP calls with each of its buckets, in the same order on every rank."""
    engine = engine_of(state)
    return engine.source.receive(bucket, engine)  # type: ignore[attr-defined]  # of an optimizer that is registered


def _check_model(model: Any, config: Config | None) -> None:
    """Refuses what is no DistributedDataParallel, or exchanges in a way of its own."""
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"ddp_model must be a torch.nn.parallel.DistributedDataParallel, got a {type(model).__name__}")
    if model.mixed_precision is not None:
        raise ValueError("ddp_model must be without mixed_precision, which changes gradients in a hook of its own, got "
                         "one with it (use torch.autocast)")
    if getattr(config, "apply_directly", False):
        raise ValueError("Config: apply_directly must be False with DistributedDataParallel, which fills p.grad "
                         "itself, got True")


def _checked_again(before: Settings, config: Config | None, grad_scaler: Any) -> tuple[Config, Any]:
    """The config and the scaler of an optimizer that is registered once more: what it has been packed for stays."""
    config = before.config if config is None else config
    if replace(config, sparsity=0.0) != replace(before.config, sparsity=0.0):
        raise ValueError(f"config must be the one that the optimizer was registered with, {before.config!r}, but for "
                         f"the sparsity, got {config!r}")
    grad_scaler = checks.enabled_scaler(config, grad_scaler)
    if (grad_scaler is None) != (before.grad_scaler is None):
        raise ValueError("grad_scaler must be given for each model of an optimizer or for none, got both")
    return config, grad_scaler


def _check_parameters(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    held = {p for group in optimizer.param_groups for p in group["params"]}
    names = {p: name for name, p in model.module.named_parameters()}
    if missing := [name for p, name in names.items() if p.requires_grad and p not in held]:
        raise ValueError("the optimizer must have all parameters of ddp_model that require a gradient, got one that "
                         f"lacks {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}")
    if foreign := [tuple(p.shape) for p in held if p not in names]:
        raise ValueError("the optimizer must have parameters of ddp_model alone, got others too, of shapes "
                         f"{foreign[:5]}")


def _change(optimizer: Any, names: list[tuple[str, Tensor]], config: Config, group: Any, grad_scaler: Any) -> None:
    """Makes an optimizer one that DDP's hook drives, in place."""
    settings = Settings(config, find(group), names, process_set=group, grad_scaler=grad_scaler)
    scheduled = optimizer.__dict__.pop("step", None)  # a scheduler's, which knows torch's step alone
    optimizer.__class__ = distributed_class(type(optimizer), "dgc.frontends.ddp", _InDDP)
    optimizer._patch_step_function()
    connect(optimizer, checks.named(optimizer.param_groups, names), settings, DDPBuckets())
    if scheduled is not None:
        _follow(optimizer)


def _follow(optimizer: Any) -> None:
    """Tells a scheduler made earlier that step() was called, as its own patch of it did."""
    step = type(optimizer).step

    def followed(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    followed._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = followed


def _step_with_the_others(engine: Engine) -> None:
    """A rank that has no more data takes the step that its hook has exchanged, as the others do in their ``step()``.
    Torch would give it their parameters in the end, but no momentum, no squares of AdamW's, and no loss scale.
    """
    scaler, optimizer = engine.settings.grad_scaler, engine.parameters.optimizer
    if scaler is not None:
        scaler.scale(torch.zeros((), device=engine.parameters.device))  # it may never have been asked
        scaler.unscale_(optimizer)
    if engine.step.phase is Phase.EXCHANGED:
        engine.applier.apply(engine.step)
    if scaler is not None:
        scaler.update()


class _InDDP(Distributed):
    """The methods that differ where DDP's hook drives an optimizer."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """DDP has ``no_sync()`` for it."""
        if passes != 1:
            raise ValueError(f"passes must be 1 with DistributedDataParallel, got {passes!r} (to accumulate gradients, "
                             "call all but the last backward() within no_sync())")

    def zero_grad(self, *args: bool, **kwargs: bool) -> None:
        """As the wrapped optimizer's. What is zeroed between backward() and step() stays so, on all ranks."""
        engine_of(self).source.forget_updates()  # type: ignore[attr-defined]
        Distributed.zero_grad(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """As in :func:`dgc.DistributedOptimizer`; like DDP itself it comes back with the default process group."""
        inner, state, names, residuals, sparse = pickled_parts(self)
        settings = engine_of(self).settings
        return _rebuild, (inner, state, names, settings.config, Shared(settings.grad_scaler), residuals, sparse)


def _rebuild(inner: type[torch.optim.Optimizer], state: dict[str, Any], names: list[tuple[str, Tensor]],
             config: Config, grad_scaler: Shared, residuals: Any, sparse: Mapping[str, int]) -> Any:
    """Makes a copy; pickles call it."""
    optimizer: Any = inner.__new__(inner)
    optimizer.__setstate__(state)
    _change(optimizer, names, config, None, grad_scaler.value)
    take_over(optimizer, residuals, sparse)
    return optimizer


class DDPBuckets:
    """The gradients that DDP's buckets bring, and the updates that they take back."""

    ends_with_backward = True

    def __init__(self) -> None:
        self._lent: list[tuple[Tensor, Tensor | None]] = []  # parameter, its p.grad: a view of DDP's bucket meanwhile
        self._futures: list[tuple[torch.futures.Future[Tensor], Tensor, list[Tensor]]] = []
        self._updates: list[tuple[Tensor, Tensor | None, int, Tensor]] = []  # parameter, p.grad, its version, update
        self._task = -1  # torch's number of the backward pass that runs
        self._failed: FloatingPointError | None = None  # what the last backward pass found, until step() raises it

    def watch(self, parameters: Iterable[Tensor], engine: Engine) -> None:
        """DDP has hooks of its own."""

    def arrived(self, engine: Engine) -> None:
        """DDP's last bucket is the end."""

    def receive(self, bucket: Any, engine: Engine) -> torch.futures.Future[Tensor]:
        """A bucket's gradients are complete. The last bucket waits for the exchange of all."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        parameters, buffer = bucket.parameters(), bucket.buffer()
        if not engine.settings.exchanges:
            future.set_result(buffer)
            return future
        # In the first pass of a static graph with sparse gradients all buckets are number 0, and none is the last.
        unnumbered = bucket.index() == 0 and bool(self._futures) and backward_task() == self._task != -1
        if bucket.index() == 0 and not unnumbered:
            self._begin_pass(engine)
        self._futures.append((future, buffer, parameters))
        try:
            used = [(p, g) for p, g in zip(parameters, gradients_of(bucket, parameters), strict=True)
                    if p.requires_grad]  # the others were frozen since the model was wrapped; theirs are zeros
            for p, g in used:
                self._lent.append((p, p.grad))
                p.grad = g
            for p, _ in used:
                engine.arrived(p)
            if bucket.is_last() or (unnumbered and not self._missing(engine)):
                self._end_pass(engine)
        except BaseException as error:
            self._fail(engine, error)
            raise
        return future

    def _begin_pass(self, engine: Engine) -> None:
        self._raise_failed()
        if engine.step.waits_for_update:
            raise AssertionError("backward() was called again before step(), and what it adds to is an update that was "
                                 "exchanged already. To accumulate gradients, call all but the last backward() within "
                                 "no_sync(); so too a backward() whose gradients of this model are not to be applied, "
                                 "as where another model's loss runs through it.")
        self._lent, self._futures, self._updates, self._task = [], [], [], backward_task()

    def _missing(self, engine: Engine) -> list[str]:
        """The parameters that have had no gradient in this step."""
        return [engine.parameters.names[p] for p in engine.parameters.listed
                if p.requires_grad and p not in engine.step.fired]

    def _end_pass(self, engine: Engine) -> None:
        """The last bucket has come."""
        if strange := self._missing(engine):
            raise RuntimeError(f"DistributedDataParallel does not exchange {', '.join(strange[:5])}: when it "
                               "was made it did not hold them, or they were frozen. Make it anew, and register "
                               "it with the same optimizer: dgc.register_comm_hook(model, optimizer, config)")
        steps = backward_task() != -1  # else DDP calls for a rank that has no more data
        try:
            engine.exchange()
        except FloatingPointError as error:  # on all ranks; DDP must end its pass, or it could make no other
            if not steps:
                raise
            self._failed = error
        if not steps and self._failed is None:
            _step_with_the_others(engine)
        self._hand_back(engine)
        if not steps:
            engine.give_up()

    def _fail(self, engine: Engine, error: BaseException) -> None:
        """Gives DDP its gradients back, and the error."""
        for p, grad in self._lent:
            p.grad = grad
        self._lent.clear()
        engine.give_up()
        for waiting, _, _ in self._futures[:-1]:  # or DDP would wait for them
            waiting.set_exception(RuntimeError(repr(error)))  # type: ignore[arg-type]
        self._futures.clear()

    def _hand_back(self, engine: Engine) -> None:
        """Gives DDP the updates, and the parameters their p.grad, into which DDP will copy."""
        sparse = {}
        engine.misuse.forget()
        for p, grad in self._lent:
            update, p.grad = p.grad, grad
            if update is None:  # the step is skipped
                continue
            if update.is_sparse:
                sparse[p] = update
                continue
            shared = grad is not None and not grad.is_sparse and grad.data_ptr() == update.data_ptr()
            if not shared:
                self._updates.append((p, grad, -1 if grad is None else grad._version, update))
            if grad is not None:  # which DDP will copy into, once
                engine.misuse.note_copy(p, grad, copies=int(not shared))
        self._lent.clear()
        for future, buffer, parameters in self._futures:
            future.set_result(sparse.get(parameters[0], buffer))
        self._futures.clear()

    def forget_updates(self) -> None:
        """Gradients are zeroed: those that no rank used are not to be filled in."""
        self._updates = []

    def has_step(self, engine: Engine) -> bool:
        """A step() before any backward(), to quiet a scheduler's warning, is none in torch either."""
        return (not engine.settings.exchanges or engine.step.exchanged or self._failed is not None
                or any(p.grad is not None for p in engine.parameters.listed))

    def synchronize(self, engine: Engine) -> None:
        """Has been done by ``backward()``; where a gradient was not finite it is said here."""
        self._raise_failed()
        if not engine.settings.exchanges:
            engine.exchange()
        elif not engine.step.exchanged:
            raise RuntimeError("nothing was exchanged since the last step(), and there are gradients: those of that "
                               "step, of backward() within no_sync() only, or of a DistributedDataParallel that was "
                               "made anew and not registered (dgc.register_comm_hook(model, optimizer, config))")

    def _raise_failed(self) -> None:
        error, self._failed = self._failed, None
        if error is not None:
            raise error

    def before_update(self, engine: Engine) -> None:
        """Fills in the updates of parameters that DDP has left alone."""
        self.synchronize(engine)
        for p, grad, version, update in self._updates:
            if p.grad is grad and (grad is None or grad._version == version):
                # No rank used it in this pass, so DDP left p.grad alone: but there is an update of what was pending.
                # A fused step that has the loss's scale takes it out for itself.
                fused = getattr(engine.parameters.optimizer, "grad_scale", None) is not None
                inverse = None if fused else engine.step.inverse
                p.grad = update.clone() if inverse is None else update * inverse.tensor.to(update)
                engine.misuse.forget(p)
        self._updates = []
