"""The phases of one step, and that nothing of it outlives it."""

import torch
from torch import nn

from dgc.collective import World
from dgc.engine.parameters import ParameterBucket
from dgc.engine.step import Inverse, Phase, ReceivedUpdate, Step
from dgc.paths.averaged import DenseUpdate

PARAMETERS = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
FIRST = ParameterBucket("first", PARAMETERS[:2], compressed=False, residual=None)
LAST = ParameterBucket("last", PARAMETERS[2:], compressed=False, residual=None)
BUCKET_OF = {PARAMETERS[0]: FIRST, PARAMETERS[1]: FIRST, PARAMETERS[2]: LAST}


def collecting(passes):
    step = Step(PARAMETERS, passes)
    step.collect(World(0, 2), {}, [FIRST, LAST])
    return step


def arrive(step, i):
    return step.record_gradient(PARAMETERS[i], step.delays[PARAMETERS[i]], BUCKET_OF)


def test_a_bucket_is_complete_with_its_last_gradient():
    step = collecting(1)
    assert [arrive(step, i) for i in (1, 2, 0)] == [False, True, True]
    assert step.with_gradient == set(PARAMETERS) and set(step.delays.values()) == {0}


def test_a_gradient_is_complete_with_its_last_backward_pass():
    step = collecting(2)
    assert [arrive(step, i) for i in (0, 1, 2, 2, 1, 0)] == [False, False, False, True, False, True]


def test_which_phases_wait_for_step_and_which_have_exchanged():
    found = {
        phase: (step.waits_for_update, step.exchanged)
        for phase in Phase
        if (step := Step(PARAMETERS, 1, phase))
    }
    assert found == {
        Phase.IDLE: (False, False),
        Phase.COLLECTING: (True, False),
        Phase.EXCHANGED: (True, True),
        Phase.SKIPPED: (False, True),
    }


def test_the_step_after_has_the_updates_and_the_scale_and_nothing_else():
    before = collecting(1)
    arrive(before, 0)
    before.inverse = Inverse(torch.tensor(0.5), 0.5)
    before.direct.append(ReceivedUpdate(FIRST, PARAMETERS[:2], DenseUpdate(torch.zeros(4), [2, 2])))
    after = Step(PARAMETERS, 3, Phase.EXCHANGED, before)
    assert after.inverse is before.inverse and after.direct == before.direct
    assert not after.with_gradient and not after.missing and set(after.delays.values()) == {3}
    assert after.scaled_out(torch.tensor(4.0)) == 2.0 and after.scaled_out(None) == 0.5
