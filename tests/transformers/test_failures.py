"""Whatever the daemon does, generate answers as without it: dead, slow, full, restarted, or a bug in here."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.clients import (
    DataLoss,
    DeadlineExceeded,
    InvalidRequest,
    KvtierError,
    NotFound,
    Overloaded,
    PermissionDenied,
    PreconditionFailed,
    ServerBug,
    Unavailable,
    Urgency,
)
from kvtier.clients.connector.breaker import Breaker
from kvtier.clients.connector.guard import BREAKER_OPEN, PLUGIN_BUG, Guard
from kvtier.clients.errors import CONNECTION_LOST
from kvtier.testing import FakeAppliance
from kvtier.v1.conversions import urgency_to_wire

NAMES = {urgency_to_wire(urgency): urgency.name for urgency in Urgency}
WHY = "torch and transformers are not installed; `make test-transformers` runs this"
torch = pytest.importorskip("torch", reason=WHY)
pytest.importorskip("transformers", reason=WHY)

from kvtier.clients.transformers import PrefixStore, carrier  # noqa: E402

from .models import answer, build, tokens  # noqa: E402

Make = Callable[..., Any]
TINY = "llama, grouped heads"
SLIDING = "gemma-3, some layers sliding"
NUM_TURNS = 3
PROBLEMS = [
    kind("injected", reason="INJECTED")
    for kind in (
        DataLoss,
        DeadlineExceeded,
        InvalidRequest,
        NotFound,
        Overloaded,
        PermissionDenied,
        PreconditionFailed,
        ServerBug,
    )
] + [Unavailable("injected", reason=CONNECTION_LOST)]


def guard(breaker: Breaker) -> Guard:
    return Guard("kvtier.transformers", breaker)


def converse(store: Any, between: Callable[[], object] = lambda: None) -> list[int]:
    """Hold a conversation, each turn checked against plain generate; return what was reused per turn."""
    said, reused = tokens(45), []
    for turn in range(NUM_TURNS):
        cache = store.load(said, session="reader")
        reused.append(cache.reuse.num_tokens)
        between()
        output = answer(store.model, said, cache)
        assert torch.equal(output, answer(store.model, said))
        cache.save()
        said = torch.cat([output, tokens(20, seed=turn)], 1)
    cache.end()
    return reused


def test_nobody_listens(appliance: FakeAppliance, make_store: Make) -> None:
    appliance.unavailable = True
    now = itertools.count()
    store = make_store(build(TINY), guard=guard(Breaker(pause_s=1e6, clock=lambda: float(next(now)))))
    assert converse(store) == [0, 0, 0]
    assert appliance.calls == []
    assert store.guard.breaker.is_open
    causes = store.guard.take_causes()
    assert causes.pop(BREAKER_OPEN) > 10
    assert causes == {"NOT_RUNNING": 1}, "the breaker stops asking after the first refusal"


def test_the_daemon_comes_back(appliance: FakeAppliance, make_store: Make) -> None:
    now = [0.0]
    store = make_store(build(TINY), guard=guard(Breaker(pause_s=1.0, max_pause_s=1.0, clock=lambda: now[0])))
    appliance.unavailable = True
    converse(store)
    appliance.unavailable = False
    converse(store)
    assert appliance.calls == [], "not asked before its time"
    now[0] = 5.0
    assert converse(store) == [0, 56, 88]
    assert converse(store) == [40, 72, 104]


@pytest.mark.parametrize(("name", "step"), [(TINY, 2), (SLIDING, 5)])
def test_calls_fail_in_turn(name: str, step: int, appliance: FakeAppliance, make_store: Make) -> None:
    """Calls all over a conversation fail, each in another way: no exception, no other answer."""
    model = build(name)
    now = itertools.count()
    converse(make_store(model))
    num_calls = len(appliance.calls)
    for position in range(0, num_calls, step):
        problem = PROBLEMS[position // step % len(PROBLEMS)]
        appliance.restart()
        store = make_store(model, guard=guard(Breaker(pause_s=0.0, clock=lambda: float(next(now)))))
        with failing_at(appliance, position, problem):
            converse(store)
        assert appliance.check_integrity() == []


class failing_at:  # noqa: N801 - reads as a verb
    """Let the call at `position` from now on, and no other, end in `problem`."""

    def __init__(self, appliance: FakeAppliance, position: int, problem: KvtierError) -> None:
        self.server, self.handle = appliance.server, appliance.server.handle
        self.left, self.problem = position, problem

    def __enter__(self) -> None:
        def handle(*request: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                raise self.problem
            return self.handle(*request)

        setattr(self.server, "handle", handle)  # noqa: B010 - a method is replaced

    def __exit__(self, *_: object) -> None:
        setattr(self.server, "handle", self.handle)  # noqa: B010
        assert self.left < 0, "the call that was to fail never came"


@pytest.mark.parametrize("name", [TINY, SLIDING])
def test_the_daemon_forgets_everything_between_load_and_save(
    name: str, appliance: FakeAppliance, make_store: Make
) -> None:
    """A restart without a cold store: parents are gone, so a whole past is stored from its beginning."""
    store = make_store(build(name))
    converse(store)
    assert converse(store, appliance.restart)[0] == 40
    said = tokens(45)
    again = store.load(said)
    assert again.reuse.num_tokens in (0, 40)
    assert torch.equal(answer(store.model, said, again), answer(store.model, said))


def test_evicted_parents_are_stored_again(appliance: FakeAppliance, make_store: Make) -> None:
    store = make_store(build(TINY))
    cache = store.load(tokens(61))
    output = answer(store.model, tokens(61), cache)
    assert cache.save().num_stored == 9
    assert appliance.evict_all() == 9
    longer = torch.cat([output, tokens(30, seed=2)], 1)
    answer(store.model, longer, cache)
    assert cache.save().num_stored == 14
    assert store.load(longer).reuse.num_tokens == 96


@pytest.mark.parametrize("name", [TINY, SLIDING])
def test_a_full_appliance(name: str) -> None:
    """Room for a dozen blocks: what has none is refused, evicted, and computed."""
    model = build(name)
    with PrefixStore(model, FakeAppliance().client(), block_tokens=8) as roomy:
        block_bytes = roomy.block_bytes
    appliance = FakeAppliance(capacity_bytes=12 * block_bytes)
    with PrefixStore(model, appliance.client(), block_tokens=8) as store:
        for _ in range(2):
            converse(store)
            for seed in range(4):
                prompt = tokens(90, seed=seed)
                cache = store.load(prompt)
                assert torch.equal(answer(model, prompt, cache), answer(model, prompt))
                cache.save()
        assert appliance.num_evicted > 0
        assert store.guard.causes == {}
    assert appliance.check_integrity() == []


@pytest.mark.parametrize("name", [TINY, SLIDING])
def test_blocks_that_leave_while_they_are_read(name: str, appliance: FakeAppliance, make_store: Make) -> None:
    """Looked up, then gone: less is loaded, or nothing, and never half of something."""
    model = build(name)
    store = make_store(model)
    converse(store)
    said = torch.cat([answer(model, tokens(45)), tokens(20, seed=0)], 1)
    original = appliance.server.handle
    num_acquired = itertools.count()

    def handle(attachment: Any, call: str, request: Any) -> Any:
        if call == "Acquire" and next(num_acquired) == 0:
            books = appliance.server.state.store
            while len(books.blocks) > 4 * len(store.kinds):  # leaves first
                leaves = [key for key, block in books.blocks.items() if not block.num_children]
                books.evict(leaves[-1])
        return original(attachment, call, request)

    setattr(appliance.server, "handle", handle)  # noqa: B010 - a method is replaced
    store._carrier._buffer.fill_(255)  # what is not read would be seen
    cache = store.load(said)
    assert next(num_acquired) > 0
    assert cache.reuse.num_tokens == (32 if name == TINY else 0), "windows are gone with the last blocks"
    assert torch.equal(answer(model, said, cache), answer(model, said))
    assert cache.save().why_not == ""


def test_a_bug_in_here_is_a_miss(
    make_store: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(build(TINY), guard=guard(Breaker(max_failures=100)))
    assert converse(store) == [0, 56, 88]

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(carrier, "scatter", broken)
    assert converse(store) == [0, 0, 0]
    assert store.guard.causes == {PLUGIN_BUG: 3}
    assert all(record.exc_info is not None for record in caplog.records), "told with its trace"


def test_a_bug_in_the_hook_never_reaches_generate(make_store: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(build(TINY))
    cache = store.load(tokens(45))

    def broken(*_: Any) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cache.ledger, "read", broken)
    assert torch.equal(answer(store.model, tokens(45), cache), answer(store.model, tokens(45)))
    assert cache.save().why_not == PLUGIN_BUG


def test_sessions_say_how_urgent_they_are(appliance: FakeAppliance, make_store: Make) -> None:
    told = []
    original = appliance.server.handle

    def handle(attachment: Any, call: str, request: Any) -> Any:
        if "Session" in call:
            told.append(NAMES[request.urgency] if call == "UpdateSession" else call)
        return original(attachment, call, request)

    setattr(appliance.server, "handle", handle)  # noqa: B010 - a method is replaced
    store = make_store(build(TINY))
    converse(store)
    assert told == ["PREFILL", "DECODING", "WAITING"] * NUM_TURNS + ["EndSession"]
    told.clear()
    trunk = store.load(tokens(45), session="trunk")
    trunk.fork("branch").end()
    trunk.end()
    assert told == ["PREFILL", "ForkSession", "EndSession", "EndSession"]
    told.clear()
    nameless = store.load(tokens(45))
    answer(store.model, tokens(45), nameless)
    nameless.save()
    nameless.end()
    assert told == []
