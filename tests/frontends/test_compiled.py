"""What torch.compile has compiled, a model or a whole step, trains as the plain one, to the bit, over two processes."""

import pytest
import torch
from launch import ran
from laws import CONFIGS, in_ddp, same_end
from torch import nn

import dgc
from dgc.transport import find

# Manner -> graphs: with DDP one for each of its two buckets, as torch divides the model where they end.
MANNERS = {
    "the model": 1,
    "the model, before wrapping": 1,
    "the model in DDP": 2,
    "DDP around it": 2,
}


class Model(nn.Module):
    """Two of DDP's buckets, of which the first has a megabyte: torch.compile wants no smaller ones. It has a forward of
    its own: in DDP, torch leaves that of a bare ``nn.Sequential`` uncompiled.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 10)
        )

    def forward(self, x):
        return self.layers(x)


def trained(network, optimizer, runs):
    """A short training whose forward and backward passes are those of ``runs``."""
    for x in batches():
        optimizer.zero_grad()
        runs(x).square().mean().backward()
        optimizer.step()
    return network, optimizer


def batches():
    rank = find().world.rank
    return [
        torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        for step in range(4)
    ]


def wrapping(network):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    return dgc.DistributedOptimizer(optimizer, network.named_parameters(), CONFIGS["default"])


def made(manner, compiled):
    """A model, its optimizer, and what runs in its place."""
    network = Model()
    if manner == "the model":
        return network, wrapping(network), compiled(network)
    if (
        manner == "the model, before wrapping"
    ):  # its parameters have other names: _orig_mod.layers.0.weight
        runs = compiled(network)
        return network, wrapping(runs), runs
    if manner == "the model in DDP":
        runs, optimizer = in_ddp(compiled(network), CONFIGS["default"])
        return network, optimizer, runs
    parallel, optimizer = in_ddp(network, CONFIGS["default"], bucket_cap_mb=1)
    return network, optimizer, compiled(parallel)


def compiled_models():
    """Each manner: whether it ends as the plain model does, and how many graphs were compiled for it."""
    from torch._dynamo import lookup_backend

    graphs, results = [], {}

    def backend(graph, inputs):
        graphs.append(graph)
        # Forward and backward graphs, and no compiler.
        return lookup_backend("aot_eager")(graph, inputs)

    network = Model()
    expected = trained(network, wrapping(network), network)
    for manner in MANNERS:
        torch._dynamo.reset()
        graphs.clear()
        end = trained(*made(manner, lambda module: torch.compile(module, backend=backend)))
        results[manner] = same_end(end, expected), len(graphs)
    return results


def stepped(whole, compiling, network, optimizer, runs):
    """The same training, with a function for backward() alone or for all of a step."""

    def backward(x):
        runs(x).square().mean().backward()

    def step(x):
        optimizer.zero_grad()
        backward(x)
        optimizer.step()

    if whole:
        step = compiling(step)
    else:
        backward = compiling(backward)
    for x in batches():
        step(x)
    return network, optimizer


def compiled_steps(manners):
    """What is compiled -> whether it ends as it does uncompiled."""
    results = {}
    for manner in manners:
        for whole in (False, True):
            torch._dynamo.reset()
            one, other = (
                stepped(whole, compiling, *made(manner, lambda module: module))
                for compiling in (torch.compile(backend="aot_eager"), lambda step: step)
            )
            results[manner, whole] = same_end(one, other)
    return results


def steps_of_ddp():
    return compiled_steps(["DDP around it"])


def steps_of_the_model():
    return compiled_steps(["the model"])


IN_PROCESSES = {
    ("torch", steps_of_ddp): (steps_of_ddp, compiled_models),
    ("torch", steps_of_the_model): (steps_of_the_model,),
    ("horovod", steps_of_the_model): (steps_of_the_model,),
}


@pytest.mark.parametrize(
    ("launcher", "steps"),
    [
        ("torch", steps_of_ddp),
        pytest.param("torch", steps_of_the_model, marks=pytest.mark.long),
        pytest.param("horovod", steps_of_the_model, marks=pytest.mark.long),
    ],
)
def test_a_compiled_step(launcher, steps):
    """Dynamo would trace what a gradient's hook calls, and step(): it fails at that."""
    for results in ran(launcher, 2, IN_PROCESSES[launcher, steps])[steps]:
        assert results and all(results.values()), results


@pytest.mark.parametrize("manner", MANNERS)
def test_as_without_compiling(manner):
    """Parameters and residuals, to the bit."""
    for results in ran("torch", 2, IN_PROCESSES["torch", steps_of_ddp])[compiled_models]:
        same, graphs = results[manner]
        assert same and graphs == MANNERS[manner]
