"""DGC beside the other ways to exchange gradients: each method by name, with its settings.

Which of the settings are the paper's, and which are ours, is in benchmarks/results/NOTES.md.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dgc
from dgc.config import ExchangeName, Schedule
from dgc.schedule import WARMUP
from dgc.transport import lockstep

from .atomo import Atomo
from .casts import Cast
from .demo import DeMo
from .dense import Dense
from .diloco import DiLoCo
from .efsignsgd import EFSignSGD
from .entry import Entry
from .exchange import Bring, Compressed, Exchanging, Method
from .parameter_server import ParameterServer
from .powersgd import PowerSGD, TorchPowerSGD
from .qsgd import QSGD
from .signsgd import SignSGD
from .stale import Stale
from .terngrad import TernGrad


def powersgd(world: Any, seed: int, rank: int) -> Method:
    """torch's own, where torch.distributed is what ranks exchange over."""
    hook = torch.distributed.is_initialized() and lockstep.current() is None
    return (TorchPowerSGD if hook else PowerSGD)(world, seed, rank)


def dropping(schedule: float | Schedule) -> dgc.Config:
    """Largest entries, and what is not sent is kept; 99 % as in the paper, from the first step on."""
    return dgc.Config(0.99, momentum_correction=False, factor_masking=False)


def deep(
    schedule: float | Schedule,
    exchange: ExchangeName = "allgather",
    masking: bool = True,
    value_bits: int = 16,
) -> dgc.Config:
    return dgc.Config(schedule, exchange=exchange, factor_masking=masking, value_bits=value_bits)


# First step -> H of local steps, as in the recipe.
STAGES = {0: 1, 227: 3, 908: 5, 1816: 12, 2724: 36}


def local(schedule: float | Schedule) -> dgc.Config:
    """2 bits, 1/16 of the entries, after ever more steps; all entries, and after each step, at first."""
    return dgc.Config(
        dgc.piecewise({0: 0.0, 227: 0.9375}),
        value_bits=2,
        local_steps=lambda step: [h for first, h in STAGES.items() if step >= first][-1],
    )


def local_steps(title: str, paper: str, every: int, **outer: float) -> Entry:
    """Workers train alone, and then average how far they have gone."""
    return Entry(
        f"{title}, H = {every}",
        "local steps",
        "allreduce",
        paper,
        partial(DiLoCo, local_steps=every, **outer),
        every=every,
        whole=True,
        clips_own=True,
    )


COLLECTIVES: dict[ExchangeName, Bring] = {"allgather": "allgather", "reduce": "alltoall"}
METHODS = {
    "dense": Entry("dense", "dense", "allreduce", "", Dense, whole=True),
    "fp16": Entry("fp16", "cast", "allreduce", "", partial(Cast, dtype=torch.float16), whole=True),
    "bf16": Entry("bf16", "cast", "allreduce", "", partial(Cast, dtype=torch.bfloat16), whole=True),
    "qsgd": Entry("QSGD, 4 bits", "quantised", "allgather", "Alistarh et al. 2017", QSGD),
    "terngrad": Entry("TernGrad", "quantised", "allgather", "Wen et al. 2017", TernGrad),
    "signsgd": Entry(
        "signSGD, majority vote",
        "signs",
        "allgather",
        "Bernstein et al. 2018",
        SignSGD,
        momentum=0,
        lr=1e-3,
        weight_decay=0.1,
        clips_own=True,
    ),
    "ef-signsgd": Entry("EF-signSGD", "signs", "allgather", "Karimireddy et al. 2019", EFSignSGD),
    "atomo": Entry("ATOMO, s = 3", "low rank", "allgather", "Wang et al. 2018", Atomo),
    **{
        f"powersgd-{rank}": Entry(
            f"PowerSGD, rank {rank}",
            "low rank",
            "allreduce",
            "Vogels et al. 2019",
            partial(powersgd, rank=rank),
        )
        for rank in (1, 2, 4)
    },
    "dropping": Entry(
        "gradient dropping, 99 %",
        "sparse",
        "allgather",
        "Aji and Heafield 2017",
        dropping,
        driver=Compressed,
    ),
    "demo": Entry(
        "DeMo, 32 of 64 x 64",
        "sparse",
        "allgather",
        "Peng et al. 2024",
        DeMo,
        momentum=0,
        lr=4e-4,
        clips_own=True,
    ),
    "diloco": local_steps("DiLoCo", "Douillard et al. 2023", DiLoCo.local_steps),
    "diloco-even": local_steps(
        "DiLoCo with an outer rate of 0.1", "", DiLoCo.local_steps, outer_lr=0.1
    ),
    "local-sgd": local_steps(
        "local SGD", "Lin, Stich et al. 2020", 15, outer_lr=1.0, outer_momentum=0.0
    ),
    "dgc-local": Entry(
        "DGC, local steps, 2 bits",
        "DGC",
        "alltoall",
        "",
        local,
        driver=Compressed,
        clips_own=True,
    ),
    **{
        f"dgc-{name}": Entry(
            f"DGC, {name}",
            "DGC",
            collective,
            "Lin et al. 2018",
            partial(deep, exchange=name),
            driver=Compressed,
        )
        for name, collective in COLLECTIVES.items()
    },
    # The schedule that `dgc plan` recommends for a training of 1,000 to 9,999 steps, without masking.
    "dgc-99": Entry(
        "DGC, 99 %, no masking",
        "DGC",
        "allgather",
        "",
        partial(deep, masking=False),
        driver=Compressed,
        sparsity=0.99,
        warmup=WARMUP,
    ),
    "dgc-4bits": Entry(
        "DGC, 4-bit values",
        "DGC",
        "allgather",
        "",
        partial(deep, value_bits=4),
        driver=Compressed,
    ),
    "stale": Entry(
        "dense, one step late", "late", "allreduce", "Li et al. 2018", driver=Stale, whole=True
    ),
    "stale-dgc": Entry("DGC, one step late", "late", "allgather", "", deep, driver=Stale),
    "async": Entry(
        "asynchronous server",
        "late",
        "push and pull",
        "Dean et al. 2012",
        driver=ParameterServer,
        whole=True,
    ),
}
Driver = Exchanging | Compressed | Stale | ParameterServer


def attach(
    name: str,
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, Tensor]],
    seed: int,
    schedule: float | Schedule,
    clip: float | None = None,
    flush: bool = True,
) -> Driver:
    """What drives this optimizer, SGD for most methods, by the method of that name.

    Args:
        schedule: of DGC's sparsity.
        clip: a bound on the norm of the exchanged gradient; with DGC, Config(clip_norm=...). A method that
            ``clips_own`` leaves it to the task.
        flush: whether the last step of the training applies what is pending with DGC and gradient dropping.
    """
    entry = METHODS[name]
    clip = None if entry.clips_own else clip
    if entry.driver is Exchanging:
        return Exchanging(optimizer, entry.make, seed, clip)
    if entry.driver is ParameterServer:
        return ParameterServer(optimizer)
    config = None if entry.make is None else replace(entry.make(schedule), clip_norm=clip)
    return (
        Stale(optimizer, named, config)
        if entry.driver is Stale
        else Compressed(optimizer, named, config, flush)
    )
