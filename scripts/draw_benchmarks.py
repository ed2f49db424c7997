"""Draws the pictures of the benchmarks anew, from what lies in benchmarks/results. Nothing is measured.

python scripts/draw_benchmarks.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import adaptive
import compress
import network
import scaling
import speedup

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def main() -> None:
    adaptive.draw(read("adaptive"), RESULTS / "adaptive.png")
    compress.picture(read("compress")["rows"], RESULTS / "compress.png")
    measured = read("hosts4-1gbit")
    network.plot(measured["cases"], measured["hosts"], RESULTS / "hosts4-1gbit.png")
    scaling.draw(read("scaling"), DOCS / "scaling.png")
    speedup.draw(read("speedup"), DOCS / "speedup.png")


if __name__ == "__main__":
    main()
