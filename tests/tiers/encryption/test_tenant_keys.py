"""Keys of tenants: the key file, the erasing of a tenant and crashes in the middle of it."""

import os
from pathlib import Path

import pytest

from kvtier.tiers.base import Cause, ColdStoreError, CopyError
from kvtier.tiers.encryption.keyring import FILE_NAME, Keyring
from kvtier.tiers.encryption.master_keys import KeyringError, MasterKeys
from tests.tiers.cold.store import cold, in_slot
from tests.tiers.encryption.encrypted import (
    BLUE,
    MASTER,
    RED,
    RED_EU,
    label_of,
    payload_of,
    put_plain,
)
from tests.tiers.encryption.key_crashes import STEPS, Crash, KeyFileCrash, at_every_step

# ------------------------------------------------------------------------------------------ keys


def test_another_key_file_reads_nothing(tmp_path: Path) -> None:
    with cold(tmp_path, master_key=MASTER) as opened:
        put_plain(opened, RED, 1)
        accepted = opened.accepted
    (tmp_path / FILE_NAME).unlink()
    with cold(tmp_path, master_key=MASTER) as again:
        assert not again.recovered.num_records
        assert again.recovered.reasons["key_unknown"] == 1
        for place, (label, _) in accepted.items():
            assert again.get(place, label) is Cause.NO_KEY


def test_without_encryption_encrypted_records_are_misses_and_come_back_with_it(tmp_path: Path) -> None:
    with cold(tmp_path, master_key=MASTER) as opened:
        put_plain(opened, RED, 1)
        opened.seal()
    with cold(tmp_path) as plain:
        assert plain.recovered.reasons == {"key_unknown": 1}
    with cold(tmp_path, master_key=MASTER) as again:
        assert again.recovered.num_records == 1


def test_another_master_key_is_refused_with_the_fix(tmp_path: Path) -> None:
    with cold(tmp_path, master_key=MASTER) as opened:
        put_plain(opened, RED, 1)
    with pytest.raises(ColdStoreError, match="another master key"), cold(tmp_path, master_key=bytes(32)):
        pass
    with cold(tmp_path, master_key=MASTER) as again:  # and the directory was given back untouched
        assert again.recovered.num_records == 1


def test_a_key_moved_to_another_tenant_s_name_is_none(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path, MasterKeys(MASTER))
    keyring.key_for_writing("tenant:red")
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text().replace("tenant:red", "tenant:blue"))
    with pytest.raises(KeyringError, match="is damaged"):
        Keyring(tmp_path, MasterKeys(MASTER))


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"format": "kvtier keys", "version": 2}', "\xff", "[" * 100_000]
)
def test_a_damaged_key_file_is_refused(tmp_path: Path, damage: str) -> None:
    (tmp_path / FILE_NAME).write_bytes(damage.encode("latin-1"))
    with pytest.raises(KeyringError, match=FILE_NAME):
        Keyring(tmp_path, MasterKeys(MASTER))


def test_the_key_file_says_nothing_without_the_master_key(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path, MasterKeys(MASTER))
    keys = [keyring.key_for_writing(tenant) for tenant in ("tenant:red", "tenant:blue")]
    data = (tmp_path / FILE_NAME).read_bytes()
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert all(key.secret.hex().encode() not in data for key in keys)
    assert all(key.secret.hex() not in repr(key) for key in keys)
    assert keys[0].secret != keys[1].secret


# -------------------------------------------------------------------------------------- erasing


def test_an_erased_tenant_is_gone_here_and_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with cold(tmp_path, master_key=MASTER) as opened:
        red = put_plain(opened, RED, 1, 2) + put_plain(opened, RED_EU, 3)
        blue = put_plain(opened, BLUE, 4)
        opened.seal()
        assert opened.store.erase_tenant("tenant:red") is True
        for place in red:
            assert opened.get(place, opened.accepted[place][0]) is Cause.NO_KEY
        assert isinstance(opened.get(blue[0], opened.accepted[blue[0]][0]), bytes)
        late = label_of(9, payload_of(9), RED)
        target = opened.room.reserve(0, late.raw_length)
        assert target is not None
        (refused,) = opened.store.write_batch([(target, late, in_slot(payload_of(9)))])
        assert refused.cause is Cause.NO_KEY, "it may be from before: no key until nothing is on its way"
        opened.room.settle(target)
        opened.store.keyring.admit("tenant:red")
        (new,) = put_plain(opened, RED, 5)  # the tenant goes on, with another key
        assert isinstance(opened.get(new, opened.accepted[new][0]), bytes)
        assert opened.store.erase_tenant("tenant:nobody") is False
    with cold(tmp_path, master_key=MASTER) as again:
        assert again.recovered.reasons == {"tenant_erased": 3, "segment_unsealed": 1}
        assert set(again.recovered.records["place"].tolist()) == {*blue, new}
        live = {segment.number: segment.num_live for segment in again.recovered.segments}
        assert sum(live.values()) == 2, "what the erased records took comes back with their segment"
    assert "segments that were being written: 1, records of erased tenants: 3" in caplog.text
    assert "was damaged" not in caplog.text


def test_what_was_stored_before_there_was_encryption_does_not_come_back_either(tmp_path: Path) -> None:
    """Even when encryption is switched off again: the mark stands in the key file, readable without a key."""
    with cold(tmp_path) as opened:
        put_plain(opened, RED, 1)
        put_plain(opened, BLUE, 2)
        opened.seal()
    with cold(tmp_path, master_key=MASTER) as opened:
        assert opened.recovered.num_records == 2
        opened.store.erase_tenant("tenant:red")
    for master_key in (None, MASTER):
        with cold(tmp_path, master_key=master_key) as again:
            assert again.recovered.reasons == {"tenant_erased": 1}
            assert again.recovered.num_records == 1


@at_every_step
def test_a_crash_while_a_tenant_is_erased_leaves_it_there_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_after: bool, loss: str
) -> None:
    """At every step of replacing the key file, before it and after it. Then another life begins."""
    with cold(tmp_path, master_key=MASTER) as opened:
        red, blue = put_plain(opened, RED, 1), put_plain(opened, BLUE, 2)
        opened.seal()
        crash = KeyFileCrash(tmp_path, number, is_after=is_after)
        with monkeypatch.context() as patched:
            crash.arm(patched)
            if number < len(STEPS):
                with pytest.raises(Crash):
                    opened.store.keyring.erase("tenant:red", 1 << 62)
            else:
                opened.store.keyring.erase("tenant:red", 1 << 62)
                assert crash.seen == STEPS
        accepted = opened.accepted
    before = (tmp_path / FILE_NAME).read_bytes()
    crash.lose(loss)
    is_gone = crash.is_renamed and (tmp_path / FILE_NAME).read_bytes() == before
    assert is_gone or number < len(STEPS), "who was told that it is gone may count on it"
    with cold(tmp_path, master_key=MASTER) as again:
        assert set(again.recovered.records["place"].tolist()) == ({*blue} if is_gone else {*red, *blue})
        for place, (label, payload) in accepted.items():
            expected = Cause.NO_KEY if is_gone and place in red else payload
            assert again.get(place, label) == expected


def test_a_key_file_that_cannot_be_written_erases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cold(tmp_path, master_key=MASTER) as opened:
        put_plain(opened, RED, 1)

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CopyError, match="no_space"):
            opened.store.erase_tenant("tenant:red")
        monkeypatch.undo()
        opened.assert_readable()
