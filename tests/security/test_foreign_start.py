"""What a start meets that belongs to another user: one line each, which names the fix."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

STRANGER = 54_321
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that everybody reaches and nobody else's daemon has."""
    for part in (tmp_path, *tmp_path.parents):
        if part.owner() == Path.home().owner() and part != Path(part.anchor) and part.name != "tmp":
            part.chmod(0o755)
    return tmp_path


def refusal(folder: Path, socket_path: Path, nvme: Path | None = None) -> str:
    """Return what the checks say to a stranger."""
    cold = f", nvme: {{path: {nvme}, capacity: 16MiB, segment: 1MiB}}" if nvme else ""
    policy = folder / "policy.yaml"
    text = f"listen: unix://{socket_path}\nobserve: {{http: off}}\n"
    policy.write_text(f"{text}tiers: {{dram: {{capacity: 64MiB}}{cold}}}\n")
    command = [sys.executable, "-m", "tests.security.foreign_start", str(policy), str(STRANGER)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def own(folder: Path) -> Path:
    """Make a folder of the stranger's."""
    folder.mkdir()
    os.chown(folder, STRANGER, STRANGER)
    return folder


@pytest.mark.parametrize("inside", ["", "deep/er"])
def test_a_cold_store_of_another_user(inside: str, folder: Path) -> None:
    theirs = folder / "cold"
    (theirs / inside).mkdir(parents=True)
    theirs.chmod(0o700)
    said = refusal(folder, own(folder / "run") / "k.sock", theirs / inside)
    assert said.startswith(f"tiers.nvme.path: {theirs / inside} is not writable; chown it")
    assert said.count("\n") == 1


def test_a_socket_of_another_user(folder: Path) -> None:
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as theirs:
        theirs.bind(str(shared / "k.sock"))
        (shared / "k.sock").chmod(0o600)
        said = refusal(folder, shared / "k.sock")
    assert said.startswith(f"listen: {shared}/k.sock is another user's socket; change `listen`")


@pytest.mark.parametrize("name", ["k.sock", "new/k.sock"])
def test_a_folder_of_another_user(name: str, folder: Path) -> None:
    theirs = folder / "theirs"
    theirs.mkdir(mode=0o755)
    said = refusal(folder, theirs / name)
    assert said.startswith(f"listen: {(theirs / name).parent} is not writable; install -d")
