"""Policies without sense: whatever a policy decides, the rules must hold.

Real policies are sensible and therefore leave most of what the planner must survive untried: victims in any
order, prices that contradict the order, newcomers that are declined in the middle of a prompt.
"""

from collections.abc import Sequence
from zlib import crc32

from kvtier.policies.base import AdmissionPolicy, EvictionPolicy, Newcomer, Surroundings, Victim
from kvtier.tiers.block import Tier


class SenselessEviction(EvictionPolicy):
    """Prices are hashes; every candidate may be next."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._facts = surroundings.facts
        self._candidates: set[int] = set()

    def offer(self, rows: Sequence[int], now: float) -> None:
        self._candidates.update(rows)

    def price(self, row: int, now: float) -> float:
        return crc32(self._facts.prefix_hash[row] + repr(now).encode()) / 2**32

    def choose(self, now: float) -> Victim | None:
        if not self._candidates:
            return None
        row = min(self._candidates, key=lambda candidate: (self.price(candidate, now), candidate))
        self._candidates.remove(row)
        return Victim(row, self.price(row, now))

    def __len__(self) -> int:
        return len(self._candidates)


class SenselessAdmission(AdmissionPolicy):
    """One newcomer in three is not welcome."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._facts = surroundings.facts

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        name = newcomer.prefix_hashes[0] if newcomer.row < 0 else self._facts.prefix_hash[newcomer.row]
        return crc32(name + repr(newcomer.now).encode()) % 3 > 0


class SenselessAdmissionToNvme(SenselessAdmission):
    """Declines newcomers of nvme only."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self._is_nvme = surroundings.tier is Tier.NVME

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        return not self._is_nvme or super().admits(newcomer, victim)
