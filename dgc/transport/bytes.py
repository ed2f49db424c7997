"""Small collectives of plain bytes: what ranks tell one another besides gradients."""

from __future__ import annotations

import itertools

import torch

from dgc.collective import Collective
from dgc.transport.run import Transport


def gather_bytes(
    transport: Transport, content: bytes, name: str, device: torch.device
) -> list[bytes]:
    """Every rank's bytes, in the order of ranks; they may be of different lengths.

    Args:
        transport: among whose ranks.
        content: this rank's.
        name: of the collectives.
        device: of the tensors that travel.
    """
    own = torch.tensor([len(content)], device=device)
    lengths = transport.start(Collective("all_gather", own), f"{name}.lengths")().flatten().tolist()
    padded = torch.tensor(
        list(content.ljust(max(lengths), b"\0")), dtype=torch.uint8, device=device
    )
    rows = transport.start(Collective("all_gather", padded), name)().tolist()
    return [bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def node_size(transport: Transport, machine: str, device: torch.device) -> int:
    """How many ranks each machine has, for :meth:`Transport.by_node`.

    Args:
        transport: whose ranks are asked.
        machine: what this rank's is called; no two are called the same.
        device: of the tensors that travel.

    Raises:
        ValueError: some machines have more than others, or ranks are not numbered machine by
            machine.
    """
    machines = gather_bytes(transport, machine.encode(), "dgc.machines", device)
    runs = [len(list(ranks)) for _, ranks in itertools.groupby(machines)]
    if len(runs) > len(set(machines)):
        raise ValueError(
            "the ranks must be numbered machine by machine where hierarchical is True, got "
            f"{', '.join(name.decode(errors='replace') for name in machines[:8])} ... (horovodrun and "
            "torchrun number them so, and mpirun --map-by slot)"
        )
    if len(set(runs)) > 1:
        raise ValueError(
            "the machines must have the same number of ranks each where hierarchical is True, got "
            f"{', '.join(map(str, runs))} (give hierarchical='auto' or False)"
        )
    return runs[0]
