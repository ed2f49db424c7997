"""What several test files share: walking paths without a transport, small models, and comparing."""

import math
import os
import signal

import torch
from torch import nn

import dgc
from dgc.collective import World
from dgc.compression import select
from dgc.compression.residual import Residual
from dgc.compression.wire import Layout
from dgc.paths.averaged import DenseUpdate, SparseUpdate
from dgc.transport import find


def walk(paths):
    """Takes the paths of all ranks to their ends, with the collectives done by hand. Returns their updates, flat."""
    requests = [next(path) for path in paths]
    while True:
        updates, results = [], performed(requests)
        requests = []
        for path, result in zip(paths, results, strict=True):
            try:
                requests.append(path.send(result))
            except StopIteration as end:
                updates.append(flattened(end.value))
        if updates:
            assert not requests
            return updates


def performed(requests):
    """What each rank gets of a collective of all of them."""
    op, tensors = requests[0].op, [request.tensor for request in requests]
    assert {request.op for request in requests} == {op}
    if op == "all_to_all":
        return [torch.stack(rows) for rows in zip(*tensors, strict=True)]
    result = {
        "all_gather": torch.stack,
        "broadcast": lambda each: each[requests[0].root],
        "all_reduce": lambda each: torch.stack(each).sum(0),
    }[op](tensors)
    return [result.clone() for _ in requests]


def flattened(update):
    """One tensor of what a path returned."""
    if isinstance(update, SparseUpdate):
        return update.tensor
    if isinstance(update, DenseUpdate):
        return torch.cat(update.parts)
    parts = [torch.empty(n, dtype=update.layout.dtype) for n in update.layout.numels]
    update.write(parts)
    return torch.cat(parts)


def misleading(n, seed, zeros, pattern):
    """A flat gradient that leads a sample astray: zeros at first, then rows of other scales, or sorted, or of few
    different magnitudes, or all equal.
    """
    g = torch.randn(n, generator=torch.Generator().manual_seed(seed)) ** 3
    if pattern == "rows":
        g = g * torch.tensor([1e-3, 1.0, 10.0, 1e-6, 1.0, 1e3, 1e-3, 5.0]).repeat(n // 8 + 1)[:n]
    if pattern == "sorted":
        g = g.sort().values
    if pattern == "few":
        g = g.round()
    if pattern == "equal":
        g = torch.ones(n)
    g[: int(zeros * n)] = 0
    return g


def worlds(n, average=True):
    return [World(rank, n, average=average) for rank in range(n)]


def model(seed=0, dtype=torch.float32):
    """Compressed, one-dimensional and small parameters, convolution and linear. Smooth: at the kink of a ReLU two
    trainings that differ by a rounding part for good.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8, track_running_stats=False),
        nn.SiLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(16 * 9, 40),
        nn.Tanh(),
        nn.Linear(40, 10),
    ).to(dtype)


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.randn(8, 3, 8, 8, generator=generator).to(dtype),
        torch.randint(0, 10, (8,), generator=generator),
    )


def loss(network, rank, step, dtype=torch.float32):
    x, y = batch(rank, step, dtype)
    return nn.functional.cross_entropy(network(x).float(), y)


def flat(network):
    return torch.cat([p.detach().flatten().double() for p in network.parameters()])


def difference(a, b):
    """Relative, in the Euclidean norm."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def current_rank():
    """Of whatever transport is initialised."""
    from dgc.transport import find

    return find().world.rank


def train(
    steps,
    config,
    network=None,
    optimizer=None,
    momentum=0.9,
    weight_decay=1e-2,
    nesterov=False,
    **arguments,
):
    """A short training on this rank: the network and the wrapped optimizer after it."""
    network = model() if network is None else network
    if optimizer is None:
        optimizer = torch.optim.SGD(
            network.parameters(),
            lr=0.05,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )
        optimizer = dgc.DistributedOptimizer(
            optimizer, network.named_parameters(), config, **arguments
        )
    rank = current_rank()
    for step in steps:
        optimizer.zero_grad()
        loss(network, rank, step).backward()
        optimizer.step()
    return network, optimizer


def reference(
    steps, size, network=None, optimizer=None, momentum=0.9, weight_decay=1e-2, nesterov=False
):
    """The same training by torch.optim.SGD on the averaged gradient, in one process."""
    network = model() if network is None else network
    if optimizer is None:
        optimizer = torch.optim.SGD(
            network.parameters(),
            lr=0.05,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )
    for step in steps:
        optimizer.zero_grad()
        for rank in range(size):
            (loss(network, rank, step) / size).backward()
        optimizer.step()
    return network, optimizer


DENSE, SPARSE = dgc.Config(sparsity=0.0), dgc.Config(sparsity=0.9)


def in_lockstep(worker, size=2):
    return dgc.lockstep.run(worker, size)


def rank():
    return dgc.lockstep.current().world.rank


def wrapped(
    config=SPARSE,
    network=None,
    lr=0.05,
    momentum=0.9,
    kind=torch.optim.SGD,
    settings=None,
    **arguments,
):
    network = model() if network is None else network
    settings = {"lr": lr, "momentum": momentum} if settings is None else settings
    optimizer = kind(network.parameters(), **settings)
    return network, dgc.DistributedOptimizer(
        optimizer, network.named_parameters(), config, **arguments
    )


def backward(network, step=0):
    loss(network, rank(), step).backward()


def die_between_phases():
    """From now on this rank is killed when it has been sent rows to add up, and others wait for what it passes on."""
    from dgc.compression.kernels import owners_cpu, owners_plain

    for kernel in (owners_cpu, owners_plain):
        kernel.pass_on = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


CONFIGS = {
    "default": dgc.Config(sparsity=0.95),
    "float32": dgc.Config(sparsity=0.95, value_bits=32),
    "four bits": dgc.Config(sparsity=0.95, value_bits=4),
    "clipped": dgc.Config(sparsity=0.95, clip_norm=0.1),
    "clipped per tensor": dgc.Config(sparsity=0.95, clip_norm=0.1, clip_per_tensor=True),
    "unmasked": dgc.Config(sparsity=0.95, factor_masking=False),
    "plain accumulation": dgc.Config(sparsity=0.95, momentum_correction=False),
    "dense, then sparse": dgc.Config(sparsity=dgc.dense_until(4, then=0.95)),
    "warm-up": dgc.Config(sparsity=dgc.warmup(2, steps_per_epoch=4, end=0.99)),
    "dense fallback": dgc.Config(sparsity=0.1, value_bits=32),  # with two ranks, too
    "rounded": dgc.Config(sparsity=dgc.piecewise({0: 0.0, 3: 0.3, 6: 0.95}), value_bits=8),
    "reduced": dgc.Config(sparsity=0.95, exchange="reduce"),
    "reduced, few entries": dgc.Config(
        sparsity=0.999, exchange="reduce"
    ),  # fewer than slots, with eight ranks
    "unmasked, reduced, clipped": dgc.Config(
        sparsity=0.95, factor_masking=False, exchange="reduce", clip_norm=0.1
    ),
}


def overflowing(network, optimizer, scaler, unscale=False):
    """Eight steps, of which the sixth overflows on rank 1."""
    rank, scales = find().world.rank, []
    for step in range(8):
        optimizer.zero_grad()
        factor = 1e38 if rank == 1 and step == 5 else 1.0
        scaler.scale(loss(network, rank, step) * factor).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return flat(network), scales, optimizer.report().skipped


def scaled():
    """A loss scale that grows, and overflows on rank 1: parameters, scales, skipped steps, as in the usual script."""
    network = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    optimizer = dgc.DistributedOptimizer(
        optimizer, network.named_parameters(), dgc.Config(sparsity=0.9), grad_scaler=scaler
    )
    return overflowing(network, optimizer, scaler)


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
    optimizer = torch.optim.SGD(
        parallel.parameters(), lr=0.05, momentum=momentum, weight_decay=1e-2
    )
    dgc.register_comm_hook(parallel, optimizer, config, grad_scaler=scaler)
    return parallel, optimizer


def same_end(one, other):
    """Parameters and residuals, to the bit."""
    (network, optimizer), (reference, wrapped) = one, other
    residuals = [
        torch.equal(a, b)
        for letter in "uv"
        for a, b in zip(
            optimizer.residual_state_dict()[letter].values(),
            wrapped.residual_state_dict()[letter].values(),
            strict=True,
        )
    ]
    return torch.equal(flat(network), flat(reference)) and all(residuals)


def everything(network, optimizer):
    residuals = optimizer.residual_state_dict()
    return [
        *network.state_dict().values(),
        *residuals["u"].values(),
        *residuals["v"].values(),
        *(x for state in optimizer.state.values() for x in state.values() if x is not None),
    ]


def alike(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Lars(torch.optim.SGD):
    """A subclass whose step is another: it goes by the norm of what it finds in ``p.grad``."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["first"] = p.norm()
                p.sub_(
                    p.grad * (group["lr"] * self.state[p]["first"] / p.grad.norm().clamp(min=1e-6))
                )


def counted_sizes(sparsity):
    """Of the model's only bucket; and how many entries travel dense."""
    compressed = {
        str(i): p for i, p in enumerate(model().parameters()) if p.dim() > 1 and p.numel() >= 1024
    }
    bucket = Residual("", dict(reversed(compressed.items())))
    layout = Layout(bucket, [select.count(sparsity, n) for n in bucket.numels], 16)
    return layout.sizes, sum(p.numel() for p in model().parameters()) - bucket.numel


def bytes_of_a_row(k, n, bits, all_entries=False):
    """As wire.py says it: a status, scales, values, the low bits of places and the others, and a checksum."""
    low = max(0, min(16, math.floor(math.log2(n / k))))
    scales = 16 * math.ceil(k / 512) * (1 if bits > 8 else 2)
    places = [] if all_entries else [k * low, k + ((n - 1) >> low)]
    return sum(4 * math.ceil(section / 32) for section in (32, scales, k * bits, *places)) + 8
