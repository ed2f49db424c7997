"""What torch does not tell by a public function: these fail when a new torch changes it."""

import torch
from torch.utils.checkpoint import checkpoint

from dgc.engine.backward import at_end_of_backward, calling_scaler, graph_task_id, within_another


def within_backward(look, model=None):
    """What a function returns when it is called within a backward pass."""
    seen = []
    x = torch.ones(3, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: seen.append(look()))
    (x * 2 if model is None else model(x)).sum().backward()
    return seen


def test_each_backward_pass_has_a_number():
    assert graph_task_id() == -1
    first, second = within_backward(graph_task_id) + within_backward(graph_task_id)
    assert -1 not in (first, second) and first != second


def test_a_callback_comes_when_the_backward_pass_has_ended():
    told = []
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda g: at_end_of_backward(lambda: told.append(x.grad is not None)))
    assert not told
    (x * 2).sum().backward()
    assert told == [True]


def test_a_backward_pass_within_another_one_is_told_from_one_of_its_own():
    outside, told = torch.ones(3, requires_grad=True), []
    parameter = torch.ones(3, requires_grad=True)
    parameter.register_post_accumulate_grad_hook(lambda _: told.append(within_another()))
    checkpoint(lambda x: x * parameter, outside, use_reentrant=True).sum().backward()
    assert told == [True]
    assert within_backward(within_another) == [False]


def test_the_scaler_that_calls_step_is_found():
    found = []

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            found.append(calling_scaler())
            return super().step(closure)

    x = torch.ones(3, requires_grad=True)
    optimizer, scaler = Looking([x], 0.1), torch.amp.GradScaler("cpu")
    scaler.scale(x.sum()).backward()
    scaler.step(optimizer)
    optimizer.step()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.step(optimizer)
    assert found == [scaler, None, None]
