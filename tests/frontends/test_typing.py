"""The public interface is typed: a type checker refuses what does not exist, and passes what torch expects."""

import inspect
from pathlib import Path

import pytest

import dgc

ROOT = Path(__file__).parents[2]
mypy = pytest.importorskip("mypy.api")

SCRIPT = """
import torch
import dgc

model = torch.nn.Linear(2, 2)
inner = torch.optim.SGD(model.parameters(), 0.1)
optimizer = dgc.DistributedOptimizer(inner, model.named_parameters(), dgc.Config(0.9))
{line}
"""

RIGHT = (
    "torch.optim.lr_scheduler.StepLR(optimizer, 1).step()",
    "optimizer.flush(); total: float = optimizer.report().total_bytes_sent",
    "with optimizer.skip_synchronize(): loss: float | None = optimizer.step()",
    "torch.amp.GradScaler('cpu').step(optimizer)",
    "dgc.save_checkpoint('folder', model, optimizer); passes: int = optimizer.backward_passes_per_step",
)
WRONG = {
    "optimizer.flsh()": '"Distributed" has no attribute "flsh"',
    "optimizer.report().byte_sent": '"Report" has no attribute "byte_sent"',
    "optimizer.set_backward_passes_per_step('2')": 'has incompatible type "str"; expected "int"',
    "dgc.DistributedOptimizer(inner, sparsity=0.9)": 'Unexpected keyword argument "sparsity"',
    "dgc.DistributedOptimizer(inner, compression=0.9)": 'incompatible type "float"',
    "dgc.register_comm_hook(model, inner)": 'expected "DistributedDataParallel"',
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Line -> what mypy says of a script with it. One run reads torch once for all of them."""
    folder = tmp_path_factory.mktemp("scripts")
    scripts = {line: folder / f"script_{i}.py" for i, line in enumerate((*RIGHT, *WRONG))}
    for line, script in scripts.items():
        script.write_text(SCRIPT.format(line=line))
    # As make lint does, whose cache fits then: to read all of torch takes a minute.
    output, errors, _ = mypy.run(
        [*map(str, scripts.values()), f"--config-file={ROOT / 'pyproject.toml'}"]
    )
    assert not errors and f"checked {len(scripts)} source files" in output
    return {
        line: [said for said in output.splitlines() if f"{script.name}:" in said]
        for line, script in scripts.items()
    }


def test_public_functions_have_types():
    """And the package says so to a type checker."""
    assert (Path(dgc.__file__).parent / "py.typed").exists()
    functions = {name: getattr(dgc, name) for name in dgc.__all__}
    functions = {name: given for name, given in functions.items() if inspect.isroutine(given)}
    assert {"DistributedOptimizer", "register_comm_hook", "save_checkpoint"} <= functions.keys()
    for name, function in functions.items():
        missing = inspect.signature(function).parameters.keys() | {"return"}
        assert missing - function.__annotations__.keys() == set(), name


@pytest.mark.long
@pytest.mark.parametrize("line", RIGHT)
def test_what_is_right_passes(told, line):
    assert told[line] == []


@pytest.mark.long
@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_is_refused(told, line):
    assert any(WRONG[line] in said for said in told[line])
