"""A communication hook of torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dgc.collective import Collective
from dgc.config import Average, Config
from dgc.engine.backward import at_end_of_backward, gradients_of, graph_task_id, uncompiled
from dgc.engine.engine import Engine, engine_of
from dgc.engine.parameters import to_local
from dgc.engine.settings import Settings
from dgc.engine.step import GradientVersion, Phase, Step, is_unchanged, version_of
from dgc.frontends import checks
from dgc.frontends.facade import Distributed
from dgc.frontends.local import Local, connect_rounds
from dgc.frontends.optimizer import Shared, connect, distributed_class, reduced
from dgc.paths.sparse import reduce_sparse
from dgc.transport import find
from dgc.transport.run import PathRun
from dgc.warn import warn

EXCHANGED_AGAIN = (
    "backward() exchanges more than once for each step(), and each exchange sends a message (run all backward passes "
    "but the last within model.no_sync())"
)


def register_comm_hook(
    ddp_model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    config: Config | None = None,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Has a ``DistributedDataParallel`` model exchange compressed gradients, and its optimizer
    apply the updates.

    ::

        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        dgc.register_comm_hook(model, optimizer, dgc.Config(dgc.warmup(steps=steps)))  # of the whole training

    The rest of the script stays as it is. The optimizer is changed in place: it gets
    ``residual_state_dict``, ``flush`` and ``report``, and handles momentum and weight decay as
    :func:`dgc.DistributedOptimizer` does. After ``backward()``, ``p.grad`` is the averaged
    gradient; in compressed steps it is the averaged update.

    - ``no_sync()``, ``join()``, ``find_unused_parameters``, ``static_graph`` and
      ``gradient_as_bucket_view`` work as without the hook. A joined rank goes on sending what it
      has kept.
    - A gradient that is not finite raises ``FloatingPointError`` in ``step()``, on all ranks.
    - If ``backward()`` is called twice before ``step()``, the gradients add up, as in torch.
    - A pickled model and its pickled optimizer come back unconnected: register them again.
    - Several optimizers may share a model, and an optimizer may have several models: register each
      pair.
    - Parameters of the model that no registered optimizer has travel dense; with ``local_steps``
      they are refused.
    - Parameters of the optimizer that are in no such model are stepped with the gradients that they
      have.

    Args:
        ddp_model: wraps the model. It must not have a hook of another kind.
        optimizer: the one whose ``step()`` is called. It has parameters of the model.
            ``torch.optim.SGD``, ``AdamW``, or ``Adam`` without weight decay; any other, but LBFGS,
            with ``momentum_correction=False`` or ``sparsity=0.0``. With ``local_steps``: any of
            torch's.
        config: None means ``Config()``.
        grad_scaler: as for :func:`dgc.DistributedOptimizer`.

    Raises:
        TypeError, ValueError: an argument is not as said above.
        RuntimeError: by torch, if there is a hook already.
    """
    _check_model(ddp_model)
    # Registered before: with another model, or unpickled.
    known = engine_of(optimizer) if hasattr(optimizer, "_dgc") else None
    if known is None or not isinstance(known.source, DDPGradients):
        known, config = None, Config() if config is None else config
        grad_scaler = checks.check_all(optimizer, config, Average, grad_scaler)
    else:
        config, grad_scaler = _checked_again(known.settings, config, grad_scaler)
    _check_shared(ddp_model, optimizer, known)
    names, group = list(ddp_model.module.named_parameters()), ddp_model.process_group
    if config.local_steps is not None:  # an optimizer that is known has none: that is refused above
        own = _local.get(ddp_model)
        if own is None:
            own = OwnGradients(ref(ddp_model))
            ddp_model.register_comm_hook(own, keep)
            _local[ddp_model] = own
        _change(optimizer, names, config, group, None, None)
        own.take(optimizer)
        return
    buckets = _registered.get(ddp_model)
    if buckets is None:
        buckets = ModelBuckets(ddp_model)
        ddp_model.register_comm_hook(buckets, exchange)  # first of all, as it may refuse
        _registered[ddp_model] = buckets
    if known is None:
        _change(optimizer, names, config, group, grad_scaler, DDPGradients(buckets))
    else:
        _add_model(known, ddp_model, buckets, config, grad_scaler)
    buckets.take(optimizer)


@dataclass
class OwnGradients:
    """The state of the hook of local steps."""

    model: ref[DistributedDataParallel]
    optimizers: list[ref[Any]] = field(default_factory=list)
    machine: Any = None  # the group of this rank's machine, with hierarchical
    is_checked: bool = False

    def take(self, optimizer: Any) -> None:
        """Has one more optimizer step parameters of the model."""
        self.optimizers.append(ref(optimizer))
        self.machine, self.is_checked = _machine_of(optimizer), False

    def check(self) -> None:
        """Refuses parameters that are in no round, and would differ from rank to rank."""
        optimizers, model = [each() for each in self.optimizers], self.model()
        held = {p for each in optimizers if each for g in each.param_groups for p in g["params"]}
        named = [] if model is None else model.module.named_parameters()
        if others := [name for name, p in named if p.requires_grad and p not in held]:
            raise ValueError(
                "with local_steps each parameter of ddp_model must be of an optimizer that is registered, got "
                f"none for {_some(others)} (register each optimizer, or freeze the parameters)"
            )
        self.is_checked = True


_local: WeakKeyDictionary[DistributedDataParallel, OwnGradients] = WeakKeyDictionary()


def _machine_of(optimizer: Any) -> Any:
    """The group of this rank's machine, if its ranks take steps together."""
    engine = engine_of(optimizer)
    transport: Any = engine.settings.transport
    return None if engine.group_by_machine().node_size == 1 else transport.machine


@uncompiled
def keep(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations other than its own
    """The hook of local steps: each rank keeps its own gradients, or its machine's mean."""
    if state.model()._join_config.enable:
        raise ValueError(
            "join() must not be used with local_steps, got a backward pass within it (give all ranks the "
            "same number of batches)"
        )
    if not state.is_checked:
        state.check()
    if state.machine is not None:
        return allreduce_hook(state.machine, bucket)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_registered: WeakKeyDictionary[DistributedDataParallel, ModelBuckets] = WeakKeyDictionary()


@uncompiled
def exchange(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations other than its own
    """The hook that DDP calls with each of its buckets, in the same order on every rank."""
    return state.receive(bucket)


def _check_model(model: Any) -> None:
    """Refuses what is no DistributedDataParallel, or exchanges in a way of its own."""
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"ddp_model must be a torch.nn.parallel.DistributedDataParallel, got a {type(model).__name__}"
        )
    if model.mixed_precision is not None:
        raise ValueError(
            "ddp_model must be without mixed_precision, which changes gradients in a hook of its own, got "
            "one with it (use torch.autocast)"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ValueError(
            "ddp_model must have the reducer of C++, which calls this hook, got one made under "
            "torch._dynamo.config.optimize_ddp = 'python_reducer' (leave that setting out)"
        )


def _checked_again(before: Settings, config: Config | None, grad_scaler: Any) -> tuple[Config, Any]:
    """The config and the scaler of an optimizer that is registered once more. All but the sparsity
    must stay.
    """
    config = before.config if config is None else config
    if replace(config, sparsity=0.0) != replace(before.config, sparsity=0.0):
        raise ValueError(
            f"config must be the one that the optimizer was registered with, {before.config!r}, but for "
            f"the sparsity, got {config!r}"
        )
    if config.compresses and not before.config.compresses:
        raise ValueError(
            f"config must have the sparsity 0.0, with which the optimizer was registered, got {config!r} "
            "(register it with a schedule that begins with 0.0)"
        )
    grad_scaler = checks.enabled_scaler(grad_scaler)
    if (grad_scaler is None) != (before.grad_scaler is None):
        raise ValueError(
            "grad_scaler must be given for each model of an optimizer or for none, got both"
        )
    return config, grad_scaler


def _check_shared(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, known: Engine | None
) -> None:
    """Refuses an optimizer and a model that have nothing to do with each other, or that share too
    little.
    """
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if not any(p.requires_grad and p in held for p in model.module.parameters()):
        raise ValueError(
            "the optimizer must have a parameter of ddp_model that requires a gradient, got none (give "
            "the optimizer that steps this model)"
        )
    models = (
        {model}
        if known is None
        else {model, *(one.model for one in _source(known).models)} - {None}
    )
    if len(models) > 1 and any(one.static_graph for one in models if one is not None):
        raise ValueError(
            "ddp_model must have static_graph=False where an optimizer has several models, got True"
        )
    if _registered.get(model) is not None and optimizer in _registered[model].optimizers:
        raise RuntimeError(
            "register_comm_hook() must be called once for a model and an optimizer, got a second call"
        )


def _change(
    optimizer: Any,
    names: list[tuple[str, Tensor]],
    config: Config,
    group: Any,
    grad_scaler: Any,
    source: DDPGradients | None,
) -> None:
    """Makes an optimizer one that DDP's hook drives, in place; without a source, one that takes
    local steps.
    """
    settings = Settings(
        config, find(group), names, process_set=group, grad_scaler=grad_scaler, in_ddp=True
    )
    # A scheduler's, which knows torch's step alone.
    scheduled = optimizer.__dict__.pop("step", None)
    methods = _LocalInDDP if source is None else _InDDP
    optimizer.__class__ = distributed_class(type(optimizer), "dgc.frontends.ddp", methods)
    optimizer._patch_step_function()
    name_of = checks.named(optimizer.param_groups, names, generate=True)
    if source is None:
        connect_rounds(optimizer, name_of, settings)
    else:
        connect(optimizer, name_of, settings, source)
    if scheduled is not None:
        _follow(optimizer)


def _add_model(
    engine: Engine,
    model: DistributedDataParallel,
    buckets: ModelBuckets,
    config: Config,
    grad_scaler: Any,
) -> None:
    """Has an optimizer exchange the gradients of one more model, or of one that was made anew."""
    settings, source, names = engine.settings, _source(engine), engine.names
    settings.transport, settings.config, settings.grad_scaler = (
        find(model.process_group),
        config,
        grad_scaler,
    )
    taken = {name for p, name in names.items() if p in engine.listed}
    for name, p in model.module.named_parameters():
        if p in names and p not in engine.listed:
            names[p] = name if name not in taken else f"{name}#{len(source.models)}"
    source.models[:] = [*(known for known in source.models if known.model is not None), buckets]
    engine.register_groups(engine.optimizer.param_groups)
    engine.compare_again()
    engine.begin()


def _follow(optimizer: Any) -> None:
    """Tells a scheduler that was made earlier when step() is called, as the scheduler's own patch
    did.
    """
    step = type(optimizer).step

    def followed(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    followed._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = followed


def _step_with_the_others(engine: Engine) -> None:
    """A rank that has no more data takes the step that its hook has exchanged, as the others do in
    their ``step()``. Torch would give it their parameters in the end, but no momentum, no squares
    of AdamW's, and no loss scale.
    """
    engine.raise_found()
    scaler, optimizer = engine.settings.grad_scaler, engine.optimizer
    if scaler is not None:
        # It may never have been asked.
        scaler.scale(torch.zeros((), device=next(iter(engine.listed)).device))
        scaler.unscale_(optimizer)
    if engine.step.phase is Phase.EXCHANGED:
        engine.apply()
    if scaler is not None:
        scaler.update()


class _InDDP(Distributed):
    """The methods that differ where DDP's hook drives an optimizer."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """DDP has ``no_sync()`` for it."""
        if passes != 1:
            raise ValueError(
                f"passes must be 1 with DistributedDataParallel, got {passes!r} (to accumulate gradients, "
                "call all but the last backward() within no_sync())"
            )

    def zero_grad(self, *args: bool, **kwargs: bool) -> None:
        """As the wrapped optimizer's. An update that waits for step() is dropped."""
        engine = engine_of(self)
        if engine.step.phase is Phase.COLLECTING:  # DDP has not ended its pass
            engine.abort_step()
        _source(engine).updates.clear()
        Distributed.zero_grad(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """As in :func:`dgc.DistributedOptimizer`; like DDP itself it comes back with the default
        process group.
        """
        engine = engine_of(self)
        return reduced(
            self,
            _connect_again,
            {
                "config": engine.settings.config,
                "grad_scaler": Shared(engine.settings.grad_scaler),
                "brought": [engine.names[p] for p in engine.listed],
            },
        )


def _connect_again(
    optimizer: Any,
    names: list[tuple[str, Tensor]],
    config: Config,
    grad_scaler: Shared,
    brought: list[str],
) -> Any:
    source = DDPGradients(of_copy={p for name, p in names if name in set(brought)})
    _change(optimizer, names, config, None, grad_scaler.value, source)
    return optimizer


class _LocalInDDP(Local):
    """The methods of an optimizer with local steps, of parameters of a DistributedDataParallel."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """See :func:`dgc.frontends.optimizer.reduced`."""
        return reduced(self, _connect_local_again, {"config": engine_of(self).settings.config})


def _connect_local_again(optimizer: Any, names: list[tuple[str, Tensor]], config: Config) -> Any:
    _change(optimizer, names, config, None, None, None)
    return optimizer


class DDPGradients:
    """The gradients of an optimizer that the buckets of its models bring, and the updates that they
    leave to it.

    Args:
        models: of which it has parameters.
        of_copy: the parameters of a copy, which has no models until it is registered again.
    """

    ends_with_backward, waits_for_all = True, False

    def __init__(self, *models: ModelBuckets, of_copy: set[Tensor] | None = None):
        self.models, self._of_copy = list(models), of_copy or set()
        # Parameter -> p.grad as it was, update.
        self.updates: dict[Tensor, tuple[GradientVersion, Tensor]] = {}
        self._warned = False  # that a step has had several exchanges

    def warn_of_exchanges(self, step: Step) -> None:
        """Says once that one step() has several exchanges, if an earlier update is in ``p.grad``."""
        if not self._warned and any(step.holds.values()):
            self._warned = True
            warn(EXCHANGED_AGAIN)

    def brings(self, parameter: Tensor) -> bool:
        """See :class:`dgc.engine.engine.GradientSource`."""
        return parameter in self._of_copy or any(
            parameter in model.parameters for model in self.models
        )

    def watch(self, parameters: Iterable[Tensor], engine: Engine) -> None:
        """DDP has hooks of its own."""

    def has_step(self, engine: Engine) -> bool:
        """A step() before any backward(), to quiet a scheduler's warning, is none in torch either."""
        return (
            not engine.settings.exchanges
            or engine.step.exchanged
            or any(
                p.grad is not None
                for group in engine.optimizer.param_groups
                for p in group["params"]
            )
        )

    def synchronize(self, engine: Engine) -> None:
        """Only checks: ``backward()`` has exchanged."""
        if not engine.settings.exchanges:
            engine.exchange()
        if engine.step.exchanged:
            return
        idle = engine.step.phase is Phase.IDLE
        if idle and engine.is_dense:
            return  # as in torch, whatever is in p.grad
        if idle and not any(p.grad is not None and bool(p.grad.any()) for p in engine.listed):
            return  # a script has dropped them
        without = [
            engine.names[p]
            for p in engine.listed
            if p.requires_grad and (p.grad is None if idle else p not in engine.step.with_gradient)
        ]
        if without:
            raise RuntimeError(
                "backward() must reach every parameter of a DistributedDataParallel, got no gradient "
                f"for {_some(without)}, so that DDP has exchanged nothing, or not all (give it "
                "find_unused_parameters=True)"
            )
        raise RuntimeError(
            "nothing was exchanged since the last step(), and there are gradients: those of that "
            "step, of a forward and backward pass within no_sync() only, of a forward pass of "
            "model.module in place of model, or of a DistributedDataParallel that was made anew and not "
            "registered (dgc.register_comm_hook(model, optimizer, config))"
        )

    def before_update(self, engine: Engine) -> None:
        """Writes the updates of parameters that no rank has used in this step. DDP leaves their
        ``p.grad`` alone, but their v was sent.
        """
        self.synchronize(engine)
        for p, (grad, update) in self.updates.items():
            if is_unchanged(grad, p.grad):  # a script has left it alone, too
                # A fused step that has the loss's scale takes it out for itself.
                fused = getattr(engine.optimizer, "grad_scale", None) is not None
                inverse = None if fused else engine.step.inverse
                p.grad = update.clone() if inverse is None else update * inverse.tensor.to(update)
                engine.step.versions.pop(p, None)
        self.updates.clear()


@dataclass
class _Pass:
    """One backward pass through a model."""

    graph_task_id: int = -1  # torch's number of it
    complete: bool = False  # the last bucket has come
    # Parameter, its p.grad meanwhile.
    lent: list[tuple[Tensor, Tensor | None, Engine]] = field(default_factory=list)
    # Parameter, gradient, that no optimizer applies.
    others: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    futures: list[tuple[torch.futures.Future[Tensor], Tensor, list[Tensor]]] = field(
        default_factory=list
    )


class ModelBuckets:
    """DDP's buckets of one model, in one backward pass: the state of :func:`exchange`. A copy, as
    of the model in a pickle, has neither model nor optimizers.

    Args:
        model: whose buckets.
    """

    def __init__(self, model: DistributedDataParallel | None = None):
        self._model = None if model is None else ref(model)
        self.parameters: set[Tensor] = set() if model is None else set(model.module.parameters())
        self.optimizers: list[torch.optim.Optimizer] = []
        self._pass = _Pass()
        # Whether p.grad was something when a backward pass came to it.
        self._had: dict[Tensor, bool] = {}
        if model is not None and model.gradient_as_bucket_view:
            self._watch()

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelBuckets, ()

    @property
    def model(self) -> DistributedDataParallel | None:
        """The model, while it is alive."""
        return None if self._model is None else self._model()

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Registers an optimizer, in place of one that had the same parameters."""
        own = set(engine_of(optimizer).listed)
        for other in [one for one in self.optimizers if not own.isdisjoint(engine_of(one).listed)]:
            self.optimizers.remove(other)
            _source(engine_of(other)).models.remove(self)
        self.optimizers.append(optimizer)

    @property
    def _engines(self) -> list[Engine]:
        return [engine_of(optimizer) for optimizer in self.optimizers]

    def _watch(self) -> None:
        """Notes at each backward pass whether ``p.grad`` was dropped since the last exchange.
        Afterwards that cannot be seen, where ``p.grad`` is a view of DDP's bucket.
        """
        alive = ref(self)

        def note(parameter: Tensor) -> None:
            buckets = alive()
            if buckets is not None and any(
                engine.step.has_earlier_update for engine in buckets._engines
            ):
                buckets._had[parameter] = parameter.grad is not None and bool(parameter.grad.any())

        for parameter in self.parameters:
            if parameter.requires_grad:
                parameter.register_hook(uncompiled(lambda _, p=parameter: note(p)))

    def receive(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Takes a bucket whose gradients are complete. The last bucket waits for the exchange of
        all.
        """
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        parameters, buffer, engines = bucket.parameters(), bucket.buffer(), self._engines
        if not any(engine.settings.exchanges for engine in engines):
            future.set_result(buffer)
            return future
        # In the first pass of a static graph with sparse gradients all buckets are number 0, and
        # none is the last.
        unnumbered = (
            bucket.index() == 0
            and bool(self._pass.futures)
            and graph_task_id() == self._pass.graph_task_id != -1
        )
        if bucket.index() == 0 and not unnumbered:
            self._begin_pass()
        self._pass.futures.append((future, buffer, parameters))
        try:
            for p, engine in self._lend(parameters, gradients_of(bucket, parameters), engines):
                engine.arrived(p)
            if bucket.is_last() or (unnumbered and not self._missing()):
                self._end_model()
        except BaseException as error:
            self._fail(error)
            raise
        return future

    def _begin_pass(self) -> None:
        model = self.model
        if (
            model is not None
            and model._join_config.enable
            and not model._divide_by_initial_world_size
        ):
            raise ValueError(
                "join() must have divide_by_initial_world_size=True with compressed gradients, got False"
            )
        self._pass = _Pass(graph_task_id())

    def _lend(
        self, parameters: list[Tensor], gradients: list[Tensor], engines: list[Engine]
    ) -> list[tuple[Tensor, Engine]]:
        """Makes the bucket's gradients those of its parameters, until the pass ends."""
        lent = []
        for p, g in zip(parameters, gradients, strict=True):
            if not p.requires_grad:  # frozen since the model was wrapped: zeros
                continue
            engine = next((engine for engine in engines if p in engine.listed), None)
            if engine is None:
                self._pass.others.append((p, g))
                continue
            step = engine.step
            if step.has_earlier_update:
                step.holds[p] = (
                    self._had.pop(p, p.grad is not None)
                    if self._views
                    else step.holds_update(p, engine.names[p], [0, 1])
                )
            self._pass.lent.append((p, p.grad, engine))
            p.grad = g
            lent.append((p, engine))
        return lent

    @property
    def _views(self) -> bool:
        return self.model is not None and self.model.gradient_as_bucket_view

    def _missing(self) -> list[str]:
        """The parameters that have had no gradient in this step."""
        return [
            engine.names[p]
            for engine in self._engines
            for p in engine.listed
            if p in self.parameters and p.requires_grad and p not in engine.step.with_gradient
        ]

    def _end_model(self) -> None:
        """Called at the last bucket. The exchange waits for the other models of the same
        optimizers, if their buckets come in this backward pass.
        """
        skips = getattr(self.model, "skip_all_reduce_unused_params", False)
        if (strange := self._missing()) and not skips:
            raise RuntimeError(
                f"DistributedDataParallel does not exchange {_some(strange)}: when it "
                "was made it did not hold them, or they were frozen. Make it anew, and register "
                "it with the same optimizer: dgc.register_comm_hook(model, optimizer, config)"
            )
        self._pass.complete = True
        if all(model._pass.complete for model in self._connected()):
            self._end_pass()
        elif graph_task_id() == -1:
            raise RuntimeError(
                "join() must not be used where an optimizer has several models, got a rank without data"
            )
        else:
            at_end_of_backward(self._end_pass)

    def _connected(self) -> list[ModelBuckets]:
        """This model, and those that share an optimizer with it."""
        found = [self]
        for model in found:
            for engine in model._engines:
                found += [
                    other
                    for other in _source(engine).models
                    if other not in found and other.model is not None
                ]
        return found

    def _end_pass(self) -> None:
        """Exchanges the gradients of all models that this backward pass has reached."""
        models = [model for model in self._connected() if model._pass.futures]
        steps = graph_task_id() != -1  # else DDP calls for a rank that has no more data
        engines = list(dict.fromkeys(engine for model in models for engine in model._engines))
        for engine in engines:
            if engine.step.phase is Phase.COLLECTING:
                _source(engine).warn_of_exchanges(engine.step)
                engine.exchange()
            if not steps:
                _step_with_the_others(engine)
        for model in models:
            model._hand_back(model._average_others(engines[0]))
        if not steps:
            for engine in engines:
                engine.abort_step()
        elif any(_source(engine).updates for engine in engines):
            # DDP writes p.grad at the end, too, and has asked for that later than this, but before
            # the inner call.
            at_end_of_backward(lambda: at_end_of_backward(lambda: _keep_unwritten(engines)))

    def _average_others(self, engine: Engine) -> dict[Tensor, Tensor]:
        """Averages the gradients that no registered optimizer applies, as DDP does. Returns the
        sparse ones.
        """
        transport, world = engine.settings.transport, engine.settings.world
        sparse, by_kind = dict[Tensor, Tensor](), dict[Any, list[Tensor]]()
        for p, g in self._pass.others:
            if g.is_sparse:
                name = f"dgc.others.sparse.{len(sparse)}"
                sparse[p] = (
                    PathRun(reduce_sparse(name, g, world), transport, name, lambda _: None)
                    .finish()
                    .tensor
                )
            else:
                by_kind.setdefault((g.dtype, g.device), []).append(to_local(g))
        for number, together in enumerate(by_kind.values()):
            flat = torch.cat([g.reshape(-1) for g in together]).div_(world.size)
            total = transport.start(Collective("all_reduce", flat), f"dgc.others.{number}")()
            for g, part in zip(together, total.split([g.numel() for g in together]), strict=True):
                g.copy_(part.view(g.shape))
        return sparse

    def _fail(self, error: BaseException) -> None:
        """Gives DDP its gradients back, and the error."""
        for model in self._connected():
            for p, grad, _ in model._pass.lent:
                p.grad = grad
            futures = model._pass.futures
            waiting = futures[:-1] if model is self else futures  # or DDP would wait for them
            for future, _, _ in waiting:
                future.set_exception(RuntimeError(repr(error)))  # type: ignore[arg-type]
            model._pass = _Pass()
        for engine in self._engines:
            engine.abort_step()

    def _hand_back(self, sparse: dict[Tensor, Tensor]) -> None:
        """Gives DDP the updates, and the parameters their p.grad, into which DDP will copy.

        Args:
            sparse: parameter -> its averaged sparse gradient, where no registered optimizer has it.
        """
        for p, grad, engine in self._pass.lent:
            update, p.grad = p.grad, grad
            updates, noted = _source(engine).updates, engine.step.versions
            updates.pop(p, None)
            noted.pop(p, None)
            if update is None:
                continue
            if update.is_sparse:
                sparse[p] = update
                continue
            shared = (
                grad is not None and not grad.is_sparse and grad.data_ptr() == update.data_ptr()
            )
            if not shared and not engine.step.stock:
                updates[p] = version_of(grad), update
            if grad is not None:  # which DDP will copy into, once
                noted[p] = version_of(grad, writes=int(not shared))
        for future, buffer, parameters in self._pass.futures:
            future.set_result(sparse.get(parameters[0], buffer))
        self._pass = _Pass()


def _source(engine: Engine) -> DDPGradients:
    """The source of an engine's gradients, where DDP brings them."""
    assert isinstance(engine.source, DDPGradients)
    return engine.source


def _keep_unwritten(engines: list[Engine]) -> None:
    """Keeps the updates of parameters that no rank has used: DDP has written ``p.grad`` of the
    others.
    """
    for engine in engines:
        updates = _source(engine).updates
        for p, (grad, _) in list(updates.items()):
            if not is_unchanged(grad, p.grad):
                del updates[p]


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
