"""Peers that are not installed, or do not start: the others are measured all the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench import peers
from bench.rig import StoresDown, seated
from bench.worker import MIB

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = "apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4"


def install_broken(folder: Path, worker: str) -> None:
    """Make a complete looking environment of mooncake in `folder` with which its store cannot start."""
    python = peers.python_of(folder, "mooncake")
    python.parent.mkdir(parents=True)
    # An interpreter without the package answers that it cannot import it; one that ends answers nothing.
    command = (
        f'exec "{sys.executable}" "$@"' if worker == "cannot import" else "echo no such library >&2; exit 127"
    )
    python.write_text(f"#!/bin/sh\n{command}\n")
    python.chmod(0o755)
    (folder / "mooncake" / "kvtier-recipe").write_text(peers.RECIPES["mooncake"].version)


@pytest.mark.parametrize("names", [[], ["mooncake"], ["mooncake", "lmcache"]])
def test_no_name_means_all_of_them(names: list[str]) -> None:
    assert peers.parse(["install", *names]).names == (names or list(peers.RECIPES))


def test_an_unknown_peer_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.parse(["install", "redis"])
    assert "unknown peer redis; known: mooncake, lmcache" in capsys.readouterr().err


def test_the_command_lists_what_is_there(tmp_path: Path) -> None:
    install_broken(tmp_path, "ends")
    command = [sys.executable, "-m", "bench.peers", "list", "--peers", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mooncake 0.3.13.post1: installed" in done.stdout
    assert LIBRARIES in done.stdout
    assert "lmcache 0.5.6: not installed" in done.stdout


def test_an_environment_without_its_interpreter_is_not_installed(tmp_path: Path) -> None:
    install_broken(tmp_path, "ends")
    python = peers.python_of(tmp_path, "mooncake")
    python.unlink()
    python.symlink_to(tmp_path / "python3.99")
    assert not peers.is_installed(tmp_path, "mooncake")


@pytest.mark.parametrize(
    ("worker", "reason"), [("cannot import", "ModuleNotFoundError"), ("ends", "no such library")]
)
def test_what_did_not_start_is_named_with_its_reason(tmp_path: Path, worker: str, reason: str) -> None:
    install_broken(tmp_path, worker)
    with (
        pytest.raises(StoresDown, match=f"(?s)mooncake did not start: .*{reason}") as caught,
        seated(["memcpy", "mooncake"], tmp_path, pool=64 * MIB),
    ):
        pass
    assert list(caught.value.causes) == ["mooncake"]


def test_the_bench_goes_on_without_a_peer_that_does_not_start(tmp_path: Path) -> None:
    install_broken(tmp_path, "cannot import")
    command = [sys.executable, "-m", "bench", "flood", "--quick", "--peers", str(tmp_path)]
    command += ["--only", "kvtier,mooncake"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said, _, table = done.stdout.partition("flood: ")
    assert "Without mooncake, which did not start" in said
    assert LIBRARIES in said
    assert "kvtier" in table
    assert "mooncake" not in table
