"""AdamW's denominator: the loops that follow an update equal their twin in torch operations, to the bit."""

from dataclasses import replace

import pytest
import torch
from pairs import DEVICE
from pairwise import pairwise

from dgc.compression import kernels
from dgc.compression.denominator import Denominator
from dgc.compression.kernels import denominator_plain

cpu = pytest.importorskip(
    "dgc.compression.kernels.denominator_cpu", reason="numba is not installed", exc_type=ImportError
)
cuda = pytest.importorskip(
    "dgc.compression.kernels.denominator_cuda",
    reason="triton is not installed",
    exc_type=ImportError,
)
NOW = 400


def made(n, dtype, amsgrad=False, b1=0.9, b2=0.999, device="cpu"):
    """Of n entries, which wait for up to 300 steps."""
    random = torch.Generator().manual_seed(n)
    square = torch.rand(n, generator=random, dtype=dtype)
    largest = square * torch.rand(n, generator=random, dtype=dtype).add_(1.0) if amsgrad else None
    received = NOW - torch.randint(0, 300, (n,), generator=random, dtype=torch.int32)
    of = Denominator(
        square,
        largest,
        received,
        1 / (square.sqrt() + 1e-8),
        0.4,
        b1,
        b2,
        1e-8,
        steps=100,
        rates=torch.rand(250, generator=random, dtype=dtype),
    )
    return on(of, device)


def on(of, device):
    tensors = {
        name: value.to(device, copy=True)
        for name, value in vars(of).items()
        if torch.is_tensor(value)
    }
    return replace(of, **tensors)


def update(n, density, dtype, device="cpu"):
    random = torch.Generator().manual_seed(n + 1)
    return (
        torch.randn(n, generator=random, dtype=dtype) * (torch.rand(n, generator=random) < density)
    ).to(device)


def assert_same(one, other):
    for name, value in vars(one).items():
        if torch.is_tensor(value):
            torch.testing.assert_close(value.cpu(), getattr(other, name).cpu(), rtol=0, atol=0)


@pytest.fixture
def three_threads(monkeypatch):
    monkeypatch.setattr(cpu, "CHUNK", 1 << 8)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@pairwise(
    n=[1, 63, 64, 65, 5000],
    manner=[
        (0.03, False, 0.9, 0.999),
        (0.5, True, 0.95, 0.99),
        (1.0, False, 0.0, 0.5),
        (0.0, True, 0.9, 0.0),
    ],
    dtype=[torch.float32, torch.float64],
)
def test_compiled_for_the_cpu(n, manner, dtype, three_threads):
    density, amsgrad, b1, b2 = manner
    ours, twin = (made(n, dtype, amsgrad, b1, b2) for _ in range(2))
    for step in range(3):
        x = update(n + step, density, dtype)[:n]
        for kernel, of in ((cpu, ours), (denominator_plain, twin)):
            kernel.follow(x, of, max(1, n // 50), NOW + step)
        assert_same(ours, twin)


@pytest.mark.parametrize(
    ("density", "amsgrad", "b1"), [(0.03, False, 0.9), (0.5, True, 0.95), (1.0, False, 0.0)]
)
def test_compiled_for_a_gpu(density, amsgrad, b1):
    ours, twin = (
        made(9001, torch.float32, amsgrad, b1, device=device) for device in (DEVICE, "cpu")
    )
    for step in range(3):
        x = update(9001, density, torch.float32)
        cuda.follow(x.to(DEVICE), ours, 180, NOW + step)
        denominator_plain.follow(x, twin, 180, NOW + step)
        assert_same(ours, twin)


def test_looking_entries_up_is_the_same_as_going_over_all(monkeypatch):
    """As torch operations do on a GPU."""
    some, every = (made(5000, torch.float32, True) for _ in range(2))
    x = update(5000, 0.1, torch.float32)
    denominator_plain.follow(x, some, 50, NOW)
    monkeypatch.setattr(denominator_plain, "arrivals", lambda x: (...,))
    denominator_plain.follow(x, every, 50, NOW)
    assert_same(some, every)


@pytest.mark.parametrize("kernel", [cpu, denominator_plain])
def test_what_comes_twice_in_a_step_has_waited_for_one(kernel):
    """A script may apply ``p.grad`` twice. And of NaN comes NaN, which nothing hides."""
    of = made(100, torch.float32, True)
    x = update(100, 1.0, torch.float32)
    x[7] = torch.nan
    kernel.follow(x, of, 2, NOW)
    kernel.follow(x, of, 2, NOW)
    assert of.square[7].isnan() and of.largest[7].isnan() and of.factor[7].isnan()
    assert of.square.isfinite().sum() == 99 and (of.square >= 0).sum() == 99


def test_which_kernel_is_called():
    of, x = made(64, torch.float32), update(64, 0.5, torch.float32)
    kernels.compile_ahead(torch.float32)
    assert kernels.denominators(x, of) is cpu
    assert kernels.denominators(x.bfloat16(), of) is denominator_plain
    assert kernels.denominators(x, replace(of, square=of.square.bfloat16())) is denominator_plain
    assert kernels.denominators(torch.cat([x, x])[::2], of) is denominator_plain
