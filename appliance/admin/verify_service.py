"""Verify: an administrator has a tier read and compared with its checksums, for AdminService."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from ...v1 import admin_pb2 as pb
from ..errors import error
from ..scrubber import Scrubber, ScrubPass, TierScrubs
from ..security.callers import Caller

INTERVAL_S = 1.0  # between two answers


class VerifyService:
    """Handler of AdminService/Verify."""

    def __init__(self, scrubber: Scrubber, clock: Callable[[], float]) -> None:
        self._scrubber = scrubber
        self._clock = clock

    async def verify(self, caller: Caller, request: pb.VerifyRequest) -> AsyncIterator[pb.VerifyResponse]:
        """Read a tier whole; yield what was read and found, about once a second. Raises ApplianceError."""
        clock, told_at = self._clock, 0.0
        tier = next((tier for tier in self._scrubber.tiers if tier.label == request.tier), None)
        if tier is None:
            tiers = ", ".join(one.label for one in self._scrubber.tiers)
            raise error("BAD_TIER", f"tier {request.tier} has nothing to verify here; these have: {tiers}")
        async with aclosing(self._scrubber.verify(tier)) as steps:
            async for one in steps:
                if one.ended_at is not None or clock() >= told_at + INTERVAL_S:
                    told_at = clock()
                    yield _verified(one, told_at)


def scrub_status(one: TierScrubs, now: float) -> pb.ScrubStatus:
    """Return the wire message; `now` is on the clock of the passes."""
    status = pb.ScrubStatus(
        tier=one.tier.label, num_passes=one.num_passes, bytes=one.num_bytes, num_damaged=one.num_damaged
    )
    if one.last is not None and one.last.ended_at is not None:
        status.last_bytes, status.last_ended_s_ago = one.last.num_bytes, now - one.last.ended_at
        status.last_took_s = one.last.ended_at - one.last.began_at
    if one.now is not None:
        status.share_done = one.now.num_units_done / max(1, one.now.num_units)
    return status


def _verified(one: ScrubPass, now: float) -> pb.VerifyResponse:
    return pb.VerifyResponse(
        num_units=one.num_units,
        num_units_done=one.num_units_done,
        num_fragments=one.num_fragments,
        bytes=one.num_bytes,
        num_damaged=one.num_damaged,
        num_lost=one.num_lost,
        found=one.found if one.ended_at is not None else [],
        is_last=one.ended_at is not None,
        took_s=now - one.began_at,
    )
