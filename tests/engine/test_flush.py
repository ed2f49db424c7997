"""What is pending is sent on demand, and what is sent is reported."""

import warnings
from dataclasses import replace

import pytest
import torch
from laws import (
    SPARSE,
    backward,
    bytes_of_a_row,
    flat,
    in_lockstep,
    loss,
    model,
    rank,
    train,
    wrapped,
)

import dgc


def test_flush_applies_what_is_pending_and_then_nothing():
    def worker():
        network, optimizer = train(range(3), SPARSE, weight_decay=0.5)
        pending, before = optimizer.residual_state_dict(), flat(network)
        step, lr = optimizer.param_groups[0]["dgc_step"], optimizer.param_groups[0]["lr"]
        optimizer.flush()
        after = optimizer.residual_state_dict()
        assert all(torch.equal(pending["u"][k], after["u"][k]) for k in after["u"])
        assert not any(v.any() for v in after["v"].values())
        assert optimizer.param_groups[0]["dgc_step"] == step
        moved = (before - flat(network)) / lr
        once = flat(network)
        optimizer.flush()
        assert torch.equal(once, flat(network))
        names = [n for n, _ in network.named_parameters()]
        sizes = [p.numel() for p in network.parameters()]
        return pending["v"], dict(zip(names, moved.split(sizes), strict=True))

    (v0, moved), (v1, same) = in_lockstep(worker)
    for name, part in moved.items():
        expected = (v0[name] + v1[name]).flatten() / 2 if name in v0 else torch.zeros_like(part)
        assert torch.allclose(part, expected.double(), rtol=1e-3, atol=1e-5) and torch.equal(
            part, same[name]
        )


def test_a_flush_that_fails_leaves_in_v_what_it_has_not_applied():
    """One of the sums over ranks is more than a float32 holds."""

    def worker():
        network, optimizer = train(range(3), SPARSE, groups=3)
        state = optimizer.residual_state_dict()
        state["v"]["3.weight"].fill_(3e38)
        optimizer.load_residual_state_dict(state)
        before = {name: p.clone() for name, p in network.named_parameters()}
        with pytest.raises(FloatingPointError, match=r"3\.weight"):
            optimizer.flush()
        v, moved = optimizer.residual_state_dict()["v"], []
        for name, p in network.named_parameters():
            if name in v and state["v"][name].any():
                moved.append(not torch.equal(p, before[name]))
                assert torch.equal(v[name], torch.zeros_like(p) if moved[-1] else state["v"][name])
        return moved

    first, second = in_lockstep(worker)
    assert first == second and False in first[:-1]


@pytest.mark.parametrize(
    "config", [SPARSE, replace(SPARSE, value_bits=8)], ids=["plain", "rounded"]
)
def test_flush_leaves_frozen_parameters_alone(config):
    """They keep what they have pending, and thaw with it."""

    def worker():
        network, optimizer = train(range(3), config)
        frozen = {"3.weight": network[3].weight, "6.bias": network[6].bias}
        for p in frozen.values():
            p.requires_grad_(False)
        before, pending = (
            {name: p.clone() for name, p in frozen.items()},
            optimizer.residual_state_dict()["v"],
        )
        optimizer.flush()
        left = optimizer.residual_state_dict()["v"]
        assert all(torch.equal(p, before[name]) for name, p in frozen.items())
        for name, v in left.items():
            assert torch.equal(v, pending[name] if name in frozen else torch.zeros_like(v))
        for p in frozen.values():
            p.requires_grad_(True)
        optimizer.flush()
        assert not any(v.any() for v in optimizer.residual_state_dict()["v"].values())
        assert not torch.equal(network[3].weight, before["3.weight"])

    in_lockstep(worker)


@pytest.mark.parametrize("exchange", ["allgather", "reduce"])
@pytest.mark.parametrize("bits", [8, 16])
def test_flushing_while_evaluating(exchange, bits):
    """As a trainer does that evaluates in inference mode: the training goes on as after any flush."""

    def worker():
        ends = []
        for mode in (torch.no_grad, torch.inference_mode):
            network, optimizer = train(
                range(2), dgc.Config(sparsity=0.9, exchange=exchange, value_bits=bits)
            )
            with mode():
                optimizer.flush()
            train(range(2, 5), None, network, optimizer)
            ends.append(flat(network))
        assert torch.equal(*ends)

    in_lockstep(worker)


def test_flush_between_backward_and_step_is_refused():
    def worker():
        network, optimizer = wrapped()
        backward(network)
        with pytest.raises(RuntimeError, match=r"flush\(\) must be called after step\(\)"):
            optimizer.flush()
        optimizer.step()

    in_lockstep(worker)


def test_the_report():
    def worker():
        network, optimizer = train(range(4), dgc.Config(sparsity=0.99))
        numel = sum(p.numel() for p in network.parameters())
        compressed = {
            n: p.numel() for n, p in network.named_parameters() if p.dim() > 1 and p.numel() >= 1024
        }
        entries = sum(-(-n // 100) for n in compressed.values())
        dense = numel - sum(compressed.values())
        report = optimizer.report()
        message = bytes_of_a_row(entries, sum(compressed.values()), 16)
        assert report.message_bytes == message + 4 * dense
        assert report.bytes_sent == (4 - 1) * message + 2 * 3 / 4 * 4 * dense
        assert report.dense_bytes == 2 * 3 / 4 * 4 * numel
        assert report.density == pytest.approx((entries + dense) / numel)
        assert report.total_bytes_sent == 4 * report.bytes_sent and report.steps == 4
        assert report.total_dense_bytes == 4 * report.dense_bytes
        v = torch.cat([x.flatten() for x in optimizer.residual_state_dict()["v"].values()])
        assert report.residual_norm == pytest.approx(v.norm().item(), rel=1e-5)
        optimizer.flush()  # which is no step
        assert (
            optimizer.report().density == report.density
            and optimizer.report().bytes_sent == report.bytes_sent
        )
        optimizer.zero_grad()
        loss(network, rank(), 9).backward(inputs=list(network.parameters()))
        return report.gradient_norm

    assert all(norm > 0 for norm in in_lockstep(worker, 4))


def test_the_sparsity_follows_the_schedule_step_by_step():
    def worker():
        config = dgc.Config(sparsity=lambda step: 0.5 + step / 100)
        network, optimizer, total = model(), None, 0
        sizes = [p.numel() for p in network.parameters()]
        for step in range(3):
            network, optimizer = train([step], config, network, optimizer)
            sent = sum(-(-n * (50 - step) // 100) if n >= config.min_numel else n for n in sizes)
            total += sent
            report = optimizer.report()
            assert report.density == sent / sum(sizes) and report.total_density == total / (
                (step + 1) * sum(sizes)
            )

    in_lockstep(worker)


def test_a_schedule_that_leaves_the_range_names_the_step():
    def worker():
        train(range(4), dgc.Config(sparsity=lambda step: 1.0 if step == 2 else 0.9))

    with pytest.raises(ValueError, match=r"gives for step 2 must be .*, got 1\.0"):
        in_lockstep(worker)


def test_adamws_is_at_the_rate_of_its_time():
    """A rate of 0 now takes nothing away, and nothing is told."""

    def worker(now):
        torch.manual_seed(0)
        w = torch.nn.Parameter(torch.zeros(40, 40))
        optimizer = dgc.DistributedOptimizer(
            torch.optim.AdamW([w], lr=0.01, weight_decay=0.0),
            compression=dgc.Config(
                dgc.piecewise({0: 0.0, 4: 0.9}), factor_masking=False, min_numel=0
            ),
        )
        for step in range(8):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + dgc.lockstep.current().world.rank)
            (w * torch.randn(40, 40, generator=generator)).sum().backward()
            optimizer.step()
        before, optimizer.param_groups[0]["lr"] = w.detach().clone(), now
        optimizer.flush()
        return w.detach() - before

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (moved, _), (expected, _) = (
            in_lockstep(lambda now=now: worker(now)) for now in (0.0, 0.01)
        )
    assert moved.any() and torch.equal(moved, expected)


def test_a_flush_that_applies_nothing_is_told():
    """At a learning rate of 0, where most schedulers end: one warning, of rank 0."""

    def worker():
        network, optimizer = train(range(3), SPARSE)
        optimizer.param_groups[0]["lr"] = 0.0
        before = flat(network)
        optimizer.flush()
        assert torch.equal(flat(network), before)

    with pytest.warns(UserWarning, match=r"flush\(\) .* learning rate above 0") as told:
        in_lockstep(worker)
    assert len(told) == 1
