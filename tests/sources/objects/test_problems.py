"""Errors of a store that lies are told apart, over real connections to a scripted server."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.sources.objects.opening import open_store
from kvtier.sources.objects.problems import StoreError, StoreProblem
from kvtier.sources.objects.store import ObjectStore, StoreLimits, check_address
from tests.ports import free_port
from tests.sources.objects.s3_server import StoredObject, s3_server
from tests.sources.objects.scripted_store import HEAD_OK, OK, ScriptedStore, failure, part, scripted

if importlib.util.find_spec("obstore") is None:
    pytest.skip(
        "no object stores: `pip install obstore`, as requirements.txt pins it", allow_module_level=True
    )

NOT_THERE = failure("404 Not Found", "NoSuchKey")
CONFLICT = failure("409 Conflict", "ConditionalRequestConflict")
LIMITS = StoreLimits(connect_s=20.0, idle_s=20.0, request_s=60.0, num_retries=2, retry_s=60.0)
BYTES = memoryview(b"123")


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "scripted")


@contextmanager
def answering(*answers: bytes, limits: StoreLimits = LIMITS) -> Iterator[tuple[ObjectStore, ScriptedStore]]:
    with scripted(*answers) as server:
        yield ObjectStore("s3://bucket/p", endpoint=server.endpoint, limits=limits), server


def problem_of(call: Callable[[], object]) -> StoreProblem:
    with pytest.raises(StoreError) as failed:
        call()
    assert failed.value.problem.value in str(failed.value), "says what to do"
    assert "scripted" not in str(failed.value)
    return failed.value.problem


def test_a_refused_create_means_that_it_is_there() -> None:
    with answering(failure("412 Precondition Failed", "PreconditionFailed")) as (store, server):
        assert not store.create("v1/b/x", BYTES)
        assert len(server.requests) == 1


def test_a_conflict_is_believed_when_the_object_is_there() -> None:
    with answering(CONFLICT, HEAD_OK) as (store, server):
        assert not store.create("v1/b/x", BYTES)
        assert [line.split()[0] for line in server.requests] == ["PUT", "HEAD"]


def test_a_conflict_without_an_object_is_tried_again() -> None:
    """obstore says that it exists (arrow-rs-object-store#852); nothing may be there."""
    with answering(CONFLICT, failure("404 Not Found"), OK) as (store, server):
        assert store.create("v1/b/x", BYTES)
        assert [line.split()[0] for line in server.requests] == ["PUT", "HEAD", "PUT"]


def test_conflicts_without_an_end_are_bounded() -> None:
    missing = failure("404 Not Found")
    with answering(CONFLICT, missing, CONFLICT, missing, CONFLICT) as (store, server):
        assert problem_of(lambda: store.create("v1/b/x", BYTES)) is StoreProblem.BUSY
        assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("answer", "problem", "num_requests"),
    [
        (failure("503 Slow Down", "SlowDown"), StoreProblem.BUSY, 3),
        (failure("429 Too Many Requests"), StoreProblem.BUSY, 3),
        (failure("500 Internal Server Error", "InternalError"), StoreProblem.FAILED, 3),
        (failure("403 Forbidden", "AccessDenied"), StoreProblem.DENIED, 1),
        (failure("403 Forbidden", "RequestTimeTooSkewed"), StoreProblem.DENIED, 1),
        (failure("404 Not Found", "NoSuchBucket"), StoreProblem.MISSING_BUCKET, 1),
        (failure("403 Forbidden", "QuotaExceeded"), StoreProblem.FULL, 1),
        (failure("501 Not Implemented", "NotImplemented"), StoreProblem.UNSUPPORTED, 3),
    ],
    ids=lambda value: value.name if isinstance(value, StoreProblem) else "",
)
@pytest.mark.parametrize("operation", ["create", "read", "copy", "list", "delete"])
def test_what_failed_is_told_apart_whatever_was_called(
    operation: str, answer: bytes, problem: StoreProblem, num_requests: int
) -> None:
    with answering(answer) as (store, server):
        calls: dict[str, Callable[[], object]] = {
            "create": lambda: store.create("v1/b/x", BYTES),
            "read": lambda: store.read("v1/b/x", [(0, memoryview(bytearray(3)))]),
            "copy": lambda: store.copy("v1/b/x", "v1/b/y"),
            "list": lambda: list(store.objects("v1/b/")),
            "delete": lambda: store.delete(["v1/b/x"]),
        }
        assert problem_of(calls[operation]) is problem
        assert len(server.requests) <= num_requests, "retries are bounded"


def test_a_missing_object_is_no_problem_and_one_request() -> None:
    with answering(NOT_THERE) as (store, server):
        assert not store.read("v1/b/x", [(0, memoryview(bytearray(3)))])
        assert len(server.requests) == 1


def test_a_body_that_is_cut_off_is_asked_for_again_where_it_ended() -> None:
    with answering(part(b"abc", 0, 10, length=10), part(b"defghij", 3, 10)) as (store, server):
        into = bytearray(10)
        assert store.read("v1/b/x", [(0, memoryview(into))])
        assert bytes(into) == b"abcdefghij"
        assert len(server.requests) == 2


@pytest.mark.parametrize("answer", [part(b"abc", 0, 3), part(b"abcdefghij", 0, 10)])
def test_another_number_of_bytes_than_asked_for_is_short(answer: bytes) -> None:
    with answering(answer) as (store, _):
        into = bytearray(b"\xa5" * 20)
        assert problem_of(lambda: store.read("v1/b/x", [(0, memoryview(into)[8:13])])) in (
            StoreProblem.SHORT,
            StoreProblem.FAILED,
        )
        assert bytes(into[:8]) == b"\xa5" * 8
        assert bytes(into[13:]) == b"\xa5" * 7, "nothing is written beyond the buffer"


def test_a_store_that_never_answers_is_given_up() -> None:
    short = StoreLimits(connect_s=0.2, idle_s=0.2, request_s=0.2, num_retries=1, retry_s=1.0)
    with answering(b"", limits=short) as (store, server):
        assert (
            problem_of(lambda: store.read("v1/b/x", [(0, memoryview(bytearray(3)))]))
            is StoreProblem.UNREACHABLE
        )
        assert len(server.requests) <= 2


def test_an_address_where_nothing_listens_is_unreachable() -> None:
    store = ObjectStore("s3://bucket", endpoint=f"http://127.0.0.1:{free_port()}", limits=LIMITS)
    assert problem_of(store.check_bucket) is StoreProblem.UNREACHABLE


@pytest.mark.parametrize(
    "name", ["v1/b//x", "v1/../x", "v1/b/.", "v1/b/a\nb", "v1/b/\x1b[31mred", "v1//x", "v1/\x07/x"]
)
def test_a_planted_name_is_told_and_keeps_no_host_from_the_store(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One such object, of whatever else writes to the bucket, made each look at a start fail."""
    with s3_server() as server:
        for variable, value in server.environment().items():
            monkeypatch.setenv(variable, value)
        store = ObjectStore("s3://bucket", limits=LIMITS)
        server.objects[name] = StoredObject(b"x", 0.0)
        store.check_bucket()
        with pytest.raises(StoreError) as failed:
            list(store.objects("v1/"))
        assert failed.value.problem is StoreProblem.FOREIGN_NAME
        assert str(failed.value).isprintable(), "it goes to logs and terminals"


def test_a_folder_that_is_missing_is_told_at_once() -> None:
    assert problem_of(lambda: ObjectStore("file:///does/not/exist")) is StoreProblem.MISSING_BUCKET


@pytest.mark.parametrize(
    "address",
    ["bucket", "/srv/kv", "ftp://host/x", "s3://", "s3://key:scripted-secret@bucket", "s3://b/p?x=1"],
)
def test_what_is_no_address_is_refused_with_the_forms_there_are(address: str) -> None:
    with pytest.raises(StoreError, match="s3://BUCKET/PREFIX") as refused:
        ObjectStore(address)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "address", ["mooncake://master", "mooncake://m:1/a b", "mooncake://u:p@m:1", "mooncake://m:1?x"]
)
def test_a_pool_is_named_by_its_master_and_port(address: str) -> None:
    with pytest.raises(StoreError, match="mooncake://MASTER:PORT"):
        check_address(address)
    for fine in ("mooncake://master.kv:50051", "mooncake://10.0.0.1:50051/prod/a", "mooncake://[::1]:50051/"):
        check_address(fine)


def test_without_its_package_a_pool_says_which_one() -> None:
    if importlib.util.find_spec("mooncake") is not None:
        pytest.skip("it is installed")
    with pytest.raises(StoreError, match=r"pip install kvtier\[mooncake\]"):
        open_store("mooncake://localhost:1").check_bucket()


def test_a_folder_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    """A mount that ended: bundles would fill the disk below it, where no other host finds them."""
    (tmp_path / "store").mkdir()
    store = ObjectStore(f"file://{tmp_path}/store")
    assert store.create("v1/b/x", memoryview(b"1"))
    (tmp_path / "store").rename(tmp_path / "away")
    with pytest.raises(StoreError) as refused:
        store.create("v1/b/y", memoryview(b"1"))
    assert refused.value.problem is StoreProblem.MISSING_BUCKET
    assert not (tmp_path / "store").exists()
