"""The commands ``dgc plan`` and ``dgc schedule``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.table import Table

from dgc import drawing
from dgc import schedule as schedules
from dgc.collective import dense_bytes
from dgc.config import Config
from dgc.plan.advise import SPARSITIES, bits
from dgc.plan.answer import Plan, draw
from dgc.plan.answer import plan as answer
from dgc.plan.cost import Cluster, Link
from dgc.plan.models import MODELS, Shape, load
from dgc.plan.models import measure as timed
from dgc.plan.predict import INSIDE, LOCAL, NETWORKS, Method, predict
from dgc.terminal import Json, Png, aside, console, importable, usage
from dgc.terminal import size as size_of

ROWS = 24  # at most, of a schedule's table
WORKERS = 1_000_000  # of a cluster, for which a plan takes half a minute
EPOCHS, STEPS = 10, 500_000  # of a schedule that are looked at, if nothing is said; at most, if it changes later
MOST_STEPS = 5_000_000  # whatever is said: these take some 2 GB


@contextmanager
def one_thread() -> Iterator[None]:
    """Has torch use one thread: for small tensors, several wait for one another where others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- plan --------------------------------------------------------------------------------------------------------------

def plan(
        model: Annotated[str, typer.Argument(help="A name, module:callable, or a checkpoint. Names: "
                                             + ", ".join(MODELS) + ".")],
        nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 4,
        gpus: Annotated[int, typer.Option(min=1, help="Workers in each of them.")] = 1,
        network: Annotated[str, typer.Option(
            help=f"Between nodes: {', '.join(NETWORKS)}, or a rate such as 2.5gbit, and a latency if it is "
                 "not 50us: 40gbit,15us.")] = "1gbit",
        inside: Annotated[str, typer.Option(
            help=f"Inside a node: {', '.join(INSIDE)}, or a rate and a latency.")] = "pcie",
        compute: Annotated[float | None, typer.Option(
            help="Seconds of a worker's forward and backward pass. Or --measure.")] = None,
        measure: Annotated[bool, typer.Option(
            "--measure", help="Time it here; MODEL is a module:callable that returns (module, inputs).")] = False,
        sparsity: Annotated[float | None, typer.Option(
            help=f"Share of entries kept back. Default: of {', '.join(map(str, SPARSITIES))}, the tables have "
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
        loaded = load(model)
    with usage("--network"):
        between = link(network, NETWORKS)
    with usage("--inside"):
        within = link(inside, INSIDE)
    with usage("--sparsity"):
        config = None if sparsity is None else Config(sparsity)
    if (compute is None) != measure:
        raise typer.BadParameter("one of --compute SECONDS and --measure must be given, got "
                                 f"{'neither' if compute is None else 'both'}")
    if compute is None:
        with usage("--measure"), aside(as_json):
            compute = timed(loaded)
    own = {name: 1e-9 * ns for name, ns in (("compress", compress_ns), ("receive", receive_ns)) if ns is not None}
    if not math.isfinite(sum(own.values())):
        raise typer.BadParameter("--compress-ns and --receive-ns must be finite")
    local = replace(LOCAL[worker or ("gpu" if measure and torch.cuda.is_available() else "cpu")], **own)
    with usage("--compute"), one_thread():
        report = answer(loaded, Cluster(nodes, gpus, between, within), compute, config, local,
                               "dense" if clips and overlap else overlap, steps, optimizer)
    if as_json:
        print(json.dumps(report.json(), indent=1))
    else:
        _show(report)
    if png:
        draw(report, png)  # last, as it may fail
        if not as_json:
            console().print(f"Picture: {png}", highlight=False)


def _show(report: Plan) -> None:
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


def _here(report: Plan) -> Table:
    cluster = report.cluster
    table = Table(title=f"{report.model}: {report.numel:,} parameters on {cluster.nodes} x {cluster.gpus} workers, "
                        f"{bits(cluster.between.bandwidth)} between nodes, "
                        f"{1e3 * report.compute:.4g} ms of computation a step")
    for column in ("", "step", "efficiency", "exchange", "over a node's port", "a worker's message"):
        table.add_column(column, justify="left" if not column else "right")
    best = {min((p for p in report.here if (p.method.kind == "dgc") == dgc), key=lambda p: p.step_seconds)
            for dgc in (False, True)}
    for p in report.here:
        table.add_row(str(p.method), f"{1e3 * p.step_seconds:,.1f} ms", f"{100 * p.efficiency:.1f} %",
                      f"{1e3 * p.exchange_seconds:,.1f} ms", size_of(p.port_bytes), size_of(p.message_bytes),
                      style="bold" if p in best else "")
    return table


def _scaling(report: Plan) -> Table:
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


# -- schedule ----------------------------------------------------------------------------------------------------------

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
        loaded = load(model)
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
        out.print(f"{size_of(total)} in all, {dense * steps / total:,.1f} times fewer than {size_of(dense * steps)} of "
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


def _sent(shapes: tuple[Shape, ...], sparsity: float, workers: int) -> float:
    """Bytes that a worker sends in a step."""
    alone = Cluster(workers, 1, NETWORKS["1gbit"], INSIDE["pcie"])
    return predict(shapes, alone, Method("allgather", "dgc"), 1.0, Config(sparsity)).port_bytes


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
        table.add_row(f"{row['step']:,}", f"{100 * row['sparsity']:.6g} %", size_of(row["bytes"]),
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
