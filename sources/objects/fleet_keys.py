"""FleetKeys: one data key for each tenant of a fleet, wrapped with its master key, in the store.

    v1/k/<tenant>/00000000   {"id": .., "master": .., "wrapped": ..}     the first host that needed it
    v1/k/<tenant>/00000001   the same data key under another master key; 00000000 is deleted then
    v1/k/<tenant>/00000002   {"erased": true}; 00000001 is deleted then
    v1/k/<tenant>/00000003   another data key: the tenant came back

The objects of a tenant are numbered, created and never replaced, and the newest one counts. So a store that
creates only (every one does that bundles need) decides each race: of two hosts that make a key one finds the
number taken and uses what is there, and a host that wraps anew finds the mark of an erasure in its place. A
mark is never deleted, so its number cannot be given out again.

Hosts list `v1/k/` every LOOK_S, one request; a key is not used longer than MAX_AGE_S after the last listing
that showed it. What is listed is read when it is needed. A wrap is bound to its tenant, key id and number.
Names may be planted: a listing ends after MAX_LISTED of them or LISTING_S, or at one that cannot be listed
(`v1/k//x`); a tenant that is used here is then listed on its own. Listings may lag, too: an erasure looks for
later numbers by name. A wrap of another master key harms the tenant it is named by, no other one.

Rejected: one object a tenant that is replaced (a host that wraps anew would bring an erased key back, unless
the store compares when it replaces, which folders and some stores do not); a key of the store between master
key and data keys (one object to wrap anew, but then no exchange of the master key makes old versions of
erased keys useless).
"""

import json
import logging
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, Final, NamedTuple

from ...tiers.base import Cause, CopyError
from ...tiers.encryption.keyring import DataKey
from ...tiers.encryption.master_keys import KEY_BYTES, WRAPPED_BYTES, MasterKeys
from .hidden import HiddenNames
from .keys import BUNDLES, TENANT_KEYS, TenantKeyName, parse_tenant_key, tenant_folder
from .problems import StoreError, StoreProblem
from .store import ObjectStore

log = logging.getLogger(__name__)

LOOK_S: Final = 30.0
MAX_AGE_S: Final = 60.0
MAX_WRAP_BYTES: Final = 4096
NUM_CHECKED: Final = 32  # wraps read at a start, at most
MAX_LISTED: Final = 65_536  # names that one listing looks at, whatever they are
LISTING_S: Final = 30.0  # of one listing
MAX_TRIES: Final = 100  # numbers that other hosts may take while one is looked for
_ERASED: Final = b'{"erased": true}'
_MARK: Final = 0  # of key ids
_DAMAGED: Final = -1


class _Wrap(NamedTuple):
    """What one object holds."""

    key_id: int  # _MARK: the tenant was erased; _DAMAGED: it is no wrap
    master: str = ""
    wrapped: bytes = b""


class _UnwrappedKey(NamedTuple):
    """A tenant's key, unwrapped."""

    number: int
    key: DataKey
    names: HiddenNames


class FleetKeys:
    """Data keys of the tenants of a fleet. Thread-safe; methods block for as long as the store does.

    `open` comes first. Methods raise StoreError when the store fails.
    `on_forgotten` is called with a tenant after its key is gone.
    """

    def __init__(self, masters: MasterKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_forgotten: Callable[[str], None] = lambda tenant: None
        self.num_wrapped: Counter[str] = Counter()  # data keys by master key, as of the last `wrap_anew`
        self.num_foreign = 0  # wraps of other master keys that were seen
        self._masters = masters
        self._clock = clock
        self._lock = threading.RLock()
        self._listing = threading.Lock()  # taken before `_lock`, which is free while names are listed
        self._store: ObjectStore | None = None
        self._looked_at = float("-inf")
        self._newest: dict[str, int] = {}  # by tenant's folder
        self._listed_alone: set[str] | None = None  # folders; None: one listing shows all there are
        self._noted: dict[str, int] = {}  # made or read here since the last listing began
        self._known: dict[str, _UnwrappedKey] = {}  # by tenant
        self._useless: dict[TenantKeyName, _Wrap] = {}  # marks, and damaged ones, which are logged once
        self._barred: set[str] = set()  # tenants that get no new key for now
        self._is_wrapped_anew = False

    def open(self, store: ObjectStore) -> None:
        """Use `store` from now on.
        Raises StoreError(WRONG_KEY) when other master keys made each of NUM_CHECKED wraps that were read."""
        with self._lock:
            self._store = store
        self._look()
        with self._lock:
            newest, masters = dict(self._newest), self._masters
        self.num_foreign, num_opened, master = 0, 0, ""
        for folder in random.sample(sorted(newest), min(NUM_CHECKED, len(newest))):
            wrap = self._read(name := TenantKeyName(folder, newest[folder]))
            if wrap is None or wrap.key_id <= _MARK:
                continue
            if masters.unwrap(wrap.wrapped, _bound(name, wrap.key_id)) is not None:
                num_opened += 1
            elif wrap.master not in masters.ids:
                self.num_foreign, master = self.num_foreign + 1, wrap.master
        if self.num_foreign and not num_opened:
            _require_master(master, masters)

    # ---------------------------------------------------------------------------------------- use

    def refresh(self, max_age_s: float = MAX_AGE_S) -> None:
        """List the keys, unless that was done `max_age_s` ago: what is gone is forgotten."""
        if self._clock() - self._looked_at >= max_age_s:
            self._look(max_age_s)

    def names(self, tenant: str) -> HiddenNames | None:
        """Return what hides a tenant's names; None when it has no key, so the store has nothing of it."""
        with self._lock:
            known = self._find(tenant)
            return known.names if known is not None else None

    def key(self, tenant: str, key_id: int) -> DataKey | None:
        """Return a tenant's key of this id; None when it is gone."""
        with self._lock:
            known = self._find(tenant)
            return known.key if known is not None and known.key.id == key_id else None

    def key_for_writing(self, tenant: str) -> DataKey:
        """Return the key to encrypt with, made and in the store when this returns.
        Raises CopyError: NO_KEY while the tenant is being erased, or when its wrap is damaged."""
        with self._lock:
            if tenant in self._barred:
                raise CopyError(Cause.NO_KEY, "being erased")
            known = self._find(tenant)
            return known.key if known is not None else self._make(tenant)

    def bar(self, tenant: str) -> None:
        """Give a tenant no new key from now on, and forget the one it has here."""
        with self._lock:
            self._barred.add(tenant)
            self._forget(tenant)

    def admit(self, tenant: str) -> None:
        """Let an erased tenant have another key: nothing from before is on its way to the store any more."""
        with self._lock:
            self._barred.discard(tenant)
            self._looked_at = float("-inf")

    # -------------------------------------------------------------------------------- master keys

    def check(self, masters: MasterKeys) -> None:
        """Raise StoreError(WRONG_KEY) when wraps in the store need another master key than these."""
        with self._lock:
            for one, count in self.num_wrapped.items():
                if count:
                    _require_master(one, masters)

    def take(self, masters: MasterKeys) -> None:
        """Use other master keys from now on; `wrap_anew` is due."""
        with self._lock:
            self._masters, self._is_wrapped_anew = masters, False
            self._useless.clear()  # what other master keys made may open now

    def wrap_anew(self) -> int:
        """Wrap every data key under the first master key, unless that was done; return how many were."""
        with self._lock:
            if self._is_wrapped_anew:
                return 0
        self._look()
        with self._lock:
            masters, newest = self._masters, dict(self._newest)
        counts: Counter[str] = Counter()
        num_new, num_foreign, is_whole = 0, 0, True
        for folder, number in newest.items():  # without the lock: requests for each tenant
            name = TenantKeyName(folder, number)
            wrap = self._read(name)
            if wrap is None or wrap.key_id <= _MARK:
                continue
            opened = masters.unwrap(wrap.wrapped, _bound(name, wrap.key_id))
            if opened is None:
                num_foreign += wrap.master not in masters.ids
                continue
            if opened[0] != masters.current_id:
                following = name._replace(number=number + 1)
                if self._create(following, DataKey(wrap.key_id, opened[1]), masters):
                    self._opened().delete([str(name)])
                    num_new += 1
                else:  # another host did, or the tenant was erased
                    is_whole = False
            counts[masters.current_id] += 1
        with self._lock:
            self.num_wrapped, self.num_foreign = counts, num_foreign
            self._is_wrapped_anew = is_whole and self._masters is masters
        return num_new

    # ---------------------------------------------------------------------------------- internals

    def _opened(self) -> ObjectStore:
        assert self._store is not None
        return self._store

    def _look(self, max_age_s: float = 0.0) -> None:
        """List the keys; forget those that are gone. One that was wrapped anew stays.
        Nothing where another thread has listed them `max_age_s` ago, at most, when this one's turn comes."""
        asked_at = self._clock()
        with self._listing:
            if self._looked_at > asked_at - max_age_s:
                return
            with self._lock:
                self._noted = {}
                known = {tenant_folder(tenant) for tenant in self._known}
            newest, problem = self._listed(TENANT_KEYS)
            alone: set[str] = set()
            if problem:
                log.error("object store: not all of %s is listed: %s", TENANT_KEYS, problem)
                for folder in known - newest.keys():
                    own, trouble = self._listed(f"{TENANT_KEYS}{folder}/")
                    newest |= own
                    alone |= {folder} if own or not trouble else set()
            with self._lock:
                for folder, number in self._noted.items():
                    newest[folder] = max(number, newest.get(folder, 0))
                self._newest, self._looked_at = newest, self._clock()
                self._listed_alone = alone if problem else None
                self._compare_known()

    def _listed(self, prefix: str) -> tuple[dict[str, int], str]:
        """Return the newest number of every tenant that has any, by folder, and why not all names were
        listed; empty when they were."""
        newest: dict[str, int] = {}
        ends_at = self._clock() + LISTING_S
        try:
            for number, one in enumerate(self._opened().objects(prefix)):
                if number == MAX_LISTED or self._clock() > ends_at:
                    return newest, f"{number} names, and more; delete what is no tenant's newest key"
                if (name := parse_tenant_key(one.key)) is not None:
                    newest[name.tenant] = max(name.number, newest.get(name.tenant, 0))
        except StoreError as error:
            if error.problem is not StoreProblem.FOREIGN_NAME:
                raise
            return newest, str(error)
        return newest, ""

    def _compare_known(self) -> None:
        """Forget the keys that the last listing does not show."""
        for tenant, known in list(self._known.items()):
            folder = tenant_folder(tenant)
            number = self._newest.get(folder)
            if number == known.number:
                continue
            wrap = None if number is None else self._read(TenantKeyName(folder, number))
            if number is not None and wrap is not None and wrap.key_id == known.key.id:
                self._known[tenant] = known._replace(number=number)
            else:
                self._forget(tenant)

    def _forget(self, tenant: str) -> None:
        if self._known.pop(tenant, None) is not None:
            self.on_forgotten(tenant)

    def _find(self, tenant: str) -> _UnwrappedKey | None:
        """Return a tenant's key; None when it has none, as far as the last listing tells."""
        if (known := self._known.get(tenant)) is not None:
            return known
        folder = tenant_folder(tenant)
        if self._listed_alone is not None and folder not in self._newest.keys() | self._listed_alone:
            own, problem = self._listed(f"{TENANT_KEYS}{folder}/")
            if problem and not own:  # no key is made beside one that is not seen
                raise StoreError(StoreProblem.FOREIGN_NAME, problem)
            self._newest |= own
            self._listed_alone.add(folder)
        number = self._newest.get(folder)
        if number is None or tenant in self._barred:
            return None
        return self._load(tenant, TenantKeyName(folder, number))

    def _load(self, tenant: str, name: TenantKeyName) -> _UnwrappedKey | None:
        wrap = self._useless.get(name) or self._read(name)
        if wrap is None or name in self._useless:
            return None
        if wrap.key_id > _MARK:
            opened = self._masters.unwrap(wrap.wrapped, _bound(name, wrap.key_id))
            if opened is not None:
                return self._note(tenant, name, DataKey(wrap.key_id, opened[1]))
        self._useless[name] = wrap
        if wrap.key_id != _MARK:
            log.error(
                "key of %s in the object store, %s: %s; nothing of it is fetched or exported until then",
                tenant or "common:",
                str(name),
                self._what_it_is(wrap),
            )
        return None

    def _what_it_is(self, wrap: _Wrap) -> str:
        """Return what is wrong with a wrap, and what mends it."""
        erase = "erase the tenant (`kvtier objects erase-tenant`)"
        if wrap.key_id <= _MARK or wrap.master in self._masters.ids:
            return f"is damaged, or was moved; delete it, or {erase}"
        fix = "put its line below the others in encryption.master_key, on top where it is the new one"
        return f"was made by another master key, {wrap.master[:8]}; {fix}; only when it is lost, {erase}"

    def _make(self, tenant: str) -> DataKey:
        """Give a tenant its first key, or the next one after an erasure."""
        folder = tenant_folder(tenant)
        newest = self._newest.get(folder, -1)
        for name in (TenantKeyName(folder, max(newest, 0) + one) for one in range(MAX_TRIES)):
            if name.number > newest:
                key = DataKey(secrets.randbits(32) or 1, secrets.token_bytes(KEY_BYTES))
                if self._create(name, key, self._masters):
                    self.num_wrapped[self._masters.current_id] += 1
                    return self._note(tenant, name, key).key
            if (known := self._load(tenant, name)) is not None:  # another host was sooner
                return known.key
            if (wrap := self._useless.get(name, _Wrap(_MARK))).key_id != _MARK:
                raise CopyError(Cause.NO_KEY, f"{name} {self._what_it_is(wrap)}")
        raise StoreError(StoreProblem.BUSY, f"{MAX_TRIES} numbers of keys were taken meanwhile")

    def _note(self, tenant: str, name: TenantKeyName, key: DataKey) -> _UnwrappedKey:
        self._known[tenant] = known = _UnwrappedKey(name.number, key, HiddenNames(key))
        self._newest[name.tenant] = self._noted[name.tenant] = name.number
        return known

    def _create(self, name: TenantKeyName, key: DataKey, masters: MasterKeys) -> bool:
        wrapped = masters.wrap(key.secret, _bound(name, key.id)).hex()
        content = {"id": key.id, "master": masters.current_id, "wrapped": wrapped}
        return self._opened().create(str(name), memoryview(json.dumps(content).encode()))

    def _read(self, name: TenantKeyName) -> _Wrap | None:
        return _read(self._opened(), name)


def erase_tenant(store: ObjectStore, tenant: str) -> int:
    """Destroy a tenant's key in a store, then delete its bundles; return how many there were.

    Nothing of it can be decrypted any more once the first is done; what another host stores at the same time
    stays unreadable, and ends with its epoch. Raises StoreError; trying again is right.
    """
    folder = tenant_folder(tenant)
    _destroy_key(store, folder)
    num_bundles = 0
    for epoch in store.folders(BUNDLES):
        num_bundles += store.delete(one.key for one in store.objects(f"{BUNDLES}{epoch}/{folder}/"))
    return num_bundles


def _destroy_key(store: ObjectStore, folder: str) -> None:
    """Put the mark of an erasure behind a tenant's newest wrap, then delete the wraps.
    What was listed is not kept: names in a store may be planted. Numbers behind it are asked for by name, and
    the first MAX_TRIES where the listing ended early."""
    listed, is_whole = -1, True
    try:
        for name in _names(store, f"{TENANT_KEYS}{folder}/"):
            listed = max(listed, name.number)
    except StoreError as error:
        if error.problem is not StoreProblem.FOREIGN_NAME:
            raise
        is_whole = False
    following = range(listed + 1, listed + 1 + MAX_TRIES) if is_whole else range(MAX_TRIES)
    unlisted = []
    for name in (TenantKeyName(folder, number) for number in following):
        if store.size(str(name)) is not None:
            unlisted.append(name)
        elif is_whole:
            break
    number = max([listed, *(name.number for name in unlisted)])
    if number < 0 and is_whole:
        return
    if number < 0:
        raise StoreError(StoreProblem.FOREIGN_NAME, f"in {TENANT_KEYS}{folder}/, and the key is not found")
    last = TenantKeyName(folder, number)
    if not _is_mark(_read(store, last)):
        while not store.create(str(mark := last._replace(number=last.number + 1)), memoryview(_ERASED)):
            unlisted.append(last := mark)  # wrapped anew, made or erased meanwhile
    wraps = chain(unlisted, _names(store, f"{TENANT_KEYS}{folder}/") if is_whole else ())
    store.delete(str(name) for name in wraps if not _is_mark(_read(store, name)))


def _is_mark(wrap: _Wrap | None) -> bool:
    return wrap is not None and wrap.key_id == _MARK


def _names(store: ObjectStore, prefix: str) -> Iterator[TenantKeyName]:
    """Yield the names of wraps and marks under `prefix`."""
    for one in store.objects(prefix):
        name = parse_tenant_key(one.key)
        if name is not None:
            yield name


def _read(store: ObjectStore, name: TenantKeyName) -> _Wrap | None:
    """Return what an object holds, with an empty wrap when that is damaged; None when there is none."""
    data = bytearray()
    for chunk in store.stream(str(name), 0, MAX_WRAP_BYTES):
        data += chunk
    if not data:
        return None
    if data == _ERASED:
        return _Wrap(_MARK)
    try:
        content: Mapping[str, Any] = json.loads(data)
        wrap = _Wrap(int(content["id"]), str(content["master"]), bytes.fromhex(content["wrapped"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return _Wrap(_DAMAGED)
    return wrap if 0 < wrap.key_id < 1 << 32 and len(wrap.wrapped) == WRAPPED_BYTES else _Wrap(_DAMAGED)


def _require_master(master: str, masters: MasterKeys) -> None:
    """Raise StoreError(WRONG_KEY) unless the key of this id is one of `masters`."""
    if master not in masters.ids:
        held = f"encryption.master_key holds {', '.join(masters.ids)}"
        fix = "put its line below the others, or name another object.url; nothing was overwritten"
        raise StoreError(StoreProblem.WRONG_KEY, f"{master[:8]}, and {held}; {fix}")


def _bound(name: TenantKeyName, key_id: int) -> bytes:
    """Return what a wrapped key is bound to: under another name it is none."""
    return b"kvtier fleet key" + key_id.to_bytes(4, "big") + str(name).encode()
