"""Local steps: each rank takes H steps of its own optimizer, and then all exchange how far they came.

In a round a rank's drift, x_start - x, takes the place of a gradient: it is added to v, what is sent
of v travels as in any compressed step, and plain SGD with a learning rate of 1 applies the average
of what came. So the parameters are alike on all ranks after each round.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dgc.collective import Collective
from dgc.config import Config
from dgc.engine.backward import add_hook, calling_scaler
from dgc.engine.engine import Engine
from dgc.engine.parameters import BEGAN, STEP, to_local
from dgc.engine.settings import Settings
from dgc.engine.wrapped import unhooked
from dgc.schedule import Adaptive


class Drifts:
    """Brings an engine its gradients: what :class:`Rounds` puts into ``p.grad`` in a round."""

    ends_with_backward, waits_for_all = False, True

    def __init__(self, rounds: Rounds):
        self._rounds = ref(rounds)

    @property
    def rounds(self) -> Rounds | None:
        """The rounds, which hold the engine that holds this."""
        return self._rounds()

    def brings(self, parameter: Tensor) -> bool:
        """See :class:`dgc.engine.engine.GradientSource`."""
        return True

    def watch(self, parameters: Iterable[Tensor], engine: Engine) -> None:
        """Has the rounds told of backward passes, which bring no drift, but count as steps."""
        rounds = self._rounds

        def note(parameter: Tensor) -> None:
            if (alive := rounds()) is not None:
                alive.has_gradient = True

        for parameter in parameters:
            add_hook(parameter, note)

    def has_step(self, engine: Engine) -> bool:
        """See :class:`dgc.engine.engine.GradientSource`."""
        return True

    def synchronize(self, engine: Engine) -> None:
        """See :class:`dgc.engine.engine.GradientSource`."""
        engine.exchange()

    def before_update(self, engine: Engine) -> None:
        """See :class:`dgc.engine.engine.GradientSource`."""


class Rounds:
    """Counts the steps of this rank's optimizer, and makes a round after each H-th.

    Args:
        optimizer: the user's, which takes the steps; held weakly, as it holds this.
        names: parameter -> name.
        settings: ``config.local_steps`` gives H.

    Attributes:
        engine: exchanges the drifts. Its optimizer is SGD with a learning rate of 1.
        has_gradient: a backward pass has run since the last step was counted.
        count: steps since the last round.
        skipped: steps that this rank has left out.
        keeps_state: the optimizer has this rank's own state from :class:`dgc.Residuals`, which the
            next ``load_state_dict`` should not replace by another rank's.
        machine: with ``hierarchical``, averages the gradients of the machine's ranks, and takes the
            steps; None where DistributedDataParallel does the former, and with each rank on its own.
    """

    machine: Engine | None = None

    def __init__(self, optimizer: Any, names: dict[Tensor, str], settings: Settings):
        self._optimizer, self._settings = ref(optimizer), settings
        self.has_gradient, self.count = False, 0
        self._is_stepping = self._is_averaged = False
        settings.local_optimizer = self._optimizer
        self._start: dict[Tensor, Tensor] = {}  # parameter -> x_start, this rank's part
        # Parameter group -> the product of (1 - lr * decay) over the steps of the round. All ranks
        # go by rank 0's, so decay need not be sent, and stays out of v.
        self._kept: list[float] = []
        self._inner_at_start: dict[Tensor, Any] = {}  # with nonfinite="skip"
        self._aside: dict[Tensor, Tensor] = {}  # parameter -> this rank's own, within averaged()
        self._loaded = self.keeps_state = False
        self.skipped = self._skipped_before = 0  # the second: when the round began
        round_optimizer: Any = torch.optim.SGD(list(names), lr=1.0)
        round_optimizer._inner = torch.optim.SGD  # as an engine's optimizer has it
        self._round_optimizer = round_optimizer
        self.engine = Engine(self._round_optimizer, names, settings, Drifts(self))
        if settings.exchanges:  # no round is stock's: all that is compressed passes through v
            self._round_optimizer.param_groups[0][BEGAN] = 0

    @property
    def _user_optimizer(self) -> Any:
        return self._optimizer()

    @property
    def _trained(self) -> list[Tensor]:
        return [p for p in self.engine.listed if p.requires_grad]

    @property
    def step(self) -> int:
        """Steps up to the last round, by which schedules go."""
        step: int = self._round_optimizer.param_groups[0].get(STEP, 0)
        return step

    @step.setter
    def step(self, step: int) -> None:
        self._round_optimizer.param_groups[0][STEP] = step

    # -- steps -----------------------------------------------------------------------------------------------------

    def take_step(self, closure: Any) -> Any:
        """A step of the wrapped optimizer, with this rank's own gradients."""
        self._refuse_averaged("step()")
        if self._settings.exchanges:
            if self.count == 0:  # what moved since an earlier begin() was no step
                self.forget()
            self.begin()
        # A closure may call zero_grad() several times in one step, as LBFGS' does.
        self._is_stepping = True
        try:
            with self._unscaled() as finite:
                loss = self._take_inner_step(closure) if finite else None
        finally:
            self._is_stepping = False
        # Also a gradient that no backward pass of this optimizer's has brought, but the script.
        self.has_gradient |= any(p.grad is not None for p in self._trained)
        self.counted()
        return loss

    def _take_inner_step(self, closure: Any) -> Any:
        optimizer = self._user_optimizer
        step = unhooked(optimizer._inner.step)
        if self.machine is not None:
            return self._take_step_together(self.machine, closure)
        if closure is None:
            return step(optimizer) if self._finite() else None
        if self._settings.config.nonfinite != "skip":
            return step(optimizer, closure)
        with torch.enable_grad():
            loss = closure()
        if self._finite():
            step(optimizer)
        return loss

    def _take_step_together(self, machine: Engine, closure: Any) -> Any:
        """A step of all ranks of the machine. One that is not finite ends the next round on all
        ranks, as a rank's own does.
        """
        scaler = calling_scaler()
        waits = machine.synchronizes and not machine.step.exchanged
        if waits and scaler is not None and scaler is not machine.settings.grad_scaler:
            raise RuntimeError(
                "grad_scaler must be the GradScaler whose step() calls this, got none or another one (give it "
                "to the DistributedOptimizer; or call optimizer.synchronize() before scaler.unscale_(), and "
                "scaler.step() within optimizer.skip_synchronize())"
            )
        try:
            return machine.take_step(closure)
        except FloatingPointError:
            return unhooked(self._user_optimizer._inner.step)(self._user_optimizer)

    @contextmanager
    def _unscaled(self) -> Iterator[bool]:
        """Does what a GradScaler leaves to an optimizer whose step() it calls in any case: divides
        the gradients by its scale, unless that is done. Gives whether they are finite.
        """
        optimizer = self._user_optimizer
        given = vars(optimizer)
        does_both = "_step_supports_amp_scaling" in given  # a fused one
        if "found_inf" not in given or does_both:
            yield True
            return
        # torch's step() refuses them.
        scale, found = given.pop("grad_scale"), given.pop("found_inf")
        if scale is not None:
            inverse = scale.double().reciprocal().float()  # as the scaler's own
            for values in self._gradient_values():
                values.mul_(inverse.to(values.device))
        try:
            yield not found.item()
        finally:
            optimizer.grad_scale, optimizer.found_inf = scale, found

    def _gradient_values(self) -> list[Tensor]:
        """This rank's gradients; of sparse ones the entries that they have."""
        gradients = [to_local(p.grad) for p in self._trained if p.grad is not None]
        return [g._values() if g.is_sparse else g for g in gradients]

    def _finite(self) -> bool:
        """Whether this rank's gradients are finite; where they are not, its step is left out."""
        if self._settings.config.nonfinite != "skip":
            return True
        values = [x for x in self._gradient_values() if x.numel()]
        norms = torch._foreach_norm(values, torch.inf)
        fine = all(bool(norm.isfinite()) for norm in norms)
        self.skipped += not fine
        return fine

    @torch.no_grad()
    def begin(self) -> None:
        """Remembers where a round starts."""
        self._loaded = self.keeps_state = False
        if not self._start:
            self._skipped_before = self.skipped
            self._kept = [1.0] * len(self._user_optimizer.param_groups)
            if self._settings.config.nonfinite == "skip":
                self._inner_at_start = {
                    p: copy.deepcopy(own) for p, own in self._user_optimizer.state.items()
                }
        for p in self._trained:
            if p not in self._start:  # also those that thaw within a round
                self._start[p] = to_local(p).detach().clone()

    def counted(self) -> None:
        """Counts a step, if a backward pass came before it, also where the script has left it out."""
        if self._is_stepping or not (self._settings.exchanges and self.has_gradient):
            return
        self.begin()
        self.has_gradient = False
        self.count += 1
        for i, group in enumerate(self._user_optimizer.param_groups):
            self._kept[i] *= 1 - decay_of(type(self._user_optimizer), group)
        if self.count >= self._settings.config.local_steps_at(self.step):
            self.exchange()

    # -- rounds ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def exchange(self) -> None:
        """A round: all parameters are alike on all ranks after it.

        Raises:
            ValueError: ranks have taken different numbers of steps; on all ranks.
            FloatingPointError: a drift is not finite, with ``nonfinite="error"``; on all ranks.
        """
        self._refuse_averaged("a round")
        if not self.engine.has_met:
            with self.averaged():  # the parameters' values are compared, too
                self.engine.meet()
        self._compare()
        if self.count == 0:
            return
        if self._settings.config.nonfinite == "skip":
            self._drop_bad_drift()
        own = {p: p.grad for p in self._start}
        try:
            for p, kept in self._kept_of_start():
                start, x = self._start[p].mul_(kept), to_local(p)
                p.grad = torch.empty_like(p)
                to_local(p.grad).copy_(start - x)
                x.copy_(start)
            self._settings.steps_of_round = self.count
            for p in own:
                self.engine.arrived(p)
            self.engine.take_step(None)
        finally:
            for p, gradient in own.items():
                p.grad = gradient
            self.forget()

    def _kept_of_start(self) -> Iterator[tuple[Tensor, float]]:
        """The parameters of the round, and what weight decay has left of their start."""
        for group, kept in zip(self._user_optimizer.param_groups, self._kept, strict=True):
            yield from ((p, kept) for p in group["params"] if p in self._start)

    def forget(self) -> None:
        """The next step starts a round."""
        self.count, self._start, self._inner_at_start = 0, {}, {}

    def _compare(self) -> None:
        """Refuses a round of ranks that have taken different numbers of steps since the last one,
        and takes rank 0's product of decays: a rank whose step a scaler has left out counts it
        later, when its learning rate may be the next step's.
        """
        kept = self._kept or [1.0] * len(self._user_optimizer.param_groups)
        own = torch.tensor([self.count, *kept], dtype=torch.float64)
        device = next(iter(self.engine.listed)).device
        gather = Collective("all_gather", own.to(device))
        gathered = self._settings.transport.start(gather, "dgc.round")().view(-1, len(own))
        counts = gathered[:, 0].tolist()
        self._kept = gathered[0, 1:].tolist()
        if len(set(counts)) > 1:
            other = next(rank for rank, count in enumerate(counts) if count != counts[0])
            raise ValueError(
                f"all ranks must have taken the same number of steps since the last round, got {counts[0]:g} on "
                f"rank 0 and {counts[other]:g} on rank {other} (call flush() on all ranks after the same step; "
                "and optimizer.zero_grad(), not the model's, where step() may be left out)"
            )

    def _drop_bad_drift(self) -> None:
        """Where this rank's parameters are no longer finite, it goes back to the round's start."""
        if all(bool(to_local(p).isfinite().all()) for p in self._trained):
            return
        self.skipped = self._skipped_before + self.count
        self._user_optimizer.state.clear()
        self._user_optimizer.state.update(self._inner_at_start)
        for p, kept in self._kept_of_start():
            to_local(p).copy_(self._start[p] * kept)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, parameters are those of the last round, alike on all ranks."""
        if self._is_averaged:
            yield
            return
        self._aside = {p: to_local(p).detach().clone() for p in self._start}
        _set(self._start)
        self._is_averaged = True
        try:
            yield
        finally:
            self._is_averaged = False
            _set(self._aside)
            self._aside = {}

    def _refuse_averaged(self, what: str) -> None:
        if self._is_averaged:
            raise RuntimeError(
                f"{what} must come after the block of averaged(), got a call within it"
            )

    # -- its state -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What is this rank's own between rounds, beside v: a copy."""
        names, optimizer = self.engine.names, self._user_optimizer
        return {
            "count": self.count,
            "has_gradient": self.has_gradient,
            "skipped_before": self._skipped_before,
            "step": self.step,
            "kept": list(self._kept),
            "start": {names[p]: x.clone() for p, x in self._start.items()},
            "inner": _parts(optimizer._inner.state_dict(optimizer)),
            "inner_at_start": {names[p]: _parts(own) for p, own in self._inner_at_start.items()},
        }

    def own(self) -> dict[str, Any]:
        """As :meth:`state`, for a checkpoint, in which the model has the parameters that the round
        began with: this rank's own are in ``x``.
        """
        state, names = self.state(), self.engine.names
        del state["start"]
        own = self._aside or {p: to_local(p).detach().clone() for p in self._start}
        return {**state, "x": {names[p]: x for p, x in own.items()}}

    @torch.no_grad()
    def load_own(self, own: Mapping[str, Any]) -> None:
        """Takes up what :meth:`own` gave, into a model that was loaded from the checkpoint."""
        parameter_of = {name: p for p, name in self.engine.names.items()}
        x = {parameter_of[name]: tensor for name, tensor in own["x"].items()}
        start = {p: to_local(p).detach().clone() for p in (x if own["count"] else ())}
        self.load({**own, "start": {self.engine.names[p]: value for p, value in start.items()}})
        _set(x)

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up what :meth:`state` gave. The model has this rank's own parameters by then."""
        optimizer, names = self._user_optimizer, self.engine.names
        parameter_of = {name: p for p, name in names.items()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = {i: _whole(own, parameters[i]) for i, own in state["inner"]["state"].items()}
        optimizer._inner.load_state_dict(optimizer, {**state["inner"], "state": states})
        self.count, self._kept = state["count"], list(state["kept"])
        self._skipped_before = state["skipped_before"]
        self._inner_at_start = {
            parameter_of[name]: _whole(own, parameter_of[name])
            for name, own in state["inner_at_start"].items()
        }
        self._start = {
            parameter_of[name]: x.to(to_local(parameter_of[name]), copy=True)
            for name, x in state["start"].items()
        }
        if self._settings.exchanges:
            self.step = state["step"]
        self._resume()
        self.has_gradient, self._loaded = state["has_gradient"], True

    def loads_another(self) -> None:
        """Another training was loaded into the wrapped optimizer: its round starts anew."""
        if not self._loaded:
            self.forget()
            self._resume()

    def _resume(self) -> None:
        """Goes on with what was loaded."""
        self.has_gradient = False
        self.engine.resume()
        if self.machine is not None:
            self.machine.abort_step_together()
            self.machine.resume()

    def add(self, group: dict[str, Any], names: Mapping[Tensor, str]) -> None:
        """Exchanges the drift of one more param group."""
        for parameter, name in names.items():
            self.engine.names.setdefault(parameter, name)
        self._round_optimizer.add_param_group({"params": list(group["params"])})
        self.engine.register_groups(self._round_optimizer.param_groups[-1:])


def check_local_steps(config: Config) -> None:
    """Refuses what local steps cannot do."""
    if isinstance(config.sparsity, Adaptive):
        raise ValueError(
            "Config: sparsity must be a number or a function of the step with local_steps, got "
            f"{config.sparsity!r} (a round is too rare to measure steps by)"
        )


@torch.no_grad()
def _set(values: Mapping[Tensor, Tensor]) -> None:
    """Gives parameters values, of this rank's parts."""
    for p, value in values.items():
        to_local(p).copy_(value)


def _parts(state: Any) -> Any:
    """A copy of an optimizer's state, with this rank's parts of sharded tensors."""
    return tree_map(
        lambda x: x.detach().to_local().clone() if hasattr(x, "to_local") else copy.deepcopy(x),
        state,
    )


def _whole(state: Any, parameter: Any) -> Any:
    """A copy of the state of a parameter, sharded as the parameter is."""
    if not hasattr(parameter, "to_local"):
        return copy.deepcopy(state)
    placed, local = parameter.detach(), parameter.detach().to_local()

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.shape != local.shape:
            return copy.deepcopy(x)
        where = placed.device_mesh, placed.placements
        return placed.from_local(x.clone(), *where, shape=placed.shape, stride=placed.stride())

    return tree_map(copied, state)


def decay_of(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> float:
    """The share of a parameter that a step's weight decay takes away, where that is apart from the
    gradient: AdamW's, and that of SGD without momentum; else 0.
    """
    apart = issubclass(kind, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    if apart or (issubclass(kind, torch.optim.SGD) and not group["momentum"]):
        return float(group["lr"]) * float(group["weight_decay"])
    return 0.0
