"""Ranks that do not train the same thing are told so, all of them, before anything is exchanged."""

import warnings

import pytest
import torch
from launch import launch
from laws import (
    difference,
    flat,
    model,
    rank,
    train,
)
from torch import nn

import dgc
from dgc.engine.engine import engine_of
from dgc.transport import find


def another_configuration():
    """Rank 1 has another density: messages of another size."""
    train(range(2), dgc.Config(sparsity=0.99 if find().world.rank == 1 else 0.9))


def differing(worker):
    """What three ranks are told, of which rank 1 is another."""
    told = []

    def caught():
        try:
            worker(rank() == 1)
        except ValueError as error:
            told.append(str(error))

    dgc.lockstep.run(caught, 3)
    assert len(told) == 3 and len(set(told)) == 1, told
    return told[0]


def in_adamw(odd):
    """A schedule that is sparse from its start: it begins after 1 / (1 - b2) dense steps."""
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), betas=(0.9, 0.95 if odd else 0.9))
    return network, dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(0.9))


def another_shape(network):
    return nn.Sequential(*network[:8], nn.Linear(40, 11))


@pytest.mark.parametrize(
    ("worker", "section", "there", "here"),
    [
        (
            lambda odd: train([0], dgc.Config(0.95, clip_norm=1.0 if odd else None)),
            "the arguments of DistributedOptimizer",
            "clip_norm=1.0",
            "clip_norm=None",
        ),
        (
            lambda odd: train([0], dgc.Config(), another_shape(model()) if odd else model()),
            "the model's parameters",
            "8.weight (11, 40) torch.float32",
            "8.weight (10, 40) torch.float32",
        ),
        (
            lambda odd: train([0], dgc.Config(), model()[:7] if odd else model()),
            "the model's parameters",
            "nothing",
            "8.weight (10, 40) torch.float32",
        ),
        (
            lambda odd: train([0], dgc.Config(), groups=2 if odd else None),
            "the parameters that travel together",
            "",
            "",
        ),
        (
            lambda odd: train([0], dgc.Config(dgc.piecewise({0: 0.9, 300: 0.99 if odd else 0.95}))),
            "the schedule of the sparsity",
            "step 512: 0.99",
            "step 512: 0.95",
        ),
        (
            lambda odd: train(
                [0], dgc.Config(dgc.warmup(steps_per_epoch=392 if odd else 391))
            ),  # data that do not divide
            "the schedule of the sparsity",
            "Piecewise(steps=(0, 392, 784,",
            "Piecewise(steps=(0, 391, 782,",
        ),
        (
            lambda odd: train([0], dgc.Config(0.99 if odd else 0.95)),
            "the schedule of the sparsity",
            "step 0: 0.99",
            "step 0: 0.95",
        ),
        (
            lambda odd: train(
                [0], dgc.Config(lambda step: 0.9 if step < (391 if odd else 392) else 0.99)
            ),  # a script's own
            "the schedule of the sparsity",
            "step 391: 0.99",
            "step 391: 0.9",
        ),
        (
            lambda odd: train([0], None, *in_adamw(odd)),
            "the dense steps in which AdamW's denominator is found",
            "20",
            "10",
        ),
    ],
)
def test_all_ranks_are_told_in_what_they_differ(worker, section, there, here):
    error = differing(worker)
    assert error.startswith(f"the ranks differ in {section}") and "Rank 1 has: " + there in error
    assert "rank 0 has: " + here in error


def test_a_rank_that_goes_on_from_a_checkpoint_alone():
    """The others would stand at another density and learning rate."""

    def worker(odd):
        network, optimizer = train(range(3), dgc.Config(0.9))
        saved = optimizer.state_dict()
        other = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        other = dgc.DistributedOptimizer(other, network.named_parameters(), dgc.Config(0.9))
        if odd:
            other.load_state_dict(saved)
        train([3], None, network, other)

    error = differing(worker)
    assert (
        "the ranks differ in the step. Rank 1 has: group 0: dgc_compressed_from=0; rank 0 has: group 0: "
        "dgc_compressed_from=-1"
    ) in error


def test_what_is_only_unwise_is_one_warning_and_the_updates_agree():
    """Stock Horovod says nothing: ranks that begin apart, or go at their own rates, go on so."""

    def worker():
        odd = rank() == 1
        network = model(seed=int(odd))
        before = flat(network)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5 if odd else 0.25, momentum=0.0)
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(0.9))
        train([0], None, network, optimizer)
        moved = (flat(network) - before) / optimizer.param_groups[0]["lr"]
        gradients = torch.cat([p.grad.flatten() for p in network.parameters()])
        train([1], None, network, optimizer)
        return moved, gradients

    with pytest.warns(UserWarning) as told:
        (moved, gradients), (moved_odd, gradients_odd) = dgc.lockstep.run(worker, 2)
    assert torch.equal(gradients, gradients_odd)
    assert difference(moved, -gradients) < 1e-5 and difference(moved_odd, -gradients) < 1e-5
    # Where step() is called.
    assert len(told) == 1 and told[0].filename.endswith("laws.py"), [str(w) for w in told]
    message = str(told[0].message)
    assert (
        "the optimizer's settings. Rank 1 has: group 0: lr=0.5; rank 0 has: group 0: lr=0.25. "
        in message
    )
    assert "the parameters' values. Rank 1 has: bits of 0.weight add up to" in message
    assert "dgc.broadcast_parameters(model.state_dict())" in message


def test_another_class_of_optimizer_is_one_warning():
    """One whose step is a script's own, say."""

    class Mine(torch.optim.SGD):
        pass

    def worker():
        network = model()
        optimizer = (Mine if rank() else torch.optim.SGD)(network.parameters(), lr=0.05)
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(0.9))
        train([0], None, network, optimizer)

    with pytest.warns(
        UserWarning, match=r"Rank 1 has: its class is .*Mine; rank 0 has: its class is SGD\."
    ):
        dgc.lockstep.run(worker, 2)


def test_settings_that_only_look_different_are_no_difference():
    """Objects at other addresses, sets in another order, tensors, keys of other types."""

    def worker():
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), lr=torch.tensor(0.05), momentum=0.9)
        odd = rank() == 1
        optimizer.param_groups[0].update(
            {
                "call": lambda: odd,
                "object": object(),
                "names": {"a", "b"} if odd else {"b", "a"},
                7: torch.ones(3),
                "pair": (1.0, 2.0) if odd else [1.0, 2.0],
                "complex": torch.tensor(1j),
            }
        )
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(0.9))
        train([0], None, network, optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dgc.lockstep.run(worker, 2)


def test_ranks_that_are_alike_are_asked_once():
    def worker():
        network, optimizer = train(range(1), dgc.Config(0.9))
        begun = engine_of(optimizer).settings.transport._begun
        assert begun["dgc.agree"] == 1 and not any(name.startswith("dgc.agree.") for name in begun)
        train(range(1, 4), None, network, optimizer)
        assert begun["dgc.agree"] == 1

    dgc.lockstep.run(worker, 2)


@pytest.mark.parametrize("launcher", ["horovod", "torch"])
def test_processes_that_differ_end_with_the_reason_on_screen(launcher):
    status, output, _ = launch(launcher, 2, [another_configuration], limit=120, check=False)
    assert status != 0
    assert (
        "the ranks differ in the schedule of the sparsity. Rank 1 has: step 0: 0.99; rank 0 has: step 0"
        in output
    )
