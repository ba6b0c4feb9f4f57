"""Two tiers of host memory: blocks are demoted from one into the other and on into the log, read in place in
both, and promoted when they are used again. The core knows neither by name (tests/test_core_structure.py)."""

from dataclasses import replace

from kvtier.appliance.core.events import (
    EvictRequested,
    PinRequested,
    PolicyChanged,
    SessionEnded,
    UnpinRequested,
)
from kvtier.appliance.core.results import AcquireResult
from kvtier.tiers.base import Cause
from kvtier.tiers.ladder import with_memory

from ..rig import CLIENT, SLOT_BYTES, STORED, Rig, hashes

LADDER = with_memory(["cxl"])
DRAM, CXL, NVME = LADDER.put_tier, LADDER.named("cxl"), LADDER.log_tier


def put(rig: Rig, name: str) -> None:
    assert rig.put(hashes(name, 1)) == [STORED]
    rig.settle()
    rig.now += 1.0


def where(rig: Rig, name: str) -> set[str]:
    return rig.where(hashes(name, 1)[0])


def get(rig: Rig, name: str) -> AcquireResult:
    call = rig.acquire(hashes(name, 1))
    rig.settle()
    result = rig.answer(call)
    rig.release(call)
    rig.settle()
    rig.now += 1.0
    assert isinstance(result, AcquireResult)
    return result


def test_the_coldest_block_goes_down_one_memory_at_a_time() -> None:
    rig = Rig(dram_blocks=2, cxl_blocks=2, nvme_blocks=4)
    for number in range(5):
        put(rig, f"p{number}")
    assert where(rig, "p4") == {"dram"}
    assert "cxl" in where(rig, "p2")
    assert where(rig, "p0") == {"nvme"}
    assert {(copy.source, copy.target) for copy in rig.started} == {(None, DRAM), (DRAM, CXL), (CXL, NVME)}


def test_a_block_in_the_second_memory_is_read_in_place() -> None:
    rig = Rig(dram_blocks=1, cxl_blocks=2, nvme_blocks=0)
    put(rig, "a")
    put(rig, "b")
    assert where(rig, "a") == {"cxl"}
    num_started = len(rig.started)
    result = get(rig, "a")
    assert {ready.tier for ready in result.ready} == {CXL}
    assert len(rig.started) == num_started, "nothing was loaded for it"


def test_a_block_that_is_used_again_there_comes_back_up() -> None:
    rig = Rig(dram_blocks=1, cxl_blocks=2, nvme_blocks=0)
    put(rig, "a")
    put(rig, "b")
    get(rig, "a")
    assert where(rig, "a") == {"cxl"}, "a single use is a scan's"
    get(rig, "a")
    assert "dram" in where(rig, "a"), "b was not used since a's first use here"
    assert where(rig, "b") == {"cxl"}


def test_a_block_that_the_log_has_is_copied_into_the_next_memory_all_the_same() -> None:
    rig = Rig(dram_blocks=1, cxl_blocks=2, nvme_blocks=4, write="through")
    put(rig, "a")
    assert where(rig, "a") == {"dram", "nvme"}
    put(rig, "b")
    assert where(rig, "a") == {"cxl", "nvme"}


def test_a_memory_that_takes_nothing_is_passed_over() -> None:
    rig = Rig(dram_blocks=1, cxl_blocks=1, nvme_blocks=4)
    assert rig.planner.rooms[CXL].reserve(7, 4096) is not None  # its extent belongs to another domain
    put(rig, "a")
    put(rig, "b")
    assert (where(rig, "a"), where(rig, "b")) == ({"nvme"}, {"dram"})


def test_what_is_passed_over_is_bounded_like_other_spills() -> None:
    rig = Rig(
        dram_blocks=8, cxl_blocks=1, nvme_blocks=32, high_watermark=0.125, max_spill_bytes=6 * SLOT_BYTES
    )
    assert rig.planner.rooms[CXL].reserve(7, 4096) is not None  # its extent belongs to another domain
    for number in range(8):
        rig.start_put(hashes(f"p{number}", 1))
        (copy,) = (copy for copy in rig.copies if copy.source is None)
        rig.finish(copy)
    for _ in range(8):
        rig.tick()
    moving = [copy for copy in rig.copies if (copy.source, copy.target) == (DRAM, NVME)]
    assert sum(len(copy.items) for copy in moving) == 6, "as many fragments as may be spilled at a time"


def test_a_run_leaves_only_when_the_next_memory_has_all_of_it() -> None:
    rig = Rig(dram_blocks=32, cxl_blocks=64, nvme_blocks=128, write="through")
    chain = rig.put_new("a", 32)
    rig.settle()
    put(rig, "x")
    assert rig.where(chain[-1]) == {"cxl", "nvme"}
    for _ in range(2):
        rig.now += 1.0
        rig.release(rig.acquire(chain))
        rig.settle()
    assert rig.where(chain[-1]) == {"dram", "cxl", "nvme"}
    assert rig.where(chain[-2]) == {"dram", "nvme"}
    rig.put(hashes("b", 32))
    rig.settle()
    assert all(rig.where(name) == {"cxl", "nvme"} for name in chain)


def test_a_second_memory_too_small_for_one_block_does_not_keep_its_parent_in_the_first() -> None:
    """The log is absent, and the second memory's high watermark is below one block: the parent could neither
    go down nor, while its child was there, be evicted. Puts were declined for ever (seeds 1455, 16955)."""
    rig = Rig(dram_blocks=2, cxl_blocks=1, nvme_blocks=0)
    first, second = hashes("a", 2)
    assert rig.put([first, second]) == [STORED, STORED]
    put(rig, "b")
    assert rig.where(first) == {"dram"}
    assert rig.where(second) == {"cxl"}
    options = replace(rig.planner.core.options, high_watermark=0.9)
    rig.do(PolicyChanged(options, rig.planner.core.choice, {}))
    rig.settle()
    assert rig.put(hashes("c", 2)) == [STORED, STORED]
    assert rig.where(first) == rig.where(second) == set()


def test_a_second_memory_that_shrinks_gives_up_a_block_with_what_continues_it() -> None:
    """Without a log the parent in the second memory is its only copy. Its child in the first one kept it, and
    so the extents that leave, for ever (seed 15283)."""
    rig = Rig(dram_blocks=2, cxl_blocks=1, nvme_blocks=0)
    cxl = rig.planner.rooms[CXL]
    cxl.grow(2)  # type: ignore[attr-defined]
    first, second = hashes("a", 2)
    assert rig.put([first]) == [STORED]
    rig.settle()
    for name in ("b", "c", "d"):
        put(rig, name)
    assert rig.where(first) == where(rig, "b") == {"cxl"}
    assert rig.put([second], first) == [STORED]
    rig.settle()
    rig.do(PolicyChanged(rig.planner.core.options, rig.planner.core.choice, {CXL: 1}))
    for _ in range(4):
        rig.settle()
        rig.tick(1.0)
    assert not cxl.leaving  # type: ignore[attr-defined]
    assert (rig.where(first), rig.where(second)) == (set(), set())


def test_a_pinned_end_in_two_tiers_stays() -> None:
    """Each tier was the excuse for leaving the other: the second eviction failed, and ended the daemon."""
    rig = Rig(dram_blocks=2, cxl_blocks=1, nvme_blocks=1, num_segments=3, min_free_segments=1)
    pinned, chain = rig.put_new("p", 1, session_id="s"), hashes("a", 2)
    rig.do(SessionEnded(rig.call(), CLIENT, "s", True))
    rig.settle()
    rig.do(EvictRequested(rig.call(), DRAM, 0))
    rig.put(chain)
    put(rig, "b")
    lease = rig.acquire(chain, first_block=1, session_id="s")
    rig.do(SessionEnded(rig.call(), CLIENT, "s", True))
    rig.settle()
    where = [{"nvme"}, {"dram"}, {"cxl", "nvme"}]
    assert [rig.where(name) for name in pinned + chain] == where
    for names in (pinned, chain):
        pin = rig.call()
        rig.do(PinRequested(pin, CLIENT, "", rig.namespace_id, names, NVME, 60.0))
    call = rig.start_put(hashes("c", 1))
    (forward,) = rig.copies
    assert (forward.source, forward.target) == (NVME, NVME)
    rig.finish(forward, Cause.NO_SPACE)  # nvme is full: nothing there can be emptied any more
    assert rig.planner.refusals.is_full
    options = replace(rig.planner.core.options, high_watermark=0.9)  # of cxl: less than a block
    rig.do(PolicyChanged(options, rig.planner.core.choice, {}))
    rig.release(lease)
    rig.tick(0.1)
    assert [rig.where(name) for name in pinned + chain] == where
    rig.do(UnpinRequested(rig.answer(pin).pin_id))
    rig.tick(0.1)
    rig.settle()
    assert list(rig.answer(call).outcomes) == [STORED]
    assert [rig.where(name) for name in pinned + chain] == [{"nvme"}, set(), set()]
