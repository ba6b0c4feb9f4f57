"""`python -m bench.holder_index [--hosts 100] [--bundles 100000]`: the index of a whole fleet in Redis.

Fills a Redis of its own (loopback, one server, nothing on disk) with what so many hosts would have written,
in the same commands over a bare socket, every bundle at one host: the most memory. Beside them one more host
writes through the product's RedisIndex, as the writer of a daemon does, and looks are made through it, 8
bundles each, half of them of bundles that no host has. Processor time of Redis is its own word (INFO cpu).
"""

import argparse
import asyncio
import os
import random
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.table import percentile
from kvtier.appliance.fleet.index import FIRST_STEP
from kvtier.appliance.fleet.index_writer import REFRESH_S, STEP_KEYS
from kvtier.sources.directories.addresses import DirectoryAccess, parse_address
from kvtier.sources.directories.opening import open_index
from kvtier.sources.directories.redis_index import DIGEST_BYTES, KEY_TTL_S, HolderIndex
from tests.sources.directories.servers import REDIS, Server, redis_server

from .machine import print_machine

NUM_WRITTEN, NUM_LOOKS = 20_000, 4000
PREFIX = b"kvtier:kvtier:"
FIRST_LIFE = 1 << 62


def key_of(host: int, bundle: int) -> bytes:
    """Return the key of a bundle, spread as hashes are; distinct for distinct arguments."""
    mixed = (host << 32 | bundle) * 0x9E3779B97F4A7C15 % (1 << 64)
    return bytes(DIGEST_BYTES) + struct.pack("<Q", mixed)


def commands(host: int, num_bundles: int) -> Iterator[bytes]:
    """Yield what a host's writer sends, a thousand bundles at a time."""
    life, ttl = str(FIRST_LIFE + host).encode(), str(KEY_TTL_S).encode()
    size = len(PREFIX) + DIGEST_BYTES + 8
    add = b"*3\r\n$4\r\nSADD\r\n$%d\r\n%s%%b\r\n$%d\r\n%s\r\n" % (size, PREFIX, len(life), life)
    expire = b"*3\r\n$6\r\nEXPIRE\r\n$%d\r\n%s%%b\r\n$%d\r\n%s\r\n" % (size, PREFIX, len(ttl), ttl)
    both = add + expire
    for start in range(0, num_bundles, 1000):
        keys = [key_of(host, bundle) for bundle in range(start, min(start + 1000, num_bundles))]
        yield b"".join([both % (key, key) for key in keys])


def fill(server: Server, num_hosts: int, num_bundles: int) -> float:
    """Write what all hosts hold; return the seconds."""
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        for host in range(num_hosts):
            for start, batch in enumerate(commands(host, num_bundles)):
                connection.sendall(batch)
                wanted = 8 * min(1000, num_bundles - start * 1000)  # ":1\r\n" twice a bundle
                while wanted > 0:
                    answer = connection.recv(1 << 16)
                    assert answer, "it has closed the connection"
                    assert b"-" not in answer, answer[:200]
                    wanted -= len(answer)
    return time.perf_counter() - began


class Meter:
    """What Redis says it has done, and what this process has used, since it was made."""

    def __init__(self, server: Server) -> None:
        self._server, self._began = server, time.perf_counter()
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        stats, cpu = self._server.info("stats"), self._server.info("cpu")
        return {
            "commands": float(stats["total_commands_processed"]),
            "received": float(stats["total_net_input_bytes"]),
            "redis_s": float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"]),
            "own_s": time.process_time(),
        }

    def since(self) -> dict[str, float]:
        """Return the differences, and `seconds`."""
        now = self._read()
        took = {name: now[name] - self._before[name] for name in now}
        return took | {"seconds": time.perf_counter() - self._began}


async def write(index: HolderIndex, host: int) -> None:
    """Write as the writer of a daemon does, without its pauses."""
    for start in range(0, NUM_WRITTEN, STEP_KEYS):
        keys = [key_of(host, bundle) for bundle in range(start, min(start + STEP_KEYS, NUM_WRITTEN))]
        await index.add(FIRST_LIFE + host, keys)


async def look(index: HolderIndex, num_hosts: int, num_bundles: int, num_at_once: int) -> list[float]:
    """Return the seconds of NUM_LOOKS looks, so many at a time; every answer is compared."""
    dice, took = random.Random(num_at_once), list[float]()

    async def one_after_another() -> None:
        for _ in range(NUM_LOOKS // num_at_once):
            host, first = dice.randrange(2 * num_hosts), dice.randrange(num_bundles - FIRST_STEP)
            keys = [key_of(host, first + number) for number in range(FIRST_STEP)]
            began = time.perf_counter()
            found = await index.holders(keys)
            took.append(time.perf_counter() - began)
            assert found == [frozenset([FIRST_LIFE + host] if host < num_hosts else [])] * FIRST_STEP

    await asyncio.gather(*(one_after_another() for _ in range(num_at_once)))
    return took


async def measure(server: Server, num_hosts: int, num_bundles: int) -> None:
    """Print what one more host's writes and looks cost."""
    index = open_index(parse_address(f"redis://127.0.0.1:{server.port}"), DirectoryAccess())
    await look(index, num_hosts, num_bundles, 1)  # connections
    meter = Meter(server)
    await write(index, 2 * num_hosts)
    used = {name: value / NUM_WRITTEN for name, value in meter.since().items()}
    print(
        f"a bundle stored: {used['commands']:.2f} requests in batches of {STEP_KEYS}, "
        f"{used['received']:.0f} bytes, {used['own_s'] * 1e6:.1f} us of the host's processor, "
        f"{used['redis_s'] * 1e6:.1f} us of Redis'"
    )
    refreshed = num_hosts * num_bundles / REFRESH_S
    print(
        f"all hosts write all anew every {REFRESH_S / 60:.0f} min: {refreshed:,.0f} bundles/s, "
        f"{refreshed * used['received'] / 1e6:.2f} MB/s, {refreshed * used['redis_s']:.1%} of a core of Redis"
    )
    for num_at_once in (1, 16):
        meter = Meter(server)
        took = sorted(await look(index, num_hosts, num_bundles, num_at_once))
        used = meter.since()
        print(
            f"looks of {FIRST_STEP} bundles, {num_at_once} at a time: {len(took) / used['seconds']:,.0f}/s, "
            f"p50 {statistics.median(took) * 1e3:.2f} ms, p99 {percentile(took, 0.99) * 1e3:.2f} ms, "
            f"{used['redis_s'] / len(took) * 1e6:.0f} us of Redis' processor, "
            f"{used['own_s'] / len(took) * 1e6:.0f} us of the host's"
        )
    await index.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--bundles", type=int, default=100_000, help="of each host")
    arguments = parser.parse_args()
    if REDIS is None:
        print("not run: needs Debian's redis-server (make test-directories)")
        return
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder, redis_server(Path(folder)) as server:
        empty_bytes = int(server.info("memory")["used_memory"])
        meter = Meter(server)
        seconds = fill(server, arguments.hosts, arguments.bundles)
        used, memory = meter.since(), server.info("memory")
        num = arguments.hosts * arguments.bundles
        used_bytes, version = int(memory["used_memory"]), server.info("server")["redis_version"]
        print_machine({"redis": version})
        print(
            f"{num:,} bundles in {seconds:.0f} s, {used['redis_s'] / num * 1e6:.1f} us of Redis' processor "
            f"each; {used_bytes / 1e9:.2f} GB, {(used_bytes - empty_bytes) / num:.0f} bytes a bundle, "
            f"{int(memory['used_memory_rss']) / 1e9:.2f} GB resident"
        )
        asyncio.run(measure(server, arguments.hosts, arguments.bundles))
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
