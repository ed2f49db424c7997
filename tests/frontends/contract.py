"""What a script may do with stock Horovod's DistributedOptimizer, one function each: run on stock and on ours.

A behaviour is given ``wrap``, which is called as ``hvd.DistributedOptimizer`` is, and returns what it saw: ``alike``
must be the same at any density, ``close`` at density 1. Exceptions and warnings are seen by :func:`observed`.
"""

import contextlib
import inspect
import warnings
from pathlib import Path
from types import SimpleNamespace

import horovod.torch as hvd
import torch
from torch import nn

import dgc
from dgc.engine.wrapped import decays_apart, is_adam

TORCH = str(Path(torch.__file__).parent)  # whose own warnings are no part of this
BEHAVIOURS = {}
MODES = {"stock": None, "dense": 0.0, "sparse": 0.9}


def behaviour(function):
    BEHAVIOURS[function.__name__] = function
    return function


def wrapper(mode):
    """``hvd.DistributedOptimizer``, or ours at one density."""
    if MODES[mode] is None:
        return hvd.DistributedOptimizer

    def wrap(optimizer, *args, **kwargs):
        kind = type(optimizer)
        # Else it has no momentum correction.
        adam = is_adam(kind) and decays_apart(kind, optimizer.param_groups[0])
        sparsity = (
            dgc.dense_until(1, then=MODES[mode]) if adam and mode == "sparse" else MODES[mode]
        )
        config = dgc.Config(
            sparsity, momentum_correction=adam or isinstance(optimizer, torch.optim.SGD)
        )
        return dgc.DistributedOptimizer(optimizer, *args, compression=config, **kwargs)

    return wrap


def observed():
    """Behaviour -> mode -> what it saw, what it raised, and of what it was warned."""
    return _seen([name for name in BEHAVIOURS if not takes_long(name)])


def observed_in_make_long():
    """The same, of the others."""
    return _seen([name for name in BEHAVIOURS if takes_long(name)])


def takes_long(name):
    """Of each optimizer make test has the settings that say most. test_stock.py has all of them."""
    return name.endswith("_with_defaults")


def _seen(names):
    seen = {}
    for name in names:
        behave, seen[name] = BEHAVIOURS[name], {}
        for mode in MODES:
            torch.manual_seed(7)
            outcome = {"alike": None, "close": [], "error": None}
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                # See wrap.
                warnings.filterwarnings("ignore", ".*with torch.optim.AdamW in place of")
                try:
                    result = behave(wrapper(mode)) or {}
                    outcome.update(result)
                except Exception as error:
                    outcome["error"] = error_of(error)
            outcome["warnings"] = [str(w.message) for w in told if not w.filename.startswith(TORCH)]
            seen[name][mode] = outcome
    return seen


def error_of(error):
    """Type and first sentence: what follows in ours says what to do. Ids are of one process."""
    return type(error).__name__, str(error).partition("ids:")[0].split(". ")[0].rstrip(".")


def raised(call):
    try:
        call()
    except Exception as error:
        return error_of(error)
    return None


def network(rank=None):
    """Compressed, and dense by size and by dimension; alike on all ranks, or as one rank has it."""
    torch.manual_seed(3 if rank is None else rank)
    return nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, **settings})


def backward(model, step=0, scale=1.0):
    generator = torch.Generator().manual_seed(10 * step + hvd.rank())
    (model(torch.randn(8, 40, generator=generator)).square().mean() * scale).backward()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradients(model):
    return [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]


def trained(model, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return {"close": [flat(model)]}


# -- construction ------------------------------------------------------------------------------------------------------

REFUSED = {
    "duplicate_names": lambda m: {"named_parameters": [("same", p) for p in m.parameters()]},
    "names_without_pairs": lambda m: {"named_parameters": list(m.parameters())},
    "missing_names": lambda m: {"named_parameters": list(m.named_parameters())[:1]},
    "no_groups": lambda m: {"groups": 0},
    "fewer_groups": lambda m: {"groups": -1},
    "groups_of_other_things": lambda m: {"groups": [["weight"]]},
    "a_parameter_in_two_groups": lambda m: {"groups": [[m[0].weight], [m[0].weight]]},
    "no_backward_passes": lambda m: {"backward_passes_per_step": 0},
    "predivided_sum": lambda m: {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
}


def refusals(wrap):
    """Of each of these: what is raised."""
    model = network()
    return {
        name: raised(lambda arguments=arguments: wrap(sgd(model), **arguments(model)))
        for name, arguments in REFUSED.items()
    }


@behaviour
def bad_arguments(wrap):
    return {"alike": refusals(wrap)}


@behaviour
def num_groups_is_deprecated(wrap):
    model = network()
    return trained(model, wrap(sgd(model), num_groups=2))


@behaviour
def names_of_others_and_two_of_one(wrap):
    model = network()
    names = [
        *model.named_parameters(),
        ("other", nn.Parameter(torch.ones(2))),
        ("zzz", model[0].weight),
    ]
    return trained(model, wrap(sgd(model), iter(names)))


@behaviour
def it_is_the_wrapped_class(wrap):
    model = network()
    inner = sgd(model, momentum=0.9)
    optimizer = wrap(inner, model.named_parameters())
    inner.param_groups[0]["lr"] = 0.25
    return {
        "alike": (
            isinstance(optimizer, torch.optim.SGD),
            type(optimizer).__name__,
            optimizer.__module__,
            optimizer.param_groups[0]["lr"],
        )
    }


@behaviour
def attributes_that_scripts_read(wrap):
    model = network()
    model[2].bias.requires_grad_(False)
    optimizer = wrap(
        sgd(model),
        model.named_parameters(),
        backward_passes_per_step=2,
        gradient_predivide_factor=2.0,
    )
    names = optimizer._parameter_names

    def now():
        return (
            sorted(names[p] for p in optimizer._handles),
            {names[p]: optimizer._allreduce_delay[p] for p in model.parameters()},
        )

    seen = [
        sorted(names.values()),
        all(dict(model.named_parameters())[name] is p for p, name in names.items()),
        optimizer.op == hvd.Average,
        optimizer.gradient_predivide_factor,
        optimizer.sparse_as_dense,
        optimizer.backward_passes_per_step,
        optimizer.process_set is hvd.global_process_set,
        optimizer._groups,
        sorted(names[p] for p in optimizer._requires_update),
        now(),
    ]
    for step in range(2):
        backward(model, step)
        seen.append(now())
    missing = optimizer._requires_update - set(optimizer._handles.keys())
    optimizer.step()
    return {"alike": [*seen, len(missing), now()]}


@behaviour
def names_made_up(wrap):
    model = network()
    parts = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    return {"alike": list(wrap(torch.optim.SGD(parts, lr=0.1))._parameter_names.values())}


# -- what may differ between ranks, and what nobody trains -------------------------------------------------------------


@behaviour
def other_values_and_settings_on_each_rank(wrap):
    model = network(hvd.rank())
    before = flat(model)
    optimizer = wrap(sgd(model, lr=0.1 * (1 + hvd.rank())), model.named_parameters())
    backward(model)
    optimizer.step()
    return {"close": [flat(model) - before, *gradients(model)]}


@behaviour
def integer_parameters_that_are_frozen(wrap):
    model = network()
    model.register_parameter("places", nn.Parameter(torch.tensor([1, 3]), requires_grad=False))
    model.register_parameter(
        "phases", nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)
    )
    optimizer = wrap(sgd(model, momentum=0.9, weight_decay=0.1), model.named_parameters())
    hvd.broadcast_parameters({"places": model.places.data}, root_rank=0)
    result = trained(nn.Sequential(*model), optimizer)
    return {
        **result,
        "alike": (
            model.places.tolist(),
            model.phases.tolist(),
            model.places.grad,
            model.phases.grad,
        ),
    }


@behaviour
def parameters_that_thaw_and_freeze(wrap):
    model, seen = network(), []
    optimizer = wrap(sgd(model), model.named_parameters())
    for step in range(4):
        model[0].requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        seen += gradients(model)[2:]  # of what freezes stock leaves zeros, ours nothing
    return {"close": [*seen, flat(model)]}


@behaviour
def parameters_that_one_rank_uses(wrap):
    model = nn.ModuleDict({"all": network(), "some": nn.Linear(40, 40), "none": nn.Linear(40, 40)})
    optimizer = wrap(sgd(model), list(model.named_parameters()))
    for step in range(3):
        optimizer.zero_grad()
        x = torch.full((1, 40), 1.0 + step + hvd.rank())
        model["all"](x + model["some"](x) if hvd.rank() == 0 else x).sum().backward()
        optimizer.step()
    return {
        "close": [*gradients(model), flat(model)],
        "alike": [p.grad is None for p in model.parameters()],
    }


@behaviour
def requires_update_may_be_emptied(wrap):
    model = nn.ModuleDict({"used": network(), "unused": nn.Linear(40, 40)})
    optimizer = wrap(sgd(model, weight_decay=0.1), list(model.named_parameters()))
    optimizer._requires_update = set()
    before = model["unused"].weight.detach().clone()
    result = trained(model["used"], optimizer)
    return {
        **result,
        "alike": (model["unused"].weight.grad is None, torch.equal(model["unused"].weight, before)),
    }


@behaviour
def gradients_that_are_not_finite(wrap):
    model = nn.Linear(40, 3)
    optimizer = wrap(sgd(model), model.named_parameters())
    backward(model, scale=float("inf") if hvd.rank() == 0 else 1.0)
    optimizer.step()
    return {"alike": [torch.isfinite(p).all().item() for p in model.parameters()]}


# -- the step ----------------------------------------------------------------------------------------------------------


@behaviour
def a_training(wrap):
    model = network()
    return trained(
        model,
        wrap(sgd(model, momentum=0.9, nesterov=True, weight_decay=0.1), model.named_parameters()),
    )


@behaviour
def a_sum_instead_of_an_average(wrap):
    model = network()
    return trained(model, wrap(sgd(model, momentum=0.9), model.named_parameters(), op=hvd.Sum))


@behaviour
def groups_of_parameters(wrap):
    model = network()
    return trained(
        model, wrap(sgd(model), model.named_parameters(), groups=[[model[0].weight, model[2].bias]])
    )


@behaviour
def several_backward_passes(wrap):
    model = network()
    optimizer = wrap(sgd(model), model.named_parameters(), backward_passes_per_step=2)
    for step in range(4):
        backward(model, step)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    return trained(model, optimizer)


@behaviour
def another_number_of_backward_passes_on_each_rank(wrap):
    """As of a job that keeps its batch where workers are not alike."""
    model, passes = network(), 1 + hvd.rank()
    optimizer = wrap(sgd(model), model.named_parameters(), backward_passes_per_step=passes)
    for step in range(3):
        for each in range(passes):
            backward(model, 3 * step + each)
        optimizer.step()
        optimizer.zero_grad()
    return {"close": [flat(model)]}


@behaviour
def one_backward_pass_too_many(wrap):
    model = network()
    optimizer = wrap(sgd(model), model.named_parameters())
    backward(model)
    error = raised(lambda: backward(model))
    optimizer.synchronize()
    return {"alike": error}


@behaviour
def zero_grad_while_gradients_travel(wrap):
    model = network()
    optimizer = wrap(sgd(model), model.named_parameters())
    backward(model)
    error = raised(optimizer.zero_grad)
    optimizer.step()
    return {"alike": error, "close": gradients(model)}


@behaviour
def a_zero_grad_that_takes_no_argument(wrap):
    class Plain(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad()

    model = network()
    return trained(model, wrap(Plain(model.parameters(), lr=0.1), model.named_parameters()))


@behaviour
def step_without_backward(wrap):
    model = network()
    optimizer = wrap(sgd(model), model.named_parameters())
    before = flat(model)
    result = optimizer.step()
    sizes = [g.norm().item() for g in gradients(model) if g is not None]
    return {"alike": (result, torch.equal(flat(model), before), sizes)}


@behaviour
def synchronize_and_step_with_skip(wrap):
    model = network()
    optimizer = wrap(sgd(model), model.named_parameters())
    backward(model)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    return {"close": [flat(model), *gradients(model)]}


@behaviour
def synchronize_and_step_without_skip(wrap):
    model = network()
    optimizer = wrap(sgd(model), model.named_parameters())
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.synchronize()
        optimizer.step()
    return {"close": [flat(model)]}


@behaviour
def synchronize_twice(wrap):
    model = network()
    optimizer = wrap(sgd(model), model.named_parameters())
    backward(model)
    optimizer.synchronize()
    first = gradients(model)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    return {"close": [*first, *gradients(model), flat(model)]}


@behaviour
def clip_after_synchronize_where_all_is_dense(wrap):
    model = nn.Linear(40, 3)
    optimizer = wrap(sgd(model, momentum=0.9), model.named_parameters())
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        with optimizer.skip_synchronize():
            optimizer.step()
    return {"alike": flat(model).tolist()}


def clipped_without_skip(wrap, model):
    optimizer = wrap(sgd(model), model.named_parameters())
    backward(model)
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    optimizer.step()


@behaviour
def clip_after_synchronize_and_step_without_skip(wrap):
    clipped_without_skip(wrap, nn.Linear(40, 3))


@behaviour
def clip_what_travels_compressed(wrap):
    clipped_without_skip(wrap, network())


@behaviour
def a_scheduler(wrap):
    model = network()
    optimizer = wrap(sgd(model), model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        scheduler.step()
    return {"alike": optimizer.param_groups[0]["lr"], "close": [flat(model)]}


@behaviour
def a_scheduler_that_is_broadcast(wrap):
    """With the optimizer that it holds."""
    model = network()
    optimizer = wrap(sgd(model), model.named_parameters())
    backward(model)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    other = hvd.broadcast_object(scheduler, root_rank=0)
    optimizer.zero_grad()
    return {"alike": type(other).__name__, **trained(model, optimizer)}


@behaviour
def sparse_gradients(wrap):
    seen = []
    for as_dense in (False, True):
        model = nn.Embedding(50, 30, sparse=True)
        nn.init.constant_(model.weight, 0.5)
        optimizer = wrap(
            torch.optim.SparseAdam(list(model.parameters()), lr=0.1), sparse_as_dense=as_dense
        )
        optimizer.zero_grad()
        model(torch.tensor([[1, 2, 4], [4, 3, 9 + hvd.rank()]])).square().sum().backward()
        optimizer.step()
        seen += [model.weight.grad.is_sparse, model.weight.shape]
    return {"alike": seen}


# -- state -------------------------------------------------------------------------------------------------------------


@behaviour
def state_broadcast_when_fresh(wrap):
    """Learning rate and momentum of rank 0 on all of them. Stock's own step decays the weights meanwhile; ours not."""
    model = network(hvd.rank())
    settings = (
        {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.2, "nesterov": True}
        if hvd.rank() == 0
        else {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1}
    )
    optimizer = wrap(sgd(model, **settings), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    group = optimizer.param_groups[0]
    return {
        "alike": (
            [group[key] for key in ("lr", "momentum", "weight_decay", "nesterov")],
            [g is not None and not g.any() for g in gradients(model)],
        )
    }


@behaviour
def state_broadcast_after_steps(wrap):
    """Without momentum and decay, so that stock's own step changes nothing."""
    model = network(hvd.rank())
    optimizer = wrap(sgd(model, lr=0.1 * (1 + hvd.rank())), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer.param_groups[0]["lr"] = 0.1
    trained(model, optimizer)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return trained(model, optimizer)


@behaviour
def state_asked_for_on_one_rank(wrap):
    """Before the first step, to save it; the embedding's gradients are sparse all the same."""
    torch.manual_seed(0)
    model = nn.Embedding(50, 30, sparse=True)
    optimizer = wrap(sgd(model), model.named_parameters())
    if hvd.rank() == 0:
        optimizer.state_dict()
    seen = []
    for _ in range(2):
        model(torch.arange(4) + 2 * hvd.rank()).square().sum().backward()
        seen.append(model.weight.grad.is_sparse)
        optimizer.step()
        optimizer.zero_grad()
    return {"alike": seen, "close": [flat(model)]}


@behaviour
def state_loaded_into_another(wrap):
    model = network()
    optimizer = wrap(sgd(model, momentum=0.9), model.named_parameters())
    trained(model, optimizer, 1)
    state = optimizer.state_dict()
    backward(model)  # what is under way is given up
    with contextlib.suppress(AssertionError):
        optimizer.synchronize()
    optimizer.load_state_dict(state)
    optimizer.param_groups[0]["lr"] = 0.0
    trained(model, optimizer, 1)
    return {"alike": [key for key in state if key in ("state", "param_groups")]}


def every_optimizer():
    """What torch ships, but for those that stock's tests leave out: LBFGS, SparseAdam (above), and Muon (below)."""
    left_out = ("LBFGS", "SparseAdam", "Muon")
    kinds = [
        kind
        for kind in vars(torch.optim).values()
        if inspect.isclass(kind)
        and kind is not torch.optim.Optimizer
        and issubclass(kind, torch.optim.Optimizer)
        and kind.__name__ not in left_out
    ]
    return sorted(kinds, key=lambda kind: kind.__name__)


def _made(kind, model, settings):
    accepted = inspect.signature(kind).parameters
    return kind(
        model.parameters(), **{key: value for key, value in settings.items() if key in accepted}
    )


def _with(kind, settings):
    def trains(wrap):
        model = network(hvd.rank())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = wrap(_made(kind, model, settings), model.named_parameters())
        trained(model, optimizer)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return trained(model, optimizer)

    def is_loaded(wrap):
        """As after a restart: rank 0 has read a checkpoint, the others hear of it."""
        model = network()
        optimizer = wrap(_made(kind, model, settings), model.named_parameters())
        trained(model, optimizer)
        saved = optimizer.state_dict()
        values = (
            [
                sorted(
                    (key, value) for key, value in state.items() if isinstance(value, torch.Tensor)
                )
                for state in saved["state"].values()
            ]
            if hvd.rank() == 0
            else None
        )
        other = SimpleNamespace(model=network())
        other.optimizer = wrap(_made(kind, other.model, settings), other.model.named_parameters())
        if hvd.rank() == 0:
            other.optimizer.load_state_dict(saved)
        hvd.broadcast_optimizer_state(other.optimizer, root_rank=0)
        after = [
            sorted((key, value) for key, value in state.items() if isinstance(value, torch.Tensor))
            for state in other.optimizer.state_dict()["state"].values()
        ]
        values = hvd.broadcast_object(values, name="values")
        same = len(values) == len(after) and all(
            a[0] == b[0] and torch.equal(a[1], b[1])
            for before, now in zip(values, after, strict=True)
            for a, b in zip(before, now, strict=True)
        )
        return {"alike": same}

    return trains, is_loaded


@behaviour
def muon(wrap):
    """Which takes matrices alone."""
    model = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Tanh(), nn.Linear(40, 3, bias=False))
    return trained(
        model, wrap(torch.optim.Muon(model.parameters(), lr=0.02), model.named_parameters())
    )


SETTINGS = {
    "defaults": {"lr": 0.02},
    "all": {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "centered": True},
}
for _kind in every_optimizer():
    for _label, _settings in SETTINGS.items():
        for _name, _behave in zip(("trains", "is_loaded"), _with(_kind, _settings), strict=True):
            BEHAVIOURS[f"{_kind.__name__}_{_name}_with_{_label}"] = _behave
