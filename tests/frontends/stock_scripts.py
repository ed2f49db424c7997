"""Scripts with one model, over Horovod and DDP: each is about what becomes of a gradient."""

import contextlib
import functools
import math

import torch
from stock import (
    DDP,
    DENSE,
    DROPS,
    KINDS,
    LR,
    SPARSE,
    average_by_hand,
    finite,
    flat,
    gradients,
    loss,
    made,
    network,
    ready_by_hand,
    script,
    sgd,
    train,
)
from torch import nn

# -- gradients that are read, changed, clipped -----------------------------------------------------


@script()
def a_training(side):
    model = network()
    called, optimizer = side.ready(model, sgd(model, nesterov=True))
    train(side, called, optimizer, range(6))
    return {"end": flat(model), "close": gradients(model)}


@script()
def gradients_that_are_read(side):
    model, seen = network(), []
    called, optimizer = side.ready(model, sgd(model))
    for step in range(4):
        optimizer.zero_grad()
        loss(side, called, step).backward()
        side.exchange(optimizer)
        seen += gradients(model)
        side.step(optimizer)
        seen += gradients(model)
    return {"end": flat(model), "close": seen}


@script(kind=KINDS)
def gradients_that_are_changed(side, kind):
    model = network()
    called, optimizer = made(side, kind, model)
    for step in range(5):
        optimizer.zero_grad()
        loss(side, called, step).backward()
        side.exchange(optimizer)
        for p in model.parameters():
            p.grad.mul_(0.5).add_(p.detach(), alpha=0.01)
        side.step(optimizer)
    return {"end": flat(model)}


@script()
def gradients_in_place_of_which_others_are_put(side):
    model = network()
    called, optimizer = side.ready(model, sgd(model))
    for step in range(4):
        optimizer.zero_grad()
        loss(side, called, step).backward()
        side.exchange(optimizer)
        for p in model.parameters():
            p.grad = p.grad.sign() * 1e-3
        side.step(optimizer)
    return {"end": flat(model)}


@script(kind=KINDS)
def clipping_after_the_exchange(side, kind):
    """Horovod's recipe: synchronize(), clip, step() without synchronize()."""
    model, norms = network(), []
    called, optimizer = made(side, kind, model)
    for step in range(6):
        optimizer.zero_grad()
        loss(side, called, step).backward()
        side.exchange(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        side.step(optimizer)
    return {"end": flat(model), "close": norms}


# -- steps that are not taken ----------------------------------------------------------------------


def steps_left_out(side, kind, drop, **manner):
    model = network()
    called, optimizer = made(side, kind, model, **manner)
    for step in range(9):
        if drop == "next zero_grad" or step == 0:
            optimizer.zero_grad()
        loss(side, called, step).backward()
        if step in (3, 4, 7):
            side.exchange(optimizer)
            DROPS[drop](model, optimizer)
            continue
        optimizer.step()
        optimizer.zero_grad()
    return {"end": flat(model)}


@script(drop=DROPS)
def a_step_left_out_with_sgd(side, drop):
    return steps_left_out(side, "SGD", drop)


@script(drop=DROPS)
def a_step_left_out_with_adamw(side, drop):
    return steps_left_out(side, "AdamW", drop)


@script(DDP, modes=(DENSE, SPARSE), drop=DROPS)
def a_step_left_out_of_views(side, drop):
    return steps_left_out(side, "SGD", drop, gradient_as_bucket_view=True)


@script(DDP, modes=(DENSE, SPARSE), drop=DROPS)
def a_step_left_out_of_a_static_graph(side, drop):
    return steps_left_out(side, "SGD", drop, static_graph=True)


@script(kind=KINDS)
def steps_left_out_by_the_gradients_norm(side, kind):
    model, norms, left_out = network(), [], []
    called, optimizer = made(side, kind, model)
    for step in range(16):
        optimizer.zero_grad()
        (loss(side, called, step) * (1e4 if step in (5, 9) else 1)).backward()
        side.exchange(optimizer)
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        if norms[-1] > 10:
            left_out.append(step)
            continue
        side.step(optimizer)
    return {"end": flat(model), "close": [*norms, torch.tensor(left_out)]}


@script()
def gradients_that_are_never_applied(side):
    """As of a discriminator while a generator is trained: they move nothing, nor does a zero."""
    model = network()
    called, optimizer = side.ready(model, sgd(model, weight_decay=0.0))
    before = flat(model)
    for step in range(6):
        loss(side, called, step).backward()
        side.exchange(optimizer)
        optimizer.zero_grad()
    (loss(side, called, 0) * 0).backward()
    side.exchange(optimizer)
    side.step(optimizer)
    still = flat(model) - before
    optimizer.zero_grad()
    train(side, called, optimizer, range(3))
    return {"end": flat(model), "close": [still]}


@script(kind=KINDS)
def a_gradient_set_to_none_before_step(side, kind):
    """As DINO does for its last layer at first: of a compressed parameter, and of a small one."""
    model, moved = network(), []
    called, optimizer = made(side, kind, model)
    for step in range(7):
        optimizer.zero_grad()
        loss(side, called, step).backward()
        side.exchange(optimizer)
        if step in (0, 1, 4):
            model[0].weight.grad = model[2].weight.grad = None
        first, last = (model[i].weight.detach().clone() for i in (0, 2))
        side.step(optimizer)
        moved += [not torch.equal(first, model[0].weight), not torch.equal(last, model[2].weight)]
    return {"end": flat(model), "alike": moved}


@script(kind=KINDS)
def a_nan_that_the_script_skips(side, kind):
    model, left_out = network(), []
    called, optimizer = made(side, kind, model)
    for step in range(7):
        optimizer.zero_grad()
        bad = side.rank == 1 and step in (3, 5)
        (loss(side, called, step) * (math.nan if bad else 1)).backward()
        side.exchange(optimizer)
        if not all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()):
            left_out.append(step)
            continue
        side.step(optimizer)
    return {"end": flat(model), "alike": left_out}


@script()
def a_nan_that_config_skips(side):
    """``p.grad`` is what it is on stock, where the script leaves the step out by itself."""
    model, found = network(), []
    called, optimizer = side.ready(model, sgd(model), config={"nonfinite": "skip"})
    for step in range(6):
        optimizer.zero_grad()
        bad = side.rank == 1 and step == 3
        (loss(side, called, step) * (math.nan if bad else 1)).backward()
        side.exchange(optimizer)
        found.append([p.grad is not None for p in model.parameters()] + [finite(model)])
        if not side.stock or step != 3:
            side.step(optimizer)
    skipped = 1 if side.stock else optimizer.report().skipped
    return {"end": flat(model), "alike": (found, skipped)}


@script()
def a_nan_that_is_an_error_of_step(side):
    """Whoever catches it goes on as if that step had not been."""
    model, found, errors = network(), [], []
    called, optimizer = side.ready(model, sgd(model))
    for step in range(6):
        optimizer.zero_grad()
        bad = side.rank == 1 and step == 3
        (loss(side, called, step) * (math.nan if bad else 1)).backward()
        side.exchange(optimizer)
        found.append(finite(model))
        try:
            if side.stock and step == 3:
                raise FloatingPointError
            side.step(optimizer)
        except FloatingPointError:
            errors.append(step)
    return {"end": flat(model), "alike": (found, errors)}


# -- several passes, closures, schedules, groups, scales -------------------------------------------


@script()
def two_backward_passes(side):
    model = network()
    called, optimizer = side.ready(model, sgd(model), passes=2)
    for step in range(4):
        optimizer.zero_grad()
        with called.no_sync() if side.over == "torch" else contextlib.nullcontext():
            loss(side, called, 2 * step).backward()
        loss(side, called, 2 * step + 1).backward()
        optimizer.step()
    return {"end": flat(model), "close": gradients(model)}


def passes_that_are_each_exchanged(side, kind, **manner):
    model, seen = network(), []
    called, optimizer = made(side, kind, model, **manner)
    for step in range(4):
        optimizer.zero_grad()
        for each in range(3 if step == 2 else 2):
            loss(side, called, 3 * step + each).backward()
            seen += gradients(model)
        optimizer.step()
    return {"end": flat(model), "close": seen}


@script(DDP, kind=KINDS)
def two_backward_passes_without_no_sync(side, kind):
    return passes_that_are_each_exchanged(side, kind)


@script(DDP)
def two_backward_passes_without_no_sync_into_views(side):
    return passes_that_are_each_exchanged(side, "SGD", gradient_as_bucket_view=True)


@script(DDP)
def no_sync_around_backward_alone(side):
    """In torch it is the forward pass that counts, so both passes are exchanged."""
    model = network()
    called, optimizer = side.ready(model, sgd(model))
    for step in range(8):
        value = loss(side, called, step)
        with contextlib.nullcontext() if step % 2 else called.no_sync():
            value.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"end": flat(model)}


@script(DDP)
def passes_within_and_without_no_sync_and_a_step_left_out(side):
    model = network()
    called, optimizer = side.ready(model, sgd(model))
    for step in range(6):
        with called.no_sync():
            loss(side, called, 2 * step).backward()
        loss(side, called, 2 * step + 1).backward()
        if step != 3:
            optimizer.step()
        optimizer.zero_grad()
    return {"end": flat(model)}


@script()
def a_closure(side):
    """Stock Horovod does not exchange what a closure computes, so there it is computed before."""
    model, values = network(), []
    called, optimizer = side.ready(model, sgd(model))

    def closure(step):
        optimizer.zero_grad()
        value = loss(side, called, step)
        value.backward()
        return value

    for step in range(4):
        if side.stock and side.over == "horovod":
            values.append(closure(step).detach())
            optimizer.step()
        else:
            values.append(optimizer.step(functools.partial(closure, step)).detach())
    return {"end": flat(model), "close": values}


@script()
def a_closure_that_returns_the_loss_alone(side):
    model, values = network(), []
    called, optimizer = side.ready(model, sgd(model))
    for step in range(3):
        optimizer.zero_grad()
        value = loss(side, called, step)
        value.backward()
        values.append(optimizer.step(value.detach))
    return {"end": flat(model), "close": values}


@script()
def a_schedule_of_learning_rate_and_momentum(side):
    model, seen = network(), []
    called, optimizer = side.ready(model, sgd(model))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    for step in range(8):
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        train(side, called, optimizer, [step])
        scheduler.step()
    return {"end": flat(model), "alike": seen}


def grouped(side, **more):
    model = nn.ModuleList([network(seed) for seed in range(4)])
    model.forward = lambda x: sum(part(x) for part in model)
    settings = (
        {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.1},
        {"momentum": 0.0},
        {"nesterov": True, "weight_decay": 0.0},
        {"maximize": True, "lr": 0.001, **more},
    )
    groups = [
        {"params": part.parameters(), **each} for part, each in zip(model, settings, strict=True)
    ]
    optimizer = torch.optim.SGD(groups, LR, momentum=0.9, weight_decay=0.01)
    called, optimizer = side.ready(model, optimizer)
    train(side, called, optimizer, range(5))
    return {"end": flat(model)}


@script()
def groups_with_their_own_settings(side):
    return grouped(side)


@script(modes=(DENSE,))
def groups_of_which_one_has_a_dampening(side):
    return grouped(side, dampening=0.3)


def scaled(side, known):
    """A loss scale that grows, and an overflow on rank 1; with clipping, as in Horovod's recipe."""
    model, scales = network(), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    called, optimizer = side.ready(model, sgd(model), scaler=scaler if known else None)
    for step in range(8):
        optimizer.zero_grad()
        bad = side.rank == 1 and step == 4
        scaler.scale(loss(side, called, step) * (math.inf if bad else 1)).backward()
        side.exchange(optimizer)
        scaler.unscale_(optimizer)
        if side.mode != SPARSE:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        side.step(optimizer, scaler)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"end": flat(model), "alike": scales}


@script()
def a_loss_scale(side):
    return scaled(side, known=True)


@script(modes=(DENSE,))
def a_loss_scale_that_is_not_given(side):
    return scaled(side, known=False)


@script(modes=(DENSE,))
def a_loss_scale_without_clipping_that_is_not_given(side):
    model, scales = network(), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    called, optimizer = side.ready(model, sgd(model))
    for step in range(6):
        optimizer.zero_grad()
        bad = side.rank == 0 and step == 2
        scaler.scale(loss(side, called, step) * (math.inf if bad else 1)).backward()
        side.exchange(optimizer)
        side.step(optimizer, scaler)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"end": flat(model), "alike": scales}


@script()
def backward_that_makes_a_graph(side):
    """As AdaHessian calls it. DDP can do so with one parameter, and stock Horovod cannot."""
    model = nn.Linear(40, 40, bias=False).double()
    called, optimizer = ready_by_hand(side, "SGD", model)
    for step in range(3):
        loss(side, called, step).backward(create_graph=True)
        average_by_hand(side, model)
        optimizer.step()
        for p in model.parameters():
            p.grad = None  # else it would be a cycle
    return {"end": flat(model)}
