"""How long a step takes, for a model on a cluster, by every way to add up gradients.

The predictions combine the compute time of one worker with a model of the exchange (``cost.py``),
as the paper's section 5 does after Wen et al., "TernGrad" (2017): compute is measured or given, and
communication is computed.

A step is a forward pass, of a third of the compute time, and a backward pass that completes the
gradients of the last layers first; a bucket's exchange begins when its gradients are complete, its
entries have been selected, and the bucket before it has been exchanged. Every weight is assumed to
take an equal share of the backward pass: near the truth where layers are made to cost alike, as in
residual networks and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from dgc.compression.sizes import (
    FLOAT32,
    WIDE,
    Sizes,
    chunk_bytes,
    is_rounded,
    returned_bits,
    sends_dense,
    summed_bytes,
)
from dgc.config import Config
from dgc.plan import cost
from dgc.plan.cost import Cluster, Exchange, Link
from dgc.plan.models import RANK, PlannedBucket, Shape, buckets, dense_buckets

BACKWARD = 2 / 3  # of the compute time: it computes two products for each one of the forward pass
LARGEST = 65_536  # workers
# What is exchanged during the backward pass: all, nothing, or by dense methods alone.
Overlap = bool | Literal["dense"]

# Latencies of TCP on Ethernet and of verbs on InfiniBand (HDR, 200 Gbit/s): orders of magnitude.
# Measure yours.
NETWORKS = {
    "1gbit": Link(50e-6, 0.125e9),
    "10gbit": Link(30e-6, 1.25e9),
    "25gbit": Link(20e-6, 3.125e9),
    "100gbit": Link(10e-6, 12.5e9),
    "infiniband": Link(2e-6, 25e9),
}
INSIDE = {"pcie": Link(10e-6, 12e9), "nvlink": Link(5e-6, 300e9)}  # PCIe 3.0 x16; NVLink 3


@dataclass(frozen=True)
class Local:
    """A worker's own work, in seconds.

    Args:
        compress: for each entry of a compressed parameter: accumulate, select, take, encode, write
            the update. Default: the fused loops on a CPU core
            (benchmarks/results/compress-1core.json, through p.grad).
        receive: for each entry that it receives, its own among them: check, decode, add.
            Default: on a CPU core (benchmarks/results/receive.json).
        convert: for each entry of a dense sum in float16: to round and to add. 0 on GPUs. Default:
            DistributedDataParallel's over gloo, of a CPU core (fitted to a ResNet-50's at 1 Gbit/s;
            "convert" in benchmarks/results/plan.json). Horovod's takes forty times as long there
            ("horovod_convert").
        start: for each bucket, until its exchange begins: what the library needs to agree on it.
        round: for each entry of a dense sum that DGC rounds (``Config(value_bits=...)``): to round
            and to add. Default: on a CPU core (benchmarks/results/rounded.json).
        low_rank: for each entry of PowerSGD, rank 4: two products, and to make P orthogonal.
            Default: torch's hook on a CPU core (benchmarks/results/network-1gbit.json: a
            ResNet-50's exchange of 566 ms without its 19 ms on the wire, by four workers on two
            cores).
    """

    compress: float = 1e-9
    receive: float = 4.6e-9
    convert: float = 0.55e-9
    start: float = 0.0
    round: float = 16e-9
    low_rank: float = 10.7e-9


DGC, CPU = Config(0.999), Local()
ROUNDS = Config(0.0, local_steps=7, value_bits=2)  # of the table's local steps
# What a worker does for exchange="reduce" beside compressing, over ``Local.compress``: for each
# entry of the gradient, and for each of its own region. On a CPU core, 4 to 64 workers
# (benchmarks/results/owners.json).
REDUCE, OWNED = 0.2, 3.7
# What a round of local steps does for each entry beside rounding or compressing it: to copy where it
# starts, to take the drift and to apply the mean. An estimate: by torch operations on a CPU core
# that is 14 times a copy in memory, and ``Local.compress`` 4 times.
DRIFT = 3.3
# A GPU's are an estimate: the 36 bytes an entry that the loops move, at a memory of 1 TB/s. An H100
# takes as long for a ResNet-50's tensors, and a quarter of it for one large one
# (benchmarks/results/gpu.json). To round moves some 160, PowerSGD some 44.
LOCAL = {
    "cpu": CPU,
    "gpu": Local(compress=0.05e-9, receive=0.5e-9, round=0.2e-9, convert=0.0, low_rank=0.05e-9),
}


@dataclass(frozen=True)
class Method:
    """A way to add up gradients."""

    name: str  # in cost.DENSE, or in cost.EXCHANGES
    kind: str  # float32, float16, powersgd, dgc, or local

    @property
    def exchange(self) -> Exchange:
        """How compressed gradients are exchanged."""
        return cost.EXCHANGES[self.name]

    def __str__(self) -> str:
        if self.kind == "powersgd":
            return f"PowerSGD, rank {RANK}"
        if self.kind == "local":
            return f"local steps, H={ROUNDS.local_steps}"
        if self.kind == "dgc":
            return "DGC " + self.name.replace("allgather", "all-gather")
        return f"{self.name.replace('ring', 'dense')} {self.kind}"


GATHER = Method("allgather", "dgc")
MAIN = (
    Method("ring", "float32"),
    Method("ring", "float16"),
    Method("ring", "powersgd"),
    GATHER,
    Method("reduce", "dgc"),
    Method("allgather", "local"),
)


@dataclass(frozen=True)
class Prediction:
    """The prediction of one step; with local steps, of a round's H-th part."""

    method: Method
    step_seconds: float
    efficiency: float  # compute time / step time: of as many single workers
    exchange_seconds: float  # all messages, hidden behind the backward pass or not
    port_bytes: float  # over the busiest port of a node, in one direction
    message_bytes: int  # that a worker contributes, whatever the number of workers


def methods(cluster: Cluster) -> list[Method]:
    """The methods that differ on this cluster, those of ``MAIN`` first."""
    if cluster.gpus == 1 or cluster.nodes == 1:
        return list(MAIN)
    return [
        *MAIN,
        Method("hierarchical ring", "float32"),
        Method("hierarchical ring", "float16"),
        Method("hierarchical", "dgc"),
        Method("hierarchical reduce", "dgc"),
    ]


def predict(
    shapes: tuple[Shape, ...],
    cluster: Cluster,
    method: Method,
    compute: float,
    config: Config = DGC,
    local: Local = CPU,
    overlap: Overlap = True,
) -> Prediction:
    """The time of one step.

    Args:
        shapes: of the parameters, in forward order.
        cluster: on which.
        method: by which.
        compute: seconds of a worker's forward and backward pass.
        config: of DGC. Of kind "local" ``ROUNDS`` stands for one without local steps.
        local: what a worker does beside it.
        overlap: whether exchanges begin during the backward pass; "dense": only those of dense
            methods do, as where gradients are clipped by their norm or scaled by a GradScaler.
    """
    if cluster.workers == 1:
        return Prediction(method, compute, 1.0, 0.0, 0.0, 0)
    is_dgc = method.kind in ("dgc", "local")
    if method.kind == "local" and config.local_steps is None:
        config = ROUNDS
    waits = overlap == "dense" or config.clips_globally or config.local_steps is not None
    late = not overlap or (is_dgc and waits)
    rounds = is_dgc and config.local_steps is not None
    steps = config.local_steps_at(0) if rounds else 1  # for each exchange
    forward = compute if late else compute * (1 - BACKWARD)
    worked = received = exchanged = idle = 0.0  # idle: when the network is free again
    message, sent = 0, list[cost.Round]()
    for bucket in buckets(shapes, config) if is_dgc else dense_buckets(shapes):
        part = _part(bucket, cluster, method, config, local)
        worked += part.worked
        received += part.received
        idle = max(idle, forward + (compute - forward) * bucket.ready + worked) + part.seconds
        exchanged += part.seconds
        message += part.own
        sent += part.rounds
    step = compute + (max(idle - compute, worked) + received) / steps
    efficiency = compute / step if step else 0.0
    port = cost.port_bytes(sent) / steps
    return Prediction(method, step, efficiency, exchanged / steps, port, message // steps)


class _Part(NamedTuple):
    """A bucket's part of a step, on one worker."""

    rounds: cost.Rounds
    seconds: float  # of its exchange
    own: int  # bytes that the worker contributes
    worked: float = 0.0  # seconds of compressing
    received: float = 0.0  # seconds of decoding


def _part(
    bucket: PlannedBucket, cluster: Cluster, method: Method, config: Config, local: Local
) -> _Part:
    n, g, numel, sizes = cluster.nodes, cluster.gpus, bucket.numel, bucket.sizes
    worked = received = added = 0.0  # added: to the seconds on the wire
    if method.kind == "powersgd":
        factors = [FLOAT32 * entries for entries in bucket.low_rank if entries]
        rounds = tuple(each for nbytes in factors for each in cost.ring(nbytes, n, g))
        own = sum(factors)
        worked = local.low_rank * numel
    elif method.kind in ("float32", "float16"):
        own = numel * (2 if method.kind == "float16" else FLOAT32)
        rounds = cost.DENSE[method.name](own, n, g)
        added = local.convert * numel * (method.kind == "float16")
    elif sizes is None or config.sparsity_at(0) == 0:
        # As before the first compressed step, which with local steps is the first of all.
        exact = config.sparsity_at(0) == 0 and config.local_steps is None
        summed = Sizes(FLOAT32 * numel, numel, bits=16 if exact else config.value_bits)
        own = summed_bytes(summed, n * g)
        rounds = cost.dense_sum(summed, n, g)
        rounded = is_rounded(summed, n * g)
        added = local.round * numel * rounded
        if sizes is not None and rounded:  # all entries are what a round of local steps sends
            part = chunk_bytes(numel, n * g, config.value_bits)
            total = chunk_bytes(numel, n * g, returned_bits(config.value_bits))
            rounds, own = cost.by_owners(n, g, part, total), n * g * part + total
    else:
        exchange, peers = method.exchange, method.exchange.contributors(n, g)
        rounds = cost.exchange(method.name, sizes, n, g)
        worked = local.compress * numel
        if sends_dense(exchange.exchange, sizes, peers):
            own = summed_bytes(sizes, peers)
            added = local.round * numel * is_rounded(sizes, peers)
        elif exchange.exchange == "reduce":
            to_owner, to_all = exchange.messages(sizes, peers)
            own = peers * to_owner + to_all
            received = local.receive * sizes.slots * 2 * WIDE
            received += local.compress * numel * (REDUCE + OWNED / peers)
        else:
            own = sizes.message
            received = local.receive * sizes.slots * peers
    if config.local_steps is not None and method.kind in ("dgc", "local"):
        received += DRIFT * local.compress * numel  # hidden behind no exchange
    seconds = cost.seconds(rounds, cluster) + added + (local.start if rounds else 0.0)
    return _Part(rounds, seconds, own, worked, received)


def by_workers(cluster: Cluster) -> list[Cluster]:
    """Clusters of the same kind, with powers of two of nodes, up to 65,536 workers; and the cluster
    itself.
    """
    nodes = {1 << i for i in range((LARGEST // cluster.gpus).bit_length())}
    return [replace(cluster, nodes=n) for n in sorted({*nodes, cluster.nodes})]
