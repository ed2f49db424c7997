"""The paper's figure 6 drawn again: speedup of up to 64 nodes over one, at 1 and 10 Gbit/s, dense and with DGC.

    python benchmarks/speedup.py --out docs/speedup.png

**From the paper** (Lin et al., ICLR 2018, section 5): each node has 4 NVIDIA Titan XP and one PCI switch; the speedup
is over a single node; the model is Wen et al.'s (2017), a profile of one node and computed communication; in the worst
case what is gathered doubles at each step; with AlexNet on 64 nodes, dense training "only achieves about 30x" at 10
Gbit/s, and DGC "more than 40x" at 1 Gbit/s. Its curves are a picture only, so no other number is compared.

**Assumed here:** a GPU computes at half of its peak of 12.15 TFLOP/s; 512 images a GPU for AlexNet (0.71 G
multiply-adds each), 32 for ResNet-50 (4.09 G), 20 x 35 words for the LSTM (0.051 G); backward twice the forward pass;
latencies of the presets; float32 dense; compressing as estimated for GPUs (dgc.plan.LOCAL). Within a node they are
summed first, over PCIe, so that a node is one worker of the network; dense exchange is the hierarchical ring, DGC's the
hierarchical all-gather. The paper does not say whether exchange and backward pass overlap: both are computed, and the
figure is without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import gradients
import typer
from outfile import write

from dgc import drawing, plan
from dgc.plan import Method
from dgc.plan.cost import Cluster

NODES, GPUS = (1, 2, 4, 8, 16, 32, 64), 4
FLOPS = 0.5 * 12.15e12  # of a Titan XP, a second
# Examples a GPU, and multiply-adds of the forward pass of each; the backward pass has twice as many.
WORK = {"alexnet": (512, 0.714e9), "resnet50": (32, 4.09e9), "lstm": (20 * 35, 51.0e6)}
WORK_TITLES = {"alexnet": "AlexNet", "resnet50": "ResNet-50", "lstm": "LSTM"}
LSTM_LAYER = ((6000, 1500), (6000, 1500), (6000,), (6000,))
# Recipes/ptb.py --size large.
SHAPES = {
    "alexnet": tuple(gradients.alexnet()),
    "resnet50": tuple(gradients.resnet50()),
    "lstm": ((10_000, 1500), (10_000,), *LSTM_LAYER, *LSTM_LAYER),
}
NETWORKS = ("1gbit", "10gbit")
PAPER = (
    (40, "the paper's AlexNet, DGC:\n    more than 40"),  # with 64 nodes
    (30, "the paper's AlexNet, dense:\n    about 30"),
)
CURVES = {"dense": Method("hierarchical ring", "float32"), "DGC": Method("hierarchical", "dgc")}


def compute(model: str) -> float:
    """Seconds of a GPU's forward and backward pass."""
    examples, multiply_adds = WORK[model]
    return 3 * 2 * multiply_adds * examples / FLOPS


def seconds(model: str, network: str, method: Method, nodes: int, overlap: bool) -> float:
    """Of a step."""
    cluster = Cluster(nodes, GPUS, plan.NETWORKS[network], plan.INSIDE["pcie"])
    return plan.predict(
        SHAPES[model],
        cluster,
        method,
        compute(model),
        local=plan.LOCAL["gpu"],
        overlap=overlap,
    ).step_seconds


def speedup(model: str, network: str, method: Method, nodes: int, overlap: bool) -> float:
    """Over one node, which has nothing to compress, of as many nodes with as much work each."""
    alone = seconds(model, network, CURVES["dense"], 1, overlap)
    return nodes * alone / seconds(model, network, method, nodes, overlap) if nodes > 1 else 1.0


def draw(result: dict[str, Any], out: Path) -> None:
    """Without overlap of the exchange and the backward pass, at both rates."""
    figure, panes = drawing.panels(len(NETWORKS), height=4.2, sharey=True)
    for axes, network, (place, paper) in zip(panes, NETWORKS, PAPER, strict=True):
        curves, ends = result["speedup_by_overlap"]["False"][network], []
        axes.plot(NODES, NODES, ":", color="black", linewidth=1)
        for model, title in WORK_TITLES.items():
            for name, style, colour in (("dense", "--", drawing.DENSE), ("DGC", "-", drawing.DGC)):
                line = curves[model][name]
                axes.plot(result["nodes"], line, style, marker=".", color=colour)
                ends.append((f"{name}, {title}", (NODES[-1], line[-1]), colour))
        axes.plot(NODES[-1], place, "v", color="black", markersize=8, clip_on=False, zorder=5)
        axes.text(
            0.04,
            0.95,
            f"\N{BLACK DOWN-POINTING TRIANGLE} {paper}",
            va="top",
            transform=axes.transAxes,
        )
        axes.set(
            title=f"{plan.bits(plan.NETWORKS[network].bandwidth)}: a model, not measured",
            xlim=(0, NODES[-1]),
            ylim=(0, NODES[-1]),
            xlabel="nodes of 4 GPUs",
            xticks=[n for n in NODES if n > 4],
        )
        drawing.name_lines(axes, [*ends, ("ideal", (NODES[-1], NODES[-1]), "black")])
    panes[0].set_ylabel("times as fast as one node")
    drawing.save(figure, out)


def main(
    out: Annotated[
        Path, typer.Option(help="The picture; the numbers lie in results/speedup.json.")
    ] = Path("docs/speedup.png"),
) -> None:
    """Draws it, and prints the two numbers that the paper states."""
    results = {
        str(overlap): {
            network: {
                model: {
                    name: [speedup(model, network, method, n, overlap) for n in NODES]
                    for name, method in CURVES.items()
                }
                for model in WORK
            }
            for network in NETWORKS
        }
        for overlap in (False, True)
    }
    result = {
        "nodes": NODES,
        "compute_seconds": {m: compute(m) for m in WORK},
        "speedup_by_overlap": results,
    }
    draw(result, out)
    numbers = Path(__file__).parent / "results" / "speedup.json"
    write(numbers, result)
    for overlap in (False, True):
        r = results[str(overlap)]
        print(
            f"AlexNet, 64 nodes, {'with' if overlap else 'without'} overlap: dense at 10 Gbit/s "
            f"{r['10gbit']['alexnet']['dense'][-1]:.1f} (paper: about 30), DGC at 1 Gbit/s "
            f"{r['1gbit']['alexnet']['DGC'][-1]:.1f} (paper: more than 40), dense at 1 Gbit/s "
            f"{r['1gbit']['alexnet']['dense'][-1]:.1f}"
        )
        for model in ("resnet50", "lstm"):
            print(
                f"  {model}: "
                + ", ".join(
                    f"{name} at {network} {r[network][model][name][-1]:.1f}"
                    for network in r
                    for name in CURVES
                )
            )


if __name__ == "__main__":
    typer.run(main)
