"""The hook of DistributedDataParallel, over two and three processes: dgc.DistributedOptimizer is the reference."""

import functools

import pytest
import torch
from cases import CONFIGS, DDP
from launch import launch
from laws import flat, loss, model, reference
from torch import nn

import dgc

NAMES = ["ddp_trajectories", "ddp_accumulation", "ddp_unused", "ddp_join", "ddp_pickled", "ddp_scaled", "scaled",
         "ddp_skipped", "ddp_refusals", "ddp_goes_on", "ddp_changed", "ddp_join_scaled", "ddp_user"]
sizes = pytest.mark.parametrize("size", [2, 3])


@functools.cache
def once(size):
    """A launch that failed is not tried again by each of the tests that look at it."""
    try:
        return launch("torch", size, NAMES)[0]
    except BaseException as error:
        return error


def ran(size, name):
    results = once(size)
    if isinstance(results, BaseException):
        raise results
    return results[name]


@sizes
@pytest.mark.parametrize("name", CONFIGS)
def test_as_distributed_optimizer(size, name):
    """Parameters and residuals, to the bit: each configuration, and each of DDP's manners; no warning."""
    for results in ran(size, "ddp_trajectories"):
        assert {manner: same for (config, manner), same in results.items() if config == name} == dict.fromkeys(
            DDP if name == "default" else ["views"], True)


@sizes
@pytest.mark.parametrize("name", ["ddp_accumulation", "ddp_pickled"])
def test_to_the_bit(size, name):
    assert ran(size, name) == [True] * size


@sizes
def test_parameters_that_some_or_no_rank_uses_and_sparse_ones(size):
    """What is pending of a branch that no rank uses any longer is applied all the same."""
    assert ran(size, "ddp_unused") == [{(a, b): True for a in (True, False) for b in (True, False)}] * size


@sizes
def test_a_rank_that_has_no_more_data_joins(size):
    """It goes on sending what it has kept; in the end it has the parameters of the others."""
    for parameters, residuals in ran(size, "ddp_join"):
        assert parameters and residuals


@sizes
def test_a_rank_joins_with_a_loss_scale(size):
    parameters = ran(size, "ddp_join_scaled")
    assert all(torch.equal(p, parameters[0]) and p.isfinite().all() for p in parameters)


@sizes
def test_what_a_user_does_with_it(size):
    for results in ran(size, "ddp_user"):
        assert results["cancelled", True] and results["cancelled", False]
        assert results["thawed"].startswith("DistributedDataParallel does not exchange 0.weight, 0.bias: when it was")
        passes, config, scaler = results["refused"]
        assert "accepted with DistributedDataParallel: 1" in passes
        assert "accepted: the same, but for the sparsity" in config
        assert scaler == "grad_scaler was given once and once not; accepted: each time, or never"
        assert results["sparsity"] == 0.5


@sizes
def test_a_loss_scale(size):
    for (parameters, scales, skipped), (expected, *rest) in zip(ran(size, "ddp_scaled"), ran(size, "scaled"),
                                                                strict=True):
        assert torch.equal(parameters, expected) and [scales, skipped] == rest and skipped == 1


@sizes
def test_a_step_that_is_skipped_never_was(size):
    assert ran(size, "ddp_skipped") == [(True, 1)] * size


@sizes
def test_what_goes_wrong_is_told_on_all_ranks(size):
    for told in ran(size, "ddp_refusals"):
        nothing, twice, unsynchronised, bad, without_step = told
        assert nothing[0] == unsynchronised[0] == "RuntimeError" and nothing[1].startswith("nothing was exchanged")
        assert unsynchronised[1] == nothing[1]
        assert twice[0] == "AssertionError" and "no_sync()" in twice[1]
        assert bad == ("FloatingPointError", bad[1]) and bad[1].startswith("rank 1 has a gradient that is not finite")
        assert without_step == bad


@sizes
def test_whoever_catches_it_goes_on(size):
    assert ran(size, "ddp_goes_on") == [dict.fromkeys(DDP, True)] * size


@sizes
def test_clipping_after_the_exchange_is_told_and_an_earlier_scheduler_goes_on(size):
    for (first, second), lr in ran(size, "ddp_changed"):
        assert first == [] and lr == 0.25
        assert len(second) == 1 and "was changed between synchronize() and step()" in second[0]


@pytest.fixture
def alone(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_one_process_trains_as_ever(alone):
    network = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    dgc.register_comm_hook(network, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        loss(network, 0, step).backward()
        optimizer.step()
    assert torch.equal(flat(network), flat(reference(range(5), 1)[0]))


def test_errors_at_the_door(alone):
    network = model()
    parallel = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    some = torch.optim.SGD(list(network.parameters())[2:], lr=0.1)
    more = torch.optim.SGD([*network.parameters(), nn.Parameter(torch.zeros(3, 5))], lr=0.1)
    for arguments, error, message in (
            ((network, optimizer), TypeError, "ddp_model is a Sequential; accepted: a torch.nn.parallel"),
            ((parallel, "sgd"), TypeError, "optimizer is 'sgd'; accepted: a torch.optim.Optimizer"),
            ((parallel, torch.optim.Adam(network.parameters())), TypeError, "optimizer is Adam"),
            ((parallel, optimizer, dgc.Config(apply_directly=True)), ValueError, "apply_directly is True"),
            ((parallel, some), ValueError, "the optimizer lacks 0.weight, 0.bias; accepted"),
            ((parallel, more), ValueError, r"parameters that ddp_model does not have, of shapes \[\(3, 5\)\]")):
        with pytest.raises(error, match=message):
            dgc.register_comm_hook(*arguments)
    assert type(optimizer) is torch.optim.SGD and not optimizer.state
    dgc.register_comm_hook(parallel, optimizer)
    with pytest.raises(RuntimeError, match="hook"):
        dgc.register_comm_hook(parallel, torch.optim.SGD(network.parameters(), lr=0.1))
