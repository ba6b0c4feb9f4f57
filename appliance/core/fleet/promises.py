"""Promises: at which host blocks are expected that no host has yet: a prompt with them was sent there.

A prompt that follows one which still waits finds its blocks when its turn comes. Without this the second turn
of a session, or a sibling that shares its beginning, counts as new everywhere, and is sent to another host:
with queues of minutes that cost 15 points of hits in replay (docs/operate/fleet.md). A promise is a
hint: a block that never comes is computed.
"""

from collections.abc import Sequence
from typing import Final

from ....sources.peers.inventory import NAME_BYTES
from ..remembered import Remembered

SLACK_S: Final = 2.0  # behind the expected first token, until inventories tell
MAX_WAIT_S: Final = 600.0
MAX_PROMISES = 65_536  # blocks, divided among tenants: 15 MB or so


class Promises:
    """One host for each block: the one to which a prompt with it was sent last."""

    def __init__(self) -> None:
        self._hosts: Remembered[bytes, tuple[str, float]] = Remembered(MAX_PROMISES)

    def add(
        self, tenant: str, digest: bytes, names: Sequence[bytes], host: str, first_token_s: float, now: float
    ) -> None:
        """Expect these blocks at a host until a moment after its first token."""
        until = now + min(first_token_s, MAX_WAIT_S) + SLACK_S
        for name in names:
            self._hosts.put(tenant, digest[:NAME_BYTES] + name[:NAME_BYTES], (host, until))

    def prefix(self, tenant: str, digest: bytes, names: Sequence[bytes], host: str, now: float) -> int:
        """Return how many of `names`, from the first one on, are expected at a host."""
        for number, name in enumerate(names):
            key = digest[:NAME_BYTES] + name[:NAME_BYTES]
            found, until = self._hosts.get(tenant, key) or ("", 0.0)
            if found != host or until <= now:
                return number
        return len(names)
