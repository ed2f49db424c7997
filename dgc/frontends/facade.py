"""The methods that a distributed optimizer has on top of the wrapped one's. Each asks the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dgc.config import Config
from dgc.engine.adam import restore_counts
from dgc.engine.backward import frames, making_state
from dgc.engine.engine import Engine, engine_of
from dgc.engine.parameters import STEP
from dgc.engine.report import Report
from dgc.engine.step import Phase
from dgc.engine.wrapped import refuse_apex, unhooked
from dgc.frontends import checks
from dgc.transport.run import HOROVODS_MODULE, ProcessSet

T = TypeVar("T")


class _OfEngine(Generic[T]):
    """An attribute of stock Horovod's optimizer, which scripts read and may set. The engine holds
    it.
    """

    def __init__(self, path: str):
        self._read = attrgetter(path)
        self._where, _, self._name = path.rpartition(".")

    def __get__(self, optimizer: Any, kind: Any = None) -> T:
        value: T = self._read(engine_of(optimizer))
        return value

    def __set__(self, optimizer: Any, value: T) -> None:
        engine = engine_of(optimizer)
        setattr(attrgetter(self._where)(engine) if self._where else engine, self._name, value)


class Distributed(torch.optim.Optimizer):
    """The type of what :func:`dgc.DistributedOptimizer` returns: a torch optimizer with these
    methods. Its class is made at run time and inherits from the wrapped optimizer's.
    """

    _inner: type[torch.optim.Optimizer]
    _dgc: Engine

    backward_passes_per_step = _OfEngine[int]("settings.backward_passes_per_step")
    op = _OfEngine[int]("settings.op")
    gradient_predivide_factor = _OfEngine[float]("settings.gradient_predivide_factor")
    sparse_as_dense = _OfEngine[bool]("settings.sparse_as_dense")
    process_set = _OfEngine[ProcessSet]("settings.transport.process_set")
    _compression = _OfEngine[Config]("settings.config")
    _groups = _OfEngine[Any]("settings.groups")
    _parameter_names = _OfEngine[dict[Tensor, str]]("names")
    _requires_update = _OfEngine[set[Tensor]]("requires_update")
    _allreduce_delay = _OfEngine[dict[Tensor, int]]("step.delays")
    _should_synchronize = _OfEngine[bool]("synchronizes")
    _synchronized = _OfEngine[bool]("step.exchanged")

    @property
    def _handles(self) -> dict[Tensor, tuple[Any, None]]:
        """Stock's attribute: the parameters that had a gradient since the last step, and their
        exchanges.
        """
        step = engine_of(self).step
        return (
            {}
            if step.phase is not Phase.COLLECTING
            else {
                **dict.fromkeys(step.with_gradient, (None, None)),
                **{p: (flight.run, None) for flight in step.in_flight for p in flight.parameters},
            }
        )

    # -- Horovod's -------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits for the exchange of all gradients; ``p.grad`` then holds the averaged update, alike
        on every rank.
        """
        engine_of(self).synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it ``step()`` does not synchronize: for scripts that have called ``synchronize()``
        themselves.
        """
        with skipping_synchronize(engine_of(self)):
            yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many backward passes add up to one step. If a gradient of this step is complete,
        it holds from the next step on.
        """
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        set_passes(engine_of(self), passes)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as torch's
        """Waits for the exchange and applies the update. A closure is evaluated before the
        exchange.
        """
        engine = engine_of(self)
        if not engine.optimizer.state and making_state():
            # Its gradients and learning rates are 0.
            return unhooked(self._inner.step)(engine.optimizer)
        return engine.take_step(closure)

    def zero_grad(self, *args: bool, **kwargs: bool) -> None:
        """As the wrapped optimizer's; refused while gradients are being exchanged. An update that
        waits for step() is dropped.
        """
        engine = engine_of(self)
        refuse_or_drop(engine)
        self._inner.zero_grad(engine.optimizer, *args, **kwargs)

    # -- DGC's -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Sends everything in v and applies it. Call it on all ranks, before evaluating or at the
        end of training.

        It applies v at the current learning rate; with AdamW, at the rates of the gradients' own
        steps. No gradient is accumulated, u is left alone, weights do not decay, and the schedule
        does not move. If v is zero it changes nothing. Frozen parameters stay as they are, and keep
        their v.

        Raises:
            TypeError: the optimizer is neither SGD nor AdamW with momentum correction: it cannot
                apply v times the learning rate.
            RuntimeError: called between ``backward()`` and ``step()``.
        """
        engine = engine_of(self)
        if not engine.settings.exchanges:
            return
        if not engine.v_is_update:
            if not engine.settings.config.compresses:
                return  # nothing is ever pending
            raise TypeError(
                "flush() must be called on a torch.optim.SGD, or AdamW with momentum correction, got "
                f"{type(self).__name__} (end its training with some dense steps instead, say by "
                "dgc.piecewise({0: 0.999, last_steps: 0.0}))"
            )
        engine.check_between_steps("flush()")
        engine.flush()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the parameters are alike on all ranks, to evaluate or to save a model.

        Without ``Config(local_steps=...)`` they are alike anyway. With local steps, ranks differ
        between rounds: within this context the parameters are those of the last round. Nothing is
        exchanged.
        """
        yield

    def report(self) -> Report:
        """Bytes, density and norms of the last step, and totals since construction. The norms are
        computed here.
        """
        return engine_of(self).report()

    def residual_state_dict(self) -> dict[str, Any]:
        """This rank's u and v, by parameter name, in the dtype of the residuals. Save and load it
        on every rank.

        Raises:
            RuntimeError: called between ``backward()`` and ``step()``, when a part is on its way to
                other ranks.
        """
        engine = engine_of(self)
        if engine.settings.exchanges:
            engine.check_between_steps("residual_state_dict(), or a copy of the optimizer,")
        return engine.residuals()

    def load_residual_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the u and v of :meth:`residual_state_dict` on this rank. A step between
        ``backward()`` and ``step()`` is aborted, because its messages belong to another v.

        Raises:
            ValueError: they are of another version, rank, world size or model; nothing is loaded
                then.
        """
        engine_of(self).load_residuals(state_dict)

    def _become_copy(self, residuals: Mapping[str, Any], sparse: Mapping[str, int]) -> None:
        """Takes up what the original of a copy had."""
        engine_of(self).become_copy(residuals, sparse)

    # -- torch's ---------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; its parameters are exchanged like the
        others.
        """
        engine = engine_of(self)
        settings, optimizer = engine.settings, engine.optimizer
        engine.check_between_steps("add_param_group()")
        engine.check_unchanged()
        before = len(optimizer.param_groups)
        self._inner.add_param_group(optimizer, param_group)
        try:
            checks.check_group(optimizer.param_groups[-1], settings.config, self._inner)
            checks.check_shards(
                optimizer.param_groups, settings.process_set, settings.config, settings.grad_scaler
            )
            names = checks.named(optimizer.param_groups, settings.named_parameters, generate=True)
        except (TypeError, ValueError):
            del optimizer.param_groups[before:]
            raise
        for parameter, name in names.items():
            engine.names.setdefault(parameter, name)
        engine.register_groups(optimizer.param_groups[-1:])

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Optimizer.state_dict``; the residuals have :meth:`residual_state_dict`.

        hvd.broadcast_optimizer_state calls it first of all, and leaves a fresh optimizer with
        gradients of zero. It makes them where the state is empty, which ours never is.
        """
        engine = engine_of(self)
        fresh = (
            engine.optimizer.param_groups[0].get(STEP) == 0
            and engine.step.phase is not Phase.COLLECTING
        )
        if (
            fresh
            and engine.v_is_update
            and type(engine.optimizer).__module__ == HOROVODS_MODULE
            and any(frame.f_code.co_name == "broadcast_optimizer_state" for frame in frames())
        ):
            for parameter in engine.listed:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        engine.state_changes()
        state: dict[str, Any] = self._inner.state_dict(engine.optimizer)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.load_state_dict``. Residuals are not part of it: they differ
        from rank to rank. They begin anew, unless :meth:`load_residual_state_dict` is called before
        or after this.
        """
        engine = engine_of(self)
        optimizer = engine.optimizer
        refuse_apex(optimizer)
        engine.abort_step_together()
        engine.synchronizes = True
        groups, given = optimizer.param_groups, [state_dict]
        # By other hooks.
        last = optimizer.register_load_state_dict_pre_hook(lambda _, changed: given.append(changed))
        try:
            self._inner.load_state_dict(optimizer, state_dict)
        finally:
            last.remove()
        restore_counts(optimizer, given[-1])
        # A scheduler made before wrapping goes by this list.
        groups[:], optimizer.param_groups = optimizer.param_groups, groups
        engine.resume()

    def __copy__(self) -> Any:
        raise TypeError(
            "a copy of a DistributedOptimizer must be a copy.deepcopy, together with the model, got "
            "copy.copy, which would exchange the same gradients twice"
        )


@contextmanager
def skipping_synchronize(engine: Engine) -> Iterator[None]:
    """Within it ``step()`` does not synchronize."""
    engine.synchronizes = False
    try:
        yield
    finally:
        engine.synchronizes = True


def set_passes(engine: Engine, passes: int) -> None:
    """Sets how many backward passes add up to one step."""
    engine.settings.backward_passes_per_step = passes
    if 0 not in engine.step.delays.values():  # else its bucket would be complete a second time
        engine.step.delays.update(dict.fromkeys(engine.step.delays, passes))


def refuse_or_drop(engine: Engine) -> None:
    """Before gradients are set to zero: refuses it while they are being exchanged, and drops an
    update that waits for step().
    """
    if engine.step.phase is Phase.COLLECTING:
        raise AssertionError(
            "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() "
            "or optimizer.synchronize(). This is prohibited as it can cause a race condition."
        )
    if engine.step.exchanged:
        engine.drop_update()
