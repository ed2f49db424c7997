from fractions import Fraction
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.compression import select


def heavy_tailed(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * torch.exp(2 * torch.randn(n, generator=generator))


@pytest.mark.parametrize(
    ("sparsity", "n", "k"),
    [
        (0.99, 13_500, 135),
        (0.999, 1000, 1),
        (0.999, 1001, 2),
        (0.75, 4, 1),
        (0.999, 25_557_032, 25_558),
        (0.9, 1, 1),
        (0.0, 7, 7),
        (0.99, 0, 0),
    ],
)
def test_k(sparsity, n, k):
    assert select.count(sparsity, n) == k


@given(share=st.integers(0, 9999), n=st.integers(1, 2**31 - 1))
def test_k_is_the_ceiling_of_the_decimal_product(share, n):
    """Against exact rational arithmetic on the sparsity as it was written, with four decimals."""
    assert select.count(share / 10_000, n) == ceil(Fraction(10_000 - share, 10_000) * n)


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 60_000),
    sparsity=st.sampled_from([0.5, 0.75, 0.9, 0.99]),
    step=st.integers(0, 10**6),
    seed=st.integers(0, 99),
    zeros=st.sampled_from([0.0, 0.5, 0.995]),
    pattern=st.sampled_from(["", "rows", "sorted"]),
)
def test_sampled_takes_the_k_largest_but_those_that_are_zero(
    n, sparsity, step, seed, zeros, pattern
):
    v = heavy_tailed(n, seed)
    v[: int(zeros * n)] = 0
    if pattern == "rows":  # a period that a strided sample might fall in step with
        v = v * torch.tensor([1e-3, 1.0, 10.0, 1e-6, 1.0, 1e3, 1e-3, 5.0]).repeat(n // 8 + 1)[:n]
    if pattern == "sorted":
        v = v.sort().values
    k = select.count(sparsity, n)
    chosen = select.sampled(v, k, step)
    assert torch.equal(chosen, chosen.unique())  # which sorts
    assert chosen.numel() == torch.count_nonzero(v[chosen]) == min(k, int(torch.count_nonzero(v)))
    # None of them is smaller than an entry that was left: what was trimmed was the least.
    left = torch.ones(n, dtype=torch.bool)
    left[chosen] = False
    if left.any() and chosen.numel():
        assert v[chosen].abs().min() >= v[left].abs().max()


@settings(deadline=None, max_examples=50)
@given(
    n=st.integers(1, 3000),
    seed=st.integers(0, 99),
    sparsity=st.sampled_from([0.0, 0.5, 0.99, 0.999]),
)
def test_exact_takes_the_k_largest(n, seed, sparsity):
    v = heavy_tailed(n, seed)
    k = select.count(sparsity, n)
    expected = sorted(v.abs().tolist(), reverse=True)[:k]
    assert sorted(v[select.exact(v, k)].abs().tolist(), reverse=True) == expected


def test_the_sample_rotates(monkeypatch):
    """Over as many steps as the stride, each entry has been in the sample once."""
    seen, k, v = [], 640, torch.arange(1.0, 64_001.0)
    topk = torch.topk
    monkeypatch.setattr(torch, "topk", lambda x, *a, **kw: (seen.append(x), topk(x, *a, **kw))[1])
    stride = select.stride(k)
    for step in range(stride):
        select.sampled(v, k, step)
    samples = [
        x
        for x in seen
        if x.numel() <= v.numel() // stride + select.LINE and x[select.LINE] - x[0] > select.LINE
    ]
    assert len(samples) == stride
    assert torch.equal(torch.cat(samples).sort().values, v)


@pytest.mark.parametrize("high", [True, False])
def test_a_sample_that_misleads_is_made_good(high):
    """Large values only where the sample looks, so that the threshold is far too high; or only where it does not."""
    n, k, step = 102_400, 12_800, 3
    v = torch.linspace(0.1, 0.2, n).view(-1, select.LINE)
    v[step % select.stride(k) :: select.stride(k)] = 100.0 if high else 0.001
    v = v.flatten()
    chosen = select.sampled(v, k, step)
    assert chosen.numel() == k and v[chosen].min() >= torch.topk(v, k).values.min()


def test_the_last_entries_are_not_starved():
    """Equal magnitudes everywhere: over many steps with what was sent taken out, every entry is sent."""
    n, k = 20_000, 2_000
    v = torch.ones(n)
    for step in range(30):
        v[select.sampled(v, k, step)] = 0
    assert not v.any()
