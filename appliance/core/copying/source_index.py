"""SourceIndex: bundles that the source was said to hold or to lack, and how fast its store is.

Hints, bounded in number and age, divided among tenants (remembered.py).

What a store has not is not asked for again for a minute: a question costs a request and a round trip. What
it has is believed for an hour, after which an export asks again: a bundle may have expired meanwhile. What
only other hosts have, or did not bring, is asked of memory, so it is believed for seconds.
"""

from typing import Final

from ....tiers.block import tenant_of
from ....v1.bundles import blocks_per_bundle
from ..catalog.catalog import NamespaceEntry
from ..catalog.core_state import CoreState
from ..remembered import Remembered
from .source_speed import STORE_LATENCY_S, SourceSpeed

PRESENT_S: Final = 3600.0
MISSING_S: Final = 60.0
HOST_S: Final = 5.0  # of what only other hosts have, or lack
MAX_NAMES = 65_536

#: Whether a bundle is there, until when that is believed, whether a store has it.
Known = tuple[bool, float, bool]


class SourceIndex:
    """What is known of the source's bundles, by namespace and name."""

    def __init__(self, core: CoreState) -> None:
        self._core = core
        self.store_speed = SourceSpeed(STORE_LATENCY_S)
        #: By namespace and name.
        self._known: Remembered[tuple[int, bytes], Known] = Remembered(MAX_NAMES)
        self._num_blocks: dict[int, int] = {}  # of a bundle, by namespace

    def __len__(self) -> int:
        return len(self._known)

    def num_blocks(self, namespace: NamespaceEntry) -> int:
        """Return the blocks of each bundle of a namespace."""
        number = self._num_blocks.get(namespace.id)
        if number is None:
            if len(self._num_blocks) >= self._core.options.max_namespaces:
                self._num_blocks.clear()
            number = self._num_blocks[namespace.id] = blocks_per_bundle(namespace.identity.geometry)
        return number

    def note(self, namespace_id: int, name: bytes, is_present: bool, *, is_stored: bool = True) -> None:
        """Remember that the bundle is there, or is not.

        Beyond MAX_NAMES the oldest one of the tenant that has the most is forgotten.

        `is_stored`: a store has it or lacks it, not only other hosts."""
        if is_present and not is_stored and self.is_stored(namespace_id, name):
            return
        believed_s = HOST_S if not is_stored else PRESENT_S if is_present else MISSING_S
        tenant, value = self._tenant_of(namespace_id), (is_present, self._core.now + believed_s, is_stored)
        self._known.put(tenant, (namespace_id, name), value)

    def is_present(self, namespace_id: int, name: bytes) -> bool | None:
        """Return whether the bundle is there, as far as known; None: it is not known."""
        is_present, until, _ = self._get(namespace_id, name)
        return is_present if until > self._core.now else None

    def is_stored(self, namespace_id: int, name: bytes) -> bool:
        """Return whether a store is known to have the bundle."""
        is_present, until, is_stored = self._get(namespace_id, name)
        return is_present and is_stored and until > self._core.now

    def _get(self, namespace_id: int, name: bytes) -> Known:
        return self._known.get(self._tenant_of(namespace_id), (namespace_id, name)) or (False, 0.0, False)

    def _tenant_of(self, namespace_id: int) -> str:
        namespace = self._core.catalog.namespaces.get(namespace_id)
        return tenant_of(namespace.identity.domain) if namespace is not None else ""
