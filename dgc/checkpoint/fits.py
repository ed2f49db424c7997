"""What can be saved, and what fits the model and the optimizer that it is loaded into."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dgc.checkpoint.files import Tree, check_tensors
from dgc.engine.adam import RECEIVED
from dgc.engine.engine import Engine, engine_of
from dgc.engine.parameters import STEP
from dgc.engine.progress import KEYS, SPARSITY
from dgc.engine.residual_state import check_views
from dgc.engine.rounds import Drifts, Rounds


def engine_or_none(optimizer: Any) -> Engine | None:
    """Ours; None of Horovod's own optimizer, which keeps no residuals."""
    return engine_of(optimizer) if hasattr(optimizer, "_dgc") else None


def rounds_or_none(optimizer: Any) -> Rounds | None:
    """The rounds of an optimizer with local steps; None of others."""
    engine = engine_or_none(optimizer)
    return engine.source.rounds if engine and isinstance(engine.source, Drifts) else None


def waits_for_step(optimizer: Any) -> bool:
    """Whether what was sent is in no residual, and not yet applied; stock Horovod's optimizer has
    the second.
    """
    engine = engine_or_none(optimizer)
    waits: bool = (
        getattr(optimizer, "_synchronized", False)
        if engine is None
        else engine.step.waits_for_update
    )
    return waits


def check_plain(trees: Tree) -> None:
    """Refuses what could not be loaded without running code; asked of what loads it, without the
    tensors' content.
    """
    for name, tree in trees.items():
        file = io.BytesIO()
        try:
            torch.save(tree_map(_hollow, tree), file)
            file.seek(0)
            check_tensors(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:
            culprit = re.search(r"GLOBAL (\S+)", str(error))
            raise TypeError(
                f"save_checkpoint: {name} must be plain data, that is numbers, strings, None, tensors "
                "(dense or COO, with content), and dicts, lists and tuples of such, "
                f"got {culprit[1] if culprit else error}"
            ) from error


def as_plain(leaf: Any) -> Any:
    """A number of NumPy's, such as a learning rate that a scheduler has computed with it, as
    Python's.
    """
    numpys = type(leaf).__module__ == "numpy" and getattr(leaf, "shape", None) == ()
    return leaf.item() if numpys else leaf


def _hollow(leaf: Any) -> Any:
    """A plain tensor without its content; anything else, tensors of other kinds too, as it is."""
    plain = (
        type(leaf) in (Tensor, nn.Parameter)
        and not vars(leaf)
        and leaf.device.type != "meta"
        and (leaf.layout in (torch.strided, torch.sparse_coo))
    )
    return torch.empty(0, device="cpu") if plain else leaf


def parameter_names(model: nn.Module) -> set[str]:
    """As its state has them: a parameter that modules share under each of its names."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def check_held(optimizer: Any, model: nn.Module) -> None:
    held = {*model.parameters(), *model.buffers()}
    if foreign := [
        tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in held
    ]:
        raise ValueError(
            "model must hold all parameters of the optimizer, or they would not be saved; got one that "
            f"lacks those of shapes {foreign[:5]} (give one module that holds them all, say "
            "nn.ModuleList([model, other]))"
        )


def check_sparse(given: Any, names: Mapping[str, Tensor]) -> None:
    """Refuses what a file says of sparse gradients, if it is nonsense; older files say nothing."""
    if not isinstance(given, dict):
        raise ValueError(f"what it says of sparse gradients must be a dict, got {given!r}")
    for name, dimensions in given.items():
        if (
            name not in names
            or type(dimensions) is not int
            or not 0 < dimensions <= names[name].dim()
        ):
            raise ValueError(
                "the sparse gradients must be names of parameters, with some of their dimensions, got "
                f"{name!r} with {dimensions!r}"
            )


def on_cpu(model: nn.Module) -> Tree:
    """A copy of a model's state."""
    state = model.state_dict()
    for name, value in state.items():  # in place, as it knows the versions of its modules
        state[name] = (
            value.to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        )
    return state


def check_model(given: Mapping[str, Any], model: nn.Module) -> None:
    expected, parameters = model.state_dict(), parameter_names(model)
    # A module may change its buffers' shapes when it loads. One that does not will refuse others,
    # but takes a scalar from whatever has one dimension.
    check_same(
        "model",
        given,
        expected,
        {
            name
            for name, x in expected.items()
            if isinstance(x, Tensor) and (name not in parameters and x.dim() > 0)
        },
    )


def check_same(
    what: str,
    given: Mapping[str, Any],
    expected: Mapping[str, Any],
    of_any_shape: Collection[str] = (),
) -> None:
    if given.keys() != expected.keys():
        lacking, unknown = (
            sorted(expected.keys() - given.keys()),
            sorted(given.keys() - expected.keys()),
        )
        raise ValueError(
            f"{what} must have the same names, got none for {lacking} and unknown {unknown}"
            + _of_wrapper(given.keys(), expected.keys())
        )
    for name, tensor in expected.items():
        if isinstance(tensor, Tensor):
            check_like(f"{what}: {name}", given[name], tensor, name in of_any_shape)


def _of_wrapper(given: Collection[str], expected: Collection[str]) -> str:
    """What to do, where one of the two is a wrapper's and the other that of the module in it."""
    for prefix, where in (("module.", "model.module"), ("_orig_mod.", "model._orig_mod")):
        if {prefix + name for name in given} == set(expected):
            return f" (the checkpoint is of the module in the wrapper: give {where})"
        if {prefix + name for name in expected} == set(given):
            return (
                f" (the checkpoint is of a wrapper, whose names begin with {prefix}: give such a wrapper "
                f"to load it, and save {where} from now on)"
            )
    return ""


def check_like(what: str, given: Any, expected: Tensor, of_any_shape: bool = False) -> None:
    """Refuses a tensor that cannot be copied into the other."""
    if not isinstance(given, Tensor):
        raise ValueError(
            f"{what} must be a tensor of shape {tuple(expected.shape)}, got a {type(given).__name__}"
        )
    if given.shape != expected.shape and not of_any_shape:
        raise ValueError(
            f"{what} must have shape {tuple(expected.shape)}, got {tuple(given.shape)}"
        )
    if given.layout != expected.layout or not torch.can_cast(given.dtype, expected.dtype):
        raise ValueError(
            f"{what} must be {expected.layout}, {expected.dtype}, got {given.layout}, {given.dtype}"
        )


def check_optimizer(optimizer: Any, state: Tree) -> None:
    """Refuses an optimizer's state by what ``load_state_dict`` does not look at, and steps rely on."""
    groups, own = state["param_groups"], optimizer.param_groups
    sizes = [[len(group["params"]) for group in some] for some in (groups, own)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the optimizer's groups must have {sizes[1]} parameters, got {sizes[0]}")
    # Other flags, which torch has added since then, get their defaults.
    steady = {
        "lr",
        "momentum",
        "dampening",
        "weight_decay",
        "nesterov",
        "maximize",
        *(key for key, value in optimizer.defaults.items() if _is_rate(value)),
    }
    for i, (given, expected) in enumerate(zip(groups, own, strict=True)):
        if missing := sorted(expected.keys() & steady - given.keys()):
            raise ValueError(
                f"group {i} of the optimizer must have {missing}, got a group without them (was an "
                "optimizer of another class saved? Make one of that class, or load the model alone)"
            )
        for key in (expected.keys() & given.keys()) - {"params"}:
            value, numbers = given[key], (bool, int, float, Tensor, type(None))
            alike = any(
                isinstance(value, kinds) and isinstance(expected[key], kinds)
                for kinds in (numbers, (list, tuple), type(expected[key]))
            )
            if (
                not alike
                or (isinstance(value, Tensor) and value.numel() != 1)
                or (key == STEP and (type(value) is not int or value < 0))
                or (key in KEYS.values() and not (isinstance(value, float) and -1 <= value <= 1))
                or (key == SPARSITY and not 0 <= value < 1)
            ):
                raise ValueError(
                    f"{key} of group {i} must be like {expected[key]!r}, got {value!r}"
                )
    parameters = by_index(optimizer, state)
    # Others may keep some of another shape.
    adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", RECEIVED) if adam else ()
    for index, buffers in state["state"].items():
        if index not in parameters:
            raise ValueError(
                f"the optimizer's state must be of parameters in its groups, got {index!r}, which is in "
                "none"
            )
        for key in ("momentum_buffer", *moments):
            if (buffer := buffers.get(key)) is not None:
                # Of an embedding.
                sparse = (
                    isinstance(buffer, Tensor) and key == "momentum_buffer" and buffer.is_sparse
                )
                check_like(
                    f"{key} of parameter {index}",
                    buffer.to_dense() if sparse else buffer,
                    parameters[index],
                )


def _is_rate(value: Any) -> bool:
    """A number, or some: a rate, coefficients of averages; no flag."""
    some = value if isinstance(value, (tuple, list)) else (value,)
    return all(
        isinstance(number, (int, float, Tensor)) and not isinstance(number, bool) for number in some
    )


def by_index(optimizer: Any, state: Tree) -> dict[int, Tensor]:
    """A saved optimizer's numbers of parameters -> these parameters."""
    return {
        index: p
        for given, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
        for index, p in zip(given["params"], own["params"], strict=True)
    }


def names_of(optimizer: Any, model: nn.Module) -> dict[str, Tensor]:
    """Name -> parameter, by the names that residuals have."""
    names = getattr(optimizer, "_parameter_names", None)
    return (
        dict(model.named_parameters()) if names is None else {name: p for p, name in names.items()}
    )


def check_residuals(given: Tree, expected: Tree, keeps: bool) -> None:
    """Args: ``expected``: what the optimizer keeps; or, if it keeps nothing, all that it could be
    given.
    """
    if keeps and not (given["u"] or given["v"]):
        return  # it was saved without
    for letter in "uv":
        some = expected[letter]
        check_views(
            letter,
            given[letter],
            some if keeps else {k: some[k] for k in given[letter] if k in some},
        )
