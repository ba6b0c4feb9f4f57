"""What the chart renders, run: folders prepared by root without a capability, the daemon as nobody in
particular on a read-only root, its probes, `helm test` from another pod, a reload, and the way a pod ends."""

import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.tiers.encryption.master_keys import key_id
from tests.helm.charts import of_kind, policies, render
from tests.helm.pods import Container, why_not
from tests.ports import free_port

from ..waiting import until

pytest.importorskip("helm_python", reason="make test-helm installs it")
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

SLEEPER = {"command": ["sh", "-c", "sleep 600 & echo up; wait"], "args": []}  # two processes
VALUES: dict[str, Any] = {
    "policy": {"tiers": {"dram": {"capacity": "128MiB", "extent": "16MiB"}, "nvme": {"capacity": "512MiB"}}},
    "coldStore": {"hostPath": {"path": "/mnt/nvme/kvtier"}},
}


class Node:
    """One release on one node: the folders its volumes stand for, and its containers."""

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        self.port = free_port()
        self.values = {**VALUES, **values, "http": {"port": self.port}}
        self.folder = folder
        self.volumes = {name: folder / name for name in ("policy", "socket", "cold", "tmp", "master-key")}
        for path in self.volumes.values():
            path.mkdir(mode=0o755)  # as the kubelet makes host folders: root's
        self.volumes["tmp"].chmod(0o777)
        self._containers: list[Container] = []
        manifests = render(self.values)
        [self.pod] = [m["spec"]["template"]["spec"] for m in of_kind(manifests, "DaemonSet")]
        [self.check] = [m["spec"] for m in of_kind(manifests, "Pod")]
        self.write_policy(manifests)

    def write_policy(self, manifests: list[dict[str, Any]]) -> None:
        """Let the ConfigMap's content be what these manifests say."""
        fresh = self.volumes["policy"] / "policy.yaml.new"
        fresh.write_text(policies(manifests)[0])
        fresh.rename(self.volumes["policy"] / "policy.yaml")

    def container(self, container: dict[str, Any], pod: dict[str, Any], name: str) -> Container:
        """Return a container of this node, not started yet. `close` ends it, whatever becomes of its test."""
        self._containers.append(Container(container, pod, self.volumes, self.folder / f"{name}.log"))
        return self._containers[-1]

    def close(self) -> None:
        """End what still runs."""
        with contextlib.ExitStack() as closing:  # all of them, should one not end
            for container in self._containers:
                closing.callback(container.close)

    def probe(self, name: str) -> int:
        """Return the HTTP status of one of the daemon's probes, 0 when nobody answers."""
        path = self.pod["containers"][0][name]["httpGet"]["path"]
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()


@pytest.fixture
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    tmp_path.chmod(0o755)
    made = Node(tmp_path, getattr(request, "param", {}))
    try:
        yield made
    finally:
        made.close()


def started(node: Node) -> Container:
    """Run the init containers, then start the daemon and wait until it is ready."""
    for number, container in enumerate(node.pod["initContainers"]):
        with node.container(container, node.pod, f"init{number}") as prepare:
            prepare.run()
    daemon = node.container(node.pod["containers"][0], node.pod, "daemon")
    daemon.start()
    until(lambda: node.probe("startupProbe") == 200 or daemon.has_ended(), lambda: daemon.log.read_text())
    assert not daemon.has_ended(), daemon.log.read_text()
    return daemon


def checked(node: Node, name: str, **said: str) -> Container:
    """Return `helm test`'s container, with other words in its environment."""
    container = dict(node.check["containers"][0])
    said = {"CHECK_HOST": "127.0.0.1", **said}
    container["env"] = [{**e, "value": said.get(e["name"], e["value"])} for e in container["env"]]
    return node.container(container, node.check, name)


def test_a_pod_from_its_folders_to_its_last_sealed_segment(node: Node) -> None:
    with started(node) as daemon:
        assert (node.probe("readinessProbe"), node.probe("livenessProbe")) == (200, 200)
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        assert "Uid:\t10001\t10001\t10001\t10001" in status
        assert "CapEff:\t0000000000000000" in status
        assert "CapBnd:\t0000000000000000" in status

        with checked(node, "check") as check:
            assert "put and got 4 blocks" in check.run()

        inside = daemon.execute(["kvtier", "status", "--json"])
        assert inside.returncode == 0, inside.stderr
        assert daemon.execute(["touch", "/etc/x"]).returncode != 0, "the root is read-only"

        changed = {**node.values, "policy": {**node.values["policy"], "leases": {"ttl": "17s"}}}
        node.write_policy(render(changed))
        until(
            lambda: "17s" in daemon.execute(["kvtier", "policy", "show", "--running", "--changed"]).stdout,
            lambda: daemon.log.read_text(),
        )

        hook = daemon.execute(node.pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"])
        assert hook.returncode == 0, hook.stderr
        assert node.probe("readinessProbe") == 503
        os.kill(daemon.pid, signal.SIGTERM)
        assert daemon.wait() == 0, daemon.log.read_text()
    assert sorted(path.name for path in node.volumes["cold"].iterdir()) == ["cold"]
    assert node.volumes["socket"].stat().st_mode & 0o777 == 0o770, "others do not reach the socket"


SECRET = {"masterKey": {"secretName": "kvtier-master", "key": "keys"}}
OLD, NEW = os.urandom(32), os.urandom(32)


def put_secret(folder: Path, *keys: bytes) -> None:
    """Exchange the content of a Secret's volume as the kubelet does: a folder of a new version, and a link to
    it that is swapped. Files are root's and the pod's group may read them (fsGroup adds that to 0400)."""
    version = folder / f"..{time.monotonic_ns()}"
    version.mkdir(mode=0o755)
    file = version / "keys"
    file.write_text("".join(f"{key.hex()}\n" for key in keys))
    os.chown(file, 0, 10001)
    file.chmod(0o440)
    link = folder / "..data_tmp"
    link.symlink_to(version.name)
    link.rename(folder / "..data")
    if not (folder / "keys").is_symlink():
        (folder / "keys").symlink_to("..data/keys")


@pytest.mark.parametrize("node", [SECRET], indirect=True)
def test_a_secret_with_another_master_key_is_taken_while_the_pod_runs(node: Node) -> None:
    """Mounted as a file, read by a user that is not root, encrypted with; then the Secret is changed."""
    put_secret(node.volumes["master-key"], OLD)
    with started(node) as daemon:
        with checked(node, "check") as check:
            assert "put and got 4 blocks" in check.run()

        def master_keys() -> list[dict[str, Any]]:
            said = daemon.execute(["kvtier", "status", "--json"])
            assert said.returncode == 0, said.stderr + daemon.log.read_text()
            keys: list[dict[str, Any]] = json.loads(said.stdout)["encryption"]["master_keys"]
            return keys

        assert [key["id"] for key in master_keys()] == [key_id(OLD)]
        put_secret(node.volumes["master-key"], NEW, OLD)
        until(
            lambda: [key["id"] for key in master_keys()] == [key_id(NEW), key_id(OLD)],
            lambda: daemon.log.read_text(),
        )
        assert [key["is_current"] for key in master_keys()] == [True, False]
        for said in (daemon.log.read_text(), daemon.execute(["env"]).stdout):
            assert OLD.hex() not in said
            assert NEW.hex() not in said


def test_nothing_outlives_a_test_that_fails(node: Node) -> None:
    """A daemon that was started and is waited for in vain, as one that a test forgot."""
    forgotten = node.container(node.pod["initContainers"][0] | SLEEPER, node.pod, "forgotten")
    forgotten.start()
    until(lambda: "up" in forgotten.log.read_text(), lambda: "it does not start")
    first = forgotten.pid
    node.close()
    assert forgotten.has_ended()
    assert not Path(f"/proc/{first}").exists()
    node.close()


def test_nothing_outlives_a_test_run_that_is_killed(node: Node, tmp_path: Path) -> None:
    """Another process starts the container and is killed at once, so that nothing of it can clean up."""
    told = tmp_path / "first"
    container = node.container(node.pod["initContainers"][0] | SLEEPER, node.pod, "orphan")
    if (child := os.fork()) == 0:  # a copy of us that owns the container
        container.start()
        while "up" not in container.log.read_text():
            time.sleep(0.01)
        told.with_suffix(".new").write_text(str(container.pid))
        told.with_suffix(".new").rename(told)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    first = int(told.read_text())
    until(lambda: not Path(f"/proc/{first}").exists(), lambda: f"process {first} lives on")


TENANTS = {**VALUES["policy"], "tenants": {"acme": {"members": ["uid:10002"]}}}  # 10002 is the check's user


@pytest.mark.parametrize("node", [{"policy": TENANTS}], indirect=True)
def test_tenants_are_known_by_their_user_and_others_are_nobody(node: Node) -> None:
    with started(node):
        with checked(node, "as-installed") as check:
            assert "left out" in check.run()
        node.check["securityContext"]["runAsGroup"] = 4000  # another pod, that was given no group
        with checked(node, "acme", CHECK_PUT="yes") as acme:
            assert "put and got 4 blocks" in acme.run()
        node.check["securityContext"]["runAsUser"] = 4000
        with checked(node, "nobody", CHECK_PUT="yes") as nobody:
            nobody.start()
            assert nobody.wait() != 0
        assert "NOT_A" in nobody.log.read_text() or "tenant" in nobody.log.read_text()


@pytest.mark.parametrize("node", [{"security": {"runAsUser": 2000, "runAsGroup": 3000}}], indirect=True)
def test_folders_that_were_prepared_are_left_alone(node: Node) -> None:
    with started(node):
        pass
    before = {name: path.stat() for name, path in node.volumes.items()}
    with node.container(node.pod["initContainers"][0], node.pod, "again") as again:
        again.run()
    for name, path in node.volumes.items():
        assert (path.stat().st_gid, path.stat().st_mode) == (before[name].st_gid, before[name].st_mode)
    assert before["socket"].st_gid == 3000


def test_a_folder_of_somebody_else_is_refused_and_not_taken(node: Node) -> None:
    os.chown(node.volumes["cold"], 4000, 4000)
    with node.container(node.pod["initContainers"][0], node.pod, "init") as prepare:
        prepare.start()
        assert prepare.wait() != 0
    assert "Operation not permitted" in prepare.log.read_text()
    assert node.volumes["cold"].stat().st_gid == 4000
