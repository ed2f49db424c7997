"""The matrix of runs: what is in it, that nothing is lost or run twice, and the tables of what came out."""

import dataclasses
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import typer
from launch import end

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

import experiments  # noqa: E402
import report  # noqa: E402
import reproduce  # noqa: E402

import dgc  # noqa: E402

pytestmark = pytest.mark.long

# In place of the recipes: waits, and writes a result with the settings that it was given.
STUB = """
import json, os, sys, time
from pathlib import Path
options, words = {}, sys.argv[1:]
while words:
    key = words.pop(0)[2:].replace("-", "_")
    if words and not words[0].startswith("--"):
        word = words.pop(0)
        options[key] = json.loads(word) if word.replace(".", "").isdigit() else word
    else:
        options[key.removeprefix("no_")] = not key.startswith("no_")
if options["seed"] == float(os.environ.get("STUB_FAILS", -1)):
    print("\\n".join(f"line {i}" for i in range(100)) + "\\rthe last words", flush=True)
    sys.exit(3)
out, name = Path(options.pop("out")), Path(__file__).stem
folder = Path(options.pop("checkpoints"))
folder.mkdir(parents=True, exist_ok=True)
(folder / "epoch001").write_text("")
time.sleep(float(os.environ.get("STUB_SECONDS", 0)))
options.pop("resume"), options.pop("data", None)
epoch = {"epoch": 1, "loss": 1.0, "accuracy": 90.0, "perplexity": 90.0, "step_seconds": 3.6, "bytes_per_step": 10.0}
result = {"recipe": name, "dataset": "digits" if name == "cifar10" else "pydoc topics", "steps_per_epoch": 100,
          "dense_bytes_per_step": 1000.0, "accuracy": 90.0 + options["seed"], "perplexity": 90.0 + options["seed"],
          "workers": 4, "history": [epoch], "settings": options, "machine": {"device": "cpu", "torch": "2"}}
out.parent.mkdir(parents=True, exist_ok=True)
part = out.with_name(out.name + ".part")
part.write_text(json.dumps(result))
part.replace(out)
"""
MAIN = """
import sys
from pathlib import Path
sys.path.insert(0, {recipes!r})
import experiments, reproduce, typer
experiments.HERE = Path({stubs!r})
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(reproduce.main)
app()
"""


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    """The command's own folder, in which runs/quick will be, and the recipes replaced."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "recipes"
    folder.mkdir()
    for name in report.RECIPES:
        (folder / f"{name}.py").write_text(STUB)
    monkeypatch.setattr(experiments, "HERE", folder)
    return folder


def started(folder, *arguments, stubs=None, **environment):
    """The command as a process of its own, with the real recipes or with stubs."""
    code = (
        ["-c", MAIN.format(recipes=str(ROOT / "recipes"), stubs=str(stubs))]
        if stubs
        else [str(ROOT / "recipes" / "reproduce.py")]
    )
    return subprocess.Popen(
        [sys.executable, *code, *arguments],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def ended(process, limit=250):
    try:
        output, _ = process.communicate(timeout=limit)
    finally:
        end(process.pid)
    return process.returncode, output


def wait_for(condition, limit=250):
    until = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def starts(work):
    """Run -> how often it was begun."""
    return {
        log.stem: sum(line.startswith("$ ") for line in log.read_text().splitlines())
        for log in work.glob("*.log")
    }


# -- what to run -------------------------------------------------------------------------------------------------------


def test_the_matrix_is_complete_and_has_no_run_twice():
    tables = experiments.matrix(experiments.BUDGETS["cpu"])
    runs = experiments.chosen(experiments.BUDGETS["cpu"], [])
    names = [run.name for run in runs]
    main, between = ("dense", "naive", "dgc"), ("topk", "momentum", "masking")
    assert names[:9] == [f"cifar10-{row}-{seed}" for seed in range(3) for row in main]
    assert names[9:15] == [f"ptb-{row}-{seed}" for seed in range(2) for row in main]
    assert set(names[15:25]) == {
        f"cifar10-{row}-{seed}" for row in between for seed in range(2)
    } | {f"ptb-{row}-{seed}" for row in ("topk", "clipping") for seed in range(2)}
    assert set(tables["workers"]) == {
        f"cifar10-{row}{n}-0" for row in ("dense", "topk", "dgc") for n in ("", "-32workers")
    }
    assert {
        (run.options["sparsity"], run.options["warmup_epochs"])
        for run in tables["sparsity"].values()
    } == {
        *((sparsity, 2) for sparsity in (0.99, 0.9995, 0.9999)),
        *((0.999, warmup) for warmup in (0, 1, 2, 4, 8)),
    }
    assert {
        (run.options["method"], run.options["seed"]) for run in tables["sparsity"].values()
    } == {("dgc", 0)}
    assert set(tables["warmup"]) == {
        f"cifar10-{row}-{seed}"
        for row, n in (
            ("masking", 2),
            ("dgc-warmup1", 1),
            ("dgc", 3),
            ("dgc-warmup4", 3),
            ("dgc-warmup8", 1),
        )
        for seed in range(n)
    }
    assert [
        (run.name, run.options["epochs"], run.options["warmup_epochs"])
        for run in tables["length"].values()
        if run.options["seed"] == 1
    ] == [("cifar10-dense-epochs164-1", 164, 2.0), ("cifar10-dgc-epochs164-warmup4-1", 164, 4.0)]
    assert {
        tuple(
            run.options.get(key)
            for key in (
                "virtual_workers",
                "exchange",
                "virtual_node",
                "sparsity",
                "factor_masking",
                "seed",
            )
        )
        for run in tables["exchange"].values()
    } == {
        (n, *way, seed)
        for n in (4, 16, 64)
        for seed in (0, 1)
        for way in (
            ("allgather", 1, 0.999, None),
            ("allgather", 2 if n == 4 else 4, 0.999, None),
            ("reduce", 1, 0.999, None),
            ("reduce", 1, 0.996, None),
            ("allgather", 1, 0.99, False),
        )
    }
    assert all(
        run.options["batch_size"] * run.options["virtual_workers"] == 128
        and run.options["hierarchical"] == (run.options["virtual_node"] > 1)
        for run in tables["exchange"].values()
    )

    def kind(run):
        a = run.options
        return (
            a["method"],
            a["epochs"],
            a["seed"],
            *(
                (a["sparsity"], a["warmup_epochs"], a.get("factor_masking", True))
                if a["method"] == "dgc"
                else ()
            ),
        )

    short, long = (
        [run for run in tables["momentum"].values() if run.options["epochs"] == n] for n in (5, 25)
    )
    assert {kind(run)[:-1] for run in short} == {
        ("dense", 5),
        *(
            ("dgc", 5, seed, sparsity, 0.4)
            for sparsity in (0.9, 0.99, 0.999)
            for seed in range(6 if sparsity == 0.999 else 3)
        ),
    }
    assert {kind(run)[:-1] for run in long} == {
        ("dense", 25),
        *(("dgc", 25, seed, 0.999, 2.0) for seed in range(3)),
    }
    assert [sum(run.options["seed"] == seed for run in short + long) for seed in range(6)] == [
        7 + 3
    ] * 3 + [3] * 3
    assert {run.name for run in runs if run.options.get("validate")} == {
        run.name for run in short
    } | {*tables["bytes"]} | {name for name in tables["values"] if "cifar10" in name}
    assert len(names) == 9 + 6 + 10 + 30 + 3 + 3 + 6 + 2 + 8 + 8 + 30 + 4 + 10 + 8
    assert names[25:55] == [run.name for run in short] and names[25:28] == [
        "cifar10-dense-epochs5-validate-0",
        *(f"cifar10-dgc-epochs5-validate-warmup0.4{way}-0" for way in ("", "-nomasking")),
    ]
    assert names[58:61] == [f"cifar10-{row}-32workers-0" for row in ("dense", "topk", "dgc")]
    assert [run.options["seed"] for run in runs[-52:-18]] == [0] * 15 + [1] * 15 + [0, 1] * 2
    assert {*names[-18:-8]} == {
        *(f"cifar10-dgc-epochs5-validate-warmup0.4-bits4-{seed}" for seed in range(6)),
        "cifar10-dgc-epochs5-validate-warmup0.4-sparsity99.77-bits4-0",
        "cifar10-dgc-epochs5-validate-warmup0.4-sparsity99.77-bits4-1",
        "ptb-dgc-bits4-0",
        "ptb-dgc-bits4-1",
    }
    assert names[-8:] == [
        *(f"transformer-local-{way}-dgc-{seed}" for way in ("all", "1-16") for seed in range(3)),
        "transformer-local-all-7-dgc-0",
        "transformer-local-1-16-5-dgc-0",
    ]
    assert (
        names[69:77]
        == list(tables["transformer"])
        == [
            *(f"transformer-{row}-{seed}" for seed in range(3) for row in ("dense", "dgc")),
            "transformer-gradients-0",
            "transformer-gradients-1",
        ]
    )
    assert (
        names[77:85]
        == list(tables["bytes"])
        == [
            "cifar10-many-dense-0",
            *(
                f"cifar10-many-dgc{way}-0"
                for way in (
                    "",
                    "-sparsity99-nomasking",
                    "-sparsity97-nomasking",
                    "-reduce",
                    "-sparsity99-nomasking-reduce",
                    "-sparsity97-nomasking-reduce",
                    "-sparsity90-nomasking-reduce",
                )
            ),
        ]
    )
    assert {
        (run.options["virtual_workers"], run.options["batch_size"], run.options["epochs"])
        for run in tables["bytes"].values()
    } == {(32, 8, 7)}
    for budget in experiments.BUDGETS.values():
        settings = [
            (run.study.recipe, json.dumps(run.options, sort_keys=True))
            for run in experiments.chosen(budget, [])
        ]
        assert len(settings) == len(set(settings))


@pytest.mark.parametrize("budget", experiments.BUDGETS.values(), ids=experiments.BUDGETS)
def test_the_recipes_understand_what_they_are_told(budget):
    """Each command line gives the settings that the matrix holds."""
    parsers = {}
    for name, recipe in report.RECIPES.items():
        app = typer.Typer()
        app.command()(recipe.main)
        parsers[name] = typer.main.get_command(app)
    for run in experiments.chosen(budget, []):
        words = run.command(budget, "folder")
        assert words[0] == sys.executable and words[1] == str(
            ROOT / "recipes" / f"{run.study.recipe}.py"
        )
        given = parsers[run.study.recipe].make_context("recipe", words[2:]).params
        assert {key: given[key] for key in run.options} == run.options and given["resume"]
        assert (
            Path(given["out"]) == budget.results / f"{run.name}.json"
            and str(given["data"]) == "folder"
        )
        changed = {
            key
            for key, option in inspect.signature(
                report.RECIPES[run.study.recipe].main
            ).parameters.items()
            if given[key] != option.default
        }
        assert changed <= {*run.options, "data", "checkpoints", "resume", "out"}


def test_each_row_has_the_parts_that_its_title_says():
    def rows(study):
        return {
            row: report.settings(
                {
                    "recipe": study.recipe,
                    "steps_per_epoch": 390,
                    "settings": experiments.run(study, row, 0).options,
                }
            )
            for row in experiments.ROWS[study.recipe]
        }

    budget = experiments.BUDGETS["cpu"]
    # Of these, the method tells.
    dropping = dgc.Config(0.999, momentum_correction=False, factor_masking=False)
    assert rows(budget.cifar10) == {
        "dense": dgc.Config(0.0),
        "naive": dropping,
        "topk": dropping,
        "momentum": dgc.Config(0.999, factor_masking=False),
        "masking": dgc.Config(0.999),
        "dgc": dgc.Config(dgc.warmup(4, steps_per_epoch=390 // 2)),
    }
    assert rows(budget.ptb) == {
        "dense": dgc.Config(0.0, momentum_correction=False),
        "naive": dropping,
        "topk": dropping,
        "clipping": dgc.Config(0.999, clip_norm=0.25),
        "dgc": dgc.Config(dgc.warmup(4, steps_per_epoch=round(0.2 * 390 / 4)), clip_norm=0.25),
    }
    assert [
        run.options["method"]
        for run in (experiments.run(budget.ptb, row, 0) for row in ("naive", "topk"))
    ] == ["naive", "topk"]
    adam = rows(budget.transformer)
    assert adam["dense"] == dgc.Config(0.0, momentum_correction=False)
    for row, corrected, most in (("gradients", False, 0.99), ("dgc", True, 0.992)):
        assert adam[row].momentum_correction == corrected and adam[row].factor_masking is False
        # A tenth of 3,120 steps, then a fifth.
        assert [adam[row].sparsity_at(step) for step in (0, 311, 312, 312 + 623, 8 * 390)] == [
            0.0,
            0.0,
            0.75,
            pytest.approx(most, rel=1e-3),
            most,
        ]


def test_only_names_tables_and_parts_of_names():
    budget = experiments.BUDGETS["cpu"]
    assert {run.name for run in experiments.chosen(budget, ["workers", "ptb-dense"])} == {
        *experiments.matrix(budget)["workers"],
        "ptb-dense-0",
        "ptb-dense-1",
    }
    # No -16workers.
    assert [run.name for run in experiments.chosen(budget, ["cifar10-dense-1"])] == [
        "cifar10-dense-1"
    ]
    with pytest.raises(
        typer.BadParameter,
        match="ablation, momentum, workers, sparsity, warmup, transformer, bytes, "
        "exchange, length, values, local-steps, or a part",
    ):
        experiments.chosen(budget, ["imagenet"])


# -- what is done ------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path):
    """The budget of CPUs with a folder of its own for results and figures; writes a result into it."""
    budget = dataclasses.replace(
        experiments.BUDGETS["cpu"],
        results=tmp_path / "results",
        figures=tmp_path / "docs",
        work=tmp_path / "work",
    )
    budget.results.mkdir()

    def write(name, like="cifar10-dgc-0", settings=None, **changed):
        result = json.loads((ROOT / "recipes" / "results" / f"{like}.json").read_text())
        kept = {
            key: value
            for key, value in {**result["settings"], **(settings or {})}.items()
            if value != "absent"
        }
        (budget.results / f"{name}.json").write_text(
            json.dumps({**result, **changed, "settings": kept})
        )

    return budget, write


def test_results_from_before_are_taken_up(kept):
    """The two that were there first, also without the settings that recipes had not then; and a dense run whose
    warm-up is another, as it has none.
    """
    budget, write = kept
    write("cifar10-dgc-0", settings={"bf16": "absent", "flush": "absent"})
    write("cifar10-dense-0", "cifar10-dense-0", settings={"warmup_epochs": None})
    done = reproduce.finished(budget)
    assert {name: result["accuracy"] for name, result in done.items()} == {
        "cifar10-dense-0": 88.57,
        "cifar10-dgc-0": 88.43,
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"settings": {"warmup_epochs": None}}, r"its warmup_epochs is None, asked is 2\.0"),
        ({"settings": {"seed": 1}}, "its seed is 1, asked is 0"),
        ({"settings": {"flush": False}}, "its flush is False, asked is True"),
        ({"settings": {"method": "topk"}}, "its method is 'topk', asked is 'dgc'"),
        ({"settings": {"virtual_workers": "absent"}}, "its virtual_workers is 1, asked is 4"),
        ({"settings": {"unheard_of": 3}}, "its unheard_of is 3, asked is None"),
        ({"dataset": "digits"}, "its dataset is 'digits', asked is 'cifar10'"),
    ],
    ids=str,
)
def test_results_of_other_settings_are_refused(kept, changed, message):
    budget, write = kept
    write("cifar10-dgc-0", **changed)
    with pytest.raises(
        SystemExit,
        match=rf"cifar10-dgc-0\.json is of another run than .*: {message}\. Move it away",
    ):
        reproduce.finished(budget)


def test_a_file_that_is_no_result_is_named(kept):
    budget, _ = kept
    for text in ("{", "{}", ""):
        (budget.results / "cifar10-dgc-0.json").write_text(text)
        with pytest.raises(
            SystemExit, match=r"cifar10-dgc-0\.json is not what a recipe's --out writes"
        ):
            reproduce.finished(budget)


def test_the_list_estimates_from_what_is_done(kept):
    """Hours of the runs of a method with as many workers; of the method, where none has as many; of the recipe, where
    there is none of the method; unknown without any.
    """
    budget, write = kept
    history = [{"step_seconds": 3.6, "bytes_per_step": 1.0}] * 2
    write("cifar10-dense-0", "cifar10-dense-0", history=history, steps_per_epoch=1000)  # two hours
    write("cifar10-dgc-0", history=history[:1], steps_per_epoch=2000)
    write("cifar10-dgc-1", history=history, steps_per_epoch=2000, settings={"seed": 1})  # four
    # Nine.
    write(
        "cifar10-dgc-32workers-0",
        history=history,
        steps_per_epoch=4500,
        settings={"virtual_workers": 32},
    )
    done, runs = (
        reproduce.finished(budget),
        {run.name: run for run in experiments.chosen(budget, [])},
    )
    assert [
        reproduce.estimate(runs[name], done, runs)
        for name in (
            "cifar10-dense-1",
            "cifar10-dgc-2",
            "cifar10-dense-32workers-0",
            "cifar10-naive-0",
            "ptb-dgc-0",
        )
    ] == [2.0, 3.0, 2.0, pytest.approx(17 / 4), None]
    listed = [runs[name] for name in ("cifar10-dense-0", "cifar10-dgc-2", "ptb-dgc-1")]
    table = reproduce.listing(budget, listed, done, 2)
    assert table.caption.startswith(
        "1 of 3 done; the others take about 3.0 hours, 1.5 with 2 at a time, and 1 of"
    )
    assert (
        "3.0 hours" in (alone := reproduce.listing(budget, listed[:2], done, 2).caption)
        and "at a time" not in alone
    )


def test_the_list_gives_names_whole(tmp_path):
    """As --only takes them."""
    status, output = ended(started(tmp_path, "--list"), 60)
    assert status == 0 and {
        line.split()[0] for line in output.splitlines() if re.match(r"[a-z0-9]+-", line)
    } == {run.name for run in experiments.chosen(experiments.BUDGETS["cpu"], [])}


# -- running -----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_killed_at_any_moment_nothing_is_lost_and_two_at_once_run_nothing_twice(stubs, tmp_path):
    folder, words = tmp_path / "runs" / "quick", ("--quick", "--only", "cifar10-d", "--jobs", "2")
    names = {run.name for run in experiments.chosen(experiments.BUDGETS["quick"], ["cifar10-d"])}

    def results():
        return {file.stem: file.stat().st_mtime_ns for file in (folder / "results").glob("*.json")}

    first = started(tmp_path, *words, stubs=stubs, STUB_SECONDS="1.5")
    try:
        wait_for(
            lambda: (
                len(results()) >= 2
                and len(starts(folder)) == len(results()) + 2
                and len(psutil.Process(first.pid).children()) == 2
            )
        )
        children = psutil.Process(first.pid).children()
    finally:
        first.send_signal(signal.SIGKILL)
    ended(first)
    psutil.wait_procs(children, timeout=10)
    before, begun = results(), starts(folder)
    assert len(children) == 2 and len(begun) > len(before)
    time.sleep(2.5)  # in which a child that lived on would be done
    assert results() == before and before.keys() < names

    for status, output in map(
        ended, [started(tmp_path, *words, stubs=stubs, STUB_SECONDS="0.3") for _ in range(2)]
    ):
        assert status == 0, output
    assert results().keys() == names and {name: results()[name] for name in before} == before
    assert starts(folder) == {
        name: 1 if name in before else 1 + begun.get(name, 0) for name in names
    }
    for file in (folder / "results").iterdir():
        assert file.name == "cifar10.md" or json.loads(file.read_text())["accuracy"]
    # Checkpoints.
    assert not [path for path in folder.iterdir() if path.is_dir() and path.name != "results"]


@pytest.mark.timeout(600)
def test_a_run_that_was_cut_off_goes_on(tmp_path):
    """With the real recipe: killed between two epochs, together with it."""
    folder, words = tmp_path / "runs" / "quick", ("--quick", "--only", "cifar10-dgc-0")
    first = started(tmp_path, *words)
    try:
        wait_for((folder / "cifar10-dgc-0" / "epoch001" / "manifest.json").exists)
    finally:
        first.send_signal(signal.SIGKILL)
    ended(first)
    status, output = ended(started(tmp_path, *words))
    assert status == 0 and "cifar10-dgc-0 is done: " in output, output
    log = (folder / "cifar10-dgc-0.log").read_text()
    assert starts(folder) == {"cifar10-dgc-0": 2}
    first, second = log.split("\n$ ")[1:]
    assert " 0/10 " in first and " 0/10 " not in second and " 5/10 " in second  # 10 steps in all
    result = json.loads((folder / "results" / "cifar10-dgc-0.json").read_text())
    assert [epoch["epoch"] for epoch in result["history"]] == [1, 2] and result["workers"] == 4
    assert not (folder / "cifar10-dgc-0").exists()
    assert "1 of 2" in (folder / "results" / "cifar10.md").read_text()


def test_a_job_that_fails_is_told_and_the_others_go_on(stubs, monkeypatch, capsys):
    monkeypatch.setenv("STUB_FAILS", "0")
    runs = [f"ptb-{row}-{seed}" for row in ("dense", "dgc") for seed in (0, 1)]
    with pytest.raises(typer.Exit) as status:
        reproduce.main(quick=True, only=runs, jobs=1)
    said = capsys.readouterr().out
    assert status.value.exit_code == 1 and said.endswith("2 failed: ptb-dense-0, ptb-dgc-0\n")
    assert (
        "ptb-dense-0 failed with status 3. The end of runs/quick/ptb-dense-0.log:\n    line 81\n"
        in said
    )
    assert "    line 99\n    the last words\n" in said and "line 80" not in said
    assert {file.stem for file in Path("runs/quick/results").glob("*.json")} == {
        "ptb-dense-1",
        "ptb-dgc-1",
    }
    monkeypatch.delenv("STUB_FAILS")
    reproduce.main(quick=True, only=runs, jobs=1)  # and is run again
    assert len(list(Path("runs/quick/results").glob("*.json"))) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quick": True, "gpu": True}, "--quick must be without --data, --ptb and --gpu"),
        ({"quick": True, "text": Path("x")}, "--quick must be without --data, --ptb and --gpu"),
        ({"only": ["ptb-dense-1"]}, "Penn Treebank is needed: --ptb DIR takes a folder"),
        (
            {"only": ["cifar10-dense-2"], "data": Path("digits")},
            "CIFAR-10 is needed: --data DIR takes a folder",
        ),
        (
            {"only": ["ptb-dense-1"], "text": Path("/nowhere")},
            r"/nowhere must be a folder with .*, got one without ptb\.train\.txt",
        ),
    ],
    ids=str,
)
def test_refuses(options, message, kept, monkeypatch):
    monkeypatch.setitem(experiments.BUDGETS, "cpu", kept[0])
    with pytest.raises((typer.BadParameter, SystemExit), match=message):
        reproduce.main(**options)


# -- what came out -----------------------------------------------------------------------------------------------------


def test_differences_are_paired_and_their_interval_is_students():
    from scipy import stats

    # Two have no partner.
    dense, ours = (
        {0: 88.0, 1: 88.4, 2: 88.9, 3: 1.0},
        {2: 88.1, 0: 88.2, 1: 87.9, 5: 2.0},
    )
    mean, half = report.difference(ours, dense)
    interval = stats.ttest_rel(
        [ours[i] for i in range(3)], [dense[i] for i in range(3)]
    ).confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx((interval.low, interval.high))
    mean, half = report.difference({0: 1.0}, {0: 3.0, 1: 3.0})
    assert mean == -2.0 and math.isnan(half)
    assert all(map(math.isnan, report.difference({0: 1.0}, {1: 1.0})))


def test_tables_and_figures_come_from_the_results_alone(kept, monkeypatch, capsys):
    """By hand: seeds of DGC differ from dense training's by 0.3 and 0.1, 0.2 with an interval of 12.706 times 0.1; with
    a warm-up of 4 by 0.2 and -0.4. At 90 % Student's t of two is 6.314: times 0.1, and 0.3 where reduce differs by
    -0.5 and 0.1.
    """
    budget, write = kept
    history = [
        {
            "epoch": i + 1,
            "loss": 1.0,
            "accuracy": 80.0,
            "step_seconds": 1.0,
            "bytes_per_step": nbytes,
        }
        for i, nbytes in enumerate((100.0, 50.0))
    ]
    rest = {"history": history, "dense_bytes_per_step": 1000.0}
    for seed, accuracy in enumerate((88.0, 88.4, 88.6)):
        write(f"cifar10-dense-{seed}", "cifar10-dense-0", {"seed": seed}, accuracy=accuracy, **rest)
    for seed, accuracy in enumerate((88.3, 88.5)):
        write(f"cifar10-dgc-{seed}", settings={"seed": seed}, accuracy=accuracy, **rest)
    short = {"epochs": 5, "validate": True}
    write(
        "cifar10-dense-epochs5-validate-1",
        "cifar10-dense-0",
        {"seed": 1, **short},
        accuracy=75.0,
        **rest,
    )
    for seed, accuracy in ((0, 70.0), (1, 74.5)):
        write(
            f"cifar10-dgc-epochs5-validate-warmup0.4-sparsity99-{seed}",
            settings={"seed": seed, **short, "warmup_epochs": 0.4, "sparsity": 0.99},
            accuracy=accuracy,
            **rest,
        )
    write("cifar10-dgc-nomasking-0", settings={"factor_masking": False}, accuracy=87.0, **rest)
    write("cifar10-dgc-sparsity95-0", settings={"sparsity": 0.95}, accuracy=88.0, **rest)
    write("cifar10-topk-0", settings={"method": "topk"}, accuracy=87.0, **rest)
    write(
        "cifar10-topk-32workers-0",
        settings={"method": "topk", "virtual_workers": 32},
        accuracy=86.5,
        **rest,
    )
    write("cifar10-dgc-sparsity99.99-0", settings={"sparsity": 0.9999}, accuracy=85.5, **rest)
    for seed, accuracy in enumerate((88.2, 88.0)):
        write(
            f"cifar10-dgc-warmup4-{seed}",
            settings={"warmup_epochs": 4, "seed": seed},
            accuracy=accuracy,
            **rest,
        )
    same = {"epochs": 10, "warmup_epochs": 1.0, "virtual_workers": 16, "batch_size": 8}
    for seed, (gathered, reduced) in enumerate(((80.0, 79.5), (81.0, 81.1))):
        name, mine = "cifar10-exchange-dgc-16workers-batch8-", {**same, "seed": seed}
        write(f"{name}{seed}", settings=mine, accuracy=gathered, **rest)
        write(
            f"{name}reduce-{seed}",
            settings={**mine, "exchange": "reduce"},
            accuracy=reduced,
            **rest,
        )
    many = {
        "epochs": 7,
        "warmup_epochs": 0.5,
        "virtual_workers": 32,
        "batch_size": 8,
        "validate": True,
        "seed": 0,
    }
    write("cifar10-many-dense-0", "cifar10-dense-0", many, accuracy=70.0, **rest)
    thinner = {**many, "sparsity": 0.97, "factor_masking": False, "exchange": "reduce"}
    write(
        "cifar10-many-dgc-sparsity97-nomasking-reduce-0", settings=thinner, accuracy=69.25, **rest
    )
    monkeypatch.setitem(experiments.BUDGETS, "cpu", budget)
    monkeypatch.setattr(reproduce, "work", None)
    reproduce.main(report_only=True)
    said = capsys.readouterr().out
    assert (
        "as no run of the plan has this name (report.py compares any files): cifar10-dgc-sparsity95-0\n"
        in said
    )
    assert "No results of ptb yet" in said and "No results of transformer yet" in said
    lines = (budget.results / "cifar10.md").read_text().splitlines()
    assert lines[0].startswith(
        "**The parts.** ResNet-20 on cifar10, 25 epochs, 4 workers, 99.9 %, "
    )
    for line in (
        "| dense | 3 of 3 | 88.33 % | 0.31 | - | - | 13.3 x | 20.0 x |",
        "| naive top-k | 0 of 3 | - | - | - | -1.6 | - | - |",
        "| + local accumulation (gradient dropping) | 1 of 2 | 87.00 % | - | -1.00 | (-1.00) | 13.3 x | 20.0 x |",
        "| + warm-up (DGC) | 2 of 3 | 88.40 % | 0.14 | +0.20 [-1.07, +1.47] | +0.37 (+0.12) | 13.3 x | 20.0 x |",
        "|  |  | 99.9 % | 99 % | 90 % | all |",
        "| dense | 75.00 % |  |  |  |  |",
        "| masked |  | - | 72.25 % (-0.50) | - | -0.50 |",
        "|  |  | 99.9 % |",
        "| dense | 88.33 % |  |",
        "| masked |  | 88.40 % (+0.20 ± 0.63) |",
        "| kept |  | 87.00 % (-1.00 ± 0.89) |",
        "| workers | dense | gradient dropping | DGC |",
        "| 4 | 88.00 % (93.75) | 87.00 % (92.75) | 88.30 % (93.87) |",
        "| 32 | - (93.10) | 86.50 % (92.10) | - (93.18) |",
        "| sparsity | " + " | ".join(f"warm-up of {n}" for n in (0, 1, 2, 4, 8)) + " |",
        "| 99.9 % | - | - | 88.30 % (13.3 x) | 88.20 % (13.3 x) | - |",
        "| 99.99 % |  |  | 85.50 % (13.3 x) |  |  |",
        "|  | seeds | test accuracy | standard deviation | to dense [95 %] | compression | after warm-up |",
        "| warm-up of 1 | 0 of 1 | - | - | - | - | - |",
        "| warm-up of 4 | 2 of 3 | 88.10 % | 0.14 | -0.10 [-3.91, +3.71] | 13.3 x | 20.0 x |",
        "| dense |  | 70.00 % |  | 75 | 13.3 x | 20.0 x |",
        "| reduce | 97 % | 69.25 % | -0.75 | 75 | 13.3 x | 20.0 x |",
        "|  | 4 workers | 16 workers | 64 workers |",
        "| all-gather | - | 80.50 % | - |",
        "| reduce | - | 80.30 % (-0.20 ± 1.89) | - |",
        "| hierarchical | - | - | - |",
        "| all-gather, 99 %, no masking | - | - | - |",
    ):
        assert line in lines
    text = "\n".join(lines)
    assert all(
        count in text
        for count in (
            "3 of 30 runs.",
            "6 of 9 runs.",
            "4 of 6 runs.",
            "Dense: 88.00 %. 3 of 8 runs.",
            "2 of 8 runs.",
            "4 of 30 runs.",
        )
    )
    figures = {file.name: file.stat().st_size for file in budget.figures.iterdir()}
    assert set(figures) == {
        "cifar10.png",
        "cifar10-ablation.png",
        "cifar10-momentum.png",
        "cifar10-sparsity.png",
        "cifar10-many.png",
    }
    assert min(figures.values()) > 10_000


def test_intervals_have_their_variance_from_all_of_a_table():
    """By hand: differences of 1, 3 and of 10, 11, 12 have squares of 2 and 2 about their means, of 1 and 2 degrees of
    freedom, so a variance of 4 / 3; Student's t at 95 % with 3 is 2.3534.
    """
    dense = {0: 70.0, 1: 70.0, 2: 70.0}
    lines = {
        "dense": {0.0: dense},
        "one": {0.9: {0: 71.0, 1: 73.0}, 0.99: {0: 75.0}},
        "other": {0.9: {0: 80.0, 1: 81.0, 2: 82.0}},
    }
    table = report.differences("", lines, str, report.RECIPES["cifar10"])
    half = [2.3534 * (4 / 3 / n) ** 0.5 for n in (1, 2, 3)]
    for cell in (
        f"72.00 % (+2.00 ± {half[1]:.2f})",
        f"75.00 % (+5.00 ± {half[0]:.2f})",
        f"81.00 % (+11.00 ± {half[2]:.2f})",
    ):
        assert cell in table
    assert "| dense | 70.00 % |" in table and "| all |" not in table
    table = report.differences("", lines, str, report.RECIPES["cifar10"], overall=True)
    # Of the mean of 2, of two seeds, and 5, of one.
    both = 2.3534 * (4 / 3 * (1 / 2 + 1) / 4) ** 0.5
    assert f"| +3.50 ± {both:.2f} |" in table and f"| +11.00 ± {half[2]:.2f} |" in table
    assert "| dense | 70.00 % |  |  |  |" in table
