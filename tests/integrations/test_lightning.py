"""PyTorch Lightning itself, on two processes: its own DDP and a script of a few lines are the references."""

import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from launch import ran
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dgc

lightning = pytest.importorskip("lightning", reason="lightning is not installed (make examples)")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

from dgc.integrations.lightning import DGCStrategy  # noqa: E402

SPARSE = dgc.Config(sparsity=0.9, min_numel=64)
LOCAL = dgc.Config(sparsity=0.0, value_bits=4, local_steps=3, min_numel=64)
EPOCHS, BATCH, STEPS = 3, 8, 4  # batches of each rank in an epoch


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 64),
        nn.Tanh(),
        nn.Dropout(0.2),
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


class Module(lightning.LightningModule):
    """With dropout or without; ``optimizers_made``: how many there are."""

    def __init__(self, dropout=True, optimizers_made=1):
        super().__init__()
        self.net, self.optimizers_made = network(), optimizers_made
        self.automatic_optimization = optimizers_made == 1  # as Lightning wants it
        if not dropout:
            self.net[2].p = 0.0

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        if self.optimizers_made > 1:
            return [sgd(self.net[0].parameters()), sgd(self.net[3:].parameters())]
        optimizer = sgd(self.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        }

    def train_dataloader(self):
        return torch.utils.data.DataLoader(samples(), batch_size=BATCH, shuffle=True)


def parameters(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def fit(strategy, module=None, path=None, epochs=EPOCHS, **arguments):
    """Trains, with a gradient changed too late being an error. Returns the module and the trainer."""
    module = Module() if module is None else module
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    arguments.setdefault("enable_checkpointing", False)
    torch.manual_seed(5)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        log_every_n_steps=1,
        **quiet,
        **arguments,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gradient.*")
        trainer.fit(module, ckpt_path=path)
    return module, trainer


def compressed(config=SPARSE):
    return DGCStrategy(config)


@cache
def temporary():
    return tempfile.TemporaryDirectory()


@cache
def folder():
    """One folder of both ranks, as long as rank 0 lives."""
    made = [temporary().name]
    torch.distributed.broadcast_object_list(made)
    return Path(made[0])


# -- jobs: each on both ranks ------------------------------------------------------------------------------------------


def dense():
    """At sparsity 0, beside Lightning's DDP: plain, accumulating, in bf16."""
    results = {}
    for name, arguments in {
        "plain": {},
        "accumulated": {"accumulate_grad_batches": 2},
        "bf16": {"precision": "bf16-mixed"},
    }.items():
        pair = [
            fit(strategy, Module(dropout=False), **arguments)[0]
            for strategy in (DDPStrategy(), compressed(dgc.Config(sparsity=0.0)))
        ]
        results[name] = [parameters(module) for module in pair]
    return results


def script(precision=False, accumulate=1, config=SPARSE, scaler=None, clip=None):
    """The same training without Lightning."""
    model = network()
    model[2].p = 0.0
    model, total = DistributedDataParallel(model), EPOCHS * STEPS // accumulate
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    dgc.register_comm_hook(model, optimizer, config, grad_scaler=scaler)
    sampler = torch.utils.data.DistributedSampler(samples(), shuffle=True, seed=0)
    loader = torch.utils.data.DataLoader(samples(), batch_size=BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            sync = (i + 1) % accumulate == 0
            with torch.enable_grad() if sync else model.no_sync():
                with torch.autocast(
                    "cpu", torch.float16 if scaler else torch.bfloat16, enabled=precision
                ):
                    loss = nn.functional.cross_entropy(model(x), y) / accumulate
                (scaler.scale(loss) if scaler else loss).backward()
            if sync and scaler:
                scaler.step(optimizer)
                scaler.update()
            elif sync:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            if sync:
                optimizer.zero_grad()
        scheduler.step()
    assert optimizer.report().steps == total // (config.local_steps or 1)
    return parameters(model)


def like_a_script():
    """Sparse, beside the script: plain, accumulating, in bf16, clipped, in fp16 with a loss scale."""

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=128.0)

    plain = {
        "plain": ({}, {}),
        "accumulated": ({"accumulate_grad_batches": 2}, {"accumulate": 2}),
        "bf16": ({"precision": "bf16-mixed"}, {"precision": True}),
        "clipped": (
            {"gradient_clip_val": 0.2},
            {"config": dgc.Config(sparsity=0.9, min_numel=64, clip_norm=0.2)},
        ),
        "fp16": (
            {"plugins": [MixedPrecision("16-mixed", "cpu", scaler())]},
            {"precision": True, "scaler": scaler()},
        ),
        "local steps": ({"gradient_clip_val": 0.2}, {"config": LOCAL, "clip": 0.2}),
    }
    results = {}
    for name, (ours, theirs) in plain.items():
        config = LOCAL if name == "local steps" else SPARSE
        module, trainer = fit(compressed(config), Module(dropout=False), **ours)
        assert trainer.gradient_clip_val == ours.get("gradient_clip_val")
        results[name] = parameters(module), script(**theirs)
    return results


def keep(where, **arguments):
    return ModelCheckpoint(
        folder() / where,
        filename="{epoch}-{step}",
        every_n_epochs=1,
        save_on_train_epoch_end=True,
        **arguments,
    )


def resumed():
    """Three epochs at once; and one, then two more in a new trainer, from its file and from a link to it."""
    results = {}
    for name, arguments in {
        "plain": {},
        "clipped": {"gradient_clip_val": 0.2},
        "accumulated": {"accumulate_grad_batches": 2},
        "local steps": {},
    }.items():
        config = LOCAL if name == "local steps" else SPARSE
        whole = fit(
            compressed(config),
            enable_checkpointing=True,
            callbacks=[keep(name + "-whole")],
            **arguments,
        )[0]
        fit(
            compressed(config),
            epochs=1,
            enable_checkpointing=True,
            callbacks=[keep(name, save_last="link")],
            **arguments,
        )
        torch.distributed.barrier()
        again, trainer = fit(
            compressed(config),
            path=folder() / name / "last.ckpt",
            enable_checkpointing=True,
            callbacks=[keep(name + "-again")],
            **arguments,
        )
        reports = trainer.optimizers[0].report()
        results[name] = parameters(whole), parameters(again), reports.residual_norm
    return results


def files():
    """Of a training that keeps its best two; of one that keeps one name."""
    fit(
        compressed(),
        enable_checkpointing=True,
        callbacks=[keep("two", save_top_k=2, monitor="epoch", mode="max")],
    )
    saver = ModelCheckpoint(
        folder() / "one",
        filename="one",
        every_n_train_steps=2,
        enable_version_counter=False,
        save_top_k=1,
    )
    fit(compressed(), enable_checkpointing=True, callbacks=[saver])
    for path in (
        None,
        folder() / "linked" / "last.ckpt",
    ):  # a link to the first epoch's, which stays the best
        fit(
            compressed(),
            path=path,
            epochs=1 if path is None else 2,
            enable_checkpointing=True,
            callbacks=[
                keep(
                    "linked",
                    save_last="link",
                    save_top_k=1,
                    monitor="epoch",
                    mode="min",
                    enable_version_counter=False,
                )
            ],
        )
    torch.distributed.barrier()
    return {
        name: [
            sorted(str(path.relative_to(folder() / name)) for path in (folder() / name).glob(glob))
            for glob in ("*", "*/*")
        ]
        for name in ("two", "one", "linked")
    }


def from_ddp():
    """A checkpoint of Lightning's own DDP, gone on with at sparsity 0; and that training gone on with by DDP."""
    fit(
        DDPStrategy(),
        Module(dropout=False),
        epochs=1,
        enable_checkpointing=True,
        callbacks=[keep("ddp")],
    )
    torch.distributed.barrier()
    path = next((folder() / "ddp").glob("*.ckpt"))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        return [
            parameters(fit(strategy, Module(dropout=False), path=path)[0])
            for strategy in (DDPStrategy(), compressed(dgc.Config(sparsity=0.0)))
        ]


def refused():
    errors = []
    for strategy, module, arguments in (
        (compressed(), Module(optimizers_made=2), {}),
        (compressed(), Module(), {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
        (compressed(dgc.Config(clip_norm=0.3)), Module(), {"gradient_clip_val": 0.1}),
    ):
        try:
            fit(strategy, module, **arguments)
        except ValueError as error:
            errors.append(str(error))
    return errors


JOBS = (dense, like_a_script, resumed, files, from_ddp, refused)


def of(job):
    """What the ranks returned."""
    here = sys.modules[__name__]
    return ran("torch", 2, [getattr(here, other.__name__) for other in JOBS])[job]


# -- laws --------------------------------------------------------------------------------------------------------------


def test_at_sparsity_0_it_is_lightnings_ddp():
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


@pytest.mark.parametrize("name", ["plain", "accumulated", "bf16", "clipped", "fp16", "local steps"])
def test_it_is_a_script_with_the_hook_to_the_bit(name):
    first, second = of(like_a_script)
    assert torch.equal(*first[name]) and torch.equal(first[name][0], second[name][0])
    if name != "plain":
        assert not torch.equal(first[name][0], first["plain"][0])


@pytest.mark.parametrize("name", ["plain", "clipped", "accumulated", "local steps"])
def test_resumed_it_goes_on_to_the_bit(name):
    for rank in of(resumed):
        whole, again, residual_norm = rank[name]
        assert torch.equal(whole, again) and residual_norm > 0


def test_a_checkpoints_file_and_folder_come_and_go_together():
    found = of(files)[0]
    assert found["one"] == [["one.ckpt", "one.ckpt.dgc"], ["one.ckpt.dgc/step-12"]]
    for name, steps in {
        "two": {"epoch=1-step=8": 8, "epoch=2-step=12": 12},
        "linked": {"epoch=0-step=4": 4, "last": 8},
    }.items():
        assert found[name] == [
            [f"{file}.ckpt{end}" for file in steps for end in ("", ".dgc")],
            [f"{file}.ckpt.dgc/step-{step}" for file, step in steps.items()],
        ]


def test_a_checkpoint_of_lightnings_ddp_goes_on():
    for theirs, ours in of(from_ddp):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


def test_what_cannot_be_is_refused():
    for two, value, both in of(refused):
        assert two.startswith("configure_optimizers must return one optimizer, got 2")
        assert value.startswith("gradient_clip_algorithm must be 'norm'")
        assert both.startswith("Config: clip_norm must be None or gradient_clip_val, 0.1, got 0.3")


def test_a_path_that_is_on_no_disk_is_refused():
    with pytest.raises(
        ValueError, match=r"must be on a disk with DGCStrategy, .*, got s3://bucket/x\.ckpt"
    ):
        compressed().save_checkpoint({"global_step": 1}, "s3://bucket/x.ckpt")
