"""`python -m bench.encryption [--block KIB] [--total MIB] [--rounds N]`: what encryption at rest costs.

The same records through two cold stores in one directory, plain and encrypted, taking turns; one thread, so
that what is counted is a core. Two figures each: GiB per second of processor time (`core`), which is what
encryption takes away from the runtime beside it, and GiB per second of the clock (`wall`), which is what a
load waits for and mostly the disk's. Medians over the rounds; what was read is compared with what was
written.

AES-GCM and xxh3 alone are measured beside them, on buffers larger than the caches, because that is the bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from bench.cold import GIB, KIB, MIB, aligned, make_label, reclaim
from bench.machine import print_machine
from bench.table import render
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity
from kvtier.tiers.cold.engine import ColdStore
from kvtier.tiers.cold.log import SegmentLog
from kvtier.tiers.encryption.envelope import Envelopes
from kvtier.tiers.encryption.keyring import Keyring
from kvtier.tiers.encryption.master_keys import MasterKeys

SEGMENT_BYTES = 64 * MIB
BATCH_BYTES = 4 * MIB
NAMESPACE = NamespaceIdentity(b"encryption " * 3, Geometry(32, 8, 128, 16, "bfloat16"), domain="tenant:bench")


class EncryptionSpeed(NamedTuple):
    """GiB a second: of processor time, and of the clock."""

    core: float
    wall: float


def speed_of(work: Callable[[], None], num_bytes: int) -> EncryptionSpeed:
    """Run `work` in this thread, which moves `num_bytes`."""
    core, wall = time.thread_time(), time.perf_counter()
    work()
    return EncryptionSpeed(
        num_bytes / GIB / (time.thread_time() - core), num_bytes / GIB / (time.perf_counter() - wall)
    )


class EncryptedStore:
    """One store, and the fragments that go into it and come out of it."""

    def __init__(
        self, directory: Path, master_keys: MasterKeys | None, payloads: Sequence[memoryview]
    ) -> None:
        num_bytes = sum(map(len, payloads))
        num_segments = 3 + 2 * num_bytes // SEGMENT_BYTES
        self.store = ColdStore.open(directory, SEGMENT_BYTES, num_segments, master_keys=master_keys)
        self.store.recover()
        self.store.store_namespace(NAMESPACE)
        self._room = SegmentLog(num_segments, SEGMENT_BYTES, self.store.footer_bytes)
        self._payloads = payloads
        self._labels = [make_label(number, payload, NAMESPACE) for number, payload in enumerate(payloads)]
        self._targets = [aligned(len(payload)) for payload in payloads[: BATCH_BYTES // len(payloads[0])]]
        self._places: list[int] = []

    def write(self) -> None:
        """Write every fragment, in batches."""
        self._places = []
        for first in self._batches():
            items: list[tuple[int, FragmentLabel, memoryview]] = []
            for label, payload in zip(self._labels[first:], self._payloads[first:], strict=True):
                if len(items) == len(self._targets):
                    break
                place = self._room.reserve(0, len(payload))
                assert place is not None
                items.append((place, label, payload))
            outcomes = self.store.write_batch(items)
            assert all(outcome.cause is None for outcome in outcomes), outcomes
            for place, _, _ in items:
                self._room.settle(place)
                self._places.append(place)

    def read(self) -> None:
        """Read every fragment back into memory that is used again."""
        for first in self._batches():
            places, labels = self._places[first:], self._labels[first:]
            items = [
                (places[n], labels[n], target) for n, target in enumerate(self._targets) if n < len(places)
            ]
            outcomes = self.store.read_batch(items)
            assert all(outcome.cause is None for outcome in outcomes), outcomes
        assert self._targets[0] == self._payloads[first], "what was read is not what was written"

    def forget(self) -> None:
        """Give every place back."""
        reclaim(self.store, self._room, self._places, len(self._payloads[0]))

    def _batches(self) -> range:
        return range(0, len(self._payloads), len(self._targets))


def primitives(payloads: Sequence[memoryview], directory: Path) -> dict[str, EncryptionSpeed]:
    """Measure what encryption and hashing alone do with the same payloads."""
    envelopes, target = Envelopes(Keyring(directory, MasterKeys(os.urandom(32)))), aligned(len(payloads[0]))
    num_bytes = sum(map(len, payloads))

    def seal() -> None:
        for payload in payloads:
            envelopes.seal("tenant:bench", b"", bytes(16), payload, target)

    def hash_all() -> None:
        for payload in payloads:
            xxhash.xxh3_128_digest(payload)

    def copy() -> None:
        for payload in payloads:
            target[:] = payload

    return {
        "AES-256-GCM alone": speed_of(seal, num_bytes),
        "xxh3-128 alone": speed_of(hash_all, num_bytes),
        "memcpy alone": speed_of(copy, num_bytes),
    }


def compare(directory: Path, block: int, total: int, rounds: int) -> None:
    """Measure both stores in turns; print speeds and ratios."""
    noise = np.random.default_rng(1).integers(0, 256, total, np.uint8).data
    payloads = []
    for first in range(0, total - block + 1, block):
        payload = aligned(block)
        payload[:] = noise[first : first + block]
        payloads.append(payload)
    subjects = {}
    for name, master_keys in (("plain", None), ("encrypted", MasterKeys(os.urandom(32)))):
        (directory / name).mkdir()
        subjects[name] = EncryptedStore(directory / name, master_keys, payloads)
    found: dict[tuple[str, str], list[EncryptionSpeed]] = {}
    for number in range(rounds + 1):
        for name, subject in subjects.items():
            for verb, work in (("write", subject.write), ("read", subject.read)):
                speed = speed_of(work, len(payloads) * block)
                if number:  # the first round makes files, keys and caches
                    found.setdefault((verb, name), []).append(speed)
            subject.forget()
    rows = []
    for verb in ("write", "read"):
        medians = {name: _median(found[verb, name]) for name in subjects}
        share = medians["encrypted"].core / medians["plain"].core
        for name, speed in medians.items():
            ratio = f"{share:.2f} of plain's core" if name == "encrypted" else ""
            rows.append([f"{verb}, {name}", f"{speed.core:.2f}", f"{speed.wall:.2f}", ratio])
    (directory / "alone").mkdir()
    for name, speed in primitives(payloads, directory / "alone").items():
        rows.append([name, f"{speed.core:.2f}", f"{speed.wall:.2f}", ""])
    print(render(["", "GiB/s of a core", "GiB/s of the clock", ""], rows))
    for subject in subjects.values():
        subject.store.close()


def _median(speeds: Sequence[EncryptionSpeed]) -> EncryptionSpeed:
    return EncryptionSpeed(
        statistics.median(s.core for s in speeds), statistics.median(s.wall for s in speeds)
    )


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.encryption", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--directory", type=Path, help="on the device to measure; default: the temporary one")
    parser.add_argument("--block", type=int, default=1024, metavar="KIB")
    parser.add_argument("--total", type=int, default=256, metavar="MIB")
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory(dir=chosen.directory, prefix="kvtier-encryption-") as folder:
        compare(Path(folder), chosen.block * KIB, chosen.total * MIB, chosen.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
