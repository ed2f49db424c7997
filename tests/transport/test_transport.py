"""Finding the transport, and lockstep."""

import itertools
import os
import signal
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import model

import dgc
from dgc.collective import Collective
from dgc.transport import find


def test_the_default_group_before_torch_2_8(monkeypatch):
    """Which then does not know the ranks of a group that is None."""
    ranks, dist = torch.distributed.get_process_group_ranks, torch.distributed

    def as_of_2_4(group):
        if group is None:
            raise KeyError(None)
        return ranks(group)

    monkeypatch.setattr(dist, "get_process_group_ranks", as_of_2_4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parameter = torch.arange(3.0)
        dgc.broadcast_parameters([parameter])
        assert parameter.tolist() == [0, 1, 2] and find().by_node(parameter.device) == 1
    finally:
        dist.destroy_process_group()


def test_nothing_initialised_is_a_clear_error():
    with pytest.raises(
        RuntimeError, match=r"call hvd\.init\(\) of horovod\.torch, or torch\.distributed\."
    ):
        find()
    network = model()
    with pytest.raises(RuntimeError, match="nothing to exchange gradients over"):
        dgc.DistributedOptimizer(
            torch.optim.SGD(network.parameters(), 0.1), network.named_parameters()
        )


@settings(deadline=None, max_examples=25)
@given(size=st.integers(1, 6), rounds=st.integers(1, 4))
def test_lockstep_collectives(size, rounds):

    def worker():
        rank = find()
        out = []
        for i in range(rounds):
            own = torch.tensor([rank.world.rank + 10.0 * i])
            waits = [
                rank.start(Collective(op, own.clone(), root=size - 1), op)
                for op in ("all_gather", "all_reduce", "broadcast")
            ]
            out.append([wait().flatten().tolist() for wait in reversed(waits)][::-1])
        return out

    for result in dgc.lockstep.run(worker, size):
        for i, (gathered, summed, shared) in enumerate(result):
            values = [rank + 10.0 * i for rank in range(size)]
            assert (gathered, summed, shared) == (values, [sum(values)], [values[-1]])


def test_lockstep_carries_an_error_to_the_caller():
    def worker():
        if find().world.rank == 1:
            raise ArithmeticError("enough")
        dgc.broadcast_parameters([torch.zeros(1)])

    with pytest.raises(ArithmeticError, match="enough"):
        dgc.lockstep.run(worker, 3)


@pytest.mark.parametrize("size", [1, 3])
def test_lockstep_ends_when_it_is_interrupted(size):
    """By Ctrl-C in a notebook, where the process goes on."""
    threads = set(threading.enumerate())

    def worker():
        for step in itertools.count():
            if step == 3 and find().world.rank == 0:
                os.kill(os.getpid(), signal.SIGINT)
            dgc.broadcast_parameters([torch.zeros(1)])

    with pytest.raises(KeyboardInterrupt):
        dgc.lockstep.run(worker, size)
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive()


def test_lockstep_tells_a_deadlock():
    def worker():
        if find().world.rank < 2:
            dgc.broadcast_parameters([(f"p{find().world.rank}", torch.zeros(1))])

    waiting = r"waiting are rank 0 for 'dgc\.broadcast\.p0', rank 1 for 'dgc\.broadcast\.p1'; \[2\] returned"
    with pytest.raises(RuntimeError, match=waiting):
        dgc.lockstep.run(worker, 3)


def test_lockstep_ranks_run_their_own_backward_passes():
    """On a GPU torch has one thread for all, and a rank's hook that waits for another rank would stop that one too."""
    assert dgc.lockstep.run(torch._C._is_multithreading_enabled, 2) == [False, False]
    assert torch._C._is_multithreading_enabled()


def test_lockstep_refuses_tensors_that_do_not_fit():
    with pytest.raises(RuntimeError, match=r"different tensors up for 'dgc\.broadcast\.0'"):
        dgc.lockstep.run(lambda: dgc.broadcast_parameters([torch.zeros(1 + find().world.rank)]), 2)
    with pytest.raises(ValueError, match="size must be an integer >= 1, got 0"):
        dgc.lockstep.run(lambda: None, 0)


def test_lockstep_draws_the_same_random_numbers_each_time():
    def worker():
        out = []
        for _ in range(3):
            out.append(torch.rand(1).item())
            dgc.broadcast_parameters([torch.zeros(1)])
        return out

    runs = []
    for _ in range(3):
        torch.manual_seed(0)
        runs.append(dgc.lockstep.run(worker, 3))
    assert runs[0] == runs[1] == runs[2]
