"""What the chart refuses, and the sentence that says what to change."""

import re
from typing import Any

import pytest

from tests.helm.charts import CHART, of_kind, refusal, render

pytest.importorskip("helm_python", reason="make test-helm installs it")

CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no nodes": ({"nodeSelector": {}}, "set nodeSelector"),
    "listen": ({"policy": {"listen": ["unix:///x"]}}, "set socket.hostPath"),
    "http": ({"policy": {"observe": {"http": "off"}}}, "set http.port"),
    "tls": (
        {"policy": {"access": {"tls": {"certificate": "/c", "key": "/k", "client_ca": "/a"}}}},
        "tls.secretName",
    ),
    "tokens": ({"policy": {"access": {"tokens": "/t"}}}, "set tokens.secretName"),
    "encryption": ({"policy": {"encryption": {"master_key": "/k"}}}, "set masterKey.secretName"),
    "idle key": ({"masterKey": {"secretName": "s"}}, "policy.tiers.nvme.capacity or policy.object.url"),
    "peers": ({"policy": {"peers": {"hosts": ["h:1"]}}}, "set fleet.enabled"),
    "no port": ({"fleet": {"enabled": True}}, "set grpc.enabled"),
    "no fleet": ({"fleet": {"directory": {"url": "redis://a"}}}, "set fleet.enabled"),
    "no way to the directory": (
        {
            "fleet": {"enabled": True, "directory": {"url": "redis://a"}},
            "grpc": {"enabled": True},
            "tls": {"secretName": "s"},
            "networkPolicy": {"egress": []},
        },
        "add the directory to networkPolicy.egress",
    ),
    "no directory": ({"fleet": {"directory": {"index": True}}}, "has no url"),
    "same port": (
        {
            "fleet": {"enabled": True, "dataPort": 50051},
            "grpc": {"enabled": True},
            "tls": {"secretName": "s"},
        },
        "fleet.dataPort is the port of",
    ),
    "store": ({"policy": {"object": {"url": "s3://b/p"}}}, "add the store to networkPolicy.egress"),
    "no proof": (
        {"grpc": {"enabled": True}, "tls": {"secretName": "s", "clientCertificates": False}},
        "set tokens.secretName",
    ),
    "no store": ({"objectStore": {"secretName": "s"}}, "objectStore.secretName is set and there is no store"),
    "two stores": (
        {
            "objectStore": {"expireSchedule": "17 3 * * *"},
            "nodeGroups": [
                {"name": name, "nodeSelector": {"x": name}, "policy": {"object": {"url": f"file:///{name}"}}}
                for name in "ab"
            ],
        },
        "the same for all nodeGroups",
    ),
    "huge pages": ({"policy": {"tiers": {"dram": {"hugepages": "on"}}}}, "set hugePages.enabled"),
    "no place": ({"policy": {"tiers": {"nvme": {"capacity": "1TiB"}}}}, "set coldStore.hostPath.path"),
    "no use": ({"coldStore": {"existingClaim": "c"}}, "set policy.tiers.nvme.capacity"),
    "path": (
        {
            "policy": {"tiers": {"nvme": {"capacity": "1TiB", "path": "/x"}}},
            "coldStore": {"existingClaim": "c"},
        },
        "say under coldStore",
    ),
    "two ways": (
        {
            "policy": {"tiers": {"nvme": {"capacity": "1TiB"}}},
            "coldStore": {"existingClaim": "c", "hostPath": {"path": "/mnt/x"}},
        },
        "keep one of",
    ),
    "no size": (
        {
            "policy": {"tiers": {"nvme": {"capacity": "1TiB"}}},
            "coldStore": {"volumeClaim": {"storageClassName": "s"}},
        },
        "set coldStore.volumeClaim.size",
    ),
    "one folder": (
        {
            "policy": {"tiers": {"nvme": {"capacity": "1TiB"}}},
            "coldStore": {"hostPath": {"path": "/run/kvtier"}},
        },
        "give each its own",
    ),
    "no gpu": ({"policy": {"tiers": {"hbm": {"backend": "cuda"}}}}, "set gpu.sharing to ipc"),
    "idle gpu": ({"gpu": {"sharing": "ipc"}}, "gpu.sharing to none"),
    "lock": ({"policy": {"tiers": {"dram": {"lock": True}}}}, "leave it false"),
    "numa": ({"policy": {"tiers": {"dram": {"numa_nodes": [0]}}}}, "set security.seccompProfile"),
    "egress": ({"policy": {"observe": {"traces": "otlp"}}}, "networkPolicy.egress"),
    "names": ({"nodeGroups": [{"name": "a", "nodeSelector": {"x": "1"}}, {"name": "a"}]}, "have one name"),
    "nodes": ({"nodeGroups": [{"name": "a"}, {"name": "b"}]}, "its own nodeSelector"),
    "no tls": ({"grpc": {"enabled": True}}, "policy.access.insecure: true"),
    "idle tls": ({"tls": {"secretName": "s"}}, "set grpc.enabled"),
    "ports": ({"grpc": {"port": 9464}}, "change one"),
    "long": ({"socket": {"hostPath": "/" + "x" * 120}}, "at most 87"),
    "scrape": (
        {
            "podMonitor": {"enabled": True},
            "networkPolicy": {"enabled": False},
            "policy": {"tenants": {"a": {"members": ["uid:7"]}}},
        },
        "podMonitor.authorization",
    ),
    "monitors": ({"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}, "enable one"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_with_the_fix(name: str) -> None:
    values, fix = CONTRADICTIONS[name]
    assert fix in refusal(values)


def test_what_the_refusal_says_to_type_chooses_nodes() -> None:
    helm = pytest.importorskip("helm_python", reason="make test-helm installs it")
    options = re.findall(r"--set-string '([^']+)'", refusal({"nodeSelector": {}}))
    chosen = [helm.parse_set_string_values(option) for option in options]
    assert chosen == [
        {"nodeSelector": {"nvidia.com/gpu.present": "true"}},
        {"nodeSelector": {"kubernetes.io/os": "linux"}},
    ]
    for values in chosen:
        for manifest in render(values):
            if manifest["kind"] in ("DaemonSet", "Pod"):
                pod = manifest["spec"].get("template", manifest)["spec"]
                assert pod["nodeSelector"] == values["nodeSelector"]


def test_nodes_are_chosen_in_every_group_or_by_a_required_affinity() -> None:
    group = {"name": "a", "nodeSelector": {}}
    nodes = {"nodeSelector": {}, "nodeGroups": [group, {"name": "b", "nodeSelector": {"x": "1"}}]}
    assert "nodeGroups a: no nodes are chosen" in refusal(nodes)
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}]}
    assert "set nodeSelector" in refusal({"nodeSelector": {}, "affinity": {"nodeAffinity": preferred}})
    terms = [{"matchExpressions": [{"key": "kubernetes.io/os", "operator": "Exists"}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    assert of_kind(render({"nodeSelector": {}, "affinity": {"nodeAffinity": required}}), "DaemonSet")


def test_every_sentence_of_the_validation_was_provoked() -> None:
    text = (CHART / "templates" / "_validation.tpl").read_text()
    num_sentences = text.count('append $problems "')
    assert num_sentences == len(CONTRADICTIONS)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nodeSelectr": {"a": "b"}}, "nodeSelectr"),
        ({"policy": {"tiers": {"drm": {}}}}, "drm"),
        ({"policy": {"tiers": {"dram": {"capacity": "64 furlongs"}}}}, "/policy/tiers/dram/capacity"),
        ({"policy": {"leases": {"ttl": "soon"}}}, "/policy/leases/ttl"),
        ({"nodeGroups": [{"nodeSelector": {"a": "b"}}]}, "name"),
        ({"security": {"runAsUser": 0}}, "/security/runAsUser"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({"http": {"port": 70000}}, "/http/port"),
        ({"gpu": {"sharing": "mig"}}, "/gpu/sharing"),
    ],
    ids=str,
)
def test_the_schema_refuses_before_anything_is_rendered(values: dict[str, Any], words: str) -> None:
    message = refusal(values)
    assert "schema" in message
    assert words in message
