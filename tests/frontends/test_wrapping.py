"""What wrapping an optimizer makes of it: the optimizer that it was."""

import copy
import pickle
import warnings

import pytest
import torch
from laws import (
    DENSE,
    SPARSE,
    Lars,
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
from dgc.frontends.facade import Distributed


def test_it_is_the_optimizer_that_was_wrapped():
    def worker():
        network = model()
        inner = torch.optim.SGD(
            network.parameters(), lr=0.3, momentum=0.7, weight_decay=0.2, nesterov=True
        )
        optimizer = dgc.DistributedOptimizer(inner, network.named_parameters())
        assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
        assert optimizer.defaults == inner.defaults  # Horovod's are those of SGD() instead
        assert optimizer.param_groups is inner.param_groups
        assert optimizer._compression == dgc.Config()

    in_lockstep(worker)


def test_with_one_process_it_is_the_plain_optimizer():
    def worker():
        network, optimizer = wrapped(settings={"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2})
        train(range(6), None, network, optimizer)
        optimizer.flush()
        assert optimizer.residual_state_dict() == {
            "version": 1,
            "rank": 0,
            "size": 1,
            "u": {},
            "v": {},
        }
        assert optimizer.report().bytes_sent == 0
        return flat(network)

    assert torch.equal(in_lockstep(worker, 1)[0], flat(reference(range(6), 1)[0]))


def scheduled():
    """A model, its optimizer, and a check that a scheduler made before wrapping drives that."""
    network = model()
    inner = torch.optim.SGD(network.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.1)
    optimizer = dgc.DistributedOptimizer(inner, network.named_parameters(), DENSE)

    def drives():
        with warnings.catch_warnings():
            # The optimizer that it knows is not the one that is stepped.
            warnings.simplefilter("error")
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
            results.append(
                (torch.cat([flat(network), other.detach().flatten()]), optimizer.report())
            )
        (plain, reported), (through, same) = results
        assert torch.equal(plain, through) and reported == same

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_lockstep(worker)


KINDS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and kind is not torch.optim.Optimizer
    and issubclass(kind, torch.optim.Optimizer)
]


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_ours_are_not_those_of_torch(kind):
    """The wrapped optimizer's attributes come along, and its methods call one another."""
    inner = kind([nn.Parameter(torch.ones(2, 2))])
    ours = {name for name in vars(Distributed) if not name.startswith("__")}
    # Which ours mean to replace.
    theirs = {name for name in dir(torch.optim.Optimizer) if not name.startswith("__")}
    assert not ours & vars(inner).keys() and not (ours - theirs) & set(dir(kind))


@pytest.mark.parametrize("sparsity", [0.9, dgc.dense_until(100, then=0.9)])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_without_its_momentum_is_refused(kind, sparsity):
    """Before anything is exchanged, so on each rank alone. Dense it accumulates nothing; other optimizers may."""

    def wrap(kind, sparsity, **settings):
        p = nn.Parameter(torch.zeros(40, 40))
        dgc.DistributedOptimizer(
            kind([p], **settings), [("p", p)], dgc.Config(sparsity, momentum_correction=False)
        )

    def worker():
        with pytest.raises(
            ValueError, match=rf"must be True for {kind.__name__}, got False \(.* 7 % above dense"
        ):
            wrap(kind, sparsity)
        wrap(kind, 0.0)
        wrap(torch.optim.RMSprop, sparsity)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_lockstep(worker)

    with pytest.warns(
        UserWarning, match="should be True, with torch.optim.AdamW in place of Adam"
    ) as told:
        in_lockstep(lambda: wrap(torch.optim.Adam, sparsity, weight_decay=0.1))
    assert [warning.filename for warning in told] == [__file__]  # of rank 0 alone


def test_it_adds_one_attribute():
    def worker():
        network, optimizer = wrapped(dgc.Config(sparsity=dgc.adaptive(least=0.9, most=0.999)))
        return vars(optimizer).keys() - vars(torch.optim.SGD(network.parameters(), 0.1)).keys()

    assert in_lockstep(worker) == [{"_dgc"}] * 2


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_any_optimizer_without_momentum_correction(kind):
    def worker():
        network, optimizer = wrapped(
            dgc.Config(sparsity=0.0, momentum_correction=False),
            kind=kind,
            settings={"lr": 1e-3, "weight_decay": 0.1},
        )
        train(range(4), None, network, optimizer)
        optimizer.flush()  # nothing is pending
        return flat(network)

    network = model()
    optimizer = kind(network.parameters(), lr=1e-3, weight_decay=0.1)
    expected = flat(reference(range(4), 2, network, optimizer)[0])
    results = in_lockstep(worker)
    # Where a gradient is all but zero, Adam divides a rounding by itself.
    assert torch.equal(*results) and difference(results[0], expected) < 1e-3


def test_an_sgd_with_a_step_of_its_own():
    """It would take updates for gradients; without momentum correction it is given gradients."""

    def worker():
        with pytest.raises(TypeError, match=r"momentum correction, .* got Lars"):
            wrapped(SPARSE, kind=Lars)
        network, optimizer = wrapped(dgc.Config(sparsity=0.0, momentum_correction=False), kind=Lars)
        train(range(4), None, network, optimizer)
        assert optimizer.param_groups[0]["steps"] == 4
        with pytest.raises(TypeError, match=r"flush\(\) must .* got Lars"):
            wrapped(dgc.Config(0.9, momentum_correction=False), kind=Lars)[1].flush()
        return flat(network)

    network = model()
    expected = flat(
        reference(range(4), 2, network, Lars(network.parameters(), lr=0.05, momentum=0.9))[0]
    )
    results = in_lockstep(worker)
    assert torch.equal(*results) and difference(results[0], expected) < 1e-5


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


def test_hooks_may_change_a_state_before_it_is_loaded():
    """As torch's documentation of load_state_dict has them, to adapt what another model has saved."""

    def worker():
        network, optimizer = train(range(3), SPARSE)
        state, residuals = copy.deepcopy(optimizer.state_dict()), optimizer.residual_state_dict()
        other, fresh = copy.deepcopy(network), None
        fresh = dgc.DistributedOptimizer(
            torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9),
            other.named_parameters(),
            SPARSE,
        )
        fresh.register_load_state_dict_pre_hook(lambda _, saved: {**saved, **state})
        fresh.load_residual_state_dict(residuals)
        fresh.load_state_dict({"state": {}, "param_groups": []})
        assert fresh.param_groups[0]["dgc_step"] == 3
        return flat(train(range(3, 5), None, other, fresh)[0]), flat(
            train(range(3, 5), None, network, optimizer)[0]
        )

    for got, expected in in_lockstep(worker):
        assert torch.equal(got, expected)
