"""`python -m bench.cold [--recover [N]]`: the cold store beside fio, and how fast it recovers.

Sequential writes and random reads through ColdStore.write_batch and read_batch, checksums verified, against
fio's synchronous engine with O_DIRECT: same directory, same block size, as many fio jobs as we have
threads. The two take turns, several rounds, because the disk of a shared machine changes its mind from one
second to the next; what counts is the ratio of the medians. Both write into files preallocated and written
once before. Reads are made twice, with a ring of the kernel's and without. fio moves one block per system
call; the store may move neighbours of one batch together, so `--batch` equal to the block size compares call
with call.
"""

from __future__ import annotations

import argparse
import json
import mmap
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import xxhash

from bench.machine import print_machine
from kvtier.clients import Client
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity
from kvtier.tiers.cold.direct_io import DirectIo
from kvtier.tiers.cold.engine import ColdStore
from kvtier.tiers.cold.log import SegmentLog, record_bytes
from kvtier.tiers.cold.segment_files import segment_path
from kvtier.v1.shm import extent_of
from tests.daemon import Daemon

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SEGMENT_BYTES = 256 * MIB
CHAIN, NUM_STARTS = 64, 3
PAUSE_S = 0.3  # as long as fio takes to start: a disk that is rationed saves some up meanwhile
SMALL = NamespaceIdentity(b"benchmark " * 3, Geometry(1, 1, 128, 16, "int8"))  # fragments of one page
NAMESPACE = NamespaceIdentity(b"benchmark " * 3, Geometry(32, 8, 128, 16, "bfloat16"))


@dataclass
class Filled:
    """A store with records in it, and buffers of each thread: `places[i]` holds `labels[i]`."""

    store: ColdStore
    room: SegmentLog
    labels: list[FragmentLabel]
    places: list[int]
    buffers: list[list[memoryview]]


class Speed(NamedTuple):
    """What a measurement gave."""

    gb_s: float
    cpu_s_per_gb: float  # of this process


def aligned(num_bytes: int) -> memoryview:
    """Return fresh page-aligned memory, touched."""
    view = memoryview(mmap.mmap(-1, num_bytes))
    np.frombuffer(view, np.uint8)[:] = 0
    return view


def make_label(number: int, payload: memoryview, namespace: NamespaceIdentity = NAMESPACE) -> FragmentLabel:
    """Return the label of a fragment of the warm tier, with its checksum from the put."""
    prefix = sha256(number.to_bytes(8, "little")).digest()
    checksum = xxhash.xxh3_128_digest(payload)
    return FragmentLabel(namespace.digest, 1, prefix, b"", number, 0, len(payload), checksum)


@contextmanager
def filled(directory: Path, block: int, total: int, batch: int, threads: int) -> Iterator[Filled]:
    """Open a store with room for two fillings of `total` bytes, write every segment once."""
    num_segments = 2 + -(-total // block * record_bytes(block)) // (SEGMENT_BYTES * 15 // 16)
    store = ColdStore.open(directory / "store", SEGMENT_BYTES, num_segments)
    try:
        store.recover()
        store.store_namespace(NAMESPACE)
        room = SegmentLog(num_segments, SEGMENT_BYTES, store.footer_bytes)
        buffers = [[aligned(block) for _ in range(batch)] for _ in range(threads)]
        dice = Random(1)
        for view in (view for own in buffers for view in own):
            np.frombuffer(view, np.uint8)[:] = np.frombuffer(dice.randbytes(block), np.uint8)
        yield Filled(store, room, [], [], buffers)
    finally:
        store.close()
        shutil.rmtree(directory / "store")


def reclaim(store: ColdStore, room: SegmentLog, places: Sequence[int], num_bytes: int) -> None:
    """Seal and free all segments of a store of records of `num_bytes` each."""
    for place in places:
        room.release(place, num_bytes)
    room.close_open_segments()
    for number in room.take_segments_to_seal():
        store.seal(number)
    for number in list(room.sealed_segments()):
        room.begin_reclaim(number)
        store.free(number)
        room.finish_reclaim(number)


def empty(state: Filled) -> None:
    """Release every segment, as reclaiming would."""
    reclaim(state.store, state.room, state.places, len(state.buffers[0][0]))
    state.labels, state.places = [], []


def write_all(state: Filled, total: int) -> Speed:
    """Write `total` bytes with all threads."""
    empty(state)
    own_labels = [[make_label(i, view) for i, view in enumerate(own)] for own in state.buffers]
    batch = len(state.buffers[0])
    block = len(state.buffers[0][0])
    jobs = []
    for job in range(total // block // batch):
        thread = job % len(state.buffers)
        items = []
        for i, view in enumerate(state.buffers[thread]):
            label = replace(own_labels[thread][i], position=job * batch + i)
            place = state.room.reserve(0, block)
            assert place is not None
            items.append((place, label, view))
            state.labels.append(label)
            state.places.append(place)
        jobs.append(items)

    def work(thread: int) -> None:
        for items in jobs[thread :: len(state.buffers)]:
            assert all(outcome.cause is None for outcome in state.store.write_batch(items))

    speed = timed(len(state.buffers), work, len(jobs) * batch * block)
    for place in state.places:
        state.room.settle(place)
    for number in state.room.take_segments_to_seal():
        assert state.store.seal(number)
    return speed


def read_some(state: Filled, total: int, seed: int) -> Speed:
    """Read and verify `total` bytes at random places with all threads."""
    block, batch = len(state.buffers[0][0]), len(state.buffers[0])
    num_batches = max(1, total // block // batch // len(state.buffers))  # of each thread

    def work(thread: int) -> None:
        dice = Random(seed + thread)
        own = state.buffers[thread]
        for _ in range(num_batches):
            chosen = [dice.randrange(len(state.places)) for _ in own]
            items = [(state.places[i], state.labels[i], view) for i, view in zip(chosen, own, strict=True)]
            assert all(outcome.cause is None for outcome in state.store.read_batch(items))

    return timed(len(state.buffers), work, num_batches * batch * len(state.buffers) * block)


@contextmanager
def without_ring(store: ColdStore) -> Iterator[None]:
    """Read one record after the other meanwhile."""
    state = store._state
    state.io, usual = DirectIo(), state.io
    try:
        yield
    finally:
        state.io = usual


def timed(threads: int, work: Callable[[int], None], num_bytes: int) -> Speed:
    """Run `work` in each thread, which moves `num_bytes` in all."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: None, range(threads)))
        time.sleep(PAUSE_S)
        began, used = time.perf_counter(), time.process_time()
        list(pool.map(work, range(threads)))
        seconds, cores_s = time.perf_counter() - began, time.process_time() - used
    return Speed(num_bytes / seconds / 1e9, cores_s / num_bytes * 1e9)


def fio(directory: Path, mode: str, block: int, jobs: int, total: int, seed: int) -> float:
    """Run one fio of `total` bytes in files it keeps between runs; return GB/s."""
    command = [
        *("fio", "--name=cold", f"--directory={directory}", f"--rw={mode}", f"--bs={block}"),
        *("--direct=1", "--ioengine=psync", f"--numjobs={jobs}", f"--size={total // jobs}"),
        *(
            f"--randseed={seed}",
            "--norandommap",
            "--fallocate=posix",
            "--group_reporting",
            "--output-format=json",
        ),
    ]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    job = report["jobs"][0]["read" if "read" in mode else "write"]
    return float(job["io_bytes"] / job["runtime"] / 1e6)


def compare(directory: Path, block: int, threads: int, total: int, rounds: int, batch_bytes: int) -> None:
    """Print one row per direction: medians of the store and of fio, their ratio."""
    has_fio = shutil.which("fio") is not None
    folder = directory / "fio"
    folder.mkdir()
    figures: defaultdict[str, list[float]] = defaultdict(list)
    with filled(directory, block, total, max(1, batch_bytes // block), threads) as state:
        for turn in range(-1, rounds):  # the first turn writes every file once and does not count
            speeds = {"write": write_all(state, total)}
            found: dict[str, float] = {}
            if has_fio:
                found["fio write"] = fio(folder, "write", block, threads, total, turn + 2)
            speeds["read"] = read_some(state, total, turn)
            with without_ring(state.store):
                found["read by preadv"], found["read by preadv cpu"] = read_some(state, total, turn)
            if has_fio:
                found["fio read"] = fio(folder, "randread", block, threads, total, turn + 2)
            if turn >= 0:
                for mode, speed in speeds.items():
                    found[mode], found[f"{mode} cpu"] = speed
                for name, value in found.items():
                    figures[name].append(value)
    shutil.rmtree(folder)
    for mode in ("write", "read"):
        ours = statistics.median(figures[mode])
        text = f"{mode:6}{block // KIB:6} KiB  x{threads:<3}{ours:8.2f} GB/s"
        if has_fio:
            theirs = statistics.median(figures[f"fio {mode}"])
            text += f"   fio{theirs:7.2f} GB/s   ratio {ours / theirs:5.2f}"
        text += f"   {statistics.median(figures[f'{mode} cpu']):.2f} core-s/GB"
        if mode == "read":
            ours, cpu = (statistics.median(figures[f"read by preadv{what}"]) for what in ("", " cpu"))
            text += f"   by preadv {ours:.2f} GB/s, {cpu:.2f}"
        print(text, flush=True)


def recover(directory: Path, num_records: int, *, is_thin: bool) -> None:
    """Build a store of `num_records` records of one page in chains, print how soon one is got again.

    `is_thin`: give the disk back what no start reads, which is all but the footer of segments of which no
    chain will be asked for. The daemon finds that out while it checks records at rest, and drops some.
    """
    per_batch = 512
    memory = aligned(per_batch * 4096)
    np.frombuffer(memory, np.uint8)[:] = np.frombuffer(Random(1).randbytes(len(memory)), np.uint8)
    views = [memory[i * 4096 : (i + 1) * 4096] for i in range(per_batch)]
    checksums = [xxhash.xxh3_128_digest(view) for view in views]
    num_segments = 3 + num_records * 8192 // (SEGMENT_BYTES * 62 // 64)
    firsts = [Random(start).randrange(num_records // CHAIN) * CHAIN for start in range(NUM_STARTS)]
    asked: set[int] = set()  # segments
    store = ColdStore.open(directory / "store", SEGMENT_BYTES, num_segments, "segment")
    store.recover()
    store.store_namespace(SMALL)
    room = SegmentLog(num_segments, SEGMENT_BYTES, store.footer_bytes)
    began = time.perf_counter()
    for first in range(0, num_records, per_batch):
        items = []
        for i in range(min(per_batch, num_records - first)):
            number = first + i
            parent = name_of(number - 1) if number % CHAIN else b""
            label = FragmentLabel(
                SMALL.digest, 1, name_of(number), parent, number % CHAIN, 0, 4096, checksums[i]
            )
            items.append((room.reserve(0, 4096) or 0, label, views[i]))
        assert all(outcome.cause is None for outcome in store.write_batch(items))
        for place, _, _ in items:
            room.settle(place)
        if any(first - CHAIN < asked_for < first + per_batch for asked_for in firsts):
            asked.update(extent_of(place) for place, _, _ in items)
        for number in room.take_segments_to_seal():
            assert store.seal(number)
            if is_thin and number not in asked:
                thin_out(segment_path(directory / "store", number), SEGMENT_BYTES - store.footer_bytes)
    room.close_open_segments()
    for number in room.take_segments_to_seal():
        assert store.seal(number)
    store.close()
    took = time.perf_counter() - began
    print(f"wrote {num_records} records in {took:.1f} s ({took / num_records * 1e6:.1f} us each)", flush=True)
    began = time.perf_counter()
    store = ColdStore.open(directory / "store", SEGMENT_BYTES, num_segments, "segment")
    opened = time.perf_counter() - began
    recovered = store.recover()
    took = time.perf_counter() - began
    store.close()
    assert (recovered.num_records, recovered.reasons) == (num_records, {})
    segments = f"{len(recovered.segments)} segments of {SEGMENT_BYTES // MIB} MiB"
    print(f"recovered {num_records} records of {segments} in {took:.2f} s (open {opened:.2f} s)", flush=True)
    for first in firsts:
        chain = [name_of(number) for number in range(first, first + CHAIN)]
        ready, hit, num_blocks, data = start_daemon(directory, num_segments, chain)
        wanted = [views[number % per_batch] for number in range(first, first + CHAIN)]
        assert data == b"".join(wanted), "wrong bytes"
        print(f"daemon ready with {num_blocks} blocks {ready:.2f} s after it was started (imports included)")
        print(f"first hit, {CHAIN} blocks of any chain, {hit:.2f} s after the start", flush=True)


def thin_out(path: Path, num_bytes: int) -> None:
    """Make the first `num_bytes` of a file unwritten: allocated, as a start wants it, and nothing on disk."""
    for mode in ("--punch-hole", "--keep-size"):
        subprocess.run(["fallocate", mode, "--offset", "0", "--length", str(num_bytes), path], check=True)


def name_of(number: int) -> bytes:
    """Return the prefix hash of a block."""
    return sha256(number.to_bytes(8, "little")).digest()


def start_daemon(directory: Path, num_segments: int, chain: list[bytes]) -> tuple[float, float, int, bytes]:
    """Start a daemon over the store. Return the seconds until it serves and until a chain was got, the blocks
    that it knows, and the bytes."""
    settings = {
        "tiers.dram.capacity": "64MiB",
        "tiers.nvme.path": str(directory / "store"),
        "tiers.nvme.segment": f"{SEGMENT_BYTES // MIB}MiB",
        "tiers.nvme.capacity": f"{num_segments * SEGMENT_BYTES // MIB}MiB",
    }
    began = time.perf_counter()
    with Daemon(directory, settings=settings) as daemon:
        ready = time.perf_counter() - began
        data = bytearray(len(chain) * 4096)
        with Client(daemon.target) as client:
            client.get(client.register(SMALL), chain, data)
            hit = time.perf_counter() - began
        return ready, hit, daemon.status().num_blocks, bytes(data)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cold", description=__doc__)
    parser.add_argument("--directory", type=Path, help="on the device to measure; default: a temporary one")
    parser.add_argument("--recover", type=int, nargs="?", const=1_000_000, metavar="N", help="recovery only")
    parser.add_argument("--thin", action="store_true", help="with --recover: keep on disk only what is read")
    parser.add_argument("--blocks", default="256,2048", help="payload sizes in KiB")
    parser.add_argument("--threads", default="1,4,8", help="how many transfers at a time")
    parser.add_argument("--total", type=int, default=1024, metavar="MIB", help="bytes of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=2048, metavar="KIB", help="bytes handed over in a call")
    args = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="kvtier-cold-") as name:
        directory = Path(name)
        if args.recover:
            recover(directory, args.recover, is_thin=args.thin)
            return 0
        for block in map(int, args.blocks.split(",")):
            for threads in map(int, args.threads.split(",")):
                compare(directory, block * KIB, threads, args.total * MIB, args.rounds, args.batch * KIB)
    return 0


if __name__ == "__main__":
    sys.exit(main())
