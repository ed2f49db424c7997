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

from dgc.config import UNMASKED, Config, Schedule
from dgc.plan.cost import Cluster
from dgc.plan.models import Shape, buckets
from dgc.plan.predict import CPU, DGC, ROUNDS, Local, Method, Overlap, Prediction, methods, predict
from dgc.schedule import FIRST, piecewise, warmup

# Times faster than dense exchange, from which on it is said to pay, and not a little.
WORTH, MUCH = (
    1.05,
    1.1,
)
NEARLY = 1.02  # times the fastest's time: within it the simplest is preferred
SPARSITIES = (0.9, 0.99, 0.999)  # of which the least that is nearly as fast as any is recommended
ADAMW = 0.992  # the largest sparsity at which a training with AdamW was measured
DENSE = 1000  # steps of AdamW, where the training's number is not known; else a tenth of it
MOST_WAIT = 0.1  # of a training, that an entry may wait where the number of steps is known
WARMUP = 0.08  # of a training with SGD whose number of steps is known: as long as was measured at every sparsity
FASTEST = 1.25e12  # bytes a second between nodes, up to which is looked
# The most hosts whose speed was measured, and workers whose accuracy was with "reduce".
HOSTS, CROWD = (
    8,
    64,
)
GIGABIT = 0.125e9  # bytes a second: the fastest network that was measured

# Waits as a share of all steps, and what the nearest that was measured cost at 99.9 %
# (docs/results/accuracy.md).
LOST = (
    (0.02, "Where it was such a share, the paper lost nothing."),
    (0.11, "Where it was a tenth, ResNet-20 lost 0.4 points of accuracy on CIFAR-10."),
    (
        0.6,
        "Where it was half, ResNet-20 lost 3.5 points of accuracy on CIFAR-10: train longer, or send more.",
    ),
    (
        1.0,
        "Where it was eight tenths, ResNet-20 lost 5.9 points of accuracy on CIFAR-10: train longer, or send "
        "more.",
    ),
)
LOST_AT_ALL = (
    "ResNet-20 lost 0.4 points of accuracy on CIFAR-10 in 9,750 steps, and 3.5 in 1,755 (of your training: "
    "--steps N)."
)
LOST_UNMASKED = (
    "In 1,755 steps without masking, ResNet-20 lost 1.0 points of accuracy on CIFAR-10 at 90 % and 1.4 at "
    "99 %, give or take a point, among 4 workers; among 32, in 1,225 steps, 2.9 at 99 %."
)
LOST_ADAMW = (
    "With AdamW, a transformer of 2.1 M parameters ended 0.7 % above dense training's perplexity at "
    f"{100 * ADAMW:g} % (docs/results/accuracy.md)."
)
SMALLER_RATE = (
    "If the loss rises in the first hundred steps, leave factor_masking=False out, or divide the learning "
    "rate by four (docs/guides/schedules.md)."
)
TRY_FIRST = (
    "Local steps change what is learned: try them on your model first, with the learning rate times the "
    "square root of the number of workers (docs/local-steps.md)."
)
# Bytes of DGC for each compressed entry: u and v; AdamW's 1 / D and last step too; with local steps
# v and where the round began.
KEPT = {
    ("sgd", False): 8,
    ("adamw", False): 16,
    ("adamw", True): 8,
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
    # The simplest that is nearly as fast as any, with ``sparsity``; or that of local steps.
    dgc: Prediction
    sparsity: float
    config: Config  # of DGC in the predictions
    here: tuple[Prediction, ...]  # all methods on this cluster
    below: float | None  # bytes a second between nodes, up to which it pays; None: at none
    whole: float | None  # times as fast as dense, over all steps; None: their number is not known
    memory: int  # bytes that DGC keeps on each worker
    line: str  # of Python to paste
    without: float | None = None  # as ``whole``; None: the line has no local steps

    @property
    def faster(self) -> float:
        """How many times as fast as dense a step is."""
        return self.dense.step_seconds / self.dgc.step_seconds

    @property
    def rounds(self) -> bool:
        """Whether local steps are advised."""
        return self.dgc.method.kind == "local"


def advise(
    shapes: tuple[Shape, ...],
    cluster: Cluster,
    compute: float,
    config: Config | None = None,
    local: Local = CPU,
    overlap: Overlap = True,
    steps: int | None = None,
    optimizer: Optimizer = "sgd",
) -> Advice:
    """Whether DGC pays here, up to which bandwidth, and with which exchange and sparsity.

    It is compared with the dense exchanges that Horovod and DistributedDataParallel offer.

    Args:
        shapes, cluster, compute, local, overlap: as for :func:`predict`.
        config: of DGC; None: the least sparsity of ``SPARSITIES`` that is nearly as fast as any.
        steps: of the training: of those, without ones at which an entry waits for too much of it.
        optimizer: with AdamW, none above ``ADAMW`` is chosen, and dense steps come before it; or
            local steps, where they make the whole training faster and no config is given.

    Raises:
        ValueError: ``compute`` is not a finite number > 0.
    """
    if not 0 < compute < float("inf"):
        raise ValueError(f"compute must be a number of seconds > 0, got {compute!r}")

    def step(on: Cluster, method: Method, with_config: Config = DGC) -> Prediction:
        return predict(shapes, on, method, compute, with_config, local, overlap)

    base = config or DGC
    sparsities = bearable(steps, optimizer) if config is None else (config.sparsity_at(0),)

    def mean(on: Cluster, method: Method, sparsity: float) -> float:
        """Seconds of a step of DGC, on average over the whole training."""
        times = _steps_of(sparsity, steps, optimizer)
        of = {s: step(on, method, replace(base, sparsity=s)).step_seconds for s in times}
        return sum(times[s] * of[s] for s in times) / times.total()

    def best(on: Cluster) -> tuple[Prediction, Prediction, float, Prediction]:
        """The fastest dense exchange, the simplest of DGC's that is nearly as fast as any, its
        sparsity, and what is advised: this DGC, or local steps.
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
        advised, rounds = dgc, step(on, Method("allgather", "local"))
        if optimizer == "adamw" and config is None:
            advised = rounds if rounds.step_seconds < mean(on, dgc.method, sparsity) else dgc
        return min(dense, key=lambda p: p.step_seconds), dgc, sparsity, advised

    def pays(bandwidth: float) -> bool:
        dense, _, _, advised = best(
            replace(cluster, between=replace(cluster.between, bandwidth=bandwidth))
        )
        return dense.step_seconds >= WORTH * advised.step_seconds

    dense, dgc, sparsity, advised = best(cluster)
    chosen, rounds = replace(base, sparsity=sparsity), advised.method.kind == "local"
    without = dense.step_seconds / mean(cluster, dgc.method, sparsity)
    whole = dense.step_seconds / advised.step_seconds if rounds else without
    text = _schedule(sparsity, steps, optimizer)[0]
    return Advice(
        cluster,
        compute,
        local,
        steps,
        optimizer,
        pays(cluster.between.bandwidth),
        dense,
        advised,
        sparsity,
        chosen,
        here=tuple(step(cluster, m, chosen) for m in methods(cluster)),
        below=_pays_up_to(pays, cluster.between.bandwidth) if cluster.nodes > 1 else None,
        whole=whole if steps else None,
        memory=KEPT[optimizer, rounds] * sum(b.numel for b in buckets(shapes, chosen) if b.sizes),
        line=_line(text, chosen, advised.method, optimizer),
        without=without if rounds else None,
    )


def bearable(steps: int | None, optimizer: Optimizer = "sgd") -> tuple[float, ...]:
    """The sparsities that a training of so many steps bears; at least the smallest."""
    most = ADAMW if optimizer == "adamw" else 1.0
    return tuple(
        s
        for s in SPARSITIES
        if s == SPARSITIES[0] or (s <= most and (steps is None or 1 / (1 - s) <= MOST_WAIT * steps))
    )


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
    end = "" if sparsity == 0.999 else f", end={sparsity:.15g}"
    schedule = warmup(WARMUP, stages=4, steps_per_epoch=steps or 1, end=sparsity)
    if steps is None:
        return f"dgc.warmup(epochs=4, steps_per_epoch=len(loader){end})", schedule
    return f"dgc.warmup({WARMUP}, stages=4, steps_per_epoch={steps}{end})", schedule


@cache
def _steps_of(sparsity: float, steps: int | None, optimizer: Optimizer) -> Counter[float]:
    """How many steps of a training have which sparsity."""
    return Counter(map(_schedule(sparsity, steps, optimizer)[1], range(steps or 10 * DENSE)))


def _line(schedule: str, config: Config, method: Method, optimizer: Optimizer) -> str:
    """The line of Python to paste."""
    if method.kind == "local":
        return f"dgc.Config(0.0, local_steps={ROUNDS.local_steps}, value_bits={ROUNDS.value_bits})"
    options = [f"sparsity={schedule}"]
    if config.sparsity_at(0) <= UNMASKED or optimizer == "adamw":
        options.append("factor_masking=False")
    if config.value_bits != 16:
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
    does = "pays" if advice.faster >= MUCH else "pays a little" if advice.pays else "does not pay"
    wanted = "" if advice.pays else f" (it pays from {WORTH} times on)"
    how = " with local steps" if advice.rounds else ""
    return (
        f"DGC {does}: a step takes {duration(advice.dgc.step_seconds)}{how} instead of "
        f"{duration(advice.dense.step_seconds)} with {advice.dense.method}, the best of Horovod and DDP: "
        f"{advice.faster:.3g} times as fast{wanted}."
    )


def fits(advice: Advice) -> str:
    """For how many steps the line is."""
    if advice.steps:
        return f"{advice.steps:,} steps"
    if advice.rounds:
        return "any number of steps"
    if advice.optimizer == "adamw":
        return f"about {10 * DENSE:,} steps"
    return f"{math.ceil(1 / (1 - advice.sparsity) / MOST_WAIT - 1e-6):,} steps or more"


def notes(advice: Advice) -> dict[str, str]:
    """What else there is to say, by headings."""
    device = (
        "CPU core (--worker gpu: on a GPU)"
        if advice.local == CPU
        else "GPU (its cost is an estimate)"
    )
    assumes = f"{duration(advice.compute)} of computing a step, and compressing on a {device}."
    if not advice.pays:
        return {"Network": _network(advice), "Assumes": assumes}
    return {
        "Saves": _saves(advice),
        "Network": _network(advice),
        "Memory": f"{advice.memory / 1e9:.3g} GB on each worker, beside the optimizer's own: "
        f"{KEPT[advice.optimizer, advice.rounds]} bytes for each compressed entry.",
        "Assumes": assumes,
        "Accuracy": _accuracy(advice),
        "Untried": _untried(advice),
    }


def _saves(advice: Advice) -> str:
    dense = advice.dense.step_seconds
    after, among, without = " after the warm-up", ", the warm-up among them", ""
    if advice.without is not None:
        after, among = "", ""
        without = f" Without local steps the training is {advice.without:.3g} times as fast: a tenth is dense."
    if advice.steps is None or advice.whole is None:
        return f"{duration(dense - advice.dgc.step_seconds)} in each step{after} (of all steps: --steps N).{without}"
    poor = "" if advice.whole >= WORTH else " For this training it is not worth it."
    return (
        f"{duration(advice.steps * dense * (1 - 1 / advice.whole))} of {duration(advice.steps * dense)} over all "
        f"{advice.steps:,} steps{among}: {advice.whole:.3g} times as fast.{poor}{without}"
    )


def _network(advice: Advice) -> str:
    if advice.cluster.nodes == 1:
        return "All workers are in one node, where no network between nodes plays a part."
    if advice.below is None:
        return "DGC does not pay at any lower bandwidth between nodes either."
    if advice.below >= FASTEST:
        return "DGC pays at every bandwidth between nodes, up to 10 Tbit/s."
    return f"DGC pays up to {bits(advice.below)} between nodes, and not above."


def _accuracy(advice: Advice) -> str:
    """What it may cost: how long an entry waits to be sent, and what as long a wait has cost."""
    if advice.rounds:
        return TRY_FIRST
    wait, said = 1 / (1 - advice.sparsity), []
    share = min(1.0, wait / advice.steps) if advice.steps else None
    of_yours = f" of your {advice.steps:,}, {100 * share:.3g} % of the training" if share else ""
    said.append(f"At {100 * advice.sparsity:g} % an entry waits about {wait:,.0f} steps{of_yours}.")
    if advice.optimizer == "adamw":
        said.append(LOST_ADAMW)
    elif advice.sparsity <= UNMASKED:
        said += [LOST_UNMASKED, SMALLER_RATE]
    else:
        said.append(next(cost for most, cost in LOST if share <= most) if share else LOST_AT_ALL)
    if advice.dgc.method.exchange.exchange == "reduce":
        said.append(
            'exchange="reduce" applies fewer entries a step than an all-gather of many workers, and may learn '
            "less: compare (docs/tuning.md)."
        )
    return " ".join(said)


def _untried(advice: Advice) -> str:
    """What of the advice nobody has measured (docs/limits.md)."""
    cluster, exchange = advice.cluster, advice.dgc.method.exchange
    adamw, crowd = (
        advice.optimizer == "adamw" and not advice.rounds,
        exchange.contributors(cluster.nodes, cluster.gpus) > CROWD,
    )
    untried = {
        "NCCL between several GPUs": advice.local != CPU,
        f"more than {HOSTS} hosts": cluster.nodes > HOSTS,
        f"a network above {bits(GIGABIT)}": cluster.between.bandwidth > GIGABIT,
        f"AdamW above {100 * ADAMW:g} %, or beyond that transformer and 4 workers": adamw,
        f'exchange="reduce" with AdamW, with hierarchical=True, or with more than {CROWD} workers': exchange.exchange
        == "reduce"
        and (adamw or exchange.hierarchical or crowd),
    }
    return (
        ", ".join(
            ["This model on this cluster", *(what for what, applies in untried.items() if applies)]
        )
        + "."
    )


def bits(bandwidth: float) -> str:
    """A bandwidth in bytes a second, in words."""
    return (
        f"{bandwidth / 1.25e8:.3g} Gbit/s"
        if bandwidth >= 1.25e8
        else f"{bandwidth / 1.25e5:.3g} Mbit/s"
    )


def duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} hours"
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
