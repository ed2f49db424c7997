"""What is kept of a parameter whose gradients were dense at first, and are sparse from now on."""

from __future__ import annotations

import torch
from torch import Tensor

from dgc.engine.kind import sign
from dgc.engine.parameters import Parameters
from dgc.engine.step import Delivery, Flight, Step
from dgc.paths.averaged import DenseUpdate, SparseUpdate


def is_pending(parameters: Parameters, parameter: Tensor) -> bool:
    """Whether this rank keeps something of it: u or v is not 0. A host-device synchronisation, until it is handed over.
    """
    kept, name = parameters.bucket_of[parameter].kept, parameters.names[parameter]
    if kept is None or parameter in parameters.handed_over:
        return False
    return any(bool(kept.views(flat)[name].any()) for flat in (kept.v, kept.u) if flat is not None)


def hand_over(parameters: Parameters, flight: Flight, update: SparseUpdate, step: Step) -> None:
    """Takes u and v of a parameter, once. torch's SGD has the velocity from now on, and step() adds what was pending,
    which has been clipped and has momentum in it. Without momentum correction v is gradients, and goes with this first
    sparse one. SGD's momentum becomes sparse, as its own would be: Nesterov's takes no dense one with sparse gradients.
    """
    (parameter,), kept, group = flight.parameters, flight.bucket.kept, step.group_of[flight.parameters[0]]
    dimensions, all_state = update.tensor.sparse_dim(), parameters.optimizer.state
    momentum = all_state[parameter].get("momentum_buffer") if parameter in all_state else None
    if momentum is not None and not momentum.is_sparse:
        all_state[parameter]["momentum_buffer"] = momentum.to_sparse(dimensions).coalesce()
    parameters.handed_over.add(parameter)
    if update.v is None or kept is None or (update.u is not None and "momentum" not in group):  # AdamW's step() refuses
        return
    name = parameters.names[parameter]
    for flat in (kept.v, kept.u):
        if flat is not None:
            kept.views(flat)[name].zero_()
    if update.u is None:
        pending = update.v if step.inverse is None else update.v / step.inverse.number
        parameter.grad = (update.tensor + pending.to(update.tensor.dtype).to_sparse(dimensions)).coalesce()
        return
    flat = torch.zeros_like(kept.v)
    kept.views(flat)[name].copy_(update.v)
    step.direct.append(Delivery(flight.bucket, [parameter], DenseUpdate(flat, kept.numels)))
    if update.u.any():
        velocity = (update.u * sign(group)).to(parameter.dtype)
        all_state[parameter]["momentum_buffer"] = velocity.to_sparse(dimensions).coalesce()
