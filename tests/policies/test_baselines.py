"""Each algorithm on sequences short enough to follow by hand, after the examples of their papers.

Letters are blocks without parents, so that these are the flat caches of the papers; `Tree` grows a chain
where the prefix tree matters. A request of a letter is a hit or stores it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.policies.baselines.arc import ArcEviction
from kvtier.policies.baselines.clairvoyant import ClairvoyantAdmission
from kvtier.policies.registry import EVICTION
from kvtier.tiers.block import Urgency
from tests.policies.tree import GEOMETRY, Tree, name

TOKENS = GEOMETRY.block_tokens
LETTERS = {name(letter): letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}


class Script:
    """A future that is written down: request n happens at second n, from 1."""

    def __init__(self, requests: Sequence[str]) -> None:
        self._requests = requests

    def next_use(self, prefix_hash: bytes, now: float) -> float:
        """Return the next request that asks for a block."""
        letter = LETTERS[prefix_hash]
        later = [at for at, asked in enumerate(self._requests, 1) if at > now and letter in asked]
        return float(later[0]) if later else math.inf


def play(tree: Tree, requests: Sequence[str]) -> str:
    """Request each word as a chain of letters. Returns what was evicted, in order."""
    before = len(tree.evicted)
    for word in requests:
        tree.request([name(letter) for letter in word])
    return "".join(LETTERS[prefix_hash] for prefix_hash in tree.evicted[before:])


def evicted(
    policy: str, capacity: int, requests: Sequence[str], options: Mapping[str, Any] | None = None
) -> str:
    """Return what a policy evicts when every letter of `requests` is a request."""
    return play(Tree(EVICTION[policy], capacity, options=options), requests)


def here(tree: Tree) -> str:
    """Return what is in the tier, in alphabetical order."""
    return "".join(sorted(LETTERS[tree.facts.prefix_hash[row]] for row in tree.here))


# ------------------------------------------------------------------------------------ lru, fifo, lfu


def test_lru_takes_the_least_recently_used() -> None:
    assert evicted("lru", 3, "ABCADEA") == "BC"


def test_lru_takes_ended_sessions_first() -> None:
    tree = Tree(EVICTION["lru"], 3)
    for letter, urgency in zip("ABC", (Urgency.WAITING, Urgency.ENDED, Urgency.DECODING), strict=True):
        tree.request([name(letter)])
        tree.request([name(letter)], urgency=urgency)
    assert play(tree, "DE") == "BA"


def test_fifo_does_not_care_about_uses() -> None:
    assert evicted("fifo", 3, "ABCAAADE") == "AB"


def test_fifo_lets_a_chain_go_tail_first_with_its_older_parents() -> None:
    tree = Tree(EVICTION["fifo"], 6)
    play(tree, ["AB", "XY", "ABC", "Z"])  # A and B came first, but C, which needs them, came after X and Y
    assert play(tree, ["Q"]) == "Y"
    assert play(tree, ["RSTU"]) == "XCBA", "all of what C continues is older than Z"


def test_lfu_takes_the_least_used_and_the_older_of_two() -> None:
    assert evicted("lfu", 3, "AABBCDE") == "CD"
    assert evicted("lfu", 3, "ABCABCD") == "A"


# ----------------------------------------------------------------------------------------------- s3fifo


def test_s3fifo_demotes_quickly_what_is_used_once() -> None:
    tree = Tree(EVICTION["s3fifo"], 10)
    play(tree, "ABCDEFGHIJ")
    play(tree, "AABB")  # twice more each: enough to stay
    assert play(tree, "KLMN") == "CDEF", "A and B moved to the main queue"


def test_s3fifo_lets_ghosts_into_the_main_queue() -> None:
    tree = Tree(EVICTION["s3fifo"], 10)
    play(tree, "ABCDEFGHIJ")
    assert play(tree, "K") == "A"
    assert play(tree, "A") == "B", "A is back, in the main queue"
    assert play(tree, "LMNOPQRSTUVW") == "CDEFGHIJKLMN", (
        "though the oldest, A stays: only the small queue is too long"
    )
    assert "A" in here(tree)


def test_s3fifo_gives_the_main_queue_second_chances() -> None:
    tree = Tree(EVICTION["s3fifo"], 3, options={"small_share": 0.4, "uses_to_stay": 1})
    play(tree, "ABCABC")
    assert play(tree, "D") == "A", (
        "A and B move, then the small queue is short, and A is the oldest of the main one"
    )
    play(tree, "B")
    assert play(tree, "E") == "C", "C moves, B was used in the main queue and joins it anew behind C"


def test_s3fifo_takes_ancestors_along() -> None:
    tree = Tree(EVICTION["s3fifo"], 6)
    play(tree, ["ABC", "ABC", "ABC", "D", "E", "F"])
    assert play(tree, ["GH"]) == "DE"
    assert here(tree) == "ABCFGH"
    assert isinstance(tree.policy, EVICTION["s3fifo"])  # type: ignore[arg-type]
    price = tree.policy.price
    rows = [tree.rows[name(letter)] for letter in "ABCF"]
    assert all(price(row, tree.now) > price(rows[3], tree.now) for row in rows[:3])


# -------------------------------------------------------------------------------------------------- arc


def arc(tree: Tree) -> ArcEviction:
    assert isinstance(tree.policy, ArcEviction)
    return tree.policy


def test_arc_prefers_what_was_used_again() -> None:
    tree = Tree(EVICTION["arc"], 4)
    play(tree, "ABAB")
    assert play(tree, "CDEFGH") == "CDEF", "a scan goes through T1 and leaves A and B, the oldest, alone"


def test_arc_learns_from_its_ghosts() -> None:
    tree = Tree(EVICTION["arc"], 4)
    play(tree, "ABABCDE")  # T1 = D, E; T2 = A, B; B1 = C
    assert arc(tree)._target == 0.0
    assert play(tree, "C") == "D", "room is made first, and T1 has more than its target"
    assert arc(tree)._target == 1.0, "C was given up too early: T1 should be larger"
    assert play(tree, "F") == "A", "T1 has its target now, so T2 gives up its oldest"
    assert play(tree, "A") == "E", "T1 = E, F has more than its target"
    assert arc(tree)._target == 0.0, "and A says the opposite"


# ---------------------------------------------------------------------------------------- clairvoyant


def test_clairvoyant_takes_what_is_needed_last() -> None:
    requests = "ABCDABDC"
    tree = Tree(EVICTION["clairvoyant"], 3, future=Script(requests))
    assert play(tree, requests[:4]) == "C"
    assert play(tree, requests[4:7]) == ""
    assert len(play(tree, requests[7])) == 1


def test_clairvoyant_declines_what_is_needed_later_than_the_victim() -> None:
    requests = "ABCDABDC"
    tree = Tree(EVICTION["clairvoyant"], 2, admission=ClairvoyantAdmission, future=Script(requests))
    assert play(tree, requests[:6]) == ""
    assert here(tree) == "AB", "C and D are needed after A and B"


def test_clairvoyant_declines_the_rest_of_a_chain_only() -> None:
    requests = ["XY", "ABC", "XY", "AB"]
    tree = Tree(EVICTION["clairvoyant"], 4, admission=ClairvoyantAdmission, future=Script(requests))
    assert play(tree, requests[:2]) == ""
    assert here(tree) == "ABXY", "C is never asked for again"


# -------------------------------------------------------------------- tail-optimised LRU, learned prefixes


def test_tail_lru_takes_first_what_no_slow_first_token_depends_on() -> None:
    """Blocks of one token each: a next prompt of 1, and prefill of up to 3 is quick, so 2 may be missing."""
    options = {"threshold_tokens": 3 * TOKENS, "next_prompt_tokens": TOKENS}
    tree = Tree(EVICTION["tail_lru"], 7, options=options)
    assert play(tree, ["ABCD", "EFG"]) == ""
    assert play(tree, ["H"]) == "D", "the end of the older one: nothing else, though H may be missing, too"
    assert play(tree, ["I", "J"]) == "CG"
    assert play(tree, ["KLMN"]) == "FHIJ"[:4], "then ends of the younger, and what is short, by recency"


def test_tail_lru_without_a_threshold_is_lru() -> None:
    requests = ["ABC", "DE", "F", "AB", "G", "HI", "DE", "JK"]
    nothing = {"threshold_tokens": 0}
    assert play(Tree(EVICTION["tail_lru"], 6, options=nothing), requests) == play(
        Tree(EVICTION["lru"], 6), requests
    )


def test_a_learned_prefix_keeps_what_conversations_like_it_came_back_for() -> None:
    """Prompts of one block are asked once; those of two go on. A new one of each: the longer one stays."""
    tree = Tree(EVICTION["learned_prefix"], 12)
    for number in range(200):
        chain = [name("long", number // 8), name("long", number // 8, "b")]
        tree.request(chain + [name("long", number // 8, turn) for turn in range(number % 8)])
        tree.request([name("once", number)])
    for number in range(12):
        tree.request(
            [name("long", "new"), name("long", "new", "b")] if number == 3 else [name("once", -number)]
        )
    assert tree.facts.prefix_hash.count(name("long", "new")) == 1
    assert tree.rows[name("long", "new")] in tree.here
