"""What every object store promises: memory, a folder, one that answers as Google's, and where there are such
a real S3 gateway, Azure's emulator and a pool."""

import copy
import importlib.util
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvtier.sources.objects.opening import open_store
from kvtier.sources.objects.problems import StoreError, StoreProblem
from kvtier.sources.objects.store import CHUNK_BYTES, ObjectStore, StoreLimits
from tests.mooncake.running import Pool
from tests.sources.objects.clouds import CONTAINER, azurite, no_azurite, service_account, tls_server
from tests.sources.objects.gateway import Gateway

if importlib.util.find_spec("obstore") is None:
    pytest.skip(
        "no object stores: `pip install obstore`, as requirements.txt pins it", allow_module_level=True
    )

#: A busy machine is not what is tested here.
PATIENT = StoreLimits(connect_s=60.0, idle_s=120.0, request_s=240.0, num_retries=2, retry_s=240.0)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A running pool of Mooncake."""
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("no pool of Mooncake: `make test-mooncake`")
    with Pool(tmp_path_factory.mktemp("pool")) as running:
        yield running


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What tells a client of a running Azurite."""
    if reason := no_azurite():
        pytest.skip(reason)
    with azurite(tmp_path_factory.mktemp("azure")) as environment:
        yield environment


@pytest.fixture
def google(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What tells a client of a bucket that answers as Google's storage does."""
    with tls_server(tmp_path) as (server, environment):
        account, _ = service_account(tmp_path, server.endpoint)
        yield {**environment, "GOOGLE_SERVICE_ACCOUNT": str(account)}


def of_cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of an empty store behind a network, and set what tells a client of it."""
    if request.param == "s3":
        running: Gateway = request.getfixturevalue("s3")
        environment, bucket = running.environment(), f"kv-{uuid.uuid4().hex[:12]}"
        running.make_bucket(bucket)
        address = f"s3://{bucket}/some/prefix"
    elif request.param == "google":
        environment, address = request.getfixturevalue("google"), "gs://bucket/some/prefix"
    else:
        environment = request.getfixturevalue("azure")
        address = f"az://{CONTAINER}/{uuid.uuid4().hex}/prefix"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return address


@pytest.fixture(params=["memory", "file", "s3", "google", "azure", "mooncake"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """An empty store."""
    if request.param == "memory":
        return ObjectStore("memory:///")
    if request.param == "file":
        return ObjectStore(f"file://{tmp_path}")
    if request.param == "mooncake":
        lent: Pool = request.getfixturevalue("pool")
        return open_store(f"mooncake://{lent.address}/{uuid.uuid4().hex}", limits=PATIENT)
    return ObjectStore(of_cloud(request, monkeypatch), limits=PATIENT)


def whole(store: ObjectStore, key: str) -> bytes | None:
    """Return an object; None when there is none."""
    size = store.size(key)
    if size is None:
        return None
    into = bytearray(size)
    assert store.read(key, [(0, memoryview(into))])
    return bytes(into)


def test_what_was_created_is_read_and_never_replaced(store: ObjectStore) -> None:
    store.check_bucket()
    assert store.create("v1/b/one", memoryview(b"first"))
    assert not store.create("v1/b/one", memoryview(b"second, and longer"))
    assert whole(store, "v1/b/one") == b"first"
    assert store.size("v1/b/one") == 5


def test_one_of_many_creates_succeeds(store: ObjectStore) -> None:
    payloads = [memoryview(b"%d" % n * 100_000) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda payload: store.create("v1/b/raced", payload), payloads))
    assert created.count(True) == 1
    assert whole(store, "v1/b/raced") == bytes(payloads[created.index(True)])


@pytest.mark.parametrize("length", [1, CHUNK_BYTES - 1, 3 * CHUNK_BYTES + 17])
def test_parts_come_into_the_memory_that_was_given(store: ObjectStore, length: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    view = np.ascontiguousarray(data)[: len(data)]
    store.create("v1/b/data", view.data)
    memory = np.full(length + 128, 0xA5, np.uint8)
    middle = length // 2
    parts = [(middle, memory.data[64 + middle : 64 + length]), (0, memory.data[64 : 64 + middle])]
    assert store.read("v1/b/data", [part for part in parts if len(part[1])])
    assert (memory[64:-64] == data).all()
    assert (memory[:64] == 0xA5).all()
    assert (memory[-64:] == 0xA5).all(), "nothing is written beyond what was asked for"


@pytest.mark.parametrize("start", [2, 5, 1000])
def test_a_part_beyond_the_end_is_short(store: ObjectStore, start: int) -> None:
    store.create("v1/b/short", memoryview(b"12345"))
    with pytest.raises(StoreError) as short:
        store.read("v1/b/short", [(start, memoryview(bytearray(100)))])
    assert short.value.problem is StoreProblem.SHORT


def test_what_is_not_there_is_no_error(store: ObjectStore) -> None:
    assert store.size("v1/b/none") is None
    assert not store.read("v1/b/none", [(0, memoryview(bytearray(1)))])
    store.delete(["v1/b/none"])
    if not store.has_listing:
        return
    assert not store.copy("v1/b/none", "v1/b/other")
    assert list(store.objects("v1/b/")) == []
    assert store.folders("v1/b/") == []


def refuses_to_list(store: ObjectStore) -> bool:
    """Return whether a store lists and copies nothing, and says so."""
    if store.has_listing:
        return False
    calls: list[Callable[[], object]] = [
        lambda: list(store.objects("v1/")),
        lambda: store.folders("v1/"),
        lambda: store.copy("v1/b/1", "v1/b/2"),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="no objects") as refused:
            call()
        assert refused.value.problem is StoreProblem.NO_ADDRESS
    return True


def test_listing_is_by_folder(store: ObjectStore) -> None:
    if refuses_to_list(store):
        return
    keys = [f"v1/m/{day}/{number:03d}" for day in (1, 2) for number in range(5)]
    for key in [*keys, "v1/mm/other"]:
        store.create(key, memoryview(b"x" * 7))
    found = list(store.objects("v1/m/"))
    assert sorted(one.key for one in found) == keys
    assert {one.num_bytes for one in found} == {7}
    assert all(one.modified_at_s > 1.6e9 for one in found)
    assert store.folders("v1/m/") == ["1", "2"]
    assert store.folders("v1/") == ["m", "mm"]


def test_a_copy_stays_when_the_first_one_goes(store: ObjectStore) -> None:
    if refuses_to_list(store):
        return
    store.create("v1/b/1/x", memoryview(b"kept"))
    assert store.copy("v1/b/1/x", "v1/b/2/x")
    assert store.copy("v1/b/1/x", "v1/b/2/x"), "twice is as good as once"
    store.delete(["v1/b/1/x"])
    assert whole(store, "v1/b/1/x") is None
    assert whole(store, "v1/b/2/x") == b"kept"


def test_many_are_deleted_at_once_whether_they_are_there_or_not(store: ObjectStore) -> None:
    for number in range(12):
        store.create(f"v1/b/{number}", memoryview(b"x"))
    store.delete([f"v1/b/{number}" for number in range(-3, 20)])
    assert [store.size(f"v1/b/{number}") for number in range(12)] == [None] * 12


def test_a_store_is_neither_shown_nor_sent(store: ObjectStore) -> None:
    assert "secret" not in repr(store)
    with pytest.raises(TypeError, match="credentials"):
        copy.copy(store)  # as sending it to another process does


@pytest.fixture
def at(s3: Gateway, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ObjectStore]:
    """Open a store of the gateway under other circumstances."""

    def opened(bucket: str, **environment: str) -> ObjectStore:
        for name, value in {**s3.environment(), **environment}.items():
            monkeypatch.setenv(name, value)
        return ObjectStore(f"s3://{bucket}/p", limits=PATIENT)

    return opened


def test_a_missing_bucket_is_told_by_every_call_that_can(at: Callable[..., ObjectStore]) -> None:
    store = at("no-such-bucket")
    calls: list[Callable[[], object]] = [
        store.check_bucket,
        lambda: store.create("v1/b/x", memoryview(b"1")),
        lambda: store.read("v1/b/x", [(0, memoryview(bytearray(1)))]),
        lambda: store.copy("v1/b/x", "v1/b/y"),
        lambda: store.delete(["v1/b/x"]),
        lambda: store.folders("v1/"),
    ]
    for call in calls:
        with pytest.raises(StoreError) as missing:
            call()
        assert missing.value.problem is StoreProblem.MISSING_BUCKET
    assert store.size("v1/b/x") is None, "the answer to a HEAD has no body: this call cannot tell"


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_denied_and_not_shown(
    at: Callable[..., ObjectStore], s3: Gateway, name: str
) -> None:
    bucket = f"kv-{uuid.uuid4().hex[:12]}"
    s3.make_bucket(bucket)
    store = at(bucket, **{name: "wrong-and-private"})
    for call in (store.check_bucket, lambda: store.create("v1/b/x", memoryview(b"1"))):
        with pytest.raises(StoreError) as denied:
            call()
        assert denied.value.problem is StoreProblem.DENIED
        assert "private" not in str(denied.value)
        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in str(denied.value)
