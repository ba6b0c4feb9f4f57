"""What a one-sided get costs beyond the memcpy of its bytes, against a real daemon.

    python -m tests.clients.measure

Prints medians. Memcpy is ctypes.memmove of the same bytes between the same places, in the same run.
"""

import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvtier.clients import Client, Geometry, Limits, NamespaceIdentity, Tier
from kvtier.clients.memory.buffers import address_of, copy_bytes
from kvtier.v1.shm import extent_of, tags_of

from ..daemon import Daemon


def median_s(function: Callable[[], object], num_runs: int) -> float:
    """Median duration of one call, after a tenth as many for warmth."""
    durations = []
    for run in range(num_runs + num_runs // 10):
        start = time.perf_counter()
        function()
        durations.append(time.perf_counter() - start)
        if run < num_runs // 10:
            durations.clear()
    return statistics.median(durations)


def identity(block_bytes: int) -> NamespaceIdentity:
    """An identity whose blocks have `block_bytes` in one fragment."""
    geometry = Geometry(1, 1, block_bytes // 64, 16, "bfloat16")
    assert geometry.block_bytes == block_bytes
    return NamespaceIdentity(hashlib.sha256(b"measure").digest(), geometry)


def names_of(num_blocks: int, salt: int) -> list[bytes]:
    """Prefix hashes of a chain."""
    return [hashlib.sha256(f"{salt}/{block}".encode()).digest() for block in range(num_blocks)]


def measure(client: Client, block_bytes: int, num_blocks: int, num_runs: int) -> str:
    """Put a chain, get it `num_runs` times; return the line of the table."""
    namespace = client.register(identity(block_bytes))
    names = names_of(num_blocks, block_bytes)
    data = np.random.default_rng(block_bytes).integers(0, 256, num_blocks * block_bytes, np.uint8)
    start = time.perf_counter()
    assert client.put(namespace, names, data).complete
    put_s = time.perf_counter() - start
    target = np.zeros_like(data)
    assert client.get(namespace, names, target).num_blocks == num_blocks
    report = client.get(namespace, names, target)
    assert report.num_one_sided == num_blocks
    np.testing.assert_array_equal(target, data)

    link = client._link
    assert link is not None
    reader = link.attachment.reader
    assert reader is not None
    places = reader.find(tags_of(b"".join(names), namespace.id, 1)).ravel().tolist()
    extents = [reader.extents.mapped[extent_of(place)] for place in places]
    sources = [
        e.address + int(e.headers[place & 0xFFFF_FFFF][2]) for e, place in zip(extents, places, strict=True)
    ]
    base = address_of(target)

    def copy() -> None:
        for i, source in enumerate(sources):
            copy_bytes(base + i * block_bytes, source, block_bytes)

    raw_s = median_s(copy, num_runs)
    get_s = median_s(lambda: client.get(namespace, names, target), num_runs)
    shape = f"{num_blocks} x {block_bytes >> 10} KiB"
    rate = num_blocks * block_bytes / get_s / 1e9
    return (
        f"{shape:>14}  memcpy {raw_s * 1e6:8.1f} us  get {get_s * 1e6:8.1f} us  "
        f"over {(get_s - raw_s) * 1e6:6.1f} us  {rate:5.1f} GB/s  put {len(data) / put_s / 1e9:4.2f} GB/s"
    )


def lookup_rate(client: Client, num_blocks: int) -> str:
    """Keys per second that the vectorised probe answers, all found."""
    namespace = client.register(identity(16 << 10))
    names = names_of(num_blocks, 7)
    assert client.put(namespace, names, bytes(num_blocks << 14)).complete
    link = client._link
    assert link is not None
    assert link.attachment.reader is not None
    find = link.attachment.reader.find
    packed = b"".join(names)
    assert (find(tags_of(packed, namespace.id, 1)) >= 0).all()
    took_s = median_s(lambda: find(tags_of(packed, namespace.id, 1)), 200)
    call_s = median_s(lambda: client.lookup(namespace, packed), 50)
    return (
        f"probe of {num_blocks} keys: {took_s * 1e6:.0f} us, {num_blocks / took_s / 1e6:.1f} M keys/s; "
        f"Lookup call {call_s * 1e6:.0f} us"
    )


def main() -> None:
    """Run against a daemon of 1 GiB."""
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(Path(folder))
        daemon.start()
        try:
            with Client(daemon.target, limits=Limits(max_pending_touches=256)) as client:
                for block_bytes, num_blocks, num_runs in (
                    (64 << 10, 1, 5000),
                    (256 << 10, 1, 3000),
                    (2 << 20, 1, 500),
                    (64 << 10, 64, 500),
                ):
                    print(measure(client, block_bytes, num_blocks, num_runs), flush=True)
                print(lookup_rate(client, 4096))
                namespace = client.register(identity(64 << 10))
                with client.acquire(namespace, names_of(1, 64 << 10)) as lease:
                    lease.wait()
                    assert lease.tiers == (Tier.DRAM,)
        finally:
            daemon.close()


if __name__ == "__main__":
    main()
