"""AccessLog: one access per request, chains told apart, a slow watcher told what it missed."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from kvtier.appliance.appliance import Appliance
from kvtier.appliance.core import events as ev
from kvtier.appliance.replay.setups import ModelShape, single_tier
from kvtier.appliance.replay.shell import CLIENT
from kvtier.appliance.replay.untimed import UntimedShell
from kvtier.appliance.server.access_log import AccessKind, AccessLog, AccessWatcher, BlockAccess
from kvtier.tiers.block import Urgency

from ...replay.traces import request, trace_of


def heard(watcher: AccessWatcher) -> list[BlockAccess]:
    """Return what a watcher was told so far."""

    async def take() -> list[BlockAccess]:
        watcher.close()
        return [access async for access in watcher]

    return asyncio.run(take())


class World:
    """A planner that holds two chains with a common beginning, and a log beside it."""

    def __init__(self, capacity: int = 100) -> None:
        trace = trace_of(request(0, [1, 2, 3]), request(1, [1, 4]))
        self.shell = UntimedShell(trace, single_tier("lru", "100%", trace, ModelShape()))
        self.shell.run()
        self.names = self.shell.names
        self.port = cast(Any, SimpleNamespace(tap=None))
        self.log = AccessLog(cast(Appliance, self.port), self.shell.planner, capacity)

    def tell(self, *events: ev.Event) -> None:
        """What the appliance does with its tap."""
        for event in events:
            if self.port.tap is not None:
                self.port.tap(event, 7.0)


def test_nobody_is_called_while_nobody_listens() -> None:
    world = World()
    assert world.port.tap is None
    watcher = world.log.join()
    assert world.port.tap is not None
    world.log.leave(watcher)
    world.log.leave(watcher)
    assert world.port.tap is None


def test_chains_in_one_report_are_told_apart() -> None:
    world = World()
    one, two, three, four = world.names
    watcher = world.log.join()
    world.tell(ev.Touched(CLIENT, 1, [one, two, four, three], "s"))
    chains = [(access.parent_hash, list(access.prefix_hashes)) for access in heard(watcher)]
    assert chains == [(b"", [one, two]), (one, [four]), (two, [three])]


def test_an_acquire_counts_from_its_first_block_and_a_retry_not_at_all() -> None:
    world = World()
    one, two, three, _ = world.names
    unknown = b"u" * 32
    watcher = world.log.join()
    acquire = ev.AcquireRequested(1, CLIENT, "id", 1, [one, two, three, unknown], first_block=1)
    world.tell(acquire, acquire)
    [access] = heard(watcher)
    assert access.kind is AccessKind.ASK
    assert access.parent_hash == one
    assert list(access.prefix_hashes) == [two, three, unknown]
    assert access.num_found == 2


def test_puts_of_either_form_and_words_of_sessions() -> None:
    world = World()
    new = b"n" * 32
    reserve = ev.ReserveRequested(1, CLIENT, "a", 1, world.names[0], [new], "s")
    both = ev.ReserveRequested(2, CLIENT, "b", 1, new, [b"m" * 32], "s")
    watcher = world.log.join()
    world.tell(reserve, ev.CommitRequested(3, CLIENT, "c", 9, [(0, 1)]))
    world.tell(ev.CommitRequested(2, CLIENT, "b", 0, [(0, 1)], both))
    world.tell(ev.SessionUpdated(CLIENT, "s", Urgency.WAITING, back_at=37.0, num_decoded_tokens=5))
    world.tell(ev.SessionEnded(4, CLIENT, "s", archive=True, num_decoded_tokens=6))
    accesses = heard(watcher)
    assert [access.kind.name for access in accesses] == ["PUT", "PUT", "SESSION", "SESSION"]
    assert [access.parent_hash for access in accesses[:2]] == [world.names[0], new]
    words = [access.word for access in accesses[2:]]
    assert words == [(Urgency.WAITING, 5, 30.0, False), (Urgency.ENDED, 6, 0.0, True)]


def test_a_slow_watcher_is_told_how_much_it_missed() -> None:
    world = World(capacity=2)
    watcher, access = AccessWatcher(2), BlockAccess(0.0, AccessKind.PUT, 1, "")
    for _ in range(5):
        watcher.tell(access)

    async def take_two() -> list[int]:
        return [(await anext(watcher)).num_lost for _ in range(2)]

    assert asyncio.run(take_two()) == [0, 0]
    watcher.tell(access)
    assert [access.num_lost for access in heard(watcher)] == [3]
    assert world.log.join() is not watcher
