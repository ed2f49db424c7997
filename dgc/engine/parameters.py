"""The optimizer's parameters: this rank's part of each, their names, their buckets, and how they
travel.

A parameter that ``fully_shard`` has split over the ranks of a node (FSDP2) is one like any other.
``fully_shard`` averages within the node, leaves each rank the part of the gradient that belongs to
its shard, and calls the hooks of ``Tensor.register_post_accumulate_grad_hook`` with it. u and v are
those of the shard, which is exchanged among the ranks that hold the same one, one in each node.
Whether it travels compressed is decided by the size of the whole, alike for all shards.
``FSDPModule.set_all_reduce_hook`` would not do: it is given a module's gradients as one padded
buffer, and is not told whose they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgc.collective import dense_bytes
from dgc.compression import kernels
from dgc.compression.device import refuse_capture
from dgc.compression.residual import Residual
from dgc.compression.sizes import SUM_BITS
from dgc.engine.settings import Settings
from dgc.engine.wrapped import refuse_apex
from dgc.paths.bucket_step import chosen

# More entries in a bucket => fewer messages, less overlap with the backward pass.
BUCKET_NUMEL = 1 << 23
MAX_NUMEL = (1 << 31) - 1  # of a bucket: beyond, positions would not fit into 32 bits
# Gradients of these dtypes are exchanged.
DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
STEP = "dgc_step"  # in param_groups[0], so that it is saved, loaded and broadcast with the learning rate
BEGAN = "dgc_compressed_from"  # beside it: the first step since which steps are compressed; -1: they are stock's


def to_local(tensor: Any) -> Any:
    """This rank's part of a sharded tensor, in the same memory; a complex one as real numbers,
    (*shape, 2); any other tensor, and None, as it is.
    """
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            tensor = tensor.to_local()
    if tensor is None or tensor.is_sparse or not tensor.is_complex():
        return tensor
    with torch.no_grad():
        return torch.view_as_real(tensor)


def shard(parameter: Tensor) -> tuple[int, int] | None:
    """The number of this rank's shard, and how many there are; None if the parameter is whole."""
    mesh = getattr(parameter, "device_mesh", None)
    return None if mesh is None else (mesh.get_local_rank(), mesh.size())


def sum_of_shards(value: Tensor, parameter: Tensor) -> Tensor:
    """The sum of a value over the ranks with the other shards; they all call this."""
    if shard(parameter) is not None:
        torch.distributed.all_reduce(value, group=parameter.device_mesh.get_group())  # type: ignore[attr-defined]
    return value


@dataclass(eq=False)
class ParameterBucket:
    """Parameters that travel together.

    Args:
        name: of their exchange, alike on every rank.
        parameters: in the order in which a backward pass completes them.
        compressed: whether they travel compressed; else dense.
        residual: u and v of compressed ones, v of dense ones that travel rounded, None of others.
    """

    name: str
    parameters: list[Tensor]
    compressed: bool
    residual: Residual | None

    def accumulates(self, stock: bool) -> bool:
        """Whether their gradients pass through v.

        Args:
            stock: nothing is compressed in this step.
        """
        return self.residual is not None and not stock

    def dtype(self, stock: bool) -> torch.dtype:
        """The dtype of their update."""
        if self.residual is not None and self.accumulates(stock):
            return self.residual.v.dtype
        dtype = self.parameters[0].dtype
        return dtype.to_real() if dtype.is_complex else dtype


def compressible(parameter: Tensor, min_numel: int) -> bool:
    """Whether a parameter travels compressed. A small one, or a vector, costs less dense than its
    positions would. A complex one travels dense too.
    """
    return (
        parameter.dim() > 1
        and parameter.numel() >= max(1, min_numel)
        and not parameter.is_complex()
    )


def pack(
    parameters: list[Tensor], names: dict[Tensor, str], groups: Any, min_numel: int
) -> list[tuple[list[str], list[Tensor]]]:
    """The parameters that travel together: of one kind, in the order in which a backward pass
    completes them.

    Args:
        parameters: in the order of the optimizer.
        names: parameter -> name.
        groups: as for :func:`dgc.DistributedOptimizer`.
        min_numel: of :class:`dgc.Config`.

    Returns:
        Of each bucket the names and the parameters. Frozen parameters travel apart, and last.
    """
    sets = _sets(parameters[::-1], groups)
    packed = []
    for together in [[p for p in wanted if p.requires_grad] for wanted in sets] + [
        [p for p in wanted if not p.requires_grad] for wanted in sets
    ]:
        packed += _by_kind(together, min_numel, BUCKET_NUMEL if groups is None else None)
    return [([names[p] for p in together], together) for together in packed]


def _sets(backward: list[Tensor], groups: Any) -> list[list[Tensor]]:
    """The groups that the user wants, in the order of the backward pass."""
    if groups is None:
        return [backward]
    if isinstance(groups, int):
        size, extra = divmod(len(backward), groups)
        ends = [size * (i + 1) + min(i + 1, extra) for i in range(groups)]
        return [backward[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    position = {p: i for i, p in enumerate(backward)}
    sets = [
        sorted((p for p in group if p in position), key=position.__getitem__) for group in groups
    ]
    grouped = {p for together in sets for p in together}
    return [*sets, [p for p in backward if p not in grouped]]


def _by_kind(together: list[Tensor], min_numel: int, full: int | None) -> list[list[Tensor]]:
    """Splits a set by device, dtype and way of travelling, and where a bucket is full."""
    buckets: list[list[Tensor]] = []
    filling: dict[Any, list[Tensor]] = {}
    numel: dict[Any, int] = {}
    for parameter in together:
        kind = (parameter.device, parameter.dtype, compressible(parameter, min_numel))
        if numel.get(kind, 0) + parameter.numel() > MAX_NUMEL and kind in filling:
            buckets.append(filling.pop(kind))
            numel[kind] = 0
        filling.setdefault(kind, []).append(parameter)
        numel[kind] = numel.get(kind, 0) + parameter.numel()
        if full is not None and numel[kind] >= full:
            buckets.append(filling.pop(kind))
            numel[kind] = 0
    return [*buckets, *filling.values()]


class Parameters:
    """Knows each parameter's name and bucket, and how it travels.

    Asks the optimizer for its groups and its state each time, as loading replaces both.

    Args:
        optimizer: whose parameters; one of ours.
        names: parameter -> name.
        settings: of the optimizer.
    """

    def __init__(self, optimizer: Any, names: dict[Tensor, str], settings: Settings):
        self._optimizer = weakref.ref(optimizer)
        self.inner: type[torch.optim.Optimizer] = optimizer._inner  # the wrapped optimizer's class
        self.names, self.settings = names, settings
        self.buckets: list[ParameterBucket] = []  # in the order in which they leave
        self.bucket_of: dict[Tensor, ParameterBucket] = {}
        # Parameter that had a sparse gradient -> its sparse dimensions.
        self.sparse: dict[Tensor, int] = {}
        self.emptied: set[Tensor] = set()  # of these, those whose u and v have been emptied
        self.numels: dict[Tensor, int] = {}  # entries of this rank's part
        self.listed: dict[Tensor, None] = {}  # in order
        # Exchanged also where a rank has no gradient for them.
        self.requires_update: set[Tensor] = set()
        self.frozen: set[Tensor] = set()  # when they were added; exchanged once they thaw

    @property
    def optimizer(self) -> Any:
        """The optimizer (a weak reference: it owns the engine, not the other way round)."""
        return self._optimizer()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's ``param_groups``."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def step(self) -> int:
        """How many steps were taken: the step of the schedule, alike on all ranks."""
        return int(self.groups[0][STEP])

    @property
    def stock(self) -> bool:
        """Whether nothing is compressed now: ``p.grad`` is the averaged gradient, and the wrapped
        optimizer has all of its state.
        """
        began: int = self.groups[0].get(BEGAN, -1)
        return began < 0

    @property
    def first(self) -> Tensor:
        """The first parameter. Either all parameters are sharded, or none is."""
        return next(iter(self.listed))

    @property
    def device(self) -> torch.device:
        """The device of small messages between ranks: the first parameter's."""
        return self.first.device

    def group_of(self) -> dict[Tensor, dict[str, Any]]:
        """Parameter -> its param group."""
        return {p: group for group in self.groups for p in exchanged([group])}

    def add(self, parameters: list[Tensor], all_take_part: bool, groups: Any) -> None:
        """Notes which parameters there are, as stock's class does, and puts them into buckets.

        Args:
            parameters: that are new.
            all_take_part: in an exchange, also those that have no gradient.
            groups: as for :func:`dgc.DistributedOptimizer`.
        """
        self.listed.update(dict.fromkeys(parameters))
        if not self.settings.exchanges:
            return
        self.frozen.update(p for p in parameters if not p.requires_grad)
        if all_take_part:
            self.requires_update.update(p for p in parameters if p.requires_grad)
        config = self.settings.config
        for names, together in pack(parameters, self.names, groups, config.min_numel):
            number, compressed = len(self.buckets), compressible(together[0], config.min_numel)
            residual, rounds = None, config.value_bits <= SUM_BITS and not together[0].is_complex()
            if compressed or rounds:
                members = dict(zip(names, map(to_local, together), strict=True))
                residual = Residual(
                    f"bucket {number}", members, velocity=compressed and config.corrects_momentum
                )
            if residual is not None and compressed:  # what it takes to run its loops begins now
                kernels.current(residual.v.device.type, residual.v.dtype)
            bucket = ParameterBucket(f"dgc.{number}.{names[0]}", together, compressed, residual)
            self.buckets.append(bucket)
            self.bucket_of.update(dict.fromkeys(together, bucket))
        self.numels.update({p: to_local(p).numel() for p in parameters})

    def compressed_residual(self, parameter: Tensor) -> Residual | None:
        """The bucket of a parameter that travels compressed; None for others."""
        if parameter in self.sparse or parameter not in self.bucket_of:
            return None
        bucket = self.bucket_of[parameter]
        return bucket.residual if bucket.compressed else None

    def chosen(self, parameter: Tensor) -> int:
        """How many entries of a compressed parameter each rank chose in the last step."""
        residual = self.compressed_residual(parameter)
        assert residual is not None
        return chosen(residual, self.names[parameter])

    def travels_compressed(self, parameter: Tensor) -> bool:
        """Whether a parameter travels compressed. Outside a process set, where there are no
        buckets: whether it would.
        """
        brought = parameter in self.listed and parameter not in self.sparse
        return brought and compressible(parameter, self.settings.config.min_numel)

    def compressed_residuals(self) -> list[Residual]:
        """u and v of what travels compressed."""
        return [
            bucket.residual
            for bucket in self.buckets
            if bucket.compressed and bucket.residual is not None
        ]

    def residuals(self) -> list[Residual]:
        """All residuals, of compressed buckets and of dense ones that travel rounded."""
        return [bucket.residual for bucket in self.buckets if bucket.residual is not None]

    @property
    def numel(self) -> int:
        """Entries of all parameters, of this rank's parts."""
        return sum(self.numels.values())

    @property
    def dense_numel(self) -> int:
        """Entries of those that travel dense, and are not frozen."""
        return sum(
            n
            for p, n in self.numels.items()
            if p.requires_grad and not self.bucket_of[p].compressed
        )

    def dense_bytes(self, size: int) -> float:
        """Bytes that a ring allreduce of all gradients in float32 would send, among so many ranks."""
        numel = sum(n for p, n in self.numels.items() if p.requires_grad)
        return dense_bytes(numel, size) * self.settings.steps_of_round

    def active(self, parameters: Iterable[Tensor], with_gradient: set[Tensor]) -> list[Tensor]:
        """The parameters that are exchanged in a step: all that have had a gradient, and those that
        are not frozen.
        """
        return [
            p
            for p in parameters
            if p in with_gradient
            or (p.requires_grad and (p in self.requires_update or p in self.frozen))
        ]

    def check_unchanged(self) -> None:
        """Refuses parameters that were added, taken away, moved or reshaped by hand: kernels are
        given addresses, and cannot find out for themselves.
        """
        refuse_apex(self.optimizer)
        refuse_capture(self.device)
        groups = self.group_of()
        if STEP not in self.groups[0]:
            raise RuntimeError(
                "param_groups must stay in their order, got another group as the first one"
            )
        known = {p for p in self.names if p.dtype in DTYPES}
        if groups.keys() != known:
            added = [f"one of shape {tuple(p.shape)}" for p in groups if p not in known]
            taken = [name for p, name in self.names.items() if p not in groups]
            raise RuntimeError(
                f"param_groups must not be changed by hand, got {', '.join([*added, *taken][:5])} (use "
                "add_param_group(), and requires_grad_(False) for what is no longer trained)"
            )
        for bucket in self.buckets:
            if (residual := bucket.residual) is None:
                continue
            device = residual.v.device
            for p, shape in zip(bucket.parameters, residual.shapes, strict=True):
                if p.device != device or (p.shape != shape and not hasattr(p, "to_local")):
                    raise RuntimeError(
                        f"{self.names[p]} must be {tuple(shape)} on {device}, as when the "
                        f"DistributedOptimizer was made, got {tuple(p.shape)} on {p.device} (change the "
                        "model first, then make its optimizer)"
                    )

    def note_sparse(self, parameters: Iterable[Tensor]) -> None:
        """Notes which of these have a sparse gradient: they travel as sparse tensors from now on."""
        if not self.settings.sparse_as_dense:
            self.sparse.update(
                {
                    p: p.grad.sparse_dim()
                    for p in parameters
                    if p.grad is not None and p.grad.is_sparse and p not in self.sparse
                }
            )

    def forget_sparse(self) -> None:
        """Forgets which parameters are sparse. The state of the training that is loaded tells."""
        self.sparse.clear()
        self.emptied.clear()

    def sparse_names(self) -> dict[str, int]:
        """The names of parameters that had a sparse gradient, with its sparse dimensions."""
        return {self.names[p]: dimensions for p, dimensions in self.sparse.items()}

    def load_sparse_names(self, sparse: Mapping[str, int]) -> None:
        """Loads what :meth:`sparse_names` gave: a rank without a gradient would not know."""
        if not self.settings.sparse_as_dense:
            self.sparse.update(
                {p: sparse[name] for p, name in self.names.items() if name in sparse}
            )


def exchanged(param_groups: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    """The parameters that may have a gradient: integers, say, are left alone."""
    return [p for group in param_groups for p in group["params"] if p.dtype in DTYPES]
