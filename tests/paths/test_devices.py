"""Parameters on several GPUs of one process, by their devices alone: torch's fake tensors need no GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dgc.collective import World
from dgc.engine.adam import mean_of_seen
from dgc.paths.dense import reduce_dense


@pytest.fixture
def two_gpus():
    with FakeTensorMode():
        yield torch.ones(4, device="cuda:0"), torch.ones(3, device="cuda:1")


def test_a_clipping_factor_goes_to_the_gradients_of_each(two_gpus):
    first, other = two_gpus
    asked = next(reduce_dense({"b": other}, World(0, 2), scale=first.sum()))
    assert asked.tensor.device == other.device


def test_squares_of_both_have_one_mean(two_gpus):
    first, other = two_gpus
    assert mean_of_seen([first, other]).device == first.device
