"""All workers in one batch are as many workers of the package: benchmarks/crowd beside it."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import typer

import dgc
from dgc.compression import select
from dgc.compression import sizes as messages
from dgc.compression.residual import Residual
from dgc.compression.wire import Layout
from dgc.plan import cost

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import cifar10
from crowd import all as queue
from crowd import table, train
from crowd.exchange import Exchange, Momentum, Residuals
from crowd.model import Crowd

pytestmark = pytest.mark.long

SHAPES = {"a": (40, 30), "b": (1000,), "c": (7, 90)}


def test_each_worker_has_its_own_gradient():
    """And its own statistics: those of the recipe's model on its images alone."""
    torch.manual_seed(0)
    x, y, n = torch.randn(6, 3, 32, 32, dtype=torch.float64), torch.tensor([1, 2, 3, 4, 5, 6]), 3
    models = [cifar10.resnet(20).double() for _ in range(n + 1)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    crowd = Crowd(models[0], n)
    loss, gradients = crowd.gradients(x, y)
    for w, model in enumerate(models[1:]):
        alone = torch.nn.functional.cross_entropy(model(x[w::n]), y[w::n])
        alone.backward()
        assert torch.allclose(loss[w], alone)
        for name, p in model.named_parameters():
            torch.testing.assert_close(gradients[name][w], p.grad, rtol=1e-9, atol=1e-12)
    assert crowd.worker_0().keys() == models[1].state_dict().keys()
    for name, value in models[1].state_dict().items():
        assert "tracked" in name or torch.allclose(crowd.worker_0()[name], value)


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize(
    ("exchange", "wide", "workers", "sparsity"),
    [
        ("allgather", 3, 4, 0.99),
        ("allgather", 3, 4, 0.05),
        ("reduce", 3, 4, 0.98),
        ("reduce", 1, 3, 0.95),
        ("reduce", 4, 8, 0.98),
    ],
)
def test_an_exchange_is_the_packages(exchange, wide, workers, sparsity, masking, monkeypatch):
    """Also where a dense sum is fewer bytes, at 5 %, and where slots are few: step after step the same weights."""
    monkeypatch.setattr(messages, "WIDE", wide)
    monkeypatch.setattr(messages, "SLACK", 0 if workers == 8 else messages.SLACK)
    generator = torch.Generator().manual_seed(0)
    given = {
        name: torch.randn(6, workers, *shape, generator=generator) ** 3
        for name, shape in SHAPES.items()
    }

    def worker():
        weights = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9, nesterov=True),
            list(weights.items()),
            dgc.Config(sparsity, factor_masking=masking, exchange=exchange, min_numel=0),
        )
        ends = []
        for step in range(6):
            for name, p in weights.items():
                p.grad = given[name][step, dgc.lockstep.current().world.rank].clone()
            optimizer.step()
            ends.append(torch.cat([weights[name].detach().flatten() for name in "ca"]))
        return ends, optimizer.report().overflow_entries > 0

    ranks = dgc.lockstep.run(worker, workers)
    bucket = Residual("bucket 0", {name: torch.empty(SHAPES[name]) for name in "ca"}, False)
    residuals, weights = (
        Residuals(bucket, workers, Momentum(0.9, masking)),
        torch.zeros(bucket.numel),
    )
    ours = Exchange(bucket, workers, exchange, sparsity, wide)
    assert ours.dense == (sparsity == 0.05) and ranks[0][1] == (workers == 8)
    for step in range(6):
        residuals.accumulate(torch.cat([given[name][step].flatten(1) for name in "ca"], 1))
        weights -= 0.1 * ours(residuals)
        torch.testing.assert_close(weights, ranks[0][0][step], rtol=1e-5, atol=1e-6)
        assert weights.any()


def test_the_bound_applies_the_largest_of_the_mean():
    g = torch.randn(3, 1200, generator=torch.Generator().manual_seed(0))
    bucket = Residual("bucket 0", {"a": torch.empty(40, 30)}, False)
    residuals = Residuals(bucket, 3, Momentum(0.0, True))
    residuals.accumulate(g)
    update = Exchange(bucket, 3, "mean", 0.99, 2)(residuals)
    best = g.mean(0).abs().topk(24).indices
    assert update.nonzero().flatten().tolist() == sorted(best.tolist())
    torch.testing.assert_close(update[best], g.mean(0)[best])
    torch.testing.assert_close(residuals.v.mean(0) + update, g.mean(0))


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("exchange", ["dense", "allgather", "reduce"])
def test_a_training_is_the_recipes(exchange, tmp_path, double, monkeypatch):
    """Its first steps: the same batches, sparsity, decay and statistics. In float64, as roundings soon tell trainings
    apart.
    """
    method = {"method": "dense"} if exchange == "dense" else {"exchange": exchange}
    dataset, (images, labels), (test_images, test_labels) = cifar10.loaded("digits", None)
    few = dataset, (images[:320], labels[:320]), (test_images[:10], test_labels[:10])
    monkeypatch.setattr(cifar10, "loaded", lambda data, cache: few)
    common = {"data": "digits", "batch_size": 16, "seed": 3, "epochs": 1}
    cifar10.main(
        **common, **method, warmup_epochs=4, virtual_workers=4, out=tmp_path / "recipe.json"
    )
    recipe = json.loads((tmp_path / "recipe.json").read_text())["history"][0]["losses"]
    a = Namespace(**common, workers=4, exchange=exchange, wide=3, factor_masking=True)
    trainer = train.Trainer(a, batches := train.Batches(*few[1], 4, 16, False), torch.device("cpu"))
    drawn, losses = batches.draw(3, 0), []
    for step in range(5):
        batches.of_step.copy_(drawn[step])
        trainer.loss.zero_()
        trainer.step(0.75)
        losses.append(float(trainer.loss))
    assert recipe[:4] == pytest.approx(losses[:4], rel=1e-3) and len(recipe) == 5


def test_a_training_that_was_stopped_goes_on_from_its_last_epoch(tmp_path, monkeypatch):
    """To the bit; and another training refuses its checkpoint."""
    _, (images, labels), (test_images, test_labels) = cifar10.loaded("digits", None)
    few = "digits", (images[:128], labels[:128]), (test_images[:10], test_labels[:10])
    monkeypatch.setattr(train, "images_of", lambda data, device: few)
    settings = {"data": "digits", "workers": 2, "batch_size": 16, "epochs": 3}

    def trained(**given):
        return next(train.finished([train.training(train.options({**settings, **given}))], 1))

    whole, checkpoint = trained(), tmp_path / "checkpoint"
    stopped = train.training(train.options({**settings, "checkpoint": checkpoint}))
    for _ in range(7):  # of 4 steps an epoch
        next(stopped)
    stopped.close()
    resumed = trained(checkpoint=checkpoint)
    assert resumed["losses"] == whole["losses"] and resumed["accuracy"] == whole["accuracy"]
    with pytest.raises(typer.BadParameter, match="of a training with"):
        trained(checkpoint=checkpoint, seed=1)


def test_the_day_a_gpu_is_there_is_rehearsed(tmp_path):
    """Each part runs, and is not run again."""
    script = Path(__file__).parents[2] / "scripts" / "gpu_day.py"
    command = [sys.executable, str(script), "--rehearse", "--data", "digits", "--out", tmp_path]
    for ended in ("done", "was done"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        for part in ("tests", "speed", "length"):
            assert f"{part}: {ended}" in done.stdout
    written = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.json")}
    assert written >= {"gpu.json", "length/length-dense-0.json", "length/length-allgather-0.json"}


def result(accuracy, **settings):
    return {
        "settings": vars(train.options({"data": "", **settings})),
        "accuracy": accuracy,
        "steps_per_epoch": 10,
    }


def test_the_table_of_exchanges_compares_seed_by_seed():
    """A seed without an all-gather of its own is shown, and in no difference."""
    shown = table.of_exchanges(
        [
            result(80.0, seed=0),
            result(82.0, seed=1),
            result(81.0, exchange="reduce", wide=4, seed=1),
            result(80.5, exchange="reduce", wide=4, seed=0),
            result(70.0, exchange="mean", seed=2),
            result(75.0, factor_masking=False, workers=4),
        ]
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()]
    assert rows[2:] == [
        ["all-gather", "", "80.00, 82.00 %", "15.0"],
        ["all-gather, without masking", "75.00 %", "", "15.0"],
        ["reduce, 4 k and 4 k", "", "80.50, 81.00 %, -0.25", rows[4][3]],
        ["the bound: the mean's largest 3 k", "", "70.00 %", ""],
    ]
    assert 8 < float(rows[4][3]) < 11  # 2 x 4 messages, slack and positions


def test_bytes_are_those_that_the_cost_model_counts():
    """A step's, of 32 workers after the warm-up and within it; dense is a ring in float32."""
    n = 269_722
    dense = result(90.0, exchange="dense", workers=32, epochs=2)
    assert table.nbytes(dense) == pytest.approx(2 * 31 / 32 * 4 * n)
    bucket = train.compressed(cifar10.resnet(20))
    sizes = Layout(bucket, [select.count(0.999, numel) for numel in bucket.numels], 16).sizes
    rest = 2 * 31 / 32 * 4 * (n - bucket.numel)
    for exchange in ("allgather", "reduce"):
        settled = result(89.0, exchange=exchange, workers=32, epochs=2, warmup_epochs=0.0)
        step = cost.port_bytes(cost.exchange(exchange, sizes, 32, 1))
        assert table.nbytes(settled) == pytest.approx(step + rest)
        warmed = result(89.0, exchange=exchange, workers=32, epochs=2, warmup_epochs=1.0)
        assert table.nbytes(settled) < table.nbytes(warmed) < table.nbytes(dense)


def test_results_are_of_the_runs_that_their_names_say():
    runs = queue.all_runs()
    for path in queue.RESULTS.glob("*.json"):
        expected = vars(train.options({"data": "", **runs[path.stem]}))
        # Of today.
        settings = {
            k: v for k, v in json.loads(path.read_text())["settings"].items() if k in expected
        }
        assert settings == {name: expected[name] for name in settings} and len(settings) == 10
