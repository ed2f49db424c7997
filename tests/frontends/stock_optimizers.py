"""Every optimizer that torch ships, with the inputs of torch's own tests, beside stock."""

import copy
import math
import warnings

import torch
from stock import DENSE, SCHEDULED, Side, transport
from torch import nn

STEPS = 3


def inputs(info):
    """The settings of torch's tests by what they say of them, the last ones also in other
    implementations. Left out is what torch's tests leave out on the CPU, and ``differentiable``,
    whose parameters are no leaves.
    """
    given = {each.desc: each.kwargs for each in info.optim_inputs_func(device=torch.device("cpu"))}
    last = list(given.values())[-1]
    if "foreach" in info.supported_impls:
        given["foreach"] = {**last, "foreach": True}
    if "cpu" in info.supports_fused_on:
        given["fused"] = {**last, "fused": True}
    return given


class Matrices(nn.Module):
    """What every optimizer takes: of these the second is not large enough to be compressed."""

    def __init__(self, vectors, dtype):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(40, 40, bias=vectors), nn.Linear(40, 3, bias=vectors)
        self.to(dtype)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Words(nn.Module):
    """An embedding whose gradients are sparse, of more entries than travel dense."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(50, 30, sparse=True, dtype=dtype)

    def forward(self, x):
        return self.words(x)


def batch(rank, step, dtype, sparse):
    generator = torch.Generator().manual_seed(10 * step + rank)
    if sparse:
        return torch.randint(0, 50, (6,), generator=generator)
    return torch.randn(8, 40, generator=generator).to(dtype)


def trained(side, info, settings, dtype, sparse):
    """Parameters, gradients, and the state by name, after some steps of which one is left out."""
    vectors = info.optim_cls.__name__ != "Muon"  # which takes matrices alone
    model = Words(dtype) if sparse else Matrices(vectors, dtype)
    optimizer = info.optim_cls(list(model.parameters()), **copy.deepcopy(settings))
    called, optimizer = side.ready(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        called(batch(side.rank, step, dtype, sparse)).square().sum().backward()
        side.exchange(optimizer)
        if step != 1:
            side.step(optimizer)
    return (
        {name: p.detach().clone() for name, p in model.named_parameters()},
        {name: p.grad.to_dense().clone() for name, p in model.named_parameters()},
        {name: copy.deepcopy(dict(optimizer.state[p])) for name, p in model.named_parameters()},
    )


def cases():
    """An optimizer, what is said of its settings, these, the mode, whether gradients are sparse.

    Of sparse ones torch has no weight decay, and nothing fused. With a dampening nothing may ever
    be compressed.
    """
    from torch.testing._internal.common_optimizers import optim_db  # here, as it takes seconds

    for info in optim_db:
        if info.optim_cls is torch.optim.LBFGS:  # which is refused
            continue
        for said, settings in inputs(info).items():
            if not info.only_supports_sparse_grads:
                yield info, said, settings, DENSE, False
            sparse = info.only_supports_sparse_grads or info.supports_sparse
            if sparse and not settings.get("weight_decay") and not settings.get("fused"):
                yield info, said, settings, DENSE, True
            if info.optim_cls is torch.optim.SGD and not settings.get("dampening"):
                yield info, said, settings, SCHEDULED, False


def left_out(over, settings):
    """What stock Horovod forgets, as it makes the optimizer anew."""
    return over == "horovod" and "initial_accumulator_value" in settings


def attempted(side, *arguments):
    """What :func:`trained` returned, or what it raised."""
    torch.manual_seed(7)
    try:
        return trained(side, *arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def apart(ours, stock):
    """How far two values are apart, relative to the largest entry."""
    if not isinstance(stock, torch.Tensor):
        return 0.0 if ours == stock else math.inf
    if not isinstance(ours, torch.Tensor) or ours.dtype != stock.dtype or ours.shape != stock.shape:
        return math.inf
    ours, stock = ours.to_dense().double(), stock.to_dense().double()
    if torch.equal(ours, stock):
        return 0.0
    return float((ours - stock).abs().max() / stock.abs().max())


def compared(ours, stock):
    """The largest difference, or in words why there is none. All of the state that stock has is
    looked at.
    """
    if isinstance(ours, str) or isinstance(stock, str):
        return (
            f"ours: {ours if isinstance(ours, str) else 'trained'}; "
            f"stock: {stock if isinstance(stock, str) else 'trained'}"
        )
    worst = 0.0
    for what, mine, its in zip(("parameter", "gradient", "state"), ours, stock, strict=True):
        for name, value in its.items():
            pairs = {"": (mine[name], value)}
            if what == "state":
                pairs = {key: (mine[name].get(key), each) for key, each in value.items()}
            for key, pair in pairs.items():
                if math.isinf(difference := apart(*pair)) or math.isnan(difference):
                    return f"{what} {name} {key}: ours {pair[0]}, stock {pair[1]}"
                worst = max(worst, difference)
    return worst


def one_in_float64():
    """The last case of each optimizer."""
    return beside_stock(torch.float64, one_each=True)


def in_float64():
    return beside_stock(torch.float64)


def in_float32():
    return beside_stock(torch.float32)


def beside_stock(dtype, one_each=False):
    """Case -> what :func:`compared` says of it."""
    over, found = transport(), {}
    chosen = [each for each in cases() if not left_out(over, each[2])]
    if one_each:
        last = {}
        for each in chosen:
            info, _, _, mode, sparse = each
            last[info.optim_cls, mode, sparse] = each
        chosen = last.values()
    for info, said, settings, mode, sparse in chosen:
        key = info.optim_cls.__name__, said, mode, sparse
        print(*key, flush=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, stock = (
                attempted(Side(over, each), info, settings, dtype, sparse)
                for each in (mode, "stock")
            )
        found[key] = compared(ours, stock)
    return found
