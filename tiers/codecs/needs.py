"""Measured sizes of encoded fragments, so that no more room is reserved for the next ones.

A codec's own idea of its reserve fits KV of any model; one model's layers differ little from block to
block, and a few hundredths of a disk are worth remembering. For each layer group of each namespace the
shares of the raw size that were needed are counted in 128ths; what nearly all of them fit into is reserved
from then on. One that did not fit counts as needing a little more than it was given: its true length was
never known.
"""

import threading
from typing import NamedTuple

import numpy as np

STEPS = 128  # a share is counted in parts of this size
MIN_COUNTED = 64  # before what was counted is believed
MAX_COUNTED = 4096  # then all counts are halved: models change, and old blocks with them
MAX_KNOWN = 4096
FITTING = 0.99  # share of the fragments for which there is to be room
UNFIT_STEPS = 2


class Need(NamedTuple):
    """Fragments with one reserve: of one codec, namespace and layer group."""

    codec_id: int
    namespace_digest: bytes
    group: int


class Needs:
    """Counts sizes of encoded fragments, as shares of their raw size. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[Need, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
        self._lock = threading.Lock()

    def fitted(self, need: Need, length: int, raw_bytes: int) -> None:
        """Count a fragment of `raw_bytes` that took `length` bytes."""
        self._count(need, -(-length * STEPS // raw_bytes))

    def unfit(self, need: Need, given: int, raw_bytes: int) -> None:
        """Count a fragment of `raw_bytes` that did not fit into the `given` bytes."""
        self._count(need, given * STEPS // raw_bytes + UNFIT_STEPS)

    def reserves(self) -> dict[Need, float]:
        """Return the shares of the raw size to reserve, where enough fragments were counted."""
        with self._lock:
            counts = {need: counted.copy() for need, counted in self._counts.items()}
        return {
            need: int(np.searchsorted(np.cumsum(counted), FITTING * counted.sum())) / STEPS
            for need, counted in counts.items()
            if counted.sum() >= MIN_COUNTED
        }

    def _count(self, need: Need, step: int) -> None:
        with self._lock:
            counted = self._counts.get(need)
            if counted is None:
                if len(self._counts) >= MAX_KNOWN:
                    return
                counted = self._counts[need] = np.zeros(STEPS + 1, np.int64)
            counted[min(step, STEPS)] += 1
            if counted.sum() > MAX_COUNTED:
                counted //= 2
