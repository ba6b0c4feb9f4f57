"""Another policy in the middle of things: what stays, what moves, who is not disturbed."""

import json
from dataclasses import replace

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import GiveBack, Instruction
from kvtier.policies.registry import PolicyChoice
from kvtier.tiers.block import Tier, Urgency
from kvtier.tiers.cold.log import SegmentLog
from kvtier.tiers.memory.slots import SlotPool
from kvtier.v1.shm import extent_of

from .rig import CLIENT, SLOT_BYTES, STORED, Rig, hashes


class ResizableRig(Rig):
    """A rig whose dram has several extents, of two blocks each."""

    def __init__(self, num_extents: int, **options: object) -> None:
        super().__init__(dram_blocks=2, **options)  # type: ignore[arg-type]
        dram = self.planner.rooms[Tier.DRAM]
        assert isinstance(dram, SlotPool)
        self.dram = dram
        dram.grow(num_extents)
        self.given_back: list[tuple[Tier, int]] = []

    def do(self, event: ev.Event) -> list[Instruction]:
        instructions = super().do(event)
        if hasattr(self, "given_back"):
            self.given_back += [(i.tier, i.number) for i in instructions if isinstance(i, GiveBack)]
        return instructions

    def change(self, policies: PolicyChoice | None = None, **named: object) -> None:
        """Change what is named: options, or the number of units as `dram` and `nvme`."""
        sizes = {tier: named.pop(tier.label) for tier in (Tier.DRAM, Tier.NVME) if tier.label in named}
        options = replace(self.planner.core.options, **named)  # type: ignore[arg-type]
        change = ev.PolicyChanged(options, policies or self.planner.core.choice, sizes)  # type: ignore[arg-type]
        assert self.planner.changes.objections(change) == []
        self.do(change)

    def use(self, chain: list[bytes]) -> None:
        """Read a chain, and be done with it."""
        self.release(self.acquire(chain))

    def is_stored(self, chain: list[bytes]) -> bool:
        """Whether all of a chain can be found."""
        return self.found(chain) == len(chain)

    def extents_of(self, chain: list[bytes]) -> set[int]:
        """Return the extents of dram that hold something of a chain."""
        catalog = self.planner.catalog
        rows = [catalog.find(self.namespace_id, name) for name in chain]
        return {extent_of(catalog.place[Tier.DRAM][f]) for row in rows for f in catalog.fragments(row)}


class Waiter:
    """A request that waits until it is given up."""

    is_done = False
    wants_turn = False

    def advance(self) -> bool:
        return False

    def give_up(self) -> None:
        self.is_done = True


def test_options_reach_every_part() -> None:
    rig = ResizableRig(2)
    planner = rig.planner
    rig.change(lease_ttl_s=1.5, max_waiting_puts=3)
    assert planner.core.options.lease_ttl_s == 1.5
    assert planner.leases.grant(planner.leases.clients[CLIENT], 0.0).deadline_at == rig.now + 1.5
    assert not planner.waiting.is_full("")
    for _ in range(3):
        planner.waiting.add(Waiter(), Urgency.QUEUED, 1.0, "")
    assert planner.waiting.is_full("")


# ------------------------------------------------------------------------------------------ policies


def test_a_new_policy_sees_what_is_stored_least_recently_used_first() -> None:
    rig = ResizableRig(2, nvme_blocks=0)
    chains = [hashes(name, 1) for name in "abcd"]
    for chain in chains:
        rig.tick(1.0)
        rig.put(chain)
    rig.tick(1.0)
    rig.use(chains[0])
    rig.change(PolicyChoice(eviction="lru"))
    rig.change(PolicyChoice(eviction="arc"))
    rig.change(PolicyChoice(eviction="lru"))
    assert len(rig.planner.core.policies.evictions[Tier.DRAM]) == 4
    rig.put(hashes("e", 1))
    assert [rig.is_stored(chain) for chain in chains] == [True, False, True, True], "b was the coldest"


def test_what_was_learned_stays_where_the_algorithm_does() -> None:
    rig = ResizableRig(
        2, policies=PolicyChoice(eviction="urgency", admission="urgency", prefetch="announced")
    )
    policies = rig.planner.core.policies
    forecast, eviction = policies.shared["forecast"], policies.evictions[Tier.DRAM]
    rig.change(PolicyChoice(eviction="urgency", admission="all", prefetch="announced"))
    now = rig.planner.core.policies
    assert (now.shared["forecast"], now.evictions[Tier.DRAM]) == (forecast, eviction)
    assert now.prefetcher is policies.prefetcher
    assert forecast in now.observers
    assert eviction.inner in now.observers
    rig.change(PolicyChoice(eviction="urgency", options={"urgency": {"objective": "seconds"}}))
    later = rig.planner.core.policies
    assert later.evictions[Tier.DRAM] is not eviction, "it has other options"
    assert later.shared["forecast"] is forecast, "who returns when is the same whatever it is worth"
    assert later.prefetcher is None
    rig.change(PolicyChoice(eviction="lru"))
    assert "forecast" not in rig.planner.core.policies.shared, "nobody wants to know any more"
    assert not {forecast, eviction} & set(map(id, rig.planner.core.policies.observers))


def test_who_is_away_for_a_while_finds_what_it_had_learned() -> None:
    rig = ResizableRig(2, policies=PolicyChoice(eviction="urgency"))
    for number in range(200):
        rig.put(hashes(f"c{number}", 1))
    learned = rig.planner.core.policies.shared["forecast"].dump()
    rig.change(PolicyChoice(eviction="lru", prefetch="announced"))
    assert json.loads(rig.planner.learned())["learners"].keys() == {"forecast", "promises"}, (
        "the file keeps it"
    )
    rig.change(PolicyChoice(eviction="urgency"))
    assert rig.planner.core.policies.shared["forecast"].dump() == learned


def test_a_policy_that_cannot_be_built_is_named_before_anything_changes() -> None:
    rig = ResizableRig(2)
    wrong = PolicyChoice(eviction="urgency", options={"urgency": {"objective": "fame"}})
    change = ev.PolicyChanged(rig.planner.core.options, wrong, {Tier.HBM: 3})
    (problem,) = rig.planner.changes.objections(change)[1:]
    assert "objective" in problem
    assert rig.planner.core.choice == PolicyChoice()


# ---------------------------------------------------------------------------------------------- sizes


def test_shrinking_moves_what_is_used_and_drops_the_coldest() -> None:
    rig = ResizableRig(3, nvme_blocks=0)
    chains = [hashes(name, 1) for name in "abcdef"]
    for chain in chains:
        rig.tick(1.0)
        assert rig.put(chain) == [STORED]
    rig.use(chains[0])
    rig.change(dram=1)
    rig.settle()
    stored = [rig.is_stored(chain) for chain in chains]
    assert stored == [True, False, False, False, False, True], "the two used last"
    assert len(rig.given_back) == 2
    assert rig.planner.statistics()["tiers"][Tier.DRAM]["capacity_bytes"] == 4 * SLOT_BYTES
    assert rig.extents_of(chains[0]) | rig.extents_of(chains[5]) == set(rig.dram.extents())
    rig.change(dram=3)
    for name in "gh":
        rig.put(hashes(name, 1))
    assert all(rig.is_stored(hashes(name, 1)) for name in "agh")
    assert not {number for _, number in rig.given_back} & set(rig.dram.extents()), (
        "numbers are not used again"
    )


def test_nothing_moves_under_a_reader() -> None:
    rig = ResizableRig(2)
    chain = hashes("a", 1)
    rig.put(hashes("b", 2))
    rig.put(chain)
    (extent,) = rig.extents_of(chain)
    lease = rig.acquire(chain)
    rig.change(dram=1)
    assert rig.dram.leaving == {extent}, "it holds least"
    rig.settle()
    assert rig.extents_of(chain) == {extent}, "somebody was told that it is there"
    assert rig.given_back == []
    rig.release(lease)
    rig.settle()
    assert rig.given_back == [(Tier.DRAM, extent)]


def test_who_comes_while_it_moves_keeps_the_old_place() -> None:
    rig = ResizableRig(2, nvme_blocks=0)
    chain = hashes("a", 1)
    for other in (hashes("c", 1), hashes("b", 1), chain):
        rig.put(other)
        rig.tick(1.0)
    (extent,) = rig.extents_of(chain)
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 1))  # now there is one block in each extent
    rig.change(dram=1)
    (move,) = [copy for copy in rig.copies if copy.source is copy.target]
    lease = rig.acquire(chain)
    rig.finish(move)
    assert rig.extents_of(chain) == {extent}
    rig.release(lease)
    rig.settle()
    assert rig.extents_of(chain) != {extent}
    assert (Tier.DRAM, extent) in rig.given_back


def test_the_cold_store_empties_the_segments_that_leave_first() -> None:
    rig = ResizableRig(1, nvme_blocks=2, num_segments=6)
    log = rig.planner.rooms[Tier.NVME]
    assert isinstance(log, SegmentLog)
    for name in "abcdefg":
        rig.put(hashes(name, 1))
        rig.settle()
    rig.change(nvme=3)
    for _ in range(4):
        rig.tick(1.0)
        rig.settle()
    assert sorted(number for tier, number in rig.given_back if tier is Tier.NVME) == [3, 4, 5]
    assert not log.is_shrinking
    assert log.statistics().capacity_bytes == 3 * log.segment_bytes


def test_a_cold_store_loses_nothing_when_only_free_segments_leave() -> None:
    rig = ResizableRig(1, nvme_blocks=2, num_segments=8)
    chains = [rig.put_new(name, 1) for name in "abcde"]
    rig.settle()
    stored = [chain for chain in chains if rig.where(chain[0]) == {"nvme"}]
    assert len(stored) >= 3
    rig.change(nvme=5)
    for _ in range(4):
        rig.tick(1.0)
        rig.settle()
    assert sorted(number for tier, number in rig.given_back if tier is Tier.NVME) == [5, 6, 7]
    assert [rig.where(chain[0]) for chain in stored] == [{"nvme"}] * len(stored)


def test_a_tier_is_not_shrunk_below_its_pins() -> None:
    rig = ResizableRig(2, nvme_blocks=0)
    chain = rig.put_new("a", 3)
    call = rig.call()
    rig.do(ev.PinRequested(call, CLIENT, "", rig.namespace_id, chain, Tier.DRAM, 60.0))
    change = ev.PolicyChanged(rig.planner.core.options, rig.planner.core.choice, {Tier.DRAM: 1})
    (problem,) = rig.planner.changes.objections(change)
    assert "are pinned; unpin first" in problem


def full_of_a_chain(num_segments: int) -> tuple[ResizableRig, list[bytes]]:
    """Return a rig whose nvme is full of the beginning of one long chain, and dram has all of that."""
    rig, chain = (
        ResizableRig(40, nvme_blocks=4, num_segments=num_segments, write="through"),
        hashes("long", 80),
    )
    for first in range(0, len(chain), 8):
        rig.put(chain[first : first + 8], chain[first - 1] if first else b"")
        rig.settle()
    return rig, chain


def test_dram_shrinks_although_nvme_is_full_of_what_it_continues() -> None:
    """nvme has the beginning of one long chain: none of it may leave before what memory has of the rest."""
    rig, _ = full_of_a_chain(num_segments=4)
    began_at = rig.now
    rig.change(dram=4)
    num_ticks = 0
    while rig.planner.resizing.is_active:
        rig.settle()
        deadline_at = rig.planner.next_deadline()
        assert deadline_at is not None
        rig.tick(max(0.0, deadline_at - rig.now))
        num_ticks += 1
        assert num_ticks < 1000
    assert rig.now == began_at, "no pause after each segment"
    assert rig.dram.num_extents == 4


def test_nvme_that_must_keep_more_than_it_may_is_not_written_in_circles() -> None:
    """What dram continues was copied from segments that leave into those that stay, and back, for ever."""
    rig, _ = full_of_a_chain(num_segments=8)
    log, counters = rig.planner.rooms[Tier.NVME], rig.planner.statistics
    assert isinstance(log, SegmentLog)
    before = counters()["counters"].get("segments_reclaimed", 0)
    rig.change(nvme=4)
    for _ in range(40):
        rig.tick(1.0)
        rig.settle()
    assert log.is_shrinking, "dram has what continues it, and room for that"
    assert counters()["counters"]["segments_reclaimed"] - before < 15, "a minute apart in the end"
    rig.change(dram=4)
    for _ in range(10):
        rig.tick(1.0)
        rig.settle()
    assert (rig.dram.num_extents, log.is_shrinking) == (4, False)


def test_a_shrink_that_waits_for_readers_does_not_stop_spills() -> None:
    """nvme was once full of what memory continues, and has room since: it is not called full for a shrink."""
    rig, chain = full_of_a_chain(num_segments=4)
    while not rig.planner.reclaim.is_in_vain:
        rig.tick(1.0)
        rig.settle()
    rig.change(nvme=60, write="spill")
    for _ in range(8):
        rig.tick(1.0)
        rig.settle()
    before = rig.planner.statistics()["counters"].get("nvme_full", 0)
    rig.acquire(chain)
    rig.change(dram=4)
    for _ in range(4):
        rig.tick(1.0)
        rig.settle()
    assert rig.planner.statistics()["counters"].get("nvme_full", 0) == before
