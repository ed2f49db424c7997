"""Every refusal at the door: arguments that cannot be right, before anything is touched."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dgc.config import Average, Config, Sum
from dgc.engine.parameters import DTYPES, MAX_NUMEL, compressible
from dgc.engine.rounds import check_local_steps
from dgc.engine.settings import Role, Settings
from dgc.engine.wrapped import (
    check_dampening,
    check_decay,
    decays_apart,
    is_adam,
    is_sgd,
    refuse_apex,
)
from dgc.warn import warn

SHARDED = (
    "use fully_shard(model, mesh=mesh['shard']) and process_set=mesh['across'].get_group(), with "
    "mesh = init_device_mesh(device, (nodes, ranks in a node), mesh_dim_names=('across', 'shard'))"
)


def check_all(optimizer: Any, config: Any, op: Any, grad_scaler: Any) -> Any:
    """Refuses an optimizer, a config, an operation or a scaler that cannot be used.

    Returns:
        The scaler, if there is one and it is enabled.

    Raises:
        TypeError, ValueError: it names the argument, its value, and what is accepted.
    """
    _check_kinds(optimizer, config, op)
    _check_optimizer(optimizer, config)
    scaler = enabled_scaler(grad_scaler)
    if (
        scaler is not None
        and config.corrects_momentum
        and config.compresses
        and is_adam(type(optimizer))
        and any(group.get("fused") for group in optimizer.param_groups)
    ):
        raise ValueError(
            f"optimizer must have fused=False where grad_scaler is given, got {type(optimizer).__name__} "
            "with fused=True, whose own step takes the scale out (momentum correction replaces that step)"
        )
    return scaler


def _check_kinds(optimizer: Any, config: Any, op: Any) -> None:
    """Refuses arguments of other kinds."""
    if callable(config) and not isinstance(config, type):
        raise TypeError(
            f"the config must be a dgc.Config, got {config!r} (a schedule: give dgc.Config(schedule))"
        )
    if not isinstance(config, Config):
        raise TypeError(
            f"compression must be a dgc.Config, None, or a Horovod compressor such as "
            f"hvd.Compression.fp16, got {config!r}"
        )
    if op not in (Average, Sum):
        raise ValueError(
            f"op must be Average ({Average}) or Sum ({Sum}) with a dgc.Config, got {op!r} (for Adasum "
            "give compression=hvd.Compression.none)"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    if config.hierarchical is True and os.environ.get("HOROVOD_ELASTIC") == "1":
        raise ValueError(
            "Config: hierarchical must be False, or 'auto', which is False there, in an elastic job, "
            "whose machines come and go, got True"
        )
    if config.local_steps is not None:
        check_local_steps(config)
    refuse_apex(optimizer)
    if hasattr(optimizer, "skip_synchronize"):
        raise ValueError(
            "optimizer must be the plain optimizer, wrapped once, got a DistributedOptimizer"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Refuses an optimizer that the config does not suit."""
    kind = type(optimizer).__name__
    together = config.local_steps is None or config.hierarchical
    if isinstance(optimizer, torch.optim.LBFGS) and together:
        raise TypeError(
            "optimizer must be torch.optim.SGD, or another optimizer with "
            "Config(momentum_correction=False), got LBFGS, which evaluates several gradients in a step"
        )
    if isinstance(optimizer, torch.optim.LBFGS) and config.nonfinite == "skip":
        raise ValueError(
            'Config: nonfinite must be "error" with LBFGS, got "skip" (no gradient of a line search can be left out)'
        )
    if is_adam(type(optimizer)):
        _check_adam(optimizer, config)
    elif not is_sgd(type(optimizer)) and config.corrects_momentum and config.compresses:
        held = [
            name
            for name, value in vars(optimizer).items()
            if isinstance(value, torch.optim.Optimizer)
        ]
        if held:
            raise TypeError(
                f"optimizer must be the one whose step() is called, got {kind} around another one (give "
                f"its attribute {held[0]}; or, if {kind}.step() is called, "
                "Config(momentum_correction=False))"
            )
        raise TypeError(
            f"optimizer must be torch.optim.SGD or AdamW for momentum correction, which gives its step() "
            f"updates in place of gradients, got {kind} ("
            + (
                "torch.optim.AdamW learns better with compressed gradients; or "
                if "betas" in optimizer.defaults
                and not isinstance(optimizer, torch.optim.SparseAdam)
                else ""
            )
            + f"give Config(momentum_correction=False), and {kind} gets the averaged sparse gradients)"
        )
    for group in optimizer.param_groups:
        check_group(group, config, type(optimizer))
    if not any(p.dtype in DTYPES for group in optimizer.param_groups for p in group["params"]):
        raise TypeError(
            f"the optimizer must have a parameter of {', '.join(map(str, DTYPES))}, got none whose "
            "gradient can be exchanged"
        )


def _check_adam(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Refuses settings that AdamW's momentum in u does not allow."""
    if not config.compresses or config.local_steps is not None:
        return
    if not config.momentum_correction:
        if all(decays_apart(type(optimizer), group) for group in optimizer.param_groups):
            raise ValueError(
                f"Config: momentum_correction must be True for {type(optimizer).__name__}, got False "
                "(where ranks accumulate gradients in place of its momentum, a transformer ended 7 % "
                "above dense training's perplexity at 99 %; with momentum correction, 1 %)"
            )
        return
    if config.clip_per_tensor:
        raise ValueError(
            f"Config: clip_per_tensor must be False for {type(optimizer).__name__} with momentum "
            "correction, got True (clip_norm alone bounds the norm of all gradients)"
        )


def check_group(group: dict[str, Any], config: Config, kind: type[torch.optim.Optimizer]) -> None:
    """Refuses a param group with a dampening, with an Adam's weight decay that is in the gradient,
    or with parameters that cannot be exchanged.
    """
    if config.corrects_momentum and config.compresses and is_adam(kind):
        check_decay(kind, group)
    if config.corrects_momentum and config.compresses and is_sgd(kind):
        check_dampening(group)
    for parameter in group["params"]:
        if parameter.dtype not in DTYPES and parameter.requires_grad:
            raise TypeError(
                f"a parameter that requires a gradient must be of {', '.join(map(str, DTYPES))}, got one "
                f"of shape {tuple(parameter.shape)} and dtype {parameter.dtype} (other dtypes can be "
                "frozen)"
            )
        if parameter.numel() > MAX_NUMEL and compressible(parameter, config.min_numel):
            raise ValueError(
                f"a parameter must have at most {MAX_NUMEL} entries, got one of shape "
                f"{tuple(parameter.shape)} with {parameter.numel()} (split it, or let it travel dense "
                "by Config: min_numel)"
            )


def warn_of_config(settings: Settings, optimizer: Any) -> None:
    """Warns, on rank 0, of settings that learn badly."""
    inner, config = optimizer._inner, settings.config
    adaptive = "betas" in optimizer.defaults and not issubclass(inner, torch.optim.SparseAdam)
    warns = settings.role is not Role.OUTSIDE and settings.world.rank == 0
    if warns and adaptive and not config.corrects_momentum and config.compresses:
        kind = "Adam with weight_decay" if is_adam(inner) else inner.__name__
        warn(
            f"Config: momentum_correction should be True, with torch.optim.AdamW in place of {kind}: "
            "where ranks accumulate gradients, a transformer ended 7 % above dense training's perplexity at 99 %, and "
            "1 % above it with momentum correction"
        )


def enabled_scaler(grad_scaler: Any) -> Any:
    """The scaler, if there is one and it is enabled."""
    if grad_scaler is None:
        return None
    if not hasattr(grad_scaler, "is_enabled") or not hasattr(grad_scaler, "get_scale"):
        raise TypeError(f"grad_scaler must be a torch.amp.GradScaler or None, got {grad_scaler!r}")
    return grad_scaler if grad_scaler.is_enabled() else None


def named(
    param_groups: list[dict[str, Any]],
    named_parameters: list[tuple[str, Tensor]] | None,
    generate: bool = False,
) -> dict[Tensor, str]:
    """Parameter -> name, with Horovod's checks and its generated names.

    Args:
        param_groups: of the optimizer.
        named_parameters: as given by the user.
        generate: make up the names that are missing from ``named_parameters``, instead of refusing.
    """
    made_up = {
        p: f"allreduce.noname.{i}.{j}"
        for i, group in enumerate(param_groups)
        for j, p in enumerate(group["params"])
    }
    listed = [p for group in param_groups for p in group["params"]]
    if len(made_up) < len(listed):
        twice = next(i for i, p in enumerate(listed) if p in set(listed[:i]))
        raise ValueError(
            f"param_groups must have each parameter once, got one of shape {tuple(listed[twice].shape)} "
            f"twice, number {twice} of them (torch warns of it when the optimizer is made)"
        )
    if named_parameters is None:
        return made_up
    if any(not isinstance(item, tuple) for item in named_parameters):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in named_parameters]
    duplicates = (
        sorted({name for name in names if names.count(name) > 1})
        if len(set(names)) < len(names)
        else []
    )
    if duplicates:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            + ", ".join(duplicates)
        )
    given = {p: name for name, p in sorted(named_parameters, key=lambda item: item[0])}
    unnamed = [p for p in made_up if p not in given]
    if unnamed and not generate:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"Python object ids: {', '.join(str(id(p)) for p in unnamed)}"
        )
    return {p: given.get(p, name) for p, name in made_up.items()}


def check_groups(groups: Any) -> None:
    """Horovod's checks of the argument ``groups``."""
    if groups is None:
        return
    if not (isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
        raise ValueError(
            "groups should be a non-negative integer or a list of list of torch.Tensor."
        )
    seen: set[int] = set()
    for parameter in (p for group in groups for p in group) if isinstance(groups, list) else ():
        if not isinstance(parameter, Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if id(parameter) in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(id(parameter))


def check_shards(
    param_groups: Iterable[Mapping[str, Any]],
    process_set: Any,
    config: Config,
    grad_scaler: Any = None,
) -> None:
    """Refuses parameters that are sharded otherwise than within a node, and an exchange among
    different shards.

    Raises:
        ValueError, TypeError: says what is accepted.
    """
    parameters = [p for group in param_groups for p in group["params"]]
    sharded: list[Any] = [p for p in parameters if hasattr(p, "device_mesh")]
    if not sharded:
        return
    if grad_scaler is not None and torch.__version__ < "2.5":  # compares as a version
        raise ValueError(
            f"torch must be 2.5 or later for a grad_scaler with sharded parameters, got "
            f"{torch.__version__}, which does not call their hooks, so that backward() ends without an "
            "exchange"
        )
    if len(sharded) < len(parameters):
        shapes = [tuple(p.shape) for p in parameters if not hasattr(p, "device_mesh")]
        raise ValueError(
            f"the parameters must all be sharded, or none, got {len(sharded)} that are and others, of "
            f"shapes {shapes[:5]}, that are not, whose gradients nobody averages within the node"
        )
    for p in sharded:
        if (
            p.device_mesh != sharded[0].device_mesh
            or p.device_mesh.ndim != 1
            or not p.placements[0].is_shard()
        ):
            raise ValueError(
                f"a sharded parameter must be split along one dimension of its mesh's node, got one of "
                f"shape {tuple(p.shape)} placed as {p.placements} on {p.device_mesh} ({SHARDED})"
            )
    if config.clip_per_tensor:
        raise ValueError(
            "Config: clip_per_tensor must be False for sharded parameters, of which no rank has the whole "
            "norm, got True (clip_norm bounds the norm of all gradients)"
        )
    if config.hierarchical is True:
        raise ValueError(
            "Config: hierarchical must be False, or 'auto', which is False there, for sharded parameters, "
            "whose gradients each node averages already, got True"
        )
    _check_across(sharded[0], process_set)


def _check_across(parameter: Any, process_set: Any) -> None:
    """Refuses a process set of other ranks than those that hold the same shard."""
    groups = torch.distributed
    if process_set is groups.GroupMember.NON_GROUP_MEMBER:
        return
    if not isinstance(process_set, groups.ProcessGroup):
        raise TypeError(
            f"process_set must be a torch.distributed.ProcessGroup for sharded parameters, got "
            f"{process_set!r} ({SHARDED})"
        )
    node, across = parameter.device_mesh.mesh.tolist(), groups.get_process_group_ranks(process_set)
    if set(node) & set(across) != {groups.get_rank()}:
        raise ValueError(
            f"process_set must be of ranks that hold the same shards, got ranks {across}, where ranks "
            f"{node} hold different ones ({SHARDED})"
        )
