"""That the benchmarks run; their figures are no business of the tests."""

import io
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from launch import launch

import dgc
from dgc.compression import sizes as messages

pytestmark = pytest.mark.long


def host_benchmark():
    """benchmarks/host.py, in small: seconds of the thread, by method."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    import host

    return {method: host.seconds(method, 6, 10) for method in host.METHODS}


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))


def test_compress():
    pytest.importorskip("numba")
    import compress
    from rich.console import Console

    from dgc.compression import kernels

    find = kernels.module_for
    try:
        rows = compress.measure(
            [(40, 50), (60,), (300, 70)],
            {
                m: list(compress.STREAMS) if m == compress.FUSED else ["directly"]
                for m in compress.METHODS
            },
            0.99,
            warmup=2,
            repeats=2,
        )
    finally:
        kernels.module_for = find  # which the benchmark sets
    assert len(rows) == 5 and all(row["entries"] == 20 + 210 for row in rows)
    assert all(row["energy"] == pytest.approx(1, abs=1e-3) for row in rows)  # what float16 rounds
    Console(file=io.StringIO()).print(compress.table(rows))


def test_gradients_are_fresh_and_of_the_scales_that_are_said():
    from gradients import heavy_tailed, lstm, resnet50, scales

    assert len(resnet50()) == 161 and sum(torch.Size(s).numel() for s in resnet50()) == 25_557_032
    assert sum(torch.Size(s).numel() for s in lstm()) == 51_034_000
    shapes = [(300, 400), (1000,), (50, 60, 3, 3)]
    draw = heavy_tailed(shapes)
    first = [g.clone() for g in next(draw)]
    second = next(draw)
    for a, b, shape, scale in zip(first, second, shapes, scales(3), strict=True):
        assert a.shape == b.shape == shape and (a == b).float().mean() < 0.01
        assert 0.3 * scale < b.square().mean().sqrt() < 3 * scale
    assert sorted(scales(3)) == pytest.approx([1e-6, 1e-3, 1])


def test_the_network_needs_root(monkeypatch, capsys):
    import hosts

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["benchmarks/network.py"])
    with pytest.raises(SystemExit) as stop:
        hosts.check_tools()
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "network.py: it makes network namespaces, which needs Linux and root (sudo)\n"
    )


def test_adaptive_tells_when_the_sparsity_has_followed(tmp_path):
    import adaptive

    seconds = [2.1] * 100 + [3.0] * 20 + [2.2] * 80
    sparsities = [0.99] * 100 + [0.99] * 10 + [0.999] * 10 + [0.995] * 80
    told = adaptive.figures(seconds, sparsities, 2.0, change=100)
    assert told == pytest.approx(
        {
            "sparsity_before": 0.99,
            "sparsity_after": 0.995,
            "followed_after_steps": 20,
            "step_over_alone_before": 1.05,
            "step_over_alone_just_after": 1.5,
            "step_over_alone_after_50": 1.1,
            "within_before": 1.0,
            "within_after_50": 1.0,
        }
    )
    adaptive.draw(
        {
            "steps": 200,
            "change": 100,
            "rates": [25, 12.5],
            "sparsities": sparsities,
            "seconds": seconds,
            "hosts": 2,
            "alone": 2.0,
        },
        tmp_path / "adaptive.png",
    )
    assert (tmp_path / "adaptive.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_counted_and_predicted_of_an_exchange_agree():
    import scaling

    (bucket,) = scaling.plan.buckets(scaling.SHAPES, scaling.dgc.Config(0.999))
    gradients = [
        torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in scaling.SHAPES
    ]
    for name in scaling.NAMES:
        workers = 2 * scaling.NODE if name.startswith("hierarchical") else 2
        counted, busiest = (
            scaling.counted(name, workers, gradients),
            scaling.predicted(name, workers, bucket.sizes),
        )
        assert counted == pytest.approx(busiest), name


def test_speedups_are_over_one_node():
    import speedup

    for method in speedup.CURVES.values():
        alone, four = (
            speedup.speedup("resnet50", "10gbit", method, nodes, True) for nodes in (1, 4)
        )
        assert alone == 1 and 1 < four < 4


@pytest.mark.parametrize("value_bits", [4, 16])
def test_the_bits_of_an_entry_are_those_of_the_messages(value_bits):
    """No place takes fewer bits than its entropy, and the parts of a message are all of it."""
    import wire

    shapes, config = ((300, 200), (200,), (50, 90)), dgc.Config(0.9, value_bits=value_bits)
    (bucket,) = [bucket for bucket in wire.plan.buckets(shapes, config) if bucket.sizes is not None]
    bits = wire.bits_of_entry(shapes, 0.9, value_bits)
    assert bits["sum"] == pytest.approx(8 * bucket.sizes.message / bucket.sizes.slots)
    assert value_bits < bits["information"] < bits["sum"]
    assert wire.ways(5, 2) == pytest.approx(math.log2(10))
    whole, paper = wire.whole_training(shapes, value_bits), wire.after_warmup(shapes, value_bits)
    assert 1 < whole < paper["on_the_wire"] < paper["as_the_paper_counts"]


def test_receive(monkeypatch, tmp_path):
    pytest.importorskip("numba")
    import receive

    monkeypatch.setattr(receive, "NUMEL", 1 << 14)
    receive.main(repeats=1, out=tmp_path / "receive.json")
    assert json.loads((tmp_path / "receive.json").read_text())["entries"] == 17  # of 16,384


def test_host_times_the_thread_that_trains():
    results, _ = launch("horovod", 2, [host_benchmark], limit=120)
    for times in results[host_benchmark]:
        assert (
            list(times) == ["SGD", "Horovod", "DGC"]
            and min(min(pair) for pair in times.values()) > 0
        )


def test_masking_alone_shortens_the_way():
    """Without it, all that torch's SGD does with the same gradients is done, once what is pending is flushed."""
    import noise

    mean = 0.1 * torch.randn(noise.SHAPE, generator=torch.Generator().manual_seed(0))
    whole = (noise.sgd(mean, 60) * mean).sum()
    without, masked = (
        noise.compressed(dgc.Config(0.9, factor_masking=on), mean, 60)[1] for on in (False, True)
    )
    assert (without * mean).sum() == pytest.approx(float(whole), rel=1e-5)
    assert (masked * mean).sum() / whole < 0.5


def test_the_reduce_exchange_stays_less_far_behind_with_more_entries():
    import noise

    mean = 0.1 * torch.randn(noise.SHAPE, generator=torch.Generator().manual_seed(0))
    gathered, reduced, denser = noise.behind(mean, 40, (4, 16))
    for n in (4, 16):
        assert gathered[n] == 1 and denser[n] < min(gathered[n], reduced[n])


@pytest.mark.parametrize("choice", ["allgather", "reduce 1 1", "reduce 2 2"])
def test_the_valley_is_what_this_package_does(choice, monkeypatch):
    """Three ranks that draw what the transcription draws."""
    import noise

    monkeypatch.setattr(messages, "WIDE", int(choice[-1]) if "reduce" in choice else None)
    steps, sparsity, workers = 25, 0.75, 3

    def train():
        draw = torch.Generator().manual_seed(0)
        low, high = noise.CURVATURES
        curvature = 10 ** (low + (high - low) * torch.rand(noise.VALLEY, generator=draw)).view(
            100, -1
        )
        x = torch.nn.Parameter(torch.zeros_like(curvature))
        config = dgc.Config(
            sparsity, factor_masking=False, exchange=choice.split()[0], value_bits=32
        )
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD([x], 0.2 * (1 - sparsity), noise.MOMENTUM), None, config
        )
        for _ in range(steps):
            own = torch.randn(workers, noise.VALLEY, generator=draw)[
                dgc.lockstep.current().world.rank
            ]
            x.grad = curvature * x.detach() + (
                curvature * workers / noise.WORKERS
            ).sqrt() * own.view_as(x)
            optimizer.step()
        return x.detach().flatten()

    # In float32 roundings decide which of two entries is larger.
    torch.set_default_dtype(torch.float64)
    try:
        expected, _ = noise.valley(choice, sparsity, workers, steps)
        got = dgc.lockstep.run(train, workers)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_a_common_choice_of_the_means_largest_entries_loses_nothing_beside_an_all_gather():
    import noise

    dense, gathered, mean = (
        noise.valley(choice, 0.75, 16, 400)[1] for choice in (None, "allgather", "mean")
    )
    assert gathered > dense and mean == pytest.approx(gathered, rel=0.05)


def test_owners_sums_are_as_good_as_an_all_gather():
    """With three messages' worth of entries in both phases; with one, less is applied than an all-gather of 16 workers
    applies. And of the same bytes, those shared out evenly between the phases make the shorter wait.
    """
    import noise

    gathered, one, three, uneven = (
        noise.valley(choice, 0.99, 16, 800)[1]
        for choice in ("allgather", "reduce 1 1", "reduce 3 3", "reduce 1 5")
    )
    assert three < 1.02 * gathered and one > 1.05 * gathered and uneven > 1.01 * three


def test_ideas_change_one_thing():
    """Without one the choice and the message are the package's."""
    import ideas

    from dgc.compression.kernels import plain
    from dgc.compression.residual import Gradient, Residual
    from dgc.compression.wire import Layout

    like = {"a": torch.empty(40, 50), "b": torch.empty(900)}
    ours, theirs = Residual("", like), Residual("", like)
    layout = Layout(ours, [100, 45], 16)
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        some = {
            name: Gradient(torch.randn(x.shape, generator=draw), 0.9, True)
            for name, x in like.items()
        }
        messages = []
        for kernel, bucket in ((ideas.Idea(), ours), (plain, theirs)):
            _, index, used = kernel.accumulate_and_select(bucket, some, None, layout, step)
            messages.append(
                kernel.encode(bucket, layout, index, used, torch.tensor(False), True)[0]
            )
        assert (
            torch.equal(*messages)
            and torch.equal(ours.u, theirs.u)
            and torch.equal(ours.v, theirs.v)
        )
    values = torch.tensor([5.0, -2.0, 3.0, 1.0])
    layout = Layout(Residual("", {"a": torch.empty(9)}), [4], 16)
    assert ideas.Cap().values(layout, torch.tensor([4]), values).tolist() == [2, -2, 2, 1]
    across, bucket = ideas.Across(), Residual("", like)
    across.config, across.count = dgc.Config(0.95), ideas.selection.count
    few = {
        "a": Gradient(torch.arange(2000.0).view(40, 50)),
        "b": Gradient(1998.5 + torch.zeros(900)),
    }
    _, index, used = across.accumulate_and_select(
        bucket, few, None, Layout(bucket, [800, 360], 16), 0
    )
    assert used.tolist() == [1, 144] and index[0] == 1999  # 5 % of each is 100 and 45


def test_a_late_update_comes_one_step_late():
    """With gradients that do not depend on where they are taken; after the last step nothing is missing."""
    import ideas

    def worker(late):
        model = torch.nn.Linear(40, 50)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 1.0, 0.9),
            model.named_parameters(),
            dgc.Config(0.9, min_numel=1000),
        )
        if late:
            ideas.Late().attach(optimizer, model)
        places = []
        for step in range(5):
            optimizer.zero_grad()
            model(torch.full((1, 40), step + 1.0) + torch.arange(40)).sum().backward()
            optimizer.step()
            places.append([p.detach().clone() for p in model.parameters()])
        optimizer.flush()
        return places, [p.detach().clone() for p in model.parameters()]

    (plain, last), (late, ended) = (
        dgc.lockstep.run(lambda late=late: worker(late), 2)[0] for late in (False, True)
    )
    assert not any(x.any() for x in late[0])
    torch.testing.assert_close([late[1:], ended], [plain[:-1], last])
