"""Advice: whether compression pays on a cluster, from which bandwidth down, and with which settings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

from dgc.config import UNMASKED, Config
from dgc.plan.cost import Cluster
from dgc.plan.models import Shape
from dgc.plan.predict import CPU, DGC, Local, Method, Overlap, Prediction, methods, predict
from dgc.schedule import FIRST, Piecewise, piecewise, warmup

WORTH, MUCH = 1.05, 1.1  # times faster than dense exchange, from which on it is said to pay, and not a little
NEARLY = 1.02  # times the fastest's time: within it the simplest is preferred
SPARSITIES = (0.9, 0.99, 0.999)  # of which the least that is nearly as fast as any is recommended
ADAMW = 0.992  # the largest sparsity at which a training with AdamW was measured
DENSE = 1000  # steps of AdamW, where the training's number is not known; else a tenth of it
MOST_WAIT = 0.1  # of a training, that an entry may wait where the number of steps is known
WARMUP = 0.08  # of a training with SGD whose number of steps is known: as long as was measured at every sparsity
# Waits as a share of all steps, and what the nearest that was measured cost at 99.9 % (docs/results/accuracy.md).
LOST = ((0.02, "Where it was such a share, the paper lost nothing."),
        (0.11, "Where it was a tenth, ResNet-20 lost 0.4 points of accuracy on CIFAR-10."),
        (0.6, "Where it was half, ResNet-20 lost 3.5 points of accuracy on CIFAR-10: train longer, or send more."),
        (1.0, "Where it was eight tenths, ResNet-20 lost 5.9 points of accuracy on CIFAR-10: train longer, or send "
         "more."))
LOST_UNMASKED = ("In 1,755 steps without masking, ResNet-20 lost 1.0 points of accuracy on CIFAR-10 at 90 % and 1.4 at "
                 "99 %, give or take a point, among 4 workers; among 32, in 1,225 steps, 2.9 at 99 %.")
LOST_ADAMW = ("With AdamW, a transformer of 2.1 M parameters ended 0.7 % above dense training's perplexity at "
              f"{100 * ADAMW:g} % (docs/results/accuracy.md).")
Optimizer = Literal["sgd", "adamw"]
GATHER = Method("allgather", "dgc")
OFFERED = ("ring", "hierarchical ring")  # by Horovod and DistributedDataParallel, over gloo, MPI and NCCL
LONG = 60  # seconds of computing in a step, from which on milliseconds may have been meant
MOST = 1.25e12  # bytes a second between nodes, up to which is looked
MANY = 4096  # nodes, up to which is looked


class Advice(NamedTuple):
    """Advice for a cluster."""

    pays: bool
    dense: Prediction  # the fastest of those that Horovod and DistributedDataParallel offer
    dgc: Prediction  # the simplest that is nearly as fast as any, with ``sparsity``
    sparsity: float
    below: float | None  # bytes a second between nodes, up to which it pays; None: at none
    above: float | None  # and from which on; None: however slow it is
    other: Prediction | None  # a dense one that they do not offer, and that is faster than what is advised
    reduce_from: int | None  # nodes, from which on the reduce exchange is faster than an all-gather by 2 %; None: never
    whole: float | None  # times as fast as dense, over all steps; None: their number is not known
    words: tuple[str, ...]


def advise(shapes: tuple[Shape, ...], cluster: Cluster, compute: float, config: Config | None = None,
           local: Local = CPU, overlap: Overlap = True, steps: int | None = None, optimizer: Optimizer = "sgd",
           ) -> Advice:
    """Whether DGC pays here, from which bandwidth down, and with which exchange and sparsity.

    It is compared with the dense exchanges in ``OFFERED``. Where DGC pays in a range of bandwidths only, as it may
    where it sends as many bytes as a sum in float16, the range is the one in which the cluster is, or the next below
    it: so ``pays`` is whether the cluster's bandwidth is no higher than ``below``.

    Args:
        shapes, cluster, compute, local, overlap: as for :func:`predict`.
        config: of DGC; None: the least sparsity of ``SPARSITIES`` that is nearly as fast as any.
        steps: of the training: of those, without ones at which an entry waits for too much of it.
        optimizer: with AdamW, none above ``ADAMW`` is chosen, and dense steps come before it.
    """
    sparsities, given = (bearable(steps, optimizer), DGC) if config is None else ((config.sparsity_at(0),), config)

    def with_dgc(on: Cluster, m: Method, s: float) -> Prediction:
        return predict(shapes, on, m, compute, replace(given, sparsity=s), local, overlap)

    def best(on: Cluster) -> tuple[Prediction, float]:
        """The simplest of DGC's exchanges that is nearly as fast as any, and its sparsity."""
        made = [(with_dgc(on, m, s), s) for s in sparsities for m in methods(on) if m.kind == "dgc"]
        fastest = min(p.step_seconds for p, _ in made)
        return next(each for each in made if each[0].step_seconds <= NEARLY * fastest)

    def choose(on: Cluster) -> tuple[bool, Prediction, Prediction, float]:
        """Whether it pays, the fastest dense exchange that is offered, and what DGC does best, with which sparsity."""
        dense = min((predict(shapes, on, m, compute, DGC, local, overlap) for m in methods(on)
                     if m.kind != "dgc" and m.name in OFFERED), key=lambda p: p.step_seconds)
        dgc, sparsity = best(on)
        return dense.step_seconds >= WORTH * dgc.step_seconds, dense, dgc, sparsity

    def pays_at(bandwidth: float) -> bool:
        return choose(replace(cluster, between=replace(cluster.between, bandwidth=bandwidth)))[0]

    pays, dense, dgc, sparsity = choose(cluster)
    below = above = None
    if cluster.nodes > 1:
        turn = _turn(pays_at, cluster.between.bandwidth, up=pays)
        below = turn[0] if turn else max(MOST, cluster.between.bandwidth) if pays else None
    if below and (turn := _turn(pays_at, below, up=False)):
        above = turn[1]
    other = min((predict(shapes, cluster, m, compute, DGC, local, overlap) for m in methods(cluster)
                 if m.kind != "dgc"), key=lambda p: p.step_seconds)
    faster = other if NEARLY * other.step_seconds < (dgc if pays else dense).step_seconds else None
    reduce_from = _reduce_from(cluster, dgc.method.exchange.hierarchical,
                               lambda on, m: with_dgc(on, m, sparsity).step_seconds)
    whole = _whole(steps, _schedule(sparsity, steps, optimizer)[1], dense.step_seconds,
                   lambda s: with_dgc(cluster, dgc.method, s).step_seconds)
    advice = Advice(pays, dense, dgc, sparsity, below, above, faster, reduce_from, whole, ())
    return advice._replace(words=tuple(_words(cluster, compute, advice, sparsity == sparsities[-1], steps, optimizer,
                                              local)))


def bearable(steps: int | None, optimizer: Optimizer = "sgd") -> tuple[float, ...]:
    """The sparsities that a training of so many steps bears; at least the smallest."""
    return tuple(s for s in SPARSITIES if s == SPARSITIES[0] or (
        (steps is None or 1 / (1 - s) <= MOST_WAIT * steps) and (optimizer == "sgd" or s <= ADAMW)))


def _schedule(sparsity: float, steps: int | None, optimizer: Optimizer) -> tuple[str, Piecewise | None]:
    """The schedule: as Python to paste, and itself; None where that depends on a number of steps that is not known."""
    if optimizer == "adamw":
        dense = max(1, steps // 10) if steps else DENSE
        points = {0: 0.0, dense: min(0.9, sparsity), 2 * dense: sparsity}
        if sparsity <= 0.9:
            del points[2 * dense]
        return f"dgc.piecewise({points})", piecewise(points)
    if sparsity <= FIRST:
        return f"{sparsity:.15g}", piecewise({0: sparsity})
    end = "" if sparsity == 0.999 else f", end={sparsity:.15g}"
    if steps is None:
        return f"dgc.warmup(epochs=4, steps_per_epoch=len(loader){end})", None
    made = warmup(WARMUP, stages=4, steps_per_epoch=steps, end=sparsity)
    assert isinstance(made, Piecewise)  # as it has stages
    return f"dgc.warmup({WARMUP}, stages=4, steps_per_epoch={steps}{end})", made


def _config(advice: Advice, steps: int | None, optimizer: Optimizer) -> str:
    """The line of Python to paste."""
    method, sparsity = advice.dgc.method, advice.sparsity
    schedule = _schedule(sparsity, steps, optimizer)[0]
    masking = ", factor_masking=False" if sparsity <= UNMASKED or optimizer == "adamw" else ""
    exchange = "" if method.exchange.exchange == "allgather" else f', exchange="{method.exchange.exchange}"'
    across = ", hierarchical=True" if method.exchange.hierarchical else ""
    return f"dgc.Config(sparsity={schedule}{masking}{exchange}{across})"


def _whole(steps: int | None, schedule: Piecewise | None, dense: float,
           seconds: Callable[[float], float]) -> float | None:
    """How many times as fast all of a training is: ``dense`` and ``seconds``, by sparsity, are of a step."""
    if steps is None or schedule is None:
        return None
    ends = (*schedule.steps[1:], steps)
    lasts = [max(0, min(end, steps) - begin) for begin, end in zip(schedule.steps, ends, strict=True)]
    return dense * steps / sum(n * seconds(s) for n, s in zip(lasts, schedule.sparsities, strict=True) if n)


def _turn(holds: Callable[[float], bool], here: float, up: bool) -> tuple[float, float] | None:
    """The first two bandwidths above ``here``, or below it, between which what holds changes: in bytes a second, the
    lower first, within 2 %. None: it does not change between 1 Mbit/s and ``MOST``.
    """
    grid = [1.25e5 * 10 ** (i / 4) for i in range(29)]
    last, held = here, holds(here)
    for bandwidth in [b for b in grid if b > here] if up else [b for b in reversed(grid) if b < here]:
        if holds(bandwidth) != held:
            low, high = sorted((last, bandwidth))
            while high > 1.02 * low:
                middle = (low * high) ** 0.5
                low, high = (middle, high) if (holds(middle) == held) == up else (low, middle)
            return low, high
        last = bandwidth
    return None


def _reduce_from(cluster: Cluster, hierarchical: bool, seconds: Callable[[Cluster, Method], float]) -> int | None:
    """The smallest number of nodes, up to ``MANY``, at which the reduce exchange is faster than an all-gather by more
    than 2 %, as it is from there on.

    Args:
        hierarchical: both of them.
        seconds: of a step, on a cluster with a method.
    """
    def faster(nodes: int) -> bool:
        on = replace(cluster, nodes=nodes)
        of = {m.exchange.exchange: seconds(on, m) for m in methods(on)
              if m.kind == "dgc" and m.exchange.hierarchical == hierarchical}
        return NEARLY * of["reduce"] < of["allgather"]

    if cluster.nodes == 1:
        return None
    high = next((n for n in (2**i for i in range(1, MANY.bit_length())) if faster(n)), None)
    return None if high is None else bisect_left(range(high + 1), True, lo=max(2, high // 2), key=faster)


def _words(cluster: Cluster, compute: float, advice: Advice, largest: bool, steps: int | None,
           optimizer: Optimizer, local: Local) -> Iterable[str]:
    dense, dgc = advice.dense, advice.dgc
    if cluster.workers == 1:
        yield "One worker exchanges nothing: there is nothing to compress."
        return
    if compute > LONG:
        yield f"Computing takes {compute:g} s a step as you say, which is long: --compute is in seconds."
    offered = f"the fastest dense exchange of Horovod and DistributedDataParallel ({dense.method})"
    faster = dense.step_seconds / dgc.step_seconds
    if advice.pays:
        yield (f"DGC pays {'here' if faster >= MUCH else 'a little here'}: {duration(dgc.step_seconds)} a step instead "
               f"of {duration(dense.step_seconds)} with {offered}, {faster:.3g} times as fast.")
    else:
        gain = f", less than {WORTH} times as fast as" if faster > 1 else ", and"
        yield (f"DGC does not pay here: {duration(dgc.step_seconds)} a step{gain} {duration(dense.step_seconds)} with "
               f"{offered}. Use that one.")
    if advice.other:
        yield (f"{advice.other.method} would be faster still, {duration(advice.other.step_seconds)} a step, in a "
               "library that has it.")
    if advice.below is None:
        yield ("No lower bandwidth between nodes would change that." if cluster.nodes > 1 else
               "All workers are in one node, where the network plays no part.")
    else:
        begin = f"from {bits(advice.above)} " if advice.above else ""
        end = "as far as was looked" if advice.below >= MOST else f"and not {'outside' if begin else 'above'}"
        yield f"On this cluster it pays {begin}up to {bits(advice.below)} between nodes, {end}."
    if advice.pays:
        yield from _recommended(advice, largest, steps, optimizer)
    lost = dgc.step_seconds - compute
    if advice.pays and lost > 0.2 * compute:
        yield (f"Even so {100 * lost / dgc.step_seconds:.0f} % of a step is not computation: a larger batch a worker, "
               "or fewer workers, helps as well.")
    worked = dgc.step_seconds - compute - dgc.exchange_seconds
    if worked > 0.1 * dgc.step_seconds:
        yield (f"At least {duration(worked)} of that step is compressing and decoding" + (
            ", which a GPU does faster than the CPU core that is assumed (--worker gpu, --compress-ns)."
            if local == CPU else "."))
    yield "This is about time. Whether accuracy holds is for a trial to tell" + (
        ": the method was made for SGD." if optimizer == "sgd" else f", beside dense training. {LOST_ADAMW}")


def _recommended(advice: Advice, largest: bool, steps: int | None, optimizer: Optimizer) -> Iterable[str]:
    sparsity = advice.sparsity
    yield (f"Recommended: {_config(advice, steps, optimizer)}" + ("." if largest else
           f"; to send less than {100 * (1 - sparsity):g} % of the entries would save less than 2 % of a step."))
    if optimizer == "sgd" and sparsity <= UNMASKED:
        yield ("Without masking a training may need a smaller learning rate. If its loss rises in the first hundred "
               "steps, leave factor_masking=False out, or divide the learning rate by four (docs/guides/schedules.md).")
    if optimizer == "adamw" and steps is None:
        yield f"That is for some {10 * DENSE:,} steps. Give the number of yours with --steps."
    if optimizer == "adamw" and sparsity > ADAMW:
        yield f"With AdamW no more than {100 * ADAMW:g} % was measured."
    if advice.whole:
        yield (f"Over all {steps:,} steps, the warm-up among them, it is {advice.whole:.3g} times as fast as dense"
               + ("." if advice.whole >= WORTH else ": for this training it is not worth it."))
    yield from _of_reduce(advice)


def _of_reduce(advice: Advice) -> Iterable[str]:
    if advice.dgc.method.exchange.exchange == "reduce":
        yield ('exchange="reduce" applies fewer entries a step than an all-gather of many workers, and may learn less: '
               'compare it with exchange="allgather" (docs/tuning.md).')
    if advice.reduce_from:
        yield (f'With this sparsity exchange="reduce" is faster than an all-gather from {advice.reduce_from:,} such '
               "nodes on.")


def waiting(sparsity: float, steps: int, optimizer: Optimizer = "sgd") -> str:
    """How long an entry waits to be sent, of a training of so many steps, and what as long a wait has cost with SGD."""
    wait = 1 / (1 - sparsity)
    share = min(1.0, wait / steps)
    cost = LOST_UNMASKED if sparsity <= UNMASKED else next(cost for most, cost in LOST if share <= most)
    return (f"Expect an entry to wait about {wait:,.0f} steps of your {steps:,} at {100 * sparsity:g} %, "
            f"{100 * share:.3g} % of the training." + f" {cost}" * (optimizer == "sgd"))


def bits(bandwidth: float) -> str:
    """A bandwidth in bytes a second, in words."""
    for unit, size in (("Tbit/s", 1.25e11), ("Gbit/s", 1.25e8), ("Mbit/s", 1.25e5)):
        if bandwidth >= size:
            return f"{bandwidth / size:.3g} {unit}"
    return f"{8 * bandwidth:.3g} bit/s"


def duration(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
