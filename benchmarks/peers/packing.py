"""Tensors to bytes and back, and the dense mean that most methods fall back on for small tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World
from dgc.transport import Transport
from dgc.transport.run import PathRun


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (n,) uint8, each below 2**bits, as ceil(n bits / 8) bytes; ``bits`` is 1, 2, 4 or 8."""
    each = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % each)).view(-1, each)
    return (padded << torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)).sum(
        1, dtype=torch.uint8
    )


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """The n codes that :func:`pack` packed."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & (2**bits - 1)).view(-1)[:n]


def message(*parts: Tensor) -> Tensor:
    """Tensors one after the other, as bytes."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def take(content: Tensor, start: int, n: int, dtype: torch.dtype) -> Tensor:
    """n values that begin at a byte of a message."""
    # A copy, as views must be aligned.
    return content[start : start + n * dtype.itemsize].clone().view(dtype)


def flat(tensors: list[Tensor]) -> Tensor:
    """All of them in one dimension."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflat(values: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Its parts, in shapes like those."""
    parts = values.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def owners(tensors: list[Tensor]) -> Tensor:
    """Of each entry of ``flat(tensors)``, the number of its tensor."""
    sizes = torch.tensor([tensor.numel() for tensor in tensors], device=tensors[0].device)
    return torch.arange(len(tensors), device=sizes.device).repeat_interleave(sizes)


def mean(tensors: list[Tensor], world: World) -> Path[list[Tensor]]:
    """Their mean over ranks, by ring allreduce in float32."""
    if not tensors:
        return []
    total = yield Collective("all_reduce", flat(tensors))
    return unflat(total / world.size, tensors)


class Apart(NamedTuple):
    """Paths whose collectives travel side by side, and what makes one list of what they return."""

    paths: tuple[Path[list[Tensor]], ...]
    together: Callable[..., list[Tensor]]


def some(
    tensors: list[Tensor],
    world: World,
    compress: Callable[[list[Tensor]], Path[list[Tensor]]],
    worth: Callable[[Tensor], bool] = lambda tensor: tensor.ndim > 1,
) -> Apart:
    """What ``compress`` makes of those that are worth it, and the dense mean of the others, in the order of all."""
    chosen, others = ([t for t in tensors if worth(t) is large] for large in (True, False))

    def together(dense: list[Tensor], compressed: list[Tensor]) -> list[Tensor]:
        small, large = iter(dense), iter(compressed)
        return [next(large if worth(t) else small) for t in tensors]

    return Apart((mean(others, world), compress(chosen) if chosen else mean([], world)), together)


def carry(
    exchange: Path[list[Tensor]] | Apart, transport: Transport, count: Callable[[Collective], None]
) -> list[Tensor]:
    """Takes an exchange to its end: what travels apart has begun before anything is waited for."""

    def begin(path: Path[list[Tensor]], name: str) -> Callable[[], list[Tensor]]:
        try:
            return PathRun(path, transport, name, count).finish
        except StopIteration as end:  # nothing to exchange in this step
            found: list[Tensor] = end.value
            return lambda: found

    if isinstance(exchange, Apart):
        waits = [begin(path, f"peers.{i}") for i, path in enumerate(exchange.paths)]
        return exchange.together(*(wait() for wait in waits))
    return begin(exchange, "peers")()
