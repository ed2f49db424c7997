"""The road of one step, in lockstep."""

from dataclasses import replace

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
    reference,
    train,
    wrapped,
)
from pairwise import pairwise

import dgc
from dgc.compression import kernels
from dgc.compression.kernels import plain
from dgc.engine.engine import engine_of


@pairwise(
    config=[
        {},
        {"exchange": "reduce"},
        {"value_bits": 8},
        {"clip_norm": 0.5, "nonfinite": "skip"},
        {"hierarchical": True},
    ],
    kind=[torch.optim.SGD, torch.optim.AdamW],
    fused=[True, False],
)
def test_a_default_device_of_the_users_is_not_where_we_compute(config, kind, fused, monkeypatch):
    """On "meta", where nothing can be computed."""
    if not fused:
        monkeypatch.setattr(kernels, "current", lambda *_: plain)

    def worker(device):
        network = model()
        optimizer = kind(network.parameters(), lr=1e-3)
        with torch.device(device):
            optimizer = dgc.DistributedOptimizer(
                optimizer,
                network.named_parameters(),
                dgc.Config(dgc.dense_until(2, then=0.9), **config),
            )
        for step in range(4):
            value = loss(network, rank(), step)
            with torch.device(device):
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
        with torch.device(device):
            optimizer.flush()
            assert optimizer.report().steps == 4
        return flat(network)

    node = 2 if "hierarchical" in config else 1
    here, there = (dgc.lockstep.run(lambda on=on: worker(on), 4, node) for on in ("cpu", "meta"))
    assert all(map(torch.equal, here, there))


def test_messages_leave_during_the_backward_pass():
    def worker():
        # The first step begins with a question to all ranks.
        network, optimizer = train(range(1), SPARSE, groups=3)
        begun = []
        transport = engine_of(optimizer).settings.transport
        start = transport.start
        transport.start = lambda collective, name: (begun.append(name), start(collective, name))[1]
        seen = []
        # The last gradient of the backward pass.
        network[0].weight.register_hook(lambda g: seen.append(len(begun)))
        backward(network)
        assert 0 < seen[0] < len(begun)
        optimizer.step()
        return begun

    first, second = in_lockstep(worker)
    assert first == second


@pytest.mark.parametrize("passes", [1, 3])
def test_backward_passes_add_up(passes):
    def worker():
        network, optimizer = wrapped(DENSE, backward_passes_per_step=1)
        optimizer.set_backward_passes_per_step(passes)
        for step in range(4):
            optimizer.zero_grad()
            for i in range(passes):
                backward(network, passes * step + i)
            optimizer.step()
        return flat(network)

    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        for i in range(passes):
            for r in range(2):
                (loss(network, r, passes * step + i) / 2).backward()
        optimizer.step()
    assert difference(in_lockstep(worker)[0], flat(network)) < 1e-6


def test_a_number_of_passes_is_for_the_next_step_where_a_gradient_is_complete():
    def worker():
        a, b = (torch.nn.Parameter(torch.zeros(50, 50)) for _ in range(2))
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD([a, b], 1.0), [("a", a), ("b", b)], DENSE, groups=1
        )
        moved = []
        for passes in (1, 2):
            optimizer.zero_grad()
            for _ in range(passes):
                (5 * a.sum()).backward()
                optimizer.set_backward_passes_per_step(2)
                (5 * b.sum()).backward()
            optimizer.step()
            moved.append((a.unique().tolist(), b.unique().tolist()))
        return moved

    assert in_lockstep(worker) == [[([-5.0], [-5.0]), ([-15.0], [-15.0])]] * 2


def test_what_could_not_be_sent_is_in_v():
    """The transport refuses a message, as Horovod one that is too long."""

    def worker(failing):
        p = torch.nn.Parameter(torch.zeros(50, 50))
        config = replace(SPARSE, exchange="reduce")
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD([p], 1.0), [("p", p)], config)
        transport = engine_of(optimizer).settings.transport
        start = transport.start

        def refusing(collective, name):
            if name.endswith(failing):
                raise ValueError("too long")
            return start(collective, name)

        p.grad = torch.zeros_like(p)
        optimizer.step()
        g = torch.randn(50, 50, generator=torch.Generator().manual_seed(rank()))
        p.grad = g.clone()
        transport.start = refusing
        with pytest.raises(ValueError, match="too long"):
            optimizer.step()
        (v,) = (bucket.v for bucket in engine_of(optimizer)._parameters.residuals())
        return (v.view(50, 50) - g).abs().max() < 1e-6 and not p.any()

    for failing in ("dgc.0.p", "dgc.0.p#1"):
        assert all(in_lockstep(lambda failing=failing: worker(failing)))


def test_synchronize_then_step():
    """p.grad is the averaged update, alike everywhere, after synchronize() and after step()."""

    def worker():
        network, optimizer = wrapped()
        backward(network)
        optimizer.synchronize()
        between = torch.cat([p.grad.flatten() for p in network.parameters()])
        with optimizer.skip_synchronize():
            optimizer.step()
        assert torch.equal(between, torch.cat([p.grad.flatten() for p in network.parameters()]))
        return between, flat(network)

    (a, p), (b, q) = in_lockstep(worker)
    assert torch.equal(a, b) and torch.equal(p, q) and a.any()


def test_a_closure_is_evaluated_before_the_exchange():
    def worker():
        network, optimizer = wrapped(DENSE)

        def closure():
            optimizer.zero_grad()
            value = loss(network, rank(), 0)
            value.backward()
            return value

        assert optimizer.step(closure).item() > 0
        return flat(network)

    results = in_lockstep(worker)
    assert torch.equal(*results)
    assert difference(results[0], flat(reference(range(1), 2, weight_decay=0.0)[0])) < 1e-6


@pytest.mark.parametrize(
    "make", [torch.full_like, lambda p, value: torch.tensor(value).expand_as(p)]
)
def test_gradients_set_by_hand_are_exchanged(make):
    def worker():
        network, optimizer = wrapped(DENSE, momentum=0.0, lr=1.0)
        before = flat(network)
        for p in network.parameters():
            p.grad = make(p, 1.0 + rank())
        optimizer.step()
        return before - flat(network)

    for moved in in_lockstep(worker):
        assert torch.allclose(moved, torch.full_like(moved, 1.5), atol=1e-6)
