"""The language model, on Python's documentation."""

import argparse
import functools
import inspect
import json
from pathlib import Path

import pytest
import torch
from launching import LAUNCHERS, flattened, recipe, saved

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a little of Python's documentation, as Penn Treebank's files."""
    from ptb import documentation

    folder = tmp_path_factory.mktemp("ptb")
    for part, lines in documentation().items():
        words = [word for line in lines for word in (*line, "\n")][
            : 3000 if part == "train" else 400
        ]
        (folder / f"ptb.{part}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture
def language_model(text, monkeypatch):
    """Trains a small model without dropout within this process: settings -> result."""
    import job
    import ptb

    monkeypatch.setitem(ptb.SIZES, "small", (32, 0.0))

    def run(**changed):
        settings = {
            name: option.default for name, option in inspect.signature(ptb.main).parameters.items()
        }
        a = argparse.Namespace(
            **{**settings, "data": text, "epochs": 1, "bptt": 20, "virtual_workers": 2, **changed}
        )
        return job.run(lambda: ptb.train(a), a)

    return run


@pytest.fixture(scope="module")
def launched(text, tmp_path_factory):
    @functools.cache
    def run(launcher):
        """A first loss and perplexities; made once."""
        tmp_path = tmp_path_factory.mktemp(launcher)
        virtual = ["--virtual-workers", "2"] if launcher == "python" else []
        status, output = recipe(
            "--epochs",
            "2",
            "--sparsity",
            "0.99",
            *virtual,
            "--out",
            f"{tmp_path}/out.json",
            "--tensorboard",
            f"{tmp_path}/board",
            launcher=LAUNCHERS[launcher],
            limit=100,
            file="ptb.py",
            data=str(text),
        )
        assert status == 0, output
        assert output.count("dgc: test perplexity ") == 1 and "on ptb after 2 epochs" in output
        assert any("tfevents" in file.name for file in (tmp_path / "board").iterdir())
        result = json.loads((tmp_path / "out.json").read_text())
        assert (
            result["workers"] == 2
            and result["history"][1]["bytes_per_step"] < result["dense_bytes_per_step"] / 2
        )
        seen = [
            result["history"][0]["losses"][0],
            result["history"][0]["perplexity"],
            result["perplexity"],
        ]
        assert max(seen) < result["vocabulary"]
        return seen

    return run


@pytest.mark.timeout(240)
@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "python"])
def test_the_language_model_runs_everywhere(launcher, launched):
    """Two workers each, compressed, with dropout: alike but for the order of additions."""
    seen, alone = (launched(name) for name in (launcher, "python"))
    assert seen == pytest.approx(alone, rel=1e-3)


@pytest.mark.timeout(120)
def test_float16_is_what_horovod_exchanges(text, tmp_path):
    """After one step at lr 1, a bias that was zero is the averaged gradient, which came in float16; but for that, it is
    the dense one.
    """
    import job
    import ptb

    settings = {"epochs": 1, "bptt": 1000, "lr": 1.0, "clip_norm": 0.0}
    status, output = recipe(
        "--method",
        "fp16",
        *(f"--{name.replace('_', '-')}={x}" for name, x in settings.items()),
        "--checkpoints",
        f"{tmp_path}/fp16",
        "--out",
        f"{tmp_path}/out.json",
        launcher=LAUNCHERS["horovodrun"],
        limit=100,
        file="ptb.py",
        data=str(text),
    )
    assert status == 0, output
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["steps_per_epoch"] == 1
    assert result["history"][0]["bytes_per_step"] == result["dense_bytes_per_step"] / 2
    defaults = {
        name: option.default for name, option in inspect.signature(ptb.main).parameters.items()
    }
    a = argparse.Namespace(
        **{
            **defaults,
            **settings,
            "data": text,
            "method": "dense",
            "virtual_workers": 2,
            "checkpoints": tmp_path / "dense",
        }
    )
    job.run(lambda: ptb.train(a), a)
    rounded, dense = (
        saved(tmp_path / method / "epoch001", 1)["model"]["decoder.bias"]
        for method in ("fp16", "dense")
    )
    assert torch.equal(rounded, rounded.half().float()) and not torch.equal(
        dense, dense.half().float()
    )
    assert (rounded - dense).norm() < 1e-3 * dense.norm()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_dense_training_of_the_language_model_is_that_of_one_process(language_model, momentum):
    """Two workers' halves of a batch, their average clipped, give torch.optim.SGD on the whole batch."""
    together, alone = (
        language_model(
            method="dense",
            momentum=momentum,
            lr=20 * (1 - momentum),
            epochs=2,
            virtual_workers=workers,
        )
        for workers in (2, 1)
    )
    assert [epoch["perplexity"] for epoch in together["history"]] == pytest.approx(
        [epoch["perplexity"] for epoch in alone["history"]], rel=1e-4
    )
    assert together["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-4)


def test_the_language_model_is_trained_with_the_state_that_the_batch_before_left(
    language_model, text
):
    """Against the loop written out: plain SGD, the gradient's norm at most 0.25."""
    import ptb

    result = language_model(method="dense", virtual_workers=1, bptt=50)
    torch.manual_seed(0)
    _, vocabulary, parts = ptb.load(text)
    model, words, hidden, losses = (
        ptb.LanguageModel(vocabulary, 32, 0.0),
        ptb.columns(parts["train"], 20),
        None,
        [],
    )
    sgd = torch.optim.SGD(model.parameters(), 20.0)
    for start in range(0, len(words) - 1, 50):
        following = words[start + 1 : start + 51]
        logits, hidden = model(words[start : start + len(following)], hidden)
        sgd.zero_grad()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        sgd.step()
        losses.append(loss.item())
    assert len(losses) >= 3 and result["history"][0]["losses"] == pytest.approx(losses, rel=1e-6)


def test_the_perplexities_are_of_validation_in_each_epoch_and_of_the_test_at_last(
    language_model, text, tmp_path
):
    """Of the parameters that are saved, so after what was pending has been applied."""
    import ptb

    result = language_model(sparsity=0.99, checkpoints=tmp_path)
    _, vocabulary, parts = ptb.load(text)
    model = ptb.LanguageModel(vocabulary, 32, 0.0)
    model.load_state_dict(saved(tmp_path / "epoch001", 0)["model"])
    for part, seen in {
        "valid": result["history"][0]["perplexity"],
        "test": result["perplexity"],
    }.items():
        words = ptb.columns(parts[part], 10)
        loss = torch.nn.functional.cross_entropy(
            model(words[:-1])[0].flatten(0, 1), words[1:].flatten()
        )
        assert seen == pytest.approx(loss.exp().item(), rel=1e-4)


@pytest.mark.parametrize("flush", [True, False])
def test_what_is_pending_in_the_language_model_is_applied_after_the_last_epoch(
    language_model, flush, tmp_path
):
    language_model(epochs=2, sparsity=0.99, flush=flush, checkpoints=tmp_path)
    pending = [
        [
            any(v.any() for v in saved(tmp_path / folder, rank)["residuals"]["v"].values())
            for rank in range(2)
        ]
        for folder in ("epoch001", "epoch002")
    ]
    assert pending == [[True, True], [not flush] * 2]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "topk"},
        {"method": "naive"},
        {"local_clipping": False},
        {"momentum_correction": False},
        {"factor_masking": False},
        {"momentum": 0.0},
        {"clip_norm": 0.0},
    ],
    ids=str,
)
def test_each_part_of_the_language_models_training_can_be_switched_off(language_model, settings):
    """Each makes another training of it."""
    usual = {"sparsity": 0.9, "momentum": 0.9, "lr": 1.0, "clip_norm": 0.02}
    on, off = language_model(**usual), language_model(**{**usual, **settings})
    assert on["perplexity"] != off["perplexity"] and 1 < off["perplexity"] < off["vocabulary"]


@pytest.mark.timeout(60)
def test_naive_flushes_nothing_and_is_dense_training_where_all_is_sent(language_model):
    """With one worker, whose gradient is not compressed; with two, at a sparsity that keeps nothing back."""
    flushed, kept = (
        language_model(method="naive", sparsity=0.99, flush=flush) for flush in (True, False)
    )
    assert (
        flushed["perplexity"]
        == kept["perplexity"]
        != language_model(method="topk", sparsity=0.99)["perplexity"]
    )
    for workers in (1, 2):
        naive, dense = (
            language_model(
                method=method, sparsity=0.99 if workers == 1 else 0.0, virtual_workers=workers
            )
            for method in ("naive", "dense")
        )
        assert naive["perplexity"] == dense["perplexity"]


@pytest.mark.timeout(60)
def test_resuming_the_language_model_is_bit_for_bit(language_model, monkeypatch, tmp_path):
    """With dropout, momentum, and a learning rate that has been divided before and is after."""
    import ptb

    monkeypatch.setitem(ptb.SIZES, "small", (32, 0.5))
    settings = {"epochs": 4, "sparsity": 0.99, "momentum": 0.9, "lr": 40.0, "checkpoints": tmp_path}
    straight_result = language_model(**settings)
    straight = [saved(tmp_path / "epoch004", rank) for rank in range(2)]
    (tmp_path / "epoch004" / "manifest.json").unlink()
    resumed_result = language_model(**settings, resume=True)
    rates = [epoch["lr"] for epoch in straight_result["history"]]
    assert rates[0] == 40.0 and rates[3] < 40.0
    assert straight_result["perplexity"] == resumed_result["perplexity"]
    for rank, before in enumerate(straight):
        after = saved(tmp_path / "epoch004", rank)
        assert any(u.any() for u in before["residuals"]["u"].values())
        for state in (before, after):
            for epoch in state["extras"]["history"]:
                del epoch["step_seconds"]
        assert before["extras"] == after["extras"]
        for part in ("model", "optimizer", "residuals"):
            for (name, a), (_, b) in zip(
                flattened(before[part]), flattened(after[part]), strict=True
            ):
                assert torch.equal(a, b), name


@pytest.mark.timeout(60)
def test_the_learning_rate_is_divided_by_4_on_a_plateau(language_model):
    """At a rate too small to change any weight, nothing improves after the first epoch."""
    result = language_model(epochs=4, lr=1e-30, flush=False)
    assert [epoch["lr"] for epoch in result["history"]] == [1e-30, 1e-30, 1e-30 / 4, 1e-30 / 16]


@pytest.mark.timeout(60)
def test_the_report_compares_perplexities(language_model, tmp_path):
    import report
    from rich.console import Console

    results = [
        language_model(),
        language_model(method="dense"),
        language_model(local_clipping=False, epochs=2),
    ]
    console = Console(width=120, record=True)
    console.print(report.table(results))
    shown = console.export_text()
    assert (
        "perplexity" in shown
        and "accuracy" not in shown
        and f"{results[1]['perplexity']:.2f} " in shown
    )
    assert [report.label(result) for result in results] == [
        "DGC 99.9 %",
        "dense",
        "DGC 99.9 %, no local clipping",
    ]
    warmed = [
        {**results[0], "settings": {**results[0]["settings"], "warmup_epochs": n}}
        for n in (0.5, 0.25)
    ]
    assert report.names([[run] for run in (*results, *warmed)]) == [  # and in what they differ
        "DGC 99.9 %, epochs 1, warmup epochs by default",
        "dense",
        "DGC 99.9 %, no local clipping, epochs 2, warmup epochs by default",
        "DGC 99.9 %, epochs 1, warmup epochs 0.5",
        "DGC 99.9 %, epochs 1, warmup epochs 0.25",
    ]
    assert report.names([results[:1], results[1:2]]) == ["DGC 99.9 %", "dense"]
    assert report.places(225, 290) == [240, 260, 280] and report.places(100, 600) == [
        100,
        150,
        200,
        300,
        500,
    ]
    report.picture(results, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    alone = language_model(virtual_workers=1)  # which sends nothing
    console.print(report.table([alone]))
    assert report.label(alone) == "one worker" and alone["machine"]["dgc"].startswith("0.")
    for i, result in enumerate([results[0], {**results[0], "recipe": "cifar10"}]):
        (tmp_path / f"{i}.json").write_text(json.dumps(result))
    (tmp_path / "2.json").write_text(json.dumps({**results[0], "dataset": "pydoc topics"}))
    for other, message in (
        (1, "results must be of one recipe, got cifar10, ptb"),
        (2, "results must be of one dataset, got ptb, pydoc topics"),
    ):
        with pytest.raises(Exception, match=message):
            report.main([tmp_path / "0.json", tmp_path / f"{other}.json"])


def test_the_language_model_says_what_it_cannot_train_on(language_model, tmp_path):
    with pytest.raises(
        Exception, match=r"--batch-size must be a multiple of the 3 workers, .* got 20"
    ):
        language_model(virtual_workers=3)
    with pytest.raises(
        SystemExit, match=r"got one without ptb\.train\.txt, ptb\.valid\.txt, ptb\.test\.txt"
    ):
        language_model(data=tmp_path)
    for part in ("train", "valid", "test"):
        (tmp_path / f"ptb.{part}.txt").write_text("too short")
    with pytest.raises(
        SystemExit, match="a text must have at least 40 words for a batch of 20, got 3"
    ):
        language_model(data=tmp_path)


def test_the_documentation_is_divided_by_topic():
    from ptb import documentation, load

    texts = documentation()
    assert texts == documentation()
    lengths = {part: sum(len(line) + 1 for line in texts[part]) for part in texts}
    assert 0.88 < lengths["train"] / sum(lengths.values()) < 0.94 and min(lengths.values()) > 2000
    words = {word for lines in texts.values() for line in lines for word in line}
    assert {"<unk>", "the", "("} < words and all(
        word == word.lower() and not word.isspace() for word in words
    )
    name, vocabulary, parts = load(None)
    assert name == "pydoc topics" and vocabulary == len(words | {"<eos>"}) == 1 + int(
        parts["train"].max()
    )
    assert {part: len(numbers) for part, numbers in parts.items()} == lengths


@pytest.mark.parametrize(
    ("arguments", "epochs"),
    [
        ({"data": Path("ptb")}, 40),
        ({}, 16),
        ({"data": Path("ptb"), "epochs": 3}, 3),
        ({"epochs": 5}, 5),
    ],
)
def test_the_language_model_trains_for_as_long_as_its_text_needs(arguments, epochs, monkeypatch):
    """Penn Treebank for the paper's 40 epochs, the default text for fewer."""
    import ptb

    seen = []
    # And no result, as on ranks above 0.
    monkeypatch.setattr(ptb.job, "run", lambda _, a: seen.append(a.epochs))
    ptb.main(**arguments)
    assert seen == [epochs]


def test_the_language_models_are_the_papers():
    """The paper's gradient of 194.68 MB, and its warm-up over the first of 40 epochs."""
    import ptb

    with torch.device("meta"):
        sizes = {
            size: sum(p.numel() for p in ptb.LanguageModel(10_000, *ptb.SIZES[size]).parameters())
            for size in ptb.SIZES
        }
    assert f"{4 * sizes['large'] / 2**20:.2f}" == "194.68" and sizes["small"] == 2_653_200
    defaults = {
        name: option.default for name, option in inspect.signature(ptb.main).parameters.items()
    }
    config = ptb.config(argparse.Namespace(**{**defaults, "epochs": 40}), 1328)
    assert [config.sparsity_at(step) for step in (0, 332, 664, 996, 1328)] == pytest.approx(
        [0.75, 0.9375, 0.984375, 0.996, 0.999], abs=2e-4
    )
    assert config.sparsity_at(331) == 0.75 and config.clip_norm == 0.25


def test_the_hidden_state_goes_on_from_batch_to_batch(text):
    from ptb import LanguageModel, columns, evaluate, load

    torch.manual_seed(0)
    _, vocabulary, parts = load(text)
    model, valid = LanguageModel(vocabulary, 32, 0.5), columns(parts["valid"], 4)
    model.embedding.weight.data.mul_(20)  # so that what came before matters
    assert evaluate(model, valid, 7) == pytest.approx(evaluate(model, valid, 1000), rel=1e-6)
    assert model.training
