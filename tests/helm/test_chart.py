"""The chart: rendered, linted, checked against the schemas of Kubernetes and kvtier's own settings."""

import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from helm.values import DEFAULT_POLICY
from kvtier.appliance.config import Settings
from kvtier.appliance.preflight.checks_host import wanted_memory_bytes
from kvtier.v1.shm import extent_file_bytes
from tests.helm import crds
from tests.helm.charts import (
    CHART,
    VALUE_SETS,
    daemon,
    of_kind,
    policies,
    render,
    rendered_texts,
    values_of,
)

KUBERNETES = ("1.29", "1.33", "1.37")
pytest.importorskip("helm_python", reason="make test-helm installs it")
each_set = pytest.mark.parametrize("path", VALUE_SETS, ids=lambda path: path.stem)


def settings_of(text: str) -> Settings:
    return Settings.load_traced(Path("policy.yaml"), {}, text=text)[1]


@each_set
def test_lint_finds_nothing(path: Path) -> None:
    helm = pytest.importorskip("helm_python", reason="make test-helm installs it")
    report = helm.lint(str(CHART), values_of(path), strict=True)
    assert report["errors"] == []
    assert [m["error"] for m in report["messages"] if m["severity"] > 1] == []


def test_a_packaged_chart_has_its_schema_and_no_examples(tmp_path: Path) -> None:
    helm = pytest.importorskip("helm_python", reason="make test-helm installs it")
    helm.package(str(CHART), destination=str(tmp_path))
    [archive] = tmp_path.glob("*.tgz")
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    assert {"kvtier/values.schema.json", "kvtier/files/live.yaml", "kvtier/files/alerts.yaml"} <= set(names)
    assert [name for name in names if "/ci/" in name] == []


@each_set
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_knows_every_field(path: Path, version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="make test-helm installs it")
    kinds = set()
    for manifest in render(values_of(path)):
        kinds.add(manifest["kind"])
        if manifest["kind"] in crds.SCHEMAS:
            crds.validate(manifest)
        else:
            validator.validate(manifest, version, strict=True)
    assert {"DaemonSet", "ConfigMap", "Service"} <= kinds


@each_set
def test_the_daemon_takes_the_policy_and_gets_the_memory_for_it(path: Path) -> None:
    manifests = render(values_of(path))
    for daemonset, text in zip(of_kind(manifests, "DaemonSet"), policies(manifests), strict=True):
        settings = settings_of(text)
        limits = daemon(daemonset)["resources"]["limits"]
        assert daemon(daemonset)["resources"]["requests"]["memory"] == limits["memory"]
        wanted_bytes = wanted_memory_bytes(settings)
        if settings.tiers.dram.hugepages == "on":
            assert int(limits["hugepages-2Mi"]) == wanted_bytes
        else:
            assert settings.tiers.dram.hugepages == "off", "auto takes pages that were never requested"
            assert int(limits["memory"]) >= wanted_bytes + (1 << 30)
        mounts = {mount["mountPath"] for mount in daemon(daemonset)["volumeMounts"]}
        if settings.tiers.nvme is not None:
            assert str(settings.tiers.nvme.path.parent) in mounts
        assert (
            settings.access.admin[0]
            == f"uid:{daemonset['spec']['template']['spec']['securityContext']['runAsUser']}"
        )


@each_set
def test_nothing_is_privileged(path: Path) -> None:
    for manifest in render(values_of(path)):
        spec = (
            manifest["spec"]["template"]["spec"]
            if manifest["kind"] == "DaemonSet"
            else manifest.get("spec", {})
        )
        for container in (*spec.get("containers", ()), *spec.get("initContainers", ())):
            security = container["securityContext"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert "nvidia.com/gpu" not in str(container["resources"]), (
                "it would take the GPU from the runtime"
            )
        if "containers" in spec:
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
            assert spec["automountServiceAccountToken"] is False
            assert not spec.keys() & {"hostNetwork", "hostPID"}


def test_by_default_one_read_only_listener_and_nobody_is_administrator_by_being_root() -> None:
    manifests = render({})
    [daemonset], [text] = of_kind(manifests, "DaemonSet"), policies(manifests)
    assert [port["name"] for port in daemon(daemonset)["ports"]] == ["http"]
    settings = settings_of(text)
    assert settings.listen == ["unix:///run/kvtier/kvtier.sock"]
    assert settings.access.admin == ["uid:10001"]
    assert "hostIPC" not in daemonset["spec"]["template"]["spec"]
    [service] = of_kind(manifests, "Service")
    assert service["spec"]["internalTrafficPolicy"] == "Local"
    assert of_kind(manifests, "NetworkPolicy")


def test_daemon_and_check_run_at_the_selinux_level_and_under_the_account_that_are_named() -> None:
    level = {"level": "s0"}
    manifests = render(
        {"security": {"seLinuxOptions": level}, "serviceAccount": {"create": False, "name": "a"}}
    )
    [daemonset], [check] = of_kind(manifests, "DaemonSet"), of_kind(manifests, "Pod")
    for pod in (daemonset["spec"]["template"]["spec"], check["spec"]):
        assert pod["securityContext"]["seLinuxOptions"] == level
        assert pod["serviceAccountName"] == "a"
    assert "seLinuxOptions" not in str(render({}))


def test_a_pod_lives_longer_than_its_drain() -> None:
    [daemonset] = of_kind(render({"drain": {"graceSeconds": 90}}), "DaemonSet")
    assert daemon(daemonset)["lifecycle"]["preStop"]["exec"]["command"] == [
        "kvtier",
        "drain",
        "--grace",
        "90s",
    ]
    assert daemonset["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 90 + 10


def digest_of(**policy: Any) -> str:
    [daemonset] = of_kind(render({"policy": policy}), "DaemonSet")
    digest = daemonset["spec"]["template"]["metadata"]["annotations"]["kvtier.io/restart-digest"]
    assert isinstance(digest, str)
    return digest


@pytest.mark.parametrize(
    "live",
    [
        {"leases": {"ttl": "20s"}},
        {"limits": {"max_clients": 7}},
        {"policy": {"eviction": "lru"}},
        {"tenants": {"acme": {"members": ["uid:7"]}}},
        {"tiers": {"dram": {"capacity": "32GiB"}}},
    ],
    ids=lambda live: next(iter(live)),
)
def test_what_is_live_replaces_no_pod_by_its_digest(live: dict[str, Any]) -> None:
    before = digest_of(
        limits={"max_pinned": "25%"}, leases={"ttl": "1s"}, tenants={"x": {"members": ["uid:8"]}}
    )
    both: dict[str, Any] = {
        "limits": {"max_pinned": "25%"},
        "leases": {"ttl": "1s"},
        "tenants": {"x": {"members": ["uid:8"]}},
    }
    after = digest_of(**{**both, **{key: {**both.get(key, {}), **of} for key, of in live.items()}})
    assert after == before


@pytest.mark.parametrize(
    "fixed",
    [
        {"reflection": False},
        {"observe": {"log": "text"}},
        {"tiers": {"dram": {"extent": "128MiB"}}},
    ],
    ids=lambda fixed: next(iter(fixed)),
)
def test_what_needs_a_restart_replaces_the_pods(fixed: dict[str, Any]) -> None:
    assert digest_of(**fixed) != digest_of()


@pytest.mark.parametrize("capacity", ["1GiB", "64Gi", "3TB", "1.5GiB", 1 << 31, "1000000000"])
@pytest.mark.parametrize("extent", ["2MiB", "64MiB", "258MiB", "1GiB"])
def test_memory_is_computed_as_the_daemon_does(capacity: str | int, extent: str) -> None:
    tier = {"capacity": capacity, "extent": extent}
    manifests = render({"policy": {"tiers": {"dram": tier}}, "hugePages": {"enabled": True}})
    [daemonset] = of_kind(manifests, "DaemonSet")
    try:
        dram = Settings.model_validate({"tiers": {"dram": tier}}).tiers.dram
    except ValueError:
        pytest.skip("too many or too large extents: the daemon refuses it")
    wanted_bytes = dram.num_extents * extent_file_bytes(dram.extent_bytes)
    assert int(daemon(daemonset)["resources"]["limits"]["hugepages-2Mi"]) == wanted_bytes


CXL = {"kind": "memory", "capacity": "96GiB", "numa_nodes": [2]}
UNCONFINED = {"security": {"seccompProfile": {"type": "Unconfined"}}}


@pytest.mark.parametrize("with_huge_pages", [True, False])
def test_memory_of_further_tiers_counts(with_huge_pages: bool) -> None:
    """Also with extents of another size, which are dram's for all."""
    tiers = {"dram": {"capacity": "4GiB", "extent": "128MiB"}, "cxl": CXL, "hbm": {"capacity": "2GiB"}}
    values = {"policy": {"tiers": tiers}, "hugePages": {"enabled": with_huge_pages}, **UNCONFINED}
    manifests = render(values)
    [daemonset], [text] = of_kind(manifests, "DaemonSet"), policies(manifests)
    settings = settings_of(text)
    assert [tier.label for tier in settings.tiers.sizes] == ["hbm", "dram", "cxl"]
    limits = daemon(daemonset)["resources"]["limits"]
    wanted_bytes = wanted_memory_bytes(settings)
    assert wanted_bytes > 102 << 30
    if with_huge_pages:
        assert int(limits["hugepages-2Mi"]) == wanted_bytes
    else:
        assert int(limits["memory"]) >= wanted_bytes + (1 << 30)


@pytest.mark.parametrize(("key", "is_live"), [("capacity", True), ("numa_nodes", False)])
def test_a_further_tier_is_resized_without_another_pod(key: str, is_live: bool) -> None:
    changed = {**CXL, key: {"capacity": "64GiB", "numa_nodes": [3]}[key]}
    digests = []
    for tier in (CXL, changed):
        [daemonset] = of_kind(render({"policy": {"tiers": {"cxl": tier}}, **UNCONFINED}), "DaemonSet")
        annotations = daemonset["spec"]["template"]["metadata"]["annotations"]
        digests.append(annotations["kvtier.io/restart-digest"])
    assert (digests[0] == digests[1]) == is_live


@pytest.mark.parametrize(
    ("has_policy", "readers", "expected"),
    [(True, None, "anyone"), (False, None, None), (True, ["prometheus"], ["prometheus"])],
)
def test_with_tenants_somebody_says_who_reads(has_policy: bool, readers: Any, expected: Any) -> None:
    """The NetworkPolicy, the tokens that are named, or nobody."""
    values: dict[str, Any] = {
        "networkPolicy": {"enabled": has_policy},
        "tokens": {"secretName": "t"},
        "policy": {
            "tenants": {"acme": {"members": ["uid:1001"]}},
            "observe": {"readers": readers} if readers else {},
        },
    }
    [text] = policies(render(values))
    assert yaml.safe_load(text)["observe"].get("readers") == expected
    settings_of(text)


def test_a_monitor_sends_the_token_it_is_given() -> None:
    token = {"credentials": {"name": "kvtier-prometheus", "key": "token"}}
    values = {
        "podMonitor": {"enabled": True, "authorization": token},
        "tokens": {"secretName": "t"},
        "policy": {"observe": {"readers": ["prometheus"]}},
    }
    [monitor] = of_kind(render(values), "PodMonitor")
    assert monitor["spec"]["podMetricsEndpoints"][0]["authorization"] == token


def test_the_master_key_is_a_file_of_the_pods_that_store_and_of_nobody_else() -> None:
    """Read-only, 0400 (0440 once the kubelet gave it to the group), alone of its Secret, in no variable."""
    [path] = [path for path in VALUE_SETS if "encrypted" in path.name]
    manifests = render(values_of(path))
    stores, memory_only = of_kind(manifests, "DaemonSet")
    [volume] = [v for v in stores["spec"]["template"]["spec"]["volumes"] if v["name"] == "master-key"]
    assert volume["secret"] == {
        "secretName": "kvtier-master",
        "defaultMode": 0o400,
        "items": [{"key": "keys", "path": "keys"}],
    }
    [mount] = [m for m in daemon(stores)["volumeMounts"] if m["name"] == "master-key"]
    assert mount["readOnly"] is True
    assert "subPath" not in mount, "what is mounted alone is never updated"
    encryption = settings_of(policies(manifests)[0]).encryption
    assert str(encryption.master_key) == f"{mount['mountPath']}/keys"
    assert "master-key" not in str(memory_only)
    for daemonset in (stores, memory_only):
        assert "kvtier-master" not in str(daemon(daemonset)["env"])
        assert "master-key" not in str(daemonset["spec"]["template"]["spec"]["initContainers"])
    assert "master" not in str(of_kind(render({}), "DaemonSet"))


def test_the_hosts_of_a_fleet_find_each_other_by_one_name_that_their_certificate_has() -> None:
    [path] = [path for path in VALUE_SETS if "fleet" in path.name]
    manifests = render(values_of(path))
    [hosts] = [one for one in of_kind(manifests, "Service") if one["spec"].get("clusterIP") == "None"]
    name = f"{hosts['metadata']['name']}.{hosts['metadata']['namespace']}.svc"
    peers = settings_of(policies(manifests)[0]).peers
    assert peers.hosts == [f"{name}:{hosts['spec']['ports'][0]['port']}"]
    assert peers.certificate_name == name
    assert peers.send_limit_bytes == 2 << 30, "what is not the chart's stays"
    [daemonset] = of_kind(manifests, "DaemonSet")
    ports = {port["name"]: port["containerPort"] for port in daemon(daemonset)["ports"]}
    assert (ports["grpc"], ports["data"]) == (50051, peers.data_port)
    labels = daemonset["spec"]["template"]["metadata"]["labels"]
    assert hosts["spec"]["selector"].items() <= labels.items()


@pytest.mark.parametrize("asks", [False, None, True])
def test_tokens_may_stand_for_client_certificates(asks: bool | None) -> None:
    """None: a release of before there was the value, upgraded with --reuse-values."""
    values = {
        "grpc": {"enabled": True},
        "tls": {"secretName": "s", "clientCertificates": asks},
        "tokens": {"secretName": "t"},
    }
    access = settings_of(policies(render(values))[0]).access
    assert access.tls is not None
    assert (access.tls.client_ca is None, access.tokens is not None) == (asks is False, True)


def test_a_directory_is_named_and_its_secret_mounted() -> None:
    [path] = [path for path in VALUE_SETS if "directory" in path.name]
    manifests = render(values_of(path))
    peers = settings_of(policies(manifests)[0]).peers
    assert (peers.hosts, peers.directory.index) == ([], True), "an index knows all hosts"
    assert peers.directory.credentials is not None
    [daemonset] = of_kind(manifests, "DaemonSet")
    [mount] = [one for one in daemon(daemonset)["volumeMounts"] if one["name"] == "directory"]
    assert mount["mountPath"] == str(peers.directory.credentials)
    volumes = {one["name"]: one for one in daemonset["spec"]["template"]["spec"]["volumes"]}
    assert volumes["directory"]["secret"]["secretName"] == "kvtier-redis"


def test_the_network_policy_of_a_fleet_lets_hosts_reach_hosts_and_what_the_values_name() -> None:
    [path] = [path for path in VALUE_SETS if "fleet" in path.name]
    values = values_of(path)
    manifests = render(values)
    [policy], [daemonset] = of_kind(manifests, "NetworkPolicy"), of_kind(manifests, "DaemonSet")
    labels = daemonset["spec"]["template"]["metadata"]["labels"]
    between = [{"port": "grpc", "protocol": "TCP"}, {"port": "data", "protocol": "TCP"}]
    [inside] = [rule for rule in policy["spec"]["ingress"] if rule["ports"] == between]
    outside, dns, *others = policy["spec"]["egress"]
    assert outside == {"to": inside["from"], "ports": between}
    [peer] = inside["from"]
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    assert "to" not in dns
    assert {port["port"] for port in dns["ports"]} == {53}
    assert others == values["networkPolicy"]["egress"]
    assert of_kind(render({}), "NetworkPolicy")[0]["spec"]["egress"] == []
    alone = render({key: values[key] for key in ("networkPolicy", "policy")})
    assert of_kind(alone, "NetworkPolicy")[0]["spec"]["egress"] == [dns, *others], "a store has a name, too"


def test_daemons_and_the_job_that_expires_have_the_credentials_of_the_store() -> None:
    [path] = [path for path in VALUE_SETS if "fleet" in path.name]
    manifests = render(values_of(path))
    [daemonset], [job] = of_kind(manifests, "DaemonSet"), of_kind(manifests, "CronJob")
    pod = job["spec"]["jobTemplate"]["spec"]["template"]
    [expire] = pod["spec"]["containers"]
    assert expire["command"] == ["kvtier", "objects", "expire", "s3://kv/prod", "--delete"]
    assert expire["envFrom"] == daemon(daemonset)["envFrom"] == [{"secretRef": {"name": "kvtier-store"}}]
    for manifest in of_kind(manifests, "Service") + of_kind(manifests, "NetworkPolicy"):
        spec = manifest["spec"]
        selector = spec.get("selector") or spec["podSelector"]["matchLabels"]
        assert not selector.items() <= pod["metadata"]["labels"].items(), "it is no daemon"
    assert expire["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True


def test_an_object_store_is_encrypted_without_a_cold_store() -> None:
    [path] = [path for path in VALUE_SETS if "fleet" in path.name]
    manifests = render(values_of(path))
    [daemonset] = of_kind(manifests, "DaemonSet")
    settings = settings_of(policies(manifests)[0])
    assert settings.tiers.nvme is None
    [mount] = [mount for mount in daemon(daemonset)["volumeMounts"] if mount["name"] == "master-key"]
    assert str(settings.encryption.master_key) == f"{mount['mountPath']}/master.key"


def test_every_group_has_its_own_daemonset_and_what_it_does_not_say_is_as_for_all() -> None:
    [path] = [path for path in VALUE_SETS if "node-groups" in path.name]
    manifests = render(values_of(path))
    names = [m["metadata"]["name"] for m in of_kind(manifests, "DaemonSet")]
    assert names == ["rel-kvtier-h200", "rel-kvtier-l40s", "rel-kvtier-cpu"]
    h200, l40s, cpu = (settings_of(text) for text in policies(manifests))
    assert h200.leases.ttl_s == l40s.leases.ttl_s == cpu.leases.ttl_s == 60
    assert (h200.reflection, cpu.reflection) == (True, False), "false overrides, too"
    pods = [m["spec"]["template"]["spec"] for m in of_kind(manifests, "DaemonSet")]
    assert [pod.get("hostIPC", False) for pod in pods] == [True, False, False]
    assert ["tolerations" in pod for pod in pods] == [True, True, False]
    assert (
        len(
            {
                m["spec"]["selector"]["matchLabels"]["kvtier.io/node-group"]
                for m in of_kind(manifests, "DaemonSet")
            }
        )
        == 3
    )


def test_the_notes_say_what_was_installed_and_what_it_may_do() -> None:
    notes = {path.stem: rendered_texts(values_of(path))["kvtier/templates/NOTES.txt"] for path in VALUE_SETS}
    assert all("--kv-transfer-config" in text and "kvtier status" in text for text in notes.values())
    assert "hostIPC" in notes["04-gpu-values"]
    assert "hostIPC" not in notes["01-default-values"]
    assert "WARNING" not in notes["01-default-values"]
    assert notes["10-everything-values"].count("WARNING") == 2


def test_the_default_policy_is_the_one_that_is_documented() -> None:
    assert yaml.safe_load((CHART / "values.yaml").read_text())["policy"] == DEFAULT_POLICY
