"""A rank's gradients before they are accumulated: clipped, freed of the loss's scale, averaged
within the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

import torch
from torch import Tensor

from dgc.collective import Collective, Path, World
from dgc.compression.residual import clip_scale, norm, residual_dtype
from dgc.engine.parameters import ParameterBucket, Parameters, shard, sum_of_shards, to_local
from dgc.engine.step import Inverse, Step
from dgc.paths.averaged import DenseUpdate, Update
from dgc.paths.finite import who_is_not_finite
from dgc.paths.nodes import average_in_node
from dgc.transport import Transport
from dgc.warn import warn


def own(parameter: Tensor) -> Tensor:
    """A parameter's local gradient; zero where this rank has none but another may."""
    g = to_local(parameter.grad)
    if g is None:
        return torch.zeros_like(to_local(parameter))
    if g.is_sparse:
        g = g.to_dense()
    return g.detach() if g.requires_grad else g


class Gradients:
    """Scales the gradients of a step, and averages them within a machine under
    ``Config(hierarchical=...)``.

    Args:
        parameters: whose gradients.
    """

    def __init__(self, parameters: Parameters):
        self._parameters, self._settings = parameters, parameters.settings
        self._node_size = 1  # ranks whose gradients are averaged before they are compressed
        self._single_node = False  # hierarchical was asked for, and all ranks are on one machine
        self.residuals_may_differ = False  # within a node
        self._grouped: Transport | None = None  # which has grouped the ranks

    @property
    def world(self) -> World:
        """The ranks, by node."""
        return replace(self._settings.world, node_size=self._node_size)

    @property
    def is_single(self) -> bool:
        """Whether there is nobody to exchange compressed gradients with."""
        return self._single_node or self._settings.world.size == 1

    def measure_inverse(self) -> Inverse | None:
        """1 / the loss's scale of this step. A host-device synchronisation; None without a scaler."""
        if (scaler := self._settings.grad_scaler) is None:
            return None
        inverse = torch.tensor(1 / scaler.get_scale(), device="cpu")
        return Inverse(inverse.to(self._parameters.device), inverse.item())

    def all(self, step: Step) -> list[Tensor]:
        """All gradients that this rank, or its node, has in this step."""
        step.wait_for_gradients()
        active = self._parameters.active(self._parameters.listed, step.with_gradient)
        return [
            step.node_means[p] if p in step.node_means else to_local(p.grad).detach()
            for p in active
            if p in step.node_means or p.grad is not None
        ]

    def factor_of(self, parameter: Tensor, step: Step) -> Tensor | None:
        """The clipping factor of a parameter that is not clipped on the compressed path."""
        if not self._settings.config.clip_per_tensor:
            return step.clip
        if parameter in step.node_means:
            return self._clipped(norm(step.node_means[parameter]), step, step.world)
        if parameter.grad is None:
            return None
        return self._clipped(norm(parameter.grad), step, step.world.without_nodes)

    def global_factor(self, gradients: list[Tensor], step: Step) -> Tensor:
        """The clipping factor by the norm of all these gradients, 0-dim."""
        norms = [norm(gradient) for gradient in gradients]
        device = norms[0].device if norms else torch.device("cpu")
        total = (
            torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]))
            if norms
            else torch.zeros((), device="cpu")
        )
        if shard(self._parameters.first) is not None:
            total = sum_of_shards(total.square(), self._parameters.first).sqrt()
        return self._clipped(total, step, step.world)

    def clip_alone(self, step: Step) -> None:
        """Clips the gradients of a single process: nothing is exchanged, but the bound on their
        norm still holds.
        """
        config = self._settings.config
        if config.clip_norm is None:
            return
        gradients = [to_local(p.grad) for p in self._parameters.listed if p.grad is not None]
        factor = self.global_factor(gradients, step) if config.clips_globally else None
        for g in gradients:
            g.mul_(
                (clip_scale(norm(g), config.clip_norm, 1, True) if factor is None else factor).to(
                    g.device
                )
            )

    def _clipped(self, total: Tensor, step: Step, world: World) -> Tensor:
        """The clipping factor for a gradient of this norm, which has the loss's scale in it."""
        bound, unscaled = self._settings.config.clip_norm, step.scaled_out(total)
        assert bound is not None and unscaled is not None
        return clip_scale(unscaled, bound, world.nodes, world.average, world.node_size)

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def group(self) -> None:
        """Makes nodes the contributors from now on, in place of ranks, where the config asks for it.

        Raises:
            ValueError: they cannot be grouped, on all ranks alike.
        """
        settings = self._settings
        if not settings.config.hierarchical or settings.elastic or not settings.exchanges:
            return
        if self._grouped is settings.transport:
            return
        world, automatic = self._settings.world, self._settings.config.hierarchical == "auto"
        self._node_size, self._single_node = 1, False
        if automatic and shard(self._parameters.first) is not None:
            self._grouped = self._settings.transport
            return
        try:
            size = self._settings.transport.by_node(self._parameters.device)
        except ValueError:
            if not automatic:
                raise
            size = 1
        self._grouped = self._settings.transport
        if size < world.size:
            self._node_size, self.residuals_may_differ = size, True
        else:  # nothing is left to compress; but who leaves it to us wants it compressed
            self._single_node = not automatic
            if self._single_node and world.size > 1 and self._settings.config.local_steps:
                raise ValueError(
                    f"Config: hierarchical must be False with local_steps where all {world.size} ranks are on one "
                    "machine, got True (no machine would exchange with another)"
                )
            if self._single_node and world.rank == 0 and world.size > 1:
                warn(
                    f"nothing is compressed: hierarchical=True exchanges between machines, and all {world.size} ranks "
                    "are on one (leave it out to compress between these)"
                )

    @torch.no_grad()
    def average_residuals(self) -> None:
        """Makes u and v alike on all ranks of a node: ranks of another grouping may have saved
        them. Their total stays the same.
        """
        transport = self._settings.transport
        if not self.residuals_need_averaging:
            return
        for residual in self._parameters.compressed_residuals():
            for letter, flat in (("v", residual.v), ("u", residual.u)):
                if flat is None:
                    continue
                name = f"dgc.average_residuals.{residual.name}.{letter}"
                first = transport.start(
                    Collective("broadcast", flat.clone(), group="intra_node"), f"{name}.first"
                )()
                differ = (flat != first).any().float().view(1)
                if transport.start(
                    Collective("all_reduce", differ, group="intra_node"), f"{name}.differ"
                )():
                    total = transport.start(
                        Collective("all_reduce", flat.clone(), group="intra_node"), name
                    )()
                    flat.copy_(total.div_(self._node_size))
        self.residuals_may_differ = False

    @property
    def residuals_need_averaging(self) -> bool:
        """Whether :meth:`average_residuals` has to be called before anything is exchanged."""
        return self.residuals_may_differ and self._node_size > 1

    def mean(
        self, bucket: ParameterBucket, parameters: list[Tensor], step: Step
    ) -> Generator[Collective, Tensor, None]:
        """Averages the gradients of a bucket's parameters within the node, where
        ``step.node_means`` lacks them.
        """
        of_name = {self._parameters.names[p]: p for p in parameters if p not in step.node_means}
        if of_name:
            gradients = {name: own(p) for name, p in of_name.items()}
            dtype = bucket.dtype(step.stock)
            # In float16 a sum may be infinite whose mean is not.
            means = yield from average_in_node(gradients, residual_dtype(dtype), step.world)
            step.node_means.update({p: means[name].to(dtype) for name, p in of_name.items()})

    def path(
        self,
        bucket: ParameterBucket,
        parameters: list[Tensor],
        step: Step,
        onward: Callable[[], Path[Update]],
    ) -> Path[Update]:
        """The node's ranks average their gradients; the mean is exchanged among nodes as a rank's
        gradient is.

        Args:
            onward: makes the path among nodes.
        """
        try:
            yield from self.mean(bucket, parameters, step)
            update = yield from onward()
        except FloatingPointError as error:  # found by all ranks in a node's message
            raise FloatingPointError((yield from self._whose(parameters)) or str(error)) from None
        if isinstance(update, DenseUpdate) and update.blame:
            update.blame = (yield from self._whose(parameters)) or update.blame
        return update

    def _whose(self, parameters: list[Tensor]) -> Generator[Collective, Tensor, str]:
        """The ranks, of all in a node, whose own gradients are not finite; "" if there is none."""
        names = [self._parameters.names[p] for p in parameters]
        bad = [self._parameters.names[p] for p in parameters if not torch.isfinite(own(p)).all()]
        return (yield from who_is_not_finite(names, bad, parameters[0].device))
