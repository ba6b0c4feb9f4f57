"""A fleet's tenant keys in a store: hosts agree on one, an erased one never comes back."""

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event

import pytest

from kvtier.appliance.observability.logs import message
from kvtier.sources.objects.fleet_keys import LISTING_S, MAX_AGE_S, MAX_LISTED, FleetKeys, erase_tenant
from kvtier.sources.objects.keys import TENANT_KEYS, TenantKeyName, bundle_key, tenant_folder
from kvtier.sources.objects.layout import BundleChain
from kvtier.sources.objects.problems import StoreError, StoreProblem
from kvtier.sources.objects.store import ObjectInfo, ObjectStore
from kvtier.tiers.base import Buffer, Cause, CopyError
from kvtier.tiers.encryption.master_keys import MasterKeys

from .s3_server import S3Answer, S3Request, S3Server, StoredObject

if importlib.util.find_spec("obstore") is None:
    pytest.skip("no object stores: `pip install obstore`", allow_module_level=True)

OLD, NEW = bytes(range(32)), bytes(range(1, 33))
RED, BLUE = "tenant:red", "tenant:blue"


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Hooked(ObjectStore):
    """A folder in which something happens just before an object is created."""

    before_create: Callable[[], object] | None = None

    def create(self, key: str, payload: Buffer) -> bool:
        """See ObjectStore."""
        hook, self.before_create = self.before_create, None
        if hook is not None:
            hook()
        return super().create(key, payload)


class Counting(ObjectStore):
    """A folder that counts what is read."""

    num_streams = 0

    def stream(self, key: str, start: int, end: int) -> Iterator[memoryview]:
        """See ObjectStore."""
        self.num_streams += 1
        return super().stream(key, start, end)


def host(folder: Path, *masters: bytes, clock: Clock | None = None) -> FleetKeys:
    keys = FleetKeys(MasterKeys(*(masters or (OLD,))), clock or Clock())
    keys.open(ObjectStore(f"file://{folder}"))
    return keys


def names(folder: Path) -> list[str]:
    """Return the names of the objects with keys."""
    return sorted(str(path.relative_to(folder)) for path in folder.glob(f"{TENANT_KEYS}*/*"))


def name_of(number: int, tenant: str = RED) -> str:
    return str(TenantKeyName(tenant_folder(tenant), number))


def test_hosts_that_race_end_with_one_key(tmp_path: Path) -> None:
    num_hosts = 8
    hosts = [host(tmp_path) for _ in range(num_hosts)]
    barrier = Barrier(num_hosts)

    def first_use(keys: FleetKeys) -> object:
        barrier.wait(60)
        return keys.key_for_writing(RED)

    with ThreadPoolExecutor(num_hosts) as pool:
        found = set(pool.map(first_use, hosts))
    assert len(found) == 1
    assert names(tmp_path) == [name_of(0)]
    assert host(tmp_path).key_for_writing(RED) in found
    assert host(tmp_path).key_for_writing(BLUE) not in found


def test_another_master_key_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    host(tmp_path).key_for_writing(RED)
    before = (tmp_path / name_of(0)).read_bytes()
    with pytest.raises(StoreError, match="another master key") as refused:
        host(tmp_path, NEW)
    assert refused.value.problem is StoreProblem.WRONG_KEY
    assert MasterKeys(OLD).current_id in str(refused.value)
    assert names(tmp_path) == [name_of(0)]
    assert (tmp_path / name_of(0)).read_bytes() == before


def test_a_wrap_of_another_master_key_harms_its_tenant_alone(tmp_path: Path) -> None:
    """A stranger's, or one that a fleet before this one left."""
    keys = {tenant: host(tmp_path).key_for_writing(tenant) for tenant in (RED, BLUE)}
    planted = FleetKeys(MasterKeys(NEW))
    (tmp_path / "other").mkdir()
    planted.open(ObjectStore(f"file://{tmp_path}/other"))
    planted.key_for_writing(RED)
    (tmp_path / "other" / name_of(0)).rename(tmp_path / name_of(7))
    ours = host(tmp_path)
    assert ours.key_for_writing(BLUE) == keys[BLUE]
    assert ours.key(RED, keys[RED].id) is None
    with pytest.raises(CopyError, match="another master key"):
        ours.key_for_writing(RED)
    ours.wrap_anew()
    assert ours.num_foreign == 1
    ours.check(MasterKeys(OLD))
    (tmp_path / name_of(7)).unlink()
    ours.refresh(0)
    assert ours.key_for_writing(RED) == keys[RED]


class Planted(ObjectStore):
    """A folder whose listings of all keys begin with planted names, each of which takes `takes_s`."""

    num_planted = 4 * MAX_LISTED
    num_listed = 0
    suffix = ""
    takes_s = 0.0

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.clock = Clock()

    def objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ObjectStore."""
        for number in range(self.num_planted if prefix == TENANT_KEYS else 0):
            self.num_listed += 1
            self.clock.now += self.takes_s
            yield ObjectInfo(str(TenantKeyName(f"{number:032x}", 0)) + self.suffix, 1, 0.0)
        yield from super().objects(prefix)


@pytest.mark.parametrize(
    ("suffix", "takes_s", "most"),
    [("", 0.0, MAX_LISTED), (" is no name", 0.0, MAX_LISTED), ("", 1.0, LISTING_S)],
    ids=["names", "foreign names", "slow"],
)
def test_planted_names_do_not_make_a_listing_endless(
    suffix: str, takes_s: float, most: float, tmp_path: Path
) -> None:
    store = Planted(f"file://{tmp_path}")
    keys = FleetKeys(MasterKeys(OLD), store.clock)
    store.num_planted, store.suffix, store.takes_s = 0, suffix, takes_s
    keys.open(store)
    key = keys.key_for_writing(RED)
    store.num_planted = Planted.num_planted
    keys.refresh(0)
    assert store.num_listed <= most + 1
    assert keys.key(RED, key.id) == key, "a tenant in use is listed on its own"


def test_a_listing_ends_with_the_daemon(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}")
    keys = FleetKeys(MasterKeys(OLD), Clock())
    keys.open(store)
    keys.key_for_writing(RED)
    store.abandon()
    with pytest.raises(StoreError, match="given up"):
        keys.refresh(0)


def plant(server: S3Server, key: str) -> None:
    """Store an object that no client of the store can list."""
    server.objects[key] = StoredObject(b"x", 0.0)


def at(server: S3Server) -> FleetKeys:
    """Return the keys of a host that uses a bucket."""
    keys = FleetKeys(MasterKeys(OLD), Clock())
    keys.open(ObjectStore("s3://bucket"))
    return keys


def test_a_name_that_cannot_be_listed_does_not_take_the_keys_of_all_tenants(server: S3Server) -> None:
    one = at(server)
    key = one.key_for_writing(RED)
    plant(server, f"{TENANT_KEYS}/x")
    one.refresh(0)
    assert one.key(RED, key.id) == key, "in use, so listed on its own"
    other = at(server)
    assert other.key_for_writing(RED) == other.key(RED, key.id) == key
    other.refresh(0)
    blue = other.key_for_writing(BLUE)
    assert at(server).key_for_writing(BLUE) == blue


def test_no_second_key_is_made_beside_one_that_cannot_be_listed(server: S3Server) -> None:
    one = at(server)
    key = one.key_for_writing(RED)
    one.take(MasterKeys(NEW, OLD))
    assert one.wrap_anew() == 1, "its number is 1 now, and 0 is free"
    plant(server, f"{TENANT_KEYS}{tenant_folder(RED)}//x")
    for _ in range(2):
        one.refresh(0)
        with pytest.raises(StoreError) as failed:
            one.key_for_writing(RED)
        assert failed.value.problem is StoreProblem.FOREIGN_NAME
    assert one.key_for_writing(BLUE)
    del server.objects[f"{TENANT_KEYS}{tenant_folder(RED)}//x"]
    one.refresh(0)
    assert one.key_for_writing(RED) == key


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, []), (1, [0]), (1, None)],
    ids=["made a moment ago", "wrapped anew a moment ago", "beside a name that cannot be listed"],
)
def test_an_erasure_does_not_depend_on_a_listing(
    number: int, shown: list[int] | None, server: S3Server
) -> None:
    """`shown`: numbers that a listing shows which lags; one of them is gone already."""
    keys = at(server)
    key, folder = keys.key_for_writing(RED), f"{TENANT_KEYS}{tenant_folder(RED)}/"
    if number:
        keys.take(MasterKeys(NEW, OLD))
        assert keys.wrap_anew() == 1
    assert [one for one in server.objects if one.startswith(folder)] == [name_of(number)]
    stored = dict(server.objects)

    def lag(request: S3Request, answer: S3Answer) -> S3Answer:
        if request.operation != "list" or shown is None:
            return answer
        before, server.objects = server.objects, {name_of(one): stored[name_of(number)] for one in shown}
        answer, server.objects = server._list(request.key, {}), before
        return answer

    server.change = lag
    if shown is None:
        plant(server, f"{folder}/x")
    assert erase_tenant(ObjectStore("s3://bucket"), RED) == 0
    server.heal()
    server.objects.pop(f"{folder}/x", None)
    assert [one for one in server.objects if one.startswith(folder)] == [name_of(number + 1)], "the mark"
    assert at(server).key(RED, key.id) is None


def test_keys_can_be_used_while_names_are_listed(tmp_path: Path) -> None:
    is_listing, go_on = Event(), Event()

    class Slow(ObjectStore):
        def objects(self, prefix: str) -> Iterator[ObjectInfo]:
            if key is not None:
                is_listing.set()
                assert go_on.wait(60)
            return super().objects(prefix)

    key = None
    keys = FleetKeys(MasterKeys(OLD), Clock())
    keys.open(Slow(f"file://{tmp_path}"))
    key = keys.key_for_writing(RED)
    with ThreadPoolExecutor(2) as pool:
        listed = pool.submit(keys.refresh, 0)
        assert is_listing.wait(60)
        try:
            assert pool.submit(keys.key, RED, key.id).result(60) == key
            made = pool.submit(keys.key_for_writing, BLUE).result(60)
        finally:
            go_on.set()
        listed.result(60)
    assert keys.key(BLUE, made.id) == made


def test_an_erased_key_is_forgotten_by_other_hosts_within_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    forgotten: list[str] = []
    one, other = host(tmp_path), host(tmp_path, clock=clock)
    key = one.key_for_writing(RED)
    other.on_forgotten = forgotten.append
    assert other.key(RED, key.id) is None, "not listed yet"
    clock.now += MAX_AGE_S
    other.refresh()
    assert other.key(RED, key.id) == key
    assert erase_tenant(ObjectStore(f"file://{tmp_path}"), RED) == 0
    clock.now += MAX_AGE_S
    other.refresh()
    assert forgotten == [RED]
    assert other.key(RED, key.id) is None
    assert other.names(RED) is None
    again = other.key_for_writing(RED)
    assert again.secret != key.secret
    assert names(tmp_path) == [name_of(1), name_of(2)], "the mark of the erasure, and the next key"
    assert host(tmp_path).key_for_writing(RED) == again


def test_a_tenant_that_is_being_erased_gets_no_key(tmp_path: Path) -> None:
    keys = host(tmp_path)
    key = keys.key_for_writing(RED)
    keys.bar(RED)
    assert keys.key(RED, key.id) is None
    with pytest.raises(CopyError) as barred:
        keys.key_for_writing(RED)
    assert barred.value.cause is Cause.NO_KEY
    erase_tenant(ObjectStore(f"file://{tmp_path}"), RED)
    keys.admit(RED)
    keys.refresh()
    assert keys.key_for_writing(RED).secret != key.secret


def test_erasing_deletes_the_bundles_of_one_tenant_in_every_epoch(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}")
    kept = str(bundle_key("20261123", BLUE, b"n" * 32, b"b" * 32))
    for key in (
        kept,
        *(str(bundle_key(epoch, RED, b"n" * 32, b"b" * 32)) for epoch in ("20200101", "20261123")),
    ):
        store.create(key, memoryview(b"a bundle"))
    assert erase_tenant(store, RED) == 2
    assert [one.key for one in store.objects("v1/")] == [kept]
    assert erase_tenant(store, RED) == 0


def test_another_master_key_wraps_the_same_data_keys(tmp_path: Path) -> None:
    clock = Clock()
    one, other = host(tmp_path), host(tmp_path, clock=clock)
    keys = {tenant: one.key_for_writing(tenant) for tenant in (RED, BLUE)}
    assert one.wrap_anew() == 0
    assert one.num_wrapped == {MasterKeys(OLD).current_id: 2}
    with pytest.raises(StoreError, match="another master key"):
        one.check(MasterKeys(NEW))
    other.refresh(0)
    assert other.key_for_writing(RED) == keys[RED]
    one.check(MasterKeys(NEW, OLD))
    one.take(MasterKeys(NEW, OLD))
    assert one.wrap_anew() == 2
    assert one.wrap_anew() == 0
    assert one.num_wrapped == {MasterKeys(NEW).current_id: 2}
    one.check(MasterKeys(NEW))
    assert names(tmp_path) == sorted(name_of(1, tenant) for tenant in (RED, BLUE))
    assert {tenant: host(tmp_path, NEW).key_for_writing(tenant) for tenant in (RED, BLUE)} == keys
    clock.now += MAX_AGE_S
    other.refresh()  # which has the old one only, and goes on with what it has unwrapped
    assert other.key_for_writing(RED) == keys[RED]
    with pytest.raises(CopyError, match="another master key"):
        other.key_for_writing(BLUE)
    other.take(MasterKeys(NEW, OLD))
    assert other.key_for_writing(BLUE) == keys[BLUE]


def test_a_host_with_the_old_master_key_is_told_which_tenant_misses_which_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of an exchange: told once, the line first, and erasing only where that is lost."""
    first, behind = host(tmp_path, NEW, OLD), host(tmp_path)
    first.key_for_writing(RED)
    behind.refresh(0)
    for _ in range(3):
        behind.refresh(0)
        assert behind.names(RED) is None
        with pytest.raises(CopyError, match="another master key"):
            behind.key_for_writing(RED)
    [said] = [message(record) for record in caplog.records]
    assert f"key of {RED} in the object store, {TENANT_KEYS}" in said
    assert f"another master key, {MasterKeys(NEW).current_id[:8]}; put its line below the others" in said
    assert "<" not in said
    assert said.index("below the others") < said.index("only when it is lost") < said.index("erase-tenant")
    behind.take(MasterKeys(OLD, NEW))
    assert behind.key_for_writing(RED) == first.key_for_writing(RED)


def test_a_key_that_is_erased_while_it_is_wrapped_anew_stays_erased(tmp_path: Path) -> None:
    key = host(tmp_path).key_for_writing(RED)
    store = Hooked(f"file://{tmp_path}")
    slow = FleetKeys(MasterKeys(NEW, OLD))
    slow.open(store)
    store.before_create = lambda: erase_tenant(ObjectStore(f"file://{tmp_path}"), RED)
    assert slow.wrap_anew() == 0
    assert names(tmp_path) == [name_of(1)], "the mark"
    assert slow.wrap_anew() == 0
    assert slow.key_for_writing(RED).secret != key.secret


def test_a_key_that_is_wrapped_anew_while_it_is_erased_is_erased(tmp_path: Path) -> None:
    key = host(tmp_path).key_for_writing(RED)
    store, other = Hooked(f"file://{tmp_path}"), host(tmp_path, NEW, OLD)
    store.before_create = other.wrap_anew
    erase_tenant(store, RED)
    assert names(tmp_path) == [name_of(2)], "the mark"
    assert host(tmp_path, NEW).key(RED, key.id) is None


def test_an_erasure_reads_the_wraps_that_there_are_whatever_their_numbers(tmp_path: Path) -> None:
    host(tmp_path).key_for_writing(RED)
    (tmp_path / name_of(20_000)).write_bytes(b"planted")
    store = Counting(f"file://{tmp_path}")
    erase_tenant(store, RED)
    assert names(tmp_path) == [name_of(20_001)], "the mark"
    assert store.num_streams <= 5


@pytest.mark.parametrize("number", [99_999_999, 10**20])
def test_an_erasure_behind_the_last_number_of_eight_digits_is_seen(tmp_path: Path, number: int) -> None:
    key = host(tmp_path).key_for_writing(RED)
    (tmp_path / name_of(number)).write_bytes(b"planted")
    erase_tenant(ObjectStore(f"file://{tmp_path}"), RED)
    assert names(tmp_path) == [name_of(number + 1)], "the mark"
    again = host(tmp_path).key_for_writing(RED)
    assert again != key
    assert host(tmp_path).key_for_writing(RED) == again


@pytest.mark.parametrize(
    "damage", ["cut", "flipped", "another tenant's", "an older one", "no JSON", "endless id", "long"]
)
def test_a_damaged_wrap_harms_its_tenant_alone(tmp_path: Path, damage: str) -> None:
    keys = host(tmp_path)
    key, other = keys.key_for_writing(RED), keys.key_for_writing(BLUE)
    path, whole = tmp_path / name_of(0), (tmp_path / name_of(0)).read_bytes()
    changed = {
        "cut": whole[:-9] + b'"}',
        "flipped": whole[:-4] + bytes([whole[-4] ^ 1]) + whole[-3:],
        "another tenant's": (tmp_path / name_of(0, BLUE)).read_bytes(),
        "an older one": whole,
        "no JSON": b"{",
        "endless id": b'{"id": 1e999, "master": "", "wrapped": ""}',
        "long": whole + b" " * 10_000,
    }[damage]
    (tmp_path / name_of(1) if damage == "an older one" else path).write_bytes(changed)
    fresh = host(tmp_path)
    if damage == "long":  # what is behind the limit is not read
        assert fresh.key(RED, key.id) == key
        return
    assert fresh.key(RED, key.id) is None
    with pytest.raises(CopyError, match="damaged"):
        fresh.key_for_writing(RED)
    assert fresh.key_for_writing(BLUE) == other
    erase_tenant(ObjectStore(f"file://{tmp_path}"), RED)
    assert host(tmp_path).key_for_writing(RED) != key


def test_names_are_hidden_from_all_without_the_key(tmp_path: Path) -> None:
    keys = host(tmp_path)
    keys.key_for_writing(RED)
    keys.key_for_writing(BLUE)
    red, blue = keys.names(RED), keys.names(BLUE)
    assert red is not None
    assert blue is not None
    digest, name = b"n" * 32, b"b" * 32
    found = {red.block(digest, name), blue.block(digest, name), red.block(b"m" * 32, name), name}
    assert len(found) == 4
    again = host(tmp_path).names(RED)
    assert again is not None
    assert again.block(digest, name) == red.block(digest, name)


def test_a_hidden_head_holds_no_name_and_tells_no_neighbour(tmp_path: Path) -> None:
    keys = host(tmp_path)
    keys.key_for_writing(RED)
    names = keys.names(RED)
    assert names is not None
    digest, parent, name = b"n" * 32, b"p" * 32, b"b" * 32
    hidden = names.chain(BundleChain(digest, parent, 1, (name,)))
    stands = {hidden.namespace_digest, hidden.parent_hash, *hidden.names}
    assert len(stands) == 3
    assert not stands & {digest, parent, name}
    assert hidden.parent_hash != names.block(digest, parent), "as a parent it has another name"
    assert names.chain(BundleChain(digest, b"", 0, (name,))).parent_hash == b"", "a chain's start has none"
