"""A planner with a source, and what the tests of fetches let it answer."""

from typing import Any

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import FetchBundle, SearchBundles
from kvtier.policies.costs import PrefillModel
from kvtier.tiers.base import Cause, CopyOutcome
from kvtier.tiers.block import NamespaceIdentity

from ..rig import GEOMETRY, Rig

SIZE = 16  # blocks of a bundle: 256 tokens


def with_source(num_extents: int = 16, **options: Any) -> Rig:
    """Return a rig with an open source."""
    rig = Rig(num_extents=num_extents, **options)
    rig.do(ev.SourceChanged(True))
    return rig


def with_hosts() -> Rig:
    """Return a rig that can ask other hosts."""
    rig = Rig(num_extents=16)
    rig.do(ev.SourceChanged(True, takes_exports=False, has_hosts=True))
    return rig


def hosts_have(rig: Rig, num_blocks: int) -> list[FetchBundle]:
    """End the search that the last event began: a host has so many blocks from its first bundle on."""
    (search,) = searches(rig)
    found = num_blocks // SIZE
    rig.do(ev.SourceSearched(search.search, found, -1, is_stored=False, num_blocks=num_blocks))
    return fetches(rig)


def searches(rig: Rig) -> list[SearchBundles]:
    """Return the searches that the last event began."""
    return [one for one in rig.instructions if isinstance(one, SearchBundles)]


def fetches(rig: Rig) -> list[FetchBundle]:
    """Return the fetches that the last event began."""
    return [one for one in rig.instructions if isinstance(one, FetchBundle)]


def land(rig: Rig, fetch: FetchBundle, group: int, cause: Cause | None = None) -> None:
    """End one batch of a fetch."""
    copy, items = fetch.batches[group]
    rig.do(ev.CopyFinished(copy, [CopyOutcome(cause, b"" if cause else b"\7" * 16)] * len(items)))


def search_found(rig: Rig, num_found: int, num_possible: int | None = None) -> list[FetchBundle]:
    """End the search that the last event began; return the fetches that follow."""
    possible = num_found if num_possible is None else num_possible
    rig.do(ev.SourceSearched(searches(rig)[0].search, num_found, possible))
    return fetches(rig)


def begin_all(rig: Rig) -> list[FetchBundle]:
    """Give the planner turns until it has no more to begin; return the fetches that the last event began,
    too."""
    begun = fetches(rig)
    while rig.planner.fetches.is_busy:
        assert rig.planner.is_busy, "it asks for the next turn"
        rig.tick()
        begun += fetches(rig)
    return begun


def state_prefill(rig: Rig, tokens_per_s: float) -> None:
    """Say how fast prefill is."""
    identity = NamespaceIdentity(b"m" * 16, GEOMETRY)
    rig.do(ev.NamespaceRegistered(rig.call(), identity, PrefillModel(tokens_per_s, 0.0)))
