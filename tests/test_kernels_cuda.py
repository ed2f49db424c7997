"""Law 5 for CUDA: each Triton kernel equals its twin in torch operations, to the bit.

With a GPU the kernels are compiled and run there; without one Triton interprets them on the CPU, and they are compiled
for a GPU all the same. The twin runs on the CPU, where torch divides by dividing.
"""

import json
import os
import runpy
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from laws import misleading, worlds
from torch.utils._python_dispatch import TorchDispatchMode

import dgc
from dgc.compression import device as devices
from dgc.compression import kernels, select
from dgc.compression.kernels import plain
from dgc.compression.residual import Bucket, Gradient
from dgc.compression.wire import Layout, seal
from dgc.config import Config
from dgc.engine.engine import engine_of
from dgc.paths.compressed import reduce

cuda = pytest.importorskip("dgc.compression.kernels.cuda", reason="triton is not installed", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # NumPy's
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"a": (30, 41), "b": (66_000,), "c": (5,), "d": (0, 3), "e": (100, 121)}


class Pair:
    """The same bucket twice: for the Triton kernels, and for their twin."""

    def __init__(self, dtype=torch.float32, shapes=SHAPES, velocity=True, sparsity=0.99, wire=torch.float16,
                 counts=None):
        self.buckets = [Bucket("bucket 0", {k: torch.empty(s, dtype=dtype, device=device) for k, s in shapes.items()},
                               velocity) for device in (DEVICE, "cpu")]
        counts = [select.count(sparsity, n) for n in self.buckets[0].numels] if counts is None else counts
        self.layouts = [Layout(bucket, counts, wire) for bucket in self.buckets]

    def step(self, gradients, step=0, scale=None, exact=False, masking=True):
        """Returns the message of either, which is the same."""
        results = []
        there = {name: Gradient(moved(g.g), g.momentum, g.nesterov) for name, g in gradients.items()}
        scales = {name: s.to(DEVICE) for name, s in scale.items()} if isinstance(scale, dict) else scale
        for kernel, bucket, layout, some, clip in zip((cuda, plain), self.buckets, self.layouts, (there, gradients),
                                                      (scales, scale), strict=True):
            bad, index, used = kernel.select(bucket, some, clip, layout, exact, step)
            chosen = index[layout.ordinal < used[layout.owner]].tolist()
            message = layout.nonfinite_message(bad) if bad else kernel.encode(bucket, layout, index, used, masking)
            results.append((chosen, used.tolist(), message.tolist(), int(bucket.entries_sent)))
        assert results[0] == results[1]
        assert self.buckets[0].not_finite() == bad
        self.agree()
        return message

    def agree(self):
        ours, theirs = self.buckets
        assert torch.equal(ours.v.cpu(), theirs.v) and (ours.u is None or torch.equal(ours.u.cpu(), theirs.u))
        torch.testing.assert_close(ours.gradient_square.cpu(), theirs.gradient_square, rtol=1e-4, atol=0)

    def received(self, messages, divisor):
        """What either makes of the messages: updates, or the error that both raise."""
        updates, errors = [], []
        for kernel, layout, device, bucket in zip((cuda, plain), self.layouts, (DEVICE, "cpu"), self.buckets,
                                                  strict=True):
            try:
                updates.append(kernel.Received(layout, torch.stack(messages).to(device), divisor))
                updates[-1].own(bucket, layout.nonfinite_message([]).to(device))  # which has nothing to be put back
                if (error := kernel.settle(bucket)) is not None:
                    raise error
            except (ValueError, FloatingPointError) as error:
                errors.append(error)
        assert not errors or [type(e) for e in errors] == 2 * [type(errors[0])]
        assert len({str(error) for error in errors}) <= 1
        return errors[0] if errors else updates


def moved(g):
    """On the device, with the same strides and as badly aligned; what lies behind it is not finite."""
    memory = torch.empty(0, dtype=g.dtype).set_(g.untyped_storage())
    memory = torch.cat([memory, torch.full((8,), torch.nan, dtype=g.dtype)]).to(DEVICE)
    return memory.as_strided(g.shape, g.stride(), g.storage_offset())


def gradients(step, dtype=torch.float32, nesterov=False, shapes=SHAPES):
    generator = torch.Generator().manual_seed(step)
    return {k: Gradient((10.0 ** (i - 4) * torch.randn(s, generator=generator) ** 3).to(dtype),
                        0.0 if k == "e" else 0.9, nesterov) for i, (k, s) in enumerate(shapes.items())}


def targets(dtype, without=None, shapes=SHAPES):
    return [[None if name == without else torch.ones(shape, dtype=dtype, device=device)
             for name, shape in shapes.items()] for device in (DEVICE, "cpu")]


def assert_same(ours, theirs):
    for x, y in zip(ours, theirs, strict=True):
        assert x is y or torch.equal(x.cpu(), y)


@pytest.mark.parametrize(("wire", "dtype", "sparsity", "nesterov"), [
    (torch.float16, torch.float32, 0.99, False), (torch.bfloat16, torch.float32, 0.8, True),
    (torch.float32, torch.float32, 0.99, True), (torch.float16, torch.float64, 0.8, False),
    (torch.bfloat16, torch.float64, 0.99, True), (torch.float32, torch.float64, 0.99, False)])
def test_steps(wire, dtype, sparsity, nesterov):
    """Steps with everything in them: a parameter without momentum, one that sits out, clipping, no masking."""
    both, messages = Pair(dtype, sparsity=sparsity, wire=wire), []
    for step in range(3):
        some, scale = gradients(step, dtype, nesterov), None
        if step == 1:
            del some["b"]
            scale = torch.tensor(0.7)
        if step == 2:
            scale = {name: torch.tensor(0.1 * i) for i, name in enumerate(some)}
        messages.append(both.step(some, step, scale, exact=step == 1, masking=step != 2))
    updates = both.received(messages, 3)
    for without in (None, "b"):
        results = targets(dtype, without)
        for update, some in zip(updates, results, strict=True):
            update.add(some, [-0.1 * i for i in range(len(SHAPES))])
        assert_same(*results)
        for update, some in zip(updates, results, strict=True):
            update.write(some)
        assert_same(*results)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU chooses the order itself")
def test_the_order_of_programs_plays_no_part(monkeypatch):
    builder = pytest.importorskip("triton.runtime.interpreter").interpreter_builder
    place = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: place(builder.grid_dim[0] - 1 - x, y, z))
    both = Pair()
    messages = [both.step(gradients(step), step) for step in range(2)]
    for (update, some) in zip(both.received(messages, 2), results := targets(torch.float32), strict=True):
        update.write(some)
    assert_same(*results)


@pytest.mark.parametrize("layout", ["channels last", "float16", "strided", "unaligned"])
def test_gradients_of_any_layout(layout):
    shapes = {"a": (8, 16, 5, 5), "b": (3, 7)}
    both, some = Pair(shapes=shapes, counts=[30, 2]), gradients(0, shapes=shapes)
    g = some["a"].g
    if layout == "channels last":
        g = g.contiguous(memory_format=torch.channels_last)
    if layout == "float16":
        g = g.half()
    if layout == "strided":
        g = g.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "unaligned":
        g = torch.cat([torch.ones(1), g.flatten()])[1:].view(g.shape)
    both.step({"a": Gradient(g, 0.9), "b": some["b"]})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("n", [9000, 9004, 9008])
def test_the_compiler_is_promised_what_is_so(n, dtype, monkeypatch):
    """Of a multiple of 4 that is none of 8, compiled code took more float16 gradients than there are."""
    promised = []
    if DEVICE == "cpu":
        def set_attr(handle, key, divisors):
            promised.append(key)
            assert (handle.data % divisors[0] == 0).all()

        interpreter = pytest.importorskip("triton.runtime.interpreter")
        monkeypatch.setattr(interpreter.TensorHandle, "set_attr", set_attr)
    shapes = {"a": (n,), "b": (32,)}
    Pair(shapes=shapes).step(gradients(0, dtype, shapes=shapes))
    assert DEVICE == "cuda" or set(promised) == ({"tt.divisibility"} if n == 9008 else set())


@pytest.mark.parametrize("velocity", [True, False])
def test_accumulate(velocity):
    both = Pair(velocity=velocity)
    for step in range(2):
        some = gradients(step)
        if step == 1:
            some["a"].g[3, 3], some["b"].g[65_999] = torch.nan, -torch.inf
        for kernel, bucket, layout in zip((cuda, plain), both.buckets, both.layouts, strict=True):
            there = {k: Gradient(g.g.to(bucket.v.device), g.momentum) for k, g in some.items()}
            bad = kernel.accumulate(bucket, there, None, layout) or bucket.not_finite()
            assert bad == (["a", "b"] if step == 1 else [])
        both.agree()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_confessed(bad):
    both, some = Pair(), gradients(0)
    some["a"].g[20, 13] = some["e"].g[0, 0] = some["e"].g[99, 120] = bad
    message = both.step(some)
    error = both.received([both.step(gradients(1), 1), message], 2)
    assert str(error) == "rank 1 has a gradient that is not finite, in: a, e"


def test_what_has_overflowed_in_v_is_confessed():
    both = Pair(shapes={"a": (50, 50), "b": (20, 20)})
    g = {"a": Gradient(torch.full((50, 50), 2e38)), "b": Gradient(torch.ones(20, 20))}
    for bucket in both.buckets:
        bucket.v[:7] = 3e38
    for kernel, bucket, layout in zip((cuda, plain), both.buckets, both.layouts, strict=True):
        there = {k: Gradient(x.g.to(bucket.v.device)) for k, x in g.items()}
        _, index, used = kernel.select(bucket, there, None, layout, False, 0)
        message = kernel.encode(bucket, layout, index, used, True).cpu()
        assert layout.sections(message).exponents.tolist() == [32767, -14]
    assert torch.equal(both.buckets[0].v.cpu(), both.buckets[1].v)


def test_a_sum_that_overflows_is_infinite():
    shapes, messages = {"a": (9000,)}, []
    for _ in range(3):
        both, g = Pair(shapes=shapes, counts=[2], wire=torch.float32), torch.zeros(9000)
        g[[3, 8999]] = torch.tensor([3e38, -2e38])
        messages.append(both.step({"a": Gradient(g)}))
    updates, results = both.received(messages, 3), targets(torch.float32, shapes=shapes)
    for update, some in zip(updates, results, strict=True):
        update.add(some, [-0.1])
    assert_same(*results)
    for update, some in zip(updates, results, strict=True):
        update.write(some)
    assert_same(*results)
    assert results[1][0][[3, 8999]].tolist() == [torch.inf, -torch.inf]


@pytest.mark.parametrize(("n", "density", "zeros", "pattern"), [
    (1, 1.0, 0.0, ""), (9000, 0.001, 0.999, ""), (9000, 0.4, 0.9, ""), (12_000, 0.01, 0.0, "rows"),
    (12_000, 0.1, 0.5, "sorted"), (9000, 0.1, 0.0, "few"), (9000, 0.01, 0.3, "few"), (10_000, 0.01, 0.0, "equal"),
    (10_000, 0.9, 0.5, "equal"), (9000, 1.0, 0.0, ""), (70_000, 0.001, 0.99, "")])
def test_the_same_entries_whatever_the_pattern(n, density, zeros, pattern):
    """Where the sample misleads: rows of other scales, order, few different magnitudes, many zeros."""
    g = misleading(n, n, zeros, pattern)
    Pair(shapes={"a": (n,)}, counts=[max(1, int(density * n))]).step({"a": Gradient(g, 0.5)}, n)


@pytest.mark.parametrize("ranks", [(1, 1), (5000, 5000), (8192, 8192), (1, 8192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_that_misleads_changes_nothing(ranks, dtype, monkeypatch):
    monkeypatch.setattr(cuda, "_ranks", lambda numel, k: ranks)
    shapes = {"a": (9000,), "b": (66_000,)}
    Pair(dtype, shapes, counts=[300, 60]).step(gradients(0, dtype, shapes=shapes))


def test_a_message_that_was_changed_is_refused():
    both = Pair(shapes={"a": (30, 41), "b": (66_000,), "d": (5,)})
    message = both.step(gradients(0, shapes={"a": (30, 41), "b": (66_000,), "d": (5,)}))
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        at, by = (int(torch.randint(high, (1,), generator=generator)) for high in (len(message), 254))
        changed = message.clone()
        changed[at] = (int(changed[at]) + 1 + by) % 256
        assert "the message of rank 1 for bucket 0 is corrupt" in str(both.received([message, changed], 2))
    layout = both.layouts[1]
    for wrong in (position_beyond, count_beyond, counts_that_cancel, layout.nonfinite_message(["b", "d"])):
        if callable(wrong):
            wrong(layout, changed := message.clone())
            wrong = seal(changed)
        error = both.received([message, wrong, message], 3)
        assert str(error).startswith(("the message of rank 1", "rank 1 has a gradient that is not finite, in: b, d"))
    with pytest.raises(ValueError, match="the message of rank 0 for bucket 0 has 7 bytes"):
        cuda.Received(both.layouts[0], message[:7].view(1, 7).to(DEVICE), 1)


def position_beyond(layout, message):
    layout.sections(message).positions[layout.starts[2]] = -1  # 65,535, of the 5 entries of d


def count_beyond(layout, message):
    layout.sections(message).counts[1] = 2**31 - 1


def counts_that_cancel(layout, message):
    layout.sections(message).counts[1:3] += torch.tensor([-2000, 2000], dtype=torch.int32)


@pytest.mark.parametrize("wrong", [position_beyond, count_beyond, counts_that_cancel, None])
def test_on_a_device_that_runs_ahead_the_next_step_raises(wrong, monkeypatch):
    """Until then the update is zero, nothing is written anywhere else, and what this rank sent goes back into v."""
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    shapes = {"a": (30, 41), "b": (66_000,), "d": (5,)}
    both = Pair(shapes=shapes)
    message, (bucket, _), (layout, twin) = both.step(gradients(0, shapes=shapes)), both.buckets, both.layouts
    bad = message.clone() if wrong else twin.nonfinite_message(["a"])
    if wrong:
        wrong(twin, bad)
        seal(bad)
    received = cuda.Received(layout, torch.stack([message, bad]).to(DEVICE), 2)
    received.own(bucket, message.to(DEVICE))
    guarded = torch.full((sum(bucket.numels) + 200,), 7.0, device=DEVICE)
    parts = list(guarded[100:-100].split(bucket.numels))
    received.add(parts, [1.0, 1.0, 1.0])
    assert (guarded == 7).all()
    received.write(parts)
    assert (guarded[100:-100] == 0).all() and (guarded[:100] == 7).all() and (guarded[-100:] == 7).all()
    before = bucket.v.clone()
    error = cuda.settle(bucket)
    assert isinstance(error, ValueError if wrong else FloatingPointError) and "rank 1" in str(error)
    index, values = layout.read(message.to(DEVICE))
    assert len(index) and torch.equal(bucket.v, before.index_add(0, index, values))
    cuda.Received(layout, torch.stack([message, message]).to(DEVICE), 2).own(bucket, message.to(DEVICE))
    assert cuda.settle(bucket) is None and torch.equal(bucket.v, before.index_add(0, index, values))


SHRINKS = dgc.warmup(1, steps_per_epoch=8, start=0.8, end=0.95, per_step=True)  # a layout of its own in each step


@pytest.mark.parametrize(("where", "sparsity"), [
    ("ab", 0.9), ("ab", SHRINKS), ("ab", 0.0), ("ab", 0.3), ("ac", 0.9), ("c", 0.9)])
def test_a_bad_gradient_fails_one_step_on_all_ranks(where, sparsity, monkeypatch):
    """Where devices run ahead: the next one, whatever a rank asks for by itself meanwhile. Nothing finite is lost of
    what is compressed, in two buckets. The dense one is delivered after the first. At 0.3 a dense sum is fewer bytes.
    """
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(kernels, "module_for", lambda kind, dtype: cuda)
    shapes = {"a": (40, 30), "c": (50,), "b": (40, 30)}

    def worker():
        rank = dgc.lockstep.current().world.rank
        weights = {name: torch.nn.Parameter(torch.zeros(shape, device=DEVICE)) for name, shape in shapes.items()}
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD(weights.values(), lr=1.0), list(weights.items()),
                                             Config(sparsity, min_numel=0), groups=[[p] for p in weights.values()])
        order = [[optimizer._parameter_names[p] for p in bucket.parameters]
                 for bucket in engine_of(optimizer).parameters.buckets]
        assert order == [["a"], ["c"], ["b"]]
        total, ends = {name: torch.zeros(shape) for name, shape in shapes.items()}, []
        for step in range(5):
            optimizer.zero_grad()
            some = {name: g.g for name, g in gradients(3 * step + rank, shapes=shapes).items()}
            if step == 1 and rank == 1:
                for name in where:
                    some[name].view(-1)[3] = torch.nan
            for name, g in some.items():
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
        sent = {name: total[name] - v.cpu() for name, v in optimizer.residual_state_dict()["v"].items()}
        return ends, {name: p.detach().cpu() for name, p in weights.items()}, sent

    ranks = dgc.lockstep.run(worker, 3)
    ends, weights, _ = ranks[0]
    assert all(others == ends for others, _, _ in ranks)
    assert [bool(end) for end in ends] == [step == 2 for step in range(5)]
    assert ends[2] == f"rank 1 has a gradient that is not finite, in: {where[0]}"
    assert all(torch.equal(p, same[name]) for _, same, _ in ranks for name, p in weights.items())
    for name in "ab":
        assert weights[name].any()
        assert torch.allclose(-weights[name], sum(sent[name] for _, _, sent in ranks) / 3, rtol=1e-4, atol=1e-5)


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
        counted = func.overloadpacket is aten.repeat_interleave and "output_size" not in (kwargs or {})
        chosen = func.overloadpacket is aten.index and any(i is not None and i.dtype == torch.bool for i in args[1])
        if counted or chosen or func.overloadpacket in OPERATIONS:
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


@pytest.mark.parametrize(("sparsity", "options"), [
    (0.99, {}), (0.99, {"clip_norm": 1.0}), (0.99, {"apply_directly": True}), (0.3, {}), (0.0, {})], ids=str)
def test_a_whole_step_asks_the_device_nothing(sparsity, options, monkeypatch):
    """Backward pass, exchange and step, of parameters that travel compressed and dense. At 0.3 a dense sum is fewer
    bytes.
    """
    unasked = Unasked()
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(kernels, "module_for", lambda kind, dtype: cuda)
    monkeypatch.setattr(devices.HostCopy, "get", unasked.hearing(devices.HostCopy.get))
    for name in METHODS:
        monkeypatch.setattr(torch.Tensor, name, unasked.refusing(name))

    def worker():
        model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 20))
        dgc.broadcast_parameters((model := model.to(DEVICE)).state_dict())
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4), model.named_parameters(),
            Config(sparsity, min_numel=100, **options))
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
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("a", weight)], Config(0.9))
        state = optimizer.state_dict(), optimizer.residual_state_dict()
        for load in (lambda: optimizer.load_residual_state_dict(state[1]), lambda: optimizer.load_state_dict(state[0])):
            weight.grad = torch.ones_like(weight)
            weight.grad[3, 3] = torch.nan if dgc.lockstep.current().world.rank == 1 else 1.0
            optimizer.step()
            load()
            assert not optimizer.residual_state_dict()["v"]["a"].any()
            with pytest.raises(FloatingPointError, match="rank 1"):
                optimizer.flush()

    dgc.lockstep.run(worker, 2)


@pytest.mark.parametrize("sparsity", [0.3, 0.95])
def test_whole_steps_of_four_ranks(sparsity, monkeypatch):
    """Also where a sum of dense tensors is cheaper, and where a rank's gradient is not finite."""
    shapes, results = {"a": (30, 41), "b": (7, 9)}, []
    for kernel, device in ((cuda, DEVICE), (plain, "cpu")):
        monkeypatch.setattr(kernels, "module_for", lambda kind, dtype, kernel=kernel: kernel)
        buckets = [Bucket("bucket 0", {k: torch.empty(s, device=device) for k, s in shapes.items()}) for _ in range(4)]
        for step in range(3):
            some = [{k: Gradient(g.g.to(device), 0.9) for k, g in gradients(4 * step + rank, shapes=shapes).items()}
                    for rank in range(4)]
            if step == 1:
                some[1]["b"].g[3, 3] = torch.inf
            paths = [reduce(bucket, g, Config(sparsity=sparsity), step, world)
                     for bucket, g, world in zip(buckets, some, worlds(4), strict=True)]
            sent = torch.stack([next(path).tensor.cpu() for path in paths])
            result = sent if sent.dtype == torch.uint8 else sent.sum(0)
            results.append(finished(paths, result.to(device), buckets))
        results.append([torch.stack([bucket.u, bucket.v]).cpu() for bucket in buckets])
    assert set(results[1]) == {"rank 1 has a gradient that is not finite, in: b"}
    for ours, theirs in zip(results[:4], results[4:], strict=True):
        assert all(torch.equal(x, y) if torch.is_tensor(y) else x == y for x, y in zip(ours, theirs, strict=True))


def finished(paths, result, buckets):
    """The updates that paths return, or the errors that they raise sooner or later."""
    ends, marks = {}, {}
    for rank, path in enumerate(paths):
        try:
            marks[rank] = path.send(result.clone()).tensor  # a sum is not finite: who is to blame?
        except (StopIteration, FloatingPointError) as end:
            ends[rank] = end
    for rank in marks:
        try:
            paths[rank].send(torch.stack(list(marks.values())))
        except FloatingPointError as error:
            ends[rank] = error
    return [settled(ends[rank], bucket) for rank, bucket in enumerate(buckets)]


def settled(end, bucket):
    if isinstance(end, FloatingPointError):
        return str(end)
    parts = [torch.empty(n, device=bucket.v.device) for n in bucket.numels]
    end.value.write(parts)
    error = cuda.settle(bucket)
    return str(error) if isinstance(error, FloatingPointError) else torch.cat(parts).cpu()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decay(nesterov, dtype):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100, 133, generator=generator, dtype=dtype)
    p, w = [start.to(DEVICE, copy=True), start.clone()], [torch.zeros_like(start, device=d) for d in (DEVICE, "cpu")]
    for _ in range(3):
        for i, kernel in enumerate((cuda, plain)):
            kernel.decay(p[i], w[i], 0.9, 0.01, 0.1, nesterov)
    assert torch.equal(p[0].cpu(), p[1]) and torch.equal(w[0].cpu(), w[1])


def test_a_triton_that_is_too_old_counts_as_none(monkeypatch):
    """That of torch 2.3; dgc.compression.kernels.module_for warns, and does without."""
    monkeypatch.setattr("triton.__version__", "2.3.1")
    with pytest.raises(ImportError, match=r"Triton is 2\.3\.1; accepted: 3\.0 or later"):
        runpy.run_path(cuda.__file__)


def test_which_is_found():
    assert kernels.module_for("cuda", torch.float32) is cuda and kernels.module_for("cuda", torch.float64) is cuda
    assert kernels.module_for("cuda", torch.bfloat16) is plain


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device: only there is a host that could wait for one")
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
            _, index, used = cuda.select(bucket, some, scale, layout, False, step)
            message = cuda.encode(bucket, layout, index, used, True)
            received = cuda.Received(layout, torch.stack([message, message]), 2)
            received.write(ours)
            received.add(ours, [0.1] * len(ours))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_benchmark_runs(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--numel", "9000", "--warmup", "1", "--steps", "1", "--out",
               str(tmp_path / "gpu.json"), "--device", DEVICE, "--check-sync"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [(row["entries"], row["energy"]) for row in rows] == 3 * [(9, pytest.approx(1))]


def test_kernels_compile_for_a_gpu(tmp_path):
    """To machine code for an H100, without one; and nothing is contracted that the twin rounds twice, or flushed."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["30", "kernels"]


COMPILE = """
import re, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dgc.compression.kernels import cuda

doors = [cuda._sample, cuda._accumulate, cuda._narrow, cuda._tally, cuda._choose, cuda._largest, cuda._write,
         cuda._sums, cuda._check, cuda._receive]
types = dict.fromkeys("histogram above crowded found larger equal flags message32 messages".split(), "*i32")
types |= dict.fromkeys("table parameters tiles state blocks index used chunks work slots sums checksum".split(),
                       "*i64")
types |= dict.fromkeys(["places", "message16"], "*i16") | {"verdict": "*i32"}
count = 0
for real, bits, wire, yes in ((tl.float32, 32, tl.float16, True), (tl.float64, 64, tl.bfloat16, True),
                              (tl.float32, 32, tl.float32, False)):
    types |= dict.fromkeys("u v scale like squares total".split(), "*fp%d" % bits) | {"marks": "*i%d" % bits}
    constants = dict(SCALED=1 + yes, VELOCITY=yes, EXACT=not yes, ROUNDS=4, SELECT=True, ROOM=64,
                     ALIGNED=True, MASKING=yes, FLAGS=yes, WIRE=wire, ADD=yes)
    for kernel in doors:
        here = {n: c for n, c in constants.items() if n in kernel.arg_names}
        signature = {n: "constexpr" if n in here else types.get(n, "i32") for n in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n in types}
        compiled = triton.compile(ASTSource(kernel, signature, here, aligned), target=GPUTarget("cuda", 90, 32),
                                  options={"enable_fp_fusion": False, "num_warps": 8})
        assert len(compiled.asm["cubin"]) > 0 and not re.search("fma.rn.f|div.full|ftz", compiled.asm["ptx"]), kernel
        if kernel is cuda._accumulate:  # 16 bytes at once
            assert re.search(r"ld.global[.\\w]*v[24]", compiled.asm["ptx"])
        count += 1
print(count, "kernels")
"""
