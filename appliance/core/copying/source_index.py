"""SourceIndex: which bundles the source was said to hold or to lack. Hints, bounded in number and age.

What is not there is not asked for again for a minute: a question costs a request and a round trip. What is
there is believed for an hour, after which an export asks again: a bundle may have expired meanwhile.
"""

from collections import OrderedDict
from typing import Final

from ....sources.objects.limits import blocks_per_bundle
from ..catalog.catalog import NamespaceEntry
from ..catalog.core_state import CoreState

PRESENT_S: Final = 3600.0
MISSING_S: Final = 60.0
MAX_NAMES: Final = 65_536


class SourceIndex:
    """What is known of the source's bundles, by namespace and name."""

    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._known: OrderedDict[tuple[int, bytes], tuple[bool, float]] = OrderedDict()  # until when
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

    def note(self, namespace_id: int, name: bytes, is_present: bool) -> None:
        """Remember that the bundle is there, or is not. The oldest one is forgotten beyond MAX_NAMES."""
        key = (namespace_id, name)
        self._known.pop(key, None)
        self._known[key] = (is_present, self._core.now + (PRESENT_S if is_present else MISSING_S))
        if len(self._known) > MAX_NAMES:
            self._known.popitem(last=False)

    def is_present(self, namespace_id: int, name: bytes) -> bool | None:
        """Return whether the bundle is there, as far as known; None: it is not known."""
        is_present, until = self._known.get((namespace_id, name), (None, 0.0))
        return is_present if until > self._core.now else None
