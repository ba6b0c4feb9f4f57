"""An object store under a replay: when it answers, what it forgets, what it brings, what it costs."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from kvtier.appliance.cli.app import cli
from kvtier.appliance.core.events import CopyFinished, Event, ExportFinished, SourceSearched
from kvtier.appliance.core.instructions import BundleBlocks, ExportBundle, FetchBundle, SearchBundles
from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.replay.outcomes import Outcome
from kvtier.appliance.replay.setups import ModelShape, Setup, choice_of
from kvtier.appliance.replay.timed import TimedShell
from kvtier.appliance.replay.traces import Trace
from kvtier.appliance.replay.virtual import VirtualClock
from kvtier.appliance.replay.virtual_store import KEPT_S, LIST_PRICES, StoreModel, VirtualStore
from kvtier.tiers.base import Cause, CopyItem
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity, Tier

from .traces import request, trace_of

IDENTITY = NamespaceIdentity(b"m" * 16, Geometry(2, 1, 8, 16, "float16", layers_per_group=1))
NAMES = [bytes([number]) * 32 for number in range(8)]
BUNDLE_BYTES = 1000  # two fragments of 500
MIB = 1 << 20
BLOCK_BYTES = 64 * MIB


class Host:
    """A store of one bundle a second; collects what it answers, and when."""

    def __init__(self, capacity_bytes: float = 1e9) -> None:
        self.clock = VirtualClock()
        self.store = VirtualStore(self.clock, StoreModel(capacity_bytes, BUNDLE_BYTES, 0.1), self._deliver)
        self.answers: list[tuple[float, Event]] = []

    def _deliver(self, event: Event) -> None:
        self.answers.append((round(self.clock.now, 6), event))

    def run(self) -> list[tuple[float, Event]]:
        """Let everything happen; return the new answers."""
        done = len(self.answers)
        while self.clock.next_at() is not None:
            self.clock.run_next()
        return self.answers[done:]

    def at(self, when: float) -> None:
        """Let the clock be at `when`."""
        self.clock.at(when, lambda: None)
        self.run()

    def export(self, number: int, *, is_trial: bool = False) -> None:
        label = FragmentLabel(IDENTITY.digest, 1, NAMES[number], b"", number, 0, BUNDLE_BYTES // 2)
        self.store.export(ExportBundle(number, bundle(number), [(Tier.DRAM, 0, label)] * 2, is_trial))

    def num_there(self, *numbers: int) -> int:
        """Return how many bundles of a chain a search finds."""
        self.store.search(SearchBundles(1, IDENTITY, [NAMES[number] for number in numbers]))
        [(_, answer)] = self.run()
        assert isinstance(answer, SourceSearched)
        return answer.num_found


def bundle(number: int) -> BundleBlocks:
    return BundleBlocks(IDENTITY, b"", number, [NAMES[number]])


def fetch_of(number: int, deadline_at: float = 1e9) -> FetchBundle:
    labels = [
        FragmentLabel(IDENTITY.digest, 1, NAMES[number], b"", number, group, BUNDLE_BYTES // 2)
        for group in (0, 1)
    ]
    batches = [(10 + label.group, [CopyItem(0, label.group, label)]) for label in labels]
    return FetchBundle(bundle(number), Tier.DRAM, batches, deadline_at)


def test_exports_share_a_link_and_are_stored_once() -> None:
    host = Host()
    host.export(0)
    host.export(1)
    assert host.run() == [
        (1.1, ExportFinished(0, True, BUNDLE_BYTES)),
        (2.1, ExportFinished(1, True, BUNDLE_BYTES)),
    ]
    host.export(0)
    assert host.run() == [(2.2, ExportFinished(0, True, 0))]
    assert (host.store.usage["put"], host.store.usage["stored"]) == (2, 2)
    assert host.store.usage["sent_bytes"] == 2 * BUNDLE_BYTES


@pytest.mark.parametrize("is_there", [False, True])
def test_a_trial_is_read_once_stored(is_there: bool) -> None:
    host = Host()
    if is_there:
        host.export(0)
        host.run()
    host.export(0, is_trial=True)
    ((_, event),) = host.run()
    assert event == ExportFinished(0, True, 0 if is_there else BUNDLE_BYTES, 1.1)
    assert host.store.usage["get"] == 1
    assert host.store.usage["read"] == 0, "no host asked for it"


def test_groups_land_one_after_the_other_until_the_deadline() -> None:
    host = Host()
    host.export(0)
    host.run()
    begun_at = host.clock.now
    host.store.fetch(fetch_of(0))
    first, second = host.run()
    assert [round(when - begun_at, 6) for when, _ in (first, second)] == [0.6, 1.1]
    host.store.fetch(fetch_of(0, host.clock.now + 0.7))
    causes = [event.outcomes[0].cause for _, event in host.run() if isinstance(event, CopyFinished)]
    assert causes == [None, Cause.CANCELLED]
    assert host.store.usage["received_bytes"] == 1.6 * BUNDLE_BYTES  # no more after the deadline
    host.store.fetch(fetch_of(1))
    causes = [event.outcomes[0].cause for _, event in host.run() if isinstance(event, CopyFinished)]
    assert causes == [Cause.SOURCE_GONE] * 2
    assert host.store.usage["read"] == 1


def test_a_fetch_that_is_late_does_not_hold_up_the_next() -> None:
    host = Host()
    host.export(0)
    host.run()
    begun_at = host.clock.now
    for _ in range(50):
        host.store.fetch(fetch_of(0, begun_at + 1.2))
    host.run()
    host.at(begun_at + 2)
    host.store.fetch(fetch_of(0))
    assert [when for when, _ in host.run()] == [round(begun_at + 2.6, 6), round(begun_at + 3.1, 6)]


def test_a_search_takes_a_round_trip_for_each_probe() -> None:
    host = Host()
    for number in range(3):
        host.export(number)
    host.run()
    begun_at = host.clock.now
    assert host.num_there(*range(8)) == 2  # asked for: 1, 2, 4
    assert host.clock.now - begun_at == pytest.approx(0.3)
    assert host.store.usage["head"] == 3


def test_what_was_used_longest_ago_is_forgotten_beyond_the_capacity() -> None:
    host = Host(2 * BUNDLE_BYTES)
    for number in (0, 1):
        host.export(number)
        host.run()
    assert host.num_there(0) == 1
    host.export(2)
    host.run()
    assert [host.num_there(number) for number in range(3)] == [1, 0, 1]


def test_what_nothing_used_for_three_days_is_forgotten() -> None:
    host = Host()
    for number in (0, 1):
        host.export(number)
    host.run()
    host.at(KEPT_S - 10)
    assert host.num_there(0) == 1
    host.at(KEPT_S + 10)
    assert (host.num_there(0), host.num_there(1)) == (1, 0)


# ---------------------------------------------------------------------------------- under a planner


def replayed(trace: Trace, store: StoreModel | None, share: str = "eager") -> Outcome:
    """Replay on a memory of eight blocks."""
    options = replace(PlannerOptions(), share=share)  # type: ignore[arg-type]
    size = {Tier.DRAM: 8 * BLOCK_BYTES}
    setup = Setup("lru", "", choice_of("lru"), size, options, ModelShape(), is_timed=True, store=store)
    outcome = TimedShell(trace, setup).run()
    assert outcome.problems == []
    return outcome


def day() -> Trace:
    """A prompt, three times, and others between that push it out of memory."""
    others = [request(60_000 * n, [100 * n + k for k in range(4)]) for n in (1, 2, 4, 5)]
    prompts = [request(60_000 * n, [1, 2, 3, 4]) for n in (0, 3, 6)]
    return trace_of(*sorted([*others, *prompts], key=lambda line: line["timestamp"]))


def test_a_store_brings_back_what_memory_dropped() -> None:
    """One bundle first, to learn how fast the store is; then all that is worth it."""
    without, outcome = replayed(day(), None), replayed(day(), StoreModel(1e12, 1e10, 0.03))
    assert (without.block_hits, without.store) == ({"dram": 0}, {})
    assert outcome.block_hits == {"dram": 1 + 4}
    assert outcome.store["num_bundles_read"] == 4
    assert outcome.store["fetched_bytes"] == 5 * BLOCK_BYTES
    assert outcome.store["num_bundles_stored"] == 20
    assert outcome.store["prefill_saved_s"] == pytest.approx(outcome.prefill_saved_s)
    puts, gets = 20 * LIST_PRICES.thousand_puts / 1000, LIST_PRICES.thousand_gets / 1000
    storage = LIST_PRICES.storage(20 * BLOCK_BYTES)
    num_others = outcome.store["num_requests"] - 20
    assert outcome.store["dollars"] == pytest.approx(puts + num_others * gets + storage)


def test_what_a_store_brings_later_than_prefill_is_computed() -> None:
    outcome = replayed(day(), StoreModel(1e12, 1e8, 0.03))
    assert outcome.block_hits == {"dram": 0}
    assert outcome.prefill_saved_s == 0


def test_under_worth_only_what_was_used_again_is_stored() -> None:
    assert replayed(day(), StoreModel(1e12, 1e9, 0.03), "worth").store["num_bundles_stored"] == 0


def test_the_command_prints_each_store(tmp_path: object) -> None:
    runner = CliRunner()
    with runner.isolated_filesystem():
        lines = [
            {
                "timestamp": 1000 * n,
                "input_length": 1024,
                "output_length": 8,
                "hash_ids": [n % 40, 50 + n % 40],
            }
            for n in range(120)
        ]
        with open("trace.jsonl", "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        words = [
            "replay",
            "trace.jsonl",
            "--tiers",
            "dram=1GiB",
            "--object",
            "1TiB@1GB/s@10ms",
            "--jobs",
            "1",
        ]
        printed = runner.invoke(cli, words)
        assert printed.exit_code == 0, printed.output
        assert "bundles" in printed.output
        found = json.loads(runner.invoke(cli, [*words, "--json"]).stdout)["outcomes"]
        assert [bool(one["store"]) for one in found] == [False, True]
        for wrong, fix in (("1TiB", "SIZE@SPEED"), ("1TiB@0B/s", "no bandwidth"), ("1TiB@fast", "fast")):
            refused = runner.invoke(cli, [*words[:4], "--object", wrong])
            assert refused.exit_code == 2
            assert fix in refused.output
        refused = runner.invoke(cli, ["replay", "trace.jsonl", "--object", "1TiB@1GB/s"])
        assert "--tiers" in refused.output
