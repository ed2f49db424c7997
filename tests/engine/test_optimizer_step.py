"""Updates in the wrapped optimizer: its momentum, its decay, its state, and updates straight from the messages."""

import copy

import pytest
import torch
from laws import (
    DENSE,
    SPARSE,
    backward,
    difference,
    flat,
    in_lockstep,
    loss,
    model,
    rank,
    train,
    wrapped,
)
from torch import nn

import dgc


def test_earlier_state_comes_along():
    """Momentum and step hooks of the wrapped optimizer; the hooks fire once a step, around the whole of it."""
    calls = []

    def worker():
        network = model()
        inner = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        inner.register_step_post_hook(lambda *_: calls.append(rank()))
        loss(network, 0, 0).backward()  # alike on every rank
        inner.step()
        momentum = inner.state[network[6].weight]["momentum_buffer"].clone()
        calls.clear()
        optimizer = dgc.DistributedOptimizer(inner, network.named_parameters(), SPARSE)
        assert torch.equal(optimizer.state[network[6].weight]["momentum_buffer"], momentum)
        optimizer.zero_grad()
        (loss(network, rank(), 1) * 0).backward()
        optimizer.step()  # the first compressed one
        u = optimizer.residual_state_dict()["u"]["6.weight"]
        assert torch.equal(u[u != 0], 0.9 * momentum[u != 0]) and (u != 0).float().mean() > 0.8
        assert not optimizer.state[network[6].weight]["momentum_buffer"].any()
        assert optimizer.state[network[6].bias]["momentum_buffer"].any()

    in_lockstep(worker)
    assert sorted(calls) == [0, 1]


def contents(optimizer):
    return {
        key: {name: type(value) for name, value in state.items()}
        for key, state in optimizer.state_dict()["state"].items()
    }


def test_state_is_complete_from_the_start():
    """What hvd.broadcast_optimizer_state needs: the same keys on every rank, whatever was loaded where."""

    def worker():
        for momentum, decay in ((0.0, 0.0), (0.0, 0.1), (0.9, 0.0), (0.9, 0.1)):
            network, optimizer = wrapped(
                settings={"lr": 0.1, "momentum": momentum, "weight_decay": decay}
            )
            keys = contents(optimizer)
            assert len(keys) == len(list(network.parameters()))
            train(range(2), None, network, optimizer)
            assert contents(optimizer) == keys

    in_lockstep(worker)


def test_momentum_is_read_at_every_step():
    def worker():
        network, optimizer = wrapped(DENSE, momentum=0.9)
        for step, m in enumerate((0.9, 0.0, 0.5, 0.99)):
            optimizer.param_groups[0]["momentum"] = m
            optimizer.zero_grad()
            backward(network, step)
            optimizer.step()
        assert optimizer.param_groups[0]["momentum"] == 0.99
        return flat(network)

    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for step, m in enumerate((0.9, 0.0, 0.5, 0.99)):
        optimizer.param_groups[0]["momentum"] = m
        optimizer.zero_grad()
        for r in range(2):
            (loss(network, r, step) / 2).backward()
        optimizer.step()
    assert difference(in_lockstep(worker)[0], flat(network)) < 1e-6


def test_the_settings_are_back_after_an_error_in_the_step():
    def worker():
        network, optimizer = wrapped(settings={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1})
        groups = optimizer.param_groups
        backward(network)
        optimizer.synchronize()
        groups[0]["lr"] = "fast"
        with pytest.raises(ValueError, match="fast"), optimizer.skip_synchronize():
            optimizer.step()
        assert (
            optimizer.param_groups is groups
            and groups[0]["momentum"] == 0.9
            and groups[0]["weight_decay"] == 0.1
        )

    in_lockstep(worker)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("op", [dgc.Average, dgc.Sum])
def test_decay_and_earlier_momentum_in_each_direction(maximize, op):
    """Against torch.optim.SGD: averaged or summed, minimised or maximised; and the decay switched
    off after a while, whose momentum rings out.
    """
    settings = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "maximize": maximize}

    def run(network, optimizer, ranks, factor):
        for step in range(6):
            if step == 4:
                optimizer.param_groups[0]["weight_decay"] = 0.0
            optimizer.zero_grad()
            for r in ranks:
                (loss(network, r, step) * factor).backward()
            optimizer.step()
        return flat(network)

    def earlier():
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), **settings)
        loss(network, 0, 99).backward()
        optimizer.step()
        return network, optimizer

    def worker():
        network, optimizer = earlier()
        optimizer = dgc.DistributedOptimizer(
            optimizer, network.named_parameters(), dgc.Config(sparsity=0.0), op=op
        )
        return run(network, optimizer, [rank()], 1.0)

    expected = run(*earlier(), range(2), 0.5 if op == dgc.Average else 1.0)
    assert difference(in_lockstep(worker)[0], expected) < 1e-6


def test_decay_in_any_order_of_dimensions(monkeypatch):
    """Channels last, or transposed: to the bit as a contiguous parameter, and by the compiled loop."""
    pytest.importorskip(
        "dgc.compression.kernels.cpu", reason="numba is not installed", exc_type=ImportError
    )
    monkeypatch.setattr("dgc.compression.kernels.plain.decay", None)
    start = torch.randn(8, 9, 5, 6, generator=torch.Generator().manual_seed(0))

    def worker():
        parameters = [
            nn.Parameter(start.clone(memory_format=order))
            for order in (torch.contiguous_format, torch.channels_last)
        ]
        parameters.append(nn.Parameter(start.transpose(0, 3).contiguous().transpose(0, 3)))
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1)
        )
        for _ in range(3):
            for p in parameters:
                p.grad = torch.zeros_like(p)
            optimizer.step()
        return [p.detach() for p in parameters]

    contiguous, *others = in_lockstep(worker)[0]
    assert difference(contiguous, start) > 0.01 and all(
        torch.equal(other, contiguous) for other in others
    )


def test_torch_flattens_the_state():
    """As its distributed checkpoints are asked to, and it comes back."""
    from torch.distributed.checkpoint import state_dict as dcp

    options = dcp.StateDictOptions(flatten_optimizer_state_dict=True)

    def worker():
        network, optimizer = train(range(2), SPARSE, weight_decay=0.0)
        assert all(
            value is not None for state in optimizer.state.values() for value in state.values()
        )
        saved = dcp.get_optimizer_state_dict(network, optimizer, options=options)
        before = copy.deepcopy(optimizer.state_dict())
        dcp.set_optimizer_state_dict(network, optimizer, copy.deepcopy(saved), options=options)
        after = optimizer.state_dict()
        assert (
            after["param_groups"][0]["dgc_step"] == 2
            and before["state"].keys() == after["state"].keys()
        )
        assert all(
            torch.equal(after["state"][i][key], x)
            for i, s in before["state"].items()
            for key, x in s.items()
        )

    in_lockstep(worker)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_may_change_their_dtype(dtype):
    """As with torch's own SGD, whose buffers stay as they were. Compiled loops would write past the decay's buffer."""

    def trained(wrap):
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        if wrap:
            optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), DENSE)
        for step in range(6):
            if step == 3:
                network.to(dtype)
            optimizer.zero_grad()
            loss(network, 0, step, dtype if step >= 3 else torch.float32).backward()
            optimizer.step()
        return flat(network)

    expected, bound = trained(wrap=False), 1e-6 if dtype == torch.float64 else 0.01
    assert all(
        difference(ours, expected) < bound for ours in in_lockstep(lambda: trained(wrap=True))
    )


def test_what_is_frozen_is_not_decayed_either():
    """Where zero_grad(set_to_none=False) leaves it a gradient of zeros."""

    def worker():
        network, optimizer = train(range(3), SPARSE, weight_decay=0.1)
        weight = network[6].weight.requires_grad_(False)
        before = weight.detach().clone()
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            backward(network, step)
            optimizer.step()
        return torch.equal(weight, before)

    assert all(in_lockstep(worker))
