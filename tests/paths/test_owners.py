"""The exchange that adds up at owners. Agreement, DDP, loss scales, checkpoints, transports and nodes are tested with
the other configurations, among which it is.
"""

import math
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import bytes_of_a_row, performed, walk, worlds
from pairwise import pairwise
from test_compressed import buckets, gradients, refusals

import dgc
from dgc.collective import AbortedError, World, sent_bytes
from dgc.compression import sizes as messages
from dgc.compression.regions import Regions
from dgc.compression.residual import Gradient, Residual
from dgc.paths.compressed import exchange_bucket

CPU = torch.device("cpu")
REDUCE = dgc.Config(0.9, exchange="reduce", min_numel=0)


def owners(numel, n):
    """Whose each entry is, as regions.py says it: blocks of 16, each round of N beginning with another owner."""
    block = np.arange(numel) // 16
    turn = ((block // n * 0x61C88647) % 2**32 // 2**12) % n
    return (block + turn) % n


@given(st.integers(1, 3000), st.integers(1, 70))
@settings(max_examples=60, deadline=None)
def test_each_entry_has_one_owner_and_one_place(numel, n):
    regions, every = Regions(numel, n, CPU), torch.arange(numel)
    owner, local = regions.owner_of(every), regions.index_in_region(every)
    assert owner.tolist() == owners(numel, n).tolist() and torch.equal(
        regions.index(owner, local), every
    )
    assert regions.sizes.tolist() == torch.bincount(owner, minlength=n).tolist()
    assert max(regions.sizes) <= regions.size and max(regions.sizes) - min(regions.sizes) <= 16
    flat = torch.randn(numel)
    for one in range(n):
        assert torch.equal(regions.indices(one), every[owner == one])
        expected = torch.where(owner == one, flat + 1, flat)
        with regions.zeroed_region(flat, one):
            assert not flat[owner == one].any() and torch.equal(
                flat[owner != one], expected[owner != one]
            )
            flat[owner == one] = 1
        assert torch.equal(flat, expected)


def transcription(shapes, gradient, size, steps, lr, m, k, masking, nesterov):
    """Both phases in float64: what is chosen, where it is added up, and what is passed on."""
    numels = [int(np.prod(shape)) for shape in shapes]
    ends, total = np.cumsum(numels), sum(numels)
    parts = [slice(end - n, end) for end, n in zip(ends, numels, strict=True)]
    owner, parameter = owners(total, size), np.repeat(np.arange(len(numels)), numels)
    p, u, v = np.zeros(total), np.zeros((size, total)), np.zeros((size, total))
    kept = int(np.ceil(sum(k) / size))
    for step in range(steps):
        arrived = np.zeros(total)
        for r in range(size):
            g = np.concatenate([x.numpy().ravel() for x in gradient(r, step)])
            u[r] = m * u[r] + g
            new = g + m * u[r] if nesterov else u[r]
            # Others' entries, in the own region, are not chosen again.
            seen = np.where(owner == r, 0, v[r]) + new
            v[r] += new
            for part, count in zip(parts, k, strict=True):
                for i in part.start + np.argsort(-np.abs(seen[part]))[:count]:
                    if owner[i] != r:
                        arrived[i] += v[r, i]
                        v[r, i] = 0
                        u[r, i] = 0 if masking else u[r, i]
        for r in range(size):
            here = np.flatnonzero(owner == r)
            v[r, here] += arrived[here]
            means = np.array(
                [
                    np.abs(v[r, here[parameter[here] == i]]).mean()
                    if (parameter[here] == i).any()
                    else 1
                    for i in range(len(numels))
                ]
            )
            for i in here[np.argsort(-np.abs(v[r, here]) / means[parameter[here]])[:kept]]:
                p[i] -= lr * v[r, i] / size
                v[r, i] = 0
                u[r, i] = 0 if masking else u[r, i]
    return p


@pytest.mark.parametrize(
    ("size", "masking", "nesterov"), [(2, True, False), (3, False, True), (8, True, True)]
)
def test_it_is_the_transcription(size, masking, nesterov):
    shapes, k = [(30, 40), (7, 11), (200, 3)], [36, 3, 18]  # three times a hundredth

    def gradient(rank, step):
        draw = torch.Generator().manual_seed(100 * step + rank)
        return [
            10.0**i * torch.randn(shape, generator=draw, dtype=torch.float64)
            for i, shape in enumerate(shapes)
        ]

    def worker():
        parameters = [
            torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes
        ]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=nesterov)
        optimizer = dgc.DistributedOptimizer(
            optimizer,
            [(str(i), p) for i, p in enumerate(parameters)],
            dgc.Config(0.99, exchange="reduce", factor_masking=masking, value_bits=32, min_numel=0),
        )
        for step in range(30):
            for p, g in zip(
                parameters, gradient(dgc.lockstep.current().world.rank, step), strict=True
            ):
                p.grad = g
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in parameters])

    def backwards(
        rank, step
    ):  # a bucket has its parameters in the order in which a backward pass completes them
        return gradient(rank, step)[::-1]

    expected = transcription(
        shapes[::-1], backwards, size, 30, 0.1, 0.9, k[::-1], masking, nesterov
    )
    expected = np.concatenate([expected[677:], expected[600:677], expected[:600]])
    for result in dgc.lockstep.run(worker, size):
        assert np.allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pairwise(n=[2, 3, 8], masking=[True, False], slack=[messages.SLACK, -20])
def test_nothing_is_lost(n, masking, slack, monkeypatch):
    """What ranks have accumulated is what was applied and what they have pending, in sum; also where rows have no slots
    for most entries.
    """
    monkeypatch.setattr(messages, "row_slots", lambda slots, n: max(1, int(slots / n + slack)))
    mine, total = buckets(n, torch.float64), torch.zeros(buckets(1)[0].numel, dtype=torch.float64)
    config = dgc.Config(0.9, exchange="reduce", factor_masking=masking, min_numel=0)
    for step in range(8):
        # Without momentum nothing is masked.
        plain = [gradients(r, step, torch.float64, 0.0) for r in range(n)]
        total += sum(torch.cat([g[name].g.flatten() for name in mine[0].names]) for g in plain)
        updates = walk(
            [
                exchange_bucket(b, g, config, step, w)
                for b, g, w in zip(mine, plain, worlds(n, average=False), strict=True)
            ]
        )
        assert all(torch.equal(update, updates[0]) for update in updates)
        total -= updates[0]
        assert torch.allclose(total, sum(b.v for b in mine), rtol=0, atol=1e-11)


def test_what_is_masked_was_taken_and_nothing_else():
    mine = buckets(4)
    before = buckets(4)
    for r, b in enumerate(before):
        b.accumulate(gradients(r, 0))
    update = walk(
        [
            exchange_bucket(b, gradients(r, 0), REDUCE, 0, w)
            for r, (b, w) in enumerate(zip(mine, worlds(4), strict=True))
        ]
    )[0]
    whose = torch.from_numpy(owners(mine[0].numel, 4))
    for r, (b, c) in enumerate(zip(mine, before, strict=True)):
        masked, own = (b.u == 0) & (c.u != 0), whose == r
        assert torch.equal(b.u[~masked], c.u[~masked])
        assert not masked[own & (update == 0)].any() and masked[own & (update != 0)].all()
        assert (
            b.v[masked & ~own].abs() <= 1e-3 * c.v[masked & ~own].abs()
        ).all()  # but for rounding
        assert torch.equal(b.v[~masked & ~own], c.v[~masked & ~own])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_told_to_all(bad):
    mine, paths = buckets(3, torch.float64), []
    for r, (bucket, world) in enumerate(zip(mine, worlds(3), strict=True)):
        g = gradients(r, 0, torch.float64)
        if r == 1:
            g["b"].g[5, 5] = bad
        paths.append(exchange_bucket(bucket, g, REDUCE, 0, world))
    assert set(refusals(paths)) == {"rank 1 has a gradient that is not finite, in: b"}
    for r, bucket in enumerate(mine):
        rest = {k: g.g for k, g in gradients(r, 0, torch.float64).items()}
        if r == 1:
            rest["b"][5, 5] = 0
        assert torch.allclose(
            bucket.v, torch.cat([rest[k].flatten() for k in bucket.names]), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("at", [0, 1])
def test_a_damaged_message_is_refused_by_all(at):
    """Also where one worker alone has received it: it tells the others."""
    mine = buckets(4, torch.float64)
    paths = [
        exchange_bucket(bucket, gradients(r, 0, torch.float64), REDUCE, 0, w)
        for r, (bucket, w) in enumerate(zip(mine, worlds(4), strict=True))
    ]

    def damaged(rank, path):
        request = next(path)
        for turn in range(9):
            result = yield request
            if turn == at and (at == 1 or rank == 2):
                result = result.clone()
                result[1, 5] ^= 64
            try:
                request = path.send(result)
            except StopIteration as end:
                return end.value

    assert set(refusals([damaged(r, path) for r, path in enumerate(paths)])) == {
        "the message of rank 1 for bucket 0 is corrupt: it is not what a rank with the same model, Config and "
        "schedule has written"
    }
    for r, bucket in enumerate(mine):
        expected = torch.cat([gradients(r, 0, torch.float64)[k].g.flatten() for k in bucket.names])
        assert torch.allclose(bucket.v, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("n", [3, 6])
def test_a_sum_that_is_too_large_is_refused_and_leaves_what_it_was_added_to(masking, n):
    """Gradients of 1.5e38, three or more, each of which is finite. The v in which they met is as it was, and not
    infinite for good.
    """
    config = dgc.Config(0.9, exchange="reduce", min_numel=0, value_bits=32, factor_masking=masking)
    mine, pending = buckets(n), []
    for step in range(4):
        given = [gradients(r, step) for r in range(n)]
        for g in given if step == 3 else ():
            g["b"].g[0, 7] = 1.5e38
        for bucket, g in zip(mine, given, strict=True):
            u = 0.9 * bucket.u.double() + torch.cat(
                [g[name].g.double().flatten() for name in bucket.names]
            )
            pending.append(bucket.v + u)
        paths = [
            exchange_bucket(*each, config, step, w)
            for *each, w in zip(mine, given, worlds(n), strict=True)
        ]
        if step < 3:
            walk(paths)
    assert set(refusals(paths)) == {
        "the sum over ranks of their gradients is not finite, in bucket 0"
    }
    for bucket, expected in zip(mine, pending[-n:], strict=True):
        # Sums of up to 1,000, in float32.
        assert torch.allclose(bucket.v.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rounds", [1, 2])
def test_an_exchange_that_is_given_up_puts_back(rounds):
    n = 3
    mine = buckets(n, torch.float64)
    paths = [
        exchange_bucket(bucket, gradients(r, 0, torch.float64), REDUCE, 0, w)
        for r, (bucket, w) in enumerate(zip(mine, worlds(n), strict=True))
    ]
    requests = [next(path) for path in paths]
    for _ in range(rounds - 1):
        requests = [
            path.send(result) for path, result in zip(paths, performed(requests), strict=True)
        ]
    for r, path in enumerate(paths):
        with suppress(AbortedError):
            path.throw(AbortedError())
        expected = torch.cat([gradients(r, 0, torch.float64)[k].g.flatten() for k in mine[r].names])
        assert torch.allclose(mine[r].v, expected, rtol=1e-12, atol=1e-12)


def test_what_is_not_sent_is_counted(monkeypatch):
    """Against a count in NumPy of what has no slot in a row: all but the largest. A dense step has none."""
    n, k, slots = 4, 100, 3
    monkeypatch.setattr(messages, "row_slots", lambda *_: slots)
    monkeypatch.setattr(messages, "WIDE", 1)
    every = torch.randn(n, 40, 50, generator=torch.Generator().manual_seed(0))
    g, whose = every.view(n, -1).double().numpy(), owners(2000, n)
    left = []  # of each rank
    for r in range(n):
        chosen = np.argsort(-np.abs(g[r]))[:k]
        rows = [chosen[whose[chosen] == o] for o in range(n) if o != r]
        left.append(np.sort(np.concatenate([row[slots:] for row in rows])))

    def worker():
        p = torch.nn.Parameter(torch.zeros(40, 50))
        config = dgc.Config(lambda step: 0.0 if step else 0.95, exchange="reduce")
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], config)
        told, kept = [], []
        for _ in range(2):
            p.grad = every[dgc.lockstep.current().world.rank].clone()
            optimizer.step()
            told.append(optimizer.report().overflow_entries)
            kept.append(optimizer.residual_state_dict()["v"]["p"].flatten().clone())
        return told, kept[0]

    for r, (told, v) in enumerate(dgc.lockstep.run(worker, n)):
        assert told == [len(left[r]), 0] and len(left[r]) > 0
        assert torch.equal(v[left[r]], every[r].flatten()[left[r]])


def test_what_is_too_small_for_a_row_is_counted_and_waits():
    """Entries at 2^-42 of the row's largest, of float16: in the regions of others, and in the own one, whose sums are
    for all.
    """
    whose = owners(4000, 4)

    def worker():
        rank = dgc.lockstep.current().world.rank
        p, g = torch.nn.Parameter(torch.zeros(80, 50)), torch.zeros(4000)
        for o in range(4):
            g[np.flatnonzero(whose == o)[:6]] = 2.0**-42
            g[np.flatnonzero(whose == o)[0]] = 1.0
        p.grad = g.view(80, 50)
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], REDUCE)
        optimizer.step()
        waits, own = (
            optimizer.residual_state_dict()["v"]["p"].flatten() == 2.0**-42,
            torch.from_numpy(whose) == rank,
        )
        return (
            optimizer.report().overflow_entries,
            int((waits & ~own).sum()),
            int((waits & own).sum()),
        )

    assert dgc.lockstep.run(worker, 4) == [(15, 15, 5)] * 4


def test_what_cancels_is_gone_and_what_all_want_is_learned():
    """Half of the ranks have +3 at 40 entries, half -3, and all have 1 at 20 others; there are 21 slots a step."""
    n, steps = 8, 300
    g = torch.zeros(n, 4, 500)
    g[:, 0, :40] = torch.where(torch.arange(n) % 2 == 0, 3.0, -3.0)[:, None]
    g[:, 2, 100:120] = 1.0

    def worker():
        p = torch.nn.Parameter(torch.zeros(4, 500))
        # 7 of 2,000, three times.
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), [("p", p)], dgc.Config(0.9965, exchange="reduce")
        )
        for _ in range(steps):
            p.grad = g[dgc.lockstep.current().world.rank].clone()
            optimizer.step()
        return p.detach(), optimizer.residual_state_dict()["v"]["p"]

    results = dgc.lockstep.run(worker, n)
    p, pending = results[0][0], torch.stack([v for _, v in results])
    assert (p[2, 100:120] < -0.9 * steps).all() and p[0, :40].abs().max() < 12
    assert pending.abs().max() < 40  # what nobody frees would be at 3 x 300


@pytest.mark.parametrize("numel", [2_000_000])
def test_bytes_do_not_grow_with_the_workers(numel):
    """While a row holds some tens of entries; and never are they more than a dense sum's."""

    def nbytes(n):
        bucket = Residual("b", {"a": torch.empty(numel // 1000, 1000)})
        g = {
            "a": Gradient(
                torch.randn(numel // 1000, 1000, generator=torch.Generator().manual_seed(0))
            )
        }
        path, total = (
            exchange_bucket(bucket, g, dgc.Config(0.999, exchange="reduce"), 0, World(0, n)),
            0.0,
        )
        request = next(path)
        total += sent_bytes(request, World(0, n))
        # Its own, empty, from everybody.
        request = path.send(request.tensor[:1].expand(n, -1).contiguous())
        total += sent_bytes(request, World(0, n))
        path.close()
        return total

    message = 4 * numel // 1000
    by_workers = {n: nbytes(n) / message for n in (8, 64, 256)}
    assert by_workers[64] < 1.3 * by_workers[8] and max(by_workers.values()) < 10
    for n, ratio in by_workers.items():
        mean, size = 3 * numel / 1000 / (n - 1), 16 * math.ceil(numel / 16 / n)
        # Four standard deviations of what is dealt out at random.
        row = math.ceil(mean + 4 * math.sqrt(mean)) + 1
        kept = math.ceil(3 * numel / 1000 / n)
        assert ratio * message == (n - 1) * sum(
            bytes_of_a_row(count, size, 16) for count in (row, kept)
        )
