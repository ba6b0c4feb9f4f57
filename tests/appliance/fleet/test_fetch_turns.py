"""FetchTurns: whose fetch from a host begins next."""

import asyncio

from kvtier.appliance.fleet.fetch_turns import FetchTurns

from ..loops import run


def test_a_fetch_waits_for_one_of_another_tenant_at_most() -> None:
    """Before: for all that the other one had asked for."""

    async def scenario() -> None:
        turns, begun = FetchTurns(2), list[str]()

        async def fetch(tenant: str) -> None:
            await turns.acquire(tenant)
            begun.append(tenant)

        tasks = [asyncio.create_task(fetch(tenant)) for tenant in ["acme"] * 6 + ["bolt"] * 2]
        await asyncio.sleep(0)
        assert begun == ["acme"] * 2, "two at a time"
        for _ in tasks:
            turns.release()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert begun[2:] == ["acme", "bolt", "acme", "bolt", "acme", "acme"]

    run(scenario())


def test_a_turn_of_one_that_is_cancelled_goes_to_the_next() -> None:
    async def scenario() -> None:
        turns = FetchTurns(1)
        await turns.acquire("acme")
        waiting = [asyncio.create_task(turns.acquire(tenant)) for tenant in ("acme", "bolt", "cord")]
        await asyncio.sleep(0)
        waiting[0].cancel()  # before its turn
        await asyncio.sleep(0)
        turns.release()
        waiting[1].cancel()  # in the moment in which it gets its turn
        await asyncio.gather(*waiting, return_exceptions=True)
        assert [one.cancelled() for one in waiting] == [True, True, False]
        turns.release()
        await asyncio.wait_for(turns.acquire("acme"), 1.0)

    run(scenario())


def test_fetches_that_gave_up_take_no_turns() -> None:
    """Before: each cost its tenant a turn, and so made the next ones late, too."""

    async def scenario() -> None:
        turns, begun = FetchTurns(1), list[str]()

        async def fetch(tenant: str) -> None:
            await turns.acquire(tenant)
            begun.append(tenant)

        await fetch("cord")
        gave_up = [asyncio.create_task(fetch("acme")) for _ in range(3)]
        await asyncio.sleep(0)
        for task in gave_up:
            task.cancel()
        await asyncio.gather(*gave_up, return_exceptions=True)
        tasks = [asyncio.create_task(fetch(tenant)) for tenant in ["bolt"] * 3 + ["acme"] * 2]
        for _ in tasks:
            await asyncio.sleep(0)
            turns.release()
        await asyncio.gather(*tasks)
        assert begun[1:] == ["bolt", "acme", "bolt", "acme", "bolt"]

    run(scenario())
