"""StagingExtent: the one piece of memory that a client writes and the daemon reads.

Its size is sealed: a client that could shrink it would kill the daemon with SIGBUS. Always of plain
pages: a client may punch holes into its own staging, which read as zeros here, but a hole in *huge* pages
would again be SIGBUS when the host has none left. Mapped read-only here; what is copied out of it is hashed
afterwards (payload.copy_and_checksum), because the client can write at any time.
"""

import mmap
import os
from collections.abc import Callable

from ...v1.shm import PAGE_BYTES
from ..base import Buffer, Cause, CopyError
from . import memfd


class StagingExtent:
    """`num_bytes` of writable shared memory of one client; `descriptor` is for that client alone.

    Raises SharedMemoryError when the host has no memory for it.
    """

    is_linear = True  # a place is an offset: what is next to it in number is next to it in memory

    def __init__(self, num_bytes: int, name: str = "kvtier-staging") -> None:
        assert num_bytes > 0
        assert num_bytes % PAGE_BYTES == 0  # pages of aarch64's kernels may be larger
        self.num_bytes = num_bytes
        try:
            self.descriptor = memfd.create(name, num_bytes)
        except OSError as error:
            raise memfd.SharedMemoryError(
                f"cannot create a staging extent of {num_bytes} bytes ({error.strerror}); "
                "raise RLIMIT_NOFILE or lower staging_bytes"
            ) from error
        memfd.seal(self.descriptor, memfd.SEALS_FIXED_SIZE)
        self._mapping = mmap.mmap(self.descriptor, num_bytes, prot=mmap.PROT_READ)
        self._view: Buffer | None = memoryview(self._mapping)

    def view(self, offset: int, length: int) -> Buffer:
        """Return `length` bytes at `offset`, read-only, without copying.

        A view outlives `close`. Raises CopyError: outside the extent, or SOURCE_GONE after `close`.
        """
        view = self._view
        if view is None:
            raise CopyError(Cause.SOURCE_GONE, "the client is gone")
        if offset < 0 or length <= 0 or offset + length > self.num_bytes:
            raise CopyError(
                Cause.SHORT_TRANSFER,
                f"span of {length} bytes at {offset} is outside the staging extent of {self.num_bytes} "
                "bytes; send a smaller batch or attach with a larger staging_bytes",
            )
        return view[offset : offset + length]

    def prefault(self) -> Callable[[], None]:
        """Return what allocates all pages, so that the client's first puts run at full speed; call it once.

        It may run in a thread, without the GIL, and after `close`: the number of a closed descriptor can be
        another file's by then. Raises SharedMemoryError, as what it returns does.
        """
        try:
            descriptor = os.dup(self.descriptor)
        except OSError as error:
            raise self._no_memory(error) from error

        def allocate() -> None:
            try:
                os.posix_fallocate(descriptor, 0, self.num_bytes)
            except OSError as error:
                raise self._no_memory(error) from error
            finally:
                os.close(descriptor)

        return allocate

    def _no_memory(self, error: OSError) -> memfd.SharedMemoryError:
        return memfd.SharedMemoryError(
            f"no memory for {self.num_bytes} bytes of staging ({error.strerror}); lower staging_bytes"
        )

    def close(self) -> None:
        """Refuse new views and give the memory back once the last copy from it has ended. Idempotent."""
        if self._view is None:
            return
        self._view = None
        os.close(self.descriptor)  # the mapping goes with its last view
