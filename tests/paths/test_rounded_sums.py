"""Dense sums in two rounds, rounded in each: nothing is lost, and all ranks agree."""

import math

import numpy as np
import pytest
import torch
from laws import bytes_of_a_row, walk
from pairwise import pairwise

import dgc
from dgc.collective import World
from dgc.compression.residual import Gradient, Residual
from dgc.paths.compressed import exchange_bucket, flush
from dgc.paths.dense import reduce_rounded

SHAPES = {"a": (40, 50), "b": (300, 300), "c": (7, 11)}


def bucket(residual=torch.float32, velocity=False):
    return Residual(
        "bucket 0", {k: torch.empty(s, dtype=residual) for k, s in SHAPES.items()}, velocity
    )


def gradients(rank, step, dtype=torch.float32):
    """Of other sizes by parameter, and with large and small entries."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64).pow(3).mul(10.0**i).to(dtype)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def rounded_to_8_bits(x):
    """As wire.py has it: 512 neighbours share the smallest and the largest of 128 levels, whose roots
    are equidistant.
    """
    parts = [rounded_together(x[first : first + 512]) for first in range(0, len(x), 512)]
    return np.concatenate(parts)


def rounded_together(x):
    size = np.abs(x).astype(np.float32)
    a = cut(np.sqrt(size.min()))
    d = cut((np.sqrt(size.max()) - a) / np.float32(127))
    level = (
        np.clip(np.floor((np.sqrt(size) - a) / d + np.float32(0.5)), 1 if a == 0 else 0, 127)
        if d
        else 0 * size
    )
    level = np.where(size == 0, 0, level)
    return np.where(x < 0, -1, 1) * np.square(a + level.astype(np.float32) * d).astype(np.float64)


def cut(x):
    """Without the bits of a float32 that a bfloat16 does not have."""
    return (np.array([x], np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)[0]


def transcription(n, steps):
    """Both rounds in float64. Returns the updates by step, and v of each rank at the end."""
    total = sum(math.prod(shape) for shape in SHAPES.values())
    size = math.ceil(total / n)
    v, updates = np.zeros((n, n * size)), []
    for step in range(steps):
        for r in range(n):
            v[r, :total] += np.concatenate(
                [g.numpy().ravel() for g in gradients(r, step, torch.float64).values()]
            )
        update = np.zeros(n * size)
        sent = v.copy()
        for owner in range(n):
            own = slice(owner * size, (owner + 1) * size)
            for r in set(range(n)) - {owner}:
                sent[r, own] = rounded_to_8_bits(v[r, own])
            update[own] = rounded_to_8_bits(sent[:, own].sum(0))
            left = sent[:, own].sum(0) - update[own]
            v[:, own] -= sent[:, own]
            v[owner, own] += left
        updates.append(update[:total] / n)
    return updates, v[:, :total]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_it_is_the_transcription(n):
    mine, (updates, left) = [bucket(torch.float64) for _ in range(n)], transcription(n, 3)
    for step, expected in enumerate(updates):
        got = walk(
            [
                reduce_rounded(b, gradients(r, step, torch.float64), 8, World(r, n))
                for r, b in enumerate(mine)
            ]
        )
        assert all(np.allclose(one, expected, rtol=1e-12, atol=0) for one in got)
    for b, v in zip(mine, left, strict=True):
        assert np.allclose(b.v, v, rtol=0, atol=1e-12) and b.v.any()


@pairwise(bits=[1, 2, 4, 8], residual=[torch.float32, torch.float64], n=[1, 2, 4, 5, 16])
def test_nothing_is_lost(bits, residual, n):
    """What has left the v of all ranks together is the update."""
    mine = [bucket(residual) for _ in range(n)]
    for step in range(4):
        g = [gradients(r, step, residual) for r in range(n)]
        before = torch.stack(
            [b.v + torch.cat([g[r][k].flatten() for k in b.names]) for r, b in enumerate(mine)]
        )
        updates = walk(
            [reduce_rounded(b, g[r], bits, World(r, n, average=False)) for r, b in enumerate(mine)]
        )
        assert all(torch.equal(update, updates[0]) for update in updates)
        left = before.double().sum(0) - torch.stack([b.v for b in mine]).double().sum(0)
        size = before.double().abs().sum(0).max()  # small entries are rounded to what is larger
        assert ((left - updates[0].double()).abs() <= 1e-6 * size).all()
        assert all(b.v.any() for b in mine) == (n > 1)


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
@pytest.mark.parametrize("node_size", [1, 2])
def test_dense_sums_of_what_is_compressed(sparsity, node_size):
    """As they are without rounding, to what it drops: that is kept, and flush() brings it."""
    nodes, n, ends = 4, 4 * node_size, []
    for bits in (32, 8):
        config = dgc.Config(sparsity, value_bits=bits, factor_masking=False, min_numel=0)
        mine = [bucket(velocity=True) for _ in range(n)]
        worlds = [World(r, n, node_size) for r in range(n)]
        total, nbytes = 0.0, []
        for step in range(3):
            paths = [
                exchange_bucket(
                    b,
                    {k: Gradient(g, 0.9) for k, g in gradients(r // node_size, step).items()},
                    config,
                    step,
                    w,
                )
                for r, (b, w) in enumerate(zip(mine, worlds, strict=True))
            ]
            got = in_nodes(paths, worlds, nbytes)
            assert all(torch.equal(one, got[0]) for one in got)
            total = total + got[0]
        kept = any(b.v.any() for b in mine)
        got = in_nodes(
            [flush(b, b.names, w) for b, w in zip(mine, worlds, strict=True)], worlds, []
        )
        assert not any(b.v.any() for b in mine)
        ends.append((kept, total + got[0], sum(nbytes)))
    (plain, expected, whole), (rounded, got, quarter) = ends
    assert (plain, rounded) == (sparsity > 0, True)
    assert (got - expected).norm() < 1e-6 * expected.norm()
    assert quarter < 0.26 * whole * (1 + 1 / nodes)  # rows for all, and its own part for all


def in_nodes(paths, worlds, nbytes):
    """As ``walk``, with groups; notes the bytes that each contributes to collectives with other nodes."""
    requests, updates = [next(path) for path in paths], []
    while not updates:
        nbytes += [requests[0].tensor.nbytes] if requests[0].group != "intra_node" else []
        results = []
        for request, world in zip(requests, worlds, strict=True):
            members = world.members(request.group)
            tensors = [requests[r].tensor for r in members]
            results.append(
                {
                    "all_gather": lambda t, _: torch.stack(t),
                    "all_reduce": lambda t, _: torch.stack(t).sum(0),
                    "all_to_all": lambda t, own: torch.stack([each[own] for each in t]),
                }[request.op](tensors, members.index(world.rank))
            )
        requests = []
        for path, result in zip(paths, results, strict=True):
            try:
                requests.append(path.send(result))
            except StopIteration as end:
                updates.append(torch.cat([part.reshape(-1) for part in end.value.parts]))
    return updates


def test_so_short_a_sum_is_not_rounded():
    """Where its rows are more bytes than the entries as they are."""

    def op(numel, n):
        b = Residual("bucket 0", {"a": torch.empty(numel)}, False)
        return next(reduce_rounded(b, {"a": torch.ones(numel)}, 8, World(0, n))).op

    for numel in (50, 90, 100, 200, 10_000):
        part = math.ceil(numel / 16)
        fewer = 16 * bytes_of_a_row(part, part, 8, all_entries=True) < 4 * numel
        assert op(numel, 16) == ("all_to_all" if fewer else "all_reduce") and fewer == (
            numel >= 100
        )


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("nan", "rank 1 has a gradient that is not finite, in: c"),
        ("corrupt", "message of rank 1 for bucket 0 is corrupt"),
        ("corrupt later", "message of rank 2 for bucket 0 is corrupt"),
    ],
)
def test_what_is_bad(what, error):
    """Not finite: all ranks are told which; corrupt, in either round: whose. What was not sent is kept."""
    n, mine, g = 3, [bucket() for _ in range(3)], [gradients(r, 0) for r in range(3)]
    if what == "nan":
        g[1]["c"][6, 10] = math.nan
    paths = [reduce_rounded(b, g[r], 8, World(r, n)) for r, b in enumerate(mine)]
    rows = torch.stack([next(path).tensor for path in paths]).transpose(0, 1).contiguous()
    if what == "corrupt":
        rows[0, 1, 5] += 1  # what rank 1 sends to rank 0, who tells all
    messages = torch.stack([path.send(row).tensor for path, row in zip(paths, rows, strict=True)])
    if what == "corrupt later":
        messages[2, 5] += 1
    for path in paths:
        if what == "nan":
            assert path.send(messages).op == "all_gather"  # whose it is
            marks = torch.tensor([[False] * 3, [False, False, True], [False] * 3])
        with pytest.raises((FloatingPointError, ValueError), match=error):
            path.send(marks if what == "nan" else messages)
    for b, own in zip(mine, g, strict=True):
        assert torch.equal(b.v, torch.cat([x.flatten() for x in own.values()]).nan_to_num(0))
