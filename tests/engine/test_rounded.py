"""What travels dense, rounded: ``Config(dense_dtype=...)``."""

import math

import pytest
import torch
from laws import difference, flat, in_lockstep, model, rank, train, wrapped
from torch import nn

import dgc


def test_dense_dtype():
    """Half the bytes, nearly the same training, nothing lost; saved and loaded with the residuals."""
    def worker():
        plain, _ = train(range(6), dgc.Config(sparsity=0.0))
        network, optimizer = train(range(6), dgc.Config(sparsity=0.0, value_bits=8))
        state = optimizer.residual_state_dict()
        rest = torch.cat([state["v"][name].flatten() for name, p in network.named_parameters() if p.numel() < 1024])
        optimizer.load_residual_state_dict(state)
        optimizer.flush()
        assert all(not v.any() for v in optimizer.residual_state_dict()["v"].values())
        return flat(plain), flat(network), rest, optimizer.report().message_bytes

    results = in_lockstep(worker)
    small = [p.numel() for p in model().parameters() if p.dim() < 2 or p.numel() < 1024]
    large = sum(p.numel() for p in model().parameters()) - sum(small)
    contributed = sum((len(results) + 1) * in_a_chunk(numel, len(results)) for numel in (sum(small), large))
    for plain, rounded, rest, message_bytes in results:
        assert torch.equal(rounded, results[0][1]) and difference(rounded, plain) < 1e-4
        assert rest.any() and message_bytes == contributed


def in_a_chunk(numel, n):
    """Bytes: its part of the entries, an exponent for each 256 of them, and a checksum."""
    entries = 2 * math.ceil(numel / n / 2)
    return 4 * math.ceil((2 * entries + 2 * math.ceil(entries / 256)) / 4) + 8


@pytest.mark.parametrize("size", [2, 16])
def test_dense_dtype_keeps_what_a_frozen_parameter_has_pending(size):
    """For when it thaws: among few ranks, which round, and among many, where so short a sum is fewer bytes as it is."""
    def worker():
        network = nn.ParameterDict({name: nn.Parameter(torch.zeros(50)) for name in "ab"})
        _, optimizer = wrapped(dgc.Config(value_bits=8), network)
        optimizer.load_residual_state_dict({**optimizer.residual_state_dict(),
                                            "v": {name: torch.full((50,), 1.0 + rank()) for name in "ab"}})
        network["a"].requires_grad_(False)
        network["b"].grad = torch.ones(50)
        optimizer.step()
        v = optimizer.residual_state_dict()["v"]
        assert v["a"].eq(1.0 + rank()).all() and not network["a"].any()
        assert not v["b"].any() and network["b"].all()
        network["a"].requires_grad_(True)
        optimizer.zero_grad()
        optimizer.step()
        assert not optimizer.residual_state_dict()["v"]["a"].any()
        mean = sum(range(1, size + 1)) / size
        assert torch.allclose(network["a"], torch.full((50,), -0.05 * mean))

    in_lockstep(worker, size)


def test_dense_dtype_is_float16_bfloat16_or_none():
    with pytest.raises(ValueError, match=r"dense_dtype must be .* got torch.float32"):
        dgc.Config(dense_dtype=torch.float32)
