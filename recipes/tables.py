"""The tables and figures of what has been run, from the results alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import figures
import report
from experiments import (
    MAIN,
    ROWS,
    WORKERS,
    Budget,
    Run,
    Study,
    ablations,
    by_bytes,
    by_exchange,
    by_length,
    by_momentum,
    by_sparsity,
    by_warmup,
    by_workers,
    run,
)
from report import RECIPES, Result, Row
from rich.console import Console
from rich.markdown import Markdown

SOURCE = {
    "cifar10": "The paper's are of the authors' talk and, in brackets, of its table for ResNet-110.",
    "ptb": "The paper's are of the authors' talk.",
    "transformer": "The first tenth travels dense.",
}
POOLED = " between runs of one seed, with its 90 % interval (Student's, the variance pooled over the table)"
PAPER = {
    "dense": {4: 93.75, 8: 92.92, 32: 93.10},  # of ResNet-110, with these workers
    "topk": {4: 92.75, 8: 93.02, 32: 92.10},
    "dgc": {4: 93.87, 8: 93.28, 32: 93.18},
}


def is_result(file: Path) -> bool:
    """Of a recipe; others are no concern of the tables."""
    try:
        return "recipe" in json.loads(file.read_text())
    except ValueError:
        return True  # a broken one


def draw(budget: Budget, done: Mapping[str, Result]) -> None:
    """Tables to the screen and to Markdown, figures beside them, of what is done; what is missing is said."""
    if unknown := sorted(
        file.stem
        for file in budget.results.glob("*.json")
        if file.stem not in done and is_result(file)
    ):
        print(
            f"In no table, as no run of the plan has this name (report.py compares any files): {', '.join(unknown)}"
        )
    for study in (budget.cifar10, budget.ptb, budget.transformer):
        rows = [
            row_of(title, runs, done, paper)
            for runs, (title, _, paper) in zip(
                ablations(budget)[study.recipe].values(), ROWS[study.recipe].values(), strict=True
            )
        ]
        if not any(row.results for row in rows):
            print(f"No results of {study.name} yet", flush=True)
            continue
        recipe = RECIPES[study.recipe]
        texts = [f"**The parts.** {conditions(study, rows)}\n\n{report.ablation(recipe, rows)}"]
        figures.ablation(recipe, rows, budget.figures / f"{study.name}-ablation.png")
        curves = [
            done[run.name]
            for row in MAIN
            for run in ablations(budget)[study.recipe].get(row, {}).values()
            if run.name in done
        ]
        if curves:
            report.picture(curves, budget.figures / f"{study.name}.png")
        if study is budget.cifar10:
            texts += [
                draw_table(budget, done)
                for draw_table in (
                    draw_momentum,
                    draw_workers,
                    draw_sparsity,
                    draw_warmup,
                    draw_bytes,
                    draw_exchange,
                    draw_length,
                )
            ]
        path = budget.results / f"{study.name}.md"
        path.write_text("\n".join(filter(None, texts)))
        Console().print(Markdown(path.read_text()))
        print(f"{path}, and figures in {budget.figures}/{study.name}*.png", flush=True)


def conditions(study: Study, rows: list[Row]) -> str:
    """In words, from what the results say."""
    results = [result for row in rows for result in row.results.values()]
    made: dict[str, set[str]] = {}
    for machine in (result["machine"] for result in results):
        made.setdefault(f"{machine['device']}, torch {machine['torch']}", set()).add(
            machine.get("dgc", "a commit that was not recorded")
        )
    return (
        f"{study.title} on {' and '.join(sorted({result['dataset'] for result in results}))}, "
        f"{study.options['epochs']} epochs, {study.options['virtual_workers']} workers, "
        f"{100 * study.options['sparsity']:.5g} %, warm-up of {study.options['warmup_epochs']:g} epochs; "
        + "; ".join(
            f"{where}; dgc {' | '.join(sorted(commits))}" for where, commits in sorted(made.items())
        )
        + f". Differences to dense training are between runs of one seed, their 95 % interval is Student's. "
        f"{SOURCE[study.recipe]}"
    )


def draw_momentum(budget: Budget, done: Mapping[str, Result]) -> str:
    """A table for each length, and a figure of the shortest; or nothing."""
    runs, texts, first = by_momentum(budget), [], budget.lengths[0]
    for n, asked in runs.items():
        if not adds(budget, [at for line in asked.values() for at in line.values()], done):
            continue
        recipe, lines = RECIPES["cifar10"], by_seed(asked, done)
        if n == first:
            recipe = replace(recipe, title="validation accuracy")
            figures.differences(
                recipe, lines, budget.figures / f"{budget.cifar10.name}-momentum.png"
            )
        texts.append(
            f"{n} epochs, {'held-out training' if n == first else 'test'} images. {count(lines)} of "
            f"{count(asked)} runs.\n\n"
            + report.differences(
                "", lines, lambda x: f"{100 * x:.5g} %" if x else "", recipe, n == first
            )
        )
        ways = {way: line for way, line in lines.items() if way != "dense"}
        if n == first:
            texts.append(
                "The same, compared with the paper's masking.\n\n"
                + report.differences("", ways, lambda x: f"{100 * x:.5g} %", recipe, overall=True)
            )
    if not texts:
        return ""
    return (
        f"**What becomes of the momentum of an entry that is sent.** Means over seeds {named(budget.seeds[0])}; of the "
        f"shortest length's dense training and {100 * budget.cifar10.options['sparsity']:.5g} % over those of "
        f"{named(budget.deciding)} that are done. Learning rates and warm-ups in proportion to the length; in brackets "
        f"the difference to dense training{POOLED}.\n\n" + "\n".join(texts)
    )


def named(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def by_seed(
    runs: Mapping[str, Mapping[Any, Mapping[int, Run]]], done: Mapping[str, Result]
) -> report.BySeed:
    """Of those that are done, what was measured."""
    return {
        name: {
            x: {
                seed: report.measured(done[run.name])
                for seed, run in at.items()
                if run.name in done
            }
            for x, at in line.items()
        }
        for name, line in runs.items()
    }


def count(lines: Mapping[str, Mapping[Any, Mapping[int, Any]]]) -> int:
    return sum(len(at) for line in lines.values() for at in line.values())


def draw_workers(budget: Budget, done: Mapping[str, Result]) -> str:
    """The table, or nothing."""
    runs = by_workers(budget)
    if not adds(budget, runs.values(), done):
        return ""
    lines = {
        WORKERS[row]: {n: done.get(run.name) for n, run in line.items()}
        for row, line in runs.items()
    }
    paper = {WORKERS[row]: PAPER[row] for row in WORKERS}

    def cell(name: str, workers: float, result: Result | None) -> str:
        return f"{report.shown(result) if result else '-'} ({paper[name][int(workers)]:.2f})"

    return (
        f"**More workers**, each of batch 32, seed 0; in brackets the paper's, of ResNet-110 and 164 epochs. "
        f"{found(lines)}\n\n{report.grid('workers', lines, str, cell)}"
    )


def draw_sparsity(budget: Budget, done: Mapping[str, Result]) -> str:
    """The table and the figure, or nothing."""
    runs = by_sparsity(budget)
    if not adds(budget, runs.values(), done):
        return ""
    lines = {
        f"warm-up of {warmup:g}": {sparsity: done.get(run.name) for sparsity, run in line.items()}
        for warmup, line in runs.items()
    }

    def cell(name: str, sparsity: float, result: Result | None) -> str:
        return (
            f"{report.shown(result)} ({report.times(report.ratios(result)[0])})" if result else "-"
        )

    dense = done.get(run(budget.cifar10, "dense", 0).name)
    figures.sparsity(
        RECIPES["cifar10"],
        seeds_of_cells(budget, done),
        [
            done[run.name]
            for run in ablations(budget)["cifar10"]["dense"].values()
            if run.name in done
        ],
        budget.cifar10.options["sparsity"],
        budget.figures / f"{budget.cifar10.name}-sparsity.png",
    )
    return (
        f"**Sparsity and warm-up** in epochs, seed 0; in brackets the compression over all of training. "
        f"{f'Dense: {report.shown(dense)}. ' if dense else ''}{found(lines)}\n\n"
        f"{report.grid('sparsity', lines, lambda sparsity: f'{100 * sparsity:.5g} %', cell)}"
    )


def seeds_of_cells(
    budget: Budget, done: Mapping[str, Result]
) -> dict[float, dict[float, dict[int, Result]]]:
    """Epochs of warm-up -> sparsity -> seed -> result, of those that are done."""
    usual, more = budget.cifar10.options["sparsity"], by_warmup(budget)
    cells = {
        warmup: {x: more[warmup] if x == usual else {0: run} for x, run in line.items()}
        for warmup, line in by_sparsity(budget).items()
    }
    return {
        warmup: {
            x: {seed: done[run.name] for seed, run in seeds.items() if run.name in done}
            for x, seeds in line.items()
        }
        for warmup, line in cells.items()
    }


def draw_warmup(budget: Budget, done: Mapping[str, Result]) -> str:
    """The table, or nothing."""
    runs = by_warmup(budget)
    if not adds(budget, runs.values(), done):
        return ""
    lines = {
        "dense": {seed: run(budget.cifar10, "dense", seed) for seed in budget.seeds[0]},
        **{f"warm-up of {warmup:g}": at for warmup, at in runs.items()},
    }
    rows = [row_of(title, at, done) for title, at in lines.items()]
    return (
        f"**Warm-up** in epochs, at {100 * budget.cifar10.options['sparsity']:.5g} %.\n\n"
        f"{report.ablation(RECIPES['cifar10'], rows)}"
    )


def draw_length(budget: Budget, done: Mapping[str, Result]) -> str:
    """The table, or nothing."""
    runs, (epochs, warmup) = by_length(budget), budget.paper
    if not adds(budget, runs.values(), done):
        return ""
    rows = [row_of(title, at, done) for title, at in runs.items()]
    return (
        f"**The paper's length.** {budget.cifar10.title}, {epochs} epochs, warm-up of {warmup:g}, at "
        f"{100 * budget.cifar10.options['sparsity']:.5g} %.\n\n"
        f"{report.ablation(RECIPES['cifar10'], rows)}"
    )


def row_of(title: str, runs: Mapping[int, Run], done: Mapping[str, Result], paper: str = "") -> Row:
    return Row(
        title,
        {seed: done[run.name] for seed, run in runs.items() if run.name in done},
        len(runs),
        paper,
    )


def draw_exchange(budget: Budget, done: Mapping[str, Result]) -> str:
    """The table, or nothing."""
    runs, study = by_exchange(budget), budget.exchange
    lines = by_seed(runs, done)
    if not count(lines):
        return ""
    return (
        f"**Exchanges.** {study.title}, {study.options['epochs']} epochs, 128 images a step on any number of "
        f"workers, warm-up of {study.options['warmup_epochs']:g}; hierarchical: on machines of 4 workers, of 2 "
        f"where there are 4. Means over seeds {', '.join(map(str, budget.pair))}; in brackets the difference to "
        f"all-gather{POOLED}. {count(lines)} of {count(runs)} runs.\n\n"
        f"{report.differences('', lines, lambda n: f'{n} workers', RECIPES['cifar10'])}"
    )


def draw_bytes(budget: Budget, done: Mapping[str, Result]) -> str:
    """The table and the figure, or nothing."""
    runs, study, recipe = (
        by_bytes(budget),
        budget.many,
        replace(RECIPES["cifar10"], title="validation accuracy"),
    )
    lines = {
        name: {sparsity: done[run.name] for sparsity, run in line.items() if run.name in done}
        for name, line in runs.items()
    }
    dense, exchanges = (
        lines["dense"].get(0.0),
        {name: line for name, line in lines.items() if name != "dense" and line},
    )
    if dense is None or not exchanges:
        return ""
    points = {
        name: {
            sparsity: (report.ratios(result)[0], report.measured(result) - report.measured(dense))
            for sparsity, result in line.items()
        }
        for name, line in exchanges.items()
    }
    figures.by_bytes(
        recipe.title,
        points,
        budget.figures / f"{study.name}.png",
        "A dot is a sparsity, with one seed",
    )
    return (
        f"**Many workers, and few steps.** {study.title}, {study.options['virtual_workers']} workers of batch "
        f"{study.options['batch_size']}, {study.options['epochs'] * dense['steps_per_epoch']:,} steps, warm-up of "
        f"{study.options['warmup_epochs']:g} epochs, held-out training images, seed 0. "
        f"{sum(map(len, lines.values()))} of {sum(map(len, runs.values()))} runs.\n\n"
        + bytes_table(lines)
    )


def bytes_table(lines: Mapping[str, Mapping[float, Result]]) -> str:
    """Dense, or an exchange -> sparsity -> result, as a table."""
    dense = report.measured(lines["dense"][0.0])
    rows = [
        [
            name,
            f"{100 * sparsity:.5g} %" if sparsity else "",
            report.shown(result),
            f"{report.measured(result) - dense:+.2f}" if sparsity else "",
            f"{report.mean_bytes(result):,.0f}",
            *map(report.times, report.ratios(result)),
        ]
        for name, line in lines.items()
        for sparsity, result in line.items()
    ]
    heads = "sparsity", "validation accuracy", "to dense", "bytes a step", "compression"
    return report.markdown(["", *heads, "after warm-up"], rows)


def adds(budget: Budget, lines: Iterable[Mapping[Any, Run]], done: Mapping[str, Result]) -> bool:
    """Whether a table says more than that of the parts, with which it shares some runs."""
    parts = {
        run.name
        for rows in ablations(budget).values()
        for runs in rows.values()
        for run in runs.values()
    }
    return any(
        run.name in done and run.name not in parts for line in lines for run in line.values()
    )


def found(lines: Mapping[str, Mapping[float, Result | None]]) -> str:
    results = [result for line in lines.values() for result in line.values()]
    return f"{sum(result is not None for result in results)} of {len(results)} runs."
