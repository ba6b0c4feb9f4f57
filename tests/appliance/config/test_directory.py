"""What may be written for a directory of the fleet, and what is said of the rest."""

from pathlib import Path

import pytest

from kvtier.appliance.config import Settings, SettingsError
from kvtier.sources.directories.addresses import DirectoryAccess, DirectoryError, parse_address
from kvtier.sources.directories.opening import open_directory, open_index

BASE = ("listen=[unix:///tmp/kvtier-test.sock, 127.0.0.1:7070]", "access.insecure=true")


def load(*overrides: str) -> Settings:
    """Read settings."""
    return Settings.load(None, {}, [*BASE, *overrides])


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("etcd://a,b:2380", "etcd://a:2379,b:2380"),
        ("etcds://[fd00::1]", "etcds://[fd00::1]:2379"),
        ("redis://cache", "redis://cache:6379"),
        ("rediss://cache:1/4", "rediss://cache:1/4"),
        ("redis+sentinel://a,b/main/2", "redis+sentinel://a:26379,b:26379/main/2"),
        ("etcds://kv@a#prod", "etcds://kv@a:2379#prod"),
        ("rediss+cluster://a,b:7", "rediss+cluster://a:6379,b:7"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert str(parse_address(url)) == shown
    password = ["peers.directory.credentials=/secret"] if "@" in url else []
    assert load(f"peers.directory.url={url}", *password).peers.is_on


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["directory.url=consul://a"], "write etcd://"),
        (["directory.url=etcd+cluster://a"], "write etcd://"),
        (["directory.url=redis://user:secret@a"], "`password` of `credentials`"),
        (["directory.url=redis://a,b"], "redis+sentinel or redis+cluster"),
        (["directory.url=redis+sentinel://a"], "name the master"),
        (["directory.url=redis://a/one"], "means nothing here"),
        (["directory.url=etcd://a/x"], "means nothing here"),
        (["directory.url=redis://a:0"], "is no host and port"),
        (["directory.url=default:hunter2@a:6379"], "write etcd://"),
        (["directory.url=redis://default:hunter2/1@a:6379"], "is no host and port"),
        (["directory.url=redis://a?ssl=no"], "no '?'"),
        (["directory.url=etcd://u@a"], "file"),
        (["directory.url=redis://u@a"], "file"),
        (["directory.url=etcd://a", "directory.index=true"], "1.2 KB"),
        (["directory.url=redis://a", "directory.index=true", "hosts=[b:1]"], "leave it empty"),
        (["directory.index=true"], "redis://HOST:PORT"),
        (["directory.url=redis://a#a b"], "names without signs"),
    ],
)
def test_what_is_refused_names_the_fix(settings: list[str], words: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(*(f"peers.{one}" for one in settings))
    assert words in str(refused.value)
    assert "user:secret" not in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_password_is_read_for_every_connection(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("one\n")
    access = load("peers.directory.url=redis://a", f"peers.directory.credentials={tmp_path}")
    assert access.peers.directory.access.password() == "one"
    (tmp_path / "password").write_text("two")
    assert access.peers.directory.access.password() == "two"


@pytest.mark.parametrize(
    ("url", "files", "words"),
    [
        ("redis://a", ["ca.crt"], "write rediss://a:6379"),
        ("redis+cluster://a", ["tls.crt", "tls.key"], "write rediss+cluster://a:6379"),
        ("rediss://a", ["tls.key"], "both or neither"),
        ("rediss://kv@a", ["ca.crt"], "no file `password` for kv"),
        ("etcd://a", ["password"], "write USER@"),
    ],
)
def test_credentials_that_would_not_be_used_are_refused(
    tmp_path: Path, url: str, files: list[str], words: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("")
    for opened in (open_directory, open_index):
        with pytest.raises(DirectoryError) as refused:
            opened(parse_address(url), DirectoryAccess(tmp_path))
        assert words in str(refused.value)
