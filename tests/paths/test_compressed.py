"""The path of one bucket, walked without a transport."""

import math

import pytest
import torch
from laws import bytes_of_a_row, performed, walk, worlds
from pairwise import pairwise

import dgc
from dgc.collective import AbortedError, World, sent_bytes
from dgc.compression.residual import Gradient, Residual, clip_scale
from dgc.paths.compressed import exchange_bucket, flush
from dgc.paths.dense import reduce_dense
from dgc.paths.sparse import reduce_sparse

SHAPES = {"a": (40, 50), "b": (300, 300), "c": (7, 11)}


def buckets(n, dtype=torch.float32):
    return [
        Residual("bucket 0", {k: torch.empty(s, dtype=dtype) for k, s in SHAPES.items()})
        for _ in range(n)
    ]


def gradients(rank, step, dtype=torch.float32, m=0.9, nesterov=False):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        k: Gradient(
            (torch.randn(s, generator=generator) * 10.0 ** (i * 3 - 4)).to(dtype), m, nesterov
        )
        for i, (k, s) in enumerate(SHAPES.items())
    }


@pairwise(
    bits=[1, 2, 4, 8, 16, 32],
    dtype=[torch.float16, torch.bfloat16, torch.float32, torch.float64],
    sparsity=[0.0, 0.5, 0.99],
    masking=[True, False],
)
def test_conservation(bits, dtype, sparsity, masking):
    """Law 1: what rank 0 sent and what is in v add up to what it had accumulated; with 16 and 32 bits, to the bit.

    The other rank has no gradient, so the sum is what rank 0 sent; where the sum is rounded again, what that drops is
    in the v of either. v is recomputed here from the u that was left.
    """
    config = dgc.Config(sparsity=sparsity, value_bits=bits, factor_masking=masking, min_numel=0)
    pair = buckets(2, dtype)
    for step in range(8):
        u, v = pair[0].u.clone(), (pair[0].v + pair[1].v)
        g = gradients(0, step, dtype)
        flat = torch.cat([g[name].g.flatten().to(u.dtype) for name in pair[0].names])
        accumulated = v + (u * torch.tensor(0.9, dtype=u.dtype) + flat)
        updates = walk(
            [
                exchange_bucket(pair[0], g, config, step, World(0, 2, average=False)),
                exchange_bucket(pair[1], {}, config, step, World(1, 2, average=False)),
            ]
        )
        assert torch.equal(updates[0], updates[1])
        apart = updates[0].double() + pair[0].v.double() + pair[1].v.double() - accumulated.double()
        largest = (
            torch.stack([accumulated, updates[0], pair[0].v, pair[1].v]).abs().amax(0).double()
        )
        assert (apart.abs() <= (0 if bits > 8 else 8 * torch.finfo(u.dtype).eps) * largest).all()
        assert bits <= 8 or not pair[1].v.any()
        assert (sparsity == 0 and bits > 8) or pair[0].v.any()


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_agreement_and_conservation_over_ranks(n):
    config = dgc.Config(sparsity=0.9, min_numel=0)
    mine = buckets(n, torch.float64)
    for step in range(5):
        before = torch.stack([b.v.double() for b in mine]).sum(0)
        u = [b.u.clone() for b in mine]
        updates = walk(
            [
                exchange_bucket(b, gradients(r, step, torch.float64), config, step, w)
                for r, (b, w) in enumerate(zip(mine, worlds(n, average=False), strict=True))
            ]
        )
        assert all(torch.equal(update, updates[0]) for update in updates)
        added = torch.stack(
            [
                u[r].double() * 0.9
                + torch.cat(
                    [gradients(r, step, torch.float64)[k].g.flatten() for k in mine[0].names]
                )
                for r in range(n)
            ]
        ).sum(0)
        after = torch.stack([b.v.double() for b in mine]).sum(0)
        assert torch.allclose(before + added, after + updates[0].double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("average", [True, False])
def test_orthogonal_clipped_gradients_combine_to_exactly_clip_norm(n, average):
    """The law of local gradient clipping (DGC, section 3.2), for the global norm and for one tensor."""
    clip_norm, length = 0.3, 1024
    rows = (
        torch.linalg.qr(
            torch.randn(length, n, generator=torch.Generator().manual_seed(0)).double()
        ).Q.T
        * 17
    )
    for per_tensor in (False, True):
        config = dgc.Config(
            sparsity=0.0, clip_norm=clip_norm, clip_per_tensor=per_tensor, min_numel=0
        )
        paths = []
        for g, world in zip(rows, worlds(n, average), strict=True):
            b = Residual("bucket 0", {"a": torch.empty(32, 32, dtype=torch.float64)})
            scale = None if per_tensor else clip_scale(g.norm(), clip_norm, n, average)
            paths.append(
                exchange_bucket(
                    b,
                    {"a": Gradient(g.view(32, 32))},
                    config,
                    0,
                    world,
                    scale=scale,
                )
            )
        assert walk(paths)[0].norm().item() == pytest.approx(clip_norm, rel=1e-12)


def test_what_is_within_the_bound_is_not_clipped():
    assert clip_scale(torch.tensor(0.5), 0.3, 4, True) == 1  # 0.3 * 2
    assert clip_scale(torch.tensor(0.0), 0.3, 4, True) == 1
    assert clip_scale(torch.tensor(1.2), 0.3, 4, True) == 0.5
    assert (
        clip_scale(torch.tensor(torch.inf), 0.3, 4, True)
        == clip_scale(torch.tensor(torch.nan), 0.3, 4, True)
        == 0
    )


def test_entries_that_round_to_nothing_are_neither_sent_nor_masked():
    b = Residual("bucket 0", {"a": torch.empty(2, 2)})
    g = torch.tensor([[1.0, 2.0**-60], [0.0, 0.0]])  # 60 binary orders apart: float16 has 40
    update = walk(
        [
            exchange_bucket(
                b, {"a": Gradient(g, 0.9)}, dgc.Config(sparsity=0.5, min_numel=0), 0, World(0, 1)
            )
        ]
    )[0]
    assert update.tolist() == [1, 0, 0, 0]
    assert b.v.tolist() == [0, 2.0**-60, 0, 0] and b.u.tolist() == [0, 2.0**-60, 0, 0]


def test_empty_slots_touch_nothing():
    """Fewer entries than slots: entry 0, at which empty slots point, keeps its momentum."""
    b = Residual("bucket 0", {"a": torch.empty(2, 2)})
    b.u[0] = 5.0
    g = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    walk(
        [
            exchange_bucket(
                b, {"a": Gradient(g, 0.0)}, dgc.Config(sparsity=0.5, min_numel=0), 0, World(0, 1)
            )
        ]
    )
    assert b.u.tolist() == [5, 0, 0, 0]
    b.u[0], b.v[0] = 4.0, -2.0  # 0.5 * 4 - 2 = 0: nothing to send at entry 0
    walk(
        [
            exchange_bucket(
                b, {"a": Gradient(g, 0.5)}, dgc.Config(sparsity=0.5, min_numel=0), 0, World(0, 1)
            )
        ]
    )
    assert b.u.tolist() == [2, 0, 0, 0] and b.v.tolist() == [0, 0, 0, 0]


def test_a_parameter_without_gradient_sits_out():
    config = dgc.Config(sparsity=0.9, min_numel=0)
    b = buckets(1)[0]
    walk([exchange_bucket(b, gradients(0, 0), config, 0, World(0, 1))])
    u, v = (b.views(x)["b"].clone() for x in (b.u, b.v))
    some = {k: g for k, g in gradients(0, 1).items() if k != "b"}
    update = walk([exchange_bucket(b, some, config, 1, World(0, 1))])[0]
    assert torch.equal(b.views(b.u)["b"], u) and torch.equal(b.views(b.v)["b"], v)
    assert not b.views(update)["b"].any() and b.views(update)["a"].any()


@pairwise(
    exchange=["allgather", "reduce"], n=[2, 4, 8, 16], sparsity=[0.0, 0.1, 0.3, 0.75, 0.9375, 0.999]
)
def test_never_more_bytes_than_dense(exchange, n, sparsity):
    mine, asked, sent = buckets(n), [], 0.0
    paths = [
        exchange_bucket(
            b, gradients(r, 0), dgc.Config(sparsity, exchange=exchange, min_numel=0), 0, w
        )
        for r, (b, w) in enumerate(zip(mine, worlds(n), strict=True))
    ]

    def counting(path):
        nonlocal sent
        request = next(path)
        while True:
            sent += sent_bytes(request, World(0, n))
            asked.append(request.op)
            try:
                request = path.send((yield request))
            except StopIteration as end:
                return end.value

    walk([counting(paths[0]), *paths[1:]])
    b = mine[0]
    assert sent <= 2 * (n - 1) / n * 4 * b.numel
    if exchange == "allgather":
        k = sum(math.ceil(round((1 - sparsity) * math.prod(shape), 6)) for shape in SHAPES.values())
        dense = sparsity == 0 or 2 * 4 * b.numel < n * bytes_of_a_row(k, b.numel, 16)
        assert asked == ["all_reduce" if dense else "all_gather"]
    assert asked in (["all_reduce"], ["all_gather"], ["all_to_all", "all_gather"])


def test_the_dense_fallback_sends_the_same_entries():
    """16 ranks at 75 %: by allreduce, in float32, what all-gather would have sent in float32."""
    n, seen = 16, {}
    for bits in (16, 32):  # on the dense road this plays no part
        mine = buckets(n)
        config = dgc.Config(sparsity=0.75, value_bits=bits, min_numel=0)
        updates = walk(
            [
                exchange_bucket(b, gradients(r, 0), config, 0, w)
                for r, (b, w) in enumerate(zip(mine, worlds(n), strict=True))
            ]
        )
        seen[bits] = updates[0], mine[0].v.clone()
    assert all(torch.equal(a, b) for a, b in zip(*seen.values(), strict=True))
    given = [torch.cat([gradients(r, 0)[k].g.flatten() for k in mine[0].names]) for r in range(n)]
    sent = sum((g - b.v).double() for g, b in zip(given, mine, strict=True)) / n
    assert torch.allclose(updates[0].double(), sent, rtol=1e-5, atol=1e-6) and sent.any()
    v = torch.cat([gradients(0, 0)[k].g.flatten() for k in mine[0].names])
    kept = mine[0].v != 0
    assert torch.equal(mine[0].v[kept], v[kept]) and math.isclose(
        kept.float().mean().item(), 0.75, abs_tol=1e-3
    )


@pytest.mark.parametrize("sparsity", [0.75, 0.99])
def test_slots_that_are_not_used_may_hold_anything(sparsity):
    """As memory does that nothing was written to; here the largest numbers, as torch fills it with where it is to be
    deterministic. Where all parameters have a gradient, or one has none.
    """
    n, some = 16, gradients(0, 0)
    del some["b"]
    torch.use_deterministic_algorithms(True)
    try:
        for given in (some, gradients(0, 0)):
            mine = buckets(n)
            mine[0].v.view(-1)[2000] = 7.0  # of b, which waits
            config = dgc.Config(sparsity=sparsity, min_numel=0)
            update, *_ = walk(
                [
                    exchange_bucket(b, given, config, 0, w)
                    for b, w in zip(mine, worlds(n), strict=True)
                ]
            )
            waits = mine[0].views(mine[0].v)["b"].flatten()[0]
            assert (
                (update[2000] != 0) != (waits == 7.0) and update.isfinite().all() and update.any()
            )
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("sparsity", [0.0, 0.75, 0.99])
@pytest.mark.parametrize("n", [2, 16])
def test_an_abandoned_exchange_loses_nothing(sparsity, n):
    b = buckets(1)[0]
    g = gradients(0, 0)
    path = exchange_bucket(b, g, dgc.Config(sparsity=sparsity, min_numel=0), 0, World(0, n))
    next(path)
    with pytest.raises(AbortedError):
        path.throw(AbortedError())
    assert torch.equal(b.v, torch.cat([g[k].g.flatten() for k in b.names]))


def test_flush_sends_v_alone():
    mine = buckets(2)
    config = dgc.Config(sparsity=0.99, min_numel=0)
    walk([exchange_bucket(b, gradients(r, 0), config, 0, World(r, 2)) for r, b in enumerate(mine)])
    u, v = [b.u.clone() for b in mine], [b.v.clone() for b in mine]
    updates = walk([flush(b, b.names, World(r, 2)) for r, b in enumerate(mine)])
    assert torch.equal(updates[0], (v[0] + v[1]) / 2) and torch.equal(updates[0], updates[1])
    assert all(
        not b.v.any() and torch.equal(b.u, before) for b, before in zip(mine, u, strict=True)
    )
    assert not walk([flush(b, b.names, World(r, 2)) for r, b in enumerate(mine)])[0].any()


def test_always_dense_parameters():
    g = [{"a": torch.full((3,), 1.0 + r), "b": torch.full((2, 2), 10.0 * r)} for r in range(2)]
    for predivide in (1.0, 2.0):
        updates = walk([reduce_dense(g[r], World(r, 2), predivide=predivide) for r in range(2)])
        assert updates[0].tolist() == [1.5] * 3 + [5.0] * 4
    halved = walk(
        [reduce_dense(g[r], World(r, 2, average=False), scale=torch.tensor(0.5)) for r in range(2)]
    )
    assert halved[1].tolist() == [1.5] * 3 + [5.0] * 4


def test_sparse_gradients_of_different_lengths():
    a = torch.sparse_coo_tensor([[0, 2, 2]], torch.tensor([[1.0, 1], [2, 2], [3, 3]]), (4, 2))
    b = torch.sparse_coo_tensor([[3]], torch.tensor([[4.0, 4]]), (4, 2))
    for average in (True, False):
        none = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 2), (4, 2))
        updates = walk(
            [
                reduce_sparse("a", g, World(r, 3, average=average))
                for r, g in enumerate([a, b, none])
            ]
        )
        expected = (a.to_dense() + b.to_dense()) / (3 if average else 1)
        assert all(torch.equal(update.to_dense(), expected) for update in updates)


def refusals(paths):
    """What each rank raises, when all of them raise after the same collective."""
    requests, errors = [next(path) for path in paths], []
    while not errors:
        results = performed(requests)
        requests = []
        for path, result in zip(paths, results, strict=True):
            try:
                requests.append(path.send(result))
            except (FloatingPointError, ValueError) as error:
                errors.append(str(error))
    assert not requests
    return errors


def test_a_sum_that_overflows_blames_no_rank():
    """Each rank's gradient is finite, their sum is not; what was taken is back in v."""
    mine = buckets(2)
    g = [
        {k: Gradient(torch.full_like(x.g, 3e38)) for k, x in gradients(0, 0).items()} for _ in mine
    ]
    paths = [
        exchange_bucket(b, g[r], dgc.Config(0.0, momentum_correction=False, min_numel=0), 0, w)
        for r, (b, w) in enumerate(zip(mine, worlds(2), strict=True))
    ]
    assert all(
        error.startswith("the sum over ranks of their gradients is not finite, in: a")
        for error in refusals(paths)
    )
    assert all(bool((bucket.v == 3e38).all()) for bucket in mine)


@pytest.mark.parametrize("sparsity", [0.0, 0.9])
@pytest.mark.parametrize("n", [2, 16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_enters_no_residual_and_costs_no_other_rank(sparsity, n, bad):
    """Rank 1's gradient of b has one bad entry: all ranks are told, on each road, and v has all the rest."""
    mine, paths = buckets(n), []
    for r, (bucket, world) in enumerate(zip(mine, worlds(n), strict=True)):
        g = gradients(r, 0)
        if r == 1:
            g["b"].g[5, 5] = bad
        paths.append(
            exchange_bucket(bucket, g, dgc.Config(sparsity=sparsity, min_numel=0), 0, world)
        )
    assert set(refusals(paths)) == {"rank 1 has a gradient that is not finite, in: b"}
    for r, bucket in enumerate(mine):
        rest = {k: g.g for k, g in gradients(r, 0).items()}
        if r == 1:
            rest["b"][5, 5] = 0
        assert torch.equal(bucket.v, torch.cat([rest[k].flatten() for k in bucket.names]))


def test_large_gradients_are_finite_though_their_squares_are_not():
    b = Residual("bucket 0", {"a": torch.empty(4, 4)})
    g = torch.full((4, 4), 3e38)
    update = walk(
        [
            exchange_bucket(
                b, {"a": Gradient(g)}, dgc.Config(sparsity=0.5, min_numel=0), 0, World(0, 1)
            )
        ]
    )[0]
    assert torch.count_nonzero(update) == 8 and torch.isfinite(update).all()


def test_a_dense_step_leaves_the_pending_entries_of_one_that_sits_out():
    b = buckets(1)[0]
    walk(
        [exchange_bucket(b, gradients(0, 0), dgc.Config(sparsity=0.9, min_numel=0), 0, World(0, 1))]
    )
    pending = b.views(b.v)["b"].clone()
    some = {k: g for k, g in gradients(0, 1).items() if k != "b"}
    update = walk(
        [exchange_bucket(b, some, dgc.Config(sparsity=0.0, min_numel=0), 1, World(0, 1))]
    )[0]
    assert torch.equal(b.views(b.v)["b"], pending) and not b.views(update)["b"].any()
    assert not b.views(b.v)["a"].any()
