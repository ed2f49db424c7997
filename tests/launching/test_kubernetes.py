"""The pods of the MPIJob in docs/launching.md, against Kubernetes's own schema."""

import re
from pathlib import Path

import pytest

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed (make launch)"
)
yaml = pytest.importorskip("yaml")
PAGE = Path(__file__).parents[2] / "docs" / "launching.md"


@pytest.mark.parametrize("kind", ["Launcher", "Worker"])
def test_a_cluster_would_take_the_pod(kind):
    job = yaml.safe_load(
        re.search(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
    )
    template = job["spec"]["mpiReplicaSpecs"][kind]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": kind.lower()}, **template}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
