"""How long an exchange of gradients takes between hosts, and what it does to the speed of training.

Four hosts are network namespaces of this machine (hosts.py), with one process in each. One run measures Horovod dense
and DistributedDataParallel dense (float32, float16), PyTorch's PowerSGD hook, and DGC over Horovod and
torch.distributed:

    sudo .venv/bin/python benchmarks/network.py --rates 1gbit,100mbit

**resnet50** is one exchange of a gradient of ResNet-50's shapes, with no computation to hide behind, and **lstm** that
of a word language model's with 2 x 1500 LSTM. Timed, for every method: a backward pass that hands each parameter a
gradient drawn beforehand (last layer first, without a copy), the hooks that it fires, and synchronize(): until the
averaged gradient is there; and the processor time that threads other than the training one take meanwhile. Then, by
itself, the step of SGD, with momentum and weight decay. DGC's choice of entries is exact (compress.py prints its
energy). **resnet110** and **resnet110-wide** (its last stage has 256 channels instead of
64, so that the exchange dominates) are training steps of the CIFAR-10 recipe's network on random images. Timed:
zero_grad, forward, loss, backward, step. All ranks meet before each step, and again before they read what their links
have sent, by shared memory and not over a link. The time of a step is that of its slowest rank. Horovod looks for work
every 5 ms, not every millisecond as by default, which takes most of two cores from four processes (docs/migrating.md).

The token bucket's depth flatters one side: through a deep one short messages pass unshaped; with a shallow one, tokens
overflow while processes wait for a core, and long messages take longer than the wire. So DGC runs with the shallow one
and all others with the deep one. First, single transfers between two idle hosts must keep the nominal rate to 10 %:
shallow at all sizes from 64 kB to 10 MB, after a pause that fills the bucket; deep at sizes far above its depth.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from hosts import (
    RATES,
    Network,
    check,
    check_tools,
    clean_leftovers,
    place,
    place_for_horovod,
    refuse,
    run_script,
)
from outfile import write
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "recipes"))  # cifar10.py
SGD: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}
GIVEN = 8  # parameters that are given their gradients together
# Steps before timing: u and v fill up, PowerSGD begins after two dense steps.
WARMUP = {
    "dgc": 20,
    "powersgd": 5,
}
# Channels of the last stage, if trained.
MODELS = {
    "resnet50": 0,
    "lstm": 0,
    "resnet110": 64,
    "resnet110-wide": 256,
}
console = Console(width=None if sys.stdout.isatty() else 160)


# -- the methods: (model, DGC's config) -> (what to call, what to step) ------------------------------------------------


def horovod_fp32(model: Any, _: Any) -> tuple[Any, Any]:
    import horovod.torch as hvd

    return model, hvd.DistributedOptimizer(sgd(model), model.named_parameters())


def horovod_fp16(model: Any, _: Any) -> tuple[Any, Any]:
    import horovod.torch as hvd

    return model, hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), hvd.Compression.fp16
    )


def torch_dense(model: Any, _: Any) -> tuple[Any, Any]:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, broadcast_buffers=False), sgd(model)


def torch_fp16(model: Any, options: Any) -> tuple[Any, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    parallel, optimizer = torch_dense(model, options)
    parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return parallel, optimizer


def powersgd(model: Any, _: Any) -> tuple[Any, Any]:
    """Of rank 4, in one bucket: with several its collectives start in another order on each rank, and gloo aborts."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    parallel = DistributedDataParallel(model, broadcast_buffers=False, bucket_cap_mb=1 << 12)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return parallel, sgd(model)


def dgc_optimizer(model: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    import torch

    import dgc
    from dgc.compression import kernels

    kernels.compile_ahead(torch.float32)
    return model, dgc.DistributedOptimizer(
        sgd(model), model.named_parameters(), dgc_config(options)
    )


def dgc_reduce(model: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    return dgc_optimizer(model, {**options, "exchange": "reduce"})


def dgc_config(options: dict[str, Any]) -> Any:
    import dgc

    return dgc.Config(**{"sparsity": 0.999, **options})


METHODS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "horovod-fp32": horovod_fp32,
    "horovod-fp16": horovod_fp16,
    "torch-dense": torch_dense,
    "torch-fp16": torch_fp16,
    "powersgd": powersgd,
    "dgc-horovod": dgc_optimizer,
    "dgc-torch": dgc_optimizer,
    "dgc-torch-reduce": dgc_reduce,
}
# Which is for more hosts than four.
USUAL = [method for method in METHODS if method != "dgc-torch-reduce"]
NAMES = {
    "horovod-fp32": "Horovod",
    "horovod-fp16": "Horovod, float16",
    "torch-dense": "DDP",
    "torch-fp16": "DDP, float16",
    "powersgd": "PowerSGD, rank 4",
    "dgc-horovod": "DGC over Horovod",
    "dgc-torch": "DGC over torch.distributed",
    "dgc-torch-reduce": "DGC over torch.distributed, reduce",
}
TITLES = {
    "resnet50": "ResNet-50",
    "lstm": "the LSTM",
    "resnet110": "ResNet-110",
    "resnet110-wide": "a wide ResNet-110",
}


def sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), **SGD)


# -- one rank ----------------------------------------------------------------------------------------------------------


def exchanges(
    method: str,
    options: dict[str, Any],
    rank: int,
    model: str,
    compute: float = 0.0,
) -> Iterator[tuple[Callable[[], None], Callable[[], None], Any]]:
    """Steps on fresh gradients of a model's shapes: (what is timed, what is timed by itself, the optimizer). The
    backward pass sleeps for two thirds of ``compute`` seconds, the forward pass for one.
    """
    import gradients as shapes_of
    import torch

    shapes = getattr(shapes_of, model)()

    class Give(torch.autograd.Function):
        """Its backward pass gives some parameters their gradients, and keeps no reference, so that autograd takes them
        over. Some at a time, as each call costs as much as 20,000 entries do.
        """

        @staticmethod
        def forward(ctx: Any, x: Any, gradients: list[Any], begin: int, *parameters: Any) -> Any:
            ctx.gradients, ctx.begin, ctx.count = gradients, begin, len(parameters)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *outputs: Any) -> Any:
            given = ctx.gradients[ctx.begin : ctx.begin + ctx.count]
            ctx.gradients[ctx.begin : ctx.begin + ctx.count] = [None] * ctx.count
            time.sleep(2 / 3 * compute * ctx.count / len(shapes))
            return outputs[0], None, None, *given

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)

        def forward(self, gradients: list[Any]) -> Any:
            time.sleep(compute / 3)
            x = torch.zeros((), requires_grad=True)
            for begin in range(0, len(self.weights), GIVEN):
                x = Give.apply(x, gradients, begin, *self.weights[begin : begin + GIVEN])
            return x

    call, optimizer = METHODS[method](Model(), options)
    for gradients in shapes_of.heavy_tailed(shapes, seed=rank):
        root = call(gradients)

        def exchange(root: Any = root) -> None:
            root.backward()
            if hasattr(optimizer, "synchronize"):  # DistributedDataParallel has done so
                optimizer.synchronize()

        def update() -> None:
            with (
                optimizer.skip_synchronize() if hasattr(optimizer, "synchronize") else nullcontext()
            ):
                optimizer.step()

        yield exchange, update, optimizer
        optimizer.zero_grad()


def training(
    method: str, options: dict[str, Any], rank: int, model: str, batch: int
) -> Iterator[tuple[Callable[[], None], Callable[[], None], Any]]:
    """Training steps of a CIFAR ResNet-110 on random images; as above."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from cifar10 import resnet

    torch.manual_seed(0)
    call, optimizer = METHODS[method](resnet(110, MODELS[model]), options)
    generator = torch.Generator().manual_seed(rank)
    while True:
        images = torch.randn(batch, 3, 32, 32, generator=generator).contiguous(
            memory_format=torch.channels_last
        )
        labels = torch.randint(10, (batch,), generator=generator)

        def step(images: Any = images, labels: Any = labels) -> None:
            optimizer.zero_grad()
            F.cross_entropy(call(images), labels).backward()
            optimizer.step()

        yield step, lambda: None, optimizer


def work(a: dict[str, Any]) -> None:
    """One rank of one case; writes what it measured."""
    rank, folder = a["rank"], Path(a["folder"])
    with (folder / "meeting").open("r+b") as file:
        meeting = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")  # how often each rank has come

    def meet() -> None:
        meeting[rank] += 1
        while min(meeting) < meeting[rank]:
            time.sleep(0.0005)

    over_horovod = "horovod" in a["method"]
    if over_horovod:
        import horovod.torch as hvd

        place_for_horovod(a, a["cycle"])
        hvd.init()
    import torch

    torch.set_num_threads(1)
    if not over_horovod:
        place(a)
        torch.distributed.init_process_group("gloo")

    def link() -> int:
        return int(Path("/sys/class/net/e0/statistics/tx_bytes").read_text())

    def beside() -> float:
        """Processor time of all threads but this one: torch computes in it, and the others carry messages."""
        return time.process_time() - time.thread_time()

    seconds, updates, sent, others = [], [], [], []
    steps = (
        training(a["method"], a["options"], rank, a["model"], a["batch"])
        if MODELS[a["model"]]
        else exchanges(a["method"], a["options"], rank, a["model"])
    )
    for step, update, optimizer in steps:  # noqa: B007 (used after the loop)
        meet()
        before, began, elsewhere = link(), time.perf_counter(), beside()
        step()
        seconds.append(time.perf_counter() - began)
        others.append(beside() - elsewhere)
        update()
        updates.append(time.perf_counter() - began - seconds[-1])
        meet()
        sent.append(link() - before)
        if len(seconds) == a["warmup"] + a["steps"]:
            break
    numel = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    report = vars(optimizer.report()) if hasattr(optimizer, "report") else None
    (folder / f"{rank}.json").write_text(
        json.dumps(
            {
                "seconds": seconds[a["warmup"] :],
                "updates": updates[a["warmup"] :],
                "link_bytes": sent[a["warmup"] :],
                "other_threads_seconds": others[a["warmup"] :],
                "numel": numel,
                "report": report,
                "torch": torch.__version__,
            }
        )
    )
    meet()
    if over_horovod:
        hvd.shutdown()
    else:
        torch.distributed.destroy_process_group()


# -- all of them -------------------------------------------------------------------------------------------------------


def run(network: Network, rate: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank of a fresh group of processes wrote. RuntimeError: one failed, or the time is up."""
    network.shape(rate, depth_of(settings["method"]))
    network.clear()
    (network.folder / "meeting").write_bytes(bytes(8 * network.hosts))
    dense = 2 * 32 * 51e6 / RATES[rate].bits  # seconds on the wire
    limit = 180 + (settings["warmup"] + settings["steps"]) * (10 + 4 * dense)
    return network.run(HERE, settings, limit)


def depth_of(method: str) -> str:
    return "shallow" if method.startswith("dgc") else "deep"


def table(cases: list[dict[str, Any]], rate: str, model: str, hosts: int) -> Table:
    chosen = [case for case in cases if (case["rate"], case["model"]) == (rate, model)]
    ideal = 2 * (hosts - 1) / hosts * 4 * chosen[0]["numel"]
    dense = next(
        (case["median_seconds"] for case in chosen if case["method"] == "horovod-fp32"), None
    )
    result = Table(
        title=f"{model}, {chosen[0]['numel']:,} parameters, {hosts} hosts at {rate}; "
        f"the wire alone takes {8e3 * ideal / RATES[rate].bits:.0f} ms for dense float32"
    )
    for column in (
        "method",
        "bucket",
        "ms",
        "min - max",
        "other threads ms",
        "and SGD",
        "a second",
        "vs Horovod fp32",
        "bytes on a host's link",
        "fewer than dense",
        "message",
        "entries sent",
    ):
        result.add_column(column, justify="left" if column in ("method", "bucket") else "right")
    for case in chosen:
        low, high = case["spread_seconds"]
        # DGC's: the paper's compression ratio is that of one rank's message.
        report = case["report"]
        result.add_row(
            case["method"],
            f"{getattr(RATES[rate], case['depth'])} kB",
            f"{1e3 * case['median_seconds']:.1f}",
            f"{1e3 * low:.1f} - {1e3 * high:.1f}",
            f"{1e3 * statistics.median(case['other_threads_seconds']):.1f}",
            "" if MODELS[model] else f"{1e3 * statistics.median(case['update_seconds']):.1f}",
            f"{1 / case['median_seconds']:.2f}",
            f"{dense / case['median_seconds']:.2f} x" if dense else "",
            f"{case['median_link_bytes']:,.0f}",
            f"{ideal / case['median_link_bytes']:.1f} x",
            f"{4 * case['numel'] / report['message_bytes']:.1f} x" if report else "",
            f"{report['density'] * case['numel']:,.0f}"
            if report
            else "all"
            if case["method"] != "powersgd"
            else "",
        )
    return result


def plot(cases: list[dict[str, Any]], hosts: int, file: Path) -> None:
    """A bar for each method's median, with a whisker from the fastest to the slowest step. A row for each rate."""
    models, rates, methods = (
        list(dict.fromkeys(case[key] for case in cases)) for key in ("model", "rate", "method")
    )
    height = 0.7 + (0.3 * len(methods) + 0.6) * len(rates)
    from dgc import drawing

    figure, panes = drawing.panels(len(models), len(rates), height, squeeze=False, sharey=True)
    for row, rate in zip(panes, rates, strict=True):
        for axes, model in zip(row, models, strict=True):
            own = {
                case["method"]: case
                for case in cases
                if (case["rate"], case["model"]) == (rate, model)
            }
            for method, case in own.items():
                bar(
                    axes,
                    methods.index(method),
                    case,
                    drawing.DGC
                    if method.startswith("dgc")
                    else drawing.DENSE
                    if method in ("horovod-fp32", "torch-dense")
                    else drawing.MUTED[0],
                )
            what = (
                f"training step, {TITLES[model]}"
                if MODELS[model]
                else f"exchange of {TITLES[model]}'s gradient"
            )
            longest = max(case["spread_seconds"][1] for case in own.values())
            axes.set(
                title=f"{what},\n{hosts} hosts, {rate[:-4]} {rate[-4].upper()}bit/s",
                xlim=(0, 1300 * longest),
            )
            axes.grid(visible=False, axis="y")
        row[0].set_yticks(range(len(methods)), [NAMES[method] for method in methods])
        row[0].invert_yaxis()
    for axes in panes[-1]:
        axes.set_xlabel("milliseconds: median, fastest and slowest")
    drawing.save(figure, file)


def bar(axes: Any, place: int, case: dict[str, Any], colour: str) -> None:
    median, (low, high) = 1e3 * case["median_seconds"], (1e3 * s for s in case["spread_seconds"])
    axes.barh(
        place,
        median,
        0.7,
        color=colour,
        xerr=[[median - low], [high - median]],
        error_kw={"linewidth": 1},
    )
    axes.annotate(
        f"{median:,.0f} ms",
        (high, place),
        (5, 0),
        textcoords="offset points",
        va="center",
        color=colour,
    )


def parse(values: str, accepted: Any, option: str) -> list[str]:
    names = values.split(",")
    for name in names:
        if name not in accepted:
            raise typer.BadParameter(f"{option} must be of {', '.join(accepted)}, got {name!r}")
    return names


def main(
    rates: Annotated[str, typer.Option(help=f"Of {', '.join(RATES)}.")] = "10gbit,1gbit,100mbit",
    models: Annotated[
        str, typer.Option(help="Of resnet50, lstm, resnet110, resnet110-wide.")
    ] = "resnet50,resnet110-wide",
    methods: Annotated[
        str, typer.Option(help="Of the default's, and dgc-torch-reduce.")
    ] = ",".join(USUAL),
    hosts: Annotated[int, typer.Option(min=2, max=200)] = 4,
    repeats: Annotated[
        int, typer.Option(min=1, help="Fresh groups of processes for each case, in turn.")
    ] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps in each of them.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Images of a training step, on each host.")] = 1,
    cycle: Annotated[
        float,
        typer.Option(min=0, help="Milliseconds of Horovod's cycle, for all that runs over it."),
    ] = 5,
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="How far single transfers may miss the rate.")
    ] = 0.1,
    dgc_option: Annotated[
        list[str] | None, typer.Option(help="key=value for dgc.Config; again for more.")
    ] = None,
    out: Annotated[Path, typer.Option(help="JSON; the picture lies beside it.")] = HERE.parent
    / "results"
    / "network.json",
) -> None:
    """Times the exchange of gradients between hosts of 10 Gbit/s, 1 Gbit/s and 100 Mbit/s, dense and compressed."""
    chosen = (
        parse(rates, RATES, "--rates"),
        parse(models, MODELS, "--models"),
        parse(methods, METHODS, "--methods"),
    )
    options: dict[str, Any] = {}
    for key, _, value in (option.partition("=") for option in dgc_option or ()):
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    check_tools()
    if "horovod" in methods and importlib.util.find_spec("horovod") is None:
        refuse("it needs Horovod (scripts/build_horovod.sh), or --methods without it")
    if options:
        try:
            dgc_config(options)  # imports torch, which takes seconds
        except (TypeError, ValueError) as error:
            raise typer.BadParameter(f"--dgc-option: {error}") from None
    clean_leftovers()
    out.parent.mkdir(parents=True, exist_ok=True)
    with Network(hosts) as network:
        failed = measure(
            network,
            *chosen,
            repeats,
            {"steps": steps, "batch": batch, "cycle": cycle, "options": options},
            tolerance,
            out,
        )
    raise SystemExit(1 if failed else 0)


def measure(
    network: Network,
    rates: list[str],
    models: list[str],
    methods: list[str],
    repeats: int,
    settings: dict[str, Any],
    tolerance: float,
    out: Path,
) -> list[str]:
    """All cases, one after the other, again and again; what failed."""
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    result: dict[str, Any] = {
        "benchmark": "network",
        "hosts": network.hosts,
        "repeats": repeats,
        **settings,
        "sgd": SGD,
        "transfers": {},
        "buckets": {rate: RATES[rate]._asdict() for rate in rates},
        "cases": [],
        "failed": [],
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "tcp": congestion,
            "python": platform.python_version(),
        },
    }
    cases: dict[tuple[str, str, str], dict[str, Any]] = {}
    for rate in rates:
        holds, result["transfers"][rate] = check(network, rate, tolerance)
        if not holds:
            result["failed"].append(
                f"{rate}: not measured, as single transfers miss the nominal rate by more than "
                f"{100 * tolerance:g} % (is the machine busy, or too slow for it? --tolerance allows more)"
            )
            continue
        for repeat, model, method in (
            (r, mo, me) for r in range(repeats) for mo in models for me in methods
        ):
            warmup = WARMUP.get(method.split("-")[0], 2)
            try:
                ranks = run(
                    network, rate, {**settings, "model": model, "method": method, "warmup": warmup}
                )
            except RuntimeError as error:
                result["failed"].append(f"{rate} {model} {method}, repeat {repeat + 1}: {error}")
                console.print(f"{rate} {model} {method}: {error}", markup=False)
                continue
            case = cases.setdefault(
                (rate, model, method),
                {
                    "rate": rate,
                    "model": model,
                    "method": method,
                    "depth": depth_of(method),
                    "warmup": warmup,
                    "numel": ranks[0]["numel"],
                    "seconds": [],
                    "update_seconds": [],
                    "link_bytes": [],
                },
            )
            case["seconds"] += [
                max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)
            ]
            case["update_seconds"] += [
                max(step) for step in zip(*(rank["updates"] for rank in ranks), strict=True)
            ]
            case["link_bytes"] += [
                statistics.mean(s) for s in zip(*(r["link_bytes"] for r in ranks), strict=True)
            ]
            case["other_threads_seconds"] = case.get("other_threads_seconds", []) + [
                statistics.mean(s)
                for s in zip(*(r["other_threads_seconds"] for r in ranks), strict=True)
            ]
            case["report"] = ranks[0]["report"]
            result["machine"]["torch"] = ranks[0]["torch"]
            case["median_seconds"] = statistics.median(case["seconds"])
            case["spread_seconds"] = [min(case["seconds"]), max(case["seconds"])]
            case["median_link_bytes"] = statistics.median(case["link_bytes"])
            result["cases"] = list(cases.values())
            write(out, result)
            console.print(
                f"{repeat + 1}/{repeats} {rate} {model} {method}: {1e3 * case['median_seconds']:.1f} ms"
            )
    if cases:  # else what is there from before is left alone
        write(out, result)
    for rate, model in dict.fromkeys((rate, model) for rate, model, _ in cases):
        console.print(table(result["cases"], rate, model, network.hosts))
    if cases:
        plot(result["cases"], network.hosts, out.with_suffix(".png"))
    for failure in result["failed"]:
        print(f"network.py: {failure}", file=sys.stderr)
    return result["failed"]


if __name__ == "__main__":
    run_script(work, main)
