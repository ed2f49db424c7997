"""The ranges that a profiler shows: each stage as often as buckets and steps say, and nothing without a profiler."""

import ast
import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from launch import ran
from laws import in_ddp, model, train
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, record_function

import dgc
from dgc import lockstep
from dgc.trace import stage

STEPS, RANKS = 2, 2
SPARSE = dgc.Config(0.9, min_numel=200)
PACKAGE = Path(dgc.__file__).parent
# The commands, which print.
TERMINAL = (
    "cli.py",
    "doctor.py",
    "__main__.py",
    "tune/",
    "plan/commands.py",
)


def compressed(network):
    return [p for p in network.parameters() if p.dim() > 1 and p.numel() >= 200]


def rank(steps, config):
    """Trains in lockstep, each compressed parameter in a bucket of its own."""
    network = model()
    optimizer = dgc.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9),
        network.named_parameters(),
        config,
        groups=[[p] for p in compressed(network)],
    )
    return train(steps, config, network, optimizer)


def profiled(work):
    """What rank 0's profiler saw of its work."""

    def run():
        if lockstep.current().world.rank != 0:
            return work()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            work()
        return profiler.events()

    return lockstep.run(run, RANKS)[0]


def ranges(events):
    """How often each of ours is there."""
    return Counter(event.name for event in events if event.name.startswith("dgc::"))


@pytest.mark.parametrize(
    ("settings", "times"),
    [  # a large bucket: accumulate, select, exchange, read, take
        ({"sparsity": 0.9}, (1, 1, 1, 1, 1)),
        (
            {"sparsity": 0.9, "exchange": "reduce"},
            (1, 1, 2, 2, 2),
        ),  # two phases; owners choose as they take
        ({"sparsity": 0.0}, (0, 0, 1, 0, 0)),
    ],
)  # stock's step
def test_each_stage_as_often_as_buckets_and_steps_say(settings, times):
    found = ranges(profiled(lambda: rank(range(STEPS), dgc.Config(min_numel=200, **settings))))
    every, (accumulate, select, exchange, read, take) = STEPS * len(compressed(model())), times
    expected = {
        "accumulate": accumulate * every,
        "select": select * every,
        "take": take * every,
        "read": read * every,
        "exchange": exchange * every + STEPS,
        "write_update": every + STEPS,  # with the bucket of what travels dense
        "step": STEPS,
    }
    assert found == {f"dgc::{name}": count for name, count in expected.items() if count}


def above(event):
    """The names of the ranges that an event is within."""
    names = []
    while (event := event.cpu_parent) is not None:
        names.append(event.name)
    return names


def test_what_leaves_in_hooks_is_seen_within_the_backward_pass():
    """Before the ranks have agreed, in the first step, nothing leaves there."""
    events = profiled(lambda: rank(range(2), SPARSE))
    within = [
        "torch::autograd::AccumulateGrad" in above(event)
        for event in events
        if event.name == "dgc::select"
    ]
    assert within == sorted(within) and within.count(True) == within.count(False) == len(
        compressed(model())
    )


def taken_in_ddp():
    """Of each time that entries are taken in DDP's hook: whether it is within the backward pass."""
    network, optimizer = in_ddp(model(), SPARSE)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(range(STEPS), None, network, optimizer)
    return [
        "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad" in above(event)
        for event in profiler.events()
        if event.name == "dgc::take"
    ]


def test_ddp_calls_its_hook_within_the_backward_pass_too():
    for within in ran("torch", RANKS, [taken_in_ddp])[taken_in_ddp]:
        assert within
        assert all(within)


def test_a_profiler_of_all_threads_sees_all_ranks():
    try:
        config = _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        pytest.skip(f"torch {torch.__version__} has no profiler of all threads")
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        lockstep.run(lambda: rank(range(STEPS), SPARSE), RANKS)
    assert ranges(profiler.events())["dgc::step"] == RANKS * STEPS


def test_the_loops_threads_work_while_the_one_that_has_the_range_waits():
    """A matrix of three pieces of work for them."""

    def work():
        matrix = torch.nn.Parameter(torch.zeros(3, 1 << 18))
        optimizer = dgc.DistributedOptimizer(
            torch.optim.SGD([matrix], lr=0.1), [("matrix", matrix)], dgc.Config(0.9)
        )
        for _ in range(STEPS):
            matrix.grad = torch.randn(3, 1 << 18)
            optimizer.step()

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = ranges(profiled(work))
    finally:
        torch.set_num_threads(before)
    # One bucket: each stage once in a step.
    assert set(found.values()) == {STEPS} and len(found) == 7


def test_without_a_profiler_nothing_is_recorded(tmp_path):
    def work():
        with record_function("seen"):
            rank(range(2), SPARSE)

    observer = ExecutionTraceObserver().register_callback(str(tmp_path / "observed.json"))
    try:
        observer.start()
        lockstep.run(work, RANKS)
        observer.stop()
    finally:
        observer.unregister_callback()
    names = Counter(
        node["name"] for node in json.loads((tmp_path / "observed.json").read_text())["nodes"]
    )
    assert names["seen"] == RANKS and not [name for name in names if name.startswith("dgc::")]
    assert stage("dgc::step") is stage("dgc::take")  # nothing is made, either


def test_the_log_tells_of_the_first_exchange_and_of_a_skipped_step(caplog):
    def work():
        network, optimizer = rank(range(2), dgc.Config(0.9, min_numel=200, nonfinite="skip"))
        for p in network.parameters():
            p.grad = torch.full_like(p, torch.nan)
        optimizer.step()

    with caplog.at_level(logging.INFO, "dgc"):
        lockstep.run(work, RANKS)
    total, buckets = len(list(model().parameters())), len(compressed(model()))
    assert sorted(caplog.messages) == [
        *(
            f"rank {rank} of {RANKS} exchanges {total} parameters in {buckets + 1} buckets, "
            f"{buckets} of them compressed"
            for rank in range(RANKS)
        ),
        *["step 2 is skipped on all ranks: a gradient was not finite"] * RANKS,
    ]


def test_the_package_speaks_through_warnings_and_its_logger_alone():
    for file in PACKAGE.rglob("*.py"):
        if str(file.relative_to(PACKAGE)).startswith(TERMINAL):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "sys.stdout.write", "sys.stderr.write"), (
                    f"{file}:{node.lineno}"
                )
                assert called != "warnings.warn" or file.name == "warn.py", f"{file}:{node.lineno}"
                assert called != "logging.getLogger" or ast.unparse(node.args[0]) == "'dgc'", (
                    f"{file}:{node.lineno}"
                )
