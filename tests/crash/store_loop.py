"""`python -m tests.crash.store_loop --iterations 200`: kill -9 a process that writes, look at what is left.

The child appends, seals, reclaims and reads with the real ColdStore and SegmentLog until it is killed at a
random moment, recovery included. An oracle outside of the store's directory, one line per event, written
before the write (`try`) and after its acknowledgement (`ok`), says what may be there:

- every record recovered was tried, at that place, and its bytes are the ones tried;
- every acknowledged record is there unless its segment was freed since, for a process that dies loses
  nothing that it has written; sealed ones above all;
- no two records overlap, and books and store audit clean.

With `--encrypted` it also takes another master key every now and then, as an administrator would: a new line
on top of the file, the keys taken, the old line away. The store must open with what the file holds.

It does not test the loss of power: a killed process keeps its page cache and tears no direct write. The
model test in tests/tiers does that.
"""

import argparse
import ctypes
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.tiers.base import Cause
from kvtier.tiers.cold.engine import ColdStore
from kvtier.tiers.cold.log import record_bytes
from kvtier.tiers.encryption.master_keys import KEY_BYTES, MasterKeys, read_master_keys
from kvtier.v1.shm import PAGE_BYTES
from tests.tiers.cold.store import (
    NAMESPACES,
    Cold,
    adopt,
    cold,
    in_slot,
    label_of,
    labels_of,
    payload_of,
    without_checksum,
)

from ..waiting import until

SEGMENT_BYTES = 512 << 10
NUM_SEGMENTS = 6
KEY_FILE = "master.key"
PR_SET_PDEATHSIG = 1
MAX_RECOVERY_S = 0.05  # a store this small is open and recovered after half of that
READY = b"r"
LENGTHS = [100, 4096, 9000, 30_000, 65_536]


# ------------------------------------------------------------------------------------------- child


def child(directory: Path, oracle: Path, first: int, seed: int, says_ready: int) -> None:
    """Work until killed. Fragment numbers go up from `first`; READY goes to a descriptor after recovery."""
    dice = random.Random(seed)
    log = os.open(oracle, os.O_WRONLY | os.O_APPEND)
    key_file = oracle.with_name(KEY_FILE)
    masters = MasterKeys(*read_master_keys(key_file)) if key_file.exists() else None
    store = ColdStore.open(directory, SEGMENT_BYTES, NUM_SEGMENTS, master_keys=masters)
    opened = adopt(store, NUM_SEGMENTS)
    for identity in NAMESPACES:
        store.store_namespace(identity)
    places = {place: label.raw_length for place, label in labels_of(opened.recovered).items()}
    os.write(says_ready, READY)
    number = first
    while True:
        while opened.room.num_free <= 1:
            _reclaim(opened, log, places)
        batch = []
        for _ in range(dice.randrange(1, 9)):
            length = dice.choice(LENGTHS)
            place = opened.room.reserve(0, length)
            if place is None:
                break
            label = label_of(number, length, namespace=number % len(NAMESPACES))
            batch.append((place, label, in_slot(payload_of(number, length), shift=dice.choice([0, 0, 1]))))
            number += 1
        _say(log, [("try", place, label.position, label.raw_length) for place, label, _ in batch])
        outcomes = store.write_batch(batch)
        assert all(outcome.cause is None for outcome in outcomes)
        _say(log, [("ok", place, label.position, label.raw_length) for place, label, _ in batch])
        for place, label, _ in batch:
            opened.room.settle(place)
            places[place] = label.raw_length
        if dice.random() < 0.05:
            opened.room.close_open_segments()
        if masters is not None and dice.random() < 0.3:
            _change_master_key(store, key_file, dice.randbytes(KEY_BYTES), log)
        for segment in opened.room.take_segments_to_seal():
            assert store.seal(segment)
            _say(log, [("sealed", segment, 0, 0)])


def _change_master_key(store: ColdStore, key_file: Path, key: bytes, log: int) -> None:
    """Do what an administrator does, in that order."""
    keys = [key, *read_master_keys(key_file)]
    write_key_file(key_file, keys)
    store.keyring.take(MasterKeys(*keys))
    write_key_file(key_file, keys[:1])
    store.keyring.take(MasterKeys(key))
    _say(log, [("rekeyed", 0, 0, 0)])


def write_key_file(path: Path, keys: list[bytes]) -> None:
    """Exchange the file of master keys."""
    new = path.with_suffix(".new")
    new.touch(0o600)
    new.write_text("".join(f"{key.hex()}\n" for key in keys))
    new.rename(path)


def _reclaim(opened: Cold, log: int, places: dict[int, int]) -> None:
    """Empty the oldest segment."""
    segment = opened.room.sealed_segments()[0]
    opened.room.begin_reclaim(segment)
    _say(log, [("free", segment, 0, 0)])  # from here on its records may be gone
    opened.store.free(segment)
    _say(log, [("freed", segment, 0, 0)])  # and from here on they must be
    for place in [place for place in places if place >> 32 == segment]:
        opened.room.release(place, places.pop(place))
    opened.room.finish_reclaim(segment)


def _say(log: int, events: list[tuple[str, int, int, int]]) -> None:
    os.write(log, "".join(f"{kind} {a} {b} {c}\n" for kind, a, b, c in events).encode())


# ------------------------------------------------------------------------------------------ parent


@dataclass
class Oracle:
    """What the log adds up to: place -> (number, length) of what may be, and what must be there."""

    possible: dict[int, tuple[int, int]] = field(default_factory=dict)
    certain: set[int] = field(default_factory=set)
    sealed: set[int] = field(default_factory=set)  # segments
    num_acknowledged: int = 0
    num_rekeyed: int = 0
    next_number: int = 0

    def apply(self, line: str) -> None:
        kind, *numbers = line.split()
        place, number, length = map(int, numbers)
        if kind == "try":
            self.possible[place] = (number, length)
            self.next_number = max(self.next_number, number + 1)
        elif kind == "ok":
            self.certain.add(place)
            self.num_acknowledged += 1
        elif kind == "sealed":
            self.sealed.add(place)
        elif kind == "rekeyed":
            self.num_rekeyed += 1
        else:
            self.certain = {other for other in self.certain if other >> 32 != place}
            self.sealed.discard(place)
            if kind == "freed":
                self.possible = {p: what for p, what in self.possible.items() if p >> 32 != place}


@dataclass
class Tally:
    """What the loop has seen."""

    num_kills: int = 0
    num_kills_in_recovery: int = 0
    num_verified: int = 0
    num_acknowledged: int = 0
    num_sealed_lost: int = 0
    num_torn: int = 0
    num_rekeyed: int = 0
    num_killed_rekeying: int = 0  # the file held more than one key


def run(
    workdir: Path, iterations: int, seed: int, max_life_s: float = 0.15, *, is_encrypted: bool = False
) -> Tally:
    """Kill and verify `iterations` times in `workdir`. Raises AssertionError, naming the seed, when the
    store kept something wrong or lost what it must not."""
    directory, log = workdir / "store", workdir / "oracle"
    log.touch()
    key_file = workdir / KEY_FILE
    if is_encrypted:
        write_key_file(key_file, [random.Random(seed).randbytes(KEY_BYTES)])
    oracle, tally, read_to = Oracle(), Tally(), 0
    for iteration in range(iterations):
        dice = random.Random(f"{seed}/{iteration}")
        _live_and_die(directory, log, oracle, dice, tally, max_life_s)
        lines = log.read_bytes()
        lines = lines[: lines.rfind(b"\n") + 1]
        os.truncate(log, len(lines))  # the last one may be torn: what it says was not said
        for line in lines[read_to:].decode().splitlines():
            oracle.apply(line)
        read_to = len(lines)
        keys = tuple(read_master_keys(key_file)) if is_encrypted else None
        tally.num_killed_rekeying += keys is not None and len(keys) > 1
        tally.num_rekeyed = oracle.num_rekeyed
        with cold(
            directory, num_segments=NUM_SEGMENTS, segment_bytes=SEGMENT_BYTES, master_key=keys
        ) as again:
            try:
                _verify(again, oracle, tally)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, iteration {iteration}: {error}") from error
        tally.num_acknowledged = oracle.num_acknowledged
    return tally


def _fork_child(directory: Path, log: Path, first: int, seed: int) -> tuple[int, int]:
    """Start a life as a fork of this process, which holds nothing of the store: to import the store anew took
    four fifths of an iteration. Returns its process id, and a pipe that says READY after recovery."""
    ready, says_ready = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            # A loop that is ended itself would leave a child behind that writes for ever.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            child(directory, log, first, seed, says_ready)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(says_ready)
    return pid, ready


def _live_and_die(
    directory: Path, log: Path, oracle: Oracle, dice: random.Random, tally: Tally, max_life_s: float
) -> None:
    """One life, of random length; but nobody dies before the first record was ever acknowledged, however slow
    the disk is."""
    pid, ready = _fork_child(directory, log, oracle.next_number, dice.randrange(1 << 30))
    pause, waits_for_recovery = threading.Event(), dice.random() < 0.9
    try:
        if waits_for_recovery:
            assert os.read(ready, 1) == READY, "the child died of itself"
            until(lambda: oracle.num_acknowledged or b"\nok " in log.read_bytes(), "nothing was acknowledged")
            pause.wait(dice.random() * max_life_s)
        else:
            pause.wait(dice.random() * MAX_RECOVERY_S)
    finally:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the child died of itself"
    tally.num_kills_in_recovery += not waits_for_recovery and not os.read(ready, 1)
    os.close(ready)
    tally.num_kills += 1


def _verify(again: Cold, oracle: Oracle, tally: Tally) -> None:
    """Compare what was recovered with the oracle, and make the oracle agree with it."""
    found = labels_of(again.recovered)
    end_of = dict.fromkeys(range(NUM_SEGMENTS), 0)
    for place, label in sorted(found.items()):
        assert place in oracle.possible, f"{place:#x} was never tried, or freed"
        number, length = oracle.possible[place]
        expected = label_of(number, length, namespace=number % len(NAMESPACES))
        if again.store.is_encrypted:  # the checksum is, too
            label, expected = without_checksum(label), without_checksum(expected)
        assert label == expected, f"{place:#x} is another fragment"
        data = again.get(place, label)
        assert not isinstance(data, Cause), f"{place:#x} was recovered but cannot be read: {data}"
        assert data == payload_of(number, length), f"{place:#x} has other bytes"
        page = place & 0xFFFF_FFFF
        assert page >= end_of[place >> 32], f"{place:#x} overlaps its neighbour"
        end_of[place >> 32] = page + record_bytes(length) // PAGE_BYTES
    lost = oracle.certain - found.keys()
    tally.num_sealed_lost += len({place for place in lost if place >> 32 in oracle.sealed})
    assert not lost, f"{len(lost)} acknowledged records lost"
    tally.num_verified += len(found)
    tally.num_torn += again.recovered.reasons["record_torn"]
    assert not again.recovered.reasons.keys() - {"segment_unsealed", "record_torn", "manifest_torn"}
    # What was tried and not found is gone for good: its segment has been sealed, or freed, just now.
    oracle.possible = {place: oracle.possible[place] for place in found}
    oracle.certain = set(found)
    oracle.sealed = {segment.number for segment in again.recovered.segments}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.store_loop", description=__doc__)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--encrypted", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-crash-") as name:
        tally = run(Path(name), args.iterations, args.seed, is_encrypted=args.encrypted)
    print(f"seed {args.seed}, {time.monotonic() - began:.0f} s: {tally}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
