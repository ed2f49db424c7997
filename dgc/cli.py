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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table

from dgc import doctor as health
from dgc import drawing, planning
from dgc import schedule as schedules
from dgc import tune as tuning
from dgc.collective import dense_bytes
from dgc.config import Config
from dgc.cost import Cluster, Link

ROWS = 24  # at most, of a schedule's table
WORKERS = 1_000_000  # of a cluster, for which a plan takes half a minute
EPOCHS, STEPS = 10, 500_000  # of a schedule that are looked at, if nothing is said; at most, if it changes later
MOST_STEPS = 5_000_000  # whatever is said: these take some 2 GB

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
                  help="Deep Gradient Compression: plan, schedule, tune, and check. "
                       "[bold]dgc COMMAND --help[/bold] shows examples.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def _picture(file: Path | None) -> Path | None:
    """Adds the ending that matplotlib would add by itself."""
    return file if file is None or file.suffix else file.with_name(f"{file.name}.png")


Png = Annotated[Path | None, typer.Option(help="Also draw it, into this file.", dir_okay=False, callback=_picture)]


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
        kind = "" if isinstance(error, planning.TheirError) else f"{type(error).__name__}: "
        print(f"dgc: {kind}{' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return status if isinstance(status, int) else 0


@contextmanager
def usage(option: str) -> Iterator[None]:
    """Tells what is wrong with an argument as a usage error."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def importable(name: str) -> None:
    """Puts the current folder where modules are looked for, for good: a function may import when it is called."""
    if planning.NAME.fullmatch(name):
        sys.path.insert(0, os.getcwd())


def aside(as_json: bool) -> AbstractContextManager[object]:
    """Keeps what the user's own code prints out of the JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


@contextmanager
def one_thread() -> Iterator[None]:
    """Has torch use one thread: for small tensors, several wait for one another where others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def console() -> Console:
    """Everything as it is written: an error's [/path] is no markup."""
    return Console(width=None if sys.stdout.isatty() else 120, markup=False, emoji=False)


# -- plan --------------------------------------------------------------------------------------------------------------

@app.command()
def plan(
        model: Annotated[str, typer.Argument(help="A name, module:callable, or a checkpoint. Names: "
                                             + ", ".join(planning.MODELS) + ".")],
        nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 4,
        gpus: Annotated[int, typer.Option(min=1, help="Workers in each of them.")] = 1,
        network: Annotated[str, typer.Option(
            help=f"Between nodes: {', '.join(planning.NETWORKS)}, or a rate such as 2.5gbit, and a latency if it is "
                 "not 50us: 40gbit,15us.")] = "1gbit",
        inside: Annotated[str, typer.Option(
            help=f"Inside a node: {', '.join(planning.INSIDE)}, or a rate and a latency.")] = "pcie",
        compute: Annotated[float | None, typer.Option(
            help="Seconds of a worker's forward and backward pass. Or --measure.")] = None,
        measure: Annotated[bool, typer.Option(
            "--measure", help="Time it here; MODEL is a module:callable that returns (module, inputs).")] = False,
        sparsity: Annotated[float | None, typer.Option(
            help=f"Share of entries kept back. Default: of {', '.join(map(str, planning.SPARSITIES))}, the tables have "
                 "the largest that the training bears (--steps, --optimizer), and advised is one up to it.")] = None,
        worker: Annotated[Literal["cpu", "gpu"] | None, typer.Option(
            help="Whose cost of compressing; the CPU's is measured, the GPU's an estimate. Default: cpu; with "
                 "--measure, what the model was timed on.")] = None,
        compress_ns: Annotated[float | None, typer.Option(
            min=0, help="Nanoseconds of compressing, for each entry, instead.")] = None,
        receive_ns: Annotated[float | None, typer.Option(
            min=0, help="Nanoseconds of decoding, for each entry received, instead.")] = None,
        overlap: Annotated[bool, typer.Option(help="Exchanges begin during the backward pass.")] = True,
        clips: Annotated[bool, typer.Option("--clips", help=(
            "Gradients are clipped by their norm, or scaled by a GradScaler: then DGC's exchanges begin after the "
            "backward pass, and dense ones during it."))] = False,
        steps: Annotated[int | None, typer.Option(
            min=1, help="Of your training: then a sparsity is advised that it bears.")] = None,
        optimizer: Annotated[Literal["sgd", "adamw"], typer.Option(
            help="Of your training: with AdamW, 99 % at most is advised, after dense steps.")] = "sgd",
        png: Png = None,
        as_json: Json = False) -> None:
    """Predicts a step's time for every way to add up gradients, and says whether DGC pays.

    [bold]Does it pay for ResNet-50 on 4 machines and Gigabit Ethernet, at 0.25 s a step?[/bold]

      dgc plan resnet50 --nodes 4 --network 1gbit --compute 0.25

    [bold]On 64 machines of 4 GPUs, with a picture:[/bold]

      dgc plan alexnet --nodes 64 --gpus 4 --worker gpu --network 10gbit --compute 0.36 --png plan.png

    [bold]Your own model, timed on this machine (resnet.py has def build(): return model, (batch,)):[/bold]

      dgc plan resnet:build --measure --network 40gbit,15us

    [bold]Numbers for a script:[/bold]

      dgc plan checkpoint.pt --compute 0.25 --json | jq .advice.pays
    """
    if nodes * gpus > WORKERS:
        raise typer.BadParameter(f"--nodes times --gpus must be at most {WORKERS:,}, got {nodes * gpus:,}")
    importable(model)
    with usage("MODEL"), aside(as_json):
        loaded = planning.load(model)
    with usage("--network"):
        between = link(network, planning.NETWORKS)
    with usage("--inside"):
        within = link(inside, planning.INSIDE)
    with usage("--sparsity"):
        config = None if sparsity is None else Config(sparsity)
    if (compute is None) != measure:
        raise typer.BadParameter("one of --compute SECONDS and --measure must be given, got "
                                 f"{'neither' if compute is None else 'both'}")
    if compute is None:
        with usage("--measure"), aside(as_json):
            compute = planning.measure(loaded)
    local = planning.LOCAL[worker or ("gpu" if measure and torch.cuda.is_available() else "cpu")]
    for name, ns in (("compress", compress_ns), ("receive", receive_ns)):
        if ns is not None:
            with usage(f"--{name}-ns"):
                local = replace(local, **{name: 1e-9 * ns})
    with usage("--compute"), one_thread():
        report = planning.plan(loaded, Cluster(nodes, gpus, between, within), compute, config, local,
                               "dense" if clips and overlap else overlap, steps, optimizer)
    if as_json:
        print(json.dumps(report.json(), indent=1))
    else:
        _show(report)
    if png:
        planning.draw(report, png)  # last, as it may fail
        if not as_json:
            console().print(f"Picture: {png}", highlight=False)


def _show(report: planning.Plan) -> None:
    out = console()
    out.print(_here(report), _scaling(report))
    if report.advice.pays and report.sparsity != report.advice.sparsity:
        advised = report.advice.sparsity
        out.print(f"These tables are of {100 * report.sparsity:g} %. What follows is of {100 * advised:g} %, of which "
                  f"--sparsity {advised:g} gives tables.", highlight=False)
    for sentence in report.advice.words:
        out.print(sentence, highlight=False)


def link(text: str, presets: dict[str, Link]) -> Link:
    """A preset's, or that of ``40gbit,15us``: bits a second and microseconds; 50 of them if none are given.

    Raises:
        ValueError: it is neither; the message says which part is wrong.
    """
    name = text.strip().lower()
    if name in presets:
        return presets[name]
    if re.search("[0-9] ?[kmgtKMGT]?i?B(?!it|IT)", text.partition(",")[0]):
        raise ValueError(f"the rate must be in bits a second, eight times the bytes, as in 2.5gbit or 300mbit, "
                         f"got {text!r}")
    rate, comma, latency = (part.strip() for part in name.partition(","))
    bandwidth = _quantity(rate, {"mbit": 1.25e5, "gbit": 1.25e8, "mbps": 1.25e5, "gbps": 1.25e8})
    microseconds = _quantity(latency, {"us": 1, "ms": 1e3}) if comma else 50.0
    if not bandwidth or microseconds is None:
        part = f"its latency, {latency!r}" if bandwidth else f"its rate, {rate!r}"
        raise ValueError(f"a link must be {', '.join(presets)}, or a rate such as 2.5gbit or 300mbit, and a latency if "
                         f"it is not 50us, as in 40gbit,15us; got {text!r}, of which {part} is wrong")
    return Link(microseconds / 1e6, bandwidth)


def _quantity(text: str, units: dict[str, float]) -> float | None:
    """A number with a unit; None if it is none."""
    found = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?|\.[0-9]+) ?({'|'.join(units)})", text)
    return float(found[1]) * units[found[2]] if found else None


def _here(report: planning.Plan) -> Table:
    cluster = report.cluster
    table = Table(title=f"{report.model}: {report.numel:,} parameters on {cluster.nodes} x {cluster.gpus} workers, "
                        f"{planning.bits(cluster.between.bandwidth)} between nodes, "
                        f"{1e3 * report.compute:.4g} ms of computation a step")
    for column in ("", "step", "efficiency", "exchange", "over a node's port", "a worker's message"):
        table.add_column(column, justify="left" if not column else "right")
    best = {min((p for p in report.here if (p.method.kind == "dgc") == dgc), key=lambda p: p.step_seconds)
            for dgc in (False, True)}
    for p in report.here:
        table.add_row(str(p.method), f"{1e3 * p.step_seconds:,.1f} ms", f"{100 * p.efficiency:.1f} %",
                      f"{1e3 * p.exchange_seconds:,.1f} ms", _size(p.port_bytes), _size(p.message_bytes),
                      style="bold" if p in best else "")
    return table


def _scaling(report: planning.Plan) -> Table:
    shown = [n for n in report.scaling if n > 1 and (int(math.log2(n)) % 2 == 1 or n == report.cluster.workers)]
    table = Table(title="scaling efficiency in % by the number of workers")
    table.add_column("")
    for workers in shown:
        table.add_column(f"{workers:,}", justify="right")
    by_method = {n: {p.method: p.efficiency for p in report.scaling[n]} for n in shown}
    for method in dict.fromkeys(m for n in shown for m in by_method[n]):
        table.add_row(str(method), *(f"{100 * by_method[n][method]:.3g}" if method in by_method[n] else ""
                                     for n in shown))
    return table


def _size(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:,.3g} {unit}" if nbytes < 1e3 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes:.0f} B"


# -- schedule ----------------------------------------------------------------------------------------------------------

@app.command()
def schedule(
        expression: Annotated[str, typer.Argument(metavar="EXPR", help="See the examples.")],
        steps_per_epoch: Annotated[int, typer.Option(min=1, help="Optimizer steps in one epoch.")] = 100,
        epochs: Annotated[int | None, typer.Option(
            min=1, help=f"To look at. Default: {EPOCHS}, or more if it changes later.")] = None,
        model: Annotated[str, typer.Option(help="Whose bytes; as for dgc plan.")] = "resnet50",
        workers: Annotated[int, typer.Option(min=2, help="Early in a warm-up, many of them send less if dense.")] = 4,
        png: Png = None,
        as_json: Json = False) -> None:
    """Shows what a schedule sends: sparsity, bytes a step, and bytes so far against dense.

    [bold]The paper's warm-up:[/bold]

      dgc schedule warmup:epochs=4,end=0.999 --steps-per-epoch 391 --epochs 164

    [bold]Others:[/bold]

      dgc schedule 0.999

      dgc schedule warmup:epochs=4,per_step=true

      dgc schedule warmup:epochs=0.6,stages=4

      dgc schedule piecewise:0=0.75,1000=0.999

      dgc schedule dense_until:1000,then=0.99 --png schedule.png

    Bytes are those of one worker over all-gather, as optimizer.report() counts them. What an adaptive schedule sends
    the network decides; those of its bounds can be shown.
    """
    with usage("EXPR"):
        chosen = schedules.parse(expression, steps_per_epoch)
        if isinstance(chosen, schedules.Adaptive):
            raise ValueError(f"the schedule must be known beforehand, got {expression!r}, which goes by the network's "
                             f"speed (show one of its bounds, {chosen.least:g} and {chosen.most:g})")
    importable(model)
    with usage("--model"), aside(as_json):
        loaded = planning.load(model)
    if epochs is None:
        epochs = _epochs(chosen, steps_per_epoch, expression)
    if (steps := epochs * steps_per_epoch) > MOST_STEPS:
        raise typer.BadParameter(f"--epochs times --steps-per-epoch must be at most {MOST_STEPS:,}, got {steps:,}")
    values = [chosen(step) for step in range(steps)]
    sent_at = {value: _sent(loaded.shapes, value, workers) for value in set(values)}
    dense = dense_bytes(loaded.numel, workers)
    rows, total = [], 0.0
    for step, value in enumerate(values):
        total += sent_at[value]
        rows.append({"step": step, "sparsity": value, "bytes": sent_at[value], "total_bytes": total,
                     "of_dense": total / (dense * (step + 1))})
    if as_json:
        print(json.dumps({"expression": expression, "schedule": repr(chosen), "model": model, "workers": workers,
                          "dense_bytes": dense, "steps": rows}, indent=1))
    else:
        out = console()
        out.print(_schedule_table(rows, dense, f"{expression}: {model}, {workers} workers, {steps:,} steps"))
        out.print(f"{_size(total)} in all, {dense * steps / total:,.1f} times fewer than {_size(dense * steps)} of "
                  "dense float32.", highlight=False)
        if loaded.caveat:
            out.print(loaded.caveat, highlight=False)
    if png:
        _draw_schedule(rows, dense, f"{expression}, {model}, {workers} workers", png)  # last, as it may fail
        if not as_json:
            console().print(f"Picture: {png}", highlight=False)


def _epochs(schedule: Any, steps_per_epoch: int, expression: str) -> int:
    """How far to look, where nothing is said.

    Raises:
        typer.BadParameter: that is too far.
    """
    last = schedule.steps if isinstance(schedule, schedules.Ramp) else max(schedule.steps)
    epochs = max(EPOCHS, math.ceil(1.25 * last / steps_per_epoch))
    if EPOCHS * steps_per_epoch > STEPS:
        raise typer.BadParameter(f"--steps-per-epoch must be at most {STEPS // EPOCHS:,}, got {steps_per_epoch:,} "
                                 "(or say by --epochs how far to look)")
    if epochs * steps_per_epoch > STEPS:
        raise typer.BadParameter(f"EXPR must change for the last time before step {STEPS:,}, got {expression!r}, "
                                 f"which changes at step {last:,} (or say by --epochs how far to look)")
    return epochs


def _sent(shapes: tuple[planning.Shape, ...], sparsity: float, workers: int) -> float:
    """Bytes that a worker sends in a step."""
    alone = Cluster(workers, 1, planning.NETWORKS["1gbit"], planning.INSIDE["pcie"])
    return planning.predict(shapes, alone, planning.Method("allgather", "dgc"), 1.0, Config(sparsity)).port_bytes


def _schedule_table(rows: list[dict[str, Any]], dense: float, title: str) -> Table:
    changes = [row for row, before in zip(rows, [None, *rows], strict=False)
               if before is None or row["sparsity"] != before["sparsity"]]
    if len(changes) > ROWS:
        changes = [changes[i * (len(changes) - 1) // (ROWS - 1)] for i in range(ROWS)]
    table = Table(title=title)
    for column in ("from step", "sparsity", "bytes a step", "fewer than dense", "so far, of dense", "a step, of dense"):
        table.add_column(column, justify="left" if column.startswith("a step") else "right")
    last = [rows[-1]] if rows[-1] is not changes[-1] else []
    for row in changes + last:
        bar = "█" * max(1, round(24 * row["bytes"] / dense))
        table.add_row(f"{row['step']:,}", f"{100 * row['sparsity']:.6g} %", _size(row["bytes"]),
                      f"{dense / row['bytes']:,.1f} x", f"{100 * row['of_dense']:.3g} %", bar)
    return table


def _draw_schedule(rows: list[dict[str, Any]], dense: float, title: str, file: Path) -> None:
    steps = [row["step"] for row in rows]
    figure, panes = drawing.panels(3)
    for axes, name, line, other in (
            (panes[0], "entries sent (%)", [100 * (1 - row["sparsity"]) for row in rows], [100.0] * len(rows)),
            (panes[1], "bytes a step and worker", [row["bytes"] for row in rows], [dense] * len(rows)),
            (panes[2], "bytes so far, a worker", [row["total_bytes"] for row in rows],
             [dense * (step + 1) for step in steps])):
        axes.plot(steps, other, color=drawing.DENSE)
        axes.plot(steps, line, color=drawing.DGC, drawstyle="steps-post")
        low, high = min(*line, *other), max(*line, *other)
        axes.set(title=name, xlabel="step", xlim=(0, max(steps[-1], 1)), yscale="log", ylim=(low / 1.5, 1.5 * high))
        if axes is panes[0]:
            drawing.log_axis(axes, "y", drawing.places(low / 1.5, 1.5 * high))
        else:
            drawing.byte_axis(axes, "y")
        drawing.name_lines(axes, [("dense", (steps[-1], other[-1]), drawing.DENSE),
                                  ("DGC", (steps[-1], line[-1]), drawing.DGC)])
    figure.suptitle(title, fontsize=10.5)
    drawing.save(figure, file)


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
            help="The picture. Default: beside the study.", dir_okay=False, callback=_picture)] = None,
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
    if len(command) == 1 and planning.NAME.fullmatch(command[0]):
        importable(command[0])
        with usage("COMMAND"), aside(as_json):
            objective = planning.callable_named(command[0])
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
    told = json.dumps(found.json(), indent=1)
    summary.write_text(told + "\n")
    if as_json:
        print(told)
    else:
        _print_found(found, console().print)
    if found.front:
        tuning.draw(found, png)  # last, as it may fail, and the rest took hours
    if not as_json:
        print(f"Picture: {png}. All trials: {summary}" if found.front else f"All trials: {summary}")
    raise typer.Exit(0 if found.recommended else 1)


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


def _print_found(found: tuning.Result, show: Callable[..., None]) -> None:
    paper, best = found.paper, found.recommended
    counts = Counter(trial.state for trial in found.trials)
    table = Table(title=f"the front of the trials: {', '.join(f'{n} {state}' for state, n in counts.items())}")
    for column in ("trial", "schedule", "clip_norm", found.task.metric, "bytes", "of the paper's", ""):
        table.add_column(column, justify="left" if column in ("schedule", "") else "right", overflow="fold")
    others = [trial for trial in (paper, found.dense) if trial and trial not in found.front]
    for trial in [*found.front, *others]:
        marks = [mark for mark, one in (("the paper's", paper), ("dense", found.dense), ("recommended", best))
                 if trial is one]
        assert trial.metric is not None and trial.bytes_sent is not None  # it is complete
        share = f"{100 * trial.bytes_sent / paper.bytes_sent:.3g} %" if paper and paper.bytes_sent else ""
        clip = found.task.clipping(trial.setting)
        table.add_row(str(trial.setting.trial), trial.setting.expression, clip, f"{trial.metric:.6g}",
                      _size(trial.bytes_sent), share, ", ".join(marks), style="bold" if trial is best else "")
    show(table)
    if best is None:
        show("Nothing is recommended: the trial of the paper's schedule failed, and there is nothing to compare with. "
             "The same line again repeats it.", highlight=False)
        return
    dense = f" Dense training has {found.dense.metric:.6g}." if found.dense else ""
    show(f"Recommended: trial {best.setting.trial}, the fewest bytes whose {found.task.metric} is no worse than "
         f"the paper's{f', less {found.tolerance:g}' if found.tolerance else ''}: {best.metric:.6g}.{dense} To paste:",
         highlight=False)
    for line in dict.fromkeys((found.line(best), best.setting.line)):
        print(f"  {line}")
    if paper is not None and (rival := found.best) is not None:
        show(f"But trial {rival.setting.trial} is far better than the paper's schedule, {rival.metric:.6g} and "
             f"{paper.metric:.6g}: trainings of {found.task.epochs} epochs are too short for that one to learn, and so "
             "to choose by (give --epochs more).", highlight=False)
    if (length := best.setting.warmup_epochs) is not None:
        per_cent = f"{100 * length / best.setting.epochs:.3g}"
        show(f"Its warm-up is {per_cent} % of these {best.setting.epochs} epochs; of a training of 100 it would be "
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
