"""The image run as the chart says: prepared, started, probed, used from outside, drained, started again."""

import hashlib
import http.client
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.clients import Client, Geometry, NamespaceIdentity, prefix_hashes
from tests.daemon import PATIENT
from tests.helm.charts import Manifest, daemon, of_kind, render

from ..waiting import until
from .engine import Engine, pod_of

NUM_BLOCKS, BLOCK_TOKENS = 64, 16
NAME, CONTAINER = "node", "node-kvtier"
GEOMETRY = Geometry(num_layers=4, num_kv_heads=4, head_dim=64, block_tokens=BLOCK_TOKENS, dtype="float16")


class Node:
    """One release on one node whose host folders are in `folder`; its pod is played by an engine."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        self.engine = engine
        self.cold = folder / "nvme"
        self.cold.mkdir()  # as an administrator makes it, or a mount: root's
        self.values: dict[str, Any] = {
            "policy": {
                "tiers": {"dram": {"capacity": "64MiB", "extent": "16MiB"}, "nvme": {"capacity": "512MiB"}}
            },
            "coldStore": {"hostPath": {"path": str(self.cold)}},
            "socket": {"hostPath": str(folder / "run")},
            "http": {"port": port},
        }
        manifests = render(self.values)
        [self.daemonset] = of_kind(manifests, "DaemonSet")
        [self.check] = of_kind(manifests, "Pod")
        self.pod_spec: Manifest = self.daemonset["spec"]["template"]["spec"]
        named = {volume["configMap"]["name"] for volume in self.pod_spec["volumes"] if "configMap" in volume}
        self.config_maps = [m for m in of_kind(manifests, "ConfigMap") if m["metadata"]["name"] in named]

    def start(self) -> None:
        """Start the pod; wait until its startup probe succeeds."""
        self.engine.play(*self.config_maps, pod_of(self.daemonset, NAME))
        until(lambda: self.probe("startupProbe") or not self.is_running(), self.log)
        assert self.is_running(), self.log()

    def probe(self, name: str) -> bool:
        """Whether one of the daemon's probes succeeds, asked as the kubelet asks."""
        said = daemon(self.daemonset)[name]["httpGet"]
        [port] = [p["containerPort"] for p in daemon(self.daemonset)["ports"] if p["name"] == said["port"]]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", said["path"])
            return 200 <= connection.getresponse().status < 400
        except OSError:
            return False
        finally:
            connection.close()

    def log(self) -> str:
        return "".join(
            self.engine.do("logs", name, check=False).stdout for name in (f"{NAME}-folders", CONTAINER)
        )

    def state(self) -> dict[str, Any]:
        found = self.engine.inspect("container", CONTAINER)["State"]
        assert isinstance(found, dict)
        return found

    def is_running(self) -> bool:
        return bool(self.state()["Running"])

    def end(self) -> int:
        """End the pod as Kubernetes does: preStop, SIGTERM, and SIGKILL when the grace period is over.

        Returns the exit status of the daemon.
        """
        hook = daemon(self.daemonset)["lifecycle"]["preStop"]["exec"]["command"]
        began = time.monotonic()
        done = self.engine.do("exec", CONTAINER, *hook)
        assert done.returncode == 0, done.stderr
        assert not self.probe("readinessProbe")
        left_s = self.pod_spec["terminationGracePeriodSeconds"] - (time.monotonic() - began)
        self.engine.do("stop", "--time", str(max(1, int(left_s))), CONTAINER)
        status = int(self.state()["ExitCode"])
        self.engine.do("pod", "rm", "--force", NAME)
        return status

    def client(self) -> Client:
        """Return a client of this process, outside of the pod."""
        return Client(self.target, timeout=PATIENT)

    @property
    def target(self) -> str:
        [said] = [
            entry["value"] for entry in daemon(self.daemonset)["env"] if entry["name"] == "KVTIER_TARGET"
        ]
        assert isinstance(said, str)
        return said


@pytest.fixture
def node(engine: Engine, image: str) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="kv") as folder:  # short: a socket's path is
        os.chmod(folder, 0o755)
        made = Node(engine, Path(folder))
        try:
            yield made
        finally:
            engine.do("pod", "rm", "--all", "--force", "--time", "0", check=False)


def blocks() -> Any:
    shape = (NUM_BLOCKS, GEOMETRY.block_bytes)
    return np.random.default_rng(7).integers(0, 256, shape, np.uint8)


def test_a_pod_serves_drains_and_finds_its_blocks_again(node: Node) -> None:
    node.start()
    assert node.probe("readinessProbe")
    assert node.probe("livenessProbe")
    identity = NamespaceIdentity(hashlib.sha256(b"image").digest(), GEOMETRY)
    put = blocks()
    with node.client() as kv:
        ns = kv.register(identity)
        hashes = prefix_hashes(ns, list(range(NUM_BLOCKS * BLOCK_TOKENS)))
        kv.put(ns, hashes, put)
        assert kv.get(ns, hashes, into=np.zeros_like(put)).num_blocks == NUM_BLOCKS
    assert node.end() == 0

    node.start()
    with node.client() as kv:
        ns = kv.register(identity)
        report = kv.get(ns, hashes, into=np.zeros_like(put))
        assert report.num_blocks == NUM_BLOCKS
        assert np.array_equal(report.data, put)
        assert report.num_one_sided < NUM_BLOCKS, "they come from nvme"
    assert node.end() == 0


def test_the_kernel_holds_the_pod_to_the_charts_security_context(node: Node) -> None:
    node.start()
    security = {**node.pod_spec["securityContext"], **daemon(node.daemonset)["securityContext"]}
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{node.state()['Pid']}/status").read_text().splitlines()
        if ":\t" in line
    )
    user, group = str(security["runAsUser"]), str(security["runAsGroup"])
    assert (status["Uid"].split(), status["Gid"].split()) == ([user] * 4, [group] * 4)
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert {int(status[f"Cap{which}"], 16) for which in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert (security["allowPrivilegeEscalation"], status["NoNewPrivs"]) == (False, "1")
    assert (security["seccompProfile"], status["Seccomp"]) == ({"type": "RuntimeDefault"}, "2")
    assert security["readOnlyRootFilesystem"] is True
    mounts = [
        line.split() for line in Path(f"/proc/{node.state()['Pid']}/mountinfo").read_text().splitlines()
    ]
    [root] = [fields[5].split(",") for fields in mounts if fields[4] == "/"]
    assert "ro" in root
    wanted = {mount["mountPath"] for mount in daemon(node.daemonset)["volumeMounts"]}
    assert wanted <= {fields[4] for fields in mounts}
    for path in ("/opt/kvtier/x", "/etc/x", "/etc/kvtier/policy.yaml"):
        assert node.engine.do("exec", CONTAINER, "sh", "-c", f": > {path}", check=False).returncode != 0, path


def test_helms_check_runs_in_the_same_image_as_another_user(node: Node) -> None:
    node.start()
    check = pod_of(node.check, "check")
    [container] = check["spec"]["containers"]
    for entry in container["env"]:
        entry["value"] = "127.0.0.1" if entry["name"] == "CHECK_HOST" else entry["value"]
    node.engine.play(check)
    status = node.engine.do("wait", "check-check").stdout.strip()
    printed = node.engine.do("logs", "check-check")
    assert status == "0", printed.stdout + printed.stderr
    assert "put and got 4 blocks" in printed.stdout


def test_the_daemon_finds_nothing_wrong_with_where_it_runs(node: Node) -> None:
    """`kvtier doctor` inside: what seccomp, the read-only root and the limits let it do."""
    node.start()
    done = node.engine.do("exec", CONTAINER, "kvtier", "doctor", "--json", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = node.engine.do("exec", CONTAINER, "kvtier", "status", "--json")
    assert '"nvme"' in shown.stdout
