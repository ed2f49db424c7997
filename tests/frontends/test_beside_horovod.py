"""Horovod's contract, beside Horovod in the same processes."""

import copy
import inspect
import itertools
import warnings

import pytest
import torch
from launch import ran
from laws import (
    SPARSE,
    difference,
    flat,
    loss,
    model,
    train,
)
from torch import nn

import dgc

VARIANTS = {
    "heavy-ball": {},
    "nesterov": {"nesterov": True},
    "no momentum": {"momentum": 0.0},
    "sum": {"op": "Sum"},
    "two passes": {"backward_passes_per_step": 2},
    "predivide": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": 2},
    "synchronize": {"synchronize": True},
}


def against_stock():
    """dgc at density 1 and stock Horovod, from the same seed over the same data: the largest relative difference of
    the gradients of each step, and of the parameters after 20.
    """
    import horovod.torch as hvd

    def run(
        wrap, steps=20, nesterov=False, momentum=0.9, synchronize=False, op="Average", **arguments
    ):
        network = model()
        optimizer = torch.optim.SGD(
            network.parameters(), 0.01, momentum, weight_decay=0.01, nesterov=nesterov
        )
        optimizer = wrap(optimizer, network.named_parameters(), op=getattr(hvd, op), **arguments)
        gradients = []
        passes = arguments.get("backward_passes_per_step", 1)
        for step in range(steps):
            optimizer.zero_grad()
            for i in range(passes):
                loss(network, hvd.rank(), step * passes + i).backward()
            if synchronize:
                optimizer.synchronize()
                gradients.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        return flat(network), gradients

    def ours(*positional, **named):
        return dgc.DistributedOptimizer(*positional, compression=dgc.Config(sparsity=0.0), **named)

    results = {}
    for name, arguments in VARIANTS.items():
        (p, gradients), (stock, stock_gradients) = (
            run(ours, **arguments),
            run(hvd.DistributedOptimizer, **arguments),
        )
        steps = [
            ((a - b).norm() / b.norm()).item()
            for a, b in zip(gradients, stock_gradients, strict=True)
        ]
        results[name] = ((p - stock).norm() / stock.norm()).item(), max(steps, default=0.0), stock
    return results


def gradients_against_stock():
    """Without momentum, p.grad at density 1 is what stock Horovod leaves there: unused, sparse and frozen ones too."""
    import horovod.torch as hvd

    results = {}
    for name, wrap in {
        "stock": hvd.DistributedOptimizer,
        "ours": lambda *a, **kw: dgc.DistributedOptimizer(
            *a, compression=dgc.Config(sparsity=0.0, min_numel=0), **kw
        ),
    }.items():
        torch.manual_seed(4)
        network = nn.ModuleDict(
            {
                "words": nn.Embedding(20, 8, sparse=True),
                "all": nn.Linear(8, 8),
                "some": nn.Linear(8, 8),
                "none": nn.Linear(8, 8),
                "frozen": nn.Linear(8, 8),
            }
        )
        network["frozen"].requires_grad_(False)
        network["tied"] = network["all"]
        network["image"] = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        optimizer = wrap(optimizer, list(network.named_parameters()))
        for step in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + hvd.rank())
            x = network["words"](torch.randint(0, 20, (5,), generator=generator))
            x = network["frozen"](network["tied"](network["all"](x)))
            x = x + network["some"](x) if hvd.rank() == 0 else x
            y = network["image"](torch.randn(2, 1, 6, 6, generator=generator))
            (x.square().mean() + y.square().mean()).backward()
            optimizer.step()
        results[name] = (
            {
                key: None if p.grad is None else p.grad.to_dense()
                for key, p in network.named_parameters()
            },
            flat(network),
        )
    return results


def broadcast_state():
    """hvd.broadcast_optimizer_state: fresh, in mid-training, and after loading on rank 0 alone."""
    import horovod.torch as hvd

    results = {}
    for momentum in (0.0, 0.9):
        network, config = model(seed=hvd.rank()), dgc.Config(sparsity=0.9)
        optimizer = torch.optim.SGD(
            network.parameters(),
            lr=0.05 if hvd.rank() == 0 else 0.5,
            momentum=momentum,
            weight_decay=0.1,
        )
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config)
        hvd.broadcast_parameters(network.state_dict(), root_rank=0)
        before = flat(network)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        fresh = torch.equal(flat(network), before), optimizer.param_groups[0]["lr"]
        network, optimizer = train(range(4), config, network, optimizer)
        before = flat(network)
        residuals = copy.deepcopy(optimizer.residual_state_dict())
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        kept = all(
            torch.equal(a, optimizer.residual_state_dict()["v"][k])
            for k, a in residuals["v"].items()
        )
        middle = torch.equal(flat(network), before), kept, optimizer.param_groups[0]["dgc_step"]
        saved = copy.deepcopy(optimizer.state_dict())
        del optimizer  # two that live would both exchange the gradients of these parameters
        other = torch.optim.SGD(network.parameters(), lr=0.5, momentum=momentum, weight_decay=0.1)
        other = dgc.DistributedOptimizer(other, network.named_parameters(), config)
        if hvd.rank() == 0:
            other.load_state_dict(saved)
        hvd.broadcast_optimizer_state(other, root_rank=0)
        loaded = (
            torch.equal(flat(network), before),
            other.param_groups[0]["dgc_step"],
            other.param_groups[0]["lr"],
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(range(4, 6), config, network, other)
        results[momentum] = fresh, middle, loaded, flat(network)
    return results


def resumed():
    """A checkpoint of stock Horovod, loaded on rank 0 alone, before or after wrapping, and broadcast: the parameters
    at density 1 after three steps more, beside stock's.
    """
    import horovod.torch as hvd

    def wrapped(wrap, network, **arguments):
        sgd = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9, weight_decay=0.01)
        return sgd, lambda: wrap(sgd, network.named_parameters(), **arguments)

    results = {}
    for op, before_wrapping in itertools.product(("Average", "Sum"), (False, True)):
        network = model()
        saved = train(range(3), None, network, wrapped(hvd.DistributedOptimizer, network)[1]())[
            1
        ].state_dict()
        saved = copy.deepcopy({"optimizer": saved, "model": network.state_dict()})
        ends = []
        for wrap, arguments in (
            (hvd.DistributedOptimizer, {}),
            (dgc.DistributedOptimizer, {"compression": dgc.Config(sparsity=0.0)}),
        ):
            network = model(seed=hvd.rank())
            optimizer, wrapping = wrapped(wrap, network, op=getattr(hvd, op), **arguments)
            # Stock would leave the momentum behind.
            before = before_wrapping and wrap is dgc.DistributedOptimizer
            optimizer = optimizer if before else wrapping()
            if hvd.rank() == 0:
                network.load_state_dict(saved["model"])
                optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            optimizer = wrapping() if before else optimizer
            # Stock's takes a step with the decay on rank 1.
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            hvd.broadcast_parameters(network.state_dict(), root_rank=0)
            ends.append(flat(train(range(3, 6), None, network, optimizer)[0]))
        results[op, before_wrapping] = difference(*ends)
    return results


def rolled_back():
    """An earlier state, loaded in mid-training on rank 0 alone and broadcast, or on all ranks: the same from there."""
    import horovod.torch as hvd

    ends = []
    for everywhere in (False, True):
        network, optimizer = train(range(4), SPARSE)
        saved = copy.deepcopy({"model": network.state_dict(), "optimizer": optimizer.state_dict()})
        train(range(4, 8), SPARSE, network, optimizer)
        if everywhere or hvd.rank() == 0:
            network.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        hvd.broadcast_parameters(network.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ends.append(flat(train(range(8, 12), SPARSE, network, optimizer)[0]))
    return torch.equal(*ends)


def stock_compression():
    """hvd.Compression.none and fp16 give Horovod's own optimizer."""
    import horovod.torch as hvd

    results = {}
    for name in ("none", "fp16"):
        ends, said = [], []
        for wrap in (dgc.DistributedOptimizer, hvd.DistributedOptimizer):
            network = model()
            optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                optimizer = wrap(
                    optimizer,
                    network.named_parameters(),
                    compression=getattr(hvd.Compression, name),
                )
            said.append([str(w.message)[:25] for w in told])
            ends.append(flat(train(range(3), None, network, optimizer)[0]))
        results[name] = torch.equal(*ends), optimizer.__module__, said
    return results


IN_PROCESSES = {
    2: (
        against_stock,
        gradients_against_stock,
        broadcast_state,
        resumed,
        rolled_back,
        stock_compression,
    ),
    3: (against_stock, resumed),
}
sizes = pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])


def test_what_rank_0_alone_rolls_back_is_undone_on_all():
    assert ran("horovod", 2, IN_PROCESSES[2])[rolled_back] == [True] * 2


@sizes
@pytest.mark.parametrize("variant", VARIANTS)
def test_density_1_is_stock_horovod(size, variant):
    results = [rank[variant] for rank in ran("horovod", size, IN_PROCESSES[size])[against_stock]]
    for parameters, gradients, _ in results:
        print(f"{variant}, {size} ranks: parameters after 20 steps differ by {parameters:.1e}")
        assert parameters <= 1e-5
        # With momentum, p.grad is the velocity and not the gradient: only the parameters can be compared then.
        assert variant != "no momentum" or gradients <= 1e-5


def test_gradients_are_those_of_stock_horovod():
    """Unused, sparse, frozen, tied, channels_last: p.grad after the step, and the parameters."""
    for rank in ran("horovod", 2, IN_PROCESSES[2])[gradients_against_stock]:
        (ours, parameters), (stock, stock_parameters) = rank["ours"], rank["stock"]
        assert ours.keys() == stock.keys()
        for name, gradient in stock.items():
            assert (gradient is None) == (ours[name] is None), name
            assert gradient is None or torch.allclose(ours[name], gradient, rtol=1e-5, atol=1e-7), (
                name
            )
        assert difference(parameters, stock_parameters) < 1e-6


def test_broadcast_optimizer_state():
    results = ran("horovod", 2, IN_PROCESSES[2])[broadcast_state]
    for momentum in (0.0, 0.9):
        ranks = [rank[momentum] for rank in results]
        for fresh, middle, loaded, parameters in ranks:
            assert fresh == (True, 0.05)
            assert middle == (True, True, 4)
            assert loaded == (True, 4, 0.05)
            assert torch.equal(parameters, ranks[0][3])


@sizes
def test_a_checkpoint_of_stock_horovod_is_loaded_on_rank_0_and_broadcast(size):
    for rank in ran("horovod", size, IN_PROCESSES[size])[resumed]:
        assert rank.keys() == {
            (op, before) for op in ("Average", "Sum") for before in (False, True)
        }
        assert max(rank.values()) < 1e-6, rank


def test_horovods_own_compressions_give_horovods_own_optimizer():
    for rank, found in enumerate(ran("horovod", 2, IN_PROCESSES[2])[stock_compression]):
        told = [[] if rank else ["compression is Horovod's,"], []]  # that it is not DGC
        assert found == dict.fromkeys(("none", "fp16"), (True, "horovod.torch.optimizer", told))


def test_the_signature_is_horovods():
    hvd = pytest.importorskip("horovod.torch")
    ours = inspect.signature(dgc.DistributedOptimizer).parameters
    stock = inspect.signature(hvd.DistributedOptimizer).parameters
    assert [name for name in ours if name != "grad_scaler"] == list(stock)
    assert ours["grad_scaler"].kind is inspect.Parameter.KEYWORD_ONLY
    for name in stock.keys() - {"compression", "process_set"}:
        assert ours[name].default == stock[name].default, name
    assert (dgc.Average, dgc.Sum) == (hvd.Average, hvd.Sum)
