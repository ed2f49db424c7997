"""The path of a bucket's compressed gradients, whatever its exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dgc.collective import Path, World
from dgc.compression import sizes
from dgc.compression.residual import Gradient, Residual
from dgc.config import Config
from dgc.paths.averaged import DenseUpdate, Update
from dgc.paths.bucket_step import (
    BucketStep,
    UndoLog,
    clip_factors,
    finish_update,
    layout_of,
    nonfinite_flag,
)
from dgc.paths.dense import summed
from dgc.paths.finite import LocalVerdict, local_verdict
from dgc.paths.nodes import among_nodes
from dgc.paths.owners import add_at_owners
from dgc.trace import stage


@lru_cache(1024)
def sends_dense(exchange: str, bucket_sizes: sizes.Sizes, nodes: int) -> bool:
    """Whether the same entries are fewer bytes as one dense sum. It depends on sizes alone, and so
    is alike on every rank.
    """
    return sizes.sends_dense(exchange, bucket_sizes, nodes)


def all_gather_entries(bucket_step: BucketStep) -> Path[Update]:
    """Sends this rank's largest entries to all, and adds up all messages (paper, Algorithms 1 and
    4).
    """
    bad, index, used = bucket_step.accumulate_and_select()
    residual, layout, world, undo_log = (
        bucket_step.residual,
        bucket_step.layout,
        bucket_step.world,
        UndoLog(bucket_step.residual),
    )
    is_refused, names = nonfinite_flag(residual, bad)
    message, taken = bucket_step.encode(index, used, is_refused)
    undo_log.record(taken)
    try:
        messages = yield from among_nodes("all_gather", message.view(-1), world)
        with stage("dgc::read"):
            received = bucket_step.kernel.Received(layout, layout.rows, messages, world.divisor)
        return (yield from finish_update(undo_log, received, names, world))
    except (Exception, KeyboardInterrupt):
        undo_log.undo()
        raise


def exchange_bucket(
    residual: Residual,
    gradients: Mapping[str, Gradient],
    config: Config,
    step: int,
    world: World,
    *,
    scale: Tensor | Mapping[str, Tensor] | None = None,
    hands_back: bool = False,
) -> Path[Update]:
    """One step of Deep Gradient Compression for the parameters of a bucket (paper, Algorithms 1 and
    4).

    At density 1 everything is sent, u is not masked, and the update is exactly that of momentum
    SGD, because momentum is linear.

    Args:
        residual: holds u and v, which this changes.
        gradients: parameter -> local gradient. A parameter without one sits this step out: its
            slots stay empty.
        config: the settings.
        step: the optimizer's step, from 0; alike on every rank.
        world: this rank and how many there are; all of them walk this path. Those of a node have
            the same gradients, from :func:`dgc.paths.nodes.average_in_node`, and the same u and v.
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
    residual.overflow_entries = 0
    layout = layout_of(residual, sparsity, config)
    clip = clip_factors(residual, gradients, config, world, scale)
    dense = sends_dense(config.exchange, layout.sizes, world.nodes)
    if sparsity and config.exchange == "reduce":
        layout = layout_of(residual, sparsity, config, wide=True)
    residual.last_layout = layout
    bucket_step = BucketStep(residual, gradients, clip, layout, config, step, world)
    if sparsity == 0.0:
        return (yield from _sum_all(bucket_step, hands_back))
    if dense:
        return (yield from _sum_chosen(bucket_step))
    return (
        yield from add_at_owners(bucket_step)
        if config.exchange == "reduce"
        else all_gather_entries(bucket_step)
    )


def _sum_all(bucket_step: BucketStep, hands_back: bool) -> Path[DenseUpdate]:
    """Density 1: all of v, as one sum."""
    residual, world, velocity = bucket_step.residual, bucket_step.world, None
    verdict = local_verdict(residual, bucket_step.accumulate())
    residual.count(torch.full_like(residual.total_entries, residual.numel))
    if hands_back and residual.u is not None:
        total = yield from among_nodes("all_reduce", residual.u.clone(), world)
        velocity = total.div_(world.divisor)
    taken = bucket_step.take_all(() if verdict.names else bucket_step.gradients)
    # Nothing may stay in v, which stock's steps do not send.
    bits = 0 if hands_back else bucket_step.layout.sizes.sum_bits
    if bucket_step.config.local_steps is not None:  # all entries are what a round sends
        bits = bucket_step.config.value_bits if bucket_step.config.value_bits < 16 else 0
    update = yield from summed(residual, None, taken, world, verdict, bits)
    update.velocity = velocity
    return update


def _sum_chosen(bucket_step: BucketStep) -> Path[Update]:
    """The chosen entries as one dense sum, which is fewer bytes than the messages."""
    bad, index, used = bucket_step.accumulate_and_select()
    residual, verdict = bucket_step.residual, local_verdict(bucket_step.residual, bad)
    fine = ~residual.marked.any() if verdict.on_device else not verdict.names
    valid = bucket_step.layout.uses(used) & fine
    index = torch.where(valid, index, 0)  # in the other slots there may be anything
    values = bucket_step.take(index, valid)
    return (
        yield from summed(
            residual,
            index,
            values,
            bucket_step.world,
            verdict,
            bucket_step.layout.sizes.sum_bits,
        )
    )


def flush(residual: Residual, names: Sequence[str], world: World) -> Path[Update]:
    """Sends all of v of these parameters, and nothing else: no gradient is accumulated and u is
    left alone.
    """
    residual.total_entries += sum(residual.numel_of[name] for name in names)
    with stage("dgc::take"):
        taken = residual.take_all(names)
    # entries_sent: the last step's.
    return (yield from summed(residual, None, taken, world, LocalVerdict()))
