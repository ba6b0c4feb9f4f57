"""Damage to a cold store's files: a smaller cache with counted reasons; no exception, no wrong bytes.

And the one thing that is not damage: a format of a later version, which nobody may touch.
"""

import functools
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pytest

from kvtier.tiers.base import Cause
from kvtier.tiers.block import FragmentLabel
from kvtier.tiers.cold.footer import footer_bytes_for
from kvtier.tiers.cold.manifest import PROLOGUE_BYTES, frame, pack_prologue, parse_manifest
from kvtier.tiers.cold.record import HEADER_BYTES
from kvtier.tiers.cold.segment_files import segment_path
from kvtier.v1.shm import PAGE_BYTES
from tests.tiers.cold.store import SEGMENT_BYTES, Cold, flip, labels_of, payload_of
from tests.tiers.cold.store import cold as open_cold

NUM_SEGMENTS = 5
cold = functools.partial(open_cold, num_segments=NUM_SEGMENTS)
FOOTER_AT = SEGMENT_BYTES - footer_bytes_for(SEGMENT_BYTES)
Accepted = dict[int, tuple[FragmentLabel, bytes]]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Accepted]:
    """A closed store: segments 0 and 1 sealed, 2 unsealed, 3 and 4 free; manifest.1 the newer file."""
    directory = tmp_path_factory.mktemp("golden")
    with cold(directory) as opened:
        opened.put(range(6))
        opened.seal()
        opened.put(range(10, 16), namespace=1)
        opened.seal()
        opened.put(range(20, 23))
        accepted = opened.accepted
    return directory, accepted


@pytest.fixture
def store(golden: tuple[Path, Accepted], tmp_path: Path) -> tuple[Path, Accepted]:
    """A copy of the golden store to damage."""
    shutil.copytree(golden[0], tmp_path / "store")
    return tmp_path / "store", dict(golden[1])


def in_segment(accepted: Accepted, *numbers: int) -> set[int]:
    return {place for place in accepted if place >> 32 in numbers}


def reopen(directory: Path, accepted: Accepted, expected: set[int]) -> Cold:
    """Open, expect exactly these places recovered with their labels, all readable, and new puts to work."""
    with cold(directory) as again:
        found = labels_of(again.recovered)
        assert found == {place: accepted[place][0] for place in expected}
        again.accepted = {place: accepted[place] for place in expected}
        again.assert_readable()
        again.put([1000], namespace=2)
        again.assert_readable()
        return again


def test_undamaged(store: tuple[Path, Accepted]) -> None:
    directory, accepted = store
    assert reopen(directory, accepted, set(accepted)).recovered.reasons == {"segment_unsealed": 1}


def test_a_flipped_payload_byte_is_found_when_it_is_read(store: tuple[Path, Accepted]) -> None:
    directory, accepted = store
    place = min(accepted)
    flip(segment_path(directory, 0), PAGE_BYTES + 8999)
    with cold(directory) as again:
        assert again.get(place, accepted[place][0]) is Cause.WRONG_CHECKSUM
        again.accepted = accepted
        again.assert_readable(except_for={place})
        assert again.store.statistics().failures == {Cause.WRONG_CHECKSUM: 2}


def test_a_flipped_header_byte_is_found_when_it_is_read(store: tuple[Path, Accepted]) -> None:
    directory, accepted = store
    place = min(accepted)
    flip(segment_path(directory, 0), HEADER_BYTES // 2)
    with cold(directory) as again:
        assert again.get(place, accepted[place][0]) is Cause.WRONG_IDENTITY
        again.accepted = accepted
        again.assert_readable(except_for={place})


@pytest.mark.parametrize("offset", [0, 30, 60, PAGE_BYTES + 5, PAGE_BYTES + 200])
def test_a_damaged_footer_costs_a_scan_and_nothing_else(
    store: tuple[Path, Accepted], offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    directory, accepted = store
    flip(segment_path(directory, 1), FOOTER_AT + offset)
    again = reopen(directory, accepted, set(accepted))
    assert again.recovered.reasons["footer_damaged"] == 1
    assert "was damaged: {'footer_damaged': 1}" in caplog.text, "the unsealed segment is no damage"
    with cold(directory) as third:
        assert "footer_damaged" not in third.recovered.reasons, "it was written anew"


def test_a_torn_record_of_an_unsealed_segment_is_dropped(store: tuple[Path, Accepted]) -> None:
    directory, accepted = store
    torn = sorted(in_segment(accepted, 2))[1]
    flip(segment_path(directory, 2), (torn & 0xFFFFFFFF) * PAGE_BYTES + PAGE_BYTES + 4000)
    again = reopen(directory, accepted, set(accepted) - {torn})
    assert again.recovered.reasons["record_torn"] == 1


def test_a_damaged_header_of_an_unsealed_segment_loses_its_record(store: tuple[Path, Accepted]) -> None:
    directory, accepted = store
    lost = sorted(in_segment(accepted, 2))[0]
    flip(segment_path(directory, 2), 100)
    again = reopen(directory, accepted, set(accepted) - {lost})
    assert again.recovered.reasons["header_damaged"] == 1


def test_a_truncated_segment_keeps_what_is_left(store: tuple[Path, Accepted]) -> None:
    directory, accepted = store
    third = sorted(in_segment(accepted, 0))[2]
    os.truncate(segment_path(directory, 0), (third & 0xFFFFFFFF) * PAGE_BYTES + 5000)
    left = set(sorted(in_segment(accepted, 0))[:2])
    again = reopen(directory, accepted, left | in_segment(accepted, 1, 2))
    assert again.recovered.reasons["segment_resized"] == 1


def test_a_missing_segment_is_an_empty_one(store: tuple[Path, Accepted]) -> None:
    directory, accepted = store
    segment_path(directory, 0).unlink()
    again = reopen(directory, accepted, in_segment(accepted, 1, 2))
    assert again.recovered.reasons["segment_missing"] == 1


def test_a_renamed_segment_is_missing_there_and_foreign_here(store: tuple[Path, Accepted]) -> None:
    directory, accepted = store
    segment_path(directory, 0).rename(segment_path(directory, 3))
    reopen(directory, accepted, in_segment(accepted, 1, 2))


def test_swapped_segments_answer_nothing(store: tuple[Path, Accepted]) -> None:
    directory, accepted = store
    first, second = segment_path(directory, 0), segment_path(directory, 1)
    first.rename(directory / "aside")
    second.rename(first)
    (directory / "aside").rename(second)
    reopen(directory, accepted, in_segment(accepted, 2))


def test_a_duplicated_segment_answers_once(store: tuple[Path, Accepted]) -> None:
    directory, accepted = store
    shutil.copyfile(segment_path(directory, 0), segment_path(directory, 1))
    reopen(directory, accepted, in_segment(accepted, 0, 2))


@pytest.mark.parametrize("names", [["manifest.0"], ["manifest.1"], ["manifest.0", "manifest.1"]])
@pytest.mark.parametrize("how", ["missing", "empty", "noise"])
def test_without_a_manifest_the_cache_is_older_or_empty(
    store: tuple[Path, Accepted], names: list[str], how: str
) -> None:
    directory, accepted = store
    for name in names:
        if how == "missing":
            (directory / name).unlink(missing_ok=True)
        else:
            (directory / name).write_bytes(random.Random(1).randbytes(0 if how == "empty" else 5000))
    with cold(directory) as again:
        assert again.recovered.reasons["manifest_damaged"] == (0 if how == "missing" else len(names))
        assert again.recovered.reasons["manifest_missing"] == (how == "missing" and "manifest.1" in names)
        assert labels_of(again.recovered).keys() == (set() if "manifest.1" in names else accepted.keys())


def test_a_torn_manifest_forgets_what_it_lost(store: tuple[Path, Accepted]) -> None:
    directory, accepted = store
    path = directory / "manifest.1"
    os.truncate(path, path.stat().st_size - 5)  # inside "segment 2 opened"
    again = reopen(directory, accepted, in_segment(accepted, 0, 1))
    assert again.recovered.reasons["manifest_torn"] == 1


def test_a_lost_namespace_loses_its_records(store: tuple[Path, Accepted]) -> None:
    directory, accepted = store
    path = directory / "manifest.1"
    events = _events(path.read_bytes())
    kept = [event for event in events if b"rank 1" not in event]
    assert len(kept) == len(events) - 1
    path.write_bytes(pack_prologue(1) + b"".join(map(frame, kept)))
    again = reopen(directory, accepted, in_segment(accepted, 0, 2))
    assert again.recovered.reasons["namespace_unknown"] == 6


def _events(data: bytes) -> list[bytes]:
    events, start = [], PROLOGUE_BYTES
    while start < len(data):
        length = struct.unpack_from("<I", data, start)[0]
        events.append(data[start + 8 : start + 8 + length])
        start += 8 + length
    return events


# -------------------------------------------------------------------------------- not ours to touch


def test_a_later_format_is_set_aside_untouched(store: tuple[Path, Accepted]) -> None:
    directory, _ = store
    path = directory / "manifest.1"
    data = bytearray(path.read_bytes())
    data[8] = 2  # version
    struct.pack_into("<I", data, PROLOGUE_BYTES - 4, google_crc32c.value(bytes(data[: PROLOGUE_BYTES - 4])))
    path.write_bytes(data)
    before = {entry.name: entry.read_bytes() for entry in directory.iterdir() if entry.name != "lock"}
    for life in (1, 2):
        with cold(directory) as again:
            assert again.recovered.reasons.get("incompatible_format", 0) == (life == 1)
            assert again.recovered.num_records == life - 1, "it starts cold, then goes on"
            again.put([life])
            again.seal()
        aside = {entry.name: entry.read_bytes() for entry in (directory / "set-aside-1").iterdir()}
        assert aside == before
    assert not (directory / "set-aside-2").exists()


@pytest.mark.parametrize(("num_segments", "left"), [(NUM_SEGMENTS + 3, (0, 1, 2)), (2, (0, 1))])
def test_another_number_of_segments_keeps_what_fits(
    store: tuple[Path, Accepted], num_segments: int, left: tuple[int, ...]
) -> None:
    directory, accepted = store
    with cold(directory, num_segments=num_segments) as again:
        assert labels_of(again.recovered).keys() == in_segment(accepted, *left)
        assert len(list(directory.glob("segment-*"))) == num_segments
        assert again.recovered.reasons["geometry_changed"] == (num_segments == 2)


@pytest.mark.parametrize("segment_bytes", [SEGMENT_BYTES // 2, SEGMENT_BYTES * 2])
def test_another_size_of_segments_starts_cold(store: tuple[Path, Accepted], segment_bytes: int) -> None:
    directory, _ = store
    with cold(directory, segment_bytes=segment_bytes) as again:
        assert again.recovered.num_records == 0
        assert again.recovered.reasons["geometry_changed"] == 3
        again.put(range(5))
        again.assert_readable()
        assert {path.stat().st_size for path in directory.glob("segment-*")} == {segment_bytes}


# ------------------------------------------------------------------------------- the whole directory


def _flip_some(directory: Path, dice: random.Random) -> None:
    path = dice.choice(_files(directory))
    for _ in range(dice.randrange(1, 20)):
        flip(path, dice.randrange(max(1, path.stat().st_size)))


def _flip_metadata(directory: Path, dice: random.Random) -> None:
    path = dice.choice(_segments(directory)[:3])
    flip(path, dice.randrange(62) * PAGE_BYTES + dice.randrange(HEADER_BYTES))
    flip(path, FOOTER_AT + dice.randrange(PAGE_BYTES + 500))


def _truncate(directory: Path, dice: random.Random) -> None:
    path = dice.choice(_files(directory))
    os.truncate(path, dice.randrange(path.stat().st_size + 1))


def _swap(directory: Path, dice: random.Random) -> None:
    first, second = dice.sample(_files(directory), 2)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def _duplicate(directory: Path, dice: random.Random) -> None:
    first, second = dice.sample(_files(directory), 2)
    shutil.copyfile(first, second)


def _remove(directory: Path, dice: random.Random) -> None:
    dice.choice(_files(directory)).unlink()


def _overwrite_pages(directory: Path, dice: random.Random) -> None:
    """A misdirected write: some pages of one segment stand in another, or elsewhere in it."""
    source, target = (dice.choice(_segments(directory)) for _ in range(2))
    with open(source, "rb") as file:
        file.seek(dice.randrange(60) * PAGE_BYTES)
        pages = file.read(dice.randrange(1, 4) * PAGE_BYTES)
    with open(target, "r+b") as file:
        file.seek(dice.randrange(60) * PAGE_BYTES)
        file.write(pages)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.name != "lock" and path.stat().st_size)


def _segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*"))


DAMAGES: list[Callable[[Path, random.Random], None]] = [
    _flip_some,
    _flip_metadata,
    _truncate,
    _swap,
    _duplicate,
    _remove,
    _overwrite_pages,
]


def test_whatever_happens_to_the_directory_only_right_bytes_come_out(
    golden: tuple[Path, Accepted], tmp_path: Path
) -> None:
    num_right = 0
    for seed in range(120):
        dice = random.Random(seed)
        directory = tmp_path / str(seed)
        shutil.copytree(golden[0], directory)
        for _ in range(dice.randrange(1, 4)):
            dice.choice(DAMAGES)(directory, dice)
        with cold(directory) as again:
            found = labels_of(again.recovered)
            for place, label in found.items():
                assert golden[1][place][0] == label, f"seed {seed}"
                data = again.get(place, label)
                assert data == payload_of(label.position, 9000) or isinstance(data, Cause), f"seed {seed}"
                num_right += data == payload_of(label.position, 9000)
            again.put([1000], namespace=2)
            again.assert_readable()
            again.seal()
        shutil.rmtree(directory)
    assert num_right > 120 * 2, "most of it survives most damage"


def test_the_golden_manifest_is_as_these_tests_believe(golden: tuple[Path, Accepted]) -> None:
    state = parse_manifest((golden[0] / "manifest.1").read_bytes())
    assert {number: life.sealed for number, life in state.lives.items()} == {0: True, 1: True, 2: False}
