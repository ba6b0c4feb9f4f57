"""Load or recompute: what lookups and acquires say, and what is not loaded."""

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.results import Refusal
from kvtier.policies.costs import EDGE_TRUST_S, PrefillModel
from kvtier.tiers.block import NamespaceIdentity, Tier

from ..rig import CLIENT, GEOMETRY, Rig, hashes

FAST = PrefillModel(tokens_per_s=1e7)  # 1.6 us a block of 16 tokens: quicker than any device
SLOW = PrefillModel(tokens_per_s=1e3)


def cold(
    num_blocks: int, speed: PrefillModel | None = None, bandwidth: float = 1e9
) -> tuple[Rig, list[bytes]]:
    """Return a rig and a chain that is in nvme only, over an edge that was measured."""
    rig = Rig()
    chain = rig.cool_new("a", num_blocks)
    if speed is not None:
        state(rig, speed)
    rig.do(ev.EdgeMeasured(Tier.NVME, Tier.DRAM, bandwidth, 1e-4))
    return rig, chain


def state(rig: Rig, speed: PrefillModel) -> None:
    rig.do(ev.NamespaceRegistered(rig.call(), NamespaceIdentity(b"m" * 16, GEOMETRY), speed))


def test_a_tier_slower_than_prefill_is_not_read_and_says_so() -> None:
    rig, chain = cold(3, FAST)
    answer = rig.answer(rig.acquire(chain))
    assert (answer.last, answer.num_blocks, answer.num_stored, rig.copies) == (True, 0, 3, [])
    assert answer.load_s > answer.recompute_s > 0
    assert answer.reason.startswith("nvme is slower than prefill from block 0 on: ")
    found = rig.planner.lookup(rig.namespace_id, chain)
    assert not isinstance(found, Refusal)
    assert (found.num_blocks, found.num_worth_loading, found.reason) == (3, 0, answer.reason)
    assert rig.planner.statistics()["counters"]["blocks_not_worth_loading"] == 3


def test_unless_the_caller_insists() -> None:
    rig, chain = cold(2, FAST)
    call = rig.acquire(chain, load_anyway=True)
    rig.settle()
    assert (rig.answer(call).num_blocks, rig.answers[call][0].reason) == (2, "")


def test_what_is_in_memory_is_read_whatever_is_behind_it() -> None:
    rig, chain = cold(4, FAST)
    call = rig.acquire(chain[:2], load_anyway=True)
    rig.settle()
    rig.release(call)
    answer = rig.answer(rig.acquire(chain))
    assert (answer.last, answer.num_blocks, answer.num_stored) == (True, 2, 4)


def test_a_guess_from_the_geometry_withholds_nothing() -> None:
    """The guess for this toy geometry is nanoseconds a token; a CPU needs milliseconds."""
    rig, chain = cold(2)
    found = rig.planner.lookup(rig.namespace_id, chain)
    assert not isinstance(found, Refusal)
    assert found.num_worth_loading == 0
    assert "(geometry)" in found.reason
    call = rig.acquire(chain)
    rig.settle()
    assert rig.answer(call).num_blocks == 2


def test_a_slow_device_is_tried_again() -> None:
    rig, chain = cold(2, FAST)
    assert rig.answer(rig.acquire(chain)).num_blocks == 0
    rig.tick(EDGE_TRUST_S + 1)
    call = rig.acquire(chain)
    rig.settle()
    assert rig.answer(call).num_blocks == 2


def test_the_speed_is_learned_from_puts() -> None:
    rig, chain = cold(2, bandwidth=1e5)  # 0.66 s for two blocks
    for name in "xyz":
        rig.put(hashes(name, 1), prefill_s=0.01)
    speed, source = rig.planner.costs.prefill_speed(rig.namespace_id)
    assert source == "measured"
    assert speed.tokens_per_s == pytest.approx(1600, rel=0.05)
    answer = rig.answer(rig.acquire(chain))
    assert (answer.num_blocks, answer.num_stored) == (0, 2)
    assert "(measured)" in answer.reason


def test_what_is_queued_on_the_edge_is_part_of_the_price() -> None:
    rig, chain = cold(4, SLOW)
    idle = rig.planner.lookup(rig.namespace_id, chain[2:])
    before = rig.planner.lookup(rig.namespace_id, chain)
    rig.acquire(chain[:2])
    after = rig.planner.lookup(rig.namespace_id, chain)
    assert not isinstance(before, Refusal)
    assert not isinstance(after, Refusal)
    assert isinstance(idle, tuple)
    queued_s = 2 * GEOMETRY.block_bytes / 1e9
    assert after.load_s == pytest.approx(before.load_s + queued_s)


def test_first_block_is_where_the_bill_begins() -> None:
    rig, chain = cold(3, SLOW)
    call = rig.acquire(chain, first_block=2)
    rig.settle()
    first = rig.answers[call][0]
    assert first.load_s == pytest.approx(1e-4 + GEOMETRY.block_bytes / 1e9)
    assert first.recompute_s == pytest.approx(rig.planner.costs.recompute_s(rig.namespace_id, 2, 1))
    assert rig.answer(call).num_blocks == 3


def test_a_stated_speed_stays_stated() -> None:
    """A namespace keeps its stated speed when it is registered again without one."""
    rig, chain = cold(2, FAST)
    rig.do(ev.NamespaceRegistered(rig.call(), NamespaceIdentity(b"m" * 16, GEOMETRY)))
    assert rig.answer(rig.acquire(chain)).num_blocks == 0
    assert CLIENT in rig.planner.leases.clients
