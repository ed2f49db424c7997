"""How long a step takes, for a model on a cluster, by every way to add up gradients.

The predictions combine the compute time of one worker with a model of the exchange (``cost.py``), as the paper's
section 5 does after Wen et al., "TernGrad" (2017): compute is measured or given, and communication is computed.

A step is a forward pass, of a third of the compute time, and a backward pass that completes the gradients of the last
layers first; a bucket's exchange begins when its gradients are complete, its entries have been selected, and the bucket
before it has been exchanged. Every weight is assumed to take an equal share of the backward pass: near the truth where
layers are made to cost alike, as in residual networks and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from dgc.compression import sizes as messages
from dgc.config import Config
from dgc.plan import cost
from dgc.plan.buckets import PlannedBucket, buckets, dense_buckets
from dgc.plan.cost import Cluster, Exchange, Link
from dgc.plan.models import Shape

BACKWARD = 2 / 3  # of the compute time: it computes two products for each one of the forward pass
LARGEST = 65_536  # workers
Overlap = bool | Literal["dense"]  # what is exchanged during the backward pass: all, nothing, or by dense methods alone

# Latencies of TCP on Ethernet and of verbs on InfiniBand (HDR, 200 Gbit/s): orders of magnitude. Measure yours.
NETWORKS = {"1gbit": Link(50e-6, 0.125e9), "10gbit": Link(30e-6, 1.25e9), "25gbit": Link(20e-6, 3.125e9),
            "100gbit": Link(10e-6, 12.5e9), "infiniband": Link(2e-6, 25e9)}
INSIDE = {"pcie": Link(10e-6, 12e9), "nvlink": Link(5e-6, 300e9)}  # PCIe 3.0 x16; NVLink 3


@dataclass(frozen=True)
class Local:
    """A worker's own work, in seconds.

    Args:
        compress: for each entry of a compressed parameter: accumulate, select, take, encode, write the update.
            Default: the fused loops on a CPU core (benchmarks/results/compress-1core.json, through p.grad).
        receive: for each entry that it receives, its own among them: check, decode, add.
            Default: on a CPU core (benchmarks/results/receive.json).
        convert: for each entry of a dense sum in float16: to round and to add. 0 on GPUs.
            Default: DistributedDataParallel's over gloo, of a CPU core (fitted to a ResNet-50's at 1 Gbit/s; "convert"
            in benchmarks/results/plan.json). Horovod's takes forty times as long there ("horovod_convert").
        start: for each bucket, until its exchange begins: what the library needs to agree on it.
        round: for each entry of a dense sum that DGC rounds (``Config(value_bits=8)`` or fewer): to round and to add.
            Default: on a CPU core (benchmarks/results/rounded.json).
    """

    compress: float = 1e-9
    receive: float = 4.6e-9
    convert: float = 0.55e-9
    start: float = 0.0
    round: float = 16e-9


DGC, CPU = Config(), Local()
# What a worker does for exchange="reduce" beside compressing, over ``Local.compress``: for each entry of the gradient,
# and for each of its own region. On a CPU core, 4 to 64 workers (benchmarks/results/owners.json).
REDUCE, OWNED = 0.2, 3.7
# A GPU's are an estimate: the 36 bytes an entry that the loops move, at a memory of 1 TB/s. An H100 takes as long for a
# ResNet-50's tensors, and a quarter of it for one large one (benchmarks/results/gpu.json). To round moves some 160.
LOCAL = {"cpu": CPU, "gpu": Local(compress=0.05e-9, receive=0.5e-9, round=0.2e-9, convert=0.0)}


class Method(NamedTuple):
    """A way to add up gradients."""

    name: str  # in cost.DENSE, or in cost.EXCHANGES
    kind: str  # float32, float16, or dgc

    @property
    def exchange(self) -> Exchange:
        """How compressed gradients are exchanged."""
        return cost.EXCHANGES[self.name]

    def __str__(self) -> str:
        if self.kind == "dgc":
            return f"DGC, {self.name}"
        return f"{self.name}, {self.kind}"


class Prediction(NamedTuple):
    """The prediction of one step."""

    method: Method
    step_seconds: float
    efficiency: float  # compute time / step time: of as many single workers
    exchange_seconds: float  # all messages, hidden behind the backward pass or not
    port_bytes: float  # over the busiest port of a node, in one direction
    message_bytes: int  # that a worker contributes, whatever the number of workers


def methods(cluster: Cluster) -> list[Method]:
    """The methods that differ on this cluster."""
    flat = cluster.gpus == 1 or cluster.nodes == 1
    return [*(Method(name, kind) for name in cost.DENSE if not (flat and name == "hierarchical ring")
              for kind in ("float32", "float16")),
            *(Method(name, "dgc") for name, way in cost.EXCHANGES.items() if not (flat and way.hierarchical))]


def predict(shapes: tuple[Shape, ...], cluster: Cluster, method: Method, compute: float, config: Config = DGC,
            local: Local = CPU, overlap: Overlap = True, backward: float = BACKWARD) -> Prediction:
    """The time of one step.

    Args:
        shapes: of the parameters, in forward order.
        cluster: on which.
        method: by which.
        compute: seconds of a worker's forward and backward pass.
        config: of DGC.
        local: what a worker does beside it.
        overlap: whether exchanges begin during the backward pass; "dense": only those of dense methods do, as where
            gradients are clipped by their norm or scaled by a GradScaler.
        backward: the share of ``compute`` that is the backward pass.
    """
    late = method.kind == "dgc" and (config.clips_globally or overlap == "dense")
    forward = compute * (1 - backward) if overlap and not late else compute
    worked = idle = exchanged = received = 0.0  # idle: when the network is free again
    message, sent = 0, list[cost.Round]()
    known: dict[PlannedBucket, _Part] = {}  # many layers are alike
    for bucket in buckets(shapes, config) if method.kind == "dgc" else dense_buckets(shapes):
        alike = bucket._replace(ready=0.0)
        if (part := known.get(alike)) is None:
            part = known[alike] = _part(bucket, cluster, method, config, local)
        worked, received = worked + part.worked, received + part.received
        idle = max(idle, forward + (compute - forward) * bucket.ready + worked) + part.seconds
        exchanged, message = exchanged + part.seconds, message + part.own
        sent += part.rounds
    if cluster.nodes * cluster.gpus == 1:
        return Prediction(method, compute, 1.0, 0.0, 0.0, 0)
    step = max(idle, compute + worked) + received
    return Prediction(method, step, compute / step if step else 0.0, exchanged, cost.port_bytes(sent), message)


class _Part(NamedTuple):
    """A bucket's part of a step, on one worker."""

    rounds: cost.Rounds
    seconds: float  # of its exchange
    own: int  # bytes that the worker contributes
    worked: float = 0.0  # seconds of compressing
    received: float = 0.0  # seconds of decoding


def _part(bucket: PlannedBucket, cluster: Cluster, method: Method, config: Config, local: Local) -> _Part:
    n, g, worked, received = cluster.nodes, cluster.gpus, 0.0, 0.0
    if method.kind != "dgc":
        width = 2 if method.kind == "float16" else messages.FLOAT32
        own = width * bucket.numel
        rounds = cost.DENSE[method.name](own, n, g)
        seconds = cost.seconds(rounds, cluster) + local.convert * bucket.numel * (width == 2)
    elif bucket.sizes is None:
        bits = config.value_bits if config.sparsity_at(0) else 32  # before a compressed step sums are exact
        sizes = messages.Sizes(messages.FLOAT32 * bucket.numel, bucket.numel, bits=bits)
        rounds, own = cost.dense_sum(sizes, n, g), messages.summed_bytes(sizes, n * g)
        seconds = cost.seconds(rounds, cluster) + local.round * bucket.numel * messages.rounds(sizes, n * g)
    else:
        rounds = cost.exchange(method.name, bucket.sizes, n, g)
        contributors = method.exchange.contributors(n, g)
        seconds = cost.seconds(rounds, cluster)
        dense = messages.sends_dense(method.exchange.exchange, bucket.sizes, contributors)
        own = (messages.summed_bytes(bucket.sizes, contributors) if dense
               else method.exchange.own_bytes(bucket.sizes, n, g))
        worked = local.compress * bucket.numel
        if dense:
            seconds += local.round * bucket.numel * messages.rounds(bucket.sizes, contributors)
        else:
            received = local.receive * bucket.slots * _messages(method.exchange, n, g)
            if method.exchange.exchange == "reduce":
                received += local.compress * bucket.numel * (REDUCE + OWNED / contributors)
    return _Part(rounds, seconds + (local.start if rounds else 0.0), own, worked, received)


def _messages(exchange: Exchange, n: int, g: int) -> int:
    """How many messages a worker decodes."""
    if exchange.exchange == "reduce":
        return 2 * messages.WIDE
    return n if exchange.hierarchical else n * g


def of_size(cluster: Cluster, workers: int) -> Cluster:
    """A cluster of the same kind with so many workers: whole nodes, or a part of one."""
    gpus = min(workers, cluster.gpus)
    return replace(cluster, nodes=workers // gpus, gpus=gpus)


def sizes(cluster: Cluster) -> list[int]:
    """Numbers of workers to look at: powers of two of one node's, up to 65,536, and the cluster's own."""
    inside = [1 << i for i in range(cluster.gpus.bit_length()) if 1 << i < cluster.gpus]
    nodes = range((LARGEST // cluster.gpus).bit_length())
    return sorted({*inside, *(cluster.gpus << i for i in nodes), cluster.workers})
