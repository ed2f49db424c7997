"""Law 5 for CUDA: each Triton kernel equals its twin in torch operations, to the bit.

With a GPU the kernels are compiled and run there; without one Triton interprets them on the CPU, and they are compiled
for a GPU all the same. The twin runs on the CPU, where torch divides by dividing.
"""

import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from laws import misleading, worlds
from pairs import DEVICE, SHAPES, Pair, gradients, targets

from dgc.compression import kernels
from dgc.compression.kernels import plain
from dgc.compression.residual import Gradient, Residual
from dgc.compression.wire import NONFINITE
from dgc.config import Config
from dgc.paths.compressed import exchange_bucket

cuda = pytest.importorskip(
    "dgc.compression.kernels.cuda", reason="triton is not installed", exc_type=ImportError
)
# NumPy's.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow) encountered:RuntimeWarning"
)


def assert_same(ours, theirs):
    for x, y in zip(ours, theirs, strict=True):
        assert x is y or torch.equal(x.cpu(), y)


@pytest.mark.parametrize(
    ("bits", "dtype", "sparsity", "nesterov"),
    [
        (16, torch.float32, 0.99, False),
        (4, torch.float64, 0.99, True),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (8, torch.float32, 0.8, True),
                (32, torch.float32, 0.99, True),
                (1, torch.float32, 0.99, False),
                (2, torch.float64, 0.8, False),
                (32, torch.float64, 0.99, False),
            )
        ),
    ],
)
def test_steps(bits, dtype, sparsity, nesterov):
    """Steps with everything in them: a parameter without momentum, one that sits out, clipping; u masked, and kept."""
    both, messages = Pair(dtype, sparsity=sparsity, bits=bits), []
    for step in range(4):
        some, scale = gradients(step, dtype, nesterov), None
        if step == 1:
            del some["b"]
            scale = torch.tensor(0.7)
        if step == 2:
            scale = {name: torch.tensor(0.1 * i) for i, name in enumerate(some)}
        messages.append(both.step(some, step, scale, masking=step != 2))
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
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda x, y, z: place(builder.grid_dim[0] - 1 - x, y, z)
    )
    both = Pair()
    messages = [both.step(gradients(step), step) for step in range(2)]
    for update, some in zip(
        both.received(messages, 2), results := targets(torch.float32), strict=True
    ):
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


@pytest.mark.parametrize(
    "bad",
    [
        float("nan"),
        *(pytest.param(bad, marks=pytest.mark.long) for bad in (float("inf"), -float("inf"))),
    ],
)
def test_what_is_not_finite_is_confessed(bad):
    both, some = Pair(), gradients(0)
    some["a"].g[20, 13] = some["e"].g[0, 0] = some["e"].g[99, 120] = bad
    message = both.step(some)
    assert both.received([both.step(gradients(1), 1), message], 2)[0].status.tolist() == [
        0,
        NONFINITE,
    ]
    assert both.buckets[0].not_finite() == []  # of the step after


def test_what_has_overflowed_in_v_is_confessed():
    both = Pair(shapes={"a": (50, 50), "b": (20, 20)})
    g = {"a": Gradient(torch.full((50, 50), 2e38)), "b": Gradient(torch.ones(20, 20))}
    for bucket in both.buckets:
        bucket.v[:7] = 3e38
    for kernel, bucket, layout in zip((cuda, plain), both.buckets, both.layouts, strict=True):
        there = {k: Gradient(x.g.to(bucket.v.device)) for k, x in g.items()}
        _, index, used = kernel.accumulate_and_select(bucket, there, None, layout, 0)
        message, taken = kernel.encode(
            bucket, layout, index, used, torch.tensor(False, device=bucket.v.device), True
        )
        assert (
            torch.equal(message, layout.rows.status_message(1, NONFINITE)) and not taken.sent.any()
        )
    assert torch.equal(both.buckets[0].v.cpu(), both.buckets[1].v)


def test_a_sum_that_overflows_is_infinite():
    shapes, messages = {"a": (9000,)}, []
    for _ in range(3):
        both, g = Pair(shapes=shapes, counts=[2], bits=32), torch.zeros(9000)
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


@pytest.mark.parametrize(
    ("n", "density", "zeros", "pattern"),
    [
        (1, 1.0, 0.0, ""),
        (9000, 0.001, 0.999, ""),
        (9000, 0.4, 0.9, ""),
        (12_000, 0.01, 0.0, "rows"),
        (12_000, 0.1, 0.5, "sorted"),
        (9000, 0.1, 0.0, "few"),
        (9000, 0.01, 0.3, "few"),
        (10_000, 0.01, 0.0, "equal"),
        (10_000, 0.9, 0.5, "equal"),
        (9000, 1.0, 0.0, ""),
        (70_000, 0.001, 0.99, ""),
    ],
)
def test_the_same_entries_whatever_the_pattern(n, density, zeros, pattern):
    """Where the sample misleads: rows of other scales, order, few different magnitudes, many zeros."""
    g = misleading(n, n, zeros, pattern)
    Pair(shapes={"a": (n,)}, counts=[max(1, int(density * n))]).step({"a": Gradient(g, 0.5)}, n)


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        ((1, 1), torch.float32),
        ((5000, 5000), torch.float64),
        ((8192, 8192), torch.float32),
        ((1, 8192), torch.float64),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ((1, 1), torch.float64),
                ((5000, 5000), torch.float32),
                ((8192, 8192), torch.float64),
                ((1, 8192), torch.float32),
            )
        ),
    ],
)
def test_a_sample_that_misleads_changes_nothing(ranks, dtype, monkeypatch):
    monkeypatch.setattr(cuda, "_ranks", lambda numel, k: ranks)
    shapes = {"a": (9000,), "b": (66_000,)}
    Pair(dtype, shapes, counts=[300, 60]).step(gradients(0, dtype, shapes=shapes))


def test_a_message_that_was_changed_is_refused():
    shapes = {"a": (30, 41), "b": (66_000,), "d": (5,)}
    both = Pair(shapes=shapes)
    message, draw = both.step(gradients(0, shapes=shapes)), torch.Generator().manual_seed(0)
    for _ in range(5):
        at, by = (
            int(torch.randint(high, (1,), generator=draw)) for high in (message.shape[1], 254)
        )
        changed = message.clone()
        changed[0, at] = (int(changed[0, at]) + 1 + by) % 256
        assert both.received([message, changed], 2)[0].status.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("sparsity", "bits"), [pytest.param(0.3, 32, marks=pytest.mark.long), (0.95, 16)]
)
def test_whole_steps_of_four_ranks(sparsity, bits, monkeypatch):
    """Also where a sum of dense tensors is cheaper, and where a rank's gradient is not finite."""
    shapes, results = {"a": (30, 41), "b": (7, 9)}, []
    for kernel, device in ((cuda, DEVICE), (plain, "cpu")):
        monkeypatch.setattr(kernels, "module_for", lambda kind, dtype, kernel=kernel: kernel)
        buckets = [
            Residual("bucket 0", {k: torch.empty(s, device=device) for k, s in shapes.items()})
            for _ in range(4)
        ]
        for step in range(3):
            some = [
                {
                    k: Gradient(g.g.to(device), 0.9)
                    for k, g in gradients(4 * step + rank, shapes=shapes).items()
                }
                for rank in range(4)
            ]
            if step == 1:
                some[1]["b"].g[3, 3] = torch.inf
            paths = [
                exchange_bucket(bucket, g, Config(sparsity, value_bits=bits), step, world)
                for bucket, g, world in zip(buckets, some, worlds(4), strict=True)
            ]
            sent = torch.stack([next(path).tensor.cpu() for path in paths])
            result = sent if sent.dtype == torch.uint8 else sent.sum(0)
            results.append(finished(paths, result.to(device), buckets))
        results.append([torch.stack([bucket.u, bucket.v]).cpu() for bucket in buckets])
    assert set(results[1]) == {"rank 1 has a gradient that is not finite, in: b"}
    for ours, theirs in zip(results[:4], results[4:], strict=True):
        assert all(
            torch.equal(x, y) if torch.is_tensor(y) else x == y
            for x, y in zip(ours, theirs, strict=True)
        )


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
    late = {
        rank: verdict
        for rank, end in ends.items()
        if isinstance(end, StopIteration)
        and (verdict := getattr(end.value, "verdict", None)) is not None
        and verdict.not_finite
    }
    # A device that runs ahead tells afterwards.
    asking = {rank: verdict.blame() for rank, verdict in late.items()}
    answers = [next(path).tensor for path in asking.values()]
    for rank, path in asking.items():
        with pytest.raises(StopIteration) as blame:
            path.send(torch.stack(answers))
        ends[rank] = late[rank].error(blame.value.value)
    return [settled(ends[rank], bucket) for rank, bucket in enumerate(buckets)]


def settled(end, bucket):
    if isinstance(end, FloatingPointError):
        return str(end)
    parts = [torch.empty(n, device=bucket.v.device) for n in bucket.numels]
    end.value.write(parts)
    return torch.cat(parts).cpu()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decay(nesterov, dtype):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100, 133, generator=generator, dtype=dtype)
    p, w = (
        [start.to(DEVICE, copy=True), start.clone()],
        [torch.zeros_like(start, device=d) for d in (DEVICE, "cpu")],
    )
    for _ in range(3):
        for i, kernel in enumerate((cuda, plain)):
            kernel.decay(p[i], w[i], 0.9, 0.01, 0.1, nesterov)
    assert torch.equal(p[0].cpu(), p[1]) and torch.equal(w[0].cpu(), w[1])


def test_a_triton_that_is_too_old_counts_as_none(monkeypatch):
    """That of torch 2.3; dgc.compression.kernels.module_for warns, and does without."""
    monkeypatch.setattr("triton.__version__", "2.3.1")
    with pytest.raises(ImportError, match=r"Triton must be 3\.0 or later, got 2\.3\.1"):
        runpy.run_path(cuda.__file__)


def test_which_is_found():
    assert (
        kernels.module_for("cuda", torch.float32) is cuda
        and kernels.module_for("cuda", torch.float64) is cuda
    )
    assert kernels.module_for("cuda", torch.bfloat16) is plain


@pytest.mark.long
def test_the_benchmark_runs(tmp_path):
    command = [
        sys.executable,
        "benchmarks/gpu.py",
        "--numel",
        "9000",
        "--warmup",
        "1",
        "--steps",
        "1",
        "--out",
        str(tmp_path / "gpu.json"),
        "--device",
        DEVICE,
        "--check-sync",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [(row["entries"], row["energy"]) for row in rows] == 3 * [(9, pytest.approx(1))]


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "kernels"), [("cuda", "17"), ("denominator_cuda", "5"), ("rows_cuda", "15")]
)
def test_kernels_compile_for_a_gpu(module, kernels, tmp_path):
    """To machine code for an H100, without one; and nothing is contracted that the twin rounds twice, or flushed."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).with_name("machine_code.py")), module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [kernels, "kernels"]


@pytest.mark.parametrize("name", ["cuda", "denominator_cuda", "rows_cuda"])
def test_no_kernel_can_be_given_a_tensor_of_the_host(name):
    """Triton's interpreter reads the host's memory, and would not notice: such a module makes tensors on its device
    alone, numbers of the host by ``tensor_of`` and ``to_device``.
    """
    tree = ast.parse(Path(cuda.__file__).with_name(f"{name}.py").read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    assert not {"tensor", "as_tensor", "from_numpy", "cpu"} & {call.func.attr for call in calls}
    made = [
        call
        for call in calls
        if call.func.attr in ("empty", "zeros", "ones", "full", "arange")
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
    ]
    assert made or name == "denominator_cuda"
    for call in made:
        device = [word.value for word in call.keywords if word.arg == "device"]
        assert len(device) == 1 and not isinstance(device[0], ast.Constant), ast.unparse(call)
