"""Momentum paid in advance: what was sent and v + c u are the sum of all gradients over 1 - m, whatever was sent."""

from contextlib import suppress
from itertools import pairwise

import pytest
import torch
from laws import walk, worlds
from test_compressed import buckets, gradients

import dgc
from dgc.collective import AbandonedError, World
from dgc.compression.residual import Bucket, Gradient
from dgc.paths.compressed import flush, reduce

SPARSITY = dgc.piecewise({0: 0.99, 4: 0.9, 7: 0.0, 8: 0.75, 12: 0.999, 18: 0.5})


def prepaid(sparsity=SPARSITY, masking="prepay", **settings):
    return dgc.Config(sparsity, factor_masking=masking, min_numel=0, **settings)


def to_come(m, nesterov):
    """c: m + m^2 + ..., added up; Nesterov's momentum is one step ahead."""
    return sum(m**i for i in range(2 if nesterov else 1, 5000))


def flat(some, bucket):
    return torch.cat([some[name].g.flatten() if name in some else torch.zeros(n, dtype=torch.float64)
                      for name, n in zip(bucket.names, bucket.numels, strict=True)])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("exchange", "n", "masking", "wire"), [
    *((*case, wire) for wire in (torch.float16, torch.float32) for case in (
        ("allgather", 1, "prepay"), ("allgather", 3, "prepay"), ("reduce", 3, "prepay"),
        ("reduce", 3, False))),
    ("allgather", 16, "prepay", torch.float16), ("reduce", 16, "prepay", torch.float32)])
def test_what_was_sent_and_what_is_pending_are_all_that_was_accumulated(exchange, n, masking, wire, nesterov):
    """Through changes of the sparsity, dense steps, dense sums (which are fewer bytes with 16 ranks), rounding, missing
    gradients, messages that are put back, early or late, and a flush. Without masking, too, where nothing is paid.
    """
    mine, m, config = buckets(n, torch.float64), 0.9, prepaid(exchange=exchange, wire_dtype=wire, masking=masking)
    c = to_come(m, nesterov)
    accumulated, sent = torch.zeros(mine[0].numel, dtype=torch.float64), torch.zeros(mine[0].numel, dtype=torch.float64)
    paid = 0
    for step in range(24):
        given = [gradients(r, step, torch.float64, m, nesterov) for r in range(n)]
        if step == 5:
            given[0].pop("b")  # sits this step out
            continue_from = [b.u.clone() for b in mine]
        before = [b.u.clone() for b in mine]
        paths = [reduce(b, g, config, step, w, average=False) for b, g, w in zip(mine, given, worlds(n), strict=True)]
        if step in (6, 9):  # taken, and put back; of a reduce at step 9 when the owners have taken, too
            asked = [next(path) for path in paths]
            if step == 9 and exchange == "reduce":
                for r, path in enumerate(paths):
                    path.send(torch.stack([request.tensor[r] for request in asked]))
            for path in paths:
                with suppress(AbandonedError):
                    path.throw(AbandonedError())
        else:
            sent += walk(paths)[0]
        if step == 15:
            sent += walk([flush(b, b.names, w, average=False) for b, w in zip(mine, worlds(n), strict=True)])[0]
        for r, (b, g) in enumerate(zip(mine, given, strict=True)):
            accumulated += flat(g, b)
            moved = m * before[r] + flat(g, b)
            paid += int((b.u - moved).abs().gt(1e-12).sum()) if "b" in g else 0
        if step == 5:  # momentum without a gradient waits, as torch.optim.SGD's does
            assert torch.equal(mine[0].views(mine[0].u)["b"], mine[0].views(continue_from[0])["b"])
        pending = sum(b.v + c * b.u for b in mine)
        apart = (sent + pending - accumulated / (1 - m)).abs().max()
        assert apart <= 1e-9 * accumulated.abs().max()
    assert (paid > 100) == (masking == "prepay")  # there was something to get right


def one_entry(v, u, m=0.9, nesterov=False):
    """What becomes of an entry of such a v and u, without a gradient, when it is sent: what was sent, and u."""
    b = Bucket("bucket 0", {"a": torch.empty(2, 2, dtype=torch.float64)})
    index, valid = torch.tensor([0, 0]), torch.tensor([True, False])  # an empty slot may point at it, too
    b.v[0], b.u[0] = v, u
    b.prepay(index, valid, {"a": Gradient(torch.zeros(2, 2), m, nesterov)})
    assert not b.v[1:].any() and not b.u[1:].any()
    return b.v[0].item(), b.u[0].item()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_share_follows_the_wait(sign, nesterov):
    """Up to |v| = (1 + 3 m) |u| nothing, from there as much as |v| is above it, and after a long wait all."""
    c = to_come(0.9, nesterov)
    for v in (0.0, 1.0, 3.7):  # such as are sent in every step
        assert one_entry(sign * v, sign * 1.0, nesterov=nesterov) == (sign * v, sign * 1.0)
    left = [1.0]
    for v in (4.0, 5.0, 10.0):
        sent, u = one_entry(sign * v, sign * 1.0, nesterov=nesterov)
        assert sent == pytest.approx(sign * (v + v - 3.7)) and u == pytest.approx(sign * (1 - (v - 3.7) / c))
        left.append(abs(u))
    assert all(one > other for one, other in pairwise(left))
    assert one_entry(sign * 13.0, sign * 1.0, nesterov=nesterov) == (pytest.approx(sign * (13 + c)), 0)


@pytest.mark.parametrize("m", [0.0, 1.0])
def test_a_momentum_that_adds_nothing_or_without_end_is_not_paid(m):
    assert one_entry(50.0, 1.0, m) == (50.0, 1.0)


def test_another_momentum_pays_by_what_it_adds_itself():
    """The law holds from then on with its c: what u adds is what the new momentum makes of it."""
    assert one_entry(50.0, 1.0, 0.5) == (pytest.approx(51.0), 0)  # 0.5 + 0.25 + ...
    assert one_entry(50.0, 1.0, 0.9) == (pytest.approx(59.0), 0)


def test_at_density_1_it_is_momentum_sgd_to_the_bit():
    one, other = buckets(1)[0], buckets(1)[0]
    for step in range(6):
        updates = [walk([reduce(b, gradients(0, step, nesterov=step > 2), config, step, World(0, 1))])[0]
                   for b, config in ((one, prepaid(0.0)), (other, dgc.Config(0.0, factor_masking=False, min_numel=0)))]
        assert torch.equal(*updates) and torch.equal(one.u, other.u)


@pytest.mark.parametrize(("m", "nesterov", "density"), [
    (0.9, False, 0.5), (0.9, True, 0.25), (0.99, False, 0.97), (0.99, True, 0.25)])
def test_a_bowl_is_as_stable_as_with_momentum_sgd(m, nesterov, density):
    """At almost the largest learning rate at which momentum SGD is stable, lr h = 2 (1 + m), or with Nesterov's
    momentum 2 (1 + m) / (1 + 2 m), of the largest curvature h. All of c u at once would be stable up to a nineteenth.
    """
    n = 400
    h = torch.logspace(0, -3, n, dtype=torch.float64)
    lr = 0.95 * 2 * (1 + m) / ((1 + 2 * m) if nesterov else 1)
    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bucket, start = Bucket("bucket 0", {"a": x.view(20, 20)}), float((h * x * x).sum())
    config = prepaid(1 - density, selection="exact", wire_dtype=torch.float32)
    for step in range(1500):
        gradient = {"a": Gradient((h * x).view(20, 20), m, nesterov)}
        x = x - lr * walk([reduce(bucket, gradient, config, step, World(0, 1))])[0]
    assert float((h * x * x).sum()) < start / 1000
