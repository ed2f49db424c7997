"""Parameters that freeze and thaw, come and go."""

import copy
import threading
import time

import pytest
import torch
from laws import (
    DENSE,
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
from torch import nn

import dgc


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
        assert set(optimizer.residual_state_dict()["v"]) == {
            n for n, p in named if p.dim() > 1 and p.numel() >= 1024
        }
        train(range(3), None, network, optimizer)
        other = nn.Parameter(torch.zeros(40, 40))
        optimizer.add_param_group({"params": [other]})
        assert "allreduce.noname.2.0" in optimizer.residual_state_dict()["v"]
        return flat(network)

    network = model()
    parameters = list(network.parameters())
    optimizer = torch.optim.SGD(
        [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.02}], 0.05, 0.9
    )
    results = in_lockstep(worker)
    assert torch.equal(*results)
    assert difference(results[0], flat(reference(range(3), 2, network, optimizer)[0])) < 1e-6


def test_a_copy_knows_the_names_of_what_is_still_to_be_added():
    def worker():
        network = model()
        named = list(network.named_parameters())
        inner = torch.optim.SGD([p for _, p in named[:4]], lr=0.05)
        pair = copy.deepcopy((network, dgc.DistributedOptimizer(inner, named, DENSE)))
        pair[1].add_param_group({"params": list(pair[0].parameters())[4:]})
        assert pair[1]._parameter_names == {p: name for name, p in pair[0].named_parameters()}

    in_lockstep(worker)


def test_a_model_that_was_moved_after_wrapping_is_refused():
    """Its gradients would be read at addresses of another device: with numba, a crash."""

    def worker():
        network, optimizer = wrapped()
        # As model.cuda() does: the same parameters, moved.
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            network.to("meta")
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        for p in network.parameters():
            p.grad = torch.zeros_like(p)
        with pytest.raises(RuntimeError, match=r"6\.weight must be \(40, 144\) on cpu, "):
            optimizer.step()

    in_lockstep(worker)


def test_a_parameter_that_has_another_shape_is_refused():
    """Its gradient would be read, and its update written, past its end."""

    def worker():
        network, optimizer = wrapped()
        network[6].weight.data = torch.zeros(40, 72)
        network[6].weight.grad = torch.zeros(40, 72)
        with pytest.raises(
            RuntimeError, match=r"6\.weight must be \(40, 144\) on cpu, .* got \(40, 72\) on cpu"
        ):
            optimizer.step()

    in_lockstep(worker)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda groups: groups[0]["params"].append(nn.Parameter(torch.ones(40, 40))),
            r"must not be changed by hand, got one of shape \(40, 40\) \(use add_param_group\(\)",
        ),
        (
            lambda groups: groups[0]["params"].pop(),
            r"must not be changed by hand, got 8\.bias .* requires_grad_\(False\)",
        ),
    ],
)
def test_param_groups_changed_by_hand_are_refused(change, message):
    def worker():
        network, optimizer = wrapped()
        backward(network)
        optimizer.step()
        change(optimizer.param_groups)
        for call in (
            lambda: backward(network),
            optimizer.step,
            optimizer.flush,
            lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
        ):
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
        if step == 0:
            time.sleep(0.05)  # the other thread runs meanwhile
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
        # For what is compared before the first step, no step is asked for twice.
        assert len(asked) == len(set(asked))
        optimizer.step()

    in_lockstep(worker, 1)


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
