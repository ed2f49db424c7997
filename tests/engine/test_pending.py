"""Residuals as a state: saved, loaded, refused, and never mixed with those of another step."""

import contextlib
import copy
import io
import pickle
import warnings

import pytest
import torch
from laws import (
    DENSE,
    SPARSE,
    backward,
    difference,
    flat,
    in_lockstep,
    model,
    rank,
    reference,
    train,
    wrapped,
)

import dgc
from dgc.transport.run import PathRun


def test_loading_a_step_without_its_residuals_warns_once():
    def worker():
        network, optimizer = train(range(3), SPARSE)
        state, residuals = copy.deepcopy(optimizer.state_dict()), optimizer.residual_state_dict()
        del optimizer
        _, fresh = wrapped(network=network)
        fresh.load_state_dict(state)
        assert fresh.param_groups[0]["dgc_step"] == 3
        if rank() == 0:
            with pytest.warns(
                UserWarning, match="training goes on at step 3 without the residuals"
            ):
                backward(network)
        else:
            backward(network)
        fresh.step()
        del fresh
        _, fresh = wrapped(network=network)
        fresh.load_state_dict(state)
        fresh.load_residual_state_dict(residuals)
        if rank() == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                backward(network)
        else:
            backward(network)
        fresh.step()

    in_lockstep(worker)


def test_loading_an_earlier_state_forgets_what_came_after():
    def worker():
        network, optimizer = wrapped()
        state = copy.deepcopy(optimizer.state_dict())
        train(range(3), None, network, optimizer)
        assert optimizer.report().residual_norm > 0
        optimizer.load_state_dict(state)
        assert optimizer.report().residual_norm == 0
        assert not any(u.any() for u in optimizer.residual_state_dict()["u"].values())

    in_lockstep(worker)


def test_a_plain_checkpoint_of_sgd_is_taken_up():
    """Loaded on every rank: its momentum goes on, as in plain SGD."""
    plain_network, plain = reference(range(4), 2)
    file = io.BytesIO()
    torch.save([plain_network.state_dict(), plain.state_dict()], file)

    def worker():
        file.seek(0)
        states = torch.load(file)
        network, optimizer = wrapped(DENSE, settings={"lr": 1.0, "momentum": 0.1})
        network.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        train(range(4, 8), None, network, optimizer)
        return flat(network)

    results = in_lockstep(worker)
    assert difference(results[0], flat(reference(range(8), 2)[0])) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(size=3), r"residual_state_dict: size must be 2, got 3"),
        (lambda s: s.update(rank=1 - s["rank"]), r"residual_state_dict: rank must be \d, got \d"),
        (lambda s: s.update(version=9), r"residual_state_dict: version must be 1, got 9"),
        (
            lambda s: s["v"].pop("6.weight"),
            r"v must have the same names, got none for \['6\.weight'\] and unknown \[\]",
        ),
        (
            lambda s: s["u"].update(other=torch.zeros(1)),
            r"u must have the same names, got none for \[\] and unknown \['other'\]",
        ),
        (
            lambda s: s["u"].update({"6.weight": torch.zeros(2, 2)}),
            r"u of 6\.weight must have shape \(40, 144\), got \(2, 2\)",
        ),
    ],
)
def test_residuals_that_do_not_fit_are_refused_whole(change, message):
    def worker():
        _, optimizer = train(range(2), SPARSE)
        before, changed = optimizer.residual_state_dict(), optimizer.residual_state_dict()
        change(changed)
        with pytest.raises(ValueError, match=message):
            optimizer.load_residual_state_dict(changed)
        after = optimizer.residual_state_dict()
        assert all(torch.equal(before[x][k], after[x][k]) for x in "uv" for k in before[x])

    in_lockstep(worker)


@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize(
    "asked", [lambda optimizer: optimizer.residual_state_dict(), copy.deepcopy, pickle.dumps]
)
def test_residuals_that_lack_what_is_on_its_way_are_not_given(asked, synchronized):
    def worker():
        network, optimizer = train(range(2), SPARSE)
        optimizer.zero_grad()
        backward(network, 2)
        if synchronized:
            optimizer.synchronize()
        with pytest.raises(RuntimeError, match=r"must be called after step\(\)"):
            asked(optimizer)
        with optimizer.skip_synchronize() if synchronized else contextlib.nullcontext():
            optimizer.step()
        asked(optimizer)

    in_lockstep(worker)


@pytest.mark.parametrize("residuals_first", [False, True])
def test_residuals_loaded_between_backward_and_step_are_those_that_were_saved(residuals_first):
    """To the bit, and so is what follows: nothing of the step that was not finished is added to them."""

    def worker():
        network, optimizer = train(range(3), SPARSE)
        saved = copy.deepcopy(
            [network.state_dict(), optimizer.state_dict(), optimizer.residual_state_dict()]
        )
        expected = flat(train(range(3, 6), None, network, optimizer)[0])
        optimizer.zero_grad()
        backward(network, 6)
        network.load_state_dict(saved[0])
        if residuals_first:
            optimizer.load_residual_state_dict(saved[2])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        if not residuals_first:
            optimizer.load_residual_state_dict(saved[2])
        loaded = optimizer.residual_state_dict()
        assert all(
            torch.equal(loaded[letter][name], x)
            for letter in "uv"
            for name, x in saved[2][letter].items()
        )
        return torch.equal(flat(train(range(3, 6), None, network, optimizer)[0]), expected)

    assert in_lockstep(worker) == [True, True]


def test_one_process_is_told_that_the_momentum_of_several_is_not_in_their_state():
    state = in_lockstep(lambda: train(range(2), SPARSE)[1].state_dict())[0]

    def worker():
        _, optimizer = wrapped()
        with pytest.warns(
            UserWarning, match=r"begins without it: .* load by dgc\.load_checkpoint\(\)"
        ) as told:
            for _ in range(2):
                optimizer.load_state_dict(copy.deepcopy(state))
        own = copy.deepcopy(train(range(2), SPARSE)[1].state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrapped()[1].load_state_dict(own)
            wrapped(momentum=0.0)[1].load_state_dict(
                {
                    **state,
                    "param_groups": [{**group, "momentum": 0.0} for group in state["param_groups"]],
                }
            )
        return len(told)

    assert in_lockstep(worker, 1) == [1]


def test_one_process_is_told_that_it_begins_without_adamws_momentum():
    config = dgc.Config(dgc.piecewise({0: 0.0, 1: 0.9}))
    state = in_lockstep(
        lambda: train(
            range(3), config, *wrapped(config, kind=torch.optim.AdamW, settings={"lr": 0.01})
        )[1].state_dict()
    )[0]

    def worker():
        _, optimizer = wrapped(config, kind=torch.optim.AdamW, settings={"lr": 0.01})
        with pytest.warns(UserWarning, match="begins without it: go on with two ranks or more"):
            optimizer.load_state_dict(state)

    in_lockstep(worker, 1)


def test_a_checkpoint_loaded_before_wrapping_lacks_residuals_too():
    def worker():
        network, optimizer = train(range(3), SPARSE)
        plain = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        plain.load_state_dict(optimizer.state_dict())
        again = dgc.DistributedOptimizer(plain, network.named_parameters(), SPARSE)
        del optimizer
        train([3], None, network, again)

    with pytest.warns(UserWarning, match="goes on at step 3 without the residuals") as told:
        in_lockstep(worker)
    assert len(told) == 2  # each rank


@pytest.mark.parametrize(
    "make",
    [
        lambda network: dgc.DistributedOptimizer(
            torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9),
            network.named_parameters(),
            dgc.Config(0.9, min_numel=1 << 20),
        ),
        lambda network: dgc.DistributedOptimizer(
            torch.optim.AdamW(network.parameters()),
            network.named_parameters(),
            dgc.Config(dgc.piecewise({0: 0.0, 99: 0.9})),
        ),
    ],
    ids=["nothing is compressed", "AdamW's dense steps"],
)
def test_without_residuals_there_are_none_to_lack(make):
    """All is in the state of torch's optimizer, and an update that is dropped is gone, as in stock Horovod."""

    def worker():
        network = model()
        whole, optimizer = train(range(3), None, network, make(network))
        state = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
        train(range(3, 5), None, whole, optimizer)
        network = model()
        again = make(network)
        network.load_state_dict(state[0])
        again.load_state_dict(state[1])
        train(range(3, 5), None, network, again)
        if not again.residual_state_dict()["v"]:
            backward(network, 9)
            again.synchronize()
            again.zero_grad()
            backward(network, 10)
            again.synchronize()
        return flat(network), flat(whole)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ours, expected in in_lockstep(worker):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_another_training_that_is_loaded_into_a_copy_begins_without_residuals(copied):
    """As in the optimizer that was copied: they are of a training that is gone."""

    def worker():
        network, optimizer = wrapped(SPARSE)
        fresh = copy.deepcopy((network.state_dict(), optimizer.state_dict()))
        train(range(3), None, network, optimizer)
        network, optimizer = copied((network, optimizer))
        residuals = optimizer.residual_state_dict()
        kept = sum(x.abs().sum() for x in residuals["v"].values())
        network.load_state_dict(fresh[0])
        optimizer.load_state_dict(fresh[1])
        return kept, [
            x.any() for letter in "uv" for x in optimizer.residual_state_dict()[letter].values()
        ]

    for kept, left in in_lockstep(worker):
        assert kept > 0 and left and not any(left)


def test_a_state_is_loaded_after_an_exchange_that_has_failed(monkeypatch):
    """As Horovod's elastic state does where a rank is gone: nothing is waited for once more."""

    def worker():
        network, optimizer = train(range(2), SPARSE)
        kept = copy.deepcopy(
            (network.state_dict(), optimizer.state_dict(), optimizer.residual_state_dict())
        )
        expected = flat(train(range(2, 4), None, network, optimizer)[0])
        down.add(rank())
        with pytest.raises(ConnectionError, match="the ring is down"):
            train([4], None, network, optimizer)
        network.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        optimizer.load_residual_state_dict(kept[2])
        down.discard(rank())
        assert torch.equal(flat(train(range(2, 4), None, network, optimizer)[0]), expected)

    def advance(self):
        if rank() in down:
            raise ConnectionError("the ring is down")
        return advancing(self)

    def abort(self, wait):
        if wait and rank() in down:
            raise ConnectionError("the ring is down")
        aborting(self, wait)

    down, advancing, aborting = set(), PathRun.advance, PathRun.abort
    monkeypatch.setattr(PathRun, "advance", advance)
    monkeypatch.setattr(PathRun, "abort", abort)
    in_lockstep(worker)
