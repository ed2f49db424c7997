"""Law 5 for the exchange that adds up at owners: each compiled loop equals its twin in torch operations, to the bit."""

import os

import numpy as np
import pytest
import torch
from laws import misleading
from pairs import DEVICE
from pairwise import pairwise

from dgc.compression import kernels, select
from dgc.compression import sizes as messages
from dgc.compression.kernels import owners_plain, plain
from dgc.compression.regions import Plan
from dgc.compression.residual import Bucket, Gradient
from dgc.compression.wire import CORRUPT, NONFINITE, Layout, seal

owners_cpu = pytest.importorskip("dgc.compression.kernels.owners_cpu", reason="numba is not installed",
                                 exc_type=ImportError)
owners_cuda = pytest.importorskip("dgc.compression.kernels.owners_cuda", reason="triton is not installed",
                                  exc_type=ImportError)
COMPILED = pytest.mark.parametrize("compiled", [owners_cpu, owners_cuda], ids=["numba", "triton"])
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # NumPy's
SHAPES = {"a": (300, 401), "b": (70_000,), "c": (5,), "d": (0, 3), "e": (40, 41), "f": (150, 200)}
SMALL = {"a": (25, 40), "b": (7,), "c": (30, 11)}


@pytest.fixture(autouse=True)
def twin_in_torch_operations(monkeypatch):
    monkeypatch.setattr(kernels, "current", lambda kind, dtype: plain)


@pytest.fixture
def three_threads(monkeypatch):
    """As on a machine with several cores, and for small tensors too."""
    for name, value in {"SLOTS": 1 << 4, "PIECES": 1, "SPREAD": 1 << 9}.items():
        monkeypatch.setattr(owners_cpu, name, value)
    monkeypatch.setattr(owners_cpu.cpu, "CHUNK", 1 << 14)
    monkeypatch.setattr(owners_cpu.cpu, "SLOTS", 1 << 6)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


class Job:
    """All workers of an exchange, once with compiled loops and once with the torch operations."""

    def __init__(self, compiled, n, shapes, dtype=torch.float32, wire=torch.float16, sparsity=0.99, velocity=True):
        self.n, self.kernels, self.shapes = n, (compiled, owners_plain), shapes
        self.devices = DEVICE if compiled is owners_cuda else "cpu", "cpu"
        self.buckets = [[Bucket("bucket 0", {k: torch.empty(s, dtype=dtype, device=device)
                                             for k, s in shapes.items()}, velocity) for _ in range(n)]
                        for device in self.devices]
        counts = [select.count(sparsity, numel) for numel in self.buckets[0][0].numels]
        self.plans = [[Plan(Layout(buckets[0], counts, wire), n, own) for own in range(n)] for buckets in self.buckets]

    def step(self, gradients, step, masking=True, scale=None):
        """Both phases; the messages of all owners."""
        (ours, messages), (theirs, _) = (self.walk(i, gradients, step, masking, scale) for i in range(2))
        for name in ours:
            assert len(ours[name]) == len(theirs[name])
            assert all(torch.equal(a.cpu(), b) for a, b in zip(ours[name], theirs[name], strict=True)), name
        self.agree()
        return messages

    def walk(self, i, gradients, step=0, masking=True, scale=None):
        """Both phases with the compiled loops, 0, or with torch operations, 1."""
        kernel, device, found = self.kernels[i], self.devices[i], {"chosen": [], "rows": [], "status": [], "sent": []}
        there = [{name: Gradient(g.g.to(device), g.momentum, g.nesterov) for name, g in own.items()}
                 for own in gradients]
        for bucket, plan, own in zip(self.buckets[i], self.plans[i], there, strict=True):
            clip = None if scale is None else scale.to(device)
            bad, index, used = kernel.select(bucket, own, clip, plan, step)
            found["chosen"].append(index[plan.layout.uses(used)])
            refused = torch.tensor(bool(bad), device=device)
            rows, _ = kernel.send(bucket, plan, index, used, refused, masking)
            found["rows"].append(rows)
        for r, (bucket, plan, own) in enumerate(zip(self.buckets[i], self.plans[i], there, strict=True)):
            arrived = kernel.add(bucket, plan, torch.stack([rows[r] for rows in found["rows"]]))
            message, _ = kernel.pass_on(bucket, own, plan, arrived, step, masking)
            found["status"].append(arrived.status)
            found["sent"].append(message)
        messages = torch.cat(found["sent"])
        found["update"] = self._read(i, messages)
        return found, messages

    def _read(self, i, messages):
        received = self.kernels[i].Received(self.plans[i][0], messages, self.n)
        dtype, flats = self.plans[i][0].layout.residual, []
        for without in (None, next(iter(self.shapes))):
            written, added = ([None if name == without else torch.full(shape, 0.7, dtype=dtype, device=self.devices[i])
                               for name, shape in self.shapes.items()] for _ in range(2))
            received.write(written)
            received.add(added, [0.3 * i for i in range(len(added))])
            flats += [t for t in (*written, *added) if t is not None]
        return [received.status, *flats]

    def agree(self):
        for ours, theirs in zip(*self.buckets, strict=True):
            assert torch.equal(ours.v.cpu(), theirs.v)
            assert ours.u is None or torch.equal(ours.u.cpu(), theirs.u)
            for name in ("overflow_entries", "held_entries", "total_entries"):
                assert int(getattr(ours, name)) == int(getattr(theirs, name)), name


def gradients(step, n, shapes, dtype=torch.float32, nesterov=False):
    """Of parameters whose scales differ; of one without momentum. A part is common to all workers."""
    draw = torch.Generator().manual_seed(step)
    common = {k: torch.randn(s, generator=draw) for k, s in shapes.items()}
    return [{k: Gradient((10.0 ** (i - 3) * (common[k] + torch.randn(s, generator=draw)) ** 3).to(dtype),
                         0.0 if k == "b" else 0.9, nesterov) for i, (k, s) in enumerate(shapes.items())}
            for _ in range(n)]


DTYPES, WIRES = (torch.float32, torch.float64), (torch.float16, torch.bfloat16, torch.float32)


@pairwise(size=((2, SHAPES), (3, SHAPES), (16, SMALL)), dtype=DTYPES, wire=WIRES)
@pytest.mark.usefixtures("three_threads")
def test_steps(size, dtype, wire):
    steps_alike(owners_cpu, *size, dtype, wire)


@pytest.mark.parametrize(("n", "shapes", "dtype", "wire"), [
    (2, SMALL, torch.float32, torch.float16), (3, SMALL, torch.float64, torch.float32),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        (2, SHAPES, torch.float32, torch.float16), (5, SMALL, torch.float32, torch.bfloat16),
        (5, SMALL, torch.float64, torch.float16)))])
def test_steps_on_a_gpu(n, shapes, dtype, wire):
    steps_alike(owners_cuda, n, shapes, dtype, wire)


def steps_alike(compiled, n, shapes, dtype, wire):
    """Steps with everything in them: a parameter without momentum, one that sits out, clipping; u masked, and
    kept; rows of one worker that do not fit.
    """
    job = Job(compiled, n, shapes, dtype, wire, 0.98 if shapes is SHAPES else 0.9)
    for step in range(7):
        some = gradients(step, n, shapes, dtype, nesterov=wire == torch.bfloat16)
        if step == 2:
            for g in some:
                del g["a"]
        if step == 3:  # all that is large belongs to one owner
            bucket, plan = job.buckets[1][0], job.plans[1][0]
            mine = torch.zeros(bucket.numel, dtype=dtype)
            plan.regions.write(mine, 0, torch.full((int(plan.size),), 1.0, dtype=dtype))
            for name, view in bucket.views(mine).items():
                some[1][name] = Gradient(some[1][name].g * (1 + 1000 * view), 0.9)
        job.step(some, step, step % 2 == 0, scale=torch.tensor(0.7) if step == 4 else None)
        assert step != 3 or n == 2 or int(job.buckets[0][1].overflow_entries) > 0
    assert n == 2 or int(job.buckets[0][0].held_entries) > 0


@pairwise(pattern=["random", "rows", "sorted", "few", "equal"], zeros=[0.0, 0.9, 1.0], velocity=[True, False])
def test_a_sample_that_misleads_decides_nothing(pattern, zeros, velocity):
    shapes = {"a": (200, 300), "b": (50, 100)}
    job = Job(owners_cpu, 3, shapes, velocity=velocity, sparsity=0.95)
    for step in range(3):
        some = [{k: Gradient(misleading(s[0] * s[1], 9 * step + r, zeros, pattern).view(s), 0.9)
                 for k, s in shapes.items()} for r in range(3)]
        job.step(some, step)


@pytest.mark.parametrize("compiled", [owners_cpu, pytest.param(owners_cuda, marks=pytest.mark.long)],
                         ids=["numba", "triton"])
def test_workers_without_a_region(compiled):
    """So many that some own no block of 16."""
    job = Job(compiled, 20, {"a": (16, 16)}, sparsity=0.9)
    for step in range(3 if compiled is owners_cpu else 1):
        job.step(gradients(step, 20, job.shapes), step)
    assert min(job.plans[1][0].regions.sizes) == 0


@COMPILED
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_told(compiled, bad):
    """A gradient: by all rows of its rank. A sum: by its owner. What is finite in the residuals is alike."""
    job, some = Job(compiled, 3, SMALL, sparsity=0.9), gradients(0, 3, SMALL)
    some[1]["c"].g[3, 3] = bad
    job.step(some, 0)
    for i in range(2):
        found, _ = job.walk(i, some, 1)
        assert [status.tolist()[1] for status in found["status"]] == [NONFINITE] * 3
    job = Job(compiled, 3, SMALL, sparsity=0.9)
    for i, (kernel, plans, buckets) in enumerate(zip(job.kernels, job.plans, job.buckets, strict=True)):
        v, plan = buckets[2].v, plans[2]
        plan.regions.write(v, 2, v.new_full((int(plan.size),), bad))
        _, message = job.walk(i, gradients(0, 3, SMALL))
        assert kernel.Received(plans[0], message, 3).status.tolist()[2] == NONFINITE


def written(kernel, plan, phase, mutated):
    """What a kernel makes of one phase's rows: of its v, or of an update; a guard on both sides stays as it was."""
    device = plan.layout.device
    whole = torch.full((plan.layout.numel + 128,), 7.0, device=device)
    inner = whole[64:-64].zero_()
    if phase:
        kernel.Received(plan, mutated.to(device), 3).write(inner.split(plan.layout.numels))
    else:
        bucket = Bucket("bucket 0", {"a": torch.empty(1, plan.layout.numel, device=device)})
        bucket.v = inner
        kernel.add(bucket, plan, mutated.to(device))
    assert (whole[:64] == 7).all() and (whole[-64:] == 7).all()
    return inner.cpu().view(torch.int32)  # whose bits may be no number


def said(kernel, plan, phase, mutated):
    """The status of each row, and whose is damaged."""
    form, sizes = ((plan.to_owners, plan.size), (plan.to_all, plan.regions.sizes))[phase]
    if kernel is owners_plain:
        entries = form.decode(mutated, sizes)
    else:
        entries = kernel._Said(form, mutated.to(sizes.device), sizes.numpy() if kernel is owners_cpu else sizes)
    return [torch.as_tensor(numbers).tolist() for numbers in (entries.status, entries.whose)]


@pytest.mark.timeout(3600 if "DGC_SOAK" in os.environ else 300)
@pytest.mark.parametrize(("compiled", "seed"), [*((owners_cpu, seed) for seed in range(4)), (owners_cuda, 4)])
def test_mutated_rows_are_refused_alike(compiled, seed):
    """Of both phases, with a checksum that is right again; what is not refused is read alike, and within bounds."""
    draw = np.random.default_rng(seed)
    shapes, sparsity = (SHAPES, 0.999) if compiled is owners_cpu else (SMALL, 0.9)
    job = Job(compiled, 3, shapes, sparsity=sparsity)
    found, messages = job.walk(1, gradients(seed, 3, shapes))
    sent = torch.stack([rows[0] for rows in found["rows"]]), messages
    refused = read = 0
    for turn in range(25_000 if "DGC_SOAK" in os.environ else 250):
        phase, row = turn % 2, int(draw.integers(0, 3))
        mutated = sent[phase].clone()
        for at in draw.integers(0, mutated.shape[1] - 8, draw.integers(1, 4)):
            mutated[row, at] = int(draw.integers(0, 256))
        seal(mutated)
        ours, theirs = (said(kernel, plans[0], phase, mutated)
                        for kernel, plans in zip(job.kernels, job.plans, strict=True))
        assert ours == theirs
        refused += CORRUPT in theirs[0]
        if turn % 25 < 2 and max(theirs[0]) < CORRUPT:
            ours, theirs = (written(kernel, plans[0], phase, mutated)
                            for kernel, plans in zip(job.kernels, job.plans, strict=True))
            assert torch.equal(ours, theirs)
            read += 1
    print(f"seed {seed}: {refused} of {turn + 1} refused, {read} of the others read into guarded memory")
    assert refused and read


@COMPILED
def test_a_row_that_tells_whose_is_damaged_is_not_taken_for_damaged_itself(compiled):
    """Its first count is a rank's number, and larger than its slots."""
    job = Job(compiled, 100, {"a": (32, 32)}, sparsity=0.99)
    for kernel, (plan, *_) in zip(job.kernels, job.plans, strict=True):
        assert plan.to_all.slots < 90
        received = kernel.Received(plan, plan.to_all.telling(100, CORRUPT, 90), 100)
        assert received.status.tolist() == [CORRUPT] * 100 and received.whose.tolist() == [90] * 100


@COMPILED
def test_places_that_do_not_ascend_are_refused(compiled):
    job = Job(compiled, 3, SMALL, sparsity=0.9)
    form = job.plans[1][0].to_all
    index = torch.tensor([3, 5, 9])
    message, _ = form.encode(torch.zeros(3, dtype=torch.int64), index, torch.ones(3), 1)
    at = form.ends[1]
    for first, second, fine in ((3, 5, True), (5, 3, False), (5, 5, False)):
        row = message.clone()
        row[0, at:at + 4].view(torch.int16).copy_(torch.tensor([first, second]))
        for kernel, (plan, *_) in zip(job.kernels, job.plans, strict=True):
            assert said(kernel, plan, 1, seal(row).expand(3, -1))[0] == [-14 if fine else CORRUPT] * 3


@COMPILED
def test_no_slots_are_made_of_chance(compiled, monkeypatch):
    """Rows with one slot each: the largest entry of each, beside the mean of its parameter."""
    monkeypatch.setattr(messages, "row_slots", lambda slots, n: 1)
    job = Job(compiled, 3, SMALL, sparsity=0.9)
    for step in range(3):
        job.step(gradients(step, 3, SMALL), step)
    assert all(int(bucket.overflow_entries) > 50 for bucket in job.buckets[0])
