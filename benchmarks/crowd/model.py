"""The CIFAR-10 recipe's ResNet, forward and backward for all workers in one batch, and each worker's own gradient.

A batch has the images of all N workers, image by image: b N + w is the place of worker w's image b. Convolutions see
one batch of B N images; batch norms see B images of N C channels, so that each worker has its own statistics.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Convolution(torch.autograd.Function):
    """A convolution whose weight's gradient is apart for each worker: (N, O, C, k, k), left in ``module.each``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: nn.Conv2d, workers: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module, ctx.workers = module, workers
        return F.conv2d(x, weight, None, module.stride, module.padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), (dy,), module, workers = ctx.saved_tensors, grads, ctx.module, ctx.workers
        (stride, _), (pad, _), (k, _) = module.stride, module.padding, module.kernel_size
        # (B N, C, H, W, k, k).
        patches = F.pad(x, (pad,) * 4).unfold(2, k, stride).unfold(3, k, stride)
        patches = patches.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)
        each = torch.bmm(dy.flatten(2), patches.transpose(1, 2))  # (B N, O, C k k)
        module.each = each.view(-1, workers, *weight.shape).sum(0)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.nn.grad.conv2d_input(x.shape, weight, dy, module.stride, module.padding)
        return dx, None, None, None


class Crowd:
    """N workers' copies of a model, which has convolutions without bias, batch norms and linear layers.

    Args:
        model: whose parameters all workers share. Its ``forward`` is that of the crowd from now on.
        workers: N.
    """

    def __init__(self, model: nn.Module, workers: int):
        self.model, self.workers, self._leaves = (
            model,
            workers,
            dict[tuple[nn.Module, str], Tensor](),
        )
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for name in ("running_mean", "running_var"):  # each worker's
                    setattr(module, name, getattr(module, name).repeat(workers))
            known = {
                nn.Conv2d: self._convolve,
                nn.BatchNorm2d: self._normalise,
                nn.Linear: self._linear,
            }
            if (forward := known.get(type(module))) is not None:
                module.forward = functools.partial(forward, module)  # type: ignore[method-assign]
        self.owners = {
            name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in model.named_parameters()
        }

    def gradients(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """All workers' mean losses, (N,), and their gradients: name -> (N, *shape).

        Args:
            images: (B N, C, H, W), normalised, in the order that the module's docstring says.
            labels: (B N,).
        """
        loss = (
            F.cross_entropy(self.model(images), labels, reduction="none")
            .view(-1, self.workers)
            .mean(0)
        )
        loss.sum().backward()
        return loss.detach(), {name: self._gradient(*owner) for name, owner in self.owners.items()}

    def worker_0(self) -> dict[str, Tensor]:
        """The state dict of the recipe's model on worker 0."""
        return {
            name: value[: len(value) // self.workers] if "running" in name else value
            for name, value in self.model.state_dict().items()
        }

    def _gradient(self, module: nn.Module, name: str) -> Tensor:
        if isinstance(module, nn.Conv2d):
            return module.each  # type: ignore[return-value]
        grad = self._leaves.pop((module, name)).grad
        assert grad is not None
        return grad

    def _leaf(self, module: nn.Module, name: str) -> Tensor:
        """(N, *shape): each worker's own copy."""
        value = getattr(module, name).detach()
        leaf = value.expand(self.workers, *value.shape).clone().requires_grad_()
        self._leaves[module, name] = leaf
        return leaf

    def _convolve(self, module: nn.Conv2d, x: Tensor) -> Tensor:
        return Convolution.apply(x, module.weight, module, self.workers)

    def _normalise(self, module: nn.BatchNorm2d, x: Tensor) -> Tensor:
        of_workers = x.view(-1, self.workers * x.shape[1], *x.shape[2:])
        weight, bias = (self._leaf(module, name).flatten() for name in ("weight", "bias"))
        return F.batch_norm(
            of_workers,
            module.running_mean,
            module.running_var,
            weight,
            bias,
            True,
            module.momentum,
            module.eps,
        ).view(x.shape)

    def _linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        weight, bias = self._leaf(module, "weight"), self._leaf(module, "bias")
        y = torch.baddbmm(
            bias[:, None],
            x.view(-1, self.workers, x.shape[1]).transpose(0, 1),
            weight.transpose(1, 2),
        )
        return y.transpose(0, 1).flatten(0, 1)
