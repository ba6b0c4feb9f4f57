"""Credentials and certificates of stores: where they come from, and that no error shows them."""

import base64
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.hashes import SHA256

from kvtier.sources.objects.problems import StoreError, StoreProblem
from kvtier.sources.objects.store import ObjectStore, StoreLimits

from .clouds import CONTAINER, azurite, no_azurite, service_account, tls_server
from .s3_server import S3Server, s3_server

if importlib.util.find_spec("obstore") is None:
    pytest.skip("no object stores: `pip install obstore`", allow_module_level=True)

PATIENT = StoreLimits(connect_s=60.0, idle_s=120.0, request_s=240.0, num_retries=0, retry_s=240.0)
BYTES = memoryview(b"123")
FILE = "[default]\naws_access_key_id = first\naws_secret_access_key = private\n"


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "SSL_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[S3Server, dict[str, str]]]:
    with tls_server(tmp_path) as running:
        yield running


@pytest.fixture
def from_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[S3Server, Path]]:
    """A bucket, and the file that the environment names for its keys."""
    path = tmp_path / "credentials"
    path.write_text(FILE)
    with s3_server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
        yield server, path


def problem_of(call: Callable[[], object], *secrets: str) -> StoreProblem:
    with pytest.raises(StoreError) as failed:
        call()
    assert not [secret for secret in secrets if secret in str(failed.value)]
    return failed.value.problem


def test_an_authority_of_the_site_is_trusted_where_its_file_is_named(
    secured: tuple[S3Server, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, trust = secured
    for name, value in {**server.environment(), "AWS_ENDPOINT_URL": server.endpoint}.items():
        monkeypatch.setenv(name, value)
    refused = ObjectStore("s3://bucket/p", limits=PATIENT)
    assert problem_of(lambda: refused.create("v1/b/x", BYTES)) is StoreProblem.NOT_TRUSTED
    for name, value in trust.items():
        monkeypatch.setenv(name, value)
    store = ObjectStore("s3://bucket/p", limits=PATIENT)
    assert store.create("v1/b/x", BYTES)
    assert list(server.objects) == ["p/v1/b/x"], "the bucket is in the path, not in the name of the host"
    assert store.expiry("v1/b/x") == "", "asked by a signed address, which trusts the same"


def test_keys_come_from_a_file_that_is_read_again_when_it_changed(from_file: tuple[S3Server, Path]) -> None:
    server, path = from_file
    store = ObjectStore("s3://bucket/p", limits=PATIENT)
    assert store.create("v1/b/x", BYTES)
    assert "Credential=first/" in server.credentials[-1]
    later = path.with_name("later")
    later.write_text(FILE.replace("first", "second-key") + "aws_session_token = for a day\n")
    later.rename(path)

    def is_exchanged() -> bool:  # the client library asks again ten times a second at most
        store.size("v1/b/x")
        return "Credential=second-key/" in server.credentials[-1]

    while not is_exchanged():
        pass
    assert "private" not in repr(store)


def test_a_file_without_keys_is_refused_at_once_and_not_shown(
    from_file: tuple[S3Server, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, path = from_file

    def opened() -> object:
        return ObjectStore("s3://bucket/p")

    monkeypatch.setenv("AWS_PROFILE", "kv")
    assert problem_of(opened, "private") is StoreProblem.NO_CREDENTIALS
    monkeypatch.delenv("AWS_PROFILE")
    for content in ("aws_secret_access_key = private", "[default]\naws_secret_access_key = private"):
        path.write_text(content)
        assert problem_of(opened, "private") is StoreProblem.NO_CREDENTIALS
    path.unlink()
    assert problem_of(opened) is StoreProblem.NO_CREDENTIALS
    assert not server.requests


def test_a_file_that_goes_later_fails_requests_until_it_is_back(from_file: tuple[S3Server, Path]) -> None:
    server, path = from_file
    store = ObjectStore("s3://bucket/p", limits=PATIENT)
    path.write_text("nothing of private use")
    assert problem_of(lambda: store.create("v1/b/x", BYTES), "private") is StoreProblem.NO_CREDENTIALS
    assert not server.requests
    path.write_text(FILE)
    assert store.create("v1/b/x", BYTES)


def test_googles_service_account_proves_itself_out_of_its_file(
    secured: tuple[S3Server, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, trust = secured
    account, public_key = service_account(tmp_path, server.endpoint)
    for name, value in {**trust, "GOOGLE_SERVICE_ACCOUNT": str(account)}.items():
        monkeypatch.setenv(name, value)
    store = ObjectStore("gs://bucket/p", limits=PATIENT)
    assert store.create("v1/b/x", BYTES)
    signed, _, signature = server.credentials[-1].removeprefix("Bearer ").rpartition(".")
    proof = base64.urlsafe_b64decode(signature + "==")
    public_key.verify(proof, signed.encode(), padding.PKCS1v15(), SHA256())
    server.has_bucket = False
    secret = json.loads(account.read_text())["private_key"][40:80]
    into = memoryview(bytearray(3))
    for call in (store.check_bucket, lambda: store.read("v1/b/x", [(0, into)])):
        assert problem_of(call, secret, signature) is StoreProblem.MISSING_BUCKET


def test_azure_needs_the_name_of_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem_of(lambda: ObjectStore("az://container/p")) is StoreProblem.NO_ACCOUNT
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert ObjectStore("az://container/p").lifecycle_place() == ("az", "container/p")
    assert ObjectStore("az://container").lifecycle_place() == ("az", "container")


def test_azure_says_what_is_wrong_with_key_and_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := no_azurite():
        pytest.skip(reason)
    with azurite(tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        missing = ObjectStore("az://not-there/p", limits=PATIENT)
        into = memoryview(bytearray(3))
        calls: list[Callable[[], object]] = [
            missing.check_bucket,
            lambda: missing.create("v1/b/x", BYTES),
            lambda: missing.read("v1/b/x", [(0, into)]),
        ]
        for call in calls:
            assert problem_of(call) is StoreProblem.MISSING_BUCKET
        wrong = base64.b64encode(b"private and wrong").decode()
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", wrong)
        denied = ObjectStore(f"az://{CONTAINER}/p", limits=PATIENT)
        for call in (denied.check_bucket, lambda: denied.create("v1/b/x", BYTES)):
            assert problem_of(call, wrong) is StoreProblem.DENIED
