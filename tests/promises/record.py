"""Writes down what users hold of this package: run once, by the version whose promises are to be kept.

    python tests/promises/record.py

tests/test_promises.py holds every later version against it. Add to it when something new is promised; what is there
stays.
"""

import inspect
import json
import os
import pickle
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import torch
import typer.main

import dgc
import dgc.cli

HERE = Path(__file__).parent
PATHS = [  # whence scripts, pickles and other people's code take something
    "dgc.optimizer.DistributedOptimizer", "dgc.optimizer.Report", "dgc.optimizer.Average", "dgc.optimizer.Sum",
    "dgc.optimizer.broadcast_parameters", "dgc.optimizer._rebuild", "dgc.optimizer._Shared", "dgc.ddp._rebuild",
    "dgc.ddp.register_comm_hook", "dgc.config.Config", "dgc.schedule.parse", "dgc.schedule.warmup",
    "dgc.schedule.piecewise", "dgc.schedule.adaptive", "dgc.schedule.Piecewise", "dgc.schedule.Ramp",
    "dgc.schedule.Adaptive", "dgc.checkpoint.save_checkpoint", "dgc.checkpoint.load_checkpoint",
    "dgc.checkpoint.Residuals", "dgc.lockstep.run", "dgc.lockstep.current", "dgc.transport.lockstep.run",
    "dgc.elastic.TorchState", "dgc.tune.report", "dgc.doctor.examine", "dgc.cli.run", "dgc.__main__.main"]
COMMANDS = {"plan": ["plan", "resnet50", "--compute", "0.1", "--json"],
            "schedule": ["schedule", "warmup:epochs=2,end=0.99", "--steps-per-epoch", "4", "--json"]}


def arguments(function):
    """Names, kinds and defaults; not the types, which may become more exact."""
    return [[p.name, p.kind.name, repr(p.default) if p.default is not p.empty else None]
            for p in inspect.signature(function).parameters.values()]


def optimizer(seed=0):
    """A model and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 4))
    config = dgc.Config(sparsity=dgc.warmup(2, steps_per_epoch=4, end=0.99), min_numel=100)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    return model, dgc.DistributedOptimizer(inner, model.named_parameters(), config)


def train(model, optimizer, steps, rank):
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()


def public():
    def look():
        return optimizer()[1]

    made = dgc.lockstep.run(look, 2)[0]
    inherited = set(dir(torch.optim.SGD))
    methods = {name for name in dir(made) if not name.startswith("_") and name not in inherited | set(vars(made))}
    return {
        "all": sorted(dgc.__all__),
        "paths": PATHS,
        "functions": {name: arguments(getattr(dgc, name)) for name in sorted(dgc.__all__)
                      if inspect.isfunction(getattr(dgc, name))},
        "Config": [[f.name, repr(f.default)] for f in fields(dgc.Config)],
        "accepted": {"selection": ["sampled", "exact"], "exchange": ["allgather", "reduce", "auto"],
                     "nonfinite": ["error", "skip"], "factor_masking": [True, False, "prepay"],
                     "hierarchical": [True, False, "auto"]},
        "Report": [f.name for f in fields(dgc.Report)],
        "methods": {name: arguments(getattr(made, name)) for name in sorted(methods) if callable(getattr(made, name))},
        "attributes": ["_allreduce_delay", "_compression", "_groups", "_handles", "_parameter_names",
                       "_requires_update", "backward_passes_per_step", "gradient_predivide_factor", "op",
                       "process_set", "sparse_as_dense"],
        "options": {name: sorted(option for parameter in command.params for option in (
            *parameter.opts, *parameter.secondary_opts)) for name, command in typer.main.get_command(
                dgc.cli.app).commands.items()},
        "json": {name: shape(json.loads(subprocess.run([sys.executable, "-m", "dgc", *line], check=True, timeout=100,
                                                       capture_output=True).stdout))
                 for name, line in COMMANDS.items()},
    }


def shape(value):
    """The keys of what was printed."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in sorted(value.items())}
    return [shape(value[0])] if isinstance(value, list) and value else type(value).__name__


def main():
    def pickled():
        rank = dgc.lockstep.current().world.rank
        model, made = optimizer()
        train(model, made, range(6), rank)
        dgc.save_checkpoint(HERE / "checkpoint", model, made, {"epoch": 3})
        return pickle.dumps((model, made)), torch.cat([p.detach().flatten() for p in model.parameters()])

    if (HERE / "public.json").exists():
        raise SystemExit(f"{HERE / 'public.json'} is there: promises are recorded once")
    everyones = dgc.lockstep.run(pickled, 2)
    for rank, (content, _) in enumerate(everyones):
        (HERE / f"optimizer-{rank}.pickle").write_bytes(content)
    torch.save(everyones[0][1], HERE / "parameters.pt")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(40, 40)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    dgc.register_comm_hook(torch.nn.parallel.DistributedDataParallel(model), inner)
    (HERE / "ddp.pickle").write_bytes(pickle.dumps(inner))
    torch.distributed.destroy_process_group()
    (HERE / "public.json").write_text(json.dumps(public(), indent=1) + "\n")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
