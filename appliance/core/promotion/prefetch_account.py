"""PrefetchAccount: bytes that may be prefetched without a request, so that the wasted share stays bounded.

A window, a share of memory and of the bandwidth bound what one wrong prediction costs, and not how many there
are. Where memory is small against what is prefetched, most of it is evicted unused, and every such copy
evicted a block that a request might have used. So each source of predictions has an account for each tenant,
in bytes:

    balance  = MAX_WASTED * used - (1 - MAX_WASTED) * wasted      not negative: the promise is kept
    expected = share of what is out (begun, its end not known) that will be wasted, as it was lately
    may be out = (balance + trial) / (expected - MAX_WASTED)      no bound while expected <= MAX_WASTED

Everything is forgotten with a half-life, so a source that failed gets a trial again, a small share of the
tier, and one that was right long ago has nothing left to gamble with. A source without a past is trusted.
Rejected: a threshold on the policy's own chance alone, because a chance says nothing about whether the block
survives until then; a controller on the share wasted without a balance, because it forgives every debt as
soon as the share looks right.
"""

from typing import Final

#: Share of the bytes brought up ahead that may be wasted, in the long run.
MAX_WASTED: Final = 0.3
#: What a source without credit may risk, as a share of the tier; also the weight of the trust it begins with.
TRIAL_SHARE: Final = 0.02
HALF_LIFE_S: Final = 600.0


class PrefetchAccount:
    """The account of one source and tenant. Mutated by `begin` and `end`.

    `is_learned`: the source is what a policy learned, not what a client said or did."""

    def __init__(self, *, is_learned: bool = False) -> None:
        self.is_learned = is_learned
        self._used_bytes = 0.0  # of late: with a half-life
        self._wasted_bytes = 0.0
        self._known_at = 0.0
        self.out_bytes = 0

    def begin(self, num_bytes: int) -> None:
        """So many bytes more are on their way (less, when negative)."""
        self.out_bytes += num_bytes

    def end(self, num_bytes: int, used_bytes: int, wasted_bytes: int, now: float) -> None:
        """Of what was begun, `num_bytes` ended: so many were used, so many wasted."""
        self._forget(now)
        self.out_bytes -= num_bytes
        self._used_bytes += used_bytes
        self._wasted_bytes += wasted_bytes

    def expected_wasted(self, capacity_bytes: int) -> float:
        """Return the share of what is out that will be wasted."""
        trial_bytes = TRIAL_SHARE * capacity_bytes
        wasted_bytes = self._wasted_bytes + MAX_WASTED * trial_bytes
        return wasted_bytes / (self._used_bytes + self._wasted_bytes + trial_bytes)

    def room_bytes(self, capacity_bytes: int, now: float) -> float:
        """Return how many bytes more may be begun, for a tier of this capacity; inf: as many as fit."""
        self._forget(now)
        excess = self.expected_wasted(capacity_bytes) - MAX_WASTED
        if excess <= 1e-9:
            return float("inf")
        balance = MAX_WASTED * self._used_bytes - (1 - MAX_WASTED) * self._wasted_bytes
        return max(0.0, (balance + TRIAL_SHARE * capacity_bytes) / excess - self.out_bytes)

    def _forget(self, now: float) -> None:
        kept = 0.5 ** ((now - self._known_at) / HALF_LIFE_S)
        self._known_at = now
        self._used_bytes *= kept
        self._wasted_bytes *= kept
