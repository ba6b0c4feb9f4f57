"""SourceIndex: bundles that the source was said to hold or to lack, and how fast its store is.

Hints, bounded in number and age.

What is not there is not asked for again for a minute: a question costs a request and a round trip. What is
there is believed for an hour, after which an export asks again: a bundle may have expired meanwhile.
"""

from collections import OrderedDict
from typing import Final

from ....sources.objects.limits import blocks_per_bundle
from ..catalog.catalog import NamespaceEntry
from ..catalog.core_state import CoreState
from .source_speed import STORE_LATENCY_S, SourceSpeed

PRESENT_S: Final = 3600.0
HOST_PRESENT_S: Final = 5.0  # of what only other hosts have: that they do is asked of memory
MISSING_S: Final = 60.0
MAX_NAMES: Final = 65_536


class SourceIndex:
    """What is known of the source's bundles, by namespace and name."""

    def __init__(self, core: CoreState) -> None:
        self._core = core
        self.store_speed = SourceSpeed(STORE_LATENCY_S)
        #: Whether it is there, until when that is believed, whether a store has it.
        self._known: OrderedDict[tuple[int, bytes], tuple[bool, float, bool]] = OrderedDict()
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
        """Remember that the bundle is there, or is not. The oldest one is forgotten beyond MAX_NAMES.

        `is_stored`: a store has it, not only other hosts."""
        key = (namespace_id, name)
        if is_present and not is_stored and self.is_stored(namespace_id, name):
            return
        self._known.pop(key, None)
        present_s = PRESENT_S if is_stored else HOST_PRESENT_S
        believed_s = present_s if is_present else MISSING_S
        self._known[key] = (is_present, self._core.now + believed_s, is_stored)
        if len(self._known) > MAX_NAMES:
            self._known.popitem(last=False)

    def is_present(self, namespace_id: int, name: bytes) -> bool | None:
        """Return whether the bundle is there, as far as known; None: it is not known."""
        is_present, until, _ = self._known.get((namespace_id, name), (None, 0.0, False))
        return is_present if until > self._core.now else None

    def is_stored(self, namespace_id: int, name: bytes) -> bool:
        """Return whether a store is known to have the bundle."""
        is_present, until, is_stored = self._known.get((namespace_id, name), (False, 0.0, False))
        return is_present and is_stored and until > self._core.now
