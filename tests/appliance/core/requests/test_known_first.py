"""Whoever arrived or said when it is back comes up before those of whom that is only learned from others."""

from collections.abc import Sequence

from kvtier.appliance.core import events as ev
from kvtier.policies.base import Expected, Prefetcher
from kvtier.policies.registry import PolicyChoice
from kvtier.tiers.block import Tier

from ..rig import GEOMETRY, Rig, hashes

BLOCK = GEOMETRY.block_bytes


class Said(Prefetcher):
    """Expects what a test says, once."""

    name = "said"

    def __init__(self) -> None:
        self.expected: list[Expected] = []

    def due(self, now: float, num_bytes: int) -> Sequence[Expected]:
        said, self.expected = self.expected, []
        return said

    def next_at(self) -> float | None:
        return float("-inf") if self.expected else None


class Host(Rig):
    """A rig with chains in nvme, and a prefetcher that expects what it is told."""

    def __init__(self, chains: Sequence[Sequence[bytes]], **options: object) -> None:
        settings = {"dram_blocks": 8, "nvme_blocks": 16, "max_prefetched_fraction": 1.0, **options}
        super().__init__(policies=PolicyChoice(eviction="lru"), **settings)  # type: ignore[arg-type]
        for chain in chains:
            self.put(chain)
            self.cool(chain)
        self.said = self.planner.core.policies.prefetcher = Said()

    def expect(self, chain: Sequence[bytes], *, is_announced: bool, window_s: float = 10.0) -> None:
        rows = [self.planner.catalog.find(self.namespace_id, name) for name in chain]
        self.said.expected.append(Expected(rows, self.now + window_s, "a test says so", is_announced))
        self.tick(0.01)

    def coming(self) -> list[bytes]:
        """Return the blocks that are on their way up, in the order in which they began."""
        return list(dict.fromkeys(item.label.prefix_hash for copy in self.copies for item in copy.items))


def test_what_is_learned_leaves_half_of_the_room_to_what_is_known() -> None:
    learned, known = hashes("learned", 6), hashes("known", 4)
    host = Host([learned, known])
    host.tick(60.0)
    host.expect(learned, is_announced=False)
    assert host.coming() == learned[:4]
    host.expect(known, is_announced=True)
    assert host.coming() == [*learned[:4], *known]


def test_what_is_known_does_not_wait_until_all_of_what_is_learned_came() -> None:
    learned, known = hashes("learned", 3), hashes("known", 2)
    host = Host([learned, known], max_prefetch_bytes=BLOCK)
    host.tick(60.0)
    host.expect(learned, is_announced=False)
    assert host.coming() == learned[:1]
    host.expect(known, is_announced=True)
    order = []
    while host.copies:
        order += [name for name in host.coming() if name not in order]
        host.finish(host.copies[0])
        host.tick(0.01)
    assert order == [learned[0], *known, *learned[1:]]


def test_wrong_guesses_cost_those_who_said_so_nothing() -> None:
    learned, known = hashes("learned", 4), hashes("known", 3)
    host = Host([learned, known])
    host.tick(60.0)
    host.expect(learned, is_announced=False, window_s=1.0)
    host.settle()
    host.tick(2.0)
    assert host.planner.story.counters["prefetch_wasted"] == 4
    host.expect(known, is_announced=True)
    assert host.coming() == known
    host.settle()
    host.do(ev.EvictRequested(host.call(), Tier.DRAM, 0))
    assert host.where(learned[0]) == {"nvme"}
    host.expect(hashes("learned", 4), is_announced=False)
    assert host.planner.story.counters["prefetch_begun"] == 7, "the guesser has lost its credit"
