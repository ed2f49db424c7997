"""The tables of all.py, in Markdown: from the results alone."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import cifar10
import job
import report

import dgc
from crowd import train
from crowd.exchange import Exchange
from dgc.collective import dense_bytes
from dgc.compression.residual import Residual

Result = dict[str, Any]
Seeds = dict[int, Result]


class Row(NamedTuple):
    """What tells a row of a table: all but workers and seed."""

    exchange: str
    wide: int  # 0 where there is no such choice
    sparsity: float
    masked: bool

    def __str__(self) -> str:
        names = {
            "dense": "dense",
            "allgather": "all-gather",
            "reduce": f"reduce, {self.wide} k and {self.wide} k",
            "mean": f"the bound: the mean's largest {self.wide} k",
        }
        return names[self.exchange] + ("" if self.masked else ", without masking")


def row_of(result: Result) -> Row:
    s = result["settings"]
    wide = 0 if s["exchange"] in ("dense", "allgather") else s["wide"]
    return Row(s["exchange"], wide, s["sparsity"], s["factor_masking"])


@cache
def network() -> tuple[Residual, int]:
    """What travels compressed of the network, and all of its entries."""
    model = cifar10.resnet(20)
    return train.compressed(model), sum(p.numel() for p in model.parameters())


def of_exchanges(results: list[Result]) -> str:
    """Exchange -> workers: each seed's accuracy, and the mean difference to the all-gather's same seeds; and the bytes
    that a worker of 64 sends in a step after the warm-up, in messages of an all-gather.
    """
    found: dict[Row, dict[int, Seeds]] = {}
    for r in sorted(results, key=lambda r: r["settings"]["seed"]):
        found.setdefault(row_of(r), {}).setdefault(r["settings"]["workers"], {})[
            r["settings"]["seed"]
        ] = r
    crowds = sorted({r["settings"]["workers"] for r in results})
    order = ["dense", "allgather", "reduce", "mean"]
    rows = []
    for row in sorted(found, key=lambda row: (order.index(row.exchange), row.wide)):
        base = found.get(Row("allgather", 0, row.sparsity, True), {})
        cells = []
        for n in crowds:
            seeds = found[row].get(n, {})
            pairs = [
                r["accuracy"] - base[n][seed]["accuracy"]
                for seed, r in seeds.items()
                if seed in base.get(n, {})
            ]
            apart = f", {statistics.mean(pairs):+.2f}" if pairs and found[row] is not base else ""
            cells.append(
                ", ".join(f"{r['accuracy']:.2f}" for r in seeds.values())
                + (f" %{apart}" if seeds else "")
            )
        rows.append(
            [
                str(row),
                *cells,
                messages(row, crowds[-1]) if row.exchange in ("allgather", "reduce") else "",
            ]
        )
    return report.markdown(
        ["", *(f"{n} workers" for n in crowds), f"messages that one of {crowds[-1]} sends"], rows
    )


def messages(row: Row, workers: int) -> str:
    bucket, _ = network()
    sent, message = (
        Exchange(bucket, n, kind, row.sparsity, row.wide).nbytes
        for n, kind in ((workers, row.exchange), (2, "allgather"))
    )
    return f"{sent / message:.1f}"


def of_bytes(results: list[Result]) -> str:
    """Exchange, sparsity and momentum: accuracies, the mean difference to dense training's same seeds, and bytes."""
    found: dict[Row, Seeds] = {}
    for r in sorted(results, key=lambda r: r["settings"]["seed"]):
        found.setdefault(row_of(r), {})[r["settings"]["seed"]] = r
    dense = next(
        (seeds for row, seeds in found.items() if row.exchange == "dense"), dict[int, Result]()
    )
    if not dense:
        return ""
    whole, rows = nbytes(dense[min(dense)]), []
    for row in sorted(
        found, key=lambda row: (row.exchange != "dense", row.exchange, -row.sparsity)
    ):
        seeds = found[row]
        pairs = [
            r["accuracy"] - dense[seed]["accuracy"] for seed, r in seeds.items() if seed in dense
        ]
        less, sent = statistics.mean(pairs) if pairs else math.nan, nbytes(seeds[min(seeds)])
        shown = ", ".join(f"{r['accuracy']:.2f}" for r in seeds.values())
        told = (
            ("", "") if row.exchange == "dense" else (f"{100 * row.sparsity:.5g} %", f"{less:+.2f}")
        )
        rows.append(
            [str(row), told[0], f"{shown} %", told[1], f"{sent:,.0f}", f"{whole / sent:.1f} x"]
        )
    return report.markdown(
        ["", "sparsity", "accuracy", "to dense", "bytes a step", "compression"], rows
    )


def nbytes(result: Mapping[str, Any]) -> float:
    """That a worker sends in a step, the mean over all of training."""
    s, steps = train.options(result["settings"]), result["steps_per_epoch"]
    bucket, n = network()
    if s.exchange == "dense":
        return dense_bytes(n, s.workers)
    config = dgc.Config(job.schedule(s, steps, s.warmup_epochs))
    sparsities = [config.sparsity_at(step) for step in range(s.epochs * steps)]
    of = {x: Exchange(bucket, s.workers, s.exchange, x, s.wide).nbytes for x in set(sparsities)}
    return dense_bytes(n - bucket.numel, s.workers) + statistics.mean(of[x] for x in sparsities)


def tables(results: Mapping[str, Result]) -> str:
    """All, of what is done."""
    many, length, rest = [], [], []
    for name, result in results.items():
        of = many if name.startswith("many") else length if name.startswith("length") else rest
        of.append(result)
    shown = [(of_exchanges, rest), (of_bytes, many), (of_bytes, length)]
    return "\n\n".join(table(of) for table, of in shown if of)
