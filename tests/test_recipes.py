"""The recipe, on scikit-learn's digits: every way to launch it, and resuming."""

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import end

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "recipes"))
BIN = Path(sys.executable).parent


def recipe(*arguments, launcher=(), limit=200):
    """Runs recipes/cifar10.py and returns its output; ends it after ``limit`` seconds."""
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(ROOT / "recipes" / "cifar10.py"), "--data", "digits", "--threads", "1", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        output, _ = process.communicate(timeout=limit)
    finally:
        end(process.pid)
    return process.returncode, output


LAUNCHERS = {"python": (sys.executable,),
             "horovodrun": (str(BIN / "horovodrun"), "--gloo", "-np", "2", sys.executable),
             "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")}


FIRST_LOSSES: dict[int, float] = {}  # number of workers -> what the first launcher saw


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_file_runs_everywhere(launcher, tmp_path):
    """Two workers each, at density 1: alike but for the order of additions; on one process, plain SGD."""
    virtual = ["--virtual-workers", "2"] if launcher == "python" else []
    status, output = recipe("--method", "dense", "--epochs", "1", "--batch-size", "64", "--out", f"{tmp_path}/out.json",
                            "--tensorboard", f"{tmp_path}/board", *virtual, launcher=LAUNCHERS[launcher])
    assert status == 0, output
    assert "dense: " in output and "on digits after 1 epochs" in output
    assert any("tfevents" in file.name for file in (tmp_path / "board").iterdir())
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["workers"] == 2 and result["history"][0]["bytes_per_step"] == result["dense_bytes_per_step"]
    first = result["history"][0]["losses"][0]  # the same model on the same batch, before any exchange
    assert first == pytest.approx(FIRST_LOSSES.setdefault(2, first))


def test_resuming_is_bit_for_bit(tmp_path):
    """Two workers, killed after the first of two epochs; the residuals come along."""
    arguments = ("--epochs", "2", "--virtual-workers", "2", "--batch-size", "64", "--sparsity", "0.99", "--no-flush")
    folder = tmp_path / "checkpoints"
    assert recipe(*arguments, "--checkpoints", str(folder), launcher=LAUNCHERS["python"])[0] == 0
    straight = torch.load(folder / "epoch002-rank1of2.pt")
    assert len(list(folder.iterdir())) == 4
    for file in folder.glob("epoch002*"):
        file.unlink()
    (folder / "epoch002-rank0of2.pt.part").write_bytes(b"cut off")
    status, output = recipe(*arguments, "--checkpoints", str(folder), "--resume", launcher=LAUNCHERS["python"])
    assert status == 0, output
    resumed = torch.load(folder / "epoch002-rank1of2.pt")
    assert all(v.any() for v in straight["residuals"]["v"].values())
    assert [epoch["losses"] for epoch in straight["history"]] == [epoch["losses"] for epoch in resumed["history"]]
    for part in ("model", "residuals"):
        for (name, a), b in zip(flattened(straight[part]), flattened(resumed[part]), strict=True):
            assert torch.equal(a, b[1]), name


def flattened(tree, name=""):
    if isinstance(tree, dict):
        return [item for key, value in tree.items() for item in flattened(value, f"{name}.{key}")]
    return [(name, torch.as_tensor(tree))]


@pytest.mark.parametrize(("arguments", "message"), [
    (("--resume",), "--resume needs --checkpoints"),
    (("--depth", "21"), "--depth is 21; accepted: 20, 32, 44, 56, 110"),
    (("--method", "fp16"), "accepted under horovodrun"),
    (("--sparsity", "1.0"), "end is 1.0; accepted: a number in [0, 1)"),
    (("--batch-size", "2000"), "--batch-size 2000 x 1 workers is more than 1437 images"),
])
def test_refuses(arguments, message):
    status, output = recipe(*arguments, launcher=LAUNCHERS["python"], limit=60)
    assert status != 0 and message in " ".join(output.replace("│", " ").split())


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


def test_the_networks_are_the_papers():
    """Parameters of the CIFAR ResNets in millions (He et al. 2016, table 6)."""
    from cifar10 import resnet
    sizes = {depth: sum(p.numel() for p in resnet(depth).parameters()) for depth in (20, 32, 44, 56, 110)}
    assert {depth: round(size / 1e6, 2) for depth, size in sizes.items()} == {
        20: 0.27, 32: 0.46, 44: 0.66, 56: 0.85, 110: 1.73}
    assert resnet(20)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


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
