"""What one GPU can show in 13 minutes: the kernels' tests, their speed, and CIFAR-10 at the paper's length.

    python scripts/gpu_day.py --data DIR --out results

Each part has a limit of its own, and leaves its result in the folder: run the line again to go on. A
part whose result is there is left out, and a training goes on from its last epoch. DIR is that of
recipes/cifar10.py.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from dgc.user_code import end

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "recipes"))
import job  # noqa: E402


class Part(NamedTuple):
    """A program, and for how many seconds it may run."""

    name: str
    limit: int
    command: list[str]


def parts(data: str, out: Path, rehearse: bool) -> list[Part]:
    """In the order of their importance, should the time be cut short."""
    tests = ["-m", "pytest", "-q", "tests/compression/test_kernels_cuda.py"]
    speed = ["benchmarks/gpu.py", "--out", str(out / "gpu.json")]
    length = ["benchmarks/crowd/all.py", "--data", data, "--results", str(out / "length")]
    if rehearse:
        tests += ["-k", "test_decay"]
        speed += ["--device", "cpu", "--numel", "4096", "--warmup", "0", "--steps", "2"]
        length += ["--epochs", "1"]
    return [
        Part("tests", 120, tests),
        Part("speed", 60, speed),
        Part("length", 600, [*length, "--only", "length-.*-0", "--jobs", "2"]),
    ]


def run(part: Part) -> tuple[str, float]:
    """How a part ended, and after how many seconds. Its processes end with it."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *part.command], cwd=REPOSITORY, start_new_session=True
    )
    try:
        status = process.wait(part.limit)
        ended = "done" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        ended = f"stopped after its {part.limit} s: run this again to go on"
    finally:
        end(process)
    return ended, time.monotonic() - began


def main(
    data: Annotated[str, typer.Option(help="As of recipes/cifar10.py.")],
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Little of each part, on the CPU, to try the script.")
    ] = False,
) -> None:
    """Runs what is not done yet, and says how each part ended."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    for part in parts(data, out, rehearse):
        file = out / f"{part.name}.json"
        if file.exists():
            print(f"{part.name}: was done", flush=True)
            continue
        ended, seconds = run(part)
        print(f"{part.name}: {ended}, {seconds:.0f} s", flush=True)
        failed |= ended != "done"
        if ended == "done":
            job.write(file, {"part": part.name, "seconds": seconds, "command": part.command})
    raise SystemExit(failed)


if __name__ == "__main__":
    job.run_command(main)
