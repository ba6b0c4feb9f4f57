"""Ghosts: the names of blocks that left a tier a short while ago.

A ghost that comes back was given up too early, which is what S3-FIFO and ARC learn from. Ghosts are kept by
prefix hash: the row of a block that left may name another block by the time the first one comes back.
"""

from collections import OrderedDict


class Ghosts:
    """A bounded set of prefix hashes, oldest first. About 250 bytes each."""

    def __init__(self) -> None:
        #: Not a plain dict: finding its first key after a million deletions at the front takes a scan.
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def add(self, prefix_hash: bytes, max_ghosts: int) -> None:
        """Remember a block that left; forget the oldest ones beyond `max_ghosts`, two at most per call.

        The limit follows the tier, so it may fall: two per addition catch up without a pause.
        """
        names = self._names
        names[prefix_hash] = None
        names.move_to_end(prefix_hash)
        for _ in range(min(2, len(names) - max(0, max_ghosts))):
            names.popitem(last=False)

    def take(self, prefix_hash: bytes) -> bool:
        """Forget a block that is back; say whether it was remembered."""
        if prefix_hash not in self._names:
            return False
        del self._names[prefix_hash]
        return True

    def __len__(self) -> int:
        return len(self._names)
