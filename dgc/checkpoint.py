"""What is saved: model, optimizer, every rank's residuals and random states, whole or not at all.

A checkpoint is a folder that all ranks write into::

    manifest.json            the number of ranks; length and SHA-256 of each file; and of itself
    common-<hash>.pt         what is alike on all ranks, and rank 0's model whole: {"model", "optimizer", "extras",
                             "sparse"}
    rank-<r>-<hash>.pt       rank r's own: {"residuals", "buffers", "random", "extras"}

Files are named by what is in them, so a new checkpoint is written beside the one before, and becomes *the* checkpoint
when its manifest takes the place of the other's: one rename, after all ranks have said that theirs is on the disk. What
the new manifest does not name is then removed. Whenever a job is killed, the folder holds one or the other.

Rank 0's disk counts. Where the ranks have no file system in common, those whose file rank 0 does not see send it there,
one after the other, and get what they lack from there when they load. So a checkpoint is always in one place, survives
the loss of any other machine, and no rank holds more than one file in memory; the price is the network's time.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import hashlib
import io
import json
import os
import random
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from dgc import fsdp
from dgc.compressor import Collective
from dgc.optimizer import STEP
from dgc.pace import KEYS, SPARSITY
from dgc.transport import Transport, find, gather_bytes
from dgc.warn import warn

T = TypeVar("T")
FORMAT, VERSION, MANIFEST = "dgc checkpoint", 1, "manifest.json"
OURS = re.compile(r"(common|rank-\d+)(-[0-9a-f]{16}\.pt|\.part)|manifest\.json\.part")  # no other file is removed
KINDS = (FileNotFoundError, OSError, ValueError, TypeError, FloatingPointError, RuntimeError)
Tree = dict[str, Any]


def save_checkpoint(path: str | os.PathLike[str], model: nn.Module, optimizer: Any,
                    extras: Mapping[str, Any] | None = None) -> None:
    """Saves a training, between two steps, so that :func:`load_checkpoint` goes on with it to the bit. Call it on all
    ranks (of the optimizer's process set).

    Saved are the model's parameters and each rank's own buffers; the optimizer's state, with the step of the schedule;
    each rank's residuals u and v; each rank's random states (torch on the CPU and on the model's GPUs, ``random``, and
    NumPy if it is imported); and each rank's ``extras``.

    Args:
        path: a folder, which is made where needed. A checkpoint that is there already is replaced by the new one once
            that is complete, and loadable until then, also when the job is killed. Other files are left alone.
        model: whose parameters the optimizer trains; they are alike on all ranks.
        optimizer: a :func:`DistributedOptimizer`, or Horovod's own, which has no residuals.
        extras: anything more, as plain data (numbers, strings, None, tensors, and dicts, lists and tuples of such): a
            scheduler's or a loss scaler's ``state_dict()``, the epoch.

    Raises:
        OSError: a file could not be written on some rank, named in the message.
        TypeError: something is not plain data, so that it could not be loaded without running code; or the parameters
            are sharded (``fully_shard``), for which there is :class:`Residuals`.
        ValueError: a parameter or the optimizer's state differs between ranks, a residual has overflowed, or the
            optimizer has parameters that the model lacks.
        RuntimeError: called between ``backward()`` and ``step()``, or outside the process set.

    All ranks raise what one of them meets. The checkpoint that was at ``path`` before is then still there.
    """
    transport, device, together = _connected(optimizer)
    world, folder, written = transport.world, Path(path), list[Path]()
    assert world is not None
    common: Tree = {}

    def look() -> str:
        # What was sent is in no residual, and not yet applied; stock Horovod's optimizer has the second.
        if getattr(optimizer, "_between", getattr(optimizer, "_synchronized", False)):
            raise RuntimeError("save_checkpoint() was called between backward() and step(); accepted: after step()")
        _check_held(optimizer, model)
        common.update(model=model.state_dict(), optimizer=optimizer.state_dict(), extras=dict(extras or {}),
                      sparse=getattr(optimizer, "_sparse_names", dict)())
        _check_plain(common)
        return _digest([{k: x for k, x in common["model"].items() if k not in buffers}, common["optimizer"]])

    def write() -> dict[str, Any]:
        own = {"residuals": _residuals(optimizer), "buffers": {k: common["model"][k] for k in buffers},
               "random": _random_states(model), "extras": common["extras"]}
        trees = {f"rank-{world.rank}": own, **({"common": common} if world.rank == 0 else {})}
        folder.mkdir(parents=True, exist_ok=True)
        return {name: _write(folder, name, partial(_dump, name, tree), written) for name, tree in trees.items()}

    buffers = model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    digests = together(look)
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise ValueError(f"save_checkpoint: the parameters or the optimizer's state of ranks {others} differ from rank "
                         "0's; accepted: a model that began alike on all ranks, say by "
                         "dgc.broadcast_parameters(model.state_dict())")
    try:
        # All have arrived here: in lockstep, where they have the same generators, they save the same states.
        files = {name: entry for entries in together(write) for name, entry in entries.items()}
        unseen = together(lambda: [r for r in range(world.size) if not _file(folder, f"rank-{r}", files).exists()]
                          if world.rank == 0 else [])[0]
        for rank in unseen:
            name = f"rank-{rank}"
            content = _sent(transport, device, together, _file(folder, name, files), rank, files[name][0])
            together(partial(_put, folder, name, content, files[name], written) if world.rank == 0 else _nothing)
    except BaseException:
        for file in written:  # a full disk should not stay full
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        raise
    manifest = {"format": FORMAT, "version": VERSION, "size": world.size, "files": files,
                "average": getattr(optimizer, "_average", True)}
    together(partial(_publish, folder, manifest) if world.rank == 0 else _nothing)
    together(lambda: _clean(folder, files))


def load_checkpoint(path: str | os.PathLike[str], model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Takes up what :func:`save_checkpoint` saved. Call it on all ranks, with a model and an optimizer made as before.

    With as many ranks as before, training goes on as if it had never stopped, to the bit.

    With N' ranks in place of N, what was pending is conserved. A residual counts for f in the update: 1/N under
    Average, 1 under Sum. Let rank r of N have the part [r/N, (r+1)/N] of an interval, and rank r' of N' get ::

        v'(r') = (sum over r) w(r', r) v(r),    w(r', r) = |the part of r  and  the part of r'| * N f / f'

    computed in float64 and rounded once. As the new parts cover each old one, of length 1/N, the weights of a v(r) add
    up to f / f', so f' (sum v') = f (sum v): what would be applied, if all were, is the same. The same holds for u,
    since momentum is linear. Under Average each new residual is a mean of old ones: on half as many ranks it is the
    mean of two, on twice as many each old one is there twice. Buffers and extras are then those of rank 0, and random
    states are left as the script has set them.

    An optimizer that keeps no residuals (with one process, or Horovod's own) gets the sum f (sum u) in its momentum,
    together with the weight decay's, which is exact; and f (sum v), for which it has no place, is applied to the
    parameters at the saved learning rate, as ``flush()`` does. Steps with one process do not count in the schedule of
    the sparsity. The other way round, an optimizer's momentum moves into u.

    Args:
        path: as given to :func:`save_checkpoint`.
        model: with the parameters and buffers of the one that was saved.
        optimizer: with the same param groups; of the same class and settings.

    Returns:
        The extras that this rank saved (rank 0's, if the number of ranks is another), with tensors on the CPU.

    Raises:
        FileNotFoundError: there is no checkpoint, or a file of it is gone.
        ValueError: a file is damaged, cut short, from elsewhere or of another version, or does not fit the model or
            the optimizer; the message names it and what is wrong. Nothing is loaded then, on any rank.
        TypeError: the parameters are sharded.
        RuntimeError: called outside the process set.

    Nothing in a file is ever executed (``torch.load(weights_only=True)``). The checksums guard against accidents, not
    against somebody who can write into the folder.
    """
    connected, folder = _connected(optimizer), Path(path)
    transport, _, together = connected
    assert transport.world is not None
    look = partial(_manifest, folder) if transport.world.rank == 0 else _nothing
    manifest = together(look)[0]
    for _ in range(10):
        try:
            return _load(folder, manifest, model, optimizer, *connected)
        except FileNotFoundError:  # on all ranks alike; a job that saves there may have put a new one in its place
            before, manifest = manifest, together(look)[0]
            if manifest == before:
                raise
    return _load(folder, manifest, model, optimizer, *connected)


def _load(folder: Path, manifest: Tree, model: nn.Module, optimizer: Any, transport: Transport, device: torch.device,
          together: Callable[[Callable[[], Any]], Any]) -> Tree:
    """What :func:`load_checkpoint` does, with this manifest's files."""
    world = transport.world
    assert world is not None
    size, files = manifest["size"], manifest["files"]
    mine = world.rank if size == world.size else None  # the file with what is this rank's own
    keeps = hasattr(optimizer, "residual_state_dict") and not getattr(optimizer, "_plain", False)
    weights = _weights(size, manifest["average"], world.rank if keeps else None, world.size,
                       getattr(optimizer, "_average", True))
    needed = {"common": None, **{f"rank-{r}": r for r in range(size) if r in weights or r == mine}}
    unseen = together(lambda: [name for name in needed if not _file(folder, name, files).exists()])
    sent: dict[str, bytes] = {}
    for name in sorted(set().union(*unseen)):
        content = _sent(transport, device, together, _file(folder, name, files), 0, files[name][0])
        if name in unseen[world.rank]:
            sent[name] = content
    common: Tree = {}
    own: Tree = {"buffers": {}}
    total: Tree = {"u": {}, "v": {}}
    pending: dict[Tensor, Tensor] = {}

    def read() -> None:
        _check_held(optimizer, model)
        common.update(_read(folder, "common", files, sent))
        with _blamed(_file(folder, "common", files)):
            _check_model(common["model"], model)
            _check_optimizer(optimizer, common["optimizer"])
            _check_sparse(common.setdefault("sparse", {}), _names(optimizer, model))
        expected = optimizer._residuals() if keeps else {letter: _names(optimizer, model) for letter in "uv"}
        for name, rank in needed.items():
            if rank is None:
                continue
            state = _read(folder, name, files, sent)
            with _blamed(_file(folder, name, files)):
                if rank == mine:
                    own.update(state)
                    common["model"].update(own["buffers"])
                    _check_model(common["model"], model)
                    _set_random_states(own["random"], model, dry=True)
                if rank in weights:
                    _check_residuals(state["residuals"], expected, keeps)
                    _accumulate(total, state["residuals"], weights[rank], alone=len(weights) == 1)
        if not keeps:
            with _blamed(_file(folder, "common", files)):
                pending.update(_fold(optimizer, model, common["optimizer"], total))

    def load() -> None:
        with _blamed(_file(folder, "common", files)):
            model.load_state_dict(common["model"])  # as state_dict() gave it, with the versions of its modules

    def apply() -> None:
        if keeps:  # before the optimizer's own state, whose momentum moves into u if it has any
            optimizer._reset()  # what is on its way belongs to another v
            kept = optimizer.residual_state_dict()
            if not (total["u"] or total["v"]):  # it was saved without
                total.update({letter: {k: torch.zeros_like(x) for k, x in kept[letter].items()} for letter in "uv"})
            optimizer.load_residual_state_dict({**kept, **total})
        if hasattr(optimizer, "_sparse") and not optimizer.sparse_as_dense:
            optimizer._load_sparse_names(common["sparse"])
        optimizer.load_state_dict(common["optimizer"])
        with torch.no_grad():
            for p, update in pending.items():
                p.copy_(p.double().add_(update.to(p.device)))
        if mine is not None:
            _set_random_states(own["random"], model)

    together(read)
    before = _on_cpu(model)
    try:
        together(load)
    except BaseException:  # a module of some rank does not take it, which may refuse this too, at the same place
        with contextlib.suppress(Exception):
            model.load_state_dict(before)
        raise
    together(apply)
    return common["extras"] if mine is None else own["extras"]


class Residuals:
    """An optimizer's residuals of this rank, for ``torch.distributed.checkpoint``: beside ``optimizer.state_dict()`` in
    the dict that is saved and loaded, say as ``{"model": ..., "optimizer": ..., "residuals": Residuals(optimizer)}``.

    That takes entries of one name for copies and writes one of them, so each rank's have a name of their own. It loads
    with the same number of ranks only, and is as safe as its files: their index is a pickle, without a checksum.

    Args:
        optimizer: a :func:`DistributedOptimizer`.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer

    def state_dict(self) -> Tree:
        """Called by ``torch.distributed.checkpoint``."""
        state = self._optimizer.residual_state_dict()
        return {"-".join(str(state[key]) for key in ("rank", "size", "shard") if key in state): state}

    def load_state_dict(self, state_dict: Tree) -> None:
        """Called by ``torch.distributed.checkpoint``."""
        state, = state_dict.values()
        self._optimizer.load_residual_state_dict(state)


# -- ranks -------------------------------------------------------------------------------------------------------------

def _connected(optimizer: Any) -> tuple[Transport, torch.device, Callable[[Callable[[], T]], list[T]]]:
    """The transport, the device that it works with, and :func:`_together` over it."""
    if hasattr(getattr(optimizer, "optimizer", None), "residual_state_dict"):  # of Accelerate, Lightning, Fabric
        raise TypeError(f"optimizer is {type(optimizer).__name__}, a wrapper of a DistributedOptimizer; accepted: its "
                        ".optimizer, which has the residuals")
    transport = getattr(optimizer, "_transport", None) or find()
    if transport.world is None:
        raise RuntimeError("this process is outside the process set of the optimizer: save and load on its ranks only")
    if any(fsdp.shard(p) is not None for group in optimizer.param_groups for p in group["params"]):
        raise TypeError("the parameters are sharded, so that no rank has a whole model to save; accepted: whole ones. "
                        "Save sharded ones by torch.distributed.checkpoint, with dgc.Residuals(optimizer)")
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    return transport, device, partial(_together, transport, device)


def _nothing() -> Any:
    """What the other ranks do."""


def _together(transport: Transport, device: torch.device, action: Callable[[], T]) -> list[T]:
    """Acts on all ranks: what the action returned on each (plain JSON data, where it is looked at). What one rank
    raises, all raise, so that none waits for it.
    """
    cause, kind = None, ""
    result: Any = None
    try:
        result = action()
    except Exception as error:
        cause, kind = error, next((k.__name__ for k in KINDS if isinstance(error, k)), "")
        result = str(error) if kind and str(error) else f"{type(error).__name__}: {error}"
        kind = kind or "RuntimeError"
    mine = json.dumps([kind, result]).encode()
    all_ = [json.loads(theirs) for theirs in gather_bytes(transport, mine, "dgc.checkpoint", device)]
    for rank, (kind, result) in enumerate(all_):
        if kind:
            raise getattr(builtins, kind)(f"{result} (on rank {rank})" if len(all_) > 1 else result) from cause
    return [result for _, result in all_]


def _sent(transport: Transport, device: torch.device, together: Callable[[Callable[[], Any]], Any], file: Path,
          root: int, nbytes: int) -> bytes:
    """A file of the root's disk, on all ranks."""
    assert transport.world is not None
    content: list[bytes] = []
    is_root = transport.world.rank == root
    together(lambda: content.append(_content(file, nbytes)) if is_root else None)
    buffer = bytearray(content.pop() if is_root else nbytes)
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    flat.copy_(transport.start(Collective("share", flat.to(device, copy=True), root), "dgc.checkpoint.file")())
    return bytes(buffer)


# -- files -------------------------------------------------------------------------------------------------------------

def _file(folder: Path, name: str, files: Mapping[str, Any]) -> Path:
    return folder / f"{name}-{files[name][1][:16]}.pt"


def _write(folder: Path, name: str, dump: Callable[[Any], Any], written: list[Path]) -> tuple[int, str]:
    """Writes a file under its hash: its length and hash. Its path is added to ``written``, unless it was there."""
    part = folder / f"{name}.part"
    try:
        with part.open("wb") as file:
            dump(file)
            _flush(file)
        with part.open("rb") as file:
            entry = _measure(file)
        final = _file(folder, name, {name: entry})
        if not final.exists():
            written.append(final)
        part.replace(final)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _flush(folder)
    return entry


def _dump(name: str, tree: Tree, file: Any) -> None:
    try:
        torch.save({"version": VERSION, "name": name, **tree}, file)
    except RuntimeError as error:  # torch's writer, which hides what the file said
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def _put(folder: Path, name: str, content: bytes, entry: tuple[int, str], written: list[Path]) -> None:
    """Writes a file that came over the network."""
    if _write(folder, name, lambda file: file.write(content), written) != tuple(entry):
        raise RuntimeError(f"{folder / name}: it was damaged on its way from the rank that wrote it")


def _flush(what: Any) -> None:
    """To the disk: a file that is open, or a folder's list of files."""
    if isinstance(what, Path):
        with contextlib.suppress(OSError):  # some file systems have no such thing, and some folders cannot be read
            descriptor = os.open(what, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    else:
        what.flush()
        os.fsync(what.fileno())


def _measure(file: Any) -> tuple[int, str]:
    """Length and SHA-256 of a file that is open."""
    sha, nbytes = hashlib.sha256(), 0
    while chunk := file.read(1 << 20):
        sha.update(chunk)
        nbytes += len(chunk)
    return nbytes, sha.hexdigest()


def _publish(folder: Path, content: Tree) -> None:
    """From here on it is the checkpoint."""
    part = folder / f"{MANIFEST}.part"
    with part.open("w") as file:
        json.dump({**content, "sha256": _sum(content)}, file, indent=1)
        _flush(file)
    part.replace(folder / MANIFEST)
    _flush(folder)
    _flush(folder.absolute().parent)


def _clean(folder: Path, files: Mapping[str, Any]) -> None:
    """Removes what is left of earlier checkpoints, complete or not. What stays this time goes the next."""
    keep = {_file(folder, name, files).name for name in files}
    for file in folder.iterdir():
        if OURS.fullmatch(file.name) and file.name not in keep:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def _sum(content: Tree) -> str:
    """Of a manifest."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _manifest(folder: Path) -> Tree:
    """The manifest, once it is known to be one."""
    file = folder / MANIFEST
    if not file.exists():
        raise FileNotFoundError(f"{folder} holds no checkpoint: there is no {MANIFEST}")
    data = file.read_bytes()
    with _blamed(file):
        content = json.loads(data)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError("it is not the manifest of a dgc checkpoint")
        if content.get("version") != VERSION:
            raise ValueError(f"its version is {content.get('version')!r}; accepted: {VERSION}")
        if content.pop("sha256", None) != _sum(content):
            raise ValueError("its checksum is wrong: it is damaged")
        size, files = content["size"], content["files"]
        if type(size) is not int or type(content["average"]) is not bool or size != len(files) - 1 or sorted(
                files) != sorted(["common", *(f"rank-{r}" for r in range(size))]):
            raise ValueError("it does not name one file for each rank")
        for nbytes, sha in files.values():
            if type(nbytes) is not int or nbytes <= 0 or not re.fullmatch("[0-9a-f]{64}", sha):
                raise ValueError("it has an entry that is not a length and a SHA-256")
    return content


def _content(file: Path, nbytes: int) -> bytes:
    if not file.exists():
        raise FileNotFoundError(f"{file} is gone, which belongs to the checkpoint")
    content = file.read_bytes()
    if len(content) != nbytes:
        raise ValueError(f"{file}: it has {len(content)} bytes; expected {nbytes}")
    return content


def _read(folder: Path, name: str, files: Mapping[str, Any], sent: Mapping[str, bytes]) -> Tree:
    """A file's tree, with tensors on the CPU, once the file is known to be the one that was written."""
    path, (nbytes, sha) = _file(folder, name, files), files[name]
    with (io.BytesIO(sent[name]) if name in sent else path.open("rb")) as file:
        found = _measure(file)
        with _blamed(path):
            if found != (nbytes, sha):
                raise ValueError(f"it has {found[0]} bytes; expected {nbytes}" if found[0] != nbytes else
                                 f"its SHA-256 is {found[1]}; expected {sha}")
            return _tree(file, name)


def _tree(file: Any, name: str) -> Tree:
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":  # torch's older formats could run code in older torch, weights_only or not
        raise ValueError("it is not a zip archive, which torch.save writes")
    file.seek(0)
    tree = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(tree, dict) or tree.get("version") != VERSION or tree.get("name") != name:
        raise ValueError(f"it is not a file {name!r} of version {VERSION}")
    parts = {"model", "optimizer"} if name == "common" else {"residuals", "buffers", "random"}
    if missing := sorted(key for key in {*parts, "extras"} if not isinstance(tree.get(key), dict)):
        raise ValueError(f"it lacks {missing}")
    _check_tensors(tree)
    return tree


def _check_tensors(tree: Any) -> None:
    """That reading them reads their own memory: a file can ask for what torch's kernels do not check."""
    for where, tensor in tree_flatten_with_path(tree)[0]:
        if not isinstance(tensor, Tensor):
            continue
        if tensor.device.type != "cpu":
            raise ValueError(f"a tensor on {tensor.device} at {keystr(where)}")
        if tensor.layout == torch.sparse_coo:
            torch.sparse_coo_tensor(tensor._indices(), tensor._values(), tensor.shape, check_invariants=True)
        elif tensor.layout != torch.strided:
            raise ValueError(f"a tensor of layout {tensor.layout} at {keystr(where)}")


@contextlib.contextmanager
def _blamed(file: Path) -> Iterator[None]:
    """Whatever goes wrong within is this file's fault."""
    try:
        yield
    except Exception as error:  # damaged pickles raise all sorts
        raise ValueError(f"{file}: {str(error) or type(error).__name__}") from error


# -- what fits ---------------------------------------------------------------------------------------------------------

def _check_plain(trees: Tree) -> None:
    """That it will be loaded, without running code; asked of what loads it, without the tensors' content."""
    for name, tree in trees.items():
        file = io.BytesIO()
        try:
            torch.save(tree_map(_hollow, tree), file)
            file.seek(0)
            _check_tensors(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:
            culprit = re.search(r"GLOBAL (\S+)", str(error))
            raise TypeError(f"save_checkpoint: {name} holds {culprit[1] if culprit else error}; accepted: plain data, "
                            "that is numbers, strings, None, tensors (dense or COO, with content), and dicts, lists "
                            "and tuples of such") from error


def _hollow(leaf: Any) -> Any:
    """A plain tensor without its content; anything else, tensors of other kinds too, as it is."""
    plain = type(leaf) in (Tensor, nn.Parameter) and not vars(leaf) and leaf.device.type != "meta" and (
        leaf.layout in (torch.strided, torch.sparse_coo))
    return torch.empty(0) if plain else leaf


def _check_held(optimizer: Any, model: nn.Module) -> None:
    held = {*model.parameters(), *model.buffers()}
    if foreign := [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in held]:
        raise ValueError(f"the optimizer has parameters that the model lacks, of shapes {foreign[:5]}, and which would "
                         "not be saved; accepted: one module that holds them all, say nn.ModuleList([model, other])")


def _check_sparse(given: Any, names: Mapping[str, Tensor]) -> None:
    """Whose gradients are sparse; files of before do not say."""
    if not isinstance(given, dict):
        raise ValueError(f"what it says of sparse gradients is {given!r}; expected a dict")
    for name, dimensions in given.items():
        if name not in names or type(dimensions) is not int or not 0 < dimensions <= names[name].dim():
            raise ValueError(f"the gradient of {name!r} is said to have {dimensions!r} sparse dimensions; expected the "
                             "name of a parameter, and some of its dimensions")


def _on_cpu(model: nn.Module) -> Tree:
    """A copy of a model's state."""
    state = model.state_dict()
    for name, value in state.items():  # in place, as it knows the versions of its modules
        state[name] = value.to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
    return state


def _check_model(given: Mapping[str, Any], model: nn.Module) -> None:
    expected, parameters = model.state_dict(), {name for name, _ in model.named_parameters(remove_duplicate=False)}
    # A module may change its buffers' shapes when it loads. One that does not will refuse others, but takes a scalar
    # from whatever has one dimension.
    _check_same("model", given, expected, {name for name, x in expected.items() if isinstance(x, Tensor) and (
        name not in parameters and x.dim() > 0)})


def _check_same(what: str, given: Mapping[str, Any], expected: Mapping[str, Any],
                of_any_shape: Collection[str] = ()) -> None:
    if given.keys() != expected.keys():
        raise ValueError(f"{what} lacks {sorted(expected.keys() - given.keys())} and has unknown "
                         f"{sorted(given.keys() - expected.keys())}")
    for name, tensor in expected.items():
        if isinstance(tensor, Tensor):
            _check_like(f"{what}: {name}", given[name], tensor, name in of_any_shape)


def _check_like(what: str, given: Any, expected: Tensor, of_any_shape: bool = False) -> None:
    """That one tensor can be copied into the other."""
    if not isinstance(given, Tensor):
        raise ValueError(f"{what} is not a tensor; expected one of shape {tuple(expected.shape)}")
    if given.shape != expected.shape and not of_any_shape:
        raise ValueError(f"{what} has shape {tuple(given.shape)}; expected {tuple(expected.shape)}")
    if given.layout != expected.layout or not torch.can_cast(given.dtype, expected.dtype):
        raise ValueError(f"{what} is {given.layout}, {given.dtype}; expected {expected.layout}, {expected.dtype}")


def _check_optimizer(optimizer: Any, state: Tree) -> None:
    """What ``load_state_dict`` does not look at, and steps rely on."""
    groups, own = state["param_groups"], optimizer.param_groups
    sizes = [[len(group["params"]) for group in some] for some in (groups, own)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the optimizer's groups have {sizes[0]} parameters; expected {sizes[1]}")
    for i, (given, expected) in enumerate(zip(groups, own, strict=True)):
        # Others that torch has added since then get their defaults.
        steady = {"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"}
        if missing := sorted(expected.keys() & steady - given.keys()):
            raise ValueError(f"group {i} of the optimizer lacks {missing}")
        for key in (expected.keys() & given.keys()) - {"params"}:
            value, numbers = given[key], (bool, int, float, Tensor, type(None))
            alike = isinstance(value, numbers if isinstance(expected[key], numbers) else type(expected[key]))
            if not alike or (isinstance(value, Tensor) and value.numel() != 1) or (
                    key == STEP and (type(value) is not int or value < 0)) or (
                    key in KEYS.values() and not (isinstance(value, float) and -1 <= value <= 1)) or (
                    key == SPARSITY and not 0 <= value < 1):
                raise ValueError(f"{key} of group {i} is {value!r}; expected something like {expected[key]!r}")
    parameters = _by_index(optimizer, state)
    for index, buffers in state["state"].items():
        if index not in parameters:
            raise ValueError(f"the optimizer has a state of parameter {index!r}, which is in no group")
        for key in ("momentum_buffer", "decay_buffer"):
            if (buffer := buffers.get(key)) is not None:
                sparse = isinstance(buffer, Tensor) and key == "momentum_buffer" and buffer.is_sparse  # of an embedding
                _check_like(f"{key} of parameter {index}", buffer.to_dense() if sparse else buffer, parameters[index])


def _by_index(optimizer: Any, state: Tree) -> dict[int, Tensor]:
    """A saved optimizer's numbers of parameters -> these parameters."""
    return {index: p for given, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
            for index, p in zip(given["params"], own["params"], strict=True)}


def _names(optimizer: Any, model: nn.Module) -> dict[str, Tensor]:
    """Name -> parameter, by the names that residuals have."""
    names = getattr(optimizer, "_parameter_names", None)
    return dict(model.named_parameters()) if names is None else {name: p for p, name in names.items()}


def _check_residuals(given: Tree, expected: Tree, keeps: bool) -> None:
    """Args: ``expected``: what the optimizer keeps; or, if it keeps nothing, all that it could be given."""
    for letter in "uv":
        for name, tensor in given[letter].items():
            if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{letter} of {name} is not a tensor of float32 or float64")
            if not tensor.isfinite().all():
                raise ValueError(f"{letter} of {name} is not finite")
        some = expected[letter]
        if keeps and not (given["u"] or given["v"]):
            continue  # it was saved without
        _check_same(letter, given[letter], some if keeps else {k: some[k] for k in given[letter] if k in some})


# -- residuals ---------------------------------------------------------------------------------------------------------

def _residuals(optimizer: Any) -> Tree:
    """This rank's u and v; Horovod's own optimizer has none."""
    if not hasattr(optimizer, "residual_state_dict"):
        return {"u": {}, "v": {}}
    state = optimizer.residual_state_dict()
    for letter in "uv":
        for name, tensor in state[letter].items():
            if not tensor.isfinite().all():
                raise ValueError(f"save_checkpoint: {letter} of {name} is not finite; accepted: a training whose sums "
                                 "have not overflowed")
    return {letter: state[letter] for letter in "uv"}


def _weights(size: int, average: bool, new_rank: int | None, new_size: int, new_average: bool) -> dict[int, float]:
    """Old rank -> what its residual counts on this rank; see :func:`load_checkpoint`. Without a new rank: in all."""
    f, new_f = (Fraction(1, n) if mean else Fraction(1) for n, mean in ((size, average), (new_size, new_average)))
    if new_rank is None:
        return dict.fromkeys(range(size), float(f))
    weights = {}
    for r in range(size):
        overlap = min(Fraction(r + 1, size), Fraction(new_rank + 1, new_size)) - max(
            Fraction(r, size), Fraction(new_rank, new_size))
        if overlap > 0:
            weights[r] = float(overlap * size * f / new_f)
    return weights


def _accumulate(total: Tree, residuals: Tree, weight: float, alone: bool) -> None:
    """Adds a rank's residuals to the total, in float64; alone and whole they stay as they are, to the bit."""
    for letter in "uv":
        if total[letter]:
            _check_same(letter, residuals[letter], total[letter])
        for name, tensor in residuals[letter].items():
            if alone and weight == 1:
                total[letter][name] = tensor
            elif name in total[letter]:
                total[letter][name].add_(tensor, alpha=weight)
            else:
                total[letter][name] = tensor.double() * weight


def _fold(optimizer: Any, model: nn.Module, state: Tree, total: Tree) -> dict[Tensor, Tensor]:
    """Moves u and the decay's momentum into the momentum of the state of an optimizer that keeps no residuals.

    Returns:
        Parameter -> what pending v adds to it, float64.
    """
    pending = any(x.any() for letter in "uv" for x in total[letter].values())
    if pending and not isinstance(optimizer, torch.optim.SGD):
        raise ValueError(f"gradients are pending, and {type(optimizer).__name__} keeps no residuals here; accepted: "
                         "two or more processes; one with HOROVOD_ELASTIC=1, which keeps them; or torch.optim.SGD")
    names = _names(optimizer, model)
    indices = {p: index for index, p in _by_index(optimizer, state).items()}
    group_of = {index: group for group in state["param_groups"] for index in group["params"]}
    for name, u in total["u"].items():
        index = indices[names[name]]
        buffers = state["state"].setdefault(index, {})
        momentum, decay = u.double().mul_(-1 if group_of[index]["maximize"] else 1), buffers.pop("decay_buffer", None)
        if decay is not None:
            momentum.add_(decay)
        if (own := buffers.get("momentum_buffer")) is not None:  # where the gradients are sparse it is not in u
            if not momentum.any():
                continue
            momentum.add_(own.to_dense() if own.is_sparse else own)
        if momentum.any() or group_of[index]["momentum"]:
            buffers["momentum_buffer"] = momentum.to(names[name].dtype)
    updates = {}
    for name, v in total["v"].items():
        group = group_of[indices[names[name]]]
        updates[names[name]] = v.double() * (float(group["lr"]) * (1 if group["maximize"] else -1))
    return updates


# -- random states -----------------------------------------------------------------------------------------------------

def _devices(model: nn.Module) -> list[torch.device]:
    """Of the model, beside the CPU; in order."""
    return sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)


def _random_states(model: nn.Module) -> Tree:
    states: Tree = {"torch": torch.get_rng_state(), "python": random.getstate(),
                    "cuda": [torch.cuda.get_rng_state(device) for device in _devices(model)]}
    if "numpy" in sys.modules:
        import numpy as np
        kind, key, *rest = np.random.get_state()
        if kind != "MT19937":
            raise TypeError(f"save_checkpoint: the bit generator of numpy.random is {kind}; accepted: MT19937, NumPy's "
                            "own choice")
        states["numpy"] = (kind, list(map(int, key)), *rest)
    return states


def _set_random_states(states: Tree, model: nn.Module, dry: bool = False) -> None:
    """Sets all random states of this process; with ``dry`` those of generators made for it, to see whether it can."""
    (torch.Generator().set_state if dry else torch.set_rng_state)(states["torch"])
    (random.Random() if dry else random).setstate(states["python"])
    devices = _devices(model)
    if len(devices) != len(states["cuda"]) and not dry:
        warn(f"the checkpoint has random states of {len(states['cuda'])} GPUs and the model is on {len(devices)}: what "
             "is drawn on GPUs will differ")
    for device, state in zip(devices, states["cuda"], strict=False):
        torch.Generator(device).set_state(state) if dry else torch.cuda.set_rng_state(state, device)
    if "numpy" in states:
        kind, key, position, *_ = states["numpy"]
        if kind != "MT19937" or len(key) != 624 or not 0 <= position <= 624:  # NumPy does not look at the position
            raise ValueError("NumPy's random state is not one")
        with contextlib.suppress(ImportError):  # then nothing will be drawn from it
            import numpy as np
            (np.random.RandomState() if dry else np.random).set_state(states["numpy"])


def _digest(tree: Any) -> str:
    """Of all that is in it, whatever the order of dicts and sets."""
    sha = hashlib.sha256()

    def walk(node: Any) -> None:
        if isinstance(node, Mapping):
            for key in sorted(node, key=str):
                sha.update(f"{key}:".encode())
                walk(node[key])
        elif isinstance(node, (list, tuple)):
            sha.update(f"{len(node)}:".encode())
            for item in node:
                walk(item)
        elif isinstance(node, (set, frozenset)):  # in an order that each process draws for itself
            walk(sorted(map(repr, node)))
        elif isinstance(node, Tensor):
            sha.update(f"{node.dtype}{tuple(node.shape)}".encode())
            for part in _dense(node):
                if part.numel():
                    buffer = bytearray(part.numel() * part.element_size())
                    torch.frombuffer(buffer, dtype=torch.uint8).copy_(part.contiguous().view(-1).view(torch.uint8))
                    sha.update(buffer)
        else:
            sha.update(repr(node).encode())

    walk(tree)
    return sha.hexdigest()


def _dense(tensor: Tensor) -> Iterable[Tensor]:
    tensor = tensor.detach()
    return (tensor.coalesce().indices(), tensor.coalesce().values()) if tensor.is_sparse else (tensor,)
