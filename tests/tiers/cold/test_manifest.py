"""The manifest: events add up, tails may be torn, and no bytes make it raise more than its two errors."""

import errno
import random
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tiers.base import CopyError
from kvtier.tiers.block import Geometry, NamespaceIdentity
from kvtier.tiers.cold import manifest_file
from kvtier.tiers.cold.direct_io import DirectIo
from kvtier.tiers.cold.manifest import (
    PROLOGUE_BYTES,
    IncompatibleFormat,
    Kind,
    Life,
    ManifestDamaged,
    ManifestState,
    frame,
    namespace_event,
    pack_prologue,
    parse_identity,
    parse_manifest,
    segment_event,
)
from kvtier.tiers.cold.manifest_file import NAMES, Manifest, load_manifest
from tests.tiers.cold.store import NAMESPACES, FaultyIo, failing, flip


def begin(directory: Path, io: DirectIo | None = None) -> Manifest:
    """Own the manifest in `directory`, as a store does."""
    state, _ = load_manifest(directory)
    state = state or ManifestState(1 << 20, 8)
    return Manifest(directory, io or DirectIo(), state)


def load(directory: Path) -> ManifestState:
    state, _ = load_manifest(directory)
    assert state is not None
    return state


text = st.text(max_size=40)
geometries = st.builds(
    Geometry,
    num_layers=st.integers(1, 100),
    num_kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    block_tokens=st.integers(1, 256),
    dtype=st.sampled_from(["float16", "bfloat16", "int8"]),
    layout=text,
    layers_per_group=st.just(0) | st.just(1),
    num_planes=st.integers(1, 2),
)
identities = st.builds(
    NamespaceIdentity,
    model_digest=st.binary(min_size=16, max_size=64),
    geometry=geometries,
    adapter_digest=st.just(b"") | st.binary(min_size=16, max_size=64),
    shard=text,
    domain=text,
)


@given(identities)
@settings(max_examples=100, deadline=None)
def test_an_identity_comes_back_from_its_canonical_bytes(identity: NamespaceIdentity) -> None:
    assert parse_identity(identity.canonical()) == identity


@given(identities, st.data())
@settings(max_examples=200, deadline=None)
def test_a_changed_identity_is_another_one_or_refused(
    identity: NamespaceIdentity, data: st.DataObject
) -> None:
    canonical = bytearray(identity.canonical())
    canonical[data.draw(st.integers(0, len(canonical) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = parse_identity(bytes(canonical))
    except ValueError:
        return
    assert found.canonical() == canonical
    assert found.digest != identity.digest


def test_events_add_up_over_restarts(tmp_path: Path) -> None:
    manifest = begin(tmp_path)
    assert manifest.owner_epoch == 1
    manifest.append(namespace_event(NAMESPACES[0]))
    for number in (3, 1, 2):
        manifest.append(segment_event(Kind.OPENED, number, 100 + number))
    for number in (2, 3, 1):
        manifest.append(segment_event(Kind.SEALED, number, 100 + number))
    manifest.append(segment_event(Kind.FREED, 3, 103))
    manifest.close()
    for life in (2, 3):
        again = begin(tmp_path)
        assert again.owner_epoch == life
        assert list(again.state.namespaces) == [NAMESPACES[0].digest]
        assert list(again.state.lives.items()) == [(2, Life(102, True)), (1, Life(101, True))], (
            "sealing order"
        )
        again.close()


def test_events_of_another_life_change_nothing() -> None:
    state = ManifestState(1 << 20, 8)
    state.apply(segment_event(Kind.OPENED, 1, 5))
    state.apply(segment_event(Kind.SEALED, 1, 4))
    state.apply(segment_event(Kind.FREED, 1, 4))
    state.apply(segment_event(Kind.FREED, 2, 4))
    assert state.lives == {1: Life(5, False)}
    assert state.num_odd_events == 3


def test_a_tail_torn_anywhere_ends_the_log_there(tmp_path: Path) -> None:
    manifest = begin(tmp_path)
    for number in range(6):
        manifest.append(segment_event(Kind.OPENED, number, 1000 + number))
    manifest.close()
    whole = (tmp_path / NAMES[1]).read_bytes()
    counts = []
    for length in range(len(whole) + 1):
        try:
            state = parse_manifest(whole[:length])
        except ManifestDamaged:
            counts.append(-1)
            continue
        assert state.lives == {n: Life(1000 + n, False) for n in range(len(state.lives))}
        counts.append(len(state.lives))
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_every_flipped_byte_loses_at_most_what_follows(tmp_path: Path) -> None:
    manifest = begin(tmp_path)
    for number in range(4):
        manifest.append(segment_event(Kind.OPENED, number, 1000 + number))
    manifest.close()
    whole = bytearray((tmp_path / NAMES[1]).read_bytes())
    for offset in range(len(whole)):
        whole[offset] ^= 0x41
        try:
            state = parse_manifest(bytes(whole))
            assert state.lives == {n: Life(1000 + n, False) for n in range(len(state.lives))}
            assert state.num_lost_bytes > 0
        except ManifestDamaged:
            pass
        whole[offset] ^= 0x41


@given(st.lists(st.binary(min_size=1, max_size=60), max_size=12), st.integers(0, 2**64 - 1))
@settings(max_examples=500, deadline=None)
def test_forged_events_with_right_crcs_raise_nothing_unexpected(bodies: list[bytes], generation: int) -> None:
    data = pack_prologue(generation) + b"".join(map(frame, bodies))
    try:
        state = parse_manifest(data)
    except ManifestDamaged:
        return
    assert parse_manifest(pack_prologue(1) + b"".join(map(frame, state.snapshot()))).lives == state.lives


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_noise_is_damage(noise: bytes) -> None:
    with pytest.raises(ManifestDamaged):
        parse_manifest(noise)


@pytest.mark.parametrize("offset", [8, 16], ids=["version", "incompat"])
def test_a_later_format_is_told_from_damage(offset: int) -> None:
    head = bytearray(pack_prologue(3))
    head[offset] = 9
    with pytest.raises(ManifestDamaged):
        parse_manifest(bytes(head))
    struct.pack_into("<I", head, PROLOGUE_BYTES - 4, google_crc32c.value(bytes(head[: PROLOGUE_BYTES - 4])))
    with pytest.raises(IncompatibleFormat):
        parse_manifest(bytes(head))


DAMAGED_FRAMES = [(0, "manifest_damaged"), (1, "manifest_older_generation")]


@pytest.mark.parametrize(("frame_number", "reason"), DAMAGED_FRAMES)
def test_a_damaged_snapshot_sends_us_to_the_older_file(
    tmp_path: Path, frame_number: int, reason: str
) -> None:
    first = begin(tmp_path)
    first.append(segment_event(Kind.OPENED, 1, 11))
    first.close()
    second = begin(tmp_path)
    second.append(segment_event(Kind.OPENED, 2, 22))
    second.close()
    flip(tmp_path / NAMES[0], PROLOGUE_BYTES + 12 + 21 * frame_number)  # geometry, segment 1
    state, reasons = load_manifest(tmp_path)
    assert state is not None
    assert state.lives == {1: Life(11, False)}
    assert reasons[reason] == 1
    again = begin(tmp_path)
    assert again.state.lives == {1: Life(11, False)}
    again.close()


def test_it_is_rotated_and_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.cold.manifest_file.ROTATE_BYTES", 4096)
    manifest = begin(tmp_path)
    for life in range(1, 2000):
        manifest.append(segment_event(Kind.OPENED, 1, life))
        manifest.append(segment_event(Kind.FREED, 1, life))
    manifest.append(segment_event(Kind.OPENED, 1, 7777))
    manifest.close()
    assert manifest.owner_epoch == 1, "rotating is not owning"
    assert max((tmp_path / name).stat().st_size for name in NAMES) < 5000
    assert load(tmp_path).lives == {1: Life(7777, False)}
    assert begin(tmp_path).owner_epoch > 10


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_after_a_failure_the_next_event_goes_to_a_new_file(tmp_path: Path, kind: str) -> None:
    io = FaultyIo()
    manifest = begin(tmp_path, io)
    manifest.append(segment_event(Kind.OPENED, 1, 11), durable=True)
    io.fault = failing(kind, errno.EIO)
    for _ in range(2):
        with pytest.raises(CopyError):
            manifest.append(segment_event(Kind.FREED, 1, 11), durable=True)
    assert manifest.state.lives == {1: Life(11, False)}, "it counts as not having happened"
    io.fault = lambda kind, number: None
    before = load(tmp_path).generation
    manifest.append(segment_event(Kind.OPENED, 2, 22))
    manifest.close()
    state = load(tmp_path)
    assert state.generation > before
    assert state.lives == {1: Life(11, False), 2: Life(22, False)}


def test_nothing_is_logged_into_a_file_that_a_start_would_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file was complete on the disk, and what followed went into the old one."""
    monkeypatch.setattr(manifest_file, "ROTATE_BYTES", 1)
    manifest = begin(tmp_path)
    manifest.append(segment_event(Kind.OPENED, 0, 10))
    with monkeypatch.context() as patch:
        patch.setattr(manifest_file, "sync_directory", _fail_to_sync)
        with pytest.raises(CopyError):
            manifest.append(segment_event(Kind.OPENED, 1, 11))
    manifest.append(segment_event(Kind.OPENED, 2, 12))
    manifest.close()
    assert load(tmp_path).lives == manifest.state.lives == {0: Life(10, False), 2: Life(12, False)}


def test_a_namespace_is_not_forgotten_while_a_new_file_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was iterated changed, and the append raised."""
    monkeypatch.setattr(manifest_file, "ROTATE_BYTES", 1)
    manifest = begin(tmp_path)
    for identity in NAMESPACES:
        manifest.append(namespace_event(identity))
    forgetting = Thread(target=manifest.forget_namespace, args=(NAMESPACES[-1].digest,))

    def frame_meanwhile(event: bytes) -> bytes:
        if forgetting.ident is None:
            forgetting.start()
            forgetting.join(0.2)  # it waits for the file
        return frame(event)

    monkeypatch.setattr(manifest_file, "frame", frame_meanwhile)
    manifest.append(segment_event(Kind.OPENED, 0, 10))
    forgetting.join()
    manifest.append(segment_event(Kind.OPENED, 1, 11))
    manifest.close()
    assert load(tmp_path).namespaces.keys() == {one.digest for one in NAMESPACES[:-1]}


def _fail_to_sync(directory: Path) -> None:
    raise OSError(errno.EIO, "no flush")


class SlowFlush(DirectIo):
    """The next flush lasts as long as a test wants, once `is_armed`."""

    def __init__(self) -> None:
        self.is_armed, self.began, self.may_end, self.num_syncs = False, Event(), Event(), 0

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.num_syncs += 1
        if self.is_armed:
            self.is_armed = False
            self.began.set()
            assert self.may_end.wait(60.0)


def test_others_are_logged_while_one_is_flushed_and_one_flush_serves_many(tmp_path: Path) -> None:
    io = SlowFlush()
    manifest = begin(tmp_path, io)
    for number in range(3):
        manifest.append(segment_event(Kind.OPENED, number, 10 + number), durable=True)
    io.is_armed, io.num_syncs = True, 0
    with ThreadPoolExecutor(3) as threads:
        events = [segment_event(Kind.FREED, number, 10 + number) for number in range(3)]
        freed = [threads.submit(manifest.append, events[0], durable=True)]
        assert io.began.wait(60.0)
        freed += [threads.submit(manifest.append, event, durable=True) for event in events[1:]]
        while manifest._end < manifest._flushed + 3 * 21:  # all three are written
            pass
        manifest.append(segment_event(Kind.OPENED, 7, 77))
        assert manifest.state.lives.keys() == {0, 1, 2, 7}, "what is not flushed has not happened"
        io.may_end.set()
    assert [one.result() for one in freed] == [None] * 3
    assert io.num_syncs == 2
    manifest.close()
    assert load(tmp_path).lives == manifest.state.lives == {7: Life(77, False)}


@contextmanager
def freeing(
    folder: Path,
) -> Iterator[tuple[Manifest, SlowFlush, ThreadPoolExecutor, "Future[None]"]]:
    """A manifest in which the end of segment 1 is being flushed, for as long as a test wants."""
    io = SlowFlush()
    manifest = begin(folder, io)
    manifest.append(segment_event(Kind.OPENED, 1, 11))
    io.is_armed = True
    with ThreadPoolExecutor(2) as threads:
        freed = threads.submit(manifest.append, segment_event(Kind.FREED, 1, 11), durable=True)
        assert io.began.wait(60.0)
        yield manifest, io, threads, freed


def test_an_event_is_in_the_file_that_was_begun_while_it_was_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with freeing(tmp_path) as (manifest, io, threads, freed):
        monkeypatch.setattr(manifest, "_rotate_at", 0)
        opened = threads.submit(manifest.append, segment_event(Kind.OPENED, 2, 22))
        while not (tmp_path / NAMES[0]).exists():  # the new one has its name, and waits for the flush to end
            pass
        io.may_end.set()
        assert (freed.result(), opened.result()) == (None, None)
    manifest.close()
    assert load(tmp_path).lives == {2: Life(22, False)}


def test_an_event_is_in_the_file_that_could_not_be_begun_while_it_was_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was acknowledged in the old file, and a start reads the new one, that has its name already."""
    with freeing(tmp_path) as (manifest, io, _, freed):
        with monkeypatch.context() as patch:
            patch.setattr(manifest_file, "sync_directory", _fail_to_sync)
            patch.setattr(manifest, "_rotate_at", 0)
            with pytest.raises(CopyError):
                manifest.append(segment_event(Kind.OPENED, 2, 22))
        io.may_end.set()
        assert freed.result() is None
    manifest.close()
    assert load(tmp_path).lives == manifest.state.lives == {}


def test_random_damage_to_both_files_never_raises(tmp_path: Path) -> None:
    for seed in range(60):
        dice = random.Random(seed)
        directory = tmp_path / str(seed)
        directory.mkdir()
        for _ in range(2):
            manifest = begin(directory)
            for number in range(5):
                manifest.append(segment_event(Kind.OPENED, number, dice.getrandbits(60)))
            manifest.close()
        for name in NAMES:
            data = bytearray((directory / name).read_bytes())
            for _ in range(dice.randrange(1, 6)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            (directory / name).write_bytes(data[: dice.randrange(len(data) + 1)])
        state, reasons = load_manifest(directory)
        assert state is not None or reasons, f"seed {seed}"
        begin(directory).close()
