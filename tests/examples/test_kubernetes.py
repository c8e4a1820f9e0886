"""The manifests of examples/kubernetes are what an API server takes: its own schemas, offline."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from launcher.arguments import parse_run

MANIFESTS = sorted(Path(__file__).parents[2].glob("examples/kubernetes/*.yaml"))
VERSIONS = ("1.30", "1.37")
"""Of Kubernetes: from a year or two ago to the newest that the package knows."""


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def containers(path: Path) -> list[dict[str, Any]]:
    """Those of our image."""
    specs = [
        found["spec"]["template"]["spec"]
        for found in documents(path)
        if "template" in found["spec"]
    ]
    every = [c for spec in specs for c in (*spec.get("initContainers", ()), *spec["containers"])]
    return [c for c in every if "model-check" in c["image"]]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_is_valid(path: Path, version: str) -> None:
    for found in documents(path):
        kubernetes_validate.validate(found, version, strict=True)


def test_a_manifest_with_a_mistake_is_not() -> None:
    (job,) = documents(next(path for path in MANIFESTS if path.name == "fleet.yaml"))
    job["spec"]["template"]["spec"]["toleration"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_run_sh_takes_the_arguments_of_a_manifest(path: Path) -> None:
    for container in containers(path):
        if "command" not in container:
            parse_run(container["args"], {})


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_pod_gives_its_run_the_nodes_name_and_memory_to_share(path: Path) -> None:
    for container in containers(path):
        names = {variable["name"] for variable in container["env"]}
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert "NODE_NAME" in names
        assert {"/reports", "/dev/shm"} <= mounts
