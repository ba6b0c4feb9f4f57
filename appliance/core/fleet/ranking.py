"""Ranking: which of several hosts answers a prompt first.

A host reads what it holds, may fetch what others hold, and computes the rest behind the prompts that wait
there. Reading and fetching go on while those are computed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class HostOffer(NamedTuple):
    """What is known of one host and a prompt. Blocks are counted from the prompt's first one."""

    host: str
    num_held: int  # blocks in its own tiers
    load_s: float  # until these are readable
    num_fetchable: int  # blocks that it or another host holds
    fetch_s: float  # until those that it does not hold have arrived
    queue_s: float  # of prefill that waits or runs there


class RankedHost(NamedTuple):
    """One host of a ranking."""

    host: str
    first_token_s: float  # expected
    num_held: int
    num_fetched: int  # blocks worth fetching
    num_computed: int


def rank_hosts(
    offers: Sequence[HostOffer], num_blocks: int, compute_s: Callable[[int, int], float]
) -> list[RankedHost]:
    """Return the hosts, the one with the earliest first token first.

    `compute_s(first, count)`: seconds of prefill of `count` blocks from block `first` on. Of hosts that are
    equal in time the one with more blocks comes first, then the order of `offers`. Raises ValueError for
    negative counts or seconds.
    """
    ranked = []
    for offer in offers:
        if min(offer[1:]) < 0:
            raise ValueError(f"{offer.host}: counts and seconds of an offer are not negative: {offer}")
        held = min(offer.num_held, num_blocks)
        fetchable = max(held, min(offer.num_fetchable, num_blocks))
        choices = [(held, offer.load_s)]
        if fetchable > held:
            choices.append((fetchable, offer.load_s + offer.fetch_s))
        times = [
            (
                max(offer.queue_s, ready_s)
                + (compute_s(there, num_blocks - there) if there < num_blocks else 0.0)
            )
            for there, ready_s in choices
        ]
        best = min(range(len(choices)), key=times.__getitem__)
        there = choices[best][0]
        ranked.append(RankedHost(offer.host, times[best], held, there - held, num_blocks - there))
    return sorted(ranked, key=lambda one: (one.first_token_s, -one.num_held))
