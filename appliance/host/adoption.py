"""Brings back what memory held when an earlier daemon died: extents are verified, then told to the planner.

The daemon serves meanwhile; what is not verified yet is a miss. Extents that were filled last come first.
"""

import asyncio
import logging
import time

from ...tiers.copiers import make_pool
from ...tiers.memory.engine import ExtentEngine
from ..appliance import Appliance
from ..core.events import ExtentFound, ViewsEnded
from ..persisted.namespace_book import NamespaceBook
from .assembly import Assembly

log = logging.getLogger(__name__)

ASK_INTERVAL_S = 0.25
NUM_THREADS = 2  # one of them hashes while the other waits for memory


async def adopt_inherited(appliance: Appliance, assembly: Assembly) -> None:
    """Verify inherited extents, hand what is whole to the planner, and say when views of it have ended."""
    engines = [engine for engine in assembly.engines.values() if isinstance(engine, ExtentEngine)]
    left = [(engine, number) for engine in engines for number in engine.inherited]
    if assembly.book is None or assembly.former_views is None:
        return
    viewed = assembly.former_views.domains()
    if left:
        await _adopt(appliance, assembly.book, left, viewed)
    while viewed:
        await asyncio.sleep(ASK_INTERVAL_S)
        before, viewed = viewed, assembly.former_views.domains()
        if ended := before - viewed:
            appliance.step(ViewsEnded(ended))
            log.info(
                "views of memory have ended in %d isolation domains, %d are left", len(ended), len(viewed)
            )


async def _adopt(
    appliance: Appliance,
    book: NamespaceBook,
    left: list[tuple[ExtentEngine, int]],
    viewed: frozenset[int],
) -> None:
    digests = {number: one.digest for number, one in enumerate(book.identities, 1)}
    began_at, num_fragments, num_bytes = time.monotonic(), 0, 0
    pool = make_pool(NUM_THREADS, "kvtier-verify", in_background=True)
    try:
        loop = asyncio.get_running_loop()
        verified = [loop.run_in_executor(pool, engine.found, number, digests.get) for engine, number in left]
        for (engine, number), fragments in zip(left, verified, strict=True):
            found = await fragments
            if not found:
                await loop.run_in_executor(pool, engine.forget, number)
            appliance.step(ExtentFound(engine.tier, number, found, viewed))
            num_fragments += len(found)
            num_bytes += sum(label.raw_length for _, label in found)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    took_s = time.monotonic() - began_at
    log.info(
        "%d fragments, %d MiB of memory kept, verified in %.2f s", num_fragments, num_bytes >> 20, took_s
    )
