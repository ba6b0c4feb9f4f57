"""Measures how soon memory is served again after kill -9 of the daemon.

    python -m bench.kept_memory [--memory-gib 8] [--rounds 3]

A client fills memory with blocks of 2 MiB. In each round the process that serves is killed; its supervisor
forks the next one, which takes memory over. Timed from the kill: until the old process is gone (the kernel
unmaps its memory first), until the next one answers, until the first block is read and right, until all bytes
are verified in the background. The last one is set against memcpy and against xxh3 of as many bytes, both by
as many threads as verify, in the same round. In the end every acknowledged block is read and compared.
"""

import argparse
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvtier.appliance.host.adoption import NUM_THREADS
from kvtier.clients import Client, Geometry, KvtierError, Namespace, NamespaceIdentity
from tests.daemon import PATIENT, Daemon, is_alive
from tests.waiting import until

from .machine import print_machine
from .table import render

GEOMETRY = Geometry(num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=16, dtype="float16")
IDENTITY = NamespaceIdentity(b"bench of kept memory", GEOMETRY)
CHAIN_BLOCKS = 8
GIB = 1 << 30
FILLED = 0.94  # of memory: below the watermark, so that nothing is evicted
FLOOR_BYTES = 256 << 20
COLUMNS = ("gone", "answers", "first block", "all verified", "verified GB/s", "memcpy", "xxh3")
Bytes = np.ndarray[Any, np.dtype[np.uint64]]


def names_of(chain: int) -> list[bytes]:
    """Names of one chain of blocks."""
    return [b"%16d/%15d" % (chain, block) for block in range(CHAIN_BLOCKS)]


def payload_of(chain: int) -> Bytes:
    """Bytes of one chain: every word follows from the chain and its place."""
    words = np.arange(CHAIN_BLOCKS * GEOMETRY.block_bytes // 8, dtype=np.uint64)
    return words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(chain)


def is_read(client: Client, namespace: Namespace, chain: int) -> bool:
    """Read a chain; False when it is not there whole. Raises AssertionError for other bytes."""
    into = np.empty(CHAIN_BLOCKS * GEOMETRY.block_bytes // 8, np.uint64)
    if client.get(namespace, names_of(chain), into.view(np.uint8)).num_blocks < CHAIN_BLOCKS:
        return False
    assert np.array_equal(into, payload_of(chain)), f"wrong bytes of chain {chain}"
    return True


def floor_gbps(of: str) -> float:
    """GB/s of memcpy or of xxh3 by as many threads as verify."""
    source = np.ones((NUM_THREADS, FLOOR_BYTES), np.uint8)
    into = np.ones_like(source)

    def work(thread: int) -> None:
        if of == "memcpy":
            np.copyto(into[thread], source[thread])
        else:
            xxhash.xxh3_128_digest(source[thread])

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        began_at = time.perf_counter()
        list(pool.map(work, range(NUM_THREADS)))
        return source.nbytes / (time.perf_counter() - began_at) / 1e9


def wait_until(is_so: Callable[[], bool], since: float) -> float:
    """Wait for a condition; return the seconds since a moment."""
    until(is_so)
    return time.monotonic() - since


def measure(daemon: Daemon, num_chains: int, num_kept: int) -> tuple[float, ...]:
    """Kill the daemon once; return the columns. `num_kept`: times that memory was kept before."""
    killed, killed_at = daemon.pid, time.monotonic()
    os.kill(killed, signal.SIGKILL)
    gone_s = wait_until(lambda: not is_alive(killed), killed_at)
    answers_s = found_s = 0.0
    while not found_s:
        try:
            with Client(daemon.target, timeout=PATIENT) as client:
                namespace = client.register(IDENTITY)
                answers_s = answers_s or time.monotonic() - killed_at
                if is_read(client, namespace, num_chains - 1):
                    found_s = time.monotonic() - killed_at
        except KvtierError:
            threading.Event().wait(0.002)
    lines: list[str] = []

    def is_verified() -> bool:
        lines[:] = [line for line in daemon.log.read_text().splitlines() if "of memory kept" in line]
        return len(lines) > num_kept

    verified_s = wait_until(is_verified, killed_at)
    took_s = float(lines[-1].rsplit("verified in ", 1)[1].split()[0])
    rate = int(lines[-1].split(" MiB")[0].rsplit(" ", 1)[1]) * (1 << 20) / took_s / 1e9
    return gone_s, answers_s, found_s, verified_s, rate, floor_gbps("memcpy"), floor_gbps("xxh3")


def run(memory_gib: float, rounds: int) -> list[tuple[float, ...]]:
    """Fill memory, kill the daemon `rounds` times; print what was found in the end."""
    num_chains = int(memory_gib * GIB * FILLED) // (CHAIN_BLOCKS * GEOMETRY.block_bytes)
    with tempfile.TemporaryDirectory(prefix="kvtier-kept-") as folder:
        capacity = f"tiers.dram.capacity={int(memory_gib * 1024)}MiB"
        with Daemon(Path(folder), settings=(capacity, "observe.http=off")) as daemon:
            with Client(daemon.target, timeout=PATIENT) as client:
                namespace = client.register(IDENTITY)
                for chain in range(num_chains):
                    assert client.put(namespace, names_of(chain), payload_of(chain)).complete, chain
            rows = [measure(daemon, num_chains, number) for number in range(rounds)]
            with Client(daemon.target, timeout=PATIENT) as client:
                namespace = client.register(IDENTITY)
                num_found = sum(is_read(client, namespace, chain) for chain in range(num_chains))
    share = f"{num_found} of {num_chains} chains ({num_found / num_chains:.2%})"
    print(f"{share} were there after {rounds} kills, no other byte")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--memory-gib", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    print_machine()
    rows = run(chosen.memory_gib, chosen.rounds)
    rows.append(tuple(float(np.median(column)) for column in zip(*rows, strict=True)))
    names = [f"round {number}" for number in range(1, chosen.rounds + 1)] + ["median"]
    cells = [
        (name, *(f"{one:.2f} s" for one in row[:4]), *(f"{one:.1f}" for one in row[4:]))
        for name, row in zip(names, rows, strict=True)
    ]
    print(render(("", *COLUMNS), cells))
    median = rows[-1]
    print(f"verified at {median[4] / median[5]:.2f} of memcpy, {median[4] / median[6]:.2f} of xxh3 alone")


if __name__ == "__main__":
    main()
