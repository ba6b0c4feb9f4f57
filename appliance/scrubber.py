"""Scrubber: reads everything that the tiers hold, a little at a time, and condemns what has rotted.

A record or slot that rots is otherwise found when it is read, or never. A pass of a tier takes SHARE of one
thread and of what the tier can read: each step is followed by a pause of 1 / SHARE times what it took, so a
fast device is read through in days and a memory in minutes, whatever their sizes. While copies are under way
the next step waits, but PATIENCE pauses at most: a busy tier is verified, too. A step holds the interpreter
for less than a millisecond; its thread has a lower priority than an engine's.

An administrator may ask for a pass, which makes no pauses and waits for copies all the same. A restart begins
anew, at a random segment: so the last ones have their turn also where restarts are frequent.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ..tiers.base import Cause, Verified, Verifier
from ..tiers.block import Tier
from ..tiers.copiers import make_pool
from ..v1.shm import extent_of, slot_of
from .appliance import Appliance
from .core.events import FragmentsDamaged
from .core.results import DamagedBlock, DamageResult
from .tasks import Tasks

log = logging.getLogger(__name__)

#: Of one thread, and of the bandwidth of the tier that is read.
SHARE = 0.01
#: From the begin of a pass to that of the next one at least: small memories need no more.
MIN_PASS_S = 3600.0
#: What a step may be reckoned to have taken: what is longer was spent waiting for a processor.
MAX_STEP_S = 0.01
#: So many pauses a step waits for copies to end.
PATIENCE = 10
#: Between two passes at least.
PAUSE_S = 0.01
#: Damaged fragments of one pass that are named, in the log and in answers; all are counted.
MAX_NAMED = 100


@dataclass(slots=True)
class ScrubPass:
    """One reading of a whole tier. Times are the appliance's clock's."""

    tier: Tier
    began_at: float
    num_units: int = 0  # segments or extents
    num_units_done: int = 0
    num_fragments: int = 0
    num_bytes: int = 0
    num_damaged: int = 0  # fragments
    num_lost: int = 0  # of them, those of blocks that can be read from nowhere any more
    found: list[str] = field(default_factory=list)  # words for each, up to MAX_NAMED
    ended_at: float | None = None


@dataclass(slots=True)
class TierScrubs:
    """The passes of one tier since the start."""

    tier: Tier
    num_passes: int = 0  # complete ones
    num_bytes: int = 0  # read, also by a pass under way
    num_damaged: int = 0
    last: ScrubPass | None = None  # complete
    now: ScrubPass | None = None  # in the background


class Scrubber:
    """Reads tiers with a verifier in the background, and on demand."""

    def __init__(self, appliance: Appliance, verifiers: Mapping[Tier, Verifier]) -> None:
        self._appliance = appliance
        self._verifiers = verifiers
        self._pool = make_pool(1, "kvtier-scrub", in_background=True)
        self._tasks: Tasks[None] = Tasks()
        self.tiers = {tier: TierScrubs(tier) for tier in verifiers}

    def start(self) -> None:
        """Begin to read in the background."""
        for tier in self._verifiers:
            self._tasks.start(self._scrub(tier))

    async def stop(self) -> None:
        """End what reads, before the tiers are closed. Idempotent."""
        await self._tasks.stop()
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=False)

    async def verify(self, tier: Tier) -> AsyncGenerator[ScrubPass, None]:
        """Read a whole tier now; yields the same pass after each step, and once when it has ended."""
        async for one in self._read(tier, 1.0):
            yield one

    async def _scrub(self, tier: Tier) -> None:
        scrubs = self.tiers[tier]
        while True:
            async for one in self._read(tier, SHARE):
                scrubs.now = one
            scrubs.now = None
            assert one.ended_at is not None
            await asyncio.sleep(max(PAUSE_S, MIN_PASS_S - (one.ended_at - one.began_at)))

    async def _read(self, tier: Tier, share: float) -> AsyncGenerator[ScrubPass, None]:
        verifier, loop, clock = self._verifiers[tier], asyncio.get_running_loop(), self._appliance.clock
        one = ScrubPass(tier, clock())
        units = await loop.run_in_executor(self._pool, verifier.units)
        one.num_units = len(units)
        first = random.randrange(len(units)) if units else 0
        for number in itertools.chain(units[first:], units[:first]):
            steps = verifier.verify_unit(number)
            try:
                while True:
                    began_at = clock()
                    step = await loop.run_in_executor(self._pool, next, steps, None)
                    if step is None:
                        break
                    self._take_in(one, number, step)
                    yield one
                    await self._pause(min(clock() - began_at, MAX_STEP_S), share)
            finally:
                self._pool.submit(getattr(steps, "close", bool))  # after the step that may be under way
            one.num_units_done += 1
        one.ended_at = clock()
        scrubs = self.tiers[tier]
        scrubs.num_passes, scrubs.last = scrubs.num_passes + 1, one
        if one.num_damaged:
            words = "%s: %d of %d fragments read were damaged, %d of them of blocks that are lost"
            log.error(words, tier.label, one.num_damaged, one.num_fragments, one.num_lost)
        yield one

    async def _pause(self, took_s: float, share: float) -> None:
        """Let others go first, after a step that took so long."""
        await asyncio.sleep(took_s * (1 / share - 1))
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE * took_s / share):
                await self._appliance.mover.idle()

    def _take_in(self, one: ScrubPass, number: int, step: Verified) -> None:
        """Count what a step found, on the loop; have what is damaged condemned."""
        scrubs, verifier = self.tiers[one.tier], self._verifiers[one.tier]
        one.num_fragments += step.num_fragments
        one.num_bytes += step.num_bytes
        scrubs.num_bytes += step.num_bytes
        alive = [damaged for damaged in step.damaged if verifier.is_alive(damaged)]
        if step.problem and (alive or not step.damaged):
            self._name(one, step.problem)
        causes = {damaged.place: damaged.cause for damaged in alive}
        if step.whole is not None and alive:
            causes = self._missing(one.tier, number, step.whole)
        if not causes:
            return
        result = self._appliance.ask(lambda call: FragmentsDamaged(call, one.tier, causes))
        assert isinstance(result, DamageResult), "the planner answers this at once"
        for block in result.blocks:  # a record that no block needs any more may rot
            one.num_damaged += 1
            one.num_lost += not block.readable_from
            self._name(one, _words(one.tier, causes[block.place], block))
        scrubs.num_damaged += len(result.blocks)

    def _missing(self, tier: Tier, number: int, whole: Sequence[int]) -> dict[int, Cause]:
        """Return what the planner has in a segment with a damaged footer and verification did not find."""
        places = self._appliance.planner.damage.places_in(tier, number)
        return dict.fromkeys(set(places) - set(whole), Cause.WRONG_IDENTITY)

    def _name(self, one: ScrubPass, words: str) -> None:
        if len(one.found) < MAX_NAMED:
            one.found.append(words)
            log.error("%s is damaged: %s", one.tier.label, words)


def _words(tier: Tier, cause: Cause, block: DamagedBlock) -> str:
    """Say what is damaged, and what that costs."""
    unit, part = ("segment", "page") if tier == Tier.NVME else ("extent", "slot")
    where = f"{unit} {extent_of(block.place)} {part} {slot_of(block.place)}: {cause.value}"
    name = f"block {block.namespace_id}:{block.prefix_hash.hex()[:8]}"
    return (
        f"{where}; {name}, {f'still readable from {block.readable_from}' if block.readable_from else 'lost'}"
    )
