"""What a shared support would learn, if the entries sent were the largest of the mean: is a leader's choice what costs?

    python benchmarks/mean_support.py --data DIR --out benchmarks/results/mean-support.json

The CIFAR-10 recipe as in the row "shared, 99 %, no masking" of the exchanges, with 16 workers, but for one thing: the
workers add up all of v, which is more than a dense exchange, and from that choose. No cluster would do this.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from dgc import compressor, select
from dgc.residual import Bucket
from dgc.transport import Collective
from dgc.wire import Layout

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
import cifar10
import reproduce


def on_the_means_support(bucket: Bucket, layout: Layout, message: Tensor | None, leader: int, masking: bool,
                         world: compressor.World, average: bool, bad: Sequence[str]) -> compressor.Path:
    """In place of the package's own, where a message of the leader's names the entries."""
    v = yield Collective("sum", bucket.v.clone())
    places = zip(layout.offsets, layout.numels, layout.counts, strict=True)
    index = torch.cat([offset + select.exact(v[offset:offset + numel], k) for offset, numel, k in places])
    values = bucket.v[index]
    bucket.take(index, values, masking)
    total = (yield Collective("sum", values)).div_(world.divisor(average))
    return compressor.Dense(torch.zeros_like(bucket.v).index_add_(0, index, total), bucket.numels)


def main(data: Annotated[str | None, typer.Option(help="As of recipes/cifar10.py.")] = None,
         seed: Annotated[int, typer.Option(min=0, max=1, help="Of those of the row.")] = 0,
         out: Annotated[Path | None, typer.Option(help="JSON of the results.")] = None) -> None:
    """Trains so."""
    row = reproduce.by_exchange(reproduce.BUDGETS["cpu"])["shared, 99 %, no masking"]
    compressor._on_support = on_the_means_support
    cifar10.main(**{**row[16][seed].options, "data": data, "out": out})
    if out:
        out.write_text(json.dumps({"support": "the mean's", **json.loads(out.read_text())}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
