"""Horovod's contract, in lockstep: what a script may call, and what it is told when it errs."""

import contextlib
import copy
import io
import pickle
import re
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from laws import difference, flat, loss, model, reference, train
from torch import nn

import dgc
from dgc.collective import Collective
from dgc.compression.select import count
from dgc.engine.buckets import pack
from dgc.engine.engine import engine_of
from dgc.optimizer import Distributed
from dgc.transport import Wait, streams

DENSE, SPARSE = dgc.Config(sparsity=0.0), dgc.Config(sparsity=0.9)


def in_lockstep(worker, size=2):
    return dgc.lockstep.run(worker, size)


def rank():
    return dgc.lockstep.current().world.rank


def wrapped(config=SPARSE, network=None, lr=0.05, momentum=0.9, kind=torch.optim.SGD, settings=None, **arguments):
    network = model() if network is None else network
    settings = {"lr": lr, "momentum": momentum} if settings is None else settings
    optimizer = kind(network.parameters(), **settings)
    return network, dgc.DistributedOptimizer(optimizer, network.named_parameters(), config, **arguments)


def backward(network, step=0):
    loss(network, rank(), step).backward()


# -- what it is --------------------------------------------------------------------------------------------------------

def test_it_is_the_optimizer_that_was_wrapped():
    def worker():
        network = model()
        inner = torch.optim.SGD(network.parameters(), lr=0.3, momentum=0.7, weight_decay=0.2, nesterov=True)
        optimizer = dgc.DistributedOptimizer(inner, network.named_parameters())
        assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
        assert optimizer.defaults == inner.defaults  # Horovod's are those of SGD() instead
        assert optimizer.param_groups is inner.param_groups
        assert optimizer._compression == dgc.Config() and optimizer._compression.sparsity == 0.999

    in_lockstep(worker)


def test_with_one_process_it_is_the_plain_optimizer():
    def worker():
        network, optimizer = wrapped(settings={"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2})
        train(range(6), None, network, optimizer)
        optimizer.flush()
        assert optimizer.residual_state_dict() == {"version": 1, "rank": 0, "size": 1, "u": {}, "v": {}}
        assert optimizer.report().bytes_sent == 0
        return flat(network)

    assert torch.equal(in_lockstep(worker, 1)[0], flat(reference(range(6), 1)[0]))


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
        assert torch.equal(optimizer.residual_state_dict()["u"]["6.weight"], momentum)
        assert "momentum_buffer" not in optimizer.state[network[6].weight]
        assert optimizer.state[network[6].bias]["momentum_buffer"] is not None
        optimizer.zero_grad()
        backward(network)
        optimizer.step()

    in_lockstep(worker)
    assert sorted(calls) == [0, 1]


def scheduled():
    """A model, its optimizer, and a check that a scheduler made before wrapping drives that."""
    network = model()
    inner = torch.optim.SGD(network.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.1)
    optimizer = dgc.DistributedOptimizer(inner, network.named_parameters(), DENSE)

    def drives():
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the optimizer that it knows is not the one that is stepped
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)

    return network, optimizer, drives


def test_a_scheduler_made_before_wrapping_still_drives_it():
    def worker():
        network, optimizer, drives = scheduled()
        backward(network)
        before = flat(network)
        optimizer.step()
        assert not torch.equal(before, flat(network)) and optimizer.report().steps == 1
        drives()

    in_lockstep(worker)


def test_it_drives_it_after_a_state_was_loaded():
    def worker():
        _, optimizer, drives = scheduled()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        drives()

    in_lockstep(worker)
    in_lockstep(worker, 1)


def contents(optimizer):
    return {key: {name: type(value) for name, value in state.items()}
            for key, state in optimizer.state_dict()["state"].items()}


def test_state_is_complete_from_the_start():
    """What hvd.broadcast_optimizer_state needs: the same keys on every rank, whatever was loaded where."""
    def worker():
        for momentum, decay in ((0.0, 0.0), (0.0, 0.1), (0.9, 0.0), (0.9, 0.1)):
            network, optimizer = wrapped(settings={"lr": 0.1, "momentum": momentum, "weight_decay": decay})
            keys = contents(optimizer)
            assert len(keys) == len(list(network.parameters()))
            train(range(2), None, network, optimizer)
            assert contents(optimizer) == keys

    in_lockstep(worker)


# -- the step ----------------------------------------------------------------------------------------------------------

def test_messages_leave_during_the_backward_pass():
    def worker():
        network, optimizer = train(range(1), SPARSE, groups=3)  # the first step begins with a question to all ranks
        begun = []
        transport = engine_of(optimizer).settings.transport
        start = transport.start
        transport.start = lambda collective, name: (begun.append(name), start(collective, name))[1]
        seen = []
        network[0].weight.register_hook(lambda g: seen.append(len(begun)))  # the last gradient of the backward pass
        backward(network)
        assert 0 < seen[0] < len(begun)
        optimizer.step()
        return begun

    first, second = in_lockstep(worker)
    assert first == second


def test_whoever_catches_an_error_waits_for_what_was_put_back(monkeypatch):
    """On a GPU, where the exchange runs in a stream of its own."""
    class Stream(list):
        def wait_stream(self, other):
            self.append(other)

    def fails(wait=False):
        raise FloatingPointError

    def path():
        yield Collective("sum", torch.zeros(1))

    def exchange():
        transport = type("Nowhere", (), {"start": lambda self, collective, name: Wait(fails)})()
        return streams.StreamedExchange(device, path(), transport, "x", lambda collective: None)

    main, own, device = Stream(), Stream(), torch.device("cuda", 0)
    monkeypatch.setattr(streams, "_stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    under_way, other = exchange(), exchange()
    assert own == [main, main] and main == []
    with pytest.raises(FloatingPointError):
        exchange().finish()
    assert len(main) == 1 and main[0] is own
    under_way.abandon(wait=False)
    assert len(main) == 2
    with pytest.raises(FloatingPointError):
        other.abandon(wait=True)
    assert len(main) == 3
    branch = Stream()
    branch.device = device
    streams.own_stream_waits_for([branch])
    assert own[-1] is branch


def test_what_a_device_found_is_put_back_after_what_runs_beside(monkeypatch):
    """That has v in use."""
    optimizer = in_lockstep(lambda: train(range(1), SPARSE, groups=3)[1])[0]
    called = []
    monkeypatch.setattr("dgc.engine.nonfinite.wait_for_own_stream", lambda device: called.append("rejoin"))
    monkeypatch.setattr("dgc.engine.nonfinite.settle", lambda bucket: called.append("settle"))
    optimizer.report()
    assert called[0] == "rejoin" and set(called[1:]) == {"settle"}


def test_buckets_follow_the_backward_pass_and_never_mix_kinds():
    network = nn.Sequential(*[nn.Linear(1200, 1200) for _ in range(6)], nn.Linear(1200, 40).double())
    parameters = list(network.parameters())
    names = {p: name for name, p in network.named_parameters()}
    packed = pack(parameters, names, None, 1024)
    assert sorted(name for group, _ in packed for name in group) == sorted(names.values())
    for _, together in packed:
        assert len({(p.dtype, p.dim() > 1) for p in together}) == 1
    compressed = [name for group, together in packed if together[0].dim() > 1 and together[0].dtype == torch.float32
                  for name in group]
    assert compressed == [f"{i}.weight" for i in (5, 4, 3, 2, 1, 0)]
    by_list = pack(parameters, names, [[parameters[2], parameters[0]], [parameters[4]]], 1024)
    assert [group for group, _ in by_list][:2] == [["1.weight", "0.weight"], ["2.weight"]]
    by_number = pack(parameters, names, 7, 1024)
    assert len({frozenset(group) for group, _ in by_number}) == 14


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


def test_one_backward_pass_too_many_is_refused():
    def worker():
        network, _ = wrapped()
        backward(network)
        backward(network)

    with pytest.raises(AssertionError, match="Gradients were computed more than backward_passes_per_step times"):
        in_lockstep(worker)


def test_zero_grad_is_refused_while_gradients_travel():
    def worker():
        network, optimizer = wrapped()
        optimizer.zero_grad(set_to_none=False)
        backward(network)
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss\.backward\(\) but before"):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in network.parameters())
        optimizer.zero_grad()
        assert all(p.grad is None for p in network.parameters())

    in_lockstep(worker)


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


def test_synchronizing_twice_warns_and_does_nothing_more():
    def worker():
        network, optimizer = wrapped()
        backward(network)
        optimizer.synchronize()
        grads = [p.grad.clone() for p in network.parameters()]
        v = copy.deepcopy(engine_of(optimizer).pending.views()["v"])
        if rank() == 0:  # catching warnings is not for several threads
            with pytest.warns(UserWarning, match=r"called without optimizer\.skip_synchronize\(\)"):
                optimizer.step()
        assert optimizer.report().steps == 1
        assert all(torch.equal(a, p.grad) for a, p in zip(grads, network.parameters(), strict=True))
        now = engine_of(optimizer).pending.views()["v"]
        assert all(torch.equal(a, b) for a, b in zip(v.values(), now.values(), strict=True))

    in_lockstep(worker)


@pytest.mark.parametrize("change", [lambda network: nn.utils.clip_grad_norm_(network.parameters(), 1e-3),
                                    lambda network: network.zero_grad()])
def test_changing_gradients_that_were_sent_is_told(change):
    """As a script does that clips between backward() and step(), which is right where nothing is exchanged."""
    def worker():
        network, optimizer = train(range(1), SPARSE)
        backward(network)
        change(network)
        optimizer.step()
        return flat(network)

    message = r"changed after backward\(\), which had sent it by then.* dgc\.register_comm_hook"
    with pytest.warns(UserWarning, match=message) as told:
        results = in_lockstep(worker)
    assert len(told) == 2 and torch.equal(*results)  # each rank


def test_what_was_not_sent_yet_may_be_changed():
    """A bound on the global norm needs all gradients, so nothing leaves during backward()."""
    def worker():
        network, optimizer = wrapped(dgc.Config(sparsity=0.9, clip_norm=1e6))
        backward(network)
        nn.utils.clip_grad_norm_(network.parameters(), 1e-3)
        optimizer.step()
        assert optimizer.report().gradient_norm <= 1.001e-3

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_lockstep(worker)


def test_a_backward_between_synchronize_and_step_is_refused():
    """It adds to an update, in which there is momentum already."""
    def worker():
        network, optimizer = wrapped()
        backward(network)
        optimizer.synchronize()
        with pytest.raises(AssertionError, match=r"between synchronize\(\) and step\(\), and has added to an update"):
            backward(network, 1)

    in_lockstep(worker)


@pytest.mark.parametrize("directly", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_a_step_left_out_is_left_out(directly, to_none):
    """After synchronize(); and it is said once that this loses what was sent."""
    def worker():
        network, optimizer = wrapped(dgc.Config(sparsity=0.9, apply_directly=directly))
        for step in range(2):
            backward(network, step)
            optimizer.synchronize()
            optimizer.zero_grad(set_to_none=to_none)
        before, pending = flat(network), copy.deepcopy(engine_of(optimizer).pending.views())
        backward(network, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is not the second synchronize() before this step
            optimizer.step()
        moved = flat(network)
        other, expected = wrapped(dgc.Config(sparsity=0.9, apply_directly=directly))
        expected.load_residual_state_dict({**expected.residual_state_dict(), **pending})
        expected.param_groups[0]["dgc_step"] = 2  # which rotates the sample
        backward(other, 2)
        expected.step()
        assert torch.equal(moved, flat(other)) and not torch.equal(moved, before)

    with pytest.warns(UserWarning, match=r"there was no step\(\) after synchronize\(\)") as told:
        in_lockstep(worker)
    assert len(told) == 2  # each rank


def test_changing_gradients_before_the_step_warns_once():
    def worker():
        network, optimizer = wrapped()
        for step in range(2):
            optimizer.zero_grad()
            backward(network, step)
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(network.parameters(), 1e-3)
            if rank() == 0 and step == 0:
                changed = pytest.warns(UserWarning, match=r"changed between synchronize\(\) and step\(\).*clip_norm")
                with changed, optimizer.skip_synchronize():
                    optimizer.step()
            elif rank() == 0:
                with warnings.catch_warnings(), optimizer.skip_synchronize():
                    warnings.simplefilter("error")
                    optimizer.step()

    in_lockstep(worker)


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


def test_gradients_set_by_hand_are_exchanged():
    def worker():
        network, optimizer = wrapped(DENSE, momentum=0.0, lr=1.0)
        before = flat(network)
        for p in network.parameters():
            p.grad = torch.full_like(p, 1.0 + rank())
        optimizer.step()
        return before - flat(network)

    for moved in in_lockstep(worker):
        assert torch.allclose(moved, torch.full_like(moved, 1.5), atol=1e-6)


@pytest.mark.parametrize("op", [dgc.Average, dgc.Sum])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_clipping_bounds_what_the_optimizer_sees(op, per_tensor):
    """Dense and compressed parameters alike; orthogonal gradients, all clipped, make exactly clip_norm."""
    def worker():
        weights = [nn.Parameter(torch.zeros(40, 40)), nn.Parameter(torch.zeros(50))]
        config = dgc.Config(sparsity=0.0, clip_norm=0.5, clip_per_tensor=per_tensor)
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), compression=config, op=op)
        for w in weights:
            w.grad = torch.zeros_like(w)
            w.grad.view(-1)[rank()::4] = 3.0
        optimizer.step()
        return [w.grad.norm().item() for w in weights]

    for norms in in_lockstep(worker, 4):
        if per_tensor:
            assert norms == pytest.approx([0.5, 0.5], rel=1e-5)
        else:
            assert (norms[0] ** 2 + norms[1] ** 2) ** 0.5 == pytest.approx(0.5, rel=1e-5)


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
        assert optimizer.param_groups is groups and groups[0]["momentum"] == 0.9 and groups[0]["weight_decay"] == 0.1

    in_lockstep(worker)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("op", [dgc.Average, dgc.Sum])
def test_decay_and_earlier_momentum_in_each_direction(maximize, local, op):
    """Against torch.optim.SGD: decay sent or local, averaged or summed, minimised or maximised; and the decay switched
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
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(
            sparsity=0.0, local_weight_decay=local), op=op)
        return run(network, optimizer, [rank()], 1.0)

    expected = run(*earlier(), range(2), 0.5 if op == dgc.Average else 1.0)
    assert difference(in_lockstep(worker)[0], expected) < 1e-6


def test_decay_in_any_order_of_dimensions(monkeypatch):
    """Channels last, or transposed: to the bit as a contiguous parameter, and by the compiled loop."""
    pytest.importorskip("dgc.compression.kernels.cpu", reason="numba is not installed", exc_type=ImportError)
    monkeypatch.setattr("dgc.compression.kernels.plain.decay", None)
    start = torch.randn(8, 9, 5, 6, generator=torch.Generator().manual_seed(0))

    def worker():
        parameters = [nn.Parameter(start.clone(memory_format=order)) for order in
                      (torch.contiguous_format, torch.channels_last)]
        parameters.append(nn.Parameter(start.transpose(0, 3).contiguous().transpose(0, 3)))
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1))
        for _ in range(3):
            for p in parameters:
                p.grad = torch.zeros_like(p)
            optimizer.step()
        return [p.detach() for p in parameters]

    contiguous, *others = in_lockstep(worker)[0]
    assert difference(contiguous, start) > 0.01 and all(torch.equal(other, contiguous) for other in others)


@pytest.mark.parametrize("config", [
    SPARSE, replace(SPARSE, apply_directly=True), replace(SPARSE, exchange="shared"), DENSE,
    dgc.Config(sparsity=0.9, min_numel=10**6, dense_dtype=torch.float16)],
    ids=["p.grad", "directly", "shared", "density 1", "float16"])
def test_any_order_of_dimensions(config):
    """Channels last, transposed, with gradients in that order and in another: to the bit as if all were contiguous."""
    def draw(seed, shape=(8, 9, 25, 6)):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    orders = {"contiguous": lambda x: x.contiguous(),
              "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
              "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3)}

    def train(of_parameter, of_gradient, steps=range(4), start=None, residuals=None, state=None):
        p = nn.Parameter(of_parameter(draw(0) if start is None else start))
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD([p], 0.1, momentum=0.9), [("p", p)], config)
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
        assert torch.equal(parameter, plain[0])
        for letter in "uv":
            assert residuals[letter].keys() == plain[1][letter].keys()
            assert all(torch.equal(x, plain[1][letter][name]) for name, x in residuals[letter].items())


def test_memory_formats_that_differ_between_ranks_are_refused():
    def worker():
        network, optimizer = wrapped(network=nn.Sequential(nn.Conv2d(8, 20, 5)))
        if rank() == 1:
            network.to(memory_format=torch.channels_last)
            network, optimizer = wrapped(network=network)
        network[0].weight.grad = torch.ones_like(network[0].weight)
        optimizer.step()

    with pytest.raises(ValueError, match=r"the ranks differ in the memory format of the parameters, when the optimizer "
                                         r"was made. Rank 1 has: 0.weight: its dimensions in the order \(0, 2, 3, 1\)"):
        in_lockstep(worker)


# -- parameters that come and go ---------------------------------------------------------------------------------------

def test_frozen_parameters_sit_out_and_thaw():
    """As a GAN toggles them: a frozen parameter is not moved, not even by its momentum, and then goes on."""
    def worker():
        network, optimizer = wrapped(DENSE)
        weight = network[6].weight
        for step in range(6):
            weight.requires_grad_(step not in (2, 3))
            before = weight.detach().clone()
            optimizer.zero_grad()
            backward(network, step)
            optimizer.step()
            assert torch.equal(before, weight) == (step in (2, 3))
        return flat(network)

    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        network[6].weight.requires_grad_(step not in (2, 3))
        optimizer.zero_grad()
        for r in range(2):
            (loss(network, r, step) / 2).backward()
        optimizer.step()
    results = in_lockstep(worker)
    assert torch.equal(*results) and difference(results[0], flat(network)) < 1e-6


def gan_step(network, optimizer, step, when):
    """Freezes the last layer for the first of two backward passes over different parts, or after the pass."""
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step * 2 + rank()))
    optimizer.zero_grad()
    if when == "thawed within the step":
        network[1].requires_grad_(False)
        network(x).square().mean().backward()
        network[1].requires_grad_(True)
        network[1](x).square().mean().backward()
    else:
        network(x).square().mean().backward()
        network[1].requires_grad_(False)
    optimizer.step()
    network[1].requires_grad_(True)


@pytest.mark.parametrize("when", ["thawed within the step", "frozen after the backward pass"])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_whatever_had_a_gradient_is_exchanged(when, clip_norm):
    def worker():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        network, optimizer = wrapped(dgc.Config(sparsity=0.9, clip_norm=clip_norm), network)
        for step in range(3):
            gan_step(network, optimizer, step, when)
        return flat(network)

    assert torch.equal(*in_lockstep(worker))


def test_what_is_frozen_from_the_start_costs_no_bytes():
    """A frozen backbone with a head: as many bytes as the head alone."""
    def worker(frozen):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 20))
        network[0].requires_grad_(not frozen)
        network, optimizer = wrapped(DENSE, network)
        optimizer.zero_grad()
        network(torch.randn(4, 100)).square().mean().backward()
        optimizer.step()
        return optimizer.report()

    head, whole = (in_lockstep(lambda frozen=frozen: worker(frozen))[0] for frozen in (True, False))
    assert head.bytes_sent == head.dense_bytes == 4 * 2020
    assert whole.bytes_sent == 4 * 12_120


def test_a_parameter_frozen_at_first_is_exchanged_when_it_thaws():
    """Stock Horovod has no hook on it, and lets the ranks drift apart."""
    def worker():
        network = model()
        network[3].weight.requires_grad_(False)
        network, optimizer = wrapped(DENSE, network)
        network[3].weight.requires_grad_(True)
        train(range(3), None, network, optimizer)
        return flat(network)

    results = in_lockstep(worker)
    assert torch.equal(*results)
    assert difference(results[0], flat(reference(range(3), 2, weight_decay=0.0)[0])) < 1e-6


def test_add_param_group():
    """Its parameters are exchanged too, under the names that were given."""
    def worker():
        network = model()
        named = list(network.named_parameters())
        inner = torch.optim.SGD([p for _, p in named[:4]], lr=0.05, momentum=0.9)
        optimizer = dgc.DistributedOptimizer(inner, named, DENSE)
        optimizer.add_param_group({"params": [p for _, p in named[4:]], "lr": 0.02})
        assert set(optimizer.residual_state_dict()["v"]) == {n for n, p in named if p.dim() > 1 and p.numel() >= 1024}
        train(range(3), None, network, optimizer)
        other = nn.Parameter(torch.zeros(40, 40))
        optimizer.add_param_group({"params": [other]})
        assert "allreduce.noname.2.0" in optimizer.residual_state_dict()["v"]
        return flat(network)

    network = model()
    parameters = list(network.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.02}], 0.05, 0.9)
    results = in_lockstep(worker)
    assert torch.equal(*results)
    assert difference(results[0], flat(reference(range(3), 2, network, optimizer)[0])) < 1e-6


def test_tied_weights_and_channels_last():
    def worker():
        torch.manual_seed(0)
        tied = nn.Linear(50, 50)
        network = nn.Sequential(nn.Conv2d(3, 50, 3).to(memory_format=torch.channels_last), nn.AdaptiveAvgPool2d(1),
                                nn.Flatten(), tied, nn.Tanh(), tied)
        network, optimizer = wrapped(SPARSE, network)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(step * 2 + rank()))
            network(x.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
        assert network[0].weight.grad.stride() == network[0].weight.stride()
        return flat(network)

    assert torch.equal(*in_lockstep(worker))


def test_a_model_that_was_moved_after_wrapping_is_refused():
    """Its gradients would be read at addresses of another device: with numba, a crash."""
    def worker():
        network, optimizer = wrapped()
        torch.__future__.set_swap_module_params_on_conversion(True)  # as model.cuda() does: the same parameters, moved
        try:
            network.to("meta")
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        for p in network.parameters():
            p.grad = torch.zeros_like(p)
        with pytest.raises(RuntimeError, match=r"6\.weight: \(40, 144\) on cpu when the DistributedOptimizer was made"):
            optimizer.step()

    in_lockstep(worker)


def test_a_parameter_that_has_another_shape_is_refused():
    """Its gradient would be read, and its update written, past its end."""
    def worker():
        network, optimizer = wrapped()
        network[6].weight.data = torch.zeros(40, 72)
        network[6].weight.grad = torch.zeros(40, 72)
        with pytest.raises(RuntimeError, match=r"6\.weight: \(40, 144\) on cpu when .* and \(40, 72\) on cpu now"):
            optimizer.step()

    in_lockstep(worker)


@pytest.mark.parametrize(("change", "message"), [
    (lambda groups: groups[0]["params"].append(nn.Parameter(torch.ones(40, 40))),
     r"changed by hand: one of shape \(40, 40\); accepted: add_param_group\(\)"),
    (lambda groups: groups[0]["params"].pop(), r"changed by hand: 8\.bias; accepted: .* requires_grad_\(False\)")])
def test_param_groups_changed_by_hand_are_refused(change, message):
    def worker():
        network, optimizer = wrapped()
        backward(network)
        optimizer.step()
        change(optimizer.param_groups)
        for call in (lambda: backward(network), optimizer.step, optimizer.flush,
                     lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})):
            with pytest.raises(RuntimeError, match=message):
                call()

    in_lockstep(worker)


def test_backward_passes_of_several_threads_open_a_step_once():
    """As torch runs them where a model has parameters on several devices: whoever comes second waits for the first,
    which may be asking the other ranks.
    """
    asked = []

    def sparsity(step):
        asked.append(step)
        time.sleep(1e-3)  # the other thread runs meanwhile
        return 0.9

    def worker():
        network = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40)])
        _, optimizer = wrapped(dgc.Config(sparsity=sparsity, nonfinite="skip"), network)
        together = threading.Barrier(2)

        def half(part):
            together.wait()
            part(torch.ones(1, 40)).sum().backward()

        threads = [threading.Thread(target=half, args=(part,)) for part in network]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(asked) == len(set(asked))  # for what is compared before the first step, no step is asked for twice
        optimizer.step()

    in_lockstep(worker, 1)


def test_sparse_gradients_with_momentum_are_saved_and_loaded():
    """And one that is dense for once."""
    def worker():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Embedding(50, 30, sparse=True), nn.Linear(30, 40))
        network, optimizer = wrapped(DENSE, network)
        words = torch.arange(5) * 7 + rank()

        def step(penalty=0.0):
            optimizer.zero_grad()
            value = network(words).square().mean()
            (value + penalty * network[0].weight.square().sum() if penalty else value).backward()
            optimizer.step()

        for penalty in (0.0, 0.0, 0.1):
            step(penalty)
        states = copy.deepcopy([network.state_dict(), optimizer.state_dict(), optimizer.residual_state_dict()])
        step()
        expected = flat(network)
        del optimizer
        network, optimizer = wrapped(DENSE, network)
        network.load_state_dict(states[0])
        optimizer.load_residual_state_dict(states[2])
        optimizer.load_state_dict(states[1])
        step()
        assert torch.equal(flat(network), expected)
        return expected

    assert torch.equal(*in_lockstep(worker))


@pytest.mark.parametrize("scaled", [False, True])
def test_what_is_pending_goes_with_the_first_sparse_gradient(scaled):
    """A parameter may have dense gradients first, say the zeros that hvd.broadcast_optimizer_state makes."""
    def worker():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8) if scaled else None
        table = nn.Embedding(60, 40, sparse=True)
        nn.init.zeros_(table.weight)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer = dgc.DistributedOptimizer(optimizer, table.named_parameters(), SPARSE, grad_scaler=scaler)
        weights = torch.randn(60, 40, generator=torch.Generator().manual_seed(rank()))
        total = torch.zeros(60, 40)
        for step, dense in enumerate([True, False, False]):
            optimizer.zero_grad()
            own = (table.weight * weights).sum() if dense else (table(torch.tensor([step, 5])) * weights[:2]).sum()
            if scaler is None:
                own.backward()
                optimizer.step()
            else:
                scaler.scale(own).backward()
                scaler.step(optimizer)
                scaler.update()
            if dense:
                total += weights
                assert optimizer.residual_state_dict()["v"]["weight"].any()
            else:
                total.index_add_(0, torch.tensor([step, 5]), weights[:2])
        return table.weight.detach(), total, optimizer.residual_state_dict()["v"]["weight"]

    (weight, total, v), (same, other, v_other) = in_lockstep(worker)
    assert torch.equal(weight, same) and not v.any() and not v_other.any()
    assert torch.allclose(-weight, (total + other) / 2, rtol=1e-5, atol=1e-6)


def test_two_optimizers_take_turns():
    """A GAN's: each has its own parameters, residuals and steps."""
    def worker():
        torch.manual_seed(0)
        g, d = nn.Linear(40, 40), nn.Linear(40, 40)
        (_, opt_g), (_, opt_d) = wrapped(network=g), wrapped(network=d)
        for step in range(4):
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step * 2 + rank()))
            opt_d.zero_grad()
            d(g(x).detach()).square().mean().backward()
            opt_d.step()
            d.requires_grad_(False)
            opt_g.zero_grad()
            d(g(x)).mean().backward()
            opt_g.step()
            d.requires_grad_(True)
        return torch.cat([flat(g), flat(d)])

    assert torch.equal(*in_lockstep(worker))


class Wrapper:
    """As Fabric's and PyTorch Lightning's: its class inherits from the optimizer's, whose attributes it reads."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.__class__ = type(f"Wrapped{type(optimizer).__name__}", (Wrapper, type(optimizer)), {})

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


@pytest.mark.parametrize("config", [SPARSE, dgc.Config(sparsity=0.9, clip_norm=1.0)])
def test_a_wrapper_that_inherits_from_it_passes_on(config):
    def worker():
        results = []
        for wrapper in (lambda optimizer: optimizer, Wrapper):
            network, optimizer = wrapped(config)
            optimizer = wrapper(optimizer)
            optimizer.add_param_group({"params": [other := nn.Parameter(torch.ones(40, 40))]})
            optimizer.set_backward_passes_per_step(2)
            for step in range(3):
                optimizer.zero_grad()
                for i in range(2):
                    (loss(network, rank(), 2 * step + i) + other.square().sum()).backward()
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
                if step == 1:
                    saved = copy.deepcopy([optimizer.residual_state_dict(), optimizer.state_dict()])
                    optimizer.flush()
                    optimizer.load_residual_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
            results.append((torch.cat([flat(network), other.detach().flatten()]), optimizer.report()))
        (plain, reported), (through, same) = results
        assert torch.equal(plain, through) and reported == same

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_lockstep(worker)


def test_the_first_backward_pass_waits_for_nobody():
    """A rank without a gradient for one of two optimizers comes to it only when the other one's step is done."""
    def worker():
        torch.manual_seed(0)
        first, side, last = (nn.Linear(40, 40) for _ in range(3))
        (_, one), (_, two) = wrapped(network=nn.Sequential(first, last)), wrapped(network=side)
        h = first(torch.randn(4, 40))
        last(h + side(h) if rank() == 0 else h).square().mean().backward()
        one.step()
        two.step()
        return torch.cat([flat(first), flat(side), flat(last)])

    assert torch.equal(*in_lockstep(worker))


def test_names_of_ours_are_not_those_of_torch():
    """The wrapped optimizer's attributes come along, and its methods call one another."""
    def worker():
        network, optimizer = wrapped(dgc.Config(sparsity=dgc.adaptive(least=0.9, most=0.999)))
        return vars(optimizer).keys() - vars(torch.optim.SGD(network.parameters(), 0.1)).keys()

    ours = set.union(*in_lockstep(worker)) | {name for name in vars(Distributed) if name[:1] == "_" != name[1:2]}
    torchs = Path(torch.__file__).parent
    for file in [*torchs.glob("optim/*.py"), torchs / "distributed/optim/zero_redundancy_optimizer.py"]:
        theirs = re.findall(r"(?:self\.|def )(\w+)", file.read_text())
        assert file.stem == "lr_scheduler" or not ours.intersection(theirs), file


# -- other optimizers --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_any_optimizer_without_momentum_correction(kind):
    def worker():
        network, optimizer = wrapped(dgc.Config(sparsity=0.0, momentum_correction=False), kind=kind,
                                     settings={"lr": 1e-3, "weight_decay": 0.1})
        train(range(4), None, network, optimizer)
        with pytest.raises(TypeError, match=rf"flush\(\) is accepted for torch\.optim\.SGD only; for {kind.__name__}"):
            optimizer.flush()
        return flat(network)

    network = model()
    optimizer = kind(network.parameters(), lr=1e-3, weight_decay=0.1)
    expected = flat(reference(range(4), 2, network, optimizer)[0])
    results = in_lockstep(worker)
    # Where a gradient is all but zero, Adam divides a rounding by itself.
    assert torch.equal(*results) and difference(results[0], expected) < 1e-3


class Lars(torch.optim.SGD):
    """A subclass whose step is another: it goes by the norm of what it finds in ``p.grad``."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["first"] = p.norm()
                p.sub_(p.grad * (group["lr"] * self.state[p]["first"] / p.grad.norm().clamp(min=1e-6)))


def test_an_sgd_with_a_step_of_its_own():
    """It would take updates for gradients; without momentum correction it is given gradients."""
    def worker():
        with pytest.raises(TypeError, match=r"Lars, but momentum correction is made for the step\(\) of SGD"):
            wrapped(kind=Lars)
        network, optimizer = wrapped(dgc.Config(sparsity=0.0, momentum_correction=False), kind=Lars)
        train(range(4), None, network, optimizer)
        assert optimizer.param_groups[0]["steps"] == 4
        with pytest.raises(TypeError, match=r"flush\(\) is accepted for torch\.optim\.SGD only; for Lars"):
            optimizer.flush()
        return flat(network)

    network = model()
    expected = flat(reference(range(4), 2, network, Lars(network.parameters(), lr=0.05, momentum=0.9))[0])
    results = in_lockstep(worker)
    assert torch.equal(*results) and difference(results[0], expected) < 1e-5


# -- state -------------------------------------------------------------------------------------------------------------

def test_loading_a_step_without_its_residuals_warns_once():
    def worker():
        network, optimizer = train(range(3), SPARSE)
        state, residuals = copy.deepcopy(optimizer.state_dict()), optimizer.residual_state_dict()
        del optimizer
        _, fresh = wrapped(network=network)
        fresh.load_state_dict(state)
        assert fresh.param_groups[0]["dgc_step"] == 3
        if rank() == 0:
            with pytest.warns(UserWarning, match="training goes on at step 3 without the residuals"):
                backward(network)
        else:
            backward(network)
        fresh.step()
        del fresh
        _, fresh = wrapped(network=network)
        fresh.load_state_dict(state)
        fresh.load_residual_state_dict(residuals)
        if rank() == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                backward(network)
        else:
            backward(network)
        fresh.step()

    in_lockstep(worker)


def test_loading_an_earlier_state_forgets_what_came_after():
    def worker():
        network, optimizer = wrapped()
        state = copy.deepcopy(optimizer.state_dict())
        train(range(3), None, network, optimizer)
        assert optimizer.report().residual_norm > 0
        optimizer.load_state_dict(state)
        assert optimizer.report().residual_norm == 0
        assert not any(u.any() for u in optimizer.residual_state_dict()["u"].values())

    in_lockstep(worker)


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
@pytest.mark.parametrize("config", [SPARSE, DENSE, dgc.Config(sparsity=0.9, apply_directly=True),
                                    dgc.Config(sparsity=0.9, dense_dtype=torch.float16)])
def test_a_bad_gradient_loses_nothing_of_other_buckets(config, op):
    """Also of those whose exchange had ended when it was found: what all ranks have in v is what they accumulated."""
    def gradient(rank, step, name):
        return torch.randn(40, 40, generator=torch.Generator().manual_seed(100 * step + 10 * rank + len(name)))

    def worker():
        network = nn.Module()
        network.good = nn.Parameter(torch.zeros(40, 40))
        network.small = nn.Parameter(torch.zeros(40, 40)[0])
        network.worse = nn.Parameter(torch.zeros(40, 40))
        groups = [[network.good, network.small], [network.worse]]
        _, optimizer = wrapped(config, network, groups=groups, op=op)
        for step in range(2):
            for name, p in network.named_parameters():
                p.grad = gradient(rank(), step, name).view(-1)[:p.numel()].view_as(p)
            if step == 0:
                optimizer.step()
        before = optimizer.residual_state_dict()
        if rank() == 1:
            network.worse.grad[3, 3] = torch.inf
        given = {name: p.grad.clone() for name, p in network.named_parameters()}
        with pytest.raises(FloatingPointError, match="rank 1 has a gradient that is not finite, in: worse"):
            optimizer.step()
        after = optimizer.residual_state_dict()
        kept = [name for name in after["v"] if name != "worse"]
        assert sorted(kept) == ["good"] + ["small"] * (config.dense_dtype is not None)
        u = {name: before["u"].get(name, torch.zeros(())) for name in kept}
        return ({name: before["v"][name] + 0.9 * u[name] + given[name] for name in kept},
                {name: after["v"][name] for name in kept})

    (accumulated, pending), (more, others) = in_lockstep(worker)
    for name in accumulated:
        assert torch.allclose(pending[name] + others[name], accumulated[name] + more[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_message_is_told_and_loses_nothing(damaged):
    """Of one of three buckets, as all ranks received it: before, between and after whole ones. Then they go on."""
    def worker():
        weights = {name: nn.Parameter(torch.zeros(40, 40)) for name in "abc"}
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD(weights.values(), lr=1.0), list(weights.items()),
                                             SPARSE, groups=[[p] for p in weights.values()])
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
                p.grad = torch.randn(40, 40, generator=torch.Generator().manual_seed(100 * step + 10 * number + rank()))
                total[name] += p.grad
            try:
                optimizer.step()
                ends.append("")
            except ValueError as error:
                ends.append(str(error))
        return ends, {n: p.detach() for n, p in weights.items()}, {
            name: total[name] - v for name, v in optimizer.residual_state_dict()["v"].items()}

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
        _, optimizer = wrapped(dgc.Config(sparsity=0.99, clip_norm=0.5), network, lr=1.0, momentum=0.0)
        network.bad.grad, network.large.grad = torch.zeros(40, 40), torch.full((40, 40), 1e6)
        if rank() == 0:
            network.bad.grad[3, 3] = torch.nan
        if size == 1:
            optimizer.step()
            return network.large.norm().item()
        with pytest.raises(FloatingPointError, match="rank 0 has a gradient that is not finite, in: bad"):
            optimizer.step()
        return optimizer.residual_state_dict()["v"]["large"].norm().item()

    assert all(norm <= 0.5 * size ** 0.5 * (1 + 1e-6) for norm in in_lockstep(worker, size))


def test_a_bound_on_the_norm_holds_with_one_process_too():
    def worker():
        weight = nn.Parameter(torch.zeros(40, 40))
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=dgc.Config(clip_norm=0.5))
        weight.grad = torch.full((40, 40), 3.0)
        optimizer.step()
        return weight.norm().item()

    assert in_lockstep(worker, 1)[0] == pytest.approx(0.5, rel=1e-6)


def test_a_refused_param_group_leaves_nothing_behind():
    def worker():
        network, optimizer = wrapped()
        for bad in ({"params": [nn.Parameter(torch.zeros(3))], "dampening": 0.5},
                    {"params": [nn.Parameter(torch.zeros(3, dtype=torch.complex64))]}):
            with pytest.raises((ValueError, TypeError), match="accepted"):
                optimizer.add_param_group(bad)
            assert len(optimizer.param_groups) == 1
        train(range(2), None, network, optimizer)
        backward(network)
        with pytest.raises(RuntimeError, match=r"add_param_group\(\) was called between backward\(\) and step"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(TypeError, match=r"accepted: copy\.deepcopy"):
            copy.copy(optimizer)
        optimizer.step()

    in_lockstep(worker)


def test_a_plain_checkpoint_of_sgd_is_taken_up():
    """Loaded on every rank: its momentum goes on, as in plain SGD."""
    plain_network, plain = reference(range(4), 2)
    file = io.BytesIO()
    torch.save([plain_network.state_dict(), plain.state_dict()], file)

    def worker():
        file.seek(0)
        states = torch.load(file)
        network, optimizer = wrapped(DENSE, settings={"lr": 1.0, "momentum": 0.1})
        network.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        train(range(4, 8), None, network, optimizer)
        return flat(network)

    results = in_lockstep(worker)
    assert difference(results[0], flat(reference(range(8), 2)[0])) < 1e-6


@pytest.mark.parametrize(("change", "message"), [
    (lambda s: s.update(size=3), r"residual_state_dict: size is 3; expected 2"),
    (lambda s: s.update(rank=1 - s["rank"]), r"residual_state_dict: rank is \d; expected \d"),
    (lambda s: s.update(version=9), r"residual_state_dict: version is 9; expected 1"),
    (lambda s: s["v"].pop("6.weight"), r"v lacks \['6\.weight'\] and has unknown \[\]"),
    (lambda s: s["u"].update(other=torch.zeros(1)), r"u lacks \[\] and has unknown \['other'\]"),
    (lambda s: s["u"].update({"6.weight": torch.zeros(2, 2)}),
     r"u of 6\.weight has shape \(2, 2\); expected \(40, 144\)"),
])
def test_residuals_that_do_not_fit_are_refused_whole(change, message):
    def worker():
        _, optimizer = train(range(2), SPARSE)
        before, changed = optimizer.residual_state_dict(), optimizer.residual_state_dict()
        change(changed)
        with pytest.raises(ValueError, match=message):
            optimizer.load_residual_state_dict(changed)
        after = optimizer.residual_state_dict()
        assert all(torch.equal(before[x][k], after[x][k]) for x in "uv" for k in before[x])

    in_lockstep(worker)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_train_on_like_the_original(copied):
    def worker():
        network, optimizer = train(range(3), SPARSE)
        other, other_optimizer = copied((network, optimizer))
        assert other is not network and type(other_optimizer) is not type(optimizer)
        assert isinstance(other_optimizer, torch.optim.SGD)
        train(range(3, 6), None, network, optimizer)
        train(range(3, 6), None, other, other_optimizer)
        return flat(network), flat(other)

    for original, other in in_lockstep(worker):
        assert torch.equal(original, other)


@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize("asked", [lambda optimizer: optimizer.residual_state_dict(),
                                   copy.deepcopy, pickle.dumps])
def test_residuals_that_lack_what_is_on_its_way_are_not_given(asked, synchronized):
    def worker():
        network, optimizer = train(range(2), SPARSE)
        optimizer.zero_grad()
        backward(network, 2)
        if synchronized:
            optimizer.synchronize()
        with pytest.raises(RuntimeError, match=r"asked for between backward\(\) and step\(\); accepted: after step"):
            asked(optimizer)
        with optimizer.skip_synchronize() if synchronized else contextlib.nullcontext():
            optimizer.step()
        asked(optimizer)

    in_lockstep(worker)


@pytest.mark.parametrize("residuals_first", [False, True])
def test_residuals_loaded_between_backward_and_step_are_those_that_were_saved(residuals_first):
    """To the bit, and so is what follows: nothing of the step that was not finished is added to them."""
    def worker():
        network, optimizer = train(range(3), SPARSE)
        saved = copy.deepcopy([network.state_dict(), optimizer.state_dict(), optimizer.residual_state_dict()])
        expected = flat(train(range(3, 6), None, network, optimizer)[0])
        optimizer.zero_grad()
        backward(network, 6)
        network.load_state_dict(saved[0])
        if residuals_first:
            optimizer.load_residual_state_dict(saved[2])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        if not residuals_first:
            optimizer.load_residual_state_dict(saved[2])
        loaded = optimizer.residual_state_dict()
        assert all(torch.equal(loaded[letter][name], x) for letter in "uv" for name, x in saved[2][letter].items())
        return torch.equal(flat(train(range(3, 6), None, network, optimizer)[0]), expected)

    assert in_lockstep(worker) == [True, True]


def test_one_process_is_told_that_the_momentum_of_several_is_not_in_their_state():
    state = in_lockstep(lambda: train(range(2), SPARSE)[1].state_dict())[0]

    def worker():
        _, optimizer = wrapped()
        with pytest.warns(UserWarning, match=r"begins without it: .* load by dgc\.load_checkpoint\(\)") as told:
            for _ in range(2):
                optimizer.load_state_dict(copy.deepcopy(state))
        own = copy.deepcopy(train(range(2), SPARSE)[1].state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrapped()[1].load_state_dict(own)
            wrapped(momentum=0.0)[1].load_state_dict({**state, "param_groups": [
                {**group, "momentum": 0.0} for group in state["param_groups"]]})
        return len(told)

    assert in_lockstep(worker, 1) == [1]


def test_torch_flattens_the_state():
    """As its distributed checkpoints are asked to, and it comes back."""
    from torch.distributed.checkpoint import state_dict as dcp
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=True)

    def worker():
        network, optimizer = train(range(2), SPARSE, weight_decay=0.0)
        assert all(value is not None for state in optimizer.state.values() for value in state.values())
        saved = dcp.get_optimizer_state_dict(network, optimizer, options=options)
        before = copy.deepcopy(optimizer.state_dict())
        dcp.set_optimizer_state_dict(network, optimizer, copy.deepcopy(saved), options=options)
        after = optimizer.state_dict()
        assert after["param_groups"][0]["dgc_step"] == 2 and before["state"].keys() == after["state"].keys()
        assert all(torch.equal(after["state"][i][key], x) for i, s in before["state"].items() for key, x in s.items())

    in_lockstep(worker)


def test_a_copy_knows_whose_gradients_are_sparse():
    """Also on a rank that has none at its next step."""
    def worker():
        network = nn.Embedding(50, 40, sparse=True)
        with torch.no_grad():
            network.weight.fill_(1.0)
        _, optimizer = wrapped(SPARSE, network, momentum=0.0)
        network(torch.tensor([rank()])).sum().backward()
        optimizer.step()
        other, optimizer = copy.deepcopy((network, optimizer))
        optimizer.zero_grad()
        if rank() == 0:
            other(torch.tensor([7])).sum().backward()
        optimizer.step()
        return other.weight.detach()

    one, two = in_lockstep(worker)
    expected = torch.ones(50, 40)
    expected[[0, 1, 7]] -= 0.05 / 2
    assert torch.equal(one, two) and torch.allclose(one, expected)


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
        assert torch.allclose(part, expected.double(), rtol=1e-3, atol=1e-5) and torch.equal(part, same[name])


@pytest.mark.parametrize("config", [SPARSE, replace(SPARSE, dense_dtype=torch.float16)], ids=["plain", "dense_dtype"])
def test_flush_leaves_frozen_parameters_alone(config):
    """They keep what they have pending, and thaw with it."""
    def worker():
        network, optimizer = train(range(3), config)
        frozen = {"3.weight": network[3].weight, "6.bias": network[6].bias}
        for p in frozen.values():
            p.requires_grad_(False)
        before, pending = {name: p.clone() for name, p in frozen.items()}, optimizer.residual_state_dict()["v"]
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


@pytest.mark.parametrize("exchange", ["allgather", "shared"])
@pytest.mark.parametrize("dtype", [torch.float16, None])
def test_flushing_while_evaluating(exchange, dtype):
    """As a trainer does that evaluates in inference mode: the training goes on as after any flush."""
    def worker():
        ends = []
        for mode in (torch.no_grad, torch.inference_mode):
            network, optimizer = train(range(2), dgc.Config(sparsity=0.9, exchange=exchange, dense_dtype=dtype))
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
        with pytest.raises(RuntimeError, match=r"flush\(\) was called between backward\(\) and step\(\)"):
            optimizer.flush()
        optimizer.step()

    in_lockstep(worker)


def test_the_report():
    def worker():
        network, optimizer = train(range(4), dgc.Config(sparsity=0.99))
        numel = sum(p.numel() for p in network.parameters())
        compressed = {n: p.numel() for n, p in network.named_parameters() if p.dim() > 1 and p.numel() >= 1024}
        entries = sum(-(-n // 100) for n in compressed.values())
        dense = numel - sum(compressed.values())
        report = optimizer.report()
        # float16 and 16-bit positions; for each parameter the count of its one block and an exponent; the checksum
        message = 4 * entries + 6 * len(compressed)
        message += -message % 4 + 8
        assert report.message_bytes == message + 4 * dense
        assert report.bytes_sent == (4 - 1) * message + 2 * 3 / 4 * 4 * dense
        assert report.dense_bytes == 2 * 3 / 4 * 4 * numel
        assert report.density == pytest.approx((entries + dense) / numel)
        assert report.total_bytes_sent == 4 * report.bytes_sent and report.steps == 4
        assert report.total_dense_bytes == 4 * report.dense_bytes
        v = torch.cat([x.flatten() for x in optimizer.residual_state_dict()["v"].values()])
        assert report.residual_norm == pytest.approx(v.norm().item(), rel=1e-5)
        optimizer.flush()  # which is no step
        assert optimizer.report().density == report.density and optimizer.report().bytes_sent == report.bytes_sent
        optimizer.zero_grad()
        loss(network, rank(), 9).backward(inputs=list(network.parameters()))
        return report.gradient_norm

    assert all(norm > 0 for norm in in_lockstep(worker, 4))


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_the_reported_gradient_is_the_last_one_clipped(clip_norm):
    """The clipping bounds the norm of all local gradients (paper, section 3.2); reported are the compressed ones."""
    def worker():
        config = dgc.Config(sparsity=0.99, clip_norm=clip_norm)
        network, optimizer = train(range(2), config)
        gradients = torch.autograd.grad(loss(network, rank(), 2), list(network.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        scale = 1.0 if clip_norm is None else clip_norm * 4 ** 0.5 / norm  # of 4 workers, to be averaged
        assert scale == 1 or scale < 0.5
        train([2], config, network, optimizer)
        compressed = torch.cat([g.flatten() for g in gradients if g.dim() > 1 and g.numel() >= 1024])
        assert optimizer.report().gradient_norm == pytest.approx(float(scale * compressed.norm()), rel=1e-5)

    in_lockstep(worker, 4)


def test_the_sparsity_follows_the_schedule_step_by_step():
    def worker():
        config = dgc.Config(sparsity=lambda step: 0.5 + step / 100)
        network, optimizer, total = model(), None, 0
        sizes = [p.numel() for p in network.parameters()]
        for step in range(3):
            network, optimizer = train([step], config, network, optimizer)
            sent = sum(count(0.5 + step / 100, n) if n >= config.min_numel else n for n in sizes)
            total += sent
            report = optimizer.report()
            assert report.density == sent / sum(sizes) and report.total_density == total / ((step + 1) * sum(sizes))

    in_lockstep(worker)


def test_a_schedule_that_leaves_the_range_names_the_step():
    def worker():
        train(range(4), dgc.Config(sparsity=lambda step: 1.0 if step == 2 else 0.9))

    with pytest.raises(ValueError, match=r"gives for step 2 is 1\.0"):
        in_lockstep(worker)


# -- errors at the door ------------------------------------------------------------------------------------------------

def sgd(**settings):
    return torch.optim.SGD(model().parameters(), **{"lr": 0.1, **settings})


class Compressor:
    """With what Horovod's are told by."""

    compress = decompress = None


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: dgc.DistributedOptimizer(sgd(), compression="fp16"), TypeError,
     r"compression is 'fp16'; accepted: a dgc\.Config"),
    (lambda: dgc.DistributedOptimizer(sgd(), compression=Compressor, grad_scaler=torch.amp.GradScaler("cpu")),
     ValueError, "grad_scaler is given and compression is Horovod's"),
    (lambda: dgc.DistributedOptimizer("sgd"), TypeError, r"optimizer is 'sgd'; accepted: a torch\.optim\.Optimizer"),
    (lambda: dgc.DistributedOptimizer(sgd(), op=2), ValueError, r"op is 2; .*accepted: Average \(0\) and Sum \(1\)"),
    (lambda: dgc.DistributedOptimizer(sgd(momentum=0.9, dampening=0.1)), ValueError, r"dampening is 0\.1; accepted: 0"),
    (lambda: dgc.DistributedOptimizer(torch.optim.Adam(model().parameters())), TypeError,
     r"optimizer is Adam, .*accepted: torch\.optim\.SGD, or Config\(momentum_correction=False\)"),
    (lambda: dgc.DistributedOptimizer(torch.optim.LBFGS(model().parameters())), TypeError, "optimizer is LBFGS"),
    (lambda: dgc.DistributedOptimizer(torch.optim.Adam(model().parameters()), compression=dgc.Config(
        momentum_correction=False, local_weight_decay=False)), TypeError, r"local_weight_decay=False\) is accepted"),
    (lambda: dgc.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))], 0.1)),
     TypeError, r"a parameter of shape \(2, 2\) has dtype torch\.complex64"),
    (lambda: dgc.DistributedOptimizer(sgd(), backward_passes_per_step=0), ValueError,
     "backward_passes_per_step must be > 0"),
    (lambda: dgc.DistributedOptimizer(sgd(), op=dgc.Sum, gradient_predivide_factor=2.0), ValueError,
     "gradient_predivide_factor not supported with op != Average"),
    (lambda: dgc.DistributedOptimizer(sgd(), groups=-1), ValueError, "groups should be a non-negative integer"),
    (lambda: dgc.DistributedOptimizer(sgd(), groups=[["a"]]), ValueError, r"groups must consist of torch\.Tensor"),
    (lambda: dgc.DistributedOptimizer(opt := sgd(), groups=[opt.param_groups[0]["params"][:2]] * 2), ValueError,
     "A parameter can only appear once in groups"),
    (lambda: dgc.DistributedOptimizer(opt := sgd(), [[n, p] for n, p in enumerate(opt.param_groups[0]["params"])]),
     ValueError, "named_parameters should be a sequence of tuples"),
    (lambda: dgc.DistributedOptimizer(opt := sgd(), [("same", p) for p in opt.param_groups[0]["params"]]), ValueError,
     "Parameter names in named_parameters must be unique. Found duplicates: same"),
    (lambda: dgc.DistributedOptimizer(sgd(), [("a", nn.Parameter(torch.zeros(1)))]), ValueError,
     "one or more model parameters were not named"),
    (lambda: dgc.DistributedOptimizer(dgc.DistributedOptimizer(sgd())), ValueError,
     "is a DistributedOptimizer already"),
    (lambda: dgc.DistributedOptimizer(sgd()).set_backward_passes_per_step(0), ValueError, "must be > 0"),
    (lambda: dgc.DistributedOptimizer(sgd(), process_set="all"), RuntimeError, "nothing to exchange gradients over"),
    (lambda: dgc.broadcast_parameters("model"), ValueError, "invalid params of type"),
    (lambda: dgc.broadcast_parameters([torch.zeros(1)], root_rank=2), ValueError, r"root_rank is 2; accepted: 0 to 1"),
])
def test_refuses(make, error, message):
    with pytest.raises(error, match=message):
        in_lockstep(make)


def test_dampening_set_later_is_refused_at_the_step():
    def worker():
        network, optimizer = wrapped()
        optimizer.param_groups[0]["dampening"] = 0.5
        train(range(1), None, network, optimizer)

    with pytest.raises(ValueError, match=r"dampening is 0\.5"):
        in_lockstep(worker)


def test_num_groups_is_deprecated():
    with pytest.warns(DeprecationWarning, match="`num_groups` has been replaced by `groups`"):
        in_lockstep(lambda: dgc.DistributedOptimizer(sgd(), num_groups=2), 1)


# -- straight from the messages ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("variant", ["plain", "nesterov", "channels last", "bfloat16", "maximize", "decay"])
@pytest.mark.parametrize("sparsity", [0.9, dgc.dense_until(3, 0.9)])
def test_applied_directly_is_the_same(variant, sparsity):
    """Beside the way through ``p.grad``: torch fuses the multiplication by lr with the addition, so to a rounding."""
    settings = {"lr": 0.05, "momentum": 0.9, "nesterov": variant == "nesterov", "maximize": variant == "maximize",
                "weight_decay": 0.01 if variant in ("decay", "maximize") else 0.0}
    dtype = torch.bfloat16 if variant == "bfloat16" else torch.float32

    def worker():
        results = []
        for directly in (False, True):
            network = model(dtype=dtype)
            if variant == "channels last":
                network = network.to(memory_format=torch.channels_last)
            _, optimizer = wrapped(dgc.Config(sparsity=sparsity, apply_directly=directly), network, settings=settings)
            for step in range(6):
                optimizer.zero_grad()
                loss(network, rank(), step, dtype).backward()
                optimizer.synchronize()
                for p in network.parameters():
                    assert (p.grad is None) == (directly and p.dim() > 1 and p.numel() >= 1024)
                with optimizer.skip_synchronize():
                    optimizer.step()
            optimizer.flush()
            results.append(flat(network))
        return results

    (a, b), (c, d) = in_lockstep(worker)
    assert torch.equal(a, c) and torch.equal(b, d)
    assert difference(b, a) <= (2e-2 if variant == "bfloat16" else 1e-6)


def test_applied_directly_parameters_have_changed_to_a_graph_that_holds_them():
    """Or its second backward pass would go through the new ones, where torch refuses that."""
    def worker():
        network = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False))
        dgc.broadcast_parameters(network.state_dict())
        network, optimizer = wrapped(dgc.Config(sparsity=0.9, apply_directly=True), network)
        y = network(torch.ones(2, 40))
        y.sum().backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            y.square().sum().backward()

    in_lockstep(worker)


def test_applied_directly_needs_momentum_correction():
    with pytest.raises(ValueError, match="apply_directly is True but momentum_correction is False"):
        dgc.Config(apply_directly=True, momentum_correction=False)


# -- small parameters rounded ------------------------------------------------------------------------------------------

def test_dense_dtype():
    """Half the bytes, nearly the same training, nothing lost; saved and loaded with the residuals."""
    def worker():
        plain, _ = train(range(6), dgc.Config(sparsity=0.0))
        network, optimizer = train(range(6), dgc.Config(sparsity=0.0, dense_dtype=torch.float16))
        state = optimizer.residual_state_dict()
        rest = torch.cat([state["v"][name].flatten() for name, p in network.named_parameters() if p.numel() < 1024])
        optimizer.load_residual_state_dict(state)
        optimizer.flush()
        assert all(not v.any() for v in optimizer.residual_state_dict()["v"].values())
        return flat(plain), flat(network), rest, optimizer.report().message_bytes

    results = in_lockstep(worker)
    small = [p.numel() for p in model().parameters() if p.dim() < 2 or p.numel() < 1024]
    large = sum(p.numel() for p in model().parameters()) - sum(small)
    message = 2 * sum(small) + 2 * len(small)
    for plain, rounded, rest, message_bytes in results:
        assert torch.equal(rounded, results[0][1]) and difference(rounded, plain) < 1e-4
        assert rest.any() and message_bytes == 4 * large + message + -message % 4 + 8


@pytest.mark.parametrize("size", [2, 5])
def test_dense_dtype_keeps_what_a_frozen_parameter_has_pending(size):
    """For when it thaws: among few ranks, which gather, and among many, which sum."""
    def worker():
        network = nn.ParameterDict({name: nn.Parameter(torch.zeros(50)) for name in "ab"})
        _, optimizer = wrapped(dgc.Config(dense_dtype=torch.float16), network)
        optimizer.load_residual_state_dict({**optimizer.residual_state_dict(),
                                            "v": {name: torch.full((50,), 1.0 + rank()) for name in "ab"}})
        network["a"].requires_grad_(False)
        network["b"].grad = torch.ones(50)
        optimizer.step()
        v = optimizer.residual_state_dict()["v"]
        assert v["a"].eq(1.0 + rank()).all() and not network["a"].any()
        assert not v["b"].any() and network["b"].all()
        network["a"].requires_grad_(True)
        optimizer.zero_grad()
        optimizer.step()
        assert not optimizer.residual_state_dict()["v"]["a"].any()
        mean = sum(range(1, size + 1)) / size
        assert torch.allclose(network["a"], torch.full((50,), -0.05 * mean))

    in_lockstep(worker, size)


def test_dense_dtype_is_float16_bfloat16_or_none():
    with pytest.raises(ValueError, match=r"dense_dtype is torch.float32; accepted: None, torch.float16"):
        dgc.Config(dense_dtype=torch.float32)


def test_a_checkpoint_loaded_before_wrapping_lacks_residuals_too():
    def worker():
        network, optimizer = train(range(3), SPARSE)
        plain = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        plain.load_state_dict(optimizer.state_dict())
        again = dgc.DistributedOptimizer(plain, network.named_parameters(), SPARSE)
        del optimizer
        train([3], None, network, again)

    with pytest.warns(UserWarning, match="goes on at step 3 without the residuals") as told:
        in_lockstep(worker)
    assert len(told) == 2  # each rank


# -- unusual models ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shapes", [[(40, 50)], [(1, 1)], [(0, 7), (3,), (30, 40)], [(0,), (1,), ()],
                                    [(2 + i % 9, 3 + i % 5) for i in range(5000)]], ids=lambda shapes: str(len(shapes)))
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
    total = [sum(gs) for gs in zip(*(gradients(r, step) for r in range(2) for step in range(3)), strict=True)]
    for i, (p, q) in enumerate(zip(one, other, strict=True)):
        pending = (v[f"p{i}"] + w[f"p{i}"]) / 2 if f"p{i}" in v else torch.zeros_like(p)
        assert torch.equal(p, q) and torch.allclose(p, pending - total[i] / 2, rtol=1e-4, atol=1e-5)
        assert sparsity or not pending.any()


def test_more_entries_than_positions_are_refused_or_divided():
    """2^31 and more; on the meta device, as they would not fit into memory."""
    huge = nn.Parameter(torch.empty(1 << 16, 1 << 15, device="meta"))

    def worker():
        with pytest.raises(ValueError, match="has 2147483648 entries; accepted: at most 2147483647"):
            dgc.DistributedOptimizer(torch.optim.SGD([huge], lr=0.1), [("huge", huge)])

    in_lockstep(worker)
    large = [nn.Parameter(torch.empty(1 << 15, 1 << 15, device="meta")) for _ in range(3)]
    packed = pack(large, {p: str(i) for i, p in enumerate(large)}, 1, 0)
    assert [names for names, _ in packed] == [["2"], ["1"], ["0"]]
