"""The ``dgc`` command: does it pay (plan), when is how much sent (schedule), what is best for a script (tune), does it
work here (doctor).
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dgc import doctor as health
from dgc import tune as tuning
from dgc.plan import commands
from dgc.terminal import Json, aside, console, importable, picture, size, usage
from dgc.user_code import NAME, TheirError, callable_named

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
                  help="Deep Gradient Compression: plan, schedule, tune, and check. "
                       "[bold]dgc COMMAND --help[/bold] shows examples.")
app.command()(commands.plan)
app.command()(commands.schedule)


def run() -> int:
    """The exit status: 0; 1 for a failure; 2 for a wrong command line. Either is told in one line."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by whoever started this
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a bar that a locale's encoding lacks is no reason to fail
    try:
        status = app(sys.argv[1:] or ["--help"], prog_name="dgc", standalone_mode=False)
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error; click's class has no public name in typer
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
        command: Annotated[list[str], typer.Argument(
            metavar="COMMAND", help="With {sparsity}; may have {clip_norm}, {factor_masking}, {epochs}, {out}, "
                                       "{trial}. Or module:function.")],
        epochs: Annotated[int, typer.Option(min=1, help="That a trial trains for.")],
        maximize: Annotated[bool | None, typer.Option(
            "--maximize/--minimize", help="Whether more of the metric is better: one of the two.")] = None,
        trials: Annotated[int, typer.Option(min=1, help="Of the study, in all.")] = 20,
        jobs: Annotated[int, typer.Option(min=1, help="Trials at a time; they share GPUs and cores.")] = 1,
        study: Annotated[Path, typer.Option(dir_okay=False, help="SQLite file; an unfinished one is gone on with.")] =
            Path("tune.db"),
        metric: Annotated[str, typer.Option(help="Its name, in {out} too.")] = "metric",
        clip_norm: Annotated[float | None, typer.Option(
            min=0, help="The bound on the gradient's norm that the script has today, 0 for none; the first trial's.",
            )] = None,
        tolerance: Annotated[float, typer.Option(
            min=0, help="How much worse than the paper's the recommended metric may be.")] = 0.0,
        seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the sampler.")] = 0,
        png: Annotated[Path | None, typer.Option(
            help="The picture. Default: beside the study.", dir_okay=False, callback=picture)] = None,
        as_json: Json = False) -> None:
    """Searches sparsity, warm-up and clipping for your own script: the metric against the bytes sent.

    [bold]A script that takes a schedule, and writes {"accuracy": 91.2, "bytes_sent": 3400000} to a JSON file:[/bold]

      dgc tune --epochs 25 --maximize --metric accuracy -- \\
        python recipes/cifar10.py --virtual-workers 4 --epochs {epochs} --sparsity {sparsity} --out {out}

    [bold]Clipping too, four trials at a time, on eight GPUs:[/bold]

      dgc tune --epochs 40 --minimize --jobs 4 -- \\
        torchrun --standalone --nproc-per-node 2 train.py {sparsity} {clip_norm}

    That one has no {out}, and calls dgc.tune.report(epoch, metric, optimizer.report().total_bytes_sent) after each
    epoch.

    [bold]A function of a dgc.tune.Setting, in train.py:[/bold]

      dgc tune --epochs 5 --maximize train:objective

    The first trial is the paper's schedule, the second is dense. Recommended are the fewest bytes with which the metric
    is no worse than with the paper's.
    Whatever ends a study (Ctrl-C, a kill), the same line again goes on with it. In the end, a PNG and a JSON are
    beside it.

    Status 0: there is a recommendation. 1: the script fails or says nothing, or the paper's trial failed. 2: the
    command line or the study is wrong. 130: stopped.
    """
    if maximize is None:
        raise typer.BadParameter("one of --maximize and --minimize must be given, got neither")
    objective: Any = command
    if len(command) == 1 and NAME.fullmatch(command[0]):
        importable(command[0])
        with usage("COMMAND"), aside(as_json):
            objective = callable_named(command[0])
    png, summary = _files_beside(study, png)
    try:
        with aside(as_json):
            found = tuning.search(objective, epochs=epochs, maximize=maximize, trials=trials, study=study,
                                  metric=metric, clip_norm=clip_norm, jobs=jobs, tolerance=tolerance, seed=seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        print(f"dgc tune: stopped; the same line again goes on with {study}", file=sys.stderr)
        raise
    told = json.dumps(found, indent=1)
    summary.write_text(told + "\n")
    if as_json:
        print(told)
    else:
        _print_found(found, console().print)
    if found["front"]:
        tuning.draw(found, png)  # last, as it may fail, and the rest took hours
    if not as_json:
        print(f"Picture: {png}. All trials: {summary}" if found["front"] else f"All trials: {summary}")
    raise typer.Exit(0 if found["recommended"] else 1)


def _files_beside(study: Path, png: Path | None) -> tuple[Path, Path]:
    """Where the picture and the summary of a study go."""
    base = study.name.removesuffix(".db")  # of resnet-lr0.1, ".1" is no suffix
    png, summary = png or study.with_name(f"{base}.png"), study.with_name(f"{base}.json")
    if len({study.absolute(), png.absolute(), summary.absolute()}) < 3:
        raise typer.BadParameter(f"the study, its picture and its summary must be three files, got {study}, {png} and "
                                 f"{summary} (name the study such as tune.db, whose others are tune.png and tune.json)")
    for file in (summary, png) if not _is_summary(summary) else ():
        if file.exists():
            raise typer.BadParameter(f"{file} must be free for the search's results, got a file that is no search's "
                                     "(move it away, or give --study another name)")
    return png, summary


def _is_summary(file: Path) -> bool:
    """Whether an earlier search wrote it."""
    try:
        return {"task", "trials", "front"} <= json.loads(file.read_bytes()).keys()
    except (OSError, ValueError, AttributeError):
        return False


def _print_found(found: dict[str, Any], show: Callable[..., None]) -> None:
    trials, task, best = {t["trial"]: t for t in found["trials"]}, found["task"], found["recommended"]
    paper, dense = trials.get(found["paper"]), trials.get(found["dense"])
    counts = Counter(t["state"] for t in found["trials"])
    table = Table(title=f"the front of the trials: {', '.join(f'{n} {state}' for state, n in counts.items())}")
    for column in ("trial", "schedule", "clip_norm", task["metric"], "bytes", "of the paper's", ""):
        table.add_column(column, justify="left" if column in ("schedule", "") else "right", overflow="fold")
    others = [n for n in (found["paper"], found["dense"]) if n is not None and n not in found["front"]]
    for number in [*found["front"], *others]:
        t = trials[number]
        recommended = best is not None and number == best["trial"]
        marks = ["the paper's"] * (t is paper) + ["dense"] * (t is dense) + ["recommended"] * recommended
        share = f"{100 * t['bytes_sent'] / paper['bytes_sent']:.3g} %" if paper else ""
        clip = "" if task["clip_norm"] is None else str(t["clip_norm"] or "none")
        table.add_row(str(number), t["expression"], clip, f"{t['metric']:.6g}", size(t["bytes_sent"]), share,
                      ", ".join(marks), style="bold" if recommended else "")
    show(table)
    if best is None or paper is None:
        show("Nothing is recommended: the trial of the paper's schedule failed, and there is nothing to compare with. "
             "The same line again repeats it.", highlight=False)
        return
    less = f", less {found['tolerance']:g}" if found["tolerance"] else ""
    beside = f" Dense training has {dense['metric']:.6g}." if dense else ""
    show(f"Recommended: trial {best['trial']}, the fewest bytes whose {task['metric']} is no worse than the paper's"
         f"{less}: {best['metric']:.6g}.{beside} To paste:", highlight=False)
    for line in dict.fromkeys((best["line"], best["config"])):
        print(f"  {line}")
    rival = trials[found["front"][-1]]  # sends the most of the front, and has the best metric
    if abs(rival["metric"] - paper["metric"]) > 0.1 * abs(paper["metric"]):
        show(f"But trial {rival['trial']} is far better than the paper's schedule, {rival['metric']:.6g} and "
             f"{paper['metric']:.6g}: trainings of {task['epochs']} epochs are too short for that one to learn, and so "
             "to choose by (give --epochs more).", highlight=False)
    if length := re.match("warmup:epochs=([^,]+)", best["expression"]):
        per_cent = f"{100 * float(length[1]) / task['epochs']:.3g}"
        show(f"Its warm-up is {per_cent} % of these {task['epochs']} epochs; of a training of 100 it would be "
             f"epochs={per_cent}.", highlight=False)


# -- doctor ------------------------------------------------------------------------------------------------------------

@app.command()
def doctor(
        limit: Annotated[float, typer.Option(min=1, help="Seconds for each self-test.")] = health.LIMIT,
        as_json: Json = False) -> None:
    """Tells what is installed and built, which kernels will run, and tries it between two local processes.

    Ends with status 1 where something that is installed does not work.

      dgc doctor

      dgc doctor --json | jq .problems
    """
    if not math.isfinite(limit):
        raise typer.BadParameter(f"--limit must be finite, got {limit}")
    with Console(stderr=True).status("Two processes try it. This takes up to a minute, and longer the first time ..."):
        found = health.examine(limit)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print_health(found, console().print)
    raise typer.Exit(1 if found["problems"] else 0)


def _print_health(found: dict[str, Any], show: Callable[..., None]) -> None:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    t, h = found["torch"], found["horovod"]
    table.add_row("dgc", f"{found['dgc'] or 'not installed as a package'}, Python {found['python']}")
    table.add_row("torch", t["version"])
    devices = ", ".join(t["devices"]) or "no device"
    table.add_row("CUDA", f"{t['cuda']}, {devices}" if t["cuda"] else "not in this torch")
    table.add_row("torch.distributed", ", ".join(
        [name for name in ("gloo", "nccl") if t[name]] + ([f"NCCL {t['nccl_version']}"] if t["nccl"] else [])) or "no")
    if h is None:
        table.add_row("Horovod", "not installed (scripts/build_horovod.sh); torch.distributed will do")
    else:
        built = ", ".join(name[:-6] for name in health.HOROVOD if name.endswith("_built") and h.get(name))
        table.add_row("Horovod", h.get("error") or f"{h['version']}, built with {built or 'nothing'}")
    for name, extra in (("numba", "pip install numba makes compression on CPUs 3 to 10 times faster"),
                        ("triton", "only GPUs need it"),
                        ("optuna", "dgc tune needs it: pip install optuna"),
                        ("matplotlib", "pictures need it: pip install matplotlib")):
        about = found[name]
        table.add_row(name, f"not installed; {extra}" if about is None else about.get("error") or about["version"])
    compiled = {"cpu": "numba", "cuda": "Triton", "plain": "plain torch operations"}
    for kind, module in found["kernels"].items():
        table.add_row(f"kernels on {kind}", compiled[module])
    for name, test in found["self_test"].items():
        told = test.get("error") or (f"skipped: {test['skipped']}" if "skipped" in test else
                                     f"works ({test['seconds']} s)")
        table.add_row(f"2 processes, {name}" if name != "cuda" else "2 ranks on the GPU", told)
    show(table)
    for problem in found["problems"]:
        show(f"Problem: {problem}", highlight=False)
    if not found["problems"]:
        show("All that is installed works.", highlight=False)
    for advice in found["advice"]:
        show(f"Advice: {advice}.", highlight=False)
