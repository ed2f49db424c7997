"""Workers that come and go: what the others had pending is worth as much as before."""

import copy
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from launch import end, ran
from laws import flat, loss, model, train

import dgc
from dgc.engine.engine import engine_of

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Two workers, one of which is killed in an exchange; both "hosts" are this machine."""
    return run_job(tmp_path_factory.mktemp("elastic"))


def run_job(folder, *arguments):
    """What each worker saved after each step, and the output."""
    pytest.importorskip("horovod.torch")
    hosts = folder / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    hosts.chmod(0o755)
    bin_folder = Path(sys.executable).parent
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                str(bin_folder / "horovodrun"),
                "--gloo",
                "-np",
                "2",
                "--min-np",
                "1",
                "--max-np",
                "2",
                "--host-discovery-script",
                str(hosts),
                sys.executable,
                str(HERE / "elastic_job.py"),
                str(folder),
                *arguments,
            ],
            env={
                **os.environ,
                "PATH": f"{bin_folder}:{os.environ['PATH']}",
                "OMP_NUM_THREADS": "1",
            },
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            status = process.wait(240)
        finally:
            end(process.pid)
    output = log.read_text()
    assert status == 0, output
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}, output


@pytest.mark.long
def test_a_worker_is_killed_and_the_other_goes_on(job):
    """From the last commit, with half of its residuals: it was one of two, now it is all there is."""
    states, output = job
    assert sorted(states) == [
        *(f"{i}-of2-rank{r}" for i in range(1, 5) for r in range(2)),
        *(f"{i}-of1-rank0" for i in range(5, 9)),
    ]
    assert "of 2 ranks 1 are gone" in output
    survivor = next(
        state
        for state in (states["4-of2-rank0"], states["4-of2-rank1"])
        if state["rank"]
        == (1 if "[1]<stderr>:" in output.split("are gone")[0].splitlines()[-1] else 0)
    )
    after = states["5-of1-rank0"]
    assert after["lost"] == states["8-of1-rank0"]["lost"] == 1
    network = model()
    network.load_state_dict(survivor["model"], strict=False)
    loss(network, 0, 0).backward()
    for name, v in survivor[
        "v"
    ].items():  # with one rank nothing is kept back: u = m u + g, and v + u is applied
        p, g = survivor["model"][name].double(), network.get_parameter(name).grad.double()
        expected = p - 0.05 * (v.double() / 2 + 0.9 * survivor["u"][name].double() / 2 + g)
        assert torch.allclose(after["model"][name].double(), expected, rtol=1e-5, atol=1e-7)
        assert not after["v"][name].any()


@pytest.mark.long
def test_the_loss_goes_on_falling(job):
    losses = [job[0][f"{i}-of{2 if i < 5 else 1}-rank0"]["loss"] for i in range(1, 9)]
    print("loss by step:", [f"{value:.3f}" for value in losses])
    assert losses[0] > losses[3] > losses[7]


@pytest.mark.long
def test_with_local_steps_the_other_goes_on_from_the_common_parameters(tmp_path):
    """A commit makes a round; after it the worker that is left takes plain steps, with its own momentum."""
    states, output = run_job(tmp_path, "local")
    left = 0 if "5-of2-rank0" in states else 1  # it took a step more, and went back to the commit
    assert states.keys() == {
        *(f"{i}-of2-rank{r}" for i in range(1, 5) for r in range(2)),
        f"5-of2-rank{left}",
        *(f"{i}-of1-rank0" for i in range(5, 9)),
    }
    assert "of 2 ranks 1 are gone" in output
    for step in range(1, 5):
        pair = [states[f"{step}-of2-rank{rank}"]["model"] for rank in range(2)]
        alike = all(torch.equal(pair[0][name], pair[1][name]) for name in pair[0])
        assert alike == (step % 2 == 0)
    common, after = states["4-of2-rank0"]["model"], states["5-of1-rank0"]["model"]
    network = model()
    network.load_state_dict(common, strict=False)
    plain = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    plain.load_state_dict(states[f"4-of2-rank{left}"]["local"]["inner"])
    loss(network, 0, 0).backward()
    plain.step()
    assert all(torch.equal(after[k], p) for k, p in network.named_parameters())
    losses = [states[f"{i}-of{2 if i < 5 else 1}-rank0"]["loss"] for i in range(1, 9)]
    assert losses[0] > losses[3] > losses[7]


@pytest.mark.parametrize(
    ("former", "remain", "size", "exchange"),
    [(4, 3, 3, "reduce"), (2, 2, 3, "allgather"), (4, 3, 4, "allgather"), (3, 1, 2, "reduce")],
)
@pytest.mark.parametrize("average", [True, False])
def test_what_remains_pending_is_worth_as_much(
    former, remain, size, exchange, average, monkeypatch
):
    """Under Average a rank's v counts for 1/N: before and after. New ranks have none; lost ones are counted."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    op, config = dgc.Average if average else dgc.Sum, dgc.Config(0.9, exchange=exchange)

    def before():
        return train(range(3), config, op=op)[1].residual_state_dict()

    kept = dgc.lockstep.run(before, former)[:remain]

    def after():
        rank = dgc.lockstep.current().world.rank
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config, op=op)
        pending = engine_of(optimizer)._residuals
        if rank < remain:
            pending.load(kept[rank])
        if rank == 0 and remain < former:
            with pytest.warns(UserWarning, match=f"of {former} ranks {former - remain} are gone"):
                return pending.rescale(size), pending.state()
        return pending.rescale(size), pending.state()

    now = dgc.lockstep.run(after, size)
    divisors = (former, size) if average else (1, 1)
    for letter in "uv":
        for name in kept[0][letter]:
            old = sum(state[letter][name].double() for state in kept) / divisors[0]
            new = sum(state[letter][name].double() for _, state in now) / divisors[1]
            assert old.any() and torch.allclose(new, old, rtol=1e-6)
    assert all(lost == former - remain for lost, _ in now)


def test_commits_of_two_sizes_are_each_worth_as_much(monkeypatch):
    """Ranks 0 and 1 of three; rank 0 has committed among three, and rank 1 has its commit of two."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    sizes = [3, 2]
    kept = dgc.lockstep.run(lambda: train(range(3), dgc.Config(0.9))[1].residual_state_dict(), 2)

    def after():
        rank = dgc.lockstep.current().world.rank
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(0.9))
        pending = engine_of(optimizer)._residuals
        pending.load({**kept[rank], "size": sizes[rank]})
        if rank == 0:
            with pytest.warns(UserWarning, match="of 3 ranks 1 are gone"):
                return pending.rescale(2), pending.state()
        return pending.rescale(2), pending.state()

    now = dgc.lockstep.run(after, 2)
    for rank, (lost, state) in enumerate(now):
        assert lost == 1
        for letter in "uv":
            for name, old in kept[rank][letter].items():
                assert old.any() and torch.allclose(
                    state[letter][name].double() / 2, old.double() / sizes[rank]
                )


def test_a_worker_that_joins_leaves_the_others_velocity_alone(monkeypatch):
    """Also where its script loads a checkpoint of plain SGD, as the others' did when the job began."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")

    def made():
        network = model()
        inner = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        for p in network.parameters():
            inner.state[p]["momentum_buffer"] = torch.full_like(p, 7.0)
        optimizer = dgc.DistributedOptimizer(
            inner, network.named_parameters(), dgc.Config(0.9, factor_masking=False)
        )
        engine_of(optimizer).compare_again()
        return network, optimizer

    def worker():
        joins = dgc.lockstep.current().world.rank == 1
        network, optimizer = train(range(3), None, *made())
        parameters, state = copy.deepcopy((network.state_dict(), optimizer.state_dict()))
        if joins:
            network, optimizer = made()
            network.load_state_dict(parameters)
            optimizer.load_state_dict(state)  # as Horovod broadcasts it
        engine_of(optimizer).compare_again()
        before = {} if joins else optimizer.residual_state_dict()["u"]
        optimizer.zero_grad()
        for p in network.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        return before, optimizer.residual_state_dict()["u"]

    (before, after), (_, joined) = dgc.lockstep.run(worker, 2)
    for name, u in before.items():
        assert u.any() and torch.allclose(after[name], 0.9 * u) and not joined[name].any()


def a_worker_joins():
    """It has made another warm-up, as an epoch has other steps with it, and knows nothing of the rate's schedule."""
    import horovod.torch as hvd

    import dgc.elastic

    os.environ["HOROVOD_ELASTIC"] = "1"
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    config = dgc.Config(dgc.warmup(2, steps_per_epoch=6 - 2 * hvd.rank(), end=0.9))
    optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), config)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    if hvd.rank() == 0:
        scheduler.last_epoch = 2
    state = dgc.elastic.TorchState(model=network, optimizer=optimizer, scheduler=scheduler, epoch=0)
    state.sync()
    train(range(2), None, network, optimizer)
    scheduler.step()
    return (
        optimizer._compression.sparsity == dgc.warmup(2, steps_per_epoch=6, end=0.9),
        state.scheduler is scheduler and scheduler.optimizer is optimizer,
        optimizer.param_groups[0]["lr"],
        flat(network),
    )


def with_horovods_state():
    """Warnings of a training in hvd.elastic.TorchState."""
    import horovod.torch as hvd

    os.environ["HOROVOD_ELASTIC"] = "1"
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(0.9))
    hvd.elastic.TorchState(model=network, optimizer=optimizer).sync()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(range(2), None, network, optimizer)
    return [str(w.message) for w in told]


def a_worker_joins_within_a_round():
    """Rank 0 has taken two steps of a round when rank 1, which has none, joins. Both go on to the next round."""
    import horovod.torch as hvd

    import dgc.elastic

    os.environ["HOROVOD_ELASTIC"] = "1"
    network, rank = model(), hvd.rank()
    inner = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.1)
    config = dgc.Config(0.0, value_bits=8, local_steps=4)
    optimizer = dgc.DistributedOptimizer(inner, network.named_parameters(), config)

    def steps(count):
        for step in range(count):
            optimizer.zero_grad()
            loss(network, rank, step).backward()
            optimizer.step()

    if rank == 0:
        steps(2)
    dgc.elastic.TorchState(model=network, optimizer=optimizer).sync()
    joined = flat(network)
    steps(4)
    del os.environ["HOROVOD_ELASTIC"]
    return joined, flat(network)


CASES = a_worker_joins, with_horovods_state, a_worker_joins_within_a_round


def test_a_worker_that_joins_takes_rank_0s_schedules():
    first, second = ran("horovod", 2, CASES)[a_worker_joins]
    for schedule, scheduler, rate, _ in (first, second):
        assert schedule and scheduler and rate == pytest.approx(0.005)
    assert torch.equal(first[-1], second[-1])


def test_a_worker_that_joins_within_a_round_has_the_same_parameters():
    first, second = ran("horovod", 2, CASES)[a_worker_joins_within_a_round]
    assert all(map(torch.equal, first, second)) and not torch.equal(*first)


def test_horovods_own_state_is_told_of_once():
    first, second = ran("horovod", 2, CASES)[with_horovods_state]
    assert (
        len(first) == 1
        and "should hold its optimizer in dgc.elastic.TorchState" in first[0]
        and not second
    )


def test_a_lost_rank_is_counted_once(monkeypatch):
    """However often the commit is restored that still has it."""
    pytest.importorskip("horovod.torch")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")

    def worker():
        network, optimizer = train(range(2), dgc.Config(0.9))
        handler, engine = dgc.elastic._Handler(optimizer), engine_of(optimizer)
        handler._residuals["size"] = 3  # of which one is gone
        for step in range(2, 5):
            handler.restore()
            engine.compare_again()
            train([step], None, network, optimizer)
        return optimizer.report().lost_residuals

    with pytest.warns(UserWarning, match="of 3 ranks 1 are gone"):
        assert dgc.lockstep.run(worker, 2) == [1, 1]


def test_a_commit_can_be_restored_more_than_once():
    """Steps after the first time do not change it: weight decay's momentum and that of small parameters too."""
    pytest.importorskip("horovod.torch")

    def worker():
        network, optimizer = train(range(2), dgc.Config(0.95))
        handler = dgc.elastic._Handler(optimizer)
        committed, pending = copy.deepcopy(optimizer.state_dict()), optimizer.residual_state_dict()
        for _ in range(2):
            train(range(2, 4), None, network, optimizer)
            handler.restore()
            state = optimizer.state_dict()
            assert state["param_groups"] == committed["param_groups"]
            for index, buffers in committed["state"].items():
                for key, buffer in buffers.items():
                    assert (
                        torch.equal(state["state"][index][key], buffer)
                        if buffer is not None
                        else True
                    )
            now = optimizer.residual_state_dict()
            assert all(
                torch.equal(now[letter][name], x)
                for letter in "uv"
                for name, x in pending[letter].items()
            )

    dgc.lockstep.run(worker, 2)


def test_a_commit_within_a_step_is_refused():
    """v would lack what is on its way, and have the rest of a gradient that comes again."""
    pytest.importorskip("horovod.torch")

    def worker():
        network, optimizer = train(range(2), dgc.Config(0.95))
        handler = dgc.elastic._Handler(optimizer)
        kept = handler._residuals
        loss(network, 0, 2).backward()
        with pytest.raises(RuntimeError, match="must be called after step"):
            handler.save()
        assert handler._residuals is kept
        optimizer.step()
        handler.save()
        assert handler._residuals is not kept

    dgc.lockstep.run(worker, 2)
