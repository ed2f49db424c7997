"""Dense sums in 8 bits: ``Config(value_bits=...)`` of 8 or fewer, from the first compressed step on."""

import pytest
import torch
from laws import bytes_of_a_row, difference, flat, in_lockstep, model, rank, train, wrapped
from torch import nn

import dgc

SMALL = [name for name, p in model().named_parameters() if p.dim() < 2 or p.numel() < 1024]


@pytest.mark.parametrize("size", [2, 4])
def test_sums_of_small_parameters_travel_in_8_bits(size):
    """Fewer bytes, nearly the same training, nothing lost; saved and loaded with the residuals."""

    def worker():
        ends = []
        for bits in (16, 8):
            network, optimizer = train(range(6), dgc.Config(sparsity=0.9, value_bits=bits))
            state = optimizer.residual_state_dict()
            optimizer.load_residual_state_dict(state)
            optimizer.flush()
            assert all(not v.any() for v in optimizer.residual_state_dict()["v"].values())
            rest = [state["v"][name].flatten() for name in SMALL if name in state["v"]]
            ends.append((flat(network), rest, optimizer.report().message_bytes))
        return ends

    results = in_lockstep(worker, size)
    numels = {name: p.numel() for name, p in model().named_parameters()}
    small = sum(numels[name] for name in SMALL)
    k, n = (
        sum(count(numel) for name, numel in numels.items() if name not in SMALL)
        for count in (lambda numel: -(-numel // 10), lambda numel: numel)
    )
    part = -(-small // size)
    for (plain, none, plain_bytes), (rounded, rest, few_bytes) in results:
        assert torch.equal(rounded, results[0][1][0]) and 0 < difference(rounded, plain) < 0.02
        assert not none and torch.cat(rest).any()
        assert plain_bytes == bytes_of_a_row(k, n, 16) + 4 * small
        assert few_bytes == bytes_of_a_row(k, n, 8) + (size + 1) * bytes_of_a_row(
            part, part, 8, all_entries=True
        )


def test_sums_are_rounded_from_the_first_compressed_step_on():
    """Before it steps are stock's; and the last one before they are stock's again leaves nothing in v."""

    def worker():
        ends = []
        for bits in (16, 8):
            network, optimizer = train(
                range(3),
                config := dgc.Config(dgc.piecewise({0: 0.0, 3: 0.9, 6: 0.0}), value_bits=bits),
            )
            ends.append(flat(network))
            assert not any(v.any() for v in optimizer.residual_state_dict()["v"].values())
            train(range(3, 6), config, network, optimizer)
            ends.append(flat(network))
            v = optimizer.residual_state_dict()["v"]
            assert any(v[name].any() for name in SMALL if name in v) == (bits == 8)
            train(range(6, 7), config, network, optimizer)
            assert not any(v.any() for v in optimizer.residual_state_dict()["v"].values())
        return ends

    for stock, sparse, same, rounded in in_lockstep(worker):
        assert torch.equal(stock, same) and not torch.equal(sparse, rounded)


@pytest.mark.parametrize("size", [2, 24])
def test_rounding_keeps_what_a_frozen_parameter_has_pending(size):
    """For when it thaws: among few ranks, which round, and among many, where so short a sum is fewer bytes as it is."""

    def worker():
        network = nn.ParameterDict({name: nn.Parameter(torch.zeros(50)) for name in "ab"})
        _, optimizer = wrapped(dgc.Config(value_bits=8), network)
        optimizer.load_residual_state_dict(
            {
                **optimizer.residual_state_dict(),
                "v": {name: torch.full((50,), 1.0 + rank()) for name in "ab"},
            }
        )
        network["a"].requires_grad_(False)
        network["b"].grad = torch.ones(50)
        optimizer.step()
        v = optimizer.residual_state_dict()["v"]
        assert v["a"].eq(1.0 + rank()).all() and not network["a"].any()
        assert v["b"].abs().max() < 0.05 and network["b"].all()  # but for what rounding drops
        network["a"].requires_grad_(True)
        optimizer.zero_grad()
        optimizer.step()
        optimizer.flush()
        assert not optimizer.residual_state_dict()["v"]["a"].any()
        mean = sum(range(1, size + 1)) / size
        assert torch.allclose(network["a"], torch.full((50,), -0.05 * mean))

    in_lockstep(worker, size)
