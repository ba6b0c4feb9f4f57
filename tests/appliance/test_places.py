"""Places that a daemon wants and something has: sockets that listen, ports, a directory with an owner."""

import platform
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.appliance.errors import StartError
from kvtier.appliance.preflight import probes, table

from .conftest import small_settings
from .loops import DaemonThread
from .test_preflight import settings_of


def test_what_is_at_the_path_of_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "k.sock"
    assert probes.kind_at(path) == ""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        assert probes.kind_at(path) == "live"
    assert probes.kind_at(path) == "socket"
    path.unlink()
    path.write_text("")
    assert probes.kind_at(path) == "other"


LISTENS_AS_IT_ENDS = """
import ctypes, socket, sys, threading
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    threading.Thread(target=sys.stdin.read).start()
    print("listens", flush=True)
    ctypes.CDLL(None).syscall(60 if sys.argv[2] == "x86_64" else 93, 0)  # exit of this thread alone
"""


def test_a_killed_process_whose_socket_still_listens_is_waited_for(tmp_path: Path) -> None:
    """The kernel takes a tenth of a second per GiB; a start meanwhile was refused: another daemon listens."""
    path = tmp_path / "ending"
    command = [sys.executable, "-c", LISTENS_AS_IT_ENDS, str(path), platform.machine()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ending:
        assert ending.stdout is not None
        assert ending.stdin is not None
        assert ending.stdout.readline() == b"listens\n"
        while Path(f"/proc/{ending.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert ending.poll() is None
        with ThreadPoolExecutor(1) as pool:
            kind = pool.submit(probes.kind_at, path)
            ending.kill()
            assert kind.result() == "socket"


def test_a_port_in_use_is_noticed_at_the_start_if_it_was_asked_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = settings_of(tmp_path, {"observe": {"http": address}})
        with pytest.raises(
            StartError, match=f"observe.http: {address} cannot be listened at; set observe.http"
        ):
            table.require(settings)
    assert table.require(settings) is not None


def test_a_second_daemon_is_refused_before_it_takes_anything(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, nvme=True, observe={"http": "off"})
    with DaemonThread(settings), pytest.raises(StartError) as refusal:
        table.require(settings)
    first, second = str(refusal.value).splitlines()
    assert first.startswith(f"listen: another daemon listens at {tmp_path}/k.sock; stop it (`kvtier drain")
    assert second.startswith("tiers.nvme.path: ")
    assert "belongs to pid" in second
