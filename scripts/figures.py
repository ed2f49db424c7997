"""Writes the tables of Markdown pages anew, from the results that are committed. Nothing is trained or timed.

    python scripts/figures.py

A table stands in a page between two markers:

    <!-- figures: NAME -->
    <!-- end -->

NAME is a function of this file, with "-" for "_", that returns the table. An indented marker has an indented table.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
import experiments
import report
import reproduce
import tables
import wire
from crowd import table as crowd_table
from peers import clock, hidden, predict
from peers import steps as peers_steps
from peers import table as peers_table
from report import RECIPES, Result, markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    "README.md",
    "docs/**/*.md",
    "recipes/results/NOTES.md",
    "benchmarks/results/NOTES.md",
)
BLOCK = re.compile(r"^( *)<!-- figures: (\S+) -->\n.*?^ *<!-- end -->", re.DOTALL | re.MULTILINE)
BUDGET = experiments.BUDGETS["cpu"]
TABLES: dict[str, Callable[[], str]] = {}
SHOWN = {  # methods of benchmarks/network.py
    "horovod-fp32": "Horovod",
    "horovod-fp16": "Horovod, `Compression.fp16`",
    "torch-dense": "`DistributedDataParallel`",
    "torch-fp16": "`DistributedDataParallel`, float16 hook",
    "powersgd": "PyTorch's PowerSGD hook, rank 4",
    "dgc-horovod": "**DGC over Horovod**",
    "dgc-torch": "**DGC over `torch.distributed`**",
}


def table(function: Callable[[], str]) -> Callable[[], str]:
    """Makes a function's table known by the function's name."""
    TABLES[function.__name__.replace("_", "-")] = function
    return function


def fill(text: str) -> str:
    """A page's text with each of its tables as the results have it now."""

    def block(match: re.Match[str]) -> str:
        indent, name = match.groups()
        if name not in TABLES:
            raise SystemExit(f"NAME must be of {', '.join(sorted(TABLES))}, got {name!r}")
        lines = [f"<!-- figures: {name} -->", "", *TABLES[name]().splitlines(), "", "<!-- end -->"]
        return "\n".join(indent + line if line else "" for line in lines)

    return BLOCK.sub(block, text)


def pages() -> list[Path]:
    return sorted(page for pattern in PAGES for page in ROOT.glob(pattern))


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def read_all(folder: str) -> list[Any]:
    return [json.loads(file.read_text()) for file in sorted((RESULTS / folder).glob("*.json"))]


@cache
def trained() -> dict[str, Result]:
    """What recipes/reproduce.py has trained, by name."""
    return reproduce.finished(BUDGET)


def row(title: str, runs: Mapping[int, experiments.Run]) -> report.Row:
    return tables.row_of(title, runs, trained())


def parts(recipe: str) -> list[report.Row]:
    """The paper's parts one by one."""
    runs = experiments.ablations(BUDGET)[recipe]
    return [row(title, runs[name]) for name, (title, _, _) in experiments.ROWS[recipe].items()]


def scores(row: report.Row) -> dict[int, float]:
    """What was measured, by seed."""
    return {seed: report.measured(result) for seed, result in row.results.items()}


def mean(row: report.Row) -> str:
    unit = RECIPES[next(iter(row.results.values()))["recipe"]].unit
    return f"{statistics.mean(scores(row).values()):.2f}{unit}"


def compared(row: report.Row, dense: report.Row) -> str:
    """The mean difference to dense training, with its 95 % interval where there are two seeds or more."""
    if row is dense:
        return ""
    apart, half = report.difference(scores(row), scores(dense))
    interval = "" if math.isnan(half) else f" [{apart - half:+.2f}, {apart + half:+.2f}]"
    return f"{apart:+.2f}{interval}"


def fewer_bytes(row: report.Row) -> list[str]:
    """Beside dense training: in the whole training, and after the warm-up."""
    both = zip(*(report.ratios(result) for result in row.results.values()), strict=True)
    return [report.times(statistics.mean(ratio)) for ratio in both]


def compare(rows: list[report.Row]) -> str:
    """A table of means over seeds; the first row is of dense training."""
    measure = RECIPES[rows[0].results[0]["recipe"]].title
    return markdown(
        ["", "seeds", measure, "to dense [95 %]", "compression", "after warm-up"],
        [
            [
                row.title,
                str(len(row.results)),
                mean(row),
                compared(row, rows[0]),
                *fewer_bytes(row),
            ]
            for row in rows
        ],
    )


def short(number: float) -> str:
    return f"{number:,.1f}" if number < 10 else f"{number:,.0f}"


def percent(share: float) -> str:
    return f"{100 * share:.5g} %"


# -- what was trained: recipes/results ---------------------------------------------------------------------------------


def longer_warmup() -> report.Row:
    return row("DGC, warm-up of 4 epochs", experiments.by_warmup(BUDGET)[4.0])


@table
def cifar10() -> str:
    return compare([*parts("cifar10"), longer_warmup()])


@table
def ptb() -> str:
    return compare(parts("ptb"))


@table
def adamw() -> str:
    return compare(parts("transformer"))


@table
def local_steps() -> str:
    """AdamW: dense, DGC, and local steps."""
    dense, *_, dgc = parts("transformer")
    titles = {
        "all": "local steps, all entries",
        "1-16": "local steps, 1/16 of the entries",
    }
    ways = experiments.by_local_steps(BUDGET)
    table = compare([dense, dgc, *(row(titles[way], ways[way]) for way in titles)])
    return table.replace("after warm-up", "at the end")


@table
def length() -> str:
    """Points lost at 99.9 %, by the number of steps."""
    short = experiments.by_momentum(BUDGET)[BUDGET.lengths[0]]
    workers, many = experiments.by_workers(BUDGET), experiments.by_bytes(BUDGET)
    usual = BUDGET.cifar10.options["sparsity"]
    cells = [
        ("batches of 32", parts("cifar10")[0], parts("cifar10")[-1]),
        ("batches of 32", row("", short["dense"][0.0]), row("", short["masked"][usual])),
        ("batches of 8", row("", {0: many["dense"][0.0]}), row("", {0: many["all-gather"][usual]})),
        ("batches of 32", row("", {0: workers["dense"][32]}), row("", {0: workers["dgc"][32]})),
    ]
    lines = []
    for batch, dense, dgc in cells:
        n = count_steps(dgc)
        wait, told = f"{1 / (1 - usual) / n:.2f}", f"{dgc.results[0]['workers']}, {batch}"
        seeds, apart = str(len(dgc.results)), compared(dgc, dense).partition(" ")[0]
        lines.append([f"{n:,}", told, wait, seeds, apart])
    return markdown(["steps", "workers", "mean wait / steps", "seeds", "points to dense"], lines)


@table
def masking() -> str:
    """Accuracy of short trainings, by sparsity and ``factor_masking``."""
    lines = tables.by_seed(experiments.by_momentum(BUDGET)[BUDGET.lengths[0]], trained())
    names = {
        "dense": "dense",
        "masked": "`factor_masking=True`",
        "kept": "`factor_masking=False`",
    }
    named = {names[key]: line for key, line in lines.items()}
    return report.differences("", named, lambda x: percent(x) if x else "", RECIPES["cifar10"])


@table
def value_bits() -> str:
    """What values of 4 bits cost beside 16."""
    titles = {
        ("cifar10", 0.999): f"ResNet-20, CIFAR-10, {BUDGET.lengths[0]} epochs, validation accuracy",
        ("cifar10", 0.9977): "the same, 4 bits at 99.77 %: entries take as many bytes",
        ("ptb", 0.999): "LSTM, Penn Treebank, test perplexity",
    }
    lines = []
    for kind, of_bits in experiments.by_value_bits(BUDGET).items():
        few, usual = (row("", of_bits[bits]) for bits in (4, 16))
        both = few.results.keys() & usual.results.keys()
        if not both:
            continue
        usual, few = (
            replace(x, results={s: x.results[s] for s in sorted(both)}) for x in (usual, few)
        )
        pairs = report.paired(scores(few), scores(usual))
        half = report.half_width([pairs], 0.9)(len(pairs))
        apart = f"{statistics.mean(pairs):+.2f}" + ("" if math.isnan(half) else f" ± {half:.2f}")
        lines.append([titles[kind], str(len(both)), mean(usual), mean(few), apart])
    return markdown(["", "seeds", "16 bits", "4 bits", "difference (90 %)"], lines)


@table
def lost() -> str:
    """Points lost by SGD on CIFAR-10, by steps and sparsity."""
    dense, dgc = parts("cifar10")[0], parts("cifar10")[-1]
    short = experiments.by_momentum(BUDGET)[BUDGET.lengths[0]]
    base = row("", short["dense"][0.0])
    cells = [
        row("", short["masked"][0.999]),
        row("", short["masked"][0.99]),
        row("", short["kept"][0.9]),
    ]
    return markdown(
        ["steps", "99.9 %", "99 %", "90 %, no masking"],
        [
            [f"{count_steps(dgc):,}", points(dgc, dense), "", ""],
            [f"{count_steps(base):,}", *(points(cell, base) for cell in cells)],
        ],
    )


def points(row: report.Row, dense: report.Row) -> str:
    """How much lower than dense training."""
    return f"{-report.difference(scores(row), scores(dense))[0]:.1f}"


def count_steps(row: report.Row) -> int:
    result = row.results[0]
    return result["settings"]["epochs"] * result["steps_per_epoch"]


@table
def warmup() -> str:
    """Accuracy by the length of the warm-up at 99.9 %, and by sparsity with the usual warm-up."""
    usual = BUDGET.cifar10.options
    cells = [
        (usual["sparsity"], epochs, runs) for epochs, runs in experiments.by_warmup(BUDGET).items()
    ]
    for sparsity, run in experiments.by_sparsity(BUDGET)[usual["warmup_epochs"]].items():
        if sparsity != usual["sparsity"]:
            cells.append((sparsity, usual["warmup_epochs"], {0: run}))
    lines = []
    for sparsity, epochs, runs in cells:
        own = row("", runs)
        seeds = str(len(own.results))
        lines.append([percent(sparsity), f"{epochs:g}", seeds, mean(own), fewer_bytes(own)[0]])
    return markdown(
        ["sparsity", "epochs of warm-up", "seeds", "test accuracy", "compression"], lines
    )


@table
def many_workers() -> str:
    """Accuracy and bytes of 32 workers, by exchange and sparsity."""
    return tables.bytes_table(
        {
            name: {x: trained()[run.name] for x, run in line.items() if run.name in trained()}
            for name, line in experiments.by_bytes(BUDGET).items()
        }
    )


@table
def averaged_first() -> str:
    """Accuracy where machines average first, beside an all-gather and reduce."""
    lines = tables.by_seed(experiments.by_exchange(BUDGET), trained())
    names = {
        "all-gather": "all-gather",
        "hierarchical": "averaged first, machines of 4 (of 2 in the first column)",
        "reduce": "reduce",
    }
    chosen = {title: lines[name] for name, title in names.items()}
    return report.differences("", chosen, lambda n: f"{n} workers", RECIPES["cifar10"])


# -- what was timed: benchmarks/results --------------------------------------------------------------------------------


def cases(file: str, model: str) -> dict[str, Any]:
    """Method of benchmarks/network.py -> its case."""
    return {case["method"]: case for case in read(file)["cases"] if case["model"] == model}


def medians(file: str, model: str) -> dict[str, float]:
    """Method of benchmarks/network.py -> milliseconds."""
    return {method: 1e3 * case["median_seconds"] for method, case in cases(file, model).items()}


@table
def speed() -> str:
    """Of the README: a column for each method."""
    methods = {
        "horovod-fp32": "Horovod",
        "torch-fp16": "DDP, float16",
        "powersgd": "PowerSGD",
        "dgc-horovod": "DGC over Horovod",
        "dgc-torch": "DGC over `torch.distributed`",
    }
    models = {
        "resnet50": "exchange of ResNet-50's gradient",
        "resnet110-wide": "training step of a wide ResNet-110",
    }
    lines = []
    for model, title in models.items():
        own = medians("hosts4-1gbit", model)
        lines.append([title, *(f"{own[method]:,.0f} ms" for method in methods)])
    return markdown(["four hosts at 1 Gbit/s", *methods.values()], lines)


@table
def exchange() -> str:
    """By method; "x" is how many times as fast as Horovod's dense exchange."""
    columns = [
        medians("hosts4-1gbit", "resnet50"),
        medians("hosts4-100mbit", "resnet50"),
        medians("hosts4-1gbit", "resnet110-wide"),
    ]
    sent = {
        method: case["median_link_bytes"]
        for method, case in cases("hosts4-1gbit", "resnet50").items()
    }

    def cell(column: Mapping[str, float], method: str) -> str:
        ratio = column["horovod-fp32"] / column[method]
        return f"{column[method]:,.0f} ms" + (f", {ratio:.1f} x" if ratio != 1 else "")

    heads = "exchange at 1 Gbit/s", "exchange at 100 Mbit/s", "training step at 1 Gbit/s"
    return markdown(
        ["", *heads, "exchange: bytes that leave a host"],
        [
            [title, *(cell(column, method) for column in columns), f"{sent[method] / 1e6:,.1f} MB"]
            for method, title in SHOWN.items()
        ],
    )


@table
def two_rounds() -> str:
    """Milliseconds of an exchange of ResNet-50's gradient, by the number of hosts."""
    names = {
        "horovod-fp32": "Horovod, dense float32",
        "dgc-torch": "all-gather",
        "dgc-torch-reduce": "reduce",
    }
    files = {
        "4 hosts, 100 Mbit/s": "hosts4-100mbit",
        "8 hosts, 100 Mbit/s": "hosts8-100mbit",
        "4 hosts, 1 Gbit/s": "hosts4-1gbit-reduce",
        "8 hosts, 1 Gbit/s": "hosts8-1gbit",
    }
    columns = [medians(file, "resnet50") for file in files.values()]
    lines = [
        [title, *(f"{column[method]:,.0f}" for column in columns)]
        for method, title in names.items()
    ]
    return markdown(["", *files], lines)


def to_target(folder: str) -> str:
    """Seconds of benchmarks/peers/clock.py to the target, at each rate; the fastest at 100 Mbit/s first."""
    found: dict[str, dict[str, tuple[float, Any]]] = {}
    for seconds, run in clock.by_time(read_all(folder)):
        found.setdefault(run["title"], {})[run["rate"]] = seconds or float("nan"), run
    shown = [rate for rate in predict.NAMES if any(rate in rates for rates in found.values())]
    lines = []
    for title, rates in found.items():
        run = rates[shown[-1]][1]
        lines.append(
            [
                f"**{title}**" if title.startswith("DGC") else title,
                *(f"{rates[rate][0]:,.0f} s" for rate in shown),
                str(len(run["history"])),
                f"{run['bytes_sent'] / 1e6:,.0f} MB",
            ]
        )
    names = [predict.NAMES[rate] for rate in shown]
    return markdown(["", *names, "epochs", "sent in all"], lines)


@table
def clock_cifar10() -> str:
    return to_target("peers-clock")


@table
def clock_ptb() -> str:
    return to_target("peers-ptb-clock")


@table
def clock_transformer() -> str:
    return to_target("peers-transformer-clock")


@table
def first_epoch() -> str:
    """Of the LSTM at 100 Mbit/s, with DGC's warm-up: its time, what it learned, and the bytes sent."""
    runs = sorted(read_all("peers-ptb-first-epoch"), key=lambda run: run["history"][0]["seconds"])
    return markdown(
        ["", "first epoch", "validation perplexity", "sent"],
        [
            [
                run["title"],
                f"{run['history'][0]['seconds']:,.0f} s",
                f"{run['history'][0]['perplexity']:.1f}",
                f"{run['bytes_sent'] / 1e6:,.0f} MB",
            ]
            for run in runs
        ],
    )


@table
def learned() -> str:
    """What methods learn in as many steps, and the bytes that they send."""
    runs = peers_table.load(sorted((RESULTS / "peers").glob("*.json")))
    lines = [
        [
            row["title"],
            report.times(row["ratio"]),
            f"{row['score']:.2f} %",
            f"{-row['lost']:+.2f}" if row["lost"] else "",
        ]
        for row in peers_table.rows(runs)
    ]
    return markdown(["", "compression", "test accuracy", "points to dense"], lines)


@table
def crowd() -> str:
    """Accuracy of exchanges among 4, 16 and 64 workers, and the messages that one of 64 workers sends."""
    runs: dict[tuple[str, int], dict[int, dict[int, float]]] = {}
    for run in read_all("crowd"):
        told, name = run["settings"], crowd_table.row_of(run)
        if told["epochs"] == 10:  # the longer trainings have other batches
            line = runs.setdefault((name.exchange, name.wide), {})
            line.setdefault(told["workers"], {})[told["seed"]] = run["accuracy"]
    base = runs.pop(("allgather", 0))
    columns = sorted(base)
    pairs = {
        way: {n: report.paired(line.get(n, {}), base[n]) for n in columns}
        for way, line in runs.items()
    }
    means = [f"{statistics.mean(base[n].values()):.1f} %" for n in columns]
    lines = [["all-gather", *means, messages_of("allgather", 0)]]
    for title, way in {
        "reduce, k": ("reduce", 1),
        "reduce, 2 k": ("reduce", 2),
        "**reduce, 3 k, as in dgc**": ("reduce", 3),
        "reduce, 4 k": ("reduce", 4),
        "dense": ("dense", 0),
    }.items():
        apart = [f"{statistics.mean(pairs[way][n]):+.2f}" if pairs[way][n] else "" for n in columns]
        lines.append([title, *apart, "" if title == "dense" else messages_of(*way)])
    half = [report.half_width((line[n] for line in pairs.values()), 0.9)(2) for n in columns]
    lines.append(["uncertain by (90 %)", *(f"{width:.1f}" for width in half), ""])
    return markdown(["", *(f"{n} workers" for n in columns), "messages, of 64"], lines)


def messages_of(exchange: str, wide: int) -> str:
    return crowd_table.messages(crowd_table.Row(exchange, wide, sparsity=0.999, masked=True), 64)


@table
def steps() -> str:
    return peers_steps.markdown(peers_steps.rows(read("peers-measured")))


@table
def waits() -> str:
    return hidden.markdown(read("peers-hidden"))


@table
def work() -> str:
    """A rank's local work on CPUs, by size."""
    ways = "exact top-k (torch)", "sampled (torch)", "fused (numba)"
    rows = [row for row in read("compress")["rows"] if row["mode"] == "directly"]
    lines = []
    for numel in (25557032, 1000000, 25000000, 200000000):
        own = {row["method"]: row for row in rows if row["numel"] == numel}
        tensors = own[ways[0]]["tensors"]
        size = f"{numel / 1e6:.3g} M in {tensors} tensor{'s' * (tensors > 1)}"
        times = [f"{own[way]['ms']:,.1f} ms" for way in ways]
        lines.append([size, *times, f"{own[ways[-1]]['floor_ms']:.1f} ms"])
    return markdown(["entries", "`torch.topk`", "torch operations", "dgc", "memory's limit"], lines)


@table
def gpu() -> str:
    """To accumulate, select and take on a GPU."""
    ways = {
        "exact top-k (torch)": "`torch.topk`",
        "sampled (torch)": "torch operations",
        "kernels (Triton)": "dgc",
    }
    rows = read("gpu")["rows"]
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        own = {row["method"]: row for row in rows if row["case"] == case}
        times = [f"{own[way]['device_ms']:.2f} ms" for way in ways]
        lines.append([case, *times, f"{next(iter(own.values()))['floor_ms']:.2f} ms"])
    return markdown(["entries", *ways.values(), "memory's limit"], lines)


@table
def host() -> str:
    """What a step takes more than with the plain optimizer, where gradients are tiny."""
    cases = read("host")["cases"]
    lines = []
    for model in dict.fromkeys(case["model"] for case in cases):
        own = {case["method"]: case for case in cases if case["model"] == model}
        times = [f"{1e3 * own[name]['more_seconds']:.1f} ms" for name in ("Horovod", "DGC")]
        lines.append([f"{own['DGC']['parameters']}, as {model}", *times])
    return markdown(["parameters", "Horovod", "dgc over Horovod"], lines)


# -- what is computed --------------------------------------------------------------------------------------------------


@table
def step_length() -> str:
    """How far a step goes with masking, over plain SGD's."""
    ways = {x["sparsity"]: x["masking"] for x in read("noise")["way"]}
    chosen = (0.75, 0.9, 0.99, 0.999)
    return markdown(list(map(percent, chosen)), [[f"{ways[x]:.2f}" for x in chosen]])


@table
def messages() -> str:
    """What a worker sends of ResNet-50's gradient, in messages of an all-gather, by formula."""
    names = {
        "allgather": "all-gather",
        "reduce": "reduce",
        "hierarchical": "all-gather, machines of 4 workers",
        "hierarchical reduce": "reduce, machines of 4 workers",
        "dense": "dense ring in float32",
    }
    columns = [x for x in read("scaling")["resnet50_in_messages"] if x["workers"] <= 1024]
    lines = [
        [title, *(short(column[name]) if name in column else "" for column in columns)]
        for name, title in names.items()
    ]
    return markdown(["workers", *(f"{column['workers']:,}" for column in columns)], lines)


@table
def bits() -> str:
    """Bits of an entry of ResNet-50, of 4 bits a value."""
    shapes, value_bits = wire.models()["ResNet-50"], 4
    keys = "places", "values", "headers", "sum", "information"
    lines = []
    for sparsity in (0.75, 0.99, 0.999):
        own = wire.bits_of_entry(shapes, sparsity, value_bits)
        lines.append([percent(sparsity), *(f"{own[key]:.2f}" for key in keys)])
    return markdown(["sparsity", *keys[:-1], f"entropy + {value_bits}"], lines)


@table
def ratios() -> str:
    """The compression ratio as the paper counts it, by ``value_bits``."""
    bits, models = (16, 8, 4, 2), wire.models()
    lines = [
        [
            title,
            *(f"{wire.after_warmup(models[name], n)['as_the_paper_counts']:,.0f} x" for n in bits),
            paper,
        ]
        for name, title, paper in (
            ("ResNet-50", "ResNet-50", "277 x"),
            ("LSTM", "LSTM, 2 x 1500", "462 x"),
        )
    ]
    return markdown(["`value_bits`", *map(str, bits), "paper"], lines)


def main() -> None:
    for page in pages():
        text = page.read_text()
        if (filled := fill(text)) != text:
            page.write_text(filled)
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
