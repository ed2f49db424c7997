"""Collectives over torch.distributed (gloo, NCCL), which pairs them up by the order in which they
begin.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dgc.collective import Collective, World
from dgc.transport.bytes import node_size
from dgc.transport.run import Wait


@atexit.register
def _let_go() -> None:
    """Waits, a second at most, until no other thread is running. After a collective a thread of
    gloo's lets go of its tensors, for which it needs the interpreter's lock. If it still waits for
    that when the interpreter ends, it aborts the process: "terminate called without an active
    exception".
    """
    end = time.monotonic() + 1.0
    time.sleep(0.05)
    while _others_run() and time.monotonic() < end:
        time.sleep(0.02)


def _others_run() -> bool:
    """Whether another thread of this process is running, or would be if there were a processor.
    Known on Linux.
    """
    own = threading.get_native_id()
    for stat in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            if (
                int(stat.parent.name) != own
                and stat.read_text().rpartition(")")[2].split()[0] == "R"
            ):
                return True
    return False


# Its name before 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchDistributed:
    """The ranks of a process group; those of the default group when it is None."""

    optimizer_module = "dgc.frontends.optimizer"
    state_is_broadcast_globally = False
    # The last process group whose ranks were grouped by machine, how many each has, and the groups.
    _last_grouping: tuple[Any, int, dict[str, Any]] | None = None

    def __init__(self, group: Any = None):
        self.process_set = group
        self._groups = {"world": group}
        self._last: tuple[Any, Any] | None = (
            None  # the group of the last collective, and what waits for that
        )

    @property
    def world(self) -> World | None:
        """None for a process outside the group."""
        rank = dist.get_rank(self.process_set)
        return None if rank < 0 else World(rank, dist.get_world_size(self.process_set))

    @property
    def machine(self) -> Any:
        """The group of the ranks of this rank's machine, once they are grouped."""
        return self._groups["intra_node"]

    def by_node(self, device: torch.device) -> int:
        """A machine is known by its name, and by the number of torchrun's agent."""
        ranks = _ranks(self.process_set)
        if ranks != list(
            range(dist.get_world_size())
        ):  # the others would have to take part in making groups
            raise ValueError(
                f"the process group must have all ranks where hierarchical is True, got {ranks}"
            )
        if TorchDistributed._last_grouping and TorchDistributed._last_grouping[0] is _known(
            self.process_set
        ):  # so that one rank alone may make a copy of an optimizer
            _, size, groups = TorchDistributed._last_grouping
            self._groups.update(groups)
            return size
        machine = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
        size = node_size(self, machine, device)
        world = World(dist.get_rank(self.process_set), dist.get_world_size(self.process_set), size)
        if 1 < size < world.size:
            for group in ("intra_node", "inter_node"):
                # All ranks make all groups. Where each makes its own alone, torch names these by
                # how many groups a rank knows: ranks that know of different ones would wait for
                # each other for ever.
                made = [
                    _part(_known(self.process_set), members, device.type)
                    for members in world.partition(group)
                ]
                (self._groups[group],) = [
                    one for one in made if one is not dist.GroupMember.NON_GROUP_MEMBER
                ]
        groups = {name: group for name, group in self._groups.items() if name != "world"}
        TorchDistributed._last_grouping = _known(self.process_set), size, groups
        return size

    def start(self, collective: Collective, name: str) -> Wait:
        """``name`` is not used: the order decides."""
        tensor, group = collective.tensor.contiguous(), self._groups[collective.group]
        if not _carries(
            group, tensor.device
        ):  # NCCL, and a tensor of the CPU: by way of this process's GPU
            bound = getattr(_known(group), "bound_device_id", None)  # or the current one
            by_gpu = self.start(replace(collective, tensor=tensor.to(bound or "cuda")), name)
            return Wait(lambda: by_gpu().to(tensor.device))
        if self._last is not None and self._last[0] is not group:
            self._last[
                1
            ].wait()  # on the device: NCCL must not run two groups' collectives in another order elsewhere
        result = tensor
        if collective.op == "all_gather":
            size = dist.get_world_size(group)
            result = torch.empty(size, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
            work = _all_gather(result.view(-1), tensor.view(-1), group=group, async_op=True)
        elif collective.op == "all_reduce":
            work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group, async_op=True)
        elif collective.op == "all_to_all":
            result = torch.empty_like(tensor)
            work = dist.all_to_all_single(result, tensor, group=group, async_op=True)
        else:
            root = _ranks(group)[collective.root]
            work = dist.broadcast(tensor, src=root, group=group, async_op=True)
        # A default group that was made without a backend names none.
        if tensor.is_cuda and len(self._groups) > 1:
            self._last = group, work

        def wait() -> torch.Tensor:
            work.wait()
            return result

        return Wait(wait)


def _carries(group: Any, device: torch.device) -> bool:
    """Whether a group can send tensors of a device; or there is no other way."""
    if device.type != "cpu" or not torch.cuda.is_available():
        return True
    try:
        _known(group)._get_backend(device)
    except RuntimeError:
        return False
    return True


@cache
def _part(group: Any, members: range, kind: str) -> Any:
    """A group of some of the ranks of another one, which waits as long. Made once: torch keeps it
    until the end.
    """
    timeout = None
    with suppress(AttributeError, RuntimeError):  # not every backend tells
        timeout = group._get_backend(torch.device(kind)).options._timeout
    return dist.new_group(list(members), timeout, dist.get_backend(group))


def _known(group: Any) -> Any:
    """The group itself, where the default one is given as None."""
    return dist.group.WORLD if group is None else group


def _ranks(group: Any) -> list[int]:
    """The global ranks of a group. Before torch 2.8 the default group is not known as None here."""
    return dist.get_process_group_ranks(_known(group))
