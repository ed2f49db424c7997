"""From dense to compressed steps and back, where something is out of the ordinary: nothing is lost."""

import copy
import warnings

import pytest
import torch
from laws import in_lockstep, rank
from torch import nn

import dgc

LR = 0.01
THERE_AND_BACK = dgc.piecewise({0: 0.0, 3: 0.9, 6: 0.0})


def gradient(step, of=None):
    """A rank's gradient of a step; it does not depend on the parameters."""
    generator = torch.Generator().manual_seed(100 * step + (rank() if of is None else of))
    return torch.randn(40, 40, generator=generator, dtype=torch.float64)


def made(sparsity, count=1, momentum=0.9, **settings):
    weights = [nn.Parameter(torch.zeros(40, 40, dtype=torch.float64)) for _ in range(count)]
    sgd = torch.optim.SGD(weights, lr=LR, momentum=momentum)
    config = dgc.Config(sparsity, factor_masking=False, value_bits=32)
    return weights, dgc.DistributedOptimizer(sgd, compression=config, **settings)


def backward(weights, step):
    for i, weight in enumerate(weights):
        if weight.requires_grad:
            (weight * gradient(step + 50 * i)).sum().backward()


def momentum_sgd(steps, offset=0):
    """What torch's SGD does with the mean gradient of these steps."""
    weight = nn.Parameter(torch.zeros(40, 40, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=LR, momentum=0.9)
    for step in steps:
        weight.grad = (gradient(step + offset, 0) + gradient(step + offset, 1)) / 2
        optimizer.step()
    return weight.detach(), optimizer.state[weight]["momentum_buffer"]


@pytest.mark.parametrize("how", ["frozen", "p.grad is None"])
def test_what_sits_out_the_return_is_sent_in_a_later_step(how):
    """Two weights; one has no part in the step of the return. The other is momentum SGD's all the same."""

    def worker():
        (kept, out), optimizer = made(THERE_AND_BACK, count=2)
        for step in range(10):
            out.requires_grad_(not (how == "frozen" and step == 6))
            optimizer.zero_grad()
            backward((kept, out), step)
            optimizer.synchronize()
            if how != "frozen" and step == 6:
                out.grad = None
            with optimizer.skip_synchronize():
                optimizer.step()
        left = optimizer.residual_state_dict()
        assert not any(tensor.any() for letter in "uv" for tensor in left[letter].values())
        assert optimizer.param_groups[0]["dgc_compressed_from"] == -1
        return kept.detach(), optimizer.state[kept]["momentum_buffer"], out.detach()

    expected, velocity = momentum_sgd(range(10))
    for weight, momentum, out in in_lockstep(worker):
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(momentum, velocity, rtol=1e-6, atol=1e-6)
        if how == "frozen":  # it had all other steps, one of them later
            torch.testing.assert_close(
                out,
                momentum_sgd([step for step in range(10) if step != 6], offset=50)[0],
                rtol=1e-6,
                atol=1e-9,
            )


def test_a_momentum_that_begins_later_is_handed_back():
    def worker():
        (weight,), optimizer = made(dgc.piecewise({0: 0.9, 6: 0.0}), momentum=0.0)
        for step in range(9):
            optimizer.param_groups[0]["momentum"] = 0.9 if step >= 2 else 0.0
            optimizer.zero_grad()
            backward([weight], step)
            optimizer.step()
        left = optimizer.residual_state_dict()
        return max(tensor.abs().max() for letter in "uv" for tensor in left[letter].values())

    assert in_lockstep(worker) == [0.0, 0.0]


def test_a_first_compressed_step_that_is_undone_leaves_the_momentum_where_it_was():
    """By the recipe of the warning; then the training is the one that has never had that step."""

    def worker():
        ends = []
        for undone in (True, False):
            (weight,), optimizer = made(dgc.piecewise({0: 0.0, 4: 0.9}))
            for step in range(8):
                if undone and step == 4:
                    saved, momentum = (
                        optimizer.residual_state_dict(),
                        copy.deepcopy(optimizer.state[weight]),
                    )
                    backward([weight], 99)
                    optimizer.synchronize()
                    optimizer.load_residual_state_dict(saved)
                    optimizer.zero_grad()
                    assert torch.equal(
                        optimizer.state[weight]["momentum_buffer"], momentum["momentum_buffer"]
                    )
                    assert optimizer.param_groups[0]["dgc_compressed_from"] == -1
                optimizer.zero_grad()
                backward([weight], step)
                optimizer.step()
            ends.append(weight.detach())
        return ends

    for one, other in in_lockstep(worker):
        assert torch.equal(one, other)


def test_momentum_of_a_state_that_rank_0_loads_in_mid_training_comes_to_all():
    """What hvd.broadcast_optimizer_state writes on the other ranks, by hand."""

    def worker():
        (weight,), optimizer = made(0.9)
        for step in range(3):
            optimizer.zero_grad()
            backward([weight], step)
            optimizer.step()
        other = torch.optim.SGD([weight], lr=LR, momentum=0.9)
        other.state[weight]["momentum_buffer"] = torch.full_like(weight, 1e3)
        if rank() == 0:
            optimizer.load_state_dict(other.state_dict())
        else:
            optimizer.state_dict()  # the broadcast asks for the tensors that it writes into
            optimizer.param_groups[0].update(dgc_step=0, dgc_compressed_from=-1)
            optimizer.state[weight]["momentum_buffer"].fill_(1e3)
        optimizer.zero_grad()
        backward([weight], 3)
        optimizer.step()
        return optimizer.residual_state_dict()["u"]["allreduce.noname.0.0"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for u in in_lockstep(worker):
            assert (u - 900.0).abs().max() < 10.0


@pytest.mark.parametrize("passes", [1, 2])
def test_passes_before_and_after_a_synchronize_add_up(passes):
    """backward_passes_per_step of them each time: what is applied and what is in v is all that came."""

    def worker():
        (weight,), optimizer = made(0.9, momentum=0.0, backward_passes_per_step=passes)
        for turn in range(2):
            for i in range(passes):
                backward([weight], 10 * turn + i)
            optimizer.synchronize()
        update = weight.grad.clone()
        with optimizer.skip_synchronize():
            optimizer.step()
        return (
            update,
            optimizer.residual_state_dict()["v"]["allreduce.noname.0.0"],
            sum(gradient(10 * turn + i) for turn in range(2) for i in range(passes)),
        )

    (update, v, came), (same, w, more) = in_lockstep(worker)
    assert torch.equal(update, same)
    torch.testing.assert_close(update + (v + w) / 2, (came + more) / 2)


def test_a_pass_after_a_change_by_hand_is_refused():
    """Whether p.grad was zeroed or clipped, and what of it is new, nobody can tell."""

    def worker():
        (weight,), optimizer = made(0.9)
        backward([weight], 0)
        optimizer.synchronize()
        weight.grad.mul_(0.5)
        with pytest.raises(
            RuntimeError, match=r"must be left as it is between the exchange .*zero_grad\(\)"
        ):
            backward([weight], 1)
            optimizer.step()

    in_lockstep(worker)


def test_a_new_gradient_at_the_address_of_a_dropped_one_is_a_new_one():
    """Python gives the id of a tensor that is gone to one that is made after it."""

    def worker():
        (weight,), optimizer = made(0.9)
        backward([weight], 0)
        optimizer.synchronize()
        address, others = id(weight.grad), []
        weight.grad = None
        while id(other := torch.zeros_like(weight)) != address:
            others.append(other)
        weight.grad = other.add_(1)
        del other
        backward([weight], 1)
        optimizer.step()
        return weight.detach().isfinite().all()

    with pytest.warns(UserWarning, match="their update is dropped"):
        assert all(in_lockstep(worker))


def test_weights_may_change_where_a_step_is_dropped():
    """As where a critic's weights are clamped; but an optimizer whose step() is never called is the wrong one."""

    def worker(steps):
        (weight,), optimizer = made(0.9)
        for step in range(steps):
            backward([weight], step)
            optimizer.step()
            optimizer.zero_grad()
        backward([weight], 9)
        optimizer.synchronize()
        with torch.no_grad():
            weight.clamp_(-0.01, 0.01)
        optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        in_lockstep(lambda: worker(1))
    with pytest.raises(RuntimeError, match=r"must be the one whose step\(\) is called"):
        in_lockstep(lambda: worker(0))
