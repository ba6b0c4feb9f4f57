"""What one tenant can take of pins, sessions and waiting requests: never what others need."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.events import RetentionHint
from kvtier.appliance.core.requests.waiting import MAX_MISFITS
from kvtier.appliance.core.results import AcquireResult, PinResult, Refusal
from kvtier.tiers.block import Tier, Urgency

from .test_quotas import ACME, BOLT, NUM_EXTENTS, Shared, names

Record = Callable[[str, object], None]


class Divided(Shared):
    """Two tenants, each with blocks, on a planner with small limits that are divided among them."""

    def __init__(self, **limits: object) -> None:
        super().__init__({}, limits={"num_tenants": 2, **limits})
        for tenant in (ACME, BOLT):
            self.put(tenant, 0, 2)


def pin_until_refused(
    shared: Shared, tenant: int, num_blocks: int, most: int = 1000
) -> tuple[int, Refusal | None]:
    for number in range(most):
        result = shared.pin(tenant, 0, num_blocks)
        if isinstance(result, Refusal):
            return number, result
        assert isinstance(result, PinResult)
    return most, None


def test_many_pins_on_one_block_do_not_use_up_the_bytes_of_others(record_property: Record) -> None:
    """Before: 16,384 pins on one block of 4 KiB refused every other pin for days."""
    shared = Divided()
    assert pin_until_refused(shared, ACME, 1, most=3 * NUM_EXTENTS) == (3 * NUM_EXTENTS, None)
    assert shared.planner.pins.pinned_bytes(Tier.DRAM) == shared.planner.catalog.block_bytes(0)
    assert isinstance(shared.pin(BOLT, 0, 2), PinResult)
    record_property("pins_on_one_block", 3 * NUM_EXTENTS)


def test_pins_of_one_tenant_leave_the_others_their_share(record_property: Record) -> None:
    shared = Divided(max_pinned_blocks=40)
    number, refusal = pin_until_refused(shared, ACME, 1)
    record_property("pinned_blocks", number)
    assert number == 20
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_s) == ("TIER_FULL", 1.0)
    assert "max_pinned_blocks: the tenant's pins have 20 blocks" in refusal.message
    assert pin_until_refused(shared, BOLT, 2)[0] >= 5


def test_bytes_that_one_tenant_pins_leave_the_others_their_share() -> None:
    shared = Divided()
    for name in range(1, 4):
        shared.put(ACME, name, 2)
    pinned = [isinstance(shared.pin(ACME, name, 2), PinResult) for name in range(4)]
    assert pinned == [True, True, True, False]  # half of the tier
    assert isinstance(shared.pin(BOLT, 0, 2), PinResult)


def test_what_pins_took_is_given_back_with_the_last_of_them() -> None:
    shared = Divided()
    first, second = (shared.pin(ACME, 0, 2) for _ in range(2))
    assert isinstance(first, PinResult)
    assert isinstance(second, PinResult)
    held = shared.planner.pins.pinned_bytes(Tier.DRAM)
    shared.do(ev.UnpinRequested(first.pin_id))
    assert shared.planner.pins.pinned_bytes(Tier.DRAM) == held > 0
    shared.do(ev.UnpinRequested(second.pin_id))
    assert shared.planner.pins.pinned_bytes(Tier.DRAM) == 0


def test_sessions_of_one_tenant_do_not_make_others_forgotten(record_property: Record) -> None:
    """Before: the longest silent session of all tenants was forgotten."""
    shared = Divided(max_sessions=20)
    for number in range(4):
        shared.do(ev.SessionUpdated(BOLT, f"bolt\tquiet {number}", Urgency.WAITING))
    for number in range(100):
        shared.do(ev.SessionUpdated(ACME, f"acme\tloud {number}", Urgency.WAITING))
    names = [session.id for session in shared.planner.sessions]
    record_property("sessions_of_others", sum(name.startswith("bolt\t") for name in names))
    assert sum(name.startswith("bolt\t") for name in names) == 4
    own = [name for name in names if name.startswith("acme\t")]
    assert own == [f"acme\tloud {number}" for number in range(100 - len(own), 100)]
    assert len(own) == 10
    recent = [session.id for session in shared.planner.sessions.by_activity()]
    assert recent == [*reversed(own), *(f"bolt\tquiet {number}" for number in (3, 2, 1, 0))]


def test_sessions_that_ended_leave_their_share_to_new_ones() -> None:
    """What is not given back makes the tenant's living sessions forgotten, one for each new one."""
    shared = Divided(max_sessions=20)
    for number in range(100):
        shared.do(ev.SessionUpdated(ACME, f"acme\told {number}", Urgency.WAITING))
        shared.do(ev.SessionEnded(10_000 + number, ACME, f"acme\told {number}", archive=False))
    for number in range(8):
        shared.do(ev.SessionUpdated(ACME, f"acme\tnew {number}", Urgency.WAITING))
    names = [session.id for session in shared.planner.sessions]
    assert [name for name in names if name.startswith("acme\t")] == [f"acme\tnew {n}" for n in range(8)]


@pytest.mark.parametrize("priority", [51, 100])
def test_what_a_tenant_says_of_retention_costs_no_other_one_its_part_of_memory(
    priority: int, record_property: Record
) -> None:
    """Before: all blocks of the other tenant left, however lately they were used. In an engine whoever may
    send `kv_hints` says it."""
    shared = Shared({}, has_nvme=True, limits={"num_tenants": 2})
    hint = (RetentionHint(0, 0, priority),)
    for name in range(NUM_EXTENTS // 2):
        shared.put(BOLT, name, 2)
        shared.put(ACME, name, 2, hint)
    for name in range(NUM_EXTENTS // 2):
        lease = shared.acquire(BOLT, name, 2)
        shared.do(ev.ReleaseRequested(None, BOLT, [lease.lease_id]))
    options = replace(shared.planner.core.options, high_watermark=0.5, low_watermark=0.5)
    shared.do(ev.PolicyChanged(options, shared.planner.core.choice, {}))
    for _ in range(30):
        shared.now += 1.0
        shared.do(ev.Tick())
    catalog = shared.planner.catalog
    rows = [
        catalog.find(shared.namespace[BOLT], name)
        for n in range(NUM_EXTENTS // 2)
        for name in names(BOLT, n, 2)
    ]
    num_left = sum(catalog.num_resident[Tier.DRAM][row] > 0 for row in rows)
    record_property("retained_beside", num_left)
    assert num_left == NUM_EXTENTS // 2, "half of what there may be below the watermark"


class Waiter:
    """A request that waits for room, which comes when it is told. `tried` are those that were continued."""

    is_done = wants_turn = has_room = False

    def __init__(self, tried: list["Waiter"] | None = None) -> None:
        self.tried = [] if tried is None else tried

    def advance(self) -> bool:
        self.tried.append(self)
        return self.has_room

    def give_up(self) -> None:
        self.is_done = True


def test_puts_that_wait_for_room_leave_the_others_their_share() -> None:
    waiting = Divided(max_waiting_puts=8).planner.waiting
    while not waiting.is_full("tenant:acme"):
        waiting.add(Waiter(), Urgency.QUEUED, 1.0, "tenant:acme")
    assert waiting.held("tenant:acme") == 4
    assert not waiting.is_full("tenant:bolt")
    waiting.expire(2.0)
    assert waiting.held("tenant:acme") == 0


def test_tenants_take_turns_for_room() -> None:
    """The first of a tenant stops its own, and none of the others; reads go before recent puts of all."""
    waiting, tried = Divided().planner.waiting, list[Waiter]()
    first, second, third, read, other = (Waiter(tried) for _ in range(5))
    for put in (first, second, third):
        waiting.add(put, Urgency.QUEUED, 9.0, "tenant:acme", behind_s=0.5)
    waiting.add(other, Urgency.QUEUED, 9.0, "tenant:bolt", behind_s=0.5)
    waiting.retry(is_tick=False)
    assert tried == [first, other]
    other.has_room = True
    waiting.retry(is_tick=False)
    assert tried[2:] == [first, other]
    waiting.add(other, Urgency.QUEUED, 9.0, "tenant:bolt", behind_s=0.5)
    waiting.add(read, Urgency.QUEUED, 9.0, "tenant:bolt")
    first.has_room = second.has_room = third.has_room = read.has_room = True
    waiting.retry(is_tick=False)
    assert tried[4:] == [read, first, other, second, third]
    assert len(waiting) == 0


def test_a_step_tries_a_bounded_number_of_tenants() -> None:
    waiting, tried = Divided().planner.waiting, list[Waiter]()
    for tenant in range(3 * MAX_MISFITS):
        waiting.add(Waiter(tried), Urgency.QUEUED, 9.0, f"tenant:{tenant}")
    for _ in range(3):
        waiting.retry(is_tick=False)
    assert len(tried) == len(set(tried)) == 3 * MAX_MISFITS, "each in its turn"


def test_one_that_wants_a_turn_has_it_behind_any_number_of_more_urgent_tenants() -> None:
    """Before: it was never tried, and asked for a Tick at once after each."""
    waiting, tried = Divided().planner.waiting, list[Waiter]()
    for tenant in range(2 * MAX_MISFITS):
        waiting.add(Waiter(tried), Urgency.PREFILL, 9.0, f"tenant:{tenant}")
    put = Waiter(tried)
    put.wants_turn = True
    waiting.add(put, Urgency.QUEUED, 9.0, "tenant:acme")
    waiting.retry(is_tick=False)
    assert put not in tried
    waiting.retry(is_tick=True)
    assert tried[-1] is put
    assert len(tried) == 2 * MAX_MISFITS + 1
    put.has_room = True
    waiting.retry(is_tick=True)
    assert not waiting.wants_turn


def test_acquires_that_expect_blocks_leave_the_others_their_share() -> None:
    """Before: each client could let 4,096 acquires wait, all of which were looked at in every step."""
    shared = Divided(max_expecting_acquires=8)

    def expect(tenant: int, name: int) -> int:
        shared.num_calls += 1
        chain, part = names(tenant, name, 2), ev.ExpectedPart(2, float("inf"), "")
        namespace_id = shared.namespace[tenant]
        shared.do(
            ev.AcquireRequested(shared.num_calls, tenant, "", namespace_id, chain, ttl_s=500.0, expected=part)
        )
        return shared.num_calls

    def is_answered(call: int) -> bool:
        result = shared.answers[call]
        assert isinstance(result, AcquireResult)
        return result.last

    waiting, expectations = [expect(ACME, name) for name in range(1, 5)], shared.planner.reads.expectations
    assert not any(map(is_answered, waiting))
    assert is_answered(expect(ACME, 5)), "with what there is"
    assert shared.planner.core.story.counters["expecting_beyond_share"] == 1
    assert not is_answered(expect(BOLT, 1))
    shared.do(ev.AcquireAbandoned(waiting[0]))
    assert not is_answered(expect(ACME, 6))
    shared.put(ACME, 2, 2)
    assert is_answered(waiting[1])
    assert not is_answered(expect(ACME, 7))
    shared.do(ev.ClientGone(ACME, "closed"))
    assert len(expectations) == 1
    shared.do(ev.ClientGone(BOLT, "closed"))
    assert not expectations._shares.taken
