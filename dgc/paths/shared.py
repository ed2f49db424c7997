"""The exchange that sums values at shared positions: one contributor, another one each step, says where."""

from __future__ import annotations

import torch

from dgc.collective import Path
from dgc.paths.averaged import DenseUpdate
from dgc.paths.dense import put_back
from dgc.paths.finite import refuse_not_finite
from dgc.paths.nodes import among_nodes
from dgc.paths.task import Task
from dgc.trace import stage


def sum_at_support(task: Task) -> Path[DenseUpdate]:
    """The leader of this step names the positions, and all ranks' values there are summed, in the residual's dtype:
    bytes that do not grow with their number (Chen et al., "ScaleCom", 2020). A last value says whose gradient is not
    finite.
    """
    bucket, layout, world = task.bucket, task.layout, task.world
    if world.node == task.leader:
        bad, chosen, count = task.select()
        message = layout.support.encode(chosen, count)
    else:
        bad = task.accumulate()
        message = torch.zeros(layout.support.nbytes, dtype=torch.uint8, device=layout.device)
    bad = bad or bucket.not_finite()
    support = yield from among_nodes("share", message, world, task.leader)
    with stage("dgc::read"):
        index, used = layout.support.decode(support, task.leader)
    values = task.take(index, used if not bad else torch.zeros_like(used))
    flagged = torch.cat([values, values.new_full((1,), torch.nan if bad else 0.0)])
    try:
        total = yield from among_nodes("sum", flagged, world)
        yield from refuse_not_finite(total, [*bucket.names, ""], [*layout.counts, 1], lambda: bad)
    except (Exception, KeyboardInterrupt):
        put_back(bucket, index, values)
        raise
    mean = total[:-1].div_(world.divisor(task.average))
    return DenseUpdate(torch.zeros_like(bucket.v).index_add_(0, index, mean), bucket.numels)
