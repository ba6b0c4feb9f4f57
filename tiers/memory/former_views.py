"""Which extents have clients that still view what an earlier daemon let them read.

Each of them holds a lock on the file of that daemon's index (clients/memory/view_lock.py), on an open file of
its own. Rejected: a message at reconnection, which an idle client does not send; a list of leases in memory,
which every get would have to write.
"""

import os
from collections.abc import Iterable

from ...v1.view_locks import is_locked
from .index import INDEX_NAME
from .keeper import Keeper


class FormerViews:
    """The indexes that a keeper inherited, closed one by one as their last reader goes."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._files: dict[str, int] = {}
        for name in [name for name in keeper.inherited if name.startswith(INDEX_NAME)]:
            self._files[name], mapping = keeper.inherited.pop(name)
            mapping.close()

    def viewed(self, extents: Iterable[int]) -> frozenset[int]:
        """Return those of these extents, by their numbers in the daemon, that have views."""
        for name, descriptor in list(self._files.items()):
            if not is_locked(descriptor, 0, 0):
                del self._files[name]
                os.close(descriptor)
                self._keeper.drop(name)
        files = self._files.values()
        return frozenset(extent for extent in extents if any(is_locked(file, extent) for file in files))

    def close(self) -> None:
        """Close the files. The keeper goes on holding what is viewed."""
        while self._files:
            os.close(self._files.popitem()[1])
