"""The same bucket twice, for the Triton kernels and for the torch operations; and gradients for it."""

import pytest
import torch

from dgc.compression import select
from dgc.compression.kernels import plain
from dgc.compression.residual import Bucket, Gradient
from dgc.compression.wire import Layout

cuda = pytest.importorskip("dgc.compression.kernels.cuda", reason="triton is not installed", exc_type=ImportError)


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

    def step(self, gradients, step=0, scale=None, masking=True):
        """Returns the message of either, which is the same."""
        results = []
        there = {name: Gradient(moved(g.g), g.momentum, g.nesterov) for name, g in gradients.items()}
        scales = {name: s.to(DEVICE) for name, s in scale.items()} if isinstance(scale, dict) else scale
        for kernel, bucket, layout, some, clip in zip((cuda, plain), self.buckets, self.layouts, (there, gradients),
                                                      (scales, scale), strict=True):
            bad, index, used = kernel.select(bucket, some, clip, layout, step)
            chosen = index[layout.ordinal < used[layout.owner]].tolist()
            message = layout.nonfinite_message(bad) if bad else (
                kernel.encode(bucket, layout, index, used, masking))
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


def position_beyond(layout, message):
    layout.sections(message).positions[layout.starts[2]] = -1  # 65,535, of the 5 entries of d


def count_beyond(layout, message):
    layout.sections(message).counts[1] = 2**31 - 1


def counts_that_cancel(layout, message):
    layout.sections(message).counts[1:3] += torch.tensor([-2000, 2000], dtype=torch.int32)
