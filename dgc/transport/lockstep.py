"""N ranks in one process: for tests, and for studying N workers on one device.

Each rank is a thread that runs the same script, but only one of them runs at a time: a rank runs
until it has to wait for the others, then the next one does. So results do not depend on the
scheduler, and random numbers drawn from torch's global generator come in the same order each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from dgc.collective import Collective, World
from dgc.transport.run import ProcessSet, Wait

T = TypeVar("T")
_here = threading.local()


def current() -> Lockstep | None:
    """The rank of this thread, if :func:`run` started it; else None."""
    return getattr(_here, "rank", None)


def run(worker: Callable[[], T], size: int, node_size: int = 1) -> list[T]:
    """Runs ``worker`` as each of ``size`` ranks, in lockstep. Returns their results in rank order.

    Within ``worker``, ``dgc.DistributedOptimizer`` exchanges with the other ranks, and
    :func:`current` returns the rank.

    Args:
        worker: takes no arguments.
        size: the number of ranks, at least 1.
        node_size: the number of ranks that count as one machine, for ``Config(hierarchical=True)``.
            It divides ``size``.

    Raises:
        ValueError: ``size`` < 1, or ``node_size`` does not divide it.
        Exception: what a rank raised; the other ranks are ended.
        RuntimeError: the ranks wait for different things, or one returned while others wait for it.
    """
    _check_sizes(size, node_size)
    rendezvous = _Rendezvous(size)
    results: dict[int, T] = {}
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def play(rank: int) -> None:
        _here.rank = Lockstep(rank, rendezvous, node_size)
        try:
            if device is not None:
                torch.cuda.set_device(device)  # which each thread has for itself
            rendezvous.await_turn(rank)
            # Else backward passes on a GPU, all ranks' in one thread, would wait in their hooks for
            # one another.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = worker()
        except _Ended:
            pass
        except BaseException as error:  # carried to the caller's thread
            rendezvous.fail(error)
        finally:
            rendezvous.leave(rank)

    threads = [
        threading.Thread(target=play, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C, after which the ranks would go on by themselves
        rendezvous.fail(error)
        raise
    if rendezvous.error is not None:
        raise rendezvous.error
    return [results[rank] for rank in range(size)]


def _check_sizes(size: int, node_size: int) -> None:
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"lockstep.run: size must be an integer >= 1, got {size!r}")
    if not isinstance(node_size, int) or node_size < 1 or size % node_size:
        raise ValueError(
            f"lockstep.run: node_size must be a divisor of size, which is {size}, got {node_size!r}"
        )


class Lockstep:
    """One of N ranks within this process."""

    def __init__(self, rank: int, rendezvous: _Rendezvous, machine_size: int):
        self._rank, self._rendezvous = rank, rendezvous
        self._by_machine = World(rank, rendezvous.size, machine_size)
        self._begun: dict[str, int] = {}

    process_set: ProcessSet = None
    optimizer_module = "dgc.frontends.optimizer"
    state_is_broadcast_globally = False

    @property
    def world(self) -> World:
        return self._by_machine.without_nodes

    def by_node(self, device: torch.device) -> int:
        return self._by_machine.node_size

    def start(self, collective: Collective, name: str) -> Wait:
        count = self._begun[name] = self._begun.get(name, 0) + 1
        key = (name, count, self._by_machine.members(collective.group))
        self._rendezvous.put(key, self._rank, collective)
        return Wait(lambda: self._rendezvous.get(key, self._rank))


class _Ended(BaseException):
    """Unwinds a rank because another one failed."""


class _Rendezvous:
    """Whose turn it is, and what has been put up for exchange."""

    def __init__(self, size: int):
        self.size = size
        self.error: BaseException | None = None
        lock = threading.Lock()
        # Each rank is woken only when it is to go on.
        self._called = [threading.Condition(lock) for _ in range(size)]
        self._turn = 0
        self._left: set[int] = set()
        # Rank -> what it found missing since anything last happened.
        self._waiting: dict[int, Any] = {}
        self._boxes: dict[Any, dict[int, Collective]] = {}
        self._results: dict[Any, Any] = {}  # a tensor; of an all-to-all one for each rank

    def await_turn(self, rank: int) -> None:
        with self._called[rank]:
            self._called[rank].wait_for(lambda: self._turn == rank or self.error is not None)
        if self.error is not None:
            raise _Ended

    def put(self, key: Any, rank: int, collective: Collective) -> None:
        box = self._boxes.setdefault(key, {})
        box[rank] = collective
        self._waiting.clear()
        if len(box) == len(key[2]):
            self._results[key] = _perform([box[rank] for rank in key[2]], key[0])

    def get(self, key: Any, rank: int) -> Tensor:
        if self.error is not None:
            raise _Ended
        while key not in self._results:
            self._waiting[rank] = key
            if len(self._waiting) == self.size - len(self._left):
                waits = ", ".join(
                    f"rank {r} for {name!r}" for r, (name, *_) in sorted(self._waiting.items())
                )
                gone = f"; {sorted(self._left)} returned" if self._left else ""
                raise RuntimeError(f"no rank can go on: waiting are {waits}{gone}")
            self._pass_on(rank)
            self.await_turn(rank)
        box, result = self._boxes[key], self._results[key]
        if box[rank].op == "all_to_all":
            result = result[key[2].index(rank)]
        del box[rank]
        if not box:  # the last to read it
            del self._boxes[key], self._results[key]
        return result.clone()

    def leave(self, rank: int) -> None:
        self._left.add(rank)
        self._waiting.pop(rank, None)
        if self._turn == rank:
            self._pass_on(rank)

    def fail(self, error: BaseException) -> None:
        with self._called[0]:  # the lock is that of all
            self.error = self.error or error
            for called in self._called:
                called.notify()

    def _pass_on(self, rank: int) -> None:
        following = ((rank + i) % self.size for i in range(1, self.size + 1))
        turn = next((r for r in following if r not in self._left), -1)
        with self._called[turn]:
            self._turn = turn
            self._called[turn].notify()


def _perform(collectives: list[Collective], name: str) -> Tensor | list[Tensor]:
    kinds = {(c.op, c.tensor.shape, c.tensor.dtype, c.root) for c in collectives}
    if len(kinds) > 1:
        raise RuntimeError(
            f"the ranks put different tensors up for {name!r}: {sorted(map(str, kinds))}"
        )
    tensors, op = [c.tensor for c in collectives], collectives[0].op
    if op == "all_gather":
        return torch.stack(tensors)
    if op == "all_to_all":
        return [torch.stack(rows) for rows in zip(*tensors, strict=True)]
    if op == "broadcast":
        return tensors[collectives[0].root].clone()
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
