"""Collectives over Horovod, which negotiates by name and overlaps them with whatever the process
does.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from dgc.collective import Collective, World
from dgc.transport.bytes import node_size
from dgc.transport.run import HOROVODS_MODULE, Wait

MAX_BYTES = (
    1 << 31
) - 1  # of one collective, if not NCCL's: it counts in 32 bits, and goes on somewhere else
POLL_S = 2e-4  # seconds between two looks whether a collective is done
CARRIED_AS = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}


class Horovod:
    """The ranks of a Horovod process set; all of them when it is None."""

    optimizer_module = HOROVODS_MODULE

    def __init__(self, process_set: Any = None):
        self.process_set = hvd.global_process_set if process_set is None else process_set
        self._sets = {"world": self.process_set}

    @property
    def world(self) -> World | None:
        """Asked anew each time: an elastic job changes size between two steps, and a process set
        may be removed.
        """
        if self.process_set.process_set_id is None:
            raise ValueError(
                f"process_set must be one that Horovod has, got one of ranks {self.process_set.ranks} "
                "that it has not, or has no longer (call hvd.add_process_set(it) on all ranks, or "
                "hvd.init(process_sets=[it]), before this)"
            )
        if not self.process_set.included():
            return None
        return World(self.process_set.rank(), self.process_set.size())

    @property
    def state_is_broadcast_globally(self) -> bool:
        """Whether it leaves ranks out, whom hvd.broadcast_optimizer_state reaches: that knows no
        process set.
        """
        return self.process_set.ranks != hvd.global_process_set.ranks

    def by_node(self, device: torch.device) -> int:
        if self.process_set.ranks != hvd.global_process_set.ranks:
            raise ValueError(
                "process_set must be None, or have all ranks, where hierarchical is True, got ranks "
                f"{self.process_set.ranks}"
            )
        # As its launcher calls the machine, which mpirun does not. cross_rank() is alike on some
        # that differ in size.
        size = node_size(self, os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname(), device)
        world = World(hvd.rank(), hvd.size(), size)
        if 1 < size < world.size:
            sets = _process_sets(world.partition("intra_node") + world.partition("inter_node"))
            self._sets.update(
                {group: sets[world.members(group)] for group in ("intra_node", "inter_node")}
            )
        return size

    def start(self, collective: Collective, name: str) -> Wait:
        tensor = collective.tensor
        process_set = self._sets[collective.group]
        if collective.op == "all_reduce":
            return self._sum(tensor, name, process_set)
        # Horovod does not know bfloat16, nor bool everywhere; where nothing is added up, their bits
        # will do.
        bits = tensor.view(CARRIED_AS[tensor.dtype]) if tensor.dtype in CARRIED_AS else tensor
        if collective.op == "all_gather":
            what = (
                "give sparse_as_dense=True, or smaller batches"
                if name.startswith("dgc.sparse.")
                else "have smaller buckets by groups=, Config(exchange='reduce'), or a higher sparsity"
            )
            # NCCL counts those of one rank.
            parts = 1 if tensor.is_cuda and hvd.nccl_built() else process_set.size()
            refuse_too_large(name, parts * tensor.nbytes, what)
            handle = hvd.allgather_async(bits.unsqueeze(0), name=name, process_set=process_set)
            return _waiting([handle], lambda result: result.view(tensor.dtype))
        if collective.op == "all_to_all":
            refuse_too_large(
                name, tensor.nbytes, "have smaller buckets by groups=, or a higher sparsity"
            )
            handle = hvd.alltoall_async(bits, name=name, process_set=process_set)
            return _waiting([handle], lambda result: result.view(tensor.dtype).view_as(tensor))
        # Horovod counts roots globally, also within a process set.
        root = process_set.ranks[collective.root]
        slices = (
            bits.view(-1).split(MAX_BYTES // bits.element_size())
            if tensor.nbytes > MAX_BYTES
            else [bits]
        )
        return _waiting(
            [
                hvd.broadcast_async_(
                    part, root, name=f"{name}.{i}" if i else name, process_set=process_set
                )
                for i, part in enumerate(slices)
            ],
            lambda _: tensor,
        )

    def _sum(self, tensor: Tensor, name: str, process_set: Any) -> Wait:
        flying = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        slices = flying.view(-1).split(MAX_BYTES) if tensor.numel() > MAX_BYTES else [flying]
        return _waiting(
            [
                hvd.allreduce_async_(
                    part, name=f"{name}.{i}" if i else name, op=hvd.Sum, process_set=process_set
                )
                for i, part in enumerate(slices)
            ],
            lambda _: flying.to(tensor.dtype),
        )


def refuse_too_large(name: str, nbytes: int, what: str) -> None:
    """Refuses a collective of more bytes than Horovod can count; ``what`` can be done."""
    if nbytes > MAX_BYTES:
        raise ValueError(
            f"{name}: the ranks' messages must have at most {MAX_BYTES} bytes together with Horovod, got "
            f"{nbytes} ({what}; or use torch.distributed)"
        )


def _waiting(handles: list[int], read: Callable[[Tensor], Tensor]) -> Wait:
    """Waits for a collective, which may be several of Horovod's: the last one's result is read.
    Unlike torch.distributed's, later ones may begin in another order on each rank.
    """

    def done() -> bool:
        return all(hvd.poll(handle) for handle in handles)

    def result() -> Tensor:
        while not done():  # Horovod's own waiting looks once a millisecond
            time.sleep(POLL_S)
        last = [hvd.synchronize(handle) for handle in handles][-1]
        # An all-to-all also says how it was split.
        return read(_arrived(last[0] if isinstance(last, tuple) else last))

    return Wait(result, done)


def _arrived(result: Tensor) -> Tensor:
    """Makes a result safe to read in the current stream. On a GPU, Horovod's thread made it in the
    default stream, where it may still be on its way (HOROVOD_ENABLE_ASYNC_COMPLETION), and to which
    its memory belongs.
    """
    if result.is_cuda:
        stream = torch.cuda.current_stream(result.device)
        stream.wait_stream(torch.cuda.default_stream(result.device))
        result.record_stream(stream)
    return result


def _process_sets(every: list[range]) -> dict[range, Any]:
    """A process set of each of these ranges of ranks: one that Horovod has already, or else a new
    one.
    """
    known = {
        tuple(ranks): number
        for number, ranks in hvd.mpi_ops._basics._get_process_set_ids_and_ranks().items()
    }
    if (
        any(tuple(ranks) not in known for ranks in every)
        and os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") != "1"
    ):
        raise ValueError(
            "Horovod must have process sets for the nodes where hierarchical is True, got none (set "
            "HOROVOD_DYNAMIC_PROCESS_SETS=1 on all ranks, or call hvd.init(process_sets=["
            f"{', '.join(f'hvd.ProcessSet({list(ranks)})' for ranks in every)}]))"
        )
    sets = {ranks: hvd.ProcessSet(ranks) for ranks in every}
    for ranks, made in sets.items():
        if tuple(ranks) in known:
            made.process_set_id = known[tuple(ranks)]
        else:
            hvd.add_process_set(made)  # which all ranks call, in the same order
    return sets
