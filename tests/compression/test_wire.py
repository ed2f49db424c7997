import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.compression import select
from dgc.compression.residual import Bucket
from dgc.compression.wire import BLOCK, Layout, seal

SHAPES = {"a": (3, 5), "b": (70_000,), "c": (256, 256), "d": (300, 600), "e": (1,)}


def bucket(shapes=SHAPES, dtype=torch.float32):
    return Bucket("bucket 0", {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()})


def filled(b, layout, share, seed, scale):
    """Slots in use: random places, random values of each parameter's own scale."""
    generator = torch.Generator().manual_seed(seed)
    index, values, used = layout.base.clone(), torch.zeros(layout.slots, dtype=b.v.dtype), []
    for i, (k, start, offset, n) in enumerate(zip(layout.counts, layout.starts, b.offsets, b.numels, strict=True)):
        m = int(share * k)
        index[start:start + m] = torch.randperm(n, generator=generator)[:m].sort().values + offset
        values[start:start + m] = torch.randn(m, generator=generator, dtype=b.v.dtype) * scale ** (i + 1)
        used.append(m)
    return index, torch.tensor(used), values


@settings(deadline=None, max_examples=60)
@given(density=st.floats(0.0001, 1), used=st.floats(0, 1), seed=st.integers(0, 99),
       dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
       residual=st.sampled_from([torch.float32, torch.float64]), scale=st.sampled_from([1e-7, 1e-3, 1.0, 1e6]))
def test_there_and_back(density, used, seed, dtype, residual, scale):
    b = bucket(dtype=residual)
    layout = Layout(b, [max(1, int(density * n)) for n in b.numels], dtype)
    index, used, values = filled(b, layout, used, seed, scale)
    message, sent = layout.encode(index, used, values)
    assert message.dtype == torch.uint8 and message.numel() == layout.nbytes and message.numel() % 4 == 0
    valid = layout.ordinal < used[layout.owner]
    got_index, got = layout.decode(message.clone(), 0)
    assert torch.equal(got_index, index[valid]) and torch.equal(got, sent[valid]) and not sent[~valid].any()
    # Rounding to the wire's dtype is within half a unit in the last place of the value, or of the parameter's largest
    # value times 2^-39 where float16 has run out of exponents.
    largest = torch.zeros(len(b.names), dtype=residual).scatter_reduce_(0, layout.owner, values.abs(), "amax")
    bound = torch.maximum(values.abs() * torch.finfo(dtype).eps / 2, largest[layout.owner] * 2.0 ** -38)
    assert bool(((sent - values).abs() <= bound).all())


@pytest.mark.parametrize("value", [1e-38, 1e-30, 1e-8, 65504.0, 65520.0, 1e10, 3e38, 2.0**-149])
def test_no_scale_overflows_or_vanishes_in_float16(value):
    layout = Layout(bucket({"a": (4,)}), [2], torch.float16)
    _, sent = layout.encode(torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([value, -value]))
    assert sent.tolist() == pytest.approx([value, -value], rel=1e-3)


def test_float32_on_the_wire_loses_nothing():
    values = torch.randn(1000) * torch.exp(5 * torch.randn(1000))
    layout = Layout(bucket({"a": (1000,)}), [1000], torch.float32)
    assert torch.equal(layout.encode(torch.arange(1000), torch.tensor([1000]), values)[1], values)


def test_at_most_4_2_bytes_an_entry():
    """Of ResNet-50's largest parameters and of one of 65,536 entries, at 99.9 %; and the sum of its parts."""
    for n in (BLOCK, 2_359_296, 200_000_000):
        b = bucket({"a": (1, 1)})
        b.numels, b.numel = (n,), n
        k = select.count(0.999, n)
        layout = Layout(b, [k], torch.float16)
        assert layout.nbytes == 4 * -(-n // BLOCK) + 4 * k + 2 + 2 + 8
        assert n < 200_000 or layout.nbytes / k < 4.2


def test_a_message_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"rank 3 for bucket 0 must have \d+ bytes, got 8"):
        Layout(bucket(), [1] * 5, torch.float16).decode(torch.zeros(8, dtype=torch.uint8), 3)


def some_message(dtype=torch.float16):
    b = bucket()
    layout = Layout(b, [3, 40, 50, 60, 1], dtype)
    return layout, layout.encode(*filled(b, layout, 0.9, 0, 1.0))[0]


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_message_that_was_changed_on_its_way_is_refused(data):
    layout, message = some_message()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = (int(message[at]) + data.draw(st.integers(1, 255))) % 256
    if torch.equal(message, some_message()[1]):  # changed back
        return
    with pytest.raises(ValueError, match="the message of rank 1 for bucket 0 is corrupt"):
        layout.decode(message, 1)


def test_damage_with_a_pattern_is_refused():
    """The highest bit of two words, which in a sum modulo 2^32 make up for each other."""
    layout, message = some_message()
    words, generator = message.view(torch.int32), torch.Generator().manual_seed(0)
    for _ in range(200):
        two = torch.randperm(len(words) - 2, generator=generator)[:2]
        words[two] ^= -2**31
        with pytest.raises(ValueError, match="the message of rank 1 for bucket 0 is corrupt"):
            layout.decode(message, 1)
        words[two] ^= -2**31
    layout.decode(message, 1)


@pytest.mark.parametrize("section", ["counts", "positions"])
def test_positions_outside_a_parameter_are_refused_though_the_checksum_is_right(section):
    layout, message = some_message()
    getattr(layout.sections(message), section)[0] = 30_000  # parameter a has 15 entries and 3 slots
    with pytest.raises(ValueError, match="the message of rank 1 for bucket 0 is corrupt"):
        layout.decode(seal(message), 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_is_not_finite_is_told_by_rank_and_parameter(bad, dtype):
    layout = Layout(bucket({"a": (4,), "b": (4,)}), [2, 2], dtype)
    message, sent = layout.encode(torch.tensor([0, 1, 4, 5]), torch.tensor([2, 2]), torch.tensor([1.0, 2.0, bad, 1.0]))
    assert sent.tolist() == [1, 2, 0, 0]  # b keeps what it has
    for told in (message, layout.nonfinite_message(["b"])):
        with pytest.raises(FloatingPointError, match="rank 2 has a gradient that is not finite, in: b"):
            layout.decode(told, 2)
