"""Puts, as a newcomer may read them: dedup, parents, room, failures, retries."""

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import Publish, Reply
from kvtier.appliance.core.requests.put_job import MAX_STEP_FRAGMENTS
from kvtier.appliance.core.results import PutOutcome, PutResult, Refusal
from kvtier.tiers.base import Cause, CopyOutcome
from kvtier.tiers.block import Tier

from ..rig import CLIENT, GEOMETRY, STORED, Rig, hashes


def test_a_put_becomes_visible_when_its_bytes_have_landed() -> None:
    rig = Rig()
    chain = hashes("a", 2)
    call = rig.start_put(chain)
    assert call not in rig.answers
    assert not rig.published
    assert rig.found(chain) == 0
    rig.settle()
    assert list(rig.answer(call).outcomes) == [STORED, STORED]
    assert sorted(rig.published.values()) == sorted(chain * GEOMETRY.num_groups)
    assert rig.found(chain) == 2


def test_what_is_stored_is_not_copied_again() -> None:
    rig = Rig()
    chain = hashes("a", 2)
    rig.put(chain[:1])
    num_copies = sum(len(copy.items) for copy in rig.started)
    assert rig.put(chain) == [PutOutcome.DEDUPLICATED, STORED]
    assert sum(len(copy.items) for copy in rig.started) == num_copies + GEOMETRY.num_groups


def test_what_another_put_is_writing_is_in_progress() -> None:
    rig = Rig()
    chain = hashes("a", 1)
    rig.start_put(chain)
    second = rig.start_put(chain)
    assert list(rig.answer(second).outcomes) == [PutOutcome.IN_PROGRESS]


def test_without_its_parent_a_block_is_not_taken() -> None:
    rig = Rig()
    chain = hashes("a", 2)
    assert rig.put(chain[1:], parent=chain[0]) == [PutOutcome.PARENT_MISSING]
    rig.put(chain[:1])
    assert rig.put(chain[1:], parent=chain[0]) == [STORED]


def test_a_put_waits_for_room_until_a_spill_has_made_some() -> None:
    rig = Rig(dram_blocks=2)
    rig.put(hashes("old", 2))
    call = rig.start_put(hashes("new", 1))
    assert call not in rig.answers
    assert [copy.target.label for copy in rig.copies] == ["nvme"]
    rig.settle()
    assert list(rig.answer(call).outcomes) == [STORED]


@pytest.mark.parametrize(("later_s", "is_first"), [(0.4, True), (0.6, False)])
def test_a_read_gets_room_before_the_puts_of_the_last_half_second(later_s: float, is_first: bool) -> None:
    rig = Rig(dram_blocks=2, nvme_blocks=8, max_pinned_fraction=2.0)
    cold = rig.cool_new("cold", 1)
    held = [rig.acquire(rig.put_new(name, 1)) for name in "ab"]
    put = rig.start_put(hashes("new", 1))
    rig.settle()
    rig.tick(later_s)
    get = rig.acquire(cold)
    rig.release(held[0])
    while put not in rig.answers and not rig.answer(get).last:
        rig.finish(rig.copies[0])
    assert (put in rig.answers) is not is_first
    assert rig.answer(get).last is is_first
    rig.release(held[1])
    rig.settle()
    assert list(rig.answer(put).outcomes) == [STORED]
    assert rig.answer(get).last


def test_without_room_by_its_deadline_the_rest_is_refused() -> None:
    rig = Rig(dram_blocks=2, nvme_blocks=0)
    rig.put(hashes("held", 2))
    held = rig.acquire(hashes("held", 2))
    call = rig.start_put(hashes("new", 1), deadline_at=1.0)
    rig.tick(0.9)
    assert call not in rig.answers
    rig.tick(0.2)
    assert list(rig.answer(call).outcomes) == [PutOutcome.NO_ROOM]
    assert rig.planner.story.counters["puts_without_room"] == 1
    rig.release(held)


def test_no_more_puts_wait_than_configured() -> None:
    rig = Rig(dram_blocks=1, nvme_blocks=0, max_waiting_puts=1)
    rig.put(hashes("held", 1))
    rig.acquire(hashes("held", 1))
    rig.start_put(hashes("waits", 1))
    refused = rig.answer(rig.start_put(hashes("refused", 1)))
    assert isinstance(refused, Refusal)
    assert refused.reason == "TOO_MANY_IN_FLIGHT"
    assert refused.retry_after_s > 0


def test_two_puts_that_waited_for_one_block_do_not_both_call_it_theirs() -> None:
    """The second one finds it under way when there is room again. (Simulator, seed 54.)"""
    rig = Rig(dram_blocks=1)
    rig.put(hashes("old", 1))
    block = hashes("new", 1)
    first, second = rig.start_put(block), rig.start_put(block)
    while first not in rig.answers:
        rig.finish(rig.copies[0])
    rig.settle()
    outcomes = [rig.answer(call).outcomes[0] for call in (first, second)]
    assert outcomes[0] == STORED
    assert outcomes[1] in (PutOutcome.IN_PROGRESS, PutOutcome.DEDUPLICATED)


def test_a_failed_copy_is_a_failed_block_and_nothing_is_left() -> None:
    rig = Rig()
    call = rig.start_put(hashes("a", 1))
    rig.finish(rig.copies[0], Cause.IO_ERROR)
    assert list(rig.answer(call).outcomes) == [PutOutcome.FAILED]
    assert rig.planner.catalog.num_blocks == 0
    assert not rig.published


def test_new_bytes_have_a_new_checksum() -> None:
    """A parent that lost its bytes keeps its row; the next put must not inherit its checksum. (Seed 151.)"""
    rig = Rig()
    chain = rig.cool_new("a", 2)
    rig.acquire(chain[:1])
    for copy in list(rig.copies):
        rig.finish(copy, Cause.WRONG_CHECKSUM)
    assert rig.where(chain[0]) == set()
    call = rig.start_put(chain[:1])
    assert [item.label.checksum for copy in rig.copies for item in copy.items] == [b"", b""]
    rig.settle()
    assert list(rig.answer(call).outcomes) == [STORED]


def test_a_retry_is_the_same_request() -> None:
    rig = Rig()
    chain = hashes("a", 2)
    first = rig.start_put(chain, request_id="r")
    early = rig.start_put(chain, request_id="r")
    assert len(rig.started) == 1
    rig.settle()
    late = rig.start_put(chain, request_id="r")
    answers = [list(rig.answer(call).outcomes) for call in (first, early, late)]
    assert answers == [[STORED, STORED]] * 3


def test_a_request_under_way_is_remembered_whatever_else_comes() -> None:
    rig = Rig(max_remembered_requests=1)
    first = rig.start_put(hashes("a", 1), request_id="r")
    rig.start_put(hashes("b", 1), request_id="s")
    again = rig.start_put(hashes("a", 1), request_id="r")
    assert len(rig.started) == 2
    rig.settle()
    assert rig.answer(first) == rig.answer(again)


def test_reserve_then_commit() -> None:
    rig = Rig()
    chain = hashes("a", 2)
    rig.put(chain[:1])
    reserved = rig.answer(rig.reserve(chain))
    assert list(reserved.outcomes) == [PutOutcome.DEDUPLICATED, PutOutcome.NEEDED]
    call = rig.commit(reserved.reservation_id, 1)
    rig.settle()
    assert list(rig.answer(call).outcomes) == [PutOutcome.DEDUPLICATED, STORED]


def test_a_reservation_that_is_never_committed_is_given_back() -> None:
    rig = Rig(reservation_ttl_s=1.0)
    reserved = rig.answer(rig.reserve(hashes("a", 1)))
    rig.tick(1.1)
    assert rig.planner.core.transitions.arriving_bytes[Tier.DRAM] == 0
    late = rig.answer(rig.commit(reserved.reservation_id, 1))
    assert isinstance(late, Refusal)
    assert late.reason == "UNKNOWN_RESERVATION"


def test_a_reservation_that_ends_while_it_waits_is_answered() -> None:
    rig = Rig(dram_blocks=1, nvme_blocks=0, reservation_ttl_s=1.0, put_wait_s=5.0)
    rig.put(hashes("held", 1))
    rig.acquire(hashes("held", 1))
    call = rig.reserve(hashes("a", 1))
    rig.tick(1.1)
    assert list(rig.answer(call).outcomes) == [PutOutcome.FAILED]


def test_the_death_of_a_client_frees_no_slot_that_is_being_written() -> None:
    rig = Rig(dram_blocks=1, nvme_blocks=0)
    rig.start_put(hashes("a", 1))
    rig.do(ev.ClientGone(CLIENT, "died"))
    assert rig.planner.core.transitions.arriving_bytes[Tier.DRAM] == GEOMETRY.block_bytes
    rig.settle()
    assert rig.where(hashes("a", 1)[0]) == {"dram"}


def test_a_client_that_names_a_wrong_parent_ties_no_circle() -> None:
    rig = Rig()
    a, b = hashes("a", 1), hashes("b", 1)
    rig.put(a)
    rig.put([*b, *a])
    rig.put([*a, *b])
    assert rig.planner.catalog.parent[rig.planner.catalog.find(rig.namespace_id, a[0])] == -1


def test_a_large_put_takes_turns() -> None:
    """Between two ticks others are served: no event but a Tick admits more of it. A block has as many
    fragments as it has layer groups."""
    step = MAX_STEP_FRAGMENTS // GEOMETRY.num_groups
    rig = Rig(dram_blocks=4 * step, nvme_blocks=0)
    chain = hashes("large", 3 * step)
    call = rig.start_put(chain)
    for num_turns in (1, 2, 3):
        rig.settle()
        assert rig.found(chain) == num_turns * step
        assert rig.planner.is_busy == (num_turns < 3)
        rig.do(ev.KeptAlive(None, CLIENT, []))
        assert rig.found(chain) == num_turns * step, "not a Tick"
        rig.tick()
    assert rig.answer(call).outcomes == bytes([STORED]) * len(chain)


def test_what_arrived_of_a_block_that_failed_in_part_may_leave_for_others() -> None:
    rig = Rig(dram_blocks=2, nvme_blocks=0)
    torn, new = hashes("torn", 1), hashes("new", 2)
    rig.start_put(torn)
    (copy,) = rig.copies
    rig.copies.clear()
    rig.do(ev.CopyFinished(copy.copy, [CopyOutcome(None, b"7" * 16), CopyOutcome(Cause.IO_ERROR)]))
    assert rig.put(new) == [STORED] * 2
    assert rig.planner.catalog.find(rig.namespace_id, torn[0]) < 0


def test_what_a_copy_says_is_written_out_when_it_is_read_and_is_still_true_then() -> None:
    """A put's items and labels are made lazily: after its blocks left and their rows name others, too."""
    rig = Rig(dram_blocks=4, nvme_blocks=0)
    first, chain = hashes("a", 1), hashes("b", 3)
    rig.put(first)
    rig.start_put(chain, parent=first[0])
    (copy,) = rig.copies
    catalog, offsets = rig.planner.catalog, (0, GEOMETRY.fragment_bytes[0])
    fragments = [f for name in chain for f in catalog.fragments(catalog.find(rig.namespace_id, name))]
    expected = catalog.labels_of(fragments)
    places = [catalog.place[Tier.DRAM][fragment] for fragment in fragments]
    landed = rig.do(ev.CopyFinished(copy.copy, [CopyOutcome(None, bytes([n]) * 16) for n in range(6)]))
    rig.copies.clear()
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    rig.put(hashes("c", 4))  # in their rows and places
    assert [item.target for item in copy.items] == places
    assert [item.source for item in copy.items] == [
        block * GEOMETRY.block_bytes + offset for block in range(3) for offset in offsets
    ]
    (run,) = [each for each in landed if isinstance(each, Publish)]
    for number, (label, told) in enumerate(zip(expected, run.labels, strict=True)):
        label.checksum = bytes([number]) * 16
        assert label == told
    assert [label.parent_hash for label in run.labels][::2] == [first[0], *chain[:2]]


def test_a_block_named_twice_is_not_stored_where_its_bytes_did_not_arrive() -> None:
    rig = Rig(nvme_blocks=0)
    chain = hashes("a", 2)
    call = rig.start_put([*chain, chain[0]])
    while rig.copies:
        rig.finish(rig.copies[0], Cause.SOURCE_GONE)
    outcomes = list(rig.answer(call).outcomes)
    assert rig.found(chain) == 0
    assert STORED not in outcomes


def test_a_landing_in_two_halves_is_the_same_as_in_one() -> None:
    """The answer is in the first; who holds the blocks and who may evict them, in the second, which the next
    event brings along when nobody asked for it: at the time of the first."""
    told = []
    for how in ("whole", "halves", "left to the next event"):
        rig = Rig(dram_blocks=2, nvme_blocks=0)
        chain = hashes("a", 2)
        call = rig.start_put(chain, session_id="s")
        (copy,) = rig.copies
        landed = ev.CopyFinished(copy.copy, [CopyOutcome(None, b"7" * 16)] * len(copy.items))
        rows = [rig.planner.catalog.find(rig.namespace_id, name) for name in chain]
        keepers = rig.planner.catalog.num_keepers
        if how == "whole":
            first, second = rig.planner.handle(landed, 1.0), rig.planner.follow_up()
            assert second == []
        else:
            first = rig.planner.answer(landed, 1.0)
            assert [keepers[row] for row in rows] == [1, 1], "not given up before everybody heard"
            assert not rig.planner.check_integrity()
            second = rig.planner.follow_up() if how == "halves" else []
        assert Reply(call, PutResult(bytes([STORED, STORED]))) in first
        following = rig.planner.handle(ev.KeptAlive(None, CLIENT, []), 2.0)
        assert not rig.planner.check_integrity()
        assert rig.planner.follow_up() == []
        assert [keepers[row] for row in rows] == [0, 0]
        session = rig.planner.sessions.get("s")
        assert session is not None
        assert rig.planner.sessions.rows(session) == rows
        used_at = [rig.planner.catalog.last_used[row] for row in rows]
        told.append(([type(each) for each in first + second + following], used_at))
    assert told[0] == told[1] == told[2]
    assert told[0][1] == [1.0, 1.0]


def test_a_put_in_one_step_that_is_repeated_as_a_reservation_has_none_to_commit() -> None:
    rig = Rig()
    rig.start_put(hashes("a", 2), request_id="r")
    call = rig.call()
    rig.do(ev.ReserveRequested(call, CLIENT, "r", rig.namespace_id, b"", hashes("a", 2)))
    assert rig.answer(call).reservation_id == 0
    assert bytes(rig.answer(call).outcomes) == bytes([PutOutcome.NEEDED] * 2)
