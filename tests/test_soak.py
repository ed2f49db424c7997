"""Endurance: many steps, and many damaged messages. `make soak` runs all of it at full size, `make test` a part."""

import math
import os

import psutil
import pytest
import torch
from launch import launch
from laws import (
    flat,
)
from torch import nn

import dgc
from dgc.compression import kernels, select
from dgc.compression.kernels import plain
from dgc.compression.residual import Residual
from dgc.compression.wire import Layout, seal
from dgc.transport import find


def soak():
    """Many steps with a warm-up and a NaN now and then: memory, steps, and what was lost, which is nothing.

    Without momentum all ranks' gradients must equal what was applied and what is pending, added up over all steps.
    """
    steps, world = int(os.environ["DGC_SOAK_STEPS"]), find().world
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(256, 400), nn.Tanh(), nn.Linear(400, 300), nn.Tanh(), nn.Linear(300, 10)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    config = dgc.Config(dgc.warmup(4, steps_per_epoch=max(1, steps // 20)), nonfinite="skip")
    optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config)
    weights = [p for p in network.parameters() if p.dim() > 1]
    accumulated, applied = (
        [torch.zeros_like(p, dtype=torch.float64) for p in weights] for _ in range(2)
    )
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
    return {
        "accumulated": accumulated,
        "applied": applied,
        "skipped": (report.skipped, bad),
        "steps": report.steps,
        "growth": max(memory[-len(memory) // 4 :]) - max(memory[: len(memory) // 4]),
        "empty": empty,
        "flat": flat(network),
    }


FULL = bool(os.environ.get("DGC_SOAK"))
STEPS, MESSAGES = (2000, 100_000) if FULL else (150, 3000)


@pytest.mark.parametrize("launcher", ["horovod", pytest.param("torch", marks=pytest.mark.long)])
def test_memory_stays_flat_and_nothing_is_lost(launcher, monkeypatch):
    monkeypatch.setenv("DGC_SOAK_STEPS", str(STEPS))
    results = launch(launcher, 2, [soak], limit=1800 if FULL else 240)[0][soak]
    for i, applied in enumerate(results[0]["applied"]):
        sent = sum(result["accumulated"][i] for result in results) / len(results)
        assert applied.norm() > 0 and (sent - applied).norm() <= 1e-6 * applied.norm()
    assert all(
        torch.equal(result["flat"], results[0]["flat"]) and result["empty"] for result in results
    )
    for result in results:
        assert (
            result["skipped"] == (STEPS // 37, STEPS // 37)
            and result["steps"] == STEPS - STEPS // 37
        )
        print(
            f"{launcher}: {result['steps']} steps, {result['skipped'][0]} skipped, memory grew by "
            f"{result['growth'] / 1e6:.1f} MB in the second half"
        )
        assert result["growth"] < 4e6  # a step's own tensors are 1 MB


SHAPES = {"a": (3, 5), "b": (300, 700), "c": (1, 1), "d": (40, 50)}


def messages(layout, seed):
    """Two ranks' messages."""
    made = []
    for rank in range(2):
        generator = torch.Generator().manual_seed(10 * seed + rank)
        index, used, start = [], [], 0
        for n, k in zip(layout.numels, layout.counts, strict=True):
            used.append(int(torch.randint(0, k + 1, (), generator=generator)))
            places = torch.randperm(n, generator=generator)[:k].sort().values
            index.append(start + places)
            start += n
        index = torch.cat(index)
        values = torch.randn(len(index), generator=generator)
        row = torch.where(layout.uses(torch.tensor(used)), 0, 1)
        made.append(layout.rows.encode(row, index, values, 1)[0])
    return torch.cat(made)


def damaged(message, generator):
    """A message with some bytes changed, a part moved, or a part of zeros or ones."""
    changed, n = message.clone(), len(message)
    kind, at, length = (
        int(torch.randint(0, bound, (), generator=generator)) for bound in (4, n, 1 + n // 8)
    )
    if kind == 0:
        for _ in range(1 + length % 4):
            where = int(torch.randint(0, n, (), generator=generator))
            changed[where] = int(torch.randint(0, 256, (), generator=generator))
    elif kind == 1:
        part = changed[at : at + length].clone()
        where = int(torch.randint(0, n, (), generator=generator))
        changed[where : where + len(part)] = part[: n - where]
    else:
        changed[at : at + length] = 255 * (kind - 2)
    return changed


@pytest.mark.parametrize("kernel", ["plain", "found"])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_damaged_message_is_an_error_or_stays_within_its_parameters(kernel, sealed):
    """With the checksum made right again the reader itself is attacked: whatever it takes for a message, it must not
    write beside the parameters.
    """
    module = plain if kernel == "plain" else kernels.module_for("cpu", torch.float32)
    bucket = Residual("bucket 0", {name: torch.empty(shape) for name, shape in SHAPES.items()})
    layout = Layout(bucket, [select.count(0.95, n) for n in bucket.numels], 4)
    generator = torch.Generator().manual_seed(5)
    memory = torch.full((bucket.numel + 200,), torch.pi)
    targets = list(memory[100:-100].split(bucket.numels))
    refused, taken, count = 0, 0, MESSAGES // 4
    while refused + taken < count:
        if (refused + taken) % 50 == 0:
            both = messages(layout, refused + taken)
        changed = damaged(both[1], generator)
        received = torch.stack([both[0], seal(changed) if sealed else changed])
        if torch.equal(received, both):
            continue
        update = module.Received(layout, layout.rows, received, 2)
        update.write(targets)
        assert update.status[0] == 0
        if update.status[1] == 0:
            taken += 1
        else:
            refused += 1
        assert bool((memory[:100] == torch.pi).all()) and bool((memory[-100:] == torch.pi).all())
    print(
        f"{kernel}, checksum {'made right' if sealed else 'as it was'}: {count} messages, {refused} refused, "
        f"{taken} read as another message"
    )
    assert refused > 0 and (sealed or taken == 0)
