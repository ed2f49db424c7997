"""The figures: what they draw of which results, not how they look."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import figures
import network
import report

from dgc import drawing
from dgc.tune.study import draw

pytestmark = pytest.mark.long

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]


def result(name):
    return json.loads((ROOT / "recipes" / "results" / f"{name}.json").read_text())


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, in place of the files."""
    found = []
    monkeypatch.setattr(drawing, "save", lambda figure, out: found.append(figure))
    return found


@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(1, 30)), max_size=12))
def test_names_keep_their_order_and_do_not_overlap(things):
    places, sizes = [p for p, _ in things], [s for _, s in things]
    found = drawing.spread(places, sizes)
    order = sorted(range(len(places)), key=lambda i: places[i])
    for below, above in pairwise(order):
        assert found[above] - found[below] >= (sizes[above] + sizes[below]) / 2 - 1e-9


def test_names_move_no_further_than_they_must():
    assert drawing.spread([0, 50, 20], [10, 10, 10]) == [0, 50, 20]
    assert drawing.spread([7, 7, 40], [10, 10, 10]) == [2, 12, 40]


def test_seeds_are_one_line_their_mean_with_a_band(drawn, tmp_path):
    """Older results lack settings that there were not yet, which makes them no others."""
    runs = {
        name: [result(f"cifar10-{name}-{seed}") for seed in range(3)]
        for name in ("dense", "naive", "dgc")
    }
    report.picture([run for each in runs.values() for run in each], tmp_path / "curves.png")
    loss, sent, measure = drawn[0].axes
    assert [len(axes.lines) for axes in (loss, measure, sent)] == [3, 3, 3] and len(
        measure.collections
    ) == 3
    for line, each in zip(measure.lines, runs.values(), strict=True):
        assert line.get_ydata()[-1] == pytest.approx(
            sum(run["history"][-1]["accuracy"] for run in each) / 3
        )
    dense, naive, dgc = (line.get_ydata() for line in sent.lines)
    assert dense == pytest.approx([100] * 9750) and naive == pytest.approx([0.1] * 9750)
    # The paper's warm-up.
    assert sorted(set(dgc)) == pytest.approx([0.1, *(100 / 4**n for n in (4, 3, 2, 1))])
    assert [line.get_color() for line in measure.lines] == [
        drawing.DENSE,
        drawing.MUTED[0],
        drawing.DGC,
    ]


def test_runs_of_other_settings_are_other_lines():
    run = result("cifar10-dgc-0")
    other = {**run, "settings": {**run["settings"], "lr": 0.5}}
    again = {**run, "settings": {**run["settings"], "seed": 7}}
    assert report.by_settings([run, other, again]) == [[run, again], [other]]
    run = result("transformer-dgc-0")
    seeds = [run, {**run, "settings": {**run["settings"], "seed": 1}}]
    # Whose schedule is a function that each run makes anew.
    assert report.by_settings(seeds) == [seeds]


def test_only_what_has_results_is_named(drawn, tmp_path):
    lines = {
        "dense": {0.0: {0: 88.0}},
        "masking": {0.99: {0: 87.0, 1: 87.5}, 0.999: {}},
        "kept": {0.99: {}},
    }
    figures.differences(report.RECIPES["cifar10"], lines, tmp_path / "momentum.png")
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.texts] == [
        "dense",
        "masking",
    ] and axes.get_xscale() == "log"


def test_a_point_is_the_mean_of_its_seeds(drawn, tmp_path):
    """By hand, of a run that is there three times: with 88, 89 and 87 % at 99.9 %, and with 80 % at 99 %."""
    runs = [
        {**result("cifar10-dgc-0"), "accuracy": accuracy} for accuracy in (88.0, 89.0, 87.0, 80.0)
    ]
    cells = {2.0: {0.999: dict(enumerate(runs[:3])), 0.99: {0: runs[3]}}}
    figures.sparsity(report.RECIPES["cifar10"], cells, [], 0.999, tmp_path / "sparsity.png")
    (axes,) = drawn[0].axes
    joined, *points = [list(line.get_ydata()) for line in axes.lines]
    assert joined == [88.0] and points == [[87.0, 89.0], [88.0], [80.0, 80.0], [80.0]]
    assert [text.get_text() for text in axes.texts] == ["2 epochs", "99 %, 2 epochs"]


def test_what_is_far_from_dense_is_told_and_has_the_others_apart(drawn, tmp_path):
    rows = [
        report.Row(title, {0: result(f"cifar10-{name}-0"), 1: result(f"cifar10-{name}-1")}, 2, "")
        for title, name in (
            ("dense", "dense"),
            ("naive top-k", "naive"),
            ("+ warm-up (DGC)", "dgc"),
        )
    ]
    figures.ablation(report.RECIPES["cifar10"], rows, tmp_path / "parts.png")
    (axes,) = drawn[0].axes
    assert axes.get_xlim()[0] > 87 and any(
        "68.14 %, far to the left" in text.get_text() for text in axes.texts
    )


def test_bars_begin_at_zero_on_a_linear_axis(drawn, tmp_path):
    cases = json.loads((ROOT / "benchmarks" / "results" / "network-1gbit.json").read_text())[
        "cases"
    ]
    network.plot(cases, 4, tmp_path / "network.png")
    for axes in drawn[0].axes:
        assert axes.get_xscale() == "linear" and axes.get_xlim()[0] == 0 and len(axes.patches) == 7
        assert all(bar.get_x() == 0 for bar in axes.patches)
    widths = [bar.get_width() for axes in drawn[0].axes for bar in axes.patches]
    assert widths == [pytest.approx(1000 * case["median_seconds"]) for case in cases]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.8, 1200, [1, 10, 100, 1000]),
        (2e7, 1.2e8, [2e7, 3e7, 5e7, 1e8]),
        (1, 100, [1, 10, 100]),
        (1, 50, [1, 2, 3, 5, 10, 20, 30, 50]),
        (0.06, 0.09, []),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_round(low, high, expected):
    assert drawing.places(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("better", "expected"),
    [(91.0, ["paper", "dense", "recommended"]), (89.0, ["paper, recommended", "dense"])],
)
def test_the_picture_of_a_search_names_three_trials(drawn, tmp_path, better, expected):
    trials = [
        {"trial": i, "metric": metric, "bytes_sent": sent}
        for i, (metric, sent) in enumerate([(90.0, 2e6), (92.0, 9e7), (better, 1e6), (80.0, 9e5)])
    ]
    best = 2 if better > 90 else 0
    draw(
        {
            "task": {"metric": "accuracy"},
            "trials": trials,
            "front": [3, best],
            "paper": 0,
            "dense": 1,
            "recommended": best,
        },
        tmp_path / "front.png",
    )
    (axes,) = drawn[0].axes
    assert sorted(text.get_text() for text in axes.texts) == sorted(expected)
    assert [line.get_color() for line in axes.lines[:2]] == [drawing.DENSE, drawing.DGC]


def test_what_comes_after_the_warm_up_is_not_told_of_a_training_that_ends_in_it():
    run = result("cifar10-dgc-0")  # 25 epochs, 2 of warm-up
    assert report.ratios(run)[1] > 80
    short = {**run, "settings": {**run["settings"], "warmup_epochs": 25}}
    assert (
        report.times(report.ratios(short)[1]) == "-"
        and report.ratios(short)[0] == report.ratios(run)[0]
    )
