"""Parameters: their buckets, their memory, and models of any shape."""

import copy
import warnings

import pytest
import torch
from laws import DENSE, SPARSE, backward, difference, flat, in_lockstep, rank, train, wrapped
from torch import nn

import dgc
from dgc.engine.parameters import pack


def test_buckets_follow_the_backward_pass_and_never_mix_kinds():
    network = nn.Sequential(
        *[nn.Linear(1200, 1200) for _ in range(6)], nn.Linear(1200, 40).double()
    )
    parameters = list(network.parameters())
    names = {p: name for name, p in network.named_parameters()}
    packed = pack(parameters, names, None, 1024)
    assert sorted(name for group, _ in packed for name in group) == sorted(names.values())
    for _, together in packed:
        assert len({(p.dtype, p.dim() > 1) for p in together}) == 1
    compressed = [
        name
        for group, together in packed
        if together[0].dim() > 1 and together[0].dtype == torch.float32
        for name in group
    ]
    assert compressed == [f"{i}.weight" for i in (5, 4, 3, 2, 1, 0)]
    by_list = pack(parameters, names, [[parameters[2], parameters[0]], [parameters[4]]], 1024)
    assert [group for group, _ in by_list][:2] == [["1.weight", "0.weight"], ["2.weight"]]
    by_number = pack(parameters, names, 7, 1024)
    assert len({frozenset(group) for group, _ in by_number}) == 14


@pytest.mark.parametrize(
    "config",
    [SPARSE, DENSE, dgc.Config(sparsity=0.9, min_numel=10**6, value_bits=8)],
    ids=["p.grad", "density 1", "rounded"],
)
def test_any_order_of_dimensions(config):
    """Channels last, transposed, with gradients in that order and in another: to the bit as if all were contiguous.
    What is rounded is so with its neighbours in memory, and so nearly.
    """

    def draw(seed, shape=(8, 9, 25, 6)):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    orders = {
        "contiguous": lambda x: x.contiguous(),
        "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
        "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    }

    def train(of_parameter, of_gradient, steps=range(4), start=None, residuals=None, state=None):
        p = nn.Parameter(of_parameter(draw(0) if start is None else start))
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD([p], 0.1, momentum=0.9), [("p", p)], config
        )
        if state is not None:
            optimizer.load_state_dict(state)
            optimizer.load_residual_state_dict(residuals)
        for step in steps:
            p.grad = of_gradient(draw(1 + 2 * step + rank()))
            optimizer.step()
        return p.detach().clone(), optimizer.residual_state_dict(), optimizer.state_dict()

    def worker():
        plain = train(orders["contiguous"], orders["contiguous"])
        others = [train(orders[a], orders[b]) for a in orders for b in orders]
        half = train(orders["channels last"], orders["channels last"], range(2))
        others.append(train(orders["transposed"], orders["transposed"], range(2, 4), *half))
        return plain, others

    plain, others = in_lockstep(worker)[0]
    assert difference(plain[0], draw(0)) > 0.01
    for parameter, residuals, _ in others:
        assert all(residuals[letter].keys() == plain[1][letter].keys() for letter in "uv")
        if config.value_bits == 8:
            assert difference(parameter, plain[0]) < 3e-3
            continue
        assert torch.equal(parameter, plain[0])
        for letter in "uv":
            assert all(
                torch.equal(x, plain[1][letter][name]) for name, x in residuals[letter].items()
            )


def test_memory_formats_that_differ_between_ranks_are_refused():
    def worker():
        network, optimizer = wrapped(network=nn.Sequential(nn.Conv2d(8, 20, 5)))
        if rank() == 1:
            network.to(memory_format=torch.channels_last)
            network, optimizer = wrapped(network=network)
        network[0].weight.grad = torch.ones_like(network[0].weight)
        optimizer.step()

    with pytest.raises(
        ValueError,
        match=r"the ranks differ in the memory format of the parameters, when the optimizer "
        r"was made. Rank 1 has: 0.weight: its dimensions in the order \(0, 2, 3, 1\)",
    ):
        in_lockstep(worker)


def test_tied_weights_and_channels_last():
    def worker():
        torch.manual_seed(0)
        tied = nn.Linear(50, 50)
        network = nn.Sequential(
            nn.Conv2d(3, 50, 3).to(memory_format=torch.channels_last),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            tied,
            nn.Tanh(),
            tied,
        )
        network, optimizer = wrapped(SPARSE, network)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(step * 2 + rank()))
            network(x.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
        assert network[0].weight.grad.stride() == network[0].weight.stride()
        return flat(network)

    assert torch.equal(*in_lockstep(worker))


def test_a_refused_param_group_leaves_nothing_behind():
    def worker():
        network, optimizer = wrapped()
        for bad in (
            {"params": [nn.Parameter(torch.zeros(3))], "dampening": 0.5},
            {"params": [nn.Parameter(torch.zeros(3, dtype=torch.float8_e5m2))]},
        ):
            with pytest.raises((ValueError, TypeError), match="must be"):
                optimizer.add_param_group(bad)
            assert len(optimizer.param_groups) == 1
        twice = nn.Parameter(torch.zeros(3))
        with warnings.catch_warnings(), pytest.raises(ValueError, match="each parameter once"):
            warnings.simplefilter("ignore")  # torch's
            optimizer.add_param_group({"params": [twice, twice]})
        assert len(optimizer.param_groups) == 1
        train(range(2), None, network, optimizer)
        backward(network)
        with pytest.raises(
            RuntimeError, match=r"add_param_group\(\) must be called after step\(\)"
        ):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(TypeError, match=r"must be a copy\.deepcopy"):
            copy.copy(optimizer)
        optimizer.step()

    in_lockstep(worker)


@pytest.mark.parametrize(
    "shapes",
    [
        [(40, 50)],
        [(1, 1)],
        [(0, 7), (3,), (30, 40)],
        [(0,), (1,), ()],
        [(2 + i % 9, 3 + i % 5) for i in range(500)],
        pytest.param([(2 + i % 9, 3 + i % 5) for i in range(5000)], marks=pytest.mark.long),
    ],
    ids=lambda shapes: str(len(shapes)),
)
@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_models_of_any_number_and_size_of_parameters(shapes, sparsity):
    """What all ranks have accumulated is what was applied and what is pending; at density 1 nothing is."""

    def gradients(rank, step):
        generator = torch.Generator().manual_seed(10 * step + rank)
        return [torch.randn(shape, generator=generator) for shape in shapes]

    def worker():
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        named = [(f"p{i}", p) for i, p in enumerate(parameters)]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        optimizer = dgc.DistributedOptimizer(optimizer, named, dgc.Config(sparsity, min_numel=0))
        for step in range(3):
            for p, g in zip(parameters, gradients(rank(), step), strict=True):
                p.grad = g
            optimizer.step()
        return parameters, optimizer.residual_state_dict()["v"]

    (one, v), (other, w) = in_lockstep(worker)
    total = [
        sum(gs)
        for gs in zip(*(gradients(r, step) for r in range(2) for step in range(3)), strict=True)
    ]
    for i, (p, q) in enumerate(zip(one, other, strict=True)):
        pending = (v[f"p{i}"] + w[f"p{i}"]) / 2 if f"p{i}" in v else torch.zeros_like(p)
        assert torch.equal(p, q) and torch.allclose(p, pending - total[i] / 2, rtol=1e-4, atol=1e-5)
        assert sparsity or not pending.any()


def test_more_entries_than_positions_are_refused_or_divided():
    """2^31 and more; on the meta device, as they would not fit into memory."""
    huge = nn.Parameter(torch.empty(1 << 16, 1 << 15, device="meta"))

    def worker():
        with pytest.raises(
            ValueError, match=r"must have at most 2147483647 entries, .* with 2147483648"
        ):
            dgc.DistributedOptimizer(torch.optim.SGD([huge], lr=0.1), [("huge", huge)])

    in_lockstep(worker)
    large = [nn.Parameter(torch.empty(1 << 15, 1 << 15, device="meta")) for _ in range(3)]
    packed = pack(large, {p: str(i) for i, p in enumerate(large)}, 1, 0)
    assert [names for names, _ in packed] == [["2"], ["1"], ["0"]]


def test_param_groups_in_another_order_are_refused():
    """The first one has the step."""

    def worker():
        network = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(
            [{"params": [network.weight]}, {"params": [network.bias], "lr": 0.01}], 0.1
        )
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(0.9))
        optimizer.param_groups.reverse()
        with pytest.raises(RuntimeError, match="param_groups must stay in their order"):
            network(torch.ones(2, 64)).sum().backward()
            optimizer.step()

    dgc.lockstep.run(worker, 2)


@pytest.mark.parametrize(
    "sparsity, width", [(0.0, 8), (0.5, 8), (0.5, 4)]
)  # the last is small, and travels dense
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_gradient_of_a_scripts_own_in_another_memory_format_keeps_ranks_alike(
    dtype, sparsity, width
):
    """On one rank only. An optimizer that takes it as it lies rounds in another order than on the other ranks."""

    def train():
        weight = nn.Parameter(
            torch.randn(width, 8, 5, 5, generator=torch.Generator().manual_seed(0))
            .to(dtype)
            .to(memory_format=torch.channels_last)
        )
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD([weight], 0.1), [("weight", weight)], dgc.Config(sparsity)
        )
        for _ in range(3):
            optimizer.zero_grad()
            if dgc.lockstep.current().world.rank == 0:
                weight.grad = torch.randn(
                    width, 8, 5, 5, generator=torch.Generator().manual_seed(1)
                ).to(dtype)
            optimizer.step()
            assert weight.grad.stride() == weight.stride()
        return weight.detach()

    first, second = dgc.lockstep.run(train, 2)
    assert torch.equal(first, second)
