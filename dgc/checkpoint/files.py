"""The files of a checkpoint: written whole or not at all, and read with suspicion."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

FORMAT, VERSION, MANIFEST = "dgc checkpoint", 1, "manifest.json"
# No other file is removed.
OURS = re.compile(r"(common|rank-\d+)(-[0-9a-f]{16}\.pt|\.part)|manifest\.json\.part")
Tree = dict[str, Any]


def file_of(folder: Path, name: str, files: Mapping[str, Any]) -> Path:
    return folder / f"{name}-{files[name][1][:16]}.pt"


def write(
    folder: Path, name: str, dump: Callable[[Any], Any], written: list[Path]
) -> tuple[int, str]:
    """Writes a file under its hash: its length and hash. Its path is added to ``written``, unless
    it was there.
    """
    part = folder / f"{name}.part"
    try:
        with part.open("wb") as file:
            dump(file)
            flush_to_disk(file)
        with part.open("rb") as file:
            entry = measure(file)
        final = file_of(folder, name, {name: entry})
        if not final.exists():
            written.append(final)
        part.replace(final)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    flush_to_disk(folder)
    return entry


def dump(name: str, tree: Tree, file: Any) -> None:
    try:
        torch.save({"version": VERSION, "name": name, **tree}, file)
    except RuntimeError as error:  # torch's writer, which hides what the file said
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def put(
    folder: Path, name: str, content: bytes, entry: tuple[int, str], written: list[Path]
) -> None:
    """Writes a file that came over the network."""
    if write(folder, name, lambda file: file.write(content), written) != tuple(entry):
        raise RuntimeError(
            f"{folder / name}: it was damaged on its way from the rank that wrote it"
        )


def flush_to_disk(what: Any) -> None:
    """Flushes to the disk a file that is open, or a folder's list of files."""
    if isinstance(what, Path):
        with contextlib.suppress(
            OSError
        ):  # some file systems have no such thing, and some folders cannot be read
            descriptor = os.open(what, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    else:
        what.flush()
        os.fsync(what.fileno())


def measure(file: Any) -> tuple[int, str]:
    """Length and SHA-256 of a file that is open."""
    sha, nbytes = hashlib.sha256(), 0
    while chunk := file.read(1 << 20):
        sha.update(chunk)
        nbytes += len(chunk)
    return nbytes, sha.hexdigest()


def publish(folder: Path, content: Tree) -> None:
    """Makes the files the checkpoint, by one rename."""
    part = folder / f"{MANIFEST}.part"
    with part.open("w") as file:
        json.dump({**content, "sha256": checksum(content)}, file, indent=1)
        flush_to_disk(file)
    part.replace(folder / MANIFEST)
    flush_to_disk(folder)
    flush_to_disk(folder.absolute().parent)


def clean(folder: Path, files: Mapping[str, Any]) -> None:
    """Removes what is left of earlier checkpoints, complete or not. What stays this time goes the
    next.
    """
    keep = {file_of(folder, name, files).name for name in files}
    for file in folder.iterdir():
        if OURS.fullmatch(file.name) and file.name not in keep:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def checksum(content: Tree) -> str:
    """The checksum of a manifest."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Tree:
    """The manifest, once it is known to be one."""
    file = folder / MANIFEST
    if not file.exists():
        raise FileNotFoundError(
            f"{folder} must be a checkpoint, got "
            + (f"a folder without {MANIFEST}" if folder.exists() else "no such folder")
        )
    data = file.read_bytes()
    with blamed(file):
        content = json.loads(data)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError("it must be the manifest of a dgc checkpoint, got something else")
        if content.get("version") != VERSION:
            raise ValueError(f"its version must be {VERSION}, got {content.get('version')!r}")
        if content.pop("sha256", None) != checksum(content):
            raise ValueError("its checksum is wrong: it is damaged")
        size, files = content["size"], content["files"]
        if (
            type(size) is not int
            or type(content["average"]) is not bool
            or size != len(files) - 1
            or sorted(files) != sorted(["common", *(f"rank-{r}" for r in range(size))])
        ):
            raise ValueError("it must name one file for each rank, got others")
        for nbytes, sha in files.values():
            if type(nbytes) is not int or nbytes <= 0 or not re.fullmatch("[0-9a-f]{64}", sha):
                raise ValueError("its entries must be a length and a SHA-256, got another")
    return content


def content_of(file: Path, nbytes: int) -> bytes:
    if not file.exists():
        raise FileNotFoundError(f"{file} is gone, which belongs to the checkpoint")
    content = file.read_bytes()
    if len(content) != nbytes:
        raise ValueError(f"{file}: it must have {nbytes} bytes, got {len(content)}")
    return content


def read(folder: Path, name: str, files: Mapping[str, Any], sent: Mapping[str, bytes]) -> Tree:
    """A file's tree, with tensors on the CPU, once the file is known to be the one that was
    written.
    """
    path, (nbytes, sha) = file_of(folder, name, files), files[name]
    with io.BytesIO(sent[name]) if name in sent else path.open("rb") as file:
        found = measure(file)
        with blamed(path):
            if found != (nbytes, sha):
                raise ValueError(
                    f"it must have {nbytes} bytes, got {found[0]}"
                    if found[0] != nbytes
                    else f"its SHA-256 must be {sha}, got {found[1]}"
                )
            return _tree(file, name)


def _tree(file: Any, name: str) -> Tree:
    file.seek(0)
    # torch's older formats could run code in older torch, weights_only or not.
    if file.read(4) != b"PK\x03\x04":
        raise ValueError("it must be a zip archive, as torch.save writes, got something else")
    file.seek(0)
    tree = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(tree, dict) or tree.get("version") != VERSION or tree.get("name") != name:
        raise ValueError(f"it must be a file {name!r} of version {VERSION}, got another")
    parts = {"model", "optimizer"} if name == "common" else {"residuals", "buffers", "random"}
    if missing := sorted(key for key in {*parts, "extras"} if not isinstance(tree.get(key), dict)):
        raise ValueError(f"it must be whole, got one without {missing}")
    check_tensors(tree)
    return tree


def check_tensors(tree: Any) -> None:
    """Refuses tensors whose reading would read other memory: a file can ask for what torch's
    kernels do not check.
    """
    for where, tensor in tree_flatten_with_path(tree)[0]:
        if not isinstance(tensor, Tensor):
            continue
        if tensor.device.type != "cpu":
            raise ValueError(f"a tensor on {tensor.device} at {keystr(where)}")
        if tensor.layout == torch.sparse_coo:
            torch.sparse_coo_tensor(
                tensor._indices(), tensor._values(), tensor.shape, check_invariants=True
            )
        elif tensor.layout != torch.strided:
            raise ValueError(f"a tensor of layout {tensor.layout} at {keystr(where)}")


@contextlib.contextmanager
def blamed(file: Path) -> Iterator[None]:
    """Raises whatever goes wrong within as a ValueError that names the file."""
    try:
        yield
    except Exception as error:  # damaged pickles raise all sorts
        raise ValueError(f"{file}: {str(error) or type(error).__name__}") from error
