"""Residuals on another number of ranks: what is pending is conserved."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import current_rank, difference, flat, loss, model
from pairwise import pairwise
from shelves import DOUBLE, OPS, SCHEDULE, in_lockstep, made, pending, saved, trained
from torch import nn

import dgc
from dgc.checkpoint.reshard import weights as weights_of
from dgc.checkpoint.save import tree_hash


def test_what_is_pending_in_an_added_group_is_conserved_on_one_process(tmp_path):
    def grouped():
        network = model(dtype=DOUBLE)
        first, *others = network.parameters()
        optimizer = torch.optim.SGD([first], 0.05, 0.9, weight_decay=1e-2)
        optimizer = dgc.DistributedOptimizer(
            optimizer, network.named_parameters(), dgc.Config(sparsity=SCHEDULE)
        )
        optimizer.add_param_group({"params": others})
        return network, optimizer

    def save():
        network, optimizer = grouped()
        trained(range(4), network, optimizer)
        dgc.save_checkpoint(tmp_path, network, optimizer)
        optimizer.flush()
        return flat(network)

    def load():
        network, optimizer = grouped()
        dgc.load_checkpoint(tmp_path, network, optimizer)
        return flat(network)

    flushed = in_lockstep(save, 2)[0]
    assert difference(in_lockstep(load, 1)[0], flushed) < 1e-14


@pytest.mark.parametrize("new", [1, 2, 5])
def test_what_waits_at_owners_is_conserved(tmp_path, new):
    """Of another number of ranks, each owns other entries."""
    config = dgc.Config(0.95, exchange="reduce")

    def save():
        network, optimizer = made(config=config)
        trained(range(4), network, optimizer)
        dgc.save_checkpoint(tmp_path, network, optimizer)
        before = flat(network).clone()
        optimizer.flush()
        return before, flat(network)

    def load():
        network, optimizer = made(config=config)
        dgc.load_checkpoint(tmp_path, network, optimizer)
        optimizer.flush()
        return flat(network)

    before, flushed = in_lockstep(save, 3)[0]
    assert difference(in_lockstep(load, new)[0], flushed) < 1e-14 < difference(before, flushed)


def test_a_frozen_parameter_is_not_moved_on_one_process(tmp_path):
    """As flush() does not; all others are."""

    def save():
        network, optimizer = made()
        trained(range(4), network, optimizer)
        next(network.parameters()).requires_grad_(False)
        dgc.save_checkpoint(tmp_path, network, optimizer)
        before = flat(network).clone()
        optimizer.flush()
        return before, flat(network)

    def load():
        network, optimizer = made()
        next(network.parameters()).requires_grad_(False)
        dgc.load_checkpoint(tmp_path, network, optimizer)
        return flat(network), next(network.parameters()).numel()

    (before, flushed), (loaded, frozen) = in_lockstep(save, 2)[0], in_lockstep(load, 1)[0]
    assert torch.equal(loaded[:frozen], before[:frozen]) and not torch.equal(flushed, before)
    assert difference(loaded, flushed) < 1e-14


@pairwise(old=[1, 2, 3, 4], new=[1, 2, 3, 4], op=[dgc.Average, dgc.Sum])
def test_what_is_pending_is_conserved(shelf, old, new, op):
    """In u and in v; and so are the parameters, once it is all applied, and after more steps that have the same sum."""
    before = saved(old, op, f"{shelf}/{old}-{op}")

    def worker():
        network, optimizer = made(op, lr=1.0, momentum=0.5)
        extras = dgc.load_checkpoint(f"{shelf}/{old}-{op}", network, optimizer)
        assert extras == {"rank": current_rank() if new == old else 0}
        residuals, loaded = optimizer.residual_state_dict(), flat(network)
        optimizer.flush()
        flushed = flat(network)
        dgc.load_checkpoint(f"{shelf}/{old}-{op}", network, optimizer)
        return residuals, loaded, flushed, trained(range(4, 8), network, optimizer, common=True)

    after = in_lockstep(worker, new)
    assert all(torch.equal(rank[i], after[0][i]) for rank in after for i in (1, 2, 3))
    assert difference(after[0][2], before[0][2]) < 1e-14
    if old > 1:
        assert difference(before[0][2], before[0][1]) > 1e-6  # something was
    if old > 1 and new > 1:
        for letter in "uv":
            a, b = (
                pending([rank[0] for rank in ranks], letter, op == dgc.Average)
                for ranks in (after, before)
            )
            assert difference(a, b) < 1e-14 and b.norm() > 0
        assert torch.equal(after[0][1], before[0][1])
        assert difference(after[0][3], before[0][3]) < 1e-12
    if old == new:
        assert torch.equal(after[0][3], before[0][3])


def test_adamw_goes_on_in_one_process_from_its_dense_steps(tmp_path):
    def worker(steps, load):
        network = model(dtype=torch.float64)
        optimizer = dgc.DistributedOptimizer(
            torch.optim.AdamW(network.parameters(), lr=0.01),
            network.named_parameters(),
            dgc.Config(dgc.dense_until(9, 0.9)),
        )
        if load:
            dgc.load_checkpoint(tmp_path, network, optimizer)
        for step in steps:
            optimizer.zero_grad()
            loss(network, 0, step, torch.float64).backward()  # alike on all ranks
            optimizer.step()
            if step == 2 and not load:
                dgc.save_checkpoint(tmp_path, network, optimizer)
        return flat(network)

    straight = in_lockstep(lambda: worker(range(6), False), 2)[0]
    (alone,) = in_lockstep(lambda: worker(range(3, 6), True), 1)
    assert difference(alone, straight) < 1e-12


@OPS
@pytest.mark.parametrize("old", [2, 3])
def test_momentum_goes_on_in_one_process(shelf, old, op):
    """With nothing pending in v: as if there still were the others, weight decay included."""
    expected = saved(old, op, f"{shelf}/{old}-{op}")[0][4]

    def worker():
        network, optimizer = made(op)
        dgc.load_checkpoint(f"{shelf}/{old}-{op}/flushed", network, optimizer)
        return trained(range(4, 8), network, optimizer, common=True)

    assert difference(in_lockstep(worker, 1)[0], expected) < 1e-12


@OPS
def test_momentum_goes_on_from_one_process(shelf, op):
    """From a plain optimizer to three ranks, at density 1."""
    expected = saved(1, op, f"{shelf}/1-{op}")[0][3]

    def worker():
        network, optimizer = made(op, config=dgc.Config(sparsity=0.0))
        dgc.load_checkpoint(f"{shelf}/1-{op}", network, optimizer)
        return trained(range(4, 8), network, optimizer, common=True)

    assert all(difference(x, expected) < 1e-12 for x in in_lockstep(worker, 3))


def test_momentum_of_sparse_gradients_goes_on_in_one_process(tmp_path):
    """It is torch's own, not in u."""

    def run(network, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            network(torch.arange(10) + step).square().sum().backward()
            optimizer.step()
        return flat(network)

    def embedding():
        torch.manual_seed(0)
        return nn.Embedding(100, 32, sparse=True).double()

    def first():
        network, optimizer = made(network=embedding(), weight_decay=0.0)
        run(network, optimizer, range(3))
        dgc.save_checkpoint(tmp_path, network, optimizer)

    def second():
        network, optimizer = made(network=embedding(), weight_decay=0.0)
        dgc.load_checkpoint(tmp_path, network, optimizer)
        return run(network, optimizer, range(3, 6))

    in_lockstep(first, 2)
    network = embedding()
    expected = run(network, torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9), range(6))
    assert difference(in_lockstep(second, 1)[0], expected) < 1e-12


def test_maximize(tmp_path):
    """The signs of momentum and of what is applied."""
    before = saved(2, dgc.Average, str(tmp_path), maximize=True)

    def worker():
        network, optimizer = made(maximize=True)
        dgc.load_checkpoint(tmp_path, network, optimizer)
        flushed = flat(network)
        dgc.load_checkpoint(tmp_path / "flushed", network, optimizer)
        return flushed, trained(range(4, 8), network, optimizer, common=True)

    ((flushed, after),) = in_lockstep(worker, 1)
    assert difference(flushed, before[0][2]) < 1e-14 and difference(after, before[0][4]) < 1e-12


def test_ranks_that_order_their_sets_otherwise_are_alike():
    """A module's extra state may hold one. Python draws the order of strings in each process; of
    these numbers it is the order in which they came.
    """
    one, other = {0, 8}, {8, 0}
    assert [*one] != [*other]
    assert tree_hash({"_extra_state": one, "x": 1}) == tree_hash({"_extra_state": other, "x": 1})


def test_an_elastic_job_of_one_keeps_its_residuals(shelf, monkeypatch):
    before = saved(3, dgc.Average, f"{shelf}/3-{dgc.Average}")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")

    def worker():
        network, optimizer = made()
        dgc.load_checkpoint(f"{shelf}/3-{dgc.Average}", network, optimizer)
        return (
            optimizer.residual_state_dict(),
            flat(network),
            trained(range(4, 8), network, optimizer, common=True),
        )

    ((residuals, loaded, after),) = in_lockstep(worker, 1)
    for letter in "uv":
        assert (
            difference(
                pending([residuals], letter, True), pending([r[0] for r in before], letter, True)
            )
            < 1e-14
        )
    assert torch.equal(loaded, before[0][1]) and difference(after, before[0][3]) < 1e-12


@pytest.mark.parametrize(("old_op", "new_op"), [(dgc.Average, dgc.Sum), (dgc.Sum, dgc.Average)])
def test_what_is_pending_is_conserved_when_the_sum_is_another(shelf, old_op, new_op):
    before = saved(2, old_op, f"{shelf}/2-{old_op}")

    def worker():
        network, optimizer = made(new_op)
        dgc.load_checkpoint(f"{shelf}/2-{old_op}", network, optimizer)
        optimizer.flush()
        return flat(network)

    for size in (2, 3):
        assert difference(in_lockstep(worker, size)[0], before[0][2]) < 1e-14


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.booleans())
def test_every_old_residual_counts_as_before(old, new, average, new_average):
    """The law of :func:`dgc.load_checkpoint`, for any numbers: f' times the weights of an old residual add up to f."""
    weights = [weights_of(old, average, rank, new, new_average) for rank in range(new)]
    f, new_f = 1 / old if average else 1, 1 / new if new_average else 1
    for rank in range(old):
        assert sum(w.get(rank, 0) for w in weights) * new_f == pytest.approx(f, rel=1e-12)
    assert all(w > 0 for some in weights for w in some.values())
    if old == new and average == new_average:
        assert weights == [{rank: 1.0} for rank in range(new)]
    if average and new_average:  # means
        assert all(sum(some.values()) == pytest.approx(1, rel=1e-12) for some in weights)
    assert weights_of(old, average, None, new, new_average) == {
        rank: float(Fraction(f)) for rank in range(old)
    }


def test_small_parameters_that_travel_rounded_and_float32(tmp_path):
    """Their rests are kept like v. To float32's rounding."""
    config = dgc.Config(sparsity=0.95, value_bits=8)

    def first():
        network, optimizer = made(network=model(), config=config)
        for step in range(4):
            optimizer.zero_grad()
            loss(network, current_rank(), step).backward()
            optimizer.step()
        dgc.save_checkpoint(tmp_path, network, optimizer)
        return optimizer.residual_state_dict()

    def second():
        network, optimizer = made(network=model(), config=config)
        dgc.load_checkpoint(tmp_path, network, optimizer)
        return optimizer.residual_state_dict()

    before, after = in_lockstep(first, 3), in_lockstep(second, 2)
    assert len(before[0]["v"]) > len(before[0]["u"]) > 0
    for letter in "uv":
        assert difference(pending(after, letter, True), pending(before, letter, True)) < 1e-7
