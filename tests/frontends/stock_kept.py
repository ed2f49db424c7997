"""What becomes of what was compressed where a step is not taken, over Horovod and over DDP.

Of the two weights that are looked at one is compressed, and one is too small for it. Where a law
needs the gradients of all ranks, each rank returns its own, and the test takes the mean.
"""

import copy
import functools
import math
import warnings

import torch
import torch.distributed as dist
from stock import (
    DROPS,
    LR,
    SPARSE,
    Side,
    flat,
    horovod,
    loss,
    network,
    sgd,
    train,
    transport,
)
from torch.nn.parallel import DistributedDataParallel

NAMES = ("0.weight", "2.weight")  # compressed, and dense
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
CONFIG = {"sparsity": 0.9}


def local_gradient(side, model, step, scale=1.0):
    """Of this rank alone, by name."""
    model = copy.deepcopy(model)
    model.zero_grad()
    (loss(side, model, step) * scale).backward()
    return {name: model.get_parameter(name).grad for name in NAMES}


def pending(optimizer):
    return optimizer.residual_state_dict()["v"]["0.weight"]


def begun(side, **arguments):
    """A training without momentum and decay, some steps old, so that something is pending."""
    model = network()
    called, optimizer = side.ready(model, sgd(model, **PLAIN), config=CONFIG, **arguments)
    if arguments.get("passes", 1) == 1:
        train(side, called, optimizer, range(3))
    optimizer.zero_grad()
    return model, called, optimizer


def account(side, act, **arguments):
    """What was pending before and is after ``act(model, called, optimizer)``, what it has applied
    to each weight, and the gradients that it says have come, of this rank.
    """
    model, called, optimizer = begun(side, **arguments)
    weights = {name: model.get_parameter(name).detach().clone() for name in NAMES}
    before = pending(optimizer)
    came = act(model, called, optimizer)
    applied = {name: (weights[name] - model.get_parameter(name).detach()) / LR for name in NAMES}
    return {
        "before": before,
        "after": pending(optimizer),
        "applied": applied,
        "came": came,
        "end": flat(model),
    }


def summed(gradients):
    return {name: sum(each[name] for each in gradients) for name in NAMES}


def dropped(side, drop, scale=1.0, **arguments):
    """One step is dropped, and one is taken: what travels dense is gone with the first."""

    def act(model, called, optimizer):
        first = local_gradient(side, model, 7, scale)
        (loss(side, called, 7) * scale).backward()
        side.exchange(optimizer)
        DROPS[drop](model, optimizer)
        taken = local_gradient(side, model, 8)
        train(side, called, optimizer, [8])
        return {"0.weight": summed([first, taken])["0.weight"], "2.weight": taken["2.weight"]}

    return account(side, act, **arguments)


def one_weight_dropped(side):
    """A compressed weight's gradient is set to None before step(); and one more step is taken."""

    def act(model, called, optimizer):
        first = local_gradient(side, model, 7)
        loss(side, called, 7).backward()
        side.exchange(optimizer)
        model[0].weight.grad = None
        still = model[0].weight.detach().clone()
        side.step(optimizer)
        moved.append(not torch.equal(still, model[0].weight))
        optimizer.zero_grad()
        second = local_gradient(side, model, 8)
        train(side, called, optimizer, [8])
        return summed([first, second])

    moved = []
    return {**account(side, act), "moved": moved}


def two_passes(side, **manner):
    """Two backward passes before one step(), and once more."""

    def act(model, called, optimizer):
        came = []
        for step in (10, 20):
            optimizer.zero_grad()
            came += [local_gradient(side, model, step + each) for each in range(2)]
            for each in range(2):
                loss(side, called, step + each).backward()
            optimizer.step()
        return summed(came)

    return account(side, act, passes=2 if side.over == "horovod" else 1, **manner)


def a_nan_is_dropped(side, nonfinite):
    """Which enters v nowhere. The other rank's gradient does so where no rank waits for the others
    before it keeps it.
    """
    model = network()
    optimizer = sgd(model, **PLAIN)
    called, optimizer = side.ready(model, optimizer, config={**CONFIG, "nonfinite": nonfinite})
    train(side, called, optimizer, range(3))
    before = pending(optimizer)
    optimizer.zero_grad()
    finite = nonfinite == "error" and side.rank == 0
    came = local_gradient(side, model, 7)["0.weight"] * int(finite)
    (loss(side, called, 7) * (math.nan if side.rank == 1 else 1)).backward()
    side.exchange(optimizer)
    optimizer.zero_grad()
    after = pending(optimizer)
    train(side, called, optimizer, range(3, 6))
    return {"before": before, "after": after, "came": came, "end": flat(model)}


def restored(side, spike):
    """Without and with a bad step, after which the residuals of before it are loaded."""
    ends = []
    for with_bad_step in (False, True):
        model = network()
        called, optimizer = side.ready(model, sgd(model, nesterov=True), config=CONFIG)
        train(side, called, optimizer, range(4))
        if with_bad_step:
            optimizer.zero_grad()
            saved = optimizer.residual_state_dict()
            (loss(side, called, 9) * spike).backward()
            side.exchange(optimizer)
            optimizer.load_residual_state_dict(saved)
            optimizer.zero_grad()
        train(side, called, optimizer, range(4, 8))
        residuals = optimizer.residual_state_dict()
        ends.append(
            [
                flat(model),
                residuals["u"]["0.weight"],
                residuals["v"]["0.weight"],
                torch.tensor(optimizer.param_groups[0]["dgc_step"]),
            ]
        )
    return ends


def told_of_dropped_steps(side, drop):
    """The warnings of a training that leaves out three steps."""
    model = network()
    called, optimizer = side.ready(model, sgd(model), config=CONFIG)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(8):
            optimizer.zero_grad()
            loss(side, called, step).backward()
            side.exchange(optimizer)
            if step in (2, 3, 6):
                DROPS[drop](model, optimizer)
                continue
            side.step(optimizer)
    return [str(w.message) for w in told]


def left_out_by_report(side):
    """The steps that a script leaves out by the largest ``report().gradient_norm`` of the ranks."""
    model, left_out = network(), []
    called, optimizer = side.ready(model, sgd(model), config={"sparsity": 0.99})
    for step in range(60):
        optimizer.zero_grad()
        (loss(side, called, step) * (1e4 if step == 5 else 1)).backward()
        side.exchange(optimizer)
        norm = torch.tensor([optimizer.report().gradient_norm])
        if side.over == "torch":
            dist.all_reduce(norm, dist.ReduceOp.MAX)
        else:
            norm = horovod().allgather(norm).max()
        if norm > 10:
            left_out.append(step)
            continue
        side.step(optimizer)
    return left_out, flat(model)


def counted_steps(side):
    """The step that the schedule has reached, when steps were left out."""
    model = network()
    called, optimizer = side.ready(model, sgd(model), config=CONFIG)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        loss(side, called, step).backward()
        side.exchange(optimizer)
        if step % 2:
            side.step(optimizer)
        else:
            optimizer.zero_grad()
        seen.append(int(optimizer.param_groups[0]["dgc_step"]))
    return seen


def two_models(side):
    """One optimizer of two DDP models, of which one's gradient is dropped: conserved in both."""
    parts = [network(1), network(2)]
    called = [DistributedDataParallel(part) for part in parts]
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], LR)
    for each in called:
        side.register(each, optimizer, side.config(**CONFIG))
    for step in range(3):
        optimizer.zero_grad()
        sum(loss(side, each, step) for each in called).backward()
        optimizer.step()
    weights = [part[0].weight.detach().clone() for part in parts]
    before = list(optimizer.residual_state_dict()["v"].values())
    optimizer.zero_grad()
    came = [local_gradient(side, part, 5)["0.weight"] for part in parts]
    sum(loss(side, each, 5) for each in called).backward()
    optimizer.zero_grad()
    came += [local_gradient(side, part, 6)["0.weight"] for part in parts]
    sum(loss(side, each, 6) for each in called).backward()
    optimizer.step()
    after = list(optimizer.residual_state_dict()["v"].values())
    applied = [(w - part[0].weight.detach()) / LR for w, part in zip(weights, parts, strict=True)]
    return {
        "before": torch.stack(before),
        "after": torch.stack(after),
        "applied": torch.stack(applied),
        "came": torch.stack(came[:2]) + torch.stack(came[2:]),
    }


OVER_BOTH = {
    **{f"dropped by {drop}": functools.partial(dropped, drop=drop) for drop in DROPS},
    "a spike is dropped": functools.partial(dropped, drop="zero_grad", scale=1e4),
    "one weight": one_weight_dropped,
    "two passes": two_passes,
    **{
        f"nan, {each}": functools.partial(a_nan_is_dropped, nonfinite=each)
        for each in ("error", "skip")
    },
    **{
        f"restored from {spike:g}": functools.partial(restored, spike=spike)
        for spike in (1e4, math.nan)
    },
    **{f"told of {drop}": functools.partial(told_of_dropped_steps, drop=drop) for drop in DROPS},
    "left out": left_out_by_report,
    "counted": counted_steps,
}
OVER_DDP = {
    "dropped, views": functools.partial(dropped, drop="zero_grad", gradient_as_bucket_view=True),
    "dropped, static graph": functools.partial(dropped, drop="zero_grad", static_graph=True),
    "two passes, views": functools.partial(two_passes, gradient_as_bucket_view=True),
    "two models": two_models,
}


def kept():
    """Case -> what it returned, or what it raised."""
    side, found = Side(transport(), SPARSE), {}
    for name, case in {**OVER_BOTH, **(OVER_DDP if side.over == "torch" else {})}.items():
        print(name, flush=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[name] = case(side)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found
