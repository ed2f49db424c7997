"""The tasks of the peers on text: dense and DGC train as the recipes do, and less is better."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

import dgc

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import peers
import ptb
import transformer
import typer
from peers import all as everything
from peers import clock, compose, measure, table, train
from peers.words import Words

pytestmark = pytest.mark.long

METHODS = [
    name
    for name, entry in peers.METHODS.items()
    if not name.startswith("stale") and name != "async"
]


@pytest.fixture
def short(monkeypatch):
    """Text of which an epoch takes milliseconds, and an LSTM of width 40."""
    words = torch.arange(4000) * 7 % 50
    noise = torch.randint(50, (4000,), generator=torch.Generator().manual_seed(0))
    text = torch.where(
        torch.rand(4000, generator=torch.Generator().manual_seed(1)) < 0.95, words, noise
    )
    parts = {"train": text[:3000], "valid": text[3000:3500], "test": text[3500:]}
    for recipe in (ptb, transformer):
        monkeypatch.setattr(recipe, "load", lambda data: ("topics", 50, parts))
    monkeypatch.setitem(ptb.SIZES, "small", (40, 0.2))


def run(method, out, **options):
    train.main(
        method,
        **{"task": "ptb", "epochs": 4, "virtual_workers": 2, "threads": 1, "out": out, **options},
    )
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    "method, recipe", [("dense", "dense"), ("dgc-allgather", "dgc"), ("dgc-reduce", "dgc")]
)
def test_it_is_the_recipes_training(method, recipe, short, tmp_path):
    """Epoch by epoch, with dropout, clipping, the hidden state, the warm-up and the rate's division; and the test."""
    found = run(method, tmp_path / "a.json")
    ptb.main(
        method=recipe,
        epochs=4,
        batch_size=10,
        virtual_workers=2,
        threads=1,
        warmup_epochs=4 / 40,
        exchange=method.removeprefix("dgc-") if recipe == "dgc" else "allgather",
        out=tmp_path / "b.json",
    )
    expected = json.loads((tmp_path / "b.json").read_text())
    for own, other in zip(found["history"], expected["history"], strict=True):
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert own["perplexity"] == pytest.approx(other["perplexity"], rel=1e-4)
        assert own["bytes_per_step"] == pytest.approx(other["bytes_per_step"])
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-4)
    # Of the test, and of the validation.
    assert found["perplexity"] != found["history"][-1]["perplexity"]
    assert (
        found["task"] == "ptb"
        and found["settings"]["batch_size"] == 5
        and found["settings"]["lr"] == 20
    )


@pytest.mark.parametrize(
    "method, options",
    [
        ("dense", {"method": "dense"}),
        (
            "dgc-local",
            {
                "sparsity": "piecewise:0=0,227=0.9375",
                "value_bits": 2,
                "local_steps": "0=1,227=3,908=5,1816=12,2724=36",
                "lr": 4e-3,
                "beta2": 0.99975,
            },
        ),
    ],
)
def test_the_transformers_is_its_recipes_too(method, options, short, tmp_path):
    """With AdamW, and a rate that falls from step to step."""
    found = run(method, tmp_path / "a.json", task="transformer", epochs=1, batch_size=2)
    transformer.main(
        **options,
        epochs=1,
        batch_size=4,
        virtual_workers=2,
        threads=1,
        out=tmp_path / "b.json",
    )
    expected = json.loads((tmp_path / "b.json").read_text())
    (own,), (other,) = found["history"], expected["history"]
    assert own["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert own["perplexity"] == pytest.approx(other["perplexity"], rel=1e-4)
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_learns_and_goes_on_from_a_checkpoint(method, short, tmp_path):
    whole = run(method, tmp_path / "a.json", checkpoints=tmp_path / "epochs")
    if method != "diloco-even":  # whose first exchanges go a fifth of the way
        assert whole["history"][-1]["perplexity"] < whole["history"][0]["perplexity"]
    for rank in range(2):
        (tmp_path / "epochs" / train.FILE.format(4, rank)).unlink()
    again = run(method, tmp_path / "b.json", checkpoints=tmp_path / "epochs", resume=True)
    for own, other in zip(again["history"], whole["history"], strict=True):
        assert (
            own.pop("bytes_per_step") == pytest.approx(other.pop("bytes_per_step")) and own == other
        )
    assert again["perplexity"] == whole["perplexity"]


def moved(name, own):
    """What two ranks' SGD subtracts in a step with these gradients, clipped to 1 where the method leaves it to SGD."""

    def worker():
        p = torch.nn.Parameter(torch.zeros(1, 2))
        p.grad = torch.tensor([own[dgc.lockstep.current().world.rank]])
        peers.attach(name, torch.optim.SGD([p], 1.0), [("p", p)], 0, 0.9, 1.0).step(last=True)
        return -p.detach()

    return dgc.lockstep.run(worker, 2)[0]


def test_the_exchanged_gradient_is_clipped_or_each_workers_own(short, monkeypatch):
    own, mean = [[3.0, 4.0], [0.0, 12.0]], torch.tensor([[1.5, 8.0]])
    torch.testing.assert_close(moved("dense", own), mean / mean.norm(), rtol=1e-5, atol=0)
    # The outer step, from rest.
    torch.testing.assert_close(moved("diloco", own), 0.7 * 1.9 * mean, rtol=1e-5, atol=0)
    torch.testing.assert_close(moved("local-sgd", own), mean, rtol=1e-5, atol=0)
    monkeypatch.setattr(Words, "clip", 1e-3)
    for method in METHODS:  # what a task leaves for the exchange
        a = argparse.Namespace(data=None, batch_size=2, seed=0, method=method)
        (words,) = dgc.lockstep.run(lambda a=a: Words(a, 0, 1, torch.device("cpu")), 1)
        words.backward(next(words.batches(0)))
        norm = torch.stack([p.grad.norm() for p in words.model.parameters()]).norm().item()
        assert (
            norm == pytest.approx(1e-3, rel=1e-2)
            if peers.METHODS[method].clips_own
            else norm > 1e-2
        )
    assert {name for name in METHODS if peers.METHODS[name].clips_own} == {
        "signsgd",
        "demo",
        "diloco",
        "diloco-even",
        "local-sgd",
        "dgc-local",
    }


def test_ranks_must_have_the_same_text(monkeypatch):
    """Python's documentation differs from version to version."""

    def load(data):
        text = torch.arange(600) % (7 + dgc.lockstep.current().world.rank)
        return "topics", 50, {"train": text, "valid": text, "test": text}

    monkeypatch.setattr(ptb, "load", load)
    a = argparse.Namespace(data=None, batch_size=2, seed=0, method="dense")
    with pytest.raises(SystemExit, match="rank 1 has another text than rank 0"):
        dgc.lockstep.run(
            lambda: Words(a, dgc.lockstep.current().world.rank, 2, torch.device("cpu")), 2
        )


@pytest.mark.parametrize(
    "options, error",
    [
        ({"method": "async"}, "--method must be one that trains --task ptb, got async"),
        ({"method": "stale"}, "--method must be one that trains --task ptb"),
        ({"task": "transformer", "method": "qsgd"}, "--method must be one that trains --task tr"),
        ({"bf16": True}, "--bf16 must be left out with --task ptb"),
        ({"depth": 20}, "--depth must be left out with --task ptb, got 20"),
        ({"task": "mnist"}, "--task must be one of cifar10, ptb, transformer, got mnist"),
    ],
)
def test_what_does_not_fit_is_refused(options, error, tmp_path):
    with pytest.raises(typer.BadParameter, match=error):
        run(**{"method": "dense", "out": tmp_path / "a.json", **options})


# -- less is better ----------------------------------------------------------------------------------------------------


def result(method, seed, perplexities, **more):
    entry = peers.METHODS[method]
    return {
        "task": "ptb",
        "dataset": "ptb",
        "workers": 4,
        "epochs": 3,
        "steps_per_epoch": 100,
        "parameters": 1000,
        "method": method,
        "title": entry.title,
        "paper": entry.paper,
        "collective": entry.collective,
        "seed": seed,
        "perplexity": perplexities[-1] - 1,
        "bytes_per_step": 6000.0,
        "ratio": 1.0,
        "exchanging": 1.0,
        "settings": {"batch_size": 5},
        "rate": "1gbit",
        "bytes_sent": 1e6,
        "history": [
            {"epoch": i + 1, "perplexity": x, "seconds": 2.0} for i, x in enumerate(perplexities)
        ],
        **more,
    }


def files(tmp_path, *results):
    for i, one in enumerate(results):
        (tmp_path / f"{i}.json").write_text(json.dumps(one))
    return [tmp_path / f"{i}.json" for i in range(len(results))]


def test_a_perplexity_is_lost_in_per_cent_and_reached_from_above(tmp_path, capsys):
    runs = table.load(
        files(
            tmp_path,
            result("dense", 0, [130.0, 115.0, 201.0]),
            result("qsgd", 0, [140.0, 114.9, 211.0]),
            result("fp16", 0, [130.0, 120.0, 216.0]),
        )
    )
    rows = {row["method"]: row for row in table.rows(runs)}
    # 210 of the test, beside 200.
    assert rows["qsgd"]["lost"] == pytest.approx(5.0) and rows["dense"]["lost"] == 0
    assert [rows[name]["epochs"] for name in ("dense", "qsgd", "fp16")] == [2, 2, None]
    assert rows["dense"]["order"] < rows["qsgd"]["order"] < rows["fp16"]["order"]
    table.main(sorted(tmp_path.glob("*.json")), out=tmp_path / "peers.png")
    printed = capsys.readouterr().out
    assert "test perplexity | perplexity above dense (%) [90 %] |" in printed
    assert "seconds to 115 at 1 Gbit/s" in printed and "| 210.00 | +5.00 |" in printed
    assert (tmp_path / "peers.png").exists()
    compose.draw([], 115.0, Words.metric, table.style, tmp_path / "seconds.png")


def test_the_clock_stops_at_a_perplexity_that_is_low_enough(short, tmp_path):
    one = result("dense", 0, [130.0, 115.0, 101.0])
    assert clock.reached(one, 115) == 4 and clock.reached(one, 100) is None
    assert "| dense | 1 Gbit/s | 4 | 3 | 101.00 | 0.020 | 1.0 MB |" in clock.markdown(
        [{**one, "target": 115}]
    )
    history = run("dense", tmp_path / "a.json", epochs=6, target=1000.0)["history"]
    assert len(history) == 1 and history[0]["seconds"] > 0


def test_its_steps_are_measured_and_composed(tmp_path):
    with pytest.raises(SystemExit) as stop:
        measure.main("dense,diloco", "none", 2, 4, 2, tmp_path / "m.json", "ptb")
    assert stop.value.code == 0
    found = json.loads((tmp_path / "m.json").read_text())
    assert set(found["seconds"]) == {"compute float32", "local dense", "local diloco"}
    model = ptb.LanguageModel(10_000, 200, 0.2)
    assert (
        found["parameters"] == sum(p.numel() for p in model.parameters())
        and found["batch_size"] == 5
    )
    runs = table.load(files(tmp_path, result("dense", 0, [130.0], parameters=found["parameters"])))
    assert compose.local(compose.load(tmp_path / "m.json", runs), "dense", 1.0) > 0
    with pytest.raises(typer.BadParameter, match=r"--methods must be of .*, got 'async'"):
        measure.main("async", "none", 2, 4, 2, tmp_path / "n.json", "ptb")
    with pytest.raises(
        typer.BadParameter, match="must have the task of the runs, ptb, got cifar10"
    ):
        (tmp_path / "m.json").write_text(json.dumps({**found, "task": "cifar10"}))
        compose.load(tmp_path / "m.json", runs)


def test_tasks_are_not_mixed(tmp_path):
    other = result("qsgd", 0, [140.0], task="cifar10", dataset="cifar10")
    with pytest.raises(
        typer.BadParameter, match="task must be the same in all files, got cifar10, ptb"
    ):
        table.load(files(tmp_path, result("dense", 0, [130.0]), other))


def test_hosts_are_not_made_for_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(clock, "check_tools", lambda: None)
    for options, error in (
        ({"methods": "dense,async"}, r"--methods must be of .*, got 'async'"),
        ({"task": "mnist"}, "--task must be of cifar10, ptb, transformer, got 'mnist'"),
    ):
        with pytest.raises(typer.BadParameter, match=error):
            clock.main(**{"task": "ptb", **options})


def test_its_runs_have_an_order_and_a_folder_of_their_own(monkeypatch):
    asked = []
    monkeypatch.setattr(
        everything, "done", lambda file, asked_for: asked.append((file, asked_for)) or True
    )
    with pytest.raises(SystemExit) as stop:
        everything.main("topics", seeds="0", task="ptb")
    assert stop.value.code == 0
    assert [each["method"] for _, each in asked] == [
        "dense",
        "dgc-allgather",
        "powersgd-4",
        "qsgd",
        "fp16",
        "diloco",
    ]
    assert {each["task"] for _, each in asked} == {"ptb"} and {
        file.parent.name for file, _ in asked
    } == {"peers-ptb"}
