"""Ports on loopback for servers that must be told their port before they are started."""

import itertools
import os
import socket

FIRST, NUM_WORKERS, PER_WORKER = 20_000, 10, 1_000  # below the ports that the kernel hands out by itself
_OFFSETS = itertools.count(os.getpid())  # two runs on one machine begin at different places


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that nothing listens on, another one with each call.

    A port that the kernel chose (`bind` to 0) may be given to another test between this call and the start
    of the server. These come from a range that it does not choose from, one for each worker of pytest-xdist.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % NUM_WORKERS
    for offset in itertools.islice(_OFFSETS, PER_WORKER):
        port = FIRST + worker * PER_WORKER + offset % PER_WORKER
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: past connections
            if not _is_taken(probe, host, port):
                return port
    raise RuntimeError(f"all {PER_WORKER} ports from {FIRST + worker * PER_WORKER} on are taken")


def _is_taken(probe: socket.socket, host: str, port: int) -> bool:
    try:
        probe.bind((host, port))
    except OSError:
        return True
    return False
