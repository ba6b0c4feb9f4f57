"""A daemon and a runtime under two users: a socket that may not be opened is no daemon that is not there."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.v1.addresses import default_target
from kvtier.v1.diagnosis import diagnose

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread

IS_ROOT = os.geteuid() == 0
STRANGER = 65534 if IS_ROOT else 0  # who is not root shuts itself out
WAYS = [f"{kind} {way}" for kind in ("sync", "async") for way in ("local", "forced", "grpc")]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can reach; pytest's own are for its user alone."""
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        os.chmod(path, 0o755)
        (Path(path) / "run").mkdir(mode=0o755)
        yield Path(path) / "run"
        os.chmod(Path(path) / "run", 0o755)


def tried(folder: Path) -> dict[str, Any]:
    """Return what every way in says to another user."""
    command = [sys.executable, "-m", "tests.security.as_another", f"unix://{folder}/k.sock", str(STRANGER)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def assert_denied(found: dict[str, Any], *parts: str) -> None:
    for way in WAYS:
        kind, reason, message = found[way]
        assert (kind, reason) == ("PermissionDenied", "SOCKET_DENIED"), way
        for part in parts:
            assert part in message, way
        assert "start one" not in message
    code, text = found["command"]
    assert code == 4, "3 makes scripts start another daemon"
    assert all(part in " ".join(text.split()) for part in parts), text
    plugin = found["plug-in"]
    assert plugin["answers"] == [None] * 3
    assert plugin["causes"] == {"SOCKET_DENIED": 1, "BREAKER_OPEN": 2}
    (warning,) = plugin["warnings"]
    assert all(part in warning for part in parts)


def test_a_socket_of_another_group(folder: Path) -> None:
    with DaemonThread(small_settings(folder)):
        mode = 0o660 if IS_ROOT else 0o000
        for path in folder.glob("k.sock*"):
            path.chmod(mode)
            os.chown(path, -1, 4242 if IS_ROOT else -1)
        found = tried(folder)
    assert_denied(
        found, f"socket {folder}/k.sock", f"owner {os.geteuid()}", f"mode {mode:04o}", "this process is uid"
    )
    if IS_ROOT:
        assert_denied(
            found,
            "group 4242",
            "uid 65534",
            "groups 65534",
            "usermod --append --groups 4242",
            "supplementalGroups: [4242]",
            "`tenants`",
        )


def test_a_folder_on_the_way(folder: Path) -> None:
    with DaemonThread(small_settings(folder)):
        mode = 0o700 if IS_ROOT else 0o600
        os.chown(folder, -1, 4242 if IS_ROOT else -1)
        folder.chmod(mode)
        found = tried(folder)
        folder.chmod(0o755)
    assert_denied(
        found, f"folder {folder} has owner {os.geteuid()}", f"mode {mode:04o}", f"chmod {mode | 0o010:04o}"
    )
    if IS_ROOT:
        assert_denied(found, "supplementalGroups: [4242]")


def test_where_nothing_is_a_daemon_is_missing_all_the_same(folder: Path) -> None:
    found = tried(folder)
    for way in WAYS:
        assert found[way][:2] == ["Unavailable", "NOT_RUNNING"], way
        assert "kvtier serve" in found[way][2]
    assert found["command"][0] == 3
    assert found["plug-in"]["causes"] == {"NOT_RUNNING": 1, "BREAKER_OPEN": 2}


def test_who_may_gets_in_by_every_way(folder: Path) -> None:
    with DaemonThread(small_settings(folder)):
        assert diagnose(f"unix://{folder}/k.sock") is None
        for path in folder.glob("k.sock*"):
            path.chmod(0o666)
        found = tried(folder)
    assert [found[way] for way in WAYS] == [["answered"]] * len(WAYS)
    assert found["plug-in"]["warnings"] == []


@pytest.mark.skipif(not IS_ROOT, reason="only root makes a folder that only root can have made")
def test_a_client_without_a_target_finds_the_daemon_it_may_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(tempfile.mkdtemp(prefix="kv", dir="/run"))
    command = (
        "import os; from pathlib import Path; from kvtier.v1 import addresses\n"
        f"addresses.candidates = lambda *_: [Path('{place}/kvtier/kvtier.sock'), "
        "Path('/nowhere/kvtier.sock')]\n"
        "os.setgid(65534); os.setuid(65534); print(addresses.default_target({}))"
    )
    try:
        place.chmod(0o755)
        (place / "kvtier").mkdir(mode=0o700)
        os.chown(place / "kvtier", 4242, 4242)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
        ran = subprocess.run(
            [sys.executable, "-c", command], env=environment, capture_output=True, text=True, timeout=60
        )
        assert ran.stdout.strip() == f"unix://{place}/kvtier/kvtier.sock", ran.stderr
    finally:
        (place / "kvtier").rmdir()
        place.rmdir()
    assert default_target({"KVTIER_TARGET": "node:1"}) == "node:1"
