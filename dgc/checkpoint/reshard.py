"""Residuals on another number of ranks: what each rank gets of what the former ones had."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from torch import Tensor, nn

from dgc.checkpoint.files import Tree
from dgc.checkpoint.fits import by_index, names_of, rounds_or_none
from dgc.engine.parameters import BEGAN
from dgc.engine.residual_state import check_views
from dgc.engine.wrapped import is_sgd


def own_residuals(optimizer: Any) -> Tree:
    """This rank's u and v; Horovod's own optimizer has none."""
    if not hasattr(optimizer, "residual_state_dict"):
        return {"u": {}, "v": {}}
    state = optimizer.residual_state_dict()
    for letter in "uv":
        for name, tensor in state[letter].items():
            if not tensor.isfinite().all():
                raise ValueError(
                    f"save_checkpoint: {letter} of {name} must be finite, got an infinity or NaN (its "
                    "sums have overflowed)"
                )
    return {letter: state[letter] for letter in "uv"}


def own_round(optimizer: Any) -> Tree:
    """This rank's part of a round; nothing without local steps."""
    rounds = rounds_or_none(optimizer)
    return {} if rounds is None else {"round": rounds.own()}


def mean_round(rounds: list[Tree]) -> Tree:
    """What ranks of another number begin with: the means of the former ranks' parameters, and of
    the states of their optimizers.

    Args:
        rounds: of the former ranks, in their order.

    Returns:
        As :meth:`dgc.engine.rounds.Rounds.own`, at the end of a round.
    """
    first = rounds[0]
    x = {name: _mean([own["x"][name] for own in rounds]) for name in first["x"]}
    states = [own["inner"]["state"] for own in rounds]
    state = {}
    for index in sorted({index for one in states for index in one}):
        having = [one[index] for one in states if index in one]  # some may not have used it
        state[index] = {key: _mean([own[key] for own in having]) for key in having[0]}
    between = {"count": 0, "has_gradient": False, "kept": [], "inner_at_start": {}}
    return {**first, **between, "x": x, "inner": {**first["inner"], "state": state}}


def _mean(values: list[Any]) -> Any:
    """The mean of tensors that are not whole numbers; of others the first."""
    if not isinstance(values[0], Tensor) or not values[0].is_floating_point():
        return values[0]
    return sum(x.double() for x in values).div_(len(values)).to(values[0].dtype)


def weights(
    size: int, average: bool, new_rank: int | None, new_size: int, new_average: bool
) -> dict[int, float]:
    """Old rank -> what its residual counts on this rank; see :func:`load_checkpoint`. Without a new
    rank: in all.
    """
    f, new_f = (
        Fraction(1, n) if mean else Fraction(1)
        for n, mean in ((size, average), (new_size, new_average))
    )
    if new_rank is None:
        return dict.fromkeys(range(size), float(f))
    weights = {}
    for r in range(size):
        overlap = min(Fraction(r + 1, size), Fraction(new_rank + 1, new_size)) - max(
            Fraction(r, size), Fraction(new_rank, new_size)
        )
        if overlap > 0:
            weights[r] = float(overlap * size * f / new_f)
    return weights


def accumulate(total: Tree, residuals: Tree, weight: float, single_weight: bool) -> None:
    """Adds a rank's residuals to the total, in float64; alone and whole they stay as they are, to
    the bit.
    """
    for letter in "uv":
        if total[letter]:
            check_views(letter, residuals[letter], total[letter])
        for name, tensor in residuals[letter].items():
            if single_weight and weight == 1:
                total[letter][name] = tensor
            elif name in total[letter]:
                total[letter][name].add_(tensor, alpha=weight)
            else:
                total[letter][name] = tensor.double() * weight


def _wrapped(optimizer: Any) -> Any:
    """The class of an optimizer, or of the one within ours or Horovod's, which have a step() of
    their own.
    """
    kind: Any = type(optimizer)
    return getattr(
        kind, "_inner", kind.__base__ if hasattr(optimizer, "_allreduce_delay") else kind
    )


def fold(optimizer: Any, model: nn.Module, state: Tree, total: Tree) -> dict[Tensor, Tensor]:
    """Moves u and the decay's momentum into the momentum of the state of an optimizer that keeps no
    residuals.

    Returns:
        Parameter -> what pending v adds to it, float64; nothing to a frozen one.
    """
    pending = any(x.any() for letter in "uv" for x in total[letter].values())
    if pending and not is_sgd(_wrapped(optimizer)):
        raise ValueError(
            f"pending gradients must have an optimizer that keeps residuals, got "
            f"{type(optimizer).__name__}, which keeps none here (call dgc.register_comm_hook(), or make the "
            "DistributedOptimizer, before load_checkpoint(); with one process, set HOROVOD_ELASTIC=1 or load "
            "with torch.optim.SGD)"
        )
    names = names_of(optimizer, model)
    indices = {p: index for index, p in by_index(optimizer, state).items()}
    group_of = {index: group for group in state["param_groups"] for index in group["params"]}
    state["param_groups"][0].pop(BEGAN, None)
    for name, u in total["u"].items():
        index = indices[names[name]]
        buffers = state["state"].setdefault(index, {})
        momentum = u.double().mul_(-1 if group_of[index]["maximize"] else 1)
        if (
            own := buffers.get("momentum_buffer")
        ) is not None:  # decay's; of sparse gradients it is not in u
            if not momentum.any():
                continue
            momentum.add_(own.to_dense() if own.is_sparse else own)
        if momentum.any() or group_of[index].get("momentum"):
            buffers["momentum_buffer"] = momentum.to(names[name].dtype)
    updates: dict[Tensor, Tensor] = {}
    for name, v in total["v"].items() if pending else ():
        if not names[name].requires_grad:
            continue
        group = group_of[indices[names[name]]]
        updates[names[name]] = v.double() * (float(group["lr"]) * (1 if group["maximize"] else -1))
    return updates
