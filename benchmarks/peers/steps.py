"""One Markdown table of what a step takes with each method: bytes, local work and exchange. Nothing is trained for it.

    python benchmarks/peers/steps.py benchmarks/results/peers-measured.json

A method that exchanges now and then has a step's share. The methods are in the order of their exchange at the slowest
rate, the fastest first. table.py has the same times beside what the methods learn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peers import METHODS, compose, predict
from peers.table import milliseconds, shown

SLOWEST = next(iter(predict.LINKS))


def rows(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each method whose exchange was measured."""
    names = [name for name in METHODS if f"exchange {SLOWEST} {name}" in measured["seconds"]]
    return sorted((row(measured, name) for name in names), key=lambda row: row["exchange"][SLOWEST])


def row(measured: dict[str, Any], name: str) -> dict[str, Any]:
    """Bytes and seconds of a step, on average."""
    entry, seconds = METHODS[name], measured["seconds"]
    exchanging = 1 / entry.every
    sent = exchanging * seconds[f"exchange {SLOWEST} {name}"]["bytes"]
    dense = seconds[f"exchange {SLOWEST} dense"]["bytes"]
    return {
        "title": entry.title,
        "collective": entry.collective,
        "bytes": sent,
        "ratio": dense / sent,
        "local": compose.local(measured, name, exchanging),
        "predicted": {
            rate: predict.seconds(entry.collective, sent, measured["workers"], rate, exchanging)
            for rate in predict.LINKS
        },
        "exchange": {
            rate: compose.exchange(measured, name, rate, exchanging) for rate in predict.LINKS
        },
    }


def markdown(found: list[dict[str, Any]]) -> str:
    """The table; "-" is what has not been measured."""
    times = [f"exchange at {name} | predicted, the wire alone" for name in predict.NAMES.values()]
    lines = [
        f"| method | collective | bytes / worker / step | fewer than dense | local work | {' | '.join(times)} |",
        "|" + 9 * "---|",
    ]
    for one in found:
        cells = [
            one["title"],
            one["collective"],
            shown(one["bytes"], ",.0f"),
            shown(one["ratio"], ",.1f", " x"),
            milliseconds(one["local"]),
        ]
        for rate in predict.LINKS:
            cells += [milliseconds(one["exchange"][rate]), milliseconds(one["predicted"][rate])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(
    measured: Annotated[Path, typer.Argument(help="What measure.py --out wrote.", exists=True)],
) -> None:
    """Prints the table."""
    found: dict[str, Any] = json.loads(measured.read_text())
    if f"exchange {SLOWEST} dense" not in found["seconds"]:
        raise typer.BadParameter(
            f"{measured} must have the exchange of dense at {SLOWEST}, with whose bytes others "
            "compare, got none (measure.py measures what is missing)"
        )
    print(
        f"Computing a step takes a worker {milliseconds(found['seconds'].get('compute float32'))}.\n"
    )
    print(markdown(rows(found)), end="")


if __name__ == "__main__":
    typer.run(main)
