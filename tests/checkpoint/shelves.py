"""Checkpoints that several tests take from the shelf."""

import functools
import os
from pathlib import Path

import pytest
import torch
from laws import batch, current_rank, flat, model
from torch import nn

import dgc

DOUBLE = torch.float64
SOAK = bool(os.environ.get("DGC_SOAK"))  # at full size
SCHEDULE = dgc.piecewise({0: 0.95, 4: 0.0})


def made(op=dgc.Average, network=None, kind=torch.optim.SGD, config=None, **changed):
    network = model(dtype=DOUBLE) if network is None else network
    usual = (
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}
        if kind is torch.optim.SGD
        else {"lr": 1e-3}
    )
    optimizer = kind(network.parameters(), **{**usual, **changed})
    config = dgc.Config(sparsity=SCHEDULE) if config is None else config
    return network, dgc.DistributedOptimizer(optimizer, network.named_parameters(), config, op=op)


def trained(steps, network, optimizer, common=False):
    """Gradients that add up to the same whatever the number of ranks, if they have the batches in common."""
    rank, world = current_rank(), dgc.lockstep.current().world
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(0 if common else rank, step, DOUBLE)
        value = nn.functional.cross_entropy(network(x), y)
        (value if optimizer.op == dgc.Average else value / world.size).backward()
        optimizer.step()
    return flat(network)


def in_lockstep(worker, size):
    return dgc.lockstep.run(worker, size)


@functools.cache
def saved(size, op, folder, **changed):
    """Four sparse steps, saved; what each rank had pending; and the parameters when all of it is applied, and after
    four dense steps.
    """

    def worker():
        network, optimizer = made(op, **changed)
        trained(range(4), network, optimizer)
        dgc.save_checkpoint(folder, network, optimizer, {"rank": current_rank()})
        residuals, before = optimizer.residual_state_dict(), flat(network)
        optimizer.flush()
        flushed = flat(network)
        dgc.save_checkpoint(Path(folder) / "flushed", network, optimizer)
        after_flush = trained(range(4, 8), network, optimizer, common=True)
        dgc.load_checkpoint(folder, network, optimizer)
        return (
            residuals,
            before,
            flushed,
            trained(range(4, 8), network, optimizer, common=True),
            after_flush,
        )

    return in_lockstep(worker, size)


def pending(residuals, letter, average):
    """What counts in the update, float64."""
    total = {k: sum(r[letter][k].double() for r in residuals) for k in residuals[0][letter]}
    return torch.cat([x.flatten() for x in total.values()] or [torch.zeros(0)]) / (
        len(residuals) if average else 1
    )


OPS = pytest.mark.parametrize("op", [dgc.Average, dgc.Sum], ids=["average", "sum"])


def load(folder, **changed):
    return in_lockstep(lambda: dgc.load_checkpoint(folder, *made(**changed)), 2)
