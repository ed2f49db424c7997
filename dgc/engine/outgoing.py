"""The paths that a bucket's gradients take in one step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dgc.collective import Path
from dgc.compression.residual import Gradient
from dgc.config import Config
from dgc.engine.adam import Denominators, share
from dgc.engine.buckets import ParameterBucket
from dgc.engine.handover import is_pending
from dgc.engine.kind import momentum_of
from dgc.engine.nodes import Nodes
from dgc.engine.parameters import Parameters
from dgc.engine.scaling import Scaling
from dgc.engine.settings import Settings
from dgc.engine.shards import local
from dgc.engine.step import Step
from dgc.paths.averaged import SparseUpdate, Update
from dgc.paths.compressed import reduce
from dgc.paths.dense import reduce_dense, reduce_rounded
from dgc.paths.sparse import reduce_sparse


class Departure(NamedTuple):
    """Gradients that leave together."""

    name: str  # of the exchange
    parameters: list[Tensor]
    path: Path[Update | SparseUpdate]


class Outgoing:
    """Chooses the path of each bucket's gradients.

    Args:
        settings: of the optimizer.
        parameters: whose gradients.
        scaling: of the gradients.
        nodes: how ranks are grouped.
        denominators: of AdamW.
    """

    def __init__(self, settings: Settings, parameters: Parameters, scaling: Scaling, nodes: Nodes,
                 denominators: Denominators):
        self._settings, self._parameters, self._scaling, self._nodes = settings, parameters, scaling, nodes
        self._denominators = denominators

    def departures(self, bucket: ParameterBucket, taking_part: list[Tensor], step: Step,
                   config: Config) -> Iterator[Departure]:
        """The exchanges of a bucket: one of all gradients that are dense in memory, and one of each sparse gradient.

        Args:
            taking_part: the parameters of the bucket that are exchanged in this step.
            config: the settings, with the sparsity in force.
        """
        compressed = bucket.compressed and not step.stock
        alone = self.sparse_among(taking_part)
        dense = [p for p in taking_part if p not in self._parameters.sparse] if alone else taking_part
        if dense:
            def onward(bucket: ParameterBucket, parameters: list[Tensor], step: Step) -> Path[Update]:
                if compressed:
                    return self._compressed(bucket, parameters, step, config)
                return self._dense(bucket, parameters, step)

            by_node = step.world.node_size > 1 and (compressed or config.clip_norm is not None)
            path = self._nodes.path(bucket, dense, step, onward) if by_node else onward(bucket, dense, step)
            yield Departure(bucket.name, dense, path)
        for parameter in alone:
            name = self._parameters.names[parameter]
            yield Departure(f"dgc.sparse.{name}", [parameter], reduce_sparse(
                name, self._sparse_gradient(parameter), step.world if compressed else step.world.flat,
                average=self._settings.average, scale=self._scaling.factor_of(parameter, step),
                kept=bucket.kept, pending=is_pending(self._parameters, parameter)))

    def sparse_among(self, parameters: list[Tensor]) -> list[Tensor]:
        """The parameters that travel as sparse tensors, each on its own, from their first sparse gradient on."""
        self._parameters.note_sparse(parameters)
        sparse = self._parameters.sparse
        return [p for p in parameters if p in sparse] if sparse else []

    def _sparse_gradient(self, parameter: Tensor) -> Tensor:
        """A sparse gradient: empty where this rank has none; what it was at first decides how it travels."""
        dimensions = self._parameters.sparse[parameter]
        if (g := parameter.grad) is None:
            places, rows = torch.empty(dimensions, 0, device="cpu"), (0, *parameter.shape[dimensions:])
            return torch.sparse_coo_tensor(places, torch.empty(rows, device="cpu"), parameter.shape,
                                           dtype=parameter.dtype, device=parameter.device, check_invariants=False)
        return g if g.is_sparse else g.to_sparse(dimensions)

    def _compressed(self, bucket: ParameterBucket, parameters: list[Tensor], step: Step,
                    config: Config) -> Path[Update]:
        """The path of a bucket that travels compressed."""
        assert bucket.kept is not None
        named = {self._parameters.names[parameter]: parameter for parameter in parameters}
        gradients = {name: self._gradient(parameter, step) for name, parameter in named.items()}
        scale = step.scaled_out(step.clip)
        factor = scale if not self._denominators.compressed else share(
            scale, {name: step.group_of[p] for name, p in named.items()}, bucket.kept.v)
        return reduce(bucket.kept, gradients, config, self._parameters.step, step.world,
                      average=self._settings.average, scale=factor, hands_back=step.hands_back)

    def _gradient(self, parameter: Tensor, step: Step) -> Gradient:
        """A gradient, as u and v accumulate it."""
        g, group = self._scaling.gradient(parameter, step), step.group_of[parameter]
        if self._denominators.used:
            self._denominators.check(group)
        elif self._settings.config.momentum_correction:
            check_dampening(group)
        return Gradient(g, *momentum_of(group))

    def _dense(self, bucket: ParameterBucket, parameters: list[Tensor], step: Step) -> Path[Update]:
        """The path of a bucket that travels dense."""
        kept, config, taking_part = bucket.kept, self._settings.config, set(parameters)
        rounded = bucket.rounds and step.world.size > 1
        addends = {p: self._dense_gradient(p, p in taking_part, bucket, step)
                   for p in (parameters if rounded else bucket.parameters)}
        if bucket.compressed and kept is not None:
            kept.sent_all(list(addends.values()), step.scaled_out(None if config.clip_per_tensor else step.clip)
                          if not bucket.accumulates(step.stock) else None)
        if rounded:
            assert kept is not None and config.dense_dtype is not None
            gradients = {self._parameters.names[p]: g for p, g in addends.items()}
            return reduce_rounded(kept, gradients, config.dense_dtype, step.world.flat, average=self._settings.average)
        gradients = {self._parameters.names[p]: g if kept is None else kept.in_order(i, g)
                     for i, (p, g) in enumerate(addends.items())}
        return reduce_dense(gradients, step.world.flat, average=self._settings.average,
                            scale=step.clip if self._clipped_as_one(bucket, step) else None,
                            predivide=self._settings.gradient_predivide_factor)

    def _dense_gradient(self, parameter: Tensor, takes_part: bool, bucket: ParameterBucket, step: Step) -> Tensor:
        """One parameter's addend, in the dtype of the bucket's update; zero of one that does not take part."""
        g = self._scaling.gradient(parameter, step) if takes_part else torch.zeros_like(local(parameter))
        g = g.to(bucket.dtype(step.stock))
        if not takes_part or self._clipped_as_one(bucket, step):
            return g
        scale = self._scaling.factor_of(parameter, step)
        if bucket.accumulates(step.stock):  # remembered from step to step, so without the loss's scale
            scale = step.scaled_out(scale)
        return g if scale is None else g * scale.to(g)

    def _clipped_as_one(self, bucket: ParameterBucket, step: Step) -> bool:
        """Whether a dense bucket's gradients are multiplied by their clipping factor when they lie in one tensor."""
        return not bucket.accumulates(step.stock) and not self._settings.config.clip_per_tensor


def check_dampening(group: dict[str, object]) -> None:
    """Refuses a dampening, which a script may set at any step."""
    if group["dampening"] != 0:
        raise ValueError(f"dampening must be 0, as momentum correction accumulates u = m u + g (paper, equation 4), "
                         f"got {group['dampening']!r}")
