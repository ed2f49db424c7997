"""The paper's experiments as data: studies, rows, seeds and budgets, and the runs that they ask for.

The rows are those of the authors' talk. On CIFAR-10 the paper does not clip, so there is no row for it. The language
model is trained without momentum, as in the paper, so momentum correction and momentum factor masking change nothing
there: those rows would be other rows once more. Seeds were fixed before anything was run, and none is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

HERE = Path(__file__).resolve().parent
MAIN = "dense", "naive", "dgc"
BETWEEN = "topk", "momentum", "clipping", "masking", "gradients"
# Row -> its title, what differs from the study's options, and what the paper gives as the difference to dense training:
# the authors' talk, at 99.9 %; in brackets, the paper's table for ResNet-110 and four workers.
ROWS: dict[str, dict[str, tuple[str, dict[str, Any], str]]] = {
    "cifar10": {
        "dense": ("dense", {"method": "dense"}, ""),
        "naive": ("naive top-k", {"method": "naive"}, "-1.6"),
        "topk": ("+ local accumulation (gradient dropping)", {"method": "topk"}, "(-1.00)"),
        "momentum": (
            "+ momentum correction",
            {"method": "dgc", "factor_masking": False, "warmup_epochs": 0.0},
            "-0.3",
        ),
        "masking": ("+ momentum factor masking", {"method": "dgc", "warmup_epochs": 0.0}, "-0.1"),
        "dgc": ("+ warm-up (DGC)", {"method": "dgc"}, "+0.37 (+0.12)"),
    },
    "ptb": {  # of perplexity, where less is better; the talk's row of masking, 0.5 worse than dense, is no row here
        "dense": ("dense", {"method": "dense"}, ""),
        "naive": ("naive top-k", {"method": "naive"}, "+3.3"),
        "topk": ("+ local accumulation (gradient dropping)", {"method": "topk"}, ""),
        "clipping": ("+ local clipping", {"method": "dgc", "warmup_epochs": 0.0}, "+2.0"),
        "dgc": ("+ warm-up (DGC)", {"method": "dgc"}, "-0.4"),
    },
    "transformer": {  # with AdamW, which the paper does not have
        "dense": ("dense", {"method": "dense"}, ""),
        "gradients": (
            "gradients are accumulated, 99 %",
            {"method": "dgc", "momentum_correction": False, "sparsity": 0.99},
            "",
        ),
        "dgc": ("DGC", {"method": "dgc"}, ""),
    },
}
# The methods that are compared by workers.
WORKERS = {
    "dense": "dense",
    "topk": "gradient dropping",
    "dgc": "DGC",
}


@dataclass(frozen=True)
class Study:
    """A recipe with the options that all of its runs have, but where a row or a table says otherwise."""

    recipe: str
    name: str  # with which the files begin
    title: str
    dataset: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Budget:
    """What there is to run, and where it goes."""

    results: Path
    figures: Path
    work: Path  # checkpoints and logs
    cifar10: Study
    ptb: Study
    transformer: Study
    # CIFAR-10's main rows; PTB's; rows between.
    seeds: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    # Seeds of the shortest length's cells of dense training and of the usual sparsity.
    deciding: tuple[int, ...]
    lengths: tuple[int, ...]  # in epochs, the shortest first, with warm-ups in proportion
    workers: tuple[int, ...]
    sparsities: tuple[float, ...]
    warmups: tuple[float, ...]  # in epochs
    exchange: Study
    crowds: tuple[int, ...]  # workers, with each exchange
    pair: tuple[int, ...]  # seeds of these
    many: Study  # workers, and few steps
    paper: tuple[int, float]  # epochs, and those of warm-up, at the paper's length


def _options(warmup: float, **options: Any) -> dict[str, Any]:
    return {
        **options,
        "virtual_workers": 4,
        "sparsity": 0.999,
        "warmup_epochs": warmup,
        "threads": 1,
    }


def _exchange(dataset: str, **options: Any) -> Study:
    return Study(
        "cifar10",
        "cifar10-exchange",
        "ResNet-20",
        dataset,
        _options(
            1.0,
            depth=20,
            batch_size=128,
            exchange="allgather",
            hierarchical=False,
            virtual_node=1,
            **options,
        ),
    )


def _many(dataset: str, workers: int, epochs: int) -> Study:
    return Study(
        "cifar10",
        "cifar10-many",
        "ResNet-20",
        dataset,
        {
            **_options(
                0.5, depth=20, epochs=epochs, batch_size=8, validate=True, exchange="allgather"
            ),
            "virtual_workers": workers,
        },
    )


def _transformer(dataset: str, epochs: int) -> Study:
    """A tenth dense, then a fifth in which the sparsity rises to 99.2 %."""
    return Study(
        "transformer",
        "transformer",
        "Transformer of 4 x 128, AdamW",
        dataset,
        {**_options(epochs / 5), "sparsity": 0.992, "dense_epochs": epochs / 10, "epochs": epochs},
    )


_FULL: dict[str, Any] = {
    "results": HERE / "results",
    "figures": HERE.parent / "docs",
    "work": HERE.parent / "runs" / "reproduce",
    "seeds": ((0, 1, 2), (0, 1), (0, 1)),
    "deciding": (0, 1, 2, 3, 4, 5),
    "workers": (4, 32),
    "sparsities": (0.99, 0.999, 0.9995, 0.9999),
    "warmups": (0.0, 1.0, 2.0, 4.0, 8.0),
    "exchange": _exchange("cifar10", epochs=10),
    "crowds": (4, 16, 64),
    "pair": (0, 1),
    "many": _many("cifar10", workers=32, epochs=7),
    "transformer": _transformer("ptb", epochs=8),
    "paper": (164, 4.0),
}
BUDGETS = {
    "cpu": Budget(
        **_FULL,
        lengths=(5, 25),
        cifar10=Study(
            "cifar10", "cifar10", "ResNet-20", "cifar10", _options(2.0, depth=20, epochs=25)
        ),
        ptb=Study("ptb", "ptb", "LSTM of 2 x 200", "ptb", _options(0.2, size="small", epochs=8)),
    ),
    "gpu": Budget(
        **_FULL,
        lengths=(41, 164),
        cifar10=Study(
            "cifar10",
            "cifar10-resnet110",
            "ResNet-110",
            "cifar10",
            _options(4.0, depth=110, epochs=164),
        ),
        ptb=Study(
            "ptb", "ptb-large", "LSTM of 2 x 1500", "ptb", _options(1.0, size="large", epochs=40)
        ),
    ),
    "quick": Budget(
        results=Path("runs/quick/results"),
        figures=Path("runs/quick"),
        work=Path("runs/quick"),
        cifar10=Study(
            "cifar10",
            "cifar10",
            "ResNet-20",
            "digits",
            _options(1.0, depth=20, epochs=2, batch_size=64),
        ),
        ptb=Study(
            "ptb",
            "ptb",
            "LSTM of 2 x 200",
            "pydoc topics",
            _options(0.2, size="small", epochs=1, bptt=70),
        ),
        transformer=_transformer("pydoc topics", epochs=1),
        seeds=((0, 1), (0, 1), (0, 1)),
        deciding=(0, 1),
        lengths=(1,),
        workers=(4, 8),
        sparsities=(0.99, 0.999),
        warmups=(0.0, 1.0),
        exchange=_exchange("digits", epochs=1),
        crowds=(4,),
        pair=(0,),
        many=_many("digits", workers=8, epochs=1),
        paper=(2, 1.0),
    ),
}


@dataclass(frozen=True)
class Run:
    name: str
    study: Study
    options: Mapping[str, Any]  # of the recipe's command line, as its main() names them

    def command(self, budget: Budget, data: str | None) -> list[str]:
        where = {
            "data": data,
            "checkpoints": budget.work / self.name,
            "resume": True,
            "out": self.out(budget),
        }
        options = {
            key: value for key, value in {**self.options, **where}.items() if value is not None
        }
        words = [sys.executable, str(HERE / f"{self.study.recipe}.py")]
        for key, value in options.items():
            option = key.replace("_", "-")
            words += (
                [f"--{option}" if value else f"--no-{option}"]
                if isinstance(value, bool)
                else [f"--{option}", str(value)]
            )
        return words

    def out(self, budget: Budget) -> Path:
        return budget.results / f"{self.name}.json"


def run(study: Study, row: str, seed: int, **changed: Any) -> Run:
    """A row's run; what is changed beyond the row is in its name."""
    options = {**study.options, **ROWS[study.recipe][row][1]}
    marks = {
        "epochs": lambda x: f"epochs{x}",
        "warmup_epochs": lambda x: f"warmup{x:g}",
        "sparsity": lambda x: f"sparsity{100 * x:.6g}",
        "factor_masking": lambda _: "nomasking",
        "validate": lambda _: "validate",
        "virtual_workers": lambda x: f"{x}workers",
        "batch_size": lambda x: f"batch{x}",
        "exchange": str,
        "hierarchical": lambda _: "hierarchical",
        "virtual_node": lambda x: f"node{x}",
        "value_bits": lambda x: f"bits{x}",
    }
    words = [marks[key](value) for key, value in changed.items() if value != options.get(key)]
    return Run(
        "-".join([study.name, row, *words, str(seed)]), study, {**options, **changed, "seed": seed}
    )


def ablation(study: Study, seeds: Mapping[str, tuple[int, ...]]) -> dict[str, dict[int, Run]]:
    """Row -> seed -> run."""
    return {row: {seed: run(study, row, seed) for seed in seeds[row]} for row in ROWS[study.recipe]}


def ablations(budget: Budget) -> dict[str, dict[str, dict[int, Run]]]:
    """Recipe -> row -> seed -> run."""
    first, second, between = budget.seeds
    return {
        study.recipe: ablation(
            study, {**dict.fromkeys(BETWEEN, between), **dict.fromkeys(MAIN, seeds)}
        )
        for study, seeds in (
            (budget.cifar10, first),
            (budget.ptb, second),
            (budget.transformer, first),
        )
    }


def shortened(study: Study, epochs: int) -> float:
    """Epochs of the warm-up in a training of another length: the same share."""
    return study.options["warmup_epochs"] * epochs / study.options["epochs"]


def by_momentum(budget: Budget) -> dict[int, dict[str, dict[float, dict[int, Run]]]]:
    """Epochs -> dense, or what becomes of the momentum of an entry that is sent -> sparsity -> seed -> run. The
    shortest is for choices, and so on held-out training images; the others have DGC's own sparsity alone.
    """
    study, usual = budget.cifar10, budget.cifar10.options["sparsity"]
    ways: dict[str, dict[str, Any]] = {"masked": {}, "kept": {"factor_masking": False}}

    def lines(n: int) -> dict[str, dict[float, dict[int, Run]]]:
        chooses: dict[str, Any] = {"validate": True} if n == budget.lengths[0] else {}
        warmup = shortened(study, n)
        sparsities = (usual, 0.99, 0.9) if chooses else (usual,)
        decide = budget.deciding if chooses else budget.seeds[0]

        def at(row: str, seed: int, **changed: Any) -> Run:
            return run(study, row, seed, epochs=n, **chooses, **changed)

        return {
            "dense": {0.0: {seed: at("dense", seed) for seed in decide}},
            **{
                way: {
                    x: {
                        seed: at("dgc", seed, warmup_epochs=warmup, sparsity=x, **switched)
                        for seed in (decide if x == usual else budget.seeds[0])
                    }
                    for x in sparsities
                }
                for way, switched in ways.items()
            },
        }

    return {n: lines(n) for n in budget.lengths}


def by_cell(lines: Mapping[str, Mapping[float, dict[int, Run]]]) -> list[dict[int, Run]]:
    """The cells of a table, those of one sparsity together."""
    cells = [(x, seeds) for line in lines.values() for x, seeds in line.items()]
    return [
        seeds for place in dict.fromkeys(x for x, _ in cells) for x, seeds in cells if x == place
    ]


def by_workers(budget: Budget) -> dict[str, dict[float, Run]]:
    """Row -> workers, each of batch 32 -> run."""
    return {
        row: {n: run(budget.cifar10, row, 0, virtual_workers=n) for n in budget.workers}
        for row in WORKERS
    }


def warmed(budget: Budget, warmup: float, sparsity: float, seed: int) -> Run:
    """DGC with a warm-up of so many epochs; with none it is the parts' row before the last."""
    if warmup == 0:
        return run(budget.cifar10, "masking", seed, sparsity=sparsity)
    return run(budget.cifar10, "dgc", seed, sparsity=sparsity, warmup_epochs=warmup)


def by_sparsity(budget: Budget) -> dict[float, dict[float, Run]]:
    """Epochs of warm-up -> sparsity -> run; only those that differ from DGC's own in one of the two."""
    usual = budget.cifar10.options
    return {
        warmup: {
            sparsity: warmed(budget, warmup, sparsity, 0)
            for sparsity in budget.sparsities
            if warmup == usual["warmup_epochs"] or sparsity == usual["sparsity"]
        }
        for warmup in budget.warmups
    }


def by_warmup(budget: Budget) -> dict[float, dict[int, Run]]:
    """Epochs of warm-up -> seed -> run, at the usual sparsity. Of all seeds are those that may be advised: the usual
    one, and up to twice as long.
    """
    usual = budget.cifar10.options["warmup_epochs"]

    def seeds(warmup: float) -> tuple[int, ...]:
        return (
            budget.seeds[0] if usual <= warmup <= 2 * usual else (0,) if warmup else budget.seeds[2]
        )

    return {
        warmup: {
            seed: warmed(budget, warmup, budget.cifar10.options["sparsity"], seed)
            for seed in seeds(warmup)
        }
        for warmup in budget.warmups
    }


def by_exchange(budget: Budget) -> dict[str, dict[int, dict[int, Run]]]:
    """Exchange -> workers -> seed -> run. All train with 128 images a step, whatever the number of workers."""

    def at(workers: int, seed: int, **options: Any) -> Run:
        return run(
            budget.exchange,
            "dgc",
            seed,
            virtual_workers=workers,
            batch_size=128 // workers,
            **options,
        )

    def machines(workers: int) -> dict[str, Any]:
        return {"hierarchical": True, "virtual_node": 2 if workers == 4 else 4}

    ways: dict[str, Any] = {
        "all-gather": lambda n: {},
        "hierarchical": machines,
        "reduce, 99.6 %": lambda n: {"exchange": "reduce", "sparsity": 0.996},
        "reduce": lambda n: {"exchange": "reduce"},
        "all-gather, 99 %, no masking": lambda n: {"sparsity": 0.99, "factor_masking": False},
    }
    return {
        name: {n: {seed: at(n, seed, **way(n)) for seed in budget.pair} for n in budget.crowds}
        for name, way in ways.items()
    }


def by_bytes(budget: Budget) -> dict[str, dict[float, Run]]:
    """Dense, or an exchange of many workers -> sparsity -> run; on held-out images. At 99 % and less without masking,
    which takes a good part of each step there.
    """

    def at(exchange: str, sparsity: float) -> Run:
        kept = {} if sparsity > 0.99 else {"factor_masking": False}
        return run(budget.many, "dgc", 0, sparsity=sparsity, **kept, exchange=exchange)

    ways = {
        "all-gather": ("allgather", (0.999, 0.99, 0.97)),
        "reduce": ("reduce", (0.999, 0.99, 0.97, 0.9)),
    }
    return {
        "dense": {0.0: run(budget.many, "dense", 0)},
        **{
            name: {sparsity: at(exchange, sparsity) for sparsity in sparsities}
            for name, (exchange, sparsities) in ways.items()
        },
    }


def by_value_bits(budget: Budget) -> dict[tuple[str, float], dict[int, dict[int, Run]]]:
    """Recipe and sparsity with 4 bits -> bits of a value -> seed -> run: other tables' runs with 16 bits, and with 4
    bits the same, or as many entries as have the bytes of 99.9 % with 32 bits an entry.
    """
    study, n = budget.cifar10, budget.lengths[0]
    short = {
        "epochs": n,
        "validate": True,
        "warmup_epochs": shortened(study, n),
    }
    made = (
        (study, 0.999, budget.deciding, short),
        (study, 0.9977, budget.pair, short),
        (budget.ptb, 0.999, budget.seeds[1], {}),
    )
    return {
        (study.recipe, sparsity): {
            16: {seed: run(study, "dgc", seed, **changed) for seed in seeds},
            4: {
                seed: run(study, "dgc", seed, **changed, sparsity=sparsity, value_bits=4)
                for seed in seeds
            },
        }
        for study, sparsity, seeds, changed in made
    }


def by_local_steps(budget: Budget) -> dict[str, dict[int, Run]]:
    """Share of the entries and H -> seed -> run: AdamW in 2 bits, at twice the rate of dense training.

    For the first half epoch all entries are exchanged after every step. Then H is constant, or rises as the rate falls.
    """
    study = budget.transformer
    dense = {"warmup_epochs", "dense_epochs"}
    kept = {key: value for key, value in study.options.items() if key not in dense}
    fixed = {"value_bits": 2, "lr": 0.004, "beta2": 0.99975}
    rising, fewer = "0=1,227=3,908=5,1816=12,2724=36", "piecewise:0=0,227=0.9375"
    ways = {
        "all": (0.0, rising, budget.seeds[0]),
        "1-16": (fewer, rising, budget.seeds[0]),
        "all-7": (0.0, "0=1,227=7", [0]),
        "1-16-5": (fewer, "0=1,227=5", [0]),
    }
    made = {
        way: replace(
            study,
            name=f"{study.name}-local-{way}",
            options={**kept, **fixed, "sparsity": sparsity, "local_steps": local_steps},
        )
        for way, (sparsity, local_steps, _) in ways.items()
    }
    return {
        way: {seed: run(made[way], "dgc", seed) for seed in seeds}
        for way, (_, _, seeds) in ways.items()
    }


def by_length(budget: Budget) -> dict[str, dict[int, Run]]:
    """Row -> seed -> run: dense, and the paper's DGC, for as long as the paper trains."""
    epochs, warmup = budget.paper
    options = {"dense": {"epochs": epochs}, "dgc": {"epochs": epochs, "warmup_epochs": warmup}}
    return {
        row: {seed: run(budget.cifar10, row, seed, **options[row]) for seed in budget.pair}
        for row in options
    }


def matrix(budget: Budget) -> dict[str, dict[str, Run]]:
    """Table -> name -> run; in the order of their importance. A run may be in several tables."""
    rows = ablations(budget)

    def parts(*recipes: str) -> list[Mapping[Any, Run]]:
        """The main rows seed by seed, so that what is cut short compares methods."""
        main = [
            {row: rows[recipe][row][seed] for row in MAIN if row in rows[recipe]}
            for recipe in recipes
            for seed in rows[recipe]["dense"]
        ]
        return [
            *main,
            *(runs for recipe in recipes for row, runs in rows[recipe].items() if row in BETWEEN),
        ]

    momentum, exchanges = by_momentum(budget), list(by_exchange(budget).values())
    workers, sparsities = by_workers(budget), by_sparsity(budget)
    tables = {
        "ablation": parts("cifar10", "ptb"),
        "momentum": [
            {seed: at[seed]}
            for n in budget.lengths
            for seed in budget.deciding
            for at in by_cell(momentum[n])
            if seed in at
        ],
        "workers": [
            {row: workers[row][n] for row in WORKERS} for n in sorted(budget.workers, reverse=True)
        ],
        "sparsity": list(sparsities.values()),
        "warmup": list(by_warmup(budget).values()),
        "transformer": parts("transformer"),
        "bytes": list(by_bytes(budget).values()),
        "exchange": [
            {n: line[n][seed]}
            for seed in budget.pair
            for n in budget.crowds
            for line in exchanges
            if seed in line.get(n, ())
        ],
        "length": list(by_length(budget).values()),
        "values": [line[4] for line in by_value_bits(budget).values()],
        "local-steps": list(by_local_steps(budget).values()),
    }
    return {
        table: {run.name: run for runs in lines for run in runs.values()}
        for table, lines in tables.items()
    }


def chosen(budget: Budget, only: list[str]) -> list[Run]:
    """The runs of these tables, of these names, and those whose names contain one of these words, where they are no
    run's name; all of them if there are no words.
    """
    tables = matrix(budget)
    runs = {name: run for table in tables.values() for name, run in table.items()}
    names: set[str] = set()
    for word in only:
        found = (
            tables[word]
            if word in tables
            else [word]
            if word in runs
            else [name for name in runs if word in name]
        )
        if not found:
            raise typer.BadParameter(
                f"--only must be {', '.join(tables)}, or a part of a name as --list gives it, "
                f"got {word}, which is in no run"
            )
        names.update(found)
    return [run for name, run in runs.items() if not only or name in names]
