"""One step late: the update of step t is applied in step t + 1, so that its exchange hides behind the backward pass.

x_{t+1} = x_t - lr U_{t-1}, U_t being what all ranks' gradients at x_t come to. This is the pipeline of width two of
Li, Yu, Li, Avestimehr, Kim and Schwing, "Pipe-SGD" (NeurIPS 2018), with dense gradients; or, which is not in a paper,
with DGC's update in place of the mean. The first step applies nothing, and the last one also what is under way then.

The exchange really is under way during the next forward and backward pass: DGC's messages, and beside them the sum of
what travels dense. A checkpoint waits for all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import dgc
from dgc.collective import Collective, Path, sent_bytes
from dgc.compression.residual import Gradient, Residual
from dgc.engine.parameters import compressible
from dgc.paths import compressed
from dgc.transport import find
from dgc.transport.run import PathRun

from .packing import mean


class Stale:
    """torch's SGD, one step late.

    Args:
        sgd: with one group of parameters. Its momentum is that of dense tensors and of the decay; DGC's own is in u.
        named: its parameters and their names.
        config: of DGC; None for dense gradients.
    """

    def __init__(
        self, sgd: torch.optim.SGD, named: list[tuple[str, Tensor]], config: dgc.Config | None
    ):
        self.optimizer, self.config, self._transport = sgd, config, find()
        large = {
            name: p for name, p in named if config is not None and compressible(p, config.min_numel)
        }
        self.bucket = (
            Residual("stale", large, config.momentum_correction)
            if config is not None and large
            else None
        )
        self.large, self.small = large, [p for name, p in named if name not in large]
        self.steps, self.bytes_sent = 0, 0.0
        self._under_way: list[PathRun[list[Tensor]]] = []
        self._arrived: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, last: bool = False) -> None:
        """Applies what the last step's gradients have come to, and begins to exchange this one's."""
        self.receive()
        arrived, self._arrived = self._arrived, None
        self._under_way = [
            PathRun(path, self._transport, f"stale.{i}", self._count)
            for i, path in enumerate(self._paths())
        ]
        self.steps += 1
        self._apply(arrived)
        if last:
            self.receive()
            self._apply(self._arrived)
            self._arrived = None

    def _paths(self) -> Iterator[Path[list[Tensor]]]:
        """To DGC's update of the large parameters, and to the mean gradient of the small ones, in their orders."""
        if self.bucket is not None:
            yield self._compressed(self.bucket)
        if self.small:
            yield mean([p.grad for p in self.small], self._transport.world)

    def _compressed(self, bucket: Residual) -> Path[list[Tensor]]:
        (group,) = self.optimizer.param_groups
        own = {
            name: Gradient(p.grad, group["momentum"], group["nesterov"])
            for name, p in self.large.items()
        }
        update = yield from compressed.exchange_bucket(
            bucket, own, self.config, self.steps, self._transport.world
        )
        found = [torch.empty_like(p) for p in self.large.values()]
        update.write([bucket.in_order(i, target) for i, target in enumerate(found)])
        return found

    def _count(self, collective: Collective) -> None:
        self.bytes_sent += sent_bytes(collective, self._transport.world)

    def receive(self) -> None:
        """Waits for the exchange that is under way; what has arrived is applied in the next step."""
        if self._under_way:
            self._arrived, self._under_way = (
                [x for run in self._under_way for x in run.finish()],
                [],
            )

    def _apply(self, arrived: list[Tensor] | None) -> None:
        """One step of SGD. Of the large parameters it does the decay alone, as DGC's update has had its momentum."""
        if arrived is None:
            return
        for p in self.large.values():
            p.grad = torch.zeros_like(p)
        for p, gradient in zip(self.small, arrived[len(self.large) :], strict=True):
            p.grad = gradient
        self.optimizer.step()
        lr = self.optimizer.param_groups[0]["lr"]
        for p, update in zip(self.large.values(), arrived, strict=False):
            p.sub_(update, alpha=lr)

    def state_dict(self) -> dict[str, Any]:
        """This rank's, for torch.save; all ranks make theirs after the same step."""
        self.receive()
        kept = {} if self.bucket is None else {"u": self.bucket.u, "v": self.bucket.v}
        return {
            "optimizer": self.optimizer.state_dict(),
            "kept": kept,
            "arrived": self._arrived,
            "steps": self.steps,
            "bytes_sent": self.bytes_sent,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        for name, kept in state["kept"].items():
            getattr(self.bucket, name).copy_(kept)
        self._arrived, self.steps, self.bytes_sent = (
            state["arrived"],
            state["steps"],
            state["bytes_sent"],
        )
