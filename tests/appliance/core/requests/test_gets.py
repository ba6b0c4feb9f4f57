"""Acquires: layer order, shortening, deadlines, retries, leases."""

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.results import Refusal
from kvtier.tiers.base import Cause, CopyOutcome
from kvtier.tiers.block import Tier
from kvtier.v1.shm import extent_of

from ..rig import CLIENT, GEOMETRY, Rig, hashes


def cold(num_blocks: int, **options: object) -> tuple[Rig, list[bytes]]:
    """Return a rig and a chain that is in nvme only."""
    rig = Rig(**options)  # type: ignore[arg-type]
    return rig, rig.cool_new("a", num_blocks)


def test_what_is_in_memory_is_ready_at_once() -> None:
    rig = Rig()
    chain = rig.put_new("a", 2)
    result = rig.answer(rig.acquire([*chain, *hashes("unknown", 1)]))
    assert result.last
    assert result.num_blocks == 2
    assert [(r.block, r.group) for r in result.ready] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(rig.published[r.tier, r.place] == chain[r.block] for r in result.ready)


def test_a_miss_is_an_answer() -> None:
    rig = Rig()
    result = rig.answer(rig.acquire(hashes("a", 1)))
    assert (result.lease_id, result.num_blocks, result.last) == (0, 0, True)


def test_cold_blocks_come_up_earliest_layers_first() -> None:
    rig, chain = cold(2)
    call = rig.acquire(chain)
    assert [[item.label.group for item in copy.items] for copy in rig.copies] == [[0, 0], [1, 1]]
    assert rig.answer(call).tiers == bytes([Tier.NVME, Tier.NVME])
    rig.finish(rig.copies[0])
    assert [(r.block, r.group) for r in rig.answer(call).ready] == [(0, 0), (1, 0)]
    assert not rig.answer(call).last
    rig.settle()
    assert rig.answer(call).last
    assert rig.answer(call).num_blocks == 2


def test_the_first_answer_says_where_the_rest_will_be() -> None:
    """Clients map these extents while the device reads."""
    rig, chain = cold(2)
    rig.put(hashes("b", 1))
    call = rig.acquire(chain)
    targets = {item.target for copy in rig.copies for item in copy.items}
    first = rig.answers[call][0]
    assert first.arriving == sorted({(Tier.DRAM, extent_of(place)) for place in targets})
    rig.settle()
    assert all(not answer.arriving for answer in rig.answers[call][1:])
    assert not rig.answer(rig.acquire(chain)).arriving, "all of it is in memory"


def test_a_failed_load_shortens_the_prefix() -> None:
    rig, chain = cold(2)
    call = rig.acquire(chain)
    bad = rig.copies[1]
    rig.finish(rig.copies[0])
    rig.copies.remove(bad)
    good_then_bad = [CopyOutcome(None, b"\7" * 16), CopyOutcome(Cause.WRONG_CHECKSUM)]
    rig.do(ev.CopyFinished(bad.copy, good_then_bad))
    assert rig.answer(call).last
    assert rig.answer(call).num_blocks == 1
    assert rig.found(chain) == 1


def test_what_was_reported_stays_until_the_release() -> None:
    """The client may be reading (1, 0) in place when (0, 1) fails. (Simulator, seed 18.)"""
    rig, chain = cold(2)
    call = rig.acquire(chain)
    rig.finish(rig.copies[0])
    reported = rig.answers[call][-1].ready
    rig.finish(rig.copies[0], Cause.IO_ERROR)
    assert rig.answer(call).num_blocks == 0
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    assert all((r.tier, r.place) in rig.published for r in reported)
    rig.release(call)
    assert sum(rig.planner.catalog.holds[Tier.DRAM]) == 0


def test_an_acquire_ends_by_its_deadline_with_what_has_come() -> None:
    rig, chain = cold(2)
    call = rig.acquire(chain, deadline_at=1.0)
    assert rig.planner.next_deadline() == 1.0
    rig.finish(rig.copies[0])
    rig.tick(1.0)
    assert rig.answer(call).last
    assert rig.answer(call).num_blocks == 0
    rig.settle()


def test_two_acquires_share_one_load() -> None:
    rig, chain = cold(1)
    calls = [rig.acquire(chain), rig.acquire(chain)]
    assert sum(len(copy.items) for copy in rig.copies) == GEOMETRY.num_groups
    rig.settle()
    assert all(rig.answer(call).num_blocks == 1 for call in calls)


def test_a_retry_gets_the_same_lease() -> None:
    rig = Rig()
    rig.put(hashes("a", 1))
    first, again = rig.acquire(hashes("a", 1), "r"), rig.acquire(hashes("a", 1), "r")
    assert rig.answer(first).lease_id == rig.answer(again).lease_id
    assert list(rig.answer(first).ready) == list(rig.answer(again).ready)


def test_a_retry_that_comes_after_the_release_is_told_of_no_places() -> None:
    rig = Rig()
    rig.put(hashes("a", 1))
    first = rig.acquire(hashes("a", 1), "r")
    rig.release(first)
    late = rig.answer(rig.acquire(hashes("a", 1), "r"))
    assert (late.lease_id, late.num_blocks, list(late.ready), late.last) == (0, 0, [], True)


def test_a_lease_that_ends_early_is_not_filled_any_more() -> None:
    rig, chain = cold(1)
    call = rig.acquire(chain)
    rig.release(call)
    rig.settle()
    assert rig.answer(call).last
    assert sum(rig.planner.catalog.holds[Tier.DRAM]) == 0


def test_held_blocks_are_no_victims() -> None:
    rig = Rig(nvme_blocks=0)
    rig.put(hashes("a", 2))
    call = rig.acquire(hashes("a", 2))
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    assert len(rig.published) == 4
    rig.release(call)
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    assert not rig.published


def test_an_overdue_lease_of_a_local_client_keeps_its_memory() -> None:
    rig = Rig(lease_ttl_s=1.0, lease_grace_s=0.5, nvme_blocks=0)
    rig.put(hashes("a", 1))
    call = rig.acquire(hashes("a", 1))
    rig.tick(2.0)
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    assert len(rig.published) == 2
    assert rig.planner.statistics()["overdue_bytes"] == GEOMETRY.block_bytes
    kept = rig.call()
    rig.do(ev.KeptAlive(kept, CLIENT, [rig.answer(call).lease_id]))
    assert rig.answer(kept).expired == [rig.answer(call).lease_id]
    rig.do(ev.ClientGone(CLIENT, "died"))
    assert rig.planner.statistics()["overdue_bytes"] == 0


def test_a_lease_of_a_remote_client_simply_ends() -> None:
    rig = Rig(lease_ttl_s=1.0, lease_grace_s=0.5)
    rig.put(hashes("a", 1))
    rig.do(ev.ClientOpened(2, "remote", False, ""))
    call = rig.call()
    rig.do(ev.AcquireRequested(call, 2, "", rig.namespace_id, hashes("a", 1)))
    rig.tick(2.0)
    assert len(rig.planner.leases) == 0


def test_the_acquire_of_a_client_that_falls_silent_is_answered() -> None:
    rig, chain = cold(1)
    rig.do(ev.ClientOpened(2, "remote", False, "", ttl_s=1.0))
    call = rig.call()
    rig.do(ev.AcquireRequested(call, 2, "", rig.namespace_id, chain))
    rig.tick(1.1)
    assert isinstance(rig.answer(call), Refusal)
    rig.settle()


def test_a_client_holds_no_more_than_its_share() -> None:
    rig = Rig(dram_blocks=4, max_pinned_fraction=0.5)
    rig.put(hashes("a", 4))
    assert rig.answer(rig.acquire(hashes("a", 4))).num_blocks == 2


def test_a_collected_load_holds_its_source() -> None:
    """Room for the second load of a request must not come from the source of the first. (Seed 4392.)"""
    rig = Rig(dram_blocks=2, hbm_blocks=4)
    chain = rig.cool_new("a", 2)
    held = rig.acquire(chain[:1])
    rig.settle()
    rig.release(held)
    rig.put(hashes("held", 1))
    rig.acquire(hashes("held", 1))
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain, Tier.HBM))
    assert [copy.target for copy in rig.copies] == [Tier.HBM, Tier.HBM]
    for copy in rig.copies:
        assert all(rig.published[Tier.DRAM, i.source] == i.label.prefix_hash for i in copy.items)
    rig.settle()
    assert "hbm" in rig.where(chain[0])


def test_a_gpus_memory_is_read_on_the_gpu_only() -> None:
    """What is in hbm alone is handed out there to who can read it; for others it comes down to dram."""
    rig = Rig(dram_blocks=2, hbm_blocks=2, nvme_blocks=0, hbm_is_shared=False)
    chain = rig.put_new("a", 1)
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain, Tier.HBM))
    rig.settle()
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 1 << 30))
    rig.settle()
    assert rig.where(chain[0]) == {"hbm"}
    on_device = rig.answer(rig.acquire(chain, on_device=True))
    assert on_device.last
    assert {ready.tier for ready in on_device.ready} == {Tier.HBM}
    call = rig.acquire(chain)
    assert not rig.answers[call][-1].ready
    rig.settle()
    assert {ready.tier for result in rig.answers[call] for ready in result.ready} == {Tier.DRAM}


def test_what_is_on_its_way_counts_as_held() -> None:
    """Two requests, each within the share of its client, are not granted more than that together."""
    rig = Rig(dram_blocks=4, max_pinned_fraction=0.5)
    chains = [hashes("a", 2), hashes("b", 2)]
    for chain in chains:
        rig.put(chain)
        rig.cool(chain)
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    calls = [rig.acquire(chain) for chain in chains]
    rig.settle()
    assert [rig.answers[call][-1].num_blocks for call in calls] == [2, 0]
    rig.release(calls[0])
    client = rig.planner.leases.clients[1]
    assert (client.held_bytes, client.promised_bytes) == (0, 0)
    again = rig.acquire(chains[1])
    rig.settle()
    assert rig.answers[again][-1].num_blocks == 2


def test_a_retry_that_was_told_of_no_places_is_not_waited_for() -> None:
    """What the first try reported was condemned meanwhile; the rest of it is still coming."""
    rig = Rig()
    chain = rig.cool_new("a", 2)
    rig.acquire(chain, "r")
    rig.finish(rig.copies[0])
    residency, catalog = rig.planner.residency, rig.planner.catalog
    row = catalog.find(rig.namespace_id, chain[0])
    residency.condemn(catalog.first_fragment[row], Tier.DRAM, "test")
    rig.tick()
    retry = rig.acquire(chain, "r", deadline_at=1.0)
    assert (rig.answer(retry).num_blocks, rig.answer(retry).last) == (0, True)
    rig.do(ev.AcquireAbandoned(retry))
    rig.settle()
    rig.tick(2.0)
    assert rig.planner.reads.next_deadline() is None


def test_a_block_may_be_held_more_often_than_two_bytes_count() -> None:
    rig = Rig(max_pinned_fraction=1e9)
    chain = rig.put_new("a", 1)
    for _ in range(17):
        event = ev.AcquireRequested(rig.call(), CLIENT, "", rig.namespace_id, chain * 4096)
        rig.planner.handle(event, 0.0)
    row = rig.planner.catalog.find(rig.namespace_id, chain[0])
    assert rig.planner.catalog.num_holds[Tier.DRAM][row] == 2 * 17 * 4096


def test_a_block_names_the_leases_that_hold_it() -> None:
    rig = Rig()
    chain = rig.put_new("a", 2)
    calls = [rig.acquire(chain), rig.acquire(chain[:1])]
    lease_ids = [rig.answer(call).lease_id for call in calls]

    def told(name: bytes) -> list[int]:
        block = rig.planner.inspection.block(rig.namespace_id, name)
        assert block is not None
        return list(block["lease_ids"])

    assert [told(name) for name in chain] == [lease_ids, lease_ids[:1]]
    rig.release(calls[0])
    assert [told(name) for name in chain] == [lease_ids[1:], []]
