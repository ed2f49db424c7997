"""Results of a recipe side by side: a table, and a picture of the curves. And what ``reproduce.py`` makes of many runs.

python recipes/report.py recipes/results/cifar10-dense-0.json recipes/results/cifar10-dgc-0.json --out curves.png
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import cifar10
import job
import numpy as np
import ptb
import transformer
import typer
from rich.console import Console
from rich.table import Table

from dgc import drawing

Result = dict[str, Any]  # what a recipe's --out wrote


@dataclass(frozen=True)
class Recipe:
    main: Callable[..., None]
    config: Callable[[Any, int], Any]
    measure: str  # the key of what counts
    title: str  # of the table's column, where it is the last test
    curve: str  # the picture's title, where it is that of each epoch
    axis: str
    unit: str = ""
    scale: str = "linear"


RECIPES = {
    "cifar10": Recipe(
        cifar10.main,
        cifar10.config,
        "accuracy",
        "test accuracy",
        "test accuracy",
        "top-1 (%)",
        " %",
    ),
    "ptb": Recipe(
        ptb.main,
        ptb.config,
        "perplexity",
        "test perplexity",
        "validation perplexity",
        "perplexity",
        scale="log",
    ),  # lower is better
    "transformer": Recipe(
        transformer.main,
        transformer.config,
        "perplexity",
        "test perplexity",
        "validation perplexity",
        "perplexity",
        scale="log",
    ),
}
NAMES = {
    "dense": "dense",
    "fp16": "Horovod's fp16",
    "naive": "naive top-k",
    "topk": "gradient dropping",
}
PARTS = ("momentum_correction", "factor_masking", "local_clipping")  # that can be switched off
CONFIG = ("sparsity", "warmup_epochs", *PARTS)  # settings of which all is in the Config


def label(result: Result) -> str:
    chosen = result["settings"]
    if result["workers"] == 1:
        return "one worker"  # exchanges nothing
    if chosen["method"] != "dgc":
        return NAMES[chosen["method"]]
    without = [f", no {part.replace('_', ' ')}" for part in PARTS if not chosen.get(part, True)]
    without += [", no warm-up"] if chosen.get("warmup_epochs") == 0 else []
    kept = chosen["sparsity"]
    return f"DGC {kept if isinstance(kept, str) else f'{100 * kept:.5g} %'}{''.join(without)}"


def names(groups: list[list[Result]]) -> list[str]:
    """Of groups of runs, as :func:`by_settings` makes them: the label, and in what else those of its method differ."""
    told = [
        {"workers": runs[0]["workers"], **complete(RECIPES[runs[0]["recipe"]], runs[0]["settings"])}
        for runs in groups
    ]

    def name(runs: list[Result], mine: dict[str, Any]) -> str:
        alike = [
            other for other in told if other["method"] == mine["method"] == "dgc" or other is mine
        ]
        differ = [
            key
            for key in mine
            if key not in ("seed", "virtual_workers", "sparsity", *PARTS)
            and any(other.get(key) != mine[key] for other in alike)
        ]
        if mine.get("warmup_epochs") == 0 and "warmup_epochs" in differ:
            differ.remove("warmup_epochs")  # the label has it
        said = {key: "by default" if mine[key] is None else mine[key] for key in differ}
        return ", ".join(
            [label(runs[0]), *(f"{key.replace('_', ' ')} {value}" for key, value in said.items())]
        )

    return [name(runs, mine) for runs, mine in zip(groups, told, strict=True)]


def settings(result: Result) -> Any:
    """The recipe's Config of a run; with Horovod's own methods, that of dense training."""
    recipe = RECIPES[result["recipe"]]
    return recipe.config(
        argparse.Namespace(**complete(recipe, result["settings"])), result["steps_per_epoch"]
    )


GONE = ("dense_dtype", "local_weight_decay", "prepay", "selection")  # of the recipes' options


def complete(recipe: Recipe, settings: Mapping[str, Any]) -> dict[str, Any]:
    """With the defaults of those that are lacking, as the recipe may not have had them at the time; and without options
    that are gone.
    """
    defaults = {
        key: option.default
        for key, option in inspect.signature(recipe.main).parameters.items()
        if key not in job.NO_SETTINGS
    }
    return defaults | {key: value for key, value in settings.items() if key not in GONE}


def measured(result: Result) -> float:
    """What counts: the accuracy in per cent, or the perplexity."""
    return result[RECIPES[result["recipe"]].measure]


def shown(result: Result) -> str:
    return f"{measured(result):.2f}{RECIPES[result['recipe']].unit}"


def mean_bytes(result: Result) -> float:
    """Bytes that a worker sends in a step, over all of training."""
    return float(np.mean([epoch["bytes_per_step"] for epoch in result["history"]]))


def ratios(result: Result) -> tuple[float, float]:
    """The bytes of dense training over those of this one: in all, warm-up included, and at its end; there not a number
    where the sparsity still changes in the last epoch.
    """
    nbytes = [epoch["bytes_per_step"] for epoch in result["history"]]
    epochs, steps, sparsity_at = (
        result["settings"]["epochs"],
        result["steps_per_epoch"],
        settings(result).sparsity_at,
    )
    settled = sparsity_at((epochs - 1) * steps) == sparsity_at((epochs + 1) * steps - 1)
    return tuple(
        result["dense_bytes_per_step"] / n if n else np.nan
        for n in (mean_bytes(result), min(nbytes) if settled else 0)
    )


def times(ratio: float) -> str:
    return "-" if np.isnan(ratio) else f"{ratio:,.1f} x"


# -- some runs ---------------------------------------------------------------------------------------------------------


def table(results: list[Result]) -> Table:
    """Bytes and step time are means over all of training, warm-up included; the ratio is also given for its end."""
    recipe, groups = RECIPES[results[0]["recipe"]], by_settings(results)
    name = {id(run): name for name, runs in zip(names(groups), groups, strict=True) for run in runs}
    out = Table(box=None, pad_edge=False)
    out.add_column("method", overflow="fold")
    for column in (
        "seed",
        "epochs",
        recipe.title.replace(" ", "\n"),
        "bytes\na step",
        "fewer\nbytes",
        "after\nwarm-up",
        "a step",
    ):
        out.add_column(column, justify="right", overflow="fold")
    for result in results:
        sent, seconds = (
            np.mean([epoch[key] for epoch in result["history"]])
            for key in ("bytes_per_step", "step_seconds")
        )
        out.add_row(
            name[id(result)],
            str(result["settings"]["seed"]),
            str(len(result["history"])),
            shown(result),
            f"{sent:,.0f}",
            *map(times, ratios(result)),
            f"{1000 * seconds:,.0f} ms",
        )
    return out


def picture(results: list[Result], out: Path) -> None:
    """Training loss, the share of entries sent, and what is measured, over the epochs. Runs that differ in nothing but
    their seed are one line, their mean, with a band from the lowest to the highest. Names are beside the last panel.
    """
    recipe, groups = RECIPES[results[0]["recipe"]], by_settings(results)
    figure, (loss, sent, measure) = drawing.panels(3)
    ends, lowest = [], 100.0
    titles = names(groups)
    for title, runs, colour in zip(titles, groups, colours(titles), strict=True):
        band(loss, *losses(runs), colour)
        epochs = [epoch["epoch"] for epoch in runs[0]["history"]]
        values = [[epoch[recipe.measure] for epoch in run["history"]] for run in runs]
        band(measure, epochs, values, colour)
        sent.step(*(shares := density(runs[0])), where="post", color=colour)
        lowest = min(lowest, *shares[1])
        ends.append((title, (epochs[-1], float(np.mean(values, 0)[-1])), colour))
    loss.set(xlabel="epoch", title="training loss of worker 0", ylim=(0, None), xlim=(0, None))
    measure.set(
        xlabel="epoch",
        title=f"{recipe.curve}{recipe.unit and f' ({recipe.unit.strip()})'}",
        xlim=(0, None),
        yscale=recipe.scale,
    )
    if recipe.scale == "log":
        drawing.log_axis(measure, "y", places(*measure.get_ylim()))
    drawing.log_axis(sent, "y", [10.0**n for n in range(math.floor(math.log10(lowest)), 3)])
    sent.set(xlabel="epoch", title="entries sent (%)", xlim=(0, None), ylim=(lowest / 1.4, 140))
    drawing.name_lines(measure, ends)
    drawing.save(figure, out)


def places(low: float, high: float) -> list[float]:
    """Of numbers on a logarithmic axis: few where it is long, and closer ones where it is short."""
    for marks in (
        (1, 1.5, 2, 3, 5, 7),
        [m / 10 for m in range(10, 100, 2)],
        [m / 100 for m in range(100, 1000, 2)],
    ):
        found = [m * 10.0**n for n in range(-3, 7) for m in marks if low <= m * 10.0**n <= high]
        if len(found) > 2:
            break
    return found[:: max(1, len(found) // 6)]


def by_settings(results: list[Result]) -> list[list[Result]]:
    """The runs that differ in nothing but their seed, together."""
    groups: list[tuple[Any, list[Result]]] = []
    for result in results:
        key = comes_to(result)
        found = next((runs for other, runs in groups if other == key), None)
        if found is None:
            groups.append((key, found := []))
        found.append(result)
    return [runs for _, runs in groups]


def comes_to(result: Result) -> tuple[Any, ...]:
    """What a run's settings are but for the seed, however they were said: its Config, whose schedule may be any
    function, and the settings beside it. Dense and naive have nothing pending to flush.
    """
    recipe, chosen = RECIPES[result["recipe"]], result["settings"]
    without = (*CONFIG, "seed", *(("flush",) if chosen["method"] in ("dense", "naive") else ()))
    rest = {key: value for key, value in complete(recipe, chosen).items() if key not in without}
    config, steps = settings(result), int(chosen["epochs"] * result["steps_per_epoch"])
    return (
        result["workers"],
        replace(config, sparsity=0.0),
        [config.sparsity_at(step) for step in range(steps)],
        rest,
    )


def colours(names: list[str]) -> list[str]:
    """Of each line: grey if it is dense, blue if it is the first of DGC, a muted one else."""
    others, blue = (
        itertools.cycle(drawing.MUTED),
        next((name for name in names if name.startswith("DGC")), None),
    )
    return [
        drawing.DENSE if name.startswith("dense") else drawing.DGC if name == blue else next(others)
        for name in names
    ]


def losses(runs: list[Result]) -> tuple[list[float], list[list[float]]]:
    """Of each epoch and run; where there are few epochs, also within them."""

    def fine(run: Result) -> list[tuple[float, float]]:
        return [
            (i + j / len(epoch["losses"]), value)
            for i, epoch in enumerate(run["history"])
            for j, value in enumerate(epoch.get("losses", []))
        ]

    few = len(runs[0]["history"]) < 5 and all(map(fine, runs))
    points = [
        fine(run) if few else [(epoch["epoch"], epoch["loss"]) for epoch in run["history"]]
        for run in runs
    ]
    return [x for x, _ in points[0]], [[y for _, y in line] for line in points]


def density(run: Result) -> tuple[list[float], list[float]]:
    """Epochs, and the percentage of entries that a step sends; one worker has nothing to keep back."""
    kept, n = settings(run), run["steps_per_epoch"]
    steps = range(len(run["history"]) * n)
    return [step / n for step in steps], [
        100 * (1 - kept.sparsity_at(step) * (run["workers"] > 1)) for step in steps
    ]


def band(axes: Any, places: Any, values: list[list[float]], colour: str) -> None:
    """The mean of the seeds, from the lowest to the highest of which the band goes."""
    axes.plot(places, np.mean(values, 0), "." * (len(places) < 10) + "-", color=colour)
    if len(values) > 1:
        axes.fill_between(
            places,
            np.min(values, 0),
            np.max(values, 0),
            color=colour,
            alpha=drawing.BAND,
            linewidth=0,
        )


# -- a matrix of runs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of an ablation."""

    title: str
    results: Mapping[int, Result]  # seed -> the run's, as far as there are any
    asked: int  # number of seeds
    paper: str  # the paper's difference to dense training


# Line -> where on the axis -> the run's result, if there is one.
Lines = Mapping[str, Mapping[float, "Result | None"]]

# Line -> where on the axis -> seed -> what was measured.
BySeed = Mapping[str, Mapping[Any, Mapping[int, float]]]


def paired(ours: Mapping[int, float], dense: Mapping[int, float]) -> list[float]:
    """The differences between runs of the same seed."""
    return [ours[seed] - dense[seed] for seed in sorted(ours.keys() & dense.keys())]


def difference(ours: Mapping[int, float], dense: Mapping[int, float]) -> tuple[float, float]:
    """The mean difference between runs of the same seed, and the half-width of its 95 % interval (Student's t).

    NaN where there is no such pair; the half-width also with one pair, which has no spread.
    """
    pairs = paired(ours, dense)
    return (float(np.mean(pairs)) if pairs else np.nan), half_width([pairs], 0.95)(len(pairs))


def ablation(recipe: Recipe, rows: list[Row]) -> str:
    """A Markdown table; the first row is that of dense training. The paper's column is there where a row has it."""

    def paper(cell: str) -> list[str]:
        return [cell] if any(row.paper for row in rows) else []

    values = [{seed: measured(result) for seed, result in row.results.items()} for row in rows]
    lines = []
    for row, ours in zip(rows, values, strict=True):
        found, all_values = list(row.results.values()), np.array(list(ours.values()))
        mean = f"{all_values.mean():.2f}{recipe.unit}" if found else "-"
        spread = f"{all_values.std(ddof=1):.2f}" if len(found) > 1 else "-"
        apart, half = (np.nan, np.nan) if row is rows[0] else difference(ours, values[0])
        interval = "" if np.isnan(half) else f" [{apart - half:+.2f}, {apart + half:+.2f}]"
        ratio = [
            times(np.mean([ratios(result)[i] for result in found])) if found else "-"
            for i in (0, 1)
        ]
        lines.append(
            [
                row.title,
                f"{len(found)} of {row.asked}",
                mean,
                spread,
                "-" if np.isnan(apart) else f"{apart:+.2f}{interval}",
                *paper(row.paper or "-"),
                *ratio,
            ]
        )
    return markdown(
        [
            "",
            "seeds",
            recipe.title,
            "standard deviation",
            "to dense [95 %]",
            *paper("the paper's"),
            "compression",
            "after warm-up",
        ],
        lines,
    )


def grid(
    corner: str,
    lines: Lines,
    head: Callable[[float], str],
    cell: Callable[[str, float, Result | None], str],
) -> str:
    """A Markdown table with a column for each line."""
    places = dict.fromkeys(x for line in lines.values() for x in line)
    return markdown(
        [corner, *lines],
        [
            [
                head(x),
                *(cell(name, x, line[x]) if x in line else "" for name, line in lines.items()),
            ]
            for x in places
        ],
    )


def against(lines: BySeed, x: Any) -> Mapping[int, float]:
    """What is compared with: of the first line, what is at the same place, or all that it has."""
    first = next(iter(lines.values()))
    return first[x] if x in first else next(iter(first.values()))


def half_width(pairs: Iterable[Sequence[float]], level: float) -> Callable[[float], float]:
    """The half-width of the interval of this level, of a mean of n differences, from a variance pooled over groups of
    them (Student's t). NaN where no group has two.
    """
    from scipy import stats

    groups = [np.array(group) for group in pairs if len(group) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return lambda n: np.nan
    variance = sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / freedom
    return lambda n: float(stats.t.ppf((1 + level) / 2, freedom)) * (variance / n) ** 0.5


def differences(
    corner: str, lines: BySeed, head: Callable[[Any], str], recipe: Recipe, overall: bool = False
) -> str:
    """A Markdown table of means over seeds, with a row for each line. The others are compared with the first: by the
    mean difference between runs of one seed, and its 90 % interval with the variance pooled over the table. With
    ``overall`` the last column is the mean of a line's differences, each place counting alike.
    """
    places = dict.fromkeys(x for line in lines.values() for x in line)
    half = half_width(
        (
            paired(ours, base)
            for line in lines.values()
            for x, ours in line.items()
            if ours is not (base := against(lines, x))
        ),
        0.9,
    )

    def told(groups: Sequence[Sequence[float]]) -> str:
        width = half(len(groups) ** 2 / sum(1 / len(pairs) for pairs in groups))
        return f"{np.mean([np.mean(pairs) for pairs in groups]):+.2f}" + (
            "" if np.isnan(width) else f" ± {width:.2f}"
        )

    def last(line: Mapping[Any, Mapping[int, float]]) -> list[str]:
        groups = [
            pairs
            for x, ours in line.items()
            if ours is not (base := against(lines, x)) and (pairs := paired(ours, base))
        ]
        return [told(groups) if groups else ""] if overall else []

    def cell(line: Mapping[Any, Mapping[int, float]], x: Any) -> str:
        if not (ours := line.get(x)):
            return "-" if x in line else ""
        mean, base = f"{sum(ours.values()) / len(ours):.2f}{recipe.unit}", against(lines, x)
        if ours is base or not (pairs := paired(ours, base)):
            return mean
        return f"{mean} ({told([pairs])})"

    return markdown(
        [corner, *map(head, places), *(["all"] if overall else [])],
        [[name, *(cell(line, x) for x in places), *last(line)] for name, line in lines.items()],
    )


def markdown(head: list[str], lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *lines])


def loaded(file: Path) -> Result:
    """What a recipe's ``--out`` wrote.

    Raises:
        typer.BadParameter: it is no such file.
    """
    try:
        result = json.loads(file.read_text())
        if {"recipe", "dataset", "settings", "history"} <= result.keys():
            return result
    except (ValueError, AttributeError):
        pass
    raise typer.BadParameter(f"a file must be what a recipe's --out writes, got {file}")


def main(
    files: Annotated[
        list[Path],
        typer.Argument(help="JSON files that a recipe's --out wrote.", exists=True, dir_okay=False),
    ],
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("runs/curves.png"),
) -> None:
    """Compares runs of one of the recipes on the same data."""
    results = [loaded(file) for file in files]
    for key in ("recipe", "dataset"):
        if len(values := {result[key] for result in results}) > 1:
            raise typer.BadParameter(
                f"the results must be of one {key}, got {', '.join(sorted(values))}"
            )
    Console().print(table(results))
    picture(results, out)
    print(f"Curves: {out}")


if __name__ == "__main__":
    job.run_command(main)
