"""Without masking: what was sent and v + c u are the sum of all gradients over 1 - m, whatever was sent."""

from contextlib import suppress

import pytest
import torch
from laws import walk, worlds
from test_compressed import buckets, gradients

import dgc
from dgc.collective import AbortedError
from dgc.paths.compressed import exchange_bucket, flush

SPARSITY = dgc.piecewise({0: 0.99, 4: 0.9, 7: 0.0, 8: 0.75, 12: 0.999, 18: 0.5})


def to_come(m, nesterov):
    """c: m + m^2 + ..., added up; Nesterov's momentum is one step ahead."""
    return sum(m**i for i in range(2 if nesterov else 1, 5000))


def flat(some, bucket):
    return torch.cat(
        [
            some[name].g.flatten() if name in some else torch.zeros(n, dtype=torch.float64)
            for name, n in zip(bucket.names, bucket.numels, strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("exchange", "n", "bits", "nesterov"),
    [
        *(
            (*case, bits, nesterov)
            for bits in (2, 16, 32)
            for case in (("allgather", 1), ("allgather", 3), ("reduce", 3))
            for nesterov in (False, True)
        ),
        ("allgather", 16, 16, True),
        ("reduce", 16, 32, False),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("allgather", 16, 4, False),
                ("allgather", 16, 4, True),
                ("allgather", 16, 16, False),
                ("reduce", 16, 32, True),
            )
        ),
    ],
)
def test_what_was_sent_and_what_is_pending_are_all_that_was_accumulated(
    exchange, n, bits, nesterov
):
    """Through changes of the sparsity, dense steps, dense sums (which are fewer bytes with 16 ranks), rounding, missing
    gradients, messages that are put back, early or late, and a flush.
    """
    config = dgc.Config(
        SPARSITY, factor_masking=False, exchange=exchange, value_bits=bits, min_numel=0
    )
    mine, m = buckets(n, torch.float64), 0.9
    c = to_come(m, nesterov)
    accumulated, sent = (
        torch.zeros(mine[0].numel, dtype=torch.float64),
        torch.zeros(mine[0].numel, dtype=torch.float64),
    )
    for step in range(24):
        given = [gradients(r, step, torch.float64, m, nesterov) for r in range(n)]
        if step == 5:
            given[0].pop("b")  # sits this step out
            continue_from = mine[0].u.clone()
        paths = [
            exchange_bucket(b, g, config, step, w)
            for b, g, w in zip(mine, given, worlds(n, average=False), strict=True)
        ]
        if step in (
            6,
            9,
        ):  # taken, and put back; of a reduce at step 9 when the owners have taken, too
            asked = [next(path) for path in paths]
            if step == 9 and exchange == "reduce":
                for r, path in enumerate(paths):
                    path.send(torch.stack([request.tensor[r] for request in asked]))
            for path in paths:
                with suppress(AbortedError):
                    path.throw(AbortedError())
        else:
            sent += walk(paths)[0]
        if step == 15:
            sent += walk(
                [flush(b, b.names, w) for b, w in zip(mine, worlds(n, average=False), strict=True)]
            )[0]
        for b, g in zip(mine, given, strict=True):
            accumulated += flat(g, b)
        if step == 5:  # momentum without a gradient waits, as torch.optim.SGD's does
            assert torch.equal(mine[0].views(mine[0].u)["b"], mine[0].views(continue_from)["b"])
        pending = sum(b.v + c * b.u for b in mine)
        apart = (sent + pending - accumulated / (1 - m)).abs().max()
        assert apart <= 1e-9 * accumulated.abs().max()
