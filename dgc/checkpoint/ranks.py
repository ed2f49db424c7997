"""The ranks that save or load together: what one of them raises, all raise."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from dgc.checkpoint.files import content_of
from dgc.checkpoint.fits import engine_or_none
from dgc.collective import Collective, World
from dgc.engine.parameters import shard
from dgc.transport import Transport, find
from dgc.transport.bytes import gather_bytes

T = TypeVar("T")
PIECE = 1 << 26  # bytes of a file that travel at a time: a GPU may have no room for all of it
KINDS = (FileNotFoundError, OSError, ValueError, TypeError, FloatingPointError, RuntimeError)


@dataclass(frozen=True)
class Ranks:
    """This rank and the others of its optimizer's process set.

    Args:
        transport: among them.
        device: of tensors that can travel.
        world: this rank, and how many there are.
    """

    transport: Transport
    device: torch.device
    world: World

    def together(self, action: Callable[[], T]) -> list[T]:
        """Acts on all ranks.

        Returns:
            What the action returned on each; plain JSON data, where it is looked at.

        Raises:
            Exception: what one rank raised, on all of them, so that none waits for it.
        """
        cause, kind = None, ""
        result: Any = None
        try:
            result = action()
        except Exception as error:
            cause, kind = error, next((k.__name__ for k in KINDS if isinstance(error, k)), "")
            result = str(error) if kind and str(error) else f"{type(error).__name__}: {error}"
            kind = kind or "RuntimeError"
        mine = json.dumps([kind, result]).encode()
        all_ = [
            json.loads(theirs)
            for theirs in gather_bytes(self.transport, mine, "dgc.checkpoint", self.device)
        ]
        for rank, (kind, result) in enumerate(all_):
            if kind:
                raise getattr(builtins, kind)(
                    f"{result} (on rank {rank})" if len(all_) > 1 else result
                ) from cause
        return [result for _, result in all_]

    def first(self, action: Callable[[], T]) -> T:
        """Acts on rank 0, whose result all get; it is plain JSON data."""
        results: list[Any] = self.together(lambda: action() if self.world.rank == 0 else None)
        return results[0]

    def send(self, file: Path, root: int, nbytes: int) -> bytes:
        """A file of the root's disk, on all ranks."""
        content: list[bytes] = []
        is_root = self.world.rank == root
        self.together(lambda: content.append(content_of(file, nbytes)) if is_root else None)
        buffer = bytearray(content.pop() if is_root else nbytes)
        for part in torch.frombuffer(buffer, dtype=torch.uint8).split(PIECE):
            asked = Collective("broadcast", part.to(self.device, copy=True), root)
            part.copy_(self.transport.start(asked, "dgc.checkpoint.file")())
        return bytes(buffer)


def ranks_of(optimizer: Any) -> Ranks:
    """The ranks of an optimizer's process set.

    Raises:
        TypeError: it is a wrapper, or its parameters are sharded.
        RuntimeError: this process is outside.
    """
    if hasattr(
        getattr(optimizer, "optimizer", None), "residual_state_dict"
    ):  # of Accelerate, Lightning, Fabric
        raise TypeError(
            f"optimizer must be the DistributedOptimizer itself, which has the residuals, got a wrapper of "
            f"it, {type(optimizer).__name__} (give its .optimizer)"
        )
    engine = engine_or_none(optimizer)
    # Horovod's own optimizer knows its process set, too.
    transport = (
        find(getattr(optimizer, "process_set", None))
        if engine is None
        else engine.settings.transport
    )
    if (world := transport.world) is None:
        raise RuntimeError(
            "this process must be in the optimizer's process set, got one outside it (save and load on "
            "its ranks only)"
        )
    if any(shard(p) is not None for group in optimizer.param_groups for p in group["params"]):
        raise TypeError(
            "the parameters must be whole, got sharded ones, of which no rank has a whole model to save "
            "(save them by torch.distributed.checkpoint, with dgc.Residuals(optimizer))"
        )
    # Lightning takes the model off the GPU when it has ended, but not the residuals.
    device = None if engine is None else engine.residual_device
    devices = (p.device for group in optimizer.param_groups for p in group["params"])
    return Ranks(transport, device or next(devices, torch.device("cpu")), world)
