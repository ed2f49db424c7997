"""Models that fully_shard has split, over two nodes of two ranks: torch.optim.SGD and plain shards are the references.
"""

import functools

import pytest
import torch
from cases import SHARDED
from launch import launch

import dgc
from dgc.frontends import checks

NAMES = ["fsdp_dense", "fsdp_sparse", "fsdp_conservation", "fsdp_resumed", "fsdp_skipped", "fsdp_refusals",
         "fsdp_saved"]


@functools.cache
def once():
    """A launch that failed is not tried again by each of the tests that look at it."""
    try:
        return launch("torch", 4, NAMES, limit=240)[0]
    except BaseException as error:
        return error


def ran(name):
    results = once()
    if isinstance(results, BaseException):
        raise results
    return results[name]


@pytest.mark.parametrize("manner", ["as it comes", "clipped", "accumulated before", "accumulated after", "broadcast",
                                    "columns"])
def test_with_nothing_kept_back_it_is_sgd_on_the_average_of_all_ranks(manner):
    assert max(results[manner] for results in ran("fsdp_dense")) < 1e-6


@pytest.mark.parametrize("name", SHARDED)
def test_a_shard_is_a_parameter_of_its_own(name):
    """Parameters, residuals and what flush() sends, to the bit; in the end all nodes have the same."""
    results = [results[0][name] for results in ran("fsdp_sparse")]
    for parameters, trained, flushed, residuals in results:
        assert trained and flushed and all(residuals)
        assert torch.equal(parameters, results[0][0])


def test_an_empty_shard_may_travel_alone_and_messages_leave_during_the_backward_pass():
    for _, same, begun in ran("fsdp_sparse"):
        assert same and begun == [4] * 7  # those of the two other layers


def test_conservation():
    """On each node the shards together have all weights; something is pending."""
    for results in ran("fsdp_conservation"):
        assert list(results) == ["4.weight", "2.weight", "0.weight"]
        for added, accounted, _ in results.values():
            torch.testing.assert_close(added, accounted, rtol=1e-5, atol=1e-6)
        assert results["0.weight"][2] > 0


def test_stopped_and_resumed():
    """The state is of whole parameters, as a checkpoint of torch.distributed has it, and alike on all ranks."""
    weights = {(i, "decay_buffer"): shape for i, shape in ((0, (9, 12)), (2, (7, 9)))}
    dense = {(i, "momentum_buffer"): shape for i, shape in ((1, (9,)), (3, (7,)), (4, (1, 7)), (5, (1,)))}
    for rank, (same, shapes, told) in enumerate(ran("fsdp_resumed")):
        assert same and shapes == {**weights, **dense}
        assert told == f"residual_state_dict: shard is {(1 - rank % 2, 2)}; expected {(rank % 2, 2)}"


def test_saved_by_torch_distributed_checkpoint():
    """Each rank gets its own shard's residuals back; whole files are refused."""
    for same, pending, told in ran("fsdp_saved"):
        assert same and pending > 0
        assert told == ["the parameters are sharded, so that no rank has a whole model to save"] * 2


def test_a_step_that_one_shard_cannot_take_is_skipped_by_all():
    for (error, skipped, _), (scaled_error, scaled_skipped, scale) in ran("fsdp_skipped"):
        assert error < 1e-6 and scaled_error < 1e-6
        assert skipped == scaled_skipped == 1 and scale == 2.0 ** 3


def test_the_door():
    for nothing, node, world, native, mixed, per_tensor in ran("fsdp_refusals"):
        assert nothing.startswith("TypeError: process_set is None and the parameters are sharded; accepted: fully_")
        assert "hold different shards" in node and "hold different shards" in world
        assert "(Replicate(), Shard(dim=0))" in native
        assert "of shapes [(9, 12)], are not" in mixed
        assert "clip_per_tensor is True" in per_tensor


def test_a_loss_scaler_before_torch_2_5(monkeypatch):
    """Which called no hooks of sharded parameters."""
    sharded, scaler = torch.zeros(3), torch.amp.GradScaler("cpu")
    sharded.device_mesh = "a mesh"
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.4.1+cu121"))
    with pytest.raises(ValueError, match=r"hooks torch 2\.4\.1\S* does not call, .*; accepted: torch 2\.5 or later"):
        checks.check_shards([{"params": [sharded]}], None, dgc.Config(), scaler)
    checks.check_shards([{"params": [torch.zeros(3)]}], None, dgc.Config(), scaler)
    for version, given in (("2.5.0", scaler), ("2.4.1", None)):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        sharded.device_mesh, sharded.placements = type("Mesh", (), {"ndim": 2})(), ()
        with pytest.raises(ValueError, match="is placed as"):
            checks.check_shards([{"params": [sharded]}], None, dgc.Config(), given)
