"""Names of hosts stand for their addresses; one that is not resolved takes nothing from the others."""

import asyncio

from kvtier.appliance.fleet.members import FleetMembers

from ..loops import run

PATIENCE_S = 60.0


def addresses_of(*names: str) -> frozenset[str]:
    """Return the first addresses that are told for these names."""

    async def first() -> frozenset[str]:
        told: asyncio.Future[frozenset[str]] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(FleetMembers(names, told.set_result).run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await told
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return run(first())


def test_addresses_are_themselves() -> None:
    assert addresses_of("127.0.0.1:7070", "[::1]:7071") == {"127.0.0.1:7070", "[::1]:7071"}


def test_a_name_is_all_its_addresses_and_a_wrong_one_is_none() -> None:
    found = addresses_of("127.0.0.9:7070", "localhost:7071", "kvtier-hosts.invalid:7072")
    assert "127.0.0.9:7070" in found
    assert found & {"127.0.0.1:7071", "[::1]:7071"}
    assert not [one for one in found if one.endswith(":7072")]
