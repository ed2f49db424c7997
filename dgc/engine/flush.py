"""Sending what is pending, apart from any step."""

from __future__ import annotations

from dgc.collective import World
from dgc.engine.nonfinite import Count
from dgc.engine.optimizer_step import Applier
from dgc.engine.parameters import Parameters
from dgc.engine.settings import Settings
from dgc.engine.step import Delivery
from dgc.paths.compressed import flush
from dgc.trace import stage
from dgc.transport.runner import PathRun


def flush_all(parameters: Parameters, settings: Settings, world: World, applier: Applier, count: Count) -> None:
    """Sends all of v of what is not frozen, and adds it to the parameters at the current learning rate."""
    exchanges = []
    for bucket in parameters.buckets:
        thawed = [p for p in bucket.parameters if p.requires_grad]
        if bucket.kept is not None and thawed and applier.pending_in(bucket):
            path = flush(bucket.kept, [parameters.names[p] for p in thawed], world if bucket.compressed else world.flat,
                         average=settings.average)
            exchanges.append((bucket, thawed, PathRun(path, settings.transport, f"{bucket.name}.flush", count)))
    group_of = parameters.group_of()
    for bucket, thawed, exchange in exchanges:
        delivery = Delivery(bucket, thawed, exchange.finish())
        with stage("dgc::add"):
            applier.add(delivery, group_of)
        applier.flushed(thawed)
