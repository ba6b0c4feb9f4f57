"""What the planner makes of its policies: who is asked, who is told, and what becomes of the answers."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.catalog.story import Story, Verdict
from kvtier.appliance.core.instructions import BlockChange
from kvtier.appliance.core.requests import put_job
from kvtier.appliance.core.results import PutOutcome
from kvtier.policies.admission import AdmitAll
from kvtier.policies.base import AdmissionPolicy, Expected, Newcomer, Prefetcher, Surroundings, Use, Victim
from kvtier.policies.baselines.lru import LruEviction
from kvtier.policies.registry import ADMISSION, EVICTION, PolicyChoice, UnknownPolicy, build, resolve
from kvtier.tiers.base import Cause, CopyOutcome
from kvtier.tiers.block import Tier, Urgency

from .rig import CLIENT, STORED, Rig, hashes

DECLINED = PutOutcome.DECLINED
HERE = __name__


class Listener(LruEviction):
    """LRU that writes down what it is told, by name of block."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self.heard: list[tuple[str, list[bytes]]] = []

    def used(self, rows: Sequence[int], use: Use) -> None:
        self.heard.append((f"used {use.session} of {use.num_asked}", self._names(rows)))

    def stored(self, rows: Sequence[int], use: Use) -> None:
        self.heard.append((f"stored {use.session}", self._names(rows)))

    def left(self, rows: Sequence[int]) -> None:
        super().left(rows)
        self.heard.append(("left", self._names(rows)))

    def forgotten(self, rows: Sequence[int]) -> None:
        self.heard.append(("forgotten", self._names(rows)))

    def _names(self, rows: Sequence[int]) -> list[bytes]:
        return [self._facts.prefix_hash[row] for row in rows]


class Impatient(Prefetcher):
    """Has always something to say, and never says it."""

    def __init__(self, surroundings: Surroundings) -> None:
        pass

    def next_at(self) -> float | None:
        return -math.inf

    def due(self, now: float, num_bytes: int) -> Sequence[Expected]:
        return ()


class ButNotLong(AdmitAll):
    """Admits everything but chains of two."""

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        return newcomer.num_blocks < 2


class OnlyFirstBlocks(AdmissionPolicy):
    """Nothing beyond the first two blocks of a chain is worth anything."""

    def __init__(self, surroundings: Surroundings) -> None:
        pass

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        return newcomer.position < 2


def rig_with(num_blocks: int, nvme_blocks: int = 0, **choice: Any) -> Rig:
    """A rig whose policies may come from this file."""
    return Rig(num_blocks, nvme_blocks, policies=PolicyChoice(allowed_modules=(HERE,), **choice))


def removals(rig: Rig) -> list[list[bytes]]:
    return [n.prefix_hashes for n in rig.notices if n.change is BlockChange.REMOVED]


def test_a_chain_leaves_tail_first_in_one_step_as_far_as_it_is_needed() -> None:
    rig = rig_with(16)
    old, new = hashes("old", 12), hashes("new", 10)
    rig.put(old)
    rig.tick(1.0)
    rig.notices.clear()
    assert rig.put(new) == [STORED] * 10
    assert removals(rig) == [list(reversed(old[6:]))]
    assert rig.found(old) == 6


def test_a_run_stops_where_another_chain_branches_off() -> None:
    rig = rig_with(24)
    trunk, left, right = hashes("trunk", 6), hashes("left", 8), hashes("right", 8)
    rig.put(trunk)
    rig.put(left, parent=trunk[-1])
    rig.tick(1.0)
    rig.put(right, parent=trunk[-1])
    rig.tick(1.0)
    rig.put(hashes("new", 12))
    assert rig.found([*trunk, *left]) == 6
    assert rig.found([*trunk, *right]) == 14 - 2, "its turn came after the older branch, tail first"


def test_a_run_of_clean_blocks_stops_where_another_child_is_left() -> None:
    rig = Rig(10, 16)
    trunk, left, right = hashes("trunk", 2), hashes("left", 3), hashes("right", 3)
    rig.do(ev.SessionUpdated(CLIENT, "s", Urgency.PREFILL))
    rig.put(trunk, session_id="s")
    rig.put(left, parent=trunk[-1], session_id="s")
    rig.put(right, parent=trunk[-1], session_id="s")
    rig.do(ev.SessionEnded(rig.call(), CLIENT, "s", True))
    rig.settle()
    rig.tick(1.0)
    rig.do(ev.Touched(CLIENT, rig.namespace_id, [right[-1]]))
    rig.put(hashes("new", 6))
    assert [rig.where(name) for name in left] == [{"nvme"}] * 3
    assert [rig.where(name) for name in right[:2]] == [{"nvme", "dram"}] * 2
    assert [rig.where(name) for name in trunk] == [{"nvme", "dram"}] * 2


def test_a_run_stops_at_a_block_that_costs_more_than_its_child() -> None:
    rig = rig_with(20)
    chain, between = hashes("chain", 12), hashes("between", 8)
    rig.put(chain)
    rig.tick(1.0)
    rig.put(between)
    rig.tick(1.0)
    rig.do(ev.Touched(CLIENT, rig.namespace_id, chain[:8]))
    rig.put(hashes("new", 7))
    assert rig.found(chain) == 8
    assert rig.found(between) == 5


def test_a_run_stops_at_a_block_that_is_held_or_was_used_since() -> None:
    rig = rig_with(12)
    chain = rig.put_new("chain", 12)
    rig.tick(1.0)
    rig.do(ev.Touched(CLIENT, rig.namespace_id, chain[:8]))
    held = rig.acquire(chain[:3])
    rig.tick(1.0)
    rig.put(hashes("new", 6))
    assert rig.found(chain) == 6
    rig.put(hashes("newer", 6), deadline_at=rig.now)
    assert rig.found(chain) == 3
    rig.release(held)


def test_a_put_worth_less_than_its_victims_is_declined_from_there_on() -> None:
    rig = rig_with(8, admission=f"{HERE}:OnlyFirstBlocks")
    for number in range(8):
        rig.put(hashes(f"old {number}", 1))
    rig.tick(1.0)
    chain = hashes("new", 7)
    assert rig.put(chain) == [STORED] * 2 + [DECLINED] * 5
    assert rig.found(chain) == 2
    assert rig.put(hashes("few", 3)) == [STORED] * 2 + [DECLINED]
    assert rig.planner.story.counters["blocks_declined"] == 6


def test_a_class_derived_from_who_admits_everything_is_asked() -> None:
    rig = rig_with(2, admission=f"{HERE}:ButNotLong")
    rig.put(hashes("old", 2))
    rig.tick(1.0)
    assert rig.put(hashes("new", 2)) == [DECLINED] * 2


def test_a_free_place_is_nobodys_to_decline() -> None:
    rig = rig_with(8, admission=f"{HERE}:OnlyFirstBlocks")
    assert rig.put(hashes("new", 8)) == [STORED] * 8


def test_a_declined_run_declines_no_block_that_has_begun_to_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(put_job), "MIN_RUN", 2)
    rig = rig_with(4, admission=f"{HERE}:OnlyFirstBlocks")
    rig.start_put(hashes("torn", 1))
    (copy,) = rig.copies
    rig.do(ev.CopyFinished(copy.copy, [CopyOutcome(None, b"7" * 16), CopyOutcome(Cause.IO_ERROR)]))
    rig.copies.clear()  # one fragment of it stays: of eight slots an odd number is free
    chain = hashes("new", 4)
    assert rig.put(chain) == [STORED] * 4  # three as a run, beyond which nobody leaves; the last has a slot
    assert rig.found(chain) == 4
    assert "blocks_declined" not in rig.planner.story.counters


def test_the_slower_tier_may_decline_and_then_the_block_is_gone() -> None:
    rig = rig_with(4, 4, admission=f"{HERE}:OnlyFirstBlocks")
    chain = rig.put_new("old", 4)
    rig.tick(1.0)
    rig.put(hashes("new", 4))
    assert [rig.where(name) for name in chain] == [{"nvme"}, {"nvme"}, set(), set()]
    assert any("not worth nvme" in line for line in rig.planner.story.words(chain[3], rig.namespace_id))


def test_policies_are_told_once_per_request_and_before_a_row_is_used_again() -> None:
    rig = rig_with(8, eviction=f"{HERE}:Listener")
    policy = rig.planner.core.policies.evictions[Tier.DRAM]
    heard: list[tuple[str, list[bytes]]] = []
    inner = getattr(policy, "inner", policy)  # the registry wraps a policy in others
    inner = getattr(inner, "_policy", inner)
    assert isinstance(inner, Listener)
    inner.heard = heard
    one, two = hashes("one", 8), hashes("two", 8)
    rig.do(ev.SessionUpdated(CLIENT, "s", Urgency.PREFILL))
    rig.put(one, session_id="s")
    rig.do(ev.Touched(CLIENT, rig.namespace_id, [*one[:3], *one[:2]], "s"))
    rig.tick(1.0)
    rig.put(two)
    assert heard == [
        ("stored 1", one),
        ("used 1 of 3", one[:3]),
        ("used 1 of 2", one[:2]),
        ("left", list(reversed(one))),
        ("forgotten", list(reversed(one))),
        ("stored 0", two),
    ]


def test_the_story_says_what_victim_and_runner_up_would_have_cost() -> None:
    rig = rig_with(2)
    for number in range(2):
        rig.put(hashes(str(number), 1))
        rig.tick(1.0)
    rig.put(hashes("new", 1))
    victim, runner_up = hashes("0", 1)[0], hashes("1", 1)[0]
    line = rig.planner.story.of(victim, rig.namespace_id)[-1]
    assert line.why == f"coldest, no slower tier; price 0, the next one ({runner_up.hex()[:8]}) 1"
    assert line.verdict == (0.0, 1.0, runner_up)
    decision = rig.planner.story.decisions(frozenset({"evicted_dram"}), 10)
    assert decision == [(line, 1)]


def test_the_story_of_a_block_is_not_that_of_its_name_in_another_namespace() -> None:
    story = Story(100)
    story.tell_many(1.0, 1, [b"a"], "stored_dram")
    story.tell_many(1.0, 2, [b"a"], "stored_dram")
    story.tell(2.0, b"a", "evicted_dram", "coldest", namespace_id=2)
    assert [line.what for line in story.of(b"a", 1)] == ["stored_dram"]
    assert story.decisions(frozenset({"evicted_dram"}), 10, about={b"a"}, namespace_id=1) == []
    assert story.starting_with(b"a", 3) == set()


def test_blocks_that_leave_together_are_one_decision() -> None:
    story = Story(100)
    verdict = Verdict(1.0, 2.0, b"next")
    story.tell_many(1.0, 0, [b"a", b"b"], "evicted_dram", "coldest", verdict)
    story.tell(1.0, "session", "session_opened")
    story.tell(1.0, b"c", "evicted_dram", "coldest", verdict)
    story.tell(2.0, b"d", "evicted_dram", "coldest", verdict)
    story.tell(2.0, b"e", "evicted_dram", "administrator")
    words = frozenset({"evicted_dram"})
    assert [(d.line.subject, d.num_blocks) for d in story.decisions(words, 10)] == [
        (b"e", 1),
        (b"d", 1),
        (b"c", 3),
    ]
    assert len(story.decisions(words, 2)) == 2
    assert [d.line.subject for d in story.decisions(words, 10, max_lines=1)] == [b"e"]


def test_an_impatient_prefetcher_does_not_keep_the_daemon_awake() -> None:
    rig = rig_with(2, 4, prefetch=f"{HERE}:Impatient")
    rig.tick(1.0)
    rig.tick(0.1)
    after_a_fruitless_round = rig.planner.next_deadline()
    assert after_a_fruitless_round is not None
    assert after_a_fruitless_round > rig.now
    chain = rig.put_new("held", 2)
    rig.acquire(chain)
    rig.start_put(hashes("waits", 1))
    rig.tick(1.0)
    assert len(rig.planner.waiting) == 1
    while_others_wait = rig.planner.next_deadline()
    assert while_others_wait is not None
    assert while_others_wait > rig.now


@pytest.mark.parametrize(
    ("name", "allowed", "fix"),
    [
        ("coldest", (), "known:"),
        (f"{HERE}:Listener", (), "allowed_modules"),
        (f"{HERE}:Nobody", (HERE,), "cannot load"),
        ("nowhere:Policy", ("nowhere",), "cannot load"),
    ],
)
def test_a_policy_that_cannot_be_had_is_refused_with_the_fix(
    name: str, allowed: tuple[str, ...], fix: str
) -> None:
    with pytest.raises(UnknownPolicy, match=fix):
        resolve(EVICTION, name, allowed)


def test_a_submodule_of_an_allowed_module_is_allowed_and_a_namesake_is_not() -> None:
    package = HERE.rpartition(".")[0]
    assert resolve(EVICTION, f"{HERE}:Listener", (package,)) is Listener
    with pytest.raises(UnknownPolicy, match="allowed_modules"):
        resolve(EVICTION, f"{HERE}:Listener", (package[:-1],))


def test_every_registered_name_builds_for_every_tier() -> None:
    rig = Rig()
    capacities = dict.fromkeys((Tier.HBM, Tier.DRAM, Tier.NVME), 1 << 20)
    for eviction in sorted(set(EVICTION) - {"clairvoyant"}):
        for admission in sorted(set(ADMISSION) - {"clairvoyant"}):
            choice = PolicyChoice(eviction=eviction, admission=admission)
            built = build(choice, rig.planner.catalog, rig.planner.costs, capacities)
            assert set(built.evictions) == {Tier.HBM, Tier.DRAM}
            assert set(built.admissions) == set(capacities)
            assert all(hasattr(policy, "choose") for policy in built.evictions.values())
