"""From nvme into hbm: what decoding on the device, and GPUDirect Storage, make of it.

    python -m bench.cold_edge [--device cuda|fake] [--path DIR] [--total MIB] [--json FILE]

First the trial that a daemon makes at start, figure by figure: values like KV, encoded over the link and
decoded and hashed on the device, against decoded by the host's threads and sent raw; a file read straight
into the device against read by the host and sent. Then the edge itself, over records of a real cold store
under DIR, in batches as the mover cuts them, of every codec and both ways of reading. Every slot's checksum
is compared with what was put. On the fake device it shows that it runs; its figures mean nothing.
"""

import argparse
import hashlib
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.machine import print_machine, write_report
from bench.table import render
from kvtier.tiers.base import CopyItem
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity
from kvtier.tiers.codecs.base import Codec, Shape, shape_of
from kvtier.tiers.codecs.exact.exponents import Exponents
from kvtier.tiers.codecs.lossy.profile import Profile, uniform_rules
from kvtier.tiers.codecs.lossy.profiled import Profiled
from kvtier.tiers.codecs.trial import trial_payload
from kvtier.tiers.cold.engine import ColdStore
from kvtier.tiers.cold.log import SegmentLog
from kvtier.tiers.cold.mounts import filesystem_of
from kvtier.tiers.gpu.decode import gds
from kvtier.tiers.gpu.decode.cold_edge import NUM_CHUNKS, ColdCopier
from kvtier.tiers.gpu.decode.cold_trial import ColdTrial, trial_codecs
from kvtier.tiers.gpu.decode.decoding import load_decoding
from kvtier.tiers.gpu.device.contract import Device, DeviceError
from kvtier.tiers.gpu.device.cuda import CudaDevice
from kvtier.tiers.gpu.hbm import HbmEngine
from kvtier.tiers.memory.slots import SlotPool
from kvtier.tiers.payload import checksum
from tests.fakes.gpu.device import FakeDevice

MIB = 1 << 20
EXTENT_BYTES, SEGMENT_BYTES = 64 * MIB, 64 * MIB
NUM_THREADS, BATCH, ROUNDS, WAIT_S = 8, 16, 3, 120.0
GEOMETRY = Geometry(32, 8, 128, 16, "bfloat16", layers_per_group=4)  # Llama-3-8B, 256 KiB a fragment
PROFILE = Profile(b"m" * 32, 32, 8, 128, 2, "bfloat16", uniform_rules(32, 2, 8, "int", 4))
PLAIN = NamespaceIdentity(b"e" * 32, GEOMETRY)
LOSSY = NamespaceIdentity(b"m" * 32, GEOMETRY, profile_digest=PROFILE.digest)
KINDS: dict[str, tuple[NamespaceIdentity, Codec | None]] = {
    "as it is": (PLAIN, None),
    "exponents": (PLAIN, Exponents()),
    "int4": (LOSSY, Profiled(PROFILE)),
}


class ColdEdgeRig:
    """A cold store under `directory`, hbm, and the edge between them."""

    def __init__(self, device: Device, directory: Path, total_bytes: int) -> None:
        num_extents = -(-total_bytes // EXTENT_BYTES)
        num_segments = 3 + len(KINDS) * -(-total_bytes * 5 // (4 * SEGMENT_BYTES))
        self.count = total_bytes // GEOMETRY.fragment_bytes[0]
        self.store = ColdStore.open(directory, SEGMENT_BYTES, num_segments)
        self.store.recover()
        self.log = SegmentLog(num_segments, SEGMENT_BYTES, self.store.footer_bytes)
        self.room = SlotPool(num_extents, EXTENT_BYTES)
        self.engine = HbmEngine(device, self.room)
        self.enqueuer, self.readers = ThreadPoolExecutor(1), ThreadPoolExecutor(NUM_THREADS)
        decoding = load_decoding(device)
        assert decoding is not None, "the kernels do not compile here"
        self.copier = ColdCopier(self.engine, self.store, self.enqueuer, self.readers, decoding)
        self.trial = ColdTrial(self.copier, self.readers)
        for identity in (PLAIN, LOSSY):
            self.store.store_namespace(identity)
        self.store.codecs.adopt({PROFILE.digest: PROFILE})
        self.targets = self.room.reserve_many(0, [GEOMETRY.fragment_bytes[0]], self.count)

    def put(self, kind: str) -> list[CopyItem]:
        """Write `count` records; return the items that bring them into hbm."""
        identity, codec = KINDS[kind]
        shape = shape_of(GEOMETRY, 0)
        payload = trial_payload(Shape(*shape[:5], shape.dtype))
        items = []
        for number, target in enumerate(self.targets):
            label = FragmentLabel(
                namespace_digest=identity.digest,
                namespace_id=1,
                prefix_hash=hashlib.sha256(f"{kind} {number}".encode()).digest(),
                parent_hash=b"",
                position=number,
                group=0,
                raw_length=len(payload),
                checksum=checksum(payload),
                codec_id=codec.codec_id if codec is not None else 0,
                stored_length=codec.stored_bound(shape) if codec is not None else 0,
            )
            place = self.log.reserve(0, label.stored_length or label.raw_length)
            assert place is not None, "the cold store is too small"
            outcome = self.store.write_batch([(place, label, payload)])[0]
            assert outcome.cause is None, outcome
            self.log.settle(place)
            items.append(CopyItem(place, target, label))
        return items

    def load(self, items: list[CopyItem]) -> float:
        """Return the seconds to load all records, the best of ROUNDS. A checksum that is not its record's
        is an error."""
        best_s = float("inf")
        for _ in range(ROUNDS):
            slots, futures = threading.Semaphore(NUM_CHUNKS), []  # as the mover bounds them
            began_at = time.perf_counter()
            for at in range(0, len(items), BATCH):
                slots.acquire()
                futures.append(self.copier.start(items[at : at + BATCH]))
                futures[-1].add_done_callback(partial(_release, slots))
            causes = {outcome.cause for future in futures for outcome in future.result(WAIT_S)}
            best_s = min(best_s, time.perf_counter() - began_at)
            assert causes == {None}, causes
        return best_s

    def close(self) -> None:
        self.engine.close()
        self.enqueuer.shutdown()
        self.readers.shutdown()
        self.store.close()


def _release(slots: threading.Semaphore, _: object) -> None:
    slots.release()


def trials(rig: ColdEdgeRig, directory: Path, is_fake: bool) -> list[list[str]]:
    """Return what the daemon's trial finds, a row each."""
    rows = []
    for codec in trial_codecs():
        trial = rig.trial.of_codec(codec)
        rows.append(_trial_row(f"decode {codec.name}", trial))
    mounts = Path("/proc/self/mountinfo").read_text()
    reasons = gds.why_not(gds.look(), filesystem_of(directory.resolve(), mounts))
    if reasons or is_fake:
        rows.append(["GPUDirect Storage", "", "", "", "; ".join(reasons) or "not on the fake device"])
        return rows
    try:
        rows.append(_trial_row("GPUDirect Storage", rig.trial.of_disk(directory, gds.Reader)))
        rig.copier.direct = gds.Records(rig.store.whereabouts, gds.Reader)
    except (DeviceError, OSError) as problem:
        rows.append(["GPUDirect Storage", "", "", "", str(problem)])
    return rows


def _trial_row(name: str, trial: gds.Trial) -> list[str]:
    gain = trial.bounce_s / trial.direct_s
    verdict = "taken" if trial.is_quicker else "not taken"
    return [name, f"{trial.direct_s * 1e3:.2f}", f"{trial.bounce_s * 1e3:.2f}", f"{gain:.2f}", verdict]


def loads(rig: ColdEdgeRig) -> list[list[str]]:
    """Return what the edge makes, a row for each codec and way of reading."""
    rows = []
    direct, rig.copier.direct = rig.copier.direct, None
    for kind in KINDS:
        items = rig.put(kind)
        raw_bytes = sum(item.label.raw_length for item in items)
        stored_bytes = sum(item.label.stored_length or item.label.raw_length for item in items)
        ways: dict[str, Any] = {"by the host": None} | ({"GPUDirect Storage": direct} if direct else {})
        for way, reads in ways.items():
            rig.copier.direct = reads
            before = dict(rig.copier.counters)
            best_s = rig.load(items)
            by_host = rig.copier.counters["on_host"] - before.get("on_host", 0)
            rates = [f"{num_bytes / best_s / 1e9:.2f}" for num_bytes in (raw_bytes, stored_bytes)]
            rows.append([kind, way, *rates, str(by_host)])
    return rows


def open_device(is_fake: bool) -> Device:
    """Return the first GPU, or what stands for one. Raises DeviceError."""
    if not is_fake:
        return CudaDevice(0)
    from tests.tiers.gpu.host_kernels import on_host

    return FakeDevice(capacity_bytes=2 << 30, is_live=True, compiler=on_host)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cold_edge", description="nvme to hbm")
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--path", type=Path, metavar="DIR", help="where the cold store goes")
    parser.add_argument("--total", type=int, default=2048, metavar="MIB", help="of payload, of each codec")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    is_fake = args.device == "fake"
    try:
        device = open_device(is_fake)
    except DeviceError as problem:
        print(problem, file=sys.stderr)
        return 1
    machine = print_machine(device=f"{device.name} {device.uuid}")
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        rig = ColdEdgeRig(device, Path(folder), args.total * MIB)
        tried = trials(rig, Path(folder), is_fake)
        rig.trial.close()
        moved = loads(rig)
        faults = rig.copier.counters["device_faults"]
        rig.close()
    print(f"fragments: {GEOMETRY.fragment_bytes[0] >> 10} KiB\n")
    print(render(["trial", "straight ms", "by the host ms", "gain", "verdict"], tried))
    print()
    print(render(["records", "read", "payload GB/s", "stored GB/s", "done by the host"], moved))
    write_report(args.json, machine=machine, trials=tried, loads=moved)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
