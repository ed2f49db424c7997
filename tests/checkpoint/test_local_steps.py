"""Checkpoints of a training with local steps: each rank's own part of a round."""

import copy
import sys
from pathlib import Path

import pytest
import torch

import dgc
from dgc.checkpoint.reshard import mean_round
from dgc.transport import find

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from test_rounds import flat, loss, made, network


def steps(model, optimizer, first, last):
    rank = find().world.rank
    for step in range(first, last):
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()


def saved_after(steps_taken, folder, ends=11, **config):
    """Trains, saves, and goes on; the parameters in the end."""
    model = network()
    optimizer = made("adamw", model, value_bits=4, **config)
    steps(model, optimizer, 0, steps_taken)
    dgc.save_checkpoint(folder, model, optimizer)
    state = flat(model), optimizer.residual_state_dict()
    steps(model, optimizer, steps_taken, ends)
    return flat(model), *copy.deepcopy(state)


def loaded(folder, kind="adamw", **config):
    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    optimizer = made(kind, model, **{"value_bits": 4, **config})
    dgc.load_checkpoint(folder, model, optimizer)
    return model, optimizer


@pytest.mark.parametrize(
    ("steps_taken", "machines", "sparsity"),
    [(6, False, 0.9), (7, False, 0.9), (7, False, 0.0), (7, True, 0.9)],
)
def test_as_many_ranks_go_on_to_the_bit(steps_taken, machines, sparsity, tmp_path):
    config = {"hierarchical": machines, "sparsity": sparsity}

    def goes_on():
        model, optimizer = loaded(tmp_path, **config)
        steps(model, optimizer, steps_taken, 11)
        return flat(model)

    world = (4, 2) if machines else (2, 1)
    expected = dgc.lockstep.run(lambda: saved_after(steps_taken, tmp_path, **config), *world)
    for rank, x in enumerate(dgc.lockstep.run(goes_on, *world)):
        assert torch.equal(x, expected[rank][0])


def test_a_state_that_only_some_ranks_have_is_the_mean_of_theirs():
    """A rank that has not used a parameter has no state of it."""
    one, two = (
        {"exp_avg": torch.full((2,), float(value)), "step": torch.tensor(3.0)} for value in (1, 2)
    )
    own = [{"inner": {"state": state}, "x": {}} for state in ({0: one}, {0: two, 1: two}, {})]
    state = mean_round(own)["inner"]["state"]
    assert list(state) == [0, 1] and state[1]["step"] == 3
    assert state[0]["exp_avg"].tolist() == [1.5, 1.5] and state[1]["exp_avg"].tolist() == [2, 2]


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_that_a_scaler_has_left_out_is_saved(step, tmp_path):
    """In the middle of a round, and where the other rank has made one."""

    def scaled(model, optimizer, first, last, saves=False):
        rank, scaler = find().world.rank, torch.amp.GradScaler("cpu", init_scale=4.0)
        for at in range(first, last):
            optimizer.zero_grad()
            scaler.scale(loss(model, at, rank)).backward()
            if rank == 1 and at == step:
                next(model.parameters()).grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            if saves and at == step:
                dgc.save_checkpoint(tmp_path, model, optimizer)
        return flat(model)

    def uninterrupted():
        model = network()
        return scaled(model, made("adamw", model, value_bits=4), 0, 6, saves=True)

    def resumed():
        return scaled(*loaded(tmp_path), step + 1, 6)

    first, second = dgc.lockstep.run(uninterrupted, 2)
    assert torch.equal(first, second)
    assert all(torch.equal(x, first) for x in dgc.lockstep.run(resumed, 2))


def test_a_rank_returns_to_the_start_of_a_round_that_was_saved(tmp_path):
    """Its optimizer's state too, where its parameters are no longer finite."""

    def goes_on(model, optimizer):
        rank = find().world.rank
        if rank == 1:
            with torch.no_grad():
                next(model.parameters())[0, 0] = torch.nan
        steps(model, optimizer, 5, 6)
        state = optimizer.state[next(model.parameters())]
        return flat(model), state["step"], state["exp_avg"], optimizer.report().skipped

    def uninterrupted():
        model = network()
        optimizer = made("adamw", model, value_bits=4, nonfinite="skip")
        steps(model, optimizer, 0, 5)
        dgc.save_checkpoint(tmp_path, model, optimizer)
        return goes_on(model, optimizer)

    expected = dgc.lockstep.run(uninterrupted, 2)
    found = dgc.lockstep.run(lambda: goes_on(*loaded(tmp_path, nonfinite="skip")), 2)
    for (*own, skipped), (*other, before) in zip(found, expected, strict=True):
        assert all(map(torch.equal, own, other)) and skipped == before


def test_machines_go_on_where_each_rank_took_its_own_steps(tmp_path):
    def goes_on():
        model, optimizer = loaded(tmp_path, hierarchical=True)
        steps(model, optimizer, 7, 11)
        optimizer.flush()
        return flat(model)

    dgc.lockstep.run(lambda: saved_after(7, tmp_path), 4)
    first, *others = dgc.lockstep.run(goes_on, 4, 2)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_on_another_number_of_ranks_nothing_is_lost(size, tmp_path):
    """The mean of x and of the optimizers' states, and what is pending: together they are worth the same."""

    def seen():
        model, optimizer = loaded(tmp_path)
        x, inner = flat(model), optimizer.state_dict()["state"][0]["exp_avg"].clone()
        v = optimizer.residual_state_dict()["v"]
        steps(model, optimizer, 7, 10)
        return x, v, inner, flat(model)

    before = dgc.lockstep.run(lambda: saved_after(7, tmp_path), 4)
    after = dgc.lockstep.run(seen, size)
    mean = sum(x for _, x, _ in before) / 4
    pending = {
        name: sum(state["v"][name] for _, _, state in before) / 4 for name in before[0][2]["v"]
    }
    model = network()
    if size == 1:  # which keeps nothing pending: it is in the parameters
        for name, p in model.named_parameters():
            p.data = pending[name].view_as(p) if name in pending else torch.zeros_like(p)
        mean = mean - flat(model)
    for x, v, _, _ in after:
        assert (x - mean).abs().max() < 1e-12
        assert size == 1 or v.keys() == pending.keys()
    if size > 1:
        for name, expected in pending.items():
            assert (sum(v[name] for _, v, _, _ in after) / size - expected).abs().max() < 1e-12
    moments = [state["local"]["inner"]["state"][0]["exp_avg"] for _, _, state in before]
    assert (after[0][2] - sum(moments) / 4).abs().max() < 1e-12
    assert all(torch.equal(x, after[0][3]) for *_, x in after)


def test_one_process_and_then_two(tmp_path):
    (expected,) = dgc.lockstep.run(lambda: saved_after(4, tmp_path), 1)
    for x in dgc.lockstep.run(lambda: flat(loaded(tmp_path)[0]), 2):
        assert torch.equal(x, expected[1])


def test_a_checkpoint_without_local_steps_is_refused(tmp_path):
    def worker():
        model = network()
        optimizer = made("sgd", model, local_steps=None)
        steps(model, optimizer, 0, 2)
        dgc.save_checkpoint(tmp_path, model, optimizer)
        with pytest.raises(ValueError, match="an optimizer with local_steps"):
            loaded(tmp_path, "sgd")

    dgc.lockstep.run(worker, 2)
