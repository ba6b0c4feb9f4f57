"""Searches: what the source is being asked for. Two acquires of one chain share a search.

Of MAX_SEARCHES under way a tenant has its share: each may take a request for every few of 4,096 names, and
what it finds out is a hint.
"""

from collections.abc import Sequence
from typing import Final

from ....tiers.block import tenant_of
from ..catalog.catalog import NamespaceEntry
from ..catalog.core_state import CoreState
from ..copying.source_index import SourceIndex
from ..events import SourceSearched
from ..instructions import SearchBundles
from ..shares import Shares

MAX_SEARCHES: Final = 256
#: Of the latest search in the chance that the searches of a namespace find something.
SEARCH_WEIGHT: Final = 0.05


class Searches:
    """Searches under way; what they find also says how likely others of their namespace find something."""

    def __init__(self, core: CoreState, index: SourceIndex) -> None:
        self._core = core
        self._index = index
        self._under_way: dict[int, tuple[int, SearchBundles]] = {}  # with the namespace
        self._numbers: dict[tuple[int, bytes], int] = {}  # by namespace, first name
        self._num_begun = 0
        self._shares = Shares(MAX_SEARCHES, core.options.num_tenants)

    def options_changed(self) -> None:
        """Divide them among other tenants."""
        self._shares.resize(MAX_SEARCHES, self._core.options.num_tenants)

    def find(self, namespace_id: int, name: bytes) -> int | None:
        """Return the number of the search under way that begins with a name; None when there is none."""
        return self._numbers.get((namespace_id, name))

    def begin(
        self,
        namespace: NamespaceEntry,
        names: Sequence[bytes],
        bundles: list[bytes],
        num_here: int,
        first: int,
    ) -> int | None:
        """Begin a search unless the same is under way; return its number, None beyond the tenant's share.

        For `bundles` from block `first` on, and the blocks behind the first `num_here` of `names`."""
        key = (namespace.id, bundles[0] if bundles else names[-1])
        number = self._numbers.get(key)
        if number is None:
            if not self._shares.take(tenant_of(namespace.identity.domain), 1):
                self._core.story.count("searches_beyond_share")
                return None
            self._num_begun += 1
            number = self._numbers[key] = self._num_begun
            search = SearchBundles(number, namespace.identity, bundles, names[num_here:], num_here - first)
            self._under_way[number] = namespace.id, search
            self._core.outbox.emit(search)
            self._core.story.count("source_searches")
        return number

    def ended(self, event: SourceSearched) -> None:
        """Note in the index what a search found."""
        namespace_id, search = self._under_way.pop(event.search)
        del self._numbers[namespace_id, search.names[0] if search.names else search.blocks[-1]]
        self._shares.give(tenant_of(search.identity.domain), 1)
        namespace = self._core.catalog.namespaces.get(namespace_id)
        if namespace is None:
            return
        if event.is_answered:
            is_found = event.num_found > 0 or event.num_blocks > 0
            namespace.search_chance += SEARCH_WEIGHT * (is_found - namespace.search_chance)
        for number in range(event.num_found):
            self._index.note(namespace_id, search.names[number], True, is_stored=event.is_stored)
        if 0 <= event.num_possible < len(search.names):
            self._index.note(namespace_id, search.names[event.num_possible], False)
        if event.num_blocks > search.num_here:
            last = search.blocks[event.num_blocks - search.num_here - 1]
            self._index.note(namespace_id, last, True, is_stored=False)
