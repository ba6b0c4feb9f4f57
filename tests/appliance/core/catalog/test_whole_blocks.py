"""Blocks that are held and let go of as a whole leave the same books as fragment by fragment."""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.catalog.residency import Residency
from kvtier.appliance.core.instructions import Copy, Publish, Reply
from kvtier.appliance.core.requests.acquire_job import AcquireJob
from kvtier.appliance.core.results import AcquireResult, ReadyFragment, ReadyFragments
from kvtier.tiers.base import Cause
from kvtier.tiers.block import Tier

from ..rig import CLIENT, GEOMETRY, Rig, hashes

Step = tuple[str, int, int]
CAUSES = (None, None, Cause.WRONG_IDENTITY, Cause.IO_ERROR)


@contextmanager
def one_by_one() -> Iterator[None]:
    """Every fragment is held and dropped alone."""

    def drop(residency: Residency, row: int, fragments: range, tier: Tier) -> None:
        for fragment in reversed(fragments):
            residency.drop(fragment, tier)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AcquireJob, "_tier_of_all", lambda *_: None)
        patch.setattr(Residency, "drop_block", drop)
        yield


def said(event: Any) -> Any:
    """An instruction in words that can be compared."""
    if isinstance(event, Reply) and isinstance(event.result, AcquireResult):
        result = event.result
        return event.call, result.lease_id, result.num_blocks, list(result.ready), result.last, result.tiers
    if isinstance(event, Copy):
        return event.copy, event.source, event.target, list(map(repr, event.items))
    if isinstance(event, Publish):
        return event.tier, list(event.places), list(map(repr, event.labels))
    return repr(event)


def lived_through(steps: list[Step]) -> list[Any]:
    """What the planner said, what its books were after each step, and what it offered for eviction."""
    offered: list[tuple[int, Tier]] = []
    offer = Residency.offer

    def note(residency: Residency, row: int, tier: Tier) -> None:
        offered.append((row, tier))
        offer(residency, row, tier)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Residency, "offer", note)
        return [*steps_of(steps), offered]


def steps_of(steps: list[Step]) -> list[Any]:
    """What the planner said and what its books were after each step."""
    rig = Rig(dram_blocks=6, hbm_blocks=3, nvme_blocks=4, hbm_is_shared=False)
    calls: list[int] = []
    trace: list[Any] = []
    for what, number, more in steps:
        chain = hashes("ab"[number % 2], 1 + more % 4)
        if what == "put":
            rig.start_put(chain)
        elif what == "acquire":
            calls.append(rig.acquire(chain, on_device=bool(number & 2), first_block=more & 1 and 1))
        elif what == "release" and calls:
            call = calls.pop(number % len(calls))
            if call in rig.answers:
                rig.release(call)
        elif what == "finish" and rig.copies:
            rig.finish(rig.copies[number % len(rig.copies)], CAUSES[more % 4])
        elif what == "warm":
            rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain, Tier.HBM))
        elif what == "evict":
            rig.do(ev.EvictRequested(rig.call(), (Tier.HBM, Tier.DRAM)[number % 2], 1 << 30))
        elif what == "lose":
            rig.do(ev.TierLost(Tier.HBM, number % 2 == 0, "test"))
        elif what == "erase":
            rig.do(ev.TenantErased(rig.call(), ""))
        catalog = rig.planner.catalog
        books = [
            [column.tolist() for column in columns]
            for columns in (catalog.holds, catalog.num_holds, catalog.state, catalog.place)
        ]
        clients = rig.planner.leases.clients.values()
        held_bytes = [(client.held_bytes, client.promised_bytes) for client in clients]
        trace.append(([said(one) for one in rig.instructions], books, held_bytes))
    return trace


steps = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "put",
                "put",
                "acquire",
                "acquire",
                "release",
                "finish",
                "finish",
                "warm",
                "evict",
                "lose",
                "erase",
            ]
        ),
        st.integers(0, 3),
        st.integers(0, 6),
    ),
    max_size=25,
)
IN_MEMORY = [("put", 0, 3), ("finish", 0, 0)]


FINISH = ("finish", 0, 0)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(steps)
@example([*IN_MEMORY, ("acquire", 0, 3), ("release", 0, 0), ("evict", 1, 0)])
@example([*IN_MEMORY, ("acquire", 0, 3), ("acquire", 0, 2), ("release", 0, 0), ("release", 0, 0)])
@example(
    [*IN_MEMORY, ("warm", 0, 2), ("acquire", 2, 3), ("finish", 0, 0), ("acquire", 2, 3), ("release", 0, 0)]
)
@example([*IN_MEMORY, ("warm", 0, 0), ("acquire", 0, 3), ("finish", 0, 2), ("release", 0, 0)])
@example(
    [*IN_MEMORY, ("evict", 1, 0), ("finish", 0, 0), ("acquire", 0, 3), ("finish", 0, 0), ("release", 0, 0)]
)
@example([*IN_MEMORY, ("acquire", 0, 3), ("erase", 0, 0), ("release", 0, 0)])
@example([*IN_MEMORY, ("warm", 0, 1), FINISH, FINISH, ("acquire", 2, 3), ("lose", 0, 0), ("release", 0, 0)])
@example([*IN_MEMORY, ("evict", 1, 0), *[FINISH] * 4, ("acquire", 0, 1), *[FINISH] * 2, ("acquire", 0, 3)])
def test_whole_blocks_are_held_and_dropped_like_their_fragments(steps: list[Step]) -> None:
    at_once = lived_through(steps)
    with one_by_one():
        assert lived_through(steps) == at_once


def test_only_what_is_still_to_come_is_promised() -> None:
    rig = Rig()
    chain = hashes("a", 2)
    rig.put(chain)
    rig.cool(chain)
    rig.acquire(chain[:1])
    rig.settle()
    rig.acquire(chain)
    client = rig.planner.leases.clients[CLIENT]
    assert (client.held_bytes, client.promised_bytes) == (2 * GEOMETRY.block_bytes, GEOMETRY.block_bytes)


def test_a_column_of_ready_fragments_is_those_that_were_added() -> None:
    ready = ReadyFragments()
    assert (list(ready), bool(ready), ready.bytes_before(9)) == ([], False, 0)
    ready.add(2, 1, Tier.HBM, 77, 5)
    ready.add_block(3, Tier.DRAM, array("q", [8, 9]), array("q", [10, 20]))
    expected = [
        ReadyFragment(2, 1, Tier.HBM, 77, 5),
        ReadyFragment(3, 0, Tier.DRAM, 8, 10),
        ReadyFragment(3, 1, Tier.DRAM, 9, 20),
    ]
    assert list(ready) == expected
    assert [one.tier for one in ready] == [Tier.HBM, Tier.DRAM, Tier.DRAM]
    assert list(ready.before(3)) == expected[:1]
    assert (ready.bytes_before(3), ready.bytes_before(4)) == (5, 35)
    early = ready.copy()
    ready.extend(early)
    assert list(ready) == expected * 2
    assert list(early) == expected
