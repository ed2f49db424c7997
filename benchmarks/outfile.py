"""Where a benchmark's result goes, and how it is written: as a recipe's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
from job import Out, write

__all__ = ["Out", "write"]
