"""What a shared support would learn, if the entries sent were the largest of the mean: is a leader's choice what costs?

    python benchmarks/mean_support.py --data DIR --out benchmarks/results/mean-support.json

The CIFAR-10 recipe as in the row "shared, 99 %, no masking" of the exchanges, with 16 workers, but for one thing: the
workers add up all of v, which is more than a dense exchange, and from that choose. No cluster would do this.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Annotated

import torch
import typer

from dgc.collective import Collective, Path
from dgc.compression import select
from dgc.paths import compressed
from dgc.paths.averaged import DenseUpdate
from dgc.paths.task import Task

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "recipes"))
import cifar10
import experiments


def sum_at_the_means_support(task: Task) -> Path:
    """In place of the package's own, where a message of the leader's names the entries."""
    bucket, layout = task.bucket, task.layout
    task.accumulate()
    v = yield Collective("sum", bucket.v.clone())
    places = zip(layout.offsets, layout.numels, layout.counts, strict=True)
    index = torch.cat([offset + select.exact(v[offset:offset + numel], k) for offset, numel, k in places])
    values = bucket.v[index]
    bucket.take(index, values, task.config.factor_masking)
    total = (yield Collective("sum", values)).div_(task.world.divisor(task.average))
    return DenseUpdate(torch.zeros_like(bucket.v).index_add_(0, index, total), bucket.numels)


def main(data: Annotated[str | None, typer.Option(help="As of recipes/cifar10.py.")] = None,
         seed: Annotated[int, typer.Option(min=0, max=1, help="Of those of the row.")] = 0,
         out: Annotated[pathlib.Path | None, typer.Option(help="JSON of the results.")] = None) -> None:
    """Trains so."""
    row = experiments.by_exchange(experiments.BUDGETS["cpu"])["shared, 99 %, no masking"]
    compressed.PATHS["shared"] = sum_at_the_means_support
    cifar10.main(**{**row[16][seed].options, "data": data, "out": out})
    if out:
        out.write_text(json.dumps({"support": "the mean's", **json.loads(out.read_text())}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
