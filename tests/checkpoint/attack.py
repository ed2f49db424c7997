"""Attacks on checkpoints, in a process of its own: a crash of it is a failure that the test can see.

``attack.py kill COUNT FOLDER``: a save killed by SIGKILL at COUNT places, among the lines that it executes.
``attack.py mutate COUNT FOLDER SEED``: COUNT damaged checkpoints, four in seven of them with checksums made anew.
Prints a JSON of how often what came out.
"""

import collections
import copy
import hashlib
import io
import json
import os
import random
import shutil
import signal
import sys
import threading
import warnings
import zipfile
from pathlib import Path

import torch
from torch import nn

import dgc

torch.set_num_threads(1)
SIZE = 2


def made(fill=0.0):
    torch.manual_seed(0)
    network = nn.Linear(32, 32)
    nn.init.constant_(network.bias, fill)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return network, dgc.DistributedOptimizer(
        optimizer, network.named_parameters(), dgc.Config(sparsity=0.9)
    )


def step(network, optimizer):
    optimizer.zero_grad()
    rank = dgc.lockstep.current().world.rank
    network(torch.linspace(-1, 1 + rank, 32).view(1, 32)).square().sum().backward()
    optimizer.step()


def state(network, optimizer):
    residuals = optimizer.residual_state_dict()
    return copy.deepcopy(
        [network.state_dict(), optimizer.state_dict(), residuals["u"], residuals["v"]]
    )


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b


def save(folder, fill):
    """On all ranks: what was saved."""

    def worker():
        network, optimizer = made(fill)
        for _ in range(2):
            step(network, optimizer)
        dgc.save_checkpoint(folder, network, optimizer, {"fill": fill})
        return state(network, optimizer)

    return dgc.lockstep.run(worker, SIZE)


# -- killed ------------------------------------------------------------------------------------------------------------


def traced(act, at=None):
    """Counts the lines that an action executes in the checkpoint's and torch's writing; kills the process at one."""
    count = [0]

    def lines(frame, event, _):
        count[0] += event == "line"
        if count[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return lines

    def calls(frame, *_):
        name = frame.f_code.co_filename
        return (
            lines if "/dgc/checkpoint/" in name or name.endswith("torch/serialization.py") else None
        )

    threading.settrace(calls)
    try:
        act()
    finally:
        threading.settrace(None)
    return count[0]


def load(folder):
    """On all ranks: what was loaded and saved as ``fill``; or the error, when nothing may have changed; and how a step
    went on from there.
    """

    def worker():
        network, optimizer = made(-1.0)
        before = state(network, optimizer)
        try:
            fill = dgc.load_checkpoint(folder, network, optimizer).get("fill")
        except (ValueError, FileNotFoundError) as error:
            assert same(state(network, optimizer), before), "something was loaded"
            assert str(folder) in str(error), error
            return str(error), None, None, ""
        loaded = state(network, optimizer)
        try:
            step(network, optimizer)
        except Exception as error:
            return None, fill, loaded, type(error).__name__
        return None, fill, loaded, ""

    return dgc.lockstep.run(worker, SIZE)


def kill(places, folder):
    save(folder, 0.0)
    lines = traced(lambda: save(folder, 0.0))
    current, outcomes = 0.0, collections.Counter(lines=lines)
    # One half evenly, one at the end, where the new one takes the old one's place.
    half = places // 2
    for i, at in enumerate(
        sorted({*(1 + j * lines // half for j in range(half)), *range(lines - half, lines)})
    ):
        fill = float(i + 1)
        child = os.fork()
        if child == 0:
            traced(lambda fill=fill: save(folder, fill), at=at)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        ranks = load(folder)
        assert {error for error, *_ in ranks} == {None}, f"killed at line {at}: {ranks}"
        filled = {fill for _, fill, *_ in ranks}
        assert filled in ({current}, {fill}), (filled, current, fill)
        outcomes["new" if filled == {fill} else "old"] += 1
        (current,) = filled
        expected = save(folder.with_name("whole"), current)
        assert all(same(rank[2], e) for rank, e in zip(ranks, expected, strict=True)), (
            f"killed at line {at}"
        )
    save(folder, 0.0)
    outcomes["files"] = len(list(folder.iterdir()))
    return outcomes


# -- damaged -----------------------------------------------------------------------------------------------------------


def mutated(data, draw, other):
    """Bytes changed in one of the ways that bytes get damaged."""
    data = bytearray(data)
    way, i = draw.randrange(7), draw.randrange(len(data))
    if way == 0:
        data[i] ^= 1 << draw.randrange(8)
    elif way == 1:
        for _ in range(draw.randrange(2, 20)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif way == 2:
        del data[i:]
    elif way == 3:
        data += draw.randbytes(draw.randrange(1, 100))
    elif way == 4:
        data[i : i + draw.randrange(1, 512)] = bytes(draw.randrange(1, 512))
    elif way == 5:
        del data[i : i + draw.randrange(1, 64)]
    else:
        return bytes(other)
    return bytes(data)


def seal(folder, manifest, contents):
    """Writes a checkpoint whose checksums are right, as dgc/checkpoint/ describes it."""
    content = {k: v for k, v in manifest.items() if k != "sha256"}
    content["files"] = {}
    for name, data in contents.items():
        sha = hashlib.sha256(data).hexdigest()
        content["files"][name] = [len(data), sha]
        (folder / f"{name}-{sha[:16]}.pt").write_bytes(data)
    sha = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**content, "sha256": sha}))


def with_another_record(data, draw):
    """A file whose archive is sound, checksums included, around a record that is not: mostly the pickle."""
    source, target = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    names = source.namelist()
    chosen = (
        next(n for n in names if n.endswith("data.pkl"))
        if draw.random() < 0.9
        else draw.choice(names)
    )
    with zipfile.ZipFile(target, "w") as archive:
        for name in names:
            record = source.read(name)
            archive.writestr(
                name, mutated(record, draw, b"") if name == chosen and record else record
            )
    return target.getvalue()


def with_another_leaf(data, draw):
    """A file with something else at one place of its tree."""
    tree = torch.load(io.BytesIO(data), weights_only=True)
    places = []

    def walk(node, path):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(value, (dict, list)):
                walk(value, (*path, key))

    walk(tree, ())
    node, key = draw.choice(places)
    value = node[key]
    junk = [
        None,
        -1,
        2**70,
        1.5,
        float("nan"),
        "x",
        [],
        {},
        {"a": 1},
        (1, 2),
        torch.zeros(0),
        torch.zeros(3, 5),
        torch.ones(32, 32, dtype=torch.complex64),
        torch.ones(32, 32).char(),
        torch.ones(1).expand(32, 32),
        torch.ones(32, 32).t(),
        torch.eye(32).to_sparse(),
        torch.eye(32).to_sparse_csr(),
        torch.ones(64, 64),
        torch.ones(32, 32, dtype=torch.float64),
        torch.ones(32, 32, device="meta"),
        torch.zeros(5056).byte(),
    ]
    way = draw.randrange(5)
    if way == 0 and isinstance(node, dict):
        del node[key]
    elif way == 1 and isinstance(node, dict):
        node[draw.choice(["x", 7, None])] = node.pop(key)
    elif way == 2 and isinstance(value, torch.Tensor) and value.dim():
        node[key] = value[:-1]
    else:
        node[key] = draw.choice(junk)
    target = io.BytesIO()
    torch.save(tree, target)
    return target.getvalue()


def mutate(count, folder, seed):
    """What is loaded is right or an error that changes nothing; with new checksums also a step must not crash."""
    warnings.simplefilter("ignore")
    draw, outcomes = random.Random(seed), collections.Counter()
    expected = save(folder, 0.0)
    manifest = json.loads((folder / "manifest.json").read_text())
    contents = {
        name: (folder / f"{name}-{sha[:16]}.pt").read_bytes()
        for name, (_, sha) in manifest["files"].items()
    }
    for i in range(count):
        place = folder.with_name("damaged")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        name = draw.choice(list(contents))
        kind = ("file", "file", "manifest", "sealed file", "record", "leaf", "leaf")[i % 7]
        data, other = contents[name], contents[draw.choice([n for n in contents if n != name])]
        damaged = (
            {"record": with_another_record, "leaf": with_another_leaf}[kind](data, draw)
            if kind in ("record", "leaf")
            else mutated(data, draw, other)
        )
        seal(place, manifest, {**contents, name: data if kind in ("file", "manifest") else damaged})
        if kind == "file":
            next(place.glob(f"{name}-*")).write_bytes(damaged)
        if kind == "manifest":
            file = place / "manifest.json"
            file.write_bytes(mutated(file.read_bytes(), draw, b"{}"))
        ranks = load(place)
        assert len({error is None for error, *_ in ranks}) == 1, ranks
        if ranks[0][0] is not None:
            outcomes[f"{kind}: error"] += 1
            continue
        right = all(same(rank[2], e) for rank, e in zip(ranks, expected, strict=True))
        # A checksum that is right vouches for values.
        assert right or kind not in ("file", "manifest"), (
            kind,
            name,
        )
        outcomes[f"{kind}: {'right' if right else 'another value'}"] += 1
        for *_, error in ranks:
            if error:
                outcomes[f"{kind}: then {error} in a step"] += 1
    return outcomes


if __name__ == "__main__":
    what, count, folder, *seed = sys.argv[1:]
    place = Path(folder) / "checkpoint"
    print(
        json.dumps(
            kill(int(count), place) if what == "kill" else mutate(int(count), place, int(seed[0]))
        )
    )
