"""How bytes grow with the ranks."""

import pytest
from laws import counted_sizes, model, train

import dgc


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
        assert gathered[n] == pytest.approx(
            min((n - 1) * given.message, 2 * (n - 1) / n * given.dense)
        )
    assert gathered[32] == pytest.approx(31 * given.message)
