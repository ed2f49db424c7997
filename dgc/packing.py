"""What travels together: the names of parameters, and their shipments, in the order in which they leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgc.residual import Bucket

BUCKET_NUMEL = 1 << 23  # more entries in a bucket => fewer messages, less overlap with the backward pass
MAX_NUMEL = (1 << 31) - 1  # of a bucket: beyond, positions would not fit into 32 bits
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of the parameters that are exchanged


@dataclass(eq=False)
class Shipment:
    """Parameters that travel together: compressed, or dense if there is no bucket."""

    name: str
    parameters: list[Tensor]
    bucket: Bucket | None = None
    rest: Bucket | None = None  # of dense ones that travel rounded: what that drops

    @property
    def kept(self) -> Bucket | None:
        """What is kept of them from step to step."""
        return self.bucket or self.rest

    @property
    def dtype(self) -> torch.dtype:
        """Of their update."""
        return self.parameters[0].dtype if self.kept is None else self.kept.v.dtype


def named(param_groups: list[dict[str, Any]], named_parameters: list[tuple[str, Tensor]] | None,
          generate: bool = False) -> dict[Tensor, str]:
    """Parameter -> name, with Horovod's checks and its generated names.

    Args:
        param_groups: of the optimizer.
        named_parameters: as given by the user.
        generate: make up the names that are missing from ``named_parameters``, instead of refusing.
    """
    made_up = {p: f"allreduce.noname.{i}.{j}" for i, group in enumerate(param_groups)
               for j, p in enumerate(group["params"])}
    if named_parameters is None:
        return made_up
    if any(not isinstance(item, tuple) for item in named_parameters):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                         "model.named_parameters().")
    names = [name for name, _ in named_parameters]
    duplicates = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if duplicates:
        raise ValueError("Parameter names in named_parameters must be unique. Found duplicates: "
                         + ", ".join(duplicates))
    given = {p: name for name, p in sorted(named_parameters, key=lambda item: item[0])}
    unnamed = [p for p in made_up if p not in given]
    if unnamed and not generate:
        raise ValueError("named_parameters was specified, but one or more model parameters were not named. "
                         f"Python object ids: {', '.join(str(id(p)) for p in unnamed)}")
    return {p: given.get(p, name) for p, name in made_up.items()}


def check_groups(groups: Any) -> None:
    """Horovod's checks of the argument ``groups``."""
    if groups is None:
        return
    if not (isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    seen: set[int] = set()
    for parameter in (p for group in groups for p in group) if isinstance(groups, list) else ():
        if not isinstance(parameter, Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if id(parameter) in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(id(parameter))


def compressible(parameter: Tensor, min_numel: int) -> bool:
    """Whether a parameter travels compressed: others cost little, and less than their positions would."""
    return parameter.dim() > 1 and parameter.numel() >= max(1, min_numel)


def pack(parameters: list[Tensor], names: dict[Tensor, str], groups: Any,
         min_numel: int) -> list[tuple[list[str], list[Tensor]]]:
    """Which parameters travel together: of one kind, in the order in which a backward pass completes them."""
    backward = parameters[::-1]
    if groups is None:
        sets = [backward]
    elif isinstance(groups, int):
        share, extra = divmod(len(backward), groups)
        ends = [share * (i + 1) + min(i + 1, extra) for i in range(groups)]
        sets = [backward[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    else:
        position = {p: i for i, p in enumerate(backward)}
        sets = [sorted((p for p in group if p in position), key=position.__getitem__) for group in groups]
        grouped = {p for together in sets for p in together}
        sets.append([p for p in backward if p not in grouped])
    shipments = []
    for together in [[p for p in kept if p.requires_grad] for kept in sets] + [
            [p for p in kept if not p.requires_grad] for kept in sets]:
        filling: dict[Any, list[Tensor]] = {}
        numel: dict[Any, int] = {}
        for parameter in together:
            kind = (parameter.device, parameter.dtype, compressible(parameter, min_numel))
            if numel.get(kind, 0) + parameter.numel() > MAX_NUMEL and kind in filling:
                shipments.append(filling.pop(kind))
                numel[kind] = 0
            filling.setdefault(kind, []).append(parameter)
            numel[kind] = numel.get(kind, 0) + parameter.numel()
            if groups is None and numel[kind] >= BUCKET_NUMEL:
                shipments.append(filling.pop(kind))
                numel[kind] = 0
        shipments.extend(filling.values())
    return [([names[p] for p in together], together) for together in shipments]
