"""The tables of all.py, in Markdown, and the figure: from the results alone."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import cifar10
import figures
import job
import report

import dgc
from crowd import train
from crowd.exchange import Exchange
from dgc import cost

Result = dict[str, Any]
Seeds = dict[int, Result]


def key(result: Result) -> tuple[Any, ...]:
    """What tells a row: all but workers and seed."""
    s = result["settings"]
    wide = 0 if s["exchange"] in ("dense", "allgather") else s["wide"]
    return s["exchange"], wide, s["sparsity"], s["prepay"], s["factor_masking"]


def title(row: tuple[Any, ...]) -> str:
    exchange, wide, _, prepay, masked = row
    names = {"dense": "dense", "allgather": "all-gather", "reduce": f"reduce, {wide} k and {wide} k",
             "mean": f"the bound: the mean's largest {wide} k"}
    return names[exchange] + (", prepaid" if prepay else "" if masked else ", without masking")


def of_exchanges(results: list[Result]) -> str:
    """Exchange -> workers: each seed's accuracy, and the mean difference to the all-gather's same seeds; and the bytes
    that a worker of 64 sends in a step after the warm-up, in messages of an all-gather.
    """
    found: dict[tuple[Any, ...], dict[int, Seeds]] = {}
    for r in sorted(results, key=lambda r: r["settings"]["seed"]):
        found.setdefault(key(r), {}).setdefault(r["settings"]["workers"], {})[r["settings"]["seed"]] = r
    crowds = sorted({r["settings"]["workers"] for r in results})
    order = ["dense", "allgather", "reduce", "mean"]
    rows = []
    for row in sorted(found, key=lambda row: (order.index(row[0]), row[3], row[1])):
        base = found.get(("allgather", 0, row[2], False, True), {})
        cells = []
        for n in crowds:
            seeds = found[row].get(n, {})
            pairs = [r["accuracy"] - base[n][seed]["accuracy"] for seed, r in seeds.items() if seed in base.get(n, {})]
            apart = f", {statistics.mean(pairs):+.2f}" if pairs and found[row] is not base else ""
            cells.append(", ".join(f"{r['accuracy']:.2f}" for r in seeds.values()) + (f" %{apart}" if seeds else ""))
        rows.append([title(row), *cells, messages(row, crowds[-1]) if row[0] in ("allgather", "reduce") else ""])
    return report.markdown(["", *(f"{n} workers" for n in crowds), f"messages that one of {crowds[-1]} sends"], rows)


def messages(row: tuple[Any, ...], workers: int) -> str:
    bucket = train.compressed(cifar10.resnet(20))
    sent, message = (Exchange(bucket, n, kind, row[2], row[1]).nbytes
                     for n, kind in ((workers, row[0]), (2, "allgather")))
    return f"{sent / message:.1f}"


def of_bytes(results: list[Result], figure: Path | None = None) -> str:
    """Exchange, sparsity and momentum: accuracies, the mean difference to dense training's same seeds, and bytes."""
    found: dict[tuple[Any, ...], Seeds] = {}
    for r in sorted(results, key=lambda r: r["settings"]["seed"]):
        found.setdefault(key(r), {})[r["settings"]["seed"]] = r
    dense = next((seeds for row, seeds in found.items() if row[0] == "dense"), dict[int, Result]())
    if not dense:
        return ""
    whole, rows, points = nbytes(dense[min(dense)]), [], dict[str, dict[float, tuple[float, float]]]()
    for row in sorted(found, key=lambda row: (row[0] != "dense", row[0], -row[2], row[3])):
        seeds = found[row]
        pairs = [r["accuracy"] - dense[seed]["accuracy"] for seed, r in seeds.items() if seed in dense]
        less, sent = statistics.mean(pairs) if pairs else math.nan, nbytes(seeds[min(seeds)])
        shown = ", ".join(f"{r['accuracy']:.2f}" for r in seeds.values())
        rows.append([title((row[0], 3, *row[2:])), f"{100 * row[2]:.5g} %" if row[0] != "dense" else "", f"{shown} %",
                     f"{less:+.2f}" if row[0] != "dense" else "", f"{sent:,.0f}", f"{whole / sent:.1f} x"])
        if row[3]:
            name = title((row[0], 3, row[2], False, True)).partition(",")[0]
            points.setdefault(name, {})[row[2]] = whole / sent, less
    if figure:
        figures.by_bytes("validation accuracy", points, figure, "A dot is a sparsity, prepaid, the mean of its seeds")
    return report.markdown(["", "sparsity", "accuracy", "to dense", "bytes a step", "compression"], rows)


def nbytes(result: Mapping[str, Any]) -> float:
    """That a worker sends in a step, the mean over all of training."""
    s, steps = train.options(result["settings"]), result["steps_per_epoch"]
    model = cifar10.resnet(20)
    bucket, n = train.compressed(model), sum(p.numel() for p in model.parameters())
    if s.exchange == "dense":
        return cost.port_bytes(cost.ring(4 * n, s.workers, 1))
    config = dgc.Config(job.schedule(s, steps, s.warmup_epochs))
    sparsities = [config.sparsity_at(step) for step in range(s.epochs * steps)]
    of = {x: Exchange(bucket, s.workers, s.exchange, x, s.wide).nbytes for x in set(sparsities)}
    rest = cost.port_bytes(cost.ring(4 * (n - bucket.numel), s.workers, 1))
    return rest + statistics.mean(of[x] for x in sparsities)


def tables(results: Mapping[str, Result], figure: Path | None = None) -> str:
    """Both, of what is done."""
    torch.manual_seed(0)
    few = [r for name, r in results.items() if name.startswith("many")]
    rest = [r for name, r in results.items() if not name.startswith("many")]
    return "\n\n".join([*([of_exchanges(rest)] if rest else []), *([of_bytes(few, figure)] if few else [])])
