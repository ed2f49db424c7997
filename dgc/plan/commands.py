"""The commands ``dgc plan`` and ``dgc schedule``."""

from __future__ import annotations

import json
import math
import re
import textwrap
from dataclasses import asdict
from itertools import accumulate
from typing import Annotated, Any, Literal

import torch
import typer
from rich.table import Table

from dgc import schedule as schedules
from dgc.collective import dense_bytes
from dgc.config import Config
from dgc.plan.advise import SPARSITIES, Advice, advise, bits, fits, notes, verdict
from dgc.plan.cost import Cluster, Link
from dgc.plan.models import MODELS, Shape, load
from dgc.plan.models import measure as timed
from dgc.plan.predict import (
    GATHER,
    INSIDE,
    LOCAL,
    MAIN,
    NETWORKS,
    Overlap,
    Prediction,
    by_workers,
    predict,
)
from dgc.terminal import Json, aside, console, importable, usage
from dgc.terminal import size as size_of

ROWS = 24  # at most, of a schedule's table
EPOCHS = 10  # of a schedule, if nothing is said
MAX_STEPS = 5_000_000  # of a schedule: these take some 2 GB
RATE = re.compile(
    r"(\d+\.?\d*|\.\d+) ?([mgMG])(?:bit|Bit|BIT|bps)(?:, ?(\d+\.?\d*|\.\d+) ?([um])s)?"
)
UNITS = {"m": 1.25e5, "g": 1.25e8}  # bytes a second


# -- plan --------------------------------------------------------------------------------------------------------------


def plan(
    model: Annotated[str, typer.Argument(help=f"{', '.join(MODELS)}, or a module:callable.")],
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 4,
    gpus: Annotated[int, typer.Option(min=1, help="Workers in each of them.")] = 1,
    network: Annotated[
        str,
        typer.Option(
            help=f"Between machines: {', '.join(NETWORKS)}, or a rate and a latency: 40gbit,15us. Latencies: "
            f"{', '.join(f'{name} {1e6 * link.latency:g}us' for name, link in NETWORKS.items())}; of other rates 50us."
        ),
    ] = "1gbit",
    inside: Annotated[
        str, typer.Option(help=f"Inside a machine: {', '.join(INSIDE)}, or a rate and a latency.")
    ] = "pcie",
    compute: Annotated[
        float | None,
        typer.Option(help="Seconds of a worker's forward and backward pass. Or --measure."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Time it here; MODEL is a module:callable that returns (module, inputs).",
        ),
    ] = False,
    worker: Annotated[
        Literal["cpu", "gpu"] | None,
        typer.Option(
            help="Where DGC compresses. Default: gpu; with --measure, where the model was timed."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000_000,
            help="Optimizer steps of your training. The line is then for this number.",
        ),
    ] = None,
    optimizer: Annotated[Literal["sgd", "adamw"], typer.Option(help="Your optimizer.")] = "sgd",
    sparsity: Annotated[
        float | None,
        typer.Option(
            help=f"Share of entries kept back. Default: of {', '.join(map(str, SPARSITIES))}, the lowest within "
            "2 % of the fastest that your number of steps allows."
        ),
    ] = None,
    value_bits: Annotated[
        int, typer.Option(help="Bits of a value, as in dgc.Config: 1, 2, 4, 8, 16 or 32.")
    ] = Config.value_bits,
    clips: Annotated[
        bool,
        typer.Option(
            "--clips",
            help=(
                "Gradients are clipped by their norm, or scaled by a GradScaler: then DGC's exchanges begin after the "
                "backward pass."
            ),
        ),
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="The table also has the hierarchical exchanges.")
    ] = False,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Also a table by the number of workers.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Says whether DGC pays, and with which line.

    It predicts the time of a step of a model on a cluster, and measures nothing.

    \b
    ResNet-50 on 4 machines and Gigabit Ethernet, at 0.25 s a step:
      dgc plan resnet50 --nodes 4 --network 1gbit --compute 0.25

    \b
    64 machines of 4 GPUs:
      dgc plan bert-large --nodes 64 --gpus 4 --network 10gbit --compute 0.36

    \b
    Your own model, timed here (build() in resnet.py returns model, (batch,)):
      dgc plan resnet:build --measure --network 40gbit,15us

    \b
    Numbers for a script:
      dgc plan gpt2 --compute 0.25 --json | jq .advice.pays
    """
    importable(model)
    with usage("MODEL"), aside(as_json):
        loaded = load(model)
    with usage("--network"):
        between = link(network, NETWORKS)
    with usage("--inside"):
        within = link(inside, INSIDE)
    with usage("--sparsity"):
        config = None if sparsity is None else Config(sparsity)
    with usage("--value-bits"):
        Config(value_bits=value_bits)
    if (compute is None) != measure:
        raise typer.BadParameter(
            "one of --compute SECONDS and --measure must be given, got "
            f"{'neither' if compute is None else 'both'}"
        )
    if compute is None:
        with usage("--measure"), aside(as_json):
            compute = timed(loaded)
    local = LOCAL[worker or ("cpu" if measure and not torch.cuda.is_available() else "gpu")]
    cluster = Cluster(nodes, gpus, between, within)
    overlap: Overlap = "dense" if clips else True
    with usage("--compute"):
        advice = advise(
            loaded.shapes, cluster, compute, config, local, overlap, steps, optimizer, value_bits
        )
    rows = (
        {
            on.workers: [
                predict(loaded.shapes, on, m, compute, advice.config, local, overlap) for m in MAIN
            ]
            for on in by_workers(cluster)
        }
        if scaling
        else {}
    )
    if as_json:
        _print_json(model, loaded.numel, advice, rows)
        return
    _say(verdict(advice))
    if advice.pays:
        print(f"\nFor {fits(advice)}:\n")
        _say(advice.line, "  ", "    ")
    print()
    for heading, text in notes(advice).items():
        _say(text, f"{heading:<10}", " " * 10)
    print()
    _say(
        f"{model}, {loaded.numel:,} parameters in float32, {nodes} x {gpus} workers, "
        f"{bits(between.bandwidth)} between machines, DGC at {100 * advice.sparsity:g} %:"
    )
    console().print(_methods(advice, every))
    if scaling:
        print("\nScaling efficiency in % by the number of workers:")
        console().print(_by_workers(rows))


def _print_json(model: str, numel: int, advice: Advice, rows: dict[int, list[Prediction]]) -> None:
    """All of it, but for the config of the predictions: the line is what is advised."""
    told = {key: value for key, value in asdict(advice).items() if key != "config"}
    report = {
        "model": model,
        "parameters": numel,
        "verdict": verdict(advice),
        "notes": notes(advice),
        "advice": {**told, "line": advice.line if advice.pays else None},
        "scaling": {n: [asdict(p) for p in row] for n, row in rows.items()},
    }
    print(json.dumps(report, indent=1, default=str))


def _say(text: str, first: str = "", indent: str = "") -> None:
    """Prints a paragraph, broken at the terminal's width; a number and its unit, an option and its
    value stay together.
    """
    whole = re.sub(r"(\d|--\w+) (?=\w|%)", "\\1\N{NO-BREAK SPACE}", text)
    lines = textwrap.fill(
        whole,
        console().width - 1,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    print(lines.replace("\N{NO-BREAK SPACE}", " "))


def _methods(advice: Advice, every: bool) -> Table:
    best = (advice.dense.method, advice.dgc.method)
    table = Table(box=None, pad_edge=False)
    table.add_column("method")
    for column in (
        "step\n(ms)",
        "efficiency\n(%)",
        "exchange\n(ms)",
        "machine's\nport",
        "worker's\nmessage",
    ):
        table.add_column(column, justify="right", overflow="fold")
    for p in advice.here:
        if every or p.method in MAIN or p.method in best:
            table.add_row(
                str(p.method),
                f"{1e3 * p.step_seconds:,.1f}",
                f"{100 * p.efficiency:.1f}",
                f"{1e3 * p.exchange_seconds:,.1f}",
                size_of(p.port_bytes),
                size_of(p.message_bytes),
                style="bold" if p.method in best else "",
            )
    return table


def _by_workers(rows: dict[int, list[Prediction]]) -> Table:
    table = Table("workers", box=None, pad_edge=False)
    for method in MAIN:
        table.add_column(str(method), justify="right")
    for workers, predictions in rows.items():
        table.add_row(f"{workers:,}", *(f"{100 * p.efficiency:.3g}" for p in predictions))
    return table


def link(text: str, presets: dict[str, Link]) -> Link:
    """A preset's, or that of ``40gbit,15us``: bits a second and microseconds; 50 of them if none
    are given.

    Raises:
        ValueError: it is neither.
    """
    name = text.strip()
    if name.lower() in presets:
        return presets[name.lower()]
    found = RATE.fullmatch(name)
    if not found or not float(found[1]):
        raise ValueError(
            f"a link must be {', '.join(presets)}, or a rate in bits a second such as 2.5gbit or 300mbit, "
            f"and a latency if it is not 50us, as in 40gbit,15us; got {text!r}"
        )
    rate, unit, latency, small = found.groups()
    return Link(
        float(latency or 50) / (1e3 if small == "m" else 1e6), float(rate) * UNITS[unit.lower()]
    )


# -- schedule ----------------------------------------------------------------------------------------------------------


def schedule(
    expression: Annotated[str, typer.Argument(metavar="EXPR", help="See the examples.")],
    steps_per_epoch: Annotated[
        int, typer.Option(min=1, help="Optimizer steps in one epoch.")
    ] = 100,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Epochs to show. Default: {EPOCHS}, until the schedule has ended, or all of warmup:steps=N.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="The model whose bytes are counted, as for dgc plan.")
    ] = "resnet50",
    workers: Annotated[
        int,
        typer.Option(
            min=2, help="Number of workers. With many, dense is fewer bytes early in a warm-up."
        ),
    ] = 4,
    as_json: Json = False,
) -> None:
    """Shows what a schedule sends.

    That is: the sparsity, the bytes of a step, and the bytes so far beside dense training's.

    \b
    The paper's warm-up:
      dgc schedule warmup:epochs=4,end=0.999 --steps-per-epoch 391 --epochs 164

    \b
    Others:
      dgc schedule warmup:steps=20000
      dgc schedule 0.999
      dgc schedule warmup:epochs=4,per_step=true
      dgc schedule warmup:epochs=0.6,stages=4
      dgc schedule piecewise:0=0.75,1000=0.999
      dgc schedule dense_until:1000,then=0.99

    Bytes are those of one worker over all-gather, as optimizer.report() counts them. The network decides
    what an adaptive schedule sends: show one of its bounds.
    """
    with usage("EXPR"):
        chosen = schedules.parse(expression, steps_per_epoch)
        if isinstance(chosen, schedules.Adaptive):
            raise ValueError(
                f"the schedule must be known beforehand, got {expression!r}, which goes by the network's "
                f"speed (show one of its bounds, {chosen.least:g} and {chosen.most:g})"
            )
    importable(model)
    with usage("--model"), aside(as_json):
        loaded = load(model)
    steps = _steps_shown(expression, chosen, steps_per_epoch, epochs)
    if steps > MAX_STEPS:
        raise typer.BadParameter(
            f"--epochs times --steps-per-epoch must be at most {MAX_STEPS:,}, got {steps:,} "
            "(give a smaller --epochs)"
        )
    values = [chosen(step) for step in range(steps)]
    sent = {value: _sent(loaded.shapes, value, workers) for value in set(values)}
    dense, totals = dense_bytes(loaded.numel, workers), accumulate(sent[value] for value in values)
    rows = [
        {
            "step": step,
            "sparsity": values[step],
            "bytes": sent[values[step]],
            "total_bytes": total,
            "of_dense": total / (dense * (step + 1)),
        }
        for step, total in enumerate(totals)
    ]
    if as_json:
        print(
            json.dumps(
                {
                    "expression": expression,
                    "schedule": repr(chosen),
                    "model": model,
                    "workers": workers,
                    "dense_bytes": dense,
                    "steps": rows,
                },
                indent=1,
            )
        )
        return
    _say(f"{expression}: {model} in float32, {workers} workers, all-gather, {steps:,} steps")
    console().print(_schedule_table(rows, dense))
    total = rows[-1]["total_bytes"]
    _say(
        f"{size_of(total)} in all, {dense * steps / total:,.1f} times fewer than {size_of(dense * steps)} of dense "
        "float32."
    )


def _steps_shown(
    expression: str,
    chosen: schedules.Piecewise | schedules.Ramp,
    steps_per_epoch: int,
    epochs: int | None,
) -> int:
    if epochs is not None:
        return epochs * steps_per_epoch
    # warmup:steps=N is for a training of N steps.
    if whole := re.search(r"\bsteps=(\d+)", expression):
        return int(whole[1])
    last = chosen.steps if isinstance(chosen, schedules.Ramp) else max(chosen.steps)
    return max(EPOCHS, math.ceil(1.25 * last / steps_per_epoch)) * steps_per_epoch


def _sent(shapes: tuple[Shape, ...], sparsity: float, workers: int) -> float:
    """Bytes that a worker sends in a step."""
    alone = Cluster(workers, 1, NETWORKS["1gbit"], INSIDE["pcie"])
    return predict(shapes, alone, GATHER, 1.0, Config(sparsity)).port_bytes


def _schedule_table(rows: list[dict[str, Any]], dense: float) -> Table:
    shown = [
        row
        for row in rows
        if row["step"] == 0 or row["sparsity"] != rows[row["step"] - 1]["sparsity"]
    ]
    if len(shown) > ROWS:
        shown = [shown[i * (len(shown) - 1) // (ROWS - 1)] for i in range(ROWS)]
    if shown[-1] is not rows[-1]:
        shown.append(rows[-1])
    table = Table(box=None, pad_edge=False)
    for column in (
        "from step",
        "sparsity",
        "bytes\na step",
        "fewer\nthan dense",
        "so far,\nof dense",
    ):
        table.add_column(column, justify="right")
    table.add_column("a step, of dense")
    for row in shown:
        table.add_row(
            f"{row['step']:,}" + (" (end)" if row is rows[-1] and len(rows) > 1 else ""),
            f"{100 * row['sparsity']:.6g} %",
            size_of(row["bytes"]),
            f"{dense / row['bytes']:,.1f} x",
            f"{100 * row['of_dense']:.3g} %",
            "█" * max(1, round(24 * row["bytes"] / dense)),
        )
    return table
