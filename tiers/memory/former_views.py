"""Which isolation domains have clients that still view memory of an earlier daemon.

Each of them holds a lock on the file of that daemon's index (clients/memory/view_lock.py), on an open file of
its own. So a lock that can be had alone says that there are none. Rejected: a message at reconnection, which
an idle client does not send; a list of leases in memory, which every get would have to write.
"""

import fcntl
import os

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

    def domains(self) -> frozenset[int]:
        """Return the domains with views, by number."""
        for name, descriptor in list(self._files.items()):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            del self._files[name]
            os.close(descriptor)
            self._keeper.drop(name)
        return frozenset(int(name.removeprefix(INDEX_NAME).partition("-")[0]) for name in self._files)

    def close(self) -> None:
        """Close the files. The keeper goes on holding what is viewed."""
        while self._files:
            os.close(self._files.popitem()[1])
