"""Seconds to an accuracy: parts of a step are measured, composed as by hand, and drawn; missing runs are made."""

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dgc

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import peers
import typer
from hosts_there import skip_without_hosts
from peers import all as everything
from peers import compose, measure, predict, steps, table
from peers.stale import Stale

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SECONDS = {
    "compute float32": 0.2,
    "compute bfloat16": 0.1,
    "local dense": {"exchanging": 0.004, "alone": None},
    "local stale": {"exchanging": 0.01, "alone": None},
    "local diloco": {"exchanging": 0.006, "alone": 0.002},
    "exchange 100mbit dense": {"exchanging": 0.15, "alone": None},
    "exchange 1gbit dense": {"exchanging": 0.03, "alone": None},
    "exchange 100mbit stale": {"exchanging": 0.3, "alone": None},
    "exchange 1gbit stale": {"exchanging": 0.05, "alone": None},
    "exchange 100mbit diloco": {"exchanging": 0.4, "alone": 0.02},
    "exchange 1gbit diloco": {"exchanging": 0.04, "alone": 0.02},
    "exchange 100mbit async": {"exchanging": 0.5, "alone": None},
    "exchange 1gbit async": {"exchanging": 0.1, "alone": None},
}
MEASURED = {
    "task": "cifar10",
    "workers": 4,
    "batch_size": 32,
    "parameters": 1000,
    "seconds": SECONDS,
}
CURVE = [40.0, 79.9, 80.0, 85.0]


def result(method, seed=0, accuracies=CURVE, bf16=False, **more):
    entry = peers.METHODS[method]
    return {
        "task": "cifar10",
        "dataset": "cifar10",
        "workers": 4,
        "epochs": 4,
        "steps_per_epoch": 390,
        "parameters": 1000,
        "method": method,
        "title": entry.title,
        "paper": entry.paper,
        "collective": entry.collective,
        "seed": seed,
        "accuracy": accuracies[-1],
        "bytes_per_step": 6000.0,
        "ratio": 1.0,
        "exchanging": 1.0,
        "settings": {"bf16": bf16, "batch_size": 32},
        "history": [{"epoch": i + 1, "accuracy": a} for i, a in enumerate(accuracies)],
        **more,
    }


def files(tmp_path, *results):
    for i, one in enumerate(results):
        (tmp_path / f"run{i}.json").write_text(json.dumps(one))
    return [tmp_path / f"run{i}.json" for i in range(len(results))]


def written(tmp_path, **changed):
    (tmp_path / "measured.json").write_text(json.dumps({**MEASURED, **changed}))
    return tmp_path / "measured.json"


def rows(tmp_path, *results, target=80.0):
    runs = table.load(files(tmp_path, *results))
    return {
        row["method"]: row
        for row in table.rows(runs, compose.load(written(tmp_path), runs), target)
    }


# -- composed, by hand -------------------------------------------------------------------------------------------------


def test_seconds_are_epochs_times_steps_times_what_a_step_takes(tmp_path):
    found = rows(tmp_path, result("dense"), result("dense", 1, [80.0, 81.0, 82.0]), result("fp16"))
    assert found["dense"]["epochs"] == 2  # the mean of the third and the first
    assert found["dense"]["seconds"] == pytest.approx(
        {"100mbit": 2 * 390 * 0.35, "1gbit": 2 * 390 * 0.23}
    )
    assert found["dense"]["local"] == 0.004 and found["dense"]["curve"] == [60.0, 80.45, 81.0]
    # Not measured.
    assert found["fp16"]["seconds"] == found["fp16"]["exchange"] == {"100mbit": None, "1gbit": None}


def test_with_bfloat16_computing_is_that_of_bfloat16(tmp_path):
    found = rows(tmp_path, result("dense", bf16=True))
    assert found["dense"]["seconds"] == pytest.approx(
        {"100mbit": 3 * 390 * 0.25, "1gbit": 3 * 390 * 0.13}
    )


def test_one_step_late_the_longer_counts_and_local_work_never_hides(tmp_path):
    found = rows(tmp_path, result("dense"), result("stale"))
    assert found["stale"]["step"] == pytest.approx({"100mbit": 0.3, "1gbit": 0.21})


def test_a_method_that_exchanges_now_and_then_is_weighed(tmp_path):
    found = rows(tmp_path, result("dense"), result("diloco", exchanging=0.25))["diloco"]
    assert found["exchange"] == pytest.approx({"100mbit": 0.25 * 0.4 + 0.75 * 0.02, "1gbit": 0.025})
    assert found["local"] == pytest.approx(0.003) and found["step"]["1gbit"] == pytest.approx(0.225)


def test_the_table_has_what_was_measured_and_says_what_is_not(tmp_path, capsys):
    runs = files(
        tmp_path,
        result("dense"),
        result("dense", 1, [10.0, 20.0, 30.0, 79.9]),
        result("async"),
        result("stale"),
    )
    table.main(runs, written(tmp_path))
    heading, _, *lines = capsys.readouterr().out.splitlines()
    assert (
        "measured, with local work" in heading
        and "seconds to 80 % at 1 Gbit/s, composed" in heading
    )
    cells = {line.split(" | ")[0].strip("| "): line.strip("|").split(" | ")[7:] for line in lines}
    assert [cell.strip() for cell in cells["dense"]] == [
        "4.00 ms",
        "0.78 ms",
        "150.00 ms",
        "0.35 ms",
        "30.00 ms",
        "not reached",
        "not reached",
    ]
    server = [cell.strip() for cell in cells["asynchronous server (Dean et al. 2012)"]]
    assert server[0] == "-" and server[2] == "500.00 ms" and server[-2:] == ["-", "-"]
    late = [cell.strip() for cell in cells["dense, one step late (Li et al. 2018)"]]
    assert late[-2:] == ["351", "246"]  # 3 * 390 * 0.3 and 3 * 390 * 0.21
    table.main(runs, target=79.0)
    assert "seconds to 79 %" in (printed := capsys.readouterr().out) and printed.splitlines()[
        2
    ].endswith("- | 0.78 ms | - | 0.35 ms | - | - | - |")


@pytest.mark.parametrize("key, value", [("workers", 2), ("parameters", 1001), ("batch_size", 64)])
def test_times_of_other_steps_are_refused(key, value, tmp_path):
    runs = table.load(files(tmp_path, result("dense")))
    with pytest.raises(
        typer.BadParameter, match=f"must have the {key} of the runs, .*, got {value}"
    ):
        compose.load(written(tmp_path, **{key: value}), runs)


def test_runs_with_and_without_bfloat16_are_not_mixed(tmp_path):
    with pytest.raises(
        typer.BadParameter, match="bf16 must be the same in all files, got False, True"
    ):
        table.load(files(tmp_path, result("dense"), result("fp16", bf16=True)))
    older = result("fp16", settings={"batch_size": 32})  # before there was a choice
    assert len(table.load(files(tmp_path, result("dense"), older))) == 2


def test_the_figure_has_dense_the_best_of_dgc_and_the_fastest_others(tmp_path):
    order = ("dense", "qsgd", "dgc-allgather", "dgc-reduce", "fp16", "diloco", "terngrad", "async")
    seconds = {
        f"exchange {rate} {name}": {"exchanging": 0.1 * (len(order) - i), "alone": None}
        for i, name in enumerate(order)
        for rate in predict.LINKS
    }
    measured = written(tmp_path, seconds={"compute float32": 0.2, **seconds})
    never = [10.0, 11.0, 12.0, 13.0]
    runs = files(
        tmp_path,
        *(result(name, accuracies=never if name == "terngrad" else CURVE) for name in order),
    )
    found = table.rows(table.load(runs), json.loads(measured.read_text()))
    # Terngrad has fast steps, and is never there.
    assert [row["method"] for row in compose.drawn(found, "1gbit")] == [
        "dense",
        "dgc-reduce",
        "diloco",
        "fp16",
        "qsgd",
    ]
    table.main(runs, measured, out=tmp_path / "peers.png")
    assert (tmp_path / "peers-seconds.png").read_bytes().startswith(b"\x89PNG")


# -- measured ----------------------------------------------------------------------------------------------------------


def test_medians_are_over_steps_of_each_kind():
    ranks = [
        [(0.0, 4.0, 70.0), (10.0, 11.0, 0.0), (20.0, 26.0, 90.0)],
        [(1.0, 6.0, 80.0), (11.0, 14.0, 0.0), (20.0, 22.0, 80.0)],
    ]
    # Of 80, 90.
    assert measure.medians(ranks, measure.slowest) == {
        "exchanging": 5.5,
        "alone": 3.0,
        "bytes": 85.0,
    }
    # 6 / 2, 4 / 2.
    assert measure.medians(ranks, measure.in_turn) == {
        "exchanging": 3.0,
        "alone": 2.0,
        "bytes": 85.0,
    }
    assert measure.medians([rank[:1] for rank in ranks], measure.slowest)["alone"] is None


def test_to_wait_for_a_late_exchange_changes_nothing():
    """So that it can be timed."""

    class Waiting(Stale):
        def step(self, last=False):
            super().step(last)
            self.receive()
            assert not self._under_way

    def worker():
        found = []
        for kind in (Stale, Waiting):
            torch.manual_seed(0)
            p = torch.nn.Parameter(torch.randn(40, 50))
            peer = kind(torch.optim.SGD([p], 0.1, 0.9), [("p", p)], dgc.Config(0.9))
            for t in range(5):
                p.grad = p.detach() + dgc.lockstep.current().world.rank
                peer.step(last=t == 4)
            found.append(p.detach())
        return torch.equal(*found)

    assert all(dgc.lockstep.run(worker, 3))


def call(tmp_path, *words, limit=300):
    """``measure.py``: its own limits end its processes before this one does."""
    return subprocess.run(
        [
            sys.executable,
            measure.__file__,
            "--methods",
            "dgc-allgather,diloco",
            "--steps",
            "2",
            "--hosts",
            "2",
            "--minutes",
            "1",
            "--out",
            str(tmp_path / "m.json"),
            *words,
        ],
        capture_output=True,
        text=True,
        timeout=limit,
    )


def test_it_measures_what_is_missing_also_on_hosts(tmp_path):
    """Where the hosts cannot be made, the script says why with status 2."""
    done = call(tmp_path, "--rates", "none")
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "m.json").read_text())
    assert set(first["seconds"]) == {
        "compute float32",
        "compute bfloat16",
        "local dgc-allgather",
        "local diloco",
    }
    assert first["seconds"]["local dgc-allgather"]["alone"] is None
    assert (
        first["seconds"]["local diloco"]["alone"] > 0
        and first["seconds"]["local diloco"]["exchanging"] > 0
    )
    assert (
        first["workers"] == 2
        and first["parameters"] == 269_722
        and first["machine"]["torch"] == torch.__version__
    )
    done = call(tmp_path, "--rates", "1gbit")
    second = json.loads((tmp_path / "m.json").read_text())
    assert {name: second["seconds"][name] for name in first["seconds"]} == first["seconds"]
    skip_without_hosts(done)
    assert done.returncode == 0, done.stderr
    assert set(second["seconds"]) - set(first["seconds"]) == {
        "exchange 1gbit dgc-allgather",
        "exchange 1gbit diloco",
    }
    assert all(
        second["seconds"]["exchange 1gbit diloco"][kind] > 0 for kind in ("exchanging", "alone")
    )


def test_a_step_is_told_without_a_training(tmp_path, capsys):
    """A row's numbers by hand; a method that exchanges every 30th step has a share of that step."""
    seconds = {
        "compute float32": 0.2,
        "local dense": {"exchanging": 0.004, "alone": None, "bytes": 6000.0},
    }
    for rate, dense, diloco in (("100mbit", 0.15, 0.4), ("1gbit", 0.03, 0.04)):
        seconds[f"exchange {rate} dense"] = {"exchanging": dense, "alone": None, "bytes": 6000.0}
        seconds[f"exchange {rate} diloco"] = {"exchanging": diloco, "alone": 0.02, "bytes": 6000.0}
        seconds[f"exchange {rate} qsgd"] = {"exchanging": dense / 2, "alone": None, "bytes": 1500.0}
    steps.main(written(tmp_path, seconds=seconds))
    computing, _, heading, _, *lines = capsys.readouterr().out.splitlines()
    assert "200.00 ms" in computing and heading.count(" | ") == 8
    # The fastest first.
    assert [line.split(" | ")[0] for line in lines] == [
        "| DiLoCo, H = 30",
        "| QSGD, 4 bits",
        "| dense",
    ]
    cells = [line.strip("| ").split(" | ")[2:] for line in lines]
    # 6000 / 30; 0.4 / 30 + 0.02 * 29 / 30.
    assert cells[0][:4] == [
        "200",
        "30.0 x",
        "-",
        "32.67 ms",
    ]
    assert cells[1][:4] == ["1,500", "4.0 x", "-", "75.00 ms"] and cells[1][5] == "15.00 ms"
    ring = 6 * 50e-6 + 6000 * 8 / 1e8  # as many rounds, and all bytes over 100 Mbit/s
    assert cells[2] == [
        "6,000",
        "1.0 x",
        "4.00 ms",
        "150.00 ms",
        f"{1e3 * ring:.2f} ms",
        "30.00 ms",
        f"{1e3 * (6 * 50e-6 + 6000 * 8 / 1e9):.2f} ms",
    ]
    with pytest.raises(
        typer.BadParameter, match=r"must have the exchange of dense at 100mbit.*got none"
    ):
        steps.main(
            written(tmp_path, seconds={"exchange 100mbit qsgd": seconds["exchange 100mbit qsgd"]})
        )


def test_a_part_that_takes_too_long_is_ended_and_not_noted(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        measure.main("dense", "none", 2, 2, 0.001, tmp_path / "m.json")
    assert stop.value.code == 1 and not (tmp_path / "m.json").exists()
    assert "local dense: it was not done after 0 s (--minutes)" in capsys.readouterr().err


def test_other_settings_and_unknown_names_are_refused(tmp_path):
    (tmp_path / "m.json").write_text(json.dumps({"benchmark": "peers", "steps": 7, "seconds": {}}))
    with pytest.raises(
        typer.BadParameter,
        match=r"must be of the same settings, got .*m.json of others: .*"
        r"steps was 7 and is 2",
    ):
        measure.main("dense", "none", 2, 2, 1, tmp_path / "m.json")
    for methods, rates, error in (
        ("sgd", "none", "--methods must be of .*'sgd'"),
        ("dense", "2gbit", "--rates must be of .*'2gbit'"),
    ):
        with pytest.raises(typer.BadParameter, match=error):
            measure.main(methods, rates, 2, 2, 1, tmp_path / "other.json")


# -- the runs of the table ---------------------------------------------------------------------------------------------


def made(tmp_path, *words):
    """``all.py``; its children end with it."""
    command = [
        sys.executable,
        everything.__file__,
        "--results",
        str(tmp_path / "results"),
        "--work",
        str(tmp_path / "work"),
        *words,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_run_that_is_missing_is_made_once(tmp_path):
    words = ("--data", "digits", "--methods", "dense", "--seeds", "0", "--epochs", "1")
    file, seen = tmp_path / "results" / "dense-0.json", []
    for _ in range(2):
        done = made(tmp_path, *words)
        assert done.returncode == 0, (
            done.stderr + (tmp_path / "work" / "dense-0" / "log").read_text()
        )
        seen.append(file.stat().st_mtime_ns)
    assert seen[0] == seen[1] and not (tmp_path / "work" / "dense-0").exists()
    settings = json.loads(file.read_text())["settings"]
    assert settings["bf16"] is False and settings["epochs"] == 1 and settings["workers"] == 4
    done = made(tmp_path, *words, "--bf16")
    assert done.returncode == 1 and "its bf16 is False, asked is True (move it away" in done.stderr


def test_all_methods_of_a_seed_come_first_and_failures_are_told(tmp_path):
    done = made(tmp_path, "--data", str(tmp_path), "--methods", "dense,qsgd", "--seeds", "0,1")
    assert done.returncode == 1 and "4 failed: dense-0, qsgd-0, dense-1, qsgd-1" in done.stderr
    assert all(
        "must be a folder with all of" in log.read_text()
        for log in (tmp_path / "work").rglob("log")
    )


def test_what_another_command_is_at_is_left_to_it(tmp_path, capsys):
    (tmp_path / "work" / "dense-0").mkdir(parents=True)
    with (tmp_path / "work" / "dense-0" / "log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(SystemExit) as stop:
            everything.main(
                "digits", "dense", "0", 1, False, tmp_path / "results", tmp_path / "work"
            )
    assert stop.value.code == 0 and "dense-0: another command is at it" in capsys.readouterr().out


def test_every_method_is_asked_for():
    assert sorted(everything.ORDER) == sorted(peers.METHODS)
    with pytest.raises(typer.BadParameter, match=r"--methods must be of .*'sgd'"):
        everything.main("digits", "sgd")
    with pytest.raises(
        typer.BadParameter, match="--seeds must be whole numbers with commas, got 'a'"
    ):
        everything.main("digits", "dense", "a")
