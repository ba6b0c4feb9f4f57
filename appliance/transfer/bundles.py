"""Bundles between memory and an object store. Blocking: for the threads of object_edge.py.

    search    HEAD of bundle 1, 2, 4, 8 … of a chain, in each epoch that is read
    fetch     one request for head and payloads, two when blocks are here already; each fragment is verified
              where it is to stay
    export    HEAD; a copy inside the store when an older epoch has it; else one PUT that creates. It is
              deleted where the store's time says that this host's clock is off: no host would look there

Fragments are encoded on their way out where a codec pays, by an exact one: other hosts get what was put.
With keys of a fleet every fragment is encrypted, names are hidden, and nothing that is plain is believed.
Whatever is wrong with an object, it is a miss, with a cause. What was found in which epoch is remembered, so
that the fetch after a search asks once. Objects are never overwritten, so one that was wrong twice is not
asked for any more, nor copied on: its bundle is read from another epoch, and stored again in the next one.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from ...sources.objects.bundle import (
    StoredFragment,
    encode_fragment,
    encrypt_fragments,
    read_fragment,
    write_bundle,
)
from ...sources.objects.finding import MissingNames, gallop
from ...sources.objects.fleet_keys import FleetKeys
from ...sources.objects.inventory import read_head
from ...sources.objects.keys import NUM_ALIVE, BundleKey, Epochs, bundle_key
from ...sources.objects.layout import (
    BundleChain,
    BundleError,
    BundleHead,
    head_bytes,
    starts_of,
    unpack_head,
)
from ...sources.objects.probe import HostClock
from ...sources.objects.problems import StoreError, StoreProblem
from ...sources.objects.store import CHUNK_BYTES, ObjectStore
from ...tiers.base import Buffer, Cause, CopyError, CopyItem, CopyOutcome, Engine, MemoryEngine
from ...tiers.block import FragmentLabel, NamespaceIdentity, Tier, tenant_of
from ...tiers.codecs.base import Codec, shape_of
from ...tiers.codecs.records import RecordCodecs
from ...tiers.cold.record_io import Opener
from ...tiers.encryption.envelope import Envelopes
from ...tiers.payload import checksum, copy
from ..core.instructions import BundleBlocks, ExportBundle, FetchBundle, SearchBundles

#: The exact codec of each layer group of a namespace; None: as they are. Called in threads.
ExportCodecs: TypeAlias = Callable[[NamespaceIdentity], Sequence[Codec | None]]
MAX_EPOCHS_REMEMBERED: Final = 65_536
TRIAL_REQUESTS: Final = 8
DAMAGE_REMEMBERED_S: Final = NUM_ALIVE * 86_400.0  # as long as an object of one day's epoch is read
#: What an object is to blame for, and nothing on the way to it.
OF_OBJECTS: Final = frozenset(
    {
        Cause.WRONG_CHECKSUM,
        Cause.WRONG_IDENTITY,
        Cause.SHORT_TRANSFER,
        Cause.UNREADABLE,
        Cause.NOT_AUTHENTIC,
    }
)


class Stop(Exception):
    """Time is over, or the daemon ends: nothing more is read."""


class ChainFound(NamedTuple):
    """How a search ended; see SourceSearched."""

    num_found: int
    num_possible: int


class FleetEncryption(NamedTuple):
    """What the bundles of a host are encrypted with."""

    keys: FleetKeys
    envelopes: Envelopes


class BundleTransfer:
    """Carries out searches, fetches and exports. Thread-safe.

    `engines`: of the memory tiers. Without `encryption` bundles are stored, and read, as they are. `check` is
    called between chunks with the deadline of a fetch, and raises Stop. `now_s`: seconds since 1970. Methods
    raise StoreError when the store failed.
    """

    def __init__(
        self,
        store: ObjectStore,
        engines: Mapping[Tier, Engine],
        epochs: Epochs,
        now_s: Callable[[], float],
        check: Callable[[float], None],
        encryption: FleetEncryption | None = None,
        codecs: ExportCodecs | None = None,
    ) -> None:
        self._store = store
        self._codecs = codecs
        self._encryption = encryption
        self._namespaces: dict[bytes, NamespaceIdentity] = {}  # by digest, as in heads
        envelopes = encryption.envelopes if encryption is not None else None
        self._opener = Opener(self._namespaces, RecordCodecs(self._namespaces), envelopes)
        self._engines = engines
        self._epochs = epochs
        self._now_s = now_s
        self._check = check
        self._used_memory: list[Any] = []  # of former exports, (n,) uint8: as many as ran at a time
        self._epoch_of: dict[tuple[bytes, bytes], str] = {}  # bundles that were found
        self._clock = HostClock(store, now_s)
        self._damage_lock = threading.Lock()
        self._was_wrong, self._is_damaged = (MissingNames(DAMAGE_REMEMBERED_S) for _ in range(2))  # keys

    def search(self, search: SearchBundles) -> ChainFound:
        """Return how far a chain goes on in the store."""
        if not self._has_key(search.identity):
            return ChainFound(0, 0)
        names, probes, num_known, epoch = search.names, gallop(len(search.names)), 0, ""
        index = next(probes)
        try:
            while True:
                found = self._where(search.identity, names[index], epoch)
                if found is not None:  # bundles of one chain are mostly of one epoch
                    epoch = found.epoch
                    for name in names[num_known:index]:
                        self._epoch_of.setdefault((search.identity.digest, name), epoch)
                    num_known = index + 1
                index = probes.send(found is not None)
        except StopIteration as end:
            return ChainFound(end.value.num_found, end.value.num_possible)

    def _has_key(self, identity: NamespaceIdentity) -> bool:
        """Whether the store can have anything of a tenant: it is not encrypted, or has a key."""
        if self._encryption is None:
            return True
        self._encryption.keys.refresh()
        return self._encryption.keys.names(tenant_of(identity.domain)) is not None

    def _chain(self, bundle: BundleBlocks) -> BundleChain:
        """Return the chain of a bundle as it stands in its head. Raises CopyError: NO_KEY."""
        identity = bundle.identity
        chain = BundleChain(
            identity.digest, bundle.parent_hash, bundle.position, tuple(bundle.names), identity.profile_digest
        )
        if self._encryption is not None:
            names = self._encryption.keys.names(tenant_of(identity.domain))
            if names is None:
                raise CopyError(Cause.NO_KEY)
            chain = names.chain(chain)
        self._namespaces[chain.namespace_digest] = identity
        return chain

    def _where(
        self, identity: NamespaceIdentity, name: bytes, likely: str = "", *, is_new: bool = False
    ) -> BundleKey | None:
        """Return the key of a bundle, in the first epoch that has it; None when none has.
        Epoch `likely` is asked first where it is not known, then newer ones first. The others are asked at
        once when that has not got it; all of them where the bundle `is_new`, most likely in none."""
        keys = self._keys(identity, name, likely)
        num_first = len(keys) if is_new else 1
        for some in (keys[:num_first], keys[num_first:]):
            found = self._store.first_there([str(key) for key in some])
            if found is not None:
                if len(self._epoch_of) >= MAX_EPOCHS_REMEMBERED:
                    self._epoch_of.clear()
                self._epoch_of[identity.digest, name] = some[found].epoch
                return some[found]
        return None

    def _keys(self, identity: NamespaceIdentity, name: bytes, likely: str = "") -> list[BundleKey]:
        """Return the keys that a bundle may have, the likeliest first."""
        epochs = self._epochs.alive(self._now_s())
        known = self._epoch_of.get((identity.digest, name), likely)
        if known in epochs:
            epochs.sort(key=lambda epoch: epoch != known)
        keys = [self._key(identity, name, epoch) for epoch in epochs]
        with self._damage_lock:
            return [key for key in keys if not self._is_damaged.has(str(key), self._now_s())]

    def _was_found_wrong(self, key: str) -> None:
        """Remember an object that is not what its name says: once may be chance, on the way or in memory."""
        with self._damage_lock:
            is_second = self._was_wrong.has(key, now := self._now_s())
            (self._is_damaged if is_second else self._was_wrong).add(key, now)

    def _key(self, identity: NamespaceIdentity, name: bytes, epoch: str) -> BundleKey:
        """Return the key of a bundle in one epoch. Raises CopyError: NO_KEY."""
        tenant, digest = tenant_of(identity.domain), identity.digest
        if self._encryption is None:
            return bundle_key(epoch, tenant, digest, name)
        if (names := self._encryption.keys.names(tenant)) is None:
            raise CopyError(Cause.NO_KEY)
        return bundle_key(epoch, tenant, names.namespace(digest), names.block(digest, name))

    # --------------------------------------------------------------------------------------- fetch

    def fetch(self, fetch: FetchBundle, landed: Callable[[int, list[CopyOutcome]], None]) -> int:
        """Bring a bundle's blocks; `landed` is called with each batch as it ends, (copy, outcomes).

        Returns the bytes received. Batches that were not reported when this raises have not arrived, and
        nothing writes into their places any more.
        """
        if not self._has_key(fetch.bundle.identity):
            raise CopyError(Cause.NO_KEY)
        chain, geometry = self._chain(fetch.bundle), fetch.bundle.identity.geometry
        length = head_bytes(len(chain.names), geometry.num_groups, is_encrypted=chain.is_hidden)
        items = [item for _, batch in fetch.batches for item in batch]
        is_whole = (items[0].source, items[0].label.group) == (0, 0)
        most = length  # bytes of the first request; what is stored is not longer than what was put
        if is_whole:
            most = starts_of(np.repeat(geometry.fragment_bytes, len(chain.names)), length)[1]

        def check() -> None:
            self._check(fetch.deadline_at)

        for key in self._keys(fetch.bundle.identity, fetch.bundle.names[-1]):
            check()
            try:
                reader = _Reader(self._store.stream(str(key), 0, most), 0, check)
                if not (received := reader.take(length)):
                    continue
                head = unpack_head(received)
                head.require(chain, geometry)
                if not is_whole:
                    start = head.span(items[0].label.group, items[0].source)[0]
                    end = head.span(items[-1].label.group, items[-1].source)[1]
                    reader = _Reader(self._store.stream(str(key), start, end), start, check)
                self._read_payloads(reader, head, fetch, landed, str(key))
            except (BundleError, CopyError) as failure:
                if cause_of(failure) in OF_OBJECTS:
                    self._was_found_wrong(str(key))
                raise
            return reader.num_received + (0 if is_whole else length)
        raise CopyError(Cause.SOURCE_GONE, "no epoch has it")

    def _read_payloads(
        self,
        reader: "_Reader",
        head: BundleHead,
        fetch: FetchBundle,
        landed: Callable[[int, list[CopyOutcome]], None],
        key: str,
    ) -> None:
        """Read and report all batches; a damaged object is remembered before that is reported."""
        memory, is_wrong = self._memory(fetch.target), False
        for copy_number, batch in fetch.batches:
            self._check(fetch.deadline_at)
            outcomes = [self._read_one(reader, head, item, memory) for item in batch]
            if not is_wrong and any(one.cause in OF_OBJECTS for one in outcomes):
                is_wrong = True
                self._was_found_wrong(key)
            landed(copy_number, outcomes)

    def _read_one(
        self, reader: "_Reader", head: BundleHead, item: CopyItem, memory: MemoryEngine
    ) -> CopyOutcome:
        """Read one fragment into its place. Raises CopyError when the object ends."""
        group, block = item.label.group, item.source
        label = head.label(group, block)
        reader.skip_to(head.span(group, block)[0])
        into = memory.view(item.target, label.raw_length)
        if label.is_spent:  # of a daemon that exports more than this one does
            return CopyOutcome(Cause.UNREADABLE)
        stored = np.empty(label.stored_length, np.uint8).data if label.codec_id else into
        reader.fill(stored)
        try:
            return CopyOutcome(None, read_fragment(head, group, block, stored, into, self._opener))
        except CopyError as failure:
            return CopyOutcome(failure.cause)

    def _memory(self, tier: Tier) -> MemoryEngine:
        engine = self._engines[tier]
        assert hasattr(engine, "view"), f"{tier.label} has no memory of this process"
        return engine  # type: ignore[return-value]

    # -------------------------------------------------------------------------------------- export

    def export(self, export: ExportBundle) -> int:
        """Store a bundle, unless the store has it. Returns the bytes sent.
        Raises CopyError when what lies in memory is not what was put, or the tenant is being erased."""
        identity, name = export.bundle.identity, export.bundle.names[-1]
        if self._encryption is not None:
            self._encryption.keys.refresh()
            self._encryption.keys.key_for_writing(tenant_of(identity.domain))
        present = self._key(identity, name, self._epochs.present(self._now_s()))
        with self._damage_lock:
            if self._is_damaged.has(str(present), self._now_s()):
                raise CopyError(Cause.WRONG_IDENTITY, "its name is taken by an object that is damaged")
        found = self._where(identity, name, is_new=True)
        if found == present:
            return 0
        if found is not None and self._copied(found, present):
            self._clock.check(str(present))
            self._epoch_of[identity.digest, name] = present.epoch
            return 0
        chain = self._chain(export.bundle)
        codecs = self._codecs(identity) if self._codecs is not None else ()
        fragments = [self._encoded(identity, codecs, *fragment) for fragment in export.fragments]
        if self._encryption is not None:
            fragments = encrypt_fragments(chain, fragments, self._encryption.envelopes, identity.domain)
        memory = None
        with suppress(IndexError):  # new memory costs as much again as the copy and its hash
            memory = self._used_memory.pop()
        payload = write_bundle(chain, identity.geometry.num_groups, fragments, memory)
        if is_new := self._store.create(str(present), payload.data):
            self._clock.check(str(present))
        self._epoch_of[identity.digest, name] = present.epoch
        self._used_memory.append(payload.base)  # not after an error: a request may still be sending it
        return len(payload) if is_new else 0

    def read_s(self, export: ExportBundle) -> float:
        """Return the seconds in which the store brings a bundle that `export` has stored; 0: it did not.

        Read by as many requests at once as fetches have. The sooner of two: the first one may connect."""
        identity, seconds = export.bundle.identity, []
        most = sum(label.raw_length for _, _, label in export.fragments)
        part = max(CHUNK_BYTES, -(-most // TRIAL_REQUESTS))
        try:
            key = str(self._keys(identity, export.bundle.names[-1])[0])
            with ThreadPoolExecutor(TRIAL_REQUESTS, "kvtier-trial") as pool:
                for _ in range(2):
                    began_at = time.monotonic()
                    if not sum(pool.map(partial(self._read_part, key, part), range(0, most, part))):
                        return 0.0  # it is gone
                    seconds.append(time.monotonic() - began_at)
        except (StoreError, CopyError, IndexError, Stop):
            return 0.0
        return min(seconds)

    def _read_part(self, key: str, most: int, start: int) -> int:
        """Return how many of the next `most` bytes there are."""
        num_bytes = 0
        for chunk in self._store.stream(key, start, start + most):
            self._check(float("inf"))
            num_bytes += len(chunk)
        return num_bytes

    def _copied(self, source: BundleKey, target: BundleKey) -> bool:
        """Return whether the store copied an object; False as well where it copies none, and for one that
        is no bundle of this name: its head is read, its payloads are not."""
        try:
            if (num_bytes := self._store.size(str(source))) is None:
                return False
            read_head(self._store, str(source), num_bytes)
        except (BundleError, FileNotFoundError):
            self._was_found_wrong(str(source))
            return False
        try:
            return self._store.copy(str(source), str(target))
        except StoreError as failure:
            if failure.problem is not StoreProblem.UNSUPPORTED:
                raise
            return False

    def _encoded(
        self,
        identity: NamespaceIdentity,
        codecs: Sequence[Codec | None],
        tier: Tier,
        place: int,
        label: FragmentLabel,
    ) -> StoredFragment:
        """Return a fragment as it is to be stored. Raises CopyError when it is not what was put."""
        raw = self._memory(tier).view(place, label.raw_length)
        codec = codecs[label.group] if codecs else None
        if (codec is not None or self._encryption is not None) and checksum(raw) != label.checksum:
            raise CopyError(Cause.WRONG_CHECKSUM, "a raw payload is not what its checksum says")
        if codec is None:
            return StoredFragment(raw, label.raw_length, label.checksum)
        return encode_fragment(raw, label.checksum, codec, shape_of(identity.geometry, label.group))


class _Reader:
    """Reads on in a stream of chunks, which begins at byte `position` of its object."""

    def __init__(self, chunks: Iterator[memoryview], position: int, check: Callable[[], None]) -> None:
        self.num_received = 0  # bytes
        self._chunks = chunks
        self._position = position  # of the next byte that is read
        self._check = check
        self._rest = memoryview(b"")

    def take(self, most: int) -> bytes:
        """Return the next bytes, fewer than `most` when the object ends before."""
        taken = bytearray()
        with suppress(CopyError):
            while len(taken) < most:
                taken += self._take(most - len(taken))
        return bytes(taken)

    def skip_to(self, position: int) -> None:
        """Read until byte `position` is the next one. Raises CopyError when the object ends before it."""
        assert position >= self._position
        while self._position < position:
            self._take(position - self._position)

    def fill(self, into: Buffer) -> None:
        """Fill `into` with the next bytes. Raises CopyError when the object ends before it is full."""
        filled = 0
        while filled < len(into):
            part = self._take(len(into) - filled)
            copy(into[filled : filled + len(part)], part)
            filled += len(part)

    def _take(self, most: int) -> memoryview:
        """Return the next bytes, at most so many, at least one. Raises CopyError and what `check` raises."""
        while not self._rest:
            self._check()
            chunk = next(self._chunks, None)
            if chunk is None:
                raise CopyError(Cause.SHORT_TRANSFER, f"it ends at byte {self._position}")
            self._rest = chunk
            self.num_received += len(chunk)
        part, self._rest = self._rest[:most], self._rest[most:]
        self._position += len(part)
        return part


def cause_of(error: BaseException) -> Cause:
    """Return why the batches of a fetch that ended with `error` did not arrive."""
    if isinstance(error, CopyError):
        return error.cause
    if isinstance(error, Stop):
        return Cause.CANCELLED
    return Cause.WRONG_IDENTITY if isinstance(error, BundleError) else Cause.IO_ERROR
