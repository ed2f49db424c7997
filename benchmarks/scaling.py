"""Bytes that a worker sends to other machines in a step, from 2 to 64 workers: counted, beside the cost model.

    python benchmarks/scaling.py --out docs/scaling.png

ResNet-110's gradient at 99.9 %, all workers in this process (dgc.lockstep), collective by collective: ring all-gather,
ring allreduce, all-to-all. Only what travels compressed is counted; the small tensors are the same with each
exchange. The model's bytes are those of the busiest port.

Up to 4,096 workers follow from the formulas, for ResNet-50: what a worker sends, over the bytes of one message. Beside
it is the share of entries for which a row of the reduce exchange has no slot, so that they wait a step longer:
simulated, with gradients whose rows and columns differ in scale by a factor of ten and more. Both also follow for other
slacks: how many standard deviations more than its mean a row has room for. Last, what the reduce exchange sends where
rows hold few entries.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import gradients
import torch
import typer
from outfile import write

import dgc
from dgc import drawing, plan
from dgc.compression import sizes as messages
from dgc.compression.regions import Regions
from dgc.plan import cost

WORKERS = (2, 4, 8, 16, 32, 64)
NODE = 4  # workers on a machine, where the exchange is hierarchical
MODELS = {"resnet50": gradients.resnet50, "resnet110": gradients.resnet110}
CONFIG = dgc.Config(0.999)
SHAPES = tuple(
    shape for shape in MODELS["resnet110"]() if len(shape) > 1 and torch.Size(shape).numel() >= 1024
)
NAMES = tuple(cost.EXCHANGES)
MANY = (4, 16, 64, 256, 1024, 4096)  # workers, by formula
# Entries in a row.
FEW = (
    ("resnet110", 512),
    ("resnet110", 1000),
    ("resnet110", 1024),
    ("resnet50", 4096),
)
SLACKS, OF = (0, 1, 2, 3, 4, 5), (64, 1024)  # standard deviations, and workers


def counted(name: str, workers: int, given: list[torch.Tensor]) -> float:
    """Bytes that a worker sent to other machines in one step, by the report of rank 0."""
    by_node = cost.EXCHANGES[name].hierarchical
    config = replace(CONFIG, exchange=cost.EXCHANGES[name].exchange, hierarchical=by_node)

    def worker() -> float:
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        optimizer = dgc.DistributedOptimizer(torch.optim.SGD(parameters, 0.1), None, config)
        for p, g in zip(parameters, given, strict=True):
            p.grad = g.clone()
        optimizer.step()
        return optimizer.report().bytes_sent

    return dgc.lockstep.run(worker, workers, NODE if by_node else 1)[0]


def predicted(name: str, workers: int, sizes: messages.Sizes) -> float:
    """By the cost model: what passes a machine's port, for each of its workers."""
    gpus = NODE if cost.EXCHANGES[name].hierarchical else 1
    return cost.port_bytes(cost.exchange(name, sizes, workers // gpus, gpus)) / gpus


def buckets(model: str) -> list[messages.Sizes]:
    """What of a model travels compressed."""
    shapes = tuple(s for s in MODELS[model]() if len(s) > 1 and torch.Size(s).numel() >= 1024)
    return [bucket.sizes for bucket in plan.buckets(shapes, CONFIG) if bucket.sizes is not None]


def with_few(model: str, workers: int) -> dict[str, str | float]:
    """The reduce exchange's messages where a row has few entries."""
    sizes = buckets(model)
    sent, message = (
        sum(predicted("reduce", workers, each) for each in sizes),
        sum(each.message for each in sizes),
    )
    return {"model": model, "workers": workers, "reduce": sent / message}


def in_messages(workers: int) -> dict[str, float]:
    """What a worker sends of ResNet-50's gradient at 99.9 %, in messages; and the share without a slot."""
    sizes = buckets("resnet50")
    message = sum(each.message for each in sizes)
    sent = {
        name: sum(predicted(name, workers, each) for each in sizes) / message
        for name in NAMES
        if not cost.EXCHANGES[name].hierarchical or workers > NODE
    }
    dense = sum(2 * (workers - 1) / workers * each.dense for each in sizes) / message
    chosen = [messages.wide(each.numel, each.slots) for each in sizes]
    without = [
        without_slot(each.numel, slots, workers) * slots
        for each, slots in zip(sizes, chosen, strict=True)
    ]
    return {"workers": workers, **sent, "dense": dense, "without_slot": sum(without) / sum(chosen)}


def by_slack(workers: int) -> list[dict[str, float]]:
    """The reduce exchange's messages, and the share without a slot, had rows room for so many standard deviations."""
    own, found = messages.SLACK, []
    for slack in SLACKS:
        messages.SLACK = slack
        each = in_messages(workers)
        found.append(
            {
                "workers": workers,
                "slack": slack,
                "reduce": each["reduce"],
                "without_slot": each["without_slot"],
            }
        )
    messages.SLACK = own
    return found


def without_slot(numel: int, slots: int, workers: int) -> float:
    """The share of a worker's entries for which its rows have no slot. They are the largest of a matrix whose rows and
    columns differ in scale.
    """
    draw = torch.Generator().manual_seed(workers)
    rows, columns = (torch.randn(n, generator=draw).exp() for n in (-(-numel // 512), 512))
    entries = (
        (torch.randn(len(rows), 512, generator=draw) * rows[:, None] * columns)
        .abs()
        .flatten()[:numel]
    )
    counts = torch.bincount(
        Regions(numel, workers, entries.device).owner_of(entries.topk(slots).indices)
    )
    return float((counts - messages.row_slots(slots, workers)).clamp(min=0).sum() / slots)


def main(
    out: Annotated[
        Path, typer.Option(help="The picture; the numbers lie in results/scaling.json.")
    ] = Path("docs/scaling.png"),
) -> None:
    """Counts, and draws."""
    torch.set_num_threads(1)
    (shipment,) = plan.buckets(SHAPES, CONFIG)
    assert shipment.sizes is not None
    sizes = shipment.sizes
    given = [
        torch.randn(shape, generator=torch.Generator().manual_seed(0)) ** 3 for shape in SHAPES
    ]
    rows = [
        {
            "exchange": name,
            "workers": n,
            "counted": counted(name, n, given),
            "predicted": predicted(name, n, sizes),
        }
        for name in NAMES
        for n in WORKERS
        if not cost.EXCHANGES[name].hierarchical or n > NODE
    ]
    many = [in_messages(n) for n in MANY]
    result = {
        "benchmark": "scaling",
        "model": "resnet110",
        "entries": shipment.numel,
        "slots": sizes.slots,
        "node": NODE,
        "sizes": sizes._asdict(),
        "rows": rows,
        "resnet50_in_messages": many,
        "by_slack": [each for n in OF for each in by_slack(n)],
        "with_few": [with_few(model, n) for model, n in FEW],
    }
    write(Path(__file__).parent / "results" / "scaling.json", result)
    draw(result, out)
    for row in rows:
        print(
            f"{row['exchange']:>20} {row['workers']:>3} workers: {row['counted']:>9,.0f} bytes counted, "
            f"{row['predicted']:>9,.0f} predicted"
        )
    for each in many:
        print(
            f"ResNet-50, {each['workers']:>5} workers: "
            + ", ".join(
                f"{name} {each[name]:.3g} messages" for name in (*NAMES, "dense") if name in each
            )
            + f"; without a slot {100 * each['without_slot']:.2g} %"
        )
    for each in result["by_slack"]:
        print(
            f"with a slack of {each['slack']}, {each['workers']:>5} workers: {each['reduce']:.3g} messages; "
            f"without a slot {100 * each['without_slot']:.2g} %"
        )
    for each in result["with_few"]:
        print(f"{each['model']}, {each['workers']} workers: {each['reduce']:.3g} messages")


def draw(result: dict[str, Any], out: Path) -> None:
    """What was counted; the dense ring's, for comparison, by its formula."""
    figure, axes = drawing.panels(height=4.4)
    ends = []
    for name, colour in zip(NAMES, (drawing.DGC, *drawing.MUTED), strict=False):
        mine = [
            (row["workers"], row["counted"]) for row in result["rows"] if row["exchange"] == name
        ]
        axes.plot(*zip(*mine, strict=True), ".-", color=colour)
        exchange = cost.EXCHANGES[name]
        label = exchange.exchange.replace("allgather", "all-gather")
        ends.append(
            (
                f"{label}, machines of {result['node']}" if exchange.hierarchical else label,
                mine[-1],
                colour,
            )
        )
    dense = [(n, 2 * (n - 1) / n * 4 * result["entries"]) for n in WORKERS]
    axes.plot(*zip(*dense, strict=True), "--", color=drawing.DENSE)
    drawing.log_axis(axes, "x", WORKERS)
    drawing.log_axis(
        axes,
        "y",
        [10.0**n for n in range(3, 8)],
        lambda x: f"{x / 1e3:g} kB" if x < 1e6 else f"{x / 1e6:g} MB",
    )
    axes.set(
        xlabel="workers",
        title="Bytes that a worker sends to other machines in a step: ResNet-110 at 99.9 %, "
        "counted,\nwithout the small tensors, which are the same with each exchange",
    )
    drawing.name_lines(axes, [*ends, ("dense ring, float32", dense[-1], drawing.DENSE)])
    drawing.save(figure, out)


if __name__ == "__main__":
    typer.run(main)
