"""The same number of ranks, on real processes: to the bit."""

import random
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import ran
from laws import alike, everything, flat, loss, model
from torch import nn

import dgc
from dgc.checkpoint import ranks
from dgc.transport import find


def normalised():
    """With a batch norm, whose running statistics are each rank's own."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(16 * 36, 10),
    )


def drawing(steps, network, optimizer):
    """Steps that draw from every generator; what was drawn."""
    rank, draws = find().world.rank, []
    for step in steps:
        draws.append(
            [
                torch.rand(()).item(),
                random.random(),
                random.gauss(0, 1),
                np.random.rand(),
                np.random.randn(),
            ]
        )
        optimizer.zero_grad()
        (loss(network, rank, step) * sum(draws[-1])).backward()
        optimizer.step()
    return draws


def made(network=None, **config):
    network = normalised() if network is None else network
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=True
    )
    return network, dgc.DistributedOptimizer(
        optimizer,
        network.named_parameters(),
        dgc.Config(
            **{"sparsity": dgc.warmup(2, steps_per_epoch=4, end=0.99), "value_bits": 8, **config}
        ),
    )


def seeded(rank):
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)


def checkpoint_resume(separate=False):
    """Stop, save, load, go on, against never having stopped; and all raise what one meets."""
    rank = find().world.rank
    folder = Path(sys.argv[2]) / (f"disk {rank}" if separate else "shared")
    ranks.PIECE = 1000  # what has no common disk travels in pieces
    seeded(rank)
    network, optimizer = made()
    draws = drawing(range(6), network, optimizer)
    dgc.save_checkpoint(folder, network, optimizer, {"epoch": 6, "rank": rank})
    draws = drawing(range(6, 12), network, optimizer)
    expected = everything(network, optimizer)
    if separate and rank == 1:  # another machine than before
        shutil.rmtree(folder)
    seeded(99)
    network, optimizer = made()
    extras = dgc.load_checkpoint(folder, network, optimizer)
    drawn = drawing(range(6, 12), network, optimizer)
    return {
        "same": alike(everything(network, optimizer), expected),
        "draws": draws == drawn,
        "extras": extras,
        "residual": optimizer.report().residual_norm,
        "buffers": network[1].running_mean,
        "files": sorted(file.name.split("-")[0] for file in folder.iterdir())
        if folder.exists()
        else [],
    }


def checkpoint_separate():
    """Without a common file system."""
    return checkpoint_resume(separate=True)


def checkpoint_failure():
    """Rank 1's disk is full."""
    import resource

    rank, folder = find().world.rank, Path(sys.argv[2]) / "full"
    network, optimizer = made()
    drawing(range(3), network, optimizer)
    dgc.save_checkpoint(folder, network, optimizer)
    before, files = everything(network, optimizer), sorted(folder.iterdir())
    before = [x.clone() for x in before]
    drawing(range(3, 6), network, optimizer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    began, message = time.monotonic(), ""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    try:
        dgc.save_checkpoint(folder, network, optimizer)
    except OSError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    seconds = time.monotonic() - began
    for root in range(2):  # until the other has tidied up
        dgc.broadcast_parameters([("here", torch.zeros(1))], root)
    left = sorted(folder.iterdir()) == files
    for root in range(2):
        dgc.broadcast_parameters([("here", torch.zeros(1))], root)
    dgc.load_checkpoint(folder, network, optimizer)
    return message, seconds, left, alike(everything(network, optimizer), before)


def checkpoint_damage():
    """One byte of rank 1's file."""
    rank, folder = find().world.rank, Path(sys.argv[2]) / "damaged"
    network, optimizer = made()
    drawing(range(3), network, optimizer)
    dgc.save_checkpoint(folder, network, optimizer)
    before = [x.clone() for x in everything(network, optimizer)]
    if rank == 1:
        file = next(folder.glob("rank-1-*"))
        content = bytearray(file.read_bytes())
        content[5000] ^= 4
        file.write_bytes(content)
    drawing(range(3, 4), network, optimizer)
    after, message = [x.clone() for x in everything(network, optimizer)], ""
    try:
        dgc.load_checkpoint(folder, network, optimizer)
    except ValueError as error:
        message = str(error)
    return message, alike(everything(network, optimizer), after) and not alike(before, after)


def stateful():
    """With ``torch.distributed.checkpoint``, against never having stopped."""
    import torch.distributed.checkpoint as dcp

    folder, rank = Path(sys.argv[2]) / "dcp", find().world.rank

    def steps(some):
        for step in some:
            optimizer.zero_grad()
            x = torch.randn(4, 500, generator=torch.Generator().manual_seed(2 * step + rank))
            network(x).square().sum().backward()
            optimizer.step()
        return everything(network, optimizer)

    def states():
        return {
            "model": network.state_dict(),
            "optimizer": optimizer.state_dict(),
            "residuals": dgc.Residuals(optimizer),
        }

    torch.manual_seed(0)
    network, optimizer = made(nn.Linear(500, 10))
    steps(range(6))
    dcp.save(states(), checkpoint_id=folder)
    expected = steps(range(6, 12))
    network, optimizer = made(nn.Linear(500, 10))
    loaded = states()
    dcp.load(loaded, checkpoint_id=folder)
    network.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    return alike(steps(range(6, 12)), expected), optimizer.report().residual_norm


def checkpoint_ddp():
    """With DistributedDataParallel's hook."""
    folder, rank = Path(sys.argv[2]) / "ddp", find().world.rank

    def start():
        torch.manual_seed(0)
        network = nn.Linear(500, 10)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-2)
        wrapped = nn.parallel.DistributedDataParallel(network)
        dgc.register_comm_hook(wrapped, optimizer, dgc.Config(sparsity=0.95))
        return wrapped, optimizer

    def steps(some):
        for step in some:
            optimizer.zero_grad()
            x = torch.randn(4, 500, generator=torch.Generator().manual_seed(2 * step + rank))
            network(x).square().sum().backward()
            optimizer.step()
        return everything(network, optimizer)

    network, optimizer = start()
    steps(range(4))
    dgc.save_checkpoint(folder, network, optimizer)
    expected = steps(range(4, 8))
    network, optimizer = start()
    dgc.load_checkpoint(folder, network, optimizer)
    return alike(steps(range(4, 8)), expected), optimizer.report().residual_norm


def checkpoint_stock():
    """From compressed to Horovod's own optimizer and back, after ``flush()``: how far from compressed at density 1."""
    import horovod.torch as hvd

    folder, rank = Path(sys.argv[2]) / "stock", hvd.rank()
    config = dgc.Config(sparsity=dgc.piecewise({0: 0.95, 4: 0.0}))

    def steps(some):
        for step in some:
            optimizer.zero_grad()
            loss(network, rank, step).backward()
            optimizer.step()
        return flat(network)

    network = model()
    inner = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    optimizer = dgc.DistributedOptimizer(inner, network.named_parameters(), config)
    steps(range(4))
    optimizer.flush()
    dgc.save_checkpoint(folder, network, optimizer)
    expected = steps(range(4, 10))
    network = model()
    inner = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    optimizer = hvd.DistributedOptimizer(inner, network.named_parameters())
    dgc.load_checkpoint(folder, network, optimizer)
    steps(range(4, 7))
    dgc.save_checkpoint(folder, network, optimizer)
    network = model()
    inner = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    optimizer = dgc.DistributedOptimizer(inner, network.named_parameters(), config)
    dgc.load_checkpoint(folder, network, optimizer)
    return ((steps(range(7, 10)) - expected).norm() / expected.norm()).item()


CASES = (checkpoint_resume, checkpoint_separate, checkpoint_failure, checkpoint_damage)
ONLY = {"horovod": (checkpoint_stock,), "torch": (stateful, checkpoint_ddp)}


@pytest.fixture(params=["horovod", "torch"])
def results(request):
    return ran(request.param, 2, CASES + ONLY[request.param], limit=200)


@pytest.mark.parametrize("case", [checkpoint_resume, checkpoint_separate])
def test_resuming_is_bit_for_bit(results, case):
    """Law 6: parameters, buffers, u, v, momentum, decay, and all that is drawn; also without a common file system, when
    a machine was replaced.
    """
    ranks = results[case]
    assert all(rank["same"] and rank["draws"] and rank["residual"] > 0 for rank in ranks)
    assert [rank["extras"] for rank in ranks] == [{"epoch": 6, "rank": rank} for rank in range(2)]
    assert not torch.equal(ranks[0]["buffers"], ranks[1]["buffers"])
    assert ranks[0]["files"] == ["common", "manifest.json", "rank", "rank"]


def test_a_full_disk_on_one_rank_is_an_error_on_all(results):
    for message, seconds, left, restored in results[checkpoint_failure]:
        assert "File too large" in message and "(on rank 1)" in message
        assert seconds < 60 and left and restored


def test_a_damaged_file_of_one_rank_is_an_error_on_all(results):
    for message, untouched in results[checkpoint_damage]:
        assert (
            "rank-1-" in message and "its SHA-256 must be" in message and "(on rank 1)" in message
        )
        assert untouched


@pytest.mark.parametrize("case", ONLY["torch"])
@pytest.mark.parametrize("results", ["torch"], indirect=True)
def test_torchs_own_places(results, case):
    """``torch.distributed.checkpoint`` with :class:`dgc.Residuals`; DistributedDataParallel's hook. To the bit."""
    assert all(same and residual > 0 for same, residual in results[case])


@pytest.mark.parametrize("results", ["horovod"], indirect=True)
def test_to_horovods_own_optimizer_and_back(results):
    assert max(results[checkpoint_stock]) < 1e-6
