"""A script on stock Horovod or DistributedDataParallel and on ours, in the same processes.

A script is given a :class:`Side`. It returns the parameters it ends with, ``end``; what it has seen
that must be as on stock where nothing is compressed, ``close``; and at any sparsity, ``alike``.
"""

import contextlib
import functools
import importlib
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgc

TORCH = str(Path(torch.__file__).parent)  # whose own warnings are no part of this
DENSE, SCHEDULED, SPARSE = "dense", "scheduled", "sparse"
SPARSITIES = {DENSE: 0.0, SCHEDULED: dgc.piecewise({0: 0.0, 1000: 0.99}), SPARSE: 0.99}
ALL = (DENSE, SCHEDULED, SPARSE)
BOTH, DDP = ("horovod", "torch"), ("torch",)
SCRIPTS = {}
LR = 0.05


class Side:
    """Stock or ours, over Horovod or DDP."""

    def __init__(self, over, mode):
        self.over, self.mode = over, mode
        self.stock = mode == "stock"

    @property
    def rank(self):
        return dist.get_rank() if self.over == "torch" else horovod().rank()

    def config(self, sparsity=None, **settings):
        return dgc.Config(SPARSITIES[self.mode] if sparsity is None else sparsity, **settings)

    def ready(self, model, optimizer, config=None, scaler=None, name="", passes=1, **manner):
        """What is called, and the optimizer whose step() is called; ``manner`` is DDP's."""
        config = None if self.stock else self.config(**config or {})
        if self.over == "torch":
            called = DistributedDataParallel(model, **manner)
            self.register(called, optimizer, config, scaler)
            return called, optimizer
        names = [(name + key, p) for key, p in model.named_parameters()]
        if self.stock:
            return model, horovod().DistributedOptimizer(
                optimizer, names, backward_passes_per_step=passes
            )
        return model, dgc.DistributedOptimizer(
            optimizer, names, config, backward_passes_per_step=passes, grad_scaler=scaler
        )

    def register(self, called, optimizer, config=None, scaler=None):
        """The one line more that a script with DDP has."""
        if not self.stock:
            config = self.config() if config is None else config
            dgc.register_comm_hook(called, optimizer, config, grad_scaler=scaler)

    def exchange(self, optimizer):
        """After it ``p.grad`` is what is alike on all ranks."""
        if self.over == "horovod":
            optimizer.synchronize()

    def step(self, optimizer, scaler=None):
        """The step after :meth:`exchange`."""
        step = optimizer.step if scaler is None else functools.partial(scaler.step, optimizer)
        with optimizer.skip_synchronize() if self.over == "horovod" else contextlib.nullcontext():
            return step()


def horovod():
    import horovod.torch as hvd

    return hvd


def script(over=BOTH, modes=ALL, **variants):
    """Keeps a function as a script. ``variants``: a name, and the values that it takes in turn."""

    def keep(function):
        ((argument, values),) = variants.items() or [("", ("",))]
        for value in values:
            name = f"{function.__name__}_{value}" if argument else function.__name__
            bound = functools.partial(function, **{argument: value}) if argument else function
            SCRIPTS[name.replace(" ", "_").rstrip("_")] = bound, over, modes
        return function

    return keep


def transport():
    return "torch" if dist.is_initialized() else "horovod"


def scripts():
    """Name -> script, over what, in which modes."""
    for module in ("stock_scripts", "stock_models"):
        importlib.import_module(module)
    return SCRIPTS


def observed():
    """Script -> mode -> what it returned, what it raised, and of what it was warned."""
    over, seen = transport(), {}
    for name, (function, where, modes) in scripts().items():
        if over not in where:
            continue
        print(name, flush=True)  # where one hangs the log says which
        seen[name] = {mode: outcome(function, Side(over, mode)) for mode in ("stock", *modes)}
    return seen


def outcome(function, side):
    torch.manual_seed(7)
    found = {"end": None, "close": [], "alike": None, "error": None}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found.update(function(side))
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
    found["warnings"] = [str(w.message) for w in told if not w.filename.startswith(TORCH)]
    return found


# -- what the scripts are made of ------------------------------------------------------------------


def network(seed=3):
    """A parameter that is compressed, and three that are too small for it."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def batch(side, step):
    generator = torch.Generator().manual_seed(10 * step + side.rank)
    return torch.randn(8, 40, generator=generator).double()


def loss(side, called, step):
    return called(batch(side, step)).square().mean()


def sgd(model, **settings):
    given = {"lr": LR, "momentum": 0.9, "weight_decay": 0.01, **settings}
    return torch.optim.SGD(model.parameters(), **given)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


KINDS = {"SGD": (sgd, {}), "AdamW": (adamw, {"sparsity": dgc.dense_until(2, then=0.99)})}


def made(side, kind, model, **arguments):
    """What is called, and an optimizer of a kind. AdamW's denominator is learned before."""
    make, config = KINDS[kind]
    config = config if side.mode == SPARSE else {}
    return side.ready(model, make(model), config=config, **arguments)


def ready_by_hand(side, kind, model):
    """The same where stock Horovod cannot: there :func:`average_by_hand` is in its place."""
    if side.stock and side.over == "horovod":
        return model, KINDS[kind][0](model)
    return made(side, kind, model)


def average_by_hand(side, model):
    for p in model.parameters() if side.stock and side.over == "horovod" else ():
        grad = torch.view_as_real(p.grad.detach()) if p.is_complex() else p.grad.detach()
        average = horovod().allreduce(grad.contiguous(), op=horovod().Average)
        p.grad = torch.view_as_complex(average) if p.is_complex() else average


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradients(model):
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def finite(model):
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def train(side, called, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss(side, called, step).backward()
        optimizer.step()


DROPS = {
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "next zero_grad": lambda model, optimizer: None,
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "None by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
}
