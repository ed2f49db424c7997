"""Lightning's Fabric, on two processes: beside a script without it."""

import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from launch import ran
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgc

fabric = pytest.importorskip(
    "lightning.fabric", reason="lightning is not installed (make examples)"
)

from dgc.integrations.fabric import compress  # noqa: E402

STEPS, BATCH = 12, 16
CASES = {
    "plain": {},
    "clipped": {"clip_norm": 0.2},
    "accumulated": {"accumulate": 2},
    "bf16": {"bf16": True},
    "compiled": {"compiled": True},
}


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 5)
    )


def batch(step):
    generator = torch.Generator().manual_seed(2 * step + torch.distributed.get_rank())
    x = torch.randn(BATCH, 20, generator=generator)
    return x, x[:, :5].argmax(1)


def made(clip_norm):
    """A model, its optimizer and the config."""
    model = network()
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
        dgc.Config(sparsity=0.9, min_numel=64, clip_norm=clip_norm),
    )


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def script(clip_norm=None, accumulate=1, bf16=False, compiled=False):
    """Without Fabric."""
    model, optimizer, config = made(clip_norm)
    model = DistributedDataParallel(model)
    dgc.register_comm_hook(model, optimizer, config)
    for step in range(STEPS):
        last = (step + 1) % accumulate == 0
        x, y = batch(step)
        with torch.enable_grad() if last else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = nn.functional.cross_entropy(model(x).float(), y) / accumulate
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


def with_fabric(
    clip_norm=None,
    accumulate=1,
    bf16=False,
    compiled=False,
    steps=range(STEPS),
    load=None,
    save=None,
):
    """With it; ``load`` and ``save`` are folders of checkpoints."""
    lightning = fabric.Fabric(
        accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed" if bf16 else "32-true"
    )
    lightning.launch()
    net, sgd, config = made(clip_norm)
    model, optimizer = lightning.setup(
        torch.compile(net, backend="aot_eager") if compiled else net, sgd
    )
    compress(lightning, model, optimizer, config)
    if load is not None:
        dgc.load_checkpoint(load, model.module, optimizer.optimizer)
    for step in steps:
        last = (step + 1) % accumulate == 0
        x, y = batch(step)
        with lightning.no_backward_sync(model, enabled=not last):
            lightning.backward(nn.functional.cross_entropy(model(x).float(), y) / accumulate)
        if last:
            optimizer.step()
            optimizer.zero_grad()
    if save is not None:
        dgc.save_checkpoint(save, model.module, optimizer.optimizer)
    return parameters(net)


@cache
def temporary():
    return tempfile.TemporaryDirectory()


def like_a_script():
    return {name: (with_fabric(**case), script(**case)) for name, case in CASES.items()}


def resumed():
    place = [temporary().name]
    torch.distributed.broadcast_object_list(place)
    half = STEPS // 2
    with_fabric(steps=range(half), save=Path(place[0]))
    return with_fabric(), with_fabric(steps=range(half, STEPS), load=Path(place[0]))


def of(job):
    """What the ranks returned."""
    here = sys.modules[__name__]
    return ran("torch", 2, [getattr(here, other.__name__) for other in (like_a_script, resumed)])[
        job
    ]


@pytest.mark.parametrize("name", CASES)
def test_it_is_a_script_without_fabric_to_the_bit(name):
    first, second = of(like_a_script)
    assert torch.equal(*first[name]) and torch.equal(first[name][0], second[name][0])
    if name not in ("plain", "compiled"):
        assert not torch.equal(first[name][0], first["plain"][0])


def test_resumed_it_goes_on_to_the_bit():
    for whole, again in of(resumed):
        assert torch.equal(whole, again)


def test_what_was_not_set_up_is_refused():
    with pytest.raises(
        TypeError, match=r"model must be the one that fabric\.setup\(\) returned, got a Sequential"
    ):
        compress(fabric.Fabric(accelerator="cpu", devices=1), network(), None)
