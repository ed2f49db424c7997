"""Checkpoints go on to the bit, conserve what is pending on any number of ranks, and survive what befalls files."""

import functools
import json
import os
import random
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import end, launch
from laws import batch, current_rank, difference, flat, loss, model
from torch import nn

import dgc
from dgc.checkpoint import files
from dgc.checkpoint.reshard import weights as weights_of

DOUBLE = torch.float64
SOAK = bool(os.environ.get("DGC_SOAK"))  # at full size
SCHEDULE = dgc.piecewise({0: 0.95, 4: 0.0})


def made(op=dgc.Average, network=None, kind=torch.optim.SGD, config=None, **changed):
    network = model(dtype=DOUBLE) if network is None else network
    usual = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2} if kind is torch.optim.SGD else {"lr": 1e-3}
    optimizer = kind(network.parameters(), **{**usual, **changed})
    config = dgc.Config(sparsity=SCHEDULE) if config is None else config
    return network, dgc.DistributedOptimizer(optimizer, network.named_parameters(), config, op=op)


def trained(steps, network, optimizer, common=False):
    """Gradients that add up to the same whatever the number of ranks, if they have the batches in common."""
    rank, world = current_rank(), dgc.lockstep.current().world
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(0 if common else rank, step, DOUBLE)
        value = nn.functional.cross_entropy(network(x), y)
        (value if optimizer.op == dgc.Average else value / world.size).backward()
        optimizer.step()
    return flat(network)


def in_lockstep(worker, size):
    return dgc.lockstep.run(worker, size)


# -- the number of ranks -----------------------------------------------------------------------------------------------

@functools.cache
def saved(size, op, folder, **changed):
    """Four sparse steps, saved; what each rank had pending; and the parameters when all of it is applied, and after
    four dense steps.
    """
    def worker():
        network, optimizer = made(op, **changed)
        trained(range(4), network, optimizer)
        dgc.save_checkpoint(folder, network, optimizer, {"rank": current_rank()})
        residuals, before = optimizer.residual_state_dict(), flat(network)
        optimizer.flush()
        flushed = flat(network)
        dgc.save_checkpoint(Path(folder) / "flushed", network, optimizer)
        after_flush = trained(range(4, 8), network, optimizer, common=True)
        dgc.load_checkpoint(folder, network, optimizer)
        return residuals, before, flushed, trained(range(4, 8), network, optimizer, common=True), after_flush
    return in_lockstep(worker, size)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def pending(residuals, letter, average):
    """What counts in the update, float64."""
    total = {k: sum(r[letter][k].double() for r in residuals) for k in residuals[0][letter]}
    return torch.cat([x.flatten() for x in total.values()] or [torch.zeros(0)]) / (len(residuals) if average else 1)


OPS = pytest.mark.parametrize("op", [dgc.Average, dgc.Sum], ids=["average", "sum"])


def test_what_is_pending_in_an_added_group_is_conserved_on_one_process(tmp_path):
    def grouped():
        network = model(dtype=DOUBLE)
        first, *others = network.parameters()
        optimizer = torch.optim.SGD([first], 0.05, 0.9, weight_decay=1e-2)
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(sparsity=SCHEDULE))
        optimizer.add_param_group({"params": others})
        return network, optimizer

    def save():
        network, optimizer = grouped()
        trained(range(4), network, optimizer)
        dgc.save_checkpoint(tmp_path, network, optimizer)
        optimizer.flush()
        return flat(network)

    def load():
        network, optimizer = grouped()
        dgc.load_checkpoint(tmp_path, network, optimizer)
        return flat(network)

    flushed = in_lockstep(save, 2)[0]
    assert difference(in_lockstep(load, 1)[0], flushed) < 1e-14


@OPS
@pytest.mark.parametrize("new", [1, 2, 3, 4])
@pytest.mark.parametrize("old", [1, 2, 3, 4])
def test_what_is_pending_is_conserved(shelf, old, new, op):
    """In u and in v; and so are the parameters, once it is all applied, and after more steps that have the same sum."""
    before = saved(old, op, f"{shelf}/{old}-{op}")

    def worker():
        network, optimizer = made(op, lr=1.0, momentum=0.5)
        extras = dgc.load_checkpoint(f"{shelf}/{old}-{op}", network, optimizer)
        assert extras == {"rank": current_rank() if new == old else 0}
        residuals, loaded = optimizer.residual_state_dict(), flat(network)
        optimizer.flush()
        flushed = flat(network)
        dgc.load_checkpoint(f"{shelf}/{old}-{op}", network, optimizer)
        return residuals, loaded, flushed, trained(range(4, 8), network, optimizer, common=True)

    after = in_lockstep(worker, new)
    assert all(torch.equal(rank[i], after[0][i]) for rank in after for i in (1, 2, 3))
    assert difference(after[0][2], before[0][2]) < 1e-14
    if old > 1:
        assert difference(before[0][2], before[0][1]) > 1e-6  # something was
    if old > 1 and new > 1:
        for letter in "uv":
            a, b = (pending([rank[0] for rank in ranks], letter, op == dgc.Average) for ranks in (after, before))
            assert difference(a, b) < 1e-14 and b.norm() > 0
        assert torch.equal(after[0][1], before[0][1])
        assert difference(after[0][3], before[0][3]) < 1e-12
    if old == new:
        assert torch.equal(after[0][3], before[0][3])


@OPS
@pytest.mark.parametrize("old", [2, 3])
def test_momentum_goes_on_in_one_process(shelf, old, op):
    """With nothing pending in v: as if there still were the others, weight decay included."""
    expected = saved(old, op, f"{shelf}/{old}-{op}")[0][4]

    def worker():
        network, optimizer = made(op)
        dgc.load_checkpoint(f"{shelf}/{old}-{op}/flushed", network, optimizer)
        assert not any("decay_buffer" in state for state in optimizer.state.values())
        return trained(range(4, 8), network, optimizer, common=True)

    assert difference(in_lockstep(worker, 1)[0], expected) < 1e-12


@OPS
def test_momentum_goes_on_from_one_process(shelf, op):
    """From a plain optimizer to three ranks, at density 1."""
    expected = saved(1, op, f"{shelf}/1-{op}")[0][3]

    def worker():
        network, optimizer = made(op, config=dgc.Config(sparsity=0.0))
        dgc.load_checkpoint(f"{shelf}/1-{op}", network, optimizer)
        return trained(range(4, 8), network, optimizer, common=True)

    assert all(difference(x, expected) < 1e-12 for x in in_lockstep(worker, 3))


def test_momentum_of_sparse_gradients_goes_on_in_one_process(tmp_path):
    """It is torch's own, not in u."""
    def run(network, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            network(torch.arange(10) + step).square().sum().backward()
            optimizer.step()
        return flat(network)

    def embedding():
        torch.manual_seed(0)
        return nn.Embedding(100, 32, sparse=True).double()

    def first():
        network, optimizer = made(network=embedding(), weight_decay=0.0)
        run(network, optimizer, range(3))
        dgc.save_checkpoint(tmp_path, network, optimizer)

    def second():
        network, optimizer = made(network=embedding(), weight_decay=0.0)
        dgc.load_checkpoint(tmp_path, network, optimizer)
        return run(network, optimizer, range(3, 6))

    in_lockstep(first, 2)
    network = embedding()
    expected = run(network, torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9), range(6))
    assert difference(in_lockstep(second, 1)[0], expected) < 1e-12


def test_maximize(tmp_path):
    """The signs of momentum and of what is applied."""
    before = saved(2, dgc.Average, str(tmp_path), maximize=True)

    def worker():
        network, optimizer = made(maximize=True)
        dgc.load_checkpoint(tmp_path, network, optimizer)
        flushed = flat(network)
        dgc.load_checkpoint(tmp_path / "flushed", network, optimizer)
        return flushed, trained(range(4, 8), network, optimizer, common=True)

    (flushed, after), = in_lockstep(worker, 1)
    assert difference(flushed, before[0][2]) < 1e-14 and difference(after, before[0][4]) < 1e-12


def test_ranks_that_order_their_sets_otherwise_are_alike():
    """A module's extra state may hold one. Python draws the order of strings in each process."""
    code = ("from dgc.checkpoint.save import tree_hash; "
            "print(tree_hash({'_extra_state': {'a', 'b', 'c', 'd', 'e'}, 'x': 1}))")
    told = {subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60,
                           env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in "123"}
    assert len(told) == 1


def test_an_elastic_job_of_one_keeps_its_residuals(shelf, monkeypatch):
    before = saved(3, dgc.Average, f"{shelf}/3-{dgc.Average}")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")

    def worker():
        network, optimizer = made()
        dgc.load_checkpoint(f"{shelf}/3-{dgc.Average}", network, optimizer)
        return optimizer.residual_state_dict(), flat(network), trained(range(4, 8), network, optimizer, common=True)

    (residuals, loaded, after), = in_lockstep(worker, 1)
    for letter in "uv":
        assert difference(pending([residuals], letter, True), pending([r[0] for r in before], letter, True)) < 1e-14
    assert torch.equal(loaded, before[0][1]) and difference(after, before[0][3]) < 1e-12


@pytest.mark.parametrize(("old_op", "new_op"), [(dgc.Average, dgc.Sum), (dgc.Sum, dgc.Average)])
def test_what_is_pending_is_conserved_when_the_sum_is_another(shelf, old_op, new_op):
    before = saved(2, old_op, f"{shelf}/2-{old_op}")

    def worker():
        network, optimizer = made(new_op)
        dgc.load_checkpoint(f"{shelf}/2-{old_op}", network, optimizer)
        optimizer.flush()
        return flat(network)

    for size in (2, 3):
        assert difference(in_lockstep(worker, size)[0], before[0][2]) < 1e-14


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.booleans())
def test_every_old_residual_counts_as_before(old, new, average, new_average):
    """The law of :func:`dgc.load_checkpoint`, for any numbers: f' times the weights of an old residual add up to f."""
    weights = [weights_of(old, average, rank, new, new_average) for rank in range(new)]
    f, new_f = 1 / old if average else 1, 1 / new if new_average else 1
    for rank in range(old):
        assert sum(w.get(rank, 0) for w in weights) * new_f == pytest.approx(f, rel=1e-12)
    assert all(w > 0 for some in weights for w in some.values())
    if old == new and average == new_average:
        assert weights == [{rank: 1.0} for rank in range(new)]
    if average and new_average:  # means
        assert all(sum(some.values()) == pytest.approx(1, rel=1e-12) for some in weights)
    assert weights_of(old, average, None, new, new_average) == {rank: float(Fraction(f)) for rank in range(old)}


def test_small_parameters_that_travel_rounded_and_float32(tmp_path):
    """Their rests are kept like v. To float32's rounding."""
    config = dgc.Config(sparsity=0.95, dense_dtype=torch.float16)

    def first():
        network, optimizer = made(network=model(), config=config)
        for step in range(4):
            optimizer.zero_grad()
            loss(network, current_rank(), step).backward()
            optimizer.step()
        dgc.save_checkpoint(tmp_path, network, optimizer)
        return optimizer.residual_state_dict()

    def second():
        network, optimizer = made(network=model(), config=config)
        dgc.load_checkpoint(tmp_path, network, optimizer)
        return optimizer.residual_state_dict()

    before, after = in_lockstep(first, 3), in_lockstep(second, 2)
    assert len(before[0]["v"]) > len(before[0]["u"]) > 0
    for letter in "uv":
        assert difference(pending(after, letter, True), pending(before, letter, True)) < 1e-7


# -- the same number of ranks, on real processes -----------------------------------------------------------------------

CASES = ["checkpoint_resume", "checkpoint_separate", "checkpoint_failure", "checkpoint_damage"]
ONLY = {"horovod": ["checkpoint_stock"], "torch": ["stateful", "checkpoint_ddp"]}


@functools.cache
def ran(launcher):
    try:
        return launch(launcher, 2, CASES + ONLY[launcher], limit=200)[0]
    except BaseException as error:
        return error


@pytest.fixture(params=["horovod", "torch"])
def results(request):
    if isinstance(outcome := ran(request.param), BaseException):
        raise outcome
    return outcome


@pytest.mark.parametrize("case", ["checkpoint_resume", "checkpoint_separate"])
def test_resuming_is_bit_for_bit(results, case):
    """Law 6: parameters, buffers, u, v, momentum, decay, and all that is drawn; also without a common file system, when
    a machine was replaced.
    """
    ranks = results[case]
    assert all(rank["same"] and rank["draws"] and rank["residual"] > 0 for rank in ranks)
    assert [rank["extras"] for rank in ranks] == [{"epoch": 6, "rank": rank} for rank in range(2)]
    assert not torch.equal(ranks[0]["buffers"], ranks[1]["buffers"])
    assert ranks[0]["files"] == ["common", "manifest.json", "rank", "rank"]


def test_a_full_disk_on_one_rank_is_an_error_on_all(results):
    for message, seconds, left, restored in results["checkpoint_failure"]:
        assert "File too large" in message and "(on rank 1)" in message
        assert seconds < 60 and left and restored


def test_a_damaged_file_of_one_rank_is_an_error_on_all(results):
    for message, untouched in results["checkpoint_damage"]:
        assert "rank-1-" in message and "its SHA-256 is" in message and "(on rank 1)" in message
        assert untouched


@pytest.mark.parametrize("case", ONLY["torch"])
@pytest.mark.parametrize("results", ["torch"], indirect=True)
def test_torchs_own_places(results, case):
    """``torch.distributed.checkpoint`` with :class:`dgc.Residuals`; DistributedDataParallel's hook. To the bit."""
    assert all(same and residual > 0 for same, residual in results[case])


@pytest.mark.parametrize("results", ["horovod"], indirect=True)
def test_to_horovods_own_optimizer_and_back(results):
    assert max(results["checkpoint_stock"]) < 1e-6


# -- in one process ----------------------------------------------------------------------------------------------------

def test_one_process_goes_on_to_the_bit(tmp_path):
    """A plain optimizer, of any kind."""
    def worker():
        import numpy as np
        results = []
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            network, optimizer = made(kind=kind, config=dgc.Config(momentum_correction=False))
            trained(range(3), network, optimizer)
            dgc.save_checkpoint(tmp_path, network, optimizer)
            expected = trained(range(3, 6), network, optimizer), torch.rand(3), random.random(), np.random.rand()
            network, optimizer = made(kind=kind, config=dgc.Config(momentum_correction=False))
            assert dgc.load_checkpoint(tmp_path, network, optimizer) == {}
            got = trained(range(3, 6), network, optimizer), torch.rand(3), random.random(), np.random.rand()
            results += [torch.equal(got[0], expected[0]), torch.equal(got[1], expected[1]), got[2:] == expected[2:]]
        return results

    assert in_lockstep(worker, 1) == [[True] * 6]


def test_adam_keeps_its_residuals_on_other_numbers_of_ranks_and_says_where_it_cannot(tmp_path):
    config = dgc.Config(sparsity=0.95, momentum_correction=False)

    def first():
        network, optimizer = made(kind=torch.optim.Adam, config=config)
        trained(range(3), network, optimizer)
        dgc.save_checkpoint(tmp_path, network, optimizer)
        return optimizer.residual_state_dict()

    def second():
        network, optimizer = made(kind=torch.optim.Adam, config=config)
        dgc.load_checkpoint(tmp_path, network, optimizer)
        return optimizer.residual_state_dict()

    before, after = in_lockstep(first, 2), in_lockstep(second, 3)
    assert difference(pending(after, "v", True), pending(before, "v", True)) < 1e-14
    with pytest.raises(ValueError, match=r"gradients are pending, and Adam keeps no residuals here; accepted: two or"):
        in_lockstep(second, 1)


def test_a_new_checkpoint_takes_the_old_ones_place_and_leaves_other_files_alone(tmp_path):
    def worker():
        network, optimizer = made()
        for step in range(3):
            trained([step], network, optimizer)
            dgc.save_checkpoint(tmp_path / "new" / "folder", network, optimizer, {"step": step})
            (tmp_path / "new" / "folder" / "rank-9-0123456789abcdef.pt").touch()  # of a larger job
            (tmp_path / "new" / "folder" / "rank-9.part").touch()
            (tmp_path / "new" / "folder" / "common-notes.pt").touch()
        dgc.save_checkpoint(tmp_path / "new" / "folder", network, optimizer, {"step": step})  # the same once more
        return dgc.load_checkpoint(str(tmp_path / "new" / "folder"), network, optimizer)

    assert in_lockstep(worker, 2) == [{"step": 2}] * 2
    names = sorted(file.name.split("-")[0] for file in (tmp_path / "new" / "folder").iterdir())
    assert names == ["common", "common", "manifest.json", "rank", "rank"]
    common = torch.load(next((tmp_path / "new" / "folder").glob("common-?*[0-9a-f].pt")), weights_only=True)
    model(dtype=DOUBLE).load_state_dict(common["model"])  # as the module says


# -- refusals ----------------------------------------------------------------------------------------------------------

class Custom:
    """What could only be loaded by running code."""


@pytest.mark.parametrize(("extras", "message"), [
    ({"a": [Custom()]}, r"extras holds test_checkpoint\.Custom; accepted: plain data"),
    ({"a": torch.tensor([1.0]).numpy()[0]}, r"extras holds numpy\S*; accepted: plain data"),
    ({"a": lambda: 0}, r"extras holds .*lambda.*; accepted: plain data"),
])
def test_what_could_not_be_loaded_is_not_saved(tmp_path, extras, message):
    with pytest.raises(TypeError, match=message):
        in_lockstep(lambda: dgc.save_checkpoint(tmp_path, *made(), extras if current_rank() else {}), 2)
    assert not list(tmp_path.iterdir())


class Marked(torch.Tensor):
    """Of a class that a file cannot make without running code."""


@pytest.mark.parametrize(("odd", "message"), [
    (lambda: torch.ones(2).as_subclass(Marked), r"holds test_checkpoint\.Marked; accepted: plain data"),
    (lambda: torch.eye(5).to_sparse_csr(), r"holds a tensor of layout torch\.sparse_csr at \['odd'\]; accepted: plain"),
    (lambda: torch.ones(2, device="meta"), r"holds a tensor on meta at \['odd'\]; accepted: plain data"),
])
@pytest.mark.parametrize("where", ["extras", "model"])
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_tensor_that_would_not_be_loaded_is_not_saved(tmp_path, where, odd, message):
    """The checkpoint before stays, and loads."""
    def worker():
        network, optimizer = made()
        dgc.save_checkpoint(tmp_path, network, optimizer, {"epoch": 1})
        before = sorted(file.name for file in tmp_path.iterdir())
        if where == "model":
            network.register_buffer("odd", odd())
        with pytest.raises(TypeError, match=f"{where} {message}"):
            dgc.save_checkpoint(tmp_path, network, optimizer, {"odd": odd()} if where == "extras" else {})
        assert sorted(file.name for file in tmp_path.iterdir()) == before
        return dgc.load_checkpoint(tmp_path, *made())

    assert in_lockstep(worker, 2) == [{"epoch": 1}] * 2


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*TypedStorage:UserWarning")
def test_tensors_of_every_kind_that_is_loaded_are_saved(tmp_path):
    extras = {"COO": torch.eye(3).to_sparse(), "parameter": nn.Parameter(torch.ones(2)), "none": torch.zeros(0, 3),
              "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "half": torch.ones(2).half()}
    in_lockstep(lambda: dgc.save_checkpoint(tmp_path, *made(), extras), 2)
    for loaded in load(tmp_path):
        assert loaded.keys() == extras.keys()
        assert all(torch.equal(x.to_dense() if x.is_sparse else x, extras[k].to_dense() if x.is_sparse else extras[k])
                   for k, x in loaded.items())


def test_nothing_is_saved_within_a_step(tmp_path):
    def worker():
        network, optimizer = made()
        loss(network, 0, 0, DOUBLE).backward()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\); accepted: after step\(\)"):
                dgc.save_checkpoint(tmp_path, network, optimizer)
            optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        dgc.save_checkpoint(tmp_path, network, optimizer)

    in_lockstep(worker, 2)


def test_what_is_loaded_within_a_step_is_what_was_saved(tmp_path):
    """Nothing of the step that was not finished is added to it."""
    def worker():
        network, optimizer = made()
        trained(range(3), network, optimizer)
        dgc.save_checkpoint(tmp_path, network, optimizer)
        saved = optimizer.residual_state_dict()
        expected = trained(range(3, 6), network, optimizer)
        optimizer.zero_grad()
        loss(network, current_rank(), 6, DOUBLE).backward()
        dgc.load_checkpoint(tmp_path, network, optimizer)
        loaded = optimizer.residual_state_dict()
        assert all(torch.equal(loaded[letter][name], x) for letter in "uv" for name, x in saved[letter].items())
        return torch.equal(trained(range(3, 6), network, optimizer), expected)

    assert in_lockstep(worker, 2) == [True, True]


def test_a_loss_scaler_that_skipped_the_last_step(tmp_path):
    """It never called the optimizer's ``step()``, and there is nothing to wait for."""
    def worker():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        optimizer = dgc.DistributedOptimizer(optimizer, network.named_parameters(), dgc.Config(sparsity=0.9),
                                             grad_scaler=scaler)

        def steps(some, bad=None):
            for step in some:
                optimizer.zero_grad()
                scaler.scale(loss(network, current_rank(), step) * (1e38 if step == bad else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            return flat(network)

        steps(range(4), bad=3)
        assert scaler.get_scale() == 2.0 ** 11
        dgc.save_checkpoint(tmp_path, network, optimizer, {"scaler": scaler.state_dict()})
        expected = steps(range(4, 8))
        scaler.load_state_dict(dgc.load_checkpoint(tmp_path, network, optimizer)["scaler"])
        return torch.equal(steps(range(4, 8)), expected)

    assert in_lockstep(worker, 2) == [True, True]


def test_ranks_that_differ_are_told(tmp_path):
    def worker():
        network, optimizer = made(network=model(seed=current_rank() // 2, dtype=DOUBLE))
        dgc.save_checkpoint(tmp_path, network, optimizer)

    with pytest.raises(ValueError, match=r"the optimizer's state of ranks \[2\] differ from rank 0's"):
        in_lockstep(worker, 3)


def test_a_residual_that_overflowed_is_told(tmp_path):
    def worker():
        network, optimizer = made()
        state = optimizer.residual_state_dict()
        state["v"]["6.weight"][0, 0] = float("inf") if current_rank() else 0.0
        optimizer.load_residual_state_dict(state)
        dgc.save_checkpoint(tmp_path, network, optimizer)

    with pytest.raises(ValueError, match=r"v of 6\.weight is not finite.* \(on rank 1\)"):
        in_lockstep(worker, 2)


def load(folder, **changed):
    return in_lockstep(lambda: dgc.load_checkpoint(folder, *made(**changed)), 2)


def test_there_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint: there is no manifest\.json"):
        load(tmp_path / "nowhere")


class Groups(torch.optim.SGD):
    """With another division of the parameters."""

    def __init__(self, parameters, **changed):
        parameters = list(parameters)
        super().__init__([{"params": parameters[:2]}, {"params": parameters[2:]}], **changed)


@pytest.mark.parametrize(("changed", "message"), [
    ({"network": nn.Linear(40, 40).double()}, r"common-\S+: model lacks \['bias', 'weight'\] and has unknown \['0\."),
    ({"config": dgc.Config(sparsity=0.9, momentum_correction=False)}, r"rank-0-\S+: u lacks \[\] and has unknown"),
    ({"kind": Groups}, r"common-\S+: the optimizer's groups have \[10\] parameters; expected \[2, 8\]"),
    ({"config": dgc.Config(min_numel=5000)}, r"rank-0-.*\.pt: u lacks \[\] and has unknown \['3\.weight'\]"),
])
def test_what_does_not_fit_is_refused(shelf, changed, message):
    saved(2, dgc.Average, f"{shelf}/2-{dgc.Average}")
    with pytest.raises(ValueError, match=message):
        load(f"{shelf}/2-{dgc.Average}", **changed)


@pytest.mark.parametrize("call", [dgc.save_checkpoint, dgc.load_checkpoint])
def test_a_wrapper_of_the_optimizer_is_refused(tmp_path, call):
    """It would be taken for an optimizer without residuals."""
    def worker():
        network, optimizer = made()
        wrapper = type("Wrapper", (), {"optimizer": optimizer, "param_groups": optimizer.param_groups})()
        with pytest.raises(TypeError, match=r"optimizer is Wrapper, a wrapper .* accepted: its \.optimizer"):
            call(tmp_path, network, wrapper)

    in_lockstep(worker, 2)


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_that_the_model_lacks_are_told(tmp_path, size):
    def worker():
        network, other = nn.Linear(40, 40), nn.Linear(40, 3)
        optimizer = torch.optim.SGD([*network.parameters(), *other.parameters()], lr=0.1)
        optimizer = dgc.DistributedOptimizer(optimizer)
        both = nn.ModuleList([network, other])
        for p in both.parameters():
            nn.init.zeros_(p)
        message = r"that the model lacks, of shapes \[\(3, 40\), \(3,\)\], .*; accepted: one module that holds them all"
        with pytest.raises(ValueError, match=message):
            dgc.save_checkpoint(tmp_path, network, optimizer)
        assert current_rank() or not list(tmp_path.iterdir())
        dgc.save_checkpoint(tmp_path, both, optimizer)
        with pytest.raises(ValueError, match=message):
            dgc.load_checkpoint(tmp_path, network, optimizer)
        dgc.load_checkpoint(tmp_path, both, optimizer)

    in_lockstep(worker, size)


def test_a_rank_without_a_gradient_knows_after_loading_that_it_is_sparse(tmp_path):
    """Without momentum, whose buffer would tell; to the bit as without stopping."""
    def step(network, optimizer, has):
        optimizer.zero_grad()
        if has:
            network(torch.arange(10)).square().sum().backward()
        optimizer.step()

    def worker():
        torch.manual_seed(0)
        weight = torch.randn(100, 32, dtype=DOUBLE)
        network, optimizer = made(network=nn.Embedding(100, 32, sparse=True, _weight=weight.clone()), momentum=0.0,
                                  weight_decay=0.0)
        step(network, optimizer, True)
        dgc.save_checkpoint(tmp_path, network, optimizer)
        step(network, optimizer, current_rank() == 0)
        other, optimizer = made(network=nn.Embedding(100, 32, sparse=True, _weight=weight.clone()), momentum=0.0,
                                weight_decay=0.0)
        dgc.load_checkpoint(tmp_path, other, optimizer)
        step(other, optimizer, current_rank() == 0)
        return torch.equal(flat(network), flat(other))

    assert in_lockstep(worker, 2) == [True, True]


@pytest.mark.parametrize("size", [1, 2])
def test_a_new_checkpoint_while_one_is_loaded(tmp_path, size, monkeypatch):
    """Its files are gone when they are to be read; what is new is loaded then. A file that is gone stays an error."""
    def save(epoch):
        return in_lockstep(lambda: dgc.save_checkpoint(tmp_path, *made(), {"epoch": epoch}), 2)

    def read(*arguments):
        if begun:
            thread = threading.Thread(target=save, args=(begun.pop(),))
            thread.start()
            thread.join()
        return original(*arguments)

    save(1)
    begun, original = [2], files.read
    monkeypatch.setattr(files, "read", read)
    assert in_lockstep(lambda: dgc.load_checkpoint(tmp_path, *made()), size) == [{"epoch": 2}] * size
    next(tmp_path.glob("common-*")).unlink()
    with pytest.raises(FileNotFoundError, match=r"common-\S+ is gone"):
        in_lockstep(lambda: dgc.load_checkpoint(tmp_path, *made()), size)


class Versioned(nn.Linear):
    """Takes its parameters from version 2 of it alone, or whoever fails first."""

    _version = 2
    fails = False

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
        if local_metadata.get("version") != 2:
            raise ValueError(f"version is {local_metadata.get('version')}; accepted: 2")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        if self.fails:
            raise ValueError("refused by the module")


def test_modules_are_told_their_versions_and_what_one_refuses_is_loaded_on_no_rank(tmp_path):
    """In part neither: the first module has taken its parameters when the second refuses."""
    def worker():
        network = nn.Sequential(nn.Linear(40, 40), Versioned(40, 40))

        def step():
            optimizer.zero_grad()
            network(torch.full((1, 40), 1.0 + current_rank())).square().sum().backward()
            optimizer.step()

        def state():
            residuals = optimizer.residual_state_dict()
            return torch.cat([flat(network), *(x.flatten() for letter in "uv" for x in residuals[letter].values())])

        for p in network.parameters():
            nn.init.constant_(p, 0.01)
        _, optimizer = made(network=network, config=dgc.Config(sparsity=0.95))
        step()
        dgc.save_checkpoint(tmp_path, network, optimizer)
        saved = state()
        step()
        before = state()
        network[1].fails = current_rank() == 1
        with pytest.raises(ValueError, match=r"common-\S+: refused by the module \(on rank 1\)"):
            dgc.load_checkpoint(tmp_path, network, optimizer)
        assert torch.equal(state(), before) and optimizer.param_groups[0]["dgc_step"] == 2
        network[1].fails = False
        dgc.load_checkpoint(tmp_path, network, optimizer)
        assert torch.equal(state(), saved) and not torch.equal(saved, before)

    in_lockstep(worker, 2)


class Grown(nn.Linear):
    """With a buffer whose shape is known when it is loaded."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("seen", torch.empty(0))

    def _load_from_state_dict(self, state_dict, prefix, *others):
        self.seen = torch.empty_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *others)


def test_a_module_may_change_the_shape_of_its_buffer_and_no_other_does(tmp_path):
    def worker():
        torch.manual_seed(0)
        network = Grown(40, 40)
        network.seen = torch.arange(5.0) + current_rank()
        dgc.save_checkpoint(tmp_path, *made(network=network))
        network = Grown(40, 40)
        dgc.load_checkpoint(tmp_path, *made(network=network))
        assert torch.equal(network.seen, torch.arange(5.0) + current_rank())
        network = nn.Linear(40, 40)
        network.register_buffer("seen", torch.zeros(4))
        before = flat(network)
        with pytest.raises(ValueError, match=r"common-\S+: Error[^`]*size mismatch for seen"):
            dgc.load_checkpoint(tmp_path, *made(network=network))
        assert torch.equal(flat(network), before)

    in_lockstep(worker, 2)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda files: files["common"].unlink(), r"common-\S+ is gone, which belongs to the checkpoint"),
    (lambda files: files["rank-1"].write_bytes(b""), r"rank-1-\S+: it has 0 bytes; expected \d+"),
    (lambda files: files["rank-1"].write_bytes(files["rank-0"].read_bytes()), r"rank-1-\S+: its SHA-256 is \w+; expe"),
    (lambda files: files["manifest"].write_bytes(b"\x00"), r"manifest\.json: "),
    (lambda files: files["manifest"].write_text("{}"), r"manifest\.json: it is not the manifest of a dgc checkpoint"),
    (lambda files: edited(files, version=0), r"manifest\.json: its version is 0; accepted: 1"),
    (lambda files: edited(files, average=False), r"manifest\.json: its checksum is wrong"),
    (lambda files: edited(files, size=1), r"manifest\.json: its checksum is wrong"),
])
def test_damage_is_named(tmp_path, damage, message):
    in_lockstep(lambda: dgc.save_checkpoint(tmp_path, *made()), 2)
    files = {"manifest": tmp_path / "manifest.json",
             **{name: next(tmp_path.glob(f"{name}-*")) for name in ("common", "rank-0", "rank-1")}}
    damage(files)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(tmp_path)


def edited(files, **changed):
    files["manifest"].write_text(json.dumps({**json.loads(files["manifest"].read_text()), **changed}))


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["DGC_BOMB"],)


def test_nothing_in_a_file_is_executed(tmp_path, monkeypatch):
    """A pickle that would make a folder, with all checksums right."""
    from attack import seal
    monkeypatch.setenv("DGC_BOMB", str(tmp_path / "exploded"))
    in_lockstep(lambda: dgc.save_checkpoint(tmp_path / "a", *made()), 2)
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    contents = {name: next((tmp_path / "a").glob(f"{name}-*")).read_bytes() for name in manifest["files"]}
    for legacy in (False, True):
        torch.save({"version": 1, "name": "common", "model": Bomb()}, tmp_path / "bomb",
                   _use_new_zipfile_serialization=not legacy)
        seal(tmp_path / "a", manifest, {**contents, "common": (tmp_path / "bomb").read_bytes()})
        message = r"common-\S+: " + ("it is not a zip archive" if legacy else "Weights only load failed")
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "a")
        assert not (tmp_path / "exploded").exists()


# -- attacks -----------------------------------------------------------------------------------------------------------

def attack(tmp_path, *arguments, limit):
    """In a process of its own, whose crash would be told."""
    command = [sys.executable, str(Path(__file__).parent / "attack.py"), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    print(ended.stdout)
    return json.loads(ended.stdout)


@pytest.mark.timeout(40_000 if SOAK else 240)
def test_killed_while_it_saves(tmp_path):
    """By SIGKILL at many lines of the saving: the last checkpoint loads, and it is whole, either the old or the new."""
    places = 2_000 if SOAK else 50
    outcomes = attack(tmp_path, "kill", places, tmp_path, limit=36_000 if SOAK else 200)
    assert outcomes["old"] > places / 3 and outcomes["new"] > places / 50 and outcomes["files"] == 4


@pytest.mark.timeout(40_000 if SOAK else 240)
def test_damaged_files_give_an_error_or_the_right_value(tmp_path):
    """Bytes, records and leaves changed, also with all checksums made anew: never a crash, and nothing half loaded."""
    count = 100_000 if SOAK else 350
    outcomes = attack(tmp_path, "mutate", count, tmp_path, 0, limit=36_000 if SOAK else 200)
    kinds = {kind: sum(outcomes.get(f"{kind}: {outcome}", 0) for outcome in ("error", "right", "another value"))
             for kind in ("file", "manifest", "sealed file", "record", "leaf")}
    assert sum(kinds.values()) == count and min(kinds.values()) >= count // 7
    assert outcomes["file: error"] > 0.99 * kinds["file"] and outcomes["record: error"] > kinds["record"] / 2


def test_a_job_that_is_restarted_goes_on_from_the_last_checkpoint(tmp_path):
    """torchrun --max-restarts: a worker is killed in an exchange; nothing is lost, to the bit."""
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts",
             "1", str(Path(__file__).parent / "restart_job.py"), str(tmp_path)], stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            status = process.wait(200)
        finally:
            end(process.pid)
    assert status == 0, log.read_text()
    assert [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)] == [(1, 4, True)] * 2
