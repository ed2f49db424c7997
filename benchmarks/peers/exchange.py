"""What a method is, and how any of them drives an optimizer, over any transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import dgc
from dgc.collective import Collective, Path, World, sent_bytes
from dgc.transport import find

from .packing import Apart, carry

# A ring; all see all; owners; a server.
Bring = Literal["allreduce", "allgather", "alltoall", "push and pull"]


class Method(Protocol):
    """One way to exchange tensors. Its attributes, ``world`` aside, are what a checkpoint keeps."""

    # Gradients before the optimizer's step, parameters after it.
    exchanges: Literal["gradients", "parameters"]
    world: World
    bytes_sent: float  # by this rank so far

    def exchange(self, tensors: list[Tensor], lr: float, last: bool) -> Path[list[Tensor]] | Apart:
        """What replaces this rank's tensors, after the collectives that it yields.

        Args:
            tensors: float32, of any shapes, the same on every rank and in every step.
            lr: the optimizer's, in this step.
            last: whether this is the last step of an epoch.
        """


class Exchanging:
    """An optimizer, whose gradients or parameters a method exchanges.

    Args:
        optimizer: with one group of parameters.
        make: the method, of the world and a seed of this rank, which follows from the training's ``seed``.
        clip: a bound on the norm of the exchanged gradient.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        make: Callable[[World, int], Method],
        seed: int = 0,
        clip: float | None = None,
    ):
        self.optimizer, self._transport, self._clip = optimizer, find(), clip
        world = self._transport.world
        if world is None:
            raise ValueError(
                "the process must be in the process group, got one outside (launch all alike)"
            )
        self.method: Any = make(world, 1000 * seed + world.rank)
        if self.method.exchanges == "parameters":
            self.method.begin(optimizer.param_groups[0]["params"])

    @property
    def bytes_sent(self) -> float:
        return self.method.bytes_sent

    @torch.no_grad()
    def step(self, last: bool = False) -> None:
        """One step; every parameter has a gradient."""
        (group,) = self.optimizer.param_groups
        if self.method.exchanges == "parameters":
            self.optimizer.step()
        tensors = [p if self.method.exchanges == "parameters" else p.grad for p in group["params"]]
        exchange = self.method.exchange(tensors, group["lr"], last)
        for own, new in zip(tensors, carry(exchange, self._transport, self._count), strict=True):
            own.copy_(new)
        if self._clip:
            clip_grad_norm_(group["params"], self._clip)
        if self.method.exchanges == "gradients":
            self.optimizer.step()

    def _count(self, collective: Collective) -> None:
        self.method.bytes_sent += sent_bytes(collective, self.method.world)

    def state_dict(self) -> dict[str, Any]:
        """This rank's, for torch.save."""
        kept = {
            key: value.get_state() if isinstance(value, torch.Generator) else value
            for key, value in vars(self.method).items()
            if key != "world"
        }
        return {"optimizer": self.optimizer.state_dict(), "method": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        for key, value in state["method"].items():
            if isinstance(getattr(self.method, key), torch.Generator):
                getattr(self.method, key).set_state(value)
            else:
                setattr(self.method, key, value)


class Compressed:
    """The same for ``dgc.DistributedOptimizer``, which does all of it by itself."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: list[tuple[str, Tensor]],
        config: dgc.Config,
        flush: bool,
    ):
        self.optimizer: Any = dgc.DistributedOptimizer(optimizer, named, config)
        self._flush = flush  # whether the last step of a training applies what is pending

    @property
    def bytes_sent(self) -> float:
        return self.optimizer.report().total_bytes_sent

    def step(self, last: bool = False) -> None:
        self.optimizer.step()
        if last and self._flush:
            self.optimizer.flush()

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "residuals": self.optimizer.residual_state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_residual_state_dict(state["residuals"])
        self.optimizer.load_state_dict(state["optimizer"])
