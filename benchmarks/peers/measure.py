"""Times a step part by part: computing, each method's local work, and its exchange between hosts with shaped links.

    sudo .venv/bin/python benchmarks/peers/measure.py        # --task ptb

steps.py and table.py read the JSON. Gradients are random, of the shapes of the task's model. Each part has processes of
its own, of one thread each; medians are over ``--steps`` steps, after some to warm up.

- **compute**: what train.py does in a step besides, of one worker alone: forward and backward pass, augmenting.
- **local**: ``step()`` of all workers in one process, in lockstep, divided by their number. Nothing is sent; lockstep's
  sums and copies are in it. Not of ``async``, where each worker would be the server, too.
- **exchange**: ``step()`` on hosts with shaped links (hosts.py), over torch.distributed (gloo): the slowest rank's. Its
  local work is in it. All hosts share this machine's cores. Before each step all meet, and buckets are full again.

DGC has its sparsity after the warm-up. With DiLoCo and local SGD every second step exchanges; the tables weigh both
kinds. One step late, the time is from the call to the end of the exchange: nothing is hidden. What the JSON has is not
measured again.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))
import job
from hosts import RATES, WORK, Network, check_tools, clean_leftovers, place, run_script

import dgc
from dgc.collective import Collective
from dgc.compression.kernels import compile_ahead
from dgc.transport import find
from peers import METHODS, clock, rehearsal
from peers.parameter_server import ParameterServer
from peers.stale import Stale
from peers.tasks import TASKS, fits, folder

HERE = Path(__file__).resolve()
WARMUP = 20  # steps: u and v fill up, PowerSGD begins after two dense steps
# When it began and ended, and the bytes that this rank sent in it.
Step = tuple[float, float, float]


def work(a: dict[str, Any]) -> None:
    """One process: of computing, of all workers in lockstep, or of one host."""
    torch.set_num_threads(1)
    if a["part"] == "compute":
        print(json.dumps(computing(a)))
        return
    compile_ahead(torch.float32)
    if a["part"] == "local":
        print(json.dumps(dgc.lockstep.run(lambda: steps(a), a["hosts"])))
        return
    place(a)
    job.connect()
    Path(a["folder"], f"{a['rank']}.json").write_text(json.dumps(steps(a)))
    torch.distributed.barrier()
    # A server's thread may still wait for a push, which would abort the interpreter at its end.
    os._exit(0)


def computing(a: dict[str, Any]) -> list[float]:
    """Seconds of each step's forward and backward pass."""
    (_, backward), found = TASKS[a["task"]].rehearsal(a["bf16"]), []
    for _ in range(2 + a["steps"]):  # the first two set up memory
        began = time.perf_counter()
        backward()
        found.append(time.perf_counter() - began)
    return found[2:]


def steps(a: dict[str, Any]) -> list[Step]:
    """A rank's."""
    (parameters, peer, gradients), found = rehearsal.ready(a), []
    for step in range(WARMUP + a["steps"]):
        for p, gradient in zip(parameters, next(gradients), strict=True):
            p.grad = gradient
        before = peer.bytes_sent
        if a["part"] == "exchange":
            time.sleep(0.01)  # the buckets of the links are full again
        meet()
        began = time.perf_counter()
        peer.step(last=METHODS[a["method"]].every > 1 and step % 2 == 0)
        if isinstance(peer, Stale):
            peer.receive()
        ended = time.perf_counter()
        meet()  # in lockstep, so that no rank goes on while others are in their step
        found.append((began, ended, peer.bytes_sent - before))
    return found[WARMUP:]


def meet() -> None:
    find().start(Collective("all_reduce", torch.zeros(1)), "meeting")()


def medians(
    ranks: list[list[Step]], seconds: Callable[[tuple[Step, ...]], float]
) -> dict[str, float | None]:
    """Seconds of a step that exchanges, and of one that does not; bytes in the former, of the rank that sends most."""
    found: dict[str, list[float]] = {"exchanging": [], "alone": [], "bytes": []}
    for step in zip(*ranks, strict=True):
        sent = max(sent for _, _, sent in step)
        found["exchanging" if sent else "alone"].append(seconds(step))
        found["bytes"] += [sent] if sent else []
    return {name: statistics.median(values) if values else None for name, values in found.items()}


def in_turn(step: tuple[Step, ...]) -> float:
    """A worker's, of those of which one at a time runs."""
    return (max(ended for _, ended, _ in step) - min(began for began, _, _ in step)) / len(step)


def slowest(step: tuple[Step, ...]) -> float:
    return max(ended - began for began, ended, _ in step)


def printed(a: dict[str, Any], limit: float) -> Any:
    """What a process of its own prints. RuntimeError: it failed, or the time is up."""
    try:
        done = subprocess.run(
            [sys.executable, str(HERE), WORK, json.dumps(a)],
            stdout=subprocess.PIPE,
            timeout=limit,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it was not done after {limit:.0f} s (--minutes)") from None
    if done.returncode:
        raise RuntimeError(f"its process failed with status {done.returncode}")
    return json.loads(done.stdout)


def measured(part: str, a: dict[str, Any], network: Network | None, limit: float) -> Any:
    """Medians of a part. RuntimeError: as above."""
    kind, *rate, name = part.split()
    a = {**a, "part": kind, "method": name, "bf16": name == "bfloat16"}
    if network is not None and rate:
        network.clear()
        network.shape(*rate, clock.depth_of(name))
        return medians(network.run(HERE, a, limit), slowest)
    return (
        statistics.median(printed(a, limit))
        if kind == "compute"
        else medians(printed(a, limit), in_turn)
    )


def begun(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What has been measured already. typer.BadParameter: with other settings, on another machine or by other code."""
    found: dict[str, Any] = (
        json.loads(out.read_text()) if out.exists() else {**settings, "seconds": {}}
    )
    if wrong := [
        f"{key} was {found.get(key)!r} and is {value!r}"
        for key, value in settings.items()
        if found.get(key) != value
    ]:
        raise typer.BadParameter(
            f"--out must be of the same settings, got {out} of others: {'; '.join(wrong)} (move "
            "it away, and all is measured again)"
        )
    return found


def main(
    methods: Annotated[
        str | None, typer.Option(help="Of train.py, with commas. Default: the task's.")
    ] = None,
    rates: Annotated[
        str, typer.Option(help=f"Of {', '.join(RATES)}; none: no hosts.")
    ] = "100mbit,1gbit",
    steps: Annotated[int, typer.Option(min=2, help="Timed steps of each part.")] = 50,
    hosts: Annotated[int, typer.Option(min=2, max=200, help="Workers, one on each host.")] = 4,
    minutes: Annotated[
        float, typer.Option(min=0, help="After which a part's processes are ended.")
    ] = 10,
    out: Annotated[Path | None, typer.Option(help="JSON. Default: in benchmarks/results.")] = None,
    task: Annotated[str, typer.Option(help=f"Of {', '.join(TASKS)}.")] = "cifar10",
) -> None:
    """Measures what is missing in the JSON."""
    fitting = [name for name in METHODS if fits(task, name)]
    names, links = (
        methods.split(",") if methods else fitting,
        [] if rates == "none" else rates.split(","),
    )
    for value, known, option in (
        ([task], TASKS, "--task"),
        (names, fitting, "--methods"),
        (links, RATES, "--rates"),
    ):
        if wrong := [name for name in value if name not in known]:
            raise typer.BadParameter(f"{option} must be of {', '.join(known)}, got {wrong[0]!r}")
    if links:
        check_tools()
        clean_leftovers()
    out = out or HERE.parents[1] / "results" / f"{folder(task)}-measured.json"
    result = begun(
        out,
        {
            "benchmark": "peers",
            "task": task,
            "workers": hosts,
            "steps": steps,
            "batch_size": TASKS[task].defaults["batch_size"],
            "machine": job.machine(torch.device("cpu")),
            "parameters": sum(p.numel() for p in TASKS[task].rehearsal()[0].parameters()),
        },
    )
    parts, failed = ["compute float32", *(["compute bfloat16"] if task == "cifar10" else [])], []
    parts += [f"local {name}" for name in names if METHODS[name].driver is not ParameterServer]
    parts += [f"exchange {rate} {name}" for rate in links for name in names]
    with Network(hosts) if links else nullcontext() as network:
        for part in [part for part in parts if part not in result["seconds"]]:
            try:
                asked = {"task": task, "steps": steps, "hosts": hosts}
                result["seconds"][part] = measured(part, asked, network, 60 * minutes)
                job.write(out, result)
                print(f"{part}: {result['seconds'][part]}", flush=True)
            except RuntimeError as error:
                failed.append(part)
                print(f"measure.py: {part}: {error}", file=sys.stderr)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    run_script(work, main)
