"""What the ranks of a test run, whatever they are: Horovod or torch.distributed processes, or ranks in lockstep.

Each case is called on every rank and returns what the test then looks at.
"""

import contextlib
import copy
import io
import math
import os
import pickle
import random
import shutil
import signal
import socket
import struct
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import torch
from launch import TIMEOUT
from laws import difference, flat, loss, model, train
from torch import nn

import dgc
from dgc.collective import Collective
from dgc.engine import adaptive as clocks
from dgc.engine.engine import engine_of
from dgc.transport import find

CONFIGS = {
    "default": dgc.Config(sparsity=0.95),
    "exact": dgc.Config(sparsity=0.95, selection="exact", wire_dtype=torch.float32),
    "bfloat16": dgc.Config(sparsity=0.95, wire_dtype=torch.bfloat16),
    "clipped": dgc.Config(sparsity=0.95, clip_norm=0.1),
    "clipped per tensor": dgc.Config(sparsity=0.95, clip_norm=0.1, clip_per_tensor=True),
    "unmasked": dgc.Config(sparsity=0.95, factor_masking=False),
    "plain accumulation": dgc.Config(sparsity=0.95, momentum_correction=False),
    "decay sent": dgc.Config(sparsity=0.95, local_weight_decay=False),
    "dense, then sparse": dgc.Config(sparsity=dgc.dense_until(4, then=0.95)),
    "warm-up": dgc.Config(sparsity=dgc.warmup(2, steps_per_epoch=4, end=0.99)),
    "dense fallback": dgc.Config(sparsity=0.1, wire_dtype=torch.float32),  # with two ranks, too
    "shared": dgc.Config(sparsity=0.95, exchange="shared"),
}


def trajectories():
    """Twelve steps with each configuration: parameters, report, residuals."""
    results = {}
    for name, config in CONFIGS.items():
        network, optimizer = train(range(12), config, nesterov=name == "clipped")
        results[name] = flat(network), optimizer.report(), optimizer.residual_state_dict()
    return results


def two_groups(network):
    """Groups with settings of their own: momentum, Nesterov, weight decay, learning rate."""
    parameters = list(network.parameters())
    return [{"params": parameters[:3], "lr": 0.02, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
            {"params": parameters[3:5], "momentum": 0.0, "weight_decay": 0.05},
            {"params": parameters[5:], "nesterov": False}]


def scheduled(optimizer):
    """A schedule that changes the learning rate and the momentum at every step."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.05, 0.1], total_steps=25, cycle_momentum=True,
                                               base_momentum=0.7, max_momentum=0.95)


def dense_equivalence():
    """Density 1, twenty steps: heavy-ball, Nesterov, groups with a schedule, and on top of earlier momentum."""
    results = {}
    dense = dgc.Config(sparsity=0.0)
    for nesterov in (False, True):
        results[f"nesterov {nesterov}"] = flat(train(range(20), dense, nesterov=nesterov)[0])
    network = model()
    optimizer = torch.optim.SGD(two_groups(network), lr=0.05, momentum=0.9, weight_decay=1e-2)
    optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dense)
    schedule, rank = scheduled(optimizer), find().world.rank
    for step in range(20):
        optimizer.zero_grad()
        loss(network, rank, step).backward()
        optimizer.step()
        schedule.step()
    results["groups"] = flat(network)
    network = model()
    inner = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True)
    for step in range(5):  # alike on every rank
        inner.zero_grad()
        loss(network, 0, step).backward()
        inner.step()
    optimizer = dgc.DistributedOptimizer(inner, network.named_parameters(), dense)
    results["earlier momentum"] = flat(train(range(5, 15), None, network, optimizer)[0])
    return results


def resume():
    """Stops after six steps, saves, loads into new objects and goes on; against never having stopped."""
    config = dgc.Config(sparsity=dgc.warmup(2, steps_per_epoch=4, end=0.99))
    straight, whole = train(range(12), config, nesterov=True)
    network, optimizer = train(range(6), config, nesterov=True)
    file = io.BytesIO()
    torch.save([network.state_dict(), optimizer.state_dict(), optimizer.residual_state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    network = model(seed=5)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.5, nesterov=True)
    optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config)
    network.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    optimizer.load_residual_state_dict(states[2])
    train(range(6, 12), config, network, optimizer)
    same = all(torch.equal(a, b) for letter in "uv" for a, b in zip(
        whole.residual_state_dict()[letter].values(), optimizer.residual_state_dict()[letter].values(), strict=True))
    return torch.equal(flat(straight), flat(network)) and same


def unused_somewhere():
    """A branch that only even ranks use, and one that none does."""
    torch.manual_seed(1)
    network = nn.ModuleDict({name: nn.Linear(40, 40) for name in ("all", "some", "none")})
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(sparsity=0.5))
    rank = find().world.rank
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        y = network["all"](x)
        (y + network["some"](x) if rank % 2 == 0 else y).square().mean().backward()
        optimizer.step()
    return flat(network)


def sparse_gradients():
    """An embedding with sparse gradients, gathered as they are and as dense ones."""
    results = {}
    for as_dense in (False, True):
        torch.manual_seed(2)
        network = nn.Sequential(nn.Embedding(60, 30, sparse=True), nn.Linear(30, 50))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(sparsity=0.0),
                                             sparse_as_dense=as_dense)
        rank = find().world.rank
        for step in range(3):
            optimizer.zero_grad()
            words = torch.randint(0, 60, (4 + rank,), generator=torch.Generator().manual_seed(10 * step + rank))
            network(words).square().mean().backward()
            optimizer.step()
        results[as_dense] = flat(network), network[0].weight.grad.is_sparse
    return results


def broadcast():
    """dgc.broadcast_parameters from the last rank, of a model and of a list."""
    world = find().world
    network = model(seed=world.rank)
    dgc.broadcast_parameters(network.state_dict(), root_rank=world.size - 1)
    number = torch.tensor([world.rank])
    dgc.broadcast_parameters([number], root_rank=1)
    kinds = torch.bfloat16, torch.bool, torch.int16, torch.uint16, torch.complex64, torch.float8_e4m3fn
    others = [torch.full((3,), float(world.rank)).to(kind) for kind in kinds] + [torch.empty(0, 3), torch.tensor(True)]
    dgc.broadcast_parameters(others, root_rank=1)
    return flat(network), number.item(), [other.to(torch.complex64).tolist() for other in others]


def half_precision():
    """Parameters of other dtypes, with decay: at density 1 how far they are from torch's SGD on the mean of all ranks'
    gradients, and how far both have moved; sparse ones, to be alike on all ranks.
    """
    rank, size, results = find().world.rank, find().world.size, {}

    def made(dtype):
        torch.manual_seed(3)
        network = nn.Sequential(nn.Linear(60, 70), nn.Tanh(), nn.Linear(70, 5)).to(dtype)
        return network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)

    def gradients(network, step, of):
        network.zero_grad()
        x = torch.randn(8, 60, generator=torch.Generator().manual_seed(10 * step + of)).to(network[0].weight.dtype)
        network(x).float().square().mean().backward()
        return [p.grad.clone() for p in network.parameters()]

    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        expected, optimizer = made(dtype)
        before = flat(expected)
        for step in range(5):
            every = [gradients(expected, step, of) for of in range(size)]
            for p, *parts in zip(expected.parameters(), *every, strict=True):
                p.grad = (sum(part.double() for part in parts) / size).to(dtype)
            optimizer.step()
        ends = []
        for sparsity in (0.0, 0.9):
            network, optimizer = made(dtype)
            optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(sparsity))
            for step in range(5):
                gradients(network, step, rank)
                optimizer.step()
            ends.append(flat(network))
        expected = flat(expected)
        results[str(dtype)] = ends[1], (ends[0] - expected).norm().item(), (expected - before).norm().item()
    return results


def socket_bytes():
    """Bytes that this process sent over TCP in 20 steps, and what the report says."""
    world, results = find().world, {}
    for sparsity, exchange in ((0.0, "allgather"), (0.9, "allgather"), (0.9, "shared")):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(1000, 1200, bias=False), nn.Linear(1200, 800, bias=False))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        config = dgc.Config(sparsity=sparsity, exchange=exchange)
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config)
        everybody_is_here = torch.zeros(1)
        # Made beforehand, as Horovod also negotiates by the clock.
        g = [[torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + world.rank))
              for p in network.parameters()] for step in range(2)]
        for step in range(22):
            if step == 2:
                dgc.broadcast_parameters([everybody_is_here])
                before, reported = sent_over_tcp(), optimizer.report().total_bytes_sent
            for p, gradient in zip(network.parameters(), g[step % 2], strict=True):
                p.grad = gradient.clone()
            optimizer.step()
        dgc.broadcast_parameters([everybody_is_here])
        results[sparsity, exchange] = sent_over_tcp() - before, optimizer.report().total_bytes_sent - reported
    return results


def sent_over_tcp():
    """What the kernel has counted, over all sockets of this process."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not a TCP socket
            with socket.socket(fileno=os.dup(int(number))) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
            total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
    return total


def overflowing(network, optimizer, scaler):
    """Eight steps, of which the sixth overflows on rank 1."""
    rank, scales = find().world.rank, []
    for step in range(8):
        optimizer.zero_grad()
        factor = 1e38 if rank == 1 and step == 5 else 1.0
        scaler.scale(loss(network, rank, step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return flat(network), scales, optimizer.report().skipped


def scaled():
    """A loss scale that grows, and overflows on rank 1: parameters, scales, skipped steps, as in the usual script."""
    network = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(sparsity=0.9),
                                         grad_scaler=scaler)
    return overflowing(network, optimizer, scaler)


def soak():
    """Many steps with a warm-up and a NaN now and then: memory, steps, and what was lost, which is nothing.

    Without momentum all ranks' gradients must equal what was applied and what is pending, added up over all steps.
    """
    steps, world = int(os.environ["DGC_SOAK_STEPS"]), find().world
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(256, 400), nn.Tanh(), nn.Linear(400, 300), nn.Tanh(), nn.Linear(300, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    config = dgc.Config(dgc.warmup(4, steps_per_epoch=max(1, steps // 20)), nonfinite="skip")
    optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config)
    weights = [p for p in network.parameters() if p.dim() > 1]
    accumulated, applied = ([torch.zeros_like(p, dtype=torch.float64) for p in weights] for _ in range(2))
    generator, memory, bad = torch.Generator().manual_seed(world.rank), [], 0
    for step in range(steps):
        optimizer.zero_grad()
        network(torch.randn(16, 256, generator=generator)).square().mean().backward()
        if step % 37 == 36:
            bad += 1
            if (step // 37) % world.size == world.rank:
                weights[step % 3].grad.view(-1)[step] = math.nan
            optimizer.step()
            continue
        for total, p in zip(accumulated, weights, strict=True):
            total += p.grad
        optimizer.step()
        for total, p in zip(applied, weights, strict=True):
            total += p.grad
        if step >= steps // 2:
            memory.append(psutil.Process().memory_info().rss)
    report = optimizer.report()
    v = optimizer.residual_state_dict()["v"]
    for total, p in zip(accumulated, weights, strict=True):
        total -= next(v[name] for name, q in network.named_parameters() if q is p)
    optimizer.flush()
    empty = optimizer.report().residual_norm == 0
    return {"accumulated": accumulated, "applied": applied, "skipped": (report.skipped, bad), "steps": report.steps,
            "growth": max(memory[-len(memory) // 4:]) - max(memory[:len(memory) // 4]), "empty": empty,
            "flat": flat(network)}


# -- Horovod only ------------------------------------------------------------------------------------------------------

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
    the gradients of each step, and of the parameters after 50.
    """
    import horovod.torch as hvd

    def run(wrap, steps=50, nesterov=False, momentum=0.9, synchronize=False, op="Average", **arguments):
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum, weight_decay=0.01, nesterov=nesterov)
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
        (p, gradients), (stock, stock_gradients) = run(ours, **arguments), run(hvd.DistributedOptimizer, **arguments)
        steps = [((a - b).norm() / b.norm()).item() for a, b in zip(gradients, stock_gradients, strict=True)]
        results[name] = ((p - stock).norm() / stock.norm()).item(), max(steps, default=0.0), stock
    return results


def gradients_against_stock():
    """Without momentum, p.grad at density 1 is what stock Horovod leaves there: unused, sparse and frozen ones too."""
    import horovod.torch as hvd
    results = {}
    for name, wrap in {"stock": hvd.DistributedOptimizer, "ours": lambda *a, **kw: dgc.DistributedOptimizer(
            *a, compression=dgc.Config(sparsity=0.0, min_numel=0), **kw)}.items():
        torch.manual_seed(4)
        network = nn.ModuleDict({"words": nn.Embedding(20, 8, sparse=True), "all": nn.Linear(8, 8),
                                 "some": nn.Linear(8, 8), "none": nn.Linear(8, 8), "frozen": nn.Linear(8, 8)})
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
        results[name] = ({key: None if p.grad is None else p.grad.to_dense() for key, p in network.named_parameters()},
                         flat(network))
    return results


def broadcast_state():
    """hvd.broadcast_optimizer_state: fresh, in mid-training, and after loading on rank 0 alone."""
    import horovod.torch as hvd
    results = {}
    for momentum in (0.0, 0.9):
        network, config = model(seed=hvd.rank()), dgc.Config(sparsity=0.9)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05 if hvd.rank() == 0 else 0.5, momentum=momentum,
                                    weight_decay=0.1)
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config)
        hvd.broadcast_parameters(network.state_dict(), root_rank=0)
        before = flat(network)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        fresh = torch.equal(flat(network), before), optimizer.param_groups[0]["lr"]
        network, optimizer = train(range(4), config, network, optimizer)
        before = flat(network)
        residuals = copy.deepcopy(optimizer.residual_state_dict())
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        kept = all(torch.equal(a, optimizer.residual_state_dict()["v"][k]) for k, a in residuals["v"].items())
        middle = torch.equal(flat(network), before), kept, optimizer.param_groups[0]["dgc_step"]
        saved = copy.deepcopy(optimizer.state_dict())
        del optimizer  # two that live would both exchange the gradients of these parameters
        other = torch.optim.SGD(network.parameters(), lr=0.5, momentum=momentum, weight_decay=0.1)
        other = dgc.DistributedOptimizer(other, network.named_parameters(), config)
        if hvd.rank() == 0:
            other.load_state_dict(saved)
        hvd.broadcast_optimizer_state(other, root_rank=0)
        loaded = (torch.equal(flat(network), before), other.param_groups[0]["dgc_step"], other.param_groups[0]["lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(range(4, 6), config, network, other)
        results[momentum] = fresh, middle, loaded, flat(network)
    return results


def stock_compression():
    """hvd.Compression.none and fp16 give Horovod's own optimizer."""
    import horovod.torch as hvd
    results = {}
    for name in ("none", "fp16"):
        ends = []
        for wrap in (dgc.DistributedOptimizer, hvd.DistributedOptimizer):
            network = model()
            optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
            optimizer = wrap(optimizer, network.named_parameters(), compression=getattr(hvd.Compression, name))
            ends.append(flat(train(range(3), None, network, optimizer)[0]))
        results[name] = torch.equal(*ends), optimizer.__module__
    return results


def process_set():
    """Three ranks, of which 1 and 2 exchange gradients; roots are counted within the set."""
    import horovod.torch as hvd
    from launch import PROCESS_SETS
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(sparsity=0.0),
                                         process_set=PROCESS_SETS[0])
    number = torch.tensor([hvd.rank()])
    dgc.broadcast_parameters([number], root_rank=1, process_set=PROCESS_SETS[0])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # to all processes, also those outside
    train(range(5), None, network, optimizer)
    return flat(network), number.item(), optimizer.report().steps


def too_large():
    """Together with the other process's one byte more than Horovod can count; nobody writes to the memory."""
    try:
        find().start(Collective("gather", torch.empty(1 << 30, dtype=torch.uint8)), "large")
    except ValueError as error:
        return str(error)
    return "no error"


def started_anew():
    """Horovod shut down and initialised again under a living optimizer, as elastic jobs do.

    By another host name, since the server at which processes look one another up keeps the addresses of a host's
    processes where one of them was done before another (only elastic jobs clear it), and who reads those finds no one.
    """
    import horovod.torch as hvd
    config = dgc.Config(sparsity=0.9)
    network, optimizer = train(range(3), config)
    hvd.shutdown()
    os.environ["HOROVOD_HOSTNAME"] += "-anew"
    hvd.init()
    train(range(3, 6), config, network, optimizer)
    return flat(network), flat(train(range(6), config)[0])


# -- two machines ------------------------------------------------------------------------------------------------------

def hierarchical():
    """Some configurations by node, on twice two processes. Horovod says first what process sets it needs."""
    configs = {name: replace(CONFIGS[name], hierarchical=True) for name in (
        "default", "shared", "clipped", "warm-up", "dense fallback")}
    if find().__class__.__name__ == "Horovod":
        dynamic = os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS")
        try:
            train(range(1), configs["default"])
        except ValueError as error:
            assert str(error).endswith(
                "accepted: the environment HOROVOD_DYNAMIC_PROCESS_SETS=1 on all ranks, or hvd.init(process_sets=["
                "hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3]), hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])])")
        else:
            raise AssertionError("nothing was said")
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = dynamic  # the first training makes the sets, the others find them
        waited_for_between(configs["default"])
    if find().__class__.__name__ == "TorchDistributed":  # rank 0 then knows fewer groups than the others
        some = torch.distributed.new_group([1, 2, 3])
        network = model()
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.1), network.named_parameters(),
                                             configs["default"], process_set=some)
        try:
            train(range(1), None, network, optimizer)
        except ValueError as error:
            assert "the process group has ranks [1, 2, 3]; accepted: one of all ranks" in str(error)
        else:
            assert torch.distributed.get_rank() == 0
    results, groups = {}, []
    for name, config in configs.items():
        network, optimizer = train(range(6), config)
        residuals = optimizer.residual_state_dict()
        results[name] = flat(network), torch.cat([x.flatten() for x in residuals["v"].values()])
        if find().__class__.__name__ == "TorchDistributed":
            assert same_end(train(range(6), None, *in_ddp(model(), config)), (network, optimizer))
            groups.append([engine_of(optimizer).settings.transport._groups[group] for group in ("node", "across")])
    for made in groups:  # once, as torch keeps them; and they wait as long as the group that they are made of
        assert made == groups[0]
        assert all(group._get_backend(torch.device("cpu")).options._timeout == TIMEOUT for group in made)
    return results


def waited_for_between(config):
    """Rank 1 has no gradient for the layer in the middle, and waits for all ranks between backward() and step()."""
    import horovod.torch as hvd
    layers = nn.ModuleList(nn.Linear(60, 60) for _ in range(3))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    optimizer = dgc.DistributedOptimizer(optimizer, layers.named_parameters(), config, groups=3)
    dgc.broadcast_parameters(layers.state_dict())
    for _ in range(3):
        optimizer.zero_grad()
        h = layers[0](torch.ones(4, 60))
        layers[2](h if hvd.rank() == 1 else layers[1](h)).square().mean().backward()
        hvd.barrier()
        optimizer.step()


# -- torch.distributed only --------------------------------------------------------------------------------------------

def process_group():
    """As process_set, with a torch.distributed group of ranks 1 and 2."""
    group = torch.distributed.new_group([1, 2])
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(sparsity=0.0),
                                         process_set=group)
    number = torch.tensor([torch.distributed.get_rank()])
    dgc.broadcast_parameters([number], root_rank=1, process_set=group)
    train(range(5), None, network, optimizer)
    return flat(network), number.item(), optimizer.report().steps


# -- DistributedDataParallel -------------------------------------------------------------------------------------------

DDP = {
    "as it comes": {},
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "many buckets": {"bucket_cap_mb": 0.005},
    "unused looked for": {"find_unused_parameters": True},
}


def in_ddp(network, config, momentum=0.9, scaler=None, **arguments):
    """A model in DDP, and its optimizer."""
    parallel = nn.parallel.DistributedDataParallel(network, **arguments)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=momentum, weight_decay=1e-2)
    dgc.register_comm_hook(parallel, optimizer, config, grad_scaler=scaler)
    return parallel, optimizer


def same_end(one, other):
    """Parameters and residuals, to the bit."""
    (network, optimizer), (reference, wrapped) = one, other
    residuals = [torch.equal(a, b) for letter in "uv" for a, b in zip(
        optimizer.residual_state_dict()[letter].values(), wrapped.residual_state_dict()[letter].values(), strict=True)]
    return torch.equal(flat(network), flat(reference)) and all(residuals)


def ddp_trajectories():
    """As dgc.DistributedOptimizer, to the bit, with each configuration and in each of DDP's manners."""
    results = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, config in CONFIGS.items():
            expected = train(range(5), config)
            for manner, arguments in DDP.items() if name == "default" else [("views", DDP["views"])]:
                results[name, manner] = same_end(train(range(5), None, *in_ddp(model(), config, **arguments)), expected)
    return results


def ddp_accumulation():
    """no_sync() for the first of two backward passes, as backward_passes_per_step=2."""
    network, optimizer = in_ddp(model(), CONFIGS["default"])
    reference = model()
    wrapped = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    wrapped = dgc.DistributedOptimizer(wrapped, reference.named_parameters(), CONFIGS["default"],
                                       backward_passes_per_step=2)
    rank = find().world.rank
    for step in range(4):
        optimizer.zero_grad()
        with network.no_sync():
            loss(network, rank, 2 * step).backward()
        loss(network, rank, 2 * step + 1).backward()
        optimizer.step()
        wrapped.zero_grad()
        for i in range(2):
            loss(reference, rank, 2 * step + i).backward()
        wrapped.step()
    return same_end((network, optimizer), (reference, wrapped))


class Branches(nn.Module):
    """Rank 0 and the even steps use one branch, all ranks another for two steps only, and none a third."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(50, 40, sparse=True)
        self.all, self.some, self.early, self.none = (nn.Linear(40, 40) for _ in range(4))
        self.rank = rank

    def forward(self, words, step):
        y = self.all(self.words(words))
        y = y + self.some(y) if self.rank == 0 and step % 2 == 0 else y
        return y + self.early(y) if step < 2 else y


def ddp_unused():
    """Branches and an embedding with sparse gradients, as dgc.DistributedOptimizer; p.grad new each step, and kept."""
    rank, results = find().world.rank, {}
    for set_to_none in (True, False):
        for view in (True, False):
            ends = []
            for ddp in (True, False):
                network = Branches(rank)
                if ddp:
                    network, optimizer = in_ddp(network, dgc.Config(0.5), momentum=0.9, find_unused_parameters=True,
                                                gradient_as_bucket_view=view)
                    network.module.words.weight.register_hook(lambda g: g)
                else:
                    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
                    optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(0.5))
                optimizer.param_groups[0]["weight_decay"] = 0  # torch's SGD has none for sparse gradients
                for step in range(6):
                    optimizer.zero_grad(set_to_none)
                    generator = torch.Generator().manual_seed(10 * step + rank)
                    words = torch.randint(0, 50, (4,), generator=generator)
                    network(words, step).square().mean().backward()
                    optimizer.step()
                ends.append((network, optimizer))
            results[set_to_none, view] = same_end(*ends)
    return results


def ddp_join():
    """Rank 0 has three batches, the others five: as if its gradient had been zero in the last two. Then all flush."""
    rank, config = find().world.rank, CONFIGS["default"]
    network, optimizer = in_ddp(model(), config)
    with network.join():
        for step in range(3 if rank == 0 else 5):
            optimizer.zero_grad()
            loss(network, rank, step).backward()
            optimizer.step()
    reference, wrapped = train(range(3), config)
    for step in range(3, 5):
        wrapped.zero_grad()
        (loss(reference, rank, step) * (rank > 0)).backward()
        wrapped.step()
    residuals = [torch.equal(a, b) for a, b in zip(optimizer.residual_state_dict()["v"].values(),
                                                   wrapped.residual_state_dict()["v"].values(), strict=True)]
    trained = torch.equal(flat(network), flat(reference))
    optimizer.flush()
    wrapped.flush()
    return trained and torch.equal(flat(network), flat(reference)), all(residuals)


def ddp_join_scaled():
    """The same with a loss scale."""
    rank = find().world.rank
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
    network, optimizer = in_ddp(model(), CONFIGS["default"], scaler=scaler)
    with network.join():
        for step in range(2 if rank == 0 else 5):
            optimizer.zero_grad()
            scaler.scale(loss(network, rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
    return flat(network)


def ddp_user():
    """What a user takes away stays away; what DDP does not know of, or another config at a second time, is refused."""
    rank, results = find().world.rank, {}
    for view in (True, False):
        network, optimizer = in_ddp(model(), CONFIGS["default"], gradient_as_bucket_view=view)
        before = network.module[8].weight.detach().clone()
        for step in range(3):
            optimizer.zero_grad()
            loss(network, rank, step).backward()
            network.module[8].weight.grad = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it was changed
                optimizer.step()
        results["cancelled", view] = torch.equal(before, network.module[8].weight)
    inner = model()
    inner[0].requires_grad_(False)
    network, optimizer = in_ddp(inner, CONFIGS["default"])
    train([0], None, network, optimizer)
    inner[0].requires_grad_(True)
    try:
        train([1], None, network, optimizer)
    except RuntimeError as error:
        results["thawed"] = str(error)
    network, optimizer = in_ddp(model(), dgc.Config(0.9))
    for wrong in (lambda: optimizer.set_backward_passes_per_step(2),
                  lambda: dgc.register_comm_hook(nn.parallel.DistributedDataParallel(network.module), optimizer,
                                                 dgc.Config(0.9, factor_masking=False)),
                  lambda: dgc.register_comm_hook(nn.parallel.DistributedDataParallel(network.module), optimizer,
                                                 grad_scaler=torch.amp.GradScaler("cpu"))):
        try:
            wrong()
        except ValueError as error:
            results.setdefault("refused", []).append(str(error))
    dgc.register_comm_hook(nn.parallel.DistributedDataParallel(network.module), optimizer, dgc.Config(0.5))
    results["sparsity"] = optimizer._compression.sparsity
    return results


def ddp_pickled():
    """Pickled after three steps, loaded, registered anew, gone on: as if never stopped."""
    config = CONFIGS["default"]
    expected = train(range(6), None, *in_ddp(model(), config))
    network, optimizer = pickle.loads(pickle.dumps(train(range(3), None, *in_ddp(model(), config))))
    dgc.register_comm_hook(network, optimizer, config)
    return same_end(train(range(3, 6), None, network, optimizer), expected)


def ddp_scaled():
    """Loss scale and an overflow on rank 1, as `scaled`."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=2)
    network, optimizer = in_ddp(model(), dgc.Config(sparsity=0.9), scaler=scaler)
    return overflowing(network, optimizer, scaler)


def ddp_skipped():
    """A NaN on rank 1 with nonfinite="skip": as if that step had not been."""
    config = dgc.Config(0.9, nonfinite="skip")
    network, optimizer = train(range(2), None, *in_ddp(model(), config))
    optimizer.zero_grad()
    (loss(network, find().world.rank, 2) * (math.nan if find().world.rank == 1 else 1)).backward()
    optimizer.step()
    gone = all(p.grad is None for p in network.parameters())
    train([3, 4], None, network, optimizer)
    return gone and same_end((network, optimizer), train([0, 1, 3, 4], config)), optimizer.report().skipped


def ddp_refusals():
    """What a script is told that steps without an exchange, that calls backward() twice, or has a NaN on rank 1."""
    told, rank = [], find().world.rank
    network, optimizer = in_ddp(model(), CONFIGS["default"])

    def twice():
        for step in range(2):
            loss(network, rank, step).backward()

    def unsynchronised():
        fresh, other = in_ddp(model(), CONFIGS["default"])
        with fresh.no_sync():
            loss(fresh, rank, 0).backward()
        other.step()

    def not_a_number():
        fresh, other = in_ddp(model(), CONFIGS["default"])
        (loss(fresh, rank, 0) * (math.nan if rank == 1 else 1)).backward()
        other.step()

    def not_a_number_without_step():
        fresh, _kept = in_ddp(model(), CONFIGS["default"])
        for step in range(2):
            (loss(fresh, rank, step) * (math.nan if rank == 1 else 1)).backward()

    for wrong in (optimizer.step, twice, unsynchronised, not_a_number, not_a_number_without_step):
        try:
            wrong()
            told.append(None)
        except (AssertionError, RuntimeError, FloatingPointError) as error:
            told.append((type(error).__name__, str(error)))
    return told


def ddp_goes_on():
    """A NaN on rank 1 in the third of six steps, caught: as without DDP, to the bit, in each of its manners."""
    rank = find().world.rank

    def trained(network, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            with contextlib.suppress(FloatingPointError) if step == 2 else contextlib.nullcontext():
                (loss(network, rank, step) * (math.nan if rank == 1 and step == 2 else 1)).backward()
                optimizer.step()
        return network, optimizer

    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    expected = trained(network, dgc.DistributedOptimizer(optimizer, network.named_parameters(), CONFIGS["default"]))
    assert torch.isfinite(flat(network)).all() and optimizer.param_groups[0]["dgc_step"] == 5
    return {manner: same_end(trained(*in_ddp(model(), CONFIGS["default"], **arguments)), expected)
            for manner, arguments in DDP.items()}


def ddp_changed():
    """Warnings: of clipping after the exchange; and none of a scheduler made before registering, which goes on."""
    network = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    dgc.register_comm_hook(network, optimizer, CONFIGS["default"])
    seen = []
    for clip in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            loss(network, find().world.rank, 0).backward()
            if clip:
                nn.utils.clip_grad_norm_(network.parameters(), 1e-3)
            optimizer.step()
            scheduler.step()
        seen.append([str(warning.message) for warning in caught])
    return seen, optimizer.param_groups[0]["lr"]


# -- cases that fail ---------------------------------------------------------------------------------------------------

def not_finite():
    """Rank 1 has a NaN: every rank is told."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(sparsity=0.9))
    rank = find().world.rank
    if rank == 1:
        bad = torch.zeros(40, 144).index_fill(0, torch.tensor(3), torch.nan)
        network[6].weight.register_hook(lambda g: g + bad)
    loss(network, rank, 0).backward()
    try:
        optimizer.step()
    except FloatingPointError as error:
        return str(error)
    return "no error"


def uneven_machines():
    """What is said of them."""
    try:
        train(range(1), dgc.Config(hierarchical=True))
    except ValueError as error:
        return str(error)
    return "nothing"


def shared_in_slices():
    """More bytes than Horovod broadcasts at once, were these as few as 1,000."""
    from dgc.transport import horovod
    limit, horovod.MAX_BYTES = horovod.MAX_BYTES, 1000
    try:
        root = find().world.size - 1
        values = [torch.arange(5003.0, dtype=torch.float64), torch.arange(500.0).view(20, 25).to(torch.bfloat16),
                  torch.arange(1000) % 3 == 0, torch.arange(250.0)]
        given = [value if find().world.rank == root else torch.zeros_like(value) for value in values]
        dgc.broadcast_parameters([given[0]], root)
        waits = [find().start(Collective("share", value, root), str(i)) for i, value in enumerate(given)]
        return [torch.equal(wait(), value) for wait, value in zip(waits, values, strict=True)]
    finally:
        horovod.MAX_BYTES = limit


def another_configuration():
    """Rank 1 has another density: messages of another size."""
    train(range(2), dgc.Config(sparsity=0.99 if find().world.rank == 1 else 0.9))


def raises_on_one_rank():
    """Rank 1 fails between two steps."""
    network, optimizer = train(range(2), dgc.Config(sparsity=0.9))
    if find().world.rank == 1:
        raise ArithmeticError("rank 1 has had enough")
    train(range(2, 4), None, network, optimizer)


def _on_rank_1_in_backward(do):
    """Trains two steps; in the third backward pass something happens to rank 1, when messages are on their way."""
    network, optimizer = train(range(2), dgc.Config(sparsity=0.9))
    if find().world.rank == 1:
        network[0].weight.register_hook(lambda g: do())  # the last gradient to come
    train(range(2, 6), None, network, optimizer)


def killed():
    """With SIGKILL, as the kernel does when memory runs out."""
    _on_rank_1_in_backward(lambda: os.kill(os.getpid(), signal.SIGKILL))


def raises_in_backward():
    """A hook of the user's."""
    def fail():
        raise ArithmeticError("rank 1 has had enough")

    _on_rank_1_in_backward(fail)


def out_of_memory():
    """A tensor that does not fit."""
    _on_rank_1_in_backward(lambda: torch.empty(1 << 60))


def raises_in_schedule():
    """A schedule that fails on one rank only, between the others' messages."""
    def sparsity(step):
        if step == 3 and find().world.rank == 1:  # no power of 2: those are looked at before the first step
            raise ArithmeticError("rank 1 has had enough")
        return 0.9

    train(range(5), dgc.Config(sparsity=sparsity))


def exits():
    """Without an error, so that the others wait for it."""
    network, optimizer = train(range(2), dgc.Config(sparsity=0.9))
    if find().world.rank == 1:
        os._exit(3)
    train(range(2, 4), None, network, optimizer)


def out_of_data():
    """Rank 0 runs out of data and calls hvd.join() while the others go on."""
    import horovod.torch as hvd
    network, optimizer = train(range(2), dgc.Config(sparsity=0.9))
    if hvd.rank() == 0:
        hvd.join()
        print("joined", file=sys.stderr)
    else:
        train(range(2, 4), None, network, optimizer)
        hvd.join()


# -- fully_shard: two nodes of two ranks -------------------------------------------------------------------------------

SHARDED = {name: replace(CONFIGS[name], min_numel=1) for name in (
    "default", "exact", "plain accumulation", "decay sent", "dense, then sparse", "dense fallback")}
SHARDED["applied directly"] = dgc.Config(sparsity=0.9, min_numel=1, apply_directly=True)


@cache
def mesh():
    from torch.distributed.device_mesh import init_device_mesh
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "shard"))


def across():
    return mesh()["across"].get_group()


def uneven(seed=0):
    """Weights of 9, 7 and 1 rows, so that the shards differ and one is empty."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1))


def uneven_loss(network, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (network(torch.randn(8, 12, generator=generator)) - torch.randn(8, 1, generator=generator)).square().mean()


def split(network, own=None, **arguments):
    """Each layer and the whole, over the ranks of a node."""
    from torch.distributed.fsdp import fully_shard
    for part in (network[0], network[2], network[4], network):
        fully_shard(part, mesh=mesh()["shard"] if own is None else own, **arguments)
    return network


def sgd(parameters, momentum=0.9):
    return torch.optim.SGD(parameters, lr=0.05, momentum=momentum, weight_decay=1e-2, nesterov=momentum > 0)


def in_shards(config, network=None, momentum=0.9, **arguments):
    """A sharded model and its optimizer."""
    network = split(uneven()) if network is None else network
    return network, dgc.DistributedOptimizer(sgd(network.parameters(), momentum), network.named_parameters(), config,
                                             process_set=across(), **arguments)


def steps_in_shards(network, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        uneven_loss(network, torch.distributed.get_rank(), step).backward()
        optimizer.step()
    return network, optimizer


def whole(network):
    return torch.cat([p.full_tensor().detach().flatten() for p in network.parameters()])


def own_rows(tensor):
    """As fully_shard splits them."""
    chunks = tensor.chunk(2)
    index = torch.distributed.get_rank() % 2
    return chunks[index] if index < len(chunks) else tensor[:0]


def on_the_average(steps, clip_norm=None, passes=1, momentum=0.9):
    """torch.optim.SGD in one process, on the average of the four ranks' gradients, or of the two nodes' clipped ones.

    The bound of the average is that of the nodes' times the square root of their number (paper, section 3.2).
    """
    network = uneven()
    optimizer = sgd(network.parameters(), momentum)
    for step in steps:
        total = [torch.zeros_like(p) for p in network.parameters()]
        for node in range(2):
            optimizer.zero_grad()
            for i in range(passes):
                sum(uneven_loss(network, 2 * node + rank, passes * step + i) / 2 for rank in range(2)).backward()
            norm = torch.cat([p.grad.flatten() for p in network.parameters()]).norm()
            scale = 1.0 if clip_norm is None else min(1.0, clip_norm * 2 ** 0.5 / norm.item())
            for kept, p in zip(total, network.parameters(), strict=True):
                kept.add_(p.grad, alpha=scale / 2)
        for kept, p in zip(total, network.parameters(), strict=True):
            p.grad.copy_(kept)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def fsdp_dense():
    """Nothing is kept back: distance from torch.optim.SGD, in each manner."""
    from torch.distributed.tensor import Shard
    results = {}
    for name, clip_norm in (("as it comes", None), ("clipped", 0.02)):
        config = dgc.Config(sparsity=0.0, min_numel=80, clip_norm=clip_norm)
        network, _ = steps_in_shards(*in_shards(config), range(6))
        results[name] = difference(whole(network), on_the_average(range(6), clip_norm))
    config = dgc.Config(sparsity=0.0, min_numel=80)
    network, optimizer = in_shards(config)
    for step in range(4):
        optimizer.zero_grad()
        for i in range(2):
            network.set_requires_gradient_sync(i == 1)
            network.set_is_last_backward(i == 1)
            uneven_loss(network, torch.distributed.get_rank(), 2 * step + i).backward()
        optimizer.step()
    results["accumulated before"] = difference(whole(network), on_the_average(range(4), passes=2))
    network, optimizer = in_shards(config, backward_passes_per_step=2)
    for step in range(4):
        optimizer.zero_grad()
        for i in range(2):
            uneven_loss(network, torch.distributed.get_rank(), 2 * step + i).backward()
        optimizer.step()
    results["accumulated after"] = difference(whole(network), on_the_average(range(4), passes=2))
    network = split(uneven(seed=torch.distributed.get_rank() // 2))
    dgc.broadcast_parameters(network.state_dict(), process_set=across())
    network, _ = steps_in_shards(*in_shards(config, network), range(6))
    results["broadcast"] = difference(whole(network), on_the_average(range(6)))
    network = uneven()
    split(network, shard_placement_fn=lambda p: Shard(1) if p is network[0].weight else None)
    network, _ = steps_in_shards(*in_shards(config, network), range(6))
    results["columns"] = difference(whole(network), on_the_average(range(6)))
    return results


def fsdp_sparse():
    """To the bit a DistributedOptimizer that is given each shard as a parameter of its own, and the gradient of the
    node's two ranks. And: each parameter by itself, and how many had left when the last layer's gradients came.
    """
    results = {}
    rank = torch.distributed.get_rank()
    for name, config in SHARDED.items():
        network, optimizer = in_shards(config)
        steps_in_shards(network, optimizer, range(8))
        reference = uneven()
        rows = {n: nn.Parameter(own_rows(p.detach()).clone()) for n, p in reference.named_parameters()}
        rows = {n: p for n, p in rows.items() if p.numel()}
        wrapped = dgc.DistributedOptimizer(sgd(rows.values()), rows.items(), config, process_set=across())
        for step in range(8):
            total = {n: torch.zeros_like(p) for n, p in reference.named_parameters()}
            for other in (rank - rank % 2, rank - rank % 2 + 1):
                reference.zero_grad()
                uneven_loss(reference, other, step).backward()
                for n, p in reference.named_parameters():
                    total[n] += p.grad / 2
            wrapped.zero_grad()
            sum((p * own_rows(total[n])).sum() for n, p in rows.items()).backward()
            wrapped.step()
            for n, p in reference.named_parameters():
                parts = [None, None]
                torch.distributed.all_gather_object(parts, rows[n].detach() if n in rows else p.detach()[:0],
                                                    group=mesh()["shard"].get_group())
                p.data.copy_(torch.cat(parts))
        kept, expected = optimizer.residual_state_dict(), wrapped.residual_state_dict()
        before = whole(network), flat(reference)
        optimizer.flush(), wrapped.flush()
        after = [torch.equal(p.to_local(), rows[n]) for n, p in network.named_parameters() if n in rows]
        results[name] = (whole(network), torch.equal(before[0].double(), before[1]), all(after), [
            torch.equal(kept[letter][n], t) for letter in "uv" for n, t in expected[letter].items()])
    network, optimizer = in_shards(SHARDED["default"])
    apart, begun, before_the_last = split(uneven()), [], []
    apart[0].weight.register_post_accumulate_grad_hook(lambda p: before_the_last.append(len(begun)))
    apart, alone = in_shards(SHARDED["default"], apart, groups=[[p] for p in reversed(list(apart.parameters()))])
    transport = engine_of(alone).settings.transport
    start = transport.start

    def spied(collective, name):
        begun.append(name)
        return start(collective, name)

    transport.start = spied
    for step in range(8):
        begun.clear()
        steps_in_shards(network, optimizer, [step]), steps_in_shards(apart, alone, [step])
    return results, torch.equal(whole(network), whole(apart)), before_the_last[1:]


def fsdp_conservation():
    """Of each weight's shard: what was accumulated on all nodes, and what was applied and is pending, added up."""
    results = {}
    network = split(uneven())
    added = {n: torch.zeros(p.to_local().shape, dtype=torch.float64) for n, p in network.named_parameters()}
    applied = {n: torch.zeros_like(t) for n, t in added.items()}
    for n, p in network.named_parameters():  # called before the optimizer's own
        p.register_post_accumulate_grad_hook(lambda p, n=n: added[n].add_(p.grad.to_local()))
    _, optimizer = in_shards(SHARDED["default"], network, momentum=0.0)
    for step in range(10):
        steps_in_shards(network, optimizer, [step])
        for n, p in network.named_parameters():
            applied[n] += p.grad.to_local()
    pending = optimizer.residual_state_dict()["v"]
    for n, v in pending.items():
        sums = torch.stack([added[n], v.double()])
        torch.distributed.all_reduce(sums, group=across())
        results[n] = (sums[0], 2 * applied[n] + sums[1], v.abs().max().item() if v.numel() else 0.0)
    return results


def fsdp_resumed():
    """Saved and loaded between two steps, to the bit; the state's keys; what the other shard's residuals are told."""
    config = replace(SHARDED["default"], min_numel=50)  # between the sizes of the two shards of the first weight
    network, optimizer = steps_in_shards(*in_shards(config), range(3))
    residuals = optimizer.residual_state_dict()
    saved = {name: t.to_local().clone() for name, t in network.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    shapes = {(i, key): tuple(t.shape) for i, kept in state["state"].items() for key, t in kept.items()}
    steps_in_shards(network, optimizer, range(3, 6))
    other, again = in_shards(config, split(uneven(seed=5)))
    with torch.no_grad():
        for name, t in other.state_dict().items():
            t.to_local().copy_(saved[name])
    again.load_residual_state_dict(residuals)
    again.load_state_dict(state)
    steps_in_shards(other, again, range(3, 6))
    index = torch.distributed.get_rank() % 2
    try:
        again.load_residual_state_dict({**residuals, "shard": (1 - index, 2)})
    except ValueError as error:
        return torch.equal(whole(network), whole(other)), shapes, str(error)


def fsdp_saved():
    """By torch.distributed.checkpoint, to the bit; what save_checkpoint and load_checkpoint say."""
    import torch.distributed.checkpoint as dcp
    folder, told = Path(sys.argv[2]) / "sharded", []

    def states():
        return {"model": network.state_dict(), "optimizer": optimizer.state_dict(),
                "residuals": dgc.Residuals(optimizer)}

    network, optimizer = steps_in_shards(*in_shards(SHARDED["default"]), range(3))
    dcp.save(states(), checkpoint_id=folder)
    steps_in_shards(network, optimizer, range(3, 6))
    expected = whole(network)
    network, optimizer = in_shards(SHARDED["default"], split(uneven(seed=5)))
    loaded = states()
    dcp.load(loaded, checkpoint_id=folder)
    network.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    steps_in_shards(network, optimizer, range(3, 6))
    for verb in (dgc.save_checkpoint, dgc.load_checkpoint):
        try:
            verb(folder, network, optimizer)
        except TypeError as error:
            told.append(str(error).split(";")[0])
    residuals = torch.cat([v.flatten() for v in optimizer.residual_state_dict()["v"].values()])
    return torch.equal(whole(network), expected), residuals.norm().item(), told


def fsdp_skipped():
    """One shard of one node has a gradient that is not finite: no rank takes the step, with and without a scaler."""
    results = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0 ** 4, growth_interval=100)):
        network = split(uneven())
        now = []

        def spoil(p, now=now):
            if now[-1] == 2 and torch.distributed.get_rank() == 1:
                p.grad.to_local()[0, 0] = torch.inf
        network[0].weight.register_post_accumulate_grad_hook(spoil)
        config = dgc.Config(sparsity=0.0, min_numel=80, nonfinite="skip" if scaler is None else "error")
        _, optimizer = in_shards(config, network, grad_scaler=scaler)
        for step in range(5):
            now.append(step)
            optimizer.zero_grad()
            loss = uneven_loss(network, torch.distributed.get_rank(), step)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        results.append((difference(whole(network), on_the_average([0, 1, 3, 4])), optimizer.report().skipped,
                        None if scaler is None else scaler.get_scale()))
    return results


def fsdp_refusals():
    """What the door says."""
    sharded, config = split(uneven()), dgc.Config()
    mixed = uneven()
    split(mixed, ignored_params={mixed[0].weight})
    told = []
    for network, process_set, settings in (
            (sharded, None, config), (sharded, mesh()["shard"].get_group(), config),
            (sharded, torch.distributed.group.WORLD, config), (split(uneven(), own=mesh()), across(), config),
            (mixed, across(), config), (sharded, across(), dgc.Config(clip_norm=1.0, clip_per_tensor=True))):
        try:
            dgc.DistributedOptimizer(sgd(network.parameters()), network.named_parameters(), settings,
                                     process_set=process_set)
            told.append(None)
        except (TypeError, ValueError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


# -- checkpoints: in a folder of the launch ----------------------------------------------------------------------------

CLOCKS = {}  # rank -> its virtual time
SHAPED = dgc.Config(sparsity=dgc.adaptive(0.5, 0.999, start=0.98, every=4))


@contextmanager
def virtual_time():
    """Within it, the ranks' own clocks (see :func:`paced`) stand in for this machine's."""
    kept, clocks.perf_counter = clocks.perf_counter, lambda: CLOCKS[find().world.rank]()
    try:
        yield
    finally:
        clocks.perf_counter = kept


def paced(steps, network=None, optimizer=None, config=SHAPED, fastest=0.5):
    """A training that takes virtual time: the sparsity of each step, the network and the optimizer.

    Computing takes 1 on the last rank, and ``fastest`` on the first, which waits for the others. The exchange takes
    8 times the density; from step 60 on, when the bandwidth is halved, 16 times. 0.6 of that is hidden, and 0.02 never.
    """
    world, sparsities, now, delta = find().world, [], 0, 0
    if network is None:
        network = model()
    if optimizer is None:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config)
    looks = len(engine_of(optimizer).parameters.buckets) + 1  # as each of them is complete; synchronize()
    unit = 10 ** 8 * looks  # whole numbers: no rounding
    computing = round(1e8 * (fastest + (1 - fastest) * world.rank / (world.size - 1))) * looks

    def clock():
        nonlocal now
        now += delta
        return float(now)

    CLOCKS[world.rank] = clock
    for step in steps:
        sparsity = optimizer.param_groups[0]["dgc_sparsity"]
        wire = round(1e8 * (0.02 + max(0, (8 if step < 60 else 16) * (1 - sparsity) - 0.6))) * looks
        delta = (wire + unit - computing) // looks  # at each second look computing has stood still,
        now += computing - looks * delta  # and at the others gone on
        optimizer.zero_grad()
        loss(network, world.rank, step).backward()
        optimizer.step()
        sparsities.append(sparsity)
    return sparsities, network, optimizer


def adaptive():
    """Ranks that measure differently."""
    with virtual_time():
        sparsities, network, optimizer = paced(range(100))
        return sparsities, flat(network), optimizer.report()


def ddp_adaptive():
    """Under DDP, as without it; and registered once more with another schedule."""
    with virtual_time():
        ours = paced(range(100))
        parallel, optimizer = in_ddp(model(), SHAPED)
        theirs = paced(range(100), parallel, optimizer)
        same = ours[0] == theirs[0] and same_end((theirs[1].module, theirs[2]), ours[1:])
        again = nn.parallel.DistributedDataParallel(parallel.module)
        dgc.register_comm_hook(again, optimizer, replace(SHAPED, sparsity=dgc.adaptive(0.97, 0.98, start=0.975)))
        return same, optimizer.param_groups[0]["dgc_sparsity"], theirs[0][-1]


def broadcast_adaptive():
    """hvd.broadcast_optimizer_state to ranks that begin anew, and on from there."""
    import horovod.torch as hvd
    with virtual_time():
        _, network, optimizer = paced(range(28))
        expected = optimizer.param_groups[0]["dgc_sparsity"]
        state = copy.deepcopy(optimizer.state_dict())
        del optimizer
        other = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
        other = dgc.DistributedOptimizer(other, network.named_parameters(), SHAPED)
        if hvd.rank() == 0:
            other.load_state_dict(state)
        hvd.broadcast_optimizer_state(other, root_rank=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return expected, paced(range(28, 80), network, other)[0]


def broadcast_no_longer_adaptive():
    """The same to ranks that have a fixed sparsity by now: what is in the groups."""
    import horovod.torch as hvd
    network, optimizer = train(range(4), SHAPED)
    other = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-2)
    other = dgc.DistributedOptimizer(other, network.named_parameters(), dgc.Config(0.9))
    if hvd.rank() == 0:
        other.load_state_dict(optimizer.state_dict())
    hvd.broadcast_optimizer_state(other, root_rank=0)
    return {key: value for key, value in other.param_groups[0].items() if key != "params"}


def normalised():
    """With a batch norm, whose running statistics are each rank's own."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Dropout(0.2), nn.Flatten(),
                         nn.Linear(16 * 36, 10))


def drawing(steps, network, optimizer):
    """Steps that draw from every generator; what was drawn."""
    rank, draws = find().world.rank, []
    for step in steps:
        draws.append([torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()])
        optimizer.zero_grad()
        (loss(network, rank, step) * sum(draws[-1])).backward()
        optimizer.step()
    return draws


def made(network=None, **config):
    network = normalised() if network is None else network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True)
    return network, dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(
        **{"sparsity": dgc.warmup(2, steps_per_epoch=4, end=0.99), "dense_dtype": torch.float16, **config}))


def everything(network, optimizer):
    residuals = optimizer.residual_state_dict()
    return [*network.state_dict().values(), *residuals["u"].values(), *residuals["v"].values(),
            *(x for state in optimizer.state.values() for x in state.values() if x is not None)]


def alike(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def seeded(rank):
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)


def checkpoint_resume(separate=False):
    """Stop, save, load, go on, against never having stopped; and all raise what one meets."""
    rank = find().world.rank
    folder = Path(sys.argv[2]) / (f"disk {rank}" if separate else "shared")
    seeded(rank)
    network, optimizer = made()
    draws = drawing(range(6), network, optimizer)
    dgc.save_checkpoint(folder, network, optimizer, {"epoch": 6, "rank": rank})
    draws = drawing(range(6, 12), network, optimizer)
    expected = everything(network, optimizer)
    if separate and rank == 1:  # another machine than before
        shutil.rmtree(folder)
    seeded(99)
    network, optimizer = made()
    extras = dgc.load_checkpoint(folder, network, optimizer)
    drawn = drawing(range(6, 12), network, optimizer)
    return {"same": alike(everything(network, optimizer), expected), "draws": draws == drawn, "extras": extras,
            "residual": optimizer.report().residual_norm, "buffers": network[1].running_mean,
            "files": sorted(file.name.split("-")[0] for file in folder.iterdir()) if folder.exists() else []}


def checkpoint_separate():
    """Without a common file system."""
    return checkpoint_resume(separate=True)


def checkpoint_failure():
    """Rank 1's disk is full."""
    import resource
    rank, folder = find().world.rank, Path(sys.argv[2]) / "full"
    network, optimizer = made()
    drawing(range(3), network, optimizer)
    dgc.save_checkpoint(folder, network, optimizer)
    before, files = everything(network, optimizer), sorted(folder.iterdir())
    before = [x.clone() for x in before]
    drawing(range(3, 6), network, optimizer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    began, message = time.monotonic(), ""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    try:
        dgc.save_checkpoint(folder, network, optimizer)
    except OSError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    seconds = time.monotonic() - began
    for root in range(2):  # until the other has tidied up
        dgc.broadcast_parameters([("here", torch.zeros(1))], root)
    left = sorted(folder.iterdir()) == files
    for root in range(2):
        dgc.broadcast_parameters([("here", torch.zeros(1))], root)
    dgc.load_checkpoint(folder, network, optimizer)
    return message, seconds, left, alike(everything(network, optimizer), before)


def checkpoint_damage():
    """One byte of rank 1's file."""
    rank, folder = find().world.rank, Path(sys.argv[2]) / "damaged"
    network, optimizer = made()
    drawing(range(3), network, optimizer)
    dgc.save_checkpoint(folder, network, optimizer)
    before = [x.clone() for x in everything(network, optimizer)]
    if rank == 1:
        file = next(folder.glob("rank-1-*"))
        content = bytearray(file.read_bytes())
        content[5000] ^= 4
        file.write_bytes(content)
    drawing(range(3, 4), network, optimizer)
    after, message = [x.clone() for x in everything(network, optimizer)], ""
    try:
        dgc.load_checkpoint(folder, network, optimizer)
    except ValueError as error:
        message = str(error)
    return message, alike(everything(network, optimizer), after) and not alike(before, after)


def stateful():
    """With ``torch.distributed.checkpoint``, against never having stopped."""
    import torch.distributed.checkpoint as dcp
    folder, rank = Path(sys.argv[2]) / "dcp", find().world.rank

    def steps(some):
        for step in some:
            optimizer.zero_grad()
            x = torch.randn(4, 500, generator=torch.Generator().manual_seed(2 * step + rank))
            network(x).square().sum().backward()
            optimizer.step()
        return everything(network, optimizer)

    def states():
        return {"model": network.state_dict(), "optimizer": optimizer.state_dict(),
                "residuals": dgc.Residuals(optimizer)}

    torch.manual_seed(0)
    network, optimizer = made(nn.Linear(500, 10))
    steps(range(6))
    dcp.save(states(), checkpoint_id=folder)
    expected = steps(range(6, 12))
    network, optimizer = made(nn.Linear(500, 10))
    loaded = states()
    dcp.load(loaded, checkpoint_id=folder)
    network.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    return alike(steps(range(6, 12)), expected), optimizer.report().residual_norm


def checkpoint_ddp():
    """With DistributedDataParallel's hook."""
    folder, rank = Path(sys.argv[2]) / "ddp", find().world.rank

    def start():
        torch.manual_seed(0)
        network = nn.Linear(500, 10)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-2)
        wrapped = nn.parallel.DistributedDataParallel(network)
        dgc.register_comm_hook(wrapped, optimizer, dgc.Config(sparsity=0.95))
        return wrapped, optimizer

    def steps(some):
        for step in some:
            optimizer.zero_grad()
            x = torch.randn(4, 500, generator=torch.Generator().manual_seed(2 * step + rank))
            network(x).square().sum().backward()
            optimizer.step()
        return everything(network, optimizer)

    network, optimizer = start()
    steps(range(4))
    dgc.save_checkpoint(folder, network, optimizer)
    expected = steps(range(4, 8))
    network, optimizer = start()
    dgc.load_checkpoint(folder, network, optimizer)
    return alike(steps(range(4, 8)), expected), optimizer.report().residual_norm


def checkpoint_stock():
    """From compressed to Horovod's own optimizer and back, after ``flush()``: how far from compressed at density 1."""
    import horovod.torch as hvd
    folder, rank = Path(sys.argv[2]) / "stock", hvd.rank()
    config = dgc.Config(sparsity=dgc.piecewise({0: 0.95, 4: 0.0}))

    def steps(some):
        for step in some:
            optimizer.zero_grad()
            loss(network, rank, step).backward()
            optimizer.step()
        return flat(network)

    network = model()
    inner = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    optimizer = dgc.DistributedOptimizer(inner, network.named_parameters(), config)
    steps(range(4))
    optimizer.flush()
    dgc.save_checkpoint(folder, network, optimizer)
    expected = steps(range(4, 10))
    network = model()
    inner = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    optimizer = hvd.DistributedOptimizer(inner, network.named_parameters())
    dgc.load_checkpoint(folder, network, optimizer)
    steps(range(4, 7))
    dgc.save_checkpoint(folder, network, optimizer)
    network = model()
    inner = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    optimizer = dgc.DistributedOptimizer(inner, network.named_parameters(), config)
    dgc.load_checkpoint(folder, network, optimizer)
    return ((steps(range(7, 10)) - expected).norm() / expected.norm()).item()


def host_benchmark():
    """benchmarks/host.py, in small: seconds of the thread, by method."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    import host
    return {method: host.seconds(method, 6, 10) for method in host.METHODS}
