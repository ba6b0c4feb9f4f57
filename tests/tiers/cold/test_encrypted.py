"""Encryption at rest: what lies on the device, who can read it, what cannot be forged, nonces."""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvtier.tiers.base import Cause, CopyOutcome
from kvtier.tiers.cold.inspection import inspect_segment
from kvtier.tiers.cold.manifest import IncompatibleFormat
from kvtier.tiers.cold.manifest_file import NAMES, load_manifest
from kvtier.tiers.cold.record import ENCRYPTED, pack_header, unpack_header
from kvtier.tiers.cold.segment_files import segment_path
from kvtier.tiers.encryption.envelope import Envelope, Envelopes
from kvtier.tiers.encryption.keyring import FILE_NAME, Keyring
from kvtier.tiers.encryption.master_keys import MasterKeys
from kvtier.v1.shm import PAGE_BYTES
from tests.contracts.kv_values import values_like_kv
from tests.tiers.cold.store import Cold, cold, flip, in_slot, labels_of
from tests.tiers.encryption.encrypted import (
    BLUE,
    MASTER,
    NAMESPACES,
    PLANTED,
    RED,
    SHAPE,
    forward,
    header_at,
    label_of,
    on_disk,
    payload_of,
    put,
    put_plain,
)


@pytest.mark.parametrize("length", [100, 4096, 8192, 9000, 40_001])
def test_what_is_encrypted_comes_back(tmp_path: Path, length: int) -> None:
    """Shorter than a page, whole pages, with a rest; in slots that are aligned and in ones that are not."""
    payload = payload_of(1, length)
    with cold(tmp_path, master_key=MASTER) as opened:
        (place,) = put_plain(opened, RED, 1, length=length)
        opened.assert_readable()
        label = opened.accepted[place][0]
        for into in (in_slot(bytes(length + PAGE_BYTES)), in_slot(bytes(length), shift=8)):
            outcome = opened.store.read_batch([(place, label, into)])[0]
            assert outcome == CopyOutcome(None, label.checksum)
            assert into[:length] == payload
        blank = replace(label, checksum=b"")
        target = opened.room.reserve(0, length)
        assert target is not None
        changing = in_slot(payload)
        assert opened.store.write_batch([(target, blank, changing)])[0].checksum == label.checksum
        assert changing == payload, "encrypting must leave the slot as it is"
        assert opened.get(target, label) == payload


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_nothing_of_a_payload_is_on_the_device(tmp_path: Path, is_encrypted: bool) -> None:
    """Neither text nor checksum; the control without a key finds both."""
    with cold(tmp_path, master_key=MASTER if is_encrypted else None) as opened:
        put_plain(opened, RED, 1, 2)
        put_plain(opened, BLUE, 3)
        checksum = next(iter(opened.accepted.values()))[0].checksum
        opened.seal()
    found = on_disk(tmp_path)
    assert (PLANTED in found) is not is_encrypted
    assert (checksum in found) is not is_encrypted
    assert MASTER.hex().encode() not in found
    assert MASTER not in found


@pytest.mark.parametrize("codec", ["exponents", "planes"])
def test_encoded_and_encrypted(tmp_path: Path, codec: str) -> None:
    """In one run with what is not encoded; again after a restart, sealed and not."""
    payload = values_like_kv(SHAPE, seed=1).tobytes()
    with cold(tmp_path, master_key=MASTER) as opened:
        encoded = label_of(1, payload, RED, codec)
        put(opened, (encoded, payload), (label_of(2, payload, BLUE), payload))
        opened.seal()
        put(opened, (label_of(3, payload, RED, codec), payload))
        accepted = opened.accepted
    with cold(tmp_path, master_key=MASTER) as again:
        assert again.recovered.reasons == {"segment_unsealed": 1}
        recovered = labels_of(again.recovered, NAMESPACES)
        assert {place: replace(label, checksum=b"") for place, label in recovered.items()} == {
            place: replace(label, checksum=b"") for place, (label, _) in accepted.items()
        }
        for place in accepted:
            into = in_slot(bytes(len(payload)))
            blank = replace(recovered[place], checksum=b"")  # the catalog's word for sixteen zeros
            outcome = again.store.read_batch([(place, blank, into)])[0]
            assert outcome == CopyOutcome(None, xxhash.xxh3_128_digest(payload))
            assert into == payload


def test_another_tenant_s_name_opens_nothing(tmp_path: Path) -> None:
    """A header forged with a right CRC, as whoever can write the device can: the same record under another
    namespace is encrypted with another key and bound to its own name."""
    with cold(tmp_path, master_key=MASTER) as opened:
        (place,) = put_plain(opened, RED, 1)
        put_plain(opened, BLUE, 2)
        label, _ = opened.accepted.pop(place)
        _forge(opened, place, namespace_digest=BLUE.digest)
        assert opened.get(place, replace(label, namespace_digest=BLUE.digest)) is Cause.NO_KEY
        blue_key = opened.store.keyring.key_id("tenant:blue")
        _forge(opened, place, namespace_digest=BLUE.digest, key=blue_key)
        assert opened.get(place, replace(label, namespace_digest=BLUE.digest)) is Cause.NOT_AUTHENTIC


def _forge(opened: Cold, place: int, **changes: Any) -> None:
    path, offset = segment_path(opened.store.directory, place >> 32), (place & 0xFFFF_FFFF) * PAGE_BYTES
    with open(path, "r+b") as file:
        file.seek(offset)
        page = bytearray(file.read(PAGE_BYTES))
        header = unpack_header(page)._replace(**changes)
        pack_header(memoryview(page), header)
        file.seek(offset)
        file.write(page)
        file.flush()
        os.fsync(file.fileno())


def _forge_hash(opened: Cold, place: int) -> None:
    """Make the hash of what is stored right, so that only the tag can notice."""
    path, offset = segment_path(opened.store.directory, place >> 32), (place & 0xFFFF_FFFF) * PAGE_BYTES
    data = path.read_bytes()[offset:]
    header = unpack_header(data[:PAGE_BYTES])
    stored = data[PAGE_BYTES : PAGE_BYTES + header.stored_length]
    _forge(opened, place, stored_hash=xxhash.xxh3_64_intdigest(stored))


@pytest.mark.parametrize("offset", [PAGE_BYTES, PAGE_BYTES + 4095, PAGE_BYTES + 8999])
def test_a_changed_payload_is_a_miss_with_its_cause(tmp_path: Path, offset: int) -> None:
    with cold(tmp_path, master_key=MASTER) as opened:
        (place, other) = put_plain(opened, RED, 1, 2)
        flip(segment_path(tmp_path, place >> 32), (place & 0xFFFF_FFFF) * PAGE_BYTES + offset)
        _forge_hash(opened, place)
        assert opened.get(place, opened.accepted[place][0]) is Cause.NOT_AUTHENTIC
        assert opened.store.statistics().failures == {Cause.NOT_AUTHENTIC: 1}
        opened.assert_readable(except_for={place})
        assert isinstance(opened.get(other, opened.accepted[other][0]), bytes)


@pytest.mark.parametrize("part", ["salt", "counter", "checksum", "tag"])
def test_a_changed_envelope_is_a_miss(tmp_path: Path, part: str) -> None:
    with cold(tmp_path, master_key=MASTER) as opened:
        (place,) = put_plain(opened, RED, 1)
        data = segment_path(tmp_path, place >> 32).read_bytes()[(place & 0xFFFF_FFFF) * PAGE_BYTES :]
        envelope = Envelope.unpack(unpack_header(data[:PAGE_BYTES]).envelope)
        was = getattr(envelope, part)
        changed = was ^ 1 if isinstance(was, int) else bytes([was[0] ^ 1]) + was[1:]
        change: dict[str, Any] = {part: changed}
        _forge(opened, place, envelope=envelope._replace(**change).pack())
        assert opened.get(place, opened.accepted[place][0]) is Cause.NOT_AUTHENTIC


@pytest.mark.parametrize("field", ["position", "group", "prefix_hash"])
def test_a_record_cannot_be_passed_off_for_another(tmp_path: Path, field: str) -> None:
    """Everything in the header is made to fit what is asked for, but the payload was made for another."""
    with cold(tmp_path, master_key=MASTER) as opened:
        (place,) = put_plain(opened, RED, 1)
        label = opened.accepted.pop(place)[0]
        change: dict[str, Any] = {field: b"x" * 32 if field == "prefix_hash" else 7}
        _forge(opened, place, **change)
        assert opened.get(place, replace(label, **change)) is Cause.NOT_AUTHENTIC


def test_plain_records_are_encrypted_when_they_are_copiedforward(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        (place,) = put_plain(opened, RED, 1)
        opened.seal()
        label, payload = opened.accepted[place]
    with cold(tmp_path, master_key=MASTER) as opened:
        target = forward(opened, place, label)
        assert opened.get(target, label) == payload
        assert header_at(opened, target).key == opened.store.keyring.key_id("tenant:red")


@pytest.mark.parametrize("codec", ["identity", "exponents"])
def test_a_record_is_copied_forward_as_it_stands(tmp_path: Path, codec: str) -> None:
    """Same ciphertext, same envelope: nothing was encrypted twice, and nothing had to be decrypted."""
    payload = values_like_kv(SHAPE, seed=1).tobytes()
    with cold(tmp_path, master_key=MASTER) as opened:
        label = label_of(1, payload, RED, codec)
        (place,) = put(opened, (label, payload))
        opened.seal()
        target = forward(opened, place, label)
        before, after = header_at(opened, place), header_at(opened, target)
        assert (after.key, after.envelope, after.stored_hash) == (
            before.key,
            before.envelope,
            before.stored_hash,
        )
        assert (after.segment, after.page) != (before.segment, before.page)
        assert opened.get(target, label) == payload
        opened.store.erase_tenant("tenant:red")
        again = forward(opened, target, label)  # without a key, too; for nobody
        assert opened.get(again, label) is Cause.NO_KEY
        opened.accepted.clear()


# --------------------------------------------------------------------------------------- nonces


@pytest.fixture
def used_nonces(monkeypatch: pytest.MonkeyPatch) -> set[tuple[bytes, bytes]]:
    """Every (record key, nonce) that anything was encrypted with. Encrypting fails at the second use."""
    from cryptography.hazmat.primitives.ciphers import Cipher

    used: set[tuple[bytes, bytes]] = set()
    make = Cipher.encryptor

    def encryptor(cipher):  # type: ignore[no-untyped-def]
        place = (cipher.algorithm.key, cipher.mode.initialization_vector)
        assert place not in used, "a nonce came back under its key"
        used.add(place)
        return make(cipher)

    monkeypatch.setattr(Cipher, "encryptor", encryptor)
    return used


def test_no_nonce_comes_back(tmp_path: Path, used_nonces: set[tuple[bytes, bytes]]) -> None:
    """Crashes, restored directories, lost manifests, records that did not fit and were tried again, copies
    forward: after each of them the counters of the next life begin anew, under other record keys."""
    noise = random.Random(1).randbytes(SHAPE.raw_bytes)
    number, key_file = 0, b""
    for life in range(6):
        with cold(tmp_path, master_key=MASTER, num_segments=16) as opened:
            unfit = label_of(1000 + life, noise, RED, "planes")
            items = [(label_of(n, payload_of(n), RED), payload_of(n)) for n in range(number, number + 3)]
            opened.store.store_namespace(RED)
            batch = []
            for label, payload in [*items[:2], (unfit, noise), items[2]]:
                place = opened.room.reserve(0, label.stored_length or label.raw_length)
                assert place is not None
                batch.append((place, label, in_slot(payload)))
            outcomes = opened.store.write_batch(batch)
            assert [outcome.cause for outcome in outcomes] == [None, None, Cause.DOES_NOT_FIT, None]
            forward(opened, batch[0][0], batch[0][1])
            number += 3
        key_file = key_file or (tmp_path / FILE_NAME).read_bytes()
        if life == 2:  # an older state of everything but the segments
            (tmp_path / FILE_NAME).write_bytes(key_file)
            for name in NAMES:
                (tmp_path / name).unlink(missing_ok=True)
        if life == 4:
            (tmp_path / FILE_NAME).write_bytes(key_file)
    assert len(used_nonces) >= 6 * 4


def test_the_next_life_begins_with_another_salt(tmp_path: Path) -> None:
    salts = set()
    for _ in range(3):
        payload = memoryview(bytearray(10))
        envelopes = Envelopes(Keyring(tmp_path, MasterKeys(MASTER)))
        _, envelope = envelopes.seal("tenant:red", b"identity", bytes(16), payload, payload)
        assert envelope.counter == 0
        salts.add(envelope.salt)
    assert len(salts) == 3


def test_threads_share_one_counter(tmp_path: Path, used_nonces: set[tuple[bytes, bytes]]) -> None:
    envelopes = Envelopes(Keyring(tmp_path, MasterKeys(MASTER)))

    def seal(number: int) -> Envelope:
        payload = memoryview(bytearray(5000))
        return envelopes.seal("tenant:red", b"identity", bytes(16), payload, payload)[1]

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(seal, range(500)))
    assert sorted(envelope.counter for envelope in made) == list(range(500))
    assert len({envelope.salt for envelope in made}) == 1
    assert (
        Envelopes(Keyring(tmp_path, MasterKeys(MASTER)))
        .seal("tenant:red", b"identity", bytes(16), memoryview(bytearray(10)), memoryview(bytearray(10)))[1]
        .salt
        != made[0].salt
    )


# ---------------------------------------------------------------------------- other versions, other rooms


def test_a_directory_with_encrypted_records_is_none_for_an_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cold(tmp_path) as opened:
        put_plain(opened, RED, 1)
    assert load_manifest(tmp_path)[0].features == 0  # type: ignore[union-attr]
    with cold(tmp_path, master_key=MASTER):
        pass
    with cold(tmp_path):  # once used, it stays said
        pass
    assert load_manifest(tmp_path)[0].features == ENCRYPTED  # type: ignore[union-attr]
    monkeypatch.setattr("kvtier.tiers.cold.manifest.INCOMPAT_FEATURES", 0)
    with pytest.raises(IncompatibleFormat, match="0x1"):
        load_manifest(tmp_path)


def test_scrubbing_needs_no_key(tmp_path: Path) -> None:
    """A record that no footer vouches for is believed by the hash of what is stored, or not."""
    with cold(tmp_path, master_key=MASTER) as opened:
        good, bad = put_plain(opened, RED, 1, 2)
        opened.accepted.clear()
    flip(segment_path(tmp_path, bad >> 32), (bad & 0xFFFF_FFFF) * PAGE_BYTES + PAGE_BYTES + 17)
    with cold(tmp_path, master_key=MASTER) as again:
        assert again.recovered.reasons == {"segment_unsealed": 1, "record_torn": 1}
        assert again.recovered.records["place"].tolist() == [good]


def test_inspection_counts_what_is_encrypted_without_a_key(tmp_path: Path) -> None:
    with cold(tmp_path, master_key=MASTER) as opened:
        put_plain(opened, RED, 1, 2)
        opened.seal()
        report = inspect_segment(tmp_path, 0)
        assert (report["num_records"], report["num_encrypted"]) == (2, 2)
        assert json.dumps(report)
