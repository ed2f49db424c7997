"""For whom: DistributedOptimizer, Horovod's contract.

``DistributedOptimizer`` makes an instance of a class that inherits from the optimizer it is given, as Horovod's does:
``isinstance(optimizer, torch.optim.SGD)`` holds, and schedulers and scalers see the optimizer that they know.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from dgc import agree, fsdp, kernels
from dgc.beside import abandon, beside, follow, rejoin
from dgc.compressor import (
    Collective,
    Dense,
    Doubt,
    Sparse,
    Update,
    World,
    average_in_node,
    flush,
    reduce,
    reduce_dense,
    reduce_rounded,
    reduce_sparse,
    sent_bytes,
    settle,
    who_is_not_finite,
)
from dgc.config import Config
from dgc.fsdp import local
from dgc.pace import KEYS, SPARSITY, Pace
from dgc.packing import DTYPES, MAX_NUMEL, Shipment, check_groups, compressible, named, pack
from dgc.residual import Bucket, Gradient, clip_scale, memory_order, residual_dtype
from dgc.schedule import Adaptive, Piecewise, Ramp
from dgc.transport import Exchange, find
from dgc.warn import warn

Average, Sum = 0, 1  # the values of horovod.torch.Average and Sum, which are accepted alike

HOROVODS_MODULE = "horovod.torch.optimizer"  # by which hvd.broadcast_optimizer_state tells distributed optimizers
STEP = "dgc_step"  # in param_groups[0], so that it is saved, loaded and broadcast with the learning rate
SYNCHRONIZED_TWICE = (  # Horovod's words
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code.")
_NOT_MEASURED: Any = nullcontext()


@dataclass(frozen=True)
class Report:
    """What compression did, on this rank, in the last step and in total. Bytes are those on the wire, by the formulas
    of ring all-gather and ring allreduce; messages' headers and the transport's negotiation come on top.
    """

    steps: int
    bytes_sent: float  # in the last step; where it is hierarchical, to other nodes
    node_bytes: float  # and those within the node
    dense_bytes: float  # that a ring allreduce of all gradients in float32 would have sent
    message_bytes: int  # that this rank contributed, whatever the number of ranks: what the paper counts
    sparsity: float  # that the schedule gave for the last step; of an adaptive one, for the next
    density: float  # entries sent / entries of all parameters
    gradient_norm: float  # of the local gradients of compressed parameters, after clipping
    residual_norm: float  # of v, what is pending
    total_bytes_sent: float
    total_dense_bytes: float
    total_density: float
    skipped: int  # steps that no rank took, as a gradient was not finite
    lost_residuals: int  # of ranks that an elastic job has lost


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        compression: Any = None,
        backward_passes_per_step: int = 1,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | list[list[Tensor]] | None = None,
        sparse_as_dense: bool = False,
        process_set: Any = None,
        *,
        grad_scaler: Any = None) -> Any:
    """Wraps an optimizer so that ranks exchange compressed gradients, in place of ``hvd.DistributedOptimizer``.

    The exchange begins while ``loss.backward()`` runs; ``step()`` waits for it and applies the averaged update.
    With a single process, or outside the process set, it is the plain optimizer.

    Args:
        optimizer: ``torch.optim.SGD``, or any other (but LBFGS) with ``momentum_correction=False``.
        named_parameters: usually ``model.named_parameters()``. Names key the residuals; without them they are made up
            from the order of the parameters.
        compression: a :class:`dgc.Config`; None means ``Config()``, 99.9 % without warm-up. With
            ``hvd.Compression.none`` or ``fp16`` this is Horovod's own optimizer.
        backward_passes_per_step: how many backward passes add up to one step.
        op: ``Average`` or ``Sum``, of this package or of Horovod.
        gradient_predivide_factor: with Average, divides before the sum and multiplies after it. What travels sparse is
            added up in float32 or wider, where it cancels out.
        num_groups: Horovod's deprecated name for an integer ``groups``.
        groups: how to bucket the gradients: a number of groups, or a list of lists of parameters. None: by size.
        sparse_as_dense: treat sparse gradients as dense ones (and so compress them).
        process_set: a ``hvd.ProcessSet`` or a ``torch.distributed.ProcessGroup``; None means all processes.
            With parameters that ``fully_shard`` has split over the ranks of a node: the ranks that hold the same
            shard, one in each node. A rank then takes part with the gradient that its node has averaged, and has the
            residuals of its shard; ``FloatingPointError`` is raised where the shard has the bad gradient.
        grad_scaler: the ``torch.amp.GradScaler`` that scales the loss. Gradients are accumulated without its scale,
            and an overflow on any rank makes every rank skip the step. The exchange then ends with ``backward()``,
            after which ``p.grad`` is the averaged update times the scale, as the scaler expects it.

    Returns:
        An optimizer of the same class, with ``synchronize``, ``skip_synchronize``, ``set_backward_passes_per_step``
        as Horovod's, and ``residual_state_dict``, ``load_residual_state_dict``, ``flush`` and ``report``.

    Raises:
        ValueError, TypeError: an argument that is not as said above.
        RuntimeError: neither Horovod nor torch.distributed is initialised.
        ValueError: at the first step, on all ranks, if these do not train the same: the error says in what they differ.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warn("Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.", DeprecationWarning)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if hasattr(compression, "compress") and hasattr(compression, "decompress"):
        if checked_scaler(Config(), grad_scaler) is not None:
            raise ValueError("grad_scaler is given and compression is Horovod's, whose optimizer does not know of it; "
                             "accepted: one of them, and with Horovod's a synchronize() before scaler.step()")
        import horovod.torch as hvd  # whose compressor this is
        return hvd.DistributedOptimizer(
            optimizer, named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor,
            groups=groups, sparse_as_dense=sparse_as_dense, process_set=process_set or hvd.global_process_set)
    config = Config() if compression is None else compression
    grad_scaler = checked(optimizer, config, op, grad_scaler)
    given_names = None if named_parameters is None else list(named_parameters)
    names = named(optimizer.param_groups, given_names)
    check_groups(groups)
    transport = find(process_set)  # last of all, so that what is wrong with arguments is said before hvd.init() too
    fsdp.check((p for group in optimizer.param_groups for p in group["params"]), process_set, config,
               grad_scaler)
    cls = distributed_class(type(optimizer), HOROVODS_MODULE if type(transport).__name__ == "Horovod" else __name__)
    wrapped = cls.__new__(cls)
    # Defaults, state, hooks and groups come along. A scheduler may have patched ``step`` on the instance; that one
    # would step the optimizer within, not this.
    wrapped.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    optimizer._opt_called = True  # type: ignore[attr-defined]  # it will not be; else that scheduler would warn
    wrapped._patch_step_function()
    wrapped._set_up(names, given_names, config, backward_passes_per_step, op, gradient_predivide_factor, groups,
                    sparse_as_dense, process_set, transport, grad_scaler)
    return wrapped


def distributed_class(inner: type[torch.optim.Optimizer], module: str,
                      methods: type[_Distributed] | None = None) -> Any:
    """A class that inherits from an optimizer's, with the methods of :class:`_Distributed`, or of a subclass."""
    members = {**_Distributed.__dict__, **({} if methods is None else methods.__dict__)}
    return type(inner.__name__, (inner,), {**members, "__module__": module, "_inner": inner})


def checked(optimizer: torch.optim.Optimizer, config: Any, op: int, grad_scaler: Any) -> Any:
    """Refuses what can be refused before anything is touched. Returns the scaler, if there is one and it is enabled."""
    _check(optimizer, config, op)
    return checked_scaler(config, grad_scaler)


def checked_scaler(config: Config, grad_scaler: Any) -> Any:
    """The scaler, if there is one and it is enabled."""
    if grad_scaler is None:
        return None
    if not hasattr(grad_scaler, "is_enabled") or not hasattr(grad_scaler, "get_scale"):
        raise TypeError(f"grad_scaler is {grad_scaler!r}; accepted: a torch.amp.GradScaler or None")
    if grad_scaler.is_enabled() and config.apply_directly:
        raise ValueError("grad_scaler is given and Config: apply_directly is True; accepted: one of them, as the "
                         "scaler looks at p.grad")
    return grad_scaler if grad_scaler.is_enabled() else None


def _check(optimizer: torch.optim.Optimizer, config: Any, op: int) -> None:
    kind = type(optimizer).__name__
    if not isinstance(config, Config):
        raise TypeError(f"compression is {config!r}; accepted: a dgc.Config, None, or a Horovod compressor such as "
                        "hvd.Compression.fp16")
    if op not in (Average, Sum):
        raise ValueError(f"op is {op!r}; with a dgc.Config accepted: Average ({Average}) and Sum ({Sum}). For Adasum "
                         "give compression=hvd.Compression.none")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is {optimizer!r}; accepted: a torch.optim.Optimizer")
    if config.hierarchical is True and os.environ.get("HOROVOD_ELASTIC") == "1":
        raise ValueError("Config: hierarchical is True in an elastic job, whose machines come and go; accepted: False "
                         "or 'auto', which is False there")
    if hasattr(optimizer, "skip_synchronize"):
        raise ValueError("optimizer is a DistributedOptimizer already; wrap the plain optimizer once")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("optimizer is LBFGS, which evaluates several gradients in a step; accepted: torch.optim.SGD, "
                        "or another optimizer with Config(momentum_correction=False)")
    if not _is_sgd(type(optimizer)) and config.momentum_correction:
        raise TypeError(f"optimizer is {kind}, but momentum correction is made for the step() of SGD, and gives it "
                        "updates in place of gradients; accepted: torch.optim.SGD, or "
                        f"Config(momentum_correction=False), which gives {kind} the averaged sparse gradients")
    if not _is_sgd(type(optimizer)) and not config.local_weight_decay:
        raise TypeError(f"optimizer is {kind}; Config(local_weight_decay=False) is accepted for torch.optim.SGD only")
    for group in optimizer.param_groups:
        _check_group(group, config)
    if not any(p.dtype in DTYPES for group in optimizer.param_groups for p in group["params"]):
        raise TypeError(f"none of the optimizer's parameters can have a gradient that is exchanged; accepted: at least "
                        f"one of {', '.join(map(str, DTYPES))}")


def _is_sgd(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether it steps as torch's SGD does. A subclass of that may have another step(), such as LARS."""
    return issubclass(kind, torch.optim.SGD) and _unhooked(kind.step) is _unhooked(torch.optim.SGD.step)


def _check_group(group: Mapping[str, Any], config: Config) -> None:
    if config.momentum_correction:
        _check_dampening(group)
    for parameter in group["params"]:
        if parameter.dtype not in DTYPES and parameter.requires_grad:
            raise TypeError(f"a parameter of shape {tuple(parameter.shape)} has dtype {parameter.dtype} and requires a "
                            f"gradient; accepted: {', '.join(map(str, DTYPES))}, and any other where it is frozen")
        if parameter.numel() > MAX_NUMEL and compressible(parameter, config.min_numel):
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} has {parameter.numel()} entries; "
                             f"accepted: at most {MAX_NUMEL}. Split it, or let it travel dense by Config: min_numel")


def _check_dampening(group: Mapping[str, Any]) -> None:
    if group["dampening"] != 0:
        raise ValueError(f"dampening is {group['dampening']!r}; accepted: 0, as momentum correction accumulates "
                         "u = m u + g (paper, equation 4)")


class _Distributed(torch.optim.Optimizer):
    """The methods that the class made by :func:`DistributedOptimizer` has on top of the wrapped one's."""

    _inner: type[torch.optim.Optimizer]

    def __init_subclass__(cls) -> None:
        """The wrappers of PyTorch Lightning and Fabric inherit from the class of the optimizer that they hold, and have
        none of its attributes. What they inherit is done by that optimizer.
        """
        for name in vars(_Distributed) if hasattr(cls, "_inner") else ():
            if not name.startswith("_") and getattr(cls, name).__module__.startswith("dgc."):
                setattr(cls, name, _by_optimizer(getattr(cls, name)))

    # -- construction ------------------------------------------------------------------------------------------------

    def _set_up(self, names: dict[Tensor, str], given_names: list[tuple[str, Tensor]] | None, config: Config,
                backward_passes_per_step: int, op: int, predivide: float, groups: Any, sparse_as_dense: bool,
                process_set: Any, transport: Any, grad_scaler: Any) -> None:
        self._config, self._transport, self._scaler = config, transport, grad_scaler
        self._average = op == Average
        self._given_names, self._given_process_set = given_names, process_set
        # Stock's class has these too, and scripts read them; `_handles` is below.
        self._compression, self._groups, self.process_set = config, groups, transport.process_set
        self.op, self.gradient_predivide_factor, self.sparse_as_dense = op, predivide, sparse_as_dense
        self.backward_passes_per_step = backward_passes_per_step
        self._parameter_names = names
        self._allreduce_delay: dict[Tensor, int] = {}  # backward passes until a gradient is complete
        self._requires_update: set[Tensor] = set()  # exchanged also where a rank has no gradient for them
        self._frozen: set[Tensor] = set()  # at first; as those once they thaw
        world = transport.world
        self._outside = world is None
        self._elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        # What has no meaning to torch's optimizer is done by the road, also by one process.
        needed = config.nonfinite == "skip" or (grad_scaler is not None and config.clip_norm is not None)
        self._plain = self._outside or (world.size == 1 and not self._elastic and not needed)
        self._node_size = 1  # ranks whose gradients are averaged before they are compressed
        self._alone = False  # hierarchical, but all ranks are on one machine
        self._apart = False  # u and v may differ within a node
        self._agreed = self._elastic  # new ranks cannot ask those that have been asked already
        self._shipments: list[Shipment] = []
        self._shipment_of: dict[Tensor, Shipment] = {}
        self._sparse: dict[Tensor, int] = {}  # parameters that had a sparse gradient -> its sparse dimensions
        self._numels: dict[Tensor, int] = {}  # of this rank's parts
        self._steps = self._skipped = self._lost_residuals = 0
        self._shared_by = 0  # how many ranks' average u and v are a share of; 0: they are empty
        self._last: Any = Counter()
        self._totals = {"bytes_sent": 0.0, "dense_bytes": 0.0, "dense_entries": 0, "numel": 0}
        self._inverse: Tensor | None = None  # of the loss's scale, in this step
        self._inverse_number = 1.0  # the same, for which no device is waited for
        self._task = -1  # torch's number of the last backward pass
        self._residuals_missing = False
        self._residuals_loaded = False  # since the last step
        self._warned_of_change = self._warned_of_nonfinite = False
        self._found: list[FloatingPointError | ValueError] = []  # in messages, and not raised yet
        self._doubts: list[tuple[str, Doubt]] = []  # of sums: the name of the exchange, and what may have to be raised
        self._should_synchronize = True
        self._lock = threading.RLock()
        self._pace: Pace | None = None  # if the sparsity is adaptive
        self._list(self._parameters())
        self._reset()
        if not self._plain:
            self._register(self.param_groups, groups)
        if not self._plain or self._outside:
            self.param_groups[0].setdefault(STEP, 0)
            self._adapt()
            self._fill_state()
            self._residuals_missing = not self._plain and self.param_groups[0][STEP] > 0

    def _adapt(self) -> None:
        """Begins to measure, if the sparsity is adaptive; what is found lies beside the step."""
        self._pace = None
        if not isinstance(self._config.sparsity, Adaptive):
            for key in KEYS.values():  # from a checkpoint; Horovod broadcasts only what all ranks have
                self.param_groups[0].pop(key, None)
        elif not self._plain or self._outside:
            self._pace = Pace(self._config.sparsity, self._transport, self._parameters()[0].device)
            self.param_groups[0].update(self._pace.found(self.param_groups[0]))

    def _reset(self) -> None:
        """Between two steps: nothing is under way."""
        for _, parameters, exchange in getattr(self, "_exchanges", ()):
            abandon(exchange, parameters[0].device, wait=False)
        self._exchanges: list[tuple[Shipment, list[Tensor], Exchange]] = []  # with the parameters that take part
        self._next = 0  # the first shipment that has not been launched
        self._missing: dict[Shipment, int] = {}  # how many of its gradients are not complete yet
        self._fired: set[Tensor] = set()  # parameters that had a gradient since the last synchronize()
        self._streams: set[Any] = set()  # in which these were computed, of GPUs
        self._group_of: dict[Tensor, dict[str, Any]] = {}
        self._of_node: dict[Tensor, Tensor] = {}  # parameters -> the mean of its ranks' gradients
        self._scale: Tensor | None = None  # from clipping
        self._synchronized = False
        self._skipping = False  # this step
        self._direct: list[tuple[Shipment, list[Tensor], Update]] = []  # updates that step() applies from messages
        self._versions: dict[Tensor, tuple[int, int]] = {}
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = self.backward_passes_per_step

    def _register(self, param_groups: list[dict[str, Any]], groups: Any) -> None:
        parameters = _exchanged(param_groups)
        self._refuse_gradients_of_others(param_groups)
        for names, together in pack(parameters, self._parameter_names, groups, self._config.min_numel):
            name, members = f"bucket {len(self._shipments)}", dict(zip(names, map(local, together), strict=True))
            shipment = Shipment(f"dgc.{len(self._shipments)}.{names[0]}", together)
            if compressible(together[0], self._config.min_numel):
                shipment.bucket = Bucket(name, members, velocity=self._config.momentum_correction)
            elif self._config.dense_dtype is not None:
                shipment.rest = Bucket(name, members, velocity=False)
            if shipment.bucket is not None:  # what it takes to run its loops begins now
                kernels.at_hand(shipment.bucket.v.device.type, shipment.bucket.v.dtype)
            self._shipments.append(shipment)
            self._shipment_of.update(dict.fromkeys(together, shipment))
        for parameter in parameters:
            self._numels[parameter] = local(parameter).numel()
            self._hook(parameter)

    def _list(self, parameters: list[Tensor]) -> None:
        """Notes which there are, as stock's class does."""
        self._allreduce_delay.update(dict.fromkeys(parameters, self.backward_passes_per_step))
        if not self._plain:
            self._requires_update.update(p for p in parameters if p.requires_grad)
            self._frozen.update(p for p in parameters if not p.requires_grad)

    def _refuse_gradients_of_others(self, param_groups: list[dict[str, Any]]) -> None:
        """Has torch call back where a parameter thaws that is not exchanged: ranks would step each on its own."""
        def on_gradient(parameter: Tensor) -> None:
            raise TypeError(f"a parameter of shape {tuple(parameter.shape)} and dtype {parameter.dtype} was frozen "
                            "when the DistributedOptimizer was made, and has a gradient now; accepted: "
                            f"{', '.join(map(str, DTYPES))}, or frozen for good")

        for parameter in (p for group in param_groups for p in group["params"] if p.dtype not in DTYPES):
            if parameter.is_floating_point() or parameter.is_complex():  # others never have a gradient
                _add_hook(parameter, on_gradient)

    def _hook(self, parameter: Tensor) -> None:
        """Has torch call :meth:`_on_gradient`."""
        optimizer, lock = weakref.ref(self), self._lock  # the parameter outlives this optimizer

        def on_gradient(parameter: Tensor) -> None:
            if (alive := optimizer()) is not None:
                with lock:  # torch has a thread for each device of a model, and they run backward side by side
                    alive._on_gradient(parameter)

        _add_hook(parameter, on_gradient)

    def _fill_state(self) -> None:
        """Makes the state of SGD complete from the start, so that all ranks have the same to broadcast.

        A momentum that the wrapped optimizer had for a compressed parameter moves into u.
        """
        if not _is_sgd(self._inner):
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad and parameter not in self.state:
                    continue
                state = self.state[parameter]
                momentum = state.get("momentum_buffer")
                if momentum is not None and momentum.is_sparse:
                    self._sparse[parameter] = momentum.sparse_dim()
                # Outside a process set nothing is exchanged, but a broadcast to all needs the same state there.
                if self._config.momentum_correction and parameter not in self._sparse and compressible(
                        parameter, self._config.min_numel):
                    if not self._outside:
                        self._move_into_u(parameter, group)
                    decays = self._config.local_weight_decay and group["weight_decay"] != 0
                    _default(state, "decay_buffer", parameter if decays and group["momentum"] != 0 else None)
                else:
                    remembers = group["momentum"] != 0 and group["dampening"] == 0
                    _default(state, "momentum_buffer", parameter if remembers else None)

    def _move_into_u(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        """Takes over the wrapped optimizer's momentum; it is alike on every rank, so in a sum each has its share."""
        bucket, momentum = self._shipment_of[parameter].bucket, self.state[parameter].pop("momentum_buffer", None)
        if momentum is None:
            return
        assert bucket is not None and bucket.u is not None
        share = (-1 if group["maximize"] else 1) / (1 if self._average else self._transport.world.size)
        bucket.views(bucket.u)[self._parameter_names[parameter]].copy_(local(momentum)).mul_(share)

    def _bucket_of(self, parameter: Tensor) -> Bucket | None:
        """The bucket of a parameter that travels compressed."""
        if parameter in self._sparse or parameter not in self._shipment_of:
            return None
        return self._shipment_of[parameter].bucket

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; its parameters are exchanged like the others."""
        if self._between:
            raise RuntimeError("add_param_group() was called between backward() and step(); accepted: after step()")
        if not self._plain:
            self._check_unchanged()
        before = len(self.param_groups)
        self._inner.add_param_group(self, param_group)
        try:
            _check_group(self.param_groups[-1], self._config)
            fsdp.check(self._parameters(), self._given_process_set, self._config, self._scaler)
        except (TypeError, ValueError):
            del self.param_groups[before:]
            raise
        self._parameter_names = named(self.param_groups, self._given_names, generate=True)
        self._list(_exchanged(self.param_groups[-1:]))
        if self._plain:
            return
        self._register(self.param_groups[-1:], None)
        self._fill_state()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes add up to one step, from the next step on."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = passes
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = passes

    # -- the backward pass -------------------------------------------------------------------------------------------

    def _on_gradient(self, parameter: Tensor) -> None:
        """Called by torch when a backward pass has added to a parameter's gradient."""
        delay = self._allreduce_delay[parameter]
        if delay <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally. If step() is called after each: another "
                "model's loss may run through these parameters, which requires_grad_(False) keeps out; or a former "
                "DistributedOptimizer of them is still held, by its scheduler or trainer.")
        gradient = parameter.grad
        assert gradient is not None and not gradient.requires_grad
        if not self._fired:
            if self._scaler is not None and self._between:
                raise AssertionError(
                    "backward() was called again before step(). With a grad_scaler gradients are exchanged as soon as "
                    "backward() ends, and their update waits for step(), which cannot be left out. Increase "
                    "backward_passes_per_step to accumulate gradients locally.")
            if self._between and self._versions.get(parameter) == (id(gradient), gradient._version - 1):
                raise AssertionError(
                    "backward() was called between synchronize() and step(), and has added to an update that was "
                    "exchanged already; momentum would count it twice. Call step() first, or increase "
                    "backward_passes_per_step to accumulate gradients locally.")
            self._open()
        self._fired.add(parameter)
        if parameter.is_cuda:
            self._streams.add(torch.cuda.current_stream(parameter.device))
        self._allreduce_delay[parameter] = delay - 1
        if delay == 1:
            shipment = self._shipment_of[parameter]
            self._missing[shipment] -= 1
            if self._missing[shipment] == 0:
                self._launch_ready()
        if self._scaler is not None and (task := torch._C._current_graph_task_id()) != self._task:
            self._task = task
            self._at_end(self._on_end)  # as scaler.step() looks at p.grad before it calls step()

    def _at_end(self, call: Callable[[], None]) -> None:
        """Has torch call this when the backward pass has ended."""
        torch.autograd.Variable._execution_engine.queue_callback(call)

    def _on_end(self) -> None:
        """A backward pass has ended."""
        if any(frame.f_code is BackwardCFunction.apply.__code__ for frame in _frames()):
            return  # it was within another one, which goes on: torch.utils.checkpoint(use_reentrant=True)
        if any(self._allreduce_delay[parameter] == 0 for parameter in self._fired):
            self.synchronize()

    def _open(self) -> None:
        """The first gradient of a step has come."""
        if self._between:
            self._leave_out()
        self._check_unchanged()
        self._versions = {}
        self._group_of = self._groups_by_parameter()
        # Frozen ones count, as they may thaw within the step; those frozen from the start travel apart, and last.
        self._missing = {shipment: len(shipment.parameters) for shipment in self._shipments}
        self._world: World = replace(self._transport.world, node_size=self._node_size)
        self._skipping = False
        self._residuals_loaded = False
        self._last = Counter()
        self._last["dense_bytes"] = self._dense_bytes(self._world)
        if self._residuals_missing:
            self._residuals_missing = False
            warn(f"training goes on at step {self.param_groups[0][STEP]} without the residuals of the steps before: "
                 "save optimizer.residual_state_dict() on every rank, and load it there with "
                 "load_residual_state_dict()")

    def _check_unchanged(self) -> None:
        """The kernels are given addresses, so they cannot find out for themselves."""
        groups = self._groups_by_parameter()
        if groups.keys() != self._shipment_of.keys():
            added = [f"one of shape {tuple(p.shape)}" for p in groups if p not in self._shipment_of]
            taken = [name for p, name in self._parameter_names.items() if p not in groups]
            raise RuntimeError(f"param_groups was changed by hand: {', '.join([*added, *taken][:5])}; accepted: "
                               "add_param_group(), and requires_grad_(False) for what is no longer trained")
        for shipment in self._shipments:
            if (kept := shipment.kept) is None:
                continue
            device = kept.v.device
            for p, shape in zip(shipment.parameters, kept.shapes, strict=True):
                if p.device != device or (p.shape != shape and not hasattr(p, "to_local")):
                    raise RuntimeError(f"{self._parameter_names[p]}: {tuple(shape)} on {device} when the "
                                       f"DistributedOptimizer was made, and {tuple(p.shape)} on {p.device} now; "
                                       "accepted: change the model first, then make its optimizer")

    def _leave_out(self) -> None:
        """There was no step() after synchronize(): its update is dropped, as it is where ``p.grad`` was set to None."""
        self._synchronized, self._direct = False, []
        self._warn_of_loss("there was no step() after synchronize(), so the update is dropped, and what was sent for "
                           "it is no longer in the residual; to leave out steps whose gradients are not finite, give "
                           "Config(nonfinite='skip')")

    def _warn_of_loss(self, message: str) -> None:
        """Once."""
        if not self._warned_of_change:
            self._warned_of_change = True
            warn(message)

    def _meet(self) -> None:
        """Before anything is exchanged."""
        self._world = self._transport.world
        if not self._agreed:
            self._agree()
            if self._elastic:
                self._regroup()
            elif self._config.hierarchical:
                self._group_by_node()
            self._agreed = True
        self._world = replace(self._world, node_size=self._node_size)
        if self._apart and self._node_size > 1:
            self._level()

    def _group_by_node(self) -> None:
        """From now on nodes take part, rather than ranks."""
        automatic = self._config.hierarchical == "auto"
        self._node_size, self._alone = 1, False
        if automatic and fsdp.shard(self._parameters()[0]) is not None:
            return
        try:
            size = self._transport.by_node(self._parameters()[0].device)
        except ValueError:
            if not automatic:
                raise
            return
        if size < self._world.size:
            self._node_size, self._apart = size, True
        else:  # nothing is left to compress; but who leaves it to us wants it compressed
            self._alone = not automatic

    @torch.no_grad()
    def _level(self) -> None:
        """Makes u and v alike on all ranks of a node; they may have been saved by ranks of another grouping. What they
        are worth in total stays the same.
        """
        for bucket in self._compressed():
            for letter, flat in (("v", bucket.v), ("u", bucket.u)):
                if flat is None:
                    continue
                name = f"dgc.level.{bucket.name}.{letter}"
                first = self._transport.start(Collective("share", flat.clone(), group="node"), f"{name}.first")()
                differ = (flat != first).any().float().view(1)
                if self._transport.start(Collective("sum", differ, group="node"), f"{name}.differ")():
                    total = self._transport.start(Collective("sum", flat.clone(), group="node"), name)()
                    flat.copy_(total.div_(self._world.node_size))
        self._apart = False

    def _agree(self) -> None:
        """Compares with the other ranks what an exchange depends on."""
        from dgc import __version__
        parameters, config = self._parameters(), self._config
        scale = None if self._scaler is None else self._scaler.get_scale()
        settings = {**{key: value for key, value in vars(config).items() if key != "sparsity"}, "op": self.op,
                    "gradient_predivide_factor": self.gradient_predivide_factor,
                    "sparse_as_dense": self.sparse_as_dense,
                    "backward_passes_per_step": self.backward_passes_per_step, "grad_scaler, its scale": scale}
        of_groups = [(f"group {i}: {key}={_said(value)}", str(key).startswith("dgc_"))
                     for i, group in enumerate(self.param_groups)
                     for key, value in sorted(group.items(), key=lambda item: str(item[0]))
                     if key not in ("params", "foreach", "fused")]
        step = self.param_groups[0][STEP]
        differences = agree.check({
            "the version of dgc": [__version__],
            "the arguments of DistributedOptimizer": [f"{key}={value}" for key, value in settings.items()],
            "the model's parameters": [
                f"{self._parameter_names[p]} {tuple(p.shape)} {p.dtype}" + ("" if (shard := fsdp.shard(p)) is None else
                                                                  f", shard {shard[0]} of {shard[1]}")
                for p in parameters],
            "the memory format of the parameters, when the optimizer was made": [
                f"{name}: its dimensions in the order {order}" for bucket in self._kept()
                for name, order in zip(bucket.names, bucket.orders, strict=True) if order is not None],
            "the parameters that travel together": [
                " ".join(self._parameter_names[p] for p in shipment.parameters) for shipment in self._shipments],
            "the step": [line for line, ours in of_groups if ours],
            "the schedule of the sparsity": [str(config.sparsity)] if self._pace is not None else [
                *(f"step {at}: {_sparsity(config, at)}" for at in (step, *(step + 2 ** i for i in range(20)))),
                *([str(config.sparsity)] if isinstance(config.sparsity, (Piecewise, Ramp)) else [])],
        }, {
            "the optimizer's settings": [line for line, ours in of_groups if not ours],
            "the parameters' values": [
                f"bits of {self._parameter_names[p]} add up to {bits}"
                for p, bits in zip(parameters, agree.sums_of_bits(map(local, parameters)), strict=True)],
        }, self._transport, parameters[0].device)
        if differences and self._world.rank == 0:
            warn(f"{'. '.join(differences)}. Ranks exchange updates, so what differs at the start goes on to differ; "
                 "dgc.broadcast_parameters(model.state_dict()), and the same settings on all ranks, make them alike")

    @torch.no_grad()
    def _regroup(self) -> None:
        """Where ranks have come or gone, what those that remain have pending is worth as much as it was."""
        size = self._world.size
        asked = Collective("gather", torch.tensor([self._shared_by], device=self._parameters()[0].device))
        before = self._transport.start(asked, "dgc.regroup")().flatten().tolist()
        own, self._shared_by = self._shared_by, size
        if self._average and own not in (0, size):  # commits of one job may be of several sizes
            for views in self._residuals().values():
                for view in views.values():
                    view.mul_(size / own)
        former, remain = max(before), sum(n > 0 for n in before)
        if lost := max(0, former - remain):
            self._lost_residuals += lost
            square = Collective("sum", sum((_norm(b.v).square().view(1) for b in self._kept()), asked.tensor.new_zeros(
                1, dtype=torch.float32)))
            norm = (self._transport.start(square, "dgc.regroup.norm")().item() / remain) ** 0.5
            warn(f"of {former} ranks {lost} are gone, and with each of them what it had pending; those that "
                 f"remain have a residual of norm {norm:.3g} each")

    def _regroup_at_next_step(self) -> None:
        """An elastic job has begun anew, with other ranks perhaps."""
        self._agreed = False

    def _dense_bytes(self, world: World) -> float:
        return 2 * (world.size - 1) / world.size * 4 * sum(n for p, n in self._numels.items() if p.requires_grad)

    def _launch_ready(self) -> None:
        """Launches what is complete, always in the same order: torch.distributed pairs collectives up by order."""
        if self._waits or self._config.clips_globally:
            return  # whether all are finite, and the global norm, need all gradients
        if not self._agreed or (self._apart and self._node_size > 1):
            return  # a backward pass must not wait for ranks that may have no gradient, and be at another optimizer
        with self._pace or _NOT_MEASURED:
            while self._next < len(self._shipments) and self._missing[self._shipments[self._next]] == 0:
                self._launch(self._shipments[self._next])

    def _launch(self, shipment: Shipment) -> None:
        self._next += 1
        present = self._taking_part(shipment.parameters)
        self._note_versions(present)
        alone = self._sparse_among(present)
        dense = [p for p in present if p not in self._sparse] if alone else present
        if dense:
            by_node = self._world.node_size > 1 and (shipment.bucket is not None or self._config.clip_norm is not None)
            path = self._by_node_path(shipment, dense) if by_node else self._path(shipment, dense)
            self._begin(shipment, dense, path, shipment.name)
        for parameter in alone:
            gradient = parameter.grad if parameter.grad is not None else torch.sparse_coo_tensor(
                torch.empty(self._sparse[parameter], 0), torch.empty(0, *parameter.shape[self._sparse[parameter]:]),
                parameter.shape, dtype=parameter.dtype, device=parameter.device, check_invariants=False)
            if not gradient.is_sparse:  # this time; what it was at first decides how it travels
                gradient = gradient.to_sparse(self._sparse[parameter])
            name = self._parameter_names[parameter]
            path = reduce_sparse(name, gradient, self._world, average=self._average, scale=self._scale_of(parameter),
                                 refuse=self._refuses)
            self._begin(shipment, [parameter], path, f"dgc.sparse.{name}")

    def _sparse_among(self, parameters: list[Tensor]) -> list[Tensor]:
        """Those that travel as sparse tensors, each on its own, from their first sparse gradient on."""
        if not self.sparse_as_dense:
            for p in parameters:
                if (g := p.grad) is not None and g.is_sparse and p not in self._sparse:
                    self._carry_over(p)
                    self._sparse[p] = g.sparse_dim()
        return [p for p in parameters if p in self._sparse] if self._sparse else []

    def _carry_over(self, parameter: Tensor) -> None:
        """What a parameter has pending from dense gradients goes with its first sparse one."""
        bucket, g = self._shipment_of[parameter].bucket, parameter.grad
        if bucket is None or g is None:
            return
        v = bucket.views(bucket.v)[self._parameter_names[parameter]]
        if v.any():
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            pending = (v * scale).to(g.dtype).to_sparse(g.sparse_dim())
            parameter.grad = (g + pending).coalesce()
            v.zero_()

    def _path(self, shipment: Shipment, parameters: list[Tensor]) -> Any:
        if shipment.bucket is None:
            return self._dense_path(shipment, parameters)
        return self._compressed_path(shipment, parameters)

    def _by_node_path(self, shipment: Shipment, parameters: list[Tensor]) -> Any:
        """The node's ranks average their gradients; the mean is exchanged among nodes as a rank's gradient is."""
        try:
            yield from self._in_node(shipment, parameters)
            return (yield from self._path(shipment, parameters))
        except FloatingPointError:  # found by all ranks in a node's message
            names = [self._parameter_names[p] for p in parameters]
            bad = [self._parameter_names[p] for p in parameters if not torch.isfinite(self._own(p)).all()]
            if blame := (yield from who_is_not_finite(names, bad, parameters[0].device)):
                raise FloatingPointError(blame) from None
            raise

    def _in_node(self, shipment: Shipment, parameters: list[Tensor]) -> Any:
        """Fills in the mean of the node's gradients, for the parameters of a shipment where that has not been done."""
        of_name = {self._parameter_names[p]: p for p in parameters if p not in self._of_node}
        if of_name:
            gradients = {name: self._own(p) for name, p in of_name.items()}
            # In float16 a sum may be infinite whose mean is not.
            means = yield from average_in_node(gradients, residual_dtype(shipment.dtype), self._world)
            self._of_node.update({p: means[name].to(shipment.dtype) for name, p in of_name.items()})

    def _compressed_path(self, shipment: Shipment, parameters: list[Tensor]) -> Any:
        assert shipment.bucket is not None
        config = self._paced()
        if self._alone or self._world.size == 1:  # an elastic job down to one: there is nobody to save bytes for
            config = replace(config, sparsity=0.0)
        gradients = {}
        for parameter in parameters:
            group = self._group_of[parameter]
            if config.momentum_correction:
                _check_dampening(group)
            gradients[self._parameter_names[parameter]] = Gradient(
                self._gradient(parameter), group.get("momentum", 0.0), group.get("nesterov", False))
        scale = self._unscaled(self._scale)
        if not config.local_weight_decay:
            scale, config = None, replace(config, clip_norm=None, clip_per_tensor=False)  # applied with the decay
        return reduce(shipment.bucket, gradients, config, self.param_groups[0][STEP], self._world,
                      average=self._average, scale=scale)

    def _paced(self) -> Config:
        """The config, with the sparsity in force if it is adaptive."""
        return self._config if self._pace is None else replace(
            self._config, sparsity=self.param_groups[0][SPARSITY])

    def _gradient(self, parameter: Tensor) -> Tensor:
        """What is exchanged of a parameter: its local gradient, or the mean of the node's, and the decay if that is
        sent.
        """
        if (g := self._of_node.get(parameter)) is None:
            g = self._own(parameter)
        if not self._config.local_weight_decay and self._shipment_of[parameter].bucket is not None:
            scale = self._unscaled(self._scale_of(parameter))
            g = g.to(residual_dtype(g.dtype))  # in float16, what the loss's scale was for would be lost without it
            g = g if scale is None else g * scale.to(g)
            group = self._group_of[parameter]
            decay = group["weight_decay"] / (1 if self._average else self._world.size)  # counted once in a sum
            g = g.add(local(parameter).detach(), alpha=-decay if group["maximize"] else decay)
        return g

    def _own(self, parameter: Tensor) -> Tensor:
        """A parameter's local gradient; zero where this rank has none but another may."""
        g = local(parameter.grad)
        if g is None:
            return torch.zeros_like(local(parameter))
        if g.is_sparse:
            g = g.to_dense()
        return g.detach() if g.requires_grad else g

    def _dense_path(self, shipment: Shipment, parameters: list[Tensor]) -> Any:
        taking_part, gradients, dtype = set(parameters), {}, shipment.dtype
        rounded = shipment.rest is not None and self._world.size > 1
        for parameter in parameters if rounded else shipment.parameters:
            takes_part = parameter in taking_part
            g = self._gradient(parameter) if takes_part else torch.zeros_like(local(parameter))
            g = g if g.dtype == dtype else g.to(dtype)
            scale = self._scale_of(parameter) if takes_part else None
            if shipment.rest is not None:  # remembered from step to step, so without the loss's scale
                scale = self._unscaled(scale)
            gradients[self._parameter_names[parameter]] = g if scale is None else g * scale.to(g)
        if rounded:
            assert shipment.rest is not None and self._config.dense_dtype is not None
            return reduce_rounded(shipment.rest, gradients, self._config.dense_dtype, self._world.flat,
                                  average=self._average)
        return reduce_dense(gradients, self._world.flat, average=self._average,
                            predivide=self.gradient_predivide_factor, refuse=self._refuses)

    def _scale_of(self, parameter: Tensor) -> Tensor | None:
        """The clipping factor of a parameter that does not get it on the compressed path."""
        if self._config.clip_norm is None or not self._config.clip_per_tensor:
            return self._scale
        if parameter in self._of_node:
            return self._clipped(self._norm(self._of_node[parameter]), self._world)
        return None if parameter.grad is None else self._clipped(self._norm(parameter.grad), self._world.flat)

    def _clipped(self, norm: Tensor, world: World) -> Tensor:
        """The clipping factor for a gradient of this norm."""
        assert self._config.clip_norm is not None
        return clip_scale(norm, self._config.clip_norm, world.nodes, self._average, world.node_size)

    def _norm(self, gradient: Tensor) -> Tensor:
        """A gradient's norm, without the loss's scale."""
        norm = _norm(gradient)
        return norm if self._inverse is None else norm * self._inverse.to(norm)

    def _unscaled(self, scale: Tensor | None) -> Tensor | None:
        """A clipping factor that also takes the loss's scale out."""
        return scale if self._inverse is None else self._inverse if scale is None else scale * self._inverse.to(scale)

    def _begin(self, shipment: Shipment, parameters: list[Tensor], path: Any, name: str) -> None:
        self._leave_node(wait=False)
        if len(self._streams) > 1:  # than that of the gradient that has just come
            follow(self._streams)
        with beside(parameters[0].device):
            self._exchanges.append((shipment, parameters, Exchange(path, self._transport, name, self._count)))

    def _leave_node(self, wait: bool) -> None:
        """Has what was averaged within the node go on to the other nodes: what is ready, or all."""
        for _, parameters, exchange in self._exchanges:
            if exchange.under_way.group == "node" and (wait or exchange.ready):
                with beside(parameters[0].device):
                    exchange.advance()

    def _count(self, collective: Collective) -> None:
        within = collective.group == "node"
        self._last["node_bytes" if within else "bytes_sent"] += sent_bytes(collective, self._world)
        self._last["message_bytes"] += 0 if within else collective.tensor.nbytes

    # -- the step ----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits for the exchange of all gradients; ``p.grad`` then holds the averaged update, alike on every rank."""
        if self._synchronized and not self._fired:
            return
        if self._plain:
            self._clip_alone()
            self._synchronized = True
            return
        if not self._fired:
            if self._scaler is not None and _calling_scaler() is not None:
                raise RuntimeError(
                    "scaler.step() has looked at gradients that were not exchanged yet, as no backward() has brought "
                    "them since the last step, but a script's own lines perhaps; call optimizer.synchronize() before "
                    "it, and before unscale_()")
            self._open()
        try:
            self._meet()
        except ValueError:  # on all ranks alike
            self._reset()
            raise
        if (changed := next(self._changed(), None)) is not None:
            self._warn_of_loss(f"the gradient of {self._parameter_names[changed]} was changed after backward(), which "
                               "had sent it by then, so that this had no effect; to clip, give Config(clip_norm=...); "
                               "and a model in DistributedDataParallel, which averages gradients, needs "
                               "dgc.register_comm_hook() in place of the DistributedOptimizer")
        if self._pace is not None:
            self._pace.stand()
        if self._waits and not self._all_finite():
            self._skip()
            return
        if self._scaler is not None:
            inverse = torch.tensor(1 / self._scaler.get_scale())
            self._inverse, self._inverse_number = inverse.to(self._parameters()[0].device), inverse.item()
        if self._config.clips_globally:
            if self._world.node_size > 1:
                self._average_all_in_node()
            self._scale = self._clip_scale(self._gradients())
        while self._next < len(self._shipments):
            self._launch(self._shipments[self._next])
        self._leave_node(wait=True)  # so that ranks that fail together have begun the same
        delivered: list[tuple[Bucket, Update]] = []
        with torch.no_grad():
            try:
                self._raise_found()
                while self._exchanges:
                    shipment, parameters, exchange = self._exchanges.pop(0)
                    device = parameters[0].device
                    with beside(device):
                        update = exchange.finish()
                    rejoin(device)
                    if isinstance(update, Sparse):
                        parameters[0].grad = update.tensor
                    else:
                        self._deliver(shipment, parameters, update)
                        if isinstance(update, Dense) and update.doubt is not None:
                            self._doubts.append((shipment.name, update.doubt))
                        if shipment.kept is not None:
                            delivered.append((shipment.kept, update))
                    self._tell_not_finite(getattr(update, "blame", ""))
            except (FloatingPointError, ValueError):  # found in messages: by all ranks that received them so
                for _, others, other in self._exchanges:
                    abandon(other, others[0].device, wait=True)
                self._exchanges.clear()
                self._put_back(delivered)
                self._look()
                self._forget()  # of this step, which fails
                self._reset()
                raise
        self._close()

    def _put_back(self, delivered: Iterable[tuple[Bucket, Update]]) -> None:
        """As the step fails, updates of it will not be applied: each rank takes its share of them back into v."""
        share = 1.0 if self._average else 1 / self._world.size
        for bucket, update in delivered:
            update.add(bucket.v.split(bucket.numels), [share] * len(bucket.names))

    @property
    def _refuses(self) -> bool:
        """Whether a gradient that is not finite is an error: not where nothing is kept, nor clipped, as in Horovod."""
        return bool(self._kept()) or self._config.clip_norm is not None

    @property
    def _between(self) -> bool:
        """Whether gradients or an update wait for step()."""
        return bool(self._fired) or (self._synchronized and not self._skipping)

    @property
    def _ends_with_backward(self) -> bool:
        """Whether the exchange does, rather than with synchronize() or step()."""
        return self._scaler is not None

    @property
    def _waits(self) -> bool:
        """Whether nothing leaves before all ranks have agreed that all of their gradients are finite."""
        return self._scaler is not None or self._config.nonfinite == "skip"

    def _all_finite(self) -> bool:
        """Whether all gradients are, on all ranks."""
        values = [g.coalesce().values() if g.is_sparse else g for g in self._gradients()]
        # A scaled update goes into p.grad, and with what is pending it may be larger than the gradient: by this much.
        room = 1.0 if self._scaler is None else 2.0 ** -24
        device = self._parameters()[0].device
        fits = [torch.linalg.vector_norm(v, math.inf) <= torch.finfo(v.dtype).max * (
            room if v.dtype != torch.float16 else 1.0) for v in values if v.numel()]
        none_is_bad = torch.stack([fit.to(device) for fit in fits]).all() if fits else torch.ones((), device=device)
        bad = Collective("sum", 1 - none_is_bad.float().view(1))  # the device is asked once, for all ranks' answers
        self._count(bad)
        return not fsdp.sum_of_shards(self._transport.start(bad, "dgc.finite")(), self._parameters()[0]).item()

    def _skip(self) -> None:
        """No rank takes this step: u and v stay as they are. A scaler learns of it from what is in ``p.grad``."""
        taking_part = self._taking_part(self._parameters())
        self._totals["bytes_sent"] += self._last["bytes_sent"]
        self._reset()
        self._skipped += 1
        self._synchronized = self._skipping = True
        for parameter in taking_part:
            if self._scaler is None:
                parameter.grad = None
            elif parameter.grad is None or (parameter.grad.is_sparse and parameter.grad._nnz() == 0):
                parameter.grad = torch.full_like(parameter, math.inf)
            else:
                (parameter.grad._values() if parameter.grad.is_sparse else parameter.grad).fill_(math.inf)

    def _taking_part(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Those that are exchanged in this step: all that have had a gradient, and those that are not frozen."""
        return [p for p in parameters if p in self._fired or (
            p.requires_grad and (p in self._requires_update or p in self._frozen))]

    def _gradients(self) -> list[Tensor]:
        """All that this rank, or its node, has in this step."""
        return [self._of_node[p] if p in self._of_node else local(p.grad).detach()
                for p in self._taking_part(self._parameters()) if p in self._of_node or p.grad is not None]

    def _average_all_in_node(self) -> None:
        """As the norm of all gradients is wanted before any of them is exchanged among nodes."""
        exchanges = []
        for shipment in self._shipments:
            present = self._taking_part(shipment.parameters)
            if sparse := self._sparse_among(present):
                raise ValueError(f"the gradient of {self._parameter_names[sparse[0]]} is sparse, Config: hierarchical "
                                 "is in force, and clip_norm needs the norm of the node's mean of it; accepted: "
                                 "sparse_as_dense=True")
            if present:
                with beside(present[0].device):
                    exchanges.append((present[0].device, Exchange(
                        self._in_node(shipment, present), self._transport, f"{shipment.name}.node", self._count)))
        for device, exchange in exchanges:
            with beside(device):
                exchange.finish()
            rejoin(device)

    def _clip_scale(self, gradients: list[Tensor]) -> Tensor:
        norms = [self._norm(gradient) for gradient in gradients]
        device = norms[0].device if norms else torch.device("cpu")
        norm = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms])) if norms else torch.zeros(())
        if fsdp.shard(self._parameters()[0]) is not None:
            norm = fsdp.sum_of_shards(norm.square(), self._parameters()[0]).sqrt()
        return self._clipped(norm, self._world)

    def _clip_alone(self) -> None:
        """With one process nothing is exchanged, but a bound on the gradient's norm still holds."""
        clip_norm = self._config.clip_norm
        if clip_norm is None or self._outside:
            return
        gradients = [local(p.grad) for p in self._parameters() if p.grad is not None]
        self._world = World(0, 1)
        scale = self._clip_scale(gradients) if self._config.clips_globally else None
        for g in gradients:
            g.mul_((clip_scale(_norm(g), clip_norm, 1, True) if scale is None else scale).to(g.device))

    def _parameters(self) -> list[Tensor]:
        return _exchanged(self.param_groups)

    def _groups_by_parameter(self) -> dict[Tensor, dict[str, Any]]:
        return {p: group for group in self.param_groups for p in _exchanged([group])}

    def _deliver(self, shipment: Shipment, parameters: list[Tensor], update: Update) -> None:
        """Writes an update into ``p.grad`` of those that took part, or keeps it for :meth:`step` to apply."""
        if self._config.apply_directly and shipment.bucket is not None:
            self._direct.append((shipment, parameters, update))
            for parameter in parameters:
                parameter.grad = None
            return
        targets, others = _targets(shipment, parameters, lambda p: local(p.grad))
        update.write(targets)
        if self._inverse is not None and shipment.kept is not None:
            torch._foreach_div_([target for target in targets if target is not None], self._inverse_number)
        for parameter, target in others:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
                local(parameter.grad).copy_(target)
            elif parameter.grad.is_sparse:
                parameter.grad = target.to(parameter.dtype).to_sparse(parameter.grad.sparse_dim())
            else:
                local(parameter.grad).copy_(target)

    def _add(self, shipment: Shipment, parameters: list[Tensor], update: Update,
             group_of: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Adds an update to the parameters, times their learning rates."""
        targets, others = _targets(shipment, parameters, lambda p: local(p).detach())
        rates = {p: float(group_of[p]["lr"]) * (1 if group_of[p]["maximize"] else -1) for p in shipment.parameters}
        fits = set(parameters).difference(p for p, _ in others)
        update.add([target if p in fits else None for p, target in zip(shipment.parameters, targets, strict=True)],
                   list(rates.values()))
        for p in fits:
            torch.autograd.graph.increment_version(p)  # kernels write to addresses, and a graph may hold the parameter
        if others:
            update.write([None if p in fits else target
                          for p, target in zip(shipment.parameters, targets, strict=True)])
            for p, target in others:
                local(p).add_(target.mul_(rates[p]).to(p.dtype))

    def _close(self) -> None:
        """All updates are there: counts them, and readies the next step."""
        self._steps += 1
        self.param_groups[0][STEP] += 1
        if self._pace is not None:
            self._pace.tick(self.param_groups[0], self.param_groups[0][STEP])
        buckets = self._compressed()
        numel = sum(self._numels.values())
        dense = numel - sum(bucket.numel for bucket in buckets)
        self._last["dense_entries"] = dense
        self._totals["bytes_sent"] += self._last["bytes_sent"]
        self._totals["dense_bytes"] += self._last["dense_bytes"]
        self._totals["dense_entries"] += dense
        self._totals["numel"] += numel
        direct = self._direct
        self._reset()
        self._synchronized, self._direct = True, direct
        self._note_versions(self._allreduce_delay)

    def _compressed(self) -> list[Bucket]:
        return [shipment.bucket for shipment in self._shipments if shipment.bucket is not None]

    def _look(self) -> None:
        """A GPU runs ahead: notes what it has found in the last step's messages. What was taken for bad ones is then
        back in v.
        """
        buckets = self._compressed()
        for device in {bucket.v.device for bucket in buckets}:
            rejoin(device)  # whose v may be in use beside this
        self._found += [error for bucket in buckets if (error := settle(bucket)) is not None]
        self._doubts = [(name, doubt) for name, doubt in self._doubts if doubt.founded]

    def _raise_found(self) -> None:
        """Raises it, where all ranks are: they have found the same, and whoever raises it alone goes on alone."""
        self._look()
        for name, doubt in self._doubts:
            asked = not self._elastic  # where ranks that have come since would not know that they are asked
            blame = Exchange(doubt.who(), self._transport, f"{name}.blame", self._count).finish() if asked else ""
            if doubt.refused:
                self._found.append(doubt.error(blame))
            else:
                self._tell_not_finite(str(doubt.error(blame)))
        self._doubts = []
        if self._found:
            error = self._found[0]
            self._forget()
            raise error

    def _tell_not_finite(self, blame: str) -> None:
        """Warns once, on rank 0, where a gradient that is not finite is applied: all ranks have found the same."""
        if blame and not self._warned_of_nonfinite and self._world.rank == 0:
            self._warned_of_nonfinite = True
            warn(f"{blame}. It is applied as it is, as by Horovod: none of this optimizer's parameters is compressed. "
                 "Config(nonfinite='skip') leaves out such steps")

    def _forget(self) -> None:
        self._found, self._doubts = [], []

    def _kept(self) -> list[Bucket]:
        return [shipment.kept for shipment in self._shipments if shipment.kept is not None]

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it ``step()`` does not synchronize: for scripts that have called ``synchronize()`` themselves."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the exchange and applies the update. A closure is evaluated before the exchange."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._scaler is not None and self._fired and not self._plain:
            why = "there were fewer backward passes than backward_passes_per_step"
            if all(self._allreduce_delay[parameter] <= 0 for parameter in self._fired):
                why = ("torch.utils.checkpoint(use_reentrant=True) ran the backward pass of all of them within another "
                       "one, whose end is not told; use_reentrant=False has no such limit")
            raise RuntimeError(f"scaler.step() has looked at gradients that were not exchanged yet, as {why}; call "
                               "optimizer.synchronize() before it, and before unscale_()")
        if not self._plain and (scaler := _calling_scaler()) is not None and scaler is not self._scaler:
            raise RuntimeError("step() is called by a GradScaler that this optimizer does not know, so that gradients "
                               "were kept with its scale; give it as grad_scaler=")
        if self._should_synchronize:
            if self._synchronized and not self._ends_with_backward:
                warn(SYNCHRONIZED_TWICE + self._told_of_change(" Also, "))  # one warning, as stock's
            self.synchronize()
        if self._skipping:
            self.zero_grad()
        else:
            self._apply()
        self._synchronized = self._skipping = False
        return loss

    def _note_versions(self, parameters: Iterable[Tensor]) -> None:
        """Remembers which gradients there are, to notice where one is changed when that is too late."""
        for p in parameters:
            if (g := p.grad) is not None:
                self._versions[p] = id(g), g._version

    def _changed(self) -> Iterator[Tensor]:
        """Parameters whose gradient is another by now; a scaler's ``unscale_`` does not count as a change."""
        for p, (identity, version) in self._versions.items():
            if (g := p.grad) is None or id(g) != identity or g._version != version:
                yield p

    def _told_of_change(self, before: str = "") -> str:
        """What is to be said, once, of a compressed parameter whose update was changed; a dense one's may be."""
        if self._plain or self._warned_of_change or not self._synchronized:
            return ""
        changed = next((p for p in self._changed() if self._bucket_of(p) is not None), None)
        if changed is None:
            return ""
        self._warned_of_change = True
        return (f"{before}the gradient of {self._parameter_names[changed]} was changed between synchronize() and "
                "step(). What was sent is no longer in the residual, so the difference is lost; to clip, give "
                "Config(clip_norm=...), which clips before anything is accumulated")

    def _apply(self) -> None:
        """The wrapped optimizer's step, on the updates in ``p.grad``.

        A compressed parameter's momentum is in u and its decay is added here, so for those both are switched off.
        """
        if change := self._told_of_change():
            warn(change)
        original = self.param_groups
        try:
            if _is_sgd(self._inner) and not self._plain:
                self.param_groups = [part for group in original for part in self._split(group)]
            _unhooked(self._inner.step)(self)
        finally:
            self.param_groups = original
        if self._direct:
            group_of = self._groups_by_parameter()
            with torch.no_grad():
                for shipment, parameters, update in self._direct:
                    self._add(shipment, parameters, update, group_of)
            self._direct = []

    def _split(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        dense: list[Tensor] = []
        compressed: list[Tensor] = []
        for p in group["params"]:
            (dense if self._bucket_of(p) is None else compressed).append(p)
        changed: dict[str, Any] = {}
        if self._config.momentum_correction:
            changed = {"momentum": 0, "nesterov": False, "weight_decay": 0}
            if self._config.local_weight_decay:
                self._decay(group, compressed)
        elif not self._config.local_weight_decay:
            changed = {"weight_decay": 0}
        return [{**group, "params": dense}, {**group, "params": compressed, **changed}]

    @torch.no_grad()
    def _decay(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """The part of SGD's step that comes from weight decay, with its own momentum: linear, so the sum is SGD's."""
        m, decay, lr = group["momentum"], group["weight_decay"], float(group["lr"])
        direct = {p for _, some, _ in self._direct for p in some}
        for parameter in parameters:
            state = self.state[parameter]
            buffer = state.get("decay_buffer")
            if (parameter.grad is None and parameter not in direct) or (decay == 0 and (m == 0 or buffer is None)):
                continue
            if m == 0:
                parameter.sub_(parameter * (decay * lr))
                continue
            if buffer is None:
                buffer = state["decay_buffer"] = torch.zeros_like(parameter)
            p, buffer = local(parameter), local(buffer)
            if (order := memory_order(p)) is not None:
                p, buffer = p.permute(order), buffer.permute(order)
            kernel = kernels.at_hand(p.device.type if p.is_contiguous() and buffer.is_contiguous() else "any", p.dtype)
            kernel.decay(p, buffer, m, decay, lr, group["nesterov"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``torch.optim.Optimizer.zero_grad``; refused while gradients are being exchanged."""
        if self._fired:
            raise AssertionError("optimizer.zero_grad() was called after loss.backward() but before optimizer.step() "
                                 "or optimizer.synchronize(). This is prohibited as it can cause a race condition.")
        self._inner.zero_grad(self, set_to_none)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def _handles(self) -> dict[Tensor, tuple[Exchange | None, None]]:
        """As stock's: parameters that had a gradient since the last step, with what is under way for them."""
        return {**dict.fromkeys(self._fired, (None, None)), **{
            p: (exchange, None) for _, parameters, exchange in self._exchanges for p in parameters}}

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Optimizer.state_dict``; the residuals have :meth:`residual_state_dict`.

        hvd.broadcast_optimizer_state calls it first of all, and leaves a fresh optimizer with gradients of zero. It
        makes them where the state is empty, which ours never is.
        """
        fresh = STEP in self.param_groups[0] and self.param_groups[0][STEP] == 0 and not self._handles
        if fresh and type(self).__module__ == HOROVODS_MODULE and _is_sgd(self._inner):
            for parameter in self._parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        state: dict[str, Any] = self._inner.state_dict(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.load_state_dict``. Residuals are not part of it: they differ from rank to rank.
        They begin anew, unless :meth:`load_residual_state_dict` is called before or after this.
        """
        self._reset()
        self._should_synchronize = True
        groups = self.param_groups
        self._inner.load_state_dict(self, state_dict)
        groups[:], self.param_groups = self.param_groups, groups  # a scheduler made before wrapping goes by this list
        if self._plain and not self._outside:
            if self._momentum_missing():
                self._warn_of_loss("the state is of several ranks, whose momentum was in their residuals, and one "
                                   "process begins without it: save by dgc.save_checkpoint() and load by "
                                   "dgc.load_checkpoint(), which gives it what all ranks had")
            return
        self.param_groups[0].setdefault(STEP, 0)
        self._adapt()
        if not self._residuals_loaded:
            self._residuals_missing = self.param_groups[0][STEP] > 0
            for views in self._residuals().values():
                for view in views.values():
                    view.zero_()
        self._fill_state()

    def _momentum_missing(self) -> bool:
        """Whether steps were taken whose momentum is not in the state of torch's own SGD."""
        return (_is_sgd(self._inner) and self._config.momentum_correction
                and self.param_groups[0].get(STEP, 0) > 0 and any(
                    group["momentum"] != 0 and p.requires_grad and compressible(p, self._config.min_numel)
                    and self.state.get(p, {}).get("momentum_buffer") is None
                    for group in self.param_groups for p in group["params"]))

    def residual_state_dict(self) -> dict[str, Any]:
        """This rank's u and v, by parameter name, in the residual's dtype. To be saved and loaded on every rank.

        Raises:
            RuntimeError: called between ``backward()`` and ``step()``, when they lack what is on its way.
        """
        if self._between and not self._plain:
            raise RuntimeError("residual_state_dict(), or a copy of the optimizer, was asked for between backward() "
                               "and step(); accepted: after step()")
        world = self._transport.world or World(0, 1)
        shard = fsdp.shard(self._parameters()[0])
        kept = {letter: {name: view.clone() for name, view in views.items()}
                for letter, views in self._residuals().items()}
        return {"version": 1, "rank": world.rank, "size": world.size, **({} if shard is None else {"shard": shard}),
                **kept}

    def _residuals(self) -> dict[str, dict[str, Tensor]]:
        """Views of u and of v, by parameter name, after all that is still to be put back into them."""
        self._look()
        views: dict[str, dict[str, Tensor]] = {"u": {}, "v": {}}
        for bucket in self._kept():
            views["v"].update(bucket.views(bucket.v))
            if bucket.u is not None:
                views["u"].update(bucket.views(bucket.u))
        return views

    def load_residual_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up the u and v that :meth:`residual_state_dict` gave on this rank. Between ``backward()`` and
        ``step()`` what is on its way is dropped, as it belongs to another v.

        Raises:
            ValueError: they are of another version, rank, world size or model; nothing is loaded then.
        """
        world = self._transport.world or World(0, 1)
        shard = fsdp.shard(self._parameters()[0])
        for key, own in (("version", 1), ("rank", world.rank), ("size", world.size), ("shard", shard)):
            if state_dict.get(key) != own:
                raise ValueError(f"residual_state_dict: {key} is {state_dict.get(key)!r}; expected {own!r}")
        for letter, expected in self._residuals().items():
            given = state_dict[letter]
            if given.keys() != expected.keys():
                raise ValueError(f"residual_state_dict: {letter} lacks {sorted(expected.keys() - given.keys())} and "
                                 f"has unknown {sorted(given.keys() - expected.keys())}")
            for name, tensor in given.items():
                if tensor.shape != expected[name].shape:
                    raise ValueError(f"residual_state_dict: {letter} of {name} has shape {tuple(tensor.shape)}; "
                                     f"expected {tuple(expected[name].shape)}")
        self._reset()
        self._put_residuals(state_dict)

    def _put_residuals(self, state: Mapping[str, Any]) -> None:
        self._residuals_missing, self._residuals_loaded, self._shared_by = False, True, state["size"]
        self._apart = True
        for letter, views in self._residuals().items():
            for name, view in views.items():
                view.copy_(state[letter][name])

    @torch.inference_mode(False)  # which evaluating may be in, and where v would become a tensor for inference alone
    @torch.no_grad()
    def flush(self) -> None:
        """Sends what is pending in v, on all ranks, and applies it at the current learning rate. Call it on all of
        them, before evaluating or at the end of training.

        Nothing is accumulated, u and the weights' decay are left alone, and the schedule does not move. With nothing
        pending it changes nothing. Frozen parameters stay as they are, and keep what they have pending.

        Raises:
            TypeError: the optimizer is not SGD, for which a pending gradient times the rate means nothing.
            RuntimeError: called between ``backward()`` and ``step()``.
        """
        if self._plain:
            return
        if not _is_sgd(self._inner):
            raise TypeError(f"flush() is accepted for torch.optim.SGD only; for {type(self).__name__} end the training "
                            "with some dense steps instead, say by dgc.piecewise({0: 0.999, last_steps: 0.0})")
        if self._between:
            raise RuntimeError("flush() was called between backward() and step(); accepted: after step()")
        self._raise_found()
        self._check_unchanged()
        self._meet()
        before, self._last = self._last, Counter()
        group_of = self._groups_by_parameter()
        exchanges = []
        for shipment in self._shipments:
            thawed = [p for p in shipment.parameters if p.requires_grad]
            if shipment.kept is not None and thawed:
                world = self._world.flat if shipment.bucket is None else self._world
                path = flush(shipment.kept, [self._parameter_names[p] for p in thawed], world, average=self._average)
                exchanges.append((shipment, thawed, Exchange(path, self._transport, f"{shipment.name}.flush",
                                                             self._count)))
        for shipment, thawed, exchange in exchanges:
            self._add(shipment, thawed, exchange.finish(), group_of)
        self._totals["bytes_sent"] += self._last["bytes_sent"]
        self._last = before  # what is reported is the last step's

    def report(self) -> Report:
        """Bytes, density and norms of the last step, and totals since construction. Norms are computed here."""
        self._look()
        buckets, last, totals = self._compressed(), self._last, self._totals
        numel = sum(self._numels.values())
        return Report(
            steps=self._steps,
            bytes_sent=float(last["bytes_sent"]),
            node_bytes=float(last["node_bytes"]),
            dense_bytes=float(last["dense_bytes"]),
            message_bytes=last["message_bytes"],
            sparsity=self._paced().sparsity_at(max(0, self.param_groups[0].get(STEP, 0) - 1)),
            density=(sum(int(bucket.entries_sent) for bucket in buckets) + last["dense_entries"])
            / max(1, numel),
            gradient_norm=sum(float(bucket.gradient_square) for bucket in buckets) ** 0.5,
            residual_norm=sum(float(_norm(bucket.v)) ** 2 for bucket in self._kept()) ** 0.5,
            total_bytes_sent=totals["bytes_sent"],
            total_dense_bytes=totals["dense_bytes"],
            skipped=self._skipped,
            lost_residuals=self._lost_residuals,
            total_density=(sum(int(bucket.total_entries) for bucket in buckets) + totals["dense_entries"])
            / max(1, totals["numel"]))

    def __copy__(self) -> Any:
        raise TypeError("copy.copy of a DistributedOptimizer would exchange the same gradients twice; accepted: "
                        "copy.deepcopy, together with the model")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """For pickle and ``copy.deepcopy``: the class is made at run time, so a copy is wrapped anew."""
        state = {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}
        arguments = (self.op, self.gradient_predivide_factor, self._groups, self.sparse_as_dense,
                     _Shared(self._given_process_set), _Shared(self._scaler))
        return _rebuild, (self._inner, state, [(name, p) for p, name in self._parameter_names.items()], self._config,
                          self.backward_passes_per_step, arguments, self.residual_state_dict(), self._sparse_names())

    def _sparse_names(self) -> dict[str, int]:
        """The names of parameters that had a sparse gradient, with its sparse dimensions."""
        return {self._parameter_names[p]: dimensions for p, dimensions in self._sparse.items()}

    def _take_over(self, residuals: Mapping[str, Any], sparse: Mapping[str, int]) -> None:
        """Of the optimizer that this is a copy of."""
        self.load_residual_state_dict(residuals)
        self._load_sparse_names(sparse)

    def _load_sparse_names(self, sparse: Mapping[str, int]) -> None:
        """What :meth:`_sparse_names` gave: a rank without a gradient would not know."""
        self._sparse.update({p: sparse[name] for p, name in self._parameter_names.items() if name in sparse})


@dataclass(frozen=True)
class _Shared:
    """What a deep copy has in common with its original: a process set cannot be copied."""

    value: Any

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


def _rebuild(inner: type[torch.optim.Optimizer], state: dict[str, Any], names: list[tuple[str, Tensor]],
             config: Config, backward_passes_per_step: int, arguments: tuple[Any, ...], residuals: Any,
             sparse: Mapping[str, int]) -> Any:
    optimizer = inner.__new__(inner)
    optimizer.__setstate__(state)
    op, predivide, groups, sparse_as_dense, process_set, grad_scaler = arguments
    wrapped = DistributedOptimizer(optimizer, names, config, backward_passes_per_step, op, predivide, 0, groups,
                                   sparse_as_dense, process_set.value, grad_scaler=grad_scaler.value)
    wrapped._take_over(residuals, sparse)
    return wrapped


def _add_hook(parameter: Tensor, on_gradient: Callable[[Tensor], None]) -> None:
    """Torch takes no hook for a frozen parameter, which may thaw later."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_post_accumulate_grad_hook(on_gradient)
    parameter.requires_grad_(not frozen)


def _exchanged(param_groups: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    """The parameters that may have a gradient: integers, say, are left alone."""
    return [p for group in param_groups for p in group["params"] if p.dtype in DTYPES]


def _said(value: Any) -> Any:
    """Of a setting what is alike on ranks that are: not where an object lies, on which device, or in what order."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (tuple, list)):
        return [_said(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, complex, str)) else type(value).__name__


def _sparsity(config: Config, step: int) -> Any:
    """At a step that is still to come, where even a schedule's error is something to compare."""
    try:
        return config.sparsity_at(step)
    except Exception as error:
        return type(error).__name__


def _targets(shipment: Shipment, parameters: Iterable[Tensor], of: Callable[[Tensor], Tensor | None],
             ) -> tuple[list[Tensor | None], list[tuple[Tensor, Tensor]]]:
    """For :class:`dgc.compressor.Update`: ``of(p)`` of these parameters where its memory will do; else, and listed once
    more with their parameter, new tensors. None for the shipment's other parameters. All in the order of its bucket.
    """
    wanted, targets, others, dtype, kept = set(parameters), [], [], shipment.dtype, shipment.kept
    for i, p in enumerate(shipment.parameters):
        target = None
        if p in wanted:
            target = of(p)
            if target is not None and not target.is_sparse and kept is not None:
                target = kept.in_order(i, target)
            if target is None or target.is_sparse or target.dtype != dtype or not target.is_contiguous():
                target = torch.empty(local(p).numel(), dtype=dtype, device=p.device)
                others.append((p, target.view(local(p).shape) if kept is None else kept.shaped(i, target)))
        targets.append(target)
    return targets, others


def _default(state: dict[str, Any], key: str, like: Tensor | None) -> None:
    if state.get(key) is None:
        state.pop(key, None)  # torch's distributed checkpoints know no None
        if like is not None:
            state[key] = torch.zeros_like(like, requires_grad=False)


def _frames() -> Iterator[Any]:
    """Of the functions that are being called in this thread, from within."""
    frame: Any = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _calling_scaler() -> Any:
    """The GradScaler whose step() calls this, if one does that scales."""
    for frame in _frames():
        if frame.f_code is torch.amp.GradScaler.step.__code__ and frame.f_locals["self"].is_enabled():
            return frame.f_locals["self"]
    return None


def _by_optimizer(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ours where ``self`` may be a wrapper of the optimizer."""
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self if "_shipments" in vars(self) else self.optimizer, *args, **kwargs)

    return call


def _norm(tensor: Tensor) -> Tensor:
    values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    return torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))


def _unhooked(step: Any) -> Any:
    """A step function without torch's wrapper that calls the step hooks: ours is wrapped, and they fire once."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: Any = None) -> None:
    """Copies the parameters of one rank to all others, as ``hvd.broadcast_parameters``, over whatever is initialised.

    Args:
        params: ``model.state_dict()``, a list of ``model.named_parameters()``, or a list of tensors.
        root_rank: whose; a rank within the process set.
        process_set: as for :func:`DistributedOptimizer`.

    Raises:
        ValueError: ``params`` is of another type, or ``root_rank`` is not in the world.
    """
    if isinstance(params, Mapping):
        items = sorted(params.items())
    elif isinstance(params, list):
        items = [item if isinstance(item, tuple) else (str(i), item) for i, item in enumerate(params)]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    transport = find(process_set)
    world = transport.world
    if world is None:
        return
    if not 0 <= root_rank < world.size:
        raise ValueError(f"root_rank is {root_rank!r}; accepted: 0 to {world.size - 1}")
    with torch.no_grad():
        waits = []
        for name, p in items:
            if isinstance(p, Tensor):
                copy = local(p).detach().clone(memory_format=torch.contiguous_format)  # Horovod takes no other
                bits = copy.unsqueeze(-1).view(torch.uint8)  # neither Horovod nor gloo knows every dtype
                waits.append((p, transport.start(Collective("share", bits, root_rank), f"dgc.share.{name}")))
        for p, wait in waits:
            local(p).copy_(wait().view(p.dtype).squeeze(-1))
