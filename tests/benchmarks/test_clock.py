"""Time to accuracy: training stops at the target, curves are against the clock, and hosts with shaped links train."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import cifar10
import hosts
import typer
from hosts_there import skip_without_hosts
from peers import clock, hidden, train

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def result(method, accuracies, seconds=10.0, **more):
    return {
        "task": "cifar10",
        "method": method,
        "title": method,
        "rate": "100mbit",
        "target": 50,
        "steps_per_epoch": 5,
        "launcher": "torch.distributed",
        "bytes_sent": 2e6,
        **more,
        "history": [{"accuracy": x, "seconds": seconds} for x in accuracies],
    }


@pytest.fixture
def improving(monkeypatch):
    """A net that trains in no time, with an accuracy of 20 % more after each epoch."""
    images, labels = torch.zeros(48, 3, 32, 32, dtype=torch.uint8), torch.arange(48) % 10
    monkeypatch.setattr(
        cifar10, "loaded", lambda *_: ("digits", (images, labels), (images, labels))
    )
    monkeypatch.setattr(
        cifar10,
        "resnet",
        lambda depth: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10)),
    )
    monkeypatch.setattr(
        cifar10, "accuracy", lambda *_: seen.append(20 * (len(seen) + 1)) or seen[-1]
    )
    seen = []
    return seen


def trained(folder, **options):
    train.main(
        **{
            "method": "dense",
            "data": "digits",
            "cache": None,
            "depth": 20,
            "epochs": 5,
            "batch_size": 8,
            "lr": None,
            "target": None,
            "weight_decay": 0.0,
            "bf16": False,
            "virtual_workers": 2,
            "seed": 0,
            "threads": 1,
            "checkpoints": folder / "epochs",
            "resume": True,
            "out": folder / "result.json",
            **options,
        }
    )
    return json.loads((folder / "result.json").read_text())["history"]


def test_training_stops_with_the_epoch_that_reaches_the_target(improving, tmp_path):
    history = trained(tmp_path, target=55.0)
    assert [epoch["accuracy"] for epoch in history] == [20, 40, 60]
    assert all(epoch["seconds"] > 0 for epoch in history)
    assert trained(tmp_path, target=60.0) == history  # it is there already
    longer = trained(tmp_path, target=75.0)  # another target is no other training
    assert longer[:3] == history and [epoch["accuracy"] for epoch in longer[3:]] == [80]


def test_without_a_target_no_time_is_noted(improving, tmp_path):
    history = trained(tmp_path)
    assert len(history) == 5 and not any("seconds" in epoch for epoch in history)


def test_the_clock_runs_from_epoch_to_epoch_until_the_target():
    one = result("dense", [30, 50, 49, 61])
    assert clock.curve(one) == ([10, 20, 30, 40], [30, 50, 49, 61])
    assert (
        clock.reached(one, 50) == 20
        and clock.reached(one, 51) == 40
        and clock.reached(one, 62) is None
    )


def test_the_table_and_the_figure(tmp_path):
    """By rate, and the first at the target first."""
    results = [
        result("async", [30, 40], 2.5),
        result("dense", [30, 50]),
        result("fp16", [51], rate="1gbit"),
        result("dgc-allgather", [50], 12, launcher="horovod"),
    ]
    assert clock.markdown(results).splitlines()[2:] == [
        "| dgc-allgather | 100 Mbit/s | 12 | 1 | 50.00 % | 2.400 | 2.0 MB |",
        "| dense | 100 Mbit/s | 20 | 2 | 50.00 % | 2.000 | 2.0 MB |",
        "| async | 100 Mbit/s | not reached | 2 | 40.00 % | 0.500 | 2.0 MB |",
        "| fp16 | 1 Gbit/s | 10 | 1 | 51.00 % | 2.000 | 2.0 MB |",
    ]
    clock.draw(results, tmp_path / "clock.png")
    assert (tmp_path / "clock.png").read_bytes().startswith(b"\x89PNG")


def test_links_are_deep_where_half_a_dense_exchange_or_more_is_sent():
    """By the bytes that were counted when the steps were timed."""
    seconds = json.loads((ROOT / "benchmarks" / "results" / "peers-measured.json").read_text())[
        "seconds"
    ]
    sent = {
        name.split()[-1]: part["bytes"]
        for name, part in seconds.items()
        if name.startswith("exchange 1gbit ")
    }
    deep = {name for name in sent if clock.depth_of(name) == "deep"}
    assert len(sent) >= 21 and deep == {name for name in sent if sent[name] >= sent["dense"] / 2}


def test_it_needs_root_and_known_names(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as stop:
        clock.main(results=tmp_path)
    assert stop.value.code == 2 and "needs Linux and root" in capsys.readouterr().err
    monkeypatch.setattr(clock, "check_tools", lambda: None)
    for option, wrong in (("methods", "dense,sgd"), ("rates", "5gbit")):
        with pytest.raises(
            typer.BadParameter, match=rf"--{option} must be of .*, got '{wrong.split(',')[-1]}'"
        ):
            clock.main(**{"methods": "dense", "rates": "1gbit", "results": tmp_path, option: wrong})


@pytest.mark.parametrize(
    ("method", "title", "launcher"),
    [
        ("stale-dgc", "DGC, one step late", "torch.distributed"),
        ("dgc-allgather-horovod", "DGC, allgather, over Horovod", "horovod"),
    ],
)
def test_hosts_with_shaped_links_train_and_a_finished_method_is_left_alone(
    method, title, launcher, tmp_path
):
    """A few steps; where the hosts cannot be made, the script says why with status 2."""
    command = [
        sys.executable,
        clock.__file__,
        "--methods",
        method,
        "--rates",
        "1gbit",
        "--target",
        "0.1",
        "--epochs",
        "1",
        "--batch-size",
        "256",
        "--hosts",
        "2",
        "--minutes",
        "2",
        "--results",
        str(tmp_path / "results"),
        "--work",
        str(tmp_path / "work"),
        "--out",
        str(tmp_path / "clock.png"),
    ]
    file, written = tmp_path / "results" / f"{method}-1gbit-0.json", []
    for _ in range(2):
        # Its watchdog ends what is left.
        done = subprocess.run(command, capture_output=True, text=True, timeout=140)
        skip_without_hosts(done)
        assert done.returncode == 0, done.stderr
        written.append((file.stat().st_mtime_ns, json.loads(file.read_text())))
    assert written[0] == written[1] and not [*(tmp_path / "work").iterdir()]
    found = written[0][1]
    assert found["workers"] == 2 and found["launcher"] == launcher and found["rate"] == "1gbit"
    assert found["history"][0]["seconds"] > 0 and found["bytes_per_step"] > 0
    assert f"| {title} | 1 Gbit/s |" in done.stdout and (tmp_path / "clock.png").exists()


def test_what_training_waits_for_is_told_by_rate():
    waits = {
        f"{rate} {method}": [0.03, 0.01 * i, 0.5]
        for rate in ("100mbit", "1gbit")
        for i, method in enumerate(hidden.PAIRS, 1)
    }
    assert hidden.markdown({"waits": waits}).splitlines() == [
        "| method | waits at 100 Mbit/s | waits at 1 Gbit/s |",
        "|---|---|---|",
        "| dense | 30.0 ms | 30.0 ms |",
        "| dense, one step late | 30.0 ms | 30.0 ms |",
        "| DGC, allgather | 30.0 ms | 30.0 ms |",
        "| DGC, one step late | 40.0 ms | 40.0 ms |",
    ]


def test_late_exchanges_are_timed_on_hosts(tmp_path):
    """Where the hosts cannot be made, the script says why with status 2."""
    command = [
        sys.executable,
        hidden.__file__,
        "--rates",
        "1gbit",
        "--computing",
        "0.01",
        "--steps",
        "2",
        "--repeats",
        "1",
        "--hosts",
        "2",
        "--out",
        str(tmp_path / "hidden.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    skip_without_hosts(done)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "hidden.json").read_text())["waits"]) == 4
