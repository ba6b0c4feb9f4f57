"""Tells later daemons that this process reads memory in place.

Memory outlives the daemon that wrote it, a lease does not: the next daemon could overwrite what a view still
shows. A shared lock on the file of the index says that there are views; the kernel drops it when the process
dies. The next daemon writes to no memory of the isolation domain before the last lock is gone.
"""

import fcntl
import os
import threading


class ViewLock:
    """A shared lock on the index behind `descriptor`, which stays the caller's; for leases with views."""

    def __init__(self, descriptor: int) -> None:
        self._file = -1
        # A lock belongs to an open file, and the descriptor's is shared with the daemon and other clients.
        self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._num_leases = 0
        self._lock = threading.Lock()

    def take(self) -> None:
        """Hold the lock for one lease more."""
        with self._lock:
            self._num_leases += 1
            if self._num_leases == 1:
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def give_back(self) -> None:
        """Hold the lock for one lease less."""
        with self._lock:
            self._num_leases -= 1
            if not self._num_leases:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
