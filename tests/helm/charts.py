"""The chart rendered by Helm's own engine; without it (`make test-helm` installs it) tests are skipped."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "helm" / "kvtier"
VALUE_SETS = sorted((CHART / "ci").glob("*-values.yaml"))

NODES = {"nodeSelector": {"kubernetes.io/os": "linux"}}

Manifest = dict[str, Any]


def values_of(path: Path) -> dict[str, Any]:
    """Return one set of values."""
    values = yaml.safe_load(path.read_text())
    assert isinstance(values, dict)
    return values


def render(values: dict[str, Any]) -> list[Manifest]:
    """Return every manifest; on every node where `values` do not name some. Raises helm_python.HelmError as
    `helm template` would refuse."""
    texts = rendered_texts(values)
    documents = (yaml.safe_load_all(text) for name, text in texts.items() if name.endswith(".yaml"))
    return [document for texts_of in documents for document in texts_of if document]


def rendered_texts(values: dict[str, Any]) -> dict[str, str]:
    """Return what every template becomes, by path."""
    return _rendered(json.dumps({**NODES, **values}, sort_keys=True))


@cache
def _rendered(values: str) -> dict[str, str]:
    helm = pytest.importorskip("helm_python", reason="make test-helm installs it")
    texts: dict[str, str] = helm.Chart.load(str(CHART)).render(json.loads(values), name="rel", namespace="ns")
    return texts


def refusal(values: dict[str, Any]) -> str:
    """Return what Helm says of values that it refuses. Fails when it does not."""
    helm = pytest.importorskip("helm_python", reason="make test-helm installs it")
    with pytest.raises(helm.HelmError) as caught:
        render(values)
    return str(caught.value)


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """Return the manifests of one kind, in order."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def policies(manifests: list[Manifest]) -> list[str]:
    """Return the policy file of every DaemonSet, in order."""
    return [m["data"]["policy.yaml"] for m in of_kind(manifests, "ConfigMap") if "policy.yaml" in m["data"]]


def daemon(daemonset: Manifest) -> Manifest:
    """Return the daemon's container."""
    [container] = daemonset["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container
