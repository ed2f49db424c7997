"""The road of one step: gradients arrive, are exchanged, and their update is applied."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dgc.engine.adam import Denominators
from dgc.engine.agreement import Agreement
from dgc.engine.backward import refuse_gradients_of_others
from dgc.engine.exchange import Launcher, Outgoing, arrive, flush_all, skip
from dgc.engine.gradients import Nodes, Scaling
from dgc.engine.misuse import SYNCHRONIZED_TWICE, Misuse
from dgc.engine.nonfinite import NonFinite
from dgc.engine.optimizer_step import Applier, Momentum
from dgc.engine.parameters import Parameters, exchanged
from dgc.engine.pending import Pending
from dgc.engine.progress import Progress
from dgc.engine.settings import Role, Settings
from dgc.engine.step import Ledger, Phase, Step
from dgc.engine.wrapped import momentum_of
from dgc.warn import warn


class GradientSource(Protocol):
    """Brings the gradients, and so decides when a step's exchange ends."""

    ends_with_backward: bool  # the exchange does, rather than with synchronize() or step()
    waits_for_all: bool  # parameters without a gradient take part too, as another rank may have one

    def brings(self, parameter: Tensor) -> bool:
        """Whether it brings this parameter's gradient; what it does not is stepped as it is."""

    def watch(self, parameters: Iterable[Tensor], engine: Engine) -> None:
        """Has :meth:`Engine.arrived` called with each parameter when a backward pass has added to its gradient."""

    def arrived(self, engine: Engine) -> None:
        """Is told of each such gradient, where ``ends_with_backward``: has :meth:`Engine.backward_ends` called then."""

    def has_step(self, engine: Engine) -> bool:
        """Whether step() has something to do, if only to raise an error."""

    def synchronize(self, engine: Engine) -> None:
        """Ends the step's exchange, if that has not been done."""

    def before_update(self, engine: Engine) -> None:
        """Is told that the optimizer is about to apply what is in ``p.grad``."""


class Engine:
    """Takes an optimizer's gradients to its parameters. The optimizer holds it, and it does not hold the optimizer.

    Args:
        optimizer: whose parameters.
        inner: the class of the wrapped optimizer.
        names: parameter -> name.
        settings: what the optimizer was made with.
        source: what brings the gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, inner: type[torch.optim.Optimizer], names: dict[Tensor, str],
                 settings: Settings, source: GradientSource):
        self.settings, self.source = settings, source
        self.parameters = parameters = Parameters(optimizer, names, settings)
        self.ledger = Ledger()
        self.scaling = Scaling(settings, parameters)
        self.nodes = Nodes(settings, parameters, self.scaling)
        of_adam, momentum = Denominators(settings, parameters, inner), Momentum(settings, parameters, inner)
        self.applier = Applier(settings, parameters, inner, of_adam, momentum)
        self.progress = Progress(settings, parameters, self.nodes, momentum, of_adam)
        self.misuse = Misuse(settings, parameters, self.applier)
        self.agreement = Agreement(settings, parameters)
        self.nonfinite = NonFinite(settings, parameters)
        outgoing = Outgoing(settings, parameters, self.scaling, self.nodes, of_adam)
        self.launcher = Launcher(settings, parameters, outgoing, self.nodes, self.applier, self.progress, self.misuse,
                                 self.ledger)
        self.pending = Pending(settings, parameters, self.nonfinite, self.nodes)
        self.synchronizes = True  # step() does, but within skip_synchronize()
        self.steps = 0  # calls of step() that have applied something
        self.step = Step((), 0)
        self.adopt(parameters.groups, settings.groups)
        self.progress.begin()
        if settings.role is not Role.ALONE:
            self.progress.fill_state()
            self.pending.missing = settings.exchanges and parameters.step > 0

    def adopt(self, param_groups: list[dict[str, Any]], groups: Any = None) -> None:
        """Exchanges the gradients of these param groups from now on; ``groups``: see :meth:`Parameters.register`."""
        parameters = [p for p in exchanged(param_groups) if self.source.brings(p) and p not in self.parameters.listed]
        self.parameters.add(parameters, self.source.waits_for_all)
        self.step.delays.update(dict.fromkeys(parameters, self.settings.backward_passes_per_step))
        if self.settings.exchanges:
            refuse_gradients_of_others(param_groups)
            self.parameters.register(parameters, groups)
            self.source.watch(parameters, self)

    def go_on(self) -> None:
        """Goes on with a training that was loaded into the optimizer."""
        compressed = not self.parameters.stock  # begin() forgets, alone
        self.progress.begin()
        if self.settings.role is Role.ALONE:
            has_momentum = any(momentum_of(group)[0] for group in self.parameters.groups)
            if compressed and has_momentum and self.settings.config.momentum_correction:
                self.misuse.tell_of_missing_momentum(of_adam=not self.applier.is_sgd)
            return
        self.pending.begin_anew()
        self.progress.fill_state()

    def give_up(self) -> None:
        """Drops the step under way; what it took out of v is put back."""
        self.step.abandon(wait=False)
        self.ledger.drop()
        self._next_step()

    def _next_step(self, phase: Phase = Phase.IDLE, before: Step | None = None) -> None:
        self.step = Step(self.parameters.listed, self.settings.backward_passes_per_step, phase, before)
        self.misuse.forget()

    def arrived(self, parameter: Tensor) -> None:
        """A backward pass has added to a parameter's gradient."""
        step = self.step if self.step.phase is Phase.COLLECTING else self._open()
        if (delay := step.delays[parameter]) <= 0:
            self.misuse.refuse_backward()
        if parameter.is_complex() and parameter.grad is not None and parameter.grad.is_conj():
            parameter.grad = parameter.grad.resolve_conj()
        if step.arrive(parameter, delay, self.parameters.bucket_of) and self.agreement.reached:
            self.launcher.launch_ready(step)
        if self.source.ends_with_backward:
            self.source.arrived(self)

    def backward_ends(self) -> None:
        """A backward pass has ended, and with it the step's exchange, if a gradient is complete."""
        if any(self.step.delays[parameter] == 0 for parameter in self.step.fired):
            self.exchange()

    def _open(self) -> Step:
        """The first gradient of a step has come, or of one more exchange in the step whose update waits for step()."""
        self.parameters.check_unchanged()
        world, before = replace(self.settings.world, node_size=self.nodes.size), self.step
        if before.phase is Phase.EXCHANGED:
            self.step = Step(self.parameters.listed, self.settings.backward_passes_per_step)
            self.step.earlier, self.step.direct = before.deliveries, before.direct
            self.misuse.step_goes_on()
            if before.stock:  # a gradient that is not finite, and is kept, will be found in the next sum
                self.nonfinite.look()
                self.nonfinite.forget()
        elif before.phase is not Phase.IDLE:
            self._next_step()
        self.pending.step_opens()
        if self.agreement.reached:  # else how ranks are grouped may not be known, and exchange() does this
            self.progress.open(self.step)
        self.step.collect(world, self.parameters.group_of(), self.parameters.buckets)
        self.ledger.open(self.parameters.dense_bytes(world.size))
        return self.step

    def exchange(self) -> None:
        """Waits for the exchange of all gradients; ``p.grad`` then holds what step() applies, alike on every rank."""
        if self.step.exchanged:
            return
        if not self.settings.exchanges:
            if self.settings.role is Role.ALONE:
                self.scaling.clip_alone(self.step)
            self._next_step(Phase.EXCHANGED)
            return
        if self.step.phase is Phase.IDLE:
            self.misuse.refuse_unexchanged()
            self._open()
        step, met = self.step, self.agreement.reached
        self._meet(step)
        self.misuse.tell_of_late_change()
        self.progress.computing_stops()
        try:
            with step.marked():
                if not met:
                    self.progress.open(step)
                finite = self._run(step)
        except FloatingPointError as error:  # on all ranks alike, which raise it in step(), if it is called
            step.error, finite = error, False
            skip(step, self.parameters)
        except ValueError:  # on all ranks alike
            self.give_up()
            raise
        if finite:
            self._close(step)
        else:
            self._skip(step)

    def _run(self, step: Step) -> bool:
        """Exchanges what has not left yet, and waits for all of it. Returns whether all gradients are finite."""
        count = self.ledger.counting(step)
        step.inverse = self.scaling.measure_inverse()
        self.launcher.reopen_rest(step)
        if self.settings.waits and not self.nonfinite.all_finite(self.scaling.gradients(step), step, count):
            return False
        if self.settings.config.clips_globally:
            if step.world.node_size > 1:
                self.launcher.average_in_node(step)
            step.clip = self.scaling.global_factor(self.scaling.gradients(step), step)
        self.launcher.launch_rest(step)
        blame = arrive(step, self.parameters, self.applier, self.nonfinite, count)
        if blame and not self.settings.waits:
            step.error = FloatingPointError(blame)
        return not blame

    def _meet(self, step: Step) -> None:
        """Agrees with the other ranks, the first time, before anything is exchanged."""
        try:
            if not self.agreement.reached:
                self.ledger.lost_residuals += self.agreement.reach(self.nodes, self.pending)
        except ValueError:  # on all ranks alike
            self.give_up()
            raise
        step.world = replace(self.settings.world, node_size=self.nodes.size)
        self.nodes.level()

    def _skip(self, step: Step) -> None:
        """No rank takes this step, as a gradient is not finite: it is left out, or step() raises the error. A script,
        and a scaler, learn of it from what is in ``p.grad``.
        """
        if step.error is None:
            self.ledger.skip()
        else:
            self.ledger.drop()
        step.abandon(wait=False)
        if not step.stock or step.error is None:  # else p.grad is stock's
            skip(step, self.parameters)
        self._next_step(Phase.SKIPPED, step)

    def _close(self, step: Step) -> None:
        """All updates are there: counts them, and readies the next step."""
        self.ledger.close(self.parameters.numel, self.parameters.dense_numel)
        self._next_step(Phase.EXCHANGED, step)
        if not self.steps:  # later nobody asks
            self.step.changes = self.misuse.changes(self.step)
        self.misuse.note(self.parameters.listed)

    def take_step(self, closure: Callable[[], float] | None) -> float | None:
        """Waits for the exchange and applies the update. A closure is evaluated before the exchange."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.source.has_step(self):
            return loss
        if self.settings.exchanges or (self.step.exchanged and self.settings.config.clip_norm is not None):
            self.misuse.refuse_scaler(self.step)
        if self.synchronizes:
            if self.step.exchanged and not self.source.ends_with_backward:  # one warning, as stock's
                warn(SYNCHRONIZED_TWICE + self.misuse.told_of_changed_update(self.step, " Also, "))
            self.source.synchronize(self)
        if (error := self.found()) is not None:
            self._next_step()
            raise error
        if self.step.phase is Phase.SKIPPED:
            self.parameters.optimizer.zero_grad()
        else:
            self.source.before_update(self)
            if change := self.misuse.told_of_changed_update(self.step):
                warn(change)
            self.apply()
        return loss

    def found(self) -> FloatingPointError | ValueError | None:
        """The error of the step that step() is called for. In stock's steps, and in the last before them, a GPU is
        asked for it, as nothing tells of it later.
        """
        step = self.step
        asks = step.phase is Phase.EXCHANGED and (step.stock or step.hands_back) and self.nonfinite.is_error
        if not asks or not self.settings.exchanges:
            return step.error
        error = self.nonfinite.take_found(self.settings.world.rank, self.ledger.counting(step))
        if error is None or not self.settings.waits:
            return error
        self.ledger.skip()
        self._next_step(Phase.SKIPPED, step)
        return None

    def apply(self) -> None:
        """Takes the wrapped optimizer's step on what is in ``p.grad``; it is counted, if it was exchanged."""
        step, counts = self.step, self.step.exchanged and self.settings.exchanges
        if counts:
            self.progress.advance()
        elif self.settings.exchanges:
            step.stock = self.parameters.stock
        self.applier.apply(step)
        self.steps += 1
        if counts:
            if step.hands_back:
                self.progress.hand_back(step)
            self.pending.step_ends()
        if step.exchanged:
            self._next_step()

    def drop_update(self) -> None:
        """Drops the update that waits for step(): what was sent of compressed gradients goes back into v."""
        deliveries = self.step.deliveries
        if not self.steps:
            self.misuse.refuse_step_of_another(self.step)
        for delivery in deliveries:
            self.applier.take_back(delivery, delivery.parameters)
        if any(float(delivery.bucket.kept.gradient_square) for delivery in deliveries if delivery.bucket.kept):
            self.misuse.tell_of_dropped_update()
        if self.settings.exchanges:
            self.nonfinite.look()
            self.nonfinite.forget()  # nobody applies what was not finite
        self._next_step()

    @torch.inference_mode(False)  # which evaluating may be in, and where v would become a tensor for inference alone
    @torch.no_grad()
    def flush(self) -> None:
        """Sends what is pending in v, on all ranks, and applies it."""
        step = Step((), 0)
        count = self.ledger.counting(step)
        self.nonfinite.raise_found(self.settings.world.rank, count)
        self.parameters.check_unchanged()
        self._meet(step)
        self.ledger.open(0.0)
        try:
            flush_all(self.parameters, self.settings, step.world, self.applier, count)
        finally:
            self.ledger.drop()


def drop(engine: Engine) -> None:
    """Drops the step under way, as something else is loaded on all ranks. What some of them have begun is begun by all,
    and waited for: torch.distributed pairs collectives up by order, and Horovod by names. Each rank must have had a
    gradient, or each none. Of a step that has failed nobody knows what the others have begun.
    """
    step = engine.step
    begun = step.phase is Phase.COLLECTING and engine.agreement.reached and engine.launcher.launches_early
    try:
        if begun and not step.failed:
            engine.launcher.launch_rest(step)
            step.abandon(wait=True)
    finally:
        engine.give_up()


def engine_of(optimizer: Any) -> Engine:
    """The engine of a distributed optimizer; also of a wrapper such as PyTorch Lightning's and Fabric's, which inherits
    from the class of the optimizer that it holds, and has none of its attributes.

    Raises:
        AttributeError: it is no distributed optimizer of this package.
    """
    engine: Engine | None = vars(optimizer).get("_dgc")
    return engine_of(optimizer.optimizer) if engine is None else engine
