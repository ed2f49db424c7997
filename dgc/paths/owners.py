"""The exchange that adds up at owners: each entry's sum at one contributor, and the largest sums to all.

A sparse allreduce in two phases, after Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning"
(PPoPP 2022), with residuals on both sides as in Tang et al., "DoubleSqueeze" (ICML 2019). The bytes that a worker sends
hardly grow with their number.

1. Each worker takes its 3 k largest entries out of v and sends each to its owner (:mod:`dgc.compression.regions`).
2. An owner adds what it is sent to its own v. Of its region it takes the largest sums, 3 k / N of them, and sends these
   to all.

k is what the sparsity says, and 3 is ``sizes.WIDE``. An entry waits at a worker and again at its owner: about
n / (3 k) steps at each, of a parameter of n entries. Of all ways to spend so many bytes, the same number of entries in
both phases makes the wait shortest; and from 2 k on it is no longer than an all-gather's.

What an owner does not pass on stays in its v, and is added to what comes later, from anybody. Nothing comes back to
those who sent it. So what is large on every worker and cancels in the sum is gone, and keeps no slot.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dgc.collective import Path
from dgc.compression import kernels
from dgc.compression.regions import Arrived, Plan, Taken
from dgc.compression.residual import Bucket
from dgc.paths.averaged import DenseUpdate, Update
from dgc.paths.finite import local_verdict, verdict_of_owners
from dgc.paths.nodes import among_nodes
from dgc.paths.task import Task
from dgc.trace import stage

_plans: WeakKeyDictionary[Bucket, Plan] = WeakKeyDictionary()


def plan_of(task: Task) -> Plan:
    """The plan for a bucket's messages, made anew only where the sparsity or the number of contributors changes."""
    layout, n, own = task.layout, task.world.nodes, task.world.node
    plan = _plans.get(task.bucket)
    if plan is None or (plan.layout, plan.regions.owners, plan.own) != (layout, n, own):
        plan = _plans[task.bucket] = Plan(layout, n, own)
    return plan


class _Moves:
    """What a step takes out of v and what it adds to it, one after the other, until the exchange has succeeded."""

    def __init__(self, bucket: Bucket):
        self.bucket, self._moves = bucket, list[Taken | Arrived]()

    def note(self, move: Taken | Arrived) -> None:
        self._moves.append(move)

    def count(self) -> None:
        """Tells the bucket how many entries were sent."""
        self.bucket.entries_sent = torch.stack([
            torch.count_nonzero(move.sent) for move in self._moves if isinstance(move, Taken)]).sum()

    def undo(self, where: Tensor) -> None:
        """Makes v what it was, if ``where``, bool ()."""
        v = self.bucket.v
        for move in reversed(self._moves):
            index, sent = move.added if isinstance(move, Arrived) else move
            v.index_add_(0, index, torch.where(where, sent, 0))
            if isinstance(move, Arrived):  # from a sum that was too large for its dtype, nothing can be taken away
                now = v[index]
                v[index] = torch.where(where & ~now.isfinite(), move.before, now)


def add_at_owners(task: Task) -> Path[Update]:
    """Both phases; on failure what was taken out of v is back there, and what was added to it is gone."""
    plan, bucket, world, masking = plan_of(task), task.bucket, task.world, task.config.factor_masking
    kernel, moves = kernels.owners(bucket.v.device.type, bucket.v.dtype), _Moves(bucket)
    bad, rows = _to_owners(task, plan, kernel, moves)
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
            received = kernel.Received(plan, messages, world.divisor(task.average))
        verdict = yield from verdict_of_owners(bucket, bad, received.status, received.whose, world.node_size)
        if verdict is None:
            update: Update = received
            return update
        flat = torch.empty_like(bucket.v)
        received.write(flat.split(bucket.numels))
    except (Exception, KeyboardInterrupt):
        moves.undo(torch.ones((), dtype=torch.bool, device=bucket.v.device))
        raise
    moves.undo(~verdict.fine)
    return DenseUpdate(torch.where(verdict.fine, flat, 0), bucket.numels, verdict)


def _to_owners(task: Task, plan: Plan, kernel: kernels.OwnersKernel, moves: _Moves) -> tuple[tuple[str, ...], Tensor]:
    """Accumulates, and takes the largest entries outside the own region. Returns the names of gradients that are not
    finite, and the rows, uint8 (N, nbytes).
    """
    bucket = task.bucket
    with stage("dgc::select"):
        bad, index, used = kernel.select(bucket, task.gradients, task.clip, plan, task.step)
    verdict = local_verdict(bucket, bad)
    refused = bucket.marked.any() if verdict.on_device else torch.tensor(bool(verdict.names), device=bucket.v.device)
    with stage("dgc::take"):
        rows, sent = kernel.send(bucket, plan, index, used, refused, task.config.factor_masking)
    moves.note(sent)
    return verdict.names, rows
