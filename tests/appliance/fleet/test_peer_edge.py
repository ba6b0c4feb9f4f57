"""What a fetch was begun for ends, whatever goes wrong with it."""

import asyncio

import pytest

from kvtier.appliance.core.events import CopyFinished, Event
from kvtier.appliance.core.instructions import BundleBlocks, FetchBundle
from kvtier.appliance.fleet.peer_edge import PeerEdge
from kvtier.tiers.base import Cause, CopyItem
from kvtier.tiers.block import FragmentLabel, Tier

from ...e2e.fleet_hosts import IDENTITY, names_of


class BrokenHosts:
    """Hosts of which nothing can be found out."""

    def find(self, *_: object) -> None:
        """Fail, as a defect would."""
        raise RuntimeError("a defect")


def test_a_defect_ends_the_fetch_it_meets(caplog: pytest.LogCaptureFixture) -> None:
    """Before: its places were kept, and what came behind it waited for them, for ever."""
    names = names_of(1, 4)
    label = FragmentLabel(IDENTITY.digest, 1, names[0], b"", 0, 0, IDENTITY.geometry.fragment_bytes[0])
    batches = [(copy, [CopyItem(0, 0, label)]) for copy in (7, 8)]
    events: list[Event] = []

    async def main() -> None:
        edge = PeerEdge(BrokenHosts(), {}, events.append, lambda: 0.0, None)  # type: ignore[arg-type]
        edge.execute(FetchBundle(BundleBlocks(IDENTITY, b"", 0, names), Tier.DRAM, batches, 1.0))
        await asyncio.sleep(0)
        await edge.stop()

    asyncio.run(main())
    ended = [(one.copy, one.outcomes[0].cause) for one in events if isinstance(one, CopyFinished)]
    assert ended == [(7, Cause.IO_ERROR), (8, Cause.IO_ERROR)]
    assert "a defect" in caplog.text
