"""The path of a bucket's compressed gradients, whatever its exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dgc.collective import Path, World
from dgc.compression import sizes as messages
from dgc.compression.residual import Bucket, Gradient
from dgc.config import Config
from dgc.paths.averaged import DenseUpdate, Update
from dgc.paths.dense import summed
from dgc.paths.finite import LocalVerdict, local_verdict
from dgc.paths.nodes import among_nodes
from dgc.paths.owners import add_at_owners
from dgc.paths.task import Moves, Task, clipping, concluded, in_force, layout_of, refused
from dgc.trace import stage


@lru_cache(1024)
def sends_dense(exchange: str, sizes: messages.Sizes, nodes: int) -> bool:
    """Whether the same entries are fewer bytes as one dense sum. It depends on sizes alone, and so
    is alike on every rank.
    """
    return messages.sends_dense(exchange, sizes, nodes)


def gather(task: Task) -> Path[Update]:
    """Sends this rank's largest entries, and adds up what all messages say (paper, Algorithms 1 and
    4).
    """
    bad, index, used = task.select()
    bucket, layout, world, moves = task.bucket, task.layout, task.world, Moves(task.bucket)
    is_refused, names = refused(bucket, bad)
    message, taken = task.encode(index, used, is_refused)
    moves.note(taken)
    try:
        messages = yield from among_nodes("gather", message.view(-1), world)
        with stage("dgc::read"):
            received = task.kernel.Received(
                layout, layout.rows, messages, world.divisor(task.average)
            )
        return (yield from concluded(moves, received, names, world))
    except (Exception, KeyboardInterrupt):
        moves.undo()
        raise


def reduce(
    bucket: Bucket,
    gradients: Mapping[str, Gradient],
    config: Config,
    step: int,
    world: World,
    *,
    average: bool = True,
    scale: Tensor | Mapping[str, Tensor] | None = None,
    hands_back: bool = False,
) -> Path[Update]:
    """One step of Deep Gradient Compression for the parameters of a bucket (paper, Algorithms 1 and
    4).

    At density 1 everything is sent, u is not masked, and the update is exactly that of momentum
    SGD, because momentum is linear.

    Args:
        bucket: holds u and v, which this changes.
        gradients: parameter -> local gradient. A parameter without one sits this step out: its
            slots stay empty.
        config: the settings.
        step: the optimizer's step, from 0; alike on every rank.
        world: this rank and how many there are; all of them walk this path. Those of a node have
            the same gradients, from :func:`dgc.paths.nodes.average_in_node`, and the same u and v.
        average: divide the sum by N.
        scale: 0-dim factor for the gradients, from clipping by their global norm or from a loss
            scale; one for all, or one each.
        hands_back: this is the last step before gradients travel dense, at sparsity 0: u is
            averaged as well.

    Returns:
        The :class:`dgc.paths.averaged.Update` of the bucket's parameters, in the residual's dtype.

    Raises:
        FloatingPointError: a rank's gradient is not finite; raised on all of them. What is not
            finite entered u and v nowhere.
        ValueError: a message is corrupt; raised on all ranks that received it so.
    """
    # First of all: a schedule's error leaves u and v as they were.
    sparsity = config.sparsity_at(step)
    bucket.overflow_entries = bucket.held_entries = 0
    layout = layout_of(bucket, sparsity, config)
    clip = clipping(bucket, gradients, config, world, average, scale)
    dense = sends_dense(config.exchange, layout.sizes, world.nodes)
    if sparsity and config.exchange == "reduce":
        layout = layout_of(bucket, sparsity, config, wide=True)
    in_force[bucket] = layout
    task = Task(bucket, gradients, clip, layout, config, step, world, average)
    if sparsity == 0.0:
        return (yield from _sum_all(task, hands_back))
    if dense:
        return (yield from _sum_chosen(task))
    return (yield from add_at_owners(task) if config.exchange == "reduce" else gather(task))


def _sum_all(task: Task, hands_back: bool) -> Path[DenseUpdate]:
    """Density 1: all of v, as one sum."""
    bucket, world, velocity = task.bucket, task.world, None
    verdict = local_verdict(bucket, task.accumulate())
    bucket.count(torch.full_like(bucket.total_entries, bucket.numel))
    if hands_back and bucket.u is not None:
        total = yield from among_nodes("sum", bucket.u.clone(), world)
        velocity = total.div_(world.divisor(task.average))
    taken = task.take_all(() if verdict.names else task.gradients)
    # Nothing may stay in v, which stock's steps do not send.
    bits = 0 if hands_back else task.layout.sizes.sum_bits
    if task.config.local_steps is not None:  # all entries are what a round sends
        bits = task.config.value_bits if task.config.value_bits < 16 else 0
    update = yield from summed(bucket, None, taken, world, task.average, verdict, bits)
    update.velocity = velocity
    return update


def _sum_chosen(task: Task) -> Path[Update]:
    """The chosen entries as one dense sum, which is fewer bytes than the messages."""
    bad, index, used = task.select()
    bucket, verdict = task.bucket, local_verdict(task.bucket, bad)
    fine = ~bucket.marked.any() if verdict.on_device else not verdict.names
    valid = task.layout.uses(used) & fine
    index = torch.where(valid, index, 0)  # in the other slots there may be anything
    values = task.take(index, valid)
    return (
        yield from summed(
            bucket, index, values, task.world, task.average, verdict, task.layout.sizes.sum_bits
        )
    )


def flush(
    bucket: Bucket, names: Sequence[str], world: World, *, average: bool = True
) -> Path[Update]:
    """Sends all of v of these parameters, and nothing else: no gradient is accumulated and u is
    left alone.
    """
    bucket.total_entries += sum(
        n for name, n in zip(bucket.names, bucket.numels, strict=True) if name in names
    )
    with stage("dgc::take"):
        taken = bucket.take_all(names)
    # entries_sent: the last step's.
    return (yield from summed(bucket, None, taken, world, average, LocalVerdict()))
