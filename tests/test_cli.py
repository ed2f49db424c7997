import json
import re
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

import dgc
from dgc import cli, doctor, plan
from dgc.plan import commands
from dgc.plan.cost import Cluster, Link

PLAN = ["plan", "resnet50", "--compute", "0.1"]


def invoke(*arguments, status=0):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return result.stdout


# To import torch takes longer than a command, so each is forked from a process that has done so.
FORKS = """
import gc
import json
import os
import runpy
import sys
import torch

gc.freeze()  # else each of them goes through all that torch has as it ends
for line in sys.stdin:
    code, *sys.argv, output, told = json.loads(line)
    child = os.fork()
    if child == 0:
        for target, file in ((0, os.devnull), (1, output), (2, told)):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), target)
        if code:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module("dgc", run_name="__main__", alter_sys=True)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def forks():
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def command(forks, tmp_path):
    """The command in a process of its own: (status, stdout, stderr)."""

    def call(*arguments, code=None):
        files = [tmp_path / "output", tmp_path / "told"]
        for file in files:
            file.unlink(missing_ok=True)
        request = [code, "-c" if code else "dgc", *arguments, *map(str, files)]
        forks.stdin.write(json.dumps(request) + "\n")
        forks.stdin.flush()
        return int(forks.stdout.readline()), *(file.read_text() for file in files)

    return call


MAIN = (
    "dense float32",
    "dense float16",
    "PowerSGD, rank 4",
    "DGC all-gather",
    "DGC reduce",
    "local steps, H=7",
)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--all"],
        ["--scaling"],
        ["--optimizer", "adamw", "--steps", 20_000, "--network", "1.5gbit,15us"],
    ],
)
def test_plan_says_the_verdict_first_then_the_line_then_a_table(columns, options, monkeypatch):
    """Every figure and every name is whole."""
    monkeypatch.setattr(commands, "console", lambda: Console(width=columns, markup=False))
    shown = invoke(*PLAN, "--nodes", 8, "--gpus", 4, "--worker", "gpu", *options)
    lines = shown.splitlines()
    assert lines[0].startswith("DGC pays: a step takes ") and max(map(len, lines)) <= columns
    whole = " ".join(shown.split())
    assert "For " in whole and "dgc.Config(sparsity=" in whole
    order = [
        whole.index(what)
        for what in ("dgc.Config", "Saves", "Memory", "Assumes", "Accuracy", "Untried")
    ]
    order += [whole.index(what, order[-1]) for what in MAIN]
    assert order == sorted(order)
    assert ("DGC hierarchical reduce" in whole) == ("--all" in options)
    assert ("65,536" in whole) == ("--scaling" in options)
    assert (
        not re.search(r"\d\n *(ms|s|hours|%|MB|GB|Gbit/s|steps)\b", shown)
        and "\N{HORIZONTAL ELLIPSIS}" not in shown
    )


def test_plan_as_json():
    told = json.loads(
        invoke(
            *PLAN,
            "--json",
            "--nodes",
            4,
            "--network",
            "100mbit,80us",
            "--sparsity",
            0.99,
            "--scaling",
        )
    )
    link, shapes = Link(80e-6, 12.5e6), plan.load("resnet50").shapes
    on, local = Cluster(4, 1, link, plan.INSIDE["pcie"]), plan.LOCAL["gpu"]
    expected = plan.advise(shapes, on, 0.1, dgc.Config(0.99), local)
    whole = json.loads(json.dumps(asdict(expected), default=str))
    assert told["advice"] == {key: value for key, value in whole.items() if key != "config"}
    assert told["advice"]["pays"] and told["advice"]["dgc"]["method"] == {
        "name": "allgather",
        "kind": "dgc",
    }
    here = {json.dumps(p["method"]): p for p in told["advice"]["here"]}
    assert all(p == here[json.dumps(p["method"])] for p in told["scaling"]["4"])


def test_gpus_compress_faster():
    slow, fast = (
        json.loads(invoke(*PLAN, "--json", "--worker", worker))["advice"]["dgc"]["step_seconds"]
        for worker in ("cpu", "gpu")
    )
    assert fast < slow


def test_what_was_timed_on_a_gpu_compresses_there(monkeypatch, tmp_path):
    """And on a GPU where nothing was timed."""
    monkeypatch.setattr(commands, "timed", lambda loaded: 0.1)
    measured, cpu = ["plan", "resnet50", "--json", "--measure"], ("--worker", "cpu")
    gpu = invoke(*PLAN, "--json", "--worker", "gpu")
    assert invoke(*measured) == invoke(*PLAN, "--json", *cpu) != gpu == invoke(*PLAN, "--json")
    monkeypatch.setattr(plan.models.torch.cuda, "is_available", lambda: True)
    assert invoke(*measured) == gpu
    assert invoke(*measured, *cpu) == invoke(*PLAN, "--json", *cpu)


def test_plan_measures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measured.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(40, 30), (torch.zeros(2, 40),)\n"
    )
    told = json.loads(invoke("plan", "measured:build", "--measure", "--json"))
    assert told["parameters"] == 1230 and 0 < told["advice"]["compute"] < 10


def test_json_is_json_whatever_the_users_code_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talks.py").write_text(
        "import torch\nprint('loading')\nclass Talks(torch.nn.Linear):\n    def forward(self, x):\n"
        "        print('forward')\n        return super().forward(x)\n"
        "def build():\n    print('building')\n    return Talks(40, 30), (torch.zeros(2, 40),)\n"
    )
    result = CliRunner().invoke(cli.app, ["plan", "talks:build", "--measure", "--json"])
    assert json.loads(result.stdout)["parameters"] == 1230
    assert all(word in result.stderr for word in ("loading", "building", "forward"))
    told = json.loads(invoke("schedule", "0.9", "--model", "talks:build", "--epochs", 1, "--json"))
    assert told["dense_bytes"] == 2 * 3 / 4 * 4 * 1230


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("10gbit", plan.NETWORKS["10gbit"]),
        ("40gbit,15us", Link(15e-6, 5e9)),
        ("2.5gbit,0us", Link(0, 0.3125e9)),
        ("100mbit,1us", Link(1e-6, 12.5e6)),
        ("2.5Gbit", Link(50e-6, 0.3125e9)),
        ("1 gbps, 0.2 ms", Link(2e-4, 0.125e9)),
        ("3GBIT", Link(50e-6, 0.375e9)),
        ("3Gbps", Link(50e-6, 0.375e9)),
        ("Infiniband", plan.NETWORKS["infiniband"]),
    ],
)
def test_networks(text, link):
    read = commands.link(text, plan.NETWORKS)
    assert read.latency == pytest.approx(link.latency) and read.bandwidth == pytest.approx(
        link.bandwidth
    )


@pytest.mark.parametrize(
    "text",
    [
        "0gbit,1us",
        "1..2gbit,1us",
        "fast",
        "",
        "-1gbit,1us",
        "1000",
        "40gbit,15",
        "1gbit,",
        "1gbit,-1us",
        "300GBps",
        "100MBps",
        "1.5 GB/s,2us",
        "25GB",
        "10GBPS",
    ],
)  # bytes a second among them
def test_networks_that_are_refused(text):
    with pytest.raises(
        ValueError,
        match=rf"a link must be 1gbit, .* in bits a second .* got {re.escape(repr(text))}",
    ):
        commands.link(text, plan.NETWORKS)


def test_schedule_is_the_functions():
    told = json.loads(
        invoke(
            "schedule",
            "warmup:epochs=2,end=0.99",
            "--steps-per-epoch",
            3,
            "--epochs",
            4,
            "--json",
            "--model",
            "resnet50",
        )
    )
    expected = dgc.warmup(2, steps_per_epoch=3, end=0.99)
    assert [row["sparsity"] for row in told["steps"]] == [expected(step) for step in range(12)]
    total = 0.0
    for step, row in enumerate(told["steps"]):
        total += row["bytes"]
        assert row["total_bytes"] == pytest.approx(total)
        assert row["of_dense"] == pytest.approx(total / ((step + 1) * told["dense_bytes"]))
    assert told["dense_bytes"] == 2 * 3 / 4 * 4 * 25_557_032


def test_a_dense_schedule_sends_what_dense_training_sends():
    told = json.loads(
        invoke("schedule", "dense_until:2", "--steps-per-epoch", 4, "--epochs", 1, "--json")
    )
    sent = [row["bytes"] for row in told["steps"]]
    assert sent[:2] == [told["dense_bytes"]] * 2 and sent[2] == sent[3] < 0.01 * sent[0]


def test_schedule_shows_also_what_changes_late():
    for text in ("dense_until:5000,then=0.99", "piecewise:0=0.75,5000=0.99"):
        assert "5,000" in invoke("schedule", text, "--model", "resnet50")


def test_schedule_prints_where_it_changes():
    shown = invoke("schedule", "warmup", "--steps-per-epoch", 391)
    for text in ("75 %", "93.75 %", "98.4375 %", "99.6094 %", "99.9 %", "391", "1,564"):
        assert text in shown
    assert len(invoke("schedule", "warmup:per_step=true").splitlines()) < 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["plan", "resnet51", "--compute", "1"],
            "dgc plan: Invalid value: MODEL: model must be resnet50",
        ),
        (
            ["plan", "resnet50"],
            "dgc plan: Invalid value: one of --compute SECONDS and --measure must be given, got neither",
        ),
        (
            ["plan", "resnet50", "--measure"],
            "dgc plan: Invalid value: --measure: model must be a module:callable that returns",
        ),
        (
            ["schedule", "0.999", "--epochs", "1000000"],
            "dgc schedule: Invalid value: --epochs times --steps-per-epoch must be at most 5,000,000, got 100,000,000",
        ),
        (
            ["schedule", "warmup:epochs=1e308"],
            "warmup: epochs, or stages, must be at most 10,000, got",
        ),
        (["doctor", "--limit", "inf"], "dgc doctor: Invalid value for '--limit'"),
        (
            ["plan", "resnet50", "--compute", "-1"],
            "dgc plan: Invalid value: --compute: compute must be a number of seconds > 0, got -1.0",
        ),
        (
            ["plan", "resnet50", "--compute", "1", "--network", "fast"],
            "dgc plan: Invalid value: --network: a link must be 1gbit",
        ),
        (
            ["schedule", "0.999", "--steps-per-epoch", "1281167"],
            "--epochs times --steps-per-epoch must be at most 5,000,000, got 12,811,670 (give a smaller --epochs)",
        ),
        (
            ["schedule", "99.9"],
            "sparsity must be a number in [0, 1), 0 meaning dense, got 99.9 (99.9 % is",
        ),
        (
            ["plan", "resnet50", "--compute", "1", "--sparsity", "1"],
            "--sparsity: Config: sparsity must be",
        ),
        (
            ["schedule", "warmup:epoch=4"],
            "got 'warmup:epoch=4' (warmup() got an unexpected keyword argument 'epoch')",
        ),
        (
            ["schedule", "dense_until:10000000"],
            "must be at most 5,000,000, got 12,500,000 (give a smaller --epochs)",
        ),
        (
            ["schedule", "adaptive"],
            "schedule: Invalid value: EXPR: the schedule must be known beforehand, got 'adaptive', "
            "which goes by the network's speed (show one of its bounds, 0.99 and 0.9999)",
        ),
        (["schedule"], "dgc schedule: Missing argument"),
        (["fly"], "dgc: No such command 'fly'"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dgc", *arguments])
    assert cli.run() == 2
    output, told = capsys.readouterr()
    assert message in told and told.count("\n") == 1 and not output


THEIRS = """import torch
class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x[:, 1:])
def broken():
    raise RuntimeError('no\\nmodel today')
def lacking():
    import no_such_package
def number():
    return int('abc')
def ends():
    raise SystemExit(3)
def model():
    return Model(40, 30), (torch.zeros(2, 40),)
"""


SHAPES = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x39 and 40x30) (theirs.py, line 4, in forward)"


def test_failures_of_the_users_code_are_one_line_that_says_where_and_status_1(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "theirs.py").write_text(THEIRS)
    (tmp_path / "early.py").write_text("import torch\nbuild = torch.nn.no_such_thing\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for line, expected in (
        (
            "plan theirs:broken --compute 1",
            "RuntimeError: no model today (theirs.py, line 6, in broken)",
        ),
        (
            "plan theirs:number --compute 1",
            "ValueError: invalid literal for int() with base 10: 'abc' (theirs.py, line 10, in number)",
        ),
        (
            "schedule 0.9 --model theirs:lacking",
            "ModuleNotFoundError: No module named 'no_such_package' (theirs.py, line 8, in lacking)",
        ),
        (
            "plan early:build --compute 1",
            "AttributeError: module 'torch.nn' has no attribute 'no_such_thing' (early.py, line 2, in <module>)",
        ),
        ("plan theirs:ends --compute 1", "SystemExit: 3 (theirs.py, line 12, in ends)"),
        ("plan theirs:model --measure", SHAPES),
    ):
        monkeypatch.setattr(sys, "argv", ["dgc", *line.split()])
        assert (cli.run(), *capsys.readouterr()) == (1, "", f"dgc: {expected}\n")
        sys.modules.pop("theirs", None)


@pytest.mark.parametrize(
    "line", [["plan", "late:build", "--measure"], ["schedule", "0.9", "--model", "late:build"]]
)
def test_the_users_code_imports_from_the_current_folder_when_it_is_called(command, line, tmp_path):
    (tmp_path / "late.py").write_text(
        "def build():\n    from later import make\n    return make()\n"
    )
    (tmp_path / "later.py").write_text(
        "import torch\nclass Late(torch.nn.Linear):\n    def forward(self, x):\n        import latest\n"
        "        return super().forward(x)\ndef make():\n    return Late(40, 30), (torch.zeros(2, 40),)\n"
    )
    (tmp_path / "latest.py").touch()
    code = (
        "import os, sys; sys.path[:] = [p for p in sys.path if p]; "  # as the script dgc has it
        f"os.chdir({str(tmp_path)!r}); from dgc.__main__ import main; main()"
    )
    status, output, told = command(*line, code=code)
    assert (status, told) == (0, "") and "late:build" in output


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_without_the_bars_is_no_failure(command, encoding):
    code = "import sys; sys.stdout.reconfigure(encoding=sys.argv.pop()); from dgc.__main__ import main; main()"
    status, output, told = command("schedule", "0.999", encoding, code=code)
    assert (
        (status, told) == (0, "")
        and re.search(r" x .*% +\?", output)
        and "of dense float32." in output
    )


def test_a_closed_output_is_no_failure(command):
    code = "import sys; sys.stdout = sys.stderr = None; from dgc.__main__ import main; main()"
    assert command("schedule", "0.999", code=code) == (0, "", "")
    assert command("schedule", "1.999", code=code) == (2, "", "")


def test_the_command_in_a_process(command):
    status, output, told = command("plan", "gpt2", "--compute", "0.3", "--json")
    assert status == 0 and not told and json.loads(output)["parameters"] == 124_439_808


def test_without_the_extra_it_says_how_to_get_it(command):
    status, output, told = command(
        "plan",
        code="""
import sys
from dgc.__main__ import main
for name in ("rich", "typer"):
    for module in [m for m in sys.modules if m in ("dgc.cli", "dgc.terminal", "dgc.plan.commands")]:
        del sys.modules[module]
    sys.modules[name] = None
    try:
        main()
    except SystemExit as end:
        assert end.code == 1
""",
    )
    assert status == 0 and not output
    assert told == (
        "dgc: the command line needs rich: pip install rich\n"
        "dgc: the command line needs typer: pip install typer\n"
    )


def test_help_teaches_by_example(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dgc"])
    assert cli.run() == 0 and "doctor" in capsys.readouterr().out
    shown = invoke("plan", "--help")
    assert "dgc plan resnet50 --nodes 4" in shown and "dgc schedule 0.999" in invoke(
        "schedule", "--help"
    )


# -- doctor ------------------------------------------------------------------------------------------------------------

FOUND = {
    "dgc": "0",
    "python": "3",
    "torch": {"version": "2", "cuda": None, "devices": [], "backends": ["gloo"]},
    "horovod": None,
    **dict.fromkeys(doctor.PACKAGES),
    "kernels": {"cpu": "plain torch"},
    "self_test": {
        "torch.distributed": {"seconds": 1.0},
        "horovod": {"skipped": "Horovod is not there"},
    },
    "advice": ["pip install optuna: dgc tune needs it"],
}


def test_doctor_says_what_works(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda limit: {**FOUND, "problems": []})
    shown = invoke("doctor")
    assert "All that is installed works." in shown and "pip install optuna" in shown
    assert json.loads(invoke("doctor", "--json")) == {**FOUND, "problems": []}


def test_doctor_fails_where_something_installed_does_not_work(monkeypatch):
    broken = {
        **FOUND,
        "horovod": {"version": "0.28.1", "error": "ImportError: undefined symbol"},
        "numba": {"version": "0"},
        "self_test": {"torch.distributed": {"error": "not done after 1 s"}},
    }
    broken["problems"] = list(doctor._problems(broken))
    assert len(broken["problems"]) == 3
    monkeypatch.setattr(doctor, "examine", lambda limit: broken)
    shown = invoke("doctor", status=1)
    assert "Problem: horovod is installed and does not work: ImportError: undefined symbol" in shown
    assert "numba is installed, but on cpu the plain torch operations run" in " ".join(
        shown.split()
    )
    assert json.loads(invoke("doctor", "--json", status=1))["problems"] == broken["problems"]


def test_doctor_advises_on_horovods_cycle(monkeypatch):
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    found = {**FOUND, "horovod": {"version": "0.28.1"}, "problems": []}
    found["advice"] = list(doctor._advice(found))
    monkeypatch.setattr(doctor, "examine", lambda limit: found)
    assert "Advice: set HOROVOD_CYCLE_TIME" in invoke("doctor")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    assert not any("CYCLE" in advice for advice in [*doctor._advice(found), *doctor._advice(FOUND)])


def test_what_looks_like_markup_is_shown_as_it_is(monkeypatch):
    error = "[rank1]: RuntimeError: [/gloo/tcp/pair.cc:547] closed [bold] :smile: by [127.0.0.1]"
    broken = {
        **FOUND,
        "self_test": {"torch.distributed": {"error": error}},
        "problems": [f"two processes: {error}"],
    }
    monkeypatch.setattr(doctor, "examine", lambda limit: broken)
    shown = " ".join(invoke("doctor", status=1).split())
    assert f"Problem: two processes: {error}" in shown and f"error: {error}" in shown
    loaded = plan.load("resnet50")._replace(name="[/model] [red]")
    monkeypatch.setattr(commands, "load", lambda model: loaded)
    assert "0.9: [/model] in" in invoke("schedule", "0.9", "--model", "[/model]")


def test_doctor_knows_this_installation():
    import torch

    assert doctor._torch()["version"] == torch.__version__
    assert "gloo" in doctor._torch()["backends"]
    assert doctor._package("no_such_package") is None


@pytest.mark.timeout(300)
def test_doctor_trains_between_two_processes(tmp_path, monkeypatch):
    """From a folder with a package of the same name, and a temporary one whose name is no URL's."""
    (tmp_path / "dgc").mkdir()
    (tmp_path / "dgc" / "__init__.py").write_text("raise RuntimeError('another dgc')")
    (tmp_path / "a #b").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a #b"))
    works = doctor.self_test("torch", 280)
    assert "error" not in works
    assert works["seconds"] > 0


def test_doctor_tells_what_two_processes_raise(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '[rank1]: RuntimeError: no such network'\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    told = {"error": "status 3: RuntimeError: no such network"}
    assert doctor.self_test("torch", 100) == told


@pytest.mark.long
@pytest.mark.timeout(300)
def test_doctor_tells_what_two_processes_raise_over_a_network_that_is_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert "RuntimeError" in doctor.self_test("torch", 280)["error"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_doctor_trains_over_horovod():
    pytest.importorskip("horovod.torch")
    works = doctor.self_test("horovod", 280)
    assert "error" not in works
    assert works["seconds"] > 0


def test_doctor_knows_why_horovod_crashes_where_the_machine_has_no_name(monkeypatch):
    monkeypatch.setattr(
        doctor, "self_test", lambda kind, limit: {"error": "a process was ended by SIGSEGV"}
    )
    found = {"version": "0.28.1", "built": ["gloo"]}
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert (
        "SIGSEGV; 'no-such-host.invalid', this machine's name, does not"
        in doctor._test_horovod(found, 1)["error"]
    )
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert doctor._test_horovod(found, 1) == {"error": "a process was ended by SIGSEGV"}


def test_doctor_ends_its_processes_in_time():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert doctor.self_test("torch", 0.5) == {"error": "not done after 0.5 s"}
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_doctor_tells_of_gpus_that_cannot_be_used(monkeypatch):
    """As where the driver is older than torch's CUDA."""
    import torch

    def fail(device):
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    found = {**FOUND, "torch": doctor._torch()}
    assert found["torch"]["devices"] == []
    assert [*doctor._problems(found)] == [
        "torch is installed and does not work: RuntimeError: The NVIDIA driver on your system is too old"
    ]
