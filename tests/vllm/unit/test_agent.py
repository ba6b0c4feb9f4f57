"""The agent's thread as it runs in an engine, against a FakeAppliance."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.clients import ExpectedBlocks, Urgency
from kvtier.clients.errors import DeadlineExceeded, Overloaded
from kvtier.clients.vllm.counters import Counters
from kvtier.clients.vllm.groups import Group
from kvtier.clients.vllm.scheduler import agent, finding
from kvtier.clients.vllm.scheduler.agent import Agent
from kvtier.clients.vllm.scheduler.handover import HandoverSource
from kvtier.clients.vllm.scheduler.lookups import LookupRequest, PendingLookup, SessionUpdate
from kvtier.testing import FakeAppliance

from ...waiting import until
from .threads_scene import GROUPS, HASHES, OPTIONS, TWO, WAIT_S, identities, store


@pytest.fixture
def appliance() -> Iterator[FakeAppliance]:
    made = FakeAppliance(capacity_bytes=8 << 20)
    yield made
    assert made.check_integrity() == []


class Scene:
    """An agent and what it answered."""

    def __init__(self, appliance: FakeAppliance, groups: list[Group], num_ranks: int = 1) -> None:
        self.appliance = appliance
        self.counters = Counters()
        ranks = [identities(groups, rank) for rank in range(num_ranks)]
        self.agent = Agent(
            OPTIONS, groups, ranks, lambda: appliance.async_client(name="agent"), self.counters
        )

    def ask(self, **question: Any) -> PendingLookup:
        asked = self.agent.ask(LookupRequest("session", HASHES, **question))
        until(lambda: asked.answer is not None)
        return asked

    @property
    def num_leases(self) -> int:
        return len(self.appliance.server.state.holds)


@pytest.fixture
def scene(appliance: FakeAppliance) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(groups: list[Group] = GROUPS, num_ranks: int = 1) -> Scene:
        scenes.append(Scene(appliance, groups, num_ranks))
        return scenes[-1]

    yield make
    for made in scenes:
        made.agent.close()


def answered(asked: PendingLookup) -> bool:
    return asked.answer is not None


def told(asked: PendingLookup) -> tuple[int, tuple[int, ...]]:
    assert asked.answer is not None
    return asked.answer.num_tokens, asked.answer.stored


def test_what_is_stored_is_pinned_until_it_is_released(appliance: FakeAppliance, scene: Any) -> None:
    store(appliance, GROUPS[0], 4)
    here = scene()
    asked = here.ask()
    assert told(asked) == (32, (4,))
    assert here.num_leases == 1
    assert appliance.evict_all() == 0
    here.agent.release(asked)
    here.agent.release(asked)
    until(lambda: here.num_leases == 0)


def test_nothing_beyond_the_engines_own_blocks_is_a_miss(appliance: FakeAppliance, scene: Any) -> None:
    store(appliance, GROUPS[0], 2)
    here = scene()
    assert told(here.ask(first_token=16)) == (0, (2,))
    assert told(here.ask(first_token=24)) == (0, (2,))
    assert here.num_leases == 0


def test_a_hit_is_what_every_rank_has(appliance: FakeAppliance, scene: Any) -> None:
    store(appliance, GROUPS[0], 5, rank=0)
    store(appliance, GROUPS[0], 3, rank=1)
    here = scene(num_ranks=2)
    assert told(here.ask()) == (24, (3,))
    assert here.num_leases == 2


def test_a_hit_is_what_every_group_has(appliance: FakeAppliance, scene: Any) -> None:
    """40 tokens of the one, 36 of the other: 32 in common; of the window only its end is pinned."""
    store(appliance, TWO[0], 5)
    store(appliance, TWO[1], 9)
    here = scene(TWO)
    asked = here.ask()
    assert told(asked) == (32, (5, 9))
    held = [len(hold.keys) for hold in here.appliance.server.state.holds.values()]
    assert sorted(held) == [3, 4]


def test_a_group_that_is_missing_is_a_miss(appliance: FakeAppliance, scene: Any) -> None:
    store(appliance, TWO[0], 5)
    here = scene(TWO)
    assert told(here.ask()) == (0, (5, 0))
    assert here.num_leases == 0


def test_ranks_that_differ_in_one_group_agree_on_the_least(appliance: FakeAppliance, scene: Any) -> None:
    for rank, num_blocks in ((0, 10), (1, 5)):
        store(appliance, TWO[0], 5, rank)
        store(appliance, TWO[1], num_blocks, rank)
    here = scene(TWO, num_ranks=2)
    assert told(here.ask()) == (16, (5, 5))


def test_a_window_that_shrinks_while_it_is_pinned_is_a_miss(
    appliance: FakeAppliance, scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lookup found ten blocks; when they are pinned, the last two have been evicted."""
    store(appliance, TWO[0], 5)
    store(appliance, TWO[1], 10)
    here = scene(TWO)
    acquire = here.agent._client.acquire

    async def shorter(namespace: Any, chain: list[bytes], **named: Any) -> Any:
        return await acquire(namespace, chain[:8] if len(chain) == 10 else chain, **named)

    monkeypatch.setattr(here.agent._client, "acquire", shorter)
    assert told(here.ask())[0] == 0
    until(lambda: here.num_leases == 0)


class Quota:
    """The daemon's bound on what one client pins, in blocks, before a FakeAppliance that has none."""

    def __init__(self, here: Scene, num_blocks: int) -> None:
        self._here, self._left, self._acquire = here, num_blocks, here.agent._client.acquire

    async def acquire(self, namespace: Any, chain: list[bytes], **named: Any) -> Any:
        pinned = chain[: self._left]
        lease: Any = await self._acquire(namespace, pinned or [bytes(32)], **named)
        self._left -= len(pinned)
        lease._state.num_stored = len(chain)
        release = lease.release

        async def give_back() -> None:
            self._left += len(pinned)
            pinned.clear()
            await release()

        lease.release = give_back
        return lease


def test_who_finds_no_room_to_pin_waits_for_others_to_let_go(
    appliance: FakeAppliance, scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one and a half: the second is not cut short, and the third comes after it."""
    store(appliance, GROUPS[0], 6)
    here = scene()
    quota = Quota(here, 9)
    monkeypatch.setattr(here.agent._client, "acquire", quota.acquire)
    first = here.ask()
    assert told(first) == (48, (6,))
    waiting = [here.agent.ask(LookupRequest("session", HASHES)) for _ in range(3)]
    until(lambda: len(here.agent._line) == 3)
    assert [asked.answer for asked in waiting] == [None] * 3
    held = first
    while waiting:  # one after the other, in whichever order they came to stand
        here.agent.release(held)
        until(lambda: any(map(answered, waiting)))
        (held,) = filter(answered, waiting)
        assert told(held) == (48, (6,))
        waiting.remove(held)
    here.agent.release(held)
    assert here.counters.take()["lookups_crowded"] >= 3


def test_who_pins_while_another_lets_go_tries_again(
    appliance: FakeAppliance, scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found room for a part only, and nobody else holds anything by the time that it looks round."""
    store(appliance, GROUPS[0], 6)
    here = scene()
    quota = Quota(here, 9)
    monkeypatch.setattr(here.agent._client, "acquire", quota.acquire)
    first = here.ask()

    async def acquire(*arguments: Any, **named: Any) -> Any:
        lease = await quota.acquire(*arguments, **named)
        here.agent._let_go(first)
        return lease

    monkeypatch.setattr(here.agent._client, "acquire", acquire)
    assert told(here.ask()) == (48, (6,))


def test_alone_a_part_is_better_than_nothing(
    appliance: FakeAppliance, scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(appliance, GROUPS[0], 6)
    here = scene()
    monkeypatch.setattr(here.agent._client, "acquire", Quota(here, 4).acquire)
    assert told(here.ask()) == (32, (6,))


@pytest.mark.parametrize("num_blocks", [3, 4, 5])
def test_long_chains_are_pinned_in_pieces(
    appliance: FakeAppliance, scene: Any, monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    monkeypatch.setattr(finding, "MAX_BLOCKS", 2)
    store(appliance, TWO[0], num_blocks)
    store(appliance, TWO[1], 12)
    assert told(scene().ask()) == (8 * num_blocks, (num_blocks,))
    assert told(scene().ask(first_token=16)) == (8 * num_blocks, (num_blocks,))
    assert told(scene(TWO).ask()) == (8 * num_blocks, (num_blocks, 12))


def test_only_the_first_piece_of_a_chain_is_expected(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: a host was told the names of the second one as if a chain began with them."""
    monkeypatch.setattr(finding, "MAX_BLOCKS", 2)
    expected: list[ExpectedBlocks | None] = []

    class Client:
        async def acquire(self, namespace: Any, names: list[bytes], **named: Any) -> Any:
            expected.append(named["expected"])
            return SimpleNamespace(num_blocks=len(names))

    finder = object.__new__(finding.Finder)
    finder._client, finder._ttl_s = Client(), 30.0  # type: ignore[assignment]
    source = HandoverSource("10.0.0.1:7070", 0, 48, "")
    question = LookupRequest("session", HASHES, source=source, deadline_s=7.0)
    (namespace,) = identities(GROUPS)
    asyncio.run(finder._pin_chain(namespace, GROUPS[0].chain(HASHES), 0, question, finding.PinnedChain()))
    assert expected == [source.expected(2, 7.0), None, None]


def test_an_answer_that_nobody_wants_any_more_pins_nothing(appliance: FakeAppliance, scene: Any) -> None:
    store(appliance, GROUPS[0], 4)
    here = scene()
    asked = here.agent.ask(LookupRequest("session", HASHES))
    here.agent.release(asked)
    until(lambda: asked.answer is not None)
    here.ask(first_token=40)
    until(lambda: here.num_leases == 0)


def test_salt_hides_what_was_stored_before(appliance: FakeAppliance, scene: Any) -> None:
    store(appliance, GROUPS[0], 4)
    assert told(scene().ask(salt="later"))[0] == 0


def test_an_adapter_that_cannot_be_read_is_a_miss(appliance: FakeAppliance, scene: Any) -> None:
    store(appliance, GROUPS[0], 4)
    here = scene()
    assert here.ask(adapter_path="/no/such/adapter").answer.cause == "misses_error"
    assert here.agent.allows()


def test_a_folder_rewritten_under_a_loaded_adapter_is_a_miss_until_it_is_loaded_anew(
    appliance: FakeAppliance, scene: Any, tmp_path: Path
) -> None:
    """What the engine holds is neither what the folder was named for nor what it holds now."""
    weights = tmp_path / "adapter_model.bin"
    weights.write_bytes(b"old")
    here = scene()
    old = here.ask(adapter_path=str(tmp_path), adapter_id=1).answer
    assert (len(old.adapter), old.cause) == (32, "misses_nothing_stored")
    weights.write_bytes(b"new")
    changed = here.ask(adapter_path=str(tmp_path), adapter_id=1).answer
    assert (changed.adapter, changed.cause) == (b"", "misses_adapter_changed"), "nothing is saved either"
    new = here.ask(adapter_path=str(tmp_path), adapter_id=2).answer
    assert (len(new.adapter), new.adapter != old.adapter) == (32, True)
    weights.write_bytes(b"old")
    assert here.ask(adapter_path=str(tmp_path), adapter_id=1).answer.adapter == old.adapter
    assert here.agent.allows()


def test_an_appliance_that_comes_back_is_found_without_a_request(
    appliance: FakeAppliance, scene: Any
) -> None:
    store(appliance, GROUPS[0], 4)
    here = scene()
    here.ask()
    appliance.unavailable = True
    assert here.ask().answer.cause == "misses_error"
    assert here.agent.breaker.is_open
    assert here.counters.take()["breaker_openings"] == 1
    appliance.unavailable = False
    until(lambda: not here.agent.breaker.is_open)
    assert told(here.ask())[0] == 32


def test_an_appliance_that_is_silent_is_not_taken_for_one_that_is_back(
    appliance: FakeAppliance, scene: Any
) -> None:
    """Its connections outlive its silence: a probe that makes no call would prove nothing."""
    here = scene()
    here.ask()
    silence = appliance.server.failures
    appliance.fail_next(DeadlineExceeded("silent", reason="NO_ANSWER"), 1000)
    while not here.agent.breaker.is_open:
        here.ask()
    num_left = len(silence)
    assert num_left > 1
    until(lambda: len(silence) < num_left or not here.agent.breaker.is_open)
    assert here.agent.breaker.is_open
    silence.clear()
    until(lambda: not here.agent.breaker.is_open)


def test_a_full_appliance_is_a_miss_and_no_reason_to_stop(appliance: FakeAppliance, scene: Any) -> None:
    store(appliance, GROUPS[0], 4)
    here = scene()
    here.ask()
    appliance.fail_next(Overloaded("no lease left", reason="TOO_MANY_IN_FLIGHT"))
    assert here.ask().answer.cause == "misses_error"
    assert here.agent.allows()
    assert told(here.ask())[0] == 32


def test_restart_is_survived(appliance: FakeAppliance, scene: Any) -> None:
    store(appliance, GROUPS[0], 4)
    here = scene()
    here.ask()
    appliance.restart()
    assert told(here.ask()) == (0, (0,))
    store(appliance, GROUPS[0], 3)
    assert told(here.ask()) == (24, (3,))


def test_only_the_latest_word_about_a_session_is_sent(appliance: FakeAppliance, scene: Any) -> None:
    store(appliance, GROUPS[0], 2)
    here = scene()
    here.agent.release(here.ask())
    all_told = threading.Event()
    here.agent._submit(all_told.wait)  # its thread hears all of it at once
    for _ in range(20):
        for urgency in (Urgency.PREFILL, Urgency.DECODING):
            here.agent.tell("session", SessionUpdate(urgency))
    here.agent.tell("session", SessionUpdate(Urgency.ENDED, num_decoded_tokens=5, is_last=True))
    all_told.set()
    until(lambda: "EndSession" in appliance.calls)
    assert "UpdateSession" not in appliance.calls


def test_an_answer_that_takes_long_is_told_of_and_a_short_one_is_not(
    appliance: FakeAppliance, scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "DECODING_DELAY_S", 0.05)
    here = scene()
    here.agent.tell("long", SessionUpdate(Urgency.DECODING))
    until(lambda: "UpdateSession" in appliance.calls)
    monkeypatch.setattr(agent, "DECODING_DELAY_S", 1e6)
    here.agent.tell("short", SessionUpdate(Urgency.DECODING))
    here.agent.tell("another", SessionUpdate(Urgency.WAITING, None, 30.0))
    until(lambda: appliance.calls.count("UpdateSession") == 2)
    here.agent.tell("short", SessionUpdate(Urgency.ENDED, num_decoded_tokens=5, is_last=True))
    until(lambda: "EndSession" in appliance.calls)
    assert appliance.calls.count("UpdateSession") == 2


def test_what_is_pinned_is_known_before_it_has_come_up(
    appliance: FakeAppliance, scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent says it as soon as the daemon has pinned, the answer comes when all of it is readable."""
    store(appliance, GROUPS[0], 4)
    may_come = threading.Event()

    async def wait(finder: Any, found: Any, question: LookupRequest) -> None:
        await asyncio.to_thread(may_come.wait, WAIT_S)

    monkeypatch.setattr(finding.Finder, "wait", wait)
    monkeypatch.setattr(finding.FoundPrefix, "is_complete", False)
    here = scene()
    asked = here.agent.ask(LookupRequest("session", HASHES))
    until(lambda: asked.arriving is not None)
    assert asked.answer is None
    assert asked.arriving is not None
    assert (asked.arriving.num_tokens, asked.arriving.stored) == (32, (4,))
    may_come.set()
    until(lambda: answered(asked))
    assert told(asked) == (32, (4,))
    here.agent.release(asked)
