"""The CIFAR-10 recipe, on scikit-learn's digits and on made-up images: every way to launch it, and resuming."""

import argparse
import functools
import inspect
import json

import numpy as np
import pytest
import torch
import typer
from launching import LAUNCHERS, flat, flattened, recipe, refused, saved

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder like CIFAR-10's, of 355 images to train on and 20 to test: 11 steps of two workers with 16 each."""
    folder = tmp_path_factory.mktemp("data") / "cifar-10-batches-bin"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name, records in [
        *((f"data_batch_{i}.bin", 71) for i in range(1, 6)),
        ("test_batch.bin", 20),
    ]:
        labels = random.integers(0, 10, (records, 1))
        shades = np.clip(25 * labels + random.normal(0, 30, (records, 3072)), 0, 255)
        np.hstack([labels, shades]).astype(np.uint8).tofile(folder / name)
    return str(folder)


@pytest.fixture(scope="module")
def launched(images, tmp_path_factory):
    @functools.cache
    def run(launcher):
        """The losses of rank 0 before any exchange, after one, after two; later ones tell less, as roundings grow. Made
        once.
        """
        tmp_path = tmp_path_factory.mktemp(launcher)
        virtual = ["--virtual-workers", "2"] if launcher == "python" else []
        status, output = recipe(
            "--method",
            "dense",
            "--epochs",
            "1",
            "--batch-size",
            "16",
            *virtual,
            "--out",
            f"{tmp_path}/out.json",
            "--tensorboard",
            f"{tmp_path}/board",
            "--checkpoints",
            f"{tmp_path}/checkpoints",
            launcher=LAUNCHERS[launcher],
            data=images,
        )
        # A checkpoint of parameters that are not alike on all ranks is refused.
        assert status == 0, output
        assert "dense: " in output and "on cifar10 after 1 epochs" in output
        assert any("tfevents" in file.name for file in (tmp_path / "board").iterdir())
        result = json.loads((tmp_path / "out.json").read_text())
        assert (
            result["workers"] == 2
            and result["history"][0]["bytes_per_step"] == result["dense_bytes_per_step"]
        )
        return result["history"][0]["losses"][:3]

    return run


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "python"])
def test_the_same_file_runs_everywhere(launcher, launched):
    """Two workers each, at density 1: alike but for the order of additions; on one process, plain SGD."""
    seen, alone = (launched(name) for name in (launcher, "python"))
    assert seen == pytest.approx(alone, rel=2e-4)


@pytest.mark.timeout(240)
def test_the_demo(monkeypatch, tmp_path, capsys):
    """``make demo``, on digits and for one epoch of each method."""
    import demo

    monkeypatch.setattr(demo, "SECONDS", 0)
    demo.main("digits", out=tmp_path)
    results = {
        method: json.loads((tmp_path / f"{method}.json").read_text()) for method in ("dense", "dgc")
    }
    assert all(
        result["launcher"] == "horovod" and result["workers"] == 2 for result in results.values()
    )
    assert results["dgc"]["bytes_sent"] < results["dense"]["bytes_sent"]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert f"{tmp_path}/demo.png" in capsys.readouterr().out.replace("\n", "")


def test_resuming_is_bit_for_bit(images, tmp_path):
    """Two workers, killed after the first of two epochs; the residuals come along."""
    arguments = (
        "--epochs",
        "2",
        "--virtual-workers",
        "2",
        "--batch-size",
        "16",
        "--sparsity",
        "0.99",
        "--no-flush",
    )
    folder = tmp_path / "checkpoints"
    arguments += ("--checkpoints", str(folder))
    assert recipe(*arguments, launcher=LAUNCHERS["python"], data=images)[0] == 0
    straight = saved(folder / "epoch002", 1)
    assert sorted(file.name for file in folder.iterdir()) == ["epoch001", "epoch002"]
    (folder / "epoch002" / "manifest.json").unlink()
    (folder / "epoch002" / "rank-0.part").write_bytes(b"cut off")
    status, output = recipe(*arguments, "--resume", launcher=LAUNCHERS["python"], data=images)
    assert status == 0, output
    resumed = saved(folder / "epoch002", 1)
    assert all(v.any() for v in straight["residuals"]["v"].values())
    losses = [
        [epoch["losses"] for epoch in state["extras"]["history"]] for state in (straight, resumed)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    for part in ("model", "residuals"):
        for (name, a), b in zip(flattened(straight[part]), flattened(resumed[part]), strict=True):
            assert torch.equal(a, b[1]), name
    for changed, message in (
        (("--seed", "1"), "seed was 0 and is 1"),
        (("--epochs", "1"), "epochs was 2 and is 1"),
    ):
        assert f"{message} (give those, or another folder)" in refused(
            *arguments, *changed, "--resume", "--data", images
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--resume",), "--resume needs --checkpoints"),
        (("--method", "fp16"), "must run under horovodrun"),
        (
            ("--sparsity", "1.0"),
            "Invalid value for '--sparsity': it must be a number in [0, 1), 0 meaning dense, got 1.0",
        ),
        (("--sparsity", "warmup:epoch=4"), "unexpected keyword argument 'epoch'"),
        (("--sparsity", "piecewise:0=2"), "the sparsity from step 0 on must be a number in [0, 1)"),
        (
            ("--sparsity", "warmup", "--warmup-epochs", "1"),
            "--warmup-epochs must be left out where --sparsity is a whole schedule",
        ),
        (("--warmup-epochs", "-1"), "Invalid value for '--warmup-epochs'"),
        (
            ("--warmup-epochs", "inf"),
            "Invalid value for '--warmup-epochs': it must be finite, got inf",
        ),
        (("--lr", "nan"), "Invalid value for '--lr'"),
        (("--lr", "-1"), "Invalid value for '--lr'"),
        (("--clip-norm", "-1"), "Invalid value for '--clip-norm'"),
        (("--clip-norm", "nan"), "Invalid value for '--clip-norm'"),
        (("--seed", "99999999999999999999"), "Invalid value for '--seed'"),
        (("--threads", "-1"), "Invalid value for '--threads'"),
        (
            ("--momentum", "0"),
            "--momentum must be above 0 for Nesterov's, got 0 (add --no-nesterov)",
        ),
        (
            ("--method", "dense", "--clip-norm", "1"),
            "--clip-norm must be left out with --method dense, got 1",
        ),
        (
            ("--method", "topk", "--exchange", "reduce"),
            "--exchange must be left out with --method topk: it is of dgc",
        ),
        (
            ("--method", "topk", "--value-bits", "4"),
            "--value-bits must be left out with --method topk: it is of dgc",
        ),
        (
            ("--value-bits", "3"),
            "Invalid value for '--value-bits': it must be one of 1, 2, 4, 8, 16, 32, got 3",
        ),
        (("--out", "/"), "Invalid value for '--out'"),
        (("--out", "setup.py/out.json"), "Invalid value for '--out': its folder cannot be made"),
        (("--batch-size", "2000"), "--batch-size 2000 x 1 workers is more than 1437 images"),
    ],
)
def test_refuses(arguments, message):
    assert message in refused(*arguments)


def test_an_infinite_bound_is_none():
    """As ``dgc tune`` gives one that is not to be."""
    import job

    assert "is more than 1437 images" in refused("--clip-norm", "inf", "--batch-size", "2000")
    assert job.bound(float("inf")) == 0.0 and job.bound(0.25) == 0.25 and job.bound(None) is None


def test_a_refusal_is_not_a_traceback():
    status, output = recipe("--depth", "21", launcher=LAUNCHERS["python"], limit=60)
    assert status == 2 and "--depth must be 20, 32, 44, 56 or 110, got 21" in flat(output)
    assert "Traceback" not in output


@pytest.mark.parametrize("method", ["dgc", "topk"])
@pytest.mark.parametrize("name", ["cifar10", "ptb"])
def test_sparsity_is_a_number_or_an_expression(name, method):
    """A number is followed by the recipe's own warm-up, as it always was; an expression is the whole schedule."""
    import importlib

    import job

    import dgc

    module = importlib.import_module(name)
    settings = {
        key: option.default for key, option in inspect.signature(module.main).parameters.items()
    }

    def chosen(text, warmup_epochs=None):
        a = argparse.Namespace(
            **{
                **settings,
                "method": method,
                "sparsity": job.sparsity(text),
                "epochs": 40,
                "warmup_epochs": warmup_epochs,
            }
        )
        return module.config(a, 100).sparsity

    assert job.sparsity("0.99") == job.sparsity(0.99) == 0.99  # in results' settings: a number
    own = dgc.warmup(4, steps_per_epoch=50, end=0.99)
    assert chosen("0.99", 2.0) == (own if method == "dgc" else 0.99) and chosen("0.99", 0.0) == 0.99
    for low in (
        0.0,
        0.3,
        0.5,
    ):  # below the 75 % at which the paper's warm-up begins there is nothing to warm up to
        schedule = chosen(str(low), 2.0)
        assert (
            schedule == low
            if method == "topk"
            else {schedule(step) for step in range(300)} == {low}
        )
    assert chosen("constant:0.99") == dgc.constant(0.99)
    assert chosen("warmup:epochs=3,end=0.9") == dgc.warmup(3, steps_per_epoch=100, end=0.9)
    assert chosen("dense_until:7,then=0.9") == dgc.dense_until(7, then=0.9)


def test_a_recipe_trains_by_an_expression(images, tmp_path, monkeypatch):
    """Dense in the first of two epochs of 11 steps, then what is always dense, and a hundredth of the rest. Of each it
    says to ``dgc tune`` what it has reached.
    """
    import report

    monkeypatch.setenv("DGC_TUNE_REPORTS", str(tmp_path / "reports"))
    status, output = recipe(
        "--sparsity",
        "dense_until:11,then=0.99",
        "--epochs",
        "2",
        "--virtual-workers",
        "2",
        "--batch-size",
        "16",
        "--no-flush",
        "--out",
        f"{tmp_path}/out.json",
        launcher=LAUNCHERS["python"],
        data=images,
    )
    assert status == 0, output
    result = json.loads((tmp_path / "out.json").read_text())
    assert (
        result["settings"]["sparsity"] == "dense_until:11,then=0.99"
        and result["steps_per_epoch"] == 11
    )
    first, second = (epoch["bytes_per_step"] for epoch in result["history"])
    assert first == result["dense_bytes_per_step"] > 10 * second
    reports = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    assert result["bytes_sent"] == 11 * (first + second) and reports == [
        {"epoch": epoch["epoch"], "metric": epoch["accuracy"], "bytes": sent}
        for epoch, sent in zip(result["history"], (11 * first, result["bytes_sent"]), strict=True)
    ]
    assert report.label(result) == "DGC dense_until:11,then=0.99"
    report.picture([result], tmp_path / "curves.png")


def test_checkpoints_do_not_pile_up_on_any_disk(tmp_path):
    """Where the machines have none in common, too: two epochs on rank 0's, and two on the others'."""
    import job

    import dgc

    def worker():
        rank = dgc.lockstep.current().world.rank
        model = torch.nn.Linear(3, 2)
        dgc.broadcast_parameters(model.state_dict())
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
        )
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
        a = argparse.Namespace(checkpoints=tmp_path / f"disk {rank}")
        for epochs in range(1, 5):
            job.checkpoint(a, {}, model, optimizer, scheduler, [{}] * epochs)

    dgc.lockstep.run(worker, 2)
    for rank in range(2):
        assert sorted(file.name for file in (tmp_path / f"disk {rank}").iterdir()) == [
            "epoch003",
            "epoch004",
        ]


def test_the_networks_are_the_papers():
    """Parameters of the CIFAR ResNets in millions (He et al. 2016, table 6)."""
    from cifar10 import resnet

    sizes = {
        depth: sum(p.numel() for p in resnet(depth).parameters()) for depth in (20, 32, 44, 56, 110)
    }
    assert {depth: round(size / 1e6, 2) for depth, size in sizes.items()} == {
        20: 0.27,
        32: 0.46,
        44: 0.66,
        56: 0.85,
        110: 1.73,
    }
    assert resnet(20)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    # Of 3 x 3 weights.
    convolutions = 3 * 16 + 36 * 16 * 16 + 16 * 32 + 35 * 32 * 32 + 32 * 256 + 35 * 256 * 256
    wide = 9 * convolutions + 2 * (37 * 16 + 36 * 32 + 36 * 256) + 256 * 10 + 10
    assert sum(p.numel() for p in resnet(110, 256).parameters()) == wide == 21_152_602


def test_augmentation_crops_and_flips_within_four_pixels():
    from cifar10 import augmented

    images = torch.arange(1, 1025).view(1, 1, 32, 32).expand(500, 3, 32, 32).float()
    out = augmented(images, True, torch.Generator().manual_seed(0))
    assert out.shape == images.shape
    seen = set()
    for image in out[:, 0]:
        row, column = divmod(int(image[16, 16]) - 1, 32)
        mirrored = bool(image[16, 17] < image[16, 16])
        seen.add((row - 16, column - (15 if mirrored else 16), mirrored))
    assert {r for r, _, _ in seen} == set(range(-4, 5)) == {c for _, c, _ in seen}
    assert {m for _, _, m in seen} == {True, False}
    assert (
        len(
            {
                int(image[16, 17] < image[16, 16])
                for image in augmented(images, False, torch.Generator())[:, 0]
            }
        )
        == 1
    )


class Looking(torch.nn.Module):
    """Notes which images it is trained with, at which learning rate, and what it is when it is evaluated; then it tells
    images' classes by their shade.
    """

    def __init__(self):
        super().__init__()
        self.linear, self.seen, self.rates = torch.nn.Linear(3 * 16 * 16, 10), [], []

    def forward(self, x):
        import cifar10

        shades = ((x[:, 0, 16, 16] * cifar10.STD[0] + cifar10.MEAN[0]) * 255).round().long()
        if not self.training:
            self.evaluated = self.linear.weight.detach().clone()
            return torch.nn.functional.one_hot(shades % 10, 10)
        self.seen.append(shades)
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        return self.linear(x[:, :, 8:24, 8:24].flatten(1))


@pytest.fixture
def looking(monkeypatch):
    """Trains such a model within this process, on 13 images of the shades 0 to 12: settings -> result, the ranks'
    models. It takes no image of training for what that is, and three of the four to test, of the shades 100 to 103.
    """
    import cifar10
    import job

    import dgc

    shades, test_shades = torch.arange(13), torch.arange(100, 104)
    parts = [(shades, (shades + 1) % 10), (test_shades, torch.tensor([0, 1, 2, 4]))]
    data = [
        (x.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 32, 32), labels) for x, labels in parts
    ]
    distributed, models = job.distributed, {}

    def noted(optimizer, model, *rest):
        model.optimizer = distributed(optimizer, model, *rest)
        return model.optimizer

    monkeypatch.setattr(job, "distributed", noted)
    monkeypatch.setattr(cifar10, "loaded", lambda *_: ("shades", *data))
    monkeypatch.setattr(
        cifar10,
        "resnet",
        lambda *_: models.setdefault(dgc.lockstep.current().world.rank, Looking()),
    )

    def run(**changed):
        models.clear()
        settings = {
            name: option.default
            for name, option in inspect.signature(cifar10.main).parameters.items()
        }
        a = argparse.Namespace(**{**settings, "batch_size": 2, "virtual_workers": 2, **changed})
        return job.run(lambda: cifar10.train(a), a), [
            models[rank] for rank in range(a.virtual_workers)
        ]

    return run


def test_the_workers_share_out_the_images_anew_in_each_epoch(looking):
    """In three steps, each of two workers has two images that nobody else has in that epoch."""
    _, models = looking(method="dense", epochs=5)
    orders = [
        tuple(
            torch.stack([torch.cat(model.seen[start : start + 3]) for model in models], 1)
            .flatten()
            .tolist()
        )
        for start in range(0, 15, 3)
    ]
    assert [len(model.seen) for model in models] == [15, 15] and {
        len(batch) for batch in models[1].seen
    } == {2}
    assert all(len(set(order)) == 12 and set(order) <= set(range(13)) for order in orders)
    assert len(set(orders)) == 5


def test_the_learning_rate_is_divided_by_10_after_81_and_122_of_164_epochs(looking):
    _, (model,) = looking(method="dense", batch_size=13, virtual_workers=1)
    assert model.rates == pytest.approx([0.1] * 81 + [0.01] * 41 + [0.001] * 42)


def test_the_accuracy_is_that_of_the_test_images(looking):
    result, _ = looking(method="dense", epochs=2)
    assert [epoch["accuracy"] for epoch in result["history"]] == [75, 75] and result[
        "accuracy"
    ] == 75


def test_a_training_goes_on_with_its_own_data_and_number_of_workers(looking, monkeypatch, tmp_path):
    """Neither is an option that has to differ: without ``--data`` it may be a download or digits, and a launcher says
    how many ranks there are.
    """
    import cifar10
    import job

    looking(epochs=2, checkpoints=tmp_path)
    connect, loaded = job.connect, cifar10.loaded
    for module, name, other, message in (
        (
            cifar10,
            "loaded",
            lambda *_: ("digits", *loaded()[1:]),
            r"dataset was 'shades' and is 'digits' \(give those",
        ),
        (
            job,
            "connect",
            lambda: (connect()[0], 3, "lockstep"),
            r"workers was 2 and is 3; steps_per_epoch was 3 and is 2 \(give those",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, other)
            with pytest.raises(typer.BadParameter, match=message):
                looking(epochs=2, checkpoints=tmp_path, resume=True)
    looking(epochs=2, checkpoints=tmp_path, resume=True)


@pytest.mark.parametrize("flush", [True, False])
def test_what_is_pending_is_applied_before_the_last_evaluation(looking, flush, tmp_path):
    _, models = looking(epochs=2, sparsity=0.99, flush=flush, checkpoints=tmp_path)
    pending = [
        [
            bool(saved(tmp_path / folder, rank)["residuals"]["v"]["linear.weight"].any())
            for rank in range(2)
        ]
        for folder in ("epoch001", "epoch002")
    ]
    assert pending == [[True, True], [not flush] * 2]
    assert torch.equal(
        models[0].evaluated, saved(tmp_path / "epoch002", 0)["model"]["linear.weight"]
    )


@pytest.mark.parametrize("nesterov", [False, True])
def test_naive_is_top_k_of_each_steps_gradient_and_momentum_sgd(nesterov):
    """Against torch.optim.SGD on the average of what is left of each worker's gradient; nothing is kept."""
    import job
    from laws import difference, flat, loss, model
    from oracle import top

    import dgc

    size, steps, rates = (
        3,
        30,
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": nesterov},
    )
    expected = model(dtype=torch.float64)
    sgd = torch.optim.SGD(expected.parameters(), **rates)
    for step in range(steps):
        total = [torch.zeros_like(p) for p in expected.parameters()]
        for rank in range(size):
            for g, out in zip(
                torch.autograd.grad(
                    loss(expected, rank, step, torch.float64), expected.parameters()
                ),
                total,
                strict=True,
            ):
                sparse = g.dim() > 1 and g.numel() >= 1024  # the others travel dense
                out += (g * torch.from_numpy(top(g.numpy(), 0.9)) if sparse else g) / size
        for p, g in zip(expected.parameters(), total, strict=True):
            p.grad = g
        sgd.step()

    def worker(method):
        rank, _, launcher = job.connect()
        network = model(dtype=torch.float64)
        config = dgc.Config(0.9, momentum_correction=False, factor_masking=False, value_bits=32)
        optimizer = job.distributed(
            torch.optim.SGD(network.parameters(), **rates), network, launcher, method, config
        )
        for step in range(steps):
            optimizer.zero_grad()
            loss(network, rank, step, torch.float64).backward()
            optimizer.step()
        return network, optimizer.residual_state_dict()

    for network, residuals in dgc.lockstep.run(lambda: worker("naive"), size):
        assert difference(flat(network), flat(expected)) < 1e-6
        assert len(residuals["v"]) == 2 and not any(v.any() for v in residuals["v"].values())
    network, residuals = dgc.lockstep.run(lambda: worker("topk"), size)[0]
    assert difference(flat(network), flat(expected)) > 1e-3 and all(
        v.any() for v in residuals["v"].values()
    )


@pytest.mark.parametrize("name", ["cifar10", "ptb"])
def test_naive_has_the_settings_of_gradient_dropping(name):
    import importlib

    from dgc import Config

    module = importlib.import_module(name)
    settings = {
        key: option.default for key, option in inspect.signature(module.main).parameters.items()
    }
    naive, topk = (
        module.config(argparse.Namespace(**{**settings, "method": method}), 100)
        for method in ("naive", "topk")
    )
    assert naive == topk == Config(0.999, momentum_correction=False, factor_masking=False)
