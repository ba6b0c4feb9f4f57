"""The timed shell: seconds by hand, edges that queue, books that balance over several tiers."""

import io

import pytest
from rich.console import Console

from kvtier.appliance.core.events import CopyFinished
from kvtier.appliance.core.instructions import CancelCopy, Copy
from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.replay.outcomes import Outcome
from kvtier.appliance.replay.report import differences, tables
from kvtier.appliance.replay.setups import ModelShape, Setup, choice_of
from kvtier.appliance.replay.timed import TimedShell
from kvtier.appliance.replay.traces import Trace
from kvtier.appliance.replay.virtual import EdgeSpeed, VirtualClock, VirtualMover
from kvtier.policies.registry import EVICTION
from kvtier.tiers.base import Cause, CopyItem
from kvtier.tiers.block import FragmentLabel, Tier, Urgency
from kvtier.tiers.ladder import with_memory

from .traces import drawn, request, trace_of

BLOCK_BYTES = 64 << 20
MIB = 1 << 20
SPEEDS = {
    "staging>dram": EdgeSpeed(1000 * BLOCK_BYTES, 0.001),
    "dram>nvme": EdgeSpeed(100 * BLOCK_BYTES, 0.002),
    "nvme>dram": EdgeSpeed(10 * BLOCK_BYTES, 0.003),
    "dram>runtime": EdgeSpeed(500 * BLOCK_BYTES, 0.004),
}


def shell_of(trace: Trace, dram_blocks: int, nvme_blocks: int = 0, policy: str = "lru") -> TimedShell:
    """Return a shell on tiers of these sizes."""
    sizes = {Tier.DRAM: dram_blocks * BLOCK_BYTES}
    if nvme_blocks:
        sizes[Tier.NVME] = nvme_blocks * (BLOCK_BYTES + 4096)
    setup = Setup(policy, "", choice_of(policy), sizes, PlannerOptions(), ModelShape(), is_timed=True)
    return TimedShell(trace, setup, speeds=SPEEDS)


def run(shell: TimedShell) -> Outcome:
    """Replay; the audit must be clean and nobody left waiting."""
    outcome = shell.run()
    assert outcome.problems == []
    assert shell.planner.statistics()["num_copies_in_flight"] == 0
    assert shell.planner.statistics()["num_leases"] == 0
    return outcome


def test_seconds_of_a_miss_and_of_a_hit_in_memory() -> None:
    shell = shell_of(trace_of(request(0, [1, 2]), request(60_000, [1, 2, 3])), dram_blocks=16)
    recompute_s = shell.planner.costs.recompute_s
    outcome = run(shell)
    first_s = recompute_s(1, 0, 2)
    second_s = 0.004 + 2 / 500 + recompute_s(1, 2, 1)
    assert outcome.ttft_s["mean"] == pytest.approx((first_s + second_s) / 2, rel=1e-6)
    assert outcome.prefill_saved_s == pytest.approx(recompute_s(1, 0, 2))
    assert outcome.block_hits == {"dram": 2}
    assert outcome.edge_bytes == {"dram>runtime": 2 * BLOCK_BYTES, "staging>dram": 3 * BLOCK_BYTES}


def test_a_put_comes_after_its_prefill() -> None:
    """The second request arrives while the first one is still computing: there is nothing to hit yet."""
    outcome = run(shell_of(trace_of(request(0, [1, 2]), request(20, [1, 2])), dram_blocks=16))
    assert outcome.block_hits == {"dram": 0}
    assert outcome.edge_bytes["staging>dram"] == 2 * BLOCK_BYTES  # the second put is not copied again


def test_what_was_spilled_is_loaded_and_waited_for() -> None:
    others = [request(60_000 * n, [100 * n + k for k in range(4)]) for n in range(1, 5)]
    trace = trace_of(request(0, [1, 2]), *others, request(600_000, [1, 2]))
    shell = shell_of(trace, dram_blocks=8, nvme_blocks=400)
    outcome = run(shell)
    assert outcome.block_hits == {"dram": 0, "nvme": 2}
    assert outcome.edge_bytes["nvme>dram"] == 2 * BLOCK_BYTES
    load_s, read_s = 0.003 + 2 / 10, 0.004 + 2 / 500
    assert shell._ttft_s[-1] == pytest.approx(load_s + read_s, abs=2e-6)
    assert outcome.nvme_written_bytes_per_day == pytest.approx(
        outcome.edge_bytes["dram>nvme"] * 86_400 / 600, rel=1e-3
    )


@pytest.mark.parametrize("policy", sorted(set(EVICTION) & {"lru", "s3fifo", "clairvoyant", "urgency"}))
@pytest.mark.parametrize("nvme_blocks", [0, 160])
def test_books_balance_and_results_repeat(policy: str, nvme_blocks: int) -> None:
    trace = drawn(8, num_requests=100)
    outcomes = []
    for _ in range(2):
        shell = shell_of(trace, 60, nvme_blocks, policy)
        outcomes.append(run(shell))
        counters = shell.planner.story.counters
        moved = shell.mover.num_bytes["staging>dram"]
        loaded = shell.mover.num_bytes["nvme>dram"]
        assert counters["stored_dram"] * BLOCK_BYTES == moved + loaded
        assert counters.get("stored_nvme", 0) * BLOCK_BYTES == shell.mover.num_bytes["dram>nvme"]
    assert outcomes[0].plain() | {"cpu_s": 0} == outcomes[1].plain() | {"cpu_s": 0}
    assert set(outcomes[0].ttft_s) == {"mean", "p50", "p90", "p95", "p99"}


# ---------------------------------------------------------------------------------------- mover


def copy(number: int, urgency: Urgency, num_items: int = 1) -> Copy:
    """Return a copy of fragments of 1 MiB."""
    label = FragmentLabel(b"n" * 32, 1, b"p" * 32, b"", 0, 0, MIB)
    return Copy(number, Tier.NVME, Tier.DRAM, [CopyItem(n, n, label) for n in range(num_items)], urgency)


def test_an_edge_moves_one_batch_at_a_time_most_urgent_first() -> None:
    clock, ends = VirtualClock(), []
    speeds = {"nvme>dram": EdgeSpeed(MIB, 0.5)}
    mover = VirtualMover(clock, speeds, lambda event: ends.append((clock.now, event.copy)))
    for number, urgency in ((1, Urgency.IDLE), (2, Urgency.IDLE), (3, Urgency.PREFILL)):
        mover.start(copy(number, urgency, num_items=2))
    while clock.next_at() is not None:
        clock.run_next()
    assert ends == [(2.5, 1), (4.5, 3), (6.5, 2)]
    assert mover.num_bytes == {"nvme>dram": 6 * MIB}


def test_a_batch_that_has_not_begun_can_be_cancelled() -> None:
    clock = VirtualClock()
    ended: list[CopyFinished] = []
    mover = VirtualMover(clock, {"nvme>dram": EdgeSpeed(MIB, 0.0)}, ended.append)
    mover.start(copy(1, Urgency.IDLE))
    mover.start(copy(2, Urgency.IDLE))
    for number in (1, 2, 2, 9):
        mover.cancel(CancelCopy(number))
    while clock.next_at() is not None:
        clock.run_next()
    causes = {event.copy: event.outcomes[0].cause for event in ended}
    assert len(ended) == 2
    assert causes == {1: None, 2: Cause.CANCELLED}
    assert mover.num_bytes["nvme>dram"] == MIB


def test_prompts_longer_than_one_call_may_be_are_served() -> None:
    """Clients send them in several; they were refused here, and no hit was ever counted."""
    ids = list(range(40))
    trace = trace_of(request(0, ids), request(60_000, ids))
    sizes, options = {Tier.DRAM: 100 * BLOCK_BYTES}, PlannerOptions(max_blocks_per_request=16)
    setup = Setup("lru", "", choice_of("lru"), sizes, options, is_timed=True)
    outcome = TimedShell(trace, setup).run()
    assert sum(outcome.block_hits.values()) == 40
    assert outcome.refusals == {}


def test_refused_calls_are_told() -> None:
    trace = trace_of(*(request(number, [number]) for number in range(3)))
    outcome = run(shell_of(trace, dram_blocks=16))
    outcome.counters["refused_no_room"] = 7
    assert outcome.refusals == {"no_room": 7}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables(trace, [outcome]), differences(outcome, outcome))
    text = console.export_text()
    assert "7 calls were refused, no_room" in text
    assert "refused calls" in text


def test_a_second_memory_keeps_what_the_first_one_has_no_room_for() -> None:
    ladder = with_memory(["cxl"])
    sizes = {ladder.put_tier: 3 * BLOCK_BYTES, ladder.named("cxl"): 8 * BLOCK_BYTES}
    chains = [request(60_000 * n, [10 * n + 1, 10 * n + 2]) for n in range(4)]
    trace = trace_of(*chains, request(400_000, [1, 2]))
    setup = Setup("lru", "", choice_of("lru"), sizes, PlannerOptions(), ModelShape(), True, ladder)
    outcome = run(TimedShell(trace, setup, speeds=SPEEDS))
    assert outcome.block_hits["cxl"] == 2
    assert outcome.edge_bytes["cxl>runtime"] == 2 * BLOCK_BYTES
    assert outcome.edge_bytes["dram>cxl"] >= 2 * BLOCK_BYTES
