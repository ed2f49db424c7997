"""Residuals as a state: saved, loaded, and rescaled when ranks come and go."""

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

OTHER_CONFIG = " (was it saved with another Config: min_numel, momentum_correction, or value_bits of 8 or fewer?)"


def check_views(letter: str, given: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    """Refuses u or v of other parameters, of other shapes, or with an infinity or NaN.

    Raises:
        ValueError: it names what is wrong.
    """
    if given.keys() != expected.keys():
        raise ValueError(
            f"{letter} must have the same names, got none for "
            f"{sorted(expected.keys() - given.keys())} and unknown "
            f"{sorted(given.keys() - expected.keys())}{OTHER_CONFIG}"
        )
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{letter} of {name} must be a tensor of float32 or float64, got another"
            )
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{letter} of {name} must have shape {tuple(expected[name].shape)}, "
                f"got {tuple(tensor.shape)}"
            )
        if not tensor.isfinite().all():
            raise ValueError(f"{letter} of {name} must be finite, got an infinity or NaN")


class ResidualState:
    """This rank's residuals.

    Args:
        parameters: of the optimizer.
        nonfinite: polled before residuals are read, as a late verdict may restore v.
        gradients: learn that residuals may differ within a node, once they are loaded.
    """

    def __init__(self, parameters: Parameters, nonfinite: NonFinite, gradients: Gradients):
        self._parameters, self._settings = parameters, parameters.settings
        self._nonfinite, self._gradients = nonfinite, gradients
        # The training continues beyond step 0, without the residuals of the steps before.
        self._missing = False
        # The step that comes after the residuals. None: any step, as they have been loaded.
        self._step: int | None = -1
        self.world_size = 0  # how many ranks u and v are averaged over; 0: they are empty

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
        """Views of u and of v, by parameter name. Polls late verdicts first, which may restore v."""
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
            try:
                check_views(letter, state[letter], expected)
            except ValueError as error:
                raise ValueError(f"residual_state_dict: {error}") from None

    def is_of_another_rank(self, state: Mapping[str, Any]) -> bool:
        """Whether another rank gave a state, in a world of the same size."""
        own = self._identity()
        return state.get("size") == own["size"] and state.get("rank") != own["rank"]

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads what :meth:`state` gave."""
        self._missing, self._step, self.world_size = False, None, state["size"]
        self._gradients.residuals_may_differ = True
        self._parameters.emptied.clear()
        for letter, views in self.views().items():
            for name, view in views.items():
                view.copy_(state[letter][name])

    def begin_anew(self) -> None:
        """Another training is loaded. Its residuals start at zero, unless they were loaded before
        it.
        """
        self._parameters.forget_sparse()
        if self._step is not None:
            self.follow_step()
            self.begin()
            self._clear()

    def begin(self) -> None:
        """Notes whether a training starts beyond step 0, so that its residuals are missing."""
        self._missing = self._settings.exchanges and self._parameters.step > 0

    def _clear(self) -> None:
        for views in self.views().values():
            for view in views.values():
                view.zero_()

    def step_opens(self) -> None:
        """Called when a step opens. If it does not follow the last one, rank 0 has loaded another
        state and broadcast it: residuals are then of steps that are undone, and are cleared.
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
        """Notes that the next step follows these residuals."""
        self._step = self._parameters.step

    @torch.no_grad()
    def rescale(self, size: int) -> int:
        """Scales the residuals where ranks have come or gone, so that their part of the average
        stays the same.

        Args:
            size: how many ranks there are now.

        Returns:
            How many ranks are gone, each with its residual.
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
