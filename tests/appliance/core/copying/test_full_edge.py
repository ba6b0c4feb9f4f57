"""Room where nvme cannot keep up: as much is being spilled as may be, and whoever leaves next has to wait."""

from kvtier.appliance.core.results import PutOutcome
from kvtier.policies.registry import PolicyChoice
from kvtier.tiers.block import Tier

from ..rig import STORED, Rig, hashes


def full_edge(*names: str) -> Rig:
    """Return a rig whose dram is full of these blocks, used in this order, the last one in nvme, too; one
    block may be spilled at a time."""
    policies = PolicyChoice(eviction="lru")
    rig = Rig(dram_blocks=len(names), nvme_blocks=16, max_spill_bytes=1, policies=policies)
    for name in names:
        rig.put(hashes(name, 1))
        rig.tick(1.0)
    save(rig, names[-1])
    rig.settle()
    assert rig.where(hashes(names[-1], 1)[0]) == {"dram", "nvme"}
    return rig


def save(rig: Rig, name: str) -> None:
    """See that a block gets into nvme as soon as the edge has room for it."""
    row = rig.planner.catalog.find(rig.namespace_id, hashes(name, 1)[0])
    assert rig.planner.pressure.archiving.add(row)
    rig.tick()


def test_nobody_is_looked_for_again_while_the_next_victim_waits_for_spills() -> None:
    rig = full_edge("old", "dirty", "clean")
    call = rig.start_put(hashes("new", 2))
    assert [item.label.prefix_hash for copy in rig.copies for item in copy.items] == hashes("old", 1) * 2
    num_choices = 0
    choose = rig.planner.core.policies.evictions[Tier.DRAM].choose

    def count(now: float) -> object:
        nonlocal num_choices
        num_choices += 1
        return choose(now)

    rig.planner.core.policies.evictions[Tier.DRAM].choose = count  # type: ignore[method-assign, assignment]
    for _ in range(10):
        rig.tick()
    assert num_choices == 0
    rig.settle()
    assert list(rig.answer(call).outcomes) == [STORED] * 2


def test_another_victim_is_looked_for_when_the_one_that_waits_is_in_use() -> None:
    rig = full_edge("old", "dirty", "clean")
    call = rig.start_put(hashes("new", 1), deadline_at=100.0)
    spill = rig.copies[0]
    held = rig.acquire(hashes("dirty", 1))
    rig.tick()
    new = next(copy for copy in rig.copies if copy is not spill)
    assert rig.where(hashes("clean", 1)[0]) == {"nvme"}
    rig.finish(new)
    assert (list(rig.answer(call).outcomes), rig.copies) == ([STORED], [spill])
    rig.release(held)
    rig.settle()


def test_a_victim_that_was_spilled_meanwhile_leaves_at_once() -> None:
    rig = full_edge("old", "dirty", "other", "clean")
    late = rig.start_put(hashes("late", 1), deadline_at=rig.now + 1)
    rig.tick(2.0)
    assert list(rig.answer(late).outcomes) == [PutOutcome.NO_ROOM]
    save(rig, "dirty")
    save(rig, "other")
    rig.finish(rig.copies[0])
    rig.finish(rig.copies[0])
    assert [rig.where(hashes(name, 1)[0]) for name in ("dirty", "other")] == [{"dram", "nvme"}, {"dram"}]
    (spill,) = rig.copies
    call = rig.start_put(hashes("new", 2))
    for copy in rig.copies[1:]:
        rig.finish(copy)
    assert (list(rig.answer(call).outcomes), rig.copies) == ([STORED] * 2, [spill])
