"""Hugging Face Accelerate itself, on two processes: its own DDP and a script of a few lines are the references."""

import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from launch import ran
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgc

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed (make examples)")

from dgc.integrations.accelerate import compress  # noqa: E402

SPARSE, CLIPPED = (
    dgc.Config(sparsity=0.9, min_numel=64),
    dgc.Config(sparsity=0.9, min_numel=64, clip_norm=0.2),
)
LOCAL = dgc.Config(sparsity=0.0, value_bits=4, local_steps=3, min_numel=64)
EPOCHS, BATCH, STEPS = 3, 8, 4  # batches of each rank in an epoch


def network(dropout):
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 64),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(64, 32),
        nn.Tanh(),
        nn.Linear(32, 5),
    )


def samples():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * STEPS * BATCH, 20, generator=generator)
    return torch.utils.data.TensorDataset(x, x[:, :5].argmax(1))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def made(config, dropout=0.0, scaler=None, **arguments):
    """What a script has when its training begins."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, step_scheduler_with_optimizer=False, **arguments)
    accelerator.scaler = scaler
    model = network(dropout)
    optimizer = sgd(model.parameters())
    loader = torch.utils.data.DataLoader(samples(), batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    )
    if config is not None:
        compress(accelerator, model, optimizer, config)
    torch.manual_seed(7 + accelerator.process_index)
    return accelerator, model, optimizer, loader, scheduler


def train(parts, epochs=EPOCHS, clip=None):
    """Trains, with a gradient changed too late being an error. Returns the parameters."""
    accelerator, model, optimizer, loader, scheduler = parts
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gradient.*")
        for _ in range(epochs):
            for x, y in loader:
                with accelerator.accumulate(model):
                    with accelerator.autocast():
                        loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    if clip is not None and accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                        # With local steps torch clips, and with a scaler it was not told of the scale.
                        if accelerator.scaler is None and not hasattr(
                            optimizer.optimizer, "_rounds"
                        ):
                            grads = torch.cat([p.grad.flatten() for p in model.parameters()])
                            torch.testing.assert_close(norm, grads.norm())
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            scheduler.step()
    return flat(model)


# -- jobs: each on both ranks ------------------------------------------------------------------------------------------


def dense():
    return {
        name: [train(made(config, **arguments)) for config in (None, dgc.Config(sparsity=0.0))]
        for name, arguments in {
            "plain": {},
            "accumulated": {"gradient_accumulation_steps": 2},
            "bf16": {"mixed_precision": "bf16"},
        }.items()
    }


def script(precision=False, accumulate=1, config=SPARSE, scaler=None, clip=None):
    """The same training without Accelerate."""
    model, rank = DistributedDataParallel(network(0.0)), torch.distributed.get_rank()
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    dgc.register_comm_hook(model, optimizer, config, grad_scaler=scaler)
    batches = list(torch.utils.data.DataLoader(samples(), batch_size=BATCH))[rank::2]
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(batches):
            sync = (i + 1) % accumulate == 0
            with torch.enable_grad() if sync else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=precision):
                    loss = nn.functional.cross_entropy(model(x), y)
                loss = loss / accumulate
                (loss if scaler is None else scaler.scale(loss)).backward()
            if sync and scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            elif sync:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            if sync:
                optimizer.zero_grad()
        scheduler.step()
    return flat(model)


def like_a_script():
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=128.0)

    return {
        "plain": (train(made(SPARSE)), script()),
        "accumulated": (train(made(SPARSE, gradient_accumulation_steps=2)), script(accumulate=2)),
        "bf16": (train(made(SPARSE, mixed_precision="bf16")), script(precision=True)),
        "clipped": (train(made(CLIPPED), clip=0.2), script(config=CLIPPED)),
        "scaled": (
            train(made(CLIPPED, scaler=scaler()), clip=0.2),
            script(config=CLIPPED, scaler=scaler()),
        ),
        "local steps": (train(made(LOCAL), clip=0.2), script(config=LOCAL, clip=0.2)),
        "compiled": (train(made(SPARSE, dynamo_backend="aot_eager")), script()),
        "looked at": (train(made(SPARSE), clip=float("inf")), script()),
    }


def resumed():
    """Three epochs at once; and one, then two more in a new accelerator."""
    name = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(name)
    results = {}
    for key, config, clip in (
        ("plain", SPARSE, None),
        ("clipped", CLIPPED, 0.2),
        ("local steps", LOCAL, 0.2),
    ):
        whole = train(made(config, dropout=0.2), clip=clip)
        folder = Path(name[0]) / key
        parts = made(config, dropout=0.2)
        train(parts, 1, clip)
        parts[0].save_state(str(folder))
        torch.distributed.barrier()
        again = made(config, dropout=0.2)
        again[0].load_state(str(folder))
        norms = [each[2].optimizer.report().residual_norm for each in (parts, again)]
        results[key] = whole, train(again, EPOCHS - 1, clip), norms
    return results


def two_models():
    """As of a GAN: what each has pending, saved and taken up."""
    name = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(name)

    def both(retries):
        accelerator, *pair, _, _ = made(SPARSE)
        if retries:
            accelerator.free_memory()  # as find_executable_batch_size() does
        pairs = [] if retries else [pair]
        while len(pairs) < 2:
            inner = network(0.0)
            pairs.append(accelerator.prepare(inner, sgd(inner.parameters())))
            compress(accelerator, *pairs[-1], SPARSE)
        return accelerator, *zip(*pairs, strict=True)

    accelerator, models, optimizers = both(False)
    for model, optimizer in zip(models, optimizers, strict=True):
        accelerator.backward(model(torch.randn(8, 20)).square().sum())
        optimizer.step()
    accelerator.save_state(name[0])
    again, _, others = both(True)
    again.load_state(name[0])
    return [
        [each.optimizer.residual_state_dict() for each in pair] for pair in (optimizers, others)
    ]


def from_ddp():
    """A state that was saved without DGC, gone on with at sparsity 0."""
    name = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(name)
    parts = made(None)
    train(parts, 1)
    parts[0].save_state(name[0])
    torch.distributed.barrier()
    results = []
    for config in (None, dgc.Config(sparsity=0.0)):
        parts = made(config)
        parts[0].load_state(name[0])
        results.append(train(parts, 2))
    return results


def refused():
    errors = []
    for config, clip in ((SPARSE, 0.5), (CLIPPED, 0.5)):
        try:
            train(made(config), 1, clip)
        except ValueError as error:
            errors.append(str(error))
    accelerator, model, optimizer, *_ = made(None)
    try:
        compress(accelerator, model, optimizer.optimizer)
    except TypeError as error:
        errors.append(str(error))
    other = nn.Linear(3, 3)  # whose gradients are Accelerate's business
    compress(accelerator, model, optimizer, CLIPPED)
    other(torch.ones(1, 3)).sum().backward()
    accelerator.clip_grad_norm_(other.parameters(), 0.5)
    try:
        accelerator.clip_grad_norm_([*model.parameters(), *other.parameters()], 0.2)
    except ValueError as error:
        errors.append(str(error))
    return errors, torch.cat([p.grad.flatten() for p in other.parameters()]).norm().item()


JOBS = (dense, like_a_script, resumed, two_models, from_ddp, refused)


def of(job):
    """What the ranks returned."""
    here = sys.modules[__name__]
    return ran("torch", 2, [getattr(here, other.__name__) for other in JOBS])[job]


# -- laws --------------------------------------------------------------------------------------------------------------


def test_at_sparsity_0_it_is_accelerates_ddp():
    for results in of(dense):
        for name in ("plain", "accumulated"):
            theirs, ours = results[name]
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-6), (
                name,
                (ours - theirs).abs().max(),
            )
        # A forward pass in bf16 turns the last bit of a float32 into one of its own.
        theirs, ours = results["bf16"]
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-3), (ours - theirs).abs().max()


@pytest.mark.parametrize(
    "name",
    ["plain", "accumulated", "bf16", "clipped", "scaled", "local steps", "compiled", "looked at"],
)
def test_it_is_a_script_with_the_hook_to_the_bit(name):
    first, second = of(like_a_script)
    assert torch.equal(*first[name]) and torch.equal(first[name][0], second[name][0])


@pytest.mark.parametrize("name", ["plain", "clipped", "local steps"])
def test_resumed_it_goes_on_to_the_bit(name):
    for rank in of(resumed):
        whole, again, norms = rank[name]
        assert torch.equal(whole, again) and norms[0] == norms[1] > 0


def test_each_model_has_a_part_of_its_own():
    for saved, loaded in of(two_models):
        for before, after in zip(saved, loaded, strict=True):
            assert all(
                torch.equal(before[letter][name], after[letter][name])
                for letter in "uv"
                for name in before[letter]
            )
        assert any(
            not torch.equal(saved[0]["v"][name], saved[1]["v"][name]) for name in saved[0]["v"]
        )


def test_one_process_says_what_it_leaves_out(tmp_path):
    accelerator = made(SPARSE)[0]
    accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))
    (tmp_path / "dgc").mkdir()
    with pytest.warns(
        UserWarning, match=r"what these had pending in .*dgc, and the momentum .* is left out"
    ):
        accelerator.load_state(str(tmp_path))


def test_a_state_without_dgc_goes_on():
    for theirs, ours in of(from_ddp):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


def test_what_cannot_be_is_refused():
    for (unknown, other, wrapper, both), norm in of(refused):
        assert both.startswith(
            "parameters must be all of models whose gradients are compressed, or none of them"
        )
        assert (
            unknown.startswith("max_norm must be that of Config(clip_norm=...)")
            and "None" in unknown
        )
        assert "0.2, with norm_type 2, got 0.5 and 2" in other
        assert wrapper == "optimizer must be the one that accelerator.prepare() returned, got a SGD"
        assert norm == pytest.approx(0.5, abs=1e-6)
