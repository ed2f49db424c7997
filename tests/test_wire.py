import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgc.residual import Bucket
from dgc.wire import Layout

SHAPES = {"a": (3, 5), "b": (70_000,), "c": (256, 256), "d": (300, 300), "e": (1,)}


def bucket(shapes=SHAPES, dtype=torch.float32):
    return Bucket("bucket 0", {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()})


def filled(b, layout, used, seed, scale):
    """Slots in use: random places, random values of each parameter's own scale."""
    generator = torch.Generator().manual_seed(seed)
    index, values = layout.base.clone(), torch.zeros(layout.slots, dtype=b.v.dtype)
    for i, (k, start, offset, n) in enumerate(zip(layout.counts, layout.starts, b.offsets, b.numels, strict=True)):
        m = int(used * k)
        index[start:start + m] = torch.randperm(n, generator=generator)[:m] + offset
        values[start:start + m] = torch.randn(m, generator=generator, dtype=b.v.dtype) * scale ** (i + 1)
    return index, values


@settings(deadline=None, max_examples=60)
@given(density=st.floats(0.0001, 1), used=st.floats(0, 1), seed=st.integers(0, 99),
       dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
       residual=st.sampled_from([torch.float32, torch.float64]), scale=st.sampled_from([1e-7, 1e-3, 1.0, 1e6]))
def test_there_and_back(density, used, seed, dtype, residual, scale):
    b = bucket(dtype=residual)
    layout = Layout(b, [max(1, int(density * n)) for n in b.numels], dtype)
    index, values = filled(b, layout, used, seed, scale)
    message, sent = layout.encode(index, values)
    assert message.dtype == torch.uint8 and message.numel() == layout.nbytes and message.numel() % 4 == 0
    got_index, got = layout.decode(message.clone(), 0, "bucket 0")
    assert torch.equal(got_index, index) and torch.equal(got, sent)
    # Rounding to the wire's dtype is within half a unit in the last place of the value, or of the parameter's largest
    # value times 2^-39 where float16 has run out of exponents.
    largest = torch.zeros(len(b.names), dtype=residual).scatter_reduce_(0, layout.owner, values.abs(), "amax")
    bound = torch.maximum(values.abs() * torch.finfo(dtype).eps / 2, largest[layout.owner] * 2.0 ** -38)
    assert bool(((sent - values).abs() <= bound).all())


@pytest.mark.parametrize("value", [1e-38, 1e-30, 1e-8, 65504.0, 65520.0, 1e10, 3e38, 2.0**-149])
def test_no_scale_overflows_or_vanishes_in_float16(value):
    b = bucket({"a": (4,)})
    layout = Layout(b, [2], torch.float16)
    _, sent = layout.encode(torch.tensor([0, 1]), torch.tensor([value, -value]))
    assert sent.tolist() == pytest.approx([value, -value], rel=1e-3)


def test_float32_on_the_wire_loses_nothing():
    b = bucket({"a": (1000,)})
    values = torch.randn(1000) * torch.exp(5 * torch.randn(1000))
    _, sent = Layout(b, [1000], torch.float32).encode(torch.arange(1000), values)
    assert torch.equal(sent, values)


def test_two_bytes_for_an_index_of_a_small_parameter_and_four_for_one_of_a_large():
    small, large = bucket({"a": (65_536,)}), bucket({"a": (65_537,)})
    assert Layout(small, [100], torch.float16).nbytes == 100 * 4 + 4
    assert Layout(large, [100], torch.float16).nbytes == 100 * 6 + 4


def test_a_message_of_another_size_is_refused():
    b = bucket()
    with pytest.raises(ValueError, match=r"the message of rank 3 for bucket 0 has 8 bytes; expected \d+"):
        Layout(b, [1] * 5, torch.float16).decode(torch.zeros(8, dtype=torch.uint8), 3, "bucket 0")


def test_an_index_outside_its_parameter_is_refused():
    b = bucket()
    layout = Layout(b, [1] * 5, torch.float16)
    message, _ = layout.encode(layout.base, torch.ones(5))
    message[:4] = torch.tensor([255, 255, 255, 127], dtype=torch.uint8)
    with pytest.raises(ValueError, match="rank 1 for bucket 0 points outside its parameters"):
        layout.decode(message, 1, "bucket 0")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_is_not_finite_is_told_by_rank_and_parameter(bad, dtype):
    b = bucket({"a": (4,), "b": (4,)})
    layout = Layout(b, [2, 2], dtype)
    message, _ = layout.encode(torch.tensor([0, 1, 4, 5]), torch.tensor([1.0, 2.0, bad, 1.0]))
    with pytest.raises(FloatingPointError, match="rank 2 has a gradient that is not finite, in: b"):
        layout.decode(message, 2, "bucket 0")
