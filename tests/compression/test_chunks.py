"""The format of dense sums that are rounded."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.compression.chunks import Chunks
from dgc.compression.wire import CORRUPT, NONFINITE

NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


@given(st.integers(1, 3000), st.integers(2, 9), st.sampled_from([torch.float32, torch.float64]), st.integers(-140, 120))
@settings(max_examples=80, deadline=None)
def test_float16_is_numpys_with_an_exponent_for_256_neighbours(numel, n, residual, scale):
    draw = torch.Generator().manual_seed(numel)
    flat = (torch.randn(numel, generator=draw, dtype=torch.float64) * 2.0**scale).to(residual)
    chunks = Chunks(numel, n, torch.float16, residual)
    assert torch.equal(chunks.join(chunks.split(flat)), flat)
    left = chunks.split(flat).clone()
    message = chunks.encode(left)
    told = chunks.read(message)
    sent = chunks.values(message, told)
    assert not told.status.any() and torch.equal(left, chunks.split(flat) - sent)
    total = torch.ones(1, chunks.size, dtype=residual)
    chunks.add(message, told, 1, total)
    assert torch.allclose(total, 1 + sent[torch.arange(n) != 1].sum(0), rtol=1e-4, atol=1e-5 * float(sent.abs().max()))
    for whole, read in zip(chunks.split(flat).numpy(), sent.numpy(), strict=True):
        for first in range(0, len(whole), 256):
            x = whole[first:first + 256].astype(np.float64)
            unit = 2.0**max(math.frexp(np.abs(x).max())[1] - 15, -126 if residual == torch.float32 else -1022)
            expected = (np.float16(np.float32(x / unit)).astype(np.float64) * unit).astype(NUMPY[residual])
            assert np.array_equal(read[first:first + 256], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("largest", [1.7e38, 1.0, 1e-38, 1e-45])
def test_the_extremes_neither_overflow_nor_vanish(dtype, largest):
    x = torch.tensor([[largest, -largest / 2, 0.0, largest]])
    chunks = Chunks(4, 1, dtype, torch.float32)
    message = chunks.encode(x.clone())
    read = chunks.values(message, chunks.read(message))
    # The smallest exponent leaves too few bits of a denormal number, which may be off by its last one.
    assert torch.allclose(read, x, rtol=2**-8, atol=0 if largest > 1e-40 else 2**-149)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bytes(dtype):
    """Two a value, two for each 256 neighbours, at most two to fill up, and the checksum."""
    for numel, n, entries in ((1, 2, 2), (1000, 4, 250), (1001, 4, 252), (10**6, 64, 15626)):
        chunks = Chunks(numel, n, dtype, torch.float32)
        nbytes = 2 * entries + 2 * math.ceil(entries / 256)
        assert chunks.size == entries and chunks.nbytes == nbytes + nbytes % 4 + 8


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 3.4e38])
def test_a_chunk_that_is_not_finite_says_so(wrong):
    chunks = Chunks(1200, 3, torch.float16, torch.float32)
    values = torch.ones(3, 400)
    values[1, 399] = wrong
    message = chunks.encode(values)
    told = chunks.read(message)
    assert told.status.tolist() == [0, NONFINITE, 0]
    read = chunks.values(message, told)
    assert read[[0, 2]].eq(1).all() and read[1].isnan().all()


def test_a_chunk_that_is_damaged_or_tells_of_one():
    chunks = Chunks(1200, 3, torch.float16, torch.float32)
    message = chunks.encode(torch.randn(3, 400))
    draw = torch.Generator().manual_seed(0)
    for _ in range(500):
        damaged = message.clone()
        place, change = torch.randint(chunks.nbytes, (), generator=draw), torch.randint(1, 256, (), generator=draw)
        damaged[2, place] ^= change.to(torch.uint8)
        got = chunks.read(damaged)
        assert got.status.tolist() == [0, 0, CORRUPT] and got.whose[2] == 2
    message[0] = chunks.telling(torch.tensor(7))
    got = chunks.read(message)
    assert got.status.tolist() == [CORRUPT, 0, 0] and got.whose[0] == 7
    assert chunks.values(message, got).isnan().all(1).tolist() == [True, False, False]
