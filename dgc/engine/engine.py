"""The road of one step: gradients arrive, are exchanged, and their update is applied."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from dgc.collective import World
from dgc.engine.agreement import Agreement
from dgc.engine.backward import (
    add_hook,
    at_end_of_backward,
    graph_task_id,
    refuse_gradients_of_others,
    within_another,
)
from dgc.engine.exchange import Launcher, fill_with_infinity, finish_exchange, flush_all
from dgc.engine.gradients import Gradients
from dgc.engine.misuse import SYNCHRONIZED_TWICE, Misuse
from dgc.engine.nonfinite import NonFinite
from dgc.engine.optimizer_step import Applier
from dgc.engine.parameters import Parameters, exchanged
from dgc.engine.progress import Progress
from dgc.engine.report import Report
from dgc.engine.residual_state import ResidualState
from dgc.engine.settings import Role, Settings
from dgc.engine.step import Ledger, Phase, Step
from dgc.engine.wrapped import momentum_of
from dgc.warn import warn


class GradientSource(Protocol):
    """What brings an engine its gradients, and decides when a step's exchange ends."""

    ends_with_backward: bool  # the exchange ends with backward(), not with synchronize() or step()
    waits_for_all: bool  # parameters without a gradient take part too, as another rank may have one

    def brings(self, parameter: Tensor) -> bool:
        """Whether the source brings this parameter's gradient. Other parameters are stepped with
        the gradients that they have.
        """

    def watch(self, parameters: Iterable[Tensor], engine: Engine) -> None:
        """Calls :meth:`Engine.arrived` with a parameter each time a backward pass has added to its
        gradient.
        """

    def has_step(self, engine: Engine) -> bool:
        """Whether step() has something to do, if only to raise an error."""

    def synchronize(self, engine: Engine) -> None:
        """Ends the step's exchange, if that has not been done."""

    def before_update(self, engine: Engine) -> None:
        """Called before the optimizer applies what is in ``p.grad``."""


class Hooks:
    """Brings gradients by a hook on each parameter, for :func:`dgc.DistributedOptimizer`.

    Args:
        ends_with_backward: for a GradScaler, whose step() reads ``p.grad`` before it calls the
            optimizer's step().
    """

    def __init__(self, ends_with_backward: bool):
        self.ends_with_backward, self.waits_for_all = ends_with_backward, True
        self._lock = threading.RLock()
        self._graph_task_id = -1  # torch's number of the last backward pass

    def brings(self, parameter: Tensor) -> bool:
        """See :class:`GradientSource`."""
        return True

    def watch(self, parameters: Iterable[Tensor], engine: Engine) -> None:
        """See :class:`GradientSource`."""
        reference, lock = ref(engine), self._lock  # the parameters outlive the optimizer

        def call(parameter: Tensor) -> None:
            if (alive := reference()) is not None:
                with lock:  # torch has a thread for each device of a model, and they run backward side by side
                    alive.arrived(parameter)
                    if self.ends_with_backward:
                        self._call_at_end(alive)

        for parameter in parameters:
            add_hook(parameter, call)

    def _call_at_end(self, engine: Engine) -> None:
        """Calls ``engine.backward_ends()`` when the running backward pass has ended."""
        if (running := graph_task_id()) != self._graph_task_id:
            self._graph_task_id = running
            at_end_of_backward(lambda: None if within_another() else engine.backward_ends())

    def has_step(self, engine: Engine) -> bool:
        """See :class:`GradientSource`. Without gradients zeros are exchanged, as by Horovod."""
        return True

    def synchronize(self, engine: Engine) -> None:
        """See :class:`GradientSource`."""
        engine.exchange()

    def before_update(self, engine: Engine) -> None:
        """See :class:`GradientSource`."""


class Engine:
    """Exchanges an optimizer's gradients and applies their updates. The optimizer holds the engine,
    which refers to it weakly.

    Args:
        optimizer: a distributed optimizer of this package.
        names: parameter -> name.
        settings: what the optimizer was made with.
        source: what brings the gradients.

    Attributes:
        settings: the arguments of the optimizer; plain data.
        step: the state of the step under way; plain data.
        synchronizes: whether step() calls synchronize(); within skip_synchronize() it does not.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[Tensor, str],
        settings: Settings,
        source: GradientSource,
    ):
        self.settings, self.source = settings, source
        self._parameters = parameters = Parameters(optimizer, names, settings)
        self._ledger = Ledger()
        self._gradients = Gradients(parameters)
        self._applier = Applier(parameters)
        self._progress = Progress(parameters, self._gradients, self._applier)
        self._misuse = Misuse(parameters, self._applier)
        self._agreement = Agreement(parameters)
        self._nonfinite = NonFinite(parameters)
        self._launcher = Launcher(
            parameters, self._gradients, self._applier, self._progress, self._misuse
        )
        self._residuals = ResidualState(parameters, self._nonfinite, self._gradients)
        self._steps = 0  # calls of step() that have applied something
        self.synchronizes = True
        self.step = Step((), 0)
        self.register_groups(parameters.groups, settings.groups)
        self._progress.begin()
        self._residuals.begin()

    # -- the parameters ------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """The optimizer (a weak reference: it owns the engine, not the other way round)."""
        return self._parameters.optimizer

    @property
    def names(self) -> dict[Tensor, str]:
        """Parameter -> name, of all that the optimizer has."""
        return self._parameters.names

    @names.setter
    def names(self, names: dict[Tensor, str]) -> None:
        self._parameters.names = names

    @property
    def listed(self) -> dict[Tensor, None]:
        """The parameters whose gradients are exchanged, in order."""
        return self._parameters.listed

    @property
    def requires_update(self) -> set[Tensor]:
        """The parameters that are exchanged even where this rank has no gradient for them."""
        return self._parameters.requires_update

    @requires_update.setter
    def requires_update(self, parameters: set[Tensor]) -> None:
        self._parameters.requires_update = parameters

    @property
    def residual_device(self) -> torch.device | None:
        """The device of the residuals; None if there are none. The model may be on another by now."""
        return next((residual.v.device for residual in self._parameters.residuals()), None)

    @property
    def is_dense(self) -> bool:
        """Whether nothing is compressed in the next step, and nothing has to be agreed on before
        it.
        """
        at_start = (
            self._agreement.reached or self.settings.config.sparsity_at(self._parameters.step) == 0
        )
        return self._parameters.stock and at_start

    def check_unchanged(self) -> None:
        """Refuses parameters that were added, taken away, moved or reshaped by hand."""
        if self.settings.exchanges:
            self._parameters.check_unchanged()

    def register_groups(self, param_groups: list[dict[str, Any]], groups: Any = None) -> None:
        """Exchanges the gradients of these param groups from now on.

        Args:
            param_groups: some of the optimizer's.
            groups: see :func:`dgc.DistributedOptimizer`.
        """
        parameters = [
            p for p in exchanged(param_groups) if self.source.brings(p) and p not in self.listed
        ]
        self.step.delays.update(dict.fromkeys(parameters, self.settings.backward_passes_per_step))
        if self.settings.exchanges:
            refuse_gradients_of_others(param_groups)
        self._parameters.add(parameters, self.source.waits_for_all, groups)
        if self.settings.exchanges:
            self.source.watch(parameters, self)
        if self.settings.role is not Role.SINGLE_PROCESS:
            self._applier.fill_state()

    def group_by_machine(self) -> World:
        """Groups the ranks by machine, on all ranks, before the first step, where the config asks for
        it. Returns the ranks.
        """
        self._gradients.group()
        return self._gradients.world

    @property
    def has_met(self) -> bool:
        """Whether the ranks have been compared."""
        return self._agreement.reached

    def meet(self) -> None:
        """Compares the ranks now, and not at the first exchange.

        Raises:
            ValueError: they do not train the same; on all ranks.
        """
        self._meet(self.step)

    def compare_again(self) -> None:
        """Compares the ranks again at the next step."""
        self._agreement.compare_again()

    def begin(self) -> None:
        """Starts with changed settings, at the step that the training has reached."""
        self._progress.begin()

    # -- a step --------------------------------------------------------------------------------------------------------

    def arrived(self, parameter: Tensor) -> None:
        """A backward pass has added to a parameter's gradient."""
        step = self.step if self.step.phase is Phase.COLLECTING else self._open()
        if (delay := step.delays[parameter]) <= 0:
            self._misuse.refuse_backward()
        if parameter.is_complex() and parameter.grad is not None and parameter.grad.is_conj():
            parameter.grad = parameter.grad.resolve_conj()
        if (
            step.record_gradient(parameter, delay, self._parameters.bucket_of)
            and self._agreement.reached
        ):
            self._launcher.launch_ready(step)

    def backward_ends(self) -> None:
        """A backward pass has ended, and with it the step's exchange, if a gradient is complete."""
        if any(self.step.delays[parameter] == 0 for parameter in self.step.with_gradient):
            self.exchange()

    def _open(self) -> Step:
        """Opens a step at its first gradient; or one more exchange, where an update waits for
        step().
        """
        self._parameters.check_unchanged()
        before = self.step
        if before.phase is Phase.EXCHANGED:
            self.step = before.one_more(self.listed, self.settings.backward_passes_per_step)
            # A gradient that is not finite, and stays in p.grad, will be found in the next sum.
            if before.stock:
                self._nonfinite.forget()
        elif before.phase is not Phase.IDLE:
            self._next_step()
        self._residuals.step_opens()
        if self._agreement.reached:  # else exchange() does this, once the ranks are grouped
            self._progress.open(self.step)
        world = self._gradients.world
        self.step.collect(world, self._parameters.group_of(), self._parameters.buckets)
        self.step.sent["dense_bytes"] = self._parameters.dense_bytes(world.size)
        return self.step

    def _next_step(self, phase: Phase = Phase.IDLE, before: Step | None = None) -> None:
        self.step = Step(self.listed, self.settings.backward_passes_per_step, phase, before)

    def synchronize(self) -> None:
        """Ends the step's exchange, if that has not been done."""
        self.source.synchronize(self)

    def exchange(self) -> None:
        """Waits for the exchange of all gradients; ``p.grad`` then holds what step() applies, alike
        on every rank.
        """
        if self.step.exchanged:
            return
        if not self.settings.exchanges:
            if self.settings.role is Role.SINGLE_PROCESS:
                self._gradients.clip_alone(self.step)
            self._next_step(Phase.EXCHANGED)
            return
        if self.step.phase is Phase.IDLE:
            self._misuse.refuse_unexchanged()
            self._open()
        step, met = self.step, self._agreement.reached
        self._meet(step)
        self._misuse.warn_of_late_change(step)
        self._progress.computing_stops()
        try:
            with step.marked():
                if not met:
                    self._progress.open(step)
                finite = self._run(step)
        except FloatingPointError as error:
            # On all ranks alike, which raise it in step(), if it is called.
            step.error, finite = error, False
            fill_with_infinity(step, self._parameters)
        except ValueError:  # on all ranks alike
            self.abort_step()
            raise
        if finite:
            self._close(step)
        else:
            self._skip(step)

    def _meet(self, step: Step) -> None:
        """Has the ranks agree before the first exchange, and average residuals where they may
        differ within a node.
        """
        try:
            if not self._agreement.reached:
                self._ledger.lost_residuals += self._agreement.reach(
                    self._gradients, self._residuals
                )
        except ValueError:  # on all ranks alike
            self.abort_step()
            raise
        step.world = self._gradients.world
        self._gradients.average_residuals()

    def _run(self, step: Step) -> bool:
        """Exchanges what has not left yet, and waits for all of it. Returns whether all gradients
        are finite.
        """
        step.inverse = self._gradients.measure_inverse()
        self._launcher.reopen_rest(step)
        if self.settings.checks_finite_first and not self._nonfinite.all_finite(
            self._gradients.all(step), step
        ):
            return False
        if self.settings.config.clips_globally:
            if step.world.node_size > 1:
                self._launcher.average_in_node(step)
            step.clip = self._gradients.global_factor(self._gradients.all(step), step)
        self._launcher.launch_rest(step)
        blame = finish_exchange(step, self._parameters, self._applier, self._nonfinite)
        if blame and not self.settings.checks_finite_first:
            step.error = FloatingPointError(blame)
        return not blame

    def _skip(self, step: Step) -> None:
        """Skips a step in which a gradient is not finite. A script, or a GradScaler, finds infinity
        in ``p.grad``.
        """
        step.abort(wait=False)
        if not step.stock or step.error is None:  # else p.grad is stock's
            fill_with_infinity(step, self._parameters)
        self._close_skipped(step)

    def _close_skipped(self, step: Step) -> None:
        """No rank takes this step: step() raises its error, or leaves it out."""
        self._ledger.close_skipped(step)
        self._next_step(Phase.SKIPPED, step)

    def _close(self, step: Step) -> None:
        """All updates have come: counts their bytes, and keeps them for step()."""
        self._ledger.close_with_update(step, self._parameters.numel, self._parameters.dense_numel)
        self._next_step(Phase.EXCHANGED, step)
        if not self._steps:  # later nobody asks
            self.step.changes = self._misuse.changes(self.step)
        self.step.record_versions(self.listed)

    def take_step(self, closure: Callable[[], float] | None) -> float | None:
        """Waits for the exchange and applies the update. A closure is evaluated before the
        exchange.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.source.has_step(self):
            return loss
        if self.settings.exchanges or (
            self.step.exchanged and self.settings.config.clip_norm is not None
        ):
            self._misuse.refuse_scaler(self.step)
        if self.synchronizes:
            # One warning, as stock's.
            if self.step.exchanged and not self.source.ends_with_backward:
                warn(SYNCHRONIZED_TWICE + self._misuse.changed_update_warning(self.step, " Also, "))
            self.synchronize()
        self.raise_found()
        if self.step.phase is Phase.SKIPPED:
            self.optimizer.zero_grad()
        else:
            self.source.before_update(self)
            if change := self._misuse.changed_update_warning(self.step):
                warn(change)
            self.apply()
        return loss

    def raise_found(self) -> None:
        """Raises the error of the exchange that step() is about to apply. In stock's steps, and in
        the last step before them, the GPU is asked for its verdict here, as no later exchange asks.
        """
        step = self.step
        error: FloatingPointError | ValueError | None = step.error
        if (
            self.settings.exchanges
            and step.phase is Phase.EXCHANGED
            and (step.stock or step.hands_back)
            and self._nonfinite.is_error
        ):
            error = self._nonfinite.take_found(step)
            if error is not None and self.settings.checks_finite_first:
                self._close_skipped(step)
                return
        if error is not None:
            self._next_step()
            raise error

    def apply(self) -> None:
        """Takes the wrapped optimizer's step on what is in ``p.grad``. A step without an exchange
        is not counted.
        """
        step, counts = self.step, self.step.exchanged and self.settings.exchanges
        if counts:
            self._progress.advance()
        elif self.settings.exchanges:
            step.stock = self._parameters.stock
        self._applier.apply(step)
        self._steps += 1
        if counts:
            if step.hands_back:
                self._progress.momentum_out_of_u(step)
            self._residuals.follow_step()
        if step.exchanged:
            self._next_step()

    # -- a step that is not taken --------------------------------------------------------------------------------------

    def check_between_steps(self, what: str) -> None:
        """Refuses a call between backward() and step(), when entries are on their way and in
        neither u nor v.
        """
        if self.step.waits_for_update:
            raise RuntimeError(
                f"{what} must be called after step(), got a call between backward() and step()"
            )

    def drop_update(self) -> None:
        """Drops the update that waits for step(), which restores v."""
        unapplied = self.step.unapplied
        if not self._steps:
            self._misuse.refuse_step_of_another(self.step)
        self._undo_exchanges()
        if any(
            float(received.bucket.residual.gradient_square)
            for received in unapplied
            if received.bucket.residual
        ):
            self._misuse.warn_of_dropped_update()
        if self.settings.exchanges:
            self._nonfinite.forget()  # nobody applies what was not finite
        self._next_step()

    def _undo_exchanges(self) -> None:
        """Restores v where updates will not be applied."""
        step = self.step
        for received in [*step.earlier, *step.unapplied]:
            self._applier.undo_exchange(received, received.parameters)
        self._applier.restore_v(step.direct, step)
        self._parameters.emptied.difference_update(
            p for received in step.direct for p in received.parameters
        )

    def abort_step(self) -> None:
        """Aborts the step under way, which restores v."""
        self.step.abort(wait=False)
        self._undo_exchanges()
        self._ledger.close_without_update(self.step)
        self._next_step()

    def abort_step_together(self) -> None:
        """Aborts the step under way on all ranks, as another state is loaded. What some ranks have
        begun, all begin and wait for: torch.distributed pairs collectives up by order, Horovod by
        name. Either every rank has had a gradient or none has. After a failure nobody knows what
        the others have begun.
        """
        step = self.step
        begun = (
            step.phase is Phase.COLLECTING
            and self._agreement.reached
            and self._launcher.launches_early
        )
        try:
            if begun and not step.failed:
                self._launcher.launch_rest(step)
                step.abort(wait=True)
        finally:
            self.abort_step()

    # -- the optimizer's state -----------------------------------------------------------------------------------------

    def state_changes(self) -> None:
        """Called when the optimizer's state is handed out: a script may write into it."""
        self._applier.state_changes()

    def resume(self) -> None:
        """Continues a training that was loaded into the optimizer."""
        compressed = not self._parameters.stock  # begin() forgets, alone
        self._progress.begin()
        if self.settings.role is Role.SINGLE_PROCESS:
            has_momentum = any(momentum_of(group)[0] for group in self._parameters.groups)
            if compressed and has_momentum and self.settings.config.momentum_correction:
                self._misuse.warn_of_missing_momentum(of_adam=not self._applier.is_sgd)
            return
        self._residuals.begin_anew()
        self._applier.fill_state()

    def report(self) -> Report:
        """What was sent in the last step and in all."""
        self._nonfinite.poll()
        return self._ledger.report(self._parameters, self._progress.last_sparsity())

    # -- residuals -----------------------------------------------------------------------------------------------------

    @property
    def v_is_update(self) -> bool:
        """Whether v can be added to the parameters: it holds updates, not gradients."""
        return self._applier.v_is_update

    # Evaluation may run in inference mode, where v would become an inference tensor.
    @torch.inference_mode(False)
    @torch.no_grad()
    def flush(self) -> None:
        """Sends all of v, on all ranks, and applies it."""
        step = Step((), 0)
        self._nonfinite.raise_found(step)
        self._parameters.check_unchanged()
        self._meet(step)
        try:
            flush_all(self._parameters, self._applier, step)
        finally:
            self._ledger.close_without_update(step)

    def residual_views(self) -> dict[str, dict[str, Tensor]]:
        """Views of u and of v, by parameter name."""
        return self._residuals.views()

    def residuals(self) -> dict[str, Any]:
        """A copy of this rank's u and v, by parameter name, and whose they are."""
        return self._residuals.state()

    def load_residuals(self, state: Mapping[str, Any]) -> None:
        """Loads what :meth:`residuals` gave. Aborts the step under way.

        Raises:
            ValueError: the state is of another version, rank, world size or model; nothing is
                loaded then.
        """
        self.abort_step_together()
        self._residuals.check(state)
        self._residuals.load(state)
        self._progress.cancel_first_step()

    def sparse_names(self) -> dict[str, int]:
        """The names of parameters that had a sparse gradient, with its sparse dimensions."""
        return self._parameters.sparse_names()

    def load_sparse_names(self, sparse: Mapping[str, int]) -> None:
        """Loads what :meth:`sparse_names` gave: a rank without a gradient would not know."""
        self._parameters.load_sparse_names(sparse)

    def become_copy(self, residuals: Mapping[str, Any], sparse: Mapping[str, int]) -> None:
        """Makes this optimizer a copy of another one, with its residuals. Those of another rank are
        left out: rank 0 may have broadcast a scheduler, which holds its optimizer.
        """
        if self._residuals.is_of_another_rank(residuals):
            warn(
                f"a copy of rank {residuals['rank']}'s DistributedOptimizer begins without residuals on another rank, "
                "as each has its own (to broadcast a scheduler, broadcast its state_dict())"
            )
        else:
            self.load_residuals(residuals)
            self._residuals.follow_step()
        self.load_sparse_names(sparse)

    # -- an elastic job's state ----------------------------------------------------------------------------------------

    def commit(self) -> dict[str, Any]:
        """A copy of the state that :meth:`restore` loads."""
        if self.settings.exchanges:
            self.check_between_steps("state.commit()")
        return {
            "size": self._residuals.world_size,
            "lost": self._ledger.lost_residuals,
            **copy.deepcopy(self._residuals.views()),
        }

    def roll_back(self) -> None:
        """Aborts the step under way, which may never end, as ranks are gone. Forgets the errors of
        the last step: a rank that joins has not found them.
        """
        self.abort_step()
        self._nonfinite.forget()

    def restore(self, committed: Mapping[str, Any]) -> None:
        """Loads what :meth:`commit` gave, after the optimizer's own state of that commit."""
        self._residuals.load(committed)
        # Those that are gone since are counted anew.
        self._ledger.lost_residuals = committed["lost"]


def engine_of(optimizer: Any) -> Engine:
    """The engine of a distributed optimizer; also of a wrapper such as PyTorch Lightning's and
    Fabric's, which inherits from the class of the optimizer that it holds, and has none of its
    attributes.

    Raises:
        AttributeError: it is no distributed optimizer of this package.
    """
    engine: Engine | None = vars(optimizer).get("_dgc")
    return engine_of(optimizer.optimizer) if engine is None else engine
