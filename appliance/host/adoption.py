"""Brings back what memory held when an earlier daemon died, while the daemon serves.

    read the headers of all extents -> tell the planner which fragments they name
    -> verify the bytes of each, extents filled last first -> tell the planner, which makes them readable

A request for blocks that are not verified yet waits until the headers are read and just those blocks are
verified. So nothing is readable unverified, and nothing that was kept is a miss.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor

from ...tiers.block import FragmentLabel, Tier
from ...tiers.copiers import make_pool
from ...tiers.memory.engine import ExtentEngine
from ...v1.shm import place_of
from ..appliance import Appliance
from ..core.events import ExtentFound, FoundVerified, ViewsEnded
from ..tasks import Tasks
from .assembly import Assembly

log = logging.getLogger(__name__)

ASK_INTERVAL_S = 0.25
NUM_THREADS = 2  # one of them hashes while the other waits for memory
MAX_STEP_FRAGMENTS = 128  # told to the planner at once, which takes 2 ms
MAX_JOB_BYTES = 16 << 20  # verified between two looks at what is left to do

Fragments = list[tuple[int, FragmentLabel]]  # (place, label)


class Adoption:
    """Verifies what `assembly` inherited, and hands it to the planner. `run` does all of it, once."""

    def __init__(self, appliance: Appliance, assembly: Assembly) -> None:
        self._appliance = appliance
        self._found = appliance.planner.found_memory
        self._assembly = assembly
        self._engines = {
            tier: engine for tier, engine in assembly.engines.items() if isinstance(engine, ExtentEngine)
        }
        extents = [(tier, number) for tier, engine in self._engines.items() for number in engine.inherited]
        self._extents = extents if assembly.book is not None else []
        self._are_headers_read = asyncio.Event()
        self.is_verified = asyncio.Event()  # nothing is left to be verified
        self._waited_for: Tasks[None] = Tasks()
        self._num_right = self._right_bytes = 0  # fragments that have their checksum

    async def run(self) -> None:
        """Verify inherited extents, hand what is whole to the planner, say when views of it have ended."""
        viewed = self._views_of(self._extents)
        pool = make_pool(NUM_THREADS, "kvtier-verify", in_background=True)
        began_at = time.monotonic()
        try:
            left = await self._read_headers(viewed)
            self._are_headers_read.set()
            read_s = time.monotonic() - began_at
            await self._verify_all(pool, left)
        finally:
            self._are_headers_read.set()
            self.is_verified.set()
            pool.shutdown(wait=False, cancel_futures=True)
        if self._extents:
            log.info(
                "%d fragments, %d MiB of memory kept; headers read in %.2f s, verified in %.2f s",
                self._num_right,
                self._right_bytes >> 20,
                read_s,
                time.monotonic() - began_at,
            )
        if viewed:
            log.warning(
                "clients with leases of an earlier daemon view %d extents of memory, which are not written "
                "before they release them or end; `lslocks` shows the processes (OFDLCK)",
                len(viewed),
            )
        while viewed:
            await asyncio.sleep(ASK_INTERVAL_S)
            before, viewed = viewed, self._views_of(viewed)
            if ended := before - viewed:
                self._appliance.step(ViewsEnded(ended))
                log.info("views of memory have ended in %d extents, %d are left", len(ended), len(viewed))

    def verify(self, namespace_id: int, hashes: Sequence[bytes]) -> "asyncio.Future[None] | None":
        """Return what to wait for before these blocks are looked up; None if none of them is unverified."""
        if self._are_headers_read.is_set() and not self._found.unverified(namespace_id, hashes):
            return None
        return self._waited_for.start(self._verify(namespace_id, hashes))

    async def stop(self) -> None:
        """End the verifications that requests wait for."""
        await self._waited_for.stop()

    def _views_of(self, extents: Iterable[tuple[Tier, int]]) -> frozenset[tuple[Tier, int]]:
        """Return those of these extents that clients may still view."""
        former = self._assembly.former_views
        if former is None:
            return frozenset()
        numbers = {self._engines[tier].first_extent + number: (tier, number) for tier, number in extents}
        return frozenset(numbers[number] for number in former.viewed(numbers))

    async def _read_headers(self, viewed: Set[tuple[Tier, int]]) -> deque[tuple[Tier, Fragments]]:
        """Tell the planner what the headers name. Return it by extents, those filled last first."""
        book, pool = self._assembly.book, self._assembly.memory_threads  # requests wait for it
        known = book.inherited if book is not None else {}
        digests = {number: one.digest for number, one in known.items()}
        loop = asyncio.get_running_loop()
        found_in: list[tuple[int, Tier, Fragments]] = []
        reading = [
            loop.run_in_executor(pool, self._engines[tier].found, number, digests.get)
            for tier, number in self._extents
        ]
        for (tier, number), fragments in zip(self._extents, reading, strict=True):
            engine, named = self._engines[tier], await fragments
            found = self._found.takes(named)
            if not found or len(found) < len(named):
                await loop.run_in_executor(pool, engine.forget, number, [slot for slot, _ in found])
            self._appliance.step(ExtentFound(tier, number, found, (tier, number) in viewed))
            newest = engine.generation_of(number) if found else 0
            found_in.append((newest, tier, [(place_of(number, slot), label) for slot, label in found]))
        self._found.awaited.clear()
        if book is not None:
            book.slots_read()
        found_in.sort(key=lambda one: -one[0])
        return deque((tier, fragments) for _, tier, fragments in found_in)

    async def _verify_all(self, pool: ThreadPoolExecutor, left: deque[tuple[Tier, Fragments]]) -> None:
        """Verify what the planner still waits for."""

        async def work() -> None:
            while left:
                tier, fragments = left.popleft()
                while fragments:
                    await self._verify_in(pool, tier, _take_job(fragments))

        await asyncio.gather(*(work() for _ in range(NUM_THREADS)))

    async def _verify(self, namespace_id: int, hashes: Sequence[bytes]) -> None:
        """Verify the fragments of these blocks that are not, ahead of all others."""
        await self._are_headers_read.wait()
        of_tier: dict[Tier, Fragments] = {}
        for tier, place, label in self._found.unverified(namespace_id, hashes):
            of_tier.setdefault(tier, []).append((place, label))
        for tier, fragments in of_tier.items():
            while fragments:
                await self._verify_in(self._assembly.memory_threads, tier, _take_job(fragments))

    async def _verify_in(self, pool: ThreadPoolExecutor, tier: Tier, fragments: Fragments) -> None:
        loop, verify = asyncio.get_running_loop(), self._engines[tier].verify_found
        fragments = [one for one in fragments if self._found.waits_for(tier, *one)]
        are_right = await loop.run_in_executor(pool, verify, fragments)
        for start in range(0, len(fragments), MAX_STEP_FRAGMENTS):
            step = fragments[start : start + MAX_STEP_FRAGMENTS]
            verdicts = are_right[start : start + MAX_STEP_FRAGMENTS]
            for (place, label), is_right in zip(step, verdicts, strict=True):
                if is_right and self._found.waits_for(tier, place, label):
                    self._num_right += 1
                    self._right_bytes += label.raw_length
            self._appliance.step(FoundVerified(tier, step, verdicts))
            await asyncio.sleep(0)


def _take_job(fragments: Fragments) -> Fragments:
    """Remove and return the first fragments, MAX_JOB_BYTES of them."""
    num_bytes = count = 0
    while count < len(fragments) and num_bytes < MAX_JOB_BYTES:
        num_bytes += fragments[count][1].raw_length
        count += 1
    job = fragments[:count]
    del fragments[:count]
    return job
