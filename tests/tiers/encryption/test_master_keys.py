"""Master keys: the file they are in, and the change from one to another with everything still there."""

import json
import os
from pathlib import Path

import pytest

from kvtier.tiers.base import Cause, CopyError
from kvtier.tiers.encryption.keyring import FILE_NAME, Keyring, MasterKeyUse, count_wraps
from kvtier.tiers.encryption.master_keys import (
    MAX_KEYS,
    KeyringError,
    MasterKeys,
    key_id,
    load_master_keys,
    read_master_keys,
)
from tests.tiers.cold.store import cold
from tests.tiers.encryption.encrypted import BLUE, MASTER, RED, put_plain
from tests.tiers.encryption.key_crashes import STEPS, Crash, KeyFileCrash, at_every_step

OLD, NEW, OTHER = MASTER, bytes(range(32, 64)), bytes(range(64, 96))

# ----------------------------------------------------------------------------------------- the file


def key_file(folder: Path, text: str) -> Path:
    path = folder / "master.key"
    path.touch(0o600)
    path.write_text(text)
    return path


def test_a_file_holds_several_keys_the_one_in_force_first(tmp_path: Path) -> None:
    path = key_file(
        tmp_path, f"# of May\n{NEW.hex()}\n\n{OLD.hex().upper()}  # until all nodes have the one of May\n"
    )
    assert read_master_keys(path) == [NEW, OLD]
    assert load_master_keys(path).ids == (key_id(NEW), key_id(OLD))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o610])
def test_a_file_that_others_could_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, MASTER.hex() + "\n")
    path.chmod(mode)
    with pytest.raises(KeyringError, match=r"chmod 600"):
        read_master_keys(path)
    for good in (0o600, 0o400):
        path.chmod(good)
        assert read_master_keys(path) == [MASTER]


@pytest.mark.parametrize(("mode", "is_good"), [(0o440, True), (0o640, True), (0o660, False), (0o444, False)])
def test_the_group_may_read_a_mounted_secret(tmp_path: Path, mode: int, is_good: bool) -> None:
    version = tmp_path / "..2026_11_22"
    version.mkdir()
    key_file(version, MASTER.hex()).chmod(mode)
    (tmp_path / "..data").symlink_to(version.name)
    path = tmp_path / "master.key"
    path.symlink_to("..data/master.key")
    if is_good:
        assert read_master_keys(path) == [MASTER]
    else:
        with pytest.raises(KeyringError, match="defaultMode: 0440"):
            read_master_keys(path)


def test_any_other_link_is_a_file_like_others(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    key_file(tmp_path / "elsewhere", MASTER.hex()).chmod(0o440)
    path = tmp_path / "master.key"
    path.symlink_to("elsewhere/master.key")
    with pytest.raises(KeyringError, match="chmod 600"):
        read_master_keys(path)


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path, MASTER.hex())
    own = os.geteuid()
    if own != 0:
        with pytest.raises(KeyringError, match=f"give it to user {own + 1}"):
            read_master_keys(path, owner_uid=own + 1)
        return
    os.chown(path, 4000, -1)
    with pytest.raises(KeyringError, match="belongs to user 4000; give it to user 0"):
        read_master_keys(path)
    assert read_master_keys(path, owner_uid=4000) == [MASTER]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must hold 64 hex digits"),
        ("# none\n", "must hold 64 hex digits"),
        ("ab" * 31, "line 1 must hold 64 hex digits"),
        (f"{'ab' * 32}\n{'zz' * 32}", "line 2 must hold 64 hex digits"),
        ("ab" * 33, "line 1 must"),
        (f"{'ab' * 32} {'cd' * 32}", "line 1 must"),
        (f"{'ab' * 32}\n\n{'AB' * 32}", "line 3 repeats line 1"),
        ("\n".join(f"{n:064x}" for n in range(MAX_KEYS + 1)), "17 keys; at most 16"),
        ("#" * (1 << 15), "longer than 16384 bytes"),
    ],
)
def test_a_file_of_another_form_is_refused_and_not_quoted(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(KeyringError, match=words) as refused:
        read_master_keys(key_file(tmp_path, text))
    assert "abab" not in str(refused.value).lower()
    with pytest.raises(KeyringError, match="openssl rand"):
        read_master_keys(tmp_path / "missing")


def test_nothing_shows_a_key() -> None:
    masters = MasterKeys(NEW, OLD)
    assert repr(masters) == f"MasterKeys({key_id(NEW)}, {key_id(OLD)})"
    assert key_id(NEW) != key_id(OLD)
    assert key_id(NEW) not in NEW.hex()


# ---------------------------------------------------------------------------------- another master key


def test_a_change_of_master_key_loses_nothing(tmp_path: Path) -> None:
    """While the store runs, for tenants old and new; afterwards the old key is good for nothing."""
    with cold(tmp_path, master_key=OLD) as opened:
        put_plain(opened, RED, 1)
        keyring = opened.store.keyring
        assert keyring.take(MasterKeys(NEW, OLD)) == 1
        assert keyring.take(MasterKeys(NEW, OLD)) == 0, "once is enough"
        assert keyring.master_key_uses() == [
            MasterKeyUse(key_id(NEW), True, 1),
            MasterKeyUse(key_id(OLD), False, 0),
        ]
        assert keyring.wrapped_by("tenant:red") == key_id(NEW)
        put_plain(opened, RED, 2)
        put_plain(opened, BLUE, 3)
        assert count_wraps(tmp_path) == {key_id(NEW): 2}
        assert keyring.take(MasterKeys(NEW)) == 0
        opened.assert_readable()
        accepted = opened.accepted
    with pytest.raises(KeyringError, match="another master key"):
        Keyring(tmp_path, MasterKeys(OLD))
    with cold(tmp_path, master_key=NEW) as again:
        again.accepted.update(accepted)
        again.assert_readable()


def test_a_start_wraps_anew_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with cold(tmp_path, master_key=OLD) as opened:
        put_plain(opened, RED, 1)
        put_plain(opened, BLUE, 2)
        accepted = opened.accepted
    caplog.set_level("INFO")
    with cold(tmp_path, master_key=(NEW, OLD)) as again:
        again.accepted.update(accepted)
        again.assert_readable()
    assert f"2 data keys are now wrapped with master key {key_id(NEW)}" in caplog.text
    assert count_wraps(tmp_path) == {key_id(NEW): 2}


def test_wraps_of_an_older_version_are_opened_and_named(tmp_path: Path) -> None:
    """Before there could be several master keys a wrap did not say which one made it."""
    Keyring(tmp_path, MasterKeys(OLD)).key_for_writing("tenant:red")
    path = tmp_path / FILE_NAME
    content = json.loads(path.read_text())
    del content["keys"]["tenant:red"]["master"]
    path.write_text(json.dumps(content))
    assert count_wraps(tmp_path) == {"": 1}
    keyring = Keyring(tmp_path, MasterKeys(OLD))
    assert keyring.wrapped_by("tenant:red") == ""
    assert keyring.take(MasterKeys(OLD)) == 1
    assert count_wraps(tmp_path) == {key_id(OLD): 1}


def test_a_missing_old_key_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    """At a start and while the store runs."""
    with cold(tmp_path, master_key=OLD) as opened:
        put_plain(opened, RED, 1)
        keyring = opened.store.keyring
        before = (tmp_path / FILE_NAME).read_bytes()
        for refuse in (keyring.take, keyring.check):
            with pytest.raises(
                KeyringError, match=f"another master key, {key_id(OLD)}, and .* holds {key_id(NEW)}"
            ):
                refuse(MasterKeys(NEW))
        assert (tmp_path / FILE_NAME).read_bytes() == before
        put_plain(opened, BLUE, 2)
        assert count_wraps(tmp_path) == {key_id(OLD): 2}, "the keys from before still hold"
        opened.assert_readable()
        accepted = opened.accepted
    with pytest.raises(KeyringError) as refused:
        Keyring(tmp_path, MasterKeys(NEW, OTHER))
    message = str(refused.value)
    for words in (
        key_id(OLD),
        f"holds {key_id(NEW)}, {key_id(OTHER)}",
        "put its line back",
        "tenant:blue, tenant:red",
    ):
        assert words in message
    with cold(tmp_path, master_key=(NEW, OTHER, OLD)) as again:
        again.accepted.update(accepted)
        again.assert_readable()


def test_a_change_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that runs says so; one that starts goes on with what it has."""

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    def refuse(*_: object) -> None:
        raise CopyError(Cause.NO_SPACE)

    with cold(tmp_path, master_key=OLD) as opened:
        put_plain(opened, RED, 1)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(CopyError, match="no_space"):
                opened.store.keyring.take(MasterKeys(NEW, OLD))
        assert opened.store.keyring.master_key_uses() == [MasterKeyUse(key_id(OLD), True, 1)]
        put_plain(opened, BLUE, 2)
        opened.assert_readable()
    with monkeypatch.context() as patched:
        patched.setattr(Keyring, "_replace", refuse)
        with cold(tmp_path, master_key=(NEW, OLD)) as again:
            assert again.recovered.num_records == 2
            assert again.store.keyring.master_key_uses()[1] == MasterKeyUse(key_id(OLD), False, 2)


@at_every_step
def test_a_crash_during_the_change_leaves_a_store_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_after: bool, loss: str
) -> None:
    """With both keys always; with one of them alone by the old key file or by the new one, never by half."""
    with cold(tmp_path, master_key=OLD) as opened:
        put_plain(opened, RED, 1)
        put_plain(opened, BLUE, 2)
        opened.seal()
        crash = KeyFileCrash(tmp_path, number, is_after=is_after)
        with monkeypatch.context() as patched:
            crash.arm(patched)
            if number < len(STEPS):
                with pytest.raises(Crash):
                    opened.store.keyring.take(MasterKeys(NEW, OLD))
            else:
                assert opened.store.keyring.take(MasterKeys(NEW, OLD)) == 2
                assert crash.seen == STEPS
        accepted = opened.accepted
    crash.lose(loss)
    opens = [_opens(tmp_path, key) for key in (OLD, NEW)]
    assert sorted(opens) == [False, True]
    assert opens == [False, True] or number < len(STEPS), "who was told may throw the old key away"
    with cold(tmp_path, master_key=(NEW, OLD)) as again:
        again.accepted.update(accepted)
        again.assert_readable()
    assert [_opens(tmp_path, key) for key in (OLD, NEW)] == [False, True]


def _opens(directory: Path, key: bytes) -> bool:
    try:
        Keyring(directory, MasterKeys(key))
    except KeyringError:
        return False
    return True
