"""Models to plan for: the shapes of well-known ones, of a user's own, and of a checkpoint."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dgc.user_code import NAME, callable_named, theirs

Shape = tuple[int, ...]

ACCEPTED = "a checkpoint's file with a state dict, alone or under 'model', 'state_dict' or 'model_state_dict'"


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
        """A sentence on what a count of bytes leaves out; "" where it is exact."""
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
        raise ValueError(f"model must be {', '.join(MODELS)}, module:callable, or a checkpoint's file, got {model!r}")
    found = callable_named(model)
    with theirs():
        made = found()
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (inputs is None or isinstance(inputs, tuple)):
        raise ValueError(f"model {model!r} must return a torch.nn.Module, or that and a tuple of what to call it with, "
                         f"got {_said(made)}")
    trained = [p for p in module.parameters() if p.requires_grad]
    loaded = Loaded(model, tuple(tuple(p.shape) for p in trained), module, inputs, _dtypes(trained))
    if not loaded.numel:
        raise ValueError(f"model must have parameters to train, got {model!r}, which has none")
    return loaded


def _said(made: Any) -> str:
    """What was returned, in an error."""
    if not isinstance(made, tuple):
        return f"a {type(made).__name__}"
    types = f"({', '.join(type(part).__name__ for part in made)})"
    return types + (" (put the inputs into a tuple: return model, (inputs,))" if len(made) == 2 else "")


def _dtypes(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    return tuple(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))


def _checkpoint(file: str) -> list[torch.Tensor]:
    """The parameters in it: what is not a number with a fraction, or a running statistic, is none."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling meets
        raise ValueError(f"model must be {ACCEPTED}, which torch.load(weights_only=True) reads, got {file!r} (torch "
                         f"says: {(str(error).splitlines() or [type(error).__name__])[0]})") from None
    for key in ("model", "state_dict", "model_state_dict"):  # as torch's own tutorials name it
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)} if isinstance(
        state, dict) else {}
    if tensors and (inner := [name for name, value in state.items() if isinstance(value, dict)
                              and any(isinstance(t, torch.Tensor) for t in value.values())]):
        raise ValueError(f"model must be {ACCEPTED}, got {file!r}, which has tensors beside dicts of tensors, "
                         f"{', '.join(map(repr, inner))} (save one of these alone, or as 'state_dict')")
    kept = {name: tensor for name, tensor in tensors.items()
            if tensor.is_floating_point() and not str(name).endswith(("running_mean", "running_var"))}
    if not any(tensor.numel() for tensor in kept.values()):
        raise ValueError(f"model must be {ACCEPTED}, got {file!r}, which holds no parameters")
    return list({(t.data_ptr(), tuple(t.shape)): t for t in kept.values()}.values())  # tied ones once


def measure(loaded: Loaded, steps: int = 5) -> float:
    """Seconds of a forward and a backward pass of the model here, on its GPU if there is one: the median of ``steps``,
    after two.

    Raises:
        ValueError: there is nothing to call, or what it returns is nothing to go back from.
        TheirError: by the model.
    """
    if loaded.module is None or loaded.inputs is None:
        raise ValueError("model must be a module:callable that returns the module and a tuple of what to call it with, "
                         f"to be measured, got {loaded.name!r}")
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
        raise ValueError("the model must return a tensor that has a gradient, or a dict, tuple or list with one, "
                         f"got a {type(output).__name__} without one")
    return torch.stack(tensors).sum()
