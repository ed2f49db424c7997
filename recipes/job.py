"""What the recipes share, whatever they train: how they are launched, go on from checkpoints, and write results."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import nn

import dgc
from dgc.config import ACCEPTED, check_sparsity
from dgc.schedule import NUMBER, parse


def sparsity(text: str) -> float | str:
    """A number, or an expression that ``dgc.schedule.parse`` reads.

    Raises:
        typer.BadParameter: it is neither.
    """
    try:
        if NUMBER.fullmatch(str(text)):  # or the default, which is a number already
            return check_sparsity(float(text), "it")
        parse(text, steps_per_epoch=1)  # how many there are is known later, and makes nothing wrong
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def finite(number: float | None) -> float | None:
    """A number that training can go on with, or none.

    Raises:
        typer.BadParameter: it is infinite or none at all.
    """
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"it must be finite, got {number}")
    return number


def bound(number: float | None) -> float | None:
    """A bound on a norm; 0 is none, and so is infinity, which ``dgc tune`` gives.

    Raises:
        typer.BadParameter: it is no number.
    """
    return 0.0 if number == math.inf else finite(number)


def value_bits(bits: int) -> int:
    """Bits of a value in a message.

    Raises:
        typer.BadParameter: dgc has no such values.
    """
    if bits not in ACCEPTED["value_bits"]:
        raise typer.BadParameter(
            f"it must be one of {', '.join(map(str, ACCEPTED['value_bits']))}, got {bits}"
        )
    return bits


def local_steps(text: str) -> str:
    """H, 0 for none, or H from certain steps on, as :func:`rounds_of` reads it.

    Raises:
        typer.BadParameter: it is neither.
    """
    if text is not None and not re.fullmatch(r"\d+|0=[1-9]\d*(,\d+=[1-9]\d*)*", str(text)):
        raise typer.BadParameter(f"it must be H, or 0=H,STEP=H,... as in 0=1,454=4, got {text}")
    return text


def rounds_of(text: str | None) -> int | Callable[[int], int] | None:
    """``Config(local_steps=...)`` of an option: ``4``, or ``0=1,454=4`` for one step a round until step 454."""
    if text is None or "=" not in text:
        return int(text or 0) or None
    points = sorted(tuple(map(int, point.split("="))) for point in text.split(","))
    return lambda step: [h for first, h in points if step >= first][-1]


def writable(file: Path | None) -> Path | None:
    """A file that can be written in the end, hours from now; makes its folder.

    Raises:
        typer.BadParameter: it cannot.
    """
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"its folder cannot be made: {error}") from None
        if not os.access(file.parent, os.W_OK):
            raise typer.BadParameter(
                f"its folder must be one that can be written to, got {file.parent}"
            )
    return file


# Options that mean the same in every recipe.
Number = Annotated[float, typer.Option(min=0, callback=finite)]
Method = Annotated[
    Literal["dense", "fp16", "naive", "topk", "dgc"],
    typer.Option(
        help="fp16: Horovod's compression. naive: top-k that forgets what it does not send. "
        "topk: gradient dropping (Aji "
        "and Heafield 2017), which keeps it."
    ),
]
Sparsity = Annotated[
    Any,
    typer.Option(
        parser=sparsity,
        metavar="NUMBER|EXPR",
        help=(
            "After the warm-up; or a whole schedule as dgc schedule takes it, such as warmup:epochs=4,end=0.999."
        ),
    ),
]
Flush = Annotated[
    bool,
    typer.Option(
        help="Apply what is pending before the last evaluation. "
        "At a rate that has not been divided by then, this costs."
    ),
]
Exchange = Annotated[Literal["allgather", "reduce"], typer.Option(help="As in dgc.Config.")]
Hierarchical = Annotated[
    bool, typer.Option(help="As in dgc.Config: average within each machine first.")
]
ValueBits = Annotated[
    int, typer.Option(callback=value_bits, help="As in dgc.Config: 1, 2, 4, 8, 16 or 32.")
]
LocalSteps = Annotated[
    str | None,
    typer.Option(
        metavar="H|STEP=H,...",
        callback=local_steps,
        help="As in dgc.Config: steps of each worker's own between two exchanges. Default: none.",
    ),
]
VirtualWorkers = Annotated[int, typer.Option(min=1, help="Workers within one process.")]
VirtualNode = Annotated[
    int, typer.Option(min=1, help="How many of them count as being on one machine.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1)]
Threads = Annotated[int | None, typer.Option(min=1, help="Of this process; default: torch's.")]
Checkpoints = Annotated[Path | None, typer.Option(help="Folder for every rank's checkpoints.")]
Resume = Annotated[bool, typer.Option(help="Go on from the last one, bit for bit.")]
TensorBoard = Annotated[Path | None, typer.Option(help="Folder for TensorBoard.")]
Out = Annotated[
    Path | None, typer.Option(help="JSON of the results.", dir_okay=False, callback=writable)
]

FOLDER = "epoch{:03d}"
# Option -> without it.
OF_DGC = {
    "exchange": "allgather",
    "hierarchical": False,
    "value_bits": 16,
    "local_steps": None,
}
# Options that say where.
NO_SETTINGS = (
    "data",
    "cache",
    "out",
    "checkpoint",
    "checkpoints",
    "tensorboard",
    "resume",
)


def run_command(main: Callable[..., None]) -> None:
    """Runs a script's ``main`` with the options of the command line. The help is plain, as a framed
    one cuts names of options, and so are tracebacks, as several ranks' framed ones cannot be read.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    app()


def run(train: Callable[[], dict[str, Any]], a: Any) -> dict[str, Any]:
    """Trains as one of the launched ranks, or as all of ``--virtual-workers``; what rank 0, or this rank, returned."""
    if a.resume and a.checkpoints is None:
        raise typer.BadParameter("--resume needs --checkpoints")
    for name, default in OF_DGC.items():
        if a.method != "dgc" and getattr(a, name, default) != default:
            raise typer.BadParameter(
                f"--{name.replace('_', '-')} must be left out with --method {a.method}: it is of "
                "dgc alone"
            )
    if isinstance(a.sparsity, str) and a.warmup_epochs is not None:
        raise typer.BadParameter(
            f"--warmup-epochs must be left out where --sparsity is a whole schedule, got "
            f"--sparsity {a.sparsity}"
        )
    if a.virtual_workers % a.virtual_node:
        raise typer.BadParameter(
            f"--virtual-node must be a divisor of --virtual-workers, which is "
            f"{a.virtual_workers}, got {a.virtual_node}"
        )
    if a.threads:
        torch.set_num_threads(a.threads)
    launched = any(
        name in os.environ
        for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_RUN_ID")
    )
    if launched and a.virtual_workers > 1:
        raise typer.BadParameter(
            "--virtual-workers is for a single process, without horovodrun or torchrun"
        )
    return train() if launched else dgc.lockstep.run(train, a.virtual_workers, a.virtual_node)[0]


def connect() -> tuple[int, int, str]:
    """Initialises what this process was launched by: rank, number of ranks, and its name."""
    if (rank := dgc.lockstep.current()) is not None:
        return rank.world.rank, rank.world.size, "lockstep"
    if "HOROVOD_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        import horovod.torch as hvd

        hvd.init()
        if torch.cuda.is_available():
            torch.cuda.set_device(hvd.local_rank())
        return hvd.rank(), hvd.size(), "horovod"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return torch.distributed.get_rank(), torch.distributed.get_world_size(), "torch.distributed"


def of_rank_0(values: list[float], device: torch.device) -> list[float]:
    """Rank 0's values, on all ranks; to the bit below 2**53."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dgc.broadcast_parameters([("values", tensor)])
    return tensor.tolist()


def schedule(a: Any, steps: int, warmup: float) -> float | dgc.config.Schedule:
    """The expression's; or that of a number, after ``warmup`` epochs of ``steps`` in the paper's four stages."""
    if isinstance(a.sparsity, str):
        return parse(a.sparsity, steps)
    if not warmup:
        return a.sparsity
    return dgc.warmup(4, steps_per_epoch=max(1, round(warmup * steps / 4)), end=a.sparsity)


def distributed(
    optimizer: torch.optim.SGD, model: nn.Module, launcher: str, method: str, config: dgc.Config
) -> Any:
    """The one line that a Horovod user replaces, for each of the methods."""
    named = list(model.named_parameters())
    if launcher == "horovod" and method in ("dense", "fp16"):
        import horovod.torch as hvd

        compression = hvd.Compression.fp16 if method == "fp16" else hvd.Compression.none
        return hvd.DistributedOptimizer(optimizer, named, compression)
    if method == "fp16":
        raise typer.BadParameter(
            f"--method fp16 must run under horovodrun, whose compression it is, got {launcher}"
        )
    wrapped = dgc.DistributedOptimizer(optimizer, named, config)
    if method == "naive":
        nothing = wrapped.residual_state_dict()
        wrapped.register_step_post_hook(lambda *_: wrapped.load_residual_state_dict(nothing))
    return wrapped


def common_parameters(a: Any, optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """Within it the parameters are alike on all ranks, which between rounds of local steps they are
    not.
    """
    if rounds_of(a.local_steps) is None:
        return contextlib.nullcontext()
    averaged: contextlib.AbstractContextManager[None] = optimizer.averaged()
    return averaged


def training(a: Any, dataset: str, size: int, steps: int) -> dict[str, Any]:
    """What has to be the same for a training to go on from a checkpoint."""
    return {**settings(a), "dataset": dataset, "workers": size, "steps_per_epoch": steps}


def resume(
    a: Any, now: dict[str, Any], model: nn.Module, optimizer: Any, scheduler: Any
) -> list[dict[str, Any]]:
    """Takes up the last epoch of which there is a checkpoint, and returns the history up to there.

    Args:
        now: :func:`training`'s.

    Raises:
        typer.BadParameter: it is of another training, of which this one would be half.
    """
    # And not what somebody has copied beside them.
    done = max(
        (
            int(file.parent.name[5:])
            for file in a.checkpoints.glob("epoch*/manifest.json")
            if file.parent.name[5:].isdecimal()
        ),
        default=0,
    )
    done = int(of_rank_0([done], next(model.parameters()).device)[0])  # whose disk counts
    if not done:
        return []
    extras = dgc.load_checkpoint(a.checkpoints / FOLDER.format(done), model, optimizer)
    was = extras.get("training", {})
    if wrong := [
        f"{key} was {was.get(key)!r} and is {now.get(key)!r}"
        for key in {**was, **now}
        if was.get(key) != now.get(key) and key != "threads"
    ]:
        raise typer.BadParameter(
            f"--resume must have the settings of the checkpoint in {a.checkpoints}, got others: "
            f"{'; '.join(wrong)} (give those, or another folder)"
        )
    scheduler.load_state_dict(extras["scheduler"])
    return extras["history"]


def checkpoint(
    a: Any,
    now: dict[str, Any],
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    history: list[dict[str, Any]],
) -> None:
    """Saves the epoch that has just ended, whole or not at all; ``now`` is :func:`training`'s."""
    dgc.save_checkpoint(
        a.checkpoints / FOLDER.format(len(history)),
        model,
        optimizer,
        {"scheduler": scheduler.state_dict(), "history": history, "training": now},
    )
    # Two are enough, on any disk.
    shutil.rmtree(a.checkpoints / FOLDER.format(len(history) - 2), ignore_errors=True)


def board(a: Any, rank: int) -> Any:
    """Where rank 0 writes for TensorBoard, if it is to."""
    if rank > 0 or not a.tensorboard:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(a.tensorboard)


def log(board: Any, history: list[dict[str, Any]], keys: tuple[str, ...]) -> None:
    """Writes the epoch that has just ended to it."""
    if board:
        for key in keys:
            board.add_scalar(key, history[-1][key], len(history))
        board.flush()


def bytes_sent(history: list[dict[str, Any]], steps: int) -> float:
    """By one worker, in all."""
    return steps * sum(epoch["bytes_per_step"] for epoch in history)


def summary(
    a: Any,
    recipe: str,
    dataset: str,
    launcher: str,
    size: int,
    steps: int,
    model: nn.Module,
    history: list[dict[str, Any]],
    **measured: float,
) -> dict[str, Any]:
    """What ``--out`` writes and report.py reads."""
    return {
        "recipe": recipe,
        "dataset": dataset,
        "launcher": launcher,
        "workers": size,
        "steps_per_epoch": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dense_bytes_per_step": dense_bytes(model, size),
        "bytes_sent": bytes_sent(history, steps),
        **measured,
        "history": history,
        "settings": settings(a),
        "machine": machine(next(model.parameters()).device),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """What ran, and on what."""
    return {
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "device": str(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dgc": version(),
    }


def settings(a: Any) -> dict[str, Any]:
    """What a training depends on."""
    return {
        k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items() if k not in NO_SETTINGS
    }


@cache  # all workers of a process ask
def version() -> str:
    """The package's, with the commit in a clone; "-dirty" if a program has been changed since."""
    clone = Path(dgc.__file__).parents[1]
    if not (clone / ".git").exists():
        return dgc.__version__

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=clone, text=True, capture_output=True, timeout=10, check=True
        ).stdout.strip()

    try:
        return f"{dgc.__version__}, commit {git('describe', '--always')}" + (
            "-dirty" if git("status", "--porcelain", "--", "*.py") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return dgc.__version__


def dense_bytes(model: nn.Module, size: int) -> float:
    """What each of ``size`` workers sends in a ring allreduce of the gradients in float32."""
    return 2 * (size - 1) / size * 4 * sum(p.numel() for p in model.parameters())


def write(path: Path, result: dict[str, Any]) -> None:
    """JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)
