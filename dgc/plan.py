"""Whether it pays: a step's time and scaling efficiency for a model on a cluster, by every way to add up gradients.

The predictions combine the compute time of one worker with a model of the exchange (:mod:`dgc.cost`), as the paper's
section 5 does after Wen et al., "TernGrad" (2017): compute is measured or given, and communication is computed.
The bytes of compressed messages are those of :class:`dgc.wire.Layout`, bucket by bucket as the optimizer packs them.

A step is a forward pass, of a third of the compute time, and a backward pass that completes the gradients of the last
layers first; a bucket's exchange begins when its gradients are complete, its entries have been selected, and the bucket
before it has been exchanged. Every weight is assumed to take an equal share of the backward pass: near the truth where
layers are made to cost alike, as in residual networks and transformers.
"""

from __future__ import annotations

import importlib
import operator
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dgc import cost, select
from dgc.config import Config
from dgc.cost import Cluster, Link, Sizes
from dgc.packing import compressible, pack
from dgc.residual import Bucket, residual_dtype
from dgc.wire import Layout

Shape = tuple[int, ...]

BACKWARD = 2 / 3  # of the compute time: it computes two products for each one of the forward pass
WORTH = 1.05  # times faster than dense exchange, from which on compression is said to pay
NEARLY = 1.02  # times the fastest's time: within it the simplest is preferred
SPARSITIES = (0.9, 0.99, 0.999)  # of which the least that is nearly as fast as any is recommended
SHARED = 0.99  # the largest sparsity at which a shared support is named: with more it learns less for certain
OFFERED = ("ring", "hierarchical ring")  # by Horovod and DistributedDataParallel, over gloo, MPI and NCCL
MOST = 1.25e12  # bytes a second between nodes, up to which is looked
NAME = re.compile(r"[\w.]+:[\w.]+")  # module:callable
ACCEPTED = "accepted: a state dict, alone or under 'model' or 'state_dict'"  # as a checkpoint
LARGEST = 65_536  # workers

# Latencies of TCP on Ethernet and of verbs on InfiniBand (HDR, 200 Gbit/s): orders of magnitude. Measure yours.
NETWORKS = {"1gbit": Link(50e-6, 0.125e9), "10gbit": Link(30e-6, 1.25e9), "25gbit": Link(20e-6, 3.125e9),
            "100gbit": Link(10e-6, 12.5e9), "infiniband": Link(2e-6, 25e9)}
INSIDE = {"pcie": Link(10e-6, 12e9), "nvlink": Link(5e-6, 300e9)}  # PCIe 3.0 x16; NVLink 3


# -- models ------------------------------------------------------------------------------------------------------------

def resnet50() -> list[Shape]:
    """ImageNet's: 25,557,032 parameters (torchvision)."""
    convolutions: list[Shape] = [(64, 3, 7, 7)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions += [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convolutions.append((4 * width, inputs, 1, 1))
            inputs = 4 * width
    return [*_normalised(convolutions), (1000, 2048), (1000,)]


def resnet110(last: int = 64) -> list[Shape]:
    """CIFAR-10's, with shortcuts that have no weights: 1,727,962 parameters (recipes/cifar10.py --depth 110). ``last``
    is the number of channels of the last stage.
    """
    convolutions: list[Shape] = [(16, 3, 3, 3)]
    inputs = 16
    for width in (16, 32, last):
        for _ in range(18):
            convolutions += [(width, inputs, 3, 3), (width, width, 3, 3)]
            inputs = width
    return [*_normalised(convolutions), (10, last), (10,)]


def vgg16() -> list[Shape]:
    """138,357,544 parameters (torchvision)."""
    widths = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    return _biased([*((width, inputs, 3, 3) for inputs, width in zip((3, *widths), widths, strict=False)),
                    (4096, 512 * 7 * 7), (4096, 4096), (1000, 4096)])


def alexnet() -> list[Shape]:
    """61,100,840 parameters (torchvision; Krizhevsky 2014)."""
    return _biased([(64, 3, 11, 11), (192, 64, 5, 5), (384, 192, 3, 3), (256, 384, 3, 3), (256, 256, 3, 3),
                    (4096, 256 * 6 * 6), (4096, 4096), (1000, 4096)])


def lstm() -> list[Shape]:
    """The word language model of 2 x 1500 LSTM with the 10,000 words of Penn Treebank and tied weights: 51,034,000
    parameters (recipes/ptb.py --size large).
    """
    layer: list[Shape] = [(6000, 1500), (6000, 1500), (6000,), (6000,)]
    return [(10_000, 1500), (10_000,), *layer, *layer]


def bert_large() -> list[Shape]:
    """bert-large-uncased with its pooler, without a head: 335,141,888 parameters."""
    d, ff = 1024, 4096
    norm: list[Shape] = [(d,), (d,)]
    layer = [*_biased([(d, d)] * 4), *norm, *_biased([(ff, d), (d, ff)]), *norm]
    return [(30_522, d), (512, d), (2, d), *norm, *layer * 24, *_biased([(d, d)])]


def gpt2() -> list[Shape]:
    """The small one, tied: 124,439,808 parameters."""
    d = 768
    norm: list[Shape] = [(d,), (d,)]
    layer = [*norm, (d, 3 * d), (3 * d,), (d, d), (d,), *norm, (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50_257, d), (1024, d), *layer * 12, *norm]


def llama_7b() -> list[Shape]:
    """6,738,415,616 parameters."""
    d, ff = 4096, 11_008
    layer: list[Shape] = [*[(d, d)] * 4, (ff, d), (ff, d), (d, ff), (d,), (d,)]
    return [(32_000, d), *layer * 32, (d,), (32_000, d)]


MODELS = {"resnet50": resnet50, "resnet110": resnet110, "vgg16": vgg16, "alexnet": alexnet, "lstm": lstm,
          "bert-large": bert_large, "gpt2": gpt2, "llama-7b": llama_7b}


def _normalised(convolutions: Iterable[Shape]) -> list[Shape]:
    return [shape for c in convolutions for shape in (c, (c[0],), (c[0],))]


def _biased(weights: Iterable[Shape]) -> list[Shape]:
    return [shape for w in weights for shape in (w, (w[0],))]


class Loaded(NamedTuple):
    """A model: its parameters' shapes in forward order, and itself if it is at hand."""

    name: str
    shapes: tuple[Shape, ...]
    module: nn.Module | None = None
    inputs: tuple[Any, ...] | None = None  # what to call it with
    dtypes: tuple[str, ...] = ("float32",)  # of the parameters, each once

    @property
    def caveat(self) -> str:
        """What a count of bytes leaves out; nothing where it is exact."""
        return "" if self.dtypes == ("float32",) else (
            f"Bytes are those of float32 parameters; those of {self.name} are {' and '.join(self.dtypes)}.")

    @property
    def numel(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)


def load(model: str) -> Loaded:
    """Finds a model.

    Args:
        model: a name in ``MODELS``; ``module:callable``, which returns a ``torch.nn.Module``, or that and a tuple of
            what to call it with; or a file with a state dict, alone or under ``model`` or ``state_dict``.

    Raises:
        ValueError: it is none of them, or has no parameters to train.
        TheirError: by the module or the callable.
    """
    if model in MODELS:
        return Loaded(model, tuple(MODELS[model]()))
    if Path(model).is_file() and not model.endswith(".py"):
        tensors = _checkpoint(model)
        return Loaded(model, tuple(tuple(t.shape) for t in tensors), dtypes=_dtypes(tensors))
    if not NAME.fullmatch(model):
        raise ValueError(f"model is {model!r}; accepted: {', '.join(MODELS)}, module:callable, or a checkpoint's file")
    found = find(model)
    with theirs():
        made = found()
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (inputs is None or isinstance(inputs, tuple)):
        raise ValueError(f"model is {model!r}, which returned a {type(made).__name__}; accepted: a torch.nn.Module, or "
                         "that and a tuple of what to call it with")
    trained = [p for p in module.parameters() if p.requires_grad]
    loaded = Loaded(model, tuple(tuple(p.shape) for p in trained), module, inputs, _dtypes(trained))
    if not loaded.numel:
        raise ValueError(f"model is {model!r}, which has no parameters to train")
    return loaded


def find(name: str) -> Callable[..., Any]:
    """What ``module:name`` means, with modules of the current folder.

    Raises:
        ValueError: there is none, or it cannot be called.
        TheirError: by the module.
    """
    module, _, attributes = name.partition(":")
    here = os.getcwd()  # which the module may change
    sys.path.insert(0, here)
    try:
        with theirs():
            imported = importlib.import_module(module)
        found = operator.attrgetter(attributes)(imported)
    except AttributeError as error:
        raise ValueError(f"{name!r}; {error}") from None
    except TheirError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{module}.".startswith(f"{cause.name}."):  # it, or its package
            raise ValueError(f"{name!r}; {cause}") from None
        raise
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise ValueError(f"{name!r} is a {type(found).__name__}; accepted: what can be called")
    return found


class TheirError(Exception):
    """What the user's own code raised, and where."""


@contextmanager
def theirs() -> Iterator[None]:
    """Around the user's own code."""
    here = os.getcwd()
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [f for f in frames if f.filename.startswith(here) and "site-packages" not in f.filename]
        place = "".join(f" ({f.filename.removeprefix(here + os.sep)}, line {f.lineno}, in {f.name})"
                        for f in (own or frames)[-1:])
        raise TheirError(f"{type(error).__name__}: {error}{place}") from error


def _dtypes(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    return tuple(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))


def _checkpoint(file: str) -> list[torch.Tensor]:
    """The parameters in it: what is not a number with a fraction, or a running statistic, is none."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling meets
        raise ValueError(f"model is {file!r}, which torch.load(weights_only=True) does not read; {ACCEPTED}. It says: "
                         f"{(str(error).splitlines() or [type(error).__name__])[0]}") from None
    for key in ("model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)} if isinstance(
        state, dict) else {}
    kept = {name: tensor for name, tensor in tensors.items()
            if tensor.is_floating_point() and not name.endswith(("running_mean", "running_var"))}
    if not any(tensor.numel() for tensor in kept.values()):
        raise ValueError(f"model is {file!r}, which holds no parameters; {ACCEPTED}")
    return list({(t.data_ptr(), tuple(t.shape)): t for t in kept.values()}.values())  # tied ones once


def measure(loaded: Loaded, steps: int = 5) -> float:
    """Seconds of a forward and a backward pass of the model here, on its GPU if there is one: the median of ``steps``,
    after two.

    Raises:
        ValueError: there is nothing to call, or what it returns is nothing to go back from.
        TheirError: by the model.
    """
    if loaded.module is None or loaded.inputs is None:
        raise ValueError(f"model is {loaded.name!r}; to be measured it has to be a module:callable that returns the "
                         "module and a tuple of what to call it with")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = loaded.module.to(device)
    inputs = [x.to(device) if isinstance(x, torch.Tensor) else x for x in loaded.inputs]

    def step() -> float:
        began = time.perf_counter()
        with theirs():
            module.zero_grad()
            output = module(*inputs)
        loss = _loss(output)
        with theirs():
            loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return statistics.median([step() for _ in range(2 + steps)][2:])


def _loss(output: Any) -> torch.Tensor:
    """The sum of all that a model returns and that has a gradient, whatever holds it."""
    tensors, left = [], [output]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            tensors += [value.float().sum()] if value.requires_grad else []
        elif isinstance(value, (dict, tuple, list)):
            left += value.values() if isinstance(value, dict) else value
    if not tensors:
        raise ValueError(f"the model returned a {type(output).__name__} without a tensor that has a gradient; "
                         "accepted: a tensor, or a dict, tuple or list with some")
    return torch.stack(tensors).sum()


# -- what is sent ------------------------------------------------------------------------------------------------------

class Shipment(NamedTuple):
    """Parameters that travel together."""

    ready: float  # share of the backward pass after which their gradients are complete
    numel: int
    sizes: Sizes | None  # None: always dense
    slots: int = 0  # entries in a message


@cache
def shipments(shapes: tuple[Shape, ...], config: Config, step: int = 0) -> tuple[Shipment, ...]:
    """How :func:`dgc.DistributedOptimizer` packs float32 parameters of these shapes, and the bytes of each message.

    Args:
        shapes: of the parameters, in forward order.
        config: ``sparsity``, ``wire_dtype`` and ``min_numel`` count; parameters that travel dense do so in float32.
        step: of the optimizer, for a schedule.

    Raises:
        ValueError: the config's ``dense_dtype`` is not None, which is not modelled.
    """
    if config.dense_dtype is not None:
        raise ValueError(f"Config: dense_dtype is {config.dense_dtype}; accepted in a plan: None")
    sparsity, made = config.sparsity_at(step), []
    for ready, together in _departing(shapes, config.min_numel):
        compressed = sparsity > 0.0 and compressible(together[0], config.min_numel)
        message = _message(together, sparsity, config.wire_dtype) if compressed else (None,)
        made.append(Shipment(ready, sum(p.numel() for p in together), *message))
    return tuple(made)


@cache
def dense_shipments(shapes: tuple[Shape, ...]) -> tuple[Shipment, ...]:
    """The same, with nothing compressed."""
    return tuple(Shipment(ready, sum(p.numel() for p in together), None)
                 for ready, together in _departing(shapes, sum(torch.Size(shape).numel() for shape in shapes) + 1))


def _departing(shapes: Sequence[Shape], min_numel: int) -> list[tuple[float, list[torch.Tensor]]]:
    """Buckets in the order in which they leave, and the share of the backward pass after which they can."""
    parameters = [torch.empty(shape, device="meta") for shape in shapes]
    done, weights = {}, 0
    for parameter in reversed(parameters):
        done[parameter] = weights = weights + (parameter.dim() > 1)
    latest, packed = 0.0, []
    for _, together in pack(parameters, {p: str(i) for i, p in enumerate(parameters)}, None, min_numel):
        latest = max(latest, *(done[p] / max(1, weights) for p in together))  # none overtakes another
        packed.append((latest, together))
    return packed


def _message(together: list[torch.Tensor], sparsity: float, dtype: torch.dtype) -> tuple[Sizes, int]:
    bucket = Bucket("", {str(i): p for i, p in enumerate(together)}, velocity=False)
    layout = Layout(bucket, [select.count(sparsity, numel) for numel in bucket.numels], dtype)
    itemsize = residual_dtype(together[0].dtype).itemsize
    return Sizes(itemsize * bucket.numel, layout.nbytes, layout.support.nbytes,
                 itemsize * (layout.slots + 1)), layout.slots


# -- how long it takes -------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Local:
    """What a worker does itself, in seconds.

    Args:
        compress: for each entry of a compressed parameter: accumulate, select, take, encode, write the update.
            Default: the fused loops on a CPU core (benchmarks/results/compress-1core.json, through p.grad).
        receive: for each entry that it receives, its own among them: check, decode, add.
            Default: on a CPU core (benchmarks/results/receive.json).
        convert: for each entry of a dense sum in float16: to round and to add. 0 on GPUs.
            Default: DistributedDataParallel's over gloo, of a CPU core (fitted to a ResNet-50's at 1 Gbit/s; "convert"
            in benchmarks/results/plan.json). Horovod's takes forty times as long there ("horovod_convert").
        start: for each bucket, until its exchange begins: what the library needs to agree on it.

    Raises:
        ValueError: one of them is negative or not finite.
    """

    compress: float = 1e-9
    receive: float = 4.6e-9
    convert: float = 0.55e-9
    start: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"Local: {name} is {value!r}; accepted: a finite number >= 0")


DGC, CPU = Config(), Local()
# A GPU's are an estimate, not measured: the 36 bytes an entry that the loops move, at a memory of 1 TB/s.
LOCAL = {"cpu": CPU, "gpu": Local(compress=0.05e-9, receive=0.5e-9, convert=0.0)}


class Method(NamedTuple):
    """A way to add up gradients."""

    name: str  # in cost.DENSE, or in cost.EXCHANGES
    kind: str  # float32, float16, or dgc

    def __str__(self) -> str:
        if self.kind == "dgc":
            return f"DGC, {self.name}"
        return f"{self.name}, {self.kind}"


class Prediction(NamedTuple):
    """Of one step."""

    method: Method
    step_seconds: float
    efficiency: float  # compute time / step time: of as many single workers
    exchange_seconds: float  # all messages, hidden behind the backward pass or not
    port_bytes: float  # over the busiest port of a node, in one direction
    message_bytes: int  # that a worker contributes, whatever the number of workers


def methods(cluster: Cluster) -> list[Method]:
    """Those that differ on this cluster."""
    flat = cluster.gpus == 1 or cluster.nodes == 1
    return [*(Method(name, kind) for name in cost.DENSE if not (flat and name.startswith("hierarchical"))
              for kind in ("float32", "float16")),
            *(Method(name, "dgc") for name in cost.EXCHANGES if not (flat and name.startswith("hierarchical")))]


def predict(shapes: tuple[Shape, ...], cluster: Cluster, method: Method, compute: float, config: Config = DGC,
            local: Local = CPU, overlap: bool = True, backward: float = BACKWARD) -> Prediction:
    """The time of one step.

    Args:
        shapes: of the parameters, in forward order.
        cluster: on which.
        method: by which.
        compute: seconds of a worker's forward and backward pass.
        config: of DGC.
        local: what a worker does beside it.
        overlap: whether exchanges begin during the backward pass. With global clipping they do not in DGC.
        backward: the share of ``compute`` that is the backward pass.
    """
    n, g = cluster.nodes, cluster.gpus
    clips = method.kind == "dgc" and config.clips_globally
    forward = compute * (1 - backward) if overlap and not clips else compute
    width = 2 if method.kind == "float16" else cost.FLOAT32
    worked = idle = exchanged = received = port = 0.0  # idle: when the network is free again
    message = 0
    for bucket in shipments(shapes, config) if method.kind == "dgc" else dense_shipments(shapes):
        if bucket.sizes is None:
            own = width * bucket.numel
            rounds = cost.DENSE["ring" if method.kind == "dgc" else method.name](own, n, g)
            seconds = cost.seconds(rounds, cluster) + local.convert * bucket.numel * (width == 2)
        else:
            rounds = cost.exchange(method.name, bucket.sizes, n, g)
            seconds, dense = cost.seconds(rounds, cluster), cost.sends_dense(method.name, bucket.sizes, n, g)
            own = bucket.sizes.dense if dense else (
                bucket.sizes.values if method.name.endswith("shared") else bucket.sizes.message)
            worked += local.compress * bucket.numel
            if not dense:
                received += local.receive * bucket.slots * _messages(method.name, n, g)
        if rounds:
            seconds += local.start
        idle = max(idle, forward + (compute - forward) * bucket.ready + worked) + seconds
        exchanged, port, message = exchanged + seconds, port + cost.port_bytes(rounds), message + own
    if n * g == 1:
        return Prediction(method, compute, 1.0, 0.0, 0.0, 0)
    step = max(idle, compute + worked) + received
    return Prediction(method, step, compute / step if step else 0.0, exchanged, port, message)


def _messages(exchange: str, n: int, g: int) -> int:
    """How many a worker decodes."""
    return {"allgather": n * g, "hierarchical": n}.get(exchange, 1)


def of_size(cluster: Cluster, workers: int) -> Cluster:
    """The same kind of cluster with so many workers: whole nodes, or a part of one.

    Raises:
        ValueError: neither is possible.
    """
    if workers < 1 or (workers > cluster.gpus and workers % cluster.gpus):
        raise ValueError(f"workers is {workers}; accepted: 1 to {cluster.gpus}, or a multiple of {cluster.gpus}")
    gpus = min(workers, cluster.gpus)
    return replace(cluster, nodes=workers // gpus, gpus=gpus)


def sizes(cluster: Cluster) -> list[int]:
    """Numbers of workers to look at: powers of two of one node's, up to 65,536, and the cluster's own."""
    inside = [1 << i for i in range(cluster.gpus.bit_length()) if 1 << i < cluster.gpus]
    nodes = range((LARGEST // cluster.gpus).bit_length())
    return sorted({*inside, *(cluster.gpus << i for i in nodes), cluster.workers})


# -- advice ------------------------------------------------------------------------------------------------------------

class Advice(NamedTuple):
    """What to do on a cluster."""

    pays: bool
    dense: Prediction  # the fastest of those that Horovod and DistributedDataParallel offer
    dgc: Prediction  # without a shared support: the simplest that is nearly as fast as any, with ``sparsity``
    sparsity: float
    shared: Prediction | None  # the same of a shared support, if it is faster even with more entries
    sparsity_shared: float  # then, at most ``SHARED``
    below: float | None  # bytes a second between nodes, up to which it pays; None: at none
    above: float | None  # and from which on; None: however slow it is
    other: Prediction | None  # a dense one that they do not offer, and that is faster than what is advised
    words: tuple[str, ...]


def advise(shapes: tuple[Shape, ...], cluster: Cluster, compute: float, config: Config | None = None,
           local: Local = CPU, overlap: bool = True) -> Advice:
    """Whether DGC pays here, from which bandwidth down, and with which exchange and sparsity.

    It is compared with the dense exchanges in ``OFFERED``. A shared support learns less than an all-gather of the same
    sparsity: it is not advised, but named where it is faster even with ten times the entries. Where DGC pays in a
    range of bandwidths only, as it may where it sends as many bytes as a sum in float16, the range is the one in which
    the cluster is, or the next below it: so ``pays`` is whether the cluster's bandwidth is no higher than ``below``.

    Args:
        shapes, cluster, compute, local, overlap: as for :func:`predict`.
        config: of DGC; None: the least sparsity of ``SPARSITIES`` that is nearly as fast as any.
    """
    sparsities = SPARSITIES if config is None else (config.sparsity_at(0),)

    def best(on: Cluster, shared: bool) -> tuple[Prediction, float]:
        """The simplest of DGC's exchanges that is nearly as fast as any, and its sparsity."""
        made = [(predict(shapes, on, m, compute, replace(config or DGC, sparsity=s), local, overlap), s)
                for s in sorted({min(s, SHARED if shared else 1.0) for s in sparsities})
                for m in methods(on) if m.kind == "dgc" and m.name.endswith("shared") == shared]
        fastest = min(p.step_seconds for p, _ in made)
        return next(each for each in made if each[0].step_seconds <= NEARLY * fastest)

    def choose(on: Cluster) -> tuple[bool, Prediction, Prediction, float]:
        """Whether it pays, the fastest dense exchange that is offered, and what DGC does best, with which sparsity."""
        dense = min((predict(shapes, on, m, compute, DGC, local, overlap) for m in methods(on)
                     if m.kind != "dgc" and m.name in OFFERED), key=lambda p: p.step_seconds)
        dgc, sparsity = best(on, shared=False)
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
    advised = dgc if pays else dense
    shared, sparsity_shared = best(cluster, shared=True)

    def if_faster(prediction: Prediction) -> Prediction | None:
        return prediction if NEARLY * prediction.step_seconds < advised.step_seconds else None

    advice = Advice(pays, dense, dgc, sparsity, if_faster(shared), sparsity_shared, below, above, if_faster(other), ())
    return advice._replace(words=tuple(_words(cluster, compute, advice, given=config is not None)))


def _config(method: Method, sparsity: float) -> str:
    """Python, to paste."""
    end = "" if sparsity == 0.999 else f", end={sparsity:g}"
    schedule = f"dgc.warmup(epochs=4, steps_per_epoch=len(loader){end})" if sparsity > 0.75 else f"{sparsity:g}"
    shared = ', factor_masking=False, exchange="shared"' if method.name.endswith("shared") else ""
    across = ", hierarchical=True" if method.name.startswith("hierarchical") else ""
    return f"dgc.Config(sparsity={schedule}{shared}{across})"


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


def _words(cluster: Cluster, compute: float, advice: Advice, given: bool) -> Iterable[str]:
    dense, dgc, sparsity = advice.dense, advice.dgc, advice.sparsity
    if cluster.workers == 1:
        yield "One worker exchanges nothing: there is nothing to compress."
        return
    offered = f"the fastest dense exchange of Horovod and DistributedDataParallel ({dense.method})"
    if advice.pays:
        yield (f"DGC pays here: {_time(dgc.step_seconds)} a step instead of {_time(dense.step_seconds)} with "
               f"{offered}, {dense.step_seconds / dgc.step_seconds:.3g} times as fast.")
    else:
        yield (f"DGC does not pay here: {_time(dgc.step_seconds)} a step, and {_time(dense.step_seconds)} with "
               f"{offered}. Use that one.")
    if advice.other:
        yield (f"{advice.other.method} would be faster still, {_time(advice.other.step_seconds)} a step, in a library "
               "that has it.")
    if advice.below is None:
        yield ("No lower bandwidth between nodes would change that." if cluster.nodes > 1 else
               "All workers are in one node, where the network plays no part.")
    else:
        begin = f"from {bits(advice.above)} " if advice.above else ""
        end = "as far as was looked" if advice.below >= MOST else f"and not {'outside' if begin else 'above'}"
        yield f"On this cluster it pays {begin}up to {bits(advice.below)} between nodes, {end}."
    if advice.pays:
        yield (f"Recommended: {_config(dgc.method, sparsity)}"
               + ("." if given or sparsity == max(SPARSITIES) else
                  f"; sending less than {100 * (1 - sparsity):g} % of the entries would not be faster by 2 %."))
    if advice.shared:
        yield (f"With a shared support it would be {_time(advice.shared.step_seconds)}: "
               f"{_config(advice.shared.method, advice.sparsity_shared)}. It learns less, with so many entries too "
               "where batches are small (docs/tuning.md): compare.")
    lost = dgc.step_seconds - compute
    if advice.pays and lost > 0.2 * compute:
        yield (f"Even so {100 * lost / dgc.step_seconds:.0f} % of a step is not computation: a larger batch a worker, "
               "or fewer workers, helps as well.")
    worked = dgc.step_seconds - compute - dgc.exchange_seconds
    if worked > 0.1 * dgc.step_seconds:
        yield (f"At least {_time(worked)} of that step is compressing and decoding, which a GPU does faster "
               "than the CPU core that is assumed by default (--worker gpu, --compress-ns).")
    yield "This is about time. Whether accuracy holds is for a trial to tell: the method was made for SGD."


def bits(bandwidth: float) -> str:
    """Bytes a second, in words."""
    for unit, size in (("Tbit/s", 1.25e11), ("Gbit/s", 1.25e8), ("Mbit/s", 1.25e5)):
        if bandwidth >= size:
            return f"{bandwidth / size:.3g} {unit}"
    return f"{8 * bandwidth:.3g} bit/s"


def _time(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


# -- all of it ---------------------------------------------------------------------------------------------------------

class Report(NamedTuple):
    """What ``dgc plan`` tells."""

    model: str
    numel: int
    cluster: Cluster
    compute: float
    sparsity: float
    here: tuple[Prediction, ...]  # on the cluster
    scaling: dict[int, tuple[Prediction, ...]]  # by the number of workers
    advice: Advice

    def json(self) -> dict[str, Any]:
        """Numbers only; seconds and bytes."""
        flat = {n: [_plain(p) for p in predictions] for n, predictions in self.scaling.items()}
        advice = {**self.advice._asdict(), "dense": _plain(self.advice.dense), "dgc": _plain(self.advice.dgc),
                  "shared": self.advice.shared and _plain(self.advice.shared),
                  "other": self.advice.other and _plain(self.advice.other)}
        return {"model": self.model, "parameters": self.numel, "cluster": asdict(self.cluster),
                "compute_seconds": self.compute, "sparsity": self.sparsity, "here": [_plain(p) for p in self.here],
                "scaling": flat, "advice": advice}


def _plain(prediction: Prediction) -> dict[str, Any]:
    return {**prediction._asdict(), "method": prediction.method.name, "kind": prediction.method.kind}


def plan(loaded: Loaded, cluster: Cluster, compute: float, config: Config | None = None, local: Local = CPU,
         overlap: bool = True) -> Report:
    """Predictions for every method, on the cluster and on larger and smaller ones of its kind, and advice.

    Args:
        loaded: the model.
        cluster, compute, local, overlap: as for :func:`predict`.
        config: of DGC; None: the default one, and advice which sparsity to choose.

    Raises:
        ValueError: ``compute`` is not a finite number > 0.
    """
    if not 0 < compute < float("inf"):
        raise ValueError(f"compute is {compute!r}; accepted: seconds > 0")

    def on(some: Cluster) -> tuple[Prediction, ...]:
        return tuple(predict(loaded.shapes, some, m, compute, config or DGC, local, overlap) for m in methods(some))

    advice = advise(loaded.shapes, cluster, compute, config, local, overlap)
    if loaded.caveat:
        advice = advice._replace(words=(*advice.words, loaded.caveat))
    scaling = {workers: on(of_size(cluster, workers)) for workers in sizes(cluster)}
    return Report(loaded.name, loaded.numel, cluster, compute, (config or DGC).sparsity_at(0), on(cluster), scaling,
                  advice)


def draw(report: Report, file: Path) -> None:
    """Efficiency by workers as a picture: dense methods in float32 (and the ring in float16), and DGC's exchanges.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    curves: dict[Method, list[tuple[int, float]]] = {}
    for workers, predictions in report.scaling.items():
        for p in predictions:
            curves.setdefault(p.method, []).append((workers, 100 * p.efficiency))
    figure, axes = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained", sharey=True)
    for method, points in curves.items():
        if method.kind != "float16":
            axes[int(method.kind == "dgc")].plot(*zip(*points, strict=True), ".-", label=method.name)
    fp16 = curves.get(Method("ring", "float16"), [])
    for axis in axes:
        axis.plot(*zip(*fp16, strict=True), "--", color="black", linewidth=1, label="ring, float16")
        axis.axvline(report.cluster.workers, color="tab:gray", linewidth=0.8)
        axis.set(xscale="log", xlabel="workers", ylim=(0, 103))
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, loc="upper right")
    axes[0].set(ylabel="scaling efficiency (%)", title="dense, float32")
    axes[1].set(title=f"DGC, {100 * report.sparsity:g} %")
    figure.suptitle(f"{report.model}: {report.numel:,} parameters, {_time(report.compute)} of computation, nodes of "
                    f"{report.cluster.gpus} at {bits(report.cluster.between.bandwidth)}")
    figure.savefig(file, dpi=130)
    plt.close(figure)
