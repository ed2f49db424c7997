"""Time to a target: trains CIFAR-10 or PTB on hosts with shaped links, with one method after the other.

    sudo .venv/bin/python benchmarks/peers/clock.py --methods dense,dgc-allgather --rate 100mbit --target 85 --data DIR

Each host is a network namespace of this machine (hosts.py) with one process of train.py in it, over torch.distributed
(gloo). The clock is rank 0's and runs while it trains: not while it looks at the test images, when all others wait for
it. All hosts share this machine's cores, so that computing is slow and says nothing of a real cluster; that the methods
share it alike is what can be compared. What a host sends goes through a deep bucket where gradients or parameters
travel whole, which flatters them, and else through a shallow one (hosts.py).

A run that is killed, or out of time, goes on from its last epoch when the same command is given again. Where the target
is reached before the last epoch, what a method still holds back is not applied.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import job
from hosts import RATES, Network, check_tools, clean_leftovers, run_script

from peers import METHODS, table, tasks, train

HERE = Path(__file__).resolve()
WHOLE = ("dense", "fp16", "bf16", "diloco", "stale", "async")  # methods whose messages are as large as the model


def place(a: dict[str, Any]) -> None:
    """Tells this process its host, as torchrun would."""
    os.environ.update({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5001", "GLOO_SOCKET_IFNAME": "e0", "LOCAL_RANK": "0",
                       "RANK": str(a["rank"]), "WORLD_SIZE": str(a["hosts"])})


def work(a: dict[str, Any]) -> None:
    """One rank of one training; writes its result into the network's folder."""
    place(a)
    torch.set_num_threads(1)
    options = argparse.Namespace(**{**a["training"], "checkpoints": Path(a["training"]["checkpoints"])}, **train.FIXED)
    tasks.settle(options)
    result = train.train(options)
    Path(a["folder"], f"{a['rank']}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    os._exit(0)  # a server's thread may still wait for a push, which would abort the interpreter at its end


def run(network: Network, method: str, rate: str, options: dict[str, Any], folder: Path, limit: float) -> Path:
    """Trains with a method, unless its file is there, and returns the file.

    Raises:
        RuntimeError: a process failed, or the time is up.
    """
    name = f"{method}-{rate}-{options['seed']}"
    if (file := folder / f"{name}.json").exists():
        return file
    network.clear()
    network.shape(rate, "deep" if method in WHOLE else "shallow")
    training = {**options, "method": method, "checkpoints": str(folder / name), "resume": True}
    result = network.run(HERE, {"training": training}, limit)[0]
    job.write(file, {**result, "rate": rate, "target": options["target"]})
    return file


def curve(result: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Seconds of training, and the accuracy or validation perplexity at that time."""
    seconds, total = [], 0.0
    for epoch in result["history"]:
        seconds.append(total := total + epoch["seconds"])
    return seconds, [epoch[tasks.metric_of(result).name] for epoch in result["history"]]


def reached(result: dict[str, Any], target: float) -> float | None:
    """Seconds until the first epoch that ends with the target; None if there is none."""
    metric = tasks.metric_of(result)
    return next((second for second, score in zip(*curve(result), strict=True) if metric.reached(score, target)), None)


def markdown(results: list[dict[str, Any]], target: float) -> str:
    metric = tasks.metric_of(results[0])
    lines = [f"| method | link | seconds to {target:g}{metric.unit} | epochs | last {metric.name} | "
             "seconds of a step | sent in all |", "|" + 7 * "---|"]
    for result in results:
        found, (seconds, scores) = reached(result, target), curve(result)
        steps = len(seconds) * result["steps_per_epoch"]
        lines.append(f"| {result['title']} | {result['rate']} | {'not reached' if found is None else f'{found:.0f}'} | "
                     f"{len(seconds)} | {scores[-1]:.2f}{metric.unit} | {seconds[-1] / steps:.3f} | "
                     f"{result['bytes_sent'] / 1e6:,.1f} MB |")
    return "\n".join(lines) + "\n"


def draw(results: list[dict[str, Any]], target: float, out: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for result in results:
        colour, marker = table.style(result["method"])
        axes.plot(*curve(result), color=colour, marker=marker, markersize=4, label=result["title"])
    axes.axhline(target, color="#bbbbbb", linestyle=":")
    axes.set(xlabel="seconds of training", ylabel=tasks.metric_of(results[0]).curve,
             title=f"links of {results[0]['rate']}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def main(methods: Annotated[str, typer.Option(help="Of train.py, with commas.")] = "dense,fp16,dgc-allgather",
         rate: Annotated[str, typer.Option(help=f"Of {', '.join(RATES)}.")] = "100mbit",
         task: Annotated[str, typer.Option(help=f"Of {', '.join(tasks.TASKS)}.")] = "cifar10",
         target: Annotated[float | None, typer.Option(
             help="Test accuracy in per cent, or validation perplexity. Default: 85, or 115.")] = None,
         data: Annotated[str | None, typer.Option(help="As train.py takes it. Default: what needs no file.")] = None,
         epochs: Annotated[int, typer.Option(min=1, help="At most; the schedule is made for as many.")] = 25,
         batch_size: Annotated[int | None, typer.Option(min=1, help="Of each host. Default: as train.py's.")] = None,
         bf16: Annotated[bool, typer.Option("--bf16", help="Autocast to bfloat16.")] = False,
         hosts: Annotated[int, typer.Option(min=2, max=200)] = 4, seed: job.Seed = 0,
         minutes: Annotated[float, typer.Option(min=0, help="After which a method's processes are ended.")] = 600,
         out: Annotated[Path, typer.Option(help="Folder of results and checkpoints.")] = Path("runs/clock")) -> None:
    """Trains to a target on shaped links; prints a table, and draws accuracy against the clock."""
    check_tools()
    chosen, fitting = methods.split(","), [name for name in METHODS if tasks.fits(task, name)]
    for value, known, option in (([task], tasks.TASKS, "--task"), (chosen, fitting, "--methods"),
                                 ([rate], RATES, "--rate")):
        if wrong := [name for name in value if name not in known]:
            raise typer.BadParameter(f"{option} must be of {', '.join(known)}, got {wrong[0]!r}")
    target = tasks.TASKS[task].clock_target if target is None else target
    clean_leftovers()
    out.mkdir(parents=True, exist_ok=True)
    options = {"task": task, "data": data or {"cifar10": "digits"}.get(task), "cache": None, "depth": None,
               "epochs": epochs, "batch_size": batch_size, "lr": None, "weight_decay": None, "bf16": bf16,
               "virtual_workers": 1, "seed": seed, "threads": 1, "out": None, "target": target}
    files, failed = [], []
    with Network(hosts) as network:
        for method in chosen:
            try:
                files.append(run(network, method, rate, options, out.resolve(), 60 * minutes))
                print(f"{method}: {files[-1]}", flush=True)
            except RuntimeError as error:
                failed.append(method)
                print(f"clock.py: {method}: {error}", file=sys.stderr)
    if files:
        results = [json.loads(file.read_text()) for file in files]
        print(markdown(results, target), end="")
        draw(results, target, out / f"{rate}.png")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    run_script(work, main)
