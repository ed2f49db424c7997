"""The exchange that gathers messages: every contributor's own largest entries, to all."""

from __future__ import annotations

from dgc.collective import Path
from dgc.paths.averaged import Update
from dgc.paths.nodes import among_nodes
from dgc.paths.task import Task
from dgc.trace import stage


def gather(task: Task) -> Path[Update]:
    """Sends this rank's largest entries, and adds up what all messages say (paper, Algorithms 1 and 4)."""
    bad, index, used = task.select()
    bucket, layout, kernel = task.bucket, task.layout, task.kernel
    message = layout.nonfinite_message(bad) if bad else task.encode(index, used)
    try:
        messages = yield from among_nodes("gather", message, task.world)
        with stage("dgc::read"):
            received = kernel.Received(layout, messages, task.world.divisor(task.average))
        received.own(bucket, message)  # on an asynchronous device they may still prove to be bad
        update: Update = received
        return update
    except (Exception, KeyboardInterrupt):
        bucket.v.index_add_(0, *layout.read(message))
        raise
