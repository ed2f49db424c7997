"""Scripts with several models, several optimizers, or a model of which there is more to say."""

import contextlib
import copy
import io

import torch
from stock import (
    DDP,
    KINDS,
    LR,
    SPARSE,
    average_by_hand,
    batch,
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

# -- several models, several optimizers ------------------------------------------------------------


@script(kind=KINDS)
def a_generator_and_its_critic(side, kind):
    """The generator's loss runs through the critic, whose gradient is dropped."""
    generator, critic = network(1)[0], network(2)
    made_g, optimizer_g = made(side, kind, generator, name="g.")
    made_c, optimizer_c = made(side, kind, critic, name="c.")
    for step in range(6):
        x = batch(side, step)
        optimizer_c.zero_grad()
        (made_c(x).square().mean() - made_c(made_g(x).detach()).mean()).backward()
        optimizer_c.step()
        optimizer_g.zero_grad()
        made_c(made_g(x)).square().mean().backward()
        optimizer_g.step()
        side.exchange(optimizer_c)
        optimizer_c.zero_grad()
    return {"end": torch.cat([flat(generator), flat(critic)])}


@script(DDP, kind=KINDS)
def an_actor_whose_loss_runs_through_the_critic(side, kind):
    """The critic's gradient is dropped by its next zero_grad(), before its own backward pass."""
    actor, critic = network(1)[0], network(2)
    made_a, optimizer_a = made(side, kind, actor)
    made_c, optimizer_c = made(side, kind, critic)
    for step in range(6):
        x = batch(side, step)
        optimizer_c.zero_grad()
        made_c(x).square().mean().backward()
        optimizer_c.step()
        optimizer_a.zero_grad()
        (-made_c(made_a(x)).mean()).backward()
        optimizer_a.step()
    return {"end": torch.cat([flat(actor), flat(critic)])}


@script(DDP)
def one_optimizer_of_two_models(side):
    backbone, head = network(1)[0], network(2)
    parts = [DistributedDataParallel(backbone), DistributedDataParallel(head)]
    optimizer = torch.optim.SGD(
        [{"params": backbone.parameters()}, {"params": head.parameters(), "lr": 0.02}],
        LR,
        momentum=0.9,
    )
    for part in parts:
        side.register(part, optimizer)
    for step in range(8):
        optimizer.zero_grad()
        parts[1](parts[0](batch(side, step))).square().mean().backward()
        if step != 4:
            optimizer.step()
    return {"end": torch.cat([flat(backbone), flat(head)])}


@script(DDP)
def one_optimizer_of_two_models_that_take_turns(side):
    """Each step has a backward pass of one of them, or of both."""
    models = [network(1), network(2)]
    parts = [DistributedDataParallel(model) for model in models]
    optimizer = sgd(nn.ModuleList(models))
    for part in parts:
        side.register(part, optimizer)
    for step in range(6):
        optimizer.zero_grad()
        for i, part in enumerate(parts):
            if step % 3 in (i, 2):
                loss(side, part, step).backward()
        optimizer.step()
    return {"end": torch.cat([flat(model) for model in models])}


@script(DDP, kind=("SGD", "AdamW"))
def parameters_outside_the_model(side, kind):
    """Nobody exchanges their gradients; these are alike on all ranks by themselves."""
    model = network()
    outside = nn.Linear(40, 40).double()
    parameters = nn.ModuleList([model, outside])
    make, config = KINDS[kind]
    optimizer = make(parameters)
    called = DistributedDataParallel(model)
    side.register(called, optimizer, None if side.mode != SPARSE else side.config(**config))
    for step in range(5):
        optimizer.zero_grad()
        (loss(side, called, step) + outside(torch.ones(40).double()).square().sum()).backward()
        if step != 3:
            optimizer.step()
    return {"end": torch.cat([flat(model), flat(outside)])}


@script(DDP, first=("matrices", "rest"))
def two_optimizers_of_one_model(side, first):
    """SGD for the matrices and AdamW for the rest, as with Muon."""
    model = network()
    called = DistributedDataParallel(model)
    matrices = torch.optim.SGD([p for p in model.parameters() if p.dim() == 2], LR, momentum=0.9)
    rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=0.01)
    both = (matrices, rest) if first == "matrices" else (rest, matrices)
    for optimizer in both:
        side.register(called, optimizer)
    for step in range(8):
        for optimizer in both:
            optimizer.zero_grad()
        loss(side, called, step).backward()
        if step != 3:
            for optimizer in both:
                optimizer.step()
    return {"end": flat(model)}


@script(DDP)
def two_optimizers_of_which_one_steps_now_and_then(side):
    """A generator and its critic within one module."""
    model = nn.ModuleDict({"g": network(1)[0], "c": network(2)})
    model.forward = lambda x: model["c"](model["g"](x))
    called = DistributedDataParallel(model)
    optimizers = [sgd(part) for part in model.values()]
    for optimizer in optimizers:
        side.register(called, optimizer)
    for step in range(8):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(side, called, step).backward()
        optimizers[step % 2].step()
    return {"end": flat(model)}


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization around another optimizer."""

    def __init__(self, params, base, **settings):
        super().__init__(params, settings)
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.clone()
                p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["before"])
        self.base.step()


@script(DDP, climbs=("with local gradients", "with averaged gradients"))
def a_wrapper_around_an_optimizer(side, climbs):
    """The optimizer within is registered, whose step() is called; zero_grad() is the wrapper's."""
    model = network()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=LR, momentum=0.9)
    called = DistributedDataParallel(model)
    side.register(called, optimizer.base)
    for step in range(5):
        local = climbs == "with local gradients"
        with called.no_sync() if local else contextlib.nullcontext():
            loss(side, called, step).backward()
        optimizer.climb()
        optimizer.zero_grad()
        loss(side, called, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"end": flat(model)}


# -- parameters that are not used, complex, lazy ---------------------------------------------------


class Layers(nn.Module):
    """One of them is dropped in some steps, alike on all ranks, or on one of them."""

    def __init__(self, rank, one_rank=False):
        super().__init__()
        torch.manual_seed(1)
        self.always, self.dropped = nn.Linear(40, 40).double(), nn.Linear(40, 40).double()
        self.rank, self.one_rank, self.step = rank, one_rank, 0

    def forward(self, x):
        x = torch.tanh(self.always(x))
        dropped = self.step % 3 != 0 and (not self.one_rank or self.rank == 1)
        return x if dropped else self.dropped(x)


def with_layers_dropped(side, kind, one_rank=False, **manner):
    model, moved, seen = Layers(side.rank, one_rank), [], []
    called, optimizer = made(side, kind, model, find_unused_parameters=True, **manner)
    for step in range(7):
        model.step = step
        before = flat(model.dropped)
        optimizer.zero_grad()
        loss(side, called, step).backward()
        seen.append(model.dropped.weight.grad is None)
        optimizer.step()
        moved.append(flat(model.dropped) - before)
    return {"end": flat(model), "close": [torch.tensor(seen), *moved]}


@script(DDP, kind=KINDS)
def a_layer_that_no_rank_uses(side, kind):
    return with_layers_dropped(side, kind)


@script(DDP)
def a_layer_that_one_rank_uses(side):
    return with_layers_dropped(side, "SGD", one_rank=True)


@script(DDP)
def a_layer_that_no_rank_uses_with_views(side):
    return with_layers_dropped(side, "SGD", gradient_as_bucket_view=True)


@script(DDP)
def a_layer_that_no_rank_uses_in_a_bucket_that_is_skipped(side):
    return with_layers_dropped(side, "SGD", skip_all_reduce_unused_params=True, bucket_cap_mb=0.002)


@script(DDP)
def a_layer_that_is_never_used_in_a_bucket_that_is_skipped(side):
    model = nn.ModuleDict({"used": network(), "never": nn.Linear(40, 40).double()})
    model.forward = model["used"].forward
    called, optimizer = side.ready(
        model,
        sgd(model),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=0.002,
    )
    before = flat(model["never"])
    train(side, called, optimizer, range(4))
    return {"end": flat(model), "close": [flat(model["never"]) - before]}


class Complex(nn.Module):
    """As a Fourier neural operator has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.spectrum = nn.Parameter(torch.randn(33, 33, dtype=torch.complex128) / 8)
        self.last = nn.Linear(64, 32).double()

    def forward(self, x):
        return self.last(torch.fft.irfft(torch.fft.rfft(x) @ self.spectrum, n=64))


@script(kind=KINDS)
def complex_parameters(side, kind):
    """Of which stock Horovod takes none."""
    model = Complex()
    called, optimizer = ready_by_hand(side, kind, model)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + side.rank))
        called(x.double()).square().mean().backward()
        average_by_hand(side, model)
        optimizer.step()
    parts = [p.detach() for p in model.parameters()]
    parts = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    return {"end": torch.cat([part.flatten() for part in parts])}


@script()
def lazy_modules_after_their_first_pass(side):
    torch.manual_seed(3)
    model = nn.Sequential(nn.LazyLinear(40), nn.Tanh(), nn.LazyLinear(3))
    optimizer = sgd(model)
    model(torch.zeros(1, 40))
    called, optimizer = side.ready(model.double(), optimizer)
    train(side, called, optimizer, range(4))
    return {"end": flat(model)}


class TwiceCheckpointed(nn.Module):
    """A layer that is checkpointed and used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.layer = nn.Linear(40, 40).double(), nn.Linear(40, 40).double()

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@script(DDP)
def a_layer_that_is_checkpointed_and_used_twice(side):
    model = TwiceCheckpointed()
    called, optimizer = side.ready(model, sgd(model), static_graph=True)
    train(side, called, optimizer, range(5))
    return {"end": flat(model), "close": gradients(model)}


# -- copies, and ranks that leave ------------------------------------------------------------------


@script(DDP)
def copies_between_backward_and_step(side):
    """Saved, copied, and averaged; the model goes on, and its copies are those of that moment."""
    model, same, averaged = network(), [], None
    called, optimizer = side.ready(model, sgd(model))
    for step in range(5):
        optimizer.zero_grad()
        loss(side, called, step).backward()
        buffer = io.BytesIO()
        torch.save(called, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        averaged = averaged or torch.optim.swa_utils.AveragedModel(called)
        averaged.update_parameters(called)
        same += [torch.equal(flat(each), flat(model)) for each in (loaded, copy.deepcopy(called))]
        optimizer.step()
    return {
        "end": flat(model),
        "close": [flat(averaged)],
        "alike": same,
        "bytes": len(buffer.getvalue()),
    }


def joined(side, **arguments):
    """Rank 0 has two batches, the others four."""
    model = network()
    called, optimizer = side.ready(model, sgd(model))
    with called.join(**arguments):
        train(side, called, optimizer, range(2 if side.rank == 0 else 4))
    return {"end": flat(model)}


@script(DDP)
def a_rank_that_joins(side):
    return joined(side)


@script(DDP)
def a_rank_that_joins_and_does_not_count(side):
    return joined(side, divide_by_initial_world_size=False)
