"""The Trainer of transformers itself, on two processes: the stock one and a plain script are the references."""

import logging
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

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed (make examples)")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (make examples)"
)

from dgc.integrations.transformers import Trainer  # noqa: E402

SPARSE = dgc.Config(sparsity=0.9, min_numel=64)
LOCAL = dgc.Config(sparsity=0.0, value_bits=4, local_steps=3, min_numel=64)
EPOCHS, BATCH, STEPS = 2, 4, 6  # batches of each rank in an epoch


class Regression(nn.Module):
    """A model of no framework."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


def numbers():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * STEPS * BATCH, 20, generator=generator)
    return [{"x": row, "labels": row[:5]} for row in x]


def language_model(dropout):
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=40,
        n_positions=8,
        n_embd=32,
        n_layer=1,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def text():
    tokens = torch.randint(40, (2 * STEPS * BATCH, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@cache
def temporary():
    return tempfile.TemporaryDirectory()


@cache
def folder():
    """One folder of both ranks, as long as rank 0 lives."""
    made = [temporary().name]
    torch.distributed.broadcast_object_list(made)
    return Path(made[0])


def train(kind, model, data, path=None, name="out", own_optimizer=True, **arguments):
    """Trains, with a gradient changed too late being an error. Returns the trainer."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    logging.disable(logging.WARNING)
    compression = arguments.pop("compression", SPARSE)
    settings = {
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "per_device_train_batch_size": BATCH,
        **arguments,
    }
    given = transformers.TrainingArguments(
        output_dir=str(folder() / name),
        use_cpu=True,
        report_to="none",
        num_train_epochs=EPOCHS,
        disable_tqdm=True,
        learning_rate=0.05,
        logging_steps=2,
        **settings,
    )
    optimizers = (sgd(model.parameters()), None) if own_optimizer else (None, None)
    ours = {"compression": compression} if kind is Trainer else {}
    trainer = kind(model, given, train_dataset=data, optimizers=optimizers, **ours)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gradient.*was changed.*")
        warnings.filterwarnings("error", message=".*residual.*")
        trainer.train(resume_from_checkpoint=path)
    return trainer


# -- jobs: each on both ranks ------------------------------------------------------------------------------------------


def dense():
    """At sparsity 0, beside the stock Trainer."""
    at_0 = {"compression": dgc.Config(sparsity=0.0)}
    return {
        name: [
            flat(train(kind, language_model(0.0), text(), **at_0, **arguments).model)
            for kind in (transformers.Trainer, Trainer)
        ]
        for name, arguments in {
            "plain": {},
            "accumulated": {"gradient_accumulation_steps": 3},
            "bf16": {"bf16": True},
        }.items()
    }


def script(accumulate=1, precision=False, config=SPARSE, clip=None):
    """The same training without a trainer. A Trainer draws the order of its data from a generator of its own."""
    model, rank = DistributedDataParallel(Regression()), torch.distributed.get_rank()
    optimizer = sgd(model.parameters())
    dgc.register_comm_hook(model, optimizer, config)
    batches = list(torch.utils.data.DataLoader(numbers(), batch_size=BATCH))[rank::2]
    for _ in range(EPOCHS):
        for i, batch in enumerate(batches):
            sync = (i + 1) % accumulate == 0
            with torch.enable_grad() if sync else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=precision):
                    loss = model(**batch)["loss"].float()
                (loss / accumulate).backward()
            if sync:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return flat(model)


def like_a_script():
    clipped = dgc.Config(sparsity=0.9, min_numel=64, clip_norm=0.2)
    pairs = {
        "plain": ({}, {}),
        "accumulated": ({"gradient_accumulation_steps": 3}, {"accumulate": 3}),
        "bf16": ({"bf16": True}, {"precision": True}),
        "clipped": ({"max_grad_norm": 0.2}, {"config": clipped}),
        "local steps": (
            {"max_grad_norm": 0.2, "compression": LOCAL},
            {"config": LOCAL, "clip": 0.2},
        ),
    }
    same = {"lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}
    return {
        name: (
            flat(train(Trainer, Regression(), numbers(), **ours, **same).model),
            script(**theirs),
        )
        for name, (ours, theirs) in pairs.items()
    }


def resumed():
    """Two epochs at once; and the second one in a new trainer."""
    results = {}
    for name, arguments in {
        "plain": {},
        "clipped": {"max_grad_norm": 0.5},
        "accumulated": {"gradient_accumulation_steps": 3},
        "AdamW": {"own_optimizer": False, "adam_beta2": 0.5},
        "local steps": {"own_optimizer": False, "compression": LOCAL},
    }.items():
        saving = {"save_strategy": "steps", "save_steps": 2, **arguments}
        whole = train(Trainer, language_model(0.1), text(), name=name, **saving)
        torch.distributed.barrier()
        middle = 2 if name == "accumulated" else 4  # within an epoch
        path = str(folder() / name / f"checkpoint-{middle}")
        again = train(Trainer, language_model(0.1), text(), path, name + "-again", **saving)
        results[name] = (
            flat(whole.model),
            flat(again.model),
            again.optimizer.optimizer.report().residual_norm,
        )
    return results


def from_stock():
    """A checkpoint of the stock Trainer, gone on with at sparsity 0; and trained once more by the same trainer."""
    train(transformers.Trainer, language_model(0.0), text(), name="stock", save_strategy="epoch")
    torch.distributed.barrier()
    path = str(folder() / "stock" / f"checkpoint-{STEPS}")
    pair = []
    for kind in (transformers.Trainer, Trainer):
        model = language_model(0.0)
        pair.append(
            flat(train(kind, model, text(), path, compression=dgc.Config(sparsity=0.0)).model)
        )
    return pair


def twice():
    """The same trainer trains once more."""
    trainer = train(Trainer, language_model(0.0), text())
    before = flat(trainer.model).clone()
    trainer.train()
    return before, flat(trainer.model), trainer.optimizer.optimizer.report().steps


def retried():
    """Memory runs out in the first step, and the trainer begins anew with smaller batches."""

    class Large(Regression):
        calls = 0

        def forward(self, x, labels):
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(x, labels)

    trainer = train(Trainer, Large(), numbers(), auto_find_batch_size=True)
    return trainer.model.calls, trainer.optimizer.optimizer.report().steps, flat(trainer.model)


def refused():
    try:
        train(
            Trainer,
            Regression(),
            numbers(),
            compression=dgc.Config(clip_norm=0.3),
            max_grad_norm=1.0,
        )
    except ValueError as error:
        return str(error)


JOBS = (dense, like_a_script, resumed, from_stock, twice, retried, refused)


def of(job):
    """What the ranks returned."""
    here = sys.modules[__name__]
    return ran("torch", 2, [getattr(here, other.__name__) for other in JOBS])[job]


# -- laws --------------------------------------------------------------------------------------------------------------


def test_at_sparsity_0_it_is_the_stock_trainer():
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


@pytest.mark.parametrize("name", ["plain", "accumulated", "bf16", "clipped", "local steps"])
def test_it_is_a_script_with_the_hook_to_the_bit(name):
    first, second = of(like_a_script)
    assert torch.equal(*first[name]) and torch.equal(first[name][0], second[name][0])


@pytest.mark.parametrize("name", ["plain", "clipped", "accumulated", "AdamW", "local steps"])
def test_resumed_it_goes_on_to_the_bit(name):
    for rank in of(resumed):
        whole, again, residual_norm = rank[name]
        assert torch.equal(whole, again) and residual_norm > 0


def test_a_checkpoint_of_the_stock_trainer_goes_on():
    for theirs, ours in of(from_stock):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


def test_it_can_train_twice():
    (before, after, steps), (_, other, _) = of(twice)
    assert (
        not torch.equal(before, after) and torch.equal(after, other) and steps == 2 * EPOCHS * STEPS
    )


def test_two_bounds_are_refused():
    for error in of(refused):
        assert error.startswith("Config: clip_norm must be None or max_grad_norm, 1.0, got 0.3")


def test_it_goes_on_with_smaller_batches():
    """transformers wraps the model anew then, and keeps the optimizer."""
    (calls, steps, first), (_, _, second) = of(retried)
    assert steps == calls - 1 and torch.equal(first, second)


def test_one_process_says_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "folder", lambda: tmp_path)
    train(Trainer, Regression(), numbers(), save_strategy="epoch")
    checkpoint = min((tmp_path / "out").glob("checkpoint-*"))
    (checkpoint / "dgc").mkdir()
    with pytest.warns(
        UserWarning, match=r"what these had pending in .*dgc, and the momentum .* is left out"
    ):
        train(Trainer, Regression(), numbers(), str(checkpoint))
