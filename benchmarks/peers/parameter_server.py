"""An asynchronous parameter server (Downpour SGD of Dean et al., "Large scale distributed deep networks", 2012).

A worker pushes a gradient, pulls the parameters, and computes the next gradient there; it waits for no other worker.
The server makes one step of SGD of each gradient that arrives, of 1 / N of the rate, so that N pushes move it as far as
one synchronous step; and it has the momentum. That 1 / N is ours, and so is a pull after every push.

In one process the schedule is fixed: update t is worker t mod N's, at the parameters that it pulled N - 1 updates ago.
Over torch.distributed (gloo) each worker has its own pace: rank 0 is a worker, and serves the others from a thread, in
the order in which they come, so that no two runs are alike. In their last step the workers wait for one another, and
all of them take what the server has then.

All is float32. Rank 0 pushes and pulls within its process, and sends the others N - 1 pulls.
"""

from __future__ import annotations

from copy import deepcopy
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dgc.collective import Collective
from dgc.transport import find, lockstep

from .packing import flat, unflat


class ParameterServer:
    """A worker, and the server: in one process each rank has a copy of it, else rank 0 alone keeps it up to date.

    Args:
        sgd: of the worker's parameters, one group. Its settings are those of the server's, ``self.optimizer``.

    Raises:
        ValueError: it is neither in lockstep nor over torch.distributed.
    """

    def __init__(self, sgd: torch.optim.SGD):
        (group,) = sgd.param_groups
        self.parameters, self.world, self._alone = (
            group["params"],
            find().world,
            lockstep.current() is not None,
        )
        if not self._alone and not dist.is_initialized():
            raise ValueError(
                "async must run over torch.distributed or in one process, got Horovod (use torchrun)"
            )
        self.x, decay = (
            [p.detach().clone() for p in self.parameters],
            group["weight_decay"] / self.world.size,
        )
        self.optimizer = torch.optim.SGD(
            self.x, group["lr"], group["momentum"], 0, decay, group["nesterov"]
        )
        self.bytes_sent, self._message = 0.0, 4 * sum(p.numel() for p in self.parameters)
        self._lock, self._error = Lock(), None
        if not self._alone:
            # So that a thread's messages meet no collective.
            self._group = dist.new_group(backend="gloo")
            self._thread = Thread(target=self._serve, daemon=True)

    @torch.no_grad()
    def step(self, last: bool = False) -> None:
        """Pushes, and pulls."""
        own = flat([p.grad for p in self.parameters])
        pulled = self._in_turn(own, last) if self._alone else self._at_own_pace(own, last)
        self.bytes_sent += self._message * (self.world.size - 1 if self.world.rank == 0 else 1)
        for p, new in zip(self.parameters, unflat(pulled, self.parameters), strict=True):
            p.copy_(new)

    def _in_turn(self, own: Tensor, last: bool) -> Tensor:
        """Every rank does what the server does, one worker's push after the other's."""
        pulls = [
            self._update(gradient)
            for gradient in find().start(Collective("all_gather", own), "async")()
        ]
        return pulls[-1 if last else self.world.rank]

    def _at_own_pace(self, own: Tensor, last: bool) -> Tensor:
        if self.world.rank == 0:
            if not self._thread.ident:  # not earlier, as a checkpoint may be loaded first
                self._thread.start()
            pulled = self._update(own)
        else:
            dist.send(torch.cat([own, own.new_tensor([last])]), 0, self._group)
            pulled = torch.empty_like(own)
            if not last:
                dist.recv(pulled, 0, self._group)
        if last:
            if self.world.rank == 0:
                self._thread.join()
                pulled = flat(self.x)
            dist.broadcast(pulled, 0, self._group)
        if self._error is not None:
            raise RuntimeError("the server's thread ended") from self._error
        return pulled

    def _serve(self) -> None:
        """Rank 0's thread: takes what comes first, until all others have pushed for the last time."""
        try:
            pushed, busy = torch.empty(self._message // 4 + 1), self.world.size - 1
            while busy:
                worker = dist.recv(pushed, group=self._group)
                pull = self._update(pushed[:-1])
                if pushed[-1]:
                    busy -= 1
                else:
                    dist.send(pull, worker, self._group)
        except RuntimeError as error:
            self._error = error

    def _update(self, gradient: Tensor) -> Tensor:
        """The server's parameters after this gradient."""
        with self._lock:
            for x, part in zip(self.x, unflat(gradient / self.world.size, self.x), strict=True):
                x.grad = part
            self.optimizer.step()
            return flat(self.x)

    def state_dict(self) -> dict[str, Any]:
        """This rank's, for torch.save. Over torch.distributed the server is saved where it is, between two pushes."""
        with self._lock:
            return deepcopy(
                {
                    "optimizer": self.optimizer.state_dict(),
                    "x": self.x,
                    "bytes_sent": self.bytes_sent,
                }
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            self.optimizer.load_state_dict(state["optimizer"])
            for x, saved in zip(self.x, state["x"], strict=True):
                x.copy_(saved)
        self.bytes_sent = state["bytes_sent"]
