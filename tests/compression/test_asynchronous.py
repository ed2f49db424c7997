"""A device that runs asynchronously: nothing asks it within a step, and what it finds is told a step later."""

import threading
from contextlib import nullcontext

import pytest
import torch
from laws import performed, worlds
from pairs import DEVICE, Pair, gradients, targets
from torch.utils._python_dispatch import TorchDispatchMode

import dgc
from dgc.compression import device as devices
from dgc.compression import kernels
from dgc.compression.kernels import owners_plain, plain
from dgc.compression.residual import Gradient, Residual
from dgc.config import Config
from dgc.engine import exchange, parameters
from dgc.engine import step as steps
from dgc.engine.engine import engine_of
from dgc.paths.compressed import exchange_bucket

cuda = pytest.importorskip(
    "dgc.compression.kernels.cuda", reason="triton is not installed", exc_type=ImportError
)
# NumPy's.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow) encountered:RuntimeWarning"
)


@pytest.mark.parametrize(
    ("wrong", "exchange"),
    [
        ("damaged", "allgather"),
        pytest.param("not finite", "reduce", marks=pytest.mark.long),
        pytest.param("damaged", "reduce", marks=pytest.mark.long),
        pytest.param("not finite", "allgather", marks=pytest.mark.long),
    ],
)
def test_on_a_device_that_runs_ahead_an_update_is_zero_if_a_message_is_bad(
    exchange, wrong, monkeypatch
):
    """The verdict comes with it; and all that was taken out of v, or added to it, is undone."""
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(kernels, "module_for", lambda kind, dtype: cuda)
    shapes = {"a": (30, 41), "b": (60, 1100), "d": (5, 1)}
    mine = [
        Residual("bucket 0", {k: torch.empty(s, device=DEVICE) for k, s in shapes.items()})
        for _ in range(3)
    ]
    given = [
        {k: Gradient(g.g.to(DEVICE), 0.9) for k, g in gradients(r, shapes=shapes).items()}
        for r in range(3)
    ]
    if wrong == "not finite":
        given[1]["b"].g[7, 7] = torch.nan
    paths = [
        exchange_bucket(b, g, Config(0.99, exchange=exchange), 0, w)
        for b, g, w in zip(mine, given, worlds(3), strict=True)
    ]
    requests, ends = [next(path) for path in paths], []
    while not ends:
        results, requests = performed(requests), []
        if wrong == "damaged":
            for result in results:
                result[1, 9] ^= 64
        for path, result in zip(paths, results, strict=True):
            try:
                requests.append(path.send(result))
            except StopIteration as end:
                ends.append(end.value)
    for end, bucket, own in zip(ends, mine, given, strict=True):
        assert not any(part.any() for part in end.parts)
        assert end.verdict.not_finite == (wrong == "not finite")
        damaged = end.verdict.damaged
        assert damaged is None if wrong == "not finite" else "rank 1" in str(damaged)
        expected = torch.cat([own[k].g.nan_to_num(0).flatten() for k in shapes])
        assert torch.allclose(bucket.v, expected, rtol=1e-5, atol=1e-7)


ROUNDED = {"value_bits": 8}
# A layout of its own in each step.
SHRINKS = dgc.warmup(1, steps_per_epoch=8, start=0.8, end=0.95, per_step=True)


@pytest.mark.parametrize(
    ("where", "sparsity", "options"),
    [
        ("ab", 0.9, {}),
        ("ab", 0.0, {}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("c", 0.3, ROUNDED),
                ("ab", 0.3, ROUNDED),
                ("c", 0.9, ROUNDED),
                ("ab", 0.0, ROUNDED),
                ("ab", SHRINKS, {}),
                ("ab", 0.1, {}),
                ("ac", 0.9, {}),
                ("c", 0.9, {}),
                ("ac", 0.9, ROUNDED),
            )
        ),
    ],
)
def test_a_bad_gradient_fails_one_step_on_all_ranks(where, sparsity, options, monkeypatch):
    """Where devices run ahead: the next one, whatever a rank asks for by itself meanwhile. Nothing finite is lost of
    what is compressed, in two buckets. The dense one is delivered after the first. At 0.1 and 0.3 a dense sum is fewer
    bytes. At 0 steps are stock's, and nothing is rounded: that step itself fails, and its gradients are dropped.
    """
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(kernels, "module_for", lambda kind, dtype: cuda)
    shapes = {"a": (40, 30), "c": (50,), "b": (40, 30)}

    def worker():
        rank = dgc.lockstep.current().world.rank
        weights = {
            name: torch.nn.Parameter(torch.zeros(shape, device=DEVICE))
            for name, shape in shapes.items()
        }
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(weights.values(), lr=1.0),
            list(weights.items()),
            Config(sparsity, min_numel=0, **options),
            groups=[[p] for p in weights.values()],
        )
        order = [
            [optimizer._parameter_names[p] for p in bucket.parameters]
            for bucket in engine_of(optimizer)._parameters.buckets
        ]
        assert order == [["a"], ["c"], ["b"]]
        total, ends = {name: torch.zeros(shape) for name, shape in shapes.items()}, []
        for step in range(4):
            optimizer.zero_grad()
            some = {name: g.g for name, g in gradients(3 * step + rank, shapes=shapes).items()}
            if step == 1 and rank == 1:
                for name in where:
                    some[name].view(-1)[3] = torch.nan
            for name, g in some.items():
                if sparsity != 0.0 or step != 1:
                    total[name] += torch.where(g.isfinite(), g, 0)
            ends.append("")
            try:
                sum((p * some[name].to(DEVICE)).sum() for name, p in weights.items()).backward()
                optimizer.step()
            except FloatingPointError as error:
                ends[-1] = str(error)
            if rank == 0:
                optimizer.report()
                optimizer.residual_state_dict()
        sent = {
            name: total[name] - v.cpu() for name, v in optimizer.residual_state_dict()["v"].items()
        }
        return ends, {name: p.detach().cpu() for name, p in weights.items()}, sent

    ranks = dgc.lockstep.run(worker, 3)
    ends, weights, _ = ranks[0]
    assert all(others == ends for others, _, _ in ranks)
    failed = 1 if sparsity == 0.0 else 2
    assert [bool(end) for end in ends] == [step == failed for step in range(4)]
    assert ends[failed] == f"rank 1 has a gradient that is not finite, in: {where[0]}"
    assert all(torch.equal(p, same[name]) for _, same, _ in ranks for name, p in weights.items())
    for name in "ab":
        assert weights[name].any()
        assert torch.allclose(
            -weights[name], sum(sent[name] for _, _, sent in ranks) / 3, rtol=1e-4, atol=1e-5
        )


def owned(steps):
    """A training whose sums have owners: what each step raised, the weight, and what was sent of all gradients."""
    rank, total, ends = dgc.lockstep.current().world.rank, torch.zeros(40, 30), []
    weight = torch.nn.Parameter(torch.zeros(40, 30, device=DEVICE))
    optimizer = dgc.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("a", weight)], Config(0.9, exchange="reduce")
    )
    for step in range(steps):
        g = gradients(3 * step + rank, shapes={"a": (40, 30)})["a"].g
        total += g
        ends.append("")
        try:
            weight.grad = g.to(DEVICE)
            optimizer.step()
        except ValueError as error:
            ends[-1] = str(error)
    return ends, weight.detach().cpu(), total - optimizer.residual_state_dict()["v"]["a"].cpu()


@pytest.mark.parametrize("phase", ["to owners", "to all"])
def test_a_corrupt_row_is_told_as_corrupt(phase, monkeypatch):
    """Where devices run ahead, in the next step, on all ranks; also where one owner alone has received it. Nothing is
    lost.
    """
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(kernels, "module_for", lambda kind, dtype: cuda)
    turns, add, received = [0, 0, 0], owners_plain.add, cuda.Received

    def damaged(messages, sender, turn):
        messages = messages.clone()
        messages[sender, 5] ^= 64 if turn == 1 else 0
        return messages

    def adding(bucket, plan, rows):
        turns[plan.own] += 1
        return add(
            bucket,
            plan,
            damaged(rows, 1, turns[plan.own] - 1 if phase == "to owners" and plan.own == 2 else 0),
        )

    def receiving(layout, rows, messages, divisor, regions):
        turn = turns[dgc.lockstep.current().world.rank] - 1
        return received(
            layout, rows, damaged(messages, 1, turn if phase == "to all" else 0), divisor, regions
        )

    monkeypatch.setattr(owners_plain, "add", adding)
    monkeypatch.setattr(cuda, "Received", receiving)

    ranks = dgc.lockstep.run(lambda: owned(4), 3)
    for ends, weight, _ in ranks:
        assert [bool(end) for end in ends] == [False, False, True, False] and ends == ranks[0][0]
        assert ends[2].startswith("the message of rank 1 for ") and "is corrupt" in ends[2]
        assert weight.any() and torch.allclose(
            -weight, sum(sent for _, _, sent in ranks) / 3, rtol=1e-4, atol=1e-5
        )


aten = torch.ops.aten
OPERATIONS = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select}
METHODS = "item", "tolist", "__bool__", "__int__", "__float__", "__index__"


class Unasked(TorchDispatchMode):
    """Within it, what would wait for the device raises, also where that is a CPU that stands for one."""

    def __init__(self):
        super().__init__()
        self.on, self.heard = threading.local(), set()

    def __enter__(self):
        self.on.here = True
        return super().__enter__()

    def __exit__(self, *error):
        self.on.here = False
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        counted = func.overloadpacket is aten.repeat_interleave and "output_size" not in (
            kwargs or {}
        )
        chosen = func.overloadpacket is aten.index and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        looks = func.overloadpacket is aten.segment_reduce and not (kwargs or {}).get("unsafe")
        if counted or chosen or looks or func.overloadpacket in OPERATIONS:
            self.refuse(func, args[0])
        return func(*args, **(kwargs or {}))

    def refuse(self, what, tensor):
        if tensor.untyped_storage().data_ptr() not in self.heard:
            raise AssertionError(f"{what} waits for the device")

    def refusing(self, name):
        method = getattr(torch.Tensor, name)

        def call(tensor):
            if getattr(self.on, "here", False):
                self.refuse(name, tensor)
            return method(tensor)

        return call

    def hearing(self, get):
        def heard(answer):
            self.heard.add((tensor := get(answer)).untyped_storage().data_ptr())
            return tensor

        return heard


@pytest.mark.parametrize(
    ("sparsity", "options"),
    [
        (0.99, {"clip_norm": 1.0}),
        (0.9, {"exchange": "reduce"}),
        (0.0, {}),
        (0.3, ROUNDED),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((0.99, {}), (SHRINKS, {"exchange": "reduce"}), (0.1, {}))
        ),
    ],
    ids=str,
)
def test_a_whole_step_asks_the_device_nothing(sparsity, options, monkeypatch):
    """Backward pass, exchange and step, of parameters that travel compressed and dense. At 0.1 and 0.3 a dense sum is
    fewer bytes.
    """
    unasked = Unasked()
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(kernels, "module_for", lambda kind, dtype: cuda)
    monkeypatch.setattr(devices.HostCopy, "get", unasked.hearing(devices.HostCopy.get))
    for name in METHODS:
        monkeypatch.setattr(torch.Tensor, name, unasked.refusing(name))

    def worker():
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 20)
        )
        dgc.broadcast_parameters((model := model.to(DEVICE)).state_dict())
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4),
            model.named_parameters(),
            Config(sparsity, min_numel=100, **options),
        )
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 20, device=DEVICE)).square().mean()
            if last := step == 2:  # the others have ended the first one, which makes tables
                waiting_is("error")
            with unasked if last else nullcontext():
                loss.backward()
                optimizer.step()

    try:
        dgc.lockstep.run(worker, 3)
    finally:
        waiting_is("default")


def waiting_is(mode):
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def test_what_is_put_back_belongs_to_the_residual_that_it_was_taken_from(monkeypatch):
    """And not to another one, which is loaded before that is known."""
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(kernels, "module_for", lambda kind, dtype: cuda)

    def worker():
        weight = torch.nn.Parameter(torch.zeros(40, 30, device=DEVICE))
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), [("a", weight)], Config(0.9)
        )
        state = optimizer.state_dict(), optimizer.residual_state_dict()
        for load in (
            lambda: optimizer.load_residual_state_dict(state[1]),
            lambda: optimizer.load_state_dict(state[0]),
        ):
            weight.grad = torch.ones_like(weight)
            weight.grad[3, 3] = torch.nan if dgc.lockstep.current().world.rank == 1 else 1.0
            optimizer.step()
            load()
            assert not optimizer.residual_state_dict()["v"]["a"].any()
            with pytest.raises(FloatingPointError, match="rank 1"):
                optimizer.flush()

    dgc.lockstep.run(worker, 2)


def test_an_elastic_restore_undoes_the_step_with_what_it_would_tell(monkeypatch):
    """A rank that has joined since would not raise it, and go on alone."""
    pytest.importorskip("horovod.torch")
    from dgc.elastic import _Handler

    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(kernels, "module_for", lambda kind, dtype: cuda)

    def worker():
        weight = torch.nn.Parameter(torch.zeros(40, 30, device=DEVICE))
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), [("a", weight)], Config(0.9)
        )
        state = _Handler(optimizer)
        weight.grad = torch.ones_like(weight)
        weight.grad[3, 3] = torch.nan if dgc.lockstep.current().world.rank == 1 else 1.0
        optimizer.step()
        state.restore()
        assert not optimizer.residual_state_dict()["v"]["a"].any()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.flush()
        return weight.detach()

    assert all(
        torch.equal(weight, torch.full_like(weight, -1.0)) for weight in dgc.lockstep.run(worker, 2)
    )


@pytest.mark.skipif(
    DEVICE == "cpu", reason="needs a CUDA device: only there is a host that could wait for one"
)
def test_a_step_asks_the_device_nothing():
    both = Pair()
    bucket, layout = both.buckets[0], both.layouts[0]
    some = {k: Gradient(g.g.to(DEVICE), g.momentum) for k, g in gradients(0).items()}
    scale, ours = torch.tensor(0.5, device=DEVICE), targets(torch.float32)[0]
    for step in range(3):
        torch.cuda.synchronize()
        if step:  # the first one makes the layout's tables
            torch.cuda.set_sync_debug_mode("error")
        try:
            _, index, used = cuda.accumulate_and_select(bucket, some, scale, layout, step)
            message, _ = cuda.encode(bucket, layout, index, used, bucket.marked.any(), step != 1)
            received = cuda.Received(layout, layout.rows, torch.cat([message, message]), 2)
            received.write(ours)
            received.add(ours, [0.1] * len(ours))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"exchange": "reduce"}, {"sparsity": 0.3, **ROUNDED}])
def test_without_triton_a_bad_gradient_is_told_at_once(options, monkeypatch):
    """There torch operations compress on a GPU, and they have no flags."""
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(kernels, "module_for", lambda kind, dtype: plain)

    def worker():
        weight, ends = torch.nn.Parameter(torch.zeros(40, 30, device=DEVICE)), []
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            [("a", weight)],
            Config(**{"sparsity": 0.9, "min_numel": 0, **options}),
        )
        for step in range(4):
            g = gradients(3 * step + dgc.lockstep.current().world.rank, shapes={"a": (40, 30)})[
                "a"
            ].g
            if step == 2 and dgc.lockstep.current().world.rank == 1:
                g[3, 3] = float("nan")
            weight.grad = g.to(DEVICE)
            try:
                optimizer.step()
                ends.append("")
            except FloatingPointError as error:
                ends.append(str(error))
        return ends, weight.detach().cpu()

    ranks = dgc.lockstep.run(worker, 3)
    for ends, weight in ranks:
        assert ends == ["", "", "rank 1 has a gradient that is not finite, in: a", ""]
        assert weight.isfinite().all() and torch.equal(weight, ranks[0][1])


def test_owners_lose_nothing_where_the_update_cannot_be_written(monkeypatch):
    """Where devices run ahead it is written before it is known to be good, and memory may not do."""
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(kernels, "module_for", lambda kind, dtype: cuda)
    write, turns = cuda.Received.write, []

    def full(self, targets):
        turns.append(self)
        if 3 < len(turns) <= 6:  # in the second step of three ranks
            raise ValueError("no room")
        write(self, targets)

    monkeypatch.setattr(cuda.Received, "write", full)

    ranks = dgc.lockstep.run(lambda: owned(3), 3)
    for ends, weight, _ in ranks:
        assert ends == ["", "no room", ""]
        assert weight.any() and torch.allclose(
            -weight, sum(sent for _, _, sent in ranks) / 3, rtol=1e-4, atol=1e-5
        )


def test_a_step_that_is_being_captured_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    devices.refuse_capture(torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"must be outside of torch\.cuda\.graph\(\)"):
        devices.refuse_capture(torch.device("cuda"))


@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 1.0}, {"clip_norm": 1.0, "hierarchical": True}, {"nonfinite": "skip"}],
    ids=str,
)
def test_gradients_of_several_streams_are_waited_for_before_they_are_looked_at(
    options, monkeypatch
):
    """And no exchange begins within a graph. On a GPU; here that both are asked for, in backward passes and steps."""
    arrive, asked = steps.Step.record_gradient, []

    def arriving(self, *given):
        self.streams |= {0, 1}
        return arrive(self, *given)

    monkeypatch.setattr(steps.Step, "record_gradient", arriving)
    monkeypatch.setattr(steps, "join_streams", lambda streams: asked.append("joined"))
    for module in (exchange, parameters):
        monkeypatch.setattr(
            module, "refuse_capture", lambda device, name=module.__name__: asked.append(name)
        )

    def worker():
        weights = [torch.nn.Parameter(torch.ones(40, 30)) for _ in range(2)]
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(weights, lr=1.0),
            None,
            Config(0.9, **options),
            groups=[[p] for p in weights],
        )
        sum(p.square().sum() for p in weights).backward()
        optimizer.step()

    dgc.lockstep.run(worker, 4, 2)
    # Each at all gradients together.
    looks = (
        "hierarchical" in options,
        "clip_norm" in options,
        "nonfinite" in options,
    )
    assert asked.count("joined") == 4 * (2 + sum(looks))
    assert asked.count(parameters.__name__) == asked.count(exchange.__name__) == 4
