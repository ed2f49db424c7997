"""The backward pass: where gradients come from, and when it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from dgc.compression.residual import memory_order, shaped
from dgc.engine.parameters import DTYPES

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """A function that Dynamo leaves alone, with all that it calls, where a compiled one calls it."""
    return cast(F, torch.compiler.disable(function))


def add_hook(parameter: Tensor, on_gradient: Callable[[Tensor], None]) -> None:
    """Has torch call a function when a gradient was accumulated. It takes no hook for a frozen
    parameter, which may thaw later. Within a compiled function the backward pass runs the hook,
    which is not to be compiled.
    """
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_post_accumulate_grad_hook(uncompiled(on_gradient))
    parameter.requires_grad_(not frozen)


def refuse_gradients_of_others(param_groups: Iterable[dict[str, Any]]) -> None:
    """Raises an error in the backward pass of a parameter that thaws and is not exchanged: each
    rank would step it on its own.
    """

    def on_gradient(parameter: Tensor) -> None:
        raise TypeError(
            f"a parameter that was frozen when the DistributedOptimizer was made must be of "
            f"{', '.join(map(str, DTYPES))} to be trained, got one of shape {tuple(parameter.shape)} and "
            f"dtype {parameter.dtype} with a gradient (keep it frozen)"
        )

    for parameter in (
        p for group in param_groups for p in group["params"] if p.dtype not in DTYPES
    ):
        if parameter.is_floating_point() or parameter.is_complex():  # others never have a gradient
            add_hook(parameter, on_gradient)


def gradients_of(bucket: Any, parameters: list[Tensor]) -> list[Tensor]:
    """The gradients in a bucket of DDP's, as it lays them: each in its parameter's order in memory,
    say channels last. torch's ``bucket.gradients()`` reads all as if they were contiguous and real.
    """
    if (buffer := bucket.buffer()).is_sparse:
        return [buffer]
    is_complex = parameters[0].is_complex()  # then all are
    if not is_complex and all(p.is_contiguous() for p in parameters):
        return bucket.gradients()
    flat = torch.view_as_complex(buffer.view(-1, 2)) if is_complex else buffer
    parts = flat.split([p.numel() for p in parameters])
    return [
        shaped(part, p.shape, memory_order(p)) for part, p in zip(parts, parameters, strict=True)
    ]


# -- what torch does not tell by a public function: tests/engine/test_backward.py notices if it changes ----------------


def graph_task_id() -> int:
    """The number of the backward pass that runs in this thread; -1 if none does."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Has a function called when the backward pass that runs in this thread has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(uncompiled(call))


def within_another() -> bool:
    """Whether the backward pass that runs is within another one's, as
    torch.utils.checkpoint(use_reentrant=True) does.
    """
    return any(frame.f_code is BackwardCFunction.apply.__code__ for frame in frames())


def calling_scaler() -> Any:
    """The enabled GradScaler whose step() calls this; None if there is none."""
    for frame in frames():
        if (
            frame.f_code is torch.amp.GradScaler.step.__code__
            and frame.f_locals["self"].is_enabled()
        ):
            return frame.f_locals["self"]
    return None


def making_state() -> bool:
    """Whether ``torch.distributed.checkpoint`` calls this: it has a fresh optimizer take a step, so
    that there is a state to load into.
    """
    return any(
        frame.f_code.co_name == "_init_optim_state"
        and frame.f_globals["__name__"].startswith("torch.distributed.checkpoint.")
        for frame in frames()
    )


def frames() -> Iterator[Any]:
    """The functions that are being called in this thread, from within."""
    frame: Any = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
