"""Clipping bounds what the optimizer sees."""

import pytest
import torch
from laws import in_lockstep, loss, rank, train
from torch import nn

import dgc


@pytest.mark.parametrize("op", [dgc.Average, dgc.Sum])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_clipping_bounds_what_the_optimizer_sees(op, per_tensor):
    """Dense and compressed parameters alike; orthogonal gradients, all clipped, make exactly clip_norm."""

    def worker():
        weights = [nn.Parameter(torch.zeros(40, 40)), nn.Parameter(torch.zeros(50))]
        config = dgc.Config(sparsity=0.0, clip_norm=0.5, clip_per_tensor=per_tensor)
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(weights, lr=1.0), compression=config, op=op
        )
        for w in weights:
            w.grad = torch.zeros_like(w)
            w.grad.view(-1)[rank() :: 4] = 3.0
        optimizer.step()
        return [w.grad.norm().item() for w in weights]

    for norms in in_lockstep(worker, 4):
        if per_tensor:
            assert norms == pytest.approx([0.5, 0.5], rel=1e-5)
        else:
            assert (norms[0] ** 2 + norms[1] ** 2) ** 0.5 == pytest.approx(0.5, rel=1e-5)


def test_a_bound_on_the_norm_holds_with_one_process_too():
    def worker():
        weight = nn.Parameter(torch.zeros(40, 40))
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), compression=dgc.Config(clip_norm=0.5)
        )
        weight.grad = torch.full((40, 40), 3.0)
        optimizer.step()
        return weight.norm().item()

    assert in_lockstep(worker, 1)[0] == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("per_tensor", [False, True])
def test_one_process_that_exchanges_clips_once(per_tensor):
    """It keeps what float16 drops of small parameters, of which there is nothing with nobody to send it to."""

    def worker():
        weight = nn.Parameter(torch.zeros(50))
        config = dgc.Config(
            clip_norm=0.5, clip_per_tensor=per_tensor, nonfinite="skip", value_bits=8
        )
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=config)
        weight.grad = torch.full((50,), 3.0)
        optimizer.step()
        return weight.norm().item()

    assert in_lockstep(worker, 1)[0] == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_the_reported_gradient_is_the_last_one_clipped(clip_norm):
    """The clipping bounds the norm of all local gradients (paper, section 3.2); reported are the compressed ones."""

    def worker():
        config = dgc.Config(sparsity=0.99, clip_norm=clip_norm)
        network, optimizer = train(range(2), config)
        gradients = torch.autograd.grad(loss(network, rank(), 2), list(network.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        # Of 4 workers, to be averaged.
        scale = 1.0 if clip_norm is None else clip_norm * 4**0.5 / norm
        assert scale == 1 or scale < 0.5
        train([2], config, network, optimizer)
        compressed = torch.cat(
            [g.flatten() for g in gradients if g.dim() > 1 and g.numel() >= 1024]
        )
        assert optimizer.report().gradient_norm == pytest.approx(
            float(scale * compressed.norm()), rel=1e-5
        )

    in_lockstep(worker, 4)
