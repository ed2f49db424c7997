"""Parameters that freeze and thaw, come and go, or have sparse gradients."""

import copy
import threading
import time

import pytest
import torch
from laws import DENSE, SPARSE, backward, difference, flat, in_lockstep, loss, model, rank, reference, train, wrapped
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
        with pytest.raises(RuntimeError,
                           match=r"6\.weight must be \(40, 144\) on cpu, as when the DistributedOptimizer was made"):
            optimizer.step()

    in_lockstep(worker)


def test_a_parameter_that_has_another_shape_is_refused():
    """Its gradient would be read, and its update written, past its end."""
    def worker():
        network, optimizer = wrapped()
        network[6].weight.data = torch.zeros(40, 72)
        network[6].weight.grad = torch.zeros(40, 72)
        with pytest.raises(RuntimeError, match=r"6\.weight must be \(40, 144\) on cpu, .* got \(40, 72\) on cpu"):
            optimizer.step()

    in_lockstep(worker)


@pytest.mark.parametrize(("change", "message"), [
    (lambda groups: groups[0]["params"].append(nn.Parameter(torch.ones(40, 40))),
     r"must not be changed by hand, got one of shape \(40, 40\) \(use add_param_group\(\)"),
    (lambda groups: groups[0]["params"].pop(), r"must not be changed by hand, got 8\.bias .* requires_grad_\(False\)")])
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


def linear(table, step, r):
    """A loss whose gradient does not depend on where the parameters are meanwhile."""
    generator = torch.Generator().manual_seed(10 * step + r)
    return (table(torch.randint(0, 60, (8,), generator=generator)) * torch.randn(8, 30, generator=generator)).sum()


def embedding(sparse, settings):
    torch.manual_seed(0)
    table = nn.Embedding(60, 30, sparse=sparse)
    return table, torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9, **settings)


@pytest.mark.parametrize("settings", [{}, {"nesterov": True}, {"maximize": True}])
@pytest.mark.parametrize("sparsity", [0.0, 0.9])
@pytest.mark.parametrize("begins", ["a dense gradient", "a momentum"])
@pytest.mark.parametrize("op", [dgc.Average, dgc.Sum])
def test_momentum_goes_on_with_the_first_sparse_gradient(begins, sparsity, settings, op):
    """Against torch's SGD on dense gradients. Unmasked, what is pending makes good for what was not sent."""
    def begin(table, optimizer):
        if begins == "a momentum":  # that the optimizer had before it was wrapped
            optimizer.state[table.weight]["momentum_buffer"] = torch.ones(60, 30)

    def worker():
        table, optimizer = embedding(True, settings)
        begin(table, optimizer)
        config = dgc.Config(sparsity, factor_masking=False)
        optimizer = dgc.DistributedOptimizer(optimizer, table.named_parameters(), config, op=op)
        if begins == "a dense gradient":
            table.weight.grad = torch.zeros_like(table.weight)  # as hvd.broadcast_optimizer_state leaves it
        for step in range(4):
            linear(table, step, rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        residuals = optimizer.residual_state_dict()
        assert not residuals["u"]["weight"].any() and not residuals["v"]["weight"].any()
        return table.weight.detach()

    table, optimizer = embedding(False, settings)
    begin(table, optimizer)
    for step in range(4):
        for r in range(2):
            (linear(table, step, r) / (2 if op == dgc.Average else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = in_lockstep(worker)
    assert torch.equal(*results) and difference(results[0], table.weight.detach()) < 1e-6


@pytest.mark.parametrize("settings", [{"clip_norm": 1.0}, {"clip_norm": 1.0, "clip_per_tensor": True},
                                      {"momentum_correction": False, "clip_norm": 1.0}])
def test_what_is_pending_is_not_clipped_again(settings):
    """And waits for the next step if this one fails, on all ranks."""
    def worker():
        table, other = nn.Embedding(60, 40, sparse=True), nn.Parameter(torch.zeros(40, 40))
        nn.init.zeros_(table.weight)
        optimizer = torch.optim.SGD([table.weight, other], lr=1.0)
        optimizer = dgc.DistributedOptimizer(optimizer, [("table", table.weight), ("other", other)],
                                             dgc.Config(0.9, **settings))
        weights = 0.01 * torch.randn(60, 40, generator=torch.Generator().manual_seed(rank()))
        (table.weight * weights).sum().backward()  # of a norm below 1
        optimizer.step()
        for factor in (torch.nan if rank() == 1 else 1.0, 100.0):
            optimizer.zero_grad()
            (0 * table(torch.tensor([1])).sum() + factor * other.sum()).backward()
            if factor == 100.0:
                optimizer.step()
            else:
                with pytest.raises(FloatingPointError, match="rank 1 has a gradient that is not finite, in: other"):
                    optimizer.step()
        return table.weight.detach(), weights

    (weight, weights), (same, others) = in_lockstep(worker)
    assert torch.equal(weight, same)
    assert torch.allclose(-weight, (weights + others) / 2, rtol=1e-3, atol=1e-7)


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
