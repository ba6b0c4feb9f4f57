"""Sessions that go on for days: what is remembered of them, and what the idle ones cost."""

from collections import OrderedDict
from collections.abc import ValuesView

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.requests.sessions import MIN_TIDY, SILENT_S, SessionEntry
from kvtier.tiers.block import Urgency

from ..rig import CLIENT, Rig, hashes


def use(rig: Rig, number: int) -> None:
    """Put four blocks into session `s`; they push out those before them."""
    rig.put(hashes(f"chain {number}", 4), session_id="s")


def test_a_session_does_not_remember_blocks_that_are_long_forgotten() -> None:
    rig = Rig(dram_blocks=4, nvme_blocks=0)
    for number in range(MIN_TIDY // 4 + 10):
        use(rig, number)
    session = rig.planner.sessions.get("s")
    assert session is not None
    assert len(session.blocks) < 100
    assert len(rig.planner.sessions.rows(session)) == 4


class Counted(OrderedDict[str, SessionEntry]):
    """Sessions that count how often somebody goes through them."""

    num_walks = 0

    def values(self) -> "ValuesView[SessionEntry]":  # type: ignore[override]
        self.num_walks += 1
        return super().values()


def test_sessions_that_are_idle_are_not_looked_at_with_every_tick() -> None:
    rig = Rig(session_idle_s=10.0)
    sessions = rig.planner.sessions
    counted = sessions._sessions = Counted()
    for number in range(20):
        rig.do(ev.SessionUpdated(CLIENT, f"{number}", Urgency.QUEUED))
    rig.now += 10.0
    rig.tick()
    assert {session.urgency for session in sessions} == {Urgency.IDLE}, "all in one step"
    counted.num_walks = 0
    for _ in range(50):
        rig.planner.sessions.expire(rig.now)
    assert counted.num_walks == 0
    rig.do(ev.SessionUpdated(CLIENT, "7", Urgency.QUEUED))
    rig.tick(10.0)
    again = sessions.get("7")
    assert again is not None
    assert again.urgency is Urgency.IDLE


def test_a_session_that_falls_silent_between_others_is_noticed_in_time() -> None:
    rig = Rig(session_idle_s=10.0)
    for number in range(3):
        rig.do(ev.SessionUpdated(CLIENT, f"{number}", Urgency.QUEUED))
        rig.tick(4.0)
    idle_at: dict[str, float] = {}
    for _ in range(12):
        rig.tick(1.0)
        for session in rig.planner.sessions:
            if session.urgency is Urgency.IDLE:
                idle_at.setdefault(session.id, rig.now)
    assert idle_at == {"0": 13.0, "1": 14.0, "2": 18.0}


def test_from_many_sessions_on_those_that_lost_their_last_block_are_forgotten() -> None:
    """Those with a last block are kept, and the blocks that all of them share; also behind ones that stay."""
    rig = Rig(dram_blocks=6, nvme_blocks=0, many_sessions=4)
    shared, stays = hashes("shared", 1), hashes("stays", 1)
    rig.put(shared)
    rig.put(stays, session_id="stays")
    rig.acquire(stays)
    for number in range(20):
        rig.put(hashes(f"chain {number}", 1), parent=shared[0], session_id=f"{number}")
        rig.now += SILENT_S
    kept = {session.id for session in rig.planner.sessions}
    living = {f"{n}" for n in range(20) if rig.found(shared + hashes(f"chain {n}", 1)) == 2}
    assert len(living) == 4
    assert living | {"stays"} <= kept
    assert len(kept) <= 4 + len(living)


def test_a_session_that_decodes_or_spoke_a_moment_ago_is_not_forgotten_for_being_one_of_many() -> None:
    rig = Rig(dram_blocks=4, nvme_blocks=0, many_sessions=2)
    rig.do(ev.SessionUpdated(CLIENT, "decodes", Urgency.DECODING))
    rig.now += SILENT_S
    for number in range(10):
        rig.put(hashes(f"chain {number}", 1), session_id=f"{number}")
    assert {session.id for session in rig.planner.sessions} == {"decodes", *map(str, range(10))}


def test_sessions_that_have_ended_are_not_held_for_a_review() -> None:
    rig = Rig()
    for number in range(50):
        rig.do(ev.SessionUpdated(CLIENT, f"{number}", Urgency.QUEUED))
        rig.do(ev.SessionEnded(rig.call(), CLIENT, f"{number}", archive=False))
    assert len(rig.planner.sessions._to_review) <= 2
