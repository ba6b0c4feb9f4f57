"""Signed profiles: who vouches for one is proven, and a list of keys decides who is believed."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtier.appliance.cli.app import cli
from kvtier.appliance.config import CompressionSettings
from kvtier.appliance.errors import StartError
from kvtier.appliance.profiles import read_profiles, read_profiles_again
from kvtier.tiers.codecs.profile import ProfileError
from kvtier.tiers.codecs.profile_file import read_profile, write_profile
from kvtier.tiers.codecs.profile_signature import (
    is_signed_by,
    new_key,
    read_key,
    read_signature,
    sign_file,
    why_not_trusted,
)
from tests.tiers.test_profiles import PROFILE, with_tables


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Return two private keys."""
    for name in ("ours", "theirs"):
        new_key(tmp_path / f"{name}.pem")
    return tmp_path / "ours.pem", tmp_path / "theirs.pem"


def signed(tmp_path: Path, key: Path) -> Path:
    folder = tmp_path / "profiles"
    folder.mkdir(exist_ok=True)
    write_profile(with_tables(), folder / "a.yaml")
    sign_file(folder / "a.yaml", read_key(key))
    return folder / "a.yaml"


def test_a_signed_profile_is_the_same_profile(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    path = signed(tmp_path, keys[0])
    assert read_profile(path) == with_tables()
    signature = read_signature(path)
    assert signature is not None
    assert is_signed_by(with_tables(), signature)
    before = path.read_text()
    sign_file(path, read_key(keys[0]))
    assert path.read_text() == before  # Ed25519 is deterministic; the former lines are replaced
    again = sign_file(path, read_key(keys[1]))
    assert path.read_text().count("signature:") == 1
    assert again.public_key != signature.public_key


def test_only_trusted_keys_count_and_only_for_this_profile(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    path = signed(tmp_path, keys[0])
    ours, theirs = (frozenset({read_key(key).public_key().public_bytes_raw()}) for key in keys)
    assert why_not_trusted(read_profile(path), path, ours) == ""
    assert why_not_trusted(read_profile(path), path, ours | theirs) == ""
    assert "is not one of compression.trusted_keys" in why_not_trusted(read_profile(path), path, theirs)
    other = path.with_name("b.yaml")
    write_profile(PROFILE, other)
    assert "not signed" in why_not_trusted(PROFILE, other, ours)
    lines = [line for line in path.read_text().splitlines() if line.startswith("sign")]
    other.write_text(other.read_text() + "\n".join(lines) + "\n")  # a good signature, of something else
    assert "of another profile" in why_not_trusted(PROFILE, other, ours)


def test_a_daemon_takes_what_is_signed_and_nothing_else(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    path = signed(tmp_path, keys[0])
    public = read_key(keys[0]).public_key().public_bytes_raw().hex()
    settings = CompressionSettings.model_validate({"profiles": path.parent, "trusted_keys": [public]})
    assert set(read_profiles(settings)) == {with_tables().digest}
    sign_file(path, read_key(keys[1]))
    with pytest.raises(StartError, match=r"which is not one of compression\.trusted_keys"):
        read_profiles(settings)
    before = {PROFILE.digest: PROFILE}
    assert read_profiles_again(settings, before) is before
    assert set(read_profiles(CompressionSettings(profiles=path.parent))) == {with_tables().digest}


@pytest.mark.parametrize("line", ["signature: zz", "signature: 00", "signature: [1]"])
def test_a_damaged_signature_says_so(tmp_path: Path, keys: tuple[Path, Path], line: str) -> None:
    path = signed(tmp_path, keys[0])
    lines = [line if old.startswith("signature:") else old for old in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ProfileError, match="sign it again"):
        read_signature(path)


def test_the_commands(tmp_path: Path) -> None:
    run = CliRunner().invoke
    path, key = tmp_path / "a.yaml", tmp_path / "key.pem"
    write_profile(PROFILE, path)
    made = run(cli, ["profile", "keygen", str(key)])
    assert made.exit_code == 0
    public = made.output.strip()
    assert key.stat().st_mode & 0o777 == 0o600
    assert run(cli, ["profile", "keygen", str(key)]).exit_code == 1
    unsigned = run(cli, ["profile", "verify", str(path)])
    assert unsigned.exit_code == 1
    assert run(cli, ["profile", "sign", str(path), "--key", str(key)]).exit_code == 0
    assert public in run(cli, ["profile", "verify", str(path)]).output
    assert run(cli, ["profile", "verify", str(path), "--key", public]).exit_code == 0
    assert run(cli, ["profile", "verify", str(path), "--key", "00" * 32]).exit_code == 1
    assert run(cli, ["profile", "sign", str(path), "--key", str(path)]).exit_code == 1
    write_profile(replace(PROFILE, sink_tokens=0), tmp_path / "b.yaml")
    signature = [line for line in path.read_text().splitlines() if line.startswith("sign")]
    (tmp_path / "b.yaml").write_text((tmp_path / "b.yaml").read_text() + "\n".join(signature) + "\n")
    assert run(cli, ["profile", "verify", str(tmp_path / "b.yaml")]).exit_code == 1
