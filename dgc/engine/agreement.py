"""Whether the ranks train the same thing: compared once, before anything else is exchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dgc.collective import Collective
from dgc.compression import kernels
from dgc.compression.wire import LONG_SLICE
from dgc.config import Config
from dgc.engine.adam import settling
from dgc.engine.gradients import Gradients
from dgc.engine.parameters import STEP, Parameters, shard, to_local
from dgc.engine.residual_state import ResidualState
from dgc.schedule import Adaptive, Piecewise, Ramp
from dgc.transport import Transport, find
from dgc.transport.bytes import gather_bytes
from dgc.version import __version__
from dgc.warn import LOG, warn

ERROR_LINE_BYTES = 256  # bytes of a line that an error shows
STEPS_AHEAD = 4096  # steps to come at which a user's own schedule is compared
PARAMETERS, VALUES = "the model's parameters", "the parameters' values"
SETTINGS = "the optimizer's settings"
ADVISORY = (SETTINGS, VALUES)  # a difference in these is a warning, no error
MEMORY = "the memory format of the parameters, when the optimizer was made"
OF_A_SHARD = (PARAMETERS, MEMORY, VALUES)  # which differ where ranks hold different shards
OTHER_STATE = (
    "an elastic job should hold its optimizer in dgc.elastic.TorchState, in place of "
    "hvd.elastic.TorchState, which does not know of u and v: what is pending is lost where it restores, and "
    "has another worth when workers come or go"
)
INT_OF_ITEMSIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Agreement:
    """Whether the ranks have been compared.

    Args:
        parameters: of the optimizer.
    """

    def __init__(self, parameters: Parameters):
        self._parameters, self._settings = parameters, parameters.settings
        self.reached = False
        # In an elastic job a state has the ranks compared when one joins.
        self._again = not self._settings.elastic

    def compare_again(self) -> None:
        """Compares the ranks again at the next step. The state of an elastic job calls this when a
        rank joins.
        """
        self.reached, self._again = False, True

    def reach(self, gradients: Gradients, residuals: ResidualState) -> int:
        """Compares the ranks before the first exchange. Then groups them by node; or, in an elastic
        job, rescales the residuals. Returns how many ranks are gone.

        Raises:
            ValueError: on all ranks alike.
        """
        world, elastic, lost = self._settings.world, self._settings.elastic, 0
        if self._again:
            self._compare(world.rank)
        elif world.rank == 0:  # and a rank that joins cannot ask those that have been asked already
            warn(OTHER_STATE)
        if elastic and self._again:
            lost = residuals.rescale(world.size)
        else:
            gradients.group()
        self.reached = True
        return lost

    def _compare(self, rank: int) -> None:
        """Compares with the other ranks what an exchange depends on.

        Raises:
            ValueError: on all ranks alike, if they do not train the same; it says in what they
                differ.
        """
        sections, table = self._sections(), self._parameters
        differences = check(sections, self._settings.transport, table.device)
        if shard(table.first) is not None:
            others = find(table.first.device_mesh.get_group())  # type: ignore[attr-defined]
            whole = {
                section: lines for section, lines in sections.items() if section not in OF_A_SHARD
            }
            differences += check(whole, others, table.device)
        if differences and rank == 0:
            warn(
                f"{'. '.join(differences)}. Ranks exchange updates, so what differs at the start goes on to differ; "
                "dgc.broadcast_parameters(model.state_dict()), and the same settings on all ranks, make them alike"
            )
        size = self._settings.world.size
        LOG.info(
            "rank %d of %d exchanges %d parameters in %d buckets, %d of them compressed",
            rank,
            size,
            len(table.listed),
            len(table.buckets),
            len(table.compressed_residuals()),
        )

    def _sections(self) -> dict[str, list[str]]:
        """Section -> lines that must be alike; those of ``ADVISORY`` had better be."""
        table, config = self._parameters, self._settings.config
        kind, groups = self._of_user()
        compared = [] if self._settings.in_ddp else list(table.listed)
        return {
            "the version of dgc": [__version__],
            "the arguments of DistributedOptimizer": self._arguments(),
            PARAMETERS: [
                f"{table.names[p]} {tuple(p.shape)} {p.dtype}"
                + ("" if (part := shard(p)) is None else f", shard {part[0]} of {part[1]}")
                for p in table.listed
            ],
            MEMORY: [
                f"{name}: its dimensions in the order {order}"
                for residual in table.residuals()
                for name, order in zip(residual.names, residual.orders, strict=True)
                if order is not None
            ],
            "the parameters that travel together": [
                " ".join(table.names[p] for p in bucket.parameters) for bucket in table.buckets
            ],
            "the kernels of GPUs": sorted(
                {  # those of the CPU agree to the bit, and in when they raise an error
                    kernels.module_for("cuda", residual.v.dtype).__name__
                    for residual in table.residuals()
                    if residual.v.is_cuda
                }
            ),
            "the step": [line for line, ours in _of_groups(table.groups) if ours],
            "the schedule of the sparsity": _schedule(config, table.groups[0][STEP]),
            "the local steps": [
                *_local_steps(config, table.groups[0][STEP]),
                f"{len(groups)} param groups",
            ],
            "the dense steps in which AdamW's denominator is found": _dense_steps(
                config, table.groups
            ),
            SETTINGS: [
                f"its class is {kind.__qualname__}",
                *(line for line, ours in _of_groups(groups) if not ours),
            ],
            VALUES: [
                f"bits of {table.names[p]} add up to {bits}"
                for p, bits in zip(compared, sums_of_bits(map(to_local, compared)), strict=True)
            ],
        }

    def _arguments(self) -> list[str]:
        given, scaler = self._settings, self._settings.grad_scaler
        settings = {
            **{
                key: value
                for key, value in vars(given.config).items()
                if key not in ("sparsity", "local_steps")  # which may be functions
            },
            "op": given.op,
            "gradient_predivide_factor": given.gradient_predivide_factor,
            "sparse_as_dense": given.sparse_as_dense,
            "grad_scaler, its state": None if scaler is None else scaler.state_dict(),
        }
        return [f"{key}={value}" for key, value in settings.items()]

    def _of_user(self) -> tuple[type, list[dict[str, Any]]]:
        """The class and the param groups of the user's optimizer. Rounds of local steps have another
        one.
        """
        if self._settings.local_optimizer is None:
            return self._parameters.inner, self._parameters.groups
        user = self._settings.local_optimizer()
        return user._inner, user.param_groups


def check(
    sections: Mapping[str, Iterable[str]], transport: Transport, device: torch.device
) -> list[str]:
    """Compares each rank's sections with rank 0's.

    A rank that has another configuration or model would send messages of other sizes, or in another
    order: the job would hang, or go on with a wrong result. One that has another learning rate, or
    other values, is on its own way.

    Args:
        sections: what is compared -> lines of text; the same sections on every rank.
        transport: what to ask the other ranks over.
        device: of the tensors that travel.

    Returns:
        A sentence about each section of ``ADVISORY`` that differs, with the first line that does; alike
        on all ranks.

    Raises:
        ValueError: on all ranks alike, with such a sentence about the first other section that
            differs.
    """
    texts = {section: "\n".join(lines).encode() for section, lines in sections.items()}
    own = torch.tensor([_hash(text) for text in texts.values()], device=device)
    everyones = transport.start(Collective("all_gather", own), "dgc.agree")()
    differs = (everyones != everyones[0]).cpu()
    sentences = []
    for (section, text), column in zip(texts.items(), differs.T, strict=True):
        if not column.any():
            continue
        ranks = column.nonzero().flatten().tolist()
        here, there = _first_difference(text, ranks[0], transport, device)
        others = f" (and so do {len(ranks) - 1} more)" if len(ranks) > 1 else ""
        sentences.append(
            f"the ranks differ in {section}. Rank {ranks[0]} has: {here}; rank 0 has: {there}{others}"
        )
        if section not in ADVISORY:
            raise ValueError(sentences[0])
    return sentences


def _first_difference(
    text: bytes, rank: int, transport: Transport, device: torch.device
) -> tuple[str, str]:
    """The first line in which a rank differs from rank 0, and rank 0's."""
    lines = text.split(b"\n")
    length = torch.tensor([len(lines)], device=device)
    longest = int(transport.start(Collective("all_gather", length), "dgc.agree.length")().max())
    own = torch.tensor([*map(_hash, lines), *[0] * (longest - len(lines))], device=device)
    everyones = transport.start(Collective("all_gather", own), "dgc.agree.lines")()
    number = int((everyones[rank] != everyones[0]).nonzero()[0])
    line = lines[number] if number < len(lines) else b"nothing"
    texts_of_ranks = gather_bytes(transport, line[:ERROR_LINE_BYTES], "dgc.agree.text", device)
    return texts_of_ranks[rank].decode(errors="replace"), texts_of_ranks[0].decode(errors="replace")


def _of_groups(groups: Iterable[Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """Lines about param groups, and whether they are of keys that are ours."""
    return [
        (f"group {i}: {key}={_without_identity(value)}", str(key).startswith("dgc_"))
        for i, group in enumerate(groups)
        for key, value in sorted(group.items(), key=lambda item: str(item[0]))
        if key not in ("params", "foreach", "fused")
    ]


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def sums_of_bits(tensors: Iterable[Tensor]) -> list[int]:
    """One number for each tensor, the same on any device. It differs as soon as a bit of the tensor
    does.
    """
    sums = []
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(-1).view(INT_OF_ITEMSIZE[tensor.element_size()])
        # Of parts, as torch first makes an int64 of each entry, and a large embedding may be half
        # of a GPU's memory.
        sums.append(sum(int(part.sum(dtype=torch.int64)) for part in bits.split(LONG_SLICE)))
    return sums


def _schedule(config: Config, step: int) -> list[str]:
    """Lines about the sparsities to come."""
    if isinstance(config.sparsity, Adaptive):
        return [str(config.sparsity)]
    known = is_known(config.sparsity)
    return [
        *(
            f"step {at}: {_sparsity(config, at)}"
            for at in _to_come(step, 1 if known else STEPS_AHEAD)
        ),
        *([str(config.sparsity)] if known else []),
    ]


def _local_steps(config: Config, step: int) -> list[str]:
    """Lines about H of the rounds to come."""
    if not callable(config.local_steps):
        return [f"local_steps={config.local_steps}"]
    return [
        f"step {at}: {_or_error(config.local_steps_at, at)}" for at in _to_come(step, STEPS_AHEAD)
    ]


def _to_come(step: int, ahead: int) -> tuple[int, ...]:
    """The steps at which a user's own function is compared: the next ones, and some beyond."""
    return (*range(step, step + ahead), *(step + 2**i for i in range(20) if 2**i >= ahead))


def is_known(sparsity: Any) -> bool:
    """Whether a schedule is plain data, from which the sparsity of every step is known."""
    return isinstance(sparsity, (Piecewise, Ramp, float, int))


def _dense_steps(config: Config, groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines about when AdamW's compressed steps begin, where the schedule does not say."""
    says = (
        not config.momentum_correction
        or _sparsity(config, 0) == 0
        or any("betas" not in group for group in groups)
    )
    return [] if says else [str(settling(groups))]


def _sparsity(config: Config, step: int) -> Any:
    return _or_error(config.sparsity_at, step)


def _or_error(function: Callable[[int], Any], step: int) -> Any:
    """A value of a step that is still to come, where even a function's error is something to
    compare.
    """
    try:
        return function(step)
    except Exception as error:
        return type(error).__name__


def _without_identity(value: Any) -> Any:
    """A setting without what differs on ranks that are alike: where an object lies, on which
    device, in what order.
    """
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (tuple, list)):
        return [_without_identity(item) for item in value]
    return (
        value
        if value is None or isinstance(value, (bool, int, float, complex, str))
        else type(value).__name__
    )
