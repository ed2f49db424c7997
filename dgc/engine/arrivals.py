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


def skip(step: Step, parameters: Parameters) -> None:
    """Leaves the gradients of a step that no rank takes infinite, so that a script, or a GradScaler, finds them so."""
    taking_part = parameters.taking_part(parameters.all(), step.fired)
    parameters.note_sparse(taking_part)  # in the next step a rank may have no gradient to tell by
    for parameter in taking_part:
        if parameter.grad is None or (parameter.grad.is_sparse and parameter.grad._nnz() == 0):
            parameter.grad = torch.full_like(parameter, math.inf)
        else:
            (parameter.grad._values() if parameter.grad.is_sparse else parameter.grad).fill_(math.inf)


@torch.no_grad()
def arrive(step: Step, parameters: Parameters, applier: Applier, nonfinite: NonFinite, count: Count) -> str:
    """Waits for every exchange of a step, in the order of their launch.

    Returns:
        Whose gradients are not finite, where they were found in a dense sum; "" if all are finite.

    Raises:
        FloatingPointError, ValueError: found in messages, by all ranks that received them so; v is as if the step had
            sent nothing, and u stays masked where entries had been taken.
    """
    delivered: list[Delivery] = []
    sparse: list[tuple[Flight, SparseUpdate]] = []
    blame = ""
    try:
        nonfinite.raise_found(step.world.rank, count)
        while step.in_flight:
            flight = step.in_flight.pop(0)
            update = flight.exchange.finish()
            blame = blame or getattr(update, "blame", "")
            if isinstance(update, SparseUpdate):
                flight.parameters[0].grad = update.tensor
                sparse.append((flight, update))
                continue
            delivered.append(Delivery(flight.bucket, flight.parameters, update))
            applier.deliver(delivered[-1], step)
            if isinstance(update, DenseUpdate) and update.verdict is not None:
                nonfinite.expect(flight.bucket.name, update.verdict)
    except (FloatingPointError, ValueError):
        step.abandon(wait=True)
        applier.put_back(delivered, step)
        nonfinite.look()
        nonfinite.forget()  # of this step, which fails
        raise
    if blame and nonfinite.is_error:
        applier.put_back(delivered, step)
        return blame
    nonfinite.tell(blame, step.world.rank)
    for flight, update in sparse:
        hand_over(parameters, flight, update, step)
    if not step.stock:
        step.deliveries += [delivery for delivery in delivered if delivery.bucket.compressed]
    return ""
