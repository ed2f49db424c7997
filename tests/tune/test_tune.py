"""The search, on a script whose front is known, run, killed and taken up again."""

import contextlib
import json
import math
import operator
import re
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest
from launch import end
from typer.testing import CliRunner

import dgc
from dgc import cli, tune, user_code
from dgc.__main__ import main

optuna = pytest.importorskip("optuna")

from dgc.tune import study as studies  # noqa: E402 (which needs optuna)
from dgc.tune import trial as one_trial  # noqa: E402

# Better with more bytes, up to a point; worse with clipping below 1. No torch, so that it starts at once.
SCRIPT = """
import json, math, os, re, sys, time
expression, clip, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
found = re.match(r"warmup:epochs=([^,]+),end=([^,]+)", expression)
warm, end = (float(found[1]), float(found[2])) if found else (0.0, float(expression[9:]))  # constant:
sent = 1e6 * (1 - end) + 1e3 * warm
good = 90 - abs(math.log10(1 - end) + 2.3) - (1 if clip < 1 else 0)
for epoch in range(1, 5):
    time.sleep(seconds / 4)
    with open(os.environ["DGC_TUNE_REPORTS"], "a") as file:
        file.write(json.dumps({"epoch": epoch, "metric": good * epoch / 4, "bytes": sent * epoch / 4}) + "\\n")
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def line(*options, seconds=0.0, script="script.py"):
    return [
        "tune",
        "--epochs",
        "4",
        "--maximize",
        "--metric",
        "accuracy",
        "--clip-norm",
        "0",
        *map(str, options),
        "--",
        sys.executable,
        "-S",
        script,
        "{sparsity}",
        "{clip_norm}",
        str(seconds),
    ]


def run(monkeypatch, capsys, *arguments):
    """The command's status, and what it says on stderr."""
    monkeypatch.setattr(sys, "argv", ["dgc", *map(str, arguments)])
    return cli.run(), capsys.readouterr().err


def invoke(*arguments):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output + str(result.exception)
    return result


def search(place, code, trials=2, tolerance=0.0, **task):
    """Searches over a script of this code, with its schedule as ``expression`` and one epoch."""
    (place / "short.py").write_text(
        f"import os, sys\nexpression = sys.argv[1]\ndense = expression == 'constant:0'\n"
        f"reports = open(os.environ['DGC_TUNE_REPORTS'], 'a')\n{code}\n"
    )
    given = {
        "command": [sys.executable, "-S", "short.py", "{sparsity}"],
        "epochs": 1,
        "metric": "metric",
        "maximize": True,
        "clip_norm": None,
    }
    return studies.search({**given, **task}, place / "found", trials, 1, tolerance)


REPORT = """reports.write('{"epoch": 1, "metric": %s, "bytes": %s}' % (2 if dense else 1, 9e6 if dense else 1e6))"""


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_a_study_ends_with_its_front_and_a_recommendation(place):
    found = json.loads(invoke(*line("--trials", 9, "--json")).stdout)
    assert found == json.loads((place / "tune" / "trials.json").read_text())
    assert (place / "tune" / "front.png").read_bytes().startswith(b"\x89PNG")
    trials = {t["trial"]: t for t in found["trials"]}
    assert len(trials) == 9
    for t in trials.values():  # what was run is what is written down, and as the script has it
        end = float(re.split("end=|:", t["sparsity"])[-1].partition(",")[0])
        good = 90 - abs(math.log10(1 - end) + 2.3) - (float(t["clip_norm"]) < 1)
        assert t["metric"] == pytest.approx(good)
        assert 0.9 <= end <= 0.9999 or t["kind"] == "dense"

    paper, dense, best = (trials[found[name]] for name in ("paper", "dense", "recommended"))
    assert (paper["trial"], paper["kind"], paper["clip_norm"]) == (0, "paper", "inf")
    mine, theirs = dgc.schedule.parse(paper["sparsity"], 4100), dgc.warmup(4, steps_per_epoch=100)
    # 4 of 164 epochs, 4 x 4100 x 4 / 164 steps.
    assert [mine(step) for step in (0, 99, 100, 200, 300, 399, 401)] == pytest.approx(
        [theirs(step) for step in (0, 99, 100, 200, 300, 399, 401)]
    )
    assert (dense["trial"], dense["kind"], dense["sparsity"]) == (1, "dense", "constant:0")

    def beaten(t):
        mine = t["metric"], -t["bytes_sent"]
        return any(
            all(map(operator.ge, o, mine)) and o != mine
            for o in ((o["metric"], -o["bytes_sent"]) for o in trials.values())
        )

    assert sorted(found["front"]) == [n for n, t in trials.items() if not beaten(t)]
    fine = [t for t in trials.values() if t["metric"] >= paper["metric"]]
    assert best["bytes_sent"] == min(t["bytes_sent"] for t in fine) <= paper["bytes_sent"]
    assert shlex.split(found["line"])[2:5] == ["script.py", best["sparsity"], best["clip_norm"]]
    shown = " ".join(invoke(*line("--trials", 9)).stdout.split())  # nothing is left to run
    assert (
        f"Recommended: trial {best['trial']}, the fewest bytes" in shown and found["line"] in shown
    )
    assert f"{dense['metric']:.6g}" in shown


@pytest.mark.parametrize(("tolerance", "recommended"), [(0.0, 0), (5.0, 2)])
def test_the_metric_may_be_worse_by_the_tolerance(place, tolerance, recommended):
    """Where less of it is better, too."""
    code = (
        "n = 1 if dense else 0 if expression.endswith('end=0.999,stages=4') else 2\n"
        'reports.write(\'{"epoch": 1, "metric": %s, "bytes": %s}\' % ([10, 4, 13][n], [5, 9, 2][n]))'
    )
    found = search(place, code, trials=3, tolerance=tolerance, maximize=False)
    assert found["recommended"] == recommended and found["dense"] == 1


# -- interruptions -----------------------------------------------------------------------------------------------------


def until(condition, seconds=100):
    ends = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < ends
        time.sleep(0.05)
    return found


def alive(pids):
    """Those that still are, and are no zombies of this test's own making."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def kept(place):
    """number -> (state, parameters), as optuna itself reads the study."""
    file = optuna.storages.journal.JournalFileBackend(str(place / "tune" / "study.journal"))
    trials = optuna.load_study(study_name=None, storage=optuna.storages.JournalStorage(file)).trials
    return {t.number: (t.state.name, t.params) for t in trials}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_study_that_is_killed_goes_on(place, number):
    """Nothing finished is lost or repeated, and what was running is run again with its setting. Ctrl-C leaves no
    process; what the search could not end itself runs on to its own end.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "dgc", *line("--trials", 99, "--jobs", 2, seconds=3)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    def two_more():  # after one of the first two, which the study has
        children = psutil.Process(process.pid).children(recursive=True)
        return children if (place / "tune" / "0002").exists() and len(children) == 2 else None

    try:
        family = [child.pid for child in until(two_more)]
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)
        until(lambda: not alive(family), 15)
    finally:
        end(process.pid)
    assert (
        process.returncode == (-9 if number == signal.SIGKILL else 130)
        and "Traceback" not in output
    ), output
    if number == signal.SIGINT:
        assert "dgc tune: stopped; the same line again goes on with tune" in output
    before = kept(place)
    finished = {n: t for n, t in before.items() if t[0] == "COMPLETE"}
    cut = {n: t for n, t in before.items() if t[0] == "RUNNING"}
    assert finished and cut

    enough = len(finished) + 3  # the two that were cut, and another one
    found = json.loads(invoke(*line("--trials", enough, "--jobs", 2, "--json", seconds=3)).stdout)
    after = kept(place)
    assert {n: after[n] for n in finished} == finished and len(found["trials"]) == enough
    settings = [(t["kind"], t["sparsity"], t["clip_norm"]) for t in found["trials"]]
    assert len(set(settings)) == enough
    for n, trial in cut.items():
        assert after[n][0] == "FAIL" and n not in [t["trial"] for t in found["trials"]]
        assert trial[1] in [after[t["trial"]][1] for t in found["trials"]]


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
other = subprocess.Popen([sys.executable, "-S", "-c", child])
open(sys.argv[2] + ".pids", "w").write(str(other.pid))
with open(os.environ["DGC_TUNE_REPORTS"], "a") as file:
    file.write('{"epoch": 4, "metric": 3, "bytes": %s}\\n' % (1 + int(sys.argv[2])))
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.timeout(60)
def test_what_a_trial_started_ends_with_it(place, monkeypatch):
    """Also what ignores SIGTERM; and whether the trial ends well or fails."""
    monkeypatch.setattr(user_code, "GRACE_S", 0.3)
    (place / "stubborn.py").write_text(STUBBORN)
    found = json.loads(
        invoke(
            "tune",
            "--epochs",
            4,
            "--maximize",
            "--trials",
            2,
            "--json",
            "--",
            sys.executable,
            "-S",
            "stubborn.py",
            "{sparsity}",
            "{trial}",
        ).stdout
    )
    assert ["why" in t for t in found["trials"]] == [False, True]
    assert found["recommended"] == found["paper"] == 0 and found["dense"] is None
    assert not alive([int((place / f"{trial}.pids").read_text()) for trial in "01"])


def test_one_process_at_a_time_searches_a_study(place):
    import fcntl

    search(place, REPORT)
    with (place / "found" / "study.journal").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="one process at a time"):
            search(place, REPORT)


@pytest.mark.parametrize("name", ["a?b", "a%20b", "a{b}", "a b#c"])
def test_a_study_is_the_folder_that_was_named(place, name):
    invoke(*line("--trials", 2, "--study", name))
    assert (place / name / "study.journal").exists()


# -- settings ----------------------------------------------------------------------------------------------------------


def test_bounds_are_searched_around_what_it_is_today(place):
    found = search(
        place,
        REPORT,
        12,
        clip_norm=0.5,
        command=[sys.executable, "-S", "short.py", "{sparsity}", "{clip_norm}"],
    )
    bounds = [float(t["clip_norm"]) for t in found["trials"]]
    assert bounds[:2] == [0.5, 0.5] and "inf" in {t["clip_norm"] for t in found["trials"]}
    assert (
        all(0.005 <= bound <= 50 or bound == math.inf for bound in bounds) and len(set(bounds)) > 4
    )


@pytest.mark.parametrize("form", studies.FORMS)
def test_recipes_train_with_the_schedule_that_was_drawn(form, monkeypatch, place):
    """A plain number is to them what follows a warm-up of their own."""
    import argparse
    from pathlib import Path

    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "recipes")
    import job

    drawn = optuna.trial.FixedTrial(
        {"density": 0.001, "warmup": form, "warmup_length": 1.0, "clips": False, "clip_norm": 1.0}
    )
    entry = studies.suggest(drawn, {"epochs": 5, "clip_norm": None, "command": []}, place)
    given = argparse.Namespace(sparsity=job.sparsity(entry["sparsity"]))
    schedule, expected = job.schedule(given, 390, 2.0), dgc.schedule.parse(entry["sparsity"], 390)
    assert [schedule(step) for step in range(1000)] == [expected(step) for step in range(1000)]
    assert (schedule(0) == 0.999) == (form == "none")


def test_local_steps_are_searched_where_the_command_has_them(place):
    """The paper's and the dense trial have none; beside them all entries travel, unclipped by dgc."""
    code = REPORT.replace("1e6", "1e6 / (1 + int(sys.argv[2]))")
    command = [sys.executable, "-S", "short.py", "{sparsity}", "{local_steps}", "{clip_norm}"]
    found = search(place, code, trials=12, command=command, clip_norm=1.0)
    first, second, *drawn = sorted(found["trials"], key=lambda each: each["trial"])
    assert first["local_steps"] == second["local_steps"] == 0
    rounds = [each for each in drawn if each["local_steps"]]
    assert rounds and len(rounds) < len(drawn)
    for each in rounds:
        assert 2 <= each["local_steps"] <= 32
        assert (each["sparsity"], each["clip_norm"]) == ("constant:0", "inf")
        assert each["factor_masking"] == "--factor-masking"


@pytest.mark.parametrize(("density", "masked"), [(0.01, True), (0.05, False), (0.1, False)])
def test_masking_follows_from_the_sparsity(density, masked, place):
    """Beside momentum 0.9 it makes steps three tenths shorter at 99 %, and three quarters at 90 %."""
    drawn = optuna.trial.FixedTrial(
        {
            "density": density,
            "warmup": "none",
            "warmup_length": 1.0,
            "clips": False,
            "clip_norm": 1.0,
        }
    )
    entry = studies.suggest(drawn, {"epochs": 5, "clip_norm": None, "command": []}, place)
    words = [f"constant:{1 - density:g}", "--factor-masking" if masked else "--no-factor-masking"]
    assert one_trial.fill(["{sparsity}", "{factor_masking}"], entry) == words


def test_trials_at_a_time_share_the_cores_that_there_are(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    shares = [
        one_trial.share_of_machine(place, jobs) for place, jobs in ((0, 1), (1, 2), (0, 4), (7, 8))
    ]
    assert [share.get("OMP_NUM_THREADS") for share in shares] == [None, "3", "1", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert one_trial.share_of_machine(0, 2)["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(("visible", "shares"), [("3,5,7", ["3,7", "5"]), ("4", ["4", "4"])])
def test_trials_at_a_time_share_the_gpus_that_can_be_seen(visible, shares, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [
        one_trial.share_of_machine(place, 2)["CUDA_VISIBLE_DEVICES"] for place in range(2)
    ] == shares


# -- reports -----------------------------------------------------------------------------------------------------------


def test_report_is_heard_of_rank_0_only(tmp_path, monkeypatch):
    tune.report(1, 2.0, 3.0)  # nobody listens
    monkeypatch.setenv(tune.REPORTS, str(tmp_path / "reports"))
    tune.report(6, 2.0, 3.0)
    dgc.lockstep.run(lambda: tune.report(7, 8, 9), 3)
    lines = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [6, 7] and lines[-1] == {
        "epoch": 7,
        "metric": 8.0,
        "bytes": 9.0,
    }


@pytest.mark.parametrize(("rank", "said"), [(0, True), (1, False)])
def test_report_goes_by_the_rank_that_was_initialised(rank, said, tmp_path, monkeypatch):
    """As under srun, whose variables are others; and whatever another launcher's say."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setenv(tune.REPORTS, str(tmp_path / "reports"))
    monkeypatch.setenv("RANK", str(1 - rank))
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        tune.report(1, 2.0, 3.0)
    finally:
        distributed.destroy_process_group()
    assert (tmp_path / "reports").exists() == said


def test_a_metric_that_is_not_finite_ends_the_trial(tmp_path, monkeypatch):
    tune.report(1, math.nan, 3.0)  # nobody listens
    monkeypatch.setenv(tune.REPORTS, str(tmp_path / "reports"))
    with pytest.raises(ValueError, match="metric must be finite, got nan at epoch 1"):
        tune.report(1, math.nan, 3.0)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minimize", "python", "x.py"], "the command must have {sparsity}"),
        (["--minimize", "python", "{sparsity}", "{lr}"], "got python '{sparsity}' '{lr}'"),
        (["python", "{sparsity}"], "Missing option '--maximize'"),
        (
            ["--minimize", "--clip-norm", "1", "python", "{sparsity}"],
            "also {clip_norm} where --clip-norm is given",
        ),
        (
            ["--minimize", "python", "{sparsity}", "{clip_norm}"],
            "also {clip_norm} where --clip-norm is given",
        ),
    ],
)
def test_wrong_usage_is_status_2(place, arguments, message, monkeypatch, capsys):
    status, told = run(monkeypatch, capsys, "tune", "--epochs", "2", *arguments)
    assert (
        status == 2 and message in told and told.count("\n") == 1 and not (place / "tune").exists()
    )


@pytest.mark.parametrize(
    "code",
    [
        "",
        "reports.write('epoch 1: 63 %')",
        'reports.write(\'{"epoch": 3, "metric": 1, "bytes": 1}\')',
        'reports.write(\'{"epoch": 1, "metric": 1, "bytes": 0}\')',
        'reports.write(\'{"epoch": 1, "metric": NaN, "bytes": 1}\')',
    ],
)
def test_a_script_that_leaves_no_result_ends_the_search_at_once(place, code, capsys):
    with pytest.raises(RuntimeError, match="the trial of the paper's schedule failed"):
        search(place, code, trials=9)
    told = capsys.readouterr().err
    assert "its last report must be of epoch 1" in told and "trial 1" not in told


def test_what_is_mended_goes_on_in_the_same_study(place, capsys):
    """With the paper's setting once more."""
    with pytest.raises(RuntimeError, match="the trial of the paper's schedule failed"):
        search(place, "raise RuntimeError('the disk is full')")
    assert "RuntimeError: the disk is full" in capsys.readouterr().err
    found = search(place, REPORT, trials=3)
    assert [t["kind"] for t in found["trials"]] == ["dense", "paper", "drawn"]
    with pytest.raises(ValueError, match="study must be of the same search"):
        search(place, REPORT, epochs=5)


def test_another_trial_that_fails_is_told_and_the_rest_goes_on(place, capsys):
    found = search(place, f"if dense: raise SystemExit('no luck')\n{REPORT}", trials=3)
    assert ["why" in t for t in found["trials"]] == [False, True, False]
    assert found["dense"] is None and "no luck" in capsys.readouterr().err


def test_a_schedule_that_changes_nothing_ends_the_search(place):
    """As where the script does not use it, or all steps are AdamW's dense ones."""
    with pytest.raises(
        RuntimeError, match="the schedule must change what is sent, got 5,000,000 bytes"
    ):
        search(place, """reports.write('{"epoch": 1, "metric": 1, "bytes": 5e6}')""", trials=20)


def test_of_a_flood_the_end_is_told(place):
    (place / "flood.py").write_text(
        "print('x' * 10**7); print('y' * 10**6, 'no luck'); raise SystemExit(3)\n"
    )
    code = f"if dense: exec(open('flood.py').read())\n{REPORT}"
    why = search(place, code)["trials"][1]["why"]
    assert len(why) < 10_000 and why.rstrip().endswith("yyy no luck")


def test_without_optuna_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)  # as if it were not there
    monkeypatch.delitem(sys.modules, "dgc.tune.study")
    line = ["dgc", "tune", "--epochs", "1", "--maximize", "true", "{sparsity}"]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert capsys.readouterr().err == "dgc: tune needs optuna: pip install optuna\n"


def test_help_teaches_by_example():
    shown = invoke("tune", "--help").stdout
    assert "python recipes/cifar10.py" in shown and "{sparsity}" in shown
