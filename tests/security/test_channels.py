"""What clients and the command line show of themselves, at a daemon that asks for it."""

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import kvtier
from kvtier.appliance.cli.app import cli
from kvtier.appliance.security.tokens import hash_of, make_token, parse
from kvtier.clients import Geometry, NamespaceIdentity
from kvtier.clients.errors import InvalidRequest, KvtierError, PermissionDenied
from kvtier.v1.channels import credentials_for

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from .certificates import Authority, write_server_files

IDENTITY = NamespaceIdentity(b"m" * 16, Geometry(2, 2, 16, 16, "float16"))
NAMES = [bytes([number]) * 32 for number in range(2)]
PAYLOAD = bytes(IDENTITY.geometry.block_bytes)
VARIABLES = ("KVTIER_TLS_CA", "KVTIER_TLS_CERTIFICATE", "KVTIER_TLS_KEY", "KVTIER_TOKEN_FILE")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def version_over(target: str) -> str:
    with kvtier.Client(target, shared_memory=False) as client:
        return client.info.version


def status(target: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["status", "--target", target])
    return result.exit_code, result.output


def test_certificates_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority("ours")
    settings = small_settings(
        tmp_path,
        access={"tls": write_server_files(tmp_path, authority), "admin": ["dns:ops"]},
        tenants={"acme": {"members": ["dns:rt.acme"]}},
    ).model_copy(update={"listen": ["127.0.0.1:0"]})
    with DaemonThread(settings) as served:
        target = served.daemon.grpc.addresses[0]
        with pytest.raises(KvtierError):
            version_over(target)
        monkeypatch.setenv("KVTIER_TLS_CA", str(tmp_path / "client_ca.pem"))
        for name, is_admin in (("dns:rt.acme", False), ("dns:ops", True)):
            pair = authority.sign(name)
            for variable, content in (("CERTIFICATE", pair.certificate), ("KEY", pair.key)):
                (tmp_path / variable).write_bytes(content)
                monkeypatch.setenv(f"KVTIER_TLS_{variable}", str(tmp_path / variable))
            code, output = status(target)
            if is_admin:
                assert code == 0
                with pytest.raises(PermissionDenied, match="NO_TENANT"):
                    version_over(target)
            else:
                assert "NOT_ADMIN" in output
                assert version_over(target) == kvtier.__version__
                assert served.wait(_aio_version(target)) == kvtier.__version__


async def _aio_version(target: str) -> str:
    async with kvtier.AsyncClient(target, shared_memory=False) as client:
        return (await client.info).version


def test_a_token_from_a_file_over_a_unix_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {"ops": make_token(), "ci": make_token()}
    (tmp_path / "tokens").write_text("".join(f"{name} {hash_of(one)}\n" for name, one in tokens.items()))
    for name, token in tokens.items():
        (tmp_path / name).write_text(f"{token}\n")
    access = {"tokens": str(tmp_path / "tokens"), "admin": ["token:ops"]}
    with DaemonThread(small_settings(tmp_path, access=access)) as served:
        target = served.daemon.grpc.addresses[0]
        assert status(target)[0] == 0, "the daemon's own user"
        monkeypatch.setenv("KVTIER_TOKEN_FILE", str(tmp_path / "ci"))
        assert "NOT_ADMIN" in status(target)[1]
        monkeypatch.setenv("KVTIER_TOKEN_FILE", str(tmp_path / "ops"))
        assert status(target)[0] == 0
        assert version_over(target) == kvtier.__version__
        assert served.wait(_aio_version(target)) == kvtier.__version__
        (tmp_path / "ops").write_text("kvt_wrong")
        assert "NOT_AUTHENTICATED" in status(target)[1]
        with pytest.raises(PermissionDenied, match="NOT_AUTHENTICATED"):
            version_over(target)


def test_a_client_stays_the_one_that_it_was_when_it_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A get makes a connection of its own. Before: with what the environment said by then. The daemon refused
    that, and the client opened itself anew, as another tenant: one that stored its blocks there had
    them called stored already (tests/bench/test_timing.py, while puts had such a connection, too)."""
    tokens = {name: make_token() for name in ("mine", "theirs")}
    for name, token in tokens.items():
        (tmp_path / name).write_text(token)
    (tmp_path / "tokens").write_text("".join(f"{name} {hash_of(token)}\n" for name, token in tokens.items()))
    tenants = {name: {"members": [f"token:{name}"]} for name in tokens}
    settings = small_settings(tmp_path, access={"tokens": str(tmp_path / "tokens")}, tenants=tenants)
    with DaemonThread(settings) as served:
        target = served.daemon.grpc.addresses[0]

        async def stored_and_found() -> int:
            async with kvtier.AsyncClient(target, shared_memory=False) as client:
                await client.info
                monkeypatch.setenv("KVTIER_TOKEN_FILE", str(tmp_path / "theirs"))
                namespace = await client.register(IDENTITY)
                await client.put(namespace, NAMES[1:], PAYLOAD)
                return (await client.get(namespace, NAMES[1:])).num_blocks

        monkeypatch.setenv("KVTIER_TOKEN_FILE", str(tmp_path / "mine"))
        with kvtier.Client(target, shared_memory=False) as client:
            namespace = client.register(IDENTITY)
            monkeypatch.setenv("KVTIER_TOKEN_FILE", str(tmp_path / "theirs"))
            client.put(namespace, NAMES[:1], PAYLOAD)
            assert client.get(namespace, NAMES[:1]).num_blocks == 1
        monkeypatch.setenv("KVTIER_TOKEN_FILE", str(tmp_path / "mine"))
        assert served.wait(stored_and_found()) == 1


def test_what_cannot_be_used_is_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("kvt_secret")
    (tmp_path / "wordy").write_text("-----BEGIN CERTIFICATE-----\nMIIB\n")
    there, missing, wordy = (str(tmp_path / name) for name in ("file", "missing", "wordy"))
    for environment, message in (
        ({"KVTIER_TOKEN_FILE": there}, "open to readers"),
        ({"KVTIER_TOKEN_FILE": missing}, "cannot read"),
        ({"KVTIER_TOKEN_FILE": wordy}, "does not hold one token"),
        ({"KVTIER_TLS_CA": missing}, "KVTIER_TLS_CA: cannot read"),
        ({"KVTIER_TLS_CA": there, "KVTIER_TLS_KEY": there}, "belong together"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            credentials_for("localhost:1", environment)
        assert "kvt_secret" not in str(caught.value)
    assert credentials_for("localhost:1", {}) is None
    monkeypatch.setenv("KVTIER_TOKEN_FILE", there)
    with pytest.raises(InvalidRequest, match="BAD_CREDENTIALS"):
        version_over("127.0.0.1:1")
    with pytest.raises(InvalidRequest, match="BAD_CREDENTIALS"):
        asyncio.run(_aio_version("127.0.0.1:1"))
    code, output = status("127.0.0.1:1")
    assert (code, "open to readers" in output) == (1, True)


@pytest.mark.parametrize(("mode", "is_written"), [(0o644, False), (0o640, False), (0o600, True)])
def test_a_token_is_not_put_where_others_can_read(tmp_path: Path, mode: int, is_written: bool) -> None:
    target = tmp_path / "ci.token"
    target.touch()
    target.chmod(mode)
    with target.open("wb") as out:
        command = [sys.executable, "-m", "kvtier.appliance.cli", "tenant", "token", "ci"]
        ran = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60)
    assert target.read_text().startswith("kvt_") == is_written
    assert ran.returncode == (0 if is_written else 1)
    assert is_written or "--out FILE" in ran.stderr
    assert list(parse(ran.stderr)) == ["ci"] * is_written, "stderr may be appended to the daemon's file"


def test_a_token_in_a_file_of_its_own(tmp_path: Path) -> None:
    target = tmp_path / "ci.token"
    before = os.umask(0)  # the mode must not depend on it
    try:
        result = CliRunner().invoke(cli, ["tenant", "token", "ci", "--out", str(target)])
    finally:
        os.umask(before)
    token = target.read_text().strip()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert parse(result.stdout) == {"ci": hash_of(token)}
    assert token not in result.output
    again = CliRunner().invoke(cli, ["tenant", "token", "ci", "--out", str(target)])
    assert (again.exit_code, target.read_text().strip()) == (1, token)
    assert "is there already" in again.stderr
    nowhere = CliRunner().invoke(cli, ["tenant", "token", "ci", "--out", str(tmp_path / "no" / "file")])
    assert "cannot write" in nowhere.stderr


def test_the_command_that_makes_a_token_says_each_part_once() -> None:
    result = CliRunner().invoke(cli, ["tenant", "token", "ci"])
    token = result.stdout.strip()
    assert parse(result.stderr) == {"ci": hash_of(token)}
    assert token not in result.stderr
    assert CliRunner().invoke(cli, ["tenant", "token", "A/B"]).exit_code == 2
