"""The exchange that adds up at owners: each entry's sum at one contributor, and the largest sums to
all.

A sparse allreduce in two phases, after Li and Hoefler, "Near-optimal sparse allreduce for
distributed deep learning" (PPoPP 2022), with residuals on both sides as in Tang et al.,
"DoubleSqueeze" (ICML 2019). The bytes that a worker sends hardly grow with their number.

1. Each worker takes its 3 k largest entries out of v and sends each to its owner
  (:mod:`dgc.compression.regions`).
2. An owner adds what it is sent to its own v. Of its region it takes the largest sums, 3 k / N of
   them, and sends these to all.

k is what the sparsity says, and 3 is ``sizes.WIDE``. An entry waits at a worker and again at its
owner: about n / (3 k) steps at each, of a parameter of n entries. Of all ways to spend so many
bytes, the same number of entries in both phases makes the wait shortest; and from 2 k on it is no
longer than an all-gather's.

What an owner does not pass on stays in its v, and is added to what comes later, from anybody.
Nothing comes back to those who sent it. So what is large on every worker and cancels in the sum is
gone, and keeps no slot.
"""

from __future__ import annotations

from dgc.collective import Path
from dgc.compression import kernels
from dgc.compression.regions import ReducePlan
from dgc.paths.averaged import Update
from dgc.paths.bucket_step import BucketStep, UndoLog, finish_update, nonfinite_flag
from dgc.paths.nodes import among_nodes
from dgc.trace import stage


def plan_of(bucket_step: BucketStep) -> ReducePlan:
    """The plan for a bucket's messages, made anew only where the sparsity or the number of
    contributors changes.
    """
    layout, n, own = bucket_step.layout, bucket_step.world.nodes, bucket_step.world.node
    residual = bucket_step.residual
    plan: ReducePlan | None = residual.reduce_plan
    if plan is None or (plan.layout, plan.regions.owners, plan.own) != (layout, n, own):
        plan = residual.reduce_plan = ReducePlan(layout, n, own)
    return plan


def add_at_owners(bucket_step: BucketStep) -> Path[Update]:
    """Both phases. On failure v is restored."""
    plan, residual, world, masking = (
        plan_of(bucket_step),
        bucket_step.residual,
        bucket_step.world,
        bucket_step.config.factor_masking,
    )
    kernel, undo_log = kernels.owners(residual.v.device.type, residual.v.dtype), UndoLog(residual)
    with stage("dgc::select"):
        bad, index, used = kernel.accumulate_and_select(
            residual, bucket_step.gradients, bucket_step.clip, plan, bucket_step.step
        )
    is_refused, names = nonfinite_flag(residual, bad)
    with stage("dgc::take"):
        rows, sent = kernel.send(residual, plan, index, used, is_refused, masking)
    undo_log.record(sent)
    try:
        rows = yield from among_nodes("all_to_all", rows, world)
        with stage("dgc::read"):
            undo_log.record(arrived := kernel.add(residual, plan, rows))
        with stage("dgc::take"):
            message, sent = kernel.pass_on(
                residual, bucket_step.gradients, plan, arrived, bucket_step.step, masking
            )
        undo_log.record(sent)
        undo_log.count()
        messages = yield from among_nodes("all_gather", message.view(-1), world)
        with stage("dgc::read"):
            received = bucket_step.kernel.Received(
                plan.layout, plan.to_all, messages, world.divisor, plan.regions
            )
        return (yield from finish_update(undo_log, received, names, world))
    except (Exception, KeyboardInterrupt):
        undo_log.undo()
        raise
