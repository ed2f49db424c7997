"""The laws, over real Horovod and torch.distributed processes and in lockstep.

All cases of one launcher and size run in one launch, which the tests then look at. In lockstep a
case runs when a test looks at it.
"""

import functools
import io
import itertools

import pytest
import torch
from launch import ran
from laws import (
    CONFIGS,
    difference,
    flat,
    loss,
    model,
    reference,
    scaled,
    train,
)
from torch import nn

import dgc
from dgc.transport import find

ADAMW = {"AdamW": {}, "AdamW, reduced": {"exchange": "reduce"}, "AdamW, rounded": {"value_bits": 8}}
NAMES = (*CONFIGS, *ADAMW)
# Their messages depend on the number of ranks, so make test has them with eight ranks, too.
OF_EIGHT = (
    "default",
    "dense fallback",
    "rounded",
    "reduced",
    "reduced, few entries",
    "unmasked, reduced, clipped",
    "AdamW, reduced",
)


def trajectories():
    """Name -> :func:`trajectory`, with each configuration."""
    return {name: trajectory(name) for name in NAMES}


def trajectory(name):
    """Twelve steps with one configuration: parameters, report, residuals."""
    if name in CONFIGS:
        network, optimizer = train(range(12), CONFIGS[name], nesterov=name == "clipped")
    else:
        network, config = model(), dgc.Config(dgc.dense_until(3, then=0.95), **ADAMW[name])
        inner = torch.optim.AdamW(network.parameters(), 1e-3)
        optimizer = dgc.DistributedOptimizer(inner, network.named_parameters(), config)
        train(range(12), None, network, optimizer)
    return flat(network), optimizer.report(), optimizer.residual_state_dict()


def two_groups(network):
    """Groups with settings of their own: momentum, Nesterov, weight decay, learning rate."""
    parameters = list(network.parameters())
    return [
        {
            "params": parameters[:3],
            "lr": 0.02,
            "momentum": 0.8,
            "nesterov": True,
            "weight_decay": 0.1,
        },
        {"params": parameters[3:5], "momentum": 0.0, "weight_decay": 0.05},
        {"params": parameters[5:], "nesterov": False},
    ]


def scheduled(optimizer):
    """A schedule that changes the learning rate and the momentum at every step."""
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        [0.1, 0.05, 0.1],
        total_steps=25,
        cycle_momentum=True,
        base_momentum=0.7,
        max_momentum=0.95,
    )


def dense_equivalence():
    """Density 1, twenty steps: heavy-ball, Nesterov, groups with a schedule, and on top of earlier momentum."""
    results = {}
    dense = dgc.Config(sparsity=0.0)
    for nesterov in (False, True):
        results[f"nesterov {nesterov}"] = flat(train(range(20), dense, nesterov=nesterov)[0])
    network = model()
    optimizer = torch.optim.SGD(two_groups(network), lr=0.05, momentum=0.9, weight_decay=1e-2)
    optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dense)
    schedule, rank = scheduled(optimizer), find().world.rank
    for step in range(20):
        optimizer.zero_grad()
        loss(network, rank, step).backward()
        optimizer.step()
        schedule.step()
    results["groups"] = flat(network)
    network = model()
    inner = torch.optim.SGD(
        network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True
    )
    for step in range(5):  # alike on every rank
        inner.zero_grad()
        loss(network, 0, step).backward()
        inner.step()
    optimizer = dgc.DistributedOptimizer(inner, network.named_parameters(), dense)
    results["earlier momentum"] = flat(train(range(5, 15), None, network, optimizer)[0])
    return results


def resume():
    """Stops after six steps, saves, loads into new objects and goes on; against never having stopped."""
    return all(_resumed(exchange) for exchange in ("allgather", "reduce"))


def _resumed(exchange):
    config = dgc.Config(sparsity=dgc.warmup(2, steps_per_epoch=4, end=0.99), exchange=exchange)
    straight, whole = train(range(12), config, nesterov=True)
    network, optimizer = train(range(6), config, nesterov=True)
    file = io.BytesIO()
    torch.save(
        [network.state_dict(), optimizer.state_dict(), optimizer.residual_state_dict()], file
    )
    file.seek(0)
    states = torch.load(file, weights_only=True)
    network = model(seed=5)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.5, nesterov=True)
    optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config)
    network.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    optimizer.load_residual_state_dict(states[2])
    train(range(6, 12), config, network, optimizer)
    same = all(
        torch.equal(a, b)
        for letter in "uv"
        for a, b in zip(
            whole.residual_state_dict()[letter].values(),
            optimizer.residual_state_dict()[letter].values(),
            strict=True,
        )
    )
    return torch.equal(flat(straight), flat(network)) and same


def unused_somewhere():
    """A branch that only even ranks use, and one that none does."""
    torch.manual_seed(1)
    network = nn.ModuleDict({name: nn.Linear(40, 40) for name in ("all", "some", "none")})
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    optimizer = dgc.DistributedOptimizer(
        optimizer, network.named_parameters(), dgc.Config(sparsity=0.5)
    )
    rank = find().world.rank
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        y = network["all"](x)
        (y + network["some"](x) if rank % 2 == 0 else y).square().mean().backward()
        optimizer.step()
    return flat(network)


def sparse_gradients():
    """An embedding with sparse gradients, gathered as they are and as dense ones."""
    results = {}
    for as_dense in (False, True):
        torch.manual_seed(2)
        network = nn.Sequential(nn.Embedding(60, 30, sparse=True), nn.Linear(30, 50))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        optimizer = dgc.DistributedOptimizer(
            optimizer,
            network.named_parameters(),
            dgc.Config(sparsity=0.0),
            sparse_as_dense=as_dense,
        )
        rank = find().world.rank
        for step in range(3):
            optimizer.zero_grad()
            words = torch.randint(
                0, 60, (4 + rank,), generator=torch.Generator().manual_seed(10 * step + rank)
            )
            network(words).square().mean().backward()
            optimizer.step()
        results[as_dense] = flat(network), network[0].weight.grad.is_sparse
    return results


def broadcast():
    """dgc.broadcast_parameters from the last rank, of a model and of a list."""
    world = find().world
    network = model(seed=world.rank)
    dgc.broadcast_parameters(network.state_dict(), root_rank=world.size - 1)
    number = torch.tensor([world.rank])
    dgc.broadcast_parameters([number], root_rank=1)
    kinds = (
        torch.bfloat16,
        torch.bool,
        torch.int16,
        torch.uint16,
        torch.complex64,
        torch.float8_e4m3fn,
    )
    others = [torch.full((3,), float(world.rank)).to(kind) for kind in kinds] + [
        torch.empty(0, 3),
        torch.tensor(True),
    ]
    dgc.broadcast_parameters(others, root_rank=1)
    return flat(network), number.item(), [other.to(torch.complex64).tolist() for other in others]


def half_precision():
    """Parameters of other dtypes, with decay: at density 1 how far they are from torch's SGD on the mean of all ranks'
    gradients, and how far both have moved; sparse ones, to be alike on all ranks.
    """
    rank, size, results = find().world.rank, find().world.size, {}

    def made(dtype):
        torch.manual_seed(3)
        network = nn.Sequential(nn.Linear(60, 70), nn.Tanh(), nn.Linear(70, 5)).to(dtype)
        return network, torch.optim.SGD(
            network.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5
        )

    def gradients(network, step, of):
        network.zero_grad()
        x = torch.randn(8, 60, generator=torch.Generator().manual_seed(10 * step + of)).to(
            network[0].weight.dtype
        )
        network(x).float().square().mean().backward()
        return [p.grad.clone() for p in network.parameters()]

    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        expected, optimizer = made(dtype)
        before = flat(expected)
        for step in range(5):
            every = [gradients(expected, step, of) for of in range(size)]
            for p, *parts in zip(expected.parameters(), *every, strict=True):
                p.grad = (sum(part.double() for part in parts) / size).to(dtype)
            optimizer.step()
        ends = []
        for sparsity in (0.0, 0.9):
            network, optimizer = made(dtype)
            optimizer = dgc.DistributedOptimizer(
                optimizer, network.named_parameters(), dgc.Config(sparsity)
            )
            for step in range(5):
                gradients(network, step, rank)
                optimizer.step()
            ends.append(flat(network))
        expected = flat(expected)
        results[str(dtype)] = (
            ends[1],
            (ends[0] - expected).norm().item(),
            (expected - before).norm().item(),
        )
    return results


def not_finite():
    """Rank 1 has a NaN: every rank is told."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    optimizer = dgc.DistributedOptimizer(
        optimizer, network.named_parameters(), dgc.Config(sparsity=0.9)
    )
    rank = find().world.rank
    if rank == 1:
        bad = torch.zeros(40, 144).index_fill(0, torch.tensor(3), torch.nan)
        network[6].weight.register_hook(lambda g: g + bad)
    loss(network, rank, 0).backward()
    try:
        optimizer.step()
    except FloatingPointError as error:
        return str(error)
    return "no error"


COMMON = (
    trajectories,
    dense_equivalence,
    resume,
    unused_somewhere,
    sparse_gradients,
    broadcast,
    half_precision,
    scaled,
    not_finite,
)
MORE = ("horovod", 3), ("torch", 2)
IN_PROCESSES = [
    ("horovod", 2),
    ("torch", 3),
    *(pytest.param(place, marks=pytest.mark.long) for place in MORE),
]
PLACES = [
    ("lockstep", 2),
    *(pytest.param(("lockstep", size), marks=pytest.mark.long) for size in (3, 8)),
    *IN_PROCESSES,
]


@functools.cache
def in_lockstep(size, function, *arguments):
    torch.manual_seed(0)
    return dgc.lockstep.run(functools.partial(function, *arguments), size)


def results_of(place, function):
    """What each rank returned. Processes of make long import for themselves, which takes long."""
    launcher, size = place
    if launcher == "lockstep":
        return in_lockstep(size, function)
    return ran(launcher, size, COMMON, fresh=place in MORE)[function]


def trajectory_of(place, name):
    """What each rank returned of one configuration. In lockstep no other one runs."""
    if place[0] == "lockstep":
        return in_lockstep(place[1], trajectory, name)
    return [rank[name] for rank in results_of(place, trajectories)]


def by_place(place):
    return f"{place[0]}-{place[1]}" if isinstance(place, tuple) else place


everywhere = pytest.mark.parametrize("place", PLACES, ids=by_place)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        *itertools.product([("lockstep", 2), ("horovod", 2), ("torch", 3)], NAMES),
        *(
            pytest.param(("lockstep", 8), name, marks=() if name in OF_EIGHT else pytest.mark.long)
            for name in NAMES
        ),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in itertools.product((("lockstep", 3), *MORE), NAMES)
        ),
    ],
    ids=by_place,
)
def test_agreement(place, name):
    """Law 2: parameters bit-identical on every rank; and residuals are each rank's own."""
    results = trajectory_of(place, name)
    assert all(torch.equal(parameters, results[0][0]) for parameters, _, _ in results)
    v = [torch.cat([x.flatten() for x in residuals["v"].values()]) for _, _, residuals in results]
    assert all(x.any() and not torch.equal(x, v[0]) for x in v[1:])
    assert all(report.steps == 12 and report.residual_norm > 0 for _, report, _ in results)


@pytest.mark.parametrize("place", IN_PROCESSES, ids=by_place)
@pytest.mark.parametrize("name", NAMES)
def test_transports_give_the_same(place, name):
    """Law 7, beside lockstep. With two ranks to the bit; with three, the order in which a ring adds up is its own, and
    where a gradient is all but zero Adam divides a rounding by itself.
    """
    got, expected = (trajectory_of(where, name)[0][0] for where in (place, ("lockstep", place[1])))
    # A level of few bits may turn on the last bit of a sum.
    bound = 1e-2 if name == "rounded" else 1e-3 if name in ADAMW else 1e-5
    assert torch.equal(got, expected) if place[1] == 2 else difference(got, expected) < bound


def test_nodes_add_up_at_owners_as_workers_do():
    """Ranks of a node with the same gradients are one worker."""

    def worker(by_node):
        weight, rank = torch.nn.Parameter(torch.zeros(60, 50)), dgc.lockstep.current().world.rank
        config = dgc.Config(0.999, exchange="reduce", hierarchical=by_node)
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0, momentum=0.9), [("a", weight)], config
        )
        for step in range(9):
            draw = torch.Generator().manual_seed(100 * step + (rank // 2 if by_node else rank))
            weight.grad = torch.randn(weight.shape, generator=draw) ** 3
            optimizer.step()
        return weight.detach()

    expected = dgc.lockstep.run(lambda: worker(False), 4)[0]
    assert expected.any()
    for got in dgc.lockstep.run(lambda: worker(True), 8, node_size=2):
        assert torch.equal(got, expected)


@everywhere
def test_dense_equivalence(place):
    """Law 3: at density 1, torch.optim.SGD on the averaged gradient."""
    results, size = results_of(place, dense_equivalence)[0], place[1]
    for nesterov in (False, True):
        expected = flat(reference(range(20), size, nesterov=nesterov)[0])
        assert difference(results[f"nesterov {nesterov}"], expected) < 1e-6
    network = model()
    optimizer = torch.optim.SGD(two_groups(network), lr=0.05, momentum=0.9, weight_decay=1e-2)
    schedule = scheduled(optimizer)
    for step in range(20):
        optimizer.zero_grad()
        for rank in range(size):
            (loss(network, rank, step) / size).backward()
        optimizer.step()
        schedule.step()
    assert difference(results["groups"], flat(network)) < 1e-6
    network = model()
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True
    )
    for step in range(5):
        optimizer.zero_grad()
        loss(network, 0, step).backward()
        optimizer.step()
    assert (
        difference(
            results["earlier momentum"], flat(reference(range(5, 15), size, network, optimizer)[0])
        )
        < 1e-6
    )


@everywhere
def test_resume(place):
    """Law 6: to the bit, on every rank, u and v included."""
    assert results_of(place, resume) == [True] * place[1]


@everywhere
def test_parameters_used_on_some_ranks_only(place):
    results = results_of(place, unused_somewhere)
    assert all(torch.equal(result, results[0]) for result in results)


@everywhere
def test_sparse_gradients(place):
    results, size = results_of(place, sparse_gradients), place[1]
    torch.manual_seed(2)
    network = torch.nn.Sequential(torch.nn.Embedding(60, 30), torch.nn.Linear(30, 50))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(size):
            words = torch.randint(
                0, 60, (4 + rank,), generator=torch.Generator().manual_seed(10 * step + rank)
            )
            (network(words).square().mean() / size).backward()
        optimizer.step()
    for as_dense in (False, True):
        for parameters, is_sparse in (rank[as_dense] for rank in results):
            assert is_sparse
            assert torch.equal(parameters, results[0][as_dense][0])
            assert difference(parameters, flat(network)) < 1e-6


@everywhere
def test_broadcast_parameters(place):
    results = results_of(place, broadcast)
    expected = flat(model(seed=place[1] - 1))
    assert all(
        torch.equal(parameters, expected) and number == 1 for parameters, number, _ in results
    )
    assert all(others == [[1.0] * 3] * 6 + [[], 1.0] for _, _, others in results)


@everywhere
def test_other_dtypes(place):
    results = results_of(place, half_precision)
    for dtype, (parameters, apart, moved) in results[0].items():
        assert moved > 1 and apart < {"torch.float64": 1e-6}.get(dtype, 0.02) * moved
        assert all(torch.equal(rank[dtype][0], parameters) for rank in results)


@everywhere
def test_an_overflow_on_one_rank_is_a_step_that_none_takes(place):
    """The loss scale of 2^10 doubles after two good steps, and is halved by the bad sixth one, alike on all ranks."""
    results = results_of(place, scaled)
    expected = [2.0**n for n in (10, 11, 11, 12, 12, 11, 11, 12)]
    assert all(torch.equal(parameters, results[0][0]) for parameters, _, _ in results)
    assert all((scales, skipped) == (expected, 1) for _, scales, skipped in results)


@everywhere
def test_a_gradient_that_is_not_finite_is_told_to_all(place):
    assert (
        results_of(place, not_finite)
        == ["rank 1 has a gradient that is not finite, in: 6.weight"] * place[1]
    )
