"""Sampler: a few numbers once a second, kept for five minutes, so that a page that opens has a past to draw.

Counters only grow, so a sample is the counters themselves; rates are differences that the reader takes.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...tiers.block import Tier

INTERVAL_S = 1.0
CAPACITY = 300


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters of one moment."""

    at_s: float  # since the daemon started
    num_asked: int
    found: tuple[int, ...]  # blocks by Tier
    num_missed: int
    num_declined: int
    num_evicted: int  # blocks that left a tier
    used_bytes: dict[Tier, int]
    edge_bytes: dict[str, int]  # "nvme>dram" -> bytes since the start


class Sampler:
    """Keeps the last CAPACITY samples. `look` makes one, of these tiers."""

    def __init__(self, look: Callable[[], Sample], tiers: Sequence[Tier]) -> None:
        self._tiers = tiers
        self.samples: deque[Sample] = deque(maxlen=CAPACITY)
        self._look = look
        self.num_taken = 0
        self._taken = asyncio.Event()

    def sample(self) -> None:
        """Add one sample."""
        self.samples.append(self._look())
        self.num_taken += 1
        self._taken.set()
        self._taken = asyncio.Event()

    async def after(self, number: int) -> None:
        """Wait until more than `number` were taken."""
        while self.num_taken <= number:
            await self._taken.wait()

    def rates(self) -> dict[str, float]:
        """Return bytes per second of each edge, of the last two samples."""
        if len(self.samples) < 2:
            return {}
        before, last = self.samples[-2], self.samples[-1]
        seconds = max(last.at_s - before.at_s, 1e-6)
        return {
            edge: (total - before.edge_bytes.get(edge, 0)) / seconds
            for edge, total in last.edge_bytes.items()
        }

    def series(self, last: int = CAPACITY) -> dict[str, object]:
        """Return the last samples as columns of differences, one entry per pair of samples, oldest first.

        `hit_ratio` is None where nothing was asked.
        """
        samples = list(self.samples)[-last - 1 :]
        pairs = list(pairwise(samples))
        asked = [b.num_asked - a.num_asked for a, b in pairs]
        found = [[b.found[t] - a.found[t] for a, b in pairs] for t in self._tiers]
        tiers = samples[-1].used_bytes if samples else {}
        edges = samples[-1].edge_bytes if samples else {}
        return {
            "interval_s": INTERVAL_S,
            "at_s": [round(b.at_s, 3) for _, b in pairs],
            "asked": asked,
            "found": {t.label: column for t, column in zip(self._tiers, found, strict=True)},
            "missed": [b.num_missed - a.num_missed for a, b in pairs],
            "declined": [b.num_declined - a.num_declined for a, b in pairs],
            "hit_ratio": [
                sum(column[i] for column in found) / number if number else None
                for i, number in enumerate(asked)
            ],
            "evicted": [b.num_evicted - a.num_evicted for a, b in pairs],
            "used_bytes": {tier.label: [b.used_bytes[tier] for _, b in pairs] for tier in tiers},
            "edge_bytes_per_s": {
                edge: [
                    (b.edge_bytes[edge] - a.edge_bytes.get(edge, 0)) / max(b.at_s - a.at_s, 1e-6)
                    for a, b in pairs
                ]
                for edge in edges
            },
        }
