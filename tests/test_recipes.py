"""The recipes, on scikit-learn's digits and on Python's documentation: every way to launch them, and resuming."""

import argparse
import hashlib
import inspect
import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from launch import end
from typer.testing import CliRunner

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "recipes"))
BIN = Path(sys.executable).parent


def recipe(*arguments, launcher=(), limit=200, file="cifar10.py", data="digits"):
    """Runs a recipe and returns its output; ends it after ``limit`` seconds."""
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(ROOT / "recipes" / file), "--data", data, "--threads", "1", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        output, _ = process.communicate(timeout=limit)
    finally:
        end(process.pid)
    return process.returncode, output


def refused(*arguments):
    """What the CIFAR-10 recipe says, within this process, as it ends with a wrong usage's status."""
    import cifar10
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(cifar10.main)
    ended = CliRunner().invoke(app, ["--data", "digits", "--threads", "1", *arguments])
    assert ended.exit_code == 2, ended.output
    return flat(ended.output)


def flat(output):
    """Without the frame and the lines of typer's errors."""
    return " ".join(output.replace("│", " ").split())


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder like CIFAR-10's, of 355 images to train on and 20 to test: 11 steps of two workers with 16 each."""
    folder = tmp_path_factory.mktemp("data") / "cifar-10-batches-bin"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name, records in [*((f"data_batch_{i}.bin", 71) for i in range(1, 6)), ("test_batch.bin", 20)]:
        labels = random.integers(0, 10, (records, 1))
        shades = np.clip(25 * labels + random.normal(0, 30, (records, 3072)), 0, 255)
        np.hstack([labels, shades]).astype(np.uint8).tofile(folder / name)
    return str(folder)


LAUNCHERS = {"python": (sys.executable,),
             "horovodrun": (str(BIN / "horovodrun"), "--gloo", "-np", "2", sys.executable),
             "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")}


FIRST_LOSSES: list[float] = []  # what the first launcher saw


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_file_runs_everywhere(launcher, images, tmp_path):
    """Two workers each, at density 1: alike but for the order of additions; on one process, plain SGD."""
    virtual = ["--virtual-workers", "2"] if launcher == "python" else []
    status, output = recipe("--method", "dense", "--epochs", "1", "--batch-size", "16", "--out", f"{tmp_path}/out.json",
                            "--tensorboard", f"{tmp_path}/board", "--checkpoints", f"{tmp_path}/checkpoints", *virtual,
                            launcher=LAUNCHERS[launcher], data=images)
    assert status == 0, output  # a checkpoint of parameters that are not alike on all ranks is refused
    assert "dense: " in output and "on cifar10 after 1 epochs" in output
    assert any("tfevents" in file.name for file in (tmp_path / "board").iterdir())
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["workers"] == 2 and result["history"][0]["bytes_per_step"] == result["dense_bytes_per_step"]
    # Of rank 0: before any exchange, after one, after two. Later ones tell less, as roundings grow.
    first = result["history"][0]["losses"][:3]
    FIRST_LOSSES.extend(first if not FIRST_LOSSES else ())
    assert first == pytest.approx(FIRST_LOSSES, rel=2e-4)


@pytest.mark.timeout(240)
def test_the_demo(monkeypatch, tmp_path, capsys):
    """``make demo``, on digits and for one epoch of each method."""
    import demo
    monkeypatch.setattr(demo, "SECONDS", 0)
    demo.main("digits", out=tmp_path)
    results = {method: json.loads((tmp_path / f"{method}.json").read_text()) for method in ("dense", "dgc")}
    assert all(result["launcher"] == "horovod" and result["workers"] == 2 for result in results.values())
    assert results["dgc"]["bytes_sent"] < results["dense"]["bytes_sent"]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert f"{tmp_path}/demo.png" in capsys.readouterr().out.replace("\n", "")


def test_resuming_is_bit_for_bit(images, tmp_path):
    """Two workers, killed after the first of two epochs; the residuals come along."""
    arguments = ("--epochs", "2", "--virtual-workers", "2", "--batch-size", "16", "--sparsity", "0.99", "--no-flush")
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
    losses = [[epoch["losses"] for epoch in state["extras"]["history"]] for state in (straight, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    for part in ("model", "residuals"):
        for (name, a), b in zip(flattened(straight[part]), flattened(resumed[part]), strict=True):
            assert torch.equal(a, b[1]), name
    for changed, message in ((("--seed", "1"), "seed was 0 and is 1"), (("--epochs", "1"), "epochs was 2 and is 1")):
        assert f"{message}; accepted: the same settings" in refused(*arguments, *changed, "--resume", "--data", images)


def saved(folder, rank):
    """A rank's part of a checkpoint, with what is common."""
    files = [next(folder.glob(f"{name}-*.pt")) for name in ("common", f"rank-{rank}")]
    common, own = (torch.load(file, weights_only=True) for file in files)
    return {**common, **own}


def flattened(tree, name=""):
    if isinstance(tree, (dict, list)):
        tree = tree if isinstance(tree, dict) else dict(enumerate(tree))
        return [item for key, value in tree.items() for item in flattened(value, f"{name}.{key}")]
    return [] if tree is None else [(name, torch.as_tensor(tree))]


@pytest.mark.parametrize(("arguments", "message"), [
    (("--resume",), "--resume needs --checkpoints"),
    (("--method", "fp16"), "accepted under horovodrun"),
    (("--sparsity", "1.0"), "Invalid value for '--sparsity': it is 1.0; accepted: a number in [0, 1)"),
    (("--sparsity", "warmup:epoch=4"), "schedule 'warmup:epoch=4', at character 8, 'epoch=4'; accepted: epochs="),
    (("--sparsity", "piecewise:0=2"), "the sparsity from step 0 on is 2.0; accepted: a number in [0, 1)"),
    (("--sparsity", "warmup", "--warmup-epochs", "1"), "--sparsity warmup is a whole schedule; accepted: without"),
    (("--warmup-epochs", "-1"), "Invalid value for '--warmup-epochs'"),
    (("--batch-size", "2000"), "--batch-size 2000 x 1 workers is more than 1437 images"),
])
def test_refuses(arguments, message):
    assert message in refused(*arguments)


def test_a_refusal_is_not_a_traceback():
    status, output = recipe("--depth", "21", launcher=LAUNCHERS["python"], limit=60)
    assert status == 2 and "--depth is 21; accepted: 20, 32, 44, 56, 110" in flat(output)
    assert "Traceback" not in output


@pytest.mark.parametrize("method", ["dgc", "topk"])
@pytest.mark.parametrize("name", ["cifar10", "ptb"])
def test_sparsity_is_a_number_or_an_expression(name, method):
    """A number is followed by the recipe's own warm-up, as it always was; an expression is the whole schedule."""
    import importlib

    import job

    import dgc
    module = importlib.import_module(name)
    settings = {key: option.default for key, option in inspect.signature(module.main).parameters.items()}

    def chosen(text, warmup_epochs=None):
        a = argparse.Namespace(**{**settings, "method": method, "sparsity": job.sparsity(text), "epochs": 40,
                                  "warmup_epochs": warmup_epochs})
        return module.config(a, 100).sparsity

    assert job.sparsity("0.99") == job.sparsity(0.99) == 0.99  # in results' settings: a number
    own = dgc.warmup(4, steps_per_epoch=50, end=0.99)
    assert chosen("0.99", 2.0) == (own if method == "dgc" else 0.99) and chosen("0.99", 0.0) == 0.99
    for low in (0.0, 0.3, 0.5):  # below the 75 % at which the paper's warm-up begins there is nothing to warm up to
        schedule = chosen(str(low), 2.0)
        assert schedule == low if method == "topk" else {schedule(step) for step in range(300)} == {low}
    assert chosen("constant:0.99") == dgc.constant(0.99)
    assert chosen("warmup:epochs=3,end=0.9") == dgc.warmup(3, steps_per_epoch=100, end=0.9)
    assert chosen("dense_until:7,then=0.9") == dgc.dense_until(7, then=0.9)


def test_a_recipe_trains_by_an_expression(images, tmp_path, monkeypatch):
    """Dense in the first of two epochs of 11 steps, then what is always dense, and a hundredth of the rest. Of each it
    says to ``dgc tune`` what it has reached.
    """
    import report
    monkeypatch.setenv("DGC_TUNE_REPORTS", str(tmp_path / "reports"))
    status, output = recipe("--sparsity", "dense_until:11,then=0.99", "--epochs", "2", "--virtual-workers", "2",
                            "--batch-size", "16", "--no-flush", "--out", f"{tmp_path}/out.json",
                            launcher=LAUNCHERS["python"], data=images)
    assert status == 0, output
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["settings"]["sparsity"] == "dense_until:11,then=0.99" and result["steps_per_epoch"] == 11
    first, second = (epoch["bytes_per_step"] for epoch in result["history"])
    assert first == result["dense_bytes_per_step"] > 10 * second
    reports = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    assert result["bytes_sent"] == 11 * (first + second) and reports == [
        {"epoch": epoch["epoch"], "metric": epoch["accuracy"], "bytes": sent}
        for epoch, sent in zip(result["history"], (11 * first, result["bytes_sent"]), strict=True)]
    assert report.label(result) == "DGC dense_until:11,then=0.99"
    report.picture([result], tmp_path / "curves.png")


def test_the_official_binary_layout_is_read(tmp_path):
    from data import load
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for i, name in enumerate([f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]):
        records = np.zeros((2, 3073), np.uint8)
        records[:, 0], records[0, 1], records[0, 3072] = i, 11, 22
        records.tofile(folder / name)
    for path in (tmp_path, folder):
        name, (images, labels), (test_images, test_labels) = load(str(path))
        assert name == "cifar10" and images.shape == (10, 3, 32, 32) and test_images.shape == (2, 3, 32, 32)
        assert labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and test_labels.tolist() == [5, 5]
        assert images[0, 0, 0, 0] == 11 and images[0, 2, 31, 31] == 22
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(SystemExit, match=r"lacks data_batch_3\.bin; accepted: a folder with cifar-10-batches-bin"):
        load(str(tmp_path))


def test_a_download_is_verified_and_unpacked(tmp_path, monkeypatch, capsys):
    """From a file: URL, whose archive is not the official one at first."""
    import tarfile

    import data
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "test_batch.bin").write_bytes(b"x" * 10)
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as tar:
        tar.add(folder, folder.name)
    monkeypatch.setattr(data, "URL", (tmp_path / "archive.tar.gz").as_uri())
    assert data.find_data(None, tmp_path / "cache") == "digits"
    assert f"and not {data.SHA256}): training on scikit-learn's" in capsys.readouterr().err
    assert not (tmp_path / "cache" / folder.name).exists()
    monkeypatch.setattr(data, "SHA256", hashlib.sha256((tmp_path / "archive.tar.gz").read_bytes()).hexdigest())
    found = data.find_data(None, tmp_path / "cache")
    assert (Path(found) / "test_batch.bin").read_bytes() == b"x" * 10
    (tmp_path / "archive.tar.gz").unlink()
    assert data.find_data(None, tmp_path / "cache") == found  # downloaded once


def test_a_download_that_does_not_start_is_given_up(tmp_path, monkeypatch, capsys):
    """A server that accepts and never answers."""
    import data
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(data, "URL", f"http://127.0.0.1:{server.getsockname()[1]}/")
        monkeypatch.setattr(data, "SECONDS", 1)
        assert data.find_data(None, tmp_path / "cache") == "digits"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "training on scikit-learn's handwritten digits instead" in said


@pytest.mark.parametrize("old", [False, True])
def test_an_archive_is_unpacked_by_pythons_without_filters(old, tmp_path, monkeypatch):
    """Debian 12's 3.11.2 among them."""
    import tarfile

    import data
    extractall = tarfile.TarFile.extractall
    if old:
        monkeypatch.delattr(tarfile, "data_filter")
        monkeypatch.setattr(tarfile.TarFile, "extractall", lambda self, path=".", members=None, *, numeric_owner=False:
                            extractall(self, path, members, numeric_owner=numeric_owner))
    (tmp_path / "evil").write_text("out of the folder")
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "evil", "cifar-10-batches-bin/test_batch.bin")
        if not old:
            tar.add(tmp_path / "evil", "../escaped")
    monkeypatch.setattr(data, "URL", (tmp_path / "archive.tar.gz").as_uri())
    monkeypatch.setattr(data, "SHA256", hashlib.sha256((tmp_path / "archive.tar.gz").read_bytes()).hexdigest())
    if old:
        assert (Path(data.find_data(None, tmp_path / "cache")) / "test_batch.bin").exists()
    else:
        with pytest.raises(tarfile.OutsideDestinationError):
            data.find_data(None, tmp_path / "cache")


@pytest.mark.parametrize("befalls", ["no place", "no locks", "a wrong proxy"])
def test_where_nothing_can_be_downloaded_to_it_is_told(befalls, tmp_path, monkeypatch, capsys):
    import fcntl

    import data
    cache = tmp_path / "cache"
    if befalls == "no place":
        cache.touch()
    elif befalls == "no locks":
        def flock(*_):
            raise OSError(38, "Function not implemented")  # what Lustre does by default
        monkeypatch.setattr(fcntl, "flock", flock)
    else:
        monkeypatch.setenv("https_proxy", "http:/proxy:3128")
        monkeypatch.setattr(urllib.request, "_opener", None)  # which remembers the proxies of before
    assert data.find_data(None, cache) == "digits"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "training on scikit-learn's handwritten digits instead" in said


def test_what_was_downloaded_is_found_where_nothing_can_be_written(tmp_path, monkeypatch):
    import fcntl

    import data
    monkeypatch.setattr(fcntl, "flock", None)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    assert data.find_data(None, tmp_path) == str(folder) and list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("home", ["gone", "there"])
def test_a_user_without_a_home(home, tmp_path):
    """A number in a container, whom no /etc/passwd knows."""
    code = ("import os, pwd, sys, tempfile\n"
            "def getpwuid(number): raise KeyError(number)\n"
            "pwd.getpwuid = getpwuid\n"
            f"os.environ.update({{'TMPDIR': {str(tmp_path)!r}, 'XDG_CACHE_HOME': ''}})\n"
            + ("del os.environ['HOME']\n" if home == "gone" else f"os.environ['HOME'] = {str(tmp_path)!r}\n")
            + f"sys.path.insert(0, {str(ROOT / 'recipes')!r}); import data; print(data.CACHE)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    expected = tmp_path / f"dgc-{os.getuid()}" if home == "gone" else tmp_path / ".cache" / "dgc"
    assert done.stdout == f"{expected}\n", done.stderr


def test_checkpoints_do_not_pile_up_on_any_disk(tmp_path):
    """Where the machines have none in common, too: two epochs on rank 0's, and two on the others'."""
    import job

    import dgc

    def worker():
        rank = dgc.lockstep.current().world.rank
        model = torch.nn.Linear(3, 2)
        dgc.broadcast_parameters(model.state_dict())
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
        a = argparse.Namespace(checkpoints=tmp_path / f"disk {rank}")
        for epochs in range(1, 5):
            job.checkpoint(a, {}, model, optimizer, scheduler, [{}] * epochs)

    dgc.lockstep.run(worker, 2)
    for rank in range(2):
        assert sorted(file.name for file in (tmp_path / f"disk {rank}").iterdir()) == ["epoch003", "epoch004"]


def test_the_networks_are_the_papers():
    """Parameters of the CIFAR ResNets in millions (He et al. 2016, table 6)."""
    from cifar10 import resnet
    sizes = {depth: sum(p.numel() for p in resnet(depth).parameters()) for depth in (20, 32, 44, 56, 110)}
    assert {depth: round(size / 1e6, 2) for depth, size in sizes.items()} == {
        20: 0.27, 32: 0.46, 44: 0.66, 56: 0.85, 110: 1.73}
    assert resnet(20)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    convolutions = 3 * 16 + 36 * 16 * 16 + 16 * 32 + 35 * 32 * 32 + 32 * 256 + 35 * 256 * 256  # of 3 x 3 weights
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
    assert len({int(image[16, 17] < image[16, 16]) for image in augmented(images, False, torch.Generator())[:, 0]}) == 1


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
    data = [(x.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 32, 32), labels) for x, labels in parts]
    distributed, models = job.distributed, {}

    def noted(optimizer, model, *rest):
        model.optimizer = distributed(optimizer, model, *rest)
        return model.optimizer

    monkeypatch.setattr(job, "distributed", noted)
    monkeypatch.setattr(cifar10, "loaded", lambda *_: ("shades", *data))
    monkeypatch.setattr(cifar10, "resnet", lambda *_: models.setdefault(dgc.lockstep.current().world.rank, Looking()))

    def run(**changed):
        models.clear()
        settings = {name: option.default for name, option in inspect.signature(cifar10.main).parameters.items()}
        a = argparse.Namespace(**{**settings, "batch_size": 2, "virtual_workers": 2, **changed})
        return job.run(lambda: cifar10.train(a), a), [models[rank] for rank in range(a.virtual_workers)]

    return run


def test_the_workers_share_out_the_images_anew_in_each_epoch(looking):
    """In three steps, each of two workers has two images that nobody else has in that epoch."""
    _, models = looking(method="dense", epochs=5)
    orders = [tuple(torch.stack([torch.cat(model.seen[start:start + 3]) for model in models], 1).flatten().tolist())
              for start in range(0, 15, 3)]
    assert [len(model.seen) for model in models] == [15, 15] and {len(batch) for batch in models[1].seen} == {2}
    assert all(len(set(order)) == 12 and set(order) <= set(range(13)) for order in orders)
    assert len(set(orders)) == 5


def test_the_learning_rate_is_divided_by_10_after_81_and_122_of_164_epochs(looking):
    _, (model,) = looking(method="dense", batch_size=13, virtual_workers=1)
    assert model.rates == pytest.approx([0.1] * 81 + [0.01] * 41 + [0.001] * 42)


def test_the_accuracy_is_that_of_the_test_images(looking):
    result, _ = looking(method="dense", epochs=2)
    assert [epoch["accuracy"] for epoch in result["history"]] == [75, 75] and result["accuracy"] == 75


def test_a_training_goes_on_with_its_own_data_and_number_of_workers(looking, monkeypatch, tmp_path):
    """Neither is an option that has to differ: without ``--data`` it may be a download or digits, and a launcher says
    how many ranks there are.
    """
    import cifar10
    import job
    looking(epochs=2, checkpoints=tmp_path)
    connect, loaded = job.connect, cifar10.loaded
    for module, name, other, message in (
            (cifar10, "loaded", lambda *_: ("digits", *loaded()[1:]), "dataset was 'shades' and is 'digits'; accepted"),
            (job, "connect", lambda: (connect()[0], 3, "lockstep"), "workers was 2 and is 3; steps_per_epoch was 3 and "
                                                                    "is 2; accepted")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, other)
            with pytest.raises(typer.BadParameter, match=message):
                looking(epochs=2, checkpoints=tmp_path, resume=True)
    looking(epochs=2, checkpoints=tmp_path, resume=True)


@pytest.mark.parametrize("flush", [True, False])
def test_what_is_pending_is_applied_before_the_last_evaluation(looking, flush, tmp_path):
    _, models = looking(epochs=2, sparsity=0.99, flush=flush, checkpoints=tmp_path)
    pending = [[bool(saved(tmp_path / folder, rank)["residuals"]["v"]["linear.weight"].any()) for rank in range(2)]
               for folder in ("epoch001", "epoch002")]
    assert pending == [[True, True], [not flush] * 2]
    assert torch.equal(models[0].evaluated, saved(tmp_path / "epoch002", 0)["model"]["linear.weight"])


# -- naive top-k -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("nesterov", [False, True])
def test_naive_is_top_k_of_each_steps_gradient_and_momentum_sgd(nesterov):
    """Against torch.optim.SGD on the average of what is left of each worker's gradient; nothing is kept."""
    import job
    from laws import difference, flat, loss, model
    from oracle import top

    import dgc
    size, steps, rates = 3, 30, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": nesterov}
    expected = model(dtype=torch.float64)
    sgd = torch.optim.SGD(expected.parameters(), **rates)
    for step in range(steps):
        total = [torch.zeros_like(p) for p in expected.parameters()]
        for rank in range(size):
            for g, out in zip(torch.autograd.grad(loss(expected, rank, step, torch.float64), expected.parameters()),
                              total, strict=True):
                sparse = g.dim() > 1 and g.numel() >= 1024  # the others travel dense
                out += (g * torch.from_numpy(top(g.numpy(), 0.9)) if sparse else g) / size
        for p, g in zip(expected.parameters(), total, strict=True):
            p.grad = g
        sgd.step()

    def worker(method):
        rank, _, launcher = job.connect()
        network = model(dtype=torch.float64)
        config = dgc.Config(0.9, "exact", momentum_correction=False, factor_masking=False, wire_dtype=torch.float32)
        optimizer = job.distributed(torch.optim.SGD(network.parameters(), **rates), network, launcher, method, config)
        for step in range(steps):
            optimizer.zero_grad()
            loss(network, rank, step, torch.float64).backward()
            optimizer.step()
        return network, optimizer.residual_state_dict()

    for network, residuals in dgc.lockstep.run(lambda: worker("naive"), size):
        assert difference(flat(network), flat(expected)) < 1e-6
        assert len(residuals["v"]) == 2 and not any(v.any() for v in residuals["v"].values())
    network, residuals = dgc.lockstep.run(lambda: worker("topk"), size)[0]
    assert difference(flat(network), flat(expected)) > 1e-3 and all(v.any() for v in residuals["v"].values())


@pytest.mark.parametrize("name", ["cifar10", "ptb"])
def test_naive_has_the_settings_of_gradient_dropping(name):
    import importlib

    from dgc import Config
    module = importlib.import_module(name)
    settings = {key: option.default for key, option in inspect.signature(module.main).parameters.items()}
    naive, topk = (module.config(argparse.Namespace(**{**settings, "method": method}), 100)
                   for method in ("naive", "topk"))
    assert naive == topk == Config(0.999, momentum_correction=False, factor_masking=False)


# -- the language model ------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with a little of Python's documentation, as Penn Treebank's files."""
    from ptb import documentation
    folder = tmp_path_factory.mktemp("ptb")
    for part, lines in documentation().items():
        words = [word for line in lines for word in (*line, "\n")][:3000 if part == "train" else 400]
        (folder / f"ptb.{part}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture
def language_model(text, monkeypatch):
    """Trains a small model without dropout within this process: settings -> result."""
    import job
    import ptb
    monkeypatch.setitem(ptb.SIZES, "small", (32, 0.0))

    def run(**changed):
        settings = {name: option.default for name, option in inspect.signature(ptb.main).parameters.items()}
        a = argparse.Namespace(**{**settings, "data": text, "epochs": 1, "bptt": 20, "virtual_workers": 2, **changed})
        return job.run(lambda: ptb.train(a), a)

    return run


PERPLEXITIES: list[float] = []  # what the first launcher saw


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_language_model_runs_everywhere(launcher, text, tmp_path):
    """Two workers each, compressed, with dropout: alike but for the order of additions."""
    virtual = ["--virtual-workers", "2"] if launcher == "python" else []
    status, output = recipe("--epochs", "2", "--sparsity", "0.99", "--selection", "exact", *virtual,
                            "--out", f"{tmp_path}/out.json", "--tensorboard", f"{tmp_path}/board",
                            launcher=LAUNCHERS[launcher], limit=100, file="ptb.py", data=str(text))
    assert status == 0, output
    assert output.count("dgc: test perplexity ") == 1 and "on ptb after 2 epochs" in output
    assert any("tfevents" in file.name for file in (tmp_path / "board").iterdir())
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["workers"] == 2 and result["history"][1]["bytes_per_step"] < result["dense_bytes_per_step"] / 2
    seen = [result["history"][0]["losses"][0], result["history"][0]["perplexity"], result["perplexity"]]
    PERPLEXITIES.extend(seen if not PERPLEXITIES else ())
    assert seen == pytest.approx(PERPLEXITIES, rel=1e-3) and max(seen) < result["vocabulary"]


@pytest.mark.timeout(120)
def test_float16_is_what_horovod_exchanges(text, tmp_path):
    """After one step at lr 1, a bias that was zero is the averaged gradient, which came in float16; but for that, it is
    the dense one.
    """
    import job
    import ptb
    settings = {"epochs": 1, "bptt": 1000, "lr": 1.0, "clip_norm": 0.0}
    status, output = recipe("--method", "fp16", *(f"--{name.replace('_', '-')}={x}" for name, x in settings.items()),
                            "--checkpoints", f"{tmp_path}/fp16", "--out", f"{tmp_path}/out.json",
                            launcher=LAUNCHERS["horovodrun"], limit=100, file="ptb.py", data=str(text))
    assert status == 0, output
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["steps_per_epoch"] == 1
    assert result["history"][0]["bytes_per_step"] == result["dense_bytes_per_step"] / 2
    defaults = {name: option.default for name, option in inspect.signature(ptb.main).parameters.items()}
    a = argparse.Namespace(**{**defaults, **settings, "data": text, "method": "dense", "virtual_workers": 2,
                              "checkpoints": tmp_path / "dense"})
    job.run(lambda: ptb.train(a), a)
    rounded, dense = (saved(tmp_path / method / "epoch001", 1)["model"]["decoder.bias"] for method in ("fp16", "dense"))
    assert torch.equal(rounded, rounded.half().float()) and not torch.equal(dense, dense.half().float())
    assert (rounded - dense).norm() < 1e-3 * dense.norm()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_dense_training_of_the_language_model_is_that_of_one_process(language_model, momentum):
    """Two workers' halves of a batch, their average clipped, give torch.optim.SGD on the whole batch."""
    together, alone = (language_model(method="dense", momentum=momentum, lr=20 * (1 - momentum), epochs=2,
                                      virtual_workers=workers) for workers in (2, 1))
    assert [epoch["perplexity"] for epoch in together["history"]] == pytest.approx(
        [epoch["perplexity"] for epoch in alone["history"]], rel=1e-4)
    assert together["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-4)


def test_the_language_model_is_trained_with_the_state_that_the_batch_before_left(language_model, text):
    """Against the loop written out: plain SGD, the gradient's norm at most 0.25."""
    import ptb
    result = language_model(method="dense", virtual_workers=1, bptt=50)
    torch.manual_seed(0)
    _, vocabulary, parts = ptb.load(text)
    model, words, hidden, losses = ptb.LanguageModel(vocabulary, 32, 0.0), ptb.columns(parts["train"], 20), None, []
    sgd = torch.optim.SGD(model.parameters(), 20.0)
    for start in range(0, len(words) - 1, 50):
        following = words[start + 1:start + 51]
        logits, hidden = model(words[start:start + len(following)], hidden)
        sgd.zero_grad()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        sgd.step()
        losses.append(loss.item())
    assert len(losses) >= 3 and result["history"][0]["losses"] == pytest.approx(losses, rel=1e-6)


def test_the_perplexities_are_of_validation_in_each_epoch_and_of_the_test_at_last(language_model, text, tmp_path):
    """Of the parameters that are saved, so after what was pending has been applied."""
    import ptb
    result = language_model(sparsity=0.99, checkpoints=tmp_path)
    _, vocabulary, parts = ptb.load(text)
    model = ptb.LanguageModel(vocabulary, 32, 0.0)
    model.load_state_dict(saved(tmp_path / "epoch001", 0)["model"])
    for part, seen in {"valid": result["history"][0]["perplexity"], "test": result["perplexity"]}.items():
        words = ptb.columns(parts[part], 10)
        loss = torch.nn.functional.cross_entropy(model(words[:-1])[0].flatten(0, 1), words[1:].flatten())
        assert seen == pytest.approx(loss.exp().item(), rel=1e-4)


@pytest.mark.parametrize("flush", [True, False])
def test_what_is_pending_in_the_language_model_is_applied_after_the_last_epoch(language_model, flush, tmp_path):
    language_model(epochs=2, sparsity=0.99, flush=flush, checkpoints=tmp_path)
    pending = [[any(v.any() for v in saved(tmp_path / folder, rank)["residuals"]["v"].values()) for rank in range(2)]
               for folder in ("epoch001", "epoch002")]
    assert pending == [[True, True], [not flush] * 2]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("settings", [
    {"method": "topk"}, {"method": "naive"}, {"local_clipping": False}, {"momentum_correction": False},
    {"factor_masking": False}, {"momentum": 0.9, "lr": 2.0}, {"momentum": 0.9, "lr": 2.0, "momentum_correction": False},
    {"clip_norm": 0.0, "lr": 1.0},
], ids=str)
def test_each_part_of_the_language_models_training_can_be_switched_off(language_model, settings):
    result = language_model(sparsity=0.9, **settings)
    assert 1 < result["perplexity"] < result["vocabulary"]


@pytest.mark.timeout(60)
def test_naive_flushes_nothing_and_is_dense_training_where_all_is_sent(language_model):
    """With one worker, whose gradient is not compressed; with two, at a sparsity that keeps nothing back."""
    flushed, kept = (language_model(method="naive", sparsity=0.99, flush=flush) for flush in (True, False))
    assert flushed["perplexity"] == kept["perplexity"] != language_model(method="topk", sparsity=0.99)["perplexity"]
    for workers in (1, 2):
        naive, dense = (language_model(method=method, sparsity=0.99 if workers == 1 else 0.0, virtual_workers=workers)
                        for method in ("naive", "dense"))
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
            for (name, a), (_, b) in zip(flattened(before[part]), flattened(after[part]), strict=True):
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
    results = [language_model(), language_model(method="dense"), language_model(local_clipping=False, epochs=2)]
    console = Console(width=120, record=True)
    console.print(report.table(results))
    shown = console.export_text()
    assert "test perplexity" in shown and "accuracy" not in shown and f"{results[1]['perplexity']:.2f} " in shown
    assert [report.label(result) for result in results] == ["DGC 99.9 %", "dense", "DGC 99.9 %, no local clipping"]
    report.picture(results, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    alone = language_model(virtual_workers=1)  # which sends nothing
    console.print(report.table([alone]))
    assert report.label(alone) == "one worker" and alone["machine"]["dgc"].startswith("0.")
    for i, result in enumerate([results[0], {**results[0], "recipe": "cifar10"}]):
        (tmp_path / f"{i}.json").write_text(json.dumps(result))
    (tmp_path / "2.json").write_text(json.dumps({**results[0], "dataset": "pydoc topics"}))
    for other, message in ((1, "recipe is cifar10, ptb; accepted: results of one"),
                           (2, "dataset is ptb, pydoc topics; accepted: results of one")):
        with pytest.raises(Exception, match=message):
            report.main([tmp_path / "0.json", tmp_path / f"{other}.json"])


def test_the_language_model_says_what_it_cannot_train_on(language_model, tmp_path):
    with pytest.raises(Exception, match="--batch-size 20 is divided over the workers; accepted with 3 of them"):
        language_model(virtual_workers=3)
    with pytest.raises(SystemExit, match=r"lacks ptb\.train\.txt, ptb\.valid\.txt, ptb\.test\.txt; accepted: a folder"):
        language_model(data=tmp_path)
    for part in ("train", "valid", "test"):
        (tmp_path / f"ptb.{part}.txt").write_text("too short")
    with pytest.raises(SystemExit, match="a text of 3 words; accepted: at least 40, for a batch of 20"):
        language_model(data=tmp_path)


def test_the_documentation_is_divided_by_topic():
    from ptb import documentation, load
    texts = documentation()
    assert texts == documentation()
    lengths = {part: sum(len(line) + 1 for line in texts[part]) for part in texts}
    assert 0.88 < lengths["train"] / sum(lengths.values()) < 0.94 and min(lengths.values()) > 2000
    words = {word for lines in texts.values() for line in lines for word in line}
    assert {"<unk>", "the", "("} < words and all(word == word.lower() and not word.isspace() for word in words)
    name, vocabulary, parts = load(None)
    assert name == "pydoc topics" and vocabulary == len(words | {"<eos>"}) == 1 + int(parts["train"].max())
    assert {part: len(numbers) for part, numbers in parts.items()} == lengths


@pytest.mark.parametrize(("arguments", "epochs"), [
    ({"data": Path("ptb")}, 40), ({}, 16), ({"data": Path("ptb"), "epochs": 3}, 3), ({"epochs": 5}, 5)])
def test_the_language_model_trains_for_as_long_as_its_text_needs(arguments, epochs, monkeypatch):
    """Penn Treebank for the paper's 40 epochs, the default text for fewer."""
    import ptb
    seen = []
    monkeypatch.setattr(ptb.job, "run", lambda _, a: seen.append(a.epochs))  # and no result, as on ranks above 0
    ptb.main(**arguments)
    assert seen == [epochs]


def test_the_language_models_are_the_papers():
    """The paper's gradient of 194.68 MB, and its warm-up over the first of 40 epochs."""
    import ptb
    with torch.device("meta"):
        sizes = {size: sum(p.numel() for p in ptb.LanguageModel(10_000, *ptb.SIZES[size]).parameters())
                 for size in ptb.SIZES}
    assert f"{4 * sizes['large'] / 2**20:.2f}" == "194.68" and sizes["small"] == 2_653_200
    defaults = {name: option.default for name, option in inspect.signature(ptb.main).parameters.items()}
    config = ptb.config(argparse.Namespace(**{**defaults, "epochs": 40}), 1328)
    assert [config.sparsity_at(step) for step in (0, 332, 664, 996, 1328)] == pytest.approx(
        [0.75, 0.9375, 0.984375, 0.996, 0.999], abs=2e-4)
    assert config.sparsity_at(331) == 0.75 and config.clip_norm == 0.25


def test_the_hidden_state_goes_on_from_batch_to_batch(text):
    from ptb import LanguageModel, columns, evaluate, load
    torch.manual_seed(0)
    _, vocabulary, parts = load(text)
    model, valid = LanguageModel(vocabulary, 32, 0.5), columns(parts["valid"], 4)
    model.embedding.weight.data.mul_(20)  # so that what came before matters
    assert evaluate(model, valid, 7) == pytest.approx(evaluate(model, valid, 1000), rel=1e-6)
    assert model.training
