"""Trials that end well and cannot be compared, and studies that lie beside one another."""

import json

import pytest
from typer.testing import CliRunner

from dgc import cli, tune
from dgc.tune.trial import share_of_machine

optuna = pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_schedule_that_changes_nothing_ends_the_search():
    """As where the script does not use it, or all steps are AdamW's dense ones: at the first that could have shown it.
    """
    densities = []

    def objective(setting):
        densities.append(setting.density)
        return 1.0, 5e6

    with pytest.raises(tune.NoResultError, match=r"the schedule must change what is sent, got 5,000,000 bytes where it "
                       r"is .* % of the entries, and where it is .* % \(does the script use it\? AdamW's first 1,000"):
        tune.search(objective, epochs=4, maximize=True, trials=20)
    *before, last = densities
    assert any(max(last / d, d / last) >= 2 for d in before)
    assert all(max(a / b, b / a) < 2 for a in before for b in before)


def test_the_same_bytes_of_nearly_the_same_schedule_are_no_error():
    def objective(setting):
        return 1.0, 9e6 if setting.density == 1 else 5e6

    tune.search(objective, epochs=4, maximize=True, trials=2)
    optuna.load_study(study_name=None, storage="sqlite:///tune.db").enqueue_trial(
        {"density": 1.1e-3, "warmup": "stages", "warmup_length": 1.0})
    found = tune.search(objective, epochs=4, maximize=True, trials=3)
    assert [t["state"] for t in found["trials"]] == ["complete"] * 3


def test_a_trial_that_ended_early_has_failed(capsys):
    """It would have sent less by being shorter. Not so the one that reports all epochs."""
    def objective(setting):
        for epoch in range(1, 3 if setting.trial == 1 else 5):
            tune.report(epoch, 50.0, 1e6 * epoch * setting.density)

    found = tune.search(objective, epochs=4, maximize=True, trials=3)
    assert [t["state"] for t in found["trials"]] == ["complete", "failed", "complete"]
    assert 1 not in found["front"] and found["recommended"]["trial"] != 1
    assert "must report each of its 4 epochs, got 2 as the last" in capsys.readouterr().err


@pytest.mark.parametrize(("study", "base"), [("resnet-lr0.1", "resnet-lr0.1"), ("resnet-lr0.2", "resnet-lr0.2"),
                                             ("tune.db", "tune"), ("tune", "tune")])
def test_each_study_has_its_own_summary_and_picture(place, study, base):
    (place / "mine_to_compare.py").write_text("def run(setting):\n    return 1.0, 1e6 * setting.density\n")
    line = ["tune", "--epochs", "2", "--maximize", "--trials", "1", "--study", study, "mine_to_compare:run"]
    found = CliRunner().invoke(cli.app, line)
    assert found.exit_code == 0, found.output
    assert json.loads((place / f"{base}.json").read_text())["paper"] == 0
    assert sorted(file.name for file in place.iterdir() if file.suffix in (".json", ".png")) == [
        f"{base}.json", f"{base}.png"]


def test_trials_at_a_time_share_the_cores_that_there_are(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert [share_of_machine(place, jobs).get("OMP_NUM_THREADS") for place, jobs in ((0, 1), (1, 2), (0, 4), (7, 8))
            ] == [None, "3", "1", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert share_of_machine(0, 2)["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(("visible", "shares"), [("3,5,7", ["3,7", "5"]), ("4", ["4", "4"])])
def test_trials_at_a_time_share_the_gpus_that_can_be_seen(visible, shares, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [share_of_machine(place, 2)["CUDA_VISIBLE_DEVICES"] for place in range(2)] == shares
