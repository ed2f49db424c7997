"""The stages of a gradient's road as ranges in a profiler: ``torch.profiler``, and NVTX with
``emit_nvtx``.

Without a profiler a stage costs a look at one flag. torch's own range costs some microseconds even
then.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeAlias

from torch.autograd import profiler

Stage: TypeAlias = Literal[
    "dgc::accumulate",  # the gradient is added into u and v
    "dgc::select",  # the entries to be sent are chosen; where loops are fused, accumulate is within it
    "dgc::take",  # they are taken out of v, and written into the message
    "dgc::exchange",  # this thread waits for a collective
    "dgc::read",  # messages that have come are checked and read
    "dgc::write_update",  # the update is written into p.grad, or added to the parameters
    "dgc::step",  # the wrapped optimizer applies it
]
_NOTHING = nullcontext()


def stage(name: Stage) -> AbstractContextManager[object]:
    """A range of this name, if a profiler runs; else nothing. It must not span a ``yield`` of a
    path.
    """
    # Private, but the flag for just this in torch 2.4 to 2.13: set for all threads, where
    # `torch.autograd` has a function that knows the calling thread's profiler alone.
    # tests/test_trace.py notices if it changes.
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING
