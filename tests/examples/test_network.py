"""Links of examples/network.py delay, can be cut and mended, by the kernel or a switch in user space."""

import subprocess
import sys

import pytest

from examples.network import NetworkHost, network, why_not

PORT = 7070
ACCEPT = f"""import socket
listener = socket.create_server(("", {PORT}))
print("listening", flush=True)
while True:
    listener.accept()[0].close()"""
CONNECT = f"""import socket, sys, time
began_at = time.monotonic()
socket.create_connection((sys.argv[1], {PORT}), float(sys.argv[2])).close()
print(time.monotonic() - began_at)"""


def connect(near: NetworkHost, far: NetworkHost, wait_s: float) -> float | None:
    """Return how long it took to connect; None: it did not connect within `wait_s`."""
    command = [*near.prefix, sys.executable, "-c", CONNECT, far.address, str(wait_s)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return float(done.stdout) if done.returncode == 0 else None


def test_a_link_delays_both_ways_and_can_be_cut_and_mended() -> None:
    link = "netem delay 20ms loss 0%"
    if why := why_not(link):
        pytest.skip(why)
    with network(2, link) as (near, far):
        command = [*far.prefix, sys.executable, "-c", ACCEPT]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listening\n"
            took_s = connect(near, far, 60.0)
            assert took_s is not None
            assert took_s >= 0.04
            far.cut()
            assert connect(near, far, 0.5) is None
            far.mend()
            assert connect(near, far, 60.0) is not None
            server.terminate()


def test_what_no_switch_knows_is_refused_with_words() -> None:
    why = why_not("netem reorder 25%") or why_not("nonsense")
    assert why
