"""The transformer with AdamW, on Python's documentation."""

import argparse
import inspect
import json
import shutil

import pytest
import torch
from launching import LAUNCHERS, flattened, recipe, saved

import dgc

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a little of Python's documentation, as Penn Treebank's files."""
    from ptb import documentation

    folder = tmp_path_factory.mktemp("ptb")
    for part, lines in documentation().items():
        words = [word for line in lines for word in (*line, "\n")][
            : 6000 if part == "train" else 400
        ]
        (folder / f"ptb.{part}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture
def transformer(text):
    """Trains a small one without dropout within this process: settings -> result."""
    import job
    import transformer

    def run(**changed):
        settings = {
            name: option.default
            for name, option in inspect.signature(transformer.main).parameters.items()
        }
        a = argparse.Namespace(
            **{
                **settings,
                "data": text,
                "epochs": 2,
                "width": 32,
                "dropout": 0.0,
                "batch_size": 8,
                "length": 20,
                "virtual_workers": 2,
                **changed,
            }
        )
        return job.run(lambda: transformer.train(a), a)

    return run


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_it_runs_everywhere(launcher, text, tmp_path):
    """Two workers each, compressed, with dropout."""
    virtual = ["--virtual-workers", "2"] if launcher == "python" else []
    status, output = recipe(
        "--epochs",
        "2",
        "--width",
        "32",
        "--batch-size",
        "8",
        *virtual,
        "--out",
        f"{tmp_path}/out.json",
        launcher=LAUNCHERS[launcher],
        limit=100,
        file="transformer.py",
        data=str(text),
    )
    assert status == 0, output
    assert output.count("dgc: test perplexity ") == 1 and "on ptb after 2 epochs" in output
    result = json.loads((tmp_path / "out.json").read_text())
    assert (
        result["workers"] == 2
        and result["history"][1]["bytes_per_step"] < result["dense_bytes_per_step"] / 5
    )
    assert result["history"][1]["loss"] < result["history"][0]["loss"]


def test_dense_training_is_that_of_one_worker_with_all_of_the_batch(transformer):
    """So AdamW sees the averaged gradient."""
    one, two = (transformer(method="dense", virtual_workers=n) for n in (1, 2))
    assert one["perplexity"] == pytest.approx(two["perplexity"], rel=1e-3)
    assert two["perplexity"] < two["history"][0]["perplexity"] < two["vocabulary"]


def test_a_whole_schedule_takes_the_place_of_the_dense_epochs():
    import transformer as recipe
    import typer

    settings = {
        name: option.default for name, option in inspect.signature(recipe.main).parameters.items()
    }
    a = argparse.Namespace(**{**settings, "sparsity": "warmup:epochs=2,end=0.99"})
    schedule = recipe.config(a, 10).sparsity
    assert [schedule(step) for step in range(30)] == [
        dgc.schedule.parse(a.sparsity, 10)(step) for step in range(30)
    ]
    a.dense_epochs = 1.0
    with pytest.raises(typer.BadParameter, match="--dense-epochs must be left out"):
        recipe.config(a, 10)


def test_it_resumes_to_the_bit(transformer, tmp_path):
    whole = transformer(checkpoints=tmp_path / "whole", epochs=3)
    shutil.copytree(tmp_path / "whole" / "epoch002", tmp_path / "cut" / "epoch002")
    resumed = transformer(checkpoints=tmp_path / "cut", epochs=3, resume=True)
    assert [epoch["loss"] for epoch in resumed["history"]] == [
        epoch["loss"] for epoch in whole["history"]
    ]
    for rank in range(2):
        one, other = (
            flattened(saved(tmp_path / name / "epoch003", rank)["residuals"])
            for name in ("whole", "cut")
        )
        assert len(one) == len(other) > 10
        assert all(
            name == same and torch.equal(x, y)
            for (name, x), (same, y) in zip(one, other, strict=True)
        )


@pytest.mark.timeout(120)
def test_the_number_of_local_steps_may_rise(transformer):
    """A round in each step, and from step 8 on one in four steps, of the same bytes. Flushing sends float32."""
    settings = {"sparsity": "constant:0", "value_bits": 8, "lr": 0.004}
    every, rises = (transformer(local_steps=text, **settings) for text in ("1", "0=1,8=4"))
    steps = 2 * every["steps_per_epoch"]
    rounds, flush = 8 + (steps - 8) // 4, 32 / 8
    expected = every["bytes_sent"] * (rounds + flush) / (steps + flush)
    assert rises["bytes_sent"] == pytest.approx(expected, rel=0.02)
