"""What the pages say of a fit that is easy to blow up: which schedules bear the learning rate of dense training."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import stiff

pytestmark = pytest.mark.long

SHORT = 300  # steps
RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "stiff.json"
WARM_UPS = tuple(f"warm-up of 8 % to {end} %" for end in (90, 99, 99.9))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dense", "trained"),
        ("99.9 % from the first step on", "blew up"),
        ("warm-up of 8 % to 90 %", "trained"),
        ("warm-up of 8 % to 90 %, no masking", "blew up"),
    ],
)
def test_it_tells_what_bears_a_learning_rate(name, said):
    assert stiff.outcome(stiff.schedules(SHORT)[name], 0.02, SHORT, 0) == said


def test_what_the_pages_say_is_what_was_measured():
    result = json.loads(RESULT.read_text())
    rows, every = result["rows"], ["trained"] * 3
    assert (result["steps"], result["seeds"]) == (1000, 3)
    assert all(rows[name]["0.02"] == every for name in ("dense", *WARM_UPS))
    assert rows["99.9 % from the first step on"]["0.02"] == ["blew up"] * 3
    for end, largest in ((90, "0.01"), (99, "0.005")):
        row = rows[f"warm-up of 8 % to {end} %, no masking"]
        assert all(
            said == (every if float(rate) <= float(largest) else ["blew up"] * 3)
            for rate, said in row.items()
        )
    assert rows["99.9 % from the first step on"]["0.005"] == every
