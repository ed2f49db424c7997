"""Bytes of the wire format: bits of an entry beside its information, and how much less is sent than by dense training.

    python benchmarks/wire.py --out benchmarks/results/wire.json

Computed, not measured: the bytes of messages depend on sizes alone. Each model is packed into messages as
dgc.DistributedOptimizer packs it. The entropy of a place is log2 of the number of ways to choose k of the n entries of
a message, over k.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import gradients
import typer
from outfile import Out, write
from rich import box
from rich.console import Console
from rich.table import Table

import dgc
from dgc import plan
from dgc.compression.sizes import FLOAT32, Sizes, row_sections, summed
from dgc.plan import Method, Shape
from dgc.plan.cost import Cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
import cifar10

Shapes = tuple[Shape, ...]
SPARSITIES = (0.75, 0.9, 0.99, 0.996, 0.999)
WORKERS = 4
EPOCHS, WARMUP, STEPS = 25, 4, 390  # of ResNet-20, and steps of an epoch: 50,000 images, 128 a step
CLUSTER = Cluster(WORKERS, 1, plan.NETWORKS["1gbit"], plan.INSIDE["pcie"])
RING, DGC = Method("ring", "float32"), Method("allgather", "dgc")


def models() -> dict[str, Shapes]:
    """Their parameters' shapes."""
    resnet20 = tuple(tuple(p.shape) for p in cifar10.resnet(20).parameters())
    return {
        "ResNet-50": tuple(plan.MODELS["resnet50"]()),
        "BERT-large": tuple(plan.MODELS["bert-large"]()),
        "LSTM": tuple(gradients.lstm()),
        "ResNet-20": resnet20,
    }


def bits_of_entry(shapes: Shapes, sparsity: float, value_bits: int) -> dict[str, float]:
    """Bits of an entry in each part of a message, the mean over all messages of a step."""
    config = dgc.Config(sparsity, value_bits=value_bits)
    messages = [bucket.sizes for bucket in plan.buckets(shapes, config) if bucket.sizes is not None]
    entries = sum(message.slots for message in messages)
    parts = [parts_of(message) for message in messages]
    places, values, headers = (8 * sum(part) / entries for part in zip(*parts, strict=True))
    total = places + values + headers
    information = (
        sum(ways(message.numel, message.slots) for message in messages) / entries + value_bits
    )
    return {
        "places": places,
        "values": values,
        "headers": headers,
        "sum": total,
        "information": information,
        "excess": total / information - 1,
    }


def parts_of(message: Sizes) -> tuple[int, int, int]:
    """Bytes of places, of values, and of all else: the status, the scales of groups, and the checksum."""
    _, sections = row_sections(message.slots, message.numel, message.bits)
    values, low, high = sections[2:]
    return low + high, values, message.message - low - high - values


def ways(n: int, k: int) -> float:
    """log2 of the number of ways to choose k of n."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def sent(shapes: Shapes, sparsity: float, value_bits: int) -> tuple[int, float]:
    """Bytes that a worker contributes to a step, and bytes that leave it: with the parameters that travel dense."""
    config = dgc.Config(sparsity, value_bits=value_bits)
    step = plan.predict(shapes, CLUSTER, DGC, 1.0, config)
    return step.message_bytes, step.port_bytes


def dense(shapes: Shapes) -> tuple[int, float]:
    """The same of a float32 ring."""
    ring = plan.predict(shapes, CLUSTER, RING, 1.0)
    return ring.message_bytes, ring.port_bytes


def after_warmup(shapes: Shapes, value_bits: int) -> dict[str, float]:
    """How many times fewer bytes than dense, at the largest sparsity."""
    config = dgc.Config(SPARSITIES[-1], value_bits=value_bits)
    gradient = (
        0  # bytes that stand for the gradient, each of its sums once, as dense ones are counted
    )
    for bucket in plan.models.buckets(shapes, config):
        whole = Sizes(FLOAT32 * bucket.numel, bucket.numel, bits=value_bits)
        gradient += bucket.sizes.message if bucket.sizes else summed(whole, WORKERS)
    return {
        "message_bytes": gradient,
        "as_the_paper_counts": dense(shapes)[0] / gradient,
        "on_the_wire": dense(shapes)[1] / sent(shapes, SPARSITIES[-1], value_bits)[1],
    }


def whole_training(shapes: Shapes, value_bits: int) -> float:
    """How many times fewer bytes leave a worker in all steps of a training than with a float32 ring."""
    schedule = dgc.warmup(WARMUP, steps_per_epoch=STEPS)
    of = {
        s: sent(shapes, s, value_bits)[1]
        for s in {schedule(step) for step in range(EPOCHS * STEPS)}
    }
    return dense(shapes)[1] / statistics.mean(of[schedule(step)] for step in range(EPOCHS * STEPS))


def table(rows: list[dict[str, Any]], value_bits: int) -> Table:
    shown = Table(title="Bits of an entry in a message", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in (
        "",
        "sparsity",
        "places",
        "values",
        "headers",
        "sum",
        f"entropy + {value_bits}",
        "excess",
    ):
        shown.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        figures = (
            f"{row[part]:.2f}" for part in ("places", "values", "headers", "sum", "information")
        )
        shown.add_row(
            row["model"],
            f"{100 * row['sparsity']:g} %",
            *figures,
            f"{100 * row['excess']:.1f} %",
            end_section=row["sparsity"] == SPARSITIES[-1],
        )
    return shown


def main(
    value_bits: Annotated[int, typer.Option(help="As in dgc.Config.")] = 4, out: Out = None
) -> None:
    """Prints the bits of an entry and the ratios to dense training."""
    shapes = models()
    rows = [
        {"model": name, "sparsity": sparsity, **bits_of_entry(of, sparsity, value_bits)}
        for name, of in shapes.items()
        for sparsity in SPARSITIES
    ]
    ratios = {name: after_warmup(shapes[name], value_bits) for name in ("ResNet-50", "LSTM")}
    whole = whole_training(shapes["ResNet-20"], value_bits)
    Console(width=80).print(table(rows, value_bits))
    for name, ratio in ratios.items():
        counted, on_the_wire = ratio["as_the_paper_counts"], ratio["on_the_wire"]
        print(
            f"{name} at {100 * SPARSITIES[-1]:g} %: {counted:.0f} times fewer bytes as the paper counts, "
            f"{on_the_wire:.0f} on the wire"
        )
    print(
        f"ResNet-20, {EPOCHS} epochs, {WARMUP} of them warm-up: {whole:.0f} times fewer bytes on the wire\n"
        f"On the wire: what leaves one of {WORKERS} workers, beside a float32 ring"
    )
    if out:
        write(
            out,
            {
                "benchmark": "wire",
                "value_bits": value_bits,
                "workers": WORKERS,
                "bits_of_entry": rows,
                "after_warmup": ratios,
                "whole_training": {
                    "model": "ResNet-20",
                    "epochs": EPOCHS,
                    "warmup_epochs": WARMUP,
                    "on_the_wire": whole,
                },
            },
        )


if __name__ == "__main__":
    typer.run(main)
