"""Predictions of ``dgc plan`` beside what benchmarks/network.py measured.

    python benchmarks/validate_plan.py --out benchmarks/results/plan.json

The hosts of those measurements share the cores of one machine, so the wire is not all that counts. What the model is
told of the machine, and from where:

    rate                     the nominal one, to which the links were shaped
    latency                  that of the preset for 1 Gbit/s Ethernet; the links have no delay of their own
    seconds a byte copied    fitted to torch-dense, ResNet-50 at 1 Gbit/s
    seconds to agree         (Horovod, on each bucket) fitted to dgc-horovod, ResNet-50 at 1 Gbit/s
    seconds a float16        (to round and to add one) fitted to torch-fp16, ResNet-50 at 1 Gbit/s, and once more
                             to horovod-fp16, as Horovod is slow at it on CPUs
    compressing an entry     fitted to dgc-torch, ResNet-50 at 1 Gbit/s: the hosts share the memory, too, whose speed
                             decides; alone on a core it is what compress.py measures. Decoding one: by receive.py
    compute of a step        fitted to dgc-torch, training ResNet-110-wide at 1 Gbit/s

All but the first two and the compute take hosts / cores as long where there are more hosts than cores. The cells fitted
to are at 4 hosts. All others are predicted, and the median of their errors is what counts. PowerSGD is not modelled.
The defaults of ``dgc plan`` are for float16 as DistributedDataParallel has it, so Horovod's is not compared with them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import gradients
import typer
from outfile import Out, write
from rich.console import Console
from rich.table import Table

from dgc import plan
from dgc.plan import Local, Method, Shape
from dgc.plan.cost import Cluster, Link

RESULTS = Path(__file__).parent / "results"
ACCEPTED = 0.2  # median error
METHODS = {
    "horovod-fp32": Method("ring", "float32"),
    "torch-dense": Method("ring", "float32"),
    "horovod-fp16": Method("ring", "float16"),
    "torch-fp16": Method("ring", "float16"),
    "dgc-horovod": Method("allgather", "dgc"),
    "dgc-torch": Method("allgather", "dgc"),
}
FITS = {
    "copying": ("1gbit", "resnet50", "torch-dense"),
    "compress": ("1gbit", "resnet50", "dgc-torch"),
    "start": ("1gbit", "resnet50", "dgc-horovod"),
    "convert": ("1gbit", "resnet50", "torch-fp16"),
    "horovod_convert": ("1gbit", "resnet50", "horovod-fp16"),
    "compute": ("1gbit", "resnet110-wide", "dgc-torch"),
}

Cell = dict[str, Any]


SHAPES: dict[str, Callable[[], list[Shape]]] = {
    "resnet50": gradients.resnet50,
    "lstm": gradients.lstm,
    "resnet110-wide": partial(gradients.resnet110, last=256),
}


def cells(files: list[Path]) -> list[Cell]:
    """What was measured, of what is modelled."""
    found = []
    for file in files:
        run = json.loads(file.read_text())
        if run.get("benchmark") != "network":
            continue
        if run["options"]:
            print(
                f"{file.name} is left out: {', '.join(sorted(run['options']))} is not modelled here"
            )
        else:
            found += [
                {
                    **case,
                    "file": file.name,
                    "hosts": run["hosts"],
                    "cores": run["machine"]["cores"],
                    "options": run["options"],
                    "bits": run["buckets"][case["rate"]]["bits"],
                }
                for case in run["cases"]
                if case["method"] in METHODS and case["model"] in SHAPES
            ]
    return found


def predicted(cell: Cell, machine: dict[str, float]) -> float:
    """Seconds of a cell's step."""
    sharing = max(1.0, cell["hosts"] / cell["cores"])
    link = Link(plan.NETWORKS["1gbit"].latency, cell["bits"] / 8, sharing * machine["copying"])
    over_horovod = "horovod" in cell["method"]
    local = Local(
        sharing * machine["compress"],
        sharing * machine["receive"],
        sharing * machine["horovod_convert" if over_horovod else "convert"],
        sharing * machine["start"] * over_horovod,
        sharing * Local().round,
    )
    shapes = tuple(SHAPES[cell["model"]]())
    compute = machine["compute"] if cell["model"].startswith("resnet110") else 0.0
    return plan.predict(
        shapes, Cluster(cell["hosts"], 1, link, link), METHODS[cell["method"]], compute, local=local
    ).step_seconds


def by_default(cell: Cell) -> float:
    """The same, as ``dgc plan`` has it for a cell without computation."""
    cluster = Cluster(
        cell["hosts"],
        1,
        Link(plan.NETWORKS["1gbit"].latency, cell["bits"] / 8),
        plan.INSIDE["pcie"],
    )
    return plan.predict(
        tuple(SHAPES[cell["model"]]()), cluster, METHODS[cell["method"]], 0.0
    ).step_seconds


def fitted(measured: list[Cell], machine: dict[str, float]) -> list[Cell]:
    """Sets what is fitted, one after the other, and returns the cells that it was fitted to."""
    used = []
    for name, key in FITS.items():
        cell = next(
            (
                c
                for c in measured
                if (c["rate"], c["model"], c["method"]) == key
                and c["hosts"] == 4
                and not c["options"]
            ),
            None,
        )
        if cell is None:
            raise SystemExit(
                f"validate_plan.py: no measurement of {', '.join(key)} with 4 hosts to fit {name} to"
            )
        low, high = 0.0, 10.0
        for _ in range(100):  # the step's time grows with each of them
            machine[name] = (low + high) / 2
            low, high = (
                (low, machine[name])
                if predicted(cell, machine) > cell["median_seconds"]
                else (machine[name], high)
            )
        used.append(cell)
    return used


def main(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Of network.py, one machine's; default: those in results/."),
    ] = None,
    out: Out = None,
) -> None:
    """Prints prediction, measurement and error; ends with status 1 if the median error is above 20 %."""
    measured = cells(files or sorted(RESULTS.glob("network*.json")))
    receive = json.loads((RESULTS / "receive.json").read_text())["ns_per_entry"]
    machine = {"receive": 1e-9 * receive, **dict.fromkeys(FITS, 0.0)}
    used = fitted(measured, machine)
    table = Table("file", "hosts", "rate", "model", "method", "measured", "predicted", "error", "")
    rows = []
    for cell in measured:
        seconds = predicted(cell, machine)
        rows.append(
            {key: cell[key] for key in ("file", "hosts", "rate", "model", "method", "options")}
            | {
                "measured": cell["median_seconds"],
                "predicted": seconds,
                "fitted": cell in used,
                "error": seconds / cell["median_seconds"] - 1,
            }
        )
    for r in rows:
        table.add_row(
            r["file"],
            str(r["hosts"]),
            r["rate"],
            r["model"],
            r["method"],
            f"{1e3 * r['measured']:,.0f} ms",
            f"{1e3 * r['predicted']:,.0f} ms",
            f"{100 * r['error']:+.1f} %",
            "fitted" if r["fitted"] else "",
        )
    Console(width=140).print(table)
    errors = [abs(r["error"]) for r in rows if not r["fitted"]]
    median = statistics.median(errors)
    for name, value in machine.items():
        print(f"{name}: {value:.3g} s")
    print(
        f"{len(errors)} cells predicted: median error {100 * median:.1f} %, largest {100 * max(errors):.1f} %; "
        f"hosts: {sorted({r['hosts'] for r in rows})}, rates: {sorted({r['rate'] for r in rows})}"
    )
    convert = used[list(FITS).index("convert")]
    alone = [
        cell
        for cell in measured
        if not cell["model"].startswith("resnet110")
        and cell is not convert
        and cell["method"] != "horovod-fp16"
    ]
    compressed = [cell for cell in alone if METHODS[cell["method"]].kind == "dgc"]
    plain = {
        kind: [
            abs(by_default(cell) / cell["median_seconds"] - 1)
            for cell in alone
            if (cell in compressed) == (kind == "dgc")
        ]
        for kind in ("dense", "dgc")
    }
    longer = {
        hosts: [
            cell["median_seconds"] / by_default(cell)
            for cell in compressed
            if cell["hosts"] == hosts
        ]
        for hosts in sorted({cell["hosts"] for cell in compressed})
    }
    every = [*plain["dense"], *plain["dgc"]]
    defaults = {
        "cells": len(every),
        "median_error": statistics.median(every),
        "largest_error": max(every),
        "median_error_dense": statistics.median(plain["dense"]),
        "median_error_dgc": statistics.median(plain["dgc"]),
        "dgc_longer": {str(hosts): [min(times), max(times)] for hosts, times in longer.items()},
    }
    print(
        f"{len(every)} cells of exchanges alone, with the defaults of dgc plan: median error "
        f"{100 * defaults['median_error']:.1f} % ({100 * defaults['median_error_dense']:.1f} % of the dense ones, "
        f"{100 * defaults['median_error_dgc']:.1f} % of DGC's), largest {100 * defaults['largest_error']:.1f} %"
    )
    for hosts, (least, most) in defaults["dgc_longer"].items():
        print(
            f"{hosts} hosts: DGC took {least:.1f} to {most:.1f} times as long as these defaults say"
        )
    if out:
        write(
            out, {"machine": machine, "cells": rows, "median_error": median, "defaults": defaults}
        )
    raise SystemExit(int(median > ACCEPTED))


if __name__ == "__main__":
    typer.run(main)
