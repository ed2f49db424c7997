"""The public interface is typed: a type checker refuses what does not exist, and passes what torch expects."""

from pathlib import Path

import pytest

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


def checked(tmp_path, line):
    """What mypy says of a script with this line."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(line=line))
    # As make lint does, whose cache fits then: to read all of torch takes a minute.
    told, errors, _ = mypy.run([str(script), f"--config-file={ROOT / 'pyproject.toml'}"])
    assert not errors
    return told


@pytest.mark.parametrize("line", [
    "torch.optim.lr_scheduler.StepLR(optimizer, 1).step()",
    "optimizer.flush(); total: float = optimizer.report().total_bytes_sent",
    "with optimizer.skip_synchronize(): loss: float | None = optimizer.step()",
    "torch.amp.GradScaler('cpu').step(optimizer)",
    "dgc.save_checkpoint('folder', model, optimizer); passes: int = optimizer.backward_passes_per_step"])
def test_what_is_right_passes(tmp_path, line):
    assert checked(tmp_path, line).startswith("Success")


@pytest.mark.parametrize(("line", "told"), [
    ("optimizer.flsh()", '"Distributed" has no attribute "flsh"'),
    ("optimizer.report().byte_sent", '"Report" has no attribute "byte_sent"'),
    ("optimizer.set_backward_passes_per_step('2')", 'has incompatible type "str"; expected "int"'),
    ("dgc.DistributedOptimizer(inner, sparsity=0.9)", 'Unexpected keyword argument "sparsity"'),
    ("dgc.DistributedOptimizer(inner, compression=0.9)", 'incompatible type "float"'),
    ("dgc.register_comm_hook(model, inner)", 'expected "DistributedDataParallel"')])
def test_what_is_wrong_is_refused(tmp_path, line, told):
    assert told in checked(tmp_path, line)
