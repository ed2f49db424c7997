"""The wire format: what is read is what was written, in as few bytes as promised, and damage is refused."""

import math
from importlib import import_module

import numpy as np
import oracle_wire
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.compression.kernels import plain
from dgc.compression.regions import ReducePlan
from dgc.compression.residual import Residual
from dgc.compression.sizes import row_bytes, row_sections
from dgc.compression.wire import NONFINITE, Layout, Rows, seal

cpu = pytest.importorskip(
    "dgc.compression.kernels.cpu", reason="numba is not installed", exc_type=ImportError
)
rows_cpu = pytest.importorskip(
    "dgc.compression.kernels.rows_cpu", reason="numba is not installed", exc_type=ImportError
)
try:  # which interprets its loops on the CPU; where there is a GPU, test_kernels_cuda.py runs them there
    cuda = None if torch.cuda.is_available() else import_module("dgc.compression.kernels.cuda")
except ImportError:
    cuda = None
BITS = (1, 2, 4, 8, 16, 32)
DTYPES = (torch.float32, torch.float64)
CPU = torch.device("cpu")
PATTERNS = ("normal", "wide", "zeros", "equal", "powers", "extremes", "tiny")


def some_values(pattern, m, scale, dtype, seed):
    """m values with a sign."""
    draw = np.random.default_rng(seed)
    x = {
        "normal": lambda: draw.standard_normal(m),
        "wide": lambda: draw.standard_normal(m) * np.exp(8 * draw.standard_normal(m)),
        "zeros": lambda: draw.standard_normal(m) * (draw.random(m) < 0.6),
        "equal": lambda: np.full(m, 0.7),
        "powers": lambda: np.ldexp(1.0, draw.integers(-20, 20, m)) * draw.choice([-1, 1], m),
        "extremes": lambda: draw.choice([3.4e38, -3.4e38, 1e38, 1.0], m) / scale,
        "tiny": lambda: draw.choice([1e-45, -3e-45, 1e-40, 0.0], m) / scale,
    }[pattern]()
    with np.errstate(over="ignore"):
        x = np.float64(x * scale)
    return torch.from_numpy(np.clip(x, -3.4e38, 3.4e38)).to(dtype)


def some_places(m, n, seed):
    return torch.from_numpy(np.sort(np.random.default_rng(seed).choice(n, m, replace=False)))


def by_torch(rows, places, values):
    return rows.encode(torch.zeros(len(places), dtype=torch.int64), places, values, 1)


def by_numba(rows, places, values):
    v = torch.zeros(rows.size, dtype=values.dtype)
    v[places] = values
    message, sent, _ = rows_cpu.written(
        rows, np.array([0, len(places)]), places.numpy(), 1, v.numpy(), v.numpy(), False
    )
    return message, torch.from_numpy(sent)


def read_by_numba(rows, message, sizes=None):
    """As :meth:`Rows.decode`."""
    sizes = np.array([rows.size]) if sizes is None else sizes.numpy()
    status, used, places, values = rows_cpu.read(rows, message, sizes, cpu.LIKE[rows.dtype].dtype)
    there = np.arange(rows.slots) < used[:, None]
    places = np.broadcast_to(np.arange(rows.slots), there.shape) if rows.all_entries else places
    return status.tolist(), np.where(there, places, 0), np.where(there, values, 0)


def by_triton(rows, places, values):
    return cuda.write(rows, torch.zeros(len(places), dtype=torch.int64), places, values, 1)


def read_by_triton(rows, message, sizes=None):
    status, places, values = cuda.read(rows, message, sizes)
    return status.tolist(), places.numpy(), values.numpy()


WRITERS = (by_torch, by_numba) if cuda is None else (by_torch, by_numba, by_triton)
READERS = (read_by_numba,) if cuda is None else (read_by_numba, read_by_triton)
KERNELS = (plain, cpu) if cuda is None else (plain, cpu, cuda)


def some(loops, seed):
    """Triton's in one of ten cases: interpreted, it takes as long as all the others."""
    return (
        loops
        if seed % 10 == 0
        else [loop for loop in loops if loop not in (by_triton, read_by_triton, cuda)]
    )


cases = given(
    k=st.integers(1, 700),
    density=st.floats(0.0005, 1.5),
    share=st.sampled_from([0, 0.001, 0.5, 0.99, 1]),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(DTYPES),
    pattern=st.sampled_from(PATTERNS),
    scale=st.sampled_from([1e-30, 1e-8, 1.0, 1e8, 1e30]),
    seed=st.integers(0, 99),
)


@settings(deadline=None, max_examples=300)
@cases
def test_a_row_is_what_the_description_says(k, density, share, bits, dtype, pattern, scale, seed):
    n = max(1, int(k / density))  # a row may have more slots than there are entries
    m = min(n, math.ceil(share * k))
    rows, places = Rows(k, n, bits, dtype, CPU), some_places(m, n, seed)
    values = some_values(pattern, m, scale, dtype, seed)
    expected = oracle_wire.encode(k, n, bits, places.tolist(), values.tolist())
    assert len(expected) == rows.nbytes == row_bytes(k, n, bits)
    status, there, numbers = oracle_wire.decode(expected, k, n, bits)
    numbers = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    assert status == 0 and there == places.tolist()
    for write in some(WRITERS, seed):
        message, sent = write(rows, places, values)
        assert bytes(message.flatten().tolist()) == expected
        assert torch.equal(sent, numbers)
    entries = rows.decode(message)
    for status, read, amounts in (entries, *(read(rows, message) for read in some(READERS, seed))):
        assert list(status) == [0]
        assert np.asarray(read)[0].tolist() == there + [0] * (k - m)
        assert np.array_equal(np.asarray(amounts)[0], np.pad(numbers.numpy(), (0, k - m)))


@settings(deadline=None, max_examples=100)
@given(
    n=st.integers(1, 700),
    contributors=st.integers(1, 3),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(DTYPES),
    pattern=st.sampled_from(PATTERNS),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
    seed=st.integers(0, 99),
)
def test_rows_of_all_entries_are_what_the_description_says(
    n, contributors, bits, dtype, pattern, scale, seed
):
    rows = Rows(n, n, bits, dtype, CPU, all_entries=True)
    values = some_values(pattern, contributors * n, scale, dtype, seed).view(contributors, n)
    expected = [oracle_wire.encode(n, n, bits, [], x.tolist(), all_entries=True) for x in values]
    numbers = [oracle_wire.decode(row, n, n, bits, all_entries=True)[2] for row in expected]
    numbers = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    for kernel in some(KERNELS, seed):
        left = values.clone()
        message = kernel.encode_all(rows, left)
        assert [bytes(row.tolist()) for row in message] == expected
        assert torch.equal(left, values - numbers)  # what is sent and what stays is what there was
        status, read = kernel.decode_all(rows, message)
        assert not status.any() and torch.equal(read, numbers)


@settings(deadline=None, max_examples=300)
@cases
def test_rounding(k, density, share, bits, dtype, pattern, scale, seed):
    """What is finite stays finite. Values of 16 bits are off by half a unit at most, those of 8 and 4 by a level."""
    n = max(1, int(k / density))
    m = min(n, max(1, math.ceil(share * k)))
    rows, values = Rows(k, n, bits, dtype, CPU), some_values(pattern, m, scale, dtype, seed)
    _, sent = by_numba(rows, some_places(m, n, seed), values)
    assert sent.isfinite().all()
    assert ((values.sign() == sent.sign()) | (sent == 0) | (values == 0)).all()
    for x, y in zip(values.double().abs().split(512), sent.double().abs().split(512), strict=True):
        in_float32 = x.float() > 0  # others are exact zeros, but for float64
        unit = 0.0 if dtype == torch.float64 else 2.0**-149
        if bits <= 8:
            assert (y[in_float32] > 0).all()
            assert bits == 1 or not y[~in_float32].any()
        if bits == 32:
            assert ((x - y).abs() <= x * 2.0**-24 + x.max() * 2.0**-163 + unit).all()
        elif (
            bits == 16
        ):  # of numbers far below the group's largest, the unit is that of float16's smallest
            assert (
                (x - y).abs()
                <= torch.maximum(x * 2.0**-11 * (1 + 2.0**-12), x.max() * 2.0**-39) + unit
            ).all()
            assert (y[(x >= x.max() * 2.0**-38) & (x > 0)] > 0).all()
        elif bits >= 4 and in_float32.any():
            last = 2 ** (bits - 1) - 1
            first = x.min().sqrt() if in_float32.all() else 0.0
            level = (x.max().sqrt() - first) / last
            cut = 2.0**-7 * (first + last * level)  # bfloat16's, of a and of all levels
            assert ((x.sqrt() - y.sqrt()).abs() <= level + cut + 2.0**-70).all()


@settings(deadline=None, max_examples=100)
@given(
    m=st.integers(1, 256),
    bits=st.sampled_from([1, 2]),
    seed=st.integers(0, 999),
    pattern=st.sampled_from(["normal", "wide", "equal"]),
)
def test_one_and_two_bits_are_means(m, bits, seed, pattern):
    """To the precision of bfloat16: of all magnitudes, or of those below the mean and of the others."""
    values = some_values(pattern, m, 1.0, torch.float64, seed)
    _, sent = by_numba(Rows(m, 300, bits, torch.float64, CPU), torch.arange(m), values)
    size = values.abs()
    parts = (
        [size]
        if bits == 1
        else [part for part in (size[size < size.mean()], size[size >= size.mean()]) if len(part)]
    )
    expected = [float(part.mean()) for part in parts]
    got = sent.abs().unique().tolist()
    assert all(min(abs(x - mean) / max(expected) for mean in expected) < 2.0**-5 for x in got)
    assert torch.equal(sent.sign(), values.sign())


@pytest.mark.parametrize("value", [1e-38, 1e-30, 1e-8, 65504.0, 65520.0, 1e10, 3e38, 2.0**-149])
@pytest.mark.parametrize("bits", BITS)
def test_one_value_of_any_scale(value, bits):
    """The smallest number of float32, and the largest: a scale has the exponents of both."""
    rows = Rows(2, 4, bits, torch.float32, CPU)
    _, sent = by_torch(rows, torch.tensor([1, 3]), torch.tensor([value, -value]))
    assert sent.tolist() == pytest.approx([value, -value], rel=1e-3 if bits > 8 else 2.0**-6)


def test_32_bits_lose_nothing():
    values = torch.randn(1000) * torch.exp(5 * torch.randn(1000))
    _, sent = by_torch(Rows(1000, 5000, 32, torch.float32, CPU), torch.arange(1000), values)
    assert torch.equal(sent, values)


def information(k, n):
    """Bits that k places among n have, each."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / k


@pytest.mark.parametrize(
    ("sparsity", "most", "more"),
    [(0.999, 12.0, 0.6), (0.99, 8.6, 0.6), (0.9, 5.3, 0.6), (0.75, 4.001, 0.8)],
)
def test_places_take_few_bits(sparsity, most, more):
    """A little more than their information."""
    for n in (1_000_000, 2_359_296, 25_557_032):
        k = round((1 - sparsity) * n)
        _, sections = row_sections(k, n, 4)
        bits = 8 * sum(sections[3:]) / k
        assert information(k, n) <= bits <= min(most, information(k, n) + more)


@pytest.mark.parametrize(
    ("slots", "least", "most"), [((1024, 1337), 0.095, 0.145), ((50_000, 10**6), 0.08, 0.125)]
)
def test_rows_are_hardly_longer_than_their_information(slots, least, most):
    """With values of 4 bits, and all that a row has beside its entries."""
    for sparsity in (0.999, 0.99, 0.97, 0.95, 0.9, 0.75):
        for k in slots:
            n = round(k / (1 - sparsity))
            more = 8 * row_bytes(k, n, 4) / k / (information(k, n) + 4) - 1
            assert 0 < more <= (most if sparsity == 0.75 else least)


def some_message(bits=16, contributors=2):
    rows = Rows(300, 5000, bits, torch.float32, CPU)
    row = torch.arange(contributors).repeat_interleave(280)
    places = torch.cat([some_places(280, 5000, seed) for seed in range(contributors)])
    return rows, rows.encode(
        row, places, some_values("normal", len(row), 1.0, torch.float32, 0), contributors
    )[0]


@settings(deadline=None, max_examples=300)
@given(data=st.data(), bits=st.sampled_from(BITS))
def test_a_message_that_was_changed_on_its_way_is_refused(data, bits):
    rows, message = some_message(bits)
    before = message.clone()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, rows.nbytes - 1))
        message[1, at] = (int(message[1, at]) + data.draw(st.integers(1, 255))) % 256
    expected = [0, 0] if torch.equal(message, before) else [0, 2]  # it may have been changed back
    assert rows.decode(message).status.tolist() == read_by_numba(rows, message)[0] == expected


def test_damage_with_a_pattern_is_refused():
    """The highest bit of two words, which in a sum modulo 2^32 make up for each other."""
    rows, message = some_message()
    words, generator = message.view(torch.int32), torch.Generator().manual_seed(0)
    for _ in range(200):
        two = torch.randperm(words.shape[1] - 2, generator=generator)[:2]
        words[1, two] ^= -(2**31)
        assert rows.decode(message).status.tolist() == [0, 2]
        words[1, two] ^= -(2**31)
    assert not rows.decode(message).status.any()


def mutated(message, draw):
    """Copies of a message, of which each row has some bits flipped, or words that are lost, moved or overwritten. Most
    have a checksum that is right again.
    """
    words = message.numpy().copy().view(np.uint32)
    for row in words:
        kind = draw.integers(0, 4)
        first, last = sorted(draw.integers(0, len(row) - 1, 2))
        if kind == 0:
            for bit in draw.integers(0, 32 * len(row), draw.integers(1, 5)):
                row[bit // 32] ^= np.uint32(1 << bit % 32)
        elif kind == 1:
            row[first:last] = 0
        elif kind == 2:
            row[first:] = np.roll(row[first:], int(draw.integers(1, 5)))
        else:
            row[first : first + 3] = draw.choice(
                [0, 1, 2, 0xFFFFFFFF, 0xFFFFFFFE, 0x7FFFFFFF, 0x7F807F80, 0x80008000], 1
            )
    message = torch.from_numpy(words.view(np.uint8))
    sealed = seal(message.clone())
    return torch.where(torch.from_numpy(draw.random(len(words)) < 0.8)[:, None], sealed, message)


def refused_alike(bits, all_entries, dtype, rounds, draw):
    """Of mutated rows all loops say the same, and name no place outside. How many rows they refused, and read."""
    k, n = (
        (300, 300) if all_entries else (int(draw.integers(1, 300)), int(draw.integers(300, 5000)))
    )
    rows, contributors = Rows(k, n, bits, dtype, CPU, all_entries), 50
    values = some_values("normal", contributors * k, 1.0, dtype, 0).view(contributors, k)
    if all_entries:
        message = rows.encode_all(values)
    else:
        places = torch.cat([some_places(k, n, seed) for seed in range(contributors)])
        row = torch.arange(contributors).repeat_interleave(k)
        message, _ = rows.encode(
            torch.where(torch.rand(len(row)) < 0.9, row, contributors),
            places,
            values.view(-1),
            contributors,
        )
    sizes = (
        None
        if all_entries
        else torch.full((contributors,), n).where(torch.arange(contributors) % 9 > 0, 0)
    )
    refused = read = 0
    for _ in range(rounds):
        changed = mutated(message, draw)
        status, places, values = rows.decode(changed, sizes)
        assert set(status.tolist()) <= {NONFINITE, *range(contributors + 1)}
        for read_by in some(READERS, draw.integers(10)):
            found = read_by(rows, changed, sizes)
            assert status.tolist() == found[0]
            assert np.array_equal(places, found[1]) and np.array_equal(values, found[2])
        assert values.isfinite().all() and places.ge(0).all() and places.lt(n).all()
        refused += int((status > 0).sum())
        read += int((status == 0).sum())
    return refused, read


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # NumPy's
@pytest.mark.parametrize(
    ("share", "seed"), [(1, 0), *(pytest.param(10, s, marks=pytest.mark.long) for s in range(1, 6))]
)
def test_mutated_messages_are_refused_alike(share, seed):
    """2,000 rows; in ``make long`` 100,000."""
    draw, total = np.random.default_rng(seed), np.zeros(2, int)
    for _ in range(share):
        for turn, bits in enumerate((*BITS, 4, 16)):
            total += refused_alike(bits, turn > 5, DTYPES[turn % 2], 5, draw)
    print(f"{total[0]} of {2000 * share} mutated rows refused, {total[1]} read alike")
    assert (total > 200 * share).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_with_what_is_not_finite_says_only_that(bad, bits, dtype):
    values = torch.tensor([1.0, 2.0, bad, 1.0], dtype=dtype)
    rows, whole = Rows(4, 9, bits, dtype, CPU), Rows(4, 4, bits, dtype, CPU, all_entries=True)
    for write in WRITERS:
        message, sent = write(rows, torch.tensor([0, 1, 4, 5]), values)
        assert not sent.any()
        assert torch.equal(message, rows.status_message(1, NONFINITE))
        assert bytes(message[0].tolist()) == oracle_wire.encode(
            4, 9, bits, [0, 1, 4, 5], values.tolist()
        )
    for kernel in KERNELS:
        both = torch.stack([values, torch.ones_like(values)])
        message = kernel.encode_all(whole, both)
        assert torch.equal(both[0].nan_to_num(7), values.nan_to_num(7))  # it keeps what it has
        status, read = kernel.decode_all(whole, message)
        assert status.tolist() == [NONFINITE, 0] and not read[0].any() and read[1].all()


@pytest.mark.parametrize("bits", BITS)
def test_a_row_that_tells_of_a_damaged_one_is_not_damaged_itself(bits):
    rows = Rows(10, 90, bits, torch.float32, CPU)
    message = torch.cat([some_rows(rows), rows.status_message(1, 2), some_rows(rows)])
    assert rows.decode(message).status.tolist() == [0, 2, 0]
    assert all(read(rows, message)[0] == [0, 2, 0] for read in READERS)


@pytest.mark.parametrize("more", [-4, 4, 400])
def test_rows_of_another_size_are_refused(more):
    rows, message = some_message()
    changed = torch.nn.functional.pad(message, (0, more))
    for read in (Rows.decode, *READERS):
        with pytest.raises(
            ValueError, match=f"must have {rows.nbytes} bytes a row, got {rows.nbytes + more} "
        ):
            read(rows, changed)


def some_rows(rows):
    return by_torch(rows, torch.arange(5), torch.ones(5))[0]


def test_an_empty_region_has_no_place():
    """Of twenty owners of 32 entries some own none: a place in it is refused."""
    layout = Layout(Residual("bucket 0", {"a": torch.empty(4, 8)}), [8], 4)
    plan = ReducePlan(layout, 20, 0)
    empty = int(plan.regions.sizes.argmin())
    assert plan.regions.sizes[empty] == 0
    message = (
        some_rows(Rows(5, plan.regions.size, 4, torch.float32, CPU)).expand(20, -1).contiguous()
    )
    rows = Rows(5, plan.regions.size, 4, torch.float32, CPU)
    expected = [0 if size >= 5 else 1 + r for r, size in enumerate(plan.regions.sizes.tolist())]
    assert expected[empty]
    assert rows.decode(message, plan.regions.sizes).status.tolist() == expected
    assert all(read(rows, message, plan.regions.sizes)[0] == expected for read in READERS)
