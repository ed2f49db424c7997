"""The optimizer that takes the place of Horovod's.

``DistributedOptimizer`` makes an instance of a class that inherits from the optimizer it is given,
as Horovod's does: ``isinstance(optimizer, torch.optim.SGD)`` holds, and schedulers and scalers see
the optimizer that they know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from dgc.config import Average, Config
from dgc.engine.backward import uncompiled
from dgc.engine.engine import Engine, GradientSource, Hooks, engine_of
from dgc.engine.settings import Settings
from dgc.frontends import checks
from dgc.frontends.facade import Distributed
from dgc.frontends.local import Local, average_in_machine, connect_rounds
from dgc.transport import ProcessSet, find
from dgc.warn import warn


class HorovodCompressor(Protocol):
    """One of ``horovod.torch.Compression``."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]: ...

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor: ...


def DistributedOptimizer(  # noqa: N802, PLR0913 (Horovod's name and arguments)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Config | HorovodCompressor | None = None,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = None,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Distributed:
    """Wraps an optimizer so that ranks exchange compressed gradients, in place of
    ``hvd.DistributedOptimizer``.

    The exchange begins while ``loss.backward()`` runs. ``step()`` waits for it and applies the
    averaged update. With a single process, or outside the process set, it is the plain optimizer.

    Args:
        optimizer: ``torch.optim.SGD``, ``AdamW``, or ``Adam`` without weight decay; any other, but
            LBFGS, with ``momentum_correction=False``. With ``local_steps``: any of torch's.
        named_parameters: usually ``model.named_parameters()``. The residuals are kept by these
            names. Without them, names are made from the order of the parameters.
        compression: a :class:`dgc.Config`; None means ``Config()``. With
            ``hvd.Compression.none`` or ``fp16`` this is Horovod's own optimizer.
        backward_passes_per_step: how many backward passes add up to one step.
        op: ``Average`` or ``Sum``, of this package or of Horovod.
        gradient_predivide_factor: with Average, divides before the sum and multiplies after it. It
            changes nothing for gradients that travel sparse, as these are added up in float32 or
            wider.
        num_groups: Horovod's deprecated name for an integer ``groups``.
        groups: how to bucket the gradients: a number of groups, or a list of lists of parameters.
            None: by size.
        sparse_as_dense: treat sparse gradients as dense ones (and so compress them).
        process_set: a ``hvd.ProcessSet`` or a ``torch.distributed.ProcessGroup``; None means all
            processes. For parameters that ``fully_shard`` has split over the ranks of a node, give
            the ranks that hold the same shard, one in each node. Then ``fully_shard`` averages
            gradients within a node, and a rank exchanges and keeps the residuals of its shard.
            ``FloatingPointError`` is raised where the shard has the bad gradient.
        grad_scaler: the ``torch.amp.GradScaler`` that scales the loss. Gradients are accumulated
            without its scale. An overflow on any rank makes every rank skip the step. The exchange
            then ends with ``backward()``, and ``p.grad`` is the averaged update times the scale, as
            the scaler expects it.

    Returns:
        An optimizer of the same class. It has ``synchronize``, ``skip_synchronize`` and
        ``set_backward_passes_per_step``, as Horovod's, and ``flush``, ``report``,
        ``residual_state_dict`` and ``load_residual_state_dict``.

    Raises:
        ValueError, TypeError: an argument is not as said above.
        RuntimeError: neither Horovod nor torch.distributed is initialised.
        ValueError: at the first step, on all ranks, if the ranks do not train the same; the error
            names the first difference.
    """
    _check_as_horovod(gradient_predivide_factor, op, backward_passes_per_step)
    if num_groups != 0:
        warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
        )
        groups = num_groups if groups is None else groups
    if hasattr(compression, "compress") and hasattr(compression, "decompress"):
        if checks.enabled_scaler(grad_scaler) is not None:
            raise ValueError(
                "grad_scaler must be None where compression is Horovod's, whose optimizer does not know "
                "of it, got one (call synchronize() before scaler.step() instead)"
            )
        import horovod.torch as hvd  # whose compressor this is

        stock: Distributed = hvd.DistributedOptimizer(
            optimizer,
            named_parameters,
            compression,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set or hvd.global_process_set,
        )
        if hvd.rank() == 0:
            warn(
                "compression is Horovod's, and so is all of this optimizer: leave it out, or give a dgc.Config, for "
                "Deep Gradient Compression"
            )
        return stock
    config = Config() if compression is None else compression
    grad_scaler = checks.check_all(optimizer, config, op, grad_scaler)
    if isinstance(named_parameters, Config):
        raise TypeError(
            "DistributedOptimizer: named_parameters must be model.named_parameters(), got a Config (give "
            "that as compression=)"
        )
    given_names = None if named_parameters is None else list(named_parameters)
    names = checks.named(optimizer.param_groups, given_names)
    checks.check_groups(groups)
    # Last of all, so that errors in the arguments are raised before hvd.init() too.
    transport = find(process_set)
    checks.check_shards(optimizer.param_groups, process_set, config, grad_scaler)
    settings = Settings(
        config,
        transport,
        given_names,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
        grad_scaler,
    )
    return _wrapped(optimizer, names, settings, backward_passes_per_step, grad_scaler)


def _check_as_horovod(
    gradient_predivide_factor: float, op: int, backward_passes_per_step: int
) -> None:
    """Horovod's checks, in its order and words."""
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")


def _wrapped(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str], settings: Settings, *given: Any
) -> Distributed:
    """A distributed optimizer with the defaults, state, hooks and groups of a plain one."""
    steps = settings.config.local_steps
    methods: Any = _Hooked if steps is None else _LocalHooked
    cls: Any = distributed_class(type(optimizer), settings.transport.optimizer_module, methods)
    wrapped: Any = cls.__new__(cls)
    # A scheduler may have patched ``step`` on the instance; that one would step the optimizer
    # within, not this.
    wrapped.__dict__.update(
        {key: value for key, value in optimizer.__dict__.items() if key != "step"}
    )
    optimizer._opt_called = True  # type: ignore[attr-defined]  # it will not be; else that scheduler would warn
    wrapped._patch_step_function()
    if steps is not None:
        world = connect_rounds(wrapped, names, settings)
        if world.node_size > 1:
            average_in_machine(wrapped, world, *given)
        return cast(Distributed, wrapped)
    connect(wrapped, names, settings, Hooks(ends_with_backward=settings.grad_scaler is not None))
    return cast(Distributed, wrapped)


def distributed_class(
    inner: type[torch.optim.Optimizer], module: str, methods: type[Distributed]
) -> type[Any]:
    """A class that inherits from an optimizer's and has the methods of
    :class:`dgc.frontends.facade.Distributed` and of a subclass. They are merged into one class, so
    that its ``super()`` is the optimizer's, as Horovod's functions expect. A compiled function may
    call those of a training step.

    Args:
        inner: the optimizer's class.
        module: of which the class says that it is.
        methods: the subclass.
    """
    members: dict[str, Any] = {}
    for kind in reversed(methods.__mro__[:-2]):  # but torch's Optimizer, and object
        members.update(vars(kind))
    members.update(
        {name: uncompiled(members[name]) for name in ("step", "synchronize", "zero_grad", "flush")}
    )
    # Accelerate looks at it.
    members["zero_grad"].__signature__ = inspect.signature(inner.zero_grad)
    return type(inner.__name__, (inner,), {**members, "__module__": module, "_inner": inner})


def connect(
    optimizer: Any, names: dict[Tensor, str], settings: Settings, source: GradientSource
) -> None:
    """Gives an optimizer of a distributed class its engine."""
    checks.warn_of_config(settings, optimizer)
    optimizer._dgc = Engine(optimizer, names, settings, source)


class _Hooked(Distributed):
    """The methods of a :func:`DistributedOptimizer` alone."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """See :func:`reduced`."""
        given, of_steps = engine_of(self).settings, _settings_of_steps(self)
        return reduced(
            self,
            _wrap_again,
            {
                "compression": given.config,
                "backward_passes_per_step": of_steps.backward_passes_per_step,
                "op": given.op,
                "gradient_predivide_factor": given.gradient_predivide_factor,
                "groups": given.groups,
                "sparse_as_dense": given.sparse_as_dense,
                "process_set": Shared(given.process_set),
                "grad_scaler": Shared(of_steps.grad_scaler),
            },
        )


def _settings_of_steps(optimizer: Any) -> Settings:
    """The settings of what takes the steps: a machine's ranks take local steps together."""
    rounds = vars(optimizer).get("_rounds")
    of_rounds = rounds is None or rounds.machine is None
    return engine_of(optimizer).settings if of_rounds else rounds.machine.settings


class _LocalHooked(Local):
    """The methods of a :func:`DistributedOptimizer` with local steps."""

    __reduce_ex__ = _Hooked.__reduce_ex__


def _wrap_again(
    optimizer: Any, names: Any, process_set: Shared, grad_scaler: Shared, **arguments: Any
) -> Distributed:
    return DistributedOptimizer(
        optimizer, names, process_set=process_set.value, grad_scaler=grad_scaler.value, **arguments
    )


def reduced(
    optimizer: Any, make: Callable[..., Distributed], arguments: Mapping[str, Any]
) -> tuple[Any, ...]:
    """What a copy or a pickle of a distributed optimizer is made from. The class is made at run
    time, so a copy is wrapped anew.

    Args:
        optimizer: the original.
        make: wraps a plain optimizer, given its named parameters and these arguments.
        arguments: of ``make``.
    """
    engine = engine_of(optimizer)
    state = {
        "defaults": optimizer.defaults,
        "state": optimizer.state,
        "param_groups": optimizer.param_groups,
    }
    # With the names of groups that are still to be added.
    named = {p: name for name, p in engine.settings.named_parameters or ()}
    names = [(name, p) for p, name in {**named, **engine.names}.items()]
    return _rebuild, (
        optimizer._inner,
        state,
        make,
        names,
        arguments,
        optimizer.residual_state_dict(),
        engine.sparse_names(),
    )


@dataclass(frozen=True)
class Shared:
    """A value that a deep copy has in common with its original: a process set cannot be copied."""

    value: Any

    def __deepcopy__(self, memo: Any) -> Shared:
        return self


def _rebuild(
    inner: type[torch.optim.Optimizer],
    state: dict[str, Any],
    make: Callable[..., Distributed],
    names: list[tuple[str, Tensor]],
    arguments: Mapping[str, Any],
    *kept: Any,
) -> Distributed:
    """Makes a copy. Pickles call this."""
    optimizer: Any = inner.__new__(inner)
    optimizer.__setstate__(state)
    made = make(optimizer, names, **arguments)
    made._become_copy(*kept)
    return made
