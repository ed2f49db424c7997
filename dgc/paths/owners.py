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

from weakref import WeakKeyDictionary

from dgc.collective import Path
from dgc.compression import kernels
from dgc.compression.regions import Plan
from dgc.compression.residual import Bucket
from dgc.paths.averaged import Update
from dgc.paths.nodes import among_nodes
from dgc.paths.task import Moves, Task, concluded, refused
from dgc.trace import stage

_plans: WeakKeyDictionary[Bucket, Plan] = WeakKeyDictionary()


def plan_of(task: Task) -> Plan:
    """The plan for a bucket's messages, made anew only where the sparsity or the number of
    contributors changes.
    """
    layout, n, own = task.layout, task.world.nodes, task.world.node
    plan = _plans.get(task.bucket)
    if plan is None or (plan.layout, plan.regions.owners, plan.own) != (layout, n, own):
        plan = _plans[task.bucket] = Plan(layout, n, own)
    return plan


def add_at_owners(task: Task) -> Path[Update]:
    """Both phases; on failure what was taken out of v is back there, and what was added to it is
    gone.
    """
    plan, bucket, world, masking = (
        plan_of(task),
        task.bucket,
        task.world,
        task.config.factor_masking,
    )
    kernel, moves = kernels.owners(bucket.v.device.type, bucket.v.dtype), Moves(bucket)
    with stage("dgc::select"):
        bad, index, used = kernel.select(bucket, task.gradients, task.clip, plan, task.step)
    is_refused, names = refused(bucket, bad)
    with stage("dgc::take"):
        rows, sent = kernel.send(bucket, plan, index, used, is_refused, masking)
    moves.note(sent)
    try:
        rows = yield from among_nodes("alltoall", rows, world)
        with stage("dgc::read"):
            moves.note(came := kernel.add(bucket, plan, rows))
        with stage("dgc::take"):
            message, sent = kernel.pass_on(bucket, task.gradients, plan, came, task.step, masking)
        moves.note(sent)
        moves.count()
        messages = yield from among_nodes("gather", message.view(-1), world)
        with stage("dgc::read"):
            divisor = world.divisor(task.average)
            received = task.kernel.Received(
                plan.layout, plan.to_all, messages, divisor, plan.regions
            )
        return (yield from concluded(moves, received, names, world))
    except (Exception, KeyboardInterrupt):
        moves.undo()
        raise
