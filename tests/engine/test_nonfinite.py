"""Gradients that are not finite, and damaged messages: told to all ranks, and nothing else is lost."""

import pytest
import torch
from laws import SPARSE, flat, in_lockstep, loss, rank, train, wrapped
from torch import nn

import dgc
from dgc.engine.engine import engine_of
from dgc.transport import Wait


def test_what_runs_beside_is_waited_for_before_v_is_read(monkeypatch):
    """On a GPU it puts back what was taken out of v, where a message told of an error."""
    optimizer = in_lockstep(lambda: train(range(1), SPARSE, groups=3)[1])[0]
    called = []
    monkeypatch.setattr(
        "dgc.engine.nonfinite.wait_for_own_stream", lambda device: called.append(device)
    )
    optimizer.report()
    assert set(called) == {torch.device("cpu")}


def test_an_optimizer_goes_on_after_a_bad_gradient():
    """Skip the batch and take the next: all ranks can, and nothing bad has stayed behind."""

    def worker():
        network, optimizer = train(range(2), SPARSE)
        optimizer.zero_grad()
        (loss(network, rank(), 2) * (float("inf") if rank() == 1 else 1.0)).backward()
        with pytest.raises(FloatingPointError):
            optimizer.step()
        train(range(3, 6), None, network, optimizer)
        return flat(network)

    results = in_lockstep(worker)
    assert torch.equal(*results) and results[0].isfinite().all()


@pytest.mark.parametrize("op", [dgc.Average, dgc.Sum])
@pytest.mark.parametrize("config", [SPARSE, dgc.Config(sparsity=0.9, value_bits=8)])
def test_a_bad_gradient_loses_nothing_of_other_buckets(config, op):
    """Also of those whose exchange had ended when it was found: what all ranks have in v is what they accumulated."""

    def gradient(rank, step, name):
        return torch.randn(
            40, 40, generator=torch.Generator().manual_seed(100 * step + 10 * rank + len(name))
        )

    def worker():
        network = nn.Module()
        network.good = nn.Parameter(torch.zeros(40, 40))
        network.small = nn.Parameter(torch.zeros(40, 40)[0])
        network.worse = nn.Parameter(torch.zeros(40, 40))
        groups = [[network.good, network.small], [network.worse]]
        _, optimizer = wrapped(config, network, groups=groups, op=op)
        for step in range(2):
            for name, p in network.named_parameters():
                p.grad = gradient(rank(), step, name).view(-1)[: p.numel()].view_as(p)
            if step == 0:
                optimizer.step()
        before = optimizer.residual_state_dict()
        if rank() == 1:
            network.worse.grad[3, 3] = torch.inf
        given = {name: p.grad.clone() for name, p in network.named_parameters()}
        with pytest.raises(
            FloatingPointError, match="rank 1 has a gradient that is not finite, in: worse"
        ):
            optimizer.step()
        after = optimizer.residual_state_dict()
        kept = [name for name in after["v"] if name != "worse"]
        assert sorted(kept) == ["good"] + ["small"] * (config.value_bits <= 8)
        u = {name: before["u"].get(name, torch.zeros(())) for name in kept}
        return (
            {name: before["v"][name] + 0.9 * u[name] + given[name] for name in kept},
            {name: after["v"][name] for name in kept},
        )

    (accumulated, pending), (more, others) = in_lockstep(worker)
    for name in accumulated:
        assert torch.allclose(
            pending[name] + others[name], accumulated[name] + more[name], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_message_is_told_and_loses_nothing(damaged):
    """Of one of three buckets, as all ranks received it: before, between and after whole ones. Then they go on."""

    def worker():
        weights = {name: nn.Parameter(torch.zeros(40, 40)) for name in "abc"}
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(weights.values(), lr=1.0),
            list(weights.items()),
            SPARSE,
            groups=[[p] for p in weights.values()],
        )
        transport = engine_of(optimizer).settings.transport
        start, total, ends = transport.start, {name: torch.zeros(40, 40) for name in "abc"}, []

        def flipped(collective, name):
            wait = start(collective, name)

            def received():
                result = wait()
                if len(ends) == 1 and name == f"dgc.{damaged}.{'abc'[damaged]}":
                    result[1, 9] ^= 64
                return result

            return Wait(received)

        transport.start = flipped
        for step in range(3):
            for number, (name, p) in enumerate(weights.items()):
                p.grad = torch.randn(
                    40,
                    40,
                    generator=torch.Generator().manual_seed(100 * step + 10 * number + rank()),
                )
                total[name] += p.grad
            try:
                optimizer.step()
                ends.append("")
            except ValueError as error:
                ends.append(str(error))
        return (
            ends,
            {n: p.detach() for n, p in weights.items()},
            {name: total[name] - v for name, v in optimizer.residual_state_dict()["v"].items()},
        )

    (ends, weights, sent), (others, same, theirs) = in_lockstep(worker)
    assert ends == others and ends[0] == ends[2] == ""
    assert ends[1].startswith(f"the message of rank 1 for bucket {damaged} is corrupt")
    for name, p in weights.items():
        assert torch.equal(p, same[name])
        assert torch.allclose(-p, (sent[name] + theirs[name]) / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_what_explodes_beside_a_nan_is_not_let_in_unclipped(size):
    """Its norm is not a number; whoever catches the error and goes on has a residual within the bound still."""

    def worker():
        network = nn.Module()
        network.bad, network.large = (nn.Parameter(torch.zeros(40, 40)) for _ in range(2))
        _, optimizer = wrapped(
            dgc.Config(sparsity=0.99, clip_norm=0.5), network, lr=1.0, momentum=0.0
        )
        network.bad.grad, network.large.grad = torch.zeros(40, 40), torch.full((40, 40), 1e6)
        if rank() == 0:
            network.bad.grad[3, 3] = torch.nan
        if size == 1:
            optimizer.step()
            return network.large.norm().item()
        with pytest.raises(
            FloatingPointError, match="rank 0 has a gradient that is not finite, in: bad"
        ):
            optimizer.step()
        return optimizer.residual_state_dict()["v"]["large"].norm().item()

    assert all(norm <= 0.5 * size**0.5 * (1 + 1e-6) for norm in in_lockstep(worker, size))
