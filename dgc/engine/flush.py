"""Sending what is pending, apart from any step."""

from __future__ import annotations

from dgc.collective import World
from dgc.engine.adam import moves
from dgc.engine.nonfinite import Count
from dgc.engine.optimizer_step import Applier
from dgc.engine.parameters import Parameters
from dgc.engine.settings import Settings
from dgc.engine.step import Delivery
from dgc.paths.compressed import flush
from dgc.trace import stage
from dgc.transport.runner import PathRun
from dgc.warn import warn


def flush_all(parameters: Parameters, settings: Settings, world: World, applier: Applier, count: Count) -> None:
    """Sends all of v of what is not frozen, and adds it to the parameters at the current learning rate; with
    AdamW, at that of the gradients' own steps.

    Raises:
        FloatingPointError: a sum is not finite; raised on all ranks. v is back in its bucket, and in those after it.
    """
    if settings.world.rank == 0 and applier.is_sgd and not moves(parameters.groups):  # AdamW's has the rate of its time
        warn("flush() should be called at a learning rate above 0, got 0 in all param groups: what is pending is sent, "
             "times 0, and gone (call it before the scheduler's last step)")
    exchanges = []
    for bucket in parameters.buckets:
        thawed = [p for p in bucket.parameters if p.requires_grad]
        if bucket.kept is not None and thawed and applier.pending_in(bucket):
            path = flush(bucket.kept, [parameters.names[p] for p in thawed], world if bucket.compressed else world.flat,
                         average=settings.average)
            exchanges.append((bucket, thawed, PathRun(path, settings.transport, f"{bucket.name}.flush", count)))
    group_of = parameters.group_of()
    try:
        while exchanges:
            bucket, thawed, exchange = exchanges.pop(0)
            delivery = Delivery(bucket, thawed, exchange.finish())
            with stage("dgc::add"):
                applier.add(delivery, group_of)
            applier.flushed(thawed)
    except (FloatingPointError, ValueError):  # on all ranks alike
        for *_, exchange in exchanges:
            exchange.abandon(wait=True)
        raise
