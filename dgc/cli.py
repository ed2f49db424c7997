"""The ``dgc`` command: does it pay (plan), when is how much sent (schedule), what is best for a
script (tune), does it work here (doctor).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dgc import doctor as health
from dgc.plan import commands
from dgc.terminal import Json, console, size
from dgc.user_code import TheirError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Deep Gradient Compression: plan, schedule, tune, and check. dgc COMMAND --help shows examples.",
)
app.command()(commands.plan)
app.command()(commands.schedule)


def run() -> int:
    """The exit status: 0; 1 for a failure; 2 for a wrong command line. Either is told in one line."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by whoever started this
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        # A bar that a locale's encoding lacks is no reason to fail.
        sys.stdout.reconfigure(errors="replace")
    try:
        status = app(sys.argv[1:] or ["--help"], prog_name="dgc", standalone_mode=False)
    except Exception as error:
        if hasattr(
            error, "format_message"
        ):  # a usage error; click's class has no public name in typer
            command = getattr(getattr(error, "ctx", None), "command_path", "dgc")
            print(f"{command}: {' '.join(error.format_message().split())}", file=sys.stderr)
            return int(getattr(error, "exit_code", 2))
        if isinstance(error, typer.Abort):
            return 130
        if isinstance(error, ImportError):
            raise  # of an optional package: __main__ says how to install it
        kind = "" if isinstance(error, TheirError) else f"{type(error).__name__}: "
        print(f"dgc: {kind}{' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return status if isinstance(status, int) else 0


# -- tune --------------------------------------------------------------------------------------------------------------


@app.command(context_settings={"allow_interspersed_args": False})
def tune(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="With {sparsity}; may have {clip_norm}, {factor_masking}, {local_steps}, {epochs}, {trial}, "
            "{out} (a file in the trial's folder).",
        ),
    ],
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of one trial.")],
    maximize: Annotated[
        bool,
        typer.Option(
            "--maximize/--minimize",
            help="Whether a larger metric is better, or a smaller one.",
            show_default=False,
        ),
    ],
    trials: Annotated[int, typer.Option(min=2, help="Number of trials in all.")] = 20,
    jobs: Annotated[
        int, typer.Option(min=1, help="Trials at a time. They share GPUs and cores.")
    ] = 1,
    study: Annotated[
        Path,
        typer.Option(file_okay=False, help="Folder of the search. An unfinished search continues."),
    ] = Path("tune"),
    metric: Annotated[str, typer.Option(help="Name of the metric.")] = "metric",
    clip_norm: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Search the bound on the gradient's norm. Give today's bound, or 0 for none.",
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0, help="How much worse than the paper's trial the recommended one may be."
        ),
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Searches the settings for your own script.

    They are the sparsity, its warm-up, and clipping; compared are the metric and the bytes sent.

    \b
    A script that takes a schedule:
      dgc tune --epochs 25 --maximize --metric accuracy -- \\
        python recipes/cifar10.py --virtual-workers 4 \\
        --epochs {epochs} --sparsity {sparsity} --out {out}

    \b
    Clipping too, four trials at a time, on eight GPUs:
      dgc tune --epochs 40 --minimize --jobs 4 --clip-norm 0.25 -- \\
        torchrun --standalone --nproc-per-node 2 train.py \\
        {sparsity} {clip_norm}

    After each epoch the script calls dgc.tune.report(epoch, metric,
    optimizer.report().total_bytes_sent).

    The first trial has the paper's schedule, and the second is dense. The answer recommends the
    trial with the fewest bytes whose metric is no worse than the first trial's.

    The same command continues a search that was ended (Ctrl-C, a kill). At the end, front.png and
    trials.json are in the study's folder.

    Status 0: there is a recommendation. 1: the script fails, or does not
    report. 2: the command line or the study is wrong. 130: stopped.
    """
    from dgc.tune.study import draw, search  # needs optuna, which other commands do not

    task = {
        "command": command,
        "metric": metric,
        "maximize": maximize,
        "epochs": epochs,
        "clip_norm": clip_norm,
    }
    try:
        found = search(task, study, trials, jobs, tolerance)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        print(f"dgc tune: stopped; the same line again goes on with {study}", file=sys.stderr)
        raise
    text = json.dumps(found, indent=1)
    (study / "trials.json").write_text(text + "\n")
    if as_json:
        print(text)
    else:
        _print_found(found)
    draw(found, study / "front.png")


def _print_found(found: dict[str, Any]) -> None:
    trials = {each["trial"]: each for each in found["trials"]}
    paper, best, metric = (
        trials[found["paper"]],
        trials[found["recommended"]],
        found["task"]["metric"],
    )
    table = Table(title=f"the front of {len(trials)} trials", box=None, pad_edge=False)
    for column in ("trial", "schedule", "clip_norm", metric, "bytes", "of the paper's"):
        table.add_column(
            column, justify="left" if column == "schedule" else "right", overflow="fold"
        )
    for number in dict.fromkeys(
        [*found["front"], found["paper"], found["dense"] or found["paper"]]
    ):
        each = trials[number]
        table.add_row(
            f"{number} ({each['kind']})",
            each["sparsity"],
            each["clip_norm"],
            f"{each['metric']:.6g}",
            size(each["bytes_sent"]),
            f"{100 * each['bytes_sent'] / paper['bytes_sent']:.3g} %",
            style="bold" if each is best else "",
        )
    print(
        f"Recommended: trial {best['trial']}, the fewest bytes whose {metric} is no worse than the paper's, "
        f"{paper['metric']:.6g}. To paste:\n  {found['line']}\n"
    )
    console().print(table)


# -- doctor ------------------------------------------------------------------------------------------------------------


@app.command()
def doctor(
    limit: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds for each self-test.")
    ] = health.SELF_TEST_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Checks the installation.

    It tells what is installed and which kernels will run, and trains between two local processes.
    Ends with status 1 where something that is installed does not work.

    \b
      dgc doctor
      dgc doctor --json | jq .problems
    """
    with Console(stderr=True).status(
        "Two processes try it. This takes up to a minute, and longer the first time ..."
    ):
        found = health.examine(limit)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print_health(found)
    raise typer.Exit(1 if found["problems"] else 0)


def _print_health(found: dict[str, Any]) -> None:
    rows = {
        name: about
        for name, about in found.items()
        if name not in ("self_test", "problems", "advice")
    }
    rows |= {f"self-test, {name}": about for name, about in found["self_test"].items()}
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, about in rows.items():
        table.add_row(name, _in_words(about) if about else "not installed")
    show = console().print
    for problem in found["problems"]:
        show(f"Problem: {problem}", highlight=False)
    if not found["problems"]:
        show("All that is installed works.", highlight=False)
    for advice in found["advice"]:
        show(f"Advice: {advice}.", highlight=False)
    show()
    show(table)


def _in_words(about: str | dict[str, Any]) -> str:
    """``{"version": "2.13", "devices": []}`` as "2.13, devices: none"."""
    if isinstance(about, str):
        return about
    named = {
        key: (", ".join(value) or "none") if isinstance(value, list) else value or "none"
        for key, value in about.items()
    }
    return ", ".join(
        str(value) if key == "version" else f"{key}: {value}" for key, value in named.items()
    )
