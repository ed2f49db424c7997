"""What happens to one rank ends the job on all of them, soon, with the reason on screen."""

import pytest
from launch import launch

SECONDS = 60  # in which the whole job has ended, its start included

REASONS = {
    "raises_in_backward": "ArithmeticError: rank 1 has had enough",
    "raises_in_schedule": "ArithmeticError: rank 1 has had enough",
    "out_of_memory": "can't allocate memory: you tried to allocate",
    "killed": {"horovod": "exit with status code 137", "torch": "SIGKILL"},
    "exits": {"horovod": "exit with status code 3", "torch": "exitcode  : 3"},
}


@pytest.mark.parametrize("launcher", ["horovod", "torch"])
@pytest.mark.parametrize("fault", REASONS)
def test_the_job_ends_with_the_reason(launcher, fault):
    status, output, seconds = launch(launcher, 2, [fault], limit=SECONDS + 30, check=False)
    reason = REASONS[fault] if isinstance(REASONS[fault], str) else REASONS[fault][launcher]
    print(f"{launcher}, {fault}: the job ended after {seconds:.0f} s")
    assert status != 0 and reason in output, output
    assert seconds < SECONDS
