"""What the documentation says of the code, held to it: links, commands, figures that are computed, texts of errors."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import end

from dgc import plan as planning
from dgc.plan.cost import Cluster

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", ".github/**/*.md", "*/results/*.md")
    for page in ROOT.glob(pattern)
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
LIMIT = 240  # seconds of a launch


def anchors(page):
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in LINK.findall(text):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if (
            anchor and target.suffix == ".md" and "reference" not in target.parts
        ):  # there they are of docstrings
            assert anchor in anchors(target), link


@pytest.fixture(scope="module")
def figures():
    """scripts/figures.py, under another name than that of recipes/figures.py."""
    spec = importlib.util.spec_from_file_location("tables_of_pages", ROOT / "scripts/figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_what_the_results_say(figures):
    pages = {page: page.read_text() for page in figures.pages()}
    assert ROOT / "docs" / "results.md" in pages
    for page, text in pages.items():
        assert figures.fill(text) == text, f"{page.name}: run make figures"


def test_a_table_is_written_between_its_markers(figures, monkeypatch):
    monkeypatch.setitem(figures.TABLES, "some", lambda: "| a |\n| --- |\n| 1 |\n")
    empty = "Before.\n    <!-- figures: some -->\n    <!-- end -->\nAfter.\n"
    filled = figures.fill(empty)
    assert "\n    | 1 |\n\n    <!-- end -->\nAfter.\n" in filled and figures.fill(filled) == filled
    with pytest.raises(SystemExit, match="got 'other'"):
        figures.fill(empty.replace("some", "other"))


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def block(text, first):
    """The code block that begins with a line."""
    return next(
        found
        for found in re.findall(r"^```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        if found.startswith(first)
    )


def run(command, folder):
    """The lines that a launch printed, which ends with all that it has started."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(LIMIT)
        finally:
            end(process.pid)
    output = (folder / "log").read_text()
    assert status == 0, output
    return re.findall(r"(step +\d+): loss ([\d.]+), (.*)", output)


@pytest.mark.long
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "first", "command"),
    [
        (
            "train.py",
            "import torch\n",
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
        ),
        (
            "train_horovod.py",
            "import horovod.torch as hvd\n",
            ["horovodrun", "-np", "2", sys.executable],
        ),
    ],
)
def test_the_quickstart_prints_what_it_says(tmp_path, name, first, command):
    """Bytes to the byte; losses, of which other processors round otherwise, within a tenth and 0.1."""
    (tmp_path / name).write_text(block(QUICKSTART, first))
    said = re.findall(
        r"(step +\d+): loss ([\d.]+), (.*)", block(README, "$ torchrun --nproc-per-node 2")
    )
    printed = run([*command, name], tmp_path)
    assert [(step, sent) for step, _, sent in printed] == [(step, sent) for step, _, sent in said]
    for (_, loss, _), (_, expected, _) in zip(printed, said, strict=True):
        assert float(loss) == pytest.approx(float(expected), rel=0.1, abs=0.1)


def test_readme_and_quickstart_have_the_same_script():
    assert block(README, "import torch\n") == block(QUICKSTART, "import torch\n")


@pytest.mark.long
@pytest.mark.parametrize(
    ("column", "model", "compute", "optimizer"),
    [(1, "resnet50", 0.2, "sgd"), (2, "bert-large", 0.4, "adamw")],
)
def test_will_it_help_me_is_what_dgc_plan_says(column, model, compute, optimizer):
    for network in ("1gbit", "10gbit", "25gbit"):
        cluster = Cluster(8, 1, planning.NETWORKS[network], planning.INSIDE["pcie"])
        advice = planning.advise(
            planning.load(model).shapes,
            cluster,
            compute,
            local=planning.LOCAL["gpu"],
            steps=20_000,
            optimizer=optimizer,
        )
        row = (
            re.search(rf"^\| {network[:-4]} Gbit/s \|.*$", README, re.MULTILINE)[0]
            .strip("|")
            .split("|")[column]
        )
        faster = advice.dense.step_seconds / advice.dgc.step_seconds
        assert float(re.search(r"([\d.]+) times", row)[1]) == pytest.approx(faster, rel=0.025)
        assert ("**no**" in row) == (not advice.pays) == ("training" not in row)
        if advice.pays:
            assert float(re.search(r"the training ([\d.]+)", row)[1]) == pytest.approx(
                advice.whole, rel=0.025
            )


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_slurm_scripts_are_bash():
    for script in blocks(ROOT / "docs" / "launching.md", "bash"):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)
        assert script.startswith("#!/bin/bash\n#SBATCH ") and (
            "srun torchrun " in script or "horovodrun " in script
        )


def test_the_mpijob_is_yaml_with_as_many_processes_as_gpus():
    yaml = pytest.importorskip("yaml")
    (job,) = (yaml.safe_load(text) for text in blocks(ROOT / "docs" / "launching.md", "yaml"))
    assert (job["kind"], job["apiVersion"]) == ("MPIJob", "kubeflow.org/v2beta1")
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][kind] for kind in ("Launcher", "Worker"))
    assert launcher["replicas"] == 1
    (container,) = worker["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == job["spec"]["slotsPerWorker"]


def literals():
    """Each string in the package but its docstrings, as the texts between its placeholders."""
    for file in (ROOT / "dgc").rglob("*.py"):
        tree = ast.parse(file.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield [
                    part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
                ]
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docstrings
            ):
                yield [node.value]


def test_errors_are_listed_by_the_texts_that_the_code_has():
    texts = ["".join(parts) for parts in literals()]
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    rows = [row.split("|")[1] for row in re.findall(r"^\| `.*$", page, re.MULTILINE)]
    listed = [text for row in rows for text in re.findall(r"`([^`]+)`", row) if " " in text]
    assert len(listed) > 40
    for text in listed:
        pattern = ".*".join(re.escape(part.strip()) for part in text.split("..."))
        assert any(re.search(pattern, each, re.DOTALL) for each in texts), text
