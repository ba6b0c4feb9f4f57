"""What a block of the workers contains: a function of tenant and name, so that any wrong byte shows.

The oracle shares nothing with the product: it needs neither a log of what was put nor the daemon's word for
it. Two tenants put other bytes under the same names, as no two runtimes would: what crosses between them
shows.
"""

import hashlib
import mmap
import os
import random
from pathlib import Path

import numpy as np

from kvtier.clients import Geometry, NamespaceIdentity

GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=4, head_dim=16, block_tokens=64, dtype="float16", layers_per_group=2
)  # 64 KiB a block, two fragments of 32 KiB; two bundles a chain
IDENTITY = NamespaceIdentity(b"a model under chaos", GEOMETRY)
CHAIN_BLOCKS = 8
NUM_WORDS = CHAIN_BLOCKS * GEOMETRY.block_bytes // 8
NUM_COMMON = 64  # chains below this number are put by both tenants, under the same names
MAX_WORKERS = 256

Words = np.ndarray[tuple[int], np.dtype[np.uint64]]


def names_of(number: int) -> list[bytes]:
    """Return the prefix hashes of the blocks of a chain: 32 bytes each."""
    return [hashlib.sha256(b"%d/%d" % (number, block)).digest() for block in range(CHAIN_BLOCKS)]


def payload_of(tenant: int, number: int) -> Words:
    """Return the bytes of a chain as (NUM_WORDS,) uint64: each word says which tenant, chain and place."""
    return np.arange(NUM_WORDS, dtype=np.uint64) + np.uint64(tenant << 56 | number << 20)


def wrong_words(words: Words, tenant: int, number: int) -> str:
    """Return what is wrong with the first words of a chain as they were read; empty when nothing is."""
    expected = payload_of(tenant, number)[: len(words)]
    places = np.flatnonzero(words != expected)
    if not len(places):
        return ""
    first = int(places[0])
    return (
        f"tenant {tenant}, chain {number}: {len(places)} of {len(words)} words are wrong, the first at "
        f"{first}: {int(words[first]):#018x} instead of {int(expected[first]):#018x}"
    )


class Board:
    """A file in which each worker says which chain it puts just now, so that others ask for exactly that."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.truncate(descriptor, 8 * MAX_WORKERS)
        self._numbers = memoryview(mmap.mmap(descriptor, 8 * MAX_WORKERS)).cast("Q")
        os.close(descriptor)

    def say(self, worker: int, tenant: int, number: int) -> None:
        """Worker number `worker` puts this chain."""
        self._numbers[worker % MAX_WORKERS] = tenant << 56 | number

    def ask(self, tenant: int, dice: random.Random) -> int | None:
        """Return a chain that a worker of this tenant has begun to put, None if there is none."""
        numbers = [n & (1 << 56) - 1 for n in self._numbers if n and n >> 56 == tenant]
        return dice.choice(numbers) if numbers else None
