"""The untimed shell: the semantics by hand, books that balance, the same result every time."""

from collections import OrderedDict

import pytest

from kvtier.appliance.replay.outcomes import Outcome
from kvtier.appliance.replay.setups import UNBOUNDED, ModelShape, single_tier
from kvtier.appliance.replay.traces import Trace, TraceBuilder, TraceNamespace
from kvtier.appliance.replay.untimed import UntimedShell
from kvtier.policies.registry import ADMISSION, EVICTION

from .traces import drawn, request, trace_of

BLOCK_BYTES = 64 << 20  # of Shape(), 512 tokens


def replay(trace: Trace, policy: str = "lru", capacity: str = "5%") -> Outcome:
    """Replay on one tier; the audit must be clean."""
    shell = UntimedShell(trace, single_tier(policy, capacity, trace, ModelShape()))
    outcome = shell.run()
    assert outcome.problems == []
    assert shell.planner.statistics()["num_copies_in_flight"] == 0
    return outcome


def blocks(count: int) -> str:
    """Return the capacity of this many blocks."""
    return f"{count * BLOCK_BYTES}B"


def test_hits_are_the_resident_prefix_and_the_least_recent_tail_leaves() -> None:
    trace = trace_of(
        request(0, [1, 2, 3], 1030),  # 0 of 3; stored 1 2 3
        request(1000, [1, 2, 3], 1030),  # 3 of 3, of which the last block has 6 tokens
        request(2000, [1, 5]),  # 1 of 2: block 5 needs room, and 3 is the tail of what is older; stored 1 2 5
        request(3000, [1, 2, 3], 1030),  # 2 of 3: block 3 pushes out 5; stored 1 2 3
        request(4000, [1, 5]),  # 1 of 2
    )
    outcome = replay(trace, capacity=blocks(3))
    assert outcome.num_blocks == 3 + 3 + 2 + 3 + 2
    assert sum(outcome.block_hits.values()) == 0 + 3 + 1 + 2 + 1
    assert sum(outcome.token_hits.values()) == 0 + 1030 + 512 + 1024 + 512
    assert outcome.num_tokens == 1030 * 3 + 1024 * 2
    assert outcome.counters["evicted_dram"] == 3
    assert outcome.num_refused_blocks == 0


def test_a_child_never_stays_behind_its_parent() -> None:
    """Block 9 is used last of all, and yet its ancestors protect it and themselves."""
    trace = trace_of(
        request(0, [1, 2]),
        request(1000, [7]),
        request(2000, [1, 2, 9]),
        request(3000, [8]),
        request(4000, [1]),
    )
    outcome = replay(trace, capacity=blocks(4))
    assert sum(outcome.block_hits.values()) == 2 + 1
    assert outcome.counters["evicted_dram"] == 1  # block 7


def test_what_does_not_fit_is_refused_and_counted() -> None:
    outcome = replay(
        trace_of(request(0, [1, 2, 3, 4, 5]), request(1000, [1, 2, 3, 4, 5])), capacity=blocks(2)
    )
    assert sum(outcome.block_hits.values()) == 2
    assert outcome.num_refused_blocks == 3 + 3


def test_what_was_only_put_is_no_hit_and_no_miss() -> None:
    """A recording knows puts of decoded blocks: they count in no ratio, and are there for the next turn."""
    builder = TraceBuilder("recording")
    builder.add_namespace(TraceNamespace(16, 4096))
    builder.add(0.0, ["a", "b"], num_tokens=32, num_asked=2, num_filled=0)
    builder.add(1.0, ["a", "b"], num_tokens=0, num_asked=0, num_filled=2)
    builder.add(2.0, ["c"], num_tokens=0, num_asked=0, num_filled=1, parent="b")
    builder.add(3.0, ["a", "b", "c", "d"], num_tokens=64, num_asked=4, num_filled=3)
    builder.add(4.0, ["z"], num_tokens=0, num_asked=0, num_filled=1, parent="y")
    outcome = replay(builder.build(), capacity="1GiB")
    assert (outcome.num_blocks, sum(outcome.block_hits.values())) == (6, 3)
    assert sum(outcome.token_hits.values()) == 48
    assert outcome.num_refused_blocks == 1  # z: nobody has its parent


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0, 10, 40])
def test_lru_agrees_with_a_list_of_blocks(seed: int, share: int) -> None:
    """An exact LRU that touches chains tail first, written independently of the planner."""
    print(f"seed {seed}")
    trace = drawn(seed)
    chains = [trace.blocks[a:b].tolist() for a, b in zip(trace.first[:-1], trace.first[1:], strict=True)]
    capacity = max(round(share / 100 * trace.num_blocks), *map(len, chains))
    kept: OrderedDict[int, None] = OrderedDict()
    expected = 0
    for chain in chains:
        expected += next((n for n, block in enumerate(chain) if block not in kept), len(chain))
        for block in reversed(chain):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > capacity:
            kept.popitem(last=False)
    assert sum(replay(trace, capacity=blocks(capacity)).block_hits.values()) == expected


def test_unbounded_keeps_everything() -> None:
    trace = drawn(5)
    outcome = replay(trace, UNBOUNDED)
    assert outcome.counters.get("evicted_dram", 0) == 0
    assert trace.num_accesses - sum(outcome.block_hits.values()) == trace.num_blocks


@pytest.mark.parametrize("policy", sorted({*EVICTION, "lru"}))
def test_every_policy_balances_its_books_and_repeats_itself(policy: str) -> None:
    trace = drawn(6)
    first, second = (replay(trace, policy, "15%") for _ in range(2))
    assert first.plain() | {"cpu_s": 0} == second.plain() | {"cpu_s": 0}
    stored = first.counters["stored_dram"]
    misses = first.num_blocks - sum(first.block_hits.values())
    assert stored + first.num_refused_blocks == misses
    bound = replay(trace, UNBOUNDED)
    assert first.token_hit_ratio <= bound.token_hit_ratio
    assert first.prefill_s + first.prefill_saved_s == pytest.approx(bound.prefill_s + bound.prefill_saved_s)


@pytest.mark.skipif("clairvoyant" not in EVICTION or "clairvoyant" not in ADMISSION, reason="no such policy")
def test_nothing_beats_the_clairvoyant_bound() -> None:
    for seed in range(2):
        trace = drawn(seed)
        for capacity in ("10%", "40%"):
            bound = replay(trace, "clairvoyant", capacity).block_hit_ratio
            assert bound >= replay(trace, "lru", capacity).block_hit_ratio
