"""SlotHeaders: the headers of one extent, written so that a reader in another process is never fooled.

A header changes only while its generation is odd, and a generation is stored through a view of 8-byte
words, that is by one aligned store: readers see the old one or the new one. struct and memoryview are
used because this is called once per fragment on the event loop; numpy's structured scalars cost ten
times as much.
"""

import struct

import numpy as np
import numpy.typing as npt

from ..v1.shm import SLOT_HEADER
from .base import Buffer
from .block import FragmentLabel

EMPTY_GENERATION = 1  # odd: nothing here. Zero, what fresh memory holds, would be readable.

# A header without its generation: namespace_id, group, offset, length, raw_length, codec, reserved,
# prefix_hash, checksum, padding.
_BODY = struct.Struct("<IIQQQII32s16s32x")
_BODY_OFFSET = 8
_BYTES = SLOT_HEADER.itemsize
_WORDS = _BYTES // 8
assert _BODY_OFFSET + _BODY.size == _BYTES


class SlotHeaders:
    """A view of the header table `buffer`, all slots made empty."""

    def __init__(self, buffer: Buffer) -> None:
        self._bytes = buffer
        self._words = buffer.cast("Q")
        np.frombuffer(buffer, SLOT_HEADER)["generation"] = EMPTY_GENERATION

    def fill(self, slot: int, label: FragmentLabel, offset: int, generation: int) -> None:
        """Write the header of an empty slot and, last, its `generation`, which is even and new."""
        _BODY.pack_into(
            self._bytes,
            slot * _BYTES + _BODY_OFFSET,
            label.namespace_id,
            label.group,
            offset,
            label.raw_length,
            label.raw_length,
            0,  # no codec: memory tiers keep what was put
            0,
            label.prefix_hash,
            label.checksum,
        )
        self._words[slot * _WORDS] = generation

    def empty(self, slot: int) -> None:
        """Make the generation of a filled slot odd."""
        self._words[slot * _WORDS] += 1

    def generation(self, slot: int) -> int:
        """Return the generation of `slot`."""
        return self._words[slot * _WORDS]

    def checksum(self, slot: int) -> bytes:
        """Return the xxh3-128 of what is in a filled slot, as it was taken at put."""
        return bytes(_BODY.unpack_from(self._bytes, slot * _BYTES + _BODY_OFFSET)[-1])

    def is_of(self, slot: int, label: FragmentLabel) -> bool:
        """Whether the slot is filled and with this fragment: namespace, hash, group, length, checksum."""
        body = _BODY.unpack_from(self._bytes, slot * _BYTES + _BODY_OFFSET)
        namespace_id, group, _, _, raw_length, _, _, prefix_hash, digest = body
        return (
            self._words[slot * _WORDS] % 2 == 0
            and prefix_hash == label.prefix_hash
            and namespace_id == label.namespace_id
            and group == label.group
            and raw_length == label.raw_length
            and (not label.checksum or digest == label.checksum)
        )

    def table(self) -> npt.NDArray[np.void]:
        """Return all headers as a structured array, without copying; for audits."""
        return np.frombuffer(self._bytes, SLOT_HEADER)

    def close(self) -> None:
        """Let the memory go."""
        self._words.release()
        self._bytes.release()
