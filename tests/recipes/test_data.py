"""Where the data comes from."""

import hashlib
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from launching import ROOT

pytestmark = pytest.mark.long


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
        assert (
            name == "cifar10"
            and images.shape == (10, 3, 32, 32)
            and test_images.shape == (2, 3, 32, 32)
        )
        assert labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and test_labels.tolist() == [5, 5]
        assert images[0, 0, 0, 0] == 11 and images[0, 2, 31, 31] == 22
    with (folder / "data_batch_3.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(
        SystemExit, match=r"data_batch_3\.bin must be records of 3073 bytes, got 6,147 bytes"
    ):
        load(str(tmp_path))
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(
        SystemExit,
        match=r"a folder with all of cifar-10-batches-bin, got one without data_batch_3\.bin",
    ):
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
    monkeypatch.setattr(
        data, "SHA256", hashlib.sha256((tmp_path / "archive.tar.gz").read_bytes()).hexdigest()
    )
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
        monkeypatch.setattr(
            tarfile.TarFile,
            "extractall",
            lambda self, path=".", members=None, *, numeric_owner=False: extractall(
                self, path, members, numeric_owner=numeric_owner
            ),
        )
    (tmp_path / "evil").write_text("out of the folder")
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "evil", "cifar-10-batches-bin/test_batch.bin")
        if not old:
            tar.add(tmp_path / "evil", "../escaped")
    monkeypatch.setattr(data, "URL", (tmp_path / "archive.tar.gz").as_uri())
    monkeypatch.setattr(
        data, "SHA256", hashlib.sha256((tmp_path / "archive.tar.gz").read_bytes()).hexdigest()
    )
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
        # Which remembers the proxies of before.
        monkeypatch.setattr(urllib.request, "_opener", None)
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
    code = (
        "import os, pwd, sys, tempfile\n"
        "def getpwuid(number): raise KeyError(number)\n"
        "pwd.getpwuid = getpwuid\n"
        f"os.environ.update({{'TMPDIR': {str(tmp_path)!r}, 'XDG_CACHE_HOME': ''}})\n"
        + (
            "del os.environ['HOME']\n"
            if home == "gone"
            else f"os.environ['HOME'] = {str(tmp_path)!r}\n"
        )
        + f"sys.path.insert(0, {str(ROOT / 'recipes')!r}); import data; print(data.CACHE)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    expected = tmp_path / f"dgc-{os.getuid()}" if home == "gone" else tmp_path / ".cache" / "dgc"
    assert done.stdout == f"{expected}\n", done.stderr
