"""memcpy as a store: the floor every store stands on. Same source footprint, same destination, one thread."""

from __future__ import annotations

import numpy as np

from bench.worker import MAX_BATCH_BYTES, Adapter, Words, serve

Names = list[int]


class Memcpy(Adapter):
    """`put` copies into the next slot of the pool, `get` copies out of it; a name is a slot number."""

    def start(self, pool_bytes: int, spill: bool) -> str:
        self.pool = np.ones(pool_bytes // 8, np.uint64)
        self.buffers = np.ones((2, MAX_BATCH_BYTES // 8), np.uint64)
        return "memcpy"

    def connect(self, address: str) -> None:
        raise NotImplementedError("memcpy has no address")

    def select(self, size: int, batch: int) -> None:
        words = size // 8
        num_slots = len(self.pool) // words
        self.slots: Words = self.pool[: num_slots * words].reshape(num_slots, words)
        self.source, self.dest = (b[: batch * words].reshape(1, batch, words) for b in self.buffers)
        self.batch = batch
        self.first: dict[int, int] = {}

    def names(self, chain: int, num: int) -> Names:
        first = self.first.setdefault(chain, len(self.first) * self.batch)
        return [slot % len(self.slots) for slot in range(first, first + num)]

    def put(self, names: Names, form: str) -> int:
        for i, slot in enumerate(names):
            np.copyto(self.slots[slot], self.source[0, i])
        return len(names)

    def get(self, names: Names) -> int:
        for i, slot in enumerate(names):
            np.copyto(self.dest[0, i], self.slots[slot])
        return len(names)

    def lookup(self, names: Names) -> int:
        return len(names)

    def wipe(self) -> None:
        self.first = {}

    def stop(self) -> None:
        pass


if __name__ == "__main__":
    serve(Memcpy())
