"""What users hold stays: names, import paths, arguments, command line, JSON, reports, pickles and checkpoints.

What was promised is in tests/promises/, recorded by promises/record.py. More may come; nothing may go or change, but
for what the changelog lists under "Removed", and why (exchange="shared").
"""

import importlib
import json
import pickle
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import typer.main
from promises import record

import dgc
import dgc.cli

HERE = Path(__file__).parent / "promises"
PROMISED = json.loads((HERE / "public.json").read_text())


@pytest.mark.parametrize("path", PROMISED["paths"])
def test_import_paths(path):
    if path.startswith("dgc.elastic"):
        pytest.importorskip("horovod")
    module, name = path.rsplit(".", 1)
    if module == "dgc.lockstep":
        assert hasattr(dgc.lockstep, name)
    else:
        assert hasattr(importlib.import_module(module), name)


def test_public_names():
    assert set(PROMISED["all"]) <= set(dgc.__all__)
    assert all(hasattr(dgc, name) for name in PROMISED["all"])


def same_arguments(function, promised):
    """What was there is there, in its place; what is new has a default and cannot take another's place."""
    now = record.arguments(function)
    kept = [argument for argument in now if argument[0] in {name for name, _, _ in promised}]
    added = [argument for argument in now if argument not in kept]
    assert kept == promised
    assert all(default is not None and (kind == "KEYWORD_ONLY" or now.index([name, kind, default]) >= len(promised))
               for name, kind, default in added)


@pytest.mark.parametrize("name", PROMISED["functions"])
def test_functions(name):
    same_arguments(getattr(dgc, name), PROMISED["functions"][name])


@pytest.fixture(scope="module")
def made():
    return dgc.lockstep.run(lambda: record.optimizer()[1], 2)[0]


@pytest.mark.parametrize("name", PROMISED["methods"])
def test_methods(made, name):
    same_arguments(getattr(made, name), PROMISED["methods"][name])


@pytest.mark.parametrize("name", PROMISED["attributes"])
def test_attributes_of_horovods_class(made, name):
    assert hasattr(made, name)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in PROMISED["accepted"].items()
                                              for value in values])
def test_accepted_values(field, value):
    assert getattr(dgc.Config(**{field: value}), field) == value


def test_fields():
    config = [[f.name, repr(f.default)] for f in fields(dgc.Config)]
    assert [field for field in config if field in PROMISED["Config"]] == PROMISED["Config"]
    assert set(PROMISED["Report"]) <= {f.name for f in fields(dgc.Report)}


@pytest.mark.parametrize("command", PROMISED["options"])
def test_options_of_the_command_line(command):
    now = {option for parameter in typer.main.get_command(dgc.cli.app).commands[command].params
           for option in (*parameter.opts, *parameter.secondary_opts)}
    assert set(PROMISED["options"][command]) <= now


def within(promised, now):
    """Every key that was promised is there, with the same kind of value."""
    if isinstance(promised, dict):
        return isinstance(now, dict) and all(key in now and within(promised[key], now[key]) for key in promised)
    if isinstance(promised, list):
        return isinstance(now, list) and within(promised[0], now[0])
    return promised == now


@pytest.mark.parametrize("command", record.COMMANDS)
def test_printed_json(command):
    done = subprocess.run([sys.executable, "-m", "dgc", *record.COMMANDS[command]], check=True, timeout=100,
                          capture_output=True)
    assert within(PROMISED["json"][command], record.shape(json.loads(done.stdout)))


def test_a_pickled_optimizer_goes_on():
    def go_on():
        rank = dgc.lockstep.current().world.rank
        model, optimizer = pickle.loads((HERE / f"optimizer-{rank}.pickle").read_bytes())
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert optimizer.state_dict()["param_groups"][0]["dgc_step"] == 6
        assert optimizer.residual_state_dict()["v"]["0.weight"].any()
        record.train(model, optimizer, range(6, 10), rank)
        return before, torch.cat([p.detach().flatten() for p in model.parameters()])

    ranks = dgc.lockstep.run(go_on, 2)
    promised = torch.load(HERE / "parameters.pt", weights_only=True)
    assert all(torch.equal(before, promised) for before, _ in ranks)
    assert torch.equal(ranks[0][1], ranks[1][1]) and not torch.equal(ranks[0][1], promised)


def test_a_checkpoint_goes_on():
    """From the checkpoint and from the pickle of the same step, the same training to the bit."""
    def go_on(loaded):
        rank = dgc.lockstep.current().world.rank
        if loaded:
            model, optimizer = record.optimizer(seed=5)
            assert dgc.load_checkpoint(HERE / "checkpoint", model, optimizer) == {"epoch": 3}
        else:
            model, optimizer = pickle.loads((HERE / f"optimizer-{rank}.pickle").read_bytes())
        record.train(model, optimizer, range(6, 12), rank)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    ranks = [dgc.lockstep.run(lambda loaded=loaded: go_on(loaded), 2) for loaded in (True, False)]
    assert all(torch.equal(one, ranks[0][0]) for one in (*ranks[0], *ranks[1]))


def test_an_optimizer_of_ddp_comes_back():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        optimizer = pickle.loads((HERE / "ddp.pickle").read_bytes())
        assert isinstance(optimizer, torch.optim.SGD) and hasattr(optimizer, "residual_state_dict")
    finally:
        torch.distributed.destroy_process_group()


def test_arguments_are_compared():
    def before(a, b=1):
        """What was promised."""

    def renamed(a, c=1):
        """One argument has another name."""

    with pytest.raises(AssertionError):
        same_arguments(renamed, record.arguments(before))


def test_import_dgc_brings_what_the_documentation_says():
    done = subprocess.run([sys.executable, "-c", "import dgc; dgc.tune.report(1, 0.5, 100); dgc.lockstep.run"],
                          timeout=100)
    assert done.returncode == 0
