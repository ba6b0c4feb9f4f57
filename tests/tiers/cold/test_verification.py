"""Verification of segments: it finds every flipped byte of a record and nothing else, also without keys."""

import errno
import random
from pathlib import Path

import pytest

from kvtier.tiers.base import Cause, Damaged
from kvtier.tiers.cold.ownership import DirectoryOwned
from kvtier.tiers.cold.record import HEADER_BYTES
from kvtier.tiers.cold.segment_files import segment_path
from kvtier.tiers.cold.verification import verify_store
from kvtier.tiers.encryption.master_keys import MasterKeys
from kvtier.v1.shm import PAGE_BYTES, extent_of, slot_of
from tests.tiers.cold.store import Cold, FaultyIo, cold, failing, flip
from tests.tiers.encryption.encrypted import MASTER, RED, put_plain

LENGTH = 9000


def found_in(opened: Cold) -> dict[int, Cause]:
    """Verify all segments of an open store: what is damaged, by place."""
    verifier = opened.store.verifier
    steps = [step for number in verifier.units() for step in verifier.verify_unit(number)]
    assert all(verifier.is_alive(one) for step in steps for one in step.damaged)
    return {one.place: one.cause for step in steps for one in step.damaged}


def rot(directory: Path, place: int, offset: int) -> None:
    flip(segment_path(directory, extent_of(place)), slot_of(place) * PAGE_BYTES + offset)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_every_flipped_byte_is_found_and_no_other_record(tmp_path: Path, is_encrypted: bool) -> None:
    """In sealed segments and in the one that is being filled; in headers and payloads."""
    dice = random.Random(17)
    with cold(tmp_path, num_segments=8, master_key=MASTER if is_encrypted else None) as opened:
        put_plain(opened, RED, *range(60), length=LENGTH)
        opened.seal()
        put_plain(opened, RED, *range(60, 66), length=LENGTH)
        verifier = opened.store.verifier
        steps = [step for number in verifier.units() for step in verifier.verify_unit(number)]
        assert sum(step.num_fragments for step in steps) == len(opened.accepted) == 66
        assert found_in(opened) == {}
        rotten = {}
        for place in dice.sample(sorted(opened.accepted), 20):
            in_header = dice.random() < 0.3
            offset = dice.randrange(HEADER_BYTES) if in_header else PAGE_BYTES + dice.randrange(LENGTH)
            rot(tmp_path, place, offset)
            rotten[place] = Cause.WRONG_IDENTITY if in_header else Cause.WRONG_CHECKSUM
        assert found_in(opened) == rotten
        for place, (label, _) in opened.accepted.items():
            assert isinstance(opened.get(place, label), Cause) is (place in rotten)


def test_a_sector_that_cannot_be_read_takes_no_neighbours(tmp_path: Path) -> None:
    io = FaultyIo()
    with cold(tmp_path, io=io) as opened:
        opened.put(range(6))
        opened.seal()
        reads = iter(range(1 << 30))

        def fault(kind: str, number: int) -> None:
            if kind == "read" and next(reads) in (2, 4):  # 0, 1: the footer; 2: all records; 4: the second
                raise OSError(errno.EIO, "bad sector")

        io.fault = fault
        assert found_in(opened) == {sorted(opened.accepted)[1]: Cause.IO_ERROR}
        io.fault = lambda kind, number: None


def test_a_damaged_footer_is_found_with_what_is_whole(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        opened.put(range(6))
        opened.seal()
        places = sorted(opened.accepted)
        footer_at = opened.store.data_pages * PAGE_BYTES
        flip(segment_path(tmp_path, 0), footer_at + 20)
        rot(tmp_path, places[2], PAGE_BYTES)
        [step] = opened.store.verifier.verify_unit(0)
        assert step.whole == [*places[:2], *places[3:]]
        assert "segment 0: its footer" in step.problem
        assert [slot_of(one.place) for one in step.damaged] == [opened.store.data_pages]


def test_a_segment_that_is_freed_meanwhile_is_not_judged(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        opened.put(range(6))
        opened.seal()
        place = min(opened.accepted)
        rot(tmp_path, place, PAGE_BYTES)
        verifier = opened.store.verifier
        [(one,)] = [step.damaged for step in verifier.verify_unit(0)]
        steps = verifier.verify_unit(0)
        opened.free(0)
        opened.put(range(10, 12))
        assert not verifier.is_alive(one)
        assert isinstance(one, Damaged)
        assert [step.damaged for step in steps] in ([], [()], [[]])


def test_no_descriptor_is_no_damage(tmp_path: Path) -> None:
    io = FaultyIo()
    with cold(tmp_path, io=io) as opened:
        opened.put(range(3))
        io.fault = failing("open", errno.EMFILE)
        [step] = opened.store.verifier.verify_unit(0)
        assert (step.damaged, step.num_fragments) == ((), 0)
        assert step.problem.startswith("segment 0: its file: ")
        io.fault = lambda kind, number: None


@pytest.mark.parametrize("kind", ["read-only file system", "no memory"])
def test_a_disk_that_takes_no_writes_or_a_read_without_memory_is_no_damage(tmp_path: Path, kind: str) -> None:
    """Every segment was called damaged, and every record that could not be read just then."""
    read_only, no_memory = OSError(errno.EROFS, "read-only"), OSError(errno.ENOMEM, "no memory")

    def fault(asked: str, number: int) -> None:
        if kind == "no memory" and asked == "read":
            raise no_memory
        if kind == "read-only file system" and asked in ("open", "write"):
            raise read_only

    io = FaultyIo()
    with cold(tmp_path, io=io) as opened:
        opened.put(range(3))
        io.fault = fault
        [step] = opened.store.verifier.verify_unit(0)
        assert (step.num_fragments, [*step.damaged], step.problem) == (3, [], "")
        io.fault = lambda kind, number: None


# --------------------------------------------------------------------------------------- of a folder


@pytest.mark.parametrize("keys", ["none", "given", "plain store"])
def test_a_folder_is_verified_without_a_daemon(tmp_path: Path, keys: str) -> None:
    """Over the ciphertext where no key is given. Nothing in it changes."""
    with cold(tmp_path, num_segments=8, master_key=None if keys == "plain store" else MASTER) as opened:
        put_plain(opened, RED, *range(40), length=LENGTH)
        places = sorted(opened.accepted)
        opened.seal()
        put_plain(opened, RED, 40, length=LENGTH)
    masters = MasterKeys(MASTER) if keys == "given" else None
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    reports = list(verify_store(tmp_path, masters))
    assert sum(one.num_records for one in reports) == 41
    assert sum(one.num_encrypted for one in reports) == (0 if keys == "plain store" else 41)
    assert not any(one.damaged for one in reports)
    assert [one.problems for one in reports if one.problems] == [["segment_unsealed: 1"]]
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for place in places[3:9]:
        rot(tmp_path, place, PAGE_BYTES + 77)
    found = [one for report in verify_store(tmp_path, masters) for one in report.damaged]
    assert {(one["segment"], one["page"]) for one in found} == {(p >> 32, slot_of(p)) for p in places[3:9]}
    assert {(one["cause"], one["is_live"]) for one in found} == {("wrong_checksum", True)}


def test_a_record_that_another_one_stands_for_costs_no_block(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        opened.put([1])
        opened.seal()
        old = min(opened.accepted)
        opened.put([1])
        opened.seal()
    rot(tmp_path, old, PAGE_BYTES)
    [found] = [one for report in verify_store(tmp_path) for one in report.damaged]
    assert not found["is_live"]


def test_a_folder_that_a_daemon_owns_is_refused(tmp_path: Path) -> None:
    with cold(tmp_path), pytest.raises(DirectoryOwned, match="ask that daemon, or stop it"):
        list(verify_store(tmp_path))
