"""Quotas and victims: two tenants on one planner, whatever they do, in any order."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import BlockChange, Copy, FreeSegment, Notify, Reply
from kvtier.appliance.core.options import PlannerOptions, TenantQuota
from kvtier.appliance.core.planner import Planner
from kvtier.appliance.core.results import (
    AcquireResult,
    EvictResult,
    PinResult,
    PutOutcome,
    PutResult,
    Refusal,
)
from kvtier.appliance.security.callers import RateLimit
from kvtier.policies.registry import PolicyChoice
from kvtier.tiers.base import CopyOutcome, Room
from kvtier.tiers.block import Geometry, NamespaceIdentity, Tier
from kvtier.tiers.cold.log import SegmentLog
from kvtier.tiers.memory.slots import SlotPool

GEOMETRY = Geometry(8, 1, 64, 16, "float16")
BLOCK_BYTES = GEOMETRY.block_bytes
BLOCKS_PER_EXTENT = 2
NUM_EXTENTS = 6
ACME, BOLT = 1, 2
DOMAINS = {ACME: "tenant:acme", BOLT: "tenant:bolt"}
STORED = bytes([PutOutcome.STORED])


def names(client: int, name: int, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{client}/{name}/{block}".encode()).digest() for block in range(count)]


class Shared:
    """A planner with dram of NUM_EXTENTS extents, two tenants with one client and one namespace each."""

    def __init__(
        self,
        quotas: dict[str, TenantQuota],
        *,
        policy: str = "lru",
        has_nvme: bool = False,
        has_hbm: bool = False,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        pool = SlotPool(NUM_EXTENTS, BLOCKS_PER_EXTENT * BLOCK_BYTES)
        rooms: dict[Tier, Room] = {Tier.DRAM: pool}
        if has_hbm:
            rooms[Tier.HBM] = SlotPool(NUM_EXTENTS, BLOCKS_PER_EXTENT * BLOCK_BYTES)
        if has_nvme:
            rooms[Tier.NVME] = SegmentLog(8, 4 * (BLOCK_BYTES + 4096) + 4096, 4096)
        self.pool = pool
        self.options = PlannerOptions(
            high_watermark=1.0, low_watermark=1.0, max_pinned_fraction=1.0, quotas=quotas, **(limits or {})
        )
        self.planner = Planner(self.options, rooms, policies=PolicyChoice(eviction=policy))
        self.now = 0.0
        self.num_calls = 0
        self.answers: dict[int, object] = {}
        self.removed: list[int] = []  # namespaces of blocks that left dram during the last request
        self.namespace: dict[int, int] = {}
        for client, domain in DOMAINS.items():
            self.do(ev.ClientOpened(client, "", True, domain))
            identity = NamespaceIdentity(b"m" * 16, GEOMETRY, domain=domain)
            result = self.ask(lambda call, i=identity: ev.NamespaceRegistered(call, i))
            self.namespace[client] = result.namespace_id  # type: ignore[attr-defined]

    def do(self, event: ev.Event) -> None:
        copies = []
        self.now += 0.001
        for instruction in self.planner.handle(event, self.now):
            match instruction:
                case Reply():
                    self.answers[instruction.call] = instruction.result
                case Copy():
                    copies.append(instruction)
                case Notify(change=BlockChange.REMOVED, tier=Tier.DRAM):
                    self.removed += [instruction.namespace_id] * len(instruction.prefix_hashes)
                case FreeSegment():
                    self.do(ev.SegmentFreed(instruction.segment))
        for copy in copies:
            outcome = CopyOutcome(None, b"\7" * 16)
            self.do(ev.CopyFinished(copy.copy, [outcome] * len(copy.items)))
        assert self.planner.check_integrity() == []

    def ask(self, event: object) -> object:
        self.num_calls += 1
        call = self.num_calls
        self.do(event(call))  # type: ignore[operator]
        for _ in range(20):
            if call in self.answers:
                break
            self.now += 1.0
            self.do(ev.Tick())
        return self.answers[call]

    def put(self, client: int, name: int, count: int, retention: Sequence[ev.RetentionHint] = ()) -> bytes:
        self.removed = []
        chain = names(client, name, count)
        spans = [(block * BLOCK_BYTES, BLOCK_BYTES) for block in range(count)]
        result = self.ask(
            lambda call: ev.CommitRequested(
                call,
                client,
                "",
                0,
                spans,
                ev.ReserveRequested(
                    call, client, "", self.namespace[client], b"", chain, "", retention=retention
                ),
            )
        )
        assert isinstance(result, PutResult)
        return bytes(result.outcomes)

    def acquire(self, client: int, name: int, count: int) -> AcquireResult:
        chain = names(client, name, count)
        result = self.ask(
            lambda call: ev.AcquireRequested(
                call, client, "", self.namespace[client], chain, ttl_s=500.0, load_anyway=True
            )
        )
        assert isinstance(result, AcquireResult)
        return result

    def pin(self, client: int, name: int, count: int) -> object:
        chain = names(client, name, count)
        return self.ask(
            lambda call: ev.PinRequested(call, client, "", self.namespace[client], chain, Tier.DRAM, 500.0)
        )

    def bring_to_hbm(self, client: int, name: int, count: int) -> None:
        chain = names(client, name, count)
        self.ask(lambda call: ev.PrefetchRequested(call, client, self.namespace[client], chain, Tier.HBM))
        for _ in range(20):
            self.now += 1.0
            self.do(ev.Tick())

    def in_hbm(self, client: int, name: int, count: int) -> int:
        """Return how many blocks of a chain are in hbm."""
        catalog = self.planner.catalog
        rows = [catalog.find(self.namespace[client], one) for one in names(client, name, count)]
        return sum(row >= 0 and catalog.num_resident[Tier.HBM][row] > 0 for row in rows)

    def extents_of(self, client: int, tier: Tier = Tier.DRAM) -> int:
        number, room = self.planner.domain_number(DOMAINS[client]), self.planner.rooms[tier]
        assert isinstance(room, SlotPool)
        return sum(room.domain_of_extent(extent) == number for extent in range(NUM_EXTENTS))


def memory(num_extents: int, tier: Tier = Tier.DRAM) -> TenantQuota:
    return TenantQuota({tier: num_extents * BLOCKS_PER_EXTENT * BLOCK_BYTES})


@pytest.mark.parametrize("has_nvme", [False, True])
def test_a_tenant_at_its_quota_makes_room_among_its_own(has_nvme: bool) -> None:
    shared = Shared({"tenant:acme": memory(2)}, has_nvme=has_nvme)
    assert shared.put(BOLT, 1, 2) == STORED * 2  # the coldest of all, all the time
    for name in range(8):
        assert shared.put(ACME, name, 2) == STORED * 2
        assert shared.extents_of(ACME) <= 2
        assert shared.namespace[BOLT] not in shared.removed
    assert shared.put(BOLT, 2, 8) == STORED * 8, "what acme may not take is there for others"
    assert shared.extents_of(BOLT) == NUM_EXTENTS - 2
    assert shared.namespace[ACME] not in shared.removed


def test_parts_of_a_tenant_share_its_quota() -> None:
    shared = Shared({"tenant:acme": memory(2)})
    part = NamespaceIdentity(b"m" * 16, GEOMETRY, domain="tenant:acme/eu")
    shared.do(ev.ClientOpened(3, "", True, part.domain))
    result = shared.ask(lambda call: ev.NamespaceRegistered(call, part))
    shared.namespace[3] = result.namespace_id  # type: ignore[attr-defined]
    assert shared.put(ACME, 1, 4) == STORED * 4
    outcomes = shared.put(3, 1, 1)
    assert outcomes == bytes([PutOutcome.NO_ROOM]), "the whole quota is the first part's extents"


def test_a_quota_can_be_raised_and_lowered_in_use() -> None:
    shared = Shared({"tenant:acme": memory(1)})
    assert shared.put(ACME, 1, 4) == STORED * 2 + bytes([PutOutcome.NO_ROOM]) * 2
    more = replace(shared.options, quotas={"tenant:acme": memory(2)})
    shared.do(ev.PolicyChanged(more, shared.planner.core.choice, {}))
    assert shared.put(ACME, 2, 2) == STORED * 2
    assert shared.extents_of(ACME) == 2
    shared.do(ev.PolicyChanged(shared.options, shared.planner.core.choice, {}))
    assert shared.put(ACME, 3, 2) == STORED * 2
    assert shared.extents_of(ACME) == 2, "an extent is its domain's for its whole life"


def test_hbm_of_one_tenant_leaves_the_others_theirs() -> None:
    """A quota of hbm bounds what a tenant has there, however much it brings up; of dram it says nothing."""
    shared = Shared({"tenant:acme": memory(2, Tier.HBM)}, has_hbm=True)
    assert shared.put(BOLT, 1, 2) == STORED * 2
    shared.bring_to_hbm(BOLT, 1, 2)
    for name in range(5):
        assert shared.put(ACME, name, 2) == STORED * 2
        shared.bring_to_hbm(ACME, name, 2)
        assert shared.in_hbm(ACME, name, 2) == 2, "at its limit it makes room among its own"
        assert shared.extents_of(ACME, Tier.HBM) <= 2
        assert shared.in_hbm(BOLT, 1, 2) == 2
    assert shared.extents_of(ACME, Tier.HBM) == 2
    assert shared.extents_of(ACME) > 2
    more = replace(shared.options, quotas={"tenant:acme": memory(3, Tier.HBM)})
    shared.do(ev.PolicyChanged(more, shared.planner.core.choice, {}))
    shared.bring_to_hbm(ACME, 0, 2)
    shared.bring_to_hbm(ACME, 1, 2)
    assert shared.extents_of(ACME, Tier.HBM) == 3


def test_pinned_bytes_of_all_clients_and_pins_together() -> None:
    shared = Shared({"tenant:acme": TenantQuota({}, pinned_bytes=3 * BLOCK_BYTES)})
    shared.do(ev.ClientOpened(3, "", True, "tenant:acme"))
    shared.namespace[3] = shared.namespace[ACME]
    shared.put(ACME, 1, 4)
    chain = names(ACME, 1, 4)

    def held_by(client: int) -> int:
        result = shared.ask(
            lambda call: ev.AcquireRequested(
                call, client, "", shared.namespace[ACME], chain, ttl_s=500.0, load_anyway=True
            )
        )
        assert isinstance(result, AcquireResult)
        return result.num_blocks

    pinned = shared.pin(ACME, 1, 1)
    assert isinstance(pinned, PinResult)
    assert held_by(3) == 2, "one block is pinned, two may be held: the rest is a miss"
    assert held_by(ACME) == 0
    again = shared.pin(ACME, 1, 1)
    assert isinstance(again, PinResult), "it is pinned already, and counts once"
    shared.do(ev.UnpinRequested(again.pin_id))
    refused = shared.pin(ACME, 1, 2)
    assert isinstance(refused, Refusal)
    assert (refused.reason, refused.retry_after_s > 0) == ("QUOTA_EXCEEDED", True)
    shared.do(ev.UnpinRequested(pinned.pin_id))
    assert held_by(ACME) == 1
    assert shared.put(BOLT, 1, 4) == STORED * 4
    assert shared.acquire(BOLT, 1, 4).num_blocks == 4, "bolt has no limit"


requests = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "acquire", "release", "pin", "unpin"]),
        st.sampled_from([ACME, BOLT]),
        st.integers(0, 5),
        st.integers(1, 5),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(
    requests,
    st.integers(0, 4),
    st.sampled_from([None, *range(5)]),
    st.sampled_from(["lru", "s3fifo", "urgency"]),
    st.booleans(),
)
def test_nobody_takes_more_than_its_quota_nor_anything_of_the_others(
    asked: list[tuple[str, int, int, int]], acme: int, bolt: int | None, policy: str, has_nvme: bool
) -> None:
    """Whatever both do: extents and pins stay within the quotas; no put of one costs the other a block."""
    quotas = {"tenant:acme": replace(memory(acme), pinned_bytes=3 * BLOCK_BYTES)}
    if bolt is not None:
        quotas["tenant:bolt"] = memory(bolt)
    shared = Shared(quotas, policy=policy, has_nvme=has_nvme)
    leases: dict[int, list[int]] = {ACME: [], BOLT: []}
    pins: dict[int, list[int]] = {ACME: [], BOLT: []}
    for what, client, name, count in asked:
        shared.removed = []
        if what == "put":
            shared.put(client, name, count)
        elif what == "acquire":
            leases[client].append(shared.acquire(client, name, count).lease_id)
        elif what == "release" and leases[client]:
            shared.do(ev.ReleaseRequested(None, client, [leases[client].pop()]))
        elif what == "pin":
            result = shared.pin(client, name, count)
            if isinstance(result, PinResult):
                pins[client].append(result.pin_id)
        elif what == "unpin" and pins[client]:
            shared.do(ev.UnpinRequested(pins[client].pop()))
        other = BOLT if client == ACME else ACME
        assert shared.namespace[other] not in shared.removed
        assert shared.extents_of(ACME) <= acme
        assert shared.extents_of(BOLT) <= (NUM_EXTENTS if bolt is None else bolt)
        held = shared.planner.leases.clients[ACME].held_bytes
        assert held + shared.planner.pins.bytes_of_tenant("tenant:acme") <= 3 * BLOCK_BYTES


@given(
    st.floats(0.1, 1000.0),
    st.lists(st.floats(0.0, 5.0), min_size=1, max_size=200),
)
def test_a_rate_lets_no_more_through_than_it_says_and_says_when(rate: float, pauses: list[float]) -> None:
    limit = RateLimit(rate)
    now, taken = 0.0, 0
    for pause in pauses:
        now += pause
        wait_s = limit.take(now)
        if wait_s == 0.0:
            taken += 1
        else:
            assert limit.take(now + wait_s * 1.000001) == 0.0, "it came when it was told to"
            now, taken = now + wait_s * 1.000001, taken + 1
        # The first one is taken at once, at pauses[0].
        assert taken <= max(1.0, rate) + (now - pauses[0]) * rate + 1e-6 + 1


def test_who_was_set_aside_and_used_since_is_judged_anew() -> None:
    """acme needs room and its policy names bolt's coldest first: that one waits aside. Then bolt uses it."""
    shared = Shared({"tenant:acme": memory(2), "tenant:bolt": memory(2)})
    for name in (1, 2):
        assert shared.put(BOLT, name, 2) == STORED * 2
    for name in (1, 2, 3):  # the third makes room among acme's own; bolt's are named before and set aside
        assert shared.put(ACME, name, 2) == STORED * 2
    shared.do(ev.Touched(BOLT, shared.namespace[BOLT], names(BOLT, 1, 2), ""))
    assert shared.put(BOLT, 3, 2) == STORED * 2
    found = [shared.planner.lookup(shared.namespace[BOLT], names(BOLT, name, 2)) for name in (1, 2, 3)]
    assert [getattr(one, "num_blocks", None) for one in found] == [2, 0, 2], "what was used stays"


def test_who_was_set_aside_leaves_when_the_other_domain_is_forgotten() -> None:
    """Its policy does not name what waits aside again, and with one domain only the policy was asked."""
    shared = Shared({"tenant:acme": memory(2)}, limits={"max_namespaces": 2})
    for name in (1, 2, 3, 4):
        assert shared.put(BOLT, name, 2) == STORED * 2
    for name in (1, 2, 3):  # the third makes room among acme's own; all of bolt's are named before
        assert shared.put(ACME, name, 2) == STORED * 2
    shared.ask(lambda call: ev.EvictRequested(call, Tier.DRAM, 0, shared.namespace[ACME]))
    other = NamespaceIdentity(b"o" * 16, GEOMETRY, domain=DOMAINS[BOLT])
    shared.ask(lambda call: ev.NamespaceRegistered(call, other))
    assert shared.namespace[ACME] not in shared.planner.catalog.namespaces
    answer = shared.ask(lambda call: ev.EvictRequested(call, Tier.DRAM, 0))
    assert isinstance(answer, EvictResult)
    assert (answer.num_blocks, answer.num_kept) == (8, {})


def test_at_its_quota_of_nvme_the_ends_of_the_oldest_chains_go() -> None:
    quota = replace(memory(1), cold_bytes=6 * BLOCK_BYTES)
    shared = Shared({"tenant:acme": quota}, has_nvme=True)
    shared.put(BOLT, 1, 2)
    for name in range(8):
        assert shared.put(ACME, name, 2) == STORED * 2
        assert shared.planner.core.transitions.cold_bytes[shared.namespace[ACME]] <= 6 * BLOCK_BYTES
    stored = [
        getattr(shared.planner.lookup(shared.namespace[ACME], names(ACME, name, 2)), "num_blocks", 0)
        for name in range(8)
    ]
    assert stored[-1] == 2, "the youngest is there"
    assert sum(stored[:4]) < sum(stored[4:]), "old ones went, they did not keep the young ones out"
    assert sum(stored) >= 6
    none = Shared({"tenant:acme": replace(memory(1), cold_bytes=0)}, has_nvme=True)
    for name in range(4):
        assert none.put(ACME, name, 2) == STORED * 2, "without a cold store of its own it has dram"
    assert none.planner.core.transitions.cold_bytes[none.namespace[ACME]] == 0
