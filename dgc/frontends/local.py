"""The optimizer with local steps: the methods that differ from those of an optimizer that exchanges
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dgc.collective import World
from dgc.config import Config
from dgc.engine.backward import making_state
from dgc.engine.engine import Engine, Hooks, engine_of
from dgc.engine.report import Report
from dgc.engine.rounds import Rounds
from dgc.engine.settings import Settings
from dgc.engine.wrapped import unhooked
from dgc.frontends import checks
from dgc.frontends.facade import Distributed, refuse_or_drop, set_passes, skipping_synchronize
from dgc.transport.machine import Machine


def connect_rounds(optimizer: Any, names: dict[Tensor, str], settings: Settings) -> World:
    """Gives an optimizer of a distributed class its rounds, and their engine. Returns the ranks,
    which are grouped by machine with ``hierarchical``.
    """
    optimizer._rounds = Rounds(optimizer, names, settings)
    optimizer._dgc = optimizer._rounds.engine
    return optimizer._rounds.engine.group_by_machine()


def average_in_machine(
    optimizer: Any, world: World, passes: int, grad_scaler: torch.amp.GradScaler | None
) -> None:
    """Has the gradients of a machine's ranks averaged in each step: the machine takes the steps.

    Args:
        optimizer: has its rounds.
        world: the ranks, by machine.
        passes, grad_scaler: as for :func:`dgc.DistributedOptimizer`.
    """
    of_rounds, rounds = engine_of(optimizer).settings, optimizer._rounds
    settings = Settings(
        Config(0.0, nonfinite=of_rounds.config.nonfinite),
        Machine(of_rounds.transport, world),
        of_rounds.named_parameters,
        passes,
        grad_scaler=grad_scaler,
    )
    source = Hooks(ends_with_backward=grad_scaler is not None)
    rounds.machine = Engine(optimizer, dict(rounds.engine.names), settings, source)


class Local(Distributed):
    """The methods of an optimizer with ``Config(local_steps=H)``."""

    _rounds: Rounds

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # as torch's
        """A step of the wrapped optimizer with this rank's own gradients; each H-th ends with a
        round.
        """
        if not self.state and making_state():  # its gradients and learning rates are 0
            return unhooked(self._inner.step)(self)
        return self._rounds.take_step(closure)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Has a GradScaler call step() also where it has found an infinity: all ranks count alike."""
        return self._rounds.machine is None or "_step_supports_amp_scaling" in vars(self)

    def zero_grad(self, *args: bool, **kwargs: bool) -> None:
        """As the wrapped optimizer's. A step that the script, or with ``hierarchical`` a
        GradScaler, has left out counts here.
        """
        if self._rounds.machine is not None:
            refuse_or_drop(self._rounds.machine)
        self._rounds.counted()
        self._inner.zero_grad(self, *args, **kwargs)

    def synchronize(self) -> None:
        """With ``hierarchical``, averages the gradients of the machine's ranks; else does nothing,
        as gradients stay on their rank.
        """
        if self._rounds.machine is not None:
            self._rounds.machine.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """With ``hierarchical``, ``step()`` does not synchronize within it."""
        if self._rounds.machine is None:
            yield
        else:
            with skipping_synchronize(self._rounds.machine):
                yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """As without local steps, with ``hierarchical``; else changes nothing, as what backward
        passes add up to is this rank's own gradient.
        """
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        if self._rounds.machine is not None:
            set_passes(self._rounds.machine, passes)

    def flush(self) -> None:
        """Makes a round now, and sends all of v after it, so that nothing is left on any rank. Call
        it on all ranks after the same step, say at the end of training.

        Raises:
            ValueError: ranks have taken different numbers of steps since the last round.
        """
        rounds = self._rounds
        if rounds.engine.settings.exchanges:
            rounds.counted()
            rounds.exchange()
            rounds.engine.flush()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the parameters are those of the last round, alike on all ranks."""
        with self._rounds.averaged():
            yield

    def report(self) -> Report:
        """As without local steps, of rounds in place of steps. ``dense_bytes`` is what all steps of
        a round would have sent.
        """
        report = engine_of(self).report()
        of_machine = 0 if self._rounds.machine is None else self._rounds.machine.report().skipped
        return replace(report, skipped=report.skipped + self._rounds.skipped + of_machine)

    def residual_state_dict(self) -> dict[str, Any]:
        """This rank's v, by parameter name, and its part of a round: the steps since the last one,
        the parameters that it began with, and the wrapped optimizer's state. To be saved and loaded
        on every rank, beside this rank's own parameters.
        """
        return {**engine_of(self).residuals(), "local": self._rounds.state()}

    def load_residual_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up what :meth:`residual_state_dict` gave on this rank.

        Raises:
            ValueError: it is of another version, rank, world size or model, or of an optimizer
                without local steps; nothing is loaded then.
        """
        if "local" not in state_dict:
            raise ValueError(
                "residual_state_dict: it must be of an optimizer with local_steps, got one without"
            )
        engine_of(self).load_residuals(state_dict)
        self._rounds.load(state_dict["local"])

    def _become_copy(self, residuals: Mapping[str, Any], sparse: Mapping[str, int]) -> None:
        """Takes up what the original of a copy had; what another rank had is left out."""
        engine = engine_of(self)
        if residuals["rank"] == engine.settings.world.rank:
            self._rounds.load(residuals["local"])
        engine.become_copy(residuals, sparse)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; a round must not be under way."""
        engine, rounds = engine_of(self), self._rounds
        if rounds.count:
            raise RuntimeError(
                f"add_param_group() must be called after a round, got a call {rounds.count} steps after it "
                "(call flush() on all ranks first)"
            )
        before = len(self.param_groups)
        self._inner.add_param_group(self, param_group)
        try:
            checks.check_group(self.param_groups[-1], engine.settings.config, self._inner)
            names = checks.named(self.param_groups, engine.settings.named_parameters, generate=True)
        except (TypeError, ValueError):
            del self.param_groups[before:]
            raise
        rounds.add(self.param_groups[-1], names)
        if rounds.machine is not None:
            rounds.machine.names.update(names)
            rounds.machine.register_groups(self.param_groups[-1:])

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Optimizer.state_dict``; it is this rank's own."""
        state: dict[str, Any] = self._inner.state_dict(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.load_state_dict``. A round begins anew, and v with it, unless
        :meth:`load_residual_state_dict` is called before or after this. This rank's own state from
        :class:`dgc.Residuals` stays.
        """
        if self._rounds.keeps_state:
            self._rounds.keeps_state = False
            return
        self._inner.load_state_dict(self, state_dict)
        self._rounds.loads_another()
