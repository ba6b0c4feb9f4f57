"""Prefetching: when it begins, that demand comes first, how it is taken back, what is counted."""

from collections import Counter

import pytest

from kvtier.appliance.config import Settings
from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import CancelCopy, HastenCopy
from kvtier.appliance.core.promotion import prefetch
from kvtier.appliance.core.results import PutOutcome
from kvtier.policies.registry import PolicyChoice
from kvtier.tiers.base import Cause
from kvtier.tiers.block import NamespaceIdentity, Tier, Urgency

from ..rig import CLIENT, GEOMETRY, Rig, hashes

ANNOUNCED = PolicyChoice(prefetch="announced")
BLOCK = GEOMETRY.block_bytes


def cold(
    num_blocks: int = 2, policies: PolicyChoice = ANNOUNCED, **options: object
) -> tuple[Rig, list[bytes]]:
    """Return a rig and a chain of session `s` that is in nvme only."""
    settings = {"dram_blocks": 8, "max_prefetched_fraction": 1.0, **options}
    rig = Rig(policies=policies, **settings)  # type: ignore[arg-type]
    return rig, rig.cool_new("a", num_blocks, session_id="s")


def say(rig: Rig, urgency: Urgency, back_in_s: float = float("inf")) -> None:
    rig.do(ev.SessionUpdated(CLIENT, "s", urgency, back_at=rig.now + back_in_s))


def counted(rig: Rig) -> Counter[str]:
    """Return the outcomes of prefetches, in blocks."""
    counters = rig.planner.story.counters
    names = ("begun", "used", "late", "wasted", "cancelled")
    return Counter({n: counters[f"prefetch_{n}"] for n in names if counters.get(f"prefetch_{n}")})


def ticks(rig: Rig, seconds: float) -> None:
    """Let time pass as the daemon does: a tick at every deadline, a step of 50 ms at least."""
    end = rig.now + seconds
    while rig.now < end:
        due = rig.planner.next_deadline()
        rig.tick(min(max(0.05, (due if due is not None else end) - rig.now), end - rig.now))


def test_back_in_30_s_means_there_in_30_s() -> None:
    rig, chain = cold()
    say(rig, Urgency.WAITING, 30.0)
    ticks(rig, 15.0)
    assert not rig.copies, "half the time is too early"
    ticks(rig, 13.0)
    assert [copy.urgency for copy in rig.copies] == [Urgency.WAITING] * 2
    assert [{item.label.group for item in copy.items} for copy in rig.copies] == [{0}, {1}]
    rig.settle()
    assert all("dram" in rig.where(name) for name in chain)
    assert rig.answer(rig.acquire(chain, session_id="s")).last
    assert counted(rig) == {"begun": 2, "used": 2}
    assert rig.planner.story.counters["prefetch_used_bytes"] == 2 * BLOCK
    assert "said it would be back in 30 s" in str(rig.planner.story.words(chain[0], rig.namespace_id))


def test_by_default_who_announced_it_comes_up_and_nobody_else() -> None:
    policies = Settings.load(env={}).policy.choice()
    assert policies.prefetch == "announced"
    rig, _ = cold(policies=policies)
    say(rig, Urgency.WAITING)
    ticks(rig, 100.0)
    assert not rig.copies
    say(rig, Urgency.WAITING, 1.0)
    ticks(rig, 1.0)
    assert rig.copies


def test_without_a_policy_nothing_comes_up_unasked() -> None:
    rig, _ = cold(policies=PolicyChoice())
    say(rig, Urgency.WAITING, 5.0)
    ticks(rig, 20.0)
    assert not rig.copies


def test_a_clients_deadline_keeps_a_block_no_longer_than_a_lease_may() -> None:
    """A client that named the year 3000 had its tenant's blocks stay before all others', for ever."""
    rig, chain = cold()
    options = rig.planner.core.options
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain, deadline_at=rig.now + 3e10))
    rig.settle()
    rig.tick(options.lease_ttl_max_s + options.prefetch_window_s - 1.0)
    assert not counted(rig)["wasted"]
    rig.tick(1.0)
    assert counted(rig) == {"begun": 2, "wasted": 2}


def test_asked_for_while_on_its_way_is_late_and_goes_first() -> None:
    rig, chain = cold()
    say(rig, Urgency.WAITING, 1.0)
    ticks(rig, 1.0)
    assert len(rig.copies) == 2
    instructions = rig.do(
        ev.AcquireRequested(rig.call(), CLIENT, "", rig.namespace_id, chain, "s", Urgency.PREFILL)
    )
    hastened = [i for i in instructions if isinstance(i, HastenCopy)]
    assert [(i.copy, i.urgency) for i in hastened] == [(copy.copy, Urgency.PREFILL) for copy in rig.copies]
    assert len(rig.copies) == 2, "nothing is loaded twice"
    rig.settle()
    assert counted(rig) == {"begun": 2, "late": 2}


def test_nothing_begins_while_somebody_waits_for_a_load() -> None:
    rig, _ = cold(dram_blocks=16, nvme_blocks=16)
    other = rig.cool_new("b", 2)
    say(rig, Urgency.WAITING, 1.0)
    call = rig.acquire(other)
    demand = list(rig.copies)
    ticks(rig, 1.0)
    assert rig.copies == demand
    for copy in demand:
        assert counted(rig) == {}
        rig.finish(copy)
    assert rig.answer(call).last
    assert counted(rig) == {"begun": 2}


def test_the_window_passes_and_the_blocks_go_first() -> None:
    """A wrong guess is counted, and leaves before blocks that have been idle for longer."""
    rig, chain = cold(dram_blocks=4)
    say(rig, Urgency.WAITING, 1.0)
    ticks(rig, 1.0)
    rig.settle()
    old = rig.put_new("old", 2)
    ticks(rig, 10.0)
    assert counted(rig) == {"begun": 2, "wasted": 2}
    rig.acquire(old)  # the most recent use, but that is not why the others go
    rig.put(hashes("new", 2))
    assert [("dram" in rig.where(name)) for name in [*chain, *old]] == [False, False, True, True]
    assert rig.planner.story.counters["prefetch_wasted_bytes"] == 2 * BLOCK


def test_inside_the_window_others_go_first() -> None:
    rig, chain = cold(dram_blocks=4)
    younger = rig.cool_new("younger", 2)
    say(rig, Urgency.WAITING, 2.0)
    ticks(rig, 2.0)
    rig.settle()
    assert all("dram" in rig.where(name) for name in chain)
    ticks(rig, 0.1)
    call = rig.acquire(younger)
    rig.settle()
    rig.release(call)
    rig.put(hashes("new", 2))
    assert all("dram" in rig.where(name) for name in chain)
    assert not any("dram" in rig.where(name) for name in younger)


def test_a_session_that_ends_takes_its_prefetches_back() -> None:
    rig, _ = cold()
    say(rig, Urgency.WAITING, 1.0)
    ticks(rig, 1.0)
    queued = [copy.copy for copy in rig.copies]
    instructions = rig.do(ev.SessionEnded(rig.call(), CLIENT, "s", False))
    assert [i.copy for i in instructions if isinstance(i, CancelCopy)] == queued
    for copy in list(rig.copies):
        rig.finish(copy, Cause.CANCELLED)
    assert counted(rig) == {"begun": 2, "cancelled": 2}
    assert "prefetch_wasted_bytes" not in rig.planner.story.counters


def test_requests_that_wait_for_room_get_it() -> None:
    rig, _ = cold(dram_blocks=2)
    say(rig, Urgency.WAITING, 1.0)
    ticks(rig, 1.0)
    queued = [copy.copy for copy in rig.copies]
    assert queued
    call = rig.start_put(hashes("new", 2))
    cancelled = [i.copy for i in rig.instructions if isinstance(i, CancelCopy)]
    assert cancelled == queued
    for copy in [copy for copy in rig.copies if copy.copy in queued]:
        rig.finish(copy, Cause.CANCELLED)
    rig.settle()
    assert set(rig.answer(call).outcomes) == {PutOutcome.STORED}


def test_whoever_wants_a_block_whose_copy_is_being_cancelled_gets_it_all_the_same() -> None:
    """Joining that copy would shorten the prefix for no reason."""
    rig, chain = cold()
    say(rig, Urgency.WAITING, 1.0)
    ticks(rig, 1.0)
    rig.do(ev.SessionEnded(rig.call(), CLIENT, "s", False))
    call = rig.acquire(chain)
    for copy in list(rig.copies):
        rig.finish(copy, Cause.CANCELLED)
    rig.settle()
    assert (rig.answer(call).last, rig.answer(call).num_blocks) == (True, 2)


def test_bytes_not_used_yet_are_bounded() -> None:
    rig, _ = cold(6, dram_blocks=8, nvme_blocks=8, max_prefetched_fraction=0.25)
    say(rig, Urgency.WAITING, 1.0)
    ticks(rig, 1.0)
    assert counted(rig)["begun"] == 2
    rig.settle()
    ticks(rig, 0.2)
    assert counted(rig)["begun"] == 2


def test_the_share_of_the_bandwidth_is_bounded() -> None:
    rig, _ = cold(6, nvme_blocks=8, prefetch_bandwidth_fraction=0.5, dram_blocks=8)
    rig.do(ev.EdgeMeasured(Tier.NVME, Tier.DRAM, 2.0 * BLOCK, 1e-3))  # two blocks a second, one of them ours
    say(rig, Urgency.WAITING, 20.0)
    ticks(rig, 22.0)
    began = counted(rig)["begun"]
    assert 0 < began <= 8


def test_a_session_that_arrives_brings_its_blocks_up_before_it_asks() -> None:
    rig, chain = cold(policies=PolicyChoice())
    say(rig, Urgency.WAITING)
    say(rig, Urgency.QUEUED)
    assert [copy.urgency for copy in rig.copies] == [Urgency.QUEUED] * 2
    rig.settle()
    assert rig.answer(rig.acquire(chain, session_id="s")).last
    assert counted(rig) == {"begun": 2, "used": 2}


def test_what_a_client_asks_for_is_counted_too() -> None:
    rig, chain = cold()
    call = rig.call()
    rig.do(ev.PrefetchRequested(call, CLIENT, rig.namespace_id, chain))
    assert (rig.answer(call).num_blocks, rig.answer(call).num_promoted) == (2, 2)
    rig.settle()
    ticks(rig, 61.0)
    assert counted(rig) == {"begun": 2, "wasted": 2}
    rig.acquire(chain)
    assert rig.planner.story.counters["prefetch_used_after_window"] == 2


def test_a_client_that_names_no_namespace_asks_all_of_its_domain() -> None:
    rig, chain = cold()
    rig.do(ev.ClientOpened(9, "of another domain", True, "another"))
    rig.do(ev.PrefetchRequested(call := rig.call(), 9, 0, chain))
    assert (rig.answer(call).num_blocks, rig.answer(call).num_promoted) == (0, 0)
    rig.do(ev.PrefetchRequested(call := rig.call(), CLIENT, 0, chain))
    assert (rig.answer(call).num_blocks, rig.answer(call).num_promoted) == (2, 2)
    rig.do(ev.PrefetchRequested(call := rig.call(), 77, 0, chain))
    assert rig.answer(call).reason == "UNKNOWN_CLIENT"


def test_all_namespaces_of_a_domain_share_the_limit_of_a_request() -> None:
    rig, chain = cold(4, max_blocks_per_request=4)
    rig.do(ev.NamespaceRegistered(call := rig.call(), NamespaceIdentity(b"n" * 16, GEOMETRY)))
    first, rig.namespace_id = rig.namespace_id, rig.answer(call).namespace_id
    rig.put(chain)
    rig.cool(chain)
    rig.do(ev.PrefetchRequested(call := rig.call(), CLIENT, 0, chain))
    assert (rig.answer(call).num_blocks, rig.answer(call).num_promoted) == (2, 4)
    rig.do(ev.PrefetchRequested(call := rig.call(), CLIENT, first, chain))
    assert rig.answer(call).num_blocks == 4


def test_a_failed_copy_is_no_waste() -> None:
    rig, chain = cold()
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain))
    for copy in list(rig.copies):
        rig.finish(copy, Cause.TIER_OFFLINE)
    assert counted(rig) == {"begun": 2, "cancelled": 2}


def test_no_share_of_the_bandwidth_is_no_prefetch_and_no_end_of_the_daemon() -> None:
    rig, _ = cold(prefetch_bandwidth_fraction=0.0)
    say(rig, Urgency.WAITING, 5.0)
    ticks(rig, 4.0)
    assert not rig.copies
    due = rig.planner.next_deadline()
    assert due is None or due > rig.now, "nobody is woken up for what may not begin"
    say(rig, Urgency.QUEUED)
    assert not rig.copies
    ticks(rig, 60.0)
    assert counted(rig) == {}


class Tenants(Rig):
    """Two tenants, a client each; every session has a chain of two blocks that is in nvme only."""

    def __init__(self, num_sessions: int, **options: object) -> None:
        settings = {"num_extents": 4, "dram_blocks": 16, "nvme_blocks": 64, "num_tenants": 2}
        super().__init__(policies=ANNOUNCED, **(settings | options))  # type: ignore[arg-type]
        self.numbers: dict[str, tuple[int, int]] = {}  # tenant -> its client, its namespace
        for client, tenant in enumerate(("acme", "bolt"), CLIENT + 1):
            domain = f"tenant:{tenant}"
            self.do(ev.ClientOpened(client, tenant, True, domain))
            call = self.call()
            self.do(ev.NamespaceRegistered(call, NamespaceIdentity(b"m" * 16, GEOMETRY, domain=domain)))
            self.numbers[tenant] = client, self.answer(call).namespace_id
            for number in range(num_sessions):
                self.become(tenant)
                self.put(hashes(f"{tenant}{number}", 2), session_id=f"{tenant}\t{number}")
                self.cool(hashes(f"{tenant}{number}", 2))

    def become(self, tenant: str) -> None:
        """Let what follows be of a tenant."""
        self.client, self.namespace_id = self.numbers[tenant]

    def announce(self, tenant: str, number: int) -> None:
        """Say that a session comes back in a second."""
        self.become(tenant)
        session = f"{tenant}\t{number}"
        self.do(ev.SessionUpdated(self.client, session, Urgency.WAITING, back_at=self.now + 1.0))


def test_wrong_announcements_of_one_tenant_are_not_counted_against_another() -> None:
    """Before: 4 of 870 blocks came up that another tenant had announced rightly."""
    rig = Tenants(8)
    for _ in range(6):
        for number in range(8):
            rig.announce("acme", number)
        ticks(rig, 1.0)
        rig.settle()
        ticks(rig, 3 * rig.planner.core.options.prefetch_window_s)
        rig.become("acme")
        for number in range(8):
            rig.cool(hashes(f"acme{number}", 2))
    assert counted(rig)["wasted"] > 0
    rig.announce("bolt", 0)
    ticks(rig, 1.0)
    rig.settle()
    assert all("dram" in rig.where(name) for name in hashes("bolt0", 2))


def test_announced_blocks_of_one_tenant_leave_another_its_share_of_memory() -> None:
    rig = Tenants(16, max_prefetched_fraction=0.25)  # 16 blocks
    for number in range(16):
        rig.announce("acme", number)
    ticks(rig, 1.0)
    rig.settle()
    assert counted(rig)["begun"] == 8, "4 are reserved for each tenant, and half of the others stays free"
    rig.announce("bolt", 0)
    ticks(rig, 1.0)
    rig.settle()
    assert all("dram" in rig.where(name) for name in hashes("bolt0", 2))


def test_accounts_of_tenants_that_announced_something_once_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetch, "MAX_ACCOUNTS", 1)
    rig = Tenants(1)
    for tenant in ("acme", "bolt", "acme"):
        rig.announce(tenant, 0)
        ticks(rig, 1.0)
        rig.settle()
        rig.release(rig.acquire(hashes(f"{tenant}0", 2), session_id=f"{tenant}\t0"))
        rig.cool(hashes(f"{tenant}0", 2))
        assert rig.planner.check_integrity() == []
    assert counted(rig)["used"] == 6
