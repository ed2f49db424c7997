"""Mistakes of a script: refused, or told once."""

import copy
import warnings

import pytest
import torch
from laws import SPARSE, backward, flat, in_lockstep, loss, rank, train, wrapped
from torch import nn

import dgc
from dgc.engine.engine import engine_of


def test_one_backward_pass_too_many_is_refused():
    def worker():
        network, _ = wrapped()
        backward(network)
        backward(network)

    with pytest.raises(
        AssertionError, match="Gradients were computed more than backward_passes_per_step times"
    ):
        in_lockstep(worker)


def test_zero_grad_is_refused_while_gradients_travel():
    def worker():
        network, optimizer = wrapped()
        optimizer.zero_grad(set_to_none=False)
        backward(network)
        with pytest.raises(
            AssertionError, match=r"zero_grad\(\) was called after loss\.backward\(\) but before"
        ):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in network.parameters())
        optimizer.zero_grad()
        assert all(p.grad is None for p in network.parameters())

    in_lockstep(worker)


def test_synchronizing_twice_warns_and_does_nothing_more():
    def worker():
        network, optimizer = wrapped()
        backward(network)
        optimizer.synchronize()
        grads = [p.grad.clone() for p in network.parameters()]
        v = copy.deepcopy(engine_of(optimizer).residual_views()["v"])
        if rank() == 0:  # catching warnings is not for several threads
            with pytest.warns(UserWarning, match=r"called without optimizer\.skip_synchronize\(\)"):
                optimizer.step()
        assert optimizer.report().steps == 1
        assert all(torch.equal(a, p.grad) for a, p in zip(grads, network.parameters(), strict=True))
        now = engine_of(optimizer).residual_views()["v"]
        assert all(torch.equal(a, b) for a, b in zip(v.values(), now.values(), strict=True))

    in_lockstep(worker)


@pytest.mark.parametrize(
    "change",
    [
        lambda network: nn.utils.clip_grad_norm_(network.parameters(), 1e-3),
        lambda network: network.zero_grad(),
    ],
)
def test_changing_gradients_that_were_sent_is_told(change):
    """As a script does that clips between backward() and step(), which is right where nothing is exchanged."""

    def worker():
        network, optimizer = train(range(1), SPARSE)
        backward(network)
        change(network)
        optimizer.step()
        return flat(network)

    message = r"changed after backward\(\), which had sent it by then.* dgc\.register_comm_hook"
    with pytest.warns(UserWarning, match=message) as told:
        results = in_lockstep(worker)
    assert len(told) == 2 and torch.equal(*results)  # each rank


def test_what_was_not_sent_yet_may_be_changed():
    """A bound on the global norm needs all gradients, so nothing leaves during backward()."""

    def worker():
        network, optimizer = wrapped(dgc.Config(sparsity=0.9, clip_norm=1e6))
        backward(network)
        nn.utils.clip_grad_norm_(network.parameters(), 1e-3)
        optimizer.step()
        assert optimizer.report().gradient_norm <= 1.001e-3

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_lockstep(worker)


def test_gradients_that_are_views_of_one_tensor_are_not_taken_for_changed():
    """They have one version, which each backward pass moves on."""

    def worker():
        network, optimizer = wrapped(groups=4)
        flat_gradient = torch.zeros(sum(p.numel() for p in network.parameters()))
        parts = flat_gradient.split([p.numel() for p in network.parameters()])
        for step in range(3):
            flat_gradient.zero_()
            for p, part in zip(network.parameters(), parts, strict=True):
                p.grad = part.view_as(p)
            backward(network, step)
            optimizer.step()
        return flat(network)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = in_lockstep(lambda: flat(train(range(3), SPARSE, weight_decay=0.0, groups=4)[0]))
        assert all(map(torch.equal, in_lockstep(worker), expected))


@pytest.mark.parametrize("to_none", [False, True])
def test_a_step_left_out_is_left_out(to_none):
    """After synchronize(); and one warning says what becomes of its gradient."""

    def worker():
        network, optimizer = wrapped(dgc.Config(sparsity=0.9))
        for step in range(2):
            backward(network, step)
            optimizer.synchronize()
            optimizer.zero_grad(set_to_none=to_none)
        before, pending = flat(network), copy.deepcopy(engine_of(optimizer).residual_views())
        backward(network, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is not the second synchronize() before this step
            optimizer.step()
        moved = flat(network)
        other, expected = wrapped(dgc.Config(sparsity=0.9))
        expected.load_residual_state_dict({**expected.residual_state_dict(), **pending})
        backward(other, 2)
        expected.step()
        assert torch.equal(moved, flat(other)) and not torch.equal(moved, before)

    with pytest.warns(UserWarning, match=r"was not called after .*residual_state_dict") as told:
        in_lockstep(worker)
    assert len(told) == 2  # each rank


def test_after_a_step_left_out_a_rank_without_a_gradient_takes_part():
    """With zeros, as after any step; and a state may be asked for in between."""

    def worker():
        config = dgc.Config(sparsity=0.9)
        network, optimizer = wrapped(config)
        backward(network)
        optimizer.synchronize()
        optimizer.zero_grad()
        pending = optimizer.residual_state_dict()
        if rank() == 0:
            backward(network, 1)
        optimizer.step()
        other, expected = wrapped(config)
        expected.load_residual_state_dict(pending)
        (loss(other, rank(), 1) * (rank() == 0)).backward()
        expected.step()
        return flat(network), flat(other)

    with pytest.warns(UserWarning, match=r"was not called after .*residual_state_dict") as told:
        ranks = in_lockstep(worker)
    assert len(told) == 2  # each rank; and none of a second synchronize() before the step
    for found, expected in ranks:
        assert torch.equal(found, expected) and torch.equal(found, ranks[0][0])


@pytest.mark.parametrize("again", [False, True])
def test_a_step_that_is_given_up_takes_back_what_its_exchanges_have_sent(again):
    """As dropping its update does; also of an exchange before, in the same step."""

    def worker():
        network, optimizer = wrapped(SPARSE)
        backward(network)
        optimizer.synchronize()
        pending = engine_of(optimizer).residual_views()["v"]
        sent = copy.deepcopy(pending)
        if again:
            network[0].weight.sum().backward()
        engine_of(optimizer).abort_step()
        given_up = copy.deepcopy(pending)
        optimizer.zero_grad()
        network, optimizer = wrapped(SPARSE)
        backward(network)
        optimizer.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.zero_grad()
        dropped = engine_of(optimizer).residual_views()["v"]
        assert not all(torch.equal(sent[name], v) for name, v in dropped.items())
        assert all(torch.equal(given_up[name], v) for name, v in dropped.items())

    in_lockstep(worker)


def test_alone_a_step_left_out_does_not_keep_the_next_from_being_clipped():
    def worker():
        network, optimizer = wrapped(dgc.Config(clip_norm=1e-3), momentum=0.0)
        backward(network)
        optimizer.synchronize()
        optimizer.zero_grad()
        before = flat(network)
        backward(network)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        return (flat(network) - before).norm() / optimizer.param_groups[0]["lr"]

    assert dgc.lockstep.run(worker, 1)[0] == pytest.approx(1e-3, rel=1e-3)


def test_changing_gradients_before_the_step_warns_once():
    def worker():
        network, optimizer = wrapped()
        for step in range(2):
            optimizer.zero_grad()
            backward(network, step)
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(network.parameters(), 1e-3)
            if rank() == 0 and step == 0:
                changed = pytest.warns(
                    UserWarning, match=(r"changed between its exchange, .*clip_norm")
                )
                with changed, optimizer.skip_synchronize():
                    optimizer.step()
            elif rank() == 0:
                with warnings.catch_warnings(), optimizer.skip_synchronize():
                    warnings.simplefilter("error")
                    optimizer.step()

    in_lockstep(worker)


def test_dense_gradients_may_be_changed_before_the_step():
    """As with stock Horovod: nothing has been kept of them."""

    def worker():
        network, optimizer = wrapped(dgc.Config(sparsity=0.0, momentum_correction=False))
        backward(network)
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(network.parameters(), 1e-3)
        if rank() == 0:
            with warnings.catch_warnings(), optimizer.skip_synchronize():
                warnings.simplefilter("error")
                optimizer.step()

    in_lockstep(worker)


def test_a_skipped_step_that_is_left_out_is_no_synchronize_before_the_next():
    """nonfinite="skip", and a synchronize() of one's own, no step(): the step after it is an ordinary one."""

    def worker():
        network, optimizer = wrapped(dgc.Config(sparsity=0.9, nonfinite="skip"))
        backward(network)
        next(network.parameters()).grad.fill_(float("inf"))
        optimizer.synchronize()
        assert optimizer.report().skipped == 1
        assert not any(p.grad.isfinite().any() for p in network.parameters())
        network.zero_grad()
        backward(network, 1)
        if rank() == 0:  # catching warnings is not for several threads
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.step()
        else:
            optimizer.step()
        assert optimizer.report().steps == 1

    in_lockstep(worker)
