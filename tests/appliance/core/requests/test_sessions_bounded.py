"""What one request about a session costs at most, however many blocks and sessions there are."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.catalog.catalog import Catalog
from kvtier.appliance.core.instructions import Copy
from kvtier.appliance.core.requests import sessions as sessions_module
from kvtier.appliance.core.requests.sessions import STEP_BLOCKS, SessionEntry
from kvtier.tiers.base import CopyOutcome
from kvtier.tiers.block import Urgency

from ..rig import CLIENT, GEOMETRY, Rig, hashes

LENGTH = 2 * STEP_BLOCKS


def long_session(name: str = "s", **options: Any) -> tuple[Rig, list[int]]:
    """Return a rig with a session of LENGTH blocks, and their rows."""
    rig = Rig(dram_blocks=LENGTH + 8, nvme_blocks=0, **options)
    call = rig.start_put(hashes("chain", LENGTH), session_id=name)
    while call not in rig.answers:
        rig.settle()
        rig.tick()
    session = rig.planner.sessions.get(name)
    assert session is not None
    return rig, rig.planner.sessions.rows(session)


def say(rig: Rig, name: str, urgency: Urgency, client: int = CLIENT) -> None:
    rig.do(ev.SessionUpdated(client, name, urgency))


def settle(rig: Rig) -> int:
    """Let the steps that are left be done. Returns how many there were."""
    for number in range(1000):
        assert not rig.planner.check_integrity()
        if not rig.planner.sessions.is_busy:
            return number
        rig.tick(0.0)
    raise AssertionError("sessions stay busy")


def fork(rig: Rig, source: str, name: str) -> int:
    call = rig.call()
    rig.do(ev.SessionForked(call, CLIENT, source, name))
    count: int = rig.answers[call][-1].count
    return count


def test_blocks_of_sessions_are_bounded() -> None:
    """Before: only the number of sessions was bounded, and each held a handle for each block."""
    rig, _ = long_session(max_session_blocks=4 * LENGTH)
    sessions = rig.planner.sessions
    for number in range(20):
        assert fork(rig, "s", f"fork {number}") == LENGTH
        rig.do(ev.SessionUpdated(CLIENT, "s", Urgency.PREFILL))
        settle(rig)
        assert sum(len(session.blocks) for session in sessions) <= 4 * LENGTH
    assert {session.id for session in sessions} == {"s", "fork 17", "fork 18", "fork 19"}


def test_a_decoding_session_is_the_last_to_be_forgotten_for_its_blocks() -> None:
    rig, _ = long_session(max_session_blocks=2 * LENGTH)
    say(rig, "s", Urgency.DECODING)
    for number in range(3):
        fork(rig, "s", f"fork {number}")
        settle(rig)
    assert {session.id for session in rig.planner.sessions} == {"s", "fork 2"}


def test_what_sessions_hold_is_given_back_when_they_end() -> None:
    rig, _ = long_session(max_session_blocks=2 * LENGTH)
    for number in range(5):
        fork(rig, "s", f"fork {number}")
        rig.do(ev.SessionEnded(rig.call(), CLIENT, f"fork {number}", archive=False))
    settle(rig)
    assert [session.id for session in rig.planner.sessions] == ["s"]


def test_a_session_forgets_its_oldest_blocks_beyond_what_one_may_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions_module, "MAX_BLOCKS", 16)
    monkeypatch.setattr(sessions_module, "MIN_TIDY", 16)
    rig = Rig(dram_blocks=100, nvme_blocks=0)
    for urgency in (Urgency.PREFILL, Urgency.DECODING):
        session = rig.planner.sessions.claim(urgency.name, CLIENT)
        session.tidy_at = 16
        say(rig, session.id, urgency)
        for number in range(10):
            rig.put(hashes(f"{urgency.name} {number}", 4), session_id=session.id)
        settle(rig)
        newest = [
            rig.planner.catalog.find(rig.namespace_id, name)
            for number in range(7, 10)
            for name in hashes(f"{urgency.name} {number}", 4)
        ]
        assert rig.planner.sessions.rows(session)[-12:] == newest
        assert len(session.blocks) <= 16


def put_without_audit(rig: Rig, chain: list[bytes], parent: bytes, session_id: str) -> None:
    """Put a chain; the audit of each step would look at all blocks there are."""
    call, planner = rig.call(), rig.planner
    reserve = ev.ReserveRequested(call, CLIENT, "", rig.namespace_id, parent, chain, session_id)
    spans = [(number * GEOMETRY.block_bytes, GEOMETRY.block_bytes) for number in range(len(chain))]
    events: list[ev.Event] = [ev.CommitRequested(call, CLIENT, "", 0, spans, reserve)]
    while events or planner.is_busy:
        for found in planner.handle(events.pop() if events else ev.Tick(), rig.now):
            if isinstance(found, Copy):
                outcomes = [CopyOutcome(None, b"7" * 16)] * len(found.items)
                events.append(ev.CopyFinished(found.copy, outcomes))
    assert planner.lookup(rig.namespace_id, chain).num_blocks == len(chain)  # type: ignore[union-attr]


def test_a_session_holds_as_many_blocks_as_the_page_of_limits_says() -> None:
    """The test above has a limit of its own."""
    limit = 16_384  # docs/limits.md
    rig, parent = Rig(dram_blocks=limit + 2 * LENGTH, nvme_blocks=0), b""
    most = 0
    for number in range(limit // LENGTH + 1):
        chain = hashes(f"part {number}", LENGTH)
        put_without_audit(rig, chain, parent, "agent")
        parent = chain[-1]
        session = rig.planner.sessions.get("agent")
        assert session is not None
        most = max(most, len(session.blocks))
        assert rig.planner.sessions.rows(session)[-1] == rig.planner.catalog.find(rig.namespace_id, parent)
    assert limit * 3 // 4 <= most <= limit
    assert rig.planner.check_integrity() == []


class Work:
    """Counts blocks that lose a keeper, and those of another urgency. Keepers are gained by all at once."""

    def __init__(self, catalog: Catalog, rows: list[int]) -> None:
        self._catalog, self._rows = catalog, rows
        self._were = self._are()

    def _are(self) -> list[tuple[int, int]]:
        catalog = self._catalog
        return [(catalog.num_keepers[row], catalog.urgency[row]) for row in self._rows]

    def take(self) -> int:
        """Return how many changed since the last call."""
        were, self._were = self._were, self._are()
        both = list(zip(were, self._were, strict=True))
        return sum(was[0] > now[0] for was, now in both) + sum(was[1] != now[1] for was, now in both)


def test_a_change_of_a_long_session_is_done_in_steps() -> None:
    """Before: one change looked at all blocks at once."""
    rig, rows = long_session()
    catalog = rig.planner.catalog
    work = Work(catalog, rows)
    for urgency in (Urgency.DECODING, Urgency.IDLE, Urgency.DECODING, Urgency.ENDED):
        say(rig, "s", urgency)
        assert work.take() <= STEP_BLOCKS
        if urgency is Urgency.DECODING:  # a promise, from now on
            assert {catalog.num_keepers[row] for row in rows} == {1}
        while rig.planner.sessions.is_busy:
            assert rig.planner.next_deadline() == rig.now
            rig.tick(0.0)
            assert 0 < work.take() <= STEP_BLOCKS
        assert {catalog.urgency[row] for row in rows} == {urgency}
        assert {catalog.num_keepers[row] for row in rows} == {int(urgency is Urgency.DECODING)}
        assert not rig.planner.check_integrity()


def test_a_session_that_decodes_again_at_once_keeps_each_block_once() -> None:
    rig, rows = long_session()
    for urgency in (Urgency.DECODING, Urgency.IDLE, Urgency.DECODING):
        say(rig, "s", urgency)
    assert {rig.planner.catalog.num_keepers[row] for row in rows} == {1}
    settle(rig)
    assert {rig.planner.catalog.num_keepers[row] for row in rows} == {1}


def test_sessions_that_come_and_go_faster_than_steps_do_not_gather() -> None:
    rig, _ = long_session()
    for _ in range(200):  # without the audit of each step
        rig.planner.handle(ev.SessionForked(rig.call(), CLIENT, "s", "fork"), rig.now)
        rig.planner.handle(ev.SessionUpdated(CLIENT, "fork", Urgency.DECODING), rig.now)
        rig.planner.handle(ev.SessionEnded(rig.call(), CLIENT, "fork", archive=False), rig.now)
    assert rig.planner.sessions._num_left <= 64 * 2 * LENGTH
    settle(rig)


class CountedOrder(OrderedDict[str, SessionEntry]):
    """An order of sessions that counts those that are gone through."""

    num_seen = 0

    def values(self) -> Iterator[SessionEntry]:  # type: ignore[override]
        for session in super().values():
            CountedOrder.num_seen += 1
            yield session


def test_the_session_to_forget_is_found_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: all decoding sessions were gone through for each new one."""
    monkeypatch.setattr(sessions_module, "OrderedDict", CountedOrder)
    monkeypatch.setattr(CountedOrder, "num_seen", 0)
    rig = Rig(max_sessions=100)
    for number in range(1000):
        say(rig, f"{number}", Urgency.DECODING)
    assert CountedOrder.num_seen <= 1000
    assert [session.id for session in rig.planner.sessions] == [f"{n}" for n in range(900, 1000)]
    say(rig, "950", Urgency.IDLE)
    say(rig, "new", Urgency.DECODING)
    assert rig.planner.sessions.get("950") is None
    assert rig.planner.sessions.get("900") is not None


def test_a_client_that_goes_costs_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: all sessions of all tenants were gone through. Its own become idle, a bounded number a step."""
    rig, num_updates = Rig(), 0
    update = sessions_module.Sessions.update

    def counted(*arguments, **named) -> None:  # type: ignore[no-untyped-def]
        nonlocal num_updates
        num_updates += 1
        update(*arguments, **named)

    rig.do(ev.ClientOpened(2, "other", True, ""))
    for number in range(500):
        say(rig, f"mine {number}", Urgency.DECODING)
        say(rig, f"other {number}", Urgency.DECODING, client=2)
    rig.planner.sessions._sessions = CountedOrder({one.id: one for one in rig.planner.sessions})
    monkeypatch.setattr(CountedOrder, "num_seen", 0)
    monkeypatch.setattr(sessions_module.Sessions, "update", counted)
    rig.planner.handle(ev.ClientGone(2, "closed"), rig.now)
    assert CountedOrder.num_seen == 0
    assert num_updates <= STEP_BLOCKS // sessions_module.SESSION_COST
    say(rig, "other 499", Urgency.DECODING)  # goes on with another client
    settle(rig)
    idle = {session.id for session in rig.planner.sessions if session.urgency is Urgency.IDLE}
    assert idle == {f"other {number}" for number in range(499)}
    assert not rig.planner.check_integrity()
