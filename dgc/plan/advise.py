"""Advice: whether compression pays on a cluster, up to which bandwidth, with which settings, and at
which price.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from dgc.compression.sizes import WIDE
from dgc.config import UNMASKED, Config, Schedule
from dgc.plan.cost import Cluster
from dgc.plan.models import Shape, buckets
from dgc.plan.predict import (
    CPU,
    DGC,
    ROUNDS,
    Local,
    Method,
    Overlap,
    Prediction,
    methods,
    predict,
)
from dgc.schedule import FIRST, piecewise, usual_end, warmup
from dgc.terminal import size as size_of

# Times faster than dense exchange, from which on it is said to pay, and not a little.
MIN_SPEEDUP, CLEAR_SPEEDUP = (
    1.05,
    1.1,
)
NEARLY = 1.02  # times the fastest's time: within it the simplest is preferred
SPARSITIES = (0.9, 0.99, 0.999)  # of which the least that is nearly as fast as any is recommended
ADAMW = 0.992  # the largest sparsity at which a training with AdamW was measured
SHORT = 4000  # steps; in no longer training the reduce exchange was seen to need more entries
DENSE = 1000  # steps of AdamW, where the training's number is not known; else a tenth of it
POWERSGD_DENSE = 1000  # torch's default of start_powerSGD_iter
TO_COMPARE = 0.3  # of a training, after which a comparison with dense training may stop
MAX_WAIT = 0.1  # of a training, that an entry may wait where the number of steps is known
FASTEST = 1.25e12  # bytes a second between nodes, up to which is looked
# The most hosts whose speed was measured, and workers whose accuracy was with "reduce".
HOSTS, CROWD = (
    8,
    64,
)
GIGABIT = 0.125e9  # bytes a second: the fastest network that was measured

# Waits as a share of all steps, and what the nearest that was measured cost at 99.9 %
# (docs/results.md).
LOST = (
    (0.02, "The paper lost nothing on CIFAR-10, where an entry waited for 1.6 % of the training."),
    (
        0.11,
        "ResNet-20 lost 0.4 points of accuracy on CIFAR-10 where an entry waited for 10 % of the training.",
    ),
    (
        0.6,
        "ResNet-20 lost 3.5 points of accuracy on CIFAR-10 where an entry waited for half of the training: "
        "train longer, or send more.",
    ),
    (
        1.0,
        "ResNet-20 lost 5.9 points of accuracy on CIFAR-10 where an entry waited for 80 % of the training: "
        "train longer, or send more.",
    ),
)
LOST_AT_ALL = (
    "ResNet-20 lost 0.4 points of accuracy on CIFAR-10 in 9,750 steps, and 3.5 in 1,755 (of your training: "
    "--steps N)."
)
LOST_SHORT = "In 1,755 steps at 99 %, ResNet-20 lost 1.3 points of accuracy on CIFAR-10 (90 % interval: 0.6 to 2.0)."
LOST_LONG = (
    "In 9,750 steps, ResNet-20 lost 0.6 points of accuracy on CIFAR-10 at 99 % (one seed), and 0.4 at 99.9 % "
    "(three seeds)."
)
LOST_UNMASKED = (
    "In 1,755 steps at 90 % without masking, ResNet-20 lost 1.0 points of accuracy on CIFAR-10 (90 % "
    "interval: 0.3 to 1.7)."
)
LOST_ADAMW = (
    "With AdamW, a transformer of 2.1 M parameters ended 0.7 % above dense training's perplexity in 3,632 "
    f"steps at {100 * ADAMW:g} % with 4 workers (three seeds, 95 % interval: -0.4 to 1.8 %)."
)
# Hosts that share 2 cores -> DGC's measured exchange, over the prediction (docs/guides/pays.md).
LONGER = {2: "1.2 to 1.7", 3: "1.6 to 3.2", 4: "1.8 to 6.0", 8: "4.5 to 14"}
# The same at 1 Gbit/s -> how many times as fast as Horovod's dense exchange it was: all-gather, reduce
# (docs/concepts/exchanges.md).
AS_FAST = {4: (10.5, 5.9), 8: (6.6, 4.6)}
SMALLER_RATE = (
    "If the loss rises in the first hundred steps, leave factor_masking=False out, or divide the learning "
    "rate by four (docs/troubleshooting.md#the-loss-explodes)."
)
# Bytes of DGC for each compressed entry: u and v; AdamW's 1 / D and last step too.
KEPT = {
    "sgd": 8,
    "adamw": 16,
}
Optimizer = Literal["sgd", "adamw"]


@dataclass(frozen=True)
class Advice:
    """Advice for a cluster, and for which training it is."""

    cluster: Cluster
    compute: float
    local: Local
    steps: int | None
    optimizer: Optimizer
    pays: bool
    dense: Prediction  # the fastest of those that Horovod and DistributedDataParallel offer
    dgc: Prediction  # the simplest that is nearly as fast as any, with ``sparsity``
    sparsity: float
    config: Config  # of DGC in the predictions
    here: tuple[Prediction, ...]  # all methods on this cluster
    below: float | None  # bytes a second between nodes, up to which it pays; None: at none
    whole: float | None  # times as fast as dense, over all steps; None: their number is not known
    stages: tuple[tuple[float, int, float], ...]  # sparsity, its steps, seconds that they take
    memory: int  # bytes that DGC keeps on each worker
    line: str  # of Python to paste

    @property
    def faster(self) -> float:
        """How many times as fast as dense a step is."""
        return self.dense.step_seconds / self.dgc.step_seconds

    def plainest(self, kind: str) -> Prediction:
        """The first method of this kind: without machines, and of DGC the all-gather."""
        return next(p for p in self.here if p.method.kind == kind)


def advise(
    shapes: tuple[Shape, ...],
    cluster: Cluster,
    compute: float,
    config: Config | None = None,
    local: Local = CPU,
    overlap: Overlap = True,
    steps: int | None = None,
    optimizer: Optimizer = "sgd",
    value_bits: int | None = None,
) -> Advice:
    """Whether DGC pays here, up to which bandwidth, and with which exchange and sparsity.

    It is compared with the dense exchanges that Horovod and DistributedDataParallel offer.

    Args:
        shapes, cluster, compute, local, overlap: as for :func:`predict`.
        config: of DGC; None: the least sparsity of ``SPARSITIES`` that is nearly as fast as any.
        steps: of the training: of those, without ones at which an entry waits for too much of it.
        optimizer: with AdamW, none above ``ADAMW`` is chosen, and dense steps come before it.
        value_bits: in place of those of ``config``.

    Raises:
        ValueError: ``compute`` is not a finite number > 0.
    """
    if not 0 < compute < float("inf"):
        raise ValueError(f"compute must be a number of seconds > 0, got {compute!r}")

    def step(on: Cluster, method: Method, with_config: Config = DGC) -> Prediction:
        return predict(shapes, on, method, compute, with_config, local, overlap)

    base = config or DGC
    base = replace(base, value_bits=value_bits or base.value_bits)
    sparsities = bearable(steps, optimizer) if config is None else (config.sparsity_at(0),)

    def best(on: Cluster) -> tuple[Prediction, Prediction, float]:
        """The fastest dense exchange, the simplest of DGC's that is nearly as fast as any, and its
        sparsity.
        """
        dense = [step(on, m) for m in methods(on) if m.kind in ("float32", "float16")]
        made = [
            (step(on, m, replace(base, sparsity=s)), s)
            for s in sparsities
            for m in methods(on)
            if m.kind == "dgc"
        ]
        fastest = min(p.step_seconds for p, _ in made)
        dgc, sparsity = next(each for each in made if each[0].step_seconds <= NEARLY * fastest)
        return min(dense, key=lambda p: p.step_seconds), dgc, sparsity

    def stages(on: Cluster, method: Method, end: float) -> tuple[tuple[float, int, float], ...]:
        """As in :class:`Advice`, of the schedule up to a sparsity."""
        return tuple(
            (s, n, n * step(on, method, replace(base, sparsity=s)).step_seconds)
            for s, n in sorted(_counts(end, steps, optimizer).items())
        )

    def pays(bandwidth: float) -> bool:
        """Whether it makes a step, and the whole training, fast enough."""
        on = replace(cluster, between=replace(cluster.between, bandwidth=bandwidth))
        dense, dgc, sparsity = best(on)
        limit = dense.step_seconds / MIN_SPEEDUP
        whole = sum(part[-1] for part in stages(on, dgc.method, sparsity))
        return dgc.step_seconds <= limit and whole <= limit * (steps or 0)

    dense, dgc, sparsity = best(cluster)
    chosen, parts = replace(base, sparsity=sparsity), stages(cluster, dgc.method, sparsity)
    return Advice(
        cluster,
        compute,
        local,
        steps,
        optimizer,
        pays(cluster.between.bandwidth),
        dense,
        dgc,
        sparsity,
        chosen,
        here=tuple(step(cluster, m, chosen) for m in methods(cluster)),
        below=_pays_up_to(pays, cluster.between.bandwidth) if cluster.nodes > 1 else None,
        whole=dense.step_seconds * steps / sum(part[-1] for part in parts) if steps else None,
        stages=parts,
        memory=KEPT[optimizer] * sum(b.numel for b in buckets(shapes, chosen) if b.sizes),
        line=_line(chosen, steps, dgc.method, optimizer, overlap),
    )


def bearable(steps: int | None, optimizer: Optimizer = "sgd") -> tuple[float, ...]:
    """The sparsities that a training of so many steps bears; at least the smallest."""
    most = ADAMW if optimizer == "adamw" else 1.0
    return tuple(
        s
        for s in SPARSITIES
        if s == SPARSITIES[0] or (s <= most and (steps is None or 1 / (1 - s) <= MAX_WAIT * steps))
    )


@cache
def _counts(sparsity: float, steps: int | None, optimizer: Optimizer) -> Counter[float]:
    """Sparsity -> the number of steps that have it, in the schedule up to this one."""
    return Counter(map(_schedule(sparsity, steps, optimizer)[1], range(steps or 0)))


def _schedule(sparsity: float, steps: int | None, optimizer: Optimizer) -> tuple[str, Schedule]:
    """The schedule, as Python to paste, and itself."""
    if optimizer == "adamw":
        dense = max(1, (steps or 10 * DENSE) // 10)
        points = {0: 0.0, dense: min(0.9, sparsity)}
        if sparsity > 0.9:
            points[2 * dense] = sparsity
        return f"dgc.piecewise({points})", piecewise(points)
    if sparsity <= FIRST:
        return f"{sparsity:.15g}", piecewise({0: sparsity})
    end = "" if sparsity == usual_end(steps) else f", end={sparsity:.15g}"
    schedule = warmup(steps=steps or 1, end=sparsity)
    return f"dgc.warmup(steps={steps or 'steps'}{end})", schedule


def _line(
    config: Config, steps: int | None, method: Method, optimizer: Optimizer, overlap: Overlap
) -> str:
    """The line of Python to paste."""
    options = [f"sparsity={_schedule(config.sparsity_at(0), steps, optimizer)[0]}"]
    if (
        overlap == "dense" or config.clips_globally
    ):  # gradients are clipped, or a loss scale is divided out
        options.append("clip_norm=your_bound")
    if config.sparsity_at(0) <= UNMASKED or optimizer == "adamw":
        options.append("factor_masking=False")
    if config.value_bits != Config.value_bits:
        options.append(f"value_bits={config.value_bits}")
    if method.exchange.exchange != "allgather":
        options.append(f'exchange="{method.exchange.exchange}"')
    if method.exchange.hierarchical:
        options.append("hierarchical=True")
    return f"dgc.Config({', '.join(options)})"


def _pays_up_to(pays: Callable[[float], bool], here: float) -> float | None:
    """The bandwidth in bytes a second, within 2 %, up to which it pays: the next one from ``here``,
    up to ``FASTEST``. None: it pays neither here nor at any lower one, down to 1 Mbit/s.
    """
    grid = [1.25e5 * 10 ** (i / 4) for i in range(29)]
    low = high = here
    if pays(here):
        for high in [b for b in grid if b > here]:
            if not pays(high):
                break
            low = high
        else:
            return max(FASTEST, here)
    else:
        for low in [b for b in reversed(grid) if b < here]:
            if pays(low):
                break
            high = low
        else:
            return None
    while high > 1.02 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


# -- in words ----------------------------------------------------------------------------------------------------------


def verdict(advice: Advice) -> str:
    """Whether it pays, and by how much a step, in a sentence."""
    if advice.cluster.workers == 1:
        return "One worker exchanges nothing, so there is nothing to compress."
    gains = min(advice.faster, advice.whole or math.inf)
    does = "pays" if gains >= CLEAR_SPEEDUP else "pays a little" if advice.pays else "does not pay"
    whole = "" if advice.whole is None else f", the whole training {times(advice.whole)}"
    wanted = f" (it pays from {MIN_SPEEDUP} times on)" if does == "does not pay" else ""
    return (
        f"DGC {does}: a step takes {duration(advice.dgc.step_seconds)} instead of "
        f"{duration(advice.dense.step_seconds)} with {advice.dense.method}, the best dense exchange of "
        f"Horovod and DDP. A step is {times(advice.faster)} times as fast{whole}{wanted}."
        f"{' PowerSGD may be faster still.' if advice.pays and _faster(advice) else ''}"
    )


def fits(advice: Advice) -> str:
    """For how many steps the line is."""
    if advice.steps:
        return f"{advice.steps:,} steps"
    if advice.optimizer == "adamw":
        return f"about {10 * DENSE:,} steps"
    return f"{math.ceil(1 / (1 - advice.sparsity) / MAX_WAIT - 1e-6):,} steps or more"


def notes(advice: Advice) -> dict[str, str]:
    """What else there is to say, by headings."""
    device = (
        "CPU core"
        if advice.local == CPU
        else "GPU, whose cost is an estimate (--worker cpu: on a CPU core)"
    )
    hosts = max(n for n in LONGER if n <= max(2, advice.cluster.nodes))
    clipping = "" if "clip_norm" in advice.line else ", and no clipping by the norm (--clips)"
    beside = ""
    if hosts in AS_FAST:
        gather, reduce = AS_FAST[hosts]
        beside = (
            f" Measured beside Horovod's dense exchange at 1 Gbit/s, the all-gather was {gather} times as fast, and "
            f"reduce {reduce} times (short messages, docs/concepts/exchanges.md)."
        )
    assumes = (
        f"{duration(advice.compute)} of computing a step, compressing on a {device}{clipping}. On {hosts} "
        f"hosts, DGC's all-gather took {LONGER[hosts]} times as long as predicted, as these hosts share 2 cores; dense "
        f"exchanges differed by 7 % (median, docs/guides/pays.md).{beside}"
    )
    if not advice.pays:
        return {"Network": _network(advice), "Assumes": assumes}
    return {
        "Saves": _saves(advice),
        **_faster(advice),
        "Network": _network(advice),
        "Memory": f"{size_of(advice.memory)} on each worker, beside the optimizer's own: "
        f"{KEPT[advice.optimizer]} bytes for each compressed entry.",
        "Assumes": assumes,
        "Accuracy": _accuracy(advice),
        "Untried": _untried(advice),
    }


def _saves(advice: Advice) -> str:
    dense = advice.dense.step_seconds
    if advice.steps is None or advice.whole is None:
        return f"{duration(dense - advice.dgc.step_seconds)} in each step after the warm-up (of all steps: --steps N)."
    whole = advice.steps * dense
    return (
        f"{duration(whole * (1 - 1 / advice.whole), whole)} of {duration(whole)} over all {advice.steps:,} steps, "
        f"the warm-up among them: {times(advice.whole)} times as fast.{_stages(advice)}"
        f"{_with_local_steps(advice)}"
    )


def _stages(advice: Advice) -> str:
    """How long each stage takes of AdamW's whole training, which begins with dense steps."""
    if advice.optimizer != "adamw":
        return ""
    whole = sum(seconds for _, _, seconds in advice.stages)
    told = [
        f"{steps:,} {'dense steps in float32' if s == 0 else f'steps at {100 * s:g} %'} take "
        f"{duration(seconds, whole)}"
        for s, steps, seconds in advice.stages
    ]
    return (
        f" Of the {duration(whole)} that are left, {', '.join(told)}. Fewer dense steps are untried "
        "(docs/guides/schedules.md)."
    )


def _with_local_steps(advice: Advice) -> str:
    """What local steps, which have no dense steps, would save of AdamW's training; if that is more."""
    if advice.optimizer != "adamw" or advice.whole is None:
        return ""
    whole = advice.dense.step_seconds / advice.plainest("local").step_seconds
    if whole <= advice.whole:
        return ""
    return (
        f" Local steps have no dense steps at first, and make the whole training {times(whole)} times as fast, "
        f"with an exchange every H = {ROUNDS.local_steps} steps. They change what is learned: with AdamW, "
        "perplexity was 9 % higher after 3,632 steps (docs/guides/local-steps.md)."
    )


def _faster(advice: Advice) -> dict[str, str]:
    """Another method that the table has, where a step with it is clearly faster."""
    least = advice.plainest("powersgd")
    if NEARLY * least.step_seconds > advice.dgc.step_seconds:
        return {}
    whole = ""
    if advice.steps:
        exact = advice.plainest("float32")
        first = min(POWERSGD_DENSE, advice.steps)
        seconds = first * exact.step_seconds + (advice.steps - first) * least.step_seconds
        whole = f", the whole training {duration(seconds)} if its first {first:,} steps are dense"
    return {
        "Faster": f"A step with {least.method} is predicted to take {duration(least.step_seconds)}{whole}. "
        "On hosts that share 2 cores PowerSGD took two to three times as long as predicted. Compare accuracy, too "
        "(docs/guides/pays.md)."
    }


def _network(advice: Advice) -> str:
    if advice.cluster.nodes == 1:
        return "All workers are in one machine, where no network between machines plays a part."
    if advice.below is None:
        return "DGC does not pay at any lower bandwidth between machines either."
    if advice.below >= FASTEST:
        return "DGC pays at every bandwidth between machines, up to 10 Tbit/s."
    return f"At this latency DGC pays up to about {bits(advice.below)} between machines, and not above."


def _accuracy(advice: Advice) -> str:
    """What it may cost: how long an entry waits to be sent, and what as long a wait has cost."""
    reduce = advice.dgc.method.exchange.exchange == "reduce"
    # At its worker, and again at its owner.
    wait, sentences = (2 / WIDE if reduce else 1) / (1 - advice.sparsity), []
    share = min(1.0, wait / advice.steps) if advice.steps else None
    of_yours = f" of your {advice.steps:,}, {100 * share:.3g} % of the training" if share else ""
    exchange = ' with exchange="reduce"' if reduce else ""
    sentences.append(
        f"At {100 * advice.sparsity:g} %{exchange} an entry waits about {wait:,.0f} steps{of_yours}."
    )
    if advice.optimizer == "adamw":
        sentences.append(LOST_ADAMW)
    elif advice.sparsity <= UNMASKED:
        sentences += [LOST_UNMASKED, SMALLER_RATE]
    elif advice.sparsity <= 0.99:
        sentences.append(LOST_LONG if share is not None and share <= LOST[0][0] else LOST_SHORT)
    else:
        sentences.append(
            next(cost for most, cost in LOST if share <= most) if share else LOST_AT_ALL
        )
    if advice.config.value_bits != Config.value_bits:
        sentences.append("Values of 4 bits: docs/results.md#bits-of-a-value.")
    if reduce:
        sentences.append(
            f"An all-gather waits {WIDE / 2:g} times as long, but applies more entries a step where workers are many, "
            "and may learn more."
        )
        if advice.steps and advice.steps <= SHORT and advice.sparsity > ADAMW / 1.01:
            sentences.append(
                "Your training is short, so send three times as many: --sparsity 0.97."
            )
    if advice.steps:
        compared = TO_COMPARE * advice.steps * advice.dense.step_seconds
        sentences.append(
            f"To compare, {100 * TO_COMPARE:g} % of the steps take {duration(compared)} with {advice.dense.method} "
            "(docs/quickstart.md)."
        )
    return " ".join(sentences)


def _untried(advice: Advice) -> str:
    """What of the advice nobody has measured (docs/limits.md)."""
    cluster, exchange = advice.cluster, advice.dgc.method.exchange
    adamw, reduce = advice.optimizer == "adamw", exchange.exchange == "reduce"
    crowd = exchange.contributors(cluster.nodes, cluster.gpus) > CROWD
    untried = {
        "training on several GPUs": advice.local != CPU,
        f"more than {HOSTS} machines": cluster.nodes > HOSTS,
        f"a network above {bits(GIGABIT)}": cluster.between.bandwidth > GIGABIT,
        "this AdamW schedule, a larger model with AdamW, or more than 4 workers with AdamW": adamw,
        "writing and reading messages on a GPU": advice.local != CPU,
        'exchange="reduce" with AdamW': reduce and adamw,
        'exchange="reduce" with hierarchical=True': reduce and exchange.hierarchical,
        f'exchange="reduce" with more than {CROWD} workers': reduce and crowd,
    }
    listed = ["This model on this cluster", *(what for what, applies in untried.items() if applies)]
    gather = duration(advice.plainest("dgc").step_seconds)
    beside = f" With the all-gather a step takes {gather}." if reduce else ""
    return "; ".join(listed) + "." + beside


def bits(bandwidth: float) -> str:
    """A bandwidth in bytes a second, in words."""
    return (
        f"{bandwidth / 1.25e8:.3g} Gbit/s"
        if bandwidth >= 1.25e8
        else f"{bandwidth / 1.25e5:.3g} Mbit/s"
    )


def times(factor: float) -> str:
    """How many times as fast, so that what is just below a limit does not look like it."""
    return f"{factor:.3f}" if factor < CLEAR_SPEEDUP else f"{factor:.3g}"


def duration(seconds: float, beside: float | None = None) -> str:
    """A time in words, in the unit of another one that stands beside it."""
    size = seconds if beside is None else beside
    if size >= 3600:
        return f"{seconds / 3600:,.1f} hours"
    if size >= 120:
        return f"{seconds / 60:.3g} minutes"
    return f"{seconds:,.3g} s" if size >= 1 else f"{1e3 * seconds:.3g} ms"
