"""What the CIFAR-10 recipe trains on: the official archive, or a stand-in that is always there."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import queue
import shutil
import sys
import tarfile
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from tqdm import tqdm

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
SECONDS = 10  # for a download to begin
RECORD = 1 + 3 * 32 * 32  # bytes of a label and its image


def _cache() -> Path:
    """The user's; a temporary one of a user who has no home, as in a container."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dgc"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"dgc-{os.getuid()}"


CACHE = _cache()


def find_data(data: str | None, cache: Path) -> str:
    """What to train on: the folder that was given, else CIFAR-10 downloaded, else scikit-learn's digits."""
    return data or str(download(cache) or "digits")


def load(data: str) -> tuple[str, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Of a folder with CIFAR-10, or "digits": a name, (images, labels) to train and to test. Images are uint8."""
    if data == "digits":
        return ("digits", *digits())
    folder = Path(data)
    folder = folder if (folder / "test_batch.bin").exists() else folder / "cifar-10-batches-bin"
    missing = [
        name
        for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
        if not (folder / name).is_file()
    ]
    if missing:
        raise SystemExit(
            f"{folder} must be a folder with all of cifar-10-batches-bin, got one without "
            f"{', '.join(missing)}"
        )

    def read(
        names: list[str],
    ) -> tuple[Tensor, Tensor]:  # a record is a label and 3 x 32 x 32 bytes
        for name in names:
            if (size := (folder / name).stat().st_size) % RECORD or not size:
                raise SystemExit(
                    f"{folder / name} must be records of {RECORD} bytes, got {size:,} bytes (is the "
                    "download whole?)"
                )
        records = torch.from_numpy(
            np.concatenate([np.fromfile(folder / name, np.uint8) for name in names])
        )
        records = records.view(-1, RECORD)
        return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()

    return "cifar10", read([f"data_batch_{i}.bin" for i in range(1, 6)]), read(["test_batch.bin"])


def download(cache: Path) -> Path | None:
    """The official archive, verified and unpacked; None when the download does not start within ten seconds, or there
    is no place for it.
    """
    folder = cache / "cifar-10-batches-bin"
    try:
        if folder.exists():  # also where nothing can be written
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "cifar-10.lock").open("w") as lock:
            # One of the processes of this machine downloads, the others wait.
            fcntl.flock(lock, fcntl.LOCK_EX)
            _download(cache, folder)
    except (
        OSError,
        http.client.HTTPException,
        ValueError,
    ) as error:  # the last is what a wrong proxy raises
        print(
            f"CIFAR-10 cannot be downloaded ({error}): training on scikit-learn's handwritten digits instead; "
            "--data DIR takes a folder with cifar-10-batches-bin",
            file=sys.stderr,
        )
        return None
    return folder


def _download(cache: Path, folder: Path) -> None:
    if folder.exists():
        return
    archive, unpacked = cache / "cifar-10.part", cache / "cifar-10.unpacked"
    try:
        with started(URL) as response, archive.open("wb") as file:
            digest = copied(response, file)
        if digest != SHA256:
            raise OSError(f"its SHA-256 is {digest} and not {SHA256}")
        with tarfile.open(archive) as tar:
            # Debian 12's Python 3.11.2 has none.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(unpacked)
        (unpacked / folder.name).rename(folder)  # whole or not at all
    finally:
        archive.unlink(missing_ok=True)
        shutil.rmtree(unpacked, ignore_errors=True)


def started(url: str) -> Any:
    """The response to a request, which must come within ten seconds, looking up the name included."""
    answers: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(url, timeout=SECONDS))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=SECONDS)
    except queue.Empty:
        raise OSError(f"no answer within {SECONDS} seconds") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def copied(response: Any, file: BinaryIO) -> str:
    """Copies a response to a file, with a progress bar, and returns its SHA-256."""
    digest, size = hashlib.sha256(), int(response.headers.get("Content-Length") or 0)
    with tqdm(total=size, unit="B", unit_scale=True, desc="CIFAR-10") as bar:
        while chunk := response.read(1 << 20):
            file.write(chunk)
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """1,797 handwritten digits of 8 x 8, enlarged to CIFAR's size; each fifth is for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit(
            "the handwritten digits come with scikit-learn: install what the recipes need, pip install "
            "'.[recipes]'; or give --data a folder with cifar-10-batches-bin"
        ) from None
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float()[:, None] * (255 / 16)
    images = F.interpolate(images, size=32, mode="bilinear").expand(-1, 3, -1, -1).to(torch.uint8)
    labels, test = torch.from_numpy(bunch.target).long(), torch.arange(len(images)) % 5 == 0
    return (images[~test], labels[~test]), (images[test], labels[test])
