"""The schedule that goes by how fast the network is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from dgc.config import check_sparsity

HIGH = 0.09  # exposed over computing time; above it, an exchange does not hide => fewer bytes
LOW = 0.06  # below it, there is room for more; more than half of HIGH, so that half and twice the bandwidth are noticed
AIM = math.sqrt(LOW * HIGH)
GROW = 1.25  # of the density, where nothing is known of what lies above => larger: faster, and worse when it fails
SHRINK = 0.25  # at most, at once
NEAR = 1.5  # of two densities: not worth a step between them
FORGET = 16  # decisions, after which an exchange that did not hide is tried once more


class Found(NamedTuple):
    """The knowledge of an adaptive schedule, alike on all ranks."""

    sparsity: float  # in force
    hides: float = 1.0  # the least sparsity at which the exchange was seen to hide; 1: at none
    shows: float = -1.0  # the greatest at which it was seen not to; -1: at none


@dataclass(frozen=True)
class Adaptive:
    """Moves the sparsity so that communication just hides behind computation. Made by :func:`adaptive`."""

    least: float
    most: float
    start: float
    every: int

    def __call__(self, step: int) -> float:
        """The sparsity at the start, for those who ask beforehand."""
        return self.start

    def after(self, found: Found, share: float, forget: bool = False) -> Found:
        """The law: what holds next.

        The time for which an exchange is exposed grows with the density d, from a latency on, by a line with a kink
        where it no longer fits behind the computation; neither is known, and both may change. So it is bracketed: by
        ``good``, the highest density that was seen to hide, and ``bad``, the lowest that was not.

        - Too dense (share > HIGH): halfway back to ``good``, as geometric mean, or right there if that is near. If
          there is none, or it was this, the network has changed: d shrinks as a time in proportion to it would have to.
        - Room for more (share < LOW): halfway to ``bad``; no further if that is near; and by ``GROW`` if none is known.
        - Between the two: as it is; but where ``forget``, as if there were room: else a latency that alone is more than
          LOW would keep for good what a network that was slow for a while has led to.

        Apart from those onto a bound and back, moves are by factors of more than 1.2, so messages are not laid out anew
        for nothing.

        Args:
            found: what is known.
            share: of computing time that communication is exposed for, at the sparsity in force.
            forget: try again what did not hide, as the network may have become faster.
        """
        density, good, bad = 1 - found.sparsity, 1 - found.hides, 1 - found.shows
        wanted = density
        if share > HIGH:
            good, bad = good if good < density else 0.0, density
            wanted = (density * min(max(AIM / share, SHRINK), 1 / GROW) if good == 0.0 else
                      good if bad <= NEAR * good else math.sqrt(good * bad))
        else:
            good, room = density, share < LOW or forget
            if bad <= good or (forget and bad <= NEAR * good):
                bad = 2.0
            if room and bad == 2.0:
                wanted = GROW * density
            elif room and bad > NEAR * good:
                wanted = math.sqrt(good * bad)
        return Found(self.within(1 - wanted), 1 - good, 1 - bad)

    def within(self, sparsity: float) -> float:
        """The sparsity, or the bound that is nearest to it."""
        return min(max(sparsity, self.least), self.most)


def adaptive(least: float = 0.99, most: float = 0.9999, *, start: float | None = None, every: int = 10) -> Adaptive:
    """Moves the sparsity within bounds so that communication just hides behind computation, as bandwidth changes.

    Each rank measures, in each step, for how long computing stands still for the exchange (exposed), and how long the
    whole step takes, from one ``synchronize()`` to the next. Every ``every`` steps the ranks gather these times (16
    bytes for each step) and decide, from the same numbers and so alike, on ::

        share = median over these steps of (least exposed of all ranks) / (longest computing of all ranks)

    with computing = step - exposed. Exposed is the waiting, and the work of compression as far as nothing computes
    beside it, which on a CPU is all of it: denser messages also take longer to make. A rank that arrives early waits
    for the others, too, which no sparsity would change; hence the least. Above a share of 9 % the density falls; below
    6 % it rises, until it was seen to go above 9 %, and at most 16 decisions later once more; between the two it rises
    every 16 decisions only. :meth:`Adaptive.after` has the law. As far as the bounds allow it, a step so takes at most
    9 % longer than computing alone, but for those in which it looks for the limit, or the network has just changed.
    Time that no sparsity saves (latency, parameters that travel dense, accumulating) counts, and may drive the sparsity
    to ``most``.

    What is found lies in ``optimizer.param_groups[0]`` (``dgc_sparsity``, and what is known of its neighbours), so it
    is saved, loaded and broadcast with the learning rate; ``optimizer.report().sparsity`` tells it. A training that
    goes on with other bounds goes on within them. As a function of the step it gives ``start``, as nobody can know more
    beforehand. As clocks decide, two runs need not be alike.

    With one process nothing is exchanged or decided. In ``dgc.lockstep``, where ranks take turns, the times mean
    nothing. Where parameters are sharded, the ranks that hold the same shard decide among themselves.

    On a GPU the times are those of CUDA events, which the host reads at a decision only, and waits for then.

    Args:
        least: the lowest sparsity, in [0, 1). Where messages are more bytes than a dense sum, that is what is sent.
        most: the highest; greater than ``least`` and below 1. What is kept back is applied the later the sparser, so
            this bounds what it may cost in accuracy; the paper goes to 0.999.
        start: where to begin, within these bounds. Default: 0.999, or the bound that is nearest to it.
        every: optimizer steps between two decisions; at least 3, for a median to mean something.

    Raises:
        TypeError, ValueError: an argument is not as said above.

    Source: our own. The paper has a fixed sparsity after the warm-up.
    """
    least, most = check_sparsity(least, "adaptive: least"), check_sparsity(most, "adaptive: most")
    start = min(max(least, 0.999), most) if start is None else check_sparsity(start, "adaptive: start")
    if not least < most:
        raise ValueError(f"adaptive: least must be less than most, got least {least!r} and most {most!r}")
    if not least <= start <= most:
        raise ValueError(f"adaptive: start must be from least, {least!r}, to most, {most!r}, got {start!r}")
    if not isinstance(every, int) or isinstance(every, bool) or every < 3:
        raise ValueError(f"adaptive: every must be an integer >= 3, got {every!r}")
    return Adaptive(least, most, start, every)
