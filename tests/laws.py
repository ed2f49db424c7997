"""What several test files share: walking paths without a transport, small models, and comparing."""

import torch
from torch import nn

import dgc
from dgc.collective import World
from dgc.paths.update import DenseUpdate, SparseUpdate


def walk(paths):
    """Takes the paths of all ranks to their ends, with the collectives done by hand. Returns their updates, flat."""
    requests = [next(path) for path in paths]
    while True:
        op, tensors = requests[0].op, [request.tensor for request in requests]
        assert {request.op for request in requests} == {op}
        if op == "gather":
            results = [torch.stack(tensors) for _ in paths]
        elif op == "share":
            results = [tensors[requests[0].root].clone() for _ in paths]
        else:
            results = [torch.stack(tensors).sum(0) for _ in paths]
        updates = []
        requests = []
        for path, result in zip(paths, results, strict=True):
            try:
                requests.append(path.send(result))
            except StopIteration as end:
                updates.append(flattened(end.value))
        if updates:
            assert not requests
            return updates


def flattened(update):
    """One tensor of what a path returned."""
    if isinstance(update, SparseUpdate):
        return update.tensor
    if isinstance(update, DenseUpdate):
        return torch.cat(update.parts)
    parts = [torch.empty(n, dtype=update.layout.residual) for n in update.layout.numels]
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
    g[:int(zeros * n)] = 0
    return g


def worlds(n):
    return [World(rank, n) for rank in range(n)]


def model(seed=0, dtype=torch.float32):
    """Compressed, one-dimensional and small parameters, convolution and linear. Smooth: at the kink of a ReLU two
    trainings that differ by a rounding part for good.
    """
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, track_running_stats=False), nn.SiLU(),
                         nn.Conv2d(8, 16, 3, stride=2), nn.SiLU(), nn.Flatten(), nn.Linear(16 * 9, 40), nn.Tanh(),
                         nn.Linear(40, 10)).to(dtype)


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(8, 3, 8, 8, generator=generator).to(dtype), torch.randint(0, 10, (8,), generator=generator))


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


def train(steps, config, network=None, optimizer=None, momentum=0.9, weight_decay=1e-2, nesterov=False, **arguments):
    """A short training on this rank: the network and the wrapped optimizer after it."""
    network = model() if network is None else network
    if optimizer is None:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=momentum, weight_decay=weight_decay,
                                    nesterov=nesterov)
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config, **arguments)
    rank = current_rank()
    for step in steps:
        optimizer.zero_grad()
        loss(network, rank, step).backward()
        optimizer.step()
    return network, optimizer


def reference(steps, size, network=None, optimizer=None, momentum=0.9, weight_decay=1e-2, nesterov=False):
    """The same training by torch.optim.SGD on the averaged gradient, in one process."""
    network = model() if network is None else network
    if optimizer is None:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=momentum, weight_decay=weight_decay,
                                    nesterov=nesterov)
    for step in steps:
        optimizer.zero_grad()
        for rank in range(size):
            (loss(network, rank, step) / size).backward()
        optimizer.step()
    return network, optimizer
