"""A sparsity that follows the network: the law on modelled networks, and the same decision on every rank."""

import copy
import math
import random
import statistics
import warnings
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launch import ran
from laws import (
    alike,
    everything,
    flat,
    in_ddp,
    loss,
    model,
    same_end,
    train,
)
from torch import nn

import dgc
from dgc.engine import progress as clocks
from dgc.engine.engine import engine_of
from dgc.schedule import FORGET, HIGH, LOW, Adaptive, Found
from dgc.transport import find

CLOCKS = {}  # rank -> its virtual time
SHAPED = dgc.Config(sparsity=dgc.adaptive(0.5, 0.999, start=0.98, every=4))


@contextmanager
def virtual_time():
    """Within it, the ranks' own clocks (see :func:`paced`) stand in for this machine's."""
    kept, clocks.perf_counter = clocks.perf_counter, lambda: CLOCKS[find().world.rank]()
    try:
        yield
    finally:
        clocks.perf_counter = kept


def paced(steps, network=None, optimizer=None, config=SHAPED, fastest=0.5):
    """A training that takes virtual time: the sparsity of each step, the network and the optimizer.

    Computing takes 1 on the last rank, and ``fastest`` on the first, which waits for the others. The exchange takes
    8 times the density; from step 60 on, when the bandwidth is halved, 16 times. 0.6 of that is hidden, and 0.02 never.
    """
    world, sparsities, now, delta = find().world, [], 0, 0
    if network is None:
        network = model()
    if optimizer is None:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config)
    # As each of them is complete; synchronize().
    looks = len(engine_of(optimizer)._parameters.buckets) + 1
    unit = 10**8 * looks  # whole numbers: no rounding
    computing = round(1e8 * (fastest + (1 - fastest) * world.rank / (world.size - 1))) * looks

    def clock():
        nonlocal now
        now += delta
        return float(now)

    CLOCKS[world.rank] = clock
    for step in steps:
        sparsity = optimizer.param_groups[0]["dgc_sparsity"]
        wire = round(1e8 * (0.02 + max(0, (8 if step < 60 else 16) * (1 - sparsity) - 0.6))) * looks
        delta = (wire + unit - computing) // looks  # at each second look computing has stood still,
        now += computing - looks * delta  # and at the others gone on
        optimizer.zero_grad()
        loss(network, world.rank, step).backward()
        optimizer.step()
        sparsities.append(sparsity)
    return sparsities, network, optimizer


def adapting():
    """Ranks that measure differently."""
    with virtual_time():
        sparsities, network, optimizer = paced(range(100))
        return sparsities, flat(network), optimizer.report()


def ddp_adaptive():
    """Under DDP, as without it; and registered once more with another schedule."""
    with virtual_time():
        ours = paced(range(100))
        parallel, optimizer = in_ddp(model(), SHAPED)
        theirs = paced(range(100), parallel, optimizer)
        same = ours[0] == theirs[0] and same_end((theirs[1].module, theirs[2]), ours[1:])
        again = nn.parallel.DistributedDataParallel(parallel.module)
        dgc.register_comm_hook(
            again, optimizer, replace(SHAPED, sparsity=dgc.adaptive(0.97, 0.98, start=0.975))
        )
        return same, optimizer.param_groups[0]["dgc_sparsity"], theirs[0][-1]


def broadcast_adaptive():
    """hvd.broadcast_optimizer_state to ranks that begin anew, and on from there."""
    import horovod.torch as hvd

    with virtual_time():
        _, network, optimizer = paced(range(28))
        expected = optimizer.param_groups[0]["dgc_sparsity"]
        state = copy.deepcopy(optimizer.state_dict())
        del optimizer
        other = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
        other = dgc.DistributedOptimizer(other, network.named_parameters(), SHAPED)
        if hvd.rank() == 0:
            other.load_state_dict(state)
        hvd.broadcast_optimizer_state(other, root_rank=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return expected, paced(range(28, 80), network, other)[0]


def broadcast_no_longer_adaptive():
    """The same to ranks that have a fixed sparsity by now: what is in the groups."""
    import horovod.torch as hvd

    network, optimizer = train(range(4), SHAPED)
    other = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-2)
    other = dgc.DistributedOptimizer(other, network.named_parameters(), dgc.Config(0.9))
    if hvd.rank() == 0:
        other.load_state_dict(optimizer.state_dict())
    hvd.broadcast_optimizer_state(other, root_rank=0)
    return {key: value for key, value in other.param_groups[0].items() if key != "params"}


# What is exposed, in units of computing time, at a density over a link of this share of its bandwidth.
NETWORKS = {
    "in the open": lambda density, rate: 0.005 + 5 * density / rate,
    "half of it hidden": lambda density, rate: (
        0.02 + 0.4 * density / rate + max(0, 20 * density / rate - 0.6)
    ),
    "hidden or not": lambda density, rate: max(0, 20 * density / rate - 0.6),
}


def simulated(exposed, rates, schedule=None, noise=0.0, seed=0):
    """(sparsity, share of computing time that is exposed) at each step, by the law alone."""
    schedule = dgc.adaptive(0.9, 0.9999) if schedule is None else schedule
    draw, found, window, seen = random.Random(seed), Found(schedule.start), [], []
    for step, rate in enumerate(rates, 1):
        share = exposed(1 - found.sparsity, rate)
        window.append(max(0.0, share * (1 + draw.gauss(0, noise))))
        seen.append((found.sparsity, share))
        if step % schedule.every == 0:
            found = schedule.after(
                found, statistics.median(window), step // schedule.every % FORGET == 0
            )
            window.clear()
    return seen


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (0.2, 1), (0.2, 2), (0.2, 3)])
def test_it_finds_the_band_and_follows_the_bandwidth(name, noise, seed):
    """Halved at step 403: after 50 steps the sparsity has followed, and a step takes no more than 1.15 of computing
    alone. At step 1000 it is four times as much.
    """
    seen = simulated(
        NETWORKS[name], [1.0] * 403 + [0.5] * 597 + [2.0] * 500, noise=noise, seed=seed
    )
    densities, shares = [1 - sparsity for sparsity, _ in seen], [share for _, share in seen]

    def ideal(rate):
        return max(
            (d / 1e5 for d in range(1, 10_001) if NETWORKS[name](d / 1e5, rate) <= HIGH), default=0
        )

    for end, rate in ((402, 1.0), (453, 0.5), (999, 0.5), (1499, 2.0)):
        assert ideal(rate) / 2.2 < densities[end] < 1.25 * ideal(rate)
        assert statistics.median(shares[end - 40 if end > 453 else end - 10 : end]) < 0.15
    assert densities[453] < 0.8 * densities[402] and densities[1499] > 2 * densities[999]
    for begin, end in ((250, 402), (500, 999), (1250, 1499)):
        assert sum(share > 0.15 for share in shares[begin:end]) <= 0.15 * (end - begin)
        moves = sum(a != b for a, b in pairwise(densities[begin:end]))
        # To there and back for each time it forgets.
        assert moves <= 2 + (end - begin) / 10 / (FORGET / 2)


@pytest.mark.parametrize(
    ("exposed", "bound"),
    [(lambda d, rate: 2.0, 0.9999), (lambda d, rate: 0.0, 0.9), (lambda d, rate: math.inf, 0.9999)],
)
def test_where_it_does_not_depend_on_the_sparsity_it_goes_to_a_bound_and_stays(exposed, bound):
    seen = simulated(exposed, [1.0] * 400)
    assert [sparsity for sparsity, _ in seen[-100:]] == [bound] * 100


def test_it_comes_back_from_a_bound():
    seen = simulated(NETWORKS["in the open"], [1.0] * 300 + [1e-3] * 300 + [1.0] * 700)
    assert seen[599][0] == 0.9999 and seen[1299][0] == pytest.approx(seen[299][0], abs=0.01)


@pytest.mark.parametrize("floor", [0.03, 0.062, 0.07])
def test_it_comes_back_where_a_latency_alone_is_in_the_band(floor):
    seen = simulated(
        lambda density, rate: floor + 2 * density / rate,
        [1.0] * 300 + [0.01] * 100 + [1.0] * 2600,
        dgc.adaptive(0.99, 0.9999),
    )
    sparsities = [sparsity for sparsity, _ in seen]
    assert sparsities[399] > 0.9995 and sparsities[-1] <= 0.999
    # And looks for the limit now and then.
    assert sum(share > HIGH for _, share in seen[2000:]) <= 0.1 * 1000


sparsities = st.floats(0, 0.9999)
knowledge = st.tuples(sparsities, sparsities, st.sampled_from([0, 1, 2, 3])).map(
    lambda drawn: (
        1.0 if drawn[2] & 1 else max(drawn[:2]),
        -1.0 if drawn[2] & 2 else min(drawn[:2]),
    )
)


@given(
    start=st.floats(0.5, 0.9999),
    known=knowledge,
    shares=st.tuples(st.floats(0, 5), st.floats(0, 5)),
    forget=st.booleans(),
)
def test_more_exposed_is_never_denser(start, known, shares, forget):
    schedule = dgc.adaptive(0.5, 0.9999, start=0.9)
    less, more = (schedule.after(Found(start, *known), share, forget) for share in sorted(shares))
    assert 0.5 <= less.sparsity <= more.sparsity <= 0.9999
    assert more.sparsity > start or start == 0.9999 or max(shares) <= HIGH
    assert less.sparsity <= start or min(shares) > HIGH
    if min(shares) >= LOW and max(shares) <= HIGH and not forget:
        assert less.sparsity == more.sparsity == start
    for found, share in ((less, min(shares)), (more, max(shares))):
        assert (found.shows if share > HIGH else found.hides) == pytest.approx(start)
        assert found.shows < found.hides


PLACES = [
    ("lockstep", 3),
    ("torch", 3),
    ("horovod", 2),
    *(pytest.param(*place, marks=pytest.mark.long) for place in (("lockstep", 2), ("torch", 2))),
]


def results_of(launcher, size, cases):
    if launcher != "lockstep":
        return ran(launcher, size, cases, limit=180)
    with virtual_time():
        return {adapting: dgc.lockstep.run(adapting, size)}


@pytest.mark.parametrize(("launcher", "size"), PLACES)
def test_ranks_that_measure_differently_decide_alike(launcher, size):
    """Law 2, with the bandwidth halved at step 60; and DDP's hook measures as much."""
    cases = {
        "lockstep": [adapting],
        "torch": [adapting, ddp_adaptive],
        "horovod": [adapting, broadcast_adaptive, broadcast_no_longer_adaptive],
    }[launcher]
    results = results_of(launcher, size, cases)
    decided, parameters, report = results[adapting][0]
    assert all(
        theirs == decided and torch.equal(end, parameters) for theirs, end, _ in results[adapting]
    )
    # By hand: 1.25 times as many entries, until 8 times as many do not hide. Then those that did.
    most = 0.02 * 1.25**6
    assert 8 * most < 0.6 + LOW - 0.02 and 8 * 1.25 * most > 0.6 + HIGH - 0.02
    densities = [0.02 * 1.25**i for i in range(8)] + [most] * 8
    # Halved: by far too many, so a quarter; halfway back to what was too many; once more, which is too many; back.
    densities += [most / 4, most / 2, most / math.sqrt(2)] + [most / 2] * 6
    assert decided == pytest.approx([1 - density for density in densities for _ in range(4)])
    fixed = dgc.lockstep.run(lambda: train([0], dgc.Config(decided[-1]))[1].report(), size)[0]
    assert (
        report.sparsity == fixed.sparsity == decided[-1]
        and report.message_bytes == fixed.message_bytes
    )
    for same, sparsity, before in results.get(ddp_adaptive, []):
        assert same and before < 0.97 == sparsity  # which is moved into the new bounds
    if launcher == "horovod":
        (held, after), (theirs, others) = results[broadcast_adaptive]
        assert held == theirs == after[0] and after == others == decided[28:80]
        group, others = results[broadcast_no_longer_adaptive]
        assert group == others and (group["lr"], group["dgc_step"]) == (0.05, 4)


def test_who_waits_for_a_slower_rank_does_not_wait_for_the_network():
    def decided(fastest):
        with virtual_time():
            return dgc.lockstep.run(lambda: paced(range(80), fastest=fastest)[0], 3)

    assert decided(1.0) == decided(0.1)


def test_ranks_that_would_decide_differently_are_told():
    def worker():
        odd = dgc.lockstep.current().world.rank == 1
        with pytest.raises(
            ValueError,
            match=r"the ranks differ in the schedule of the sparsity\. Rank 1 has: Adaptive"
            r"\(least=0\.98, .*; rank 0 has: Adaptive\(least=0\.99, ",
        ):
            train([0], dgc.Config(dgc.adaptive(0.98 if odd else 0.99)))

    dgc.lockstep.run(worker, 2)


@pytest.mark.parametrize("stop", [40, 42, 64])
def test_it_goes_on_as_if_it_had_not_stopped(stop, tmp_path):
    """Law 6, since these clocks are exact: from a checkpoint, and as a copy. In the midst of a window, too."""

    def worker():
        decided, network, optimizer = paced(range(stop))
        dgc.save_checkpoint(tmp_path, network, optimizer)
        network, optimizer = copy.deepcopy((network, optimizer))
        copied, *end = paced(range(stop, 90), network, optimizer)
        expected = everything(*end)
        network = model(seed=5)
        fresh = torch.optim.SGD(network.parameters(), lr=1.0)
        fresh = dgc.DistributedOptimizer(fresh, network.named_parameters(), SHAPED)
        assert fresh.param_groups[0]["dgc_sparsity"] == 0.98
        dgc.load_checkpoint(tmp_path, network, fresh)
        loaded, *end = paced(range(stop, 90), network, fresh)
        assert copied == loaded and alike(everything(*end), expected)
        return decided + loaded

    def straight():
        return paced(range(90))[0]

    with virtual_time():
        assert dgc.lockstep.run(worker, 2) == dgc.lockstep.run(straight, 2)


def test_other_bounds_hold_at_once():
    def worker():
        _, network, optimizer = paced(range(40))
        state, residuals = copy.deepcopy(optimizer.state_dict()), optimizer.residual_state_dict()
        del optimizer
        other = torch.optim.SGD(network.parameters(), lr=1.0)
        config = dgc.Config(dgc.adaptive(0.99, 0.995, start=0.995))
        other = dgc.DistributedOptimizer(other, network.named_parameters(), config)
        other.load_state_dict(state)
        other.load_residual_state_dict(residuals)
        assert other.param_groups[0]["dgc_sparsity"] == other.report().sparsity == 0.99
        train(range(40, 43), None, network, other)
        return flat(network)

    with virtual_time():
        assert torch.equal(*dgc.lockstep.run(worker, 2))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dgc_sparsity", 1.0),
        ("dgc_sparsity", math.nan),
        ("dgc_sparsity", -0.5),
        ("dgc_hides", "0.9"),
        ("dgc_shows", -2.0),
    ],
)
def test_a_checkpoint_with_a_wrong_one_is_refused(key, value, tmp_path):
    def worker():
        _, network, optimizer = paced(range(3))
        optimizer.param_groups[0][key] = value
        dgc.save_checkpoint(tmp_path, network, optimizer)
        optimizer.param_groups[0][key] = 0.98
        with pytest.raises(ValueError, match=f"{key} of group 0 must be like 0.98, got {value!r}"):
            dgc.load_checkpoint(tmp_path, network, optimizer)

    with virtual_time():
        dgc.lockstep.run(worker, 2)


def test_steps_that_are_skipped_or_alone():
    """A skipped step counts for none; and with one process nothing is decided."""
    config = dgc.Config(SHAPED.sparsity, nonfinite="skip")

    def worker():
        _, network, optimizer = paced(range(6), config=config)
        for p in network.parameters():
            p.grad = torch.full_like(p, math.nan)
        optimizer.step()
        return paced(range(6, 16), network, optimizer)[2].report()

    with virtual_time():
        reports = dgc.lockstep.run(worker, 2)
    assert all(
        (r.steps, r.skipped) == (16, 1) and r.sparsity == reports[0].sparsity != 0.98
        for r in reports
    )
    (alone,) = dgc.lockstep.run(lambda: train(range(16), config)[1].report(), 1)
    assert alone.sparsity == 0.98


def test_nothing_is_measured_unless_it_adapts(monkeypatch):
    def looked():
        raise AssertionError

    monkeypatch.setattr(clocks, "perf_counter", looked)
    dgc.lockstep.run(lambda: train(range(3), dgc.Config(dgc.warmup(2, steps_per_epoch=4))), 2)
    with pytest.raises(AssertionError):
        dgc.lockstep.run(lambda: train(range(3), SHAPED), 2)


@pytest.mark.parametrize(
    "sparsity", [0.9, dgc.piecewise({0: 0.75, 2: 0.9}), lambda step: [0.5, 0.75, 0.9][step]]
)
def test_the_report_tells_the_sparsity(sparsity):
    reports = dgc.lockstep.run(lambda: train(range(3), dgc.Config(sparsity))[1].report(), 2)
    assert [report.sparsity for report in reports] == [0.9, 0.9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"least": -0.1},
            r"adaptive: least must be a number in \[0, 1\), 0 meaning dense, got -0\.1",
        ),
        ({"most": 1.0}, r"adaptive: most must be a number in \[0, 1\), 0 meaning dense, got 1\.0"),
        (
            {"least": 0.99, "most": 0.9},
            r"least must be less than most, .* got least 0\.99, most 0\.9",
        ),
        (
            {"start": 0.5},
            r"start must be between them, got least 0\.99, most 0\.9999 and start 0\.5",
        ),
        ({"most": 0.995, "start": 0.999}, r"most 0\.995 and start 0\.999"),
        ({"every": 2}, r"adaptive: every must be an integer >= 3, got 2"),
        ({"every": 10.0}, r"adaptive: every must be an integer >= 3, got 10\.0"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        dgc.adaptive(**arguments)


def test_it_is_a_schedule():
    schedule = dgc.adaptive(0.9, every=7)
    assert (
        schedule == Adaptive(0.9, 0.9999, 0.999, 7)
        and dgc.Config(schedule).sparsity_at(12345) == 0.999
    )
    assert hash(dgc.Config(schedule)) == hash(dgc.Config(dgc.adaptive(0.9, every=7)))
    assert dgc.schedule.parse("adaptive") == dgc.adaptive()
    assert (dgc.adaptive(most=0.995).start, dgc.adaptive(0.9995).start) == (0.995, 0.9995)
    assert dgc.schedule.parse("adaptive:least=0.9,every=7") == schedule


def test_adamws_dense_steps_tell_of_no_sparsity():
    """Ten of them, 1 / (1 - b2): the first compressed step has the sparsity of the start, which moves by what comes
    then.
    """

    def worker():
        network = model()
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, betas=(0.9, 0.9))
        optimizer = dgc.DistributedOptimizer(
            optimizer, network.named_parameters(), replace(SHAPED, factor_masking=False)
        )
        return paced(range(24), network, optimizer)[0]

    with virtual_time(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, other = dgc.lockstep.run(worker, 2)
    # Steps 12 to 15 are the first four with an interval each.
    assert first == other and first[:16] == [0.98] * 16
    assert first[16:20] == pytest.approx([1 - 0.02 * 1.25] * 4)
