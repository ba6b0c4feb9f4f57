"""What somebody meets in the first five minutes: one line that names the fix, and an exit code that fits."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.appliance.host.process import EXIT_CANNOT_START

from ..daemon import START_S, Daemon

SMALL = ("--set", "tiers.dram.capacity=16MiB", "--set", "tiers.dram.extent=2MiB")
QUIET = ("--set", "observe.http=off")
NVME = "--set tiers.nvme.path={0}/nvme --set tiers.nvme.capacity=16MiB --set tiers.nvme.segment=1MiB"
USAGE = 2
#: A finder in front of all others that knows no numba.
HIDE_NUMBA = """
import sys

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden)
"""


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `kvtier serve` that ends by itself."""
    command = [sys.executable, "-m", "kvtier.appliance.cli", "serve", *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    return subprocess.run(command, capture_output=True, text=True, timeout=START_S, env=env, check=False)


def running(folder: Path, *arguments: str, prefix: Sequence[str] = ()) -> Daemon:
    """Return a daemon for `folder`."""
    return Daemon(folder, arguments=(*SMALL, *arguments), prefix=prefix)


def test_serve_twice(tmp_path: Path) -> None:
    nvme = NVME.format(tmp_path).split()
    with running(tmp_path, *QUIET, *nvme) as first:
        again = serve("--listen", first.target, *SMALL, *QUIET)
        assert again.returncode == EXIT_CANNOT_START
        fix = f"stop it (`kvtier drain --exit --target {first.target}`), or change `listen`"
        line = f"Error: listen: another daemon listens at {first.path}; {fix}\n"
        assert (again.stdout, again.stderr) == ("", line)
        beside = serve("--listen", f"unix://{tmp_path}/other.sock", *SMALL, *QUIET, *nvme)
        assert beside.returncode == EXIT_CANNOT_START
        (line,) = beside.stderr.splitlines()
        assert line.startswith(f"Error: tiers.nvme.path: {tmp_path}/nvme belongs to pid ")
        assert line.endswith("; stop that process, or set tiers.nvme.path to another directory")


def test_the_socket_of_a_killed_daemon_is_replaced(tmp_path: Path) -> None:
    with running(tmp_path, *QUIET) as first:
        first.stop(signal.SIGKILL)
        assert first.path.is_socket()
        first.start()
        assert first.stop() == 0


def test_the_port_of_metrics_is_in_use(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # in use already, by a daemon that runs as long as the tests
            taken.bind(("127.0.0.1", 9464))
        taken.listen()
        with running(tmp_path) as daemon:
            daemon.wait_for_log("going without metrics and page")  # it listens for clients before that
            assert daemon.stop() == 0
    warnings = [line for line in daemon.log.read_text().splitlines() if "WARNING" in line]
    assert ["going without metrics and page" in line for line in warnings] == [True]


def test_a_port_that_was_asked_for_is_in_use(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = serve("--listen", f"unix://{tmp_path}/k.sock", *SMALL, "--set", f"observe.http={address}")
    line = f"observe.http: {address} cannot be listened at; set observe.http to another port, or off"
    assert (result.returncode, result.stderr) == (EXIT_CANNOT_START, f"Error: {line}\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--set", "tiers.dram.capasity=1GiB"),
            "Error: --set tiers.dram.capasity: unknown key; allowed here: capacity, "
            "extent, hugepages, lock, numa_nodes; did you mean 'capacity'?",
        ),
        (("--set", "nonsense"), "Error: --set nonsense: write it like --set tiers.dram.capacity=1GiB"),
        (("--set", "tiers.dram.capacity=lots"), "'lots' is not a size; write it like 512MiB, 64GiB or 3TiB"),
        (("--policy", "absent.yaml"), "Error: absent.yaml: cannot be read: No such file or directory"),
    ],
)
def test_a_typo_is_one_line(arguments: tuple[str, ...], line: str) -> None:
    result = serve(*arguments)
    assert (result.returncode, result.stdout) == (USAGE, "")
    assert result.stderr.count("\n") == 1
    assert line in result.stderr


def test_a_typo_in_a_policy_names_its_line(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("schema_version: 1\ntiers:\n  dram: {capasity: 1GiB}\n")
    result = serve("--policy", str(policy))
    assert (result.returncode, result.stderr.count("\n")) == (USAGE, 1)
    assert f"Error: {policy}:3: tiers.dram.capasity: unknown key" in result.stderr


def test_without_numba_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(HIDE_NUMBA)
    monkeypatch.setenv("PYTHONPATH", f"{hidden}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with running(tmp_path, *QUIET, *NVME.format(tmp_path).split()) as daemon:
        daemon.wait_for_log("codec planes decodes float16")
        assert daemon.stop() == 0
    log = daemon.log.read_text()
    (line,) = [line for line in log.splitlines() if "numba is" in line]
    assert line.endswith("pip install 'kvtier[codecs]', or write codec: planes")
    assert "0.0 GB/s" not in log
    assert "exponents" not in log


def test_the_daemon_takes_as_many_descriptors_as_it_may(tmp_path: Path) -> None:
    """The usual soft limit is below what a cold store of 64 GiB needs."""
    (_, hard) = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running(tmp_path, *QUIET, prefix=("sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh")) as daemon:
        limits = Path(f"/proc/{daemon.pid}/limits").read_text().splitlines()
    (row,) = [line.split() for line in limits if line.startswith("Max open files")]
    assert row[3] == row[4] == str(hard)
