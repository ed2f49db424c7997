"""The choice of an exchange by time, and how bytes grow with the ranks."""

import warnings

import pytest
import torch
from laws import counted_sizes, model, train

import dgc
from dgc.paths import choice


def counted(size):
    """Bytes that a rank sends in a step, counted collective by collective, without those of dense parameters."""
    reports = dgc.lockstep.run(lambda: train(range(2), dgc.Config(0.99), model())[1].report(), size)
    assert len({report.bytes_sent for report in reports}) == 1
    return reports[0].bytes_sent - 2 * (size - 1) / size * 4 * counted_sizes(0.99)[1]


def test_gathering_grows_with_the_ranks():
    sizes = [2, 4, 8, 16, 32, 64]
    gathered = {n: counted(n) for n in sizes}
    given, _ = counted_sizes(0.99)
    assert gathered[2] == given.message
    for n in sizes:
        assert gathered[n] == pytest.approx(min((n - 1) * given.message, 2 * (n - 1) / n * given.dense))
    assert gathered[32] == pytest.approx(31 * given.message)


def square(exchange, size, sparsity, steps=1):
    """Of each rank what it has moved, float64 (400, 400), what is pending of it, and its report, where only gradients
    are accumulated; and the sum of all gradients.
    """
    def gradient(rank, step):
        return torch.randn(400, 400, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)

    def worker():
        p = torch.nn.Parameter(torch.zeros(400, 400, dtype=torch.float64))
        config = dgc.Config(sparsity, exchange=exchange, wire_dtype=torch.float32, momentum_correction=False)
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], config, op=dgc.Sum)
        for step in range(steps):
            p.grad = gradient(dgc.lockstep.current().world.rank, step)
            optimizer.step()
        return p.detach(), optimizer.residual_state_dict()["v"]["p"], optimizer.report()

    return dgc.lockstep.run(worker, size), sum(gradient(r, step) for r in range(size) for step in range(steps))


@pytest.mark.parametrize(("sparsity", "turns"), [(0.9, {False, True}), (0.99, {False})])
def test_auto_is_by_time(sparsity, turns):
    """The reduce exchange where it takes less than half as long on 1 Gbit/s Ethernet: with 50 us and 8 ns a byte for
    each message, of which a rank sends N - 1 in an all-gather, and 2 (N - 1) in a dense ring or a reduce exchange.
    """
    shorter = set()
    for n in (2, 8, 16):
        sent = {name: square(name, n, sparsity)[0][0][2].bytes_sent for name in ("allgather", "reduce", "auto")}
        dense = sent["allgather"] == pytest.approx(2 * (n - 1) / n * 4 * 160_000)
        gathered = (n - 1) * (1 + dense) * 50e-6 + 8e-9 * sent["allgather"]
        reduced = 2 * (n - 1) * 50e-6 + 8e-9 * sent["reduce"]
        shorter.add(2 * reduced < gathered)
        assert sent["auto"] == sent["reduce" if 2 * reduced < gathered else "allgather"], n
    assert shorter == turns


def test_auto_says_so_where_it_takes_what_may_learn_less():
    """One warning, of rank 0; with an all-gather, or where somebody has asked for the reduce exchange, none."""
    choice._choose.cache_clear()  # which has the warning in it
    with pytest.warns(UserWarning, match="exchange='auto' takes 'reduce' among 17, as it is more than twice") as told:
        square("auto", 17, 0.9, steps=2)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        square("auto", 3, 0.9)
        square("reduce", 3, 0.9)


def test_nothing_is_lost_where_auto_changes_its_mind():
    """By a schedule: with 16 ranks the reduce exchange at 90 %, an all-gather at 99.9 %, and the first once more."""
    schedule = dgc.piecewise({0: 0.9, 2: 0.999, 4: 0.9})
    results, everything = square("auto", 16, schedule, steps=5)
    assert all(torch.equal(moved, results[0][0]) for moved, _, _ in results)
    left = sum(v for _, v, _ in results) - results[0][0]
    torch.testing.assert_close(left, everything, rtol=0, atol=1e-9)
