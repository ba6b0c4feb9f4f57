"""FleetRank: ranks the hosts of a fleet for one prompt, from what a daemon knows of them.

What is not known counts as nothing: a block in an unknown tier is readable at once, a host without a queue
is idle.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from .ranking import HostOffer, rank_hosts

#: A host that says that its disk is busy for longer is not believed.
MAX_WAIT_S: Final = 3600.0
#: Of its last tier, below which new blocks push others out.
FULL_SHARE: Final = 0.05


class KnownHost(NamedTuple):
    """What is known of one host and a chain. Blocks are counted from the chain's first one."""

    host: str
    num_held: int = 0
    num_worth_loading: int = 0  # of those held
    load_s: float = 0.0  # until those worth loading are readable
    queue_s: float = 0.0  # of prefill that waits or runs there
    is_askable: bool = True  # others may fetch from it now
    is_draining: bool = False
    is_full: bool = False  # new blocks push others out of its last tier
    busy: tuple[int, ...] = ()  # of hosts that are equal otherwise, the one with the least comes first


class FleetRank(NamedTuple):
    """One host of a ranking: what it does until the first token, and when that is expected."""

    known: KnownHost
    first_token_s: float
    num_fetched: int
    num_computed: int
    fetch_s: float
    compute_s: float


def is_full(free_share: float) -> bool:
    """Return whether a host with so large a share of its last tier free gives up blocks for new ones."""
    return free_share < FULL_SHARE


def disk_load_s(
    num_on_disk: int, block_bytes: int, wait_s: float, bytes_per_s: float, default_bytes_per_s: float
) -> float:
    """Return the seconds until blocks on a host's disk are readable: behind its queue, at its speed.

    `wait_s`, `bytes_per_s`: as the host told; 0 where it did not. What it tells is not trusted to be sane.
    """
    if not num_on_disk:
        return 0.0
    speed = bytes_per_s if bytes_per_s >= 1.0 else default_bytes_per_s  # not NaN either
    return (wait_s if 0.0 <= wait_s < MAX_WAIT_S else 0.0) + num_on_disk * block_bytes / speed


def rank_fleet(
    hosts: Sequence[KnownHost],
    names: Sequence[bytes],
    num_fetchable: int,
    fetch_s: Callable[[int], float],
    compute_s: Callable[[int, int], float],
) -> list[FleetRank]:
    """Return the hosts in the order of `rank_hosts`; those that drain come last.

    `names`: of the chain's blocks. `num_fetchable`: blocks, from the first one on, that a host which lacks
    them can fetch. `fetch_s(count)`: seconds until `count` blocks have arrived from elsewhere. `compute_s(
    first, count)`: seconds of prefill of `count` blocks from block `first` on.

    Of equal hosts the one that holds more comes first, then the less busy one, then they take turns by the
    name of the last block: otherwise one host would get every prompt that is new to all.
    """
    num_blocks, offers = len(names), []
    by_host = {one.host: one for one in hosts}
    for one in sorted(hosts, key=lambda host: (host.busy, _turn(host.host, names[-1]))):
        num_loaded = min(one.num_held, one.num_worth_loading)
        # Behind blocks that it holds and should compute nothing is fetched.
        end = max(num_loaded, num_fetchable) if num_loaded == one.num_held else num_loaded
        missing = max(0, min(end, num_blocks) - num_loaded)
        needs_s = fetch_s(missing) if missing else 0.0
        offers.append(HostOffer(one.host, num_loaded, one.load_s, end, needs_s, one.queue_s, one.is_full))
    fetches = {offer.host: offer.fetch_s for offer in offers}
    ranked = [
        FleetRank(
            by_host[found.host],
            found.first_token_s,
            found.num_fetched,
            found.num_computed,
            fetches[found.host] if found.num_fetched else 0.0,
            compute_s(num_blocks - found.num_computed, found.num_computed) if found.num_computed else 0.0,
        )
        for found in rank_hosts(offers, num_blocks, compute_s)
    ]
    return sorted(ranked, key=lambda one: one.known.is_draining)


def _turn(host: str, name: bytes) -> bytes:
    return blake2b(host.encode() + name, digest_size=8).digest()
