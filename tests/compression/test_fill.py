"""No training step waits for a compiler: another process fills the cache, one for all who want it."""

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")
import dgc
from dgc.compression import kernels
from dgc.compression.kernels import cpu, fill, plain

TRAINING = """
import json, sys, time
import torch
import dgc
from dgc.compression.kernels import cpu, denominator_cpu, fill, owners_cpu, rows_cpu

torch.set_num_threads(1)
chosen = []
at_hand = dgc.compression.kernels.current
dgc.compression.kernels.current = lambda *which: chosen.append(at_hand(*which).__name__) or at_hand(*which)

def worker():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Tanh(), torch.nn.Linear(100, 20))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=1e-3)
    optimizer = dgc.DistributedOptimizer(optimizer, model.named_parameters(), dgc.Config(0.9, value_bits=8))
    data = torch.utils.data.DataLoader(list(range(40)), num_workers=1, multiprocessing_context="fork")
    for step, _ in enumerate(data):
        if step == 20:  # from here on all are compiled, wherever it began
            fill.filling(torch.float32).wait()
        began = time.perf_counter()
        optimizer.zero_grad()
        model(torch.randn(4, 100, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        if step == 0:
            first = time.perf_counter() - began
    reducing = torch.nn.Linear(100, 100)
    with torch.no_grad():  # threads share torch's own generator
        reducing.weight.copy_(torch.randn(100, 100, generator=torch.Generator().manual_seed(0)))
        reducing.bias.zero_()
    optimizer = dgc.DistributedOptimizer(torch.optim.SGD(reducing.parameters(), 0.1, 0.9), reducing.named_parameters(),
                                         dgc.Config(0.9, exchange="reduce"))
    for step in range(3):
        optimizer.zero_grad()
        reducing(torch.randn(4, 100, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    return first, [p.double().sum().item() for p in (*model.parameters(), *reducing.parameters())]

(first, values), _ = dgc.lockstep.run(worker, 2)
misses = sum(sum(loop.stats.cache_misses.values()) for loop in (
    cpu._accumulate, cpu._thresholds, cpu._choose, cpu._scatter, cpu._decay, cpu.index_of_owners,
    rows_cpu.fetch, rows_cpu.encode, rows_cpu.close, rows_cpu.decode, rows_cpu.encode_all, rows_cpu.find_wrong,
    owners_cpu._deal, owners_cpu._add, owners_cpu._sum, owners_cpu._average, owners_cpu._threshold, owners_cpu._find,
    denominator_cpu._note, denominator_cpu._follow))
print(json.dumps({"first": first, "values": values, "chosen": sorted(set(chosen)), "misses": misses}))
"""


def train(folder):
    """With a copy of the package that lies in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", TRAINING],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_processes_that_begin_together_have_one_fill_the_cache(tmp_path):
    """They train meanwhile, with workers that are forked, and to the bit what they train when it is full."""
    shutil.copytree(
        Path(dgc.__file__).parent, tmp_path / "dgc", ignore=shutil.ignore_patterns("__pycache__")
    )
    with ThreadPoolExecutor(3) as pool:
        cold = list(pool.map(lambda _: train(tmp_path), range(3)))
    warm = train(tmp_path)
    (lock,) = tmp_path.rglob("*.lock")
    assert len(lock.read_text().splitlines()) == 1
    print(
        "first step, cold:", [round(c["first"], 2) for c in cold], "warm:", round(warm["first"], 2)
    )
    assert any(
        c["chosen"] == ["dgc.compression.kernels.cpu", "dgc.compression.kernels.plain"]
        for c in cold
    )
    assert warm["chosen"] == ["dgc.compression.kernels.cpu"]
    assert all(c["values"] == warm["values"] for c in cold)
    assert all(c["misses"] == 0 for c in [*cold, warm])  # nothing was compiled but by the one


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """A way into a cache that has nothing."""
    way = fill.Filling(torch.float32)
    way._markers, way._lock = [tmp_path / "compiled"], tmp_path / "lock"
    return way


def test_where_another_one_fills_it_is_waited_for(empty, monkeypatch):
    monkeypatch.setattr(fill, "_locked", lambda file: False)
    monkeypatch.setattr(fill, "POLL_S", 0.0)
    assert not empty.done() and empty._child is None
    empty.mark()
    assert empty.done()


def test_where_filling_fails_the_loops_are_compiled_here(empty, monkeypatch):
    monkeypatch.setattr(fill, "POLL_S", 0.01)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    began = time.monotonic()
    empty.wait()
    assert time.monotonic() - began < 30 and not empty._markers[0].exists()


def test_where_nothing_can_be_written_the_loops_are_compiled_here(empty):
    empty._writable = False
    with pytest.warns(UserWarning, match="can be written.*dgc doctor"):
        assert empty.done()


def test_until_then_plain_operations_are_at_hand(empty, monkeypatch):
    monkeypatch.setattr(fill, "_locked", lambda file: False)
    monkeypatch.setattr(fill, "filling", lambda dtype: empty)
    monkeypatch.setattr(kernels, "_compiled", set())
    assert kernels.current("cpu", torch.float32) is plain
    empty.mark()
    empty.wait()
    assert kernels.current("cpu", torch.float32) is cpu
