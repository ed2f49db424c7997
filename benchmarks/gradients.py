"""What the benchmarks exchange: shapes of networks, and fresh heavy-tailed gradients for every step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dgc.plan import MODELS, Shape

resnet50 = MODELS["resnet50"]  # 161 tensors, 25,557,032 entries in all


def lstm() -> list[Shape]:
    """Shapes of pytorch/examples' word language model with 2 x 1500 LSTM, tied weights and the 10,000 words of Penn
    Treebank: 10 tensors, 51,034,000 entries in all.
    """
    layer: list[Shape] = [(6000, 1500), (6000, 1500), (6000,), (6000,)]
    shapes: list[Shape] = [(10_000, 1500), *layer, *layer, (10_000,)]
    assert sum(torch.Size(shape).numel() for shape in shapes) == 51_034_000
    return shapes


def resnet110(last: int = 64) -> list[Shape]:
    """Shapes of CIFAR-10's, with shortcuts that have no weights: 1,727,962 parameters (recipes/cifar10.py --depth 110).
    ``last`` is the number of channels of the last stage.
    """
    convolutions: list[Shape] = [(16, 3, 3, 3)]
    inputs = 16
    for width in (16, 32, last):
        for _ in range(18):
            convolutions += [(width, inputs, 3, 3), (width, width, 3, 3)]
            inputs = width
    normalised = [shape for c in convolutions for shape in (c, (c[0],), (c[0],))]
    return [*normalised, (10, last), (10,)]


def alexnet() -> list[Shape]:
    """61,100,840 parameters (torchvision; Krizhevsky 2014)."""
    weights: list[Shape] = [
        (64, 3, 11, 11),
        (192, 64, 5, 5),
        (384, 192, 3, 3),
        (256, 384, 3, 3),
        (256, 256, 3, 3),
        (4096, 256 * 6 * 6),
        (4096, 4096),
        (1000, 4096),
    ]
    return [shape for w in weights for shape in (w, (w[0],))]


def scales(count: int) -> list[float]:
    """One scale for each of ``count`` tensors, from 1e-6 to 1 in equal ratios, in an order that never changes."""
    ordered = [10 ** (-6 * i / max(1, count - 1)) for i in range(count)]
    return random.Random(count).sample(ordered, count)


def heavy_tailed(
    shapes: Sequence[Shape], seed: int = 0, device: str | torch.device = "cpu"
) -> Iterator[list[Tensor]]:
    """Endless steps of gradients: independent cubes of normals (kurtosis 46), of root mean square ``scales``.

    Every tensor is another window, anywhere in a large pool of such cubes, at each step: one pass over memory instead
    of a random number for each entry. Windows of large tensors overlap, but each entry of a tensor draws a new value.

    Args:
        shapes: of the gradients.
        seed: of the pool and of the windows: give each rank its own.
        device: where to draw them.

    Yields:
        One contiguous float32 tensor for each shape. **The next step overwrites them:** they are views of one buffer.
    """
    numels = [torch.Size(shape).numel() for shape in shapes]
    generator = torch.Generator(device).manual_seed(seed)
    windows = random.Random(seed)
    pool = torch.randn(max(1 << 24, 2 * max(numels)), generator=generator, device=device)
    pool.pow_(3).div_(15**0.5)  # the sixth moment of a normal is 15
    gradients = torch.empty(sum(numels), device=device).split(numels)
    while True:
        for gradient, scale in zip(gradients, scales(len(numels)), strict=True):
            start = windows.randrange(len(pool) - len(gradient) + 1)
            torch.mul(pool[start : start + len(gradient)], scale, out=gradient)
        yield [gradient.view(shape) for gradient, shape in zip(gradients, shapes, strict=True)]
