"""Ids that callers are told: they say nothing of how many others were given.

A counter would tell each tenant how many requests all tenants make. All chance is an input of the planner:
ids follow from its secret, so that a simulated run can be repeated.
"""

from collections.abc import Container
from hashlib import blake2b, shake_256
from typing import Final

_BATCH: Final = 128  # ids made at a time: one costs 2 us, of many each 0.2
_HALF_MASK: Final = 0xFFFF
_NUM_ROUNDS: Final = 4  # of a Feistel network with a keyed round function: a pseudo-random permutation


class SecretIds:
    """Draws ids from 1 to 2**63 - 1, from a key stream of SHAKE-256 of `secret` for each `kind`."""

    def __init__(self, secret: bytes, kind: str) -> None:
        self._seed = f"{kind}\0".encode() + secret
        self._num_batches = 0
        self._ready: list[int] = []

    def draw(self, living: Container[int]) -> int:
        """Return an id that is none of the `living` ones."""
        ready = self._ready
        while True:
            if not ready:
                ready = self._fill()
            number = ready.pop() >> 1
            if number and number not in living:
                return number

    def _fill(self) -> list[int]:
        stream = shake_256(self._num_batches.to_bytes(8, "little") + self._seed).digest(8 * _BATCH)
        self._num_batches += 1
        self._ready = memoryview(stream).cast("Q").tolist()
        return self._ready


def permuted_32(number: int, secret: bytes) -> int:
    """Return where a permutation of the 32-bit numbers that follows from `secret` puts `number`."""
    left, right = number >> 16 & _HALF_MASK, number & _HALF_MASK
    for step in range(_NUM_ROUNDS):
        block = blake2b(bytes((step, right >> 8, right & 0xFF)), digest_size=2, key=secret[:64]).digest()
        left, right = right, left ^ int.from_bytes(block)
    return left << 16 | right
