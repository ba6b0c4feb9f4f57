"""Ranking: which of several hosts should get a prompt.

A host reads what it holds, may fetch what others hold, and computes the rest behind the prompts that wait
there. Reading and fetching go on while those are computed. When that ends is the expected first token.

The first token alone makes others compute again: every prompt that goes where its blocks are not takes room
from theirs, and with too few hosts all of them lose their hits. So seconds of others are counted, too:

    computing    each second of it delays those that will wait behind it, by a second each. How many is
                 guessed from the shortest queue: while a host is idle, no prompt waits
    displacing   what is new on a full host pushes out as much, which will be computed again

Measured in docs/operate/fleet.md: without these prices 8 hosts that cannot keep up with their agents keep
half of the hits.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

#: Prompts that a second of computing delays, for each of the prompts that the shortest queue would hold.
DELAYED_SHARE: Final = 2.0
#: Of the seconds that computing anew takes, charged for blocks that push out as many.
DISPLACED_SHARE: Final = 1.0


class HostOffer(NamedTuple):
    """What is known of one host and a prompt. Blocks are counted from the prompt's first one."""

    host: str
    num_held: int  # blocks in its own tiers
    load_s: float  # until these are readable
    num_fetchable: int  # blocks that it or another host holds
    fetch_s: float  # until those that it does not hold have arrived
    queue_s: float  # of prefill that waits or runs there
    is_full: bool = False  # new blocks push others out of its last tier


class RankedHost(NamedTuple):
    """One host of a ranking."""

    host: str
    first_token_s: float  # expected
    num_held: int
    num_fetched: int  # blocks worth fetching
    num_computed: int
    others_s: float = 0.0  # that prompts of others are expected to lose


def rank_hosts(
    offers: Sequence[HostOffer], num_blocks: int, compute_s: Callable[[int, int], float]
) -> list[RankedHost]:
    """Return the hosts, the one with the least seconds until its first token and of others first.

    `compute_s(first, count)`: seconds of prefill of `count` blocks from block `first` on. Of hosts that are
    equal the one with more blocks comes first, then the order of `offers`. Raises ValueError for negative
    counts or seconds.
    """
    for offer in offers:
        if min(offer[1:]) < 0:
            raise ValueError(f"{offer.host}: counts and seconds of an offer are not negative: {offer}")
    whole_s = compute_s(0, num_blocks)
    shortest_s = min((offer.queue_s for offer in offers), default=0.0)
    num_delayed = DELAYED_SHARE * shortest_s / whole_s if whole_s > 0 else 0.0

    def rest_s(first: int) -> float:
        return compute_s(first, num_blocks - first) if first < num_blocks else 0.0

    ranked = [_best(offer, num_blocks, rest_s, num_delayed) for offer in offers]
    return sorted(ranked, key=lambda one: (one.first_token_s + one.others_s, -one.num_held))


def _best(
    offer: HostOffer, num_blocks: int, rest_s: Callable[[int], float], num_delayed: float
) -> RankedHost:
    """Return what a host does best: fetching what others have, or computing it."""
    held = min(offer.num_held, num_blocks)
    fetchable = max(held, min(offer.num_fetchable, num_blocks))
    displaced_s = DISPLACED_SHARE * (1.0 + num_delayed) * rest_s(held) if offer.is_full else 0.0
    choices = [(held, offer.load_s)]
    if fetchable > held:
        choices.append((fetchable, offer.load_s + offer.fetch_s))
    ranked = [
        RankedHost(
            offer.host,
            max(offer.queue_s, ready_s) + rest_s(there),
            held,
            there - held,
            num_blocks - there,
            num_delayed * rest_s(there) + displaced_s,
        )
        for there, ready_s in choices
    ]
    return min(ranked, key=lambda one: one.first_token_s + one.others_s)
