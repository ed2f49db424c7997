"""How large the package is, and how many of its files one training step enters.

    python scripts/size.py

Tokens are Python's, without comments, docstrings and line ends. A step is the second compressed one of two ranks in
lockstep, from backward() to step(), traced by Python's profiler.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import threading
import tokenize
from pathlib import Path

import torch
from torch import nn

import dgc

PACKAGE = Path(dgc.__file__).parent
SKIPPED = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
STEPS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}, dgc.Config(0.9)),
    "SGD, reduce": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
        dgc.Config(0.9, exchange="reduce"),
    ),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}, dgc.Config(dgc.piecewise({0: 0.0, 1: 0.9}))),
}


def tokens(text: str) -> list[tokenize.TokenInfo]:
    """The tokens of a module that are no comment, no docstring and no line end."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    }
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token for token in found if token.type not in SKIPPED and token.start not in docstrings]


def bodies(text: str) -> list[int]:
    """The tokens of each function's body."""
    all_tokens, sizes = tokens(text), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first, last = node.body[0].lineno, node.body[-1].end_lineno or 0
            sizes.append(sum(first <= token.start[0] <= last for token in all_tokens))
    return sizes


def entered(step: str) -> set[str]:
    """The files of the package that a step enters."""
    kind, settings, config = STEPS[step]
    files: set[str] = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            files.add(frame.f_code.co_filename)

    def worker():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
        optimizer = dgc.DistributedOptimizer(
            kind(network.parameters(), **settings), network.named_parameters(), config
        )
        for i in range(4):
            optimizer.zero_grad()
            loss = network(torch.randn(8, 40)).square().mean()
            sys.setprofile(note if i == 3 else None)
            loss.backward()
            optimizer.step()
            sys.setprofile(None)

    threading.setprofile(None)
    dgc.lockstep.run(worker, 2)
    return files


def main() -> None:
    texts = {file: file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
    counts = {file: len(tokens(text)) for file, text in texts.items()}
    lines = sum(bool(line.strip()) for text in texts.values() for line in text.splitlines())
    sizes = sorted(size for text in texts.values() for size in bodies(text))
    print(f"tokens                    {sum(counts.values()):,}")
    print(f"files                     {len(texts)}")
    print(f"tokens a non-blank line   {sum(counts.values()) / lines:.1f}")
    print(
        f"tokens of a body          median {statistics.median(sizes):.0f}, 90 % {sizes[int(0.9 * len(sizes))]}"
    )
    print(f"fields of Config          {len(dgc.Config.__dataclass_fields__)}")
    for step in STEPS:
        print(f"files that a step enters  {len(entered(step))} ({step})")


if __name__ == "__main__":
    main()
