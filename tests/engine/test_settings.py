"""The part of a process in the exchange."""

import pytest
import torch

import dgc
from dgc.engine.settings import Role, Settings
from dgc.transport import find


def roles(size, **arguments):
    return dgc.lockstep.run(lambda: Settings(transport=find(), **arguments).role, size)


def test_several_processes_exchange_and_one_has_nothing_to_exchange():
    assert roles(3, config=dgc.Config()) == [Role.MEMBER] * 3
    assert roles(1, config=dgc.Config()) == [Role.SINGLE_PROCESS]


@pytest.mark.parametrize(
    "arguments",
    [
        {"config": dgc.Config(nonfinite="skip")},
        {"config": dgc.Config(clip_norm=1.0), "grad_scaler": torch.amp.GradScaler("cpu")},
        {"config": dgc.Config(), "elastic": True},
    ],
)
def test_one_process_takes_part_where_torchs_optimizer_would_not_do(arguments):
    assert roles(1, **arguments) == [Role.MEMBER]


def test_nothing_leaves_early_where_all_ranks_must_agree_first():
    def waits(**arguments):
        return dgc.lockstep.run(
            lambda: Settings(transport=find(), **arguments).checks_finite_first, 2
        )[0]

    assert not waits(config=dgc.Config(clip_norm=1.0))
    assert waits(config=dgc.Config(nonfinite="skip"))
    assert waits(config=dgc.Config(), grad_scaler=torch.amp.GradScaler("cpu"))
