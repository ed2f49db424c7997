"""Law 5 for the exchange that adds up at owners: each compiled loop equals its twin in torch operations, to the bit."""

import os

import numpy as np
import pytest
import torch
from laws import misleading

from dgc import cost
from dgc.compression import kernels, select
from dgc.compression.kernels import owners_plain, plain
from dgc.compression.regions import Plan
from dgc.compression.residual import Bucket, Gradient
from dgc.compression.wire import CORRUPT, NONFINITE, Layout, seal

owners_cpu = pytest.importorskip("dgc.compression.kernels.owners_cpu", reason="numba is not installed",
                                 exc_type=ImportError)
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
    """All workers of an exchange, once with the compiled loops and once with the torch operations."""

    def __init__(self, n, shapes, dtype=torch.float32, wire=torch.float16, sparsity=0.99, velocity=True):
        self.n, self.kernels, self.shapes = n, (owners_cpu, owners_plain), shapes
        self.buckets = [[Bucket("bucket 0", {k: torch.empty(s, dtype=dtype) for k, s in shapes.items()}, velocity)
                         for _ in range(n)] for _ in self.kernels]
        first = self.buckets[0][0]
        layout = Layout(first, [select.count(sparsity, numel) for numel in first.numels], wire)
        self.plans = [Plan(layout, n, own) for own in range(n)]

    def step(self, gradients, step, masking=True, exact=False, scale=None):
        """Both phases; the messages of all owners."""
        both = [self._walk(kernel, buckets, gradients, step, masking, exact, scale)
                for kernel, buckets in zip(self.kernels, self.buckets, strict=True)]
        (ours, messages), (theirs, _) = both
        for name in ours:
            assert len(ours[name]) == len(theirs[name])
            assert all(torch.equal(a, b) for a, b in zip(ours[name], theirs[name], strict=True)), name
        self.agree()
        return messages

    def _walk(self, kernel, buckets, gradients, step, masking, exact, scale):
        found = {"chosen": [], "rows": [], "status": [], "sent": []}
        for r, (bucket, plan) in enumerate(zip(buckets, self.plans, strict=True)):
            bad, index, used = kernel.select(bucket, gradients[r], scale, plan, exact, step)
            found["chosen"].append(index[plan.layout.uses(used)])
            rows, _ = kernel.send(bucket, gradients[r], plan, index, used, torch.tensor(bool(bad)), masking)
            found["rows"].append(rows)
        for r, (bucket, plan) in enumerate(zip(buckets, self.plans, strict=True)):
            arrived = kernel.add(bucket, plan, torch.stack([rows[r] for rows in found["rows"]]))
            message, _ = kernel.pass_on(bucket, gradients[r], plan, arrived, step, masking)
            found["status"].append(arrived.status)
            found["sent"].append(message)
        messages = torch.cat(found["sent"])
        found["update"] = self._read(kernel, messages)
        return found, messages

    def _read(self, kernel, messages):
        received = kernel.Received(self.plans[0], messages, self.n)
        dtype, flats = self.plans[0].layout.residual, []
        for without in (None, next(iter(self.shapes))):
            written, added = ([None if name == without else torch.full(shape, 0.7, dtype=dtype)
                               for name, shape in self.shapes.items()] for _ in range(2))
            received.write(written)
            received.add(added, [0.3 * i for i in range(len(added))])
            flats += [t for t in (*written, *added) if t is not None]
        return [received.status, *flats]

    def agree(self):
        for ours, theirs in zip(*self.buckets, strict=True):
            assert torch.equal(ours.v, theirs.v) and (ours.u is None or torch.equal(ours.u, theirs.u))
            for name in ("overflow_entries", "held_entries", "total_entries"):
                assert int(getattr(ours, name)) == int(getattr(theirs, name)), name


def gradients(step, n, shapes, dtype=torch.float32, nesterov=False):
    """Of parameters whose scales differ; of one without momentum. A part is common to all workers."""
    draw = torch.Generator().manual_seed(step)
    common = {k: torch.randn(s, generator=draw) for k, s in shapes.items()}
    return [{k: Gradient((10.0 ** (i - 3) * (common[k] + torch.randn(s, generator=draw)) ** 3).to(dtype),
                         0.0 if k == "b" else 0.9, nesterov) for i, (k, s) in enumerate(shapes.items())}
            for _ in range(n)]


@pytest.mark.parametrize(("n", "shapes"), [(2, SHAPES), (3, SHAPES), (16, SMALL)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("three_threads")
def test_steps(n, shapes, dtype, wire):
    """Steps with everything in them: a parameter without momentum, one that sits out, clipping; u masked, kept, and
    paid in advance; rows of one worker that do not fit.
    """
    job = Job(n, shapes, dtype, wire, 0.98 if n < 16 else 0.9)
    for step in range(7):
        some = gradients(step, n, shapes, dtype, nesterov=wire == torch.bfloat16)
        if step == 2:
            for g in some:
                del g["a"]
        if step == 3:  # all that is large belongs to one owner
            mine = torch.zeros(job.buckets[0][0].numel, dtype=dtype)
            job.plans[0].regions.write(mine, 0, torch.full((int(job.plans[0].size),), 1.0, dtype=dtype))
            for name, view in job.buckets[0][0].views(mine).items():
                some[1][name] = Gradient(some[1][name].g * (1 + 1000 * view), 0.9)
        job.step(some, step, (True, False, "prepay")[step % 3], exact=step == 1,
                 scale=torch.tensor(0.7) if step == 4 else None)
        assert step != 3 or n == 2 or int(job.buckets[0][1].overflow_entries) > 0
    assert n == 2 or int(job.buckets[0][0].held_entries) > 0


@pytest.mark.parametrize("pattern", ["random", "rows", "sorted", "few", "equal"])
@pytest.mark.parametrize("zeros", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("velocity", [True, False])
def test_a_sample_that_misleads_decides_nothing(pattern, zeros, velocity):
    shapes = {"a": (200, 300), "b": (50, 100)}
    job = Job(3, shapes, velocity=velocity, sparsity=0.95)
    for step in range(3):
        some = [{k: Gradient(misleading(s[0] * s[1], 9 * step + r, zeros, pattern).view(s), 0.9)
                 for k, s in shapes.items()} for r in range(3)]
        job.step(some, step)


def test_workers_without_a_region():
    """So many that some own no block of 16."""
    job = Job(100, {"a": (32, 32)}, sparsity=0.9)
    for step in range(3):
        job.step(gradients(step, 100, {"a": (32, 32)}), step)
    assert min(job.plans[0].regions.sizes) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_told(bad):
    """A gradient: by all rows of its rank. A sum: by its owner. What is finite in the residuals is alike."""
    job, some = Job(3, SMALL, sparsity=0.9), gradients(0, 3, SMALL)
    some[1]["c"].g[3, 3] = bad
    job.step(some, 0)
    for kernel, buckets in zip(job.kernels, job.buckets, strict=True):
        found, _ = job._walk(kernel, buckets, some, 1, True, False, None)
        assert [status.tolist()[1] for status in found["status"]] == [NONFINITE] * 3
    job = Job(3, SMALL, sparsity=0.9)
    for buckets in job.buckets:
        job.plans[2].regions.write(buckets[2].v, 2, torch.full((int(job.plans[2].size),), bad))
    messages = [job._walk(kernel, buckets, gradients(0, 3, SMALL), 0, True, False, None)[1]
                for kernel, buckets in zip(job.kernels, job.buckets, strict=True)]
    for kernel, message in zip(job.kernels, messages, strict=True):
        assert kernel.Received(job.plans[0], message, 3).status.tolist()[2] == NONFINITE


def written(kernel, plan, phase, mutated):
    """What a kernel makes of one phase's rows: of its v, or of an update; a guard on both sides stays as it was."""
    whole = torch.full((plan.layout.numel + 128,), 7.0)
    inner = whole[64:-64].zero_()
    if phase:
        kernel.Received(plan, mutated, 3).write(inner.split(plan.layout.numels))
    else:
        bucket = Bucket("bucket 0", {"a": torch.empty(1, plan.layout.numel)})
        bucket.v = inner
        kernel.add(bucket, plan, mutated)
    assert (whole[:64] == 7).all() and (whole[-64:] == 7).all()
    return inner.view(torch.int32)  # whose bits may be no number


@pytest.mark.timeout(3600 if "DGC_SOAK" in os.environ else 300)
@pytest.mark.parametrize("seed", range(4))
def test_mutated_rows_are_refused_alike(seed):
    """Of both phases, with a checksum that is right again; what is not refused is read alike, and within bounds."""
    draw = np.random.default_rng(seed)
    job, shapes = Job(3, SHAPES, sparsity=0.999), SHAPES
    some = gradients(seed, 3, shapes)
    found, messages = job._walk(owners_cpu, job.buckets[0], some, 0, True, False, None)
    rows, plan = torch.stack([rows[0] for rows in found["rows"]]), job.plans[0]
    refused = read = 0
    for turn in range(25_000 if "DGC_SOAK" in os.environ else 250):
        phase, row = turn % 2, int(draw.integers(0, 3))
        form, mutated = ((plan.to_owners, rows.clone()), (plan.to_all, messages.clone()))[phase]
        for at in draw.integers(0, form.nbytes - 8, draw.integers(1, 4)):
            mutated[row, at] = int(draw.integers(0, 256))
        seal(mutated)
        sizes = plan.regions.sizes if phase else plan.size
        said, expected = owners_cpu._Said(form, mutated, sizes.numpy()), form.decode(mutated, sizes)
        assert said.status.tolist() == expected.status.tolist()
        told = expected.status == CORRUPT
        assert said.whose[told.numpy()].tolist() == expected.whose[told].tolist()
        refused += int(told.any())
        if turn % 25 < 2 and expected.status.max() < CORRUPT:
            ours, theirs = (written(kernel, plan, phase, mutated) for kernel in job.kernels)
            assert torch.equal(ours, theirs)
            read += 1
    print(f"seed {seed}: {refused} of {turn + 1} refused, {read} of the others read into guarded memory")
    assert refused and read


def test_a_row_that_tells_whose_is_damaged_is_not_taken_for_damaged_itself():
    """Its first count is a rank's number, and larger than its slots."""
    job = Job(100, {"a": (32, 32)}, sparsity=0.99)
    plan = job.plans[0]
    assert plan.to_all.slots < 90
    messages = plan.to_all.telling(100, CORRUPT, 90)
    for kernel in job.kernels:
        received = kernel.Received(plan, messages, 100)
        assert received.status.tolist() == [CORRUPT] * 100 and received.whose.tolist() == [90] * 100


def test_places_that_do_not_ascend_are_refused():
    job = Job(3, SMALL, sparsity=0.9)
    form, sizes = job.plans[0].to_all, job.plans[0].regions.sizes
    index = torch.tensor([3, 5, 9])
    message, _ = form.encode(torch.zeros(3, dtype=torch.int64), index, torch.ones(3), 1)
    at = form.ends[1]
    for first, second, fine in ((3, 5, True), (5, 3, False), (5, 5, False)):
        row = message.clone()
        row[0, at:at + 4].view(torch.int16).copy_(torch.tensor([first, second]))
        statuses = [kernel.Received(job.plans[0], seal(row).expand(3, -1), 3).status.tolist() for kernel in job.kernels]
        assert statuses[0] == statuses[1] == [-14 if fine else CORRUPT] * 3, sizes


def test_no_slots_are_made_of_chance(monkeypatch):
    """Rows with one slot each: the largest entry of each, beside the mean of its parameter."""
    monkeypatch.setattr(cost, "row_slots", lambda slots, n: 1)
    job = Job(3, SMALL, sparsity=0.9)
    for step in range(3):
        job.step(gradients(step, 3, SMALL), step)
    assert all(int(bucket.overflow_entries) > 50 for bucket in job.buckets[0])
