"""The methods that DGC is compared with are those of their papers, send what they say, and train."""

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import papers
import pytest
import torch
from launch import ran

import dgc
from dgc import plan as planning
from dgc.collective import World, dense_bytes
from dgc.plan import cost
from dgc.plan.cost import Cluster

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import cifar10
import job
import peers
import typer
from peers import atomo, packing, predict, table, terngrad, train
from peers.exchange import Exchanging
from peers.interval import half_width

pytestmark = pytest.mark.long

SHAPES, N, LR = [(12, 5, 3, 3), (7,), (10, 16), (3,)], 3, 0.05


def gradients(steps, ranks=N, shapes=SHAPES):
    draw = torch.Generator().manual_seed(1)
    return [
        [
            [torch.randn(shape, generator=draw) * 10 ** (i - 2) for i, shape in enumerate(shapes)]
            for _ in range(ranks)
        ]
        for _ in range(steps)
    ]


def steps_of(make, g, lr=LR, momentum=0.0):
    """What SGD subtracts with a method in each step, float64, the same on all ranks; and each rank's method."""

    def worker():
        rank = dgc.lockstep.current().world.rank
        parameters = [torch.nn.Parameter(torch.zeros(t.shape)) for t in g[0][0]]
        peer, taken = Exchanging(torch.optim.SGD(parameters, lr, momentum), make), []
        for step, ranks in enumerate(g):
            before = packing.flat([p.detach().double() for p in parameters])
            for p, own in zip(parameters, ranks[rank], strict=True):
                p.grad = own.clone()
            peer.step(last=step + 1 == len(g))
            taken.append((before - packing.flat([p.detach().double() for p in parameters])).numpy())
        return taken, peer.method

    found = dgc.lockstep.run(worker, len(g[0]))
    for taken, _ in found[1:]:
        assert all(
            np.array_equal(own, other) for own, other in zip(taken, found[0][0], strict=True)
        )
    return found[0][0], [method for _, method in found]


def numpy(g):
    return [[[t.numpy() for t in tensors] for tensors in ranks] for ranks in g]


def assert_close(found, expected, rtol=1e-4):
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=rtol, atol=rtol * np.abs(other).max())


# -- packing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_codes_are_really_packed(bits):
    codes = torch.randint(
        0, 2**bits, (1001,), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8
    )
    packed = packing.pack(codes, bits)
    as_bits = (
        codes.numpy()[:, None] >> np.arange(bits)
    ) & 1  # NumPy's packing of all of their bits
    np.testing.assert_array_equal(
        packed.numpy(), np.packbits(as_bits.astype(np.uint8), bitorder="little")
    )
    assert torch.equal(packing.unpack(packed, bits, len(codes)), codes)


# -- methods without chance, against transcriptions --------------------------------------------------------------------


def test_dense_is_the_mean():
    g = gradients(3)
    found, _ = steps_of(peers.Dense, g)
    assert_close(
        found, [LR * sum(papers.flat(own) for own in ranks) / N for ranks in numpy(g)], 1e-6
    )


@pytest.mark.parametrize(
    "name, dtype, rtol", [("fp16", torch.float16, 2**-10), ("bf16", torch.bfloat16, 2**-7)]
)
def test_casts_lose_what_rounding_loses_and_no_more(name, dtype, rtol):
    g = gradients(1, 1)
    found, _ = steps_of(peers.METHODS[name].make, g, lr=1.0)
    expected = [packing.flat(g[0][0]).to(dtype).double().numpy()]  # torch's own rounding
    np.testing.assert_array_equal(found, expected)
    g = gradients(2, 2)
    found, _ = steps_of(peers.METHODS[name].make, g, lr=1.0)
    for own, ranks in zip(found, numpy(g), strict=True):
        size = sum(np.abs(papers.flat(tensors)) for tensors in ranks)
        assert (np.abs(own - sum(map(papers.flat, ranks)) / 2) <= rtol * size).all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_signsgd_votes(momentum):
    g = gradients(4)
    found, methods = steps_of(lambda world, seed: peers.SignSGD(world, seed, momentum), g)
    expected, kept = papers.signum(numpy(g), LR, momentum)
    assert_close(found, expected)
    assert_close([method.m.numpy() for method in methods], kept)


def test_an_even_vote_moves_nothing():
    g = [[[torch.tensor([1.0, 1.0])], [torch.tensor([1.0, -1.0])]]]
    np.testing.assert_allclose(steps_of(peers.SignSGD, g)[0], [[LR, 0]], rtol=1e-6)


def test_ef_signsgd_is_algorithm_1_and_conserves():
    """The paper's error has the learning rate in it."""
    g = gradients(6)
    found, methods = steps_of(peers.EFSignSGD, g)
    expected, kept = papers.ef_signsgd(numpy(g), LR)
    assert_close(found, expected)
    assert_close([LR * method.e.numpy() for method in methods], kept)
    accumulated = LR * sum(papers.flat(tensors) for ranks in numpy(g) for tensors in ranks)
    np.testing.assert_allclose(
        N * sum(found) + LR * sum(method.e.double().numpy() for method in methods),
        accumulated,
        atol=1e-5 * np.abs(accumulated).max(),
    )


def test_demo_is_the_papers():
    """With every entry beyond rounding's reach, as signs are what is compared."""
    g = gradients(5)
    found, methods = steps_of(lambda world, seed: peers.DeMo(world, seed, chunk=8, k=6), g)
    expected, kept = papers.demo(numpy(g), LR, 0.999, 6, 8)
    assert np.mean(np.isclose(found, expected, rtol=1e-5)) > 0.995
    assert_close([packing.flat(method.m).numpy() for method in methods], kept)


def test_demos_momentum_keeps_what_was_not_taken():
    """Without decay, for one rank: what leaves m is all that moves parameters, and is largest in frequency."""
    (ranks,) = gradients(1, 1)
    _, (method,) = steps_of(lambda world, seed: peers.DeMo(world, seed, 1.0, chunk=8, k=6), [ranks])
    for m, t in zip(method.m, ranks[0], strict=True):
        before, after = method.transform(LR * t), method.transform(m)
        gone = after.abs() < 1e-5 * before.abs().max()
        assert (gone.sum(1) == min(6, before.shape[1])).all()
        torch.testing.assert_close(
            after[~gone], before[~gone], rtol=1e-4, atol=1e-5 * float(before.abs().max())
        )


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_is_algorithm_1_and_conserves(rank):
    g = gradients(2 + 4)  # two dense steps first
    found, methods = steps_of(lambda world, seed: peers.PowerSGD(world, seed, rank), g)
    matrices = [i for i, t in enumerate(g[0][0]) if methods[0].worth(t)]
    shapes = [(len(g[0][0][i]), g[0][0][i][0].numel()) for i in matrices]
    q = dict(
        zip(
            matrices,
            (
                own.double().numpy()
                for own in peers.PowerSGD(World(0, N), 0, rank).begin(
                    [torch.zeros(shape) for shape in shapes]
                )
            ),
            strict=True,
        )
    )
    expected, kept = papers.power_iteration(numpy(g[2:]), LR, rank, q, matrices)
    assert_close(found[:2], [LR * sum(map(papers.flat, ranks)) / N for ranks in numpy(g[:2])])
    assert_close(found[2:], expected, 1e-3)
    for method, own in zip(methods, kept, strict=True):
        assert_close([e.numpy() for e in method.e], [own[i] for i in matrices], 1e-3)
    mean_error = sum(packing.flat(method.e).double().numpy() for method in methods) / N
    sent = (
        sum(
            np.concatenate([own.reshape(-1) for i, own in enumerate(parts(step)) if i in matrices])
            for step in found[2:]
        )
        / LR
    )
    given = (
        sum(
            papers.flat([tensors[i] for i in matrices])
            for ranks in numpy(g[2:])
            for tensors in ranks
        )
        / N
    )
    np.testing.assert_allclose(sent + mean_error, given, atol=1e-4 * np.abs(given).max())


def parts(step):
    return [
        part.numpy()
        for part in packing.unflat(torch.from_numpy(step), [torch.empty(shape) for shape in SHAPES])
    ]


def test_diloco_is_torchs_nesterov_of_the_mean_way():
    """H steps of each rank's own SGD in float64, then one of torch's SGD; and the last step exchanges, too."""
    g, h, lr = gradients(5), 2, 0.05

    def worker():
        rank = dgc.lockstep.current().world.rank
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        peer = Exchanging(
            torch.optim.SGD(parameters, lr, 0.9), lambda world, seed: peers.DiLoCo(world, seed, h)
        )
        for step, ranks in enumerate(g):
            for p, own in zip(parameters, ranks[rank], strict=True):
                p.grad = own.clone()
            peer.step(last=step + 1 == len(g))
        return packing.flat(parameters).detach().double()

    size = packing.flat(g[0][0]).numel()
    shared = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    outer = torch.optim.SGD([shared], 0.7, 0.9, nesterov=True)
    own = [torch.zeros(size, dtype=torch.float64, requires_grad=True) for _ in range(N)]
    inner = [torch.optim.SGD([x], lr, 0.9) for x in own]
    for step, ranks in enumerate(g):
        for x, sgd, tensors in zip(own, inner, ranks, strict=True):
            x.grad = packing.flat(tensors).double()
            sgd.step()
        if (step + 1) % h == 0 or step + 1 == len(g):
            shared.grad = shared.detach() - sum(x.detach() for x in own) / N
            outer.step()
            for x in own:
                x.data.copy_(shared)
    for found in dgc.lockstep.run(worker, N):
        assert_close([found.numpy()], [shared.detach().numpy()])


def test_gradient_dropping_is_the_papers_and_conserves():
    """To the float16 of dgc's wire, whose rounding is kept for later, too."""
    g = gradients(6, 2, [(40, 50)])

    def worker():
        rank, p, taken = (
            dgc.lockstep.current().world.rank,
            torch.nn.Parameter(torch.zeros(40, 50)),
            [],
        )
        peer = peers.attach("dropping", torch.optim.SGD([p], 1.0), [("p", p)], 0, None)
        for ranks in g:
            before, p.grad = p.detach().double(), ranks[rank][0].clone()
            peer.step()
            taken.append((before - p.detach().double()).numpy().reshape(-1))
        peer.optimizer.flush()
        return taken, p.detach().double().numpy().reshape(-1)

    (taken, found), _ = dgc.lockstep.run(worker, 2)
    assert_close(taken, papers.dropping(numpy(g), 20), 1e-3)  # 1 % of 2,000 entries
    assert_close(
        [-found], [sum(papers.flat(tensors) for ranks in numpy(g) for tensors in ranks) / 2], 1e-5
    )


def test_dgc_99_is_what_dgc_plan_recommends_for_so_many_steps_without_masking():
    entry, on = (
        peers.METHODS["dgc-99"],
        Cluster(4, 1, planning.NETWORKS["1gbit"], planning.INSIDE["pcie"]),
    )
    told = eval(planning.advise(planning.load("resnet50").shapes, on, 0.1, steps=3900).line)
    made = entry.make(job.schedule(entry, 390, 10 * entry.warmup))
    assert [made.sparsity_at(t) for t in range(3900)] == [told.sparsity_at(t) for t in range(3900)]
    assert replace(made, sparsity=0) == replace(told, sparsity=0, factor_masking=False)


# -- methods with chance -----------------------------------------------------------------------------------------------


def draws(method, encode, n=2000):
    """The mean of what is decoded, and the decoded, (n, entries) float64."""
    return torch.stack([encode(method) for _ in range(n)]).double()


def assert_mean(decoded, expected, variance):
    """Within Bernstein's inequality, beyond which one entry in ten million would be if the mean were the expected."""
    n, most, log = len(decoded), decoded.abs().max(), math.log(2e7)
    allowed = (2 * log * variance.clamp(min=0) / n).sqrt() + 2 * log * 2 * most / (3 * n)
    assert ((decoded.mean(0) - expected).abs() <= allowed).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_rounds_to_the_levels_beside_and_is_unbiased(bits):
    g = [torch.randn(5, 9, generator=torch.Generator().manual_seed(2)), torch.zeros(2, 3)]
    method, s = peers.QSGD(World(0, 1), 0, bits, bucket=16), 2 ** (bits - 1) - 1
    buckets, v = method.buckets(g), packing.flat(g).double()
    assert buckets.tolist() == [i // 16 for i in range(45)] + [3] * 6
    norm = torch.stack([v[buckets == b].abs().max() for b in range(4)])[buckets]
    exact = torch.where(norm > 0, s * v.abs() / norm, 0)
    decoded = draws(method, lambda m: m.decode(m.encode(packing.flat(g), buckets), buckets))
    level = torch.where(norm > 0, s * decoded.abs() / norm, decoded)
    assert (((level - exact.floor()).abs() < 1e-4) | ((level - exact.ceil()).abs() < 1e-4)).all()
    fraction = exact - exact.floor()
    assert_mean(decoded, v, (norm / s) ** 2 * fraction * (1 - fraction))


def test_terngrad_is_ternary_and_its_mean_is_the_clipped_gradient():
    g = [torch.randn(20, 5, generator=torch.Generator().manual_seed(3)) ** 3, torch.rand(4, 5)]
    clipped = [np.clip(t, -2.5 * t.std(), 2.5 * t.std()) for t in (t.double().numpy() for t in g)]
    assert np.abs(clipped[0]).max() < g[0].abs().max()  # something was
    method, layers = peers.TernGrad(World(0, 1)), packing.owners(g)
    decoded = draws(
        method, lambda m: m.decode(m.encode([terngrad.clipped(t, 2.5) for t in g], layers), layers)
    )
    expected = torch.from_numpy(papers.flat(clipped))
    s = torch.cat([torch.full((t.size,), np.abs(t).max(), dtype=torch.float64) for t in clipped])
    assert (((decoded.abs() - s).abs() < 1e-5 * s) | (decoded == 0)).all()
    assert_mean(decoded, expected, expected.abs() * (s - expected.abs()))


@pytest.mark.parametrize("s", [1, 2, 3])
def test_atomo_chooses_as_the_paper_and_is_unbiased(s):
    matrix = torch.randn(8, 9, generator=torch.Generator().manual_seed(4)) @ torch.diag(
        4.0 ** -torch.arange(9)
    )
    u, atoms, vt = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    p = papers.atomo_probabilities(atoms, s)
    np.testing.assert_allclose(atomo.probabilities(torch.from_numpy(atoms), s), p, rtol=1e-9)
    assert p.sum() == pytest.approx(s) and (p[0] == 1) == (s > 1)
    method = peers.Atomo(World(0, 1), 0, s)
    decoded = draws(method, lambda m: m.decode(m.encode([matrix]), [matrix])[0])
    variance = sum(
        (1 / p[i] - 1) * (atoms[i] * np.outer(u[:, i], vt[i])) ** 2 for i in range(len(p))
    )
    assert_mean(decoded, matrix.double(), torch.from_numpy(variance))
    assert atomo.probabilities(torch.zeros(4), s).tolist() == [0] * 4


def test_atomos_matrices_have_two_kernels_in_a_row():
    """Of input channels 2 j and 2 j + 1, as the authors' code has it; where their number is odd, one."""
    t = torch.arange(4 * 6 * 9.0).view(4, 6, 3, 3)
    pairs = [
        torch.cat([t[o, i].flatten(), t[o, i + 1].flatten()]) for o in range(4) for i in (0, 2, 4)
    ]
    assert torch.equal(atomo.matrix(t), torch.stack(pairs))
    odd = torch.arange(27.0).view(3, 1, 3, 3)
    assert torch.equal(atomo.matrix(odd), odd.view(3, 9))
    for t in (torch.randn(5, 7), torch.randn(5, 7, 1, 1)):
        assert torch.equal(atomo.matrix(t), t.view(5, 7))


def test_what_is_drawn_is_averaged_and_vectors_travel_dense():
    """Each rank's own draw again, with the seed that it has."""
    (ranks,) = g = gradients(1)
    matrices = [[t for t in tensors if t.ndim > 1] for tensors in ranks]
    where = peers.QSGD(World(0, N)).buckets(matrices[0])
    assert where.tolist() == [i // 512 for i in range(540)] + [2] * 160
    layers = packing.owners(matrices[0])

    def decoded(name, seed):
        method = peers.METHODS[name].make(World(0, N), seed)
        if name == "qsgd":
            return method.decode(method.encode(packing.flat(matrices[seed]), where), where)
        if name == "terngrad":
            clipped = [terngrad.clipped(t, 2.5) for t in matrices[seed]]
            return method.decode(method.encode(clipped, layers), layers)
        return packing.flat(
            method.decode(method.encode([atomo.matrix(t) for t in matrices[seed]]), matrices[seed])
        )

    for name in ("qsgd", "terngrad", "atomo"):
        (found,), _ = steps_of(peers.METHODS[name].make, g, lr=1.0)
        split = dict(enumerate(parts(found)))
        large = sum(decoded(name, seed) for seed in range(N)) / N
        assert_close(
            [np.concatenate([split[0].reshape(-1), split[2].reshape(-1)])], [large.numpy()], 1e-5
        )
        assert_close(
            [split[1], split[3]],
            [sum(tensors[i] for tensors in ranks).numpy() / N for i in (1, 3)],
            1e-5,
        )


@pytest.mark.parametrize("name", ["qsgd", "terngrad", "atomo"])
def test_ranks_draw_for_themselves(name):
    _, methods = steps_of(peers.METHODS[name].make, [[[torch.ones(20, 30)]] * 2])
    assert not torch.equal(*(method.random.get_state()[:400] for method in methods))


# -- what is sent, and over what ---------------------------------------------------------------------------------------

EXCHANGING = [name for name, entry in peers.METHODS.items() if entry.driver is Exchanging]
ENTRIES, VECTORS = 710, 10  # of SHAPES: 12 x 45, 10 x 16, and two vectors
LARGE = 2 * (N - 1) / N * 4 * ENTRIES  # a dense exchange
SENT = {  # bytes of the last of three steps, from the formats as they are documented
    "dense": LARGE,
    "fp16": LARGE / 2,
    "bf16": LARGE / 2,
    "diloco": LARGE,
    "diloco-even": LARGE,
    "local-sgd": LARGE,
    "qsgd": 2 * (N - 1) / N * 4 * VECTORS + (N - 1) * (3 * 4 + 700 / 2),
    "terngrad": 2 * (N - 1) / N * 4 * VECTORS + (N - 1) * (2 * 4 + 700 / 4),
    "signsgd": (N - 1) * math.ceil(ENTRIES / 8),
    "ef-signsgd": (N - 1) * (4 * 4 + math.ceil(ENTRIES / 8)),
    "demo": (N - 1) * (2 * 32 * 6 + VECTORS * 4),
    "powersgd-1": 2 * (N - 1) / N * 4 * (VECTORS + 12 + 45 + 10 + 16),
    "powersgd-2": 2 * (N - 1) / N * 4 * (VECTORS + 2 * (12 + 45 + 10 + 16)),
    "powersgd-4": 2 * (N - 1) / N * 4 * (VECTORS + 4 * (12 + 45) + 160),
}


@pytest.mark.parametrize("name", EXCHANGING)
def test_bytes_are_those_of_the_format(name):
    _, methods = (
        steps_of(peers.METHODS[name].make, [[[torch.randn(shape) for shape in SHAPES]] * N] * 3)
        if peers.METHODS[name].every == 1
        else (None, alone(peers.METHODS[name].make))
    )
    first = (
        2 * LARGE
        if name.startswith("powersgd")
        else 0
        if peers.METHODS[name].every > 1
        else 2 * SENT.get(name, 0)
    )
    if name == "atomo":  # as many atoms as chance has it
        assert 0 < methods[0].bytes_sent < 3 * LARGE
    else:
        assert [method.bytes_sent for method in methods] == [pytest.approx(first + SENT[name])] * N


def alone(make):
    def worker():
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        peer = Exchanging(torch.optim.SGD(parameters, LR), make)
        for step in range(3):
            for p in parameters:
                p.grad = torch.ones_like(p)
            peer.step(last=step == 2)
        return peer.method

    return dgc.lockstep.run(worker, N)


@pytest.mark.parametrize("name", EXCHANGING)
def test_the_collective_is_the_one_that_the_entry_names(name):
    def worker():
        world = dgc.lockstep.current().world
        method, tensors, ops = peers.METHODS[name].make(world, 0), [torch.randn(12, 45)], []
        if method.exchanges == "parameters":
            method.begin(tensors)
        for _ in range(3):
            found, ops = method.exchange(tensors, 0.1, True), []
            for path in found.paths if isinstance(found, packing.Apart) else [found]:
                try:
                    asked = next(path)
                    while True:
                        ops.append(asked.op)
                        asked = path.send(
                            asked.tensor[None] if asked.op == "all_gather" else asked.tensor
                        )
                except StopIteration:
                    pass
        return ops

    (ops,) = dgc.lockstep.run(worker, 1)
    assert set(ops) == {
        {"allreduce": "all_reduce", "allgather": "all_gather"}[peers.METHODS[name].collective]
    }


def over_whatever_there_is(names=tuple(EXCHANGING)):
    """Parameters after five steps with each method, its bytes, and the class that did it. After the third, all that
    has not been saved is gone.
    """
    g, found = gradients(5, 2), {}
    rank = dgc.transport.find().world.rank
    for name in names:
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        peer = Exchanging(torch.optim.SGD(parameters, LR), peers.METHODS[name].make)
        for step, ranks in enumerate(g):
            if step == 3:
                torch.save(peer.state_dict(), file := io.BytesIO())
                peer = Exchanging(torch.optim.SGD(parameters, LR), peers.METHODS[name].make)
                peer.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
            for p, own in zip(parameters, ranks[rank], strict=True):
                p.grad = own.clone()
            peer.step(last=step == 4)
        found[name] = (
            packing.flat(parameters).detach(),
            peer.bytes_sent,
            type(peer.method).__name__,
        )
    return found


def test_processes_do_as_ranks_in_one_process_and_powersgd_is_torchs_hook():
    processes = ran("torch", 2, [over_whatever_there_is], limit=150)[over_whatever_there_is]
    lockstep = dgc.lockstep.run(over_whatever_there_is, 2)
    for name in EXCHANGING:
        (first, sent, kind), (second, *_) = (process[name] for process in processes)
        here, counted, _ = lockstep[0][name]
        assert torch.equal(first, second) and sent == pytest.approx(counted), name
        torch.testing.assert_close(first, here, rtol=1e-4, atol=1e-5 * float(here.abs().max()))
        assert (kind == "TorchPowerSGD") == name.startswith("powersgd")


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """A net and images with which an epoch takes milliseconds."""
    labels = torch.arange(96) % 10
    # A class is a colour.
    colours = torch.stack([25 * labels, 25 * (9 - labels), 200 * (labels % 2)], 1)
    noise = torch.randint(0, 30, (96, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    images = (colours[:, :, None, None] + noise).to(torch.uint8)
    monkeypatch.setattr(
        cifar10, "loaded", lambda *_: ("digits", (images, labels), (images[:40], labels[:40]))
    )
    monkeypatch.setattr(
        cifar10,
        "resnet",
        lambda depth: torch.nn.Sequential(
            torch.nn.AvgPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(768, 12),
            torch.nn.BatchNorm1d(12),
            torch.nn.ReLU(),
            torch.nn.Linear(12, 10),
        ),
    )


def run(method, out, **options):
    train.main(
        **{
            "method": method,
            "data": "digits",
            "cache": None,
            "depth": 20,
            "epochs": 5,
            "batch_size": 8,
            "lr": None,
            "target": None,
            "weight_decay": None,
            "bf16": False,
            "virtual_workers": 3,
            "seed": 0,
            "threads": 1,
            "checkpoints": None,
            "resume": False,
            "out": out,
            **options,
        }
    )
    return json.loads(out.read_text())


@pytest.mark.parametrize("method", peers.METHODS)
def test_each_method_trains_and_goes_on_from_a_checkpoint(method, small, tmp_path):
    lr = 0.01 if peers.METHODS[method].lr < 0.01 else None  # within 16 steps
    whole = run(method, tmp_path / "whole.json", checkpoints=tmp_path / "epochs", lr=lr)
    losses = [epoch["loss"] for epoch in whole["history"]]
    assert losses[-1] < (1 if method.startswith("dgc") or method == "dropping" else 0.9) * losses[0]
    assert whole["workers"] == 3 and whole["method"] == method and whole["bytes_per_step"] > 0
    assert whole["ratio"] == pytest.approx(whole["dense_bytes_per_step"] / whole["bytes_per_step"])
    for rank in range(3):
        (tmp_path / "epochs" / train.FILE.format(5, rank)).unlink()  # killed in the last epoch
    again = run(
        method, tmp_path / "again.json", checkpoints=tmp_path / "epochs", resume=True, lr=lr
    )
    for own, other in zip(again["history"], whole["history"], strict=True):
        assert (
            own.pop("bytes_per_step") == pytest.approx(other.pop("bytes_per_step")) and own == other
        )


@pytest.mark.parametrize("method", ["diloco", "dense"])
def test_parameters_are_scored_with_statistics_of_their_own(method, small, monkeypatch, tmp_path):
    """Means over all images of what goes into the normalisation, and not those that a worker has seen on its way."""
    away = []

    def accuracy(model, images, labels, a):
        x = model[:3](cifar10.normalised(cifar10.loaded()[1][0])).detach()
        away.append(float((model[3].running_mean - x.mean(0)).abs().max() / x.std(0).min()))
        return 50.0

    monkeypatch.setattr(cifar10, "augmented", lambda images, flip, generator: images)
    monkeypatch.setattr(cifar10, "accuracy", accuracy)
    run(method, tmp_path / "a.json", epochs=2)
    assert max(away) < 1e-4


def test_bfloat16_is_another_training(small, tmp_path):
    exact = run("dense", tmp_path / "a.json", epochs=2)
    rounded = run(
        "dense", tmp_path / "b.json", epochs=2, bf16=True, checkpoints=tmp_path / "epochs"
    )
    assert rounded["settings"]["bf16"] is True and exact["settings"]["bf16"] is False
    assert rounded["history"][0]["loss"] != exact["history"][0]["loss"]
    assert rounded["history"][1]["loss"] == pytest.approx(exact["history"][1]["loss"], rel=0.05)
    with pytest.raises(typer.BadParameter, match="bf16 was True and is False"):
        run("dense", tmp_path / "c.json", epochs=2, checkpoints=tmp_path / "epochs", resume=True)


def test_a_checkpoint_of_another_training_is_refused(small, tmp_path):
    run("dense", tmp_path / "a.json", checkpoints=tmp_path / "epochs", epochs=1)
    with pytest.raises(
        typer.BadParameter, match=r"settings of the checkpoint .* seed was 0 and is 1"
    ):
        run(
            "dense",
            tmp_path / "b.json",
            checkpoints=tmp_path / "epochs",
            epochs=1,
            seed=1,
            resume=True,
        )
    with pytest.raises(typer.BadParameter, match=r"must be one of dense, fp16, .*, got sgd"):
        run("sgd", tmp_path / "b.json")


def test_an_epoch_counts_when_all_ranks_have_saved_it(small, tmp_path):
    whole = run("qsgd", tmp_path / "a.json", checkpoints=tmp_path / "epochs", epochs=3)
    (tmp_path / "epochs" / train.FILE.format(3, 2)).unlink()
    again = run("qsgd", tmp_path / "b.json", checkpoints=tmp_path / "epochs", epochs=3, resume=True)
    assert again["history"] == whole["history"]


# -- the table and the figure ------------------------------------------------------------------------------------------


def result(method, seed, accuracy, sent, **more):
    entry = peers.METHODS[method]
    return {
        "task": "cifar10",
        "dataset": "cifar10",
        "workers": 4,
        "epochs": 25,
        "steps_per_epoch": 390,
        "parameters": 1000,
        "method": method,
        "title": entry.title,
        "paper": entry.paper,
        "collective": entry.collective,
        "seed": seed,
        "accuracy": accuracy,
        "bytes_per_step": sent,
        "ratio": 6000 / sent,
        "exchanging": 1.0,
        "history": [{"epoch": 1, "accuracy": accuracy}],
        "settings": {"batch_size": 32},
        **more,
    }


def files(tmp_path, *results):
    for i, one in enumerate(results):
        (tmp_path / f"{i}.json").write_text(json.dumps(one))
    return [tmp_path / f"{i}.json" for i in range(len(results))]


def test_the_table_is_of_means_and_of_points_lost_with_the_same_seeds(tmp_path, capsys):
    table.main(
        files(
            tmp_path,
            result("dense", 0, 88.0, 6000.0),
            result("dense", 1, 90.0, 6000.0),
            result("qsgd", 1, 89.5, 1500.0),
            result("signsgd", 2, 80.0, 600.0),
            result("dgc-allgather", 1, 89.0, 120.0),
            result("dgc-allgather", 0, 88.5, 120.0),
        )
    )
    # By hand: DGC loses -0.5 and 1.0, a variance of 1.125 of one degree of freedom; Student's 95 % is at 6.314.
    # The bytes over 12.5 and 125 MB/s, and 50 us for each of the 6 rounds of a ring or the 3 of a gather.
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| dense | allreduce | 6,000 | 1.0 x | 89.00 % | +0.00 | seeds 0, 1 | - | 0.78 ms | - | 0.35 ms | - | - | - |",
        "| QSGD, 4 bits (Alistarh et al. 2017) | allgather | 1,500 | 4.0 x | 89.50 % | +0.50 | seed 1 | - | "
        "0.27 ms | - | 0.16 ms | - | - | - |",
        "| signSGD, majority vote (Bernstein et al. 2018) | allgather | 600 | 10.0 x | 80.00 % | - | seed 2 | - | "
        "0.20 ms | - | 0.15 ms | - | - | - |",
        "| DGC, allgather (Lin et al. 2018) | allgather | 120 | 50.0 x | 88.75 % | +0.25 ± 4.74 | seeds 0, 1 | - | "
        "0.16 ms | - | 0.15 ms | - | - | - |",
    ]


def test_intervals_are_of_what_is_left_when_methods_and_seeds_are_taken_out():
    # By hand: what is left is 2/3, 1/6 and -5/6, and the opposite; 7/3 over two degrees of freedom, and t is 2.920.
    by_hand = [[0.0, 0.0], [1.0, 2.0], [0.0, 3.0]]
    assert half_width(by_hand, 0.9) == pytest.approx(2.920 * (7 / 6) ** 0.5, rel=1e-3)
    assert half_width([[a + 5, b - 7] for a, b in by_hand], 0.9) == pytest.approx(
        half_width(by_hand, 0.9)
    )
    assert half_width([[0.0], [1.0]], 0.9) is half_width([[0.0, 0.0]], 0.9) is None
    random, covered = np.random.default_rng(0), []
    for _ in range(4000):  # a true difference of 1 is within, nine times of ten
        method = random.normal(0, 3, (6, 1))
        method[1] = method[0] + 1
        scores = method + random.normal(0, 2, (1, 2)) + random.normal(0, 0.5, (6, 2))
        covered.append(
            abs((scores[1] - scores[0]).mean() - 1) < half_width(scores - scores[0], 0.9)
        )
    assert np.mean(covered) == pytest.approx(0.9, abs=0.02)


def test_what_is_predicted_is_what_dgc_plan_predicts():
    shapes = ((300, 200), (200,))
    for rate, link in predict.LINKS.items():
        cluster = Cluster(4, 1, link, planning.INSIDE["pcie"])
        planned = planning.predict(
            shapes, cluster, planning.Method("ring", "float32"), 0.0, overlap=False
        )
        assert predict.seconds("allreduce", dense_bytes(60_200, 4), 4, rate) == pytest.approx(
            planned.exchange_seconds
        )
        message = planning.buckets(shapes, dgc.Config(0.99))
        (gathered,) = [bucket.sizes for bucket in message if bucket.sizes]
        planned = cost.seconds(cost.exchange("allgather", gathered, 4, 1), cluster)
        assert predict.seconds("allgather", 3 * gathered.message, 4, rate) == pytest.approx(planned)


@pytest.mark.parametrize("rate, bandwidth", [("100mbit", 12.5e6), ("1gbit", 125e6)])
def test_a_server_serves_one_after_the_other_and_few_exchanges_have_few_latencies(rate, bandwidth):
    assert predict.seconds("push and pull", 3e6, 4, rate) == pytest.approx(
        6 * (1e6 / bandwidth + 50e-6)
    )
    assert predict.seconds("allreduce", 3000, 4, rate, 0.002) == pytest.approx(
        3000 / bandwidth + 0.002 * 6 * 50e-6
    )
    assert predict.seconds("allreduce", 0, 1, rate) == 0


def test_the_front_is_of_those_that_nobody_beats_in_both():
    points = [(100, 0.5), (10, 2.0), (50, 2.5), (1000, 0.0), (2000, 0.0), (10, 3.0), (100, 0.4)]
    assert table.front(points) == [(10, 2.0), (100, 0.4), (1000, 0.0)]


def test_every_method_is_drawn_with_a_label_that_hides_no_other(tmp_path, monkeypatch):
    labels = []
    monkeypatch.setattr(
        table,
        "label",
        lambda figure, *rest, draw=table.label: (
            draw(figure, *rest),
            labels.extend(text.get_window_extent() for text in figure.axes[0].texts),
        ),
    )
    dense = result("dense", 0, 88.0, 6e6)
    table.main(
        files(
            tmp_path,
            dense,
            *(
                result(method, 0, 88 - i % 5, 5e6 / (i + 1) ** 2)
                for i, method in enumerate(peers.METHODS)
                if method != "dense"
            ),
        ),
        out=tmp_path / "peers.png",
    )
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG") and len(labels) == len(
        peers.METHODS
    )
    assert not any(a.overlaps(b) for i, a in enumerate(labels) for b in labels[:i])
    assert table.style("dense")[0] == table.GREY and table.style("dgc-reduce")[0] == table.BLUE


@pytest.mark.parametrize(
    "runs, error",
    [
        (
            [("dense", 0, {}), ("qsgd", 0, {"epochs": 5})],
            "epochs must be the same in all files, got 25, 5",
        ),
        ([("dense", 0, {}), ("dense", 0, {})], "each method must have a seed once, got twice"),
        ([("qsgd", 0, {})], "one of the files must be of --method dense"),
    ],
)
def test_what_cannot_be_compared_is_refused(runs, error, tmp_path):
    with pytest.raises(typer.BadParameter, match=error):
        table.load(
            files(
                tmp_path,
                *(result(method, seed, 88.0, 100.0, **more) for method, seed, more in runs),
            )
        )
