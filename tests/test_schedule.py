import itertools
import pickle

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dgc


def test_the_papers_warm_up():
    schedule = dgc.warmup(epochs=4, steps_per_epoch=100)
    assert [round(100 * schedule(100 * epoch), 4) for epoch in range(6)] == [
        75,
        93.75,
        98.4375,
        99.6094,
        99.9,
        99.9,
    ]
    assert schedule(99) == schedule(0) and schedule(10**9) == 0.999


@given(
    start=st.floats(0, 0.9),
    end=st.floats(0.9, 0.9999),
    epochs=st.floats(0.1, 60),
    steps=st.integers(1, 50),
    per_step=st.booleans(),
)
def test_a_warm_up_rises_from_start_to_end(start, end, epochs, steps, per_step):
    schedule = dgc.warmup(epochs, steps_per_epoch=steps, start=start, end=end, per_step=per_step)
    values = [schedule(step) for step in range(round(epochs * steps) + 2)]
    if len(values) > 2:
        assert values[0] == pytest.approx(start)
    assert values == sorted(values) and values[-1] == end and values[-2] == end
    assert all(0 <= value < 1 for value in values)


def test_steps_may_be_numpys():
    """And the schedule is the same: ranks compare what it prints."""
    ours, theirs = (
        [
            dgc.warmup(4, steps_per_epoch=of(391)),
            dgc.warmup(of(2), stages=of(4), steps_per_epoch=of(9)),
            dgc.warmup(2, steps_per_epoch=of(9), per_step=True),
            dgc.piecewise({of(0): 0.5, of(7): 0.9}),
            dgc.dense_until(of(3)),
        ]
        for of in (int, numpy.int64)
    )
    assert ours == theirs and repr(ours) == repr(theirs)


def test_a_warm_up_may_fall_and_be_shorter_than_an_epoch():
    schedule = dgc.warmup(0.001, steps_per_epoch=5000, start=0.999, end=0.9)
    assert [schedule(step) for step in (0, 4, 5)] == [0.999, 0.999, 0.9]


@given(end=st.floats(0, 0.9999), epochs=st.floats(0.1, 60), per_step=st.booleans())
def test_a_warm_up_begins_no_sparser_than_it_ends(end, epochs, per_step):
    """Where no start is given."""
    schedule = dgc.warmup(epochs, steps_per_epoch=50, end=end, per_step=per_step)
    values = [schedule(step) for step in range(round(epochs * 50) + 2)]
    assert values[0] == pytest.approx(min(0.75, end)) and values[-1] == end
    # A ramp's powers are rounded.
    assert all(after >= before - 1e-12 for before, after in itertools.pairwise(values))


@given(quarter=st.integers(1, 500), epochs=st.integers(1, 40), end=st.floats(0.9, 0.9999))
def test_the_papers_warm_up_in_proportion(quarter, epochs, end):
    """Four stages of any length are the paper's four epochs, were its epochs that long."""
    expected = dgc.warmup(4, steps_per_epoch=quarter, end=end)
    assert (
        dgc.warmup(4 * quarter / (7 * epochs), stages=4, steps_per_epoch=7 * epochs, end=end)
        == expected
    )
    by_epoch = dgc.warmup(epochs, steps_per_epoch=3, end=end)
    assert dgc.warmup(epochs, stages=epochs, steps_per_epoch=3, end=end) == by_epoch


@pytest.mark.parametrize("parts", [11, 60, 1200])
def test_many_parts_pass_through_the_geometric_means(parts):
    by_epoch = dgc.warmup(parts, steps_per_epoch=1)
    stages = dgc.warmup(3, steps_per_epoch=400, stages=parts)
    for share in (0, 0.5, 1):
        step = round(share * parts)
        expected = 0.25 * (0.001 / 0.25) ** (step / parts)
        assert 1 - by_epoch(step) == pytest.approx(expected, rel=0.01)
        assert 1 - stages(round(step * 1200 / parts)) == pytest.approx(expected, rel=0.01)
    assert len({by_epoch(step) for step in range(parts)}) == parts


def test_per_step_passes_through_the_geometric_means():
    schedule = dgc.warmup(2, steps_per_epoch=5, start=0.0, end=0.99, per_step=True)
    assert [1 - schedule(step) for step in (0, 5, 10)] == pytest.approx([1.0, 0.1, 0.01])


def test_piecewise_dense_until_and_constant():
    schedule = dgc.piecewise({100: 0.99, 0: 0.5, 200: 0.999})
    assert [schedule(step) for step in (0, 99, 100, 199, 200, 10**6)] == [
        0.5,
        0.5,
        0.99,
        0.99,
        0.999,
        0.999,
    ]
    assert [dgc.dense_until(3)(step) for step in (0, 2, 3)] == [0.0, 0.0, 0.999]
    assert dgc.constant(0.9)(12345) == 0.9
    assert dgc.warmup(0, steps_per_epoch=10)(0) == 0.999


def test_they_compare_and_pickle():
    for schedule in (
        dgc.warmup(steps_per_epoch=3),
        dgc.warmup(steps_per_epoch=3, per_step=True),
        dgc.constant(0.5),
    ):
        assert pickle.loads(pickle.dumps(schedule)) == schedule


@pytest.mark.parametrize(
    ("steps", "end"), [(500, 0.99), (9_999, 0.99), (10_000, 0.999), (100_000, 0.999)]
)
def test_the_number_of_steps_is_enough(steps, end):
    """Four stages over the first 8 %; a tenth of the longest wait at 99.9 % is 10,000 steps."""
    chosen = dgc.warmup(steps=steps)
    assert chosen == dgc.warmup(0.08, stages=4, steps_per_epoch=steps, end=end)
    assert chosen == dgc.schedule.parse(f"warmup:steps={steps}", steps_per_epoch=7)
    assert dgc.warmup(steps=steps, end=0.9)(steps) == 0.9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dgc.warmup(-1, steps_per_epoch=10), r"epochs must be a number >= 0, got -1"),
        (lambda: dgc.warmup(float("nan"), steps_per_epoch=10), r"epochs must be .*, got nan"),
        (lambda: dgc.warmup("4", steps_per_epoch=10), r"epochs must be a number >= 0, got '4'"),
        (
            lambda: dgc.warmup(4, steps_per_epoch=0),
            r"steps_per_epoch, must be an integer >= 1, got 0",
        ),
        (
            lambda: dgc.warmup(4, steps_per_epoch=10, start=1.0),
            r"warmup: start must be .*, got 1\.0",
        ),
        (lambda: dgc.warmup(4, steps_per_epoch=10, end=1.0), r"warmup: end must be .*, got 1\.0"),
        (
            lambda: dgc.warmup(4, steps_per_epoch=10, stages=0),
            r"stages must be an integer >= 1, .*, got 0",
        ),
        (
            lambda: dgc.warmup(1e9, steps_per_epoch=10),
            r"epochs, or stages, must be at most 10,000, got 1e\+09",
        ),
        (
            lambda: dgc.warmup(3, steps_per_epoch=10, stages=10**8),
            r"stages, must be at most 10,000, got 1e\+08",
        ),
        (
            lambda: dgc.warmup(4, steps_per_epoch=10, stages=4, per_step=True),
            r"stages must be .* left out where per_step is True, got 4",
        ),
        (
            lambda: dgc.piecewise([(0, 0.9)]),
            r"piecewise: points must be a dict .*, got \[\(0, 0\.9\)\]",
        ),
        (lambda: dgc.piecewise({5: 0.9}), r"must say what holds at step 0"),
        (lambda: dgc.piecewise({0: 0.9, -1: 0.9}), r"steps must be integers >= 0, got -1"),
        (lambda: dgc.piecewise({0: 2.0}), r"the sparsity from step 0 on must be .*, got 2\.0"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("expression", "schedule"),
    [
        ("0.999", dgc.constant(0.999)),
        (".5", dgc.constant(0.5)),
        ("9.9e-1", dgc.constant(0.99)),
        ("constant:0.9", dgc.constant(0.9)),
        ("warmup", dgc.warmup(steps_per_epoch=7)),
        ("warmup:epochs=4,end=0.99", dgc.warmup(4, steps_per_epoch=7, end=0.99)),
        (
            "warmup:per_step=true,start=0.5,epochs=2.5",
            dgc.warmup(2.5, steps_per_epoch=7, start=0.5, per_step=True),
        ),
        ("warmup:epochs=0.6,stages=4", dgc.warmup(0.6, steps_per_epoch=7, stages=4)),
        ("warmup:per_step=false", dgc.warmup(steps_per_epoch=7)),
        ("piecewise:1000=0.999,0=0.75", dgc.piecewise({0: 0.75, 1000: 0.999})),
        ("dense_until:1000", dgc.dense_until(1000)),
        ("dense_until:1000,then=0.99", dgc.dense_until(1000, then=0.99)),
    ],
)
def test_expressions_are_the_functions(expression, schedule):
    assert dgc.schedule.parse(expression, 7) == schedule


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "''"),
        ("nan", "'nan'"),
        ("-0.5", "'-0.5'"),
        ("1_0", "'1_0'"),
        (" 0.9", "' 0.9'"),
        ("cosine:3", "'cosine'"),
        ("1.5", r"constant: sparsity must be a number in .*, got 1\.5"),
        ("warmup:epoch=4", "argument 'epoch'"),
        ("warmup:stages=2.5", r"stages must be an integer >= 1, .*, got 2\.5"),
        ("warmup:epochs=-1", "'epochs=-1'"),
        ("warmup:epochs=4,epochs=5", "'epochs=5'"),
        ("warmup:epochs=4,", "''"),
        ("warmup:epochs=4, end=0.9", "argument ' end'"),
        ("warmup:per_step=yes", "'per_step=yes'"),
        ("warmup:end=1.5", r"warmup: end must be .*, got 1\.5"),
        ("constant", "'sparsity'"),
        ("constant:0.9,0.8", "2 were given"),
        ("piecewise:5=0.9", "must say what holds at step 0"),
        ("piecewise:0=0.9,0=0.8", "'0=0.8'"),
        ("piecewise:0.5=0.9", r"'0\.5'"),
        ("piecewise:0.9,0=0.8", "2 were given"),
        ("dense_until", "'step'"),
        ("dense_until:then=0.9", "'step'"),
        ("dense_until:1.5", "got 1.5"),
        ("adaptive:every=1.5", r"adaptive: every must be an integer >= 3, got 1\.5"),
        ("adaptive:every=2", "adaptive: every must be .*, got 2"),
    ],
)
def test_expressions_that_are_refused(expression, message):
    with pytest.raises(ValueError, match=message) as caught:
        dgc.schedule.parse(expression, 7)
    assert f"got {expression!r}" in str(caught.value)


def test_a_number_of_a_configuration_file_is_a_constant():
    assert dgc.schedule.parse(0.999) == dgc.schedule.parse("0.999") == dgc.constant(0.999)
    for wrong, error in ((None, TypeError), ([0.9], TypeError), (99.9, ValueError)):
        with pytest.raises(error, match=r"constant: sparsity must be a number in \[0, 1\)"):
            dgc.schedule.parse(wrong)


def test_a_warm_up_needs_to_know_an_epoch():
    with pytest.raises(
        ValueError, match=r"'warmup:epochs=2' .*steps_per_epoch, must be an integer >= 1, got None"
    ):
        dgc.schedule.parse("warmup:epochs=2")
    assert dgc.schedule.parse("0.9") == dgc.constant(0.9)
