"""The residual: u and v of the parameters of one bucket; clip, accumulate, take, restore.

The letters are the paper's (Algorithm 1 and section 3): g is the local gradient, u the velocity, v
what has been accumulated and not yet sent, m the momentum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate as accumulated
from typing import Any

import torch
from torch import Tensor

from dgc.compression.device import tensor_of


@dataclass(frozen=True)
class Gradient:
    """One parameter's local gradient of one step, and the momentum it is to be accumulated with."""

    g: Tensor  # the parameter's shape, any strides
    momentum: float = 0.0
    nesterov: bool = False


class Residual:
    """Some parameters of one device and dtype, and what is kept of them: one flat u and one flat v.

    Args:
        name: says which bucket it is, alike on every rank.
        parameters: name -> tensor of the parameter's shape, strides, dtype and device; only those
            four are used. What is kept lies in the order of the parameter's memory.
        velocity: whether there is a u (momentum correction).
    """

    # Of the last step, where entries are added up at owners: int64, 0-dim; see
    # :class:`dgc.engine.report.Report`.
    overflow_entries: Tensor | int = 0

    def __init__(self, name: str, parameters: Mapping[str, Tensor], velocity: bool = True):
        first = next(iter(parameters.values()))
        self.name = name
        self.names = tuple(parameters)
        self.shapes = tuple(parameter.shape for parameter in parameters.values())
        self.orders = tuple(map(memory_order, parameters.values()))
        self.numels = tuple(parameter.numel() for parameter in parameters.values())
        self.offsets = tuple(accumulated(self.numels, initial=0))[:-1]
        self.numel = sum(self.numels)
        self.v = torch.zeros(self.numel, dtype=residual_dtype(first.dtype), device=first.device)
        self.u = self.v.new_zeros(self.numel) if velocity else None
        self.gradient_square: Tensor | float = 0.0  # squared norm of the last gradient accumulated
        self.entries_sent: Tensor | int = 0  # in the last step
        self.total_entries = torch.zeros((), dtype=torch.int64, device=first.device)
        # int32 (P + 1,), where the kernels do not ask the device: whose last gradient was not
        # finite, and whether any.
        self.flags: Tensor | None = None
        # What exchanges make once for it, as it holds tables; and the layout of the last step.
        self.layouts: dict[Any, Any] = {}
        self.last_layout: Any = None
        self.reduce_plan: Any = None

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a flat tensor of ``numel`` entries, by parameter, in the parameter's shape
        and order.
        """
        return {
            name: self.shaped(p, part)
            for p, (name, part) in enumerate(zip(self.names, flat.split(self.numels), strict=True))
        }

    def shaped(self, parameter: int, part: Tensor) -> Tensor:
        """One of those parts in its parameter's shape and order."""
        return shaped(part, self.shapes[parameter], self.orders[parameter])

    def in_order(self, parameter: int, tensor: Tensor) -> Tensor:
        """A view of a tensor of a parameter's shape that is contiguous if it lies in memory as the
        parameter did.
        """
        order = self.orders[parameter]
        return tensor if order is None else tensor.permute(order)

    def accumulate(
        self, gradients: Mapping[str, Gradient], scale: Tensor | Mapping[str, Tensor] | None = None
    ) -> list[str]:
        """Adds the local gradients into u and v (paper, equation 4); a parameter without one is
        left as it was.

        Args:
            gradients: parameter -> its gradient.
            scale: multiplies the gradients first (clipping): one 0-dim tensor for all, or one each.

        Returns:
            The parameters whose gradient is not finite; such entries count as 0.
        """
        bad, square = [], self.v.new_zeros(())
        u, v = self.views(self.v if self.u is None else self.u), self.views(self.v)
        for name, gradient in gradients.items():
            g = gradient.g.detach().to(self.v.dtype)
            if scale is not None:
                g = g * (scale[name] if isinstance(scale, Mapping) else scale).to(g)
            norm = torch.linalg.vector_norm(g)
            # The norm may be infinite where no entry is.
            if not torch.isfinite(norm) and not torch.isfinite(g).all():
                bad.append(name)
                g = torch.where(torch.isfinite(g), g, 0)
                norm = torch.linalg.vector_norm(g)
            square += norm.square()
            m = 0.0 if self.u is None else gradient.momentum
            accumulate(u[name], v[name], g, m, gradient.nesterov)
        self.gradient_square = square
        return bad

    def rewind(self, name: str, m: float, nesterov: bool) -> None:
        """Makes the next :meth:`accumulate` of a parameter add to the step of the last one: with it
        u = m u + g + g' and v = v + u, as if both gradients had come together.
        """
        if self.u is not None and m != 0:
            u, v = self.views(self.u)[name], self.views(self.v)[name]
            v.sub_(u * m if nesterov else u)
            u.div_(m)

    def take(self, index: Tensor, sent: Tensor, masking: bool) -> None:
        """Takes out of v what is sent, and stops the momentum there (momentum factor masking,
        section 3.3).

        Args:
            index: int64 (E,), positions in v, each at most once among those with ``sent`` != 0.
            sent: (E,), what receivers will read there, in v's dtype. What rounding dropped stays in
                v; an entry that rounded to 0 was not sent, and is not masked.
            masking: also set u to zero there.
        """
        self.v.index_add_(0, index, sent, alpha=-1)
        if masking and self.u is not None:
            # By multiplication: the empty slots of a message all point at one entry, which they
            # must not touch.
            self.u.scatter_reduce_(0, index, (sent == 0).to(self.u.dtype), "prod")
        self.count(torch.count_nonzero(sent))

    def take_all(self, names: Iterable[str]) -> Tensor:
        """Takes all of v of these parameters and leaves u alone: density 1, which is momentum SGD.

        Returns:
            It, flat, with zeros for the other parameters, whose v stays.
        """
        taken, self.v = self.v, torch.zeros_like(self.v)
        here, left = self.views(taken), self.views(self.v)
        for name in set(self.names).difference(names):
            left[name].copy_(here[name])
            here[name].zero_()
        return taken

    @cached_property
    def numel_of(self) -> dict[str, int]:
        """Parameter -> its entries, one after the other."""
        return dict(zip(self.names, self.numels, strict=True))

    @cached_property
    def ends(self) -> Tensor:
        """int64 (P,): where each parameter ends."""
        return tensor_of(self.numels, self.v.device).cumsum(0)

    @cached_property
    def beginnings(self) -> Tensor:
        """int64 (P,): where each parameter begins; an empty one at the end has the last entry's
        place.
        """
        return tensor_of(self.offsets, self.v.device).clamp_(max=self.numel - 1)

    @property
    def marked(self) -> Tensor:
        """bool (P,): the parameters that ``flags`` marks."""
        assert self.flags is not None
        return self.flags[:-1] > 0

    def not_finite(self) -> list[str]:
        """The parameters that ``flags`` marks. Waits for the device."""
        flags = [] if self.flags is None else self.flags.tolist()
        return [name for name, flag in zip(self.names, flags, strict=False) if flag]

    def sent_all(self, gradients: Iterable[Tensor], scale: Tensor | None) -> None:
        """A step in which these gradients, times a factor (0-dim), travel dense."""
        square = sum((norm(g).square() for g in gradients), self.v.new_zeros(()))
        self.gradient_square = square if scale is None else square * scale.to(square).square()
        self.overflow_entries = 0
        self.count(torch.full_like(self.total_entries, self.numel))

    def record_idle_step(self) -> None:
        """A step has none of its gradients, and nothing is sent."""
        self.gradient_square = 0.0
        self.entries_sent = self.overflow_entries = 0

    def count(self, entries: Tensor) -> None:
        """Notes how many entries this step sent: int64, 0-dim."""
        self.entries_sent = entries
        self.total_entries += (
            entries  # in place: given up while a stream reads it, another one's memory is used anew
        )


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions in which the tensor is contiguous, as ``permute`` takes them: channels last,
    transposed. None if that is their own order, or if there is no such.
    """
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


def shaped(part: Tensor, shape: torch.Size, order: tuple[int, ...] | None) -> Tensor:
    """A view of a flat tensor in this shape, whose dimensions lie in memory in this order; see
    :func:`memory_order`.
    """
    if order is None:
        return part.view(shape)
    return part.view([shape[d] for d in order]).permute([order.index(d) for d in range(len(order))])


def accumulate(u: Tensor, v: Tensor, g: Tensor, m: float, nesterov: bool = False) -> None:
    """u = m u + g, then v = v + u; with Nesterov's momentum v = v + g + m u (paper, equation 4 and
    appendix B).

    Without momentum v = v + g, and u waits as it is, as the buffer of ``torch.optim.SGD`` does.
    """
    if m == 0:
        v.add_(g)
        return
    u.mul_(m).add_(g)
    if nesterov:
        v.add_(g).add_(u * m)  # rounded after every operation, which ``alpha=m`` is not everywhere
    else:
        v.add_(u)


def clip_scale(
    norm: Tensor, clip_norm: float, contributors: int, average: bool, each: int = 1
) -> Tensor:
    """The factor, at most 1, by which a rank's gradient of this norm is clipped (paper, section
    3.2).

    The paper clips a gradient that already carries 1/N to N^(-1/2) of the threshold. Ours does not
    carry it, hence threshold * N^(1/2) when the sum will be divided by N. N gradients of that norm,
    orthogonal to each other, combine to a norm of exactly ``clip_norm``. A contributor that is the
    mean of several ranks, ``each``, counts so often in the sum. A norm that is not a number counts
    as infinite, so that none of such a gradient goes unclipped.
    """
    norm = torch.where(norm.isnan(), torch.inf, norm)
    bound = (
        clip_norm * math.sqrt(contributors)
        if average
        else clip_norm / math.sqrt(contributors) / each
    )
    return torch.where(norm > bound, bound / norm, torch.ones_like(norm))


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of u and v of a parameter: float32 for float16 and bfloat16, else its own."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm of a tensor, sparse or not: 0-dim, in float32 or wider."""
    values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    return torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
