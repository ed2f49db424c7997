"""Whatever stock Horovod accepts, we accept: each behaviour of contract.py on stock and on ours, in the same processes,
and what is wrong with arguments before ``hvd.init()``.
"""

import subprocess
import sys
from pathlib import Path

import contract
import differences
import pytest
import torch
from launch import ran

IN_PROCESSES = {1: (contract.observed,), 2: (contract.observed, differences.shown)}
# What we say in addition, and why, is in docs/migrating.md. Behaviour -> the rank that is told (None: each), the words.
SAID_BESIDES = {
    "other_values_and_settings_on_each_rank": (0, "the ranks differ in the optimizer's settings"),
    "gradients_that_are_not_finite": (0, "It is applied as it is, as by Horovod"),
    "a_scheduler_that_is_broadcast": (
        1,
        "a copy of rank 0's DistributedOptimizer begins without residuals",
    ),
    "state_loaded_into_another": (None, "training goes on at step 1 without the residuals"),
}


def observed(size, name):
    """What a behaviour was seen to do on each rank."""
    if contract.takes_long(name):
        function, functions = contract.observed_in_make_long, (contract.observed_in_make_long,)
    else:
        function, functions = contract.observed, IN_PROCESSES[size]
    return [seen[name] for seen in ran("horovod", size, functions)[function]]


def behaviours(names):
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=pytest.mark.long if contract.takes_long(name) else ())
            for name in names
        ],
    )


@pytest.mark.parametrize("name", differences.DIFFERENCES)
def test_ours_differs_from_stock_as_the_documentation_says(name):
    _, stock, ours = differences.DIFFERENCES[name]
    for seen in ran("horovod", 2, IN_PROCESSES[2])[differences.shown]:
        assert seen[name] == (stock, ours)


@pytest.mark.parametrize("size", IN_PROCESSES)
@pytest.mark.parametrize("mode", [mode for mode in contract.MODES if mode != "stock"])
@behaviours(contract.BEHAVIOURS)
def test_as_on_stock(name, mode, size):
    for rank, seen in enumerate(observed(size, name)):
        stock, ours = seen["stock"], seen[mode]
        assert ours["error"] == stock["error"]
        assert ours["alike"] == stock["alike"]
        if mode == "dense" or size == 1:
            for a, b in zip(ours["close"], stock["close"], strict=True):
                assert (a is None) == (b is None) and (
                    a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-6)
                )
        extra = [
            text
            for text in ours["warnings"]
            if not any(text.startswith(said) for said in stock["warnings"])
        ]
        assert len(ours["warnings"]) - len(extra) == len(stock["warnings"]), (
            ours["warnings"],
            stock["warnings"],
        )
        who, words = SAID_BESIDES.get(name, (-1, ""))
        # Stock's state has all of it.
        tells = size > 1 and (mode != "dense" or name != "state_loaded_into_another")
        if tells and who in (None, rank):
            assert len(extra) == 1 and words in extra[0]
        else:
            assert not extra


@behaviours([name for name in contract.BEHAVIOURS if "_trains_with_" in name])
def test_ranks_that_compress_have_the_same_parameters(name):
    one, other = (seen["sparse"]["close"] for seen in observed(2, name))
    assert one and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_changed_update_is_told_in_the_same_warning():
    for seen in observed(2, "clip_what_travels_compressed"):
        (text,) = seen["sparse"]["warnings"]
        assert (
            text.startswith(seen["stock"]["warnings"][0])
            and ("was changed between its exchange, in backward() or synchronize(), and step()")
            in text
        )


BEFORE_INIT = """
import sys
sys.path.insert(0, {folder!r})
import contract
refused = {{mode: contract.refusals(contract.wrapper(mode)) for mode in contract.MODES}}
assert all(refused["stock"].values()) and refused["dense"] == refused["sparse"] == refused["stock"], refused
for mode in contract.MODES:
    model = contract.network()
    try:
        contract.wrapper(mode)(contract.sgd(model), model.named_parameters())
    except ValueError as error:
        print(mode, error)
"""


def test_before_init_what_is_wrong_with_arguments_is_said_first():
    script = BEFORE_INIT.format(folder=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    stock, *ours = done.stdout.splitlines()
    assert stock == "stock Horovod has not been initialized; use hvd.init()."
    assert len(ours) == 2 and all("call hvd.init()" in line for line in ours)
