"""Loss scales and gradients that are not finite: what they may touch, and that all ranks do the same."""

import contextlib
import math

import pytest
import torch
from laws import CONFIGS, flat, loss, model, rank, train
from pairwise import pairwise
from torch import nn

import dgc
from dgc.engine.engine import engine_of

SPARSE = dgc.Config(sparsity=0.9)


def wrapped(config=SPARSE, scaler=None, network=None, **arguments):
    network = model() if network is None else network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    return network, dgc.DistributedOptimizer(
        optimizer, network.named_parameters(), config, grad_scaler=scaler, **arguments
    )


def scaler_of(scale=2.0**12, interval=3):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)


def scaled(steps, config, pattern="usual", bad=None, who=0):
    """Trains with a loss scale, in the way of torch's or of Horovod's documentation; step ``bad`` overflows on rank
    ``who``.
    """
    scaler = scaler_of()
    network, optimizer = wrapped(config, scaler)
    for step in steps:
        optimizer.zero_grad()
        factor = 1e38 if (step, rank()) == (bad, who) else 1.0
        scaler.scale(loss(network, rank(), step) * factor).backward()
        if pattern == "unscaled":
            scaler.unscale_(optimizer)
        if pattern == "Horovod":
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
    return network, optimizer, scaler


def take(optimizer, scaler):
    """A step, with a loss scale or without."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def residuals(optimizer):
    state = optimizer.residual_state_dict()
    return torch.cat([t.flatten() for letter in "uv" for t in state[letter].values()])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("error")
def test_a_loss_scale_changes_nothing(name):
    """Powers of two, which grow after every third step: to the bit the training without, residuals too."""

    def worker():
        plain, reference = wrapped(CONFIGS[name])
        train(range(8), None, plain, reference)
        network, optimizer, scaler = scaled(range(8), CONFIGS[name])
        assert scaler.get_scale() == 2.0**14
        assert torch.equal(flat(network), flat(plain)) and torch.equal(
            residuals(optimizer), residuals(reference)
        )

    dgc.lockstep.run(worker, 2)


@pytest.mark.parametrize("pattern", ["unscaled", "Horovod"])
@pytest.mark.filterwarnings("error")
def test_the_other_ways_to_write_it(pattern):
    def worker():
        return flat(scaled(range(4), SPARSE, pattern)[0]), flat(scaled(range(4), SPARSE)[0])

    for other, usual in dgc.lockstep.run(worker, 2):
        assert torch.equal(other, usual)


@pytest.mark.parametrize(
    "config",
    [SPARSE, dgc.Config(0.9, clip_norm=0.1), dgc.Config(0.0), dgc.Config(0.9, value_bits=8)],
)
def test_an_overflow_on_one_rank_is_a_step_that_none_takes(config):
    """As if there had been no such step: parameters, residuals, schedule. All scalers halve their scale."""

    def worker():
        network, optimizer, scaler = scaled(range(6), config, bad=3, who=2)
        other, reference, _ = scaled([0, 1, 2, 4, 5], config)
        assert torch.equal(flat(network), flat(other)) and torch.equal(
            residuals(optimizer), residuals(reference)
        )
        report = optimizer.report()
        assert (report.steps, report.skipped) == (5, 1) and optimizer.param_groups[0][
            "dgc_step"
        ] == 5
        return scaler.get_scale()

    # 2^12, doubled after three good steps, halved by the bad one; two good ones are not enough to grow.
    assert dgc.lockstep.run(worker, 3) == [2.0**12] * 3


def test_the_update_is_scaled_until_the_scaler_takes_the_scale_out():
    def worker():
        scaler = scaler_of()
        network, _alive = wrapped(SPARSE, scaler)
        plain, reference = wrapped(SPARSE)
        scaler.scale(loss(network, rank(), 0)).backward()
        loss(plain, rank(), 0).backward()
        reference.synchronize()
        for p, q in zip(network.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad * 2.0**12)

    dgc.lockstep.run(worker, 2)


def test_one_process_clips_what_the_scale_does_not_change():
    """Against torch's recipe: unscale_, clip_grad_norm_, step."""

    def worker():
        network, _, _ = scaled(range(4), dgc.Config(0.9, clip_norm=0.1), "Horovod")
        reference, scaler = model(), scaler_of()
        optimizer = torch.optim.SGD(
            reference.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2
        )
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss(reference, 0, step)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert ((flat(network) - flat(reference)).norm() / flat(reference).norm()).item() < 1e-6

    dgc.lockstep.run(worker, 1)


def test_one_process_that_clips_must_be_given_the_scaler_that_scaled_what_it_clipped():
    """synchronize() would clip the scaled gradient: among several ranks that is an error, too. Where step() clips there
    is no scale left.
    """

    def one_step(scaler=None, synchronizes=False):
        network, optimizer = wrapped(dgc.Config(0.9, clip_norm=0.1))
        if scaler is None:
            loss(network, 0, 0).backward()
            optimizer.step()
            return flat(network)
        scaler.scale(loss(network, 0, 0)).backward()
        if synchronizes:
            optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize() if synchronizes else contextlib.nullcontext():
            scaler.step(optimizer)
        return flat(network)

    def worker():
        torch.testing.assert_close(one_step(scaler_of()), one_step(), rtol=1e-6, atol=1e-6)
        with pytest.raises(RuntimeError, match="grad_scaler must be the GradScaler whose step"):
            one_step(scaler_of(), synchronizes=True)

    dgc.lockstep.run(worker, 1)


def test_two_passes():
    """The exchange begins when the second has ended."""

    def worker():
        ends = []
        for scaler in (None, scaler_of()):
            network, optimizer = wrapped(SPARSE, scaler, backward_passes_per_step=2)
            for step in range(3):
                optimizer.zero_grad()
                for i in range(2):
                    value = loss(network, rank(), 2 * step + i)
                    (value if scaler is None else scaler.scale(value)).backward()
                take(optimizer, scaler)
            ends.append(flat(network))
        assert torch.equal(*ends)

    dgc.lockstep.run(worker, 2)


def test_clipping_after_the_exchange_is_told():
    """What was sent is no longer in v; the scaler's own division is not meant."""

    def worker():
        scaler = scaler_of()
        network, optimizer = wrapped(SPARSE, scaler)
        scaler.scale(loss(network, rank(), 0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(network.parameters(), 1e-3)
        with pytest.warns(UserWarning, match=(r"was changed between its exchange,.* and step\(\)")):
            scaler.step(optimizer)

    dgc.lockstep.run(worker, 2)


def test_autocast():
    """bfloat16 within: gradients of float32 parameters, as ever."""

    def worker():
        network, optimizer = wrapped(SPARSE)
        before = flat(network)
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(network, rank(), step)
            value.backward()
            optimizer.step()
        assert (flat(network) - before).norm() > 0
        return flat(network)

    one, other = dgc.lockstep.run(worker, 2)
    assert torch.equal(one, other)


@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_float16_finds_its_scale(sparsity):
    """Autocast to float16, with a scale at which its gradients overflow: those steps never were, and when the scale
    fits it is the training that begins with it.
    """

    def trained(steps, scale):
        scaler = scaler_of(scale, interval=100)
        network, optimizer = wrapped(dgc.Config(sparsity), scaler)
        for step in steps:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                value = loss(network, rank(), step)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
        return flat(network), residuals(optimizer), optimizer.report(), scaler.get_scale()

    def worker():
        *found, report, scale = trained(range(20), 2.0**24)
        skipped = report.skipped
        assert 0 < skipped < 15 and scale == 2.0 ** (24 - skipped) and report.steps == 20 - skipped
        *expected, other, _ = trained(range(skipped, 20), scale)
        assert other.skipped == 0 and all(map(torch.equal, found, expected))
        return found[0]

    one, other = dgc.lockstep.run(worker, 2)
    assert torch.equal(one, other) and one.isfinite().all()


@pairwise(
    bad=[math.nan, math.inf], sparsity=[0.0, 0.9], parameter=["6.weight", "8.bias"], size=[1, 3]
)
def test_a_step_that_is_skipped_never_was(bad, sparsity, parameter, size):
    """nonfinite="skip": one rank has a bad entry at step 2."""

    def worker():
        config = dgc.Config(sparsity, nonfinite="skip")
        network, optimizer = train(range(2), config)
        weight = dict(network.named_parameters())[parameter]
        loss(network, rank(), 2).backward()
        if rank() == size - 1:
            weight.grad.view(-1)[3] = bad
        optimizer.step()
        assert all(p.grad is None for p in network.parameters()) and optimizer.report().skipped == 1
        train([3, 4], None, network, optimizer)
        other, reference = train([0, 1, 3, 4], config)
        assert torch.equal(flat(network), flat(other)) and torch.equal(
            residuals(optimizer), residuals(reference)
        )

    dgc.lockstep.run(worker, size)


def test_a_scaler_that_is_off_or_is_none():
    off = torch.amp.GradScaler("cpu", enabled=False)

    def worker():
        ends = []
        for scaler in (None, off):
            network, optimizer = wrapped(SPARSE, scaler)
            ends.append(flat(train(range(3), None, network, optimizer)[0]))
        assert torch.equal(*ends)
        for scaler, config, error, message in (
            (
                1024,
                SPARSE,
                TypeError,
                r"grad_scaler must be a torch\.amp\.GradScaler or None, got 1024",
            ),
        ):
            with pytest.raises(error, match=message):
                wrapped(config, scaler)

    dgc.lockstep.run(worker, 2)


def test_fewer_passes_than_said_are_an_error():
    """The last batches of an epoch: the scaler would take its scale out of what was not exchanged yet."""

    def worker():
        scaler = scaler_of()
        network, optimizer = wrapped(SPARSE, scaler, backward_passes_per_step=2)
        scaler.scale(loss(network, rank(), 0)).backward()
        with pytest.raises(RuntimeError, match=r"fewer .* than backward_passes_per_step"):
            scaler.step(optimizer)

    dgc.lockstep.run(worker, 2)


def step_by_hand(optimizer, scaler):
    """With gradients that no backward() has brought."""
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def test_gradients_that_no_backward_has_brought_are_an_error_until_they_are_synchronized():
    """Else they would be kept without their scale twice over."""

    def by_hand(network, scaler, step):
        value = scaler.scale(loss(network, rank(), step))
        for p, g in zip(
            network.parameters(),
            torch.autograd.grad(value, list(network.parameters())),
            strict=True,
        ):
            p.grad = g

    def worker():
        scaler = scaler_of()
        network, optimizer = wrapped(SPARSE, scaler)
        by_hand(network, scaler, 0)
        before = flat(network)
        with pytest.raises(RuntimeError, match=r"not exchanged yet, .* optimizer\.synchronize\(\)"):
            scaler.step(optimizer)
        assert torch.equal(flat(network), before) and not residuals(optimizer).any()
        scaler = scaler_of()
        network, optimizer = wrapped(SPARSE, scaler)
        for step in range(4):
            by_hand(network, scaler, step)
            step_by_hand(optimizer, scaler)
        return torch.equal(flat(network), flat(scaled(range(4), SPARSE)[0]))

    assert dgc.lockstep.run(worker, 2) == [True, True]


def test_after_an_overflow_gradients_set_by_hand_are_exchanged():
    """The step that the scaler leaves out has ended with zero_grad(): the next one is another."""

    def worker():
        scaler = scaler_of()
        network, optimizer = wrapped(SPARSE, scaler)
        for step in range(4):
            value = scaler.scale(loss(network, rank(), step))
            gradients = torch.autograd.grad(value, list(network.parameters()))
            for p, g in zip(network.parameters(), gradients, strict=True):
                p.grad = g.fill_(torch.inf) if step == 1 else g
            step_by_hand(optimizer, scaler)
        assert optimizer.report().skipped == 1
        return torch.allclose(
            flat(network), flat(scaled([0, 2, 3], SPARSE)[0]), rtol=1e-5, atol=1e-7
        )

    assert dgc.lockstep.run(worker, 2) == [True, True]


@pytest.mark.parametrize("given", [False, True])
def test_a_scaler_that_was_not_given_or_another_one_is_an_error(given):
    def worker():
        network, optimizer = wrapped(SPARSE, scaler_of() if given else None)
        another = scaler_of()
        if given:
            # So that it has a scale.
            engine_of(optimizer).settings.grad_scaler.scale(loss(network, rank(), 0))
        another.scale(loss(network, rank(), 0)).backward()
        with pytest.raises(
            RuntimeError,
            match=r"must be the GradScaler whose step\(\) calls this, got .*grad_scaler=",
        ):
            another.step(optimizer)

    dgc.lockstep.run(worker, 2)


def test_one_that_does_not_scale_need_not_be_given():
    def worker():
        network, optimizer = wrapped(SPARSE)
        off = torch.amp.GradScaler("cpu", enabled=False)
        off.scale(loss(network, rank(), 0)).backward()
        off.step(optimizer)
        off.update()

    dgc.lockstep.run(worker, 2)


def test_scales_that_differ_are_told_before_anything_is_exchanged():
    """As when one rank alone loads the scaler's state."""

    def worker():
        scaler = scaler_of(2.0 ** (10 + rank()))
        network, _alive = wrapped(SPARSE, scaler)
        scaler.scale(loss(network, rank(), 0)).backward()

    with pytest.raises(
        ValueError, match=r"Rank 1 has: grad_scaler, its state=.*2048\.0.*; rank 0 has: .*1024\.0"
    ):
        dgc.lockstep.run(worker, 2)


def test_scales_that_part_later_are_told_too():
    """What travels dense would be added up with other scales than it is divided by."""
    told = []

    def worker():
        scaler = scaler_of(2.0**10)
        network, optimizer = wrapped(SPARSE, scaler)
        try:
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(loss(network, rank(), step)).backward()
                scaler.step(optimizer)
                scaler.update(2.0**12 if step == 1 and rank() == 1 else None)
        except ValueError as error:
            told.append((step, str(error)))

    dgc.lockstep.run(worker, 2)
    assert [step for step, _ in told] == [2, 2] and told[0] == told[1]
    assert told[0][1].startswith(
        "the loss's scale must be the same on all ranks, got, rank by rank, [1024.0, 4096.0]"
    )


def test_between_backward_and_step_nothing_else_is_done():
    def worker():
        scaler = scaler_of()
        network, optimizer = wrapped(SPARSE, scaler)
        scaler.scale(loss(network, rank(), 0)).backward()
        for wrong in (
            optimizer.flush,
            lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
        ):
            with pytest.raises(RuntimeError, match=r"got a call between backward\(\) and step\(\)"):
                wrong()
        scaler.step(optimizer)
        scaler.update()
        optimizer.flush()

    dgc.lockstep.run(worker, 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    """To the bit as without. A reentrant one runs a backward pass within the other."""

    class Network(nn.Module):
        def __init__(self, checkpointed):
            super().__init__()
            self.layers, self.checkpointed = model(), checkpointed

        def forward(self, x):
            for start, end in ((0, 1), (1, 5), (5, 8), (8, 9)):
                part = self.layers[start:end]
                if self.checkpointed and start in (1, 5):
                    x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=reentrant)
                else:
                    x = part(x)
            return x

    def worker():
        ends = []
        for checkpointed in (False, True):
            scaler = scaler_of()
            network, optimizer = wrapped(SPARSE, scaler, Network(checkpointed))
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(loss(network, rank(), step)).backward()
                scaler.step(optimizer)
                scaler.update()
            ends.append(flat(network))
        assert torch.equal(*ends)

    dgc.lockstep.run(worker, 2)


def test_checkpointing_within_which_all_gradients_come_needs_a_word():
    """Reentrant, of adapters in a frozen network: torch tells of no end after which all gradients are there."""

    def worker():
        torch.manual_seed(0)
        scaler, network = scaler_of(), nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        network, optimizer = wrapped(SPARSE, scaler, network)
        for step, message in enumerate(
            [None, r"use_reentrant=True\) ran the backward pass of all of them within"]
        ):
            optimizer.zero_grad()
            x = torch.ones(4, 40, requires_grad=True)
            x = torch.utils.checkpoint.checkpoint(network, x, use_reentrant=True)
            scaler.scale(x.square().mean()).backward()
            if step == 0:
                optimizer.synchronize()
            with (
                contextlib.nullcontext()
                if message is None
                else pytest.raises(RuntimeError, match=message)
            ):
                scaler.step(optimizer)
                scaler.update()

    dgc.lockstep.run(worker, 2)


def test_a_scale_near_the_largest_number_is_lowered_before_an_update_overflows():
    """Gradients of float32 hardly ever overflow, so the scale grows until the update would."""

    def worker():
        scaler = scaler_of(2.0**112, interval=1)
        network, optimizer = wrapped(SPARSE, scaler)
        for step in range(12):
            optimizer.zero_grad()
            scaler.scale(loss(network, rank(), step)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert 0 < optimizer.report().skipped < 12 and scaler.get_scale() < 2.0**112

    dgc.lockstep.run(worker, 2)


def test_a_loss_scale_reaches_the_residual_of_float16_parameters():
    """The gradient is 2e-9, which float16 can only tell from zero by its scale. torch's fused SGD accepts such."""

    def worker():
        torch.manual_seed(0)
        network = nn.Linear(40, 40).half()
        optimizer = torch.optim.SGD(network.parameters(), lr=1.0, fused=True)
        scaler = scaler_of(2.0**16)
        optimizer = dgc.DistributedOptimizer(
            optimizer, network.named_parameters(), dgc.Config(value_bits=8), grad_scaler=scaler
        )
        scaler.scale(
            network(torch.ones(1, 40, dtype=torch.float16)).float().sum() * 2e-9
        ).backward()
        return [p.grad.float() / 2.0**16 for p in network.parameters()], engine_of(
            optimizer
        ).residual_views()["v"]

    (updates, v), _ = dgc.lockstep.run(worker, 2)
    for name, update in zip(("weight", "bias"), updates, strict=True):
        # What was sent, and what is pending or was dropped by rounding.
        accumulated = update + v[name]
        assert torch.allclose(accumulated, torch.full_like(update, 2e-9), rtol=1e-2, atol=0)


@pytest.mark.parametrize(("exchange", "clip"), [("allgather", None), ("reduce", 0.5)])
def test_a_loss_scale_changes_nothing_with_adamw(exchange, clip):
    """In its dense steps and after them, to the bit. A step that overflows is the one that
    nonfinite="skip" leaves out.
    """

    def trained(scaler, bad, nonfinite="error"):
        network = model()
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.1)
        config = dgc.Config(
            dgc.piecewise({0: 0.0, 3: 0.9}),
            factor_masking=False,
            clip_norm=clip,
            exchange=exchange,
            nonfinite=nonfinite,
        )
        optimizer = dgc.DistributedOptimizer(
            optimizer, network.named_parameters(), config, grad_scaler=scaler
        )
        for step in range(9):
            optimizer.zero_grad()
            factor = math.inf if step in bad and rank() == 1 else 1.0
            value = loss(network, rank(), step) * factor
            (value if scaler is None else scaler.scale(value)).backward()
            take(optimizer, scaler)
        return flat(network), optimizer.report().skipped

    def worker():
        plain, scaled = trained(None, ()), trained(scaler_of(), ())
        skipped, overflown = trained(None, (1, 5), "skip"), trained(scaler_of(), (1, 5))
        assert torch.equal(plain[0], scaled[0]) and torch.equal(skipped[0], overflown[0])
        assert (plain[1], scaled[1], skipped[1], overflown[1]) == (0, 0, 2, 2)
        assert not torch.equal(plain[0], skipped[0])

    dgc.lockstep.run(worker, 2)
