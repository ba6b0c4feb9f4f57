"""DeviceDigest: the checksums of fragments, taken on the device where they lie.

What was decoded there, or came straight from a disk, is believed when its checksum is that of its record, as
on the host. Enqueued on the caller's stream behind what brings the bytes, without a wait; the caller asks the
ticket once an event behind it is done. Never ran on a GPU.
"""

from collections.abc import Sequence

import numpy as np

from ..device.contract import Device, Stream
from ..device.launching import Launch
from ..device.slabs import KernelStep, Slabs, Ticket
from .digest_kernels import BLOCK_BYTES, LANES, MIN_BYTES, NAMES, num_blocks_of

NUM_SLABS = 8
MAX_FRAGMENTS = 256  # of one call
MAX_BYTES = 64 << 20  # of one call
_WORD = 8


class DeviceDigest:
    """Hashes memory of `device`. For one thread at a time.

    `slabs` are closed when no stream works for it. Raises DeviceError when there is no memory for them."""

    def __init__(self, device: Device, launch: Launch) -> None:
        self._launch = launch
        self.slabs = Slabs(
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

    def digest(self, stream: Stream, places: Sequence[int], num_bytes: int) -> Ticket | None:
        """Enqueue the hashing of `num_bytes` bytes at each of `places`; None while all scratch is in use.

        `places`: device addresses, multiples of eight. `digests_of` the ticket returns the digests. Raises
        DeviceError; that scratch is then not used again.
        """
        count, num_blocks = len(places), num_blocks_of(num_bytes)
        assert 0 < count <= self.max_fragments(num_bytes), f"{count} fragments in one call"
        numbers = (np.int32(count), np.int64(num_bytes))
        steps = (
            KernelStep(
                NAMES[0], count * num_blocks * LANES, (*numbers, np.int64(num_blocks)), ("places", "sums")
            ),
            KernelStep(
                NAMES[1], count * LANES, (*numbers, np.int64(num_blocks)), ("places", "sums", "states")
            ),
            KernelStep(NAMES[2], count, numbers, ("states", "digests")),
        )
        columns = {"places": np.array(places, np.uint64)}
        return self.slabs.call(stream, self._launch, columns, steps, ("digests", np.uint64, 2 * count))


def digests_of(ticket: Ticket) -> list[bytes]:
    """Return the xxh3-128 digest of each fragment of a call, 16 bytes as `xxhash` writes them."""
    return [halves.tobytes() for halves in ticket.results().reshape(-1, 2).astype(">u8")]
