"""A tenant at its quota of nvme that uses one model after the other."""

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.options import TenantQuota
from kvtier.tiers.block import NamespaceIdentity, Tier

from ..rig import CLIENT, GEOMETRY, Rig, hashes

NUM_BLOCKS = 60  # enough for a look at a few shards to find one that may go


def fill(rig: Rig, name: str) -> list[bytes]:
    """Store as many chains of one block as the quota allows, in nvme only; return them."""
    blocks = [hashes(f"{name} {number}", 1)[0] for number in range(NUM_BLOCKS)]
    for block in blocks:
        rig.put([block], session_id="s")
    rig.do(ev.SessionEnded(rig.call(), CLIENT, "s", True))
    for _ in range(4):
        rig.tick()
        rig.settle()
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    return blocks


def num_cold(rig: Rig, blocks: list[bytes]) -> int:
    return sum("nvme" in rig.where(block) for block in blocks)


def test_what_an_old_model_left_makes_way_for_a_new_one() -> None:
    quota = TenantQuota(cold_bytes=NUM_BLOCKS * GEOMETRY.block_bytes)
    rig = Rig(dram_blocks=NUM_BLOCKS, nvme_blocks=64, num_segments=8, quotas={"": quota})
    old_id, old = rig.namespace_id, fill(rig, "old")
    assert num_cold(rig, old) == NUM_BLOCKS
    call = rig.call()
    rig.do(ev.NamespaceRegistered(call, NamespaceIdentity(b"n" * 16, GEOMETRY)))
    rig.namespace_id = rig.answer(call).namespace_id
    new = fill(rig, "new")
    assert num_cold(rig, new) > NUM_BLOCKS // 3
    cold_bytes = rig.planner.core.transitions.cold_bytes
    assert cold_bytes[old_id] < quota.cold_bytes  # type: ignore[operator]
    assert sum(cold_bytes.values()) <= quota.cold_bytes  # type: ignore[operator]
