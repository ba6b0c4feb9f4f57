"""DeviceDigest: the checksums of fragments, taken on the device where they lie.

What was decoded there, or came straight from a disk, is believed when its checksum is that of its record, as
on the host. Enqueued on the caller's stream behind what brings the bytes, without a wait; the caller asks the
ticket once an event behind it is done. Never ran on a GPU.
"""

from collections.abc import Sequence

import numpy as np

from ..device.contract import Device, Stream
from ..device.launching import Launch, load
from ..device.slabs import Slab, Slabs
from .digest_kernels import BLOCK_BYTES, LANES, MIN_BYTES, NAMES, SOURCE, as_digest, num_blocks_of

NUM_SLABS = 8
MAX_FRAGMENTS = 256  # of one call
MAX_BYTES = 64 << 20  # of one call
_WORD = 8


class DigestTicket:
    """One call under way. Ask `results` once, when the device is known to be done with it."""

    def __init__(self, slabs: Slabs, slab: Slab, num_fragments: int) -> None:
        self._slabs = slabs
        self._slab = slab
        self._num_fragments = num_fragments

    def results(self) -> list[bytes]:
        """Return the xxh3-128 digest of each fragment. Frees the scratch."""
        halves = self._slab.column("digests", np.uint64, 2 * self._num_fragments).reshape(-1, 2)
        digests = [as_digest(pair) for pair in halves]
        self._slabs.give(self._slab)
        return digests


class DeviceDigest:
    """Hashes memory of `device`. For one thread at a time. `close` when no stream works for it.

    Raises DeviceError when there is no memory for its scratch.
    """

    def __init__(self, device: Device, launch: Launch) -> None:
        self._launch = launch
        self._slabs = Slabs(
            device,
            {"places": _WORD * MAX_FRAGMENTS, "digests": 2 * _WORD * MAX_FRAGMENTS},
            {"states": LANES * _WORD * MAX_FRAGMENTS, "sums": MAX_BYTES // BLOCK_BYTES * LANES * _WORD},
            NUM_SLABS,
        )

    @staticmethod
    def max_fragments(num_bytes: int) -> int:
        """Return how many fragments of this length one call takes; 0: none."""
        is_taken = num_bytes >= MIN_BYTES and num_bytes % _WORD == 0
        return min(MAX_FRAGMENTS, MAX_BYTES // num_bytes) if is_taken else 0

    @property
    def has_scratch(self) -> bool:
        """Whether a call would find scratch now."""
        return self._slabs.has_free

    def digest(self, stream: Stream, places: Sequence[int], num_bytes: int) -> DigestTicket | None:
        """Enqueue the hashing of `num_bytes` bytes at each of `places` (device addresses, multiples of
        eight); None while all scratch is in use. Raises DeviceError; that scratch is then not used again."""
        count, num_blocks = len(places), num_blocks_of(num_bytes)
        assert 0 < count <= self.max_fragments(num_bytes), f"{count} fragments in one call"
        slab = self._slabs.take()
        if slab is None:
            return None
        slab.column("places", np.uint64, count)[:] = places
        slab.send(stream, "places", _WORD * count)
        numbers = (np.int32(count), np.int64(num_bytes))
        at = {part: np.uint64(slab.at(part)) for part in ("places", "sums", "states", "digests")}
        blocks = np.int64(num_blocks)
        for name, num_threads, arguments in (
            (NAMES[0], count * num_blocks * LANES, (blocks, at["places"], at["sums"])),
            (NAMES[1], count * LANES, (blocks, at["places"], at["sums"], at["states"])),
            (NAMES[2], count, (at["states"], at["digests"])),
        ):
            if num_threads:
                self._launch(stream, name, num_threads, (*numbers, *arguments))
        slab.fetch(stream, "digests", 2 * _WORD * count)
        return DigestTicket(self._slabs, slab, count)

    def close(self) -> None:
        """Give the scratch back. Idempotent."""
        self._slabs.close()


def load_digest(device: Device) -> DeviceDigest | None:
    """Return what hashes on `device`; None where kernels cannot run there. Raises DeviceError."""
    launch = load(device, SOURCE, NAMES)
    return DeviceDigest(device, launch) if launch is not None else None
