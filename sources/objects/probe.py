"""Tries what kvtier needs of a store, with a small bundle that is deleted again, and says what is missing."""

import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ...tiers.base import CopyError
from .bundle import StoredFragment, write_bundle
from .inventory import verify_object
from .keys import Epochs, bundle_key
from .layout import BundleChain, BundleError
from .lifecycle import judge_rule
from .problems import StoreError, StoreProblem
from .store import ObjectStore

TENANT: Final = "kvtier check"  # no daemon's: a tenant's name has a kind in front
CLOCKS: Final = "v1/c/"  # objects that are deleted at once: when they were written is the store's time
MAX_CLOCK_DIFFERENCE_S: Final = 3600.0
MAX_JUMP_S: Final = 900.0  # of a host's clock, without another look at the store's
_WITHOUT_LISTING: Final = ("list", "create", "create only", "ranges")
_GROUPS, _GROUP_BYTES = 4, 50_000


class ProbeResult(NamedTuple):
    """One thing that was tried. `problem` is empty when it works."""

    name: str
    problem: str


class StoreProbe:
    """Tries one store. `epoch_days`: of an epoch, which decides what its lifecycle rule has to be."""

    def __init__(self, store: ObjectStore, epoch_days: int) -> None:
        self._store = store
        self._epochs = Epochs(epoch_days, is_endless=store.evicts)
        self._bundle, chain = _small_bundle()
        epoch, *older = self._epochs.alive(time.time())
        self._key = bundle_key(epoch, TENANT, chain.namespace_digest, chain.names[-1])
        self._copied = self._key.in_epoch((older or [epoch])[-1])

    def results(self) -> Iterator[ProbeResult]:
        """Yield what was tried, in order, and delete at the end what was stored.
        Ends early when nothing can be stored."""
        steps: Sequence[tuple[str, Callable[[], str]]] = (
            ("list", self._list),
            ("create", self._create),
            ("create only", self._create_again),
            ("listed at once", self._is_listed),
            ("ranges", self._read),
            ("copy inside", self._copy),
            ("clock", self._compare_clocks),
            *((("lifecycle", self._judge_lifecycle),) if self._store.has_expiry else ()),
        )
        if not self._store.has_listing:
            steps = [(name, step) for name, step in steps if name in _WITHOUT_LISTING]
        try:
            for name, step in steps:
                problem = self._tried(step)
                yield ProbeResult(name, problem)
                if problem and name in ("list", "create"):
                    return
        finally:
            problem = self._tried(self._delete)
        yield ProbeResult("delete", problem)

    def _tried(self, step: Callable[[], str]) -> str:
        try:
            return step()
        except (StoreError, BundleError, CopyError, FileNotFoundError) as error:
            return str(error)

    def _list(self) -> str:
        self._store.check_bucket()
        return ""

    def _create(self) -> str:
        is_new = self._store.create(str(self._key), self._bundle.data)
        return "" if is_new else "it says that a name is taken which was drawn a moment ago"

    def _create_again(self) -> str:
        if self._store.create(str(self._key), memoryview(bytes(16))):
            return "it replaces objects: it ignores If-None-Match, and bundles would be overwritten"
        return ""

    def _is_listed(self) -> str:
        found = [one.key for one in self._store.objects(f"{str(self._key).rpartition('/')[0]}/")]
        return "" if found == [str(self._key)] else "a listing does not show what was stored; found later"

    def _read(self) -> str:
        verify_object(self._store, str(self._key), len(self._bundle))
        return ""

    def _copy(self) -> str:
        if not self._store.copy(str(self._key), str(self._copied)):
            return "what was stored cannot be copied: it is not there"
        verify_object(self._store, str(self._copied), len(self._bundle))
        return ""

    def _compare_clocks(self) -> str:
        return _clock_problem(self._store, str(self._key), time.time())

    def _judge_lifecycle(self) -> str:
        header = self._store.expiry(str(self._key))
        return judge_rule(header, time.time(), self._epochs.num_days)

    def _delete(self) -> str:
        keys = [str(key) for key in (self._key, self._copied)]
        self._store.delete(keys)
        if not self._store.has_listing:
            del keys[1:]
        left = [key for key in keys if self._store.size(key) is not None]
        return f"still there after a delete: {', '.join(left)}" if left else ""


def clock_problem(store: ObjectStore, now_s: float) -> str:
    """Return how the store's clock differs from `now_s`; empty within an hour.
    Stores an empty object and deletes it. Raises StoreError."""
    folder = f"{CLOCKS}{secrets.token_hex(16)}/"
    key = f"{folder}0"
    store.create(key, memoryview(b""))
    try:
        return _clock_problem(store, key, now_s)
    finally:
        store.delete([key])


def _clock_problem(store: ObjectStore, key: str, now_s: float) -> str:
    """Return how the time at which `key` was just stored differs from `now_s`."""
    folder = f"{key.rpartition('/')[0]}/"
    written_at_s = next((one.modified_at_s for one in store.objects(folder) if one.key == key), None)
    if written_at_s is None:
        return "the store's clock is not known: a listing does not show what was stored"
    return _difference(now_s - written_at_s)


def _difference(ahead_s: float) -> str:
    """Return in words how far a host's clock is ahead of its store's; empty within an hour."""
    if abs(ahead_s) <= MAX_CLOCK_DIFFERENCE_S:
        return ""
    ahead = "ahead of" if ahead_s > 0 else "behind"
    return f"this host's clock is {abs(ahead_s) / 3600:.1f} hours {ahead} the store's; set it"


class HostClock:
    """Compares a host's clock with the time of its store, once and when it has jumped.

    `now_s`: the clock, in seconds since 1970. Thread-safe."""

    def __init__(self, store: ObjectStore, now_s: Callable[[], float]) -> None:
        self._store = store
        self._now_s = now_s
        self._base_s = -math.inf  # what the clock was ahead of `time.monotonic()` when it was right

    def check(self, key: str) -> None:
        """Delete `key`, which was just stored, and raise StoreError when the clock is off.
        One that cannot be compared is believed."""
        base_s = self._now_s() - time.monotonic()
        if self._store.evicts or abs(base_s - self._base_s) < MAX_JUMP_S:
            return
        problem = ""
        with suppress(StoreError):
            if written_at_s := self._store.modified_at_s(key):
                problem = _difference(self._now_s() - written_at_s)
        if not problem:
            self._base_s = base_s
            return
        with suppress(StoreError):
            self._store.delete([key])
        raise StoreError(StoreProblem.WRONG_CLOCK, problem)


def _small_bundle() -> tuple[npt.NDArray[np.uint8], BundleChain]:
    """Return a bundle under names that were never used, and its chain."""
    chain = BundleChain(secrets.token_bytes(32), b"", 0, (secrets.token_bytes(32), secrets.token_bytes(32)))
    payloads = [secrets.token_bytes(_GROUP_BYTES) for _ in range(2 * _GROUPS)]
    fragments = [StoredFragment(memoryview(one), len(one), xxhash.xxh3_128_digest(one)) for one in payloads]
    return write_bundle(chain, _GROUPS, fragments), chain
