"""Exchanges that scale: shared support, and the choice by time. Agreement, conservation over transports, DDP and loss
scales are tested with the other configurations, among which it is.
"""

import warnings
from dataclasses import replace

import pytest
import torch
from laws import SHARED, counted_sizes, model, train, walk, worlds
from test_compressed import buckets, gradients, refusals

import dgc
from dgc.compression import select
from dgc.compression.residual import Bucket
from dgc.compression.wire import Layout, Support
from dgc.paths.compressed import reduce


def transcription(shapes, gradient, size, steps, lr, m, sparsity, nesterov):
    """ScaleCom's cyclic local top-k with the paper's momentum correction and masking, in float64."""
    p = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    u, v = ([[torch.zeros_like(x).flatten() for x in p] for _ in range(size)] for _ in range(2))
    for step in range(steps):
        for i, x in enumerate(p):
            for r in range(size):
                u[r][i] = m * u[r][i] + gradient(r, step)[i].flatten()
                v[r][i] = v[r][i] + (gradient(r, step)[i].flatten() + m * u[r][i] if nesterov else u[r][i])
            k = select.count(sparsity(step), x.numel())
            there = v[step % size][i].abs().topk(k).indices
            x.view(-1)[there] -= lr * sum(v[r][i][there] for r in range(size)) / size
            for r in range(size):
                u[r][i][there] = v[r][i][there] = 0
    return p


@pytest.mark.parametrize("size, nesterov", [(2, False), (3, True), (4, False), (16, True)])
def test_it_is_cyclic_local_top_k(size, nesterov):
    shapes, sparsity = [(30, 40), (7, 11), (200, 3)], dgc.piecewise({0: 0.75, 5: 0.9, 12: 0.98})

    def gradient(rank, step):
        generator = torch.Generator().manual_seed(100 * step + rank)
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def worker():
        parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=nesterov)
        optimizer = dgc.DistributedOptimizer(optimizer, [(str(i), p) for i, p in enumerate(parameters)],
                                             replace(SHARED, sparsity=sparsity))
        for step in range(20):
            for p, g in zip(parameters, gradient(dgc.lockstep.current().world.rank, step), strict=True):
                p.grad = g
            optimizer.step()
        return [p.detach() for p in parameters]

    expected = transcription(shapes, gradient, size, 20, 0.1, 0.9, sparsity, nesterov)
    for result in dgc.lockstep.run(worker, size):
        for got, wanted in zip(result, expected, strict=True):
            assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("masking", [True, False])
def test_conservation_to_the_bit(n, masking):
    """What is gone from v is what was summed; u is zero there, with masking, and as it was elsewhere."""
    mine = buckets(n)
    config = dgc.Config(0.9, exchange="shared", factor_masking=masking, min_numel=0)
    for step in range(5):
        untouched = buckets(n)
        for b, c in zip(mine, untouched, strict=True):
            c.u.copy_(b.u)
            c.v.copy_(b.v)
        for r, c in enumerate(untouched):
            c.accumulate(gradients(r, step))
        updates = walk([reduce(b, gradients(r, step), config, step, w, average=False)
                        for r, (b, w) in enumerate(zip(mine, worlds(n), strict=True))])
        taken = [c.v - b.v for b, c in zip(mine, untouched, strict=True)]
        assert all(torch.equal(b.v + t, c.v) for b, t, c in zip(mine, taken, untouched, strict=True))
        assert all(torch.equal(update, updates[0]) for update in updates)
        assert torch.allclose(updates[0], sum(taken), rtol=1e-5, atol=1e-12)
        there = updates[0] != 0
        assert 0 < there.float().mean() < 0.2
        for b, c in zip(mine, untouched, strict=True):
            assert torch.equal(b.u[~there], c.u[~there]) and bool((b.u[there] == 0).all()) == masking


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("who", [0, 1])
def test_a_gradient_that_is_not_finite_is_told_to_all(bad, who):
    """Of the leader of step 0, or of another rank; what is finite is kept."""
    mine, paths = buckets(3), []
    for r, (bucket, world) in enumerate(zip(mine, worlds(3), strict=True)):
        g = gradients(r, 0)
        if r == who:
            g["b"].g[5, 5] = bad
        paths.append(reduce(bucket, g, SHARED, 0, world))
    assert set(refusals(paths)) == {f"rank {who} has a gradient that is not finite, in: b"}
    for r, bucket in enumerate(mine):
        rest = {k: g.g for k, g in gradients(r, 0).items()}
        if r == who:
            rest["b"][5, 5] = 0
        assert torch.equal(bucket.v, torch.cat([rest[k].flatten() for k in bucket.names]))


def test_a_damaged_support_is_refused_and_nothing_is_taken():
    mine = buckets(2)
    paths = [reduce(b, gradients(r, 0), SHARED, 0, w) for r, (b, w) in enumerate(zip(mine, worlds(2), strict=True))]
    message, _ = (next(path).tensor for path in paths)
    message[3] ^= 1
    for path in paths:
        with pytest.raises(ValueError, match="the message of rank 0 for bucket 0 is corrupt"):
            path.send(message.clone())
    for r, bucket in enumerate(mine):
        assert torch.equal(bucket.v, torch.cat([gradients(r, 0)[k].g.flatten() for k in bucket.names]))


@pytest.mark.parametrize("numel", [3, 65_536, 200_000])
def test_a_support_is_read_as_it_was_written(numel):
    bucket = Bucket("bucket 0", {"a": torch.empty(numel), "b": torch.empty(10)})
    layout = Layout(bucket, [min(numel, 500), 4], torch.float16)
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(numel, generator=generator)[:min(numel, 500) - 1].sort().values
    index = torch.cat([places, torch.zeros(1, dtype=torch.int64), torch.tensor([numel, numel + 1, numel + 9, numel])])
    used = torch.tensor([len(places), 3])
    got, valid = Support(layout).decode(Support(layout).encode(index, used), 0)
    assert torch.equal(valid, layout.uses(used)) and torch.equal(got[valid], index[valid])


def counted(exchange, size):
    """Bytes that a rank sends in a step, counted collective by collective, without those of dense parameters."""
    config = dgc.Config(0.99, exchange=exchange)
    reports = dgc.lockstep.run(lambda: train(range(2), config, model())[1].report(), size)
    assert len({report.bytes_sent for report in reports}) == 1
    return reports[0].bytes_sent - 2 * (size - 1) / size * 4 * counted_sizes(0.99)[1]


def test_gathering_grows_with_the_ranks_and_sharing_does_not():
    sizes = [2, 4, 8, 16, 32, 64]
    gathered, shared = ({n: counted(name, n) for n in sizes} for name in ("allgather", "shared"))
    given, _ = counted_sizes(0.99)
    assert gathered[2] == given.message
    for n in sizes:
        assert gathered[n] == pytest.approx(min((n - 1) * given.message, 2 * (n - 1) / n * given.dense))
        assert shared[n] == pytest.approx((n - 1) / n * (given.support + 2 * given.values))
    assert shared[64] < 1.15 * shared[8] and gathered[32] == pytest.approx(31 * given.message)


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


def test_it_is_deprecated():
    """One warning, of rank 0, at the script's line; it names what to write instead. The others give none."""
    def worker(exchange):
        p = torch.nn.Parameter(torch.zeros(40, 40))
        dgc.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], dgc.Config(0.9, exchange=exchange))

    with pytest.warns(FutureWarning, match='give exchange="reduce"') as told:
        dgc.lockstep.run(lambda: worker("shared"), 3)
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for exchange in ("allgather", "reduce", "auto"):
            dgc.lockstep.run(lambda exchange=exchange: worker(exchange), 3)


def test_one_rank_of_many_leads_each_step():
    """Each in its turn: with gradients that only one rank has, the others' turns send nothing."""
    def worker():
        p = torch.nn.Parameter(torch.zeros(40, 40))
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)],
                                             dgc.Config(0.9, exchange="shared"))
        moved = []
        for _ in range(6):
            before = p.detach().clone()
            p.grad = torch.zeros(40, 40)
            if dgc.lockstep.current().world.rank == 2:
                p.grad[:4] = torch.arange(160.0).view(4, 40) + 1
            optimizer.step()
            moved.append(not torch.equal(before, p.detach()))
        return moved

    assert dgc.lockstep.run(worker, 3) == [[False, False, True] * 2] * 3


