import dataclasses
import pickle

import numpy as np
import pytest
import torch

import dgc

ERRORS = [
    (
        {"sparsity": 1.0},
        ValueError,
        r"sparsity must be a number in \[0, 1\), 0 meaning dense, got 1\.0",
    ),
    ({"sparsity": -0.1}, ValueError, r"sparsity must be .*, got -0\.1"),
    ({"sparsity": float("nan")}, ValueError, r"sparsity must be .*, got nan"),
    (
        {"sparsity": "warmup:epochs=4"},
        TypeError,
        r"sparsity must be .*, got 'warmup:epochs=4' \(dgc\.schedule\.parse reads",
    ),
    ({"momentum_correction": 1}, TypeError, r"momentum_correction must be True or False, got 1"),
    ({"factor_masking": None}, TypeError, r"factor_masking must be True or False, got None"),
    ({"clip_norm": 0}, ValueError, r"clip_norm must be None or a number > 0, got 0"),
    ({"clip_norm": float("nan")}, ValueError, r"clip_norm must be .*, got nan"),
    ({"clip_norm": -float("inf")}, ValueError, r"clip_norm must be .*, got -inf"),
    ({"clip_norm": True}, ValueError, r"clip_norm must be .*, got True"),
    (
        {"clip_per_tensor": True},
        ValueError,
        r"clip_norm must be the bound where clip_per_tensor is True, got None",
    ),
    ({"value_bits": 3}, ValueError, r"value_bits must be one of 1, 2, 4, 8, 16, 32, got 3"),
    ({"value_bits": True}, ValueError, r"value_bits must be .*, got True"),
    ({"value_bits": 16.0}, ValueError, r"value_bits must be .*, got 16\.0"),
    ({"value_bits": torch.float16}, ValueError, r"value_bits must be .*, got torch\.float16"),
    ({"min_numel": -1}, ValueError, r"min_numel must be an integer >= 0, got -1"),
    ({"min_numel": 10.0}, ValueError, r"min_numel must be .*, got 10\.0"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), ERRORS)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        dgc.Config(**arguments)


def test_with_nothing_said_no_entry_waits_long_beside_the_steps_that_are_done():
    """So it suits a training of 500 steps and one of 100,000: an entry waits for at most an eighth."""
    waits = {step: 1 / (1 - dgc.Config().sparsity_at(step)) for step in range(0, 100_000, 50)}
    assert all(wait <= max(4.001, step / 8 + 1e-9) for step, wait in waits.items())
    assert waits[99_950] == pytest.approx(100)


def test_frozen_and_picklable():
    # Bounds nothing.
    assert dgc.Config(clip_norm=float("inf"), clip_per_tensor=True) == dgc.Config()
    config = dgc.Config(sparsity=dgc.warmup(steps_per_epoch=10), clip_norm=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.sparsity = 0.5
    assert pickle.loads(pickle.dumps(config)) == config


def test_numbers_may_be_numpys():
    config = dgc.Config(np.float64(0.99), clip_norm=np.float32(0.5))
    assert config == dgc.Config(0.99, clip_norm=0.5) and type(config.clip_norm) is float


def test_a_schedule_is_refused_when_its_value_appears():
    config = dgc.Config(sparsity=lambda step: 1.5 if step == 7 else 0.9)
    assert config.sparsity_at(6) == 0.9
    with pytest.raises(
        ValueError,
        match=r"gives for step 7 must be a number in \[0, 1\), 0 meaning dense, got 1\.5",
    ):
        config.sparsity_at(7)
    with pytest.raises(TypeError, match=r"gives for step 0 must be .*, got None"):
        dgc.Config(sparsity=lambda step: None).sparsity_at(0)
