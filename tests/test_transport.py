"""The laws over real Horovod and torch.distributed processes and in lockstep, and Horovod's contract beside Horovod.

All cases of one launcher and size run in one launch, which the tests then look at.
"""

import functools
import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading

import cases
import pytest
import torch
from cases import CONFIGS, VARIANTS, scheduled, two_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import launch
from laws import difference, flat, loss, model, reference

import dgc
from dgc.transport import find

COMMON = ["trajectories", "dense_equivalence", "resume", "unused_somewhere", "sparse_gradients", "broadcast",
          "half_precision", "scaled", "not_finite"]
ONLY = {("horovod", 2): ["socket_bytes", "against_stock", "gradients_against_stock", "broadcast_state",
                         "stock_compression", "too_large", "shared_in_slices", "started_anew"],
        ("horovod", 3): ["against_stock", "process_set"],
        ("torch", 2): ["socket_bytes"],
        ("torch", 3): ["process_group"]}
PLACES = [("lockstep", 2), ("lockstep", 3), ("lockstep", 8), ("horovod", 2), ("horovod", 3), ("torch", 2), ("torch", 3)]


def ran(launcher, size):
    results = once(launcher, size)
    if isinstance(results, BaseException):
        raise results
    return results


@functools.cache
def once(launcher, size):
    """A launch that failed is not tried again by each of the tests that look at it."""
    names = COMMON + ONLY.get((launcher, size), [])
    try:
        if launcher != "lockstep":
            return launch(launcher, size, names)[0]
        torch.manual_seed(0)
        return {name: dgc.lockstep.run(getattr(cases, name), size) for name in names}
    except BaseException as error:
        return error


everywhere = pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]}-{place[1]}")


@everywhere
@pytest.mark.parametrize("name", CONFIGS)
def test_agreement(place, name):
    """Law 2: parameters bit-identical on every rank; and residuals are each rank's own."""
    results = [rank[name] for rank in ran(*place)["trajectories"]]
    assert all(torch.equal(parameters, results[0][0]) for parameters, _, _ in results)
    v = [torch.cat([x.flatten() for x in residuals["v"].values()]) for _, _, residuals in results]
    assert all(x.any() and not torch.equal(x, v[0]) for x in v[1:])
    assert all(report.steps == 12 and report.residual_norm > 0 for _, report, _ in results)


@pytest.mark.parametrize("place", PLACES[3:], ids=lambda place: f"{place[0]}-{place[1]}")
@pytest.mark.parametrize("name", CONFIGS)
def test_transports_give_the_same(place, name):
    """Law 7, beside lockstep. With two ranks to the bit; with three, the order in which a ring adds up is its own."""
    got, expected = (ran(*where)["trajectories"][0][name][0] for where in (place, ("lockstep", place[1])))
    assert torch.equal(got, expected) if place[1] == 2 else difference(got, expected) < 1e-5


@everywhere
def test_dense_equivalence(place):
    """Law 3: at density 1, torch.optim.SGD on the averaged gradient."""
    results, size = ran(*place)["dense_equivalence"][0], place[1]
    for nesterov in (False, True):
        expected = flat(reference(range(20), size, nesterov=nesterov)[0])
        assert difference(results[f"nesterov {nesterov}"], expected) < 1e-6
    network = model()
    optimizer = torch.optim.SGD(two_groups(network), lr=0.05, momentum=0.9, weight_decay=1e-2)
    schedule = scheduled(optimizer)
    for step in range(20):
        optimizer.zero_grad()
        for rank in range(size):
            (loss(network, rank, step) / size).backward()
        optimizer.step()
        schedule.step()
    assert difference(results["groups"], flat(network)) < 1e-6
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True)
    for step in range(5):
        optimizer.zero_grad()
        loss(network, 0, step).backward()
        optimizer.step()
    assert difference(results["earlier momentum"], flat(reference(range(5, 15), size, network, optimizer)[0])) < 1e-6


@everywhere
def test_resume(place):
    """Law 6: to the bit, on every rank, u and v included."""
    assert ran(*place)["resume"] == [True] * place[1]


@everywhere
def test_parameters_used_on_some_ranks_only(place):
    results = ran(*place)["unused_somewhere"]
    assert all(torch.equal(result, results[0]) for result in results)


@everywhere
def test_sparse_gradients(place):
    results, size = ran(*place)["sparse_gradients"], place[1]
    torch.manual_seed(2)
    network = torch.nn.Sequential(torch.nn.Embedding(60, 30), torch.nn.Linear(30, 50))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(size):
            words = torch.randint(0, 60, (4 + rank,), generator=torch.Generator().manual_seed(10 * step + rank))
            (network(words).square().mean() / size).backward()
        optimizer.step()
    for as_dense in (False, True):
        for parameters, is_sparse in (rank[as_dense] for rank in results):
            assert is_sparse
            assert torch.equal(parameters, results[0][as_dense][0])
            assert difference(parameters, flat(network)) < 1e-6


@everywhere
def test_broadcast_parameters(place):
    results = ran(*place)["broadcast"]
    expected = flat(model(seed=place[1] - 1))
    assert all(torch.equal(parameters, expected) and number == 1 for parameters, number, _ in results)
    assert all(others == [[1.0] * 3] * 6 + [[], 1.0] for _, _, others in results)


@everywhere
def test_other_dtypes(place):
    results = ran(*place)["half_precision"]
    for dtype, (parameters, apart, moved) in results[0].items():
        assert moved > 1 and apart < {"torch.float64": 1e-6}.get(dtype, 0.02) * moved
        assert all(torch.equal(rank[dtype][0], parameters) for rank in results)


@everywhere
def test_an_overflow_on_one_rank_is_a_step_that_none_takes(place):
    """The loss scale of 2^10 doubles after two good steps, and is halved by the bad sixth one, alike on all ranks."""
    results = ran(*place)["scaled"]
    expected = [2.0 ** n for n in (10, 11, 11, 12, 12, 11, 11, 12)]
    assert all(torch.equal(parameters, results[0][0]) for parameters, _, _ in results)
    assert all((scales, skipped) == (expected, 1) for _, scales, skipped in results)


@everywhere
def test_a_gradient_that_is_not_finite_is_told_to_all(place):
    assert ran(*place)["not_finite"] == ["rank 1 has a gradient that is not finite, in: 6.weight"] * place[1]


@pytest.mark.parametrize("place", [("horovod", 2), ("torch", 2)], ids=lambda place: place[0])
@pytest.mark.parametrize("sparsity, exchange", [(0.0, "allgather"), (0.9, "allgather"), (0.9, "shared")])
def test_reported_bytes_are_those_on_the_socket(place, sparsity, exchange):
    """The kernel's count of what the processes sent; Horovod's negotiation is in it, which goes on by the clock."""
    results = [rank[sparsity, exchange] for rank in ran(*place)["socket_bytes"]]
    counted, reported = (sum(column) for column in zip(*results, strict=True))
    print(f"{place[0]}, sparsity {sparsity}, {exchange}: sent {counted:,}, reported {reported:,.0f}")
    assert counted == pytest.approx(reported, rel=0.05)


# -- beside stock Horovod ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_density_1_is_stock_horovod(size, variant):
    results = [rank[variant] for rank in ran("horovod", size)["against_stock"]]
    for parameters, gradients, _ in results:
        print(f"{variant}, {size} ranks: parameters after 50 steps differ by {parameters:.1e}")
        assert parameters <= 1e-5
        # With momentum, p.grad is the velocity and not the gradient: only the parameters can be compared then.
        assert variant != "no momentum" or gradients <= 1e-5


def test_gradients_are_those_of_stock_horovod():
    """Unused, sparse, frozen, tied, channels_last: p.grad after the step, and the parameters."""
    for rank in ran("horovod", 2)["gradients_against_stock"]:
        (ours, parameters), (stock, stock_parameters) = rank["ours"], rank["stock"]
        assert ours.keys() == stock.keys()
        for name, gradient in stock.items():
            assert (gradient is None) == (ours[name] is None), name
            assert gradient is None or torch.allclose(ours[name], gradient, rtol=1e-5, atol=1e-7), name
        assert difference(parameters, stock_parameters) < 1e-6


def test_broadcast_optimizer_state():
    results = ran("horovod", 2)["broadcast_state"]
    for momentum in (0.0, 0.9):
        ranks = [rank[momentum] for rank in results]
        for fresh, middle, loaded, parameters in ranks:
            assert fresh == (True, 0.05)
            assert middle == (True, True, 4)
            assert loaded == (True, 4, 0.05)
            assert torch.equal(parameters, ranks[0][3])


def test_horovods_own_compressions_give_horovods_own_optimizer():
    for rank in ran("horovod", 2)["stock_compression"]:
        assert rank == {"none": (True, "horovod.torch.optimizer"), "fp16": (True, "horovod.torch.optimizer")}


@pytest.mark.parametrize(("launcher", "case"), [("horovod", "process_set"), ("torch", "process_group")])
def test_process_sets(launcher, case):
    """Ranks outside are plain optimizers; the divisor is the size of the set, and root 1 of {1, 2} is rank 2."""
    outside, *inside = ran(launcher, 3)[case]
    own = torch.optim.SGD((network := model()).parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        own.zero_grad()
        loss(network, 0, step).backward()
        own.step()
    assert torch.equal(outside[0], flat(network)) and outside[1:] == (0, 0)
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        for rank in (1, 2):
            (loss(network, rank, step) / 2).backward()
        optimizer.step()
    for parameters, number, steps in inside:
        assert difference(parameters, flat(network)) < 1e-6
        assert (number, steps) == (2, 5)


def test_more_bytes_than_horovod_counts_are_refused():
    """Which would write them elsewhere: with 4 GB the process ended by SIGSEGV."""
    expected = "large: the ranks' messages have 2147483648 bytes together; accepted with Horovod: at most 2147483647"
    assert all(told.startswith(expected) for told in ran("horovod", 2)["too_large"])


def test_more_than_horovod_broadcasts_at_once():
    assert ran("horovod", 2)["shared_in_slices"] == [[True] * 4] * 2


def test_horovod_may_be_started_anew_under_the_optimizer():
    for parameters, straight in ran("horovod", 2)["started_anew"]:
        assert torch.equal(parameters, straight)


def test_the_signature_is_horovods():
    hvd = pytest.importorskip("horovod.torch")
    ours = inspect.signature(dgc.DistributedOptimizer).parameters
    stock = inspect.signature(hvd.DistributedOptimizer).parameters
    assert [name for name in ours if name != "grad_scaler"] == list(stock)
    assert ours["grad_scaler"].kind is inspect.Parameter.KEYWORD_ONLY
    for name in stock.keys() - {"compression", "process_set"}:
        assert ours[name].default == stock[name].default, name
    assert (dgc.Average, dgc.Sum) == (hvd.Average, hvd.Sum)


# -- failing together --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("launcher", ["horovod", "torch"])
def test_an_error_on_one_rank_ends_the_job_with_that_error(launcher):
    status, output, seconds = launch(launcher, 2, ["raises_on_one_rank"], limit=90, check=False)
    assert status != 0 and "rank 1 has had enough" in output
    print(f"{launcher}: the job ended after {seconds:.0f} s")


ENDS_AT_ONCE = """
import sys
import torch
import dgc
torch.distributed.init_process_group("gloo", f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
sys.setswitchinterval(1000)  # so that gloo's thread waits for the interpreter's lock until there is nothing more to do
for _ in range(3):
    dgc.broadcast_parameters({"x": torch.ones(1000)})
"""


def test_a_process_may_end_right_after_a_collective(tmp_path):
    """A quarter of these processes would end by SIGABRT, of plain torch ones too."""
    for attempt in range(5):
        pair = [subprocess.Popen([sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path / str(attempt)), str(rank)],
                                 env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}) for rank in range(2)]
        try:
            assert [process.wait(100) for process in pair] == [0, 0]
        finally:
            for process in pair:
                process.kill()


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


def test_join_is_an_error_and_not_a_hang():
    status, output, _ = launch("horovod", 2, ["out_of_data"], limit=90, check=False)
    assert status != 0 and "HorovodInternalError" in output and "Horovod has been shut down" in output


# -- finding the transport, and lockstep -------------------------------------------------------------------------------

def test_nothing_initialised_is_a_clear_error():
    with pytest.raises(RuntimeError, match=r"call hvd\.init\(\) of horovod\.torch, or torch\.distributed\."):
        find()
    network = model()
    with pytest.raises(RuntimeError, match="nothing to exchange gradients over"):
        dgc.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.1), network.named_parameters())


@settings(deadline=None, max_examples=25)
@given(size=st.integers(1, 6), rounds=st.integers(1, 4))
def test_lockstep_collectives(size, rounds):
    from dgc.collective import Collective

    def worker():
        rank = find()
        out = []
        for i in range(rounds):
            own = torch.tensor([rank.world.rank + 10.0 * i])
            waits = [rank.start(Collective(op, own.clone(), root=size - 1), op) for op in ("gather", "sum", "share")]
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

    waiting = r"waiting are rank 0 for 'dgc\.share\.p0', rank 1 for 'dgc\.share\.p1'; \[2\] returned"
    with pytest.raises(RuntimeError, match=waiting):
        dgc.lockstep.run(worker, 3)


def test_lockstep_ranks_run_their_own_backward_passes():
    """On a GPU torch has one thread for all, and a rank's hook that waits for another rank would stop that one too."""
    assert dgc.lockstep.run(torch._C._is_multithreading_enabled, 2) == [False, False]
    assert torch._C._is_multithreading_enabled()


def test_lockstep_refuses_tensors_that_do_not_fit():
    with pytest.raises(RuntimeError, match=r"the ranks put different tensors up for 'dgc\.share\.0'"):
        dgc.lockstep.run(lambda: dgc.broadcast_parameters([torch.zeros(1 + find().world.rank)]), 2)
    with pytest.raises(ValueError, match="size is 0; accepted: an integer >= 1"):
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
