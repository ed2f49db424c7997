"""Law 4: at any density, the algorithm of the paper (tests/oracle.py)."""

import numpy as np
import pytest
import torch
from laws import walk, worlds
from oracle import Network, Oracle
from pairwise import pairwise

import dgc
from dgc.compression.residual import Gradient, Residual
from dgc.paths.compressed import exchange_bucket

STEPS = 100
VARIANTS = {
    "heavy-ball": {},
    "nesterov": {"nesterov": True},
    "clipped": {"clip": 0.02},
    "nesterov clipped": {"nesterov": True, "clip": 0.02},
    "unmasked": {"masking": False},
    "unmasked nesterov": {"masking": False, "nesterov": True},
    "no momentum": {"momentum": 0.0},
}


def config(variant, sparsity):
    return dgc.Config(
        sparsity=sparsity,
        value_bits=32,
        clip_norm=variant.get("clip"),
        factor_masking=variant.get("masking", True),
        min_numel=0,
    )


@pairwise(
    nodes=[1, 2, 4],
    variant=VARIANTS,
    density=[(0.99, torch.float32), (0.99, torch.float64), (0.75, torch.float64)],
)
def test_path(nodes, variant, density):
    """The path of a bucket, with the gradient that the weights reached so far give.

    At 75 % the entries around the threshold are dense, and float32 would now and then choose another one of two.
    """
    variant, (sparsity, dtype) = VARIANTS[variant], density
    network, m = Network(), variant.get("momentum", 0.9)
    oracle = Oracle(
        network.start,
        network.gradient,
        nodes,
        lr=0.1,
        sparsity=sparsity,
        **{"momentum": m, **variant},
    )
    settings = config(variant, sparsity)
    weights = {name: torch.tensor(w).to(dtype) for name, w in zip("ab", network.start, strict=True)}
    buckets = [Residual("bucket 0", weights) for _ in range(nodes)]
    clipped = 0
    for step in range(STEPS):
        paths = []
        for node, world in enumerate(worlds(nodes)):
            g = network.gradient([w.double().numpy() for w in weights.values()], node, step)
            gradients = {
                name: Gradient(torch.tensor(x).to(dtype), m, variant.get("nesterov", False))
                for name, x in zip("ab", g, strict=True)
            }
            scale = None
            if settings.clip_norm is not None:
                norm = torch.tensor(np.sqrt(sum((x**2).sum() for x in g))).to(dtype)
                scale = dgc.compression.residual.clip_scale(
                    norm, settings.clip_norm, nodes, average=True
                )
                clipped += bool(scale < 1)
            paths.append(
                exchange_bucket(buckets[node], gradients, settings, step, world, scale=scale)
            )
        updates = walk(paths)
        for name, part in buckets[0].views(updates[0]).items():
            weights[name] = weights[name] - 0.1 * part
        oracle.step(step)
    assert clipped == (STEPS * nodes if settings.clip_norm else 0)  # the bound was met at each step
    for got, expected in zip(weights.values(), oracle.weights, strict=True):
        moved = np.linalg.norm(
            expected - network.start[0 if expected.shape == network.start[0].shape else 1]
        )
        assert moved > 0.05  # there was something to get right
        assert np.linalg.norm(got.numpy() - expected) / np.linalg.norm(expected) <= 1e-5


@pytest.mark.parametrize("nodes", [pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_optimizer(nodes, variant):
    """The whole of it: a torch model in float64, backward passes, DistributedOptimizer around SGD."""
    variant = VARIANTS[variant]
    network, m = Network(), variant.get("momentum", 0.9)
    oracle = Oracle(
        network.start, network.gradient, nodes, lr=0.1, sparsity=0.99, **{"momentum": m, **variant}
    )

    def worker():
        weights = [torch.nn.Parameter(torch.tensor(w).double()) for w in network.start]
        optimizer = torch.optim.SGD(
            weights, lr=0.1, momentum=m, nesterov=variant.get("nesterov", False)
        )
        optimizer = dgc.DistributedOptimizer(optimizer, compression=config(variant, 0.99))
        rank = dgc.lockstep.current().world.rank
        for step in range(STEPS):
            x, y = (torch.tensor(a).double() for a in network.batch(rank, step))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(torch.tanh(x @ weights[0].T) @ weights[1].T, y).backward()
            optimizer.step()
        return [w.detach() for w in weights]

    results = dgc.lockstep.run(worker, nodes)
    for step in range(STEPS):
        oracle.step(step)
    for i, expected in enumerate(oracle.weights):
        assert all(torch.equal(result[i], results[0][i]) for result in results)
        assert np.linalg.norm(results[0][i].numpy() - expected) / np.linalg.norm(expected) <= 1e-5
