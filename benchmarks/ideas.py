"""Ideas that the method has not: the 5-epoch trainings of the momentum table, each with one thing changed.

    python benchmarks/ideas.py --data DIR --idea cap --sparsity 0.9 --seed 0 --out cap-90-0.json

They run in plain torch operations, which agree with the compiled loops to the bit. What they gave:
recipes/results/NOTES.md, "Tried, and not built".
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any, Literal, cast

import torch
import typer
from torch import Tensor, nn

from dgc.compression import kernels
from dgc.compression import select as selection
from dgc.compression.kernels import plain
from dgc.compression.regions import Taken
from dgc.compression.residual import Gradient, Residual
from dgc.compression.wire import NONFINITE, Layout
from dgc.engine.engine import engine_of
from dgc.paths import bucket_step

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "recipes"))
import cifar10
import experiments
import job

DENSITY_OF_WARMUP = 0.005  # beyond which the warm-up to 99.9 % is not masked


class Idea:
    """The package's own way, in which a subclass changes one thing."""

    def score(self, bucket: Residual, gradients: Mapping[str, Gradient]) -> Tensor:
        """What entries are chosen by."""
        return bucket.v

    def values(self, layout: Layout, used: Tensor, values: Tensor) -> Tensor:
        """What is sent of the chosen entries."""
        return values

    def masking(self, bucket: Residual, layout: Layout, masking: bool) -> bool:
        """What becomes of u."""
        return masking

    def attach(self, optimizer: Any, model: nn.Module) -> None:
        """A worker is about to train."""

    def epoch_ends(self, optimizer: Any, before: float, after: float) -> None:
        """The learning rate was one and will be the other."""

    # -- in place of dgc.compression.kernels.plain's ------------------------------------------------------------------

    def accumulate_and_select(
        self,
        bucket: Residual,
        gradients: Mapping[str, Gradient],
        scale: Any,
        layout: Layout,
        step: int,
    ) -> tuple[list[str], Tensor, Tensor]:
        bad = bucket.accumulate(gradients, scale)
        index, used = layout.base.clone(), torch.zeros(len(bucket.names), dtype=torch.int64)
        for p, part in enumerate(self.score(bucket, gradients).split(bucket.numels)):
            if bucket.names[p] in gradients:
                k, start = layout.counts[p], layout.starts[p]
                chosen = selection.sampled(part, k, step)
                used[p] = len(chosen)
                index[start : start + len(chosen)] = chosen + bucket.offsets[p]
        return bad, index, used

    def encode(
        self,
        bucket: Residual,
        layout: Layout,
        index: Tensor,
        used: Tensor,
        refused: Tensor,
        masking: bool,
    ) -> tuple[Tensor, Taken]:
        valid = layout.uses(used) & ~refused
        index = torch.where(valid, index, 0)
        values = self.values(layout, used, bucket.v[index])
        message, sent = layout.rows.encode(torch.where(valid, 0, 1), index, values, 1)
        bucket.take(index, sent, self.masking(bucket, layout, masking))
        return torch.where(refused, layout.rows.status_message(1, NONFINITE), message), Taken(
            index, sent
        )


class Scale(Idea):
    """The choice is by v over the running root mean square of the entry's gradients, of 1,000 steps."""

    def __init__(self) -> None:
        self.squares: dict[int, tuple[Tensor, int]] = {}

    def score(self, bucket: Residual, gradients: Mapping[str, Gradient]) -> Tensor:
        square, steps = self.squares.get(id(bucket), (torch.zeros_like(bucket.v), 0))
        for name, view in bucket.views(square).items():
            if name in gradients:
                g = gradients[name].g.detach()
                view.mul_(0.999).addcmul_(g, g, value=0.001)
        self.squares[id(bucket)] = square, steps + 1
        return bucket.v / (square / (1 - 0.999 ** (steps + 1))).sqrt().add(1e-12)


class Across(Idea):
    """The largest entries of all parameters together, in place of the same share of each."""

    ROOM = 8  # times as many slots as a parameter's share, for what falls to it

    def attach(self, optimizer: Any, model: nn.Module) -> None:
        self.config, self.count = engine_of(optimizer).settings.config, selection.count
        cast(Any, bucket_step).select = SimpleNamespace(
            count=lambda sparsity, n: min(n, self.ROOM * self.count(sparsity, n))
        )

    def accumulate_and_select(
        self,
        bucket: Residual,
        gradients: Mapping[str, Gradient],
        scale: Any,
        layout: Layout,
        step: int,
    ) -> tuple[list[str], Tensor, Tensor]:
        bad = bucket.accumulate(gradients, scale)
        k = sum(self.count(self.config.sparsity_at(step), n) for n in bucket.numels)
        chosen = selection.exact(bucket.v, k)
        index, used = layout.base.clone(), torch.zeros(len(bucket.names), dtype=torch.int64)
        for p, (start, offset) in enumerate(zip(layout.starts, bucket.offsets, strict=True)):
            own = chosen[(chosen >= offset) & (chosen < offset + bucket.numels[p])]
            if len(own) > layout.counts[p]:
                own = own[bucket.v[own].abs().topk(layout.counts[p]).indices].sort().values
            used[p] = len(own)
            index[start : start + len(own)] = own
        return bad, index, used


class Cap(Idea):
    """What has waited is clipped: at most twice the least that is sent of a parameter leaves at once."""

    def values(self, layout: Layout, used: Tensor, values: Tensor) -> Tensor:
        for start, n in zip(layout.starts, used.tolist(), strict=True):
            if n:
                part = values[start : start + n]
                least = 2 * part.abs().min()
                part.clamp_(-least, least)
        return values


class Warmup(Idea):
    """Steps as long as dense training's in the warm-up: u is not masked there."""

    def masking(self, bucket: Residual, layout: Layout, masking: bool) -> bool:
        return False if layout.slots > DENSITY_OF_WARMUP * bucket.numel else masking


class Flush(Idea):
    """All that is pending is sent at the end of each epoch."""

    def epoch_ends(self, optimizer: Any, before: float, after: float) -> None:
        optimizer.flush()


class Rates(Idea):
    """What is pending keeps the learning rate of when it was a gradient."""

    def epoch_ends(self, optimizer: Any, before: float, after: float) -> None:
        for v in engine_of(optimizer).residual_views()["v"].values():
            v.mul_(before / after)


class Ahead(Idea):
    """Each worker's gradient is taken where its own pending entries, applied, would lead (Xu et al., "Step-ahead error
    feedback", AAAI 2021). There u is not stale, and so not masked.
    """

    def masking(self, bucket: Residual, layout: Layout, masking: bool) -> bool:
        return False

    def attach(self, optimizer: Any, model: nn.Module) -> None:
        common: dict[Tensor, Tensor] = {}  # what all workers have

        def ahead(*_: Any) -> None:
            if model.training:
                lr = optimizer.param_groups[0]["lr"]
                engine = engine_of(optimizer)
                residuals = engine.residual_views()["v"]
                for p, name in engine.names.items():
                    if name in residuals:
                        common[p] = p.detach().clone()
                        p.data.sub_(residuals[name], alpha=lr)

        def back(*_: Any) -> None:
            for p, x in common.items():
                p.data.copy_(x)
            common.clear()

        model.register_forward_pre_hook(ahead)
        optimizer.register_step_pre_hook(back)


class Late(Idea):
    """An update is applied one step late, so that its exchange would hide behind the next forward and backward pass,
    and the last one with what is pending (Li et al., "Pipe-SGD", NeurIPS 2018, with dense gradients).
    """

    def attach(self, optimizer: Any, model: nn.Module) -> None:
        parameters, before, moves, flush = (
            list(model.parameters()),
            list[Tensor](),
            list[Tensor](),
            optimizer.flush,
        )

        def begin(*_: Any) -> None:
            before[:] = [p.detach().clone() for p in parameters]

        def end(*_: Any) -> None:
            own = [p.detach() - x for p, x in zip(parameters, before, strict=True)]
            for p, x, move in zip(
                parameters, before, moves or map(torch.zeros_like, own), strict=True
            ):
                p.data.copy_(x + move)
            moves[:] = own

        def flush_all() -> None:
            for p, move in zip(parameters, moves, strict=True):
                p.data.add_(move)
            moves.clear()
            flush()

        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(end)
        optimizer.flush = flush_all


IDEAS: dict[str, type[Idea]] = {
    "none": Idea,
    "scale": Scale,
    "cap": Cap,
    "warmup": Warmup,
    "flush": Flush,
    "rates": Rates,
    "ahead": Ahead,
    "across": Across,
    "late": Late,
}


def follow(idea: Idea) -> None:
    """Has this process train so."""
    kernel: Any = SimpleNamespace(
        **{
            **vars(plain),
            "accumulate_and_select": idea.accumulate_and_select,
            "encode": idea.encode,
        }
    )
    kernels.current = lambda kind, dtype: kernel

    class Scheduler(torch.optim.lr_scheduler.MultiStepLR):
        def step(self, epoch: int | None = None) -> None:
            trains, before = self.last_epoch >= 0, self.optimizer.param_groups[0]["lr"]
            super().step()
            if trains:
                idea.epoch_ends(self.optimizer, before, self.optimizer.param_groups[0]["lr"])

    distributed = job.distributed

    def attached(optimizer: torch.optim.SGD, model: nn.Module, *options: Any) -> Any:
        wrapped = distributed(optimizer, model, *options)
        idea.attach(wrapped, model)
        return wrapped

    job.distributed = attached
    torch.optim.lr_scheduler.MultiStepLR = Scheduler  # type: ignore[misc]  # the recipe's


def main(
    idea: Annotated[
        Literal["none", "scale", "cap", "warmup", "flush", "rates", "ahead", "across", "late"],
        typer.Option(),
    ],
    data: Annotated[str | None, typer.Option(help="As of recipes/cifar10.py.")] = None,
    sparsity: Annotated[float, typer.Option(min=0, max=0.99999)] = 0.999,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    epochs: Annotated[int, typer.Option(min=1)] = 5,
    factor_masking: Annotated[
        bool, typer.Option(help="Of the training that the idea changes.")
    ] = True,
    checkpoints: Annotated[
        pathlib.Path | None, typer.Option(help="Folder; it goes on from there.")
    ] = None,
    out: Annotated[pathlib.Path | None, typer.Option(help="JSON of the result.")] = None,
) -> None:
    """Trains with one thing changed."""
    if checkpoints and idea in ("scale", "late"):
        raise typer.BadParameter(
            f"--checkpoints must be left out with --idea {idea}, whose own state is in none"
        )
    chosen = IDEAS[idea]()
    follow(chosen)
    study = experiments.BUDGETS["cpu"].cifar10
    # As in the momentum table.
    warmup = study.options["warmup_epochs"] * epochs / study.options["epochs"]
    row = experiments.run(
        study, "dgc", seed, epochs=epochs, validate=True, warmup_epochs=warmup, sparsity=sparsity
    )
    cifar10.main(
        **{
            **row.options,
            "factor_masking": factor_masking,
            "data": data,
            "checkpoints": checkpoints,
            "resume": checkpoints is not None,
            "out": out,
        }
    )
    if out:
        job.write(out, {"idea": idea, **json.loads(out.read_text())})


if __name__ == "__main__":
    typer.run(main)
