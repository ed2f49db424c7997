"""The search, on a script whose front is known, run, killed and taken up again."""

import argparse
import contextlib
import json
import math
import operator
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launch import end
from typer.testing import CliRunner

import dgc
from dgc import cli, tune
from dgc.tune import study as studies
from dgc.tune import trial as one_trial

optuna = pytest.importorskip("optuna")

# Better with more bytes, up to a point; worse with clipping below 1. No torch, so that it starts at once.
SCRIPT = """
import json, math, os, re, sys, time
expression, clip, seconds, out = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
found = re.match(r"warmup:epochs=([^,]+),end=([^,]+)", expression)
warm, end = (float(found[1]), float(found[2])) if found else (0.0, float(expression[9:]))  # constant:
sent = 1e6 * (1 - end) + 1e3 * warm
good = 90 - abs(math.log10(1 - end) + 2.3) - (1 if clip < 1 else 0)
for epoch in range(1, 5):
    time.sleep(seconds / 4)
    with open(os.environ["DGC_TUNE_REPORTS"], "a") as file:
        file.write(json.dumps({"epoch": epoch, "metric": good * epoch / 4, "bytes": sent * epoch / 4}) + "\\n")
with open(out, "w") as file:
    json.dump({"accuracy": good, "bytes_sent": sent}, file)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def line(*options, seconds=0.0, script="script.py"):
    return ["tune", "--epochs", "4", "--maximize", "--metric", "accuracy", *map(str, options), "--", sys.executable,
            "-S", script, "{sparsity}", "{clip_norm}", str(seconds), "{out}"]


def invoke(*arguments, status=0):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output + str(result.exception)
    return result


def kept(study="tune.db"):
    """number -> (state, values, attributes, parameters), as optuna itself reads the file."""
    trials = optuna.load_study(study_name=None, storage=f"sqlite:///{study}").trials
    return {t.number: (t.state.name, t.values, t.user_attrs, t.params) for t in trials}


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


# -- the whole ---------------------------------------------------------------------------------------------------------

def test_a_study_ends_with_its_front_and_a_recommendation(place):
    found = json.loads(invoke(*line("--trials", 9, "--json")).stdout)
    assert found == json.loads((place / "tune.json").read_text())
    assert (place / "tune.png").read_bytes().startswith(b"\x89PNG")
    trials = {t["trial"]: t for t in found["trials"]}
    complete = {n: t for n, t in trials.items() if t["state"] == "complete"}
    assert len(trials) == 9 and len(complete) > 4
    for t in complete.values():  # what was run is what is written down, and as the script has it
        end = float(re.split("end=|:", t["expression"])[-1].partition(",")[0])
        good = 90 - abs(math.log10(1 - end) + 2.3) - (t["clip_norm"] is not None and t["clip_norm"] < 1)
        assert t["metric"] == pytest.approx(good) and list(t["reports"]) == list("1234")
        assert 0.9 <= end <= 0.9999 or t["trial"] == 1
    paper = complete[found["paper"]]
    assert found["paper"] == 0 and paper["clip_norm"] is None
    mine, theirs = dgc.schedule.parse(paper["expression"], 4100), dgc.warmup(4, steps_per_epoch=100)
    assert [mine(step) for step in (0, 99, 100, 200, 300, 399, 401)] == pytest.approx(
        [theirs(step) for step in (0, 99, 100, 200, 300, 399, 401)])  # 4 of 164 epochs, 4 x 4100 x 4 / 164 steps

    def beaten(t):
        mine = t["metric"], -t["bytes_sent"]
        return any(all(map(operator.ge, o, mine)) and o != mine
                   for o in ((o["metric"], -o["bytes_sent"]) for o in complete.values()))

    dense = complete.pop(found["dense"])
    assert found["dense"] == 1 and dense["config"] == "dgc.Config(sparsity=0)"
    assert dense["bytes_sent"] > max(t["bytes_sent"] for t in complete.values())
    assert sorted(found["front"]) == [n for n, t in complete.items() if not beaten(t)]
    fine = [t for t in complete.values() if t["metric"] >= paper["metric"]]
    best = found["recommended"]
    assert best["bytes_sent"] == min(t["bytes_sent"] for t in fine) <= paper["bytes_sent"]
    assert {key: best[key] for key in paper} in fine
    words = shlex.split(best["line"])
    assert words[2:4] == ["script.py", best["expression"]]
    assert dgc.Config(clip_norm=float(words[4])).clip_norm == best["clip_norm"]
    config = eval(best["config"], {"dgc": dgc, "loader": range(70), "len": len})
    schedule = dgc.schedule.parse(best["expression"], 70)
    assert [config.sparsity_at(step) for step in range(300)] == [schedule(step) for step in range(300)]
    assert config.clip_norm == best["clip_norm"]
    shown = " ".join(invoke(*line("--trials", 9)).stdout.split())  # nothing is left to run
    assert f"Recommended: trial {best['trial']}, the fewest bytes" in shown and best["config"] in shown
    assert f": {best['metric']:.6g}. Dense training has {dense['metric']:.6g}." in shown
    if schedule(0) != schedule(299):  # of 4 epochs of 70 steps
        last = max(step for step in range(300) if schedule(step) != schedule(299))
        told, = re.findall(r"Its warm-up is (\S+) % of these 4 epochs; of a training of 100 it would be epochs=", shown)
        assert float(told) == pytest.approx(100 * (last + 1) / (4 * 70), abs=100 * 0.51 / (4 * 70))
    else:
        assert "Its warm-up" not in shown


@pytest.mark.parametrize(("maximize", "metrics", "too_short"), [
    (True, (11.1, 28.3, 31.4), True), (True, (72.7, 74.0, 75.7), False), (False, (4.0, 3.9, 2.0), True)])
def test_trainings_too_short_to_choose_by_are_told(place, maximize, metrics, too_short):
    """In which the paper's schedule has hardly begun to learn."""
    def objective(setting):
        return metrics[max(0, setting.trial - 1)], 1e9 if setting.density == 1 else 1e6 + setting.trial

    found = tune.search(objective, epochs=3, maximize=maximize, trials=4)
    assert found["recommended"]["trial"] == 0
    said = []
    cli._print_found(found, lambda text, **_: said.append(str(text)))
    assert any("But trial 3 is far better" in text and "too short" in text for text in said) == too_short


# -- interruptions -----------------------------------------------------------------------------------------------------

def started(*arguments):
    return subprocess.Popen([sys.executable, "-m", "dgc", *arguments], stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_study_that_is_killed_goes_on(place, number):
    """Nothing finished is lost or repeated, and what was running is run again with its setting. Ctrl-C leaves no
    process; what the search could not end itself runs on to its own end.
    """
    process = started(*line("--trials", 99, "--jobs", 2, seconds=3))

    def two_more():  # after one of the first two, which the study has
        children = psutil.Process(process.pid).children(recursive=True)
        return children if (place / "tune.db-trials" / "0002").exists() and len(children) == 2 else None

    try:
        family = [child.pid for child in until(two_more)]
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)
        until(lambda: not alive(family), 15)
    finally:
        end(process.pid)
    assert process.returncode == (-9 if number == signal.SIGKILL else 130) and "Traceback" not in output, output
    before = kept()
    finished = {n: t for n, t in before.items() if t[0] == "COMPLETE" or (t[0] == "FAIL" and "end" in t[2])}
    cut = {n: t for n, t in before.items() if n not in finished and t[3] and t[0] != "WAITING"}
    assert finished and cut
    if number == signal.SIGINT:
        assert "dgc tune: stopped; the same line again goes on with tune.db" in output
    with contextlib.closing(sqlite3.connect("tune.db")) as database:  # an hour later
        database.execute("UPDATE trial_heartbeats SET heartbeat = datetime(heartbeat, '-1 hour')")
        database.commit()
    enough = len(finished) + 3  # the two that were cut, and another one
    found = json.loads(invoke(*line("--trials", enough, "--jobs", 2, "--json", seconds=3)).stdout)
    after = kept()
    assert {n: after[n] for n in finished} == finished and len(found["trials"]) == enough
    settings = [(t["expression"], t["clip_norm"]) for t in found["trials"]]
    assert len(set(settings)) == enough
    for n, trial in cut.items():
        assert after[n][0] == "FAIL" and n not in [t["trial"] for t in found["trials"]]
        assert trial[3] in [after[t["trial"]][3] for t in found["trials"]]


def test_a_function_that_is_interrupted_is_run_again_and_counts_once(place):
    ran = []

    def objective(setting):
        ran.append(setting.expression)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return 1.0, setting.density

    with pytest.raises(KeyboardInterrupt):
        tune.search(objective, epochs=1, maximize=True, trials=4)
    found = tune.search(objective, epochs=1, maximize=True, trials=4)
    assert [(t["trial"], t["state"]) for t in found["trials"]] == [(n, "complete") for n in (0, 2, 3, 4)]
    assert ran[1] == ran[2] == "constant:0" and len(ran) == 5 and found["dense"] == 2


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
other = subprocess.Popen([sys.executable, "-S", "-c", child])
with open(sys.argv[4] + ".pids", "w") as file:
    file.write(f"{os.getpid()} {other.pid}\\n")
bad = sys.argv[1] != "warmup:epochs=0.0976,end=0.999,stages=4"
with open(os.environ["DGC_TUNE_REPORTS"], "a") as file:
    file.write('{"epoch": %d, "metric": %s, "bytes": 1}\\n' % ((1, "NaN") if bad else (4, "3")))
time.sleep(100 if bad else 0)
"""


@pytest.mark.timeout(60)
def test_a_bad_trial_is_ended_with_all_that_it_started(place, monkeypatch):
    """Its metric is NaN; it ignores SIGTERM, as does what it started. So does what the good one has started, which
    ends and leaves that behind.
    """
    monkeypatch.setattr(one_trial, "GRACE_S", 0.3)
    (place / "stubborn.py").write_text(STUBBORN)
    command = [sys.executable, "-S", "stubborn.py", "{sparsity}", "", "", "{trial}"]
    found = tune.search(command, epochs=4, maximize=True, trials=2)
    assert [t["state"] for t in found["trials"]] == ["complete", "failed"]
    assert found["trials"][1]["why"] == "the metric is nan at epoch 1"
    assert found["recommended"]["trial"] == found["paper"] == 0 and found["recommended"]["metric"] == 3
    pids = [int(pid) for trial in "01" for pid in (place / f"{trial}.pids").read_text().split()]
    assert len(pids) == 4 and not alive(pids)


@pytest.mark.parametrize("name", ["a?b.db", "a%20b.db", "a{b}.db", "a b#c.db"])
def test_a_study_is_the_file_that_was_named(place, name):
    tune.search(lambda setting: (1.0, 2.0), epochs=1, maximize=True, trials=1, study=name)
    assert (place / name).read_bytes().startswith(b"SQLite format 3")
    with pytest.raises(ValueError, match="its epochs is 1, asked is 2"):
        tune.search(lambda setting: (1.0, 2.0), epochs=2, maximize=True, study=name)


# -- functions ---------------------------------------------------------------------------------------------------------

def test_a_function_is_searched(place):
    """With clipping around what it is today; it may return its result, or have reported it."""
    seen = []

    def objective(setting):
        seen.append(setting)
        for epoch in range(1, 5):
            tune.report(epoch, math.nan if setting.trial in (2, 5) else 3.0, 100.0 * epoch - setting.trial)
        return (3.0, 400.0 - setting.trial) if setting.trial % 2 else None

    found = tune.search(objective, epochs=4, maximize=False, trials=8, clip_norm=0.5, metric="loss")
    assert [s.trial for s in seen] == list(range(8))
    assert [t["expression"] for t in found["trials"]] == [s.expression for s in seen]
    assert [t["state"] for t in found["trials"]] == ["complete", "complete", "failed"] * 2 + ["complete"] * 2
    assert [len(t["reports"]) for t in found["trials"]] == [4, 4, 1] * 2 + [4] * 2
    assert all((t["metric"], t["bytes_sent"]) == (3.0, 400.0 - n) for n, t in enumerate(found["trials"])
               if n not in (2, 5))
    assert found["recommended"]["trial"] == 7 and found["recommended"]["line"] == seen[7].line
    assert seen[0].clip_norm == 0.5 and seen[0].expression.endswith("end=0.999,stages=4")
    assert all(s.clip_norm is None or 0.005 <= s.clip_norm <= 50 for s in seen)
    searched = optuna.load_study(study_name=None, storage="sqlite:///tune.db").trials[0].distributions
    assert searched["clip_norm"] == optuna.distributions.FloatDistribution(0.005, 50.0, log=True)
    assert searched["density"] == optuna.distributions.FloatDistribution(1e-4, 0.1, log=True)


def test_the_first_trial_has_todays_bound_as_it_was_given(place):
    seen = []

    def objective(setting):
        seen.append(setting)
        return 1.0, setting.density

    tune.search(objective, epochs=1, maximize=True, trials=4, clip_norm=0.33333333)
    assert seen[0].clip_norm == 0.33333333 and "clip_norm=0.33333333)" in seen[0].line
    assert all(s.clip_norm is None or float(f"{s.clip_norm:.3g}") == s.clip_norm for s in seen[2:])


def test_a_failing_function_is_told_and_the_rest_goes_on(place, capsys):
    def objective(setting):
        if setting.trial == 1:
            raise RuntimeError("out of luck")
        return 1.0, setting.density

    found = tune.search(objective, epochs=1, maximize=True, trials=3)
    assert [t["state"] for t in found["trials"]] == ["complete", "failed", "complete"]
    assert "RuntimeError: out of luck" in capsys.readouterr().err


def test_a_function_from_the_command_line(place):
    (place / "mine_to_tune.py").write_text("print('loading')\ndef run(setting):\n    print('training')\n"
                                           "    return 1 - setting.density, 1e6 * setting.density\n")
    found = json.loads(invoke("tune", "--epochs", 3, "--maximize", "--trials", 3, "--json", "mine_to_tune:run").stdout)
    assert found["task"]["command"] == "mine_to_tune.run" and found["recommended"]["line"].startswith("dgc.Config(")
    for t in found["trials"]:
        schedule = dgc.schedule.parse(t["expression"], 1000)
        assert t["bytes_sent"] / 1e6 == pytest.approx(sum(1 - schedule(s) for s in range(3000)) / 3000, rel=1e-6)


@pytest.mark.parametrize("form", studies.FORMS)
def test_recipes_train_with_the_schedule_that_was_drawn(form, monkeypatch):
    """A plain number is to them what follows a warm-up of their own."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "recipes")
    import job
    drawn = optuna.trial.FixedTrial({"density": 0.001, "warmup": form, "warmup_length": 1.0})
    setting = studies.suggest(drawn, {"command": ["x"], "epochs": 5, "clip_norm": None})
    given = argparse.Namespace(sparsity=job.sparsity(setting.expression))
    schedule, expected = job.schedule(given, 390, 2.0), setting.schedule(390)
    assert [schedule(step) for step in range(1000)] == [expected(step) for step in range(1000)]
    assert (schedule(0) == 0.999) == (form == "none")
    assert (setting.line == "dgc.Config(sparsity=0.999)") == (form == "none")


@pytest.mark.parametrize("command", [("x", "{sparsity}", "{factor_masking}"), ("x", "{sparsity}"), "a.function"])
@pytest.mark.parametrize(("density", "masked"), [(0.0099, True), (0.01, False), (0.1, False)])
def test_masking_follows_from_the_sparsity_where_a_trial_is_told_of_it(command, density, masked):
    """Beside momentum 0.9 it makes steps three tenths shorter at 99 %, and three quarters at 90 %."""
    drawn = optuna.trial.FixedTrial({"density": density, "warmup": "none", "warmup_length": 1.0})
    task = {"command": command, "epochs": 5, "clip_norm": None}
    setting = studies.suggest(drawn, task)
    told = isinstance(command, str) or len(command) == 3
    assert setting.factor_masking is (masked if told else None)
    assert ("factor_masking=False" in setting.line) == (told and not masked)
    if isinstance(command, tuple):
        words = [command[0], f"constant:{1 - density:g}", "--factor-masking" if masked else "--no-factor-masking"]
        assert one_trial.fill(command, setting, Path("out.json")) == words[:len(command)]


# -- reports -----------------------------------------------------------------------------------------------------------

def test_report_is_heard_of_rank_0_only(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "gold")
    tune.report(1, 2.0, 3.0)  # nobody listens
    monkeypatch.setenv(tune.REPORTS, str(tmp_path / "reports"))
    tune.report(6, 2.0, 3.0)  # that is no rank's number
    monkeypatch.delenv("RANK")
    for name in ("HOROVOD_RANK", "RANK"):
        monkeypatch.setenv(name, "1")
        tune.report(1, 2.0, 3.0)
        monkeypatch.setenv(name, "0")
        tune.report(1, 2.0, 3.0)
        monkeypatch.delenv(name)
    dgc.lockstep.run(lambda: tune.report(7, 8, 9), 3)
    lines = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [6, 1, 1, 7] and lines[-1] == {"epoch": 7, "metric": 8.0, "bytes": 9.0}


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


# -- errors ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("arguments", "message"), [
    (["python", "x.py"], "the command must have {sparsity} where it takes a schedule's expression, got 'python x.py'"),
    (["python", "{sparsity}", "{lr}"],
     "must have none but {sparsity}, {clip_norm}, {factor_masking}, {epochs}, {out}, {trial} in braces, got {lr}"),
    (["nowhere/python", "{sparsity}"], "the command must be one that can be run, got 'nowhere/python'"),
    (["os:getcwd"], "one of --maximize and --minimize must be given"),
    (["nowhere:run"], "COMMAND: 'nowhere:run'; No module named 'nowhere'"),
    (["os:nothing"], "COMMAND: 'os:nothing'; module 'os' has no attribute 'nothing'"),
    (["--clip-norm", "1", "true", "{sparsity}"],
     "clip_norm must be None where the command has no {clip_norm}, got 1.0"),
    (["--jobs", "2", "os:getcwd"], "jobs must be 1 for a function, which trains within this process, got 2"),
    (["--study", "a.db", "--png", "a.json", "os:getcwd"], "must be three files, got a.db, a.json and a.json"),
    (["--png", "tune.db", "os:getcwd"], "must be three files, got tune.db, tune.db and tune.json"),
])
def test_wrong_usage_is_status_2(place, arguments, message, monkeypatch, capsys):
    direction = [] if arguments == ["os:getcwd"] else ["--minimize"]
    monkeypatch.setattr(sys, "argv", ["dgc", "tune", "--epochs", "2", *direction, *arguments])
    assert cli.run() == 2
    output, told = capsys.readouterr()
    assert message in told and told.count("\n") == 1 and not output


def test_files_of_others_are_left_alone(place, monkeypatch, capsys):
    """A result where the summary would go, and a picture beside no summary."""
    line = ["dgc", "tune", "--epochs", "2", "--minimize", "--study", "one.db", "true", "{sparsity}"]
    monkeypatch.setattr(sys, "argv", line)
    for name, text in (("one.json", '{"recipe": "cifar10"}'), ("one.json", "[1]"), ("one.png", "")):
        (place / name).write_text(text)
        assert cli.run() == 2 and f"{name} must be free for the search's results" in capsys.readouterr().err
        assert (place / name).read_text() == text
        (place / name).unlink()


@pytest.mark.parametrize(("code", "message"), [
    ("", "got none though it ended well (call dgc.tune.report(epoch, metric, bytes_sent) after"),
    ("open(sys.argv[2], 'w')", "out.json, which the command had as {out}, must have a JSON object with the numbers "
     "accuracy, bytes_sent, got ''"),
    ("open(out, 'w').write('no')", "must have a JSON object with the numbers accuracy, bytes_sent, got 'no'"),
    ("open(out, 'w').write('{\"loss\": 1, \"sent\": 2}')", "got '{\"loss\": 1, \"sent\": 2}' (KeyError: 'accuracy')"),
    ("open(out, 'w').write('{\"accuracy\": 1, \"bytes_sent\": 0}')", "the bytes sent must be a number > 0, got 0 "
     "(one worker alone sends nothing"),
    ("open(out, 'w').write('{\"accuracy\": 1, \"bytes_sent\": 1' + '0' * 400 + '}')",
     "(OverflowError: "),
    ("open(reports, 'a').write('{\"epoch\": 3, \"metric\": 1, \"bytes\": 1}')", "the command "
     "must report each of its 4 epochs, got 3 as the last (it has as {epochs} how many to train)"),
    ("open(reports, 'a').write('epoch 1: 63 %')", "reports.jsonl must have a JSON object with the "
     "numbers epoch, metric, bytes, got 'epoch 1"),
])
def test_a_script_that_leaves_no_result_is_told_at_once(place, code, message, monkeypatch, capsys):
    (place / "broken.py").write_text(
        f"import os, sys\nout, reports = sys.argv[4], os.environ['DGC_TUNE_REPORTS']\nsys.argv[2] += '.x'\n{code}\n")
    arguments = line("--trials", 3, script="broken.py")
    if not code or "reports" in code:
        arguments[-1] = "nothing"
    monkeypatch.setattr(sys, "argv", ["dgc", *arguments])
    assert cli.run() == 1
    told = capsys.readouterr().err
    first, second = told.splitlines()
    assert message in second and first.startswith("trial 0, paper: warmup:")


def test_what_is_mended_goes_on_in_the_same_study(place):
    """With the paper's setting once more."""
    def objective(setting):
        if mended == 1:
            raise RuntimeError("the disk is full")
        return (1.0, setting.density) if mended else "good"

    mended = 0
    with pytest.raises(tune.NoResultError):
        tune.search(objective, epochs=4, maximize=False, trials=3)
    mended = 1
    assert tune.search(objective, epochs=4, maximize=False, trials=2)["paper"] is None
    mended = 2
    assert tune.search(objective, epochs=4, maximize=False, trials=2)["paper"] is not None  # one more than has failed
    found = tune.search(objective, epochs=4, maximize=False, trials=5)
    assert [(t["state"], t["kind"]) for t in found["trials"]] == [
        ("failed", "paper"), ("failed", "dense"), ("failed", "paper"), ("complete", "paper"), ("complete", "")]
    assert found["recommended"]["trial"] == found["paper"] == found["trials"][3]["trial"]
    differ = "same search, got .*: its maximize is False, asked is True; its epochs is 4, asked is 5"
    with pytest.raises(ValueError, match=differ):
        tune.search(objective, epochs=5, maximize=True, trials=3)


def test_three_failures_at_first_end_a_study(place, monkeypatch, capsys):
    (place / "broken.py").write_text("print('line\\n' * 99); raise SystemExit('no luck here')\n")
    monkeypatch.setattr(sys, "argv", ["dgc", *line("--trials", 9, script="broken.py")])
    assert cli.run() == 1
    told = capsys.readouterr().err
    assert told.count("no luck here") == told.count("failed, status 1; the end of") == 3
    assert told.endswith(f"dgc: RuntimeError: the first 3 trials failed; what they said is above, and in "
                         f"{place}/tune.db-trials\n") and told.count("    line\n") == 3 * 13


def test_of_a_flood_the_end_is_told(place):
    (place / "flood.py").write_text("print('x' * 10**7); print('y' * 10**6, 'no luck'); raise SystemExit(3)\n")
    found = tune.search([sys.executable, "-S", "flood.py", "{sparsity}"], epochs=1, maximize=True, trials=1)
    assert len(found["trials"][0]["why"]) < 10_000 and found["trials"][0]["why"].endswith("yyy no luck")


def test_without_optuna_it_says_how_to_get_it(place):
    code = ("import sys; sys.modules['optuna'] = None; sys.argv = ['dgc', 'tune', '--epochs', '1', '--maximize', "
            "'true', '{sparsity}']; from dgc.__main__ import main; main()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ})
    assert (done.returncode, done.stderr) == (1, "dgc: tune needs optuna: pip install optuna\n")


@pytest.mark.parametrize(("options", "told"), [((), "Recommended: trial 0"), (("--json",), '"recommended": {')])
def test_what_was_found_is_told_also_where_it_cannot_be_drawn(place, options, told):
    found = CliRunner().invoke(cli.app, line("--trials", 1, "--png", "script.py/a.png", *options))
    assert isinstance(found.exception, OSError) and told in found.stdout
    assert json.loads((place / "tune.json").read_text())["recommended"]["trial"] == 0


def test_help_teaches_by_example():
    shown = invoke("tune", "--help").stdout
    assert "python recipes/cifar10.py" in shown and "{sparsity}" in shown and "train:objective" in shown
