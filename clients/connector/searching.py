"""Lookups that wait for the daemon's search of an object store, so that they count what it holds."""

import threading
import time
from collections.abc import Sequence

from ...v1.bundles import blocks_per_bundle
from ...v1.types import Geometry
from ..sync import Client
from ..values.namespace import Namespace
from ..values.types import Lookup

SEARCH_WAIT_S = 0.25  # a search of a long prompt takes some ten round trips
MAX_PAUSE_S = 0.02  # between two lookups


class SearchWait:
    """Pauses between lookups while a search goes on: `wait_s` in all, and no longer than computing takes."""

    def __init__(self, wait_s: float = SEARCH_WAIT_S) -> None:
        self._wait_s = wait_s
        self._ends_at: float | None = None
        self._pause_s = 0.001

    def pause_s(self, found: Lookup) -> float:
        """Return the seconds until the next lookup; 0 when `found` is to be taken as it is."""
        if not found.search_s:
            return 0.0
        now = time.monotonic()
        if self._ends_at is None:
            self._ends_at = now + min(self._wait_s, found.search_s)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return max(0.0, min(self._pause_s, self._ends_at - now))


def lookup_after_search(
    client: Client, namespace: Namespace, chain: Sequence[bytes], wait_s: float = SEARCH_WAIT_S
) -> Lookup:
    """Return a lookup that knows what the object store holds, if that is found out within `wait_s`.

    Blocks. `chain` begins where the chain does: bundles are named from there. Raises KvtierError."""
    wait, pause = SearchWait(wait_s), threading.Event()
    found = client.lookup(namespace, chain)
    while pause_s := wait.pause_s(found):
        pause.wait(pause_s)
        found = client.lookup(namespace, chain)
    return found


def whole_bundles(num_blocks: int, geometry: Geometry) -> int:
    """Return about `num_blocks`: in pieces of so many blocks no bundle is cut, which would not be fetched."""
    size = blocks_per_bundle(geometry)
    return max(size, num_blocks - num_blocks % size)
