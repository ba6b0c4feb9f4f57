"""Memory that outlives this process: the daemon's side of `appliance/supervisor.py`.

A memfd is handed over before it is sealed: only then another process can map it writable. Names say what the
memory is and in which layout, so that a daemon of another version finds nothing that it would misread.
"""

import logging
import mmap
import os
import socket
import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from ...v1.shm import HUGE_PAGE_BYTES

log = logging.getLogger(__name__)

Kept = dict[str, tuple[int, mmap.mmap]]  # by name: memfd, its writable mapping


@dataclass(slots=True)
class Keeper:
    """The memory that a supervisor holds for this process and its successors.

    `inherited` is what it held when this process began; its descriptors and mappings are this process's own.
    """

    channel: socket.socket
    inherited: Kept
    is_handing_over: bool = False  # this process ends to make room for a successor
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_bytes(self) -> int:
        """Return the memory that was inherited and is not taken yet."""
        return sum(len(mapping) for _, mapping in self.inherited.values())

    @property
    def num_huge_bytes(self) -> int:
        """Return how much of that is in huge pages."""
        return sum(len(mapping) for descriptor, mapping in self.inherited.values() if is_huge(descriptor))

    def take(self, name: str) -> tuple[int, mmap.mmap] | None:
        """Return memfd and writable mapping that were inherited as `name`, for the caller to close."""
        return self.inherited.pop(name, None)

    def keep(self, name: str, descriptor: int) -> None:
        """Let the memory of an unsealed memfd outlive this process. Memory that cannot be kept is logged."""
        self._ask(f"keep {name}", descriptor)

    def drop(self, name: str) -> None:
        """Let the memory `name` end with this process."""
        self._ask(f"drop {name}")

    def give_back(self, names: Collection[str]) -> None:
        """Give back memory that was inherited and not taken."""
        num_bytes = 0
        for name in names:
            descriptor, mapping = self.inherited.pop(name)
            num_bytes += len(mapping)
            self.drop(name)
            mapping.close()
            os.close(descriptor)
        if names:
            words = "%d MiB of kept memory are given back: the settings want less, or another kind"
            log.warning(words, num_bytes >> 20)

    def ready(self) -> None:
        """Say that this process serves: its death is no longer one of a start that failed."""
        self._ask("ready")

    def _ask(self, message: str, *descriptors: int) -> None:
        try:
            with self._lock:
                socket.send_fds(self.channel, [message.encode()], list(descriptors))
                answer = self.channel.recv(512)
        except OSError as error:  # the supervisor is dead, and this process about to be
            answer = str(error).encode()
        if answer != b"ok":
            log.warning(
                "memory will not outlive this process (%s): %s", message, answer.decode(errors="replace")
            )


def is_huge(descriptor: int) -> bool:
    """Return whether a memfd is made of huge pages."""
    return os.fstat(descriptor).st_blksize == HUGE_PAGE_BYTES
