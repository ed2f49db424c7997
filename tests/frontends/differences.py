"""Where ours differs from stock Horovod on purpose, one function each: what it shows with stock, and with ours."""

import horovod.torch as hvd
import torch
from contract import backward, network, raised, sgd, wrapper
from torch import nn

DIFFERENCES = {}  # name -> function, what stock shows, what ours shows


def differs(stock, ours):
    def keep(function):
        DIFFERENCES[function.__name__] = function, stock, ours
        return function

    return keep


def shown():
    """Name -> what stock shows, what ours shows."""
    found = {}
    for name, (show, *_) in DIFFERENCES.items():
        torch.manual_seed(7)
        found[name] = tuple(show(wrapper(mode)) for mode in ("stock", "sparse"))
    return found


def alike(tensor):
    """Whether all ranks have the same."""
    every = hvd.allgather(tensor.detach().reshape(1, -1).clone())
    return bool((every == every[0]).all())


@differs("TypeError", None)
def zero_grad_to_none(wrap):
    model = network()
    optimizer = wrap(sgd(model))
    error = raised(lambda: optimizer.zero_grad(set_to_none=True))
    return error and error[0]


@differs(False, True)
def gradients_of_a_closure_are_exchanged(wrap):
    model = network()
    optimizer = wrap(sgd(model))

    def closure():
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + hvd.rank())

    optimizer.step(closure)
    return all(alike(p) for p in model.parameters())


@differs(False, True)
def gradients_of_an_added_param_group_are_exchanged(wrap):
    model, added = network(), nn.Parameter(torch.zeros(3))
    optimizer = wrap(sgd(model))
    optimizer.add_param_group({"params": [added]})
    backward(model)
    (added * (1.0 + hvd.rank())).sum().backward()
    optimizer.step()
    return alike(added)


@differs(2, 1)
def how_often_a_step_hook_fires(wrap):
    model, calls = network(), []
    optimizer = wrap(sgd(model))
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    backward(model)
    optimizer.step()
    return len(calls)


@differs(0, 0.9)
def the_defaults_of_the_wrapped_optimizer(wrap):
    return wrap(sgd(network(), momentum=0.9)).defaults["momentum"]
