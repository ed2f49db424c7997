"""The factors of a gradient before it is accumulated: clipping, and the loss's scale."""

from __future__ import annotations

import torch
from torch import Tensor

from dgc.collective import World
from dgc.compression.residual import clip_scale, norm
from dgc.engine.parameters import Parameters
from dgc.engine.settings import Settings
from dgc.engine.shards import local, shard, sum_of_shards
from dgc.engine.step import Inverse, Step


class Scaling:
    """Scales gradients before they are accumulated.

    Args:
        settings: of the optimizer.
        parameters: whose gradients.
    """

    def __init__(self, settings: Settings, parameters: Parameters):
        self._settings, self._parameters = settings, parameters

    def measure_inverse(self) -> Inverse | None:
        """1 / the loss's scale of this step. A host-device synchronisation; None without a scaler."""
        if (scaler := self._settings.grad_scaler) is None:
            return None
        inverse = torch.tensor(1 / scaler.get_scale(), device="cpu")
        return Inverse(inverse.to(self._parameters.device), inverse.item())

    def gradients(self, step: Step) -> list[Tensor]:
        """All gradients that this rank, or its node, has in this step."""
        step.wait_for_gradients()
        taking_part = self._parameters.taking_part(self._parameters.all(), step.fired)
        return [step.node_means[p] if p in step.node_means else local(p.grad).detach()
                for p in taking_part if p in step.node_means or p.grad is not None]

    def own(self, parameter: Tensor) -> Tensor:
        """A parameter's local gradient; zero where this rank has none but another may."""
        g = local(parameter.grad)
        if g is None:
            return torch.zeros_like(local(parameter))
        if g.is_sparse:
            g = g.to_dense()
        return g.detach() if g.requires_grad else g

    def gradient(self, parameter: Tensor, step: Step) -> Tensor:
        """The gradient that is exchanged: the local one, or the mean of the node's."""
        mean = step.node_means.get(parameter)
        return self.own(parameter) if mean is None else mean

    def factor_of(self, parameter: Tensor, step: Step) -> Tensor | None:
        """The clipping factor of a parameter that does not get it on the compressed path."""
        config = self._settings.config
        if config.clip_norm is None or not config.clip_per_tensor:
            return step.clip
        if parameter in step.node_means:
            return self._clipped(norm(step.node_means[parameter]), step, step.world)
        if parameter.grad is None:
            return None
        return self._clipped(norm(parameter.grad), step, step.world.flat)

    def global_factor(self, gradients: list[Tensor], step: Step) -> Tensor:
        """The clipping factor by the norm of all these gradients, 0-dim."""
        norms = [norm(gradient) for gradient in gradients]
        device = norms[0].device if norms else torch.device("cpu")
        total = (torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms])) if norms
                 else torch.zeros((), device="cpu"))
        first = self._parameters.all()[0]
        if shard(first) is not None:
            total = sum_of_shards(total.square(), first).sqrt()
        return self._clipped(total, step, step.world)

    def clip_alone(self, step: Step) -> None:
        """Clips the gradients of a single process: nothing is exchanged, but the bound on their norm still holds."""
        config = self._settings.config
        if config.clip_norm is None:
            return
        gradients = [local(p.grad) for p in self._parameters.all() if p.grad is not None]
        factor = self.global_factor(gradients, step) if config.clips_globally else None
        for g in gradients:
            g.mul_((clip_scale(norm(g), config.clip_norm, 1, True) if factor is None else factor).to(g.device))

    def _clipped(self, total: Tensor, step: Step, world: World) -> Tensor:
        """The clipping factor for a gradient of this norm, which has the loss's scale in it."""
        bound, unscaled = self._settings.config.clip_norm, step.scaled_out(total)
        assert bound is not None and unscaled is not None
        return clip_scale(unscaled, bound, world.nodes, self._settings.average, world.node_size)
