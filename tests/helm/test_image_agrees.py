"""The Dockerfile against the chart, nothing built: users, paths, ports, probes, environment, name."""

import json
import re
import tomllib
from typing import Any

import pytest

from tests.deploy.test_image import ROOT, instructions
from tests.helm.charts import daemon, of_kind, render

pytest.importorskip("helm_python", reason="make test-helm installs it")


def said(word: str) -> str:
    """Return the rest of the one instruction of the last stage that begins with `word`."""
    found = instructions()
    last = max(n for n, (name, _) in enumerate(found) if name == "FROM")
    [rest] = [rest for name, rest in found[last:] if name == word]
    return rest


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    [daemonset] = of_kind(render({}), "DaemonSet")
    spec = daemonset["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return {**spec, "daemon": daemon(daemonset)}


def test_user_and_group_are_the_charts(pod: dict[str, Any]) -> None:
    security = pod["securityContext"]
    assert said("USER") == f"{security['runAsUser']}:{security['runAsGroup']}"
    made = " ".join(rest for word, rest in instructions() if word == "RUN")
    assert f"--uid {security['runAsUser']} --gid {security['runAsGroup']}" in made
    assert f"--owner={security['runAsUser']} --group={security['runAsGroup']}" in made


def test_the_port_is_the_charts_and_the_health_check_its_liveness_probe(pod: dict[str, Any]) -> None:
    [port] = [p["containerPort"] for p in pod["daemon"]["ports"]]
    assert said("EXPOSE") == str(port)
    probe = pod["daemon"]["livenessProbe"]["httpGet"]
    assert probe["port"] == "http"
    assert f"http://127.0.0.1:{port}{probe['path']}'" in said("HEALTHCHECK")


def test_the_image_starts_what_the_pod_starts_and_ends_by_the_signal_it_gets(pod: dict[str, Any]) -> None:
    command = json.loads(said("CMD"))
    assert pod["daemon"]["command"][: len(command)] == command
    assert said("STOPSIGNAL") == "SIGTERM", "what the kubelet sends"


def test_what_is_written_is_written_where_the_chart_mounts_something(pod: dict[str, Any]) -> None:
    environment = dict(re.findall(r"(\w+)=(\S+)", said("ENV")))
    for entry in pod["daemon"]["env"]:
        assert environment.get(entry["name"], entry["value"]) == entry["value"], entry["name"]
    mounts = {mount["mountPath"] for mount in pod["daemon"]["volumeMounts"]}
    assert environment["HOME"] in mounts
    assert any(environment["NUMBA_CACHE_DIR"].startswith(f"{path}/") for path in mounts)
    [made] = [rest for word, rest in instructions() if word == "RUN" and "install --directory" in rest]
    folders = re.findall(r"/(?:run|var)/\S+", made.split("install --directory")[1].split("&&")[0])
    stores = render(
        {"policy": {"tiers": {"nvme": {"capacity": "1GiB"}}}, "coldStore": {"hostPath": {"path": "/mnt/x"}}}
    )
    [daemonset] = of_kind(stores, "DaemonSet")
    writable = [m["mountPath"] for m in daemon(daemonset)["volumeMounts"] if not m.get("readOnly")]
    assert sorted([*folders, environment["HOME"]]) == sorted(writable)


def test_the_archive_has_the_name_that_the_chart_asks_for(pod: dict[str, Any]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert pod["daemon"]["image"] == f"kvtier:{version}"
    assert pod["daemon"]["imagePullPolicy"] == "IfNotPresent", "loaded onto the nodes, it is not pulled"
