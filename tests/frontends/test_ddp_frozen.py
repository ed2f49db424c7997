"""The hook of DistributedDataParallel, and parameters that are frozen after it was registered."""

import pytest
import torch
from launch import ran
from laws import flat
from torch import nn

import dgc

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
}
SCHEDULES = {"dense": 0.0, "compressed": 0.99, "dense first": dgc.piecewise({0: 0.0, 3: 0.9})}


def frozen_later():
    """Optimizer, schedule -> whether the frozen layer stays where it is, and the other one goes on."""
    results = {}
    for kind, make in OPTIMIZERS.items():
        for name, sparsity in SCHEDULES.items():
            torch.manual_seed(0)
            network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
            model = nn.parallel.DistributedDataParallel(network, find_unused_parameters=True)
            optimizer = make(network.parameters())
            dgc.register_comm_hook(model, optimizer, dgc.Config(sparsity))
            for step in range(12):
                if step == 5:
                    network[0].requires_grad_(False)
                    frozen, other = flat(network[0]).clone(), flat(network[2]).clone()
                optimizer.zero_grad()
                model(torch.randn(8, 32)).square().mean().backward()
                optimizer.step()
            results[kind, name] = (
                torch.equal(flat(network[0]), frozen),
                torch.equal(flat(network[2]), other),
            )
    return results


def thawed(registered):
    """Weights after a training in which a layer thaws, with DDP and, beside it, without: both add it as a new group."""
    torch.manual_seed(torch.distributed.get_rank())
    batches, config = torch.randn(12, 8, 32), dgc.Config(dgc.piecewise({0: 0.5, 3: 0.9, 8: 0.99}))
    ends = []
    for ddp in (True, False):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        network[0].requires_grad_(False)
        optimizer = OPTIMIZERS["SGD"](network[2].parameters())
        if ddp:
            model = nn.parallel.DistributedDataParallel(network)
            dgc.register_comm_hook(model, optimizer, config)
        else:
            model, optimizer = (
                network,
                dgc.DistributedOptimizer(
                    optimizer, network[2].named_parameters("2"), compression=config
                ),
            )
        for step, x in enumerate(batches):
            if step == 5:
                network[0].requires_grad_(True)
                optimizer.add_param_group({"params": network[0].parameters(), "lr": 0.01})
                if ddp:
                    model = nn.parallel.DistributedDataParallel(network)
                    if registered:
                        dgc.register_comm_hook(model, optimizer, config)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            try:
                optimizer.step()
            except RuntimeError as error:
                return str(error)
        ends.append((flat(network), optimizer.report().steps, optimizer.report().sparsity))
    return torch.equal(ends[0][0], ends[1][0]), ends[0][1:] == ends[1][1:] == (12, 0.99)


def registered_again():
    return thawed(True)


def not_registered():
    return thawed(False)


IN_PROCESSES = {2: (frozen_later, registered_again, not_registered), 3: (frozen_later,)}


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_parameter_that_is_frozen_later_stays_where_it_is(size):
    """As in plain DDP: no momentum, no weight decay, and nothing that was pending."""
    expected = {(kind, name): (True, False) for kind in OPTIMIZERS for name in SCHEDULES}
    assert ran("torch", size, IN_PROCESSES[size])[frozen_later] == [expected] * size


def test_a_layer_thaws_with_a_wrapper_made_anew_and_the_same_optimizer():
    """To the bit as without DDP; the schedule and what is pending go on."""
    results = ran("torch", 2, IN_PROCESSES[2])
    assert results[registered_again] == [(True, True)] * 2
    assert all("made anew and not registered" in said for said in results[not_registered])
