"""The whole answer of ``dgc plan``: predictions, advice, JSON, and a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from dgc.config import Config
from dgc.cost import Cluster
from dgc.planning.advise import Advice, advise, bits, duration, waiting
from dgc.planning.models import Loaded
from dgc.planning.predict import CPU, DGC, Local, Method, Overlap, Prediction, methods, of_size, predict, sizes


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
                  "shared": self.advice.shared and _plain(self.advice.shared),
                  "other": self.advice.other and _plain(self.advice.other)}
        return {"model": self.model, "parameters": self.numel, "cluster": asdict(self.cluster),
                "compute_seconds": self.compute, "sparsity": self.sparsity, "here": [_plain(p) for p in self.here],
                "scaling": flat, "advice": advice}


def _plain(prediction: Prediction) -> dict[str, Any]:
    return {**prediction._asdict(), "method": prediction.method.name, "kind": prediction.method.kind}


def plan(loaded: Loaded, cluster: Cluster, compute: float, config: Config | None = None, local: Local = CPU,
         overlap: Overlap = True, steps: int | None = None) -> Plan:
    """Predictions for every method, on the cluster and on larger and smaller ones of its kind, and advice.

    Args:
        loaded: the model.
        cluster, compute, local, overlap: as for :func:`predict`.
        config: of DGC; None: the default one, and advice which sparsity to choose.
        steps: of the training, so that a sparsity is advised at which an entry waits for no more than a ninth of it.

    Raises:
        ValueError: ``compute`` is not a finite number > 0.
    """
    if not 0 < compute < float("inf"):
        raise ValueError(f"compute must be a number of seconds > 0, got {compute!r}")

    def on(some: Cluster) -> tuple[Prediction, ...]:
        return tuple(predict(loaded.shapes, some, m, compute, config or DGC, local, overlap) for m in methods(some))

    advice = advise(loaded.shapes, cluster, compute, config, local, overlap, steps)
    said = [waiting(advice.sparsity, steps)] if steps is not None and advice.pays else []
    if loaded.caveat:
        said.append(loaded.caveat)
    advice = advice._replace(words=(*advice.words, *said))
    scaling = {workers: on(of_size(cluster, workers)) for workers in sizes(cluster)}
    return Plan(loaded.name, loaded.numel, cluster, compute, (config or DGC).sparsity_at(0), on(cluster), scaling,
                  advice)


def draw(report: Plan, file: Path) -> None:
    """Efficiency by workers as a picture: dense methods in float32 (and the ring in float16), and DGC's exchanges.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    curves: dict[Method, list[tuple[int, float]]] = {}
    for workers, predictions in report.scaling.items():
        for p in predictions:
            curves.setdefault(p.method, []).append((workers, 100 * p.efficiency))
    figure, axes = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained", sharey=True)
    for method, points in curves.items():
        if method.kind != "float16":
            axes[int(method.kind == "dgc")].plot(*zip(*points, strict=True), ".-", label=method.name)
    fp16 = curves.get(Method("ring", "float16"), [])
    for axis in axes:
        axis.plot(*zip(*fp16, strict=True), "--", color="black", linewidth=1, label="ring, float16")
        axis.axvline(report.cluster.workers, color="tab:gray", linewidth=0.8)
        axis.set(xscale="log", xlabel="workers", ylim=(0, 103))
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, loc="upper right")
    axes[0].set(ylabel="scaling efficiency (%)", title="dense, float32")
    axes[1].set(title=f"DGC, {100 * report.sparsity:g} %")
    figure.suptitle(f"{report.model}: {report.numel:,} parameters, {duration(report.compute)} of computation, nodes of "
                    f"{report.cluster.gpus} at {bits(report.cluster.between.bandwidth)}")
    figure.savefig(file, dpi=130)
    plt.close(figure)
