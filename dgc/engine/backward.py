"""The backward pass: where gradients come from, and when it ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from dgc.compression.residual import memory_order, shaped
from dgc.engine.parameters import DTYPES

F = TypeVar("F", bound=Callable[..., Any])


class Exchanging(Protocol):
    """The engine, as a source of gradients sees it."""

    def arrived(self, parameter: Tensor) -> None:
        """A backward pass has added to a parameter's gradient."""

    def exchange(self) -> None:
        """Ends the step's exchange."""

    def backward_ends(self) -> None:
        """A backward pass has ended."""


class Hooks:
    """A hook of each parameter: the way of :func:`dgc.DistributedOptimizer`.

    Args:
        ends_with_backward: with a GradScaler, whose step() looks at ``p.grad`` before it calls the optimizer's.
    """

    def __init__(self, ends_with_backward: bool):
        self.ends_with_backward, self.waits_for_all = ends_with_backward, True
        self._lock = threading.RLock()
        self._task = -1  # torch's number of the last backward pass

    def brings(self, parameter: Tensor) -> bool:
        """See :class:`dgc.engine.engine.GradientSource`."""
        return True

    def watch(self, parameters: Iterable[Tensor], engine: Exchanging) -> None:
        """See :class:`dgc.engine.engine.GradientSource`."""
        reference, lock = ref(engine), self._lock  # the parameters outlive the optimizer

        def call(parameter: Tensor) -> None:
            if (alive := reference()) is not None:
                with lock:  # torch has a thread for each device of a model, and they run backward side by side
                    alive.arrived(parameter)
                    if self.ends_with_backward:
                        self._await_end(alive)

        for parameter in parameters:
            add_hook(parameter, call)

    def _await_end(self, engine: Exchanging) -> None:
        """Has the engine told when the backward pass that runs has ended."""
        if (task := backward_task()) != self._task:
            self._task = task
            at_end_of_backward(lambda: None if within_another() else engine.backward_ends())

    def has_step(self, engine: Exchanging) -> bool:
        """See :class:`dgc.engine.engine.GradientSource`. Without gradients zeros are exchanged, as by Horovod."""
        return True

    def synchronize(self, engine: Exchanging) -> None:
        """See :class:`dgc.engine.engine.GradientSource`."""
        engine.exchange()

    def before_update(self, engine: Exchanging) -> None:
        """See :class:`dgc.engine.engine.GradientSource`."""


def uncompiled(function: F) -> F:
    """A function that Dynamo leaves alone, with all that it calls, where a compiled one calls it."""
    return cast(F, torch.compiler.disable(function))


def add_hook(parameter: Tensor, on_gradient: Callable[[Tensor], None]) -> None:
    """Has torch call a function when a gradient was accumulated. It takes no hook for a frozen parameter, which may
    thaw later. Within a compiled function the backward pass runs the hook, which is not to be compiled.
    """
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_post_accumulate_grad_hook(uncompiled(on_gradient))
    parameter.requires_grad_(not frozen)


def refuse_gradients_of_others(param_groups: Iterable[dict[str, Any]]) -> None:
    """Has torch call back where a parameter thaws that is not exchanged: ranks would step each on its own."""
    def on_gradient(parameter: Tensor) -> None:
        raise TypeError(f"a parameter that was frozen when the DistributedOptimizer was made must be of "
                        f"{', '.join(map(str, DTYPES))} to be trained, got one of shape {tuple(parameter.shape)} and "
                        f"dtype {parameter.dtype} with a gradient (keep it frozen)")

    for parameter in (p for group in param_groups for p in group["params"] if p.dtype not in DTYPES):
        if parameter.is_floating_point() or parameter.is_complex():  # others never have a gradient
            add_hook(parameter, on_gradient)


def gradients_of(bucket: Any, parameters: list[Tensor]) -> list[Tensor]:
    """The gradients in a bucket of DDP's, as it lays them: each in its parameter's order in memory, say channels last.
    torch's ``bucket.gradients()`` reads all as if they were contiguous and real.
    """
    if (buffer := bucket.buffer()).is_sparse:
        return [buffer]
    is_complex = parameters[0].is_complex()  # then all are
    if not is_complex and all(p.is_contiguous() for p in parameters):
        return bucket.gradients()
    flat = torch.view_as_complex(buffer.view(-1, 2)) if is_complex else buffer
    parts = flat.split([p.numel() for p in parameters])
    return [shaped(part, p.shape, memory_order(p)) for part, p in zip(parts, parameters, strict=True)]


# -- what torch does not tell by a public function: tests/engine/test_backward.py notices if it changes ----------------

def backward_task() -> int:
    """The number of the backward pass that runs in this thread; -1 if none does."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Has a function called when the backward pass that runs in this thread has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(uncompiled(call))


def within_another() -> bool:
    """Whether the backward pass that runs is within another one's, as torch.utils.checkpoint(use_reentrant=True) does.
    """
    return any(frame.f_code is BackwardCFunction.apply.__code__ for frame in frames())


def calling_scaler() -> Any:
    """The GradScaler whose step() calls this, if one does that scales."""
    for frame in frames():
        if frame.f_code is torch.amp.GradScaler.step.__code__ and frame.f_locals["self"].is_enabled():
            return frame.f_locals["self"]
    return None


def making_state() -> bool:
    """Whether ``torch.distributed.checkpoint`` calls this: it has a fresh optimizer take a step, so that there is a
    state to load into.
    """
    return any(frame.f_code.co_name == "_init_optim_state" and frame.f_globals["__name__"].startswith(
        "torch.distributed.checkpoint.") for frame in frames())


def frames() -> Iterator[Any]:
    """The functions that are being called in this thread, from within."""
    frame: Any = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
