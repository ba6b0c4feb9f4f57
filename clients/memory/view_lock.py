"""Tells later daemons which extents this process reads in place.

Memory outlives the daemon that wrote it, a lease does not: the next daemon could overwrite what a view still
shows. A shared lock on byte n of the index's file says that there may be views into extent n; the kernel
drops it when the process dies. The next daemon writes to no extent before the last lock on it is gone.
Rejected: one lock for all of an isolation domain, with which one lease that was never released stopped the
domain's puts.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterable

from ...v1.view_locks import lock, unlock


class ViewLock:
    """Shared locks on the index behind `descriptor`, which stays the caller's; for leases with views."""

    def __init__(self, descriptor: int) -> None:
        self._file = -1
        # A lock belongs to an open file, and the descriptor's is shared with the daemon and other clients.
        self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._process = os.getpid()
        self._num_leases: Counter[int] = Counter()  # by extent
        self._lock = threading.Lock()

    def take(self, extents: Iterable[int]) -> None:
        """Hold the locks of extents for one lease more."""
        with self._lock:
            for extent in extents:
                if not self._num_leases[extent]:
                    lock(self._file, extent)
                self._num_leases[extent] += 1

    def give_back(self, extents: Iterable[int]) -> None:
        """Hold the locks of extents for one lease less; in a forked child they are its parent's."""
        if os.getpid() != self._process:
            return
        with self._lock:
            for extent in extents:
                self._num_leases[extent] -= 1
                if not self._num_leases[extent]:
                    del self._num_leases[extent]
                    unlock(self._file, extent)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
