"""The daemon's events by the rules of llm-d's router, which takes events without tokens for blocks it knows.

The rules are read in the source of llm-d-router and llm-d-kv-cache (kvevents, November 2026), not run:

    a name is an integer, or the last 8 of its bytes
    a name is learned from an event with tokens; without tokens an event adds its tier to a known name only
    entries are counted per tier and group: stored twice is removed twice
    missing numbers are asked for; lower ones than before would clear the pod
    a block is worth the weight of its best tier; one without a weight is worth as much as the GPU
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from kvtier.appliance.observability.kv_events import short

from .conftest import CHAIN_BLOCKS, GEOMETRY, Shown, Start, names, use
from .test_kv_events import Router, held_by, until_greeted

WEIGHTS = {"gpu": 1.0, "cpu": 0.8}  # llm-d's own defaults
WITH_STORAGE = {**WEIGHTS, "storage": 0.4}


class LlmdIndex(Router):
    """One pod in the index of llm-d."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self.known: set[int] = set()
        self.entries: Counter[tuple[int, str, int]] = Counter()

    def learn(self, hashes: list[int]) -> None:
        """Take names in from the engine's own events, which have tokens; here without a tier of their own."""
        self.known.update(hashes)

    def score(self, hashes: list[int], weights: dict[str, float]) -> float:
        """Return what the pod is worth for a chain: the weights of its blocks up to a missing one."""
        worth = 0.0
        for name in hashes:
            tiers = [tier for (held, tier, _), count in self.entries.items() if held == name and count > 0]
            if not tiers:
                break
            worth += max(weights.get(tier, 1.0) for tier in tiers)
        return worth

    def _apply(self, number: int, payload: bytes) -> None:
        if number <= self.newest:
            return  # a replay had it; the daemon's numbers never begin lower
        self.newest = number
        _, events, _ = msgpack.unpackb(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.entries.clear()
                continue
            tier, group = event["medium"].lower(), event.get("group_idx", 0)
            for name in map(as_number, event["block_hashes"]):
                if event["type"] == "BlockRemoved":
                    assert self.entries[name, tier, group] > 0 or name not in self.known, "removed too often"
                    self.entries[name, tier, group] -= 1
                elif event["token_ids"] or name in self.known:
                    self.known.add(name)
                    self.entries[name, tier, group] += 1
                    assert self.entries[name, tier, group] == 1, "stored twice would have to be removed twice"

    def view(self) -> set[tuple[str, int]]:
        """Return medium and name of what is counted."""
        return {(tier.upper(), name) for (name, tier, _), count in self.entries.items() if count > 0}


def as_number(name: int | bytes) -> int:
    return name if isinstance(name, int) else int.from_bytes(name[-8:], "big")


@pytest.fixture
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmdIndex]:
    made = LlmdIndex(tmp_path_factory.mktemp("llmd"))
    yield made
    made.close()


def until_right(index: LlmdIndex, shown: Shown) -> None:
    """Follow until the index has what the daemon holds of the names that it knows."""

    def agree() -> bool:
        index.follow()
        held = shown.served.call(lambda: held_by(shown))
        return index.view() == {(medium, name) for medium, name in held if name in index.known}

    shown.until(agree)


CHAINS = [[short(name) for name in names(chain)] for chain in "0123456789"]


def test_blocks_of_known_names_count_by_their_tier(start: Start, index: LlmdIndex) -> None:
    shown = start(kv_events=index.endpoint)
    until_greeted(index, shown)
    known = CHAINS[:2]
    for chain in known:
        index.learn(chain)
    use(shown)
    until_right(index, shown)
    assert index.view(), "some of them are stored"
    assert {name for _, name in index.view()} <= {name for chain in known for name in chain}
    for chain in known:
        tiers = Counter(tier for tier, name in index.view() if name in chain)
        if not tiers["CPU"] and tiers["STORAGE"] == CHAIN_BLOCKS:
            assert index.score(chain, WEIGHTS) == CHAIN_BLOCKS, "as if on the GPU: give storage a weight"
            assert index.score(chain, WITH_STORAGE) == pytest.approx(0.4 * CHAIN_BLOCKS)
    assert GEOMETRY.block_tokens == 16


def test_a_restart_and_a_snapshot_leave_nothing_behind(start: Start, index: LlmdIndex) -> None:
    shown = start(kv_events=index.endpoint)
    until_greeted(index, shown)
    for chain in CHAINS:
        index.learn(chain)
    use(shown)
    until_right(index, shown)
    shown = start(again=True, kv_events=index.endpoint)
    until_right(index, shown)
    assert {medium for medium, _ in index.view()} == {"STORAGE"}
