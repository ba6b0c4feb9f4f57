"""The namespaces that slot headers name by number, in memory that outlives the daemon.

A list that grows: each entry has its length, a check and the id of its namespace before it, and what a
killed daemon left half written ends the list. A full list is written anew, with the present namespaces. It
is full at twice the namespaces that there can be: so registering one writes one entry, nearly always, and
those that were forgotten since leave space for those that there are.

A later entry of a namespace is in force in place of a former one. One that begins with ERASED says that its
tenant is being erased: a daemon that finds it takes nothing of this namespace over.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Mapping

from ...tiers.block import NamespaceIdentity, tenant_of
from ...tiers.cold.manifest import parse_identity
from ...tiers.memory import memfd
from ...tiers.memory.keeper import Keeper
from ..core.options import PlannerOptions

NAME = "kvtier-namespaces-3"
MAX_TEXTS_BYTES = 1024  # of the free texts of an identity together
MAX_IDENTITY_BYTES = MAX_TEXTS_BYTES + 512  # with digests, numbers and tags
_HEAD = struct.Struct("<III")  # length, crc32 of what follows, id
MAX_ENTRIES = 2 * PlannerOptions().max_namespaces
#: Of addresses: pages are taken as they are written. Present are MAX_ENTRIES at most, because a start names
#: all that it finds, and as many may be entered with them.
NUM_BYTES = 2 * MAX_ENTRIES * (_HEAD.size + MAX_IDENTITY_BYTES)
ERASED = b"\0"  # no identity begins with it


class NamespaceBook:
    """What a keeper holds of namespaces, by id. `inherited` are those of before that were not erased."""

    def __init__(self, keeper: Keeper, num_bytes: int = NUM_BYTES) -> None:
        inherited = keeper.take(NAME)
        if inherited is None:
            self._descriptor = memfd.create(NAME, num_bytes)
            self._mapping = mmap.mmap(self._descriptor, num_bytes)
            keeper.keep(NAME, self._descriptor)
            memfd.seal(self._descriptor, memfd.SEALS_FIXED_SIZE)
        else:
            self._descriptor, self._mapping = inherited
        self._end = self._num_entries = 0
        self.identities: dict[int, NamespaceIdentity] = {}
        self._erased: set[int] = set()
        while self._read():
            pass
        self.inherited = {n: one for n, one in self.identities.items() if n not in self._erased}
        self._interrupted = set(self._erased)  # erased by a daemon that died meanwhile
        #: Returns the namespaces that there are, for a list that is full.
        self.present: Callable[[], Mapping[int, NamespaceIdentity]] = lambda: self.identities

    def note(self, number: int, identity: NamespaceIdentity) -> None:
        """Enter a namespace, unless it is there."""
        if self.identities.get(number) != identity:
            self._enter({number: identity})

    def numbers_of(self, tenant: str) -> set[int]:
        """Return the namespaces of a tenant."""
        return {n for n, one in self.identities.items() if tenant_of(one.domain) == tenant}

    def erase(self, tenant: str) -> None:
        """Let no later daemon take over what memory holds of a tenant, from now until `admit`."""
        numbers = self.numbers_of(tenant)
        self._erased |= numbers
        self._interrupted -= numbers
        self._enter({number: self.identities[number] for number in numbers})

    def admit(self, tenant: str) -> None:
        """Let later daemons take over a tenant's memory again: none of its slots is from before `erase`."""
        self._admit(self.numbers_of(tenant))

    def slots_read(self) -> None:
        """Complete the erasures that the death of a daemon cut off: their slots were all emptied."""
        self._admit(self._interrupted & self.identities.keys())
        self._interrupted = set()

    def _admit(self, numbers: set[int]) -> None:
        self._erased -= numbers
        self._enter({number: self.identities[number] for number in numbers})

    def _enter(self, entries: Mapping[int, NamespaceIdentity]) -> None:
        """Append entries, or write all of them anew where these find no space."""
        is_full = self._num_entries + len(entries) > MAX_ENTRIES
        if not is_full and all(self._write(*one) for one in entries.items()):
            return
        present = {**self.present(), **entries}
        self._end, self._num_entries, self.identities = 0, 0, {}
        for one in present.items():
            self._write(*one)  # slots of namespaces that find no space do not outlive the daemon

    def close(self) -> None:
        """Unmap. What the keeper holds stays."""
        self._mapping.close()
        os.close(self._descriptor)

    def _write(self, number: int, identity: NamespaceIdentity) -> bool:
        """Append an entry; returns False when there is no space for it."""
        entry = (ERASED if number in self._erased else b"") + identity.canonical()
        start, end = self._end, self._end + _HEAD.size + len(entry)
        if end + _HEAD.size > len(self._mapping):
            return False
        self._mapping[start : end + _HEAD.size] = bytes(_HEAD.size) + entry + bytes(_HEAD.size)
        _HEAD.pack_into(self._mapping, start, len(entry), zlib.crc32(entry, number), number)  # it counts
        self._end = end
        self._num_entries += 1
        self.identities[number] = identity
        return True

    def _read(self) -> bool:
        """Take the next entry; returns False at the end of the list."""
        if self._end + _HEAD.size > len(self._mapping):
            return False
        length, check, number = _HEAD.unpack_from(self._mapping, self._end)
        start = self._end + _HEAD.size
        entry = self._mapping[start : start + length]
        if not length or len(entry) < length or zlib.crc32(entry, number) != check:
            return False
        self._end = start + length
        self._num_entries += 1
        is_erased = entry.startswith(ERASED)
        try:
            self.identities[number] = parse_identity(entry.removeprefix(ERASED))
        except ValueError:
            return False
        (self._erased.add if is_erased else self._erased.discard)(number)
        return True
