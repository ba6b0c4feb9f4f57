"""Addresses: what may be written, and that a client finds the daemon of its own user."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.v1 import addresses


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("unix:///run/kvtier/kvtier.sock", "unix:///run/kvtier/kvtier.sock"),
        ("unix:/run/k.sock", "unix:///run/k.sock"),
        ("localhost:50051", "localhost:50051"),
        ("[::1]:50051", "[::1]:50051"),
        ("10.0.0.1:0", "10.0.0.1:0"),
    ],
)
def test_reads_addresses(written: str, read: str) -> None:
    assert addresses.check_address(written) == read


@pytest.mark.parametrize(
    "written", ["", "unix:", "unix://k.sock", "http://x", "host", ":1", "host:", "host:99999", 5]
)
def test_refuses_what_is_no_address(written: object) -> None:
    with pytest.raises(ValueError, match=r"unix:///|absolute"):
        addresses.check_address(written)


def test_the_usual_places_in_order() -> None:
    found = addresses.candidates({"XDG_RUNTIME_DIR": "/run/user/7"}, uid=7)
    assert [str(path) for path in found] == [
        "/run/kvtier/kvtier.sock",
        "/run/user/7/kvtier/kvtier.sock",
        "/tmp/kvtier-7/kvtier.sock",
    ]


def test_a_user_without_run_listens_in_the_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).is_relative_to(tmp_path))
    assert (
        addresses.default_address({"XDG_RUNTIME_DIR": str(tmp_path)})
        == f"unix://{tmp_path}/kvtier/kvtier.sock"
    )
    assert addresses.default_address({}) == f"unix:///tmp/kvtier-{os.getuid()}/kvtier.sock"


def test_a_client_prefers_the_variable_then_a_socket_that_is_there(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    (tmp_path / "kvtier").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "kvtier" / "kvtier.sock"))
        expected = f"unix://{tmp_path}/kvtier/kvtier.sock"
        if not Path("/run/kvtier/kvtier.sock").exists():
            assert addresses.default_target(environment) == expected
    assert addresses.default_target({**environment, "KVTIER_TARGET": "node:1"}) == "node:1"


def test_a_client_does_not_trust_a_socket_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybodys = tmp_path / "everybodys"  # as /tmp is; below a folder of root alone every socket is trusted
    path = everybodys / "kvtier" / "k.sock"
    path.parent.mkdir(parents=True)
    everybodys.chmod(0o1777)
    monkeypatch.setattr(addresses, "candidates", lambda environment, uid: [path])
    monkeypatch.setattr(addresses, "default_address", lambda environment: "unix:///own.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        owner = os.getuid() or 4242  # root's own sockets are trusted by everybody
        os.chown(path, owner, -1)
        assert addresses.default_target({}, uid=owner) == f"unix://{path}"
        assert addresses.default_target({}, uid=owner + 1) == "unix:///own.sock"


@pytest.mark.skipif(os.geteuid() != 0, reason="root goes everywhere; another user is made of it")
def test_a_folder_that_may_not_be_looked_into_is_passed_over(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "below").mkdir(parents=True)
    closed.chmod(0o700)
    code = f"""
import os
from kvtier.v1 import addresses
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(addresses.default_target({{"XDG_RUNTIME_DIR": "{closed}/below/x"}}))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert said.stdout.startswith("unix://"), said.stderr
