"""Models that fully_shard has split, over two nodes of two ranks: torch.optim.SGD and plain shards
are the references.
"""

import copy
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from launch import ran
from laws import (
    CONFIGS,
    difference,
    flat,
)
from torch import nn

import dgc
from dgc.engine.engine import engine_of
from dgc.frontends import checks

SHARDED = {
    name: replace(CONFIGS[name], min_numel=1)
    for name in (
        "default",
        "float32",
        "plain accumulation",
        "dense, then sparse",
        "dense fallback",
        "reduced",
    )
}
SHARDED["AdamW"] = dgc.Config(dgc.piecewise({0: 0.0, 3: 0.9}), min_numel=1)


@cache
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "shard"))


def across():
    return mesh()["across"].get_group()


def uneven(seed=0):
    """Weights of 9, 7 and 1 rows, so that the shards differ and one is empty."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1))


def uneven_loss(network, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (
        (network(torch.randn(8, 12, generator=generator)) - torch.randn(8, 1, generator=generator))
        .square()
        .mean()
    )


def split(network, own=None, **arguments):
    """Each layer and the whole, over the ranks of a node."""
    from torch.distributed.fsdp import fully_shard

    for part in (network[0], network[2], network[4], network):
        fully_shard(part, mesh=mesh()["shard"] if own is None else own, **arguments)
    return network


def sgd(parameters, momentum=0.9):
    return torch.optim.SGD(
        parameters, lr=0.05, momentum=momentum, weight_decay=1e-2, nesterov=momentum > 0
    )


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, betas=(0.9, 0.99), weight_decay=0.1)


def made(name):
    """What makes the optimizer for a config of SHARDED."""
    return adamw if name.startswith("AdamW") else sgd


def in_shards(config, network=None, make=sgd, **arguments):
    """A sharded model and its optimizer."""
    network = split(uneven()) if network is None else network
    return network, dgc.DistributedOptimizer(
        make(network.parameters()),
        network.named_parameters(),
        config,
        process_set=across(),
        **arguments,
    )


def steps_in_shards(network, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        uneven_loss(network, torch.distributed.get_rank(), step).backward()
        optimizer.step()
    return network, optimizer


def whole(network):
    return torch.cat([p.full_tensor().detach().flatten() for p in network.parameters()])


def own_rows(tensor):
    """As fully_shard splits them."""
    chunks = tensor.chunk(2)
    index = torch.distributed.get_rank() % 2
    return chunks[index] if index < len(chunks) else tensor[:0]


def on_the_average(steps, clip_norm=None, passes=1, make=sgd):
    """torch's optimizer in one process, on the average of the four ranks' gradients, or of the two nodes' clipped ones.

    The bound of the average is that of the nodes' times the square root of their number (paper, section 3.2).
    """
    network = uneven()
    optimizer = make(network.parameters())
    for step in steps:
        total = [torch.zeros_like(p) for p in network.parameters()]
        for node in range(2):
            optimizer.zero_grad()
            for i in range(passes):
                sum(
                    uneven_loss(network, 2 * node + rank, passes * step + i) / 2
                    for rank in range(2)
                ).backward()
            norm = torch.cat([p.grad.flatten() for p in network.parameters()]).norm()
            scale = 1.0 if clip_norm is None else min(1.0, clip_norm * 2**0.5 / norm.item())
            for kept, p in zip(total, network.parameters(), strict=True):
                kept.add_(p.grad, alpha=scale / 2)
        for kept, p in zip(total, network.parameters(), strict=True):
            p.grad.copy_(kept)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def fsdp_dense():
    """Nothing is kept back: distance from torch's optimizer, in each manner."""
    from torch.distributed.tensor import Shard

    results = {}
    for name, clip_norm in (("as it comes", None), ("clipped", 0.02)):
        config = dgc.Config(sparsity=0.0, min_numel=80, clip_norm=clip_norm)
        network, _ = steps_in_shards(*in_shards(config), range(6))
        results[name] = difference(whole(network), on_the_average(range(6), clip_norm))
    config = dgc.Config(sparsity=0.0, min_numel=80)
    network, _ = steps_in_shards(*in_shards(config, make=adamw), range(6))
    results["AdamW"] = difference(whole(network), on_the_average(range(6), make=adamw))
    network, optimizer = in_shards(config)
    for step in range(4):
        optimizer.zero_grad()
        for i in range(2):
            network.set_requires_gradient_sync(i == 1)
            network.set_is_last_backward(i == 1)
            uneven_loss(network, torch.distributed.get_rank(), 2 * step + i).backward()
        optimizer.step()
    results["accumulated before"] = difference(whole(network), on_the_average(range(4), passes=2))
    network, optimizer = in_shards(config, backward_passes_per_step=2)
    for step in range(4):
        optimizer.zero_grad()
        for i in range(2):
            uneven_loss(network, torch.distributed.get_rank(), 2 * step + i).backward()
        optimizer.step()
    results["accumulated after"] = difference(whole(network), on_the_average(range(4), passes=2))
    network = split(uneven(seed=torch.distributed.get_rank() // 2))
    dgc.broadcast_parameters(network.state_dict(), process_set=across())
    network, _ = steps_in_shards(*in_shards(config, network), range(6))
    results["broadcast"] = difference(whole(network), on_the_average(range(6)))
    network = uneven()
    split(network, shard_placement_fn=lambda p: Shard(1) if p is network[0].weight else None)
    network, _ = steps_in_shards(*in_shards(config, network), range(6))
    results["columns"] = difference(whole(network), on_the_average(range(6)))
    return results


def fsdp_sparse():
    """To the bit a DistributedOptimizer that is given each shard as a parameter of its own, and the gradient of the
    node's two ranks. And: each parameter by itself, and how many had left when the last layer's gradients came.
    """
    results = {}
    rank = torch.distributed.get_rank()
    for name, config in SHARDED.items():
        network, optimizer = in_shards(config, make=made(name))
        steps_in_shards(network, optimizer, range(6))
        reference = uneven()
        rows = {
            n: nn.Parameter(own_rows(p.detach()).clone()) for n, p in reference.named_parameters()
        }
        rows = {n: p for n, p in rows.items() if p.numel()}
        wrapped = dgc.DistributedOptimizer(
            made(name)(rows.values()), rows.items(), config, process_set=across()
        )
        for step in range(6):
            total = {n: torch.zeros_like(p) for n, p in reference.named_parameters()}
            for other in (rank - rank % 2, rank - rank % 2 + 1):
                reference.zero_grad()
                uneven_loss(reference, other, step).backward()
                for n, p in reference.named_parameters():
                    total[n] += p.grad / 2
            wrapped.zero_grad()
            sum((p * own_rows(total[n])).sum() for n, p in rows.items()).backward()
            wrapped.step()
            for n, p in reference.named_parameters():
                parts = [None, None]
                torch.distributed.all_gather_object(
                    parts,
                    rows[n].detach() if n in rows else p.detach()[:0],
                    group=mesh()["shard"].get_group(),
                )
                p.data.copy_(torch.cat(parts))
        kept, expected = optimizer.residual_state_dict(), wrapped.residual_state_dict()
        before = whole(network), flat(reference)
        optimizer.flush(), wrapped.flush()
        after = [
            torch.equal(p.to_local(), rows[n]) for n, p in network.named_parameters() if n in rows
        ]
        results[name] = (
            whole(network),
            torch.equal(before[0].double(), before[1]),
            all(after),
            [
                torch.equal(kept[letter][n], t)
                for letter in "uv"
                for n, t in expected[letter].items()
            ],
        )
    network, optimizer = in_shards(SHARDED["default"])
    apart, begun, before_the_last = split(uneven()), [], []
    apart[0].weight.register_post_accumulate_grad_hook(lambda p: before_the_last.append(len(begun)))
    apart, alone = in_shards(
        SHARDED["default"], apart, groups=[[p] for p in reversed(list(apart.parameters()))]
    )
    transport = engine_of(alone).settings.transport
    start = transport.start

    def spied(collective, name):
        begun.append(name)
        return start(collective, name)

    transport.start = spied
    for step in range(8):
        begun.clear()
        steps_in_shards(network, optimizer, [step]), steps_in_shards(apart, alone, [step])
    return results, torch.equal(whole(network), whole(apart)), before_the_last[1:]


def fsdp_conservation():
    """Of each weight's shard: what was accumulated on all nodes, and what was applied and is pending, added up."""
    results = {}
    network = split(uneven())
    added = {
        n: torch.zeros(p.to_local().shape, dtype=torch.float64)
        for n, p in network.named_parameters()
    }
    applied = {n: torch.zeros_like(t) for n, t in added.items()}
    for n, p in network.named_parameters():  # called before the optimizer's own
        p.register_post_accumulate_grad_hook(lambda p, n=n: added[n].add_(p.grad.to_local()))
    _, optimizer = in_shards(SHARDED["default"], network, partial(sgd, momentum=0.0))
    for step in range(10):
        steps_in_shards(network, optimizer, [step])
        for n, p in network.named_parameters():
            applied[n] += p.grad.to_local()
    pending = optimizer.residual_state_dict()["v"]
    for n, v in pending.items():
        sums = torch.stack([added[n], v.double()])
        torch.distributed.all_reduce(sums, group=across())
        results[n] = (sums[0], 2 * applied[n] + sums[1], v.abs().max().item() if v.numel() else 0.0)
    return results


def fsdp_local_steps():
    """What a node is: its parameters after rounds of three steps, and those that the equations give."""
    config = dgc.Config(0.0, min_numel=1, value_bits=32, local_steps=3)
    network, _ = steps_in_shards(*in_shards(config, make=adamw), range(6))
    common = whole(network)
    sparse = dgc.Config(0.75, min_numel=1, value_bits=4, local_steps=3)
    other, again = steps_in_shards(*in_shards(sparse, make=adamw), range(3))
    again.flush()
    return common, whole(other)


def averaged_every_third_step(steps):
    """Two nodes with optimizers of their own, on the mean of their ranks' gradients, in one process."""
    networks = [uneven(), uneven()]
    optimizers = [adamw(network.parameters()) for network in networks]
    for step in steps:
        for node, (network, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
            optimizer.zero_grad()
            sum(uneven_loss(network, 2 * node + rank, step) / 2 for rank in range(2)).backward()
            optimizer.step()
        if step % 3 == 2:
            mean = [
                torch.stack(ps).mean(0)
                for ps in zip(*(n.parameters() for n in networks), strict=True)
            ]
            with torch.no_grad():
                for network in networks:
                    for p, x in zip(network.parameters(), mean, strict=True):
                        p.copy_(x)
    return flat(networks[0])


def fsdp_resumed():
    """Saved and loaded between two steps, to the bit; the state's keys; what the other shard's residuals are told."""
    # Between the sizes of the two shards of the first weight.
    config = replace(SHARDED["default"], min_numel=50)
    network, optimizer = steps_in_shards(*in_shards(config), range(3))
    residuals = optimizer.residual_state_dict()
    saved = {name: t.to_local().clone() for name, t in network.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    shapes = {
        (i, key): tuple(t.shape) for i, kept in state["state"].items() for key, t in kept.items()
    }
    steps_in_shards(network, optimizer, range(3, 6))
    other, again = in_shards(config, split(uneven(seed=5)))
    with torch.no_grad():
        for name, t in other.state_dict().items():
            t.to_local().copy_(saved[name])
    again.load_residual_state_dict(residuals)
    again.load_state_dict(state)
    steps_in_shards(other, again, range(3, 6))
    index = torch.distributed.get_rank() % 2
    try:
        again.load_residual_state_dict({**residuals, "shard": (1 - index, 2)})
    except ValueError as error:
        return torch.equal(whole(network), whole(other)), shapes, str(error)


def fsdp_saved():
    """By torch.distributed.checkpoint, to the bit; what save_checkpoint and load_checkpoint say."""
    local = dgc.Config(0.75, min_numel=1, value_bits=4, local_steps=5)
    return [
        saved_and_loaded("default", SHARDED["default"]),
        saved_and_loaded("AdamW", SHARDED["AdamW"]),
        saved_and_loaded("AdamW, local steps", local),  # after a round; then within the next
    ]


def saved_and_loaded(name, config):
    import torch.distributed.checkpoint as dcp

    folder, told = Path(sys.argv[2]) / name, []

    def states():
        return {
            "model": network.state_dict(),
            "optimizer": optimizer.state_dict(),
            "residuals": dgc.Residuals(optimizer),
        }

    network, optimizer = steps_in_shards(*in_shards(config, make=made(name)), range(5))
    dcp.save(states(), checkpoint_id=folder)
    steps_in_shards(network, optimizer, range(5, 8))
    expected = whole(network)
    network, optimizer = in_shards(config, split(uneven(seed=5)), made(name))
    loaded = states()
    dcp.load(loaded, checkpoint_id=folder)
    network.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    steps_in_shards(network, optimizer, range(5, 8))
    for verb in (dgc.save_checkpoint, dgc.load_checkpoint):
        try:
            verb(folder, network, optimizer)
        except TypeError as error:
            told.append(str(error).split(" (")[0])
    residuals = torch.cat([v.flatten() for v in optimizer.residual_state_dict()["v"].values()])
    return torch.equal(whole(network), expected), residuals.norm().item(), told


def fsdp_skipped():
    """One shard of one node has a gradient that is not finite: no rank takes the step, with and without a scaler."""
    results = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=100)):
        network = split(uneven())
        now = []

        def spoil(p, now=now):
            if now[-1] == 2 and torch.distributed.get_rank() == 1:
                p.grad.to_local()[0, 0] = torch.inf

        network[0].weight.register_post_accumulate_grad_hook(spoil)
        config = dgc.Config(
            sparsity=0.0, min_numel=80, nonfinite="skip" if scaler is None else "error"
        )
        _, optimizer = in_shards(config, network, grad_scaler=scaler)
        for step in range(5):
            now.append(step)
            optimizer.zero_grad()
            loss = uneven_loss(network, torch.distributed.get_rank(), step)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        results.append(
            (
                difference(whole(network), on_the_average([0, 1, 3, 4])),
                optimizer.report().skipped,
                None if scaler is None else scaler.get_scale(),
            )
        )
    return results


def fsdp_refusals():
    """What the door says."""
    sharded, config = split(uneven()), dgc.Config()
    mixed = uneven()
    split(mixed, ignored_params={mixed[0].weight})
    told = []
    for network, process_set, settings in (
        (sharded, None, config),
        (sharded, mesh()["shard"].get_group(), config),
        (sharded, torch.distributed.group.WORLD, config),
        (split(uneven(), own=mesh()), across(), config),
        (mixed, across(), config),
        (sharded, across(), dgc.Config(clip_norm=1.0, clip_per_tensor=True)),
    ):
        try:
            dgc.DistributedOptimizer(
                sgd(network.parameters()),
                network.named_parameters(),
                settings,
                process_set=process_set,
            )
            told.append(None)
        except (TypeError, ValueError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def fsdp_differing():
    """Ranks with other shards have another config: their norms are added up, so that the others would wait."""
    odd = torch.distributed.get_rank() % 2 == 1
    try:
        steps_in_shards(
            *in_shards(dgc.Config(0.9, min_numel=1, clip_norm=1.0 if odd else None)), range(1)
        )
    except ValueError as error:
        return str(error)


CASES = (
    fsdp_dense,
    fsdp_sparse,
    fsdp_conservation,
    fsdp_local_steps,
    fsdp_resumed,
    fsdp_skipped,
    fsdp_refusals,
    fsdp_saved,
    fsdp_differing,
)


@pytest.mark.parametrize(
    "manner",
    [
        "as it comes",
        "AdamW",
        "clipped",
        "accumulated before",
        "accumulated after",
        "broadcast",
        "columns",
    ],
)
def test_with_nothing_kept_back_it_is_torchs_on_the_average_of_all_ranks(manner):
    assert max(results[manner] for results in ran("torch", 4, CASES)[fsdp_dense]) < 1e-6


@pytest.mark.parametrize("name", SHARDED)
def test_a_shard_is_a_parameter_of_its_own(name):
    """Parameters, residuals and what flush() sends, to the bit; in the end all nodes have the same."""
    results = [results[0][name] for results in ran("torch", 4, CASES)[fsdp_sparse]]
    for parameters, trained, flushed, residuals in results:
        assert trained and flushed and all(residuals)
        assert torch.equal(parameters, results[0][0])


def test_an_empty_shard_may_travel_alone_and_messages_leave_during_the_backward_pass():
    for _, same, begun in ran("torch", 4, CASES)[fsdp_sparse]:
        assert same and begun == [4] * 7  # those of the two other layers


def test_conservation():
    """On each node the shards together have all weights; something is pending."""
    for results in ran("torch", 4, CASES)[fsdp_conservation]:
        assert list(results) == ["4.weight", "2.weight", "0.weight"]
        for added, accounted, _ in results.values():
            torch.testing.assert_close(added, accounted, rtol=1e-5, atol=1e-6)
        assert results["0.weight"][2] > 0


def test_local_steps_average_the_nodes_shards():
    expected = averaged_every_third_step(range(6))
    results = ran("torch", 4, CASES)[fsdp_local_steps]
    for common, flushed in results:
        assert difference(common, expected) < 1e-6
        assert torch.equal(flushed, results[0][1]) and flushed.isfinite().all()
    sent = averaged_every_third_step(range(3))
    assert difference(results[0][1], sent) < 1e-6  # a flush leaves nothing in v


def test_stopped_and_resumed():
    """The state is of whole parameters, as a checkpoint of torch.distributed has it, and alike on all ranks."""
    expected = {
        (i, "momentum_buffer"): shape
        for i, shape in enumerate(((9, 12), (9,), (7, 9), (7,), (1, 7), (1,)))
    }
    for rank, (same, shapes, told) in enumerate(ran("torch", 4, CASES)[fsdp_resumed]):
        assert same and shapes == expected
        assert (
            told == f"residual_state_dict: shard must be {(rank % 2, 2)}, got {(1 - rank % 2, 2)}"
        )


def test_saved_by_torch_distributed_checkpoint():
    """Each rank gets its own shard's residuals back; whole files are refused."""
    for same, pending, told in (
        one for ranks in ran("torch", 4, CASES)[fsdp_saved] for one in ranks
    ):
        assert same and pending > 0
        assert told == [told[0]] * 2
        assert (
            told[0]
            == "the parameters must be whole, got sharded ones, of which no rank has a whole model to save"
        )


def test_a_step_that_one_shard_cannot_take_is_skipped_by_all():
    for (error, skipped, _), (scaled_error, scaled_skipped, scale) in ran("torch", 4, CASES)[
        fsdp_skipped
    ]:
        assert error < 1e-6 and scaled_error < 1e-6
        assert skipped == scaled_skipped == 1 and scale == 2.0**3


def test_ranks_with_other_shards_are_compared_too():
    assert (
        ran("torch", 4, CASES)[fsdp_differing]
        == [
            "the ranks differ in the arguments of DistributedOptimizer. Rank 1 has: clip_norm=1.0; rank 0 has: "
            "clip_norm=None"
        ]
        * 4
    )


def test_the_door():
    for nothing, node, world, native, mixed, per_tensor in ran("torch", 4, CASES)[fsdp_refusals]:
        assert nothing.startswith(
            "TypeError: process_set must be a torch.distributed.ProcessGroup for"
        )
        assert "hold different ones" in node and "hold different ones" in world
        assert "(Replicate(), Shard(dim=0))" in native
        assert "of shapes [(9, 12)], that are not" in mixed
        assert "clip_per_tensor must be False" in per_tensor


def test_a_loss_scaler_before_torch_2_5(monkeypatch):
    """Which called no hooks of sharded parameters."""
    sharded, scaler = torch.zeros(3), torch.amp.GradScaler("cpu")
    sharded.device_mesh = "a mesh"
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.4.1+cu121"))
    with pytest.raises(ValueError, match=r"torch must be 2\.5 or later .*, got 2\.4\.1"):
        checks.check_shards([{"params": [sharded]}], None, dgc.Config(), scaler)
    checks.check_shards([{"params": [torch.zeros(3)]}], None, dgc.Config(), scaler)
    for version, given in (("2.5.0", scaler), ("2.4.1", None)):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        sharded.device_mesh, sharded.placements = type("Mesh", (), {"ndim": 2})(), ()
        with pytest.raises(ValueError, match="placed as"):
            checks.check_shards([{"params": [sharded]}], None, dgc.Config(), given)
