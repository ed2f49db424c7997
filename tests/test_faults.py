"""What happens to one rank ends the job on all of them, soon, with the reason on screen."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from launch import launch
from laws import die_between_phases, train

import dgc
from dgc.transport import find


def _on_rank_1_in_backward(do):
    """Trains two steps; in the third backward pass something happens to rank 1, when messages are on their way."""
    network, optimizer = train(range(2), dgc.Config(sparsity=0.9))
    if find().world.rank == 1:
        network[0].weight.register_hook(lambda g: do())  # the last gradient to come
    train(range(2, 6), None, network, optimizer)


def killed():
    """With SIGKILL, as the kernel does when memory runs out."""
    _on_rank_1_in_backward(lambda: os.kill(os.getpid(), signal.SIGKILL))


def killed_between_phases():
    """The same, when this rank has been sent rows to add up, and the others wait for what it passes on."""
    network, optimizer = train(range(2), dgc.Config(sparsity=0.9, exchange="reduce"))
    if find().world.rank == 1:
        die_between_phases()
    train(range(2, 6), None, network, optimizer)


def killed_in_a_round():
    """The same, when the ranks have compared how many local steps they took, and exchange drifts."""
    network, optimizer = train(range(2), dgc.Config(sparsity=0.9, local_steps=2))
    if find().world.rank == 1:
        optimizer._rounds.engine.arrived = lambda p: os.kill(os.getpid(), signal.SIGKILL)
    train(range(2, 6), None, network, optimizer)


def raises_in_backward():
    """A hook of the user's."""

    def fail():
        raise ArithmeticError("rank 1 has had enough")

    _on_rank_1_in_backward(fail)


def out_of_memory():
    """A tensor that does not fit."""
    _on_rank_1_in_backward(lambda: torch.empty(1 << 60))


def raises_in_schedule():
    """A schedule that fails on one rank only, between the others' messages."""
    asked = []

    def sparsity(step):
        asked.append(step)
        if (
            asked.count(3) == 2 and find().world.rank == 1
        ):  # once when ranks are compared, before the first step
            raise ArithmeticError("rank 1 has had enough")
        return 0.9

    train(range(5), dgc.Config(sparsity=sparsity))


def exits():
    """Without an error, so that the others wait for it."""
    network, optimizer = train(range(2), dgc.Config(sparsity=0.9))
    if find().world.rank == 1:
        os._exit(3)
    train(range(2, 4), None, network, optimizer)


LIMIT = 90  # seconds in which the whole job has ended, its start included
# As the launcher says it.
KILLED = {
    "horovod": "exit with status code 137",
    "torch": "Signal 9 (SIGKILL) received",
}
REASONS = {
    raises_in_backward: "ArithmeticError: rank 1 has had enough",
    raises_in_schedule: "ArithmeticError: rank 1 has had enough",
    out_of_memory: "can't allocate memory: you tried to allocate",
    killed: KILLED,
    killed_between_phases: KILLED,
    killed_in_a_round: KILLED,
    exits: {"horovod": "exit with status code 3", "torch": "exitcode  : 3"},
}


QUICK = {(killed_between_phases, "horovod")}


@pytest.mark.parametrize(
    ("fault", "launcher"),
    [
        pytest.param(fault, launcher, marks=() if (fault, launcher) in QUICK else pytest.mark.long)
        for fault in REASONS
        for launcher in ("horovod", "torch")
    ],
)
def test_the_job_ends_with_the_reason(launcher, fault):
    status, output, seconds = launch(launcher, 2, [fault], limit=LIMIT, check=False, fresh=True)
    reason = REASONS[fault] if isinstance(REASONS[fault], str) else REASONS[fault][launcher]
    print(f"{launcher}, {fault}: the job ended after {seconds:.0f} s")
    assert status != 0 and reason in output, output


STOPPED = """
import dgc, torch

def worker():
    model = torch.nn.Linear(40, 40)
    dgc.broadcast_parameters(model.state_dict())
    optimizer = dgc.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), compression=dgc.Config(sparsity=0.9))
    for _ in range(2):
        model(torch.ones(1, 40)).sum().backward()
        if optimizer.report().steps:
            raise KeyboardInterrupt
        optimizer.step()

try:
    dgc.lockstep.run(worker, 2)
except KeyboardInterrupt:
    print("stopped")
"""


def test_a_script_that_is_stopped_between_backward_and_step_ends_well():
    """What is on its way then is garbage as the interpreter ends, and torch aborts if it is asked for a view there."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr
