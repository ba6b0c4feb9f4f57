"""Acquires that wait for blocks which another runtime computes: what they are answered, and for how long."""

from typing import Any

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import AwaitBlocks, FetchBundle, StopAwaiting
from kvtier.appliance.core.requests.expectations import SLACK
from kvtier.policies.costs import PrefillModel
from kvtier.tiers.base import Cause, CopyOutcome
from kvtier.tiers.block import NamespaceIdentity

from ..rig import CLIENT, GEOMETRY, Rig, hashes

HOST = "10.0.0.1:50051"
SIZE = 16  # blocks of a bundle: 256 tokens
NEVER = float("inf")


def of(rig: Rig, kind: type) -> list[Any]:
    """Return the instructions of one kind that the last event gave."""
    return [one for one in rig.instructions if isinstance(one, kind)]


def with_hosts(tokens_per_s: float = 0.0) -> Rig:
    """Return a rig that can ask other hosts, with prefill as fast as stated; 0: not stated."""
    rig = Rig(num_extents=16)
    rig.do(ev.SourceChanged(True, takes_exports=False, has_hosts=True))
    if tokens_per_s:
        identity = NamespaceIdentity(b"m" * 16, GEOMETRY)
        rig.do(ev.NamespaceRegistered(rig.call(), identity, PrefillModel(tokens_per_s, 0.0)))
    return rig


def expect(rig: Rig, chain: list[bytes], source: str = HOST, until: float = NEVER, **named: Any) -> int:
    """Ask for a chain of which all is expected; return the call."""
    return rig.acquire(chain, expected=ev.ExpectedPart(len(chain), until, source), **named)


def land(rig: Rig, fetch: FetchBundle, cause: Cause | None = None) -> None:
    """End all batches of a fetch."""
    for copy, items in fetch.batches:
        rig.do(ev.CopyFinished(copy, [CopyOutcome(cause, b"" if cause else b"\7" * 16)] * len(items)))


def test_blocks_put_into_this_daemon_are_reported_as_they_are_stored() -> None:
    rig, chain = Rig(num_extents=16), hashes("a", 5)
    rig.put(chain[:1])
    call = expect(rig, chain, source="")
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (5, False)
    assert {one.block for one in rig.answer(call).ready} == {0}
    rig.put(chain[1:3], parent=chain[0])
    assert {one.block for one in rig.answer(call).ready} == {1, 2}
    rig.put(chain[3:], parent=chain[2])
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (5, True)
    assert {one.block for one in rig.answer(call).ready} == {3, 4}


def test_what_another_host_tells_of_is_fetched_while_the_rest_is_computed() -> None:
    rig, chain = with_hosts(), hashes("a", SIZE + 4)
    call = expect(rig, chain)
    (awaited,) = of(rig, AwaitBlocks)
    assert (awaited.names, awaited.source) == (chain, HOST)
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (len(chain), False)
    rig.do(ev.BlocksTold(awaited.number, 3))
    (first,) = of(rig, FetchBundle)
    assert first.bundle.names == chain[:3]
    land(rig, first)
    assert {one.block for one in rig.answer(call).ready} == {0, 1, 2}
    rig.do(ev.BlocksTold(awaited.number, len(chain), is_over=True))
    rest, tail = of(rig, FetchBundle)
    assert [item.source for item in rest.batches[0][1]] == list(range(3, SIZE))
    assert tail.bundle.position == SIZE
    land(rig, rest)
    land(rig, tail)
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (len(chain), True)
    assert not of(rig, StopAwaiting), "it is over already"


def test_the_first_layers_are_reported_before_the_last_ones_land() -> None:
    rig, chain = with_hosts(), hashes("a", 4)
    call = expect(rig, chain)
    rig.do(ev.BlocksTold(of(rig, AwaitBlocks)[0].number, 4))
    (fetch,) = of(rig, FetchBundle)
    copy, items = fetch.batches[0]
    rig.do(ev.CopyFinished(copy, [CopyOutcome(None, b"\7" * 16)] * len(items)))
    assert {(one.block, one.group) for one in rig.answer(call).ready} == {(n, 0) for n in range(4)}


@pytest.mark.parametrize("num_told", [0, 3])
def test_nothing_waits_for_a_host_that_is_gone(num_told: int) -> None:
    rig, chain = with_hosts(), hashes("a", 8)
    call = expect(rig, chain)
    number = of(rig, AwaitBlocks)[0].number
    if num_told:
        rig.do(ev.BlocksTold(number, num_told))
        fetched = of(rig, FetchBundle)
        rig.do(ev.BlocksTold(number, num_told, is_over=True))
        assert not rig.answer(call).last, "what it told of is on its way"
        land(rig, fetched[0])
    else:
        rig.do(ev.BlocksTold(number, 0, is_over=True))
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (num_told, True)


def test_it_waits_as_long_as_computing_takes_and_a_quarter_longer_once_blocks_come() -> None:
    for comes in (False, True):
        rig, chain = with_hosts(tokens_per_s=1000.0), hashes("a", 8)
        began, compute_s = rig.now, 8 * GEOMETRY.block_tokens / 1000.0
        call = expect(rig, chain)
        number = of(rig, AwaitBlocks)[0].number
        if comes:
            rig.do(ev.BlocksTold(number, 2))
            land(rig, of(rig, FetchBundle)[0])
        wait_s = compute_s * (1 + SLACK if comes else 1)
        assert rig.planner.reads.next_deadline() == pytest.approx(began + wait_s, abs=0.01)
        rig.now = began + wait_s - 0.01
        rig.do(ev.Tick())
        assert not rig.answer(call).last
        rig.now = began + wait_s + 0.01
        rig.do(ev.Tick())
        assert [one.number for one in of(rig, StopAwaiting)] == [number]
        assert (rig.answer(call).num_blocks, rig.answer(call).last) == (2 * comes, True)


def test_the_caller_may_wait_less() -> None:
    rig, chain = with_hosts(), hashes("a", 8)
    call = expect(rig, chain, until=rig.now + 0.5)
    rig.now += 0.51
    rig.do(ev.Tick())
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (0, True)


def test_what_computing_brings_sooner_is_not_awaited() -> None:
    rig, chain = with_hosts(tokens_per_s=1e9), hashes("a", 8)
    call = expect(rig, chain)
    assert not of(rig, AwaitBlocks)
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (0, True)


def test_a_block_that_does_not_arrive_ends_the_prefix() -> None:
    rig, chain = with_hosts(), hashes("a", 8)
    call = expect(rig, chain)
    number = of(rig, AwaitBlocks)[0].number
    rig.do(ev.BlocksTold(number, 3))
    land(rig, of(rig, FetchBundle)[0])
    rig.do(ev.BlocksTold(number, 6))
    land(rig, of(rig, FetchBundle)[0], Cause.SOURCE_GONE)
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (3, True)


def test_two_that_expect_the_same_ask_once() -> None:
    rig, chain = with_hosts(), hashes("a", 8)
    calls = [expect(rig, chain)]
    number = of(rig, AwaitBlocks)[0].number
    calls.append(expect(rig, chain))
    assert not of(rig, AwaitBlocks)
    rig.do(ev.AcquireAbandoned(calls[0]))
    assert not of(rig, StopAwaiting), "the other one still waits"
    rig.do(ev.BlocksTold(number, 8))
    (fetch,) = of(rig, FetchBundle)
    land(rig, fetch)
    assert (rig.answer(calls[1]).num_blocks, rig.answer(calls[1]).last) == (8, True)
    assert not len(rig.planner.reads.expectations)


def test_of_a_client_that_is_gone_nothing_is_left() -> None:
    rig, chain = with_hosts(), hashes("a", 8)
    expect(rig, chain)
    number = of(rig, AwaitBlocks)[0].number
    rig.do(ev.ClientGone(CLIENT, "closed"))
    assert [one.number for one in of(rig, StopAwaiting)] == [number]
    rig.do(ev.BlocksTold(number, 8))
    assert not of(rig, FetchBundle)


def test_acquires_are_looked_at_only_when_more_may_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: in every step all names of all that wait were gone through."""
    rig, chains = Rig(num_extents=16), [hashes(f"{number}", 6) for number in range(8)]
    calls = [expect(rig, chain, source="") for chain in chains]
    rig.tick()
    asked: list[bytes] = []
    prefix = rig.planner.fetches.prefix

    def noting(namespace: Any, names: Any) -> list[int]:
        return prefix(namespace, (asked.append(name) or name for name in names))  # type: ignore[func-returns-value]

    monkeypatch.setattr(rig.planner.fetches, "prefix", noting)
    for _ in range(3):
        rig.tick()
    assert not asked
    rig.put(chains[3][:1])
    assert {one.block for one in rig.answer(calls[3]).ready} == {0}
    assert set(asked) == {chain[0] for chain in chains} | {chains[3][1]}, "not those behind the first missing"
