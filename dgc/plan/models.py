"""Models to plan for: the shapes of well-known ones and of a user's own, and their buckets."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from dgc.compression import select
from dgc.compression.residual import Residual
from dgc.compression.sizes import Sizes
from dgc.compression.wire import Layout
from dgc.config import Config
from dgc.engine.parameters import compressible, pack
from dgc.user_code import NAME, callable_named, theirs

Shape = tuple[int, ...]

RANK = 4  # of PowerSGD


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
    normalised = [shape for c in convolutions for shape in (c, (c[0],), (c[0],))]
    return [*normalised, (1000, 2048), (1000,)]


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
    layer = [
        *norm,
        (d, 3 * d),
        (3 * d,),
        (d, d),
        (d,),
        *norm,
        (d, 4 * d),
        (4 * d,),
        (4 * d, d),
        (d,),
    ]
    return [(50_257, d), (1024, d), *layer * 12, *norm]


MODELS = {"resnet50": resnet50, "bert-large": bert_large, "gpt2": gpt2}


def _biased(weights: Iterable[Shape]) -> list[Shape]:
    return [shape for w in weights for shape in (w, (w[0],))]


# -- the user's own ----------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """A model: its parameters' shapes in forward order, and itself if it is at hand."""

    name: str
    shapes: tuple[Shape, ...]
    module: nn.Module | None = None
    inputs: tuple[Any, ...] | None = None  # what to call it with

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


def load(model: str) -> Loaded:
    """Finds a model.

    Args:
        model: a name in ``MODELS``; or ``module:callable``, which returns a ``torch.nn.Module``, or
            that and a tuple of what to call it with.

    Raises:
        ValueError: it is none of them, or has no parameters to train.
        TheirError: by the module or the callable.
    """
    if model in MODELS:
        return Loaded(model, tuple(MODELS[model]()))
    if not NAME.fullmatch(model):
        raise ValueError(f"model must be {', '.join(MODELS)}, or a module:callable, got {model!r}")
    found = callable_named(model)
    with theirs():
        made = found()
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (inputs is None or isinstance(inputs, tuple)):
        raise ValueError(
            f"model {model!r} must return a torch.nn.Module, or a module and a tuple of its inputs "
            f"(return model, (inputs,)), got {type(module).__name__} and {type(inputs).__name__}"
        )
    loaded = Loaded(
        model, tuple(tuple(p.shape) for p in module.parameters() if p.requires_grad), module, inputs
    )
    if not loaded.numel:
        raise ValueError(f"model must have parameters to train, got {model!r}, which has none")
    return loaded


def measure(loaded: Loaded, steps: int = 5) -> float:
    """Seconds of a forward and a backward pass of the model here, on its GPU if there is one: the
    median of ``steps``, after two.

    Raises:
        ValueError: there is nothing to call, or what it returns is nothing to go back from.
        TheirError: by the model.
    """
    if loaded.module is None or loaded.inputs is None:
        raise ValueError(
            "model must be a module:callable that returns the module and a tuple of what to call it with, "
            f"to be measured, got {loaded.name!r}"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = loaded.module.to(device)
    inputs = [x.to(device) if isinstance(x, torch.Tensor) else x for x in loaded.inputs]

    def step() -> float:
        began = time.perf_counter()
        with theirs():
            module.zero_grad()
            output = module(*inputs)
        parts = [tensor.float().sum() for tensor in _tensors(output) if tensor.requires_grad]
        if not parts:
            raise ValueError(
                "the model must return a tensor that has a gradient, or a dict, tuple or list with one, "
                f"got a {type(output).__name__} without one"
            )
        with theirs():
            torch.stack(parts).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return statistics.median([step() for _ in range(2 + steps)][2:])


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """All that a model returns, whatever holds it."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (dict, tuple, list)):
        for value in output.values() if isinstance(output, dict) else output:
            yield from _tensors(value)


# -- what travels together ---------------------------------------------------------------------------------------------


class PlannedBucket(NamedTuple):
    """Parameters that travel together."""

    ready: float  # share of the backward pass after which their gradients are complete
    numel: int
    sizes: Sizes | None  # None: always dense
    # Entries that PowerSGD sends of dense ones: P, Q, and uncompressed.
    low_rank: tuple[int, int, int] = (
        0,
        0,
        0,
    )


@cache
def buckets(shapes: tuple[Shape, ...], config: Config) -> tuple[PlannedBucket, ...]:
    """How :func:`dgc.DistributedOptimizer` packs float32 parameters of these shapes, and the bytes
    of each message: at the schedule's first step those of :class:`dgc.compression.wire.Layout`.

    Args:
        shapes: of the parameters, in forward order.
        config: ``sparsity``, ``value_bits``, ``min_numel``, and whether there are local steps, count.
    """
    sparsity, made = config.sparsity_at(0), []
    for ready, together in _departing(shapes, config.min_numel):
        numel = sum(p.numel() for p in together)
        passes_v = sparsity > 0.0 or config.local_steps is not None
        if passes_v and compressible(together[0], config.min_numel):
            bucket = Residual("", {str(i): p for i, p in enumerate(together)}, velocity=False)
            counts = [select.count(sparsity, n) for n in bucket.numels]
            layout = Layout(bucket, counts, config.value_bits)
            made.append(PlannedBucket(ready, numel, layout.sizes))
        else:
            made.append(PlannedBucket(ready, numel, None, low_rank=_low_rank(together)))
    return tuple(made)


def dense_buckets(shapes: tuple[Shape, ...]) -> tuple[PlannedBucket, ...]:
    """The buckets of a step in which nothing is compressed."""
    return buckets(shapes, Config(0.0, min_numel=1 << 62))


@cache
def _departing(shapes: tuple[Shape, ...], min_numel: int) -> list[tuple[float, list[torch.Tensor]]]:
    """Buckets in the order in which they leave, and the share of the backward pass after which they
    can.
    """
    parameters = [torch.empty(shape, device="meta") for shape in shapes]
    done, weights = {}, 0
    for parameter in reversed(parameters):
        done[parameter] = weights = weights + (parameter.dim() > 1)
    latest, packed = 0.0, []
    for _, together in pack(
        parameters, {p: str(i) for i, p in enumerate(parameters)}, None, min_numel
    ):
        # None overtakes another.
        latest = max(latest, *(done[p] / max(1, weights) for p in together))
        packed.append((latest, together))
    return packed


def _low_rank(together: list[torch.Tensor]) -> tuple[int, int, int]:
    """Entries of PowerSGD's P and Q at rank ``RANK``, and of what its hook in torch leaves
    uncompressed: vectors, and matrices of which it would not save half.
    """
    p = q = whole = 0
    for parameter in together:
        rows = len(parameter) if parameter.dim() > 1 else 1
        columns = parameter.numel() // max(1, rows)
        if 2 * RANK * (rows + columns) < parameter.numel():
            p += RANK * rows
            q += RANK * columns
        else:
            whole += parameter.numel()
    return p, q, whole
