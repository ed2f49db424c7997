"""Whether the ranks train the same thing: compared once, before anything else is exchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dgc.compressor import Collective
from dgc.transport import gather_bytes

LINE = 256  # bytes of a line that an error shows
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check(needed: Mapping[str, Iterable[str]], wise: Mapping[str, Iterable[str]], transport: Any,
          device: torch.device) -> list[str]:
    """Compares what is said on each rank, to rank 0's.

    A rank that has another configuration or model would send messages of other sizes, or in another order: the job
    would hang, or go on with a wrong result. One that has another learning rate, or other values, is on its own way.

    Args:
        needed: what must be alike -> lines of text; the same sections on every rank.
        wise: what had better be.
        transport: what to ask the other ranks over.
        device: of the tensors that travel.

    Returns:
        A sentence about each section of ``wise`` that differs, with the first line that does; alike on all ranks.

    Raises:
        ValueError: on all ranks alike, with such a sentence about the first section of ``needed`` that differs.
    """
    texts = {section: "\n".join(lines).encode() for section, lines in {**needed, **wise}.items()}
    own = torch.tensor([_digest(text) for text in texts.values()], device=device)
    everyones = transport.start(Collective("gather", own), "dgc.agree")()
    differs = (everyones != everyones[0]).cpu()
    sentences = []
    for (section, text), column in zip(texts.items(), differs.T, strict=True):
        if not column.any():
            continue
        ranks = column.nonzero().flatten().tolist()
        here, there = _differing_lines(text, transport, device)[ranks[0]]
        others = f" (and so do {len(ranks) - 1} more)" if len(ranks) > 1 else ""
        sentences.append(f"the ranks differ in {section}. Rank {ranks[0]} has: {here}; rank 0 has: {there}{others}")
        if section in needed:
            raise ValueError(sentences[0])
    return sentences


def _differing_lines(text: bytes, transport: Any, device: torch.device) -> list[tuple[str, str]]:
    """Of each rank, the first line in which it differs from rank 0, and rank 0's."""
    length = torch.tensor([len(text)], device=device)
    longest = int(transport.start(Collective("gather", length), "dgc.agree.length")().max())
    padded = torch.tensor(list(text.ljust(longest, b"\0")), dtype=torch.uint8, device=device)
    reference = transport.start(Collective("share", padded), "dgc.agree.text")()
    theirs = bytes(reference.tolist()).rstrip(b"\0").split(b"\n")
    ours = text.split(b"\n")
    end = [b"nothing"] * (max(len(ours), len(theirs)) + 1 - min(len(ours), len(theirs)))
    pair = next(((a, b) for a, b in zip(ours + end, theirs + end, strict=False) if a != b), (b"", b""))
    everyones = gather_bytes(transport, b"\n".join(line[:LINE] for line in pair), "dgc.agree.lines", device)
    return [(here, there) for here, there in (both.decode(errors="replace").split("\n") for both in everyones)]


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def sums_of_bits(tensors: Iterable[Tensor]) -> list[int]:
    """One number for each tensor, which is another as soon as one of its bits is: on any device the same."""
    sums = [tensor.detach().contiguous().view(-1).view(BITS[tensor.element_size()]).sum(dtype=torch.int64)
            for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for i, total in enumerate(sums):
        by_device.setdefault(total.device, []).append(i)
    values = [0] * len(sums)
    for indices in by_device.values():  # one question to each device
        for i, value in zip(indices, torch.stack([sums[i] for i in indices]).tolist(), strict=True):
            values[i] = value
    return values
