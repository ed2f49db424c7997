"""Exchanges at their end: every update into ``p.grad``, or the step is skipped, or fails, on all ranks."""

from __future__ import annotations

import math

import torch

from dgc.engine.handover import hand_over
from dgc.engine.nonfinite import Count, NonFinite
from dgc.engine.optimizer_step import Applier
from dgc.engine.parameters import Parameters
from dgc.engine.step import Delivery, Flight, Step
from dgc.paths.averaged import DenseUpdate, SparseUpdate


def skip(step: Step, parameters: Parameters, scaled: bool) -> None:
    """Leaves the gradients of a step that no rank takes as a script expects them.

    Args:
        scaled: a GradScaler is to learn of it: they are infinite. Else they are None.
    """
    taking_part = parameters.taking_part(parameters.all(), step.fired)
    parameters.note_sparse(taking_part)  # in the next step a rank may have no gradient to tell by
    for parameter in taking_part:
        if not scaled:
            parameter.grad = None
        elif parameter.grad is None or (parameter.grad.is_sparse and parameter.grad._nnz() == 0):
            parameter.grad = torch.full_like(parameter, math.inf)
        else:
            (parameter.grad._values() if parameter.grad.is_sparse else parameter.grad).fill_(math.inf)


@torch.no_grad()
def arrive(step: Step, parameters: Parameters, applier: Applier, nonfinite: NonFinite, count: Count) -> None:
    """Waits for every exchange of a step, in the order of their launch.

    Raises:
        FloatingPointError, ValueError: found in messages, by all ranks that received them so; v is as if the step had
            sent nothing, and u stays masked where entries had been taken.
    """
    delivered: list[Delivery] = []
    sparse: list[tuple[Flight, SparseUpdate]] = []
    try:
        nonfinite.raise_found(step.world.rank, count)
        while step.in_flight:
            flight = step.in_flight.pop(0)
            update = flight.exchange.finish()
            if isinstance(update, SparseUpdate):
                flight.parameters[0].grad = update.tensor
                sparse.append((flight, update))
            else:
                delivered.append(Delivery(flight.bucket, flight.parameters, update))
                applier.deliver(delivered[-1], step)
                if isinstance(update, DenseUpdate) and update.verdict is not None:
                    nonfinite.expect(flight.bucket.name, update.verdict)
            nonfinite.tell(getattr(update, "blame", ""), step.world.rank)
    except (FloatingPointError, ValueError):
        step.abandon(wait=True)
        applier.put_back(delivered, step.world.size)
        nonfinite.look()
        nonfinite.forget()  # of this step, which fails
        raise
    for flight, update in sparse:
        hand_over(parameters, flight, update, step)
