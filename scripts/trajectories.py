"""Records the parameters after 50 steps in many settings, so that a change of the code can show that it changed no bit.

    python scripts/trajectories.py record before.json     # before the change, and after it, on the same machine
    python scripts/trajectories.py compare before.json after.json

Four ranks in lockstep, two and four processes over torch.distributed (DDP and FSDP2 among them), two over Horovod where
it is installed. A setting's record is a SHA-256 of every rank's parameters, its u and v, and the figures of report().
"""

import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

import dgc
from dgc.compression import kernels
from dgc.transport import find

STEPS = 50
WARM = dgc.warmup(2, steps_per_epoch=8, end=0.99)
LOCKSTEP = {  # name -> (Config, what else is done)
    "warm-up": (dgc.Config(sparsity=WARM), {}),
    "float32": (dgc.Config(sparsity=0.9, value_bits=32), {}),
    "dense": (dgc.Config(sparsity=0.0), {"nesterov": True}),
    "nesterov, groups, sum": (
        dgc.Config(sparsity=0.95),
        {"nesterov": True, "groups": 2, "op": dgc.Sum},
    ),
    "clip": (dgc.Config(sparsity=0.95, clip_norm=0.2), {}),
    "clip per tensor": (dgc.Config(sparsity=0.95, clip_norm=0.2, clip_per_tensor=True), {}),
    "reduce": (dgc.Config(sparsity=0.95, exchange="reduce"), {}),
    "hierarchical": (dgc.Config(sparsity=0.95, hierarchical=True, clip_norm=0.5), {"node_size": 2}),
    "hierarchical, reduce": (
        dgc.Config(sparsity=0.95, hierarchical=True, exchange="reduce"),
        {"node_size": 2},
    ),
    "Adam": (dgc.Config(dgc.dense_until(5, then=0.95)), {"adam": True}),
    "rounded, bfloat16": (dgc.Config(sparsity=0.95, value_bits=8), {}),
    "flush, unmasked": (dgc.Config(sparsity=0.99, factor_masking=False), {"flush": 10}),
    "sparse embedding": (dgc.Config(sparsity=0.95), {"embedding": True, "momentum": 0.0}),
    "skip": (dgc.Config(sparsity=0.95, nonfinite="skip"), {"bad": 7}),
    "scaler": (dgc.Config(sparsity=0.95, clip_norm=0.5), {"scaler": True, "bad": 7}),
    "two passes": (dgc.Config(sparsity=0.95), {"passes": 2}),
    "resume": (dgc.Config(sparsity=WARM), {"resume": 20}),
}
TORCH = {
    "torch, two": (dgc.Config(sparsity=WARM, clip_norm=0.5), {}),
    "torch, hierarchical": (dgc.Config(sparsity=0.95, hierarchical="auto"), {"processes": 4}),
    "DDP": (dgc.Config(sparsity=WARM), {"ddp": True}),
    "DDP, scaler": (dgc.Config(sparsity=0.95), {"ddp": True, "scaler": True, "bad": 7}),
    "FSDP2": (dgc.Config(sparsity=0.95, clip_norm=0.5), {"fsdp": True, "processes": 4}),
}
HOROVOD = {
    "Horovod": (dgc.Config(sparsity=WARM), {"groups": 2}),
    "Horovod, reduce, passes": (
        dgc.Config(sparsity=0.95, exchange="reduce", clip_norm=0.5),
        {"passes": 2},
    ),
}


class Embedded(nn.Module):
    """A model whose first layer has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rest = nn.Embedding(50, 48, sparse=True), body()

    def forward(self, x):
        return self.rest(self.table((x[:, 0] * 7).long().abs() % 50))


def body():
    return nn.Sequential(
        nn.Linear(48, 64),
        nn.Tanh(),
        nn.LayerNorm(64),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 8),
    )


def train(
    config,
    rank,
    embedding=False,
    adam=False,
    momentum=0.9,
    nesterov=False,
    flush=0,
    bad=0,
    scaler=False,
    passes=1,
    resume=0,
    ddp=False,
    fsdp=False,
    processes=2,
    node_size=1,
    **arguments,
):
    """One rank's training; returns what it ends with, as one hash."""
    torch.manual_seed(3)
    model = Embedded() if embedding else body()
    if fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        arguments["process_set"] = mesh["across"].get_group()
    grad_scaler = (
        torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5) if scaler else None
    )
    inner = (
        torch.optim.Adam(model.parameters(), 1e-3)
        if adam
        else torch.optim.SGD(
            model.parameters(),
            0.05,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=0.0 if embedding else 1e-2,
        )
    )
    if ddp:
        module, model = model, nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
        dgc.register_comm_hook(model, inner, config, grad_scaler=grad_scaler)
        optimizer = inner
    else:
        module = model
        optimizer = dgc.DistributedOptimizer(
            inner, model.named_parameters(), config, passes, grad_scaler=grad_scaler, **arguments
        )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    optimizer.zero_grad()
    for step in range(STEPS):
        if resume and step == resume:
            where = os.environ["DGC_TRAJECTORIES"]
            dgc.save_checkpoint(where, model, optimizer)
            with torch.no_grad():
                model[0].weight.add_(1.0)
            dgc.load_checkpoint(where, model, optimizer)
        for part in range(passes):
            generator = torch.Generator().manual_seed(step * 100 + part * 10 + rank)
            x, y = (
                torch.randn(16, 48, generator=generator),
                torch.randint(0, 8, (16,), generator=generator),
            )
            loss = nn.functional.cross_entropy(model(x), y)
            if bad and step == bad and rank == 1:
                loss = loss * math.inf
            (loss if grad_scaler is None else grad_scaler.scale(loss)).backward()
        if grad_scaler is None:
            optimizer.step()
        else:
            grad_scaler.step(optimizer)
            grad_scaler.update()
        optimizer.zero_grad()
        schedule.step()
        if flush and step % flush == flush - 1:
            optimizer.flush()
    sha = hashlib.sha256()
    residuals = optimizer.residual_state_dict()
    for tensor in (*module.parameters(), *residuals["u"].values(), *residuals["v"].values()):
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        sha.update(tensor.detach().contiguous().numpy().tobytes())
    sha.update(json.dumps(asdict(optimizer.report())).encode())
    return sha.hexdigest()


def in_lockstep(config, extra):
    size = {"size": 4, "node_size": extra.get("node_size", 1)}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DGC_TRAJECTORIES"] = folder
        return dgc.lockstep.run(lambda: train(config, find().world.rank, **extra), **size)


def worker(kind, name, folder):
    """One process of a setting."""
    if kind == "horovod":
        import horovod.torch as hvd

        hvd.init()
        rank, (config, extra) = hvd.rank(), HOROVOD[name]
    else:
        torch.distributed.init_process_group("gloo")
        rank, (config, extra) = torch.distributed.get_rank(), TORCH[name]
        os.environ["GROUP_RANK"] = str(rank // 2) if extra.get("processes") == 4 else "0"
    (Path(folder) / str(rank)).write_text(train(config, rank, **extra))
    if kind == "horovod":
        hvd.barrier()
    else:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def in_processes(kind, name, size):
    launcher = (
        [
            str(Path(sys.executable).parent / "horovodrun"),
            "--gloo",
            "-np",
            str(size),
            sys.executable,
        ]
        if (kind == "horovod")
        else [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(size),
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [*launcher, __file__, "worker", kind, name, folder],
            check=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
        )
        return [(Path(folder) / str(rank)).read_text() for rank in range(size)]


def record():
    yield from ((name, in_lockstep(*setting)) for name, setting in LOCKSTEP.items())
    yield from (
        (name, in_processes("torch", name, extra.get("processes", 2)))
        for name, (_, extra) in TORCH.items()
    )
    with contextlib.suppress(ImportError):
        import horovod.torch  # noqa: F401

        yield from ((name, in_processes("horovod", name, 2)) for name in HOROVOD)


def main():
    torch.set_num_threads(1)
    if sys.argv[1] == "worker":
        kernels.compile_ahead(torch.float32)
        return worker(*sys.argv[2:])
    if sys.argv[1] == "record":
        kernels.compile_ahead(torch.float32)
        print(f"dgc of {Path(dgc.__file__).parent}")
        results = {}
        for name, hashes in record():
            results[name] = hashes
            print(f"{name:26} {' '.join(value[:12] for value in hashes)}", flush=True)
        return Path(sys.argv[2]).write_text(json.dumps(results, indent=1))
    before, after = (json.loads(Path(path).read_text()) for path in sys.argv[2:4])
    differ = [name for name in before | after if before.get(name) != after.get(name)]
    print(
        f"{len(before)} settings before, {len(after)} after; they differ in: {', '.join(differ) or 'none'}"
    )
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()
