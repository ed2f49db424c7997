"""The same bucket twice, for the Triton kernels and for the torch operations; and gradients for it."""

import pytest
import torch

from dgc.compression import select
from dgc.compression.kernels import plain
from dgc.compression.residual import Gradient, Residual
from dgc.compression.wire import Layout

cuda = pytest.importorskip(
    "dgc.compression.kernels.cuda", reason="triton is not installed", exc_type=ImportError
)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"a": (30, 41), "b": (66_000,), "c": (5,), "d": (0, 3), "e": (100, 121)}


class Pair:
    """The same bucket twice: for the Triton kernels, and for their twin."""

    def __init__(
        self, dtype=torch.float32, shapes=SHAPES, velocity=True, sparsity=0.99, bits=16, counts=None
    ):
        self.buckets = [
            Residual(
                "bucket 0",
                {k: torch.empty(s, dtype=dtype, device=device) for k, s in shapes.items()},
                velocity,
            )
            for device in (DEVICE, "cpu")
        ]
        counts = (
            [select.count(sparsity, n) for n in self.buckets[0].numels]
            if counts is None
            else counts
        )
        self.layouts = [Layout(bucket, counts, bits) for bucket in self.buckets]

    def step(self, gradients, step=0, scale=None, masking=True):
        """Returns the message of either, which is the same."""
        results = []
        there = {
            name: Gradient(moved(g.g), g.momentum, g.nesterov) for name, g in gradients.items()
        }
        scales = (
            {name: s.to(DEVICE) for name, s in scale.items()} if isinstance(scale, dict) else scale
        )
        for kernel, bucket, layout, some, clip in zip(
            (cuda, plain),
            self.buckets,
            self.layouts,
            (there, gradients),
            (scales, scale),
            strict=True,
        ):
            bad, index, used = kernel.accumulate_and_select(bucket, some, clip, layout, step)
            chosen = index[layout.uses(used)].tolist()
            refused = torch.tensor(bool(bad)) if kernel is plain else bucket.marked.any()
            message, taken = kernel.encode(bucket, layout, index, used, refused, masking)
            assert not refused or not taken.sent.any()
            results.append((chosen, used.tolist(), message.tolist(), int(bucket.entries_sent)))
        assert results[0] == results[1]
        assert self.buckets[0].not_finite() == bad
        self.agree()
        return message

    def agree(self):
        ours, theirs = self.buckets
        assert torch.equal(ours.v.cpu(), theirs.v) and (
            ours.u is None or torch.equal(ours.u.cpu(), theirs.u)
        )
        torch.testing.assert_close(
            ours.gradient_square.cpu(), theirs.gradient_square, rtol=1e-4, atol=0
        )

    def received(self, messages, divisor):
        """What either makes of the messages."""
        updates = [
            kernel.Received(layout, layout.rows, torch.cat(messages).to(device), divisor)
            for kernel, layout, device in zip(
                (cuda, plain), self.layouts, (DEVICE, "cpu"), strict=True
            )
        ]
        assert torch.equal(updates[0].status.cpu(), updates[1].status)
        return updates


def moved(g):
    """On the device, with the same strides and as badly aligned; what lies behind it is not finite."""
    memory = torch.empty(0, dtype=g.dtype).set_(g.untyped_storage())
    memory = torch.cat([memory, torch.full((8,), torch.nan, dtype=g.dtype)]).to(DEVICE)
    return memory.as_strided(g.shape, g.stride(), g.storage_offset())


def gradients(step, dtype=torch.float32, nesterov=False, shapes=SHAPES):
    generator = torch.Generator().manual_seed(step)
    return {
        k: Gradient(
            (10.0 ** (i - 4) * torch.randn(s, generator=generator) ** 3).to(dtype),
            0.0 if k == "e" else 0.9,
            nesterov,
        )
        for i, (k, s) in enumerate(shapes.items())
    }


def targets(dtype, without=None, shapes=SHAPES):
    return [
        [
            None if name == without else torch.ones(shape, dtype=dtype, device=device)
            for name, shape in shapes.items()
        ]
        for device in (DEVICE, "cpu")
    ]
