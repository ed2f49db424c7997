"""The whole answer of ``dgc plan``: predictions, advice, JSON, and a picture."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from dgc import drawing
from dgc.config import Config
from dgc.plan.advise import Advice, Optimizer, advise, bearable, bits, duration, waiting
from dgc.plan.cost import Cluster
from dgc.plan.models import Loaded
from dgc.plan.predict import CPU, DGC, Local, Method, Overlap, Prediction, methods, of_size, predict, sizes


class Plan(NamedTuple):
    """The answer of ``dgc plan``."""

    model: str
    numel: int
    cluster: Cluster
    compute: float
    sparsity: float
    here: tuple[Prediction, ...]  # on the cluster
    scaling: dict[int, tuple[Prediction, ...]]  # by the number of workers
    advice: Advice

    def json(self) -> dict[str, Any]:
        """Numbers only; seconds and bytes."""
        flat = {n: [_plain(p) for p in predictions] for n, predictions in self.scaling.items()}
        advice = {**self.advice._asdict(), "dense": _plain(self.advice.dense), "dgc": _plain(self.advice.dgc),
                  "other": self.advice.other and _plain(self.advice.other)}
        return {"model": self.model, "parameters": self.numel, "cluster": asdict(self.cluster),
                "compute_seconds": self.compute, "sparsity": self.sparsity, "here": [_plain(p) for p in self.here],
                "scaling": flat, "advice": advice}


def _plain(prediction: Prediction) -> dict[str, Any]:
    return {**prediction._asdict(), "method": prediction.method.name, "kind": prediction.method.kind}


def plan(loaded: Loaded, cluster: Cluster, compute: float, config: Config | None = None, local: Local = CPU,
         overlap: Overlap = True, steps: int | None = None, optimizer: Optimizer = "sgd") -> Plan:
    """Predictions for every method, on the cluster and on larger and smaller ones of its kind, and advice.

    Args:
        loaded: the model.
        cluster, compute, local, overlap: as for :func:`predict`.
        config: of DGC; None: the largest sparsity that the training bears, and advice which one to choose.
        steps: of the training, which bears a sparsity at which an entry waits for no more than a tenth of it.
        optimizer: AdamW bears no more than was measured with it.

    Raises:
        ValueError: ``compute`` is not a finite number > 0.
    """
    if not 0 < compute < float("inf"):
        raise ValueError(f"compute must be a number of seconds > 0, got {compute!r}")

    advice = advise(loaded.shapes, cluster, compute, config, local, overlap, steps, optimizer)
    shown = config or replace(DGC, sparsity=bearable(steps, optimizer)[-1])

    def on(some: Cluster) -> tuple[Prediction, ...]:
        return tuple(predict(loaded.shapes, some, m, compute, shown, local, overlap) for m in methods(some))

    said = [waiting(advice.sparsity, steps, optimizer)] if steps is not None and advice.pays else []
    if loaded.caveat:
        said.append(loaded.caveat)
    advice = advice._replace(words=(*advice.words, *said))
    scaling = {workers: on(of_size(cluster, workers)) for workers in sizes(cluster)}
    return Plan(loaded.name, loaded.numel, cluster, compute, shown.sparsity_at(0), on(cluster), scaling, advice)


def draw(report: Plan, file: Path) -> None:
    """Efficiency by workers as a picture: the rings of Horovod and DistributedDataParallel, and DGC's exchanges.

    Raises:
        ImportError: matplotlib is missing.
    """
    workers = report.cluster.workers
    figure, axes = drawing.panels(height=4.4)
    shown = [n for n in report.scaling if n <= max(512, 8 * workers)]
    axes.set(xlabel="workers", ylabel="scaling efficiency (%)", xlim=(1, shown[-1]), ylim=(0, 110),
             yticks=range(0, 101, 20),
             title=f"A model, not measured: {report.model}, {report.numel:,} parameters, {duration(report.compute)} of "
                   f"computation,\n{report.cluster.gpus} in a node, {bits(report.cluster.between.bandwidth)} between "
                   f"nodes, DGC at {100 * report.sparsity:g} %")
    drawing.log_axis(axes, "x", [4.0**n for n in range(9) if 4**n <= shown[-1]], "{:,.0f}".format)
    axes.axvline(workers, color=drawing.DENSE, linestyle=":")
    axes.text(workers, 104, f" {workers:,} as planned", color=drawing.DENSE)
    ends = []
    for method, colour, style in _curves([p.method for p in report.here]):
        points = [(n, 100 * p.efficiency) for n in shown for p in report.scaling[n] if p.method == method]
        axes.plot(*zip(*points, strict=True), style, color=colour)
        ends.append((str(method), points[-1], colour))
    drawing.name_lines(axes, ends)
    drawing.save(figure, file)


def _curves(known: list[Method]) -> list[tuple[Method, str, str]]:
    """The methods that are drawn, each with its colour and its line."""
    rings = [(m, drawing.DENSE, "-" if m.kind == "float32" else "--") for m in known if m.name == "ring" and
             m.kind != "dgc"]
    mine = [m for m in known if m.kind == "dgc"]
    return [*rings, *((m, colour, "-") for m, colour in zip(mine, (drawing.DGC, *drawing.MUTED), strict=False))]
