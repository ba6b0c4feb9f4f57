"""Records that are stored encoded: round trips, mixed runs, restarts, damage, records copied forward."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from kvtier.appliance.transfer.forward import ForwardCopier
from kvtier.tiers.base import Buffer, Cause, CopyItem, CopyOutcome
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity
from kvtier.tiers.codecs import registry
from kvtier.tiers.codecs.base import Exactness, Shape, shape_of
from kvtier.tiers.codecs.registry import codec_named
from kvtier.tiers.cold.segment_files import segment_path
from kvtier.v1.shm import PAGE_BYTES
from tests.contracts.kv_values import values_like_kv
from tests.records import rows_of
from tests.tiers.cold.store import Cold, cold, flip, in_slot, labels_of, payload_of

IDENTITY = NamespaceIdentity(b"e" * 32, Geometry(4, 2, 64, 16, "bfloat16"))
SHAPE = shape_of(IDENTITY.geometry, 0)
CODECS = ["exponents", "planes"]


def label_of(number: int, payload: bytes, codec: str) -> FragmentLabel:
    """Return the label of an encoded fragment, or of one as it is."""
    chosen = codec_named(codec)
    return FragmentLabel(
        namespace_digest=IDENTITY.digest,
        namespace_id=1,
        prefix_hash=hashlib.sha256(b"encoded %d" % number).digest(),
        parent_hash=b"",
        position=number,
        group=0,
        raw_length=len(payload),
        checksum=xxhash.xxh3_128_digest(payload),
        codec_id=chosen.codec_id,
        stored_length=chosen.stored_bound(SHAPE) if chosen.codec_id else 0,
    )


def write(opened: Cold, items: list[tuple[FragmentLabel, bytes]]) -> list[Cause | None]:
    """Write a run of records; return why each was not stored."""
    opened.store.store_namespace(IDENTITY)
    batch = []
    for label, payload in items:
        place = opened.room.reserve(0, label.stored_length or label.raw_length)
        assert place is not None
        batch.append((place, label, in_slot(payload)))
    outcomes = opened.store.write_batch(batch)
    for (place, label, view), outcome in zip(batch, outcomes, strict=True):
        opened.room.settle(place)
        if outcome.cause is None:
            assert outcome.checksum == xxhash.xxh3_128_digest(view)
            opened.accepted[place] = (label, bytes(view))
        else:
            opened.room.release(place, label.stored_length or label.raw_length)
    return [outcome.cause for outcome in outcomes]


def like_kv(number: int) -> bytes:
    return values_like_kv(SHAPE, seed=number).tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_an_encoded_record_takes_less_and_comes_back(tmp_path: Path, codec: str) -> None:
    with cold(tmp_path) as opened:
        label = label_of(1, like_kv(1), codec)
        assert write(opened, [(label, like_kv(1))]) == [None]
        assert opened.room.segments[0].live_bytes < label.raw_length
        opened.assert_readable()
        (books,) = opened.store.codecs.statistics()
        assert (books.name, books.num_encoded, books.num_decoded, books.num_unfit) == (codec, 1, 1, 0)


def test_a_run_of_all_kinds(tmp_path: Path) -> None:
    """Encoded, as it is, too noisy to fit, encoded otherwise: neighbours in one system call."""
    noise = payload_of(7, SHAPE.raw_bytes)
    with cold(tmp_path) as opened:
        items = [
            (label_of(1, like_kv(1), "exponents"), like_kv(1)),
            (label_of(2, like_kv(2), "identity"), like_kv(2)),
            (label_of(3, noise, "planes"), noise),
            (label_of(4, like_kv(4), "planes"), like_kv(4)),
        ]
        assert write(opened, items) == [None, None, Cause.DOES_NOT_FIT, None]
        opened.assert_readable()
        assert write(opened, [(label_of(3, noise, "identity"), noise)]) == [None]
        opened.assert_readable()


@pytest.mark.parametrize("is_sealed", [True, False], ids=["footer", "scan"])
def test_encoded_records_survive_a_restart(tmp_path: Path, is_sealed: bool) -> None:
    with cold(tmp_path) as opened:
        items = [
            (label_of(n, like_kv(n), codec), like_kv(n)) for n, codec in enumerate([*CODECS, "identity"])
        ]
        write(opened, items)
        if is_sealed:
            opened.seal()
        accepted = opened.accepted
    with cold(tmp_path) as again:
        records = rows_of(again.recovered)
        found = {(int(r["codec"]), int(r["stored_length"])) for r in records}
        assert found == {(x.codec_id, x.stored_length or x.raw_length) for x, _ in items}
        again.accepted = accepted
        again.assert_readable()


def test_a_codec_of_a_later_version_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cold(tmp_path) as opened:
        write(
            opened,
            [(label_of(n, like_kv(n), c), like_kv(n)) for n, c in enumerate(["exponents", "identity"])],
        )
        opened.seal()
    monkeypatch.setattr("kvtier.tiers.cold.recovery.KNOWN_CODECS", frozenset({0}))
    with cold(tmp_path) as again:
        assert [int(record["codec"]) for record in rows_of(again.recovered)] == [0]


def test_damage_is_found_and_never_raises(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        label = label_of(1, like_kv(1), "exponents")
        write(opened, [(label, like_kv(1))])
        (place,) = opened.accepted
        length = label.stored_length
        for offset in (0, 5, 9, 63, 64, length // 2, length - 1):
            flip(segment_path(tmp_path, 0), PAGE_BYTES + offset)
            assert opened.get(place, label) == Cause.WRONG_CHECKSUM, f"byte {offset}"
            flip(segment_path(tmp_path, 0), PAGE_BYTES + offset)
        opened.assert_readable()


def test_who_asks_for_another_form_gets_nothing(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        label = label_of(1, like_kv(1), "exponents")
        write(opened, [(label, like_kv(1))])
        (place,) = opened.accepted
        assert opened.get(place, replace(label, codec_id=0, stored_length=0)) == Cause.WRONG_IDENTITY
        assert opened.get(place, replace(label, codec_id=2)) == Cause.WRONG_IDENTITY
        assert (
            opened.get(place, replace(label, stored_length=label.stored_length - 1)) == Cause.WRONG_IDENTITY
        )


def test_an_encoded_record_is_copied_forward(tmp_path: Path) -> None:
    with cold(tmp_path) as opened, ThreadPoolExecutor(1) as pool:
        label = label_of(1, like_kv(1), "planes")
        write(opened, [(label, like_kv(1))])
        (place,) = opened.accepted
        opened.seal()
        target = opened.room.reserve(0, label.stored_length)
        assert target is not None
        (outcome,) = ForwardCopier(opened.store, pool).start([CopyItem(place, target, label)]).result()
        opened.room.settle(target)
        assert outcome.cause is None
        assert opened.get(target, label) == like_kv(1)


class Rounded:
    """A lossy codec: keeps the upper byte of each value of two bytes."""

    codec_id = 60_000
    library = ""
    name = "rounded"
    exactness = Exactness(is_exact=False, max_relative=1.0)

    def parameters(self) -> bytes:
        return b""

    def accepts(self, shape: Shape) -> bool:
        return True

    def stored_bound(self, shape: Shape) -> int:
        return shape.raw_bytes // 2

    def encode(self, shape: Shape, payload: Buffer, into: Buffer) -> int:
        into[: shape.raw_bytes // 2] = bytes(payload[1::2])
        return shape.raw_bytes // 2

    def decode(self, shape: Shape, stored: Buffer, into: Buffer) -> None:
        into[:] = bytes(shape.raw_bytes)
        into[1::2] = bytes(stored[: shape.raw_bytes // 2])


def test_what_a_lossy_codec_wrote_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksum is that of what it decodes to; copied forward and after a restart it is the same."""
    monkeypatch.setitem(registry._BY_ID, Rounded.codec_id, Rounded)
    monkeypatch.setattr("kvtier.tiers.cold.recovery.KNOWN_CODECS", frozenset(registry._BY_ID))
    payload = like_kv(1)
    rounded = b"".join(b"\0" + payload[i : i + 1] for i in range(1, len(payload), 2))
    label = replace(
        label_of(1, payload, "planes"), codec_id=Rounded.codec_id, stored_length=len(payload) // 2
    )
    with cold(tmp_path) as opened, ThreadPoolExecutor(1) as pool:
        opened.store.store_namespace(IDENTITY)
        place, target = (opened.room.reserve(0, label.stored_length) for _ in range(2))
        assert place is not None
        assert target is not None
        (outcome,) = opened.store.write_batch([(place, label, in_slot(payload))])
        assert outcome == CopyOutcome(None, xxhash.xxh3_128_digest(rounded))
        (outcome,) = ForwardCopier(opened.store, pool).start([CopyItem(place, target, label)]).result()
        assert outcome == CopyOutcome(None, xxhash.xxh3_128_digest(rounded))
        for where in (place, target):
            opened.room.settle(where)
            assert opened.get(where, label) == rounded
        flip(segment_path(tmp_path, 0), PAGE_BYTES + 100)
        assert opened.get(place, label) == Cause.WRONG_CHECKSUM
    with cold(tmp_path) as again:
        (found,) = labels_of(again.recovered, [IDENTITY]).values()
        assert found.checksum == xxhash.xxh3_128_digest(rounded)


def test_a_namespace_that_was_never_stored_cannot_be_encoded(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        label = replace(label_of(1, like_kv(1), "planes"), namespace_digest=b"?" * 32)
        place = opened.room.reserve(0, label.stored_length)
        assert place is not None
        (outcome,) = opened.store.write_batch([(place, label, in_slot(like_kv(1)))])
        opened.room.settle(place)
        opened.room.release(place, label.stored_length)
        assert outcome.cause is Cause.DOES_NOT_FIT
