"""Law 5: each fused kernel equals its twin in torch operations, to the bit."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import misleading
from pairwise import pairwise

from dgc.compression import kernels, select
from dgc.compression.kernels import plain
from dgc.compression.residual import Gradient, Residual
from dgc.compression.wire import NONFINITE, Layout

cpu = pytest.importorskip(
    "dgc.compression.kernels.cpu", reason="numba is not installed", exc_type=ImportError
)
SHAPES = {"a": (300, 401), "b": (70_000,), "c": (512, 512), "d": (5,), "e": (0, 3), "f": (40, 41)}
BITS = [1, 2, 4, 8, 16, 32]


@pytest.fixture
def two_threads(monkeypatch):
    """As on a machine with several cores, and for small tensors too."""
    monkeypatch.setattr(cpu, "CHUNK", 1 << 14)
    monkeypatch.setattr(cpu, "SLOTS_PER_THREAD", 1 << 6)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


def pair(dtype=torch.float32, velocity=True, shapes=SHAPES):
    return [
        Residual("bucket 0", {k: torch.empty(s, dtype=dtype) for k, s in shapes.items()}, velocity)
        for _ in range(2)
    ]


def gradients(step, dtype=torch.float32, nesterov=False, shapes=SHAPES):
    generator = torch.Generator().manual_seed(step)
    return {
        k: Gradient(
            (10.0 ** (i - 4) * torch.randn(s, generator=generator) ** 3).to(dtype),
            0.0 if k == "b" else 0.9,
            nesterov,
        )
        for i, (k, s) in enumerate(shapes.items())
    }


def agree(a, b):
    assert torch.equal(a.v, b.v) and (a.u is None or torch.equal(a.u, b.u))


def both(buckets, layout, **arguments):
    """A step of either: what was chosen, what was taken, and the messages. Returns the message."""
    messages, chosen, no = [], [], torch.tensor(False)
    for kernel, bucket in zip((cpu, plain), buckets, strict=True):
        masking = arguments.get("masking", True)
        bad, index, used = kernel.accumulate_and_select(
            bucket, arguments["gradients"], arguments.get("scale"), layout, arguments["step"]
        )
        before = bucket.v.clone()
        message, taken = kernel.encode(bucket, layout, index, used, no, masking)
        assert torch.equal(bucket.v, before.index_add(0, taken.places, -taken.sent))
        flat = torch.zeros_like(bucket.v).index_add_(0, taken.places, taken.sent)
        chosen.append((bad, index[layout.uses(used)], used, flat))
        messages.append(message)
    (bad, *tensors), (other, *others) = chosen
    assert bad == other
    assert all(map(torch.equal, tensors, others))
    assert torch.equal(*messages)
    agree(*buckets)
    assert buckets[0].entries_sent == buckets[1].entries_sent
    return messages[0]


@pairwise(
    bits=BITS,
    dtype=[torch.float32, torch.float64],
    sparsity=[0.5, 0.99, 0.999],
    nesterov=[False, True],
)
@pytest.mark.usefixtures("two_threads")
def test_steps(bits, dtype, sparsity, nesterov):
    """Steps with everything in them: a parameter without momentum, one that sits out, clipping; u masked, and kept."""
    buckets = pair(dtype)
    layout = Layout(buckets[0], [select.count(sparsity, n) for n in buckets[0].numels], bits)
    for step in range(7):
        some = gradients(step, dtype, nesterov)
        scale = None
        if step == 2:
            del some["c"]
        if step == 3:
            scale = torch.tensor(0.7)
        if step == 4:
            scale = {name: torch.tensor(0.1 * i) for i, name in enumerate(some)}
        message = both(buckets, layout, gradients=some, scale=scale, step=step, masking=step != 5)
        received = [
            kernel.Received(layout, layout.rows, message.expand(3, -1), 3)
            for kernel in (cpu, plain)
        ]
        assert not any(update.status.any() for update in received)
        for wanted in (None, "c"):
            ours, theirs = (
                [None if n == wanted else torch.ones(s, dtype=dtype) for n, s in SHAPES.items()]
                for _ in range(2)
            )
            for update, targets in zip(received, (ours, theirs), strict=True):
                update.add(targets, [-0.1 * i for i in range(len(SHAPES))])
            assert all(x is y or torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
            for update, targets in zip(received, (ours, theirs), strict=True):
                update.write(targets)
            assert all(x is y or torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("layout", ["channels last", "float16", "strided"])
def test_gradients_of_any_layout(layout):
    shapes = {"a": (8, 16, 5, 5)}
    buckets = pair(shapes=shapes)
    g = gradients(0, shapes=shapes)["a"].g
    if layout == "channels last":
        g = g.contiguous(memory_format=torch.channels_last)
    if layout == "float16":
        g = g.half()
    if layout == "strided":
        g = g.transpose(0, 1).contiguous().transpose(0, 1)
    both(buckets, Layout(buckets[0], [30], 16), gradients={"a": Gradient(g, 0.9)}, step=0)


def test_gradients_that_lie_as_their_parameters_do_are_not_copied():
    weight = torch.empty(8, 16, 5, 5).contiguous(memory_format=torch.channels_last)
    bucket, g = Residual("bucket 0", {"a": weight}), torch.zeros_like(weight)
    assert cpu._Gradients(bucket, {"a": Gradient(g)}, None).addresses.tolist() == [g.data_ptr()]


@pytest.mark.parametrize("velocity", [True, False])
def test_accumulate(velocity):
    buckets = pair(velocity=velocity)
    layout = Layout(buckets[0], buckets[0].numels, 32)
    for step in range(3):
        for kernel, bucket in zip((cpu, plain), buckets, strict=True):
            assert kernel.accumulate(bucket, gradients(step), None, layout) == []
        agree(*buckets)
        norm = sum(g.g.double().norm() ** 2 for g in gradients(step).values())
        assert all(
            float(bucket.gradient_square) == pytest.approx(float(norm), rel=1e-4)
            for bucket in buckets
        )


@pytest.mark.parametrize("entries", [1, 300, 40_000])
def test_what_overflowed_to_no_number_is_chosen_within_bounds(entries):
    """Sums can: infinity less infinity. Comparisons with it are all false, which must not lead outside of v."""
    bucket, _ = pair(shapes={"a": (200, 200)})
    bucket.v.normal_(generator=torch.Generator().manual_seed(0))[:entries] = float("nan")
    layout = Layout(bucket, [500], 16)
    zeros = {"a": Gradient(torch.zeros(200, 200), 0.0)}
    _, index, used = cpu.accumulate_and_select(bucket, zeros, None, layout, 0)
    chosen = index[: int(used[0])]
    assert len(chosen) == 500 and chosen.diff().gt(0).all()
    assert chosen[0] >= 0 and chosen[-1] < bucket.numel


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_counts_as_zero(bad):
    buckets = pair()
    layout = Layout(buckets[0], [1] * len(SHAPES), 16)
    for step in range(2):
        some = gradients(step)
        some["a"].g[200, 13] = some["a"].g[299, 400] = some["f"].g[0, 0] = bad
        for kernel, bucket in zip((cpu, plain), buckets, strict=True):
            assert kernel.accumulate(bucket, some, None, layout) == ["a", "f"]
        agree(*buckets)
        assert torch.isfinite(buckets[0].v).all() and buckets[0].v.count_nonzero() > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_residual_that_overflowed_is_told_and_kept(bad, at):
    """And all others, as nothing is sent."""
    buckets, messages = pair(shapes={"a": (4, 5), "b": (3, 3)}), []
    layout = Layout(buckets[0], [3, 2], 16)
    for kernel, bucket in zip((cpu, plain), buckets, strict=True):
        bucket.v[:] = 1
        bucket.v[at] = bad
        before = bucket.v.clone()
        message, taken = kernel.encode(
            bucket,
            layout,
            torch.tensor([1, 2, 3, 20, 21]),
            torch.tensor([3, 2]),
            torch.tensor(False),
            True,
        )
        messages.append(message)
        assert kernel.Received(layout, layout.rows, message, 1).status.tolist() == [NONFINITE]
        assert (
            torch.equal(bucket.v.nan_to_num(7.0), before.nan_to_num(7.0)) and not taken.sent.any()
        )
    assert torch.equal(*messages)


@pytest.mark.parametrize("bits", BITS)
def test_a_gradient_that_is_refused_is_told_and_nothing_is_taken(bits):
    buckets, messages = pair(), []
    layout = Layout(buckets[0], [select.count(0.99, n) for n in buckets[0].numels], bits)
    for kernel, bucket in zip((cpu, plain), buckets, strict=True):
        _, index, used = kernel.accumulate_and_select(bucket, gradients(0), None, layout, 0)
        u, v = bucket.u.clone(), bucket.v.clone()
        message, taken = kernel.encode(bucket, layout, index, used, torch.tensor(True), True)
        assert torch.equal(bucket.u, u) and torch.equal(bucket.v, v) and not taken.sent.any()
        assert int(bucket.entries_sent) == 0
        messages.append(message)
    assert torch.equal(*messages) and torch.equal(
        messages[0], layout.rows.status_message(1, NONFINITE)
    )


def test_large_gradients_whose_squares_overflow():
    buckets = pair(shapes={"a": (50, 50)})
    layout = Layout(buckets[0], [10], 16)
    both(buckets, layout, gradients={"a": Gradient(torch.full((50, 50), 1e38).triu(), 0.0)}, step=0)


@settings(deadline=None, max_examples=80)
@given(
    n=st.integers(1, 40_000),
    density=st.sampled_from([0.001, 0.01, 0.1, 0.4, 1.0]),
    step=st.integers(0, 10**6),
    zeros=st.sampled_from([0.0, 0.5, 0.999]),
    pattern=st.sampled_from(["", "rows", "sorted", "few", "equal"]),
)
def test_the_same_entries_whatever_the_pattern(n, density, step, zeros, pattern):
    """Where the sample misleads: rows of other scales, order, few different magnitudes, many zeros."""
    g = misleading(n, step % 100, zeros, pattern)
    k = max(1, int(density * n))
    buckets = pair(shapes={"a": (n,)})
    layout = Layout(buckets[0], [k], 32)
    for kernel, bucket in zip((cpu, plain), buckets, strict=True):
        _, index, used = kernel.accumulate_and_select(
            bucket, {"a": Gradient(g, 0.5)}, None, layout, step
        )
        chosen = index[: int(used)]
        assert torch.equal(chosen, chosen.unique()) and int(used) == min(k, int(g.count_nonzero()))
        assert torch.equal(g[chosen].abs().sort().values, g.abs().sort().values[n - int(used) :])


@pytest.mark.parametrize("bits", BITS)
def test_rows_that_tell_of_errors_add_nothing(bits):
    """A damaged one, and one of a gradient that is not finite; the others are read alike."""
    buckets = pair()
    layout = Layout(buckets[0], [select.count(0.99, n) for n in buckets[0].numels], bits)
    message = both(buckets, layout, gradients=gradients(0), step=0)
    damaged = message.clone()
    damaged[0, 100] ^= 4
    rows, results = (
        torch.cat([message, damaged, layout.rows.status_message(1, NONFINITE), message]),
        [],
    )
    for kernel in (cpu, plain):
        received = kernel.Received(layout, layout.rows, rows, 2)
        assert received.status.tolist() == [0, 2, NONFINITE, 0]
        results.append([torch.full(shape, 7.0) for shape in SHAPES.values()])
        received.write(results[-1])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    expected = [torch.zeros(shape) for shape in SHAPES.values()]
    plain.Received(layout, layout.rows, message, 1).write(expected)
    assert all(torch.equal(x, y) for x, y in zip(results[0], expected, strict=True))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("two_threads")
def test_decay(nesterov, dtype):
    """And both are torch.optim.SGD on a gradient of zero."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(100, 333, generator=generator, dtype=dtype)
    parameter = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
    p, w = [start.clone(), start.clone()], [torch.zeros_like(start), torch.zeros_like(start)]
    for _ in range(5):
        parameter.grad = torch.zeros_like(start)
        sgd.step()
        for i, kernel in enumerate((cpu, plain)):
            kernel.decay(p[i], w[i], 0.9, 0.01, 0.1, nesterov)
    assert torch.equal(*p) and torch.equal(*w)
    assert torch.allclose(p[0], parameter.detach(), rtol=1e-5)


def test_which_is_found():
    assert (
        kernels.module_for("cpu", torch.float32) is cpu
        and kernels.module_for("cpu", torch.float64) is cpu
    )
    assert (
        kernels.module_for("cpu", torch.bfloat16) is plain
        and kernels.module_for("xpu", torch.float32) is plain
    )


BROKEN = """
import gc
import os
import sys
import torch  # once for all: what is told is told by a process that is forked for it

gc.freeze()
for folder, disabled in zip(sys.argv[1:], "001", strict=True):
    child = os.fork()
    if child == 0:
        sys.path.insert(0, folder)
        os.environ["NUMBA_DISABLE_JIT"] = disabled
        from dgc.compression.kernels import module_for
        print(*(module_for("cpu", torch.float32).__name__ for _ in range(2)), flush=True)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
"""


def test_a_compiler_that_does_not_work_is_told(tmp_path):
    """A numba that refuses the NumPy beside it, say: a warning, and the torch operations."""
    cases = {
        "raise ImportError('Numba needs NumPy 1.0 or less')": "Numba needs NumPy 1.0 or less",
        "raise OSError('Could not find/load libllvmlite.so')": "Could not find/load libllvmlite.so",
        None: "NUMBA_DISABLE_JIT is set, and these loops run compiled only",
    }
    folders = [tmp_path / str(i) for i in range(3)]
    for folder, module in zip(folders, cases, strict=True):
        folder.mkdir()
        if module:
            (folder / "numba.py").write_text(module)
    process = subprocess.run(
        [sys.executable, "-c", BROKEN, *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout.split() == ["dgc.compression.kernels.plain"] * 6
    for told in cases.values():
        assert process.stderr.count(f"numba is installed but does not work ({told})") == 1


def test_a_triton_that_cannot_compile_is_told():
    """As without a C compiler; here it finds no driver."""
    code = (
        "import torch; torch.cuda.is_available = lambda: True; from dgc.compression.kernels import module_for; "
        "print(module_for('cuda', torch.float32).__name__)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        pytest.skip("it needs Triton, and no GPU")
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment,
    )
    assert process.stdout.split() == ["dgc.compression.kernels.plain"]
    assert "triton is installed but does not work" in process.stderr
