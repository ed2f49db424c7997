"""Residuals as a state: saved, loaded, and shared anew when ranks come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dgc.collective import Collective
from dgc.compression.residual import norm
from dgc.engine.gradients import Gradients
from dgc.engine.nonfinite import NonFinite
from dgc.engine.parameters import Parameters, shard
from dgc.warn import warn


class ResidualState:
    """This rank's residuals.

    Args:
        parameters: whose residuals.
        nonfinite: what is still to be put back into them.
        gradients: of nodes whose residuals may differ once they are loaded.
    """

    def __init__(self, parameters: Parameters, nonfinite: NonFinite, gradients: Gradients):
        self._parameters, self._settings = parameters, parameters.settings
        self._nonfinite, self._gradients = nonfinite, gradients
        self._missing = (
            False  # training goes on at a step beyond 0, without the residuals of the steps before
        )
        self._step: (
            int | None
        ) = -1  # that comes after them; None: whatever step comes, as they were loaded
        self.world_size = 0  # how many ranks' average u and v are a share of; 0: they are empty

    def state(self) -> dict[str, Any]:
        """A copy of u and v, by parameter name; see ``residual_state_dict`` of the optimizer."""
        copies = {
            letter: {name: view.clone() for name, view in views.items()}
            for letter, views in self.views().items()
        }
        return {**self._identity(), **copies}

    def _identity(self) -> dict[str, Any]:
        """The rank, world size and shard that the residuals belong to."""
        world = self._settings.world
        part = shard(self._parameters.first)
        return {
            "version": 1,
            "rank": world.rank,
            "size": world.size,
            **({} if part is None else {"shard": part}),
        }

    def views(self) -> dict[str, dict[str, Tensor]]:
        """Views of u and of v, by parameter name, after all that is still to be put back into them."""
        self._nonfinite.poll()
        views: dict[str, dict[str, Tensor]] = {"u": {}, "v": {}}
        for residual in self._parameters.residuals():
            views["v"].update(residual.views(residual.v))
            if residual.u is not None:
                views["u"].update(residual.views(residual.u))
        return views

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuses a state of another version, rank, world size or model.

        Raises:
            ValueError: it names what is wrong.
        """
        own = self._identity()
        for key in ("version", "rank", "size", "shard"):
            if state.get(key) != own.get(key):
                raise ValueError(
                    f"residual_state_dict: {key} must be {own.get(key)!r}, got {state.get(key)!r}"
                )
        for letter, expected in self.views().items():
            given = state[letter]
            if given.keys() != expected.keys():
                raise ValueError(
                    f"residual_state_dict: {letter} must have the same names, got none for "
                    f"{sorted(expected.keys() - given.keys())} and unknown "
                    f"{sorted(given.keys() - expected.keys())}"
                )
            for name, tensor in given.items():
                if tensor.shape != expected[name].shape:
                    raise ValueError(
                        f"residual_state_dict: {letter} of {name} must have shape "
                        f"{tuple(expected[name].shape)}, got {tuple(tensor.shape)}"
                    )

    def is_of_another_rank(self, state: Mapping[str, Any]) -> bool:
        """Whether a state was given by another rank of as many."""
        own = self._identity()
        return state.get("size") == own["size"] and state.get("rank") != own["rank"]

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up what :meth:`state` gave."""
        self._missing, self._step, self.world_size = False, None, state["size"]
        self._gradients.residuals_may_differ = True
        self._parameters.handed_over.clear()
        for letter, views in self.views().items():
            for name, view in views.items():
                view.copy_(state[letter][name])

    def begin_anew(self) -> None:
        """Another training is loaded, whose residuals are not part of it: they begin with zero,
        unless they were loaded before.
        """
        self._parameters.forget_sparse()
        if self._step is not None:
            self.follow_step()
            self.begin()
            self._clear()

    def begin(self) -> None:
        """A training begins, at a step that its optimizer may have reached without these residuals."""
        self._missing = self._settings.exchanges and self._parameters.step > 0

    def _clear(self) -> None:
        for views in self.views().values():
            for view in views.values():
                view.zero_()

    def step_opens(self) -> None:
        """A step begins. Where it does not follow the last one, rank 0 has loaded another state in
        mid-training, and broadcast it: here, too, what was pending is of steps that are undone.
        """
        if self._step not in (None, self._parameters.step):
            self._clear()
        self.follow_step()
        if self._missing and self._parameters.residuals() and not self._parameters.stock:
            warn(
                f"training goes on at step {self._parameters.step} without the residuals of the steps before: save by "
                "dgc.save_checkpoint() and load by dgc.load_checkpoint() on every rank; or save "
                "optimizer.residual_state_dict() on every rank, and load it there with load_residual_state_dict()"
            )
        self._missing = False

    def follow_step(self) -> None:
        """The next step is the one that comes after these residuals."""
        self._step = self._parameters.step

    @torch.no_grad()
    def rescale(self, size: int) -> int:
        """Keeps what is pending worth as much as it was, where ranks have come or gone.

        Args:
            size: how many ranks there are now.

        Returns:
            How many are gone, each with what it had pending.
        """
        transport, device = self._settings.transport, self._parameters.device
        asked = Collective("all_gather", torch.tensor([self.world_size], device=device))
        before = transport.start(asked, "dgc.regroup")().flatten().tolist()
        own, self.world_size = self.world_size, size
        if self._settings.average and own not in (
            0,
            size,
        ):  # commits of one job may be of several sizes
            for views in self.views().values():
                for view in views.values():
                    view.mul_(size / own)
        former, remain = max(before), sum(n > 0 for n in before)
        if lost := max(0, former - remain):
            zero = torch.zeros(1, dtype=torch.float32, device=device)
            squares = [
                norm(residual.v).square().view(1).to(device)
                for residual in self._parameters.residuals()
            ]
            square = Collective("all_reduce", sum(squares, zero))
            pending = (transport.start(square, "dgc.regroup.norm")().item() / remain) ** 0.5
            warn(
                f"of {former} ranks {lost} are gone, and with each of them what it had pending; those that "
                f"remain have a residual of norm {pending:.3g} each"
            )
        return lost
